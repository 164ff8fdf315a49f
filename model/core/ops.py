"""Loss, normalisation, rotary positions and attention of a GPT in few passes over memory.

The logits of a GPT are its largest activation: 2,048 tokens x 50,304 ids x 4 bytes is 412 MB, which
log-softmax and its backward would stream through memory about five times. Here they are made a
chunk of tokens at a time, small enough to stay in cache, and the gradient of the chunk is formed
in the same pass, so that the backward pass has nothing left to compute.

RMSNorm: PyTorch 2.13 computes it on a CPU as six operations and its backward pass as ten. This is
half of them: 4.8 against 9.0 ms for both passes at (4, 512, 384), float32, 2 cores (train/LOG.md).
"""

import math

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

IGNORE = -1  # a target that does not count


def linear_cross_entropy(h, weight, targets, vocab_size):
    """Mean cross-entropy of softmax(h @ weight.T) over the targets that count, a float32 scalar;
    0 where none counts.

    h (N, C); weight (V, C), V >= vocab_size, rows past it are padding that gets no probability;
    targets (N,) int64, IGNORE where none.
    """
    if h.is_cuda and torch.compiler.is_compiling():
        # Inductor fuses this into one pass over bfloat16 logits, faster than chunks on a GPU.
        z = mask_padding(F.linear(h, weight.to(h.dtype)).float(), vocab_size)
        total = F.cross_entropy(z, targets, ignore_index=IGNORE, reduction="sum")
        return total / (targets != IGNORE).sum().clamp(min=1)
    if torch.is_autocast_enabled(h.device.type):
        h = h.to(torch.get_autocast_dtype(h.device.type))
    return _ChunkedLinearCrossEntropy.apply(h, weight.to(h.dtype), targets, vocab_size)


def token_logprobs(x, head, targets, vocab_size):
    """Return the log probability (N,) float32 of each target, given the states before it.

    x (N, C); head (V, C) is the output layer, whose rows from vocab_size on are padding; targets
    (N,) int64. The result is 0 where the target is IGNORE. A chunk of logits exists at a time; the
    backward pass computes it again.
    """
    rows = chunk_rows(head.size(0), x.device.type)
    chunks = zip(x.split(rows), targets.split(rows))
    return torch.cat([checkpoint(_chunk_logprobs, *chunk, head, vocab_size, use_reentrant=False)
                      for chunk in chunks])


def _chunk_logprobs(x, targets, head, vocab_size):
    logits = F.linear(x, head).float()[:, :vocab_size]  # (n, vocab_size)
    return -F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")


def mask_padding(logits, vocab_size):
    """Logits (..., V) with -inf where the id is padding."""
    if logits.size(-1) > vocab_size:
        padding = torch.arange(logits.size(-1), device=logits.device) >= vocab_size
        logits = logits.masked_fill(padding, float("-inf"))
    return logits


def chunk_rows(n_columns, device_type):
    """Rows of a chunk, a power of two: on a CPU 32 MB of float32 logits, which its caches hold;
    elsewhere 256 MB, for fewer and larger kernels. Where these are fewer than 128 rows, 256: a
    product of 32 rows with 151,936 columns waits for its weights, at a quarter of the speed."""
    limit = 1 << (23 if device_type == "cpu" else 26)
    rows = 1 << max(0, (limit // n_columns).bit_length() - 1)
    return rows if rows >= 128 else 256


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    """Forward makes d loss / d logits in passing, so that nothing is computed twice."""

    @staticmethod
    def forward(ctx, h, weight, targets, vocab_size):
        counts, index = targets != IGNORE, targets.clamp(min=0)[:, None]
        share = counts / counts.sum().clamp(min=1)  # (N,) of each row in the mean
        wants_grad, trained = any(ctx.needs_input_grad[:2]), ctx.needs_input_grad[1]
        rows = min(chunk_rows(weight.size(0), h.device.type), max(1, h.size(0)))
        total = h.new_zeros((), dtype=torch.float32)
        # Made once: a fresh chunk of memory for every product costs as much as its softmax.
        dlogits = h.new_empty(h.size(0) if trained else rows, weight.size(0))
        dh = torch.empty_like(h) if wants_grad else None
        full = None if h.dtype == torch.float32 else dlogits.new_empty(
            rows, weight.size(0), dtype=torch.float32)
        for start in range(0, h.size(0), rows):
            chunk = slice(start, start + rows)
            n = index[chunk].size(0)
            d = dlogits[chunk] if trained else dlogits[:n]
            z = torch.mm(h[chunk], weight.t(), out=d)  # (n, V) logits, in h's precision
            z = z if full is None else full[:n].copy_(z)
            loss, p = _losses(z, index[chunk], vocab_size)
            total += (loss * share[chunk]).sum()
            if wants_grad:
                d = d if p is d else d.copy_(p)
                torch.mm(d, weight, out=dh[chunk])
        if wants_grad:
            ctx.save_for_backward(h, dh, dlogits if trained else None, share)
        return total

    @staticmethod
    def backward(ctx, grad):
        h, dh, dlogits, share = ctx.saved_tensors
        # The scale comes last and in float32: float16 would lose 1 / N, and rows that do not count.
        scale = (grad * share)[:, None]
        dweight = None if dlogits is None else dlogits.t() @ (h * scale).to(h.dtype)
        return (dh * scale).to(h.dtype), dweight, None, None


def _losses(z, index, vocab_size):
    """Loss (n,) of each row of logits z (n, V) float32 at its index (n, 1), and d loss / d z. z is
    overwritten."""
    z[:, vocab_size:] = float("-inf")
    largest, target = z.amax(1), z.gather(1, index)[:, 0]
    p = torch.softmax(z, 1, out=z if z.device.type == "cpu" else None)
    # log sum exp z by way of the largest z, whose p is at least 1 / V: saves an exp of the chunk.
    loss = largest - p.amax(1).log() - target
    return loss, p.scatter_add_(1, index, p.new_full(index.shape, -1.0))


def rms_norm(x, weight=None, eps=1e-5):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension of x (..., D); weight (D,) if any.
    Computed in float32, returned in the precision of x (RMSNorm, arXiv:1910.07467)."""
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        if torch.is_grad_enabled():
            return _RMSNorm.apply(x, weight, eps)
        n, _ = normalized(x, eps)
        return (n if weight is None else n * weight).to(x.dtype)
    weight = None if weight is None else weight.float()  # FSDP hands out bfloat16 weights
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps).type_as(x)


def normalized(x, eps):
    """x (..., D) of mean square 1, and what it was multiplied by (..., 1), both float32."""
    z = x.float()
    scale = torch.rsqrt(torch.linalg.vecdot(z, z)[..., None] / z.size(-1) + eps)
    return z * scale, scale


class _RMSNorm(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x, weight, eps):
        n, scale = normalized(x, eps)
        ctx.save_for_backward(n, scale, weight)
        return (n if weight is None else n * weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        n, scale, weight = ctx.saved_tensors
        g, dweight = grad.float(), None
        if weight is not None:
            if ctx.needs_input_grad[1]:
                dweight = (g * n).flatten(0, -2).sum(0).to(weight.dtype)
            g = g * weight
        # n has length sqrt(D): what changes along it changes only the length, which is divided out.
        along = torch.linalg.vecdot(g, n)[..., None] / n.size(-1)
        return torch.addcmul(g, n, along, value=-1).mul_(scale).to(grad.dtype), dweight, None


def apply_dropout(x, p, training=True):
    """F.dropout. In bfloat16 on a CPU, where that takes twice as long (train/LOG.md), of 16 bits a
    draw, four to a random number: the share dropped is p to 2**-17."""
    if not (p and training) or x.device.type != "cpu" or x.dtype != torch.bfloat16:
        return F.dropout(x, p, training)
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-2 ** 63, None)
    kept = bits.view(torch.int16)[:x.numel()].view(x.shape) >= round(p * 2 ** 16) - 2 ** 15
    return x * (kept.to(x.dtype) / (1 - p))


def rope_tables(positions, dim, theta):
    """cos, sin (..., dim / 2), float32, of rotary positions (...) (arXiv:2104.09864). Positions in
    float64 stay exact however far a text has come."""
    freq = theta ** (-torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim)
    angles = positions[..., None] * freq
    return angles.cos().float(), angles.sin().float()


def apply_rope(x, cos, sin):
    """Rotate the two halves of the last dimension of x (B, T, H, D): Hugging Face's layout.
    cos, sin (T, 1, D / 2), or (B, T, 1, D / 2) where rows stand at positions of their own."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attend(q, k, v, dropout=0.0, mask=None):
    """Causal attention of q (B, H, T, D) with k, v (B, G, S, D): query i stands at S - T + i, and
    each of the G heads of keys serves H / G heads of queries in turn. Returns (B, H, T, D).
    mask (B, 1, T, S), or (B, 1, S) for T = 1: true where a query sees a key, in place of the causal
    rule."""
    T, S, groups = q.size(2), k.size(2), q.size(1) // k.size(1)
    if T == 1 and not dropout:
        return attend_one(q, k, v, mask)
    k, v = k.to(q.dtype), v.to(q.dtype)  # a cache may keep them in another precision
    # In bfloat16 heads can share their keys, by kernels of GPUs, and on a CPU by PyTorch's with a
    # backward pass of ours; elsewhere the keys are copied.
    shared = groups > 1 and q.dtype == torch.bfloat16 and T == S and mask is None
    if shared and q.device.type == "cpu" and not dropout:
        return _GroupedAttention.apply(q, k, v)
    native = shared and q.is_cuda
    if groups > 1 and not native:
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and T == S <= 1024:
        return attend_in_blocks(q, k, v, dropout, mask)
    if 1 < T < S and mask is None:
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, enable_gqa=native,
                                          is_causal=mask is None and 1 < T == S)


def attend_one(q, k, v, mask):
    """The same for one query a row (sampling): the heads that share keys stand in one product, as
    queries of one text do. On a CPU PyTorch's kernel is the faster for one text in float32, and in
    bfloat16 where there are tiles for it (without AMX it takes two to four times as long); on a GPU
    cuDNN makes its plans anew for every number of keys, and in a graph the compiler has the loops
    joined."""
    (B, H, _, D), G = q.shape, k.size(1)
    if (q.device.type == "cpu" and not torch.compiler.is_compiling()
            and (B == 1 if k.dtype == torch.float32 else has_tiles())):
        rows = q.reshape(B, G, -1, D).to(k.dtype)  # (B, G, H / G, D)
        mask = None if mask is None else mask.view(B, 1, 1, -1)
        return F.scaled_dot_product_attention(rows, k, v, mask).view(B, H, 1, D).to(q.dtype)
    rows = (q * D ** -0.5).reshape(B * G, -1, D).to(k.dtype)  # (B G, H / G, D)
    k, v = k.flatten(0, 1), v.flatten(0, 1)  # (B G, S, D), views
    scores = torch.bmm(rows, k.transpose(1, 2))  # (B G, H / G, S)
    if mask is not None:
        mask = mask.view(B, 1, -1)  # (B, 1, S)
        scores = scores.view(B, -1, k.size(1)).masked_fill(~mask, -math.inf).view_as(scores)
    return torch.bmm(scores.softmax(-1), v).view(B, H, 1, D).to(q.dtype)


def has_tiles():
    """Whether this CPU has AMX."""
    return getattr(torch.cpu, "_is_amx_tile_supported", bool)()


def attend_in_blocks(q, k, v, dropout, mask=None, size=128):
    """The same in plain matrix products: a block of queries meets the keys up to its own end.

    On a CPU twice as fast as the kernel of PyTorch 2.13 (both passes: 18 and 37 ms at B 4, H 6,
    T 512, D 64, bfloat16, 2 cores). It keeps the probabilities, hence the limit on T above."""
    (B, H, T, _), shape = q.shape, q.shape
    q, k, v = (t.flatten(0, 1) for t in (q * q.size(-1) ** -0.5, k, v))  # (B * H, T, D)
    hidden = torch.full((T, T), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    if mask is not None:  # (B, 1, T, T)
        hidden = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -math.inf)
    blocks = []
    for start in range(0, T, size):
        end = min(start + size, T)
        scores = (q[:, start:end] @ k[:, :end].transpose(1, 2)).view(B, H, end - start, end)
        p = apply_dropout((scores + hidden[..., start:end, :end]).softmax(-1), dropout)
        blocks.append(p.flatten(0, 1) @ v[:, :end])
    return torch.cat(blocks, dim=1).view(shape)


class _GroupedAttention(torch.autograd.Function):
    """PyTorch's kernel, whose own backward pass on a CPU takes three times as long as plain
    products. These make the probabilities again: nothing is kept but q, k and v (train/LOG.md)."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    @staticmethod
    def backward(ctx, grad):
        # One operation to the compiler, whose own softmax (PyTorch 2.13) takes twice as long. Eager
        # it is the plain function: to call the operation imports for seconds first.
        f = one_operation if torch.compiler.is_compiling() else grouped_attention_backward
        return f(grad, *ctx.saved_tensors)


def grouped_attention_backward(
        grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of causal attention by q (B, H, T, D) and k, v (B, G, T, D), grad (B, H, T, D)
    being that by its result: a block of queries at a time, with the keys up to its own end."""
    (B, H, T, D), G, scale = q.shape, k.size(1), q.size(-1) ** -0.5
    size = max(128, T // 8)  # of a block: few sums in bfloat16
    hidden = q.new_full((size, size), -math.inf).triu_(1)
    dq, dk, dv = (t.new_zeros(t.shape) for t in (q, k, v))
    scaled, k, v = q * scale, *(t.reshape(B * G, T, D) for t in (k, v))
    for start in range(0, T, size):
        end = min(start + size, T)
        n = end - start
        # The heads that share keys are the rows of one product, R of them. All is made dense: a
        # product would copy what is not, and slowly where it is transposed.
        qs, g = (t[:, :, start:end].reshape(B * G, -1, D) for t in (scaled, grad))  # (BG, R, D)
        ks, vs = (t[:, :end].contiguous() for t in (k, v))  # (BG, end, D)
        p = torch.bmm(qs, ks.transpose(1, 2))  # (BG, R, end)
        p.view(-1, n, end)[..., start:].add_(hidden[:n, :n])
        p = p.softmax(-1)
        ds = torch._softmax_backward_data(torch.bmm(g, vs.transpose(1, 2)), p, -1, p.dtype)
        dq[:, :, start:end] = torch.bmm(ds, ks).view(B, H, n, D)
        dk.view(B * G, T, D)[:, :end] += torch.bmm(ds.transpose(1, 2), qs)
        dv.view(B * G, T, D)[:, :end] += torch.bmm(p.transpose(1, 2), g)
    return dq.mul_(scale), dk, dv


one_operation = torch.library.custom_op("irongpt::grouped_attention_backward",
                                       grouped_attention_backward, mutates_args=())


@one_operation.register_fake
def _(grad, q, k, v):
    return tuple(t.new_empty(t.shape) for t in (q, k, v))
