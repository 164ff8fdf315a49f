"""Where the time of a step goes: python run_train.py --profile 10

The run's own steps, on all its ranks: a few that warm up and compile, N that are timed, and N under
torch.profiler. It then ends: the run is one in a folder that is thrown away, so that the real one's
checkpoints and numbers stay as they are. What is written is out_dir/profile.json.gz, a trace.
"""

import functools
import os
import re
import tempfile
import time

import torch

from train.base.errors import echo
from train.train import open_trainer

WARM_UP = 3  # steps; a CPU compiles in the second
# An operation belongs to the first part that knows its name, or the name of one that called it.
PARTS = {
    "rest": r"Synchronize",  # the host waits for the device
    "batches": r"^batches$",
    "communication": r"^c10d::|nccl|gloo|record_param_comms|^FSDP::.*(gather|reduce)",
    "optimizer, clipping": r"^Optimizer\.|_foreach_|_fused_adam|vector_norm",
    "loss": r"[Cc]ross_?[Ee]ntropy|nll_loss|log_softmax|logsumexp",
    "attention": r"scaled_dot_product|flash|bmm|_softmax",
    "matrix products": r"::_?(addmm|mm|matmul|linear|grouped_mm|scaled_mm|einsum)|mkldnn.*linear",
    "copies, casts": r"^aten::(copy_|_to_copy|cat|clone|contiguous|index_select|fill_)",
    "norms, elementwise": r"^aten::|^triton|Compiled|^_RMSNorm",
}
REST, *OTHERS = PARTS
PATTERNS = [re.compile(pattern) for pattern in PARTS.values()]


def profile(config):
    """Say where the time of config.profile steps goes, and write the trace."""
    if os.environ.get("RANK", "0") == "0":
        echo(f"--profile: {config.profile} steps of this run, in a folder that is thrown away")
    with tempfile.TemporaryDirectory() as folder, open_trainer(config.replace(
            out_dir=folder, resume="auto", tracker=[], max_minutes=None, eval_only=False,
            eval_tasks=[], eval_interval=0, early_stopping_metric="val_loss")) as run:
        n, device, main = config.profile, run.ranks.device, run.ranks.is_main
        for name in ("get", "prefetch"):
            setattr(run.batches, name, named("batches", getattr(run.batches, name)))

        def seconds(steps):
            started = time.perf_counter()
            for _ in range(steps):
                run.train_step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return (time.perf_counter() - started) / steps
        seconds(WARM_UP)
        alone = seconds(n)
        kinds = [torch.profiler.ProfilerActivity.CPU]
        kinds += [torch.profiler.ProfilerActivity.CUDA] * (device.type == "cuda")
        with torch.profiler.profile(activities=kinds) as recorded:
            watched = seconds(n)
        if main:
            path = os.path.join(config.out_dir, "profile.json.gz")
            os.makedirs(config.out_dir, exist_ok=True)
            recorded.export_chrome_trace(path)
            echo(table(recorded.events(), n, alone, watched, device.type == "cuda"))
            echo(f"Trace: {path}, for https://ui.perfetto.dev or chrome://tracing")


def named(name, f):
    """f with its time under `name` in the profile."""
    @functools.wraps(f)
    def wrapped(*args):
        with torch.profiler.record_function(name):
            return f(*args)
    return wrapped


def times(events):
    """({part: seconds of the host}, {part: seconds of the GPU}) of what a profile has recorded.

    Each operation counts for what it takes beside the operations that it calls; the GPU's kernels
    count for the operation that started them."""
    host, gpu = (dict.fromkeys(PARTS, 0.0) for _ in range(2))
    names, own = list(PARTS), functools.cache(part_of)
    waiting = [(e, len(names)) for e in events if e.cpu_parent is None]
    while waiting:
        event, above = waiting.pop()
        part = min(above, own(event.name))
        name = names[part % len(names)]  # of none: the rest
        host[name] += event.self_cpu_time_total / 1e6
        if event.device_type == torch.autograd.DeviceType.CPU:
            gpu[name] += event.self_device_time_total / 1e6
        waiting += [(child, part) for child in event.cpu_children]
    return host, gpu


def part_of(name):
    """The number of the first part that knows the name; of none, how many there are."""
    return next((i for i, p in enumerate(PATTERNS) if p.search(name)), len(PATTERNS))


def table(events, n, alone, watched, cuda):
    """The times of `n` steps as text for people. alone, watched: seconds of a step by itself and
    under the profiler."""
    host, gpu = ({k: v / n for k, v in found.items()} for found in times(events))
    columns = {"GPU": (gpu, "idle"), "host": (host, "rest: Python, waiting")} if (
        cuda) else {"": (host, "rest: Python, waiting")}
    lines = [f"A step takes {alone * 1000:,.1f} ms, under the profiler {watched * 1000:,.1f} ms "
             f"({n} steps). Of these:"]
    for what, (found, rest) in columns.items():
        found[REST] = max(0.0, watched - sum(found[k] for k in OTHERS))
        lines += [f"{what}:"] * bool(what)
        for part in [*sorted(OTHERS, key=found.get, reverse=True), REST]:
            if found[part] > 0.0005 * watched or part == REST:
                lines.append(f"  {rest if part == REST else part:<36}"
                             f"{found[part] * 1000:>10,.2f} ms {found[part] / watched:>7.1%}")
    return "\n".join(lines)
