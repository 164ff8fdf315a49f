"""Token files to batches. The order is a pure function of (seed, step), the same at any world size.

An epoch cuts the stream of N tokens into windows of T tokens, from the epoch's own phase on, and
visits each once in the epoch's own order. Sample g = 0, 1, 2, ... of a run is window
perm(g % n_windows) of epoch g // n_windows; call c of rank r of W holds the B samples
from (c*W + r)*B on. The step is the only state; the order needs no memory, however large the data.
"""

import hashlib
import math
import os

import numpy as np
import torch

from data.token_files import DataError, TokenStream, find_files, open_shard, read_meta

CHUNK_TOKENS = 1 << 18  # calls gathered at once: enough to make Python's share of the time small
MIB = 1 << 20
ROUNDS = 6  # with 4, the order of fewer than about 10 windows is measurably uneven


# --- the order: own arithmetic, as np.random promises its numbers for one version only

def mix64(x):
    """splitmix64's finalizer (Steele et al. 2014), a bijection of 64 bits. x: (n,) uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hash64(seed, epoch, lane):
    """One 64-bit number for each epoch. seed, lane: ints; epoch: (n,) uint64 -> (n,) uint64."""
    gamma = np.uint64(0x9E3779B97F4A7C15)
    x = mix64(np.array([seed & (2**64 - 1)], np.uint64) + gamma)
    return mix64(mix64(x + epoch * gamma) + np.array([lane], np.uint64) * gamma)


def permute(p, n, keys):
    """Position -> window, a bijection of 0..n-1. p: (m,) uint64; keys: one (m,) or (1,) a round.

    A Feistel network on pairs (p // b, p % b) of a grid with a*b >= n cells and a, b about sqrt(n);
    a result outside 0..n-1 is walked on along its cycle until it is inside (Black & Rogaway 2002).
    """
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    one = np.uint64(1)  # halves the hash, so that the sums below do not overflow
    left, right = np.divmod(p, np.uint64(b))
    for i, key in enumerate(keys):
        if i % 2 == 0:
            left = (left + (mix64(right ^ key) >> one)) % np.uint64(a)
        else:
            right = (right + (mix64(left ^ key) >> one)) % np.uint64(b)
    out = left * np.uint64(b) + right
    outside = np.flatnonzero(out >= n)  # fewer than a of the a*b cells, so this is rare
    if outside.size:
        keys = [np.broadcast_to(key, p.shape)[outside] for key in keys]
        out[outside] = permute(out[outside], n, keys)
    return out


def count_windows(n_tokens, block_size):
    """Windows in an epoch: one fewer than fit, so that every phase leaves room for all of them."""
    return max(1, (n_tokens - 1) // block_size - 1)


def window_starts(g, n_tokens, block_size, seed):
    """Where samples g start. g: (m,) int64, rising -> (m,) int64 token offsets."""
    n = count_windows(n_tokens, block_size)
    epoch, position = np.divmod(g.astype(np.uint64), np.uint64(n))
    if epoch[0] == epoch[-1]:
        epoch = epoch[:1]  # the usual case: one set of keys serves all samples
    slack = min(n_tokens - 1 - n * block_size, block_size - 1)
    phase = hash64(seed, epoch, 0) % np.uint64(slack + 1)
    window = permute(position, n, [hash64(seed, epoch, lane) for lane in range(1, ROUNDS + 1)])
    return (phase + window * np.uint64(block_size)).astype(np.int64)


# --- batches

def widen(tokens):
    """int64 ids of the bit patterns of unsigned ones. tokens: int16, int32 or int64 tensor."""
    wide = tokens.to(torch.int64)  # sign-extends: uint16 65535 arrives as -1
    return wide if tokens.dtype == torch.int64 else wide & ((1 << 8 * tokens.itemsize) - 1)


def to_device(tokens, device):
    """(x, y), int64 (n, T) on `device`, y one token on. tokens: (n, T+1) array of the file's type.

    Small integers cross the bus and are widened there (as bit patterns of signed ones: torch has
    little arithmetic for unsigned). On CUDA from pinned memory and without waiting: torch's host
    allocator gives a pinned block to the next user only after the copies from it are done.
    """
    if device.type == "cpu":
        return tuple(torch.from_numpy(t.astype(np.int64)) for t in (tokens[:, :-1], tokens[:, 1:]))
    small = torch.from_numpy(tokens.view(f"<i{tokens.itemsize}"))
    if device.type == "cuda":
        small = small.pin_memory()
    wide = widen(small.to(device, non_blocking=device.type == "cuda"))
    return wide[:, :-1].contiguous(), wide[:, 1:].contiguous()


class DataLoader:
    """Batches of one split. Files as in data/token_files.py; DataError for what is wrong with them.

    batch_size is what this rank gets per call. vocab_size: given, or the data's, or None: ids are
    then not checked. `n_tokens`, `dtype`, `n_windows`, `tokens_per_epoch` describe the data; `step`
    is the next call's number.
    """

    def __init__(self, data_dir, batch_size, block_size, split="train", seed=1337, rank=0,
                 world_size=1, vocab_size=None):
        if min(batch_size, block_size, world_size) < 1 or not 0 <= rank < world_size:
            raise DataError(f"batch_size {batch_size}, block_size {block_size}, rank {rank} of "
                            f"{world_size}: expected sizes of at least 1 and a rank below the last")
        paths = find_files(str(data_dir), split)
        meta = read_meta(os.path.dirname(paths[0]))
        self.stream = TokenStream([open_shard(p, meta.get("dtype", "uint16")) for p in paths])
        self.n_tokens, self.dtype = self.stream.n_tokens, self.stream.dtype.name
        self.batch_size, self.block_size, self.seed = batch_size, block_size, seed
        self.rank, self.world_size = rank, world_size
        self.vocab_size = vocab_size or meta.get("vocab_size")
        self.step = 0
        self.check_size(paths, meta, split)
        self.check_places()
        self.n_windows = count_windows(self.n_tokens, block_size)
        self.tokens_per_epoch = self.n_windows * block_size
        self.calls_per_chunk = max(1, CHUNK_TOKENS // (batch_size * block_size))
        self.chunk_device, self.chunk, self.chunk_steps = None, None, range(0)
        self._fingerprint = None

    def check_size(self, paths, meta, split):
        where, n = f"{paths[0]}{' ...' if paths[1:] else ''}", self.n_tokens
        try:
            expected = meta["splits"][split]["tokens"]
        except (KeyError, TypeError):
            expected = n  # not prepared by data/prepare.py
        if os.path.basename(paths[0]) == f"{split}.bin" and n != expected:
            raise DataError(f"{where}: {n:,} tokens, but meta.json says {expected:,}: cut short or "
                            "replaced? prepare the data again")
        if n < self.block_size + 1:
            raise DataError(f"{where}: {n:,} tokens, but block_size {self.block_size} needs "
                            f"{self.block_size + 1:,}: lower block_size, or prepare more text")

    def check_places(self):
        """Check ids before work starts: all that are in memory, else both ends and 64 places."""
        n, size = self.n_tokens, self.stream.dtype.itemsize
        lengths = [n] if self.stream.tokens is not None else [min(n, MIB // size), min(n, 4096)]
        for length, places in zip(lengths, (2, 64)):
            starts = np.unique(np.linspace(0, n - length, places).astype(np.int64))
            self.read(starts, length)

    def read(self, starts, length):
        """Windows (n, length) of the stream's type, every id inside the vocabulary."""
        tokens = self.stream.read(starts, length)
        limit = self.vocab_size or 1 << 62  # unknown: only negative ids are wrong
        if int(tokens.max()) >= limit or int(tokens.min()) < 0:
            row, column = np.argwhere((tokens >= limit) | (tokens < 0))[0]
            path, offset = self.stream.locate(starts[row] + column)
            of = f" of {limit:,}" if self.vocab_size else ""
            raise DataError(f"{path}: token {tokens[row, column]} at offset {offset:,} is outside "
                            f"the vocabulary{of}: another tokenizer's file, or damaged; correct "
                            "vocab_size, or prepare the data again")
        return tokens

    def samples(self, steps):
        """Numbers g of the samples that this rank's calls hold. (len(steps) * B,) int64."""
        calls = np.array(steps, np.int64)[:, None] * self.world_size + self.rank
        return (calls * self.batch_size + np.arange(self.batch_size)).ravel()

    def windows(self, step):
        """Where the windows of call `step` start, in tokens of the stream. (B,) int64."""
        return window_starts(self.samples([step]), self.n_tokens, self.block_size, self.seed)

    def get_batch(self, device="cpu", step=None):
        """(x, y), int64 (B, T), of call `step`; of the next call when None. Not to be written to.

        Several calls are gathered at once (see CHUNK_TOKENS) when they follow one another.
        """
        this = self.step if step is None else step
        if this not in self.chunk_steps or device != self.chunk_device:
            self.gather(this, device)
        if step is None:
            self.step += 1
        i, (x, y) = this - self.chunk_steps.start, self.chunk
        return x[i], y[i]

    def gather(self, step, device):
        if step < 0:
            raise DataError(f"step {step}: expected 0 or more")
        in_order = step in (self.step, self.chunk_steps.stop)
        steps = range(step, step + (self.calls_per_chunk if in_order else 1))
        starts = window_starts(self.samples(steps), self.n_tokens, self.block_size, self.seed)
        x, y = to_device(self.read(starts, self.block_size + 1), torch.device(device))
        shape = len(steps), self.batch_size, self.block_size
        self.chunk = x.view(shape), y.view(shape)
        self.chunk_steps, self.chunk_device = steps, device

    def fixed_windows(self, count):
        """Where the windows of `count` fixed batches start: evenly spread, none overlapping; all
        that fit where the data has fewer. (n,) int64."""
        fit = (self.n_tokens - 1) // self.block_size
        n = min(count * self.batch_size, fit)
        return np.arange(n, dtype=np.int64) * fit // n * self.block_size

    def n_fixed(self, count):
        """How many of `count` fixed batches the data has; the last may be smaller."""
        return -(-len(self.fixed_windows(count)) // self.batch_size)

    def fixed_batch(self, index, count, device="cpu"):
        """(x, y), int64 (<= B, T): batch `index` of `count` that never change."""
        starts = self.fixed_windows(count)[index * self.batch_size:][:self.batch_size]
        if index < 0 or not len(starts):
            raise IndexError(f"fixed batch {index} of {self.n_fixed(count)}")
        return to_device(self.read(starts, self.block_size + 1), torch.device(device))

    def fingerprint(self):
        """What tells these data from others, in plain types: sizes, and a sha256 over the first and
        last MiB of every shard, so that 1 TB costs no more than 2 MiB a shard."""
        if self._fingerprint is None:
            digest, shards = hashlib.sha256(), self.stream.shards
            for shard, first in zip(shards, self.stream.firsts.tolist()):
                n = min(shard.n_tokens, MIB // self.stream.dtype.itemsize)
                for start in (first, first + shard.n_tokens - n):
                    digest.update(self.stream.read(np.array([start]), n).tobytes())
            self._fingerprint = {"tokens": self.n_tokens, "dtype": self.dtype,
                                 "bytes": sum(s.identity[1] for s in shards),
                                 "sha256": digest.hexdigest()}
        return dict(self._fingerprint)
