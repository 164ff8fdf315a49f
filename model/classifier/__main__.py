"""Evaluation of a classifier's checkpoint on test data: metrics, predictions, and a baseline."""

import json
import os
import sys
import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from data import labels
from data.rows import pad_rows
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
    data: list[str] = key([], "files, or a folder of data.prepare.labels (default: the run's "
                          "first)", nargs="+", metavar="PATH", text=True, aliases="dataset.path")
    split: str = key("test", "split of a folder, by the folds of the run if it has any",
                     choices=labels.SPLITS)
    out: str | None = key(None, "folder to write: metrics.json, predictions.jsonl (default: "
                          "report, beside the checkpoint)", metavar="FOLDER", path=True)
    baseline: bool = key(False, "also evaluate TF-IDF with logistic regression (scikit-learn)")
    ema: bool = key(False, EMA)
    batch_size: int = key(64, "rows per batch", ge=1)
    device: str = key("auto", "auto, cpu, cuda or mps")


def evaluate_checkpoint(args):
    """Evaluate the classifier args.ckpt on args.data: write metrics.json and predictions.jsonl to
    the folder args.out, and print the report. args: a ReportOptions; in place, empty args.data is
    set to the first folder of the training run, and empty args.out to the folder `report` of the
    checkpoint's folder. Raises UserError if the checkpoint or the data cannot be used."""
    model, tokenizer = load_model(args.ckpt, get_device(args.device), ema=args.ema,
                                  expect="classifier")
    # Absolute: if the folder is gone, the name data/reviews would be that of a data set of the hub.
    data_dir = load_checkpoint(args.ckpt)["config"]["data_dir"]
    own_data = os.path.abspath(next(iter(parse_mixture(data_dir)), data_dir))
    args.data = args.data or [own_data]
    args.out = args.out or os.path.join(os.path.dirname(args.ckpt), "report")
    arrays, rows = load_rows(args, model, tokenizer)
    labelled = np.array([row["true_label"] is not None for row in rows])
    if args.baseline:
        require("sklearn", "--baseline", "scikit-learn")
        if model.head is None or not labelled.any():
            raise DataError(f"{', '.join(args.data)}: --baseline: no row has a label, or the "
                            "model predicts none")
    scores, spans = predict(model, arrays, args.batch_size)
    tokens, _, targets, truths = map(np.asarray, arrays)
    report = dict(rows=len(rows))
    if scores is not None:
        temperature = calibrate(args, own_data, model, tokenizer)
        calibrated = metrics.scale(scores, temperature)
        classes = model.spec["classes"]
        report["temperature"] = temperature
        for row, p, q in zip(rows, scores, calibrated):
            row |= dict(label=classes[p.argmax()], probability=round(float(p.max()), 4),
                        calibrated=round(float(q.max()), 4))
        if labelled.any():
            labels.warn_if_few({"the data": labelled.sum()})
            y = targets[labelled]
            report |= rate_scores(y, scores[labelled]) | dict(classes=classes)
            report["ece_calibrated"] = metrics.calibration_error(y, calibrated[labelled])
        if args.baseline:
            known = load_rows(replace(args, data=[own_data], split="train"), model, tokenizer)
            texts = [row["text"] for row in rows if row["true_label"] is not None]
            report["baselines"] = fit_baselines(*known, texts, y, len(classes))
    if spans is not None:
        for row, ids, found in zip(rows, tokens, spans):
            row["evidence"] = one_or_all(decode_spans(tokenizer, ids, found), spans.shape[1] > 2)
        sums = metrics.span_sums(torch.tensor(truths).double(), torch.tensor(spans).double())
        if sums["spans"]:
            report |= metrics.span_metrics(sums) | dict(spans=int(sums["spans"]))
        if scores is not None:
            report |= faithfulness(model, arrays, scores, spans, args.batch_size)
    lines = [json.dumps({name: v for name, v in row.items() if v is not None}, default=str) + "\n"
             for row in rows]
    os.makedirs(args.out, exist_ok=True)
    path = os.path.join(args.out, "predictions.jsonl")
    write_text(path, "".join(lines))
    text = json.dumps(report, indent=1, allow_nan=False)
    write_text(os.path.join(args.out, "metrics.json"), text)
    echo(format_report(report))
    print(f"Wrote {path}; metrics.json has all metrics")


def load_rows(args, model, tokenizer):
    """Read the rows of args.data: files of labelled texts, or the split args.split of a folder that
    data.prepare.labels wrote. Return (arrays, rows). arrays: [tokens, lengths, labels, spans], as
    of to_arrays() in data/labels.py. rows: a list of dicts with "id", "text", "true_label" (`None`
    if unknown) and "true_evidence", the result of one_or_all(). args: a ReportOptions; model: the
    Classifier. Raises DataError if the data are missing or invalid, or do not suit the model."""
    path = args.data[0]
    names = model.spec["classes"]
    frame = model.spec.get("frame", (0, 0))
    if len(args.data) > 1 and any(map(os.path.isdir, args.data)):
        raise DataError(f"--data: {', '.join(args.data)}: expected files, or one folder")
    if os.path.isdir(path):
        meta = labels.read_labels_meta(path).extra
        is_same = meta["classes"] == names and meta.get("frame", [0, 0]) == [*frame]
        if not is_same or open_tokenizer(path).spec() != tokenizer.spec():
            raise DataError(f"{path}: prepared with other classes, another tokenizer or another "
                            "version of this program than the checkpoint's data")
        arrays = labels.open_labels(path, args.split, model.spec)
        n_before, n_after = frame
        return arrays, [dict(
            id=i, text=tokenizer.decode(row[n_before:n - n_after]),
            true_label=names[label] if names else None,
            true_evidence=one_or_all(decode_spans(tokenizer, row, spans), len(spans) > 2))
            for i, (row, n, label, spans) in enumerate(zip(*arrays))]
    rows = labels.read_labelled_texts(args.data, args)
    classes = [labels.normalize_label(name) for name in names]
    if classes and (unknown := sorted({row.label for row in rows} - {None, *classes})):
        raise DataError(f"{path}: unknown labels {', '.join(unknown[:5])}; the classes of the "
                        f"checkpoint are {', '.join(names)}")
    # With learned positions the model has a maximum length, to which texts are cut.
    limit = sys.maxsize if model.gpt.config.pos == "rope" else model.gpt.config.block_size
    arrays = labels.to_arrays(rows, tokenizer, classes, limit, framed=any(frame))
    several = max(model.spec.get("n_spans", 1), *(len(row.spans) for row in rows)) > 1
    return [arrays[name] for name in labels.ARRAYS], [
        dict(id=i if row.id is None else row.id, text=row.text, true_label=row.label,
             true_evidence=one_or_all(row.evidence, several))
        for i, row in enumerate(rows)]


def decode_spans(tokenizer, ids, spans):
    """Return the list of the texts of the evidence, in the order of the text. ids (T,): token ids
    of the text. spans (2S,): first and last token of each span, in any order, padded with -1."""
    pairs = sorted(zip(spans[::2], spans[1::2]))
    return [tokenizer.decode(ids[first:last + 1]) for first, last in pairs if first >= 0]


def one_or_all(texts, several):
    """Return the evidence of a text as it is written to predictions.jsonl. texts: a list of the
    texts of the spans. It is returned unchanged if `several` is true, i.e. if texts may have
    several spans; otherwise the first element is returned, or `None` if the list is empty."""
    return texts if several else texts[0] if texts else None


def calibrate(args, own_data, model, tokenizer):
    """Return the result of fit_temperature(), a float, for the predictions of `model` on the
    validation rows in own_data, a folder of the training run. If these rows cannot be read, a
    message is printed and 1.0 is returned. args: a ReportOptions."""
    try:
        arrays, _ = load_rows(replace(args, data=[own_data], split="val"), model, tokenizer)
    except DataError as error:
        echo(f"The temperature is 1, no validation rows to fit it to: {error}")
        return 1.0
    scores, _ = predict(model, arrays, args.batch_size)
    return metrics.fit_temperature(np.asarray(arrays[2]), scores)


def rate_scores(targets, scores):
    """Return one dict with the result of classification_metrics() and "ece", the
    calibration_error(). targets (N,): true classes; scores (N, K): probabilities."""
    return metrics.classification_metrics(targets, scores) | dict(
        ece=metrics.calibration_error(targets, scores))


def fit_baselines(arrays, rows, texts, targets, n_classes):
    """Fit two baselines, logistic regression on TF-IDF of words and of characters, to the training
    data (arrays, rows), the result of load_rows(). Evaluate them on `texts`, a list, with class
    indices `targets` (N,). Return {name of the baseline: dict of rate_scores() with "seconds"}; for
    a baseline that cannot be fitted, a message is printed instead."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    out = {}
    for name, options in (("words", {}), ("characters", dict(analyzer="char", ngram_range=(2, 5)))):
        started = time.perf_counter()
        vectorizer = TfidfVectorizer(**options, sublinear_tf=True)
        try:
            features = vectorizer.fit_transform(row["text"] for row in rows)
            regression = LogisticRegression(C=20, max_iter=1000).fit(features, arrays[2])
        except ValueError as error:  # e.g. the rows have one class, or words of one letter
            echo(f"--baseline, TF-IDF, {name}: not possible with the training rows: {error}")
            continue
        scores = np.zeros((len(texts), n_classes))  # a class may have no training row
        scores[:, regression.classes_] = regression.predict_proba(vectorizer.transform(texts))
        seconds = time.perf_counter() - started
        out[f"TF-IDF, {name}"] = rate_scores(targets, scores) | dict(seconds=seconds)
    return out


def faithfulness(model, arrays, scores, spans, batch_size):
    """Return {"comprehensiveness", "sufficiency"}, measures of the predicted evidence
    (arXiv:1911.03429), over the texts that are longer than the evidence: the mean decrease of the
    probability of the predicted class if the evidence is deleted from the text (large for good
    evidence), and if everything else is deleted (small for good evidence). {} without such texts.
    arrays: (tokens, lengths, ...) of load_rows(); scores (N, K), spans (N, 2S): the result of
    predict() for these rows; batch_size: texts per forward pass."""
    texts = [ids[:n] for ids, n in zip(*arrays[:2])]
    position = np.arange(arrays[0].shape[1])
    first, last = spans[:, ::2, None], spans[:, 1::2, None]  # (N, S, 1) each
    inside = ((position >= first) & (position <= last)).any(1)  # (N, T)
    n_before, n_after = model.spec.get("frame", (0, 0))
    # Always kept, and so is the padding: the tokens around a text.
    frame = (position < n_before) | (position >= np.asarray(arrays[1])[:, None] - n_after)
    kept = np.flatnonzero(~(inside | frame).all(1))
    cells = np.arange(len(kept)), scores[kept].argmax(1)
    parts = [[texts[i][mask[i, :len(texts[i])]] for mask in (~inside | frame, inside | frame)]
             for i in kept]
    out = {}
    for name, cut in zip(("comprehensiveness", "sufficiency"), zip(*parts)):
        lengths = np.array([*map(len, cut)])
        padded = pad_rows(cut, lengths.max(), 0, arrays[0].dtype)
        p = predict(model, (padded, lengths), batch_size)[0]
        out[name] = float((scores[kept][cells] - p[cells]).mean())
    return out


@torch.no_grad()
def predict(model, arrays, batch_size):
    """Return [probabilities (N, K), spans (N, 2S)] of `model`, a Classifier, as numpy arrays;
    `None` for one that the model does not predict. spans: first and last token of each span, padded
    with -1. arrays: tokens (N, T), lengths (N,), ...; further ones are ignored. batch_size: texts
    per forward pass. If a text is longer than in training and positions are rotary, block_size and
    the rotary table of the model are enlarged in place."""
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
        scores, spans = model(batch.to(device), n.to(device))
        parts.append((None if scores is None else scores.cpu().double().softmax(1), spans))
    return [None if p[0] is None else torch.cat(p).cpu().numpy() for p in zip(*parts)]


def format_report(m):
    """Return a report as text: tables like classification_report of scikit-learn, the confusion
    matrix, baselines and evidence. m: the content of metrics.json, a dict; parts that are not in it
    are omitted."""
    parts = []
    if "accuracy" in m:
        names = ("precision", "recall", "f1")
        columns = [[f"{v:.4f}" for v in (*m[f"{name}_per_class"], m[f"{name}_macro"],
                                         m[f"{name}_weighted"])] for name in names]
        n_rows = sum(m["support"])
        support = [f"{n:,}" for n in (*m["support"], n_rows, n_rows)]
        table = zip([*m["classes"], "macro mean", "weighted mean"], *columns, support)
        area = "undefined" if m["auroc"] is None else f"{m['auroc']:.4f}"
        matrix = [[name, *map(str, row)] for name, row in zip(m["classes"], m["confusion_matrix"])]
        parts = [format_table([["", *names, "rows"], *table]),
                 f"accuracy {m['accuracy']:.4f}, AUROC {area}, ECE {m['ece']:.4f}, at the "
                 f"temperature {m['temperature']:.3f} {m['ece_calibrated']:.4f}",
                 "confusion matrix:",
                 format_table([["true \\ predicted", *m["classes"]], *matrix])]
    if "baselines" in m:
        table = [[name, *(f"{b[n]:.4f}" for n in ("f1_macro", "accuracy", "ece")),
                  f"{b['seconds']:.1f}" if "seconds" in b else "-"]
                 for name, b in {"this model": m, **m["baselines"]}.items()]
        parts.append(format_table([["", "macro F1", "accuracy", "ECE", "seconds"], *table]))
    if "exact_match" in m:
        parts.append(f"evidence of {m['spans']:,} rows: exact match {m['exact_match']:.4f}, token "
                     f"F1 {m['token_f1']:.4f}")
    if "sufficiency" in m:
        parts.append(f"comprehensiveness of the predicted evidence {m['comprehensiveness']:.4f}, "
                     f"sufficiency {m['sufficiency']:.4f}")
    return "\n".join(parts)


main = command(ReportOptions, evaluate_checkpoint)
