"""A thread for long work beside training, which needs the same cores."""

import os
import sys
import threading
import time

MAX_SHARE = 0.03  # of the CPU time of all cores, for the threads of all ranks of this machine


class BackgroundThread(threading.Thread):
    """A thread that calls f(*args) after start(), at low priority: on Linux its nice value is 10
    more. If `rests`, work that calls give_way() at intervals takes at most MAX_SHARE of the CPU
    time, so that it slows down several steps a little instead of one step much. wait() ends these
    pauses, and waits for the end of f."""

    def __init__(self, f, *args, rests=True):
        super().__init__(target=f, args=args)
        self.is_awaited = threading.Event()
        if not rests:
            self.is_awaited.set()
        n_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
        self.pause = n_ranks / (MAX_SHARE * (os.cpu_count() or 1))  # seconds per second of CPU time
        self.cpu_time = 0.0  # of this thread in seconds, at the last rest()

    def run(self):
        if sys.platform == "linux":  # elsewhere nice() changes the whole process
            os.nice(10)
        super().run()

    def rest(self):
        """Sleep in proportion to the CPU time since the last call, at most until wait() is called.
        To be called in this thread."""
        now = time.thread_time()
        self.is_awaited.wait(self.pause * (now - self.cpu_time))
        self.cpu_time = now

    def wait(self):
        self.is_awaited.set()
        self.join()


def give_way():
    """Call rest() of the current thread if it is a BackgroundThread; no effect in other threads."""
    thread = threading.current_thread()
    if isinstance(thread, BackgroundThread):
        thread.rest()
