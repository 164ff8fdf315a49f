"""Draw the loss and the learning rate of runs into one SVG file:

    python -m train.tools.plot out/a [out/b]... [--x iter|tokens|time] [--metric NAME]
"""

import os
from dataclasses import dataclass

from train.base.cli import command
from train.base.fields import key
from train.base.files import write_text
from train.options.loss_svg import MAX_LINES, X_LABELS, loss_svg, read_metrics, to_number


@dataclass
class PlotOptions:
    """Draw the loss and the learning rate of runs into one SVG file."""
    runs: list[str] = key([], "run folders (out_dir), or metrics.jsonl files", positional=True,
                          required=True, metavar="RUN")
    x: str = key("iter", "horizontal axis", choices=list(X_LABELS))
    metric: str = key("loss", "a metric of training lines or, as val_NAME, of evaluations")
    out: str = key("", "FILE.svg (default: METRIC.svg in the folder of a single run, compare.svg "
                   "in the parent folder of the first of several)", path=True)


def plot_runs(options):
    """Write the SVG of PlotOptions; ValueError if a run lacks the metric or `out` is no .svg."""
    metric = options.metric.removeprefix("val_")
    runs = []
    for path in options.runs:
        file = os.path.join(path, "metrics.jsonl") if os.path.isdir(path) else path
        records = read_metrics(file, MAX_LINES)
        available = {name.removeprefix("val_") for r in records for name, value in r.items()
                     if to_number(value) is not None}
        if not available:
            raise ValueError(f"{file}: has no numbers; expected the out_dir of a run")
        if metric not in available:
            raise ValueError(f"{file}: no metric {options.metric!r}, expected one of "
                             f"{', '.join(sorted(available))}")
        runs.append((os.path.normpath(path), records))
    first = options.runs[0]
    folder = first if os.path.isdir(first) else os.path.dirname(first)
    default = f"{metric}.svg" if len(runs) == 1 else os.path.join("..", "compare.svg")
    path = options.out or os.path.normpath(os.path.join(folder, default))
    if not path.endswith(".svg"):
        raise ValueError(f"--out {path}: expected a name that ends in .svg")
    write_text(path, loss_svg(runs, options.x, metric))
    print(f"Wrote {path}")


main = command(PlotOptions, plot_runs)
