"""Metrics of a classifier: confusion matrix, AUROC, and overlap of evidence spans."""

from typing import Any

import numpy as np
import torch

# -----------------------------------------------------------------------------
# classes

def confusion_metrics(matrix):
    """Return {name: value} of a confusion matrix (K, K), a numpy array; rows are true classes.

    accuracy; precision, recall and f1, each with the suffixes _macro, _weighted (floats) and
    _per_class (a list of K floats). A quotient with the denominator 0 is 0 (zero_division=0 of
    scikit-learn). Macro averages are over the classes that occur among labels or predictions.
    Without any rows, accuracy, _macro and _weighted are `None`.
    """
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


def auroc(scores, is_positive):
    """Return the AUROC of scores (N,) for is_positive (N,), bool; `None` if all or none are."""
    values, rank = np.unique(scores, return_inverse=True)
    # How many have each of the values, in ascending order.
    negatives, positives = (np.bincount(rank[chosen], minlength=len(values))
                            for chosen in (~is_positive, is_positive))
    pairs = negatives.sum() * positives.sum()
    below = negatives.cumsum() - negatives / 2
    return float((positives * below).sum() / pairs) if pairs else None


def classification_metrics(labels: np.ndarray, scores: np.ndarray) -> dict[str, Any]:
    """Return a dict of the metrics that scikit-learn computes from class scores.

    labels: (N,) true classes, 0 to K - 1.
    scores: (N, K), e.g. probabilities; the predicted class has the largest score.
    The result has accuracy; precision, recall and f1, each with the suffixes _macro, _weighted and
    _per_class; auroc_per_class, a list of the AUROC of each class against all others, `None` for a
    class that no sample or every sample has; auroc, the mean of these, with two classes that of the
    second, `None` if one is; confusion_matrix, a nested list (rows: true classes); support, the
    number of samples of each class. Raises ValueError for labels outside of the range, and scores
    that are not finite.
    """
    labels, scores = np.asarray(labels), np.asarray(scores, np.float64)
    if not np.isfinite(scores).all():
        raise ValueError("scores: expected finite numbers")
    K = scores.shape[1]
    # int64: K times a label of 8 bits can exceed 255.
    matrix = np.bincount(labels * np.int64(K) + scores.argmax(1), minlength=K * K).reshape(K, K)
    areas = [auroc(scores[:, k], labels == k) for k in range(K)]
    mean = None if None in areas else float(np.mean(areas))
    return confusion_metrics(matrix) | dict(
        auroc=areas[1] if K == 2 else mean, auroc_per_class=areas,
        support=matrix.sum(1).tolist(), confusion_matrix=matrix.tolist())


def calibration_error(labels, scores, n_bins=15):
    """Return the expected calibration error (arXiv:1706.04599) of probabilities (N, K), a float."""
    p = scores.max(1)
    bins = np.minimum((p * n_bins).astype(int), n_bins - 1)
    correct = scores.argmax(1) == labels
    return float(np.abs(np.bincount(bins, correct - p)).sum() / len(p))


# -----------------------------------------------------------------------------
# evidence

def span_sums(truths, guesses):
    """Return {name: 0-dim tensor}, sums over the samples that have evidence, for span_metrics().

    truths, guesses (N, 2S): first and last token of the true and the predicted spans, padded with
    -1. S may differ between both. The spans of a sample must not overlap, and may be in any order,
    but truths[i, 0] must not be -1 if sample i has evidence.
    "spans": number of these samples. "exact": number of those whose predicted spans are equal to
    the true ones. "overlap": sum of their F1 scores between the tokens in true and in predicted
    spans.
    """
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
    """Return {"exact_match", "token_f1"}, the means of span_sums(); `None` without evidence."""
    n = float(sums["spans"])
    return {name: float(sums[key]) / n if n else None
            for name, key in (("exact_match", "exact"), ("token_f1", "overlap"))}
