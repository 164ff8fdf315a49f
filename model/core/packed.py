"""Linear layers for decoding: concatenated, and packed for the CPU's matrix kernels.

Decoding a few tokens is limited by reading the weights: kernels that reach the memory bandwidth
help.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from model.core.adapters import LoRALinear


class ConcatLinear(nn.Module):
    """Base class of linear layers for decoding: `layers` with a common input (nn.Linear, LoRALinear
    or a tied nn.Embedding), concatenated, x (..., K) -> (..., N). sizes: the outputs of each layer,
    N in total. A subclass has store(weight), which is called with the weight (N, K), and
    forward(x)."""

    def __init__(self, *layers):
        super().__init__()
        weights = [layer.weight.detach() for layer in layers]
        self.sizes = [len(weight) for weight in weights]
        biases = [getattr(layer, "bias", None) for layer in layers]
        self.bias = None if biases[0] is None else torch.cat([b.detach() for b in biases])
        self.store(torch.cat(weights))


class PackedLinear(ConcatLinear):
    """ConcatLinear with weights in the dtype of the layers.

    On a CPU with bfloat16 arithmetic, the weights are stored in oneDNN's blocked layout, into which
    F.linear would convert the weights at every call: 2 to 4 times the speed for one row, same bits.
    """

    def store(self, weight):
        self.stored = weight
        if (weight.device.type == "cpu" and weight.dtype == torch.bfloat16
                and torch.backends.mkldnn.is_available()
                and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
            self.stored = torch.ops.mkldnn._reorder_linear_weight(weight, 1)

    def forward(self, x):
        if not self.stored.is_mkldnn:
            return F.linear(x, self.stored, self.bias)
        return torch.ops.mkldnn._linear_pointwise.default(x, self.stored, self.bias, "none", [], "")

    @property
    def weight(self):
        """The original weight (N, K)."""
        return self.stored.to_dense() if self.stored.is_mkldnn else self.stored


def replace_linear_layers(model, linear_class=PackedLinear):
    """Replace every linear layer of `model`, a GPT, in place, by linear_class(layer), a
    ConcatLinear for decoding, and the layers q, k, v of each attention by a single one as q; return
    the model, which can no longer be trained. Experts of a mixture are no linear layers and are
    kept."""
    # A list of the layers themselves would keep their weights in memory.
    parents = [m for m in model.requires_grad_(False).modules() if not is_linear(m)]
    for module in parents:
        layers = [getattr(module, name, None) for name in "qkv"]
        if all(map(is_linear, layers)):  # computed by model.core.ops.fused_linear
            module.q = linear_class(*layers)
            module.k = module.v = None
        for name, child in module.named_children():
            if is_linear(child):
                setattr(module, name, linear_class(child))
    if model.lm_head is None:  # tied: the embedding is kept for the input tokens
        model.lm_head = linear_class(model.wte)
    return model


def is_linear(module):
    """Return whether a module computes x @ weight.T + bias: an nn.Linear, a subclass with the same
    forward, or a LoRALinear, whose `weight` is the merged one."""
    return (isinstance(module, LoRALinear)
            or getattr(type(module), "forward", None) is nn.Linear.forward)
