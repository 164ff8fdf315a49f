"""Replacement of a model's linear layers by layers for decoding (model/core/quantize.py)."""

import torch.nn as nn

from model.core.adapters import LoRALinear
from model.core.ops import FusedLinear
from model.core.quantize import Int8Linear, PackedLinear
from model.gpt import MLP, Attention


def pack_model(model):
    """Replace the linear layers of `model`, in place, by PackedLinear, with q, k, v and gate, up
    fused. The outputs do not change; the model can no longer be trained."""
    return replace_linear_layers(model, PackedLinear)


def quantize_model(model):
    """Replace the linear layers of `model`, in place, by Int8Linear, with q, k, v and gate, up
    fused: a quarter of float32's memory."""
    return replace_linear_layers(model, Int8Linear)


def replace_linear_layers(model, linear_class):
    """Replace every linear layer of `model` by a `linear_class`; return the model."""
    replace_children(model.requires_grad_(False), linear_class)
    if model.lm_head is None:  # tied: the embedding is kept for the input tokens
        model.lm_head = linear_class(model.wte)
    return model


def replace_children(module, linear_class):
    """Replace the linear layers below `module`. Experts of a mixture are no linear layers and are
    kept."""
    for name, child in module.named_children():
        if isinstance(child, Attention):
            child.q = fuse_layers(linear_class, child.q, child.k, child.v)
            child.k = child.v = None
            child.o = linear_class(child.o)
        elif isinstance(child, MLP) and hasattr(child, "gate"):
            child.gate = fuse_layers(linear_class, child.gate, child.up)
            child.up, child.down = None, linear_class(child.down)
        elif (type(child).forward is nn.Linear.forward
              or isinstance(child, LoRALinear)):  # its .weight is merged
            setattr(module, name, linear_class(child))
        else:
            replace_children(child, linear_class)


def fuse_layers(linear_class, *layers):
    """Return the layers as one `linear_class`, for model.core.ops.fused_linear."""
    return FusedLinear(linear_class(*layers), [m.out_features for m in layers])
