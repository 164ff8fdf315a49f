"""python -m train.tools.lr_finder: what it suggests, and that it leaves no trace."""

import hashlib
import json
import math
import random
import xml.etree.ElementTree as ET

import pytest
import torch
from conftest import TINY, tiny_args
from processes import python

from train.base.files import lock_folder
from train.config import load_config
from train.tools import lr_finder
from train.train import train


def arguments(data_dir, out_dir, **changes):
    return tiny_args(data_dir=data_dir, out_dir=out_dir, vocab_size=256, **changes)


def fingerprint(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_command_leaves_no_trace_in_a_run(tmp_path, data_dir):
    """Between the halves of a run, and while another process has its folder."""
    def half(name, max_iters):
        train(load_config(None, arguments(data_dir, tmp_path / name, max_iters=max_iters,
                                          lr_decay_iters=10, dropout=0.1)))
    half("a", 5)
    half("b", 5)
    before, lock = fingerprint(tmp_path / "a"), lock_folder(tmp_path / "a")
    done = python("-m", "train.tools.lr_finder", "--steps", "30",
                  *arguments(data_dir, tmp_path / "a"))
    lock.close()
    assert done.returncode == 0, done.stderr
    after = fingerprint(tmp_path / "a")
    assert after.keys() - before.keys() == {"lr_finder.json", "lr_finder.svg"}
    after[".lock"] = before[".lock"]  # the test's own pid
    assert {k: after[k] for k in before} == before
    found = json.loads((tmp_path / "a/lr_finder.json").read_text())
    best = found["suggestion"]
    assert f"falls fastest at {best:.2g}. Try --learning_rate {best:.2g};" in done.stdout
    assert "step 10 of 30: lr " in done.stdout
    half("a", 10)
    half("b", 10)
    a, b = (torch.load(tmp_path / n / "ckpt.pt", weights_only=True) for n in "ab")
    assert all(torch.equal(a["model"][k], b["model"][k]) for k in b["model"])
    assert (tmp_path / "a/metrics.jsonl").read_text().count("\n") == 13


def test_training_in_the_same_process_is_the_same_after_a_sweep(tmp_path, data_dir):
    models = []
    for name in ("a", "b"):
        config = load_config(None, arguments(data_dir, tmp_path / name, max_iters=5))
        if name == "b":
            lr_finder.find_lr(config, steps=20)
        train(config)
        models.append(torch.load(tmp_path / name / "ckpt.pt", weights_only=True)["model"])
    assert all(torch.equal(models[0][k], models[1][k]) for k in models[0])


def test_suggestion_beats_far_lower_and_far_higher_rates(tmp_path, data_dir):
    config = TINY | dict(data_dir=str(data_dir), vocab_size=256, max_iters=40, eval_interval=40)
    found = lr_finder.find_lr(load_config(None, config | dict(out_dir=str(tmp_path / "none"))))
    assert not (tmp_path / "none").exists()
    loss = {}
    for factor in (0.03, 1, 100):
        rate = found["suggestion"] * factor
        loss[factor] = train(load_config(None, config | dict(
            learning_rate=rate, min_lr=0.0, out_dir=str(tmp_path / str(factor)))))["val_loss"]
    assert loss[1] < loss[0.03] and loss[1] < loss[100], (found["suggestion"], loss)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_sweep_is_exponential_and_ends_at_divergence(tmp_path, data_dir, optimizer, capsys):
    code = lr_finder.main(["--from=1e-5", "--to=100", "--steps=50",
                           *arguments(data_dir, tmp_path, optimizer=optimizer, grad_clip=0,
                                      norm="layer", n_embd=64, n_hidden=256)])
    assert code == 0
    out = capsys.readouterr().out
    assert ("--muon_lr" in out) == (optimizer == "muon")
    found = json.loads((tmp_path / "lr_finder.json").read_text())
    ratios = [b / a for a, b in zip(found["lr"], found["lr"][1:], strict=False)]
    assert ratios == pytest.approx([1e7 ** (1 / 49)] * len(ratios))
    assert 20 < len(found["lr"]) < 50 and found["lr"][0] == 1e-5
    assert len(found["loss"]) == len(found["smoothed"]) == len(found["lr"])
    assert abs(found["loss"][0] - math.log(256)) < 0.2
    root = ET.parse(tmp_path / "lr_finder.svg").getroot()
    texts = [e.text for e in root.iter() if e.tag.endswith("text")]
    assert {"learning rate", "1e-5"} <= set(texts)
    assert f"falls fastest: {found['suggestion']:.2g}" in texts
    assert {p.name for p in tmp_path.iterdir()} == {"lr_finder.json", "lr_finder.svg"}


def rates(low=-7.0, high=0.0, steps=100):
    return [10 ** (low + (high - low) * i / (steps - 1)) for i in range(steps)]


def test_suggest_on_a_known_curve():
    losses = [5 - 2 / (1 + math.exp(-4 * (math.log10(r) + 3))) + max(0, r - 0.03) * 20
              for r in rates()]  # falls fastest at 1e-3
    found = lr_finder.suggest(rates(), losses, 1.0)
    assert found["suggestion"] == pytest.approx(1e-3, rel=0.2) and found["why"] is None


@pytest.mark.parametrize("seed", range(20))
def test_no_clear_minimum_in_mere_noise(seed):
    draw = random.Random(seed)
    losses = [2.5 + draw.gauss(0, 0.05) + max(0, r - 0.003) * 100 for r in rates()]
    found = lr_finder.suggest(rates(), losses, 1.0)
    assert found["suggestion"] is None and "noise" in found["why"]
    # The same noise on a fall of four times its size is one.
    losses = [y - 0.2 / (1 + math.exp(-4 * (math.log10(r) + 4)))
              for y, r in zip(losses, rates(), strict=True)]
    assert 1e-6 < lr_finder.suggest(rates(), losses, 1.0)["suggestion"] < 1e-2


def test_noise_before_the_fall_is_not_where_it_falls_fastest():
    """a fall of 0.5 at 3e-3, noise of 0.13: of 300 curves, at most 5 have a far lower rate (15 if
    slopes before the fall counted)"""
    found = []
    for seed in range(300):
        draw = random.Random(seed)
        losses = [2 - 0.5 / (1 + math.exp(-3 * (math.log10(r) + 2.5))) + draw.gauss(0, 0.13)
                  + max(0, math.log10(r) + 1) * 2 for r in rates()]
        found.append(lr_finder.suggest(rates(), losses, 1.0)["suggestion"])
    assert sum(rate < 1e-4 for rate in found) <= 5


@pytest.mark.parametrize("losses, why", [
    ([5.0 + i for i in range(100)], "within its noise"), ([], "diverged within 0 steps"),
    ([5.0, 5.0, 30.0], "diverged within 3 steps"),
    ([5.0 - i / 100 for i in range(100)], "still falling at 1; increase --to")])
def test_why_there_is_no_clear_minimum(losses, why):
    found = lr_finder.suggest(rates(), losses, 1.0)
    assert found["suggestion"] is None and why in found["why"]


def test_a_negative_loss_is_no_divergence(tmp_path, data_dir, monkeypatch):
    losses = iter([-9.0 + 0.1 * (i % 3) for i in range(12)])
    monkeypatch.setattr(lr_finder, "train_step", lambda run, lr: next(losses))
    config = load_config(None, arguments(data_dir, tmp_path))
    assert len(lr_finder.find_lr(config, 1e-5, 1.0, 12)["loss"]) == 12


@pytest.mark.parametrize("loss, steps", [(15.9, 30), (16.1, 15), (70.0, 11)])
def test_the_sweep_ends_at_four_times_the_lowest_loss(tmp_path, data_dir, monkeypatch, loss, steps):
    """In the mean of five steps."""
    losses = iter([9.0, 5.0, 4.0] + [4.1] * 7 + [loss] * 20)
    monkeypatch.setattr(lr_finder, "train_step", lambda run, lr: next(losses))
    config = load_config(None, arguments(data_dir, tmp_path))
    assert len(lr_finder.find_lr(config, 1e-5, 1.0, 30)["loss"]) == steps


def test_a_loss_that_falls_until_it_diverges_at_once():
    losses = [5.0] * 30 + [5.0 - i / 30 for i in range(30)]  # the next one was not finite
    assert 1e-5 < lr_finder.suggest(rates(), losses, 1.0)["suggestion"] < 2e-3


def test_no_clear_minimum_is_said_and_drawn(tmp_path, data_dir, capsys):
    assert lr_finder.main(["--from=1e-9", "--to=1e-7", "--steps=20",
                           *arguments(data_dir, tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "No clear minimum: the loss fell by only" in out and "Try --learning_rate" not in out
    assert json.loads((tmp_path / "lr_finder.json").read_text())["suggestion"] is None
    assert (tmp_path / "lr_finder.svg").exists()


def test_the_advice_is_for_all_rates_that_the_sweep_changed(tmp_path, capsys):
    """a tenth of the learning rate -> min_lr, which must not exceed it, muon_lr and the rates of
    groups, too"""
    config = load_config(None, dict(
        out_dir=tmp_path, learning_rate=0.1, min_lr=0.02, muon_lr=0.3, optimizer="muon",
        lr_groups={"wte": dict(learning_rate=1.0)}))
    lr_finder.report_sweep(dict(lr=[1], loss=[1], smoothed=[1], suggestion=0.01), config)
    assert ("Try --learning_rate 0.01 --min_lr 0.002 --muon_lr 0.03, and each learning_rate in "
            "lr_groups times 0.1; see") in capsys.readouterr().out


def test_a_sweep_shows_that_it_moves(tmp_path, data_dir, capsys):
    assert lr_finder.main(["--steps=20", "--to=1e-3", *arguments(data_dir, tmp_path)]) == 0
    assert capsys.readouterr().out.count(" of 20: lr ") == 2


@pytest.mark.parametrize("needs", [dict(early_stopping_patience=2), dict(lr_schedule="plateau")])
def test_keys_that_need_evaluations_are_no_obstacle(tmp_path, data_dir, needs):
    """Also not of a run that starts from weights, whose shape is checked together with the keys."""
    train(load_config(None, arguments(data_dir, tmp_path / "a", max_iters=0)))
    for start in ({}, dict(init_from=tmp_path / "a/ckpt.pt")):
        config = load_config(None, arguments(data_dir, tmp_path / "b", **needs, **start))
        assert len(lr_finder.find_lr(config, 1e-5, 1e-4, 10)["loss"]) == 10


def test_a_length_in_epochs_is_enough_and_a_refusal_leaves_no_folder(tmp_path, data_dir, capsys):
    """max_iters is far beyond the limit of epochs, as GPT-2's with a small text is."""
    args = ["--steps=10", *arguments(data_dir, tmp_path / "a", max_iters=10**8)]
    assert lr_finder.main(args) == 2 and not (tmp_path / "a").exists()
    assert "give the length in epochs, e.g. --max_epochs 3" in capsys.readouterr().err
    assert lr_finder.main([*args, "--max_epochs=3"]) == 0
    assert len(json.loads((tmp_path / "a/lr_finder.json").read_text())["lr"]) == 10


@pytest.mark.parametrize("args, message", [
    (["--from", "1", "--to", "0.1"], "expected --from below --to"),
    (["--steps", "3"], "--steps: must be at least 10"), (["--stesp=3"], "unknown key 'stesp'"),
    (["--config", "missing.yaml"], "missing.yaml: cannot be read")])
def test_bad_input_ends_with_one_message(args, message, capsys):
    try:
        code = lr_finder.main(args)
    except SystemExit as stop:  # argparse
        code = stop.code
    assert code == 2
    assert message in capsys.readouterr().err
