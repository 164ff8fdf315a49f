"""A classifier of texts that also locates the evidence for the label: --model classifier

    python run_train.py --config train/configs/classifier.yaml --init_from out/quick/ckpt.pt
    python -m model.classifier --ckpt out/classifier/ckpt_best.pt --data other.csv --out out/other

This file has the model and the data, report.py the command that evaluates a checkpoint.
data.prepare.labels prepares data.

Shapes: B batch, T tokens, C channels, K classes, S spans of evidence in a text, at most.
"""

import math
from dataclasses import dataclass, fields, replace

import torch
import torch.nn as nn
import torch.nn.functional as F

from data.labels import SPLITS, open_labels, read_labels_meta
from data.tokenizer import open_tokenizer
from model.classifier import metrics
from model.classifier.metrics import classification_metrics  # noqa: F401
from model.classifier.report import main  # noqa: F401
from model.core.init import fill, normal
from model.gpt import GPT, GPTConfig, inherit_shape  # noqa: F401
from train.base.errors import DataError
from train.base.fields import key
from train.dataloader import Data, RowLoader

# Evaluations count rows in LOG_ODDS_BINS bins (shared by all classes) of the log-odds of each class
# between -MAX_LOG_ODDS and MAX_LOG_ODDS, from which AUROC is computed. Early in training the values
# differ little, which needs narrow bins: 65,536 per class for four classes.
MAX_LOG_ODDS = 16.0
LOG_ODDS_BINS = 1 << 18
MAX_NGRAM = 6
NGRAM_SCALE = 16.0  # how much faster their weights change than those of the network
# With n-grams, the network's scores are multiplied by n / (n + ROWS_FOR_HALF) for n training rows:
# of few rows it learns each by heart, and its scores are noise.
ROWS_FOR_HALF = 1000
# Spans of evidence are predicted whose last token is at least so probable, relative to the best.
SPAN_SHARE = 0.2
USE = "python -m model.classifier --ckpt {out}/{best} --data {data} --out {out}/report"
# The head identifies classes by index; another fold was trained on rows that are tested here.
MUST_MATCH_TO_INIT = ("classes", "folds", "fold")


@dataclass
class Keys:
    task: str | None = key(None, "class: label; span: evidence; joint: both (default: the data's)",
                           choices=["class", "span", "joint"], free=True)
    span_weight: float = key(1.0, "joint: weight of the evidence's loss", ge=0)
    bidirectional: bool = key(False, "each token sees the whole text (in layers with a window only "
                                     "earlier tokens); the mean state gives the label")
    ngrams: int = key(0, "weights per class of a linear model of n-grams, which is added; 0: none",
                      ge=0)
    folds: int = key(0, "cross-validation: parts of all rows; part `seed modulo folds` is for "
                        "testing, the next one for validation; 0: the prepared splits", ge=0)

    def problems(self):
        return [f"folds: {self.folds}: expected 0, or 3 or more: one part is for testing, one for "
                "validation"] if 0 < self.folds < 3 else []


# -----------------------------------------------------------------------------
# data

def open_data(config, ranks):
    """Return the Data of config.data_dir, a folder that data.prepare.labels wrote; a batch is
    tokens, lengths, labels and spans, the arguments of Classifier. Raises DataError, also if the
    folder has no labels or evidence for config.task, or texts are longer than learned positions."""
    c = config
    meta = read_labels_meta(c.data_dir)
    tokenizer = open_tokenizer(c.data_dir)
    spec = {name: meta.extra[name] for name in ("classes", "max_tokens")}
    spec |= dict(task=c.task or meta.extra["task"], tokenizer=tokenizer.spec(),
                 vocab_size=c.vocab_size or tokenizer.n_vocab)
    if meta.extra["task"] not in ("joint", spec["task"]):
        raise DataError(f"task: {spec['task']}, but {c.data_dir} was prepared for the task "
                        f"{meta.extra['task']}: prepare it with labels and evidence")
    if c.pos == "learned" and c.block_size < spec["max_tokens"]:
        raise DataError(f"{c.data_dir}: texts of {spec['max_tokens']} tokens exceed the learned "
                        f"positions (block_size): prepare it with --max_tokens {c.block_size} "
                        "and the tokenizer of init_from")
    if c.folds:
        spec["fold"] = [c.seed % c.folds, c.folds]
    train, val, test = (open_labels(c.data_dir, split, spec) for split in SPLITS)
    if any(frame := meta.extra.get("frame", [])):
        spec["frame"] = frame
    if train[3].shape[1] > 2:
        spec["n_spans"] = train[3].shape[1] // 2
    spec["class_counts"] = [int((train[2] == k).sum()) for k in range(len(spec["classes"]))]
    return Data(RowLoader(train, c, ranks), RowLoader(val, c, ranks) if c.eval_interval else None,
                spec, RowLoader(test, c, ranks) if len(test[0]) else None)


# -----------------------------------------------------------------------------
# the model

class Pointer(nn.Module):
    """Scores of the tokens of a text for a query, forward(query, x, mask): scaled dot products as
    in attention, -inf where masked. dim: C."""

    def __init__(self, dim):
        super().__init__()
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim, bias=False)

    def forward(self, query, x, mask):
        """Return the scores (B, T) float32 of tokens with states x (B, T, C) for query (B, C). mask
        (B, T) bool: false for tokens with the score -inf."""
        keys, query = self.key(x).float(), self.query(query).float()
        # Not in bfloat16: near scores would be equal, and argmax takes the first of these.
        with torch.autocast(x.device.type, enabled=False):
            scores = (keys @ query.unsqueeze(-1)).squeeze(-1)  # (B, T)
        return (scores * x.size(-1) ** -0.5).masked_fill(~mask, float("-inf"))


class NGrams(nn.Module):
    """Scores of classes from the n-grams in a text, up to MAX_NGRAM tokens: logistic regression
    with n_buckets weights per class, which are found by a hash of the n-gram (arXiv:0902.2206).

    An n-gram has the value 1 / sqrt(n-grams of the text), however often it occurs. Adam scales the
    gradients of rare n-grams, which replaces the idf of TF-IDF.
    """

    def __init__(self, n_buckets, n_classes):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n_buckets, n_classes))

    def forward(self, tokens, mask):
        """Return the scores (B, K) float32 of classes for texts: tokens (B, T) int64; mask (B, T)
        bool, false after the text."""
        n_buckets = self.weight.size(0)
        T = tokens.size(1)
        tokens = F.pad(tokens, (0, MAX_NGRAM))
        mask = F.pad(mask, (0, MAX_NGRAM))
        hashes = 0
        buckets = []  # (B, T) each; n_buckets: beyond the end of the text
        for n in range(MAX_NGRAM):  # hashes of the tokens t to t + n, modulo 2^64
            hashes = hashes * 0x9E3779B1 + tokens[:, n:n + T] + 1
            mixed = (hashes ^ hashes >> 29) * 0x3F58476D1CE4E5B9
            bucket = (mixed ^ mixed >> 32) % n_buckets
            buckets.append(bucket.masked_fill(~mask[:, n:n + T], n_buckets))
        index = torch.cat(buckets, dim=1).sort(1).values  # (B, MAX_NGRAM T)
        new = F.pad(index[:, 1:] != index[:, :-1], (1, 0), value=True) & (index < n_buckets)
        share = new / new.sum(1, keepdim=True) ** 0.5
        return NGRAM_SCALE * F.embedding_bag(index.clamp(max=n_buckets - 1), self.weight.float(),
                                             per_sample_weights=share, mode="sum")


class Classifier(nn.Module):
    """A GPT with a linear head for the label of a text and two pointers for its evidence.

    forward(tokens, lengths, labels, spans) returns (loss, sums); forward(tokens, lengths) returns
    (class scores (B, K) or `None`, spans (B, 2S) or `None`): first and last token of each, -1 for
    fewer spans than S.

    In a causal model only the last token's state depends on the whole text, so the label is
    computed from it. If bidirectional, the mean of all states is used instead. The end of the
    evidence is located first: the same state of the text selects the last token of the evidence,
    and the state of that token selects the first one. Of several spans, each one's last token has
    the same target probability.
    """

    def __init__(self, shape, spec, seed=1337, span_weight=1.0, bidirectional=False, ngrams=0):
        """Create the model with initial values from `seed`. shape: the GPTConfig of the backbone,
        which is built without an output layer. With rotary positions, block_size becomes the length
        of the longest text. spec: Data.spec, a dict with "task" ("class", "span" for evidence, or
        "joint" for both), "classes", "class_counts", "max_tokens" and, if present, "n_spans" (S)
        and "frame" (numbers of tokens that the tokenizer puts before and after a text, never
        evidence). span_weight: for "joint", factor of the evidence's loss.
        bidirectional: each token sees the whole text, as always if the shape is not causal. ngrams:
        weights of NGrams per class, 0: none; not used for the task "span"."""
        super().__init__()
        self.config = shape
        self.spec = spec
        self.span_weight = span_weight
        self.bidirectional = bidirectional or not shape.causal
        length = spec["max_tokens"] if shape.pos == "rope" else shape.block_size
        self.gpt = GPT(replace(shape, tie_weights=True, block_size=length), seed, is_backbone=True)
        self.head = self.end = self.start = self.ngrams = None
        if spec["task"] != "span":
            if ngrams:
                self.ngrams = NGrams(ngrams, len(spec["classes"]))
            self.head = nn.Linear(shape.n_embd, len(spec["classes"]))
        if spec["task"] != "class":
            self.end = Pointer(shape.n_embd)
            self.start = Pointer(shape.n_embd)
        fill(self, seed)

    def initial(self, name, shape, seed):
        part, _, inner = name.partition(".")
        if part == "gpt":
            return self.gpt.initial(inner, shape, seed)
        if part not in ("head", "end", "start", "ngrams"):
            return None
        is_zero = part == "ngrams" or inner.endswith("bias")
        return torch.zeros(shape) if is_zero else normal(name, shape, 0.02, seed)

    def adopt(self, weights):
        """Return `weights` {name: tensor}, of a GPT or a classifier, with the names of this model.
        The heads of a classifier are left out if the shapes differ."""
        own, weights = self.state_dict(), self.gpt.adopt(weights)
        named = {n if n in own else f"gpt.{n}": t for n, t in weights.items()}
        return {n: t for n, t in named.items() if n.startswith("gpt.") or own[n].shape == t.shape}

    def forward(self, tokens, lengths, labels=None, spans=None):
        """Return (mean loss, sums {name: tensor}); without labels and spans, (class scores (B, K),
        predicted spans (B, 2S)), `None` if not part of the task. tokens (B, T), lengths (B,);
        labels (B,): class indices; spans (B, 2S): first and last token of each span of the
        evidence, or -1."""
        position = torch.arange(tokens.size(1), device=tokens.device)
        mask = position < lengths[:, None]  # (B, T)
        x = self.gpt.trunk(tokens, mask=mask[:, None, None] if self.bidirectional else None)
        text = states_at(x, lengths - 1)  # (B, C)
        if self.bidirectional:
            text = (x * mask[..., None]).sum(1) / lengths[:, None]
        scores = None if self.head is None else self.head(text).float()  # (B, K)
        if self.ngrams is not None:
            n_rows = sum(self.spec["class_counts"])
            scores = n_rows / (n_rows + ROWS_FOR_HALF) * scores + self.ngrams(tokens, mask)
        n_before, n_after = self.spec.get("frame", (0, 0))
        inside = mask & (position >= n_before) & (position < lengths[:, None] - n_after)
        inside = torch.where(inside.any(1, keepdim=True), inside, mask)  # a text may be empty
        ends = None if self.end is None else self.end(text, x, inside)  # (B, T)
        if labels is None:
            return scores, None if ends is None else self.predict_spans(x, ends)
        return self.losses(x, scores, ends, labels, spans)

    def start_scores(self, x, end):
        """Return the score (B, T) of each token as the first one of a span, whose last token is end
        (B,); -inf after it. x (B, T, C): states of the tokens."""
        mask = torch.arange(x.size(1), device=x.device) <= end[:, None]
        return self.start(states_at(x, end), x, mask)

    def predict_spans(self, x, ends):
        """Return spans (B, 2S), without overlaps, the best first: the most probable last token of
        the evidence and, given it, the most probable first token; then the same among the tokens
        that are left, -1 if the last token is less than SPAN_SHARE times as probable as that of the
        first span. x (B, T, C): states; ends (B, T): scores of last tokens."""
        position = torch.arange(x.size(1), device=x.device)
        limit = ends.amax(1) + math.log(SPAN_SHARE)  # (B,)
        spans = []
        for _ in range(self.spec.get("n_spans", 1)):
            end = ends.argmax(1)
            is_span = states_at(ends, end) >= limit
            taken = ends.isinf()  # or after the text
            before = taken.cumsum(1)  # a token between a taken one and `end` has another number
            reachable = ~taken & (before == states_at(before, end)[:, None])
            start = self.start_scores(x, end).masked_fill(~reachable, -math.inf).argmax(1)
            spans += [start.where(is_span, -1), end.where(is_span, -1)]
            ends = ends.masked_fill((position >= start[:, None]) & (position <= end[:, None]),
                                    -math.inf)
        return torch.stack(spans, dim=1)

    def span_losses(self, x, ends, spans):
        """Return the loss (B,) of the evidence: half of the negative log-probability of a span, the
        mean over the spans of a row, 0 without evidence. x (B, T, C), ends (B, T): as of
        predict_spans; spans (B, 2S): the truth."""
        total = 0
        for span in spans.split(2, dim=1):  # (B, 2)
            first, last = span.clamp(min=0).unbind(1)  # (B,) each
            total = total + (span[:, 0] >= 0) * (
                F.cross_entropy(ends, last, reduction="none")
                + F.cross_entropy(self.start_scores(x, last), first, reduction="none"))
        return total / (spans[:, ::2] >= 0).sum(1).clamp(min=1) / 2

    def losses(self, x, scores, ends, labels, spans):
        """Return the mean loss and the sums {name: tensor} of a batch: "count", the number of rows,
        for evidence alone of those that have some; with the task "joint" also the two losses; in
        eval mode also those of numbers(): "confusion" (K, K), "odds" (log_odds_counts),
        span_sums(). x: states (B, T, C). scores (B, K): of classes. ends (B, T): of the last token.
        labels (B,), spans (B, 2S): the truth."""
        losses = {}  # (B,) each
        if self.head is not None:
            losses["label_loss"] = F.cross_entropy(scores, labels, reduction="none")
        if self.end is not None:
            losses["span_loss"] = self.span_losses(x, ends, spans)
        has_span = spans[:, 0] >= 0  # (B,)
        counted = has_span if self.head is None else torch.ones_like(has_span)
        sums = dict(count=counted.sum())
        if self.spec["task"] == "joint":
            sums |= {name: loss.sum() for name, loss in losses.items()}
            losses["span_loss"] = self.span_weight * losses["span_loss"]
        loss = sum(losses.values()).sum() / sums["count"].clamp(min=1)
        if not self.training and self.head is not None:
            K = scores.size(1)
            cells = count_indices(labels * K + scores.argmax(1), K * K)  # rows: true classes
            sums |= dict(confusion=cells.view(K, K), odds=log_odds_counts(scores, labels))
        if not self.training and self.end is not None:
            sums |= metrics.span_sums(spans, self.predict_spans(x, ends))
        return loss, sums

    def numbers(self, sums):
        """Return {name: float} for a log line, from the sums {name: tensor} of forward() in eval
        mode, added over batches: accuracy; precision, recall and f1, each as _macro and _weighted;
        auroc; exact_match and token_f1 of evidence spans, compared by tokens; score, the mean of
        f1_macro and exact_match. `None` if there is nothing to count. For spans alone f1_macro is
        token_f1."""
        count = float(sums["count"])
        out = {name: float(sums[name]) / count if count else None
               for name in ("label_loss", "span_loss") if name in sums}
        if "confusion" in sums:
            values = metrics.confusion_metrics(sums["confusion"].numpy())
            out |= {name: v for name, v in values.items() if not name.endswith("per_class")}
            areas = [metrics.auroc(*counts) for counts in sums["odds"].numpy()]
            out["auroc"] = metrics.average_auroc(areas)
        if "spans" in sums:
            out |= metrics.span_metrics(sums)
            out.setdefault("f1_macro", out["token_f1"])  # SQuAD's name for it, arXiv:1606.05250
        scores = [out[name] for name in ("f1_macro", "exact_match") if out.get(name) is not None]
        out["score"] = sum(scores) / len(scores) if scores else None
        return out

    def flops_per_unit(self):
        # The output layer is not computed, and the classifier's heads are small.
        head = (self.gpt.lm_head or self.gpt.wte).weight
        n = 2 + 2 * any(p.requires_grad for p in self.gpt.parameters()) + 2 * head.requires_grad
        return (self.gpt.flops_per_unit() - n * head.numel()) * self.gpt.config.block_size

    def compile(self, *args, **kwargs):
        for block in self.gpt.h:  # all blocks share the first one's code; the heads are small
            block.compile(*args, **kwargs)


def log_odds_counts(scores, labels):
    """Return the number of rows in each bin of the log-odds of each class, (K, 2, bins), for AUROC:
    first the rows of other classes, then the rows of the class. The bins, LOG_ODDS_BINS
    // K, are evenly spaced between -MAX_LOG_ODDS and MAX_LOG_ODDS. scores (B, K): logits; labels
    (B,): class indices."""
    K = scores.size(1)
    logp = scores.log_softmax(1)
    bins = LOG_ODDS_BINS // K
    odds = (logp - torch.log1p(-logp.exp())).clamp(-MAX_LOG_ODDS, MAX_LOG_ODDS)  # (B, K)
    index = ((odds + MAX_LOG_ODDS) * ((bins - 1) / (2 * MAX_LOG_ODDS))).round().long()
    classes = torch.arange(K, device=scores.device)
    cell = (classes * 2 + (labels[:, None] == classes)) * bins + index  # (B, K)
    return count_indices(cell.flatten(), K * 2 * bins).view(K, 2, bins)


def count_indices(indices, n):
    """Return the number of occurrences (n,) of 0 to n - 1 in `indices` (m,) int64: torch.bincount
    would wait for the GPU."""
    return indices.new_zeros(n).index_add_(0, indices, torch.ones_like(indices))


def states_at(x, positions):
    """Return the states (B, C) of x (B, T, C) at one position (B,) per row."""
    return x[torch.arange(len(x), device=x.device), positions]


def build_model(config, data):
    c = config
    args = {f.name: getattr(c, f.name) for f in fields(GPTConfig)}
    shape = GPTConfig(**args | dict(vocab_size=data.spec["vocab_size"]))
    model = Classifier(shape, data.spec, c.seed, c.span_weight, c.bidirectional, c.ngrams)
    for block in model.gpt.h:
        block.gradient_checkpointing = c.gradient_checkpointing
    return model
