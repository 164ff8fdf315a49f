"""Matrix products that compute only active features, i.e. those that are not zero.

With k of F features active, all products of a training step except the first one of the encoder are
sums over the k N active entries of the features (N, F).

Shapes: N activations, C channels, F features, E active entries, sorted by row.
"""

import torch
import torch.nn.functional as F


def sum_rows(W, index, groups, n, weights):
    """Return sums (n, C): row g adds weights[e] * W[index[e]] for groups[e] == g; groups ascend."""
    starts = torch.searchsorted(groups, torch.arange(n, device=groups.device))
    return F.embedding_bag(index, W, starts, mode="sum", per_sample_weights=weights)


class ActiveFeatures(torch.autograd.Function):
    """Autograd function whose result is pre[row, column] (E,), for pre (N, F) = x @ W + bias.

    apply(x, W, bias, pre, row, column): the caller has computed pre without gradients; row, column
    (E,) are the indices of the active entries. The backward pass computes gradients for W (C, F)
    and bias (F,), but not for x (N, C).
    """

    @staticmethod
    def forward(ctx, x, W, bias, pre, row, column):
        ctx.save_for_backward(x, row, column)
        ctx.n_features = len(bias)
        return pre[row, column]

    @staticmethod
    def backward(ctx, grad):
        x, row, column = ctx.saved_tensors
        columns, order = column.sort(stable=True)
        d_W = sum_rows(x, row[order], columns, ctx.n_features, grad[order]).T  # (C, F)
        # Not bincount, which raises on a GPU with `deterministic`.
        d_bias = grad.new_zeros(ctx.n_features).index_add_(0, column, grad)
        return None, d_W, d_bias, None, None, None
