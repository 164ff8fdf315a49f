"""A multimodal autoencoder that also predicts a recorded signal (--model autoencoder).

One encoder per modality (e.g. video, audio and text features) maps to a common bottleneck. From the
bottleneck, one decoder per modality reconstructs the features, and a linear head predicts a target,
e.g. fMRI. The bottleneck limits the rank of the head, which regularises targets of many thousand
voxels.

The signal may be delayed: with the key delays, a sample is a window, i.e. a row and the `delays`
rows before it. With linear_path, a fixed ridge regression is added to the prediction, and the
network learns the rest. With data of several subjects, each subject has a separate head and ridge
regression. NaN is a missing value: as an input it is replaced by the mean, and in losses it counts
as predicted exactly.

    python -m data.prepare.features --synthetic
    python run_train.py --config train/configs/autoencoder.yaml
    python -m model.autoencoder --ckpt out/autoencoder/ckpt.pt    # metrics on held-out rows
    python -m model.autoencoder --data_dir FOLDER --arrays out.npz    # predictions for other rows

This file has the model, data.py the data, losses.py the losses and correlations, __main__.py the
command that evaluates a checkpoint.

Shapes: N rows, K rows of a window (delays + 1; without delays, batches lack this dimension), D
columns of an array, P columns of all modalities together, T columns of the target, S subjects, H
the key d_hidden, Z the key d_latent.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from model.autoencoder import losses
from model.autoencoder.data import array_dims, of_subject, open_data, scale_of  # noqa: F401
from model.core.init import fill, normal
from train.base.fields import key
from train.system import ModelHooks

MUST_MATCH_TO_INIT = ("subjects",)  # the heads identify subjects by index
STATISTICS = dict(mean="", std="", shift="")
USE = "python -m model.autoencoder --ckpt {out}/{best} --arrays {out}/val.npz"


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


class MultimodalAutoencoder(nn.Module):
    """Autoencoder of several modalities with an optional head that predicts a target.

    spec: Data.spec of open_data().
    linear_path: (weight, bias) of fit_linear_path(), the frozen ridge regression; `None` without
    config.linear_path or a target, and for a checkpoint's model (on the meta device).
    forward(*arrays) returns (mean loss, sums {name: tensor} over the rows).
    arrays: a batch of N rows, as from open_features(): one array per modality, (N, D) or with the
    key delays (N, delays + 1, D), see add_delays(); then the target (N, T), if the data have one;
    then, if `spec` has subjects, (N, S) with 1 for the row's subject and 0 elsewhere.
    As an input, NaN counts as the mean.
    """

    def __init__(self, config, spec, linear_path=None):
        super().__init__()
        self.keys = c = config
        self.spec = spec
        h = c.d_hidden
        dims = spec["modalities"]
        self.names = list(array_dims(spec))
        outputs = len(spec.get("subjects", [0])) * (spec["target"] or 0)
        k = c.delays + 1
        self.encoder = nn.ModuleDict({name: nn.Linear(k * d, h) for name, d in dims.items()})
        self.bottleneck = nn.Linear(h * len(dims), c.d_latent)
        self.expand = nn.ModuleDict({name: nn.Linear(c.d_latent, h) for name in dims})
        self.decoder = nn.ModuleDict({name: nn.Linear(h, d) for name, d in dims.items()})
        self.head = nn.Linear(c.d_latent, outputs) if outputs else None
        self.linear = None
        self.linear_path = linear_path
        if c.linear_path and outputs:
            self.linear = nn.Linear(k * sum(dims.values()), outputs).requires_grad_(False)
        # On the CPU also under torch.device("meta"): the values come from the spec.
        for name in self.names:
            mean, std = (torch.tensor(part, device="cpu") for part in scale_of(spec, name))
            self.register_buffer(f"mean_{name}", mean, persistent=False)
            self.register_buffer(f"std_{name}", std, persistent=False)
        fill(self, config.seed)

    def initial(self, name, shape, seed):
        # N(0, 1 / inputs), and 0 for biases. At first, the linear path alone predicts the target.
        layer, _, part = name.rpartition(".")
        if layer == "linear":
            return self.linear_path[part == "bias"]
        is_zero = part == "bias" or layer == "head" and self.linear is not None
        return normal(name, shape, 0.0 if is_zero else shape[1] ** -0.5, seed)

    def adopt(self, weights):
        """Return another run's weights {name: tensor} with this run's ridge regression, if any."""
        if self.linear_path is None:
            return weights
        return weights | dict(zip(("linear.weight", "linear.bias"), self.linear_path))

    def standardise(self, arrays):
        """Return {name: float32 tensor}, standardised with the columns' training statistics.

        arrays: the tensors, in the order of forward(); the shapes are kept.
        Missing values stay NaN. "subjects" (N, S), if present, is not changed.
        """
        x = {name: (x.float() - getattr(self, f"mean_{name}")) / getattr(self, f"std_{name}")
             for name, x in zip(self.names, arrays)}
        if "subjects" in self.spec:
            x["subjects"] = arrays[-1]
        return x

    def encode(self, x):
        """Return the bottleneck (N, Z) of the modalities in x, the dict of standardise()."""
        c = self.keys
        hidden = []
        for name in self.spec["modalities"]:
            rows = x[name].nan_to_num().flatten(1)  # (N, K * D)
            rows = F.dropout1d(rows[:, None], c.modality_dropout, self.training)[:, 0]
            hidden.append(F.dropout(F.gelu(self.encoder[name](rows)), c.dropout, self.training))
        return self.bottleneck(torch.cat(hidden, dim=-1))

    def predict(self, x, z):
        """Return the prediction (N, T) of the standardised target, for x and z = encode(x)."""
        subjects = x.get("subjects")
        if self.linear is None:
            return of_subject(self.head(z).float(), subjects)
        # The rest, which the linear path leaves, is not linear in the bottleneck either.
        return of_subject(self.head(F.gelu(z)).float(), subjects) + self.predict_linear(x)

    def predict_linear(self, x):
        """Return the linear path's prediction (N, T), float32, of the standardised target."""
        features = torch.cat([x[name].nan_to_num() for name in self.spec["modalities"]], dim=-1)
        with torch.autocast(features.device.type, enabled=False):
            # Sharded, the parameters may be in bfloat16.
            outs = F.linear(features.flatten(1), *(p.float() for p in self.linear.parameters()))
        return of_subject(outs, x.get("subjects"))

    def forward(self, *arrays):
        c = self.keys
        match = None
        x = self.standardise(arrays)
        z = self.encode(x)  # (N, Z)
        outs = {name: self.decoder[name](F.gelu(self.expand[name](z))).float()
                for name in self.spec["modalities"]}
        present = {name: x[name][:, 0] if c.delays else x[name] for name in outs}
        errors = losses.reconstruction_losses(outs, present)
        sums = {f"recon_{name}": error.sum() for name, error in errors.items()}
        if self.head is not None:
            out = self.predict(x, z)  # (N, T)
            match = losses.matching_loss(out, x["target"], c.matching)
            to = x["target"], x.get("subjects")
            sums |= dict(match=match.sum(), **losses.correlation_sums(out.detach(), *to))
            if self.linear is not None and not self.training:  # the baseline beside the model
                sums |= losses.correlation_sums(self.predict_linear(x), *to, "ridge_")
        loss = losses.combined_loss(errors, match, c.recon_weight, c.match_weight,
                                    c.modality_weights)
        return loss.mean(), sums

    def numbers(self, sums):
        """Return {name: float or `None`} for a log line; sums: of forward(), added over batches.

        recon_NAME of each modality and, with a target, match: the parts of the loss, means over the
        rows, without the weights.
        correlation (with a target): Pearson's r between predictions and targets over all rows of a
        subject, averaged over the target's columns and the subjects for which it is defined; `None`
        if it is never defined.
        ridge (in evaluations, with a linear path): the same for the linear path alone.
        """
        out = ModelHooks.numbers(self, sums)
        if self.head is not None:
            out["correlation"] = losses.mean_correlation(losses.correlations(sums))
        if "ridge_n" in sums:
            out["ridge"] = losses.mean_correlation(losses.correlations(sums, "ridge_"))
        return out


def build_model(config, data):
    return MultimodalAutoencoder(config, data.spec, getattr(data, "linear_path", None))
