"""python -m train.tools.chain: models that learn from those before them, and a student of all."""


import pytest
import torch
from conftest import TINY
from runs import planted_children

from model.core.load import load_model
from train.options.loss_svg import read_metrics
from train.tools import chain


@pytest.fixture
def go(data_dir, tmp_path, monkeypatch):
    """go(arguments...): the exit code and the text of the command; go.started: its runs."""
    started = planted_children(monkeypatch)
    keys = [f"--{name}={value}" for name, value in TINY.items()] + [f"--data_dir={data_dir}"]

    def run(*args):
        return chain.main([*keys, "--seed=5", "--out", str(tmp_path / "chain"), *args])
    run.started = started
    yield run


def last(folder, name):
    return read_metrics(folder / "metrics.jsonl")[-1][name]


def ensemble_loss(paths, data_dir):
    """The mean cross-entropy of the models' mean distribution on the validation batches."""
    from train.dataloader import DataLoader
    models = [load_model(path)[0].float().eval() for path in paths]
    loader = DataLoader(data_dir, TINY["batch_size"], TINY["block_size"], split="val")
    total, count = 0.0, 0
    for i in range(loader.n_fixed(TINY["eval_iters"])):
        x, y = loader.fixed_batch(i, TINY["eval_iters"], "cpu")
        with torch.no_grad():
            p = sum(torch.softmax(model(x).double(), -1) for model in models) / len(models)
        total -= p.gather(-1, y[..., None]).log().sum().item()
        count += y.numel()
    return total / count


def test_each_model_learns_from_those_before_it_and_the_student_from_all(
        go, data_dir, tmp_path, capsys):
    assert go("--models", "2") == 0
    first, second, student = (
        next((tmp_path / "chain").glob(f"{name}_*")) for name in ("model_1", "model_2", "student"))
    out = capsys.readouterr().out
    one, two = (f"{folder}/ckpt.pt" for folder in (first, second))
    assert [f"--teacher={one}" in args for args in go.started] == [False, True, False]
    assert f"--teacher={one},{two}" in go.started[2]
    assert [f"--seed={n}" in args for n, args in zip((5, 6, 7), go.started)] == [True] * 3
    assert last(second, "val_teacher_loss") == pytest.approx(last(first, "val_loss"), abs=2e-5)
    expected = ensemble_loss([one, two], data_dir)
    assert last(student, "val_teacher_loss") == pytest.approx(expected, abs=2e-5)
    assert expected < max(last(first, "val_loss"), last(second, "val_loss"))
    assert f"{expected:.4f}" in out and f"{last(student, 'val_loss'):.4f}" in out

    go("--models", "2")  # complete
    assert len(go.started) == 3


def test_a_crashed_model_teaches_nobody_and_is_tried_again(go, capsys):
    assert go("--models", "2", "--init_from=nothing.pt") == 1
    assert len(go.started) == 3 and not any("--teacher" in " ".join(a) for a in go.started)
    assert capsys.readouterr().out.splitlines()[-1].split()[-2:] == ["-", "-"]


@pytest.mark.parametrize("args, message", [
    (["--models", "9"], "models"), (["--model=chat"], "model: gpt"),
    (["--eval_interval=0"], "eval_interval")])
def test_what_cannot_be_is_refused_before_any_work(go, args, message, capsys):
    assert go(*args) == 2 and not go.started
    assert message in capsys.readouterr().err
