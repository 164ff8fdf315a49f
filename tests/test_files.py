"""train/files.py: whole or not there, and nothing outside a folder is touched through a link."""

import json
import os

import pytest
from runs import go

from train.checkpoint import load_checkpoint, save_checkpoint
from train.files import FilesError, Lock, link, open_lock, open_own, replacing, write_text
from train.logger import Logger


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
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "a") as f:
        f.write(b"half")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "old"


def test_a_temporary_name_that_is_a_link(outside):
    """Its name can be guessed: whoever may write to the folder could have put a link there."""
    for name in ("a", "b", "ckpt.pt"):
        outside(f"{name}.tmp.{os.getpid()}")
    folder = outside("a").parent
    write_text(folder / "a", "new")
    link(folder / "a", folder / "b")
    save_checkpoint(str(folder / "ckpt.pt"), {"model": {}, "iter_num": 3})
    assert (folder / "a").read_text() == (folder / "b").read_text() == "new"
    assert load_checkpoint(folder / "ckpt.pt")["iter_num"] == 3
    assert not any(path.is_symlink() for path in folder.iterdir())


def test_a_lock_that_is_a_link(outside, data_dir):
    path = outside(".lock")
    with pytest.raises(FilesError, match=f"{path} is a link.*remove the link"):
        Lock(path.parent)
    with pytest.raises(FilesError, match="is a link"):
        open_lock(path.parent)
    with pytest.raises(FilesError, match="is a link"):
        go(data_dir, path.parent, max_iters=1)
    assert os.listdir(path.parent) == [".lock"]


def test_no_link_is_followed_without_o_nofollow(outside, monkeypatch):
    path = outside("train.log")
    for gone in (False, True):
        if gone:
            monkeypatch.delattr(os, "O_NOFOLLOW")
        with pytest.raises(OSError, match="link"):
            open_own(path, "ab")


def test_logs_that_are_links(outside, capsys):
    """The file that a link points to stays as it is; the lines go into a file in its place."""
    names = ("train.log", "metrics.jsonl", "samples.txt", "loss.svg", "config.yaml")
    folder = [outside(name) for name in names][0].parent
    with Logger(folder) as log:
        log.info("hello")
        log.step(dict(iter=0, tokens=8, loss=1.0))
        log.samples(0, "text")
        log.describe_run("seed: 1\n", {}, {})
        log.plot()
    for name in names[:1] + names[2:]:
        assert not (folder / name).is_symlink() and (folder / name).stat().st_size > 0
    assert "hello" in (folder / "train.log").read_text()
    assert json.loads((folder / "metrics.jsonl").read_text())["loss"] == 1.0
    err = capsys.readouterr().err
    assert f"{folder}/train.log was a link to" in err and "samples.txt was a link" in err


def test_metrics_that_are_a_link_at_a_resume(outside):
    path = outside("metrics.jsonl")
    with Logger(path.parent, resume_iter=5) as log:
        log.step(dict(iter=5, tokens=8, loss=1.0))
    assert not path.is_symlink() and json.loads(path.read_text())["iter"] == 5
