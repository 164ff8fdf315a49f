"""LoRA (arXiv:2106.09685): small adapters on the linear layers of a frozen GPT.

    python run_train.py --config train/configs/lora.yaml --backbone out/chat/ckpt.pt
    python -m model.lora --ckpt out/lora/ckpt.pt --to merged.pt

A layer's weight W (out, in) becomes W + alpha / r B A, with A (r, in) random and B (out, r) zero:
the first step starts from the backbone. Only A and B are trained and in the checkpoint, which
names its backbone by a digest of the weights. The data are token files, or chats of data/prepare/chat.py.
"""

import argparse
import functools
import sys
import types
from dataclasses import asdict, dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from model import chat, gpt
from model.chat import ChatGPT
from model.core import load
from model.core import weights as base_weights
from model.core.init import stable_hash
from model.core.quantize import dequantize_rows, quantize_rows
from model.core.weights import check_tokenizer, with_shape
from train.base.checkpoint_file import FORMAT_VERSION, load_checkpoint, save_checkpoint
from train.base.cli import run_command
from train.base.errors import CheckpointError, ConfigError
from train.base.fields import key
from train.config import FIELDS
from train.dataloader import open_token_data
from train.device import choose_dtype
from train.distributed import broadcast_from_rank0, convert_ddp_state, get_device
from train.optimizer import matches

USE = "python -m model.lora --ckpt {out}/ckpt.pt --to {out}/merged.pt"
MUST_MATCH_TO_INIT = ("backbone", "lora_alpha")  # adapters are a difference to it, at one scale


@dataclass
class Keys:
    backbone: str = key("out/ckpt.pt", "checkpoint of a gpt or chat model, which stays frozen",
                        free=True, path=True, reads=True)
    lora_rank: int = key(8, "rank of the adapters", ge=1)
    lora_alpha: float = key(16.0, "the adapters' product is scaled by lora_alpha / lora_rank", gt=0)
    lora_targets: list[str] = key(["attn", "mlp"], "linear layers that get an adapter, by "
                                  "parts of their names: attn.q, mlp, h.3, h.*.attn.[qv]")
    quantize_base: str = key("no", "keep the weights under adapters in 8 bits, a step for each row",
                             choices=["no", "int8"])

    def problems(self):
        if self.quantize_base != "no" and self.distributed == "fsdp":
            return ["quantize_base: FSDP cannot share out weights of 8 bits beside others; use "
                    "distributed: ddp, which keeps all of them on each rank"]
        return []


class LoRALinear(nn.Linear):
    """The linear layer `base` with an adapter; its `weight` is the sum, also for who reads it.
    quantized: what is frozen is rounded to 8 bits, of which a row's `step` (out, 1) is one."""

    def __init__(self, base, r, scale, quantized=False):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.scale = base.in_features, base.out_features, scale
        self.base, self.bias = base.weight, base.bias
        self.register_buffer("step", None, persistent=False)
        if quantized:
            int8, self.step = quantize_rows(base.weight)
            self.base = nn.Parameter(int8, requires_grad=False)
        self.lora_A = nn.Parameter(torch.empty(r, base.in_features))
        self.lora_B = nn.Parameter(torch.empty(base.out_features, r))

    @property
    def weight(self):
        """(out, in), in the precision of the adapters: what merging gives."""
        with torch.autocast(self.base.device.type, enabled=False):
            B = self.lora_B
            return torch.addmm(widened(self.base, self.step, B.dtype), B, self.lora_A,
                               alpha=self.scale)

    def forward(self, x):
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return _AdaptedLinear.apply(x, self.base, self.step, self.bias, self.lora_A, self.lora_B,
                                    self.scale)


def widened(base, step, dtype):
    """The frozen weight (out, in) in `dtype`, which training makes anew in both passes."""
    return base.to(dtype) if step is None else dequantize_rows(base, step, dtype)


class _AdaptedLinear(torch.autograd.Function):
    """base x + scale B A x, x (..., in): never the sum of the weights, which takes a float32 copy
    of the backbone in each pass, and rounds off what the adapters add to bfloat16 weights. The
    frozen base gets no gradient, a third of a training step's products."""

    @staticmethod
    def forward(ctx, x, base, step, bias, A, B, scale):
        rows = x.flatten(0, -2)  # (N, in)
        low = F.linear(rows, A.to(x.dtype))  # (N, r)
        ctx.save_for_backward(x, low, base, step, A, B)
        ctx.scale = scale
        y = F.linear(rows, widened(base, step, x.dtype),
                     None if bias is None else bias.to(x.dtype))
        # As a batch of one: of two products, selective checkpointing keeps the large one alone.
        up = torch.bmm(low[None], B.to(x.dtype).t()[None])[0]  # (N, out)
        # A difference, as the compiler would have the large product start from a sum's other half,
        # which is slower and rounds otherwise (train/LOG.md).
        return torch.sub(y, up, alpha=-scale).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        (x, low, base, step, A, B), needs = ctx.saved_tensors, ctx.needs_input_grad
        rows, g = x.flatten(0, -2), grad.flatten(0, -2)  # (N, in), (N, out)
        dlow = g @ B.to(g.dtype)  # (N, r)
        dx = None
        if needs[0]:
            dx = (g @ widened(base, step, g.dtype)).addmm_(dlow, A.to(g.dtype), alpha=ctx.scale)
            dx = dx.view_as(x)
        return (dx, (g.t() @ rows).to(base.dtype) if needs[1] else None, None,
                g.sum(0).to(B.dtype) if needs[3] else None,
                (dlow.t() @ rows).to(B.dtype) * ctx.scale,
                (low.t() @ g).t().to(B.dtype) * ctx.scale, None)


class LoRA(ChatGPT):
    """A GPT of frozen `weights` {name: tensor} with adapters; ChatGPT serves both kinds of data.
    Its state_dict is the adapters alone. Raises RuntimeError for weights that do not fit."""

    def __init__(self, config, seed, token_bytes, weights, r, alpha, targets, quantized=False):
        with torch.device("meta"):
            super().__init__(config, seed, token_bytes)
        nn.Module.load_state_dict(self, weights, assign=True)
        self.requires_grad_(False)
        self.r, self.alpha = r, alpha
        add_adapters(self, targets, r, alpha / r, seed, quantized)
        if quantized:  # the rest out of the file, which is in memory as long as one weight is there
            for p in self.parameters():
                p.data = p.data if p.dtype == torch.int8 else p.data.clone()

    def initial(self, name, shape, seed):
        return (initial_adapter if is_adapter(name) else super().initial)(name, shape, seed)

    def state_dict(self, *args, **kwargs):
        whole = super().state_dict(*args, **kwargs)
        return {name: t for name, t in whole.items() if is_adapter(name)}

    def load_state_dict(self, state_dict, strict=True, assign=False):
        if strict and (wrong := state_dict.keys() ^ self.state_dict().keys()):
            raise RuntimeError(f"adapters missing, or not this model's: {sorted(wrong)[:6]}")
        return super().load_state_dict(state_dict, strict=False, assign=assign)


class OwnAdapters(ChatGPT):
    """A chat model that may have adapters, see adapt(), with the weights they stand on in its own
    checkpoint: of systems that start from a chat model."""

    def initial(self, name, shape, seed):
        if is_adapter(name):
            return initial_adapter(name, shape, seed)
        if name.endswith(".base"):  # the weight that an adapter stands on
            name = f"{name.removesuffix('base')}weight"
        return super().initial(name, shape, seed)

    def adopt(self, weights):
        own, weights = self.state_dict(), super().adopt(weights)
        return {n.removesuffix("weight") + "base" if n not in own else n: t
                for n, t in weights.items()}


def adapt(model, config):
    """`model` with adapters on attention and MLP, trained alone, if config.lora_rank says so."""
    if config.lora_rank:
        model.requires_grad_(False)
        add_adapters(model, ["attn", "mlp"], config.lora_rank, 2.0, config.seed)
    return model


def is_adapter(name):
    return name.endswith((".lora_A", ".lora_B"))


def initial_adapter(name, shape, seed):
    """B is zero, and A as peft has it: kaiming_uniform with a = sqrt 5."""
    if name.endswith("lora_B"):
        return torch.zeros(shape)
    generator, bound = torch.Generator().manual_seed(stable_hash(seed, name)), shape[1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def add_adapters(model, targets, r, scale, seed, quantized=False):
    """Adapters on the linear layers in the blocks of `model` that match `targets`, filled unless on
    the meta device."""
    for name in find_layers(model, targets):
        parent, _, child = name.rpartition(".")
        layer = LoRALinear(model.get_submodule(name), r, scale, quantized)
        setattr(model.get_submodule(parent), child, layer)
        for own in ("lora_A", "lora_B"):
            p = getattr(layer, own)
            if not p.is_meta:
                p.data.copy_(initial_adapter(f"{name}.{own}", p.shape, seed))


def find_layers(model, targets):
    """Names of the linear layers in the blocks that match `targets`, each of which must match."""
    names = [f"h.{n}" for n, m in model.h.named_modules() if isinstance(m, nn.Linear)]
    for pattern in targets or [""]:
        if not any(matches(name, pattern) for name in names):
            known = dict.fromkeys(name.split(".", 2)[2] for name in names)
            raise ConfigError([f"lora_targets: no linear layer matches {pattern!r}; they are "
                               f"{', '.join(known)} in the blocks h.0, h.1, ..."])
    return [n for n in names if any(matches(n, pattern) for pattern in targets)]


def adapters(model):
    """{name of a linear layer: (A (r, in), B (out, r))}; the scale is model.alpha / model.r."""
    return {name: (m.lora_A.detach(), m.lora_B.detach())
            for name, m in model.named_modules() if isinstance(m, LoRALinear)}


@torch.no_grad()
def merge(model):
    """{name: tensor} of a plain GPT: the adapters added to the weights they stand on."""
    whole = nn.Module.state_dict(model)
    out = {n.removesuffix(".base") + ".weight" if n.endswith(".base") else n: t.clone()
           for n, t in whole.items() if not is_adapter(n)}
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            out[f"{name}.weight"] = module.weight.clone()
    return out


# -----------------------------------------------------------------------------
# what train/train.py asks of a model file

inherit_shape = gpt.inherit_shape


def read_backbone(path):
    """The checkpoint at `path` of a gpt or chat model, see model/core/weights.py; CheckpointError."""
    state = base_weights.read_backbone(path)
    kind = (state.get("config") or {}).get("model", "gpt")
    if kind == "lora":
        raise CheckpointError(f"{path}: holds adapters itself; merge them into their backbone "
                              f"first: python -m model.lora --ckpt {path} --to merged.pt")
    if kind not in ("gpt", "chat") or "n_layer" not in state.get("model_args", {}):
        raise CheckpointError(f"{path}: a checkpoint of a gpt or chat model is needed, with its "
                              f"model_args; this one is of {kind}")
    return state


def describe_backbone(path):
    """What a run must know of its backbone, in plain types."""
    state = read_backbone(path)
    spec = state.get("spec") or {}
    return dict(sha256=state["digest"], shape=state["model_args"],
                tokenizer=spec.get("tokenizer") or state.get("tokenizer"))


def open_data(config, ranks):
    found, path = broadcast_from_rank0(lambda: describe_backbone(config.backbone), ranks), config.backbone
    c = with_shape(config, found["shape"], path)  # its block_size, above all
    data = (chat.open_data if chat.is_chat(c.data_dir) else open_token_data)(c, ranks)
    check_tokenizer(found["tokenizer"], data.spec["tokenizer"], path, c.allow_change)
    if data.spec["vocab_size"] > found["shape"]["vocab_size"]:
        raise CheckpointError(f"{path}: knows {found['shape']['vocab_size']} ids, the data in "
                              f"{c.data_dir} have {data.spec['vocab_size']}")
    data.spec |= dict(vocab_size=found["shape"]["vocab_size"], backbone=found["sha256"])
    return data


def backbone_of(config, data, kept=torch.float32):
    """(`config` with its shape, its weights {name: tensor}, in float32 but for those of type
    `kept`) of the backbone, which must be the one that data.spec names. CheckpointError."""
    state = read_backbone(config.backbone)
    if state["digest"] != data.spec["backbone"]:
        raise CheckpointError(f"backbone: {config.backbone} has other weights than the ones that "
                              f"were trained on (sha256 {data.spec['backbone'][:16]}...); name "
                              "their file: --backbone")
    c = with_shape(config, state["model_args"], config.backbone)
    return c, {name: t if t.dtype == kept else t.float() for name, t in state["model"].items()}


def build_model(config, data):
    """The backbone, see backbone_of, with adapters. Raises CheckpointError."""
    kept = torch.float32
    if hasattr(data, "train") and config.distributed != "fsdp":  # which wants one type
        # In training what is frozen stays in the precision of its file, if products are computed
        # in that: half of float32's memory.
        dtype, _ = choose_dtype(config.dtype, get_device(config.device))
        kept = dtype if dtype == torch.bfloat16 else kept  # float16 would be the stream's, too
    c, weights = backbone_of(config, data, kept)
    kind = functools.partial(LoRA, weights=weights, r=c.lora_rank,
                             alpha=c.lora_alpha, targets=c.lora_targets,
                             quantized=c.quantize_base == "int8")
    try:
        return (chat if "template" in data.spec else gpt).build_model(c, data, kind)
    except RuntimeError as error:  # of load_state_dict
        raise CheckpointError(f"{config.backbone}: {error}") from error


def sample(model, data, config):
    return (chat if "template" in data.spec else gpt).sample(model, data, config)


# -----------------------------------------------------------------------------
# the merged checkpoint

def load_adapters(ckpt, backbone=None, ema=False):
    """(model in eval mode, the checkpoint's dict) of adapters; backbone: where theirs is now; ema:
    their running averages."""
    state = load_checkpoint(ckpt)
    state = load.use_ema(state, ckpt) if ema else state
    if (state.get("config") or {}).get("model") != "lora":
        raise CheckpointError(f"{ckpt}: no adapters in it: expected a checkpoint of --model lora")
    config = load.saved_config(state["config"] | (dict(backbone=backbone) if backbone else {}))
    model = build_model(config, types.SimpleNamespace(spec=state["spec"]))
    try:
        model.load_state_dict(convert_ddp_state(state["model"]))
    except RuntimeError as error:
        raise CheckpointError(f"{ckpt}: {error}") from error
    return model.eval(), state


def as_gpt(state, path, backbone=None, ema=False):
    """Return ({name: tensor}, GPTConfig) of the backbone with merged adapters, for exports."""
    model, _ = load_adapters(path, backbone, ema)
    return merge(model), model.config


def own_adapters_as_gpt(state, path, backbone=None, ema=False):
    """Return as_gpt of a checkpoint of OwnAdapters."""
    model, _ = load.model_of(state, path)
    return merge(model), model.config


def export(ckpt, to, backbone=None):
    """Write the adapters in `ckpt` and their backbone as one checkpoint of a gpt or chat model."""
    model, state = load_adapters(ckpt, backbone)
    kind, shape = "chat" if "template" in state["spec"] else "gpt", asdict(model.config)
    config = {k: v for k, v in state["config"].items() if k in FIELDS} | dict(model=kind)
    save_merged(to, state | dict(config=config), model, shape)
    print(f"Wrote {to}: {len(adapters(model))} adapters merged into their backbone, a {kind} "
          f"model\nNext: python -m model.{'chat' if kind == 'chat' else 'sample'} --ckpt {to}")


def save_merged(to, state, model, shape):
    """Write `model` and what it stands on as one checkpoint: `state` was that of what was trained.
    """
    spec = {k: v for k, v in state["spec"].items() if k != "backbone"}
    kept = {k: state.get(k) for k in ("iter_num", "best_val_loss", "tokenizer")}
    save_checkpoint(to, dict(kept, format_version=FORMAT_VERSION, model=merge(model), spec=spec,
                             model_args=shape, config=state["config"] | shape))


def merge_command(name, description, export, argv):
    """Runs `python -m model.NAME`, which merges what was trained; its exit code."""
    parser = argparse.ArgumentParser(f"python -m model.{name}", description=description)
    parser.add_argument("--ckpt", default=f"out/{name}/ckpt.pt", help="the checkpoint of what was "
                        "trained (default: %(default)s)")
    parser.add_argument("--to", required=True, metavar="FILE.pt", help="the checkpoint to write")
    parser.add_argument("--backbone", help=load.BACKBONE)
    return run_command(parser, lambda args: export(**vars(args)), argv)


def main(argv=None):
    """Runs the command; its exit code."""
    return merge_command("lora", "Merge adapters into the model they were trained on.", export,
                         argv)


if __name__ == "__main__":
    sys.exit(main())
