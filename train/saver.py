"""Saves beside the training: from a snapshot, in a thread, with the guarantees of a save."""

import contextlib
import pathlib
import threading

import torch

from train.checkpoint import save_checkpoint, tensor_bytes


class Saver:
    """Saves in a background thread, at most one at a time, from a snapshot taken by the caller."""

    def __init__(self):
        self.thread = None

    def save(self, path, state, links=(), after=lambda: None, failed=None):
        """save_checkpoint(path, state, links), then after(). A save still under way is waited for,
        so a slow disk cannot pile up work. `failed` is called with what went wrong, from the
        thread; without it the save is done before this returns, and raises."""
        self.wait()
        copy, ready = None if failed is None else snapshot_if_room(state), None
        if copy is None:
            return self._write(path, state, links, after, failed)
        if torch.cuda.is_initialized():  # the copies are under way on the stream of the training
            ready = torch.cuda.Event()
            ready.record()
        self.thread = threading.Thread(target=self._write,
                                       args=(path, copy, links, after, failed, ready))
        self.thread.start()

    def _write(self, path, state, links, after, failed, ready=None):
        try:
            if ready is not None:
                ready.synchronize()
            save_checkpoint(path, state, links)
            after()
        except Exception as error:
            if failed is None:
                raise
            failed(error)

    def wait(self):
        if self.thread is not None:
            self.thread.join()
            self.thread = None


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
    From a GPU into pinned memory, at the speed of the bus: synchronize before reading it."""
    if isinstance(state, torch.Tensor):
        copy = torch.empty(state.shape, dtype=state.dtype, pin_memory=state.is_cuda)
        return copy.copy_(state.detach(), non_blocking=state.is_cuda)
    if isinstance(state, dict):
        return {k: snapshot(v) for k, v in state.items()}
    return [snapshot(v) for v in state] if isinstance(state, list) else state


def memory_available():
    """Bytes of memory free for use, on the machine and in the container (Linux; else: plenty)."""
    free = 2**62
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as f:
        free = next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable"))
    with contextlib.suppress(OSError, ValueError, StopIteration):
        limit, used, stat = (pathlib.Path("/sys/fs/cgroup", f"memory.{name}").read_text()
                             for name in ("max", "current", "stat"))
        cache = next(int(line.split()[1]) for line in stat.splitlines()
                     if line.startswith("inactive_file "))
        free = min(free, int(limit) - int(used) + cache)
    return free
