"""Numbers that go wrong are found before they do harm. Matrix cases 74 to 76 and 78 (77, values of
the configuration, is in test_config.py)."""

import re

import pytest
import torch
from runs import assert_same, go, run_program

from train import train as training
from train.base.errors import BadNumbers, CheckpointError
from train.checkpoint import load_checkpoint, save_checkpoint
from train.lr_scheduler import SpikeDetector
from train.robust import decide_action
from train.setup import Progress


def finite(path):
    c = load_checkpoint(path)
    states = [c["model"], *c["optimizer"]["state"].values()]
    return all(torch.isfinite(t).all() for s in states for t in s.values())


def spoil_gradient(monkeypatch, bad_step, value):
    """Put `value` into the gradient of one weight where bad_step(step), before gradients are
    unscaled and clipped."""
    real, step, current = torch.amp.GradScaler.unscale_, training.train_step, []

    def train_step(run, lr=None):
        current[:] = [run.progress.iter_num]
        step(run)

    def unscale_(scaler, optimizer):
        named = {n: p for g in optimizer.param_groups
                 for n, p in zip(g["names"], g["params"], strict=True)}
        if bad_step(current[0]):
            named["ln_f.weight"].grad[0] = value
        real(scaler, optimizer)
    monkeypatch.setattr(training, "train_step", train_step)
    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", unscale_)


@pytest.mark.matrix(74)
def test_a_nan_loss_stops_the_run_before_the_update(tmp_path, data_dir):
    """NaN in loss and gradients at step 12 -> exit 1 before the update, without a traceback; step,
    loss, norm, lr, windows and the last good checkpoint, finite and of iter 10, are named"""
    out = tmp_path / "out"
    code, text = run_program(data_dir, out, env={"FAULT": "bad_loss@12=nan"})
    assert code == 1 and "Traceback" not in text
    message = text[text.index("iter 12: not finite"):]
    assert re.search(r"loss nan, gradient norm nan, lr 0\.00\d+; stopped before the update. "
                     r"The batch: windows at tokens \d+, \d+; windows at tokens \d+, \d+\.",
                     message)
    assert f"Last good checkpoint: {out}/ckpt.pt" in message and "--learning_rate" in message
    assert load_checkpoint(out / "ckpt.pt")["iter_num"] == 10 and finite(out / "ckpt.pt")


def test_a_loss_that_has_risen_for_good_is_no_spike():
    progress, spikes = Progress(), SpikeDetector()
    for i in range(100):
        assert not spikes.update(2.0 + 0.01 * (i % 7))
    for i in range(33):
        assert spikes.update(5.0)
        verdict = decide_action(5.0, 1.0, progress, spikes, "skip", False)
        assert verdict == ("skip" if i < 32 else "update")
    assert not any(spikes.update(5.0) for _ in range(68))


@pytest.mark.matrix(75)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path, data_dir, monkeypatch, value):
    """inf, -inf or NaN in one gradient, the loss being fine -> stopped before the update"""
    spoil_gradient(monkeypatch, lambda it: it == 7, value)
    with pytest.raises(BadNumbers, match=r"iter 7: not finite: loss \d\.\d+, .* norm (inf|nan)"):
        go(data_dir, tmp_path)
    assert load_checkpoint(tmp_path / "ckpt.pt")["iter_num"] == 5 and finite(tmp_path / "ckpt.pt")


@pytest.mark.matrix(75)
def test_bad_numbers_before_the_first_checkpoint_leave_none(tmp_path, data_dir, monkeypatch):
    """inf at step 0 -> says that there is no good checkpoint yet, and leaves none"""
    spoil_gradient(monkeypatch, lambda it: it == 0, torch.inf)
    with pytest.raises(BadNumbers, match="Last good checkpoint: none yet"):
        go(data_dir, tmp_path)
    assert not (tmp_path / "ckpt.pt").exists()


@pytest.mark.matrix(76)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_float16_overflow_skips_its_step(tmp_path, data_dir, monkeypatch, optimizer):
    """float16, inf in a gradient at step 7 -> that step changes no weight, the scale is halved, it
    is counted and training goes on (more: case 45 in test_resume.py)"""
    spoil_gradient(monkeypatch, lambda it: it == 7, torch.inf)
    weights, step = {}, training.train_step

    def train_step(run, lr=None):
        step(run)
        weights[run.progress.iter_num] = {
            n: p.clone() for n, p in run.raw_model.state_dict().items()}
    monkeypatch.setattr(training, "train_step", train_step)
    go(data_dir, tmp_path, dtype="float16", optimizer=optimizer, muon_weight_decay=0.1)
    state = load_checkpoint(tmp_path / "ckpt.pt")
    assert state["progress"]["overflows"] == 1 and state["iter_num"] == 20
    assert state["scaler"]["scale"] == 2.0 ** 15 and finite(tmp_path / "ckpt.pt")
    assert all(torch.equal(weights[7][n], weights[8][n]) for n in weights[7])
    assert not all(torch.equal(weights[8][n], weights[9][n]) for n in weights[8])


@pytest.mark.matrix(76)
def test_float16_overflow_without_end_stops_the_run(tmp_path, data_dir, monkeypatch):
    """float16, every step overflows -> stopped after 20 in a row, nothing spoilt"""
    spoil_gradient(monkeypatch, lambda it: True, torch.inf)
    with pytest.raises(BadNumbers, match="iter 20: not finite"):
        go(data_dir, tmp_path, dtype="float16", max_iters=40, eval_interval=0, save_interval=5)
    assert finite(tmp_path / "ckpt.pt")


@pytest.mark.matrix(78)
def test_only_what_is_far_above_is_a_spike():
    """losses around 3 +- 0.1, then 3.4, 3.6 and 3.7 -> only what is 6 deviations above is a spike;
    silent at first; a spike does not raise the mean; its state carries over"""
    losses = [3 + 0.1 * (-1) ** i for i in range(63)]
    detector = SpikeDetector()
    assert not any(detector.update(x) for x in [*losses, 99.0][:63])
    assert not detector.update(2.9) and not detector.update(3.4)
    assert detector.update(3.8) and detector.update(3.8) and detector.update(float("nan"))
    other = SpikeDetector()
    other.load_state_dict(detector.state_dict())
    assert all(other.update(x) == detector.update(x) for x in (3.0, 3.5, 3.75, 4.0, 2.0))


@pytest.fixture
def bad_batches(monkeypatch):
    """Batches, by number, whose loss is thrice what it should be: a set to fill."""
    monkeypatch.setattr(SpikeDetector.__init__, "__defaults__", (6.0, 8))
    bad, current, step, real = set(), [], training.train_step, training.pack

    def train_step(run, lr=None):
        current[:] = [run.progress.iter_num]
        step(run)

    def pack(loss, sums, count):
        return real(loss * 3 if current[0] in bad else loss, sums, count)
    monkeypatch.setattr(training, "train_step", train_step)
    monkeypatch.setattr(training, "pack", pack)
    return bad


@pytest.mark.matrix(78)
def test_a_spike_is_told(tmp_path, data_dir, bad_batches, capsys):
    """a spike at step 13, on_spike: warn -> a warning with step, loss, norm and windows; the step
    is done"""
    go(data_dir, tmp_path / "a")
    bad_batches.add(13)
    go(data_dir, tmp_path / "b")
    text = capsys.readouterr().out
    assert re.search(r"warning: iter 13: loss 1\d\.\d+ is a spike \(norm [\d.]+, windows at tokens "
                     r"\d+, \d+; windows at tokens \d+, \d+\); continuing", text)
    a, b = (load_checkpoint(tmp_path / n / "ckpt.pt")["model"] for n in "ab")
    assert all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.matrix(78)
def test_a_spike_is_skipped(tmp_path, data_dir, bad_batches):
    """a spike at step 13, on_spike: skip -> no weight changes in that step, and so it is when the
    run is stopped just before and resumed"""
    bad_batches.add(13)
    go(data_dir, tmp_path / "a", on_spike="skip")
    go(data_dir, tmp_path / "b", "before_opt@12=sigterm", on_spike="skip")
    before = load_checkpoint(tmp_path / "b" / "ckpt.pt")["model"]
    go(data_dir, tmp_path / "b", "before_opt@13=sigterm", on_spike="skip")
    after = load_checkpoint(tmp_path / "b" / "ckpt.pt")
    assert after["iter_num"] == 14
    assert all(torch.equal(before[n], after["model"][n]) for n in before)
    go(data_dir, tmp_path / "b", on_spike="skip")
    assert_same(tmp_path / "a", tmp_path / "b")


def test_a_run_that_has_skipped_batches_is_refused(tmp_path, data_dir):
    """A checkpoint of an earlier version, whose on_spike: rewind skipped batches."""
    go(data_dir, tmp_path, max_iters=5)
    state = load_checkpoint(tmp_path / "ckpt.pt")
    state["config"]["on_spike"] = "rewind"
    for shift in (4, 0):
        state["progress"] |= dict(data_shift=shift, rewinds=1)
        save_checkpoint(str(tmp_path / "ckpt.pt"), state)
        if shift:
            with pytest.raises(CheckpointError, match="the run skipped batches .*--init_from"):
                go(data_dir, tmp_path)
    assert go(data_dir, tmp_path)["iter_num"] == 20
