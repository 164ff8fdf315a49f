"""The optimizer: which tensors decay, and at which rate; fused AdamW, Muon for block matrices."""

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

import torch
import torch.nn as nn

from train.config import ConfigError


def build_optimizer(model, config, log=print):
    """The optimizer of a run: configure_optimizers with the keys of its configuration."""
    c = config
    muon = dict(lr=c.muon_lr, momentum=c.muon_momentum, weight_decay=c.muon_weight_decay)
    return configure_optimizers(model, c.weight_decay, c.learning_rate, (c.beta1, c.beta2),
                                c.adam_eps, muon if c.optimizer == "muon" else None, c.lr_groups,
                                log)


def configure_optimizers(model: torch.nn.Module, weight_decay: float, learning_rate: float,
                         betas: tuple[float, float], eps: float = 1e-8,
                         muon: dict[str, float] | None = None, lr_groups: dict | None = None,
                         log: Callable[[str], object] = print) -> torch.optim.Optimizer:
    """One optimizer over the parameters of `model`, with its groups made.

    Tensors of two or more dimensions decay, the rest (norms, biases, scalars) do not. `muon`, a
    dict of lr, momentum and weight_decay, gives the matrices of the linear layers to Muon.
    `lr_groups` maps a name pattern (see matches) to a multiplier of the learning rate (0 freezes)
    or to a dict with learning_rate, lr_mult or weight_decay; the last pattern that matches wins.
    What the model itself froze stays frozen. Every group keeps its peak rate in `initial_lr`, which
    the schedule scales. Raises ConfigError.
    """
    # One group for each combination of options that occurs: fused kernels work group by group.
    matrices = muon_parameters(model) if muon else set()
    groups, named = {}, {n: p for n, p in model.named_parameters() if p.requires_grad}
    check_patterns(lr_groups or {}, named)
    for name, p in named.items():
        # Decay is for the weights of products: no norm's gain or bias has a reason to be small.
        decay = weight_decay if p.dim() >= 2 else 0.0
        options = dict(lr=learning_rate, weight_decay=decay, muon=False)
        if name in matrices:
            options = dict(lr=muon["lr"], weight_decay=muon["weight_decay"], muon=True)
        options |= group_options(name, lr_groups or {}, options)
        p.requires_grad_(options["lr"] > 0)  # a rate of 0 freezes: no gradient is computed at all
        if options["lr"] > 0:
            group = groups.setdefault(tuple(options.items()), dict(options, params=[], names=[]))
            group["params"].append(p)
            group["names"].append(name)
    if not groups:
        raise ConfigError(["lr_groups: everything is frozen; leave something to train"])
    for group in groups.values():  # the peak, which the loop scales by the schedule in every step
        group["initial_lr"] = group["lr"]
    say_what_decays(model, groups.values(), log)
    # Fused: one kernel for all tensors of a group instead of ten for each.
    options = dict(lr=learning_rate, betas=tuple(betas), eps=eps, fused=all(
        p.device.type in ("cpu", "cuda", "mps", "xpu") for p in named.values()))
    if muon:
        return Muon(list(groups.values()), momentum=muon["momentum"], **options)
    return AdamW(list(groups.values()), **options)


def muon_parameters(model):
    """Names of the matrices Muon is meant for: weights of linear layers, without the output layer,
    whose rows are classes, and without slivers, which have nothing to orthogonalise."""
    # Embeddings are tables of rows, not maps: their rows have no directions to make orthogonal.
    return {f"{name}.weight" for name, m in model.named_modules()
            if isinstance(m, nn.Linear) and not name.endswith("head") and min(m.weight.shape) >= 16}


def matches(name, pattern):
    """Whether whole parts of a dotted name match: h.1 is in h.1.attn.q.weight, not in h.10.attn.q.
    A part may have wildcards: lora_*, h.*.mlp."""
    # The pattern may begin at any part of the name: attn.q matches h.3.attn.q.weight.
    parts, wanted = name.split("."), pattern.split(".")
    return any(all(map(fnmatchcase, parts[i:], wanted))
               for i in range(len(parts) - len(wanted) + 1))


def group_options(name, lr_groups, options):
    out = {}
    for pattern, value in lr_groups.items():  # in their order: the last one that matches stays
        if matches(name, pattern):
            value = value if isinstance(value, dict) else {"lr_mult": value}
            out = {"lr": value.get("learning_rate", options["lr"] * value.get("lr_mult", 1.0)),
                   "weight_decay": value.get("weight_decay", options["weight_decay"])}
    return out


def check_patterns(lr_groups, names):
    # A pattern that matches nothing is most likely misspelt: training on in silence helps nobody.
    allowed = {"learning_rate", "lr_mult", "weight_decay"}
    for pattern, value in lr_groups.items():
        if not any(matches(n, pattern) for n in names):
            raise ConfigError([f"lr_groups: no parameter matches {pattern!r}; names look like "
                               f"{', '.join(list(names)[:4])}"])
        options = value if isinstance(value, dict) else {"lr_mult": value}
        if set(options) - allowed or min(options.values(), default=0) < 0:
            raise ConfigError([f"lr_groups: {pattern}: expected a number of at least 0 or a "
                               f"mapping of {', '.join(sorted(allowed))}; got {value}"])


def say_what_decays(model, groups, log):
    """Print how many tensors decay, and what Muon takes and lr_groups froze."""
    def count(params, what=""):
        return f"{len(params)} tensors{what} ({sum(p.numel() for p in params):,} params)"
    decayed, rest = ([p for g in groups if bool(g["weight_decay"]) is yes for p in g["params"]]
                     for yes in (True, False))
    log(f"Optimizer configured: {count(decayed, ' decayed')}, {count(rest, ' not decayed')}")
    if matrices := [p for g in groups if g["muon"] for p in g["params"]]:
        log(f"Muon takes {count(matrices)}, AdamW the rest")
    if frozen := [p for p in model.parameters() if not p.requires_grad]:
        log(f"Frozen: {count(frozen)}")


@torch.no_grad()
def clip_gradients(optimizer, max_norm, factor=1.0):
    """Scale all gradients by `factor` and then so that their global norm is at most `max_norm` (0:
    no limit), in one pass. Returns that norm as it was before the limit, a 0-dim tensor."""
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    if hasattr(norm, "full_tensor"):  # FSDP: of shards these are few operations and one exchange
        norm, grads = norm.full_tensor(), [g.to_local() for g in grads]
    norm = norm * factor  # of the gradients that `factor` makes, which are not made yet
    if max_norm:  # 1e-6 as in torch.nn.utils.clip_grad_norm_
        factor = factor * torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    torch._foreach_mul_(grads, torch.as_tensor(factor, device=norm.device))
    return norm


def undecorated(method):
    while hasattr(method, "__wrapped__"):
        method = method.__wrapped__
    return method


class AdamW(torch.optim.AdamW):
    """PyTorch's, without the decorators that keep it out of torch.compile: they import all of that,
    1 to 2 s of every start, and the optimizer is never compiled here."""
    add_param_group = undecorated(torch.optim.AdamW.add_param_group)
    zero_grad = undecorated(torch.optim.AdamW.zero_grad)
    step = torch.no_grad()(undecorated(torch.optim.AdamW.step))


class Muon(AdamW):
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) for groups with
    muon=True, AdamW for the others: one optimizer, one state, one step(), which is for all ranks
    together, as they share the work (train/muon.py)."""

    def __init__(self, groups: Iterable[dict], momentum: float = 0.95, **kwargs):
        super().__init__(groups, **kwargs)
        for group in self.param_groups:
            group.setdefault("momentum", momentum)

    @torch.no_grad()
    def step(self):
        from train.muon import update_matrices
        groups = self.param_groups
        for group in groups:  # matrices by Muon, and below AdamW sees the groups that are left
            if group["muon"]:
                update_matrices(group, self.state)
        self.param_groups = [g for g in groups if not g["muon"]]
        try:
            super().step()
        finally:
            self.param_groups = groups
