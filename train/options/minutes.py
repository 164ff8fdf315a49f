"""A run limited by time: python run_train.py --max_minutes 5

The learning rate falls towards the last step, so the number of steps must be known before the first
one. A rehearsal measures it: a run of the same configuration in a temporary folder, which times
steps, evaluations and a save on this machine. The real run then has a fixed `max_iters`, also in
the checkpoints: resumed, or repeated with that max_iters, it computes the same bits.
"""

import bisect
import contextlib
import io
import math
import os
import shutil
import time
from dataclasses import dataclass

from train.base.checkpoint_file import prev_path
from train.base.console import duration
from train.base.errors import SetupError, echo
from train.base.run_folder import RunFolder
from train.distributed import broadcast_from_rank0
from train.robust import on_signals

TIMED_FRACTION = 0.05      # of the time budget, spent on timing steps
MAX_TIMED_SECONDS = 20.0   # spent on timing steps
MAX_STEPS = 10**9


def fit_max_iters(config, ranks, started, train_step, validate, save, open_run):
    """Return `config` with the max_iters that fits into max_minutes. started: time.monotonic() at
    the start of the program.

    A resumed run has the length that it started with. open_run(config) is the context of a new run;
    train_step, validate and save are the functions of train/train.py. Raises SetupError.
    """
    path = os.path.join(config.out_dir, "ckpt.pt")
    resumes = config.resume == "must" or (config.resume == "auto" and broadcast_from_rank0(
        lambda: os.path.lexists(path) or os.path.lexists(prev_path(path)), ranks))
    if config.resume_file or config.eval_only or resumes:
        return config
    if ranks.is_main:
        echo(f"max_minutes {config.max_minutes:g}: timing some steps to find out how many fit")
    # From here on the length is in steps only; keys that depend on the length follow it.
    config = config.replace(max_epochs=None, lr_decay_iters=None)
    with temporary_folder(config.out_dir, ranks) as folder:
        rehearsal = config.replace(out_dir=folder, resume="never", tracker=[], max_iters=MAX_STEPS)
        with contextlib.redirect_stdout(io.StringIO()):
            costs = measure_costs(rehearsal, train_step, validate, save, open_run)
    # Rank 0's measurements hold for all ranks.
    costs, seconds_left = broadcast_from_rank0(
        lambda: (costs, 60 * config.max_minutes - (time.monotonic() - started)), ranks)
    steps = bisect.bisect_right(range(MAX_STEPS), seconds_left, key=costs.seconds) - 1
    summary = (f"{costs.step * 1000:,.1f} ms per step, {costs.evaluation:.1f} s per evaluation, "
               f"{costs.start + costs.end:.1f} s for start and end, "
               f"{duration(max(seconds_left, 0))} left")
    if steps < 1:
        raise SetupError(f"max_minutes {config.max_minutes:g} is too short for one step on this "
                         f"machine: {summary}; increase it, or use a smaller model or fewer "
                         "evaluations")
    if ranks.is_main:
        echo(f"max_minutes {config.max_minutes:g} is max_iters {steps}: {summary}")
    return config.replace(max_iters=steps)


def raise_interrupt(signum, frame):
    """Signal handler: end the process like Ctrl-C."""
    raise KeyboardInterrupt(signum)


@contextlib.contextmanager
def temporary_folder(out_dir, ranks):
    """Context of a temporary folder inside out_dir, the same on all ranks; out_dir is locked."""
    def create():
        parent = stack.enter_context(RunFolder(out_dir))
        parent.open()
        folder = parent.file(".minutes")
        shutil.rmtree(folder, ignore_errors=True)  # from a killed process
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder
    with contextlib.ExitStack() as stack:
        # Otherwise these signals would end the process and leave the folder behind.
        stack.enter_context(on_signals(("SIGTERM", "SIGHUP"), raise_interrupt))
        yield broadcast_from_rank0(create, ranks)


@dataclass
class Costs:
    """Seconds per part of a run, and the intervals in steps."""
    start: float
    first: float       # the evaluation before the first step, without samples; 0: not evaluated
    step: float
    evaluation: float
    save: float
    end: float         # the last save and the test data
    eval_interval: int
    save_interval: int

    def seconds(self, steps):
        """Return the seconds of a run of `steps` steps."""
        evaluations = math.ceil(steps / (self.eval_interval or math.inf))
        saves = math.ceil(steps / (self.save_interval or math.inf))
        return (self.start + self.first + steps * self.step + evaluations * self.evaluation
                + saves * self.save + self.end)


def measure_costs(config, train_step, validate, save, open_run):
    """Return the Costs of a run of `config`, measured with real steps."""
    opened = time.monotonic()
    with open_run(config) as run:
        c = run.config
        data = run.data
        start = time.monotonic() - opened
        evaluates = bool(c.eval_interval) and data.val is not None
        first = measure_seconds(validate, run) if evaluates and c.eval_on_start else 0.0
        for _ in range(2 + run.compiler.enabled):  # a CPU compiles in the second step
            once = measure_seconds(train_step, run)
        budget = min(MAX_TIMED_SECONDS, TIMED_FRACTION * 60 * c.max_minutes)
        n = broadcast_from_rank0(lambda: min(max(math.ceil(budget / once), 3), 1000), run.ranks)
        step = sum(measure_seconds(train_step, run) for _ in range(n)) / n
        # The first evaluation with samples is slow: the second one is representative.
        evaluation = [measure_seconds(validate, run) for _ in range(2)][1] if evaluates else 0.0
        save_seconds = measure_seconds(save, run)
        end = measure_seconds(run.folder.wait)
        if data.test is not None and evaluates:
            test_batches = data.test.n_fixed(data.test.samples + 1)
            end += evaluation * test_batches / data.val.n_fixed(c.eval_iters)
    return Costs(start, first, step, evaluation, save_seconds, end, c.eval_interval * evaluates,
                 c.save_every)


def measure_seconds(function, *args):
    """Return the duration of function(*args) in seconds."""
    started = time.monotonic()
    function(*args)
    return time.monotonic() - started
