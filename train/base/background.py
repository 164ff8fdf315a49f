"""A thread for long work beside training, which needs the same cores."""

import os
import sys
import threading
import time

MAX_SHARE = 0.03  # of the CPU time of the machine, for all BackgroundThreads together
MAX_SECONDS = 30  # duration of the pauses


class BackgroundThread(threading.Thread):
    """A thread that calls f(*args) at low priority: on Linux, its nice value is increased by 10.
    f should call give_way() at intervals. The thread then pauses, so that all BackgroundThreads of
    a machine use at most MAX_SHARE of the CPU time: several training steps are slightly slower,
    instead of one step much slower. n_threads: number of BackgroundThreads on this machine; `None`:
    no pauses. The pauses end after MAX_SECONDS. wait() ends them earlier, and returns when f has
    returned."""

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
        """Sleep in proportion to the CPU time of this thread since the last call. Return earlier if
        wait() is called. Call it in this thread only."""
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
