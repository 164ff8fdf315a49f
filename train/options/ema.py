"""A running average of the weights (the key ema), evaluated beside them as val_NAME_ema."""

import contextlib

import torch


class Average:
    """The running averages of the parameters of `optimizer`. They stand in its state, so they are
    sharded, saved and resumed with it."""

    def __init__(self, optimizer, decay):
        self.state, self.decay = optimizer.state, decay

    @torch.no_grad()
    def update(self, it):
        """Take in the weights after step `it`. At first new weights count more than the decay says,
        so that what a run began with is soon forgotten (as in TensorFlow's
        ExponentialMovingAverage)."""
        params = [p for p in self.state if self.state[p]]  # those that were updated
        for p in params:
            if "ema" not in self.state[p]:
                self.state[p]["ema"] = p.detach().clone()
        averages = [self.state[p]["ema"] for p in params]
        torch._foreach_lerp_(averages, params, 1 - min(self.decay, (1 + it) / (10 + it)))

    def beside(self, evaluate):
        """{NAME: number} of evaluate(), and with it {NAME_ema: number} of the averages; None where
        one of the two was asked to stop."""
        found = evaluate()
        if found is None:
            return None
        with self.in_place():
            of_average = evaluate()
        return of_average and found | {f"{n}_ema": v for n, v in of_average.items()}

    @contextlib.contextmanager
    def in_place(self):
        """Context in which the parameters have their averages for values."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @torch.no_grad()
    def swap(self):
        for p, own in self.state.items():
            if "ema" in own:  # in place: what is sharded or compiled holds on to p
                kept = p.detach().clone()
                p.copy_(own["ema"])
                own["ema"].copy_(kept)
