"""A low-priority thread for long work while training needs the same cores."""

import os
import sys
import threading
import time

MAX_SHARE = 0.03  # of the CPU time of the machine, for all BackgroundThreads together
MAX_SECONDS = 30  # duration of the pauses


class BackgroundThread(threading.Thread):
    """A thread that calls f(*args) at low priority (on Linux, with nice increased by 10).

    n_threads: number of BackgroundThreads on this machine, which together use at most MAX_SHARE of
    its CPU time if `f` calls give_way(), which pauses, at intervals; `None`: no pauses.
    Pauses end MAX_SECONDS after creation, or earlier with wait(), which returns when `f` has ended.
    """

    def __init__(self, f, *args, n_threads=None):
        super().__init__(target=f, args=args)
        self.is_awaited = threading.Event()
        n_cores = os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):  # Linux: the cores that this process may use
            n_cores = len(os.sched_getaffinity(0))
        self.pause = (n_threads or 0) / (MAX_SHARE * n_cores)  # seconds per second of CPU time
        self.cpu_time = 0.0  # of this thread in seconds, at the last rest()
        self.end = time.monotonic() + MAX_SECONDS

    def run(self):
        if sys.platform == "linux":  # elsewhere nice() changes the whole process
            os.nice(10)
        super().run()

    def rest(self):
        """Sleep in proportion to the CPU time since the last call; only this thread may call it."""
        now = time.thread_time()
        seconds = min(self.pause * (now - self.cpu_time), self.end - time.monotonic())
        self.is_awaited.wait(max(0.0, seconds))
        self.cpu_time = now

    def wait(self):
        self.is_awaited.set()
        self.join()


def give_way():
    """Call rest() of the current thread if it is a BackgroundThread, else do nothing."""
    thread = threading.current_thread()
    if isinstance(thread, BackgroundThread):
        thread.rest()
