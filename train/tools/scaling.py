"""Fit a scaling law to the losses of small runs, and predict the loss of a larger run:

    python -m train.tools.scaling --config FILE.yaml --budgets 1e12,3e12,1e13 --depth 3,4,5

For each budget of FLOPs, models of several depths are trained until the budget is used, each with a
learning rate that decays to the end of the run. The law is
    L(N, D) = E + A / N^alpha + B / D^beta
(Hoffmann et al. 2022, arXiv:2203.15556, approach 3). D: tokens. N: FLOPs per token / 6, which is
the number of weights plus the cost of attention, so that a budget is 6 N D. Runs are processes with
a folder each; the same command resumes. The keys that a depth sets: depth_keys().
"""

import contextlib
import functools
import math
import shlex
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from train.base.cli import command, format_table
from train.base.errors import ConfigError, UserError, echo, require
from train.base.fields import key
from train.config import load_argv, load_config
from train.distributed import Ranks
from train.setup import open_data
from train.system import flops_per_step, load_model_type
from train.tools.child_runs import ChildRun, train_all

MIN_RUNS = 6        # for a fit of five parameters
MAX_DEPTH = 48      # of the larger run
MAX_EXCESS = 1.1    # times its budget of FLOPs, from rounding to whole steps
HUBER_DELTA = 1e-3  # larger errors of log L count linearly


# -----------------------------------------------------------------------------
# the law

class Law(NamedTuple):
    """A scaling law: the loss is E + A / N^alpha + B / D^beta (N, D: see the top of the file)."""
    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, n, d):
        return self.E + self.A / n ** self.alpha + self.B / d ** self.beta

    def best(self, budget):
        """Return (N, D) with the lowest loss for a number of FLOPs, 6 N D = budget."""
        ratio = self.alpha * self.A / (self.beta * self.B)
        exponent = 1 / (self.alpha + self.beta)
        n = ratio ** exponent * (budget / 6) ** (self.beta * exponent)
        return n, budget / 6 / n


def fit_law(n, d, loss):
    """Return the Law for arrays (P,) of N, D and loss, fitted by the Huber loss of log L."""
    from scipy.optimize import least_squares
    log_sizes = np.stack([0 * n, np.log(n), np.log(d)])  # (3, P)
    mean = log_sizes.mean(1, keepdims=True)

    # Parameters: log E, the logs of the other terms at the mean of the runs, alpha, beta. With
    # log A and log B instead, the parameters would be strongly correlated.
    def errors(p):  # (5,) -> (P,)
        powers = np.append(0, p[3:])[:, None]
        terms = p[:3, None] - powers * (log_sizes - mean)  # (3, P)
        return np.logaddexp.reduce(terms) - np.log(loss)
    start = [*np.log(loss.min() * np.array([0.5, 0.25, 0.25])), 0.4, 0.4]
    bounds = ([-20] * 3 + [0.01] * 2, [20] * 3 + [3] * 2)
    p = least_squares(errors, start, loss="huber", f_scale=HUBER_DELTA, bounds=bounds).x
    E, A, B = np.exp(p[:3] + np.append(0, p[3:]) * mean[:, 0])
    return Law(*map(float, (E, A, B, *p[3:])))


# -----------------------------------------------------------------------------
# the runs

class SmallRun(NamedTuple):
    """The plan of a run; budget: FLOPs, depth: layers, n: FLOPs per token / 6, d: tokens."""
    budget: float
    depth: int
    n: float
    d: int
    arguments: list


def depth_keys(depth, width, config):
    """Return {key: value} for a model of `depth` layers with depth + 1 heads of size `width`.

    learning_rate and min_lr of `config` are multiplied by sqrt(config.n_embd / n_embd).
    With width 32 and config.n_embd 128: depth 1 has n_embd 64 and rates x 1.41; depth 3 has 128 and
    x 1.00; depth 7 has 256 and x 0.71.
    """
    n_embd = width * (depth + 1)
    factor = math.sqrt(config.n_embd / n_embd)
    keys = dict(n_layer=depth, n_embd=n_embd, n_head=depth + 1, n_hidden=None,
                learning_rate=config.learning_rate * factor)
    if config.min_lr is not None:
        keys["min_lr"] = config.min_lr * factor
    return keys


def plan_run(arguments, config, width, data, budget, depth):
    """Return the SmallRun of a model of `depth` layers, trained with about `budget` FLOPs.

    arguments: for run_train.py, which describe `config`. width: size of each of the depth + 1
    heads. Raises UserError if the model does not define the number of FLOPs, ConfigError if the
    configuration does not permit this depth.
    """
    keys = depth_keys(depth, width, config)
    c = load_config(None, vars(config) | keys)
    with torch.device("meta"):
        model = load_model_type(c.model).build_model(c, data)
    flops = flops_per_step(model, c, data.train)
    if not flops:
        raise UserError(f"model {c.model} does not define flops_per_unit")
    units = c.samples_per_step * data.train.units_per_sample
    steps = max(1, round(budget / flops))
    saves = c.eval_interval if c.save_interval is None else c.save_interval
    keys |= dict(max_iters=steps, eval_interval=steps, save_interval=saves, eval_on_start=False,
                 max_epochs=None, eval_epochs=None, lr_decay_iters=None, early_stopping_patience=0,
                 sample_tokens=0)  # a single evaluation, after the last step
    settings = [f"--{k}={'null' if v is None else v}" for k, v in keys.items()]
    return SmallRun(budget, depth, flops / units / 6, steps * units, [*arguments, *settings])


def train_runs(runs, options):
    """Train SmallRuns, print a table, and return the validation losses (`None` after a crash)."""
    children = [ChildRun(f"{run.budget:g}_depth_{run.depth}", run.arguments, options.out)
                for run in runs]
    train_all(children, "val_loss", options.out, options.jobs)
    table = [("FLOPs", "depth", "weights", "tokens", "per weight", "loss")]
    for (budget, depth, n, d, _), child in zip(runs, children):
        loss = "crash" if child.value is None else f"{child.value:.4f}"
        table.append((f"{budget:g}", str(depth), f"{n:,.0f}", f"{d:,}", f"{d / n:.1f}", loss))
    echo(format_table(table))
    return [child.value for child in children]


# -----------------------------------------------------------------------------
# command line

@dataclass
class ScalingOptions:
    """Fit a scaling law to the losses of small runs, and predict the loss of a larger run."""
    budgets: list[float] = key([], "FLOPs per run, two or more: 1e12,3e12,1e13", gt=0, le=1e30,
                               required=True, metavar="X,...")
    larger: float | None = key(None, "FLOPs of the larger run (default: 4 x the largest budget)",
                               gt=0, le=1e30)
    depth: list[int] = key([], "depths of the models: 3,4,5", ge=1, required=True, metavar="N,...")
    width: int = key(32, "size of a head; a model has depth + 1 heads", ge=2)
    jobs: int = key(1, "runs at the same time, with a GPU or a share of the cores each", ge=1)
    out: str = key("out/scaling", "folder of the runs", aliases="out_dir", path=True)


def scaling(options, arguments):
    """Train a run per budget and depth, fit and print the law, and predict a larger run's loss.

    Return the exit code, 0. Raises UserError for fewer than two budgets, fewer than MIN_RUNS (6)
    runs with a loss, or if these determine no law.
    """
    config = load_argv(arguments)  # of run_train.py
    budgets = sorted(set(options.budgets))
    if len(budgets) < 2:
        raise UserError("needs two --budgets or more")
    require("scipy.optimize", "the fit")
    data = open_data(config, Ranks())
    plan = functools.partial(plan_run, arguments, config, options.width, data)
    runs = [plan(budget, depth) for budget in budgets for depth in sorted(set(options.depth))]
    losses = train_runs(runs, options) if len(runs) >= MIN_RUNS else []
    points = [(run.n, run.d, loss) for run, loss in zip(runs, losses) if loss is not None]
    if len(points) < MIN_RUNS:
        raise UserError(f"a fit needs {MIN_RUNS} runs that end with a loss: add --budgets, --depth")
    n, d, loss = np.array(points).T  # (P,) each
    law = fit_law(n, d, loss)
    larger_budget = options.larger or 4 * budgets[-1]
    print_law(law, n, d, loss, [*budgets, larger_budget])
    candidates = []
    for depth in range(1, MAX_DEPTH + 1):
        with contextlib.suppress(ConfigError):  # e.g. n_kv_head does not divide depth + 1 heads
            candidates.append(plan(larger_budget, depth))
    # One step of a deep model may cost far more than the budget.
    larger = min(candidates, key=lambda r: (6 * r.n * r.d > MAX_EXCESS * r.budget,
                                            law.loss(r.n, r.d)))
    echo(f"{larger.budget:g} FLOPs, depth {larger.depth}, {larger.n:,.0f} weights, {larger.d:,} "
         f"tokens: expected {law.loss(larger.n, larger.d):.4f}\n  "
         + shlex.join(["python", "run_train.py", *larger.arguments]))
    return 0


def print_law(law, n, d, loss, budgets):
    """Print a Law, the errors for the runs to which it was fitted, and the best size per budget.

    n, d, loss: arrays (P,), as for fit_law(). Raises UserError if the runs determine no law.
    """
    exponents = law.alpha, law.beta
    if min(exponents) < 0.02 or max(exponents) > 2.98:  # at a bound of the fit
        raise UserError("these runs determine no law: their losses hardly depend on weights or "
                        "tokens, or only at the smallest; choose larger --budgets")
    errors = np.abs(loss / law.loss(n, d) - 1)
    echo(f"loss = {law.E:.4g} + {law.A:.4g} / N^{law.alpha:.4f} + {law.B:.4g} / D^{law.beta:.4f}, "
         f"from {len(errors)} runs, {np.median(errors):.2%} off in the median, {errors.max():.2%} "
         "at most")
    for budget in budgets:
        best_n, best_d = law.best(budget)
        echo(f"{budget:g} FLOPs: best with {best_n:,.0f} weights and {best_d:,.0f} tokens, "
             f"{law.loss(best_n, best_d):.4f}")


main = command(ScalingOptions, scaling, load=list, interrupt_message="the same command resumes")
