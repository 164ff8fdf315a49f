"""Saves beside the training: from a snapshot, in a thread, with the guarantees of a save."""

import contextlib
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
        if failed is None or memory_available() < 2 * tensor_bytes(state):
            return self._write(path, state, links, after, failed)
        state, ready = snapshot(state), None
        if torch.cuda.is_initialized():  # the copies are under way on the stream of the training
            ready = torch.cuda.Event()
            ready.record()
        self.thread = threading.Thread(target=self._write,
                                       args=(path, state, links, after, failed, ready))
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
    """Bytes of memory free for use (Linux; elsewhere assumed plenty)."""
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable"))
    return 2**62
