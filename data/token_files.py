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
    """Return a hash of each number in x, by splitmix64's finalizer (Steele et al. 2014), a
    bijection. (n,) uint64 -> (n,) uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass
class Shard:
    """The place of the tokens in one file: path, dtype, n_tokens (number of tokens), offset (bytes
    before the first token), and identity, the result of identify() when the file was opened, by
    which TokenStream notices that the file was changed."""
    path: str
    dtype: np.dtype
    n_tokens: int
    offset: int  # bytes before the first token
    identity: tuple  # of the file when it was opened, see identify


def identify(stat):
    """Return (inode, size, modification time in ns) of `stat`, a result of os.stat. They change if
    a file is replaced."""
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def find_files(data_dir, split):
    """Return the sorted list of paths of the token files of a split, e.g. "train"; at least one.
    data_dir: a file or a glob pattern, in which the text {split} is replaced by the split; or a
    folder, with SPLIT.bin or, without this file, shards *SPLIT*.bin and *SPLIT*.npy (with no letter
    before SPLIT; not in a folder prepared for a model type other than gpt). Raises DataError if
    there is no such file, and for a file or pattern without {split} if the split is not "train".
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
    """Return the sorted list of paths of the token files of a split in a folder. Arguments, errors:
    as for find_files."""
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
    """Return the array in the .npy file `path`, memory-mapped and read-only. Objects are not
    unpickled. Raises DataError if the file is missing or damaged."""
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except Exception as error:  # numpy raises many types for a damaged file
        raise DataError(f"{path}: cannot be read as a .npy array ({error}): damaged, or cut short? "
                        "copy it again, or prepare it again") from None


def read_layout(path, f, raw_dtype):
    """Return (name of the dtype, offset of the tokens in bytes, number of tokens) of a token file.
    path: a .npy file, a shard of llm.c, or any other file, which has raw tokens of the dtype
    raw_dtype, e.g. "uint16" (`None`: unknown, uint16 is assumed). f: this file, open in binary
    mode. Raises DataError for a .npy array that is not one-dimensional or has a dtype other than
    uint16, uint32, int32 or int64, for an unknown version of llm.c's shards, and the errors of
    check_raw."""
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
    """Raise DataError if the file `path`, which begins with the bytes `head`, is text, or if its
    raw tokens seem to be uint32 although raw_dtype is `None`."""
    if len(head) >= 64 and not head.translate(None, TEXT_BYTES):
        raise DataError(f"{path}: is text, not tokens; {PREPARE}")
    if raw_dtype is None and len(head) >= 128:
        low, high = np.frombuffer(head[:len(head) // 4 * 4], "<u2").reshape(-1, 2).T
        if low.any() and not high.any() or high.max() < 4 and low.max() >= 1024:
            raise DataError(f"{path}: looks like uint32 tokens read as uint16; put "
                            '{"dtype": "uint32"} into a meta.json beside it')


def open_shard(path, raw_dtype):
    """Read the header of the token file `path`, check the size of the file, and return a Shard.
    raw_dtype: name of the dtype of the tokens in a file without a header, or `None`, see
    read_layout. Raises DataError for a file that cannot be read, has no tokens, has a different
    size than the header states, or is not accepted by read_layout."""
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
    """Open the token files of a split as a TokenStream. data_dir: a folder, a file or a glob
    pattern, see find_files. vocab_size: ids must be smaller (default: the value in meta.json).
    least: the smallest accepted number of tokens (block_size + 1).

    Raises DataError for missing or damaged files, a number of tokens other than in meta.json or
    below `least`, and for ids outside the vocabulary. In large files, only samples of the ids are
    checked here; TokenStream.read() checks all ids that it returns.
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
    """The tokens of several memory-mapped files as one stream; read(starts, length) returns windows
    of it. shards: a list of Shards of the same dtype (otherwise DataError). Attributes: n_tokens,
    dtype, vocab_size (all ids must be smaller; `None`: unknown).

    Each read maps the necessary files for a short time, so that memory use does not grow with the
    size of the files. Before each read the files are checked: DataError if one has changed since it
    was opened. If a file is truncated during a read, or the disk fails, the process is killed by
    SIGBUS.
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
        """Return (path, offset in tokens): the file that has the token with the index `token` in
        the stream, and the index of this token in the file."""
        i = int(np.searchsorted(self.firsts, token, "right")) - 1
        return self.shards[i].path, int(token - self.firsts[i])

    def check_ids(self):
        """Raise DataError for an id outside the vocabulary, or if a file has changed. All tokens of
        a stream of up to CHECKED_WHOLE (64 MiB) are checked; of a larger one, 256 windows of
        CHECKED_WINDOW tokens, including the first and the last."""
        n = self.n_tokens
        is_small = n * self.dtype.itemsize <= CHECKED_WHOLE
        length = n if is_small else CHECKED_WINDOW
        starts = np.linspace(0, n - length, 1 if is_small else 256).astype(np.int64)
        self.read(starts, length)

    def read(self, starts, length):
        """Return the windows of ids, an array (n, length) of self.dtype, that begin at the
        positions `starts`, (n,) int64, in the stream; the windows must be inside the stream (not
        checked). Raises DataError for an id outside the vocabulary, or if a file has changed."""
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
        """Return the windows (n, length) as `read`, but without a check of the ids. Raises
        DataError if a file has changed."""
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
        """Return the tokens of shard number i, memory-mapped, as an array (n_tokens,). Raises
        DataError if the file has changed or cannot be read."""
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
