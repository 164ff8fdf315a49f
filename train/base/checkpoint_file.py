"""Checkpoint files: crash-safe saving, and safe loading of untrusted files.

A checkpoint is a torch.save file of plain tensors and builtin types, followed by the SHA-256 of
these bytes (torch.load does not notice most single-bit flips). It is written atomically, and the
file that it replaces is renamed to *_prev.pt. Loading never runs code: weights_only is always on.
The other format, shards with a manifest, is in train/base/sharded_file.py; open_checkpoint() reads
both.
"""

import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from train.base.errors import CheckpointError
from train.base.files import add_link, atomic_write, describe_write_error, sync_folder
from train.base.sharded_file import is_sharded, open_shards
from train.base.tensors import SAFETENSORS_DTYPES, HashingFile, digest, find_non_finite, walk

FORMAT_VERSION = 1
SAFE_TORCH = (2, 10)  # weights_only is unsafe in earlier versions: CVE-2025-32434, CVE-2026-24747
MARK = b"ironGPT sha256 "
TRAILER_BYTES = len(MARK) + 64
MAX_LINES_SHOWN = 10
# Keys of a checkpoint that describe the model; JSON in the header of model.safetensors.
DESCRIPTION = ("model_args", "config", "spec", "tokenizer", "formulas")


# -----------------------------------------------------------------------------
# writing

def save_checkpoint(path: str | os.PathLike, state: Mapping[str, object],
                    links: Sequence[str] = ()) -> None:
    """Write `state`, plain tensors and builtin types, to the file `path` durably, with a digest.
    The old file becomes *_prev.pt, and each path in `links` becomes a hard link to the new file.
    CheckpointError if that fails: the file `path` is then unchanged, but links may be new."""
    def write(f):
        hashing = HashingFile(f)
        torch.save(state, hashing)
        f.write(MARK + hashing.sha.hexdigest().encode())
    n_bytes = sum(part.nbytes for _, part in walk(state) if isinstance(part, torch.Tensor))
    replace_checkpoint(path, write, links, n_bytes)


def replace_checkpoint(path, write, links=(), size=0):
    """Replace the file `path`, durably and atomically, with the bytes that write(file) writes. The
    old file becomes *_prev.pt, and each path in `links` a hard link to the new one. size: in bytes,
    for the message about a full disk, 0: unknown. CheckpointError if that fails: the file `path` is
    then unchanged, but links may be new."""
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
            write(f)
        sync_folder(folder)
    except Exception as error:  # torch.save hides the error of the file; report that error
        reason = error if isinstance(error, OSError) else error.__context__ or error
        reason = describe_write_error(reason, path, size)
        raise CheckpointError(f"{path} could not be written: {reason}") from error


def prev_path(path):
    """Return the path of the previous checkpoint: out/ckpt.pt -> out/ckpt_prev.pt."""
    return os.fspath(path).removesuffix(".pt") + "_prev.pt"


# -----------------------------------------------------------------------------
# reading

def load_checkpoint(path: str | os.PathLike) -> dict[str, Any]:
    """Return the checkpoint at `path`, a dict with tensors on the CPU. Verified are the digest, the
    types, the format version, and that weights and optimizer state are finite. Sharded checkpoints
    and foreign files of plain tensors can be read, too: nanoGPT's checkpoints, {"model_state_dict":
    ...}, a bare state dict. The weights are always under "model". Raises CheckpointError."""
    state, _ = open_checkpoint(path, values=True)
    return state


def open_checkpoint(path, values=False):
    """Return (state, shards) of the checkpoint `path`, verified as in load_checkpoint(). For a
    single file, shards is `None`. For a sharded checkpoint (a manifest, or the folder of one),
    shards is a Shards; unless `values`, the tensors in state are then on the meta device, and their
    data are neither read nor verified (use Shards.read() and Shards.verify()). Raises
    CheckpointError."""
    if tuple(int(n) for n in torch.__version__.split(".")[:2]) < SAFE_TORCH:
        raise CheckpointError(f"{path}: torch {torch.__version__} cannot load files safely; "
                              "pip install 'torch>=2.10'")
    shards = None
    try:
        if is_sharded(path):
            shards = open_shards(path)
            signed = True
            state = shards.state(shards.meta)
            check_content(state, shards.size, "meta")
            if values:
                shards.verify(shards.files)
                state = shards.state(shards.read)
        else:
            signed = verify_digest(path)
            # Without mmap: a later change of the file would change the tensors or crash the
            # process.
            state = with_model_key(torch.load(path, map_location="cpu", weights_only=True))
            check_content(state, os.path.getsize(path))
        version = state.get("format_version", 0)
        if version and not signed:
            raise ValueError("damaged: the digest is missing (save a modified checkpoint with "
                             "train.checkpoint.save_checkpoint, not with torch.save)")
        if not isinstance(version, int) or version > FORMAT_VERSION:
            raise ValueError(f"format {version} is newer than this program's {FORMAT_VERSION}: "
                             "update the program")
        tensors = {k: state[k] for k in ("model", "optimizer") if k in state}
        if (values or not shards) and (bad := find_non_finite(tensors)):
            raise ValueError(f"{bad} contains non-finite values")
    except Exception as error:
        raise CheckpointError(f"{path}: {describe_load_error(error)}") from error
    return state, shards


def verify_digest(path):
    """Verify the digest at the end of a checkpoint file, and return whether it has one. Without it
    (a foreign or truncated file), the CRCs are checked if the file is a ZIP archive. Raises
    ValueError if a check fails, or for an empty or compressed file, and the errors of
    zipfile.ZipFile if it cannot read the archive."""
    size = os.path.getsize(path)
    if not size:  # also of pipes and devices, which would be read for ever
        raise ValueError("the file is empty")
    end = max(0, size - TRAILER_BYTES)
    with open(path, "rb") as f:
        f.seek(end)
        trailer = f.read()
        signed = trailer.startswith(MARK)
        if signed and digest(path, end).encode() != trailer[len(MARK):]:
            raise ValueError("damaged: its content does not match its digest")
        if zipfile.is_zipfile(f):
            with zipfile.ZipFile(f) as z:
                if sum(part.file_size for part in z.infolist()) > size:
                    raise ValueError("compressed; torch.save writes uncompressed files")
                if not signed and (bad := z.testzip()):
                    raise ValueError(f"damaged at {bad}")
    return signed


def with_model_key(state):
    """Return `state`, the content of a checkpoint, as a dict with the weights under "model", also
    if a foreign trainer used a different key, or no key (a bare state dict)."""
    for name in ("model", "model_state_dict", "state_dict"):
        if isinstance(state, dict) and isinstance(state.get(name), dict):
            return {**state, "model": state[name]}
    return {"model": state}


def check_content(state, size, device="cpu"):
    """Raise ValueError unless `state`, read from files of `size` bytes, is a checkpoint: dense
    tensors on the device type `device` under "model" and "optimizer", no tensors in the other keys
    that the program reads, and not much more data in memory than in the files: a few bytes of
    pickle can share objects so often that printing them would not terminate."""
    if not isinstance(state["model"], dict):
        raise ValueError("not a checkpoint: expected a dict with the key `model`")
    for name in ("optimizer", *DESCRIPTION):
        if not isinstance(state.get(name), dict | None):
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
                    or part.layout != torch.strided or part.device.type != device
                    or part.dtype not in SAFETENSORS_DTYPES.values()):
                raise ValueError(f"contains a {str(part.dtype).removeprefix('torch.')} tensor on "
                                 f"{part.device} ({part.layout}); expected plain dense tensors")
            n_bytes += part.nbytes
    # Factor 4: tied weights may be listed under two names. Expanded (stride-0) tensors exceed it.
    if n_bytes > 4 * size:
        raise ValueError("contains expanded (stride-0) tensors; call .clone() before saving")


def describe_load_error(error):
    """Return a message for the user from `error`, the exception raised while reading a checkpoint
    file."""
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
    if text.startswith(("PytorchStreamReader", "[Errno 22]")):  # part of a ZIP archive
        text = "it is damaged or incomplete"
    return f"cannot be read as a checkpoint: {text or type(error).__name__}"


# -----------------------------------------------------------------------------
# names, shapes and dtypes

def check_match(tensors, expected, path, dtypes=True):
    """Raise CheckpointError, with the differences, unless `tensors` {name: tensor} of the file
    `path` have the names, shapes and (if `dtypes`) dtypes of `expected` {name: tensor}."""
    if lines := describe_mismatches(tensors, expected, dtypes):
        raise CheckpointError(f"{path} does not fit this model:\n{bullets(lines)}\n"
                              "expected the configuration and the code it was trained with")


def describe_mismatches(tensors, expected, dtypes=True):
    """Return a list of lines, one for each name whose tensors in `tensors` and `expected` {name:
    tensor} differ in shape or (if `dtypes`) dtype, or that only one of them has; [] if all are
    equal."""
    def describe(state):
        return {name: f"shape {tuple(t.shape)}" + (f" {t.dtype}" if dtypes else "")
                for name, t in state.items()}
    actual = describe(tensors)
    wanted = describe(expected)
    return [f"{name}: {actual.get(name, 'no tensor')}, expected {wanted.get(name, 'no tensor')}"
            for name in wanted | actual if actual.get(name) != wanted.get(name)]


def check_unchanged(changes, path, allowed, alternatives="", fits=True):
    """Raise CheckpointError with a list of the `changes` {name: (value in the checkpoint, new
    value)} whose names are not in `allowed`, the list of names of the key allow_change (["all"]
    allows every name). path: of the checkpoint. alternatives: more remedies, a text for the
    message. fits: whether the tensors would fit with the changes; if so, the message recommends
    --allow_change."""
    lines = {name: f"{name}: checkpoint has {old!r:.200}, now {new!r:.200}"
             for name, (old, new) in changes.items() if not {name, "all"} & {*allowed}}
    if lines:
        regardless = f", continue regardless with --allow_change {','.join(lines)}" if fits else ""
        raise CheckpointError(
            f"{path} is from a different configuration:\n{bullets([*lines.values()])}\nundo the "
            f"changes{regardless}{alternatives}")


def bullets(lines):
    """Return `lines` as one text, a bulleted list: the first MAX_LINES_SHOWN, and the number of the
    others."""
    more = len(lines) - MAX_LINES_SHOWN
    shown = [*lines[:MAX_LINES_SHOWN], *([f"and {more} more"] if more > 0 else [])]
    return "\n".join(f"  - {line}" for line in shown)
