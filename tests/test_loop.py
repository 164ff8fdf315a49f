"""The loop against a plain one: weights, numbers and moments of a run, computed a second way."""

import io
import math
import os
import sys
import threading

import numpy as np
import pytest
import torch
from runs import configure, go, metrics, opened, tensors

from model.gpt import GPT, GPTConfig
from train import device as compiling
from train import train as loop
from train.base import run_folder
from train.base.errors import CheckpointError
from train.checkpoint import load_checkpoint, save_checkpoint
from train.dataloader import DataLoader
from train.logger import Clock, Logger
from train.train import train

SHAPE = dict(n_layer=1, n_head=2, n_embd=16, n_hidden=32, block_size=8, vocab_size=256)


@pytest.fixture
def run(data_dir, tmp_path, monkeypatch):
    """run(**changes) trains in tmp_path, half a second a step: (result, what the log was told)."""
    told = []

    def noted(name):
        real = getattr(Logger, name)

        def method(log, *args, **kwargs):
            told.append((name, *args, *kwargs.values()))
            return real(log, *args, **kwargs)
        monkeypatch.setattr(Logger, name, method)
    for name in ("step", "evaluation", "samples"):
        noted(name)
    monkeypatch.setattr(Clock, "lap", lambda clock, it, batches, warn: 0.5)
    out = tmp_path / "o"

    def start(**changes):
        told.clear()
        return train(configure(data_dir, out, **changes)), told
    start.out = out
    return start


def test_a_usual_step_ends_a_row_of_spikes_and_overflows(data_dir, tmp_path):
    with opened(configure(data_dir, tmp_path)) as run:
        run.progress.spikes_in_a_row = run.progress.overflows_in_a_row = 2
        loop.train_step(run)
        assert run.progress.spikes_in_a_row == run.progress.overflows_in_a_row == 0


def test_an_evaluation_finds_no_gradients(data_dir, tmp_path):
    """They would need as much memory as the weights."""
    model = GPT(GPTConfig(**SHAPE))
    found = []
    train(configure(data_dir, tmp_path, max_iters=4, eval_interval=2), model=model,
          on_evaluation=lambda *_: found.append([p.grad for p in model.parameters()]))
    assert len(found) == 3 and not any(g is not None for grads in found for g in grads)


def plain_run(data_dir, steps, batch, accumulation, clip=1.0, betas=(0.9, 0.95), eps=1e-8,
              decay=0.1, seed=1337):
    """([loss, gradient norm] of each step, weights) of the same run in PyTorch alone. The learning
    rate of SMALL: warm-up 2, then a cosine from 0.01 to 0.001 at step 20."""
    model, loader = GPT(GPTConfig(**SHAPE), seed), DataLoader(data_dir, batch, 8, seed=seed)
    optimizer = torch.optim.AdamW([
        dict(params=[p for p in model.parameters() if p.dim() > 1], weight_decay=decay),
        dict(params=[p for p in model.parameters() if p.dim() == 1], weight_decay=0.0)],
        betas=betas, eps=eps)
    numbers = []
    for it in range(steps):
        rate = 0.01 * (it + 1) / 3 if it < 2 else (
            0.001 + 0.009 * (1 + math.cos(math.pi * (it - 2) / 18)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        parts = [loader.get_batch(step=it * accumulation + i) for i in range(accumulation)]
        x, y = (torch.cat(part) for part in zip(*parts))
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        numbers.append([float(loss), float(norm)])
    return np.array(numbers), model.state_dict()


@pytest.mark.parametrize("keys", [
    dict(batch=2, accumulation=2), dict(batch=3, accumulation=1, seed=5, decay=0.9),
    dict(batch=1, accumulation=3, clip=0.05, betas=(0.5, 0.6), eps=1e-3)], ids=str)
def test_weights_and_numbers_are_those_of_a_plain_loop(run, data_dir, keys):
    numbers, weights = plain_run(data_dir, 6, **keys)
    names = dict(batch="batch_size", accumulation="gradient_accumulation_steps", clip="grad_clip",
                 eps="adam_eps", decay="weight_decay")
    settings = {names.get(k, k): v for k, v in keys.items() if k != "betas"}
    if "betas" in keys:
        settings |= dict(beta1=keys["betas"][0], beta2=keys["betas"][1])
    run(**settings, max_iters=6, eval_interval=0)
    told = [[m["loss"], m["grad_norm"]] for m in metrics(run.out)]
    np.testing.assert_allclose(told, numbers, rtol=1e-4)
    ours = tensors(run.out / "ckpt.pt")[0]
    for name, value in weights.items():
        torch.testing.assert_close(ours[f"model.{name}"], value, rtol=1e-3, atol=2e-5, msg=name)


def test_without_a_clip_or_with_groups_only_that_differs(run, data_dir):
    numbers, _ = plain_run(data_dir, 3, 2, 2, clip=1e9)
    run(max_iters=3, eval_interval=0, grad_clip=0)
    np.testing.assert_allclose([m["grad_norm"] for m in metrics(run.out)], numbers[:, 1], rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_are_in_the_dtype_of_the_run(run, dtype):
    """in training and in evaluation"""
    seen = set()
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda m, _, y: isinstance(m, torch.nn.Linear) and seen.add((m.training, y.dtype)) or None)
    try:
        run(dtype=dtype, max_iters=1)
    finally:
        hook.remove()
    assert seen == {(mode, getattr(torch, dtype)) for mode in (True, False)}


def test_on_a_cpu_neither_the_first_step_nor_evaluations_are_compiled(run, monkeypatch):
    """Compiling takes a minute, and would be done anew for a smaller last batch."""
    seen, forward = [], GPT.forward

    def noted(model, *args):
        seen.append((model.training, torch._dynamo.eval_frame._stance.stance))
        return forward(model, *args)
    monkeypatch.setattr(GPT, "forward", noted)
    monkeypatch.setattr(compiling, "compile_model", lambda model, device: [])
    run(max_iters=2, eval_iters=1, compile="true")
    assert seen == [(False, "force_eager"), *[(True, "force_eager")] * 2, *[(True, "default")] * 2,
                    (False, "force_eager")]


def test_every_number_that_the_log_is_told(run):
    """Steps of 4 samples of 8 tokens each, 0.5 s a step."""
    _, told = run(max_iters=11, eval_interval=4, log_interval=3)
    steps = [record for name, record, *_ in told if name == "step"]
    assert [r["iter"] for r in steps] == [0, 3, 6, 9, 10]  # and the last
    for r in steps:
        it = r["iter"]
        assert (r["tokens"], r["max_iters"], r["unit"]) == ((it + 1) * 32, 11, "tok")
        assert (r["time_ms"], r["tokens_per_sec"]) == (500, 64)
        assert (10 - it) * 0.5 <= r["eta_s"] < (10 - it) * 1.0 or it == 10  # with evaluations
        assert r["mfu"] is None and r["memory_mib"] > 50
    losses = plain_losses(run, 11)
    evaluations = [r for name, r, *_ in told if name == "evaluation"]
    assert [(r["iter"], r["tokens"]) for r in evaluations] == [
        (0, 0), (4, 128), (8, 256), (11, 352)]
    means = [r["train_loss"] for r in evaluations]
    assert means[0] is None and means[1:] == pytest.approx(
        [np.mean(losses[a:b]) for a, b in ((0, 4), (4, 8), (8, 11))], rel=1e-5)
    assert not {"epoch", "lr"} & set(evaluations[1])


def test_a_step_stays_in_few_files(data_dir, tmp_path, monkeypatch):
    """Whoever reads what a step does, logging included, opens these files."""
    files, step, top = set(), loop.train_step, os.path.dirname(os.path.dirname(loop.__file__))

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(top) and code.co_name[0] != "<":
            files.add(os.path.relpath(code.co_filename, top))

    def traced(run):
        sys.setprofile(note if run.progress.iter_num == 2 else None)
        try:
            return step(run)
        finally:
            sys.setprofile(None)
    monkeypatch.setattr(loop, "train_step", traced)
    train(configure(data_dir, tmp_path, max_iters=4))
    assert files == {"model/core/ops.py", "model/gpt.py", "train/base/console.py",
                     "train/dataloader.py", "train/evaluate.py", "train/logger.py",
                     "train/lr_scheduler.py", "train/train.py"}


def plain_losses(run, steps):
    """The loss of every step, as another run logs them."""
    data = torch.load(run.out / "ckpt.pt", weights_only=True)["config"]["data_dir"]
    return plain_run(data, steps, 2, 2)[0][:, 0]


def test_lengths_in_epochs_are_told_in_epochs(run):
    """20,000 tokens: 2,498 windows of 8, 4 a step. An evaluation has the number of the period that
    ends, which the step before it may exceed, and the learning rate of that step."""
    result, told = run(max_epochs=0.0128, eval_epochs=0.0064, lr_decay_iters=None)
    assert result["iter_num"] == 8  # 31.97 samples, rounded up to whole steps
    records = [r for name, r, *_ in told if name == "evaluation"]
    assert [r["iter"] for r in records] == [0, 4, 8]
    assert [r["epoch"] for r in records] == pytest.approx([0, 0.0064, 0.0128])
    assert [r["lr"] for r in records] == pytest.approx(
        [0.01 / 3, *(0.001 + 0.009 * (1 + math.cos(math.pi * x)) / 2 for x in (1 / 6, 5 / 6))])
    assert result["history"] == records


def test_a_step_of_several_epochs_ends_at_max_epochs(run):
    _, told = run(max_epochs=0.001, eval_epochs=0.0005, lr_decay_iters=None)
    assert [r["epoch"] for name, r, *_ in told if name == "evaluation"] == [0, 0.001]


@pytest.mark.parametrize("changes, evaluated, saved", [
    ({}, [0, 5, 10, 12], [5, 10, 12]), (dict(eval_on_start=False), [5, 10, 12], [5, 10, 12]),
    (dict(save_interval=4), [0, 5, 10, 12], [4, 8, 12]),
    (dict(save_interval=0, eval_interval=0), [], [12]),
    (dict(eval_interval=0, save_interval=6), [], [6, 12]), (dict(max_iters=0), [0], [0]),
    (dict(max_iters=0, eval_on_start=False), [0], [0])], ids=str)
def test_when_a_run_evaluates_and_saves(run, monkeypatch, changes, evaluated, saved):
    """With an evaluation that never gets better: a best one is saved as well."""
    saves = []
    real = loop.save

    def save(run, last=False):
        saves.append((run.progress.iter_num, last))
        return real(run, last)
    monkeypatch.setattr(loop, "save", save)
    worse = iter(range(1, 99))
    monkeypatch.setattr(loop, "evaluate_loader",
                        lambda *args, **how: dict(val_loss=float(next(worse))))
    _, told = run(max_iters=changes.get("max_iters", 12), keep_last=99,
                  **{k: v for k, v in changes.items() if k != "max_iters"})
    assert [r["iter"] for name, r, *_ in told if name == "evaluation"] == evaluated
    best = {it for it in evaluated if it}  # the first one after the start is the best there is
    wanted = sorted({*saved, *sorted(best)[:1]})
    assert saves == [(it, it == wanted[-1]) for it in wanted]


def test_what_the_result_says(run):
    result, _ = run(max_iters=9, eval_interval=3, learning_rate=0.3, lr_schedule="constant")
    losses = [r["val_loss"] for r in result["history"]]
    assert (result["iter_num"], result["val_loss"], result["best_val_loss"]) == (
        9, losses[-1], min(losses))
    assert result["finished"] == "max_iters 9 reached" and result["test"] == {}
    best = torch.load(run.out / "ckpt_best.pt", weights_only=True)
    trained = losses[1:]
    assert best["iter_num"] == 3 * (trained.index(min(trained)) + 1)


@pytest.mark.parametrize("fails_at", [None, 2])
def test_the_best_checkpoint_is_the_best_that_was_written(run, monkeypatch, fails_at):
    """a disk that is full at the best step -> the next better than the file replaces it"""
    losses = {0: 5.6, 1: 5.0, 2: 4.0, 3: 4.5, 4: 4.4, 5: 4.6}
    real, save = loop.evaluate_validation, run_folder.save_checkpoint
    monkeypatch.setattr(loop, "evaluate_validation", lambda run, n: real(run, n) | dict(
        val_loss=losses[run.progress.iter_num]))

    def fragile(path, state, links=()):
        if state["iter_num"] == fails_at:
            raise CheckpointError("No space left on device")
        save(path, state, links)
    monkeypatch.setattr(run_folder, "save_checkpoint", fragile)
    run(max_iters=5, eval_interval=1)
    best = load_checkpoint(run.out / "ckpt_best.pt")["iter_num"]
    assert best == (2 if fails_at is None else 4)


def test_another_metric_starts_without_a_best_value(run):
    """val_ppl of every evaluation is above the best val_loss: it could never be better."""
    keys = dict(eval_interval=2, early_stopping_patience=2)
    run(max_iters=4, **keys)
    result, _ = run(max_iters=10, early_stopping_metric="val_ppl",
                    allow_change=["early_stopping_metric"], **keys)
    assert result["finished"] == "max_iters 10 reached"
    assert load_checkpoint(run.out / "ckpt_best.pt")["iter_num"] > 4


def test_epochs_between_evaluations_are_enough_to_evaluate(run):
    result, _ = run(max_iters=3, eval_interval=0, eval_epochs=1e-9)
    assert [r["iter"] for r in result["history"]] == [0, 1, 2, 3]


def test_samples_come_with_evaluations_but_for_the_first(run, data_dir):
    _, told = run(max_iters=7, eval_interval=3, sample_tokens=5, tokenizer="byte", vocab_size=257)
    assert [(call[1], call[-1]) for call in told if call[0] == "samples"] == [
        (3, False), (6, False), (7, True)]


@pytest.mark.parametrize("init, stopped_at", [("scratch", 6), ("given", 4), ("new head", 6)])
def test_early_stopping_does_not_count_untrained_weights(init, stopped_at, run, tmp_path):
    """Nothing is an improvement: the first evaluation that counts is the best, two more stop."""
    changes = dict(eval_interval=2, early_stopping_patience=2, early_stopping_min_delta=99.0,
                   eval_on_start=True, max_iters=20)
    if init != "scratch":
        run(max_iters=2)
        state = load_checkpoint(run.out / "ckpt.pt")
        if init == "new head":
            state["model"].popitem()
        save_checkpoint(tmp_path / "given.pt", state)
        changes["init_from"] = str(tmp_path / "given.pt")
    last, _ = run(resume="never", **changes)
    assert last["iter_num"] == stopped_at and "early stopping" in last["finished"]


def test_the_training_loss_is_the_mean_over_steps_in_which_items_count(data_dir, tmp_path):
    class Masked(torch.nn.Module):  # no item of the first four steps counts
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(1))
            self.calls = 0

        def forward(self, x, y):
            self.calls += 1
            count = torch.tensor(0 if self.calls <= 4 else x.numel())
            return self.w.sum() * 6 * bool(count), {"count": count}
    c = configure(data_dir, tmp_path, gradient_accumulation_steps=1, eval_on_start=False,
                  eval_interval=8, max_iters=8, learning_rate=1e-9)
    assert train(c, model=Masked())["history"][0]["train_loss"] == pytest.approx(6)


@pytest.mark.parametrize("stderr", [None, io.StringIO()])
def test_a_time_limit_without_a_file_as_stderr(data_dir, tmp_path, monkeypatch, stderr):
    monkeypatch.setattr(sys, "stderr", stderr)  # closed by the caller, or a notebook's
    assert go(data_dir, tmp_path, step_timeout=100)["finished"]


def test_the_time_limit_ends_with_the_run(data_dir, tmp_path):
    """A notebook that goes on after train() is not ended."""
    assert go(data_dir, tmp_path, step_timeout=100)["finished"]
    for thread in threading.enumerate():
        if "(watch)" in thread.name:  # Watchdog.watch
            thread.join(5)
            assert not thread.is_alive()
