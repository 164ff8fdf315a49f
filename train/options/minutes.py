"""A run of so many minutes: python run_train.py --max_minutes 5

The length in steps must be known before the first one, as the learning rate falls towards the last.
So a rehearsal comes first: a run of the same configuration, in a folder that is thrown away, says
what a step, an evaluation and a save take here. The run then is one of `max_iters` steps like any
other, in its checkpoints too: resumed, or repeated with that max_iters, it gives the same bits.
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

TIMED, LONGEST = 0.05, 20.0  # share of the budget that is spent on timing steps; seconds at most
MOST_STEPS = 10**9


def in_steps(config, ranks, started, new_run):
    """`config` with the max_iters that ends max_minutes after `started`, of time.monotonic(). A run
    that goes on keeps the length it has (train/resume.py). Raises SetupError.

    new_run(config, at_end) -> a run (train.train.Trainer) that is ready for its first step; what it
    holds is given back with the ExitStack at_end.
    """
    if config.resume_file or config.eval_only or config.resume == "must" or (
            config.resume == "auto" and broadcast_from_rank0(lambda: has_checkpoint(config.out_dir), ranks)):
        return config
    if ranks.is_main:
        echo(f"max_minutes {config.max_minutes:g}: timing some steps first, to know how many fit")
    # The length is in steps alone from here on; other lengths that end with it follow it.
    config = config.replace(max_epochs=None, lr_decay_iters=None)
    with folder_inside(config.out_dir, ranks) as folder, contextlib.redirect_stdout(io.StringIO()):
        costs = rehearse(config.replace(out_dir=folder, resume="never", tracker=[],
                                    max_iters=MOST_STEPS), new_run)
    # What rank 0 has measured holds for all.
    costs, left = broadcast_from_rank0(
        lambda: (costs, 60 * config.max_minutes - (time.monotonic() - started)), ranks)
    steps = bisect.bisect_right(range(MOST_STEPS), left, key=costs.of) - 1
    text = (f"{costs.step * 1000:,.1f} ms a step, {costs.evaluation:.1f} s an evaluation, "
            f"{costs.start + costs.end:.1f} s for start and end, {duration(max(left, 0))} left")
    if steps < 1:
        raise SetupError(f"max_minutes {config.max_minutes:g} is too short for one step here: "
                         f"{text}; give it more, or use a smaller model or fewer evaluations")
    if ranks.is_main:
        echo(f"max_minutes {config.max_minutes:g} is max_iters {steps}: {text}")
    return config.replace(max_iters=steps)


def has_checkpoint(folder):
    path = os.path.join(folder, "ckpt.pt")
    return os.path.lexists(path) or os.path.lexists(prev_path(path))


def leave(signum, frame):
    raise KeyboardInterrupt(signum)


@contextlib.contextmanager
def folder_inside(path, ranks):
    """A folder for a while, the same on all ranks, in the run's own, which is locked meanwhile."""
    def make():
        parent = at_end.enter_context(RunFolder(path))
        parent.open()
        folder = parent.file(".minutes")
        shutil.rmtree(folder, ignore_errors=True)  # one that was killed left it
        at_end.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder
    with contextlib.ExitStack() as at_end:
        # What would end the process, and leave the folder behind, ends it like Ctrl-C.
        at_end.enter_context(on_signals(("SIGTERM", "SIGHUP"), leave))
        yield broadcast_from_rank0(make, ranks)


@dataclass
class Costs:
    """What the parts of a run take, in seconds, and how many steps lie between them."""
    start: float
    first: float       # the evaluation before the first step, which has no samples; 0: none
    step: float
    evaluation: float
    save: float
    end: float  # what only the last save and the test data take
    eval_interval: int
    save_interval: int

    def of(self, steps):
        """Seconds of a run of so many steps."""
        evaluations = math.ceil(steps / (self.eval_interval or math.inf))
        saves = math.ceil(steps / (self.save_interval or math.inf))
        return (self.start + self.first + steps * self.step + evaluations * self.evaluation
                + saves * self.save + self.end)


def rehearse(config, new_run):
    """The Costs of a run of `config`."""
    began = time.monotonic()
    with contextlib.ExitStack() as at_end:
        run = new_run(config, at_end)
        c, data = run.config, run.data
        start, evaluates = time.monotonic() - began, c.eval_interval and data.val is not None
        first = timed(run.validate) if evaluates and c.eval_on_start else 0.0
        for _ in range(2 + run.compiler.enabled):  # a CPU compiles in the second step
            once = timed(run.train_step)
        budget = min(LONGEST, TIMED * 60 * c.max_minutes)
        n = broadcast_from_rank0(lambda: min(max(math.ceil(budget / once), 3), 1000), run.ranks)
        step = timed(lambda: [run.train_step() for _ in range(n)]) / n
        # The first one with samples is slow.
        evaluation = [timed(run.validate) for _ in range(2)][1] if evaluates else 0.0
        save, end = timed(run.save), timed(run.folder.wait)
        if data.test is not None and evaluates:
            batches = [loader.n_fixed(count) for loader, count in (
                (data.test, data.test.samples + 1), (data.val, c.eval_iters))]
            end += evaluation * batches[0] / batches[1]
    return Costs(start, first, step, evaluation, save, end, c.eval_interval * bool(evaluates),
                 c.save_every)


def timed(f):
    """Seconds that f() takes."""
    started = time.monotonic()
    f()
    return time.monotonic() - started
