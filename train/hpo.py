"""Search for good hyperparameters with Optuna: short trial runs, in stages that narrow the space.

    python -m train.hpo --config FILE.yaml --space train/hpo_example.yaml [--key value]...

Started again it goes on where it was; started several times at once it shares out the trials (one
worker a GPU: CUDA_VISIBLE_DEVICES=1 python -m train.hpo ...). It minimises val_loss, or follows
early_stopping_metric and early_stopping_mode. Hopeless trials are pruned at their evaluations.
"""

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import signal
import sys
import time
from dataclasses import asdict

from run_train import take_config
from train.config import ConfigError, differences, load_config
from train.chart import chart
from train.help import to_yaml
from train.hpo_space import contains, distribution, narrowed, read_space
from train.logger import write_text


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m train.hpo", description=__doc__.split("\n")[0],
                                     allow_abbrev=False, epilog="Other arguments as run_train.py.")
    parser.add_argument("--space", required=True, help="YAML file: what to search, see "
                        "train/hpo_example.yaml")
    parser.add_argument("--stages", help="stages in place of the file's, as YAML text: "
                        "'[{trials: 8, max_iters: 200}, {trials: 4, narrow: 0.3}]'")
    parser.add_argument("--n_trials", "--n-trials", type=int, help="trials without stages (20)")
    parser.add_argument("--out", default="out/hpo", help="folder of the search (%(default)s)")
    args, rest = parser.parse_known_args(argv)
    if importlib.util.find_spec("optuna") is None:
        print("train.hpo needs the package optuna: pip install optuna", file=sys.stderr)
        return 2
    try:
        if int(os.environ.get("WORLD_SIZE") or 1) > 1:
            raise ConfigError(["train.hpo runs without torchrun; start it several times instead"])
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
    if not config.eval_interval:
        problems.append("eval_interval: a search needs evaluations; set it above 0")
    if config.max_epochs and any(s.max_iters for s in stages):
        problems.append("max_epochs: stages with max_iters shorten max_iters; use that instead")
    if problems:
        raise ConfigError(problems)


def search(config, space, stages, out):
    """Run the stages over `space` (of hpo_space.read_space) in the folder `out`, shared with other
    workers. Returns the parameters of the best trial of the last stage."""
    import optuna

    from train.guard import Stopped
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    os.makedirs(out, exist_ok=True)
    worker = best = None
    try:
        for number, stage in enumerate(stages, 1):
            worker = Worker(config, space, number, stage, out, worker)
            while worker.step():
                pass
            best = worker.best()
            if best is None:
                raise ConfigError([f"{out}: no trial of stage {number} finished; the reasons are in "
                                   f"{out}/trials_history.json"])
    except KeyboardInterrupt:
        raise Stopped(signal.SIGINT) from None
    print(f"Best: trial {best.user_attrs['trial']}, {worker.metric} {best.value:.4f}, "
          f"{shown(best.params)}\nTo train with it: python run_train.py --config "
          f"{os.path.join(out, 'best_config.yaml')}")
    return best.params


class Worker:
    """One process's share of a stage. A stage is a study of its own in out/study.db, since numbers
    of runs of different lengths do not compare."""

    def __init__(self, config, space, number, stage, out, before):
        import optuna
        self.config, self.number, self.stage, self.out = config, number, stage, out
        self.before, self.metric = before, config.early_stopping_metric
        self.sign = 1 if config.early_stopping_mode == "min" else -1
        asked = dict(space=space, stage=asdict(stage) | dict(trials=0), config=asdict(config))
        with one_at_a_time(out):
            self.study = optuna.create_study(
                storage=optuna.storages.RDBStorage(f"sqlite:///{out}/study.db",
                                                   engine_kwargs=dict(connect_args=dict(timeout=100))),
                study_name=f"stage_{number}", load_if_exists=True,
                direction="minimize" if self.sign > 0 else "maximize",
                pruner=optuna.pruners.MedianPruner(4, (stage.max_iters or config.max_iters) // 4))
            if changed := changes(self.study.user_attrs.get("asked", asked), asked):
                raise ConfigError([f"{out} holds a search with another {', '.join(changed)}; undo "
                                   "that, or choose another --out"])
            if "space" not in self.study.user_attrs:
                self.begin(asked, space)
        self.dims = {k: distribution(d) for k, d in self.study.user_attrs["space"].items()}

    def begin(self, asked, space):
        """Fix the space of the stage; its first trial is the best so far, or what is configured."""
        params = {k: getattr(self.config, k) for k in space}
        start = {k: v for k, v in params.items() if contains(space[k], v)}
        if self.before:
            done, start = self.before.finished(), self.before.best().params
            space = {k: narrowed(d, start[k], self.stage.narrow,
                                 [(t.params[k], self.sign * t.value) for t in done])
                     for k, d in self.before.study.user_attrs["space"].items()}
        self.study.enqueue_trial(start)
        self.study.set_user_attr("asked", asked)
        self.study.set_user_attr("space", space)

    def finished(self):
        return [t for t in self.study.trials if t.state.name == "COMPLETE"]

    def best(self):
        return min(self.finished(), key=lambda t: self.sign * t.value, default=None)

    def step(self):
        """Run a trial, or wait for those of other workers. False when the stage is over."""
        import optuna

        from train.hpo_trial import run_trial
        with one_at_a_time(self.out):
            running = [t for t in self.study.trials if t.state.name == "RUNNING"]
            for trial in [t for t in running if not self.alive(t)]:
                self.study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
                running.remove(trial)
            ended = [t for t in self.study.trials if "seconds" in t.user_attrs]  # not those lost
            if len(ended) + len(running) < self.stage.trials:
                trial, folder, lock = self.ask()
            elif running:
                trial = None
            else:
                return False
        if trial is None:
            time.sleep(0.5)
            return True
        with lock:
            run_trial(self.study, trial, self.config, self.stage.max_iters, folder)
        with one_at_a_time(self.out):
            self.write_results()
        self.tell(self.study.trials[trial.number])
        return True

    def alive(self, trial):
        """Whether another process is at the trial: it holds the lock in its folder."""
        folder = os.path.join(self.out, f"trial_{trial.user_attrs.get('trial')}")
        if not os.path.isdir(folder):
            return False
        with open(os.path.join(folder, ".worker"), "a") as file:
            return not held(file)

    def ask(self):
        """A new trial, its folder, and the file whose lock says that this process is at it."""
        import optuna
        number = next(n for n in itertools.count() if not os.path.exists(f"{self.out}/trial_{n}"))
        # Draws depend on the number of the trial: workers and restarts do not repeat each other.
        self.study.sampler = optuna.samplers.TPESampler(
            seed=self.config.seed + number, n_startup_trials=min(10, max(4, self.stage.trials // 3)))
        trial = self.study.ask(self.dims)
        trial.set_user_attr("trial", number)
        folder = os.path.join(self.out, f"trial_{number}")
        os.makedirs(folder)
        lock = open(os.path.join(folder, ".worker"), "a")
        held(lock)
        return trial, folder, lock

    # -------------------------------------------------------------------------
    # results

    def tell(self, t):
        """A line on the console about a trial that ended."""
        best, end = self.best(), t.state.name.lower()
        value = f"{self.metric} {t.value:.4f}" if t.value is not None else "no value"
        print(f"stage {self.number}, trial {t.user_attrs['trial']}: {end}, {value}"
              + (f" (best {best.value:.4f})" if best else "") + f", {t.user_attrs['seconds']} s, "
              f"{shown(t.params)}" + (f"; {t.user_attrs['error']}" if t.user_attrs["error"] else ""),
              flush=True)

    def history(self):
        """Every trial of this and the earlier stages as plain dicts, in order."""
        earlier = self.before.history() if self.before else []
        return earlier + [
            dict(trial=t.user_attrs["trial"], stage=self.number, state=t.state.name.lower(),
                 value=t.value, params=t.params, seconds=t.user_attrs.get("seconds"),
                 error=t.user_attrs.get("error"),
                 evaluations=[[it, v] for it, v in sorted(t.intermediate_values.items())])
            for t in self.study.trials if "trial" in t.user_attrs]

    def write_results(self):
        """trials_history.json, trials.svg and best_config.yaml, as far as the search has come."""
        history = self.history()
        write_text(os.path.join(self.out, "trials_history.json"), json.dumps(history, indent=1))
        write_text(os.path.join(self.out, "trials.svg"), picture(history, self.metric, self.sign))
        best = self.best() or self.before and self.before.best()
        if best:
            values = asdict(self.config) | best.params
            values["out_dir"] = os.path.join(self.out, "best")
            write_text(os.path.join(self.out, "best_config.yaml"), to_yaml(load_config(None, values)))


def picture(history, metric, sign):
    """The trials as an SVG: finished ones by stage, pruned ones, and the best so far."""
    dots, lines = {}, []
    for stage in sorted({h["stage"] for h in history}):
        best = None
        line = []
        for h in (h for h in history if h["stage"] == stage and h["value"] is not None):
            pruned = h["state"] == "pruned"
            name, color = ("pruned", 1) if pruned else (f"stage {stage}", (0, 2, 3, 4, 5)[stage % 5 - 1])
            point = (h["trial"], h["value"], f"trial {h['trial']}: {h['value']:.4f}, {shown(h['params'])}")
            dots.setdefault((name, color), []).append(point)
            if not pruned:
                best = h["value"] if best is None else sign * min(sign * best, sign * h["value"])
                line.append((h["trial"], best))
        lines.append(("", (0, 2, 3, 4, 5)[stage % 5 - 1], "val", line))
    last = max((h["trial"] for h in history), default=0)
    ticks = [(i, str(i)) for i in range(0, last + 1, max(1, (last + 1) // 10))]
    return chart("Trials, and the best so far of each stage", "trial", metric, ticks, lines,
                 [(*key, points) for key, points in sorted(dots.items(), key=str)])


def changes(old, new):
    """What differs between two searches in a way that their trials cannot be compared."""
    keys = [k for k, *_ in differences(old["config"], new["config"])]
    keys += [k for k in ("max_iters", "max_epochs", "eval_iters") if old["config"][k] != new["config"][k]]
    return keys + [k for k in ("space", "stage") if old[k] != new[k]]


def shown(params):
    return ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in params.items())


if __name__ == "__main__":
    sys.exit(main())

