"""What a run says of itself: its start-up lines, MFU and memory, how to go on, advice on errors."""

import math
import os
import re
import shlex
import sys
import time
import traceback

import torch

from train import distributed
from train.config import UserError
from train.logger import compact, duration, to_stderr

# -----------------------------------------------------------------------------
# what a run says of itself

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


def should_compile(config, flops_per_step, ranks):
    """Whether to compile. auto: where that (about a minute) is repaid, by a run of at least ten
    times its length at a modest speed of the device."""
    if config.compile != "auto":
        return config.compile == "true"
    speed = {"cpu": 2e11, "cuda": 1e14 * ranks.world_size}.get(ranks.device.type, math.inf)
    return flops_per_step * config.max_iters / speed > 600


def flops_per_step(model, config, loader):
    """FLOPs of an optimizer step over all ranks, 0 where the model does not know."""
    per_unit = getattr(model, "flops_per_unit", lambda: 0)()
    return per_unit * config.samples_per_step * loader.units_per_sample


def start_up(say, config, ranks, data, model, dtype, why, compiled):
    """Say what will happen before it does. why: the reason for dtype."""
    c, train = config, data.train
    unit = "tokens" if train.unit == "tok" else f"{train.unit}s"
    if hasattr(train, "n_tokens"):
        say(f"Loading data from {c.data_dir}...")
    for split, loader in (("train", train), ("val", data.val)):
        if loader is not None:
            length = (f"{loader.n_tokens:,} tokens" if hasattr(loader, "n_tokens")
                      else f"{loader.samples:,} {loader.unit}s")
            say(f"[{split}] Data loaded. Length: {length}")
    ways = f", {c.distributed}" if ranks.world_size > 1 else ""
    say(f"Device: {distributed.describe_device(ranks.device)}; world size {ranks.world_size}{ways}")
    compiling = "on (the first step takes a while)" if compiled else "off"
    say(f"Precision: {str(dtype).removeprefix('torch.')} ({why}); compile {compiling}")
    n = sum(p.numel() for p in model.parameters())
    say(f"Model {c.model}: {n:,} parameters ({parameters_by_part(model)})")
    units = c.samples_per_step * train.units_per_sample
    each = f" of {train.units_per_sample:,}" if train.units_per_sample > 1 else ""
    micro, accumulated = c.micro_batch(ranks.world_size), c.accumulation(ranks.world_size)
    say(f"Batch: {micro} x {accumulated} accumulated x {ranks.world_size} ranks = "
        f"{c.samples_per_step:,} samples{each}: {units:,} {unit} a step")
    total = c.max_iters * units
    flops = flops_per_step(model, c, train) * c.max_iters
    say(f"Length: {c.max_iters:,} steps, {compact(total)} {unit}, "
        f"{c.max_iters * c.samples_per_step / train.samples:.2f} passes over {train.samples:,} "
        f"samples, {total / n:.1f} {unit} a parameter" + (f", {flops:.2g} FLOPs" if flops else ""))
    falls = c.lr_schedule not in ("constant", "none", "plateau")
    say(f"Learning rate: {c.learning_rate:g}, {c.lr_schedule}, warm-up {c.warmup_steps} steps"
        + (f", to {c.final_lr:g}" if falls else ""))
    for note in c.notes():
        say(f"Note: {note}")


def parameters_by_part(model):
    """'wte 12,288,000, h 37,748,736, ...': parameters by the first part of their names."""
    parts = {}
    for name, p in model.named_parameters():
        part = name.split(".")[0]
        parts[part] = parts.get(part, 0) + p.numel()
    return ", ".join(f"{k} {v:,}" for k, v in parts.items())


def time_sample(forward, loader, device):
    """Seconds that loss, sums = forward(*batch) and its backward pass take for a sample, from a
    batch of a few."""
    batch = loader.get_batch(device, 0)
    for n in (1, min(4, len(batch[0]))):  # the first one warms up
        started = time.perf_counter()
        forward(*(t[:n] for t in batch))[0].backward()
    return (time.perf_counter() - started) / n


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


def next_steps(c):
    """What to do with a finished run."""
    sample = ["python", "-m", "model.sample", "--ckpt", os.path.join(c.out_dir, "ckpt.pt"),
              "--prompt", "..."]
    picture = os.path.join(c.out_dir, "loss.svg")
    if c.model != "gpt":
        return f"Next: open {picture}"
    return (f"Next: read {os.path.join(c.out_dir, 'samples.txt')}, open {picture}, or write text "
            f"with\n  {shlex.join(sample)}\nYour own text: python -m data.prepare my.txt")


def without_option(argv, name):
    """argv without an option, given as --name=value, or as --name with the token after it."""
    out, rest = [], list(argv)
    while rest:
        option, equals, _ = rest[0].lstrip("-").replace("-", "_").partition("=")
        if option != name:
            out.append(rest.pop(0))
        else:
            del rest[:1 if equals else 2]
    return out


def resume_command(config, ranks):
    """The command line that goes on with this run."""
    args = without_option(sys.argv[1:], "allow_change")
    args += ["--resume", "auto"] if config.resume != "auto" else []  # the last word counts
    if ranks.world_size == 1:
        return "  " + shlex.join(["python", "run_train.py", *args])
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or ranks.world_size)
    nodes = ranks.world_size // here
    several = [f"--nnodes={nodes}", "--rdzv_backend=c10d", "--rdzv_endpoint=HOST:PORT"]
    command = ["torchrun", *(several if nodes > 1 else []), f"--nproc_per_node={here}"]
    on = "  (on each node)" if nodes > 1 else ""
    return "  " + shlex.join([*command, "run_train.py", *args]) + on


# -----------------------------------------------------------------------------
# when something goes wrong

def not_finite(it, loss, norm, lr, where, good):
    """What to say of a step whose numbers are not finite. good: path of the last checkpoint."""
    good = good if os.path.exists(good) else "none yet"
    return (f"iter {it}: not finite: loss {loss}, gradient norm {norm}, lr {lr:.3g}; stopped "
            f"before the update. The batch: {where}.\n"
            f"Last good checkpoint: {good}. Try a lower "
            "--learning_rate, a longer --warmup_iters, --grad_clip 1.0, --dtype float32 or "
            "--on_spike rewind.")


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
                "batch)" if b % 2 == 0 else "a smaller --batch_size")
        return (f"Out of memory. Try {pair}, then --gradient_checkpointing, then smaller samples "
                "or a smaller model. `--dry_run` shows where the memory goes.")
    if "nccl" in text:
        return ("NCCL failed. NCCL_DEBUG=INFO shows why; check that every rank sees its GPU "
                "(CUDA_VISIBLE_DEVICES, nvidia-smi) and that all nodes reach the rendezvous.")
    if "connection closed by peer" in text or "connection reset" in text or "timed out" in text:
        return ("Another rank died or hung: look for the first error above. torchrun "
                "--max-restarts=3 restarts from the last checkpoint by itself.")
    return "Compiling failed: --no-compile trains without it." if is_compile_error(error) else ""


def run_reporting_errors(config, job):
    """job(config) with errors told to a person: the exit code. 2: bad input, 1: it broke, 128 + n:
    stopped by signal n."""
    rank = os.environ.get("RANK", "")
    rank = int(rank) if rank.isdigit() else 0  # what else it may be, the process group refuses
    try:
        job(config)
        return leave(0)
    except distributed.LeaveTogether as error:  # all ranks raise it: one speaks
        if not rank and error.exit_code < 128:
            to_stderr(error)
        return leave(error.exit_code)
    except UserError as error:
        if rank:
            time.sleep(3)  # rank 0 most likely says the same, and torchrun then ends this process
        to_stderr(f"[rank {rank}] {error}" if rank else error)
        return leave(error.exit_code)
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
