"""Token files as one stream: find them, recognise their format, refuse what is wrong, read safely.

Formats: nanoGPT's raw .bin (uint16, or what meta.json says), llm.c and modded-nanogpt shards, .npy.
"""

import glob
import json
import os
import time
from dataclasses import dataclass

import numpy as np

from data.tokenizer import PlainUnpickler

IN_MEMORY_BYTES = 64 << 20  # streams up to this size are read once; larger ones window by window
MAX_OPEN_FILES = 256  # well under the usual limit of 1,024: data sets may have more shards
RETRY_SLEEPS = (0.05, 0.2, 0.5)  # seconds before each new try of a read that failed
LLMC = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # (magic, version) of llm.c's shards
TEXT_BYTES = bytes([9, 10, 13, *range(32, 127)])
PREPARE = "make it with `python -m data.prepare`"


class DataError(ValueError):
    """Bad data: the message says what, where, what was expected and what to do."""


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
        paths = glob.glob(f"{start}{split}.bin") or [
            p for end in ("bin", "npy") for p in glob.glob(f"{start}*{split}*.{end}")]
        found = ", ".join(sorted(os.listdir(data_dir))[:8]) or "nothing"
    else:
        # Without {split} in the name the same tokens would be training and validation data.
        if split != "train" and "{split}" not in data_dir:
            raise DataError(f"{data_dir}: one file or pattern is training data only; for {split} "
                            "data give a folder, or a name with {split}: 'x/{split}_*.bin'")
        wanted, found = data_dir.replace("{split}", split), "no such file or folder"
        paths = [wanted] if os.path.exists(wanted) else glob.glob(wanted)
    if not paths:
        raise DataError(f"{data_dir}: no {split} data: expected {wanted}, found {found}; set "
                        f"data_dir, or {PREPARE}")
    return sorted(paths)


def read_meta(folder):
    """meta.json (ours) or meta.pkl (nanoGPT's, read without running code) as a dict, else {}."""
    for name, load in (("meta.json", json.load), ("meta.pkl", lambda f: PlainUnpickler(f).load())):
        path = os.path.join(folder, name)
        if not os.path.exists(path):
            continue
        try:
            with open(path, "rb") as f:
                meta = load(f)
            if not isinstance(meta, dict):
                raise ValueError(f"holds a {type(meta).__name__}, expected a dictionary")
            if meta.get("dtype", "uint16") not in ("uint16", "uint32"):
                raise ValueError(f"dtype is {meta['dtype']!r}, expected uint16 or uint32")
            if not isinstance(meta.get("vocab_size", 1), int):
                raise ValueError(f"vocab_size is {meta['vocab_size']!r}, expected an integer")
            return meta
        except Exception as e:  # a damaged pickle can raise anything
            raise DataError(f"{path}: {e or type(e).__name__}; {PREPARE}") from None
    return {}


def read_npy_header(path, f):
    """(dtype, bytes before the data, tokens) of an open .npy file; never unpickles."""
    f.seek(0)
    npy = np.lib.format
    version, _ = npy.read_magic(f)
    read_header = npy.read_array_header_1_0 if version == 1 else npy.read_array_header_2_0
    shape, _, dtype = read_header(f)
    if len(shape) != 1 or dtype.str not in ("<u2", "<u4", "<i4", "<i8"):
        raise ValueError(f"holds {dtype} of shape {shape}, expected one row of uint16 or uint32")
    return dtype.str, f.tell(), shape[0]


def check_plausible(tokens):
    """ValueError if a raw file's first tokens look like another format. tokens: (n,) integers."""
    if len(tokens) < 64:
        return
    if tokens.dtype.itemsize == 2:
        low, high = tokens[0::2], tokens[1::2]
        if low.any() and not high.any() or high.max() < 4 and low.max() >= 1024:
            raise ValueError("looks like uint32 tokens read as uint16; put "
                             '{"dtype": "uint32"} into a meta.json beside it')
    elif tokens.max() >= 1 << 24:
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
        dtype, offset, n = read_npy_header(path, f)
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
    except OSError as e:
        raise DataError(f"{path}: cannot be read: {e.strerror}; make it readable") from None
    except ValueError as e:
        raise DataError(f"{path}: {e}") from None


class TokenStream:
    """The tokens of several files as one: in memory where they are small, else read by pread.

    Not a memory map: touching one whose file has been cut short kills the process (SIGBUS), and its
    pages count as the process's memory until all of the file does. pread costs about the same,
    returns what is there, and fails with an error that can be retried.
    """

    def __init__(self, shards):
        self.shards, self.fds, self.tokens = shards, {}, None
        self.dtype = shards[0].dtype
        self.firsts = np.cumsum([0] + [s.n_tokens for s in shards])  # first token of each, then N
        self.n_tokens = int(self.firsts[-1])
        if len({s.dtype for s in shards}) > 1:
            raise DataError(f"{shards[0].path} and others: token files of different types: "
                            f"{', '.join(sorted({str(s.dtype) for s in shards}))}; expected one")
        if self.n_tokens * self.dtype.itemsize <= IN_MEMORY_BYTES:
            self.tokens = np.frombuffer(self._read_span(0, self.n_tokens), self.dtype)
            self.close()

    def close(self):
        """Close the files; reading opens them again."""
        while self.fds:
            os.close(self.fds.popitem()[1])

    __del__ = close

    def locate(self, token):
        """(path, offset in tokens) of a token of the stream."""
        i = int(np.searchsorted(self.firsts, token, "right")) - 1
        return self.shards[i].path, int(token - self.firsts[i])

    def read(self, starts, length):
        """The windows starts[i] .. + length. starts: (n,) int64 -> (n, length) of self.dtype."""
        if self.tokens is not None:
            return np.lib.stride_tricks.sliding_window_view(self.tokens, length)[starts]
        which = np.searchsorted(self.firsts, starts, "right") - 1
        for i in np.unique(which).tolist():
            self._check_unchanged(i)
        offsets = (starts - self.firsts[which]) * self.dtype.itemsize
        offsets += np.array([s.offset for s in self.shards])[which]
        n_bytes, rows = length * self.dtype.itemsize, []
        for start, i, offset in zip(starts.tolist(), which.tolist(), offsets.tolist()):
            try:
                row = os.pread(self._fd(i), n_bytes, offset)
            except OSError:
                row = b""
            rows.append(row if len(row) == n_bytes else self._read_span(start, length))
        return np.frombuffer(bytearray().join(rows), self.dtype).reshape(len(starts), length)

    def _fd(self, i):
        if i not in self.fds:
            if len(self.fds) >= MAX_OPEN_FILES:
                os.close(self.fds.pop(next(iter(self.fds))))
            self.fds[i] = os.open(self.shards[i].path, os.O_RDONLY)
        return self.fds[i]

    def _check_unchanged(self, i):
        shard = self.shards[i]
        try:
            now = identify(os.stat(shard.path))
        except OSError as e:
            raise DataError(f"{shard.path}: is gone ({e.strerror}); put it back and "
                            "resume") from None
        if now != shard.identity:
            raise DataError(f"{shard.path}: changed during the run: {shard.identity[1]:,} bytes at "
                            f"the start, {now[1]:,} now; put the old file back and resume")

    def _read_span(self, start, length):
        """Tokens as bytes, piece by piece: over shard borders, short reads and passing errors."""
        pieces, size = [], self.dtype.itemsize
        while length:
            i = int(np.searchsorted(self.firsts, start, "right")) - 1
            shard, local = self.shards[i], start - int(self.firsts[i])
            take = min(length, shard.n_tokens - local)
            pieces.append(self._read_all(i, shard.offset + local * size, take * size))
            start, length = start + take, length - take
        return b"".join(pieces)

    def _read_all(self, i, offset, n_bytes):
        """n_bytes of shard i; a read that fails or stops short is tried again, then a DataError."""
        path, data, waits = self.shards[i].path, b"", iter(RETRY_SLEEPS)
        while len(data) < n_bytes:
            self._check_unchanged(i)
            try:
                more = os.pread(self._fd(i), n_bytes - len(data), offset + len(data))
                why = "no data"
            except OSError as e:
                more, why = b"", e.strerror
            data += more
            if not more:
                if (wait := next(waits, None)) is None:
                    raise DataError(f"{path}: reading at byte {offset + len(data):,} failed "
                                    f"{len(RETRY_SLEEPS) + 1} times ({why}); check the disk, "
                                    "then resume")
                time.sleep(wait)
        return data
