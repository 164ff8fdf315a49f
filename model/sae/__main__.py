"""Features of a sparse autoencoder: their texts, a baseline, and the export to sae-lens."""

import contextlib
import json
import os
from dataclasses import dataclass

import torch

from data.hub import model_name
from data.tokenizer import is_same_tokenizer, load_dataset_tokenizer
from model.core.load import BACKBONE, load_model
from model.sae.activations import N_SKIPPED
from train.base.cli import command, format_table
from train.base.errors import DataError, echo, quote_path
from train.base.fields import key
from train.base.files import write_text
from train.base.tensors import write_safetensors
from train.dataloader import DataLoader
from train.distributed import Ranks
from train.evaluate import evaluate

NUMBERS = ("explained_variance", "l0", "spliced_loss", "loss_recovered")  # beside the baseline


# -----------------------------------------------------------------------------
# sae-lens

def export_sae_lens(model, folder):
    """Write a model to `folder` in the format of sae_lens.SAE.load_from_disk().

    Writes cfg.json and sae_weights.safetensors. Centring and scaling become part of the weights;
    outliers are encoded there like all others. batchtopk is exported as jumprelu.
    """
    sae, c, spec = model.sae, model.keys, model.spec
    tensors = dict(W_enc=sae.W_enc * sae.scale, b_enc=sae.b_enc, W_dec=sae.decoder() / sae.scale,
                   b_dec=sae.b_dec / sae.scale + sae.mean)
    if hasattr(sae, "threshold"):
        tensors["threshold"] = sae.threshold.expand(c.d_sae)
    metadata = dict(model_name=model_name(c.backbone) if c.backbone else "",
                    hook_name=f"blocks.{c.layer}.hook_resid_post", prepend_bos=False,
                    context_size=spec["block_size"],
                    sae_lens_version="6.0.0")  # without it, the metadata would be discarded
    cfg = dict(architecture="topk" if c.sae == "topk" else "jumprelu", d_in=spec["d_in"],
               d_sae=c.d_sae, dtype="float32", device="cpu", apply_b_dec_to_input=True,
               normalize_activations="none", reshape_activations="none", metadata=metadata)
    if c.sae == "topk":
        cfg |= dict(k=c.k, rescale_acts_by_decoder_norm=False)
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
    """Return a table, rows of texts, with NUMBERS of a model and of random_directions().

    tokens: the loader, of which n_batches batches are used.
    """
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
    """Return (rates, values, windows, positions, ids): where the features are largest.

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


def format_context(row, position, tokenizer, n_before=40, n_after=12):
    """Return the text (ids without a tokenizer) around row[position], which is put in brackets.

    row (T,): token ids. n_before, n_after: tokens of context.
    """
    def decode(ids):
        ids = ids.tolist()
        return (tokenizer.decode(ids).replace("\n", "\\n") if tokenizer
                else " ".join(map(str, ids)))
    before = decode(row[max(0, position - n_before):position])
    token = decode(row[position:position + 1])
    after = decode(row[position + 1:position + 1 + n_after])
    return ("" if tokenizer else " ").join((before, f"[{token}]", after))


@dataclass
class FeatureOptions:
    """Show the texts in which features of a sparse autoencoder fire, or export it for sae-lens."""
    ckpt: str = key("out/sae/ckpt.pt", "checkpoint", path=True)
    backbone: str | None = key(None, BACKBONE, path=True)
    to: str | None = key(None, "export for sae-lens to this folder", metavar="FOLDER", path=True)
    baseline: bool = key(False, "compare the reconstruction with that of random directions")
    data_dir: str | None = key(None, "tokens to search (default: the run's)", path=True)
    features: int = key(5, "number of features to show", ge=1)
    contexts: int = key(5, "texts per feature", ge=1)
    batches: int = key(32, "batches of 16 validation windows to search", ge=1)


def show_features(options):
    """Print the texts in which the largest features fire.

    With options.to, export the autoencoder instead; else with options.baseline, compare it with
    random directions. Raises UserError if the checkpoint or the data cannot be used.
    """
    model, _ = load_model(options.ckpt, backbone=options.backbone, expect="sae")
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
    for f in value.mean(1).argsort(descending=True)[:options.features].tolist():
        echo(f"feature {f}: fires at {float(rate[f]):.2%} of the tokens")
        for v, w, p in zip(value[f].tolist(), window[f].tolist(), position[f].tolist()):
            if v > 0:  # the feature may fire at fewer tokens
                echo(f"  {v:8.2f}  {format_context(idx[w], p, tokenizer)}")


main = command(FeatureOptions, show_features)
