"""python -m train.tools.repeat: runs over seeds, each a process, and what their numbers say."""

import json
import os
import shutil
import signal
import statistics
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from runs import planted_children, slow

from train.base import environment
from train.base.environment import code_digest
from train.base.errors import UserError
from train.base.files import lock_folder
from train.dataloader import Data, RowLoader
from train.tools import child_runs, repeat


@pytest.fixture
def go(tmp_path, monkeypatch):
    """go(arguments...): the exit code, the rows of the table; go.started: commands so far."""
    started = planted_children(monkeypatch)
    small = ["--model=planted", "--max_iters=2", "--eval_interval=2", "--batch_size=4",
             "--gradient_accumulation_steps=1", "--device=cpu", "--warmup_iters=0", "--seed=1",
             "--learning_rate=1e-6", "--lr_schedule=constant", "--num_threads=1",
             "--compile=false"]

    tables = []
    make_table = repeat.make_table

    def record(*args):
        tables.append(make_table(*args))
        return tables[-1]
    monkeypatch.setattr(repeat, "make_table", record)

    def run(*args):
        code = repeat.main([*small, "--out", str(tmp_path / "repeat"), *args])
        header, *rows = tables.pop() if tables else [()]
        return code, [dict(zip(header, row)) for row in rows]
    run.started = started
    yield run


# -----------------------------------------------------------------------------
# numbers

@pytest.mark.parametrize("n", [2, 5, 31, 32, 60])
def test_the_interval_is_students_of_the_differences(n):
    stats = pytest.importorskip("scipy.stats")  # here: each forked run imports this file
    draw = np.random.default_rng(n)
    base, change = draw.normal(size=n), draw.normal(0.3, 1.0, size=n)
    expected = stats.ttest_rel(change, base).confidence_interval(0.95)
    difference, low, high, _ = repeat.compare(
        dict(enumerate(change)) | {999: 5.0}, dict(enumerate(base)) | {-1: 7.0})
    assert difference == pytest.approx(np.mean(change - base))
    assert (high - low, high + low) == pytest.approx(
        (expected.high - expected.low, 2 * difference), rel=2e-3)


@pytest.mark.parametrize("mode, moved, verdict", [
    ("min", -1.0, "kept"), ("min", 1.0, "worse"), ("max", 1.0, "kept"), ("max", -1.0, "worse"),
    ("min", 0.0, "unclear"), ("max", 0.0, "unclear")])
def test_the_verdict_follows_the_interval(mode, moved, verdict):
    base = {s: float(s) for s in range(4)}
    change = {s: v + moved + (0.1 if s % 2 else -0.1) for s, v in base.items()}
    assert repeat.compare(change, base, mode)[3] == verdict
    assert repeat.compare({1: 0.0}, base, mode)[3] == "unclear"
    assert repeat.compare({}, base, mode)[3] == "crash"


# -----------------------------------------------------------------------------
# runs

@pytest.mark.ci
def test_what_is_planted_is_found_and_nothing_else(go, tmp_path, capsys):
    """An improvement of half the spread of seeds, with 5 of them, beside a change that does
    nothing but draw anew."""
    code, found = go("--seeds", "5", "--set", "planted=0.5 salt=1", "--set", "salt=2")
    assert code == 0
    assert [(r["change"], r["verdict"]) for r in found] == [
        ("base", "base"), ("planted=0.5 salt=1", "kept"), ("salt=2", "unclear")]
    folder = tmp_path / "repeat"
    values = [json.loads(path.read_text())["val_loss"]
              for path in folder.glob("base,_seed_?_*/result.json")]
    assert len(values) == 5
    assert float(found[0]["mean"]) == pytest.approx(statistics.fmean(values), rel=1e-4)
    assert float(found[0]["spread"]) == pytest.approx(statistics.stdev(values), rel=1e-4)
    assert 0.5 < float(found[0]["spread"]) < 2
    text = capsys.readouterr().out
    assert "base, seed 1: val_loss" in text and "kept" in text

    # The same command has nothing to do; one seed more is one run a setting.
    done = len(go.started)
    _, again = go("--seeds", "5", "--set", "planted=0.5 salt=1", "--set", "salt=2")
    assert len(go.started) == done and again == found
    code, found = go("--seeds", "6", "--set", "salt=2", "--jobs", "2")
    assert code == 0 and len(go.started) == done + 2 and found[-1]["runs"] == "6 of 6"


def test_the_table_of_test_data_has_the_runs_that_have_the_metric():
    """Not those that crashed. A metric may be unknown in some runs."""
    def child(value, **test):
        return SimpleNamespace(value=value, test=test)
    runs = {0: child(1.0, test_loss=2.0), 1: child(1.0, test_loss=3.0, test_f1=0.25),
            2: child(None, test_loss=9.0)}
    assert repeat.make_test_table({("", "base"): runs, ("d=1", "lr=2"): {0: child(1.0)}})[1:] == [
        ("base", "test_loss", "2 of 3", "2.5", f"{0.5 ** 0.5:.5g}"),
        ("base", "test_f1", "1 of 3", "0.25", "nan")]


def test_the_name_of_a_change_is_one_line_without_control_characters():
    assert repeat.label("", "run_name='a\x1b[31m\tb\n'") == "run_name='a\\x1b[31m b '"
    assert repeat.label("n_layer=2", "seed=1") == "seed=1 at n_layer=2"


def test_a_change_is_kept_if_every_size_improves(go):
    code, found = go("--seeds", "2", "--size", "planted=0", "--size", "planted=1",
                     "--set", "planted=0.5", "--set", "planted=2")
    assert code == 0 and [r["change"] for r in found] == [
        f"{change} at {size}" for size in ("planted=0", "planted=1")
        for change in ("base", "planted=0.5", "planted=2")]
    # 0.5 improves one size and harms the other, 2 improves both: each by the planted difference.
    assert [r["verdict"] for r in found] == ["base", "unclear", "kept"] * 2
    expected = [0, -0.5, -2, 0, 0.5, -1]
    assert [float(r["difference"]) for r in found] == pytest.approx(expected, abs=0.01)


def test_a_change_may_be_a_configuration_file(go, tmp_path):
    """One command compares the experts of moe.yaml with the dense models of moe_dense.yaml."""
    file = tmp_path / "other.yaml"
    file.write_text("planted: 0.5\nout_dir: elsewhere\nseed: 9\n")
    code, found = go("--seeds", "2", "--set", f"config={file}")
    assert code == 0 and [r["runs"] for r in found] == ["2 of 2"] * 2
    assert float(found[1]["difference"]) == pytest.approx(-0.5, abs=0.01)


def test_a_run_that_is_killed_is_a_row_and_is_tried_again(go, capsys):
    code, found = go("--seeds", "2", "--set", "fatal=2", "--set", "planted=1")
    assert code == 0 and [r["runs"] for r in found] == ["2 of 2", "1 of 2", "2 of 2"]
    assert found[1]["difference"] == "nan" and found[1]["verdict"] == "unclear"
    assert "fatal=2, seed 2: crashed, see" in capsys.readouterr().out
    done = len(go.started)
    go("--seeds", "2", "--set", "fatal=2", "--set", "planted=1")
    assert len(go.started) == done + 1


def test_where_all_runs_crash_the_exit_code_says_so(go):
    code, found = go("--seeds", "2", "--init_from=nothing.pt")
    assert code == 1 and [r["verdict"] for r in found] == ["crash"]


@pytest.mark.ci
@pytest.mark.parametrize("signum", [slow(signal.SIGINT), signal.SIGTERM])
def test_a_stop_ends_the_runs_and_the_same_command_goes_on(go, signum, tmp_path, capsys):
    handler = signal.getsignal(signum)

    def interrupt():
        while not list(tmp_path.glob("repeat/base,_seed_1_*/ckpt.pt")):
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident, signum)
    threading.Thread(target=interrupt).start()
    long = ["--seeds", "2", "--max_epochs=200", "--eval_interval=100000", "--save_interval=5"]
    code, found = go(*long)
    assert code == 128 + signum and not found
    assert "the same command resumes" in capsys.readouterr().err
    assert signal.getsignal(signum) is handler
    log, = tmp_path.glob("repeat/base,_seed_1_*/console.log")
    assert "To resume:" in log.read_text()
    code, found = go(*long)
    assert code == 0 and found[0]["runs"] == "2 of 2" and "Resuming from" in log.read_text()


def test_a_result_is_read_from_the_metrics(data_dir, tmp_path, capsys, monkeypatch):
    """Two lines of ten steps of half a second each, and an evaluation. The code is that of the
    start, also if it is edited while the run trains."""
    run = child_runs.ChildRun("a", [f"--data_dir={data_dir}"], tmp_path)
    monkeypatch.setattr(child_runs, "start_process", lambda *_: None)
    with monkeypatch.context() as patch:
        patch.setattr(environment, "__file__", str(tmp_path / "train/base/environment.py"))
        code = code_digest()
        run.start({})
    lines = [dict(iter=9, loss=3, time_ms=500.0), dict(iter=19, loss=2, time_ms=500.0),
             dict(iter=20, val_loss=2.5)]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    run.process = SimpleNamespace(poll=lambda: 1)
    run.finish("val_loss")
    assert run.value is None and not run.result_file.exists()
    run.process = SimpleNamespace(poll=lambda: 0)
    run.finish("val_loss")
    assert (run.value, run.seconds) == (2.5, pytest.approx(10.0))
    result = dict(iter=20, val_loss=2.5, seconds=run.seconds, code=code)
    assert json.loads(run.result_file.read_text()) == result
    assert code != code_digest()
    run.result_file.write_text(json.dumps(result | dict(code=code_digest())))
    del run.process
    run.finish("val_loss")
    assert (run.value, run.seconds) == (2.5, 10.0)
    assert "a: val_loss 2.5000, 10 s (cached)\n" in capsys.readouterr().out


def test_a_result_of_other_code_is_told(data_dir, tmp_path, capsys):
    """A result of an earlier version has no digest of its code."""
    run = child_runs.ChildRun("a", [f"--data_dir={data_dir}"], tmp_path)
    run.folder.mkdir()
    (run.folder / "metrics.jsonl").write_text('{"iter": 20, "val_loss": 2.5}\n')
    for before in ("{}", '{"code": "0123abcd"}'):
        run.result_file.write_text(before)
        for _ in range(2):  # also the second time
            run.finish("val_loss")
            assert (f"(cached; the code has changed: delete {run.folder} to train again)"
                    in capsys.readouterr().out)


def test_the_digest_of_the_code(tmp_path, monkeypatch):
    """The lock file of an editor is no code."""
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "train/base/environment.py"))
    file = tmp_path / "model" / "a.py"
    file.parent.mkdir()
    digests = []
    for text in ("a = 1", "a = 2"):
        file.write_text(text)
        digests.append(code_digest())
    (tmp_path / "model" / ".#gpt.py").symlink_to("user@host.1:9")
    assert digests[0] != digests[1] == code_digest()


def test_without_a_value_in_the_last_evaluation_there_is_no_result(data_dir, tmp_path, capsys):
    """A correlation with constant predictions; that of an earlier evaluation is not the run's."""
    run = child_runs.ChildRun("a", [f"--data_dir={data_dir}"], tmp_path)
    run.folder.mkdir()
    (run.folder / "metrics.jsonl").write_text('{"iter": 10, "val_correlation": 0.9}\n'
                                              '{"iter": 20, "val_correlation": null}\n')
    run.process = SimpleNamespace(poll=lambda: 0)
    run.finish("val_correlation")
    assert run.value is None and "a: no val_correlation in" in capsys.readouterr().out


def test_a_terminals_ctrl_c_reaches_a_run_once(tmp_path, monkeypatch):
    """A run that is asked twice leaves at once, without a checkpoint."""
    (tmp_path / "run_train.py").write_text("import os; print(os.getpgrp())")
    monkeypatch.setattr(child_runs, "REPOSITORY", str(tmp_path))
    child_runs.start_process([], None, tmp_path / "log").wait()
    assert int((tmp_path / "log").read_text()) != os.getpgrp()


def test_a_result_is_of_a_configuration_not_of_a_command(go, tmp_path, capsys):
    file = tmp_path / "config.yaml"
    for decay, there in ((0.1, 0), (0.1, 2), (0.2, 0)):
        file.write_text(f"weight_decay: {decay}\n")
        go("--seeds", "2", f"--config={file}", "--resume=never")
        assert capsys.readouterr().out.count("(cached)") == there


def test_a_result_is_of_the_files_that_the_run_reads(go, data_dir, tmp_path, capsys):
    """Other weights under the name of the first ones; then a run of each is there."""
    go("--seeds", "2")
    weights = sorted(tmp_path.glob("repeat/base,_seed_?_*/ckpt.pt"))
    start, tasks = tmp_path / "w.pt", tmp_path / "t.jsonl"
    tasks.write_text("{}")
    capsys.readouterr()
    for source, there in ((weights[0], 0), (weights[0], 2), (weights[1], 0)):
        shutil.copy2(source, start)
        assert go("--seeds", "2", f"--init_from={start}")[0] == 0
        assert capsys.readouterr().out.count("(cached)") == there
    folders = set()
    for text in ("{}", "{}\n"):
        tasks.write_text(text)
        folders.add(child_runs.ChildRun("a", [f"--data_dir={data_dir}", f"--eval_tasks={tasks}"],
                                        tmp_path).folder)
    weights = tmp_path / "hf" / "model.safetensors"
    weights.parent.mkdir()
    for text in ("a", "bb"):  # in place: the state of the folder is the same
        weights.write_text(text)
        folders.add(child_runs.ChildRun("a", [
            f"--data_dir={data_dir}", f"--init_from={weights.parent}"], tmp_path).folder)
    assert len(folders) == 4


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_a_result_is_of_all_data_of_the_run(go, monkeypatch, capsys, split):
    """other validation data: a cached loss would be compared with losses on these"""
    go("--seeds", "2")

    def open_changed(config, ranks):
        splits = {name: RowLoader([np.full((8, 1), name == split, np.float32)], config, ranks)
                  for name in {"train", "val", split}}
        return Data(**splits)
    monkeypatch.setattr(sys.modules["model.planted"], "open_data", open_changed)
    assert go("--seeds", "2")[0] == 0 and len(go.started) == 4
    assert "(cached)" not in capsys.readouterr().out


def test_a_change_written_with_other_blanks_is_the_same(go):
    code, found = go("--seeds", "2", "--jobs", "4", "--set", "planted=2 salt=1",
                     "--set", " planted=2  salt='1' ")
    assert code == 0 and len(go.started) == 4
    assert [(r["change"], r["runs"]) for r in found] == [("base", "2 of 2"),
                                                         ("planted=2 salt=1", "2 of 2")]


def test_a_run_that_lost_its_numbers_is_named(go, tmp_path, capsys):
    go("--seeds", "2")
    folder, = (tmp_path / "repeat").glob("base,_seed_1_*")
    (folder / "metrics.jsonl").unlink()
    code, found = go("--seeds", "2")
    assert code == 0 and found[-1]["runs"] == "1 of 2"
    assert f"no val_loss in {folder}/metrics.jsonl; delete the folder" in capsys.readouterr().out
    shutil.rmtree(folder)
    assert go("--seeds", "2")[1][-1]["runs"] == "2 of 2"


def test_two_at_once_are_refused(go, tmp_path, capsys):
    (tmp_path / "repeat").mkdir()
    with lock_folder(tmp_path / "repeat"):
        assert go("--seeds", "2")[0] == 2 and not go.started
    assert "repeat is in use by pid" in capsys.readouterr().err


def test_evaluations_may_be_counted_in_epochs(go):
    code, found = go("--seeds", "2", "--eval_interval=0", "--eval_epochs=1")
    assert code == 0 and found[0]["runs"] == "2 of 2"


def test_a_run_of_a_killed_command_is_no_crash(go, tmp_path, capsys):
    """Its process goes on after a kill -9 of the command."""
    assert go("--seeds", "2")[0] == 0
    folder, = tmp_path.glob("repeat/base,_seed_1_*")
    (folder / "result.json").unlink()
    with lock_folder(folder):
        code, found = go("--seeds", "2")
    assert code == 2 and not found and len(go.started) == 2
    assert f"{folder} is in use by pid" in capsys.readouterr().err


@pytest.mark.parametrize("args, message", [
    (["--seeds", "1"], "--seeds: must be at least 2"), (["--set", "sead=3"], "unknown key 'sead'"),
    (["--set", " "], "expected KEY=VALUE, got ' '"), (["--set", "base"], "KEY=VALUE, got 'base'"),
    (["--set", "data_dir='a"], """--set, --size: "data_dir='a": No closing quotation"""),
    (["--set", "seed=7"], "seed=7: this command sets seed of each run"),
    (["--set", "training.seed=7"], "training.seed=7: this command sets seed of each run"),
    (["--set", "seed=1"], "seed=1: this command sets seed of each run"),  # as in the base
    (["--set", "random_seed=7"], "random_seed=7: this command sets seed of each run"),  # an alias
    (["--set", "output_dir=x"], "output_dir=x: this command sets out_dir of each run"),
    (["--set", "out_dir=x"], "out_dir=x: this command sets out_dir of each run"),
    (["--size", "--out_dir x"], "--out_dir x: this command sets out_dir of each run"),
    (["--jobs", "0"], "--jobs: must be at least 1"),
    (["--dry_run"], "dry_run: only for the command line of run_train.py"),
    (["--eval_interval=0"], "base, seed 1: needs training with evaluations: eval_interval above"),
    (["--eval_only"], "needs training with evaluations: eval_interval above 0, and no eval_only"),
    (["--set", "eval_interval=0"], "eval_interval=0, seed 1: needs training with")])
def test_what_cannot_be_is_refused_before_any_work(go, args, message, capsys):
    assert go(*args)[0] == 2 and not go.started
    assert message in capsys.readouterr().err


def test_a_folder_may_be_named_like_a_key_that_is_refused():
    text = "data_dir=data/seed init_from=out_dir=3/ckpt.pt"
    assert repeat.split_settings([text]) == {text: text.split()}


@pytest.mark.parametrize("visible, devices", [("3,GPU-a", ["3", "GPU-a", "3"]),
                                              (None, ["0", "1", "0"])])
def test_parallel_runs_share_the_gpus_in_turn(monkeypatch, visible, devices):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [v["CUDA_VISIBLE_DEVICES"] for v in child_runs.split_devices(3)] == devices


def test_no_runs_are_started_under_torchrun(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="runs without torchrun"):
        child_runs.train_all([], "val_loss", str(tmp_path / "out"), 1)
    assert not (tmp_path / "out").exists()
