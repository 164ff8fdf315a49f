"""Sums over batches, and the numbers made of them: the same at any world size, and at any batch
size that covers the same samples.

A model returns the mean loss of a batch and sums over the batch's items. Here sums are only ever
added, in the order of the batches and in float64, and turned into numbers at the very end.
"""

import torch
import torch.distributed as dist

from train.base.errors import SetupError
from train.distributed import all_gather_vectors
from train.logger import LINE_NAMES


def batch_sums(loss, sums, count):
    """{name: float64 tensor} of one batch: `sums`, "count" (its items: sums' own, or `count`) and
    "loss", the sum over the items. loss: 0-dim mean."""
    # Sums of float32 would depend on their order from the eighth digit on. MPS has no float64.
    precise = torch.float32 if loss.device.type == "mps" else torch.float64
    out = {name: value.detach().to(precise) for name, value in sums.items()}
    if "count" not in out:
        out["count"] = torch.full((), count, dtype=precise, device=loss.device)
    out["loss"] = loss.detach().to(precise) * out["count"]
    return out


def add_sums(total, sums):
    """Add `sums` to `total`, in place."""
    for name, value in sums.items():
        total[name] = total[name] + value if name in total else value


def to_vector(sums):
    """All sums side by side, in the order of their names: what crosses between ranks. (n,)"""
    return torch.cat([sums[name].flatten() for name in sorted(sums)])


def from_vector(vector, sums):
    """`vector` as {name: tensor} in the shapes of `sums`."""
    names = sorted(sums)  # the same order on every rank, however a model fills its dict
    parts = vector.split([sums[name].numel() for name in names])
    return {n: part.view(sums[n].shape) for n, part in zip(names, parts, strict=True)}


def all_reduce(sums, ranks):
    """`sums` added over all ranks, on their device."""
    if ranks.world_size == 1:
        return sums
    vector = to_vector(sums)  # one exchange for all of them
    dist.all_reduce(vector)
    return from_vector(vector, sums)


def to_host(sums, norm):
    """`sums` as float64 CPU tensors and `norm` as a float, in one transfer."""
    # Every .item() would wait for the device once more.
    vector = torch.cat([to_vector(sums), norm.to(sums["loss"].dtype).reshape(1)]).cpu().double()
    return from_vector(vector[:-1], sums), float(vector[-1])


def to_numbers(model, sums):
    """{name: number or None} that a log line shows of sums over all batches, "loss" first (None
    where nothing counted): the model's own numbers(sums), else every scalar sum divided by the
    count."""
    # Only here sums become numbers: a mean of means would weigh a small batch like a full one.
    loss = float(sums["loss"] / sums["count"]) if sums["count"] else None
    if hasattr(model, "numbers"):
        numbers = model.numbers(sums)
    else:
        numbers = {name: float(value / sums["count"]) for name, value in sums.items()
                   if value.dim() == 0 and name not in ("loss", "count")}
    numbers = {n: v.tolist() if hasattr(v, "tolist") else v for n, v in numbers.items()}
    # A number called `lr` or `iter` would overwrite that of the line.
    if clash := (LINE_NAMES | {"count"}) & set(numbers):
        raise ValueError(f"{type(model).__name__}.numbers: {', '.join(sorted(clash))}: log lines "
                         "have these names already; choose others")
    return dict(loss=loss, **numbers)


@torch.no_grad()
def evaluate(model, forward, loader, batches, ranks, autocast, stop=lambda done, n: False):
    """{val_NAME: number} of loss, sums = forward(*batch) over `batches` fixed batches of `loader`
    (fewer if it has fewer); `model` makes the numbers of the sums. Of a mixture, whose batches are
    each of one source, also {val_loss_SOURCE: number}.

    Rank r takes batches r, r + world_size, ...; after each round the ranks' sums are added in the
    order of the batches, so the numbers do not depend on who computed what. The model is in eval
    mode. stop(done, n) is asked before each round; None comes back where any rank says yes.
    """
    # One batch a rank and round. Their sums come back in the order of the batches, and are added in
    # that order: float64 sums in another order would differ in the last digit.
    n, totals = loader.n_fixed(batches), {}
    source_of = getattr(loader, "source_of", lambda index, count: "")  # of a mixture
    for first in range(0, n, ranks.world_size):
        # Whether to stop travels with the sums, so that all ranks leave in the same round.
        wants_stop = torch.tensor([stop(first, n)], dtype=torch.float64)
        index = first + ranks.rank
        # Every rank runs every round, for a sharded model's collectives; a surplus is not added.
        batch = loader.fixed_batch(min(index, n - 1), batches, ranks.device)
        with autocast():
            loss, sums = forward(*batch)
        sums = batch_sums(loss, sums, len(batch[0]) * loader.units_per_sample)
        rows = all_gather_vectors(torch.cat([to_vector(sums).double().cpu(), wants_stop]), ranks)
        if rows[:, -1].any():
            return None
        # (n sums,), a batch each, in the order of the batches
        for i, row in enumerate(rows[:n - first, :-1], first):
            source = source_of(i, batches)
            totals[source] = totals.get(source, 0.0) + row
    found = {source: from_vector(total, sums) for source, total in totals.items()}
    if not all(sums["count"] for sums in found.values()):
        raise SetupError("evaluation: no validation batch has an item that counts; is everything "
                         "in them masked?")
    numbers = to_numbers(model, found[""] if "" in found else loader.merge(found))
    numbers |= {f"loss_{source}": float(sums["loss"] / sums["count"])
                for source, sums in found.items() if source}
    return {f"val_{name}": value for name, value in numbers.items()}
