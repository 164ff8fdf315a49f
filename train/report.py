"""What a run says about itself: start-up block, MFU, memory, estimates, advice on errors."""

import os
import shlex
import sys
import time
import traceback

import torch

from train import distributed
from train.checkpoint import CheckpointError
from train.dataloader import DataError
from train.guard import BadNumbers, SaveFailed, Stopped
from train.logger import compact, duration

# Dense peak of the matrix units, TFLOP/s (16-bit floats, float32), by the vendors' data sheets.
PEAK_TFLOPS = {
    "B300": (2500, 80), "B200": (2250, 80), "GB200": (2500, 80), "GH200": (989, 67),
    "H200": (989, 67), "H100 PCIe": (756, 51), "H100 NVL": (835, 60), "H100": (989, 67),
    "H800": (989, 67),
    "A100": (312, 19.5), "A800": (312, 19.5), "A40": (150, 37), "A30": (165, 10.3),
    "A10G": (70, 35), "A10": (125, 31), "L40S": (362, 91), "L40": (181, 90), "L4": (121, 30),
    "T4": (65, 8.1),
    "V100": (125, 15.7), "P100": (21, 10.6), "RTX 5090": (209, 105), "RTX 4090": (165, 82),
    "RTX 4080": (97, 49), "RTX 3090": (71, 36), "RTX 6000 Ada": (364, 91)}


def peak_flops(device, dtype):
    """Peak FLOP/s of the device for `dtype`, None where unknown: no number beats a wrong one."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    match = [k for k in PEAK_TFLOPS if k in name]
    return PEAK_TFLOPS[max(match, key=len)][dtype == torch.float32] * 1e12 if match else None


def mfu(model, tokens_per_sec, ranks, dtype):
    """Model FLOPs utilisation, 0 to 1 (PaLM, arXiv:2204.02311, appendix B); None where unknown."""
    peak = peak_flops(ranks.device, dtype)
    if peak is None or not hasattr(model, "flops_per_token"):
        return None
    return model.flops_per_token() * tokens_per_sec / (peak * ranks.world_size)


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


def compile_pays(run):
    """Whether compiling (about a minute) is repaid: by a run of at least ten times that, guessed
    from its FLOPs at a modest speed of the device."""
    model, config, ranks = run.raw, run.config, run.ranks
    if ranks.device.type not in ("cpu", "cuda") or not hasattr(model, "flops_per_token"):
        return False
    per_second = 1e14 * ranks.world_size if ranks.device.type == "cuda" else 2e11
    return model.flops_per_token() * config.tokens_per_step * config.max_iters / per_second > 600


def parameters_by_part(model):
    """'embedding 12,288,000, blocks 37,748,736, ...' of the named parameters' first names."""
    parts = {}
    names = dict(wte="token embedding", wpe="position embedding", h="blocks", lm_head="head")
    for name, p in model.named_parameters():
        part = names.get(name.split(".")[0], "rest")
        part = "value embeddings" if ".ve." in name else part
        parts[part] = parts.get(part, 0) + p.numel()
    return ", ".join(f"{k} {v:,}" for k, v in parts.items())


def start_up(run, log):
    """Say what will happen before it does."""
    c, model, ranks = run.config, run.raw, run.ranks
    total = c.max_iters * c.tokens_per_step
    n = sum(p.numel() for p in model.parameters())
    log(f"Device: {distributed.describe_device(ranks.device)}; {ranks.world_size} "
        f"rank{'s'[:ranks.world_size != 1]}"
        + (f", {c.distributed}" if ranks.world_size > 1 else ""))
    log(f"Precision: {str(run.dtype).removeprefix('torch.')} ({run.dtype_why}); "
        f"compile {'on' if run.compiled else 'off'}" + (" (the first step takes a while)"
                                                       if run.compiled else ""))
    log(f"Model: {n:,} parameters ({parameters_by_part(model)}); "
        f"vocabulary {run.data.vocab_size:,}")
    log(f"Batch: {run.micro_batch} x {c.block_size} x {run.accumulation} accumulated x "
        f"{ranks.world_size} ranks = {c.tokens_per_step:,} tokens a step")
    flops = model.flops_per_token() * total if hasattr(model, "flops_per_token") else 0
    log(f"Length: {c.max_iters:,} steps, {compact(total)} tokens, "
        f"{total / run.data.train.tokens_per_epoch:.2f} passes over the data, "
        f"{total / n:.1f} tokens a parameter" + (f", {flops:.2g} FLOPs" if flops else ""))


def dry_run(run):
    """Estimate memory and time from a few timed steps; nothing is written. True if it fits."""
    run.build_model(empty=True)  # what does not fit must not be tried
    c, model, device = run.config, run.raw, run.ranks.device
    say = print if run.ranks.main else lambda text: None
    start_up(run, say)
    weights = sum(p.numel() * 4 for p in model.parameters())
    weights //= run.ranks.world_size if run.sharded else 1
    width = 2 if run.dtype != torch.float32 else 4
    rows = run.micro_batch * c.block_size
    hidden = c.n_hidden or 4 * c.n_embd
    per_layer = 0 if c.gradient_checkpointing == "true" else 9 * c.n_embd + 4 * hidden
    activations = rows * width * c.n_layer * (per_layer + c.n_embd)
    logits = rows * run.data.vocab_size * width
    parts = dict(weights=weights, gradients=weights, optimizer=2 * weights,
                 activations=activations, logits=logits)
    needed, there = sum(parts.values()), available_memory(device)
    say("Memory: " + ", ".join(f"{k} {v / 2**20:,.0f}" for k, v in parts.items())
        + f" MiB; in all {needed / 2**20:,.0f} of {there / 2**20:,.0f} MiB")
    if distributed.max_over_ranks(int(needed > there), run.ranks):
        say("Does not fit: lower batch_size (and raise gradient_accumulation_steps by the same "
            "factor), set gradient_checkpointing: true, or lower block_size, n_layer or n_embd.")
        return False
    run.build_model()
    seconds = time_steps(run)
    say(f"Fits. {seconds * 1000:,.0f} ms a step, {c.tokens_per_step / seconds:,.0f} tokens/s"
        + ("" if not run.compiled else " (not compiled; the run will be faster)"))
    for steps in sorted({c.max_iters, 5_000, 50_000, 500_000}):
        say(f"  {steps:>9,} steps: {compact(steps * c.tokens_per_step):>6} tokens, "
            f"{duration(steps * seconds)}")
    return True


def time_steps(run, wanted=3):
    """Seconds of an optimizer step: the median of a few micro-batches, times their number."""
    times, model = [], run.raw
    compute = model if run.sharded else model.forward  # past the compiled code
    batch = run.data.train.get_batch(run.ranks.device, 0)
    for _ in range(wanted + 1):
        started = time.perf_counter()
        with run.autocast():
            loss, _ = compute(*batch)
        loss.backward()
        if run.ranks.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
        model.zero_grad(set_to_none=True)
    return sorted(times[1:])[wanted // 2] * run.accumulation


def available_memory(device):
    """Bytes a run could use on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    from train.saver import memory_available
    return memory_available()


# -----------------------------------------------------------------------------
# when something goes wrong

def is_out_of_memory(error):
    text = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in text


def is_compile_error(error):
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def advice(error, config):
    """One short paragraph on what to change, or ''."""
    text = str(error).lower()
    if is_out_of_memory(error):
        b, g = config.batch_size, config.gradient_accumulation_steps
        pair = (f"--batch_size {b // 2} --gradient_accumulation_steps {g * 2} (the same global "
                "batch) " if b % 2 == 0 else "a smaller --batch_size ")
        return (f"Out of memory. Try {pair}or --auto_batch, then --gradient_checkpointing true, "
                "then a smaller block_size or model. `--dry_run` shows where the memory goes.")
    if "nccl" in text:
        return ("NCCL failed. NCCL_DEBUG=INFO shows why; check that every rank sees its GPU "
                "(CUDA_VISIBLE_DEVICES, nvidia-smi) and that all nodes reach the rendezvous.")
    if "connection closed by peer" in text or "connection reset" in text or "timed out" in text:
        return ("Another rank died or hung: look for the first error above. torchrun "
                "--max-restarts=3 restarts from the last checkpoint by itself.")
    if is_compile_error(error):
        return "Compiling failed: --compile false trains without it."
    return ""


def next_steps(run):
    """What to do with a finished run."""
    out = run.config.out_dir
    return (f"Next: read {out}/samples.txt, open {out}/loss.svg, or write text with\n"
            f"  python -m model.sample --ckpt {out}/ckpt.pt --prompt \"...\"\n"
            "Your own text: python -m data.prepare my.txt, then --data_dir data/bin/my\n"
            "A GPU is used where there is one; several: torchrun --nproc_per_node=N run_train.py "
            "--config train/config.yaml")


def resume_command(run):
    """The command line that goes on with this run."""
    args = shlex.join(a for a in sys.argv[1:] if a != "--allow_change")
    if run.given.resume == "never":
        args += " --resume auto"  # the last word counts
    if run.ranks.world_size > 1:
        return f"  torchrun --nproc_per_node={run.ranks.world_size} run_train.py {args}"
    return f"  python run_train.py {args}"


def run_reporting_errors(config, dry=False, job=None):
    """train(config), or job(config), with errors told to a person: the exit code. 2: bad input, 1:
    it broke, 128 + n: stopped by signal n."""
    rank = os.environ.get("RANK", "")
    rank = int(rank) if rank.isdigit() else 0  # what else it may be, train() refuses
    from train import train as training
    try:
        if dry:
            return 0 if training.estimate(config) else 1
        (job or training.train)(config)
        return leave(0)
    except Stopped as stopped:
        return leave(stopped.exit_code)
    except (DataError, CheckpointError, distributed.SetupError, ValueError) as error:
        if type(error) is ValueError and not str(error).startswith(("lr_groups", "tracker")):
            return broke(error, config, rank)
        if rank:
            time.sleep(3)  # rank 0 most likely says the same, and torchrun then ends this process
        print(f"{f'[rank {rank}] ' if rank else ''}{error}", file=sys.stderr, flush=True)
        return leave(2)
    except (BadNumbers, SaveFailed) as error:
        if not rank:
            print(error, file=sys.stderr, flush=True)
        return leave(1)
    except KeyboardInterrupt:  # before there was anything to save
        return leave(130)
    except BaseException as error:
        return broke(error, config, rank)


def broke(error, config, rank):
    """Print what broke and what to do, and leave without waiting for peers that may be gone."""
    text, hint = "".join(traceback.format_exception(error)), advice(error, config)
    if "WORLD_SIZE" in os.environ:
        text = "".join(f"[rank {rank}] {line}\n" for line in f"{text}{hint}".splitlines())
    elif hint:
        text += f"{hint}\n"
    sys.stderr.write(text)  # at once, or the texts of several ranks would mix
    sys.stderr.flush()
    return leave(1)


def leave(code):
    """The exit code; under torchrun exit with it here: peers may be gone, and PyTorch's threads can
    hang or abort a process that ends the usual way (pytorch#190489)."""
    sys.stdout.flush()
    if "WORLD_SIZE" in os.environ:
        os._exit(code)
    return code


