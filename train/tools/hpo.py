"""Search for good hyperparameters with Optuna: short trials, in stages that narrow the space.

    python -m train.tools.hpo --config FILE.yaml --space train/configs/hpo_example.yaml

The search minimises val_loss, or follows early_stopping_metric and early_stopping_mode, and prunes
bad trials after an evaluation. The same command resumes a search; a trial that was interrupted is
repeated, but not one whose process was killed (kill -9). Started several times at once, workers
share the trials (one per GPU: CUDA_VISIBLE_DEVICES=1 python -m train.tools.hpo ...), and may add a
trial each to the requested number.
"""

import contextlib
import gc
import glob
import json
import math
import os
import shlex
import warnings
from dataclasses import asdict, dataclass

import torch
import yaml

try:
    import optuna
    import sqlalchemy
except ImportError:
    optuna = None  # run_search reports it

from train.base.cli import command, under_torchrun
from train.base.errors import BadNumbers, ConfigError, DataError, SetupError, UserError, require
from train.base.fields import base_type, convert, fields_by_name, key, parse_value, to_bool
from train.base.files import exclusive_lock, write_text
from train.config import load_argv, load_config, read_yaml, resolve, to_yaml
from train.robust import run_reporting_errors
from train.train import train

NOT_SEARCHABLE = ("out_dir", "resume", "eval_only", "allow_change", "max_iters")
# Of Optuna, with a study.db whose rows are not what it writes.
DAMAGE_ERRORS = (ValueError, LookupError, TypeError, AttributeError, AssertionError, RuntimeError)
RANGE_KEYS = {"low", "high", "log", "step"}
NOT_SAVED = dict(resume="never", run_name=None, sample_tokens=0, save_interval=0, save_epochs=None,
                 keep_last=0, mirror=None, save_precision=None, checkpoint_format="file")
# With max_iters of a stage.
SCALED_LENGTHS = ("eval_interval", "warmup_iters", "lr_decay_iters", "step_iters")


# -----------------------------------------------------------------------------
# the search space

def read_space(path, config):
    """Return (space, stages) of the YAML file `path`. space: {key: Optuna distribution}. stages: a
    list of {"trials": number, "max_iters": steps per trial, 0: as in `config`, "narrow": share of
    each range to keep around the best values so far}. ConfigError lists all problems."""
    problems = []
    space = {}
    known = fields_by_name(type(config))
    settings = resolve(read_yaml(path, problems), known, problems)
    raw_stages, where = settings.pop("stages", ([{"trials": "20"}], path))
    for name, (value, at) in settings.items():
        try:
            space[name] = read_dimension(name, value, known)
        except (ValueError, TypeError, ArithmeticError) as error:
            problems.append(f"{at}: {name}: {error}")
    try:
        stages = [read_stage(**stage) for stage in raw_stages or [{}]]
    except (ValueError, TypeError):
        problems.append(f"{where}: stages: got {raw_stages}; expected a list such as [{{trials: 12,"
                        " max_iters: 200}, {trials: 6, max_iters: 1000, narrow: 0.3}]; narrow is "
                        "the share of each range to keep around the best value so far")
    if problems:
        raise ConfigError(problems)
    return space, stages


def read_stage(trials, max_iters=0, narrow=0.5):
    stage = dict(trials=int(trials), max_iters=int(max_iters), narrow=float(narrow))
    if stage["trials"] < 1 or stage["max_iters"] < 0 or not 0 < stage["narrow"] <= 1:
        raise ValueError
    return stage


def read_dimension(name, raw, known):
    """Return the Optuna distribution of the key `name` from `raw`, a list of choices or a dict of
    low, high and perhaps log or step. known: {key: dataclass field}. ValueError states the problem.
    """
    if name not in known or name in NOT_SEARCHABLE:
        raise ValueError("not a key that can be searched; `python run_train.py --help` lists them")
    if isinstance(raw, list):
        choices = [parse_value(known[name], value) for value in raw]
        return optuna.distributions.CategoricalDistribution(choices)
    kind = base_type(known[name].type)
    is_range = isinstance(raw, dict) and {"low", "high"} <= set(raw) <= RANGE_KEYS
    if kind not in (int, float) or not is_range:
        raise ValueError("expected a list of choices, or for a number {low, high, log: true} or "
                         f"{{low, high, step}}; got {raw}")
    limits = {k: kind(v) if k == "step" else parse_value(known[name], v)
              for k, v in raw.items() if k != "log"}
    if not all(v is not None and abs(v) < 1e300 for v in limits.values()):
        raise ValueError(f"expected finite numbers, got {raw}")
    log = convert(raw.get("log", "false"), to_bool, "true or false for log")
    distributions = optuna.distributions
    distribution = distributions.IntDistribution if kind is int else distributions.FloatDistribution
    return distribution(log=log, **limits)


def narrow_dimension(dist, best, share):
    """Return a copy of the Optuna distribution `dist` with a range of `share` (0 to 1) of the old
    width, around the value `best`; it does not exceed the old range, except to include `best`. Of
    choices only `best` remains (all if share is 1)."""
    if hasattr(dist, "choices"):
        return type(dist)([best] if share < 1 else dist.choices)
    f, inverse = (math.log, math.exp) if dist.log else (float, float)
    low, high = f(dist.low), f(dist.high)
    width = share * (high - low)
    start = max(min(f(best) - width / 2, high - width), low)
    ends = [inverse(start), inverse(min(start + width, high))]
    if dist.step:  # rounded, since 3 * 0.05 is 0.15000000000000002
        ends = [round(dist.low + round((e - dist.low) / dist.step) * dist.step, 12) for e in ends]
    return type(dist)(min(ends[0], best), max(ends[1], best), dist.log, dist.step)


def trial_config(config, params, max_iters=0, **changes):
    """Return the TrainConfig of a trial: `config` with `params` and `changes`, both {key: value},
    and, if max_iters is not 0, of that length, with warm-up and intervals in proportion. The ratio
    of min_lr to learning_rate does not change unless min_lr is searched."""
    values = asdict(config) | params | changes
    if config.min_lr is not None and "min_lr" not in params:
        values["min_lr"] *= values["learning_rate"] / config.learning_rate
    if max_iters:
        share = max_iters / config.max_iters
        values |= {k: max(1, round(values[k] * share)) for k in SCALED_LENGTHS if values[k]}
        values["max_iters"] = max_iters
    out = load_config(None, values)
    out.origins = config.origins | dict.fromkeys(params, "overrides")
    return out


# -----------------------------------------------------------------------------
# the search

def search(config, space, stages, out):
    """Run the `stages` and the `space` of read_space() in the folder `out`, which other workers may
    share; print the best trial. ConfigError if no trial of a stage completes."""
    studies = []
    # Numbers may be outside of the range, other values must be among the choices.
    start = {k: v for k, d in space.items()
             if (v := getattr(config, k)) is not None and v in getattr(d, "choices", [v])
             and not (getattr(d, "log", False) and v <= 0)}
    for number, stage in enumerate(stages, 1):
        with database_errors(out, DAMAGE_ERRORS):
            study = open_study(config, space, number, stage, start, out)
            studies.append(study)
            trials = finished_trials(study) + study.best_trials  # reads all rows,
            sum(t.duration.total_seconds() + (t.value or 0) for t in trials)  # and checks numbers
            start = study.user_attrs["start"]
            if number > 1:
                space = {k: narrow_dimension(d, start[k], stage["narrow"])
                         for k, d in space.items()}
        while len(finished_trials(study)) < stage["trials"]:
            print_result(study, run_trial(study, config, space, stage, out), config)
            write_results(studies, config, out)
        if not study.best_trials:
            error = study.trials[-1].user_attrs.get("error")
            raise ConfigError([f"{out}: no trial of stage {number} completed; the last: {error}"])
        best = study.best_trial
        start = best.params
    write_results(studies, config, out)  # the search may have been killed after the last trial
    path = shlex.quote(os.path.join(out, "best_config.yaml"))
    print(f"Best: {study.study_name}, trial {best.number}, {config.early_stopping_metric} "
          f"{best.value:.4f}\nTo train with it: python run_train.py --config {path}\n"
          f"To add its values to another configuration: best_config={path}")


def open_study(config, space, number, stage, start, out):
    """Open or create, and return, the Optuna study of stage `number` (from 1) in out/study.db.
    space: {key: Optuna distribution}; stage: an item of read_space()'s stages. The first trial of a
    new study has the parameters `start` {key: value}. Each stage is a study, as results of runs of
    different lengths are not comparable. ConfigError if the study was created with a different
    `config`, `space` or `stage` (its max_iters and narrow)."""
    asked = asdict(config) | dict(space=str(space), stage=[stage["max_iters"], stage["narrow"]])
    # An evaluation in the first quarter of a trial does not prune it.
    first_pruned = 0 if config.max_epochs else (stage["max_iters"] or config.max_iters) // 4
    path = os.path.join(out, "study.db")
    with exclusive_lock(out):  # without POSIX locks, use a single worker
        study = optuna.create_study(
            storage=f"sqlite:///{path}?timeout=100", study_name=f"stage_{number}",
            direction={"min": "minimize", "max": "maximize"}[config.early_stopping_mode],
            load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(4, first_pruned))
        if "asked" not in study.user_attrs:
            study.enqueue_trial(start)
            study.set_user_attr("start", start)
            study.set_user_attr("asked", asked)
    changed = [k for k in asked if study.user_attrs["asked"].get(k) != asked[k]]
    if changed:
        raise ConfigError([f"{out} holds a search with another {', '.join(changed)}; undo the "
                           "change, or choose another --out"])
    return study


@contextlib.contextmanager
def database_errors(out, others=()):
    """Context manager that converts errors of the database out/study.db, and exceptions of the
    types in `others`, to a UserError."""
    path = os.path.join(out, "study.db")
    try:
        yield
    except UserError:
        raise
    except (sqlalchemy.exc.DatabaseError, optuna.exceptions.StorageInternalError,
            *others) as error:
        if isinstance(error, optuna.exceptions.StorageInternalError):
            error = error.__cause__  # of sqlalchemy
        reason = str(getattr(error, "orig", error)) or type(error).__name__
        # An OperationalError is a full disk or a lock, and the file is intact.
        if not isinstance(error, sqlalchemy.exc.OperationalError):
            reason += "; move it away to begin the search again"
        raise UserError(f"{path}: {reason}") from None


def finished_trials(study):
    """Return the list of complete and pruned trials of a study. Interrupted trials are left out,
    since they are queued to be repeated."""
    return study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,
                                                    optuna.trial.TrialState.PRUNED))


def run_trial(study, config, space, stage, out):
    """Train the next trial of `study`, a result of open_study(), and return it, an
    optuna.FrozenTrial. space: {key: Optuna distribution}, narrowed for this stage; other arguments
    as for open_study(). If training fails, e.g. with a non-finite loss or out of memory, the trial
    is marked as pruned, so that the sampler avoids these parameters. After interrupts and other
    exceptions, which are raised, the trial is queued to be repeated."""
    with exclusive_lock(out):
        # The seed depends on the trial, so that workers and resumed searches do not repeat draws.
        study.sampler = optuna.samplers.TPESampler(seed=config.seed + len(study.trials),
                                                   n_startup_trials=5)
        trial = study.ask(space)
    params = ", ".join(f"{name} {value}" for name, value in trial.params.items())
    print(f"{study.study_name}, trial {trial.number}: {params}", flush=True)
    folder = os.path.join(out, f"{study.study_name}_trial_{trial.number}")
    try:
        ended = study.tell(trial, train_trial(trial, trial_config(
            config, trial.params, stage["max_iters"], out_dir=folder, **NOT_SAVED)))
    except (optuna.TrialPruned, BadNumbers, ConfigError, DataError, SetupError,
            RuntimeError) as error:
        trial.set_user_attr("error", " ".join(str(error).split())[:200])
        ended = study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    except BaseException:
        study.enqueue_trial(trial.params)
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
        raise
    finally:
        for name in glob.glob("ckpt*", root_dir=folder):
            os.unlink(os.path.join(folder, name))
        gc.collect()  # the model of the trial
        if config.compile != "false":
            torch.compiler.reset()  # the limit of recompilations is per process
    return ended


def train_trial(trial, config):
    """Train `config` without console output and return the best value of
    config.early_stopping_metric in the evaluations after step 0. trial: an optuna.Trial.
    TrialPruned if Optuna stops the trial, BadNumbers for a non-finite metric, UserError without
    evaluations."""
    values = []

    def on_evaluation(it, numbers):
        value = numbers[config.early_stopping_metric]
        if value is None or not math.isfinite(value):
            raise BadNumbers(f"iter {it}: {config.early_stopping_metric} is {value}")
        if it > 0:  # at step 0 all trials are equal
            values.append(value)
            trial.report(value, it)
            if it < config.max_iters and trial.should_prune():
                raise optuna.TrialPruned
    with open(os.devnull, "w") as devnull, contextlib.redirect_stdout(devnull):
        train(config, on_evaluation=on_evaluation)
    if not values:
        raise UserError("a search needs validation data, and evaluations after step 0")
    return min(values) if config.early_stopping_mode == "min" else max(values)


# -----------------------------------------------------------------------------
# results

def print_result(study, trial, config):
    """Print state, time and metric, or the error, of `trial`, an optuna.FrozenTrial of `study`."""
    metric = config.early_stopping_metric
    result = trial.user_attrs.get("error") or f"{metric} {trial.value:.4f}"
    print(f"{study.study_name}, trial {trial.number}: {trial.state.name.lower()}, "
          f"{trial.duration.total_seconds():.1f} s, {result}", flush=True)


def write_results(studies, config, out):
    """Write trials_history.json, base_config.yaml (`config`) and best_config.yaml (the changes of
    the best trial of the last stage) to the folder `out`. studies: a list of the Optuna studies of
    the stages until now."""
    with exclusive_lock(out):
        history = [dict(stage=n, trial=t.number, state=t.state.name.lower(), value=t.value,
                        params=t.params, seconds=round(t.duration.total_seconds(), 1),
                        error=t.user_attrs.get("error"),
                        evaluations=sorted(t.intermediate_values.items()))
                   for n, study in enumerate(studies, 1) for t in finished_trials(study)]
        write_text(os.path.join(out, "trials_history.json"), json.dumps(history, indent=1))
        if studies[-1].best_trials:
            params = studies[-1].best_params
            best = trial_config(config, params, out_dir=os.path.join(out, "best"))
            changes = {"base": "base_config.yaml"} | {
                k: v for k, v in asdict(best).items() if k in params or v != getattr(config, k)}
            write_text(os.path.join(out, "base_config.yaml"), to_yaml(config))
            write_text(os.path.join(out, "best_config.yaml"),
                       yaml.safe_dump(changes, sort_keys=False, allow_unicode=True))


# -----------------------------------------------------------------------------
# command line

@dataclass
class SearchOptions:
    """Search for good hyperparameters with Optuna, in stages that narrow the space."""
    space: str = key("", "YAML file with the keys to search and the stages, e.g. "
                     "train/configs/hpo_example.yaml", required=True, aliases="hpo")
    out: str = key("out/hpo", "folder of the search", aliases="out_dir")


def run_search(options, config):
    """Run the search that `options`, a SearchOptions, describes and return the exit code. config:
    the TrainConfig from which trials differ in the searched keys. Raises UserError for options that
    do not fit."""
    require("optuna", "the search")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", module="optuna")
    space, stages = read_space(options.space, config)
    if under_torchrun():
        raise UserError("runs without torchrun: start it several times instead")
    if not config.evaluates:
        raise UserError("a search needs evaluations: eval_interval above 0")
    if config.max_epochs and any(stage["max_iters"] for stage in stages):
        raise UserError("stages set max_iters: give max_iters instead of max_epochs")
    os.makedirs(options.out, exist_ok=True)

    def work(config):
        with database_errors(options.out):
            search(config, space, stages, options.out)
    return run_reporting_errors(config, work)


main = command(SearchOptions, run_search, load=load_argv)
