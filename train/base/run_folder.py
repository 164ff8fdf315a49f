"""The folder of a run (out_dir): the lock, and saving in the background."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import sys
import threading
import time

import torch

from train.base import sharded_file
from train.base.checkpoint_file import (
    DESCRIPTION,
    bullets,
    open_checkpoint,
    prev_path,
    replace_checkpoint,
    save_checkpoint,
)
from train.base.errors import CheckpointError, CollectiveExit
from train.base.files import describe_write_error, lock_folder, next_free_path, unlock
from train.base.memory import memory_available, return_freed_memory
from train.base.tensors import map_tensors, named_tensors, write_safetensors

# Starts of the names that a run writes. Other names in out_dir may belong to other runs.
RUN_FILES = ("ckpt", "config.yaml", "training_args.json", "train.log", "metrics.jsonl", "loss.svg",
             "samples.txt", "stacks.txt", "model.safetensors", "tensorboard", "wandb",
             "tracker.json")


class RunFolder:
    """The folder `path` of a run (out_dir): a context manager that on exit waits for a save in
    progress and releases the lock of open(). save() writes a checkpoint file, on rank 0, in the
    background, one at a time, from a snapshot that training does not change. Shards are written by
    every rank with prepare(), start(), write_shards(), save_manifest() and write(). file(name)
    returns a path in the folder.

    keep_last: number of numbered checkpoints (ckpt_NNNNNNN.pt) to keep; 0: all. save_precision:
    dtype of model.safetensors, which each save of a checkpoint in one file then also writes.
    """

    def __init__(self, path, keep_last=0, save_precision=None):
        self.name = path
        self.path = os.path.abspath(path)  # a user's reward function may change the current folder
        self.keep_last = keep_last
        self.save_precision = save_precision
        self.lock = None
        self.thread = None
        self.saves_best = False  # whether the save in progress also writes ckpt_best.pt
        self.failed = False  # a save of ckpt_best.pt in the background failed
        self.kept = []  # complete folders of shards that no checkpoint names, e.g. copied ones
        self.mirror = None  # of train/options/mirror.py

    def file(self, name):
        return os.path.join(self.path, name)

    def open(self):
        """Create and lock the folder, and remove incomplete files of killed processes.
        CheckpointError if it cannot be used; UserError if it is locked already."""
        try:
            os.makedirs(self.path, exist_ok=True)
            self.lock = lock_folder(self.path)
            for name in os.listdir(self.path):
                if re.search(r"\.tmp\.\d+(\.pt)?$", name):  # of a killed process
                    os.unlink(self.file(name))
            self.kept = [path for path in sharded_file.unnamed_shards(self.path)
                         if path.joinpath(sharded_file.MANIFEST).exists()]
            sharded_file.remove_unnamed_shards(self.path, self.kept)
        except OSError as error:
            raise CheckpointError(f"out_dir: {self.name} cannot be used: {error}") from error

    def save(self, state, is_best, is_numbered, logger, last=False, private=False):
        """Save `state`, the dict of a checkpoint, as ckpt.pt, if `is_best` also as ckpt_best.pt, if
        `is_numbered` also as ckpt_NNNNNNN.pt. logger: has info(text), warn(text).

        Returns when a snapshot exists (at once if `state` is `private`: a copy that nothing
        changes), which a thread then writes; without memory for a snapshot, when the file is
        written. A failure is a warning: the old file is intact, and training continues. With
        `last`, the file is written before save() returns, and a failure raises CollectiveExit.
        """
        links = self.prepare(state["iter_num"], is_best, is_numbered)

        def write(state):
            self.write(lambda path: save_checkpoint(path, state, links), logger, last, state)
        self.start(write, state, logger, last, private)

    def prepare(self, iter_num, is_best, is_numbered):
        """Wait for the save in progress, and return a list of additional paths (besides ckpt.pt)
        for the checkpoint of step `iter_num`: ckpt_best.pt if `is_best`, ckpt_NNNNNNN.pt if
        `is_numbered`. Creates the folder again if it was deleted."""
        self.wait()
        if not os.path.isdir(self.path):  # deleted during the run
            self.open()
        self.saves_best = is_best
        links = [self.file("ckpt_best.pt")] if is_best else []
        return links + ([self.file(f"ckpt_{iter_num:07d}.pt")] if is_numbered else [])

    def start(self, write, state, logger, last=False, private=False):
        """Call write(state) in a thread, with a snapshot of the nested `state`; no snapshot is
        needed if it is `private`, a copy that nothing changes. Without enough memory for a
        snapshot, or for the `last` save, call write(state) in this thread, before returning.
        logger: has info(text)."""
        start = time.perf_counter()
        copy = state if last or private else snapshot(state)
        stall = "" if last else f" (snapshot: {time.perf_counter() - start:.2g} s)"
        logger.info(f"Saving checkpoint to {os.path.join(self.name, 'ckpt.pt')}{stall}")
        if last or copy is None:
            return write(state)
        self.thread = threading.Thread(target=at_low_priority, args=(write, copy))
        self.thread.start()

    def write_shards(self, folder, rank, parts):
        """Write the tensors of a rank, `parts` {name: [offsets in the whole tensor, tensor]}, to
        the subfolder `folder`. Return (files, chunks) for save_manifest(), or the error as a text.
        """
        try:
            return sharded_file.write_shards(self.file(folder), rank, parts)
        except Exception as error:
            reason = describe_write_error(error, self.file(folder))
            return f"{self.file(folder)} could not be written by rank {rank}: {reason}"

    def save_manifest(self, path, folder, state, written, links):
        """Write the manifest of the shards in the subfolder `folder` to `path`, with hard links at
        `links`. state: dict of the checkpoint, with tensors on the meta device. written: results of
        write_shards() of every rank. CheckpointError if one of them failed, or if the manifest
        cannot be written."""
        if errors := [result for result in written if isinstance(result, str)]:
            raise CheckpointError("; ".join(errors))
        try:
            text = sharded_file.make_manifest(self.path, folder, state, written)
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{path} could not be written: {error} (is out_dir on a file "
                                  "system that all ranks share?)") from error
        links = [os.path.join(self.path, folder, sharded_file.MANIFEST), *links]
        replace_checkpoint(path, lambda f: f.write(text), links)

    def write(self, save, logger, last=False, state=None):
        """Call save(path of ckpt.pt), then update the mirror, delete old numbered checkpoints, and
        write model.safetensors from `state`, the dict of the checkpoint, if save_precision is set.
        If save() fails, call logger.warn(text) or, with `last`, raise CollectiveExit. Later
        failures are warnings."""
        try:
            save(self.file("ckpt.pt"))
        except Exception as error:
            sharded_file.remove_unnamed_shards(self.path, self.kept)
            exists = os.path.exists(self.file("ckpt.pt"))
            if last:
                resume = ": the run resumes from the one before it" if exists else ""
                raise CollectiveExit(f"the last checkpoint could not be saved: {error}\nStart the "
                                     f"run again{resume}") from error
            self.failed = self.failed or self.saves_best
            previous = "the previous checkpoint is intact, " if exists else ""
            return logger.warn(f"{error}; {previous}training continues")
        if self.mirror:
            self.mirror.update(logger)
        problem = "older checkpoints are not deleted"
        try:  # the checkpoint is safe from here on
            for path in numbered_checkpoints(self.path)[:-self.keep_last] if self.keep_last else ():
                with contextlib.suppress(OSError):
                    path.unlink()
            sharded_file.remove_unnamed_shards(self.path, self.kept)
            problem = "model.safetensors (save_precision) is not up to date"
            if self.save_precision:
                self.export(state)
        except Exception as error:
            logger.warn(f"{self.file('ckpt.pt')} is saved, but {problem}: {error}")

    def export(self, state):
        """Write model.safetensors from `state`, the dict of a checkpoint: the weights, converted to
        save_precision, with the description of the model in the header."""
        dtype = getattr(torch, self.save_precision)
        weights = {n: t.to(dtype) if t.is_floating_point() else t
                   for n, t in state["model"].items()}
        description = {k: json.dumps(state[k]) for k in DESCRIPTION if k in state}
        write_safetensors(self.file("model.safetensors"), weights, description)

    def archive_later_checkpoints(self, iter_num, log):
        """Move ckpt.pt, ckpt_prev.pt and ckpt_best.pt, if damaged or of a step after `iter_num`, to
        old_1/ (or old_2/, ...), with a copy of metrics.jsonl: a run that resumes at that step would
        replace them. An earlier best checkpoint stays. log(text) is called if files were moved."""
        def is_later(name):
            try:
                return open_checkpoint(self.file(name))[0].get("iter_num", 0) > iter_num
            except CheckpointError:  # a damaged file must not become ckpt_prev.pt
                return os.path.lexists(self.file(name))
        if names := [*filter(is_later, ("ckpt.pt", "ckpt_prev.pt", "ckpt_best.pt"))]:
            target = move_files(self.path, names)
            with contextlib.suppress(OSError):  # metrics.jsonl is about to lose these steps
                shutil.copy2(self.file("metrics.jsonl"), target)
            log(f"Moved {', '.join(names)} of later steps to {target}")

    def wait(self):
        """Wait for the save in progress, if any."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
            return_freed_memory()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.wait()  # with the lock, which the save in progress needs
        if self.lock is not None:
            unlock(self.lock)


def at_low_priority(f, *args):
    """Call f(*args), on Linux after setting the current thread to nice 10: it gets a tenth of a
    core that training uses, and all of a free one."""
    if sys.platform == "linux":  # elsewhere nice() changes the whole process
        os.nice(10)
    f(*args)


# -----------------------------------------------------------------------------
# snapshots

def snapshot(state):
    """Return a copy of a nested state (dicts and lists with tensors) on the CPU that training does
    not change, or `None` if memory is insufficient.

    Tensors on a GPU are copied to pinned memory, at the speed of the bus. PyTorch reserves the
    memory for the next save.
    """
    # Factor 2: PyTorch rounds the size of each pinned tensor up to a power of two (GPT-2 124M with
    # AdamW: 1.39 GiB take 2.45).
    if memory_available() < 2 * sum(t.nbytes for _, t in named_tensors(state)):
        return None
    try:
        copy = map_tensors(copy_to_host, state)
    except (MemoryError, RuntimeError):  # too little pinned memory
        return None
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # the copies are complete
    return copy


def copy_to_host(t):
    """Return a copy of the tensor `t` on the CPU. The copy of a GPU tensor is in pinned memory, and
    is complete only after torch.cuda.synchronize()."""
    out = torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda)
    return out.copy_(t.detach(), non_blocking=t.is_cuda)


# -----------------------------------------------------------------------------
# checkpoints in a folder

def find_newest_checkpoint(folder, log, damaged=()):
    """Return (state, path, shards) of the newest good checkpoint in a run folder, state and shards
    as by open_checkpoint(); (`None`, `None`, `None`) without any. damaged: {path: problem} of
    sharded checkpoints with files that do not match their digest. log(text): for warnings.

    If ckpt.pt is damaged, it is renamed to ckpt_bad_1.pt, and ckpt_prev.pt is used. If neither
    exists, the run was killed in its first save, which first creates the other names of the file
    (ckpt_best.pt, ckpt_NNNNNNN.pt): these are used. If all are damaged this raises CheckpointError:
    an existing run must not start from scratch by accident.
    """
    path = os.path.join(folder, "ckpt.pt")
    problems = []
    names = [*filter(os.path.lexists, (path, prev_path(path)))]
    others = sorted([*map(str, numbered_checkpoints(folder)),
                     *filter(os.path.lexists, [os.path.join(folder, "ckpt_best.pt")])],
                    key=lambda path: os.lstat(path).st_mtime_ns)
    for candidate in names or reversed(others):
        try:
            if candidate in damaged:
                raise CheckpointError(damaged[candidate])
            state, shards = open_checkpoint(candidate)
        except CheckpointError as error:
            if "allocate memory" in str(error):  # the file may be good
                raise
            log(f"warning: {error}")
            problems.append(str(error))
            continue
        if candidate != path:
            log(f"falling back to {candidate} (iter {state.get('iter_num')})")
            if problems and names:  # or the next save would keep the damaged file as *_prev.pt
                os.replace(path, next_free_path(folder, "ckpt_bad"))
        return state, candidate, shards
    if not problems:
        return None, None, None
    advice = f"--resume {others[-1]}, " if names and others else ""
    raise CheckpointError(
        f"{folder}: no checkpoint can be used:\n{bullets(problems)}\nrestore one of these files, "
        f"or start with {advice}--resume never (existing files are renamed, not deleted) or "
        "another --out_dir")


def restarted_job(folder):
    """Return (job, restarted): the name of torchrun's job, "" without torchrun; and whether
    torchrun has restarted this job after an attempt that used the run folder `folder`. A restarted
    job resumes the run in `folder`, even with --resume never."""
    job = os.environ.get("TORCHELASTIC_RUN_ID", "")
    job += f" {os.getppid()}" if job == "none" else ""  # torchrun's default for every job
    mark = pathlib.Path(folder, ".job")  # written by find_checkpoint() of each attempt
    return job, (os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and mark.is_file()
                 and mark.read_text() == job)


def numbered_checkpoints(folder):
    """Return the paths (pathlib.Path) of the checkpoints ckpt_NNNNNNN.pt, sorted by the time of
    writing (after --resume FILE the oldest does not have the lowest number)."""
    paths = [path for path in pathlib.Path(folder).glob("ckpt_*.pt")
             if re.fullmatch("ckpt_[0-9]{7,}.pt", path.name)]
    return sorted(paths, key=lambda path: (path.stat().st_mtime_ns, path))


def move_files(folder, names):
    """Move the files `names` in `folder`, and the shards to which they refer if they are manifests,
    to a new subfolder: the first of old_1/, old_2/, ... that does not exist. Return the path of the
    subfolder."""
    target = next_free_path(folder, "old", "")
    os.makedirs(target)
    kept = sharded_file.unnamed_shards(folder)  # of none of these checkpoints
    for name in names:
        sharded_file.link_shards(os.path.join(folder, name), target)
        os.replace(os.path.join(folder, name), os.path.join(target, name))
    sharded_file.remove_unnamed_shards(folder, kept)  # the links are in target
    return target
