"""Evaluation of a classifier's checkpoint on other data: metrics, a picture, and predictions."""

import json
import os
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
import torch

from data import labels
from data.tokenizer import open_tokenizer
from model.classifier.metrics import classification_metrics, span_metrics, span_sums, squad_metrics
from train.base.cli import run_command
from train.base.errors import DataError, echo
from train.base.fields import key

CELL = 64  # width of a cell of the confusion matrix, in pixels


@dataclass
class ReportOptions(labels.Fields):
    """Evaluate a classifier on other data."""
    ckpt: str = key("out/classifier/ckpt_best.pt", "checkpoint", metavar="FILE", path=True)
    data: list[str] = key([], "files (.jsonl, .csv, .tsv, ...), with or without labels, or one "
                          "folder of data.prepare.labels", required=True, nargs="+",
                          metavar="PATH", text=True)
    split: str = key("test", "split of a folder", choices=labels.SPLITS)
    out: str = key("", "folder to write: metrics.json, confusion.svg, predictions.jsonl",
                   required=True, metavar="FOLDER", path=True)
    batch_size: int = key(64, "rows per batch", ge=1)
    device: str = key("auto", "auto, cpu, cuda or mps")


def evaluate_checkpoint(args):
    """Evaluate a checkpoint, write the files to --out and print the report."""
    from model.core.load import load_model
    from train.distributed import get_device
    device = get_device(args.device)
    model, tokenizer = load_model(args.ckpt, device)
    if type(model).__name__ != "Classifier":
        raise DataError(f"{args.ckpt}: a {type(model).__name__}, not a classifier")
    arrays, rows = load_rows(args, model, tokenizer)
    scores, spans = predict(model, arrays, args.batch_size, device)
    tokens, _, targets, truths = map(np.asarray, arrays)
    classes, metrics, evidence = model.spec["classes"], dict(rows=len(tokens)), None
    labelled = np.array([row["true_label"] is not None for row in rows])
    if scores is not None and labelled.any():
        metrics |= classification_metrics(targets[labelled], scores[labelled])
        metrics["classes"] = classes
    if spans is not None:
        evidence = [tokenizer.decode(row[a:b + 1]) for row, (a, b) in zip(tokens, spans)]
        sums = span_sums(torch.tensor(truths).double(), torch.tensor(spans).double())
        if sums["spans"]:
            metrics |= span_metrics(sums) | dict(spans=int(sums["spans"]))
        known = [(row["true_evidence"], text) for row, text in zip(rows, evidence)
                 if row["true_evidence"] is not None]
        words = squad_metrics(*zip(*known)) if known else {}
        metrics |= {f"words_{name}": value for name, value in words.items()}
    write_report(args.out, metrics, classes, rows, scores, evidence)
    echo(format_report(metrics))
    name = "confusion.svg" if "confusion_matrix" in metrics else "predictions.jsonl"
    print(f"Next: open {os.path.join(args.out, name)}; metrics.json has all metrics")


# -----------------------------------------------------------------------------
# data and predictions

def load_rows(args, model, tokenizer):
    """Return (the arrays of --data in the order of ARRAYS, [{"text", "true_label",
    "true_evidence", perhaps "id"} of each row]). Raises DataError."""
    path, spec = args.data[0], model.spec
    # With learned positions the model has a maximum length.
    limit = sys.maxsize if model.gpt.config.pos == "rope" else model.gpt.config.block_size
    if os.path.isdir(path):
        meta = labels.read_labels_meta(path)
        if meta.extra["classes"] != spec["classes"]:
            raise DataError(f"{path}: the classes differ from the checkpoint's: "
                            f"{', '.join(spec['classes'])}")
        arrays = labels.open_labels(path, args.split, spec | dict(vocab_size=meta.vocab_size))
        same = open_tokenizer(path).spec() == tokenizer.spec()
        if not same or arrays[0].shape[1] > limit or not len(arrays[0]):
            raise DataError(f"{path}: {args.split} has no rows, or was prepared with a different "
                            "tokenizer or --max_tokens than the checkpoint's data")
        return arrays, [dict(
            text=tokenizer.decode(row[:n]),
            true_label=spec["classes"][label] if spec["classes"] else None,
            true_evidence=tokenizer.decode(row[a:b + 1]) if a >= 0 else None)
            for row, n, label, (a, b) in zip(*arrays)]
    rows = labels.read_labelled_texts(args.data, args)
    classes = [labels.normalize_label(name) for name in spec["classes"]]
    if classes and (unknown := sorted({row.label for row in rows} - {None, *classes})):
        raise DataError(f"{path}: unknown labels {', '.join(unknown[:5])}; the classes of the "
                        f"checkpoint are {', '.join(spec['classes'])}")
    arrays = labels.to_arrays(rows, tokenizer, classes, limit)
    lengths = np.array([len(tokenizer.encode_array(row.text)) for row in rows])
    for length, problem in ((limit, "were cut to the learned positions of the model"),
                            (spec["max_tokens"], "are longer than all training texts")):
        if n := int((lengths > length).sum()):
            print(f"{n:,} of {len(rows):,} texts {problem}, {length:,} tokens", file=sys.stderr)
    return [arrays[name] for name in labels.ARRAYS], [
        dict(id=row.id, text=row.text, true_label=row.label, true_evidence=row.evidence)
        for row in rows]


@torch.no_grad()
def predict(model, arrays, batch_size, device):
    """Return (probabilities (N, K) or `None`, spans (N, 2) or `None`) as numpy arrays. A batch
    has rows of similar lengths, fewer if these are longer than the training texts."""
    lengths = np.asarray(arrays[1])
    order, parts, done = np.argsort(lengths, kind="stable"), [], 0
    model.widen(int(lengths.max()))
    while done < len(order):
        longest = int(lengths[order[done:done + batch_size]].max())
        size = max(1, batch_size * model.spec["max_tokens"] // max(longest, 1))
        rows = order[done:done + min(batch_size, size)]
        tokens = torch.from_numpy(arrays[0][rows, :lengths[rows].max()].astype(np.int64))
        scores, spans = model(tokens.to(device), torch.from_numpy(lengths[rows]).to(device))
        parts.append((None if scores is None else scores.double().softmax(1).cpu().numpy(),
                      None if spans is None else spans.cpu().numpy()))
        done += len(rows)
    unsorted = order.argsort()
    return [None if p[0] is None else np.concatenate(p)[unsorted] for p in zip(*parts)]


# -----------------------------------------------------------------------------
# output

def format_report(metrics):
    """Return a text like scikit-learn's classification_report."""
    m, lines = metrics, []
    if "accuracy" in m:
        width = max(13, *map(len, m["classes"]))
        names = ("precision", "recall", "f1")
        table = [(c, [m[f"{name}_per_class"][k] for name in names], m["support"][k])
                 for k, c in enumerate(m["classes"])]
        table += [(f"{kind} mean", [m[f"{name}_{kind}"] for name in names], sum(m["support"]))
                  for kind in ("macro", "weighted")]
        lines = [" " * width + "".join(f"{name:>11}" for name in names) + f"{'rows':>10}"]
        lines += [f"{name:>{width}}" + "".join(f"{v:>11.4f}" for v in values) + f"{rows:>10,}"
                  for name, values, rows in table]
        area = "undefined" if m["auroc"] is None else f"{m['auroc']:.4f}"
        lines.append(f"accuracy {m['accuracy']:.4f}, AUROC {area}")
    if "exact_match" in m:
        lines.append(f"evidence of {m['spans']:,} rows: exact match {m['exact_match']:.4f}, token "
                     f"F1 {m['token_f1']:.4f}; words as in SQuAD: {m['words_exact_match']:.4f}, "
                     f"{m['words_token_f1']:.4f}")
    return "\n".join(lines)


def confusion_svg(matrix, classes, title):
    """Return an SVG image of a confusion matrix: one row per true class, one column per predicted
    class, each cell coloured by the share of the row."""
    left, size = 24 + 7 * max(map(len, classes)), CELL * len(classes)
    top = 56 + left // 2
    cells = []
    for i, (name, row) in enumerate(zip(map(escape, classes), matrix)):
        y = i * CELL
        cells.append(f'<text x="-10" y="{y + 36}" text-anchor="end">{name}</text>'
                     f'<text transform="translate({y + 28} -8) rotate(-30)">{name}</text>')
        for j, n in enumerate(row):
            x, share = j * CELL, n / max(1, sum(row))
            cells.append(f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" '
                         f'fill="#0072b2" fill-opacity="{0.04 + 0.96 * share:.3f}"/>'
                         f'<text x="{x + 31}" y="{y + 36}" text-anchor="middle" '
                         f'fill="{"#fff" if share > 0.5 else "#000"}">{n:,}</text>')
    return ('<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="13" '
            f'viewBox="0 0 {max(320, 2 * left + size)} {top + size + 24}">'
            '<rect width="100%" height="100%" fill="#fff"/>'
            f'<text x="16" y="26" font-size="15">{escape(title)}</text>'
            '<text x="16" y="44">rows: true class, columns: predicted class</text>'
            f'<g transform="translate({left} {top})">{"".join(cells)}</g></svg>\n')


def write_report(folder, metrics, classes, rows, scores, evidence):
    """Write metrics.json, confusion.svg (for labelled data) and predictions.jsonl."""
    contents = {"metrics.json": json.dumps(metrics, indent=1, allow_nan=False)}
    if "confusion_matrix" in metrics:
        title = f"accuracy {metrics['accuracy']:.3f}, macro F1 {metrics['f1_macro']:.3f}"
        contents["confusion.svg"] = confusion_svg(metrics["confusion_matrix"], classes, title)
    lines = []
    for i, row in enumerate(rows):  # the default id is the number of the row
        row = {"id": i} | {name: value for name, value in row.items() if value is not None}
        if scores is not None:
            row["label"] = classes[scores[i].argmax()]
            row["probability"] = round(float(scores[i].max()), 4)
        if evidence is not None:
            row["evidence"] = evidence[i]
        lines.append(json.dumps(row, default=str) + "\n")
    contents["predictions.jsonl"] = "".join(lines)
    os.makedirs(folder, exist_ok=True)
    for name, text in contents.items():
        Path(folder, name).write_text(text, encoding="utf-8")


def main(argv=None):
    return run_command(ReportOptions, evaluate_checkpoint, argv, prog="model.classifier")
