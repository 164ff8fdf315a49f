"""A worker of a hyperparameter search: takes trials from the study, trains them, tells results."""

import contextlib
import gc
import itertools
import math
import os
import time
from dataclasses import asdict

import optuna
import torch
from optuna.trial import TrialState

from train.checkpoint import CheckpointError
from train.config import ConfigError, differences, load_config
from train.dataloader import DataError
from train.distributed import SetupError
from train.guard import BadNumbers, Stopped
from train.hpo_space import contains, distribution, narrowed, with_params
from train.train import train

SCALED = ("warmup_iters", "lr_decay_iters", "step_iters")
REPORTS = 8  # evaluations of a shortened trial, at least: what pruning goes by


class Worker:
    """One process's share of a stage. A stage is a study of its own in out/study.db, since values
    of runs of different lengths do not compare. `before` is the Worker of the stage before."""

    def __init__(self, config, space, number, stage, out, before=None):
        self.config, self.number, self.stage, self.out = config, number, stage, out
        self.metric = config.early_stopping_metric
        self.sign = 1 if config.early_stopping_mode == "min" else -1
        asked = dict(space=space, stage=asdict(stage) | dict(trials=0), config=asdict(config))
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with self.alone():
            storage = optuna.storages.RDBStorage(
                f"sqlite:///{out}/study.db", engine_kwargs=dict(connect_args=dict(timeout=100)))
            self.study = optuna.create_study(
                storage=storage, study_name=f"stage_{number}", load_if_exists=True,
                direction="minimize" if self.sign > 0 else "maximize",
                pruner=optuna.pruners.MedianPruner(4, (stage.max_iters or config.max_iters) // 4))
            if "space" not in self.study.user_attrs:
                self.begin(asked, before)
        if changed := changes(self.study.user_attrs["asked"], asked):
            raise ConfigError([f"{out} holds a search with another {', '.join(changed)}; undo the "
                               "change, or choose another --out"])
        self.dims = {k: distribution(d) for k, d in self.study.user_attrs["space"].items()}

    def begin(self, asked, before):
        """Settle the space of the stage; its first trial is the best so far, or what the config
        has."""
        space = asked["space"]
        own = {k: getattr(self.config, k) for k in space}
        start = {k: v for k, v in own.items() if contains(space[k], v)}
        if before:
            start, done = before.best().params, before.finished()
            space = {k: narrowed(d, start[k], self.stage.narrow,
                                 [(t.params[k], self.sign * t.value) for t in done])
                     for k, d in before.study.user_attrs["space"].items()}
        self.study.enqueue_trial(start)
        self.study.set_user_attr("asked", asked)
        self.study.set_user_attr("space", space)

    def finished(self):
        return [t for t in self.study.trials if t.state == TrialState.COMPLETE]

    def best(self):
        return min(self.finished(), key=lambda t: self.sign * t.value, default=None)

    def alone(self):
        """Context in which no other worker counts, starts or writes."""
        return locked(os.path.join(self.out, ".lock"), wait=True)

    def trials(self):
        """Run trials until the stage is over, also for other workers; yields each that ended."""
        while True:
            with self.alone():
                running = [t for t in self.study.trials if t.state == TrialState.RUNNING]
                for lost in [t for t in running if not self.is_alive(t)]:
                    self.study.tell(lost.number, state=TrialState.FAIL)
                    running.remove(lost)
                ended = [t for t in self.study.trials if "seconds" in t.user_attrs]  # not the lost
                if len(ended) + len(running) < self.stage.trials:
                    trial, folder, lock = self.ask()
                elif running:
                    trial = None
                else:
                    return
            if trial is None:
                time.sleep(0.5)
                continue
            with lock:
                self.run(trial, folder)
            yield self.study.trials[trial.number]

    def is_alive(self, trial):
        """Whether a process is at the trial: it holds the lock in its folder."""
        lock = os.path.join(self.out, f"trial_{trial.user_attrs.get('trial')}", ".worker")
        if not os.path.exists(lock):
            return False
        with locked(lock) as ours:
            return not ours

    def ask(self):
        """A new trial, its folder, and the lock that says that this process is at it."""
        number = next(n for n in itertools.count() if not os.path.exists(f"{self.out}/trial_{n}"))
        # Draws depend on the trial's number: workers and restarts do not repeat each other's.
        self.study.sampler = optuna.samplers.TPESampler(
            seed=self.config.seed + number,
            n_startup_trials=max(4, min(10, self.stage.trials // 3)))
        trial = self.study.ask(self.dims)
        trial.set_user_attr("trial", number)
        folder = os.path.join(self.out, f"trial_{number}")
        os.makedirs(folder)
        lock = contextlib.ExitStack()
        lock.enter_context(locked(os.path.join(folder, ".worker")))
        return trial, folder, lock

    def run(self, trial, folder):
        """Train with the trial's values and tell the study what came of it: a trial may fail, the
        search goes on. Raises what would fail every trial, and what asks to stop."""
        started, error, value, state = time.perf_counter(), None, None, TrialState.FAIL
        try:
            config = trial_config(self.config, trial.params, self.stage.max_iters, folder)
            value, state = best_value(trial, config), TrialState.COMPLETE
        except optuna.TrialPruned:
            state = TrialState.PRUNED
        except (BadNumbers, ConfigError) as reason:  # results too: the sampler shall keep away
            state, error = TrialState.PRUNED, first_line(reason)
        except (Stopped, KeyboardInterrupt, SetupError, DataError, CheckpointError):
            self.study.tell(trial, state=state)  # without "seconds": it does not count
            raise
        except Exception as reason:
            error = f"{type(reason).__name__}: {first_line(reason)}"
        trial.set_user_attr("error", error)
        trial.set_user_attr("seconds", round(time.perf_counter() - started, 1))
        self.study.tell(trial, value, state)
        clean_up(folder, self.config.compile)


def changes(old, new):
    """What differs between two searches so that their trials do not compare."""
    keys = [k for k, *_ in differences(old["config"], new["config"])]
    keys += [k for k in ("max_iters", "max_epochs") if old["config"][k] != new["config"][k]]
    return keys + [k for k in ("space", "stage") if old[k] != new[k]]


def trial_config(config, params, max_iters, out_dir):
    """The configuration of a trial. One with fewer `max_iters` is the run in small: its warm-up and
    decay shrink with it, and it is evaluated often enough to be pruned."""
    values = with_params(config, params)
    if max_iters:
        share = max_iters / config.max_iters
        values |= {k: max(1, round(values[k] * share)) for k in SCALED if values[k]}
        values |= dict(max_iters=max_iters,
                       eval_interval=min(config.eval_interval, max(1, max_iters // REPORTS)))
    values |= dict(out_dir=out_dir, resume="never", run_name=None, sample_tokens=0, save_interval=0,
                   keep_last=0)
    return load_config(None, values)


def best_value(trial, config):
    """The best value of the metric over the run; TrialPruned when it is not worth going on."""
    better, values = min if config.early_stopping_mode == "min" else max, []

    def on_evaluation(it, numbers):
        value = numbers.get(config.early_stopping_metric)
        if value is None:
            raise SetupError(f"early_stopping_metric: no {config.early_stopping_metric!r} among "
                             f"{', '.join(numbers)}")
        if not math.isfinite(value):
            raise BadNumbers(f"iter {it}: {config.early_stopping_metric} is {value}")
        if it > 0:  # before the first step all trials are alike
            values.append(value)
            trial.report(value, it)
            if it < config.max_iters and trial.should_prune():
                raise optuna.TrialPruned

    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # see train.log
        train(config, on_evaluation)
    return better(values)


def first_line(error):
    return "; ".join(getattr(error, "problems", str(error).split("\n")[:1]))[:200]


def clean_up(folder, compile):
    """Free the memory of a trial, and the disk: its weights are of no use, since the best
    configuration is trained again in full."""
    for name in os.listdir(folder):
        if name.startswith("ckpt"):
            os.unlink(os.path.join(folder, name))
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if compile != "false":
        torch.compiler.reset()  # or the models of all trials share one limit of recompilations


@contextlib.contextmanager
def locked(path, wait=False):
    """Holds the lock of a file; yields false where another process does. It ends with the process.
    Without POSIX locks every try succeeds: then run one worker only."""
    with open(path, "a") as file:
        try:
            import fcntl
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass
        except BlockingIOError:
            yield False
            return
        yield True
