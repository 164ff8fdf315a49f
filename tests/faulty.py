"""Fault injection: python tests/faulty.py ARGS is `python run_train.py ARGS` with the faults in the
environment variable FAULT.

FAULT="point@step[:rank]=action", several separated by commas. Points of a step: before_step,
mid_backward, bad_loss, before_opt, eval; load; of a save: save_open, save_mid, save_before_fsync,
save_before_replace, save_after_replace; of a sharded save also manifest, after all shards are
written; log_open. Actions: raise, oom (an exception), exit7, kill9, sleep, nan (for bad_loss), a
signal to this process (sigterm, ...), an OSError (enospc, eio, ...).
"""

import contextlib
import errno
import os
import pathlib
import signal
import sys
import threading
import time
from unittest import mock

REPO = pathlib.Path(__file__).resolve().parent.parent

SENT = set()  # signals, by fault and step: a step that was dropped comes to its points again


def point(name, step=None):
    """Perform the action of each fault in FAULT that matches this point, step and rank. Return true
    if the caller must produce a NaN."""
    for fault in filter(None, os.environ.get("FAULT", "").split(",")):
        where, action = fault.split("=")
        where, _, rank = where.partition(":")
        at, _, when = where.partition("@")
        here = at == name and (not when or step is None or int(when) == step)
        if action.startswith("sig") and here and (fault, step) in SENT:
            continue
        if here and (not rank or rank == os.environ.get("RANK", "0")):
            SENT.add((fault, step))
            return act(action, name)
    return False


def act(action, name):
    if action == "raise":
        raise RuntimeError(f"fault at {name}")
    if action == "oom":
        raise RuntimeError(f"fault at {name}: can't allocate memory")
    if action == "exit7":
        os._exit(7)
    if action == "kill9":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "sleep":
        time.sleep(10_000)
    if action.startswith("sig"):
        os.kill(os.getpid(), getattr(signal, action.upper()))
    if hasattr(errno, action.upper()):
        number = getattr(errno, action.upper())
        raise OSError(number, os.strerror(number))
    return action == "nan"


# -----------------------------------------------------------------------------
# where the points are: (owner, name, what takes its place)

def before(owner, name, then):
    """Return (owner, name, function that calls then(*args) and then owner.name), for
    mock.patch.object."""
    real = getattr(owner, name)

    def wrapper(*args, **kwargs):
        then(*args)
        return real(*args, **kwargs)
    return owner, name, wrapper


def points_of_a_step():
    import torch

    from model.gpt import GPT
    from train import train as training
    current = []  # the step that is under way
    step, forward = training.train_step, GPT.forward

    def train_step(run, lr=None):
        current[:] = [run.progress.iter_num]
        point("before_step", current[0])
        try:
            return step(run, lr)
        finally:
            current.clear()

    def bad_forward(model, *args, **kwargs):
        out = forward(model, *args, **kwargs)
        if current and model.training and point("bad_loss", current[0]):
            return out[0] * torch.nan, out[1]
        return out

    def within(name):
        return lambda *_: point(name, current[0]) if current else None
    yield training, "train_step", train_step
    yield GPT, "forward", bad_forward
    yield before(torch.Tensor, "backward", within("mid_backward"))
    yield before(torch.amp.grad_scaler.GradScaler, "unscale_", within("before_opt"))
    yield before(training, "evaluate_loader", lambda run, *_: point("eval", run.progress.iter_num))


def points_of_a_save():
    from train.base import checkpoint_file, console, run_folder, tensors
    saving = threading.local()  # path and step of the save that this thread is at
    save, replace, fsync = run_folder.save_checkpoint, os.replace, os.fsync
    save_shards, save_manifest = run_folder.RunFolder.write_shards, run_folder.replace_checkpoint
    write = tensors.HashingFile.write

    def at(name):
        if getattr(saving, "path", None):
            point(name, saving.step)

    def save_checkpoint(path, state, links=()):
        saving.path, saving.step, saving.midway = path, state.get("iter_num"), False
        try:
            return save(path, state, links)
        finally:
            saving.path = None

    def write_shards(self, folder, rank, parts):
        step = int(folder.split("/")[1].split("_")[0])
        saving.path, saving.step, saving.midway = self.file(folder), step, False
        try:
            return save_shards(self, folder, rank, parts)
        finally:
            saving.path = None

    def replace_checkpoint(path, write, links=()):
        point("manifest", saving.step)
        saving.path = path
        try:
            return save_manifest(path, write, links)
        finally:
            saving.path = None

    def bad_write(self, data):
        if not saving.midway and self.file.tell() > 0:
            saving.midway = True
            at("save_mid")
        return write(self, data)

    def bad_fsync(fd):
        at("save_before_fsync")
        return fsync(fd)

    def bad_replace(source, target):
        ours = str(target).startswith(getattr(saving, "path", None) or " ")
        if ours:
            at("save_before_replace")
        replace(source, target)
        if ours:
            at("save_after_replace")
    yield run_folder, "save_checkpoint", save_checkpoint
    yield run_folder, "replace_checkpoint", replace_checkpoint
    yield run_folder.RunFolder, "write_shards", write_shards
    yield before(checkpoint_file, "atomic_write", lambda path, *_: at("save_open"))
    yield tensors, "BLOCK_BYTES", 4096  # so that a small checkpoint has a middle
    yield tensors.HashingFile, "write", bad_write
    yield os, "fsync", bad_fsync
    yield os, "replace", bad_replace
    yield before(console, "open_no_follow", lambda path, mode: point("log_open"))
    yield before(checkpoint_file, "verify_digest", lambda path: point("load"))


@contextlib.contextmanager
def faults(spec=None):
    """Context manager in which run_train.py's code calls point() at all points. spec: the value of
    FAULT; None: as in the environment."""
    SENT.clear()
    with contextlib.ExitStack() as stack:
        if spec is not None:
            stack.enter_context(mock.patch.dict(os.environ, FAULT=spec))
        for owner, name, replacement in [*points_of_a_step(), *points_of_a_save()]:
            stack.enter_context(mock.patch.object(owner, name, replacement, create=True))
        yield


if __name__ == "__main__":
    sys.path[0] = str(REPO)
    import run_train
    with faults():
        sys.exit(run_train.main(sys.argv[1:]))
