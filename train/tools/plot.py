"""Draw the loss and the learning rate of runs into one SVG file:

    python -m train.tools.plot out/a [out/b]... [--x iter|tokens|time] [--metric NAME]
"""

import io
import os
import sys
from dataclasses import dataclass

from train.base.cli import run_command
from train.base.errors import echo
from train.base.fields import key
from train.base.files import write_text
from train.options.loss_svg import (
    COLORS,
    TEXT_COLOR,
    X_LABELS,
    find_ticks,
    loss_svg,
    read_metrics,
    tick_label,
    to_number,
)

MAX_TRAINING_LINES = 100_000  # read per run


def load_runs(paths, metric):
    """Return [(name, records)] of run folders or metrics.jsonl files. ValueError lists all files
    and metrics that are missing."""
    runs, problems = [], []
    for path in paths:
        file = os.path.join(path, "metrics.jsonl") if os.path.isdir(path) else path
        records = read_metrics(file, MAX_TRAINING_LINES)
        metrics = sorted({key.removeprefix("val_") for r in records for key, value in r.items()
                          if to_number(value) is not None})
        if not os.path.exists(file):
            problems.append(f"{file} does not exist; expected the out_dir of a run")
        elif not records:
            problems.append(f"{file} holds no numbers yet")
        elif metric not in metrics:
            problems.append(f"{path}: no metric {metric!r}; available: {', '.join(metrics)}")
        runs.append((os.path.normpath(path), records))
    if problems:
        raise ValueError("\n".join(problems))
    return runs


def default_path(paths, metric):
    """Return METRIC.svg in the folder of a single run, compare.svg or compare_METRIC.svg in the
    common parent folder of several."""
    folders = [os.path.abspath(p if os.path.isdir(p) else os.path.dirname(p)) for p in paths]
    if len(paths) == 1:
        return os.path.join(os.path.relpath(folders[0]), f"{metric}.svg")
    parent = os.path.relpath(os.path.commonpath([os.path.dirname(f) for f in folders]))
    name = "compare.svg" if metric == "loss" else f"compare_{metric}.svg"
    return os.path.normpath(os.path.join(parent, name))


# -----------------------------------------------------------------------------
# pictures of the other commands

def save_figure(path, draw, title, x_label, y_label):
    """Save a figure as SVG and return True; without matplotlib, print one line and return False.

    draw(axes): draws into the new matplotlib axes. The background is transparent and the text grey,
    for light and dark screens."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        echo(f"{path} was not drawn: pip install matplotlib")
        return False
    colors = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color",
                            "ytick.color", "grid.color"), TEXT_COLOR)
    with rc_context(colors | {"svg.fonttype": "none", "savefig.transparent": True,
                              "axes.grid": True, "grid.alpha": 0.25, "legend.framealpha": 0,
                              "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(10, 5.5), layout="constrained")
        axes = figure.subplots()
        axes.set_prop_cycle(color=COLORS)
        axes.set(title=title, xlabel=x_label, ylabel=y_label)
        draw(axes)
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() == "log":
                low, high = axis.get_view_interval()
                axis.set_ticks(find_ticks(low, high, log=True))
                axis.set_ticks([], minor=True)
            axis.set_major_formatter(lambda value, position: tick_label(value))
        if axes.get_legend_handles_labels()[1]:
            figure.legend(loc="outside lower center", ncols=3)
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata=dict(Date=None))
    write_text(path, svg.getvalue())
    return True


# -----------------------------------------------------------------------------
# command line

@dataclass
class PlotOptions:
    """Draw the loss and the learning rate of runs into one SVG file."""
    runs: list[str] = key([], "run folders (out_dir), or metrics.jsonl files", positional=True,
                          required=True, metavar="RUN")
    x: str = key("iter", "horizontal axis", choices=list(X_LABELS))
    metric: str = key("loss", "another metric of training lines or, as val_NAME, of evaluations: "
                      "ppl, grad_norm, ...")
    out: str = key("", "FILE.svg (default: loss.svg in the folder of a single run, compare.svg in "
                   "the parent folder of several)")


def plot_runs(options):
    """Draw the picture that the options describe."""
    metric = options.metric.removeprefix("val_")
    path = options.out or default_path(options.runs, metric)
    if not path.endswith(".svg"):
        raise ValueError(f"--out {path}: expected a name that ends in .svg")
    svg = loss_svg(load_runs(options.runs, metric), options.x, metric)
    with open(path, "w", encoding="utf-8") as f:
        f.write(svg)
    print(f"Wrote {path}")


def main(argv=None):
    """Run the command and return the exit code."""
    return run_command(PlotOptions, plot_runs, argv)


if __name__ == "__main__":
    sys.exit(main())
