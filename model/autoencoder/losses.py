"""Losses and correlations of --model autoencoder.

A missing value (NaN) of a target counts as predicted exactly in losses, and is left out of
correlations. Shapes: N rows, D columns of an array, S subjects.
"""

import torch

VARIANCE_EPS = 1e-3  # added to variances of about 1 in row_correlation()


def reconstruction_losses(outs, x):
    """Return {modality: (N,)}: for each modality in `outs`, the mean squared error of each row over
    the D columns. outs {modality: (N, D)}: reconstructions; x {modality: (N, D)}: the true values.
    A missing value (NaN) has an error of 0."""
    return {name: (out - fill_missing(x[name], out)).square().mean(1) for name, out in outs.items()}


def fill_missing(y, out):
    """Return y in which missing values (NaN) are replaced by the predictions `out`, a tensor of the
    same shape, without gradients."""
    return torch.where(y.isnan(), out.detach(), y)


def matching_loss(out, y, matching="mse"):
    """Return a loss (N,) for each row of the predictions `out` (N, D) and the targets y (N, D): the
    mean squared error over the columns if `matching` is "mse", or 1 - row_correlation() if it is
    "correlation". A missing target (NaN) counts as predicted exactly."""
    y = fill_missing(y, out)
    if matching == "mse":
        return (out - y).square().mean(1)
    return 1 - row_correlation(out, y)


def combined_loss(errors, match=None, recon_weight=1.0, match_weight=1.0, modality_weights=None):
    """Return the loss (N,) of each row: recon_weight times the weighted sum of `errors` over
    modalities, plus match_weight times `match`. errors {modality: (N,)}: of
    reconstruction_losses(). match (N,): of matching_loss(), `None`: no target. modality_weights:
    {modality: weight}, 1 for modalities that are not in it."""
    weights = modality_weights or {}
    loss = sum(recon_weight * weights.get(name, 1.0) * error for name, error in errors.items())
    return loss if match is None else loss + match_weight * match


def row_correlation(a, b):
    """Return Pearson's r (N,) between each row of a (N, D) and the same row of b (N, D).
    VARIANCE_EPS is added to the variances, so that the result for a constant row is 0 with a finite
    gradient. Values should be standardised, with variances of about 1."""
    a, b = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
    # The epsilon is inside the root: the gradient of a constant row is finite.
    return (a * b).mean(1) / ((a.square().mean(1) + VARIANCE_EPS)
                              * (b.square().mean(1) + VARIANCE_EPS)).sqrt()


def correlation_sums(p, y, subjects=None, prefix=""):
    """Return the sums over rows from which correlations() computes Pearson's r: {prefix + name:
    (D,)}, or (S, D) with `subjects`, a row per subject. Sums of several batches can be added. p, y
    (N, D): predictions and targets, which should be standardised, because large means would lose
    precision. A missing target (NaN) is left out. subjects (N, S): 1 for the subject of the row, 0
    elsewhere."""
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
    """Return Pearson's r between predictions and targets over all rows, for each column, (D,), or
    for each subject and column, (S, D); NaN if predictions or targets are constant, or without
    rows. sums: the dict of correlation_sums(), possibly added over batches. prefix: the same as for
    correlation_sums()."""
    p, y, pp, yy, py, n = (sums[prefix + name] for name in ("p", "y", "pp", "yy", "py", "n"))
    var_p = pp - p.square() / n
    var_y = yy - y.square() / n
    r = (py - p * y / n) / (var_p.clamp(min=0) * var_y.clamp(min=0)).sqrt()
    return torch.where((var_p > 1e-9 * n) & (var_y > 1e-9 * n), r, torch.nan)


def mean_correlation(r):
    """Return the mean, a float, of the finite values of r, a tensor of correlations of any shape;
    `None` without such values."""
    r = r[r.isfinite()]
    return float(r.mean()) if len(r) else None
