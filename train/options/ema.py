"""Exponential moving average (EMA) of the weights (key: ema), evaluated as val_NAME_ema."""

import torch

from train.evaluate import join_numbers


class Average:
    """EMA of the parameters of `optimizer`: average = decay * average + (1 - decay) * parameter. It
    is stored in the optimizer's state ("ema"), so that it is sharded, saved and resumed with that
    state. Call update(it) after each step, and evaluate() to evaluate the averaged weights."""

    def __init__(self, optimizer, decay):
        self.optimizer = optimizer
        self.state = optimizer.state
        self.decay = decay

    @torch.no_grad()
    def update(self, it):
        """Update the averages with the weights after step `it` (0-based), for parameters that have
        a gradient; the first time an average is a copy of the weights. The decay is at most
        (1 + it) / (10 + it), so that early weights are soon forgotten (as in TensorFlow)."""
        groups = self.optimizer.param_groups
        params = [p for group in groups for p in group["params"] if p.grad is not None]
        for p in params:
            if "ema" not in self.state[p]:
                self.state[p]["ema"] = p.detach().clone()
        averages = [self.state[p]["ema"] for p in params]
        torch._foreach_lerp_(averages, params, 1 - min(self.decay, (1 + it) / (10 + it)))

    def evaluate(self, evaluate_weights):
        """Call evaluate_weights() twice: with the weights, then with the averages in place of the
        weights. It returns {NAME: number} of the model, or `None` if a signal stopped it. Return
        {NAME: number, NAME_ema: number}, or `None` if a call returned `None`. SetupError if a name
        occurs twice."""
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
