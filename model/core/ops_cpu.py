"""Attention and dropout in bfloat16 on a CPU, faster than the kernels of PyTorch 2.13.

The results differ from PyTorch's only by rounding. model/core/ops.py chooses the kernel. Times are
in train/LOG.md.
"""

import math

import torch


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
