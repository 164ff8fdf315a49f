"""A multimodal autoencoder that also predicts a recorded signal: --model autoencoder

Feature arrays of several modalities (video, audio, text) go through an encoder each into one
bottleneck; from there a decoder each rebuilds them, and a linear head predicts a target (fMRI,
say). The bottleneck makes the head low-rank, as a target of many thousand voxels needs it.

    python -m data.prepare.features --synthetic
    python run_train.py --config train/configs/autoencoder.yaml
    python -m model.autoencoder --ckpt out/autoencoder/ckpt.pt    # its numbers on held-out rows

Shapes: N rows, D dims of an array, H d_hidden, Z d_latent.
"""

import argparse
import json
import re
import sys
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from data.prepare.features import array_names, open_features, read_features_meta
from model.gpt import fill, normal
from train.base.cli import run_command
from train.base.errors import ConfigError, DataError, echo
from train.base.fields import key
from train.dataloader import Data, RowLoader
from train.evaluate import batch_sums

USE = "python -m model.autoencoder --ckpt {out}/ckpt.pt --arrays {out}/val.npz"
# Beside the variance of a target over its dimensions, 1: keeps the gradient of a constant finite.
EPS = 1e-3


@dataclass
class Keys:
    d_hidden: int = key(256, "width inside encoders and decoders", ge=1)
    d_latent: int = key(32, "width of the bottleneck", ge=1)
    recon_weight: float = key(1.0, "weight of the reconstruction in the loss", ge=0)
    modality_weights: dict = key({}, "modality: weight of its squared error (default: 1 each)")
    match_weight: float = key(1.0, "weight of the match with the target", ge=0)
    matching: str = key("mse", "match by squared error, or by 1 - correlation over a row's targets",
                        choices=["mse", "correlation"])


def open_data(config, ranks):
    """Rows of the arrays in data_dir, made by data/prepare/features.py."""
    meta = read_features_meta(config.data_dir)
    given = {name for name, weight in config.modality_weights.items() if weight != 1}
    if strange := given - set(meta["modalities"]):  # 1 is what all have
        raise ConfigError([f"modality_weights: {', '.join(sorted(strange))}: the modalities of "
                           f"{config.data_dir} are {', '.join(meta['modalities'])}"])
    if taken := [n for n in meta["modalities"] if hasattr(nn.ModuleDict, n)]:
        raise DataError(f"{config.data_dir}: modules of PyTorch cannot be called {', '.join(taken)}"
                        "; prepare the data with other --names")
    spec = {k: meta[k] for k in ("modalities", "target", "mean", "std", "shift") if k in meta}
    train, val = (RowLoader(open_features(config.data_dir, split), config, ranks)
                  for split in ("train", "val"))
    return Data(train, val if config.eval_interval else None, spec)


# -----------------------------------------------------------------------------
# the model

LINEAR = re.compile(r"((encoder|expand|decoder)\.[^.]+|bottleneck|head)\.(weight|bias)")


class MultimodalAutoencoder(nn.Module):
    """forward(*arrays) -> (loss, sums); arrays (N, D) raw, in the order of array_names(spec)."""

    def __init__(self, config, spec):
        super().__init__()
        c, h, dims = config, config.d_hidden, spec["modalities"]
        self.keys, self.spec, self.names = c, spec, array_names(spec)
        self.encoder = nn.ModuleDict({name: nn.Linear(d, h) for name, d in dims.items()})
        self.bottleneck = nn.Linear(h * len(dims), c.d_latent)
        self.expand = nn.ModuleDict({name: nn.Linear(c.d_latent, h) for name in dims})
        self.decoder = nn.ModuleDict({name: nn.Linear(h, d) for name, d in dims.items()})
        self.head = nn.Linear(c.d_latent, spec["target"]) if spec["target"] else None
        for name in self.names:  # real also under torch.device("meta"): they come from the spec
            mean, std = (torch.tensor(spec[k][name], device="cpu") for k in ("mean", "std"))
            self.register_buffer(f"mean_{name}", mean, persistent=False)
            self.register_buffer(f"std_{name}", torch.where(std > 0, std, 1.0), persistent=False)
        fill(self, config.seed)

    def initial(self, name, shape, seed):
        """N(0, 1 / inputs); zero for biases."""
        if not LINEAR.fullmatch(name):
            return None
        return normal(name, shape, shape[1] ** -0.5 if len(shape) == 2 else 0.0, seed)

    def standardise(self, arrays):
        """{name: (N, D) float32}: each dimension has mean 0, variance 1 over the training rows."""
        return {name: (x.float() - getattr(self, f"mean_{name}")) / getattr(self, f"std_{name}")
                for name, x in zip(self.names, arrays)}

    def encode(self, x):
        """Bottleneck (N, Z) of standardised modalities {name: (N, D)}."""
        dropout, on = self.keys.dropout, self.training
        h = [F.dropout(F.gelu(self.encoder[name](x[name])), dropout, on)
             for name in self.spec["modalities"]]
        return self.bottleneck(torch.cat(h, dim=1))

    def forward(self, *arrays):
        c, x, match = self.keys, self.standardise(arrays), None
        z = self.encode(x)  # (N, Z)
        outs = {name: self.decoder[name](F.gelu(self.expand[name](z))).float()
                for name in self.spec["modalities"]}
        errors = reconstruction_losses(outs, x)
        sums = {f"recon_{name}": error.sum() for name, error in errors.items()}
        if self.head is not None:
            out, y = self.head(z).float(), x["target"]  # (N, D)
            match = matching_loss(out, y, c.matching)
            sums |= dict(match=match.sum(), **products(out.detach(), y))
        loss = combined_loss(errors, match, c.recon_weight, c.match_weight, c.modality_weights)
        return loss.mean(), sums

    def numbers(self, sums):
        """Each part of the loss, a row's mean; correlation: of each target over all rows, its mean
        over the targets."""
        n = float(sums["count"])
        out = {name: float(value) / n for name, value in sums.items()
               if name == "match" or name.startswith("recon_")}
        if self.head is not None:
            r = correlations(sums)
            r = r[r.isfinite()]
            out["correlation"] = float(r.mean()) if len(r) else None
        return out


def reconstruction_losses(outs, x):
    """{modality: squared error (N,) of each row, the mean over dims}, of outs and x {modality:
    (N, D)}."""
    return {name: (out - x[name]).square().mean(1) for name, out in outs.items()}


def matching_loss(out, y, matching="mse"):
    """How far each row of `out` is from its target y, (N, D) both: (N,), the mean squared error, or
    ("correlation") 1 - the row's correlation."""
    if matching == "mse":
        return (out - y).square().mean(1)
    return 1 - row_correlation(out, y)


def combined_loss(errors, match=None, recon_weight=1.0, match_weight=1.0, modality_weights=None):
    """The loss (N,) of each row: reconstruction_losses and, where there is one, matching_loss, each
    with its weight; modality_weights {modality: weight}, 1 where nothing is said."""
    loss, weights = 0.0, modality_weights or {}
    for name, error in errors.items():
        loss = loss + recon_weight * weights.get(name, 1.0) * error
    return loss if match is None else loss + match_weight * match


def row_correlation(a, b):
    """Pearson's r (N,) of each row of a with that of b, (N, D): additive over rows, so it can be
    trained on. The epsilon stands inside the root: a constant row has r 0 and a finite gradient."""
    a, b = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
    return (a * b).mean(1) / ((a.square().mean(1) + EPS) * (b.square().mean(1) + EPS)).sqrt()


def products(p, y):
    """Sums over rows from which correlations() are made. p, y (N, D), standardised: large means
    would drown the products."""
    if p.device.type != "mps":  # which has no float64
        p, y = p.double(), y.double()
    return dict(p=p.sum(0), y=y.sum(0), pp=p.square().sum(0), yy=y.square().sum(0),
                py=(p * y).sum(0))


def correlations(sums):
    """Pearson's r of each target over all rows (D,), NaN where one side is constant."""
    s, n = sums, sums["count"]
    var_p, var_y = s["pp"] - s["p"].square() / n, s["yy"] - s["y"].square() / n
    r = (s["py"] - s["p"] * s["y"] / n) / (var_p.clamp(min=0) * var_y.clamp(min=0)).sqrt()
    return torch.where((var_p > 1e-9 * n) & (var_y > 1e-9 * n), r, torch.nan)


def build_model(config, data):
    return MultimodalAutoencoder(config, data.spec)


# -----------------------------------------------------------------------------
# the command line: numbers of a checkpoint on held-out rows

def batches(arrays, rows, offsets):
    """Yields all rows of `arrays`, to which offsets [(D,) or 0.0] are added, a batch at a time."""
    for start in range(0, len(arrays[0]), rows):
        yield [torch.from_numpy(a[start:start + rows] + offset).float()
               for a, offset in zip(arrays, offsets or [0.0] * len(arrays))]


@torch.no_grad()
def evaluate_rows(model, arrays, rows=1024, offsets=None):
    """(numbers, r of each target or None) of a model over all rows of `arrays`; see batches."""
    total = None
    for batch in batches(arrays, rows, offsets):
        sums = batch_sums(*model(*batch), len(batch[0]))
        total = sums if total is None else {k: total[k] + v for k, v in sums.items()}
    r = correlations(total) if model.head is not None else None
    loss = float(total["loss"] / total["count"])
    return dict(rows=int(total["count"]), loss=loss, **model.numbers(total)), r


@torch.no_grad()
def outputs(model, arrays, rows=1024, offsets=None):
    """{"latent" (N, Z), "prediction" (N, D)} of all rows of `arrays`, as numpy arrays: bottlenecks,
    and the target where there is one, in the units of the array that was prepared."""
    out = {}
    for batch in batches(arrays, rows, offsets):
        z = model.encode(model.standardise(batch))
        out.setdefault("latent", []).append(z)
        if model.head is not None:
            y = (model.head(z) * model.std_target + model.mean_target).double()
            shift = torch.tensor(model.spec.get("shift", {}).get("target", 0.0)).double()
            out.setdefault("prediction", []).append(y + shift)
    return {name: torch.cat(parts).numpy() for name, parts in out.items()}


def open_checked(folder, split, spec):
    """The arrays of `folder`, where they are the ones that a model of `spec` reads, and what to add
    to each: folders may have taken off other means."""
    meta = read_features_meta(folder)
    for k in ("modalities", "target"):
        if meta[k] != spec[k]:
            raise DataError(f"{folder}: {k} {meta[k]}; the checkpoint was trained on {spec[k]}: "
                            "prepare the same arrays")
    theirs, ours = (where.get("shift", {}) for where in (meta, spec))
    offsets = [np.subtract(theirs.get(name, 0.0), ours.get(name, 0.0))
               for name in array_names(meta)]
    return open_features(folder, split), offsets


def report(args):
    """Evaluate as the command line asks, and print the numbers."""
    from model.core.load import load_model
    model, _ = load_model(args.ckpt)
    if type(model).__name__ != "MultimodalAutoencoder":
        raise DataError(f"{args.ckpt}: a {type(model).__name__}, not a multimodal autoencoder")
    folder = args.data_dir or model.keys.data_dir
    arrays, offsets = open_checked(folder, args.split, model.spec)
    numbers, r = evaluate_rows(model, arrays, offsets=offsets)
    echo("\n".join(f"{name:<14} {value:.4f}" if isinstance(value, float) else
                  f"{name:<14} {value}" for name, value in numbers.items()))
    if r is not None:
        least, middle, most = r.nanquantile(torch.tensor([0.0, 0.5, 1.0]).double()).tolist()
        print(f"r of {len(r)} targets: {least:.4f} to {most:.4f}, median {middle:.4f}")
        numbers["targets"] = [v if v == v else None for v in r.tolist()]
    if args.to:
        with open(args.to, "w", encoding="utf-8") as f:
            json.dump(numbers, f, indent=1)
    if args.arrays:
        np.savez(args.arrays, **outputs(model, arrays, offsets=offsets))


def main(argv=None):
    """The command line; the exit code."""
    p = argparse.ArgumentParser(prog="python -m model.autoencoder", allow_abbrev=False,
                                description="Evaluate a checkpoint of a multimodal autoencoder.")
    p.add_argument("--ckpt", default="out/autoencoder/ckpt.pt", help="default: %(default)s")
    p.add_argument("--data_dir", help="prepared features (default: what it was trained on)")
    p.add_argument("--split", choices=["train", "val"], default="val", help="default: %(default)s")
    p.add_argument("--to", metavar="FILE.json", help="also write the numbers, and r of each target")
    p.add_argument("--arrays", metavar="FILE.npz", help="also write what comes out of each row: "
                   "latent (N, Z), and prediction (N, D) of the target in its own units")
    return run_command(p, report, argv)


if __name__ == "__main__":
    sys.exit(main())
