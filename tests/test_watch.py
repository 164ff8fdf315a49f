"""python -m train.tools.watch through HTTP and in a real browser: curves that grow, and rewinds."""

import contextlib
import http.client
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
from browser import soon
from conftest import REPO
from runs import go
from test_plot import lines, parse, texts, write_run

from train.tools import watch

LONG = dict(max_iters=8, eval_interval=4, save_interval=4, keep_last=3)


@contextlib.contextmanager
def watching(*folders, most=6):
    """(get(path, **headers) -> (status, body), the server)"""
    options = watch.WatchOptions([str(f) for f in folders], port=0, runs=most)
    with watch.open_server(options) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()

        def get(path, method="GET", **headers):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
            with contextlib.closing(connection):
                connection.request(method, path, headers=headers)
                reply = connection.getresponse()
                return reply.status, reply.read()
        try:
            yield get, server
        finally:
            server.shutdown()
            thread.join(20)
    assert not thread.is_alive()


@pytest.fixture
def at_once(monkeypatch):
    """Updates at every request."""
    monkeypatch.setattr(watch, "MIN_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(watch, "CPU_SHARE", 1e9)


def state(get):
    return json.loads(get("/state")[1])


def curves(get, path="/wide"):
    """Points of the training curves, rough and smooth."""
    return [line for style in ("faint", "solid")
            for line in lines(parse(get(path)[1]), style)[:1]]


def test_a_run_is_one_curve_also_when_it_goes_on_from_an_earlier_step(
        at_once, data_dir, tmp_path):
    out = tmp_path / "a"
    with watching(tmp_path) as (get, _):
        assert state(get)["runs"] == [] and b"<svg" in get("/wide")[1]
        go(data_dir, out, **LONG)
        first = state(get)
        (card,) = first["runs"]
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert (card["name"], card["iter"]) == ("a", 8) and card["color"] == 0
        assert card["val_loss"] == records[-1]["val_loss"] and card["loss"] == records[-2]["loss"]
        assert card["best"] == min(r["val_loss"] for r in records if "val_loss" in r)
        assert card["lines"] == (out / "train.log").read_text().splitlines()[:-13:-1]
        assert [len(c) for c in curves(get)] == [8]
        # Back to step 4: the curve is the new one, and the only one.
        go(data_dir, out, **LONG | dict(max_iters=6, resume=str(out / "ckpt_0000004.pt")))
        second = state(get)
        assert second["version"] > first["version"] and second["runs"][0]["iter"] == 6
        for path, width in (("/wide", "960"), ("/narrow", "420")):
            assert parse(get(path)[1]).get("width") == width
            (curve,) = curves(get, path)
            assert len(curve) == 6 and [x for x, _ in curve] == sorted({x for x, _ in curve})


def test_only_files_that_have_changed_are_read(at_once, tmp_path, monkeypatch):
    folder, read = write_run(tmp_path / "a", steps=100), []
    write_run(tmp_path / "b", steps=100)
    read_metrics = watch.read_metrics
    monkeypatch.setattr(watch, "read_metrics", lambda path, limit: (
        read.append(path.parent.name), read_metrics(path, limit))[1])
    with watching(tmp_path) as (get, _):
        version = state(get)["version"]
        assert state(get)["version"] == version and sorted(read) == ["a", "b"]
        with open(folder / "metrics.jsonl", "ab", 0) as f:
            f.write(b'{"iter": 101}\n{"iter"')  # half a line is left out
        new = state(get)
        assert new["version"] > version and read[2:] == ["a"] and new["runs"][0]["iter"] == 101
        os.replace(folder / "metrics.jsonl", folder / "metrics.jsonl.old")
        (folder / "train.log").write_text("a line\n")
        assert state(get)["runs"][0]["iter"] is None and read[3:] == ["a"]


def test_a_long_run_keeps_its_evaluations(tmp_path):
    most = watch.MAX_TRAINING_LINES
    run = watch.Run(write_run(tmp_path, steps=9 * most, evals=1000))
    assert run.update() and not run.update()
    assert [r["iter"] for r in run.records if "val_loss" in r] == list(range(0, 9 * most + 1, 1000))
    steps = [r["iter"] for r in run.records if "loss" in r]
    gaps = [b - a for a, b in zip(steps, steps[1:])]
    assert most / 2 < len(steps) <= most and steps[0] < 20 and steps[-1] > 9 * most - 20
    assert 0 < min(gaps) and max(gaps) < 20


def test_polls_do_no_work_of_their_own(tmp_path, monkeypatch):
    """However many they are, the files are looked at once per interval."""
    write_run(tmp_path / "a")
    looked = []
    monkeypatch.setattr(watch, "MIN_INTERVAL_SECONDS", 1000.0)
    monkeypatch.setattr(watch, "find_runs", lambda tops: looked.append(0) or [tmp_path / "a"])
    with watching(tmp_path) as (get, _):
        assert all(get("/state")[0] == get("/wide")[0] == 200 for _ in range(20))
        assert len(looked) == 1


def test_it_takes_a_hundredth_of_a_core_at_most(tmp_path, monkeypatch):
    """After an update it waits for a hundred times the CPU time that this took, but 30 s at most;
    drawing counts, also where the files were read before."""
    now, spent, cost = [1000.0], [0.0], dict(update=0.0, draw=0.0)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "process_time", lambda: spent[0])
    watcher, updates = watch.Watcher(watch.WatchOptions([str(tmp_path)])), []

    def update():
        spent[0] += cost["update"]
        updates.append(now[0])
        watcher.bodies = {"/state": b"{}"}

    def draw(width, max_name):
        spent[0] += cost["draw"]
        return b"<svg/>"
    watcher.update, watcher.draw = update, draw
    for cost["update"], cost["draw"], wait in ((0.002, 0.0, 1.0), (0.05, 0.0, 5.0),
                                               (0.001, 0.2, 20.0), (9.0, 0.0, 30.0)):
        began = now[0]
        assert watcher.get("/state") == b"{}" and watcher.get("/wide") == b"<svg/>"
        for now[0] in (began, began + wait - 0.01):
            watcher.get("/state"), watcher.get("/wide")
        assert updates[-1] == began
        now[0] = began + wait + 0.01
        cost.update(update=0.0, draw=0.0)
        watcher.get("/state")
        assert updates[-1] == now[0]
        now[0] += 1000


def test_the_newest_runs_are_shown(at_once, tmp_path):
    """Wherever they are below the folder, and nothing of other folders."""
    for n, name in enumerate(("b", "repeat/x=1/seed_2", "c", ".hidden/d", "1/2/3/4/e")):
        file = write_run(tmp_path / name) / "metrics.jsonl"
        os.utime(file, (n, n))
    (tmp_path / "empty").mkdir()
    with watching(tmp_path, most=2) as (get, _):
        assert [r["name"] for r in state(get)["runs"]] == ["c", "repeat/x=1/seed_2"]
        assert "2 runs (dashed: validation)" in texts(parse(get("/wide")[1]))
        os.utime(tmp_path / "b/metrics.jsonl", (9, 9))
        assert [r["name"] for r in state(get)["runs"]] == ["b", "c"]
    with watching(tmp_path / "b") as (get, _):
        assert [r["name"] for r in state(get)["runs"]] == ["b"]


def test_the_last_samples_are_shown(at_once, tmp_path):
    folder = write_run(tmp_path / "a")
    with watching(tmp_path) as (get, _):
        assert state(get)["runs"][0]["sample"] == ""
        (folder / "samples.txt").write_text(
            "=== iter 5 ===\nold\n\n=== iter 10 ===\nnew <b>\n\n=== iter 10 ===\nsecond\n\n")
        assert state(get)["runs"][0]["sample"] == (
            "=== iter 10 ===\nnew <b>\n\n=== iter 10 ===\nsecond")
        with open(folder / "samples.txt", "ab") as f:
            f.write(b"=== iter 15 ===\n" + b"\xff" * 40_000)
        assert set(state(get)["runs"][0]["sample"]) == {"\ufffd"}


@pytest.mark.parametrize("path, method, headers, status", [
    ("/state", "GET", dict(Host="evil.example"), 403), ("/", "GET", dict(Host="evil.example"), 403),
    ("/state", "GET", dict(Origin="http://evil.example"), 403),
    ("/state", "GET", dict(Origin="null"), 403), ("/state", "POST", {}, 501),
    ("/../watch.py", "GET", {}, 404), ("/state", "GET", dict(Host="localhost:1"), 200),
    ("/", "GET", {}, 200)])
def test_pages_of_others_are_refused(tmp_path, path, method, headers, status):
    with watching(tmp_path) as (get, _):
        assert get(path, method, **headers)[0] == status


def test_the_command(tmp_path):
    """It starts at once, as it does without torch, and ends when it is asked to."""
    write_run(tmp_path / "a")
    command = [sys.executable, "-m", "train.tools.watch", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, cwd=REPO, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:
        url = re.search(r"http://\S+", process.stdout.readline())[0]
        page = urllib.request.urlopen(url)
        assert "default-src 'none'" in page.headers["Content-Security-Policy"]
        assert b"http" not in page.read()
        assert json.load(urllib.request.urlopen(url + "/state"))["runs"][0]["name"] == "a"
        if os.path.exists(f"/proc/{process.pid}/maps"):
            assert "torch" not in pathlib.Path(f"/proc/{process.pid}/maps").read_text()
        process.terminate()
        assert process.wait(20) == 0 and "Traceback" not in process.stderr.read()


@pytest.mark.parametrize("args, message", [
    (["nowhere"], "nowhere: no such folder"), (["--port", "70000", "."], "--port: must be at most"),
    (["--runs", "0"], "--runs: must be at least 1"), (["--x", "miles"], "--x: must be one of")])
def test_what_cannot_be_is_refused(args, message, capsys):
    assert watch.main(args) == 2 and message in capsys.readouterr().err


def test_a_port_that_is_in_use_is_refused(tmp_path, capsys):
    with watching(tmp_path) as (_, server):
        assert watch.main([str(tmp_path), "--port", str(server.server_port)]) == 2
    assert "choose another port" in capsys.readouterr().err


def test_the_page(browser, at_once, tmp_path):
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
        soon(lambda: "best 1.25" in browser.js("document.getElementById('runs').innerText"))
        assert browser.js("document.querySelectorAll('#chart circle').length") == 11
        assert browser.js("document.querySelectorAll('details[open]').length") == 3
        browser.js("scrollTo(0, 0)")
        for size, wide in (((360, 640), 420), ((1280, 800), 960)):
            for dark in (False, True):
                browser.look(*size, dark)
                soon(lambda w=wide: browser.js(
                    "document.querySelector('#chart svg').viewBox.baseVal.width") == w)
                name = f"watch-{size[0]}-{'dark' if dark else 'light'}.png"
                width, picture = browser.look(
                    *size, dark, pathlib.Path(pictures, name) if pictures else None)
                assert width <= size[0] and len(picture) > 5000  # nothing sticks out
        assert browser.problems == []
    soon(lambda: browser.js("document.getElementById('state').className") == "wrong")
