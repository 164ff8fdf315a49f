"""Key-value caches: what a model's attention needs during decoding.

`KVCache` stores the keys and values of every layer, so that each token is computed once. Rows of a
batch may have different lengths, so that a serving engine can add and remove texts at any step.
`GPT.trunk` calls, in this order: start, then update per layer.
"""

import copy

import torch

from model.core.ops import apply_rope, rope_table

SINK_TOKENS = 4  # first tokens of a text, which a rolling cache never evicts
ROW_DIMS = dict(kv=2, sinks=1, lengths=0, device_lengths=0, last_token=0)  # of a cache's tensors


class KVCache:
    """Keys and values of every layer for B texts (rows) of different lengths.

    A row holds block_size tokens. With rotary positions, a full row rolls (StreamingLLM,
    arXiv:2309.17453): a new token replaces the oldest one, except for the first SINK_TOKENS
    (attention sinks), which are rotated to directly precede the window. Attention therefore sees
    only distances that occurred in training. The result differs from recomputing the last
    block_size tokens: cached states still depend on tokens that have been evicted. With absolute
    positions, a full row raises ValueError.

    cache[rows], for a slice, is a view: prompt a single row with
    `model(prompt, cache=cache[r:r + 1])`, decode the first n with `model(tokens, cache=cache[:n])`,
    and remove row r with `cache.copy_rows(last, r)`. Rows of different lengths accept one token per
    call only.
    """

    def __init__(self, config, rows, device, dtype, size=None):
        """config: a GPTConfig. rows: number of texts (B). dtype: of keys and values. size: tokens
        per row, if fewer than block_size are needed."""
        c = self.config = config
        shape = (c.n_layer, 2, rows, c.n_kv_head, size or c.block_size, c.head_dim)
        self.kv = torch.zeros(shape, device=device, dtype=dtype)
        self.n_sinks = count_sinks(c.block_size)
        self.sinks = self.kv.new_zeros(c.n_layer, *shape[2:4], self.n_sinks, c.head_dim)
        # Tokens per row: on the host, for decisions without a synchronisation, and on a GPU, for
        # positions and slots without a transfer. (MPS has no float64, see start.)
        self.lengths = torch.zeros(rows, dtype=torch.int64)
        self.device_lengths = torch.zeros_like(self.lengths, device=device if self.kv.is_cuda
                                               else None)
        self.last_token = torch.full((rows, 1), -1, device=device)  # -1: the row is empty

    def __getitem__(self, rows):
        return self.map_rows(lambda tensor, dim: tensor[(slice(None),) * dim + (rows,)])

    def repeat(self, n):
        """Return a copy with every row n times, the copies of a row next to each other."""
        return self.map_rows(lambda tensor, dim: tensor.repeat_interleave(n, dim))

    def map_rows(self, f):
        """Return a KVCache whose tensors are f(tensor, dim) of this one's; dim: the dimension of
        the rows."""
        new = copy.copy(self)
        for name, dim in ROW_DIMS.items():
            setattr(new, name, f(getattr(self, name), dim))
        return new

    def clear(self):
        """Empty all rows in place; of a view cache[rows], these rows of the whole cache."""
        self.lengths.zero_()
        self.device_lengths.zero_()
        self.last_token.fill_(-1)

    def copy_rows(self, sources, targets):
        """Overwrite the rows `targets` with the rows `sources`, in place (an index, or a list of
        indices, each)."""
        for name, dim in ROW_DIMS.items():
            rows = getattr(self, name).movedim(dim, 0)
            rows[targets] = rows[sources]

    def start(self, idx):
        """Append the tokens idx (B, T) to the rows; `update` then stores the keys and values of
        each layer.

        Return (positions, previous): positions (B, T) float64, or (1, T) if all rows have the same
        length, and the token before each, (B, T), -1 at the beginning of a text. Raises ValueError
        if the tokens do not fit, or for several tokens per row if the rows differ in length.
        """
        T = idx.size(1)
        size = self.config.block_size
        lengths = self.lengths.tolist()
        longest = max(lengths)
        self.same_length = min(lengths) == longest
        if T > 1 and not self.same_length:
            raise ValueError(f"{T} tokens for rows of different lengths {lengths}; pass one token "
                             "per call")
        if longest + T > size:
            if T > 1 or not self.config.rolls:
                raise ValueError(f"{longest + T} tokens exceed the context of this model, {size} "
                                 "(block_size)")
            self.rotate_sinks()
        self.n_visible = min(longest + T, size)
        self.mask = None
        first = self.device_lengths
        if self.same_length:
            slot = find_slot(longest, size)
            self.slots = slice(slot, slot + T)
            first = first[:1, None]  # (1, 1)
        else:
            device = self.kv.device
            first = first[:, None]  # (B, 1)
            self.row_numbers = torch.arange(len(lengths), device=device)
            self.slots = find_slot(first, size)[:, 0].to(device)
            visible = torch.arange(self.n_visible, device=first.device) <= first  # (B, S)
            self.mask = visible.to(device)[:, None, None]
        positions = first.double() + torch.arange(T, device=first.device)
        previous = torch.cat((self.last_token, idx[:, :-1]), dim=1)
        self.lengths += T
        self.device_lengths += T
        self.last_token.copy_(idx[:, -1:])
        return positions, previous

    def rotate_sinks(self):
        """Rotate the keys of the first tokens (attention sinks) of full rows, in place, to the
        positions directly before the window of the next token. start() calls it before that token
        is added."""
        c = self.config
        lengths = self.device_lengths.view(-1, 1, 1, 1)  # (B, 1, 1, 1)
        keys = self.kv[:, 0, :, :, :self.n_sinks]  # (L, B, G, n_sinks, D)
        just_full = (lengths == c.block_size).to(keys.device)
        full = (lengths >= c.block_size).to(keys.device)
        self.sinks.copy_(torch.where(just_full, keys, self.sinks))
        shift = (lengths[..., 0] - c.block_size + 1).clamp(min=0).double()  # (B, 1, 1)
        rope = rope_table(shift, c.head_dim, c.rope_theta).to(keys.device)  # (2, B, 1, 1, D / 2)
        rotated = apply_rope(self.sinks.float(), rope)
        keys.copy_(torch.where(full, rotated.to(keys.dtype), keys))

    def update(self, layer, k, v):
        """Store k, v (B, G, T, D) of the tokens that start() appended, for the layer with index
        `layer`. Return (k, v, mask): all keys and values (B, G, S, D) of the layer, in any order,
        and a mask (B, 1, 1, S), true for the keys of each row, or None if all rows have S keys."""
        for cached, new in zip(self.kv[layer], (k, v)):
            if self.same_length:
                cached[:, :, self.slots] = new
            else:
                cached[self.row_numbers, :, self.slots] = new[:, :, 0].to(cached.dtype)
        return *self.kv[layer, :, :, :, :self.n_visible], self.mask


def count_sinks(size):
    """Return the number of attention sinks, first tokens that are never evicted, in a cache of
    `size` tokens per row: SINK_TOKENS, but at most half of the row."""
    return min(SINK_TOKENS, size // 2)


def find_slot(position, size):
    """Return the index, in a cache of `size` tokens per row, at which the key of the token at
    `position` (an integer or a tensor) is stored. Positions from `size` on wrap around behind the
    sinks."""
    first = count_sinks(size)
    slot = first + (position - first) % (size - first)
    if isinstance(position, torch.Tensor):
        return torch.minimum(position, slot)
    return min(position, slot)


def create_cache(model, rows, size=None):
    """Return an empty KVCache for `rows` texts of at most `size` tokens each (default: block_size),
    on the device of `model`, a GPT, in the dtype of its weights or, if enabled, of autocast."""
    device, dtype = model.wte.weight.device, model.wte.weight.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    if getattr(model, "needs_full_cache", False):
        size = None
    return KVCache(model.config, rows, device, dtype, size)
