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
    """The loss of each token of a GPT from the states before the output layer: the cross-entropies
    of the logits finish_logits(x @ weight.T), float32. GPT.score() computes the mean.

    forward(x, weight, targets, vocab_size) -> (...): x (..., C); weight (V, C), of which the rows
    from vocab_size on are padding without probability; targets (...) int64, IGNORE (-1) for
    positions that do not count, with the loss 0. A module, so that it can be compiled separately.
    The constructor raises UserError if finish_logits() was edited so that it changes its argument
    in place.
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
    """Drop-in replacement for LinearCrossEntropy that is faster in training for a large vocabulary.
    In training mode, the loss is estimated from the logits of the targets and of n_samples sampled
    ids (sampled softmax, arXiv:1412.2007); in eval mode, it is exact. before_step(it) must be
    called before each step `it`; it samples the ids, a function of `seed` and `it`.

    The probability p that an id is sampled is proportional to the frequency of the id in `targets`,
    an int64 tensor of training targets, plus 1 / vocab_size; it is at most 1, and the sum is
    n_samples. The exponential of a sampled logit is divided by p, so that the estimate of the sum
    of exponentials is unbiased. Without the term 1 / vocab_size, the logits of rare ids would
    hardly decrease.
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
        """Replace the sampled ids by the n_samples ids of step `it`, an integer, in place, the same
        on every rank. Systematic sampling: the ids at points with distance 1 in the cumulative sum
        of p, from a random start, so that no id is sampled twice."""
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
    """Return the losses (N,) of LinearCrossEntropy for h (N, C), computed from all logits at once.
    It is for torch.compile on a GPU: Inductor fuses it into one pass over bfloat16 logits, which is
    faster than chunks. weight (V, C), rows from vocab_size on are padding; targets (N,), IGNORE
    (-1): the loss is 0."""
    z = finish_logits(F.linear(h, weight).float())
    padding = torch.arange(z.size(-1), device=z.device) >= vocab_size
    return F.cross_entropy(z.masked_fill(padding, -math.inf), targets, reduction="none",
                           ignore_index=IGNORE)


def finish_logits(z):
    """Return the logits (..., V) from z (..., V), the output of the last layer; here z unchanged.
    Edit this function to change the logits in all losses and in sampling, e.g. to 30 * torch.tanh(z
    / 30). The function must be elementwise and must not change z in place."""
    return z


def token_logprobs(model, x, targets):
    """Return the log probabilities (N,), float32, of the tokens targets (N,) int64 under `model`, a
    GPT; 0 where the target is IGNORE (-1). x (N, C): for each target, the state that predicts it,
    after the final norm. To save memory, logits are computed in chunks, and again in the backward
    pass."""
    def logprobs(x, targets):
        return -F.cross_entropy(model.logits(x), targets, ignore_index=IGNORE, reduction="none")
    rows = chunk_rows(model.config.padded_vocab_size, x.device.type)
    return torch.cat([checkpoint(logprobs, *chunk, use_reentrant=False)
                      for chunk in zip(x.split(rows), targets.split(rows))])


def chunk_rows(n_columns, device_type):
    """Return the number of rows of a chunk with n_columns float32 numbers per row: the largest
    power of two for which the chunk has at most 256 MB (32 MB on a CPU), or 256 if this power is
    below 128. device_type: e.g. "cpu" or "cuda"."""
    rows = (1 << (23 if device_type == "cpu" else 26)) // n_columns
    return 1 << (rows.bit_length() - 1) if rows >= 128 else 256  # a power of two


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The autograd function of LinearCrossEntropy, which computes logits in chunks of rows: apply(h
    (N, C), weight (V, C), targets (N,), vocab_size) returns the losses (N,), float32. The forward
    pass also computes the gradients of each loss with respect to its row of h and, if `weight`
    needs a gradient, to its logits (N, V), which are stored in the dtype of h. The backward pass
    recomputes no logits; it has one matrix product, for the gradient of `weight`."""

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
    """RMSNorm without weights for a CPU: RMSNorm.apply(x, eps) returns x / sqrt(mean(x^2) + eps),
    with the mean over the last dimension of x (..., D) float32. It takes half the time of PyTorch
    2.13's. The backward pass removes the component of the gradient along the result, because a
    longer x has the same norm."""

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
    """Return F.dropout(x, p, training). For bfloat16 on a CPU a faster equivalent is used, in which
    p is rounded to a multiple of 2^-16."""
    if not (p and training and x.device.type == "cpu" and x.dtype == torch.bfloat16):
        return F.dropout(x, p, training)
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-2 ** 63, None)
    mask = bits.view(torch.int16)[:x.numel()].view(x.shape) >= round(p * 2 ** 16) - 2 ** 15
    return x * (mask.to(x.dtype) / (1 - p))


def fused_linear(x, *layers):
    """Apply several linear layers to the same input x (..., C). Return the outputs, concatenated
    along the last dimension. layers: nn.Linear modules; for many tokens they are computed by one
    matrix product. If they are all PartOfLinear of one ConcatLinear (model/core/packed.py), the
    ConcatLinear is called once."""
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
    """Return the pair of contexts for selective activation checkpointing; pass this function as
    context_fn to torch.utils.checkpoint.checkpoint. The results of matrix products and of attention
    are saved, and all others are recomputed: a product costs about C times as much as an
    elementwise operation on the same numbers."""
    aten = torch.ops.aten
    saved = [aten.mm, aten.addmm, aten._scaled_dot_product_flash_attention,
             aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_efficient_attention,
             aten._scaled_dot_product_flash_attention_for_cpu, aten._grouped_mm]
    return create_selective_checkpoint_contexts([op.default for op in saved])


# -----------------------------------------------------------------------------
# rotary positions

def rope_table(positions, dim, theta, scaling=()):
    """Return the cosines and sines of the rotary angles (arXiv:2104.09864) at `positions`, a float
    tensor (...): stacked, (2, ..., dim / 2) float32. With float64 positions, the angles are exact
    for texts of any length. dim: the head size; theta: the base; scaling: as for
    rope_frequencies()."""
    angles = positions[..., None] * rope_frequencies(dim, theta, scaling, positions.device)
    return torch.stack((angles.cos(), angles.sin())).float()


def rope_frequencies(dim, theta, scaling=(), device=None):
    """Return the rotary frequencies theta^(-2 i / dim) in radians per token, (dim / 2,) float32.
    dim: the head size; theta: the base. scaling: a tuple that extends the context. (): none.
    (factor,): all frequencies are divided by factor. (factor, low, high, original): Llama 3, where
    `original` is the context length before: wavelengths below original / high tokens are unchanged,
    wavelengths above original / low are multiplied by factor, and frequencies in between are
    interpolated."""
    freq = theta ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    if len(scaling) < 2:
        return freq / scaling[0] if scaling else freq
    factor, low, high, original = scaling
    turns = original * freq / (2 * math.pi)  # full turns within the original context length
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return freq * (share + (1 - share) / factor)


def apply_rope(x, rope):
    """Return queries or keys x (B, T, H, D) rotated by their positions: elements i and i + D / 2 of
    the last dimension are a pair, as in Hugging Face. rope: the result of rope_table() with head
    dimension 1 inserted, (2, T, 1, D / 2), or (2, B, T, 1, D / 2) if positions differ by row."""
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
    """Return the history of the token that follows the token `ids`, whose history is `history`:
    ints, or int64 tensors of the same shape. A history encodes the up to three tokens before a
    token: 1 + id of the latest one in the lowest ID_BITS bits, 1 + id of the one before in the next
    ID_BITS bits, and so on; 0 if there is no token."""
    return (history << ID_BITS | ids + 1) & HISTORY_MASK


def histories(idx, first=0):
    """Return the histories (B, T) int64 of the tokens idx (B, T), each of which encodes the up to
    three tokens before the token, see extend_history(). first: the history of the first token of
    each row, 0 (the beginning of a text) or a tensor (B, 1)."""
    T = idx.size(1)
    ids = F.pad(idx + 1, (3, 0))  # (B, 3 + T)
    history = sum(ids[:, 2 - i:2 - i + T] << ID_BITS * i for i in range(3))
    for t in range(min(3, T)):  # tokens whose history begins before idx
        history[:, t:t + 1] |= first << ID_BITS * t & HISTORY_MASK
    return history


def ngram_rows(idx, history, n_rows):
    """Return (B, T, 2) int64: for each token, the rows of an embedding table for the 3-gram and the
    4-gram that end with this token, hashes from 0 to n_rows - 1. idx (B, T): token ids; history (B,
    T): of the tokens, see histories()."""
    before = torch.stack((history & HISTORY_MASK >> ID_BITS, history), dim=-1)
    # Multiplicative hashing: the products wrap around, and their high bits depend on all tokens.
    return ((before * 0x1E3779B97F4A7C15 + idx[..., None]) * 0x3C6EF372FE94F82B >> 32) % n_rows


# -----------------------------------------------------------------------------
# attention

def offset_keys(k, mask=None, before=None):
    """Return keys k (B, T, G, D) in which the second and the fourth quarter of the last dimension
    (the slowest rotary frequencies) are replaced by those of the previous token, so that a query
    can find a token by the token before it; by zeros for the first token. The previous token is
    that at the position before, or with `mask` the latest earlier token that the token sees.

    mask (B or 1, 1, T or 1, T) bool: true where a query sees a key. before (B, 1, G, D): in
    decoding, the original key of the token before the first of k. From modded-nanogpt's "partial
    key offset", where half of the channels are not rotated.
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
    """Return the attention output (B, H, T, D) of queries q (B, H, T, D) on keys k and values v (B,
    G, S, D), each shared by H / G heads: softmax(q k^T / sqrt(D)) v. Query i is at position S - T +
    i. dropout: the probability, applied to the attention weights. mask: (B or 1, 1, T or 1, S)
    bool, or (B, 1, S) for T = 1, true where a query sees a key; `None`: the causal mask, also if
    `causal` is false. causal: whether `mask` is false for all keys after a query, which are then
    skipped."""
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
    """Return the attention output (B, H, T, D) of q, k, v (B, H, T, D), computed by matrix products
    for blocks of `size` queries. A block is multiplied with the keys up to the last query of the
    block; with all keys if the mask is the same for all queries, or if `causal` is false. dropout:
    the probability.

    mask (B or 1, 1, T or 1, T) bool: true where a query sees a key; `None`: the causal mask, also
    if `causal` is false. causal: whether a mask (B or 1, 1, T, T) is false for all keys after a
    query. For bfloat16 on a CPU, this takes half the time of PyTorch 2.13's kernel, with results
    that are equal up to rounding. It stores the attention weights, so use it for short T only.
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
    """Return attend() for one query per row, as in decoding: (B, H, 1, D) from q (B, H, 1, D) and
    k, v (B, G, S, D). mask: (B, 1, 1, S) or (B, 1, S) bool, true for the keys that the query sees;
    `None`: all.

    It is computed by matrix products, in which the H / G heads that share keys are the rows. On a
    CPU, F.scaled_dot_product_attention is used where it is faster: for one text in float32, or in
    bfloat16 with AMX. On a GPU cuDNN would plan again for every number of keys, and the compiler
    fuses the products.
    """
    B, H, _, D = q.shape
    G = k.size(1)
    if (q.device.type == "cpu" and not torch.compiler.is_compiling()
            and (B == 1 if k.dtype == torch.float32 else has_amx())):
        rows = q.reshape(B, G, -1, D).to(k.dtype)  # (B, G, H / G, D)
        mask = None if mask is None else mask.view(B, 1, 1, -1)
        return F.scaled_dot_product_attention(rows, k, v, mask).view(B, H, 1, D).to(q.dtype)
    rows = (q * D ** -0.5).reshape(B * G, -1, D).to(k.dtype)  # (B G, H / G, D)
    k, v = k.flatten(0, 1), v.flatten(0, 1)  # (B G, S, D), views
    # The keys come first: in bfloat16 a CPU copies a transposed part of a cache.
    scores = torch.bmm(k, rows.transpose(1, 2)).view(B, G, -1, H // G)  # (B, G, S, H / G)
    if mask is not None:
        scores = scores.masked_fill(~mask.view(B, 1, -1, 1), -math.inf)
    p = scores.transpose(2, 3).softmax(-1).flatten(0, 1)  # (B G, H / G, S)
    return torch.bmm(p, v).view(B, H, 1, D).to(q.dtype)


def limit_to_window(window, k, v, mask, T, causal=True):
    """Restrict attention to a sliding window: return (k, v, mask) for attend(), with which each
    query sees only the last `window` keys up to the position of the query or, if `causal` is false,
    the keys at a distance of at most window // 2. k, v (B, G, S, D): returned with fewer keys if
    possible. mask: bool, true where a query sees a key, as for attend(); `None`: causal, or all
    keys if `causal` is false. T: the number of queries, which are at the last T of the S positions.
    For T > 1, a query may see its own key also where `mask` is false (padding)."""
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
