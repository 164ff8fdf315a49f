"""A label for a text, and the evidence for it: a pretrained backbone and a small head.

    python run_train.py --config train/config_classifier.yaml --init_from out/quick/ckpt.pt
    python -m model.classifier --ckpt out/classifier/ckpt_best.pt --data other.csv --out out/other

data/labels.py prepares the data. Shapes: B batch, T tokens, C channels, K classes.
"""

import argparse
import json
import os
import re
import string
import sys
from collections import Counter
from dataclasses import dataclass, fields, replace
from html import escape
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from data.labels import ARRAYS, SPLITS, Fields, add_field_options, label_name, read_rows, to_arrays
from data.token_files import DataError, check_array, check_types, open_npy, who_reads
from data.tokenizer import known_tokenizer
from model.gpt import GPT, GPTConfig, adopt_shape, fill, normal  # noqa: F401
from train.config import UsageError, key, run_command, say
from train.dataloader import Data, RowLoader

# Evaluations sort log-odds of classes, from -ODDS to ODDS, into STEPS: AUROC is made of the counts.
ODDS, STEPS = 16.0, 1001
USE = "python -m model.classifier --ckpt {out}/ckpt.pt --data FILE.csv --out {out}/report"
SAME_TO_ADOPT = ("classes",)  # a head knows them by their numbers


@dataclass
class Keys:
    task: str | None = key(None, "a label for a text, the span of its evidence, or both (default: "
                           "what the data have)", choices=["class", "span", "joint"], free=True)
    class_weights: str | None = key(None, "balanced: rows / (classes x rows of the class); or a "
                                    "number for each class in their order, with commas; or none")
    span_weight: float = key(1.0, "joint: weight of the span's loss beside the label's", ge=0)

    def problems(self):
        if self.class_weights in (None, "balanced"):
            return []
        try:
            fine = all(float(w) > 0 for w in self.class_weights.split(","))
        except ValueError:
            fine = False
        return [] if fine else ["class_weights: expected balanced or numbers above 0 such as "
                                f"1,2.5,1; got {self.class_weights!r}"]


# -----------------------------------------------------------------------------
# data

def open_data(config, ranks):
    """The Data of a folder of data/labels.py."""
    c, meta = config, read_meta(config.data_dir)
    spec = {name: meta[name] for name in ("classes", "class_counts", "max_tokens")}
    tokenizer = known_tokenizer(c.data_dir)
    spec |= dict(task=c.task or meta["task"], tokenizer=tokenizer.spec(),
                 vocab_size=c.vocab_size or tokenizer.n_vocab)
    if meta["task"] not in ("joint", spec["task"]):
        raise DataError(f"task: {spec['task']}, but {c.data_dir} has what a task of {meta['task']} "
                        "needs and no more: prepare it with labels and evidence")
    if c.pos == "learned" and c.block_size < spec["max_tokens"]:
        raise DataError(f"{c.data_dir}: texts of up to {spec['max_tokens']} tokens, but this model "
                        f"has {c.block_size} learned positions (block_size): prepare them again "
                        f"with --max_tokens {c.block_size}")
    class_weights(c.class_weights, spec)
    train, val, test = (load_split(c.data_dir, split, spec) for split in SPLITS)
    return Data(RowLoader(train, c, ranks), RowLoader(val, c, ranks) if c.eval_interval else None,
                spec, RowLoader(test, c, ranks) if len(test[0]) else None)


def read_meta(folder):
    path = os.path.join(folder, "meta.json")
    try:
        with open(path, encoding="utf-8") as f:
            meta = json.load(f)
        check_types(path, meta, task=str, classes=[str], class_counts=[int], max_tokens=int)
        return meta
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}: not a folder of labelled rows ({error}){who_reads(folder)}; make "
                        "one: python -m data.labels FILE... --out FOLDER, or --example for "
                        "one") from None


def load_split(folder, split, spec=None):
    """The arrays of a split, memory-mapped, in the order of ARRAYS; DataError where they are none,
    or none of a model of `spec`."""
    paths = [os.path.join(folder, f"{split}_{name}.npy") for name in ARRAYS]
    try:
        arrays = [open_npy(path) for path in paths]
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: {error}; prepare it again with data.labels") from None
    if spec is None:
        return arrays
    check_array(paths[0], arrays[0], (None, None), spec["vocab_size"])
    n, width = arrays[0].shape
    for path, array, shape, limit, least in zip(
            paths[1:], arrays[1:], ((n,), (n,), (n, 2)),
            (width + 1, max(1, len(spec["classes"])), width), (0, 0, -1)):
        check_array(path, array, shape, limit, least)
    return arrays


def class_weights(text, spec):
    """Weights (K,) of the classes, a float list, as the key class_weights says."""
    counts = spec["class_counts"]
    if text is None:
        return [1.0] * len(counts)
    if text == "balanced":  # as scikit-learn's; a class that is only in other splits weighs nothing
        return [sum(counts) / (len(counts) * n) if n else 0.0 for n in counts]
    weights = [float(w) for w in text.split(",")]
    if len(weights) != len(counts):
        raise DataError(f"class_weights: {len(weights)} numbers for {len(counts)} classes "
                        f"({', '.join(spec['classes'])})")
    return weights


# -----------------------------------------------------------------------------
# the model

class Pointer(nn.Module):
    """Scores (B, T) of tokens for a query, scaled products as in attention; -inf where masked."""

    def __init__(self, dim):
        super().__init__()
        self.query, self.key = nn.Linear(dim, dim), nn.Linear(dim, dim, bias=False)

    def forward(self, query, x, allowed):
        """query (B, C), x (B, T, C), allowed (B, T) bool."""
        scores = (self.key(x) @ self.query(query).unsqueeze(-1)).squeeze(-1)  # (B, T)
        return (scores.float() * x.size(-1) ** -0.5).masked_fill(~allowed, float("-inf"))


class Classifier(nn.Module):
    """forward(tokens, lengths, labels, spans) -> (loss, sums); forward(tokens, lengths) -> (class
    scores (B, K) or None, spans (B, 2) or None).

    In a causal backbone the state of the last token alone has seen the whole text: the label is
    read from it (the mean of all states learns slower, train/LOG.md). Evidence, too, is known only
    at its end: a pointer finds its last token, asked by the last state of the text, and then
    another its first token, asked by the state of that last one.
    """

    def __init__(self, shape, spec, weights, seed=1337, span_weight=1.0):
        """shape: the GPTConfig that backbone and classifier share; the backbone is built without
        its output layer, and as long as the texts where positions have no weights."""
        super().__init__()
        self.config, self.spec, self.span_weight = shape, spec, span_weight
        length = spec["max_tokens"] if shape.pos == "rope" else shape.block_size
        self.gpt = GPT(replace(shape, tie_weights=True, block_size=length), seed)
        self.head = self.end = self.start = None
        if spec["task"] != "span":
            self.head = nn.Linear(shape.n_embd, len(spec["classes"]))
        if spec["task"] != "class":
            self.end, self.start = Pointer(shape.n_embd), Pointer(shape.n_embd)
        weights = torch.tensor(weights, dtype=torch.float32, device="cpu")  # real also under meta
        self.register_buffer("weights", weights, persistent=False)
        fill(self, seed)

    def initial(self, name, shape, seed):
        part, _, inner = name.partition(".")
        if part == "gpt":
            return self.gpt.initial(inner, shape, seed)
        if part not in ("head", "end", "start"):
            return None
        return torch.zeros(shape) if inner.endswith("bias") else normal(name, shape, 0.02, seed)

    def adopt(self, weights):
        """A GPT's weights become the backbone's; of a classifier also the heads that still fit."""
        own, weights = self.state_dict(), self.gpt.adopt(weights)
        named = {n if n in own else f"gpt.{n}": t for n, t in weights.items()}
        return {n: t for n, t in named.items() if n.startswith("gpt.") or own[n].shape == t.shape}

    def widen(self, length):
        """Take texts of `length` tokens where positions have no weights; the longest possible."""
        config = self.gpt.config
        if config.pos == "rope" and length > config.block_size:
            config.block_size = length
            self.gpt.add_tables(None)
            self.gpt.to(self.gpt.wte.weight.device)
        return config.block_size

    def forward(self, tokens, lengths, labels=None, spans=None):
        """tokens (B, T), lengths (B,), labels (B,), spans (B, 2) first and last token or -1."""
        x = self.gpt.trunk(tokens)  # (B, T, C)
        whole = at(x, lengths - 1)  # (B, C)
        inside = torch.arange(x.size(1), device=x.device) < lengths[:, None]  # (B, T)
        scores = None if self.head is None else self.head(whole).float()  # (B, K)
        ends = None if self.end is None else self.end(whole, x, inside)  # (B, T)
        if labels is None:
            return scores, None if ends is None else self.find(x, ends)
        return self.losses(x, scores, ends, labels, spans)

    def start_scores(self, x, end):
        """Scores (B, T) of first tokens, for evidence with the last token end (B,)."""
        before = torch.arange(x.size(1), device=x.device) <= end[:, None]
        return self.start(at(x, end), x, before)

    def find(self, x, ends):
        """The likeliest last token and then the likeliest first one: spans (B, 2)."""
        end = ends.argmax(1)
        return torch.stack((self.start_scores(x, end).argmax(1), end), dim=1)

    def losses(self, x, scores, ends, labels, spans):
        """Each row's loss is weighted by its class, and so is its part of the count: sum(w loss) /
        sum(w), torch's weighted cross-entropy, of any batches put together."""
        found, (first, last) = spans[:, 0] >= 0, spans.clamp(min=0).unbind(1)  # (B,) each
        w, label_loss, span_loss = found.float(), 0.0, 0.0
        if self.head is not None:
            w = self.weights[labels]  # (B,)
            label_loss = F.cross_entropy(scores, labels, reduction="none")
        if self.end is not None:
            span_loss = found * (
                F.cross_entropy(ends, last, reduction="none")
                + F.cross_entropy(self.start_scores(x, last), first, reduction="none")) / 2
        count, sums = w.sum(), {}
        if self.spec["task"] == "joint":
            sums = dict(label_loss=(w * label_loss).sum(), span_loss=(w * span_loss).sum())
            span_loss = self.span_weight * span_loss
        loss = (w * (label_loss + span_loss)).sum() / count.clamp(min=1e-9)
        sums["count"] = count
        return loss, sums if self.training else sums | self.counts(x, scores, ends, labels, spans)

    def counts(self, x, scores, ends, labels, spans):
        """What evaluation adds up: the confusion matrix (K, K), rows the truth; odds_counts; spans
        found."""
        out = {}
        if self.head is not None:
            K = scores.size(1)
            cells = tally(labels * K + scores.argmax(1), K * K)
            out |= dict(confusion=cells.view(K, K), odds=odds_counts(scores, labels))
        if self.end is not None:
            found, guess = spans[:, 0] >= 0, self.find(x, ends)
            size = (spans[:, 1] - spans[:, 0]) + (guess[:, 1] - guess[:, 0]) + 2
            shared = (torch.minimum(spans[:, 1], guess[:, 1])
                      - torch.maximum(spans[:, 0], guess[:, 0]) + 1).clamp(min=0)
            out |= dict(spans=found.sum(), exact=((guess == spans).all(1) & found).sum(),
                        overlap=(2 * shared / size * found).sum())
        return out

    def numbers(self, sums):
        """Evaluations: accuracy; precision, recall and f1, each _macro and _weighted; auroc;
        exact_match and token_f1 of spans, in places of tokens. f1_macro of spans alone is that
        token_f1, the mean over rows. None where there is nothing to count."""
        def share(name, of):
            return float(sums[name] / sums[of]) if sums[of] else None
        out = {name: share(name, "count") for name in ("label_loss", "span_loss") if name in sums}
        if "confusion" in sums:
            metrics = confusion_metrics(sums["confusion"].numpy())
            out |= {name: n for name, n in metrics.items() if not name.endswith("per_class")}
            out["auroc"] = whole_auroc([auroc_of_counts(*c) for c in sums["odds"].numpy()])
        if "spans" in sums:
            out |= dict(exact_match=share("exact", "spans"), token_f1=share("overlap", "spans"))
            out.setdefault("f1_macro", out["token_f1"])  # as SQuAD's is called, arXiv:1606.05250
        return out

    def flops_per_unit(self):
        return self.gpt.flops_per_unit() * self.gpt.config.block_size

    def compile(self, *args, **kwargs):
        for block in self.gpt.h:  # they share the code of the first; what is around them is small
            block.compile(*args, **kwargs)


def odds_counts(scores, labels):
    """Rows at each step of the log-odds of each class: (K, 2, STEPS), first rows of other classes,
    then its own. scores (B, K), labels (B,)."""
    K, own = scores.size(1), scores.log_softmax(1)
    odds = (own - torch.log1p(-own.exp())).clamp(-ODDS, ODDS)  # (B, K)
    step = ((odds + ODDS) * ((STEPS - 1) / (2 * ODDS))).round().long()
    classes = torch.arange(K, device=scores.device)
    cell = (classes * 2 + (labels[:, None] == classes)) * STEPS + step
    return tally(cell.flatten(), K * 2 * STEPS).view(K, 2, STEPS)


def tally(cells, n):
    """How often each of 0 to n - 1 is in cells (N,): (n,). torch.bincount would wait for a GPU."""
    return cells.new_zeros(n).index_add_(0, cells, torch.ones_like(cells))


def at(x, places):
    """States (B, C) of x (B, T, C) at the tokens `places` (B,)."""
    return x[torch.arange(len(x), device=x.device), places]


def build_model(config, data):
    args = {f.name: getattr(config, f.name) for f in fields(GPTConfig)}
    model = Classifier(GPTConfig(**args | dict(vocab_size=data.spec["vocab_size"])), data.spec,
                       class_weights(config.class_weights, data.spec), config.seed,
                       config.span_weight)
    for block in model.gpt.h:
        block.gradient_checkpointing = config.gradient_checkpointing
    return model


# -----------------------------------------------------------------------------
# numbers

def confusion_metrics(matrix):
    """Accuracy, precision, recall and F1 of a confusion matrix (K, K), rows the truth. As scikit-
    learn's with zero_division=0: macro means are over the classes in truth or predictions."""
    true, guessed, right = matrix.sum(1), matrix.sum(0), matrix.diagonal()
    seen, n = true + guessed > 0, matrix.sum()
    out = dict(accuracy=float(right.sum() / n) if n else None)
    for name, over, under in (("precision", right, guessed), ("recall", right, true),
                              ("f1", 2 * right, true + guessed)):
        each = over / np.maximum(under, 1)  # (K,)
        out[f"{name}_macro"] = float(each[seen].mean()) if n else None
        out[f"{name}_weighted"] = float((each * true).sum() / n) if n else None
        out[f"{name}_per_class"] = each.tolist()
    return out


def auroc(positive, scores):
    """Area under the ROC curve: how often a positive (N,) bool scores above a negative, ties count
    half; None where one of the two kinds is missing."""
    n = int(positive.sum())
    if not 0 < n < len(positive):
        return None
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    rank = (counts.cumsum() - (counts - 1) / 2)[inverse]  # of each score, from 1; ties share one
    return float((rank[positive].sum() - n * (n + 1) / 2) / (n * (len(positive) - n)))


def auroc_of_counts(negative, positive):
    """auroc() of rows that are counted at each of rising scores, (STEPS,) each."""
    pairs = negative.sum() * positive.sum()
    below = negative.cumsum() - negative / 2  # ties count half
    return float((positive * below).sum() / pairs) if pairs else None


def whole_auroc(areas):
    """Of two classes that of the second, of more the mean; None where one is unknown."""
    return areas[1] if len(areas) == 2 else None if None in areas else float(np.mean(areas))


def classification_metrics(labels: np.ndarray, scores: np.ndarray) -> dict[str, Any]:
    """What scikit-learn says of class scores (N, K), probabilities say, with labels (N,) the true
    classes: accuracy; precision, recall and f1 as _macro, _weighted and _per_class; auroc, of two
    classes that of the second, of more the mean of each against the rest, and auroc_per_class, None
    where a class has no rows; confusion_matrix, rows the truth; support. Raises ValueError."""
    labels, scores = np.asarray(labels), np.asarray(scores, np.float64)
    if scores.ndim != 2 or labels.shape != scores.shape[:1] or not len(labels):
        raise ValueError(f"labels {labels.shape}, scores {scores.shape}: expected (N,) and (N, K)")
    K = scores.shape[1]
    if labels.min() < 0 or labels.max() >= K or not np.isfinite(scores).all():
        raise ValueError(f"expected labels from 0 to {K - 1} and scores that are finite numbers")
    matrix = np.bincount(labels * K + scores.argmax(1), minlength=K * K).reshape(K, K)
    areas = [auroc(labels == k, scores[:, k]) for k in range(K)]
    return confusion_metrics(matrix) | dict(auroc=whole_auroc(areas), auroc_per_class=areas,
                                            support=matrix.sum(1).tolist(),
                                            confusion_matrix=matrix.tolist())


def normalized_words(text):
    """Words as SQuAD compares them (arXiv:1606.05250): lower case, no punctuation, no articles."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def place_metrics(truths, guesses):
    """{"exact_match", "token_f1", "spans"} of first and last tokens (N, 2), of the rows whose truth
    is not -1: what evaluations in training have."""
    truths, guesses = truths[truths[:, 0] >= 0], guesses[truths[:, 0] >= 0]
    if not len(truths):
        return {}
    (a, b), (c, d) = truths.T, guesses.T
    shared = (np.minimum(b, d) - np.maximum(a, c) + 1).clip(min=0)
    return dict(exact_match=float((truths == guesses).all(1).mean()), spans=len(truths),
                token_f1=float((2 * shared / (b - a + d - c + 2)).mean()))


def span_metrics(truths, guesses):
    """{"exact_match", "token_f1", "spans"} of texts of evidence, as SQuAD's script has them (from 0
    to 1): equal words in the same order; F1 of the words as multisets."""
    exact, f1 = [], []
    for a, b in zip(map(normalized_words, truths), map(normalized_words, guesses), strict=True):
        exact.append(a == b)
        shared = (Counter(a) & Counter(b)).total()
        f1.append(2 * shared / (len(a) + len(b)) if a and b else float(a == b))
    n = len(exact)
    return dict(exact_match=sum(exact) / n, token_f1=sum(f1) / n, spans=n) if n else {}


# -----------------------------------------------------------------------------
# a report

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
        if read_meta(path)["classes"] != spec["classes"]:
            raise DataError(f"{path}: has other classes than the checkpoint's: "
                            f"{', '.join(spec['classes'])}")
        arrays = load_split(path, args.split, spec)
        tokens = arrays[0]
        same = known_tokenizer(path).spec() == tokenizer.spec()
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
    from model.load import load_model
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
                   "data.labels")
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
    say(report_text(metrics, classes))
    name = "confusion.svg" if "confusion_matrix" in metrics else "predictions.jsonl"
    print(f"Next: open {os.path.join(args.out, name)}, metrics.json beside it has all")


if __name__ == "__main__":
    sys.exit(main())
