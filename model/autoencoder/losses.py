"""Losses and correlations of --model autoencoder. Shapes: N rows, D dimensions of an array.

A missing value (NaN) of a target counts as predicted exactly in losses, and is left out of
correlations.
"""

import torch

VARIANCE_EPS = 1e-3  # added to variances of about 1 in row_correlation()


def reconstruction_losses(outs, x):
    """Return {modality: (N,)}, for the modalities in `outs`: the mean squared error of each row,
    over all D columns. outs, x: {modality: (N, D)}, predictions and values; a missing value (NaN)
    counts as predicted exactly."""
    return {name: (out - fill_missing(x[name], out)).square().mean(1) for name, out in outs.items()}


def fill_missing(y, out):
    """Return y with the predictions `out`, without their gradients, instead of missing values
    (NaN)."""
    return torch.where(y.isnan(), out.detach(), y)


def matching_loss(out, y, matching="mse"):
    """Return the distance (N,) between the rows of predictions `out` and targets y, both (N, D):
    the mean squared error, or 1 - correlation if matching is "correlation". A missing target (NaN)
    counts as predicted exactly."""
    y = fill_missing(y, out)
    if matching == "mse":
        return (out - y).square().mean(1)
    return 1 - row_correlation(out, y)


def combined_loss(errors, match=None, recon_weight=1.0, match_weight=1.0, modality_weights=None):
    """Return the loss (N,) of each row: recon_weight times the weighted sum of `errors` {modality:
    (N,)}, see reconstruction_losses(), plus match_weight times `match` (N,), the matching_loss(),
    if given. modality_weights: {modality: weight}, 1 by default."""
    weights = modality_weights or {}
    loss = sum(recon_weight * weights.get(name, 1.0) * error for name, error in errors.items())
    return loss if match is None else loss + match_weight * match


def row_correlation(a, b):
    """Return Pearson's r (N,) between the rows of a and b, both (N, D), with VARIANCE_EPS added to
    their variances: 0 for a constant row, so that the mean over rows can be a training loss. Values
    should be standardised, with variances of about 1."""
    a, b = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
    # The epsilon is inside the root: the gradient of a constant row is finite.
    return (a * b).mean(1) / ((a.square().mean(1) + VARIANCE_EPS)
                              * (b.square().mean(1) + VARIANCE_EPS)).sqrt()


def correlation_sums(p, y, subjects=None, prefix=""):
    """Return the sums over rows that correlations() needs, as {prefix + name: (D,)}. p, y: (N, D)
    predictions and targets, standardised, because large means would lose precision. A missing
    target (NaN) is left out. The sums of batches can be added. subjects (N, S): zeros and ones,
    the subject of each row; the sums are (S, D) then, over the rows of each subject."""
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
    """Return Pearson's r, (D,) or (S, D), between predictions and targets over all rows,
    per dimension; NaN if either is constant. sums: the result of correlation_sums(), added over
    batches."""
    p, y, pp, yy, py, n = (sums[prefix + name] for name in ("p", "y", "pp", "yy", "py", "n"))
    var_p = pp - p.square() / n
    var_y = yy - y.square() / n
    r = (py - p * y / n) / (var_p.clamp(min=0) * var_y.clamp(min=0)).sqrt()
    return torch.where((var_p > 1e-9 * n) & (var_y > 1e-9 * n), r, torch.nan)


def mean_correlation(r):
    """Return the mean, a float, of the finite values of r, a tensor of correlations of any shape;
    None if there is none."""
    r = r[r.isfinite()]
    return float(r.mean()) if len(r) else None
