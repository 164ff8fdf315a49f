"""Initial values as a pure function of (seed, parameter name).

A sharded model can therefore be initialised one tensor at a time, and gets bit for bit the same
values as the unsharded one.
"""

import torch


def fill(model, seed, filled=()):
    """Initialise `model` in place: set each tensor of model.state_dict(), i.e. parameters and
    persistent buffers, to the result of model.initial(name, shape, seed). If the result is `None`,
    the value from __init__ is kept. Names in `filled` and tensors on the meta device are not set.

    Return the set of all names in the state dict. A later call, after modules were added to the
    model, sets only the new ones if it gets this set as `filled`.
    """
    tensors = model.state_dict()
    for name, tensor in tensors.items():
        if name in filled or tensor.is_meta:
            continue
        value = model.initial(name, tensor.shape, seed)
        if value is not None:
            tensor.copy_(value)
    return set(tensors)


def normal(name, shape, std, seed):
    """Return a float32 tensor of `shape` with random values from a normal distribution with mean 0
    and standard deviation `std`: a pure function of the four arguments. name: of the parameter."""
    generator = torch.Generator().manual_seed(stable_hash(seed, name))
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def stable_hash(seed, name):
    """Return a non-negative int below 2^63, a hash of the integer `seed` and the text `name`. It is
    the same on every machine and in every process, unlike Python's hash()."""
    h = 0xCBF29CE484222325 ^ seed
    for byte in name.encode():
        h = ((h ^ byte) * 0x100000001B3) % 2**64  # FNV-1a
    return h >> 1
