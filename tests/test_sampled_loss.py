"""head_samples: the training loss from the targets and some other ids (SampledCrossEntropy)."""

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY
from runs import (
    assert_a_kill_changes_nothing,
    assert_same,
    assert_two_ranks_equal_one,
    configure,
    go,
    metrics,
    opened,
)
from torch.utils.flop_counter import FlopCounterMode

from model.core.ops import IGNORE, SampledCrossEntropy
from train.base.errors import SetupError

V, N, C = 300, 40, 8


@pytest.fixture
def loss():
    """Of a vocabulary whose ids have frequencies of about 1 / sqrt(id)."""
    generator = torch.Generator().manual_seed(0)
    targets = (torch.rand(100, 200, generator=generator) ** 2 * V).long()
    targets[0, :9] = IGNORE
    return SampledCrossEntropy(targets, V, 60, seed=5)


@pytest.fixture
def batch():
    torch.manual_seed(1)
    targets = torch.randint(V, (4, N // 4))
    targets[1, :7] = IGNORE
    x = torch.randn(4, N // 4, C, requires_grad=True)
    weight = (torch.randn(V + 20, C) * 0.2).requires_grad_()  # 20 rows of padding
    return x, weight, targets


def mean(losses, targets):
    assert losses.shape == targets.shape and (losses[targets == IGNORE] == 0).all()
    return losses.sum() / (targets != IGNORE).sum().clamp(min=1)


def test_every_id_is_drawn_with_its_probability(loss):
    """half by frequency, half uniform; as many ids as were asked for, none twice"""
    counts = torch.zeros(V)
    for it in range(4000):
        loss.before_step(it)
        assert len(loss.ids.unique()) == 60
        torch.testing.assert_close(loss.log_p.double(), loss.p[loss.ids].log(), rtol=0, atol=1e-6)
        counts[loss.ids] += 1
    assert (counts / 4000 - loss.p).abs().max() < 0.035  # 4 standard deviations
    assert loss.p.sum() == pytest.approx(60) and loss.p.max() == 1 and (loss.p == 1).any()
    below = loss.p < 1  # in proportion to the sum of two shares
    ids = (torch.rand(100, 200, generator=torch.Generator().manual_seed(0)) ** 2 * V).long()
    frequency = torch.bincount(ids.flatten()[9:], minlength=V) / (20_000 - 9)
    ratio = loss.p[below] / (frequency + 1 / V)[below]
    torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), rtol=1e-5, atol=0)


def test_the_mean_of_estimates_is_the_loss_and_its_gradient(loss, batch):
    x, weight, targets = batch
    exact = F.cross_entropy((x @ weight[:V].t()).flatten(0, 1), targets.flatten(),
                            ignore_index=IGNORE)
    expected = exact, *torch.autograd.grad(exact, (x, weight))
    totals = [torch.zeros_like(t) for t in expected]
    for it in range(2000):
        loss.before_step(it)
        estimate = mean(loss(x, weight, targets, V), targets)
        for total, t in zip(totals, (estimate, *torch.autograd.grad(estimate, (x, weight)))):
            total += t.detach() / 2000
    assert totals[0].item() == pytest.approx(exact.item(), abs=0.01)
    for total, t in zip(totals[1:], expected[1:]):
        assert (total - t).norm() < 0.03 * t.norm()


def test_all_ids_give_the_exact_loss(batch):
    """with V - 1 of V equally frequent ids, an id is missing with probability 1 / V"""
    x, weight, targets = batch
    loss = SampledCrossEntropy(torch.arange(V), V, V - 1, seed=0)
    exact = F.cross_entropy((x @ weight[:V].t()).flatten(0, 1), targets.flatten(),
                            ignore_index=IGNORE)
    ours = mean(loss(x, weight, targets, V), targets)
    assert ours.item() == pytest.approx(exact.item(), rel=2e-3)


def test_evaluations_are_exact_and_nothing_counted_is_zero(loss, batch):
    x, weight, targets = batch
    exact = F.cross_entropy((x @ weight[:V].t()).flatten(0, 1), targets.flatten(),
                            ignore_index=IGNORE)
    ours = mean(loss.eval()(x, weight, targets, V), targets)
    assert ours.item() == pytest.approx(exact.item(), rel=1e-6)
    none = torch.full_like(targets, IGNORE)
    empty = mean(loss.train()(x, weight, none, V), none)
    gradients = torch.autograd.grad(empty, (x, weight))
    assert empty.item() == 0 and not any(g.any() for g in gradients)


def test_under_autocast_both_parts_are_computed_in_its_type(loss, batch):
    x, weight, targets = batch
    with torch.autocast("cpu", torch.bfloat16):
        loss.before_step(0)
        rounded = loss(x, weight, targets, V)
    assert torch.equal(rounded, loss(x.bfloat16(), weight, targets, V))


def test_a_run_learns_and_is_evaluated_exactly(data_dir, tmp_path):
    """the evaluation of step 0 equals that of a run with the exact loss, and the model learns"""
    settings = dict(max_iters=60, eval_interval=60, lr_decay_iters=60, learning_rate=0.01)
    exact, sampled = (go(data_dir, tmp_path / str(n), head_samples=n, **settings)["history"]
                      for n in (0, 100))
    assert sampled[0]["val_loss"] == exact[0]["val_loss"]
    assert sampled[-1]["val_loss"] < exact[-1]["val_loss"] + 0.1 < exact[0]["val_loss"] - 1
    a, b = ([m["loss"] for m in metrics(tmp_path / n) if "loss" in m] for n in ("0", "100"))
    assert a != b and b[0] == pytest.approx(a[0], abs=0.1)


def test_killed_and_resumed(data_dir, tmp_path):
    assert_a_kill_changes_nothing(data_dir, tmp_path, head_samples=64, dropout=0.1)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_ranks_equal_one(data_dir, tmp_path, how):
    settings = TINY | dict(data_dir=str(data_dir), head_samples=64, max_iters=6, eval_interval=3)
    assert_two_ranks_equal_one(tmp_path, settings, how, val_loss=1e-5)


def test_another_split_is_the_same_step(data_dir, tmp_path):
    for name, batch_size, n in (("a", 4, 1), ("b", 1, 4)):
        go(data_dir, tmp_path / name, head_samples=64, batch_size=batch_size, eval_iters=8,
           gradient_accumulation_steps=n)
    a, b = ([m["loss"] for m in metrics(tmp_path / name) if "loss" in m] for name in "ab")
    assert a == pytest.approx(b, rel=1e-5)


def test_flops_are_those_of_the_rows_that_are_computed(data_dir, tmp_path):
    with opened(configure(data_dir, tmp_path, head_samples=64)) as run:
        x, y = run.data.train.get_batch("cpu", 0)
        with FlopCounterMode(display=False) as counter:
            run.raw_model(x, y)[0].backward()
        expected = run.raw_model.flops_per_unit() * x.numel()
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("n", [256, 1000])
def test_a_vocabulary_that_is_not_larger_is_refused(data_dir, tmp_path, n):
    with pytest.raises(SetupError, match="expected fewer than the 256 ids"):
        go(data_dir, tmp_path, head_samples=n)


def test_any_seed_of_a_run_is_one_of_the_samples():
    a, b = (SampledCrossEntropy(torch.arange(V), V, 60, seed=seed).ids for seed in (1, 2**64 + 1))
    assert len(a.unique()) == len(b.unique()) == 60


def test_off_is_the_same_run(data_dir, tmp_path):
    go(data_dir, tmp_path / "a")
    go(data_dir, tmp_path / "b", head_samples=0)
    assert_same(tmp_path / "a", tmp_path / "b")
