"""Profile training steps by category: python run_train.py --profile 10

The steps of the run, on all ranks: a few that warm up and compile, N that are timed, and N under
torch.profiler. The program then exits. The steps run in a temporary folder, so that checkpoints and
metrics of the real run do not change. The trace is written to out_dir/profile.json.gz.
"""

import os
import re
import tempfile
import time

import torch

from train.base.errors import echo
from train.distributed import process_group
from train.setup import open_run
from train.train import train_step

WARM_UP_STEPS = 3  # a CPU compiles in the second step
# An operation belongs to the first category that matches the name or a caller's name.
CATEGORIES = {
    "batches": r"^batches$",
    "communication": r"^c10d::|nccl|gloo|record_param_comms|^FSDP::.*(gather|reduce)",
    "optimizer, clipping": r"^Optimizer\.|_foreach_|_fused_adam|vector_norm",
    "loss": r"[Cc]ross_?[Ee]ntropy|nll_loss|log_softmax|logsumexp",
    "attention": r"scaled_dot_product|flash|bmm|_softmax",
    "matrix products": r"::_?(addmm|mm|matmul|linear|grouped_mm|scaled_mm|einsum)|mkldnn.*linear",
    "copies, casts": r"^aten::(copy_|_to_copy|cat|clone|contiguous|index_select|fill_)",
    "norms, elementwise": r"^aten::|^triton|Compiled|^RMSNorm",
}
REST = "rest: Python, waiting"


def profile(config):
    """Profile config.profile steps, print the time per category, and write the trace."""
    n = config.profile
    with (tempfile.TemporaryDirectory() as folder, process_group(config) as ranks,
          open_run(config.probe(out_dir=folder), ranks) as run):
        cuda = ranks.device.type == "cuda"
        run.batches.get = torch.profiler.record_function("batches")(run.batches.get)

        def seconds_per_step(steps):
            started = time.perf_counter()
            for _ in range(steps):
                train_step(run)
            if cuda:
                torch.cuda.synchronize(ranks.device)
            return (time.perf_counter() - started) / steps
        seconds_per_step(WARM_UP_STEPS)
        seconds = seconds_per_step(n)
        with torch.profiler.profile() as profiler:  # of all devices
            profiled_seconds = seconds_per_step(n)
        if ranks.is_main:
            path = os.path.join(config.out_dir, "profile.json.gz")
            os.makedirs(config.out_dir, exist_ok=True)
            profiler.export_chrome_trace(path)
            echo(format_profile(profiler.events(), n, seconds, profiled_seconds, cuda))
            echo(f"Trace: {path}, for https://ui.perfetto.dev or chrome://tracing")


def seconds_by_category(events, cuda):
    """Return {category: seconds} of profiler events, on the GPU if `cuda`, otherwise on the host.

    An operation counts without the operations that it calls; a GPU kernel counts for the operation
    that launched it.
    """
    names = [*CATEGORIES, REST]
    seconds = dict.fromkeys(names, 0.0)
    own_time = "self_device_time_total" if cuda else "self_cpu_time_total"
    pending = [(e, len(CATEGORIES)) for e in events if e.cpu_parent is None]
    while pending:
        event, inherited = pending.pop()
        matches = (i for i, pattern in enumerate(CATEGORIES.values())
                   if re.search(pattern, event.name))
        category = min(inherited, next(matches, inherited))
        if event.device_type == torch.autograd.DeviceType.CPU:
            seconds[names[category]] += getattr(event, own_time) / 1e6
        pending += [(child, category) for child in event.cpu_children]
    return seconds


def format_profile(events, n, seconds, profiled_seconds, cuda):
    """Return a table of the time per category. seconds, profiled_seconds: per step, without and
    under the profiler; n: profiled steps."""
    column = {name: total / n for name, total in seconds_by_category(events, cuda).items()}
    column[REST] = max(0.0, profiled_seconds - sum(column[name] for name in CATEGORIES))
    lines = [f"A step takes {seconds * 1000:,.1f} ms, under the profiler "
             f"{profiled_seconds * 1000:,.1f} ms ({n} steps). By category:"]
    for name in [*sorted(CATEGORIES, key=column.get, reverse=True), REST]:
        if column[name] > 0.0005 * profiled_seconds or name == REST:
            lines.append(f"  {name:<36}{column[name] * 1000:>10,.2f} ms "
                         f"{column[name] / profiled_seconds:>7.1%}")
    return "\n".join(lines)
