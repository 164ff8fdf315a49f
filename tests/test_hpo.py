"""python -m train.tools.hpo: the search on Optuna studies, its stages, workers and failures."""

import gc
import itertools
import json
import os
import re
import shutil
import signal
import sqlite3
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import numpy as np
import pytest
import yaml
from browser import soon
from conftest import REPO, tiny_args
from faulty import faults
from processes import Fork, python, run_python

optuna = pytest.importorskip("optuna")

import run_train  # noqa: E402
from train.base.errors import CheckpointError, ConfigError, Stopped  # noqa: E402
from train.base.files import lock_folder  # noqa: E402
from train.base.keys import FIELDS  # noqa: E402
from train.config import load_config  # noqa: E402
from train.robust import on_signals  # noqa: E402
from train.tools import hpo  # noqa: E402

SPACE = "learning_rate: {low: 1e-4, high: 1e-1, log: true}\nn_layer: [1, 2]\n"


@pytest.fixture(scope="module", autouse=True)
def little_to_look_through():
    """A search collects garbage after each trial: not in what other tests have imported, which was
    a third of its time here."""
    gc.freeze()


@pytest.fixture
def search(tmp_path, data_dir):
    """search(space text, arguments..., key=value...) as python -m train.tools.hpo would do it: its
    exit code, and the trials of trials_history.json."""
    def go(space, *args, **changes):
        (tmp_path / "space.yaml").write_text(space)
        code = hpo.main(arguments(tmp_path, data_dir, *args, **changes))
        return code, history(tmp_path)
    return go


def history(tmp_path):
    path = tmp_path / "hpo/trials_history.json"
    return json.loads(path.read_text()) if path.exists() else []


def arguments(tmp_path, data_dir, *args, **changes):
    for stage in (x for x in args if isinstance(x, dict)):
        with open(tmp_path / "space.yaml", "a") as f:
            f.write(f"\nstages: [{json.dumps(stage)}]\n")
    args = [x for x in args if isinstance(x, str)]
    small = dict(n_layer=1, n_embd=16, n_hidden=32, vocab_size=256, max_iters=4, eval_interval=2,
                 eval_iters=1, log_interval=10)
    return ["--space", str(tmp_path / "space.yaml"), *args,
            *tiny_args(**small | dict(data_dir=data_dir, out_dir=tmp_path / "hpo") | changes)]


def trials(n):
    """A stage, added to the space, of n trials of full length."""
    return dict(trials=n)


# -----------------------------------------------------------------------------
# the space

def test_problems_of_a_space_are_told_all_at_once(search, capsys):
    assert search(
        "learning_rat: {low: 1, high: 2}\nlearning_rate: {low: 1e-2, high: 1e-4}\n"
        "n_layer: {low: 1, high: 2.5}\nout_dir: [a, b]\noptimizer: [adamw, sgd]\n"
        "beta1: {low: 0.0, high: 0.9, log: true}\nbias: {low: false, high: true}\n"
        "n_head: {low: 1, high: 4, step: x}\ndropout: 0.1\nn_kv_head: {low: null, high: 2}\n"
        "weight_decay: {low: 0, hihg: 1}\ngrad_clip: {low: 0, high: 1, lgo: true}\nseed: []\n"
        "stages: [{trials: 0}]\n") == (2, [])
    err = capsys.readouterr().err
    assert "14 problems" in err and "Traceback" not in err
    lines = err.splitlines()[1:]
    for n, words in enumerate([
            "not a key", "`low <= high`", "an integer, got '2.5'", "not a key", "adamw, muon",
            "log", "a list of choices", "'x'", "got 0.1", "NoneType", "hihg", "lgo",
            "one or more", "{trials: 12"], 1):
        assert words in lines[n - 1], (words, lines[n - 1])
        assert f"space.yaml:{n}: " in lines[n - 1]


@pytest.mark.parametrize("limits, words", [
    ("low: nan, high: 1", "expected a finite number, got 'nan'"),
    ("low: 1e-4, high: inf", "expected a finite number, got 'inf'"),
    ("low: -1e308, high: 1e308", "must be above 0"),
    ("low: 1e-3, high: 1e-2, step: nan", "expected a finite number, got 'nan'"),
    ("low: 1e-3, high: 1e-2, step: 1e-40", "DivisionImpossible")])
def test_limits_that_are_no_range_are_refused(search, capsys, limits, words):
    assert search(f"learning_rate: {{{limits}}}\n") == (2, [])
    message = capsys.readouterr().err
    assert "space.yaml:1: learning_rate: " in message and words in message


@pytest.mark.parametrize("stages", [
    "[{trials: 2, max_iter: 5}]", "[{trials: two}]", "5", "[{trials: 2, narrow: 2}]",
    "[{max_iters: 5}]", "[]", "{trials: 2}", "[{trials: 2, max_iters: -1}]"])
def test_problems_of_stages(search, capsys, stages):
    assert search(f"{SPACE}stages: {stages}") == (2, [])
    err = capsys.readouterr().err
    assert "space.yaml:3: stages: got" in err and "expected a list such as" in err


def test_the_example_is_a_space():
    space, stages = hpo.read_space(REPO / "train/configs/hpo_example.yaml", load_config())
    assert stages[1]["narrow"] == 0.3 and stages[0]["max_iters"] == 200
    assert space["learning_rate"] == optuna.distributions.FloatDistribution(1e-4, 1e-2, log=True)
    assert space["optimizer"].choices == ("adamw", "muon")
    values = hpo.read_dimension("lr_groups", [{}, {"wte": "0.5"}],
                                {f.name: f for f in fields(load_config())})
    assert values.choices == ({}, {"wte": 0.5})


def test_narrowing_stays_inside_and_around_the_best():
    ints, floats = optuna.distributions.IntDistribution, optuna.distributions.FloatDistribution
    got = hpo.narrow_dimension(floats(1e-4, 1.0, log=True), 1e-2, 0.5)
    assert got.low == pytest.approx(1e-3) and got.high == pytest.approx(1e-1) and got.log
    assert hpo.narrow_dimension(floats(1e-4, 1.0, log=True), 1.0, 0.5).high == 1.0
    assert hpo.narrow_dimension(ints(0, 100, step=10), 90, 0.4) == ints(60, 100, step=10)
    assert hpo.narrow_dimension(ints(1, 9), 5, 0.01) == ints(5, 5)
    assert hpo.narrow_dimension(ints(1, 64, log=True), 8, 0.5) == ints(3, 23, log=True)
    tried = hpo.trial_config(load_config("train/config_quick.yaml"), dict(n_layer=2))
    short = hpo.trial_config(load_config(None, dict(max_iters=1000, warmup_epochs=0.1,
                                                    eval_epochs=0.5)), {}, 100)
    assert short.warmup_epochs == pytest.approx(0.01) and short.eval_epochs == pytest.approx(0.05)
    # What a file says may give way to the shape of weights.
    assert [n for n in vars(tried) if tried.is_explicit(n)] == ["n_layer"]
    assert hpo.narrow_dimension(ints(1, 8), 4, 1.0) == ints(1, 8)
    for log, position, share in itertools.product((False, True), (0, 0.1, 0.5, 0.9, 1), (0.3, 1)):
        scale = np.geomspace if log else np.linspace
        best = float(scale(0.01, 0.5, 101)[round(100 * position)])
        got = hpo.narrow_dimension(floats(0.01, 0.5, log), best, share)
        # As many of the points of the range are in it as the share says.
        points = scale(0.01, 0.5, 10_001)
        inside = np.mean((points >= got.low) & (points <= got.high))
        assert inside == pytest.approx(share, abs=1e-3) and got.low <= best <= got.high
    tenths = floats(0.0, 0.2, step=0.05)  # 3 x 0.05 is 0.15000000000000002
    for best, ends in ((0.2, (0.15, 0.2)), (0.0, (0.0, 0.05)), (0.1, (0.05, 0.15))):
        got = hpo.narrow_dimension(tenths, best, 0.3)
        assert (got.low, got.high) == ends and not got.single()
    choices = optuna.distributions.CategoricalDistribution
    assert hpo.narrow_dimension(choices(["a", "b", "c"]), "b", 0.5).choices == ("b",)
    assert hpo.narrow_dimension(choices(["a", "b", "c"]), "b", 1.0).choices == ("a", "b", "c")


# -----------------------------------------------------------------------------
# the search

def test_optuna_missing_is_one_line_before_any_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.chdir(tmp_path)
    assert hpo.main(["--space", "missing.yaml"]) == 2
    assert capsys.readouterr().err == (
        "train.tools.hpo: the search needs the package optuna: pip install optuna\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.ci
def test_search_finds_narrows_and_retrains(search, tmp_path, capsys):
    code, found = search(SPACE + "stages: [{trials: 4, max_iters: 4}, {trials: 3, narrow: 0.2}]",
                         max_iters=8, warmup_iters=4)
    assert code == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"^stage_[12], trial \d: learning_rate", out, re.M)) == 7
    assert len(re.findall(r"^stage_[12], trial \d: (complete|pruned), ", out, re.M)) == 7
    assert "iter " not in out
    assert [(t["stage"], t["trial"]) for t in found] == [(1, i) for i in range(4)] + [
        (2, i) for i in range(3)]
    assert found[0]["params"] == dict(learning_rate=0.01, n_layer=1)  # as configured
    first = min(found[:4], key=lambda t: t["value"])
    assert found[4]["params"] == first["params"]
    rates = [t["params"]["learning_rate"] for t in found[4:]]
    assert max(rates) / min(rates) <= 1e3 ** 0.2 * 1.001 and len(set(rates)) == 3
    assert {t["params"]["n_layer"] for t in found[4:]} == {first["params"]["n_layer"]}
    short = load_config(tmp_path / "hpo/stage_1_trial_0/config.yaml")
    assert (short.max_iters, short.warmup_iters, short.eval_interval) == (4, 2, 1)
    assert not list(tmp_path.glob("hpo/*/ckpt*"))
    best = min((t for t in found[4:] if t["state"] == "complete"), key=lambda t: t["value"])
    assert f"Best: stage_2, trial {best['trial']}, val_loss {best['value']:.4f}" in out
    # The last stage had full length: training with the best configuration gives the same number.
    config = str(tmp_path / "hpo/best_config.yaml")
    assert run_train.main(["--config", config]) == 0
    lines = (tmp_path / "hpo/best/metrics.jsonl").read_text().splitlines()
    assert min(json.loads(x).get("val_loss", 99) for x in lines) == best["value"]
    # The file holds what the search changed, to be merged over another configuration.
    found = yaml.safe_load((tmp_path / "hpo/best_config.yaml").read_text())
    assert found.pop("base") == "base_config.yaml" and found.pop("out_dir").endswith("hpo/best")
    assert found == best["params"]
    (tmp_path / "other.yaml").write_text("n_layer: 7\nn_embd: 48\nmax_iters: 11\nout_dir: mine\n")
    other = load_config(tmp_path / "other.yaml", [f"best_config={config}", "--n_head=3"])
    changes = dict(n_embd=48, max_iters=11, out_dir="mine", n_head=3) | best["params"]
    assert other == load_config(None, changes)


def test_search_goes_on_and_takes_no_other_space(search, capsys):
    code, three = search(SPACE, trials(3))
    assert code == 0 and len(three) == 3
    code, five = search(SPACE, trials(5))
    assert code == 0 and len(five) == 5 and five[:3] == three
    assert len({json.dumps(t["params"]) for t in five}) == 5
    assert search(SPACE, trials(5))[1] == five
    for space, changes, name in ((SPACE.replace("1e-4", "1e-5"), {}, "space"),
                                 (SPACE, dict(weight_decay=0.3), "weight_decay"),
                                 (SPACE, dict(max_iters=9), "max_iters")):
        capsys.readouterr()
        assert search(space, trials(5), **changes)[0] == 2
        assert f"holds a search with another {name};" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "what"), [("train.bin", "data"), ("val.bin", "data"),
                                            ("w.pt", "files")])
def test_a_search_takes_no_other_data_or_weights(tmp_path, data_dir, name, what):
    """The losses on these would be compared with those of the trials so far."""
    data = shutil.copytree(data_dir, tmp_path / "data")
    (data / "w.pt").write_bytes(b"a")
    config = load_config(None, dict(data_dir=str(data), init_from=str(data / "w.pt"), block_size=8))

    out = tmp_path / "100%41"  # with a meaning in URLs
    out.mkdir()

    def open_study():
        hpo.open_study(config, {}, 1, dict(max_iters=0, narrow=0.5), {}, str(out))
    open_study()
    open_study()
    assert (out / "study.db").exists()
    with open(data / name, "ab") as f:
        f.write(b"a\0")  # a token
    with pytest.raises(ConfigError, match=f"holds a search with another {what};"):
        open_study()


def test_a_search_of_an_earlier_version_goes_on(tmp_path, data_dir):
    """It lacks newer keys, and the data and files. A newer key with another value is a change."""
    def open_study(**changes):
        config = load_config(None, dict(data_dir=str(data_dir), block_size=8) | changes)
        return hpo.open_study(config, {}, 1, dict(max_iters=0, narrow=0.5), {}, str(tmp_path))
    study = open_study()
    asked = study.user_attrs["asked"]
    newer = {"data", "files", "causal", "head_samples"}
    study.set_user_attr("asked", {k: asked[k] for k in asked.keys() - newer})
    open_study()
    with pytest.raises(ConfigError, match="holds a search with another causal;"):
        open_study(causal=False)


def test_the_same_search_draws_the_same_trials(search, tmp_path):
    first = [t["params"] for t in search(SPACE, trials(4))[1]]
    (tmp_path / "hpo").rename(tmp_path / "before")
    assert [t["params"] for t in search(SPACE, trials(4))[1]] == first


@pytest.mark.ci
def test_two_workers_share_the_trials(tmp_path, data_dir):
    (tmp_path / "space.yaml").write_text(SPACE + "stages: [{trials: 5}, {trials: 2}]")
    command = ["-m", "train.tools.hpo", *arguments(tmp_path, data_dir)]
    with ThreadPoolExecutor() as pool:
        workers = list(pool.map(lambda _: python(*command, merged=True), range(2)))
    outs = [w.stdout for w in workers]
    assert [w.returncode for w in workers] == [0, 0], outs
    found = history(tmp_path)
    stages = [t["stage"] for t in found]  # each worker may add one
    assert stages.count(1) in (5, 6) and stages.count(2) in (2, 3)
    assert len({json.dumps(t["params"]) for t in found}) >= len(found) - 1
    assert sum(len(re.findall(r"^stage_\d, trial \d+: (?:complete|pruned)", out, re.M))
               for out in outs) == len(found)
    assert all("To train with it: python run_train.py --config" in out for out in outs)


@pytest.mark.ci
def test_hopeless_trials_are_pruned_and_bad_ones_do_not_end_the_search(search, monkeypatch):
    train, calls = hpo.train, []

    def fragile(config, on_evaluation):
        calls.append(config)
        if len(calls) == 2:
            raise hpo.BadNumbers("iter 3: the loss is not finite")
        if len(calls) == 4:  # e.g. weights of another shape in init_from
            raise CheckpointError("wte.weight differs")
        if len(calls) == 3:
            raise RuntimeError("the machine broke\nmore")
        return train(config, on_evaluation=on_evaluation)
    monkeypatch.setattr(hpo, "train", fragile)
    code, found = search("learning_rate: {low: 1e-6, high: 3e-2, log: true}\nn_head: [2, 3]\n",
                         trials(14), max_iters=8, seed=4)
    assert code == 0 and len(found) == 14
    refused = [t for t in found if t["error"] and "n_embd (16) must be a multiple" in t["error"]]
    assert refused and {t["params"]["n_head"] for t in refused} == {3}
    assert {t["state"] for t in refused} == {"pruned"}
    bad = [t for t in found if t["error"] and "not finite" in t["error"]]
    assert len(bad) == 1 and bad[0]["state"] == "pruned"
    for text in ("the machine broke more", "wte.weight differs"):
        assert [t["state"] for t in found if t["error"] == text] == ["pruned"]
    pruned = [t for t in found if t["state"] == "pruned" and not t["error"]]
    done = [t for t in found if t["state"] == "complete"]
    assert pruned and all(len(t["evaluations"]) < 4 for t in pruned)
    assert done and all(len(t["evaluations"]) == 4 for t in done)
    assert max(t["value"] for t in pruned) > min(t["value"] for t in done)


def test_when_no_trial_finishes_one_message_says_so(search, capsys):
    code, found = search("n_head: [3, 5]\n", trials(2))
    assert code == 2 and [t["state"] for t in found] == ["pruned"] * 2
    assert "no trial of stage 1 completed" in capsys.readouterr().err


def test_the_start_is_inside_a_logarithmic_range(search):
    """0 has no logarithm: the first trial is one that the sampler chose."""
    space = "weight_decay: {low: 1e-3, high: 0.3, log: yes}\n"
    code, (first,) = search(space, trials(1), weight_decay=0.0)
    assert code == 0 and 1e-3 <= first["params"]["weight_decay"] <= 0.3


@pytest.mark.parametrize("text, log", [("True", True), ("yes", True), ("off", False)])
def test_the_words_of_yaml_make_a_range_logarithmic(text, log):
    raw = dict(low="1e-3", high="0.1", log=text)
    assert hpo.read_dimension("learning_rate", raw, FIELDS).log is log
    with pytest.raises(ValueError, match="true or false for log, got 'maybe'"):
        hpo.read_dimension("learning_rate", raw | dict(log="maybe"), FIELDS)


def test_a_block_longer_than_the_data_is_a_bad_trial(search):
    code, found = search("block_size: [8, 1000000]\n", trials(3), seed=2)
    assert code == 0 and {t["state"] for t in found} >= {"complete", "pruned"}
    assert all("block_size" in t["error"] for t in found if t["params"]["block_size"] != 8)


def test_what_a_search_found_keeps_the_mirror_of_the_configuration(search, tmp_path):
    store = tmp_path / "store"
    code, _ = search("n_layer: [1, 2]\n", trials(1), mirror=str(store), save_precision="float32")
    assert code == 0 and not store.exists()
    assert not list((tmp_path / "hpo").rglob("*.safetensors"))
    best = load_config(tmp_path / "hpo/best_config.yaml")
    assert (best.mirror, best.save_precision) == (str(store), "float32")


def test_a_damaged_study_is_named(search, tmp_path, capsys):
    (tmp_path / "hpo").mkdir()
    (tmp_path / "hpo/study.db").write_text("garbage")
    assert search(SPACE, trials(1)) == (2, [])
    assert "study.db: file is not a database\n" in capsys.readouterr().err


def test_the_best_configuration_of_a_search_that_was_killed_after_its_last_trial(
        search, tmp_path, monkeypatch):
    with monkeypatch.context() as killed:
        killed.setattr(hpo, "write_results", lambda *_: None)
        killed.setattr(hpo, "print_result", lambda *_: None)
        assert search(SPACE, trials(2)) == (0, [])
    code, found = search(SPACE, trials(2))
    best = min((t for t in found if t["state"] == "complete"), key=lambda t: t["value"])
    changes = yaml.safe_load((tmp_path / "hpo/best_config.yaml").read_text())
    assert code == 0 and best["params"].items() <= changes.items()


@pytest.mark.parametrize("steps, epochs, first", [(8, None, 2), (0, None, 10), (0, 2.0, 0)])
def test_trials_are_pruned_after_a_quarter_of_their_steps(tmp_path, data_dir, monkeypatch, steps,
                                                          epochs, first):
    found = []
    pruner = optuna.pruners.MedianPruner
    monkeypatch.setattr(optuna.pruners, "MedianPruner", lambda *a: (found.append(a), pruner(*a))[1])
    config = load_config(None, dict(max_iters=40, max_epochs=epochs, data_dir=str(data_dir)))
    hpo.open_study(config, {}, 1, dict(max_iters=steps, narrow=0.5), {}, str(tmp_path))
    assert found == [(4, first)]  # after four trials


@pytest.mark.parametrize("owner, name", [("", "create_study"), ("Study", "ask"),
                                         ("Study", "tell"), ("Study", "enqueue_trial")])
def test_a_full_disk_is_no_damaged_study(search, monkeypatch, capsys, owner, name):
    def fail(*_, **__):
        full = sqlite3.OperationalError("database or disk is full")
        error = hpo.sqlalchemy.exc.OperationalError("INSERT", None, full)
        error.__cause__ = full
        if not owner:
            raise error
        raise hpo.optuna.exceptions.StorageInternalError("during the commit") from error
    monkeypatch.setattr(getattr(hpo.optuna, owner, hpo.optuna), name, fail)
    assert search(SPACE, trials(1)) == (2, [])
    assert capsys.readouterr().err.endswith("study.db: database or disk is full\n")


def test_min_lr_follows_the_learning_rate(search, tmp_path):
    _, found = search("learning_rate: {low: 1e-4, high: 1e-1, log: true}", trials(2), min_lr=1e-3)
    config = load_config(tmp_path / "hpo/stage_1_trial_1/config.yaml")
    assert config.learning_rate == found[1]["params"]["learning_rate"] != 0.01
    assert config.min_lr == pytest.approx(config.learning_rate / 10)


def test_a_searched_length_replaces_that_of_the_configuration(search, tmp_path):
    """as in best_config.yaml, in which a fraction of the base file is replaced"""
    search("warmup_iters: [1]", trials(1), warmup_ratio=0.5)
    for name in ("stage_1_trial_0/config.yaml", "best_config.yaml"):
        config = load_config(tmp_path / "hpo" / name)
        assert (config.warmup_iters, config.warmup_ratio) == (1, None), name


def test_a_key_without_effect_is_not_searched(search, capsys):
    assert search("wsd_decay: [0.1, 0.5]", trials(1)) == (2, [])
    assert "space.yaml:1: wsd_decay: without effect in this configuration: it needs " \
        "lr_schedule=wsd" in capsys.readouterr().err
    assert search("lr_schedule: [wsd]\nwsd_decay: [0.1, 0.5]", trials(1))[0] == 0


def test_an_interrupted_trial_is_done_again(search, monkeypatch):
    train, calls = hpo.train, []

    def stop_at_second(config, on_evaluation):
        calls.append(config)
        if len(calls) == 2:
            raise Stopped(15)
        return train(config, on_evaluation=on_evaluation)
    monkeypatch.setattr(hpo, "train", stop_at_second)
    code, found = search(SPACE, trials(3))
    assert code == 143 and len(found) == 1
    code, found = search(SPACE, trials(3))
    assert code == 0 and [t["trial"] for t in found] == [0, 2, 3]
    assert load_config(None, vars(calls[1]) | dict(out_dir="x")) == load_config(
        None, vars(calls[2]) | dict(out_dir="x"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_first_step_of_a_trial_queues_it_again(search, monkeypatch, number):
    with on_signals([number.name], lambda *_: pytest.fail("ends the process")):
        monkeypatch.setattr(hpo, "train", lambda *_, **__: os.kill(os.getpid(), number))
        assert search(SPACE, trials(1))[0] == 128 + number
    monkeypatch.undo()
    assert search(SPACE, trials(1))[1][0]["params"] == dict(learning_rate=0.01, n_layer=1)


def test_ctrl_c_promises_no_checkpoint(search, capfd):
    """The checkpoints of a trial are deleted."""
    with faults("before_step@1=sigint"):
        code, found = search(SPACE, trials(2))
    assert code == 130 and not found
    assert capfd.readouterr().err == (
        "\nstopping after this micro-batch; a second signal quits at once, without saving\n")


@pytest.mark.ci
def test_a_trial_of_a_worker_that_died_does_not_count(tmp_path, data_dir, search):
    (tmp_path / "space.yaml").write_text(SPACE)
    output = tmp_path / "output"
    long = dict(max_iters=30_000, eval_interval=15_000)
    worker = Fork(run_python, (["-m", "train.tools.hpo", *arguments(
        tmp_path, data_dir, trials(2), **long)],), stdout=output, stderr=tmp_path / "errors")
    soon(lambda: output.exists() and "\n" in output.read_text(), 30)
    assert output.read_text().startswith("stage_1, trial 0: learning_rate 0.01")
    worker.kill()
    left, used = (tmp_path / f"hpo/stage_1_trial_{n}/ckpt_best.pt" for n in (0, 9))
    for path in left, used:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    study, = optuna.study.get_all_study_names(f"sqlite:///{tmp_path}/hpo/study.db")
    study = optuna.load_study(study_name=study, storage=f"sqlite:///{tmp_path}/hpo/study.db")
    study.set_user_attr("asked", study.user_attrs["asked"] | dict(max_iters=4, eval_interval=2))
    lock = lock_folder(used.parent)  # as a worker does that lives
    code, found = search(SPACE, trials(2))
    lock.close()
    assert code == 0 and [t["trial"] for t in found] == [1, 2]
    assert used.exists() and not left.exists()


def test_evaluations_may_be_counted_in_epochs(search):
    code, found = search(SPACE, trials(1), eval_interval=0, eval_epochs=1)
    assert code == 0 and [t["state"] for t in found] == ["complete"]


def test_maximising_another_number(search, capsys):
    code, found = search(SPACE, trials(3), early_stopping_metric="val_ppl",
                         early_stopping_mode="max")
    assert code == 0
    assert all(t["value"] == max(v for _, v in t["evaluations"]) for t in found)
    assert f"val_ppl {max(t['value'] for t in found):.4f}\n" in capsys.readouterr().out


@pytest.mark.parametrize("args, env, words", [
    (["--eval_interval=0"], {}, "needs evaluations"), (["--max_iters=0"], {}, "max_iters above 0"),
    ([], {"WORLD_SIZE": "2"}, "without torchrun"),
    (["--out=a?b"], {}, "--out a?b: choose a name without ?"),
    (["--data_dir=nowhere"], {}, "nowhere"), (["--early_stopping_metric=val_acc"], {}, "val_acc"),
    (["--space=nowhere.yaml"], {}, "nowhere.yaml: cannot be read"),
    (["--out=/dev/null/x"], {}, "/dev/null/x: Not a directory"),
    (["--leraning_rate=1"], {}, "did you mean 'learning_rate'")])
def test_bad_input_ends_with_one_message(tmp_path, data_dir, monkeypatch, capsys, args, env, words):
    (tmp_path / "space.yaml").write_text(SPACE)
    for name, value in env.items():
        monkeypatch.setitem(os.environ, name, value)
    assert hpo.main([*arguments(tmp_path, data_dir), *args]) == 2
    err = capsys.readouterr().err
    assert words in err and "Traceback" not in err


def test_a_length_both_searched_and_staged_is_refused(search, capsys):
    assert search("max_iters: [5, 10]\nstages: [{trials: 3, max_iters: 5}]")[0] == 2
    assert "not a key that can be searched" in capsys.readouterr().err
    assert search(SPACE + "stages: [{trials: 1, max_iters: 2}]", max_epochs=1)[0] == 2
    assert "instead of max_epochs" in capsys.readouterr().err
