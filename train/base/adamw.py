"""torch.optim.AdamW without the import of the compiler."""

from inspect import unwrap

import torch


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW with the same arguments and results, without the decorators that exclude
    the methods from torch.compile: these import the compiler, which costs 1 to 2 s at every start.
    This optimizer is never compiled. The argument `differentiable` has no effect."""
    add_param_group = unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = unwrap(torch.optim.AdamW.zero_grad)
    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))
