"""The folder of a run (out_dir): the lock, saving in the background, and finding checkpoints in it.
"""

import contextlib
import json
import mmap
import os
import pathlib
import re
import shutil
import sys
import time

import torch

from train.base import checkpoint_file as file_format
from train.base import sharded_file
from train.base.background import BackgroundThread
from train.base.checkpoint_file import open_checkpoint, replace_checkpoint, save_checkpoint
from train.base.errors import CheckpointError, CollectiveExit, quote_path
from train.base.files import lock_folder, next_free_path, unlock, write_text
from train.base.memory import memory_available, return_freed_memory
from train.base.tensors import map_tensors, named_tensors, write_safetensors

MIN_MAPPED_BYTES = 1 << 16  # of a tensor whose copy is a memory map, of which Linux permits 65,530
# Starts of the names that a run writes. Other names in out_dir may belong to other runs.
RUN_FILES = ("ckpt", "config.yaml", "training_args.json", "train.log", "metrics.jsonl", "loss.svg",
             "samples.txt", "stacks.txt", "model.safetensors", "tensorboard", "wandb",
             "tracker.json")


class RunFolder:
    """The folder of a run (out_dir), in which checkpoints are saved in the background. close()
    waits for a save in progress, and then releases the lock of open().

    A checkpoint in one file: call save() on rank 0. A thread writes the file, one at a time, from a
    snapshot that training does not change. A sharded checkpoint: prepare() on rank 0; start() on
    every rank, with a function that calls write_shards(); then write(), with a function that calls
    save_manifest(), on rank 0.

    path: of the folder. file(name) returns the path of a file in it.
    keep_last: number of numbered checkpoints (ckpt_NNNNNNN.pt) to keep; 0: all.
    save_precision: name of a dtype, e.g. "bfloat16": each save of a checkpoint in one file also
    writes model.safetensors in this dtype; `None`: it does not.
    Attribute mirror: a Mirror, set by the caller, to which write() copies; `None`: no copies.
    """

    def __init__(self, path, keep_last=0, save_precision=None):
        self.name = path
        self.path = os.path.abspath(path)  # a user's reward function may change the current folder
        self.keep_last = keep_last
        self.save_precision = save_precision
        self.lock = None
        self.is_new = False  # whether open() has created the folder
        self.stat = None  # os.stat() of the folder that open() locked
        self.job = ""  # content of .job, set by take()
        self.thread = None
        self.saves_best = False  # whether the save in progress also writes ckpt_best.pt
        self.failed = False  # a save of ckpt_best.pt in the background failed
        self.lost = []  # a message, if the save in the background does not reach all ranks
        self.kept = []  # complete folders of shards that no checkpoint names, e.g. copied ones
        self.mirror = None  # of train/options/mirror.py

    def file(self, name):
        return os.path.join(self.path, name)

    def open(self):
        """Create and lock the folder, and remove incomplete files and shards of killed processes.
        Call it on rank 0 only: a second process cannot lock the folder. Raises CheckpointError if
        the folder cannot be used, UserError if it is already locked or the disk is full."""
        try:
            self.is_new = not os.path.exists(self.path)
            os.makedirs(self.path, exist_ok=True)
            self.lock = lock_folder(self.path)
            self.stat = os.stat(self.path)
            for name in os.listdir(self.path):
                if re.search(r"\.tmp\.\d+(\.pt)?$", name):  # of a killed process
                    os.unlink(self.file(name))
            if not restarted_job(self.path)[1]:  # nothing here is of this job until take()
                pathlib.Path(self.path, ".job").unlink(missing_ok=True)
            self.kept = [path for path in sharded_file.unnamed_shards(self.path)
                         if path.joinpath(sharded_file.MANIFEST).exists()]
            sharded_file.remove_unnamed_shards(self.path, self.kept)
        except OSError as error:
            raise CheckpointError(f"out_dir: {self.name} cannot be used: {error}") from error

    def take(self, resume, log):
        """Begin to use the folder for this job, on rank 0, before files of the run are written. If
        `resume` is "never", move files of an earlier run to the new subfolder old_1/ (or old_2/,
        ...), except after a restart by torchrun, and call log(text)."""
        self.job, restarted = restarted_job(self.path)
        names = [name for name in os.listdir(self.path) if name.startswith(RUN_FILES)]
        if resume == "never" and names and not restarted:
            log(f"--resume never: moved the files in {self.name} to {move_files(self.path, names)}")
        if not self.save_precision and os.path.exists(self.file("model.safetensors")):
            log("warning: model.safetensors stays as it is: save_precision is not set")
        # After --resume FILE after the first save: before, a restart would find another checkpoint.
        if self.job and resume in ("auto", "must", "never"):
            write_text(self.file(".job"), self.job)

    def save(self, state, is_best, is_numbered, logger, last=False, private=False):
        """Save a checkpoint in one file as ckpt.pt; if `is_best` also as ckpt_best.pt, if
        `is_numbered` also as ckpt_NNNNNNN.pt, with the step state["iter_num"]. First wait for an
        earlier save in progress.
        state: content of the checkpoint, a dict.
        logger: an object with info(text) and warn(text).
        private: whether `state` is a copy that nothing changes, so that no snapshot is needed.

        A thread writes the files. save() returns when a snapshot of `state` exists (at once if
        `private`); if memory does not suffice for a snapshot, it returns when the files are
        written. A failure is a warning: the old file is intact, and training continues. With
        `last`, the files are written before save() returns, and a failure raises CollectiveExit.
        """
        links = self.prepare(state["iter_num"], is_best, is_numbered, logger)

        def write(state):
            self.write(lambda path: save_checkpoint(path, state, links), logger, last, state)
        self.start(write, state, logger, last, private)

    def prepare(self, iter_num, is_best, is_numbered, logger):
        """Wait for the save in progress, if any. Return a list of the paths, in addition to
        ckpt.pt, for the checkpoint of step `iter_num`: ckpt_best.pt if `is_best`, ckpt_NNNNNNN.pt
        if `is_numbered`; [] if neither. If the folder was deleted or renamed, call reopen();
        UserError if another run has locked the new folder."""
        self.wait()
        if not self.is_same():
            with contextlib.suppress(CheckpointError):  # then the save fails, which is a warning
                self.reopen(logger)
        self.saves_best = is_best
        links = [self.file("ckpt_best.pt")] if is_best else []
        return links + ([self.file(f"ckpt_{iter_num:07d}.pt")] if is_numbered else [])

    def is_same(self):
        """Return whether the folder still is the one that open() locked: neither deleted nor
        renamed. The same lock file suffices, as FUSE may change the inode of a folder."""
        with contextlib.suppress(OSError):
            stat = os.stat(self.path)
            return self.stat is None or os.path.samestat(stat, self.stat) or os.path.samestat(
                os.stat(self.lock.name), os.fstat(self.lock.fileno()))
        return False

    def reopen(self, logger):
        """Call open() again. Move the checkpoints in the folder, of another run, to a subfolder,
        and call logger.warn(text). Raises UserError if another run has locked the folder."""
        self.open()
        if names := [name for name in os.listdir(self.path) if name.startswith("ckpt")]:
            logger.warn(f"{self.name} was replaced during this run; moved the checkpoints in it to "
                        f"{move_files(self.path, names)}")

    def start(self, write, state, logger, last=False, private=False, n_writers=1):
        """Call write(snapshot) in a thread, and return without waiting for it. snapshot: a copy of
        `state`, a nested dict with tensors, on the CPU; if `private`, `state` without a copy:
        nothing may change it then. With `last`, or if memory does not suffice for a snapshot, call
        write(state) in this thread, before returning. logger: an object with info(text). n_writers:
        number of ranks of this machine that call start(). To be called after prepare(), which waits
        for the previous thread."""
        start = time.perf_counter()
        copy = state if last or private else snapshot(state)
        stall = "" if last else f" (snapshot: {time.perf_counter() - start:.2g} s)"
        logger.info(f"Saving checkpoint to {os.path.join(self.name, 'ckpt.pt')}{stall}")
        if last or copy is None:
            return write(state)
        # With a GPU, training does not need all cores.
        n_threads = None if torch.accelerator.is_available() else n_writers
        self.thread = BackgroundThread(write, copy, n_threads=n_threads)
        self.thread.start()

    def write_shards(self, folder, rank, parts):
        """Write the tensors of the rank `rank` to the subfolder `folder`. parts: {name: [offsets,
        tensor]}; offsets: a list of ints, one per dimension, the position of the tensor in the
        whole tensor. Return (files, chunks), as from sharded_file.write_shards(), for
        save_manifest(). After an error, return the message, a text, instead of raising."""
        try:
            return sharded_file.write_shards(self.file(folder), rank, parts)
        except Exception as error:
            return f"{self.file(folder)} could not be written by rank {rank}: {error}"

    def save_manifest(self, path, folder, state, written, links):
        """Write the manifest of the shards in the subfolder `folder` to the file `path`. state:
        content of the checkpoint, a dict with tensors on the meta device. written: list of the
        results of write_shards() on all ranks. links: paths, each of which becomes a hard link to
        the manifest. Raises CheckpointError if a result in `written` is an error, if shards are
        missing or incomplete, or if the manifest cannot be written."""
        if errors := [result for result in written if isinstance(result, str)]:
            raise CheckpointError("; ".join(errors))

        def write(f):
            f.write(sharded_file.make_manifest(self.path, folder, state, written))
        links = [os.path.join(self.path, folder, sharded_file.MANIFEST), *links]
        replace_checkpoint(path, write, links)

    def write(self, save, logger, last=False, state=None):
        """Call save(path), with the path of ckpt.pt, to write a checkpoint. Then start to copy it
        to the mirror, delete numbered checkpoints beyond keep_last and unused shards, and, if
        save_precision is set, write model.safetensors from `state`, the content of the checkpoint.
        If save() fails, call logger.warn(text) or, with `last`, raise CollectiveExit. A failure in
        a later part is always a warning."""
        try:
            save(self.file("ckpt.pt"))
        except Exception as error:
            sharded_file.remove_unnamed_shards(self.path, self.kept)
            exists = os.path.exists(self.file("ckpt.pt"))
            previous = "the previous checkpoint is intact, " if exists else ""
            if last:
                raise CollectiveExit(f"the last checkpoint could not be saved: {error}; {previous}"
                                     "start the run again") from error
            self.failed = self.failed or self.saves_best
            return logger.warn(f"{error}; {previous}training continues")
        with contextlib.suppress(OSError):
            if self.job:
                write_text(self.file(".job"), self.job)
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
        """Write the weights of a checkpoint to model.safetensors in the folder; floating-point
        weights are converted to save_precision. state: content of the checkpoint, a dict. The
        description of the model (the keys in DESCRIPTION, as JSON) is in the header of the file."""
        dtype = getattr(torch, self.save_precision)
        weights = {n: t.to(dtype) if t.is_floating_point() else t
                   for n, t in state["model"].items()}
        description = {k: json.dumps(state[k]) for k in file_format.DESCRIPTION if k in state}
        write_safetensors(self.file("model.safetensors"), weights, description)
        del weights  # malloc may keep the memory of the converted ones
        return_freed_memory()

    def archive_later_checkpoints(self, progress, log):
        """Prepare the folder for a run that resumes from a given file; progress: state_dict() of
        its Progress. Move each of ckpt.pt, ckpt_prev.pt and ckpt_best.pt that the run would replace
        or must not use to the new subfolder old_1/ (or old_2/, ...): if it is damaged, of a later
        step, or of another run (with other evaluations), and a ckpt_best.pt that is not the best of
        this run. With them, move the numbered checkpoints of later steps or, if one of the three is
        of another run, all. metrics.jsonl is copied to it, or moved if there is a checkpoint of
        another run. log(text) is called if files were moved."""
        names = []
        is_other = False  # whether a checkpoint of another run is here
        for name in ("ckpt.pt", "ckpt_prev.pt", "ckpt_best.pt"):
            try:
                state = open_checkpoint(self.file(name))[0]
            except CheckpointError:  # a damaged file must not become ckpt_prev.pt
                if os.path.lexists(self.file(name)):
                    names.append(name)
                continue
            other = state.get("progress") or {}
            histories = zip(other.get("history", ()), progress["history"])
            differs = any(repr(a) != repr(b) for a, b in histories)  # as texts NaN equals NaN
            is_later = state.get("iter_num", 0) > progress["iter_num"]
            is_best = other.get("best_metric") == progress["best_metric"]
            if differs or is_later or name == "ckpt_best.pt" and not is_best:
                names.append(name)
            is_other = is_other or differs
        names += [path.name for path in numbered_checkpoints(self.path)
                  if is_other or int(path.stem[5:]) > progress["iter_num"]]
        if names:
            target = move_files(self.path, names)
            with contextlib.suppress(OSError):  # without a copy, its later steps would be lost
                (shutil.move if is_other else shutil.copy2)(self.file("metrics.jsonl"), target)
            log(f"Moved {', '.join(names)}, which this run would replace, to {target}")

    def wait(self):
        """Wait for the save in progress, if any."""
        if self.thread is not None:
            self.thread.wait()
            self.thread = None

    def close(self):
        """Wait for the save in progress, which needs the lock, and release the lock. If open() has
        created the folder and nothing else is in it, as the run was refused, remove it."""
        self.wait()
        if self.lock is not None:
            if self.is_new and self.is_same() and os.listdir(self.path) == [".lock"]:
                shutil.rmtree(self.path, ignore_errors=True)
            unlock(self.lock)


# -----------------------------------------------------------------------------
# snapshots

def snapshot(state):
    """Return a copy of a nested state (dicts and lists with tensors), in which all tensors are
    copies on the CPU that training does not change. Return `None` if memory does not suffice.

    Tensors on a GPU are copied to pinned memory, which PyTorch keeps for the next save.
    """
    # Factor 2: PyTorch rounds the size of each pinned tensor up to a power of two (GPT-2 124M with
    # AdamW: 1.39 GiB take 2.45).
    if memory_available() < 2 * sum(t.nbytes for _, t in named_tensors(state)):
        return None
    try:
        copy = map_tensors(copy_to_host, state)
    except (MemoryError, OSError, RuntimeError):  # too little memory, also pinned memory
        return None
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # the copies are complete
    return copy


def copy_to_host(t):
    """Return a copy of the tensor `t` on the CPU, without gradient. If `t` is on a GPU, the copy is
    in pinned memory and asynchronous: it is complete only after torch.cuda.synchronize()."""
    if t.is_cuda or t.nbytes < MIN_MAPPED_BYTES or sys.platform != "linux":
        out = torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda)
    else:
        # Not from glibc's malloc, which may keep freed memory. malloc_trim() would also take the
        # memory that the next step needs, and make this step a fifth longer.
        memory = mmap.mmap(-1, t.nbytes, access=mmap.ACCESS_COPY)
        out = torch.frombuffer(memory, dtype=t.dtype).view(t.shape)
    return out.copy_(t.detach(), non_blocking=t.is_cuda)


# -----------------------------------------------------------------------------
# checkpoints in a folder

def find_newest_checkpoint(folder, log, damaged=()):
    """Return (state, path, shards) of the newest checkpoint in the run folder `folder` that can be
    loaded. state, shards: as returned by open_checkpoint(path). Return (`None`, `None`, `None`) if
    the folder has no checkpoints.
    log(text): called with warnings.
    damaged: {path: message} of sharded checkpoints that must not be used, because files do not
    match their digests.

    First ckpt.pt is tried, then ckpt_prev.pt; in the second case a damaged ckpt.pt is renamed to
    ckpt_bad_1.pt (or 2, ...). If neither exists, ckpt_best.pt and ckpt_NNNNNNN.pt are tried, the
    newest first: the run was killed in the first save, which creates these names before ckpt.pt.
    Raises CheckpointError if all are damaged (an existing run must not start from scratch by
    accident), or if there is too little memory to load one.
    """
    path = os.path.join(folder, "ckpt.pt")
    problems = []
    names = [*filter(os.path.lexists, (path, file_format.prev_path(path)))]
    others = [*map(str, numbered_checkpoints(folder, "best|[0-9]{7,}"))]
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
    advice = f"--resume {quote_path(others[-1])} or " if names and others else ""
    raise CheckpointError(
        f"{folder}: no checkpoint can be used:\n{file_format.bullets(problems)}\nrestore one of "
        f"these files, or start with {advice}--resume never (existing files are renamed, not "
        "deleted) or another --out_dir")


def restarted_job(folder):
    """Return (job, restarted). job: three lines, which identify the job of torchrun, this torchrun
    and this process; "" without torchrun. restarted: whether torchrun has restarted this job, and
    an earlier attempt used the run folder `folder` (the file .job in it has the same job). A
    restarted job resumes the run in `folder`, even with --resume never."""
    job = os.environ.get("TORCHELASTIC_RUN_ID", "")
    job += f" {os.getppid()}" if job == "none" else ""  # torchrun's default for every job
    # The folder of this torchrun's logs: it does not count its restarts when a node joins.
    logs = os.environ.get("TORCHELASTIC_ERROR_FILE", "").partition("/attempt_")[0]
    mark = pathlib.Path(folder, ".job")  # written by RunFolder
    before = mark.read_text().split("\n") if mark.is_file() else []
    process = str(os.getpid())  # which may train several runs
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" or (
        logs in before[1:2] and process not in before[2:])
    return job and f"{job}\n{logs}\n{process}", bool(job) and job in before[:1] and again


def numbered_checkpoints(folder, names="[0-9]{7,}"):
    """Return a list of the paths (pathlib.Path) of the checkpoints ckpt_NNNNNNN.pt in `folder`,
    oldest first, by the time of writing (after --resume FILE the numbers may be in a different
    order). names: a regular expression for what follows ckpt_ in the name."""
    paths = [path for path in pathlib.Path(folder).glob("ckpt_*.pt")
             if re.fullmatch(f"ckpt_({names}).pt", path.name)]
    return sorted(paths, key=lambda path: (path.lstat().st_mtime_ns, path))


def move_files(folder, names):
    """Move files in `folder` to a new subfolder, the first of old_1/, old_2/, ... that does not
    exist, and return its path, a str. names: a list of names of files or folders. If a file is the
    manifest of a sharded checkpoint, the shards are moved too. OSError for a missing name."""
    target = next_free_path(folder, "old", "")
    os.makedirs(target)
    kept = sharded_file.unnamed_shards(folder)  # of none of these checkpoints
    for name in names:
        sharded_file.link_shards(os.path.join(folder, name), target)
        os.replace(os.path.join(folder, name), os.path.join(target, name))
    sharded_file.remove_unnamed_shards(folder, kept)  # the links are in target
    return target
