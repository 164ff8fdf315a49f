"""Evaluation: sums over batches become numbers, equal at any world size and at any batch size that
covers the same samples.

A model returns the mean loss of a batch and sums over the batch's items. Sums are only ever added,
in the order of the batches and in float64, and become numbers at the very end.
"""

import functools

import torch
import torch.distributed as dist

from train.base.errors import SetupError
from train.distributed import all_gather_vectors
from train.logger import LINE_NAMES
from train.system import ModelHooks, hook


def batch_sums(loss, sums, count):
    """Return {name: float64 tensor} of one batch: `sums`, the number of items as "count" (default:
    `count`), and the sum of the items' losses as "loss". loss: 0-dim, the mean."""
    # float32 sums depend on the order of additions in the eighth digit. MPS has no float64.
    precise = torch.float32 if loss.device.type == "mps" else torch.float64
    out = {name: value.detach().to(precise) for name, value in sums.items()}
    if "count" not in out:
        out["count"] = torch.full((), count, dtype=precise, device=loss.device)
    out["loss"] = loss.detach().to(precise) * out["count"]
    return out


def add_sums(total, sums):
    """Add `sums` to `total` in place."""
    for name, value in sums.items():
        total[name] = total[name] + value if name in total else value


def to_vector(sums):
    """Concatenate all sums, ordered by name, for communication between ranks. (n,)"""
    return torch.cat([sums[name].flatten() for name in sorted(sums)])


def from_vector(vector, sums):
    """Split `vector` into {name: tensor} with the shapes of `sums`."""
    names = sorted(sums)  # the same order on every rank, however a model fills its dict
    parts = vector.split([sums[name].numel() for name in names])
    return {n: part.view(sums[n].shape) for n, part in zip(names, parts, strict=True)}


def all_reduce(sums):
    """Add `sums` over all ranks, on the device."""
    vector = to_vector(sums)  # one collective for all sums
    dist.all_reduce(vector)
    return from_vector(vector, sums)


def to_host(sums, norm):
    """Return `sums` as float64 CPU tensors and `norm` as a float, in one transfer."""
    # Every .item() would wait for the device once more.
    vector = torch.cat([to_vector(sums), norm.to(sums["loss"].dtype).reshape(1)]).cpu().double()
    return from_vector(vector[:-1], sums), float(vector[-1])


def to_numbers(model, sums):
    """Return {name: number or None} for a log line from sums over all batches: "loss" (None if no
    item counted) and the model's numbers(sums)."""
    # Only here sums become numbers: a mean of means would weigh a small batch like a full one.
    loss = float(sums["loss"] / sums["count"]) if sums["count"] else None
    model_numbers = getattr(model, "numbers", functools.partial(ModelHooks.numbers, model))
    numbers = {name: value.tolist() if hasattr(value, "tolist") else value
               for name, value in model_numbers(sums).items()}
    # A number called `lr` or `iter` would overwrite that of the line.
    if reserved := (LINE_NAMES | {"count"}) & set(numbers):
        raise ValueError(f"{type(model).__name__}.numbers: {', '.join(sorted(reserved))}: these "
                         "names are reserved for log lines; use others")
    return dict(loss=loss, **numbers)


@torch.no_grad()
def evaluate(model, forward, loader, n_batches, ranks, autocast, stop=lambda done, total: False):
    """Return {val_NAME: number} over `n_batches` fixed batches of `loader`, or all that it has.

    forward(*batch) -> (loss, sums); the model, in eval mode, turns the sums into numbers. Rank r
    computes batches r, r + world_size, ... After each round the sums of all ranks are added in the
    order of the batches, so the result does not depend on the number of ranks. stop(done, total) is
    called before each round; if it is true on any rank, None is returned on every rank.
    """
    n = loader.n_fixed(n_batches)
    source_of = hook(loader, "source_of")  # of a mixture: every batch belongs to one source
    totals = {}                            # {source: vector of sums}
    for first in range(0, n, ranks.world_size):
        # The request to stop travels with the sums, so that all ranks leave in the same round.
        stop_flag = torch.tensor([stop(first, n)], dtype=torch.float64)
        index = first + ranks.rank
        # Every rank computes in every round, as a sharded model requires; a surplus is not added.
        batch = loader.fixed_batch(min(index, n - 1), n_batches, ranks.device)
        with autocast():
            loss, sums = forward(*batch)
        sums = batch_sums(loss, sums, len(batch[0]) * loader.units_per_sample)
        rows = all_gather_vectors(torch.cat([to_vector(sums).double().cpu(), stop_flag]), ranks)
        if rows[:, -1].any():
            return None
        # One row per batch, in the order of the batches. (n sums,)
        for i, row in enumerate(rows[:n - first, :-1], first):
            source = source_of(i, n_batches)
            totals[source] = totals.get(source, 0.0) + row
    by_source = {source: from_vector(total, sums) for source, total in totals.items()}
    if not all(sums["count"] for sums in by_source.values()):
        raise SetupError("evaluation: no item of the validation data counts; is every target "
                         "masked?")
    numbers = to_numbers(model, hook(loader, "merge")(by_source))
    numbers |= {f"loss_{source}": float(sums["loss"] / sums["count"])
                for source, sums in by_source.items() if source}
    return {f"val_{name}": value for name, value in numbers.items()}
