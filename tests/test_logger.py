"""What a run tells: lines, files, the live line, and that no failure of these stops training."""

import errno
import importlib.metadata
import io
import json
import math
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml

from train.base.console import Console, LineFile, compact, duration
from train.base.environment import environment, git_state
from train.logger import (
    Logger,
    drop_lines_from,
    format_line,
    progress_line,
    to_json,
)

REPO = pathlib.Path(__file__).resolve().parent.parent
STEP = dict(iter=120, max_iters=5000, tokens=3_964_928, loss=3.2104, lr=0.00036, grad_norm=0.83,
            time_ms=48.7, tokens_per_sec=672_400.0, mfu=0.412, eta_s=250.0)
EVAL = dict(iter=200, tokens=6_553_600, train_loss=3.1022, val_loss=3.1954, val_ppl=24.42,
            val_bpb=1.104)
# A run as a program of its own: argv has out_dir and the number of steps.
PROGRAM = """
import sys
from train.logger import Logger
out, n = sys.argv[1], int(sys.argv[2])
with Logger(out) as log:
    log.start(0)
    log.info("hello")
    log.warn("look out")
    for k in range(n):
        log.step(dict(iter=k, max_iters=n, tokens=k, loss=2.5, lr=1e-3, grad_norm=1.0, time_ms=1.0,
                      tokens_per_sec=1000.0, mfu=None, eta_s=3.0))
    log.evaluation(dict(iter=n, tokens=n, val_loss=2.0, val_ppl=7.4, val_bpb=None))
    log.samples(n, "Καλημέρα")
print(end="", flush=True) if len(sys.argv) < 4 else print(sys.argv[3], flush=True)
"""


def records(out):
    def refuse(name):
        raise AssertionError(f"{name} is not strict JSON")
    with open(out / "metrics.jsonl") as f:
        return [json.loads(line, parse_constant=refuse) for line in f]


def step(k, **changes):
    return STEP | dict(iter=k) | changes


def program(out, n, shell=None, **env):
    """Run PROGRAM; its completed process."""
    os.makedirs(out, exist_ok=True)
    (out / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(out / "program.py"), str(out), str(n)]
    environment = os.environ | {"PYTHONPATH": str(REPO)} | env
    return subprocess.run(shell or command, cwd=REPO, env=environment, capture_output=True,
                          encoding="utf-8", timeout=60)


def step_line(record):
    return format_line(f"iter {record['iter']}", record)


def evaluation_line(record):
    return format_line(f"step {record['iter']}", record)


def test_lines_have_the_documented_form():
    assert step_line(STEP) == ("iter 120: loss 3.2104, time 48.7ms, lr 0.000360, norm 0.83, "
                               "672k tok/s, mfu 41.2%, eta 0:04:10")
    assert step_line(STEP | dict(mfu=None, eta_s=None)).endswith("norm 0.83, 672k tok/s")
    assert "loss nan" in step_line(STEP | dict(loss=math.nan))
    assert "lr 3.00e-07," in step_line(STEP | dict(lr=3e-7))
    assert [step_line(dict(iter=0, lr=lr)) for lr in (1e-5, 9.99e-6, 0.0)] == [
        "iter 0: lr 0.000010", "iter 0: lr 9.99e-06", "iter 0: lr 0.000000"]
    assert step_line(dict(iter=3, tokens_per_sec=50.0, unit="row", f1=0.25, n=3)) == (
        "iter 3: 50 row/s, f1 0.2500")
    assert evaluation_line(EVAL) == ("step 200: train loss 3.1022, val loss 3.1954, ppl 24.42, "
                                     "bpb 1.104")
    assert evaluation_line(EVAL | dict(train_loss=None, val_bpb=None, val_accuracy=0.5)) == (
        "step 200: val loss 3.1954, ppl 24.42, accuracy 0.5000")
    assert evaluation_line(EVAL | dict(epoch=1.2345, lr=0.00123, tokens=2.0)) == (
        "step 200: epoch 1.23, train loss 3.1022, val loss 3.1954, ppl 24.42, bpb 1.104, "
        "lr 0.001230")
    assert evaluation_line({"iter": 1, "val_f1_{x}": 0.5}) == "step 1: f1 {x} 0.5000"


@pytest.mark.parametrize("n, text", [
    (950, "950"), (999.4, "999"), (999.6, "1k"), (12_345, "12.3k"), (672_400, "672k"),
    (999_600, "1M"), (1_250_000, "1.25M"), (3.21, "3.21"), (0, "0"), (2.5e9, "2.5B"),
    (999.5, "1k"), (999_499, "999k"), (999_500, "1M"), (3e12, "3T"), (9.9e15, "9.9e+03T"),
    (-2_500, "-2.5k"), (999.4999e9, "999B")])
def test_compact(n, text):
    assert compact(n) == text


def test_duration():
    assert duration(-11.0) == "0:00:00"  # a profile goes on after max_iters
    assert [duration(s) for s in (0.4, 59.6, 3725, 2 * 86400 + 10800)] == [
        "0:00:00", "0:01:00", "1:02:05", "2 days, 3:00:00"]
    assert [duration(s) for s in (3599, 86399.4, 86399.6, 86461)] == [
        "0:59:59", "23:59:59", "1 day, 0:00:00", "1 day, 0:01:01"]
    assert duration(1e300).startswith("115740740 days")


def test_files_of_a_run(tmp_path, capsys):
    with Logger(tmp_path) as log:
        log.info("two\nlines")
        log.step(step(0, memory_mib=np.int64(7), loss=math.nan, parts=[math.inf, 1]))
        log.evaluation(EVAL)
        # Read while the run goes on: every line is already there.
        first, second = records(tmp_path)
    assert list(first)[:9] == ["iter", "tokens", "loss", "lr", "grad_norm", "time_ms",
                               "tokens_per_sec", "mfu", "memory_mib"]
    assert first["loss"] == "nan" and first["memory_mib"] == 7 and first["parts"] == ["inf", 1]
    assert "max_iters" not in first and "eta_s" not in first
    assert second == EVAL
    out = capsys.readouterr().out.splitlines()
    assert out[:2] == ["two", "lines"] and out[2].startswith("iter 0: loss nan, ")
    written = (tmp_path / "train.log").read_text().splitlines()
    stamp = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")
    assert [stamp.sub("", line) for line in written] == out
    assert written[0] != out[0]


def test_loss_is_stored_exactly(tmp_path):
    loss = float(np.float32(3.14159))
    with Logger(tmp_path) as log:
        log.step(step(0, loss=loss))
    assert records(tmp_path)[0]["loss"] == loss


@pytest.mark.parametrize("evaluated, evaluations", [(False, [0]), (True, [0, 5])])
def test_no_step_twice_after_a_resume(tmp_path, evaluated, evaluations):
    def go(log, first, last):
        for k in range(first, last):
            if k % 5 == 0 and not (evaluated and k == first == 5):
                log.evaluation(EVAL | dict(iter=k))
            log.step(step(k))
    with Logger(tmp_path) as log:
        go(log, 0, 9)
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"iter": 3, "loss"\n{"iter": 4, "lo')  # torn by a crash
    with Logger(tmp_path) as log:
        log.start(5, evaluated)
        kept = records(tmp_path)
        assert [r["iter"] for r in kept if "val_loss" in r] == evaluations
        assert [r["iter"] for r in kept if "loss" in r] == [0, 1, 2, 3, 4]
        go(log, 5, 9)
    after = records(tmp_path)
    assert [r["iter"] for r in after if "loss" in r] == list(range(9))
    assert [r["iter"] for r in after if "val_loss" in r] == [0, 5]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_line_without_newline_is_torn(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iter": 1, "loss": 2.0}\n{"iter": 2, "loss": 2.0}')
    drop_lines_from(path, 10)
    assert [r["iter"] for r in records(tmp_path)] == [1]


def test_a_fresh_start_keeps_numbers_of_a_lost_run_apart(tmp_path):
    for loss in (1.0, 2.0):
        with Logger(tmp_path) as log:
            log.start(0)
            log.step(step(0, loss=loss))
    assert [r["loss"] for r in records(tmp_path)] == [2.0]
    assert json.loads((tmp_path / "metrics.jsonl.old").read_text())["loss"] == 1.0


def test_other_ranks_are_silent(tmp_path, capsys):
    with Logger(tmp_path, main=False) as log:
        log.start(5)
        log.info("a")
        log.warn("b")
        log.step(STEP)
        log.evaluation(EVAL)
        log.samples(1, "c")
        log.start(2)
        log.plot()
    assert capsys.readouterr() == ("", "")
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
def test_a_closed_pipe_does_not_stop_the_run(tmp_path):
    program(tmp_path, 1)
    # "bye" is printed past the logger, to the closed pipe.
    command = f"{sys.executable} {tmp_path}/program.py {tmp_path} 20000 bye; echo code $? >&2"
    done = program(tmp_path, 1, ["bash", "-c", f"( {command} ) | head -2"])
    assert done.stdout.splitlines() == ["hello", "warning: look out"]
    assert done.stderr == "code 0\n"
    assert len(records(tmp_path)) == 20001
    assert "iter 19999: " in (tmp_path / "train.log").read_text()


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")
def test_a_closed_stream_costs_no_file_per_line():
    console = Console(io.StringIO())
    console.stream.close()
    n_files = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        console.show("line")
    assert len(os.listdir("/proc/self/fd")) == n_files


def test_no_standard_output_at_all(tmp_path):
    if os.name != "nt":
        command = f"{sys.executable} {tmp_path}/program.py {tmp_path} 2 >&-"
        program(tmp_path, 1)
        assert program(tmp_path, 1, ["bash", "-c", command]).returncode == 0
        assert len(records(tmp_path)) == 3


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_warns_once_and_training_goes_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("train.base.console.open_no_follow",
                        lambda path, mode: open("/dev/full", mode, buffering=0))
    with Logger(tmp_path) as log:
        for k in range(3):
            log.step(step(k))
    out, err = capsys.readouterr()
    assert out.count("iter ") == 3
    assert err.count("metrics.jsonl cannot be written") == 1 == err.count("train.log cannot be")
    assert "No space left" in err


def test_a_line_that_the_disk_took_half_of(tmp_path):
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Logger(tmp_path) as log:
        log.step(step(0))
        try:
            half = os.path.getsize(tmp_path / "metrics.jsonl") * 3 // 2
            resource.setrlimit(resource.RLIMIT_FSIZE, (half, limits[1]))
            log.store(step(1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        log.step(step(2))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 3 and not lines[1].endswith("}")
    drop_lines_from(tmp_path / "metrics.jsonl", 10)
    assert [r["iter"] for r in records(tmp_path)] == [0, 2]


def test_a_file_that_was_deleted_is_written_again(tmp_path):
    file = LineFile(tmp_path / "a.log")
    file.write("one")
    (tmp_path / "a.log").unlink()
    file.write("two")
    file.close()
    assert (tmp_path / "a.log").read_text() == "two\n"


def test_a_file_whose_folder_was_moved(tmp_path):
    """The moved file gets the lines until the folder exists again, as a save creates it."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    file = LineFile(old / "a.log")
    file.write("one")
    old.rename(new)
    file.write("two")
    old.mkdir()
    file.write("three")
    file.close()
    assert (new / "a.log").read_text() == "one\ntwo\n"
    assert (old / "a.log").read_text() == "three\n"


def test_a_stale_handle_costs_one_line(tmp_path, capsys, monkeypatch):
    """A file on a network file system, whose handle became stale: the run goes on."""
    file = LineFile(tmp_path / "a.log")
    file.write("one")
    with monkeypatch.context() as m:
        m.setattr(os, "fstat", mock_stale)
        file.write("two")
    file.write("three")
    file.close()
    assert (tmp_path / "a.log").read_text() == "one\nthree\n"
    assert "the run continues" in capsys.readouterr().err


def mock_stale(fd):
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def test_files_that_cannot_be_opened(tmp_path, capsys):
    for name in ("metrics.jsonl", "train.log", "samples.txt", "loss.svg"):
        (tmp_path / name / "in the way").mkdir(parents=True)
    with Logger(tmp_path) as log:
        log.start(3)
        for k in range(3, 5):
            log.step(step(k))
            log.samples(k, "text")
        log.plot()
    out, err = capsys.readouterr()
    assert out.count("iter ") == 2 and "loss.svg could not be drawn" in out
    assert err.count("cannot be written") == 3
    assert not list(tmp_path.glob("*.tmp"))


def test_text_that_a_console_cannot_show(tmp_path):
    done = program(tmp_path, 1, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "sample: ????????" in done.stdout
    assert "Καλημέρα" in (tmp_path / "samples.txt").read_text(encoding="utf-8")


def test_samples_cannot_steer_the_terminal(tmp_path, capsys):
    with Logger(tmp_path) as log:
        log.samples(7, "a\x1b[2Jb\nc " + "x" * 300)
    out = capsys.readouterr().out
    assert out.startswith(r"sample: a\x1b[2Jb c xxx") and out.endswith("...\n") and len(out) < 200
    assert (tmp_path / "samples.txt").read_text().startswith("=== iter 7 ===\na\x1b[2Jb\nc xxx")
    with Logger(tmp_path) as log:  # the last one is shown whole
        log.samples(9, "a\x1b[2Jb\nc " + "x" * 300, whole=True)
    assert capsys.readouterr().out == f"--- sample\na\\x1b[2Jb\nc {'x' * 300}\n---\n"


def on_terminal(out, n, columns=80, **env):
    """What PROGRAM writes to a terminal of that width."""
    pty = pytest.importorskip("pty")
    import fcntl
    import struct
    import termios
    program(out, 0)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS")}
    environment |= {"PYTHONPATH": str(REPO), "TERM": "xterm", "PYTHONIOENCODING": "utf-8"} | env
    command = [sys.executable, str(out / "program.py"), str(out), str(n)]
    process = subprocess.Popen(command, cwd=REPO, env=environment, stdin=slave, stdout=slave,
                               stderr=slave)
    os.close(slave)
    text = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # Linux's way to say that the other end is closed
            break
        if not part:
            break
        text += part
    os.close(master)
    assert process.wait() == 0
    return text.decode("utf-8").replace("\r\n", "\n")


def screen(text):
    """The lines that remain on a terminal, which knows \\r and 'clear to the end of the line'."""
    lines = [""]
    for part in re.split(r"(\n|\r|\x1b\[K|\x1b\[\d*m)", text):
        if part == "\n":
            lines.append("")
        elif part == "\r":
            lines[-1] = ""
        elif not part.startswith("\x1b"):
            lines[-1] += part
    return lines


def test_live_line_on_a_terminal(tmp_path):
    text = on_terminal(tmp_path, 4)
    bars = re.findall(r"\r\x1b\[K([ \d]{3}%\|[^\r\n]*)", text)
    assert [b[:5] for b in bars[:4]] == [" 25%|", " 50%|", " 75%|", "100%|"]
    assert bars[1] == " 50%|#####     | 2/4: loss 2.5000, 1k tok/s, eta 0:00:03"
    assert max(map(len, bars)) <= 79
    assert "\x1b[33mwarning: look out\x1b[0m" in text
    assert screen(text) == ["hello", "warning: look out", "step 4: val loss 2.0000, ppl 7.40",
                            "sample: Καλημέρα", ""]  # the live line is gone at the end
    assert "iter 3: loss" in (tmp_path / "train.log").read_text()


def test_the_progress_of_an_evaluation_ends_with_it(tmp_path, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Logger(tmp_path) as log:
        log.activity("evaluating, batch 1 of 2")
        assert screen(terminal.getvalue()) == ["evaluating, batch 1 of 2"]
        log.evaluation(EVAL)
        line, rest = screen(terminal.getvalue())
    assert line.startswith("step 200: train loss 3.1022") and not rest


@pytest.mark.parametrize("columns", [12, 40])
def test_live_line_fits_any_width(tmp_path, columns):
    bars = re.findall(r"\r\x1b\[K([ \d]{3}%\|[^\r\n]*)", on_terminal(tmp_path, 2, columns))
    assert len(bars) >= 2 and max(map(len, bars)) < columns


def test_no_color_and_dumb_terminals(tmp_path):
    text = on_terminal(tmp_path, 2, NO_COLOR="1")
    assert "\x1b[33m" not in text and "\r\x1b[K" in text
    text = on_terminal(tmp_path, 2, TERM="dumb")
    assert "\x1b" not in text and "\niter 1: loss 2.5000, time 1.0ms" in text


def test_plot_writes_a_picture(tmp_path):
    with Logger(tmp_path) as log:
        for k in range(5):
            log.step(step(k))
        log.evaluation(EVAL)
        log.plot()
    assert ElementTree.parse(tmp_path / "loss.svg").getroot().tag.endswith("svg")


def test_an_evaluation_alone_leaves_the_files(tmp_path, capsys):
    with Logger(tmp_path, config=dict(eval_only=True)) as log:
        log.evaluation(EVAL)
        log.samples(200, "some text")
        log.plot()
    assert {p.name for p in tmp_path.iterdir() if p.stat().st_size} == {"train.log"}
    assert "sample: some text" in capsys.readouterr().out


def test_status_of_trackers(tmp_path):
    class Spy:
        calls = []

        def __getattr__(self, name):
            return lambda *args: self.calls.append((name, *args))
    log = Logger(tmp_path)
    log.trackers = Spy()
    log.step(STEP)
    log.close("stopped")
    names = [c[0] for c in Spy.calls]
    assert names == ["call", "call"]
    assert [c[1] for c in Spy.calls] == ["record", "close"] and Spy.calls[-1][2] == "stopped"


def test_characters_above_the_first_plane_are_read_again_by_yaml():
    text = "hi \N{GRINNING FACE}"
    assert yaml.safe_load(to_json({"a": [text]})) == {"a": [text]}


def test_training_args_and_yaml(tmp_path):
    config = dict(seed=1, rate=math.inf)
    with Logger(tmp_path, config=config, system_info=dict(world_size=2)) as log:
        log.describe_run("b: 1\na: ü\n")
    args = json.loads((tmp_path / "training_args.json").read_text())
    assert args["arguments"] == dict(seed=1, rate="inf") and args["world_size"] == 2
    assert args["argv"] == sys.argv and args["pid"] == os.getpid() and args["host"]
    assert set(args["versions"]) >= {"python", "torch", "numpy"} and "python" in args["command"]
    assert {"git_commit", "git_dirty", "platform", "time"} <= set(args)
    assert (tmp_path / "config.yaml").read_text(encoding="utf-8") == "b: 1\na: ü\n"
    assert not list(tmp_path.glob("*.tmp"))


def test_a_name_that_git_writes_in_other_bytes_does_not_end_the_run(monkeypatch):
    """core.quotepath is off, and an untracked file has a name that is not UTF-8."""
    monkeypatch.setattr("subprocess.check_output", lambda *_, **__: b"?? \xff".decode())
    assert git_state() == (None, None)


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_git_commit_and_dirty_flag(tmp_path):
    """In a repository of its own, around it, and without git."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | {
        "GIT_CONFIG_GLOBAL": os.devnull}

    def state(repo, **changes):
        code = "from train.base.environment import git_state; print(git_state())"
        done = subprocess.run([sys.executable, "-B", "-c", code], cwd=repo, env=env | changes,
                              capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def copy_to(repo):
        (repo / "train/base").mkdir(parents=True)
        for name in ("__init__.py", "base/environment.py"):
            shutil.copy(REPO / "train" / name, repo / "train" / name)

    def git(*args):
        return subprocess.check_output(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *args], cwd=tmp_path, env=env,
            text=True).strip()
    copy_to(tmp_path)
    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "one")
    assert state(tmp_path) == str((git("rev-parse", "HEAD"), False))
    (tmp_path / "train/base/environment.py").open("a").write("# changed\n")
    assert state(tmp_path) == str((git("rev-parse", "HEAD"), True))
    assert state(tmp_path, PATH="") == "(None, None)"


def test_versions_are_those_of_each_package():
    assert environment()["versions"] == {"python": platform.python_version()} | {
        name: importlib.metadata.version(name) for name in ("torch", "numpy", "tiktoken", "pyyaml")}


def test_none_of_it_imports_torch():
    code = ("import sys, train.logger, train.options.loss_svg, train.options.trackers; "
            "assert not {'torch', 'wandb', 'mlflow', 'tensorboard'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], cwd=REPO, check=True)


def test_lines_of_two_threads_do_not_mix():
    """The loop's and those of the thread that saves."""
    class Slow(io.StringIO):
        def write(self, text):
            for part in text[:3], text[3:]:
                super().write(part)
                time.sleep(0.001)
    console = Console(Slow())
    threads = [threading.Thread(target=lambda c=c: [console.show(c * 6) for _ in range(5)])
               for c in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(console.stream.getvalue().split()) == ["aaaaaa"] * 5 + ["bbbbbb"] * 5


def test_the_progress_line(monkeypatch):
    """Steps that are done, of all; cut to the width of the terminal."""
    monkeypatch.setenv("COLUMNS", "200")
    assert progress_line(STEP | dict(iter=2499)).startswith(" 50%|#####     | 2500/5000: loss 3.2")
    assert progress_line(STEP | dict(iter=4999)).startswith("100%|##########| 5000/5000: ")
    assert progress_line(STEP | dict(iter=0, max_iters=0)).startswith("100%|##########| 1/1: ")
    monkeypatch.setenv("COLUMNS", "40")
    assert len(progress_line(STEP)) == 39
