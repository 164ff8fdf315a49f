"""Decoding of a single text with one compiled graph per token: `model.sample --compile`.

With packed weights (model/core/packed.py), half of the time per token on a CPU is not reading the
weights but some thirty small operations per block. Compilation fuses these into a few loops
(train/LOG.md).
"""

import functools

import torch
import torch.nn as nn
import torch.nn.functional as F

from model.core.kv_cache import create_cache
from model.core.packed import ConcatLinear, replace_linear_layers
from model.gpt import Attention


def compile_decoder(model):
    """Return a CompiledDecoder of a GPT, and compile it, which takes some ten seconds.

    The linear layers and blocks of `model` are replaced in place; it can no longer be trained.
    Raises ValueError unless it is a dense GPT with full attention and the same rotary positions, or
    none, in every layer; and the exceptions of torch.compile.
    """
    # One graph computes all layers, each block once.
    is_plain = len(model.h) == model.config.n_layer and all(
        getattr(block, "compiles_decoding", False) and isinstance(block.attn, Attention)
        and not block.attn.window for block in model.h)
    if not is_plain or len({block.attn.rope_index for block in model.h}) > 1:
        raise ValueError("--compile: expected a plain GPT with full attention and the same "
                         "positions in every layer; remove the option")
    idx = torch.zeros(1, 1, dtype=torch.int64, device=model.wte.weight.device)
    with torch.no_grad():
        model(idx, cache=create_cache(model, 1))  # for errors of the cache, which a graph hides
        decoder = CompiledDecoder(replace_linear_layers(model, ReductionLinear))
        decoder(idx, create_cache(model, 1))
    return decoder


class CompiledDecoder(nn.Module):
    """A wrapper of a GPT for generate(): a single token of one text runs a compiled graph."""
    needs_full_cache = True  # the only size that is compiled

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.config = model.config
        self.wte = model.wte
        self.template = getattr(model, "template", None)
        for i, block in enumerate(model.h):
            model.h[i] = SharedGraphBlock(block)
        # On a GPU, one CUDA graph replaces a thousand kernel launches per token.
        mode = "reduce-overhead" if self.wte.weight.is_cuda else None
        self.step = torch.compile(functools.partial(next_logits, model), dynamic=False,
                                  fullgraph=True, mode=mode)

    def forward(self, idx, cache, last_only=True):
        """Return the logits (B, T, vocab_size); if last_only, (B, 1, vocab_size) of the last token.

        idx: (B, T) ids of new tokens, appended in place to `cache`, a KVCache of create_cache().
        On a GPU, the logits of a single token are valid until the next call.
        """
        if idx.shape != (1, 1):
            return self.model(idx, cache=cache, last_only=last_only)
        # A token that was sliced from a longer text has other strides, which would be recompiled.
        idx = idx.flatten()[None]
        positions, history = cache.start(idx)  # (1, 1) each
        if idx.is_cuda:  # the graph's fixed addresses; the previous logits have been read
            torch._dynamo.mark_static_address(cache.kv)
            torch.compiler.cudagraph_mark_step_begin()
        return self.step(idx, cache.kv, positions, history)


def next_logits(model, idx, kv, positions, history):
    """Return the logits (1, 1, vocab_size) after one token; store keys and values in kv, in place.

    idx: (1, 1). kv: (L, 2, 1, G, S, D), see SingleTokenCache. positions, history: (1, 1) from
    KVCache.start(); history may be None. All inputs and outputs have fixed shapes, for a graph.
    """
    mask = (torch.arange(kv.size(4), device=kv.device) <= positions)[None]  # (1, 1, S)
    cache = SingleTokenCache(kv, positions[0], mask, (positions, history))
    logits = model(idx, cache=cache, last_only=True)
    new = torch.stack(cache.new)  # (L, 2, 1, G, 1 or 2, D)
    kv.index_copy_(4, cache.slot + torch.arange(new.size(4), device=kv.device), new)
    return logits


class SingleTokenCache:
    """A replacement of KVCache in the compiled graph of a single token, with fixed shapes.

    kv: (L, 2, 1, G, S, D), for L layers, keys and values, one text, G heads, S slots for tokens,
    head size D; or (2, 1, G, S, D) of one layer, for update() and swap_last_key().
    slot: (1,) index of the token in S. start: the result of start(idx), that of KVCache.start(idx);
    None for one layer.
    mask: bool (1, 1, S), True for slots that the token attends to; attention reads all slots.
    kv is not changed, because a write makes the compiled region copy the cache. New keys and values
    are collected in the list `new`, a tensor (2, 1, G, 1, D) per layer; the caller writes them to
    kv. With the option key_offset (half of each key is from the token before), the tensor is
    (2, 1, G, 2, D): the second slot has the unchanged key of the token, for slot + 1.
    """

    def __init__(self, kv, slot, mask, start=None):
        self.kv = kv
        self.slot = slot
        self.mask = mask
        self.start = lambda idx: start  # as KVCache.start
        self.check_used = lambda: None  # compile_decoder() accepts only blocks that use it
        self.new = []  # (2, 1, G, 1, D) per layer; with key_offset (2, 1, G, 2, D)
        self.last_key = []  # of swap_last_key(): at most one tensor (2, 1, G, 1, D)

    def swap_last_key(self, layer, k):
        """Keep k (1, 1, G, D), the new token's key; return that of the token before, or zeros."""
        key = k.transpose(1, 2).to(self.kv.dtype)  # (1, G, 1, D)
        self.last_key = [key.expand(2, *key.shape)]
        before = self.kv[0].index_select(2, self.slot) * (self.slot > 0)
        return before.transpose(1, 2).to(k.dtype)  # (1, 1, G, D)

    def update(self, layer, k, v):
        """Add the new k and v (1, G, 1, D) to `new`; return (keys, values, mask) of all slots."""
        new = torch.stack((k, v)).to(self.kv.dtype)  # (2, 1, G, 1, D)
        self.new.append(torch.cat((new, *self.last_key), dim=3))
        slots = torch.arange(self.kv.size(3), device=self.kv.device)
        is_new = slots[:, None] == self.slot  # (S, 1)
        return *torch.where(is_new, new, self.kv), self.mask


class SharedGraphBlock(nn.Module):
    """A wrapper of `block`, a Block, for a graph that is compiled once for all layers.

    With a SingleTokenCache, forward() calls compute_block() and adds the keys and values to
    cache.new; otherwise it calls the block. Raises ValueError for arguments in `others`.
    """

    def __init__(self, block):
        super().__init__()
        self.block, self.layer = block, block.attn.layer

    def forward(self, x, ropes, cache, mask=None, *others):
        if others:
            raise ValueError("--compile: blocks must exchange x only; remove the option")
        if not isinstance(cache, SingleTokenCache):
            return self.block(x, ropes, cache, mask)
        x, new = compute_block(self.block, x, ropes, cache.kv[self.layer], cache.slot, cache.mask)
        cache.new.append(new)
        return x


@torch.compiler.nested_compile_region
def compute_block(block, x, ropes, kv, slot, mask):
    """Return the output (1, 1, C) of a Block for one token, and the new key and value.

    Key and value: one tensor, as in SingleTokenCache.new. x: (1, 1, C). ropes: as for
    Attention.forward(). kv: (2, 1, G, S, D) of this layer. slot, mask: as for SingleTokenCache.
    """
    cache = SingleTokenCache(kv, slot, mask)
    return block.compute(x, ropes, cache), cache.new[0]


class ReductionLinear(ConcatLinear):
    """A ConcatLinear for compiled graphs, in which a single row on a CPU is a sum of products.

    The compiler fuses this sum, in float32, with the operations before and after into one loop over
    the weights. Other inputs, and calls outside of a compiled graph, use F.linear.
    """

    def forward(self, x):
        is_one_row = x.numel() == x.size(-1)
        if not (is_one_row and x.device.type == "cpu" and torch.compiler.is_compiling()):
            return F.linear(x, self.weight, self.bias)
        y = (self.weight.float() * x.float().flatten()).sum(-1)  # (N, K) * (K,) -> (N,)
        return (y if self.bias is None else y + self.bias).view(*x.shape[:-1], -1).to(x.dtype)
