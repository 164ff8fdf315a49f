"""python -m train.tools.watch through HTTP and in a real browser: curves that grow, and rewinds."""

import contextlib
import http.client
import json
import os
import pathlib
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import urllib.request

import pytest
from browser import soon
from conftest import REPO
from runs import go
from test_plot import lines, parse, texts, write_run

from train.tools import watch

LONG = dict(max_iters=8, eval_interval=4, save_interval=4, keep_last=3)


@contextlib.contextmanager
def watching(folder):
    """(get(path, method) -> (status, body), the server)"""
    with watch.ThreadingHTTPServer(("127.0.0.1", 0), watch.Handler) as server:
        server.folder = str(folder)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()

        def get(path, method="GET"):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
            with contextlib.closing(connection):
                connection.request(method, path)
                reply = connection.getresponse()
                return reply.status, reply.read()
        try:
            yield get, server
        finally:
            server.shutdown()
            thread.join(20)
    assert not thread.is_alive()


def state(get):
    return json.loads(get("/state")[1])


def curves(get):
    """Points of the training curves, rough and smooth."""
    return [line for style in ("faint", "solid")
            for line in lines(parse(state(get)["chart"]), style)[:1]]


def test_a_run_is_one_curve_also_when_it_goes_on_from_an_earlier_step(data_dir, tmp_path):
    out = tmp_path / "a"
    with watching(tmp_path) as (get, _):
        assert state(get)["runs"] == [] and "<svg" in state(get)["chart"]
        go(data_dir, out, **LONG)
        (card,) = state(get)["runs"]
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert card["name"] == str(out) and card["color"] == watch.COLORS[0]
        assert card["evaluation"] == records[-1] and card["step"] == records[-2]
        assert card["lines"] == (out / "train.log").read_text().splitlines()[-12:]
        assert [len(c) for c in curves(get)] == [8]
        # Back to step 4: the curve is the new one, and the only one.
        go(data_dir, out, **LONG | dict(max_iters=6, resume=str(out / "ckpt_0000004.pt")))
        assert state(get)["runs"][0]["evaluation"]["iter"] == 6
        (curve,) = curves(get)
        assert len(curve) == 6 and [x for x, _ in curve] == sorted({x for x, _ in curve})


def test_only_runs_that_have_changed_are_read(tmp_path, monkeypatch):
    folder, read = write_run(tmp_path / "a", steps=100), []
    write_run(tmp_path / "b", steps=100)
    read_metrics = watch.read_metrics
    monkeypatch.setattr(watch, "read_metrics", lambda path, limit: (
        read.append(path.parent.name), read_metrics(path, limit))[1])
    with watching(tmp_path) as (get, _):
        assert state(get) == state(get) and sorted(read) == ["a", "b"]
        with open(folder / "metrics.jsonl", "ab", 0) as f:
            f.write(b'{"iter": 101, "loss": 1}\n{"iter"')  # half a line is left out
        assert state(get)["runs"][0]["step"]["iter"] == 101 and read[2:] == ["a"]


def test_a_long_run_keeps_its_evaluations(tmp_path):
    most = watch.MAX_LINES
    records, _ = watch.read_run(write_run(tmp_path, steps=9 * most, evals=1000), (0.0, 0))
    assert [r["iter"] for r in records if "val_loss" in r] == list(range(0, 9 * most + 1, 1000))
    steps = [r["iter"] for r in records if "loss" in r]
    gaps = [b - a for a, b in zip(steps, steps[1:])]
    assert most / 2 < len(steps) <= most and steps[0] < 20 and steps[-1] > 9 * most - 20
    assert 0 < min(gaps) and max(gaps) < 20


def test_the_newest_runs_are_shown(tmp_path):
    """Wherever they are below the folder, and nothing of other folders."""
    def names(get):
        return [os.path.relpath(run["name"], tmp_path) for run in state(get)["runs"]]
    for n, name in enumerate(("b", "repeat/x=1/seed_2", "c", "d", "e", "f", "g", ".hidden/h",
                              "g/old_1")):
        file = write_run(tmp_path / name) / "metrics.jsonl"
        os.utime(file, (n, n))
    (tmp_path / "empty").mkdir()
    with watching(tmp_path) as (get, _):
        assert names(get) == ["c", "d", "e", "f", "g", "repeat/x=1/seed_2"]
        assert sum(": loss " in t for t in texts(parse(state(get)["chart"]))) == 6
        os.utime(tmp_path / "b/metrics.jsonl", (9, 9))
        assert names(get) == ["b", "c", "d", "e", "f", "g"]
    with watching(tmp_path / "b") as (get, _):
        assert names(get) == ["b"]


def test_the_state_of_each_run(data_dir, tmp_path):
    """Of real runs: finished, also after a second start and an evaluation; stopped; running."""
    def cards(get):
        return {os.path.basename(run["name"]): run for run in state(get)["runs"]}
    for name in "ab":
        go(data_dir, tmp_path / name, **LONG)
    go(data_dir, tmp_path / "a", **LONG)
    go(data_dir, tmp_path / "b", eval_only=True, **LONG)
    go(data_dir, tmp_path / "c", "before_step@5=sigterm", **LONG)
    with watching(tmp_path) as (get, _):
        assert {name: card["state"] for name, card in cards(get).items()} == dict(
            a="finished", b="finished", c="stopped")
        with open(tmp_path / "b/train.log", "a") as f:
            f.write("Learning rate: 0.1\niter 8: loss 1.0, 30 tok/s, eta 0:04:10\n")
        assert cards(get)["b"]["state"] == "running" and cards(get)["b"]["eta"] == "0:04:10"
        with open(tmp_path / "b/train.log", "a") as f:
            f.write("iter 9: loss 1.0, eta 2 days, 3:00:00, accuracy 0.5\n")
        assert cards(get)["b"]["eta"] == "2 days, 3:00:00"


def test_the_last_samples_are_shown(tmp_path):
    folder = write_run(tmp_path / "a")
    with watching(tmp_path) as (get, _):
        assert state(get)["runs"][0]["sample"] == ""
        (folder / "samples.txt").write_text(
            "=== iter 5 ===\nold\n\n=== iter 10 ===\nnew <b>\n\n=== iter 10 ===\nsecond\n\n")
        assert state(get)["runs"][0]["sample"] == "=== iter 10 ===\nsecond"
        with open(folder / "samples.txt", "ab") as f:
            f.write(b"=== iter 15 ===\n" + b"\xff" * 40_000)
        assert set(state(get)["runs"][0]["sample"]) == {"\ufffd"}
        assert get("/../watch.py")[0] == 404 and get("/state", "POST")[0] == 501


def test_a_browser_that_resets_its_connection_prints_nothing(tmp_path, capsys):
    with watching(tmp_path) as (get, server):
        for sent in (b"", b"GET /state HT", b"GET /state HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            for _ in range(5):
                client = socket.create_connection(("127.0.0.1", server.server_port))
                client.sendall(sent)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()  # with a reset
        assert get("/state")[0] == 200
    assert not capsys.readouterr().err


def test_folders_that_vanish_and_files_that_keep_their_time(tmp_path, monkeypatch):
    """Shards of a save are removed while the folders are listed; a time may have whole seconds."""
    run = write_run(tmp_path / "a", steps=3)
    (run / "shards/1").mkdir(parents=True)
    walk = os.walk

    def vanishing(top):
        for folder, subfolders, files in walk(top):
            if "shards" in subfolders and os.path.exists(f"{folder}/shards/1"):
                os.rmdir(f"{folder}/shards/1")
                os.rmdir(f"{folder}/shards")
            yield folder, subfolders, files
    monkeypatch.setattr(os, "walk", vanishing)
    (folder, stamp), = watch.find_runs(tmp_path)
    with open(run / "metrics.jsonl", "a") as f:
        f.write('{"iter": 9}\n')
    os.utime(run / "metrics.jsonl", (stamp[0], stamp[0]))
    assert folder == run and watch.find_runs(tmp_path) != ((folder, stamp),)


def test_the_command(tmp_path):
    """It starts at once, as it does without torch, and ends when it is asked to."""
    write_run(tmp_path / "a")
    command = [sys.executable, "-m", "train.tools.watch", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, cwd=REPO, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:
        url = re.search(r"http://\S+", process.stdout.readline())[0]
        page = urllib.request.urlopen(url)
        assert page.headers.get_content_type() == "text/html"
        assert b"http" not in page.read()
        (run,) = json.load(urllib.request.urlopen(url + "/state"))["runs"]
        assert run["name"] == str(tmp_path / "a")
        if os.path.exists(f"/proc/{process.pid}/maps"):
            assert "torch" not in pathlib.Path(f"/proc/{process.pid}/maps").read_text()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130 and "Traceback" not in process.stderr.read()


@pytest.mark.parametrize("args, message", [
    (["nowhere"], "nowhere: no such folder"),
    ([".", "--port", "70000"], "--port: must be at most")])
def test_what_cannot_be_is_refused(args, message, capsys):
    assert watch.main(args) == 2 and message in capsys.readouterr().err


def test_a_port_that_is_in_use_is_refused(tmp_path, capsys):
    with watching(tmp_path) as (_, server):
        assert watch.main([str(tmp_path), "--port", str(server.server_port)]) == 2
    assert "Address already in use" in capsys.readouterr().err


def test_the_page(browser, tmp_path):
    """Curves and cards that grow, on a phone and a desk, day and night. PICTURES names a folder for
    what it looks like."""
    pictures = os.environ.get("PICTURES")
    for name in ("quick", "repeat/learning_rate=2e-3,n_layer=4,muon_lr=0.03/seed_1"):
        folder = write_run(tmp_path / name, floor=2.0 + len(name) / 50)
        (folder / "train.log").write_text("a line <i>\n" * 20)
        (folder / "samples.txt").write_text("=== iter 5 ===\n<b>text</b>\n\n")
    with watching(tmp_path) as (_, server):
        browser("Page.navigate", url=f"http://127.0.0.1:{server.server_port}/")
        soon(lambda: browser.js("document.querySelectorAll('#chart circle').length") == 10)
        assert browser.js("document.title") == "2 runs"
        assert "<b>text</b>" in browser.js("document.getElementById('runs').innerText")
        browser.js("document.querySelector('summary').scrollIntoView()")
        browser.click("summary")
        with open(tmp_path / "quick/metrics.jsonl", "a") as f:
            f.write('{"iter": 250, "val_loss": 1.25}\n')
        text = "document.getElementById('runs').innerText"
        soon(lambda: "validation 1.2500 \u00b7 200 tok/s" in browser.js(text))
        assert browser.js(text).count("running") == 2
        assert browser.js("document.querySelectorAll('#chart circle').length") == 11
        assert browser.js("document.querySelectorAll('details[open]').length") == 3
        browser.js("scrollTo(0, 0)")
        for size in (360, 640), (1280, 800):
            for dark in (False, True):
                name = f"watch-{size[0]}-{'dark' if dark else 'light'}.png"
                width, picture = browser.look(
                    *size, dark, pathlib.Path(pictures, name) if pictures else None)
                assert width <= size[0] and len(picture) > 5000  # nothing sticks out
        assert browser.problems == []
    soon(lambda: browser.js("document.getElementById('state').className") == "wrong")
