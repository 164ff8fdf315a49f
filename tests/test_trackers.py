"""The optional trackers, with the real packages; what they show is read back from their files."""

import glob
import json
import subprocess
import sys
import time

import pytest
import yaml
from conftest import REPO, TINY
from runs import go

from train.config import load_config
from train.logger import Logger
from train.options.trackers import Trackers, tracked_numbers

NAMES = {"train/loss", "lr", "grad_norm", "tokens_per_sec", "val/loss", "val/ppl", "val/bpb"}
CONFIG = dict(learning_rate=6e-4, n_layer=2, run_name="try 1", tracker=["x"], min_lr=None)


def step(k, **changes):
    return dict(iter=k, max_iters=6, tokens=(k + 1) * 10, loss=3.0 - k / 10, lr=1e-3, grad_norm=0.5,
                time_ms=1.0, tokens_per_sec=100.0, mfu=None, eta_s=1.0) | changes


def alone(home, monkeypatch):
    """Nobody's login, nobody's server."""
    monkeypatch.setenv("HOME", str(home))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT", "MLFLOW_TRACKING_URI", "NETRC"):
        monkeypatch.delenv(name, raising=False)


def run(out, name, first, last, monkeypatch, status="finished"):
    """Steps first ... last - 1 and an evaluation, as the loop logs them; what the console said."""
    alone(out.parent, monkeypatch)
    out.mkdir(exist_ok=True)
    (out / "config.yaml").write_text("n_layer: 2\n")
    log = Logger(out, trackers=[name], config=CONFIG, system_info=dict(device="cpu"))
    log.start(first)
    for k in range(first, last):
        log.step(step(k))
    log.evaluation(dict(iter=last, tokens=last * 10, train_loss=2.0, val_loss=1.5, val_ppl=4.48,
                        val_bpb=0.9))
    log.plot()
    log.close(status)
    assert "failed and is dropped" not in (out / "train.log").read_text()


def test_tensorboard(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    run(tmp_path / "a", "tensorboard", 0, 4, monkeypatch)
    run(tmp_path / "a", "tensorboard", 2, 6, monkeypatch)
    events = EventAccumulator(str(tmp_path / "a" / "tensorboard")).Reload()
    assert NAMES <= set(events.Tags()["scalars"])
    # Steps 2 and 3 of the first part were done again: purged, not shown twice.
    assert [e.step for e in events.Scalars("train/loss")] == [0, 1, 2, 3, 4, 5]
    assert events.Scalars("train/loss")[3].value == pytest.approx(2.7)
    assert [e.step for e in events.Scalars("val/loss")] == [6]


def scalars(folder, name):
    """[(step, value)] that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(folder)).Reload().Scalars(name)
    return [(e.step, round(e.value, 4)) for e in events]


def test_tensorboard_keeps_the_evaluation_that_a_resume_does_not_repeat(tmp_path):
    """Saved after the evaluation at step 4, killed at step 6, resumed."""
    pytest.importorskip("tensorboard")
    log = Logger(tmp_path, trackers=["tensorboard"])
    log.start(0)
    for k in range(7):
        if k % 2 == 0:
            log.evaluation(dict(iter=k, val_loss=3.0 - k / 10, val_f1=k / 10))
        log.step(step(k))
    log.close("failed")
    log = Logger(tmp_path, trackers=["tensorboard"])
    log.start(4, evaluated=True)
    for k in range(4, 8):
        if k == 6:
            log.evaluation(dict(iter=k, val_loss=2.0, val_f1=0.9))
        log.step(step(k))
    log.close()
    folder = tmp_path / "tensorboard"
    assert scalars(folder, "val/loss") == [(0, 3.0), (2, 2.8), (4, 2.6), (6, 2.0)]
    assert scalars(folder, "val/f1") == [(0, 0.0), (2, 0.2), (4, 0.4), (6, 0.9)]
    assert {k for k, _ in scalars(folder, "train/loss")} == {*range(8)}  # 4 is there twice


def test_tensorboard_through_a_resumed_run(tmp_path, data_dir):
    """The program itself, stopped after an evaluation and started again."""
    pytest.importorskip("tensorboard")
    from train.config import load_config
    from train.train import train
    for length in (4, 8):
        train(load_config(None, TINY | dict(
            data_dir=str(data_dir), out_dir=str(tmp_path), vocab_size=256, max_iters=length,
            lr_decay_iters=8, eval_interval=2, tracker=["tensorboard"])))
    folder = tmp_path / "tensorboard"
    assert [k for k, _ in scalars(folder, "val/loss")] == [0, 2, 4, 6, 8]
    assert [k for k, _ in scalars(folder, "train/loss")] == list(range(8))


def finished_records(folder, seconds=20):
    """The records of a W&B offline run, up to its exit, which W&B's own process writes a little
    after finish() has returned."""
    for _ in range(seconds * 20):
        records = list(offline_records(folder))
        if records and records[-1].HasField("exit"):
            return records
        time.sleep(0.05)
    raise AssertionError(f"{folder} has no exit record")


def offline_records(folder):
    """The records in its file: a LevelDB log (after 7 bytes of W&B's own) of protobufs."""
    from wandb.proto import wandb_internal_pb2
    (file,), parts, at = folder.glob("run-*.wandb"), b"", 7
    data = file.read_bytes()
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the rest of a block that no header fits into
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4:at + 6], "little"), data[at + 6]
        if at + 7 + size > len(data):
            return  # still being written
        parts += data[at + 7:at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


@pytest.mark.ci
def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    run(tmp_path / "a", "wandb", 0, 4, monkeypatch)
    time.sleep(1.1)  # W&B names its folders by the second
    run(tmp_path / "a", "wandb", 2, 6, monkeypatch, "failed")
    parts = sorted((tmp_path / "a" / "wandb").glob("offline-run-*"))
    run_id = json.loads((tmp_path / "a" / "tracker.json").read_text())["wandb"]
    assert len(parts) == 2 and all(run_id in p.name for p in parts)  # the same run goes on
    rows, configs, exits = [], {}, []
    for part in parts:
        for record in finished_records(part):
            if record.HasField("history"):
                rows.append({i.key or i.nested_key[0]: json.loads(i.value_json)
                             for i in record.history.item})
            if record.HasField("run"):
                configs |= {u.key: json.loads(u.value_json) for u in record.run.config.update}
                assert (record.run.display_name, record.run.project) == ("try 1", "ironGPT")
            if record.HasField("exit"):
                exits.append(record.exit.exit_code)
    said = (tmp_path / "a" / "train.log").read_text()
    command = f"wandb sync {tmp_path}/a/wandb/offline-run-*-{run_id}"
    assert said.count(f"W&B is offline; to upload this run: {command}\n") == 2
    assert len(glob.glob(command.split()[-1])) == 2
    losses = [(r["iter"], r["train/loss"]) for r in rows if "train/loss" in r]
    assert [k for k, _ in losses] == [0, 1, 2, 3, 2, 3, 4, 5]
    assert losses[-1][1] == pytest.approx(2.5)
    assert [r["val/loss"] for r in rows if "val/loss" in r] == [1.5, 1.5]
    assert configs["n_layer"] == 2 and configs["system"]["device"] == "cpu"
    assert exits == [0, 1]
    assert (tmp_path / "a" / "config.yaml").read_text() == "n_layer: 2\n"  # W&B has a file so named


@pytest.mark.ci
def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    run(tmp_path / "a", "mlflow", 0, 4, monkeypatch, "stopped")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    run_id = json.loads((tmp_path / "a" / "tracker.json").read_text())["mlflow"]
    assert client.get_run(run_id).info.status == "KILLED"
    run(tmp_path / "a", "mlflow", 4, 6, monkeypatch)
    (only,) = client.search_runs([client.get_experiment_by_name("ironGPT").experiment_id])
    assert only.info.run_id == run_id and only.info.run_name == "try 1"
    assert only.info.status == "FINISHED"
    assert only.data.params["n_layer"] == "2" and only.data.params["min_lr"] == "None"
    assert only.data.tags["system.device"] == "cpu" and "system.versions" in only.data.tags
    history = client.get_metric_history(run_id, "train/loss")
    assert [m.step for m in history] == list(range(6))
    assert [m.value for m in history] == pytest.approx([3.0 - k / 10 for k in range(6)])
    assert NAMES <= set(only.data.metrics)


def test_mlflow_tells_the_address_of_a_server(tmp_path, monkeypatch):
    """`mlflow ui` cannot show what a server has. A server that is not there is a warning, and soon:
    the ranks wait."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    with Logger(tmp_path, trackers=["mlflow"]) as log:
        log.start(0)
    assert mlflow.environment_variables.MLFLOW_HTTP_REQUEST_MAX_RETRIES.get() == 3
    text = (tmp_path / "train.log").read_text()
    assert " MLflow: http://127.0.0.1:9\n" in text and "'mlflow' failed and is dropped" in text


def bare_python(code, folder):
    """Run code in a Python without any installed package but PyYAML; its completed process."""
    (folder / "lib").mkdir()
    (folder / "lib" / "yaml").symlink_to(yaml.__path__[0])
    code = (f"import sys; sys.path[:0] = [{str(REPO)!r}, {str(folder / 'lib')!r}]; "
            f"import train.options.trackers as t; {code}")
    return subprocess.run([sys.executable, "-S", "-c", code], cwd=folder, capture_output=True,
                          text=True)


def test_a_missing_package_is_one_line(tmp_path):
    (tmp_path / "wandb").mkdir()  # a folder is no package
    done = bare_python("t.check_trackers(['wandb', 'mlflow'])", tmp_path)
    assert done.stderr.strip().split("\n")[-1] == (
        "train.base.errors.SetupError: tracker 'wandb' needs the 'wandb' package: pip install "
        "wandb (or drop --tracker)")


def test_an_unknown_tracker_is_named_before_work_starts():
    with pytest.raises(ValueError, match="tracker: must be one of tensorboard, wandb, mlflow"):
        load_config(None, ["--tracker", "tensorboard,excel"])


def test_numbers_have_the_names_that_trackers_show():
    assert tracked_numbers(dict(iter=3, loss=2, lr=0.1, mfu=None, note="x")) == {
        "train/loss": 2.0, "lr": 0.1}
    assert tracked_numbers(dict(iter=3, val_loss=2.0, val_bpb=None, val_f1=0.5)) == {
        "val/loss": 2.0, "val/f1": 0.5}
    assert tracked_numbers(dict(iter=3, val_val_x=1, interval_ms=2.0)) == {"val/val_x": 1.0,
                                                                   "interval_ms": 2.0}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder for runs: MLflow takes more than a second to make the database beside them."""
    return tmp_path_factory.mktemp("my home")


def test_trackers_are_split_at_commas(home):
    config, out = load_config(None, {"tracker": "tensorboard, mlflow,tensorboard"}), home / "split"
    out.mkdir()
    with Logger(out, trackers=config.tracker) as log:
        log.start(0)
        log.step(step(0))
    assert (out / "tensorboard").is_dir()
    assert json.loads((out / "tracker.json").read_text()).keys() == {"mlflow"}
    assert (home / "mlflow.db").exists() and "dropped" not in (out / "train.log").read_text()
    assert f"--backend-store-uri 'sqlite:///{home}/mlflow.db'" in (out / "train.log").read_text()


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_numbers_with_any_name(home, name):
    pytest.importorskip(name)
    out = home / name
    out.mkdir()
    with Logger(out, trackers=[name]) as log:
        log.start(0)
        log.step(step(0, **{"recall@5": 0.25, "f1 (macro), %": 1.0}))
    assert "dropped" not in (out / "train.log").read_text()
    if name == "mlflow":
        import mlflow
        client = mlflow.MlflowClient(f"sqlite:///{home}/mlflow.db")
        run_id = json.loads((out / "tracker.json").read_text())["mlflow"]
        metrics = client.get_run(run_id).data.metrics
        assert metrics["recall_5"] == 0.25 and metrics["f1 _macro__ _"] == 1.0


def test_wandb_tells_the_address_of_its_run(tmp_path, monkeypatch):
    """Online, with W&B's own client made to believe it: there is no network here."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(wandb.Run, "url", "https://wandb.ai/me/ironGPT/runs/abc", raising=False)
    monkeypatch.setattr(wandb.Run, "offline", False, raising=False)
    alone(tmp_path, monkeypatch)
    with Logger(tmp_path, trackers=["wandb"]) as log:
        log.start(0)
        log.step(step(0))
    assert "W&B: https://wandb.ai/me/ironGPT/runs/abc" in (tmp_path / "train.log").read_text()


def test_opening_a_tracker_is_no_time_of_a_step(tmp_path, data_dir, monkeypatch):
    monkeypatch.setattr(Trackers, "__init__", lambda *args: time.sleep(0.5))
    monkeypatch.setattr(Trackers, "call", lambda *args: None)
    go(data_dir, tmp_path, tracker=["wandb"], max_iters=1)
    records = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert next(r["time_ms"] for r in records if "loss" in r) < 400


def test_a_tracker_that_fails_is_dropped_with_one_warning(tmp_path):
    class Breaks:
        def record(self, record):
            raise RuntimeError("quota exceeded\nmore")
    with Logger(tmp_path) as log:
        log.trackers = Trackers([], log)
        log.trackers.trackers["wandb"] = Breaks()
        log.step(step(0))
        log.step(step(1))
    text = (tmp_path / "train.log").read_text()
    assert text.count("tracker 'wandb' failed") == 1
    assert "'wandb' failed and is dropped, training continues: quota exceeded\n" in text


def test_a_tracker_that_does_not_open_is_left_out(tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").write_text("a file in the way")
    with Logger(tmp_path, trackers=["tensorboard"]) as log:
        log.start(0)
        log.step(step(0))
        log.step(step(1))
    assert (tmp_path / "train.log").read_text().count("is dropped") == 1
