"""Cross-entropy of a linear layer that never holds the float32 logits of the whole batch.

The logits of a GPT are its largest activation: 2,048 tokens x 50,304 ids x 4 bytes is 412 MB, which
log-softmax and its backward would stream through memory about five times. Here they are made a
chunk of tokens at a time, small enough to stay in cache, and the gradient of the chunk is formed
in the same pass, so that the backward pass has nothing left to compute.
"""

import torch
import torch.nn.functional as F

IGNORE = -1  # a target that does not count


def linear_cross_entropy(h, weight, targets, vocab_size, softcap=0.0):
    """Mean cross-entropy of softmax(h @ weight.T) over the targets that count.

    h (N, C); weight (V, C), V >= vocab_size, rows past it are padding that gets no probability;
    targets (N,) int64, IGNORE where none; softcap c > 0 replaces logits z by c * tanh(z / c)
    (Gemma 2, arXiv:2408.00118). Returns a float32 scalar.
    """
    if h.is_cuda and torch.compiler.is_compiling():
        # Inductor fuses this into one pass over bfloat16 logits, faster than chunks on a GPU.
        return F.cross_entropy(mask_padding(soft_cap(F.linear(h, weight).float(), softcap), vocab_size),
                               targets, ignore_index=IGNORE)
    return _ChunkedLinearCrossEntropy.apply(h, weight.to(h.dtype), targets, vocab_size, softcap)


def soft_cap(logits, cap):
    return cap * torch.tanh(logits / cap) if cap else logits


def mask_padding(logits, vocab_size):
    """Logits (..., V) with -inf where the id is padding."""
    if logits.size(-1) > vocab_size:
        padding = torch.arange(logits.size(-1), device=logits.device) >= vocab_size
        logits = logits.masked_fill(padding, float("-inf"))
    return logits


def chunk_rows(n_rows, n_columns, limit=1 << 23):
    """Rows of a chunk: at most `limit` logits (32 MB of float32), a power of two, at least 32."""
    return max(32, min(n_rows, 1 << max(0, (limit // n_columns).bit_length() - 1)))


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    """The gradients are those of the mean loss, made in forward; backward only scales them."""

    @staticmethod
    def forward(ctx, h, weight, targets, vocab_size, softcap):
        n, total = (targets != IGNORE).sum().clamp(min=1), h.new_zeros((), dtype=torch.float32)
        wants_grad = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        dh = torch.empty_like(h) if wants_grad else None
        dlogits = h.new_empty(h.size(0), weight.size(0)) if wants_grad else None
        rows = chunk_rows(h.size(0), weight.size(0))
        for a in range(0, h.size(0), rows):
            chunk = slice(a, a + rows)
            loss, d = _chunk(F.linear(h[chunk], weight).float(), targets[chunk], vocab_size, softcap,
                             wants_grad)
            total += loss
            if wants_grad:
                dlogits[chunk] = d.div_(n)
                torch.mm(dlogits[chunk], weight, out=dh[chunk])
        if wants_grad:
            ctx.save_for_backward(dh, dlogits.t() @ h)
        return total / n

    @staticmethod
    def backward(ctx, grad):
        dh, dweight = ctx.saved_tensors
        return dh * grad.to(dh.dtype), dweight * grad.to(dweight.dtype), None, None, None


def _chunk(z, y, vocab_size, softcap, wants_grad):
    """Summed loss of logits z (n, V) float32 against y (n,), and d loss / d z (made in z's memory)."""
    z = z.div_(softcap).tanh_().mul_(softcap) if softcap else z
    slope = 1 - (z / softcap).square() if softcap and wants_grad else None
    z[:, vocab_size:] = float("-inf")
    counts, index = y != IGNORE, y.clamp(min=0)[:, None]
    picked = z.gather(1, index)[:, 0]
    lse = z.logsumexp(1)
    loss = ((lse - picked) * counts).sum()
    if not wants_grad:
        return loss, None
    z.sub_(lse[:, None]).exp_()
    z.scatter_add_(1, index, z.new_full(index.shape, -1.0))
    z.mul_(counts[:, None])
    return loss, z.mul_(slope) if slope is not None else z
