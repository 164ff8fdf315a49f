"""Optional experiment trackers: TensorBoard, Weights & Biases, MLflow (key: tracker).

A tracker that fails during a run is dropped with one warning, and training continues.
"""

import importlib.util
import json
import os
import re
import time
from contextlib import contextmanager
from pathlib import Path

from train.base.environment import environment
from train.base.errors import SetupError, quote_path
from train.base.files import write_text

PROJECT = "ironGPT"


def check_trackers(names):
    """Raise SetupError if a package is missing that one of the trackers `names` needs."""
    for name in names:
        for package in TRACKERS[name].packages:
            # A plain folder has a spec, without an origin.
            if getattr(importlib.util.find_spec(package), "origin", None) is None:
                raise SetupError(f"tracker {name!r} needs the {package!r} package: pip install "
                                 f"{name} (or drop --tracker)")


class Trackers:
    """The experiment trackers of a run; the constructor starts them, call() passes records on.

    names: of "tensorboard", "wandb" and "mlflow". log: the run's Logger, with the configuration. A
    tracker that fails is dropped with a warning; no error is raised. The `id` of a tracker is
    stored in out_dir/tracker.json, so that a resumed run continues the same run in the tracker.
    """

    def __init__(self, names, log):
        self.log = log
        self.trackers = {}
        system_info = environment() | log.system_info
        path = Path(log.out_dir, "tracker.json")
        for name in dict.fromkeys(names):
            with self.guard(name):
                ids = json.loads(path.read_text()) if path.exists() else {}
                tracker = TRACKERS[name](log, system_info, ids.get(name))
                self.trackers[name] = tracker
                if tracker.id:
                    write_text(path, json.dumps(ids | {name: tracker.id}))

    @contextmanager
    def guard(self, name):
        try:
            yield
        except Exception as error:
            self.trackers.pop(name, None)
            reason = (str(error).strip() or type(error).__name__).split("\n")[0][:200]
            self.log.warn(f"tracker {name!r} failed and is dropped, training continues: {reason}")

    def call(self, method, *args):
        """Call tracker.METHOD(*args) for every tracker; one that fails is dropped with a warning.

        method: "record", with a record of metrics.jsonl (a dict), or "close", with the status of
        the run: "finished", "failed" or "stopped".
        """
        for name, tracker in [*self.trackers.items()]:
            with self.guard(name):
                getattr(tracker, method)(*args)


def tracked_numbers(record):
    """Return {name: float} of a metrics.jsonl record, with trackers' names: train/loss, val/ppl."""
    names = {"loss": "train/loss", "train_loss": "train/mean_loss"}
    return {names.get(k, re.sub("^val_", "val/", k)): float(v) for k, v in record.items()
            if isinstance(v, (int, float)) and k != "iter"}


class TensorBoard:
    """Tracker that writes event files to out_dir/tensorboard (tensorboard --logdir out)."""
    packages = ["tensorboard"]
    id = None

    def __init__(self, log, system_info, _):
        from torch.utils.tensorboard import SummaryWriter
        # Hide repeated steps; the first one is shown twice if its evaluation is not repeated.
        first = log.first_iter + log.evaluated
        self.writer = SummaryWriter(os.path.join(log.out_dir, "tensorboard"), purge_step=first)

    def record(self, record):
        for name, value in tracked_numbers(record).items():
            self.writer.add_scalar(name, value, record["iter"])

    def close(self, status):
        self.writer.close()


class WandB:
    """Tracker for Weights & Biases; offline if the user is not logged in and WANDB_MODE is not set.

    run_id: the W&B run to continue; `None`: a new run. Attribute `id`: the id of the run.
    system_info: versions and facts, stored with the run. Files are in out_dir/wandb; WANDB_PROJECT
    names the project. If a resumed run repeats steps, W&B shows both.
    """
    packages = ["wandb"]

    def __init__(self, log, system_info, run_id):
        os.environ |= dict(WANDB_SILENT="true", WANDB_CONSOLE="off")  # stdout: the progress line
        import wandb
        folder = os.path.join(log.out_dir, "wandb")
        os.makedirs(folder, exist_ok=True)
        online = "WANDB_MODE" in os.environ or wandb.login(prompt=False, verify=False)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=log.run_name, id=run_id,
            resume="allow", dir=log.out_dir, config=log.config | dict(system=system_info),
            mode=None if online else "offline")
        self.id = self.run.id
        # A custom axis: W&B's step cannot decrease, that of a resumed run does.
        self.run.define_metric("*", step_metric="iter")
        log.info(f"W&B: {self.run.url}" if not self.run.offline else
                 "W&B is offline; to upload this run: wandb sync "
                 f"{quote_path(folder)}/offline-run-*-{self.id}")

    def record(self, record):
        self.run.log(tracked_numbers(record) | dict(iter=record["iter"]))

    def close(self, status):
        self.run.finish(exit_code=0 if status == "finished" else 1)


class MLflow:
    """Tracker for MLflow: the server or database in MLFLOW_TRACKING_URI, or mlflow.db.

    The file mlflow.db is in the parent folder of out_dir. run_id: the MLflow run to continue;
    `None`: a new run. Attribute `id`: the id of the run, which Trackers stores. system_info:
    versions and facts, stored as tags of a new run. If a resumed run repeats steps, MLflow shows
    both.
    """
    packages = ["mlflow", "sqlalchemy"]  # mlflow-skinny lacks the sqlite store

    def __init__(self, log, system_info, run_id):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        # 13 s if the server is gone; MLflow's 7 are 5 minutes, for which the ranks would wait.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
        from mlflow import MlflowClient
        from mlflow.entities import Param
        local = f"sqlite:///{(Path(log.out_dir).parent.resolve() / 'mlflow.db').as_posix()}"
        address = os.environ.get("MLFLOW_TRACKING_URI", local)
        self.client = MlflowClient(address)
        # A server has the viewer.
        ui = "" if address.startswith(("http", "databricks")) else "mlflow ui --backend-store-uri "
        log.info(f"MLflow: {ui}{quote_path(address)}")
        self.id = run_id
        if run_id:
            self.client.update_run(run_id, status="RUNNING")
            return
        experiment = self.client.get_experiment_by_name(PROJECT)
        experiment_id = (experiment.experiment_id if experiment
                         else self.client.create_experiment(PROJECT))
        tags = {f"system.{k}": str(v)[:5000] for k, v in system_info.items()}
        run = self.client.create_run(experiment_id, run_name=log.run_name, tags=tags)
        self.id = run.info.run_id
        self.client.log_batch(self.id, params=[
            Param(k, str(v)[:6000]) for k, v in log.config.items()])

    def record(self, record):
        from mlflow.entities import Metric
        now = int(time.time() * 1000)
        self.client.log_batch(self.id, [
            Metric(re.sub(r"[^\w./: -]", "_", name), value, now, record["iter"])  # permitted
            for name, value in tracked_numbers(record).items()])

    def close(self, status):
        states = dict(finished="FINISHED", stopped="KILLED")
        self.client.set_terminated(self.id, states.get(status, "FAILED"))


TRACKERS = dict(tensorboard=TensorBoard, wandb=WandB, mlflow=MLflow)
