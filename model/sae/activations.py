"""Activations of a frozen GPT as training data: ring buffers, and the loader of --model sae.

As with every loader, a batch is a function of the step and independent of the number of ranks, so
that a run resumes exactly.

Shapes: B windows, T tokens, C channels of the residual stream.
"""

import copy
import math

import numpy as np
import torch
import torch.nn as nn

from data.rows import open_rows
from model.core.init import stable_hash
from model.core.weights import check_tokenizer, load_frozen
from model.gpt import GPT
from train.base.errors import CheckpointError, DataError
from train.dataloader import Data, RowLoader, open_token_data
from train.device import choose_dtype
from train.distributed import broadcast_from_rank0, get_device

# The activation of the first token is many times longer than typical and would dominate the squared
# error. It is neither reconstructed nor replaced.
N_SKIPPED = 1
# The same holds for a few later tokens, in many published models the first newline or comma:
# activations that exceed the typical length by this factor are left out, too.
OUTLIER_RATIO = 4
USE_WITHOUT_TEXTS = "python -m model.sae --ckpt {out}/ckpt.pt --to {out}/sae_lens"


# -----------------------------------------------------------------------------
# the backbone

class Backbone:
    """A frozen GPT whose activations are read by activations(), and replaced in loss().

    path: the checkpoint. layer: the index of a block. dtype: the configuration key, for autocast.
    The residual stream after the block is read, and replaced.
    Not an nn.Module, so that it is in no checkpoint, and not sharded. Raises CheckpointError if the
    checkpoint is missing or not a GPT with such a block.
    """

    def __init__(self, path, layer, device, dtype):
        self.dtype = choose_dtype(dtype, device)[0]
        self.gpt, self.tokenizer, state = load_frozen(path, device=device)
        self.digest = state["digest"]
        if not isinstance(self.gpt, GPT) or layer >= len(self.gpt.h):
            raise CheckpointError(f"backbone: {path}: expected a GPT with more than {layer} blocks "
                                  "(the key layer)")
        self.block = self.gpt.h[layer]
        # The lower blocks without the final norm, with shared weights.
        self.lower = copy.copy(self.gpt)
        self.lower._modules = self.gpt._modules | dict(h=self.gpt.h[:layer + 1], ln_f=nn.Identity())

    @torch.no_grad()
    def activations(self, idx):
        """Return the activations (B, T - N_SKIPPED, C), float32, for token ids idx (B, T).

        The first N_SKIPPED (1) tokens of each window are left out.
        """
        with torch.autocast(idx.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self.lower.trunk(idx)[:, N_SKIPPED:].float()

    @torch.no_grad()
    def loss(self, idx, targets, edit):
        """Return the mean language-model loss, a scalar, with edited activations.

        idx, targets (B, T): token ids; -1 in targets is not counted. edit(x): returns the
        replacement of the activations x (B, T - N_SKIPPED, C).
        """
        def hook(module, args, x):
            return torch.cat((x[:, :N_SKIPPED], edit(x[:, N_SKIPPED:]).to(x.dtype)), dim=1)
        with self.block.register_forward_hook(hook):
            # Not forward(): with targets, types such as distill compute other losses.
            return self.gpt.score(self.gpt.trunk(idx), targets)[0]

    def statistics(self, tokens, n_windows=64):
        """Return measure_scale() of up to n_windows windows of `tokens`."""
        starts = np.linspace(0, tokens.n_tokens - tokens.block_size, n_windows).astype(np.int64)
        idx = tokens.stream.read(np.unique(starts), tokens.block_size).astype(np.int64)
        x = self.activations(torch.from_numpy(idx).to(self.gpt.wte.weight.device))
        return measure_scale(x.flatten(0, 1))


def measure_scale(x):
    """Return (mean, scale) of activations x (N, C), computed without outliers.

    mean: C floats. scale: a factor that makes the variance 1, on average over the channels.
    Outliers are rows that are longer (2-norm) than OUTLIER_RATIO times the median.
    """
    x = x.cpu().double()
    length = x.norm(dim=1)
    x = x[length <= OUTLIER_RATIO * length.median()]
    variance = x.var(0, correction=0).mean().clamp(min=1e-12)
    return x.mean(0).tolist(), float(variance ** -0.5)


# -----------------------------------------------------------------------------
# the loader

class ActivationBuffer:
    """A ring buffer of the last `size` activations with `dim` channels.

    device: default: the GPU, or without one the CPU. buffer (size, dim): float32, of which the
    first len() rows are used. position: the row to which the next activation is written.
    """

    def __init__(self, size: int, dim: int, device: str | torch.device | None = None):
        self.buffer = torch.zeros(size, dim, device=device or get_device())
        self.position = 0
        self.n_rows = 0

    def __len__(self):
        return self.n_rows

    def add(self, x: torch.Tensor) -> None:
        """Add activations x (n, dim), in chronological order, overwriting the oldest ones."""
        size, end = len(self.buffer), self.position + len(x)
        x = x[-size:]  # earlier rows would be overwritten immediately
        self.buffer[torch.arange(end - len(x), end, device=self.buffer.device) % size] = x.float()
        self.position = end % size
        self.n_rows = min(size, self.n_rows + len(x))

    def sample(self, n: int, seed: int) -> torch.Tensor:
        """Return n random rows (n, dim) of a non-empty buffer, different ones if it has enough."""
        # Drawn on the CPU, equal on all devices, and relative to the oldest row, so that a refilled
        # buffer gives the same samples.
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        ages = order[torch.arange(n) % len(self)]
        indices = (ages + self.position - len(self)) % len(self.buffer)
        return self.buffer[indices.to(self.buffer.device)]


class ActivationLoader:
    """Loader of activations: a batch is a tuple with one tensor (B, T - N_SKIPPED, C).

    tokens: the loader of windows of T tokens. backbone: a Backbone.
    Each position in the global batch has a ring buffer. Every step adds the activations of one
    window of tokens to it, and samples the same number of rows from it, so that a batch mixes the
    windows of many steps. If a step does not follow the previous one (a resumed run), the buffers
    are refilled from the last windows.
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
        """Return this rank's B ring buffers, with the windows up to micro-batch `step`."""
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


def open_data(config, ranks):
    """Return the Data of a token folder: activations to train on, windows of tokens to evaluate.

    Without config.backbone, return open_activations(). All ranks must call. Raises DataError for
    data and CheckpointError for a backbone that cannot be used.
    """
    c = config
    if c.backbone is None:
        return open_activations(c, ranks)
    backbone = Backbone(c.backbone, c.layer, ranks.device, c.dtype)
    shape, tokenizer = backbone.gpt.config, backbone.tokenizer
    data = open_token_data(c.replace(vocab_size=shape.vocab_size,
                                     block_size=min(c.block_size, shape.block_size)), ranks)
    check_tokenizer(tokenizer and tokenizer.spec(), c.backbone, data.spec, c)
    mean, scale = broadcast_from_rank0(lambda: backbone.statistics(data.train), ranks)
    spec = dict(data.spec, d_in=shape.n_embd, mean=mean, scale=scale, backbone=backbone.digest,
                block_size=data.train.block_size)
    return Data(ActivationLoader(data.train, backbone, c, ranks), data.val, spec)


def open_activations(config, ranks):
    """Return the Data of a folder with {train,val}_activations.npy; val only with evaluations.

    They are float32 (windows, T, C). The T activations of a window should be sampled at random from
    all texts, because the loader shuffles windows only. Raises DataError if they cannot be used.
    """
    def load(split, d_in=None):
        loader = RowLoader(open_rows(config.data_dir, split, activations=((None, d_in), None,
                                                                          None)), config, ranks)
        loader.units_per_sample = loader.arrays[0].shape[1]
        return loader
    train = load("train")
    some, = train.rows(np.unique(np.linspace(0, train.samples - 1, 64).astype(np.int64)))
    if not np.isfinite(some).all():
        raise DataError(f"{config.data_dir}: train_activations.npy has NaN or infinite values; "
                        "remove these windows")
    _, block_size, d_in = some.shape
    mean, scale = measure_scale(torch.from_numpy(some).flatten(0, 1))
    spec = dict(d_in=d_in, mean=mean, scale=scale, backbone=None, block_size=block_size)
    val = load("val", d_in) if config.eval_interval else None
    return Data(train, val, spec, use=USE_WITHOUT_TEXTS)
