"""Exponential moving average (EMA) of the weights (key: ema), evaluated as val_NAME_ema."""

import torch

from train.evaluate import join_numbers


class Average:
    """Exponential moving average (EMA) of the parameters of a torch.optim.Optimizer.

    average = decay * average + (1 - decay) * parameter, in optimizer.state[parameter]["ema"]: it is
    sharded, saved and resumed with the optimizer; float32 if the parameter has 16 bits.
    """

    def __init__(self, optimizer, decay):
        self.optimizer = optimizer
        self.state = optimizer.state
        self.decay = decay

    @torch.no_grad()
    def update(self, it):
        """Update the averages with the parameters after optimizer step `it` (0-based).

        Call it before zero_grad(): parameters without a gradient are skipped. The first update of a
        parameter copies it. The decay is min(decay, (1 + it) / (10 + it)), as in TensorFlow.
        """
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
        """Evaluate the model, then with averaged weights; return {NAME: number, NAME_ema: number}.

        evaluate_weights(): returns {NAME: number}, or `None` (then returned) after a signal.
        The weights are restored. Raises SetupError if it returns a NAME_ema itself.
        """
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
    """Copy {parameter: tensor} into the parameters, in place, as models hold references to them."""
    for p, value in values.items():
        p.copy_(value)
