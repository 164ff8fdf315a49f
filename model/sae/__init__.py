"""A sparse autoencoder of a GPT's activations (--model sae --backbone out/quick/ckpt.pt).

It reconstructs the residual stream after one block as a sum of few directions out of many
(features), which are easier to interpret than single dimensions. The loader runs the frozen
backbone, so that training sees rows of activations. An evaluation also measures the backbone's loss
with the reconstruction in place of the activations.

    python -m model.sae --ckpt out/sae/ckpt.pt                     # texts in which features fire
    python -m model.sae --ckpt out/sae/ckpt.pt --baseline          # compare with random directions
    python -m model.sae --ckpt out/sae/ckpt.pt --to out/folder     # a folder for sae-lens

Activation functions, the key sae, which limit the features that are not zero:

    topk       the k largest features of each activation (arXiv:2406.04093)
    batchtopk  k features per activation on average (arXiv:2412.06410)
    jumprelu   features above a learned threshold each, with an L0 penalty (arXiv:2407.14435)

With prefixes (Matryoshka, arXiv:2503.17547), batchtopk is trained so that the first features alone
also reconstruct the activations, and become the most general ones.

This file has the model, activations.py the data, __main__.py the command.

Shapes: B windows, T tokens, N activations, C channels (d_in), F features (d_sae), P prefixes, the
last of which is all features.
"""

import os
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from model.core.init import fill, stable_hash
from model.core.ops import IGNORE
from model.sae.activations import N_SKIPPED, OUTLIER_RATIO, Backbone
from model.sae.activations import ActivationBuffer as ActivationBuffer  # a public name
from model.sae.activations import open_data as open_data  # of the model interface
from model.sae.sparse import ActiveFeatures, sum_rows
from train.base.errors import CheckpointError
from train.base.fields import key
from train.base.tensors import digest

USE = "python -m model.sae --ckpt {out}/ckpt.pt"
MUST_MATCH_TO_INIT = ("backbone", "layer")  # features belong to one layer of one model
THRESHOLD_RATE = 0.05  # batchtopk: share of the newest step in the running mean of the threshold
BANDWIDTH = 0.5  # jumprelu: around a threshold, in which features have an effect on it


@dataclass
class Keys:
    backbone: str | None = key("out/quick/ckpt.pt", "GPT whose activations are learned; null: "
                               "data_dir has activations", free=True, path=True, reads=True)
    layer: int = key(1, "block whose output is learned, from 0", ge=0, needs="backbone")
    sae: str = key("topk", "topk: k features per token; batchtopk: k on average; jumprelu: those "
                   "above learned thresholds", choices=["topk", "batchtopk", "jumprelu"])
    d_sae: int = key(1024, "number of features", ge=1)
    k: int = key(32, "topk, batchtopk: features per token", ge=1, needs="sae=topk|batchtopk")
    l0: float = key(1e-3, "jumprelu: weight of the L0 penalty", ge=0, needs="sae=jumprelu")
    prefixes: list[int] = key([], "batchtopk: for each N, the first N features also reconstruct "
                              "alone (Matryoshka)", ge=1, needs="sae=batchtopk")
    auxk: int = key(64, "dead features that are trained on the reconstruction error; 0: none", ge=0)
    auxk_weight: float = key(1 / 32, "weight of the AuxK loss", ge=0, needs="auxk")
    dead_after: int = key(1000, "steps without firing after which a feature is dead", ge=1)
    buffer_size: int = key(65536, "activations in all ring buffers", ge=1, needs="backbone")

    def problems(self):
        found = []
        if "topk" in self.sae and self.k > self.d_sae:
            found.append(f"k: {self.k} exceeds d_sae, the number of features ({self.d_sae})")
        ends = [*self.prefixes, self.d_sae]
        if ends != sorted(set(ends)):
            found.append(f"prefixes: {self.prefixes}: expected ascending numbers below d_sae")
        return found


# -----------------------------------------------------------------------------
# the model

def keep_largest(x, k):
    """Return a copy of x (N, F) in which all but the k largest values of each row are 0."""
    values, index = x.topk(k, dim=-1, sorted=False)
    return torch.zeros_like(x).scatter(-1, index, values)


class SparseAutoencoder(nn.Module):
    """A sparse autoencoder of activations.

    spec: Data.spec, with d_in, mean and scale. forward(activations (N, C), group)
    returns (mean loss, sums {name: tensor}, reconstruction (N, C) in the units of the activations).
    sums: the parts of the loss and statistics for numbers(), summed over N.
    group: only for batchtopk in training: each `group` consecutive rows together keep k features
    per row on average (default: all N rows). N must be a multiple. SAEModel passes the row count of
    one window, so that the result does not depend on the batch size.
    Activations are centred and scaled with the mean and scale in `spec`. The mean variance is then
    1, and the squared error is about the unexplained share of the variance. Outliers (in many
    published models the first newline or comma) are replaced by the mean, also in the loss and in
    `sums`; in the reconstruction, these rows are the activations themselves.
    """

    def __init__(self, config, spec):
        super().__init__()
        self.keys = config
        self.spec = spec
        d_in, d_sae = spec["d_in"], config.d_sae
        self.W_enc = nn.Parameter(torch.empty(d_in, d_sae))
        self.b_enc = nn.Parameter(torch.empty(d_sae))
        self.W_dec = nn.Parameter(torch.empty(d_sae, d_in))
        self.b_dec = nn.Parameter(torch.empty(d_in))
        if config.sae == "jumprelu":
            self.threshold = nn.Parameter(torch.empty(d_sae))
        if config.sae == "batchtopk":  # for evaluations: a running mean of the batches' thresholds
            self.register_buffer("threshold", torch.empty(()))
        self.register_buffer("mean", torch.empty(d_in))
        self.register_buffer("scale", torch.empty(()))
        # Steps since each feature last fired.
        self.register_buffer("silent", torch.empty(d_sae, dtype=torch.int64))
        self.may_have_dead = True  # updated after each step; True only costs time

    def initial(self, name, shape, seed):
        """Return the initial value of the parameter or buffer `name`; `None` for an unknown name.

        W_dec: rows of random directions and length 1. W_enc: the transpose, as in sae-lens. Biases
        and `silent`: 0. Thresholds: 1. mean and scale: the values in spec. For a given model a
        function of (seed, name).
        """
        if name in ("mean", "scale"):
            return torch.tensor(self.spec[name])
        if name in ("b_enc", "b_dec", "silent"):
            return torch.zeros(shape)
        if name == "threshold":  # features are about N(0, 1) before training
            return torch.ones(shape)
        if name not in ("W_enc", "W_dec"):
            return None
        generator = torch.Generator().manual_seed(stable_hash(seed, "W_dec"))
        rows = F.normalize(torch.randn(self.keys.d_sae, self.spec["d_in"], generator=generator))
        return rows if name == "W_dec" else rows.T

    def decoder(self):
        """Return the decoder weights (F, C), float32, with rows of length 1."""
        return F.normalize(self.W_dec.float(), dim=1)

    def normalise(self, activations):
        """Return (scaled activations (..., C), is_outlier (..., 1)); outliers are 0."""
        x = (activations - self.mean) * self.scale
        is_outlier = x.square().mean(-1, keepdim=True) > OUTLIER_RATIO**2
        return x.masked_fill(is_outlier, 0.0), is_outlier

    def encode(self, activations):
        """Return the features (..., F) of activations (..., C) in the original units."""
        return self.features(self.normalise(activations)[0])[1]

    def features(self, x):
        """Return features (..., F) of scaled x before and after the nonlinearity of evaluations."""
        c = self.keys
        pre = (x - self.b_dec) @ self.W_enc + self.b_enc
        if c.sae in ("batchtopk", "jumprelu"):
            z = F.relu(pre) * (pre > self.threshold)
            if c.sae == "jumprelu":  # the gradient of thresholds: arXiv:2407.14435, equation 11
                z = z + self.threshold.detach() * self.step_estimate(pre)
            return pre, z
        return pre, F.relu(keep_largest(pre, c.k))

    def step_estimate(self, pre):
        """Return zeros (N, F) with an estimated gradient of (pre > threshold) for the threshold."""
        ramp = ((pre.detach() - self.threshold) / BANDWIDTH + 0.5).clamp(0.0, 1.0)
        return ramp - ramp.detach()

    def batch_topk(self, x, group):
        """Encode and decode for batchtopk in training; return (pre, outs, counts).

        x (N, C): centred and scaled. group: see the class.
        pre (N, F): features before the nonlinearity, without gradient.
        outs: reconstructions (N, C) of x, one per prefix, the last from all features.
        counts: {"fired": (F,) rows in which each feature fired, "threshold": the sum over all
        rows}.
        """
        bias = self.bias()
        with torch.no_grad():
            pre = torch.addmm(bias, x, self.W_enc).float()  # (N, F)
            threshold = self.batch_threshold(pre, group)  # (N, 1)
            row, column = ((pre >= threshold) & (pre > 0)).nonzero(as_tuple=True)  # (E,)
        values = ActiveFeatures.apply(x, self.W_enc, bias, pre, row, column)
        W = self.W_dec.float()  # embedding_bag takes one dtype; sharded, it may be bfloat16
        values = values / W.norm(dim=1)[column]
        ends = torch.tensor([*self.keys.prefixes, len(bias)], device=x.device)  # (P,)
        section = row * len(ends) + torch.bucketize(column, ends, right=True)
        parts = sum_rows(W, column, section, len(x) * len(ends), values)
        outs = parts.view(len(x), len(ends), -1).cumsum(1) + self.b_dec  # (N, P, C)
        fired = torch.bincount(column, minlength=len(bias))  # (F,)
        return pre, outs.unbind(1), dict(fired=fired, threshold=threshold.sum())

    def batch_threshold(self, pre, group):
        """Return thresholds (N, 1) >= 0 that keep up to group * k features in each `group` rows."""
        n = group * self.keys.k
        smallest = []
        for values in pre.flatten().split(group * pre.size(1)):
            large = values[values > self.threshold / 2]  # selecting from few values is faster
            values = large if len(large) >= n else values
            # Not kthvalue, which raises on a GPU with `deterministic`.
            smallest.append(values.topk(n, sorted=False).values.min())
        return torch.stack(smallest).clamp(min=0.0).repeat_interleave(group)[:, None]

    def bias(self):
        """Return b (F,), with which x @ W_enc + b are the features before the nonlinearity."""
        return self.b_enc - self.b_dec @ self.W_enc

    def forward(self, activations, group=None):
        c = self.keys
        x, is_outlier = self.normalise(activations)  # (N, C), (N, 1)
        if c.sae == "batchtopk" and self.training:
            pre, (*inner, out), counts = self.batch_topk(x, group or len(x))
            W = None
        else:
            pre, z = self.features(x)  # (N, F) each
            W = self.decoder()  # (F, C)
            inner = []
            out = (z @ W + self.b_dec).float()  # (N, C)
            counts = dict(fired=(z != 0).sum(0))
        error = x - out
        losses = dict(mse=error.square().mean(1))  # (N,) each
        weights = dict(mse=1.0, inner=1.0, l0=c.l0, auxk=c.auxk_weight)
        if inner:
            losses["inner"] = sum((x - part).square().mean(1) for part in inner)
        if c.sae == "jumprelu":
            losses["l0"] = ((z > 0) + self.step_estimate(pre)).sum(1)
        if c.auxk:
            losses["auxk"] = self.auxk_loss(x, pre, error.detach(), W)
        loss = sum(weights[name] * values for name, values in losses.items())
        sums = {name: values.sum() for name, values in losses.items()}
        sums |= dict(x=x.sum(0), xx=x.square().sum(), **counts)
        return loss.mean(), sums, torch.where(is_outlier, activations, out / self.scale + self.mean)

    def auxk_loss(self, x, pre, error, W):
        """Return the AuxK loss (N,), which revives dead features (arXiv:2406.04093, A.2).

        x (N, C): scaled. pre (N, F): features before the nonlinearity. error (N, C): x minus
        reconstruction. W (F, C): of decoder(); `None`: pre and W are computed here, for the dead
        features only. Dead features have not fired for dead_after steps. The loss is the share of
        the squared error that remains if the auxk largest of them reconstruct the error. If fewer
        than auxk are dead, it is multiplied by their number / auxk.
        """
        if not self.may_have_dead:
            return error.new_zeros(len(error))
        dead = self.silent >= self.keys.dead_after  # (F,)
        if W is None:
            index = dead.nonzero()[:, 0]
            pre = x @ self.W_enc[:, index] + self.bias()[index]
            dead = dead[index]
            W = F.normalize(self.W_dec[index], dim=1)
        z = keep_largest(pre.masked_fill(~dead, -torch.inf), min(self.keys.auxk, len(dead)))
        z = torch.where(dead, z, 0.0)  # -inf if fewer than auxk are dead
        rest = (error - z @ W).float().square().sum(1) / error.square().sum(1).clamp(min=1e-8)
        return rest * (dead.sum() / self.keys.auxk).clamp(max=1.0)

    def numbers(self, sums):
        """Return the metrics {name: float or `None`} of a log line.

        sums: of forward(), added over all batches, and "count", the number of activations.
        explained_variance: of all activations and dimensions together; `None` if they are constant.
        l0: mean number of features that fire per activation.
        dead: number of features that have not fired for dead_after steps; in evaluations, that do
        not fire in the evaluation.
        auxk: part of the loss, if used, without weight.
        In evaluations with a backbone also lm_loss, the backbone's loss; spliced_loss, the loss
        with the reconstruction in place of the activations; and loss_recovered: 1 if both are
        equal, 0 if the reconstruction is as bad as zeros, `None` if zeros change nothing.
        """
        means = {name: float(sums[name] / sums["count"])
                 for name in ("auxk", "lm_loss", "spliced_loss") if name in sums}
        variance = sums["xx"] - sums["x"].square().sum() / sums["count"]
        unexplained = sums["mse"] * self.spec["d_in"]
        means["explained_variance"] = float(1 - unexplained / variance) if variance > 0 else None
        means["l0"] = float(sums["fired"].sum() / sums["count"])
        is_dead = self.silent >= self.keys.dead_after if self.training else sums["fired"] == 0
        if "lm_loss" in sums:
            zeroed = float(sums["zeroed_loss"] / sums["count"])
            gap = zeroed - means["lm_loss"]
            means["loss_recovered"] = (zeroed - means["spliced_loss"]) / gap if gap else None
        return means | dict(dead=float(is_dead.sum()))


class SAEModel(nn.Module):
    """The model of a run: the SparseAutoencoder `sae`, and in evaluations the backbone.

    spec: Data.spec. loaded: the Backbone at config.backbone (default: backbone() loads it).
    """

    def __init__(self, config, spec, loaded=None):
        super().__init__()
        self.keys = config
        self.spec = spec
        self.loaded = loaded
        self.sae = SparseAutoencoder(config, spec)
        fill(self, config.seed)

    def initial(self, name, shape, seed):
        return self.sae.initial(name.removeprefix("sae."), shape, seed)

    def compile(self, *args, **kwargs):
        """Compile the autoencoder in place, except batchtopk's; see nn.Module.compile()."""
        if self.keys.sae != "batchtopk":
            self.sae.compile(*args, **kwargs)

    def flops_per_unit(self):
        c = self.keys
        # Of batchtopk, all products but the first are with k rows.
        rows = 2 * c.d_sae + 8 * c.k if c.sae == "batchtopk" else 12 * c.d_sae
        return rows * self.spec["d_in"]

    def backbone(self):
        """Return the Backbone at config.backbone, which the first call loads.

        Raises CheckpointError for other weights than in the training run, or without a backbone.
        """
        c = self.keys
        if self.loaded is not None:
            return self.loaded
        if self.spec["backbone"] is None:
            raise CheckpointError("backbone: null: it was trained on activations; see --to")
        device = next(self.buffers()).device
        backbone = Backbone(c.backbone, c.layer, device, c.dtype)
        digests = [backbone.digest]
        if os.path.isfile(c.backbone):  # earlier versions identified it by the file
            digests.append(digest(c.backbone))
        if self.spec["backbone"] not in digests:
            raise CheckpointError(f"backbone: the weights of {c.backbone} are not those of the "
                                  f"training run (sha256 {self.spec['backbone'][:12]}...)")
        self.loaded = backbone
        return backbone

    def forward(self, x, targets=None):
        """Return (mean loss, sums {name: tensor}).

        x: without `targets` (in training, or without a backbone), activations (B, T, C); with
        `targets`, token ids (B, T).
        targets (B, T): the next token ids (evaluation); the backbone then computes the activations,
        and sums also has "count" and the losses of the backbone, multiplied by the count: lm_loss
        (unchanged), spliced_loss (with the reconstruction in place of the activations) and
        zeroed_loss (with zeros).
        """
        if targets is None:
            return self.sae(x.flatten(0, 1), x.size(1))[:2]
        backbone = self.backbone()
        targets = targets.clone()
        targets[:, :N_SKIPPED] = IGNORE
        rows = backbone.activations(x)  # (B, T - N_SKIPPED, C)
        loss, sums, out = self.sae(rows.flatten(0, 1), rows.size(1))
        count = torch.tensor(rows[..., 0].numel(), device=rows.device)
        out = out.view(*rows.shape[:2], -1)
        edits = dict(lm_loss=lambda values: values, spliced_loss=lambda _: out,
                     zeroed_loss=torch.zeros_like)
        return loss, sums | dict(count=count) | {
            name: count * backbone.loss(x, targets, edit) for name, edit in edits.items()}

    def numbers(self, sums):
        return self.sae.numbers(sums)

    def after_step(self, it, sums):
        sae = self.sae
        fired = sums["fired"].to(sae.silent.device) > 0
        sae.silent.copy_(torch.where(fired, 0, sae.silent + 1))
        sae.may_have_dead = bool((sae.silent >= self.keys.dead_after).any())
        if self.keys.sae == "batchtopk":
            mean = (sums["threshold"] / sums["count"]).to(sae.threshold)
            sae.threshold.lerp_(mean, THRESHOLD_RATE)


def build_model(config, data):
    """Return an SAEModel, which in training shares the backbone of data.train, if it has one.

    Otherwise the model loads its own when it needs it. data: a Data, or an object with only `spec`.
    """
    train = getattr(data, "train", None)
    return SAEModel(config, data.spec, getattr(train, "backbone", None))
