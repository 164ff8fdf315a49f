"""Evaluation of a classifier's checkpoint on test data: metrics, predictions, and a baseline."""

import json
import os
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch

from data import labels
from data.tokenizer import open_tokenizer
from model.classifier import metrics
from model.core.load import EMA, load_model
from train.base.checkpoint_file import load_checkpoint
from train.base.cli import command, format_table
from train.base.errors import DataError, echo, require
from train.base.fields import key, parse_mixture
from train.base.files import write_text
from train.distributed import get_device


@dataclass
class ReportOptions(labels.Fields):
    """Evaluate a classifier on its own test data, or on other files."""
    ckpt: str = key("out/classifier/ckpt_best.pt", "checkpoint", path=True, aliases="checkpoint")
    data: list[str] = key([], "files, or a folder of data.prepare.labels (default: the "
                          "run's)", nargs="+", metavar="PATH", text=True, aliases="dataset.path")
    split: str = key("test", "split of a folder, by the folds of the run if it has any",
                     choices=labels.SPLITS)
    out: str | None = key(None, "folder to write: metrics.json, predictions.jsonl (default: "
                          "report, beside the checkpoint)", metavar="FOLDER", path=True)
    baseline: bool = key(False, "also evaluate TF-IDF with logistic regression (scikit-learn)")
    ema: bool = key(False, EMA)
    batch_size: int = key(64, "rows per batch", ge=1)
    device: str = key("auto", "auto, cpu, cuda or mps")


def evaluate_checkpoint(args):
    """Print the metrics of the classifier args.ckpt on args.data, and write them to args.out.

    Writes metrics.json and predictions.jsonl. Changes args: empty args.data becomes the training
    run's first folder, and empty args.out the folder `report` next to the checkpoint. Raises
    UserError if the checkpoint or the data cannot be used, or if a package is missing.
    """
    model, tokenizer = load_model(args.ckpt, get_device(args.device), ema=args.ema,
                                  expect="classifier")
    data_dir = load_checkpoint(args.ckpt)["config"]["data_dir"]
    own_data = next(iter(parse_mixture(data_dir)), data_dir)
    args.data = args.data or [own_data]
    args.out = args.out or os.path.join(os.path.dirname(args.ckpt), "report")
    arrays, columns = load_rows(args, model, tokenizer)
    tokens, _, targets, truths = map(np.asarray, arrays)
    labelled = np.array([label is not None for label in columns["true_label"]])
    if args.baseline:
        require("sklearn", "--baseline", "scikit-learn")
        if model.head is None or not labelled.any():
            raise DataError(f"{', '.join(args.data)}: --baseline: no row has a label, or the "
                            "model predicts none")
    scores, spans = predict(model, arrays, args.batch_size)
    report = dict(rows=len(tokens))
    if scores is not None:
        classes = model.spec["classes"]
        columns["label"] = [classes[k] for k in scores.argmax(1)]
        columns["probability"] = [round(p, 4) for p in scores.max(1).tolist()]
        if labelled.any():
            labels.warn_if_few({"the data": labelled.sum()})
            y = targets[labelled]
            report |= rate_scores(y, scores[labelled]) | dict(classes=classes)
        if args.baseline:
            (_, _, known, _), train = load_folder(own_data, "train", model, tokenizer)
            texts = np.array(columns["text"], object)[labelled]
            report["baselines"] = fit_baselines(train["text"], known, texts, y, len(classes))
    if spans is not None:
        columns["evidence"] = [decode_spans(tokenizer, *pair) for pair in zip(tokens, spans)]
        sums = metrics.span_sums(torch.tensor(truths).double(), torch.tensor(spans).double())
        if sums["spans"]:
            report |= metrics.span_metrics(sums) | dict(spans=int(sums["spans"]))
    write_report(args.out, report, columns)
    echo(format_report(report))
    print(f"Wrote {os.path.join(args.out, 'predictions.jsonl')}; metrics.json has all metrics")


def write_report(out, report, columns):
    """Write metrics.json and predictions.jsonl, with a line per row, to the folder `out`.

    columns: {name: list with an element per row}; elements `None` and [] are left out.
    """
    lines = []
    for values in zip(*columns.values()):
        row = {name: value for name, value in zip(columns, values) if value not in (None, [])}
        lines.append(json.dumps(row, default=str) + "\n")
    text = json.dumps(report, indent=1, allow_nan=False)
    os.makedirs(out, exist_ok=True)
    write_text(os.path.join(out, "predictions.jsonl"), "".join(lines))
    write_text(os.path.join(out, "metrics.json"), text)


def load_rows(args, model, tokenizer):
    """Return (arrays, columns) of the rows in args.data: files, or a folder's split args.split.

    arrays: [tokens, lengths, labels, spans], see to_arrays() in data/labels.py.
    columns: {name: list with an element per row}: "id", "text", "true_label" (`None` if unknown)
    and "true_evidence", a list of texts.
    Raises DataError if the data are missing or invalid, or do not suit the model.
    """
    path = args.data[0]
    if len(args.data) > 1 and any(map(os.path.isdir, args.data)):
        raise DataError(f"--data: {', '.join(args.data)}: expected files, or one folder")
    if os.path.isdir(path):
        return load_folder(path, args.split, model, tokenizer)
    names = model.spec["classes"]
    classes = [labels.normalize_label(name) for name in names]
    rows = labels.read_labelled_texts(args.data, args)
    unknown = sorted({row.label for row in rows} - {None, *classes})
    if classes and unknown:
        raise DataError(f"{path}: unknown labels {', '.join(unknown[:5])}; the classes of the "
                        f"checkpoint are {', '.join(names)}")
    # With learned positions the model has a maximum length, to which texts are cut.
    limit = sys.maxsize if model.gpt.config.pos == "rope" else model.gpt.config.block_size
    arrays = labels.to_arrays(rows, tokenizer, classes, limit, framed="frame" in model.spec)
    columns = dict(id=[i if row.id is None else row.id for i, row in enumerate(rows)],
                   text=[row.text for row in rows], true_label=[row.label for row in rows],
                   true_evidence=[row.evidence for row in rows])
    return [arrays[name] for name in labels.ARRAYS], columns


def load_folder(folder, split, model, tokenizer):
    """Return the result of load_rows() for a split of a folder that data.prepare.labels wrote."""
    classes = model.spec["classes"]
    n_before, n_after = model.spec.get("frame", (0, 0))
    meta = labels.read_labels_meta(folder).extra
    is_same = meta["classes"] == classes and meta.get("frame", [0, 0]) == [n_before, n_after]
    if not is_same or open_tokenizer(folder).spec() != tokenizer.spec():
        raise DataError(f"{folder}: prepared with other classes, another tokenizer or another "
                        "version of this program than the checkpoint's data")
    tokens, lengths, targets, spans = arrays = labels.open_labels(folder, split, model.spec)
    texts = [tokenizer.decode(ids[n_before:n - n_after]) for ids, n in zip(tokens, lengths)]
    return arrays, dict(
        id=[*range(len(tokens))], text=texts,
        true_label=[classes[k] if classes else None for k in targets],
        true_evidence=[decode_spans(tokenizer, *pair) for pair in zip(tokens, spans)])


def decode_spans(tokenizer, ids, spans):
    """Return a list of the evidence's texts, in the order of the text.

    ids (T,): token ids. spans (2S,): first and last tokens, in any order, padded with -1.
    """
    pairs = sorted(zip(spans[::2], spans[1::2]))
    return [tokenizer.decode(ids[first:last + 1]) for first, last in pairs if first >= 0]


def rate_scores(targets, scores):
    """Return classification_metrics() and "ece", the calibration_error(); scores: probabilities."""
    return metrics.classification_metrics(targets, scores) | dict(
        ece=metrics.calibration_error(targets, scores))


def fit_baselines(known_texts, known, texts, targets, n_classes):
    """Evaluate logistic regressions on TF-IDF of words and of characters; return {name: metrics}.

    known_texts, known: training texts and class indices. texts, targets (N,): those to evaluate.
    metrics: of rate_scores(), and "seconds", the time for training and prediction.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    out = {}
    for name, options in (("words", {}), ("characters", dict(analyzer="char", ngram_range=(2, 5)))):
        started = time.perf_counter()
        vectorizer = TfidfVectorizer(**options, sublinear_tf=True)
        features = vectorizer.fit_transform(known_texts)
        regression = LogisticRegression(C=20, max_iter=1000).fit(features, known)
        scores = np.zeros((len(texts), n_classes))  # a class may have no training row
        scores[:, regression.classes_] = regression.predict_proba(vectorizer.transform(texts))
        seconds = time.perf_counter() - started
        out[f"TF-IDF, {name}"] = rate_scores(targets, scores) | dict(seconds=seconds)
    return out


@torch.no_grad()
def predict(model, arrays, batch_size):
    """Return a Classifier's (probabilities (N, K), spans (N, 2S)), numpy arrays or `None`.

    arrays: tokens (N, T), lengths (N,), ...; further ones are ignored.
    spans: first and last token of each, padded with -1. `None`: not predicted by the model.
    With rotary positions, the model's block_size and rotary table grow in place for longer texts.
    """
    tokens, lengths, *_ = arrays
    gpt = model.gpt
    device = gpt.wte.weight.device
    if gpt.config.pos == "rope":  # positions for longer texts than in training
        gpt.config.block_size = max(gpt.config.block_size, int(max(lengths)))
        gpt.add_buffers(None)
        gpt.to(device)
    parts = []
    for start in range(0, len(tokens), batch_size):
        n = torch.from_numpy(np.array(lengths[start:start + batch_size], np.int64))  # (B,)
        batch = torch.from_numpy(tokens[start:start + batch_size, :n.max()].astype(np.int64))
        parts.append(model(batch.to(device), n.to(device)))
    scores, spans = zip(*parts)
    return (None if model.head is None else torch.cat(scores).cpu().double().softmax(1).numpy(),
            None if model.end is None else torch.cat(spans).cpu().numpy())


def format_report(m):
    """Return a report of m, the content of metrics.json, as text; parts not in it are omitted."""
    parts = []
    if "accuracy" in m:
        n_rows = sum(m["support"])
        columns = [["", *m["classes"], "macro mean", "weighted mean"]]
        for name in ("precision", "recall", "f1"):
            values = [*m[f"{name}_per_class"], m[f"{name}_macro"], m[f"{name}_weighted"]]
            columns.append([name, *(f"{value:.4f}" for value in values)])
        columns.append(["rows", *(f"{n:,}" for n in (*m["support"], n_rows, n_rows))])
        area = "undefined" if m["auroc"] is None else f"{m['auroc']:.4f}"
        matrix = [[name, *map(str, row)] for name, row in zip(m["classes"], m["confusion_matrix"])]
        parts = [format_table([*zip(*columns)]),
                 f"accuracy {m['accuracy']:.4f}, AUROC {area}, ECE {m['ece']:.4f}",
                 "confusion matrix:",
                 format_table([["true \\ predicted", *m["classes"]], *matrix])]
    if "baselines" in m:
        table = [["", "macro F1", "accuracy", "ECE"]]
        for name, b in {"this model": m, **m["baselines"]}.items():
            table.append([name, *(f"{b[n]:.4f}" for n in ("f1_macro", "accuracy", "ece"))])
        parts.append(format_table(table))
    if "exact_match" in m:
        parts.append(f"evidence of {m['spans']:,} rows: exact match {m['exact_match']:.4f}, token "
                     f"F1 {m['token_f1']:.4f}")
    return "\n".join(parts)


main = command(ReportOptions, evaluate_checkpoint)
