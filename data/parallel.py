"""Work in order, on one process or many, with its progress shown."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool


def die_with_parent():
    """In a worker: a killed parent leaves no orphans."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


@contextlib.contextmanager
def ctrl_c_held():
    """Processes started in here never see Ctrl-C: it is the parent's to handle."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def in_order(function, tasks, num_proc):
    """Results of function(task) in the order of tasks; only a few tasks are under way at a time."""
    if num_proc == 1:
        yield from map(function, tasks)
        return
    pool = ProcessPoolExecutor(num_proc, multiprocessing.get_context("spawn"), die_with_parent)
    try:
        waiting = deque()
        for task in tasks:
            with ctrl_c_held():
                waiting.append(pool.submit(function, task))
            if len(waiting) > 4 * num_proc:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise ValueError("a worker process ended early (out of memory?); try --num_proc 1") \
            from None
    finally:
        pool.shutdown(cancel_futures=True)


def batches(items, least):
    """Lists of items whose `size` adds up to `least` or more: small ones share a task."""
    batch, total = [], 0
    for item in items:
        batch.append(item)
        total += item.size
        if total >= least:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


class Progress:
    """How far a pass is, on stderr: one updating line on a terminal, else a line in ten seconds."""

    def __init__(self, what, total):
        self.what, self.total, self.done, self.start = what, max(total, 1), 0, time.monotonic()
        self.tty = sys.stderr.isatty()
        self.every = 0.2 if self.tty else 10
        self.shown = self.start

    def add(self, size):
        self.done += size
        now = time.monotonic()
        if now - self.shown >= self.every:
            self.shown = now
            rate = self.done / (now - self.start)
            text = (f"{self.what}: {100 * self.done / self.total:3.0f}% of {self.total / 1e6:,.0f} "
                    f"MB, {rate / 1e6:.1f} MB/s, {(self.total - self.done) / rate:.0f} s to go")
            print(f"\r{text}\x1b[K" if self.tty else text, end="" if self.tty else "\n",
                  file=sys.stderr, flush=True)

    def finish(self):
        if self.tty and self.shown > self.start:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
