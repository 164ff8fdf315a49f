"""Asked to stop, at any moment, a run saves, says how to go on, and leaves with the right code.

Matrix cases 57 to 60, 63, 64, 68 and 69; under torchrun: test_multinode.py. Exit codes: 128 + the
number of the signal, as a shell reports them.
"""

import contextlib
import json
import random
import re
import shlex
import signal
import time
from pathlib import Path

import pytest
from conftest import finish, start
from processes import Fork, python
from runs import SMALL, Program, assert_same, go, metrics, run_program, temporary_files

from train import robust
from train.base.errors import UserError
from train.checkpoint import load_checkpoint
from train.config import TrainConfig

SAVES = dict(eval_interval=0, save_interval=3)  # in the background: the last may not be done yet
LONG = dict(max_iters=100_000, eval_interval=0, log_interval=1)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, data_dir):
    out = tmp_path_factory.mktemp("undisturbed")
    go(data_dir, out)
    return out


@pytest.mark.matrix(57, 58, 64)
@pytest.mark.parametrize("name, code", [("SIGTERM", 143), ("SIGINT", 130), ("SIGHUP", 129)])
def test_a_signal_in_a_step_saves_after_it(tmp_path, data_dir, undisturbed, name, code):
    """SIGTERM, SIGINT (Ctrl-C) or SIGHUP (terminal closed) in step 7 -> saved after that step, exit
    143, 130 or 129, the last line printed is the command that resumes, the end is exact"""
    out = tmp_path / "out"
    found, text = run_program(data_dir, out, env={"FAULT": f"before_opt@7={name.lower()}"})
    assert found == code and "Traceback" not in text
    assert load_checkpoint(out / "ckpt.pt")["iter_num"] == 8
    assert "Stopped at iter 8, saved. To resume:" in text
    assert text.splitlines()[-1] == f"  python run_train.py --config {out}.output.yaml"
    go(data_dir, out)
    assert_same(undisturbed, out)


@pytest.mark.matrix(57)
def test_the_printed_command_resumes(tmp_path, data_dir, undisturbed):
    """the program as a person starts it, SIGTERM from outside, then the command it printed, though
    it was first started with --resume never -> the end is exact"""
    settings = dict(SMALL, data_dir=str(data_dir), out_dir=str(tmp_path / "out"))
    (tmp_path / "my run.yaml").write_text(json.dumps(settings))
    first = start("--config", tmp_path / "my run.yaml", "--resume", "never",
                  env={"FAULT": "before_step@9=sigterm"})
    text = first.communicate(timeout=60)[0]
    assert first.returncode == 143, text
    command = shlex.split(text.splitlines()[-1])
    assert command[:2] == ["python", first.args[1]] and command[-2:] == ["--resume", "auto"]
    again = python(*command[1:])
    assert again.returncode == 0 and "Resuming from" in again.stdout, again.stdout + again.stderr
    assert_same(undisturbed, tmp_path / "out")


@pytest.mark.matrix(59)
@pytest.mark.alone
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_second_signal_leaves_within_a_second(tmp_path, data_dir, name):
    """a second signal while the run still hangs in the step -> leaves within a second, the
    checkpoint before it is intact"""
    out = tmp_path / "out"
    program = Program(data_dir, out, **SAVES,
                      env={"FAULT": f"before_step@7={name.lower()},mid_backward@7=sleep"})
    program.wait_for("stopping after this micro-batch")
    assert program.process.is_alive()
    began = time.monotonic()
    program.send(signal.Signals[name])
    assert program.wait(10)[0] == 128 + signal.Signals[name] and time.monotonic() - began < 1
    assert load_checkpoint(out / "ckpt.pt")["iter_num"] in (3, 6)


def test_a_second_signal_while_the_first_is_printed_prints_nothing(monkeypatch):
    """Under torchrun, which passes on a signal that Slurm has sent to all processes."""
    printed = []

    def write(fd, data):  # the second signal arrives during the write
        printed.append(data)
        if len(printed) < 3:
            signals.handle(signal.SIGTERM, None)
    signals = robust.Signals()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(robust.os, "write", write)
    signals.handle(signal.SIGTERM, None)
    assert len(printed) == 1 and signals.stop == signal.SIGTERM


@pytest.mark.matrix(60)
def test_asked_to_save_it_saves_and_goes_on(tmp_path, data_dir, undisturbed):
    """SIGUSR1 in step 6 -> a checkpoint of step 7 at once, training goes on, the end is exact"""
    out = tmp_path / "out"
    fault = "before_step@6=sigusr1,before_opt@9=raise"
    code, text = run_program(data_dir, out, env={"FAULT": fault})
    assert code == 1 and "iter 8:" in text
    assert load_checkpoint(out / "ckpt.pt")["iter_num"] == 7
    go(data_dir, out)
    assert_same(undisturbed, out)


@pytest.mark.ci
def test_asked_to_save_before_there_is_anything_to_save_it_goes_on(tmp_path, data_dir):
    """SIGUSR1 while PyTorch is imported -> no effect."""
    out = tmp_path / "out"
    process = start("--config", "train/config_test.yaml", "--data_dir", data_dir, "--out_dir", out,
                    "--max_iters", 2, "--sample_tokens", 0)
    status = Path(f"/proc/{process.pid}/status")
    while not int(re.search(r"SigCgt:\s*(\w+)", status.read_text())[1], 16) >> 9 & 1:  # 10
        time.sleep(0.01)
    assert not out.exists()
    process.send_signal(signal.SIGUSR1)
    code, text = finish(process)
    assert code == 0 and "Training complete!" in text


@pytest.mark.matrix(63)
@pytest.mark.parametrize("where, saved", [
    ("eval@10", 10), ("save_open@10", 10), ("save_mid@10", 10), ("save_before_replace@10", 10),
    ("load", 10)])
def test_stopped_while_evaluating_saving_or_loading_the_end_is_exact(tmp_path, data_dir,
                                                                     undisturbed, where, saved):
    """SIGTERM in an evaluation, at three points of a save, or while loading, when there is nothing
    to save yet -> ended by it with a whole checkpoint, no temporary file, the end is exact"""
    out = tmp_path / "out"
    if where == "load":
        go(data_dir, out, "before_opt@9=sigterm")
    code, text = run_program(data_dir, out, env={"FAULT": f"{where}=sigterm"})
    assert code == (-15 if where == "load" else 143) and not temporary_files(out), text
    # A save is in the background: the signal may be seen a step later, or when the run is over.
    assert saved <= load_checkpoint(out / "ckpt.pt")["iter_num"] <= 20
    go(data_dir, out)
    assert_same(undisturbed, out)


def test_a_signal_in_the_last_save_prints_how_to_resume(tmp_path, data_dir):
    """The test data are not evaluated then."""
    code, text = run_program(data_dir, tmp_path / "out", env={"FAULT": "save_mid@20=sigterm"})
    assert code == 143 and "Stopped at iter 20, saved. To resume:\n  python" in text


@pytest.mark.matrix(63)
def test_stopped_at_random_times_every_step_counts_once(tmp_path, data_dir):
    """SIGTERM at 12 random times, four of them counted from the start and eight from the first step
    -> exit 143, saved and tidy, or ended by the signal before the first step; every step logged
    once"""
    out, draw = tmp_path / "out", random.Random(63)
    endless = dict(max_iters=100_000, lr_decay_iters=100_000, save_interval=2)
    codes = []
    for i in range(12):
        program = Program(data_dir, out, **endless)
        if i % 3:
            program.wait_for("\niter ")
        program.process.join(draw.random() * 0.3)
        program.send(signal.SIGTERM)
        codes.append(program.wait(20)[0])
        # Before the first step the signal ends it like a kill: the next run tidies up.
        assert codes[-1] == 143 or not i % 3 and codes[-1] == -15, codes
        assert codes[-1] == -15 or not temporary_files(out)
    steps = [m["iter"] for m in metrics(out) if "loss" in m]
    assert steps == list(range(load_checkpoint(out / "ckpt.pt")["iter_num"]))


@pytest.mark.matrix(63)
def test_interrupted_before_the_run_it_leaves_quietly(tmp_path, data_dir):
    """Ctrl-C while the data is still being opened -> exit 130 without a traceback"""
    code, text = run_program(data_dir, tmp_path / "out", prepare=interrupt_opening)
    assert code == 130 and "Traceback" not in text


def interrupt_opening():
    from train import dataloader

    def open_token_data(*_):
        signal.raise_signal(signal.SIGINT)
    dataloader.open_token_data = open_token_data


@pytest.mark.matrix(68)
def test_a_rank_that_is_ended_says_first_what_broke(tmp_path):
    """SIGTERM from torchrun, as one rank has gone, reaches another just after that one's error
    -> exit 1 with its traceback and what to do"""
    lost = RuntimeError("Connection closed by peer")
    fork = Fork(end_with, (lost,), env=dict(WORLD_SIZE=2, RANK=0), stdout=tmp_path / "said")
    assert fork.wait(60) == 1
    text = (tmp_path / "said").read_text()
    assert "[rank 0] RuntimeError: Connection closed" in text and "Another rank died" in text
    assert "stopping after this micro-batch" not in text


def test_what_all_ranks_have_to_say_is_said_by_one(tmp_path):
    """The others are ended meanwhile."""
    changed = UserError("the data have changed")
    fork = Fork(end_with, (changed,), env=dict(WORLD_SIZE=2, RANK=1), stdout=tmp_path / "said")
    assert fork.wait(60) == -signal.SIGTERM and not (tmp_path / "said").read_text()


def end_with(error):
    """A rank whose loop raises `error`, and which torchrun then asks to end."""
    def job(config):
        with contextlib.ExitStack() as at_end:  # the log and the process group are closed
            at_end.callback(signal.raise_signal, signal.SIGTERM)
            with robust.Signals():
                raise error
    robust.run_reporting_errors(TrainConfig(), job)


@pytest.mark.matrix(64)
def test_a_run_under_nohup_ignores_the_hangup(tmp_path, data_dir):
    """SIGHUP to a run started with nohup, which ignores it -> the run goes on"""
    program = Program(data_dir, tmp_path / "out", **LONG, prepare=ignore_hangup)
    program.wait_for("iter 3:")
    program.send(signal.SIGHUP)
    seen = program.text().count("\niter ")
    program.wait_for(f"iter {seen + 5}:")
    assert "stopping after this micro-batch" not in program.text()
    program.send(signal.SIGTERM)
    assert program.wait()[0] == 143


def ignore_hangup():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


@pytest.mark.matrix(69)
def test_the_watchdog_ends_a_step_that_never_ends(tmp_path, data_dir):
    """a step that never ends, on one process (on several: test_distributed.py) -> ended after
    step_timeout with the stacks of all threads"""
    out = tmp_path / "out"
    began = time.monotonic()
    code, text = run_program(data_dir, out, **SAVES, step_timeout=0.5,
                             env={"FAULT": "before_opt@7=sleep"})
    assert code == 1 and "step_timeout: 0.5 s are over" in text and time.monotonic() - began < 20
    assert "in train_step" in text and 'faulty.py", line' in text
    assert load_checkpoint(out / "ckpt.pt")["iter_num"] in (3, 6)


@pytest.mark.ci
def test_the_watchdog_does_not_count_a_pause(tmp_path, data_dir):
    """SIGSTOP for longer than step_timeout, as Slurm suspends a job -> continues after SIGCONT"""
    program = Program(data_dir, tmp_path / "out", **LONG, step_timeout=0.5)
    program.wait_for("iter 20:")
    program.send(signal.SIGSTOP)
    time.sleep(1.5)
    program.send(signal.SIGCONT)
    time.sleep(1)
    program.send(signal.SIGTERM)
    assert program.wait()[0] == 143


@pytest.mark.ci
@pytest.mark.matrix(69)
def test_the_watchdog_spares_slow_evaluations(tmp_path, data_dir, undisturbed):
    """evaluations and saves that take longer than step_timeout (up to ten times) -> not ended"""
    out = tmp_path / "out"
    code, text = run_program(data_dir, out, prepare=slow_evaluation, step_timeout=0.5)
    assert code == 0, text
    assert_same(undisturbed, out)


def slow_evaluation():
    from train import train as training
    real = training.evaluate_loader

    def slowly(*args, **how):
        time.sleep(0.6)
        return real(*args, **how)
    training.evaluate_loader = slowly


@pytest.mark.matrix(63)
@pytest.mark.slow
def test_a_stop_in_the_first_compile_is_heard(tmp_path, data_dir):
    """SIGTERM while torch.compile compiles the second step (the first one is not compiled on a CPU)
    -> exit 143 with a checkpoint"""
    out = tmp_path / "out"
    program = Program(data_dir, out, compile="true", **LONG)
    program.wait_for("iter 0:")
    time.sleep(1)
    assert "iter 1:" not in program.text()
    program.send(signal.SIGTERM)
    assert program.wait(300)[0] == 143 and load_checkpoint(out / "ckpt.pt")["iter_num"] in (1, 2)
