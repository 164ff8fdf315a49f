"""Numbers of the core computed a second way, at the edges where a slip would not show elsewhere:
the last batch, one item, none, a tie, the first step and the last."""

import math
import threading
import types

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from model.core import ops
from model.core.generate import sample_tokens
from model.core.ops import rope_table
from model.gpt import Norm
from train import evaluate as evaluation
from train.base.errors import SetupError
from train.config import TrainConfig
from train.distributed import Ranks
from train.lr_scheduler import EarlyStopping, ReduceOnPlateau, SpikeDetector, get_lr, milestones
from train.optimizer import (
    AdamW,
    Muon,
    configure_optimizers,
    matches,
    orthogonalize,
    update_matrices,
)
from train.robust import MAX_OVERFLOWS_IN_A_ROW, MAX_SPIKES_IN_A_ROW, decide_action
from train.train import clip_gradients

NO_TEXT = dict(log=lambda line: None)


# --- an evaluation: sums over batches and ranks

class Rows:
    """A loader of numbers, in fixed batches of 4; `weights` says how much each counts."""
    units_per_sample = 3

    def __init__(self, values):
        self.values = torch.as_tensor(values, dtype=torch.float32)

    def n_fixed(self, count):
        return min(count, -(-len(self.values) // 4))

    def fixed_batch(self, index, count, device):
        assert 0 <= index < self.n_fixed(count)
        return (self.values[4 * index:4 * index + 4],)


def counted(x):
    """Mean and sums of the numbers that are not negative; a vector and a scalar beside."""
    kept = x[x >= 0]
    return kept.sum() / max(1, len(kept)), {
        "count": torch.tensor(len(kept)), "ends": torch.stack([x[0], x[-1]]), "above": kept.sum()}


def plain(x):
    return x.mean(), {"square": (x ** 2).sum()}


def together(n_ranks, monkeypatch, work):
    """[work(ranks)] of n ranks, which are threads here."""
    barrier, board, out = threading.Barrier(n_ranks), {}, [None] * n_ranks

    def all_gather_vectors(row, ranks):
        board[ranks.rank] = row
        barrier.wait()
        rows = torch.stack([board[r] for r in range(n_ranks)])
        barrier.wait()
        return rows
    monkeypatch.setattr(evaluation, "all_gather_vectors", all_gather_vectors)

    def run(rank):
        out[rank] = work(types.SimpleNamespace(rank=rank, world_size=n_ranks, main=rank == 0,
                                               device=torch.device("cpu")))
    threads = [threading.Thread(target=run, args=(r,)) for r in range(n_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return out


VALUES = [0.5, -1, 2, 3, -1, -1, -1, -1, 8, 1.25, 7]  # batches of 4, 4 (of no item) and 3


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("batches", [1, 2, 3, 9])
def test_an_evaluation_is_the_mean_over_its_items(monkeypatch, n_ranks, batches):
    model = types.SimpleNamespace()
    out = together(n_ranks, monkeypatch, lambda ranks: evaluation.evaluate(
        model, counted, Rows(VALUES), batches, ranks, torch.no_grad))
    items = [v for v in VALUES[:4 * batches] if v >= 0]
    assert all(o == out[0] for o in out)
    assert out[0] == pytest.approx({"val_loss": np.mean(items), "val_above": np.mean(items)})


def test_sums_are_on_the_cpu_before_they_are_float64(monkeypatch):
    """MPS has no float64: .double() raises a TypeError there."""
    pack = evaluation.pack
    monkeypatch.setattr(evaluation, "pack", lambda *batch: types.SimpleNamespace(
        cpu=lambda: pack(*batch).float()))
    out = evaluation.evaluate(None, counted, Rows(VALUES), 9, Ranks(), torch.no_grad)
    assert out["val_loss"] == np.mean([v for v in VALUES if v >= 0])


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_an_evaluation_counts_units_where_the_model_does_not(monkeypatch, n_ranks):
    sums = {}
    model = types.SimpleNamespace(numbers=lambda s: sums.update(s) or {"own": 7})
    [out, *_] = together(n_ranks, monkeypatch, lambda ranks: evaluation.evaluate(
        model, plain, Rows([1, 2, 3, 4, 10]), 9, ranks, torch.no_grad))
    assert out == {"val_loss": (4 * 2.5 + 10) / 5, "val_own": 7}  # the last batch weighs a quarter
    assert sums["count"] == 15 and sums["square"] == 130 and sums["loss"] == 3 * 20
    assert all(s.dtype == torch.float64 for s in sums.values())


def test_an_evaluation_ends_where_any_rank_asks_and_refuses_one_of_nothing(monkeypatch):
    asked = []

    def stop(done, n):
        asked.append((done, n))
        return done == 2 and threading.current_thread().name == "second"
    ranks = [types.SimpleNamespace(rank=r, world_size=2, device=torch.device("cpu"))
             for r in range(2)]

    def work(r):
        threading.current_thread().name = "second" if r.rank else "first"
        return evaluation.evaluate(None, plain, Rows(range(12)), 9, ranks[r.rank], torch.no_grad,
                                   stop)
    assert together(2, monkeypatch, work) == [None, None]
    assert sorted(asked) == [(0, 3)] * 2 + [(2, 3)] * 2
    monkeypatch.undo()
    with pytest.raises(SetupError, match="no item of the validation data counts"):
        evaluation.evaluate(None, counted, Rows([-1] * 6), 9, Ranks(), torch.no_grad)


def test_sums_keep_their_shape_order_and_precision_on_the_way():
    sums = {"b": torch.tensor([[1., 2.], [3., 4.]], requires_grad=True), "a": torch.tensor(5)}
    vector = evaluation.pack(torch.tensor(0.5, requires_grad=True), sums, 6)
    assert vector.dtype == torch.float64 and not vector.requires_grad
    assert vector.tolist() == [6, 3, 5, 1, 2, 3, 4]
    total, rest = evaluation.unpack(torch.cat([2 * vector, torch.ones(2)]), sums)
    assert [*total] == ["count", "loss", "a", "b"] and rest == [1.0, 1.0]
    assert (total["count"], total["loss"], total["a"]) == (12, 6, 10)
    assert torch.equal(total["b"], 2 * sums["b"].double())
    # A count that float32 cannot hold.
    counted = {"x": torch.tensor(1), "count": torch.tensor(2**24 + 1)}
    assert evaluation.pack(torch.tensor(1.0), counted, 1).tolist() == [2**24 + 1, 2**24 + 1, 1]
    assert evaluation.unpack(torch.arange(3), counted) == (dict(count=0, loss=1, x=2), [])


def test_numbers_of_sums():
    sums = {"loss": torch.tensor(6.), "count": torch.tensor(4.), "hits": torch.tensor(3.),
            "matrix": torch.ones(2, 2)}
    assert evaluation.to_numbers(None, sums) == {"loss": 1.5, "hits": 0.75}
    sums["count"] = torch.tensor(0.)
    own = types.SimpleNamespace(numbers=lambda s: {"share": None, "f1": np.float32(0.5),
                                                   "each": torch.ones(2)})
    assert evaluation.to_numbers(own, sums) == {"loss": None, "share": None, "f1": 0.5,
                                                "each": [1.0, 1.0]}
    for name in ("count", "iter", "tokens", "lr", "loss"):
        with pytest.raises(ValueError, match=f"numbers: {name}: these names are reserved"):
            evaluation.to_numbers(types.SimpleNamespace(numbers=lambda s, n=name: {n: 1}), sums)


# --- the optimizer

def with_gradients(*gradients):
    params = [nn.Parameter(torch.zeros(len(g))) for g in gradients]
    for p, g in zip(params, gradients):
        p.grad = torch.tensor(g)
    return params


def holding(*params):
    return types.SimpleNamespace(param_groups=[dict(params=params[:1]), dict(params=params[1:])])


@pytest.mark.parametrize("limit", [0.5, 4.999, 5.001, 80.0])
@pytest.mark.parametrize("factor", [1.0, 0.25, 3.0])
def test_clipping_is_pytorchs(limit, factor):
    ours, theirs = (with_gradients([3.0, 0.0], [4.0]) for _ in range(2))
    unused = nn.Parameter(torch.zeros(3))
    given = factor if factor == 1.0 else torch.tensor(factor)
    norm = clip_gradients(holding(*ours, unused), limit, given)
    for p in theirs:
        p.grad *= factor
    assert norm == pytest.approx(5 * factor)
    assert nn.utils.clip_grad_norm_(theirs, limit) == pytest.approx(float(norm))
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=0)
    assert unused.grad is None


def test_without_a_limit_a_factor_still_counts():
    params = with_gradients([3.0], [4.0])
    assert clip_gradients(holding(*params), 0.0, torch.tensor(0.5)) == 2.5
    assert [p.grad.item() for p in params] == [1.5, 2.0]
    assert clip_gradients(holding(*params), 0.0) == 2.5
    assert [p.grad.item() for p in params] == [1.5, 2.0]


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 16), nn.Linear(15, 20)
        self.lm_head, self.bare = nn.Linear(32, 16, bias=False), nn.Parameter(torch.zeros(32, 32))
        self.fixed = nn.Parameter(torch.zeros(4, 4), requires_grad=False)


def groups_of(model, **options):
    optimizer = configure_optimizers(model, 0.1, 0.01, [0.7, 0.8], **NO_TEXT | options)
    return optimizer, {n: g for g in optimizer.param_groups for n in g["names"]}


def test_every_setting_arrives_in_its_group():
    optimizer, groups = groups_of(Small(), eps=1e-3)
    assert set(groups) == {n for n, _ in Small().named_parameters()} - {"fixed"}
    for name, group in groups.items():
        decay = 0.0 if name.endswith("bias") else 0.1
        assert (group["lr"], group["initial_lr"], group["betas"], group["eps"],
                group["weight_decay"], group["muon"]) == (0.01, 0.01, (0.7, 0.8), 1e-3, decay,
                                                          False), name
    assert groups_of(Small())[1]["bare"]["eps"] == 1e-8
    muon = dict(lr=0.5, momentum=0.6, weight_decay=0.3)
    lr_groups = {"wide": {"lr_mult": 2.0}, "wide.bias": {"weight_decay": 0.2}, "lm_*": 3,
                 "bare": {"learning_rate": 1.0, "weight_decay": 0.0}}
    optimizer, groups = groups_of(Small(), eps=1e-3, muon=muon, lr_groups=lr_groups)
    assert isinstance(optimizer, Muon) and optimizer.defaults["eps"] == 1e-3
    assert {n: (g["muon"], g["lr"], g["weight_decay"]) for n, g in groups.items()} == {
        "wide.weight": (True, 1.0, 0.3), "wide.bias": (False, 0.01, 0.2),
        "narrow.weight": (False, 0.01, 0.1), "narrow.bias": (False, 0.01, 0.0),
        "lm_head.weight": (False, 0.03, 0.1), "bare": (False, 1.0, 0.0)}
    assert groups["wide.weight"]["momentum"] == 0.6
    assert Muon([dict(params=[nn.Parameter(torch.zeros(2, 2))], muon=True, weight_decay=0.0)],
                lr=0.1).param_groups[0]["momentum"] == 0.95


def test_what_freezes_everything_or_nothing_is_refused():
    model = Small()
    trained = [p.requires_grad for p in model.parameters()]
    with pytest.raises(ValueError, match="learning_rate: expected a positive number, got -1"):
        configure_optimizers(model, 0.1, -1, (0.9, 0.95))
    assert [p.requires_grad for p in model.parameters()] == trained != []
    with pytest.raises(ValueError, match="all parameters are frozen"):
        groups_of(Small(), lr_groups={"*": 0})
    for wrong in ({"wide": -0.1}, {"wide": {"lr_mult": 1.0, "weight_decay": -1}},
                  {"wide": {"lr": 1.0}}, {"wide": "fast"}, {"wide": {"lr_mult": "2"}},
                  {"wide": float("nan")}, {"wide": {"weight_decay": None}}):
        with pytest.raises(ValueError, match="lr_groups: wide: expected"):
            groups_of(Small(), lr_groups=wrong)
    with pytest.raises(ValueError, match="no trained parameter matches 'fixed'; .*frozen: fixed$"):
        groups_of(Small(), lr_groups={"fixed": 2.0})
    with pytest.raises(ValueError, match="no trained parameter matches 'wte'; names.*bare, wide"):
        groups_of(Small(), lr_groups={"wte": 2.0})
    model = Small()
    _, groups = groups_of(model, lr_groups={"wide": {"lr_mult": 0}, "bare": {}})
    assert not model.wide.weight.requires_grad and "wide.bias" not in groups
    assert model.bare.requires_grad and groups["bare"]["lr"] == 0.01


def test_the_lines_about_the_groups():
    lines = []
    groups_of(Small(), lr_groups={"wide": 0}, log=lines.append,
              muon=dict(lr=0.5, momentum=0.6, weight_decay=0.0))
    assert lines == ["Optimizer configured: 3 tensors decayed (1,836 params), 1 tensors not "
                     "decayed (20 params)", "Muon: 0 tensors (0 params); AdamW: all others",
                     "Frozen: 3 tensors (288 params)"]
    lines.clear()
    groups_of(Small(), log=lines.append, muon=dict(lr=0.5, momentum=0.6, weight_decay=0.2))
    assert lines[1:] == ["Muon: 1 tensors (256 params); AdamW: all others",
                         "Peak learning rates: 0.01: 5 tensors (1,872 params); 0.5: 1 tensors "
                         "(256 params)",
                         "Frozen: 1 tensors (16 params)"]


@pytest.mark.parametrize("pattern, yes, no", [
    ("h.1", "h.1.attn.weight", "h.10.attn.weight"), ("attn", "h.1.attn.weight", "h.1.attn2.w"),
    ("weight", "a.weight", "a.weights"), ("h.*.mlp", "h.3.mlp.up", "h.mlp.up"),
    ("lora_?", "x.lora_a", "x.lora_ab"), ("a.b", "a.b", "a"), ("W", "x.W", "x.w")])
def test_patterns_match_whole_parts(pattern, yes, no):
    assert matches(yes, pattern) and not matches(no, pattern)


def nearest(g, steps=5):
    """Newton-Schulz with Muon's coefficients on singular values, in float64."""
    u, s, vt = np.linalg.svd(g.astype(np.float64), full_matrices=False)
    s = s / (np.sqrt((s ** 2).sum()) + 1e-7)
    for _ in range(steps):
        s = 3.4445 * s - 4.775 * s ** 3 + 2.0315 * s ** 5
    return u * s @ vt


@pytest.fixture
def in_float32(monkeypatch):
    monkeypatch.setattr("train.optimizer.has_native_bfloat16", lambda device: False)


@pytest.mark.parametrize("shape", [(16, 16), (16, 40), (40, 16)])
def test_orthogonalize_is_the_polynomial_of_its_singular_values(shape, in_float32):
    g = np.random.default_rng(0).normal(size=(2, *shape)).astype("float32")
    for scale in (1.0, 1e-6, 1e4):  # the smallest: 1e-7 is a hundredth of its norm
        got = orthogonalize(torch.from_numpy(g * np.float32(scale))).numpy()
        for i in range(2):
            np.testing.assert_allclose(got[i], nearest(g[i] * scale), atol=2e-4)
    one = orthogonalize(torch.from_numpy(g), steps=1).numpy()
    np.testing.assert_allclose(one[0], nearest(g[0], 1), atol=1e-5)
    assert torch.equal(orthogonalize(torch.zeros(1, *shape)), torch.zeros(1, *shape))


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_three_steps_of_muon_by_hand(decay, in_float32):
    rng = np.random.default_rng(1)
    shapes = [(32, 16), (16, 32), (16, 16)]
    w = [rng.normal(size=s) for s in shapes]
    params = [nn.Parameter(torch.tensor(x, dtype=torch.float32)) for x in w]
    still = nn.Parameter(torch.ones(16, 16))
    buffers, state = [np.zeros(s) for s in shapes], {p: {} for p in (*params, still)}
    group = dict(params=[*params, still], momentum=0.9, lr=0.05, weight_decay=decay)
    for _ in range(3):
        g = [rng.normal(size=s) for s in shapes]
        for p, x in zip(params, g):
            p.grad = torch.tensor(x, dtype=torch.float32)
        with torch.no_grad():
            update_matrices(group, state)
        for i, (rows, columns) in enumerate(shapes):
            buffers[i] = 0.9 * buffers[i] + 0.1 * g[i]
            u = nearest(0.9 * buffers[i] + 0.1 * g[i])
            w[i] = w[i] * (1 - 0.05 * decay) - 0.05 * math.sqrt(max(1, rows / columns)) * u
            np.testing.assert_allclose(params[i].detach().numpy(), w[i], atol=1e-4)
    assert torch.equal(still, torch.ones(16, 16)) and not state[still]
    np.testing.assert_allclose(state[params[0]]["momentum_buffer"], buffers[0], atol=1e-5)


# --- the schedule and what reacts to evaluations

def schedule(**changes):
    return TrainConfig(**dict(learning_rate=1.0, min_lr=0.1, warmup_iters=0, max_iters=100)
                       | changes)


def test_cosine_and_linear_are_their_formulas_at_every_step():
    for name, shape in (("cosine", lambda t: (1 + math.cos(math.pi * t)) / 2),
                        ("linear", lambda t: 1 - t)):
        c = schedule(lr_schedule=name, warmup_iters=10, lr_decay_iters=60)
        for it in range(100):
            expected = (it + 1) / 11 if it < 10 else 0.1 if it >= 60 else (
                0.1 + 0.9 * shape((it - 10) / 50))
            assert get_lr(it, c) == pytest.approx(expected, rel=1e-12), (name, it)


@pytest.mark.parametrize("part, warmup, first", [(0.2, 10, 80), (0.5, 0, 50), (1.0, 30, 30),
                                                 (0.9, 50, 50)])
def test_wsd_is_flat_and_then_a_line_that_never_reaches_into_the_warm_up(part, warmup, first):
    c = schedule(lr_schedule="wsd", wsd_decay=part, warmup_iters=warmup)
    for it in range(warmup, 101):
        expected = 1.0 if it < first else 0.1 + 0.9 * (100 - it) / (100 - first)
        assert get_lr(it, c) == pytest.approx(expected, rel=1e-12), it


def test_steps_drop_after_the_warm_up_and_not_below_the_end():
    c = schedule(lr_schedule="step", warmup_iters=5, step_iters=10, lr_factor=0.3)
    assert [get_lr(it, c) for it in (4, 5, 14, 15, 24, 25, 99)] == pytest.approx(
        [5 / 6, 1, 1, 0.3, 0.3, 0.1, 0.1])
    c = schedule(lr_schedule="step", max_iters=2)  # a third of it is no step: one is
    assert get_lr(1, c) == 0.5


def test_a_schedule_without_a_formula_is_not_another_one():
    c = schedule()
    c.lr_schedule = "sqrt"  # as if a fork had added the choice only
    with pytest.raises(KeyError, match="sqrt"):
        get_lr(50, c)


def test_what_get_lr_reads_has_its_defaults():
    c = TrainConfig(learning_rate=0.5, max_iters=40)
    assert milestones(c) == (200, 40, 0.05)
    assert milestones(TrainConfig(max_iters=0))[1] == 1
    c = TrainConfig(min_lr=0.0, lr_decay_iters=7, warmup_ratio=0.25, max_iters=30)
    assert milestones(c) == (8, 7, 0.0)


def test_no_better_means_by_less_than_min_delta_or_exactly_it():
    for mode, sign in (("min", 1), ("max", -1)):
        stopping = EarlyStopping(2, 0.5, mode=mode)
        values = [10, 9.5, 9.375, 8.75, 8.25]  # by exactly 0.5 is not enough, twice by more is
        assert [stopping.check(sign * v) for v in values] == [False] * 5
        assert stopping.state_dict() == dict(best=8.75, bad=1)
        assert stopping.check(sign * 8.5) and stopping.over
        again = EarlyStopping(2, 0.5, mode=mode)
        assert not again.over
        again.load_state_dict(stopping.state_dict())
        assert again.over and again.best_loss == 8.75
    assert not any(EarlyStopping(0).check(v) for v in range(20))
    default = EarlyStopping()
    assert [default.check(v) for v in [3, *[3] * 7]] == [False] * 7 + [True]
    with pytest.raises(KeyError, match="mean"):
        EarlyStopping(mode="mean")


@pytest.mark.parametrize("factor, patience, least", [(0.5, 2, 0.0), (0.1, 0, 0.05), (0.3, 5, 0.2)])
def test_plateau_is_pytorchs(factor, patience, least):
    ours = ReduceOnPlateau(factor, patience, least)
    optimizer = AdamW([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=factor, patience=patience, threshold=0, min_lr=least, eps=0)
    for i, value in enumerate(np.random.default_rng(2).normal(size=40)):
        before = optimizer.param_groups[0]["lr"]
        reduced = ours.update(float(value))
        theirs.step(float(value))
        rate = optimizer.param_groups[0]["lr"]
        assert ours.scale == pytest.approx(rate) and reduced == (rate < before), i
        other = ReduceOnPlateau(factor, patience, least)
        other.load_state_dict(ours.state_dict())
        ours = other
    assert ReduceOnPlateau().state_dict() == dict(scale=1.0, waiting=dict(best=math.inf, bad=0))
    assert [ReduceOnPlateau().waiting.patience, ReduceOnPlateau().factor] == [6, 0.5]


# --- the guard

def test_a_spike_is_a_loss_past_sigma_deviations():
    losses = list(np.random.default_rng(3).normal(3, 0.2, 8))
    for sigma in (2.0, 6.0):
        limit = np.mean(losses) + sigma * np.std(losses)
        for loss, spike in ((limit - 1e-6, False), (limit + 1e-6, True), (math.nan, True),
                            (math.inf, True), (-5.0, False)):
            detector = SpikeDetector(sigma, window=16)
            assert not any(map(detector.update, losses))  # silent up to the eighth
            assert detector.update(loss) is spike
            assert detector.state_dict() == losses + ([] if spike else [loss])
    few = SpikeDetector(2.0, window=16)
    few.load_state_dict(losses[:7])
    assert not few.update(1e9) and few.update(1e12)
    flat = SpikeDetector(4.0, window=4)  # no deviation: a thousandth of the mean stands for it
    flat.load_state_dict([-2.0] * 4)
    assert not flat.update(-2 + 4 * 0.001 * 2 - 1e-9)
    flat.load_state_dict([-2.0] * 4)
    assert flat.update(-2 + 4 * 0.001 * 2 + 1e-9)
    for i in range(9):  # the oldest leave
        few.update(float(i % 2))
    assert SpikeDetector().losses.maxlen == 128 and SpikeDetector().sigma == 6.0


class Spikes:
    def __init__(self):
        self.losses = [1.0]


def state(**changes):
    none = dict(overflows=0, overflows_in_a_row=0, spikes_in_a_row=0)
    return types.SimpleNamespace(**none | changes)


@pytest.mark.parametrize("loss, norm", [(math.nan, 1.0), (1.0, math.inf), (math.nan, math.nan)])
def test_a_step_that_is_not_finite(loss, norm):
    def verdict(on_spike="warn", scaled=False, **changes):
        p = state(**changes)
        return decide_action(loss, norm, p, Spikes(), on_spike, scaled), p.overflows
    assert verdict() == ("stop", 1) and verdict("skip") == ("stop", 1)
    scaled = "skip" if math.isfinite(loss) else "stop"
    assert verdict(scaled=True) == (scaled, 1)
    assert verdict(scaled=True, overflows_in_a_row=MAX_OVERFLOWS_IN_A_ROW - 1)[0] == scaled
    assert verdict(scaled=True, overflows_in_a_row=MAX_OVERFLOWS_IN_A_ROW)[0] == "stop"


def test_a_step_that_is_finite():
    for on_spike, reaction in (("warn", "update"), ("skip", "skip")):
        p = state(overflows_in_a_row=2)
        assert decide_action(1.0, 1.0, p, Spikes(), on_spike, False) == reaction
        assert (p.spikes_in_a_row, p.overflows_in_a_row) == (1, 0)
    spikes, p = Spikes(), state(spikes_in_a_row=MAX_SPIKES_IN_A_ROW - 1)
    assert decide_action(1.0, 1.0, p, spikes, "skip", False) == "skip" and spikes.losses
    assert decide_action(1.0, 1.0, p, spikes, "skip", False) == "update"
    assert not spikes.losses


# --- the model's parts

@pytest.mark.parametrize("eps", [1e-5, 1e-2])
@pytest.mark.parametrize("training", [True, False])
def test_rms_norm_with_an_epsilon_that_shows(eps, training):
    x = (torch.randn(3, 8) * eps ** 0.5).requires_grad_(training)
    norm = Norm(8, "rms", False, eps)
    weight = torch.nn.init.normal_(norm.weight)
    with torch.set_grad_enabled(training):
        ours = norm(x)
    theirs = F.rms_norm(x, (8,), weight, eps)
    torch.testing.assert_close(ours, theirs)
    assert not torch.allclose(ours, F.rms_norm(x, (8,), weight, 2 * eps), rtol=1e-2)
    if training:
        outer = torch.randn(3, 8)
        for a, b in zip(torch.autograd.grad(ours, [x, weight], outer),
                        torch.autograd.grad(theirs, [x, weight], outer)):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("theta", [10_000.0, 500.0])
def test_rotary_tables_by_hand(theta):
    positions = torch.tensor([0.0, 1.0, 7.0, 4095.0], dtype=torch.float64)
    cos, sin = rope_table(positions, 8, theta)
    frequencies = (theta ** (-np.arange(0, 8, 2) / 8)).astype("float32")
    angles = positions.numpy()[:, None] * frequencies.astype("float64")
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-4)
    np.testing.assert_allclose(sin, np.sin(angles), atol=1e-4)
    assert cos.dtype == sin.dtype == torch.float32


# --- drawing

def shares(logits, n=4000, **options):
    """How often each id is drawn."""
    options = dict(temperature=1.0, top_k=None, top_p=None) | options
    rows = torch.tensor([logits]).expand(n, -1).clone()
    ids = sample_tokens(rows, **options, generators=[torch.Generator().manual_seed(0)])
    return np.bincount(ids.numpy(), minlength=len(logits)) / n


P = np.array([0.1, 0.4, 0.2, 0.3])


@pytest.mark.parametrize("options, kept", [
    (dict(top_k=4), [0, 1, 2, 3]), (dict(top_k=3), [1, 2, 3]), (dict(top_k=1), [1]),
    (dict(top_p=1.0), [0, 1, 2, 3]), (dict(top_p=0.69), [1, 3]), (dict(top_p=0.71), [1, 2, 3]),
    (dict(top_p=0.0001), [1]), (dict(top_k=3, top_p=0.5), [1, 3]), (dict(top_k=2, top_p=0.5), [1]),
    (dict(temperature=0.5), [0, 1, 2, 3]), (dict(temperature=3.0, top_k=2), [1, 3])], ids=str)
def test_what_is_drawn_is_the_tail_cut_and_renormalised(options, kept):
    p = P ** (1 / options.get("temperature", 1.0))
    expected = np.where(np.isin(np.arange(4), kept), p, 0)
    got = shares(np.log(P).tolist(), **options)
    np.testing.assert_allclose(got, expected / expected.sum(), atol=0.03)
    assert set(np.flatnonzero(got)) <= set(kept)


def test_an_evaluation_computes_no_gradient_of_the_output_layer(monkeypatch):
    seen = []

    def apply(h, weight, *rest):
        seen.append(weight.requires_grad)
        return torch.zeros(3)
    monkeypatch.setattr(ops._ChunkedCrossEntropy, "apply", apply)
    x, weight = torch.randn(1, 3, 4), nn.Parameter(torch.randn(8, 4))
    for mode in (torch.no_grad(), torch.enable_grad()):
        with mode:
            ops.LinearCrossEntropy()(x, weight, torch.zeros(1, 3, dtype=torch.long), 8)
    assert seen == [False, True]
