"""Data of --model autoencoder: arrays and windows of rows, their loaders, and ridge regression.

Everywhere, spec has the content of read_features_meta(). Shapes: see model/autoencoder/__init__.py.
"""

import numpy as np
import torch
import torch.nn as nn

from data.meta import read_meta_for
from data.rows import open_rows
from data.tokenizer_types import data_errors
from model.core.ridge import fit_ridge
from train.base.errors import ConfigError, DataError
from train.dataloader import Data, RowLoader
from train.distributed import broadcast_from_rank0

HOW_TO_PREPARE = "prepare it with `python -m data.prepare.features`"


def read_features_meta(folder):
    """Return the dict in meta.json of a folder that data.prepare.features wrote:

        modalities   {name: number of columns D}
        target       number of columns of the target, or `None`
        mean, std    {name: [D floats]}, of each array's columns, less shift, over the training rows
        shift        {name: [D floats]}, offsets subtracted from the original array; may be absent
        subjects     list of the integers that identify the subjects; may be absent

    Raises DataError if the file or a required key is missing, or if mean or std do not fit the
    column counts; other values are not checked.
    """
    meta = read_meta_for("autoencoder", folder, HOW_TO_PREPARE, "modalities", "mean", "std").extra
    meta.setdefault("target", None)
    with data_errors(f"{folder}: mean or std do not match the arrays; {HOW_TO_PREPARE}"):
        for name, n in array_dims(meta).items():
            if any(part.shape != (n,) for part in scale_of(meta, name)):
                raise ValueError(name)
    return meta


def array_dims(spec):
    """Return {name: column count} of the arrays in batch order: modalities, then any "target"."""
    return spec["modalities"] | ({"target": spec["target"]} if spec["target"] else {})


def add_delays(array, runs, delays):
    """Return the windows (N, delays + 1, D) of an array (N, D), in memory: [i, k] is row i - k.

    runs (N,): number of each row's run (recording session).
    [i, k] is NaN if row i - k is of a different run or does not exist.
    """
    index = np.arange(len(array))[:, None] - np.arange(delays + 1)  # (N, K)
    is_inside = (index >= 0) & (runs[index.clip(0)] == runs[:, None])
    return np.where(is_inside[..., None], array[index.clip(0)], np.float32(np.nan))


def open_runs(folder, split):
    """Return each row's run number (N,), ascending, from SPLIT_runs.npy, or raise DataError."""
    return np.array(open_rows(folder, split, runs=((), 0, 1 << 31))[0])


def open_features(folder, split, spec=None, delays=0):
    """Return the arrays of a split ("train" or "val") in the order of array_dims(spec).

    spec: that the arrays must fit, e.g. of a model trained on other data (default: of `folder`).
    The arrays are (N, D), float32 and memory-mapped; with delays > 0, modalities are windows (N,
    delays + 1, D) in memory, see add_delays(). If `spec` has subjects, an array (N, S) follows,
    with 1 at the index of the row's subject in spec["subjects"] and 0 elsewhere. An array that
    `folder` lacks is filled with NaN. If the offsets of shift_of() differ between `folder` and
    `spec`, the difference is added, and the array is float64.
    Raises DataError for missing or invalid files, an empty split, arrays that `spec` lacks, column
    counts that differ, and, if `spec` has subjects, rows of an unknown or different subject.
    """
    meta = read_features_meta(folder)
    spec = spec or meta
    if not array_dims(meta).items() <= array_dims(spec).items():
        raise DataError(f"{folder}: arrays {array_dims(meta)}; the checkpoint was trained on "
                        f"{array_dims(spec)}: prepare the same arrays")
    limits = {name: ((d,), None, None) for name, d in array_dims(meta).items()}
    if "subjects" in meta:
        limits["subjects"] = ((), 0, 1 << 31)
    files = dict(zip(limits, open_rows(folder, split, **limits)))
    n = len(next(iter(files.values())))
    if not n:
        raise DataError(f"{folder}: {split} has no rows; choose another --split, or prepare it "
                        "with --val_fraction above 0")
    runs = open_runs(folder, split) if delays else None
    arrays = []
    for name, d in array_dims(spec).items():
        array = files[name] if name in files else np.full((n, d), np.float32(np.nan))
        if shift_of(meta, name) != shift_of(spec, name):
            array = array + np.subtract(shift_of(meta, name), shift_of(spec, name))
        if delays and name != "target":
            array = add_delays(array, runs, delays)
        arrays.append(array)
    if "subjects" in spec:
        is_of = np.equal.outer(files.get("subjects", [None]), spec["subjects"])  # (N, S)
        if not is_of.any(1).all():
            raise DataError(f"{folder}: {split} has rows that are not of the subjects of the "
                            f"model, {spec['subjects']}; prepare rows of these, with --subjects")
        arrays.append(is_of.astype(np.float32))
    return arrays


def of_subject(outs, subjects):
    """Return the outputs (N, T) of each row's subject.

    outs (N, S * T): subject by subject. subjects (N, S): 1 for the row's subject, 0 elsewhere;
    `None`: return outs.
    """
    if subjects is None:
        return outs
    return (outs.unflatten(1, (subjects.shape[1], -1)) * subjects[..., None]).sum(1)


def shift_of(spec, name):
    """Return the offset that was subtracted from the array `name`: a list of D floats, or 0.0."""
    return spec.get("shift", {}).get(name, 0.0)


def scale_of(spec, name):
    """Return (mean, std) of an array's training rows, float32 (D,) each; a std of 0 becomes 1."""
    mean, std = (np.array(spec[k][name], np.float32) for k in ("mean", "std"))
    return mean, np.where(std > 0, std, np.float32(1))


def design(arrays, spec):
    """Return (x (N, K, P), y (N, T)), float64 and standardised; NaN is 0 in x, and kept in y.

    arrays: of open_features(), with a target. K is 1 without delays.
    """
    scales = [scale_of(spec, name) for name in array_dims(spec)]
    *x, y = [(array - mean) / std for array, (mean, std) in zip(arrays, scales)]
    x = np.concatenate(x, axis=-1, dtype=np.float64)
    return np.nan_to_num(x).reshape(len(x), -1, x.shape[-1]), y.astype(np.float64)


def fit_linear_path(folder, spec, delays):
    """Fit a ridge regression to the training rows of each subject; return (weight, bias).

    weight (S * T, K * P), bias (S * T,): float32 tensors that predict the standardised target from
    x.flatten(1), x (N, K, P) of design(): the features of a row, then those of the `delays` rows
    before it, the latest first.
    A target column that is NaN in all rows of a subject is predicted as 0, the mean; rows with NaN
    in any other target column are left out. Raises DataError without a target or if fewer than 3
    rows of a subject remain, and the errors of open_features() and open_runs().
    """
    if not spec["target"]:
        raise DataError(f"{folder}: no target, which ridge regression (--baseline) predicts")
    arrays = open_features(folder, "train", spec, delays)
    x, y = design(arrays, spec)
    runs = open_runs(folder, "train")
    fits = []
    subjects = arrays[-1].T == 1 if "subjects" in spec else np.full((1, len(y)), True)  # (S, N)
    for own in subjects:
        never_recorded = np.isnan(y[own]).all(0)
        targets = np.where(never_recorded & ~never_recorded.all(), 0.0, y)
        rows = own & ~np.isnan(targets).any(1)
        if rows.sum() < 3:
            raise DataError(f"{folder}: {rows.sum()} training rows have all targets; ridge "
                            "regression (linear_path) needs 3 or more, of each subject")
        fits.append(fit_with_delays(x[rows], targets[rows], runs[rows]))
    return tuple(torch.tensor(np.concatenate(parts), dtype=torch.float32) for parts in zip(*fits))


def fit_with_delays(x, y, runs):
    """Fit a ridge regression of y (N, T) on windows x (N, K, P); return [weight, bias].

    x, y: float64 arrays without NaN. runs (N,): each row's run number, ascending.
    weight (T, K * P), bias (T,): per column of y the better of two fits by the error on left-out
    runs: on the whole window, or on the present row x[:, 0] alone (the other weights are then 0).
    """
    fits = [fit_ridge(x[:, :k].reshape(len(x), -1), y, runs) for k in sorted({1, x.shape[1]})]
    weights, biases, _, errors = zip(*fits)
    weights = [np.pad(w, ((0, len(weights[-1]) - len(w)), (0, 0))) for w in weights]
    best = np.argmin(errors, axis=0)  # (T,)
    return [np.choose(best, parts).T for parts in (weights, biases)]


def open_data(config, ranks):
    """Return the Data (loaders and spec) of config.data_dir, a folder of data.prepare.features.

    A batch has the arguments of MultimodalAutoencoder.forward(). With config.linear_path and a
    target, the Data's attribute linear_path is the result of fit_linear_path(). All ranks must
    call. Raises DataError for data that cannot be used, ConfigError for keys that do not suit them.
    """
    meta = read_features_meta(config.data_dir)
    weighted = {name for name, weight in config.modality_weights.items() if weight != 1}
    if unknown := weighted - meta["modalities"].keys():
        raise ConfigError([f"modality_weights: {', '.join(sorted(unknown))}: the modalities of "
                           f"{config.data_dir} are {', '.join(meta['modalities'])}"])
    if config.matching == "correlation" and meta["target"] == 1:  # 0 for every row
        raise ConfigError(["matching: correlation is over the dimensions of the target, which has "
                           "1; expected mse"])
    if reserved := [name for name in meta["modalities"] if hasattr(nn.ModuleDict(), name)]:
        raise DataError(f"{config.data_dir}: {', '.join(reserved)}: not possible as names of "
                        "PyTorch modules; rename the files and prepare them again")
    names = ("modalities", "target", "mean", "std", "shift", "subjects")
    spec = {k: meta[k] for k in names if k in meta}

    def load(split):
        return RowLoader(open_features(config.data_dir, split, delays=config.delays), config, ranks)
    data = Data(load("train"), load("val") if config.eval_interval else None, spec)
    if config.linear_path and meta["target"]:
        data.linear_path = broadcast_from_rank0(
            lambda: fit_linear_path(config.data_dir, spec, config.delays), ranks)
    return data
