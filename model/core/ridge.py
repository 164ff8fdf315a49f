"""Ridge regression in closed form: the baseline and the linear path of model/autoencoder.

Each target has a separate penalty, selected by cross-validation: the one with the smallest error on
runs that are left out, one after the other. A run is a group of consecutive rows, e.g. a recording
session. The errors follow from one decomposition, without a fit per run. The results are equal to
himalaya (RidgeCV with one fold per run) and, if each row is a run, to scikit-learn's
RidgeCV(alpha_per_target=True).

Shapes: N rows, P features, T targets, R rank.
"""

import numpy as np

PENALTIES = np.logspace(-4, 2, 13)  # relative to the mean square of the singular values
N_BLOCKS = 10       # of a single run
RANK_LIMIT = 1e-10  # squares of singular values, relative to the largest


def fit_ridge(x, y, runs, alphas=None):
    """Fit a ridge regression with intercept; return (weight, bias, penalty, error).

    x (N, P), y (N, T): features and targets, float64 numpy arrays without NaN.
    runs (N,): run number of each row, ascending; a single run is cut into N_BLOCKS equal blocks.
    alphas: penalties to select from (default: PENALTIES times the mean square of the singular
    values of x, centred).
    weight (P, T), bias (T,): predictions are x @ weight + bias.
    penalty (T,): the one with the smallest error for the target.
    error (T,): mean squared error on runs that the fit leaves out, one after the other.
    """
    if runs[0] == runs[-1]:
        runs = np.arange(len(y)) * N_BLOCKS // len(y)
    x_mean = x.mean(0)
    y_mean = y.mean(0)
    x = x - x_mean
    if x.shape[1] <= len(x):
        squares, right = np.linalg.eigh(x.T @ x)  # (R,), (P, R)
        scores = x @ right  # (N, R)
    else:
        squares, left = np.linalg.eigh(x @ x.T)
        scores = left * np.sqrt(squares.clip(0))
    keep = squares > RANK_LIMIT * squares[-1]
    squares = squares[keep]
    scores = scores[:, keep]
    size = squares.mean() if len(squares) else 1.0  # without columns that vary, 1
    alphas = PENALTIES * size if alphas is None else np.asarray(alphas)
    products = scores.T @ (y - y_mean)  # (R, T)
    errors = np.stack([left_out_error(scores, squares + a, products, y - y_mean, runs)
                       for a in alphas])  # (alphas, T)
    alpha = alphas[errors.argmin(0)]
    scaled = products / (squares[:, None] + alpha)
    weight = x.T @ (scores @ (scaled / squares[:, None]))
    return weight, y_mean - x_mean @ weight, alpha, errors.min(0)


def left_out_error(scores, penalised, products, y, runs):
    """Return the leave-one-run-out mean squared error (T,) of ridge regression with one penalty.

    scores (N, R): centred features times the right singular vectors. y (N, T): centred targets.
    penalised (R,): squared singular values plus the penalty. products (R, T): scores.T @ y.
    runs (N,): the number of the run of each row, ascending.
    With the smoother H = 1/N + scores / penalised @ scores.T, the error of the rows f of a run is
    (1 - H[f, f])^-1 @ (y - H @ y)[f]. This is exact, including the intercept.
    """
    residual = y - scores @ (products / penalised[:, None])  # (N, T)
    total = 0.0
    for f in np.split(np.arange(len(y)), np.flatnonzero(np.diff(runs)) + 1):
        smoother = scores[f] / penalised @ scores[f].T + 1 / len(y)  # (F, F)
        total = total + np.square(np.linalg.solve(np.eye(len(f)) - smoother, residual[f])).sum(0)
    return total / len(y)
