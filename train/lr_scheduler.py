"""The learning rate: a pure function of the step, so that a resumed run needs no schedule state.

Only `plateau` reacts to the validation loss; what it remembers is saved in the checkpoint.
"""

import math
from dataclasses import replace

from train.early_stopping import EarlyStopping


def get_lr(it, config):
    """Learning rate of step `it` (0-based). `config` is a TrainConfig after resolve_lengths().

    Warm-up is linear, learning_rate * (it + 1) / (warmup_iters + 1); then the schedule runs to
    min_lr at lr_decay_iters and stays there (cosine: arXiv:1608.03983; wsd: arXiv:2404.06395).
    """
    c = config
    if it < c.warmup_iters:
        return c.learning_rate * (it + 1) / (c.warmup_iters + 1)
    if c.lr_schedule in ("constant", "plateau"):
        return c.learning_rate
    if c.lr_schedule == "step":
        drops = (it - c.warmup_iters) // (c.step_iters or max(1, c.max_iters // 3))
        return max(c.min_lr, c.learning_rate * c.lr_factor ** drops)
    if it >= c.lr_decay_iters:
        return c.min_lr
    return c.min_lr + _shape(it, c) * (c.learning_rate - c.min_lr)


def _shape(it, c):
    """From 1 after the warm-up to 0 at lr_decay_iters."""
    if c.lr_schedule == "wsd":  # warm-up, stable, decay: linear over the last part of the run
        return min(1.0, (c.lr_decay_iters - it) / max(1.0, c.wsd_decay * c.lr_decay_iters))
    progress = (it - c.warmup_iters) / (c.lr_decay_iters - c.warmup_iters)
    if c.lr_schedule == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def resolve_lengths(config, tokens_per_epoch):
    """`config` with what is given in epochs, as a ratio or not at all as steps and rates."""
    c = config
    steps = tokens_per_epoch / c.tokens_per_step  # steps an epoch, not rounded
    max_iters = c.max_iters if c.max_epochs is None else max(1, math.ceil(c.max_epochs * steps))
    warmup = c.warmup_iters
    if c.warmup_epochs is not None:
        warmup = round(c.warmup_epochs * steps)
    if c.warmup_ratio is not None:
        warmup = round(c.warmup_ratio * max_iters)
    return replace(
        c, max_iters=max_iters, warmup_iters=warmup,
        lr_decay_iters=c.lr_decay_iters if c.lr_decay_iters is not None else max(1, max_iters),
        min_lr=c.min_lr if c.min_lr is not None else c.learning_rate / 10,
        save_interval=c.save_interval if c.save_interval is not None else c.eval_interval)


class ReduceOnPlateau:
    """Multiplies the learning rate by `factor` after `patience` evaluations that were no better."""

    def __init__(self, factor=0.5, patience=5):
        self.factor, self.scale = factor, 1.0
        self.waiting = EarlyStopping(patience + 1)

    def update(self, value):
        """Take in an evaluation; true if the rate was just reduced."""
        if not self.waiting.update(value):
            return False
        self.scale *= self.factor
        self.waiting.bad = 0
        return True

    def state_dict(self):
        return dict(scale=self.scale, waiting=self.waiting.state_dict())

    def load_state_dict(self, state):
        self.scale = state["scale"]
        self.waiting.load_state_dict(state["waiting"])
