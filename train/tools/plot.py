"""Pictures of numbers as SVG, for light and dark screens, with no plotting package.

    python -m train.tools.plot out/a [out/b]... [--x iter|tokens|time] [--metric NAME] [--out FILE.svg]

draws the loss and the learning rate of one or several runs; chart() draws any lines and dots.
"""

import argparse
import json
import math
import os
import sys
from html import escape
from operator import itemgetter
from typing import NamedTuple

from train.base.cli import run_command
from train.base.errors import printable

MAX_POINTS = 1500  # of a curve: more than a screen shows
WIDTH, LEFT, RIGHT = 960, 64, 24  # pixels
AXES = dict(iter="step", tokens="tokens", time="training time")
TIME_UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))
# Okabe-Ito, told apart by colour-blind readers; the second of a pair is for dark screens.
COLORS = [("#0072b2", "#56b4e9"), ("#d55e00", "#ff8c42"), ("#009e73", "#2fd0a0"),
          ("#b8578f", "#e59cc8"), ("#8a6d00", "#f0e442"), ("#5b5bd6", "#a3a3ff")]


# -----------------------------------------------------------------------------
# numbers of runs

def read_metrics(path, limit=None):
    """The records of a metrics.jsonl, torn lines left out. With `limit`, every evaluation but only
    about that many training lines, evenly spaced: a long run is read quickly."""
    if not os.path.exists(path):
        return []
    with open(path, "rb") as f:
        step = 1 if limit is None else 1 + sum(1 for _ in f) // limit
        f.seek(0)
        return read_records(f, step)


def read_records(lines, step=1):
    """The records of lines (bytes) of a metrics.jsonl: every evaluation, and of the others one line
    in `step`."""
    records = []
    for n, line in enumerate(lines):
        if n % step and b'"val_loss"' not in line:
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and _number(record.get("iter")) is not None:
            records.append(record)
    return records


def _number(value):
    """A float that can be drawn, or None: metrics.jsonl has "nan" and "inf" as strings, and sums of
    the largest floats would be infinite."""
    good = isinstance(value, (int, float)) and abs(value) < 1e100
    return float(value) if good else None


def curve(records, key, x="iter"):
    """Points (x, y) of one number, where both are known; time is the seconds spent in steps."""
    points, seconds, before = [], 0.0, 0
    for r in records:
        if "loss" in r:  # time_ms is the mean over the steps since the last line
            seconds += (_number(r.get("time_ms")) or 0.0) / 1000 * max(1, r["iter"] + 1 - before)
            before = r["iter"] + 1
        at = seconds if x == "time" else _number(r.get(x))
        if at is not None and (y := _number(r.get(key))) is not None:
            points.append((at, y))
    return points


def smooth(points, share=0.02):
    """Running mean over 2 x `share` of the points; narrow at the start, where a curve is steep."""
    half, total, out = max(1, int(len(points) * share)), [0.0], []
    for _, y in points:
        total.append(total[-1] + y)
    for i, (x, _) in enumerate(points):
        k = min(half, i // 3)
        first, end = i - k, min(i + k + 1, len(points))
        out.append((x, (total[end] - total[first]) / (end - first)))
    return out


def decimate(points, limit=MAX_POINTS):
    """At most `limit` points: the lowest and highest of each stretch, so that spikes stay."""
    if len(points) <= limit:
        return points
    size, y = math.ceil(len(points) / (limit // 2)), itemgetter(1)
    parts = [points[i:i + size] for i in range(0, len(points), size)]
    return [p for part in parts for p in sorted({min(part, key=y), max(part, key=y)})]


# -----------------------------------------------------------------------------
# axes

def linear_ticks(low, high, wanted=6, whole=False):
    """Round values (1, 2 or 5 times a power of ten; `whole`: no fractions) within [low, high]."""
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    step = max(step, 1.0) if whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def log_ticks(low, high, most=17):
    """Values in [low, high] for a logarithmic axis that has room for `most` at equal distances:
    powers of ten, and between them ever less round ones where there is room."""
    taken, room = [], math.log(high / low) / most
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (2, 5), (3, 4, 6, 8), (1.2, 1.4, 1.6, 1.8), (2.5, 7, 9)):
        for tick in (digit * 10.0 ** p for p in powers for digit in digits):
            if low <= tick <= high and all(abs(math.log(tick / t)) >= room for t in taken):
                taken.append(tick)
    return sorted(taken)


def label(value):
    """A number at an axis: 6e-4, 2.5, 12k."""
    if 0 < abs(value) < 1e-2:
        return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(size, 1e4) * 0.9999:
            return f"{value / size:.4g}{unit}"
    return f"{value:.10g}"


class Axis:
    """Values to pixels from `start` to `end`, from `low` (default: the least value) to the largest,
    with a margin that is a share of this range."""

    def __init__(self, values, start, end, low=None, log=False, margin=0.0):
        self.start, self.end, self.log = start, end, log
        self.scale = math.log if log else float
        self.whole = all(float(v).is_integer() for v in values)
        first = self.scale(min(values, default=1.0)) if low is None else low
        last = self.scale(max(values, default=1.0))
        if last <= first or math.isclose(first, last, rel_tol=1e-12, abs_tol=1e-200):  # one value
            first, last = (first - 1, first + 1) if low is None else (first, first + 1)
        margin *= last - first
        self.first, self.last = first - margin * (low is None), last + margin

    def __call__(self, value):
        share = (self.scale(value) - self.first) / (self.last - self.first)
        return self.start + share * (self.end - self.start)

    def ticks(self, room):
        """Values to write at the axis, in steps of at least `room` pixels."""
        pixels = abs(self.end - self.start)
        if self.log:
            return log_ticks(math.exp(self.first), math.exp(self.last), pixels / room)
        return linear_ticks(self.first, self.last, max(4, pixels / room / 3), self.whole)


# -----------------------------------------------------------------------------
# the picture

class Series(NamedTuple):
    points: list              # (x, y), or (x, y, text) for dots that tell more when pointed at
    color: int = 0            # in COLORS
    kind: str = "bold"        # a line: raw (faint), thin or bold; or dots
    name: str = ""            # in the legend


class Panel(NamedTuple):
    """An area with a vertical axis of its own, logarithmic where values span more than a factor of
    3 (or the start of a loss would flatten all the rest)."""
    name: str
    series: list
    height: int = 380         # pixels
    from_zero: bool = False   # and never logarithmic


def chart(title, panels, x_name, log_x=False, band=None, line=None, note="", width=WIDTH):
    """An SVG text of `panels` above each other over one horizontal axis, which starts at 0 unless
    it is logarithmic. band: (name, from, to) shades a stretch of it, line: (name, x) marks a value.
    All names and the `note` are in the legend, where they cover no curve."""
    series = [s for p in panels for s in p.series]
    names = [(f"bold s{s.color}", s.name) for s in series if s.name]
    names += [("dash s2", line[0])] if line else []
    names += [("band s2", band[0])] if band else []
    legend, bottom = _legend(names + ([("", note)] if note else []), width - RIGHT)
    x = Axis([p[0] for s in series for p in s.points], LEFT, width - RIGHT,
             None if log_x else 0.0, log_x)
    out = [text(title, LEFT, 28, "title ink"), legend]
    for panel in panels:
        top, bottom = bottom + 34, bottom + 34 + panel.height
        if band:
            out.append(f'<path class="area f2" d="M{x(band[1]):.1f} {top}H{x(band[2]):.1f}'
                       f'v{panel.height}H{x(band[1]):.1f}z"/>')
        out.append(_draw_panel(panel, x, top))
        if line:
            out.append(f'<path class="dash s2" d="M{x(line[1]):.1f} {top}v{panel.height}"/>')
    out += [text(label(t), x(t), bottom + 18, "soft mid") for t in x.ticks(40)]
    out.append(text(x_name, (LEFT + x.end) / 2, bottom + 38, "soft mid"))
    return svg("".join(out), bottom + 48, width)


def svg(body, height, width=WIDTH):
    """The SVG text around what is drawn with the classes of _style()."""
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img"><style>{_style()}</style>'
            f'<rect class="bg" width="100%" height="100%"/>{body}</svg>\n')


def text(words, x, y, css="soft"):
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}">{escape(printable(words))}</text>'


def _style():
    def theme(back, ink, soft, grid, colors):
        return (f".bg{{fill:{back}}}.ink{{fill:{ink}}}.soft{{fill:{soft}}}.grid{{stroke:{grid}}}"
                + "".join(f".s{i}{{stroke:{c}}}.f{i}{{fill:{c}}}" for i, c in enumerate(colors)))
    light, dark = zip(*COLORS, strict=True)
    return ("text{font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}"
            ".title{font-size:15px;font-weight:600}.end{text-anchor:end}.mid{text-anchor:middle}"
            ".line{fill:none;stroke-linejoin:round;stroke-linecap:round}.raw{stroke-width:1;"
            "stroke-opacity:.35}.bold{stroke-width:1.8}.thin{stroke-width:1.5}.grid{stroke-width:1}"
            ".dash{stroke-width:1.8;stroke-dasharray:5 4}.band{stroke-width:8;stroke-opacity:.3}"
            ".area{fill-opacity:.15}" + theme("#ffffff", "#1f2328", "#59636e", "#e4e8ec", light)
            + f"@media(prefers-color-scheme:dark){{"
              f"{theme('#0d1117', '#e6edf3', '#9198a1', '#262c36', dark)}}}")


def _legend(names, end):
    """(SVG, its lowest pixel) of the rows that name the curves; names: [(css or "", text)]."""
    out, x, y = [], LEFT, 50
    for css, name in names:
        wide = 40 + 6.6 * len(name)
        if x > LEFT and x + wide > end:
            x, y = LEFT, y + 18
        out.append(f'<path class="{css}" d="M{x:.0f} {y - 4}h18"/>' if css else "")
        out.append(text(name, x + 24 * bool(css), y))
        x += wide
    return "".join(out), y


def _draw_panel(panel, x, top):
    """The SVG of one panel: grid, lines, and dots above the lines."""
    ys, bottom = [p[1] for s in panel.series for p in s.points], top + panel.height
    log = not panel.from_zero and bool(ys) and min(ys) > 1e-100 and max(ys) > 3 * min(ys)
    y = Axis(ys, bottom, top, 0.0 if panel.from_zero else None, log, margin=0.04)
    y.whole = False
    out = [text(panel.name + " (log scale)" * log, LEFT, top - 7)]
    out += [f'<path class="grid" d="M{x(t):.1f} {top}v{panel.height}"/>' for t in x.ticks(40)]
    for t in y.ticks(22):
        out += [f'<path class="grid" d="M{LEFT} {y(t):.1f}H{x.end}"/>',
                text(label(t), LEFT - 8, y(t) + 4, "soft end")]
    for s in sorted(panel.series, key=lambda s: s.kind == "dots"):
        if s.kind == "dots":
            size = 3.5 if len(s.points) <= 50 else 1.5
            out += [f'<circle class="f{s.color}" cx="{x(p[0]):.1f}" cy="{y(p[1]):.1f}" r="{size}">'
                    f"<title>{escape(printable(p[2]))}</title></circle>" for p in s.points]
        elif len(s.points) > 1:
            path = " ".join(f"{x(p[0]):.1f},{y(p[1]):.1f}" for p in s.points)
            out.append(f'<polyline class="line {s.kind} s{s.color}" points="{path}"/>')
    return "".join(out)


def loss_svg(runs, x="iter", metric="loss", tasks=(), width=WIDTH):
    """An SVG text of `runs`, [(name, records of read_metrics), ...]: a number in training and, as
    val_NAME, in validation, and the learning rate; by x: iter, tokens or time. tasks: names of more
    numbers in validation, which share a panel."""
    numbers, rates, size, x_name = [], [], 1, AXES[x]
    if x == "time":
        longest = max((p[0] for _, r in runs for p in curve(r, "loss", "time")), default=0.0)
        size, unit = next(u for u in TIME_UNITS if longest >= 2 * u[0] or u[0] == 1)
        x_name += f" ({unit})"
    if x == "tokens":  # of some systems they are rows
        x_name = " or ".join(sorted({next((f"{r['unit']}s" for r in records if "unit" in r), x_name)
                                     for _, records in runs}))
    for i, (name, records) in enumerate(runs):
        train, val, lr = ([(at / size, y) for at, y in curve(records, key, x)]
                          for key in (metric, f"val_{metric}", "lr"))
        # Colour means the run; a single run has one colour for each kind of loss instead.
        color = None if len(runs) == 1 else i % len(COLORS)
        numbers += _training_and_validation(name, metric, train, val, color)
        rates.append(Series(decimate(lr), color or 0, "thin"))
    panels = [Panel(metric, numbers)]
    more = [Series(decimate([(at / size, y) for at, y in curve(records, f"val_{task}", x)]),
                   i % len(COLORS), "thin", task)
            for _, records in runs for i, task in enumerate(tasks)]
    panels += [Panel("tasks", more, 160, True)] if any(s.points for s in more) else []
    panels += [Panel("learning rate", rates, 84, True)] if any(s.points for s in rates) else []
    if len(runs) == 1:
        return chart(runs[0][0], panels, x_name, width=width)
    return chart(f"{len(runs)} runs", panels, x_name, note="line: training, dots: validation",
                 width=width)


def _training_and_validation(name, metric, train, val, color):
    """The Series of one run; color None: it is the only one."""
    mean = smooth(train) if len(train) > 60 else train
    last = f"{val[-1][1]:.4f}" if val else ""
    dots = [(*p, f"{name}, validation: {p[1]:.4f}") for p in decimate(val, 300)]
    a, b, names = color, color, (f"{name} (validation {last})" if val else name, "")
    if color is None:
        best = f", best {min(y for _, y in val):.4f}" if val and metric == "loss" else ""
        a, b, names = 0, 1, (f"training {metric} {mean[-1][1]:.4f}" if mean else "",
                             f"validation {metric} {last}{best}" if val else "")
    return [Series(decimate(train) if mean is not train else [], a, "raw"),
            Series(decimate(mean), a, "bold", names[0]),
            Series(dots, b, "thin", names[1]), Series(dots, b, "dots")]


# -----------------------------------------------------------------------------
# command line

def load_runs(paths, metric):
    """[(name, records)] of run folders or metrics.jsonl files; ValueError names what is missing."""
    runs, problems = [], []
    for path in paths:
        file = os.path.join(path, "metrics.jsonl") if os.path.isdir(path) else path
        records = read_metrics(file, limit=100_000)
        known = sorted({k.removeprefix("val_") for r in records for k, v in r.items()
                        if _number(v) is not None})
        if not records:
            what = "holds no numbers yet" if os.path.exists(file) else "is not there"
            problems.append(f"{path}: {file} {what}; expected the out_dir of a run")
        elif metric not in known:
            problems.append(f"{path}: there is no {metric!r}; --metric may be {', '.join(known)}")
        runs.append((os.path.normpath(path), records))
    if problems:
        raise ValueError("\n".join(problems))
    return runs


def default_path(paths, metric):
    """loss.svg in the folder of a single run, compare.svg beside several."""
    folders = [os.path.abspath(p if os.path.isdir(p) else os.path.dirname(p)) for p in paths]
    if len(paths) == 1:
        return os.path.join(os.path.relpath(folders[0]), f"{metric}.svg")
    together = os.path.relpath(os.path.commonpath([os.path.dirname(f) for f in folders]))
    name = "compare.svg" if metric == "loss" else f"compare_{metric}.svg"
    return os.path.normpath(os.path.join(together, name))


def main(argv=None):
    """Run the command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m train.tools.plot", allow_abbrev=False,
                                     description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", help="run folders (out_dir), or metrics.jsonl files")
    parser.add_argument("--x", choices=list(AXES), default="iter", help="axis (%(default)s)")
    parser.add_argument("--metric", default="loss", help="another number of training lines or, as "
                        "val_NAME, of evaluations: ppl, grad_norm, ... (%(default)s)")
    parser.add_argument("--out", help="FILE.svg (default: loss.svg in the folder of a single run, "
                                      "compare.svg beside several)")
    return run_command(parser, draw, argv)


def draw(args):
    """Draw what the command line asks for."""
    metric = args.metric.removeprefix("val_")
    out = args.out or default_path(args.runs, metric)
    if not out.endswith(".svg"):
        raise ValueError(f"--out {out}: expected a name that ends in .svg")
    picture = loss_svg(load_runs(args.runs, metric), args.x, metric)
    with open(out, "w", encoding="utf-8") as f:
        f.write(picture)
    print(f"Wrote {out}")


if __name__ == "__main__":
    sys.exit(main())
