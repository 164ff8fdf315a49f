"""Optional experiment trackers: TensorBoard, Weights & Biases, MLflow (key: tracker).

A tracker that fails during a run is dropped with one warning, and training continues.
"""

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
from train.base.files import write_text
from train.options.loss_svg import read_metrics

PROJECT = "ironGPT"
# mlflow-skinny lacks the sqlite store.
PACKAGES = dict(tensorboard=["tensorboard"], wandb=["wandb"], mlflow=["mlflow", "sqlalchemy"])


def check_trackers(names):
    """Raise SetupError, with one line per tracker, if packages of these trackers are missing."""
    missing = [name for name in names if not all(map(is_installed, PACKAGES[name]))]
    if missing:
        raise SetupError("\n".join(
            f"tracker {name!r} needs the {name!r} package: pip install {name} (or drop --tracker)"
            for name in missing))


def is_installed(package):
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # a plain folder has no origin


def open_trackers(names, out_dir, config, run_name, system_info, resume_iter=None, warn=print,
                  evaluated=False, log=print):
    """Return trackers with the methods record(record), rewind(iter, evaluated), artifact(path) and
    close(status), which never raise. A tracker that cannot be opened is left out with a warning.

    config, system_info: flat dicts. resume_iter: the iteration at which the run resumes, or `None`;
    evaluated: the evaluation at this iteration is not repeated. The ids in out_dir/tracker.json let
    a resumed run continue the same tracker run.
    """
    kinds = dict(tensorboard=TensorBoard, wandb=WandB, mlflow=MLflow)
    arguments = out_dir, config, run_name, system_info, resume_iter, evaluated
    trackers = [GuardedTracker(name, warn, kinds[name], *arguments)
                for name in dict.fromkeys(names)]
    trackers = [guarded for guarded in trackers if guarded.tracker]
    for guarded in trackers:
        if guarded.tracker.address:
            log(guarded.tracker.address)
    return trackers


def tracked_numbers(record):
    """Return the numbers of a metrics.jsonl record by tracker names: train/loss, val/ppl, ..."""
    names = {"loss": "train/loss", "train_loss": "train/mean_loss"}
    return {names.get(k, re.sub("^val_", "val/", k)): float(v) for k, v in record.items()
            if isinstance(v, (int, float)) and k != "iter"}


class GuardedTracker:
    """A tracker with methods that never raise: the first failure drops it."""

    def __init__(self, name, warn, make, *args):
        self.name = name
        self.warn = warn
        self.tracker = None
        self.tracker = self.guard(make, *args)

    def __getattr__(self, method):  # record, rewind, artifact, close
        return lambda *args: self.tracker and self.guard(getattr(self.tracker, method), *args)

    def guard(self, action, *args):
        try:
            return action(*args)
        except Exception as error:
            self.tracker = None
            reason = (str(error).strip() or type(error).__name__).split("\n")[0][:200]
            self.warn(f"tracker {self.name!r} failed and is dropped, training continues: {reason}")


class Tracker:
    """Base class: log(numbers, step) receives the numbers of a record; artifacts are ignored."""
    address = None  # a line for the log: where to look at the run

    def record(self, record):
        self.log(tracked_numbers(record), record["iter"])

    def rewind(self, iter, evaluated=False):
        """The run continues at `iter`: later steps are repeated, and the evaluation at `iter`
        unless `evaluated`."""

    def artifact(self, path):
        """Store a small file with the run, if the file exists."""


def saved_id(out_dir, name, new=None):
    """Return the id of tracker `name` in out_dir/tracker.json, or `None`. new: save this id."""
    path = Path(out_dir, "tracker.json")
    ids = {}
    with suppress(OSError, ValueError, TypeError, RecursionError):
        ids = dict(json.loads(path.read_text()))
    if new:
        ids[name] = new
        write_text(path, json.dumps(ids))
    return ids.get(name)


class TensorBoard(Tracker):
    """Event files in out_dir/tensorboard: tensorboard --logdir out."""

    def __init__(self, out_dir, config, run_name, system_info, resume_iter, evaluated):
        self.out_dir = out_dir
        self.writer = None
        self.rewind(resume_iter, evaluated)
        for name, table in (("config", config), ("system", system_info)):
            rows = "".join(f"| {k} | {v} |\n" for k, v in table.items())
            self.writer.add_text(name, f"| key | value |\n|---|---|\n{rows}", resume_iter or 0)

    def rewind(self, iter, evaluated=False):
        from torch.utils.tensorboard import SummaryWriter
        if self.writer:
            self.writer.close()
        self.writer = SummaryWriter(os.path.join(self.out_dir, "tensorboard"), purge_step=iter)
        if evaluated:  # purge_step hides the evaluation at `iter`, which is not repeated
            for record in read_metrics(os.path.join(self.out_dir, "metrics.jsonl"), limit=1000):
                if record["iter"] == iter and "val_loss" in record:
                    self.record(record)

    def log(self, numbers, step):
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self, status):
        self.writer.close()


class WandB(Tracker):
    """Weights & Biases; offline without a login or WANDB_MODE."""

    def __init__(self, out_dir, config, run_name, system_info, resume_iter, evaluated):
        import wandb
        folder = os.path.join(out_dir, "wandb")
        os.makedirs(folder, exist_ok=True)
        run_id = saved_id(out_dir, "wandb") or saved_id(out_dir, "wandb", uuid.uuid4().hex[:12])
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=run_name, id=run_id,
            resume="allow", dir=out_dir, config={**config, "system": system_info},
            mode=None if has_wandb_login() else "offline",
            settings=wandb.Settings(console="off", silent=True))  # stdout has the progress line
        # A custom axis: W&B's step cannot decrease, that of a resumed run does.
        self.run.define_metric("*", step_metric="iter")
        self.address = f"W&B: {self.run.url}" if not self.run.offline else (
            "W&B is offline; to upload this run: wandb sync "
            f"{shlex.quote(folder)}/offline-run-*-{run_id}")

    def log(self, numbers, step):
        self.run.log({**numbers, "iter": step})

    def artifact(self, path):
        # Not run.save(), whose link in the run's folder lets W&B overwrite config.yaml.
        if os.path.exists(path):
            self.run.log_artifact(path, name=f"{self.run.id}-{os.path.basename(path)}", type="run")

    def close(self, status):
        self.run.finish(exit_code=0 if status == "finished" else 1)


def has_wandb_login():
    """Return whether the user has chosen a mode or is logged in to W&B."""
    if os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    return False


class MLflow(Tracker):
    """A run in MLFLOW_TRACKING_URI, default mlflow.db in the parent folder of out_dir:
    mlflow ui --backend-store-uri sqlite:///out/mlflow.db"""

    def __init__(self, out_dir, config, run_name, system_info, resume_iter, evaluated):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag
        folder = Path(os.path.dirname(os.path.normpath(out_dir)) or out_dir).resolve()
        local = f"sqlite:///{(folder / 'mlflow.db').as_posix()}"
        uri = os.environ.get("MLFLOW_TRACKING_URI", local)
        self.client = MlflowClient(uri)
        self.metric = Metric
        experiment = self.client.get_experiment_by_name(PROJECT)
        artifacts = (folder / "mlartifacts").as_uri() if uri == local else None
        experiment_id = experiment.experiment_id if experiment else self.client.create_experiment(
            PROJECT, artifact_location=artifacts)
        self.run_id = saved_id(out_dir, "mlflow")
        try:
            self.client.update_run(self.run_id or "none", status="RUNNING")
        except Exception:  # a new run, or the database was deleted
            self.run_id = self.client.create_run(experiment_id, run_name=run_name).info.run_id
            saved_id(out_dir, "mlflow", self.run_id)
        stored = self.client.get_run(self.run_id).data.params  # parameters cannot change
        params = [Param(k, str(v)[:6000]) for k, v in config.items() if k not in stored]
        tags = [RunTag(f"system.{k}", str(v)[:5000]) for k, v in system_info.items()]
        for i in range(0, len(params), 100):  # the limit per call
            self.client.log_batch(self.run_id, params=params[i:i + 100])
        self.client.log_batch(self.run_id, tags=tags)

    def log(self, numbers, step):
        now = int(time.time() * 1000)
        self.client.log_batch(self.run_id, [
            self.metric(re.sub(r"[^\w./: -]", "_", name), value, now, step)  # permitted characters
            for name, value in numbers.items()])

    def artifact(self, path):
        if os.path.exists(path):
            self.client.log_artifact(self.run_id, path)

    def close(self, status):
        states = dict(finished="FINISHED", failed="FAILED", stopped="KILLED")
        self.client.set_terminated(self.run_id, states.get(status, "FAILED"))
