"""Find a learning rate: sweep it from tiny to too large and see where the loss falls fastest.

    python -m train.tools.lr_finder [--config FILE.yaml] [--key value]... [--from 1e-7 --to 1 --steps 100]

Smith's range test (arXiv:1506.01186) with the run's own model, data and optimizer. It writes
out_dir/lr_finder.svg and lr_finder.json and touches nothing else there: no lock, checkpoint or log.
"""

import argparse
import contextlib
import json
import math
import os
import sys
import tempfile
import time
from statistics import fmean, pstdev
from types import SimpleNamespace

from train.base.cli import run_command
from train.base.errors import Stopped, UsageError
from train.base.files import write_text
from train.config import load_argv
from train.options.loss_svg import COLORS
from train.robust import run_reporting_errors
from train.tools.plot import save_figure
from train.train import Trainer, open_trainer

MEMORY = 0.9    # of the running mean of the loss that tells divergence
DIVERGED = 4.0  # times the best running mean ends the sweep
SHARE = 0.03    # of the sweep, to both sides, smooths it: a mean that looks back lags behind
QUIET = 3.0     # seconds between lines about a sweep


class Sweep(Trainer):
    """The run itself, but each step at a rate of its own, with its loss kept and not judged."""

    def open_log(self, precision):
        """No files, and of what a run says only its warnings."""
        return contextlib.nullcontext(SimpleNamespace(info=lambda text: None, warn=print))

    def sweep(self, rates):
        """One optimizer step at each of `rates` until the loss diverges: {lr: list, loss: list}."""
        self.found, self.smooth, self.best, told = dict(lr=[], loss=[]), 0.0, math.inf, -math.inf
        for it, lr in enumerate(rates):
            stop, _ = self.signals.agree(self.ranks)
            if stop:
                raise Stopped(stop)
            self.plateau.scale = lr / self.config.learning_rate  # of a constant schedule
            self.train_step()
            if self.progress.iter_num == it:
                continue  # asked to stop meanwhile
            if len(self.found["lr"]) <= it or self.smooth > DIVERGED * self.best:
                break
            if self.ranks.is_main and time.monotonic() - told > QUIET:
                print(f"step {it + 1} of {len(rates)}: learning rate {lr:.2g}, "
                      f"loss {self.found['loss'][-1]:.4f}", flush=True)
                told = time.monotonic()
        return self.found

    def check(self, it, lr, sums, norm):
        loss = float(sums["loss"]) / max(1.0, float(sums["count"]))
        if not math.isfinite(loss) or not (math.isfinite(norm) or self.scaler.is_enabled()):
            return "skip"
        self.found["lr"].append(lr)
        self.found["loss"].append(loss)
        mean = MEMORY * self.smooth + (1 - MEMORY) * loss if it else loss
        self.smooth, self.best = mean, min(self.best, mean)
        return "update"


def find_lr(config, low=1e-7, high=1.0, steps=100):
    """Sweep the learning rate of `config` (a TrainConfig) from `low` to `high` in `steps` optimizer
    steps, each a constant factor above the one before; lists lr and loss, and what suggest()
    says of them, as a dict."""
    rates = [low * (high / low) ** (i / (steps - 1)) for i in range(steps)]
    with tempfile.TemporaryDirectory() as folder:
        config = config.replace(out_dir=folder, resume="auto", tracker=[], eval_interval=0,
                            lr_schedule="constant", warmup_iters=0, warmup_ratio=None,
                            warmup_epochs=None, max_epochs=None, early_stopping_metric="val_loss")
        with open_trainer(config, kind=Sweep) as run:
            found = run.sweep(rates)
    return found | suggest(found["lr"], found["loss"], high)


def suggest(rates, losses, high):
    """dict(smoothed, suggestion, range, why) of a sweep up to `high`. suggestion: the rate at which
    the smoothed loss falls fastest; range: (from, to) around it, where it falls at least half as
    fast. Both are None where the loss has no clear minimum; `why` is the reason."""
    half = max(1, int(SHARE * len(losses)))
    smoothed = [fmean(losses[max(0, i - half):i + half + 1]) for i in range(len(losses))]
    found = dict(smoothed=smoothed, suggestion=None, range=None, why=None)
    if len(losses) < 10:
        return found | dict(why=f"the loss diverged within {len(losses)} steps; start lower "
                                "(--from)")
    start, least = fmean(losses[:max(3, len(losses) // 20)]), min(smoothed)
    # 95% of the fall, not the minimum: a language model's loss may stay at that of the bare token
    # frequencies for decades of rates before it diverges.
    bottom = next(i for i, y in enumerate(smoothed) if y <= start - 0.95 * (start - least))
    noise = pstdev(a - b for a, b in zip(losses[:bottom + 10], smoothed, strict=False))
    if start - least <= 2 * noise:
        return found | dict(why=f"the loss fell by {max(0.0, start - least):.2g} in all, which is "
                                "within its noise; try a larger batch, or a sweep from lower or "
                                "to higher rates (--from, --to)")
    last = len(losses) - 1
    if bottom > 0.9 * last and rates[last] > 0.999 * high:
        return found | dict(why=f"the loss was still falling at {high:.2g}; go higher (--to)")
    slopes = [smoothed[min(i + half, last)] - smoothed[max(i - half, 0)]
              for i in range(bottom + 1)]
    first = end = at = slopes.index(min(slopes))  # rates are in equal steps of their logarithm
    while first > 0 and slopes[first - 1] <= slopes[at] / 2:
        first -= 1
    while end < bottom and slopes[end + 1] <= slopes[at] / 2:
        end += 1
    return found | dict(suggestion=rates[at], range=(rates[first], rates[end]))


def draw_sweep(axes, found):
    """Draw the loss over the learning rate and the suggestion."""
    axes.set_xscale("log")
    axes.plot(found["lr"], found["loss"], color=COLORS[0], alpha=0.35)
    axes.plot(found["lr"], found["smoothed"], color=COLORS[0], label="smoothed loss")
    if found["suggestion"] is None:
        axes.plot([], [], " ", label="no clear minimum")
        return
    low, high = found["range"]
    axes.axvspan(low, high, color=COLORS[2], alpha=0.15,
                 label=f"at least half as fast: {low:.2g} to {high:.2g}")
    axes.axvline(found["suggestion"], color=COLORS[2], linestyle="--",
                 label=f"falls fastest: {found['suggestion']:.2g}")


def report(found, config):
    """Write lr_finder.json and lr_finder.svg into out_dir and say what was found."""
    where = os.path.join(config.out_dir, "lr_finder.svg")
    write_text(where.replace(".svg", ".json"), json.dumps(found))
    if not (found["lr"] and save_figure(where, lambda axes: draw_sweep(axes, found),
                                        "Learning-rate sweep", "learning rate", "loss")):
        where = where.replace(".svg", ".json")
    if found["suggestion"] is None:
        return print(f"No clear minimum: {found['why']}. See {where}")
    low, high = found["range"]
    advice = f"--learning_rate {found['suggestion']:.2g}"
    if config.optimizer == "muon":  # the sweep moved both rates together
        advice += f" --muon_lr {config.muon_lr * found['suggestion'] / config.learning_rate:.2g}"
    print(f"The loss falls fastest at {found['suggestion']:.2g}, and at least half as fast from "
          f"{low:.2g} to {high:.2g}.\nTry {advice}; see {where}")


def main(argv=None):
    """Run the command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m train.tools.lr_finder", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawTextHelpFormatter, epilog="All else: as run_train.py.")
    parser.add_argument("--from", dest="low", type=float, default=1e-7, help="(%(default)g)")
    parser.add_argument("--to", dest="high", type=float, default=1.0, help="(%(default)g)")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (%(default)s)")
    return run_command(parser, sweep_and_tell, argv, load=load_argv)


def sweep_and_tell(args, config):
    """What the command line asks for; the exit code."""
    if not (0 < args.low < args.high <= 100 and args.steps >= 10):
        raise UsageError("expected 0 < --from < --to <= 100, and --steps of at least 10")
    os.makedirs(config.out_dir, exist_ok=True)

    def job(config):
        found = find_lr(config, args.low, args.high, args.steps)
        if os.environ.get("RANK", "0") == "0":
            report(found, config)
    return run_reporting_errors(config, job)


if __name__ == "__main__":
    sys.exit(main())
