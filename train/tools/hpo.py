"""Search for good hyperparameters with Optuna: short trial runs, in stages that narrow the space.

    python -m train.tools.hpo --config FILE.yaml --space train/configs/hpo_example.yaml [--key value]...

Started again it goes on where it was; started several times at once it shares out the trials (one
worker a GPU: CUDA_VISIBLE_DEVICES=1 python -m train.tools.hpo ...). It minimises val_loss, or follows
early_stopping_metric and early_stopping_mode. Hopeless trials are pruned at their evaluations.
"""

import argparse
import contextlib
import glob
import json
import math
import os
import sys
import time
import warnings
from dataclasses import asdict, fields

import torch
import yaml

try:
    import optuna
except ImportError:  # said before any work
    optuna = None

from train.base.cli import run_command
from train.base.errors import BadNumbers, ConfigError, UserError
from train.base.fields import PlainLoader, parse_value
from train.base.files import exclusive_lock, write_text
from train.config import find_differences, load_argv, load_config, read_yaml, resolve, to_yaml
from train.options.loss_svg import TEXT_COLOR
from train.robust import run_reporting_errors
from train.tools.plot import save_figure
from train.train import train

OURS = ("out_dir", "resume", "eval_only", "allow_change")  # keys that belong to the search
PARTS = {"low", "high", "log", "step"}  # of a range
SCALED = ("warmup_iters", "lr_decay_iters", "step_iters")  # shrink with max_iters
EPOCHS = ("max_epochs", "eval_epochs", "warmup_epochs")    # do not
HEARTBEAT, GRACE = 5, 60  # seconds: the trial of a worker that is silent for so long is done again


# -----------------------------------------------------------------------------
# what to search

def read_space(path, stages, config):
    """({key: Optuna distribution}, [stage]) of a YAML file; `stages`, YAML text, replaces its own.
    A stage is dict(trials, max_iters, narrow). Raises ConfigError with all problems."""
    problems, space = [], {}
    known = {f.name: f for f in fields(config)}
    raw = resolve(read_yaml(path, problems), known, problems)
    listed, where = raw.pop("stages", ([{"trials": "20"}], path))
    if not raw and not problems:
        problems.append(f"{path}: nothing to search; expected lines such as "
                        "learning_rate: {low: 1e-4, high: 1e-2, log: true}")
    for name, (value, at) in raw.items():
        try:
            space[name] = read_dimension(name, value, known)
        except ValueError as error:
            problems.append(f"{at}: {name}: {error}")
    try:
        if stages:
            listed, where = stages, "--stages"
            listed = yaml.load(stages, PlainLoader)
        stages = [read_stage(**stage) for stage in listed or [{}]]
    except (ValueError, TypeError, yaml.YAMLError):
        problems.append(f"{where}: stages: got {listed}; expected a list such as [{{trials: 12, "
                        "max_iters: 200}, {trials: 6, max_iters: 1000, narrow: 0.3}]; narrow is "
                        "the share of each range that is left around the best so far")
    if problems:
        raise ConfigError(problems)
    return space, stages


def read_stage(trials, max_iters=0, narrow=0.5):
    stage = dict(trials=int(trials), max_iters=int(max_iters), narrow=float(narrow))
    if stage["trials"] < 1 or stage["max_iters"] < 0 or not 0 < stage["narrow"] <= 1:
        raise ValueError
    return stage


def read_dimension(name, raw, known):
    """One entry of the space as an Optuna distribution; ValueError says what was expected. Choices
    that are lists or mappings become JSON text, which Optuna can store and load_config accepts."""
    kinds = optuna.distributions
    if name not in known or name in OURS:
        raise ValueError("not a key that can be searched; `python run_train.py --help` lists them")
    if isinstance(raw, list):
        values = [parse_value(known[name], v) for v in raw]
        return kinds.CategoricalDistribution([json.dumps(v) if isinstance(v, (list, dict)) else v
                                              for v in values])
    if not isinstance(raw, dict) or not {"low", "high"} <= set(raw) <= PARTS:
        raise ValueError("expected {low, high, log: true}, {low, high, step} or a list of choices; "
                         f"got {raw}")
    low, high = (parse_value(known[name], raw[k]) for k in ("low", "high"))
    kind = {int: kinds.IntDistribution, float: kinds.FloatDistribution}.get(type(low))
    if kind is None or type(high) is not type(low):
        raise ValueError(f"has no range; list what to try: {name}: [a, b]")
    step = dict(step=type(low)(raw["step"])) if "step" in raw else {}
    return kind(low, high, log=str(raw.get("log")).lower() == "true", **step)


def narrowed(dist, best, share):
    """`dist` around the `best` value: that one of choices, `share` of a range, inside it."""
    if hasattr(dist, "choices"):
        return type(dist)([best] if share < 1 else dist.choices)
    f, back = (math.log, math.exp) if dist.log else (float, float)
    first, last = f(dist.low), f(dist.high)
    half = share * (last - first) / 2
    ends = [back(min(max(f(best) + d, first), last)) for d in (-half, half)]
    if dist.step:
        ends = [dist.low + round((e - dist.low) / dist.step) * dist.step for e in ends]
        if isinstance(dist.step, float):  # 3 x 0.05 is a little more than 0.15
            ends = [float(f"{e:.12g}") for e in ends]
    return type(dist)(min(ends[0], best), max(ends[1], best), dist.log, dist.step)


def configured(config, params, max_iters=0, **changes):
    """`config` with the values of a trial and `changes`; one with `max_iters` is the run in small.
    min_lr stays the same share of the peak unless it is searched itself."""
    values = asdict(config) | params | changes
    if config.min_lr is not None and "min_lr" not in params:
        values["min_lr"] *= values["learning_rate"] / config.learning_rate
    if max_iters:
        share = max_iters / config.max_iters
        values |= {k: max(1, round(values[k] * share)) for k in SCALED if values[k]}
        often = max(1, max_iters // 8)  # evaluations are what pruning goes by
        values |= dict(max_iters=max_iters, eval_interval=min(config.eval_interval, often))
    out = load_config(None, values)
    out.explicit = {*config.explicit, *params}
    return out


# -----------------------------------------------------------------------------
# the search

def search(config, space, stages, out):
    """Run `stages` over `space` in the folder `out`, which other workers may share."""
    studies = []
    for number, stage in enumerate(stages, 1):
        with exclusive_lock(out):  # without POSIX locks: run one worker only
            studies.append(open_study(config, space, number, stage, out, studies))
        run_stage(studies, config, stage, out)
        if not (best := best_of(studies[-1])):
            raise ConfigError([f"{out}: no trial of stage {number} finished; trials_history.json "
                               "there tells why"])
    print(f"Best: {studies[-1].study_name}, trial {best.number}, {config.early_stopping_metric} "
          f"{best.value:.4f}, {shown(best.params)}\nTo train with it: python run_train.py --config "
          f"{os.path.join(out, 'best_config.yaml')}")


def open_study(config, space, number, stage, out, before):
    """The study of a stage, in out/study.db: one for each, since values of runs of different
    lengths do not compare. Its space is settled when it is made; its first trial is the best of
    the stage before, or what the configuration has."""
    storage = optuna.storages.RDBStorage(
        f"sqlite:///{out}/study.db", engine_kwargs=dict(connect_args=dict(timeout=100)),
        heartbeat_interval=HEARTBEAT, grace_period=GRACE,
        heartbeat_stale_trial_callback=optuna.storages.RetryHeartbeatStaleTrialCallback())
    study = optuna.create_study(
        storage=storage, study_name=f"stage_{number}", load_if_exists=True,
        direction={"min": "minimize", "max": "maximize"}[config.early_stopping_mode],
        pruner=optuna.pruners.MedianPruner(4, (stage["max_iters"] or config.max_iters) // 4))
    asked = dict(asdict(config), space=str(space), stage=[stage["max_iters"], stage["narrow"]])
    if not study.trials:
        start = {k: v for k, d in space.items()  # a number may also be outside of its range
                 if (v := getattr(config, k)) is not None and v in getattr(d, "choices", [v])}
        if before:
            start = best_of(before[-1]).params
            space = {k: narrowed(d, start[k], stage["narrow"])
                     for k, d in space_of(before[-1]).items()}
        study.set_user_attr("asked", asked)
        to_json = optuna.distributions.distribution_to_json
        study.set_user_attr("space", {k: to_json(d) for k, d in space.items()})
        study.enqueue_trial(start)
    old = study.user_attrs["asked"]
    changed = [k for k, *_ in find_differences(old, asked, {f.name: f for f in fields(config)})]
    changed += [k for k in ("max_iters", "max_epochs", "space", "stage") if old[k] != asked[k]]
    if changed:
        raise ConfigError([f"{out} holds a search with another {', '.join(changed)}; undo the "
                           "change, or choose another --out"])
    return study


def space_of(study):
    from_json = optuna.distributions.json_to_distribution
    return {k: from_json(d) for k, d in study.user_attrs["space"].items()}


def planned(study):
    """The trials that count: all but those that were lost or interrupted, which are done again."""
    return [t for t in study.get_trials(deepcopy=False) if t.state.name != "FAIL"]


def best_of(study):
    """The best finished trial of a study, if there is one."""
    return study.best_trial if any(t.state.name == "COMPLETE" for t in study.trials) else None


def run_stage(studies, config, stage, out):
    """Run trials until the stage is over, also for other workers."""
    study, waited = studies[-1], False
    while True:
        states = [t.state.name for t in planned(study)]
        if len(states) < stage["trials"] or "WAITING" in states:
            study.optimize(lambda trial: run_trial(trial, config, stage, out), n_trials=1,
                           callbacks=[lambda _, trial: tell(studies, trial, config, out)],
                           gc_after_trial=True)
        elif "RUNNING" in states:
            if not waited:
                print("Waiting for the trials of other workers (one that died is given up after "
                      f"{GRACE} s)", flush=True)
            waited = True
            time.sleep(1)
            optuna.storages.fail_stale_trials(study)  # queues them again
        else:
            return


def run_trial(trial, config, stage, out):
    """Train with a trial's values; the best value of the metric. A trial that breaks is as good as
    pruned: the sampler keeps away, the search goes on. Raises what would break every trial, and
    what asks to stop."""
    study = trial.study
    if [t.number for t in planned(study)].index(trial.number) >= stage["trials"]:
        return math.nan  # no trial: several workers asked for the last one at once
    # Draws depend on the trial's number: workers and restarts do not repeat each other's.
    study.sampler = optuna.samplers.TPESampler(
        seed=config.seed + trial.number, n_startup_trials=max(4, min(10, stage["trials"] // 3)))
    params = {k: suggest(trial, k, d) for k, d in space_of(study).items()}
    print(f"{study.study_name}, trial {trial.number}: {shown(params)}", flush=True)
    folder = os.path.join(out, f"{study.study_name}_trial_{trial.number}")
    try:
        return best_value(trial, configured(
            config, params, stage["max_iters"], out_dir=folder, resume="never", run_name=None,
            sample_tokens=0, save_interval=0, save_epochs=None, keep_last=0))
    except optuna.TrialPruned:
        raise
    except (Exception, KeyboardInterrupt) as error:
        ends = isinstance(error, (UserError, KeyboardInterrupt))
        if ends and not isinstance(error, (BadNumbers, ConfigError)):
            study.enqueue_trial(params)  # it is not the fault of these values
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        trial.set_user_attr("error", reason[:200])
        raise optuna.TrialPruned from error
    finally:
        clean_up(folder, config.compile)


def suggest(trial, name, dist):
    if hasattr(dist, "choices"):
        return trial.suggest_categorical(name, dist.choices)
    kind = trial.suggest_int if isinstance(dist.low, int) else trial.suggest_float
    return kind(name, dist.low, dist.high, step=dist.step, log=dist.log)


def best_value(trial, config):
    """Train (what the run says is in the train.log of its folder); the best value of the metric.
    TrialPruned when it is not worth going on."""
    values, metric = [], config.early_stopping_metric

    def on_evaluation(it, numbers):
        value = numbers[metric]
        if value is None or not math.isfinite(value):
            raise BadNumbers(f"iter {it}: {metric} is {value}")
        if it > 0:  # before the first step all trials are alike
            values.append(value)
            trial.report(value, it)
            if it < config.max_iters and trial.should_prune():
                raise optuna.TrialPruned
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        train(config, on_evaluation=on_evaluation)
    return (min if config.early_stopping_mode == "min" else max)(values)


def clean_up(folder, compile):
    """Free the memory of a trial, and the disk: the best configuration is trained again in full."""
    for path in glob.glob(os.path.join(glob.escape(folder), "ckpt*")):
        os.unlink(path)
    torch.cuda.empty_cache()
    if compile != "false":
        torch.compiler.reset()  # or the models of all trials share one limit of recompilations


# -----------------------------------------------------------------------------
# what came of it

def tell(studies, trial, config, out):
    """Say how a trial ended; write trials_history.json, trials.svg and best_config.yaml."""
    error, bests = trial.user_attrs.get("error"), [b for s in studies if (b := best_of(s))]
    if trial.state.name == "FAIL":
        return
    metric, best = config.early_stopping_metric, best_of(studies[-1])
    parts = [trial.state.name.lower(), f"{trial.duration.total_seconds():.1f} s"]
    parts += [f"{metric} {trial.value:.4f}"] if trial.value is not None else []
    parts += [f"best {best.value:.4f}"] if best else []
    parts += [error] if error else []
    print(f"{studies[-1].study_name}, trial {trial.number}: {', '.join(parts)}", flush=True)
    history = [dict(stage=n, trial=t.number, state=t.state.name.lower(), value=t.value,
                    params=t.params, seconds=round(t.duration.total_seconds(), 1),
                    error=t.user_attrs.get("error"),
                    evaluations=sorted(t.intermediate_values.items()))
               for n, s in enumerate(studies, 1) for t in planned(s) if t.state.is_finished()]
    with exclusive_lock(out):
        write_text(os.path.join(out, "trials_history.json"), json.dumps(history, indent=1))
        save_figure(os.path.join(out, "trials.svg"),
                    lambda axes: draw_trials(axes, history, config.early_stopping_mode),
                    "Hyperparameter search (lines: best so far)", "trial", config.early_stopping_metric)
        if bests:
            best = configured(config, bests[-1].params, out_dir=os.path.join(out, "best"))
            write_text(os.path.join(out, "best_config.yaml"), to_yaml(best))


def draw_trials(axes, history, mode):
    """Draw the value of each trial, per stage with the best so far, and pruned trials."""
    better = min if mode == "min" else max
    numbered = [(i, t) for i, t in enumerate(history) if t["value"] is not None]
    pruned = [(i, t["value"]) for i, t in numbered if t["state"] != "complete"]
    for stage in sorted({t["stage"] for t in history}):
        done = [(i, t["value"]) for i, t in numbered
                if t["state"] == "complete" and t["stage"] == stage]
        if done:
            best = [better(y for _, y in done[:n]) for n in range(1, len(done) + 1)]
            line, = axes.plot([x for x, _ in done], best, label=f"stage {stage}")
            axes.plot(*zip(*done), "o", color=line.get_color())
    if pruned:
        axes.plot(*zip(*pruned), "x", color=TEXT_COLOR, label="pruned")


def shown(params):
    return ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
                     for k, v in params.items())


# -----------------------------------------------------------------------------
# command line

def check(config, space, stages):
    problems, short = [], any(s["max_iters"] for s in stages)
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        problems.append("train.tools.hpo runs without torchrun: start it several times instead")
    if not config.eval_interval:
        problems.append("eval_interval: a search needs evaluations; set it above 0")
    if short and "max_iters" in space:
        problems.append("max_iters is both searched and set by stages; keep one")
    problems += [f"{k}: stages shorten max_iters; give lengths in steps instead"
                 for k in ("max_minutes", *EPOCHS) if short and getattr(config, k, None)]
    if problems:
        raise ConfigError(problems)


def main(argv=None):
    """Run the command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m train.tools.hpo", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All other arguments are those of run_train.py.")
    parser.add_argument("--space", required=True, help="YAML file: what to search and in which "
                        "stages; train/configs/hpo_example.yaml is one")
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument("--trials", type=int, metavar="N", help="N trials at full length "
                         "in place of the file's stages")
    lengths.add_argument("--stages", help="stages in place of the file's, as YAML: '[{trials: 8, "
                         "max_iters: 200}, {trials: 4, max_iters: 1000, narrow: 0.3}]'")
    parser.add_argument("--out", "--out_dir", default="out/hpo", help="folder of the search "
                        "(%(default)s)")
    return run_command(parser, search_as_asked, argv, load=load_argv)


def search_as_asked(args, config):
    """What the command line asks for; the exit code."""
    if not hasattr(getattr(optuna, "storages", None), "RetryHeartbeatStaleTrialCallback"):
        raise UserError("needs optuna, 4.9 or newer: pip install -U optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    stages = args.stages if args.trials is None else f"[{{trials: {args.trials}}}]"
    space, stages = read_space(args.space, stages, config)
    check(config, space, stages)
    os.makedirs(args.out, exist_ok=True)
    return run_reporting_errors(config, job=lambda c: search(c, space, stages, args.out))


if __name__ == "__main__":
    sys.exit(main())
