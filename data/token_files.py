"""Token files as one memory-mapped stream: find them, recognise their format, refuse what is wrong.

Formats: nanoGPT's raw .bin (uint16, or what meta.json says), llm.c and modded-nanogpt shards, .npy.
"""

import glob
import mmap
import os
import tokenize
from dataclasses import dataclass

import numpy as np

from data.meta import MAX_ID, model_hint, prepared_model, read_meta
from train.base.errors import DataError, UserError
from train.base.fields import parse_mixture

# What the maps may hold of this process's memory. The kernel maps 64 KiB around a page it is asked
# for; mapping anew for every batch instead would cost more than the reading.
MAPPED_BYTES, FAULT_BYTES = 64 << 20, 64 << 10
MIB = 1 << 20
CHECKED_WHOLE = 64 << 20  # bytes of a stream whose every id is checked before work starts
LLMC = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # (magic, version) of llm.c's shards
TEXT_BYTES = bytes([9, 10, 13, *range(32, 127)])
PREPARE = "make it with `python -m data.prepare`"


def mix64(x):
    """splitmix64's finalizer (Steele et al. 2014), a bijection of 64 bits. x: (n,) uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass
class Shard:
    path: str
    dtype: np.dtype
    n_tokens: int
    offset: int  # bytes before the first token
    identity: tuple  # of the file when it was opened, see identify


def identify(stat):
    """What tells a file from a changed or replaced one: inode, size, time of the last change."""
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def find_files(data_dir, split):
    """The sorted token files of one split: data_dir is a folder, a file or a glob."""
    if os.path.isdir(data_dir):
        start = os.path.join(glob.escape(data_dir), "")
        wanted = f"{split}.bin, or shards *{split}*.bin or *{split}*.npy"
        shards = () if prepared_model(data_dir) not in (None, "gpt") else ("bin", "npy")
        paths = glob.glob(f"{start}{split}.bin") or [
            p for end in shards for p in glob.glob(f"{start}*{split}*.{end}")]
        found = ", ".join(sorted(os.listdir(data_dir))[:8]) or "nothing"
    else:
        # Without {split} in the name the same tokens would be training and validation data.
        if split != "train" and "{split}" not in data_dir:
            raise DataError(f"{data_dir}: one file or pattern is training data only; for {split} "
                            "data give a folder, or a name with {split}: 'x/{split}_*.bin'")
        wanted, found = data_dir.replace("{split}", split), "no such file or folder"
        paths = [wanted] if os.path.exists(wanted) else glob.glob(wanted)
    if not paths:
        raise DataError(f"{data_dir}: no {split} data: expected {wanted}, found {found}"
                        f"{model_hint(data_dir)}; set data_dir, or {PREPARE}")
    return sorted(paths)


def check_there(config):
    """UserError where what a run opens first is not there: torch, which takes seconds to import, is
    not needed to find that out."""
    file, again = config.resume_file, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if file and not os.path.exists(file) and not again:  # a restarted job has its own past
        raise UserError(f"resume: {file!r} is none of auto, never and must, and no such file")
    for folder in parse_mixture(config.data_dir) or [config.data_dir]:
        if config.model == "gpt" and os.path.basename(os.path.normpath(folder)) != "stdlib":
            find_files(folder, "train")


# What numpy raises for a .npy file that it cannot read.
NPY_ERRORS = (OSError, ValueError, EOFError, tokenize.TokenError, SyntaxError, TypeError,
              ArithmeticError, RecursionError, MemoryError)


def open_npy(path):
    """The array in a .npy file, memory-mapped; never unpickles. Raises DataError."""
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except NPY_ERRORS as error:
        raise DataError(f"{path}: cannot be read as a .npy array ({error}): damaged, or cut short? "
                        "copy it again, or prepare it again") from None


def check_plausible(tokens):
    """ValueError if a raw file's first tokens look like another format. tokens: (n,) integers."""
    if len(tokens) < 64:
        return
    if tokens.dtype.itemsize == 2:
        low, high = tokens[0::2], tokens[1::2]
        if low.any() and not high.any() or high.max() < 4 and low.max() >= 1024:
            raise ValueError("looks like uint32 tokens read as uint16; put "
                             '{"dtype": "uint32"} into a meta.json beside it')
    elif tokens.max() >= MAX_ID:
        raise ValueError(f"holds {tokens.max():,}, no token id: uint16 tokens read as uint32? "
                         "correct the dtype in meta.json")


def read_layout(path, f, size, raw_dtype):
    """(dtype, bytes before the data, tokens) of a token file; ValueError says what is wrong."""
    head = f.read(1 << 16)
    if not size:
        raise ValueError(f"is empty; {PREPARE}")
    if head[:6] == b"\x93NUMPY":
        if not path.endswith(".npy"):
            raise ValueError("is in .npy format: rename it to .npy")
        array = open_npy(path)
        if array.ndim != 1 or array.dtype.str not in ("<u2", "<u4", "<i4", "<i8"):
            raise ValueError(f"holds {array.dtype} of shape {array.shape}, expected one row of ids")
        dtype, offset, n = array.dtype.str, array.offset, len(array)
    elif path.endswith(".npy"):
        raise ValueError("is not in .npy format: download or write it again")
    else:
        magic, version, n = np.frombuffer(head[:12].ljust(12, b"\0"), "<i4").tolist()
        if magic == 20240522:
            raise ValueError("is an llm.c evaluation file, not a stream of tokens to train on")
        if len(head) >= 64 and not head.translate(None, TEXT_BYTES):
            raise ValueError(f"is text, not tokens; {PREPARE}")
        if (magic, version) not in LLMC:  # GPT-2 has no ids like these magics: 55432, 55713
            if size % np.dtype(raw_dtype).itemsize:
                raise ValueError(f"{size:,} bytes is not a whole number of {raw_dtype} tokens: cut "
                                 f"short? copy it again, or {PREPARE}")
            tokens = np.frombuffer(head, raw_dtype)
            check_plausible(tokens)
            return raw_dtype, 0, size // tokens.itemsize
        dtype, offset = LLMC[magic, version], 1024
    if not n:
        raise ValueError(f"holds no tokens; {PREPARE}")
    if size != (expected := offset + n * np.dtype(dtype).itemsize):
        raise ValueError(f"is {size:,} bytes, but its header promises {n:,} tokens in "
                         f"{expected:,} bytes: cut short? copy it again")
    return dtype, offset, n


def open_shard(path, raw_dtype):
    """The Shard of one file; raw files hold `raw_dtype`, the other formats say what they hold."""
    try:
        with open(path, "rb") as f:
            identity = identify(os.fstat(f.fileno()))
            dtype, offset, n = read_layout(path, f, identity[1], raw_dtype)
        return Shard(path, np.dtype(dtype), n, offset, identity)
    except DataError:  # names the file already
        raise
    except OSError as e:
        raise DataError(f"{path}: cannot be read: {e.strerror}; make it readable") from None
    except ValueError as e:
        raise DataError(f"{path}: {e}") from None


def open_stream(data_dir, split, vocab_size=None, least=1):
    """The TokenStream of one split, checked: as many tokens as meta.json says and at least `least`,
    with ids below vocab_size (None: what meta.json says, if it does). Raises DataError."""
    paths = find_files(data_dir, split)
    meta = read_meta(os.path.dirname(paths[0]))
    stream = TokenStream([open_shard(p, meta.dtype or "uint16") for p in paths],
                         vocab_size or meta.vocab_size)
    where, n = paths[0] + (" ..." if paths[1:] else ""), stream.n_tokens
    try:
        expected = meta.splits[split]["tokens"]
    except (KeyError, TypeError):
        expected = n  # not prepared by data.prepare
    if os.path.basename(paths[0]) == f"{split}.bin" and n != expected:
        raise DataError(f"{where}: {n:,} tokens, but meta.json says {expected:,}: cut short or "
                        "replaced? prepare the data again")
    if n < least:
        raise DataError(f"{where}: {n:,} tokens, but block_size {least - 1} needs {least:,}: lower "
                        "block_size, or prepare more text")
    stream.check_places()
    return stream


class TokenStream:
    """The tokens of several files as one, memory-mapped, so that a terabyte is read on a laptop.

    Maps are let go and made anew before the pages once read add up to MAPPED_BYTES. Before each
    read its files are checked to be those of the start (DataError). One that is cut short while it
    is being read, or a disk that fails, ends the process with SIGBUS, as with any memory map.
    """

    def __init__(self, shards, vocab_size=None):
        self.shards, self.dtype, self.vocab_size = shards, shards[0].dtype, vocab_size
        self.firsts = np.cumsum([0] + [s.n_tokens for s in shards])  # first token of each, then N
        self.n_tokens = int(self.firsts[-1])
        self.maps, self.n_read = {}, 0  # shard -> its array; windows read from these maps
        if len({s.dtype for s in shards}) > 1:
            raise DataError(f"{shards[0].path} and others: token files of different types: "
                            f"{', '.join(sorted({str(s.dtype) for s in shards}))}; expected one")

    def locate(self, token):
        """(path, offset in tokens) of a token of the stream."""
        i = int(np.searchsorted(self.firsts, token, "right")) - 1
        return self.shards[i].path, int(token - self.firsts[i])

    def check_places(self):
        """Check ids before work starts: all of a small stream, else both ends and 64 places."""
        n, size = self.n_tokens, self.dtype.itemsize
        small = n * size <= CHECKED_WHOLE
        lengths = [n] if small else [min(n, MIB // size), min(n, 4096)]
        for length, places in zip(lengths, (2, 64)):
            starts = np.unique(np.linspace(0, n - length, places).astype(np.int64))
            self.read(starts, length)

    def read(self, starts, length):
        """The windows starts[i] .. + length, every id inside the vocabulary (DataError), where it
        is known. starts: (n,) int64 -> (n, length) of self.dtype."""
        tokens = self._gather(starts, length)
        limit = self.vocab_size or 1 << 62  # unknown: only negative ids are wrong
        # On a GPU an id outside the embedding would end the process without a word of where.
        if int(tokens.max()) >= limit or int(tokens.min()) < 0:
            row, column = np.argwhere((tokens >= limit) | (tokens < 0))[0]
            path, offset = self.locate(starts[row] + column)
            of = f" of {limit:,}" if self.vocab_size else ""
            raise DataError(f"{path}: token {tokens[row, column]} at offset {offset:,} is outside "
                            f"the vocabulary{of}: another tokenizer's file, or damaged; correct "
                            "vocab_size, or prepare the data again")
        return tokens

    def _gather(self, starts, length):
        if len(self.shards) == 1:  # the usual case: one gather
            rows = np.lib.stride_tricks.sliding_window_view(self._map(0), length)[starts]
        else:
            rows = self._read_shards(starts, length)
        self.n_read += len(starts)
        if min(self.n_tokens * self.dtype.itemsize, self.n_read * FAULT_BYTES) > MAPPED_BYTES:
            self.maps, self.n_read = {}, 0
        return rows

    def _read_shards(self, starts, length):
        """read() from several files, a window at a time, piece by piece where one crosses a border:
        often no two windows of a batch are of one file, so there is nothing to gather."""
        rows = np.empty((len(starts), length), self.dtype)
        which = np.searchsorted(self.firsts, starts, "right") - 1  # (n,) the shard it starts in
        arrays = {i: self._map(i) for i in np.unique(which).tolist()}
        for row, i, at in zip(rows, which.tolist(), (starts - self.firsts[which]).tolist()):
            piece = arrays[i][at:at + length]
            row[:len(piece)] = piece
            while len(piece) < len(row):
                row, i = row[len(piece):], i + 1
                piece = self._map(i)[:len(row)]
                row[:len(piece)] = piece
        return rows

    def _map(self, i):
        """Shard i as an array (n_tokens,); DataError where its file is not that of the start."""
        shard = self.shards[i]
        try:
            now = identify(os.stat(shard.path))
            if now == shard.identity and i not in self.maps:
                mapped = np.memmap(shard.path, shard.dtype, "r", shard.offset, (shard.n_tokens,))
                if hasattr(mmap, "MADV_RANDOM"):  # else every window reads ahead 128 KiB or more
                    mapped._mmap.madvise(mmap.MADV_RANDOM)
                self.maps[i] = np.asarray(mapped)
        except (OSError, ValueError) as e:  # ValueError: cut short this very moment
            raise DataError(f"{shard.path}: is gone ({getattr(e, 'strerror', e)}); put it back"
                            ) from None
        if now != shard.identity:
            raise DataError(f"{shard.path}: changed during the run: {shard.identity[1]:,} bytes at "
                            f"the start, {now[1]:,} now; put the old file back and resume")
        return self.maps[i]
