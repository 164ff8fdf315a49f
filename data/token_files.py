"""Token files as one memory-mapped stream.

Formats: nanoGPT's raw .bin (uint16, or the dtype of meta.json), llm.c and modded-nanogpt shards,
.npy files. The format is recognised and checked when a file is opened.
"""

import contextlib
import functools
import glob
import mmap
import os
import re
from dataclasses import dataclass

import numpy as np

from data.meta import MAX_ID, model_hint, prepared_model, read_meta
from train.base.errors import DataError

CHECKED_WHOLE = 64 << 20  # bytes: of a smaller stream all ids are checked before training
CHECKED_WINDOW = 1 << 12  # tokens: of a larger stream, windows are checked
LLMC = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # magic: version and dtype of llm.c's shards
TEXT_BYTES = bytes([9, 10, 13, *range(32, 127)])
PREPARE = "make it with `python -m data.prepare FILE.txt --out FOLDER`"


def mix64(x):
    """Return a bijective hash of x (n,) uint64: splitmix64's finalizer (Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass
class Shard:
    """The place and the dtype of the tokens in one file."""
    path: str
    dtype: np.dtype
    n_tokens: int
    offset: int  # bytes before the first token
    identity: tuple  # of the file when it was opened, see identify


def identify(stat):
    """Return (inode, size, mtime in ns) of an os.stat result; they change if a file is replaced."""
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def find_files(data_dir, split):
    """Return the sorted paths of a split's token files; raise DataError if none is found.

    data_dir: a file or a glob pattern, in which {split} is replaced by the split (required except
    for "train"); or a folder with SPLIT.bin or, without this file, shards *SPLIT*.bin and
    *SPLIT*.npy (with no letter before SPLIT; not in a folder prepared for a model type other than
    gpt).
    """
    if os.path.isdir(data_dir):
        return find_files_in(data_dir, split)
    if split != "train" and "{split}" not in data_dir:
        # The same tokens would be training and validation data.
        raise DataError(f"{data_dir}: one file or pattern is training data only; for {split} data "
                        "give a folder, or a name with {split}: 'x/{split}_*.bin'")
    path = data_dir.replace("{split}", split)
    paths = [path] if os.path.exists(path) else sorted(glob.glob(path))
    if not paths:
        hint = "; a mixture has weights: a:0.7,b:0.3" if "," in data_dir else ""
        raise DataError(f"{path}: no such file or folder{hint}; set data_dir, or {PREPARE}")
    return paths


def find_files_in(folder, split):
    """Return the sorted paths of a split's token files in a folder; DataError without any.

    The names are those that find_files() describes for a folder.
    """
    names = sorted(os.listdir(folder))
    shards = [f"{split}.bin"] if f"{split}.bin" in names else []
    if not shards and prepared_model(folder) in (None, "gpt"):
        pattern = re.compile(rf"(?!\.)(.*[^A-Za-z])?{split}.*\.(bin|npy)")  # not medieval.bin
        shards = [name for name in names if pattern.fullmatch(name)]
    if not shards:
        existing = ", ".join(names[:8]) or "nothing"
        raise DataError(f"{folder}: no {split} data: expected {split}.bin, or shards "
                        f"*{split}*.bin, *{split}*.npy with no letter before it, found {existing}"
                        f"{model_hint(folder)}; set data_dir, or {PREPARE}")
    return [os.path.join(folder, name) for name in shards]


def open_npy(path):
    """Return the array in a .npy file, memory-mapped and read-only.

    Raises DataError if the file is missing or damaged, or has Python objects.
    """
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except Exception as error:  # numpy raises many types for a damaged file
        raise DataError(f"{path}: cannot be read as a .npy array ({error}): damaged, or cut short? "
                        "copy it again, or prepare it again") from None


def read_layout(path, f, raw_dtype):
    """Return (dtype name, offset of the tokens in bytes, token count) of the token file `path`.

    f: this file, open in binary mode. It is a .npy file, a shard of llm.c, or otherwise raw tokens
    of raw_dtype (`None`: unknown, uint16 is assumed). Raises DataError for a .npy array that is not
    one-dimensional and uint16, uint32, int32 or int64, an unknown version of llm.c, and as
    check_raw.
    """
    head = f.read(1 << 16)
    if path.endswith(".npy") or head.startswith(b"\x93NUMPY"):
        array = open_npy(path)
        if array.ndim != 1 or array.dtype.str not in ("<u2", "<u4", "<i4", "<i8"):
            raise DataError(f"{path}: {array.dtype} of shape {array.shape}, expected a row of ids")
        return array.dtype.str, array.offset, len(array)
    magic, version, n_tokens = np.frombuffer(head[:12].ljust(12, b"\0"), "<i4").tolist()
    if magic in LLMC:  # GPT-2 has no ids like these magics: 55432, 55713
        known_version, dtype = LLMC[magic]
        if version != known_version:
            raise DataError(f"{path}: version {version} of llm.c's shards is unknown; convert it")
        return dtype, 1024, n_tokens
    check_raw(path, head, raw_dtype)
    dtype = raw_dtype or "uint16"
    return dtype, 0, -(-os.fstat(f.fileno()).st_size // np.dtype(dtype).itemsize)


def check_raw(path, head, raw_dtype):
    """Raise DataError if `head`, a raw file's start, is text or, without raw_dtype, like uint32."""
    if len(head) >= 64 and not head.translate(None, TEXT_BYTES):
        raise DataError(f"{path}: is text, not tokens; {PREPARE}")
    if raw_dtype is None and len(head) >= 128:
        low, high = np.frombuffer(head[:len(head) // 4 * 4], "<u2").reshape(-1, 2).T
        if low.any() and not high.any() or high.max() < 4 and low.max() >= 1024:
            raise DataError(f"{path}: looks like uint32 tokens read as uint16; put "
                            '{"dtype": "uint32"} into a meta.json beside it')


def open_shard(path, raw_dtype):
    """Return the Shard of a token file, see read_layout; DataError if empty or of a wrong size."""
    try:
        with open(path, "rb") as f:
            identity = identify(os.fstat(f.fileno()))
            dtype, offset, n_tokens = read_layout(path, f, raw_dtype)
    except OSError as e:
        raise DataError(f"{path}: cannot be read: {e.strerror}; make it readable") from None
    dtype = np.dtype(dtype)
    expected = offset + n_tokens * dtype.itemsize
    if n_tokens <= 0:
        raise DataError(f"{path}: holds no tokens; {PREPARE}")
    if identity[1] != expected:
        raise DataError(f"{path}: is {identity[1]:,} bytes, expected {expected:,} for {n_tokens:,} "
                        f"tokens of {dtype}: cut short? copy it again, or {PREPARE}")
    return Shard(path, dtype, n_tokens, offset, identity)


def open_stream(data_dir, split, vocab_size=None, least=1):
    """Open the token files of a split as a TokenStream.

    data_dir: see find_files. vocab_size: ids must be smaller (default: the value in meta.json).
    least: the smallest accepted token count (block_size + 1).
    Raises DataError for missing or damaged files, a token count other than in meta.json or below
    `least`, and ids outside the vocabulary. In large files, only samples of the ids are checked
    here; TokenStream.read() checks all ids that it returns.
    """
    paths = find_files(data_dir, split)
    metas = {folder: read_meta(folder) for folder in {*map(os.path.dirname, paths)}}
    stream = TokenStream([open_shard(p, metas[os.path.dirname(p)].dtype) for p in paths],
                         vocab_size or metas[os.path.dirname(paths[0])].vocab_size)
    n = stream.n_tokens
    expected = n
    with contextlib.suppress(TypeError, KeyError):  # no splits, or those of another program
        expected = sum(meta.splits[split]["tokens"] for meta in metas.values())
    if os.path.basename(paths[0]) == f"{split}.bin" and n != expected:
        raise DataError(f"{paths[0]}: {n:,} tokens, but meta.json says {expected}; prepare again")
    if n < least:
        raise DataError(f"{paths[0]}: {n:,} tokens, but block_size {least - 1} needs {least:,}: "
                        "lower block_size, or prepare more text")
    stream.check_ids()
    return stream


class TokenStream:
    """The tokens of several memory-mapped files as one stream.

    shards: Shards of the same dtype, otherwise DataError. Attributes: n_tokens, dtype, vocab_size
    (all ids must be smaller; `None`: unknown).
    A read maps the necessary files for a short time, so that memory use does not grow with their
    size. It raises DataError if a file has changed since it was opened. If a file is truncated
    during a read, or the disk fails, the process is killed by SIGBUS.
    """

    def __init__(self, shards, vocab_size=None):
        self.shards = shards
        self.dtype = shards[0].dtype
        self.vocab_size = vocab_size
        self.firsts = np.cumsum([0] + [s.n_tokens for s in shards])  # first token per shard, then N
        self.n_tokens = int(self.firsts[-1])
        if len({s.dtype for s in shards}) > 1:
            raise DataError(f"{shards[0].path} and others: token files of different types: "
                            f"{', '.join(sorted({str(s.dtype) for s in shards}))}; expected one")

    def locate(self, token):
        """Return (path, offset in tokens) of the stream's token with the index `token`."""
        i = int(np.searchsorted(self.firsts, token, "right")) - 1
        return self.shards[i].path, int(token - self.firsts[i])

    def check_ids(self):
        """Raise DataError for an id outside the vocabulary, or if a file has changed.

        In a stream above CHECKED_WHOLE (64 MiB), only 256 windows of CHECKED_WINDOW (4096) tokens
        are checked, including the first and the last.
        """
        n = self.n_tokens
        is_small = n * self.dtype.itemsize <= CHECKED_WHOLE
        length = n if is_small else CHECKED_WINDOW
        starts = np.linspace(0, n - length, 1 if is_small else 256).astype(np.int64)
        self.read(starts, length)

    def read(self, starts, length):
        """Return the windows of ids (n, length), of self.dtype, at positions `starts` (n,) int64.

        Windows must be inside the stream (not checked). Raises DataError for an id outside the
        vocabulary, or if a file has changed.
        """
        tokens = self._copy(starts, length)
        limit = self.vocab_size or MAX_ID
        # On a GPU an id outside the embedding kills the process without naming the file.
        if int(tokens.max()) >= limit or int(tokens.min()) < 0:
            row, column = np.argwhere((tokens >= limit) | (tokens < 0))[0]
            path, offset = self.locate(starts[row] + column)
            raise DataError(f"{path}: token {tokens[row, column]} at offset {offset:,} is outside "
                            f"the vocabulary of {limit:,}; correct vocab_size or meta.json's dtype")
        return tokens

    def _copy(self, starts, length):
        """Return the windows (n, length) as `read`, but without a check of the ids."""
        rows = np.empty((len(starts), length), self.dtype)
        which = np.searchsorted(self.firsts, starts, "right") - 1  # (n,) index of the shard
        tokens_of = functools.lru_cache(1)(self._map)  # a file is mapped once for all its windows
        for n in np.argsort(starts):
            row, i = rows[n], which[n]
            piece = tokens_of(i)[starts[n] - self.firsts[i]:][:length]
            while len(piece) < len(row):  # the window extends into the next file
                row[:len(piece)] = piece
                row, i = row[len(piece):], i + 1
                piece = tokens_of(i)[:len(row)]
            row[:] = piece
        return rows

    def _map(self, i):
        """Return the tokens of shard i, memory-mapped; DataError if the file has changed."""
        shard = self.shards[i]
        try:
            if identify(os.stat(shard.path)) != shard.identity:
                raise ValueError("changed during the run")
            mapped = np.memmap(shard.path, shard.dtype, "r", shard.offset, (shard.n_tokens,))
        except (OSError, ValueError) as error:  # ValueError also: truncated after os.stat
            raise DataError(f"{shard.path}: {error}; put the old file back, resume") from None
        if hasattr(mmap, "MADV_RANDOM"):  # the default reads 128 KiB or more ahead
            mapped._mmap.madvise(mmap.MADV_RANDOM)
        return np.asarray(mapped)
