"""Draw the loss and the learning rate of runs as an SVG, without any package; read metrics.jsonl.

A run draws loss.svg at every evaluation. train/tools/plot.py and train/tools/watch.py draw several
runs into one picture. Text and lines have at least 3:1 contrast on white and on black.
"""

import json
import math
import os
from contextlib import suppress
from html import escape
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from train.base.errors import printable

X_LABELS = dict(iter="step", tokens="tokens", time="training time")
TIME_UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))
COLORS = ("#2f81d0", "#d95f02", "#1b9e77", "#c2569e", "#a6761d", "#7c6fe0")
TEXT_COLOR = "#7a7a7a"
LEFT, RIGHT = 64, 24  # margins in pixels
PANEL_HEIGHTS = {"tasks": 160, "learning rate": 84}  # pixels
MAX_POINTS = 1500  # per curve
STYLES = dict(solid='stroke-width="1.8"', faint='stroke-width="1" stroke-opacity=".35"',
              dashed='stroke-width="1.8" stroke-dasharray="6 4"')


# -----------------------------------------------------------------------------
# metrics.jsonl

def read_metrics(path, limit=None):
    """Return the records of a metrics.jsonl, without incomplete lines; [] if the file is missing.

    limit: return all evaluations, but only about `limit` training lines, evenly spaced."""
    if not os.path.exists(path):
        return []
    records = []
    with open(path, "rb") as f:
        stride = 1 if limit is None else 1 + sum(1 for _ in f) // limit
        f.seek(0)
        for line in (x for n, x in enumerate(f) if n % stride == 0 or b'"val_loss"' in x):
            with suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict) and to_number(record.get("iter")) is not None:
                    records.append(record)
    return records


def to_number(value):
    """Return `value` as a float, or None if it is not a finite number: metrics.jsonl has "nan" and
    "inf" as strings, and sums of the largest floats would overflow."""
    if isinstance(value, (int, float)) and abs(value) < 1e100:
        return float(value)
    return None


def curve(records, key, x="iter"):
    """Return the points (x, y) of the metric `key`; x: iter, tokens, or time in seconds."""
    points, seconds, done = [], 0.0, 0
    for r in records:
        if "loss" in r:  # time_ms is the mean over the steps since the previous line
            seconds += (to_number(r.get("time_ms")) or 0.0) / 1000 * max(1, r["iter"] + 1 - done)
            done = r["iter"] + 1
        at = seconds if x == "time" else to_number(r.get(x))
        y = to_number(r.get(key))
        if at is not None and y is not None:
            points.append((at, y))
    return points


def smooth(points, share=0.02):
    """Return the centred running mean over 2 x `share` of the points, fewer near the start, where
    the loss is steep."""
    width = max(1, int(len(points) * share))
    totals = [0.0, *accumulate(y for _, y in points)]
    means = []
    for i, (x, _) in enumerate(points):
        half = min(width, i // 3)
        end = min(i + half + 1, len(points))
        means.append((x, (totals[end] - totals[i - half]) / (end - i + half)))
    return means


def decimate(points, limit=MAX_POINTS):
    """Return at most `limit` points: the minimum and maximum of each interval, to keep spikes."""
    if len(points) <= limit:
        return points
    size, y = math.ceil(len(points) / (limit // 2)), itemgetter(1)
    intervals = [points[i:i + size] for i in range(0, len(points), size)]
    return [p for part in intervals for p in sorted({min(part, key=y), max(part, key=y)})]


# -----------------------------------------------------------------------------
# axes

class Scale:
    """A linear or logarithmic mapping of values to pixels from `start` to `end`.

    The axis has the range of `values`, and `margin`, a share of the range, on both sides. With
    from_zero it begins at 0."""

    def __init__(self, values, start, end, from_zero=False, margin=0.0, log=False):
        self.start, self.end, self.log = start, end, log
        ends = min(values, default=1.0), max(values, default=1.0)
        low, high = map(self.transform, ends)
        low = min(low, 0.0) if from_zero else low
        if math.isclose(low, high, rel_tol=1e-12, abs_tol=1e-200):  # a single value
            low, high = low - abs(low) / 10, high + (abs(high) / 10 or 1.0)
        margin *= high - low
        self.low, self.high = low - margin * (not from_zero), high + margin

    def transform(self, value):
        return math.log10(value) if self.log else value

    def __call__(self, value):
        share = (self.transform(value) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, spacing):
        """Return round values that are about `spacing` pixels apart."""
        low, high = (10.0 ** v if self.log else v for v in (self.low, self.high))
        return find_ticks(low, high, abs(self.end - self.start) / spacing, self.log)


def find_ticks(low, high, count=8, log=False):
    """Return about `count` round values in [low, high], up to twice as many on a logarithmic axis:
    multiples of 1, 2 or 5 times a power of ten, or such powers and round values between them."""
    if log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for digits in ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 5), (1,)):
            values = [d * 10.0 ** k for k in powers for d in digits]
            values = [v for v in values if low <= v <= high]
            if len(values) <= 2 * count:
                return values
        return values[::math.ceil(len(values) / (2 * count))]
    step = 10.0 ** math.floor(math.log10((high - low) / count))
    step *= next(m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= count * 1.001)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def tick_label(value):
    """Return a number as text: 6e-4, 2.5, 12k."""
    if 0 < abs(value) < 1e-2:
        return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(size, 1e4) * 0.9999:
            return f"{value / size:.4g}{suffix}"
    return f"{value:.10g}"


# -----------------------------------------------------------------------------
# the picture

class Curve(NamedTuple):
    points: list
    color: str
    name: str = ""        # in the legend
    style: str = "solid"  # a key of STYLES


def loss_svg(runs, x="iter", metric="loss", tasks=(), width=960):
    """Return an SVG of `runs`, [(name, records of read_metrics), ...].

    A panel for the metric, solid in training and dashed in validation (val_NAME), one for the
    validation metrics `tasks`, and one for the learning rate. x: a key of X_LABELS."""
    seconds, x_label = choose_x_unit(runs, x)
    panels = {metric: [], "tasks": [], "learning rate": []}
    for i, (name, records) in enumerate(runs):
        def points(key, records=records):
            return [(at / seconds, y) for at, y in curve(records, key, x)]
        color = COLORS[i % len(COLORS)]
        panels[metric] += metric_curves(name, metric, points(metric), points(f"val_{metric}"),
                                        color, color if len(runs) > 1 else COLORS[1])
        panels["tasks"] += [Curve(points(f"val_{task}"), COLORS[k % len(COLORS)], task)
                            for k, task in enumerate(tasks)]
        panels["learning rate"].append(Curve(points("lr"), color))
    title = runs[0][0] if len(runs) == 1 else f"{len(runs)} runs (dashed: validation)"
    return draw_chart(title, panels, x_label, width)


def choose_x_unit(runs, x):
    """Return (seconds per unit of the horizontal axis, label of the axis)."""
    if x == "time":
        duration = max((p[0] for _, r in runs for p in curve(r, "loss", x)), default=0.0)
        seconds, unit = next(u for u in TIME_UNITS if duration >= 2 * u[0] or u[0] == 1)
        return seconds, f"{X_LABELS[x]} ({unit})"
    if x == "tokens":  # some model types count rows
        units = {next((f"{r['unit']}s" for r in records if "unit" in r), x) for _, records in runs}
        return 1, " or ".join(sorted(units))
    return 1, X_LABELS[x]


def metric_curves(run_name, metric, train, val, color, val_color):
    """Return the Curves of one run: training, smoothed if it has many points, and validation."""
    curves = []
    if len(train) > 60:
        curves.append(Curve(train, color, style="faint"))
        train = smooth(train)
    if color == val_color:  # one of several runs: one entry in the legend
        names = (f"{run_name} (validation {val[-1][1]:.4f})" if val else run_name), ""
    else:
        best = f", best {min(y for _, y in val):.4f}" if val and metric == "loss" else ""
        names = (f"training {metric} {train[-1][1]:.4f}" if train else "",
                 f"validation {metric} {val[-1][1]:.4f}{best}" if val else "")
    return [*curves, Curve(train, color, names[0]), Curve(val, val_color, names[1], "dashed")]


def draw_chart(title, panels, x_label, width):
    """Return an SVG of `panels`, {name: Curves}, above each other over one horizontal axis."""
    curves = [c for group in panels.values() for c in group]
    values = [p[0] for c in curves for p in c.points]
    x = Scale(values, LEFT, width - RIGHT, from_zero=True)
    legend, y = draw_legend([c for c in curves if c.name], width)
    parts = [draw_text(title, LEFT, 24, "start", 'font-size="15" font-weight="600"'), legend]
    for name, group in panels.items():
        if name not in PANEL_HEIGHTS or any(c.points for c in group):
            height = PANEL_HEIGHTS.get(name, 380)
            parts.append(draw_panel(name, group, x, y + 32, height, name in PANEL_HEIGHTS))
            y += 32 + height
    for tick in x.ticks(80):
        parts.append(draw_text(tick_label(tick), x(tick), y + 18, "middle"))
    parts.append(draw_text(x_label, (LEFT + x.end) / 2, y + 38, "middle"))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 48}" '
            f'width="{width}" height="{y + 48}" role="img" fill="none" stroke-linejoin="round" '
            f'font-family="system-ui, sans-serif" font-size="12">{"".join(parts)}</svg>\n')


def draw_legend(curves, width):
    """Return (SVG of the names of the curves, y of the last row)."""
    parts, x, y = [], LEFT, 48
    for c in curves:
        needed = 40 + 6.6 * len(c.name)
        if x > LEFT and x + needed > width - RIGHT:
            x, y = LEFT, y + 18
        parts.append(f'<path stroke="{c.color}" {STYLES[c.style]} d="M{x:.0f} {y - 4}h18"/>')
        parts.append(draw_text(c.name, x + 24, y))
        x += needed
    return "".join(parts), y


def draw_panel(name, curves, x, top, height, from_zero):
    """Return the SVG of a panel: grid, vertical axis and curves. The axis is logarithmic if the
    values span more than a factor of 3: the start of a loss would flatten the rest."""
    values = [p[1] for c in curves for p in c.points]
    log = not from_zero and bool(values) and min(values) > 1e-100 and max(values) > 3 * min(values)
    y = Scale(values, top + height, top, from_zero, 0.04, log)
    parts = [draw_text(name + " (log scale)" * log, LEFT, top - 7)]
    grid = f'<path stroke="{TEXT_COLOR}" stroke-opacity=".25" d="M'
    parts += [f'{grid}{x(tick):.1f} {top}v{height}"/>' for tick in x.ticks(80)]
    for tick in y.ticks(40):
        parts.append(f'{grid}{LEFT} {y(tick):.1f}H{x.end}"/>')
        parts.append(draw_text(tick_label(tick), LEFT - 8, y(tick) + 4, "end"))
    for c in curves:
        points = [(x(a), y(b)) for a, b in decimate(c.points)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(f'<polyline stroke="{c.color}" {STYLES[c.style]} points="{path}"/>')
        if c.style == "dashed" and len(points) <= 50:
            parts += [f'<circle fill="{c.color}" cx="{a:.1f}" cy="{b:.1f}" r="3"/>'
                      for a, b in points]
    return "".join(parts)


def draw_text(text, x, y, anchor="start", style=""):
    return (f'<text fill="{TEXT_COLOR}" text-anchor="{anchor}" {style} x="{x:.1f}" y="{y:.1f}">'
            f"{escape(printable(text))}</text>")
