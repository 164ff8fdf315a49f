"""train/device.py, batches ahead and the clock with a time, a machine and GPUs that the test sets:
what is timed,
what is printed of it, and what is decided by it."""

import builtins
import io
import pathlib
import time
import types

import pytest
import torch
from torch import nn

from train import device, logger
from train.base import memory
from train.config import TrainConfig
from train.dataloader import Prefetcher
from train.device import should_compile
from train.system import flops_per_step


class Now:
    """time.perf_counter, which moves when told."""

    def __init__(self, monkeypatch):
        self.seconds = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.seconds)

    def move(self, seconds):
        self.seconds += seconds


@pytest.fixture
def now(monkeypatch):
    return Now(monkeypatch)


# --- the clock

def test_a_lap_is_seconds_a_step_without_what_was_away(now):
    clock, said, batches = logger.Clock(), [], types.SimpleNamespace(seconds=0.0)
    now.move(50)
    clock.start(10)
    now.move(8)
    with clock.away():
        now.move(5)
    assert clock.lap(13, batches, said.append) == 8 / 4  # steps 10 to 13
    assert clock.total_away == 5
    now.move(3)
    assert clock.lap(14, batches, said.append) == 3
    with pytest.raises(KeyError), clock.away():
        now.move(2)
        raise KeyError
    assert clock.total_away == 7 and not said
    now.move(1)
    assert clock.lap(14, batches, said.append) == 1  # no step since: that of one


@pytest.mark.parametrize("passed, loading, told", [
    (10.0, 3.0, None), (10.0, 3.1, "31%"), (2.0, 1.0, None), (2.0, 1.01, "50%"),
    (3.0, 1.0, None), (100.0, 90.0, "90%")])
def test_slow_batches_are_told_where_they_are_a_share_of_the_time(now, passed, loading, told):
    clock, said = logger.Clock(), []
    now.move(passed)
    batches = types.SimpleNamespace(seconds=loading)
    clock.lap(0, batches, said.append)
    assert batches.seconds == 0
    assert len(said) == (told is not None)
    assert not told or said[0].startswith(f"{told} of the time is spent reading batches")


def test_the_time_left_has_the_evaluations_that_come(now):
    """Not the one before the first step, of 60 s; then 5 s for each 10 steps."""
    clock = logger.Clock()
    with clock.away():
        now.move(60.0)
    assert clock.time_left(0, 99, 0.5) == 99 * 0.5
    for it in (10, 20):
        with clock.away():
            now.move(5.0)
        assert clock.time_left(it, 99 - it, 0.5) == pytest.approx((99 - it) * (0.5 + 0.5))
    assert clock.time_left(99, 0, 0.5) == 0.0


# --- batches ahead

class Reads:
    """A loader that notes the steps it was asked for."""

    def __init__(self, **more):
        self.steps = []
        self.__dict__ |= more

    def get_batch(self, device, step):
        self.steps.append(step)
        return step, str(device)


@pytest.mark.parametrize("more, ahead", [({}, 2), (dict(calls_per_chunk=3), 4)])
def test_batches_are_read_as_far_ahead_as_the_loader_reads_at_once(more, ahead):
    loader = Reads(**more)
    batches = Prefetcher(loader, torch.device("cpu"))
    for step in (0, 1, 2):
        assert batches.get(step) == (step, "cpu")
        assert [*batches.ahead] == list(range(step + 1, step + ahead))
    assert batches.get(9) == (9, "cpu")
    batches.thread.shutdown()
    assert loader.steps == [*range(ahead + 2), *range(9, 9 + ahead)]
    computes = Prefetcher(Reads(computes=True), torch.device("cpu"))
    assert computes.get(0) == (0, "cpu") and computes.thread is None and not computes.ahead


# --- FLOPs and peaks

DATA_SHEETS = """
GB300 2500 1250 80 | B300 2250 1125 80 | B200 2250 1125 80 | GB200 2500 1250 80 | GH200 989 495 67
H200 NVL 835 418 60 | H200 989 495 67 | H100 PCIe 756 378 51 | H100 NVL 835 418 60
H100 989 495 67 | H800 989 495 67 | A100 312 156 19.5 | A800 312 156 19.5 | A40 150 75 37
A30 165 82 10.3 | A10G 70 35 35 | A10 125 62.5 31 | L40S 362 183 91 | L40 181 90.5 90
L4 121 60 30 | T4 65 8.1 8.1 | V100 125 15.7 15.7 | P100 21 10.6 10.6 | RTX 5090 209 105 105
RTX 4090 165 82.6 82.6 | RTX 4080 97 49 49 | RTX 3090 71 35.6 35.6 | RTX 6000 Ada 364 182 91
"""


def test_every_gpu_has_the_peaks_of_its_data_sheet():
    sheets = [line.strip().rsplit(" ", 3) for line in DATA_SHEETS.replace("|", "\n").split("\n")
              if line.strip()]
    assert {name: float(peaks[0]) for name, *peaks in sheets} == device.PEAK_TFLOPS
    for name, half, tf32, float32 in sheets:
        has_tf32 = name not in ("V100", "P100", "T4")
        assert float(tf32) == pytest.approx(float(half) / 2 if has_tf32 else float(float32), 0.02)


def test_flops_of_a_step():
    c, loader = TrainConfig(batch_size=3, gradient_accumulation_steps=4), types.SimpleNamespace(
        units_per_sample=5)
    model = nn.Linear(2, 2)
    assert flops_per_step(model, c, loader) == 0
    model.flops_per_unit = lambda: 7 + model.weight.requires_grad
    assert flops_per_step(model, c, loader) == 8 * 3 * 4 * 5
    for frozen in (0, dict(lr_mult=0.0), dict(learning_rate=0.0)):  # it is trained until the run
        c.lr_groups = dict(weight=frozen)
        assert flops_per_step(model, c, loader) == 7 * 3 * 4 * 5 and model.weight.requires_grad


@pytest.mark.parametrize("kind, world, flops", [("cpu", 1, 1.2e14), ("cpu", 4, 1.2e14),
                                                ("cuda", 1, 6e16), ("cuda", 4, 2.4e17)])
def test_what_is_long_enough_is_compiled(kind, world, flops):
    """From 600 s of work on, at 0.2 TFLOP/s of a CPU and 100 of each GPU."""
    ranks = types.SimpleNamespace(device=torch.device(kind), world_size=world)
    for steps, share, expected in ((1, 0.99, False), (1, 1.01, True), (10, 0.09, False)):
        c = TrainConfig(max_iters=steps, compile="auto")
        assert should_compile(c, flops * share, ranks) is expected
    assert should_compile(TrainConfig(compile="true"), 0, ranks) is True
    assert should_compile(TrainConfig(compile="false"), 1e30, ranks) is False
    mps = types.SimpleNamespace(device=torch.device("mps"), world_size=1)
    assert should_compile(TrainConfig(), 1e30, mps) is False


# --- the machine

@pytest.fixture
def machine(monkeypatch, tmp_path):
    """machine(path, text) is what the system says in a file."""
    files, opened = {}, builtins.open

    def fake(path, *args, **kwargs):
        if str(path) in files:
            return io.StringIO(files[str(path)])
        if str(path).startswith(("/proc", "/sys")):
            raise FileNotFoundError(path)
        return opened(path, *args, **kwargs)
    monkeypatch.setattr(builtins, "open", fake)
    monkeypatch.setattr(pathlib.Path, "read_text", lambda self: fake(self).read())
    return files.__setitem__


def test_free_memory_is_the_least_of_machine_and_container(machine):
    assert memory.memory_available() == 2**62
    machine("/proc/meminfo", "MemTotal:  9 kB\nMemFree:  3 kB\nMemAvailable:    5000 kB\n")
    assert memory.memory_available() == 5_120_000
    machine("/sys/fs/cgroup/memory.current", "3000000\n")
    machine("/sys/fs/cgroup/memory.stat", "anon 7\ninactive_file 200\nactive_file 9\n")
    machine("/sys/fs/cgroup/memory.max", "max\n")
    assert memory.memory_available() == 5_120_000
    machine("/sys/fs/cgroup/memory.max", "4000000\n")
    assert memory.memory_available() == 1_000_200
    machine("/sys/fs/cgroup/memory.max", "40000000\n")
    assert memory.memory_available() == 5_120_000


def test_peak_memory_is_in_mib(monkeypatch):
    import resource
    monkeypatch.setattr(resource, "getrusage",
                        lambda who: types.SimpleNamespace(ru_maxrss=3_500 * 1024))
    assert logger.peak_memory(torch.device("cpu")) == 3_500
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5.4 * 2**20)
    assert logger.peak_memory(torch.device("cuda", 0)) == 5
