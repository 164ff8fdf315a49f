"""Find a learning rate: sweep it from tiny to too large and see where the loss falls fastest.

    python -m train.lr_finder [--config FILE.yaml] [--key value]... [--from 1e-7 --to 1 --steps 100]

Smith's range test (arXiv:1506.01186) with the run's own model, data and optimizer. It writes
out_dir/lr_finder.svg and lr_finder.json and touches nothing else there: no lock, checkpoint or log.
"""

import argparse
import json
import math
import os
import signal
import sys
from types import SimpleNamespace

from run_train import take_config
from train.chart import chart
from train.config import ConfigError, load_config
from train.logger import write_text
from train.plot import smooth

MEMORY = 0.9    # of the running mean of the loss that tells divergence
DIVERGED = 4.0  # times the best running mean ends the sweep
SHARE = 0.03    # of the sweep, to both sides, smooths it: a mean that looks back lags behind
TEXTS = dict(steepest="steepest descent", tenth="a tenth of the rate at the bottom")


def find_lr(config, low=1e-7, high=1.0, steps=100, log=print):
    """Sweep the learning rate of `config` (a TrainConfig) from `low` to `high` in `steps` optimizer
    steps, each a constant factor above the one before. Returns dict(lr, loss, smoothed: lists, and
    the rates steepest, tenth, suggestion). Raises ConfigError where the loss does not fall."""
    from train import distributed, resume
    from train.train import Trainer
    with distributed.process_group(config) as ranks, Trainer(config, ranks) as run:
        say = log if ranks.main else lambda message: None
        run.log = SimpleNamespace(info=say, warn=say, close=lambda status: None)  # no run folder
        run.build_model()
        if config.init_from != "scratch":
            resume.load_weights(run, config.init_from)
        run.build_optimizer(lambda message: None)
        if config.auto_batch:
            from train.auto_batch import fit_micro_batch
            fit_micro_batch(run)
        found = _sweep(run, [low * (high / low) ** (i / (steps - 1)) for i in range(steps)])
    return found | suggest(found["lr"], found["loss"])


def _sweep(run, rates):
    """One optimizer step at each of `rates`, until the loss diverges."""
    from train.distributed import seed_step
    from train.evaluate import asked_to_stop
    from train.guard import Stopped
    found, average, best = dict(lr=[], loss=[]), 0.0, math.inf
    for it, lr in enumerate(rates):
        if asked_to_stop(run):
            raise Stopped(run.signals.stop or signal.SIGTERM)
        for group in run.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (lr / run.config.learning_rate)
        seed_step(run.config.seed, it, run.ranks.rank)
        loss = run.forward_backward(it)
        loss, norm = run.collect(it, lr, loss, run.clip_gradients()).read()
        if not math.isfinite(loss) or not (math.isfinite(norm) or run.scaler.is_enabled()):
            break
        found["lr"].append(lr)
        found["loss"].append(loss)
        average = MEMORY * average + (1 - MEMORY) * loss
        mean = average / (1 - MEMORY ** (it + 1))  # without the pull of the start at 0
        best = min(best, mean)
        if mean > DIVERGED * best:
            break
        run.scaler.step(run.optimizer)
        run.scaler.update()
        run.optimizer.zero_grad(set_to_none=True)
    return found


def suggest(rates, losses):
    """dict(smoothed, steepest, tenth, suggestion) of a sweep: the rate where the smoothed loss
    falls fastest; a tenth of the rate where it reaches its bottom; and the one to try first."""
    smoothed = [y for _, y in smooth(list(enumerate(losses)), SHARE)]
    bottom = bottom_of(smoothed)
    if bottom < 2:
        raise ConfigError(["lr_finder: the loss did not fall during the sweep; start lower "
                           "(--from), go higher (--to) or take more --steps"])
    slopes = [smoothed[i + 1] - smoothed[i - 1] for i in range(1, bottom)]
    steepest = rates[1 + slopes.index(min(slopes))]  # equal steps of log(rate)
    return dict(smoothed=smoothed, steepest=steepest, tenth=rates[bottom] / 10, suggestion=steepest)


def bottom_of(losses):
    """Index at which 95% of the fall is done. Not the minimum: a language model's loss may stay at
    that of the bare token frequencies for decades of rates before it diverges."""
    enough = losses[0] - 0.95 * (losses[0] - min(losses)) if losses else 0.0
    return next((i for i, loss in enumerate(losses) if loss <= enough), 0)

def picture(found):
    """The sweep as an SVG: loss by learning rate, on a logarithmic axis, and the suggestions."""
    logs = [math.log10(lr) for lr in found["lr"]]

    def points(key):
        return [(x - logs[0], y) for x, y in zip(logs, found[key], strict=True)]
    powers = range(math.ceil(logs[0] - 1e-9), math.floor(logs[-1] + 1e-9) + 1)
    marks = [(math.log10(found[key]) - logs[0], f"{text}: {found[key]:.2g}")
             for key, text in TEXTS.items() if found[key] >= found["lr"][0]]
    return chart("Learning-rate sweep", "learning rate", "loss",
                 [(p - logs[0], f"1e{p}") for p in powers] or [(0.0, f"{found['lr'][0]:.2g}")],
                 [("", 0, "raw", points("loss")), ("smoothed loss", 0, "bold", points("smoothed"))],
                 marks=marks)


def report(found, config):
    """Write lr_finder.json and lr_finder.svg into out_dir and say what was found."""
    for name, text in (("json", json.dumps(found)), ("svg", picture(found))):
        write_text(os.path.join(config.out_dir, f"lr_finder.{name}"), text)
    for key, text in TEXTS.items():
        print(f"{text}: {found[key]:.2g}")
    advice = f"--learning_rate {found['suggestion']:.2g}"
    if config.optimizer == "muon":  # the sweep moved both rates together
        advice += f" --muon_lr {config.muon_lr * found['suggestion'] / config.learning_rate:.2g}"
    print(f"Try {advice}; see {os.path.join(config.out_dir, 'lr_finder.svg')}")


def main(argv=None):
    """Run the command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m train.lr_finder", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawTextHelpFormatter, epilog="All else: as run_train.py.")
    parser.add_argument("--from", dest="low", type=float, default=1e-7, help="(%(default)g)")
    parser.add_argument("--to", dest="high", type=float, default=1.0, help="(%(default)g)")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (%(default)s)")
    args, rest = parser.parse_known_args(argv)
    if not (0 < args.low < args.high <= 100 and args.steps >= 10):
        parser.error("expected 0 < --from < --to <= 100, and --steps of at least 10")
    try:
        config = load_config(*take_config(rest))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    from train.report import run_reporting_errors
    return run_reporting_errors(config, job=lambda c: sweep_and_tell(c, args))


def sweep_and_tell(config, args):
    from train.distributed import SetupError
    try:
        os.makedirs(config.out_dir, exist_ok=True)
    except OSError as error:
        raise SetupError(f"out_dir: {error}") from error
    found = find_lr(config, args.low, args.high, args.steps)
    if os.environ.get("RANK", "0") == "0":
        report(found, config)


if __name__ == "__main__":
    sys.exit(main())
