"""Losses and correlations of --model autoencoder.

A missing value (NaN) of a target counts as predicted exactly in losses, and is left out of
correlations. Shapes: N rows, D columns of an array, S subjects.
"""

import torch

VARIANCE_EPS = 1e-3  # added to variances of about 1 in row_correlation()


def reconstruction_losses(outs, x):
    """Return each row's mean squared error, {modality: (N,)}, of outs and x, {modality: (N, D)}."""
    return {name: (out - fill_missing(x[name], out)).square().mean(1) for name, out in outs.items()}


def fill_missing(y, out):
    """Return y with missing values (NaN) replaced by the predictions `out`, without gradients."""
    return torch.where(y.isnan(), out.detach(), y)


def matching_loss(out, y, matching="mse"):
    """Return each row's loss (N,): mean squared error, or 1 - row_correlation() ("correlation")."""
    y = fill_missing(y, out)
    if matching == "mse":
        return (out - y).square().mean(1)
    return 1 - row_correlation(out, y)


def combined_loss(errors, match=None, recon_weight=1.0, match_weight=1.0, modality_weights=None):
    """Return the weighted sum (N,) of each row's reconstruction and matching losses.

    errors {modality: (N,)}: of reconstruction_losses(). match (N,): of matching_loss().
    modality_weights {modality: weight}: 1 for a modality that is not in it.
    """
    weights = modality_weights or {}
    loss = sum(recon_weight * weights.get(name, 1.0) * error for name, error in errors.items())
    return loss if match is None else loss + match_weight * match


def row_correlation(a, b):
    """Return Pearson's r (N,) between each row of a (N, D) and the same row of b (N, D).

    Values should be standardised: VARIANCE_EPS is added to the variances, which should be about 1.
    The result for a constant row is then 0, with a finite gradient.
    """
    a, b = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
    # The epsilon is inside the root: the gradient of a constant row is finite.
    return (a * b).mean(1) / ((a.square().mean(1) + VARIANCE_EPS)
                              * (b.square().mean(1) + VARIANCE_EPS)).sqrt()


def correlation_sums(p, y, subjects=None, prefix=""):
    """Return sums over rows, {prefix + name: (D,)}, from which correlations() computes r.

    p, y (N, D): predictions and targets, which should be standardised; large means lose precision.
    subjects (N, S): 1 for the row's subject, 0 elsewhere; the sums are then (S, D).
    Sums of several batches can be added. A missing target (NaN) is left out.
    """
    if p.device.type != "mps":  # MPS has no float64
        p, y = p.double(), y.double()
    recorded = ~y.isnan()
    p = p * recorded
    y = y.nan_to_num()
    sums = dict(p=p, y=y, pp=p.square(), yy=y.square(), py=p * y, n=recorded)
    if subjects is not None:  # by a product, which is deterministic on a GPU too
        return {prefix + name: subjects.T.to(p) @ value.to(p) for name, value in sums.items()}
    return {prefix + name: value.sum(0) for name, value in sums.items()}


def correlations(sums, prefix=""):
    """Return Pearson's r, (D,) or (S, D), of correlation_sums(); NaN where it is undefined."""
    p, y, pp, yy, py, n = (sums[prefix + name] for name in ("p", "y", "pp", "yy", "py", "n"))
    var_p = pp - p.square() / n
    var_y = yy - y.square() / n
    r = (py - p * y / n) / (var_p.clamp(min=0) * var_y.clamp(min=0)).sqrt()
    return torch.where((var_p > 1e-9 * n) & (var_y > 1e-9 * n), r, torch.nan)


def mean_correlation(r):
    """Return the mean of the finite values of a tensor, a float; `None` without such values."""
    r = r[r.isfinite()]
    return float(r.mean()) if len(r) else None
