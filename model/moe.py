"""A GPT with routed experts (mixture of experts): --config train/configs/moe.yaml.

Each block has n_experts small MLPs (SwiGLU) instead of one. A router sends every token to
experts_per_token experts; no token is dropped. By default, the arithmetic is that of
Qwen3MoeForCausalLM in Hugging Face transformers. With router_score sigmoid, balance_rate and
shared_experts, routing and balancing are those of DeepSeek-V3 (arXiv:2412.19437) without groups of
experts: instead of a loss, a bias per expert balances the load; it affects only which experts are
selected (arXiv:2408.15664).

The results are the same on one device, under DDP and under FSDP: the weights of all experts are one
tensor (E, out, in), in which an expert without tokens has a zero gradient; load balance is measured
within each sequence, and biases follow the load of all ranks, so that the split into micro-batches
and ranks does not matter.

Shapes: B, T, C as in model/gpt.py; E experts, k experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
import torch.nn.functional as F

from model import gpt
from model.core.init import normal
from model.core.ops import apply_dropout
from model.gpt import GPT, MLP, USE, Block, GPTConfig, as_gpt, sample  # noqa: F401  model interface
from train.base.fields import key


@dataclass
class RouterKeys:
    """Configuration keys of models with routers (moe, memory): the weights of the router losses."""
    load_balance_coef: float = key(0.01, "weight of the load balance loss", ge=0)
    auxiliary_coef: float = key(0.0, "weight of the load's squared distance from uniform", ge=0)
    z_loss_coef: float = key(0.001, "weight of the router logits' squared logsumexp", ge=0)


@dataclass
class Keys(RouterKeys):
    n_experts: int = key(8, "experts per block", ge=1, shape=True)
    experts_per_token: int = key(2, "experts per token", ge=1, shape=True)
    shared_experts: int = key(0, "experts that every token uses, unrouted", ge=0, shape=True)
    expert_hidden: int | None = key(None, "width of an expert [n_hidden / experts of a token]",
                                    ge=1, shape=True)
    norm_topk_prob: bool = key(True, "scale a token's expert weights to sum 1", shape=True)
    router_score: str = key("softmax", "an expert's weight, from the router's logits",
                            choices=["softmax", "sigmoid"], shape=True)
    balance_rate: float = key(0.0, "change per step of an expert's bias, which balances the load "
                              "without a loss, e.g. 0.001; 0: no bias", ge=0, shape=True)

    def problems(self):
        required = dict(mlp="swiglu", bias=False, norm_position="pre")
        out = [f"{name}: must be {value} with experts, got {getattr(self, name)}"
               for name, value in required.items() if getattr(self, name) != value]
        if self.experts_per_token > self.n_experts:
            out.append(f"experts_per_token ({self.experts_per_token}) must not exceed n_experts "
                       f"({self.n_experts})")
        return out


@dataclass
class MoEConfig(GPTConfig, Keys):
    """Architecture of a GPT with experts; default expert_hidden: n_hidden / experts of a token."""

    def __post_init__(self):
        super().__post_init__()
        active = self.experts_per_token + self.shared_experts
        self.expert_hidden = self.expert_hidden or max(1, self.n_hidden // active)


# -----------------------------------------------------------------------------
# router losses

def router_losses(logits: torch.Tensor, k: int) -> dict[str, torch.Tensor]:
    """Return the losses of a router, 0-dim tensors {"load_balance", "auxiliary", "z_loss"}.

    logits (..., E): of the router, for N tokens in all. k: experts per token, the largest logits.
    With P_i, the mean probability of expert i (softmax of the logits), and f_i, the share of expert
    i in the N k assignments of tokens to experts:
    load_balance = E sum_i f_i P_i (arXiv:2101.03961), which is 1 for a uniform load;
    auxiliary = sum_i (f_i - 1/E)^2, where f_i, a count, gets the gradient of P_i;
    z_loss = mean(logsumexp(logits)^2) (arXiv:2202.08906).
    """
    logits = logits.flatten(0, -2)  # (N, E)
    return sequence_losses(logits, compute_load(logits.topk(k, dim=-1).indices, logits.size(-1)))


def sequence_losses(logits, load):
    """Return router_losses(), (...) each, for every sequence of N tokens.

    logits (..., N, E): of the router. load (..., E): compute_load() of the selected experts.
    """
    logits = logits.float()
    n = logits.size(-1)
    p = logits.softmax(-1).mean(-2)  # (..., E)
    straight_through = load + (p - p.detach())  # the value of load, with the gradient of p
    return dict(load_balance=n * (load * p).sum(-1),
                auxiliary=(straight_through - 1 / n).square().sum(-1),
                z_loss=logits.logsumexp(-1).square().mean(-1))


def compute_load(chosen, n):
    """Return the share (..., n) of each of n experts in `chosen` (..., N, k), expert indices."""
    marks = torch.zeros(*chosen.shape[:-1], n, device=chosen.device).scatter_(-1, chosen, 1.0)
    return marks.mean(-2) / chosen.size(-1)


def compute_router_auxiliary_loss(router_losses: Sequence[dict[str, torch.Tensor]],
                                  load_balance_coef: float = 0.01, auxiliary_coef: float = 0.0,
                                  z_loss_coef: float = 0.001) -> torch.Tensor:
    """Return the weighted sum over layers of router losses, 0-dim; a missing loss counts as 0."""
    return sum(load_balance_coef * layer.get("load_balance", 0.0)
               + auxiliary_coef * layer.get("auxiliary", 0.0)
               + z_loss_coef * layer.get("z_loss", 0.0) for layer in router_losses)


# -----------------------------------------------------------------------------
# routing and grouped matrix products

class Router(nn.Linear):
    """Linear layer that selects k of n groups, e.g. experts, for each token, and weights them.

    It computes in float32, because rounding changes the selection.
    normalise: scale the k weights of a token to sum 1.
    score: the function of the logits that gives the weights, "softmax" or "sigmoid".
    balanced: create the buffer load_bias (n,), else `None`, see move_bias(); it is added to the
    weights for the selection only.
    """
    uses_muon = False  # its rows, one per group, are no linear map to orthogonalise

    def __init__(self, dim, n, k, normalise=False, score="softmax", balanced=False):
        super().__init__(dim, n, bias=False)
        self.k = k
        self.normalise = normalise
        self.score = score
        self.register_buffer("load_bias", torch.zeros(n) if balanced else None)

    def forward(self, x):
        """Return logits (B, T, n), and weights and indices (B, T, k) of the selected groups."""
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.weight.float())
        p = logits.sigmoid() if self.score == "sigmoid" else logits.softmax(-1)  # (B, T, n)
        chosen = (p if self.load_bias is None else p + self.load_bias).topk(self.k).indices
        p = p.gather(-1, chosen)  # (B, T, k)
        if self.normalise:
            p = p / (p.sum(-1, keepdim=True) + 1e-20)
        return logits, p, chosen

    def move_bias(self, load, rate):
        """Move load_bias in place by `rate` per group, to balance the load; the mean stays.

        load (n,): tokens per group over all ranks. Biases rise for groups below the mean load.
        """
        step = rate * (load.mean() - load).sign()
        # On CUDA without a wait for the step; on MPS such a copy could read freed memory.
        self.load_bias += (step - step.mean()).to(self.load_bias,
                                                  non_blocking=self.load_bias.is_cuda)


class GroupOrder:
    """Permutation that sorts M rows by group, for GroupedLinear; chosen (M,): groups, 0 to n - 1.

    sort(rows (M, ...)) returns the rows in the order of groups; unsort(rows) is the inverse. ends
    (n,) int32: for each group, the index after the last row in sorted order.
    """

    def __init__(self, chosen, n):
        in_order, self.order = chosen.sort(stable=True)
        rows, groups = (torch.arange(m, device=chosen.device) for m in (len(chosen), n))
        self.inverse = torch.empty_like(rows).scatter_(0, self.order, rows)
        self.ends = torch.searchsorted(in_order, groups, right=True, out_int32=True)

    # The backward pass of index_copy_ is a gather. That of indexing would add rows in an order
    # that depends on timing: bits could differ.

    def sort(self, rows):
        return torch.empty_like(rows).index_copy_(0, self.inverse, rows)

    def unsort(self, rows):
        return torch.empty_like(rows).index_copy_(0, self.order, rows)


class GroupedLinear(nn.Module):
    """n linear layers without biases, one per group of rows; weight (n, out, in), uninitialised."""
    uses_muon = True

    def __init__(self, n, in_features, out_features):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, out_features, in_features))

    def forward(self, x, ends):
        """Return the outputs (M, out) for x (M, in), sorted by group; ends: see GroupOrder."""
        w = self.weight
        if torch.is_autocast_enabled(x.device.type):  # it does not convert grouped products
            dtype = torch.get_autocast_dtype(x.device.type)
            x, w = x.to(dtype), w.to(dtype)
        if has_grouped_mm(x, w):
            return F.grouped_mm(x, w.mT, offs=ends)
        return self.loop_over_groups(x, w, ends)

    @torch.compiler.disable  # the compiler would compile anew for other sizes: at every step
    def loop_over_groups(self, x, w, ends):
        """Return forward(x, ends) by one product per group, where F.grouped_mm is unsupported."""
        sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
        return torch.cat([F.linear(rows, one) for rows, one in zip(x.split(sizes), w.unbind())])


def has_grouped_mm(x, w):
    """Return whether F.grouped_mm supports x (M, in) and w (n, out, in).

    `in` and `out` must be multiples of 16 bytes; on a CPU float32 (not in a compiled graph) or
    bfloat16; on a GPU bfloat16 and capability 8.0 or higher. From 9.0 (H100) F.grouped_mm is one
    kernel, otherwise a loop in C++.
    """
    if any(size * x.element_size() % 16 for size in w.shape[1:]):
        return False
    if x.is_cuda:
        return (x.dtype == torch.bfloat16
                and torch.cuda.get_device_properties(x.device).major >= 8)
    # PyTorch 2.13 cannot trace the product of float32.
    return x.device.type == "cpu" and (x.dtype == torch.bfloat16 or x.dtype == torch.float32
                                       and not torch.compiler.is_compiling())


class Experts(nn.Module):
    """Mixture of k weighted experts per token, and shared experts, in place of a block's MLP."""

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        self.router = Router(c.n_embd, c.n_experts, c.experts_per_token, c.norm_topk_prob,
                             c.router_score, c.balance_rate > 0)
        shared = replace(c, n_hidden=c.shared_experts * c.expert_hidden)
        self.shared = MLP(shared) if c.shared_experts else None
        self.gate = GroupedLinear(c.n_experts, c.n_embd, c.expert_hidden)
        self.up = GroupedLinear(c.n_experts, c.n_embd, c.expert_hidden)
        self.down = GroupedLinear(c.n_experts, c.expert_hidden, c.n_embd)

    def forward(self, x, routed):
        """Return y (B, T, C) for x (B, T, C); append (router logits, chosen) to list `routed`."""
        logits, weights, chosen = self.router(x)
        routed.append((logits, chosen))
        groups = GroupOrder(chosen.flatten(), self.config.n_experts)
        copies = x.unsqueeze(2).expand(-1, -1, chosen.size(2), -1)  # (B, T, k, C)
        rows = groups.sort(copies.flatten(0, 2))  # (B T k, C)
        hidden = F.silu(self.gate(rows, groups.ends)) * self.up(rows, groups.ends)
        y = groups.unsort(self.down(hidden, groups.ends)).view(copies.shape)  # (B, T, k, C)
        y = (y * weights.to(y.dtype).unsqueeze(-1)).sum(2)  # (B, T, C)
        y = apply_dropout(y, self.config.dropout, self.training)
        return y if self.shared is None else y + self.shared(x)


# -----------------------------------------------------------------------------
# the model

class RoutedBlock(Block):
    """Base class of a Block with a router, which selects k of n groups (e.g. experts) per token.

    A subclass must define compute(x, *context) -> (x, (logits (B, T, n), chosen (B, T, k))), where
    chosen are indices of groups. forward() returns x and stores the rest as `routed` for RoutedGPT.
    """
    compiles_decoding = False

    def forward(self, x, *context):
        # An attribute instead of a second output, for which FSDP would gather all blocks at the
        # start of the backward pass. Gradient checkpointing repeats compute() only.
        x, self.routed = super().forward(x, *context)
        return x


class MoEBlock(RoutedBlock):
    """RoutedBlock whose feed-forward layer is a mixture of Experts."""

    def __init__(self, config, layer):
        super().__init__(config, layer, mlp=Experts)

    def compute(self, x, *context):
        routed = []
        return super().compute(x, *context, routed=routed), routed[0]


class RoutedGPT(GPT):
    """Base class of a GPT with router losses, which are added to the loss in training only.

    block_class must be a RoutedBlock; config has the fields of RouterKeys. The router losses and
    the load of the groups (experts) are logged in training and in evaluations.
    """

    def compute_loss(self, idx, targets):
        return self.add_router_losses(*super().compute_loss(idx, targets))

    def add_router_losses(self, loss, sums, n_items=None):
        """Return (loss, sums) with the router losses of the last forward pass added.

        They are added always to the sums, and in training, weighted by config, to the loss.
        n_items (B,): targets per sequence, which weight the sequences' losses in training; default,
        and always in the sums: equal weights.
        Call it once after each forward pass: it removes the routers' results from the blocks.
        """
        c = self.config
        routed = [block.__dict__.pop("routed") for block in self.h]
        logits, chosen = map(torch.stack, zip(*routed))  # (L, B, T, n), (L, B, T, k)
        B, T = chosen.shape[1:3]
        load = compute_load(chosen, logits.size(-1))  # (L, B, n)
        losses = sequence_losses(logits, load)  # (L, B) each
        logged = {name: part.detach().mean(0).sum() * T for name, part in losses.items()}
        sums = dict(sums, routed=load.sum(1) * T, **logged)  # routed (L, n)
        if self.training:
            sums["lm_loss"] = loss.detach() * sums.get("count", B * T)
            # (B,), mean 1
            weights = 1.0 if n_items is None else n_items * (B / n_items.sum().clamp(min=1))
            layers = [{name: (part[i] * weights).mean() for name, part in losses.items()}
                      for i in range(c.n_layer)]
            loss = loss + compute_router_auxiliary_loss(layers, c.load_balance_coef,
                                                        c.auxiliary_coef, c.z_loss_coef)
        return loss, sums

    def numbers(self, sums):
        """Return {name: number, list or `None`} for the log from sums added over all batches.

        Besides the numbers of GPT: load_balance (1: uniform), auxiliary and z_loss, means over
        sequences and layers; use, for each layer a list of each expert's load relative to a uniform
        load; use_min and use_max, the lowest and highest of these loads; in training lm_loss, the
        loss without router losses.
        """
        n_tokens = max(1.0, float(sums["routed"][0].sum()))
        use = sums["routed"] * (sums["routed"].size(1) / n_tokens)  # (L, n)
        out = {name: float(sums[name]) / n_tokens
               for name in ("load_balance", "auxiliary", "z_loss")}
        return super().numbers(sums) | out | dict(
            use_min=float(use.min()), use_max=float(use.max()),
            use=[[round(x, 4) for x in layer] for layer in use.tolist()])

    def initial(self, name, shape, seed):
        if name.endswith("mlp.router.load_bias"):
            return torch.zeros(shape)
        if name.endswith("mlp.router.weight"):
            return normal(name, shape, 0.02, seed)
        if ".mlp.shared." in name:  # other values than those of the router's experts
            return super().initial(name.replace(".shared", ""), shape, seed + 1)
        return super().initial(name, shape, seed)

    def flops_per_unit(self):
        """Return the FLOPs of training per token, with only the k groups that a token uses."""
        router = next(m for m in self.modules() if isinstance(m, Router))
        grouped = [m.weight for m in self.modules() if isinstance(m, GroupedLinear)]
        # As in GPT: 2 per weight forward, 2 unless the model is frozen, 2 unless the weight is.
        backward = 2 * any(p.requires_grad for p in self.parameters())
        unused = sum((w.numel() - w.numel() * router.k // router.out_features)
                     * (2 + backward + 2 * w.requires_grad) for w in grouped)
        return super().flops_per_unit() - unused


class MoE(RoutedGPT):
    """A GPT with routed experts in each block; with balance_rate, steps move the router biases."""
    block_class = MoEBlock

    def after_step(self, it, sums):
        for block, load in zip(self.h, sums["routed"]):
            if block.mlp.router.load_bias is not None:
                block.mlp.router.move_bias(load, self.config.balance_rate)


# -----------------------------------------------------------------------------
# model interface, see train/system.py

def inherit_shape(config, model_args):
    if config.balance_rate and model_args.get("balance_rate"):  # both have biases: this run's rate
        model_args = model_args | dict(balance_rate=config.balance_rate)
    return gpt.inherit_shape(config, model_args)


def build_model(config, data):
    return gpt.build_model(config, data, MoE, MoEConfig)
