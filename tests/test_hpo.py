"""python -m train.hpo: the search on real Optuna studies, its stages, workers and failures."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from conftest import REPO, tiny_args

import run_train
from train import hpo, hpo_space
from train.config import ConfigError, load_config
from train.hpo_space import Stage, narrowed, parse_dimension, read_space

needs_optuna = pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="no optuna")
SPACE = "learning_rate: {low: 1e-4, high: 1e-1, log: true}\nn_layer: [1, 2]\n"


@pytest.fixture
def search(tmp_path, data_dir):
    """search(space text, arguments..., key=value...) as python -m train.hpo would do it: its exit
    code, and the trials of trials_history.json."""
    def go(space, *args, **changes):
        (tmp_path / "space.yaml").write_text(space)
        code = hpo.main(arguments(tmp_path, data_dir, *args, **changes))
        history = tmp_path / "hpo/trials_history.json"
        return code, json.loads(history.read_text()) if history.exists() else []
    return go


def arguments(tmp_path, data_dir, *args, **changes):
    small = dict(n_layer=1, n_embd=16, n_hidden=32, vocab_size=256, max_iters=8, eval_interval=2,
                 eval_iters=1, log_interval=10)
    return ["--space", str(tmp_path / "space.yaml"), "--out", str(tmp_path / "hpo"), *args,
            *tiny_args(**small | dict(data_dir=data_dir, out_dir=tmp_path / "unused") | changes)]


# -----------------------------------------------------------------------------
# the space

def test_problems_of_a_space_are_told_all_at_once(tmp_path):
    (tmp_path / "s.yaml").write_text(
        "learning_rat: {low: 1, high: 2}\nlearning_rate: {low: 1e-2, high: 1e-4}\n"
        "n_layer: {low: 1, high: 2.5}\nout_dir: [a, b]\noptimizer: [adamw, sgd]\n"
        "beta1: {low: 0.0, high: 0.9, log: true}\nbias: {low: false, high: true}\n"
        "n_head: {low: 1, high: 4, step: 9}\ndropout: 0.1\nseed: [1, 1]\n"
        "weight_decay: {low: 0, hihg: 1}\nstages: [{trials: 0}]\n")
    with pytest.raises(ConfigError) as error:
        read_space(tmp_path / "s.yaml")
    problems = error.value.problems
    assert len(problems) == 12
    for line, words in enumerate(["not a key", "must be below", "whole number", "not a key",
                                  "adamw, muon", "low above 0", "list what to try", "step within",
                                  "expected {low, high", "different choices", "expected {low, high",
                                  "out of range"], 1):
        assert f"s.yaml:{line}: " in problems[line - 1] and words in problems[line - 1], problems


@pytest.mark.parametrize("stages, words", [
    ("[{trials: 2, max_iter: 5}]", "got"), ("[{trials: two}]", "two"), ("5", "got"),
    ("[{trials: 2, narrow: 0.5}]", "nothing to narrow"), ("[", "expected a list"),
    ("[{trials: 2}, {trials: 1, narrow: 2}]", "out of range")])
def test_problems_of_stages(tmp_path, stages, words):
    (tmp_path / "s.yaml").write_text(SPACE)
    with pytest.raises(ConfigError, match=f"--stages: stages: .*{words}"):
        read_space(tmp_path / "s.yaml", stages)


def test_stages_come_from_the_file_or_the_command_line(tmp_path):
    (tmp_path / "s.yaml").write_text(SPACE + "stages: [{trials: 3, max_iters: 5}]")
    assert read_space(tmp_path / "s.yaml")[1] == [Stage(3, 5)]
    assert read_space(tmp_path / "s.yaml", "[{trials: 2}, {trials: 1, narrow: 0.1}]")[1] == [
        Stage(2), Stage(1, None, 0.1)]
    assert read_space(tmp_path / "s.yaml", None, "7")[1] == [Stage(7)]
    (tmp_path / "s.yaml").write_text("max_iters: [5, 10]\nstages: [{trials: 3, max_iters: 5}]")
    with pytest.raises(ConfigError, match="both searched and set"):
        read_space(tmp_path / "s.yaml")


def test_dimensions():
    assert parse_dimension("n_layer", dict(low="1", high="8", step="3")) == dict(
        low=1, high=7, step=3, log=False)
    assert parse_dimension("lr_groups", [{}, {"wte": "0.5"}]) == ["{}", '{"wte": 0.5}']
    assert parse_dimension("n_kv_head", ["null", "2"]) == [None, 2]
    assert read_space(REPO / "train/hpo_example.yaml")[1][1].narrow == 0.3


def test_narrowing_stays_inside_and_around_the_best():
    log = dict(low=1e-4, high=1.0, step=None, log=True)
    got = narrowed(log, 1e-2, 0.5, [])
    assert got["low"] == pytest.approx(1e-3) and got["high"] == pytest.approx(1e-1)
    assert narrowed(log, 1.0, 0.5, [])["high"] == 1.0
    assert narrowed(dict(low=0, high=100, step=10, log=False), 90, 0.4, []) == dict(
        low=70, high=100, step=10, log=False)
    assert narrowed(dict(low=1, high=9, step=None, log=False), 5, 0.01, [])["low"] == 5
    assert narrowed(["a", "b", "c"], "b", 0.5, [("a", 3), ("b", 1), ("a", 2)]) == ["b", "a"]


# -----------------------------------------------------------------------------
# the search

def test_optuna_missing_is_one_line_before_any_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.chdir(tmp_path)
    assert hpo.main(["--space", "missing.yaml", "--config", "missing.yaml"]) == 2
    assert capsys.readouterr().err == "train.hpo needs the package optuna: pip install optuna\n"
    assert not list(tmp_path.iterdir())


@needs_optuna
def test_search_finds_narrows_and_retrains(search, tmp_path, capsys):
    code, trials = search(SPACE + "stages: [{trials: 4, max_iters: 4}, {trials: 3, narrow: 0.2}]",
                          warmup_iters=4)
    assert code == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"^stage [12], trial \d: ", out, re.M)) == 7 and "iter " not in out
    assert [t["trial"] for t in trials] == list(range(7))
    assert [t["stage"] for t in trials] == [1] * 4 + [2] * 3
    assert trials[0]["params"] == dict(learning_rate=0.01, n_layer=1)  # as configured
    first = min(trials[:4], key=lambda t: t["value"])
    assert trials[4]["params"] == first["params"]
    rates = [t["params"]["learning_rate"] for t in trials[4:]]
    assert max(rates) / min(rates) <= 1e3 ** 0.2 * 1.001 and len(set(rates)) == 3
    assert {t["params"]["n_layer"] for t in trials[4:]} == {first["params"]["n_layer"]}
    short = load_config(tmp_path / "hpo/trial_0/config.yaml")
    assert (short.max_iters, short.warmup_iters, short.eval_interval) == (4, 2, 1)
    assert not list(tmp_path.glob("hpo/trial_*/ckpt*")) and not (tmp_path / "unused").exists()
    texts = [e.text for e in ET.parse(tmp_path / "hpo/trials.svg").getroot().iter()]
    assert {"stage 1", "stage 2", "val_loss"} <= set(texts)
    best = min((t for t in trials[4:] if t["state"] == "complete"), key=lambda t: t["value"])
    assert f"Best: trial {best['trial']}, val_loss {best['value']:.4f}" in out
    # The last stage had full length: training with the best configuration gives the same number.
    config = str(tmp_path / "hpo/best_config.yaml")
    assert run_train.main(["--config", config]) == 0
    lines = (tmp_path / "hpo/best/metrics.jsonl").read_text().splitlines()
    assert min(json.loads(x).get("val_loss", 99) for x in lines) == best["value"]


@needs_optuna
def test_search_goes_on_and_takes_no_other_space(search, capsys):
    code, three = search(SPACE, "--n_trials=3")
    assert code == 0 and len(three) == 3
    code, five = search(SPACE, "--n_trials=5")
    assert code == 0 and len(five) == 5 and five[:3] == three
    assert len({json.dumps(t["params"]) for t in five}) == 5
    assert search(SPACE, "--n_trials=5")[1] == five
    for space, changes, name in ((SPACE.replace("1e-4", "1e-5"), {}, "space"),
                                 (SPACE, dict(weight_decay=0.3), "weight_decay"),
                                 (SPACE, dict(max_iters=9), "max_iters")):
        capsys.readouterr()
        assert search(space, "--n_trials=5", **changes)[0] == 2
        assert f"holds a search with another {name};" in capsys.readouterr().err


@needs_optuna
def test_two_workers_share_the_trials(tmp_path, data_dir):
    (tmp_path / "space.yaml").write_text(SPACE + "stages: [{trials: 5}, {trials: 2}]")
    command = [sys.executable, "-m", "train.hpo", *arguments(tmp_path, data_dir)]
    workers = [subprocess.Popen(command, cwd=REPO, text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT) for _ in range(2)]
    outs = [w.communicate(timeout=100)[0] for w in workers]
    assert [w.returncode for w in workers] == [0, 0], outs
    trials = json.loads((tmp_path / "hpo/trials_history.json").read_text())
    assert [t["stage"] for t in trials] == [1] * 5 + [2] * 2
    assert len({json.dumps(t["params"]) for t in trials[:5]}) == 5
    assert sum(len(re.findall(r"^stage ", out, re.M)) for out in outs) == 7
    assert outs[0][-120:] == outs[1][-120:]


@needs_optuna
def test_hopeless_trials_are_pruned_and_bad_ones_do_not_end_the_search(search, monkeypatch):
    from train import hpo_worker
    train, calls = hpo_worker.train, []

    def fragile(config, on_evaluation):
        calls.append(config)
        if len(calls) == 2:
            monkeypatch.setenv("FAULT", "bad_loss@3=nan")
        if len(calls) == 3:
            monkeypatch.setenv("FAULT", "before_opt@1=raise")
        try:
            return train(config, on_evaluation)
        finally:
            monkeypatch.delenv("FAULT", raising=False)
    monkeypatch.setattr(hpo_worker, "train", fragile)
    code, trials = search("learning_rate: {low: 1e-6, high: 3e-2, log: true}\nn_head: [2, 3]\n",
                          "--n_trials=13")
    assert code == 0 and len(trials) == 13
    refused = [t for t in trials if t["error"] and "n_embd (16) must be a multiple" in t["error"]]
    assert refused and {t["params"]["n_head"] for t in refused} == {3}
    assert {t["state"] for t in refused} == {"pruned"}
    bad = [t for t in trials if t["error"] and "not finite" in t["error"]]
    assert len(bad) == 1 and bad[0]["state"] == "pruned"
    failed = [t for t in trials if t["state"] == "fail"]
    assert [t["error"] for t in failed] == ["RuntimeError: fault at before_opt"]
    pruned = [t for t in trials if t["state"] == "pruned" and not t["error"]]
    done = [t for t in trials if t["state"] == "complete"]
    assert pruned and all(len(t["evaluations"]) < 4 for t in pruned)
    assert done and all(len(t["evaluations"]) == 4 for t in done)
    assert max(t["value"] for t in pruned) > min(t["value"] for t in done)


@needs_optuna
def test_when_no_trial_finishes_one_message_says_so(search, capsys):
    code, trials = search("n_head: [3, 5]\n", "--n_trials=2")
    assert code == 2 and [t["state"] for t in trials] == ["pruned"] * 2
    assert "no trial of stage 1 finished" in capsys.readouterr().err


@needs_optuna
def test_min_lr_follows_the_learning_rate(search, tmp_path):
    code, trials = search("learning_rate: {low: 1e-4, high: 1e-1, log: true}", "--n_trials=2",
                          min_lr=1e-3)
    config = load_config(tmp_path / "hpo/trial_1/config.yaml")
    assert config.learning_rate == trials[1]["params"]["learning_rate"] != 0.01
    assert config.min_lr == pytest.approx(config.learning_rate / 10)


@needs_optuna
def test_interrupted_and_killed_trials_are_done_again(search, tmp_path, monkeypatch):
    from train import hpo_worker
    from train.guard import Stopped
    train, calls = hpo_worker.train, []

    def stop_at_second(config, on_evaluation):
        calls.append(config)
        if len(calls) == 2:
            raise Stopped(15)
        return train(config, on_evaluation)
    monkeypatch.setattr(hpo_worker, "train", stop_at_second)
    code, trials = search(SPACE, "--n_trials=3")
    assert code == 143 and len(trials) == 1
    # A worker that dies in a trial leaves it running in the study, and its lock free.
    config = load_config(tmp_path / "hpo/best_config.yaml")
    config = load_config(None, vars(config) | dict(out_dir=str(tmp_path / "unused")))
    worker = hpo_worker.Worker(config, *_space(tmp_path), str(tmp_path / "hpo"))
    trial, _, lock = worker.ask()
    lock.close()
    assert worker.study.trials[trial.number].state.name == "RUNNING"
    code, trials = search(SPACE, "--n_trials=3")
    assert code == 0
    assert [t["state"] for t in trials] == ["complete", "fail", "fail", "complete", "complete"]
    assert [t["seconds"] is None for t in trials] == [False, True, True, False, False]


def _space(tmp_path):
    space, stages = hpo_space.read_space(tmp_path / "space.yaml", None, "3")
    return space, 1, stages[0]


@needs_optuna
def test_maximising_another_number(search, capsys):
    code, trials = search(SPACE, "--n_trials=3", early_stopping_metric="val_ppl",
                          early_stopping_mode="max")
    assert code == 0
    assert all(t["value"] == max(v for _, v in t["evaluations"]) for t in trials)
    assert f"val_ppl {max(t['value'] for t in trials):.4f}, " in capsys.readouterr().out


@needs_optuna
@pytest.mark.parametrize("args, env, words", [
    (["--eval_interval=0"], {}, "needs evaluations"),
    (["--max_epochs=1", "--stages=[{trials: 1, max_iters: 2}]"], {}, "max_epochs"),
    ([], {"WORLD_SIZE": "2"}, "without torchrun"),
    (["--data_dir=nowhere"], {}, "nowhere"), (["--early_stopping_metric=val_acc"], {}, "val_acc"),
    (["--leraning_rate=1"], {}, "did you mean 'learning_rate'")])
def test_bad_input_ends_with_one_message(tmp_path, data_dir, monkeypatch, capsys, args, env, words):
    (tmp_path / "space.yaml").write_text(SPACE)
    for name, value in env.items():
        monkeypatch.setitem(os.environ, name, value)
    assert hpo.main([*arguments(tmp_path, data_dir), *args]) == 2
    err = capsys.readouterr().err
    assert words in err and "Traceback" not in err
