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
        z = mask_padding(soft_cap(F.linear(h, weight).float(), softcap), vocab_size)
        return F.cross_entropy(z, targets, ignore_index=IGNORE)
    if torch.is_autocast_enabled(h.device.type):
        h = h.to(torch.get_autocast_dtype(h.device.type))
    return _ChunkedLinearCrossEntropy.apply(h, weight.to(h.dtype), targets, vocab_size, softcap)


def soft_cap(logits, cap):
    return cap * torch.tanh(logits / cap) if cap else logits


def mask_padding(logits, vocab_size):
    """Logits (..., V) with -inf where the id is padding."""
    if logits.size(-1) > vocab_size:
        padding = torch.arange(logits.size(-1), device=logits.device) >= vocab_size
        logits = logits.masked_fill(padding, float("-inf"))
    return logits


def chunk_rows(n_columns, device_type):
    """Rows of a chunk, a power of two of at least 32: on a CPU 32 MB of float32 logits, which its
    caches hold; elsewhere 256 MB, for fewer and larger kernels."""
    limit = 1 << (23 if device_type == "cpu" else 26)
    return max(32, 1 << max(0, (limit // n_columns).bit_length() - 1))


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    """Forward makes d loss / d logits in passing, so that nothing is computed twice."""

    @staticmethod
    def forward(ctx, h, weight, targets, vocab_size, softcap):
        counts, index = targets != IGNORE, targets.clamp(min=0)[:, None]
        share = counts / counts.sum().clamp(min=1)  # (N,) of each row in the mean
        wants_grad = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        rows = min(chunk_rows(weight.size(0), h.device.type), max(1, h.size(0)))
        total = h.new_zeros((), dtype=torch.float32)
        # Made once: a fresh chunk of memory for every product costs as much as its softmax.
        dlogits = h.new_empty(h.size(0) if wants_grad else rows, weight.size(0))
        dh = torch.empty_like(h) if wants_grad else None
        full = None if h.dtype == torch.float32 else dlogits.new_empty(
            rows, weight.size(0), dtype=torch.float32)
        for start in range(0, h.size(0), rows):
            chunk = slice(start, start + rows)
            n = index[chunk].size(0)
            d = dlogits[chunk] if wants_grad else dlogits[:n]
            z = torch.mm(h[chunk], weight.t(), out=d)  # (n, V) logits, in h's precision
            z = z if full is None else full[:n].copy_(z)
            loss, p = _losses(z, index[chunk], vocab_size, softcap)
            total += (loss * share[chunk]).sum()
            if wants_grad:
                d = d if p is d else d.copy_(p)
                torch.mm(d, weight, out=dh[chunk])
        if wants_grad:
            ctx.save_for_backward(h, dh, dlogits, share)
        return total

    @staticmethod
    def backward(ctx, grad):
        h, dh, dlogits, share = ctx.saved_tensors
        # The scale comes last and in float32: float16 would lose 1 / N, and rows that do not count.
        scale = (grad * share)[:, None]
        return (dh * scale).to(h.dtype), dlogits.t() @ (h * scale).to(h.dtype), None, None, None


def _losses(z, index, vocab_size, softcap):
    """Loss (n,) of each row of logits z (n, V) float32 at its index (n, 1), and d loss / d z. z is
    overwritten."""
    slope = 1.0
    if softcap:
        z = z.div_(softcap).tanh_()
        slope = 1 - z.square()
        z = z.mul_(softcap)
    z[:, vocab_size:] = float("-inf")
    largest, target = z.amax(1), z.gather(1, index)[:, 0]
    p = torch.softmax(z, 1, out=z if z.device.type == "cpu" else None)
    # log sum exp z by way of the largest z, whose p is at least 1 / V: saves an exp of the chunk.
    loss = largest - p.amax(1).log() - target
    p.scatter_add_(1, index, p.new_full(index.shape, -1.0))
    return loss, p.mul_(slope) if softcap else p
