"""The learning rate as a function of the step, and three detectors over a series of losses, whose
state is saved in the checkpoint: early stopping, the plateau schedule, loss spikes."""

import collections
import math


def get_lr(it: int, config) -> float:
    """Return the learning rate of step `it` (0-based): a linear warm-up, then the schedule. Cosine
    (arXiv:1608.03983), linear and wsd (arXiv:2404.06395) reach min_lr at lr_decay_iters."""
    c = config
    warmup, end, min_lr = milestones(c)
    if it < warmup:  # + 1: the first step learns, and the step after the warm-up has the peak
        return c.learning_rate * (it + 1) / (warmup + 1)
    if c.lr_schedule in ("constant", "none", "plateau"):
        return c.learning_rate
    if c.lr_schedule == "step":
        drops = (it - warmup) // (c.step_iters or max(1, c.max_iters // 3))
        return max(min_lr, c.learning_rate * c.lr_factor ** drops)
    if it >= end:
        return min_lr
    # coeff falls from 1 after the warm-up to 0 at the end.
    decay_ratio = (it - warmup) / (end - warmup)
    if c.lr_schedule == "wsd":  # warm-up, stable, decay: linear over the last part of the run
        coeff = min(1.0, (end - it) / max(1.0, min(c.wsd_decay * end, end - warmup)))
    elif c.lr_schedule == "linear":
        coeff = 1.0 - decay_ratio
    else:
        coeff = 0.5 * (1.0 + math.cos(math.pi * decay_ratio))
    return min_lr + coeff * (c.learning_rate - min_lr)


def milestones(config):
    """Return (steps of warm-up, step at which the decay ends, final rate)."""
    c = config  # the default of a missing key depends on other keys
    warmup = c.warmup_iters if c.warmup_ratio is None else round(c.warmup_ratio * c.max_iters)
    end = max(1, c.max_iters) if c.lr_decay_iters is None else c.lr_decay_iters
    return warmup, end, c.learning_rate / 10 if c.min_lr is None else c.min_lr


class EarlyStopping:
    """Stop after `patience` evaluations in a row without an improvement by more than `min_delta`.
    mode: "min" if the value should fall, "max" if it should rise."""

    def __init__(self, patience: int = 7, min_delta: float = 0.0, mode: str = "min"):
        if mode not in ("min", "max"):
            raise ValueError(f"EarlyStopping: mode must be min or max, got {mode!r}")
        self.patience = patience
        self.min_delta = min_delta
        self.sign = 1 if mode == "min" else -1
        self.best = math.inf  # signed: lower is better
        self.bad_evals = 0    # in a row

    def update(self, value: float) -> bool:
        """Add an evaluation's value; return True to stop."""
        # Smaller gains than min_delta do not count, so `best` may be above the lowest value.
        if self.sign * value < self.best - self.min_delta:
            self.best = self.sign * value
            self.bad_evals = 0
        else:
            self.bad_evals += 1
        return self.over

    @property
    def over(self):
        return 0 < self.patience <= self.bad_evals

    def state_dict(self):
        return dict(best=self.best, bad=self.bad_evals)

    def load_state_dict(self, state):
        self.best = state["best"]
        self.bad_evals = state["bad"]


class ReduceOnPlateau:
    """Scale of the learning rate, multiplied by `factor` after more than `patience` evaluations in
    a row without an improvement (like PyTorch's ReduceLROnPlateau), but never below `min_scale`."""

    def __init__(self, factor=0.5, patience=5, min_scale=0.0):
        self.factor = factor
        self.min_scale = min_scale
        self.scale = 1.0
        self.counter = EarlyStopping(patience + 1)

    def update(self, value):
        """Add an evaluation's loss; return True if the rate was reduced."""
        if not self.counter.update(value):
            return False
        self.counter.bad_evals = 0  # count from zero for the next drop
        previous = self.scale
        self.scale = max(self.min_scale, self.scale * self.factor)
        return self.scale < previous

    def state_dict(self):
        return dict(scale=self.scale, waiting=self.counter.state_dict())

    def load_state_dict(self, state):
        self.scale = state["scale"]
        self.counter.load_state_dict(state["waiting"])


class SpikeDetector:
    """Detects a loss more than `sigma` standard deviations above the mean of the last `window`
    normal losses (OLMo 2's criterion, arXiv:2501.00656), once half of the window is filled."""

    def __init__(self, sigma=6.0, window=128):
        self.sigma = sigma
        self.losses = collections.deque(maxlen=window)

    def update(self, loss):
        """Return whether `loss` is a spike; otherwise add it to the window."""
        if len(self.losses) >= self.losses.maxlen // 2:
            mean = sum(self.losses) / len(self.losses)
            deviation = math.sqrt(sum((x - mean) ** 2 for x in self.losses) / len(self.losses))
            if not loss <= mean + self.sigma * max(deviation, 1e-3 * abs(mean)):
                return True
        self.losses.append(loss)
        return False

    def state_dict(self):
        return list(self.losses)

    def load_state_dict(self, losses):
        self.losses = collections.deque(losses, maxlen=self.losses.maxlen)
