"""Find a learning rate: sweep it from tiny to too large and see where the loss falls fastest.

    python -m train.lr_finder [--config FILE.yaml] [--from 1e-7] [--to 1] [--steps 100] [--key value]...

Smith's range test (arXiv:1506.01186) with the run's own model, data and optimizer. It writes
out_dir/lr_finder.svg and lr_finder.json and touches nothing else there: no lock, checkpoint or log.
"""

import argparse
import json
import math
import os
import sys

from run_train import take_config
from train.config import ConfigError, load_config

SMOOTHING = 0.9  # of the loss, as an exponential average: single batches are noisy
DIVERGED = 4.0   # times the best smoothed loss ends the sweep


def find_lr(config, low=1e-7, high=1.0, steps=100, log=print):
    """Sweep the learning rate of `config` (a TrainConfig) from `low` to `high` in `steps` optimizer
    steps, each a constant factor above the one before. Returns dict(lr, loss, smoothed: lists, and
    the rates steepest, tenth, suggestion). Raises ConfigError where too few steps are finite."""
    from train import distributed, resume
    from train.train import Trainer
    with distributed.process_group(config) as ranks, Trainer(config, ranks) as run:
        run.log = _Voice(log, ranks.main)
        run.build_model()
        if config.init_from != "scratch":
            resume.load_weights(run, config.init_from)
        run.build_optimizer(lambda message: None)
        if config.auto_batch:
            from train.auto_batch import fit_micro_batch
            fit_micro_batch(run)
        found = _sweep(run, [low * (high / low) ** (i / (steps - 1)) for i in range(steps)])
    return found | suggest(found["lr"], found["smoothed"])


class _Voice:
    """What the trainer's parts say goes to `log`; there is no run folder to write to."""

    def __init__(self, log, main):
        self.info = self.warn = log if main else (lambda message: None)

    def close(self, status):
        pass


def _sweep(run, rates):
    """One optimizer step at each of `rates`, until the loss diverges."""
    from train.distributed import seed_step
    found, average, best = dict(lr=[], loss=[], smoothed=[]), 0.0, math.inf
    for it, lr in enumerate(rates):
        for group in run.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (lr / run.config.learning_rate)
        seed_step(run.config.seed, it, run.ranks.rank)
        loss = run.forward_backward(it)
        loss, norm = run.collect(it, lr, loss, run.clip_gradients()).read()
        if not math.isfinite(loss) or not (math.isfinite(norm) or run.scaler.is_enabled()):
            break
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        smoothed = average / (1 - SMOOTHING ** (it + 1))  # without the pull of the start at 0
        best = min(best, smoothed)
        for key, value in dict(lr=lr, loss=loss, smoothed=smoothed).items():
            found[key].append(value)
        if smoothed > DIVERGED * best:
            break
        run.scaler.step(run.optimizer)
        run.scaler.update()
        run.optimizer.zero_grad(set_to_none=True)
    return found


def suggest(rates, smoothed):
    """dict(steepest, tenth, suggestion) from a sweep: where the smoothed loss falls fastest over the
    logarithm of the rate, before its minimum; and a tenth of the rate of the minimum, which is the
    suggestion."""
    lowest = smoothed.index(min(smoothed)) if smoothed else 0
    if lowest < 2:
        raise ConfigError(["lr_finder: the loss did not fall during the sweep; start lower (--from), "
                           "take more --steps, or look at the data"])
    slopes = [smoothed[i + 1] - smoothed[i - 1] for i in range(1, lowest)]
    steepest = rates[1 + slopes.index(min(slopes))]
    return dict(steepest=steepest, tenth=rates[lowest] / 10, suggestion=rates[lowest] / 10)
