"""train/base/files.py, data/prepare/folders.py: complete files or none; link targets are not
changed."""

import contextlib
import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
from conftest import REPO, full_disk
from runs import go

from data import prepare
from data.meta import Meta, read_meta, write_meta
from data.prepare import chat, features, labels, samples, sources
from data.prepare.folders import check_replaceable, new_folder
from train.base.errors import DataError, UserError
from train.base.files import (
    add_link,
    atomic_write,
    exclusive_lock,
    lock_folder,
    open_no_follow,
    reporting_full_disk,
    sync_folder,
    write_text,
)
from train.checkpoint import load_checkpoint, save_checkpoint
from train.logger import Logger
from train.robust import on_signals


@pytest.fixture
def outside(tmp_path):
    """A folder with a link to a file outside it: (folder, name) -> the link's path."""
    folder, mine = tmp_path / "out", tmp_path / "mine"
    folder.mkdir()
    mine.write_text("precious")

    def point(name):
        (folder / name).symlink_to(mine)
        return folder / name
    yield point
    assert mine.read_text() == "precious" and not mine.is_symlink()


def test_a_file_that_fails_half_way_leaves_the_old_one(tmp_path):
    write_text(tmp_path / "a", "old")
    with pytest.raises(KeyboardInterrupt), atomic_write(tmp_path / "a") as f:
        f.write(b"half")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "old"


def test_a_full_disk_while_numpy_writes_a_file_is_reported(tmp_path):
    """As for model.convert --to FILE.gguf. The error has no number."""
    with pytest.raises(UserError, match="a.gguf could not be written: no space left"):
        with reporting_full_disk("a.gguf"), atomic_write(tmp_path / "a.gguf"):
            raise OSError("4096 requested and 3568 written")


def test_a_temporary_name_that_is_a_link(outside):
    """Its name can be guessed: whoever may write to the folder could have put a link there."""
    for name in ("a", "b", "ckpt.pt"):
        outside(f"{name}.tmp.{os.getpid()}")
    folder = outside("a").parent
    write_text(folder / "a", "new")
    add_link(folder / "a", folder / "b")
    save_checkpoint(str(folder / "ckpt.pt"), {"model": {}, "iter_num": 3})
    assert (folder / "a").read_text() == (folder / "b").read_text() == "new"
    assert load_checkpoint(folder / "ckpt.pt")["iter_num"] == 3
    assert not any(path.is_symlink() for path in folder.iterdir())


def test_a_hard_link_to_a_symbolic_link_is_to_its_file(tmp_path):
    """E.g. shards on another disk: in a subfolder, a relative link would lead nowhere."""
    (tmp_path / "file").write_text("text")
    (tmp_path / "name").symlink_to("file")
    (tmp_path / "old_1").mkdir()
    add_link(tmp_path / "name", tmp_path / "old_1/name")
    assert os.path.samefile(tmp_path / "old_1/name", tmp_path / "file")
    assert not (tmp_path / "old_1/name").is_symlink()


def test_a_lock_that_is_a_link(outside, data_dir):
    path = outside(".lock")
    with pytest.raises(OSError, match=f"symbolic links: '{path}'"):
        lock_folder(path.parent)
    with pytest.raises(UserError, match="cannot be used: .* symbolic links"):
        go(data_dir, path.parent, max_iters=1)
    assert os.listdir(path.parent) == [".lock"]


def test_a_lock_file_that_was_removed_while_it_was_opened_locks_nothing(tmp_path, monkeypatch):
    """As data.prepare removes it, at the end, with its temporary folder."""
    lock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lambda *args: (os.unlink(tmp_path / ".lock"), lock(*args)))
    with pytest.raises(UserError, match="in use by another process"):
        lock_folder(tmp_path)


def test_no_link_is_followed(outside):
    with pytest.raises(OSError, match="link"):
        open_no_follow(outside("train.log"), "ab")


def test_logs_that_are_links(outside, capsys):
    """The file that a link points to stays as it is."""
    names = ("train.log", "metrics.jsonl", "samples.txt", "loss.svg", "config.yaml")
    folder = [outside(name) for name in names][0].parent
    with Logger(folder) as log:
        log.start(0)
        log.info("hello")
        log.step(dict(iter=0, tokens=8, loss=1.0))
        log.samples(0, "text")
        log.describe_run("seed: 1\n")
        log.plot()
    for name in ("metrics.jsonl", "loss.svg", "config.yaml"):
        assert not (folder / name).is_symlink() and (folder / name).stat().st_size > 0
    assert json.loads((folder / "metrics.jsonl").read_text())["loss"] == 1.0
    err = capsys.readouterr().err
    assert all(f"{folder}/{name} cannot be written" in err for name in ("train.log", "samples.txt"))


def test_metrics_that_are_a_link_at_a_resume(outside):
    path = outside("metrics.jsonl")
    with Logger(path.parent) as log:
        log.start(5)
        log.step(dict(iter=5, tokens=8, loss=1.0))
    assert not path.is_symlink() and json.loads(path.read_text())["iter"] == 5


# -----------------------------------------------------------------------------
# folders

A, B = "train_a.npy", "train_b.npy"


def contents(folder):
    return {p.name: p.read_text() for p in folder.iterdir() if p.name != "meta.json"}


def fill(out, **files):
    with new_folder(out, "gpt", ["x"], force=True) as folder:
        for name, text in files.items():
            Path(folder, f"train_{name}.npy").write_text(text)
        write_meta(folder, Meta("gpt", sources=["x"]))


def test_a_folder_takes_the_place_of_another(tmp_path):
    """What is ours is replaced, what is somebody's stays; a link to a folder stays a link."""
    out = tmp_path / "x" / "out"
    fill(out, a="1", b="1")
    (out / "notes").write_text("mine")
    fill(out, a="2")
    assert contents(out) == {A: "2", "notes": "mine"} and os.listdir(tmp_path / "x") == ["out"]
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "link").symlink_to(out)
    fill(tmp_path / "y" / "link", b="3")
    assert contents(out) == {B: "3", "notes": "mine"} and os.listdir(tmp_path / "y") == ["link"]
    inode = out.stat().st_ino
    fill(out, b="3")  # the same: nothing to do
    assert out.stat().st_ino == inode and os.listdir(tmp_path / "x") == ["out"]


def fill_with_meta(out, text):
    with new_folder(out, "gpt", [text], force=True) as folder:
        for name in (A, B):
            (Path(folder) / name).write_text(text)
        write_meta(folder, Meta("gpt", sources=[text]))


def test_meta_json_is_the_last_file_in_its_place(tmp_path, monkeypatch):
    """A folder whose files are being replaced is incomplete for every reader."""
    out, replace, seen = tmp_path / "out", os.replace, []
    fill_with_meta(out, "old")
    (out / "notes").write_text("mine")

    def watched(source, target):
        if ".out.tmp" in str(source) and os.path.dirname(target) == str(out):
            with pytest.raises(DataError, match="meta.json: its preparation was interrupted"):
                read_meta(out)
            seen.append(os.path.basename(target))
        replace(source, target)
    monkeypatch.setattr(os, "replace", watched)
    fill_with_meta(out, "new")
    assert seen[-1] == "meta.json" and sorted(seen) == ["meta.json", A, B]
    assert read_meta(out).sources == ["new"] and sorted(os.listdir(out)) == sorted([*seen, "notes"])


@pytest.mark.parametrize("function, call", [(f, n) for f in ("unlink", "replace")
                                            for n in (1, 2, 3)])
def test_a_killed_replacement_is_never_taken_for_complete(tmp_path, function, call):
    """Killed at any of its steps: the folder is the old one, or one that readers refuse and that
    the same command replaces. The files of others stay."""
    out = tmp_path / "out"
    fill_with_meta(out, "old")
    (out / "notes").write_text("mine")
    code = f"""
import os
from data.meta import Meta, write_meta
from data.prepare.folders import new_folder
real, calls = os.{function}, []
def killed(*names):
    calls.append(names)
    if len(calls) == {call}:
        os.kill(os.getpid(), 9)
    real(*names)
with new_folder({str(out)!r}, "gpt", ["new"], force=True) as folder:
    with open(f"{{folder}}/{A}", "w") as f:
        f.write("new")
    write_meta(folder, Meta("gpt", sources=["new"]))
    os.{function} = killed
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO).returncode == -9
    assert len(os.listdir(tmp_path)) == 2  # with the temporary folder
    try:
        assert read_meta(out).sources == ["old"] and (out / A).read_text() == "old"
        assert (out / B).exists()
    except DataError as error:
        assert "interrupted" in str(error) and (function, call) not in (
            ("unlink", 1), ("replace", 1))
        check_replaceable(str(out), "gpt", ["new"], False)
        with pytest.raises(DataError):
            check_replaceable(str(out), "chat", ["new"], False)
    fill_with_meta(out, "new")
    assert read_meta(out).sources == ["new"]
    assert {p.name: p.read_text() for p in out.iterdir() if p.name != "meta.json"} == {
        A: "new", B: "new", "notes": "mine"}
    assert os.listdir(tmp_path) == ["out"]


def test_a_replacement_that_fails_can_be_repeated(tmp_path, monkeypatch):
    out, replace = tmp_path / "out", os.replace
    fill_with_meta(out, "old")

    def refuse(source, target):
        if os.path.basename(target) == B:
            raise OSError(5, "Input/output error")
        replace(source, target)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output"):
        patch.setattr(os, "replace", refuse)
        fill_with_meta(out, "new")
    assert os.listdir(tmp_path) == ["out"]
    with pytest.raises(DataError, match="interrupted"):
        read_meta(out)
    fill_with_meta(out, "new")
    assert (out / B).read_text() == "new" and read_meta(out).sources == ["new"]


@pytest.mark.parametrize("number, raises", [(errno.EIO, True), (errno.EINVAL, False)])
def test_a_disk_that_fails_is_told_a_file_system_without_sync_is_not(tmp_path, monkeypatch, number,
                                                                     raises):
    def fail(fd):
        raise OSError(number, os.strerror(number))
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError) if raises else contextlib.nullcontext():
        sync_folder(tmp_path)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")
def test_a_synchronised_folder_is_closed(tmp_path):
    n_files = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        sync_folder(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == n_files


def test_files_are_durable_before_their_names(tmp_path, monkeypatch):
    seen, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (seen.append(os.fstat(fd).st_ino), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (
        seen.append(os.path.basename(b)), replace(a, b)))
    fill(tmp_path / "out", a="1", b="2")
    inodes = [(tmp_path / "out" / name).stat().st_ino for name in (A, B, "meta.json")]
    renames = max(seen.index(inode) for inode in inodes), seen.index(A), len(seen) - 1
    assert list(renames) == sorted(renames) and seen[-1] == (tmp_path / "out").stat().st_ino
    assert seen[-2] == "meta.json"


@pytest.mark.parametrize("command", ["prepare", "chat", "labels", "features"])
def test_a_command_that_fails_half_way_leaves_the_old_folder(tmp_path, monkeypatch, command):
    """meta.json is the last that each of them writes."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(dict(prompt=f"p{i}", response="r", text=f"a text {i}",
                                            label="ab"[i % 2])) + "\n" for i in range(200)))
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((60, 2)))
    module = dict(prepare=prepare, chat=chat, labels=labels, features=features)[command]
    source, out = tmp_path / ("x.npy" if command == "features" else "rows.jsonl"), tmp_path / "out"
    assert module.main([str(source), "--out", str(out)]) == 0
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    assert "meta.json" in before and len(before) > 2
    if command == "features":
        np.save(source, np.ones((80, 2)) * np.arange(80)[:, None])
    else:
        rows.write_text(rows.read_text().replace("a text", "another text").replace("p1", "q1"))

    def fail(*_, **__):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(samples if command == "chat" else module, "write_meta", fail)
    assert module.main([str(source), "--out", str(out)]) == 2
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert {p.name for p in tmp_path.iterdir()} == {"out", "x.npy", "rows.jsonl"}
    monkeypatch.undo()
    assert module.main([str(source), "--out", str(out)]) == 0
    assert {p.name: p.read_bytes() for p in out.iterdir()} != before


@pytest.mark.parametrize("command", [prepare, chat])
def test_a_full_disk_is_told_with_the_folder_that_is_written(tmp_path, capsys, command):
    """Not with that of the source, which was being read."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(dict(prompt=f"p{i}", response="a text " * 9, text="b" * 99))
                            + "\n" for i in range(900)))
    with full_disk(20_000):
        assert command.main([str(rows), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert re.search(f"{tmp_path}/out could not be written: (File too large|no space left)", told)
    assert [p.name for p in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_lock_on_a_full_disk_names_the_file(tmp_path):
    with full_disk(0), pytest.raises(UserError, match=f"{tmp_path}/.lock could not be written: "):
        lock_folder(tmp_path)


def test_a_full_disk_is_no_problem_of_the_source(tmp_path):
    (tmp_path / "a.txt").write_text("a text")
    documents = sources.Documents(tmp_path / "all")

    def fail(content):
        raise OSError(errno.ENOSPC, "No space left on device")
    documents.file = types.SimpleNamespace(write=fail, seek=print)
    with pytest.raises(OSError, match="No space left on device"):
        documents.add_file(str(tmp_path / "a.txt"), types.SimpleNamespace())


def test_one_at_a_time_is_alone_in_a_folder(tmp_path):
    inside, order = threading.Event(), []

    def second():
        inside.wait(10)
        with exclusive_lock(tmp_path):
            order.append("second")
    other = threading.Thread(target=second)
    other.start()
    with exclusive_lock(tmp_path):
        inside.set()
        other.join(0.2)
        order.append("first")
    other.join(10)
    assert order == ["first", "second"]


def test_handlers_of_signals_are_given_back():
    heard, before = [], signal.signal(signal.SIGTERM, lambda number, frame: heard.append("ours"))
    try:
        with on_signals(("SIGTERM",), lambda number, frame: heard.append("within")):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == ["within", "ours"]
    finally:
        signal.signal(signal.SIGTERM, before)
