"""A sparse autoencoder of a trained GPT's activations: --model sae --backbone out/quick/ckpt.pt

It reconstructs the residual stream after one block as a sum of few directions out of many
(features), which are easier to interpret than single dimensions. Top-k: arXiv:2406.04093; ReLU with
an L1 penalty: transformer-circuits.pub/2024/april-update. The loader runs the frozen backbone, so
that training sees rows of activations. An evaluation also measures the backbone's loss with the
reconstruction in place of the activations.

    python -m model.sae --ckpt out/sae/ckpt.pt                  # texts in which features fire
    python -m model.sae --ckpt out/sae/ckpt.pt --to out/folder  # a folder for sae-lens

Shapes: B windows, T tokens, N activations, C channels (d_in), F features (d_sae).
"""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from model.core.init import fill, stable_hash
from model.core.load import load_model
from model.core.ops import IGNORE
from model.core.weights import check_tokenizer
from model.sae.activations import N_SKIPPED, OUTLIER_RATIO, ActivationLoader, load_backbone
from model.sae.activations import ActivationBuffer as ActivationBuffer  # a public name
from train.base.cli import command
from train.base.errors import CheckpointError, echo
from train.base.fields import key
from train.base.tensors import write_safetensors
from train.dataloader import Data, DataLoader, open_token_data
from train.distributed import broadcast_from_rank0

USE = "python -m model.sae --ckpt {out}/ckpt.pt"
MUST_MATCH_TO_INIT = ("backbone", "layer")  # features belong to one layer of one model


@dataclass
class Keys:
    backbone: str = key("out/quick/ckpt.pt", "checkpoint of the GPT whose activations are learned",
                        free=True, path=True, reads=True)
    layer: int = key(1, "block whose output is learned, from 0", ge=0)
    sae: str = key("topk", "topk: k features per token; relu: any number, with an L1 penalty",
                   choices=["topk", "relu"])
    d_sae: int = key(1024, "number of features", ge=1)
    k: int = key(32, "topk: features per token", ge=1, needs="sae=topk")
    l1: float = key(0.02, "relu: weight of the L1 penalty, feature x norm of decoder row", ge=0,
                    needs="sae=relu")
    auxk: int = key(64, "dead features that are trained on the reconstruction error; 0: none", ge=0)
    auxk_weight: float = key(1 / 32, "weight of the AuxK loss", ge=0, needs="auxk")
    dead_after: int = key(1000, "steps without firing after which a feature is dead", ge=1)
    buffer_size: int = key(65536, "activations in the ring buffers of all ranks", ge=1)

    def problems(self):
        used = ("k", "auxk") if self.sae == "topk" else ("auxk",)
        return [f"{name}: {getattr(self, name)} exceeds d_sae, the number of features "
                f"({self.d_sae})" for name in used if getattr(self, name) > self.d_sae]


# -----------------------------------------------------------------------------
# the model

def keep_largest(x, k):
    """Return x (N, F) with all but the k largest of each row set to 0."""
    values, index = x.topk(k, dim=-1, sorted=False)
    return torch.zeros_like(x).scatter(-1, index, values)


class SparseAutoencoder(nn.Module):
    """forward(activations (N, C)) -> (loss, sums, reconstruction (N, C)).

    Activations are centred and scaled with the mean and scale in `spec`. The mean variance is then
    1, and the squared error is about the share of variance that is not explained. Outliers
    (the first newline or comma in many published models) are replaced by the mean before encoding,
    and the reconstruction leaves each unchanged.
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
        self.register_buffer("mean", torch.empty(d_in))
        self.register_buffer("scale", torch.empty(()))
        # Steps since each feature last fired.
        self.register_buffer("silent", torch.empty(d_sae, dtype=torch.int64))
        self.may_have_dead = True  # updated after each step; True only costs time

    def initial(self, name, shape, seed):
        """Return the initial value of a tensor: random directions, and the encoder as the transpose
        of the decoder, as in sae-lens."""
        if name in ("mean", "scale"):
            return torch.tensor(self.spec[name])
        if name in ("b_enc", "b_dec", "silent"):
            return torch.zeros(shape)
        if name not in ("W_enc", "W_dec"):
            return None
        generator = torch.Generator().manual_seed(stable_hash(seed, "W_dec"))
        rows = torch.randn(self.keys.d_sae, self.spec["d_in"], generator=generator)
        rows = F.normalize(rows, dim=1) * (1.0 if self.keys.sae == "topk" else 0.1)
        return rows if name == "W_dec" else rows.T

    def decoder(self):
        """Return the decoder (F, C). For top-k, rows are normalised to length 1 here instead of
        after each step; the gradient is then orthogonal to the row."""
        W = self.W_dec.float()
        return F.normalize(W, dim=1) if self.keys.sae == "topk" else W

    def features(self, x):
        """Return the features (N, F) of normalised activations x (N, C), before and after the
        nonlinearity."""
        pre = (x - self.b_dec) @ self.W_enc + self.b_enc
        kept = keep_largest(pre, self.keys.k) if self.keys.sae == "topk" else pre
        return pre, F.relu(kept)

    def normalise(self, activations):
        """Return the activations (N, C), centred and scaled, outliers 0, and whether each is an
        outlier (N, 1)."""
        x = (activations - self.mean) * self.scale
        is_outlier = x.square().mean(-1, keepdim=True) > OUTLIER_RATIO**2
        return x.masked_fill(is_outlier, 0.0), is_outlier

    def encode(self, activations):
        """Return the features (N, F) of activations (N, C)."""
        return self.features(self.normalise(activations)[0])[1]

    def forward(self, activations):
        c = self.keys
        x, is_outlier = self.normalise(activations)  # (N, C), (N, 1)
        pre, z = self.features(x)  # (N, F) each
        W = self.decoder()  # (F, C)
        out = (z @ W + self.b_dec).float()  # (N, C)
        error = x - out
        losses = dict(mse=error.square().mean(1))  # (N,) each
        weights = dict(mse=1.0, l1=c.l1, auxk=c.auxk_weight)
        if c.sae == "relu":
            losses["l1"] = z.float() @ W.norm(dim=1)
        if c.auxk:
            losses["auxk"] = self.auxk_loss(pre, error.detach(), W)
        loss = sum(weights[name] * values for name, values in losses.items())
        sums = {name: values.sum() for name, values in losses.items()}
        sums |= dict(x=x.sum(0), xx=x.square().sum(), fired=(z > 0).sum(0))
        return loss.mean(), sums, torch.where(is_outlier, activations, out / self.scale + self.mean)

    def auxk_loss(self, pre, error, W):
        """Return the share (N,) of the reconstruction error (N, C) that the largest dead features
        do not explain (arXiv:2406.04093, A.2). It revives dead features. With fewer than auxk
        dead features the weight is smaller."""
        if not self.may_have_dead:
            return error.new_zeros(len(error))
        dead = self.silent >= self.keys.dead_after  # (F,)
        z = keep_largest(pre.masked_fill(~dead, -torch.inf), self.keys.auxk)
        z = torch.where(dead, z, 0.0)  # -inf if fewer than auxk are dead
        rest = (error - z @ W).float().square().sum(1) / error.square().sum(1).clamp(min=1e-8)
        return rest * (dead.sum() / self.keys.auxk).clamp(max=1.0)


class SAEModel(nn.Module):
    """The autoencoder in training, and spliced into the backbone in evaluations."""

    def __init__(self, config, spec):
        super().__init__()
        self.sae = SparseAutoencoder(config, spec)
        self.keys = config
        self.spec = spec
        fill(self, config.seed)

    def initial(self, name, shape, seed):
        return self.sae.initial(name.removeprefix("sae."), shape, seed)

    def compile(self, *args, **kwargs):
        """Compile the autoencoder only: an evaluation adds a hook to the backbone."""
        self.sae.compile(*args, **kwargs)

    def flops_per_unit(self):
        return 6 * (self.sae.W_enc.numel() + self.sae.W_dec.numel())

    def backbone(self):
        """Return the Backbone. CheckpointError if it is not the one of the training run."""
        c = self.keys
        backbone = load_backbone(c.backbone, c.layer, self.sae.mean.device, c.dtype)
        if self.spec["backbone"] not in (backbone.digest, backbone.file_hash):
            raise CheckpointError(f"backbone: the weights of {c.backbone} are not those of the "
                                  f"training run (sha256 {self.spec['backbone'][:12]}...)")
        return backbone

    def forward(self, x, targets=None):
        """Training: x (B, T, C) activations. Evaluation: x, targets (B, T) tokens, with sums of the
        backbone's loss: unchanged, spliced with the reconstruction, and with zeros instead."""
        if targets is None:
            return self.sae(x.flatten(0, 1))[:2]
        backbone = self.backbone()
        targets = targets.clone()
        targets[:, :N_SKIPPED] = IGNORE
        loss, sums, out = self.sae(backbone.activations(x).flatten(0, 1))
        losses = dict(lm_loss=backbone.loss(x, targets, lambda stream: stream),
                      spliced_loss=backbone.loss(x, targets, lambda stream: out.view(stream.shape)),
                      zeroed_loss=backbone.loss(x, targets, torch.zeros_like))
        count = torch.tensor(len(out), device=out.device)
        return loss, sums | {name: v * count for name, v in losses.items()} | dict(count=count)

    def numbers(self, sums):
        """Return the metrics of a log line.

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
        is_dead = self.sae.silent >= self.keys.dead_after
        if "lm_loss" in sums:
            is_dead = sums["fired"] == 0
            zeroed = float(sums["zeroed_loss"] / sums["count"])
            gap = zeroed - means["lm_loss"]
            means["loss_recovered"] = (zeroed - means["spliced_loss"]) / gap if gap else None
        return means | dict(dead=float(is_dead.sum()))

    def after_step(self, it, sums):
        silent = self.sae.silent
        fired = sums["fired"].to(silent.device) > 0
        silent.copy_(torch.where(fired, 0, silent + 1))
        self.sae.may_have_dead = bool((silent >= self.keys.dead_after).any())


# -----------------------------------------------------------------------------
# model interface, see train/system.py

def open_data(config, ranks):
    """Return the Data: activations for training, windows of tokens for evaluations."""
    backbone = load_backbone(config.backbone, config.layer, ranks.device, config.dtype)
    shape, tokenizer = backbone.gpt.config, backbone.tokenizer
    data = open_token_data(replace(config, vocab_size=shape.vocab_size, block_size=min(
        config.block_size, shape.block_size)), ranks)
    check_tokenizer(tokenizer and tokenizer.spec(), config.backbone, data.spec, config)
    mean, scale = broadcast_from_rank0(lambda: backbone.statistics(data.train), ranks)
    spec = dict(data.spec, d_in=shape.n_embd, mean=mean, scale=scale, backbone=backbone.digest,
                block_size=data.train.block_size)
    return Data(ActivationLoader(data.train, backbone, config, ranks), data.val, spec)


def build_model(config, data):
    return SAEModel(config, data.spec)


# -----------------------------------------------------------------------------
# command

def export_sae_lens(model, folder):
    """Write cfg.json and sae_weights.safetensors, which sae_lens.SAE.load_from_disk(folder) reads.
    The weights include the centring and scaling of the activations."""
    sae, c = model.sae, model.keys
    tensors = dict(W_enc=sae.W_enc * sae.scale, b_enc=sae.b_enc, W_dec=sae.decoder() / sae.scale,
                   b_dec=sae.b_dec / sae.scale + sae.mean)
    kind = (dict(architecture="topk", k=c.k, rescale_acts_by_decoder_norm=False)
            if c.sae == "topk" else dict(architecture="standard"))
    cfg = dict(kind, d_in=model.spec["d_in"], d_sae=c.d_sae, dtype="float32", device="cpu",
               apply_b_dec_to_input=True, normalize_activations="none", reshape_activations="none",
               metadata=dict(model_name=os.path.basename(os.path.dirname(c.backbone)),
                             hook_name=f"blocks.{c.layer}.hook_resid_post", prepend_bos=False,
                             context_size=model.spec["block_size"]))
    os.makedirs(folder, exist_ok=True)
    write_safetensors(os.path.join(folder, "sae_weights.safetensors"), tensors)
    Path(folder, "cfg.json").write_text(json.dumps(cfg, indent=1))


@torch.no_grad()
def find_top_contexts(model, tokens, n_batches, n_contexts):
    """Find the largest activations of each feature in fixed batches of the loader `tokens`, at most
    one per window.

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


def format_context(row, position, tokenizer, n_before=40, n_after=12):
    """Return the text (without a tokenizer, the ids) around a position of row (T,), with the token
    at the position in brackets."""
    def decode(ids):
        ids = ids.tolist()
        return tokenizer.decode(ids).replace("\n", "\\n") if tokenizer else " ".join(map(str, ids))
    before = decode(row[max(0, position - n_before):position])
    token = decode(row[position:position + 1])
    after = decode(row[position + 1:position + 1 + n_after])
    return ("" if tokenizer else " ").join((before, f"[{token}]", after))


@dataclass
class FeatureOptions:
    """Show the texts in which features of a sparse autoencoder fire, or export it for sae-lens."""
    ckpt: str = key("out/sae/ckpt.pt", "checkpoint")
    to: str | None = key(None, "export to this folder, which sae-lens loads", metavar="FOLDER")
    data_dir: str | None = key(None, "tokens to search (default: those of the training run)")
    features: int = key(5, "number of features to show", ge=1)
    contexts: int = key(5, "texts per feature", ge=1)
    batches: int = key(32, "batches of 16 validation windows to search", ge=1)


def show_features(options):
    """Print the contexts of the features that fire most strongly, or export the autoencoder."""
    model, _ = load_model(options.ckpt, expect="sae")
    if options.to:
        export_sae_lens(model, options.to)
        print(f"Wrote {options.to}; load it with sae_lens.SAE.load_from_disk({options.to!r})")
        return
    spec = model.spec
    tokens = DataLoader(options.data_dir or model.keys.data_dir, 16, spec["block_size"], "val",
                        vocab_size=spec["vocab_size"])
    rate, value, window, position, idx = find_top_contexts(model, tokens, options.batches,
                                                           options.contexts)
    tokenizer = model.backbone().tokenizer
    for f in value.mean(1).argsort(descending=True)[:options.features].tolist():
        print(f"feature {f}: fires at {float(rate[f]):.2%} of the tokens")
        for v, w, p in zip(value[f].tolist(), window[f].tolist(), position[f].tolist()):
            echo(f"  {v:8.2f}  {format_context(idx[w], p, tokenizer)}")


main = command(FeatureOptions, show_features)
