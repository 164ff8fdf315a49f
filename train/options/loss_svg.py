"""Draw the loss and the learning rate of runs as an SVG; read metrics.jsonl.

A run draws loss.svg at every evaluation. train/tools/plot.py and train/tools/watch.py draw several
runs into one picture, train/tools/lr_finder.py a sweep. Text and lines have at least 3:1 contrast
on white and on black.
"""

import json
import math
import os
import re
from contextlib import suppress
from html import escape
from typing import NamedTuple

import numpy as np

from train.base.errors import printable

X_LABELS = dict(iter="step", tokens="tokens (or rows)", time="training time (minutes)")
COLORS = ("#2f81d0", "#d95f02", "#1b9e77", "#c2569e", "#a6761d", "#7c6fe0")
TEXT_COLOR = "#7a7a7a"
WIDTH = 960      # pixels
LEFT = 64        # start and end of the horizontal axis
RIGHT = 936
PANEL_HEIGHTS = (380, 84)  # the metric, the learning rate
MAX_LINES = 3000     # of metrics.jsonl, per run in a picture
MAX_NAME_CHARS = 40  # of a run, in the legend
START_SHARE = 0.2    # of a run, which the axis of a comparison may cut off
LINES = dict(solid='stroke-width="1.8"', faint='stroke-width="1" stroke-opacity=".35"',
             dashed='stroke-width="1.8" stroke-dasharray="6 4"')


# -----------------------------------------------------------------------------
# metrics.jsonl

def read_metrics(path, limit=math.inf):
    """Return the records (dicts) of the metrics.jsonl `path`, in order; [] if it is missing.

    limit: about this many lines, evenly spaced, the first and last three, and all with val_loss.
    Invalid lines, and lines without a number "iter", are left out.
    """
    if not os.path.isfile(path):  # e.g. a named pipe, which would block
        return []
    records = []
    with open(path, "rb") as f:
        total = sum(1 for _ in f)
        stride = 1 + int(total // limit)
        f.seek(0)
        # Three may be of a step, an evaluation and the test data.
        for line in (x for n, x in enumerate(f)
                     if n % stride == 0 or not 2 < n < total - 3 or b'"val_loss"' in x):
            with suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict) and to_number(record.get("iter")) is not None:
                    records.append(record)
    return records


def to_number(value):
    """Return an int or float as a float; `None` for other types, NaN and |value| >= 1e100."""
    return float(value) if type(value) in (int, float) and abs(value) < 1e100 else None


def curve(records, key, x="iter"):
    """Return the finite points [(x, y), ...] of the metric `key` in records of read_metrics().

    x: "iter" (step), "tokens", or "time" (minutes of training until the record).
    """
    points = []
    steps, minutes = [0], [0.0]  # at the end of each training line
    for r in (r for r in records if "loss" in r):
        n = max(1, r["iter"] + 1 - steps[-1])  # time_ms is the mean over these steps
        minutes.append(minutes[-1] + (to_number(r.get("time_ms")) or 0.0) / 60_000 * n)
        steps.append(r["iter"] + 1)
    for r in records:
        at = to_number(r.get(x))
        if x == "time":  # an evaluation at iter k precedes the step
            at = float(np.interp(r["iter"] + ("loss" in r), steps, minutes))
        y = to_number(r.get(key))
        if at is not None and y is not None:
            points.append((at, y))
    return points


def smooth(points, share=0.02):
    """Return `points` with each y averaged over 2 x `share` of the points, fewer at the ends."""
    x, y = np.array(points).T
    i = np.arange(len(y))
    half = np.minimum(max(1, int(len(y) * share)), i // 3)
    end = np.minimum(i + half + 1, len(y))
    totals = np.append(0.0, np.cumsum(y))
    means = (totals[end] - totals[i - half]) / (end - i + half)
    return list(zip(x.tolist(), means.tolist()))


# -----------------------------------------------------------------------------
# axes

class Axis:
    """A mapping of numbers to pixels, linear or logarithmic: axis(value) returns a float.

    It covers `values` with a margin of 4%, from the pixel `start` (small numbers) to `end`.
    from_zero: it begins at 0, without a margin.
    """

    def __init__(self, values, start, end, from_zero=False, log=False):
        self.start = start
        self.end = end
        self.log = log
        low = self.transform(min([*values, 0.0] if from_zero else values, default=0.0))
        high = self.transform(max(values, default=1.0))
        margin = 0.04 * (high - low)
        if high - low <= max(1e-12 * abs(high), 1e-200):  # a single value
            margin = abs(high) / 10 or 1.0
        self.low = low if from_zero else low - margin
        self.high = high + margin

    def transform(self, value):
        return math.log10(max(value, 1e-100)) if self.log else value

    def __call__(self, value):
        share = (self.transform(value) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, spacing):
        """Return round numbers to label, at least about `spacing` pixels apart if linear."""
        if self.log:
            digits = (1, 1.5, 2, 3, 4, 5, 7) if self.high - self.low < 2 else (1,)
            powers = range(math.floor(self.low), math.ceil(self.high) + 1)
            values = [digit * 10.0 ** k for k in powers for digit in digits]
            return [v for v in values if self.low <= math.log10(v) <= self.high]
        minimum = (self.high - self.low) * spacing / abs(self.end - self.start)
        power = 10.0 ** math.floor(math.log10(minimum))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= 0.999 * minimum)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [k * step for k in range(first, last + 1)]


def tick_label(value):
    """Return a number as short text for an axis: 6e-5, 2.5, 12000, 5e6."""
    return re.sub(r"e\+?(-?)0*", r"e\1", f"{value:.6g}")


# -----------------------------------------------------------------------------
# the picture

class Curve(NamedTuple):
    """A line of a chart: points [(x, y), ...] and an SVG color; name "" is not in the legend."""
    points: list
    color: str
    name: str = ""       # in the legend
    line: str = "solid"  # a key of LINES
    start: float = 0.0   # share of the horizontal axis that the vertical one may cut off


def loss_svg(runs, x="iter", metric="loss"):
    """Return a chart of runs as SVG text: the metric, and below it the learning rate.

    runs: [(name, records), ...], with records of read_metrics(). Parent folders that all names
    share are left out in the legend.
    x: "iter", "tokens" or "time".
    metric: a name without val_; val_METRIC is a dashed line.
    With several runs, the vertical axis fits the values after the first 20%.
    """
    curves = []
    rates = []
    shared = os.path.commonprefix([name for name, _ in runs]).rpartition(os.sep)[0] + os.sep
    start = START_SHARE if len(runs) > 1 else 0.0
    for i, (name, records) in enumerate(runs):
        name = name.removeprefix(shared)[-MAX_NAME_CHARS:]  # the end differs: the seed
        color = COLORS[i % len(COLORS)]
        for key, line in ((metric, "solid"), (f"val_{metric}", "dashed")):
            points = curve(records, key, x)
            if key == metric and len(points) > 60:
                curves.append(Curve(points, color, line="faint", start=start))
                points = smooth(points)
            label = f"{name}: {key} {points[-1][1]:.4f}" if points else ""
            curves.append(Curve(points, color, label, line, start))
        rates.append(Curve(curve(records, "lr", x), color))
    return draw_chart({metric: curves, "learning rate": rates}, X_LABELS[x])


def draw_chart(panels, x_label, log_x=False):
    """Return an SVG text: one or two panels with one horizontal axis, and a legend.

    panels: {title: Curves}, from the top. log_x: logarithmic; a linear horizontal axis begins at 0.
    """
    curves = [c for group in panels.values() for c in group]
    x = Axis([p[0] for c in curves for p in c.points], LEFT, RIGHT, not log_x, log_x)
    parts = []
    y = 4
    for k, c in enumerate(c for c in curves if c.name):  # the legend, in two columns
        column = LEFT + k % 2 * (RIGHT - LEFT) / 2
        y += 0 if k % 2 else 18
        parts.append(f'<path stroke="{c.color}" {LINES[c.line]} d="M{column} {y - 4}h18"/>')
        parts.append(draw_text(c.name, column + 24, y))
    for (name, group), height in zip(panels.items(), PANEL_HEIGHTS):
        parts += draw_panel(name, group, x, y + 32, height)
        y += 32 + height
    parts += [draw_text(tick_label(t), x(t), y + 18, "middle") for t in x.ticks(80)]
    parts.append(draw_text(x_label, (LEFT + RIGHT) / 2, y + 38, "middle"))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 48}" '
            f'width="{WIDTH}" height="{y + 48}" role="img" fill="none" stroke-linejoin="round" '
            f'font-family="system-ui, sans-serif" font-size="12">{"".join(parts)}</svg>\n')


def draw_panel(name, curves, x, top, height):
    """Return the SVG elements of a panel, as strings: title, grid, vertical axis and curves.

    x: the horizontal Axis. top, height: of the plot, in pixels; the title is above it.
    The vertical axis is logarithmic if the values are positive and span more than a factor of 3;
    for the name "learning rate" it is linear, from 0.
    """
    values = [p[1] for c in curves for p in c.points if p[0] >= c.start * c.points[-1][0]]
    is_rate = name == "learning rate"
    log = not is_rate and bool(values) and min(values) > 1e-100 and max(values) > 3 * min(values)
    y = Axis(values, top + height, top, is_rate, log)
    parts = [draw_text(name + " (log scale)" * log, LEFT, top - 7)]
    grid = f'<path stroke="{TEXT_COLOR}" stroke-opacity=".25" d="M'
    parts += [f'{grid}{x(t):.1f} {top}v{height}"/>' for t in x.ticks(80)]
    for t in y.ticks(40):
        parts.append(f'{grid}{LEFT} {y(t):.1f}H{RIGHT}"/>')
        parts.append(draw_text(tick_label(t), LEFT - 8, y(t) + 4, "end"))
    # A nested <svg> cuts off its content at its edges.
    parts.append(f'<svg y="{top}" height="{height}" viewBox="0 {top} {WIDTH} {height}">')
    for c in curves:
        points = [f"{x(a):.1f},{y(b):.1f}" for a, b in c.points]
        parts.append(f'<polyline stroke="{c.color}" {LINES[c.line]} points="{" ".join(points)}"/>')
        if c.line == "dashed" and len(points) <= 50:
            parts += [f'<circle fill="{c.color}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="3"/>'
                      for a, b in c.points]
    return [*parts, "</svg>"]


def draw_text(text, x, y, anchor="start"):
    return (f'<text fill="{TEXT_COLOR}" text-anchor="{anchor}" x="{x:.1f}" y="{y:.1f}">'
            f"{escape(printable(text))}</text>")
