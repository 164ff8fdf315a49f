"""torch.optim.AdamW without the import of the compiler."""

import torch


def undecorated(method):
    """Return the function inside a decorated `method`, without the wrappers that functools.wraps
    marks."""
    while hasattr(method, "__wrapped__"):
        method = method.__wrapped__
    return method


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW without the decorators that exclude it from torch.compile: they import the
    compiler, 1 to 2 s at every start, and this optimizer is never compiled."""
    add_param_group = undecorated(torch.optim.AdamW.add_param_group)
    zero_grad = undecorated(torch.optim.AdamW.zero_grad)
    step = torch.no_grad()(undecorated(torch.optim.AdamW.step))
