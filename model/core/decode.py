"""A checkpoint ready to write text (`load_writer`), its products as a few tokens at a time compute
them fastest: `pack`, or `quantize` with int8 weights.

Reading the weights is most of the time that a token takes: what counts is their bytes, and kernels
that keep up with the memory.
"""

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

from model.core.load import BACKBONE, EMA, load_model
from model.gpt import MLP, Attention, is_plain
from train.base.errors import printable


def add_options(parser):
    """The options of a command that load_writer and prepare read."""
    add = parser.add_argument
    add("--ckpt", default="out/ckpt.pt", help="checkpoint (default: %(default)s)")
    add("--backbone", help=BACKBONE)
    add("--ema", action="store_true", help=EMA)
    add("--tokenizer", help="where the checkpoint has none: byte, gpt2, a rank file or a prepared "
        "folder")
    add("--device", default="auto", help="auto, cpu, cuda, mps")
    add("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    add("--quantize", choices=["int8"], help="weights in 8 bits, a scale for each row: half of "
        "bfloat16's memory")


def load_writer(args):
    """(model, tokenizer, device) of a checkpoint that can write text, as args.ckpt, backbone,
    ema, tokenizer, device and dtype say. Raises ValueError or UserError."""
    from data.tokenizer import load_tokenizer
    from train.device import choose_dtype
    from train.distributed import get_device
    device = get_device(args.device)
    model, tokenizer = load_model(args.ckpt, device, choose_dtype(args.dtype, device)[0],
                                  args.backbone, args.ema)
    if not hasattr(sys.modules[type(model).__module__], "sample"):
        raise ValueError(f"{args.ckpt}: a model of {type(model).__module__} does not write text")
    if tokenizer is None and args.tokenizer is None:
        raise ValueError(f"{args.ckpt}: has no tokenizer in it, so it cannot write text; name it: "
                         "--tokenizer byte, gpt2, a rank file or a prepared folder")
    tokenizer = tokenizer or load_tokenizer(args.tokenizer)
    if tokenizer.n_vocab > model.config.vocab_size:
        raise ValueError(f"--tokenizer {args.tokenizer}: it has {tokenizer.n_vocab} ids, the model "
                         f"knows {model.config.vocab_size}; give the tokenizer of its data")
    return model, tokenizer, device


def prepare(args):
    """load_writer(args) with its weights laid out for writing, in 8 bits where args.quantize asks
    for it."""
    model, tokenizer, device = load_writer(args)
    model = quantize(model) if args.quantize else pack(model)
    if any(isinstance(m, Int8Linear) and not m.has_kernel for m in model.modules()):
        print(f"--quantize int8: no kernel for it on {device.type} (or widths that are no multiple "
              "of 16): weights are widened for every product, which is slow", file=sys.stderr)
    return model, tokenizer, device


class Streamer:
    """Prints text as its tokens come, holding back bytes that are not yet a whole character."""

    def __init__(self, tokenizer, stops):
        self.tokenizer, self.stops, self.held = tokenizer, stops, []

    def __call__(self, token):
        if int(token[0]) in self.stops:
            return
        self.held.append(int(token[0]))
        text = self.tokenizer.decode(self.held)
        if not text.endswith("\ufffd") or len(self.held) > 8:  # no character has more bytes
            print(printable(text), end="", flush=True)
            self.held.clear()


def pack(model):
    """Make the products of `model`, in place, those of decoding: q, k, v and gate, up joined once,
    weights in the layout of the kernel. The results are the same; it can no longer be trained."""
    return replace_products(model, PackedLinear)


def quantize(model):
    """The same with int8 weights, one scale for each row: a quarter of float32's bytes."""
    return replace_products(model, Int8Linear)


def replace_products(model, kind):
    replace_in(model.requires_grad_(False), kind)
    if model.lm_head is None:  # tied: the embedding stays for the tokens that come in
        model.lm_head = kind(model.wte)
    return model


def replace_in(module, kind):
    """Put `kind` in the place of every nn.Linear below `module`; experts of a model that routes
    tokens among them, which are none, stay as they are."""
    for name, child in module.named_children():
        if type(child) is Attention:
            setattr(module, name, JoinedAttention(child, kind))
        elif type(child) is MLP:
            setattr(module, name, JoinedMLP(child, kind))
        elif is_plain(child) or hasattr(child, "base"):  # adapters are in the weight of theirs
            setattr(module, name, kind(child))
        else:
            replace_in(child, kind)


class JoinedAttention(Attention):
    """Attention with one product for queries, keys and values."""

    def __init__(self, attn, kind):
        nn.Module.__init__(self)
        self.config, self.layer = attn.config, attn.layer
        self.qkv, self.o = kind(attn.q, attn.k, attn.v), kind(attn.o)

    def project(self, x):
        c, (B, T, _) = self.config, x.size()
        y = self.qkv(x).view(B, T, -1, c.head_dim)
        return y.split((c.n_head + c.n_kv_head, c.n_kv_head), dim=2)


class JoinedMLP(MLP):
    """MLP with one product for gate and up."""

    def __init__(self, mlp, kind):
        nn.Module.__init__(self)
        self.config, self.down = mlp.config, kind(mlp.down)
        self.up = kind(mlp.gate, mlp.up) if mlp.config.mlp == "swiglu" else kind(mlp.up)

    def gated(self, x):
        gate, up = self.up(x).chunk(2, dim=-1)
        return F.silu(gate) * up


class PackedLinear(nn.Module):
    """One or more linear layers of the same input, side by side: x (..., K) -> (..., N).

    On a CPU with bfloat16 arithmetic the weights lie in oneDNN's own layout, which F.linear would
    bring them into at every call: 2 to 4 times its speed for one row, and the same bits.
    """

    def __init__(self, *layers):
        super().__init__()
        weight, self.bias = joined(layers)
        self.plain, self.packed = weight, None
        if weight.device.type == "cpu" and weight.dtype == torch.bfloat16:
            self.pack(weight)

    def pack(self, weight):
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
            self.product(weight.new_zeros(1, weight.size(1)), packed)
        except (AttributeError, RuntimeError):
            return  # a build or a CPU without it: F.linear
        self.plain, self.packed = None, packed

    def product(self, x, packed):
        return torch.ops.mkldnn._linear_pointwise.default(x, packed, self.bias, "none", [], "")

    def forward(self, x):
        if self.packed is None:
            return F.linear(x, self.plain, self.bias)
        return self.product(x, self.packed)

    @property
    def weight(self):
        """(N, K), as it was."""
        return self.plain if self.packed is None else self.packed.to_dense()


class Int8Linear(nn.Module):
    """The same with weights (N, K) rounded to int8 times a scale for each row (N,). Activations
    are not rounded, but to bfloat16 for the kernel."""

    MOST_ROWS = 16  # for more rows it is faster to widen the weights first

    def __init__(self, *layers):
        super().__init__()
        weight, self.bias = joined(layers)
        int8, step = to_int8(weight)
        self.register_buffer("int8", int8)
        self.register_buffer("scale", step[:, 0])
        self.dtype, self.has_kernel = weight.dtype, has_int8_kernel(weight.device, weight.size(1))

    def forward(self, x):
        rows = x.flatten(0, -2)
        if not self.has_kernel or len(rows) > self.MOST_ROWS:
            return F.linear(x, self.weight.to(x.dtype), self.bias)
        y = torch._weight_int8pack_mm(rows.to(torch.bfloat16), self.int8, self.scale).to(x.dtype)
        return (y if self.bias is None else y + self.bias).view(*x.shape[:-1], -1)

    @property
    def weight(self):
        """(N, K) widened."""
        return self.int8.to(self.dtype) * self.scale[:, None].to(self.dtype)


def to_int8(weight):
    """(int8 (N, K), step (N, 1) bfloat16) of a weight (N, K): to the nearest multiple of its row's
    step, which reaches to the row's largest number."""
    low, high = torch.aminmax(weight.detach(), dim=1, keepdim=True)
    step = (torch.maximum(high, -low).float().clamp(min=1e-12) / 127).to(torch.bfloat16)
    int8 = torch.empty_like(weight, dtype=torch.int8)
    # Few rows at a time: between weights that stay, whole ones in float32 would leave holes that
    # the next do not fit in, gigabytes of a large model.
    for rows, their_step, out in zip(weight.split(64), step.split(64), int8.split(64)):
        out.copy_((rows.float() / their_step.float()).round_())
    return int8, step


def joined(layers):
    """(weight, bias or None) of layers side by side."""
    biases = [getattr(m, "bias", None) for m in layers]
    return (torch.cat([m.weight.detach() for m in layers]),
            None if biases[0] is None else torch.cat([b.detach() for b in biases]))


def has_int8_kernel(device, width):
    """Whether int8 weights of so many columns can be multiplied as they are. The CPU kernel of
    PyTorch 2.13 reads 16 columns at a time, past the end of others; that for CUDA is slower than
    bfloat16 products."""
    if width % 16 or device.type == "cuda":
        return False
    try:
        x = torch.zeros(1, 32, device=device, dtype=torch.bfloat16)
        torch._weight_int8pack_mm(x, torch.zeros(32, 32, device=device, dtype=torch.int8), x[0])
        return True
    except (AttributeError, RuntimeError):
        return False
