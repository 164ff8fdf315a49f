"""A multimodal autoencoder that also predicts a recorded signal: --model autoencoder

One encoder per modality (e.g. video, audio and text features) maps to a common bottleneck. One
decoder per modality reconstructs the features from it, and a linear head predicts a target, e.g.
fMRI. The bottleneck limits the rank of the head, which regularises targets of many thousand voxels.

A response may be delayed: with the key delays, a sample is a row and the rows before it (a window).
With linear_path, a ridge regression is a fixed part of the prediction and the network learns the
rest. NaN is a missing value: it enters as the mean and counts as predicted exactly.

    python -m data.prepare.features --synthetic
    python run_train.py --config train/configs/autoencoder.yaml
    python -m model.autoencoder --ckpt out/autoencoder/ckpt.pt    # metrics on held-out rows
    python -m model.autoencoder --data_dir FOLDER --arrays out.npz    # predictions for other rows

Shapes: N rows, K rows of a window (delays + 1; without delays there is no such dimension), D
dimensions of an array, P of all modalities, T of the target, H d_hidden, Z d_latent.
"""

import json
import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from data.meta import has_type, read_meta_for
from data.rows import open_rows
from model.core.init import fill, normal
from model.core.load import load_model
from model.core.ridge import fit_ridge
from train.base.cli import command
from train.base.errors import ConfigError, DataError, echo
from train.base.fields import key
from train.dataloader import Data, RowLoader
from train.distributed import broadcast_from_rank0
from train.evaluate import pack, to_numbers, unpack
from train.system import ModelHooks

USE = "python -m model.autoencoder --ckpt {out}/{best} --arrays {out}/val.npz"
VARIANCE_EPS = 1e-3  # added to variances of about 1 in row_correlation()
HOW_TO_PREPARE = "prepare it with `python -m data.prepare.features`"


@dataclass
class Keys:
    d_hidden: int = key(256, "width of the hidden layers of encoders and decoders", ge=1)
    d_latent: int = key(32, "width of the bottleneck", ge=1)
    recon_weight: float = key(1.0, "weight of the reconstruction loss", ge=0)
    modality_weights: dict = key({}, "reconstruction: weights of modalities, e.g. {video: 2} [1]")
    match_weight: float = key(1.0, "weight of the matching loss (prediction of the target)", ge=0)
    matching: str = key("mse", "matching loss: mean squared error, or 1 - correlation per row",
                        choices=["mse", "correlation"])
    delays: int = key(0, "rows before a row, of the same run, that its prediction uses", ge=0)
    linear_path: bool = key(False, "predict by a fixed ridge regression plus the network")
    modality_dropout: float = key(0.0, "training: share of rows without a modality", ge=0, lt=1)

    def problems(self):
        valid = all(isinstance(w, (int, float)) and w >= 0 for w in self.modality_weights.values())
        return [] if valid else [f"modality_weights: expected numbers of at least 0, got "
                                 f"{self.modality_weights}"]


# -----------------------------------------------------------------------------
# data

def read_features_meta(folder):
    """Return the keys of meta.json of a folder that data.prepare.features wrote, a dict:
    "modalities" {name: D}, "target" (D or `None`), "mean", "std" and, if present, "shift",
    {name: [D floats]} each. Raises DataError."""
    numbers = {str: [int | float]}
    meta = read_meta_for("autoencoder", folder, HOW_TO_PREPARE, modalities={str: int},
                         target=int | None, mean=numbers, std=numbers).extra
    meta.setdefault("target", None)
    if not has_type(meta.get("shift", {}), numbers) or any(
            {n: len(v) for n, v in meta[part].items()} != array_dims(meta)
            for part in ("mean", "std")):
        raise DataError(f"{folder}: mean, std or shift do not match the dimensions of the arrays; "
                        f"{HOW_TO_PREPARE}")
    return meta


def array_dims(spec):
    """Return {name: D} of the arrays in the order of a batch: the modalities, then "target", if
    any. spec: the dict of read_features_meta()."""
    return spec["modalities"] | ({"target": spec["target"]} if spec["target"] else {})


def add_delays(array, runs, delays):
    """Return the windows (N, delays + 1, D) of an array (N, D): window i has row i - k at index k,
    or NaN if that row is of a different run or does not exist. runs (N,): the run of each row,
    ascending."""
    index = np.arange(len(array))[:, None] - np.arange(delays + 1)  # (N, K)
    is_inside = (index >= 0) & (runs[index.clip(0)] == runs[:, None])
    return np.where(is_inside[..., None], array[index.clip(0)], np.float32(np.nan))


def open_runs(folder, split):
    """Return the run of each row of a split ("train", "val"), (N,), ascending, from SPLIT_runs.npy
    in `folder`. Raises DataError, also if there is no such file."""
    if not os.path.exists(os.path.join(folder, f"{split}_runs.npy")):
        raise DataError(f"{folder}: no {split}_runs.npy (for delays, ridge); {HOW_TO_PREPARE}")
    return np.array(open_rows(folder, split, runs=((), 0, 1 << 31))[0])


def open_features(folder, split, spec=None, delays=0):
    """Return the arrays of a split in the order of array_dims() (modalities, then the target),
    float32: memory-mapped (N, D); modalities with delays, in memory (N, delays + 1, D). Raises
    DataError.

    spec: of a model that was trained on other data (default: of `folder`). An array that only
    `spec` has is NaN; arrays that `spec` lacks, or other dimensions, raise DataError. If the
    offsets of shift_of() differ between the folder and `spec`, the difference is added, in float64.
    """
    meta = read_features_meta(folder)
    spec = spec or meta
    if not array_dims(meta).items() <= array_dims(spec).items():
        raise DataError(f"{folder}: arrays {array_dims(meta)}; the checkpoint was trained on "
                        f"{array_dims(spec)}: prepare the same arrays")
    limits = {name: ((d,), None, None) for name, d in array_dims(meta).items()}
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
        arrays.append(add_delays(array, runs, delays) if delays and name != "target" else array)
    return arrays


def shift_of(spec, name):
    """Return the offset that data.prepare.features subtracted from the array `name`, a list of D
    floats, or 0.0. spec: the dict of read_features_meta()."""
    return spec.get("shift", {}).get(name, 0.0)


def scale_of(spec, name):
    """Return (mean, standard deviation) of the array `name` over the training rows, float32 (D,)
    each. The deviation of a constant is 1. spec: the dict of read_features_meta()."""
    mean, std = (np.array(spec[k][name], np.float32) for k in ("mean", "std"))
    return mean, np.where(std > 0, std, np.float32(1))


def design(arrays, spec):
    """Return (x, y), float64: standardised features x (N, K, P) of all modalities, missing values
    as 0, and standardised targets y (N, T), NaN: missing. arrays: the modalities (N, D) or (N, K,
    D), then the target, as from open_features(). spec: the dict of read_features_meta()."""
    *x, y = ((array[:] - mean) / std for array, (mean, std) in zip(
        arrays, (scale_of(spec, name) for name in array_dims(spec)), strict=True))
    x = np.concatenate(x, axis=-1, dtype=np.float64)
    return np.nan_to_num(x).reshape(len(x), -1, x.shape[-1]), y.astype(np.float64)


def fit_linear_path(folder, spec, delays):
    """Fit ridge regression to the training rows of `folder`. Return (weight (T, K * P), bias (T,)),
    float32, from standardised features of a row and `delays` rows before it (K = delays + 1) to the
    standardised target. Rows with a missing target are left out. A target uses the delayed rows if
    that reduces the error on runs that the fit leaves out. Raises DataError without a target or
    with fewer than 3 rows."""
    if not spec["target"]:
        raise DataError(f"{folder}: no target, which ridge regression (--baseline) predicts")
    x, y = design(open_features(folder, "train", spec, delays), spec)
    recorded = ~np.isnan(y).any(1)
    if recorded.sum() < 3:
        raise DataError(f"{folder}: {recorded.sum()} training rows have all targets; ridge "
                        "regression (linear_path) needs 3 or more")
    runs = open_runs(folder, "train")[recorded]
    fits = [fit_ridge(x[recorded, :k].reshape(recorded.sum(), -1), y[recorded], runs)
            for k in sorted({1, delays + 1})]
    weights, biases, _, errors = zip(*fits)
    weights = [np.pad(w, ((0, len(weights[-1]) - len(w)), (0, 0))) for w in weights]
    best = np.argmin(errors, axis=0)  # (T,)
    return tuple(torch.tensor(np.choose(best, parts).T, dtype=torch.float32)
                 for parts in (weights, biases))


def open_data(config, ranks):
    """Return the Data of config.data_dir, a folder that data.prepare.features wrote. With
    linear_path, its attribute linear_path is the result of fit_linear_path(). Raises UserError."""
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
    spec = {k: meta[k] for k in ("modalities", "target", "mean", "std", "shift") if k in meta}

    def load(split):
        return RowLoader(open_features(config.data_dir, split, delays=config.delays), config, ranks)
    data = Data(load("train"), load("val") if config.eval_interval else None, spec)
    if config.linear_path and meta["target"]:
        data.linear_path = broadcast_from_rank0(
            lambda: fit_linear_path(config.data_dir, spec, config.delays), ranks)
    return data


# -----------------------------------------------------------------------------
# the model

class MultimodalAutoencoder(nn.Module):
    """A model of modalities and a target: forward(*arrays) -> (mean loss, sums {name: tensor}).
    arrays: the modalities and the target, if any, (N, D) each; modalities (N, delays + 1, D) with
    delays. spec: the dict of read_features_meta(). linear_path: the (weight, bias) of
    fit_linear_path(). encode() computes the bottleneck, predict() the target."""

    def __init__(self, config, spec, linear_path=None):
        super().__init__()
        self.keys = c = config
        self.spec = spec
        h = c.d_hidden
        dims = spec["modalities"]
        self.names = list(array_dims(spec))
        k = c.delays + 1
        self.encoder = nn.ModuleDict({name: nn.Linear(k * d, h) for name, d in dims.items()})
        self.bottleneck = nn.Linear(h * len(dims), c.d_latent)
        self.expand = nn.ModuleDict({name: nn.Linear(c.d_latent, h) for name in dims})
        self.decoder = nn.ModuleDict({name: nn.Linear(h, d) for name, d in dims.items()})
        self.head = nn.Linear(c.d_latent, spec["target"]) if spec["target"] else None
        self.linear = None
        self.linear_path = linear_path
        if c.linear_path and spec["target"]:
            self.linear = nn.Linear(k * sum(dims.values()), spec["target"]).requires_grad_(False)
        # On the CPU also under torch.device("meta"): the values come from the spec.
        for name in self.names:
            for part, value in zip(("mean", "std"), scale_of(spec, name)):
                value = torch.tensor(value, device="cpu")
                self.register_buffer(f"{part}_{name}", value, persistent=False)
        fill(self, config.seed)

    def initial(self, name, shape, seed):
        # N(0, 1 / inputs), and 0 for biases. At first, the linear path alone predicts the target.
        layer, _, part = name.rpartition(".")
        if layer == "linear":
            return self.linear_path[part == "bias"]
        is_zero = part == "bias" or layer == "head" and self.linear is not None
        return normal(name, shape, 0.0 if is_zero else shape[1] ** -0.5, seed)

    def adopt(self, weights):
        """Return `weights` {name: tensor}, with which training starts, in which the linear path is
        the one fitted to this run's data, if any."""
        if self.linear_path is None:
            return weights
        return weights | dict(zip(("linear.weight", "linear.bias"), self.linear_path))

    def standardise(self, arrays):
        """Return {name: (N, D) or (N, K, D), float32} of `arrays` in the order of forward(), with
        mean 0 and variance 1 of each dimension over the training rows. Missing values are NaN."""
        return {name: (x.float() - getattr(self, f"mean_{name}")) / getattr(self, f"std_{name}")
                for name, x in zip(self.names, arrays)}

    def encode(self, x):
        """Return the bottleneck (N, Z) of standardised modalities {name: (N, D) or (N, K, D)}, the
        result of standardise(). NaN counts as 0, the mean."""
        c = self.keys
        hidden = []
        for name in self.spec["modalities"]:
            rows = x[name].nan_to_num().flatten(1)  # (N, K * D)
            rows = F.dropout1d(rows[:, None], c.modality_dropout, self.training)[:, 0]
            hidden.append(F.dropout(F.gelu(self.encoder[name](rows)), c.dropout, self.training))
        return self.bottleneck(torch.cat(hidden, dim=1))

    def predict(self, x, z):
        """Return the standardised target (N, T), including the linear path, from the standardised
        modalities x {name: (N, D) or (N, K, D)} and the bottleneck z (N, Z), the result of
        encode(x)."""
        # The rest, which a linear path leaves, is not linear in the bottleneck either.
        out = self.head(z if self.linear is None else F.gelu(z)).float()
        return out if self.linear is None else out + self.predict_linear(x)

    def predict_linear(self, x):
        """Return the part of the prediction (N, T) that is a ridge regression, in float32, from
        standardised modalities x {name: (N, D) or (N, K, D)}."""
        features = torch.cat([x[name].nan_to_num() for name in self.spec["modalities"]], dim=-1)
        with torch.autocast(features.device.type, enabled=False):
            # Sharded, the parameters may be in bfloat16.
            return F.linear(features.flatten(1), *(p.float() for p in self.linear.parameters()))

    def forward(self, *arrays):
        c = self.keys
        match = None
        x = self.standardise(arrays)
        z = self.encode(x)  # (N, Z)
        outs = {name: self.decoder[name](F.gelu(self.expand[name](z))).float()
                for name in self.spec["modalities"]}
        present = {name: x[name][:, 0] if c.delays else x[name] for name in outs}
        errors = reconstruction_losses(outs, present)
        sums = {f"recon_{name}": error.sum() for name, error in errors.items()}
        if self.head is not None:
            out = self.predict(x, z)  # (N, T)
            match = matching_loss(out, x["target"], c.matching)
            sums |= dict(match=match.sum(), **correlation_sums(out.detach(), x["target"]))
            if self.linear is not None and not self.training:  # the baseline beside the model
                sums |= correlation_sums(self.predict_linear(x), x["target"], "ridge_")
        loss = combined_loss(errors, match, c.recon_weight, c.match_weight, c.modality_weights)
        return loss.mean(), sums

    def numbers(self, sums):
        """Return {name: float} for a log line, from the sums of forward() over all rows: the parts
        of the loss per row; "correlation", Pearson's r over all rows, as a mean over the dimensions
        of the target; in evaluations with a linear path also "ridge", the correlation of the linear
        path without the network."""
        out = ModelHooks.numbers(self, sums)
        if self.head is not None:
            out["correlation"] = mean_correlation(correlations(sums))
        if "ridge_n" in sums:
            out["ridge"] = mean_correlation(correlations(sums, "ridge_"))
        return out


def reconstruction_losses(outs, x):
    """Return {modality: (N,)}: the mean squared error of each row. outs, x: {modality: (N, D)},
    predictions and values; a missing value (NaN) has no error."""
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
    """Return Pearson's r (N,) between the rows of a and b, both (N, D); 0 for a constant row. Each
    row has a value, so that the mean over rows can be a training loss."""
    a, b = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
    # The epsilon is inside the root: the gradient of a constant row is finite.
    return (a * b).mean(1) / ((a.square().mean(1) + VARIANCE_EPS)
                              * (b.square().mean(1) + VARIANCE_EPS)).sqrt()


def correlation_sums(p, y, prefix=""):
    """Return the sums over rows that correlations() needs, as {prefix + name: (D,)}. p, y: (N, D)
    predictions and targets, standardised, because large means would lose precision. A missing
    target (NaN) is left out. The sums of batches can be added."""
    if p.device.type != "mps":  # MPS has no float64
        p, y = p.double(), y.double()
    recorded = ~y.isnan()
    p = p * recorded
    y = y.nan_to_num()
    sums = dict(p=p, y=y, pp=p.square(), yy=y.square(), py=p * y, n=recorded)
    return {prefix + name: value.sum(0) for name, value in sums.items()}


def correlations(sums, prefix=""):
    """Return Pearson's r (D,) between predictions and targets over all rows, per dimension; NaN if
    either is constant. sums: {prefix + name: (D,)}, the result of correlation_sums(), added over
    batches."""
    p, y, pp, yy, py, n = (sums[prefix + name] for name in ("p", "y", "pp", "yy", "py", "n"))
    var_p = pp - p.square() / n
    var_y = yy - y.square() / n
    r = (py - p * y / n) / (var_p.clamp(min=0) * var_y.clamp(min=0)).sqrt()
    return torch.where((var_p > 1e-9 * n) & (var_y > 1e-9 * n), r, torch.nan)


def mean_correlation(r):
    """Return the mean, a float, of the finite ones of the correlations r (D,); None if there is no
    finite one."""
    r = r[r.isfinite()]
    return float(r.mean()) if len(r) else None


def build_model(config, data):
    return MultimodalAutoencoder(config, data.spec, getattr(data, "linear_path", None))


# -----------------------------------------------------------------------------
# command: evaluate a checkpoint, predict rows

@torch.no_grad()
def evaluate_rows(model, arrays, rows=1024):
    """Return (metrics, correlations (D,) or `None`, outputs) of a MultimodalAutoencoder on all rows
    of `arrays`, numpy arrays in the order of its forward(), in batches of `rows`.

    metrics: {name: number}. correlations: per dimension of the target, `None` without a target.
    outputs: {"latent": (N, Z), "prediction": (N, D)}, numpy arrays: the bottleneck and, if the
    model has a target, the prediction of it in the units of the original array.
    """
    total = 0.0
    parts = defaultdict(list)
    for start in range(0, len(arrays[0]), rows):
        batch = [torch.from_numpy(np.array(a[start:start + rows])).float() for a in arrays]
        loss, sums = model(*batch)
        total = total + pack(loss, sums, len(batch[0]))
        x = model.standardise(batch)
        z = model.encode(x)
        parts["latent"].append(z)
        if model.head is not None:
            parts["prediction"].append(model.predict(x, z) * model.std_target + model.mean_target)
    total, _ = unpack(total, sums)
    metrics = dict(rows=len(arrays[0]), **to_numbers(model, total))
    outputs = {name: torch.cat(tensors).numpy() for name, tensors in parts.items()}
    if model.head is None:
        return metrics, None, outputs
    prediction = outputs["prediction"].astype(np.float64) + shift_of(model.spec, "target")
    return metrics, correlations(total), outputs | dict(prediction=prediction)


def evaluate_ridge(model, arrays):
    """Return the correlations (D,) between the target and the prediction of the baseline, on
    `arrays` from open_features(). The baseline is a ridge regression with the delays of `model`, a
    MultimodalAutoencoder, fitted to the training rows of the data_dir of the model."""
    weight, bias = fit_linear_path(model.keys.data_dir, model.spec, model.keys.delays)
    x, y = design(arrays, model.spec)
    p = torch.from_numpy(x.reshape(len(x), -1)) @ weight.T.double() + bias
    return correlations(correlation_sums(p, torch.from_numpy(y)))


@dataclass
class EvaluationOptions:
    """Evaluate a checkpoint of a multimodal autoencoder, or predict rows with it."""
    ckpt: str = key("out/autoencoder/ckpt.pt", "checkpoint", path=True)
    data_dir: str | None = key(None, "prepared features (default: the training data)",
                               metavar="FOLDER", path=True)
    split: str = key("val", "split to evaluate", choices=["train", "val"])
    baseline: bool = key(False, "also fit ridge regression to the training data, and evaluate it")
    to: str | None = key(None, "also write metrics and correlations", metavar="FILE.json",
                         path=True)
    arrays: str | None = key(None, "also write latent (N, Z) and prediction (N, D)",
                             metavar="FILE.npz", path=True)


def evaluate_checkpoint(args):
    """Evaluate a checkpoint with the EvaluationOptions `args`: print the metrics and write the
    requested files. Raises UserError."""
    model, _ = load_model(args.ckpt, expect="autoencoder")
    arrays = open_features(args.data_dir or model.keys.data_dir, args.split, model.spec,
                           model.keys.delays)
    metrics, r, outputs = evaluate_rows(model, arrays)
    tables = dict(targets=r)
    if args.baseline:
        tables["ridge_targets"] = evaluate_ridge(model, arrays)
        metrics["ridge"] = mean_correlation(tables["ridge_targets"])
    for name, value in metrics.items():
        echo(f"{name:<14} {value:.4f}" if isinstance(value, float) else f"{name:<14} {value}")
    for name, values in tables.items():
        if values is not None:
            metrics[name] = [v if v == v else None for v in values.tolist()]
    if args.to:
        Path(args.to).write_text(json.dumps(metrics, indent=1), encoding="utf-8")
    if args.arrays:
        np.savez(args.arrays, **outputs)


main = command(EvaluationOptions, evaluate_checkpoint)
