"""Pictures of runs: well-formed, true to the numbers, small; the command that compares runs."""

import json
import math
import pathlib
from xml.etree import ElementTree

import pytest
from processes import python

from train.options import loss_svg as plot

REPO = pathlib.Path(__file__).resolve().parent.parent
SVG = "{http://www.w3.org/2000/svg}"


def write_run(folder, steps=200, every=1, evals=50, floor=2.0):
    """A metrics.jsonl as a run writes it; its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for k in range(0, steps + 1, every):
        loss = floor + 3.0 * math.exp(-k / steps * 5)
        if evals and k % evals == 0:
            lines.append(dict(iter=k, tokens=k * 100, train_loss=None, val_loss=loss + 0.1,
                              val_ppl=math.exp(loss), val_bpb=None))
        if k < steps:
            lines.append(dict(iter=k, tokens=(k + 1) * 100, loss=loss, lr=1e-3 * (1 - k / steps),
                              grad_norm=1.0, time_ms=500.0, tokens_per_sec=200.0, mfu=None))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    return folder


def records(folder):
    return plot.read_metrics(folder / "metrics.jsonl")


def parse(text):
    svg = ElementTree.fromstring(text)
    width, height = map(float, svg.get("viewBox").split()[2:])
    for t in svg.iter(f"{SVG}text"):  # none is cut off; letters are 12 high
        assert 0 <= float(t.get("x")) <= width and 12 <= float(t.get("y")) <= height
    return svg


def texts(svg):
    return [t.text for t in svg.iter(f"{SVG}text")]


def lines(svg, style):
    """Points of the lines of a style (faint, solid or dashed), as [[(x, y), ...], ...]."""
    def style_of(line):
        if line.get("stroke-opacity"):
            return "faint"
        return "dashed" if line.get("stroke-dasharray") else "solid"
    return [[tuple(map(float, p.split(","))) for p in line.get("points").split()]
            for line in svg.iter(f"{SVG}polyline") if style_of(line) == style]


def command(*args):
    return python("-m", "train.tools.plot", *args)


def test_a_picture_of_one_run(tmp_path):
    svg = parse(plot.loss_svg([("out/a", records(write_run(tmp_path)))]))
    words = texts(svg)
    assert {"step", "learning rate", "loss"} <= set(words)
    assert words[0].startswith("a: loss 2.0") and words[1].startswith("a: val_loss 2.12")
    (raw,), (mean, rate), (val,) = (lines(svg, style) for style in ("faint", "solid", "dashed"))
    assert len(raw) == len(mean) == len(rate) == 200
    dots = [(float(c.get("cx")), float(c.get("cy"))) for c in svg.iter(f"{SVG}circle")]
    assert len(dots) == 5 and dots == val
    # The loss falls: on the screen, y grows downwards. x runs from left to right.
    assert raw[0][1] < raw[100][1] < raw[199][1] and raw[0][0] == plot.LEFT
    assert [x for x, _ in raw] == sorted(x for x, _ in raw)


def test_points_are_where_their_values_are(tmp_path):
    """The mark at a tick's value and the grid line of that tick have the same height."""
    rows = [dict(iter=k, val_loss=v) for k, v in ((0, 4.0), (50, 3.0), (100, 2.0))]
    svg = parse(plot.loss_svg([("r", rows)]))
    ticks = {t.text: float(t.get("y")) - 4 for t in svg.iter(f"{SVG}text")
             if t.get("text-anchor") == "end"}
    marks = [(float(c.get("cx")), float(c.get("cy"))) for c in svg.iter(f"{SVG}circle")]
    assert [y for _, y in marks] == pytest.approx([ticks["4"], ticks["3"], ticks["2"]], abs=0.1)
    across = {t.text: float(t.get("x")) for t in svg.iter(f"{SVG}text")
              if t.get("text-anchor") == "middle"}
    assert [x for x, _ in marks] == pytest.approx([across["0"], (across["0"] + across["100"]) / 2,
                                                   across["100"]], abs=0.1)


def luminance(color):
    """As WCAG 2.2 defines it."""
    channels = [int(color[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))


def test_text_and_lines_can_be_seen_on_light_and_on_dark_screens():
    for color in (*plot.COLORS, plot.TEXT_COLOR):
        for background in ("#ffffff", "#0d1117"):
            low, high = sorted(luminance(c) + 0.05 for c in (color, background))
            assert high / low > (4 if color == plot.TEXT_COLOR else 3)


def test_names_are_escaped(tmp_path):
    name = 'a<b> & "c" <script>'
    rows = records(write_run(tmp_path))
    assert texts(parse(plot.loss_svg([(name, rows)])))[0].startswith(f"{name}: loss")


@pytest.mark.parametrize("rows", [
    [],
    [dict(iter=0, loss="nan", lr=0.0)],
    [dict(iter=0, loss=3.0, lr=1e-3)],
    [dict(iter=0, val_loss=3.0)],
    [dict(iter=k, loss=2.0, lr=0.0) for k in range(100)],
    [dict(iter=k, loss=-1.0 * k, lr=1e-9) for k in range(100)],
    [dict(iter=k, loss=10.0 ** k, lr=1e3) for k in range(12)], [dict(iter=-5, loss=3.0)],
    [dict(iter=k, loss=5.0 - k) for k in range(6)],
    [dict(iter=k, loss=math.nan if k % 2 else 2.0, lr=math.inf) for k in range(6)],
    [dict(iter=k, loss="inf" if k % 2 else 2.0 + k, lr=None) for k in range(100)],
    [dict(iter=k, loss=None, tokens=None, time_ms="nan") for k in range(3)]])
@pytest.mark.parametrize("x", ["iter", "tokens", "time"])
def test_odd_runs_are_drawn(rows, x):
    svg = parse(plot.loss_svg([("odd", rows)], x))
    for style in ("faint", "solid", "dashed"):
        assert all(math.isfinite(v) for line in lines(svg, style) for point in line for v in point)
    parse(plot.loss_svg([("odd", rows), ("odder", rows)], x))


def test_log_scale_only_where_it_helps(tmp_path):
    steep, flat = write_run(tmp_path / "a", floor=0.1), write_run(tmp_path / "b", floor=6.0)
    below = [dict(iter=k, loss=1.0 - k) for k in range(10)]
    assert "loss (log scale)" in texts(parse(plot.loss_svg([("a", records(steep))])))
    assert "loss (log scale)" not in texts(parse(plot.loss_svg([("b", records(flat))])))
    assert "loss (log scale)" not in texts(parse(plot.loss_svg([("c", below)])))


def test_axes_by_tokens_and_time(tmp_path):
    rows = records(write_run(tmp_path, steps=2000, every=10, evals=500))
    by_time = plot.curve(rows, "loss", "time")
    # Lines stand for the steps since the line before: 0.5 s each, the last line is of step 1990.
    assert by_time[0] == (pytest.approx(0.5 / 60), rows[1]["loss"])
    assert by_time[-1][0] == pytest.approx(1991 * 0.5 / 60)
    # An evaluation precedes the step of its number.
    assert [x for x, _ in plot.curve(rows, "val_loss", "time")][:2] == [
        0.0, pytest.approx(500 * 0.5 / 60)]
    assert "training time (minutes)" in texts(parse(plot.loss_svg([("a", rows)], "time")))
    words = texts(parse(plot.loss_svg([("a", rows)], "tokens")))
    assert "tokens (or rows)" in words and "100000" in words


@pytest.mark.parametrize("low, high", [
    (0, 1), (2.9, 10.4), (0, 5e6), (3.01, 3.02), (-4, 17), (0, 1e-7)])
def test_linear_ticks_are_round_and_few(low, high):
    ticks = plot.Axis([low, high], 0, 320).ticks(40)
    gap = ticks[1] - ticks[0]
    assert 3 <= len(ticks) <= 9 and low - gap < ticks[0] and ticks[-1] < high + gap
    assert f"{gap:.6e}"[0] in "125" and float(f"{gap:.6e}"[1:8]) == 0
    assert ticks == pytest.approx([ticks[0] + gap * i for i in range(len(ticks))])


@pytest.mark.parametrize("value, text", [
    (0, "0"), (2.5, "2.5"), (6e-4, "0.0006"), (1.5e-5, "1.5e-5"), (12_000, "12000"),
    (0.30000000000000004, "0.3"), (1e-10, "1e-10"), (1.25e6, "1.25e6"), (3e12, "3e12")])
def test_tick_labels(value, text):
    assert plot.tick_label(value) == text


def test_smoothing_neither_lags_nor_invents():
    line = [(k, 5.0 - 0.01 * k) for k in range(300)]
    assert plot.smooth(line)[:290] == [(x, pytest.approx(y)) for x, y in line[:290]]
    noisy = [(k, 2.0 + (-1) ** k) for k in range(300)]
    assert all(abs(y - 2.0) < 0.2 for _, y in plot.smooth(noisy)[50:])


def test_read_metrics_skips_what_is_torn(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"iter": 0, "loss": 1.0}\n{"iter": 1, "lo\n[1]\n"x"\n{"loss": 1}\n\xff\xfe\n'
                     b'{"iter": 2, "val_loss": 1.0}\n{"iter": 3')
    assert [r["iter"] for r in plot.read_metrics(path)] == [0, 2]
    assert plot.read_metrics(tmp_path / "nowhere") == []


def test_reading_a_part_keeps_every_evaluation(tmp_path):
    write_run(tmp_path, steps=5000, evals=100)
    some = plot.read_metrics(tmp_path / "metrics.jsonl", limit=500)
    first = next(r["iter"] for r in plot.read_metrics(tmp_path / "metrics.jsonl") if "loss" in r)
    assert sum("val_loss" in r for r in some) == 51 and 400 < len(some) < 600
    for step in range(5001, 5004):  # the first step is shown, and the last of a complete run
        with open(tmp_path / "metrics.jsonl", "a") as f:
            f.write("".join(f'{{"iter": {step}, "{name}": 1.0}}\n'
                            for name in ("loss", "val_loss", "test_loss")))
        some = plot.read_metrics(tmp_path / "metrics.jsonl", limit=500)
        assert [r["iter"] for r in some[-3:]] == [step] * 3
        assert next(r["iter"] for r in some if "loss" in r) == first


def test_comparing_runs(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", floor=2.5)
    done = command(a, b / "metrics.jsonl", "--x", "tokens", "--out", tmp_path / "both.svg")
    assert done.returncode == 0 and done.stdout == f"Wrote {tmp_path}/both.svg\n", done.stderr
    svg = ElementTree.parse(tmp_path / "both.svg").getroot()
    assert len(lines(svg, "faint")) == 2
    assert [line.get("stroke") for line in svg.iter(f"{SVG}polyline")] == [
        plot.COLORS[i] for i in (0, 0, 0, 1, 1, 1, 0, 1)]
    assert texts(svg)[1].startswith("a: val_loss 2.12")  # without the folder of both
    assert texts(svg)[2].startswith("b/metrics.jsonl: loss ")


def test_a_comparison_shows_the_end_of_the_runs():
    """Losses that fall from 10 and end at 1.4 and 1.6: these are far apart, step 0 is cut off. In
    the picture of one run it is not."""
    def run(end):
        steps = range(0, 101, 5)
        return [dict(iter=k, val_loss=end + (10 - end) * math.exp(-k / 5)) for k in steps]
    svg = parse(plot.loss_svg([("a", run(1.4)), ("b", run(1.6))]))
    low, high = lines(svg, "dashed")
    panel, _ = svg.findall(f"{SVG}svg")  # cuts off its content
    top, height = float(panel.get("y")), float(panel.get("height"))
    assert panel.get("viewBox") == f"0 {top:g} {plot.WIDTH} {height:g}"
    assert low[-1][1] - high[-1][1] > height / 3
    assert low[0][1] < top and top <= low[4][1] < low[-1][1] <= top + height
    (alone,) = lines(parse(plot.loss_svg([("a", run(1.4))])), "dashed")
    assert all(top - 18 <= y <= top + height for _, y in alone)


def test_of_long_names_the_end_is_shown():
    name = 60 * "x" + "seed_1"
    svg = parse(plot.loss_svg([(name, [dict(iter=0, loss=1.0)])]))
    short = texts(svg)[0].partition(": loss")[0]
    assert len(short) == plot.MAX_NAME_CHARS and short.endswith("seed_1")


def test_a_comparison_lands_beside_the_runs(tmp_path):
    write_run(tmp_path / "out" / "a"), write_run(tmp_path / "out" / "deep" / "b")
    env = {"PYTHONPATH": str(REPO)}
    for folder, runs, where in ((tmp_path, ("out/a", "out/deep/b"), "out/compare.svg"),
                                (tmp_path / "out", ("a", "deep/b/metrics.jsonl"), "compare.svg"),
                                (tmp_path / "out/a", (".", "../deep/b"), "../compare.svg")):
        done = python("-m", "train.tools.plot", *runs, cwd=folder, env=env)
        assert done.stdout == f"Wrote {where}\n", done.stderr
        assert (tmp_path / "out" / "compare.svg").exists()
        (tmp_path / "out" / "compare.svg").unlink()


def test_another_number_of_any_system(tmp_path):
    rows = [dict(iter=k, val_loss=2.0, val_f1_macro=k / 100) for k in (0, 50, 100)]
    rows += [dict(iter=k, loss=2.0, lr=0.1, f1_macro=k / 50) for k in range(50)]
    (tmp_path / "a").mkdir()
    (tmp_path / "a/metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    for name in ("val_f1_macro", "f1_macro"):
        assert command(tmp_path / "a", "--metric", name).returncode == 0
        svg = ElementTree.parse(tmp_path / "a/f1_macro.svg").getroot()
        assert {"f1_macro", "learning rate", "a: f1_macro 0.9800",
                "a: val_f1_macro 1.0000"} <= set(texts(svg))
        assert len(list(svg.iter(f"{SVG}circle"))) == 3 and len(lines(svg, "solid")[0]) == 50
    done = command(tmp_path / "a", "--metric", "val_accuracy")
    assert done.returncode == 2 and "no metric 'val_accuracy', expected one of " in done.stderr
    assert "f1_macro, iter, loss, lr" in done.stderr


def test_numbers_are_those_of_json():
    values = [1, 2.5, 10**400, True, "nan", None, [1], float("nan")]
    assert [plot.to_number(v) for v in values] == [1.0, 2.5] + 6 * [None]


@pytest.mark.parametrize("low, high, expected", [
    (1.35, 5.5, {1.5, 2, 3, 4, 5}), (1.0, 3.2, {1, 1.5, 2, 3}), (1.2, 11, {1.5, 2, 3, 5, 10}),
    (1e-7, 1.0, {1e-7, 1e-4, 1e-1}), (0.9, 1e9, {1, 1e3, 1e6})])
def test_log_axes_have_ticks_where_the_curve_lies(low, high, expected):
    ticks = plot.Axis([low, high], 0, 320, log=True).ticks(40)
    assert all(any(t == pytest.approx(e) for t in ticks) for e in expected), ticks
    assert 3 <= len(ticks) <= 17 and ticks == sorted(ticks)


def test_one_run_is_drawn_into_its_folder(tmp_path):
    write_run(tmp_path / "a")
    assert command(tmp_path / "a").returncode == 0
    assert (tmp_path / "a" / "loss.svg").exists()


def test_bad_input_is_told_at_once(tmp_path):
    good, empty = write_run(tmp_path / "good"), tmp_path / "empty"
    empty.mkdir()
    (empty / "metrics.jsonl").write_text("")
    done = command(good, empty, tmp_path / "missing", "--out", tmp_path / "x.svg")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.count("has no numbers") == 1
    assert f"{empty}" in done.stderr
    assert not (tmp_path / "x.svg").exists()
    for out in ("x.png", "x.html", tmp_path / "no" / "folder" / "x.svg"):
        done = command(good, "--out", out)
        assert done.returncode == 2 and str(out) in done.stderr and "Traceback" not in done.stderr
    assert command(good, "--x", "miles").returncode == 2
