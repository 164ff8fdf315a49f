"""One picture of lines and dots over a pair of axes, in the style of train/plot.py."""

from html import escape

from train.plot import LEFT, WIDTH, Panel, _style, linear_ticks, log_ticks

TOP, HEIGHT = 78, 360  # pixels


def chart(title, x_name, y_name, x_ticks, lines=(), dots=(), marks=()):
    """An SVG text. x counts from 0, x_ticks are [(x, text)]. lines: [(name or "", color 0 to 5, css
    class raw, bold or val, points)]; dots: [(name, color, [(x, y, tooltip)])]; marks: dashed lines
    at [(x, text)]. The vertical axis is logarithmic where values span more than a factor of 3."""
    points = [p for *_, part in (*lines, *dots) for p in part]
    ys, x_max = [p[1] for p in points], max([p[0] for p in points] + [x for x, _ in x_ticks])
    log = bool(ys) and min(ys) > 0 and max(ys) / min(ys) > 3
    panel = Panel(TOP, HEIGHT, x_max, ys, log)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" role="img" '
           f'viewBox="0 0 {WIDTH} {TOP + HEIGHT + 48}"><style>{_style()}</style>'
           f'<rect class="bg" width="100%" height="100%"/>',
           _text(title, LEFT, 26, "title ink"),
           _text(y_name + " (log scale)" * log, LEFT, TOP - 8),
           _text(x_name, WIDTH / 2, TOP + HEIGHT + 38, "soft mid"),
           _legend([(name, color) for name, color, *_ in (*lines, *dots) if name]),
           panel.grid((log_ticks if log else linear_ticks)(panel.low, panel.high))]
    for x, text in x_ticks:
        out += [f'<path class="grid" d="M{panel.x(x):.1f} {TOP}v{HEIGHT}"/>',
                _text(text, panel.x(x), TOP + HEIGHT + 18, "soft mid")]
    out += [panel.line(part, f"{css} s{color}") for _, color, css, part in lines]
    for x, text in marks:
        at, leftmost = panel.x(x), len(marks) > 1 and x == min(marks)[0]
        left = at > LEFT + 7 * len(text) and (leftmost or at > WIDTH - 7 * len(text))
        out += [f'<path class="bold s2" stroke-dasharray="5 4" d="M{at:.1f} {TOP}v{HEIGHT}"/>',
                _text(text, at - 6 if left else at + 6, TOP + 16, "ink" + " end" * left)]
    for _, color, part in dots:
        out += [f'<circle class="f{color}" cx="{panel.x(x):.1f}" cy="{panel.y(y):.1f}" r="4">'
                f"<title>{escape(text)}</title></circle>" for x, y, text in part]
    return "".join(out) + "</svg>\n"


def _text(text, x, y, css="soft"):
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _legend(items):
    out, x = [], LEFT
    for name, color in items:
        out.append(f'<path class="bold s{color}" d="M{x:.0f} 44h18"/>' + _text(name, x + 24, 48))
        x += 48 + 6.6 * len(name)
    return "".join(out)
