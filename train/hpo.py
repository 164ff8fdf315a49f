"""Search for good hyperparameters with Optuna: short trial runs, in stages that narrow the space.

    python -m train.hpo --config FILE.yaml --space train/hpo_example.yaml [--key value]...

Started again it goes on where it was; started several times at once it shares out the trials (one
worker a GPU: CUDA_VISIBLE_DEVICES=1 python -m train.hpo ...). It minimises val_loss, or follows
early_stopping_metric and early_stopping_mode. Hopeless trials are pruned at their evaluations.
"""

import argparse
import importlib.util
import json
import os
import signal
import sys

from run_train import take_config
from train.chart import chart
from train.config import ConfigError, load_config
from train.help import to_yaml
from train.hpo_space import read_space, with_params
from train.logger import write_text

COLORS = (0, 2, 3, 4, 5)  # of the stages in the picture; 1 is for pruned trials


def main(argv=None):
    """Run the command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m train.hpo", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All other arguments are those of run_train.py.")
    parser.add_argument("--space", required=True, help="YAML file: what to search and in which "
                        "stages; train/hpo_example.yaml is one")
    parser.add_argument("--stages", help="stages in place of the file's, as YAML: '[{trials: 8, "
                        "max_iters: 200}, {trials: 4, max_iters: 1000, narrow: 0.3}]'")
    parser.add_argument("--n_trials", "--n-trials", help="a single stage of this many trials")
    parser.add_argument("--out", default="out/hpo", help="folder of the search (%(default)s)")
    args, rest = parser.parse_known_args(argv)
    if importlib.util.find_spec("optuna") is None:
        print("train.hpo needs the package optuna: pip install optuna", file=sys.stderr)
        return 2
    try:
        config = load_config(*take_config(rest))
        space, stages = read_space(args.space, args.stages, args.n_trials)
        check(config, stages)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    from train.report import run_reporting_errors
    return run_reporting_errors(config, job=lambda c: search(c, space, stages, args.out))


def check(config, stages):
    problems = []
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        problems.append("train.hpo runs without torchrun: start it several times instead")
    if not config.eval_interval:
        problems.append("eval_interval: a search needs evaluations; set it above 0")
    if config.max_epochs and any(s.max_iters for s in stages):
        problems.append("max_epochs: stages shorten max_iters; give that instead")
    if problems:
        raise ConfigError(problems)


def search(config, space, stages, out):
    """Run `stages` over `space` (of hpo_space.read_space) in the folder `out`, which other workers
    may share. Returns the parameters of the best trial of the last stage."""
    from train.distributed import SetupError
    from train.guard import Stopped
    from train.hpo_worker import Worker
    try:
        os.makedirs(out, exist_ok=True)
    except OSError as error:
        raise SetupError(f"--out: {error}") from error
    workers = []
    try:
        for number, stage in enumerate(stages, 1):
            workers.append(Worker(config, space, number, stage, out, *workers[-1:]))
            for trial in workers[-1].trials():
                print(line(trial, workers[-1]), flush=True)
                with workers[-1].alone():
                    write_results(workers, config, out)
            if workers[-1].best() is None:
                raise ConfigError([f"{out}: no trial of stage {number} finished; "
                                   "trials_history.json there tells why"])
    except KeyboardInterrupt:
        raise Stopped(signal.SIGINT) from None
    best = workers[-1].best()
    print(f"Best: trial {best.user_attrs['trial']}, {workers[-1].metric} {best.value:.4f}, "
          f"{shown(best.params)}\nTo train with it: python run_train.py --config "
          f"{os.path.join(out, 'best_config.yaml')}")
    return best.params


def line(trial, worker):
    """What the console says of a trial that ended."""
    attrs, best = trial.user_attrs, worker.best()
    parts = [trial.state.name.lower()]
    parts += [f"{worker.metric} {trial.value:.4f}"] if trial.value is not None else []
    parts += [f"best {best.value:.4f}"] if best else []
    parts += [shown(trial.params), f"{attrs['seconds']} s"]
    parts += [attrs["error"]] if attrs["error"] else []
    return f"stage {worker.number}, trial {attrs['trial']}: " + ", ".join(parts)


def shown(params):
    return ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
                     for k, v in params.items())


def write_results(workers, config, out):
    """trials_history.json, trials.svg and best_config.yaml, as far as the search has come."""
    trials = [dict(trial=t.user_attrs["trial"], stage=w.number, state=t.state.name.lower(),
                   value=t.value, params=t.params, seconds=t.user_attrs.get("seconds"),
                   error=t.user_attrs.get("error"),
                   evaluations=sorted(t.intermediate_values.items()))
              for w in workers for t in w.study.trials if "trial" in t.user_attrs]
    trials.sort(key=lambda t: t["trial"])
    write_text(os.path.join(out, "trials_history.json"), json.dumps(trials, indent=1))
    write_text(os.path.join(out, "trials.svg"), picture(trials, config))
    best = next((b for w in workers[::-1] if (b := w.best())), None)
    if best:
        values = with_params(config, best.params) | dict(out_dir=os.path.join(out, "best"))
        write_text(os.path.join(out, "best_config.yaml"), to_yaml(load_config(None, values)))


def picture(trials, config):
    """The trials as an SVG: finished ones by stage with the best so far, and pruned ones."""
    lines, dots = [], []
    better = min if config.early_stopping_mode == "min" else max

    def points(state, stage=None):
        return [(t["trial"], t["value"], f"trial {t['trial']}: {t['value']:.4f}, "
                 + shown(t["params"])) for t in trials if t["state"] == state
                and t["value"] is not None and stage in (None, t["stage"])]
    for stage in sorted({t["stage"] for t in trials}):
        done, color = points("complete", stage), COLORS[(stage - 1) % len(COLORS)]
        best = [(p[0], better(q[1] for q in done[:i])) for i, p in enumerate(done, 1)]
        lines.append(("", color, "val", best))
        dots.append((f"stage {stage}", color, done))
    dots.append(("pruned", 1, points("pruned")))
    count = max(t["trial"] for t in trials) + 1
    ticks = [(i, str(i)) for i in range(0, count, max(1, count // 10))]
    return chart("Hyperparameter search", "trial (line: the best so far of a stage)",
                 config.early_stopping_metric, ticks, lines, dots)


if __name__ == "__main__":
    sys.exit(main())
