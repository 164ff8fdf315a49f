"""The classifier: its data, backbone and heads, and what evaluations in training make of them.

Shapes: B batch, T tokens, C channels, K classes.
"""

import os
from dataclasses import dataclass, fields, replace

import torch
import torch.nn as nn
import torch.nn.functional as F

from data.meta import read_meta_for
from data.prepare.labels import ARRAYS, SPLITS
from data.rows import open_rows
from data.token_files import open_npy
from data.tokenizer import open_folder_tokenizer
from model.classifier.metrics import auroc_of_counts, confusion_metrics, whole_auroc
from model.gpt import GPT, GPTConfig, fill, inherit_shape, normal  # noqa: F401
from train.base.errors import DataError
from train.base.fields import key
from train.dataloader import Data, RowLoader

# Evaluations sort log-odds of classes, from -ODDS to ODDS, into steps, so many for all classes:
# AUROC is made of the counts. A young model's differ by little: 65,536 steps for four classes.
ODDS, STEPS = 16.0, 1 << 18
USE = "python -m model.classifier --ckpt {out}/ckpt_best.pt --data FILE.csv --out {out}/report"
MUST_MATCH_TO_INIT = ("classes",)  # a head knows them by their numbers


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
    """The Data of a folder of data/prepare/labels.py."""
    c, meta = config, read_labels_meta(config.data_dir)
    spec = {name: meta[name] for name in ("classes", "class_counts", "max_tokens")}
    tokenizer = open_folder_tokenizer(c.data_dir)
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


def read_labels_meta(folder):
    """The classifier's keys of meta.json of a folder of labelled rows. Raises DataError."""
    meta = read_meta_for("classifier", folder, "not a folder of labelled rows; make one: python -m data.prepare.labels "
                "FILE... --out FOLDER, or --example for one", task=str, classes=[str],
                class_counts=[int], max_tokens=int)
    return meta.extra


def load_split(folder, split, spec=None):
    """The arrays of a split, memory-mapped, in the order of ARRAYS; DataError where they are none,
    or none of a model of `spec`."""
    if spec is None:
        return [open_npy(os.path.join(folder, f"{split}_{name}.npy")) for name in ARRAYS]
    tokens, = open_rows(folder, split, tokens=((None,), 0, spec["vocab_size"]))
    width = tokens.shape[1]
    return open_rows(folder, split, tokens=((width,), 0, spec["vocab_size"]),
                     lengths=((), 0, width + 1), labels=((), 0, max(1, len(spec["classes"]))),
                     spans=((2,), -1, width))


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
    """Rows at each step of the log-odds of each class: (K, 2, steps), first rows of other classes,
    then its own. scores (B, K), labels (B,)."""
    K, own = scores.size(1), scores.log_softmax(1)
    steps = STEPS // K
    odds = (own - torch.log1p(-own.exp())).clamp(-ODDS, ODDS)  # (B, K)
    step = ((odds + ODDS) * ((steps - 1) / (2 * ODDS))).round().long()
    classes = torch.arange(K, device=scores.device)
    cell = (classes * 2 + (labels[:, None] == classes)) * steps + step
    return tally(cell.flatten(), K * 2 * steps).view(K, 2, steps)


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
