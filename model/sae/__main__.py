"""Features of a sparse autoencoder: their texts, a baseline, and the export to sae-lens."""

import contextlib
import html
import json
import os
from dataclasses import dataclass

import torch

from data.hub import model_name
from data.tokenizer import is_same_tokenizer, load_dataset_tokenizer
from model.core.load import BACKBONE, load_model
from model.sae.activations import N_SKIPPED
from train.base.cli import command, format_table
from train.base.errors import ConfigError, DataError, echo, quote_path
from train.base.fields import key
from train.base.files import write_text
from train.base.tensors import write_safetensors
from train.dataloader import DataLoader
from train.distributed import Ranks
from train.evaluate import evaluate

# sae-lens's name of an autoencoder and of a transcoder; for all others those of jumprelu.
SAE_LENS = dict(topk=("topk", None), relu=("standard", "transcoder"))
NUMBERS = ("explained_variance", "l0", "spliced_loss", "loss_recovered")  # beside the baseline
PAGE = """<!DOCTYPE html><meta charset="utf-8"><meta name="color-scheme" content="light dark">
<title>Features of {0}</title>
<h1>Features of {0}</h1>
<pre style="font-size: 14px; line-height: 1.6; white-space: pre-wrap; overflow-wrap: anywhere">{1}
</pre>
"""


# -----------------------------------------------------------------------------
# sae-lens

def export_sae_lens(model, folder):
    """Write a model of one layer to `folder` in the format of sae_lens.SAE.load_from_disk().

    Writes cfg.json and sae_weights.safetensors. Centring and scaling become part of the weights;
    outliers are encoded there like all others. batchtopk is exported as jumprelu. Raises
    ConfigError for a transcoder with topk, which sae-lens does not have.
    """
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
    # Names of TransformerBridge. Not ln2.hook_normalized, which is before the weights of the norm.
    hook, hook_out = f"blocks.{c.layer[0]}.hook_resid_post", f"blocks.{c.target}.hook_resid_post"
    if c.target == "mlp":
        hook, hook_out = (f"blocks.{c.layer[0]}.{name}" for name in ("mlp.hook_in", "hook_mlp_out"))
    metadata = dict(model_name=model_name(c.backbone) if c.backbone else "", hook_name=hook,
                    prepend_bos=False, context_size=spec["block_size"],
                    sae_lens_version="6.0.0")  # without it, the metadata would be discarded
    cfg = dict(architecture=architecture, d_in=spec["d_in"], d_sae=c.d_sae, dtype="float32",
               device="cpu", apply_b_dec_to_input=not is_transcoder, metadata=metadata,
               normalize_activations="none", reshape_activations="none")
    if c.sae == "topk":
        cfg |= dict(k=c.k, rescale_acts_by_decoder_norm=False)
    if is_transcoder:
        tensors["b_enc"] = sae.b_enc - mean[:spec["d_in"]] @ tensors["W_enc"]  # not of x - b_dec
        cfg["d_out"] = spec["d_in"]
        metadata["hook_name_out"] = hook_out
    os.makedirs(folder, exist_ok=True)
    write_safetensors(os.path.join(folder, "sae_weights.safetensors"), tensors)
    write_text(os.path.join(folder, "cfg.json"), json.dumps(cfg, indent=1))


# -----------------------------------------------------------------------------
# the baseline

def random_directions(model, k):
    """Return an SAEModel of random directions, the k nearest per activation (arXiv:2602.14111)."""
    c = model.keys.replace(sae="topk", k=k, auxk=0, prefixes=[])
    baseline = type(model)(c, model.spec, model.backbone()).eval()
    W = baseline.sae.W_dec  # (F, C)

    def features(x):
        index = (x @ W.T).abs().topk(k).indices  # (N, k)
        weights = torch.linalg.lstsq(W[index].mT, x[..., None]).solution[..., 0]  # (N, k)
        return x, x.new_zeros(len(x), c.d_sae).scatter(1, index, weights)

    baseline.sae.features = features
    return baseline


def compare_with_random(model, tokens, n_batches):
    """Return a table, rows of texts, with NUMBERS of a one-layer model and of random_directions().

    tokens: the loader, of which n_batches batches are used. Raises ConfigError for a transcoder.
    """
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
    """Return (rates, values, windows, positions, ids): where the features of one layer are largest.

    tokens: the loader, of which n_batches validation batches are searched.
    rates (F,): the share of tokens at which each feature fires. values (F, n_contexts): the largest
    values, descending, at most one per window; fewer columns if there are fewer windows.
    windows, positions (F, n_contexts): rows and columns of these tokens in ids (windows, T).
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
    """Return the text (ids without a tokenizer) around row[position], which is put in `marks`.

    row (T,): token ids. n_before, n_after: tokens of context. escape(text): applied to each part.
    """
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
    to: str | None = key(None, "export for sae-lens to this folder", metavar="FOLDER", path=True)
    html: str | None = key(None, "write the features to this page", path=True)
    baseline: bool = key(False, "compare the reconstruction with that of random directions")
    data_dir: str | None = key(None, "tokens to search (default: the run's)", path=True)
    features: int = key(5, "number of features to show", ge=1)
    contexts: int = key(5, "texts per feature", ge=1)
    batches: int = key(32, "batches of 16 validation windows to search", ge=1)


def show_features(options):
    """Print the texts in which the largest features fire, or write them to options.html.

    With options.to, export the autoencoder instead; else with options.baseline, compare it with
    random directions. Raises UserError if the checkpoint or the data cannot be used.
    """
    model, _ = load_model(options.ckpt, backbone=options.backbone, expect="sae")
    model = model.of_layer(model.keys.layer[0] if options.layer is None else options.layer)
    if options.to:
        export_sae_lens(model, options.to)
        print(f"Wrote {options.to}; load it with sae_lens.SAE.load_from_disk({options.to!r})")
        return
    tokenizer = model.backbone().tokenizer
    folder = options.data_dir or model.keys.data_dir
    tokens = DataLoader(folder, 16, model.spec["block_size"], "val",
                        vocab_size=model.spec["vocab_size"])
    theirs, own = model.spec.get("tokenizer"), load_dataset_tokenizer(folder)
    if theirs and own and not is_same_tokenizer(theirs, own.spec()):
        raise DataError(f"{folder}: its tokenizer is not that of the training data; prepare the "
                        f"text with --tokenizer {quote_path(model.keys.backbone)}")
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
            if v > 0:  # the feature may fire at fewer tokens
                lines.append(f"  {v:8.2f}  {format_context(idx[w], p, tokenizer, **style)}")
    text = "\n".join(lines)
    if options.html:
        page = PAGE.format(html.escape(f"{options.ckpt}, layer {model.keys.layer[0]}"), text)
        write_text(options.html, page)
        text = f"Wrote {options.html}"
    echo(text)


main = command(FeatureOptions, show_features)
