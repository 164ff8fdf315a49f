"""Tokens out of a model: the cache of keys and values, and what is drawn from its logits.

Every token is computed once. Rows of a cache are as long as they are, so that texts may join and
leave at any step.
"""

import contextlib
import copy
from collections.abc import Callable

import torch

from model.core.ops import apply_rope, rope_tables

SINKS = 4  # first tokens of a text that a rolling cache keeps


class KVCache:
    """Keys and values of every layer for B texts (rows), each as long as it is: sampling computes
    every token once.

    A row holds block_size tokens. With rotary positions a full row rolls (arXiv:2309.17453): a new
    token takes the place of the oldest one but for the first SINKS, on which attention rests its
    surplus; these are turned to stand right before the others. So all that attention sees are
    distances that training knew. What differs from computing the last block_size tokens afresh: a
    state keeps what it learned from tokens that have left since, layer by layer. With learned
    positions a full row raises ValueError.

    cache[rows], for a slice, is a view: texts join and leave at any step by prompting
    `model(prompt, cache=cache[r:r + 1])`, decoding `model(tokens, cache=cache[:n])`, and
    `cache.move(last, r)` over one that is done. Only single tokens can follow rows of unequal
    length.
    """

    def __init__(self, config, rows, device, dtype, size=None):
        c = self.config = config  # size: of a row, where less than the context is needed
        shape = (c.n_layer, 2, rows, c.n_kv_head, size or c.block_size, c.head_dim)
        self.kv = torch.zeros(shape, device=device, dtype=dtype)
        self.n_sinks = n_sinks(c.block_size)
        self.sinks = self.kv.new_zeros(c.n_layer, *shape[2:4], self.n_sinks, c.head_dim)
        # Tokens so far: on the host, which decides without waiting, and on a GPU, which computes
        # positions and places without being sent any. (Apple's has no float64, see start.)
        self.used = self.there = torch.zeros(rows, dtype=torch.int64)
        if self.kv.is_cuda:
            self.there = torch.zeros_like(self.used, device=device)
        self.last = torch.full((rows, 1), -1, device=device)  # the last token, -1: none

    def __getitem__(self, rows):
        view = copy.copy(self)
        view.kv, view.sinks = self.kv[:, :, rows], self.sinks[:, rows]
        view.used, view.last = self.used[rows], self.last[rows]
        view.there = view.used if self.there is self.used else self.there[rows]
        return view

    def repeat(self, n):
        """A copy of every row n times, those of a row together."""
        new = copy.copy(self)
        new.kv, new.sinks = self.kv.repeat_interleave(n, 2), self.sinks.repeat_interleave(n, 1)
        new.used, new.last = self.used.repeat_interleave(n), self.last.repeat_interleave(n, 0)
        new.there = new.used if self.there is self.used else self.there.repeat_interleave(n)
        return new

    def clear(self):
        """Forget the texts of all rows (of a view)."""
        self.used.zero_()
        self.there.zero_()
        self.last.fill_(-1)

    def move(self, source, target):
        """Copy row `source` over row `target`."""
        for tensor, dim in ((self.kv, 2), (self.sinks, 1), (self.used, 0), (self.there, 0),
                            (self.last, 0)):
            tensor.select(dim, target).copy_(tensor.select(dim, source))

    # what GPT.trunk calls, in this order: start, previous, update for each layer, finish

    def start(self, T):
        """Make room for T tokens in every row; their positions (B, T) float64, or (1, T) where all
        rows are equally long."""
        size, used, there = self.config.block_size, self.used.tolist(), self.there
        longest, self.equal = max(used), min(used) == max(used)
        if T > 1 and not self.equal:
            raise ValueError(f"{T} tokens for rows of unequal length {used}; give one at a time")
        if longest + T > size:
            if T > 1 or not self.config.rolls:
                raise ValueError(f"{longest + T} tokens; the context of this model is {size} "
                                 "(block_size)")
            self.turn_sinks()
        self.end, self.mask = min(longest + T, size), None
        if self.equal:
            slot = place(longest, size)
            self.slots, there = slice(slot, slot + T), there[:1, None]  # (1, 1)
        else:
            device, there = self.kv.device, there[:, None]  # (B, 1)
            self.rows = torch.arange(len(used), device=device)
            self.slots = place(there, size)[:, 0].to(device)
            seen = torch.arange(self.end, device=there.device) <= there  # (B, S)
            self.mask = seen.to(device)[:, None, None]
        return there.double() + torch.arange(T, device=there.device)

    def turn_sinks(self):
        """Turn the first keys of full rows to the positions right before the window that the next
        token sees."""
        c, there = self.config, self.there.view(-1, 1, 1, 1)  # (B, 1, 1, 1)
        keys = self.kv[:, 0, :, :, :self.n_sinks]  # (L, B, G, n_sinks, D)
        fresh, full = ((there == c.block_size).to(keys.device),  # full only now
                       (there >= c.block_size).to(keys.device))
        self.sinks.copy_(torch.where(fresh, keys, self.sinks))
        shift = (there[..., 0] - c.block_size + 1).clamp(min=0).double()  # (B, 1, 1)
        rope = rope_tables(shift, c.head_dim, c.rope_theta)  # (B, 1, 1, D / 2)
        turned = apply_rope(self.sinks.float(), *[t.to(keys.device) for t in rope]).to(keys.dtype)
        keys.copy_(torch.where(full, turned, keys))

    def previous(self, idx):
        """The token before each of idx (B, T), -1 where there is none."""
        return torch.cat((self.last, idx[:, :-1]), dim=1)

    def update(self, layer, k, v):
        """Store k, v (B, G, T, D) of a layer. Returns its keys and values so far (B, G, S, D), in
        any order, and a mask (B, 1, 1, S) of those that each row has, None where it has all."""
        for cached, new in zip(self.kv[layer], (k, v)):
            if self.equal:
                cached[:, :, self.slots] = new
            else:
                cached[self.rows, :, self.slots] = new[:, :, 0].to(cached.dtype)
        return *self.kv[layer, :, :, :, :self.end], self.mask

    def forget(self, n, last):
        """Take back the last n tokens of every row, of which none is full. last: the one before. Or
        tensors: n (B,), last (B, 1)."""
        if self.there is not self.used:
            self.there -= n
        self.used -= n.cpu() if isinstance(n, torch.Tensor) else n
        self.last[:] = last

    def finish(self, idx):
        self.used += idx.size(1)
        if self.there is not self.used:
            self.there += idx.size(1)
        self.last.copy_(idx[:, -1:])


def n_sinks(size):
    return min(SINKS, size // 2)


def place(p, size):
    """The slot, of `size`, in which the key at position p stands, a number or a tensor of them: its
    own, or round the ring behind the sinks."""
    first = n_sinks(size)
    slot = first + (p - first) % (size - first)
    return torch.minimum(p, slot) if isinstance(p, torch.Tensor) else min(p, slot)


def empty_cache(model, rows, size=None):
    """A KVCache for `rows` texts (of at most `size` tokens) of a model, where the model is and in
    the precision of its products."""
    device, dtype = model.wte.weight.device, model.wte.weight.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    kind = getattr(model, "cache_class", KVCache)
    return kind(model.config, rows, device, dtype, size)


# -----------------------------------------------------------------------------
# drawing tokens

@torch.no_grad()
def generate(model: torch.nn.Module, idx: torch.Tensor, max_new_tokens: int,
             temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None,
             seed: int | list[int] | None = None, stop_token: int | list[int] | None = None,
             on_token: Callable[[torch.Tensor], object] | None = None,
             n_vocab: int | None = None, min_p: float | None = None,
             lengths: torch.Tensor | None = None, each: int = 1) -> torch.Tensor:
    """Continue idx (B, T) int64 by up to max_new_tokens; returns (B, T + new).

    temperature 0 takes the most likely token; top_k, top_p (arXiv:1904.09751) and min_p (a share of
    the likeliest's, arXiv:2407.01082) cut the tail; ids from n_vocab on are never taken. on_token(
    tokens (B,)) is called with each new column. Rows that met stop_token (or one of them) go on
    with it, and the loop ends when all have. A full context rolls, see KVCache; with learned
    positions its last three quarters are computed again, into an empty one. A list of seeds: each
    for its share of the rows, which then draw the same whatever rows there are besides. lengths
    (B,): of rows that are filled up behind their ends; what is new stands from column T on all the
    same, and what they hold is computed once for `each` so many continuations, (B each, T + new).
    ValueError where the logits are not finite.
    """
    c, device, generator = model.config, idx.device, generators(seed, idx.device)
    size, keep = min(c.block_size, idx.size(1) + max_new_tokens), max(1, c.block_size * 3 // 4)
    stops = torch.tensor([] if stop_token is None else stop_token, device=device).view(-1)
    with past_compiled(model):
        cache, pending = begin(model, idx, lengths, each, size)
        idx = idx.repeat_interleave(each, 0)  # (rows, T)
        rows = torch.arange(len(idx), device=device)  # that are still written
        done = torch.zeros(len(idx), dtype=torch.bool, device=device)
        lost = done.new_zeros(())
        for _ in range(max_new_tokens):
            if not c.rolls and cache.used[0] + pending.size(1) > c.block_size:
                cache.clear()
                pending = idx[rows, -keep:]
            logits = model(pending, cache=cache, last_only=True)[:, -1, :n_vocab]  # (rows, V)
            if len(rows) < len(idx):  # all draw, so that each draws the same with and without them
                logits = logits.new_zeros(len(idx), logits.size(1)).index_copy(0, rows, logits)
            new = pick(logits, temperature, top_k, top_p, generator, min_p)
            lost |= (new < 0).any()
            if stop_token is not None:
                new = torch.where(done, idx[:, -1], new)
                done |= torch.isin(new, stops)
            idx = torch.cat((idx, new.clamp(min=0)[:, None]), dim=1)
            pending = idx[rows, -1:]
            if on_token is None and stop_token is None:
                continue  # a GPU need not be waited for
            left, failed = torch.stack(((~done).sum(), lost)).tolist()
            if failed:
                break
            if on_token is not None:
                on_token(new)
            if not left:
                break
            if 8 * left <= 7 * len(rows):  # moving them costs something
                rows = gathered(cache, rows, (~done[rows]).tolist(), left)
                cache, pending = cache[:left], idx[rows, -1:]
    if bool(lost):
        raise ValueError(NOT_FINITE)
    return idx


def gathered(cache, rows, going, left):
    """Have the first `left` rows of a cache be those that are going on, which the last of them take
    the places of others for. Returns their numbers, `rows` being those of all."""
    order = list(range(len(going)))
    free = [i for i in order[:left] if not going[i]]
    for target, source in zip(free, [i for i in order[left:] if going[i]], strict=True):
        cache.move(source, target)
        order[target] = source
    return rows[order[:left]]


def generators(seed, device):
    """A generator for each seed of a list, or for the one; None draws one anew."""
    seeds = seed if isinstance(seed, list) else [seed]
    found = [torch.Generator(device=device) for _ in seeds]
    for generator, s in zip(found, seeds):
        generator.manual_seed(s) if s is not None else generator.seed()
    return found


def begin(model, idx, lengths, each, size):
    """(a cache with room for `size` tokens of each row, the tokens that it is to hold next) for
    idx (B, T), every row of it `each` times; lengths: as generate() has them."""
    cache, pending = empty_cache(model, idx.size(0), size), idx[:, -model.config.block_size:]
    if lengths is not None:
        pending = start_unequal(model, cache, idx, lengths)
    return (cache.repeat(each) if each > 1 else cache), pending.repeat_interleave(each, 0)


def start_unequal(model, cache, idx, lengths):
    """Have an empty cache hold all but the last token of rows idx (B, T), of which `lengths` (B,)
    are theirs, in one pass; these last tokens (B, 1)."""
    ends, T = lengths[:, None] - 1, idx.size(1)  # (B, 1)
    if T > 1:
        model(idx[:, :-1], cache=cache, last_only=True)
        before = idx.gather(1, (ends - 1).clamp(min=0)).masked_fill(ends == 0, -1)
        # What stands behind a row's end is masked from here on, and overwritten.
        cache.forget(T - lengths, before)
    return idx.gather(1, ends)


def past_compiled(model):
    """Context in which the model runs eager: sampling has other shapes at every token."""
    if any(module._compiled_call_impl is not None for module in model.modules()):
        return torch.compiler.set_stance("force_eager")
    return contextlib.nullcontext()


NOT_FINITE = "the model's logits are not finite: nothing can be drawn from them"


def pick(logits, temperature, top_k, top_p, generator, min_p=None):
    """One token id (B,) from logits (B, V); -1 where they are not finite, for a GPU would have to
    be waited for to raise. generator: one, or a list of one for each row."""
    if temperature == 0:
        largest, index = logits.max(-1)
        return torch.where(largest.isfinite(), index, -1)
    ids = None  # (B, k) of the candidates, the most likely first; None: all in their own order
    if top_k is not None and top_k < logits.size(-1):
        logits, ids = logits.topk(top_k)
    largest = logits.amax(-1, keepdim=True)  # NaN where any is
    # No temperature is too small after the largest is subtracted.
    p = ((logits - largest) / temperature).softmax(-1)
    if top_p is not None and top_p < 1.0:
        if ids is None:
            p, ids = p.sort(descending=True)
        p[p.cumsum(-1) - p >= top_p] = 0.0  # keeps the token that crosses top_p
    if min_p is not None:
        p[p < min_p * p.amax(-1, keepdim=True)] = 0.0
    index = draw(p, generator)  # (B, 1)
    index = index if ids is None else ids.gather(-1, index)
    return torch.where(largest.isfinite(), index, -1)[:, 0]


def draw(p, generator):
    """An index (B, 1) for each row of weights p (B, V), as likely as its weight; any index where
    they are not finite. generator: one, or a list, each for its share of the rows.

    On a CPU one uniform number a row says where in the cumulative sum: torch.multinomial draws V of
    them, 0.5 ms for 32,000. On a GPU NaN would have it end all that the process computes there; so
    it is the first of V clocks to ring, which need no check."""
    generators = generator if isinstance(generator, list) else [generator]
    parts = p.chunk(len(generators))
    if p.device.type != "cpu":
        clocks = [torch.empty_like(part).exponential_(generator=g)
                  for part, g in zip(parts, generators)]
        return (p / torch.cat(clocks)).argmax(-1, keepdim=True)
    ends = p.cumsum(-1, dtype=torch.float64)
    u = torch.cat([torch.rand(len(part), 1, dtype=torch.float64, generator=g)
                   for part, g in zip(parts, generators)])
    # u * total is below the total also when rounded, so what is found has a weight above 0.
    index = torch.searchsorted(ends, u * ends[:, -1:], right=True)
    return index.clamp(max=p.size(-1) - 1)  # past the end: NaN


def start_tokens(tokenizer, prompt):
    """Ids to start from: the prompt's, else the end of text, which a document follows, else 0."""
    ids = tokenizer.encode(prompt) if prompt else []
    return ids or [tokenizer.eot_token if tokenizer.eot_token is not None else 0]


def sample_texts(model, spec, config):
    """Texts of an evaluation, one for each of config.sample_prompts: the same seed every time. The
    model is in eval mode; where it is sharded, all ranks call."""
    from data.tokenizer import tokenizer_from_spec
    if not spec.get("tokenizer"):
        return []
    tokenizer, device = tokenizer_from_spec(spec["tokenizer"]), model.wte.weight.device
    texts = []
    for prompt in config.sample_prompts or [""]:
        try:
            idx = torch.tensor([start_tokens(tokenizer, prompt)], device=device)
            out = generate(model, idx, config.sample_tokens, temperature=0.8, top_k=200,
                           seed=config.seed % 2**63, n_vocab=tokenizer.n_vocab)
        except ValueError as error:  # other characters, logits of NaN: must not end the run
            texts.append(f"{prompt} [not written: {error}]")
            continue
        texts.append(prompt + tokenizer.decode(out[0, idx.size(1):].tolist()))
    return texts
