"""A model and data of one's own, given to train(): modes, buffers, the best evaluation, masks."""

import contextlib
import math
import os
import signal

import pytest
import torch
from faulty import faults
from runs import assert_same, go, metrics
from torch import nn
from torch.utils.data import TensorDataset

from train.base.errors import Stopped
from train.checkpoint import load_checkpoint, save_checkpoint
from train.config import load_config
from train.dataloader import Data
from train.train import train

SETTINGS = dict(batch_size=4, gradient_accumulation_steps=3, max_iters=12, eval_interval=4,
                eval_iters=100, save_interval=2, warmup_iters=0, lr_decay_iters=12, log_interval=1,
                learning_rate=0.05, device="cpu", dtype="float32", compile="false", num_threads=1)


class Regression(nn.Module):
    """Rows whose target is below -50 are masked."""

    def __init__(self, *layers):
        super().__init__()
        self.net = nn.Sequential(*layers or [nn.Linear(3, 1)])
        torch.manual_seed(0)
        for layer in self.net:
            getattr(layer, "reset_parameters", lambda: None)()

    def forward(self, x, y):
        counted = y > -50
        errors = (self.net(x)[:, 0] - y).square() * counted
        error = self.net(x)[:, 0].sub(y).abs() * counted
        return errors.sum() / counted.sum().clamp(min=1), dict(
            count=counted.sum(), abs_error=error.sum())

    def numbers(self, sums):
        return dict(abs_error=float(sums["abs_error"] / sums["count"]), never=None)


def rows(n, seed=1, masked=()):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator)
    y = x[:, 0] + torch.randn(n, generator=generator)
    y[list(masked)] = -99
    return TensorDataset(x, y)


def fit(out, model=None, fault="", data=None, **changes):
    """Train into the folder `out`; the result of train(), or the exception of a signal."""
    config = load_config(None, SETTINGS | dict(out_dir=str(out)) | changes)
    with faults(fault) if fault else contextlib.nullcontext():
        try:
            return train(config, model=model or Regression(),
                         data=data or Data(rows(120), rows(30, seed=2)))
        except Stopped as stopped:
            return stopped


def test_a_model_in_eval_mode_is_trained_with_dropout(tmp_path):
    """from_pretrained() and load_model() return models in eval mode -> in step 0 and after a resume
    dropout is on, as in a run that was not interrupted"""
    def model():
        return Regression(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 1)).eval()
    fit(tmp_path / "whole", model(), eval_on_start=False)
    fit(tmp_path / "train_mode", model().train(), eval_on_start=False)
    fit(tmp_path / "parts", model(), "before_step@5=sigterm", eval_on_start=False)
    fit(tmp_path / "parts", model(), eval_on_start=False)
    assert_same(tmp_path / "train_mode", tmp_path / "whole")
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_a_stop_within_a_step_leaves_running_statistics_exact(tmp_path, monkeypatch):
    """SIGTERM in the second of three micro-batches, with BatchNorm -> every batch counts once in
    the running statistics"""
    class Noticing(Regression):
        calls = 0

        def forward(self, x, y):
            type(self).calls += self.training
            if self.calls == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().forward(x, y)

    def model():
        Noticing.calls = 0
        return Noticing(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    stop_at = -1
    fit(tmp_path / "whole", model())
    stop_at = 14  # in step 4
    assert isinstance(fit(tmp_path / "parts", model()), Stopped)
    stop_at = -1
    fit(tmp_path / "parts", model())
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_a_first_batch_that_is_masked_is_no_reason_to_refuse(tmp_path):
    """the rows of the batch that stands for all are masked -> the names of numbers are learned
    from more batches"""
    data = Data(rows(120), rows(30, seed=2, masked=(0, 7, 15, 22)))
    result = fit(tmp_path, data=data, early_stopping_metric="val_abs_error", eval_iters=2)
    assert math.isfinite(result["val_loss"]) and (tmp_path / "ckpt_best.pt").exists()


def test_a_metric_without_a_value_is_named(tmp_path):
    """early_stopping_metric: a number that is always None -> a warning per evaluation"""
    fit(tmp_path, early_stopping_metric="val_never", early_stopping_patience=1)
    log = (tmp_path / "train.log").read_text()
    assert log.count("val_never has no value: this evaluation cannot be the best") == 3
    assert not (tmp_path / "ckpt_best.pt").exists()


def test_test_data_without_validation_are_evaluated_once(tmp_path):
    data = Data(rows(120), test=rows(30, seed=2))
    results = [fit(tmp_path, data=data)["test"] for _ in range(3)]
    assert results[0] == results[1] == results[2] and results[0]["test_loss"] > 0
    assert (tmp_path / "train.log").read_text().count("On test data") == 1


OVERFITTING = dict(max_iters=40, lr_decay_iters=40, eval_interval=10, save_interval=10, keep_last=9,
                   learning_rate=0.02)


def wide():
    return Regression(nn.Linear(3, 256), nn.Tanh(), nn.Linear(256, 1))


def small_data():
    return Data(rows(16), rows(60, seed=2))


def test_a_branch_knows_that_its_first_checkpoint_is_the_best(tmp_path):
    """--resume FILE, whose evaluation is better than all later ones, into a new folder -> it is
    ckpt_best.pt there, as in the run that was not interrupted"""
    whole = fit(tmp_path / "whole", wide(), data=small_data(), **OVERFITTING)
    best = load_checkpoint(tmp_path / "whole" / "ckpt_best.pt")["iter_num"]
    losses = {h["iter"]: h["val_loss"] for h in whole["history"]}
    assert 0 < best < 40 and losses[best] == min(losses.values())  # it overfits
    source = tmp_path / "whole" / f"ckpt_{best:07d}.pt"
    fit(tmp_path / "branch", wide(), data=small_data(), **OVERFITTING, resume=str(source))
    state = load_checkpoint(tmp_path / "branch" / "ckpt_best.pt")
    assert state["iter_num"] == best and state["progress"]["best_metric"] == losses[best]
    assert metrics(tmp_path / "branch") == [m for m in metrics(tmp_path / "whole")
                                            if m["iter"] >= best][1:]


@pytest.mark.parametrize("stop", ["", "eval@0=sigterm"])
def test_an_untrained_head_is_not_the_best_after_a_stop(tmp_path, data_dir, stop):
    """init_from weights that lack a layer, stopped in the first evaluation -> after the resume its
    result does not count, as without the stop"""
    go(data_dir, tmp_path / "source", max_iters=2)
    state = load_checkpoint(tmp_path / "source" / "ckpt.pt")
    del state["model"]["ln_f.weight"]
    save_checkpoint(tmp_path / "part.pt", state)
    changes = dict(init_from=str(tmp_path / "part.pt"), max_iters=4, eval_interval=2,
                   learning_rate=10.0, muon_lr=10.0, warmup_iters=0, early_stopping_patience=1)
    go(data_dir, tmp_path / "out", stop, **changes)
    result = go(data_dir, tmp_path / "out", **changes)
    assert result["finished"] == "max_iters 4 reached"
    assert load_checkpoint(tmp_path / "out" / "ckpt_best.pt")["iter_num"] > 0
