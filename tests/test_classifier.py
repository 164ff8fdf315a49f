"""--model classifier: data, numbers against scikit-learn, and the promises that every run keeps."""

import collections
import contextlib
import csv
import itertools
import json
import random
import shutil
import statistics
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import SHARED, full_disk, run, tiny_args
from processes import python
from runs import (
    SMALL,
    WAYS,
    Program,
    assert_a_kill_changes_nothing,
    assert_keys_change_only,
    assert_same,
    assert_two_ranks_equal_one,
)

from data.labels import (
    ARRAYS,
    Fields,
    LabelledText,
    merge_spans,
    open_labels,
    parse_labelled_text,
    read_labelled_texts,
    to_arrays,
)
from data.prepare.labels import example_records, find_classes, missing_words
from data.prepare.labels import main as labels_main
from data.rows import save_arrays
from data.tokenizer import load_tokenizer
from model import classifier
from model.classifier import Classifier, NGrams, Pointer, classification_metrics
from model.classifier.__main__ import main as evaluate_main
from model.classifier.__main__ import predict
from model.classifier.metrics import calibration_error, span_metrics, span_sums
from model.convert import convert
from model.gpt import GPT, GPTConfig
from model.sample import load_model
from train.base.checkpoint_file import load_checkpoint
from train.base.errors import DataError, UserError
from train.checkpoint import save_checkpoint
from train.config import load_config
from train.distributed import Ranks
from train.train import train

WORDS = {"animal": ["cat", "dog", "owl"], "plant": ["oak", "ivy", "elm"], "tool": ["saw", "axe"]}
TINY = dict(model="classifier", vocab_size=257, eval_iters=8, bidirectional=True,
            ngrams=512)  # beside runs.SMALL


def make_rows(n, seed=0):
    """Rows whose label and evidence a small model can learn: the one word in capitals."""
    rng, rows = random.Random(seed), []
    for i in range(n):
        label = rng.choice(["animal", "animal", "animal", "plant", "tool"])
        word = rng.choice(WORDS[label]).upper()
        before, after = (" ".join(rng.choice(["é", "go", "lo"]) for _ in range(rng.randint(1, 4)))
                         for _ in range(2))
        rows.append(dict(text=f"{before} {word} {after} {i}", label=label, evidence=word))
    return rows


def make_several(n):
    """Rows with one to three words in capitals, of one class: the evidence, in no order."""
    rng, rows = random.Random(3), []
    for i in range(n):
        label = rng.choice(["animal", "plant"])
        evidence = [word.upper() for word in rng.sample(WORDS[label], rng.randint(1, 3))]
        words = [rng.choice(["é", "go", "lo"]) for _ in range(4)] + evidence
        rng.shuffle(words)
        rows.append(dict(text=f"{' '.join(words)} {i}", label=label, evidence=evidence, doc=i // 4))
    return rows


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="session")
def labels(tmp_path_factory):
    """A prepared folder of 400 rows of all three tasks; rows.jsonl beside it."""
    folder = tmp_path_factory.mktemp("labels")
    return prepare(write_jsonl(folder / "rows.jsonl", make_rows(400)), folder / "bin")


@pytest.fixture(scope="session")
def several(tmp_path_factory):
    """A prepared folder of 200 rows of make_several, in groups of 4."""
    folder = tmp_path_factory.mktemp("several")
    return prepare(write_jsonl(folder / "rows.jsonl", make_several(200)), folder / "bin",
                   "--group", "doc")


def prepare(path, out, *options):
    """python -m data.prepare.labels PATH --out OUT, which must end well; the folder OUT."""
    assert labels_main([path, "--out", str(out), *options]) == 0
    return out


def command(*args):
    """python -m ARGS in the repository: (exit code, output)."""
    done = python("-m", *args, merged=True)
    return done.returncode, done.stdout


def lines(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


# -----------------------------------------------------------------------------
# numbers, with scikit-learn as the oracle

def random_case(seed):
    """(labels, scores) with ties, imbalance, and sometimes a class that is never there or never
    said."""
    rng = np.random.default_rng(seed)
    K, n = int(rng.integers(2, 6)), int(rng.integers(3, 60))
    scores = rng.integers(1, 6, (n, K)).astype(float)
    if seed % 3 == 0:
        scores[:, 0] = 0.5  # never said
    return rng.integers(seed % 2, K, n), scores / scores.sum(1, keepdims=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(40))
def test_numbers_are_those_of_scikit_learn(seed):
    from sklearn import metrics as sk  # here: every worker reads this file, and one needs it
    y, scores = random_case(seed)
    K, said, got = scores.shape[1], scores.argmax(1), classification_metrics(y, scores)
    assert got["accuracy"] == pytest.approx(sk.accuracy_score(y, said), abs=1e-9)
    assert got["confusion_matrix"] == sk.confusion_matrix(y, said, labels=range(K)).tolist()
    for mean in ("macro", "weighted"):
        theirs = sk.precision_recall_fscore_support(y, said, average=mean, zero_division=0)
        ours = [got[f"{name}_{mean}"] for name in ("precision", "recall", "f1")]
        assert ours == pytest.approx(theirs[:3], abs=1e-9)
    *each, support = sk.precision_recall_fscore_support(y, said, labels=range(K), zero_division=0)
    for name, values in zip(("precision", "recall", "f1"), each):
        assert got[f"{name}_per_class"] == pytest.approx(values.tolist(), abs=1e-9)
    assert got["support"] == support.tolist()
    for k in range(K):
        both = len(set(y == k)) == 2
        theirs = sk.roc_auc_score(y == k, scores[:, k]) if both else None
        assert got["auroc_per_class"][k] == pytest.approx(theirs, abs=1e-9)
    if set(y) != set(range(K)):
        assert got["auroc"] is None
    elif K == 2:
        assert got["auroc"] == pytest.approx(sk.roc_auc_score(y, scores[:, 1]), abs=1e-9)
    else:
        theirs = sk.roc_auc_score(y, scores, multi_class="ovr")
        assert got["auroc"] == pytest.approx(theirs, abs=1e-9)


def test_labels_of_eight_bits_are_those_of_scikit_learn():
    from sklearn.metrics import confusion_matrix
    y, scores = np.arange(200, dtype=np.uint8) % 20, np.random.default_rng(0).random((200, 20))
    got = classification_metrics(y, scores)["confusion_matrix"]
    assert got == confusion_matrix(y, scores.argmax(1)).tolist()


def test_exact_match_of_spans_by_hand():
    truths, guesses = torch.tensor([[2, 4], [-1, -1], [0, 0], [3, 5]]), torch.tensor([[2, 4]] * 4)
    sums = span_sums(truths, guesses)
    assert sums["spans"] == 3 and span_metrics(sums) == dict(
        exact_match=1 / 3, token_f1=pytest.approx((1 + 0 + 2 * 2 / 6) / 3))
    assert span_metrics(span_sums(truths[1:2], guesses[1:2])) == dict(exact_match=None,
                                                                      token_f1=None)


def test_several_spans_are_compared_as_sets():
    """By hand: in another order, one too many, one too few, none there; a token of two spans."""
    none = [-1, -1]
    truths = torch.tensor([[0, 1, 4, 5], [2, 2, *none], [0, 1, 4, 5], [*none, *none], [0, 3, 6, 7]])
    guesses = torch.tensor([[4, 5, 0, 1, *none], [2, 2, 7, 7, *none], [4, 5, *none, *none],
                            [2, 2, *none, *none], [1, 3, 5, 6, 8, 8]])
    sums = span_sums(truths, guesses)
    assert sums["spans"] == 4 and span_metrics(sums) == dict(
        exact_match=1 / 4, token_f1=pytest.approx((1 + 2 / 3 + 4 / 6 + 2 * 4 / 12) / 4))
    one = span_sums(truths[1:2, :2], guesses[1:2])  # data with one span, a model of several
    assert one["exact"] == 0 and one["overlap"] == pytest.approx(2 / 3)


def spans_of(pairs):
    """[(first, last)] of the numbers in a row of spans."""
    return [(a, b) for a, b in zip(pairs[::2], pairs[1::2]) if a >= 0]


@pytest.mark.parametrize("seed", range(5))
def test_sums_of_several_spans_are_those_of_sets_of_tokens(seed):
    rng = random.Random(seed)

    def draw(n):
        cuts = sorted(rng.sample(range(12), 2 * rng.randint(0, n)))
        pairs = [cuts[i:i + 2] for i in range(0, len(cuts), 2)]
        return [*itertools.chain(*rng.sample(pairs, len(pairs))), *[-1] * 2 * n][:2 * n]
    truths, guesses = [draw(3) for _ in range(40)], [draw(4) for _ in range(40)]
    expected = collections.Counter(spans=0)
    for truth, guess in zip(map(spans_of, truths), map(spans_of, guesses)):
        a, b = ({t for first, last in pairs for t in range(first, last + 1)}
                for pairs in (truth, guess))
        if truth:
            expected.update(spans=1, exact=set(truth) == set(guess),
                            overlap=2 * len(a & b) / (len(a) + len(b)))
    got = span_sums(torch.tensor(truths), torch.tensor(guesses))
    assert {name: n.item() for name, n in got.items()} == pytest.approx(expected)


@pytest.mark.parametrize("labels, scores", [
    ([2], [[1.0, 0.0]]), ([-1], [[1.0, 0.0]]), ([0], [[np.nan, 0.0]])])
def test_labels_and_scores_that_do_not_fit_are_refused(labels, scores):
    with pytest.raises(ValueError):
        classification_metrics(labels, scores)


def test_the_calibration_error_is_a_loop_over_bins():
    rng = np.random.default_rng(0)
    scores, y = rng.dirichlet([1, 1, 1], 200), rng.integers(0, 3, 200)
    scores[0] = 1, 0, 0  # the last bin includes 1
    p, correct, expected = scores.max(1), scores.argmax(1) == y, 0.0
    for i in range(15):
        inside = (p >= i / 15) & ((p < (i + 1) / 15) | (i == 14))
        if inside.any():
            expected += inside.mean() * abs(correct[inside].mean() - p[inside].mean())
    assert calibration_error(y, scores) == pytest.approx(expected)


# -----------------------------------------------------------------------------
# the loss

def small_model(task="joint", n_spans=1, **options):
    spec = dict(task=task, classes=["a", "b", "c"], class_counts=[5, 3, 2], max_tokens=12,
                vocab_size=20, n_spans=n_spans)
    shape = GPTConfig(block_size=8, vocab_size=20, n_layer=1, n_head=2, n_embd=16, n_hidden=32)
    return Classifier(shape, spec, span_weight=0.7, **options)


def test_near_scores_of_evidence_differ_in_bfloat16():
    """Beside numpy: the scores of the same keys and query, whose products are not rounded."""
    pointer = Pointer(16)
    x = torch.randn(3, 50, 16, generator=torch.Generator().manual_seed(0))
    query, mask = x[:, 0] * 30, torch.ones(3, 50, dtype=torch.bool)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        scores = pointer(query, x, mask)
        keys, query = pointer.key(x).float().numpy(), pointer.query(query).float().numpy()
    expected = np.einsum("btc,bc->bt", keys, query) / 4
    np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-5, atol=1e-5)


def small_batch(n=7):
    g = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 13, (n,), generator=g)
    ends = (torch.rand(n, generator=g) * lengths).long()
    starts = (torch.rand(n, generator=g) * (ends + 1)).long()
    spans = torch.stack((starts, ends), 1)
    spans[2] = -1  # a row without evidence
    return (torch.randint(0, 20, (n, 12), generator=g), lengths,
            torch.randint(0, 3, (n,), generator=g), spans)


def gradients(loss, model):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def test_the_loss_of_labels_is_torchs_cross_entropy():
    model, (tokens, lengths, labels, spans) = small_model("class"), small_batch()
    loss, _ = model(tokens, lengths, labels, spans)
    scores, none = model(tokens, lengths)
    expected = F.cross_entropy(scores, labels)
    assert none is None
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(loss, model), gradients(expected, model))


@pytest.mark.parametrize("task", ["class", "span", "joint"])
def test_losses_and_sums_of_parts_add_up_to_those_of_the_whole(task):
    model, batch = small_model(task).eval(), small_batch()
    loss, sums = model(*batch)
    parts = [model(*(t[i:j] for t in batch)) for i, j in ((0, 2), (2, 3), (3, 7))]
    count = sum(s["count"] for _, s in parts)
    torch.testing.assert_close(sum(part * s["count"] for part, s in parts) / count, loss)
    for name, value in sums.items():
        torch.testing.assert_close(sum(s[name] for _, s in parts), value)


def test_in_a_frame_too_a_row_without_evidence_adds_nothing_to_the_loss():
    model, (tokens, lengths, labels, spans) = small_model("span"), small_batch()
    model.spec["frame"] = [1, 1]
    spans[:] = -1
    spans[:3] = torch.tensor([1, 2])
    loss, _ = model(tokens, lengths, labels, spans)
    alone, _ = model(tokens[:3], lengths[:3], labels[:3], spans[:3])
    assert torch.equal(loss, alone) and gradients(loss, model).isfinite().all()


def pointed(pointer, query, states):
    """Softmax and its logarithm over `states` (n, C) for a query (C,), in float64."""
    w = {n: p.detach().double().numpy() for n, p in pointer.named_parameters()}
    q = w["query.weight"] @ query + w["query.bias"]
    scores = states @ w["key.weight"].T @ q / np.sqrt(len(query))
    return scores - np.log(np.exp(scores - scores.max()).sum()) - scores.max()


@pytest.mark.parametrize("task", ["class", "span", "joint"])
def test_losses_and_counts_are_those_of_a_loop_over_rows(task):
    """Of rows with and without evidence, one token of it and all, a text of the full length."""
    model, (tokens, lengths, labels, spans) = small_model(task).eval(), small_batch(9)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3, generator=torch.Generator().manual_seed(p.numel()))
    lengths[3], spans[3], spans[4] = 12, torch.tensor([0, 11]), torch.tensor([1, 1])
    lengths[5], spans[5] = 1, 0
    with torch.no_grad():
        states = model.gpt.trunk(tokens).double().numpy()
        loss, sums = model(tokens, lengths, labels, spans)
        scores, said = model(tokens, lengths)
    total = label_total = span_total = count = 0
    found = exact = overlap = 0
    matrix = np.zeros((3, 3), int)
    for i, n in enumerate(lengths.tolist()):
        x, (a, b), label_loss, span_loss = states[i, :n], spans[i].tolist(), 0.0, 0.0
        w = 1.0 if task != "span" else float(a >= 0)
        if task != "span":
            z = x[-1] @ model.head.weight.detach().double().numpy().T + model.head.bias.tolist()
            np.testing.assert_allclose(scores[i], z, atol=1e-4)
            label_loss = np.log(np.exp(z).sum()) - z[labels[i]]
            matrix[labels[i], z.argmax()] += 1
        if task != "class":
            ends = pointed(model.end, x[-1], x)
            end = int(ends.argmax())
            start = int(pointed(model.start, x[end], x[:end + 1]).argmax())
            assert said[i].tolist() == [start, end]
            if a >= 0:
                span_loss = -(ends[b] + pointed(model.start, x[b], x[:b + 1])[a]) / 2
                both = len(set(range(a, b + 1)) & set(range(start, end + 1)))
                found, exact = found + 1, exact + ((a, b) == (start, end))
                overlap += 2 * both / (b - a + 1 + end - start + 1)
        total += w * (label_loss + (0.7 if task == "joint" else 1.0) * span_loss)
        label_total, span_total, count = (label_total + w * label_loss, span_total + w * span_loss,
                                          count + w)
    expected = dict(count=count)
    if task == "joint":
        expected |= dict(label_loss=label_total, span_loss=span_total)
    if task != "class":
        expected |= dict(spans=found, exact=exact, overlap=overlap)
    got = {n: v.item() for n, v in sums.items() if n != "confusion"}
    assert got == pytest.approx(expected, rel=1e-4)
    assert task == "span" or sums["confusion"].tolist() == matrix.tolist()
    assert float(loss) == pytest.approx(total / count, rel=1e-4)
    assert set(model.train()(tokens, lengths, labels, spans)[1]) == set(expected) - {
        "spans", "exact", "overlap"}
    numbers = model.numbers({n: v.double() for n, v in sums.items()})
    assert numbers.get("token_f1") == (None if task == "class" else pytest.approx(overlap / found))
    assert numbers.get("label_loss") == (
        pytest.approx(label_total / count, rel=1e-4) if task == "joint" else None)
    if task == "span":
        assert numbers["f1_macro"] == numbers["token_f1"]
    else:
        want = classification_metrics(labels.numpy(), scores.double().softmax(1).numpy())
        for name, value in want.items():
            if name == "accuracy" or name.endswith(("_macro", "_weighted")):
                assert numbers[name] == pytest.approx(value, abs=1e-6)
    if task != "class":  # nothing to find
        loss, sums = model.eval()(tokens, lengths, labels, torch.full_like(spans, -1))
        assert loss.isfinite() and model.numbers(sums)["exact_match"] is None


def several_spans():
    """A model of up to three spans with random weights, and a batch with two, one, three, none."""
    model, (tokens, lengths, labels, _) = small_model("span", n_spans=3).eval(), small_batch(4)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.6, generator=torch.Generator().manual_seed(p.numel()))
    lengths[:] = torch.tensor([12, 5, 9, 1])
    spans = torch.tensor([[0, 2, 7, 7, -1, -1], [3, 4, -1, -1, -1, -1], [0, 0, 2, 4, 6, 8],
                          [-1] * 6])
    return model, tokens, lengths, labels, spans


def test_the_loss_of_several_spans_is_the_cross_entropy_of_equal_shares():
    """Loss and gradients: the target of the last token is 1 / n at each of n, and each first token
    is found from the last one of that span."""
    model, tokens, lengths, labels, spans = several_spans()
    loss, sums = model(tokens, lengths, labels, spans)
    rows = []
    for ids, n, pairs in zip(tokens, lengths.tolist(), map(spans_of, spans.tolist())):
        x = model.gpt.trunk(ids[None, :n])
        ends = model.end(x[:, -1], x, torch.ones(1, n, dtype=torch.bool))[0]
        target = torch.zeros(n)
        starts = []
        for first, last in pairs:
            target[last] = 1 / len(pairs)
            score = model.start(x[:, last], x, torch.arange(n)[None] <= last)[0, :last + 1]
            starts.append(F.cross_entropy(score, torch.tensor(first)))
        if pairs:
            rows.append((F.cross_entropy(ends, target) + sum(starts) / len(pairs)) / 2)
    expected = sum(rows) / 3
    assert sums["count"] == sums["spans"] == 3
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(loss, model), gradients(expected, model))


@pytest.mark.parametrize("share", [1e-9, 0.3, 0.9])
def test_spans_are_predicted_one_after_the_other(share, monkeypatch):
    """Against a loop: the best last token that is left, then the best first token that is reached
    from it without a token of another span, while it is probable enough; text can be left over."""
    monkeypatch.setattr(classifier, "SPAN_SHARE", share)
    model = several_spans()[0]
    lengths = small_batch(60)[1]
    generator = torch.Generator().manual_seed(0)  # of different ones: equal tokens can be a tie
    tokens = torch.stack([torch.randperm(20, generator=generator)[:12] for _ in lengths])
    lengths[3] = 1
    found = []
    with torch.no_grad():
        predicted = model(tokens, lengths)[1].tolist()
        for ids, n, got in zip(tokens, lengths.tolist(), predicted):
            x = model.gpt.trunk(ids[None, :n]).double().numpy()[0]
            ends, taken, pairs = np.exp(pointed(model.end, x[-1], x)), set(), []
            for _ in range(3):
                left = [t for t in range(n) if t not in taken]
                end = max(left, key=lambda t: ends[t], default=None)
                if end is None or ends[end] < share * ends.max():
                    break
                first = max(t for t in range(-1, end) if t in taken or t == -1) + 1
                starts = pointed(model.start, x[end], x[:end + 1])
                start = max(range(first, end + 1), key=lambda t: starts[t])
                pairs.append((start, end))
                taken |= set(range(start, end + 1))
            assert got == [*itertools.chain(*pairs), *[-1] * (6 - 2 * len(pairs))]
            found.append(len(pairs))
    assert found[3] == 1 and len(set(found)) > 1
    equal = torch.zeros(1, 4)  # the first of equal scores, and no token twice
    x = torch.zeros(1, 4, 16)
    assert model.predict_spans(x, equal).tolist() == [[0, 0, 1, 1, 2, 2]]


def hashed(tokens, n_buckets):
    """The buckets of the n-grams of up to six tokens, with Python's integers."""
    found = set()
    for start in range(len(tokens)):
        h = 0
        for token in tokens[start:start + 6]:
            h = (h * 0x9E3779B1 + token + 1) % 2 ** 64
            signed = h - 2 ** 64 * (h >> 63)
            mixed = (signed ^ signed >> 29) * 0x3F58476D1CE4E5B9 % 2 ** 64
            mixed -= 2 ** 64 * (mixed >> 63)
            found.add((mixed ^ mixed >> 32) % n_buckets)
    return sorted(found)


def test_scores_of_ngrams_are_those_of_a_loop_over_texts():
    """Of one token, and of one that is repeated; an n-gram counts once however often it is there;
    buckets of an odd number."""
    layer, (tokens, lengths, *_) = NGrams(1001, 3), small_batch(9)[:2]
    lengths[0], tokens[1] = 1, 5
    with torch.no_grad():
        layer.weight.normal_()
        got = layer(tokens, torch.arange(12) < lengths[:, None])
    for row, n, scores in zip(tokens.tolist(), lengths.tolist(), got):
        index = hashed(row[:n], 1001)
        expected = 16 * layer.weight[index].sum(0) / len(index) ** 0.5
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)
    assert len(hashed([5] * 12, 1001)) == 6


def test_without_the_causal_mask_each_row_alone_gives_the_same():
    """The label is that of the mean state, the network counts with n / (n + 1,000)."""
    model = small_model(bidirectional=True, ngrams=64).eval()
    tokens, lengths, *_ = small_batch(9)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3, generator=torch.Generator().manual_seed(p.numel()))
        scores, spans = model(tokens, lengths)
        for i, n in enumerate(lengths.tolist()):
            row = tokens[i:i + 1, :n]
            seen = torch.ones(1, 1, n, n, dtype=torch.bool)
            text = model.gpt.trunk(row, mask=seen).mean(1)
            expected = 10 / 1010 * model.head(text) + model.ngrams(row, seen[:, 0, 0])
            torch.testing.assert_close(scores[i:i + 1], expected, rtol=1e-4, atol=1e-4)
            assert spans[i].tolist() == model(row, lengths[i:i + 1])[1][0].tolist()
    states = [model.gpt.trunk(t, mask=seen)[0, 0] for t in (row, row.roll(1, 1).roll(-1, 1) + (
        torch.arange(n) == n - 1))]
    assert not torch.equal(*states)  # the first state sees the last token


def test_the_score_of_an_evaluation_is_the_mean_of_label_and_evidence():
    model, batch = small_model().eval(), small_batch()
    numbers = model.numbers(model(*batch)[1])
    assert numbers["score"] == (numbers["f1_macro"] + numbers["exact_match"]) / 2
    for task, name in (("class", "f1_macro"), ("span", "exact_match")):
        model = small_model(task).eval()
        numbers = model.numbers(model(*batch)[1])
        assert numbers["score"] == pytest.approx(
            numbers[name] if task == "class" else (numbers[name] + numbers["token_f1"]) / 2)


def test_how_a_classifier_is_made():
    spec = dict(task="joint", classes=["a", "b"], class_counts=[3, 0], max_tokens=12, vocab_size=20)
    shape = GPTConfig(block_size=8, vocab_size=20, n_layer=1, n_head=2, n_embd=64, n_hidden=32,
                      dropout=0.5)
    model = Classifier(shape, spec, seed=3)
    assert model.gpt.config.block_size == 12 and model.span_weight == 1.0
    for module in (model.head, model.end.query, model.end.key, model.start.query):
        assert module.weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert not model.head.bias.any() and not model.start.query.bias.any()
    assert model.initial("gpt.wte.weight", (4, 64), 3) is not None
    assert model.initial("other.weight", (4, 64), 3) is None
    other = Classifier(shape, spec, seed=4)
    assert not torch.equal(model.head.weight, other.head.weight)
    head = 6 * model.gpt.wte.weight.numel()  # an output layer, which is not computed
    trained = model.flops_per_unit()
    assert trained == (GPT(replace(shape, block_size=12)).flops_per_unit() - head) * 12
    model.gpt.wte.requires_grad_(False)
    assert model.flops_per_unit() == trained
    model.gpt.wte.requires_grad_(True)
    learned = GPTConfig(block_size=16, vocab_size=20, n_layer=1, n_head=2, n_embd=16,
                        pos="learned")
    longer = Classifier(learned, spec)
    assert longer.gpt.wpe.weight.shape == (16, 16)
    for weights in (longer.state_dict(), longer.gpt.state_dict()):  # the first positions are used
        adopted = Classifier(replace(learned, block_size=8), spec).adopt(weights)
        assert torch.equal(adopted["gpt.wpe.weight"], weights[[*weights][1]][:8])
    tokens, lengths = small_batch()[:2]
    a, b = (model.eval()(tokens, lengths)[0] for _ in range(2))
    assert torch.equal(a, b)  # no dropout
    assert not torch.equal(model.train()(tokens, lengths)[0], a)


def test_weights_of_a_gpt_or_of_another_classifier_are_taken_where_they_fit():
    model = small_model()
    names = dict(model.state_dict())
    gpt = {n.removeprefix("gpt."): t + 1 for n, t in names.items() if n.startswith("gpt.")}
    assert set(model.adopt(gpt)) == {n for n in names if n.startswith("gpt.")}
    theirs = names | {"head.weight": torch.zeros(5, 16)}  # of five classes
    assert set(model.adopt(theirs)) == set(names) - {"head.weight"}


def test_what_stands_after_a_text_changes_nothing():
    model, (tokens, lengths, *_) = small_model().eval(), small_batch()
    other = torch.where(torch.arange(12) < lengths[:, None], tokens, 7)
    for a, b in zip(model(tokens, lengths), model(other, lengths)):
        torch.testing.assert_close(a, b)


# -----------------------------------------------------------------------------
# data

def test_jsonl_csv_words_and_offsets_make_the_same_rows(tmp_path):
    rows = make_rows(30)
    with open(tmp_path / "rows.csv", "w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, ["Body", "label", "start", "end"])
        writer.writeheader()
        for row in rows:
            start = row["text"].index(row["evidence"])
            writer.writerow(dict(Body=row["text"], label=row["label"], start=start,
                                 end=start + len(row["evidence"])))
    one = read_labelled_texts([write_jsonl(tmp_path / "rows.jsonl", rows)])
    two = read_labelled_texts([str(tmp_path / "rows.csv")], Fields(text="Body"))
    assert one == two and len(one) == 30


@pytest.mark.parametrize("name", ["byte", "gpt2"])
def test_spans_are_the_tokens_of_the_evidence(name, tmp_path, monkeypatch):
    if name == "gpt2":
        if not (SHARED / "tiktoken_cache").exists():
            pytest.skip("no rank file of GPT-2's here")
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED / "tiktoken_cache"))
    tokenizer = load_tokenizer(name)
    rows = read_labelled_texts([write_jsonl(tmp_path / "rows.jsonl", make_rows(30))])
    a = to_arrays(rows, tokenizer, sorted(WORDS), 512)
    for row, tokens, (first, last) in zip(rows, a["tokens"], a["spans"]):
        assert tokenizer.decode(tokens[first:last + 1]).strip() == row.evidence[0]


def test_lists_of_words_and_of_offsets_make_the_same_spans(tmp_path):
    """In the order of the text, a token of two parts once; a list of one is one."""
    assert merge_spans([(5, 9), (3, 4), (1, 3), (6, 7)]) == [1, 4, 5, 9]
    text = "go OWL é lo CAT go DOG"
    words = dict(text=text, label="a", evidence=["DOG", "OWL é", "é lo"])
    places = [(text.index(part), text.index(part) + len(part)) for part in words["evidence"]]
    offsets = dict(text=text, label="a", start=[a for a, _ in places], end=[b for _, b in places])
    path = write_jsonl(tmp_path / "a.jsonl", [words, offsets, dict(text=text, evidence=[])])
    rows = read_labelled_texts([path])
    assert rows[0] == rows[1] and rows[0].evidence == ["OWL é", "é lo", "DOG"]
    tokenizer = load_tokenizer("byte")
    arrays = to_arrays(rows, tokenizer, ["a"], 99)
    assert [tokenizer.decode(arrays["tokens"][0][a:b + 1]) for a, b in spans_of(
        arrays["spans"][0])] == ["OWL é lo", "DOG"]
    assert arrays["spans"][1].tolist() == arrays["spans"][0].tolist()
    assert arrays["spans"][2].tolist() == [-1] * 4
    cut = to_arrays(rows, tokenizer, ["a"], 20)["spans"]
    assert cut.tolist() == [[-1, -1]] * 3  # one part was cut off
    one = write_jsonl(tmp_path / "b.jsonl", [words | dict(evidence=["OWL"])])
    assert to_arrays(read_labelled_texts([one]), tokenizer, ["a"], 99)["spans"].tolist() == [[3, 5]]


def test_a_text_without_tokens_is_refused():
    tokenizer = load_tokenizer("byte")
    tokenizer.encode_array = lambda text: np.zeros(0, np.uint8)  # e.g. of a normalizer
    with pytest.raises(DataError, match="the text ' ' has no tokens"):
        to_arrays([LabelledText(" ", "a", [], "")], tokenizer, ["a"], 9)


def test_a_group_is_the_same_as_a_whole_number_and_as_a_float():
    """A table with missing values has floats."""
    fields = Fields()
    fields.group = "doc"
    rows = [parse_labelled_text(dict(text="a", doc=doc), fields) for doc in (1, 1.0, "1")]
    assert [row.group for row in rows] == ["1"] * 3


def test_rows_are_split_by_their_group_and_cut_with_a_word(tmp_path, capsys):
    rows = [row | dict(doc=i // 4) for i, row in enumerate(make_rows(400))]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    prepare(path, tmp_path / "bin", "--group", "doc", "--max_tokens", "8")
    meta = json.loads((tmp_path / "bin/meta.json").read_text())
    sizes = [len(np.load(tmp_path / f"bin/{s}_tokens.npy")) for s in ("train", "val", "test")]
    assert sum(sizes) == 400 and all(n % 4 == 0 and n for n in sizes) and sizes[0] > 280
    assert meta["max_tokens"] == 8 and meta["task"] == "joint"
    lost = 400 - sum(int((np.load(tmp_path / f"bin/{s}_spans.npy")[:, 0] >= 0).sum())
                     for s in ("train", "val", "test"))
    out = capsys.readouterr().out
    assert lost and f"{lost:,} rows lost their evidence" in out


@pytest.fixture(scope="session")
def grouped(tmp_path_factory):
    """A prepared folder of 400 rows, in 100 groups of 4 neighbours; rows.jsonl beside it."""
    folder = tmp_path_factory.mktemp("grouped")
    rows = [row | dict(doc=i // 4) for i, row in enumerate(make_rows(400))]
    return prepare(write_jsonl(folder / "rows.jsonl", rows), folder / "bin", "--group", "doc")


def test_each_row_is_tested_once_and_groups_stay_together(grouped):
    """Over as many seeds as there are folds, and validated once; training rows are counted."""
    rows = {row["text"]: (i // 4, row["label"]) for i, row in enumerate(make_rows(400))}
    decode = load_tokenizer("byte").decode
    seen = collections.Counter()
    for seed in range(8, 13):
        config = load_config(None, SMALL | TINY | dict(data_dir=str(grouped), folds=5, seed=seed))
        data = classifier.open_data(config, Ranks())
        parts = {}
        for split in ("train", "val", "test"):
            arrays = getattr(data, split).arrays
            texts = [decode(ids[:n]) for ids, n in zip(*arrays[:2])]
            assert [sorted(WORDS)[k] for k in arrays[2]] == [rows[text][1] for text in texts]
            for ids, (first, last), text in zip(arrays[0], arrays[3], texts):
                assert decode(ids[first:last + 1]) in text
            parts[split] = {rows[text][0] for text in texts}
            seen.update((split, text) for text in texts)
            assert len(texts) == 4 * len(parts[split]) and 40 < len(texts) < 300
        assert sum(map(len, parts.values())) == 100 == len(set().union(*parts.values()))
        counts = collections.Counter(map(int, data.train.arrays[2]))
        assert data.spec["class_counts"] == [counts[k] for k in range(3)]
    assert seen == {(split, text): times for split, times in (("train", 3), ("val", 1), ("test", 1))
                    for text in rows}


@pytest.mark.parametrize("text, evidence, place", [
    ("main is in Maine", "in", 8), ("main", "in", 2), ("in, and in", "in", 0),
    ("a (b) c", "(b)", 2), ("aaa aa", "aa", 4), ("the été", "été", 4)])
def test_evidence_is_looked_for_as_whole_words_first(text, evidence, place, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [dict(text=text, evidence=evidence)])
    row, = read_labelled_texts([path])
    assert (row.spans[0][0], row.evidence) == (place, [evidence])


def test_classes_of_equal_numbers_have_an_order():
    """Not that of a set, which differs between processes."""
    names = [f"{2:0{n}}" for n in range(8, 0, -1)] + ["10"]
    rows = [LabelledText("x", name, [], "x") for name in reversed(names)]
    assert find_classes(rows) == names


def test_one_label_is_one_class_however_it_is_written(tmp_path):
    labels = ["neg", "neg ", " pos", "pos", "1", 1, 1.0, "1.00", True, "True", "Neg"]
    path = write_jsonl(tmp_path / "a.jsonl", [dict(text=f"{i}", label=labels[i % 11])
                                              for i in range(220)])
    meta = json.loads((prepare(path, tmp_path / "bin") / "meta.json").read_text())
    assert meta["classes"] == ["1", "Neg", "neg", "pos", "true"]


def test_too_many_fields_are_said(tmp_path):
    (tmp_path / "a.csv").write_text("label,text\nx,hello\ny,hello, you\n")
    with pytest.raises(ValueError, match=r"a.csv:3: not the 2 values"):
        read_labelled_texts([str(tmp_path / "a.csv")])


def test_the_example_takes_one_word_out_and_says_where():
    source = ("import os\n\n\ndef f(x):\n    # if only\n"
              "    return x if x else 'for x in y'\n\ng = 1\n")
    found = {word: (text, text[start:end]) for word, text, start, end in missing_words(source)}
    assert found == {
        "import": ("os\n\n", "os"),
        "def": ("\n\nf(x):\n    # if only\n", "f"),
        "return": ("def f(x):\n    # if only\n    x if x else 'for x in y'\n\n", "x"),
        "if": ("def f(x):\n    # if only\n    return x x else 'for x in y'\n\n", "x")}
    said = {word: text[start:end] for word, text, start, end in missing_words("\f\n" + source)}
    assert said == {word: name for word, (_, name) in found.items()}  # a form feed ends no line


def test_the_example_is_of_many_files_of_both_packages():
    rows = [row for _, row in itertools.islice(example_records(), 800)]
    assert {row["file"].split("/")[0] for row in rows} == {"numpy", "torch"}
    counts = collections.Counter((row["file"], row["label"]) for row in rows)
    assert max(counts.values()) == 6 and len({row["text"] for row in rows}) == 800
    assert all(row["text"][row["start"]:row["end"]].isidentifier() for row in rows)


@pytest.mark.parametrize("record, message", [
    (dict(body="x", label="a"), "no field 'text'; its fields are 'body', 'label'"),
    (dict(text="", label="a"), "field 'text': expected a text"),
    (dict(text="x y"), "1 of 11 rows have no label, the first is 'x y'; expected a label in "
                        "each row or in none"),
    (dict(text="x", label=["a"]), "field 'label': expected a label"),
    (dict(text="some words", label="a", evidence="word of"), "'word of' does not occur"),
    (dict(text="x", label="a", start=0, end=9), "start [0] and end [9]: expected integers inside"),
    (dict(text="x", label="a", start="?", end=9), "expected integers"),
    (dict(text="some words", label="a", start=1.9, end=4), "expected integers"),
    (dict(text="some words", label="a", start=[0, 5], end=[4]), "as many starts as ends"),
    (dict(text="some words", label="a", start=[0, 5], end=[4, 11]), "[4, 11]: expected integers"),
    (dict(text="some words", label="a", evidence=["some", ""]), "'' does not occur"),
    (dict(text="some words", label="a", evidence=["some", "more"]), "'more' does not occur"),
    (dict(text="x", label="a", start=0), "start [0] and end []: expected integers")])
def test_bad_rows_are_named(record, message, tmp_path, capsys):
    path = write_jsonl(tmp_path / "rows.jsonl", [*make_rows(10), record])
    assert labels_main([path, "--out", str(tmp_path / "bin")]) == 2
    said = capsys.readouterr().err
    assert message in said and ("rows.jsonl" in said or "in each row" in said)
    assert not (tmp_path / "bin").exists()


def test_positions_as_pandas_writes_them(tmp_path):
    """4.0 in a table in which a row has no evidence."""
    (tmp_path / "a.csv").write_text("text,label,start,end\nsome words,a,5.0,10.0\nothers,b,,\n")
    rows = read_labelled_texts([str(tmp_path / "a.csv")])
    assert [row.evidence for row in rows] == [["words"], []]


def test_bad_files_and_settings_are_named(tmp_path, capsys):
    path, out = tmp_path / "rows.jsonl", str(tmp_path / "bin")
    for content, args, message in [
            (b'{"text": \n', [], "rows.jsonl:1: not valid JSON"), (b"\xff\xfe", [], "utf-8"),
            (b"", [], "no rows"), (b'{"text": "x"}\n', [], "no row has a label or evidence"),
            (b'{"text": "x", "label": 1}\n', [], "two classes or more"),
            (b'{"text": "x", "label": 1}\n', ["--evidence", "why"], "why: no row has this field"),
            (b'{"text": "x", "label": 1}\n', ["--group", "doc"], "no field 'doc' (--group)"),
            (b'{"text": "x", "label": 1}\n{"text": "y", "label": 2}\n', [], "none of 2 rows"),
            (b"", ["--example"], "give one or more FILEs, or --example"),
            (b"", ["--val_fraction", "0.5"], "must be below 0.5"),
            (b"", ["--tokenizer", "bite"], "expected byte, char")]:
        path.write_bytes(content)
        assert labels_main([str(path), "--out", out, *args]) == 2
        assert message in capsys.readouterr().err
    assert labels_main([str(tmp_path / "none.csv"), "--out", out]) == 2
    assert "none.csv: no such file" in capsys.readouterr().err


# -----------------------------------------------------------------------------
# the program

def program(labels, out, **changes):
    """The program on prepared rows, to its end: (exit code, output)."""
    return Program(labels, out, **TINY | changes).wait()


@pytest.mark.ci
def test_the_readmes_commands(tmp_path, data_dir):
    """A GPT is trained; labelled rows are prepared with its tokenizer; a classifier starts from it,
    ends with its numbers on test data, and is evaluated on another file."""
    gpt, out, report = tmp_path / "gpt", tmp_path / "out", tmp_path / "report"
    assert run(*tiny_args(data_dir=data_dir, out_dir=gpt, max_iters=4, tokenizer="byte"))[0] == 0
    path = write_jsonl(tmp_path / "rows.jsonl", make_rows(400))
    code, said = command("data.prepare.labels", path, "--out", tmp_path / "bin", "--tokenizer",
                         gpt / "ckpt.pt")
    assert code == 0 and f" --init_from {gpt}/ckpt.pt --out_dir " in said, said
    code, said = run(*tiny_args(
        model="classifier", data_dir=tmp_path / "bin", out_dir=out, init_from=gpt / "ckpt.pt",
        max_iters=120, eval_interval=20, eval_iters=8, batch_size=16,
        span_weight=0.3, early_stopping_metric="val_f1_macro", early_stopping_mode="max",
        early_stopping_patience=9, seed=3))  # one with which it has learned after half of the steps
    assert code == 0 and "are newly initialised: head.weight" in said, said
    known = {"val_f1_macro", "val_accuracy", "val_exact_match", "val_token_f1",
             "val_precision_weighted", "val_recall_macro"}
    evaluations = [r for r in lines(out) if "val_loss" in r]
    assert known <= set(evaluations[0])
    best = max(r["val_f1_macro"] for r in evaluations)
    state = torch.load(out / "ckpt_best.pt", weights_only=True)
    assert state["progress"]["best_metric"] == -best and best > 0.9
    other = write_jsonl(tmp_path / "other.jsonl", [
        row | dict(id=f"n{i}") for i, row in enumerate(make_rows(60, seed=5))])
    code, said = command("model.classifier", f"checkpoint={out / 'ckpt_best.pt'}",
                         f"dataset.path={other}", "--out", report)
    assert code == 0 and "macro mean" in said and "exact match" in said, said
    assert "confusion matrix" in said
    numbers = json.loads((report / "metrics.json").read_text())
    assert numbers["f1_macro"] > 0.9 and numbers["exact_match"] > 0.5 and numbers["rows"] == 60
    assert sum(map(sum, numbers["confusion_matrix"])) == 60
    said = [json.loads(line) for line in (report / "predictions.jsonl").read_text().splitlines()]
    assert all(row["label"] in WORDS and 0 < row["probability"] <= 1 for row in said)
    assert [(f"n{i}", row["text"], row["label"], [row["evidence"]])
            for i, row in enumerate(make_rows(60, seed=5))] == [
        (row["id"], row["text"], row["true_label"], row["true_evidence"]) for row in said]
    # The test split by the command, which is its default, is what the run ended with.
    test = next(r for r in lines(out) if "test_loss" in r)
    code, said = command("model.classifier", f"checkpoint={out / 'ckpt_best.pt'}")
    assert code == 0, said
    report = out / "report"
    numbers = json.loads((report / "metrics.json").read_text())
    for name in ("f1_macro", "exact_match", "token_f1"):  # one meaning of each
        assert numbers[name] == pytest.approx(test[f"test_{name}"], abs=1e-9)
    assert numbers["rows"] < 60
    said = [json.loads(line) for line in (report / "predictions.jsonl").read_text().splitlines()]
    texts = {row["text"]: row for row in make_rows(400)}
    for row in said:  # of a prepared folder
        assert texts[row["text"]]["label"] == row["true_label"]
        assert [texts[row["text"]]["evidence"]] == [part.strip() for part in row["true_evidence"]]


def test_rows_without_labels_are_only_predicted(tmp_path, labels, trained, capsys):
    path = write_jsonl(tmp_path / "new.jsonl", [dict(text="lo OWL go"), dict(text="go")])
    assert evaluate_main(["--ckpt", str(trained / "ckpt.pt"), "--data", path, "--out",
                          str(tmp_path / "report")]) == 0
    assert "confusion matrix" not in capsys.readouterr().out
    numbers = json.loads((tmp_path / "report" / "metrics.json").read_text())
    assert numbers == dict(rows=2)
    said = (tmp_path / "report" / "predictions.jsonl").read_text().splitlines()
    assert len(said) == 2 and {"id", "text", "label", "probability", "evidence"} == set(
        json.loads(said[0]))


def test_a_run_on_a_mixture_is_evaluated_on_its_first_folder(tmp_path, labels, trained):
    state = load_checkpoint(str(trained / "ckpt.pt"))
    state["config"]["data_dir"] = f"{labels}:0.5,{tmp_path}:0.5"
    save_checkpoint(str(tmp_path / "ckpt.pt"), state)
    assert evaluate_main(["--ckpt", str(tmp_path / "ckpt.pt")]) == 0
    assert json.loads((tmp_path / "report" / "metrics.json").read_text())["rows"] > 0


def test_evidence_alone_has_a_report_without_labels(tmp_path, labels):
    assert program(labels, tmp_path, task="span", max_iters=1)[0] == 0
    assert evaluate_main(["--ckpt", str(tmp_path / "ckpt.pt"), "--data", str(labels), "--out",
                          str(tmp_path / "report")]) == 0
    numbers = json.loads((tmp_path / "report" / "metrics.json").read_text())
    assert set(numbers) == {"rows", "spans", "exact_match", "token_f1"} and numbers["rows"] > 0
    said = (tmp_path / "report" / "predictions.jsonl").read_text().splitlines()
    assert "evidence" in json.loads(said[0]) and "label" not in json.loads(said[0])


def test_a_full_disk_keeps_the_report_of_before(tmp_path, labels, trained, capsys):
    args = ["--ckpt", str(trained / "ckpt.pt"), "--data", str(labels), "--out", str(tmp_path)]
    assert evaluate_main(args) == 0
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with full_disk(100):
        assert evaluate_main([*args, "--split", "val"]) == 2
    assert f"{tmp_path}/predictions.jsonl: File too large" in capsys.readouterr().err
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_two_folders_and_other_classes_are_refused(trained, labels, several, capsys):
    args = ["--ckpt", str(trained / "ckpt.pt"), "--data"]
    assert evaluate_main([*args, str(labels), str(labels)]) == 2
    assert "expected files, or one folder" in capsys.readouterr().err
    assert evaluate_main([*args, str(several)]) == 2
    assert f"{several}: prepared with other classes" in capsys.readouterr().err


def test_the_baseline_is_that_of_scikit_learn(trained, labels, tmp_path, capsys, monkeypatch):
    """On the same rows, of a file of which some have no label; few rows are said."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import f1_score
    rows = make_rows(12, seed=7)
    path = write_jsonl(tmp_path / "a.jsonl", [*rows, dict(text="lo OWL go")])
    args = ["--ckpt", str(trained / "ckpt.pt"), "--data", path, "--out", str(tmp_path / "report"),
            "--baseline"]
    assert evaluate_main(args) == 0
    said = capsys.readouterr().out
    assert "TF-IDF, words" in said and "fewer than 30 rows (the data has 12)" in said
    tokenizer = load_model(trained / "ckpt.pt")[1]
    tokens, lengths, y, _ = open_labels(labels, "train", dict(vocab_size=257, classes=WORDS))
    texts = [tokenizer.decode(ids[:n]) for ids, n in zip(tokens, lengths)]
    names = sorted(WORDS)
    numbers = json.loads((tmp_path / "report" / "metrics.json").read_text())
    for name, options in (("words", {}),
                          ("characters", dict(analyzer="char", ngram_range=(2, 5)))):
        vectorizer = TfidfVectorizer(sublinear_tf=True, **options)
        model = LogisticRegression(C=20, max_iter=1000).fit(vectorizer.fit_transform(texts), y)
        guesses = model.predict(vectorizer.transform([row["text"] for row in rows]))
        expected = f1_score([names.index(row["label"]) for row in rows], guesses, average="macro")
        assert numbers["baselines"][f"TF-IDF, {name}"]["f1_macro"] == pytest.approx(expected)
    unlabelled = write_jsonl(tmp_path / "b.jsonl", [dict(text="lo OWL go")])
    assert evaluate_main([*args[:3], unlabelled, *args[4:]]) == 2
    assert "--baseline: no row has a label" in capsys.readouterr().err
    bad = write_jsonl(tmp_path / "bad.jsonl", [dict(label="owl")])
    assert evaluate_main([*args[:3], bad, *args[4:]]) == 2
    message = capsys.readouterr().err
    assert "bad.jsonl:1: " in message and "--skip_bad" not in message  # it has no such option
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.delattr("model.classifier.__main__.predict")  # before the work
    assert evaluate_main(args) == 2
    assert "pip install scikit-learn" in capsys.readouterr().err


def test_a_run_whose_data_are_gone_is_evaluated_on_other_files(trained, tmp_path, capsys,
                                                               monkeypatch):
    """Also if the folder was called as data sets of the hub are: nothing is downloaded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)  # which would download
    state = load_checkpoint(trained / "ckpt.pt")
    path = write_jsonl(tmp_path / "a.jsonl", make_rows(3))
    for folder in (str(tmp_path / "gone"), "data/reviews"):
        state["config"]["data_dir"] = folder
        save_checkpoint(tmp_path / "ckpt.pt", state)
        assert evaluate_main(["--ckpt", "ckpt.pt", "--data", path]) == 0
        capsys.readouterr()
        for args, words in (([], "no such file or folder"),
                            (["--data", path, "--baseline"], "no such folder")):
            assert evaluate_main(["--ckpt", "ckpt.pt", *args]) == 2
            message = capsys.readouterr().err
            assert folder in message and words in message


def test_folds_join_splits_of_other_widths(several, tmp_path):
    """Fewer spans, or shorter texts, in one split are filled up, with -1 and with 0."""
    folder = shutil.copytree(several, tmp_path / "copy")
    arrays = {name: np.load(folder / f"test_{name}.npy") for name in (*ARRAYS, "groups")}
    short = arrays["lengths"] <= np.median(arrays["lengths"])
    arrays = {name: array[short] for name, array in arrays.items()}
    arrays["tokens"] = arrays["tokens"][:, :arrays["lengths"].max()]
    arrays["spans"] = np.where(arrays["spans"][:, 2:3] < 0, arrays["spans"], -1)[:, :2]
    save_arrays(folder, "test", **arrays)
    spec = dict(vocab_size=257, classes=["animal", "plant"])

    def rows_of(splits):
        return sorted((ids[:n].tolist(), ids[n:].any(), label, spans_of(pairs.tolist()))
                      for arrays in splits for ids, n, label, pairs in zip(*arrays))
    prepared = [open_labels(folder, split, spec) for split in ("train", "val", "test")]
    joined = [open_labels(folder, "test", spec | dict(fold=[k, 3])) for k in range(3)]
    assert rows_of(joined) == rows_of(prepared) and not any(row[1] for row in rows_of(joined))
    assert {arrays[3].shape[1] for arrays in joined} == {6}


@pytest.mark.ci
def test_cross_validation_tests_each_row_once(grouped, tmp_path):
    """The command prints means over the folds of the numbers that the evaluation of each fold's
    checkpoint has, whose rows are those that the run did not see."""
    code, said = command("train.tools.repeat", "--folds=3", "--seeds=3", "--out", tmp_path / "cv",
                         *(f"--{k}={v}" for k, v in (SMALL | TINY | dict(
                             data_dir=grouped, eval_interval=10, ngrams=4096)).items()))
    assert code == 0, said
    rows, accuracy, exact = [], [], []
    for folder in sorted((tmp_path / "cv").glob("base,_seed_*")):
        assert evaluate_main(["--ckpt", str(folder / "ckpt_best.pt")]) == 0
        said_of = [json.loads(line) for line in
                   (folder / "report" / "predictions.jsonl").read_text().splitlines()]
        rows += [row["text"] for row in said_of]
        accuracy.append(statistics.fmean(row["label"] == row["true_label"] for row in said_of))
        exact.append(statistics.fmean(row["evidence"] == row["true_evidence"] for row in said_of))
    assert sorted(rows) == sorted(row["text"] for row in make_rows(400))
    for name, values in (("test_accuracy", accuracy), ("test_exact_match", exact)):
        line = next(line for line in said.splitlines() if f" {name} " in line)
        change, _, n, of, n_seeds, mean, spread = line.split()
        assert (change, n, of, n_seeds) == ("base", "3", "of", "3")
        assert [float(mean), float(spread)] == pytest.approx(
            [statistics.fmean(values), statistics.stdev(values)], rel=1e-3)


@pytest.mark.ci
def test_folds_that_cannot_be_made_are_refused(grouped, labels, tmp_path):
    """Also a resume with another fold, and weights that were trained on what is tested now."""
    for folds in (1, 2):
        with pytest.raises(ValueError, match=f"folds: {folds}: expected 0, or 3 or more"):
            load_config(None, dict(model="classifier", folds=folds))
    code, said = program(grouped, tmp_path / "out", folds=101)
    assert code == 2 and "folds: one of 101 has no rows; the rows are of 100 groups" in said, said
    old = shutil.copytree(grouped, tmp_path / "old")
    (old / "train_groups.npy").unlink()
    code, said = program(old, tmp_path / "out", folds=3)
    assert code == 2 and "train_groups.npy: no such file" in said
    assert program(old, tmp_path / "plain", max_iters=1)[0] == 0
    assert program(grouped, tmp_path / "out", folds=3, max_iters=1)[0] == 0
    for changes, names in ((dict(folds=4), ["folds: checkpoint has 3", "fold: checkpoint has"]),
                           (dict(folds=3, seed=3), ["seed: ", "fold: checkpoint has [2, 3]"])):
        code, said = program(grouped, tmp_path / "out", max_iters=2, **changes)
        assert code == 2 and all(name in said for name in names), said
    start = dict(init_from=str(tmp_path / "out" / "ckpt.pt"), max_iters=0)
    assert program(grouped, tmp_path / "same", folds=3, seed=2, **start)[0] == 0
    for i, changes in enumerate((dict(folds=3, seed=3), dict(folds=4), {})):
        code, said = program(grouped, tmp_path / f"{i}", **start, **changes)
        assert code == 2 and "fold" in said and "checkpoint has" in said, said


def test_the_weight_of_the_evidence_changes_the_loss_only(labels, tmp_path):
    assert_keys_change_only(["val_loss"], labels, tmp_path, TINY, span_weight=3.0)


@pytest.fixture(scope="session")
def trained(tmp_path_factory, labels):
    """The folder of an undisturbed run of 20 steps: dropout, joint."""
    out = tmp_path_factory.mktemp("trained") / "out"
    Program(labels, out, **KEPT).wait()
    assert (out / "ckpt.pt").exists(), (out.parent / "out.output").read_text()
    return out


KEPT = TINY | dict(dropout=0.1, eval_interval=4,
                   save_interval=3, early_stopping_metric="val_f1_macro",
                   early_stopping_mode="max", early_stopping_patience=50)


@pytest.mark.matrix(133)
def test_killed_and_resumed_bit_for_bit(trained, labels, tmp_path):
    """kill -9 while a classifier learns labels and evidence -> the end is exact"""
    at = random.Random().randint(1, 18)
    program = Program(labels, tmp_path / "out", **KEPT)
    program.wait_for(f"iter {at}:")
    program.kill()
    assert Program(labels, tmp_path / "out", **KEPT).wait()[0] == 0
    assert_same(trained, tmp_path / "out")


@pytest.mark.ci
@pytest.mark.matrix(133)
def test_several_spans_in_folds_are_killed_and_resumed_bit_for_bit(several, tmp_path):
    """kill -9 while a classifier learns several spans of evidence in a fold -> the end is exact,
    and so is the report"""
    assert_a_kill_changes_nothing(several, tmp_path, **KEPT | dict(folds=3, max_iters=40))
    # The predictions have lists of evidence, the metrics are those with which the run ended.
    out = tmp_path / "a"
    assert evaluate_main(["--ckpt", str(out / "ckpt_best.pt")]) == 0
    numbers = json.loads((out / "report" / "metrics.json").read_text())
    test = next(r for r in lines(out) if "test_loss" in r)
    for name in ("f1_macro", "exact_match", "token_f1"):
        assert numbers[name] == pytest.approx(test[f"test_{name}"], abs=1e-6)
    texts = {row["text"]: row for row in make_several(200)}
    said = [json.loads(line) for line in
            (out / "report" / "predictions.jsonl").read_text().splitlines()]
    for row in said:
        assert sorted(row["true_evidence"]) == sorted(texts[row["text"]]["evidence"])
        assert all(part in row["text"] for part in row["evidence"])
    assert {len(row["evidence"]) for row in said} > {1, 2}
    path = write_jsonl(tmp_path / "other.jsonl", make_several(9))
    assert evaluate_main(["--ckpt", str(out / "ckpt.pt"), "--data", path]) == 0
    said = (out / "report" / "predictions.jsonl").read_text().splitlines()
    assert [json.loads(line)["true_evidence"] for line in said] == [
        sorted(row["evidence"], key=row["text"].index) for row in make_several(9)]


# "max": the weights of the first evaluation, of the largest loss, are those that are tested.
RANKS = dict(batch_size=8, gradient_accumulation_steps=2, max_iters=8,
             eval_interval=4, eval_on_start=False, early_stopping_mode="max")


@pytest.fixture(scope="session")
def alone(tmp_path_factory, labels):
    """The lines of metrics.jsonl of the run that two ranks repeat."""
    out = tmp_path_factory.mktemp("alone") / "out"
    assert program(labels, out, **RANKS)[0] == 0
    return lines(out)


@pytest.mark.parametrize("distributed", ["ddp", "fsdp"])
def test_two_ranks_train_what_one_trains(distributed, alone, labels, tmp_path):
    args = SMALL | TINY | RANKS | dict(data_dir=labels, out_dir=tmp_path, distributed=distributed)
    code, said = run(*(f"--{k}={v}" for k, v in args.items()), ranks=2)
    assert code == 0, said
    for a, b in zip(alone, lines(tmp_path), strict=True):
        for name in a.keys() & {"loss", "val_loss", "val_accuracy", "grad_norm", "test_loss",
                                "val_exact_match", "test_f1_macro"}:
            assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-6), (name, a["iter"])


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_train_several_spans_in_folds_as_one(several, tmp_path, way):
    settings = SMALL | TINY | RANKS | dict(data_dir=str(several), folds=3)
    assert_two_ranks_equal_one(tmp_path, settings, way, val_loss=1e-5, val_span_loss=1e-5,
                               val_token_f1=1e-6)


def test_early_stopping_follows_f1(labels, tmp_path):
    """A rate at which nothing is learned: the first evaluation after that of the untrained weights
    stays the best, and the second one after it ends the run."""
    code, said = program(labels, tmp_path / "out", learning_rate=1e-9, max_iters=50,
                         eval_interval=2, early_stopping_metric="val_f1_macro",
                         early_stopping_mode="max", early_stopping_patience=2)
    assert code == 0 and "no better val_f1_macro in 2 evaluations" in said, said
    assert max(r["iter"] for r in lines(tmp_path / "out")) == 6


def test_heads_of_other_class_names_are_not_adopted(trained, tmp_path):
    """As many classes of other names are refused; another number of them leaves the head fresh."""
    start = dict(init_from=str(trained / "ckpt.pt"), max_iters=0)
    for names, allowed in ((("b", "a", "c"), []), (("b", "a", "c"), ["classes"]), (("a", "b"), [])):
        rows = [dict(text=f"{i} x", label=names[i % len(names)]) for i in range(90)]
        folder = tmp_path / f"{len(names)}"
        prepare(write_jsonl(tmp_path / f"{len(names)}.jsonl", rows), folder, "--force")
        config = SMALL | TINY | start | dict(data_dir=str(folder), allow_change=allowed,
                                             out_dir=str(tmp_path / f"{len(names)}{allowed}"))
        if len(names) == 3 and not allowed:
            with pytest.raises(ValueError, match="classes: checkpoint has .*animal"):
                train(load_config(None, config))
        else:
            train(load_config(None, config))


@pytest.mark.parametrize("ngrams", [0, 8])
def test_other_rows_are_evaluated_unless_their_number_weighs_the_ngrams(ngrams, tmp_path):
    keys = SMALL | TINY | dict(ngrams=ngrams, max_iters=1, out_dir=str(tmp_path / "out"))
    for n in (60, 90):
        rows = [dict(text=f"{i} x", label="ab"[i % 2]) for i in range(n)]
        prepare(write_jsonl(tmp_path / f"{n}.jsonl", rows), tmp_path / f"{n}")
    train(load_config(None, keys | dict(data_dir=str(tmp_path / "60"))))
    changes = dict(data_dir=str(tmp_path / "90"), out_dir=str(tmp_path / "new"), eval_only=True,
                   init_from=str(tmp_path / "out/ckpt.pt"))
    with pytest.raises(UserError, match="class_counts") if ngrams else contextlib.nullcontext():
        train(load_config(None, keys | changes))


@pytest.mark.parametrize("kind", ["class", "span"])
def test_data_of_one_kind_need_no_key_of_their_own(kind, tmp_path, capsys):
    """The line that data.labels ends with, for rows with labels, or with evidence, alone."""
    keep = dict({"class": ["text", "label"], "span": ["text", "evidence"]})[kind]
    rows = [{name: row[name] for name in keep} for row in make_rows(60)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    prepare(path, tmp_path / "bin")
    said = capsys.readouterr().out
    assert "warning: fewer than 30 rows (val has" in said and "train has" not in said
    command = said.splitlines()[-1].split()
    assert command[:3] == ["Next:", "python", "run_train.py"] and len(command) == 9
    typed = dict(zip(command[3::2], command[4::2]))
    config = load_config(typed["--config"], SMALL | TINY | dict(
        data_dir=typed["--data_dir"], out_dir=str(tmp_path / "out"), max_iters=1, max_epochs=None,
        eval_interval=1))
    last = train(config)["history"][-1]
    assert config.early_stopping_metric == "val_score" and last["val_score"] is not None
    assert ("val_accuracy" in last) == (kind == "class")
    labelled = write_jsonl(tmp_path / "labelled.jsonl", make_rows(6))
    args = ["--ckpt", str(tmp_path / "out/ckpt.pt"), "--data", labelled, "--baseline"]
    assert evaluate_main(args) == (2 if kind == "span" else 0)
    assert ("model predicts none" in capsys.readouterr().err) == (kind == "span")


@pytest.mark.parametrize("theirs", ["gpt", "nanogpt", "llama"])
def test_another_backbone_takes_one_key(theirs, labels, tmp_path, capsys):
    """Weights of another shape than that of train/config_quick.yaml, and of longer positions; what
    a person typed does not give way to them."""
    shape = GPTConfig(block_size=640, vocab_size=257, n_layer=1, n_head=2, n_embd=32, n_hidden=128,
                      **dict(bias=True, norm="layer", pos="learned", mlp="gelu_exact")
                      if theirs == "nanogpt" else {})
    path, weights = tmp_path / "gpt.pt", dict(GPT(shape).state_dict())
    save_checkpoint(path, dict(model=weights, model_args=asdict(shape), config=dict(model="gpt")))
    if theirs != "gpt":
        ours, path = path, tmp_path / ("ckpt.pt" if theirs == "nanogpt" else "folder")
        convert(str(ours), str(path))
    changes = dict(init_from=str(path), data_dir=str(labels), out_dir=str(tmp_path / "out"),
                   max_iters=0, max_epochs=None, eval_on_start=False, compile="false")
    train(load_config("train/configs/classifier.yaml", changes))
    assert f"n_layer: 1 from {path} (overrides 3)" in capsys.readouterr().out
    model, _ = load_model(tmp_path / "out" / "ckpt.pt")
    got = model.config
    assert (got.n_layer, got.n_embd, got.block_size, got.pos) == (1, 32, 640, shape.pos)
    assert torch.equal(model.gpt.h[0].mlp.up.weight, weights["h.0.mlp.up.weight"])
    changes |= dict(out_dir=str(tmp_path / "typed"), n_layer=3)
    with pytest.raises(ValueError, match="n_layer: it has 1, the configuration says 3"):
        train(load_config("train/configs/classifier.yaml", changes))


def test_texts_longer_than_those_of_training_are_not_cut(trained, tmp_path):
    """The word that decides stands behind a long beginning; each row alone gives the same."""
    rows = [row | dict(text="go lo " * (40 * (i % 3)) + row["text"])
            for i, row in enumerate(make_rows(30, seed=9))]
    report = tmp_path / "report"
    assert evaluate_main(["--ckpt", str(trained / "ckpt.pt"), "--data",
                          write_jsonl(tmp_path / "long.jsonl", rows), "--out", str(report)]) == 0
    model, tokenizer = load_model(trained / "ckpt.pt")
    first = [json.loads(line) for line in (report / "predictions.jsonl").read_text().splitlines()]
    for i in (0, 1, 2):
        path = write_jsonl(tmp_path / "one.jsonl", rows[i:i + 1])
        arrays = to_arrays(read_labelled_texts([path]), tokenizer, model.spec["classes"], 9999)
        assert arrays["lengths"] == len(rows[i]["text"].encode())
        scores, _ = predict(model, [arrays[n] for n in ARRAYS], 4)
        assert first[i]["probability"] == pytest.approx(scores.max(), abs=1e-3)


def test_a_classifier_can_start_from_another(trained, labels, tmp_path):
    code, said = program(labels, tmp_path / "out", init_from=str(trained / "ckpt.pt"), task="class",
                         max_iters=1)
    assert code == 0 and "6 tensors of it are not used" in said, said
    model, _ = load_model(tmp_path / "out" / "ckpt.pt")
    assert model.spec["task"] == "class" and model.end is None


@pytest.mark.parametrize("changes, message", [
    (dict(task="label"), "must be one of class, span, joint"),
    (dict(pos="learned", block_size=4), "learned positions (block_size)"),
    (dict(early_stopping_metric="val_f1"), "of this model have no 'val_f1'")])
def test_bad_configurations_are_refused(changes, message, labels, tmp_path):
    code, said = program(labels, tmp_path / "out", **changes)
    assert code == 2 and message in said and "Traceback" not in said, said


def test_a_folder_of_something_else_is_refused(data_dir, tmp_path):
    code, said = program(data_dir, tmp_path / "out")
    assert code == 2 and "not a folder of labelled rows" in said and "Traceback" not in said, said


def test_a_folder_of_another_system_names_its_model(data_dir, labels, tmp_path):
    from data.prepare import chat, features
    features.prepare_features({"a": np.eye(20)}, None, str(tmp_path / "features"), 0.2,
                              np.arange(20) // 5)
    records = [dict(prompt=f"{i}", response="x") for i in range(20)]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    assert chat.main([path, "--out", str(tmp_path / "chat")]) == 0
    folders = dict(gpt=data_dir, classifier=labels, chat=tmp_path / "chat",
                   autoencoder=tmp_path / "features")
    for theirs, folder in folders.items():
        for ours in folders.keys() - {theirs}:
            config = SMALL | dict(model=ours, data_dir=str(folder), out_dir=str(tmp_path / "out"),
                                  vocab_size=None)
            with pytest.raises(ValueError, match=f"it is for --model {theirs}"):
                train(load_config(None, config))


def test_bad_commands_are_refused(trained, labels, tmp_path, capsys):
    odd = write_jsonl(tmp_path / "odd.jsonl", [dict(text="x", label="stone")])
    for ckpt, data, message in [
            (trained / "ckpt.pt", odd, "unknown labels stone"),
            (trained / "ckpt.pt", tmp_path, "not a folder of labelled rows"),
            (tmp_path / "none.pt", odd, "no such file")]:
        assert evaluate_main(["--ckpt", str(ckpt), "--data", str(data), "--out",
                              str(tmp_path / "report")]) == 2
        assert message in capsys.readouterr().err
    assert evaluate_main(["--ckpt", str(trained / "ckpt.pt"), "--data", str(odd), "--device",
                          "gpu", "--out", str(tmp_path / "report")]) == 2
    assert "device: 'gpu'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="span_weight: .*at least 0|span_weight: -1"):
        load_config(None, dict(model="classifier", span_weight=-1.0))


def test_arrays_are_read_in_the_order_the_model_takes_them(labels):
    assert ARRAYS == ("tokens", "lengths", "labels", "spans")
    spec = dict(vocab_size=257, classes=sorted(WORDS))
    shapes = [a.ndim for a in open_labels(labels, "train", spec)]
    assert shapes == [2, 1, 1, 2]
