"""A classifier of texts that also locates the evidence for the label (--model classifier).

    python run_train.py --config train/configs/classifier.yaml --init_from out/quick/ckpt.pt
    python -m model.classifier --ckpt out/classifier/ckpt_best.pt --data other.csv --out out/other

The evidence is the part of a text that supports the label, as one or more spans of tokens.
data.prepare.labels prepares data. This file has the model and the loaders, metrics.py the metrics,
__main__.py the command that evaluates a checkpoint.

Shapes: B batch, T tokens, C channels, K classes, S the maximum number of spans per text.
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
from model.core.init import fill, normal
from model.gpt import GPT, GPTConfig, inherit_shape  # noqa: F401
from train.base.errors import DataError
from train.base.fields import key
from train.dataloader import Data, RowLoader

MAX_NGRAM = 6
NGRAM_SCALE = 16.0  # how much faster their weights change than those of the network
# With n-grams, the network's scores are multiplied by n / (n + ROWS_FOR_HALF) for n training rows:
# of few rows it learns each by heart, and its scores are noise.
ROWS_FOR_HALF = 1000
# Spans of evidence are predicted whose last token is at least so probable, relative to the best.
SPAN_SHARE = 0.2
USE = "python -m model.classifier --ckpt {out}/{best}{ema} --out {out}/report"
# The head identifies classes by index; another fold was trained on rows that are tested here.
MUST_MATCH_TO_INIT = ("classes", "folds", "fold")
STATISTICS = dict(class_counts="ngrams")


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
    """Return the Data (loaders and spec) of config.data_dir, a folder of data.prepare.labels.

    A batch is (tokens, lengths, labels, spans), the arguments of Classifier.forward(). Raises
    DataError if files are missing or invalid, if the labels or the evidence for config.task are
    missing, or if learned positions are too few for the longest text.
    """
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
    _, _, labels, spans = train
    if any(meta.extra.get("frame", [])):
        spec["frame"] = meta.extra["frame"]
    if spans.shape[1] > 2:
        spec["n_spans"] = spans.shape[1] // 2
    spec["class_counts"] = [int((labels == k).sum()) for k in range(len(spec["classes"]))]
    return Data(RowLoader(train, c, ranks), RowLoader(val, c, ranks) if c.eval_interval else None,
                spec, RowLoader(test, c, ranks) if len(test[0]) else None)


# -----------------------------------------------------------------------------
# the model

class Pointer(nn.Module):
    """Layer that scores each token for a query, as attention does; dim: the channel count C."""

    def __init__(self, dim):
        super().__init__()
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim, bias=False)

    def forward(self, query, x, mask):
        """Return float32 scores (B, T) of x (B, T, C) for query (B, C); -inf where not `mask`."""
        keys, query = self.key(x).float(), self.query(query).float()
        # Not in bfloat16: near scores would be equal, and argmax takes the first of these.
        with torch.autocast(x.device.type, enabled=False):
            scores = (keys @ query.unsqueeze(-1)).squeeze(-1)  # (B, T)
        return (scores * x.size(-1) ** -0.5).masked_fill(~mask, float("-inf"))


class NGrams(nn.Module):
    """Logistic regression on the n-grams of 1 to 6 tokens in a text; 6 is MAX_NGRAM.

    A hash of the n-gram selects one of n_buckets weights per class (arXiv:0902.2206). Each
    different n-gram (bucket) has the value NGRAM_SCALE / sqrt(number of different ones in the
    text), however often it occurs. Adam scales the gradients of rare n-grams, which replaces the
    idf of TF-IDF.
    """

    def __init__(self, n_buckets, n_classes):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n_buckets, n_classes))

    def forward(self, tokens, mask):
        """Return float32 logits (B, K) of int64 tokens (B, T); mask (B, T): false for padding."""
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
    """A GPT with a linear head for a text's label and two pointers for the evidence.

    In a causal model only the state of the last token depends on the whole text, so the label is
    computed from this state; if bidirectional, from the mean of all states. The evidence is located
    in two steps: this state or mean selects the last token of a span, and the selected token's
    state the first one. If a text has several spans, their last tokens are equally probable
    targets.
    """

    def __init__(self, shape, spec, seed=1337, span_weight=1.0, bidirectional=False, ngrams=0):
        """Create the model with initial values from `seed`.

        shape: the GPTConfig of the backbone, which is built without an output layer; with rotary
        positions, block_size is replaced by spec["max_tokens"].
        spec: Data.spec, a dict with "task" ("class": label, "span": evidence, "joint": both),
        "classes", "class_counts" (training rows per class; with ngrams, few rows reduce the
        network's scores), "max_tokens" and, if present, "n_spans" (S, default 1) and "frame"
        (numbers of tokens that the tokenizer puts before and after a text).
        span_weight: weight of the evidence's loss in the task "joint".
        bidirectional: each token attends to the whole text, in layers with a window to earlier
        tokens only. Always if shape.causal is false; windows then reach both ways.
        ngrams: buckets of an NGrams whose scores are added; 0: none; not used for the task "span".
        """
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
        """Return a GPT's or classifier's weights, renamed, without heads of a different shape."""
        own = self.state_dict()
        weights = self.gpt.adopt({n.removeprefix("gpt."): t for n, t in weights.items()})
        named = {n if n in own else f"gpt.{n}": t for n, t in weights.items()}
        return {n: t for n, t in named.items() if n.startswith("gpt.") or own[n].shape == t.shape}

    def forward(self, tokens, lengths, labels=None, spans=None):
        """Return (mean loss, sums), see losses(); without `labels` the predictions.

        tokens (B, T): ids. lengths (B,): token counts without padding. labels (B,): class indices.
        spans (B, 2S): first and last token of up to S spans of evidence, padded with -1. Every task
        requires both labels and spans for the loss.
        Predictions: (class logits (B, K), spans (B, 2S)), each `None` if the task does not include
        it.
        """
        position = torch.arange(tokens.size(1), device=tokens.device)
        mask = position < lengths[:, None]  # (B, T)
        x = self.gpt.trunk(tokens, mask=mask[:, None, None] if self.bidirectional else None)
        text = states_at(x, lengths - 1)  # (B, C)
        if self.bidirectional:
            text = (x * mask[..., None]).sum(1) / lengths[:, None]
        scores = ends = None
        if self.head is not None:
            scores = self.head(text).float()  # (B, K)
        if self.ngrams is not None:
            n_rows = sum(self.spec["class_counts"])
            scores = n_rows / (n_rows + ROWS_FOR_HALF) * scores + self.ngrams(tokens, mask)
        if self.end is not None:
            n_before, n_after = self.spec.get("frame", (0, 0))
            inside = mask & (position >= n_before) & (position < lengths[:, None] - n_after)
            inside = torch.where(inside.any(1, keepdim=True), inside, mask)  # a text may be empty
            ends = self.end(text, x, inside)  # (B, T)
        if labels is not None:
            return self.losses(x, scores, ends, labels, spans)
        return scores, None if ends is None else self.predict_spans(x, ends)

    def start_scores(self, x, end):
        """Return float32 logits (B, T) of each token as the first one of a span that ends at `end`.

        x (B, T, C): states of the tokens. end (B,): token index; later tokens get -inf, but not
        tokens outside of the text, e.g. of the frame.
        """
        mask = torch.arange(x.size(1), device=x.device) <= end[:, None]
        return self.start(states_at(x, end), x, mask)

    def predict_spans(self, x, ends):
        """Return the predicted spans (B, 2S), the best first, padded with -1.

        x (B, T, C): states of the tokens. ends (B, T): each token's score as a last token.
        A span is the most probable last token and, for this one, the most probable first token.
        Spans do not overlap. At least one is predicted, also in a text without evidence; further
        ones only if the last token is at least SPAN_SHARE (0.2) times as probable as the first's.
        """
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
        """Return the evidence's loss (B,) of each text; 0 for a text without evidence.

        x (B, T, C): states of the tokens. ends (B, T): each token's score as a last token. spans
        (B, 2S): the true spans, padded with -1. The loss is half of a span's negative
        log-probability (last token, and first token given the last), averaged over the text's
        spans.
        """
        total = 0
        for span in spans.split(2, dim=1):  # (B, 2)
            first, last = span.clamp(min=0).unbind(1)  # (B,) each
            loss = (F.cross_entropy(ends, last, reduction="none")
                    + F.cross_entropy(self.start_scores(x, last), first, reduction="none"))
            # Not a product: without evidence, the loss of token 0 is infinite in a frame.
            total = total + loss.where(span[:, 0] >= 0, 0.0)
        return total / (spans[:, ::2] >= 0).sum(1).clamp(min=1) / 2

    def losses(self, x, scores, ends, labels, spans):
        """Return (mean loss, sums {name: tensor}) of a batch.

        x (B, T, C): states of the tokens. labels (B,), spans (B, 2S): the true values.
        scores (B, K): class scores; `None` for the task "span".
        ends (B, T): each token's score as a last token; `None` for the task "class".
        sums: "count", the texts, or for the task "span" those with evidence; for the task "joint"
        "label_loss" and "span_loss", unweighted; in eval mode also, for labels, "confusion" (K, K),
        rows: true classes, and, for evidence, metrics.span_sums().
        """
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
            cells = labels.new_zeros(K * K)  # bincount would wait for the GPU
            cells.index_add_(0, labels * K + scores.argmax(1), torch.ones_like(labels))
            sums["confusion"] = cells.view(K, K)  # rows: true classes
        if not self.training and self.end is not None:
            sums |= metrics.span_sums(spans, self.predict_spans(x, ends))
        return loss, sums

    def numbers(self, sums):
        """Return {name: float or `None`} for a log line; sums: of losses(), added over batches.

        For the task "joint" label_loss and span_loss. In evaluations, for labels: accuracy;
        precision, recall and f1, each with the suffixes _macro and _weighted. For evidence:
        exact_match and token_f1, see metrics.span_metrics(). For the task "span", f1_macro is
        token_f1. score: the mean of f1_macro and exact_match, or the one that exists; `None` in
        training. `None` elsewhere: nothing to count.
        """
        count = float(sums["count"])
        out = {name: float(sums[name]) / count if count else None
               for name in ("label_loss", "span_loss") if name in sums}
        if "confusion" in sums:
            values = metrics.confusion_metrics(sums["confusion"].numpy())
            out |= {name: v for name, v in values.items() if not name.endswith("per_class")}
        if "spans" in sums:
            out |= metrics.span_metrics(sums)
            out.setdefault("f1_macro", out["token_f1"])  # SQuAD's name for it, arXiv:1606.05250
        scores = [out[name] for name in ("f1_macro", "exact_match") if out.get(name) is not None]
        out["score"] = sum(scores) / len(scores) if scores else None
        return out

    def flops_per_unit(self):
        return self.gpt.flops_per_unit() * self.gpt.config.block_size  # the heads are small

    def compile(self, *args, **kwargs):
        for block in self.gpt.h:  # all blocks share the first one's code; the heads are small
            block.compile(*args, **kwargs)


def states_at(x, positions):
    """Return x[b, positions[b]] of each row b: (B, C) for x (B, T, C), (B,) for x (B, T)."""
    return x[torch.arange(len(x), device=x.device), positions]


def build_model(config, data):
    c = config
    args = {f.name: getattr(c, f.name) for f in fields(GPTConfig)}
    shape = GPTConfig(**args | dict(vocab_size=data.spec["vocab_size"]))
    model = Classifier(shape, data.spec, c.seed, c.span_weight, c.bidirectional, c.ngrams)
    for block in model.gpt.h:
        block.gradient_checkpointing = c.gradient_checkpointing
    return model
