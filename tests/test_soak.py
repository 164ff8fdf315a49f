"""The long campaigns: python -m pytest -m slow tests/test_soak.py -s

Counts are for a machine of two cores; smaller ones through the environment: SOAK_KILLS (200),
SOAK_ROUNDS (30), SOAK_SAVES (2000), SOAK_RUNS (4), SOAK_SEED (0).
"""

import os
import random
import resource
import signal
import subprocess
import time

import pytest
import torch
from conftest import start
from runs import (
    SMALL,
    Program,
    assert_same,
    assert_same_file,
    go,
    metrics,
    temporary_files,
    tensors,
)

from train.base.run_folder import RunFolder
from train.checkpoint import load_checkpoint

pytestmark = pytest.mark.slow


def count(name, default):
    return int(os.environ.get(f"SOAK_{name}", default))


def say(text):
    print(f"\nsoak: {text}", flush=True)


class Warnings(list):
    """Stands for the log of a run; a list of its warnings."""

    def warn(self, text):
        self.append(text)

    def info(self, text):
        pass


@pytest.fixture
def draw():
    return random.Random(count("SEED", 0))


# -----------------------------------------------------------------------------
# kill -9

LONG = dict(max_iters=400, lr_decay_iters=400, save_interval=1, eval_interval=20, dropout=0.1,
            n_embd=32, n_hidden=64, keep_last=2)


@pytest.mark.matrix(6)
def test_killed_two_hundred_times_the_end_is_exact(tmp_path, data_dir, draw):
    """kill -9 at 200 random wall-clock times in runs that save every step -> 0 unreadable
    checkpoints, and the end of every run is that of the undisturbed one, bit for bit"""
    go(data_dir, tmp_path / "whole", **LONG)
    kills, early, runs, points, began = 0, 0, 0, [], time.monotonic()
    while kills < count("KILLS", 200):
        runs += 1
        out, ended = tmp_path / str(runs), False
        while not ended:
            program = Program(data_dir, out, **LONG)
            program.process.join(0.15 + draw.random() * 1.2)
            ended = not program.process.is_alive() or kills == count("KILLS", 200)
            if ended:
                assert program.wait(120)[0] == 0, program.text()
                continue
            program.kill()
            kills += 1
            if not (out / "ckpt.pt").exists():
                early += 1
                continue
            points.append(load_checkpoint(out / "ckpt.pt")["iter_num"])
            for name in ("ckpt_prev.pt", "ckpt_best.pt"):
                if (out / name).exists():
                    load_checkpoint(out / name)
        assert_same(tmp_path / "whole", out)
        assert not temporary_files(out)
    say(f"{kills} kills in {runs} runs: 0 of {len(points)} checkpoints unreadable ({early} kills "
        f"before there was one), every end exact; {time.monotonic() - began:.0f} s")


def children(pid):
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True)
    return [int(p) for p in found.stdout.split()]


@pytest.mark.matrix(68, 73)
def test_killed_under_torchrun_every_end_is_exact(tmp_path, data_dir, draw):
    """30 rounds: torchrun with two ranks and --max-restarts, a rank killed or the signal kill -9 at
    a random time, until it ends -> every round ends exact, every step logged once"""
    changes = LONG | dict(max_iters=150, lr_decay_iters=150, save_interval=5)
    args = [f"--{k}={v}" for k, v in (SMALL | changes | dict(data_dir=data_dir)).items()]
    torchrun = ["--max-restarts=20", "--monitor-interval=0.1"]
    process = start(*args, f"--out_dir={tmp_path / 'whole'}", ranks=2, torchrun=torchrun)
    text, began, kills = process.communicate(timeout=300)[0], time.monotonic(), 0
    assert process.returncode == 0, text
    for i in range(count("ROUNDS", 30)):
        out = tmp_path / str(i)
        process = start(*args, f"--out_dir={out}", ranks=2, torchrun=torchrun)
        for _ in range(draw.randint(1, 3)):
            time.sleep(3 + draw.random() * 4)
            if victims := children(process.pid):
                os.kill(draw.choice(victims), signal.SIGKILL)
                kills += 1
        text = process.communicate(timeout=300)[0]
        assert process.returncode == 0, text[-5000:]
        assert_same_file(tmp_path / "whole" / "ckpt.pt", out / "ckpt.pt")
        steps = [m["iter"] for m in metrics(out) if "loss" in m]
        assert steps == list(range(150))
    say(f"{kills} kills in {count('ROUNDS', 30)} rounds under torchrun: every end exact, every "
        f"step logged once; {time.monotonic() - began:.0f} s")


# -----------------------------------------------------------------------------
# load

def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize() / 2**20


@pytest.mark.matrix(119)
def test_two_thousand_saves_leave_nothing_behind(tmp_path):
    """2,000 saves in the background with best and numbered names -> open files and files in the
    folder constant, resident memory within 20 MiB"""
    folder, log = RunFolder(str(tmp_path), keep_last=3), Warnings()
    state, seen = {"model": {"w": torch.ones(250_000)}, "optimizer": {}}, []
    saves, began = count("SAVES", 2000), time.monotonic()
    for i in range(saves):
        state["model"]["w"].fill_(i)
        folder.save(state | {"iter_num": i}, True, True, log)
        if i >= saves // 10 and i % 20 == 0:
            folder.wait()
            seen.append((len(os.listdir("/proc/self/fd")), len(list(tmp_path.iterdir())),
                         resident()))
    folder.wait()
    fds, files, memory = zip(*seen, strict=True)
    assert not log and len(set(fds)) == 1 and len(set(files)) == 1
    assert max(memory) - min(memory) < 20
    assert load_checkpoint(tmp_path / "ckpt.pt")["model"]["w"][0] == saves - 1
    say(f"{saves} saves: {fds[0]} open files, {files[0]} files in the folder, resident memory "
        f"{min(memory):.0f} to {max(memory):.0f} MiB; {time.monotonic() - began:.0f} s")


def slow_disk():
    from train.base.tensors import HashingFile
    real = HashingFile.write

    def write(self, data):
        time.sleep(0.001)  # a save is about 100 writes
        return real(self, data)
    HashingFile.write = write


@pytest.mark.matrix(116, 117, 118)
def test_runs_at_once_end_as_alone(tmp_path, data_dir):
    """4 runs at once beside a process that burns a CPU, on a slow disk, saving more often than a
    save takes -> all end, each exactly as alone, each with memory as alone"""
    changes = LONG | dict(max_iters=200, lr_decay_iters=200)
    began, n = time.monotonic(), count("RUNS", 4)
    go(data_dir, tmp_path / "whole", **changes)
    with subprocess.Popen(["sh", "-c", "while :; do :; done"]) as hog:
        try:
            runs = [Program(data_dir, tmp_path / str(i), prepare=slow_disk, **changes)
                    for i in range(n)]
            codes = [program.wait(600)[0] for program in runs]
        finally:
            hog.kill()
    assert codes == [0] * n
    for i in range(n):
        assert_same(tmp_path / "whole", tmp_path / str(i))
    assert tensors(tmp_path / "whole" / "ckpt.pt")[1]["iter_num"] == 200
    say(f"{n} runs at once with a CPU hog and a slow disk: all exact; "
        f"{time.monotonic() - began:.0f} s")
