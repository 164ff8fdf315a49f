"""Data to batches. The order is a pure function of (seed, step), the same at any world size.

Samples are numbered g = 0, 1, 2, ... over the whole run. Sample g belongs to epoch g // N and is at
position g % N in the order of that epoch (`shuffled`, below), which visits each of the N samples
once. A loader's step is a micro-batch: step s of rank r of W holds the B samples from
(s * W + r) * B on. The step number is the only state, and the order needs no memory, however large
the data. Ten samples, batches of two, two ranks, seed 1337:

    step   g       rank 0   g        rank 1
    0      0  1    7 1      2  3     8 0
    1      4  5    3 9      6  7     4 6
    2      8  9    5 2      10 11    5 4     rank 1 is in the second epoch
    3      12 13   2 8      14 15    1 6
    4      16 17   9 3      18 19    7 0

Three loaders: DataLoader returns windows of a token stream, RowLoader rows of arrays, DatasetLoader
items of a torch Dataset; a mixture of several is in train/options/mixture.py. Every loader has
    samples, unit, units_per_sample     # samples per epoch; "tok" or "row"; units per sample
    get_batch(device, step)             # tuple of tensors, (B, ...) each
    n_fixed(count), fixed_batch(index, count, device)   # validation: batches that never change
    fingerprint()                       # plain types that identify the data
and may have the hooks of train/system.py.
"""

import functools
import hashlib
import inspect
import math
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils.data import default_collate

from data.meta import is_prepared
from data.token_files import mix64, open_stream
from data.tokenizer import find_vocabulary
from train.base.errors import DataError, SetupError
from train.distributed import broadcast_from_rank0

CHUNK_TOKENS = 1 << 18  # read at once, which makes the overhead of Python small
MIB = 1 << 20
MAX_BATCHES_AHEAD = 64
READING = threading.RLock()  # for Datasets: two may share a file, which has one position
ROUNDS = 6  # with 4, the order of fewer than about 10 samples is measurably biased


@dataclass
class Data:
    """The data of a run: loaders or torch Datasets per split, and facts that the model needs.

    val: `None` for no evaluations. test: evaluated once, at the end of the run; `None` for no test.
    spec: facts (vocabulary, tokenizer, classes, sizes) as plain Python types, saved in ckpt.pt.
    use: a command that uses the trained model, printed at the end of the run; "": USE of the model
    type. {out}, {best}, {data} and {ema} in it are replaced by out_dir, ckpt_best.pt or ckpt.pt
    (without the folder), data_dir and, if the best metric is of averaged weights (ema), " --ema".
    """
    train: object
    val: object = None
    spec: dict = field(default_factory=dict)
    test: object = None
    use: str = ""

    def __post_init__(self):
        """Raise DataError if a loader lacks a required attribute."""
        for split in ("train", "val", "test"):
            loader = getattr(self, split)  # `None` and torch Datasets have no get_batch
            own = "fingerprint" if split == "train" else "n_fixed fixed_batch"
            missing = [name for name in f"samples unit units_per_sample {own}".split()
                       if not hasattr(loader, name)]
            if missing and hasattr(loader, "get_batch"):
                raise DataError(f"Data.{split}: the loader has no {', '.join(missing)}; the top of "
                                "train/dataloader.py lists what a loader must have")

    def fingerprints(self):
        """Return {split: fingerprint() or `None`} for the splits train, val and test."""
        return {split: getattr(getattr(self, split), "fingerprint", lambda: None)()
                for split in ("train", "val", "test")}


# -----------------------------------------------------------------------------
# the order: explicit arithmetic, since np.random may change between versions of numpy

def hash64(seed, epoch, lane):
    """Return a 64-bit hash of (seed, epoch, lane) for each element of `epoch`: (n,) uint64.

    seed, lane: ints. Each purpose uses a different lane, which gives independent numbers.
    """
    # Multiples of the odd number gamma (2^64 / golden ratio) are well-spread inputs of mix64.
    gamma = np.uint64(0x9E3779B97F4A7C15)
    x = mix64(np.array([seed & (2**64 - 1)], np.uint64) + gamma)
    return mix64(mix64(x + epoch * gamma) + np.array([lane], np.uint64) * gamma)


def permute(p, n, keys):
    """Map positions p (m,) uint64 to samples by a pseudo-random bijection of 0..n-1: (m,) uint64.

    keys: per round, a uint64 array (m,) of random numbers.
    A shuffled list of a billion samples needs 8 GB. A Feistel network computes any entry of it
    directly: a position is a pair (left, right), a cell of an a x b grid, and each round shifts one
    half by a hash of the other half. The other half is unchanged, so the shift can be undone: every
    round is a bijection, for any hash function.
    """
    a = math.isqrt(n - 1) + 1  # about sqrt(n) rows
    b = -(-n // a)             # the smallest number of columns with a * b >= n
    one = np.uint64(1)  # halves the hash, so that the sums below do not overflow
    left, right = np.divmod(p, np.uint64(b))
    for i, key in enumerate(keys):
        if i % 2 == 0:
            left = (left + (mix64(right ^ key) >> one)) % np.uint64(a)
        else:
            right = (right + (mix64(left ^ key) >> one)) % np.uint64(b)
    out = left * np.uint64(b) + right
    # The grid has up to a - 1 more cells than samples. A position that is mapped outside passes
    # through the network until it is inside (cycle walking, Black & Rogaway 2002): a bijection.
    outside = np.flatnonzero(out >= n)
    if outside.size:
        out[outside] = permute(out[outside], n, [key[outside] for key in keys])
    return out


def shuffled(g, n, seed):
    """Return (epoch, index in 0..n-1), (m,) uint64 each, of the samples g; epochs differ in order.

    g: sample numbers, counted over all epochs, (m,) int64, ascending. n: samples per epoch.
    """
    epoch, position = np.divmod(g.astype(np.uint64), np.uint64(n))
    return epoch, permute(position, n, [hash64(seed, epoch, i) for i in range(1, ROUNDS + 1)])


def count_windows(n_tokens, block_size):
    """Return the number of windows of block_size tokens per epoch over a stream of n_tokens.

    One less than fit, so that all fit at every phase (the offset of the first window), but at least
    1. The last token of the stream is not in a window, only a target.

        |..phase..|window 0|window 1| ... |window n-1|..rest..|    n_tokens
    """
    return max(1, (n_tokens - 1) // block_size - 1)


def window_starts(g, n_tokens, block_size, seed):
    """Return the stream index of the first token of each sample in g, a window: (m,) int64.

    g: as for shuffled(). The windows of an epoch are adjacent and do not overlap. The first one
    starts at a random offset, the phase of the epoch: epochs cut the stream at different tokens.
    """
    n = count_windows(n_tokens, block_size)
    epoch, window = shuffled(g, n, seed)
    slack = min(n_tokens - 1 - n * block_size, block_size - 1)  # unused tokens
    phase = hash64(seed, epoch, 0) % np.uint64(slack + 1)
    return (phase + window * np.uint64(block_size)).astype(np.int64)


# -----------------------------------------------------------------------------
# arrays to a device

def send(array, device):
    """Return a numpy array or CPU tensor on `device`, a torch.device.

    The copy to CUDA is asynchronous, from pinned memory, which torch reuses only after the copy is
    done. On a CPU the result shares memory with `array`.
    """
    tensor = torch.as_tensor(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


# -----------------------------------------------------------------------------
# loaders

class Loader:
    """Base class of loaders, which selects the samples of each batch by (seed, step, rank).

    samples: sample count per epoch. batch_size: of this rank's training batches.
    val_samples: count of validation samples, which do not overlap: sample i is at position
    i * stride (1 by default) of the data. val_batch_size: equal at any world size.
    A subclass defines
        positions(g)             # where samples are in the data. g: as for shuffled() -> (m,) int64
        rows(positions)          # list of arrays (m, ...): the samples at these positions
        tensors(arrays, device)  # the batch, a tuple of tensors, made of these arrays
        identity()               # dict of plain types that identifies the data
    """
    calls_per_chunk = 1  # batches that are read at once
    places = "rows"      # what positions() returns, for messages
    stride = 1           # distance of the positions of validation samples

    def __init__(self, samples, val_samples, batch_size, val_batch_size, seed, rank, world_size):
        self.samples = samples
        self.val_samples = val_samples
        self.batch_size = batch_size
        self.val_batch_size = val_batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.step = 0               # of the next batch, if get_batch is called without a step
        self.chunk = ()             # tensors of the batches that were read at once
        self.chunk_steps = range(0)
        self.chunk_device = None

    def get_batch(self, device: str | torch.device = "cpu",
                  step: int | None = None) -> tuple[torch.Tensor, ...]:
        """Return this rank's batch `step` on `device`, a tuple of tensors (B, ...).

        step: number of the micro-batch, from 0, counted over the whole run; not the optimizer step.
        Calls without it return batches 0, 1, 2, ... The same (seed, step) gives the same batch.
        Do not modify the tensors: they share memory with the loader. DataError if step < 0.
        """
        index = self.step if step is None else step
        if index not in self.chunk_steps or device != self.chunk_device:
            self.read_chunk(index, device)
        if step is None:
            self.step += 1
        i = index - self.chunk_steps.start
        return tuple([t[i] for t in self.chunk])

    def read_chunk(self, step, device):
        """Read calls_per_chunk batches from `step` on into self.chunk; DataError if step < 0."""
        if step < 0:
            raise DataError(f"step {step}: expected 0 or more")
        steps = range(step, step + self.calls_per_chunk)
        batch = self.tensors(self.read(self.sample_numbers(steps)), torch.device(device))
        self.chunk = tuple(t.view(len(steps), self.batch_size, *t.shape[1:]) for t in batch)
        self.chunk_steps = steps
        self.chunk_device = device

    def read(self, g):
        """Return the samples g, numbered as for shuffled(), as a list of arrays (m, ...)."""
        return self.rows(self.positions(g))

    def describe(self, g):
        return f"{self.places} {', '.join(map(str, self.positions(g)))}"

    def locate(self, step):
        """Return where in the data this rank's batch `step` is, e.g. "rows 7, 1", for messages."""
        return self.describe(self.sample_numbers([step]))

    def sample_numbers(self, steps):
        """Return the numbers of the samples in this rank's batches `steps`: (len(steps) * B,).

        steps: numbers of micro-batches. Samples are numbered in shuffled order, over all epochs and
        ranks; the numbers are not positions in the data.
        """
        batches = np.array(steps, np.int64)[:, None] * self.world_size + self.rank
        return (batches * self.batch_size + np.arange(self.batch_size)).ravel()

    def n_fixed(self, count):
        """Return how many of `count` validation batches exist; the last may have fewer samples."""
        return -(-min(count * self.val_batch_size, self.val_samples) // self.val_batch_size)

    def fixed_batch(self, index, count, device="cpu"):
        """Return validation batch `index` of `count`, always the same, as tensors (B, ...).

        B <= val_batch_size. The samples do not overlap, and all batches together are spread evenly
        over the data. IndexError if the batch does not exist.
        """
        if not 0 <= index < self.n_fixed(count):
            raise IndexError(f"fixed batch {index} of {self.n_fixed(count)}")
        # The batches are spread evenly: a few of them represent all of the data.
        n = min(count * self.val_batch_size, self.val_samples)
        first = index * self.val_batch_size
        chosen = np.arange(first, min(first + self.val_batch_size, n), dtype=np.int64)
        positions = chosen * self.val_samples // n * self.stride
        return self.tensors(self.rows(positions), torch.device(device))

    @functools.cached_property
    def cached_identity(self):  # read once; every checkpoint contains it
        return self.identity()

    def fingerprint(self):
        """Return a dict of plain types that identifies the content of the data, e.g. a digest."""
        return dict(self.cached_identity)


class DataLoader(Loader):
    """Loader of shuffled windows of a token stream: batches (x, y), int64 (B, T) each.

    y is x shifted by one token. Each window is used once per epoch; in each epoch, the first one
    starts at a random offset. Not iterable.
    data_dir: folder, file or glob pattern of token files (data/token_files.py).
    batch_size: B, of this rank. block_size: T. split: e.g. "train" or "val".
    vocab_size: all token ids must be smaller (default: the size in meta.json, if there is one).
    Attributes: n_tokens, dtype (a name), vocab_size. DataError for invalid arguments, missing or
    damaged files, and fewer than T + 1 tokens.
    """
    unit = "tok"
    places = "windows at tokens"

    def __init__(self, data_dir: str | os.PathLike, batch_size: int, block_size: int,
                 split: str = "train", seed: int = 1337, rank: int = 0, world_size: int = 1,
                 vocab_size: int | None = None):
        if min(batch_size, block_size, world_size) < 1 or not 0 <= rank < world_size:
            raise DataError(f"batch_size {batch_size}, block_size {block_size}, rank {rank} of "
                            f"{world_size}: expected sizes of at least 1 and a rank below it")
        self.stream = open_stream(str(data_dir), split, vocab_size, least=block_size + 1)
        self.n_tokens = self.stream.n_tokens
        self.dtype = self.stream.dtype.name
        self.vocab_size = self.stream.vocab_size
        self.block_size = block_size
        self.units_per_sample = block_size
        self.stride = block_size
        super().__init__(count_windows(self.n_tokens, block_size),
                         (self.n_tokens - 1) // block_size, batch_size, batch_size, seed, rank,
                         world_size)
        self.calls_per_chunk = max(1, CHUNK_TOKENS // (batch_size * block_size))

    def positions(self, g):
        """Return the stream index of the first token of each sample in g, see window_starts()."""
        return window_starts(g, self.n_tokens, self.block_size, self.seed)

    def rows(self, positions):
        return [self.stream.read(positions, self.block_size + 1)]  # (m, T + 1)

    def tensors(self, arrays, device):
        """Return (x, y), int64 (B, T): windows (B, T + 1) without the last and the first token."""
        tokens = arrays[0]
        return tuple(send(t.astype(np.int64), device) for t in (tokens[:, :-1], tokens[:, 1:]))

    def identity(self):
        """Return a dict that identifies the tokens: count, dtype, bytes of all shards, a SHA-256.

        The digest is of the first and last MiB of every shard, in order, which is fast for 1 TB. A
        change elsewhere in a shard is not noticed.
        """
        # Content, not names or times: a copy on a different disk is the same data.
        digest = hashlib.sha256()
        shards = self.stream.shards
        for shard, first in zip(shards, self.stream.firsts.tolist()):
            n = min(shard.n_tokens, MIB // self.stream.dtype.itemsize)
            for start in (first, first + shard.n_tokens - n):
                digest.update(self.stream.read(np.array([start]), n).tobytes())
        return {"tokens": self.n_tokens, "dtype": self.dtype,
                "bytes": sum(s.identity[1] for s in shards), "sha256": digest.hexdigest()}


class RowLoader(Loader):
    """Loader of shuffled rows of numpy arrays: batches with a tensor (B, ...) per array.

    arrays: of equal length (N, ...); memory-mapped or not. Unsigned integers become int64.
    config, ranks: for batch size, seed and rank. DataError if an array is empty or lengths differ.
    """
    unit = "row"
    units_per_sample = 1

    def __init__(self, arrays: Sequence[np.ndarray], config, ranks):
        self.arrays = tuple(arrays)
        lengths = {len(a) for a in arrays}
        if len(lengths) != 1 or not min(lengths):
            raise DataError(f"arrays of lengths {sorted(lengths)}: expected one or more arrays of "
                            "the same length, above 0")
        n = lengths.pop()
        super().__init__(n, n, config.micro_batch(ranks.world_size), config.batch_size,
                         config.seed, ranks.rank, ranks.world_size)

    def positions(self, g):
        """Return the row index of each sample in g, numbered as for shuffled(): (m,) int64."""
        return shuffled(g, self.samples, self.seed)[1].astype(np.int64)

    def rows(self, positions):
        """Return, for each array, its rows (m, ...) at the row indices `positions` (m,) int64."""
        return [np.ascontiguousarray(array[positions]) for array in self.arrays]

    def tensors(self, arrays, device):
        return tuple(send(part.astype(np.int64) if part.dtype.kind == "u" else part, device)
                     for part in arrays)

    def identity(self):
        """Return shapes and dtypes, and one SHA-256 of the first and last MiB of each array."""
        digest = hashlib.sha256()
        for array in self.arrays:
            n = max(1, min(len(array), MIB // max(1, array[:1].nbytes)))
            for part in (array[:n], array[-n:]):
                digest.update(np.ascontiguousarray(part).tobytes())
        return {"arrays": [[list(a.shape), str(a.dtype)] for a in self.arrays],
                "sha256": digest.hexdigest()}


class DatasetLoader(RowLoader):
    """Loader of shuffled items of a map-style torch Dataset: a tensor (B, ...) per element.

    dataset: an object with __len__ and __getitem__. An item, dataset[i], is a tensor, an array or a
    number, or a tuple or dict of these, with the same shapes for all i. The values of a dict are
    passed to the model by position, in the order of item 0. An item must depend only on i, also in
    a different process (a resumed run, other ranks): no random numbers, no state. __getitem__ is
    called in threads, one call at a time. config, ranks: as for RowLoader. DataError for an empty
    dataset, and when items cannot be stacked.
    """

    def __init__(self, dataset, config, ranks):
        super().__init__([dataset], config, ranks)
        first = dataset[0]
        self.names = list(first) if isinstance(first, dict) else None

    def rows(self, positions):
        """Return the items at `positions`, stacked: one CPU tensor (m, ...) per element."""
        dataset, = self.arrays
        numbers = positions.tolist()
        with READING:
            items = [dataset[i] for i in numbers]
        try:
            batch = default_collate(items)
            parts = [batch[name] for name in self.names] if self.names else batch
        except (TypeError, RuntimeError, LookupError) as error:
            raise DataError(f"Dataset, items {numbers}: they cannot be stacked: {error}") from error
        parts = [parts] if isinstance(parts, torch.Tensor) else list(parts)
        if kinds := {type(part).__name__ for part in parts} - {"Tensor"}:
            raise DataError(f"Dataset, items {numbers}: expected tensors, arrays or numbers, or a "
                            f"tuple or dict of these; stacked, a part is a {', '.join(kinds)}")
        return parts

    def tensors(self, arrays, device):
        return tuple(send(part, device) for part in arrays)

    def identity(self):
        """Return the number of items, and one SHA-256 of the first and the last item."""
        digest = hashlib.sha256()
        for part in self.rows(np.array([0, self.samples - 1])):
            digest.update(part.flatten().view(torch.uint8).numpy())
        return {"items": self.samples, "sha256": digest.hexdigest()}


def as_loader(source, config, ranks):
    """Return a loader or `None` unchanged, a map-style Dataset as DatasetLoader.

    A loader has get_batch(), a Dataset __len__ and __getitem__. Raises DataError for others.
    """
    if source is None or hasattr(source, "get_batch"):
        return source
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return DatasetLoader(source, config, ranks)
    raise DataError(f"data: {type(source).__name__}: expected a map-style Dataset with __len__ and "
                    "__getitem__ (of a torch DataLoader, its dataset), or a loader as described in "
                    "train/dataloader.py")


def check_loader(loader, config, ranks):
    """Raise SetupError if a training Loader has a different batch size, rank or world size.

    Such batches are not parts of the run's global batches. Other loaders, and attributes that a
    subclass does not set, are not checked.
    """
    expected = dict(batch_size=config.micro_batch(ranks.world_size), rank=ranks.rank,
                    world_size=ranks.world_size)
    wrong = [f"{name} {getattr(loader, name)} (here {value})" for name, value in expected.items()
             if isinstance(loader, Loader) and getattr(loader, name, value) != value]
    if wrong:
        raise SetupError(f"the {type(loader).__name__} of the training data was made for another "
                         f"run: {', '.join(wrong)}; make it from the config and the ranks of this "
                         "run, in open_data(config, ranks) of a model file, or use a torch Dataset")


def check_item_names(model, loader):
    """Raise SetupError if a Dataset's dict keys are parameters of forward(), in another order.

    Values are passed by position: the keys must be the first parameters. Other keys, items and
    loaders are not checked.
    """
    names = getattr(loader, "names", None)
    parameters = list(inspect.signature(model.forward).parameters) if names else []
    if names and set(names) <= set(parameters) and names != parameters[:len(names)]:
        raise SetupError(f"the Dataset's items have {', '.join(names)} in this order, and forward "
                         f"has {', '.join(parameters)}: values are passed by position")


def seed_step(seed, it, ranks):
    """Seed torch's generators on the CPU and ranks.device by (seed, step `it`, rank)."""
    number = ((seed * 1_000_003 + it) * 65_537 + ranks.rank) % 2**63
    # Not torch.manual_seed: it formats a traceback for each missing accelerator, 0.5 ms per step.
    torch.default_generator.manual_seed(number)
    if ranks.device.type != "cpu":
        getattr(torch, ranks.device.type).manual_seed(number)


def check_batch(batch):
    """Return `batch`; SetupError unless it is a non-empty tuple or list, item 0 not 0-dim."""
    if not isinstance(batch, (tuple, list)) or not batch:
        raise SetupError(f"a loader's batch is a {type(batch).__name__}, expected a tuple (x, ...)")
    if getattr(batch[0], "ndim", 1) == 0:
        raise SetupError("a loader's batch begins with a single number, expected x (B, ...)")
    return batch


class Prefetcher:
    """Batches of a loader on `device`, a torch.device, prepared in advance by a thread.

    seconds: total time get() has waited; the caller may set it to 0. close() stops the thread.
    get() must be called in ascending order of steps without gaps: other batches are not freed.
    The thread prepares as many batches as the loader reads at once (calls_per_chunk), at most
    MAX_BATCHES_AHEAD. For a loader with the attribute `computes`, get() calls it without a thread.
    """

    def __init__(self, loader, device):
        self.loader = loader
        self.device = device
        self.thread = None
        if not getattr(loader, "computes", False):
            # Otherwise the thread would create a context on GPU 0, for pinned memory.
            start = torch.cuda.set_device if device.type == "cuda" else None
            self.thread = ThreadPoolExecutor(1, "batches", start, (device,))
        self.ahead = {}  # {step: Future}
        self.seconds = 0.0  # time spent waiting for batches
        # One read may return thousands of small batches; the limit is enough to read in time.
        self.n_ahead = 1 + min(MAX_BATCHES_AHEAD, getattr(loader, "calls_per_chunk", 1))

    def get(self, step):
        """Return the loader's batch `step`, and start to prepare the next ones."""
        if self.thread is None:
            return self.read(step)
        for s in range(step, step + self.n_ahead):
            if s not in self.ahead:
                self.ahead[s] = self.thread.submit(self.read, s)
        started = time.perf_counter()
        batch = self.ahead.pop(step).result()
        self.seconds += time.perf_counter() - started
        return batch

    def read(self, step):
        """Return the loader's batch `step`; SetupError as for check_batch()."""
        return check_batch(self.loader.get_batch(self.device, step))

    def close(self):
        if self.thread:
            self.thread.shutdown(cancel_futures=True)


# -----------------------------------------------------------------------------
# token files as the data of a run

def open_token_data(config, ranks, loader=DataLoader):
    """Return the Data of the token files in config.data_dir, with the splits train and val.

    val is `None` if eval_interval is 0. spec: vocabulary and tokenizer.
    If data_dir is named stdlib and is not prepared yet, rank 0 prepares this built-in data set.
    loader: class of the loaders, with the arguments of DataLoader. All ranks must call.
    DataError if the files cannot be used.
    """
    c = config
    if os.path.basename(os.path.normpath(c.data_dir)) == "stdlib" and not is_prepared(c.data_dir):
        from data.prepare import ensure_dataset
        broadcast_from_rank0(lambda: ensure_dataset(c.data_dir), ranks)
    size, tokenizer = find_vocabulary(c.data_dir, c.tokenizer, c.vocab_size)

    def load(split, batch_size, rank, world_size):
        return loader(c.data_dir, batch_size, c.block_size, split, c.seed, rank, world_size, size)
    train = load("train", c.micro_batch(ranks.world_size), ranks.rank, ranks.world_size)
    # Every rank evaluates whole batches, so the value does not depend on the number of ranks.
    val = load("val", c.batch_size, 0, 1) if c.eval_interval else None
    return Data(train, val, dict(vocab_size=size, tokenizer=tokenizer and tokenizer.spec()))
