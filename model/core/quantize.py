"""Linear layers for decoding: weights in int8, or packed for the CPU's matrix kernels.

Decoding a few tokens is limited by reading the weights: small weights help, and kernels that reach
the memory bandwidth.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from model.core.adapters import LoRALinear


class ConcatLinear(nn.Module):
    """Linear layers with a common input, concatenated: x (..., K) -> (..., N), with N the sum of
    `sizes`. A subclass has store(weight), for a weight (N, K), and forward(x)."""

    def __init__(self, *layers):
        super().__init__()
        weights = [layer.weight.detach() for layer in layers]
        self.sizes = [len(weight) for weight in weights]
        biases = [getattr(layer, "bias", None) for layer in layers]
        self.bias = None if biases[0] is None else torch.cat([b.detach() for b in biases])
        self.store(torch.cat(weights))


class PackedLinear(ConcatLinear):
    """ConcatLinear in the weights' precision.

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


class Int8Linear(ConcatLinear):
    """ConcatLinear with int8 weights (N, K) and a scale per row (N,): a quarter of float32's
    memory. Activations are not quantized, but converted to bfloat16 for the kernel."""

    MAX_KERNEL_ROWS = 16  # with more rows it is faster to dequantize the weights first

    def store(self, weight):
        int8, scale = quantize_rows(weight)
        self.register_buffer("int8", int8)
        self.register_buffer("scale", scale[:, 0])
        self.dtype = weight.dtype
        # PyTorch 2.13's CPU kernel reads 16 columns at a time, beyond the end of other widths; the
        # CUDA kernel is slower than bfloat16 products.
        self.has_kernel = weight.device.type in ("cpu", "mps") and weight.size(1) % 16 == 0

    def forward(self, x):
        rows = x.flatten(0, -2)
        if not self.has_kernel or len(rows) > self.MAX_KERNEL_ROWS:
            return F.linear(x, self.weight.to(x.dtype), self.bias)
        y = torch._weight_int8pack_mm(rows.to(torch.bfloat16), self.int8, self.scale).to(x.dtype)
        return (y if self.bias is None else y + self.bias).view(*x.shape[:-1], -1)

    @property
    def weight(self):
        """The dequantized weight (N, K)."""
        return self.int8.to(self.dtype) * self.scale[:, None].to(self.dtype)


def quantize_rows(weight):
    """Return (int8 (N, K), scale (N, 1) bfloat16) of a weight (N, K): symmetric rounding to the
    nearest, with the row's largest magnitude at 127."""
    low, high = torch.aminmax(weight.detach(), dim=1, keepdim=True)
    scale = (torch.maximum(high, -low).float().clamp(min=1e-12) / 127).to(torch.bfloat16)
    int8 = torch.empty_like(weight, dtype=torch.int8)
    # 64 rows at a time: float32 copies of whole weights, allocated between the weights that stay,
    # would fragment the memory by gigabytes for a large model.
    for rows, row_scale, out in zip(weight.split(64), scale.split(64), int8.split(64)):
        out.copy_((rows.float() / row_scale.float()).round_())
    return int8, scale


def replace_linear_layers(model, linear_class=PackedLinear):
    """Replace every linear layer of `model`, in place, by a `linear_class` for decoding, with q, k,
    v fused; return the model. It can no longer be trained."""
    replace_children(model.requires_grad_(False), linear_class)
    if model.lm_head is None:  # tied: the embedding is kept for the input tokens
        model.lm_head = linear_class(model.wte)
    return model


def replace_children(module, linear_class):
    """Replace the linear layers below `module`. Experts of a mixture are no linear layers and are
    kept."""
    layers = [getattr(module, name, None) for name in "qkv"]
    if all(map(is_linear, layers)):  # computed by model.core.ops.fused_linear
        module.q = linear_class(*layers)
        module.k = module.v = None
    for name, child in module.named_children():
        if is_linear(child):
            setattr(module, name, linear_class(child))
        else:
            replace_children(child, linear_class)


def is_linear(module):
    """Return whether a module is a weight (for LoRALinear merged) and a bias."""
    return (isinstance(module, LoRALinear)
            or getattr(type(module), "forward", None) is nn.Linear.forward)
