"""Muon's update of matrices, shared by the ranks (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/)."""

import torch
import torch.distributed as dist

from train.distributed import has_native_bfloat16, is_sharded, local


def update_matrices(group, state):
    """A step of Muon for the matrices of a parameter group, with `state` {matrix: {name: tensor}}.

    The update of a matrix is its Nesterov momentum made orthogonal, times sqrt(max(1, rows /
    columns)). Matrices of one shape are worked on as one batch, of which each rank takes its share.
    """
    by_shape = {}  # a matrix and the transpose of another go through as one batch
    for p in group["params"]:
        if p.grad is not None:
            if "momentum_buffer" not in state[p]:
                state[p]["momentum_buffer"] = torch.zeros_like(p)
            shape = tuple(p.shape) if is_sharded(p) else tuple(sorted(p.shape))
            by_shape.setdefault(shape, []).append(p)
    for params in by_shape.values():
        grads = [local(p.grad) for p in params]
        buffers = [local(state[p]["momentum_buffer"]) for p in params]
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        nesterov = torch._foreach_lerp(grads, buffers, group["momentum"])
        if group["weight_decay"]:
            torch._foreach_mul_([local(p) for p in params],
                                1 - group["lr"] * group["weight_decay"])
        updates = (orthogonalize_shards(nesterov, params[0]) if is_sharded(params[0])
                   else orthogonalize_together(nesterov))
        for p, update in zip(params, updates, strict=True):
            scale = max(1.0, p.size(0) / p.size(1)) ** 0.5
            local(p).add_(update, alpha=-group["lr"] * scale)


def orthogonalize_together(matrices):
    """[update] of N matrices of one shape, or its transpose, which all ranks have, the same bits on
    all. Each rank works on ceil(N / ranks) of them and sends these; where there are more ranks than
    matrices it sends a part of one, or of two that it works on. All parts are equal: the last ones
    may be of the first matrices again."""
    n_ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    N, size = len(matrices), matrices[0].numel()
    part = -(-N // n_ranks) * size if N >= n_ranks else -(-N * size // n_ranks)
    start, end = rank * part, (rank + 1) * part  # in all matrices one after the other
    mine = [matrices[i % N] for i in range(start // size, -(-end // size))]
    updates = orthogonalize(torch.stack([wide(m) for m in mine]))  # (of this rank, rows, columns)
    if n_ranks > 1:
        everything = updates.new_empty(n_ranks * part)
        dist.all_gather_into_tensor(everything, updates.flatten()[start % size:][:part])
        updates = everything[:N * size].view(N, *updates.shape[1:])
    return [u.mT if m.size(0) > m.size(1) else u for m, u in zip(matrices, updates)]


def orthogonalize_shards(parts, param):
    """The same where each rank has some rows of each of N matrices of the shape of `param`: from a
    part of all matrices to whole ones of a few, and back. On a GPU each way is an all-to-all, and a
    rank never holds more than its share. (N, rows of this rank, columns)."""
    from torch.distributed.tensor import DTensor, Shard
    options = dict(shape=torch.Size([len(parts), *param.shape]),
                   stride=(param.numel(), param.size(1), 1))
    rows = torch.stack(parts).to(working_dtype(param.device))  # half the bytes to send
    rows = DTensor.from_local(rows, param.device_mesh, [Shard(1)], **options)
    whole = orthogonalize(rows.redistribute(placements=[Shard(0)]).to_local()).contiguous()
    updates = DTensor.from_local(whole, param.device_mesh, [Shard(0)], **options)
    return updates.redistribute(placements=[Shard(1)]).to_local()


def wide(x):
    """x (..., rows, columns), transposed where it has more rows than columns."""
    return x.mT if x.size(-2) > x.size(-1) else x


def orthogonalize(g, steps=5):
    """The nearest semi-orthogonal matrices to g (N, rows, columns), roughly: singular values end in
    about [0.7, 1.2], enough for an update. A quintic Newton-Schulz iteration on the short side."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = wide(g).to(working_dtype(g.device))
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):  # x <- (a I + b S + c S S) x with S = x x'
        s = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(s, s, s, beta=b, alpha=c), x, beta=a)
    return x.mT if g.size(-2) > g.size(-1) else x


def working_dtype(device):
    """bfloat16 where the device multiplies it natively: emulated it is slower than float32."""
    return torch.bfloat16 if has_native_bfloat16(device) else torch.float32
