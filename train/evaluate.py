"""Evaluation: sums over batches become numbers that do not depend on the number of ranks.

A model returns the mean loss of a batch and sums over the batch's items. Sums are only ever added,
in the order of the batches and in float64, and become numbers at the very end: for the same
samples, another batch size changes only rounding errors.
"""

import itertools
import math

import torch

from train.base.errors import SetupError
from train.dataloader import check_batch
from train.distributed import all_gather_vectors
from train.logger import LINE_NAMES
from train.system import ModelHooks, hook


def check_result(result, previous=None):
    """Return (loss, sums), the result of forward(*batch); SetupError if it is malformed.

    previous: sums of an earlier batch, which must have the same names.
    """
    example = "expected (loss, sums): the mean loss, and {name: tensor}, sums over the batch, or {}"
    if not (isinstance(result, (tuple, list)) and len(result) == 2 and isinstance(result[1], dict)):
        raise SetupError(f"forward(*batch) returned a {type(result).__name__}; {example}")
    loss, sums = result
    if wrong := [name for name, t in {"loss": loss, **sums}.items() if not hasattr(t, "detach")]:
        raise SetupError(f"forward(*batch): {', '.join(wrong)} is no tensor; {example}")
    for name, t in {"loss": loss, "count": sums.get("count", loss)}.items():
        if t.numel() != 1:  # pack() would read its elements as other sums
            raise SetupError(f"forward(*batch): {name} has the shape {tuple(t.shape)}; expected a "
                             f"single number, the {dict(loss='mean', count='sum')[name]}")
    if "loss" in sums:
        raise SetupError("forward(*batch): rename the sum loss, the name is reserved for logs")
    if previous is not None and previous.keys() != sums.keys():
        raise SetupError(f"forward(*batch) returned the sums {', '.join(sums)}, and before "
                         f"{', '.join(previous)}: expected the same names for every batch")
    return result


def pack(loss, sums, count):
    """Return a batch's item count, total loss and sums as one float64 vector (MPS: float32)."""
    # float32 sums depend on the order of additions in the eighth digit. MPS has no float64.
    precise = torch.float32 if loss.device.type == "mps" else torch.float64
    out = {name: sums[name].detach().to(precise) for name in sorted(sums)}
    if "count" not in out:  # torch.full would wait for the device to read a tensor
        out["count"] = torch.full((), count, dtype=precise, device=loss.device)
    n = out["count"]
    # The mean over 0 items may be NaN.
    total = torch.where(n > 0, loss.detach().to(precise) * n, 0.0)
    out = {"count": n, "loss": total} | out
    return torch.cat([value.flatten() for value in out.values()])


def unpack(vector, sums):
    """Split a sum of pack() vectors into {name: float64 CPU tensor} and a list of appended numbers.

    sums: those of any batch, for names and shapes. The dict also has "count" and "loss", a total.
    """
    shapes = {"count": (), "loss": ()} | {name: sums[name].shape for name in sorted(sums)}
    ends = tuple(itertools.accumulate(map(math.prod, shapes.values())))
    *parts, rest = vector.cpu().double().tensor_split(ends)  # one transfer; each .item() waits
    named = zip(shapes.items(), parts, strict=True)
    return {name: part.view(shape) for (name, shape), part in named}, rest.tolist()


def to_numbers(model, sums):
    """Return {name: number} for a log line: the mean loss and the model's numbers(sums).

    Values may also be lists or `None` (unknown). SetupError for reserved names (LINE_NAMES).
    """
    of_model = model.numbers(sums) if hasattr(model, "numbers") else ModelHooks.numbers(model, sums)
    numbers = {name: to_plain(value) for name, value in of_model.items()}
    if reserved := LINE_NAMES & set(numbers):
        raise SetupError(f"{type(model).__name__}.numbers: {', '.join(sorted(reserved))}: these "
                         "names are reserved for log lines; use others")
    return {"loss": float(sums["loss"] / sums["count"]) if sums["count"] else None, **numbers}


def to_plain(value):
    """Return tensors and arrays, also in nested lists, as numbers and lists; others unchanged."""
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    return value.tolist() if hasattr(value, "tolist") else value


@torch.no_grad()
def evaluate(model, forward, loader, n_batches, ranks, autocast, stop=lambda done, total: False):
    """Return {val_NAME: number} over `n_batches` validation batches, always the same.

    model: in eval mode; its numbers(sums) turns sums into numbers, or lists, or `None`.
    forward(*batch) -> (loss, sums): called inside the context manager autocast().
    n_batches: per source in a mixture, whose sources also have val_loss_SOURCE; all if there are
        fewer.
    stop(done, total): called before each round (one batch per rank); if it is true on any rank,
        `None` is returned on all.
    Batches are distributed over the ranks, and their sums added in the order of the batches, so the
    result does not depend on the number of ranks. SetupError if a source has no item that counts.
    All ranks must call.
    """
    n = loader.n_fixed(n_batches)
    source_of = hook(loader, "source_of")  # of a mixture: every batch belongs to one source
    totals = {}                            # {source: vector of sums}
    sums = None
    for first in range(0, n, ranks.world_size):
        # The request to stop travels with the sums, so that all ranks leave in the same round.
        stop_flag = torch.tensor([stop(first, n)], dtype=torch.float64)
        # Every rank computes in every round, as a sharded model requires. Surplus results are not
        # added.
        index = min(first + ranks.rank, n - 1)
        batch = check_batch(loader.fixed_batch(index, n_batches, ranks.device))
        with autocast():
            loss, sums = check_result(forward(*batch), sums)
        vector = pack(loss, sums, len(batch[0]) * loader.units_per_sample).cpu().double()
        rows = all_gather_vectors(torch.cat([vector, stop_flag]), ranks)
        if rows[:, -1].any():
            return None
        # One row per batch, in the order of the batches. (n sums,)
        for i, row in enumerate(rows[:n - first, :-1], first):
            source = source_of(i, n_batches)
            totals[source] = totals.get(source, 0.0) + row
    by_source = {source: unpack(total, sums)[0] for source, total in totals.items()}
    if not all(sums["count"] for sums in by_source.values()):
        raise SetupError("evaluation: no item of the validation data counts; is every target "
                         "masked?")
    losses = {f"loss_{source}": float(sums["loss"] / sums["count"])
              for source, sums in by_source.items() if source}
    numbers = join_numbers(to_numbers(model, hook(loader, "merge")(by_source)), losses, "data_dir")
    return {f"val_{name}": value for name, value in numbers.items()}


def join_numbers(numbers, more, key):
    """Return both dicts of metrics as one; SetupError if they have a name in common.

    key: the configuration key that adds `more`, for the message.
    """
    if equal := numbers.keys() & more.keys():
        raise SetupError(f"{key}: evaluations of this run already have {', '.join(sorted(equal))}; "
                         "rename the file or folder with this name")
    return numbers | more
