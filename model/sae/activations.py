"""Tokens to rows of activations: a frozen GPT, rings of its activations, batches out of them.

For model/sae/__init__.py. The loader is one like any other: a batch is a function of its step, the same at
any number of ranks, so that a run resumes and is shared as every other run.

Shapes: B windows, T tokens, C width of the stream.
"""

import copy
import functools
import hashlib
import os

import numpy as np
import torch
import torch.nn as nn

from model.core.init import stable_hash
from model.gpt import GPT
from train.base.errors import CheckpointError, ConfigError

# The first token sees nothing but itself: its activation is many times longer than the others' and
# would be most of the squared error. It is neither learned nor replaced.
SKIPPED = 1
# So are those of single tokens further on (in most published models the first newline or comma):
# activations of that many times the usual length are left out, too.
LONG = 4


# -----------------------------------------------------------------------------
# the backbone

class Backbone:
    """A frozen GPT, open after block `layer`. No module: it is in no checkpoint, and not sharded.

    path: its checkpoint. CheckpointError where it is missing or no GPT; ConfigError where it has no
    such block."""

    def __init__(self, path, layer, device, dtype):
        from model.core.load import model_of
        from model.core.weights import read_backbone
        state = read_backbone(path)
        try:
            self.gpt, self.tokenizer = model_of(state, path, device)
        except CheckpointError as error:
            raise CheckpointError(f"backbone: {error}; --backbone names a trained GPT") from error
        self.path, self.digest = path, state["digest"]
        if not isinstance(self.gpt, GPT):
            raise CheckpointError(f"backbone: {path} is a {type(self.gpt).__name__}, no GPT")
        if layer >= len(self.gpt.h):
            raise ConfigError([f"layer: {layer}, but {path} has {len(self.gpt.h)} blocks: expected "
                               f"0 to {len(self.gpt.h) - 1}"])
        self.gpt.requires_grad_(False)
        self.layer, self.dtype, self.lower = layer, dtype, first_blocks(self.gpt, layer + 1)

    @functools.cached_property
    def file_hash(self):
        """sha256 of the file, by which autoencoders knew their backbone before."""
        if not os.path.isfile(self.path):
            return None
        return hashlib.sha256(np.memmap(self.path, np.uint8, "r")).hexdigest()

    @torch.no_grad()
    def activations(self, idx):
        """The stream after the block for tokens idx (B, T): (B, T - SKIPPED, C) float32."""
        with torch.autocast(idx.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self.lower.trunk(idx)[:, SKIPPED:].float()

    @torch.no_grad()
    def loss(self, idx, targets, edit):
        """The language model's loss where edit(x), x (B, T - SKIPPED, C), replaces the stream."""
        def hook(block, args, x):
            return torch.cat((x[:, :SKIPPED], edit(x[:, SKIPPED:]).to(x.dtype)), dim=1)
        handle = self.gpt.h[self.layer].register_forward_hook(hook)
        try:
            return self.gpt(idx, targets)[0]
        finally:
            handle.remove()

    def statistics(self, tokens, windows=64):
        """([mean of each dimension], the factor after which their mean variance is 1) of the
        activations of `windows` windows, evenly spread over the stream of the loader `tokens`; but
        for those that are `LONG`."""
        starts = np.linspace(0, tokens.n_tokens - tokens.block_size, windows).astype(np.int64)
        idx = tokens.stream.read(np.unique(starts), tokens.block_size).astype(np.int64)
        x = self.activations(torch.from_numpy(idx).to(self.gpt.wte.weight.device))
        x = x.flatten(0, 1).cpu().double()  # (N, C)
        length = x.norm(dim=1)
        x = x[length <= LONG * length.median()]
        return x.mean(0).tolist(), float(x.var(0, correction=0).mean().clamp(min=1e-12) ** -0.5)


def first_blocks(gpt, n):
    """`gpt` cut after n blocks, on the same weights: its trunk() is the stream at that place."""
    part = copy.copy(gpt)
    part._modules = gpt._modules | {"h": gpt.h[:n], "ln_f": nn.Identity()}
    return part


@functools.lru_cache(maxsize=1)  # one copy for the loader and the model
def load_backbone(path, layer, device, dtype):
    return Backbone(path, layer, device, dtype)


# -----------------------------------------------------------------------------
# the loader

class ActivationBuffer:
    """A ring of the last `size` activations, (size, dim) float32 on `device`: new ones overwrite
    the oldest."""

    def __init__(self, size: int, dim: int, device: str | torch.device = "cpu"):
        self.rows, self.added = torch.empty(size, dim, device=device), 0

    def __len__(self):
        return min(self.added, len(self.rows))

    def add(self, x: torch.Tensor) -> None:
        """x (n, dim), the oldest first."""
        size, end = len(self.rows), self.added + len(x)
        x = x[-size:]  # the rest would be overwritten at once
        self.rows[torch.arange(end - len(x), end, device=self.rows.device) % size] = x.float()
        self.added = end

    def sample(self, n: int, seed: int) -> torch.Tensor:
        """n rows (n, dim), a function of the content and `seed`: different ones where there are as
        many."""
        return self.rows[self.choose(n, seed).to(self.rows.device)]

    def choose(self, n, seed):
        """Where the rows of sample() are (n,), on the CPU. They are counted from the oldest on, so
        a ring that was filled anew gives the same."""
        held, generator = len(self), torch.Generator().manual_seed(seed)
        if not held:
            raise ValueError("ActivationBuffer: nothing to sample from: add() comes first")
        order = torch.randperm(held, generator=generator)  # drawn on the CPU: equal on all devices
        chosen = order[torch.arange(n) % held] + self.added - held
        return chosen % len(self.rows)


class ActivationLoader:
    """Batches of activations, of call `step` (B, T - SKIPPED, C), out of rings.

    Each place in the global batch has a ring of its own, into which the window of tokens at that
    place goes, step after step, and from which as many rows are drawn. So a batch mixes the windows
    of many steps; it is a function of the step alone, and ranks share the backbone's work without
    talking: places go to ranks, and what is in them does not depend on which. Where `step` does not
    follow the one before (a resumed run), the rings are filled again with the last windows.
    """
    unit, computes = "tok", True

    def __init__(self, tokens, backbone, config, ranks):
        self.tokens, self.backbone, self.seed = tokens, backbone, config.seed
        self.samples, self.n_tokens = tokens.samples, tokens.n_tokens
        self.units_per_sample = tokens.block_size - SKIPPED
        self.accumulation = config.accumulation(ranks.world_size)
        windows = config.buffer_size // (config.samples_per_step * self.units_per_sample)
        self.windows = max(1, windows)  # that a ring holds
        self.rings, self.last = {}, {}  # of each micro-batch: its B rings, and the call added last

    def get_batch(self, device="cpu", step=0):
        micro = step % self.accumulation
        if self.last.get(micro) != step:
            self.fill(micro, step, device)
        places = zip(self.rings[micro], self.tokens.sample_numbers([step]).tolist())
        chosen = torch.stack([
            ring.choose(self.units_per_sample, stable_hash(self.seed, f"rows of {g}"))
            for ring, g in places])  # (B, T - SKIPPED)
        if torch.device(device).type == "cuda":  # one copy, and no waiting for it
            chosen = chosen.pin_memory().to(device, non_blocking=True)
        rows = zip(self.rings[micro], chosen.to(device))
        return (torch.stack([ring.rows[i] for ring, i in rows]),)

    def fill(self, micro, step, device):
        """Add the window of call `step` to the rings of `micro`, or all windows that they hold."""
        n, steps = self.accumulation, [step]
        if self.last.get(micro) != step - n:
            first = max(micro, step - (self.windows - 1) * n)
            steps = range(first, step + 1, n)
            size, dim = self.windows * self.units_per_sample, self.backbone.gpt.config.n_embd
            self.rings[micro] = [ActivationBuffer(size, dim, device)
                                 for _ in range(self.tokens.batch_size)]
        for s in steps:
            idx, _ = self.tokens.get_batch(device, s)
            for ring, x in zip(self.rings[micro], self.backbone.activations(idx)):
                ring.add(x)
        self.last[micro] = step

    def fingerprint(self):
        return self.tokens.fingerprint() | {"backbone": self.backbone.digest}

    def locate(self, step):
        return f"activations of the {self.windows} calls up to {step}: {self.tokens.locate(step)}"
