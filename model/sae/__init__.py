"""A sparse autoencoder of a trained GPT's activations: --model sae --backbone out/quick/ckpt.pt

It writes the stream after one block as a sum of few directions out of many, each of which tends to
mean one thing. Top-k: arXiv:2406.04093; ReLU with an L1 penalty: transformer-circuits.pub/2024/
april-update. The frozen backbone computes in the loader, so the loop sees rows of activations; an
evaluation runs it again, with the reconstruction in the place of the activations.

    python -m model.sae --ckpt out/sae/ckpt.pt                  # where features are active
    python -m model.sae --ckpt out/sae/ckpt.pt --to out/folder  # a folder for sae-lens

Shapes: B windows, T tokens, N activations, C width of the stream, F features (d_sae).
"""

import argparse
import json
import os
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
import torch.nn.functional as F

from model.core.init import fill, stable_hash
from model.core.ops import IGNORE
from model.sae.activations import (  # noqa: F401  ActivationBuffer: for importers
    LONG,
    SKIPPED,
    ActivationBuffer,
    ActivationLoader,
    load_backbone,
)
from train.base.checkpoint_file import write_safetensors
from train.base.cli import run_command
from train.base.errors import CheckpointError, ConfigError, UsageError, echo
from train.base.fields import key
from train.dataloader import Data, DataLoader, open_token_data
from train.device import choose_dtype
from train.distributed import broadcast_from_rank0

USE = "python -m model.sae --ckpt {out}/ckpt.pt"
MUST_MATCH_TO_INIT = ("backbone", "layer")  # features are those of one place in one model


@dataclass
class Keys:
    backbone: str = key("out/quick/ckpt.pt", "checkpoint of the GPT whose activations are read",
                        free=True, path=True, reads=True)
    layer: int = key(1, "block whose output is read, counted from 0", ge=0)
    sae: str = key("topk", "topk: the k largest features of a token; relu: any number, with an L1 "
                   "penalty", choices=["topk", "relu"])
    d_sae: int = key(1024, "features", ge=1)
    k: int = key(32, "topk: features that a token may use", ge=1)
    l1: float = key(0.02, "relu: weight of the penalty on sum of feature x length of its direction",
                    ge=0)
    auxk: int = key(64, "dead features that learn, at a time, from what the others leave over; 0: "
                    "none", ge=0)
    auxk_weight: float = key(1 / 32, "weight of that in the loss", ge=0)
    dead_after: int = key(1000, "steps without firing after which a feature is dead", ge=1)
    buffer_size: int = key(65536, "activations that batches are drawn from, over all ranks", ge=1)

    def problems(self):
        used = ("k", "auxk") if self.sae == "topk" else ("auxk",)
        return [f"{name}: {getattr(self, name)} of {self.d_sae} features (d_sae): expected at most "
                "as many" for name in used if getattr(self, name) > self.d_sae]


# -----------------------------------------------------------------------------
# the model

def keep_largest(x, k):
    """x (N, F) with all but the k largest of each row set to 0."""
    values, index = x.topk(k, dim=-1, sorted=False)
    return torch.zeros_like(x).scatter(-1, index, values)


class SparseAutoencoder(nn.Module):
    """forward(x (N, C)) -> (loss, sums, reconstruction (N, C)). Inside, activations are centred and
    scaled by what spec says of them, so that their mean variance is 1 and the squared error is
    about the share of the variance that is not explained. Activations that are `LONG` (a few tokens
    of published models, hundreds of times the others) count as the mean, and stay as they are."""

    def __init__(self, config, spec):
        super().__init__()
        c, d_in = config, spec["d_in"]
        self.keys, self.spec = c, spec
        self.W_enc, self.b_enc = (nn.Parameter(torch.empty(s)) for s in ((d_in, c.d_sae), c.d_sae))
        self.W_dec, self.b_dec = (nn.Parameter(torch.empty(s)) for s in ((c.d_sae, d_in), d_in))
        self.register_buffer("mean", torch.empty(d_in))
        self.register_buffer("scale", torch.empty(()))
        self.register_buffer("silent", torch.empty(c.d_sae, dtype=torch.int64))  # steps
        self.some_dead = True  # until the first step tells; only ever costs time

    def initial(self, name, shape, seed):
        """Directions at random; the encoder starts as their transpose, as in sae-lens."""
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

    def directions(self):
        """The decoder (F, C). Top-k's rows have length 1: divided by it here, so that no gradient
        goes along them and nothing has to be mended after a step."""
        W = self.W_dec.float()
        return F.normalize(W, dim=1) if self.keys.sae == "topk" else W

    def pre(self, x):
        """Features (N, F) of normalised activations x (N, C) before the nonlinearity."""
        return (x - self.b_dec) @ self.W_enc + self.b_enc

    def active(self, pre):
        return F.relu(keep_largest(pre, self.keys.k) if self.keys.sae == "topk" else pre)

    def normalised(self, x):
        """(x (N, C) centred and scaled, whether each was too long (N, 1), and so is 0)."""
        x = (x - self.mean) * self.scale
        long = x.square().mean(-1, keepdim=True) > LONG**2
        return x.masked_fill(long, 0.0), long

    def encode(self, x):
        """Features (N, F) of activations x (N, C)."""
        return self.active(self.pre(self.normalised(x)[0]))

    def forward(self, given):
        c, (x, long) = self.keys, self.normalised(given)
        pre, W = self.pre(x), self.directions()
        z = self.active(pre)  # (N, F)
        out = (z @ W + self.b_dec).float()  # (N, C)
        left = x - out
        parts = dict(mse=left.square().mean(1))  # (N,) each
        loss = parts["mse"]
        if c.sae == "relu":
            parts["l1"] = z.float() @ W.norm(dim=1)
            loss = loss + c.l1 * parts["l1"]
        if c.auxk:
            parts["auxk"] = self.revive(pre, left.detach(), W)
            loss = loss + c.auxk_weight * parts["auxk"]
        sums = {name: part.sum() for name, part in parts.items()}
        sums |= dict(x=x.sum(0), xx=x.square().sum(), fired=(z > 0).sum(0),
                     dying=self.silent + 1 >= c.dead_after)  # unless they fire in this step
        return loss.mean(), sums, torch.where(long, given, out / self.scale + self.mean)

    def revive(self, pre, left, W):
        """The share (N,) of what is left over (N, C) that the largest dead features do not explain:
        by learning that they come to fire again (arXiv:2406.04093, A.2). Few of them count less."""
        if not self.some_dead:
            return left.new_zeros(len(left))
        dead = self.silent >= self.keys.dead_after  # (F,)
        z = keep_largest(pre.masked_fill(~dead, -torch.inf), self.keys.auxk)
        z = torch.where(dead, z, 0.0)  # fewer dead ones than auxk: the others are -inf
        missed = (left - z @ W).float().square().sum(1) / left.square().sum(1).clamp(min=1e-8)
        return missed * (dead.sum() / self.keys.auxk).clamp(max=1.0)


class SAEModel(nn.Module):
    """What the loop asks: the autoencoder, and in evaluation the backbone with it spliced in."""

    def __init__(self, config, spec):
        super().__init__()
        self.keys, self.spec, self.sae = config, spec, SparseAutoencoder(config, spec)
        fill(self, config.seed)

    def initial(self, name, shape, seed):
        return self.sae.initial(name.removeprefix("sae."), shape, seed)

    def compile(self, *args, **kwargs):
        """What trains alone: evaluation hangs a hook into the backbone."""
        self.sae.compile(*args, **kwargs)

    def flops_per_unit(self):
        return 6 * (self.sae.W_enc.numel() + self.sae.W_dec.numel())

    def backbone(self):
        """The backbone it was trained on; CheckpointError where there is another by now."""
        c, device = self.keys, self.sae.mean.device
        backbone = load_backbone(c.backbone, c.layer, device, choose_dtype(c.dtype, device)[0])
        if self.spec["backbone"] not in (backbone.digest, backbone.file_hash):
            raise CheckpointError(
                f"backbone: {c.backbone} has not the weights that this autoencoder was trained on: "
                f"their sha256 is {backbone.digest[:12]}..., expected "
                f"{self.spec['backbone'][:12]}...; put those back")
        return backbone

    def forward(self, x, targets=None):
        """Training: x (B, T, C) activations. Evaluation: x (B, T) tokens, targets (B, T) -> with
        the language model's loss as it is, with the reconstruction, and with zeros instead."""
        if targets is None:
            return self.sae(x.flatten(0, 1))[:2]
        backbone, seen = self.backbone(), []
        targets = targets.clone()
        targets[:, :SKIPPED] = IGNORE

        def look(stream):
            seen.append(stream.float())
            return stream
        losses = dict(own=backbone.loss(x, targets, look))
        loss, sums, out = self.sae(seen[0].flatten(0, 1))
        losses["spliced"] = backbone.loss(x, targets, lambda stream: out.view(stream.shape))
        losses["zeroed"] = backbone.loss(x, targets, torch.zeros_like)
        count = torch.tensor(len(out), device=out.device)
        return loss, sums | {name: v * count for name, v in losses.items()} | dict(count=count)

    def numbers(self, sums):
        """explained_variance: over all activations and dimensions at once; a mean of ratios would
        be biased. l0: features a token. dead: in training those silent for dead_after steps, in an
        evaluation those that never fired in it."""
        n, fired = float(sums["count"]), sums["fired"]
        variance = float(sums["xx"] - sums["x"].square().sum() / n)
        unexplained = float(sums["mse"]) * self.spec["d_in"]
        out = dict(explained_variance=1 - unexplained / variance if variance > 0 else None,
                   l0=float(fired.sum()) / n)
        out |= {name: float(sums[name]) / n for name in ("l1", "auxk") if name in sums}
        if "own" not in sums:
            return out | dict(dead=float((self.sae.silent >= self.keys.dead_after).sum()))
        own, spliced, zeroed = (float(sums[name]) / n for name in ("own", "spliced", "zeroed"))
        recovered = (zeroed - spliced) / (zeroed - own) if zeroed != own else None
        return out | dict(dead=float((fired == 0).sum()), lm_loss=own, spliced_loss=spliced,
                          loss_recovered=recovered)

    def after_step(self, it, sums):
        silent, fired = self.sae.silent, sums["fired"].to(self.sae.silent.device) > 0
        silent.copy_(torch.where(fired, 0, silent + 1))
        # Of sums, which are on the host, not of silent: a GPU would have to be waited for.
        self.sae.some_dead = bool(((sums["dying"] > 0) & (sums["fired"] == 0)).any())


# -----------------------------------------------------------------------------
# what train/train.py asks of a model file

def open_data(config, ranks):
    """Activations to train on; token windows to evaluate on."""
    c, dtype = config, choose_dtype(config.dtype, ranks.device)[0]
    backbone = load_backbone(c.backbone, c.layer, ranks.device, dtype)
    shape, theirs = backbone.gpt.config, backbone.tokenizer
    size = min(c.block_size, shape.block_size)
    data = open_token_data(replace(c, vocab_size=shape.vocab_size, block_size=size), ranks)
    ours = data.spec["tokenizer"]
    if ours and theirs and ours != theirs.spec():
        raise ConfigError([f"backbone: {c.backbone} reads the tokens of another tokenizer "
                           f"({theirs.spec()['kind']}) than {c.data_dir} ({ours['kind']}) holds: "
                           "prepare the data with the backbone's"])
    mean, scale = broadcast_from_rank0(lambda: backbone.statistics(data.train), ranks)
    spec = dict(data.spec, d_in=shape.n_embd, mean=mean, scale=scale, backbone=backbone.digest,
                block_size=data.train.block_size)
    return Data(ActivationLoader(data.train, backbone, c, ranks), data.val, spec,
                renamed={backbone.file_hash: backbone.digest})


def build_model(config, data):
    return SAEModel(config, data.spec)


# -----------------------------------------------------------------------------
# the command line

def to_sae_lens(model, folder):
    """Write cfg.json and sae_weights.safetensors, which sae_lens.SAE.load_from_disk(folder) reads.
    The centring and scaling of the activations go into the weights."""
    sae, c = model.sae, model.keys
    tensors = dict(W_enc=sae.W_enc * sae.scale, b_enc=sae.b_enc, W_dec=sae.directions() / sae.scale,
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
    with open(os.path.join(folder, "cfg.json"), "w", encoding="utf-8") as f:
        json.dump(cfg, f, indent=1)


@torch.no_grad()
def top_contexts(model, tokens, batches, keep):
    """Where each feature is most active in `batches` fixed batches of the loader `tokens`, at most
    once in a window. Returns how often each fires, a share (F,); values (F, keep), falling; windows
    (F, keep) and positions (F, keep) in them; the tokens (windows, T)."""
    backbone, n = model.backbone(), tokens.n_fixed(batches)
    fired, seen, best = 0, [], None
    for i in range(n):
        idx, _ = tokens.fixed_batch(i, batches, model.sae.mean.device)
        z = model.sae.encode(backbone.activations(idx))  # (B, T - SKIPPED, F)
        fired = fired + (z > 0).sum((0, 1))
        value, position = z.max(1)  # (B, F)
        window = torch.arange(len(idx), device=idx.device)[:, None] + sum(map(len, seen))
        new = (value, window.expand_as(value), position + SKIPPED)
        new = new if best is None else tuple(torch.cat(pair) for pair in zip(best, new))
        order = new[0].topk(min(keep, len(new[0])), dim=0).indices
        best = tuple(t.gather(0, order) for t in new)  # (keep, F) each
        seen.append(idx)
    seen = torch.cat(seen)
    return (fired / (seen.size(0) * (seen.size(1) - SKIPPED)), *(t.T for t in best), seen)


def describe(row, position, tokenizer, before=40, after=12):
    """The text (without a tokenizer, ids) around a position of `row` (T,), its token in []."""
    def text(ids):
        ids = ids.tolist()
        return tokenizer.decode(ids).replace("\n", "\\n") if tokenizer else " ".join(map(str, ids))
    parts = (row[max(0, position - before):position], row[position:position + 1],
             row[position + 1:position + 1 + after])
    left, token, right = map(text, parts)
    return f"{left}[{token}]{right}" if tokenizer else f"{left} [{token}] {right}"


def show_features(model, args):
    """Print the contexts of the `args.features` features that are strongest where they fire."""
    c, spec = model.keys, model.spec
    tokens = DataLoader(args.data_dir or c.data_dir, 16, spec["block_size"], "val",
                        vocab_size=spec["vocab_size"])
    rate, value, window, position, rows = top_contexts(model, tokens, args.batches, args.contexts)
    tokenizer = model.backbone().tokenizer
    for f in value.mean(1).argsort(descending=True)[:args.features].tolist():
        print(f"feature {f}: active at {float(rate[f]):.2%} of the tokens")
        for v, w, p in zip(value[f].tolist(), window[f].tolist(), position[f].tolist()):
            echo(f"  {v:8.2f}  {describe(rows[w], p, tokenizer)}")


def main(argv=None):
    """The command line; the exit code."""
    p = argparse.ArgumentParser(prog="python -m model.sae", allow_abbrev=False, description=(
        "Show what the features of a sparse autoencoder stand for, or write it for sae-lens."))
    p.add_argument("--ckpt", default="out/sae/ckpt.pt", help="checkpoint (default: %(default)s)")
    p.add_argument("--to", metavar="FOLDER", help="write a folder that sae-lens loads, and stop")
    p.add_argument("--data_dir", help="tokens to look at (default: those it was trained on)")
    p.add_argument("--features", type=int, default=5, help="how many to show (default: 5)")
    p.add_argument("--contexts", type=int, default=5, help="places of each (default: 5)")
    p.add_argument("--batches", type=int, default=32, help="batches of 16 windows of validation "
                   "data to look through (default: 32)")
    return run_command(p, show_or_write, argv)


def show_or_write(args):
    """What the command line asks for."""
    from model.core.load import load_model
    if min(args.features, args.contexts, args.batches) < 1:
        raise UsageError("--features, --contexts and --batches must be at least 1")
    model, _ = load_model(args.ckpt)
    if type(model).__name__ != "SAEModel":
        raise CheckpointError(f"{args.ckpt}: a {type(model).__name__}, no sparse autoencoder")
    if args.to:
        to_sae_lens(model, args.to)
        print(f"Wrote {args.to}; sae_lens.SAE.load_from_disk({args.to!r}) reads it")
    else:
        show_features(model, args)
