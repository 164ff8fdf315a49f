"""Activations of a frozen GPT as training data: ring buffers, and the loader of --model sae.

A batch is a function of the step and independent of the number of ranks, as with every loader, so
that a run resumes exactly.

Shapes: B windows, T tokens, C channels of the residual stream.
"""

import copy
import functools
import hashlib
import math
import os

import numpy as np
import torch
import torch.nn as nn

from model.core.init import stable_hash
from model.core.weights import load_frozen
from model.gpt import GPT
from train.base.errors import CheckpointError
from train.device import choose_dtype
from train.distributed import get_device

# The activation of the first token is many times longer than typical and would dominate the squared
# error. It is neither reconstructed nor replaced.
N_SKIPPED = 1
# The same holds for a few later tokens, in many published models the first newline or comma:
# activations that exceed the typical length by this factor are left out, too.
OUTLIER_RATIO = 4


# -----------------------------------------------------------------------------
# the backbone

class Backbone:
    """Reads and replaces the residual stream of a frozen GPT after block `layer`. It is no module:
    in no checkpoint, and not sharded.

    path: the checkpoint; dtype: the key of the configuration. Raises CheckpointError if the
    checkpoint is missing or no GPT with such a block.
    """

    def __init__(self, path, layer, device, dtype):
        self.path = path
        self.layer = layer
        self.dtype = choose_dtype(dtype, device)[0]
        self.gpt, self.tokenizer, state = load_frozen(path, device=device)
        self.digest = state["digest"]
        if not isinstance(self.gpt, GPT) or layer >= len(self.gpt.h):
            raise CheckpointError(f"backbone: {path}: expected a GPT with more than {layer} blocks "
                                  "(the key layer)")
        # The lower blocks without the final norm, with shared weights: trunk() is the stream.
        self.lower = copy.copy(self.gpt)
        self.lower._modules = self.gpt._modules | {"h": self.gpt.h[:layer + 1],
                                                   "ln_f": nn.Identity()}

    @functools.cached_property
    def file_hash(self):
        """The sha256 of the file, by which earlier versions identified the backbone."""
        if not os.path.isfile(self.path):
            return None
        return hashlib.sha256(np.memmap(self.path, mode="r")).hexdigest()

    @torch.no_grad()
    def activations(self, idx):
        """Return the stream after the block, (B, T - N_SKIPPED, C) float32, for tokens idx
        (B, T)."""
        with torch.autocast(idx.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self.lower.trunk(idx)[:, N_SKIPPED:].float()

    @torch.no_grad()
    def loss(self, idx, targets, edit):
        """Return the language model's loss with the stream x (B, T - N_SKIPPED, C) replaced by
        edit(x)."""
        def hook(block, args, x):
            return torch.cat((x[:, :N_SKIPPED], edit(x[:, N_SKIPPED:]).to(x.dtype)), dim=1)
        with self.gpt.h[self.layer].register_forward_hook(hook):
            return self.gpt(idx, targets)[0]

    def statistics(self, tokens, n_windows=64):
        """Return ([mean per channel], the scale for a mean variance of 1) of the
        activations of windows that are evenly spaced in the loader `tokens`, without outliers."""
        starts = np.linspace(0, tokens.n_tokens - tokens.block_size, n_windows).astype(np.int64)
        idx = tokens.stream.read(np.unique(starts), tokens.block_size).astype(np.int64)
        x = self.activations(torch.from_numpy(idx).to(self.gpt.wte.weight.device))
        x = x.flatten(0, 1).cpu().double()  # (N, C)
        length = x.norm(dim=1)
        x = x[length <= OUTLIER_RATIO * length.median()]
        return x.mean(0).tolist(), float(x.var(0, correction=0).mean().clamp(min=1e-12) ** -0.5)


load_backbone = functools.lru_cache(maxsize=1)(Backbone)  # the loader and the model share it


# -----------------------------------------------------------------------------
# the loader

class ActivationBuffer:
    """A ring buffer of the last `size` activations: `buffer` (size, dim), float32, of which the
    first len() rows are used; the next activation is written to row `position`.

    device: default: the GPU, or without one the CPU.
    """

    def __init__(self, size: int, dim: int, device: str | torch.device | None = None):
        self.buffer = torch.zeros(size, dim, device=device or get_device())
        self.position = 0
        self.n_rows = 0

    def __len__(self):
        return self.n_rows

    def add(self, x: torch.Tensor) -> None:
        """Add activations x (n, dim), oldest first, which overwrite the oldest in the buffer."""
        size, end = len(self.buffer), self.position + len(x)
        x = x[-size:]  # earlier rows would be overwritten immediately
        self.buffer[torch.arange(end - len(x), end, device=self.buffer.device) % size] = x.float()
        self.position = end % size
        self.n_rows = min(size, self.n_rows + len(x))

    def sample(self, n: int, seed: int) -> torch.Tensor:
        """Return n rows (n, dim), a function of the content and `seed`; distinct if possible."""
        if not len(self):
            raise ValueError("ActivationBuffer: empty; call add() first")
        # Drawn on the CPU, equal on all devices, and relative to the oldest row, so that a refilled
        # buffer gives the same samples.
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        ages = order[torch.arange(n) % len(self)]
        indices = (ages + self.position - len(self)) % len(self.buffer)
        return self.buffer[indices.to(self.buffer.device)]


class ActivationLoader:
    """Loader of activations (B, T - N_SKIPPED, C).

    Each position of the global batch has a ring buffer. Every step adds the activations of a
    window of tokens to it and samples the same number of rows from it, so that a batch mixes the
    windows of many steps. Positions are distributed over the ranks, which therefore share the
    backbone's work without communication. If a step does not follow the previous one (a resumed
    run), the buffers are refilled from the last windows.
    """
    unit = "tok"
    computes = True

    def __init__(self, tokens, backbone, config, ranks):
        self.tokens = tokens
        self.backbone = backbone
        self.seed = config.seed
        self.samples = tokens.samples
        self.n_tokens = tokens.n_tokens
        self.units_per_sample = tokens.block_size - N_SKIPPED
        self.accumulation = config.accumulation(ranks.world_size)
        n_windows = config.buffer_size // (config.samples_per_step * self.units_per_sample)
        self.n_windows = max(1, n_windows)  # per buffer
        self.filled = {}  # {micro-batch: (step of the last window added, list of B buffers)}

    def get_batch(self, device="cpu", step=0):
        numbers = self.tokens.sample_numbers([step]).tolist()
        rows = [buffer.sample(self.units_per_sample, stable_hash(self.seed, f"rows of {g}"))
                for buffer, g in zip(self.fill(step, device), numbers)]
        return (torch.stack(rows),)

    def fill(self, step, device):
        """Return the B buffers of a micro-batch with the windows up to `step`; they are refilled if
        steps were skipped."""
        n = self.accumulation
        micro = step % n
        last, buffers = self.filled.get(micro, (-math.inf, []))
        if last not in (step, step - n):
            last = max(micro - n, step - self.n_windows * n)
            size = self.n_windows * self.units_per_sample
            buffers = [ActivationBuffer(size, self.backbone.gpt.config.n_embd, device)
                       for _ in range(self.tokens.batch_size)]
        for s in range(last + n, step + 1, n):
            idx, _ = self.tokens.get_batch(device, s)
            for buffer, x in zip(buffers, self.backbone.activations(idx)):
                buffer.add(x)
        self.filled[micro] = step, buffers
        return buffers

    def fingerprint(self):
        return self.tokens.fingerprint() | {"backbone": self.backbone.digest}
