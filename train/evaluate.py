"""Validation numbers: fixed windows, weighted by tokens, the same value at any world size."""

import math

import torch

from train.distributed import sum_over_ranks


@torch.no_grad()
def evaluate(forward, loader, batches, ranks, autocast, token_bytes=None,
             should_stop=lambda: False):
    """{val_loss, val_ppl, val_bpb} over `batches` fixed batches of `loader` (fewer if it has
    fewer), with loss = forward(x, y)[0] of a model in eval mode.

    Rank r takes batches r, r + world_size, ...; the sums of all batches meet in one float64 table
    and are added in order, so the numbers do not depend on who computed what. bits per byte needs
    `token_bytes` (vocab_size,), the bytes each id stands for, else it is None. Returns None when
    `should_stop()`, which all ranks ask together, says so.
    """
    n = loader.n_fixed(batches)
    table = torch.zeros(n, 3, dtype=torch.float64)  # summed loss, targets, bytes of each batch
    for first in range(0, n, ranks.world_size):
        if should_stop():
            return None
        index = first + ranks.rank
        # Every rank runs every round, for a sharded model's collectives; a surplus is not counted.
        x, y = loader.fixed_batch(min(index, n - 1), batches, ranks.device)
        with autocast():
            loss, _ = forward(x, y)
        if index < n:
            count = int((y >= 0).sum())
            size = int(token_bytes[y.cpu()].sum()) if token_bytes is not None else 0
            table[index] = torch.tensor([loss.item() * count, count, size], dtype=torch.float64)
    total, count, size = sum_over_ranks(table, ranks).sum(0).tolist()
    loss = total / count
    return dict(val_loss=loss, val_ppl=math.exp(min(loss, 700.0)),
                val_bpb=total / math.log(2) / size if size else None)
