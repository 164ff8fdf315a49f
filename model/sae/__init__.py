"""A sparse autoencoder of a trained GPT's activations: --model sae --backbone out/quick/ckpt.pt

It reconstructs the residual stream after one block as a sum of few directions out of many
(features), which are easier to interpret than single dimensions. The loader runs the frozen
backbone, so that training sees rows of activations. An evaluation also measures the backbone's loss
with the reconstruction in place of the activations. With several layers (layer: [0, 1, 2]) one
forward pass of the backbone serves an autoencoder for each.

    python -m model.sae --ckpt out/sae/ckpt.pt                     # texts in which features fire
    python -m model.sae --ckpt out/sae/ckpt.pt --html page.html    # the same as a page
    python -m model.sae --ckpt out/sae/ckpt.pt --baseline          # random directions beside it
    python -m model.sae --ckpt out/sae/ckpt.pt --to out/folder     # a folder for sae-lens
    python -m model.sae --ckpt out/sae/ckpt.pt --layer 2           # of several layers, this one

Activation functions, the key sae:
    relu       any number of them, with an L1 penalty (transformer-circuits.pub/2024/april-update)
    topk       the k largest features of each activation (arXiv:2406.04093)
    batchtopk  k features on average (arXiv:2412.06410)
    jumprelu   features above a learned threshold each, with an L0 penalty (arXiv:2407.14435)

With prefixes (Matryoshka, arXiv:2503.17547) the first features of batchtopk also reconstruct alone
in training, so that they are the general ones. A transcoder (target, arXiv:2406.11944) reconstructs
other activations than those that it reads.

Shapes: B windows, T tokens, N activations, C channels (d_in), D = C or, of a transcoder, 2C (input
and target), L layers, F features (d_sae), P prefixes, the last of which is all features.
"""

import contextlib
import html
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from model.core.init import fill, stable_hash
from model.core.load import BACKBONE, load_model
from model.core.ops import IGNORE
from model.sae.activations import N_SKIPPED, OUTLIER_RATIO, load_backbone
from model.sae.activations import ActivationBuffer as ActivationBuffer  # a public name
from model.sae.activations import open_data as open_data  # of the model interface
from model.sae.sparse import ActiveFeatures, sum_rows
from train.base.cli import command, format_table
from train.base.errors import CheckpointError, ConfigError, echo
from train.base.fields import key
from train.base.tensors import write_safetensors
from train.dataloader import DataLoader
from train.distributed import Ranks
from train.evaluate import evaluate

USE = "python -m model.sae --ckpt {out}/ckpt.pt"
MUST_MATCH_TO_INIT = ("backbone", "layer", "target")  # features belong to one layer of one model
THRESHOLD_RATE = 0.05  # batchtopk: share of the newest step in the running mean of the threshold
BANDWIDTH = 0.5  # jumprelu: around a threshold, in which features have an effect on it
# sae-lens's name of an autoencoder and of a transcoder; for all others those of jumprelu.
SAE_LENS = dict(topk=("topk", None), relu=("standard", "transcoder"))
NUMBERS = ("explained_variance", "l0", "spliced_loss", "loss_recovered")  # beside the baseline
PAGE = """<!DOCTYPE html><meta charset="utf-8"><meta name="color-scheme" content="light dark">
<title>Features of {0}</title>
<h1>Features of {0}</h1>
<pre style="font-size: 14px; line-height: 1.6; white-space: pre-wrap; overflow-wrap: anywhere">{1}
</pre>
"""


@dataclass
class Keys:
    backbone: str | None = key("out/quick/ckpt.pt", "GPT whose activations are learned; null: "
                               "data_dir has activations", free=True, path=True, reads=True)
    layer: list[int] = key([1], "block whose output is learned, from 0 (default: 1); several, "
                           "0,1,2: an autoencoder for each", ge=0, needs="backbone")
    target: str = key("input", "what is reconstructed: input; mlp: the output of the block's MLP "
                      "from its input; N: the output of block N from that of block `layer`")
    sae: str = key("topk", "topk: k features per token; batchtopk: k on average; jumprelu: those "
                   "above learned thresholds; relu: any number",
                   choices=["topk", "batchtopk", "jumprelu", "relu"])
    d_sae: int = key(1024, "number of features", ge=1)
    k: int = key(32, "topk, batchtopk: features per token", ge=1, needs="sae=topk|batchtopk")
    l1: float = key(0.02, "relu: weight of the L1 penalty", ge=0, needs="sae=relu")
    l0: float = key(1e-3, "jumprelu: weight of the L0 penalty", ge=0, needs="sae=jumprelu")
    prefixes: list[int] = key([], "batchtopk: for each N, the first N features also reconstruct "
                              "alone (Matryoshka)", ge=1, needs="sae=batchtopk")
    auxk: int = key(64, "dead features that are trained on the reconstruction error; 0: none", ge=0)
    auxk_weight: float = key(1 / 32, "weight of the AuxK loss", ge=0, needs="auxk")
    dead_after: int = key(1000, "steps without firing after which a feature is dead", ge=1)
    buffer_size: int = key(65536, "activations in all ring buffers", ge=1, needs="backbone")

    def problems(self):
        used = ("k", "auxk") if "topk" in self.sae else ("auxk",)
        found = [f"{name}: {getattr(self, name)} exceeds d_sae, the number of features "
                 f"({self.d_sae})" for name in used if getattr(self, name) > self.d_sae]
        ends = [*self.prefixes, self.d_sae]
        if ends != sorted(set(ends)):
            found.append(f"prefixes: {self.prefixes}: expected ascending numbers below d_sae")
        if not self.layer or self.layer != sorted(set(self.layer)):
            found.append(f"layer: {self.layer}: expected one or several blocks, ascending")
        if self.backbone is None and len(self.layer) > 1:
            found.append(f"layer: {self.layer}: several need a backbone; expected one without it")
        is_block = self.target.isdecimal() and int(self.target) >= max(self.layer, default=0)
        if self.target not in ("input", "mlp") and not is_block:
            found.append(f"target: {self.target}: expected input, mlp or a block from layer on")
        if self.backbone is None and self.target != "input":
            found.append(f"target: {self.target}: it needs a backbone; expected input without one")
        return found


# -----------------------------------------------------------------------------
# the model

def keep_largest(x, k):
    """Return x (N, F) with all but the k largest of each row set to 0."""
    values, index = x.topk(k, dim=-1, sorted=False)
    return torch.zeros_like(x).scatter(-1, index, values)


class SparseAutoencoder(nn.Module):
    """A sparse autoencoder: forward(activations (N, D), group) -> (mean loss, sums, reconstruction
    (N, C)). D is C, or for a transcoder 2C (input and target).

    Activations are centred and scaled with the mean and scale in `spec`. The mean variance is then
    1, and the squared error is about the share of variance that is not explained. Outliers (the
    first newline or comma in many published models) are replaced by the mean before encoding, and
    the reconstruction leaves each unchanged.

    group: of batchtopk, the number of activations that keep k features each on average in training
    (default: all). A run has groups of one sample, the same at any number of ranks.
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
        self.register_buffer("mean", torch.empty(len(spec["mean"])))  # (D,)
        self.register_buffer("scale", torch.empty(np.shape(spec["scale"])))  # () or (2,)
        # Steps since each feature last fired.
        self.register_buffer("silent", torch.empty(d_sae, dtype=torch.int64))
        self.may_have_dead = True  # updated after each step; True only costs time

    def initial(self, name, shape, seed):
        """Return the initial value of the tensor `name`: random directions for the decoder, and the
        transpose for the encoder, as in sae-lens; `None` for an unknown name."""
        if name in ("mean", "scale"):
            return torch.tensor(self.spec[name])
        if name in ("b_enc", "b_dec", "silent"):
            return torch.zeros(shape)
        if name == "threshold":  # features are about N(0, 1) before training
            return torch.ones(shape)
        if name not in ("W_enc", "W_dec"):
            return None
        generator = torch.Generator().manual_seed(stable_hash(seed, "W_dec"))
        rows = torch.randn(self.keys.d_sae, self.spec["d_in"], generator=generator)
        rows = F.normalize(rows, dim=1) * (0.1 if self.keys.sae == "relu" else 1.0)
        return rows if name == "W_dec" else rows.T

    def decoder(self):
        """Return the decoder (F, C), float32. Except for the activation function relu, rows are
        normalised to length 1 here instead of after each step; the gradient is then orthogonal to
        the row."""
        W = self.W_dec.float()
        return W if self.keys.sae == "relu" else F.normalize(W, dim=1)

    def normalise(self, activations):
        """Return (input (N, C), target (N, C), is_outlier (N, 1)) of activations (N, D): input and
        target are centred and scaled, and 0 where the input is an outlier."""
        c, scale = self.spec["d_in"], self.scale.view(-1)
        x = (activations[..., :c] - self.mean[:c]) * scale[0]
        y = (activations[..., -c:] - self.mean[-c:]) * scale[-1]
        is_outlier = x.square().mean(-1, keepdim=True) > OUTLIER_RATIO**2
        return x.masked_fill(is_outlier, 0.0), y.masked_fill(is_outlier, 0.0), is_outlier

    def encode(self, activations):
        """Return the features (N, F) of activations (N, D), which are not yet normalised."""
        return self.features(self.normalise(activations)[0])[1]

    def features(self, x):
        """Return the features (N, F) of normalised activations x (N, C), before and after the
        nonlinearity."""
        c = self.keys
        pre = (x - self.b_dec if c.target == "input" else x) @ self.W_enc + self.b_enc
        if c.sae in ("batchtopk", "jumprelu"):
            z = F.relu(pre) * (pre > self.threshold)
            if c.sae == "jumprelu":  # the gradient of thresholds: arXiv:2407.14435, equation 11
                z = z + self.threshold.detach() * self.step_estimate(pre)
            return pre, z
        return pre, F.relu(keep_largest(pre, c.k) if c.sae == "topk" else pre)

    def step_estimate(self, pre):
        """Return zeros (N, F) whose gradient with respect to the thresholds is an estimate of that
        of (pre > threshold): the gradient of a ramp of width BANDWIDTH. pre (N, F): features before
        the nonlinearity."""
        ramp = ((pre.detach() - self.threshold) / BANDWIDTH + 0.5).clamp(0.0, 1.0)
        return ramp - ramp.detach()

    def batch_topk(self, x, group):
        """Return, of batchtopk in training (arXiv:2412.06410), the features (N, F) before the
        nonlinearity, without gradient; a tuple of reconstructions (N, C), one per prefix; and sums
        {name: tensor}. x (N, C): normalised activations. group: as for batch_threshold()."""
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
        """Return for each row of pre (N, F) the smallest value to keep (N, 1), 0 or more, so that
        each `group` consecutive rows keep k features per row on average. pre: features before the
        nonlinearity."""
        n = group * self.keys.k
        smallest = []
        for values in pre.flatten().split(group * pre.size(1)):
            large = values[values > self.threshold / 2]  # selecting from few values is faster
            values = large if len(large) >= n else values
            # Not kthvalue, which raises on a GPU with `deterministic`.
            smallest.append(values.topk(n, sorted=False).values.min())
        return torch.stack(smallest).clamp(min=0.0).repeat_interleave(group)[:, None]

    def bias(self):
        """Return the bias b (F,) for which x @ W_enc + b, of normalised x, is the features before
        the nonlinearity: b_enc, minus b_dec @ W_enc if the encoder reads x - b_dec (target input).
        """
        return self.b_enc - self.b_dec @ self.W_enc if self.keys.target == "input" else self.b_enc

    def forward(self, activations, group=None):
        c = self.keys
        x, y, is_outlier = self.normalise(activations)  # (N, C), (N, C), (N, 1)
        if c.sae == "batchtopk" and self.training:
            pre, (*inner, out), counts = self.batch_topk(x, group or len(x))
            W = None
        else:
            pre, z = self.features(x)  # (N, F) each
            W = self.decoder()  # (F, C)
            inner, out = [], (z @ W + self.b_dec).float()  # (N, C)
            counts = dict(fired=(z != 0).sum(0))
        error = y - out
        losses = dict(mse=error.square().mean(1))  # (N,) each
        weights = dict(mse=1.0, inner=1.0, l0=c.l0, l1=c.l1, auxk=c.auxk_weight)
        if inner:
            losses["inner"] = sum((y - part).square().mean(1) for part in inner)
        if c.sae == "relu":
            losses["l1"] = z.float() @ W.norm(dim=1)
        if c.sae == "jumprelu":
            losses["l0"] = ((z > 0) + self.step_estimate(pre)).sum(1)
        if c.auxk:
            losses["auxk"] = self.auxk_loss(x, pre, error.detach(), W)
        loss = sum(weights[name] * values for name, values in losses.items())
        sums = {name: values.sum() for name, values in losses.items()}
        sums |= dict(x=y.sum(0), xx=y.square().sum(), **counts)
        n = out.size(1)
        out = out / self.scale.view(-1)[-1] + self.mean[-n:]
        return loss.mean(), sums, torch.where(is_outlier, activations[:, -n:], out)

    def auxk_loss(self, x, pre, error, W):
        """Return the AuxK loss (N,), which revives dead features (arXiv:2406.04093, A.2): the share
        of the squared `error` (N, C) of the reconstruction that the auxk largest dead features do
        not explain, multiplied by the number of dead features / auxk if that is below 1. x (N, C):
        normalised activations; pre (N, F): features before the nonlinearity; W (F, C): the decoder,
        None: computed for the dead features only."""
        if not self.may_have_dead:
            return error.new_zeros(len(error))
        dead = self.silent >= self.keys.dead_after  # (F,)
        if W is None:
            index = dead.nonzero()[:, 0]
            pre = x @ self.W_enc[:, index] + self.bias()[index]
            dead, W = dead[index], F.normalize(self.W_dec[index], dim=1)
        z = keep_largest(pre.masked_fill(~dead, -torch.inf), min(self.keys.auxk, len(dead)))
        z = torch.where(dead, z, 0.0)  # -inf if fewer than auxk are dead
        rest = (error - z @ W).float().square().sum(1) / error.square().sum(1).clamp(min=1e-8)
        return rest * (dead.sum() / self.keys.auxk).clamp(max=1.0)

    def numbers(self, sums):
        """Return the metrics of a log line. sums {name: tensor}: over all batches.

        explained_variance: over all activations and dimensions together, because a mean of ratios
        would be biased. l0: features per token. dead: in training the features that have not fired
        for dead_after steps, in evaluations all that never fired. In evaluations also the
        backbone's lm_loss, spliced_loss with the reconstruction, and loss_recovered: 1 if both are
        equal, 0 if the reconstruction is no better than zeros.
        """
        means = {name: float(sums[name] / sums["count"])
                 for name in ("l1", "auxk", "lm_loss", "spliced_loss") if name in sums}
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
    """The model of a run: for each layer a SparseAutoencoder in training, `sae`, or of several
    layers `sae_N` of layer N. The loss is the sum, so that the gradients of an autoencoder are
    those of a run with this layer alone; only grad_clip limits the norm of all together.

    Evaluations also measure the backbone's loss with the reconstruction in place of the
    activations. config: a TrainConfig; spec: Data.spec, of several layers with lists of their means
    and scales.
    """

    def __init__(self, config, spec):
        super().__init__()
        self.keys = config
        self.spec = spec
        # Of the names of autoencoders, sums and metrics.
        self.suffixes = [f"_{n}" for n in config.layer] if len(config.layer) > 1 else [""]
        for i, suffix in enumerate(self.suffixes):
            own = {name: spec[name][i] for name in ("mean", "scale") if suffix}
            self.add_module("sae" + suffix, SparseAutoencoder(config, spec | own))
        fill(self, config.seed)

    def initial(self, name, shape, seed):
        module, own_name = name.split(".")
        return getattr(self, module).initial(own_name, shape, seed)

    def compile(self, *args, **kwargs):
        """Compile the autoencoders only: an evaluation adds hooks to the backbone."""
        for sae in self.children():
            if self.keys.sae != "batchtopk":  # it has shapes that depend on the data
                sae.compile(*args, **kwargs)

    def flops_per_unit(self):
        c = self.keys
        # Of batchtopk, all products but the first are with k rows.
        rows = 2 * c.d_sae + 8 * c.k if c.sae == "batchtopk" else 12 * c.d_sae
        return len(c.layer) * rows * self.spec["d_in"]

    def of_layer(self, n):
        """Return an SAEModel that shares the autoencoder of layer n and has no other. Raises
        ConfigError if there is no such layer."""
        if n not in self.keys.layer:
            raise ConfigError([f"--layer: {n}: the checkpoint has no autoencoder of this layer; "
                               f"expected one of {', '.join(map(str, self.keys.layer))}"])
        sae = [*self.children()][self.keys.layer.index(n)]
        model = SAEModel(self.keys.replace(layer=[n]), sae.spec)
        model.sae = sae
        return model.eval()

    def backbone(self):
        """Return the Backbone at config.backbone. Raises CheckpointError if the weights are not
        those of the training run, or if training had activations and no backbone."""
        c = self.keys
        if self.spec["backbone"] is None:
            raise CheckpointError("backbone: null: it was trained on activations; see --to")
        device = next(self.buffers()).device
        backbone = load_backbone(c.backbone, tuple(c.layer), device, c.dtype, c.target)
        if self.spec["backbone"] not in (backbone.digest, backbone.file_hash):
            raise CheckpointError(f"backbone: the weights of {c.backbone} are not those of the "
                                  f"training run (sha256 {self.spec['backbone'][:12]}...)")
        return backbone

    def forward(self, x, targets=None):
        """Return (sum of the layers' mean losses, sums {name: tensor}). Training: x (B, T, L D)
        activations. Evaluation: x, targets (B, T) tokens, with sums of the backbone's loss:
        unchanged, spliced with the reconstruction, and with zeros instead."""
        total, sums, rows = 0.0, {}, x
        if targets is not None:
            backbone = self.backbone()
            targets = targets.clone()
            targets[:, :N_SKIPPED] = IGNORE
            rows = backbone.activations(x)  # (B, T - N_SKIPPED, L D)
            count = torch.tensor(rows[..., 0].numel(), device=rows.device)
            lm_loss = backbone.loss(x, targets, lambda values: values)
            sums = dict(count=count, lm_loss=lm_loss * count)
        parts = rows.chunk(len(self.suffixes), dim=-1)
        for i, (suffix, sae, part) in enumerate(zip(self.suffixes, self.children(), parts)):
            loss, own, out = sae(part.flatten(0, 1), part.size(1))
            total = total + loss
            if targets is not None:
                out = out.view(*part.shape[:2], -1)
                own["spliced_loss"] = count * backbone.loss(x, targets, lambda _, out=out: out, i)
                own["zeroed_loss"] = count * backbone.loss(x, targets, torch.zeros_like, i)
            sums |= {name + suffix: value for name, value in own.items()}
        return total, sums

    def numbers(self, sums):
        """Return the metrics of a log line: those of the autoencoder, or of several layers the
        means (`None` if a layer has none) and, with the suffix _N, those of layer N."""
        parts = [sae.numbers(own) for sae, own in self.split(sums)]
        columns = {name: [part[name] for part in parts] for name in parts[0]}
        means = {name: None if None in values else sum(values) / len(values)
                 for name, values in columns.items()}
        # The backbone's loss is that of all layers.
        return means | {name + suffix: value for name in columns if name != "lm_loss"
                        for suffix, value in zip(self.suffixes, columns[name])}

    def after_step(self, it, sums):
        for sae, own in self.split(sums):
            fired = own["fired"].to(sae.silent.device) > 0
            sae.silent.copy_(torch.where(fired, 0, sae.silent + 1))
            sae.may_have_dead = bool((sae.silent >= self.keys.dead_after).any())
            if self.keys.sae == "batchtopk":
                mean = (own["threshold"] / own["count"]).to(sae.threshold)
                sae.threshold.lerp_(mean, THRESHOLD_RATE)

    def split(self, sums):
        """Return [(autoencoder, its sums)]. sums {name: tensor}: of forward(), over all batches."""
        return [(sae, {name.removesuffix(suffix): value for name, value in sums.items()})
                for sae, suffix in zip(self.children(), self.suffixes)]


def build_model(config, data):
    return SAEModel(config, data.spec)


# -----------------------------------------------------------------------------
# sae-lens

def export_sae_lens(model, folder):
    """Write cfg.json and sae_weights.safetensors, which sae_lens.SAE.load_from_disk(folder) reads.
    model: an SAEModel of one layer. The weights include the centring and scaling of the
    activations. A trained batchtopk autoencoder is exported as jumprelu, with or without prefixes.
    Raises ConfigError for a transcoder with topk."""
    sae, c, spec = model.sae, model.keys, model.spec
    is_transcoder = c.target != "input"
    architecture = SAE_LENS.get(c.sae, ("jumprelu", "jumprelu_transcoder"))[is_transcoder]
    if architecture is None:
        raise ConfigError(["sae-lens has no transcoder with topk; use batchtopk"])
    scale, mean = sae.scale.view(-1), sae.mean
    tensors = dict(W_enc=sae.W_enc * scale[0], b_enc=sae.b_enc, W_dec=sae.decoder() / scale[-1],
                   b_dec=sae.b_dec / scale[-1] + mean[-spec["d_in"]:])
    if hasattr(sae, "threshold"):
        tensors["threshold"] = sae.threshold.expand(c.d_sae)
    hook = "ln2.hook_normalized" if c.target == "mlp" else "hook_resid_post"
    metadata = dict(model_name=os.path.basename(os.path.dirname(c.backbone or "")),
                    hook_name=f"blocks.{c.layer[0]}.{hook}", prepend_bos=False,
                    context_size=spec["block_size"])
    cfg = dict(architecture=architecture, d_in=spec["d_in"], d_sae=c.d_sae, dtype="float32",
               device="cpu", apply_b_dec_to_input=not is_transcoder, metadata=metadata,
               normalize_activations="none", reshape_activations="none")
    if c.sae == "topk":
        cfg |= dict(k=c.k, rescale_acts_by_decoder_norm=False)
    if is_transcoder:
        tensors["b_enc"] = sae.b_enc - mean[:spec["d_in"]] @ tensors["W_enc"]  # not of x - b_dec
        cfg["d_out"] = spec["d_in"]
    os.makedirs(folder, exist_ok=True)
    write_safetensors(os.path.join(folder, "sae_weights.safetensors"), tensors)
    Path(folder, "cfg.json").write_text(json.dumps(cfg, indent=1))


# -----------------------------------------------------------------------------
# the baseline

def random_directions(model, k):
    """Return an SAEModel with random directions, the baseline of `model`, an SAEModel of one layer
    (arXiv:2602.14111). The k directions that are closest to an activation reconstruct it, with the
    weights of least squares."""
    c = model.keys.replace(sae="topk", k=k, auxk=0, prefixes=[])
    baseline = SAEModel(c, model.spec).eval()
    W = baseline.sae.W_dec  # (F, C)

    def features(x):
        index = (x @ W.T).abs().topk(k).indices  # (N, k)
        weights = torch.linalg.lstsq(W[index].mT, x[..., None]).solution[..., 0]  # (N, k)
        return x, x.new_zeros(len(x), c.d_sae).scatter(1, index, weights)

    baseline.sae.features = features
    return baseline


def compare_with_random(model, tokens, n_batches):
    """Return a table, rows of texts, of the numbers of an SAEModel of one layer and of the baseline
    of random_directions() with as many features per token, on n_batches batches of the loader
    `tokens`. Raises ConfigError for a transcoder."""
    if model.keys.target != "input":
        raise ConfigError(["--baseline: random directions cannot predict a transcoder's target"])
    table = [["", *NUMBERS]]
    for name in ("trained", "random directions"):
        numbers = evaluate(model, model, tokens, n_batches, Ranks(), contextlib.nullcontext)
        table.append([name, *(f"{numbers[f'val_{n}']:.4f}" for n in NUMBERS)])
        model = random_directions(model, max(1, round(numbers["val_l0"])))
    return table


# -----------------------------------------------------------------------------
# texts

@torch.no_grad()
def find_top_contexts(model, tokens, n_batches, n_contexts):
    """Find the largest activations of each feature of an SAEModel of one layer in n_batches fixed
    batches of the loader `tokens`, at most one per window.

    Returns the share of tokens at which each feature fires (F,); values (F, n_contexts) in
    descending order, with windows and positions (F, n_contexts); the tokens (windows, T).
    """
    backbone = model.backbone()
    batches = []
    for i in range(tokens.n_fixed(n_batches)):
        idx, _ = tokens.fixed_batch(i, n_batches, model.sae.mean.device)
        z = model.sae.encode(backbone.activations(idx))  # (B, T - N_SKIPPED, F)
        batches.append((idx, (z > 0).float().mean(1), *z.max(1)))  # (B, T), (B, F) each
    idx, rates, values, positions = map(torch.cat, zip(*batches))
    value, window = values.topk(min(n_contexts, len(idx)), dim=0)  # (n_contexts, F)
    position = positions.gather(0, window) + N_SKIPPED
    return rates.mean(0), value.T, window.T, position.T, idx


def format_context(row, position, tokenizer, n_before=40, n_after=12, marks="[]", escape=str):
    """Return the text (without a tokenizer, the ids) from n_before tokens before a position of row
    (T,) to n_after tokens after it, with the token at the position between the `marks`. escape:
    applied to each part."""
    def decode(ids):
        ids = ids.tolist()
        return escape(tokenizer.decode(ids).replace("\n", "\\n") if tokenizer
                      else " ".join(map(str, ids)))
    before = decode(row[max(0, position - n_before):position])
    token = decode(row[position:position + 1])
    after = decode(row[position + 1:position + 1 + n_after])
    return ("" if tokenizer else " ").join((before, f"{marks[0]}{token}{marks[1]}", after))


@dataclass
class FeatureOptions:
    """Show the texts in which features of a sparse autoencoder fire, or export it for sae-lens."""
    ckpt: str = key("out/sae/ckpt.pt", "checkpoint", path=True)
    backbone: str | None = key(None, BACKBONE, path=True)
    layer: int | None = key(None, "of several layers, the one to use (default: the first)")
    to: str | None = key(None, "export to this folder, which sae-lens loads", metavar="FOLDER")
    html: str | None = key(None, "write the features to this page", path=True)
    baseline: bool = key(False, "compare the reconstruction with that of random directions")
    data_dir: str | None = key(None, "tokens to search (default: those of the training run)")
    features: int = key(5, "number of features to show", ge=1)
    contexts: int = key(5, "texts per feature", ge=1)
    batches: int = key(32, "batches of 16 validation windows to search", ge=1)


def show_features(options):
    """Print the contexts of the features that fire most strongly, or write them to the page
    options.html. With options.baseline, print the numbers and those of random directions instead;
    with options.to, export the autoencoder to this folder instead. options: FeatureOptions."""
    model, _ = load_model(options.ckpt, backbone=options.backbone, expect="sae")
    model = model.of_layer(model.keys.layer[0] if options.layer is None else options.layer)
    if options.to:
        export_sae_lens(model, options.to)
        print(f"Wrote {options.to}; load it with sae_lens.SAE.load_from_disk({options.to!r})")
        return
    tokenizer = model.backbone().tokenizer
    tokens = DataLoader(options.data_dir or model.keys.data_dir, 16, model.spec["block_size"],
                        "val", vocab_size=model.spec["vocab_size"])
    if options.baseline:
        print(format_table(compare_with_random(model, tokens, options.batches)))
        return
    rate, value, window, position, idx = find_top_contexts(model, tokens, options.batches,
                                                           options.contexts)
    style = dict(marks=("<mark>", "</mark>"), escape=html.escape) if options.html else {}
    lines = []
    for f in value.mean(1).argsort(descending=True)[:options.features].tolist():
        lines.append(f"feature {f}: fires at {float(rate[f]):.2%} of the tokens")
        for v, w, p in zip(value[f].tolist(), window[f].tolist(), position[f].tolist()):
            lines.append(f"  {v:8.2f}  {format_context(idx[w], p, tokenizer, **style)}")
    text = "\n".join(lines)
    if options.html:
        page = PAGE.format(html.escape(f"{options.ckpt}, layer {model.keys.layer[0]}"), text)
        Path(options.html).write_text(page, encoding="utf-8")
        text = f"Wrote {options.html}"
    echo(text)


main = command(FeatureOptions, show_features)
