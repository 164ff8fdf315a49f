"""Data to batches. The order is a pure function of (seed, step), the same at any world size.

Samples are numbered g = 0, 1, 2, ... over the whole run, and an epoch visits each of the N samples
once, in an order of its own (`shuffled`, below): epoch g // N, place g % N. What a loader calls a
step is a micro-batch: step s of rank r of W holds the B samples from (s * W + r) * B on. So its
number is the only state, and however large the data, the order takes no memory. Ten samples,
batches of two, two ranks, seed 1337:

    step   g       rank 0   g        rank 1
    0      0  1    7 1      2  3     8 0
    1      4  5    3 9      6  7     4 6
    2      8  9    5 2      10 11    5 4     rank 1 has begun the second epoch
    3      12 13   2 8      14 15    1 6
    4      16 17   9 3      18 19    7 0

Two loaders: DataLoader cuts a stream of tokens into windows, RowLoader takes rows of arrays
(train/options/mixture.py mixes several of these). All have what the loop asks of a loader:
    samples, unit, units_per_sample     # in an epoch; "tok" or "row"; units in a sample
    get_batch(device, step)             # a tuple of tensors, (B, ...) each
    n_fixed(count), fixed_batch(index, count, device)   # validation: the same batches for ever
    fingerprint(), locate(step)         # what tells these data from others; where a batch lies
    computes                            # optional, true: its time is the model's, not the disk's
"""

import functools
import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from data.token_files import mix64, open_stream
from data.tokenizer import find_vocabulary
from train.base.errors import DataError
from train.distributed import broadcast_from_rank0

CHUNK_TOKENS = 1 << 18  # gathered at once: enough to make Python's share of the time small
MIB = 1 << 20
ROUNDS = 6  # with 4, the order of fewer than about 10 samples is measurably uneven


@dataclass
class Data:
    """What a run trains on. val: None, nothing is evaluated. spec: what the model must know of the
    data (vocabulary, tokenizer, classes, sizes), plain Python types that go into ckpt.pt. test: all
    of it is evaluated, once, when the run is over. renamed: what older checkpoints call something
    in the spec or the fingerprint, and what it is called now."""
    train: object
    val: object = None
    spec: dict = field(default_factory=dict)
    test: object = None
    renamed: dict = field(default_factory=dict)


# -----------------------------------------------------------------------------
# the order: arithmetic of our own, as np.random promises its numbers for one version only

def hash64(seed, epoch, lane):
    """One 64-bit number for each epoch. seed, lane: ints; epoch: (n,) uint64 -> (n,) uint64."""
    # Steps of the odd number gamma (2^64 over the golden ratio) keep the inputs of mix64 apart.
    gamma = np.uint64(0x9E3779B97F4A7C15)
    x = mix64(np.array([seed & (2**64 - 1)], np.uint64) + gamma)
    return mix64(mix64(x + epoch * gamma) + np.array([lane], np.uint64) * gamma)


def permute(p, n, keys):
    """Position -> sample, a bijection of 0..n-1. p: (m,) uint64; keys: one (m,) or (1,) a round.

    A shuffled list of a billion samples would take 8 GB. A Feistel network computes any entry of
    such a list by itself: positions are pairs (left, right), cells of an a x b grid, and each round
    shifts one half by a hash of the other. Whoever knows the other half can shift back, so every
    round is a bijection, whatever the hash.
    """
    a = math.isqrt(n - 1) + 1  # about sqrt(n) rows
    b = -(-n // a)             # as many columns as they need: a * b >= n
    one = np.uint64(1)  # halves the hash, so that the sums below do not overflow
    left, right = np.divmod(p, np.uint64(b))
    for i, key in enumerate(keys):
        if i % 2 == 0:
            left = (left + (mix64(right ^ key) >> one)) % np.uint64(a)
        else:
            right = (right + (mix64(left ^ key) >> one)) % np.uint64(b)
    out = left * np.uint64(b) + right
    # The grid has a few cells more than samples (fewer than a). Whoever lands on one goes through
    # the network again until inside: still a bijection (cycle walking, Black & Rogaway 2002).
    outside = np.flatnonzero(out >= n)
    if outside.size:
        keys = [np.broadcast_to(key, p.shape)[outside] for key in keys]
        out[outside] = permute(out[outside], n, keys)
    return out


def shuffled(g, n, seed):
    """(epoch, number in 0..n-1) of samples g in the order of their epochs. g: (m,) int64, rising ->
    (m,) uint64 twice; the first is (1,) where all are of one epoch."""
    epoch, position = np.divmod(g.astype(np.uint64), np.uint64(n))
    if epoch[0] == epoch[-1]:
        epoch = epoch[:1]  # the usual case: one set of keys serves all samples
    return epoch, permute(position, n, [hash64(seed, epoch, i) for i in range(1, ROUNDS + 1)])


def count_windows(n_tokens, block_size):
    """Windows in an epoch: one fewer than fit, so that every phase leaves room for all of them.

        |..phase..|window 0|window 1| ... |window n-1|..rest..|    n_tokens
    """
    return max(1, (n_tokens - 1) // block_size - 1)


def window_starts(g, n_tokens, block_size, seed):
    """Where samples g start: windows of an epoch lie side by side, without overlap. Where the first
    one begins, its phase, is drawn anew in each epoch, so that over epochs the stream is cut at
    other places. g: (m,) int64, rising -> (m,) int64 token offsets."""
    n = count_windows(n_tokens, block_size)
    epoch, window = shuffled(g, n, seed)
    slack = min(n_tokens - 1 - n * block_size, block_size - 1)  # tokens that are left over
    phase = hash64(seed, epoch, 0) % np.uint64(slack + 1)
    return (phase + window * np.uint64(block_size)).astype(np.int64)


# -----------------------------------------------------------------------------
# arrays to a device

def send(array, device):
    """A numpy array as a tensor on `device`. On CUDA from pinned memory and without waiting: torch
    gives a pinned block to the next user only after the copies from it are done."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def widen(tokens):
    """int64 ids of the bit patterns of unsigned ones. tokens: int16, int32 or int64 tensor."""
    wide = tokens.to(torch.int64)  # sign-extends: uint16 65535 arrives as -1
    return wide if tokens.dtype == torch.int64 else wide & ((1 << 8 * tokens.itemsize) - 1)


def to_device(tokens, device):
    """(x, y), int64 (n, T) on `device`, y one token on. tokens: (n, T+1) array of the file's type.
    Small integers cross the bus and are widened there, as bit patterns of signed ones: torch has
    little arithmetic for unsigned."""
    if device.type == "cpu":
        return tuple(torch.from_numpy(t.astype(np.int64)) for t in (tokens[:, :-1], tokens[:, 1:]))
    wide = widen(send(tokens.view(f"<i{tokens.itemsize}"), device))
    return wide[:, :-1].contiguous(), wide[:, 1:].contiguous()


# -----------------------------------------------------------------------------
# loaders

class Loader:
    """What all loaders share: which samples a batch holds.

    samples: in an epoch. val_samples: those of validation, which do not overlap. batch_size: of
    this rank's batches; val_batch_size: of validation, the same at any world size. Of its own a
    loader has read(g), the arrays of samples g (m,) int64, rising; tensors(arrays, device), a batch
    of them; describe(g), where they lie; and identity().
    """
    calls_per_chunk = 1  # batches that are gathered at once

    def __init__(self, samples, val_samples, batch_size, val_batch_size, seed, rank, world_size):
        self.samples, self.val_samples = samples, val_samples
        self.batch_size, self.val_batch_size = batch_size, val_batch_size
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.step = 0  # the next one's number
        self.chunk, self.chunk_steps, self.chunk_device = (), range(0), None

    def get_batch(self, device: str | torch.device = "cpu",
                  step: int | None = None) -> tuple[torch.Tensor, ...]:
        """The batch of `step`, tensors (B, ...); of the next one when None. Not to be written to.
        """
        this = self.step if step is None else step
        if this not in self.chunk_steps or device != self.chunk_device:
            self.gather(this, device)
        if step is None:
            self.step += 1
        i = this - self.chunk_steps.start
        return tuple([t[i] for t in self.chunk])

    def gather(self, step, device):
        """Fill the chunk from `step` on. Where steps follow one another that is many at once:
        one gather of 256 windows costs little more than one of four."""
        if step < 0:
            raise DataError(f"step {step}: expected 0 or more")
        sequential = step in (self.step, self.chunk_steps.stop)
        steps = range(step, step + (self.calls_per_chunk if sequential else 1))
        batch = self.tensors(self.read(self.sample_numbers(steps)), torch.device(device))
        self.chunk = tuple(t.view(len(steps), self.batch_size, *t.shape[1:]) for t in batch)
        self.chunk_steps, self.chunk_device = steps, device

    def locate(self, step):
        """Where the batch of `step` came from, for messages."""
        return self.describe(self.sample_numbers([step]))

    def sample_numbers(self, steps):
        """Numbers g of the samples of this rank's batches. (len(steps) * B,) int64."""
        batches = np.array(steps, np.int64)[:, None] * self.world_size + self.rank
        return (batches * self.batch_size + np.arange(self.batch_size)).ravel()

    def n_fixed(self, count):
        """How many of `count` fixed batches the data have; the last may be smaller."""
        return -(-min(count * self.val_batch_size, self.val_samples) // self.val_batch_size)

    def fixed_samples(self, count, index):
        """Numbers of the samples in batch `index` of `count` fixed batches, which are spread evenly
        over the data. (<= val_batch_size,) int64, rising."""
        if not 0 <= index < self.n_fixed(count):
            raise IndexError(f"fixed batch {index} of {self.n_fixed(count)}")
        # Few batches still see the whole of the data, not only how it begins.
        n = min(count * self.val_batch_size, self.val_samples)
        first = index * self.val_batch_size
        chosen = np.arange(first, min(first + self.val_batch_size, n), dtype=np.int64)
        return chosen * self.val_samples // n

    @functools.cached_property
    def _identity(self):  # once: every checkpoint holds it, and the data may not change
        return self.identity()

    def fingerprint(self):
        return dict(self._identity)


class DataLoader(Loader):
    """Batches of one split of a token stream. Files as in data/token_files.py; DataError for what
    is wrong with them.

    batch_size is what this rank gets in a step, (x, y), int64 (B, T), y one token on. vocab_size:
    given, or the data's, or None: ids are then not checked. `n_tokens`, `dtype` describe the data.
    """
    unit = "tok"

    def __init__(self, data_dir: str | os.PathLike, batch_size: int, block_size: int,
                 split: str = "train", seed: int = 1337, rank: int = 0, world_size: int = 1,
                 vocab_size: int | None = None):
        if min(batch_size, block_size, world_size) < 1 or not 0 <= rank < world_size:
            raise DataError(f"batch_size {batch_size}, block_size {block_size}, rank {rank} of "
                            f"{world_size}: expected sizes of at least 1 and a rank below the last")
        self.stream = open_stream(str(data_dir), split, vocab_size, least=block_size + 1)
        self.n_tokens, self.dtype = self.stream.n_tokens, self.stream.dtype.name
        self.vocab_size = self.stream.vocab_size
        self.block_size = self.units_per_sample = block_size
        super().__init__(count_windows(self.n_tokens, block_size),
                         (self.n_tokens - 1) // block_size, batch_size, batch_size, seed, rank,
                         world_size)
        self.calls_per_chunk = max(1, CHUNK_TOKENS // (batch_size * block_size))

    def windows(self, g):
        """Where samples g start, in tokens. (m,) int64."""
        return window_starts(g, self.n_tokens, self.block_size, self.seed)

    def describe(self, g):
        return f"windows at tokens {', '.join(map(str, self.windows(g)))}"

    def read(self, g):
        return (self.stream.read(self.windows(g), self.block_size + 1),)  # (m, T + 1)

    def tensors(self, arrays, device):
        return to_device(arrays[0], device)  # (x, y)

    def fixed_batch(self, index, count, device="cpu"):
        """(x, y), int64 (<= B, T): batch `index` of `count` that never change, windows spread over
        the whole stream without overlap."""
        starts = self.fixed_samples(count, index) * self.block_size
        return to_device(self.stream.read(starts, self.block_size + 1), torch.device(device))

    def identity(self):
        """What tells these data from others, in plain types: sizes, and a sha256 over the first and
        last MiB of every shard, so that 1 TB costs no more than 2 MiB a shard."""
        # Content, not names or times: a copy on another disk is the same data.
        digest, shards = hashlib.sha256(), self.stream.shards
        for shard, first in zip(shards, self.stream.firsts.tolist()):
            n = min(shard.n_tokens, MIB // self.stream.dtype.itemsize)
            for start in (first, first + shard.n_tokens - n):
                digest.update(self.stream.read(np.array([start]), n).tobytes())
        return {"tokens": self.n_tokens, "dtype": self.dtype,
                "bytes": sum(s.identity[1] for s in shards), "sha256": digest.hexdigest()}


class RowLoader(Loader):
    """Batches of rows of arrays, in memory or memory-mapped: a tuple of tensors (B, ...), one for
    each array. arrays: of one length N; unsigned integers become int64, the rest stays as it is.
    Raises DataError where there is nothing to train on."""
    unit, units_per_sample = "row", 1

    def __init__(self, arrays: Sequence[np.ndarray], config, ranks):
        self.arrays, lengths = tuple(arrays), {len(a) for a in arrays}
        if len(lengths) != 1 or not min(lengths):
            raise DataError(f"arrays of lengths {sorted(lengths)}: expected one or more arrays of "
                            "the same length, above 0")
        n = lengths.pop()
        super().__init__(n, n, config.micro_batch(ranks.world_size), config.batch_size,
                         config.seed, ranks.rank, ranks.world_size)

    def chosen(self, g):
        """Row numbers of samples g. (m,) int64."""
        return shuffled(g, self.samples, self.seed)[1].astype(np.int64)

    def describe(self, g):
        return f"rows {', '.join(map(str, self.chosen(g)))}"

    def read(self, g):
        return self.rows(self.chosen(g))

    def rows(self, chosen):
        """The rows `chosen` (m,) of every array."""
        return [np.ascontiguousarray(array[chosen]) for array in self.arrays]

    def tensors(self, arrays, device):
        return tuple(send(part.astype(np.int64) if part.dtype.kind == "u" else part, device)
                     for part in arrays)

    def fixed_batch(self, index, count, device="cpu"):
        return self.tensors(self.rows(self.fixed_samples(count, index)), torch.device(device))

    def identity(self):
        """Shapes, types, and a sha256 over the first and last rows, up to a MiB, of every array."""
        digest = hashlib.sha256()
        for array in self.arrays:
            n = max(1, min(len(array), MIB // max(1, array[:1].nbytes)))
            for part in (array[:n], array[-n:]):
                digest.update(np.ascontiguousarray(part).tobytes())
        return {"arrays": [[list(a.shape), str(a.dtype)] for a in self.arrays],
                "sha256": digest.hexdigest()}


# -----------------------------------------------------------------------------
# token files as the data of a run

def prepare_built_in(data_dir):
    """Prepare the built-in dataset if it is what a missing `data_dir` names. Raises DataError."""
    try:
        from data.prepare import ensure_dataset
    except ImportError as error:  # data/prepare/ was deleted: prepared data still train
        if os.path.basename(os.path.normpath(data_dir)) == "stdlib" and not os.path.isdir(data_dir):
            raise DataError(f"{data_dir}: the built-in dataset is made by data/prepare/, which is "
                            f"missing ({error}); set data_dir to prepared data") from None
    else:
        ensure_dataset(data_dir)


def open_token_data(config, ranks):
    """The Data of token files in config.data_dir; a built-in dataset is prepared on first use."""
    c = config
    if not os.path.exists(os.path.join(c.data_dir, "train.bin")):
        broadcast_from_rank0(lambda: prepare_built_in(c.data_dir), ranks)
    size, tokenizer = find_vocabulary(c.data_dir, c.tokenizer, c.vocab_size)

    def load(split, batch_size, rank, world_size):
        return DataLoader(c.data_dir, batch_size, c.block_size, split, c.seed, rank, world_size,
                          size)
    train = load("train", c.micro_batch(ranks.world_size), ranks.rank, ranks.world_size)
    # Validation has whole batches on every rank, whatever their number: its value does not change.
    val = load("val", c.batch_size, 0, 1) if c.eval_interval else None
    return Data(train, val, dict(vocab_size=size, tokenizer=tokenizer and tokenizer.spec()))
