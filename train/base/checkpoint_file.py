"""Checkpoint files: crash-safe saving, and safe loading of untrusted files.

A checkpoint is a torch.save file of plain tensors and builtin types, followed by the SHA-256 of
these bytes (torch.load does not notice most single-bit flips). It is written atomically, and the
file that it replaces is renamed, e.g. from ckpt.pt to ckpt_prev.pt. Loading never runs code:
weights_only is always on. The second format, shards with a manifest, is in
train/base/sharded_file.py; open_checkpoint() reads both.
"""

import errno
import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from train.base.errors import CheckpointError
from train.base.files import add_link, atomic_write, sync_folder
from train.base.sharded_file import decode, is_sharded, open_shards
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
    """Write a checkpoint, followed by a SHA-256, to the file `path`, durably and atomically.

    state: a nested dict of plain tensors and builtin types.
    links: paths that become hard links to the new file, replacing existing files.
    A missing folder is created. A previous file is kept as prev_path(path), which is replaced.
    Raises CheckpointError if writing fails: `path` is then unchanged (unless only the fsync of the
    folder failed), but `links` and prev_path(path) may be replaced already.
    """
    def write(f):
        hashing = HashingFile(f)
        torch.save(state, hashing)
        f.write(MARK + hashing.finish().encode())
    replace_checkpoint(path, write, links)


def replace_checkpoint(path, write, links=()):
    """Replace a file as save_checkpoint() does, with the bytes that write(binary file) writes."""
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
        raise CheckpointError(f"{path} could not be written: {reason}") from error


def prev_path(path):
    """Return the path (str) of the previous checkpoint: out/ckpt.pt -> out/ckpt_prev.pt."""
    return os.fspath(path).removesuffix(".pt") + "_prev.pt"


# -----------------------------------------------------------------------------
# reading

def load_checkpoint(path: str | os.PathLike) -> dict[str, Any]:
    """Return the content of a checkpoint as a dict with complete tensors on the CPU.

    path: a checkpoint in one file, or of a sharded one the manifest or a folder with manifest.json.
    Other programs' torch.save files of plain tensors can be read too: nanoGPT's,
    {"model_state_dict": ...}, {"state_dict": ...}, and a bare state dict.
    The weights, {name: tensor}, are always under "model".
    Raises CheckpointError if the file is missing, damaged or not safe to load, the format is too
    new, weights or optimizer state are not finite, or torch is older than SAFE_TORCH.
    """
    return open_checkpoint(path, values=True)[0]


def open_checkpoint(path, values=False):
    """Return (state, shards): the content, as from load_checkpoint(), and Shards or `None`.

    shards: `None` for a checkpoint in one file.
    values: for a sharded checkpoint: true reads and verifies all tensors; false leaves them on the
    meta device: use shards.read() and shards.verify(). Damaged shards and non-finite values are
    then not noticed. Otherwise raises CheckpointError as load_checkpoint() does.
    """
    if tuple(int(n) for n in torch.__version__.split(".")[:2]) < SAFE_TORCH:
        raise CheckpointError(f"{path}: torch {torch.__version__} cannot load files safely; "
                              "pip install 'torch>=2.10'")
    shards = None
    try:
        if is_sharded(path):
            shards = open_shards(path)
            state = decode(shards.plain, shards.meta)
            check_content(state, "meta")
            if values:
                shards.verify(shards.files)
                state = decode(shards.plain, shards.read)
        else:
            signed = verify_digest(path)
            # Without mmap: a later change of the file would change the tensors or crash the
            # process.
            state = with_model_key(torch.load(path, map_location="cpu", weights_only=True))
            check_content(state)
            if state.get("format_version") and not signed:
                raise ValueError("damaged: the digest is missing (save a modified checkpoint with "
                                 "train.checkpoint.save_checkpoint, not with torch.save)")
        version = state.get("format_version", 0)
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
    """Verify the SHA-256 at the end of a checkpoint file; return False if the file has none.

    Without one (a truncated or foreign file), the CRCs of a ZIP archive are verified. Raises
    ValueError if a check fails or the file is empty, and errors of zipfile.ZipFile.
    """
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
        if not signed and zipfile.is_zipfile(f):
            with zipfile.ZipFile(f) as z:
                if bad := z.testzip():
                    raise ValueError(f"damaged at {bad}")
    return signed


def with_model_key(state):
    """Return a new dict: a file's content, or a bare state dict, with the weights under "model"."""
    for name in ("model", "model_state_dict", "state_dict"):
        if isinstance(state, dict) and isinstance(state.get(name), dict):
            return {**state, "model": state[name]}
    return {"model": state}


def check_content(state, device="cpu"):
    """Raise ValueError unless `state`, a dict with the key "model", is valid checkpoint content.

    device: the required device type of all tensors, e.g. "cpu" or "meta".
    "model" must be {name: tensor}; "optimizer" and the keys in DESCRIPTION may be dicts, `None` or
    missing. Tensors must be dense, with a dtype in SAFETENSORS_DTYPES, and only under "model" and
    "optimizer" (without "format_version" also under other keys that are not in DESCRIPTION).
    """
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
    for path, part in walk(state):
        if not isinstance(part, torch.Tensor):
            continue
        if path[0] in plain:
            raise ValueError(f"its {path[0]!r:.80} contains a tensor")
        if (type(part) not in (torch.Tensor, torch.nn.Parameter) or part.is_nested
                or part.layout != torch.strided or part.device.type != device
                or part.dtype not in SAFETENSORS_DTYPES.values()):
            raise ValueError(f"contains a {str(part.dtype).removeprefix('torch.')} tensor on "
                             f"{part.device} ({part.layout}); expected plain dense tensors")


def is_temporary(error):
    """Return whether an error, or its cause, is not of the file, e.g. too little memory."""
    cause = error.__cause__ or error
    return (isinstance(cause, MemoryError) or "allocate memory" in str(error)
            or getattr(cause, "errno", 0) in (errno.EACCES, errno.EMFILE, errno.ENFILE))


def describe_load_error(error):
    """Return a message for an exception that was raised while a checkpoint file was read."""
    if isinstance(error, FileNotFoundError):
        if "." not in os.path.basename(error.filename):
            return "no such file; a model of the Hugging Face hub is hf:OWNER/NAME"
        return "no such file"
    if unsafe := re.search(r"GLOBAL (\S+)", str(error)):  # torch's message
        return (f"refused: it would run or build {unsafe[1]}; a checkpoint may contain plain "
                "tensors only")
    text = str(error).strip().split("\n")[0]
    if "weights only" in text.lower().replace("_", " "):  # torch recommends loading it unsafely
        text = "it is no file of torch.save, or contains objects other than plain tensors"
    if text.startswith(("PytorchStreamReader", "[Errno 22]")):  # part of a ZIP archive
        text = "it is damaged or incomplete"
    return f"cannot be read as a checkpoint: {text or type(error).__name__}"


# -----------------------------------------------------------------------------
# names, shapes and dtypes

def check_match(tensors, expected, path, dtypes=True):
    """Raise CheckpointError, listing the differences, if describe_mismatches() finds any."""
    if lines := describe_mismatches(tensors, expected, dtypes):
        raise CheckpointError(f"{path} does not fit this model:\n{bullets(lines)}\n"
                              "expected the configuration and the code it was trained with")


def describe_mismatches(tensors, expected, dtypes=True):
    """Return a text for each difference between two dicts {name: tensor}.

    Compared are the names, the shapes and, if `dtypes`, the dtypes.
    """
    def describe(state):
        return {name: f"shape {tuple(t.shape)}" + (f" {t.dtype}" if dtypes else "")
                for name, t in state.items()}
    actual = describe(tensors)
    wanted = describe(expected)
    return [f"{name}: {actual.get(name, 'no tensor')}, expected {wanted.get(name, 'no tensor')}"
            for name in wanted | actual if actual.get(name) != wanted.get(name)]


def check_unchanged(changes, path, allowed, alternatives="", fits=True):
    """Raise CheckpointError, with remedies, if `changes` has names that are not in `allowed`.

    changes: {name: (value in the checkpoint, new value)}.
    allowed: names, the value of the key allow_change; "all" allows every name.
    alternatives: more remedies, a text appended to the message.
    fits: whether the checkpoint's tensors fit the model; if so, --allow_change is recommended.
    """
    lines = {name: f"{name}: checkpoint has {old!r:.200}, now {new!r:.200}"
             for name, (old, new) in changes.items() if not {name, "all"} & {*allowed}}
    if lines:
        regardless = f", continue regardless with --allow_change {','.join(lines)}" if fits else ""
        raise CheckpointError(
            f"{path} is from a different configuration:\n{bullets([*lines.values()])}\nundo the "
            f"changes{regardless}{alternatives}")


def bullets(lines):
    """Return `lines` as a bulleted text: the first MAX_LINES_SHOWN, then "and N more" if any."""
    more = len(lines) - MAX_LINES_SHOWN
    shown = [*lines[:MAX_LINES_SHOWN], *([f"and {more} more"] if more > 0 else [])]
    return "\n".join(f"  - {line}" for line in shown)
