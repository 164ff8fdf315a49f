"""Metrics of a classifier: confusion matrix, AUROC, and overlap of evidence spans."""

from typing import Any

import numpy as np
import torch

# -----------------------------------------------------------------------------
# classes

def confusion_metrics(matrix):
    """Return the metrics {name: value} of a confusion matrix (K, K) of counts (rows: true classes):
    accuracy; precision, recall and f1, each with the suffixes _macro, _weighted and _per_class (a
    list). Undefined values are 0, as with scikit-learn's zero_division=0, `None` without any rows;
    macro averages are over the classes that occur among labels or predictions."""
    true = matrix.sum(1)
    predicted = matrix.sum(0)
    correct = matrix.diagonal()
    present = true + predicted > 0
    n = matrix.sum()
    out = dict(accuracy=float(correct.sum() / n) if n else None)
    for name, numerator, denominator in (("precision", correct, predicted),
                                         ("recall", correct, true),
                                         ("f1", 2 * correct, true + predicted)):
        values = numerator / np.maximum(denominator, 1)  # (K,)
        out[f"{name}_macro"] = float(values[present].mean()) if n else None
        out[f"{name}_weighted"] = float((values * true).sum() / n) if n else None
        out[f"{name}_per_class"] = values.tolist()
    return out


def auroc(negatives, positives):
    """Return the area under the ROC curve, `None` without negatives or positives.

    negatives, positives: (n,) numbers of negative and positive samples at each of n increasing
    scores. The area is the probability that a positive scores above a negative; ties count half.
    """
    pairs = negatives.sum() * positives.sum()
    below = negatives.cumsum() - negatives / 2
    return float((positives * below).sum() / pairs) if pairs else None


def average_auroc(areas):
    """Return the AUROC of a classifier from `areas`, a list with the AUROC of each class against
    the rest: the second one of two, or the mean of more; `None` if one is undefined (`None`)."""
    if len(areas) == 2:
        return areas[1]
    return None if None in areas else float(np.mean(areas))


def classification_metrics(labels: np.ndarray, scores: np.ndarray) -> dict[str, Any]:
    """Return the metrics that scikit-learn computes from class scores.

    labels: (N,) true classes. scores: (N, K), e.g. probabilities. The result has accuracy;
    precision, recall and f1, each with the suffixes _macro, _weighted and _per_class; auroc (see
    average_auroc) and auroc_per_class, `None` for a class without samples; confusion_matrix
    (rows: true classes); support. Raises ValueError for invalid arrays.
    """
    labels, scores = np.asarray(labels), np.asarray(scores, np.float64)
    if scores.ndim != 2 or labels.shape != scores.shape[:1] or not len(labels):
        raise ValueError(f"labels {labels.shape}, scores {scores.shape}: expected (N,) and (N, K)")
    K = scores.shape[1]
    if labels.min() < 0 or labels.max() >= K or not np.isfinite(scores).all():
        raise ValueError(f"expected labels from 0 to {K - 1} and finite scores")
    matrix = np.bincount(labels * K + scores.argmax(1), minlength=K * K).reshape(K, K)
    areas = []
    for k in range(K):
        values, rank = np.unique(scores[:, k], return_inverse=True)
        counts = np.bincount(rank + len(values) * (labels == k), minlength=2 * len(values))
        areas.append(auroc(*counts.reshape(2, -1)))
    return confusion_metrics(matrix) | dict(
        auroc=average_auroc(areas), auroc_per_class=areas, support=matrix.sum(1).tolist(),
        confusion_matrix=matrix.tolist())


# -----------------------------------------------------------------------------
# calibration

def calibration_error(labels, scores, n_bins=15):
    """Return the expected calibration error (arXiv:1706.04599): the mean distance, in n_bins bins
    of equal width, between probability and accuracy of the predicted class. labels (N,): true
    classes; scores (N, K): probabilities."""
    p = scores.max(1)
    bins = np.minimum((p * n_bins).astype(int), n_bins - 1)
    correct = scores.argmax(1) == labels
    return float(np.abs(np.bincount(bins, correct - p)).sum() / len(p))


def scale(scores, temperature):
    """Return the probabilities `scores` (N, K), an array, at a different temperature:
    softmax(log(scores) / temperature)."""
    logs = torch.from_numpy(scores).clamp(min=1e-300).log()
    return (logs / temperature).softmax(1).numpy()


def fit_temperature(labels, scores):
    """Return the temperature between 1/4 and 16, in steps of 1%, at which scale(scores,
    temperature) has the largest likelihood of the labels (N,), true classes. scores (N, K):
    probabilities. The limits matter for few rows: all may be predicted correctly."""
    def likelihood(temperature):
        p = scale(scores, temperature)[np.arange(len(labels)), labels]
        return np.log(np.maximum(p, 1e-300)).sum()
    return float(max(np.geomspace(0.25, 16, 419), key=likelihood))


# -----------------------------------------------------------------------------
# evidence

def span_sums(truths, guesses):
    """Return sums over samples, 0-dim tensors: "spans", the number of samples with evidence;
    "exact", the number of samples whose spans are all equal; "overlap", the sum of the F1 of the
    tokens in any span. truths, guesses: (N, 2S) first and last token of true and predicted spans,
    each without overlaps and in any order, -1 for fewer than S; S may differ."""
    truth, guess = (spans.view(len(spans), -1, 2) for spans in (truths, guesses))  # (N, S, 2)
    has_span = truths[:, 0] >= 0
    first, last = truth[:, :, None].unbind(-1)  # (N, S, 1) each
    guess_first, guess_last = guess[:, None].unbind(-1)  # (N, 1, S of guesses) each
    is_pair = (first >= 0) & (guess_first >= 0)
    equal = ((first == guess_first) & (last == guess_last) & is_pair).sum((1, 2))
    shared = (torch.minimum(last, guess_last) - torch.maximum(first, guess_first) + 1).clamp(min=0)
    shared = (shared * is_pair).sum((1, 2))
    both = torch.cat((truth, guess), 1)
    is_span = both[..., 0] >= 0
    size = ((both[..., 1] - both[..., 0] + 1) * is_span).sum(1).clamp(min=1)
    return dict(spans=has_span.sum(), exact=((2 * equal == is_span.sum(1)) & has_span).sum(),
                overlap=(2 * shared / size * has_span).sum())


def span_metrics(sums):
    """Return {"exact_match", "token_f1"}, the means of the `sums` of span_sums(), which may be
    added over batches; `None` without evidence."""
    n = float(sums["spans"])
    return {name: float(sums[key]) / n if n else None
            for name, key in (("exact_match", "exact"), ("token_f1", "overlap"))}
