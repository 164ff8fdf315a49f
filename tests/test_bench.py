"""train/bench.py: it measures what it says, both sides in turn, and writes it down."""

import json
import sys

import pytest
import torch
from conftest import REPO

from model.gpt import GPT, GPTConfig
from train import bench

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


def test_rows_against_a_peer(peer, tmp_path, capsys):
    out = tmp_path / "bench.json"
    threads = torch.get_num_threads()
    options = ["--tiny", "--no-compile", "--steps", "2", "--repeats", "1", "--device", "cpu"]
    assert bench.main(["throughput", "sample", *options, "--peer", str(peer), "--out",
                       str(out)]) == 0
    torch.set_num_threads(threads)
    result, printed = json.loads(out.read_text()), capsys.readouterr().out
    training, sampling = result["rows"]
    assert {name.split(",")[0] for name in training["results"]} == {"ours", "ours as GPT-2", "peer"}
    assert all(v["median"] > 0 and v["of_bound"] > 0 for r in result["rows"]
               for v in r["results"].values())
    assert len(sampling["results"]) == 3 and "context of 32 full" in sampling["work"]
    assert result["machine"]["matmul_tflops"]["bfloat16"] > 0
    assert printed.count("our best to the peer's best") == 2


def test_without_a_peer_only_our_side_runs(capsys):
    threads = torch.get_num_threads()
    assert bench.main(["sample", "--tiny", "--repeats", "1", "--device", "cpu"]) == 0
    torch.set_num_threads(threads)
    assert "peer" not in capsys.readouterr().out


def test_one_flop_formula_for_both_sides():
    shape = dict(n_layer=2, n_head=2, n_embd=32, vocab_size=128, block_size=16)
    ours = GPT(GPTConfig(**shape, **bench.AS_GPT2))
    twin = torch.nn.ParameterList(torch.nn.Parameter(p) for p in ours.parameters())
    assert bench.flops_per_token(twin, shape) == ours.flops_per_unit()


def test_the_clock_stops_at_the_loss_that_is_enough_and_reports_failures():
    script = ("import time\nfor i in range(9): print(f'step {i}: train loss 9, val loss {9 - i}')\n"
              "time.sleep(60)")
    python = [sys.executable, "-c"]
    seconds, step, loss = bench.seconds_to(6.0, [*python, script], REPO)
    assert (step, loss) == (3, 6.0) and 0 < seconds < 30
    short = "print('step 2: val loss 7.5')"
    assert bench.seconds_to(6.0, [*python, short], REPO) == (None, 2, 7.5)
    with pytest.raises(RuntimeError, match="no such thing"):
        bench.seconds_to(6.0, [*python, "raise SystemExit('no such thing')"], REPO)


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
