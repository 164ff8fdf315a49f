"""Estimate the memory and time of a run: python run_train.py --config FILE.yaml --dry_run

Prints the start-up block, the memory per rank by purpose, the time per step and the duration of
runs of several lengths. Writes nothing.
"""

import time

import torch

from train import device as device_module
from train import distributed, logger
from train.base.console import compact, duration
from train.base.errors import CollectiveExit
from train.base.memory import memory_available
from train.checkpoint import inherited_shape
from train.device import ON_OFF, compile_model, should_compile
from train.optimizer import build_optimizer, clip_gradients
from train.setup import open_data
from train.system import flops_per_step, load_model_type

MAX_TIMING_SECONDS = 15.0  # on a CPU, slower steps are estimated from a single sample
SECONDS_PER_DAY = 86400


def estimate(config):
    """Print the estimate for the run that `config` describes. Raises CollectiveExit."""
    with distributed.process_group(config) as ranks:
        log = (lambda text: print(text, flush=True)) if ranks.is_main else (lambda text: None)
        shape = distributed.broadcast_from_rank0(lambda: inherited_shape(config)[0], ranks)
        config = config.replace(**shape)
        data = open_data(config, ranks)
        config.check_epochs(data.train.samples)
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
        check_memory(config, empty_model, data, ranks, dtype, compiled, log)
        model = build_model(config, data).to(ranks.device)
        seconds, is_estimate = time_step(config, model, data, ranks, dtype, compiled)
        log_durations(config, data.train, ranks.device, seconds, is_estimate, log)


def log_durations(config, loader, device, seconds, is_estimate, log):
    """Log the speed, and the durations of this run and of runs of other lengths."""
    units = config.samples_per_step * loader.units_per_sample
    log(f"Fits. {seconds * 1000:,.0f} ms per step, {units / seconds:,.0f} {loader.unit}/s"
        + (" (estimated from one sample)" if is_estimate else ""))
    if config.max_minutes:
        config = config.replace(max_iters=int(60 * config.max_minutes / seconds))
    for steps in sorted({config.max_iters, 5_000, 50_000, 500_000}):
        log(f"  {steps:>9,} steps: {compact(steps * units):>6} {loader.unit}, "
            f"{duration(steps * seconds)}")
    if seconds * config.max_iters > SECONDS_PER_DAY and device.type == "cpu":
        log(logger.describe_duration(seconds, config, 0))


# -----------------------------------------------------------------------------
# memory

def check_memory(config, model, data, ranks, dtype, compiled, log):
    """Log the memory that a rank needs, by purpose; raise CollectiveExit if it is not available."""
    compiled = compiled and ranks.device.type == "cuda"  # on a CPU, compiling saves no memory
    purposes = estimate_memory(config, model, data, ranks.world_size, dtype, compiled)
    needed = sum(purposes.values())
    if ranks.device.type == "cuda":
        available = torch.cuda.mem_get_info(ranks.device)[0]
    else:
        available = memory_available()
    listed = ", ".join(f"{name} {size / 2**20:,.0f}" for name, size in purposes.items() if size)
    log(f"Memory, MiB: {listed}; total {needed / 2**20:,.0f} of {available / 2**20:,.0f}")
    if distributed.max_over_ranks(int(needed > available), ranks):
        raise CollectiveExit(
            "Does not fit: lower batch_size (and raise gradient_accumulation_steps by the same "
            "factor), set gradient_checkpointing: true, or lower block_size, n_layer or n_embd.")


def estimate_memory(config, model, data, world_size, dtype, compiled):
    """Return {purpose: bytes per rank}."""
    params = list(model.parameters())
    trained = sum(p.numel() for p in params if p.requires_grad)
    in_float32 = sum(p.numel() for p in params if p.dtype == torch.float32)
    shards = world_size if config.distributed == "fsdp" else 1
    grad_copies = 2 if world_size > shards else 1  # the second one is in DDP's buckets
    width = 4 if dtype == torch.float32 else 2  # bytes per activation
    rows = config.micro_batch(world_size) * data.train.units_per_sample
    logits = rows * data.spec.get("vocab_size", 0) * width
    if compiled:
        logits *= 2  # the logits and their gradient
    elif hasattr(model, "head_weight") and not model.head_weight().requires_grad:
        logits = 0  # computed in chunks: all logits are needed only for a gradient of the head
    activations = config.n_layer * activations_per_token(config, width, compiled)
    return {"weights": sum(p.nbytes for p in params) / shards,
            "weights in 16 bits": 2 * in_float32 / shards if width == 2 else 0,
            "gradients": 4 * trained * grad_copies / shards,
            "optimizer": (12 if config.ema else 8) * trained / shards,  # two moments, EMA weights
            "activations": rows * width * activations,
            "logits": logits}


def activations_per_token(config, width, compiled):
    """Return how many values per token a GPT block saves for the backward pass.

    width: bytes per value."""
    C, hidden = config.n_embd, config.n_hidden or 4 * config.n_embd
    if config.gradient_checkpointing == "true":
        return C
    kv = C * (config.n_kv_head or config.n_head) // config.n_head
    norms = 4 * C  # inputs and outputs of two norms
    attention = 2 * C + 2 * kv  # q, k, v and the output
    if config.pos == "rope" or config.qk_norm:
        attention += C + kv  # q and k before and after
    mlp = (3 if config.mlp == "swiglu" else 2) * hidden
    if not compiled:  # norms save the input in float32, SwiGLU saves the output of SiLU
        norms += (1 if config.norm == "layer" else 3) * C * (4 // width)
        mlp += hidden if config.mlp == "swiglu" else 0
    return norms + attention + mlp


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
