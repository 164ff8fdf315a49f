"""The main job from end to end, through the command a person types and through train(config)."""

import json
import math
import re
import time

import pytest
import torch
import torch.nn.functional as F
from conftest import SHARED, TINY, run, tiny_args
from processes import python

from train.config import load_config
from train.train import train


def config(data_dir, out_dir, **changes):
    small = TINY | dict(data_dir=str(data_dir), out_dir=str(out_dir), vocab_size=256)
    return load_config(None, small | changes)


def metrics(out_dir):
    return [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]


def same_tensors(a, b):
    a, b = (torch.load(p / "ckpt.pt", weights_only=True) for p in (a, b))
    states = [{f"{n}.{k}": v for n, e in c["optimizer"]["state"].items() for k, v in e.items()}
              for c in (a, b)]
    return all(x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)
               for x, y in ((a["model"], b["model"]), states))


def test_test_config_runs_from_the_command_line(tmp_path, data_dir):
    code, out = run("--config", "train/config_test.yaml", "--data_dir", data_dir, "--out_dir",
                    tmp_path / "o")
    assert code == 0, out
    assert "[train] Data loaded. Length: 20,000 tokens" in out
    assert re.search(r"iter 9: loss \d+\.\d{4}, time \S+, lr 0\.\d{6}, norm \S+, \S+ tok/s", out)
    assert re.search(r"step 10: train loss [\d.]+, val loss [\d.]+, ppl [\d.]+", out)
    assert "Training complete!" in out and "model.sample" in out
    names = {p.name for p in (tmp_path / "o").iterdir()}
    assert {"ckpt.pt", "ckpt_prev.pt", "ckpt_best.pt", "config.yaml", "training_args.json",
            "train.log", "metrics.jsonl", "loss.svg"} <= names


def test_metrics_have_the_promised_keys_and_true_numbers(tmp_path, data_dir):
    train(config(data_dir, tmp_path, max_iters=6, vocab_size=300))
    lines = metrics(tmp_path)
    steps, evals = [m for m in lines if "loss" in m], [m for m in lines if "val_loss" in m]
    assert [m["iter"] for m in steps] == list(range(6)) and [m["iter"] for m in evals] == [0, 5, 6]
    assert {"iter", "tokens", "loss", "lr", "grad_norm", "time_ms", "tokens_per_sec",
            "mfu"} <= steps[0].keys()
    assert {"iter", "tokens", "val_loss", "val_ppl", "val_bpb"} <= evals[0].keys()
    assert abs(steps[0]["loss"] - math.log(300)) < 0.1
    assert steps[2]["tokens"] == 3 * 4 * 2 * 16 and steps[0]["mfu"] is None
    assert math.isclose(evals[0]["val_ppl"], math.exp(evals[0]["val_loss"]))
    assert steps[-1]["loss"] < steps[0]["loss"]


@pytest.mark.parametrize("changes", [{}, dict(optimizer="muon", dropout=0.2)])
def test_resume_is_exact(tmp_path, data_dir, changes):
    long = dict(max_iters=16, dropout=0.1, gradient_accumulation_steps=3,
                eval_interval=4) | changes
    train(config(data_dir, tmp_path / "a", **long))
    short = dict(lr_decay_iters=16)
    train(config(data_dir, tmp_path / "b", **long | short | dict(max_iters=7)))
    train(config(data_dir, tmp_path / "b", **long | short))
    assert same_tensors(tmp_path / "a", tmp_path / "b")
    a, b = ([(m["iter"], m["loss"]) for m in metrics(tmp_path / d) if "loss" in m] for d in "ab")
    assert a == b and len(a) == 16


def test_evaluating_more_often_changes_no_batch(tmp_path, data_dir):
    for name, every in (("a", 20), ("b", 3)):
        train(config(data_dir, tmp_path / name, max_iters=20, dropout=0.1, eval_interval=every,
                     sample_tokens=8))
    assert same_tensors(tmp_path / "a", tmp_path / "b")


def test_the_logged_loss_is_the_mean_of_the_global_batch(tmp_path, data_dir):
    """One batch of 8, and 4 accumulated micro-batches of 2: the same sequences, the same loss."""
    for name, b, n in (("a", 8, 1), ("b", 2, 4)):
        train(config(data_dir, tmp_path / name, max_iters=5, batch_size=b,
                     gradient_accumulation_steps=n))
    a, b = ([m["loss"] for m in metrics(tmp_path / d) if "loss" in m] for d in "ab")
    assert a == pytest.approx(b, rel=1e-5)


def test_the_train_loss_of_an_evaluation_is_the_mean_since_the_one_before(tmp_path, data_dir):
    train(config(data_dir, tmp_path, eval_on_start=False))
    losses = [m["loss"] for m in metrics(tmp_path) if "loss" in m]
    told = [m.get("train_loss") for m in metrics(tmp_path) if "val_loss" in m]
    assert told == [pytest.approx(sum(losses[:5]) / 5), pytest.approx(sum(losses[5:]) / 5)]


def test_dropout_differs_from_step_to_step(tmp_path, data_dir, monkeypatch):
    """and is the same again in the same step of another run"""
    masks, dropout = [], F.dropout

    def noted(x, p, training):
        out = dropout(x, p, training)
        if training and p:
            masks.append((out == 0).numpy().tobytes())
        return out
    monkeypatch.setattr(F, "dropout", noted)
    for name in "ab":
        train(config(data_dir, tmp_path / name, max_iters=4, dropout=0.5, eval_interval=0))
    half = len(masks) // 2
    assert half >= 8 and masks[:half] == masks[half:] and len(set(masks)) == half


def test_a_finished_run_says_so_and_a_longer_one_continues(tmp_path, data_dir):
    first = train(config(data_dir, tmp_path, max_iters=4))
    again = train(config(data_dir, tmp_path, max_iters=4))
    assert first["iter_num"] == again["iter_num"] == 4
    (tmp_path / "metrics.jsonl").unlink()
    assert train(config(data_dir, tmp_path, max_iters=4))["test"] == first["test"] == {}
    assert train(config(data_dir, tmp_path, max_iters=6))["iter_num"] == 6


@pytest.mark.parametrize("batch_size, steps, ranks, expected", [
    (4, 2, 1, 4), (4, 3, 2, 3), (4, 7, 4, 1), (4, 1, 2, 2), (16, 4, 8, 8)])
def test_micro_batch_divides_the_share(batch_size, steps, ranks, expected):
    c = load_config(None, dict(batch_size=batch_size, gradient_accumulation_steps=steps))
    assert c.micro_batch(ranks) == expected


def test_compile_failure_falls_back_to_eager(tmp_path, data_dir):
    code, out = run(*tiny_args(compile="true", max_iters=2, vocab_size=256, data_dir=data_dir,
                               out_dir=tmp_path),
                    env={"CXX": "/nonexistent", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "i")})
    assert code == 0 and "torch.compile failed; continuing without it" in out, out


@pytest.mark.skipif(not (SHARED / "tinyshakespeare.txt").exists(), reason="no tinyshakespeare.txt")
def test_shakespeare_characters_are_learned(tmp_path):
    """prepare, train, sample: the three commands of the README, on real text."""
    done = python("-m", "data.prepare", SHARED / "tinyshakespeare.txt", "--tokenizer", "char",
                  "--out", tmp_path / "d")
    assert done.returncode == 0 and "1,003,854" in done.stdout, done.stderr
    code, out = run(*tiny_args(n_embd=64, n_hidden=256, block_size=64, batch_size=8, max_iters=150,
                               gradient_accumulation_steps=1, eval_interval=150, optimizer="muon",
                               qk_norm=True),
                    "--data_dir", tmp_path / "d", "--out_dir", tmp_path / "o")
    assert code == 0
    assert metrics(tmp_path / "o")[-1]["val_loss"] < 2.6
    done = python("-m", "model.sample", "--ckpt", tmp_path / "o/ckpt.pt", "--prompt", "ROMEO:",
                  "--max_new_tokens", 100, "--seed", 1)
    assert done.returncode == 0 and done.stdout.startswith("ROMEO:") and len(done.stdout) > 90


def test_slow_input_is_noticed_and_named(tmp_path, data_dir, monkeypatch, capsys):
    from train.dataloader import DataLoader
    get_batch = DataLoader.get_batch
    monkeypatch.setattr(DataLoader, "get_batch", lambda *a: (time.sleep(0.6), get_batch(*a))[1])
    train(config(data_dir, tmp_path, max_iters=1, eval_interval=0))
    assert "of the time is spent reading batches" in capsys.readouterr().out
