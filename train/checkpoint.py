"""Checkpoints: saved so that a crash cannot hurt, loaded so that a bad file cannot hurt.

A checkpoint is one torch.save file of plain tensors and builtin types, followed by the SHA-256 of
all its bytes (torch.load accepts most single-bit flips; the digest accepts none). It is written
beside its final name, made durable, and only then renamed over the old one, which stays as
ckpt_prev.pt. Nothing read here can run code: weights_only is always on.

From top to bottom: writing a file, reading one, a run's folder. What a checkpoint holds and whether
it fits a run is train/resume.py's.
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import struct
import sys
import threading
import time
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import yaml

from train.base.cli import run_command
from train.base.errors import CheckpointError, SaveFailed
from train.base.files import Lock, atomic_write, check_space, free_name, link, sync_folder
from train.config import START_KEYS, show_value
from train.device import memory_available, return_freed_memory

FORMAT_VERSION = 1
SAFE_TORCH = (2, 10)  # before it weights_only does not hold: CVE-2025-32434, CVE-2026-24747
MARK = b"ironGPT sha256 "
TRAILER_BYTES = len(MARK) + 64
LONGEST = 200  # characters of a line that shows what may be of any length
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
          "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool}
RUN_FILES = ("ckpt", "config.yaml", "training_args.json", "train.log", "metrics.jsonl", "loss.svg",
             "samples.txt", "model.safetensors", "tensorboard", "wandb", "tracker.json")


# What a checkpoint tells of its model, for model.safetensors as JSON.
DESCRIPTION = ("model_args", "config", "spec", "tokenizer")


def bullets(lines):
    return "\n".join(f"  - {line}" for line in lines)


# -----------------------------------------------------------------------------
# writing a file

def save_checkpoint(path: str | os.PathLike, state: Mapping[str, object],
                    links: Sequence[str] = ()) -> None:
    """Write `state` to `path` durably; the file it replaces becomes *_prev.pt, and each of `links`
    becomes another name of the new file. Raises CheckpointError and leaves the old file untouched
    where that fails."""
    folder, hashing = os.path.dirname(path) or ".", None

    def other_names(temporary):
        for name in links:  # first: killed in between, the run evaluates and saves once more
            link(temporary, name)
        if os.path.exists(path):  # a symlink is replaced; the file it points to becomes *_prev.pt
            link(path, prev_path(path))
    try:
        os.makedirs(folder, exist_ok=True)
        check_space(folder, tensor_bytes(state))
        with atomic_write(path, other_names) as f:
            hashing = HashingFile(f)
            torch.save(state, hashing)
            f.write(MARK + hashing.sha.hexdigest().encode())
        sync_folder(folder)
    except Exception as error:  # torch wraps what the file raised: report the cause
        reason = getattr(hashing, "error", None) or error
        raise CheckpointError(f"{path} could not be written: {reason}") from error


class HashingFile:
    """A file that hashes what is written to it; torch.save writes strictly in order."""

    def __init__(self, file):
        self.file, self.sha, self.error = file, hashlib.sha256(), None

    def write(self, data):
        try:
            self.sha.update(data)
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self):
        self.file.flush()


def write_safetensors(path, tensors, metadata=None):
    """{name: tensor} as a .safetensors file (https://github.com/huggingface/safetensors): the
    length of a JSON header, the header, the bytes of all tensors."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header, offset = {"__metadata__": {"format": "pt", **(metadata or {})}}, 0
    for name, t in tensors.items():
        header[name] = dict(dtype=names[t.dtype], shape=list(t.shape),
                            data_offsets=[offset, offset + t.nbytes])
        offset += t.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the bytes of tensors start at a multiple of 8
    with atomic_write(path) as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for t in tensors.values():
            f.write(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


def prev_path(path):
    return path.removesuffix(".pt") + "_prev.pt"


def named_tensors(state, name=""):
    """(dotted name, tensor) of every tensor in a nest of dicts and lists."""
    if isinstance(state, torch.Tensor):
        yield name, state
    for k, v in children(state):
        yield from named_tensors(v, f"{name}.{k}" if name else str(k))


def children(nest):
    """(key, value) pairs of what a dict, list or tuple holds, none of anything else."""
    if isinstance(nest, dict):
        return nest.items()
    return enumerate(nest) if isinstance(nest, (list, tuple)) else ()


def map_tensors(f, state):
    """A nest of dicts and lists with f(tensor) in the place of every tensor."""
    if isinstance(state, torch.Tensor):
        return f(state)
    if isinstance(state, dict):
        return {k: map_tensors(f, v) for k, v in state.items()}
    return [map_tensors(f, v) for v in state] if isinstance(state, list) else state


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


# -----------------------------------------------------------------------------
# reading a file

def load_checkpoint(path: str | os.PathLike) -> dict[str, Any]:
    """The state saved at `path`, on the CPU, verified: digest, plain types only, known format,
    finite numbers. Also reads foreign files of plain tensors: nanoGPT's, {"model_state_dict": ...},
    a bare state dict. Raises CheckpointError."""
    if tuple(int(n) for n in torch.__version__.split(".")[:2]) < SAFE_TORCH:
        raise CheckpointError(f"{path}: torch {torch.__version__} cannot load files safely; "
                              "pip install 'torch>=2.10'")
    try:
        signed = verify(path)
        # Not mapped into memory: whoever changes the file later would change, or crash, the reader.
        state = with_model_key(torch.load(path, map_location="cpu", weights_only=True))
        check_content(state, os.path.getsize(path))
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path}: {load_problem(error)}") from error
    version = state.get("format_version", 0)
    if version and not signed:
        raise CheckpointError(f"{path}: damaged: its digest is missing (what you changed is saved "
                              "by train.checkpoint.save_checkpoint, not by torch.save)")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise CheckpointError(f"{path}: format {version} is newer than this program's "
                              f"{FORMAT_VERSION}: update the program")
    if bad := find_not_finite({k: state[k] for k in ("model", "optimizer") if k in state}):
        raise CheckpointError(f"{path}: {bad} holds values that are not finite")
    return state


def check_content(state, size):
    """ValueError unless what a file of `size` bytes held is a checkpoint: plain tensors, builtin
    types where we read them, and no more in memory than in the file. A few bytes can say "the same
    again" so often that whoever counts, compares or shows it never ends."""
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise ValueError("not a checkpoint: expected a dict with a `model` in it")
    for name in ("optimizer", *DESCRIPTION):
        if not isinstance(state.get(name) or {}, dict):
            raise ValueError(f"its {name} is a {type(state[name]).__name__}, expected a dict")
    tensors, seen = [], {}
    if unfolded(state, tensors, seen) > 16 * size + 10**6:
        raise ValueError("its parts are the same objects again and again")
    facts = state.keys() - {"model", "optimizer"} if "format_version" in state else DESCRIPTION
    for name in facts:  # what is compared and shown
        if next(named_tensors(state.get(name)), None):
            raise ValueError(f"its {name!r:.80} holds a tensor")
    for t in tensors:
        if (type(t) not in (torch.Tensor, torch.nn.Parameter) or t.layout != torch.strided
                or t.is_nested or t.device.type != "cpu" or t.dtype not in DTYPES.values()):
            raise ValueError(f"holds a {str(t.dtype).removeprefix('torch.')} tensor on {t.device} "
                             f"({t.layout}); expected plain numbers, whole")
    for name, t in state["model"].items():
        if not isinstance(name, str) or not isinstance(t, torch.Tensor):
            raise ValueError(f"not a checkpoint: its model has {name!r}, no name of a tensor")
    # Tied weights may stand there twice. An expanded tensor is as large as it likes.
    if sum(t.nbytes for t in tensors) > 4 * size:
        raise ValueError("its tensors show the same numbers again and again; clone() them")


def unfolded(nest, tensors, seen, depth=0):
    """How many items and characters a nest would have with nothing in it shared; its tensors are
    added to `tensors`. seen: {id: the same of a part that was met before}. ValueError where it is
    nested too deeply, or in a circle."""
    if depth > 100:
        raise ValueError("nested too deeply")
    if isinstance(nest, torch.Tensor):
        tensors.append(nest)
    if not isinstance(nest, (dict, list, tuple)):
        return 1 + (len(nest) if isinstance(nest, (str, bytes)) else 0)
    if id(nest) not in seen:
        seen[id(nest)] = 1 + sum(unfolded(part, tensors, seen, depth + 1)
                                 for pair in children(nest) for part in pair)
    return seen[id(nest)]


def with_model_key(state):
    """`state` with its weights under "model", as other trainers name them otherwise."""
    if isinstance(state, dict) and "model" not in state:
        for name in ("model_state_dict", "state_dict"):
            if isinstance(state.get(name), dict):
                return {**state, "model": state[name]}
        if state and all(isinstance(t, torch.Tensor) for t in state.values()):
            return {"model": dict(state)}
    return state


def verify(path):
    """Check the digest; true if the file has one, false for a foreign file whose CRCs hold."""
    size = os.path.getsize(path)
    if os.path.isdir(path):
        raise CheckpointError(f"{path}: is a folder, expected a checkpoint file")
    if size == 0:
        raise CheckpointError(f"{path}: the file is empty")
    with open(path, "rb") as f:
        f.seek(max(0, size - TRAILER_BYTES))
        trailer = f.read()
        signed = trailer.startswith(MARK)
        f.seek(0)
        sha, left = hashlib.sha256(), size - TRAILER_BYTES if signed else 0
        while left and (block := f.read(min(left, 1 << 22))):
            sha.update(block)
            left -= len(block)
        if signed and sha.hexdigest().encode() != trailer[len(MARK):]:
            raise CheckpointError(f"{path}: damaged: its content does not match its digest")
        if zipfile.is_zipfile(f):
            with zipfile.ZipFile(f) as z:
                if sum(part.file_size for part in z.infolist()) > size:
                    raise CheckpointError(f"{path}: compressed; torch.save writes it as it is")
                if not signed and (bad := z.testzip()):
                    raise CheckpointError(f"{path}: damaged at {bad}")
    return signed


def load_problem(error):
    """Why a file could not be read as a checkpoint, in words."""
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if unsafe := re.search(r"GLOBAL (\S+)", str(error)):  # in torch's words
        return f"refused: it would run or build {unsafe[1]}; a checkpoint holds plain tensors only"
    text = str(error).strip().split("\n")[0]
    if type(error) is ValueError:  # of check_content
        return text
    if "weights only" in text.lower().replace("_", " "):  # torch advises to load it unsafely
        text = "it holds other things than plain tensors"
    return f"cannot be read as a checkpoint ({type(error).__name__}: {text})"


# -----------------------------------------------------------------------------
# do tensors fit?

def refuse(problems, path):
    if problems:
        more = [f"and {len(problems) - 10} more"] if len(problems) > 10 else []
        raise CheckpointError(f"{path} does not fit this model:\n{bullets(problems[:10] + more)}\n"
                              "use the configuration it was made with, or another out_dir")


def mismatches(prefix, found, wanted, dtypes=True):
    out = [f"{prefix}{n}: missing" for n in wanted if n not in found]
    out += [f"{prefix}{n}: not a parameter of this model" for n in found if n not in wanted]
    for name in (n for n in found if n in wanted):
        has, want = kind_of(found[name], dtypes), kind_of(wanted[name], dtypes)
        if has != want:
            out.append(f"{prefix}{name}: {has}, wanted {want}")
    return out


def kind_of(tensor, dtypes):
    if not isinstance(tensor, torch.Tensor):
        return f"a {type(tensor).__name__}"
    dtype = f" {str(tensor.dtype).removeprefix('torch.')}" if dtypes else ""
    return f"shape {tuple(tensor.shape)}{dtype}"


# -----------------------------------------------------------------------------
# a run's folder

class RunFolder:
    """out_dir in the hands of one run (on rank 0): locked, and written to in the background, one
    save at a time, from a snapshot that training can no longer change."""

    def __init__(self, path, keep_last=0, save_precision=None):
        self.path, self.keep_last, self.save_precision = path, keep_last, save_precision
        self.lock = self.thread = self.pin = None

    def file(self, name):
        return os.path.join(self.path, name)

    def open(self):
        """Make the folder ours alone. Raises CheckpointError; UserError where it is in use."""
        if os.path.lexists(self.path) and not os.path.isdir(self.path):
            raise CheckpointError(f"out_dir: {self.path} is a file; expected a folder")
        try:
            os.makedirs(self.path, exist_ok=True)
            self.lock = Lock(self.path)
            for name in os.listdir(self.path):
                if re.search(r"\.tmp\.\d+$", name):  # a killed process left it
                    os.unlink(self.file(name))
        except OSError as error:
            raise CheckpointError(f"out_dir: {self.path} cannot be used: {error}") from error

    def save(self, state, best, kept, log, last=False, private=False):
        """ckpt.pt, with its names as best and as numbered checkpoint where they are due (`kept`).

        This returns once a snapshot is taken, unless the state is a `private` copy already, and a
        thread writes it: a save that fails warns, and training goes on with the old file intact.
        The `last` one is written before this returns, tried again after a second, and raises
        SaveFailed if that does not help: what was trained must not be lost to a full disk."""
        self.wait()
        log.info(f"Saving checkpoint to {self.file('ckpt.pt')}")
        if not os.path.isdir(self.path):
            log.warn(f"{self.path} is gone; making it again")
            self.open()
        links = [self.file("ckpt_best.pt")] if best else []
        links += [self.file(f"ckpt_{state['iter_num']:07d}.pt")] if kept else []
        copy, ready = state, None
        if not private:
            copy = None if last else snapshot_if_room(state)
        if torch.cuda.is_initialized():  # the copies are under way on the stream of the training
            ready = torch.cuda.Event()
            ready.record()
        if last or copy is None:
            return self.insist(state, links, log, last, ready)
        self.thread = threading.Thread(target=self.insist, args=(copy, links, log, False, ready))
        self.thread.start()

    def may_pin(self, state):
        """Whether there is room for a copy of `state` in pinned memory, which PyTorch keeps for the
        saves to come: said once, before the first."""
        if self.pin is None:
            self.pin = memory_available() >= 2 * tensor_bytes(state)
        return self.pin

    def insist(self, state, links, log, last, ready=None):
        """Write; where that fails, warn, or for the `last` save try twice more and then raise."""
        if ready is not None:
            ready.synchronize()
        for attempt in range(3):
            try:
                return self.write(state, links, log)
            except Exception as error:
                if not last:
                    return log.warn(f"{error}; the one before it is intact, training goes on")
                if attempt == 2:
                    raise SaveFailed(
                        f"the last checkpoint could not be saved: {error}\nWhat was trained since "
                        "the one before it is lost; make room and start again to resume") from error
                log.warn(f"{error}; trying again")
                time.sleep(1)

    def write(self, state, links, log):
        save_checkpoint(self.file("ckpt.pt"), state, links)
        try:  # from here on nothing can be lost
            prune(self.path, self.keep_last)
            if self.save_precision:
                self.export(state)
        except Exception as error:
            log.warn(f"{self.file('ckpt.pt')} is saved, but model.safetensors (save_precision) or "
                     f"the old checkpoints (keep_last) are not up to date: {error}")

    def export(self, state):
        """model.safetensors: the weights, and in its header what tells what model they are."""
        dtype = getattr(torch, self.save_precision)
        write_safetensors(self.file("model.safetensors"), {
            n: t.to(dtype) if t.is_floating_point() else t for n, t in state["model"].items()},
            {name: json.dumps(state[name]) for name in DESCRIPTION if name in state})

    def branch_off(self, iter_num, say):
        """Move the checkpoints of what was done after `iter_num` to old_1/ (or the next free
        number): a run that goes on from there would write over them. An earlier best one stays."""
        if self.lock is None:  # not rank 0
            return
        names = [n for n in ("ckpt.pt", "ckpt_prev.pt", "ckpt_best.pt")
                 if os.path.exists(self.file(n)) and self.iteration(n) > iter_num]
        if names:
            target = move_files(self.path, names)
            with contextlib.suppress(OSError):  # it loses the lines of those steps next
                shutil.copy2(self.file("metrics.jsonl"), target)
            say(f"Moved {', '.join(names)} of later steps to {target}")

    def iteration(self, name):
        """iter_num of a checkpoint in the folder; one that cannot be read is of the future."""
        try:
            return load_checkpoint(self.file(name)).get("iter_num", math.inf)
        except CheckpointError:
            return math.inf

    def wait(self):
        """Until the save under way, if any, is over."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
            return_freed_memory()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.wait()  # the folder is ours until its last save is over
        if self.lock is not None:
            self.lock.release()


def snapshot_if_room(state):
    """A snapshot, or None where memory does not allow one."""
    if memory_available() < 2 * tensor_bytes(state):
        return None
    try:
        return snapshot(state)
    except (MemoryError, RuntimeError):  # pinned memory is scarcer
        return None


def snapshot(state):
    """A copy on the CPU of a nest of dicts, lists and tensors that training can no longer change.
    From a GPU into pinned memory, at the speed of the bus: synchronize before reading it. PyTorch
    rounds each pinned tensor up to a power of two (GPT-2 124M with AdamW: 1.39 GiB take 2.45) and
    keeps the memory for the next save; hence the factor 2 above."""
    return map_tensors(copy_to_host, state)


def copy_to_host(t, pin=True):
    """A copy of a tensor on the CPU, from a GPU into pinned memory if `pin`: see snapshot."""
    out = torch.empty(t.shape, dtype=t.dtype, pin_memory=pin and t.is_cuda)
    return out.copy_(t.detach(), non_blocking=t.is_cuda)


def numbered(folder):
    """Names of the checkpoints that are kept by their number, the first written first (which after
    --resume FILE is not the one of the lowest number)."""
    names = [n for n in os.listdir(folder) if re.fullmatch(r"ckpt_\d+\.pt", n)]
    return sorted(names, key=lambda n: (os.stat(os.path.join(folder, n)).st_mtime_ns, n))


def prune(folder, keep):
    """Remove the oldest numbered checkpoints but `keep`, once newer ones are durable; 0: none."""
    for name in numbered(folder)[:-keep] if keep else ():
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, name))


def move_aside(folder):
    """Move a run's files out of the way; the new place, None where there are none."""
    names = [n for n in os.listdir(folder) if n.startswith(RUN_FILES)]
    return move_files(folder, names) if names else None


def move_files(folder, names):
    """Move the files `names` of `folder` to old_1/ (or the next free number) in it; the new place.
    """
    target = free_name(folder, "old", "")
    os.makedirs(target)
    for name in names:
        os.replace(os.path.join(folder, name), os.path.join(target, name))
    return target


def show(path):
    """Print what the checkpoint at `path` holds besides tensors: its state as comments above its
    configuration, YAML that run_train.py --config takes."""
    state = load_checkpoint(path)
    sizes = [t.numel() for _, t in named_tensors(state["model"])]
    print(f"# {path}: {len(sizes)} tensors, {sum(sizes):,} numbers")
    for name in sorted(state.keys() - {"model", "optimizer", "config"}):
        print(f"# {name}: {show_value(state[name])}"[:LONGEST])
    config = {k: v for k, v in (state.get("config") or {}).items() if k not in START_KEYS}
    print(yaml.safe_dump(config, sort_keys=False), end="")


def main(argv=None):
    """The command line; the exit code."""
    parser = argparse.ArgumentParser("python -m train.checkpoint", description="Show the "
                                     "configuration and the state in a checkpoint.")
    parser.add_argument("ckpt", metavar="FILE", help="out/ckpt_0001000.pt, say")
    return run_command(parser, lambda args: show(args.ckpt), argv)


def load_latest(folder, log):
    """(state, path) of the newest good checkpoint of a run folder, (None, None) without any. A bad
    ckpt.pt is moved to ckpt_bad_1.pt and the one before it is used; with no good one left this
    raises, so that a run with a history never starts from scratch by accident."""
    path, problems = os.path.join(folder, "ckpt.pt"), []
    for p in (p for p in (path, prev_path(path)) if os.path.lexists(p)):
        try:
            state = load_checkpoint(p)
        except CheckpointError as error:
            if "allocate memory" in str(error):  # the file may well be good
                raise
            problems.append(str(error))
            continue
        for problem in problems:
            log(f"warning: {problem}")
        if p != path:
            log(f"going on from {p}, saved at iter {state.get('iter_num')}, instead")
            if os.path.lexists(path):  # or the next save would make the bad file the previous one
                os.replace(path, free_name(folder, "ckpt_bad"))
        return state, p
    kept = [p for n in ("ckpt_best.pt", *numbered(folder)[::-1])
            if os.path.exists(p := os.path.join(folder, n))]
    if not problems and not kept:
        return None, None
    other = f", go on from a kept one with --resume {kept[0]}" if kept else ""
    raise CheckpointError(
        f"{folder}: no checkpoint can be used:\n"
        + bullets(problems or ["ckpt.pt and ckpt_prev.pt are gone"])
        + f"\nrestore one of them{other}, or start afresh with --resume never "
        "(what is there is moved aside)")


if __name__ == "__main__":
    sys.exit(main())
