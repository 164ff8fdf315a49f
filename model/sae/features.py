"""Features of a trained sparse autoencoder: texts, a page, numbers beside a baseline, sae-lens.

    python -m model.sae --ckpt out/sae/ckpt.pt                     # texts in which features fire
    python -m model.sae --ckpt out/sae/ckpt.pt --html page.html    # the same as a page
    python -m model.sae --ckpt out/sae/ckpt.pt --baseline          # random directions beside it
    python -m model.sae --ckpt out/sae/ckpt.pt --to out/folder     # a folder for sae-lens
"""

import contextlib
import html
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from model.core.load import load_model
from model.sae import SAEModel
from model.sae.activations import N_SKIPPED
from train.base.cli import command, format_table
from train.base.errors import ConfigError, echo
from train.base.fields import key
from train.base.tensors import write_safetensors
from train.dataloader import DataLoader
from train.distributed import Ranks
from train.evaluate import evaluate

NUMBERS = ("explained_variance", "l0", "spliced_loss", "loss_recovered")  # beside the baseline
PAGE = """<!DOCTYPE html><meta charset="utf-8"><title>Features of {0}</title>
<h1>Features of {0}</h1>
<pre style="font-size: 14px; line-height: 1.6">{1}</pre>
"""


# -----------------------------------------------------------------------------
# sae-lens

def export_sae_lens(model, folder):
    """Write cfg.json and sae_weights.safetensors, which sae_lens.SAE.load_from_disk(folder) reads.
    The weights include the centring and scaling of the activations. A trained batchtopk autoencoder
    is jumprelu, with or without prefixes. Raises ConfigError."""
    sae, c, spec = model.sae, model.keys, model.spec
    is_transcoder = c.target != "input"
    scale, mean = sae.scale.view(-1), sae.mean
    tensors = dict(W_enc=sae.W_enc * scale[0], b_enc=sae.b_enc, W_dec=sae.decoder() / scale[-1],
                   b_dec=sae.b_dec / scale[-1] + mean[-spec["d_in"]:])
    if hasattr(sae, "threshold"):
        tensors["threshold"] = sae.threshold.expand(c.d_sae)
    metadata = dict(model_name=os.path.basename(os.path.dirname(c.backbone or "")),
                    hook_name=f"blocks.{c.layer}.hook_resid_post", prepend_bos=False,
                    context_size=spec["block_size"])
    cfg = dict(architecture=dict(topk="topk", relu="standard").get(c.sae, "jumprelu"),
               d_in=spec["d_in"], d_sae=c.d_sae, dtype="float32", device="cpu",
               apply_b_dec_to_input=not is_transcoder, normalize_activations="none",
               reshape_activations="none", metadata=metadata)
    if c.sae == "topk":
        cfg |= dict(k=c.k, rescale_acts_by_decoder_norm=False)
    if is_transcoder:
        if c.sae == "topk":
            raise ConfigError(["sae-lens has no transcoder with topk; use batchtopk"])
        tensors["b_enc"] = sae.b_enc - mean[:spec["d_in"]] @ tensors["W_enc"]  # not of x - b_dec
        cfg |= dict(architecture="transcoder" if c.sae == "relu" else "jumprelu_transcoder",
                    d_out=spec["d_in"])
        metadata["hook_name_out"] = f"blocks.{c.target}.hook_resid_post"
        if c.target == "mlp":
            metadata |= dict(hook_name=f"blocks.{c.layer}.ln2.hook_normalized",
                             hook_name_out=f"blocks.{c.layer}.hook_mlp_out")
    os.makedirs(folder, exist_ok=True)
    write_safetensors(os.path.join(folder, "sae_weights.safetensors"), tensors)
    Path(folder, "cfg.json").write_text(json.dumps(cfg, indent=1))


# -----------------------------------------------------------------------------
# the baseline

def random_directions(model, k):
    """Return the baseline of an autoencoder (arXiv:2602.14111): its directions are random. The k
    that are closest to an activation reconstruct it, with the weights of least squares."""
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
    """Return a table, rows of texts, of the numbers of an autoencoder and of the baseline with as
    many features per token."""
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


def format_context(row, position, tokenizer, n_before=40, n_after=12, marks="[]", escape=str):
    """Return the text (without a tokenizer, the ids) around a position of row (T,), with the token
    at the position between the `marks`."""
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
    ckpt: str = key("out/sae/ckpt.pt", "checkpoint")
    to: str | None = key(None, "export to this folder, which sae-lens loads", metavar="FOLDER")
    html: str | None = key(None, "write the features to this page", metavar="FILE")
    baseline: bool = key(False, "compare the reconstruction with that of random directions")
    data_dir: str | None = key(None, "tokens to search (default: those of the training run)")
    features: int = key(5, "number of features to show", ge=1)
    contexts: int = key(5, "texts per feature", ge=1)
    batches: int = key(32, "batches of 16 validation windows to search", ge=1)


def show_features(options):
    """Print the contexts of the features that fire most strongly, or write them to a page; print
    the numbers beside the baseline's; or export the autoencoder."""
    model, _ = load_model(options.ckpt, expect="sae")
    if options.to:
        export_sae_lens(model, options.to)
        print(f"Wrote {options.to}; load it with sae_lens.SAE.load_from_disk({options.to!r})")
        return
    tokenizer = model.backbone().tokenizer
    spec = model.spec
    tokens = DataLoader(options.data_dir or model.keys.data_dir, 16, spec["block_size"], "val",
                        vocab_size=spec["vocab_size"])
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
    if options.html:
        Path(options.html).write_text(PAGE.format(html.escape(options.ckpt), "\n".join(lines)),
                                      encoding="utf-8")
        print(f"Wrote {options.html}")
        return
    for line in lines:
        echo(line)


main = command(FeatureOptions, show_features)
