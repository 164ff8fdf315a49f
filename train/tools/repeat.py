"""Train the same run with several seeds, with and without changes, and compare the results:

    python -m train.tools.repeat --config FILE.yaml --seeds 5 --set "learning_rate=2e-3"

Each run is a process with a folder in out/repeat. The same command resumes, and skips complete
runs. Differences are paired by seed: each seed has the same data order and initial weights with and
without the change, so that the effect of the seed cancels. The interval is Student's, 95%: a change
is kept if all of the interval is an improvement. A change that improves a small model often has no
effect on a larger one: with `--size "n_layer=3 n_embd=128" --size "n_layer=6 n_embd=256"` each
change is compared at both sizes, and is kept if it is an improvement at both. The results are a
table on the console; a second table has the numbers on the test data, if there are any.
"""

import itertools
import math
import shlex
from dataclasses import dataclass
from statistics import fmean, stdev

from train.base.cli import command, format_table
from train.base.errors import UserError, echo, printable
from train.base.fields import key
from train.config import file_of, load_argv, read_settings
from train.tools.child_runs import ChildRun, train_all

COLUMNS = ("change", "metric", "runs", "mean", "spread", "difference", "low", "high", "seconds",
           "verdict")
BASE = "base"  # name of the setting without changes


# -----------------------------------------------------------------------------
# statistics

def compare(values, base, mode="min"):
    """Compare two settings by seed; return (mean difference values - base, low, high, verdict).

    values, base: {seed: metric}, of which the common seeds are paired. mode: "min" if lower metrics
    are better, "max" if higher. low, high: the 95% interval of the mean difference. verdict: "kept"
    if all of the interval is an improvement, "worse" if it is a deterioration, otherwise "unclear".
    With a single common seed: NaN and "unclear"; without any: NaN and "crash".
    """
    differences = [values[seed] - base[seed] for seed in values.keys() & base.keys()]
    n = len(differences)
    if n < 2:
        return math.nan, math.nan, math.nan, "unclear" if n else "crash"
    mean = fmean(differences)
    margin = student_quantile(n - 1) * stdev(differences) / math.sqrt(n)
    verdict = "unclear"
    if abs(mean) > margin:
        verdict = "kept" if (mean < 0) == (mode == "min") else "worse"
    return mean, mean - margin, mean + margin, verdict


def student_quantile(freedom):
    """Return the 97.5% quantile of Student's t within 0.13% (Abramowitz and Stegun, 26.7.5)."""
    terms = (1.95996, 2.37227, 2.82250, 2.55585, 1.58953)
    exact = {1: 12.7062, 2: 4.30265}
    return exact.get(freedom) or sum(term / freedom ** i for i, term in enumerate(terms))


def mean_and_spread(values):
    """Return the mean and the standard deviation of a list; NaN for too few numbers."""
    return fmean(values) if values else math.nan, stdev(values) if len(values) > 1 else math.nan


def make_table(results, n_seeds, config):
    """Return the rows of the table of results: COLUMNS, and one row for each (size, change).

    results: {(size, change): {seed: ChildRun}}. n_seeds: per setting. A row has the verdict on
    which all sizes agree, otherwise "unclear"; without a change it is "base" or "crash".
    """
    values = {setting: {seed: run.value for seed, run in runs.items() if run.value is not None}
              for setting, runs in results.items()}
    intervals = {}
    verdicts = {}  # {change: the verdict on which all sizes agree}
    for (size, change), by_seed in values.items():
        *intervals[size, change], verdict = compare(by_seed, values[size, BASE],
                                                    config.early_stopping_mode)
        if change == BASE and by_seed:
            verdict = BASE
        if verdicts.setdefault(change, verdict) != verdict:
            verdicts[change] = "unclear"
    table = [COLUMNS]
    for (size, change), by_seed in values.items():
        mean, spread = mean_and_spread([*by_seed.values()])
        time, _ = mean_and_spread([results[size, change][seed].seconds for seed in by_seed])
        numbers = [f"{x:.5g}" for x in (mean, spread, *intervals[size, change], time)]
        table.append((label(size, change), config.early_stopping_metric,
                      f"{len(by_seed)} of {n_seeds}", *numbers, verdicts[change]))
    return table


def make_test_table(results):
    """Return the rows of the table of metrics on the test data; only the header without any.

    results: {(size, change): {seed: ChildRun}}. A row has the number of runs, and mean and standard
    deviation (nan for one run) over the runs that did not crash.
    """
    table = [("change", "on test data", "runs", "mean", "spread")]
    for (size, change), by_seed in results.items():
        tests = [run.test for run in by_seed.values() if run.value is not None]
        for name in dict.fromkeys(itertools.chain(*tests)):
            values = [test[name] for test in tests if name in test]
            mean, spread = mean_and_spread(values)
            table.append((label(size, change), name, f"{len(values)} of {len(by_seed)}",
                          f"{mean:.5g}", f"{spread:.5g}"))
    return table


def label(size, change):
    """Return the name of a setting, "CHANGE at SIZE" or "CHANGE", as one printable line."""
    return printable(" ".join((f"{change} at {size}" if size else change).split()))


# -----------------------------------------------------------------------------
# command line

@dataclass
class RepeatOptions:
    """Train the same run with several seeds, with and without changes, and compare the results."""
    seeds: int = key(5, "runs per setting: the seed of the configuration and the next ones", ge=2)
    changes: list[str] = key([], "a change to compare with the unchanged run; may be repeated",
                             option="set", text=True, metavar="'KEY=VALUE ...'")
    sizes: list[str] = key([], "a size at which changes are compared; may be repeated",
                           option="size", text=True, metavar="'KEY=VALUE ...'")
    jobs: int = key(1, "runs at the same time, with a GPU or a share of the cores each", ge=1)
    out: str = key("out/repeat", "folder of the runs", aliases="out_dir", path=True)


def repeat(options, arguments):
    """Train every size and change with every seed, print the results, and return the exit code.

    Each size is trained without and with each change. The exit code is 1 if every run has crashed.
    Raises UserError like split_settings(), and for a configuration without evaluations.
    """
    config = load_argv(arguments)  # of run_train.py
    sizes = split_settings(options.sizes) or {"": []}
    changes = {BASE: []} | split_settings(options.changes)
    runs = {(size, change): {} for size in sizes for change in changes}
    # In the order of the seeds: after a stop, the settings have the same seeds to compare.
    in_order = []
    for seed in range(config.seed, config.seed + options.seeds):
        for (size, change), by_seed in runs.items():
            run = ChildRun(f"{label(size, change)}, seed {seed}", [
                *arguments, *sizes[size], *changes[change], f"--seed={seed}"], options.out)
            by_seed[seed] = run
            in_order.append(run)
    train_all(in_order, config.early_stopping_metric, options.out, options.jobs)
    echo(format_table(make_table(runs, options.seeds, config)))
    if len(tested := make_test_table(runs)) > 1:
        echo(format_table(tested))
    return int(all(run.value is None for run in in_order))


def split_settings(texts):
    """Return {setting: list of arguments} for texts "KEY=VALUE ...".

    Texts that differ only in blanks and quotes are one setting. Raises UserError for an empty text,
    for "base", for quotation marks that do not match, and for a text that sets seed or out_dir
    (except in a file that it names).
    """
    settings = {}
    for text in texts:
        if text.strip() in ("", BASE):
            raise UserError(f"--set, --size: expected KEY=VALUE, got {text!r}")
        try:
            arguments = shlex.split(text)
        except ValueError as error:  # e.g. a quotation mark that is not closed
            raise UserError(f"--set, --size: {text!r}: {error}") from None
        _, given = read_settings(None, arguments, problems=[])
        for name in ("seed", "out_dir"):
            if name in given and not file_of(given[name][1]):
                raise UserError(f"{text}: this command sets {name} of each run")
        settings[shlex.join(arguments)] = arguments
    return settings


main = command(RepeatOptions, repeat, load=list, interrupt_message="the same command resumes")
