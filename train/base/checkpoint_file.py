"""The checkpoint file format: crash-safe saving, and safe loading of untrusted files.

A checkpoint is a torch.save file of plain tensors and builtin types, followed by the SHA-256 of
these bytes (torch.load does not notice most single-bit flips). It is written atomically, and the
file that it replaces is kept as *_prev.pt. Loading never runs code: weights_only is always on.
"""

import hashlib
import io
import json
import os
import re
import struct
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from train.base.errors import CheckpointError
from train.base.files import add_link, atomic_write, sync_folder

FORMAT_VERSION = 1
SAFE_TORCH = (2, 10)  # weights_only is unsafe in earlier versions: CVE-2025-32434, CVE-2026-24747
MARK = b"ironGPT sha256 "
TRAILER_BYTES = len(MARK) + 64
BLOCK_BYTES = 1 << 22  # read at once
MAX_LINES_SHOWN = 10
MAX_DEPTH = 100  # of a nested state
SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool}
# Keys of a checkpoint that describe the model; JSON in the header of model.safetensors.
DESCRIPTION = ("model_args", "config", "spec", "tokenizer", "formulas")


# -----------------------------------------------------------------------------
# writing

def save_checkpoint(path: str | os.PathLike, state: Mapping[str, object],
                    links: Sequence[str] = ()) -> None:
    """Write `state` to `path` durably. The file that it replaces becomes *_prev.pt, and each path
    in `links` becomes a hard link to the new file. CheckpointError if that fails; the old file is
    then unchanged."""
    folder = os.path.dirname(path) or "."

    def name_files(temporary):
        # Links first: after a kill in between, the run evaluates and saves once more.
        for name in links:
            add_link(temporary, name)
        if os.path.exists(path):  # a link is replaced; the file that it points to is kept
            add_link(path, prev_path(path))
    try:
        os.makedirs(folder, exist_ok=True)
        with atomic_write(path, name_files) as f:
            hashing = HashingFile(f)
            torch.save(state, hashing)
            f.write(MARK + hashing.sha.hexdigest().encode())
        sync_folder(folder)
    except Exception as error:  # torch.save hides the error of the file; report that error
        reason = error if isinstance(error, OSError) else error.__context__ or error
        raise CheckpointError(f"{path} could not be written: {reason}") from error


class HashingFile(io.RawIOBase):
    """A file object that hashes the data written to it. torch.save writes strictly in order."""

    def __init__(self, file):
        self.file = file
        self.sha = hashlib.sha256()

    def write(self, data):
        self.sha.update(data)
        return self.file.write(data)


def write_safetensors(path, tensors, metadata=None):
    """Write {name: tensor} as a .safetensors file (https://github.com/huggingface/safetensors):
    the length of a JSON header, the header, and the bytes of all tensors."""
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
        f.write(struct.pack("<Q", len(text)) + text)
        for t in tensors.values():
            f.write(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


def prev_path(path):
    """Return the name of the previous checkpoint: out/ckpt.pt -> out/ckpt_prev.pt."""
    return path.removesuffix(".pt") + "_prev.pt"


# -----------------------------------------------------------------------------
# nested states: dicts and lists with tensors

def walk(nested, path=()):
    """Yield (path, part) for a nested state and everything in it, in order; path: the keys that
    lead to the part. ValueError if the nesting is too deep or circular."""
    yield path, nested
    if len(path) > MAX_DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(nested, dict):
        for key, part in nested.items():
            yield from walk(part, (*path, key))
    elif isinstance(nested, (list, tuple)):
        for index, part in enumerate(nested):
            yield from walk(part, (*path, index))


def named_tensors(state):
    """Yield (dotted name, tensor) of every tensor in a nested state."""
    for path, part in walk(state):
        if isinstance(part, torch.Tensor):
            yield ".".join(map(str, path)), part


def map_tensors(f, state):
    """Return a nested state in which every tensor is replaced by f(tensor)."""
    if isinstance(state, torch.Tensor):
        return f(state)
    if isinstance(state, dict):
        return {k: map_tensors(f, v) for k, v in state.items()}
    return [map_tensors(f, v) for v in state] if isinstance(state, list) else state


def find_non_finite(state):
    """Return the name of a tensor in a nested state that contains NaN or infinity, or `None`.
    0-dim tensors are not checked."""
    named = [(n, t) for n, t in named_tensors(state)
             if t.is_floating_point() and t.dim() and t.numel()]
    if not named:
        return None
    # Extremes are non-finite if any value is; stacked, they need one wait for the device.
    extremes = torch.stack([torch.stack(torch.aminmax(t)).float() for _, t in named])
    finite = torch.isfinite(extremes).all(1)
    return None if finite.all() else named[int(finite.int().argmin())][0]


# -----------------------------------------------------------------------------
# reading

def load_checkpoint(path: str | os.PathLike) -> dict[str, Any]:
    """Return the verified state saved at `path`, on the CPU: correct digest, plain types, known
    format, finite values. Also reads foreign files of plain tensors: nanoGPT's checkpoints,
    {"model_state_dict": ...}, a bare state dict. Raises CheckpointError."""
    if tuple(int(n) for n in torch.__version__.split(".")[:2]) < SAFE_TORCH:
        raise CheckpointError(f"{path}: torch {torch.__version__} cannot load files safely; "
                              "pip install 'torch>=2.10'")
    try:
        signed = verify_digest(path)
        # Without mmap: a later change of the file would change the tensors or crash the process.
        state = with_model_key(torch.load(path, map_location="cpu", weights_only=True))
        check_content(state, os.path.getsize(path))
        version = state.get("format_version", 0)
        if version and not signed:
            raise ValueError("damaged: the digest is missing (save a modified checkpoint with "
                             "train.checkpoint.save_checkpoint, not with torch.save)")
        if not isinstance(version, int) or version > FORMAT_VERSION:
            raise ValueError(f"format {version} is newer than this program's {FORMAT_VERSION}: "
                             "update the program")
        if bad := find_non_finite({k: state[k] for k in ("model", "optimizer") if k in state}):
            raise ValueError(f"{bad} contains non-finite values")
    except Exception as error:
        raise CheckpointError(f"{path}: {describe_load_error(error)}") from error
    return state


def verify_digest(path):
    """Return whether the file has a digest; in a foreign file without a digest the CRCs are
    checked. ValueError for a damaged file."""
    size = os.path.getsize(path)
    if not size:  # also of pipes and devices, which would be read for ever
        raise ValueError("the file is empty")
    end = max(0, size - TRAILER_BYTES)
    with open(path, "rb") as f:
        f.seek(end)
        trailer = f.read()
        f.seek(0)
        signed = trailer.startswith(MARK)
        sha = hashlib.sha256()
        for start in range(0, end if signed else 0, BLOCK_BYTES):
            sha.update(f.read(min(BLOCK_BYTES, end - start)))
        if signed and sha.hexdigest().encode() != trailer[len(MARK):]:
            raise ValueError("damaged: its content does not match its digest")
        if zipfile.is_zipfile(f):
            with zipfile.ZipFile(f) as z:
                if sum(part.file_size for part in z.infolist()) > size:
                    raise ValueError("compressed; torch.save writes uncompressed files")
                if not signed and (bad := z.testzip()):
                    raise ValueError(f"damaged at {bad}")
    return signed


def with_model_key(state):
    """Return `state` with the weights under "model", also if a foreign trainer used a different
    key, or none."""
    for name in ("model", "model_state_dict", "state_dict"):
        if isinstance(state, dict) and isinstance(state.get(name), dict):
            return {**state, "model": state[name]}
    return {"model": state}


def check_content(state, size):
    """Raise ValueError unless the content of a file of `size` bytes is a checkpoint: plain tensors,
    builtin types in the keys that the program reads, and no more data in memory than in the file.
    A few bytes of pickle can share objects so often that printing them would not terminate."""
    if not isinstance(state["model"], dict):
        raise ValueError("not a checkpoint: expected a dict with the key `model`")
    for name in ("optimizer", *DESCRIPTION):
        if not isinstance(state.get(name) or {}, dict):
            raise ValueError(f"its {name} is a {type(state[name]).__name__}, expected a dict")
    for name, t in state["model"].items():
        if not isinstance(name, str) or not isinstance(t, torch.Tensor):
            raise ValueError(f"not a checkpoint: its model has {name!r}, no name of a tensor")
    # The other keys are compared and printed. Foreign files may have tensors in some of them.
    plain = state.keys() - {"model", "optimizer"} if "format_version" in state else DESCRIPTION
    n_bytes = 0
    n_values = 0  # parts and characters
    for path, part in walk(state):
        n_values += 1 + sum(len(t) for t in (part, *path[-1:]) if isinstance(t, (str, bytes)))
        if n_values > 8 * size + 10**5:
            raise ValueError("contains repeatedly shared objects (not a plain checkpoint)")
        if isinstance(part, torch.Tensor):
            if path[0] in plain:
                raise ValueError(f"its {path[0]!r:.80} contains a tensor")
            if (type(part) not in (torch.Tensor, torch.nn.Parameter) or part.is_nested
                    or part.layout != torch.strided or part.device.type != "cpu"
                    or part.dtype not in SAFETENSORS_DTYPES.values()):
                raise ValueError(f"contains a {str(part.dtype).removeprefix('torch.')} tensor on "
                                 f"{part.device} ({part.layout}); expected plain dense tensors")
            n_bytes += part.nbytes
    # Factor 4: tied weights may be listed under two names. Expanded (stride-0) tensors exceed it.
    if n_bytes > 4 * size:
        raise ValueError("contains expanded (stride-0) tensors; call .clone() before saving")


def describe_load_error(error):
    """Return why a file could not be read as a checkpoint."""
    if isinstance(error, FileNotFoundError):
        if "." not in os.path.basename(error.filename):
            return "no such file; a model of the Hugging Face hub is hf:OWNER/NAME"
        return "no such file"
    if unsafe := re.search(r"GLOBAL (\S+)", str(error)):  # torch's message
        return (f"refused: it would run or build {unsafe[1]}; a checkpoint may contain plain "
                "tensors only")
    text = str(error).strip().split("\n")[0]
    if "weights only" in text.lower().replace("_", " "):  # torch recommends loading it unsafely
        text = "it contains objects other than plain tensors"
    return f"cannot be read as a checkpoint: {text or type(error).__name__}"


# -----------------------------------------------------------------------------
# names, shapes and dtypes

def check_match(tensors, expected, path, dtypes=True):
    """Raise CheckpointError, with the differences, unless `tensors` {name: tensor} of the file
    `path` have the names, shapes and (if `dtypes`) dtypes of `expected`."""
    if lines := describe_mismatches(tensors, expected, dtypes):
        raise CheckpointError(f"{path} does not fit this model:\n{bullets(lines)}\n"
                              "use the configuration it was trained with, or another out_dir")


def describe_mismatches(tensors, expected, dtypes=True):
    """Return a line per tensor of check_match that differs."""
    def describe(state):
        return {name: f"shape {tuple(t.shape)}" + (f" {t.dtype}" if dtypes else "")
                for name, t in state.items()}
    actual = describe(tensors)
    wanted = describe(expected)
    return [f"{name}: {actual.get(name, 'no tensor')}, expected {wanted.get(name, 'no tensor')}"
            for name in wanted | actual if actual.get(name) != wanted.get(name)]


def check_unchanged(changes, path, allowed, alternatives="", fits=True):
    """Raise CheckpointError with the `changes` {name: (value in the checkpoint, new value)} that
    are not in `allowed`, which is --allow_change. alternatives: more remedies. fits: whether the
    tensors would fit with the changes."""
    lines = {name: f"{name}: checkpoint has {old!r:.200}, now {new!r:.200}"
             for name, (old, new) in changes.items() if not {name, "all"} & {*allowed}}
    if lines:
        regardless = f", continue regardless with --allow_change {','.join(lines)}" if fits else ""
        raise CheckpointError(
            f"{path} is from a different configuration:\n{bullets([*lines.values()])}\nundo the "
            f"changes{regardless}{alternatives}")


def bullets(lines):
    """Return `lines` as a bulleted list: the first ones, and the number of the others."""
    more = len(lines) - MAX_LINES_SHOWN
    shown = [*lines[:MAX_LINES_SHOWN], *([f"and {more} more"] if more > 0 else [])]
    return "\n".join(f"  - {line}" for line in shown)
