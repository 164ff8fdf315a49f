"""Linear layers for decoding: concatenated, and packed for the CPU's matrix kernels.

The time to decode a few tokens is that of reading the weights: these layers read them faster.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from model.core.adapters import LoRALinear


class ConcatLinear(nn.Module):
    """Base class of linear layers for decoding: `layers` with a common input (nn.Linear, LoRALinear
    or a tied nn.Embedding) as one layer x (..., K) -> (..., N), their outputs concatenated. sizes:
    the number of outputs of each, N in total. The constructor passes the weight (N, K) to
    store(weight); a subclass defines store() and forward(x)."""

    def __init__(self, *layers):
        super().__init__()
        weights = [layer.weight.detach() for layer in layers]
        self.sizes = [len(weight) for weight in weights]
        biases = [getattr(layer, "bias", None) for layer in layers]
        self.bias = None if biases[0] is None else torch.cat([b.detach() for b in biases])
        self.store(torch.cat(weights))


class PackedLinear(ConcatLinear):
    """ConcatLinear with weights in the dtype of the layers.

    On a CPU that computes in bfloat16, such weights are stored in oneDNN's blocked layout, to which
    F.linear would convert them at every call: 2 to 4 times the speed for one row, same bits.
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
        """The weight (N, K) in the ordinary layout."""
        return self.stored.to_dense() if self.stored.is_mkldnn else self.stored


def replace_linear_layers(model, linear_class=PackedLinear):
    """Replace every linear layer of `model`, a GPT, in place, by linear_class(layer), a subclass of
    ConcatLinear, and the layers q, k, v of each attention by one such layer, q (k and v are then
    None). A tied embedding is kept, with a copy of it as lm_head. Return the model, which can no
    longer be trained. The experts of a mixture are not nn.Linear, and are kept."""
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
    """Return whether replace_linear_layers() can replace `module`: whether it computes x @ weight.T
    + bias, as an nn.Linear, a subclass with the same forward, or a LoRALinear with the merged
    `weight`."""
    return (isinstance(module, LoRALinear)
            or getattr(type(module), "forward", None) is nn.Linear.forward)
