"""Checkpoints: saved so that a crash cannot hurt, loaded so that a bad file cannot hurt.

A checkpoint is one torch.save file of plain tensors and builtin types, followed by the SHA-256 of
all its bytes (torch.load accepts most single-bit flips; the digest accepts none). It is written
beside its final name, made durable, and only then renamed over the old one, which stays as
ckpt_prev.pt. Nothing read here can run code: weights_only is always on.
"""

import contextlib
import errno
import hashlib
import os
import pickletools
import re
import shutil
import zipfile

import torch

from train import fault

FORMAT_VERSION = 1
SAFE_TORCH = (2, 10)  # before it weights_only does not hold: CVE-2025-32434, CVE-2026-24747
MARK = b"ironGPT sha256 "
TRAILER_BYTES = len(MARK) + 64
RUN_FILES = ("ckpt", "config.yaml", "training_args.json", "train.log", "metrics.jsonl", "loss.svg",
             "samples.txt", "tensorboard", "wandb", "tracker.json")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used or written; the message says which, why and what to do."""


# -----------------------------------------------------------------------------
# saving

def save_checkpoint(path, state, links=()):
    """Write `state` to `path` durably; the file it replaces becomes *_prev.pt, and each of `links`
    becomes another name of the new file. Raises CheckpointError and leaves the old file untouched
    where that fails."""
    folder, step = os.path.dirname(path) or ".", state.get("iter_num")
    temporary, hashing = f"{path}.tmp.{os.getpid()}", None
    try:
        os.makedirs(folder, exist_ok=True)
        _check_space(folder, tensor_bytes(state))
        fault.point("save_open", step)
        with open(temporary, "wb") as f:
            hashing = _HashingFile(f, step)
            torch.save(state, hashing)
            f.write(MARK + hashing.sha.hexdigest().encode())
            f.flush()
            fault.point("save_before_fsync", step)
            os.fsync(f.fileno())
        fault.point("save_before_replace", step)
        if os.path.exists(path):  # a symlink is replaced; the file it points to becomes *_prev.pt
            _link(path, prev_path(path))
        os.replace(temporary, path)
        fault.point("save_after_replace", step)
        for link in links:
            _link(path, link)
        _sync_folder(folder)
    except Exception as error:  # torch wraps what the file raised: report the cause
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        reason = getattr(hashing, "error", None) or error
        raise CheckpointError(f"{path} could not be written: {reason}") from error


class _HashingFile:
    """A file that hashes what is written to it; torch.save writes strictly in order."""

    def __init__(self, file, step):
        self.file, self.step, self.sha, self.error = file, step, hashlib.sha256(), None
        self.midway = False

    def write(self, data):
        try:
            if not self.midway and self.file.tell() > 1000:
                self.midway = True
                fault.point("save_mid", self.step)
            self.sha.update(data)
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self):
        self.file.flush()


def prev_path(path):
    return path.removesuffix(".pt") + "_prev.pt"


def named_tensors(state, name=""):
    """(dotted name, tensor) of every tensor in a nest of dicts and lists."""
    if isinstance(state, torch.Tensor):
        yield name, state
    nested = isinstance(state, (dict, list))
    for k, v in (state.items() if isinstance(state, dict) else enumerate(state)) if nested else ():
        yield from named_tensors(v, f"{name}.{k}" if name else str(k))


def tensor_bytes(state):
    """Bytes of all tensors in a nest of dicts and lists."""
    return sum(tensor.nbytes for _, tensor in named_tensors(state))


def find_not_finite(state):
    """The name of a tensor in a nest that holds a NaN or an infinity, or None (scalars aside)."""
    named = [(n, t) for n, t in named_tensors(state)
             if t.is_floating_point() and t.dim() and t.numel()]
    if not named:
        return None
    # What is not finite shows in the extremes; all of them together wait for the device once.
    extremes = torch.stack([torch.stack(torch.aminmax(t)).float() for _, t in named])
    finite = torch.isfinite(extremes).all(1)
    return None if finite.all() else named[int(finite.int().argmin())][0]


def _check_space(folder, needed):
    free = shutil.disk_usage(folder).free
    if free < needed * 1.02 + 2**20:
        raise OSError(f"it needs {needed / 2**20:,.0f} MiB and {free / 2**20:,.0f} MiB are free on "
                      f"the disk of {folder}")


def _link(source, target):
    """Give the file `source` the name `target` too, atomically; copy where links are refused."""
    temporary = f"{target}.tmp.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    try:
        try:
            os.link(source, temporary, follow_symlinks=True)
        except OSError:
            shutil.copyfile(source, temporary)
            with open(temporary, "rb") as f:
                os.fsync(f.fileno())
        os.replace(temporary, target)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _sync_folder(folder):
    """Make renames in `folder` durable, where a folder can be opened and synced (POSIX)."""
    try:
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno == errno.EIO:
            raise


def prune(folder, keep):
    """Remove the oldest numbered checkpoints but `keep`, once newer ones are durable; 0: none."""
    numbered = [n for n in os.listdir(folder) if n.startswith("ckpt_") and n[5:-3].isdigit()]
    numbered.sort(key=lambda n: int(n[5:-3]))
    for name in numbered[:-keep] if keep else ():
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, name))


def remove_leftovers(folder):
    """Delete temporary files that a killed process left in a run folder (the lock held)."""
    for name in os.listdir(folder):
        if ".pt.tmp." in name:
            os.unlink(os.path.join(folder, name))


# -----------------------------------------------------------------------------
# loading

def load_checkpoint(path):
    """The state saved at `path`, on the CPU, verified: digest, plain types only, known format,
    finite numbers. Also reads foreign files of plain tensors (nanoGPT's).
    Raises CheckpointError."""
    if tuple(int(n) for n in torch.__version__.split(".")[:2]) < SAFE_TORCH:
        raise CheckpointError(f"{path}: torch {torch.__version__} cannot load files safely; "
                              "pip install 'torch>=2.10'")
    try:
        fault.point("load")
        signed = _verify(path)
        # Not mapped into memory: whoever changes the file later would change, or crash, the reader.
        state = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path}: {_load_problem(path, error)}") from error
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise CheckpointError(f"{path}: not a checkpoint: expected a dict with a `model` in it")
    version = state.get("format_version", 0)
    if version and not signed:
        raise CheckpointError(f"{path}: damaged: its digest is missing")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise CheckpointError(f"{path}: format {version} is newer than this program's "
                              f"{FORMAT_VERSION}: update the program")
    if strange := [n for n, t in state["model"].items() if not isinstance(t, torch.Tensor)]:
        raise CheckpointError(f"{path}: not a checkpoint: its model has {strange[0]}, no tensor")
    if bad := find_not_finite({k: state[k] for k in ("model", "optimizer") if k in state}):
        raise CheckpointError(f"{path}: {bad} holds values that are not finite")
    return state


def _verify(path):
    """Check the digest; true if the file has one, false for a foreign file whose CRCs hold."""
    size = os.path.getsize(path)
    if os.path.isdir(path):
        raise CheckpointError(f"{path}: is a folder, expected a checkpoint file")
    if size == 0:
        raise CheckpointError(f"{path}: the file is empty")
    with open(path, "rb") as f:
        f.seek(max(0, size - TRAILER_BYTES))
        trailer = f.read()
        if not trailer.startswith(MARK):
            if zipfile.is_zipfile(f):
                with zipfile.ZipFile(f) as z:
                    if bad := z.testzip():
                        raise CheckpointError(f"{path}: damaged at {bad}")
            return False
        f.seek(0)
        sha, left = hashlib.sha256(), size - TRAILER_BYTES
        while left and (block := f.read(min(left, 1 << 22))):
            sha.update(block)
            left -= len(block)
    if sha.hexdigest().encode() != trailer[len(MARK):]:
        raise CheckpointError(f"{path}: damaged: its content does not match its digest")
    return True


def _load_problem(path, error):
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if unsafe := _unsafe_names(path):
        return (f"refused: it would run or build {', '.join(sorted(unsafe))} when loaded; a "
                "checkpoint holds plain tensors only")
    text = str(error).strip().split("\n")[0]
    return f"cannot be read as a checkpoint ({type(error).__name__}: {text})"


def _unsafe_names(path):
    """What pickles in the file would import, read off without running them; empty if unknown."""
    with contextlib.suppress(Exception):
        return torch.serialization.get_unsafe_globals_in_checkpoint(path)
    found, strings = set(), []
    with contextlib.suppress(Exception), open(path, "rb") as f:
        while True:  # files from before the zip format are several pickles, one after the other
            for op, value, _ in pickletools.genops(f):
                if isinstance(value, str):
                    strings.append(value)
                if op.name in ("GLOBAL", "INST"):
                    found.add(value.replace(" ", "."))
                elif op.name == "STACK_GLOBAL":
                    found.add(".".join(strings[-2:]))
    return {n for n in found if not re.fullmatch(r"torch\.(_utils\.)?\w+|collections\.\w+", n)}


def load_latest(folder, log):
    """(state, path) of the newest good checkpoint of a run folder, (None, None) without any. A bad
    ckpt.pt is moved to ckpt_bad_1.pt and the one before it is used; with no good one left this
    raises, so that a run with a history never starts from scratch by accident."""
    path = os.path.join(folder, "ckpt.pt")
    candidates = [p for p in (path, prev_path(path)) if os.path.lexists(p)]
    problems = []
    for p in candidates:
        try:
            state = load_checkpoint(p)
        except CheckpointError as error:
            if "allocate memory" in str(error):  # the file may well be good
                raise
            problems.append(str(error))
            continue
        for problem in problems:
            log(problem)
        if p != path:
            log(f"going on from {p}, saved at iter {state.get('iter_num')}, instead")
            if os.path.lexists(path):  # or the next save would make the bad file the previous one
                os.replace(path, _free_name(folder, "ckpt_bad"))
        return state, p
    if problems:
        raise CheckpointError("no checkpoint can be used:\n"
                              + "\n".join(f"  - {p}" for p in problems)
                              + "\nrestore one of them, or start afresh with --resume never")
    return None, None


def _free_name(folder, stem, suffix=".pt"):
    paths = (os.path.join(folder, f"{stem}_{n}{suffix}") for n in range(1, 10**6))
    return next(p for p in paths if not os.path.lexists(p))


def move_aside(folder):
    """Move a run's files to old_1/ (or the next free number) inside `folder`; the new place."""
    names = [n for n in os.listdir(folder) if n.startswith(RUN_FILES)]
    if not names:
        return None
    target = _free_name(folder, "old", "")
    os.makedirs(target)
    for name in names:
        os.replace(os.path.join(folder, name), os.path.join(target, name))
    return target


def check_state(state, wanted, path):
    """Raise CheckpointError unless `state` fits a model with the tensors `wanted` {name: tensor}:
    names, shapes and dtypes of the weights and of the optimizer's state."""
    problems = _mismatches("", state["model"], wanted)
    for name, entry in state["optimizer"]["state"].items():
        if name not in wanted:
            problems.append(f"optimizer state of unknown parameter {name}")
            continue
        moments = {k: v for k, v in entry.items() if k != "step"}
        problems += _mismatches(f"optimizer {name} ", moments, {k: wanted[name] for k in moments})
    _refuse(problems, path)


def check_model(weights, wanted, path):
    """Raise CheckpointError unless the names and shapes of `weights` are those of the model."""
    _refuse(_mismatches("", weights, wanted, dtypes=False), path)


def _refuse(problems, path):
    if problems:
        shown = problems[:10] + [f"and {len(problems) - 10} more"] * (len(problems) > 10)
        raise CheckpointError(f"{path} does not fit this model:\n"
                              + "\n".join(f"  - {p}" for p in shown)
                              + "\nuse the configuration it was made with, or another out_dir")


def _mismatches(prefix, found, wanted, dtypes=True):
    out = [f"{prefix}{n}: missing" for n in wanted if n not in found]
    out += [f"{prefix}{n}: not a parameter of this model" for n in found if n not in wanted]
    for name in (n for n in found if n in wanted):
        has, want = _kind(found[name], dtypes), _kind(wanted[name], dtypes)
        if has != want:
            out.append(f"{prefix}{name}: {has}, wanted {want}")
    return out


def _kind(tensor, dtypes):
    if not isinstance(tensor, torch.Tensor):
        return f"a {type(tensor).__name__}"
    dtype = f" {str(tensor.dtype).removeprefix('torch.')}" if dtypes else ""
    return f"shape {tuple(tensor.shape)}{dtype}"
