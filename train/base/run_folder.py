"""The folder of a run (out_dir): the lock, background saving, and finding checkpoints in it."""

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
from train.base.memory import memory_available
from train.base.tensors import map_tensors, named_tensors, write_safetensors

MIN_MAPPED_BYTES = 1 << 16  # of a tensor whose copy is a memory map, of which Linux permits 65,530
# Starts of the names that a run writes. Other names in out_dir may belong to other runs.
RUN_FILES = ("ckpt", "config.yaml", "training_args.json", "train.log", "metrics.jsonl", "loss.svg",
             "samples.txt", "stacks.txt", "model.safetensors", "tensorboard", "wandb",
             "tracker.json")


class RunFolder:
    """The folder of a run (out_dir), with a lock, in which checkpoints are saved in the background.

    keep_last: number of newest numbered checkpoints (ckpt_NNNNNNN.pt) to keep; 0: all.
    save_precision: dtype, e.g. "bfloat16", of the model.safetensors that each save of a checkpoint
    in one file also writes; `None`: not written.
    Attribute mirror, `None` or set by the caller: the Mirror to which write() copies.
    First call open(), then take(), on rank 0.
    One file: call save() on rank 0; a thread writes a snapshot that training does not change.
    Sharded: call prepare() on rank 0; start() on every rank, with a function that calls
    write_shards(); then write() on rank 0, with a function that calls save_manifest().
    At the end, call close() on every rank: it waits for a save in progress.
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

        On rank 0 only: a second process cannot lock the folder. Raises CheckpointError if the
        folder cannot be used, UserError if it is already locked or the disk is full.
        """
        try:
            self.is_new = not os.path.exists(self.path)
            os.makedirs(self.path, exist_ok=True)
            self.lock = lock_folder(self.path)
            self.stat = os.stat(self.path)
            for name in os.listdir(self.path):
                # Of a killed process. Other names may be of a command that writes to this folder.
                if name.startswith((".job", *RUN_FILES)) and re.search(
                        r"\.tmp\.\d+(\.pt)?$", name):
                    os.unlink(self.file(name))
            if not restarted_job(self.path)[1]:  # nothing here is of this job until take()
                pathlib.Path(self.path, ".job").unlink(missing_ok=True)
            self.kept = [path for path in sharded_file.unnamed_shards(self.path)
                         if path.joinpath(sharded_file.MANIFEST).exists()]
            sharded_file.remove_unnamed_shards(self.path, self.kept)
        except OSError as error:
            raise CheckpointError(f"out_dir: {self.name} cannot be used: {error}") from error

    def take(self, resume, log):
        """Begin to use the folder for this job, on rank 0, before files of the run are written.

        resume: value of the key. With "never", files of an earlier run are moved to a new subfolder
        old_N/, except after a restart by torchrun. log(text): called with messages.
        """
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
        """Save a checkpoint in one file as ckpt.pt, in a thread, after any save in progress.

        state: content of the checkpoint, a dict.
        is_best, is_numbered: also write ckpt_best.pt, ckpt_NNNNNNN.pt (step state["iter_num"]).
        logger: an object with info(text) and warn(text).
        last: return when the files are written, and raise CollectiveExit after a failure.
        private: `state` is a copy that nothing changes, so that no snapshot is needed. Returns when
        a snapshot of `state` exists or, if memory does not suffice for one, when the files are
        written. A failed write is a warning: the old file is intact, and training continues.
        UserError as from prepare().
        """
        links = self.prepare(state["iter_num"], is_best, is_numbered, logger)

        def write(state):
            self.write(lambda path: save_checkpoint(path, state, links), logger, last, state)
        self.start(write, state, logger, last, private)

    def prepare(self, iter_num, is_best, is_numbered, logger):
        """Wait for a save in progress; return the paths that the next one links to ckpt.pt.

        They are ckpt_best.pt if `is_best`, and ckpt_NNNNNNN.pt if `is_numbered`. Calls reopen() if
        the folder was deleted or renamed; UserError if the new one is locked or the disk is full.
        """
        self.wait()
        if not self.is_same():
            with contextlib.suppress(CheckpointError):  # then the save fails, which is a warning
                self.reopen(logger)
        self.saves_best = is_best
        links = [self.file("ckpt_best.pt")] if is_best else []
        return links + ([self.file(f"ckpt_{iter_num:07d}.pt")] if is_numbered else [])

    def is_same(self):
        """Return whether the folder, or the lock file, is still the one that open() locked."""
        with contextlib.suppress(OSError):
            stat = os.stat(self.path)
            return self.stat is None or os.path.samestat(stat, self.stat) or os.path.samestat(
                os.stat(self.lock.name), os.fstat(self.lock.fileno()))
        return False

    def reopen(self, logger):
        """Call open() again, and move checkpoints found there to a subfolder, with a warning."""
        self.open()
        if names := [name for name in os.listdir(self.path) if name.startswith("ckpt")]:
            logger.warn(f"{self.name} was replaced during this run; moved the checkpoints in it to "
                        f"{move_files(self.path, names)}")

    def start(self, write, state, logger, last=False, private=False, n_writers=1):
        """Call write(snapshot) in a thread, where snapshot is a copy of `state` on the CPU.

        state: a nested dict with tensors; with `private` it is not copied: nothing may change it.
        last: call write(state) in this thread instead; also done if memory does not suffice.
        logger: an object with info(text).
        n_writers: number of ranks on this machine that call start() and share the CPU time.
        Call prepare() before, which waits for the previous thread.
        """
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
        """Return the result of sharded_file.write_shards() in this folder, or an error message."""
        try:
            return sharded_file.write_shards(self.file(folder), rank, parts)
        except Exception as error:
            return f"{self.file(folder)} could not be written by rank {rank}: {error}"

    def save_manifest(self, path, folder, state, written, links):
        """Write the manifest of the shards in the subfolder `folder` to the file `path`.

        state: content of the checkpoint, a dict with tensors on the meta device.
        written: list of the results of write_shards() on all ranks.
        links: paths that become hard links to the manifest.
        Raises CheckpointError for errors in `written`, incomplete shards or a failed write.
        """
        if errors := [result for result in written if isinstance(result, str)]:
            raise CheckpointError("; ".join(errors))

        def write(f):
            f.write(sharded_file.make_manifest(self.path, folder, state, written))
        links = [os.path.join(self.path, folder, sharded_file.MANIFEST), *links]
        replace_checkpoint(path, write, links)

    def write(self, save, logger, last=False, state=None):
        """Write a checkpoint with save(path of ckpt.pt), then copy to the mirror and clean up.

        state: content of the checkpoint, for model.safetensors if save_precision is set.
        If save() fails, calls logger.warn(text) or, with `last`, raises CollectiveExit. Numbered
        checkpoints beyond keep_last and unused shards are deleted. Later failures are warnings.
        """
        try:
            save(self.file("ckpt.pt"))
        except Exception as error:
            with contextlib.suppress(OSError):
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
        """Write model.safetensors: weights, floats in save_precision; metadata: DESCRIPTION."""
        description = {k: json.dumps(state[k]) for k in file_format.DESCRIPTION if k in state}
        write_safetensors(self.file("model.safetensors"), state["model"], description,
                          getattr(torch, self.save_precision))

    def archive_later_checkpoints(self, path, progress, log):
        """Move checkpoints that are not of the resumed run's past to a new subfolder old_N/.

        For --resume FILE. path: of the resumed checkpoint. progress: the attributes of the resumed
        run's Progress. log(text): called if files were moved.
        Of ckpt.pt, ckpt_prev.pt, ckpt_best.pt it moves unreadable files, those of a later step or
        of another run (other evaluations; without common ones, if `path` is in another folder), and
        a ckpt_best.pt that is not the best of this run; of the numbered ones, later steps, or all
        if one of the three is of another run. metrics.jsonl is copied with them, or moved if there
        is a checkpoint of another run.
        """
        home = os.path.dirname(os.path.realpath(path)).removesuffix(f"{os.sep}shards")
        names = []
        is_other = False  # whether a checkpoint of another run is here
        for name in ("ckpt.pt", "ckpt_prev.pt", "ckpt_best.pt"):
            try:
                state = open_checkpoint(self.file(name))[0]
            except CheckpointError as error:  # a damaged file must not become ckpt_prev.pt
                if file_format.is_temporary(error):
                    raise
                if os.path.lexists(self.file(name)):
                    names.append(name)
                continue
            other = state.get("progress") or {}
            # Compared as texts: NaN equals NaN.
            rows = [*zip(map(repr, other.get("history", ())), map(repr, progress["history"]))]
            differs = any(a != b for a, b in rows) if rows else home != os.path.realpath(self.path)
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
        """Wait for a save, release the lock, and remove a folder that open() created if empty."""
        self.wait()
        if self.lock is not None:
            if self.is_new and self.is_same() and os.listdir(self.path) == [".lock"]:
                shutil.rmtree(self.path, ignore_errors=True)
            unlock(self.lock)


# -----------------------------------------------------------------------------
# snapshots

def snapshot(state):
    """Return a CPU copy of nested dicts and lists with tensors; `None` if memory is too small.

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
    """Return a CPU copy of a tensor, complete after torch.cuda.synchronize() if it is on a GPU."""
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
    """Return (state, path, shards) of the newest checkpoint in a run folder that can be loaded.

    state, shards: as from open_checkpoint(). All three are `None` if there is no checkpoint.
    log(text): called with warnings.
    damaged: {path: message} of sharded checkpoints whose files do not match their digests.
    ckpt.pt is tried first, then ckpt_prev.pt (an unreadable ckpt.pt is renamed to ckpt_bad_N.pt).
    If neither exists (a kill in the first save), ckpt_best.pt and ckpt_NNNNNNN.pt are tried, newest
    first. Raises CheckpointError if none of the files can be loaded, or memory does not suffice.
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
            if file_format.is_temporary(error):
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
    """Return (job, whether torchrun restarted it after an attempt that used this run folder).

    job: three lines that identify the job, this torchrun and this process; "" without torchrun.
    A restarted job resumes the run in `folder`, even with --resume never.
    """
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
    """Return the Paths of ckpt_NAME.pt where NAME matches the regex `names`, oldest file first."""
    paths = [path for path in pathlib.Path(folder).glob("ckpt_*.pt")
             if re.fullmatch(f"ckpt_({names}).pt", path.name)]
    return sorted(paths, key=lambda path: (path.lstat().st_mtime_ns, path))


def move_files(folder, names):
    """Move files in `folder`, with their shards, to a new subfolder old_N/; return that path."""
    target = next_free_path(folder, "old", "")
    os.makedirs(target)
    kept = sharded_file.unnamed_shards(folder)  # of none of these checkpoints
    for name in names:
        sharded_file.link_shards(os.path.join(folder, name), target)
        os.replace(os.path.join(folder, name), os.path.join(target, name))
    sharded_file.remove_unnamed_shards(folder, kept)  # the links are in target
    return target
