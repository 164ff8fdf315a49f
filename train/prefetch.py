"""Prefetching: prepares the next batches while the device computes."""

import collections
import concurrent.futures
import functools
import time

SLOW_BATCH_SECONDS = 0.02  # a slower loader reads ahead in a thread
MAX_BATCHES_AHEAD = 64


class Prefetcher:
    """The batches of a loader on the device, prepared in advance.

    By default the next batch is prepared while the device computes (a GPU computes
    asynchronously). After the first slow batch (e.g. from a network disk) one thread reads ahead,
    as far as the loader reads in one call. It prepares batches in the order of the steps, so the
    batches are the same. Loaders that use the device (`computes`) would gain nothing from a thread.
    """

    def __init__(self, loader, device):
        self.loader = loader
        self.thread = None
        self.make = functools.partial(loader.get_batch, device)  # step -> batch or Future
        self.ahead = collections.deque()  # (step, batch or Future)
        self.seconds = 0.0  # time spent waiting for batches
        # Small batches have thousands per read; a limited number suffices to start the next read.
        self.n_ahead = 1 + min(MAX_BATCHES_AHEAD, getattr(loader, "calls_per_chunk", 1))

    def get(self, step):
        """Return the batch of `step`, a tuple of tensors (B, ...)."""
        started = time.perf_counter()
        if not self.ahead or self.ahead[0][0] != step:  # the first step, or after a rewind
            self.ahead.clear()
            self.ahead.append((step, self.make(step)))
        batch = self.ahead.popleft()[1]
        if isinstance(batch, concurrent.futures.Future):
            batch = batch.result()
        self.add_time(started)
        return batch

    def prefetch(self, step):
        """Prepare the batch of `step`, with a thread also the following batches."""
        started = time.perf_counter()
        for s in range(step + len(self.ahead), step + (self.n_ahead if self.thread else 1)):
            self.ahead.append((s, self.make(s)))
        self.add_time(started)

    def add_time(self, started):
        """Count the time since `started` as waiting, and start the thread if it was long."""
        if getattr(self.loader, "computes", False):
            return
        seconds = time.perf_counter() - started
        self.seconds += seconds
        if seconds > SLOW_BATCH_SECONDS and self.thread is None:
            self.thread = concurrent.futures.ThreadPoolExecutor(1, "batches")
            self.make = functools.partial(self.thread.submit, self.make)  # returns Futures

    def close(self):
        if self.thread:
            self.thread.shutdown(cancel_futures=True)
