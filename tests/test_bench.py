"""tests/bench.py: it measures what it says, both sides in turn, and writes it down."""

import contextlib
import json
import pathlib
import re
import sys
import time
import types

import pytest
import torch
from conftest import REPO
from processes import python, ready
from runs import slow

from model.gpt import GPT, GPTConfig
from tests import bench
from tests.gpu import parts
from tests.gpu import programme as gpu

# A stand-in with the names of nanoGPT that the comparison calls.
MODEL = '''
from dataclasses import dataclass
import torch, torch.nn as nn, torch.nn.functional as F
@dataclass
class GPTConfig:
    n_layer: int; n_head: int; n_embd: int; vocab_size: int; block_size: int
    dropout: float = 0.0; bias: bool = False
class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c, self.wte = c, nn.Embedding(c.vocab_size, c.n_embd)
    def forward(self, idx, targets=None):
        logits = F.linear(self.wte(idx), self.wte.weight)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    def configure_optimizers(self, decay, lr, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=lr, betas=betas, weight_decay=decay)
    def generate(self, idx, n, temperature=1.0, top_k=None):
        return torch.cat((idx, idx[:, :1].repeat(1, n)), 1)
'''
TRAIN = 'raise SystemExit("a script: importing it would train")\n'


@pytest.fixture
def peer(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def test_sides_alternate_and_the_first_repeat_is_warm_up():
    calls, values = [], iter([100, 50, 1, 5, 3, 4, 2, 6])
    sides = {n: lambda n=n: (calls.append(n), next(values))[1] for n in "AB"}
    results = bench.alternate(sides, 3)
    assert "".join(calls) == "ABABABAB"
    assert results == dict(A=dict(median=2, least=1, most=3), B=dict(median=5, least=4, most=6))
    assert bench.alternate({"A": lambda: 1, "B": lambda: None}, 1).keys() == {"A"}


def test_the_ratio_is_above_one_where_ours_is_better():
    def told(unit, ours, peer):
        bound = dict(bound=100) if unit != "s" else {}
        results = {name: dict(median=v, least=v, most=v, **bound) for name, v in
                   {"ours, a": ours, "peer": peer}.items() if v}
        return bench.markdown(bench.row("", unit, results))
    assert "3.00 x" in told("tokens/s", 30, 10) and "3.00 x" in told("s", 10, 30)
    assert "30% of the bound" in told("tokens/s", 30, 10) and " x" not in told("s", 10, None)
    assert "| missed | 2 of 3 |" in bench.markdown(bench.row("", "s", {}) | dict(missed="2 of 3"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_timed_step_computes_in_its_dtype(dtype):
    weight, seen = torch.ones(1, 2, requires_grad=True), []

    def forward(x):
        y = torch.nn.functional.linear(x, weight)
        seen.append(y.dtype)
        return y.float().mean(), {}
    bench.forward_backward(forward, (torch.ones(4, 2),), torch.device("cpu"), dtype)
    assert seen == [dtype] and torch.equal(weight.grad, torch.ones(1, 2))


def test_rows_against_a_peer(peer, tmp_path, capsys, monkeypatch):
    """The peer trains in a process of its own, here forked from one that has imported torch."""
    out, asked = tmp_path / "bench.json", []
    monkeypatch.setattr(bench.multiprocessing, "get_context",
                        lambda how: (asked.append(how), ready())[1])
    threads = torch.get_num_threads()
    options = ["--tiny", "--no-compile", "--steps", "2", "--repeats", "1", "--device", "cpu"]
    assert bench.main(["throughput", "sample", *options, "--peer", str(peer), "--out",
                       str(out)]) == 0
    torch.set_num_threads(threads)
    result, printed = json.loads(out.read_text()), capsys.readouterr().out
    training, sampling = result["rows"]
    assert asked == ["spawn"]  # a fork would have what ours sets
    assert {name.split(",")[0] for name in training["results"]} == {"ours", "ours as GPT-2", "peer"}
    assert all(v["median"] > 0 and v["of_bound"] > 0 for r in result["rows"]
               for v in r["results"].values())
    assert len(sampling["results"]) == 2 and "context of 32 full" in sampling["work"]
    machine = result["machine"]
    assert machine["matmul_tflops"]["bfloat16"] > 0 and machine["read_gb_s"] > 0
    assert machine["cpu"] and machine["gpu"] is None and machine["torch"] == torch.__version__
    assert printed.count("our best to the peer's best") == 2


def test_without_a_peer_only_our_side_runs(capsys, monkeypatch):
    """Eager and compiled, which is eager too here: compiling is no part of it."""
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    threads = torch.get_num_threads()
    assert bench.main(["sample", "--tiny", "--repeats", "1", "--device", "cpu"]) == 0
    torch.set_num_threads(threads)
    out = capsys.readouterr().out
    assert "peer" not in out and out.count("| ours, ") == 2 and ", compiled |" in out


def test_one_flop_formula_for_both_sides():
    shape = dict(n_layer=2, n_head=2, n_embd=32, vocab_size=128, block_size=16)
    ours = GPT(GPTConfig(**shape, **bench.AS_GPT2))
    twin = torch.nn.ParameterList(torch.nn.Parameter(p) for p in ours.parameters())
    assert bench.flops_per_token(twin, shape) == ours.flops_per_unit()


def test_the_clock_stops_at_the_loss_that_is_enough_and_reports_failures():
    script = ("import time\nfor i in range(9): print(f'step {i}: train loss 9, val loss {9 - i}')\n"
              "time.sleep(60)")
    fresh = [sys.executable, "-c"]
    seconds, step, loss = bench.seconds_to(6.0, [*fresh, script], REPO)
    assert (step, loss) == (3, 6.0) and 0 < seconds < 30
    short = "print('step 2: val loss 7.5')"
    assert bench.seconds_to(6.0, [*fresh, short], REPO) == (None, 2, 7.5)
    with pytest.raises(RuntimeError, match="no such thing"):
        bench.seconds_to(6.0, [*fresh, "raise SystemExit('no such thing')"], REPO)


def test_the_peer_is_copied_with_our_tokens(peer, tmp_path):
    data, folder = tmp_path / "bin", tmp_path / "copy"
    data.mkdir()
    (peer / "config").mkdir()
    (peer / "configurator.py").write_text("")
    (data / "meta.json").write_text('{"vocab_size": 65}')
    for split in ("train", "val"):
        (data / f"{split}.bin").write_bytes(b"1234")
    bench.copy_peer(peer, data, folder)
    assert (folder / "train.py").read_text() == TRAIN
    assert (folder / "data/shakespeare_char/val.bin").read_bytes() == b"1234"


@pytest.mark.parametrize("args, says", [
    (["speed"], "unknown row: speed"), (["--repeats", "0"], "at least 1"),
    (["--peer", "/nowhere"], "no train.py there")])
def test_wrong_arguments_end_in_one_message(args, says, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(args)
    assert stopped.value.code == 2 and says in capsys.readouterr().err


def test_time_to_loss_runs_both_sides_on_the_cpu(peer, tmp_path, monkeypatch, capsys):
    """The peer's recipe names it, so ours must: on a machine with a GPU `auto` would take that."""
    commands, data = [], tmp_path / "bin"
    data.mkdir()
    (peer / "config").mkdir()
    (peer / "configurator.py").write_text("")
    (data / "meta.json").write_text('{"vocab_size": 65}')
    for split in ("train", "val"):
        (data / f"{split}.bin").write_bytes(b"1234")
    monkeypatch.setattr(bench, "seconds_to", lambda target, command, cwd: (
        commands.append([str(c) for c in command]), (1.0, 2, 1.5))[1])
    assert bench.main(["time_to_loss", "--tiny", "--repeats", "1", "--device", "cpu", "--peer",
                       str(peer), "--set", f"data_dir={data}"]) == 0
    ours, theirs, *_ = commands
    assert "run_train.py" in ours and "train.py" in theirs
    assert "--device=cpu" in ours and "--device=cpu" in theirs


# --- the programme for a GPU

def programme(tmp_path, *args):
    """(exit code, {item: result}) of the programme on its tiny model."""
    out = tmp_path / "results.jsonl"
    code = gpu.main(["--tiny", "--out", str(out), *args])
    return code, {r.pop("item"): r for r in map(json.loads, out.read_text().splitlines())}


def test_an_item_that_fails_or_hangs_costs_only_itself(tmp_path, monkeypatch, capsys):
    def runs(code):
        return lambda job: job.command(["-c", code])
    child = f"import subprocess, sys; subprocess.run(['sleep', '{71 * 60}'])"
    monkeypatch.setattr(gpu, "ITEMS", {
        "bad": (runs("raise SystemExit('no such kernel')"), 1), "hangs": (runs(child), 0.02),
        "good": (lambda job: "7 tokens/s", 1)})
    def part_by_part(job):
        yield "7 tokens/s on one"
        yield runs(child)(job)
    gpu.ITEMS["cut off"] = (part_by_part, 0.02)
    code, results = programme(tmp_path)
    assert results["cut off"]["result"] == "7 tokens/s on one; failed: timed out"
    assert code == 1 and results["good"].keys() == {"result", "seconds"}
    assert results["bad"]["failed"] and "no such kernel" in results["bad"]["result"]
    assert results["hangs"]["failed"] and "timed out" in results["hangs"]["result"]
    over = time.monotonic() + 5  # what was killed may need a moment to go
    while (left := f"sleep\0{71 * 60}" in commands_of_processes()) and time.monotonic() < over:
        time.sleep(0.05)
    assert not left
    assert "| good | 7 tokens/s |" in capsys.readouterr().out


def commands_of_processes():
    lines = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_text(errors="replace"))
    return "\n".join(lines)


def test_items_stop_when_the_minutes_are_over(tmp_path, monkeypatch):
    sleep = ["-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(gpu, "ITEMS", {"cut": (lambda job: job.command(sleep), 1),
                                             "late": (lambda job: "never", 1)})
    monkeypatch.setattr(gpu, "LEAST", 0.5)
    code, results = programme(tmp_path, "--minutes", "0.02")
    assert code == 0 and results["late"] == dict(result="not measured: no time left")
    assert results["cut"]["result"] == "not measured: no time left"


@pytest.mark.parametrize("name, says", [
    slow("waits", "20 reads in as many steps, no other wait in steps 6 to 9"),
    ("not finite", "exit 1, the checkpoint of step 10 is finite"),
    ("where time goes", "aten::mm "), ("sampling, growing", "at first and again: to 8 ")])
def test_an_item_on_its_tiny_model(tmp_path, monkeypatch, name, says):
    """The first starts the program anew, as a person would; the others fork it."""
    def command(job, args, env=None, code=0):
        done = python(*args, env=env, merged=True)
        assert done.returncode == code, done.stdout
        return done.stdout
    if name != "waits":
        monkeypatch.setattr(gpu.Job, "command", command)
    monkeypatch.setattr(gpu, "ITEMS", {name: gpu.ITEMS[name]})
    code, results = programme(tmp_path)
    assert code == 0 and says in results[name]["result"], results


def test_the_speed_of_the_program_itself_is_a_median_without_the_first_steps():
    def train(name, *args, program):
        speeds = [1.0] * 10 + [7.0] * 30 + [9.0] * 20
        lines = [dict(tokens_per_sec=s, mfu=0.4, memory_mib=5000) for s in speeds]
        return "", lines[:int(args[0].split("=")[1])], None
    job = types.SimpleNamespace(large=False, compile="--no-compile", train=train)
    assert list(gpu.steps(job)) == [f"on {n}: 7 tokens/s, 40% MFU, 5,000 MiB" for n in (1, 2)]


@pytest.mark.slow
def test_the_whole_programme(tmp_path):
    code, results = programme(tmp_path, "--minutes", "10")
    assert code == 0 and results.keys() == gpu.ITEMS.keys(), results
    assert results["graphs"]["result"].startswith("0 symbolic sizes, 0 recompilations, 0 graph")
    assert results["resumed"]["result"] == results["resumed, compiled"]["result"] == "the same bits"
    losses = re.findall(r"(?:alone|on \d) ([\d.]+)", results["wrappers"]["result"])
    assert len(losses) == 5 and max(map(float, losses)) - min(map(float, losses)) < 2e-3


def test_a_wait_for_the_gpu_is_an_error_but_for_the_one_read_a_step(monkeypatch, capsys):
    import run_train
    from train import train
    modes, seen = ["default"], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(train, "unpack", lambda: seen.append(modes[-1]))

    def steps(argv):
        for _ in range(20):
            seen.append(modes[-1])  # in the step
            train.unpack()
    monkeypatch.setattr(run_train, "main", steps)
    parts.watch_for_waits([])
    assert seen[1::2] == ["default"] * 20  # the read itself
    assert [i for i, mode in enumerate(seen[::2]) if mode == "error"] == [6, 7, 8, 9]
