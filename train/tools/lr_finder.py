"""Find a learning rate: sweep it from tiny to too large, and report where the loss falls fastest.

    python -m train.tools.lr_finder [--config FILE.yaml] [--key value]... [--from 1e-7] [--to 1]
                                    [--steps 100]

Smith's range test (arXiv:1506.01186) with the model, data and optimizer of the run. The results are
out_dir/lr_finder.svg and lr_finder.json; other files in out_dir are not changed or locked.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from statistics import fmean, pstdev

import numpy as np

from train.base.cli import command, env_rank
from train.base.errors import BadNumbers, UserError
from train.base.fields import key
from train.base.files import write_text
from train.config import load_argv
from train.distributed import process_group
from train.options.loss_svg import COLORS, Curve, draw_chart
from train.robust import run_reporting_errors
from train.setup import open_run
from train.train import train_step

DIVERGENCE_FACTOR = 4.0    # the sweep stops at a mean loss of this multiple of the lowest loss
SMOOTHING_FRACTION = 0.03  # of the sweep, to both sides: a trailing mean would lag behind


def find_lr(config, low=1e-7, high=1.0, steps=100):
    """Train with a learning rate that increases from `low` to `high`; return a dict of results.

    Each rate is a constant factor above the previous one. The sweep stops early if the loss
    diverges. Prints the progress; writes no files. All ranks must call.
    Return lr, loss and smoothed, lists of floats with an item per completed step; suggestion, the
    rate at which the smoothed loss falls fastest, or `None`; why, the reason (a text) if there is
    no suggestion, otherwise `None`.
    """
    console = sys.stdout
    rates = np.geomspace(low, high, steps).tolist()
    losses = []
    with (tempfile.TemporaryDirectory() as folder, process_group(config) as ranks,
          contextlib.redirect_stdout(io.StringIO())):
        probe = config.probe(
            out_dir=folder, lr_schedule="constant", warmup_iters=0, warmup_ratio=None,
            warmup_epochs=None, on_spike="warn", spike_sigma=1e9)
        with open_run(probe, ranks) as run, contextlib.suppress(BadNumbers):
            for lr in rates:
                losses.append(train_step(run, lr))
                if ranks.is_main and len(losses) % 10 == 0:
                    print(f"step {len(losses)} of {steps}: lr {lr:.2g}, loss {losses[-1]:.4f}",
                          file=console, flush=True)
                if fmean(losses[-5:]) > DIVERGENCE_FACTOR * min(losses) > 0:
                    break
    return dict(lr=rates[:len(losses)], loss=losses) | suggest(rates, losses, high)


def suggest(rates, losses, high):
    """Return "smoothed", "suggestion" and "why" of find_lr()'s result, a dict.

    rates: of all steps, up to `high`. losses: shorter than `rates` if the sweep stopped early. The
    suggestion is `None` without a clear minimum.
    """
    n = len(losses)
    half = max(1, int(SMOOTHING_FRACTION * n))
    smoothed = [fmean(losses[max(0, i - half):i + half + 1]) for i in range(n)]
    result = dict(smoothed=smoothed, suggestion=None, why=None)
    if n < 10:
        return result | dict(why=f"the loss diverged within {n} steps; start lower (--from)")
    start = fmean(losses[:max(3, n // 20)])
    fall = start - min(smoothed)
    # 95% of the fall, not the minimum: a language model's loss may stay at that of the bare token
    # frequencies for decades of rates before it diverges.
    bottom = next(i for i, y in enumerate(smoothed) if y <= start - 0.95 * fall)
    noise = pstdev(a - b for a, b in zip(losses[:bottom + 10], smoothed))
    if fall <= 2 * noise:
        return result | dict(why=f"the loss fell by only {max(0.0, fall):.2g}, within its noise; "
                                 "try a larger batch or other rates (--from, --to)")
    if bottom > 0.9 * (n - 1) and rates[n - 1] > 0.999 * high:
        return result | dict(why=f"the loss was still falling at {high:.2g}; increase --to")
    # Rates are in equal steps of their logarithm, so differences are slopes; before the loss begins
    # to fall, they are noise.
    begin = max((i for i in range(bottom) if smoothed[i] > start - 0.1 * fall), default=0)
    steepest = min(range(begin, bottom + 1), key=lambda i: (
        smoothed[min(i + half, n - 1)] - smoothed[max(i - half, 0)]))
    return result | dict(suggestion=rates[steepest])


def draw_sweep(sweep):
    """Return an SVG text of find_lr()'s result: loss, smoothed loss and the suggested rate."""
    curves = [Curve(list(zip(sweep["lr"], sweep["loss"])), COLORS[0], line="faint"),
              Curve(list(zip(sweep["lr"], sweep["smoothed"])), COLORS[0], "smoothed loss")]
    if best := sweep["suggestion"]:
        ends = [(best, min(sweep["loss"])), (best, max(sweep["loss"]))]
        curves.append(Curve(ends, COLORS[2], f"falls fastest: {best:.2g}"))
    return draw_chart(dict(loss=curves), "learning rate", log_x=True)


def report_sweep(sweep, config):
    """Write find_lr()'s result to config.out_dir as JSON and SVG, and print the suggestion."""
    path = os.path.join(config.out_dir, "lr_finder.svg")
    write_text(os.path.join(config.out_dir, "lr_finder.json"), json.dumps(sweep))
    write_text(path, draw_sweep(sweep))
    if sweep["suggestion"] is None:
        print(f"No clear minimum: {sweep['why']}. See {path}")
        return
    # The sweep changed all rates together, and min_lr must not exceed learning_rate.
    factor = sweep["suggestion"] / config.learning_rate
    rates = dict(learning_rate=config.learning_rate, min_lr=config.min_lr,
                 muon_lr=config.optimizer == "muon" and config.muon_lr)
    option = " ".join(f"--{name} {rate * factor:.2g}" for name, rate in rates.items() if rate)
    if "learning_rate" in str(config.lr_groups):
        option += f", and each learning_rate in lr_groups times {factor:.2g}"
    print(f"The loss falls fastest at {sweep['suggestion']:.2g}. Try {option}; see {path}")


@dataclass
class SweepOptions:
    """Sweep the learning rate of a run, and report where the loss falls fastest."""
    low: float = key(1e-7, "lowest learning rate", gt=0, option="from")
    high: float = key(1.0, "highest learning rate", le=100, option="to")
    steps: int = key(100, "optimizer steps", ge=10)


def run_sweep(options, config):
    """Run the sweep of SweepOptions, and return the exit code (under torchrun, exit with it).

    Rank 0 writes and prints the result. Errors of the run are printed; the exit code 0 is success.
    Raises UserError unless options.low is below options.high.
    """
    if options.low >= options.high:
        raise UserError("expected --from below --to")
    os.makedirs(config.out_dir, exist_ok=True)

    def job(config):
        sweep = find_lr(config, options.low, options.high, options.steps)
        if env_rank() == 0:
            report_sweep(sweep, config)
    code = run_reporting_errors(config, job, prints=True)
    with contextlib.suppress(OSError):  # it is empty if the run was refused
        os.rmdir(config.out_dir)
    return code


main = command(SweepOptions, run_sweep, load=load_argv)
