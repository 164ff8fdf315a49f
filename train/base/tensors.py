"""Functions for nested states with tensors and for files of tensors: digests, .safetensors."""

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
    """Yield (path, part) for a nested state (dicts, lists, tuples) and all parts, depth first.

    path: tuple of the keys and indices that lead to the part; () for the complete state.
    """
    yield path, nested
    parts = (nested.items() if isinstance(nested, dict) else
             enumerate(nested) if isinstance(nested, (list, tuple)) else ())
    for key, part in parts:
        yield from walk(part, (*path, key))


def named_tensors(state):
    """Yield (name, tensor) for every tensor in a nested state, e.g. "a.b" for {"a": {"b": t}}."""
    for path, part in walk(state):
        if isinstance(part, torch.Tensor):
            yield ".".join(map(str, path)), part


def map_tensors(f, state):
    """Copy a nested state, with f(tensor) for each tensor in dicts and lists (not in tuples)."""
    if isinstance(state, torch.Tensor):
        return f(state)
    if isinstance(state, dict):
        return {k: map_tensors(f, v) for k, v in state.items()}
    return [map_tensors(f, v) for v in state] if isinstance(state, list) else state


def find_non_finite(state):
    """Return the dotted name of the first tensor with a NaN or infinity, or `None`.

    Only floating-point tensors that are not 0-dim are tested; all must be on one device.
    """
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
    """A write-only file object that writes to the open binary file `file` and hashes the data.

    Data are written in blocks, past the page cache where possible, giving way to training
    (background.py). It cannot seek. Call finish() after the last write().
    """

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
        """Append the block to the file and begin the next one; a full disk raises OSError."""
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
    """Return the hexadecimal SHA-256 of the first `n_bytes` bytes of a file; `None`: of all."""
    sha = hashlib.sha256()
    n_bytes = os.path.getsize(path) if n_bytes is None else n_bytes
    with open(path, "rb") as f:
        for start in range(0, n_bytes, BLOCK_BYTES):
            sha.update(f.read(min(BLOCK_BYTES, n_bytes - start)))
    return sha.hexdigest()


def write_safetensors(path, tensors, metadata=None, precision=None):
    """Write a .safetensors file atomically, and return {"size": bytes, "sha256": digest}.

    tensors: {name: tensor}, on any device, dtypes in SAFETENSORS_DTYPES; written in this order.
    metadata: {name: text} for the header. precision: the dtype of floating-point tensors in the
    file, which are converted one after the other; `None`: as they are.
    Format: https://github.com/huggingface/safetensors.
    """
    names = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
    header = {"__metadata__": {"format": "pt", **(metadata or {})}}
    dtypes = [precision if precision and t.is_floating_point() else t.dtype
              for t in tensors.values()]
    offset = 0
    for (name, t), dtype in zip(tensors.items(), dtypes):
        start, offset = offset, offset + t.numel() * dtype.itemsize
        header[name] = dict(dtype=names[dtype], shape=list(t.shape), data_offsets=[start, offset])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensor data starts at a multiple of 8
    with atomic_write(path) as f:
        hashing = HashingFile(f)
        hashing.write(struct.pack("<Q", len(text)) + text)
        for t, dtype in zip(tensors.values(), dtypes):
            data = t.detach().to("cpu", dtype).contiguous().flatten()
            hashing.write(data.view(torch.uint8).numpy())
        sha256 = hashing.finish()
    return dict(size=8 + len(text) + offset, sha256=sha256)
