"""Linear layers for decoding: concatenated, and packed for the CPU's matrix kernels.

The time to decode a few tokens is mostly the time to read the weights, which these layers read
faster.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from model.core.adapters import LoRALinear


class ConcatLinear(nn.Module):
    """Base class of layers for decoding that compute several linear layers with the same input as
    one: x (..., K) -> (..., N), the concatenated outputs. layers: nn.Linear, LoRALinear, or
    nn.Embedding as a tied output layer; either all or none have a bias. Attributes: sizes, a list
    of the number of outputs of each layer (N in total); weight (N, K), concatenated; bias (N,) or
    `None`; for q, k, v also parts, a list of the PartOfLinear of each layer, which
    replace_linear_layers() sets. A subclass must define forward(x)."""

    def __init__(self, *layers):
        super().__init__()
        weights = [layer.weight.detach() for layer in layers]
        self.sizes = [len(weight) for weight in weights]
        biases = [getattr(layer, "bias", None) for layer in layers]
        self.bias = None if biases[0] is None else torch.cat([b.detach() for b in biases])
        self.weight = torch.cat(weights)


class PartOfLinear(nn.Module):
    """The layer with index `index` of `whole`, a ConcatLinear. forward(x) computes all layers and
    returns the outputs of this one. If all have the same input, fused_linear() of model/core/ops.py
    calls `whole` once instead."""

    def __init__(self, whole, index):
        super().__init__()
        self.whole, self.index = whole, index

    def forward(self, x):
        return self.whole(x).split(self.whole.sizes, dim=-1)[self.index]


class PackedLinear(ConcatLinear):
    """ConcatLinear whose weights have the dtype of the original layers.

    On a CPU with instructions for bfloat16, weights in bfloat16 are stored in the blocked layout of
    oneDNN, to which F.linear would convert them at every call: 2 to 4 times as fast for one row,
    with the same bits.
    """

    def __init__(self, *layers):
        super().__init__(*layers)
        if (self.weight.device.type == "cpu" and self.weight.dtype == torch.bfloat16
                and torch.backends.mkldnn.is_available()
                and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, 1)

    def forward(self, x):
        if not self.weight.is_mkldnn:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")


def replace_linear_layers(model, linear_class=PackedLinear):
    """Convert `model`, a GPT, for decoding, in place: replace every linear layer by
    linear_class(layer), and the layers q, k, v of each attention, if their input sizes are equal
    and either all or none have a bias, by the parts of one layer linear_class(q, k, v). If the
    embedding is tied, a converted copy of it becomes lm_head. linear_class: a subclass of
    ConcatLinear. Return the model, which can no longer be trained. The experts of a mixture are not
    nn.Linear, and are not changed."""
    # A list of the layers themselves would keep their weights in memory.
    parents = [m for m in model.requires_grad_(False).modules() if not is_linear(m)]
    for module in parents:
        qkv = [getattr(module, name, None) for name in "qkv"]
        if all(map(is_linear, qkv)) and len({(m.in_features, m.bias is None) for m in qkv}) == 1:
            whole = linear_class(*qkv)
            whole.parts = module.q, module.k, module.v = [PartOfLinear(whole, i) for i in range(3)]
        for name, child in module.named_children():
            if is_linear(child):
                setattr(module, name, linear_class(child))
    if model.lm_head is None:  # tied: the embedding is kept for the input tokens
        model.lm_head = linear_class(model.wte)
    return model


def is_linear(module):
    """Return whether replace_linear_layers() can replace `module`: an nn.Linear, a subclass with
    the same forward(), or a LoRALinear."""
    return (isinstance(module, LoRALinear)
            or getattr(type(module), "forward", None) is nn.Linear.forward)
