"""The same run over several seeds, and changes to it beside it, so that a difference can be told
from chance:

    python -m train.tools.repeat --config FILE.yaml --seeds 5 --set "learning_rate=2e-3"

Every run is a process of its own in a folder of its own, out/repeat/CHANGE/seed_N: one that crashes
is a row of the table. Started again, runs go on where they were. A difference is paired: each seed
draws the same data and the same first weights with and without the change, so what the seed alone
does falls out of it. Its interval is Student's, 95%: where that is all on one side of 0, the change
did it. The table is said, drawn (repeat.svg) and appended to results.tsv beside the folder.
"""

import argparse
import contextlib
import functools
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

from train.base.cli import run_command, underscores
from train.base.errors import UserError, echo
from train.base.files import write_text
from train.config import REPOSITORY, load_argv, load_config, take_config, to_yaml
from train.options.loss_svg import read_metrics
from train.tools.plot import save_figure

# 97.5% quantiles of Student's t with 1 to 30 degrees of freedom; with more, close to the normal's.
T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
        2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
        2.052, 2.048, 2.045, 2.042)
COLUMNS = "commit change metric value spread runs difference low high tokens seconds mib verdict"
BASE = "base"  # the setting without a change


# -----------------------------------------------------------------------------
# what the numbers say

def paired(values, base, mode="min"):
    """(mean difference to `base`, low, high, verdict) over the seeds that both have.

    values, base: {seed: number}. low, high: the 95% interval of the mean of the differences, by
    Student's t. verdict: kept where all of it is an improvement (mode: min or max), worse where all
    of it is the opposite, else unclear."""
    seeds = sorted(values.keys() & base.keys())
    if len(seeds) < 2:
        return None, None, None, "unclear" if seeds else "crash"
    differences = [values[s] - base[s] for s in seeds]
    mean, n = statistics.fmean(differences), len(seeds)
    t = T975[n - 2] if n - 2 < len(T975) else 1.96 + 2.5 / (n - 1)
    half = t * statistics.stdev(differences) / math.sqrt(n)
    low, high = mean - half, mean + half
    better, worse = (high < 0, low > 0) if mode == "min" else (low > 0, high < 0)
    return mean, low, high, "kept" if better else "worse" if worse else "unclear"


def rows(results, config):
    """A dict of COLUMNS for each setting of {setting: {seed: result}}."""
    metric, out = config.early_stopping_metric, []
    values = {name: {seed: r["value"] for seed, r in runs.items() if r["value"] is not None}
              for name, runs in results.items()}
    for name, runs in results.items():
        good = [r for r in runs.values() if r["value"] is not None]
        found = list(values[name].values())
        difference, low, high, verdict = paired(
            values[name], values[BASE], config.early_stopping_mode)
        if name == BASE:
            difference, low, high, verdict = None, None, None, BASE if found else "crash"
        middle = {key: statistics.median(r[key] for r in good) if good else None
                  for key in ("tokens", "seconds", "mib")}
        out.append(dict(
            commit=next((r["commit"] for r in runs.values() if r["commit"]), None), change=name,
            metric=metric, value=statistics.fmean(found) if found else None,
            spread=statistics.stdev(found) if len(found) > 1 else None,
            runs=f"{len(found)} of {len(runs)}", difference=difference, low=low, high=high,
            **middle, verdict=verdict))
    return out


def cell(value):
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def table(found):
    """The rows as text for people."""
    lines = [("change", "runs", "mean", "spread", "against base, 95% interval", "seconds", "MiB",
              "verdict")]
    for r in found:
        against = "" if r["difference"] is None else (
            f"{r['difference']:+.4f} ({r['low']:+.4f} to {r['high']:+.4f})")
        numbers = [f"{r[k]:{form}}" if r[k] is not None else "-" for k, form in (
            ("value", ".4f"), ("spread", ".4f"), ("seconds", ",.0f"), ("mib", ",.0f"))]
        lines.append((r["change"], r["runs"], *numbers[:2], against, *numbers[2:], r["verdict"]))
    wide = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(text.ljust(w) for text, w in zip(line, wide)).rstrip()
                     for line in lines)


def draw_results(axes, results):
    """Draw a dot per run and the mean of each setting as a line."""
    for x, (name, runs) in enumerate(results.items(), 1):
        values = [r["value"] for r in runs.values() if r["value"] is not None]
        if values:
            mean = statistics.fmean(values)
            line, = axes.plot([x - 0.3, x + 0.3], [mean, mean], label=f"{x}: {name}, mean {mean:.4f}")
            axes.plot([x] * len(values), values, "o", color=line.get_color())
    axes.set_xticks(range(1, len(results) + 1))


# -----------------------------------------------------------------------------
# the runs

class Runs:
    """Runs in folders of their own, up to `jobs` at once, also those of train.scaling. arguments:
    those of run_train.py."""

    def __init__(self, out, arguments, metric, jobs):
        self.out, self.arguments, self.metric, self.running = out, arguments, metric, set()
        self.jobs = jobs
        self.slots, self.stopped = queue.SimpleQueue(), 0  # by the signal of this number
        for slot in slots(jobs):
            self.slots.put(slot)

    def all(self, wanted):
        """The results of [(setting, tokens, seed), ...], in this order, which is that of the runs.
        KeyboardInterrupt, with its number, after a signal."""
        from train.robust import Signals, on_signals  # with torch, which --help need not wait for
        with on_signals(Signals.STOP, self.stop), ThreadPoolExecutor(self.jobs) as pool:
            try:
                waiting = [pool.submit(self.result, *run) for run in wanted]
                found = [future.result() for future in waiting]
            except BaseException:  # a full disk, say
                self.stop(signal.SIGTERM)
                raise
        if self.stopped:
            raise KeyboardInterrupt(self.stopped)
        return found

    def folder(self, setting, seed):
        name = setting.replace("/", "_").replace(" ", ",")
        return os.path.join(self.out, name, f"seed_{seed}")

    def result(self, setting, tokens, seed):
        """The result of a run, which is computed unless it is there already, of the same
        configuration; None if it was stopped."""
        folder = self.folder(setting, seed)
        command = [*self.arguments, *tokens, f"--seed={seed}", f"--out_dir={folder}"]
        config = to_yaml(load_config(*take_config(command)))
        file = os.path.join(folder, "result.json")
        with contextlib.suppress(OSError, ValueError), open(file) as f:
            done = json.load(f)
            if done["config"] == config and done["value"] is not None:
                echo(f"{setting}, seed {seed}: {self.metric} {done['value']:.4f}, there already")
                return done
        if self.stopped:
            return None
        os.makedirs(folder, exist_ok=True)
        slot, began = self.slots.get(), time.monotonic()
        try:
            with open(os.path.join(folder, "console.log"), "a") as log:
                code = self.wait(execute(command, os.environ | slot, log))
        finally:
            self.slots.put(slot)
        if self.stopped or code in (130, 143):
            self.stopped = self.stopped or code - 128
            return None
        found = dict(config=config, code=code, seconds=time.monotonic() - began,
                     **numbers(folder, self.metric))
        if code:  # it may have had numbers before
            found["value"] = None
        write_text(file, json.dumps(found))
        ended = f"{self.metric} {found['value']:.4f}" if found["value"] is not None else (
            f"crashed, see {log.name}: {last_line(log.name)}")
        echo(f"{setting}, seed {seed}: {ended}, {found['seconds']:.0f} s")
        return found

    def wait(self, process):
        self.running.add(process)
        if self.stopped:
            process.terminate()
        code = process.wait()
        self.running.discard(process)
        return code

    def stop(self, signum, frame=None):
        """End what runs, with a checkpoint each; asked again, at once."""
        if not self.stopped:
            os.write(2, b"\nstopping the runs, with a checkpoint each; again: at once\n")
        self.stopped = signum
        for process in list(self.running):
            process.terminate()


def execute(command, env, log):
    """The started process of a run. A terminal's Ctrl-C is for us alone: we pass it on, once."""
    return subprocess.Popen([sys.executable, os.path.join(REPOSITORY, "run_train.py"), *command],
                            env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                            start_new_session=True)


def slots(jobs):
    """What tells runs at the same time their own GPU or their share of the cores, as environment
    variables."""
    import torch

    from train.device import physical_cores
    if count := torch.cuda.device_count():
        ids = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        ids = ids if len(ids) == count and all(ids) else [str(i) for i in range(count)]
        return [dict(CUDA_VISIBLE_DEVICES=ids[i % count]) for i in range(jobs)]
    share = str(max(1, physical_cores() // jobs))
    return [{} if jobs == 1 else dict(OMP_NUM_THREADS=share) for _ in range(jobs)]


def numbers(folder, metric):
    """What a run's own files say of its end."""
    records = read_metrics(os.path.join(folder, "metrics.jsonl"))
    last = next((r for r in reversed(records) if metric in r), {})
    value, commit = last.get(metric), None
    with contextlib.suppress(OSError, ValueError), open(
            os.path.join(folder, "training_args.json")) as f:
        commit = json.load(f).get("git_commit")
    return dict(value=value if isinstance(value, (int, float)) else None,
                tokens=last.get("tokens"), commit=commit and commit[:7],
                mib=max((r.get("memory_mib") or 0 for r in records), default=0) or None)


def last_line(path):
    with open(path, errors="replace") as f:
        return (f.read().strip().splitlines() or ["no output"])[-1]


# -----------------------------------------------------------------------------
# command line

def main(argv=None):
    """Run the command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m train.tools.repeat", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All other arguments are those of run_train.py.")
    parser.add_argument("--seeds", type=int, default=5, help="runs of a setting (%(default)s): the "
                        "seed of the configuration, the next one, ...")
    parser.add_argument("--set", action="append", default=[], metavar="'KEY=VALUE ...'",
                        help="a change to compare with the run as it is; several are fine")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, a GPU or a "
                        "share of the cores each (%(default)s)")
    parser.add_argument("--out", "--out_dir", default="out/repeat",
                        help="folder of the runs (%(default)s)")
    argv = sys.argv[1:] if argv is None else argv
    rest = parser.parse_known_args(underscores(argv))[1]
    return run_command(parser, functools.partial(repeat, rest), argv, load=load_argv,
                       interrupt_message="stopped; the same command continues")


def repeat(rest, args, config):
    """What the command line asks for; the exit code. rest: the arguments of run_train.py."""
    settings = {BASE: []}
    for text in args.set:  # before any work
        try:
            settings[text] = shlex.split(text)
            other = load_config(*take_config([*rest, *settings[text]]))
        except (ValueError, UserError) as error:
            raise UserError(f"--set {text!r}: {error}") from None
        if other.seed != config.seed or other.out_dir != config.out_dir:
            raise UserError(f"--set {text!r}: seed and out_dir are given by this command")
    if args.seeds < 2 or args.jobs < 1:
        raise UserError("expected --seeds of at least 2, and --jobs of at least 1")
    if not config.eval_interval or int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise UserError("needs evaluations (eval_interval above 0), and runs without torchrun")
    runs = Runs(args.out, rest, config.early_stopping_metric, args.jobs)
    # Seeds first: what is there when it is stopped can be compared.
    wanted = [(name, settings[name], config.seed + i) for i in range(args.seeds)
              for name in settings]
    results = {name: {} for name in settings}
    for (name, _, seed), found in zip(wanted, runs.all(wanted)):
        results[name][seed] = found
    tell(results, config, args.out)
    return int(all(r["value"] is None for found in results.values() for r in found.values()))


def tell(results, config, out):
    """The table, the picture and results.tsv."""
    found, columns = rows(results, config), COLUMNS.split()
    echo(table(found))
    svg = os.path.join(out, "repeat.svg")
    drawn = any(r["value"] is not None for r in found) and save_figure(
        svg, lambda axes: draw_results(axes, results), "Settings over seeds", "setting",
        config.early_stopping_metric)
    path = os.path.join(os.path.dirname(os.path.abspath(out)), "results.tsv")
    fresh = not os.path.exists(path)
    with open(path, "a", encoding="utf-8") as f:
        lines = [columns] * fresh + [[cell(r[c]) for c in columns] for r in found]
        f.writelines("\t".join(line) + "\n" for line in lines)
    echo(f"Appended to {os.path.relpath(path)}" + f"; see {svg}" * bool(drawn))


if __name__ == "__main__":
    sys.exit(main())
