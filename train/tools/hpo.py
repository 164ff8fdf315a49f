"""Search for good hyperparameters with Optuna: short trials, in stages that narrow the space.

    python -m train.tools.hpo --config FILE.yaml --space train/configs/hpo_example.yaml

The search minimises val_loss, or follows early_stopping_metric and early_stopping_mode, and prunes
bad trials after an evaluation. The same command resumes a search; started several times at once,
workers share the trials (one per GPU: CUDA_VISIBLE_DEVICES=1 python -m train.tools.hpo ...).
"""

import contextlib
import glob
import json
import math
import os
import sys
import time
import warnings
from dataclasses import asdict, dataclass, fields
from itertools import accumulate

import torch
import yaml

try:
    import optuna
except ImportError:
    optuna = None  # run_search reports it

from train.base.cli import run_command
from train.base.errors import BadNumbers, ConfigError, UserError
from train.base.fields import PlainLoader, key, parse_value
from train.base.files import exclusive_lock, write_text
from train.config import find_differences, load_argv, load_config, read_yaml, resolve, to_yaml
from train.options.loss_svg import TEXT_COLOR
from train.robust import run_reporting_errors
from train.tools.plot import save_figure
from train.train import train

NOT_SEARCHABLE = ("out_dir", "resume", "eval_only", "allow_change")  # set by the search
RANGE_KEYS = {"low", "high", "log", "step"}
SCALED_LENGTHS = ("warmup_iters", "lr_decay_iters", "step_iters")  # with max_iters of a stage
OTHER_LENGTHS = ("max_minutes", "max_epochs", "eval_epochs", "warmup_epochs")
HEARTBEAT_SECONDS = 5
GRACE_SECONDS = 60  # without a heartbeat, after which a trial is queued for a retry


# -----------------------------------------------------------------------------
# the search space

def read_space(path, stages, config):
    """Return ({key: Optuna distribution}, stages) of a YAML file, or with the `stages` of a YAML
    text. A stage is dict(trials, max_iters, narrow). ConfigError lists all problems."""
    problems, space = [], {}
    known = {f.name: f for f in fields(config)}
    settings = resolve(read_yaml(path, problems), known, problems)
    raw_stages, where = settings.pop("stages", ([{"trials": "20"}], path))
    if not settings and not problems:
        problems.append(f"{path}: nothing to search; expected lines such as "
                        "learning_rate: {low: 1e-4, high: 1e-2, log: true}")
    for name, (value, at) in settings.items():
        try:
            space[name] = read_dimension(name, value, known)
        except ValueError as error:
            problems.append(f"{at}: {name}: {error}")
    try:
        if stages:
            raw_stages, where = stages, "--stages"
            raw_stages = yaml.load(stages, PlainLoader)
        stages = [read_stage(**stage) for stage in raw_stages or [{}]]
    except (ValueError, TypeError, yaml.YAMLError):
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
    """Return an entry of the space as an Optuna distribution. ValueError states the problem.

    Choices that are lists or mappings become JSON text, which Optuna can store."""
    kinds = optuna.distributions
    if name not in known or name in NOT_SEARCHABLE:
        raise ValueError("not a key that can be searched; `python run_train.py --help` lists them")
    if isinstance(raw, list):
        values = [parse_value(known[name], v) for v in raw]
        return kinds.CategoricalDistribution([json.dumps(v) if isinstance(v, (list, dict)) else v
                                              for v in values])
    if not isinstance(raw, dict) or not {"low", "high"} <= set(raw) <= RANGE_KEYS:
        raise ValueError("expected {low, high, log: true}, {low, high, step} or a list of choices; "
                         f"got {raw}")
    low, high = (parse_value(known[name], raw[end]) for end in ("low", "high"))
    kind = {int: kinds.IntDistribution, float: kinds.FloatDistribution}.get(type(low))
    if kind is None or type(high) is not type(low):
        raise ValueError(f"not a numeric range; list the choices: {name}: [a, b]")
    step = dict(step=type(low)(raw["step"])) if "step" in raw else {}
    return kind(low, high, log=str(raw.get("log")).lower() == "true", **step)


def narrow_dimension(dist, best, share):
    """Return `dist` around the `best` value: only this choice, or `share` of the range."""
    if hasattr(dist, "choices"):
        return type(dist)([best] if share < 1 else dist.choices)
    f, inverse = (math.log, math.exp) if dist.log else (float, float)
    low, high = f(dist.low), f(dist.high)
    half = share * (high - low) / 2
    ends = [inverse(min(max(f(best) + offset, low), high)) for offset in (-half, half)]
    if dist.step:
        ends = [dist.low + round((e - dist.low) / dist.step) * dist.step for e in ends]
        if isinstance(dist.step, float):  # 3 * 0.05 is 0.15000000000000002
            ends = [float(f"{e:.12g}") for e in ends]
    return type(dist)(min(ends[0], best), max(ends[1], best), dist.log, dist.step)


def trial_config(config, params, max_iters=0, **changes):
    """Return `config` with a trial's parameters and other changes, shortened to `max_iters` if that
    is not 0. The ratio of min_lr to learning_rate is kept unless min_lr is searched."""
    values = asdict(config) | params | changes
    if config.min_lr is not None and "min_lr" not in params:
        values["min_lr"] *= values["learning_rate"] / config.learning_rate
    if max_iters:
        share = max_iters / config.max_iters
        values |= {k: max(1, round(values[k] * share)) for k in SCALED_LENGTHS if values[k]}
        eval_interval = min(config.eval_interval, max(1, max_iters // 8))  # pruning needs several
        values |= dict(max_iters=max_iters, eval_interval=eval_interval)
    out = load_config(None, values)
    out.origins = config.origins | dict.fromkeys(params, "overrides")
    return out


# -----------------------------------------------------------------------------
# the search

def search(config, space, stages, out):
    """Run the stages in the folder `out`, which other workers may share."""
    studies = []
    for number, stage in enumerate(stages, 1):
        with exclusive_lock(out):  # without POSIX locks, use a single worker
            studies.append(open_study(config, space, number, stage, out, studies))
        run_stage(studies, config, stage, out)
        best = best_trial(studies[-1])
        if best is None:
            raise ConfigError([f"{out}: no trial of stage {number} completed; see "
                               "trials_history.json in this folder"])
    print(f"Best: {studies[-1].study_name}, trial {best.number}, {config.early_stopping_metric} "
          f"{best.value:.4f}, {format_params(best.params)}\nTo train with it: python run_train.py "
          f"--config {os.path.join(out, 'best_config.yaml')}")


def open_study(config, space, number, stage, out, previous):
    """Open or create the study of a stage in out/study.db. Stages have a study each, as values of
    runs of different lengths are not comparable. The first trial of a study has the best parameters
    of the last of the `previous` studies, or the values of `config`."""
    storage = optuna.storages.RDBStorage(
        f"sqlite:///{out}/study.db", engine_kwargs=dict(connect_args=dict(timeout=100)),
        heartbeat_interval=HEARTBEAT_SECONDS, grace_period=GRACE_SECONDS,
        heartbeat_stale_trial_callback=optuna.storages.RetryHeartbeatStaleTrialCallback())
    study = optuna.create_study(
        storage=storage, study_name=f"stage_{number}", load_if_exists=True,
        direction={"min": "minimize", "max": "maximize"}[config.early_stopping_mode],
        pruner=optuna.pruners.MedianPruner(4, (stage["max_iters"] or config.max_iters) // 4))
    settings = dict(asdict(config), space=str(space), stage=[stage["max_iters"], stage["narrow"]])
    if not study.trials:
        # Numbers may be outside of the range, other values must be among the choices.
        start = {k: v for k, d in space.items()
                 if (v := getattr(config, k)) is not None and v in getattr(d, "choices", [v])}
        if previous:
            start = best_trial(previous[-1]).params
            space = {k: narrow_dimension(d, start[k], stage["narrow"])
                     for k, d in load_space(previous[-1]).items()}
        study.set_user_attr("asked", settings)
        to_json = optuna.distributions.distribution_to_json
        study.set_user_attr("space", {k: to_json(d) for k, d in space.items()})
        study.enqueue_trial(start)
    old, known = study.user_attrs["asked"], {f.name: f for f in fields(config)}
    changed = [k for k, *_ in find_differences(old, settings, known)]
    changed += [k for k in ("max_iters", "max_epochs", "space", "stage") if old[k] != settings[k]]
    if changed:
        raise ConfigError([f"{out} holds a search with another {', '.join(changed)}; undo the "
                           "change, or choose another --out"])
    return study


def load_space(study):
    from_json = optuna.distributions.json_to_distribution
    return {k: from_json(d) for k, d in study.user_attrs["space"].items()}


def counted_trials(study):
    """Return all trials except those that failed because a worker died or was stopped: a new trial
    with the same parameters was queued."""
    return [t for t in study.get_trials(deepcopy=False) if t.state.name != "FAIL"]


def best_trial(study):
    """Return the best completed trial, or None."""
    return study.best_trial if any(t.state.name == "COMPLETE" for t in study.trials) else None


def run_stage(studies, config, stage, out):
    """Run trials until the stage is complete, including the trials of other workers."""
    study, is_waiting = studies[-1], False
    while True:
        states = [t.state.name for t in counted_trials(study)]
        if len(states) < stage["trials"] or "WAITING" in states:
            study.optimize(lambda trial: run_trial(trial, config, stage, out), n_trials=1,
                           callbacks=[lambda _, trial: report(studies, trial, config, out)],
                           gc_after_trial=True)
        elif "RUNNING" in states:
            if not is_waiting:
                print("Waiting for the trials of other workers (a trial whose worker died is "
                      f"queued again after {GRACE_SECONDS} s)", flush=True)
            is_waiting = True
            time.sleep(1)
            optuna.storages.fail_stale_trials(study)
        else:
            return


def run_trial(trial, config, stage, out):
    """Train with the trial's parameters and return the best value of the metric.

    A trial that fails is pruned, so that the sampler avoids the parameters. Problems that every
    trial would have, and interrupts, are raised."""
    study = trial.study
    if [t.number for t in counted_trials(study)].index(trial.number) >= stage["trials"]:
        return math.nan  # several workers started the last trial at the same time
    # The seed depends on the trial, so that workers and resumed searches do not repeat draws.
    study.sampler = optuna.samplers.TPESampler(
        seed=config.seed + trial.number, n_startup_trials=max(4, min(10, stage["trials"] // 3)))
    params = {k: suggest(trial, k, d) for k, d in load_space(study).items()}
    print(f"{study.study_name}, trial {trial.number}: {format_params(params)}", flush=True)
    folder = os.path.join(out, f"{study.study_name}_trial_{trial.number}")
    try:
        return train_trial(trial, trial_config(
            config, params, stage["max_iters"], out_dir=folder, resume="never", run_name=None,
            sample_tokens=0, save_interval=0, save_epochs=None, keep_last=0))
    except optuna.TrialPruned:
        raise
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, (UserError, KeyboardInterrupt)) and not isinstance(
                error, (BadNumbers, ConfigError)):
            study.enqueue_trial(params)
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        trial.set_user_attr("error", reason[:200])
        raise optuna.TrialPruned from error
    finally:
        clean_up(folder, config.compile)


def suggest(trial, name, dist):
    if hasattr(dist, "choices"):
        return trial.suggest_categorical(name, dist.choices)
    method = trial.suggest_int if isinstance(dist.low, int) else trial.suggest_float
    return method(name, dist.low, dist.high, step=dist.step, log=dist.log)


def train_trial(trial, config):
    """Train without console output and return the best value of the metric. Raises TrialPruned."""
    values, metric = [], config.early_stopping_metric

    def on_evaluation(it, numbers):
        value = numbers[metric]
        if value is None or not math.isfinite(value):
            raise BadNumbers(f"iter {it}: {metric} is {value}")
        if it > 0:  # at step 0 all trials are equal
            values.append(value)
            trial.report(value, it)
            if it < config.max_iters and trial.should_prune():
                raise optuna.TrialPruned
    with open(os.devnull, "w") as devnull, contextlib.redirect_stdout(devnull):
        train(config, on_evaluation=on_evaluation)
    return (min if config.early_stopping_mode == "min" else max)(values)


def clean_up(folder, compile):
    """Free the memory and remove the checkpoints of a trial."""
    for path in glob.glob(os.path.join(glob.escape(folder), "ckpt*")):
        os.unlink(path)
    torch.cuda.empty_cache()
    if compile != "false":
        torch.compiler.reset()  # the limit of recompilations is per process


# -----------------------------------------------------------------------------
# results

def report(studies, trial, config, out):
    """Print a trial's result; write trials_history.json, trials.svg and best_config.yaml."""
    if trial.state.name == "FAIL":
        return
    metric, best = config.early_stopping_metric, best_trial(studies[-1])
    parts = [trial.state.name.lower(), f"{trial.duration.total_seconds():.1f} s"]
    parts += [f"{metric} {trial.value:.4f}"] if trial.value is not None else []
    parts += [f"best {best.value:.4f}"] if best else []
    parts += [trial.user_attrs["error"]] if "error" in trial.user_attrs else []
    print(f"{studies[-1].study_name}, trial {trial.number}: {', '.join(parts)}", flush=True)
    history = [dict(stage=n, trial=t.number, state=t.state.name.lower(), value=t.value,
                    params=t.params, seconds=round(t.duration.total_seconds(), 1),
                    error=t.user_attrs.get("error"),
                    evaluations=sorted(t.intermediate_values.items()))
               for n, study in enumerate(studies, 1)
               for t in counted_trials(study) if t.state.is_finished()]
    bests = [best for study in studies if (best := best_trial(study))]
    with exclusive_lock(out):
        write_text(os.path.join(out, "trials_history.json"), json.dumps(history, indent=1))
        save_figure(os.path.join(out, "trials.svg"),
                    lambda axes: draw_trials(axes, history, config.early_stopping_mode),
                    "Hyperparameter search (lines: best so far)", "trial", metric)
        if bests:
            best = trial_config(config, bests[-1].params, out_dir=os.path.join(out, "best"))
            write_text(os.path.join(out, "best_config.yaml"), to_yaml(best))


def draw_trials(axes, history, mode):
    """Draw the completed trials of each stage with the best value so far, and pruned trials."""
    better = min if mode == "min" else max
    valued = [(n, t) for n, t in enumerate(history) if t["value"] is not None]
    pruned = [(n, t["value"]) for n, t in valued if t["state"] != "complete"]
    for stage in sorted({t["stage"] for n, t in valued if t["state"] == "complete"}):
        numbers, values = zip(*[(n, t["value"]) for n, t in valued
                                if t["stage"] == stage and t["state"] == "complete"])
        best = list(accumulate(values, better))
        line, = axes.plot(numbers, best, drawstyle="steps-post", label=f"stage {stage}")
        axes.plot(numbers, values, "o", color=line.get_color())
    if pruned:
        axes.plot(*zip(*pruned), "x", color=TEXT_COLOR, label="pruned")
    axes.xaxis.get_major_locator().set_params(integer=True)


def format_params(params):
    return ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
                     for k, v in params.items())


# -----------------------------------------------------------------------------
# command line

@dataclass
class SearchOptions:
    """Search for good hyperparameters with Optuna, in stages that narrow the space."""
    space: str = key("", "YAML file with the keys to search and the stages, e.g. "
                     "train/configs/hpo_example.yaml", required=True)
    trials: int | None = key(None, "a single stage of N trials at full length", ge=1)
    stages: str = key("", "stages as YAML, instead of the file's: '[{trials: 8, max_iters: 200}, "
                      "{trials: 4, max_iters: 1000, narrow: 0.3}]'")
    out: str = key("out/hpo", "folder of the search", aliases="out_dir")


def check_compatible(config, space, stages):
    """Raise ConfigError if `config` does not allow the search."""
    problems = []
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        problems.append("train.tools.hpo runs without torchrun: start it several times instead")
    if not config.eval_interval:
        problems.append("eval_interval: a search needs evaluations; set it above 0")
    if any(stage["max_iters"] for stage in stages):
        if "max_iters" in space:
            problems.append("max_iters is both searched and set by stages; keep one")
        problems += [f"{name}: stages shorten max_iters; give lengths in steps instead"
                     for name in OTHER_LENGTHS if getattr(config, name, None)]
    if problems:
        raise ConfigError(problems)


def run_search(options, config):
    """Run the search that the options describe and return the exit code."""
    if not hasattr(getattr(optuna, "storages", None), "RetryHeartbeatStaleTrialCallback"):
        raise UserError("needs optuna, 4.9 or newer: pip install -U optuna")
    if options.trials and options.stages:
        raise UserError("argument --stages: not allowed with argument --trials")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    stages = f"[{{trials: {options.trials}}}]" if options.trials else options.stages
    space, stages = read_space(options.space, stages, config)
    check_compatible(config, space, stages)
    os.makedirs(options.out, exist_ok=True)
    return run_reporting_errors(config, job=lambda c: search(c, space, stages, options.out))


def main(argv=None):
    """Run the command and return the exit code."""
    return run_command(SearchOptions, run_search, argv, load=load_argv)


if __name__ == "__main__":
    sys.exit(main())
