"""max_minutes: a length in minutes that becomes one in steps before the first of them."""

import contextlib
import os
import re
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import run
from runs import SMALL, assert_same, configure, go

from train.base.errors import CheckpointError, ConfigError, Stopped
from train.checkpoint import load_checkpoint
from train.config import load_config
from train.lr_scheduler import get_lr
from train.options import minutes
from train.options.minutes import Costs, temporary_folder
from train.robust import run_reporting_errors
from train.train import train

MINUTES = dict(max_minutes=0.02, max_iters=5000, lr_decay_iters=None, eval_interval=25,
               warmup_iters=3, eval_iters=1)


@pytest.mark.parametrize("changes", [{}, dict(eval_interval=0), dict(save_interval=0),
                                     dict(first=0.0), dict(save_interval=1)])
def test_the_time_of_a_run_is_that_of_its_parts(changes):
    """As a loop counts them: evaluated and saved where it is due, and at the end."""
    parts = dict(start=2.0, first=0.75, step=0.5, evaluation=3.0, save=0.25, end=1.0,
                 eval_interval=10, save_interval=4) | changes
    costs = Costs(**parts)
    for steps in (1, 4, 9, 10, 11, 20, 37):
        seconds = 2.0 + 1.0 + parts["first"]
        for done in range(1, steps + 1):
            seconds += 0.5
            for interval, cost in (("eval_interval", 3.0), ("save_interval", 0.25)):
                every = parts[interval]
                if every and (done % every == 0 or done == steps):
                    seconds += cost
        assert costs.seconds(steps) == seconds


class Rehearsed:
    """A run whose parts take what they say, by a clock of its own: evaluations without samples
    before the first step, and more for what is done the first time."""

    def __init__(self, **config):
        self.clock, self.done, self.evaluated = 100.0, 0, 0
        self.config = SimpleNamespace(max_minutes=1.0, eval_interval=10, save_every=5,
                                      eval_on_start=True, eval_iters=4, **config)
        self.compiler = SimpleNamespace(enabled=True)
        self.ranks = SimpleNamespace(is_main=True, world_size=1)
        self.folder = SimpleNamespace(wait=lambda: self.take(0.125))
        self.data = SimpleNamespace(val=SimpleNamespace(n_fixed=lambda n: n), test=None)

    def take(self, seconds):
        self.clock += seconds

    def train_step(self):
        self.done += 1
        self.take(8.0 if self.done == 2 else 0.5)

    def validate(self):
        self.evaluated += self.done > 0
        self.take(0.25 if not self.done else 6.0 if self.evaluated == 1 else 3.0)

    def save(self):
        self.take(0.0625)


def measure(run):
    return minutes.measure_costs(run.config, Rehearsed.train_step, Rehearsed.validate,
                                 Rehearsed.save, lambda config: contextlib.nullcontext(run))


def test_a_rehearsal_times_the_parts_as_the_run_meets_them(monkeypatch):
    run = Rehearsed()
    monkeypatch.setattr(minutes, "time", SimpleNamespace(monotonic=lambda: run.clock))
    costs = measure(run)
    assert costs == Costs(start=0.0, first=0.25, step=0.5, evaluation=3.0, save=0.0625, end=0.125,
                          eval_interval=10, save_interval=5)
    assert run.done == 3 + 6  # of which six are a twentieth of the minute
    run = Rehearsed()
    run.config.eval_on_start, run.data.test = False, SimpleNamespace(samples=9, n_fixed=lambda n: n)
    costs = measure(run)
    assert (costs.first, costs.end) == (0.0, 0.125 + 3.0 * 10 / 4)
    run = Rehearsed()
    run.config.eval_interval = 0
    costs = measure(run)
    assert (costs.first, costs.evaluation, costs.eval_interval) == (0.0, 0.0, 0)


TICK = 0.1  # seconds: what else a step takes is far less, also beside other tests


class Steady(torch.nn.Module):
    """A bigram model on a machine of constant speed: a forward ends with a tick of the clock."""

    def __init__(self):
        super().__init__()
        self.following = torch.nn.Embedding(256, 256)

    def forward(self, x, y):  # (B, T), (B, T)
        time.sleep(TICK - time.monotonic() % TICK)
        loss = torch.nn.functional.cross_entropy(self.following(x).flatten(0, 1), y.flatten())
        return loss, {}


def test_where_the_speed_is_constant_it_ends_in_time(data_dir, tmp_path):
    """To 5%, evaluations and saves in it, with the schedule at its end."""
    began = time.monotonic()
    c = configure(data_dir, tmp_path, **MINUTES | dict(
        max_minutes=0.15, gradient_accumulation_steps=1, lr_schedule="wsd", eval_iters=4,
        eval_interval=40))
    ended = train(c, Steady())
    assert time.monotonic() - began == pytest.approx(9, rel=0.05)
    steps, c = ended["iter_num"], c.replace(max_iters=ended["iter_num"])
    assert 0.5 * 9 / TICK < steps < 9 / TICK
    assert c.learning_rate / 10 == pytest.approx(get_lr(steps, c))
    assert get_lr(steps, c) < get_lr(steps - 1, c) < c.learning_rate / 5


def test_a_run_of_minutes_is_one_of_steps(data_dir, tmp_path, capsys):
    """The number that it says; with the schedule at its end; with the bits of a run that is given
    this many steps, also when it was stopped and goes on."""
    ended = train(configure(data_dir, tmp_path / "whole", **MINUTES))
    text = capsys.readouterr().out
    steps = int(re.search(r"max_minutes 0.02 is max_iters (\d+): .* ms per step", text)[1])
    assert ended["iter_num"] == steps > 0 and f"Length: {steps:,} steps" in text
    assert os.listdir(tmp_path) == ["whole"]  # the rehearsal left nothing
    assert not (tmp_path / "whole/.minutes").exists()
    state = load_checkpoint(tmp_path / "whole/ckpt.pt")
    assert state["config"]["max_iters"] == steps and state["config"]["max_minutes"] == 0.02
    c = load_config(None, SMALL | MINUTES | dict(max_iters=steps))
    assert get_lr(steps, c) == pytest.approx(c.learning_rate / 10)

    go(data_dir, tmp_path / "steps", **MINUTES | dict(max_iters=steps, max_minutes=None))
    assert_same(tmp_path / "whole", tmp_path / "steps")


def test_stopped_it_goes_on_to_the_same_length(data_dir, tmp_path, capsys):
    def stop(it, numbers):
        if it:
            os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Stopped):
        train(configure(data_dir, tmp_path / "a", **MINUTES), on_evaluation=stop)
    steps = int(re.search(r"is max_iters (\d+)", capsys.readouterr().out)[1])
    go(data_dir, tmp_path / "a", **MINUTES)
    assert "timing" not in capsys.readouterr().out
    go(data_dir, tmp_path / "b", **MINUTES | dict(max_iters=steps, max_minutes=None))
    assert_same(tmp_path / "a", tmp_path / "b")
    # Another number of minutes is refused; without one, max_iters is free as in any run.
    message = rf"already has a length of {steps} steps; .*remove max_minutes"
    with pytest.raises(Exception, match=message):
        train(configure(data_dir, tmp_path / "a", **MINUTES | dict(max_minutes=1.0)))
    longer = MINUTES | dict(max_minutes=None, max_iters=steps + 5, lr_decay_iters=None)
    assert train(configure(data_dir, tmp_path / "a", **longer))["iter_num"] == steps + 5


def test_stopped_while_it_times_steps_it_leaves_nothing(tmp_path):
    def job(config):
        ranks = SimpleNamespace(is_main=True, world_size=1)
        with temporary_folder(tmp_path / "out", ranks) as folder:
            os.mkdir(folder)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
    assert run_reporting_errors(None, job) == 143 and not (tmp_path / "out/.minutes").exists()


def test_two_ranks_agree(data_dir, tmp_path):
    (tmp_path / "c.yaml").write_text("".join(
        f"{k}: {v}\n" for k, v in (SMALL | MINUTES).items() if v is not None)
        + f"data_dir: {data_dir}\nout_dir: {tmp_path / 'out'}\n")
    code, output = run("--config", str(tmp_path / "c.yaml"), ranks=2)
    assert code == 0, output
    assert output.count("is max_iters") == 1 and "Training complete!" in output


def test_what_cannot_be_is_refused(data_dir, tmp_path):
    with pytest.raises(ConfigError, match="max_minutes"):
        load_config(None, ["--max_minutes", "0"])
    with pytest.raises(CheckpointError, match="out_dir: .* cannot be used"):
        (tmp_path / "file").touch()
        go(data_dir, tmp_path / "file/out", **MINUTES)
    with pytest.raises(CheckpointError, match="must: there is no ckpt.pt"):
        go(data_dir, tmp_path / "must", **MINUTES | dict(resume="must"))
    with pytest.raises(Exception, match="too short for one step on this machine: .* ms per step"):
        go(data_dir, tmp_path / "out", **MINUTES | dict(max_minutes=1e-4))
