"""Loss, normalisation, rotary positions and attention of a GPT, written for few passes over memory.

Shapes: B batch, T queries, S keys, H heads, G heads of keys and values (fewer than H with grouped
queries), D head size, N tokens, C channels, V rows of the output layer (vocabulary and padding).
"""

import functools
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from train.base.errors import UserError

IGNORE = -1  # a target that is not counted

# -----------------------------------------------------------------------------
# the loss: logits (N, V) are the largest activation of a GPT (2,048 tokens x 50,304 ids x
# 4 bytes = 412 MB), so float32 logits exist for a chunk of tokens at a time only; their gradients,
# in the precision of the states, are stored for all tokens

class LinearCrossEntropy(nn.Module):
    """Cross-entropy per token, from the states before the output layer; 0 for targets IGNORE.

    forward(x, weight, targets, vocab_size) -> (...) float32: x (..., C); weight (V, C), whose rows
    from vocab_size on are padding; targets (...) int64. The logits are finish_logits(x @ weight.T).
    A module, so that it can be compiled separately. The constructor raises UserError if
    finish_logits() changes its argument in place.
    """

    def __init__(self):
        super().__init__()
        with torch.inference_mode(False):  # counts versions of tensors
            z = torch.zeros(1, 1)
            finish_logits(z)
        if z._version:  # the derivative needs the argument
            raise UserError("finish_logits (model/core/ops.py) changes its argument in place; "
                            "expected a new tensor, e.g. z.tanh() instead of z.tanh_()")

    def forward(self, x, weight, targets, vocab_size):
        h = x.flatten(0, -2)  # (N, C)
        # Without gradients, needs_input_grad of the autograd function must be false.
        weight = weight if torch.is_grad_enabled() else weight.detach()
        cross_entropy = _ChunkedCrossEntropy.apply
        if h.is_cuda and torch.compiler.is_compiling():
            cross_entropy = whole_cross_entropy
        elif torch.is_autocast_enabled(h.device.type):
            h = h.to(torch.get_autocast_dtype(h.device.type))
        losses = cross_entropy(h, weight.to(h.dtype), targets.flatten(), vocab_size)
        return losses.view(targets.shape).where(targets != IGNORE, 0)


class SampledCrossEntropy(LinearCrossEntropy):
    """LinearCrossEntropy, in training estimated from sampled token ids (arXiv:1412.2007).

    Faster for a large vocabulary; exact in eval mode. before_step(it) must be called before each
    step; it samples `n_samples` ids, a function of `seed` and `it`.

    The probability p that an id is sampled is proportional to its relative frequency in `targets`,
    training targets (int64, on the CPU), plus 1 / vocab_size; it is at most 1, and the sum is
    n_samples. The exponential of a sampled logit is divided by p, so that the estimated sum of
    exponentials is unbiased. Without the term 1 / vocab_size, the logits of rare ids hardly
    decrease.
    """

    def __init__(self, targets, vocab_size, n_samples, seed):
        super().__init__()
        counts = torch.bincount(targets[targets != IGNORE], minlength=vocab_size).double()
        share = counts / counts.sum() + 1 / vocab_size  # (V,)
        ordered = share.sort(descending=True).values
        rest = ordered.flip(0).cumsum(0).flip(0)
        # constant[k]: of proportionality, if the k most frequent ids have p = 1. The smallest k is
        # used with which no other p exceeds 1, up to rounding.
        constant = (n_samples - torch.arange(vocab_size)) / rest
        self.p = (share * constant[(constant * ordered < 1 + 1e-9).int().argmax()]).clamp(max=1)
        self.seed = seed
        self.register_buffer("ids", torch.zeros(n_samples, dtype=torch.int64), persistent=False)
        self.register_buffer("log_p", torch.zeros(n_samples), persistent=False)
        self.before_step(0)

    def before_step(self, it):
        """Sample the ids of step `it`, in place, the same on every rank.

        Systematic sampling: the ids at points with distance 1, from a random start, in the
        cumulative sum of p, the probabilities of being sampled. No id is sampled twice, as p is at
        most 1.
        """
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + it) % 2**63)
        points = torch.arange(len(self.ids)) + torch.rand(1, generator=generator).double()
        ids = torch.searchsorted(self.p.cumsum(0), points).clamp(max=len(self.p) - 1)
        self.ids.copy_(ids)
        self.log_p.copy_(self.p[ids].log())

    def forward(self, x, weight, targets, vocab_size):
        if not self.training:
            return super().forward(x, weight, targets, vocab_size)
        h = x.flatten(0, -2)  # (N, C)
        if torch.is_autocast_enabled(h.device.type):
            h = h.to(torch.get_autocast_dtype(h.device.type))
        needed = torch.cat((self.ids, targets.where(targets != IGNORE, 0).flatten()))
        sampled, own = F.embedding(needed, weight).to(h.dtype).tensor_split([len(self.ids)])
        own = finish_logits((h * own).sum(-1).float())  # (N,)
        z = finish_logits(F.linear(h, sampled).float()) - self.log_p  # (N, n_samples)
        z = z.masked_fill(self.ids == targets.reshape(-1, 1), -math.inf)  # `own` has the target
        losses = torch.logaddexp(own, z.logsumexp(-1)) - own
        return losses.view(targets.shape).where(targets != IGNORE, 0)


def whole_cross_entropy(h, weight, targets, vocab_size):
    """Return the losses (N,) of LinearCrossEntropy for h (N, C), from all logits at once.

    For torch.compile on a GPU: Inductor fuses it into one pass over bfloat16 logits, which is
    faster than chunks.
    """
    z = finish_logits(F.linear(h, weight).float())
    padding = torch.arange(z.size(-1), device=z.device) >= vocab_size
    return F.cross_entropy(z.masked_fill(padding, -math.inf), targets, reduction="none",
                           ignore_index=IGNORE)


# Edit this function to change the logits in all losses and in sampling, e.g. to
# 30 * torch.tanh(z / 30). It must be elementwise and must not change z in place.
def finish_logits(z):
    """Return the logits for the output z (..., V) of the last layer: here z itself."""
    return z


def token_logprobs(model, x, targets):
    """Return the log probabilities (N,) of targets (N,) for the states x (N, C) that predict them.

    float32; 0 where a target is IGNORE. Logits are computed in chunks, and again in the backward
    pass, to save memory. model: a GPT.
    """
    def logprobs(x, targets):
        return -F.cross_entropy(model.logits(x), targets, ignore_index=IGNORE, reduction="none")
    rows = chunk_rows(model.config.padded_vocab_size, x.device.type)
    return torch.cat([checkpoint(logprobs, *chunk, use_reentrant=False)
                      for chunk in zip(x.split(rows), targets.split(rows))])


def chunk_rows(n_columns, device_type):
    """Return a chunk's row count, a power of two, for logits with n_columns in float32.

    It is the largest with up to 256 MB, 32 MB on a CPU; 256 if these are fewer than 128 rows.
    """
    rows = (1 << (23 if device_type == "cpu" else 26)) // n_columns
    return 1 << (rows.bit_length() - 1) if rows >= 128 else 256


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The autograd function of LinearCrossEntropy, with logits in chunks of rows.

    apply(h (N, C), weight (V, C), targets (N,), vocab_size) -> losses (N,) float32. The forward
    pass also stores the gradient of each loss with respect to its row of h and, if `weight` needs a
    gradient, its logits (N, V), in the dtype of h. The backward pass has one matrix product, for
    the gradient of `weight`.
    """

    @staticmethod
    def forward(ctx, h, weight, targets, vocab_size):
        # Not clamp: another negative target is an error.
        index = targets.where(targets != IGNORE, 0)[:, None]
        N, V = h.size(0), weight.size(0)
        rows = min(chunk_rows(V, h.device.type), max(1, N))
        losses = h.new_empty(N, dtype=torch.float32)
        # Allocated once: new memory per product would cost as much as a softmax.
        dlogits = h.new_empty(N if ctx.needs_input_grad[1] else rows, V)
        dh = torch.empty_like(h) if any(ctx.needs_input_grad) else None
        full = None if h.dtype == torch.float32 else dlogits.new_empty(rows, V, dtype=torch.float32)
        for start in range(0, N, rows):
            chunk = slice(start, start + rows)
            n = index[chunk].size(0)
            d = dlogits[chunk] if ctx.needs_input_grad[1] else dlogits[:n]
            z = torch.mm(h[chunk], weight.t(), out=d)  # (n, V) logits, in h's precision
            z = z if full is None else full[:n].copy_(z)  # float32
            logits = finish_logits(z)
            logits[:, vocab_size:] = -math.inf
            largest = logits.amax(1)
            target = logits.gather(1, index[chunk])[:, 0]
            p = torch.softmax(logits, 1, out=logits if z.device.type == "cpu" else None)
            # logsumexp(z) from the largest z and p, at least 1 / V: saves an exp of the chunk.
            losses[chunk] = largest - p.amax(1).log() - target
            p.scatter_add_(1, index[chunk], p.new_full((n, 1), -1.0))  # d loss / d logits
            if logits is not z:  # d loss / d z
                p = torch.func.vjp(finish_logits, z)[1](p)[0]
            if dh is not None:
                torch.mm(d if p is d else d.copy_(p), weight, out=dh[chunk])
        ctx.save_for_backward(h, dh, dlogits if ctx.needs_input_grad[1] else None)
        return losses

    @staticmethod
    def backward(ctx, grad):
        h, dh, dlogits = ctx.saved_tensors
        scale = grad[:, None]  # last, in float32: 1 / N may underflow in float16
        dweight = None if dlogits is None else dlogits.t() @ (h * scale).to(h.dtype)
        return (dh * scale).to(h.dtype), dweight, None, None


# -----------------------------------------------------------------------------
# layers

class RMSNorm(torch.autograd.Function):
    """RMSNorm without weights on a CPU: apply(x, eps) = x / sqrt(mean(x^2) + eps), x float32.

    It takes half the time of PyTorch 2.13's. The backward pass removes the component of the
    gradient along the result, because a longer x has the same norm.
    """

    @staticmethod
    def forward(ctx, x, eps):
        scale = torch.rsqrt(torch.linalg.vecdot(x, x)[..., None] / x.size(-1) + eps)  # (..., 1)
        n = x * scale
        if ctx is not None:
            ctx.save_for_backward(n, scale)
        return n

    @staticmethod
    def backward(ctx, g):
        n, scale = ctx.saved_tensors
        along = torch.linalg.vecdot(g, n)[..., None] / n.size(-1)
        return torch.addcmul(g, n, along, value=-1).mul_(scale), None


# For use without gradients: the overhead of apply() is as long as the norm of one token.
rms_norm_no_grad = functools.partial(RMSNorm.forward, None)


def apply_dropout(x, p, training=True):
    """Return F.dropout(x, p, training); for bfloat16 on a CPU a faster equivalent."""
    if not (p and training and x.device.type == "cpu" and x.dtype == torch.bfloat16):
        return F.dropout(x, p, training)
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-2 ** 63, None)
    mask = bits.view(torch.int16)[:x.numel()].view(x.shape) >= round(p * 2 ** 16) - 2 ** 15
    return x * (mask.to(x.dtype) / (1 - p))


def fused_linear(x, *layers):
    """Return the outputs of several linear layers for x (..., C), concatenated in dimension -1.

    One matrix product for many tokens, or if they are parts of a ConcatLinear
    (model/core/packed.py).
    """
    whole = getattr(layers[0], "whole", None)
    if whole and [*layers] == whole.parts:
        return whole(x)
    is_plain = all(type(layer).forward is nn.Linear.forward
                   and (layer.bias is None) == (layers[0].bias is None) for layer in layers)
    if not is_plain or x.numel() <= 64 * x.size(-1):
        return torch.cat([layer(x) for layer in layers], dim=-1)
    kind = "cpu" if x.is_meta else x.device.type
    with torch.autocast(kind, enabled=False):  # under autocast, cat() refuses the other half dtype
        bias = None if layers[0].bias is None else torch.cat([m.bias for m in layers])
        weight = torch.cat([m.weight for m in layers])
    return F.linear(x, weight, bias)


def save_matrix_products():
    """Return the two contexts of selective checkpointing, which saves products and attention.

    It is a context_fn for torch.utils.checkpoint. A matrix product costs about C times as much as
    the elementwise operations that are recomputed.
    """
    aten = torch.ops.aten
    saved = [aten.mm, aten.addmm, aten._scaled_dot_product_flash_attention,
             aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_efficient_attention,
             aten._scaled_dot_product_flash_attention_for_cpu, aten._grouped_mm]
    return create_selective_checkpoint_contexts([op.default for op in saved])


# -----------------------------------------------------------------------------
# rotary positions

def rope_table(positions, dim, theta, scaling=()):
    """Return cosines and sines of the rotary angles (arXiv:2104.09864) at float `positions` (...).

    Stacked, (2, ..., dim / 2) float32. float64 positions avoid rounding errors in long texts.
    dim: the head size. theta: the base. scaling: as for rope_frequencies().
    """
    angles = positions[..., None] * rope_frequencies(dim, theta, scaling, positions.device)
    return torch.stack((angles.cos(), angles.sin())).float()


def rope_frequencies(dim, theta, scaling=(), device=None):
    """Return the rotary frequencies theta^(-2 i / dim) in radians per token, (dim / 2,) float32.

    scaling extends the context. (): unchanged. (factor,): all frequencies are divided by factor.
    (factor, low, high, original): Llama 3, with `original` the context length before; wavelengths
    below original / high stay, those above original / low are multiplied by factor, and frequencies
    between are interpolated.
    """
    freq = theta ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    if len(scaling) < 2:
        return freq / scaling[0] if scaling else freq
    factor, low, high, original = scaling
    turns = original * freq / (2 * math.pi)  # full turns within the original context length
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return freq * (share + (1 - share) / factor)


def apply_rope(x, rope):
    """Return queries or keys x (B, T, H, D) rotated by their positions.

    Elements i and i + D / 2 are a pair, as in Hugging Face. rope: (2, T, 1, D / 2), cosines and
    sines; (2, B, T, 1, D / 2) if positions differ by row.
    """
    a, b = x.chunk(2, dim=-1)
    cos, sin = rope.to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


# -----------------------------------------------------------------------------
# n-grams

# The history of a token, an int64: the up to three tokens before it. The lowest ID_BITS bits are
# 1 + the id of the last one, the next bits that of the token before; 0: no token.
ID_BITS = 20
HISTORY_MASK = (1 << 3 * ID_BITS) - 1
ID_MASK = (1 << ID_BITS) - 1


def extend_history(history, ids):
    """Return the history of the token that follows `ids`, tokens with the history `history`.

    Ints, or int64 tensors of one shape; a history packs three ids, see ID_BITS.
    """
    return (history << ID_BITS | ids + 1) & HISTORY_MASK


def histories(idx, first=0):
    """Return the histories (B, T) of the tokens idx (B, T): the up to three tokens before each.

    int64, see ID_BITS; ids must be below ID_MASK.
    first: the history of the first token of each row, 0 (a text begins) or a tensor (B, 1).
    """
    T = idx.size(1)
    ids = F.pad(idx + 1, (3, 0))  # (B, 3 + T)
    history = sum(ids[:, 2 - i:2 - i + T] << ID_BITS * i for i in range(3))
    for t in range(min(3, T)):  # tokens whose history begins before idx
        history[:, t:t + 1] |= first << ID_BITS * t & HISTORY_MASK
    return history


def ngram_rows(idx, history, n_rows):
    """Return (B, T, 2): the rows, hashes below n_rows, of the 3-gram and 4-gram up to each token.

    idx (B, T): token ids. history (B, T): from histories().
    """
    before = torch.stack((history & HISTORY_MASK >> ID_BITS, history), dim=-1)
    # Multiplicative hashing: the products wrap around, and their high bits depend on all tokens.
    return ((before * 0x1E3779B97F4A7C15 + idx[..., None]) * 0x3C6EF372FE94F82B >> 32) % n_rows


# -----------------------------------------------------------------------------
# attention

def offset_keys(k, mask=None, before=None):
    """Return the keys k (B, T, G, D) with two quarters of D replaced by the previous token's.

    These are the second and fourth, with the slowest rotary frequencies; zeros for the first token.
    A query can thus find a token by the one before it. mask: as for attend(); the previous token is
    then the latest earlier one that the token sees. before (B, 1, G, D): in decoding, the original
    key of the token before. From modded-nanogpt's "partial key offset", where half of D is not
    rotated.
    """
    def quarters(x):
        return x.unflatten(-1, (2, 2, -1)).unbind(-2)  # first and third, second and fourth
    own, moved = quarters(k)  # (B, T, G, 2, D / 4) each
    first = torch.zeros_like(moved[:, :1]) if before is None else quarters(before)[1]
    moved = torch.cat((first, moved), dim=1)  # (B, T + 1, ...)
    if mask is None:
        moved = moved[:, :-1]
    else:
        B, T = k.shape[:2]
        earlier = mask[:, 0].expand(-1, T, -1).tril(-1)  # (B or 1, T, T)
        index = (earlier * torch.arange(1, T + 1, device=k.device)).amax(-1).expand(B, -1)
        moved = moved[torch.arange(B, device=k.device)[:, None], index]  # 0: no earlier one
    return torch.stack((own, moved), dim=-2).flatten(-3)


def attend(q, k, v, dropout=0.0, mask=None, causal=True):
    """Return softmax(q k^T / sqrt(D)) v, (B, H, T, D), for q (B, H, T, D) and k, v (B, G, S, D).

    H / G heads share keys. Query i is at position S - T + i. dropout: of the attention weights.
    mask: (B or 1, 1, T or 1, S) bool, for T = 1 also (B or 1, 1, S); true where a query sees a key;
        `None`: causal, also if `causal` is false.
    causal: true if `mask`, unless it is equal for all queries, is false for keys after a query.
    """
    T, S, groups = q.size(2), k.size(2), q.size(1) // k.size(1)
    if T == 1 and not dropout:
        return attend_one(q, k, v, mask)
    k, v = (t.to(q.dtype) for t in (k, v))  # a cache may have a different precision
    # On a GPU, kernels for bfloat16 let heads share keys. Otherwise the keys are copied.
    native = groups > 1 and q.is_cuda and q.dtype == torch.bfloat16 and T == S and mask is None
    if groups > 1 and not native:
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and T == S <= 1024:
        return attend_in_blocks(q, k, v, dropout, mask, causal)
    if 1 < T < S and mask is None:
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, enable_gqa=native,
                                          is_causal=mask is None and T > 1)


def attend_in_blocks(q, k, v, dropout, mask=None, causal=True, size=128):
    """Return attend() for q, k, v (B, H, T, D) by matrix products of `size` queries each.

    Keys after a block are skipped, unless `causal` is false or the mask is the same for all
    queries. For bfloat16 on a CPU it takes half the time of PyTorch 2.13's kernel. It stores the
    attention weights: for short T only.
    """
    shape = B, H, T, D = q.shape
    q, k, v = (t.flatten(0, 1) for t in (q * D ** -0.5, k, v))  # (B * H, T, D)
    bias = torch.full((T, T), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    if mask is not None:
        bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -math.inf)
        bias = bias.expand(-1, -1, T, T)  # (B or 1, 1, T, T)
    blocks = []
    for start in range(0, T, size):
        end = min(start + size, T)
        n = end if causal and (mask is None or mask.size(2) > 1) else T
        scores = (q[:, start:end] @ k[:, :n].transpose(1, 2)).view(B, H, end - start, n)
        p = apply_dropout((scores + bias[..., start:end, :n]).softmax(-1), dropout)
        blocks.append(p.flatten(0, 1) @ v[:, :n])
    return torch.cat(blocks, dim=1).view(shape)


def has_amx():
    """Return whether this CPU has AMX, instructions that multiply bfloat16 matrices."""
    return getattr(torch.cpu, "_is_amx_tile_supported", bool)()


def attend_one(q, k, v, mask):
    """Return attend() for one query per row, as in decoding: q (B, H, 1, D), k, v (B, G, S, D).

    mask: (B or 1, 1, 1, S) or (B or 1, 1, S) bool, or `None`: all keys.
    By matrix products, in which the H / G heads that share keys are the rows. On a CPU,
    F.scaled_dot_product_attention is used where it is faster: in float32 for B = 1, in bfloat16
    with AMX. On a GPU cuDNN plans again for every number of keys, and the compiler fuses
    the products.
    """
    B, H, _, D = q.shape
    G = k.size(1)
    if (q.device.type == "cpu" and not torch.compiler.is_compiling()
            and (B == 1 if k.dtype == torch.float32 else has_amx())):
        rows = q.reshape(B, G, -1, D).to(k.dtype)  # (B, G, H / G, D)
        mask = None if mask is None else mask.view(len(mask), 1, 1, -1)
        return F.scaled_dot_product_attention(rows, k, v, mask).view(B, H, 1, D).to(q.dtype)
    rows = (q * D ** -0.5).reshape(B * G, -1, D).to(k.dtype)  # (B G, H / G, D)
    k, v = k.flatten(0, 1), v.flatten(0, 1)  # (B G, S, D), views
    # The keys come first: in bfloat16 a CPU copies a transposed part of a cache.
    scores = torch.bmm(k, rows.transpose(1, 2)).view(B, G, -1, H // G)  # (B, G, S, H / G)
    if mask is not None:
        scores = scores.masked_fill(~mask.view(len(mask), 1, -1, 1), -math.inf)
    p = scores.transpose(2, 3).softmax(-1).flatten(0, 1)  # (B G, H / G, S)
    return torch.bmm(p, v).view(B, H, 1, D).to(q.dtype)


def limit_to_window(window, k, v, mask, T, causal=True):
    """Return (k, v, mask) for attend() such that queries see only the last `window` keys.

    If `causal` is false: the keys at a distance of at most window // 2. k, v (B, G, S, D): with
    fewer keys if possible. T: number of queries, at the last positions. mask: as for attend(); for
    T > 1 a query may see its own key also where it is false (padding), for T = 1 it must be true
    for the first keys of a row, and only these.
    """
    S = k.size(2)
    if S <= window and causal and (mask is None or T in (1, mask.size(2))):
        return k, v, mask
    index = torch.arange(S, device=k.device)
    if T > 1:
        distance = index[S - T:, None] - index  # (T, S)
        band = (distance >= 0) & (distance < window) if causal else distance.abs() <= window // 2
        # Padding sees itself: without any key its state, and its key in later layers, would be NaN.
        return k, v, band[None, None] if mask is None else mask & band | (distance == 0)
    if mask is None:
        return k[:, :, -window:], v[:, :, -window:], None
    return k, v, mask & (index >= mask.sum(-1, keepdim=True) - window)
