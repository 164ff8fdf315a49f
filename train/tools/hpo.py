"""Search for good hyperparameters with Optuna: short trials, in stages that narrow the space.

    python -m train.tools.hpo --config FILE.yaml --space train/configs/hpo_example.yaml

The search minimises val_loss, or follows early_stopping_metric and early_stopping_mode, and prunes
bad trials after an evaluation. The same command resumes a search; a trial that was interrupted is
repeated, but not after a kill -9 of the process. Several workers (processes with the same command,
e.g. one per GPU: CUDA_VISIBLE_DEVICES=1 python -m train.tools.hpo ...) share the trials; each may
add one trial to the requested number.
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

from train import config as config_file
from train.base.cli import command, under_torchrun
from train.base.errors import BadNumbers, ConfigError, UserError, require
from train.base.fields import TYPES, base_type, convert, fields_by_name, key, parse_value, to_bool
from train.base.files import exclusive_lock, lock_folder, write_text
from train.config import describe_files, load_argv, load_config, read_yaml, resolve, to_yaml
from train.distributed import Ranks
from train.robust import interrupt, on_signals, run_reporting_errors
from train.setup import open_data
from train.train import train

NOT_SEARCHABLE = ("out_dir", "resume", "eval_only", "allow_change", "max_iters")
NOT_SAVED = dict(resume="never", run_name=None, sample_tokens=0, save_interval=0, save_epochs=None,
                 keep_last=0, mirror=None, save_precision=None, checkpoint_format="file")
# With max_iters of a stage.
SCALED_LENGTHS = ("eval_interval", "warmup_iters", "lr_decay_iters", "step_iters")


# -----------------------------------------------------------------------------
# the search space

def read_space(path, config):
    """Return (space, stages) of the YAML file `path`: {key: Optuna distribution} and dicts.

    A stage has "trials", "max_iters" (0: as in `config`) and "narrow": the share of each range to
    search around the best value so far (after the first stage). ConfigError lists all problems.
    """
    problems = []
    space = {}
    known = fields_by_name(type(config))
    settings = resolve(read_yaml(path, problems), known, problems)
    raw_stages, where = settings.pop("stages", ([{"trials": "20"}], path))
    for name, (value, at) in settings.items():
        try:
            space[name] = read_dimension(name, value, known)
            needs = known[name].metadata.get("needs", "")
            if needs.partition("=")[0] not in settings and not config.has_effect(known[name]):
                raise ValueError(f"without effect in this configuration: it needs {needs}")
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
    """Return the Optuna distribution of the configuration key `name`.

    raw: a list of choices, or a dict with low, high and optionally log (true or false) or step.
    known: {key: dataclass field}. Raises ValueError, TypeError or ArithmeticError.
    """
    if name not in known or name in NOT_SEARCHABLE:
        raise ValueError("not a key that can be searched; `python run_train.py --help` lists them")
    if isinstance(raw, list):
        choices = [parse_value(known[name], value) for value in raw]
        return optuna.distributions.CategoricalDistribution(choices)
    kind = base_type(known[name].type)
    if kind not in (int, float) or {*(raw or ())} - {"log", "step"} != {"low", "high"}:
        raise ValueError("expected a list of choices, or for a number {low, high, log: true} or "
                         f"{{low, high, step}}; got {raw}")
    limits = {k: convert(v, *TYPES[kind]) if k == "step" else parse_value(known[name], v)
              for k, v in raw.items() if k != "log"}
    log = convert(raw.get("log", "false"), to_bool, "true or false for log")
    distributions = optuna.distributions
    distribution = distributions.IntDistribution if kind is int else distributions.FloatDistribution
    return distribution(log=log, **limits)


def narrow_dimension(dist, best, share):
    """Return a copy of an Optuna distribution, narrowed to a `share` of the range around `best`.

    It is inside the old range, except to include `best`. Choices: only `best` (all if share is 1).
    """
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
    """Return a trial's TrainConfig: `config` with `params` (searched keys) and `changes`.

    `changes` take precedence over `params`.
    max_iters: number of steps, to which warm-up, decay and intervals are scaled; 0: as in `config`.
    min_lr is scaled with learning_rate, unless it is in `params`. A searched length replaces the
    same length in epochs or as a fraction (REPLACED_LENGTHS). Raises ConfigError.
    """
    replaced = {name: None for k in params for name in config_file.REPLACED_LENGTHS.get(k, ())}
    values = asdict(config) | replaced | params | changes
    if config.min_lr is not None and "min_lr" not in params:
        values["min_lr"] *= values["learning_rate"] / config.learning_rate
    if max_iters:
        share = max_iters / config.max_iters
        values |= {k: max(1, round(values[k] * share)) for k in SCALED_LENGTHS if values[k]}
        values |= {k: values[k] * share for k in ("warmup_epochs", "eval_epochs") if values[k]}
        values["max_iters"] = max_iters
    out = load_config(None, values)
    out.origins = config.origins | dict.fromkeys(params, "overrides")
    return out


# -----------------------------------------------------------------------------
# the search

def search(config, space, stages, out):
    """Train the trials of all stages, or the rest of a search in `out`, and print the best trial.

    space, stages: of read_space(). out: folder with study.db, which other workers may use at the
    same time. Raises ConfigError if no trial of a stage completes.
    """
    studies = []
    # Checkpoints of trials that were killed; the trials of other workers are locked.
    for path in glob.glob(os.path.join(glob.escape(out), "stage_*_trial_*", "ckpt*")):
        with contextlib.suppress(UserError, FileNotFoundError), lock_folder(os.path.dirname(path)):
            os.unlink(path)
    # Numbers may be outside of the range, other values must be among the choices.
    start = {k: v for k, d in space.items()
             if (v := getattr(config, k)) is not None and v in getattr(d, "choices", [v])
             and not (getattr(d, "log", False) and v <= 0)}
    for number, stage in enumerate(stages, 1):
        study = open_study(config, space, number, stage, start, out)
        studies.append(study)
        start = study.user_attrs["start"]
        if number > 1:
            space = {k: narrow_dimension(d, start[k], stage["narrow"]) for k, d in space.items()}
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
          f"{best.value:.4f}\nTo train with it: python run_train.py --config={path}\n"
          f"To add its values to another configuration: best_config={path}")


def open_study(config, space, number, stage, start, out):
    """Open or create the Optuna study of a stage in out/study.db; each stage has a separate one.

    space: before narrowing. number: from 1. start: {key: value}, the first trial of a new study.
    Raises ConfigError if the study has a different config, space, max_iters, narrow, data or files.
    """
    data = "data_dir" not in space and str(open_data(config, Ranks()).fingerprints())
    asked = asdict(config) | dict(space=str(space), stage=[stage["max_iters"], stage["narrow"]],
                                  data=data, files=describe_files(config))
    # An evaluation in the first quarter of a trial does not prune it.
    first_pruned = 0 if config.max_epochs else (stage["max_iters"] or config.max_iters) // 4
    # A "%" in `out` has no meaning in it.
    url = sqlalchemy.URL.create("sqlite", database=os.path.join(out, "study.db"),
                                query={"timeout": "100"})
    with exclusive_lock(out):  # without POSIX locks, use a single worker
        study = optuna.create_study(
            storage=str(url), study_name=f"stage_{number}", load_if_exists=True,
            direction={"min": "minimize", "max": "maximize"}[config.early_stopping_mode],
            pruner=optuna.pruners.MedianPruner(4, first_pruned))
        if "asked" not in study.user_attrs:
            study.enqueue_trial(start)
            study.set_user_attr("start", start)
            study.set_user_attr("asked", asked)
    # A search of an earlier version lacks newer keys, which had the effect of their defaults.
    before = asked | asdict(type(config)()) | study.user_attrs["asked"]
    changed = [k for k in asked if before[k] != asked[k]]
    if changed:
        raise ConfigError([f"{out} holds a search with another {', '.join(changed)}; undo the "
                           "change, or choose another --out"])
    return study


def finished_trials(study):
    """Return the complete and pruned trials (optuna.FrozenTrial) of a study."""
    return study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,
                                                    optuna.trial.TrialState.PRUNED))


def run_trial(study, config, space, stage, out):
    """Train one more trial of a study, delete the checkpoints, and return it, complete or pruned.

    space: of this stage, after narrowing. stage: of read_space(). If training fails, e.g. with a
    non-finite loss or out of memory, the trial is marked as pruned, so that the sampler avoids
    these parameters. Other exceptions, e.g. an interrupt, are raised, and the trial is queued
    again.
    """
    with exclusive_lock(out):
        # The seed depends on the trial, so that workers and resumed searches do not repeat draws.
        study.sampler = optuna.samplers.TPESampler(seed=config.seed + len(study.trials),
                                                   n_startup_trials=5)
        trial = study.ask(space)
    params = ", ".join(f"{name} {value}" for name, value in trial.params.items())
    folder = os.path.join(out, f"{study.study_name}_trial_{trial.number}")
    try:
        print(f"{study.study_name}, trial {trial.number}: {params}", flush=True)
        ended = study.tell(trial, train_trial(trial, trial_config(
            config, trial.params, stage["max_iters"], out_dir=folder, **NOT_SAVED)))
    except (optuna.TrialPruned, BadNumbers, ValueError, RuntimeError) as error:
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
            torch.compiler.reset()  # frees the code for the shapes of the trial
    return ended


def train_trial(trial, config):
    """Train a trial without output; return the best early_stopping_metric after step 0.

    trial: gets the values. Raises TrialPruned if Optuna stops the trial, BadNumbers if the metric
    is not finite, UserError if there are no evaluations.
    """
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
    """Print a line about a finished trial: state, seconds, and the metric or the error."""
    metric = config.early_stopping_metric
    result = trial.user_attrs.get("error") or f"{metric} {trial.value:.4f}"
    print(f"{study.study_name}, trial {trial.number}: {trial.state.name.lower()}, "
          f"{trial.duration.total_seconds():.1f} s, {result}", flush=True)


def write_results(studies, config, out):
    """Write trials_history.json; for the last stage's best trial, base_ and best_config.yaml."""
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
    space: str = key("", "YAML file with keys and stages, e.g. train/configs/hpo_example.yaml",
                     required=True, aliases="hpo", path=True)
    out: str = key("out/hpo", "folder of the search", aliases="out_dir", path=True)


def run_search(options, config):
    """Run the search of SearchOptions, print errors of the search, and return the exit code.

    Raises UserError without steps or evaluations, under torchrun, or if stages set max_iters and
    `config` max_epochs; ConfigError for an invalid space; SetupError without optuna.
    """
    require("optuna", "the search")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", module="optuna")
    space, stages = read_space(options.space, config)
    if "?" in options.out:  # what follows would be options of the database
        raise UserError(f"--out {options.out}: choose a name without ?")
    if under_torchrun():
        raise UserError("runs without torchrun: start it several times instead")
    if not config.evaluates or not (config.max_iters or config.max_epochs):
        raise UserError("a search needs evaluations: eval_interval and max_iters above 0")
    if config.max_epochs and any(stage["max_iters"] for stage in stages):
        raise UserError("stages set max_iters: give max_iters instead of max_epochs")
    os.makedirs(options.out, exist_ok=True)

    def work(config):
        try:  # train() catches signals in the training loop only
            with on_signals(("SIGTERM", "SIGHUP"), interrupt):
                search(config, space, stages, options.out)
        except (sqlalchemy.exc.DatabaseError, optuna.exceptions.StorageInternalError) as error:
            while error.__cause__:
                error = error.__cause__  # at last the error of sqlite, e.g. of a full disk
            raise UserError(f"{os.path.join(options.out, 'study.db')}: {error}") from None
    return run_reporting_errors(config, work, prints=True)


main = command(SearchOptions, run_search, load=load_argv)
