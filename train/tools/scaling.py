"""Fit a scaling law to the losses of small runs, and predict the loss of a larger run:

    python -m train.tools.scaling --config FILE.yaml --budgets 1e12,3e12,1e13 [--check]

For each budget of FLOPs, models of several depths are trained until the budget is used, each with a
learning rate that decays to the end of the run. The law is
    L(N, D) = E + A / N^alpha + B / D^beta
(Hoffmann et al. 2022, arXiv:2203.15556, approach 3). D: tokens. N: FLOPs per token / 6, which is
the number of weights plus the cost of attention, so that a budget is 6 N D. Runs are processes with
a folder each, as in train.tools.repeat; the same command resumes. The keys that a depth sets:
depth_keys().
"""

import functools
import math
import os
import shlex
import sys
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from train.base.cli import format_table, run_command
from train.base.errors import UserError, echo, require
from train.base.fields import key
from train.config import load_argv
from train.options.loss_svg import TEXT_COLOR
from train.system import flops_per_step, load_model_type
from train.tools.plot import save_figure
from train.tools.repeat import RunPool

TOKENS_PER_WEIGHT = 10  # depths are chosen for a ratio near this one,
MAX_RATIO_FACTOR = 16   # at most this factor above or below,
DEPTHS_PER_BUDGET = 4   # this many for each budget,
DEPTHS = range(2, 49)   # of these: in a single block, attention sees embeddings only
MIN_RUNS = 6            # for a fit of five parameters
HUBER_DELTA = 1e-3      # larger errors of log L count linearly
BOOTSTRAP_FITS = 200


# -----------------------------------------------------------------------------
# the law

class Law(NamedTuple):
    """L(N, D) = E + A / N^alpha + B / D^beta."""
    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, n, d):
        return self.E + self.A / n ** self.alpha + self.B / d ** self.beta

    def best(self, budget):
        """Return the (N, D) of the lowest loss with 6 N D = budget."""
        ratio = self.alpha * self.A / (self.beta * self.B)
        exponent = 1 / (self.alpha + self.beta)
        n = ratio ** exponent * (budget / 6) ** (self.beta * exponent)
        return n, budget / 6 / n


def fit_law(n, d, loss, start=None):
    """Fit a Law to runs n, d, loss (P,): minimise the Huber loss of the errors of log L by L-BFGS,
    from several starting points, or from the Law `start`."""
    from scipy.optimize import minimize
    log_n, log_d, log_loss = np.log(n), np.log(d), np.log(loss)
    # Parameters: log E, the logs of the other terms at the mean of the runs, alpha, beta. With
    # log A and log B instead, the parameters would be strongly correlated.
    mean = np.array([log_n.mean(), log_d.mean()])
    slopes = np.stack([0 * log_n, mean[0] - log_n, mean[1] - log_d])  # (3, P)

    def objective(p):  # (5,) -> value, gradient (5,)
        terms = p[:3, None] + np.append(0, p[3:])[:, None] * slopes  # (3, P)
        log_sum = np.logaddexp.reduce(terms)  # (P,)
        error = (log_sum - log_loss) / HUBER_DELTA
        clipped = np.clip(error, -1, 1)
        pull = clipped / HUBER_DELTA * np.exp(terms - log_sum)  # (3, P)
        gradient = np.append(pull.sum(1), (pull * slopes)[1:].sum(1))
        return (clipped * (error - clipped / 2)).sum(), gradient
    if start:
        logs, powers = np.log(start[:3]), np.array(start[3:])
        starts = [np.append(logs - np.append(0, powers * mean), powers)]
    else:
        low = loss.min()
        starts = [np.append(np.log([e * low, (1 - e) * low / 2, (1 - e) * low / 2]), [a, b])
                  for e in (0.3, 0.7) for a in (0.3, 0.7) for b in (0.3, 0.7)]
    bounds = [(-20, 20)] * 3 + [(0.01, 3)] * 2
    fits = [minimize(objective, p, jac=True, method="L-BFGS-B", bounds=bounds,
                     options=dict(maxiter=2000)) for p in starts]
    p = min(fits, key=lambda result: result.fun).x
    E, A, B = np.exp(p[:3] + np.append(0, p[3:] * mean))
    return Law(*map(float, (E, A, B, *p[3:])))


def prediction_interval(law, n, d, loss, at):
    """Return (low, high): the 95% interval of the loss of a run at = (N, D), by residual bootstrap.

    Repeats the fit with errors that are sampled from the residuals of the runs n, d, loss (P,),
    scaled up for the five fitted parameters, and adds such an error to the prediction."""
    rng, fitted = np.random.default_rng(0), law.loss(n, d)
    errors = np.log(loss / fitted) * math.sqrt(len(n) / (len(n) - 5))

    def draw_prediction():
        drawn = fit_law(n, d, fitted * np.exp(rng.choice(errors, len(n))), law)
        return drawn.loss(*at) * np.exp(rng.choice(errors))
    predictions = [draw_prediction() for _ in range(BOOTSTRAP_FITS)]
    return tuple(map(float, np.quantile(predictions, (0.025, 0.975))))


# -----------------------------------------------------------------------------
# the runs

class PlannedRun(NamedTuple):
    """A run of a model of `depth` for a budget of FLOPs."""
    budget: float
    depth: int
    n: float         # FLOPs per token / 6
    d: int           # tokens
    epochs: float
    arguments: list  # of run_train.py


def depth_keys(depth, width, config):
    """Return {key: value} of a model of `depth`: depth + 1 heads of size `width`, and the rates of
    `config` scaled by the square root of its n_embd over the model's.

    depth, n_embd, rates x with width 32 and config.n_embd 128: 1, 64, 1.41; 3, 128, 1.00;
    7, 256, 0.71; 15, 512, 0.50."""
    n_embd = width * (depth + 1)
    rates = {name: rate * math.sqrt(config.n_embd / n_embd) for name in ("learning_rate", "min_lr")
             if (rate := getattr(config, name)) is not None}
    return dict(n_layer=depth, n_embd=n_embd, n_head=depth + 1, n_hidden=None, **rates)


def make_planner(arguments, config, width, data):
    """Return plan(budget, depth) -> PlannedRun. arguments: of run_train.py."""
    import torch

    def to_arguments(keys):
        return [f"--{k}={'null' if v is None else v}" for k, v in keys.items()]

    @functools.cache
    def count_flops(depth):
        c = load_argv([*arguments, *to_arguments(depth_keys(depth, width, config))])
        with torch.device("meta"):
            model = load_model_type(c.model).build_model(c, data)
        if flops := flops_per_step(model, c, data.train):
            return flops
        raise UserError(f"model {c.model} does not define flops_per_unit")

    def plan(budget, depth):
        units = config.samples_per_step * data.train.units_per_sample
        steps = max(1, round(budget / count_flops(depth)))
        keys = depth_keys(depth, width, config) | dict(
            max_iters=steps, eval_interval=steps, save_interval=config.save_every,
            eval_on_start=False, max_epochs=None, eval_epochs=None, lr_decay_iters=None,
            early_stopping_patience=0, sample_tokens=0)  # a single evaluation, after the last step
        return PlannedRun(budget, depth, count_flops(depth) / units / 6, steps * units,
                          steps * config.samples_per_step / data.train.samples, to_arguments(keys))
    return plan


def choose_depths(plans):
    """Return the DEPTHS_PER_BUDGET runs of a budget that are nearest to TOKENS_PER_WEIGHT."""
    def distance(p):
        return abs(math.log(p.d / p.n / TOKENS_PER_WEIGHT))
    near = sorted((p for p in plans if distance(p) < math.log(MAX_RATIO_FACTOR)), key=distance)
    return sorted(near[:DEPTHS_PER_BUDGET], key=lambda p: p.depth)


def train_all(pool, plans, seed):
    """Train the planned runs; return the losses, None for a crash."""
    runs = [(f"{p.budget:g}_depth_{p.depth}", p.arguments, seed) for p in plans]
    return [result["value"] for result in pool.run_all(runs)]


# -----------------------------------------------------------------------------
# results

def run_table(plans, losses, law):
    """Return a table of all runs; a loss of None is a crash."""
    rows = [("FLOPs", "depth", "weights", "tokens", "per weight", "epochs", "loss", "law")]
    for p, loss in zip(plans, losses):
        rows.append((f"{p.budget:g}", str(p.depth), f"{p.n:,.0f}", f"{p.d:,}", f"{p.d / p.n:.1f}",
                     f"{p.epochs:.2f}", f"{loss:.4f}" if loss else "crash",
                     f"{law.loss(p.n, p.d):.4f}" if law else ""))
    return format_table(rows)


def draw_law(axes, law, plans, losses, larger, interval):
    """Draw the loss over the number of weights: per budget a curve of the law and a dot per run,
    and the interval that is predicted for the larger run."""
    axes.set_xscale("log")
    for budget in sorted({p.budget for p in [*plans, larger]}):
        sizes = [p.n for p in [*plans, larger] if p.budget == budget]
        n = np.geomspace(min(sizes) / 2, max(sizes) * 2, 60)
        line, = axes.plot(n, law.loss(n, budget / 6 / n), label=f"{budget:g} FLOPs")
        runs = [(p.n, loss) for p, loss in zip(plans, losses) if p.budget == budget and loss]
        if runs:
            axes.plot(*zip(*runs), "o", color=line.get_color())
    axes.plot([larger.n] * 2, interval, color=TEXT_COLOR, marker="_",
              label="95% interval of the larger run")


def predict(law, runs, larger, arguments):
    """Print the law's prediction for the run `larger` and its command; return the 95% interval."""
    low, high = prediction_interval(law, *runs, (larger.n, larger.d))
    echo(f"{larger.budget:g} FLOPs, depth {larger.depth}, {larger.n:,.0f} weights, {larger.d:,} "
         f"tokens ({larger.epochs:.2f} epochs): expected {law.loss(larger.n, larger.d):.4f}, 95% "
         f"from {low:.4f} to {high:.4f}")
    echo("  " + shlex.join(["python", "run_train.py", *arguments, *larger.arguments]))
    return low, high


# -----------------------------------------------------------------------------
# command line

@dataclass
class ScalingOptions:
    """Fit a scaling law to the losses of small runs, and predict the loss of a larger run."""
    budgets: list[float] = key([], "FLOPs per run, two or more: 1e12,3e12,1e13", gt=0,
                               metavar="X,...")
    larger: float | None = key(None, "FLOPs of the larger run (default: four times the largest "
                               "budget)")
    depth: list[int] = key([], f"depths of the models: 1,2,3 (default: up to {DEPTHS_PER_BUDGET} "
                           f"with about {TOKENS_PER_WEIGHT} tokens per weight)", ge=1,
                           metavar="N,...")
    width: int = key(32, "width per block, which is also the head size", ge=2)
    jobs: int = key(1, "runs at the same time, with a GPU or a share of the cores each", ge=1)
    out: str = key("out/scaling", "folder of the runs", aliases="out_dir")
    check: bool = key(False, "train the larger run as well")


def check_options(options, config):
    """Raise UserError if the options or the configuration do not allow a fit."""
    if len(options.budgets) < 2 or max(options.budgets) >= options.larger:
        raise UserError("expected two --budgets or more, and --larger above them")
    if options.width % 2:
        raise UserError("expected an even --width")
    if config.max_minutes or int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise UserError("a budget is a length: needs runs without max_minutes, and no torchrun")
    require("scipy.optimize", "the fit")


def scaling(options, arguments_and_config):
    """Train the runs, fit the law and predict the larger run; return the exit code."""
    arguments, config = arguments_and_config  # arguments of run_train.py
    options.budgets = sorted(set(options.budgets))
    options.larger = options.larger or 4 * max(options.budgets, default=0)
    check_options(options, config)
    from train import distributed
    from train.setup import open_data
    with distributed.process_group(config) as ranks:
        plan = make_planner(arguments, config, options.width, open_data(config, ranks))
    plans = []
    for budget in options.budgets:
        plans += ([plan(budget, depth) for depth in sorted(set(options.depth))]
                  or choose_depths([plan(budget, depth) for depth in DEPTHS]))
    pool = RunPool(options.out, arguments, "val_loss", options.jobs)
    losses = train_all(pool, plans, config.seed)
    runs = np.array([(p.n, p.d, loss) for p, loss in zip(plans, losses) if loss]).T  # (3, P)
    law = fit_law(*runs) if runs.size >= 3 * MIN_RUNS else None
    echo(run_table(plans, losses, law))
    if law is None:
        raise UserError(f"a fit needs {MIN_RUNS} runs that end with a loss: give more --budgets or "
                        "--depth")
    errors = np.abs(runs[2] / law.loss(*runs[:2]) - 1)
    echo(f"loss = {law.E:.4g} + {law.A:.4g} / N^{law.alpha:.4f} + {law.B:.4g} / D^{law.beta:.4f}, "
         f"from {len(errors)} runs: median error {np.median(errors):.2%}, at most "
         f"{errors.max():.2%}")
    for budget in [*options.budgets, options.larger]:
        n, d = law.best(budget)
        echo(f"{budget:g} FLOPs: best with {n:,.0f} weights and {d:,.0f} tokens, "
             f"{law.loss(n, d):.4f}")
    larger = min((plan(options.larger, depth) for depth in DEPTHS),
                 key=lambda p: law.loss(p.n, p.d))
    interval = predict(law, runs, larger, arguments)
    if options.check:
        plans.append(larger)
        losses += train_all(pool, [larger], config.seed)
        if losses[-1]:
            echo(f"It reached {losses[-1]:.4f}, "
                 f"{losses[-1] / law.loss(larger.n, larger.d) - 1:+.2%}")
    svg = os.path.join(options.out, "scaling.svg")
    if save_figure(svg, lambda axes: draw_law(axes, law, plans, losses, larger, interval),
                   "Loss by model size", "weights (N)", "val_loss"):
        echo(f"See {svg}")
    return int(options.check and not losses[-1])


def main(argv=None):
    """Run the command and return the exit code."""
    return run_command(ScalingOptions, scaling, argv, load=lambda rest: (rest, load_argv(rest)),
                       interrupt_message="stopped; the same command resumes")


if __name__ == "__main__":
    sys.exit(main())
