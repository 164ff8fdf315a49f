"""kill -9 before a file operation of a run, one operation after the other: rename, link, unlink,
mkdir, fsync, open for writing."""

import builtins
import os
import shutil
import signal
import threading

import pytest
from runs import assert_same, go, run_program, temporary_files

OPERATIONS = ("fsync", "link", "mkdir", "rename", "replace", "rmdir", "unlink")
RUN = dict(max_iters=16)  # saves at 5, 10, 15 and 16
CASES = {
    "default": {},
    "all files": dict(keep_last=3, save_precision="bfloat16", ema=0.9),
    "epochs": dict(save_epochs=0.01, eval_epochs=0.004),
    "sharded": dict(checkpoint_format="sharded", keep_last=3),
}


def die_at_an_operation():
    """Kill this process before file operation number DIE_AT; each one is a line of the file
    OPERATIONS."""
    real_open, done, lock = builtins.open, [], threading.Lock()

    def before(name, path):
        with lock:  # two threads work with files
            done.append(name)
            with real_open(os.environ["OPERATIONS"], "a") as f:
                f.write(f"{name} {path}\n")
            if len(done) > int(os.environ["DIE_AT"]):
                os.kill(os.getpid(), signal.SIGKILL)

    def counted(name, real):
        def call(path, *args, **kwargs):
            before(name, path)
            return real(path, *args, **kwargs)
        return call

    def counted_open(path, mode="r", *args, **kwargs):
        if set(mode) & set("wax+"):
            before("open", path)
        return real_open(path, mode, *args, **kwargs)
    builtins.open = counted_open
    for name in OPERATIONS:
        setattr(os, name, counted(name, getattr(os, name)))


def killed(data_dir, out, number, **changes):
    """The file operations of the program until it is killed before operation `number`."""
    file = out.with_suffix(".operations")
    code, output = run_program(data_dir, out, env=dict(DIE_AT=number, OPERATIONS=file),
                               prepare=die_at_an_operation, **changes)
    operations = file.read_text().splitlines()
    assert code == (-9 if len(operations) > number else 0), output
    return operations


def points(step):
    """Every operation in a campaign; in the suite one of `step`, whose last is after the end."""
    return pytest.mark.parametrize("step", [step, pytest.param(1, marks=pytest.mark.slow)])


@pytest.mark.ci
@pytest.mark.matrix(130)
@points(80)
@pytest.mark.parametrize("case", CASES)
def test_killed_before_any_file_operation_the_end_is_exact(data_dir, tmp_path, case, step):
    """kill -9 before a file operation, one run for each (in the suite for each 80th): the first
    save, a new best, numbered, sharded and averaged checkpoints -> the same command ends like the
    undisturbed run, no temporary file is left"""
    changes = RUN | CASES[case]
    go(data_dir, tmp_path / "whole", **changes)
    total = len(killed(data_dir, tmp_path / "all", 10**6, **changes))
    assert total > 90
    for number in range(0, total + step, step):
        out = tmp_path / f"{number}"
        killed(data_dir, out, number, **changes)
        go(data_dir, out, **changes)
        assert_same(tmp_path / "whole", out)
        assert not temporary_files(out)
        shutil.rmtree(out)


@pytest.mark.ci
@pytest.mark.matrix(130)
@points(80)
@pytest.mark.parametrize("how", ["never", "file", "sharded file"])
def test_killed_while_it_replaces_a_run_nothing_of_that_is_lost(data_dir, tmp_path, how, step):
    """kill -9 before a file operation of a run in the folder of a finished one, with --resume never
    or from an earlier checkpoint -> the same command ends like the undisturbed run, and each
    checkpoint of the finished run that this one keeps is there"""
    first = tmp_path / "first"
    save = dict(keep_last=3) | (CASES["sharded"] if how == "sharded file" else {})
    go(data_dir, first, **RUN, **save)

    def settings(out):
        resume = "never" if how == "never" else str(out / "ckpt_0000010.pt")
        return save | dict(max_iters=14, seed=5 if how == "never" else 1337, resume=resume)

    def contents(folder):
        return {path.read_bytes() for path in folder.rglob("ckpt*.pt")}
    shutil.copytree(first, tmp_path / "whole")
    go(data_dir, tmp_path / "whole", **settings(tmp_path / "whole"))
    kept = contents(first) & contents(tmp_path / "whole")
    assert len(kept) >= 2
    shutil.copytree(first, tmp_path / "all")
    total = len(killed(data_dir, tmp_path / "all", 10**6, **settings(tmp_path / "all")))
    for number in range(0, total + step, step):
        out = tmp_path / f"{number}"
        shutil.copytree(first, out)
        killed(data_dir, out, number, **settings(out))
        go(data_dir, out, **settings(out))
        assert_same(tmp_path / "whole", out)
        assert kept <= contents(out) and not temporary_files(out)
        shutil.rmtree(out)
