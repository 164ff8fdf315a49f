"""Profile training steps of a run (run_train.py --profile 10).

The steps of the run, on all ranks: a few that warm up and compile, N that are timed, and N under
torch.profiler. The program then exits. The steps run in a temporary folder, so that checkpoints and
metrics of the real run do not change. The trace is written to out_dir/profile.json.gz.
"""

import os
import tempfile

import torch

from train.base.errors import echo
from train.device import timed
from train.distributed import process_group
from train.setup import open_run
from train.train import train_step

WARM_UP_STEPS = 3  # a CPU compiles in the second step
TABLE_ROWS = 20


def profile(config):
    """Time config.profile training steps, then profile as many, in a temporary folder.

    Rank 0 prints the slowest operations and writes out_dir/profile.json.gz. All ranks must call.
    """
    n = config.profile
    with (tempfile.TemporaryDirectory() as folder, process_group(config) as ranks,
          open_run(config.probe(out_dir=folder), ranks) as run):
        run.batches.get = torch.profiler.record_function("batches")(run.batches.get)

        def seconds_per_step(steps):
            return timed(lambda: [train_step(run) for _ in range(steps)], ranks.device) / steps
        seconds_per_step(WARM_UP_STEPS)
        seconds = seconds_per_step(n)
        with torch.profiler.profile() as profiler:  # of all devices
            profiled = seconds_per_step(n)
        if ranks.is_main:
            path = os.path.join(config.out_dir, "profile.json.gz")
            os.makedirs(config.out_dir, exist_ok=True)
            profiler.export_chrome_trace(path)
            kind = "cpu" if ranks.device.type == "cpu" else "device"
            echo(profiler.key_averages().table(f"self_{kind}_time_total", TABLE_ROWS,
                                               max_name_column_width=40))
            echo(f"A step takes {seconds * 1000:,.1f} ms, under the profiler {profiled * 1000:,.1f}"
                 f" ms ({n} steps). Trace: {path}, for https://ui.perfetto.dev")
