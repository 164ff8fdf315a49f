"""Estimate the memory and time of a run (run_train.py --config FILE.yaml --dry_run).

Prints the start-up block, the memory per rank by purpose, the time per step and the duration of
runs of several lengths. Writes nothing. Memory and time are measured, so that this works for every
model type. The total is the memory_mib that a run logs: on a GPU the memory allocated by torch, on
a CPU the resident memory, including the program, the space that malloc keeps unused, the data and
other models that are read (a teacher, a backbone, a checkpoint to start from). Not included: the
copy of weights and optimizer state during a save, which is made if there is room.
With world_size, the run is planned on that many GPUs instead (train/tools/plan.py).
"""

import numpy as np
import torch

from model.core import weights
from train import distributed
from train.base.console import compact, duration
from train.base.errors import CollectiveExit, echo
from train.base.memory import memory_available, memory_resident, return_freed_memory
from train.config import check_epochs, input_files
from train.device import ON_OFF, choose_dtype, compile_model, describe_device, should_compile, timed
from train.logger import log_plan, peak_memory
from train.optimizer import build_optimizer
from train.options.ranks import check_ranks, log_network
from train.setup import open_data
from train.system import flops_per_step, load_model_type
from train.tools.plan import log_table, state_memory
from train.train import clip_gradients

MAX_SECONDS = 15.0  # on a CPU, slower micro-batches are extrapolated
MIB = 2**20
TOO_LARGE = ("Does not fit: lower batch_size (and raise gradient_accumulation_steps by the same "
             "factor), set gradient_checkpointing: true, or lower block_size, n_layer or n_embd.")


def estimate(config):
    """Print the memory and time of a run, estimated from parts of a training step.

    With config.world_size, print a plan for that many GPUs instead, without running a step. Raises
    CollectiveExit if the run does not fit into memory (not for a plan). All ranks must call.
    """
    with distributed.process_group(config) as ranks:
        log = echo if ranks.is_main else (lambda text: None)
        on_gpu = ranks.device.type == "cuda"
        # Before the data and other models are read.
        program = 0 if on_gpu else memory_resident() or (peak_memory(ranks.device) or 0) * MIB
        free = torch.cuda.mem_get_info(ranks.device)[0] if on_gpu else memory_available()
        available = program + free
        check_ranks(config, ranks, log)
        shape = distributed.broadcast_from_rank0(lambda: inherited_shape(config), ranks)
        config = config.inherit(shape)
        data = open_data(config, ranks)
        check_epochs(config, data.train.samples)
        config = config.in_steps(data.train.samples)
        with torch.device("meta"):  # allocates only frozen weights: the model may not fit
            empty_model = load_model_type(config.model).build_model(config, data)
        dtype, reason = choose_dtype(config.dtype, ranks.device)
        flops = flops_per_step(empty_model, config, data.train)
        build_optimizer(empty_model, config, log=lambda text: None)  # lr_groups may freeze
        if config.world_size:
            return log_table(log, config, data, empty_model, flops)
        compiled = should_compile(config, flops, ranks)
        log_plan(log, config, ranks, data, empty_model, describe_device(ranks.device),
                 f"{reason}; compile {ON_OFF[compiled]}", flops)
        log_network(config, empty_model, ranks, log)
        memory = dict(program=program) | state_memory(config, empty_model, ranks.world_size)
        del empty_model  # with its frozen weights, of which a run has one copy
        check_memory(memory, available, ranks)
        try:
            seconds, rest = measure_step(config, data, ranks, dtype, compiled and on_gpu, available)
        except torch.OutOfMemoryError:
            raise CollectiveExit(TOO_LARGE) from None
        memory["activations and data"] = max(0, rest - program)
        total = sum(memory.values()) / MIB
        listed = ", ".join(f"{name} {size / MIB:,.0f}" for name, size in memory.items())
        log(f"Memory, MiB: {listed}; total {total:,.0f} of {available / MIB:,.0f}")
        check_memory(memory, available, ranks)
        unit = data.train.unit
        n = config.samples_per_step * data.train.units_per_sample
        log(f"Fits. {seconds * 1000:,.0f} ms per step, {n / seconds:,.0f} {unit}/s")
        for steps in sorted({config.max_iters, 5_000, 50_000, 500_000}):
            log(f"  {steps:>9,} steps: {compact(steps * n):>6} {unit}, {duration(steps * seconds)}")


def inherited_shape(config):
    """Return the architecture {key: value} that a new run takes from the initial weights.

    Keys of the configuration, e.g. n_layer; {} without such weights. Raises CheckpointError.
    """
    for name, path in input_files(config, (True,)).items():
        return weights.take_shape(config, weights.read_named(path, name), path)
    return {}


def check_memory(memory, available, ranks):
    """Raise CollectiveExit if sum(memory.values()) > available, in bytes, on any rank; all call."""
    if distributed.max_over_ranks(int(sum(memory.values()) > available), ranks):
        raise CollectiveExit(TOO_LARGE)


def measure_step(config, data, ranks, dtype, compiled, available):
    """Run parts of a training step with a new model; return (seconds per step, peak bytes).

    dtype: of autocast. compiled: whether to compile the model. available: bytes that may be used.
    The seconds include all micro-batches. The peak is without weights, gradients and optimizer
    state; on a CPU it includes the program.
    A GPU measures an entire micro-batch. A CPU measures one sample, then a part of a micro-batch,
    as large as time and memory allow; the rest is extrapolated.
    """
    device = ranks.device
    on_gpu = device.type == "cuda"
    model = load_model_type(config.model).build_model(config, data).to(device)
    optimizer = build_optimizer(model, config, log=lambda text: None)
    if compiled:
        compile_model(model, device)
    # All micro-batches of a step: a loader may have buffers for each, e.g. of activations.
    for micro in reversed(range(config.accumulation(ranks.world_size))):
        batch = data.train.get_batch(device, micro)

    def compute(n):  # as in train_step
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss, _ = model(*(t[:n] for t in batch))
        loss.backward()

    def update():
        clip_gradients(optimizer, config.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def measure(n):
        for _ in range(2):  # with gradients, as in all but the first micro-batch
            compute(n)
        seconds = timed(lambda: compute(n), device)
        return np.array([seconds, (peak_memory(device) or 0) * MIB])
    size = len(batch[0])
    n = size if on_gpu else 1
    compute(n)
    update()  # creates the state of the optimizer
    cost = measure(n)
    if n < size:
        return_freed_memory()  # a run has no space that smaller micro-batches left
        limits = np.array([MAX_SECONDS / 3, available])
        larger_n = min(max(2, int(min(limits / np.maximum(cost, 1e-9)))), size)
        more = np.maximum(measure(larger_n) - cost, 0)  # other processes may have delayed the first
        cost += more * (size - n) / (larger_n - n)
    seconds = config.accumulation(ranks.world_size) * cost[0] + timed(update, device)
    measured = config.replace(ema=0.0)  # without averages, which train_step updates
    return seconds, cost[1] - sum(state_memory(measured, model, 1).values())
