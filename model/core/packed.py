"""Linear layers for decoding: concatenated, and packed for the CPU's matrix kernels.

The time to decode a few tokens is mostly the time to read the weights, which these layers read
faster.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from model.core.adapters import LoRALinear


class ConcatLinear(nn.Module):
    """Base class of layers for decoding: linear layers with the same input computed as one.

    layers: nn.Linear, LoRALinear, or nn.Embedding as a tied output layer; all or none have a bias.
    sizes: output size of each layer, N in total.
    weight (N, K), bias (N,) or `None`: concatenated copies, which to() does not move.
    parts: for q, k, v, the PartOfLinear of each layer, set by replace_linear_layers().
    A subclass must define forward(x): (..., K) -> (..., N), the concatenated outputs.
    """

    def __init__(self, *layers):
        super().__init__()
        weights = [layer.weight.detach() for layer in layers]
        self.sizes = [len(weight) for weight in weights]
        biases = [getattr(layer, "bias", None) for layer in layers]
        self.bias = None if biases[0] is None else torch.cat([b.detach() for b in biases])
        self.weight = torch.cat(weights)


class PartOfLinear(nn.Module):
    """Layer of a ConcatLinear: forward(x) computes all layers and returns this one's outputs."""

    def __init__(self, whole, index):
        super().__init__()
        self.whole, self.index = whole, index

    def forward(self, x):
        return self.whole(x).split(self.whole.sizes, dim=-1)[self.index]


class PackedLinear(ConcatLinear):
    """ConcatLinear in the layers' dtype; bfloat16 weights are packed for CPUs that support it.

    They have oneDNN's blocked layout, to which F.linear otherwise converts them at every call: 2 to
    4 times as fast for one row, with the same bits.
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
    """Replace the linear layers of a GPT for faster decoding, in place; return the model.

    The model can no longer be trained. linear_class(*layers): a subclass of ConcatLinear.
    The layers q, k, v of an attention become parts of one layer if their input sizes are equal and
    all or none have a bias. A tied embedding stays, and a converted copy of it becomes lm_head.
    The experts of a mixture are not nn.Linear, and are not changed.
    """
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
    """Return whether `module` is an nn.Linear (or has the same forward()) or a LoRALinear."""
    return (isinstance(module, LoRALinear)
            or getattr(type(module), "forward", None) is nn.Linear.forward)
