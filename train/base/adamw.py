"""torch.optim.AdamW without the import of the compiler."""

from inspect import unwrap

import torch


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW without a slow import of torch.compile; `differentiable` has no effect."""
    add_param_group = unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = unwrap(torch.optim.AdamW.zero_grad)
    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))
