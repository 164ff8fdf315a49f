"""Loss curves as SVG, with no plotting package: python -m train.plot out/a out/b --out compare.html

Training loss, validation loss and learning rate of one or several runs, by step, tokens or time,
for light and dark screens."""

import argparse
import json
import math
import os
import sys
from html import escape

from train.logger import compact, duration, write_text

MAX_POINTS = 1500  # of a curve: more than a screen shows
WIDTH, LEFT, RIGHT, LOSS_HEIGHT, LR_HEIGHT = 960, 64, 24, 380, 84  # pixels
AXES = dict(iter="step", tokens="tokens", time="training time")
TIME_UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))
# Okabe-Ito, told apart by colour-blind readers; the second of a pair is for dark screens.
COLORS = [("#0072b2", "#56b4e9"), ("#d55e00", "#ff8c42"), ("#009e73", "#2fd0a0"),
          ("#b8578f", "#e59cc8"), ("#8a6d00", "#f0e442"), ("#5b5bd6", "#a3a3ff")]


def _style():
    """The CSS of a picture: class names are shared by all pictures of a page."""
    def theme(back, text, soft, grid, colors):
        return (f".bg{{fill:{back}}}.ink{{fill:{text}}}.soft{{fill:{soft}}}.grid{{stroke:{grid}}}"
                + "".join(f".s{i}{{stroke:{c}}}.f{i}{{fill:{c}}}" for i, c in enumerate(colors)))
    light, dark = zip(*COLORS, strict=True)
    return ("text{font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}"
            ".title{font-size:15px;font-weight:600}.end{text-anchor:end}.mid{text-anchor:middle}"
            ".line{fill:none;stroke-linejoin:round;stroke-linecap:round}.raw{stroke-width:1;"
            "stroke-opacity:.35}.bold{stroke-width:1.8}.val{stroke-width:1.5}.grid{stroke-width:1}"
            + theme("#ffffff", "#1f2328", "#59636e", "#e4e8ec", light)
            + f"@media(prefers-color-scheme:dark){{"
              f"{theme('#0d1117', '#e6edf3', '#9198a1', '#262c36', dark)}}}")


# -----------------------------------------------------------------------------
# numbers

def read_metrics(path, limit=None):
    """The records of a metrics.jsonl, torn lines left out. With `limit`, every evaluation but only
    about that many training lines, evenly spaced: a long run is read quickly."""
    if not os.path.exists(path):
        return []
    with open(path, "rb") as f:
        step = 1 if limit is None else 1 + sum(1 for _ in f) // limit
        f.seek(0)
        records = []
        for n, line in enumerate(f):
            if n % step and b'"val_loss"' not in line:
                continue
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and isinstance(record.get("iter"), int):
                records.append(record)
    return records


def _number(value):
    """A finite float, or None: metrics.jsonl has "nan" and "inf" as strings."""
    good = isinstance(value, (int, float)) and math.isfinite(value)
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
    out, size = [], math.ceil(len(points) / (limit // 2))
    for i in range(0, len(points), size):
        part = range(i, min(i + size, len(points)))
        ends = {min(part, key=lambda j: points[j][1]), max(part, key=lambda j: points[j][1])}
        out += [points[j] for j in sorted(ends)]
    return out


# -----------------------------------------------------------------------------
# axes

def linear_ticks(low, high, wanted=6):
    """Round values (1, 2 or 5 times a power of ten) within [low, high]."""
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def log_ticks(low, high):
    """Round values in [low, high] for a logarithmic axis."""
    digits = (1, 2, 3, 4, 5, 6, 8) if high < 20 * low else (1, 2, 5) if high < 1e4 * low else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [m * 10.0 ** p for p in powers for m in digits if low <= m * 10.0 ** p <= high]


class Panel:
    """A plot area: data to pixels."""

    def __init__(self, top, height, x_max, ys, log=False, floor=None):
        low, high = min(ys, default=0.0), max(ys, default=1.0)
        low = low if floor is None else floor
        self.log, self.top, self.height, self.x_max = log, top, height, x_max or 1.0
        pad = 0.04 * (high - low) or abs(high) * 0.05 or 1.0
        self.low, self.high = (low / 1.06, high * 1.06) if log else (low - pad * (floor is None),
                                                                     high + pad)

    def x(self, value):
        return LEFT + value / self.x_max * (WIDTH - LEFT - RIGHT)

    def y(self, value):
        f = math.log if self.log else float
        share = (f(value) - f(self.low)) / (f(self.high) - f(self.low))
        return self.top + self.height * (1 - share)

    def grid(self, ticks):
        """Horizontal lines with their values."""
        out = []
        for t in ticks:
            y = self.y(t)
            out.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
                       f'<text class="soft end" x="{LEFT - 8}" y="{y + 4:.1f}">{_label(t)}</text>')
        return "".join(out)

    def line(self, points, css):
        """A polyline; nothing for fewer than two points."""
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        return f'<polyline class="line {css}" points="{path}"/>' if len(points) > 1 else ""

    def dots(self, points, color, name):
        """Markers that tell their values when pointed at."""
        radius = 3 if len(points) <= 50 else 1.5
        return "".join(
            f'<circle class="f{color}" cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="{radius}">'
            f"<title>{escape(name)}: {y:.4f}</title></circle>" for x, y in points)


def _label(value):
    """A tick of a vertical axis: 12k, 2.5, 6e-4."""
    if 0 < abs(value) < 1e-2:
        return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
    return f"{value:.10g}" if abs(value) < 1e4 else compact(value)


# -----------------------------------------------------------------------------
# pictures

def loss_svg(runs, x="iter", title=None):
    """An SVG text of `runs`, [(name, records of read_metrics), ...], by x: iter, tokens or time."""
    curves = []
    for i, (name, records) in enumerate(runs):
        raw, val = curve(records, "loss", x), curve(records, "val_loss", x)
        # Colour means the run; a single run has one colour for each kind of loss instead.
        colors = (0, 1) if len(runs) == 1 else (i % len(COLORS),) * 2
        curves.append((name, colors, raw, smooth(raw) if len(raw) > 60 else raw, val,
                       curve(records, "lr", x)))
    ys = [y for c in curves for points in (c[2], c[4]) for _, y in points]
    x_max = max((p[0] for c in curves for points in c[2:] for p in points), default=1.0)
    legend, height = _legend(curves)
    top = 58 + height
    log = bool(ys) and min(ys) > 0 and max(ys) / min(ys) > 3  # or the start flattens all the rest
    loss = Panel(top, LOSS_HEIGHT, x_max, ys, log)
    rates = [y for c in curves for _, y in c[5]]
    lr = Panel(top + LOSS_HEIGHT + 26, LR_HEIGHT, x_max, rates, floor=0.0)
    ticks = log_ticks if log else linear_ticks
    bottom = lr.top + LR_HEIGHT
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 48}" '
           f'width="{WIDTH}" height="{bottom + 48}" role="img"><style>{_style()}</style>'
           f'<rect class="bg" width="100%" height="100%"/>'
           f'<text class="title ink" x="{LEFT}" y="28">{escape(title or _title(runs))}</text>',
           legend, loss.grid(ticks(loss.low, loss.high)), lr.grid(linear_ticks(0, lr.high, 4)),
           _x_axis(loss, lr, bottom, x)]
    for _, (a, _), raw, mean, _, rate in curves:
        out += [loss.line(decimate(raw), f"raw s{a}") if mean is not raw else "",
                loss.line(decimate(mean), f"bold s{a}"), lr.line(decimate(rate), f"val s{a}")]
    for name, (_, b), _, _, val, _ in curves:  # above the training curves
        val = decimate(val, 300)
        out += [loss.line(val, f"val s{b}"), loss.dots(val, b, f"{name}, validation")]
    return "".join(out) + "</svg>\n"


def _title(runs):
    return runs[0][0] if len(runs) == 1 else f"{len(runs)} runs"


def _legend(curves):
    """(SVG, extra pixels of height) of the rows that name the curves and their last values."""
    if len(curves) == 1:
        (_, _, _, mean, val, _), best = curves[0], min((y for _, y in curves[0][4]), default=None)
        items = [(0, f"training loss{f' {mean[-1][1]:.4f}' if mean else ''}")]
        items += [(1, f"validation loss {val[-1][1]:.4f}, best {best:.4f}")] if val else []
    else:
        items = [(c[1][0], c[0] + (f" (validation {c[4][-1][1]:.4f})" if c[4] else ""))
                 for c in curves]
        items.append((None, "line: training, dots: validation"))
    out, x, y = [], LEFT, 50
    for color, text in items:
        wide = 40 + 6.6 * len(text)
        if x > LEFT and x + wide > WIDTH - RIGHT:
            x, y = LEFT, y + 18
        if color is not None:
            out.append(f'<path class="bold s{color}" d="M{x:.0f} {y - 4}h18"/>')
        out.append(f'<text class="soft" x="{x + 24 * (color is not None):.0f}" y="{y}">'
                   f"{escape(text)}</text>")
        x += wide
    return "".join(out), y - 24


def _x_axis(loss, lr, bottom, x):
    """Vertical lines through both panels, their values, and the names of the axes."""
    size, unit = next((s, f" ({n})") for s, n in TIME_UNITS if loss.x_max >= 2 * s or s == 1)
    size, unit = (size, unit) if x == "time" else (1, "")
    out = []
    for t in linear_ticks(0, loss.x_max / size, 8):
        at = f"{loss.x(t * size):.1f}"
        out.append(f'<path class="grid" d="M{at} {loss.top}v{LOSS_HEIGHT}'
                   f'M{at} {lr.top}v{LR_HEIGHT}"/><text class="soft mid" '
                   f'x="{at}" y="{bottom + 18}">{compact(t)}</text>')
    out.append(f'<text class="soft mid" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{bottom + 38}">'
               f'{AXES[x]}{unit}</text>')
    for panel, name in ((loss, "loss" + " (log scale)" * loss.log), (lr, "learning rate")):
        out.append(f'<text class="soft" x="{LEFT}" y="{panel.top - 7}">{name}</text>')
    return "".join(out)


def final_numbers(name, records):
    """What a table says of a run: name, steps, tokens, losses, speed and time, as texts."""
    def last(key, form):
        values = [y for _, y in curve(records, key)]
        return form(values[-1]) if values else "-"
    val, speed = curve(records, "val_loss"), sorted(y for _, y in curve(records, "tokens_per_sec"))
    best = min(val, key=lambda p: p[1], default=None)
    mean, seconds = smooth(curve(records, "loss")), curve(records, "loss", "time")
    return [name, f"{max(r['iter'] for r in records):,}", last("tokens", compact),
            f"{mean[-1][1]:.4f}" if mean else "-", last("val_loss", "{:.4f}".format),
            f"{best[1]:.4f} at {best[0]:,.0f}" if best else "-", last("val_ppl", "{:.2f}".format),
            last("val_bpb", "{:.3f}".format), compact(speed[len(speed) // 2]) if speed else "-",
            duration(seconds[-1][0]) if seconds else "-"]


def html_page(runs, x="iter"):
    """One page: the runs by step, tokens and time on tabs (no script), and their final numbers."""
    heads = ("run", "last step", "tokens", "training loss", "validation loss", "best", "perplexity",
             "bits per byte", "tokens/s", "training time")
    tabs = "".join(f'<input type="radio" name="x" id="{k}"{" checked" * (k == x)}><label for="{k}">'
                   f"by {name}</label>" for k, name in AXES.items())
    charts = "".join(f'<div class="chart {k}">{loss_svg(runs, k)}</div>' for k in AXES)
    show = ",".join(f"#{k}:checked~.{k}" for k in AXES)
    rows = "".join("<tr>" + "".join(f"<td>{escape(v)}</td>" for v in final_numbers(*run)) + "</tr>"
                   for run in runs)
    head = "".join(f"<th>{h}</th>" for h in heads)
    return f"""<!doctype html><html lang="en"><meta charset="utf-8">
<title>{escape(_title(runs))}</title>
<meta name="viewport" content="width=device-width,initial-scale=1"><style>
:root{{color-scheme:light dark}}
body{{font:14px system-ui,sans-serif;max-width:{WIDTH}px;margin:2em auto;padding:0 1em;
background:#fff;color:#1f2328}}
svg{{width:100%;height:auto}}.chart{{display:none}}{show}{{display:block}}
input{{position:absolute;opacity:0}}input:focus-visible+label{{outline:2px solid}}
label{{padding:.4em .9em;cursor:pointer;color:#59636e}}
input:checked+label{{color:inherit;border-bottom:2px solid #0072b2}}
.scroll{{overflow-x:auto}}table{{border-collapse:collapse;white-space:nowrap}}
th,td{{padding:.4em .8em;text-align:right;border-bottom:1px solid #8884}}
th:first-child,td:first-child{{text-align:left}}
@media(prefers-color-scheme:dark){{body{{background:#0d1117;color:#e6edf3}}
label{{color:#9198a1}}}}
</style>{tabs}{charts}<div class="scroll"><table><tr>{head}</tr>{rows}</table></div></html>
"""


# -----------------------------------------------------------------------------
# command line

def load_runs(paths):
    """[(name, records)] of run folders or metrics.jsonl files; ValueError names the empty ones."""
    runs, problems = [], []
    for path in paths:
        file = os.path.join(path, "metrics.jsonl") if os.path.isdir(path) else path
        records = read_metrics(file, limit=100_000)
        if not curve(records, "loss") and not curve(records, "val_loss"):
            what = "holds no numbers yet" if os.path.exists(file) else "is not there"
            problems.append(f"{path}: {file} {what}; expected the out_dir of a run")
        runs.append((os.path.normpath(path), records))
    if problems:
        raise ValueError("\n".join(problems))
    return runs


def main(argv=None):
    about = __doc__.split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m train.plot", description=about)
    parser.add_argument("runs", nargs="+", help="run folders (out_dir), or metrics.jsonl files")
    parser.add_argument("--x", choices=list(AXES), default="iter", help="axis (%(default)s)")
    parser.add_argument("--out", help=".svg or .html (default: loss.svg in the folder of a single "
                                      "run, else compare.svg)")
    args = parser.parse_args(argv)
    alone = args.runs[0] if len(args.runs) == 1 and os.path.isdir(args.runs[0]) else None
    out = args.out or (os.path.join(alone, "loss.svg") if alone else "compare.svg")
    try:
        if not out.endswith((".svg", ".html")):
            raise ValueError(f"--out {out}: expected a name that ends in .svg or .html")
        draw = html_page if out.endswith(".html") else loss_svg
        write_text(out, draw(load_runs(args.runs), args.x))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"Wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
