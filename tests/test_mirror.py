"""Checkpoints that leave the machine (mirror): a folder, a store in memory, a real S3 server."""

import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time

import pytest
from browser import soon
from runs import Program, assert_same_file, go, tensors

from train.base.errors import CheckpointError, ConfigError, SetupError
from train.checkpoint import load_checkpoint
from train.config import load_config

fsspec = pytest.importorskip("fsspec")


def copies(folder):
    return sorted(path.name for path in folder.glob("copy_*.pt"))


# -----------------------------------------------------------------------------
# a folder

def test_a_lost_folder_continues_from_the_mirror(data_dir, tmp_path):
    a, b, store = (tmp_path / name for name in ("a", "b", "store"))
    go(data_dir, a)
    killed = Program(data_dir, b, env=dict(FAULT="before_step@12=sleep"), mirror=str(store))
    killed.wait_for("iter 11:")
    soon(lambda: copies(store))  # of iter 5 and, if the copy was fast enough, 10
    killed.kill()
    shutil.rmtree(b)
    go(data_dir, b, mirror=str(store))
    assert "Copying copy_0000" in (b / "train.log").read_text()
    assert_same_file(a / "ckpt.pt", b / "ckpt.pt")
    assert_same_file(a / "ckpt_best.pt", b / "ckpt_best.pt")
    for ours, copy in (("ckpt.pt", copies(store)[-1]), ("ckpt_best.pt", "ckpt_best.pt")):
        assert (b / ours).read_bytes() == (store / copy).read_bytes()
    assert len(copies(store)) == 2
    assert not [name for name in os.listdir(b) if ".tmp" in name]


@pytest.mark.parametrize("form", ["file", "sharded"])
def test_a_folder_continues_from_the_later_step_of_the_store(data_dir, tmp_path, monkeypatch, form):
    """Another machine has continued the run -> from there; the store is behind, or cannot be read
    -> from the folder."""
    a, b, store = (tmp_path / name for name in ("a", "b", "store"))
    settings = dict(mirror=str(store), checkpoint_format=form)
    go(data_dir, a, **settings, max_iters=10)
    go(data_dir, b, **settings, max_iters=20)
    go(data_dir, a, **settings, max_iters=20)
    log = (a / "train.log").read_text()
    names = "ckpt.pt, ckpt_prev.pt, ckpt_best.pt"
    assert f"{store} has a later step: moved {names} to {a / 'old_1'}" in log
    assert log.count("Copying copy_0000") == 1 and "cannot be read" not in log
    assert_same_file(a / "ckpt_best.pt", b / "ckpt_best.pt")
    assert_same_file(a / "ckpt.pt", b / "ckpt.pt")
    assert load_checkpoint(a / "old_1" / "ckpt.pt")["iter_num"] == 10
    with open(a / "metrics.jsonl") as f:
        steps = [record["iter"] for record in map(json.loads, f) if "loss" in record]
    assert steps == sorted(set(steps))

    (store / copies(store)[-1]).unlink()  # as if it had not been complete
    go(data_dir, a, **settings, max_iters=21)
    assert load_checkpoint(a / "ckpt.pt")["iter_num"] == 21 and not (a / "old_2").exists()

    def fail(self, start):
        raise OSError("no route to host")
    monkeypatch.setattr("train.options.mirror.Mirror.checkpoints", fail)
    go(data_dir, a, **settings, max_iters=22)
    assert "cannot be read: OSError('no route to host')" in (a / "train.log").read_text()
    assert load_checkpoint(a / "ckpt.pt")["iter_num"] == 22


def test_a_damaged_folder_continues_from_the_later_step_of_the_store(data_dir, tmp_path):
    a, b, store = (tmp_path / name for name in ("a", "b", "store"))
    go(data_dir, a, mirror=str(store), max_iters=10)
    go(data_dir, b, mirror=str(store), max_iters=20)
    with open(a / "ckpt.pt", "r+b") as f:
        f.truncate(1000)
    go(data_dir, a, mirror=str(store), max_iters=20)
    assert_same_file(a / "ckpt.pt", b / "ckpt.pt")
    assert (a / "old_1" / "ckpt.pt").stat().st_size == 1000


def test_a_folder_does_not_become_another_run(data_dir, tmp_path):
    """The store is that of another run, by mistake -> refused, and nothing is changed"""
    a, store = tmp_path / "a", tmp_path / "store"
    go(data_dir, tmp_path / "b", mirror=str(store), seed=2, max_iters=10)
    go(data_dir, a, seed=3, max_iters=5)
    before = {path: path.read_bytes() for path in (*store.iterdir(), *a.glob("ckpt*"))}
    with pytest.raises(SetupError, match="run with another seed or other data"):
        go(data_dir, a, seed=3, mirror=str(store), max_iters=10)
    assert {path: path.read_bytes() for path in (*store.iterdir(), *a.glob("ckpt*"))} == before


def test_an_equal_copy_is_not_fetched(data_dir, tmp_path, monkeypatch):
    store = tmp_path / "store"
    go(data_dir, tmp_path / "a", mirror=str(store), max_iters=10)
    monkeypatch.setattr("train.options.mirror.Mirror.get", None)
    go(data_dir, tmp_path / "a", mirror=str(store), max_iters=12)
    assert "warning" not in (tmp_path / "a" / "train.log").read_text()


def test_a_store_may_have_brackets_in_its_name(data_dir, tmp_path):
    store = tmp_path / "st[1]"
    go(data_dir, tmp_path / "a", mirror=str(store))
    assert len(copies(store.parent / "st[[]1]")) == 0 and len(list(store.iterdir())) >= 2
    shutil.rmtree(tmp_path / "a")
    go(data_dir, tmp_path / "a", mirror=str(store), max_iters=21)
    assert "Copying copy_0000" in (tmp_path / "a" / "train.log").read_text()


def test_a_restart_of_another_job_does_not_override_never(data_dir, tmp_path, monkeypatch):
    """torchrun's second attempt, after the first was refused -> refused again"""
    store = tmp_path / "store"
    go(data_dir, tmp_path / "a", mirror=str(store), max_iters=5)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    before = {path: path.read_bytes() for path in store.iterdir()}
    with pytest.raises(CheckpointError):
        go(data_dir, tmp_path / "b", mirror=str(store), resume="never")
    assert {path: path.read_bytes() for path in store.iterdir()} == before


def test_a_damaged_copy_is_not_used(data_dir, tmp_path, capsys):
    out, store = tmp_path / "out", tmp_path / "store"
    for max_iters in (5, 10):  # of two saves in one run, the second may replace a waiting first
        go(data_dir, out, mirror=str(store), max_iters=max_iters)
    earlier = (store / copies(store)[0]).read_bytes()
    with open(store / copies(store)[1], "r+b") as f:
        f.truncate(f.seek(0, 2) - 1)
    (store / "ckpt_best.pt").write_bytes(b"PK")
    shutil.rmtree(out)
    out.mkdir()
    shutil.copy(store / "copy_000001.pt", out / "wanted.pt")
    go(data_dir, out, mirror=str(store), eval_only=True)
    assert (out / "ckpt.pt").read_bytes() == earlier
    assert capsys.readouterr().out.count("is damaged or incomplete") == 2
    assert not (out / "ckpt_best.pt").exists() and not list(out.glob("*.tmp.*"))
    for name in copies(store):
        (store / name).write_bytes(b"")
    (out / "ckpt.pt").unlink()
    with pytest.raises(CheckpointError, match="none of its 2 checkpoints is complete"):
        go(data_dir, out, mirror=str(store))


def test_an_existing_checkpoint_is_not_replaced_and_never_is_refused(data_dir, tmp_path):
    out, store = tmp_path / "out", tmp_path / "store"
    go(data_dir, out, mirror=str(store), max_iters=5)
    before = (out / "ckpt.pt").stat().st_ino
    go(data_dir, out, mirror=str(tmp_path / "unused"), eval_only=True)
    assert (out / "ckpt.pt").stat().st_ino == before and not (tmp_path / "unused").exists()
    with pytest.raises(CheckpointError, match="--resume never, and it has"):
        go(data_dir, out, mirror=str(store), resume="never")
    assert (out / "ckpt.pt").stat().st_ino == before and len(copies(store)) == 1


def kill_in_a_copy(file, times):
    """A process that is killed (-9) when half of `file` is in the store for this time."""
    from fsspec.implementations.local import LocalFileSystem
    seen = []

    def put_half(self, source, target, **kwargs):
        with open(source, "rb") as f, open(target, "wb") as copy:
            data = f.read()
            seen.append(target)
            if sum(file in target for target in seen) == times:
                copy.write(data[:len(data) // 2])
                copy.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            copy.write(data)
    LocalFileSystem.put_file = put_half


@pytest.mark.parametrize("file, times", [("copy_000002", 1), ("ckpt_best", 2)])
def test_a_kill_during_a_copy_leaves_the_one_before(data_dir, tmp_path, capsys, file, times):
    a, b, store = (tmp_path / name for name in ("a", "b", "store"))
    store.mkdir()
    go(data_dir, a)
    killed = Program(data_dir, b, mirror=str(store),
                     prepare=functools.partial(kill_in_a_copy, file, times))
    assert killed.wait()[0] == -9
    assert copies(store) == ["copy_000001.pt"]
    shutil.rmtree(b)
    go(data_dir, b, mirror=str(store))
    assert "is damaged or incomplete" not in capsys.readouterr().out
    for name in ("ckpt.pt", "ckpt_best.pt"):
        assert_same_file(a / name, b / name)
    assert len(list(store.iterdir())) == 4  # ckpt_best.pt, two copies, writable


def test_shards_are_copied_with_their_manifest(data_dir, tmp_path, capsys):
    """A shard that is damaged in the store makes its checkpoint useless, and the one before is
    used."""
    a, b, store = (tmp_path / name for name in ("a", "b", "store"))
    keys = dict(checkpoint_format="sharded")
    wanted = go(data_dir, a, **keys)
    for max_iters in (5, 10):
        go(data_dir, b, mirror=str(store), max_iters=max_iters, **keys)
    assert len(copies(store)) == 2
    named = {json.loads((store / name).read_text())["folder"]
             for name in [*copies(store), "ckpt_best.pt"]}
    assert named == {f"shards/{path.name}" for path in (store / "shards").iterdir()}
    newest = store / json.loads((store / copies(store)[-1]).read_text())["folder"]
    shard = next(newest.glob("optimizer/*.safetensors"))
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    shutil.rmtree(b)
    result = go(data_dir, b, mirror=str(store), **keys)
    assert "copy_000002.pt is damaged or incomplete" in capsys.readouterr().out
    assert (result["val_loss"], result["iter_num"]) == (wanted["val_loss"], 20)
    assert "Resuming" in (b / "train.log").read_text()


def test_child_runs_have_no_mirror(data_dir, tmp_path):
    """Several runs would share one store."""
    from train.config import load_argv
    from train.tools.child_runs import ChildRun
    child = ChildRun("a", [f"--data_dir={data_dir}", "--mirror=copies"], tmp_path)
    assert load_argv(child.arguments).mirror is None
    assert load_config(None, dict(mirror="copies")).probe().mirror is None


# -----------------------------------------------------------------------------
# any store

def test_a_failing_store_is_reported_and_does_not_stop_the_run(data_dir, tmp_path, monkeypatch):
    a, b = tmp_path / "a", tmp_path / "b"
    go(data_dir, a)
    memory = fsspec.filesystem("memory")
    failing = [True]  # once
    put = type(memory).put_file

    def put_file(self, source, target, **kwargs):
        if "copy" in target and failing:
            failing.pop()
            raise ConnectionError("no route to the store")
        return put(self, source, target, **kwargs)
    monkeypatch.setattr(type(memory), "put_file", put_file)
    go(data_dir, b, mirror="memory://run")
    assert_same_file(a / "ckpt.pt", b / "ckpt.pt")
    log = (b / "train.log").read_text()
    assert log.count("memory://run did not take ckpt.pt: ConnectionError('no route") == 1
    assert memory.cat_file(memory.glob("/run/copy_*")[-1]) == (b / "ckpt.pt").read_bytes()


@pytest.mark.parametrize("form", ["file", "sharded"])
def test_a_full_store_keeps_no_incomplete_copy(data_dir, tmp_path, monkeypatch, form):
    memory = fsspec.filesystem("memory")
    put, seen = type(memory).put_file, []

    def put_file(self, source, target, **kwargs):
        put(self, source, target, **kwargs)
        seen.append(target)
        if len(seen) > 4 and "ckpt_best.pt" not in target:
            self.pipe_file(target, b"half")
            raise OSError(28, "No space left on device")
    monkeypatch.setattr(type(memory), "put_file", put_file)
    go(data_dir, tmp_path / "out", mirror=f"memory://full_{form}", checkpoint_format=form)
    assert "No space left" in (tmp_path / "out/train.log").read_text()
    assert not [path for path in memory.find(f"/full_{form}") if memory.cat_file(path) == b"half"]


def test_a_store_that_fails_to_list_keeps_its_copies(data_dir, tmp_path, monkeypatch):
    """glob() of fsspec returns nothing then: the shards of all copies would seem to be unused"""
    store, disk = tmp_path / "store", type(fsspec.filesystem("file"))
    settings = dict(mirror=str(store), checkpoint_format="sharded")
    go(data_dir, tmp_path / "out", **settings)
    before, ls = sorted(store.rglob("*")), disk.ls

    def fail(self, path, *args, **kwargs):
        if args or str(path) == str(store):
            raise OSError(5, "the store is away")
        return ls(self, path, **kwargs)
    monkeypatch.setattr(disk, "ls", fail)
    monkeypatch.setattr(disk, "put_file", fail)
    go(data_dir, tmp_path / "out", **settings, max_iters=25)
    assert "the store is away" in (tmp_path / "out/train.log").read_text()
    assert sorted(store.rglob("*")) == before


def test_a_complete_copy_is_kept_if_the_comparison_fails(data_dir, tmp_path, monkeypatch):
    memory = fsspec.filesystem("memory")
    size, fail = memory.size, iter([True])
    monkeypatch.setattr(type(memory), "size", lambda self, path: 1 / 0 if "copy_" in str(
        path) and next(fail, False) else size(path))
    go(data_dir, tmp_path / "out", mirror="memory://compared", max_iters=2, eval_interval=0)
    assert "ZeroDivisionError" in (tmp_path / "out/train.log").read_text()
    copy = memory.cat_file("/compared/copy_000001.pt")
    assert copy == (tmp_path / "out/ckpt.pt").read_bytes()


def test_a_copy_that_arrives_damaged_is_reported(data_dir, tmp_path, monkeypatch):
    memory = fsspec.filesystem("memory")
    monkeypatch.setattr(type(memory), "put_file", lambda self, source, target, **kwargs:
                        self.pipe_file(target, open(source, "rb").read()[:-1]))
    go(data_dir, tmp_path / "out", mirror="memory://damaged")
    assert "has another size or digest" in (tmp_path / "out/train.log").read_text()


def test_a_store_that_hangs_costs_the_wait_at_the_end_only(data_dir, tmp_path, monkeypatch):
    memory = fsspec.filesystem("memory")
    released = threading.Event()
    monkeypatch.setattr(type(memory), "put_file", lambda *args, **kwargs: released.wait(30))
    begin = time.monotonic()
    go(data_dir, tmp_path / "out", mirror="memory://hangs", dist_timeout=1)
    assert time.monotonic() - begin < 6
    released.set()
    log = (tmp_path / "out/train.log").read_text()
    assert log.count("memory://hangs lacks the last checkpoint") == 1 and "Training complete" in log


def test_what_cannot_be_used_is_refused(data_dir, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="expected a folder, got 's3://a/b'.*: --mirror URL"):
        load_config(None, dict(out_dir="s3://a/b"))
    with pytest.raises(CheckpointError, match="mirror: http://127.0.0.1:1/a cannot be used"):
        go(data_dir, tmp_path / "out", mirror="http://127.0.0.1:1/a")
    with pytest.raises(SetupError, match="mirror: nowhere://a: Protocol not known"):
        go(data_dir, tmp_path / "out", mirror="nowhere://a")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(SetupError, match="mirror needs the package fsspec: pip install fsspec"):
        go(data_dir, tmp_path / "out", mirror="s3://bucket/a")


# -----------------------------------------------------------------------------
# a real S3 server (moto's, in a process of its own), behind a line that can be cut

class Line(socketserver.ThreadingTCPServer):
    """A TCP port that leads to another. limit: bytes until every connection is cut; slow: seconds
    that each 64 KiB take."""
    daemon_threads = True

    def __init__(self, target):
        self.target, self.limit, self.slow, self.cuts = target, None, 0, 0
        super().__init__(("127.0.0.1", 0), None)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def finish_request(self, request, address):
        with contextlib.suppress(OSError), socket.create_connection(self.target) as other:
            threading.Thread(target=self.pump, args=(other, request), daemon=True).start()
            self.pump(request, other, there=True)

    def pump(self, source, sink, there=False):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if there and self.limit is not None:
                    self.limit -= len(data)
                    if self.limit <= 0:
                        self.cuts += 1
                        break
                time.sleep(self.slow * there)
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            break
        time.sleep(0.1)
    yield "127.0.0.1", port
    process.kill()
    process.wait()


@pytest.fixture
def s3(server, monkeypatch):
    """(Line to the server, file system), with an empty bucket."""
    line = Line(server)
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # of the line before
    for name, value in dict(AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b",
                            AWS_DEFAULT_REGION="us-east-1", AWS_MAX_ATTEMPTS="1",
                            AWS_ENDPOINT_URL="http://{}:{}".format(*line.server_address)).items():
        monkeypatch.setenv(name, value)
    fs = fsspec.filesystem("s3", endpoint_url="http://{}:{}".format(*server),
                           use_listings_cache=False)
    if fs.exists("bucket"):
        fs.rm("bucket", recursive=True)
    fs.mkdir("bucket")
    yield line, fs
    line.shutdown()
    line.server_close()


@pytest.mark.slow
def test_s3_continues_a_lost_run(data_dir, tmp_path, s3):
    a, b = tmp_path / "a", tmp_path / "b"
    go(data_dir, a)
    killed = Program(data_dir, b, env=dict(FAULT="before_step@12=kill9"), mirror="s3://bucket/run")
    assert killed.wait()[0] == -9
    shutil.rmtree(b)
    code, output = Program(data_dir, b, mirror="s3://bucket/run").wait()
    assert code == 0, output
    assert_same_file(a / "ckpt.pt", b / "ckpt.pt")
    assert_same_file(a / "ckpt_best.pt", b / "ckpt_best.pt")
    names = s3[1].glob("bucket/run/copy_*.pt")
    assert len(names) <= 2 and s3[1].cat_file(names[-1]) == (b / "ckpt.pt").read_bytes()


@pytest.mark.slow
def test_s3_cut_off_in_the_middle(data_dir, tmp_path, s3):
    """First after a part of a checkpoint, then for good; the next start finds what was complete."""
    line, fs = s3
    a, b = tmp_path / "a", tmp_path / "b"
    go(data_dir, a)
    go(data_dir, b, mirror="s3://bucket/run", max_iters=5)
    assert [name.rpartition("/")[2] for name in fs.glob("bucket/run/copy_*.pt")] == [
        "copy_000001.pt"]
    line.limit = 30_000
    go(data_dir, b, mirror="s3://bucket/run")
    log = (b / "train.log").read_text()
    assert line.cuts and log.count("s3://bucket/run did not take ckpt.pt") >= 1
    assert "Training complete" in log
    assert_same_file(a / "ckpt.pt", b / "ckpt.pt")
    assert len(fs.glob("bucket/run/copy_*.pt")) == 1
    line.limit = None
    shutil.rmtree(b)
    go(data_dir, b, mirror="s3://bucket/run", max_iters=5)
    assert tensors(b / "ckpt.pt")[1]["iter_num"] == 5
    line.limit = 0
    shutil.rmtree(b)
    with pytest.raises(CheckpointError, match="mirror: s3://bucket/run cannot be used"):
        go(data_dir, b, mirror="s3://bucket/run")


@pytest.mark.slow
def test_s3_killed_during_a_copy(data_dir, tmp_path, s3):
    line, fs = s3
    b = tmp_path / "b"
    go(data_dir, b, mirror="s3://bucket/run", max_iters=5)
    first = fs.cat_file("bucket/run/copy_000001.pt")
    line.slow = 5
    program = Program(data_dir, b, mirror="s3://bucket/run", n_embd=16, save_interval=5)
    program.wait_for("Saving checkpoint")
    time.sleep(1)
    program.kill()
    line.slow = 0
    names = fs.glob("bucket/run/copy_*.pt")
    assert fs.cat_file(names[0]) == first and len(names) == 1
    shutil.rmtree(b)
    go(data_dir, b, mirror="s3://bucket/run", max_iters=5)
    assert tensors(b / "ckpt.pt")[1]["iter_num"] == 5


@pytest.mark.slow
def test_s3_without_the_bucket_ends_before_the_run(data_dir, tmp_path, s3):
    with pytest.raises(CheckpointError, match="bucket does not exist"):
        go(data_dir, tmp_path / "b", mirror="s3://other/run")
