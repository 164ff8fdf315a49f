"""Initial values as a pure function of (seed, parameter name).

A sharded model can therefore be initialised one tensor at a time, and gets bit for bit the same
values as the unsharded one.
"""

import torch


def fill(model, seed, filled=()):
    """Set each tensor of model.state_dict() to model.initial(name, shape, seed); return all names.

    If initial() returns `None`, the value from __init__ is kept. Not set: names in `filled` (e.g.
    the result of a call before modules were added), and tensors on the meta device.
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
    """Return float32 values from N(0, std^2), a pure function of the four arguments."""
    generator = torch.Generator().manual_seed(stable_hash(seed, name))
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def stable_hash(seed, name):
    """Return a hash of (seed, name) from 0 to 2^63 - 1 that is the same in every process."""
    h = 0xCBF29CE484222325 ^ seed
    for byte in name.encode():
        h = ((h ^ byte) * 0x100000001B3) % 2**64  # FNV-1a
    return h >> 1
