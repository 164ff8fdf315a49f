"""How fast a run is, and what makes it so: the clock, FLOPs and peaks of devices, memory, threads,
and the compiler."""

import collections
import concurrent.futures
import contextlib
import ctypes
import functools
import math
import os
import pathlib
import re
import shlex
import sys
import time

import torch
import torch.nn as nn

from train.logger import duration

SLOW_INPUT = 0.3   # share of the time that is worth a warning
SLOW_BATCH = 0.02  # seconds; a loader that takes longer reads ahead in a thread
SLOW_STEP = 10.0   # seconds of a first step that are not waited for in silence
SLOW_SAMPLE = 2.0  # seconds of one sample that are not spent on four more

# -----------------------------------------------------------------------------
# the clock, and how long it will take

class Clock:
    """Seconds of training between two log lines; what evaluations and saves take is left out."""

    def __init__(self):
        self.total_away, self.end_announced = 0.0, False
        self.expected = 0.0  # seconds of a step, where that was estimated
        self.start(0)

    def start(self, it):
        """Training goes on at step `it`."""
        self.began = it
        self.at, self.it, self.seconds_away = time.perf_counter(), it, 0.0

    @contextlib.contextmanager
    def away(self):
        """Time within does not count as training."""
        left = time.perf_counter()
        try:
            yield
        finally:
            self.seconds_away += time.perf_counter() - left
            self.total_away += time.perf_counter() - left

    def unsteady(self, it):
        """Whether step `it` may take far longer than a step: it compiles, or waits for a save."""
        return it == self.began or self.seconds_away > 0

    def lap(self, it, loading, warn):
        """Seconds a step since the last lap, `it` being the last one done; `loading` of all of them
        were spent on batches."""
        passed = time.perf_counter() - self.at
        if loading > max(1.0, SLOW_INPUT * passed):  # of a second, anything is a large share
            warn(f"{loading / passed:.0%} of the time goes into reading batches: put data_dir on a "
                 "local disk, or use larger samples")
        seconds = (passed - self.seconds_away) / max(1, it + 1 - self.it)
        self.at, self.it, self.seconds_away = time.perf_counter(), it + 1, 0.0
        return seconds

    def announce(self, it, micro, n, say):
        """Until the first step is done, where that takes long: a line a micro-batch."""
        if it == self.began and self.expected > SLOW_STEP:
            left = duration(self.expected * (n - micro) / n)
            say(f"iter {it}: micro-batch {micro + 1} of {n}, the first line in about {left}")

    def announce_end(self, it, left, say):
        """Once: when the run will be over, `left` seconds from now."""
        if not self.end_announced and it > self.began:  # the first step may have compiled
            self.end_announced = True
            end = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + left))
            say(f"Expected to finish in {duration(left)}, at about {end}")


def time_sample(forward_backward, loader, device):
    """Seconds a sample that forward_backward(batch) takes, from a batch of a few; from one alone,
    which warms up as well, where that is slow."""
    batch = loader.get_batch(device, 0)
    for n in (1, min(4, len(batch[0]))):
        started = time.perf_counter()
        forward_backward([t[:n] for t in batch])
        seconds = (time.perf_counter() - started) / n
        if seconds > SLOW_SAMPLE:
            break
    return seconds


def how_long(step, config, done):
    """How long a run takes at `step` seconds a step, and what suits the machine if that is days."""
    steps = config.max_iters - done
    left = step * steps
    text = f"About {step:,.0f} s a step here: {duration(left)} for {steps:,} steps"
    if left > 86400:
        text += (".\nThis machine is slow for this configuration. A small model on the same data, "
                 "about a minute:\n  " + shlex.join([
                     "python", "run_train.py", "--config", "train/config_quick.yaml",
                     "--data_dir", config.data_dir, "--out_dir", "out/quick"]))
    return text


# -----------------------------------------------------------------------------
# batches ahead

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


# -----------------------------------------------------------------------------
# FLOPs and peaks

# Dense peak of the matrix units, TFLOP/s, by the data sheets: 16-bit floats, TF32, float32.
PEAK_TFLOPS = {
    "B300": (2500, 1250, 80), "B200": (2250, 1125, 80), "GB200": (2500, 1250, 80),
    "GH200": (989, 495, 67), "H200 NVL": (835, 418, 60), "H200": (989, 495, 67),
    "H100 PCIe": (756, 378, 51), "H100 NVL": (835, 418, 60), "H100": (989, 495, 67),
    "H800": (989, 495, 67), "A100": (312, 156, 19.5), "A800": (312, 156, 19.5),
    "A40": (150, 75, 37), "A30": (165, 82, 10.3), "A10G": (70, 35, 35), "A10": (125, 62.5, 31),
    "L40S": (362, 183, 91), "L40": (181, 90.5, 90), "L4": (121, 60, 30), "T4": (65, 8.1, 8.1),
    "V100": (125, 15.7, 15.7), "P100": (21, 10.6, 10.6), "RTX 5090": (209, 105, 105),
    "RTX 4090": (165, 82.6, 82.6), "RTX 4080": (97, 49, 49), "RTX 3090": (71, 35.6, 35.6),
    "RTX 6000 Ada": (364, 182, 91)}


def peak_flops(name, dtype, tf32):
    """Peak FLOP/s of the GPU called `name` in the precision that is used, None where unknown: no
    number beats a wrong one. Whole words count: an RTX A4000 is no A40."""
    words = re.split(r"[\s-]+", name)
    match = [k for k in PEAK_TFLOPS
             if any(words[i:i + len(k.split())] == k.split() for i in range(len(words)))]
    if not match:
        return None
    column = 0 if dtype != torch.float32 else 1 if tf32 else 2
    return PEAK_TFLOPS[max(match, key=len)][column] * 1e12


def mfu(flops_per_second, ranks, dtype):
    """Model FLOPs utilisation, 0 to 1 (PaLM, arXiv:2204.02311, appendix B); None where unknown."""
    if ranks.device.type != "cuda" or not flops_per_second:
        return None
    peak = peak_flops(torch.cuda.get_device_name(ranks.device), dtype,
                      torch.backends.cuda.matmul.allow_tf32)
    return flops_per_second / (peak * ranks.world_size) if peak else None


def flops_per_step(model, config, loader):
    """FLOPs of an optimizer step over all ranks, 0 where the model does not know."""
    per_unit = getattr(model, "flops_per_unit", lambda: 0)()
    return per_unit * config.samples_per_step * loader.units_per_sample


# -----------------------------------------------------------------------------
# memory and threads

def peak_memory(device):
    """The most memory the run has held, MiB: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 2**20)
    try:
        import resource  # POSIX
    except ImportError:
        return None
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20)


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


def keep_freed_memory():
    """Have malloc keep what a step on the CPU frees for the next one. glibc returns large blocks,
    and a large free end of its heap, to the system, which hands them out again page by page:
    160,000 page faults a step of the production model, 5 to 15% of its time (train/LOG.md). Nothing
    happens with another C library (the constants are those of its malloc.h), or where the
    environment says how malloc should work."""
    M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
    if not any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        with contextlib.suppress(OSError, AttributeError, TypeError):
            libc = ctypes.CDLL(None)
            libc.mallopt(M_MMAP_MAX, 0)
            libc.mallopt(M_TRIM_THRESHOLD, -1)


def return_freed_memory():
    """Give all that is free back to the system once: the copy that a save was written from."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def set_num_threads(config):
    """CPU threads: the config, else OMP_NUM_THREADS, else one for each physical core."""
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(physical_cores())


def physical_cores():
    """Cores this process may use, hyper-threads counted once (Linux; elsewhere the CPU count)."""
    with contextlib.suppress(OSError, AttributeError):
        siblings = set()
        for cpu in os.sched_getaffinity(0):
            with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as f:
                siblings.add(f.read())
        return len(siblings)
    return os.cpu_count() or 1


# -----------------------------------------------------------------------------
# compiling

ON_OFF = {True: "on (the first step takes a while)", False: "off"}


def should_compile(config, flops_per_step, ranks):
    """Whether to compile. auto: where that (about a minute) is repaid, by a run of at least ten
    times its length at a modest speed of the device."""
    if config.compile != "auto":
        return config.compile == "true"
    if config.max_minutes:
        return 60 * config.max_minutes > 600
    speed = {"cpu": 2e11, "cuda": 1e14 * ranks.world_size}.get(ranks.device.type, math.inf)
    return flops_per_step * config.max_iters / speed > 600


def blocks(model):
    """The blocks of a model: what its ModuleLists hold."""
    return [block for m in model.modules() if isinstance(m, nn.ModuleList) for block in m]


def compile_model(model, device):
    """torch.compile, in place: no wrapper, and state_dict keeps its names.

    Block by block on a CPU, where they share the code of the first, which is ready many times
    sooner than the whole; and where FSDP has sharded the weights: its hooks around the blocks would
    end the graph before each, and leave them uncompiled.
    """
    import torch._functorch.config as aot
    # In the forward pass, where a compiler that fails can be left out; by itself it comes later.
    aot.force_non_lazy_backward_lowering = True
    if device.type == "cpu":  # dropout's draws by PyTorch's generator: the compiler's own is slower
        torch._inductor.config.fallback_random = True
    parts, sharded = [model], any(hasattr(p, "full_tensor") for p in model.parameters())
    if device.type == "cpu" or sharded:
        parts = blocks(model) or parts
        if device.type != "cpu" and isinstance(getattr(model, "loss", None), nn.Module):
            parts.append(model.loss)  # the chunks of a CPU gain nothing from it
    for part in parts:
        # Static: on several ranks validation has larger batches, which would make sizes symbolic.
        part.compile(dynamic=False)


class Compiler:
    """The compiled code of a model, while it works: where it fails, the run goes on without, after
    one warning. batch_size: samples in a batch of an evaluation, of which the last may have fewer:
    it computes without compiled code, as compiling for it would take longer."""

    def __init__(self, model, enabled, device, warn, batch_size=0):
        self.model, self.enabled, self.device, self.warn = model, enabled, device, warn
        self.batch_size = batch_size
        if enabled:
            compile_model(model, device)

    def call(self, module, *batch):
        """module(*batch), module being the model or what wraps it."""
        partial = not module.training and len(batch[0]) < self.batch_size
        try:
            with self.eager() if self.enabled and partial else contextlib.nullcontext():
                return module(*batch)
        except Exception as error:
            if not self.enabled or not is_compile_error(error):
                raise
            reason = str(error).strip().split("\n")[0][:200]
            self.warn(f"torch.compile failed; going on without it (--no-compile): {reason}")
            self.enabled = False
            for part in self.model.modules():
                part._compiled_call_impl = None
            return module(*batch)

    def paused(self, when=True):
        """Within, on a CPU: compute without compiled code, where compiling would cost more than it
        saves."""
        return self.eager() if self.enabled and self.device.type == "cpu" and when else (
            contextlib.nullcontext())

    def eager(self):
        return torch.compiler.set_stance("force_eager")


def is_compile_error(error):
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
