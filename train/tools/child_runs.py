"""Runs of run_train.py as processes, for train.tools.repeat and train.tools.scaling.

The folder of a run is named by a digest of its configuration and data. A run that was stopped
resumes there, and the result of a complete run is read from its result.json. A crash is a result
without a value; the next command tries the run again.
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
from train.base.errors import UserError, echo
from train.base.files import lock_folder, write_text
from train.config import REPOSITORY, load_argv, to_yaml
from train.options.loss_svg import read_metrics, to_number
from train.robust import on_signals

POLL_SECONDS = 0.1


class ChildRun:
    """A run in a process, with a folder below `out`.

    name: on the console, and the start of the folder's name. arguments: of run_train.py.
    fingerprint: of the data. After train_all, `result` is a dict of value (the last of the metric;
    None after a crash), seconds (of all starts of the run) and mib (peak memory)."""

    def __init__(self, name, arguments, fingerprint, out):
        identity = to_yaml(load_argv(arguments)) + str(fingerprint)
        digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
        short_name = re.sub(r"[^\w=.,-]+", "_", name)[:80]
        self.name = name
        self.folder = Path(out, f"{short_name}_{digest}")
        self.arguments = [*arguments, f"--out_dir={self.folder}", "--mirror=none"]
        self.log = self.folder / "console.log"
        self.result_file = self.folder / "result.json"
        self.time_file = self.folder / "started.json"

    def start(self, environment):
        self.folder.mkdir(exist_ok=True)
        self.earlier_seconds = 0.0  # of earlier starts, each until the last line of its log
        if self.time_file.exists():
            seconds, started = json.loads(self.time_file.read_text())
            self.earlier_seconds = seconds + max(0.0, self.log.stat().st_mtime - started)
        self.environment = environment
        self.started = time.time()
        self.process = start_process(self.arguments, os.environ | environment, self.log)
        write_text(self.time_file, json.dumps([self.earlier_seconds, self.started]))

    def finish(self, metric):
        """After the end of the process: set the result; write it to result.json unless it is a
        crash."""
        seconds = self.earlier_seconds + time.time() - self.started
        records = read_metrics(self.folder / "metrics.jsonl")
        values = [to_number(r[metric]) for r in records if metric in r]
        value = values[-1] if values and self.process.poll() == 0 else None
        memory = max((r.get("memory_mib") or 0 for r in records), default=0)
        self.result = dict(value=value, seconds=seconds, mib=memory)
        if value is None:
            echo(f"{self.name}: crashed, see {self.log}")
        else:
            write_text(self.result_file, json.dumps(self.result))
            echo(f"{self.name}: {metric} {value:.4f}, {seconds:.0f} s")

    def read_result(self):
        """Set the result to that of an earlier command. UserError if its file is damaged."""
        try:
            values = json.loads(self.result_file.read_text())
            self.result = {name: to_number(values[name]) for name in ("value", "seconds", "mib")}
        except (ValueError, LookupError, TypeError):
            self.result = {"value": None}
        if None in self.result.values():
            raise UserError(f"{self.result_file}: damaged; delete it, and the same command reads "
                            "the result from the run again")


def train_all(runs, metric, out, jobs):
    """Train the ChildRuns, up to `jobs` at a time. UserError if another process uses `out`.
    KeyboardInterrupt after a signal, when the processes have saved a checkpoint and ended."""
    if under_torchrun():
        raise UserError("runs without torchrun: this command starts the runs itself")

    def interrupt(signum, frame):
        raise KeyboardInterrupt(signum)
    waiting = list(runs)
    running = []
    environments = split_devices(jobs)
    os.makedirs(out, exist_ok=True)
    with lock_folder(out), on_signals(("SIGTERM", "SIGHUP"), interrupt):
        try:
            while waiting or running:
                for run in [run for run in running if run.process.poll() is not None]:
                    running.remove(run)
                    environments.append(run.environment)
                    run.finish(metric)
                if not (waiting and environments):
                    time.sleep(POLL_SECONDS)
                elif waiting[0].result_file.exists():
                    run = waiting.pop(0)
                    run.read_result()
                    echo(f"{run.name}: {metric} {run.result['value']:.4f} (cached)")
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
    """Start a run. It has a session, so that Ctrl-C of a terminal does not reach it, which would
    be a second signal."""
    with open(log, "a") as output:
        return subprocess.Popen(
            [sys.executable, os.path.join(REPOSITORY, "run_train.py"), *arguments],
            env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True)


def split_devices(jobs):
    """Return `jobs` dicts of environment variables: a GPU, or a share of the CPU cores, per job."""
    if count := torch.cuda.device_count():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        return [dict(CUDA_VISIBLE_DEVICES=visible.split(",")[i % count]) for i in range(jobs)]
    threads = str(max(1, torch.get_num_threads() // jobs))
    return [{} if jobs == 1 else dict(OMP_NUM_THREADS=threads) for _ in range(jobs)]
