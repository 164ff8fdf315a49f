"""The optimizer: which tensors decay, and at which rate; fused AdamW; Muon for block matrices."""

from fnmatch import fnmatch

import torch
import torch.nn as nn

from train.distributed import has_native_bfloat16


def configure_optimizers(model, weight_decay, learning_rate, betas, eps=1e-8, muon=None,
                         lr_groups=None, log=print):
    """One optimizer over the parameters of `model`, with its groups made.

    Tensors of two or more dimensions decay, the rest (norms, biases, scalars) do not. `muon`, a
    dict of lr, momentum and weight_decay, gives the matrices of the linear layers to Muon.
    `lr_groups` maps a name pattern to a multiplier of the learning rate (0 freezes) or to a dict
    with learning_rate, lr_mult or weight_decay; the last pattern that matches wins. Every group
    keeps its peak rate in `initial_lr`, which the schedule scales.
    """
    matrices = muon_parameters(model) if muon else set()
    groups, named = {}, dict(model.named_parameters())
    check_patterns(lr_groups or {}, named)
    for name, p in named.items():
        decay = weight_decay if p.dim() >= 2 else 0.0
        options = dict(lr=learning_rate, weight_decay=decay, muon=False)
        if name in matrices:
            options = dict(lr=muon["lr"], weight_decay=muon["weight_decay"], muon=True)
        options |= group_options(name, lr_groups or {}, options)
        p.requires_grad_(options["lr"] > 0)
        if options["lr"] > 0:
            group = groups.setdefault(tuple(options.items()), dict(options, params=[], names=[]))
            group["params"].append(p)
            group["names"].append(name)
    for group in groups.values():
        group["initial_lr"] = group["lr"]
    report(model, groups.values(), log)
    kind = Muon if muon else AdamW
    extra = dict(momentum=muon["momentum"]) if muon else {}
    fused = all(p.device.type in ("cpu", "cuda", "mps", "xpu") for p in named.values())
    return kind(list(groups.values()), lr=learning_rate, betas=tuple(betas), eps=eps, fused=fused,
                **extra)


def muon_parameters(model):
    """Names of the matrices Muon is meant for: weights of linear layers, without the output layer,
    whose rows are classes, and without slivers, which have nothing to orthogonalise."""
    return {f"{name}.weight" for name, m in model.named_modules()
            if isinstance(m, nn.Linear) and "head" not in name and min(m.weight.shape) >= 16}


def group_options(name, lr_groups, options):
    out = {}
    for pattern, value in lr_groups.items():
        if fnmatch(name, f"*{pattern}*"):
            value = value if isinstance(value, dict) else {"lr_mult": value}
            out = {"lr": value.get("learning_rate", options["lr"] * value.get("lr_mult", 1.0)),
                   "weight_decay": value.get("weight_decay", options["weight_decay"])}
    return out


def check_patterns(lr_groups, names):
    allowed = {"learning_rate", "lr_mult", "weight_decay"}
    for pattern, value in lr_groups.items():
        if not any(fnmatch(n, f"*{pattern}*") for n in names):
            raise ValueError(f"lr_groups: no parameter matches {pattern!r}; names look like "
                             f"{', '.join(list(names)[:4])}")
        unknown = set(value) - allowed if isinstance(value, dict) else ()
        numbers = value.values() if isinstance(value, dict) else [value]
        if unknown or min(numbers, default=0) < 0:
            raise ValueError(f"lr_groups: {pattern}: expected a number of at least 0 or a mapping "
                             f"of {', '.join(sorted(allowed))}; got {value}")


def report(model, groups, log):
    """Print how many tensors decay, as nanoGPT does, and what Muon takes and lr_groups froze."""
    def count(params):
        return f"{len(params)} tensors", f"({sum(p.numel() for p in params):,} params)"
    used = [p for g in groups for p in g["params"]]
    decayed, n_decayed = count([p for p in used if p.dim() >= 2])
    rest, n_rest = count([p for p in used if p.dim() < 2])
    log(f"Optimizer configured: {decayed} decayed {n_decayed}, {rest} not decayed {n_rest}")
    matrices = [p for g in groups if g["muon"] for p in g["params"]]
    if matrices:
        log(f"Muon takes {' '.join(count(matrices))}, AdamW the rest")
    frozen = [p for p in model.parameters() if not p.requires_grad]
    if frozen:
        log(f"Frozen by lr_groups: {' '.join(count(frozen))}")


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
    muon=True, AdamW for the others: one optimizer, one state, one step().

    The update of a matrix is its Nesterov momentum made orthogonal by five Newton-Schulz steps,
    times sqrt(max(1, rows / columns)). Matrices of one shape go through those steps as one batch.
    """

    def __init__(self, groups, momentum=0.95, **kwargs):
        super().__init__(groups, **kwargs)
        for group in self.param_groups:
            group.setdefault("momentum", momentum)

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        found_inf = getattr(self, "found_inf", None)  # set where a step may have to be skipped
        groups = self.param_groups
        for group in groups:
            if group["muon"]:
                self._muon_step(group, found_inf)
        self.param_groups = [g for g in groups if not g["muon"]]
        try:
            super().step()
        finally:
            self.param_groups = groups
        return loss

    def _muon_step(self, group, found_inf):
        by_shape = {}  # a matrix and the transpose of another go through as one batch
        for p in group["params"]:
            if p.grad is not None:
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                by_shape.setdefault(tuple(sorted(p.shape)), []).append(p)
        for params in by_shape.values():
            grads, keep = [p.grad for p in params], 1.0
            buffers = [self.state[p]["momentum_buffer"] for p in params]
            if found_inf is not None:  # decided on the device: a skipped step changes nothing
                grads = [torch.where(found_inf > 0, b, g)
                         for b, g in zip(buffers, grads, strict=True)]
                keep = (found_inf == 0).float()
            torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
            nesterov = torch._foreach_lerp(grads, buffers, group["momentum"])
            if group["weight_decay"]:
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"] * keep)
            updates = orthogonalize(torch.stack([wide(u) for u in nesterov])).to(params[0].dtype)
            for p, update in zip(params, updates * keep, strict=True):
                update = update.mT if p.size(0) > p.size(1) else update
                p.add_(update, alpha=-group["lr"] * max(1.0, p.size(0) / p.size(1)) ** 0.5)


def wide(x):
    """x (..., rows, columns), transposed where it has more rows than columns."""
    return x.mT if x.size(-2) > x.size(-1) else x


def orthogonalize(g, steps=5):
    """The nearest semi-orthogonal matrices to g (N, rows, columns), roughly: singular values end in
    about [0.7, 1.2], enough for an update. A quintic Newton-Schulz iteration on the short side, in
    bfloat16 where the device multiplies it natively: emulated it is slower than float32."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = wide(g).to(torch.bfloat16 if has_native_bfloat16(g.device) else torch.float32)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):  # x <- (a I + b S + c S S) x with S = x x'
        s = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(s, s, s, beta=b, alpha=c), x, beta=a)
    return x.mT if g.size(-2) > g.size(-1) else x
