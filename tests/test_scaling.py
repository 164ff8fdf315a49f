"""python -m train.tools.scaling: the law that is fitted, its runs, and what is printed."""

import re
import signal
import sys
import threading
import time

import numpy as np
import pytest
from runs import planted_children

from train import config as config_file
from train.base.errors import ConfigError
from train.config import load_config
from train.distributed import Ranks
from train.setup import open_data
from train.tools import scaling
from train.tools.scaling import Law, fit_law

pytest.importorskip("scipy")

LAW = Law(1.0, 60.0, 300.0, 0.4, 0.35)


def points(law=LAW, budgets=(1e12, 3e12, 1e13), ratios=(2, 7, 25, 90), noise=0.0, seed=0):
    """n, d, loss (P,) of runs of these budgets and tokens a weight."""
    n = np.array([(budget / 6 / ratio) ** 0.5 for budget in budgets for ratio in ratios])
    d = np.repeat(budgets, len(ratios)) / 6 / n
    errors = np.random.default_rng(seed).normal(0.0, noise, len(n))
    return n, d, law.loss(n, d) * np.exp(errors)


# -----------------------------------------------------------------------------
# the law

@pytest.mark.parametrize("law", [LAW, Law(1.7, 406.4, 410.7, 0.34, 0.28)])  # the paper's
def test_the_fit_finds_what_was_planted(law):
    assert fit_law(*points(law)) == pytest.approx(law, rel=2e-3)


def test_the_fit_predicts_through_noise_and_past_an_outlier():
    n, d, loss = points(noise=2e-3, seed=1)
    at = LAW.best(4e13)
    assert fit_law(n, d, loss).loss(*at) == pytest.approx(LAW.loss(*at), rel=5e-3)
    loss[5] *= 1.2  # a run that went wrong counts linearly: by squares the law would follow it
    assert fit_law(n, d, loss).loss(*at) == pytest.approx(LAW.loss(*at), rel=5e-3)


@pytest.mark.parametrize("budget", [1e12, 1e18])
def test_the_best_size_is_the_papers_and_that_of_a_search(budget):
    n, d = LAW.best(budget)
    G = (LAW.alpha * LAW.A / (LAW.beta * LAW.B)) ** (1 / (LAW.alpha + LAW.beta))
    assert n == pytest.approx(G * (budget / 6) ** (LAW.beta / (LAW.alpha + LAW.beta)))
    assert 6 * n * d == pytest.approx(budget)
    sizes = np.geomspace(1e3, 1e12, 100_001)
    assert n == pytest.approx(sizes[LAW.loss(sizes, budget / 6 / sizes).argmin()], rel=1e-3)


# -----------------------------------------------------------------------------
# the runs

@pytest.mark.parametrize("depth, width, heads, hidden, rate", [
    (1, 64, 2, 256, 1.41), (2, 96, 3, 384, 1.15), (3, 128, 4, 512, 1.00), (7, 256, 8, 1024, 0.71),
    (15, 512, 16, 2048, 0.50)])
def test_keys_of_a_depth(depth, width, heads, hidden, rate):
    config = load_config(None, dict(n_embd=128, n_head=4, learning_rate=1.4e-2, min_lr=1.4e-3))
    keys = scaling.depth_keys(depth, 32, config)
    assert (keys["n_layer"], keys["n_embd"], keys["n_head"]) == (depth, width, heads)
    assert keys["n_embd"] // keys["n_head"] == 32
    got = load_config(None, keys)
    assert (got.n_hidden or 4 * got.n_embd) == hidden
    assert keys["learning_rate"] / 1.4e-2 == pytest.approx(rate, abs=5e-3)
    assert keys["min_lr"] == pytest.approx(keys["learning_rate"] / 10)


def test_a_run_costs_its_budget(data_dir):
    """Counted by hand: 6 for each weight of a product, 12 n_layer n_embd T for attention; the
    embedding of 256 rows is the output layer as well."""
    rest = [f"--data_dir={data_dir}", "--block_size=32", "--batch_size=2", "--vocab_size=256",
            "--gradient_accumulation_steps=3", "--mlp=relu2", "--max_epochs=9",
            "--lr_decay_iters=7", "--device=cpu", "--n_hidden=5", "--config=train/config_test.yaml"]
    config = config_file.load_argv(rest)
    data = open_data(config, Ranks())
    for depth, width in ((1, 32), (3, 64)):
        p = scaling.plan_run(rest, config, 16, data, 3e8, depth)
        weights = 12 * depth * width**2 + (2 * depth + 1) * width + 256 * width  # norms' as well
        a_token = 6 * weights + 12 * depth * width * 32
        assert p.n == a_token / 6 and p.d % (6 * 32) == 0
        assert abs(p.d * a_token - 3e8) <= a_token * 6 * 32 / 2
        c = config_file.load_argv(p.arguments)
        assert (c.max_iters * 6 * 32, c.n_layer, c.n_embd) == (p.d, depth, width)
        assert c.eval_interval == c.max_iters and not c.eval_on_start
        assert c.max_epochs is c.lr_decay_iters is None


@pytest.fixture
def go(tmp_path, monkeypatch):
    """go(arguments...): the exit code; go.started: commands so far. A model of depth L has L (L +
    1) x 2 weights."""
    started = planted_children(monkeypatch)
    small = ["--model=planted", "--law", "--batch_size=4", "--gradient_accumulation_steps=1",
             "--device=cpu", "--warmup_iters=0", "--seed=1", "--num_threads=1", "--compile=false",
             "--lr_schedule=constant", "--learning_rate=1e-6", "--log_interval=1000", "--width=2"]

    def run(*args):
        return scaling.main([*small, "--out", str(tmp_path / "scaling"), *args])
    run.started = started
    yield run


SIX = ("--budgets", "2000,500,1000", "--depth", "2,1")
RUNS = ("--budgets", "2000,500,1000", "--depth", "2,1,3")


@pytest.mark.ci
def test_three_budgets_predict_a_run_of_four_times_the_largest(go, capsys):
    """Of a planted law: the table, the law, the best sizes, the larger run."""
    assert go(*SIX, "--jobs=2") == 0
    text = capsys.readouterr().out
    law = Law(1.0, 2.0, 20.0, 0.5, 0.4)
    rows = [line.split() for line in text.splitlines() if re.match(r" *(500|1000|2000) +\d", line)]
    assert [r[:3] for r in rows] == [[b, str(k), str(2 * k * (k + 1))] for b in (
        "500", "1000", "2000") for k in (1, 2)]
    for budget, _, n, d, ratio, loss in rows:
        n, d = int(n), int(d.replace(",", ""))
        assert abs(6 * n * d - float(budget)) <= 6 * n * 2 and float(ratio) == round(d / n, 1)
        assert float(loss) == pytest.approx(law.loss(n, d), abs=1e-4)
    median, most = map(float, re.search(
        r"from 6 runs, ([\d.]+)% off in the median, ([\d.]+)% at most", text).groups())
    assert median <= most < 0.1
    n, d, expected = (float(x.replace(",", "")) for x in re.search(
        r"8000 FLOPs, depth \d, ([\d,]+) weights, ([\d,]+) tokens: expected ([\d.]+)",
        text).groups())
    assert expected == pytest.approx(law.loss(n, d), rel=1e-3)
    assert len(go.started) == 6

    # Again, there is nothing to do.
    assert go(*SIX) == 0
    again = capsys.readouterr().out
    assert len(go.started) == 6 and f"expected {expected:.4f}" in again
    command = next(line for line in again.splitlines() if "run_train.py" in line)
    assert "--model=planted" in command and "--n_layer=" in command


@pytest.mark.ci
@pytest.mark.matrix(126)
def test_a_run_that_is_killed_is_a_row_and_no_point(go, capsys):
    """kill -9 of some of the runs a law is fitted to -> they are rows of the table, left out of the
    fit, and tried again by the same command"""
    assert go(*RUNS, "--fatal_depth=2") == 0
    text = capsys.readouterr().out
    assert text.count(" crash\n") == 3 and "from 6 runs" in text
    assert go("--budgets", "250,500,1000", "--depth", "1,2", "--fatal_depth=2") == 2
    said = capsys.readouterr()
    assert len(go.started) == 9 + 4
    assert "needs 6 runs that end with a loss" in said.err and " crash" in said.out


def test_too_few_runs_for_a_fit_are_refused_before_training(go, capsys):
    assert go("--budgets", "500,1000", "--depth", "1,2") == 2
    assert "needs 6 runs" in capsys.readouterr().err and go.started == []


@pytest.mark.parametrize("law", [(2.4, 3e-7, 3.4, 0.01, 0.01), (0.1, 1e9, 3.4, 3.0, 0.5)])
def test_runs_that_determine_no_law_are_no_law(go, capsys, monkeypatch, law):
    """At the bound of the fit a power of the best size can underflow."""
    monkeypatch.setattr(scaling, "fit_law", lambda *points: Law(*law))
    assert go(*SIX) == 2
    assert "these runs determine no law" in capsys.readouterr().err


def test_the_larger_run_costs_its_budget(go, capsys, monkeypatch):
    """Also where the law prefers depth 48, of which a single step costs 14 times the budget."""
    monkeypatch.setattr(scaling, "fit_law", lambda *points: Law(0.0, 6.8, 6.2, 0.16, 0.04))
    assert go(*SIX) == 0
    n, d = (int(x.replace(",", "")) for x in re.search(
        r"8000 FLOPs, depth \d+, ([\d,]+) weights, ([\d,]+) tokens: expected",
        capsys.readouterr().out).groups())
    assert 6 * n * d <= 1.1 * 8000


def test_depths_that_the_configuration_excludes_are_left_out(go, capsys, monkeypatch):
    """As with n_kv_head 2, which must divide depth + 1 heads; 2 would be the best depth."""
    def load(path, values):
        if values["n_layer"] == 2:
            raise ConfigError(["n_kv_head (2) must divide n_head (3)"])
        return config_file.load_config(path, values)
    monkeypatch.setattr(scaling, "load_config", load)
    assert go("--budgets", "2000,500,1000", "--depth", "3,1") == 0
    out = capsys.readouterr().out
    assert "FLOPs, depth 1, " in out or "FLOPs, depth 3, " in out


@pytest.mark.ci
@pytest.mark.matrix(126)
def test_a_stop_keeps_what_is_done_and_the_same_command_goes_on(go, tmp_path, capsys):
    """SIGTERM while models of a law are trained -> exit 143; the same command takes the runs that
    are done, resumes the one that was stopped, and trains the rest"""
    long = ["--budgets", "500,30000", "--depth", "1,2,3", "--save_interval=5"]
    pattern = "scaling/30000_depth_1_*/"

    def interrupt():
        while not list(tmp_path.glob(f"{pattern}ckpt.pt")):
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
    threading.Thread(target=interrupt).start()
    assert go(*long) == 128 + signal.SIGTERM
    assert "the same command resumes" in capsys.readouterr().err and len(go.started) == 4
    folder, = tmp_path.glob(pattern)
    assert not (folder / "result.json").exists()
    assert go(*long) == 0
    assert capsys.readouterr().out.count("(cached)") == 3 and len(go.started) == 4 + 3
    assert "Resuming from" in (folder / "console.log").read_text()
    assert (folder / "result.json").exists()


@pytest.mark.parametrize("args, message", [
    (["--budgets=1e3", "--depth=1"], "two --budgets or more"),
    (["--budgets=1e3,1e3", "--depth=1"], "two --budgets"),
    (["--budgets=-1,5", "--depth=1"], "--budgets: must be above 0"),
    (["--budgets=1,nan", "--depth=1"], "a finite number, got 'nan'"),
    (["--budgets=1,1e300", "--depth=1"], "--budgets: must be at most 1e+30"),
    ([*RUNS, "--larger=1e300"], "--larger: must be at most 1e+30"),
    ([*RUNS, "--jobs=0"], "--jobs: must be at least 1"),
    ([*RUNS, "--depth=0,1"], "--depth: must be at least 1"),
    ([*RUNS, "--lerning_rate=1"], "unknown key")])
def test_what_cannot_be_is_refused_before_any_work(go, args, message, capsys):
    assert go(*args) == 2 and not go.started
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text, item", [("1e3,many", "many"), ("1e3;2e3", "1e3;2e3")])
def test_what_is_no_number_is_refused(go, text, item, capsys):
    assert go("--budgets", text, "--depth=1") == 2
    assert f"--budgets: expected a finite number, got {item!r}" in capsys.readouterr().err


def test_data_that_are_not_there_are_named(tmp_path, capsys):
    assert scaling.main([*RUNS, f"--data_dir={tmp_path}/none", f"--out={tmp_path}/out"]) == 2
    assert f"{tmp_path}/none" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_without_scipy_it_says_so(go, monkeypatch, capsys):
    for name in ("scipy", "scipy.optimize"):
        monkeypatch.setitem(sys.modules, name, None)
    assert go(*RUNS) == 2 and not go.started
    assert "pip install scipy" in capsys.readouterr().err
