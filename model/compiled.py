"""A model whose single tokens are computed by one compiled graph: `model.sample --compile`.

With packed weights (model/decode.py) half of what a token takes on a CPU is not the reading of the
weights but some thirty small operations a block. Compiled they are a few loops (train/LOG.md).
"""

import functools
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

from model.decode import Int8Linear, joined, replace_products
from model.gpt import Block
from train.guard import is_compile_error


def compile_decoder(model, quantized=False):
    """A Decoder of `model`, whose products are changed in place as `quantize` or `pack` does.
    ValueError where its blocks are not those of model/gpt.py."""
    if others := {type(block).__name__ for block in model.h if type(block) is not Block}:
        raise ValueError("--compile: expected the blocks of a plain GPT, found "
                         f"{', '.join(sorted(others))}; leave it out")
    return Decoder(replace_products(model, Int8Linear if quantized else JoinedLinear))


class Decoder:
    """`model` with single tokens computed by one compiled graph; it stands for the model where
    tokens are drawn. Prompts are read as before. A graph is for a number of texts: compiling takes
    some ten seconds for each."""

    def __init__(self, model):
        self.model, self.config, self.wte = model, model.config, model.wte
        for i, block in enumerate(model.h):
            model.h[i] = OnceCompiled(block)
        self.step = torch.compile(functools.partial(next_logits, model), dynamic=False,
                                  fullgraph=True)

    def modules(self):
        return self.model.modules()

    def __call__(self, idx, cache, last_only=True):
        """Logits (B, T or 1, V) of the tokens idx (B, T) that follow what the KVCache holds."""
        if idx.size(1) > 1:
            return self.model(idx, cache=cache, last_only=last_only)
        device, positions = idx.device, cache.start(1).to(idx.device)
        slots = cache.slots
        if isinstance(slots, slice):  # the same in every row
            slots = torch.full((idx.size(0),), slots.start, device=device)
        logits = self.compute(idx, cache.kv, slots, cache.used.to(device), positions, cache.last)
        cache.finish(idx)
        return logits

    def compute(self, *tensors):
        try:
            return self.step(*tensors)
        except Exception as error:
            if not is_compile_error(error):
                raise
            reason = str(error).strip().split("\n")[0][:200]
            print(f"--compile: torch.compile failed; going on without it: {reason}",
                  file=sys.stderr)
            self.step = functools.partial(next_logits, self.model)
            return self.step(*tensors)


def next_logits(model, idx, kv, slots, used, positions, last):
    """What is compiled: tensors in, tensors out, and no shape that grows. slots (B,): where the
    tokens idx (B, 1) go in kv (L, 2, B, G, S, D). used (B,): the tokens before them."""
    cache = OneToken(kv, slots, used, positions, last)
    logits = model(idx, cache=cache, last_only=True)
    new = torch.stack(cache.new)  # (L, 2, B, G, D)
    kv[:, :, torch.arange(idx.size(0), device=idx.device), :, slots] = new.permute(2, 0, 1, 3, 4)
    return logits


class OneToken:
    """A KVCache as the graph of one token sees it: all of its slots, the empty ones masked."""

    def __init__(self, kv, slots, used, positions, last):
        self.kv, self.slots, self.positions, self.last, self.new = kv, slots, positions, last, []
        self.mask = (torch.arange(kv.size(4), device=kv.device) <= used[:, None])[:, None]

    def start(self, T):
        return self.positions

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
        x, new = one_layer(self.block, x, rope, cache.kv[self.layer], cache.slots, cache.mask)
        cache.new.append(new)
        return x


@torch.compiler.nested_compile_region
def one_layer(block, x, rope, kv, slots, mask):
    """x (B, 1, C) after a block, and its new keys and values (2, B, G, D)."""
    layer = OneLayer(kv, slots, mask)
    return block.compute(x, rope, layer), layer.new


class OneLayer:
    """A layer's part of a OneToken: kv (2, B, G, S, D). Nothing is written here, where a region of
    its own would have to copy it; the new keys and values are put among the old as they are read.
    """

    def __init__(self, kv, slots, mask):
        self.kv, self.mask, self.new = kv, mask, None
        number = torch.arange(kv.size(3), device=kv.device)[:, None]  # (S, 1)
        self.here = number == slots[:, None, None, None]  # (B, 1, S, 1)

    def update(self, layer, k, v):
        new = torch.stack((k, v)).to(self.kv.dtype)  # (2, B, G, 1, D)
        self.new = new[:, :, :, 0]
        return *torch.where(self.here, new, self.kv), self.mask


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
