"""Evaluation of a checkpoint of --model autoencoder, and predictions of rows."""

import json
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch

from model.autoencoder import data, losses
from model.core.load import load_model
from train.base.cli import command
from train.base.errors import echo
from train.base.fields import key
from train.base.files import atomic_write, write_text
from train.evaluate import pack, to_numbers, unpack


@torch.no_grad()
def evaluate_rows(model, arrays, rows=1024):
    """Evaluate a model, in eval mode on the CPU, and return (metrics, r, outputs).

    arrays: numpy arrays in the order of forward(). rows: the batch size.
    metrics: {name: number or `None`}: "rows", "loss" and model.numbers(); `None` also for
    recon_NAME or match if the array has NaN only.
    r: the tensor of correlations(); `None` without a target.
    outputs: numpy arrays {"latent": the bottleneck (N, Z), "prediction": of the target (N, T), in
    the original units, if the model has a target}.
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
    for name, array in zip(model.names, arrays):
        if np.isnan(array).all():  # missing values count as predicted exactly
            metrics["match" if name == "target" else f"recon_{name}"] = None
    outputs = {name: torch.cat(tensors).numpy() for name, tensors in parts.items()}
    r = None
    if model.head is not None:
        r = losses.correlations(total)
        shift = data.shift_of(model.spec, "target")
        outputs["prediction"] = outputs["prediction"].astype(np.float64) + shift
    return metrics, r, outputs


def evaluate_ridge(model, arrays):
    """Return correlations() of the baseline, a ridge regression, on `arrays`: (T,) or (S, T).

    arrays: of open_features() with the model's spec and delays. The baseline is fitted to the
    training rows in the model's data_dir; DataError if they are missing, too few or lack a target.
    """
    weight, bias = data.fit_linear_path(model.keys.data_dir, model.spec, model.keys.delays)
    x, y = map(torch.from_numpy, data.design(arrays, model.spec))
    subjects = torch.from_numpy(arrays[-1]) if "subjects" in model.spec else None
    p = data.of_subject(x.flatten(1) @ weight.T.double() + bias, subjects)
    return losses.correlations(losses.correlation_sums(p, y, subjects))


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
    """Print a checkpoint's metrics on a split of features, and write the files that args names.

    Raises UserError if the checkpoint or the data cannot be used.
    """
    model, _ = load_model(args.ckpt, expect="autoencoder")
    folder = args.data_dir or model.keys.data_dir
    arrays = data.open_features(folder, args.split, model.spec, model.keys.delays)
    metrics, r, outputs = evaluate_rows(model, arrays)
    tables = {} if r is None else dict(targets=r)  # correlations of each target
    if args.baseline:
        tables["ridge_targets"] = evaluate_ridge(model, arrays)
        metrics["ridge"] = losses.mean_correlation(tables["ridge_targets"])
    for subject, values in zip(model.spec.get("subjects", ()), tables.get("targets", ())):
        metrics[f"subject {subject}"] = losses.mean_correlation(values)
    for name, value in metrics.items():
        text = f"{value:.4f}" if isinstance(value, float) else value
        echo(f"{name:<14} {text}")
    for name, values in tables.items():
        metrics[name] = [v if np.isfinite(v) else None for v in values.flatten().tolist()]
    if args.to:
        write_text(args.to, json.dumps(metrics, indent=1))
    if args.arrays:
        with atomic_write(args.arrays) as f:
            np.savez(f, **outputs)


main = command(EvaluationOptions, evaluate_checkpoint)
