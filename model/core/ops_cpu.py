"""Attention and dropout in bfloat16 on a CPU, faster than the kernels of PyTorch 2.13.

The results differ from PyTorch's only by rounding. model/core/ops.py chooses the kernel. Times are
in train/LOG.md.
"""

import math

import torch
import torch.nn.functional as F


def has_amx():
    """Return whether this CPU has matrix tiles (AMX)."""
    return getattr(torch.cpu, "_is_amx_tile_supported", bool)()


def dropout_bfloat16(x, p):
    """Dropout with 16 random bits per element, four elements per random number: half the time of
    F.dropout. The probability is p to within 2**-17."""
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-2 ** 63, None)
    mask = bits.view(torch.int16)[:x.numel()].view(x.shape) >= round(p * 2 ** 16) - 2 ** 15
    return x * (mask.to(x.dtype) / (1 - p))


def attend_in_blocks(q, k, v, dropout, mask=None, size=128):
    """Causal attention in matrix products: `size` queries times all keys up to the last query.

    q, k, v (B, H, T, D), mask (B, 1, T, T). Half the time of PyTorch's kernel (forward and
    backward: 18 and 37 ms at B 4, H 6, T 512, D 64, 2 cores). It stores the probabilities, so use
    it for short T only.
    """
    shape, (B, H, T, D) = q.shape, q.shape
    q, k, v = (t.flatten(0, 1) for t in (q * D ** -0.5, k, v))  # (B * H, T, D)
    bias = torch.full((T, T), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    if mask is not None:
        bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -math.inf)  # (B, 1, T, T)
    blocks = []
    for start in range(0, T, size):
        end = min(start + size, T)
        scores = (q[:, start:end] @ k[:, :end].transpose(1, 2)).view(B, H, end - start, end)
        p = (scores + bias[..., start:end, :end]).softmax(-1)
        p = dropout_bfloat16(p, dropout) if dropout else p
        blocks.append(p.flatten(0, 1) @ v[:, :end])
    return torch.cat(blocks, dim=1).view(shape)


class GroupedAttention(torch.autograd.Function):
    """Causal attention of q (B, H, T, D) with grouped k, v (B, G, T, D).

    The forward pass is PyTorch's kernel. PyTorch's backward pass is three times slower than matrix
    products, which recompute the probabilities: only q, k and v are saved.
    """

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    @staticmethod
    def backward(ctx, grad):
        # The compiler gets one opaque operation: the compiled softmax (PyTorch 2.13) is half as
        # fast. Eager code calls the plain function: calling the operation imports for seconds.
        f = compiled_backward if torch.compiler.is_compiling() else grouped_attention_backward
        return f(grad, *ctx.saved_tensors)


def grouped_attention_backward(
        grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q (B, H, T, D) and of k, v (B, G, T, D), given that of the result
    (B, H, T, D): a block of queries at a time, with all keys up to the last query."""
    B, H, T, D = q.shape
    G = k.size(1)
    scale = D ** -0.5
    size = max(128, T // 8)  # of a block: few sums in bfloat16
    bias = q.new_full((size, size), -math.inf).triu_(1)
    dq, dk, dv = (t.new_zeros(t.shape) for t in (q, k, v))
    scaled, k, v = q * scale, *(t.reshape(B * G, T, D) for t in (k, v))
    for start in range(0, T, size):
        end = min(start + size, T)
        n = end - start
        # The R = n H / G queries that share keys are the rows of one product. All operands are
        # made contiguous: a product would copy a transposed operand, slowly.
        qs, g = (t[:, :, start:end].reshape(B * G, -1, D) for t in (scaled, grad))  # (BG, R, D)
        ks, vs = (t[:, :end].contiguous() for t in (k, v))  # (BG, end, D)
        p = torch.bmm(qs, ks.transpose(1, 2))  # (BG, R, end)
        p.view(-1, n, end)[..., start:].add_(bias[:n, :n])
        p = p.softmax(-1)
        ds = torch._softmax_backward_data(torch.bmm(g, vs.transpose(1, 2)), p, -1, p.dtype)
        dq[:, :, start:end] = torch.bmm(ds, ks).view(B, H, n, D)
        dk.view(B * G, T, D)[:, :end] += torch.bmm(ds.transpose(1, 2), qs)
        dv.view(B * G, T, D)[:, :end] += torch.bmm(p.transpose(1, 2), g)
    return dq.mul_(scale), dk, dv


compiled_backward = torch.library.custom_op("irongpt::grouped_attention_backward",
                                            grouped_attention_backward, mutates_args=())


@compiled_backward.register_fake
def _(grad, q, k, v):
    return tuple(t.new_empty(t.shape) for t in (q, k, v))
