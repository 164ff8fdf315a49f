"""One picture of lines and dots over a pair of axes, in the style of train/plot.py."""

from html import escape

from train.plot import LEFT, RIGHT, WIDTH, Panel, _style, linear_ticks, log_ticks

TOP, HEIGHT = 78, 360  # pixels


def chart(title, x_name, y_name, x_ticks, lines=(), dots=(), marks=()):
    """An SVG text. x counts from 0: x_ticks are [(x, text)]. lines: [(name or "", color 0 to 5, css
    class raw, bold or val, points)]; dots: [(name, color, [(x, y, tooltip)])]; marks: vertical lines
    [(x, text)]. The vertical axis is logarithmic where the values span more than a factor of 3."""
    ys = [p[1] for *_, points in (*lines, *dots) for p in points]
    x_max = max([p[0] for *_, points in (*lines, *dots) for p in points] + [x for x, _ in x_ticks])
    log = bool(ys) and min(ys) > 0 and max(ys) / min(ys) > 3
    panel = Panel(TOP, HEIGHT, x_max, ys, log)
    ticks = (log_ticks if log else linear_ticks)(panel.low, panel.high)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {TOP + HEIGHT + 48}" '
           f'width="{WIDTH}" height="{TOP + HEIGHT + 48}" role="img"><style>{_style()}</style>'
           f'<rect class="bg" width="100%" height="100%"/>'
           f'<text class="title ink" x="{LEFT}" y="26">{escape(title)}</text>'
           f'<text class="soft" x="{LEFT}" y="{TOP - 8}">{escape(y_name)}'
           f'{" (log scale)" * log}</text>'
           f'<text class="soft mid" x="{WIDTH / 2}" y="{TOP + HEIGHT + 38}">{escape(x_name)}</text>',
           _legend([(name, color) for name, color, *_ in (*lines, *dots) if name]),
           panel.grid(ticks)]
    for x, text in x_ticks:
        out.append(f'<path class="grid" d="M{panel.x(x):.1f} {TOP}v{HEIGHT}"/><text class="soft mid" '
                   f'x="{panel.x(x):.1f}" y="{TOP + HEIGHT + 18}">{escape(text)}</text>')
    for x, text in marks:
        at, right = panel.x(x), panel.x(x) > WIDTH - 200
        out.append(f'<path class="bold s2" stroke-dasharray="5 4" d="M{at:.1f} {TOP}v{HEIGHT}"/>'
                   f'<text class="ink{" end" * right}" x="{at + (-6 if right else 6):.1f}" '
                   f'y="{TOP + 14 + 16 * [m[0] for m in marks].index(x)}">{escape(text)}</text>')
    out += [panel.line(points, f"{css} s{color}") for _, color, css, points in lines]
    for _, color, points in dots:
        out += [f'<circle class="f{color}" cx="{panel.x(x):.1f}" cy="{panel.y(y):.1f}" r="4">'
                f"<title>{escape(text)}</title></circle>" for x, y, text in points]
    return "".join(out) + "</svg>\n"


def _legend(items):
    out, x = [], LEFT
    for name, color in items:
        out.append(f'<path class="bold s{color}" d="M{x:.0f} 44h18"/>'
                   f'<text class="soft" x="{x + 24:.0f}" y="48">{escape(name)}</text>')
        x += 44 + 6.6 * len(name)
    return "".join(out)
