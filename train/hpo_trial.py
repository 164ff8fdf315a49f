"""One trial of a hyperparameter search: a training run whose evaluations decide whether it goes on."""

import contextlib
import gc
import math
import os
import time
from dataclasses import asdict

from optuna import TrialPruned
from optuna.trial import TrialState

from train.checkpoint import CheckpointError
from train.config import load_config
from train.dataloader import DataError
from train.distributed import SetupError
from train.guard import BadNumbers, Stopped
from train.train import train

SCALED = ("warmup_iters", "lr_decay_iters", "step_iters")
REPORTS = 8  # evaluations of a shortened trial, at least: what pruning goes by
NOT_ITS_FAULT = (Stopped, KeyboardInterrupt, SetupError, DataError, CheckpointError)


def trial_config(config, params, max_iters, out_dir):
    """The configuration of a trial. One with fewer `max_iters` is the run in small: its warm-up and
    decay shrink with it, and it is evaluated often enough to be pruned."""
    values = asdict(config) | params
    if max_iters:
        share = max_iters / config.max_iters
        values |= {k: max(1, round(values[k] * share)) for k in SCALED if values[k]}
        values |= dict(max_iters=max_iters,
                       eval_interval=min(config.eval_interval, max(1, max_iters // REPORTS)))
    values |= dict(out_dir=out_dir, resume="never", run_name=None, sample_tokens=0, save_interval=0,
                   keep_last=0)
    return load_config(None, values)


def run_trial(study, trial, config, max_iters, out_dir):
    """Train with the values of `trial` (optuna's), and tell the study what came of it: a trial may
    fail, the search goes on. Raises only what would fail every trial, and what asks to stop."""
    started, error, value, state = time.perf_counter(), None, None, TrialState.FAIL
    try:
        value = best_value(trial, trial_config(config, trial.params, max_iters, out_dir))
        state = TrialState.COMPLETE
    except TrialPruned:
        state = TrialState.PRUNED
    except BadNumbers as reason:  # a result as well: the sampler is to keep away from there
        state, error = TrialState.PRUNED, first_line(reason)
    except NOT_ITS_FAULT:
        study.tell(trial, state=state)  # without "seconds": it does not count
        raise
    except Exception as reason:
        error = f"{type(reason).__name__}: {first_line(reason)}"
    trial.set_user_attr("seconds", round(time.perf_counter() - started, 1))
    trial.set_user_attr("error", error)
    study.tell(trial, value, state)
    clean_up(config, out_dir)


def best_value(trial, config):
    """The best value of the metric over the run; TrialPruned when the trial is not worth its end."""
    better, values = min if config.early_stopping_mode == "min" else max, []

    def on_evaluation(it, numbers):
        value = numbers.get(config.early_stopping_metric)
        if value is None:
            raise SetupError(f"early_stopping_metric: no {config.early_stopping_metric!r} among "
                             f"{', '.join(numbers)}")
        if not math.isfinite(value):
            raise BadNumbers(f"iter {it}: {config.early_stopping_metric} is {value}")
        values.append(value)
        if it > 0:  # before the first step all trials are alike
            trial.report(value, it)
            if it < config.max_iters and trial.should_prune():
                raise TrialPruned

    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # has a train.log
        train(config, on_evaluation)
    return better(values)


def first_line(error):
    return str(error).split("\n")[0][:300]


def clean_up(config, out_dir):
    """Give memory back, and the disk space of weights that nobody needs: the best configuration is
    trained again in full."""
    for name in os.listdir(out_dir):
        if name.startswith("ckpt"):
            os.unlink(os.path.join(out_dir, name))
    gc.collect()
    import torch
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if config.compile != "false":
        torch.compiler.reset()  # or the models of all trials count against one limit of recompiles
