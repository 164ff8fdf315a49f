"""Functions for nested states with tensors and for files of tensors: digests, .safetensors files.
"""

import hashlib
import io
import json
import mmap
import os
import struct
from contextlib import suppress

import numpy as np
import torch

from train.base.background import give_way
from train.base.files import atomic_write, set_direct

BLOCK_BYTES = 1 << 22  # read or written at once
SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool}


# -----------------------------------------------------------------------------
# nested states: dicts and lists with tensors

def walk(nested, path=()):
    """Yield (path, part) for a nested state (dicts, lists, tuples) and for everything in it, depth
    first. path: a tuple of the keys and indices that lead to the part, () for the whole state."""
    yield path, nested
    parts = (nested.items() if isinstance(nested, dict) else
             enumerate(nested) if isinstance(nested, (list, tuple)) else ())
    for key, part in parts:
        yield from walk(part, (*path, key))


def named_tensors(state):
    """Yield (dotted name, tensor) for every tensor in a nested state (dicts, lists, tuples): {"a":
    {"b": t}} gives ("a.b", t)."""
    for path, part in walk(state):
        if isinstance(part, torch.Tensor):
            yield ".".join(map(str, path)), part


def map_tensors(f, state):
    """Return a copy of a nested state in which every tensor in dicts and lists is replaced by
    f(tensor). Other values, also tuples and their content, are not copied."""
    if isinstance(state, torch.Tensor):
        return f(state)
    if isinstance(state, dict):
        return {k: map_tensors(f, v) for k, v in state.items()}
    return [map_tensors(f, v) for v in state] if isinstance(state, list) else state


def find_non_finite(state):
    """Return the dotted name of the first floating-point tensor in a nested state that contains NaN
    or infinity, or `None` if there is none. 0-dim tensors are not checked."""
    named = [(n, t) for n, t in named_tensors(state)
             if t.is_floating_point() and t.dim() and t.numel()]
    if not named:
        return None
    # Extremes are non-finite if any value is; stacked, they need one wait for the device.
    finite = torch.stack([torch.stack(torch.aminmax(t)).isfinite().all() for _, t in named])
    return None if finite.all() else named[int(finite.int().argmin())][0]


# -----------------------------------------------------------------------------
# files

class HashingFile(io.RawIOBase):
    """A file object with a write() that computes a hash of the data and writes them, in blocks, to
    the binary file `file`, past the page cache where the file system can. After each block it gives
    way to training (train/base/background.py). It cannot seek; torch.save writes strictly in order.
    Call finish() after the last write()."""

    def __init__(self, file):
        self.file = file
        self.sha = hashlib.sha256()
        # Aligned, as direct writes require. A copy by numpy does not hold the GIL, for which the
        # training thread would wait.
        self.block = np.frombuffer(mmap.mmap(-1, BLOCK_BYTES), np.uint8)
        self.n_bytes = 0  # in the block
        # A third of the CPU time, and the training data stay in the cache (train/LOG.md).
        set_direct(file, True)

    def write(self, data):
        rest = memoryview(data)
        while len(rest):
            part = rest[:BLOCK_BYTES - self.n_bytes]
            rest = rest[len(part):]
            self.block[self.n_bytes:self.n_bytes + len(part)] = part
            self.n_bytes += len(part)
            if self.n_bytes == BLOCK_BYTES:
                self.write_block()
                give_way()
        return len(data)

    def write_block(self):
        """Append the block to the file, and begin the next one. What a direct write does not take
        is written through the page cache, which raises the OSError of a full disk."""
        block = memoryview(self.block)[:self.n_bytes]
        self.sha.update(block)
        written = 0
        with suppress(OSError):  # repeated below, e.g. on a full disk
            written = os.write(self.file.fileno(), block)
        if written < len(block):
            set_direct(self.file, False)
            self.file.write(block[written:])
            self.file.flush()
        self.n_bytes = 0

    def finish(self):
        """Write the rest and return the SHA-256, a hexadecimal text, of all data."""
        set_direct(self.file, False)  # direct writes are of whole blocks
        self.write_block()
        return self.sha.hexdigest()


def digest(path, n_bytes=None):
    """Return the SHA-256, a hexadecimal text, of the first `n_bytes` bytes of the file `path`;
    `None`: of the whole file."""
    sha = hashlib.sha256()
    n_bytes = os.path.getsize(path) if n_bytes is None else n_bytes
    with open(path, "rb") as f:
        for start in range(0, n_bytes, BLOCK_BYTES):
            sha.update(f.read(min(BLOCK_BYTES, n_bytes - start)))
    return sha.hexdigest()


def write_safetensors(path, tensors, metadata=None):
    """Write tensors atomically to the .safetensors file `path`
    (https://github.com/huggingface/safetensors): the length of a JSON header, the header, and the
    bytes of all tensors, in order. tensors: {name: tensor}, on any device, with dtypes in
    SAFETENSORS_DTYPES. metadata: {name: text} for the header. Return {"size": bytes, "sha256":
    digest} of the file."""
    names = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
    header = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name, t in tensors.items():
        header[name] = dict(dtype=names[t.dtype], shape=list(t.shape),
                            data_offsets=[offset, offset + t.nbytes])
        offset += t.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensor data starts at a multiple of 8
    with atomic_write(path) as f:
        hashing = HashingFile(f)
        hashing.write(struct.pack("<Q", len(text)) + text)
        for t in tensors.values():
            hashing.write(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        sha256 = hashing.finish()
    return dict(size=8 + len(text) + offset, sha256=sha256)
