"""Has a number stopped improving?"""

import math


class EarlyStopping:
    """update(value) is true once `patience` values in a row did not better the best by more than
    `min_delta`. mode: "min" if the value should fall, "max" if it should rise."""

    def __init__(self, patience=7, min_delta=0.0, mode="min"):
        if mode not in ("min", "max"):
            raise ValueError(f"EarlyStopping: mode must be min or max, got {mode!r}")
        self.patience, self.min_delta, self.sign = patience, min_delta, 1 if mode == "min" else -1
        self.best, self.bad = math.inf, 0

    def update(self, value):
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
