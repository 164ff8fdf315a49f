"""Exponential moving average (EMA) of the weights (key: ema), evaluated as val_NAME_ema."""

import torch

from train.evaluate import join_numbers


class Average:
    """Exponential moving average (EMA) of the parameters of `optimizer`, a torch.optim.Optimizer:
    average = decay * average + (1 - decay) * parameter. The average of parameter p is
    optimizer.state[p]["ema"], so that it is sharded, saved and resumed with the state of the
    optimizer. It is float32 if p has 16 bits, in which small updates would be lost to rounding.
    Call update(it) after each optimizer step, evaluate() for an evaluation."""

    def __init__(self, optimizer, decay):
        self.optimizer = optimizer
        self.state = optimizer.state
        self.decay = decay

    @torch.no_grad()
    def update(self, it):
        """Update the averages with the current parameters, after the optimizer step `it` (0-based)
        and before zero_grad(): parameters without a gradient are skipped. The first update of a
        parameter copies it. The decay of this update is min(decay, (1 + it) / (10 + it)), so that
        early weights are soon forgotten (as in TensorFlow)."""
        groups = self.optimizer.param_groups
        params = [p for group in groups for p in group["params"] if p.grad is not None]
        for p in params:
            if "ema" not in self.state[p]:
                dtype = torch.promote_types(p.dtype, torch.float32)
                self.state[p]["ema"] = p.detach().to(dtype, copy=True)
        averages = [self.state[p]["ema"] for p in params]
        params = [p.to(average.dtype) for p, average in zip(params, averages)]
        torch._foreach_lerp_(averages, params, 1 - min(self.decay, (1 + it) / (10 + it)))

    def evaluate(self, evaluate_weights):
        """Call evaluate_weights() with the weights in the model, then with the averages in place of
        the weights, which are restored afterwards. evaluate_weights() returns {NAME: number}, or
        `None` if a signal stopped the evaluation. Return {NAME: number, NAME_ema: number}, or
        `None` if one of the results is `None`. Raises SetupError if the model already has a number
        NAME_ema."""
        numbers = evaluate_weights()
        if numbers is None:
            return None
        averages = {p: entry["ema"] for p, entry in self.state.items() if "ema" in entry}
        weights = {p: p.detach().clone() for p in averages}  # in place of the gradients' memory
        try:
            assign(averages)
            of_average = evaluate_weights()
        finally:
            assign(weights)
        return of_average and join_numbers(
            numbers, {f"{name}_ema": v for name, v in of_average.items()}, "ema")


@torch.no_grad()
def assign(values):
    """Copy the tensors in `values` {parameter: tensor} into the parameters, in place, because
    sharded and compiled models hold references to them."""
    for p, value in values.items():
        p.copy_(value)
