"""Initial values as a pure function of (seed, parameter name).

A sharded model can therefore be filled one tensor at a time, and equals the unsharded one bit for
bit.
"""

import torch


def fill(model, seed, filled=()):
    """Initialise `model` in place: set each parameter and persistent buffer to model.initial(name,
    shape, seed), except names in `filled`, which an earlier call has set, and tensors on the meta
    device. Return the set of the names of all parameters and persistent buffers, also of those that
    were not set. As `filled` of a later call, it makes that call set only new names.

    If initial() returns None, the tensor keeps the value from the module's __init__.
    """
    tensors = model.state_dict()
    for name, tensor in tensors.items():
        value = None
        if name not in filled and not tensor.is_meta:
            value = model.initial(name, tensor.shape, seed)
        if value is not None:
            tensor.copy_(value)
    return set(tensors)


def normal(name, shape, std, seed):
    """Return a float32 tensor of `shape` with values of a normal distribution, of mean 0 and
    standard deviation std, for the parameter `name`: a pure function of the four arguments."""
    generator = torch.Generator().manual_seed(stable_hash(seed, name))
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def stable_hash(seed, name):
    """Return a hash of the integer `seed` and the string `name`, an int of 63 bits, the same on
    every machine; Python's hash() is salted."""
    h = 0xCBF29CE484222325 ^ seed
    for byte in name.encode():
        h = ((h ^ byte) * 0x100000001B3) % 2**64  # FNV-1a
    return h >> 1
