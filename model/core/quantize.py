"""Linear layers for decoding: weights in int8, or packed for the CPU's matrix kernels.

Decoding a few tokens is limited by reading the weights: small weights help, and kernels that reach
the memory bandwidth.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class PackedLinear(nn.Module):
    """Linear layers with a common input, concatenated: x (..., K) -> (..., N).

    On a CPU with bfloat16 arithmetic, the weights are stored in oneDNN's blocked layout, into which
    F.linear would convert the weights at every call: 2 to 4 times the speed for one row, same bits.
    """

    def __init__(self, *layers):
        super().__init__()
        weight, self.bias = concat_layers(layers)
        self.plain, self.packed = weight, None
        if weight.device.type == "cpu" and weight.dtype == torch.bfloat16:
            self.pack(weight)

    def pack(self, weight):
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
            self.product(weight.new_zeros(1, weight.size(1)), packed)
        except (AttributeError, RuntimeError):
            return  # not supported by this build of PyTorch or this CPU: F.linear
        self.plain, self.packed = None, packed

    def product(self, x, packed):
        return torch.ops.mkldnn._linear_pointwise.default(x, packed, self.bias, "none", [], "")

    def forward(self, x):
        if self.packed is None:
            return F.linear(x, self.plain, self.bias)
        return self.product(x, self.packed)

    @property
    def weight(self):
        """The original weight (N, K)."""
        return self.plain if self.packed is None else self.packed.to_dense()


class Int8Linear(nn.Module):
    """Linear layers with a common input, concatenated: int8 weights (N, K) and a scale per row
    (N,). Activations are not quantized, but converted to bfloat16 for the kernel."""

    MAX_KERNEL_ROWS = 16  # with more rows it is faster to dequantize the weights first

    def __init__(self, *layers):
        super().__init__()
        weight, self.bias = concat_layers(layers)
        int8, scale = quantize_rows(weight)
        self.register_buffer("int8", int8)
        self.register_buffer("scale", scale[:, 0])
        self.dtype = weight.dtype
        self.has_kernel = has_int8_kernel(weight.device, weight.size(1))

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


def concat_layers(layers):
    """Return (weight, bias or None) of linear layers, concatenated along the outputs."""
    weight = torch.cat([m.weight.detach() for m in layers])
    biases = [getattr(m, "bias", None) for m in layers]
    return weight, None if biases[0] is None else torch.cat([b.detach() for b in biases])


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


def has_int8_kernel(device, width):
    """Return whether int8 weights with `width` columns can be multiplied without dequantization.
    PyTorch 2.13's CPU kernel reads 16 columns at a time, beyond the end of other widths; the CUDA
    kernel is slower than bfloat16 products."""
    if width % 16 or device.type == "cuda":
        return False
    try:
        x = torch.zeros(1, 32, device=device, dtype=torch.bfloat16)
        torch._weight_int8pack_mm(x, torch.zeros(32, 32, device=device, dtype=torch.int8), x[0])
        return True
    except (AttributeError, RuntimeError):
        return False
