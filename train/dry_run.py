"""--dry_run: what a run would take, without writing anything: parameters, memory, time."""

import contextlib
import time

import torch

from train import distributed, report
from train.checkpoint import memory_available
from train.config import load_model_file
from train.distributed import LeaveTogether
from train.logger import compact, duration
from train.optimizer import clip_gradients, configure_optimizers
from train.train import open_data

WAIT = 15.0  # seconds that timing may take: one sample stands for all where a step takes longer


class DoesNotFit(LeaveTogether):
    """The run would need more memory than there is."""


def estimate(config):
    """Say what the run that `config` describes would take. Raises DoesNotFit."""
    with distributed.process_group(config) as ranks:
        say = (lambda text: print(text, flush=True)) if ranks.main else (lambda text: None)
        data = open_data(config, ranks)
        c = config.in_steps(data.train.samples)
        build = load_model_file(c.model).build_model
        with torch.device("meta"):  # what does not fit must not be tried
            empty = build(c, data)
        dtype, why = distributed.choose_dtype(c.dtype, ranks.device)
        compiled = report.should_compile(c, report.flops_per_step(empty, c, data.train), ranks)
        report.start_up(say, c, ranks, data, empty, dtype, why, compiled)
        check_memory(c, empty, data, ranks, dtype, compiled, say)
        model = build(c, data).to(ranks.device)
        seconds, one_sample = time_step(c, model, data, ranks, dtype, compiled)
        units = c.samples_per_step * data.train.units_per_sample
        say(f"Fits. {seconds * 1000:,.0f} ms a step, {units / seconds:,.0f} {data.train.unit}/s"
            + (" (from one sample)" if one_sample else ""))
        for steps in sorted({c.max_iters, 5_000, 50_000, 500_000}):
            say(f"  {steps:>9,} steps: {compact(steps * units):>6} {data.train.unit}, "
                f"{duration(steps * seconds)}")
        if seconds * c.max_iters > 86400 and ranks.device.type == "cpu":
            say(report.how_long(seconds, c, 0))


def check_memory(c, model, data, ranks, dtype, compiled, say):
    """Say how much memory a rank needs and for what; raise DoesNotFit where it has less."""
    parameters = sum(p.numel() for p in model.parameters())
    share = ranks.world_size if c.distributed == "fsdp" else 1
    copies = 2 if ranks.world_size > share else 1  # DDP's buckets hold the gradients once more
    width, rows = (4 if dtype == torch.float32 else 2), c.micro_batch(ranks.world_size)
    rows *= data.train.units_per_sample
    hidden = c.n_hidden or 4 * c.n_embd
    per_layer = 0 if c.gradient_checkpointing == "true" else 9 * c.n_embd + 4 * hidden
    logits = rows * data.spec.get("vocab_size", 0) * width
    parts = dict(weights=4 * parameters / share, gradients=4 * parameters * copies / share,
                 optimizer=8 * parameters / share,
                 activations=rows * width * c.n_layer * (per_layer + c.n_embd),
                 logits=logits * (2 if compiled and ranks.device.type == "cuda" else 1))
    needed = sum(parts.values())
    there = (torch.cuda.mem_get_info(ranks.device)[0] if ranks.device.type == "cuda"
             else memory_available())
    say("Memory, MiB: " + ", ".join(f"{k} {v / 2**20:,.0f}" for k, v in parts.items())
        + f"; in all {needed / 2**20:,.0f} of {there / 2**20:,.0f}")
    if distributed.max_over_ranks(int(needed > there), ranks):
        raise DoesNotFit(
            "Does not fit: lower batch_size (and raise gradient_accumulation_steps by the same "
            "factor), set gradient_checkpointing: true, or lower block_size, n_layer or n_embd.")


def time_step(c, model, data, ranks, dtype, compiled):
    """(seconds of an optimizer step, whether guessed from a single sample). On a GPU the step is
    the real one, compiled and with its optimizer; on a CPU compiling would take longer than the
    answer is worth."""
    batch = data.train.get_batch(ranks.device, 0)
    n = c.accumulation(ranks.world_size)
    optimizer = configure_optimizers(model, c.weight_decay, c.learning_rate, (c.beta1, c.beta2),
                                     log=lambda text: None)
    if compiled and ranks.device.type == "cuda":
        model.compile(dynamic=False)

    def micro(batch):
        enabled = dtype != torch.float32
        with torch.autocast(ranks.device.type, dtype, enabled=enabled):
            loss, _ = model(*batch)
        loss.backward()

    def update():
        clip_gradients(optimizer, c.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    one = [t[:1] for t in batch]
    seconds(micro, ranks, one)  # warms up
    guess = seconds(micro, ranks, one) * c.samples_per_step / ranks.world_size
    if ranks.device.type == "cpu" and guess / n * 3 > WAIT:
        return guess, True
    times = [seconds(micro, ranks, batch) for _ in range(4)][1:]
    update()
    micro(one)
    return sorted(times)[1] * n + seconds(update, ranks), False


def seconds(f, ranks, *args):
    """Seconds that f(*args) takes, until the device is done."""
    wait = torch.cuda.synchronize if ranks.device.type == "cuda" else contextlib.nullcontext
    wait()
    started = time.perf_counter()
    f(*args)
    wait()
    return time.perf_counter() - started
