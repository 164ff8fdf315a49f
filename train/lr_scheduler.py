"""The learning rate, a pure function of the step, and what reacts to evaluations: the plateau
schedule and early stopping, whose memory is saved in the checkpoint."""

import math


def get_lr(it: int, config) -> float:
    """Learning rate of step `it` (0-based).

    Warm-up is linear, learning_rate * (it + 1) / (warmup + 1). Then cosine, linear and wsd run to
    min_lr at lr_decay_iters and stay there (cosine: arXiv:1608.03983; wsd: arXiv:2404.06395).
    """
    c, (warmup, end, final) = config, milestones(config)
    if it < warmup:  # + 1: the first step learns, and the step after the warm-up has the peak
        return c.learning_rate * (it + 1) / (warmup + 1)
    if c.lr_schedule in ("constant", "none", "plateau"):
        return c.learning_rate
    if c.lr_schedule == "step":  # a factor after every so many steps
        drops = (it - warmup) // (c.step_iters or max(1, c.max_iters // 3))
        return max(final, c.learning_rate * c.lr_factor ** drops)
    if it >= end:
        return final
    # `share` of the way from the peak to the end that is left: 1 after the warm-up, 0 at the end.
    progress = (it - warmup) / (end - warmup)
    if c.lr_schedule == "wsd":  # warm-up, stable, decay: linear over the last part of the run
        length = min(c.wsd_decay * end, end - warmup)
        share = min(1.0, (end - it) / max(1.0, length))
    elif c.lr_schedule == "linear":
        share = 1.0 - progress
    else:
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return final + share * (c.learning_rate - final)


def milestones(config):
    """(steps of warm-up, step at which the decay ends, rate from there on): where a key is left
    out, its default depends on another one."""
    c = config
    warmup = c.warmup_iters if c.warmup_ratio is None else round(c.warmup_ratio * c.max_iters)
    end = max(1, c.max_iters) if c.lr_decay_iters is None else c.lr_decay_iters
    return warmup, end, c.learning_rate / 10 if c.min_lr is None else c.min_lr


class EarlyStopping:
    """update(value) is true once `patience` values in a row did not better the best by more than
    `min_delta`. mode: "min" if the value should fall, "max" if it should rise."""

    def __init__(self, patience: int = 7, min_delta: float = 0.0, mode: str = "min"):
        if mode not in ("min", "max"):
            raise ValueError(f"EarlyStopping: mode must be min or max, got {mode!r}")
        self.patience, self.min_delta, self.sign = patience, min_delta, 1 if mode == "min" else -1
        self.best, self.bad = math.inf, 0  # best is signed: lower is better

    def update(self, value: float) -> bool:
        # Gains of less than min_delta do not count, so `best` need not be the least so far.
        if self.sign * value < self.best - self.min_delta:
            self.best, self.bad = self.sign * value, 0
        else:
            self.bad += 1
        return self.over

    @property
    def over(self):
        return 0 < self.patience <= self.bad

    def state_dict(self):
        return dict(best=self.best, bad=self.bad)

    def load_state_dict(self, state):
        self.best, self.bad = state["best"], state["bad"]


class ReduceOnPlateau:
    """A scale of the learning rate, multiplied by `factor` after more than `patience` evaluations
    in a row that were no better (PyTorch's ReduceLROnPlateau), down to `least`."""

    def __init__(self, factor=0.5, patience=5, least=0.0):
        self.factor, self.least, self.scale = factor, least, 1.0
        self.waiting = EarlyStopping(patience + 1)

    def update(self, value):
        """Take in an evaluation; true if the rate was just reduced."""
        if not self.waiting.update(value):
            return False
        # `least` keeps the rate above min_lr; there the scale stays, and nothing is said.
        before, self.waiting.bad = self.scale, 0  # as many evaluations again before the next drop
        self.scale = max(self.least, self.scale * self.factor)
        return self.scale < before

    def state_dict(self):
        return dict(scale=self.scale, waiting=self.waiting.state_dict())

    def load_state_dict(self, state):
        self.scale = state["scale"]
        self.waiting.load_state_dict(state["waiting"])
