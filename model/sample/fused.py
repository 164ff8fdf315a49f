"""A model whose linear layers are replaced by layers for decoding (model/core/quantize.py)."""

import torch.nn as nn
import torch.nn.functional as F

from model.core.quantize import Int8Linear, PackedLinear
from model.gpt import MLP, Attention, is_plain


def pack_model(model):
    """Replace the linear layers of `model`, in place, by packed ones, with q, k, v and gate, up
    fused. The outputs do not change; the model can no longer be trained."""
    return replace_linear_layers(model, PackedLinear)


def quantize_model(model):
    """Replace the linear layers of `model`, in place, by int8 ones with one scale per row, with
    q, k, v and gate, up fused: a quarter of float32's memory."""
    return replace_linear_layers(model, Int8Linear)


def replace_linear_layers(model, linear_class):
    """Replace every linear layer of `model` by a `linear_class`; return the model."""
    replace_children(model.requires_grad_(False), linear_class)
    if model.lm_head is None:  # tied: the embedding itself is kept for the input tokens
        model.lm_head = linear_class(model.wte)
    return model


def replace_children(module, linear_class):
    """Replace the linear layers below `module`. Experts of a mixture are no linear layers and are
    kept."""
    for name, child in module.named_children():
        if type(child) is Attention:
            setattr(module, name, FusedAttention(child, linear_class))
        elif type(child) is MLP:
            setattr(module, name, FusedMLP(child, linear_class))
        elif is_plain(child) or hasattr(child, "base"):  # .weight of a LoRA layer is the merged one
            setattr(module, name, linear_class(child))
        else:
            replace_children(child, linear_class)


class FusedAttention(Attention):
    """Attention with one product for queries, keys and values."""

    def __init__(self, attn, linear_class):
        nn.Module.__init__(self)
        self.config, self.layer = attn.config, attn.layer
        self.qkv = linear_class(attn.q, attn.k, attn.v)
        self.o = linear_class(attn.o)

    def project(self, x):
        c, (B, T, _) = self.config, x.size()
        y = self.qkv(x).view(B, T, -1, c.head_dim)  # (B, T, n_head + 2 n_kv_head, D)
        return y.split((c.n_head + c.n_kv_head, c.n_kv_head), dim=2)


class FusedMLP(MLP):
    """MLP with one product for gate and up."""

    def __init__(self, mlp, linear_class):
        nn.Module.__init__(self)
        self.config, self.down = mlp.config, linear_class(mlp.down)
        is_gated = mlp.config.mlp == "swiglu"
        self.up = linear_class(mlp.gate, mlp.up) if is_gated else linear_class(mlp.up)

    def gated(self, x):
        gate, up = self.up(x).chunk(2, dim=-1)
        return F.silu(gate) * up
