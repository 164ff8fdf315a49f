"""A model whose single tokens are computed by one compiled graph: `model.sample --compile`.

With packed weights (model/core/decode.py) half of what a token takes on a CPU is not the reading of the
weights but some thirty small operations a block. Compiled they are a few loops (train/LOG.md).
"""

import functools

import torch
import torch.nn as nn
import torch.nn.functional as F

from model.core.decode import Int8Linear, joined, replace_products
from model.core.generate import KVCache, empty_cache, place
from model.gpt import Attention, Block


def compile_decoder(model, quantized=False):
    """A Decoder of `model`, compiled, which takes some ten seconds the first time. The products of
    `model` are changed in place, as `quantize` or `pack` does. ValueError where it is not a plain
    GPT; what torch.compile raises where that fails."""
    device = model.wte.weight.device
    if others := {type(part).__name__ for block in model.h for part in (block, block.attn)
                  if type(part) not in (Block, Attention)}:
        raise ValueError("--compile: expected the blocks of a plain GPT, found "
                         f"{', '.join(sorted(others))}; leave it out")
    if device.type == "mps":  # has no float64, in which positions stay exact
        raise ValueError("--compile: not on mps; leave it out")
    decoder = Decoder(replace_products(model, Int8Linear if quantized else JoinedLinear))
    with torch.no_grad():
        decoder(torch.zeros(1, 1, dtype=torch.int64, device=device), empty_cache(model, 1))
    return decoder


class Decoder:
    """`model` with the single tokens of one text computed by one compiled graph; it stands for the
    model where tokens are drawn. Prompts, and several texts at once, are computed as before."""

    def __init__(self, model):
        self.model, self.config, self.wte = model, model.config, model.wte
        for i, block in enumerate(model.h):
            model.h[i] = OnceCompiled(block)
        # On a GPU a thousand launches a token are one of a CUDA graph.
        mode = "reduce-overhead" if self.wte.weight.is_cuda else None
        self.step = torch.compile(functools.partial(next_logits, model), dynamic=False,
                                  fullgraph=True, mode=mode)

    def modules(self):
        return self.model.modules()

    @staticmethod
    def cache_class(config, rows, device, dtype, size):
        """A KVCache of the one size that is compiled, whatever is asked for."""
        return KVCache(config, rows, device, dtype)

    def __call__(self, idx, cache, last_only=True):
        """Logits (B, T or 1, V) of the tokens idx (B, T) that follow what the KVCache holds."""
        if idx.shape != (1, 1):
            return self.model(idx, cache=cache, last_only=last_only)
        # A token cut from a longer text has that text's strides, which would be another graph.
        idx = idx.flatten()[None]
        cache.start(1)
        if idx.is_cuda:  # where the graph finds them; the logits before these were read
            torch._dynamo.mark_static_address(cache.kv)
            torch.compiler.cudagraph_mark_step_begin()
        logits = self.step(idx, cache.kv, cache.there, cache.last)
        cache.finish(idx)
        return logits


def next_logits(model, idx, kv, there, last):
    """What is compiled: tensors in, tensors out, and no shape that grows. idx (1, 1): the token.
    kv (L, 2, 1, G, S, D): of those before it, there (1,) in number."""
    cache = OneToken(kv, there, last)
    logits = model(idx, cache=cache, last_only=True)
    kv.index_copy_(4, cache.slot, torch.stack(cache.new))
    return logits


class OneToken:
    """A KVCache as the graph of one token sees it: all of its slots, the empty ones masked."""

    def __init__(self, kv, there, last):
        self.kv, self.positions, self.last, self.new = kv, there.double()[:, None], last, []
        self.slot = place(there, kv.size(4))  # (1,)
        self.mask = (torch.arange(kv.size(4), device=kv.device) <= there)[None, None]  # (1, 1, S)

    def start(self, T):
        return self.positions

    def previous(self, idx):
        return self.last

    def finish(self, idx):
        """The KVCache itself counts its tokens, outside the graph."""


class OnceCompiled(nn.Module):
    """A block whose graph is that of all the others too, and is compiled once for them."""

    def __init__(self, block):
        super().__init__()
        self.block, self.layer = block, block.attn.layer

    def forward(self, x, rope, cache):
        if not isinstance(cache, OneToken):
            return self.block(x, rope, cache)
        x, new = one_layer(self.block, x, rope, cache.kv[self.layer], cache.slot, cache.mask)
        cache.new.append(new)
        return x


@torch.compiler.nested_compile_region
def one_layer(block, x, rope, kv, slot, mask):
    """x (1, 1, C) after a block, and its new keys and values (2, 1, G, 1, D)."""
    layer = OneLayer(kv, slot, mask)
    return block.compute(x, rope, layer), layer.new


class OneLayer:
    """A layer's part of a OneToken: kv (2, 1, G, S, D). Nothing is written here, where a region of
    its own would have to copy it; the new keys and values are put among the old as they are read.
    """

    def __init__(self, kv, slot, mask):
        self.kv, self.mask, self.new = kv, mask, None
        self.here = torch.arange(kv.size(3), device=kv.device)[:, None] == slot  # (S, 1)

    def update(self, layer, k, v):
        self.new = torch.stack((k, v)).to(self.kv.dtype)  # (2, 1, G, 1, D)
        return *torch.where(self.here, self.new, self.kv), self.mask


class JoinedLinear(nn.Module):
    """One or more linear layers of the same input, side by side: x (..., K) -> (..., N).

    One row, in a graph for a CPU, is written so that the compiler makes one loop over the weights
    of it, with what comes before and after inside."""

    def __init__(self, *layers):
        super().__init__()
        self.weight, self.bias = joined(layers)

    def forward(self, x):
        one_row = x.numel() == x.size(-1)
        if not (one_row and x.device.type == "cpu" and torch.compiler.is_compiling()):
            return F.linear(x, self.weight, self.bias)
        y = (self.weight.float() * x.float().flatten()).sum(-1)  # (N, K) * (K,) -> (N,)
        return (y if self.bias is None else y + self.bias).view(*x.shape[:-1], -1).to(x.dtype)
