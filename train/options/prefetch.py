"""Batches made ahead of their use: get_batch() in the time in which the device computes."""

import collections
import concurrent.futures
import functools
import time

SLOW_BATCH = 0.02  # seconds; a loader that takes longer reads ahead in a thread


class Prefetcher:
    """The batches of a loader on their device, made before they are asked for.

    A quick loader makes the next batch while the device computes, which a GPU does by itself. One
    that was once slow (a network disk, a decoder of its own) reads ahead in a thread, into what it
    reads at once next. The thread makes one batch after the other, in the order of the steps, so
    the batches are the same. A loader that computes shares the device and its threads with the
    model: nothing is gained there.
    """

    def __init__(self, loader, device):
        self.loader, self.thread = loader, None
        self.make = functools.partial(loader.get_batch, device)  # a step's batch, or its Future
        self.ahead, self.seconds = collections.deque(), 0.0  # (step, batch or its Future); waited
        # Far enough to be in the next chunk early; of small batches a chunk has thousands.
        self.n_ahead = 1 + min(64, getattr(loader, "calls_per_chunk", 1))

    def get(self, step):
        started = time.perf_counter()
        if not self.ahead or self.ahead[0][0] != step:  # the first one, or after a rewind
            self.ahead.clear()
            self.ahead.append((step, self.make(step)))
        batch = self.ahead.popleft()[1]
        if isinstance(batch, concurrent.futures.Future):
            batch = batch.result()
        self.count(started)
        return batch

    def prefetch(self, step):
        """Have the batches from `step` on ready, as far as it pays."""
        started = time.perf_counter()
        for s in range(step + len(self.ahead), step + (self.n_ahead if self.thread else 1)):
            self.ahead.append((s, self.make(s)))
        self.count(started)

    def count(self, started):
        """Add the time since `started` to what batches took."""
        if getattr(self.loader, "computes", False):
            return
        took = time.perf_counter() - started
        self.seconds += took
        if took > SLOW_BATCH and self.thread is None:
            self.thread = concurrent.futures.ThreadPoolExecutor(1, "batches")
            self.make = functools.partial(self.thread.submit, self.make)  # Futures from here on

    def close(self):
        if self.thread:
            self.thread.shutdown(cancel_futures=True)
