"""Checkpoints: saved so that a crash cannot hurt, loaded so that a bad file cannot hurt.

A checkpoint is one torch.save file of plain tensors and builtin types, followed by the SHA-256 of
all its bytes (torch.load accepts most single-bit flips; the digest accepts none). It is written
beside its final name, made durable, and only then renamed over the old one, which stays as
ckpt_prev.pt. Nothing read here can run code: weights_only is always on.
"""

import contextlib
import hashlib
import os
import shutil
import socket
import threading
import time
import zipfile

import torch

from train import fault

FORMAT_VERSION = 1
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
        if os.path.exists(path):
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

    def write(self, data):
        try:
            if self.file.tell() > 1000:
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


def tensor_bytes(state):
    """Bytes of all tensors in a nest of dicts and lists."""
    if isinstance(state, torch.Tensor):
        return state.nbytes
    items = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return sum(tensor_bytes(v) for v in items)


def _check_space(folder, needed):
    free = shutil.disk_usage(folder).free
    if free < needed * 1.02 + 2**20:
        raise OSError(f"it needs {needed / 2**20:,.0f} MiB and {free / 2**20:,.0f} MiB are free on the "
                      f"disk of {folder}")


def _link(source, target):
    """Give the file `source` the further name `target`, atomically; a copy where links are refused."""
    temporary = f"{target}.tmp.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    try:
        os.link(source, temporary, follow_symlinks=True)
    except OSError:
        shutil.copyfile(source, temporary)
        with open(temporary, "rb") as f:
            os.fsync(f.fileno())
    os.replace(temporary, target)


def _sync_folder(folder):
    """Make renames in `folder` durable (POSIX; elsewhere a folder cannot be opened)."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def prune(folder, keep):
    """Remove the oldest numbered checkpoints but `keep`, once newer ones are durable."""
    numbered = sorted(n for n in os.listdir(folder) if n[5:-3].isdigit() and n.startswith("ckpt_"))
    for name in numbered[:len(numbered) - keep]:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, name))


class Saver:
    """Saves in a background thread, at most one at a time, from a snapshot taken by the caller.

    save() waits for a save still under way (so slow disks cannot pile up work) and returns the seconds
    the training was held up. What went wrong in the background is raised by the next wait() or save().
    """

    def __init__(self):
        self.thread, self.error = None, None

    def save(self, path, state, links=(), after=lambda: None, background=True):
        started = time.monotonic()
        self.wait()
        if background and memory_available() > 2 * tensor_bytes(state):
            self.thread = threading.Thread(target=self._write, args=(path, snapshot(state), links, after))
            self.thread.start()
        else:
            save_checkpoint(path, state, links)
            after()
        return time.monotonic() - started

    def _write(self, path, state, links, after):
        try:
            save_checkpoint(path, state, links)
            after()
        except Exception as error:
            self.error = error

    def wait(self):
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.error is not None:
            error, self.error = self.error, None
            raise error


def snapshot(state):
    """A copy of a nest of dicts, lists and tensors that training can no longer change, on the CPU."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {k: snapshot(v) for k, v in state.items()}
    return [snapshot(v) for v in state] if isinstance(state, list) else state


def memory_available():
    """Bytes of memory free for use (Linux; elsewhere assumed plenty)."""
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable"))
    return 2**62


# -----------------------------------------------------------------------------
# loading

def load_checkpoint(path):
    """The state saved at `path`, on the CPU, verified: digest, plain types only, known format.
    Also reads foreign files of plain tensors (nanoGPT's). Raises CheckpointError."""
    try:
        fault.point("load")
        signed = _verify(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path}: {_load_problem(path, error)}") from error
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise CheckpointError(f"{path}: not a checkpoint: expected a dict with a `model` in it")
    version = state.get("format_version", 0)
    if version and not signed:
        raise CheckpointError(f"{path}: damaged: its digest is missing")
    if version > FORMAT_VERSION:
        raise CheckpointError(f"{path}: format {version} is newer than this program's "
                              f"{FORMAT_VERSION}: update the program")
    for name, tensor in state["model"].items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise CheckpointError(f"{path}: {name} holds values that are not finite")
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
            if zipfile.is_zipfile(path) and (bad := zipfile.ZipFile(path).testzip()):
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
    with contextlib.suppress(Exception):
        if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(path):
            return (f"refused: it would run or build {', '.join(sorted(unsafe))} when loaded; a "
                    "checkpoint holds plain tensors only")
    text = str(error).split("\n")[0]
    if "Unsupported global" in str(error) or "GLOBAL" in str(error):
        text = str(error)[str(error).find("GLOBAL"):].split("\n")[0]
        return f"refused: it would run code when loaded ({text})"
    return f"cannot be read as a checkpoint ({type(error).__name__}: {text})"


def load_latest(folder, log):
    """(state, path) of the newest good checkpoint of a run folder, (None, None) where there is none.
    A bad ckpt.pt is moved to ckpt_bad.pt and the one before it is used; with no good one left this
    raises, so that a run with a history never starts from scratch by accident."""
    path = os.path.join(folder, "ckpt.pt")
    candidates = [p for p in (path, prev_path(path)) if os.path.lexists(p)]
    problems = []
    for p in candidates:
        try:
            state = load_checkpoint(p)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            log(problem)
        if p != path:
            log(f"going on from {p}, saved at iter {state.get('iter_num')}, instead")
            if os.path.lexists(path):  # or the next save would make the bad file the previous one
                os.replace(path, os.path.join(folder, "ckpt_bad.pt"))
        return state, p
    if problems:
        raise CheckpointError("no checkpoint can be used:\n" + "\n".join(f"  - {p}" for p in problems)
                              + "\nrestore one of them, or start afresh with --resume never")
    return None, None


def move_aside(folder):
    """Move a run's files to old_1/ (or the next free number) inside `folder`; the new place or None."""
    names = [n for n in os.listdir(folder) if n.startswith(RUN_FILES) and not n.startswith("old_")]
    if not names:
        return None
    n = next(i for i in range(1, 10**6) if not os.path.exists(os.path.join(folder, f"old_{i}")))
    target = os.path.join(folder, f"old_{n}")
    os.makedirs(target)
    for name in names:
        os.replace(os.path.join(folder, name), os.path.join(target, name))
    return target


def check_state(state, shapes, path):
    """Raise CheckpointError unless `state` fits a model whose parameters have `shapes` {name: shape}:
    names, shapes and kinds of the weights and of the optimizer's state."""
    if not isinstance(state.get("optimizer"), dict) or "state" not in state["optimizer"]:
        raise CheckpointError(f"{path}: has weights but no optimizer state, so it cannot be resumed; "
                              f"start from its weights with --init_from {path} --resume never")
    check_model(state["model"], shapes, path)
    problems = []
    for name, entry in state["optimizer"]["state"].items():
        if name not in shapes:
            problems.append(f"optimizer state of unknown parameter {name}")
            continue
        moments = {k: v for k, v in entry.items() if k != "step"}
        problems += _mismatches(f"optimizer {name} ", moments, {k: shapes[name] for k in moments})
    _refuse(problems, path)


def check_model(weights, shapes, path):
    """Raise CheckpointError unless the names and shapes of `weights` are those of the model."""
    _refuse(_mismatches("", weights, shapes), path)


def _refuse(problems, path):
    if problems:
        shown = problems[:10] + [f"and {len(problems) - 10} more"] * (len(problems) > 10)
        raise CheckpointError(f"{path} does not fit this model:\n" + "\n".join(f"  - {p}" for p in shown)
                              + "\nuse the configuration it was made with, or another out_dir")


def _mismatches(prefix, found, wanted):
    out = [f"{prefix}{n}: missing" for n in wanted if n not in found]
    out += [f"{prefix}{n}: not a parameter of this model" for n in found if n not in wanted]
    for name in (n for n in found if n in wanted):
        if not isinstance(found[name], torch.Tensor) or tuple(found[name].shape) != tuple(wanted[name]):
            out.append(f"{prefix}{name}: shape {tuple(getattr(found[name], 'shape', ()))}, "
                       f"wanted {tuple(wanted[name])}")
    return out


# -----------------------------------------------------------------------------
# one writer a folder

class FolderLock:
    """Exclusive use of a run folder while the process lives; the system frees a dead holder's lock."""

    def __init__(self, folder):
        self.path = os.path.join(folder, ".lock")
        self.file = open(self.path, "a+")
        try:
            import fcntl  # POSIX; without it there is no lock
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            return
        except BlockingIOError:
            self.file.seek(0)
            holder = self.file.read().strip() or "another process"
            raise CheckpointError(f"{folder} is in use by {holder}; wait for it, stop it, or choose "
                                  "another --out_dir") from None
        self.file.truncate(0)
        self.file.write(f"pid {os.getpid()} on {socket.gethostname()}")
        self.file.flush()

    def release(self):
        self.file.close()


def remove_leftovers(folder):
    """Delete temporary files that a killed process left in a run folder (call with the lock held)."""
    for name in os.listdir(folder):
        if ".pt.tmp." in name:
            os.unlink(os.path.join(folder, name))
