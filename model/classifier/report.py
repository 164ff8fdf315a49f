"""A classifier's checkpoint on other data: its numbers, a picture and a line for each row."""

import argparse
import json
import os
import sys
from html import escape

import numpy as np
import torch

from data.prepare.labels import ARRAYS, Fields, add_field_options, label_name, read_rows, to_arrays
from data.tokenizer import open_folder_tokenizer
from model.classifier.metrics import classification_metrics, place_metrics, span_metrics
from model.classifier.model import load_split, read_labels_meta
from train.base.cli import run_command
from train.base.errors import DataError, UsageError, echo

# -----------------------------------------------------------------------------
# as a person sees it

def report_text(metrics, classes):
    """The metrics as a person reads them, in the shape of scikit-learn's classification_report."""
    lines = []
    if "accuracy" in metrics:
        wide = max(13, *map(len, classes))
        support, n = metrics["support"], sum(metrics["support"])

        def line(name, values, rows):
            return f"{name:>{wide}}" + "".join(f"{v:>11.4f}" for v in values) + f"{rows:>10,}"
        names = ("precision", "recall", "f1")
        lines = [" " * wide + "".join(f"{name:>11}" for name in names) + f"{'rows':>10}"]
        lines += [line(name, [metrics[f"{m}_per_class"][k] for m in names], support[k])
                  for k, name in enumerate(classes)]
        lines += [line(f"{kind} mean", [metrics[f"{m}_{kind}"] for m in names], n)
                  for kind in ("macro", "weighted")]
        area = "unknown" if metrics["auroc"] is None else f"{metrics['auroc']:.4f}"
        lines += [f"accuracy {metrics['accuracy']:.4f}, AUROC {area}"]
    if "exact_match" in metrics:
        lines += [f"evidence of {metrics['spans']:,} rows: exact match "
                  f"{metrics['exact_match']:.4f}, token F1 {metrics['token_f1']:.4f}; as SQuAD "
                  f"compares words: {metrics['words_exact_match']:.4f}, "
                  f"{metrics['words_token_f1']:.4f}"]
    return "\n".join(lines)


def confusion_svg(matrix, classes, title):
    """An SVG text: rows the truth, columns what was said, darker where more of the row."""
    K, cell = len(classes), 64
    left = 24 + 7 * max(map(len, classes))
    top, size = 56 + left // 2, K * cell
    width = max(320, left + size + left // 2 + 24)  # of the title at least
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} '
           f'{top + size + 24}" font-family="system-ui, sans-serif" font-size="13" fill="#1f2328">'
           f'<rect width="100%" height="100%" fill="#fff"/><text x="16" y="26" font-size="15" '
           f'font-weight="600">{escape(title)}</text>'
           '<text x="16" y="44" fill="#59636e">rows: truth, columns: prediction</text>']
    for i, (name, row) in enumerate(zip(classes, matrix)):
        y, x = top + i * cell, left + (i + 0.5) * cell
        out.append(f'<text x="{left - 10}" y="{y + cell / 2 + 4}" text-anchor="end">{escape(name)}'
                   f'</text><text transform="translate({x - 4} {top - 8}) rotate(-30)">'
                   f"{escape(name)}</text>")
        for j, n in enumerate(row):
            share = n / max(1, sum(row))
            out.append(f'<rect x="{left + j * cell}" y="{y}" width="{cell - 2}" '
                       f'height="{cell - 2}" fill="#0072b2" '
                       f'fill-opacity="{0.04 + 0.96 * share:.3f}"/><text '
                       f'x="{left + (j + 0.5) * cell - 1}" y="{y + cell / 2 + 4}" '
                       f'text-anchor="middle" fill="{"#fff" if share > 0.5 else "#1f2328"}">{n:,}'
                       "</text>")
    return "".join(out) + "</svg>\n"


# -----------------------------------------------------------------------------
# the command line: a checkpoint on other data

def load_rows(args, spec, tokenizer, limit=None):
    """(arrays in the order of ARRAYS, what is known of each row: a dict of its text and, where it
    has them, id, true_label and true_evidence) of --data. limit: tokens of a text, where positions
    have weights."""
    path, K = args.data[0], len(spec["classes"])
    if os.path.isdir(path):
        if read_labels_meta(path)["classes"] != spec["classes"]:
            raise DataError(f"{path}: has other classes than the checkpoint's: "
                            f"{', '.join(spec['classes'])}")
        arrays = load_split(path, args.split, spec)
        tokens = arrays[0]
        same = open_folder_tokenizer(path).spec() == tokenizer.spec()
        if not same or tokens.shape[1] > (limit or sys.maxsize) or not len(tokens):
            raise DataError(f"{path}: {args.split} has no rows, or was prepared with another "
                            "tokenizer or --max_tokens than the checkpoint's data")
        return arrays, [dict(
            text=tokenizer.decode(row[:n]), true_label=spec["classes"][label] if K else None,
            true_evidence=tokenizer.decode(row[a:b + 1]) if a >= 0 else None)
            for row, n, label, (a, b) in zip(*arrays)]
    rows = read_rows(args.data, Fields(args.text, args.label, args.evidence, args.start, args.end))
    classes = [label_name(name) for name in spec["classes"]]
    unknown = sorted({row.label for row in rows} - {None, *classes})
    if K and unknown:
        raise DataError(f"{path}: the checkpoint does not know the labels "
                        f"{', '.join(unknown[:5])}; its classes are {', '.join(spec['classes'])}")
    arrays = to_arrays(rows, tokenizer, classes, limit or sys.maxsize)
    sizes = np.array([len(tokenizer.encode_array(row.text)) for row in rows])
    for longest, what in ((limit, "were cut to the learned positions of the model"),
                          (spec["max_tokens"], "are longer than all that it learned from")):
        if longest and (n := int((sizes > longest).sum())):
            print(f"{n:,} of {len(rows):,} texts {what}, {longest:,} tokens", file=sys.stderr)
    return [arrays[n] for n in ARRAYS], [dict(
        id=row.id, text=row.text, true_label=row.label, true_evidence=row.evidence) for row in rows]


@torch.no_grad()
def predict(model, arrays, batch_size, device):
    """(probabilities (N, K) or None, spans (N, 2) or None) of rows, as numpy arrays. Rows of about
    one length are computed together, fewer where they are longer than those of training."""
    parts, lengths = [], np.asarray(arrays[1])
    order, done = np.argsort(lengths, kind="stable"), 0
    model.widen(int(lengths.max()))
    while done < len(order):
        longest = int(lengths[order[done:done + batch_size]].max())
        fewer = max(1, batch_size * model.spec["max_tokens"] // max(longest, 1))
        rows = order[done:done + min(batch_size, fewer)]
        tokens = torch.from_numpy(arrays[0][rows, :lengths[rows].max()].astype(np.int64))
        scores, spans = model(tokens.to(device), torch.from_numpy(lengths[rows]).to(device))
        parts.append((None if scores is None else scores.double().softmax(1).cpu().numpy(),
                      None if spans is None else spans.cpu().numpy()))
        done += len(rows)
    back = order.argsort()
    return [None if p[0] is None else np.concatenate(p)[back] for p in zip(*parts)]


def evaluate(args):
    """Everything the command does. Raises UserError or ValueError."""
    from model.core.load import load_model
    from train.distributed import get_device
    device = get_device(args.device)
    model, tokenizer = load_model(args.ckpt, device)
    if not hasattr(model, "find"):
        raise DataError(f"{args.ckpt}: a {type(model).__name__}, no classifier")
    spec = model.spec
    limit = None if model.gpt.config.pos == "rope" else model.gpt.config.block_size
    arrays, rows = load_rows(args, spec, tokenizer, limit)
    labelled = np.array([row["true_label"] is not None for row in rows])
    scores, spans = predict(model, arrays, args.batch_size, device)
    metrics, said = dict(rows=len(arrays[0])), None
    if scores is not None and labelled.any():
        metrics |= classification_metrics(np.asarray(arrays[2])[labelled], scores[labelled])
        metrics["classes"] = spec["classes"]
    if spans is not None:
        said = [tokenizer.decode(row[a:b + 1]) for row, (a, b) in zip(arrays[0], spans)]
        pairs = [(row["true_evidence"], guess) for row, guess in zip(rows, said)
                 if row["true_evidence"] is not None]
        metrics |= place_metrics(np.asarray(arrays[3]), spans)
        words = span_metrics(*zip(*pairs)) if pairs else {}
        metrics |= {f"words_{name}": n for name, n in words.items() if name != "spans"}
    write(args.out, metrics, spec["classes"], rows, scores, said)
    return metrics, spec["classes"]


def write(out, metrics, classes, rows, scores, said):
    """metrics.json, confusion.svg and predictions.jsonl, a line a row, in the folder `out`."""
    os.makedirs(out, exist_ok=True)
    with open(os.path.join(out, "metrics.json"), "w", encoding="utf-8") as f:
        json.dump(metrics, f, indent=1, allow_nan=False)
    if "confusion_matrix" in metrics:
        with open(os.path.join(out, "confusion.svg"), "w", encoding="utf-8") as f:
            f.write(confusion_svg(metrics["confusion_matrix"], classes,
                                  f"accuracy {metrics['accuracy']:.3f}, "
                                  f"macro F1 {metrics['f1_macro']:.3f}"))
    with open(os.path.join(out, "predictions.jsonl"), "w", encoding="utf-8") as f:
        for i, row in enumerate(rows):  # without an id its number
            row = {"id": i} | {name: v for name, v in row.items() if v is not None}
            if scores is not None:
                row |= dict(label=classes[scores[i].argmax()],
                            probability=round(float(scores[i].max()), 4))
            row |= {} if said is None else dict(evidence=said[i])
            f.write(json.dumps(row, default=str) + "\n")


def main(argv=None):
    """The command line; the exit code."""
    p = argparse.ArgumentParser("python -m model.classifier", allow_abbrev=False,
                                description="Evaluate a classifier on other data.")
    p.add_argument("--ckpt", default="out/classifier/ckpt_best.pt", help="(default: %(default)s)")
    p.add_argument("--data", required=True, nargs="+", metavar="PATH",
                   help=".jsonl, .csv or .tsv files, with or without labels, or a folder of "
                   "data.prepare.labels")
    p.add_argument("--split", choices=["train", "val", "test"], default="test",
                   help="of a folder (default: %(default)s)")
    p.add_argument("--out", required=True, metavar="FOLDER", help="where metrics.json, "
                   "confusion.svg and predictions.jsonl go")
    p.add_argument("--batch_size", type=int, default=64, help="rows at once (default: %(default)s)")
    p.add_argument("--device", default="auto", help="auto, cpu, cuda, mps")
    add_field_options(p)
    return run_command(p, report, argv)


def report(args):
    """Evaluate as the command line asks, and print the report."""
    if args.batch_size < 1:
        raise UsageError(f"--batch_size must be at least 1, got {args.batch_size}")
    metrics, classes = evaluate(args)
    echo(report_text(metrics, classes))
    name = "confusion.svg" if "confusion_matrix" in metrics else "predictions.jsonl"
    print(f"Next: open {os.path.join(args.out, name)}, metrics.json beside it has all")

