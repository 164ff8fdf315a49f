"""A multimodal autoencoder that also predicts a recorded signal: --model autoencoder

One encoder per modality (e.g. video, audio and text features) maps to a common bottleneck. One
decoder per modality reconstructs the features from it, and a linear head predicts a target, e.g.
fMRI. The bottleneck limits the rank of the head, which regularises targets of many thousand voxels.

    python -m data.prepare.features --synthetic
    python run_train.py --config train/configs/autoencoder.yaml
    python -m model.autoencoder --ckpt out/autoencoder/ckpt.pt    # metrics on held-out rows

Shapes: N rows, D dimensions of an array, H d_hidden, Z d_latent.
"""

import json
import sys
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
from train.base.cli import run_command
from train.base.errors import ConfigError, DataError, echo
from train.base.fields import key
from train.dataloader import Data, RowLoader
from train.evaluate import pack, unpack
from train.system import ModelHooks

USE = "python -m model.autoencoder --ckpt {out}/ckpt.pt --arrays {out}/val.npz"
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


# -----------------------------------------------------------------------------
# data

def read_features_meta(folder):
    """Return the keys of meta.json of a folder that data.prepare.features wrote: {"modalities":
    {name: D}, "target": D or `None`, "mean", "std": {name: [D floats]}, perhaps "shift"}. Raises
    DataError."""
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
    """Return {name: D} of the arrays in the order of a batch: the modalities, then the target."""
    return spec["modalities"] | ({"target": spec["target"]} if spec["target"] else {})


def open_features(folder, split, spec=None):
    """Return the memory-mapped arrays [(N, D) float32] of a split in the order of array_dims().

    For a model of `spec`, trained on other data: DataError unless the folder has the same arrays.
    If the shifts of the folder are not those of the training data, the difference is added.
    """
    meta = read_features_meta(folder)
    if spec and array_dims(meta) != array_dims(spec):
        raise DataError(f"{folder}: arrays {array_dims(meta)}; the checkpoint was trained on "
                        f"{array_dims(spec)}: prepare the same arrays")
    limits = {name: ((d,), None, None) for name, d in array_dims(meta).items()}
    arrays = open_rows(folder, split, **limits)
    for i, name in enumerate(limits if spec else ()):
        if shift_of(meta, name) != shift_of(spec, name):
            arrays[i] = arrays[i] + np.subtract(shift_of(meta, name), shift_of(spec, name))
    return arrays


def shift_of(spec, name):
    """Return what data.prepare.features subtracted from an array: a list of D floats, or 0."""
    return spec.get("shift", {}).get(name, 0.0)


def open_data(config, ranks):
    """Return the Data of a folder that data.prepare.features wrote. Raises UserError."""
    meta = read_features_meta(config.data_dir)
    weighted = {name for name, weight in config.modality_weights.items() if weight != 1}
    if unknown := weighted - meta["modalities"].keys():
        raise ConfigError([f"modality_weights: {', '.join(sorted(unknown))}: the modalities of "
                           f"{config.data_dir} are {', '.join(meta['modalities'])}"])
    if reserved := [name for name in meta["modalities"] if hasattr(nn.ModuleDict, name)]:
        raise DataError(f"{config.data_dir}: {', '.join(reserved)}: not possible as names of "
                        "PyTorch modules; rename the files and prepare them again")
    spec = {k: meta[k] for k in ("modalities", "target", "mean", "std", "shift") if k in meta}
    train, val = (RowLoader(open_features(config.data_dir, split), config, ranks)
                  for split in ("train", "val"))
    return Data(train, val if config.eval_interval else None, spec)


# -----------------------------------------------------------------------------
# the model

class MultimodalAutoencoder(nn.Module):
    """forward(*arrays) -> (loss, sums); arrays: features (N, D) in the order of array_dims()."""

    def __init__(self, config, spec):
        super().__init__()
        self.keys = c = config
        self.spec = spec
        h = c.d_hidden
        dims = spec["modalities"]
        self.names = list(array_dims(spec))
        self.encoder = nn.ModuleDict({name: nn.Linear(d, h) for name, d in dims.items()})
        self.bottleneck = nn.Linear(h * len(dims), c.d_latent)
        self.expand = nn.ModuleDict({name: nn.Linear(c.d_latent, h) for name in dims})
        self.decoder = nn.ModuleDict({name: nn.Linear(h, d) for name, d in dims.items()})
        self.head = nn.Linear(c.d_latent, spec["target"]) if spec["target"] else None
        # On the CPU also under torch.device("meta"): the values come from the spec.
        for name in self.names:
            mean, std = (torch.tensor(spec[k][name], device="cpu") for k in ("mean", "std"))
            self.register_buffer(f"mean_{name}", mean, persistent=False)
            self.register_buffer(f"std_{name}", torch.where(std > 0, std, 1.0), persistent=False)
        fill(self, config.seed)

    def initial(self, name, shape, seed):
        # N(0, 1 / inputs), and 0 for biases
        if not isinstance(self.get_submodule(name.rpartition(".")[0]), nn.Linear):
            return None
        return normal(name, shape, shape[1] ** -0.5 if len(shape) == 2 else 0.0, seed)

    def standardise(self, arrays):
        """Return {name: (N, D) float32}; each dimension has mean 0 and variance 1 over the training
        rows."""
        return {name: (x.float() - getattr(self, f"mean_{name}")) / getattr(self, f"std_{name}")
                for name, x in zip(self.names, arrays)}

    def encode(self, x):
        """Return the bottleneck (N, Z) of standardised modalities {name: (N, D)}."""
        hidden = [F.dropout(F.gelu(self.encoder[name](x[name])), self.keys.dropout, self.training)
                  for name in self.spec["modalities"]]  # (N, H) each
        return self.bottleneck(torch.cat(hidden, dim=1))

    def forward(self, *arrays):
        c = self.keys
        match = None
        x = self.standardise(arrays)
        z = self.encode(x)  # (N, Z)
        outs = {name: self.decoder[name](F.gelu(self.expand[name](z))).float()
                for name in self.spec["modalities"]}
        errors = reconstruction_losses(outs, x)
        sums = {f"recon_{name}": error.sum() for name, error in errors.items()}
        if self.head is not None:
            out = self.head(z).float()  # (N, D)
            match = matching_loss(out, x["target"], c.matching)
            sums |= dict(match=match.sum(), **correlation_sums(out.detach(), x["target"]))
        loss = combined_loss(errors, match, c.recon_weight, c.match_weight, c.modality_weights)
        return loss.mean(), sums

    def numbers(self, sums):
        """Return the parts of the loss per row, and correlation: the mean over the targets of each
        target's correlation over all rows."""
        out = ModelHooks.numbers(self, sums)
        if self.head is not None:
            r = correlations(sums)
            r = r[r.isfinite()]
            out["correlation"] = float(r.mean()) if len(r) else None
        return out


def reconstruction_losses(outs, x):
    """Return {modality: (N,)}: the mean squared error of each row. outs, x: {modality: (N, D)}."""
    return {name: (out - x[name]).square().mean(1) for name, out in outs.items()}


def matching_loss(out, y, matching="mse"):
    """Return the distance (N,) between the rows of `out` and the targets y, both (N, D): the mean
    squared error, or 1 - correlation if matching is "correlation"."""
    if matching == "mse":
        return (out - y).square().mean(1)
    return 1 - row_correlation(out, y)


def combined_loss(errors, match=None, recon_weight=1.0, match_weight=1.0, modality_weights=None):
    """Return the loss (N,) of each row: the weighted sum of reconstruction_losses and, if given,
    matching_loss. modality_weights: {modality: weight}, 1 by default."""
    weights = modality_weights or {}
    loss = sum(recon_weight * weights.get(name, 1.0) * error for name, error in errors.items())
    return loss if match is None else loss + match_weight * match


def row_correlation(a, b):
    """Return Pearson's r (N,) between the rows of a and b, both (N, D). A mean over rows is a sum
    over samples, so it can be a training loss. r of a constant row is 0."""
    a, b = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
    # The epsilon is inside the root: the gradient of a constant row is finite.
    return (a * b).mean(1) / ((a.square().mean(1) + VARIANCE_EPS)
                              * (b.square().mean(1) + VARIANCE_EPS)).sqrt()


def correlation_sums(p, y):
    """Return the sums over rows that correlations() needs. p, y: (N, D) predictions and targets,
    standardised, because large means would lose precision."""
    if p.device.type != "mps":  # MPS has no float64
        p, y = p.double(), y.double()
    return dict(p=p.sum(0), y=y.sum(0), pp=p.square().sum(0), yy=y.square().sum(0),
                py=(p * y).sum(0))


def correlations(sums):
    """Return Pearson's r (D,) of each target over all rows, NaN if one side is constant."""
    n = sums["count"]
    var_p = sums["pp"] - sums["p"].square() / n
    var_y = sums["yy"] - sums["y"].square() / n
    covariance = sums["py"] - sums["p"] * sums["y"] / n
    r = covariance / (var_p.clamp(min=0) * var_y.clamp(min=0)).sqrt()
    return torch.where((var_p > 1e-9 * n) & (var_y > 1e-9 * n), r, torch.nan)


def build_model(config, data):
    return MultimodalAutoencoder(config, data.spec)


# -----------------------------------------------------------------------------
# command: evaluate a checkpoint on held-out rows

@torch.no_grad()
def evaluate_rows(model, arrays, rows=1024):
    """Return (metrics, correlations (D,) or `None`, outputs) of a model on all rows of `arrays`,
    computed in batches of `rows`.

    outputs: {"latent": (N, Z), "prediction": (N, D)}, numpy arrays: the bottleneck and, if the
    model has a target, its prediction in the units of the original array.
    """
    total = 0.0
    latents = []
    for start in range(0, len(arrays[0]), rows):
        batch = [torch.from_numpy(np.array(a[start:start + rows])).float() for a in arrays]
        loss, sums = model(*batch)
        total = total + pack(loss, sums, len(batch[0]))
        latents.append(model.encode(model.standardise(batch)))
    total, _ = unpack(total, sums)
    z = torch.cat(latents)
    metrics = dict(rows=len(z), loss=float(total["loss"] / len(z)), **model.numbers(total))
    if model.head is None:
        return metrics, None, dict(latent=z.numpy())
    y = (model.head(z) * model.std_target + model.mean_target).double().numpy()
    return metrics, correlations(total), dict(
        latent=z.numpy(), prediction=y + shift_of(model.spec, "target"))


@dataclass
class EvaluationOptions:
    """Evaluate a checkpoint of a multimodal autoencoder."""
    ckpt: str = key("out/autoencoder/ckpt.pt", "checkpoint", metavar="FILE", path=True)
    data_dir: str | None = key(None, "prepared features (default: the training data)",
                               metavar="FOLDER", path=True)
    split: str = key("val", "split to evaluate", choices=["train", "val"])
    to: str | None = key(None, "also write the metrics, and the correlation of each target",
                         metavar="FILE.json", path=True)
    arrays: str | None = key(None, "also write the arrays latent (N, Z) and prediction (N, D)",
                             metavar="FILE.npz", path=True)


def evaluate_checkpoint(args):
    """Print the metrics of a checkpoint and write the requested files."""
    model, _ = load_model(args.ckpt, expect="autoencoder")
    arrays = open_features(args.data_dir or model.keys.data_dir, args.split, model.spec)
    metrics, r, outputs = evaluate_rows(model, arrays)
    for name, value in metrics.items():
        echo(f"{name:<14} {value:.4f}" if isinstance(value, float) else f"{name:<14} {value}")
    if r is not None:
        metrics["targets"] = [v if v == v else None for v in r.tolist()]
    if args.to:
        Path(args.to).write_text(json.dumps(metrics, indent=1), encoding="utf-8")
    if args.arrays:
        np.savez(args.arrays, **outputs)


def main(argv=None):
    return run_command(EvaluationOptions, evaluate_checkpoint, argv)


if __name__ == "__main__":
    sys.exit(main())
