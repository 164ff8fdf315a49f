"""Saving: a checkpoint that was once complete stays readable, whatever happens to the next one.

Matrix cases 1 to 18, 118 and 119 (short; the long campaigns are in test_soak.py). A docstring of a
test says "fault -> expected outcome", for tests/MATRIX.md.
"""

import contextlib
import errno
import hashlib
import os
import random
import re
import shutil
import stat
import subprocess
import sys
import threading
import time
import types

import pytest
import torch
from conftest import REPO, full_disk
from runs import Program, assert_same, assert_same_file, go, metrics, run_program, temporary_files

from train import checkpoint
from train import train as training
from train.base import background, tensors
from train.base.errors import BadNumbers, CheckpointError, CollectiveExit, UserError
from train.base.files import lock_folder, set_direct
from train.base.run_folder import RunFolder, numbered_checkpoints, snapshot
from train.base.tensors import HashingFile
from train.checkpoint import load_checkpoint, save_checkpoint

POINTS = {1: "save_open", 2: "save_mid", 3: "save_before_fsync", 4: "save_before_replace",
          5: "save_after_replace"}


class Warnings(list):
    """Stands for the log of a run; a list of its warnings."""

    def warn(self, text):
        self.append(text)

    def info(self, text):
        pass


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, data_dir):
    """The run that all others must end like."""
    out = tmp_path_factory.mktemp("undisturbed")
    go(data_dir, out)
    return out


@pytest.mark.matrix(1, 2, 3, 4, 5)
@pytest.mark.parametrize("case", POINTS)
def test_killed_inside_a_save_the_old_or_the_new_one_loads(tmp_path, data_dir, undisturbed, case):
    """kill -9 at five points of the save at step 10 -> the old or the new checkpoint loads, resume
    is exact, no temporary file is left"""
    out = tmp_path / "out"
    code, _ = run_program(data_dir, out, env={"FAULT": f"{POINTS[case]}@10=kill9"})
    assert code == -9
    assert load_checkpoint(out / "ckpt.pt")["iter_num"] == (10 if case == 5 else 5)
    left = [name for name in temporary_files(out) if name.startswith("ckpt")]  # not a picture
    assert bool(left) == (case in (2, 3, 4))
    go(data_dir, out)
    assert_same(undisturbed, out)
    assert not temporary_files(out)


@pytest.mark.matrix(4)
@pytest.mark.parametrize("keep_last", [0, 2])
def test_killed_inside_the_first_save_its_other_names_are_used(tmp_path, data_dir, undisturbed,
                                                              keep_last):
    """kill -9 in the first save, when the file is ckpt_best.pt and not yet ckpt.pt -> it is used,
    resume is exact"""
    out = tmp_path / "out"
    code, _ = run_program(data_dir, out, env={"FAULT": "save_before_replace@5=kill9"},
                          keep_last=keep_last)
    assert code == -9
    assert (out / "ckpt_best.pt").exists() and not (out / "ckpt.pt").exists()
    go(data_dir, out, keep_last=keep_last)
    assert "falling back to" in (out / "train.log").read_text()
    assert_same(undisturbed, out)


@pytest.mark.matrix(4, 5)
def test_a_save_is_durable_before_it_is_visible(tmp_path, monkeypatch):
    """(a power cut, which no test can make) -> the order that survives one: the new file on disk,
    the old one renamed, the new one in its place, the folder on disk"""
    done, real = [], {n: getattr(os, n) for n in ("fsync", "replace")}

    def fsync(fd):
        done.append("sync folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "sync file")
        real["fsync"](fd)

    def replace(source, target):
        done.append(f"rename to {os.path.basename(target)}")
        real["replace"](source, target)
    save_checkpoint(str(tmp_path / "ckpt.pt"), {"model": {}})
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    save_checkpoint(str(tmp_path / "ckpt.pt"), {"model": {}})
    assert done == ["sync file", "rename to ckpt_prev.pt", "rename to ckpt.pt", "sync folder"]


@pytest.mark.matrix(6)
def test_killed_at_random_times_the_end_is_exact(tmp_path, data_dir, undisturbed):
    """kill -9 at random wall-clock times in a run saving every step, restarted until it ends (8
    kills; 200 in test_soak.py) -> no unreadable checkpoint, the end is exact"""
    out, draw = tmp_path / "out", random.Random(6)
    for _ in range(8):
        program = Program(data_dir, out, save_interval=1)
        program.wait_for("iter ")  # it begins, or goes on
        program.process.join(draw.random() * 0.1)
        program.kill()
        if (out / "ckpt.pt").exists():
            assert load_checkpoint(out / "ckpt.pt")["iter_num"] <= 20
    go(data_dir, out)
    assert_same(undisturbed, out)


@pytest.mark.matrix(7, 9)
@pytest.mark.parametrize("fault", ["enospc", "eio"])
def test_a_disk_full_or_broken_once_is_a_warning(tmp_path, data_dir, undisturbed, capsys, fault):
    """ENOSPC or EIO in the middle of a periodic save -> a warning, the old checkpoint intact,
    training goes on, and the next save works"""
    go(data_dir, tmp_path, f"save_mid@10={fault}")
    text = capsys.readouterr().out
    reason = os.strerror(getattr(errno, fault.upper()))
    assert f"warning: {tmp_path}/ckpt.pt could not be written" in text and reason in text
    assert "the previous checkpoint is intact, training continues" in text
    assert_same(undisturbed, tmp_path)
    assert not temporary_files(tmp_path)


def test_without_a_checkpoint_none_is_promised(tmp_path, data_dir, capsys):
    """ENOSPC in the first save, and in the last -> neither names an earlier checkpoint"""
    with pytest.raises(CollectiveExit) as stop:
        go(data_dir, tmp_path, "save_mid@5=enospc,save_mid@7=enospc", max_iters=7)
    assert re.search("No space left on device.*; training continues\n", capsys.readouterr().out)
    assert str(stop.value).endswith("; start the run again")


@pytest.mark.parametrize("fails_at, best", [(10, 8), (8, 12)])
def test_a_failed_save_does_not_forget_the_best_checkpoint(tmp_path, data_dir, monkeypatch,
                                                           fails_at, best):
    """Evaluations at 0, 4, ...: the one at 8 is best. A failed save at 10 changes nothing; after
    one at 8, the best that is left is written at 12"""
    losses = iter([9.0, 3.0, 1.0, 2.0, 2.5, 2.5])
    monkeypatch.setattr(training, "evaluate_validation", lambda *_: {"val_loss": next(losses)})
    go(data_dir, tmp_path, f"save_mid@{fails_at}=enospc", eval_interval=4, save_interval=5)
    assert load_checkpoint(tmp_path / "ckpt_best.pt")["iter_num"] == best


def test_a_resumed_run_does_not_expect_a_best_checkpoint_that_failed(tmp_path, data_dir,
                                                                     monkeypatch):
    """As above, and the run is killed after a later save -> the best that is left is written"""
    losses = iter([9.0, 3.0, 1.0, 2.0, 2.5, 2.5])
    monkeypatch.setattr(training, "evaluate_validation", lambda *_: {"val_loss": next(losses)})
    how = dict(eval_interval=4, save_interval=5)
    with pytest.raises(RuntimeError, match="fault at before_step"):
        go(data_dir, tmp_path, "save_mid@8=enospc,before_step@11=raise", **how)
    go(data_dir, tmp_path, **how)
    assert load_checkpoint(tmp_path / "ckpt_best.pt")["iter_num"] == 12


def test_a_run_that_goes_on_from_a_file_elsewhere_has_a_best_checkpoint(tmp_path, data_dir,
                                                                        monkeypatch):
    """Its own: that of the other folder is not in this one. The checkpoint from which it starts,
    until a later evaluation is better."""
    losses = iter([9.0, 3.0, 1.0, 2.0, 1.5, 2.5, 0.5])
    monkeypatch.setattr(training, "evaluate_validation", lambda *_: {"val_loss": next(losses)})
    go(data_dir, tmp_path / "a", eval_interval=4, max_iters=8)
    go(data_dir, tmp_path / "b", eval_interval=4, max_iters=20, resume=str(tmp_path / "a/ckpt.pt"))
    assert load_checkpoint(tmp_path / "b/ckpt_best.pt")["iter_num"] == 8
    go(data_dir, tmp_path / "b", eval_interval=4, max_iters=24)
    assert load_checkpoint(tmp_path / "b/ckpt_best.pt")["iter_num"] == 24


def test_a_run_whose_best_checkpoint_was_not_copied_has_one_again(tmp_path, data_dir, monkeypatch):
    """ckpt.pt alone in a new folder: the best that is left is written, though it is worse."""
    losses = iter([9.0, 3.0, 6.0, 5.0, 7.0, 8.0])
    monkeypatch.setattr(training, "evaluate_validation", lambda *_: {"val_loss": next(losses)})
    go(data_dir, tmp_path / "a", eval_interval=4, max_iters=8)
    (tmp_path / "b").mkdir()
    shutil.copy(tmp_path / "a/ckpt.pt", tmp_path / "b")
    go(data_dir, tmp_path / "b", eval_interval=4, max_iters=20)
    assert load_checkpoint(tmp_path / "b/ckpt_best.pt")["iter_num"] == 12


def test_a_run_that_goes_on_from_a_file_elsewhere_does_not_mix_with_another_run(
        tmp_path, data_dir, monkeypatch):
    """In a folder with another run: its files are moved, also ckpt_best.pt, and not replaced. So is
    a best checkpoint of this run that is not the best of the branch."""
    losses = iter([9.0, 5.0, 4.0, 8.0, 3.0, 1.0, 2.0, 3.5, 3.5])
    monkeypatch.setattr(training, "evaluate_validation", lambda *_: {"val_loss": next(losses)})
    keys = dict(eval_interval=4, keep_last=9)
    go(data_dir, tmp_path / "b", **keys, max_iters=8, seed=1)
    go(data_dir, tmp_path / "a", **keys, max_iters=12)
    a, b = tmp_path / "a", tmp_path / "b"
    go(data_dir, b, **keys, max_iters=16, resume=str(a / "ckpt_0000012.pt"))
    for name, seed in (("", 1337), ("old_1", 1)):
        files = [load_checkpoint(b / name / f"ckpt{n}.pt") for n in ("", "_prev", "_best")]
        numbered = [load_checkpoint(path) for path in (b / name).glob("ckpt_0*.pt")]
        assert {file["config"]["seed"] for file in files + numbered} == {seed}
        assert 8 in {file["iter_num"] for file in numbered} or not name
    assert [m["iter"] for m in metrics(b) if "loss" in m] == [12, 13, 14, 15]
    (a / "ckpt_best.pt").write_bytes((a / "ckpt_0000004.pt").read_bytes())
    go(data_dir, a, **keys, max_iters=16, resume=str(a / "ckpt_0000012.pt"))
    assert load_checkpoint(a / "ckpt_best.pt")["iter_num"] == 12


def test_the_best_checkpoint_of_an_earlier_version_stays_the_best(tmp_path, data_dir, monkeypatch):
    """progress had no loss_of_best"""
    losses = iter([9.0, 3.0, 6.0, 5.0])
    monkeypatch.setattr(training, "evaluate_validation", lambda *_: {"val_loss": next(losses)})
    go(data_dir, tmp_path, eval_interval=4, max_iters=8)
    for path in (tmp_path / "ckpt.pt", tmp_path / "ckpt_best.pt"):
        state = load_checkpoint(path)
        del state["progress"]["loss_of_best"]
        save_checkpoint(path, state)
    go(data_dir, tmp_path, eval_interval=4, max_iters=12, resume=str(tmp_path / "ckpt.pt"))
    assert load_checkpoint(tmp_path / "ckpt_best.pt")["iter_num"] == 4


@pytest.mark.matrix(7)
@pytest.mark.parametrize("room, n_values", [(8192, 100_000), (5_000_001, 2_000_000)])
def test_a_write_error_leaves_the_old_file(tmp_path, room, n_values):
    """a real write error, by RLIMIT_FSIZE, in the first block and in a later one -> save_checkpoint
    names file and reason, the old file and the folder are as before"""
    path, state = str(tmp_path / "ckpt.pt"), {"model": {"w": torch.zeros(1000)}}
    save_checkpoint(path, state)
    before = (tmp_path / "ckpt.pt").read_bytes()
    with full_disk(room), pytest.raises(CheckpointError,
                                        match="could not be written.*File too large"):
        save_checkpoint(path, {"model": {"w": torch.zeros(n_values)}})
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt.pt"]
    assert (tmp_path / "ckpt.pt").read_bytes() == before


@pytest.mark.parametrize("fault", ["", "refused", "short"])
@pytest.mark.parametrize("n_bytes", [0, 1, 4095, 4096, 4097, 3 * 4096, 40_000])
def test_whole_blocks_are_written_past_the_page_cache(tmp_path, monkeypatch, n_bytes, fault):
    """Where the system can. A file system that refuses a direct write, or a part of it, after two
    blocks gets the rest through the cache."""
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(tensors, "BLOCK_BYTES", 4096)
    direct, write = getattr(os, "O_DIRECT", 0), os.write
    writes = []  # (bytes, whether direct)

    def faulty_write(fd, data):
        is_direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & direct)
        writes.append((len(data), is_direct))
        if fault == "refused" and len(writes) == 3 and is_direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(fd, data[:1024] if fault == "short" and len(writes) == 3 else data)
    data = random.Random(0).randbytes(n_bytes)
    with open(tmp_path / "a", "wb") as f:
        set_direct(f, True)
        is_possible = bool(fcntl.fcntl(f, fcntl.F_GETFL) & direct)
        monkeypatch.setattr(os, "write", faulty_write)
        hashing = HashingFile(f)
        for start in range(0, n_bytes, 1500):
            assert hashing.write(data[start:start + 1500]) == len(data[start:start + 1500])
        assert hashing.finish() == hashlib.sha256(data).hexdigest()
    assert (tmp_path / "a").read_bytes() == data
    *blocks, rest = writes
    assert [n for n, _ in blocks] == [4096] * (n_bytes // 4096) and rest == (n_bytes % 4096, False)
    n_direct = min(len(blocks), 3) if fault else len(blocks)
    assert [d for _, d in blocks] == [is_possible and i < n_direct for i in range(len(blocks))]


@pytest.mark.matrix(8)
def test_a_disk_full_at_the_last_save_ends_with_the_reason(tmp_path, data_dir):
    """ENOSPC at the last save -> exit 1 with the reason, no traceback, the
    checkpoint before it intact; with room again the run ends exactly"""
    out = tmp_path / "out"
    code, text = run_program(data_dir, out, max_iters=12, env={"FAULT": "save_mid@12=enospc"})
    assert code == 1 and "Traceback" not in text
    assert "the last checkpoint could not be saved" in text and "No space left" in text
    assert load_checkpoint(out / "ckpt.pt")["iter_num"] == 10
    assert go(data_dir, out, max_iters=12)["iter_num"] == 12


def test_the_memory_of_a_snapshot_is_given_back_once_it_is_written(tmp_path):
    """In a process of its own, with malloc as a run on a CPU has it."""
    code = f"""if True:
        import torch, types
        from train.base.memory import keep_freed_memory, memory_resident
        from train.base.run_folder import RunFolder
        keep_freed_memory()
        state = dict(model={{str(i): torch.ones(1 << 18) for i in range(100)}}, optimizer={{}},
                     iter_num=1)
        log = types.SimpleNamespace(info=print, warn=print)
        folder = RunFolder({str(tmp_path)!r})
        folder.open()
        folder.save(state, False, False, log, last=True)
        before, seen = memory_resident(), []
        folder.start(lambda copy: seen.append(memory_resident()), state, log)
        folder.wait()
        after = memory_resident()
        folder.save_precision = "bfloat16"
        folder.save(state, False, False, log)
        folder.wait()
        print(*[(n - before) / 2**20 for n in (seen[0], after, memory_resident())])"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    during, after, exported = map(float, done.stdout.split("\n")[-2].split())
    # The weights in bfloat16 are 50 MB, and are converted one after the other.
    assert during > 95 and after < 5 and exported < 25, (done.stdout, done.stderr)


@pytest.mark.parametrize("n_threads", [1, 4])
def test_a_thread_beside_training_takes_a_small_share_of_the_machine(n_threads, monkeypatch):
    """pauses are in proportion to CPU time and threads, and end when somebody waits"""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    times = []

    def work():
        for _ in range(3):
            cpu = time.thread_time()
            while time.thread_time() < cpu + 0.02:
                pass
            start = time.perf_counter()
            background.give_way()
            times.append(time.perf_counter() - start)
    thread = background.BackgroundThread(work, n_threads=n_threads)
    thread.start()
    while len(times) < 2:
        time.sleep(0.001)
    thread.wait()
    assert not thread.is_alive() and times[2] < 0.1
    shares = [n_threads * 0.02 / (2 * (0.02 + t)) for t in times[:2]]  # of 2 cores
    assert 0 < shares[0] <= 0.03 and 0 < shares[1] <= 0.03
    thread = background.BackgroundThread(work)  # as beside a GPU
    thread.start()
    thread.join()
    work()  # no such thread
    monkeypatch.setattr(background, "MAX_SECONDS", 0.0)
    thread = background.BackgroundThread(work, n_threads=n_threads)
    thread.start()
    thread.join()
    assert len(times) == 12 and max(times[3:]) < 0.1


def test_a_save_gives_way_to_training_until_it_is_awaited(tmp_path, monkeypatch):
    monkeypatch.setattr(background, "MAX_SHARE", 1e-4)
    state = dict(model={"w": torch.randn(6 << 20)}, optimizer={}, iter_num=1)
    log = types.SimpleNamespace(info=print, warn=print)
    with contextlib.closing(RunFolder(str(tmp_path))) as folder:
        folder.open()
        folder.save(state, False, False, log)
        time.sleep(0.5)
        assert folder.thread.is_alive() and not (tmp_path / "ckpt.pt").exists()
        folder.wait()
    assert torch.equal(load_checkpoint(tmp_path / "ckpt.pt")["model"]["w"], state["model"]["w"])


def test_a_folder_is_locked_until_the_save_has_ended(tmp_path):
    """an error in the loop during a save -> the next process cannot start before it is written"""
    seen, log = [], types.SimpleNamespace(info=print)

    def write(state):
        time.sleep(0.2)
        seen.append(folder.lock.closed)
    with contextlib.closing(RunFolder(str(tmp_path))) as folder:
        folder.open()
        folder.start(write, {}, log)
    assert seen == [False] and folder.lock.closed


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="priorities of threads")
def test_a_save_in_the_background_leaves_the_cores_to_training(tmp_path):
    def nice(state=None):
        values.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
    values, log = [], types.SimpleNamespace(info=print)
    with contextlib.closing(RunFolder(str(tmp_path))) as folder:
        nice()
        folder.start(nice, {}, log)
        folder.wait()
        folder.start(nice, {}, log, last=True)
        nice()
    own = values[0]
    assert values == [own, min(own + 10, 19), own, own]


@pytest.mark.matrix(8)
def test_an_export_that_fails_costs_no_checkpoint(tmp_path, data_dir, undisturbed, capsys):
    """model.safetensors cannot be written, at a save in between and at the last -> a warning each
    that says so, no word of a lost checkpoint, and the run ends exactly"""
    (tmp_path / "model.safetensors").mkdir()
    assert go(data_dir, tmp_path, save_precision="bfloat16")["iter_num"] == 20
    text = capsys.readouterr().out
    assert text.count(f"{tmp_path}/ckpt.pt is saved, but model.safetensors (save_precision)") == 4
    assert "the previous checkpoint" not in text and "are lost" not in text
    assert_same(undisturbed, tmp_path)
    assert not temporary_files(tmp_path)


@pytest.mark.matrix(9)
def test_a_file_that_cannot_be_opened_is_a_warning(tmp_path, data_dir, undisturbed, capsys):
    """PermissionError when the temporary file is opened -> as a full disk: warned, goes on"""
    go(data_dir, tmp_path, "save_open@5=eacces")
    assert "Permission denied; training continues" in capsys.readouterr().out
    assert_same(undisturbed, tmp_path)


@pytest.mark.matrix(10)
def test_an_out_dir_removed_during_the_run_is_made_again(tmp_path, data_dir, undisturbed,
                                                         monkeypatch):
    """out_dir deleted under the run -> made again and locked; saves go on"""
    out, step = tmp_path / "out", training.train_step

    def train_step(run, lr=None):
        if run.progress.iter_num == 8:
            run.folder.wait()
            shutil.rmtree(out)
        step(run)
        if run.progress.iter_num == 12:
            run.folder.wait()
            with pytest.raises(UserError, match="is in use by pid"):
                lock_folder(out)
    monkeypatch.setattr(training, "train_step", train_step)
    go(data_dir, out)
    assert_same_file(undisturbed / "ckpt.pt", out / "ckpt.pt")


@pytest.mark.matrix(10)
@pytest.mark.parametrize("runs", [False, True])
def test_a_renamed_out_dir_does_not_cost_the_run_in_its_place(tmp_path, data_dir, monkeypatch,
                                                              capsys, runs):
    """out_dir renamed under the run, and another run in its place, which has ended or still runs ->
    the checkpoints of the other run are kept; in the second case the run ends with the reason"""
    out, step, lock = tmp_path / "out", training.train_step, []

    def train_step(run, lr=None):
        step(run, lr)
        if run.progress.iter_num == 8:
            run.folder.wait()
            out.rename(tmp_path / "renamed")
            out.mkdir()
            (out / "ckpt.pt").write_text("of another run")
            lock.extend([lock_folder(out)] if runs else [])
    monkeypatch.setattr(training, "train_step", train_step)
    with pytest.raises(UserError, match="is in use by pid") if runs else contextlib.nullcontext():
        go(data_dir, out)
    other = out / "ckpt.pt" if runs else out / "old_1" / "ckpt.pt"
    assert other.read_text() == "of another run"
    if not runs:
        assert f"moved the checkpoints in it to {out / 'old_1'}" in capsys.readouterr().out
        load_checkpoint(out / "ckpt.pt")


def test_a_folder_whose_inode_changes_keeps_its_checkpoints(tmp_path):
    """as on some network file systems: the lock file shows that it is the same folder"""
    with contextlib.closing(RunFolder(str(tmp_path))) as folder:
        folder.open()
        (tmp_path / "ckpt.pt").write_text("own")
        folder.stat = os.stat("/")
        folder.prepare(1, False, False, Warnings())
        assert (tmp_path / "ckpt.pt").exists()
        (tmp_path / ".lock").unlink()
        folder.stat = os.stat(tmp_path)
        folder.prepare(1, False, False, Warnings())
        assert (tmp_path / "ckpt.pt").exists()


@pytest.mark.matrix(11)
def test_an_out_dir_that_is_a_file_is_refused(tmp_path, data_dir):
    """out_dir is a file -> one line, exit 2, before any work; the file untouched"""
    out = tmp_path / "out"
    out.write_text("precious")
    code, text = run_program(data_dir, out)
    assert code == 2 and text.startswith(f"out_dir: {out} cannot be used: ") and "exists" in text
    assert out.read_text() == "precious"


@pytest.mark.matrix(12)
def test_an_out_dir_that_cannot_be_written_is_refused(tmp_path, data_dir, monkeypatch):
    """out_dir in a read-only file system -> one line, exit 2 (root may write anywhere, so the error
    is made: /proc refuses new folders to everyone)"""
    code, text = run_program(data_dir, "/proc/out", output=str(tmp_path / "output"))
    assert code == 2 and text.startswith("out_dir: /proc/out cannot be used: ")
    assert "Traceback" not in text and len(text.splitlines()) == 1


@pytest.mark.matrix(13, 14)
def test_a_folder_has_one_run_at_a_time(tmp_path, data_dir, undisturbed):
    """a second run in the same out_dir, while the first lives and after its kill -9 -> refused with
    the holder's pid, exit 2; then the dead one's lock is taken over"""
    out = tmp_path / "out"
    first = Program(data_dir, out, env={"FAULT": "before_step@7=sleep"})
    first.wait_for("iter 6:")
    code, text = run_program(data_dir, out, output=str(tmp_path / "second"))
    assert code == 2 and f"{out} is in use by pid {first.process.pid} on " in text
    first.kill()
    go(data_dir, out)
    assert_same(undisturbed, out)


@pytest.mark.matrix(13)
def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch):
    """flock is not supported -> the run goes on without a lock rather than not at all"""
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr("fcntl.flock", refuse)
    lock_folder(tmp_path).close()


@pytest.mark.matrix(15)
def test_the_mode_of_a_checkpoint_follows_the_umask(tmp_path):
    """umask 022 and 077 -> mode 0644 and 0600, not the 0600 of a temporary file"""
    for umask, mode in ((0o022, 0o644), (0o077, 0o600)):
        old = os.umask(umask)
        try:
            save_checkpoint(str(tmp_path / f"{mode}.pt"), {"model": {}})
        finally:
            os.umask(old)
        assert stat.S_IMODE(os.stat(tmp_path / f"{mode}.pt").st_mode) == mode


@pytest.mark.matrix(16)
def test_a_checkpoint_that_is_a_symlink_is_replaced(tmp_path):
    """ckpt.pt is a symlink -> it is replaced by a file; what it pointed to stays as it was, and is
    the previous checkpoint"""
    elsewhere, link = tmp_path / "elsewhere.pt", tmp_path / "ckpt.pt"
    save_checkpoint(str(elsewhere), {"model": {}, "iter_num": 1})
    link.symlink_to(elsewhere)
    save_checkpoint(str(link), {"model": {}, "iter_num": 2})
    assert not link.is_symlink() and load_checkpoint(link)["iter_num"] == 2
    assert load_checkpoint(elsewhere)["iter_num"] == 1
    assert load_checkpoint(tmp_path / "ckpt_prev.pt")["iter_num"] == 1


@pytest.mark.matrix(17)
@pytest.mark.parametrize("full", [False, True])
def test_without_hard_links_files_are_copied(tmp_path, monkeypatch, full):
    """the file system refuses hard links, without and with room for copies -> copies; without room
    the save fails and leaves nothing behind"""
    def refuse(*_, **__):
        raise OSError(errno.EPERM, "Operation not permitted")

    def no_room(source, target):
        target.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(checkpoint.os, "link", refuse)
    path = str(tmp_path / "ckpt.pt")
    save_checkpoint(path, {"model": {}, "iter_num": 1})
    if full:
        monkeypatch.setattr(shutil, "copyfileobj", no_room)
        with pytest.raises(CheckpointError, match="No space left"):
            save_checkpoint(path, {"model": {}, "iter_num": 2}, [str(tmp_path / "ckpt_best.pt")])
        assert load_checkpoint(path)["iter_num"] == 1 and len(list(tmp_path.iterdir())) == 1
    else:
        save_checkpoint(path, {"model": {}, "iter_num": 2}, [str(tmp_path / "ckpt_best.pt")])
        assert load_checkpoint(path)["iter_num"] == 2
        assert load_checkpoint(tmp_path / "ckpt_prev.pt")["iter_num"] == 1
        assert load_checkpoint(tmp_path / "ckpt_best.pt")["iter_num"] == 2


@pytest.mark.matrix(18)
@pytest.mark.parametrize("where", ["weights", "optimizer state"])
def test_nan_is_not_saved(tmp_path, data_dir, monkeypatch, where):
    """a NaN in the weights or the optimizer state at a save -> refused by name, run stopped, the
    old checkpoint kept"""
    step = training.train_step

    def train_step(run, lr=None):
        step(run)
        if run.progress.iter_num == 10:
            p = run.raw_model.ln_f.weight
            (p.data if where == "weights" else run.optimizer.state[p]["exp_avg"])[3] = torch.nan
    monkeypatch.setattr(training, "train_step", train_step)
    with pytest.raises(BadNumbers, match=f"iter 10: {where.split()[0].strip('weights')}.*ln_f"):
        go(data_dir, tmp_path, eval_interval=0, save_interval=5)
    assert load_checkpoint(tmp_path / "ckpt.pt")["iter_num"] == 5


def test_keep_last_and_best(tmp_path, data_dir):
    """keep_last 2 -> the two newest numbered checkpoints, and none removed by a run without it"""
    go(data_dir, tmp_path, keep_last=2, max_iters=15)
    numbered = ["ckpt_0000010.pt", "ckpt_0000015.pt"]
    assert sorted(p.name for p in tmp_path.glob("ckpt_0*")) == numbered
    assert load_checkpoint(tmp_path / numbered[0])["iter_num"] == 10
    go(data_dir, tmp_path, keep_last=0)
    assert sorted(p.name for p in tmp_path.glob("ckpt_0*")) == numbered
    state = load_checkpoint(tmp_path / "ckpt_best.pt")
    assert state["best_val_loss"] == state["progress"]["val_loss"]


def test_numbered_checkpoints_have_seven_digits_or_more(tmp_path):
    names = ["ckpt_0000010.pt", "ckpt_9999999.pt", "ckpt_10000000.pt"]
    for name in [*names, "ckpt_0000010_copy.pt", "ckpt_best.pt", "ckpt_10.pt"]:
        (tmp_path / name).touch()
    assert sorted(p.name for p in numbered_checkpoints(tmp_path)) == sorted(names)


def test_snapshot_is_apart_from_training(tmp_path):
    """weights changed while a save is under way -> the file has those of the moment of save"""
    w = torch.ones(1000)
    folder, log = RunFolder(str(tmp_path)), Warnings()
    folder.save({"model": {"w": w}, "optimizer": {}, "iter_num": 3}, False, False, log)
    w.zero_()
    folder.wait()
    assert load_checkpoint(tmp_path / "ckpt.pt")["model"]["w"].sum() == 1000 and not log
    state = {"a": [torch.ones(3), {"b": torch.tensor(5)}], "c": "text"}
    copy = snapshot(state)
    assert torch.equal(copy["a"][0], state["a"][0]) and copy["a"][1]["b"] == 5
    assert copy["a"][0].data_ptr() != state["a"][0].data_ptr()


@pytest.mark.parametrize("function, problem", [
    ("train.base.sharded_file.remove_unnamed_shards", "older checkpoints are not deleted"),
    ("train.base.run_folder.RunFolder.export",
     "model.safetensors (save_precision) is not up to date")])
def test_what_fails_after_a_save_is_named(tmp_path, monkeypatch, function, problem):
    def fail(*args):
        raise OSError(errno.EIO, "a bad disk")
    monkeypatch.setattr(function, fail)
    folder, log = RunFolder(str(tmp_path), save_precision="float32"), Warnings()
    folder.save({"model": {"w": torch.ones(9)}, "optimizer": {}, "iter_num": 3}, False, False, log)
    folder.wait()
    assert log == [f"{tmp_path}/ckpt.pt is saved, but {problem}: [Errno 5] a bad disk"]
    assert load_checkpoint(tmp_path / "ckpt.pt")["iter_num"] == 3 and not folder.failed


def test_a_failed_save_is_named_though_shards_cannot_be_removed(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(errno.EIO, "a bad disk")
    monkeypatch.setattr("train.base.run_folder.save_checkpoint", fail)
    monkeypatch.setattr("train.base.sharded_file.remove_unnamed_shards", fail)
    folder, log = RunFolder(str(tmp_path)), Warnings()
    folder.save({"model": {"w": torch.ones(9)}, "optimizer": {}, "iter_num": 3}, True, False, log)
    folder.wait()
    assert log == ["[Errno 5] a bad disk; training continues"] and folder.failed


@pytest.mark.matrix(117)
@pytest.mark.parametrize("why", ["little is free", "the copy fails"])
def test_without_memory_for_a_copy_training_waits_for_the_save(tmp_path, monkeypatch, why):
    """no memory for a copy of the state -> saved all the same, while training waits"""
    def fail(tensor):
        raise RuntimeError("CUDA error: out of memory")
    if why == "little is free":
        monkeypatch.setattr("train.base.run_folder.memory_available", lambda: 1000)
    else:
        monkeypatch.setattr("train.base.run_folder.copy_to_host", fail)
    folder, log = RunFolder(str(tmp_path)), Warnings()
    state = {"model": {"w": torch.ones(1 << 16)}, "optimizer": {}, "iter_num": 3}
    folder.save(state, False, False, log)
    assert folder.thread is None and not log
    assert load_checkpoint(tmp_path / "ckpt.pt")["model"]["w"].sum() == 1 << 16


def test_a_copy_that_cannot_be_mapped_is_none(monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")
    monkeypatch.setattr("train.base.run_folder.mmap.mmap", fail)
    assert snapshot({"model": {"w": torch.ones(1 << 16)}}) is None


@pytest.mark.matrix(118)
def test_a_save_longer_than_the_interval_is_never_doubled(tmp_path, data_dir, undisturbed,
                                                          monkeypatch):
    """a disk so slow that a save takes longer than the steps between saves -> never more than one
    save at a time, the end exact"""
    real, running, most = checkpoint.save_checkpoint, [], []

    def slow(path, state, links=()):
        running.append(state["iter_num"])
        most.append(len(running))
        time.sleep(0.03)
        real(path, state, links)
        running.remove(state["iter_num"])
    monkeypatch.setattr("train.base.run_folder.save_checkpoint", slow)
    threads = threading.active_count()
    go(data_dir, tmp_path, save_interval=1)
    assert max(most) == 1 and len(most) >= 19 and threading.active_count() == threads
    assert_same(undisturbed, tmp_path, best=False)


@pytest.mark.matrix(119)
def test_many_saves_leave_nothing_behind(tmp_path):
    """100 saves in the background with best and numbered names (2,000 in test_soak.py) -> the
    numbers of open files and of files in the folder stay constant"""
    folder, log, counts = RunFolder(str(tmp_path), keep_last=3), Warnings(), []
    state = {"model": {"w": torch.ones(10_000)}, "optimizer": {}}
    for i in range(100):
        folder.save(state | {"iter_num": i}, True, True, log)
        folder.wait()
        counts.append((len(os.listdir("/proc/self/fd")), len(list(tmp_path.iterdir()))))
    assert not log and set(counts[5:]) == {counts[-1]} and counts[-1][1] == 6


def test_second_signal_during_the_last_save(tmp_path, data_dir, undisturbed):
    """SIGTERM, and again in the middle of the save that follows -> leaves at once with 143, the
    checkpoint before it is intact"""
    out = tmp_path / "out"
    fault = "before_step@12=sigterm,save_mid@12=sigterm"
    code, _ = run_program(data_dir, out, env={"FAULT": fault})
    assert code == 143 and load_checkpoint(out / "ckpt.pt")["iter_num"] == 10
    go(data_dir, out)
    assert_same(undisturbed, out)


def test_a_path_without_a_folder_is_in_this_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for x in (1, 2):
        save_checkpoint("a.pt", dict(model={}, iter_num=x))
    for x, name in ((2, "a.pt"), (1, "a_prev.pt")):
        assert load_checkpoint(tmp_path / name)["iter_num"] == x
