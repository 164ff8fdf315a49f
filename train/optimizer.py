"""Parameter groups with weight decay and learning rate; fused AdamW; Muon for linear layers."""

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
import torch.nn as nn

from train.base.adamw import AdamW
from train.base.errors import ConfigError
from train.device import has_native_bfloat16
from train.distributed import is_sharded, local


def build_optimizer(model, config, log=print):
    """Return the optimizer of a run, AdamW or Muon, for the parameters of `model`.

    Parameters that config.lr_groups freezes get requires_grad = False. log(line): called with a
    summary. ConfigError for invalid lr_groups, or if no parameter is left to train.
    """
    c = config
    muon = dict(lr=c.muon_lr, momentum=c.muon_momentum, weight_decay=c.muon_weight_decay)
    return configure_optimizers(model, c.weight_decay, c.learning_rate, (c.beta1, c.beta2),
                                c.adam_eps, muon if c.optimizer == "muon" else None, c.lr_groups,
                                log)


def configure_optimizers(model: torch.nn.Module, weight_decay: float, learning_rate: float,
                         betas: tuple[float, float], eps: float = 1e-8,
                         muon: dict[str, float] | None = None, lr_groups: dict | None = None,
                         log: Callable[[str], object] = print) -> torch.optim.Optimizer:
    """Return AdamW or, with `muon`, Muon; betas, eps: AdamW's; others: see group_parameters()."""
    groups = group_parameters(model, weight_decay, learning_rate, muon, lr_groups, log)
    # Fused: one kernel for all tensors of a group instead of ten kernels per tensor.
    options = dict(lr=learning_rate, betas=tuple(betas), eps=eps, fused=all(
        p.device.type in ("cpu", "cuda", "mps", "xpu") for g in groups for p in g["params"]))
    return Muon(groups, muon["momentum"], **options) if muon else AdamW(groups, **options)


def group_parameters(model, weight_decay, learning_rate, muon=None, lr_groups=None, log=print):
    """Return the parameter groups, dicts, of an optimizer over the trainable parameters of `model`.

    Keys: params, names, lr, initial_lr (the peak rate, which the schedule scales), weight_decay,
    muon (whether Muon updates them). The optimizer's constructor sets others, e.g. betas.
    learning_rate: the peak rate, unless `muon` or lr_groups have another.
    weight_decay: for tensors with two or more dimensions; default for others: none.
    muon: dict(lr, momentum, weight_decay) for the matrices of linear layers, which Muon updates.
    lr_groups: {pattern: value} for parameters whose names match (see matches); the last matching
    pattern is used. value: a factor of the learning rate, or dict(learning_rate, lr_mult,
    weight_decay), each optional; learning_rate overrides lr_mult. A rate of 0 freezes: sets
    requires_grad = False.
    log(line): called with a summary. ConfigError for invalid lr_groups, if all parameters are
    frozen, or unless learning_rate > 0.
    """
    if not learning_rate > 0:
        raise ConfigError([f"learning_rate: expected a positive number, got {learning_rate}"])
    # One group per combination of options: fused kernels work group by group.
    matrices = muon_parameters(model) if muon else set()
    groups = {}
    for name, own in match_lr_groups(lr_groups or {}, model).items():
        p = model.get_parameter(name)
        # Matrices and embeddings decay; gains of norms and biases have no reason to be small.
        decay = weight_decay if p.dim() >= 2 else 0.0
        options = dict(lr=learning_rate, weight_decay=decay, muon=False)
        if name in matrices:
            options = dict(lr=muon["lr"], weight_decay=muon["weight_decay"], muon=True)
        options["lr"] = scale_rate(options["lr"], own)
        options["weight_decay"] = own.get("weight_decay", options["weight_decay"])
        p.requires_grad_(options["lr"] > 0)  # a rate of 0 freezes: no gradient is computed
        if options["lr"] > 0:
            group = groups.setdefault(tuple(options.items()), dict(
                options, initial_lr=options["lr"], params=[], names=[]))
            group["params"].append(p)
            group["names"].append(name)
    if not groups:
        raise ConfigError(["lr_groups: all parameters are frozen; at least one must be trainable"])
    log_groups(model, groups.values(), muon, log)
    return list(groups.values())


def muon_parameters(model):
    """Return the names, a set, of the parameters that Muon updates: weights of linear layers.

    Except the output layer (a module name that ends in "head") and matrices with fewer than 16 rows
    or columns (too thin to orthogonalise). A module's attribute uses_muon replaces the test for
    nn.Linear; this weight may be (N, rows, columns).
    """
    # Not embeddings: the rows of a table are independent, and no linear map to orthogonalise.
    names = {f"{name}.weight" for name, m in model.named_modules() if not name.endswith("head")
             and getattr(m, "uses_muon", isinstance(m, nn.Linear))}
    return {name for name, p in model.named_parameters()
            if name in names and min(p.shape[-2:]) >= 16}


def matches(name, pattern):
    """Return whether `pattern`, e.g. h.1 or h.*.mlp, matches consecutive whole parts of `name`."""
    parts = name.split(".")
    wanted = pattern.split(".")
    return any(all(map(fnmatchcase, parts[i:], wanted))
               for i in range(len(parts) - len(wanted) + 1))


def match_lr_groups(lr_groups, model):
    """Return {name: options} of all trainable parameters: of the last matching pattern, or {}.

    lr_groups: {pattern: options, or a number, which means {"lr_mult": number}}.
    options: a dict with learning_rate or lr_mult, and weight_decay, all optional.
    ConfigError for a pattern that matches no such name, or for an invalid value.
    """
    allowed = ("learning_rate", "lr_mult", "weight_decay")
    own_options = {name: {} for name, p in model.named_parameters() if p.requires_grad}
    for pattern, value in lr_groups.items():
        matching = [n for n in own_options if matches(n, pattern)]
        if not matching:
            hint = "; adapters exist if lora_rank is set" if pattern.startswith("lora_") else ""
            if frozen := [n for n, _ in model.named_parameters() if matches(n, pattern)]:
                hint = f"; frozen: {', '.join(frozen[:4])}"
            raise ConfigError([f"lr_groups: no trained parameter matches {pattern!r}; names look "
                               f"like {', '.join(list(own_options)[:4])}{hint}"])
        options = value if isinstance(value, dict) else {"lr_mult": value}
        if options.keys() - allowed or not all(
                isinstance(x, (int, float)) and x >= 0 for x in options.values()) or (
                {"learning_rate", "lr_mult"} <= options.keys()):
            raise ConfigError([f"lr_groups: {pattern}: expected a number of at least 0 or a "
                               "mapping of learning_rate or lr_mult, and weight_decay, got "
                               f"{value}"])
        own_options |= dict.fromkeys(matching, options)
    return own_options


def scale_rate(rate, own):
    """Return a parameter's peak rate, from the default `rate` and the options `own`; 0: frozen."""
    return own.get("learning_rate", rate * own.get("lr_mult", 1.0))


def log_groups(model, groups, muon, log):
    """Log how many tensors have weight decay, use Muon, have each peak rate, or are frozen."""
    def count(params, status=""):
        return f"{len(params)} tensors{status} ({sum(p.numel() for p in params):,} params)"
    decayed = [p for g in groups if g["weight_decay"] for p in g["params"]]
    not_decayed = [p for g in groups if not g["weight_decay"] for p in g["params"]]
    log(f"Optimizer configured: {count(decayed, ' decayed')}, {count(not_decayed, ' not decayed')}")
    if muon:
        log(f"Muon: {count([p for g in groups if g['muon'] for p in g['params']])}; AdamW: all "
            "others")
    rates = sorted({g["lr"] for g in groups})
    if len(rates) > 1:
        log("Peak learning rates: " + "; ".join(
            f"{lr:g}: {count([p for g in groups if g['lr'] == lr for p in g['params']])}"
            for lr in rates))
    if frozen := [p for p in model.parameters() if not p.requires_grad]:
        log(f"Frozen: {count(frozen)}")


def create_state(optimizer):
    """Create the state that the optimizer's first step creates, to copy a checkpoint into it.

    Existing state and gradients are removed. Parameters do not change, unless the optimizer changes
    them at a learning rate of 0 and with zero gradients. With Muon, all ranks must call.
    """
    optimizer.state.clear()
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


# Numbers that group_parameters() and the schedule set, not the optimizer.
GROUP_NUMBERS = ("lr", "initial_lr", "weight_decay", "muon")


def find_numbers(optimizer):
    """Return the numbers in parameter groups that training changed, e.g. of steps.

    {name of the group's first parameter: {key: int, float or bool}}: those that differ from the
    defaults of the optimizer's constructor.
    """
    return {group["names"][0]: {
        k: v for k, v in group.items() if type(v) in (int, float, bool)
        and k not in GROUP_NUMBERS and v != optimizer.defaults.get(k)}
        for group in optimizer.param_groups}


def assign_numbers(optimizer, numbers):
    """Set numbers in parameter groups to those of find_numbers(), in place."""
    for group in optimizer.param_groups:
        group.update(numbers.get(group["names"][0], {}))


def parts_outside_state(optimizer):
    """Return {name: repr} of an optimizer's attributes and options of groups, without its state."""
    groups = {f"{k} of parameter group {i}": repr(v)
              for i, group in enumerate(optimizer.param_groups)
              for k, v in group.items() if k not in ("params", "names")}
    return groups | {f"attribute {k}": repr(v) for k, v in vars(optimizer).items()
                     if not k.startswith("_") and k not in ("state", "param_groups", "defaults")}


class Muon(AdamW):
    """Optimizer: Muon for parameter groups with muon=True, AdamW for groups with muon=False.

    Muon: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/. The key muon is required.
    momentum: for groups without this key. kwargs: of AdamW. All ranks must call step().
    """

    def __init__(self, groups: Iterable[dict], momentum: float = 0.95, **kwargs):
        super().__init__([{"momentum": momentum} | group for group in groups], **kwargs)
        self.defaults["momentum"] = momentum

    @torch.no_grad()
    def step(self):
        groups = self.param_groups
        for group in groups:  # Muon updates the matrices, AdamW.step() the other groups
            if group["muon"]:
                update_matrices(group, self.state)
        self.param_groups = [g for g in groups if not g["muon"]]
        try:
            super().step()
        finally:
            self.param_groups = groups


def update_matrices(group, state):
    """Do a step of Muon, in place, for the matrices with gradients in a parameter group.

    state: the optimizer's state {parameter: {name: tensor}}; a missing momentum_buffer is created.
    The update is the orthogonalised Nesterov momentum times sqrt(max(1, rows / columns)). Matrices
    of equal shape form a batch, which is divided among the ranks. A parameter (N, rows, columns) is
    N matrices; if it is sharded, each rank has complete ones. All ranks must call.
    """
    updated = [p for p in group["params"] if p.grad is not None]
    for p in updated:
        if "momentum_buffer" not in state[p]:
            state[p]["momentum_buffer"] = torch.zeros_like(p)
    for params in batches_by_shape(updated, any(map(is_sharded, updated))):
        weights = split_matrices(params)
        grads = split_matrices([p.grad for p in params])
        buffers = split_matrices([state[p]["momentum_buffer"] for p in params])
        if not weights:  # more ranks than matrices
            continue
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        nesterov = torch._foreach_lerp(grads, buffers, group["momentum"])
        if group["weight_decay"]:
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        if not is_sharded(params[0]):
            updates = orthogonalize_together(nesterov)
        elif params[0].dim() == 2:
            updates = orthogonalize_shards(nesterov, params[0])
        else:
            updates = orthogonalize(torch.stack(nesterov))
        scales = [max(1.0, p.size(-2) / p.size(-1)) ** 0.5 for p in params
                  for _ in split_matrices([p])]
        for weight, update, scale in zip(weights, updates, scales, strict=True):
            weight.add_(update, alpha=-group["lr"] * scale)


def split_matrices(tensors):
    """Return views of the matrices in 2- and 3-dim tensors; of sharded ones, this rank's part."""
    return [matrix for t in map(local, tensors) for matrix in (t if t.dim() == 3 else [t])]


def batches_by_shape(params, sharded):
    """Return lists of `params` by shape or, unless `sharded`, by (transposed) matrix shape."""
    batches = {}
    for p in params:
        shape = tuple(p.shape) if sharded else tuple(sorted(p.shape[-2:]))
        batches.setdefault(shape, []).append(p)
    return list(batches.values())


def gathered_numel(n_matrices, size, n_ranks):
    """Return the elements that a rank sends in orthogonalize_together(); size: of one matrix."""
    # With more ranks than matrices, a rank sends a part of one or two matrices. All ranks send
    # equally many elements: the last ranks may repeat the first matrices.
    if n_matrices >= n_ranks:
        return -(-n_matrices // n_ranks) * size
    return -(-n_matrices * size // n_ranks)


def orthogonalize_together(matrices):
    """Return [orthogonalize(matrix) for matrix in matrices], computed by all ranks together.

    matrices: N >= 1, of equal (or transposed) shape, the same on every rank. All ranks must call,
    and get the same bits.
    """
    n_ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if n_ranks > 1 else 0
    N = len(matrices)
    size = matrices[0].numel()
    part = gathered_numel(N, size, n_ranks)
    start, end = rank * part, (rank + 1) * part  # in all matrices one after the other
    mine = [matrices[i % N] for i in range(start // size, -(-end // size))]
    updates = orthogonalize(torch.stack([wide(m) for m in mine]))  # (of this rank, rows, columns)
    if n_ranks > 1:
        everything = updates.new_empty(n_ranks * part)
        # The second name is deprecated from PyTorch 2.13 on.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(everything, updates.flatten()[start % size:][:part])
        updates = everything[:N * size].view(N, *updates.shape[1:])
    return [u.mT if m.size(0) > m.size(1) else u for m, u in zip(matrices, updates)]


def orthogonalize_shards(parts, param):
    """Orthogonalise N matrices of equal shape that are sharded by rows like the DTensor `param`.

    parts: this rank's N shards (local rows, columns). Return this rank's shards of the results,
    (N, local rows, columns). All ranks must call: on a GPU, two all-to-all collectives, which give
    each rank a few complete matrices, with constant memory per rank.
    """
    from torch.distributed.tensor import DTensor, Shard

    def shard(dim):  # the same in each replica
        return [p if p.is_replicate() else Shard(dim) for p in param.placements]
    options = dict(shape=torch.Size([len(parts), *param.shape]),
                   stride=(param.numel(), param.size(1), 1))
    rows = torch.stack(parts).to(working_dtype(param.device))  # half the bytes to send
    rows = DTensor.from_local(rows, param.device_mesh, shard(1), **options)
    whole = orthogonalize(rows.redistribute(placements=shard(0)).to_local()).contiguous()
    updates = DTensor.from_local(whole, param.device_mesh, shard(0), **options)
    return updates.redistribute(placements=shard(1)).to_local()


def wide(x):
    """Return a view of x (..., rows, columns), transposed if it has more rows than columns."""
    return x.mT if x.size(-2) > x.size(-1) else x


def orthogonalize(g, steps=5):
    """Return approximately the nearest semi-orthogonal matrix to each in g (N, rows, columns).

    By `steps` iterations of a quintic Newton-Schulz method; the singular values become about 0.7 to
    1.2. The result has the shape of g and the dtype working_dtype(g.device).
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = wide(g).to(working_dtype(g.device))
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):  # x <- (a I + b S + c S S) x with S = x x'
        s = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(s, s, s, beta=b, alpha=c), x, beta=a)
    return x.mT if g.size(-2) > g.size(-1) else x


def working_dtype(device):
    """Return the dtype to orthogonalise in: bfloat16 if native on the device, otherwise float32."""
    return torch.bfloat16 if has_native_bfloat16(device) else torch.float32
