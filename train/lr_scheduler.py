"""The learning rate as a function of the step; early stopping, plateau schedule, loss spikes."""

import collections
import math
from dataclasses import dataclass, fields

from train.base.keys import LearningRateKeys, TrainConfig

OTHER_NAMES = dict(warmup_steps="warmup_iters", max_steps="max_iters")


def get_lr(it: int, args) -> float:
    """Return the learning rate of step `it` (0-based): linear warm-up, then lr_schedule.

    cosine (arXiv:1608.03983), linear and wsd (constant, then linear in the last part,
    arXiv:2404.06395) reach min_lr (default: a tenth of the peak) at step lr_decay_iters (default:
    max_iters) and stay there; step multiplies by lr_factor every step_iters steps (default:
    max_iters // 3) after the warm-up, down to min_lr. The others are constant; for plateau, the
    caller multiplies by ReduceOnPlateau.scale. args: a TrainConfig, or as for read_schedule().
    """
    c = args if isinstance(args, TrainConfig) else read_schedule(args)
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
    decay_ratio = (it - warmup) / (end - warmup)  # from 0 to 1; the shapes fall from 1 to 0
    shapes = dict(
        cosine=0.5 * (1.0 + math.cos(math.pi * decay_ratio)), linear=1.0 - decay_ratio,
        wsd=min(1.0, (end - it) / max(1.0, min(c.wsd_decay * end, end - warmup))))
    return min_lr + shapes[c.lr_schedule] * (c.learning_rate - min_lr)


def read_schedule(args):
    """Return a TrainConfig with the learning rate keys of `args`, e.g. another program's options.

    Required are learning_rate, warmup_iters or warmup_steps, and max_iters or max_steps; KeyError
    without them. Other attributes than learning rate keys are ignored.
    """
    values = {OTHER_NAMES.get(name, name): value for name, value in vars(args).items()}
    keys = {f.name: values[f.name] for f in fields(LearningRateKeys) if f.name in values}
    required = {name: values[name] for name in ("learning_rate", "warmup_iters", "max_iters")}
    return TrainConfig(**keys | required)


def milestones(c):
    """Return (warm-up steps, step at which the decay ends, final learning rate), with defaults."""
    warmup = c.warmup_iters if c.warmup_ratio is None else round(c.warmup_ratio * c.max_iters)
    end = max(1, c.max_iters) if c.lr_decay_iters is None else c.lr_decay_iters
    return warmup, end, c.learning_rate / 10 if c.min_lr is None else c.min_lr


@dataclass
class EarlyStopping:
    """Early stopping after `patience` evaluations in a row without a gain above `min_delta`.

    patience: 0 for never. mode: "min" if lower values are better, else "max". best_loss: the value
    to improve on, negated for "max". counter: evaluations since the last improvement.
    """
    patience: int = 7
    min_delta: float = 0.0
    best_loss: float = math.inf
    counter: int = 0
    mode: str = "min"

    def __post_init__(self):
        self.sign = {"min": 1, "max": -1}[self.mode]

    def check(self, val_loss: float) -> bool:
        """Add the metric of an evaluation, by default the loss; return whether to stop."""
        # Smaller gains than min_delta do not count: best_loss may be above the lowest value.
        if self.sign * val_loss < self.best_loss - self.min_delta:
            self.best_loss = self.sign * val_loss
            self.counter = 0
        else:
            self.counter += 1
        return self.over

    @property
    def over(self):
        return 0 < self.patience <= self.counter

    def state_dict(self):
        return dict(best=self.best_loss, bad=self.counter)

    def load_state_dict(self, state):
        self.best_loss = float(state["best"])
        self.counter = int(state["bad"])


class ReduceOnPlateau:
    """A factor of the learning rate, `scale`, that is reduced when the loss stops improving.

    update(loss) multiplies it by `factor` after more than `patience` evaluations without a new
    lowest loss, down to `min_scale`, like PyTorch's ReduceLROnPlateau with threshold=0.
    """

    def __init__(self, factor=0.5, patience=5, min_scale=0.0):
        self.factor = factor
        self.min_scale = min_scale
        self.scale = 1.0
        self.waiting = EarlyStopping(patience + 1)

    def update(self, value):
        """Add the loss of an evaluation; return whether `scale` was reduced."""
        if not self.waiting.check(value):
            return False
        self.waiting.counter = 0  # count from zero for the next drop
        previous = self.scale
        self.scale = max(self.min_scale, self.scale * self.factor)
        return self.scale < previous

    def state_dict(self):
        return dict(scale=self.scale, waiting=self.waiting.state_dict())

    def load_state_dict(self, state):
        self.scale = float(state["scale"])
        self.waiting.load_state_dict(state["waiting"])


class SpikeDetector:
    """Detector of loss spikes by OLMo 2's criterion (arXiv:2501.00656).

    A spike is more than `sigma` standard deviations, at least 0.1% of the mean each, above the mean
    of the last `window` normal losses. None is detected before half of the window is filled, or
    while it has losses of both signs, as with GRPO.
    """

    def __init__(self, sigma=6.0, window=128):
        self.sigma = sigma
        self.losses = collections.deque(maxlen=window)

    def update(self, loss):
        """Return whether `loss` is a spike; otherwise add it to the window of normal losses."""
        if len(self.losses) >= self.losses.maxlen // 2 and min(self.losses) * max(self.losses) > 0:
            mean = sum(self.losses) / len(self.losses)
            deviation = math.sqrt(sum((x - mean) ** 2 for x in self.losses) / len(self.losses))
            if not loss <= mean + self.sigma * max(deviation, 1e-3 * abs(mean)):
                return True
        self.losses.append(loss)
        return False

    def state_dict(self):
        return list(self.losses)

    def load_state_dict(self, losses):
        self.losses = collections.deque(map(float, losses), maxlen=self.losses.maxlen)
