"""Exponential moving average (EMA) of the weights (key: ema), evaluated as val_NAME_ema."""

import torch

from train.evaluate import join_numbers


class Average:
    """EMA of an optimizer's parameters, kept in the optimizer's state ("ema"), so that it is
    sharded, saved and resumed with it. Call update(it) after each step, and evaluate()."""

    def __init__(self, optimizer, decay):
        self.optimizer = optimizer
        self.state = optimizer.state
        self.decay = decay

    @torch.no_grad()
    def update(self, it):
        """Add the weights after step `it` to the averages, of parameters that have a gradient. The
        decay starts low, so that the initial weights are soon forgotten (as in TensorFlow's
        ExponentialMovingAverage)."""
        groups = self.optimizer.param_groups
        params = [p for group in groups for p in group["params"] if p.grad is not None]
        for p in params:
            if "ema" not in self.state[p]:
                self.state[p]["ema"] = p.detach().clone()
        averages = [self.state[p]["ema"] for p in params]
        torch._foreach_lerp_(averages, params, 1 - min(self.decay, (1 + it) / (10 + it)))

    def evaluate(self, evaluate_weights):
        """Return {NAME: number} of evaluate_weights(), and {NAME_ema: number} of a second call with
        the averaged weights; None if either call returns None (stopped by a signal). Raises
        SetupError if a name is used twice."""
        numbers = evaluate_weights()
        if numbers is None:
            return None
        self.swap()
        try:
            of_average = evaluate_weights()
        finally:
            self.swap()
        return of_average and join_numbers(
            numbers, {f"{name}_ema": v for name, v in of_average.items()}, "ema")

    @torch.no_grad()
    def swap(self):
        """Exchange parameters and averages, in place; a second call restores the parameters."""
        for p, entry in self.state.items():
            if "ema" in entry:  # in place: sharded and compiled models hold references to p
                weights = p.detach().clone()
                p.copy_(entry["ema"])
                entry["ema"].copy_(weights)
