"""Train the same run with several seeds, with and without changes, and compare the results:

    python -m train.tools.repeat --config FILE.yaml --seeds 5 --set "learning_rate=2e-3"

Each run is a process with a folder, out/repeat/CHANGE/seed_N. A run that crashes is a row of the
table. The same command resumes, and skips complete runs. Differences are paired by seed: each seed
has the same data order and initial weights with and without the change, so that the effect of the
seed cancels. The interval is Student's, 95%: a change is kept if all of the interval is an
improvement. The results are a table on the console, repeat.svg, and rows that are appended to
results.tsv in the parent folder.
"""

import contextlib
import json
import math
import os
import queue
import shlex
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from train.base.cli import format_table, run_command
from train.base.errors import UserError, echo
from train.base.fields import key
from train.base.files import write_text
from train.config import REPOSITORY, load_argv, to_yaml
from train.options.loss_svg import read_metrics
from train.tools.plot import save_figure

# 97.5% quantiles of Student's t distribution with 1 to 30 degrees of freedom.
T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042)
COLUMNS = ("commit", "change", "metric", "value", "spread", "runs", "difference", "low", "high",
           "tokens", "seconds", "mib", "verdict")  # of results.tsv
BASE = "base"  # name of the setting without changes


# -----------------------------------------------------------------------------
# statistics

def compare(values, base, mode="min"):
    """Return (mean difference from `base`, low, high, verdict) over the seeds that both have.

    values, base: {seed: metric}. low, high: the 95% interval of the mean difference. verdict: kept
    if all of it is an improvement (mode: min or max), worse if all of it is a deterioration,
    unclear otherwise."""
    seeds = sorted(values.keys() & base.keys())
    if len(seeds) < 2:
        return None, None, None, "unclear" if seeds else "crash"
    differences = [values[seed] - base[seed] for seed in seeds]
    mean, freedom = statistics.fmean(differences), len(seeds) - 1
    t = T_QUANTILES[freedom - 1] if freedom <= len(T_QUANTILES) else 1.96 + 2.5 / freedom
    margin = t * statistics.stdev(differences) / math.sqrt(len(seeds))
    low, high = mean - margin, mean + margin
    is_lower, is_higher = high < 0, low > 0
    better, worse = (is_lower, is_higher) if mode == "min" else (is_higher, is_lower)
    return mean, low, high, "kept" if better else "worse" if worse else "unclear"


def summarize(results, config):
    """Return a row {column: value} for each setting of {setting: {seed: result}}; BASE is first."""
    metrics, rows = {}, []
    for name, runs in results.items():
        finished = [r for r in runs.values() if r["value"] is not None]
        metrics[name] = {seed: r["value"] for seed, r in runs.items() if r["value"] is not None}
        values = list(metrics[name].values())
        difference, low, high, verdict = compare(metrics[name], metrics[BASE],
                                                 config.early_stopping_mode)
        if name == BASE:
            difference, low, high, verdict = None, None, None, BASE if values else "crash"
        medians = {column: statistics.median(r[column] for r in finished) if finished else None
                   for column in ("tokens", "seconds", "mib")}
        rows.append(dict(
            commit=next((r["commit"] for r in runs.values() if r["commit"]), None), change=name,
            metric=config.early_stopping_metric, value=statistics.fmean(values) if values else None,
            spread=statistics.stdev(values) if len(values) > 1 else None,
            runs=f"{len(values)} of {len(runs)}", difference=difference, low=low, high=high,
            **medians, verdict=verdict))
    return rows


def report(results, config, out):
    """Print the table, draw repeat.svg and append to results.tsv."""
    rows = summarize(results, config)
    table = [("change", "runs", "mean", "spread", "difference from base, 95% interval", "seconds",
              "MiB", "verdict")]
    for r in rows:
        difference = "" if r["difference"] is None else (
            f"{r['difference']:+.4f} ({r['low']:+.4f} to {r['high']:+.4f})")
        formats = dict(value=".4f", spread=".4f", seconds=",.0f", mib=",.0f")
        mean, spread, seconds, mib = ("-" if r[name] is None else f"{r[name]:{form}}"
                                      for name, form in formats.items())
        table.append((r["change"], r["runs"], mean, spread, difference, seconds, mib, r["verdict"]))
    echo(format_table(table))
    svg = os.path.join(out, "repeat.svg")
    is_drawn = any(r["value"] is not None for r in rows) and save_figure(
        svg, lambda axes: draw_results(axes, results), "Settings over seeds", "setting",
        config.early_stopping_metric)
    path = os.path.join(os.path.dirname(os.path.abspath(out)), "results.tsv")
    lines = [] if os.path.exists(path) else [COLUMNS]
    lines += [[format_cell(r[column]) for column in COLUMNS] for r in rows]
    with open(path, "a", encoding="utf-8") as f:
        f.writelines("\t".join(line) + "\n" for line in lines)
    echo(f"Appended to {os.path.relpath(path)}" + f"; see {svg}" * is_drawn)


def format_cell(value):
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def draw_results(axes, results):
    """Draw a dot per run, and the mean of each setting as a line."""
    for x, (name, runs) in enumerate(results.items(), 1):
        values = [r["value"] for r in runs.values() if r["value"] is not None]
        if values:
            mean = statistics.fmean(values)
            name = f"{x}: {name}, mean {mean:.4f}"
            line, = axes.plot([x - 0.3, x + 0.3], [mean, mean], label=name)
            axes.plot([x] * len(values), values, "o", color=line.get_color())
    axes.set_xticks(range(1, len(results) + 1))


# -----------------------------------------------------------------------------
# processes

class RunPool:
    """Runs of run_train.py in processes, up to `jobs` at a time, each in a folder below `out`.

    arguments: the common arguments of the runs. metric: the last value is the result of a run."""

    def __init__(self, out, arguments, metric, jobs):
        self.out, self.arguments, self.metric, self.jobs = out, arguments, metric, jobs
        self.processes = set()
        self.signum = 0  # of the signal that has stopped the pool
        self.environments = queue.SimpleQueue()
        for environment in split_devices(jobs):
            self.environments.put(environment)

    def run_all(self, runs):
        """Return the results of [(setting, arguments, seed), ...]. After signal N, raises
        KeyboardInterrupt(N)."""
        from train.robust import Signals, on_signals  # imports torch, which --help does not need
        with on_signals(Signals.STOP, self.stop), ThreadPoolExecutor(self.jobs) as threads:
            try:
                futures = [threads.submit(self.run, *run) for run in runs]
                results = [future.result() for future in futures]
            except BaseException:  # e.g. a full disk
                self.stop(signal.SIGTERM)
                raise
        if self.signum:
            raise KeyboardInterrupt(self.signum)
        return results

    def run(self, setting, arguments, seed):
        """Return the result of a run, from result.json if it is complete and of the same
        configuration. After a signal, return None."""
        name = setting.replace("/", "_").replace(" ", ",")
        folder = os.path.join(self.out, name, f"seed_{seed}")
        command = [*self.arguments, *arguments, f"--seed={seed}", f"--out_dir={folder}"]
        config = to_yaml(load_argv(command))
        path = os.path.join(folder, "result.json")
        with contextlib.suppress(OSError, ValueError), open(path) as f:
            result = json.load(f)
            if result["config"] == config and result["value"] is not None:
                echo(f"{setting}, seed {seed}: {self.metric} {result['value']:.4f} (cached)")
                return result
        if self.signum:
            return None
        os.makedirs(folder, exist_ok=True)
        environment, start = self.environments.get(), time.monotonic()
        try:
            with open(os.path.join(folder, "console.log"), "a") as log:
                process = start_process(command, os.environ | environment, log)
                self.processes.add(process)
                if self.signum:  # stop() came first
                    process.terminate()
                code = process.wait()
                self.processes.discard(process)
        finally:
            self.environments.put(environment)
        if self.signum or code in (130, 143):
            self.signum = self.signum or code - 128
            return None
        result = dict(config=config, code=code, seconds=time.monotonic() - start,
                      **read_result(folder, self.metric))
        if code:  # metrics.jsonl has the numbers up to the crash
            result["value"] = None
        write_text(path, json.dumps(result))
        if result["value"] is None:
            output = Path(log.name).read_text(errors="replace").strip() or "no output"
            outcome = f"crashed, see {log.name}: {output.splitlines()[-1]}"
        else:
            outcome = f"{self.metric} {result['value']:.4f}"
        echo(f"{setting}, seed {seed}: {outcome}, {result['seconds']:.0f} s")
        return result

    def stop(self, signum, frame=None):
        """Terminate the runs: after saving a checkpoint, or at a second signal immediately."""
        if not self.signum:
            os.write(2, b"\nstopping the runs after they save; a second signal quits at once\n")
        self.signum = signum
        for process in list(self.processes):
            process.terminate()


def start_process(command, env, log):
    """Start a run. It has a session, so that Ctrl-C reaches it only through RunPool.stop, once."""
    return subprocess.Popen([sys.executable, os.path.join(REPOSITORY, "run_train.py"), *command],
                            env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                            start_new_session=True)


def split_devices(jobs):
    """Return `jobs` dicts of environment variables: a GPU, or a share of the CPU cores, per job."""
    import torch

    from train.device import physical_cores
    if count := torch.cuda.device_count():
        ids = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        ids = ids if len(ids) == count and all(ids) else [str(i) for i in range(count)]
        return [dict(CUDA_VISIBLE_DEVICES=ids[i % count]) for i in range(jobs)]
    cores = str(max(1, physical_cores() // jobs))
    return [{} if jobs == 1 else dict(OMP_NUM_THREADS=cores) for _ in range(jobs)]


def read_result(folder, metric):
    """Return the last value of the metric, tokens, commit and peak memory of a run's files."""
    records = read_metrics(os.path.join(folder, "metrics.jsonl"))
    last = next((r for r in reversed(records) if metric in r), {})
    value, commit = last.get(metric), None
    with contextlib.suppress(OSError, ValueError), open(
            os.path.join(folder, "training_args.json")) as f:
        commit = json.load(f).get("git_commit")
    return dict(value=value if isinstance(value, (int, float)) else None,
                tokens=last.get("tokens"), commit=commit and commit[:7],
                mib=max((r.get("memory_mib") or 0 for r in records), default=0) or None)


# -----------------------------------------------------------------------------
# command line

@dataclass
class RepeatOptions:
    """Train the same run with several seeds, with and without changes, and compare the results."""
    seeds: int = key(5, "runs per setting, with the seed of the configuration and the next ones",
                     ge=2)
    changes: list[str] = key([], "a change to compare with the unchanged run; may be repeated",
                             option="set", text=True, metavar="'KEY=VALUE ...'")
    jobs: int = key(1, "runs at the same time, with a GPU or a share of the cores each", ge=1)
    out: str = key("out/repeat", "folder of the runs", aliases="out_dir")


def repeat(options, arguments_and_config):
    """Run all settings with all seeds; return the exit code: 1 if every run has crashed."""
    arguments, config = arguments_and_config  # arguments of run_train.py
    settings = {BASE: []}
    for change in options.changes:
        try:
            settings[change] = shlex.split(change)
            changed = load_argv([*arguments, *settings[change]])
        except (ValueError, UserError) as error:
            raise UserError(f"--set {change!r}: {error}") from None
        if changed.seed != config.seed or changed.out_dir != config.out_dir:
            raise UserError(f"--set {change!r}: seed and out_dir are set by this command")
    if not config.eval_interval or int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise UserError("needs evaluations (eval_interval above 0), and runs without torchrun")
    pool = RunPool(options.out, arguments, config.early_stopping_metric, options.jobs)
    # In the order of the seeds: after a stop, the settings have the same seeds to compare.
    runs = [(name, settings[name], config.seed + i)
            for i in range(options.seeds) for name in settings]
    results = {name: {} for name in settings}
    for (name, _, seed), result in zip(runs, pool.run_all(runs)):
        results[name][seed] = result
    report(results, config, options.out)
    return int(all(r["value"] is None for runs in results.values() for r in runs.values()))


def main(argv=None):
    """Run the command and return the exit code."""
    return run_command(RepeatOptions, repeat, argv, load=lambda rest: (rest, load_argv(rest)),
                       interrupt_message="stopped; the same command resumes")


if __name__ == "__main__":
    sys.exit(main())
