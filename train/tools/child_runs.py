"""Runs of run_train.py as processes, for train.tools.chain, .repeat and .scaling.

The name of a run's folder contains a digest of the configuration and data, and of the size and time
of other files that the run reads. A run that was stopped resumes in this folder. The result is the
last value of a metric in metrics.jsonl. A complete run has a file result.json, with a copy of the
result, and is not started again. A crash is a result without a value; the next command repeats the
run.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

from train.base.cli import under_torchrun
from train.base.environment import code_digest
from train.base.errors import UserError, echo
from train.base.files import lock_folder, write_text
from train.config import REPOSITORY, describe_files, load_argv, to_yaml
from train.distributed import Ranks
from train.options.loss_svg import curve, read_metrics, to_number
from train.robust import interrupt, on_signals
from train.setup import open_data, validate_config

POLL_SECONDS = 0.1


class ChildRun:
    """A run of run_train.py as a process, with the attribute `folder` inside the folder `out`.

    name: for messages, and the start of the folder's name. arguments: for run_train.py. The data is
    opened, for the identity of the run. Raises UserError if the configuration has no evaluations or
    does not train, or if the data cannot be used.
    Attributes after train_all(): `value`, the last value of the metric, or `None` after a crash or
    without the metric; `seconds`, the duration of training; `test`, {test_NAME: number}, maybe {}.
    """

    def __init__(self, name, arguments, out):
        config = load_argv(arguments)
        validate_config(config)
        if not config.evaluates or config.eval_only:
            raise UserError(f"{name}: needs training with evaluations: eval_interval above 0, and "
                            "no eval_only")
        fingerprints = open_data(config, Ranks()).fingerprints()
        identity = to_yaml(config) + str(fingerprints) + describe_files(config)
        digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
        short_name = re.sub(r"[^\w=.,-]+", "_", name)[:80]
        self.name = name
        self.folder = Path(out, f"{short_name}_{digest}")
        self.arguments = [*arguments, f"--out_dir={self.folder}", "--mirror=none"]
        self.log = self.folder / "console.log"
        self.result_file = self.folder / "result.json"

    def start(self, environment):
        self.folder.mkdir(exist_ok=True)
        lock_folder(self.folder).close()  # UserError: the process of a killed command still trains
        self.environment = environment
        self.code = code_digest()  # now: the code may be edited while the run trains
        self.process = start_process(self.arguments, os.environ | environment, self.log)

    def finish(self, metric):
        """Set `value`, `seconds` and `test` from metrics.jsonl, and print the result.

        Call it when the process has exited, or if result.json exists. metric: e.g. val_loss. If the
        run is complete and has the metric, result.json is written, with code_digest() at the start.
        """
        is_cached = self.result_file.exists()
        is_complete = is_cached or self.process.poll() == 0
        records = read_metrics(self.folder / "metrics.jsonl")
        times = curve(records, "iter", "time")  # [(minutes, step), ...]
        self.seconds = 60 * times[-1][0] if times else 0.0
        # Of the last evaluation, even if it has no value: an earlier one is of other weights.
        values = [to_number(record[metric]) for record in records if metric in record]
        self.value = values[-1] if values and is_complete else None
        self.test = {name: x for record in records for name, x in record.items()
                     if name.startswith("test_") and to_number(x) is not None}
        if not is_complete:
            echo(f"{self.name}: crashed, see {self.log}")
        elif self.value is None:
            echo(f"{self.name}: no {metric} in {self.folder}/metrics.jsonl; delete the folder to "
                 "train the run again")
        else:
            result = {"iter": records[-1]["iter"], metric: self.value, "seconds": self.seconds}
            note = ""
            if not is_cached:
                write_text(self.result_file, json.dumps(result | dict(code=self.code)))
            elif json.loads(self.result_file.read_text()).get("code") == code_digest():
                note = " (cached)"
            else:
                note = f" (cached; the code has changed: delete {self.folder} to train again)"
            echo(f"{self.name}: {metric} {self.value:.4f}, {self.seconds:.0f} s{note}")


def train_all(runs, metric, out, jobs):
    """Train ChildRuns, up to `jobs` at the same time, until all are complete or have crashed.

    metric: name of the result, e.g. val_loss. out: the folder with all runs, which is locked. Runs
    with a result.json are not trained again. Raises UserError under torchrun, or if a different
    process uses `out` or the folder of a run; KeyboardInterrupt after a signal, when the processes
    have saved checkpoints and exited.
    """
    if under_torchrun():
        raise UserError("runs without torchrun: this command starts the runs itself")
    waiting = list(runs)
    running = []
    environments = split_devices(jobs)
    os.makedirs(out, exist_ok=True)
    with lock_folder(out), on_signals(("SIGTERM", "SIGHUP"), interrupt):
        try:
            while waiting or running:
                for run in list(running):
                    if run.process.poll() is not None:
                        running.remove(run)
                        environments.append(run.environment)
                        run.finish(metric)
                if not (waiting and environments):
                    time.sleep(POLL_SECONDS)
                elif waiting[0].result_file.exists():
                    waiting.pop(0).finish(metric)
                else:
                    waiting[0].start(environments.pop(0))
                    running.append(waiting.pop(0))
        finally:  # after a signal or an error, e.g. a full disk
            if running:
                echo("waiting until the runs have saved a checkpoint", sys.stderr)
            for run in running:
                run.process.terminate()
            for run in running:
                run.process.wait()


def start_process(arguments, environment, log):
    """Start run_train.py in a new session, which Ctrl-C does not reach; return the Popen.

    environment: {name: value} of all variables. log: path to which stdout and stderr are appended.
    """
    with open(log, "a") as output:
        return subprocess.Popen(
            [sys.executable, os.path.join(REPOSITORY, "run_train.py"), *arguments],
            env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True)


def split_devices(jobs):
    """Return a dict of environment variables per parallel run: a GPU, or a share of the cores."""
    if count := torch.cuda.device_count():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        return [dict(CUDA_VISIBLE_DEVICES=visible.split(",")[i % count]) for i in range(jobs)]
    threads = str(max(1, torch.get_num_threads() // jobs))
    return [{} if jobs == 1 else dict(OMP_NUM_THREADS=threads) for _ in range(jobs)]
