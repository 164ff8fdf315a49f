"""A GPT with routed experts: python run_train.py --config train/configs/moe.yaml

In the place of each block's MLP stand n_experts small ones (SwiGLU); a router sends every token to
experts_per_token of them. No token is dropped. The arithmetic is that of Qwen3MoeForCausalLM
(github.com/huggingface/transformers).

What keeps the result the same on one device, under DDP and under FSDP: the weights of all experts
are one tensor (E, out, in), in which an expert without tokens has a gradient of zero, not none; and
the balance of the load is measured within each sequence, so that the split into micro-batches and
ranks changes nothing.

Shapes: B, T, C as in model/gpt.py; E experts, k of them for a token, I the width inside one.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import torch
import torch.nn as nn
import torch.nn.functional as F

from model import gpt
from model.core.init import normal
from model.core.load import read_model_args
from model.core.ops import apply_dropout
from model.gpt import GPT, Block, GPTConfig
from train.base.fields import key
from train.config import find_gpt_conflicts
from train.distributed import convert_ddp_state

sample, inherit_shape = gpt.sample, gpt.inherit_shape
USE = gpt.USE
GPT_FIELDS = {f.name for f in fields(GPTConfig)}


@dataclass
class RouterKeys:
    """What every model with routers has: the weights of M4's parts in the training loss."""
    load_balance_coef: float = key(0.01, "weight of the routers' load balance in the loss", ge=0)
    auxiliary_coef: float = key(0.0, "weight of the squared distance of their use from uniform; "
                                "its gradient goes through the probabilities", ge=0)
    z_loss_coef: float = key(0.001, "weight of the squared size of their logits", ge=0)


@dataclass
class Keys(RouterKeys):
    n_experts: int = key(8, "experts in a block", ge=1, shape=True)
    experts_per_token: int = key(2, "experts that a token uses", ge=1, shape=True)
    expert_hidden: int | None = key(None, "width inside an expert (default: n_hidden / "
                                    "experts_per_token, a dense MLP's work for each token)", ge=1,
                                    shape=True)
    norm_topk_prob: bool = key(True, "the weights of a token's experts add up to 1", shape=True)

    def problems(self):
        out = [text for _, text in find_gpt_conflicts(self)]
        if self.experts_per_token > self.n_experts:
            out.append(f"experts_per_token ({self.experts_per_token}) must not exceed n_experts "
                       f"({self.n_experts})")
        for name, only in (("mlp", "swiglu"), ("bias", False), ("norm_position", "pre")):
            if getattr(self, name) != only:
                out.append(f"{name}: experts know {only} only, got {getattr(self, name)}")
        return out


@dataclass
class MoEConfig(GPTConfig, Keys):
    """The shape of a GPT with experts."""

    def __post_init__(self):
        super().__post_init__()
        self.expert_hidden = (self.expert_hidden
                              or max(1, self.n_hidden // self.experts_per_token))


# -----------------------------------------------------------------------------
# the losses of routers

def router_losses(logits: torch.Tensor, k: int) -> dict[str, torch.Tensor]:
    """{"load_balance", "auxiliary", "z_loss"} of one router, 0-dim tensors, from its logits
    (..., C) of N tokens, each of which goes to the k largest.

    load_balance = C sum_i f_i P_i, where P_i is the mean probability of i and f_i its share of the
    N k assignments (arXiv:2101.03961): 1 where the use is uniform. auxiliary = sum_i (f_i - 1/C)^2.
    Counts have no gradient: f_i passes it on to P_i as it is, so a step lowers the probability of
    what is used too much.
    z_loss = mean(logsumexp(logits)^2) (arXiv:2202.08906)."""
    logits = logits.flatten(0, -2)
    return losses_within(logits, use_of(logits.topk(k, dim=-1).indices, logits.size(-1)))


def losses_within(logits, f):
    """router_losses over the N tokens of each of many sequences: logits (..., N, C), and the use of
    each expert f (..., C) -> (...)."""
    logits, n = logits.float(), logits.size(-1)
    p = logits.softmax(-1).mean(-2)  # (..., C)
    through = f + (p - p.detach())  # f to the bit, with the gradient of P
    return dict(load_balance=n * (f * p).sum(-1), auxiliary=(through - 1 / n).square().sum(-1),
                z_loss=logits.logsumexp(-1).square().mean(-1))


def use_of(chosen, n):
    """The share of each of n experts in the N k assignments. chosen (..., N, k) -> (..., n)."""
    marks = torch.zeros(*chosen.shape[:-1], n, device=chosen.device).scatter_(-1, chosen, 1.0)
    return marks.mean(-2) / chosen.size(-1)


def compute_router_auxiliary_loss(router_losses: Sequence[dict[str, torch.Tensor]],
                                  load_balance_coef: float = 0.01, auxiliary_coef: float = 0.0,
                                  z_loss_coef: float = 0.001) -> torch.Tensor:
    """What routers add to the loss: the parts, weighted, summed over layers. router_losses: a list
    of what router_losses() gives, one for each layer; a part that a layer lacks adds nothing."""
    return sum(load_balance_coef * layer.get("load_balance", 0.0)
               + auxiliary_coef * layer.get("auxiliary", 0.0)
               + z_loss_coef * layer.get("z_loss", 0.0) for layer in router_losses)


# -----------------------------------------------------------------------------
# routing, and products group by group

class Router(nn.Linear):
    """Which k of n groups each token uses, and how much. In float32, as rounding would change the
    choice (a GPU with TF32 rounds the weights to 11 bits, the same in every pass). normalise: a
    token's k weights add up to 1."""

    def __init__(self, dim, n, k, normalise=False):
        super().__init__(dim, n, bias=False)
        self.k, self.normalise = k, normalise

    def forward(self, x):
        """x (B, T, C) -> logits (B, T, n), weights and numbers of the chosen (B, T, k)."""
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.weight.float())
        p, chosen = logits.softmax(-1).topk(self.k, dim=-1)
        return logits, p / p.sum(-1, keepdim=True) if self.normalise else p, chosen


class Groups:
    """M rows of n groups, put in the order of their groups and back. chosen (M,): each row's group.
    ends (n,) int32: where each group ends in that order."""

    def __init__(self, chosen, n):
        ordered, self.order = chosen.sort(stable=True)
        rows, groups = (torch.arange(m, device=chosen.device) for m in (len(chosen), n))
        self.back = torch.empty_like(rows).scatter_(0, self.order, rows)
        self.ends = torch.searchsorted(ordered, groups, right=True, out_int32=True)

    def sort(self, rows):
        return Permute.apply(rows, self.order, self.back)

    def unsort(self, rows):
        return Permute.apply(rows, self.back, self.order)


class Permute(torch.autograd.Function):
    """rows[order]. Autograd's own backward pass adds rows up in an order that depends on timing;
    no two rows meet here, so the inverse permutation does, the same bits every time."""

    @staticmethod
    def forward(ctx, rows, order, back):
        ctx.save_for_backward(back)
        return rows[order]

    @staticmethod
    def backward(ctx, grad):
        return grad[ctx.saved_tensors[0]], None, None


class GroupedLinear(nn.Module):
    """n linear layers without biases, one for each group of rows; weight (n, out, in)."""

    def __init__(self, n, inside, outside):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, outside, inside))

    def forward(self, x, ends):
        """x (M, in), sorted by group; ends (n,) int32 -> (M, out)."""
        w = self.weight
        if torch.is_autocast_enabled(x.device.type):  # it passes over grouped products
            dtype = torch.get_autocast_dtype(x.device.type)
            x, w = x.to(dtype), w.to(dtype)
        if groups_are_fast(x, w):
            return F.grouped_mm(x, w.mT, offs=ends)
        return self.one_by_one(x, w, ends)

    def one_by_one(self, x, w, ends):
        """The same on any device. A group without rows computes as well: its gradient is zero."""
        sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
        return torch.cat([F.linear(rows, w[i]) for i, rows in enumerate(x.split(sizes))])


def groups_are_fast(x, w):
    """Whether PyTorch has the product of all groups: bfloat16 on a GPU of capability 8.0 or more,
    rows of a multiple of 16 bytes. One kernel from 9.0 on (H100); before it (A100) a loop on the
    host, which waits for the sizes in each product, but keeps a compiled model in one graph."""
    return (x.is_cuda and x.dtype == torch.bfloat16 and w.size(1) % 8 == w.size(2) % 8 == 0
            and torch.cuda.get_device_properties(x.device).major >= 8)


class Experts(nn.Module):
    """The MLP of a block: the weighted sum of the outputs of each token's k experts."""

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        self.router = Router(c.n_embd, c.n_experts, c.experts_per_token, c.norm_topk_prob)
        self.gate = GroupedLinear(c.n_experts, c.n_embd, c.expert_hidden)
        self.up = GroupedLinear(c.n_experts, c.n_embd, c.expert_hidden)
        self.down = GroupedLinear(c.n_experts, c.expert_hidden, c.n_embd)

    def forward(self, x):
        """x (B, T, C) -> the same shape, the router's logits (B, T, E) and choice (B, T, k)."""
        logits, weights, chosen = self.router(x)
        groups = Groups(chosen.flatten(), self.config.n_experts)
        copies = x.unsqueeze(2).expand(-1, -1, chosen.size(2), -1)  # (B, T, k, C)
        rows = groups.sort(copies.flatten(0, 2))  # (B T k, C)
        hidden = F.silu(self.gate(rows, groups.ends)) * self.up(rows, groups.ends)
        y = groups.unsort(self.down(hidden, groups.ends)).view(copies.shape)
        y = (y * weights.to(y.dtype).unsqueeze(-1)).sum(2)  # (B, T, C)
        return apply_dropout(y, self.config.dropout, self.training), (logits, chosen)


# -----------------------------------------------------------------------------
# the model

class RoutedBlock(Block):
    """A block whose compute() returns also (logits (B, T, n), chosen (B, T, k)) of its router."""

    def forward(self, x, rope, cache=None):
        # Kept aside, here and not in compute(), which gradient checkpointing repeats. As a result
        # of the block they would have FSDP gather all blocks at the start of the backward pass.
        x, self.routed = super().forward(x, rope, cache)
        return x


class MoEBlock(RoutedBlock):

    def __init__(self, config, layer):
        super().__init__(config, layer, mlp=Experts)

    def compute(self, x, rope, cache=None):
        x = x + self.attn(self.ln_1(x), rope, cache)
        y, routed = self.mlp(self.ln_2(x))
        return x + y, routed


class RoutedGPT(GPT):
    """A GPT of RoutedBlocks. The training loss has the routers' losses in it, evaluation is the
    language model's alone; both log all parts, and how evenly the experts are used."""

    def routers(self):
        return [m for m in self.modules() if isinstance(m, Router)]

    def forward(self, idx, targets=None, cache=None, last_only=False):
        out = super().forward(idx, targets, cache, last_only)
        routed = [block.__dict__.pop("routed") for block in self.h]
        return out if targets is None else self.with_routers(*out, routed)

    def with_routers(self, loss, sums, routed, items=None):
        """(loss, sums) with the parts of the routers. routed: [(logits, chosen)] of each block.
        items (B,): those that count in each sequence, where not all do; by them sequences weigh."""
        c = self.config
        logits, chosen = map(torch.stack, zip(*routed))  # (L, B, T, n), (L, B, T, k)
        used, (B, T) = use_of(chosen, logits.size(-1)), chosen.shape[1:3]  # (L, B, n)
        parts = losses_within(logits, used)  # (L, B) each: of every sequence
        used = used.sum(1) * T  # (L, n)
        logged = {name: part.detach().mean(0).sum() * T for name, part in parts.items()}
        sums = dict(sums, routed=used, **logged)
        if self.training:
            sums["lm_loss"] = loss.detach() * sums.get("count", B * T)
            if items is not None:
                weights = items * (B / items.sum().clamp(min=1))  # (B,), 1 in the mean
                parts = {name: part * weights for name, part in parts.items()}
            layers = [{name: part[i].mean() for name, part in parts.items()}
                      for i in range(c.n_layer)]
            loss = loss + compute_router_auxiliary_loss(layers, c.load_balance_coef,
                                                        c.auxiliary_coef, c.z_loss_coef)
        return loss, sums

    def numbers(self, sums):
        """A GPT's, and load_balance (1: uniform), auxiliary and z_loss, means over sequences and
        layers; use: of each expert by each layer, 1 being its fair share, and the extremes of
        these; in training lm_loss, the loss without the routers' part."""
        tokens, use = float(sums["routed"][0].sum()), sums["routed"]
        use = use * (use.size(1) / max(1.0, tokens))  # (L, n), 1: as much as the others
        out = {name: float(sums[name]) / max(1.0, tokens) for name in
               ("load_balance", "auxiliary", "z_loss")}
        if "lm_loss" in sums:
            out["lm_loss"] = float(sums["lm_loss"]) / max(1.0, float(sums["count"]))
        return super().numbers(sums) | out | dict(
            use_min=float(use.min()), use_max=float(use.max()),
            use=[[round(x, 4) for x in layer] for layer in use.tolist()])

    def initial(self, name, shape, seed):
        if re.fullmatch(r"h\.\d+\.mlp\.router\.weight", name):
            return normal(name, shape, 0.02, seed)
        return super().initial(name, shape, seed)

    def compile(self, *args, **kwargs):
        """torch.compile, but for products one group at a time: other sizes at every step, each of
        which would be compiled anew."""
        for module in self.modules():
            if isinstance(module, GroupedLinear):
                module.one_by_one = torch.compiler.disable(module.one_by_one)
        super().compile(*args, **kwargs)

    def flops_per_unit(self):
        """Training FLOPs a token, of what it uses: k of n groups."""
        router = self.routers()[0]
        stacked = sum(m.weight.numel() for m in self.modules() if isinstance(m, GroupedLinear))
        return super().flops_per_unit() - 6 * (stacked - stacked * router.k // router.out_features)


class MoE(RoutedGPT):
    block_class = MoEBlock


def build_routed(config, data, kind, shape, build=gpt.build_model):
    """A model of class `kind`, whose config is of class `shape`: GPTConfig with keys of its own."""
    own = {f.name: getattr(config, f.name) for f in fields(shape) if f.name not in GPT_FIELDS}
    return build(config, data, lambda c, seed, token_bytes: kind(
        shape(**asdict(c), **own), seed, token_bytes))


def build_model(config, data):
    """The model of a run, see model/gpt.py."""
    return build_routed(config, data, MoE, MoEConfig)


def as_gpt(state, path, backbone=None, ema=False):
    """Return ({name: tensor}, MoEConfig) of a checkpoint, for exports."""
    weights = convert_ddp_state(state["model"])
    return weights, read_model_args(state.get("model_args") or {}, weights, MoEConfig)
