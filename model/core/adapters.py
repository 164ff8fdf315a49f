"""Low-rank adapters (LoRA, arXiv:2106.09685) on the linear layers of a model.

A layer with the frozen weight W0 (out, in) computes with W0 + scale * B A, where A (r, in) and
B (out, r) are trained. B starts at zero: initially, the adapted model equals the frozen one.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from model.core.init import fill, stable_hash
from train.base.errors import ConfigError
from train.optimizer import matches

# -----------------------------------------------------------------------------
# the layer

class LoRALinear(nn.Linear):
    """Linear layer with a LoRA adapter: x W^T + bias with W = base + scale * lora_B @ lora_A.

    layer: an nn.Linear, of which base (out, in) and bias are the Parameters, not copies.
    lora_A (r, in), lora_B (out, r): new parameters, not initialised here. scale: alpha / r.
    """

    def __init__(self, layer, r, scale):
        nn.Module.__init__(self)
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.scale = scale
        self.base = layer.weight
        self.bias = layer.bias
        self.lora_A = nn.Parameter(torch.empty(r, layer.in_features))
        self.lora_B = nn.Parameter(torch.empty(layer.out_features, r))

    @property
    def weight(self):
        """Merged weight W (out, in) in the adapter's dtype; slow: computed at each access."""
        with torch.autocast(self.base.device.type, enabled=False):
            base = self.base.to(self.lora_B.dtype)
            return torch.addmm(base, self.lora_B, self.lora_A, alpha=self.scale)

    def forward(self, x):
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return _LoRAFunction.apply(x, self.base, self.bias, self.lora_A, self.lora_B, self.scale)


class _LoRAFunction(torch.autograd.Function):
    """Autograd function of LoRALinear: x base^T + bias + scale * (x A^T) B^T in the dtype of x.

    apply(x (..., in), base (out, in), bias (out,) or `None`, A (r, in), B (out, r), scale).
    The merged weight is never computed: it needs a float32 copy of the backbone in each pass, and
    in bfloat16 a small adapter is lost to rounding. A frozen `base` has no gradient, which saves a
    third of the matrix products per step.
    """

    @staticmethod
    def forward(ctx, x, base, bias, A, B, scale):
        rows = x.flatten(0, -2)  # (N, in)
        low = F.linear(rows, A.to(x.dtype))  # (N, r)
        ctx.save_for_backward(x, low, base, A, B)
        ctx.scale = scale
        bias = None if bias is None else bias.to(x.dtype)
        y = F.linear(rows, base.to(x.dtype), bias)  # (N, out)
        # A batched product with one batch: selective checkpointing saves only plain products.
        up = torch.bmm(low[None], B.to(x.dtype).t()[None])[0]  # (N, out)
        # A subtraction: torch.compile would fuse an addition into the large product, which is
        # slower and rounds differently (train/LOG.md).
        return torch.sub(y, up, alpha=-scale).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        x, low, base, A, B = ctx.saved_tensors
        needs_x, needs_base, needs_bias, *_ = ctx.needs_input_grad
        rows = x.flatten(0, -2)  # (N, in)
        g = grad.flatten(0, -2)  # (N, out)
        dlow = g @ B.to(g.dtype)  # (N, r)
        dx = dbase = dbias = None
        if needs_x:
            dx = g @ base.to(g.dtype)  # (N, in)
            dx = dx.addmm_(dlow, A.to(g.dtype), alpha=ctx.scale).view_as(x)
        if needs_base:
            dbase = (g.t() @ rows).to(base.dtype)
        if needs_bias:
            dbias = g.sum(0).to(B.dtype)
        dA = (dlow.t() @ rows).to(B.dtype) * ctx.scale
        dB = (low.t() @ g).t().to(B.dtype) * ctx.scale
        return dx, dbase, dbias, dA, dB, None


# -----------------------------------------------------------------------------
# a model with adapters

def is_adapter(name):
    """Return whether a parameter name is that of an adapter: it ends with .lora_A or .lora_B."""
    return name.endswith((".lora_A", ".lora_B"))


def initial_adapter(name, shape, seed):
    """Return the initial value of an adapter parameter, a function of (name, shape, seed).

    lora_B: zeros. lora_A (r, in): uniform between -1 / sqrt(in) and 1 / sqrt(in), as in peft.
    """
    if name.endswith("lora_B"):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(stable_hash(seed, name))
    bound = shape[1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def add_adapters(model, r, seed, scale=2.0, targets=("attn", "mlp")):
    """Freeze a GPT and add adapters of rank r to the layers that `targets` selects, in place.

    Returns the model, whose class must have the mixin WithAdapters. If r is 0, nothing is changed.
    seed: for the adapters' initial values, which are not set on the meta device. scale: alpha / r.
    targets: patterns as for find_layers(), with the same ConfigError.
    """
    if not r:
        return model
    model.requires_grad_(False)
    for name in find_layers(model, targets):
        model.set_submodule(name, LoRALinear(model.get_submodule(name), r, scale))
        model.filled.add(f"{name}.base")  # the weight keeps its values
    fill(model, seed, model.filled)
    return model


def find_layers(model, targets):
    """Return the names, e.g. h.0.attn.q, of linear layers in a GPT's blocks that match a pattern.

    targets: patterns, each one or several consecutive parts of a name: attn.q, mlp, h.3, h.*.mlp.
    Raises ConfigError if the list is empty, or for a pattern that matches no layer.
    """
    names = [f"h.{n}" for n, m in model.h.named_modules() if isinstance(m, nn.Linear)]
    for pattern in targets or [""]:
        if not any(matches(name, pattern) for name in names):
            known = dict.fromkeys(name.split(".", 2)[2] for name in names)
            raise ConfigError([f"lora_targets: no linear layer matches {pattern!r}; the blocks "
                               f"h.0, h.1, ... have {', '.join(known)}"])
    return [n for n in names if any(matches(n, pattern) for pattern in targets)]


@torch.no_grad()
def merge(model):
    """Return the state dict of a plain GPT, in which adapters are merged into LAYER.weight.

    Other tensors are those of the model, not copies. Frozen tensors are included.
    """
    merged = {}
    for name, t in nn.Module.state_dict(model).items():  # with the frozen tensors, see below
        if name.endswith(".base"):
            layer = name.removesuffix(".base")
            merged[f"{layer}.weight"] = model.get_submodule(layer).weight
        elif not is_adapter(name):
            merged[name] = t
    return merged


class WithAdapters:
    """Mixin for a GPT with adapters: extends the hooks initial() and adopt() of train/system.py."""

    def initial(self, name, shape, seed):
        if is_adapter(name):
            return initial_adapter(name, shape, seed)
        if name.endswith(".base"):  # under FSDP, of dpo and grpo, before the weights are loaded
            name = name.removesuffix("base") + "weight"
        return super().initial(name, shape, seed)

    def adopt(self, weights):
        own = self.state_dict()
        names = {name: name.removesuffix("weight") + "base" for name in weights}
        return {names[name] if names[name] in own else name: t
                for name, t in super().adopt(weights).items()}


class PartialStateDict:
    """Mixin for a model of which only the tensors with is_saved(name) are saved and loaded.

    Overrides state_dict() and load_state_dict(). The subclass defines is_saved(name);
    load_backbone(weights) sets all tensors, also the frozen backbone.
    """

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        return {name: t for name, t in state.items() if self.is_saved(name)}

    def load_backbone(self, weights):
        """Set all tensors of the model, also on the meta device, to those in `weights`, not copies.

        Raises RuntimeError unless `weights` has exactly the names and shapes of the model.
        """
        super().load_state_dict(weights, assign=True)

    def load_state_dict(self, state_dict, strict=True, assign=False):
        if strict and (wrong := state_dict.keys() ^ self.state_dict().keys()):
            raise RuntimeError(f"missing or unexpected tensors: {', '.join(sorted(wrong)[:6])}; if "
                               "a different version of this program wrote them, use that one")
        return super().load_state_dict(state_dict, strict=False, assign=assign)
