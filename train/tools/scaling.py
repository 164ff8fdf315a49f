"""How the loss falls with size and data, learned from small runs: the best size for a budget, and
what a larger run will reach.

    python -m train.tools.scaling --config FILE.yaml --budgets 1e12,3e12,1e13 [--check]

Models of several depths are trained for each budget of FLOPs, each as long as the budget lasts and
with a learning rate that falls to its own end. To their losses
    L(N, D) = E + A / N^alpha + B / D^beta
is fitted (Hoffmann et al. 2022, arXiv:2203.15556, approach 3). D: tokens. N: a sixth of the FLOPs a
token, that is the weights that multiply and what attention costs beside them, so that a budget is
6 N D. Runs are those of train.repeat: a process and a folder each, a crash is a row, the same
command goes on. dial() says what a depth sets.
"""

import argparse
import functools
import importlib.util
import math
import os
import shlex
import sys
from typing import NamedTuple

import numpy as np

from train.base.cli import run_command, underscores
from train.base.errors import UserError, echo
from train.config import load_argv, load_config, load_model_file, take_config
from train.options.loss_svg import TEXT_COLOR
from train.tools.plot import save_figure
from train.tools.repeat import Runs

# Depths are tried that have about so many tokens a weight, by this factor more or fewer at most.
TOKENS, FACTOR, SIZES = 10, 16, 4
DEPTHS = range(2, 49)  # one block alone is another kind of model: it cannot look up what followed
LEAST = 6     # runs for a fit of five numbers
DELTA = 1e-3  # of the Huber loss: errors of log L that are larger count linearly
DRAWS = 200   # fits behind an interval


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
        """(N, D) of the least loss where 6 N D is `budget`."""
        a, b = self.alpha, self.beta
        n = (a * self.A / (b * self.B)) ** (1 / (a + b)) * (budget / 6) ** (b / (a + b))
        return n, budget / 6 / n


def fit(n, d, loss, start=None):
    """The Law of runs n, d, loss (P,): the least sum of Huber losses of the errors of log L, found
    by L-BFGS from several starts, or from the Law `start`."""
    from scipy.optimize import minimize
    x, y, z = np.log(n), np.log(d), np.log(loss)
    # Fitted are log E, log of the other terms in the middle of the runs, alpha, beta: A and alpha
    # themselves all but stand for each other.
    middle = np.array([x.mean(), y.mean()])
    slopes = np.stack([0 * x, middle[0] - x, middle[1] - y])  # (3, P)

    def objective(p):  # (5,) -> value, gradient (5,)
        terms = p[:3, None] + np.append(0, p[3:])[:, None] * slopes  # (3, P)
        predicted = np.logaddexp.reduce(terms)
        error = (predicted - z) / DELTA
        cut = np.clip(error, -1, 1)
        pull = cut / DELTA * np.exp(terms - predicted)
        gradient = np.append(pull.sum(1), (pull * slopes)[1:].sum(1))
        return (cut * (error - cut / 2)).sum(), gradient
    low = loss.min()
    guesses = [np.append(np.log([e * low, (1 - e) * low / 2, (1 - e) * low / 2]), [a, b])
               for e in (0.3, 0.7) for a in (0.3, 0.7) for b in (0.3, 0.7)]
    if start:
        guesses = [np.append(np.log(start[:3]) - np.append(0, start[3:] * middle), start[3:])]
    found = min((minimize(objective, g, jac=True, method="L-BFGS-B", options=dict(maxiter=2000),
                          bounds=[(-20, 20)] * 3 + [(0.01, 3)] * 2) for g in guesses),
                key=lambda result: result.fun).x
    return Law(*map(float, np.append(np.exp(found[:3] + np.append(0, found[3:] * middle)),
                                     found[3:])))


def interval(law, n, d, loss, at):
    """(low, high): 95% of the losses that a run at = (N, D) may have, by a residual bootstrap. The
    errors of the runs n, d, loss (P,), larger by as much as five fitted numbers made them smaller,
    are drawn anew for each run, also for the one that is predicted, and the law is fitted again."""
    draw, fitted = np.random.default_rng(0), law.loss(n, d)
    errors = np.log(loss / fitted) * math.sqrt(len(n) / (len(n) - 5))

    def once():
        again = fit(n, d, fitted * np.exp(draw.choice(errors, len(n))), law)
        return again.loss(*at) * np.exp(draw.choice(errors))
    return tuple(map(float, np.quantile([once() for _ in range(DRAWS)], (0.025, 0.975))))


# -----------------------------------------------------------------------------
# the runs

class Plan(NamedTuple):
    """A run: a model of `depth` that is trained for as long as the `budget` lasts."""
    budget: float
    depth: int
    n: float         # a sixth of the FLOPs a token
    d: int           # tokens in all
    epochs: float
    arguments: list  # of run_train.py


def dial(depth, width, config):
    """{key: value} of a model of `depth`, as the table in train/README.md; width: --width."""
    wide = width * (depth + 1)
    rates = {key: rate * math.sqrt(config.n_embd / wide) for key in ("learning_rate", "min_lr")
             if (rate := getattr(config, key)) is not None}
    return dict(n_layer=depth, n_embd=wide, n_head=depth + 1, n_hidden=None, **rates)


def planner(rest, config, width, data):
    """plan(budget, depth) -> Plan, from the arguments of run_train.py and the Data of the run."""
    import torch

    from train.device import flops_per_step

    def as_arguments(keys):
        return [f"--{k}={'null' if v is None else v}" for k, v in keys.items()]

    @functools.cache
    def cost(depth):  # FLOPs of a step
        c = load_config(*take_config([*rest, *as_arguments(dial(depth, width, config))]))
        with torch.device("meta"):
            model = load_model_file(c.model).build_model(c, data)
        if flops := flops_per_step(model, c, data.train):
            return flops
        raise UserError(f"model {c.model} does not say what a token costs (flops_per_unit)")

    def plan(budget, depth):
        units = config.samples_per_step * data.train.units_per_sample
        steps = max(1, round(budget / cost(depth)))
        keys = dial(depth, width, config) | dict(
            max_iters=steps, eval_interval=steps, save_interval=config.save_every,
            eval_on_start=False, max_epochs=None, eval_epochs=None, lr_decay_iters=None,
            early_stopping_patience=0, sample_tokens=0)  # evaluated once, at the end
        return Plan(budget, depth, cost(depth) / units / 6, steps * units,
                    steps * config.samples_per_step / data.train.samples, as_arguments(keys))
    return plan


def depths(plans):
    """Up to SIZES of the `plans` for a budget whose tokens a weight are nearest to TOKENS."""
    def off(p):
        return abs(math.log(p.d / p.n / TOKENS))
    near = sorted((p for p in plans if off(p) < math.log(FACTOR)), key=off)
    return sorted(near[:SIZES], key=lambda p: p.depth)


# -----------------------------------------------------------------------------
# what comes of it

def table(plans, losses, law):
    """Every run as text for people."""
    lines = [("FLOPs", "depth", "weights", "tokens", "a weight", "epochs", "loss", "law")]
    lines += [(f"{p.budget:g}", str(p.depth), f"{p.n:,.0f}", f"{p.d:,}", f"{p.d / p.n:.1f}",
               f"{p.epochs:.2f}", f"{loss:.4f}" if loss else "crash",
               f"{law.loss(p.n, p.d):.4f}" if law else "") for p, loss in zip(plans, losses)]
    wide = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(text.rjust(w) for text, w in zip(line, wide)) for line in lines)


def draw_law(axes, law, plans, losses, larger, bounds):
    """Draw the loss over the number of weights: per budget a curve of the law and a dot per run,
    and the interval of the loss that is predicted for the larger run."""
    axes.set_xscale("log")
    for budget in sorted({p.budget for p in [*plans, larger]}):
        sizes = [p.n for p in [*plans, larger] if p.budget == budget]
        n = np.geomspace(min(sizes) / 2, max(sizes) * 2, 60)
        line, = axes.plot(n, law.loss(n, budget / 6 / n), label=f"{budget:g} FLOPs")
        runs = [(p.n, loss) for p, loss in zip(plans, losses) if p.budget == budget and loss]
        if runs:
            axes.plot(*zip(*runs), "o", color=line.get_color())
    axes.plot([larger.n] * 2, bounds, color=TEXT_COLOR, marker="_",
              label="95% interval of the larger run")


def listed(kind):
    """What reads a list such as 1e12,3e12: its numbers in order, each once."""
    def numbers(text):
        return sorted({kind(word) for word in text.split(",")})
    return numbers


def main(argv=None):
    """Run the command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m train.tools.scaling", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All other arguments are those of run_train.py.")
    for name, kind, default, text in (
            ("--budgets", listed(float), [], "FLOPs of a run, two or more: 1e12,3e12,1e13"),
            ("--larger", float, 0, "FLOPs of the larger run (four times the largest budget)"),
            ("--depth", listed(int), [], f"depths of the models (up to {SIZES} with about {TOKENS} "
             "tokens a weight): 1,2,3"),
            ("--width", int, 32, "what a block adds to the width, and a head's (%(default)s)"),
            ("--jobs", int, 1, "runs at the same time, a GPU or a share of the cores each"),
            ("--out --out_dir", str, "out/scaling", "folder of the runs (%(default)s)")):
        parser.add_argument(*name.split(), type=kind, default=default, help=text)
    parser.add_argument("--check", action="store_true", help="train the larger run as well")
    argv = sys.argv[1:] if argv is None else argv
    rest = parser.parse_known_args(underscores(argv))[1]
    return run_command(parser, functools.partial(scaling, rest), argv, load=load_argv,
                       interrupt_message="stopped; the same command continues")


def scaling(rest, args, config):
    """What the command line asks for; the exit code. rest: the arguments of run_train.py."""
    budgets, larger = args.budgets, args.larger or 4 * max(args.budgets, default=0)
    if len(budgets) < 2 or not 0 < budgets[0] < budgets[-1] < larger < math.inf:
        raise UserError("expected two --budgets or more above 0, and --larger above them")
    if min([*args.depth, args.jobs, args.width // 2]) < 1 or args.width % 2:
        raise UserError("expected --depth and --jobs of at least 1, and an even --width")
    if config.max_minutes or int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise UserError("a budget is a length: needs runs without max_minutes, and no torchrun")
    if importlib.util.find_spec("scipy") is None:
        raise UserError("the fit needs SciPy: pip install scipy")
    from train import distributed
    from train.train import open_data
    with distributed.process_group(config) as ranks:
        plan = planner(rest, config, args.width, open_data(config, ranks))
    plans = [p for b in budgets for p in (
        [plan(b, k) for k in args.depth] or depths([plan(b, k) for k in DEPTHS]))]
    runs = Runs(args.out, rest, "val_loss", args.jobs)

    def train(plans):  # -> losses, None for a crash
        return [r["value"] for r in runs.all([
            (f"{p.budget:g}_depth_{p.depth}", p.arguments, config.seed) for p in plans])]
    losses = train(plans)
    good = np.array([(p.n, p.d, loss) for p, loss in zip(plans, losses) if loss]).T  # (3, P)
    law = fit(*good) if good.size >= 3 * LEAST else None
    echo(table(plans, losses, law))
    if law is None:
        raise UserError(f"a fit needs {LEAST} runs that end with a loss: more --budgets or --depth")
    off = np.abs(good[2] / law.loss(*good[:2]) - 1)
    echo(f"loss = {law.E:.4g} + {law.A:.4g} / N^{law.alpha:.4f} + {law.B:.4g} / D^{law.beta:.4f}, "
        f"from {len(off)} runs: off by {np.median(off):.2%}, at most {off.max():.2%}")
    for budget in [*budgets, larger]:
        n, d = law.best(budget)
        echo(f"{budget:g} FLOPs: best with {n:,.0f} weights and {d:,.0f} tokens, "
            f"{law.loss(n, d):.4f}")
    best = min((plan(larger, k) for k in DEPTHS), key=lambda p: law.loss(p.n, p.d))
    return predict(law, good, plans, losses, best, train, rest, args)


def predict(law, good, plans, losses, p, train, rest, args):
    """Say what the larger run `p` will reach; train it as well, where that is asked for; draw."""
    expected, bounds = law.loss(p.n, p.d), interval(law, *good, (p.n, p.d))
    echo(f"{p.budget:g} FLOPs, depth {p.depth}, {p.n:,.0f} weights, {p.d:,} tokens ({p.epochs:.2f} "
        f"epochs): expected {expected:.4f}, 95% from {bounds[0]:.4f} to {bounds[1]:.4f}")
    echo("  " + shlex.join(["python", "run_train.py", *rest, *p.arguments]))
    if args.check:
        plans, losses = [*plans, p], [*losses, *train([p])]
        if losses[-1]:
            echo(f"It reached {losses[-1]:.4f}, {losses[-1] / expected - 1:+.2%}")
    svg = os.path.join(args.out, "scaling.svg")
    if save_figure(svg, lambda axes: draw_law(axes, law, plans, losses, p, bounds),
                   "Loss by model size", "weights (N)", "val_loss"):
        echo(f"See {svg}")
    return int(args.check and not losses[-1])


if __name__ == "__main__":
    sys.exit(main())
