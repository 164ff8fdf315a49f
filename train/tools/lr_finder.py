"""Find a learning rate: sweep it from tiny to too large, and report where the loss falls fastest.

    python -m train.tools.lr_finder [--config FILE.yaml] [--key value]... [--from 1e-7] [--to 1]
                                    [--steps 100]

Smith's range test (arXiv:1506.01186) with the model, data and optimizer of the run. The results are
out_dir/lr_finder.svg and lr_finder.json; other files in out_dir are not changed or locked.
"""

import contextlib
import io
import json
import math
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from statistics import fmean, pstdev

from train.base.cli import env_rank, run_command
from train.base.errors import BadNumbers, Stopped, UserError
from train.base.fields import key
from train.base.files import write_text
from train.config import load_argv
from train.distributed import process_group
from train.options.loss_svg import COLORS
from train.robust import run_reporting_errors
from train.setup import open_run
from train.tools.plot import save_figure
from train.train import train_step

MEMORY = 0.9               # of the running mean of the loss, which detects divergence
DIVERGENCE_FACTOR = 4.0    # the sweep stops at this multiple of the lowest running mean
SMOOTHING_FRACTION = 0.03  # of the sweep, to both sides: a trailing mean would lag behind
REPORT_SECONDS = 3.0       # between progress lines


class WarningsOnly(io.StringIO):
    """Standard output that forwards a run's warnings to `console` and drops the other lines."""

    def __init__(self, console):
        super().__init__()
        self.console = console

    def write(self, text):
        if text.startswith("warning:"):
            self.console.write(text)
        return len(text)


def find_lr(config, low=1e-7, high=1.0, steps=100):
    """Sweep the learning rate of `config` (a TrainConfig) from `low` to `high`.

    Each of the `steps` optimizer steps uses a rate that is a constant factor above the previous
    one. Returns a dict: the lists lr and loss, and the results of suggest().
    """
    console = sys.stdout
    rates = [low * (high / low) ** (i / (steps - 1)) for i in range(steps)]
    with (tempfile.TemporaryDirectory() as folder, process_group(config) as ranks,
          contextlib.redirect_stdout(WarningsOnly(console))):
        probe = config.probe(
            out_dir=folder, lr_schedule="constant", warmup_iters=0, warmup_ratio=None,
            warmup_epochs=None, max_epochs=None, on_spike="warn", spike_sigma=1e9)
        with open_run(probe, ranks) as run:
            sweep = sweep_rates(run.signals, ranks, rates,
                                lambda lr: train_step(run, lr), console)
    return sweep | suggest(sweep["lr"], sweep["loss"], high)


def sweep_rates(signals, ranks, rates, step, console):
    """Call step(lr) -> loss for each of the `rates` until the loss diverges. Return {"lr": list,
    "loss": list}."""
    sweep = dict(lr=[], loss=[])
    running_mean = 0.0
    best_mean = math.inf
    reported = -math.inf
    for i, lr in enumerate(rates):
        stop_signal, _ = signals.agree(ranks)
        if stop_signal:
            raise Stopped(stop_signal)
        try:
            loss = step(lr)
        except BadNumbers:  # diverged
            break
        if loss is None:  # interrupted by a signal, which raises Stopped next
            continue
        sweep["lr"].append(lr)
        sweep["loss"].append(loss)
        running_mean = MEMORY * running_mean + (1 - MEMORY) * loss if i else loss
        best_mean = min(best_mean, running_mean)
        if running_mean > DIVERGENCE_FACTOR * best_mean:
            break
        if ranks.is_main and time.monotonic() - reported > REPORT_SECONDS:
            print(f"step {i + 1} of {len(rates)}: learning rate {lr:.2g}, loss {loss:.4f}",
                  file=console, flush=True)
            reported = time.monotonic()
    return sweep


def suggest(rates, losses, high):
    """Return dict(smoothed, suggestion, range, why) for a sweep up to `high`.

    suggestion: the rate at which the smoothed loss falls fastest; range: (from, to) around it, in
    which it falls at least half as fast. Both are None if the loss has no clear minimum; `why` is
    the reason then.
    """
    half = max(1, int(SMOOTHING_FRACTION * len(losses)))
    smoothed = [fmean(losses[max(0, i - half):i + half + 1]) for i in range(len(losses))]
    result = dict(smoothed=smoothed, suggestion=None, range=None, why=None)
    if len(losses) < 10:
        return result | dict(why=f"the loss diverged within {len(losses)} steps; start lower "
                                 "(--from)")
    start = fmean(losses[:max(3, len(losses) // 20)])
    lowest = min(smoothed)
    # 95% of the fall, not the minimum: a language model's loss may stay at that of the bare token
    # frequencies for decades of rates before it diverges.
    bottom = next(i for i, y in enumerate(smoothed) if y <= start - 0.95 * (start - lowest))
    noise = pstdev(a - b for a, b in zip(losses[:bottom + 10], smoothed, strict=False))
    if start - lowest <= 2 * noise:
        return result | dict(why=f"the loss fell by only {max(0.0, start - lowest):.2g}, which is "
                                 "within its noise; try a larger batch, or a sweep from lower or "
                                 "to higher rates (--from, --to)")
    last = len(losses) - 1
    if bottom > 0.9 * last and rates[last] > 0.999 * high:
        return result | dict(why=f"the loss was still falling at {high:.2g}; increase --to")
    slopes = [smoothed[min(i + half, last)] - smoothed[max(i - half, 0)]
              for i in range(bottom + 1)]
    # Rates are in equal steps of their logarithm, so differences are slopes.
    steepest = slopes.index(min(slopes))
    first = steepest
    end = steepest
    while first > 0 and slopes[first - 1] <= slopes[steepest] / 2:
        first -= 1
    while end < bottom and slopes[end + 1] <= slopes[steepest] / 2:
        end += 1
    return result | dict(suggestion=rates[steepest], range=(rates[first], rates[end]))


def draw_sweep(axes, sweep):
    """Draw a sweep on matplotlib `axes`: loss, smoothed loss, suggested range of learning rates."""
    axes.set_xscale("log")
    axes.plot(sweep["lr"], sweep["loss"], color=COLORS[0], alpha=0.35)
    axes.plot(sweep["lr"], sweep["smoothed"], color=COLORS[0], label="smoothed loss")
    if sweep["suggestion"] is None:
        axes.plot([], [], " ", label="no clear minimum")
        return
    low, high = sweep["range"]
    axes.axvspan(low, high, color=COLORS[2], alpha=0.15,
                 label=f"at least half as fast: {low:.2g} to {high:.2g}")
    axes.axvline(sweep["suggestion"], color=COLORS[2], linestyle="--",
                 label=f"falls fastest: {sweep['suggestion']:.2g}")


def report_sweep(sweep, config):
    """Write lr_finder.json and lr_finder.svg into out_dir and print the suggestion."""
    path = os.path.join(config.out_dir, "lr_finder.svg")
    write_text(path.replace(".svg", ".json"), json.dumps(sweep))
    if not (sweep["lr"] and save_figure(path, lambda axes: draw_sweep(axes, sweep),
                                        "Learning-rate sweep", "learning rate", "loss")):
        path = path.replace(".svg", ".json")
    if sweep["suggestion"] is None:
        print(f"No clear minimum: {sweep['why']}. See {path}")
        return
    low, high = sweep["range"]
    option = f"--learning_rate {sweep['suggestion']:.2g}"
    if config.optimizer == "muon":  # the sweep changed both rates together
        option += f" --muon_lr {config.muon_lr * sweep['suggestion'] / config.learning_rate:.2g}"
    print(f"The loss falls fastest at {sweep['suggestion']:.2g}, and at least half as fast from "
          f"{low:.2g} to {high:.2g}.\nTry {option}; see {path}")


@dataclass
class SweepOptions:
    "Sweep the learning rate of a run, and report where the loss falls fastest."
    low: float = key(1e-7, "lowest learning rate", gt=0, option="from")
    high: float = key(1.0, "highest learning rate", le=100, option="to")
    steps: int = key(100, "optimizer steps", ge=10)


def main(argv=None):
    """Run the command line; return the exit code."""
    return run_command(SweepOptions, run_sweep, argv, load=load_argv)


def run_sweep(options, config):
    """Sweep, report and return the exit code."""
    if options.low >= options.high:
        raise UserError("expected --from below --to")
    os.makedirs(config.out_dir, exist_ok=True)

    def job(config):
        sweep = find_lr(config, options.low, options.high, options.steps)
        if env_rank() == 0:
            report_sweep(sweep, config)
    return run_reporting_errors(config, job)


if __name__ == "__main__":
    sys.exit(main())
