"""Estimate the memory and time of a run: python run_train.py --config FILE.yaml --dry_run

Prints the start-up block, the memory per rank by purpose, the time per step and the duration of
runs of several lengths. Writes nothing. Memory and time are measured, so that this works for every
model type.
"""

import time
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from train import device as device_module
from train import distributed, logger
from train.base.console import compact, duration
from train.base.errors import CollectiveExit
from train.base.memory import memory_available
from train.checkpoint import inherited_shape
from train.device import ON_OFF, compile_model, should_compile
from train.optimizer import build_optimizer
from train.setup import open_data
from train.system import flops_per_step, load_model_type
from train.train import clip_gradients

MAX_TIMING_SECONDS = 15.0  # on a CPU, slower steps are estimated from a single sample
SECONDS_PER_DAY = 86400
# Resident memory per byte of activations on a CPU: malloc keeps freed blocks, see
# keep_freed_memory(), with unused space between them. 1.5 to 2.1 were measured.
MALLOC_FACTOR = 1.75
TOO_LARGE = ("Does not fit: lower batch_size (and raise gradient_accumulation_steps by the same "
             "factor), set gradient_checkpointing: true, or lower block_size, n_layer or n_embd.")


def estimate(config):
    """Print the estimate for the run that `config` describes. Raises CollectiveExit."""
    with distributed.process_group(config) as ranks:
        log = (lambda text: print(text, flush=True)) if ranks.is_main else (lambda text: None)
        shape = distributed.broadcast_from_rank0(lambda: inherited_shape(config)[0], ranks)
        config = config.replace(**shape)
        data = open_data(config, ranks)
        config = config.in_steps(data.train.samples)
        build_model = load_model_type(config.model).build_model
        with torch.device("meta"):  # allocates nothing: the model may not fit
            empty_model = build_model(config, data)
        dtype, reason = device_module.choose_dtype(config.dtype, ranks.device)
        flops = flops_per_step(empty_model, config, data.train)
        compiled = should_compile(config, flops, ranks)
        precision = f"{reason}; compile {ON_OFF[compiled]}"
        device = device_module.describe_device(ranks.device)
        logger.log_plan(log, config, ranks, data, empty_model, device, precision, flops)
        memory = state_memory(config, empty_model, ranks.world_size)
        available = device_memory(ranks.device)
        check_memory(memory, available, ranks)
        model = build_model(config, data).to(ranks.device)
        if ranks.device.type == "cpu":
            memory |= activation_memory(model, data.train, dtype)
            check_memory(memory, available, ranks)
        listed = ", ".join(f"{name} {size / 2**20:,.0f}" for name, size in memory.items())
        log(f"Memory, MiB: {listed}; total {sum(memory.values()) / 2**20:,.0f} of "
            f"{available / 2**20:,.0f}")
        try:
            seconds, is_estimate = time_step(config, model, data, ranks, dtype, compiled)
        except torch.OutOfMemoryError:
            raise CollectiveExit(TOO_LARGE) from None
        if ranks.device.type == "cuda":
            log(f"Peak memory of a step: {logger.peak_memory(ranks.device):,} MiB")
        log_durations(config, data.train, ranks.device, seconds, is_estimate, log)


def log_durations(config, loader, device, seconds, is_estimate, log):
    """Log the speed, and the durations of this run and of runs of other lengths."""
    units = config.samples_per_step * loader.units_per_sample
    log(f"Fits. {seconds * 1000:,.0f} ms per step, {units / seconds:,.0f} {loader.unit}/s"
        + (" (estimated from one sample)" if is_estimate else ""))
    for steps in sorted({config.max_iters, 5_000, 50_000, 500_000}):
        log(f"  {steps:>9,} steps: {compact(steps * units):>6} {loader.unit}, "
            f"{duration(steps * seconds)}")
    if seconds * config.max_iters > SECONDS_PER_DAY and device.type == "cpu":
        log(logger.describe_duration(seconds, config, 0))


# -----------------------------------------------------------------------------
# memory

def device_memory(device):
    """Return the available bytes of a GPU, or of the machine."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory_available()


def check_memory(memory, available, ranks):
    """Raise CollectiveExit if {purpose: bytes} is more than a rank has available."""
    if distributed.max_over_ranks(int(sum(memory.values()) > available), ranks):
        raise CollectiveExit(TOO_LARGE)


def state_memory(config, model, world_size):
    """Return {purpose: bytes per rank} of what exists between two steps, and of gradients."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    shards = world_size if config.distributed == "fsdp" else 1
    grad_copies = 2 if world_size > shards else 1  # the second one is in DDP's buckets
    return {"weights": sum(p.nbytes for p in model.parameters()) / shards,
            "gradients": 4 * trained * grad_copies / shards,
            "optimizer": (12 if config.ema else 8) * trained / shards}  # two moments, EMA weights


def activation_memory(model, loader, dtype):
    """Return {purpose: bytes} of what exists during a micro-batch on a CPU: tensors of the step
    besides weights and gradients, extrapolated from a part of it; tensors of the loader."""
    device = torch.device("cpu")
    with PeakMemory(model) as loading:
        batch = loader.get_batch(device, 0)

    def measure_peak(n):
        with PeakMemory(model) as memory:
            for _ in range(2):  # the second time with gradients, as all but the first micro-batch
                forward_backward(model, [t[:n] for t in batch], device, dtype)
        gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        model.zero_grad(set_to_none=True)
        return memory.peak - gradients
    # Larger and larger batches, since small ones may be dominated by what does not depend on n.
    end = time.perf_counter() + MAX_TIMING_SECONDS / 3
    n, peak, per_sample = 1, measure_peak(1), 0.0
    while 2 * n <= len(batch[0]) and time.perf_counter() < end and 8 * peak < memory_available():
        larger = measure_peak(2 * n)
        per_sample = (larger - peak) / n
        n, peak = 2 * n, larger
    peak += (len(batch[0]) - n) * per_sample
    return dict(activations=MALLOC_FACTOR * peak, batches=MALLOC_FACTOR * loading.peak)


class PeakMemory(TorchDispatchMode):
    """Context that counts the bytes of new tensors: `live`, and the largest number, `peak`."""

    def __init__(self, model):
        super().__init__()
        self.live = 0
        self.peak = 0
        self.known = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return result

    def add(self, storage):
        if storage._cdata not in self.known:
            self.known.add(storage._cdata)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.remove, storage._cdata, storage.nbytes())

    def remove(self, address, size):
        self.known.discard(address)
        self.live -= size


# -----------------------------------------------------------------------------
# time

def time_step(config, model, data, ranks, dtype, compiled):
    """Return (seconds per optimizer step, whether this is extrapolated from a single sample).

    On a GPU the timed step is the real one: compiled, and with the optimizer. On a CPU nothing is
    compiled, which would take longer than the estimate is worth."""
    device = ranks.device
    batch = data.train.get_batch(device, 0)
    n_micro = config.accumulation(ranks.world_size)
    optimizer = build_optimizer(model, config, log=lambda text: None)
    if compiled and device.type == "cuda":
        compile_model(model, device)

    def time_batch(tensors):
        return timed(lambda: forward_backward(model, tensors, device, dtype), device)

    def time_update():
        return timed(lambda: update(optimizer, config.grad_clip), device)
    sample = [tensor[:1] for tensor in batch]
    time_batch(sample)  # warm-up
    guess = time_batch(sample) * config.samples_per_step / ranks.world_size
    if device.type == "cpu" and guess / n_micro * 3 > MAX_TIMING_SECONDS:
        return guess, True
    times = [time_batch(batch) for _ in range(4)][1:]
    time_update()  # the first one creates the optimizer state
    time_batch(sample)
    return sorted(times)[1] * n_micro + time_update(), False


def timed(f, device):
    """Call f() and return the seconds until the device has finished."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda device: None
    wait(device)
    start = time.perf_counter()
    f()
    wait(device)
    return time.perf_counter() - start


def forward_backward(model, batch, device, dtype):
    """Compute a micro-batch as train_step does."""
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        loss, _ = model(*batch)
    loss.backward()


def update(optimizer, max_norm):
    """Clip the gradients and update the weights as train_step does."""
    clip_gradients(optimizer, max_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
