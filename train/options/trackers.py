"""Optional trackers: TensorBoard, Weights & Biases, MLflow. Imported only when `tracker` names one.

A tracker that fails while running is dropped with one warning; training goes on."""

import importlib.util
import json
import netrc
import os
import re
import shlex
import time
import uuid
from contextlib import suppress
from pathlib import Path

from train.base.errors import SetupError
from train.options.loss_svg import read_metrics

PACKAGES = dict(tensorboard=["tensorboard"], wandb=["wandb"], mlflow=["mlflow", "sqlalchemy"])


def check_trackers(names):
    """Raise SetupError, a line for each that is missing, unless all these trackers are there."""
    missing = [name for name in names  # mlflow-skinny lacks the sqlite store
               if not all(map(_installed, PACKAGES[name]))]
    if missing:
        raise SetupError("\n".join(
            f"tracker {name!r} needs the {name!r} package: pip install {name} (or drop --tracker)"
            for name in missing))


def _installed(package):
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # a mere folder of that name has no origin


def open_trackers(names, out_dir, config, run_name, system_info, resume_iter=None, warn=print,
                  evaluated=False, say=print):
    """Trackers with .record(record), .rewind(iter, evaluated), .artifact(path) and .close(status);
    none of these raises. A tracker that does not open is left out, with a warning.

    config and system_info: flat dicts. resume_iter: the iteration the run goes on at (None: new),
    evaluated: whether the evaluation there is not repeated. The ids in out_dir/tracker.json make a
    resumed run the same run."""
    kinds = dict(tensorboard=TensorBoard, wandb=WandB, mlflow=MLflow)
    opened = [_Guarded(name, warn, lambda kind=kinds[name]: kind(
        out_dir, config, run_name, system_info, resume_iter, evaluated))
        for name in dict.fromkeys(names)]
    opened = [guarded for guarded in opened if guarded.tracker]
    for guarded in opened:
        if guarded.tracker.address:
            say(guarded.tracker.address)
    return opened


def numbers(record):
    """The numbers of a metrics.jsonl record by the names trackers show: train/loss, val/ppl, ..."""
    names = {"loss": "train/loss", "train_loss": "train/mean_loss"}
    return {names.get(k, re.sub("^val_", "val/", k)): float(v) for k, v in record.items()
            if isinstance(v, (int, float)) and k != "iter"}


class _Guarded:
    """A tracker whose methods never raise: the first failure drops it."""

    def __init__(self, name, warn, make):
        self.name, self.warn, self.tracker = name, warn, None
        self.tracker = self._try(make)

    def __getattr__(self, method):  # record, log, rewind, artifact, close
        return lambda *args: self.tracker and self._try(getattr(self.tracker, method), *args)

    def _try(self, action, *args):
        try:
            return action(*args)
        except Exception as error:
            self.tracker = None
            reason = (str(error).strip() or type(error).__name__).split("\n")[0][:200]
            self.warn(f"tracker {self.name!r} failed and is dropped, training goes on: {reason}")


class Tracker:
    """What the trackers share: records become numbers; a tracker without artifacts ignores them."""
    address = None  # a line about where to look

    def record(self, record):
        self.log(numbers(record), record["iter"])

    def rewind(self, iter, evaluated=False):
        """What is at `iter` and beyond will come again, but an evaluation there that is kept
        (evaluated)."""

    def artifact(self, path):
        """Keep a small file with the run, if there is one."""


def _remember(out_dir, name, new=None):
    """The id in out_dir/tracker.json under `name`, replaced by `new` if given; None without one."""
    path, ids = Path(out_dir, "tracker.json"), {}
    with suppress(OSError, ValueError, TypeError, RecursionError):
        ids = dict(json.loads(path.read_text()))
    if new:
        from train.base.files import write_text
        write_text(path, json.dumps(ids := {**ids, name: new}))
    return ids.get(name)


class TensorBoard(Tracker):
    """Event files in out_dir/tensorboard: tensorboard --logdir out."""

    def __init__(self, out_dir, config, run_name, system_info, resume_iter, evaluated):
        self.out_dir, self.writer = out_dir, None
        self.rewind(resume_iter, evaluated)
        for name, table in (("config", config), ("system", system_info)):
            rows = "".join(f"| {k} | {v} |\n" for k, v in table.items())
            self.writer.add_text(name, f"| key | value |\n|---|---|\n{rows}", resume_iter or 0)

    def rewind(self, iter, evaluated=False):
        from torch.utils.tensorboard import SummaryWriter
        if self.writer:
            self.writer.close()
        self.writer = SummaryWriter(os.path.join(self.out_dir, "tensorboard"), purge_step=iter)
        if evaluated:  # what is at `iter` and beyond is hidden now: show the evaluation there again
            for record in read_metrics(os.path.join(self.out_dir, "metrics.jsonl"), limit=1000):
                if record["iter"] == iter and "val_loss" in record:
                    self.record(record)

    def log(self, metrics, step):
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self, status):
        self.writer.close()


class WandB(Tracker):
    """Offline unless a login or WANDB_MODE says otherwise."""

    def __init__(self, out_dir, config, run_name, system_info, resume_iter, evaluated):
        import wandb
        os.makedirs(os.path.join(out_dir, "wandb"), exist_ok=True)
        run_id = _remember(out_dir, "wandb") or _remember(out_dir, "wandb", uuid.uuid4().hex[:12])
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "ironGPT"), name=run_name, id=run_id,
            resume="allow", dir=out_dir, config={**config, "system": system_info},
            mode=None if _login() else "offline",
            settings=wandb.Settings(console="off", silent=True))  # stdout is the progress line's
        # An axis of our own: W&B's step cannot go back, a run resumed from a checkpoint does.
        self.run.define_metric("*", step_metric="iter")
        folder = shlex.quote(os.path.join(out_dir, "wandb"))
        self.address = f"W&B: {self.run.url}" if not self.run.offline else (
            f"W&B is offline; to upload this run: wandb sync {folder}/offline-run-*-{run_id}")

    def log(self, metrics, step):
        self.run.log({**metrics, "iter": step})

    def artifact(self, path):
        # Not run.save(): its link in the run's folder lets W&B overwrite our config.yaml.
        if os.path.exists(path):
            self.run.log_artifact(path, name=f"{self.run.id}-{os.path.basename(path)}", type="run")

    def close(self, status):
        self.run.finish(exit_code=0 if status == "finished" else 1)


def _login():
    """Whether the user chose a mode or is logged in to W&B."""
    if os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    return False


class MLflow(Tracker):
    """A run in mlflow.db beside out_dir, or where MLFLOW_TRACKING_URI says:
    mlflow ui --backend-store-uri sqlite:///out/mlflow.db"""

    def __init__(self, out_dir, config, run_name, system_info, resume_iter, evaluated):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # a local store sends nothing
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag
        folder = Path(os.path.dirname(os.path.normpath(out_dir)) or out_dir).resolve()
        local = f"sqlite:///{(folder / 'mlflow.db').as_posix()}"
        uri = os.environ.get("MLFLOW_TRACKING_URI", local)
        self.client, self.metric = MlflowClient(uri), Metric
        experiment = self.client.get_experiment_by_name("ironGPT")
        place = (folder / "mlartifacts").as_uri() if uri == local else None
        number = experiment.experiment_id if experiment else self.client.create_experiment(
            "ironGPT", artifact_location=place)
        self.run_id = _remember(out_dir, "mlflow")
        try:
            self.client.update_run(self.run_id or "none", status="RUNNING")
        except Exception:  # new, or its database is gone
            self.run_id = self.client.create_run(number, run_name=run_name).info.run_id
            _remember(out_dir, "mlflow", self.run_id)
        known = self.client.get_run(self.run_id).data.params  # a stored parameter cannot change
        params = [Param(k, str(v)[:6000]) for k, v in config.items() if k not in known]
        tags = [RunTag(f"system.{k}", str(v)[:5000]) for k, v in system_info.items()]
        for i in range(0, len(params), 100):  # at most 100 in a call
            self.client.log_batch(self.run_id, params=params[i:i + 100])
        self.client.log_batch(self.run_id, tags=tags)

    def log(self, metrics, step):
        now = int(time.time() * 1000)
        names = {k: re.sub(r"[^\w./: -]", "_", k) for k in metrics}  # others it refuses
        self.client.log_batch(
            self.run_id, [self.metric(names[k], v, now, step) for k, v in metrics.items()])

    def artifact(self, path):
        if os.path.exists(path):
            self.client.log_artifact(self.run_id, path)

    def close(self, status):
        ends = dict(finished="FINISHED", failed="FAILED", stopped="KILLED")
        self.client.set_terminated(self.run_id, ends.get(status, "FAILED"))
