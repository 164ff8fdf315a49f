"""Numbers of a classifier, in numpy: confusion, AUROC, and evidence as SQuAD compares it."""

import re
import string
from collections import Counter
from typing import Any

import numpy as np


def confusion_metrics(matrix):
    """Accuracy, precision, recall and F1 of a confusion matrix (K, K), rows the truth. As scikit-
    learn's with zero_division=0: macro means are over the classes in truth or predictions."""
    true, guessed, right = matrix.sum(1), matrix.sum(0), matrix.diagonal()
    seen, n = true + guessed > 0, matrix.sum()
    out = dict(accuracy=float(right.sum() / n) if n else None)
    for name, over, under in (("precision", right, guessed), ("recall", right, true),
                              ("f1", 2 * right, true + guessed)):
        each = over / np.maximum(under, 1)  # (K,)
        out[f"{name}_macro"] = float(each[seen].mean()) if n else None
        out[f"{name}_weighted"] = float((each * true).sum() / n) if n else None
        out[f"{name}_per_class"] = each.tolist()
    return out


def auroc(positive, scores):
    """Area under the ROC curve: how often a positive (N,) bool scores above a negative, ties count
    half; None where one of the two kinds is missing."""
    n = int(positive.sum())
    if not 0 < n < len(positive):
        return None
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    rank = (counts.cumsum() - (counts - 1) / 2)[inverse]  # of each score, from 1; ties share one
    return float((rank[positive].sum() - n * (n + 1) / 2) / (n * (len(positive) - n)))


def auroc_of_counts(negative, positive):
    """auroc() of rows that are counted at each of rising scores, (steps,) each."""
    pairs = negative.sum() * positive.sum()
    below = negative.cumsum() - negative / 2  # ties count half
    return float((positive * below).sum() / pairs) if pairs else None


def whole_auroc(areas):
    """Of two classes that of the second, of more the mean; None where one is unknown."""
    return areas[1] if len(areas) == 2 else None if None in areas else float(np.mean(areas))


def classification_metrics(labels: np.ndarray, scores: np.ndarray) -> dict[str, Any]:
    """What scikit-learn says of class scores (N, K), probabilities say, with labels (N,) the true
    classes: accuracy; precision, recall and f1 as _macro, _weighted and _per_class; auroc, of two
    classes that of the second, of more the mean of each against the rest, and auroc_per_class, None
    where a class has no rows; confusion_matrix, rows the truth; support. Raises ValueError."""
    labels, scores = np.asarray(labels), np.asarray(scores, np.float64)
    if scores.ndim != 2 or labels.shape != scores.shape[:1] or not len(labels):
        raise ValueError(f"labels {labels.shape}, scores {scores.shape}: expected (N,) and (N, K)")
    K = scores.shape[1]
    if labels.min() < 0 or labels.max() >= K or not np.isfinite(scores).all():
        raise ValueError(f"expected labels from 0 to {K - 1} and scores that are finite numbers")
    matrix = np.bincount(labels * K + scores.argmax(1), minlength=K * K).reshape(K, K)
    areas = [auroc(labels == k, scores[:, k]) for k in range(K)]
    return confusion_metrics(matrix) | dict(auroc=whole_auroc(areas), auroc_per_class=areas,
                                            support=matrix.sum(1).tolist(),
                                            confusion_matrix=matrix.tolist())


def normalized_words(text):
    """Words as SQuAD compares them (arXiv:1606.05250): lower case, no punctuation, no articles."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def place_metrics(truths, guesses):
    """{"exact_match", "token_f1", "spans"} of first and last tokens (N, 2), of the rows whose truth
    is not -1: what evaluations in training have."""
    truths, guesses = truths[truths[:, 0] >= 0], guesses[truths[:, 0] >= 0]
    if not len(truths):
        return {}
    (a, b), (c, d) = truths.T, guesses.T
    shared = (np.minimum(b, d) - np.maximum(a, c) + 1).clip(min=0)
    return dict(exact_match=float((truths == guesses).all(1).mean()), spans=len(truths),
                token_f1=float((2 * shared / (b - a + d - c + 2)).mean()))


def span_metrics(truths, guesses):
    """{"exact_match", "token_f1", "spans"} of texts of evidence, as SQuAD's script has them (from 0
    to 1): equal words in the same order; F1 of the words as multisets."""
    exact, f1 = [], []
    for a, b in zip(map(normalized_words, truths), map(normalized_words, guesses), strict=True):
        exact.append(a == b)
        shared = (Counter(a) & Counter(b)).total()
        f1.append(2 * shared / (len(a) + len(b)) if a and b else float(a == b))
    n = len(exact)
    return dict(exact_match=sum(exact) / n, token_f1=sum(f1) / n, spans=n) if n else {}
