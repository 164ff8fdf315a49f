"""The running average of the weights (ema): against one recomputed from kept checkpoints, resumed,
on two ranks, evaluated beside the weights, and read by the commands that write text."""

import time

import pytest
import torch
from conftest import TINY
from runs import assert_a_kill_changes_nothing, assert_same, assert_two_ranks_equal_one, go
from test_own_model import SETTINGS, Regression, rows
from test_regressions import with_test_data

from model.convert import main as convert
from model.core.load import load_model
from model.gpt import GPT
from model.sample import main as sample
from train import setup
from train.base.run_folder import RunFolder
from train.checkpoint import load_checkpoint
from train.config import load_config
from train.dataloader import Data
from train.train import train


def averages(path):
    return {name: entry["ema"] for name, entry in
            load_checkpoint(path)["optimizer"]["state"].items()}


def recomputed(folder, steps, decay):
    """From the checkpoints after each step, in float64."""
    out = {}
    for it in range(steps):
        d = min(decay, (1 + it) / (10 + it))
        for name, t in load_checkpoint(folder / f"ckpt_{it + 1:07d}.pt")["model"].items():
            t = t.double()
            out[name] = t if it == 0 else d * out[name] + (1 - d) * t
    return out


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_it_is_the_average_of_kept_checkpoints(data_dir, tmp_path, optimizer):
    go(data_dir, tmp_path, max_iters=12, ema=0.5, optimizer=optimizer, save_interval=1,
       keep_last=99, n_embd=32)
    expected = recomputed(tmp_path, 12, 0.5)
    found = averages(tmp_path / "ckpt.pt")
    assert found.keys() == expected.keys()
    for name, t in found.items():
        torch.testing.assert_close(t.double(), expected[name], rtol=1e-5, atol=1e-7)


def test_it_has_what_after_step_makes_of_the_weights(data_dir, tmp_path, monkeypatch):
    """A model may normalise its weights after each step, as nGPT does."""
    @torch.no_grad()
    def after_step(self, it, sums):
        self.ln_f.weight.fill_(it)
    monkeypatch.setattr(GPT, "after_step", after_step, raising=False)
    go(data_dir, tmp_path, max_iters=6, ema=0.5, save_interval=1, keep_last=99)
    expected = recomputed(tmp_path, 6, 0.5)["ln_f.weight"]
    found = averages(tmp_path / "ckpt.pt")["ln_f.weight"]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)


def test_an_average_of_bfloat16_weights_is_float32(tmp_path):
    """a model with bfloat16 weights, in which small updates of the average would be lost to
    rounding -> the average is float32, also after evaluations and a resume"""
    def fit(folder, steps):
        config = load_config(None, SETTINGS | dict(
            out_dir=str(tmp_path / folder), max_iters=steps, ema=0.999, save_interval=1,
            keep_last=99))
        train(config, Rounded().bfloat16(), data=Data(rows(120), rows(30)))

    class Rounded(Regression):
        def forward(self, x, y):
            return super().forward(x.bfloat16(), y)
    fit("parts", 8)
    fit("parts", 16)
    fit("whole", 16)
    assert_same(tmp_path / "whole", tmp_path / "parts")
    for name, value in recomputed(tmp_path / "whole", 16, 0.999).items():
        average = averages(tmp_path / "whole/ckpt.pt")[name]
        torch.testing.assert_close(average.double(), value, rtol=1e-5, atol=1e-6)


def test_weights_keep_their_bits_and_both_are_evaluated(data_dir, tmp_path):
    """The average's numbers are those of a model that has it for weights; before the first step
    they are the weights' own."""
    plain = go(data_dir, tmp_path / "plain", eval_iters=50)
    both = go(data_dir, tmp_path / "ema", eval_iters=50, ema=0.9)
    a, b = (load_checkpoint(tmp_path / n / "ckpt.pt")["model"] for n in ("plain", "ema"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    for old, new in zip(plain["history"], both["history"], strict=True):
        assert new["val_loss"] == old["val_loss"]
        if new["iter"] == 0:
            assert new["val_loss_ema"] == new["val_loss"]
    state = load_checkpoint(tmp_path / "ema/ckpt.pt")
    torch.save(dict(model=averages(tmp_path / "ema/ckpt.pt"), model_args=state["model_args"]),
               tmp_path / "average.pt")
    alone = go(data_dir, tmp_path / "alone", eval_iters=50, max_iters=0, eval_on_start=True,
               init_from=str(tmp_path / "average.pt"))
    last = both["history"][-1]
    assert alone["history"][-1]["val_loss"] == last["val_loss_ema"] != last["val_loss"]
    assert alone["history"][-1]["val_ppl"] == last["val_ppl_ema"]


@pytest.mark.matrix(123)
def test_killed_and_resumed(data_dir, tmp_path):
    """kill -9 in a run that averages its weights (ema) -> averages, weights and counters are exact,
    and ckpt_best.pt, which the average's loss says"""
    how = dict(ema=0.9, max_iters=14, save_interval=3, early_stopping_metric="val_loss_ema")
    assert_a_kill_changes_nothing(data_dir, tmp_path, **how)
    assert all(torch.equal(t, averages(tmp_path / "b/ckpt.pt")[name])
               for name, t in averages(tmp_path / "a/ckpt.pt").items())


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_ranks_equal_one(data_dir, tmp_path, how):
    settings = TINY | dict(data_dir=str(data_dir), ema=0.5)
    assert_two_ranks_equal_one(tmp_path, settings, how, val_loss_ema=1e-5)
    a, b = (averages(tmp_path / n / "ckpt.pt") for n in ("one", "two"))
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=1e-5)


def test_a_run_stops_by_the_average_and_turns_it_off(data_dir, tmp_path):
    last = go(data_dir, tmp_path, ema=0.9, early_stopping_metric="val_loss_ema", eval_interval=2,
              early_stopping_patience=1, early_stopping_min_delta=9.0)
    assert "no better val_loss_ema" in last["finished"]
    go(data_dir, tmp_path, ema=0.0, allow_change=["ema", "early_stopping_metric"],
       max_iters=30)
    assert "ema" not in next(iter(load_checkpoint(tmp_path / "ckpt.pt")["optimizer"][
        "state"].values()))


@pytest.mark.parametrize("form", ["file", "sharded"])
def test_the_average_that_was_the_best_is_tested(data_dir, tmp_path, monkeypatch, form):
    """Its number on the test data, here the validation data, is that of the evaluation."""
    monkeypatch.setattr(setup, "open_data", with_test_data)
    how = dict(ema=0.9, eval_iters=4, checkpoint_format=form)  # as many batches as the test
    for metric in ("val_loss_ema", "val_loss"):
        run = go(data_dir, tmp_path / metric, early_stopping_metric=metric, **how)
        best = min(record[metric] for record in run["history"] if record["iter"])
        assert run["test"]["test_loss"] == pytest.approx(best, rel=1e-6)
    # A finished run elsewhere: its copy is saved before it is tested.
    path = str(tmp_path / "val_loss_ema/ckpt.pt")
    write = RunFolder.write
    monkeypatch.setattr(RunFolder, "write", lambda *args: time.sleep(0.3) or write(*args))
    again = go(data_dir, tmp_path / "b", resume=path, early_stopping_metric="val_loss_ema", **how)
    assert again["test"]["test_loss"] == pytest.approx(again["history"][-1]["val_loss_ema"])


def test_commands_take_the_average(data_dir, tmp_path, capsys):
    go(data_dir, tmp_path, ema=0.9, tokenizer="byte", vocab_size=None)
    ckpt = str(tmp_path / "ckpt.pt")
    model, _ = load_model(ckpt, ema=True)
    expected = averages(ckpt)
    assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())
    out = str(tmp_path / "w.safetensors")
    assert convert(["--ckpt", ckpt, "--to", out, "--ema"]) == 0
    exported, _ = load_model(out)
    idx = torch.arange(8)[None]
    torch.testing.assert_close(exported(idx), model(idx))
    assert sample(["--ckpt", ckpt, "--ema", "--max_new_tokens", "3"]) == 0
    # Before the first step the average is the weights, e.g. if these remain the best.
    go(data_dir, tmp_path / "start", ema=0.9, init_from=ckpt, learning_rate=9.0, min_lr=9.0,
       grad_clip=0, tokenizer="byte", vocab_size=None)
    best = load_checkpoint(tmp_path / "start/ckpt_best.pt")
    model, _ = load_model(tmp_path / "start/ckpt_best.pt", ema=True)
    assert best["iter_num"] == 0
    assert all(torch.equal(p, best["model"][n]) for n, p in model.named_parameters())
    go(data_dir, tmp_path / "plain", tokenizer="byte", vocab_size=None)
    assert sample(["--ckpt", str(tmp_path / "plain/ckpt.pt"), "--ema"]) == 2
    assert "no averaged weights in it" in capsys.readouterr().err
