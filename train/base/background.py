"""A thread for long work beside training, which needs the same cores."""

import os
import sys
import threading
import time

MAX_SHARE = 0.03  # of the CPU time of all cores, for the threads of all ranks of this machine
MAX_SECONDS = 30  # with pauses: if the work is then not finished, it continues without


class BackgroundThread(threading.Thread):
    """A thread that calls f(*args) after start(), at low priority: on Linux its nice value is 10
    more. n_threads: how many such threads run on this machine, one per rank that has one; `None`:
    no pauses, for training that does not need the cores. Work that calls give_way() at intervals
    pauses, so that together these threads take at most MAX_SHARE of the CPU time, and several steps
    are a little slower instead of one step much, for MAX_SECONDS. wait() ends the pauses, and waits
    for the end of f."""

    def __init__(self, f, *args, n_threads=None):
        super().__init__(target=f, args=args)
        self.is_awaited = threading.Event()
        n_cores = os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):  # Linux: those of this process
            n_cores = len(os.sched_getaffinity(0))
        self.pause = (n_threads or 0) / (MAX_SHARE * n_cores)  # seconds per second of CPU time
        self.cpu_time = 0.0  # of this thread in seconds, at the last rest()
        self.end = time.monotonic() + MAX_SECONDS

    def run(self):
        if sys.platform == "linux":  # elsewhere nice() changes the whole process
            os.nice(10)
        super().run()

    def rest(self):
        """Sleep in proportion to the CPU time since the last call, at most until wait() is called.
        To be called in this thread."""
        now = time.thread_time()
        seconds = min(self.pause * (now - self.cpu_time), self.end - time.monotonic())
        self.is_awaited.wait(max(0.0, seconds))
        self.cpu_time = now

    def wait(self):
        self.is_awaited.set()
        self.join()


def give_way():
    """Call rest() of the current thread if it is a BackgroundThread; no effect in other threads."""
    thread = threading.current_thread()
    if isinstance(thread, BackgroundThread):
        thread.rest()
