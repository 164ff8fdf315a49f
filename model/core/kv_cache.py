"""Key-value caches for decoding with attention.

A `KVCache` stores the keys and values of every layer, so that each token is computed once. The rows
of a batch may have different lengths, so that a serving engine can add and remove texts at any
step. `GPT.trunk` calls start() once per forward pass, and each layer then calls update().
"""

import copy

import torch

from model.core.ops import extend_history, histories

ROW_DIMS = dict(kv=2, lengths=0, device_lengths=0, history=0)  # of a cache's tensors


class KVCache:
    """Keys and values of every layer for B rows, one text of up to block_size tokens each.

    cache[rows], for a slice, is a view that shares memory with the cache: compute the prompt of row
    r with `model(prompt, cache=cache[r:r + 1])`, decode the first n rows with `model(tokens,
    cache=cache[:n])`, and remove row r by `cache.copy_rows(last, r)`, where `last` is the index of
    the last used row. If rows have different lengths, only one token per call can be appended.
    """

    used = frozenset()  # layers that have stored keys; start() replaces it

    def __init__(self, config, rows, device, dtype, size=None):
        """Create an empty cache for `rows` texts of up to `size` tokens (default: block_size)."""
        c = self.config = config
        # With key_offset, a place for what the next token needs of the last key.
        slots = (size or c.block_size) + c.key_offset
        shape = (c.n_layer, 2, rows, c.n_kv_head, slots, c.head_dim)
        self.kv = torch.zeros(shape, device=device, dtype=dtype)
        # Tokens per row: on the host, for decisions without a synchronisation, and on the device,
        # for positions without a transfer.
        self.lengths = torch.zeros(rows, dtype=torch.int64)
        self.device_lengths = self.lengths.to(device, copy=True)
        # Of the next token, for models that use it; see ops.histories.
        self.history = torch.zeros(rows, 1, dtype=torch.int64, device=device)

    def __getitem__(self, rows):
        return self.map_rows(lambda tensor, dim: tensor[(slice(None),) * dim + (rows,)])

    def repeat(self, n):
        """Return a copy of the cache with n copies of every row, in consecutive rows."""
        return self.map_rows(lambda tensor, dim: tensor.repeat_interleave(n, dim))

    def map_rows(self, f):
        """Return a KVCache with f(tensor, dim) for each tensor, where dim is the row dimension."""
        new = copy.copy(self)
        for name, dim in ROW_DIMS.items():
            setattr(new, name, f(getattr(self, name), dim))
        return new

    def clear(self):
        """Empty all rows in place; on a view cache[i:j], these rows of the original cache."""
        self.lengths.zero_()
        self.device_lengths.zero_()
        self.history.zero_()

    def copy_rows(self, sources, targets):
        """Overwrite rows `targets` with rows `sources` in place; each is an index or a list."""
        for name, dim in ROW_DIMS.items():
            rows = getattr(self, name).movedim(dim, 0)
            rows[targets] = rows[sources]

    def start(self, idx):
        """Begin a forward pass that appends the tokens idx (B, T); return (positions, history).

        Each layer must then store keys and values with update().
        positions: (B, T), or (1, T) if all rows have the same length.
        history: (B, T), see histories() of model/core/ops.py; `None` if the model does not use it.
        Raises ValueError if a row exceeds block_size (a smaller `size` is not checked), or if T > 1
        and the rows differ in length.
        """
        T = idx.size(1)
        size = self.config.block_size
        lengths = self.lengths.tolist()
        longest = max(lengths)
        self.same_length = min(lengths) == longest
        if T > 1 and not self.same_length:
            raise ValueError(f"{T} tokens for rows of different lengths {lengths}; expected one")
        self.n_visible = longest + T
        if self.n_visible > size:
            raise ValueError(f"{self.n_visible} tokens exceed the context of this model, {size}")
        self.used = set()  # layers that have stored the keys of this pass
        self.mask = None
        first = self.device_lengths[:, None]  # (B, 1)
        if self.same_length:
            self.slots = slice(longest, longest + T)
            first = first[:1]
        else:
            self.row_numbers = torch.arange(len(lengths), device=first.device)
            self.slots = self.device_lengths.clone()
            self.mask = (torch.arange(self.n_visible, device=first.device) <= first)[:, None, None]
        positions = first + torch.arange(T, device=first.device)
        self.lengths += T
        self.device_lengths += T
        history = None
        if self.config.uses_history:
            history = histories(idx, self.history)
            self.history.copy_(extend_history(history[:, -1:], idx[:, -1:]))
        return positions, history

    def swap_last_key(self, layer, k):
        """Store a layer's key k (B, 1, G, D) of the last token; return that before the new ones.

        For models with key_offset, with keys before offset_keys(). Returned is the key (B, 1, G, D)
        of the token before the first that start() appended; zeros where a text begins. After a
        right-padded prompt, only the quarters 2 and 4 of D, which offset_keys() uses, are right.
        """
        keys = self.kv[layer, 0]  # (B, G, slots, D)
        if self.same_length:
            before = keys[:, :, self.slots.start] * (self.slots.start > 0)  # (B, G, D)
            keys[:, :, self.slots.stop] = k[:, 0]
        else:
            before = keys[self.row_numbers, :, self.slots] * (self.slots > 0)[:, None, None]
            keys[self.row_numbers, :, self.slots + 1] = k[:, 0].to(keys.dtype)
        return before[:, None].to(k.dtype)

    def update(self, layer, k, v):
        """Store k and v (B, G, T, D) of the tokens from start(); return (k, v, mask) of all tokens.

        layer: index. G: heads of keys and values. D: head size. S: length of the longest row.
        k, v: (B, G, S, D), in the order of the text. mask: (B, 1, 1, S) bool, true for keys that
        exist in the row; `None` if all rows have the same length.
        Raises ValueError for a second call with the same layer in a forward pass.
        """
        if layer in self.used:
            raise ValueError(f"block {layer} runs twice in a pass, and the cache has one place for "
                             "it; count each run in n_layer and set block.attn.layer to its number")
        self.used.add(layer)
        for cached, new in zip(self.kv[layer], (k, v)):
            if self.same_length:
                cached[:, :, self.slots] = new
            else:
                cached[self.row_numbers, :, self.slots] = new[:, :, 0].to(cached.dtype)
        return *self.kv[layer, :, :, :, :self.n_visible], self.mask

    def check_used(self):
        """Raise ValueError unless every block has used the cache in this forward pass.

        In a block without keys of earlier tokens, each token would be the first of a text.
        """
        n_blocks = self.config.n_layer
        if len(self.used) < n_blocks:
            raise ValueError(f"{len(self.used)} of {n_blocks} blocks use the key-value cache: the "
                             "model cannot generate text; store what a block reads of earlier "
                             "tokens with cache.update(layer, k, v), or, if it reads nothing, call "
                             "cache.used.add(layer)")


def create_cache(model, rows, size=None):
    """Return an empty KVCache on the device of a GPT, for `rows` texts of at most `size` tokens.

    size: default block_size, which is always used if the model has needs_full_cache = True.
    Keys and values have the dtype of the weights or, if autocast is enabled, of autocast.
    """
    device, dtype = model.wte.weight.device, model.wte.weight.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    needs_full_cache = getattr(model, "needs_full_cache", False)
    return KVCache(model.config, rows, device, dtype, None if needs_full_cache else size)
