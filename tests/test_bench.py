"""train/bench.py: it measures what it says, both sides in turn, and writes it down."""

import json
import sys

import pytest
import torch
from conftest import REPO

from model.gpt import GPT, GPTConfig
from train import bench, bench_peer, bench_rows

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
TRAIN = '''
raise SystemExit("a script: importing it would train")
def get_batch(split):
    data = np.memmap(os.path.join(data_dir, split + ".bin"), dtype=np.uint16, mode="r")
    rows = np.stack([data[i:i + block_size + 1] for i in range(batch_size)]).astype(np.int64)
    return torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, 1:])
'''


@pytest.fixture
def peer(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def test_sides_alternate_and_the_first_repeat_is_warm_up():
    calls, values = [], iter([100, 50, 1, 5, 3, 4, 2, 6])
    sides = {n: lambda n=n: (calls.append(n), next(values))[1] for n in "AB"}
    results = bench_rows.alternate(sides, 3)
    assert "".join(calls) == "ABABABAB"
    assert results["A"] == dict(median=2, least=1, most=3, warm_up=100, values=[1, 3, 2])
    assert results["B"]["median"] == 5


def test_the_ratio_is_above_one_where_ours_is_better():
    def row(unit, ours, peer):
        return bench_rows.row("", unit, {"ours, a": dict(median=ours), "peer": dict(median=peer)})
    assert bench.ratio(row("tokens/s", 30, 10)) == bench.ratio(row("s", 10, 30)) == 3
    assert bench.ratio(bench_rows.row("", "s", {"ours": dict(median=1)})) is None


def test_rows_against_a_peer(peer, tmp_path, capsys):
    out = tmp_path / "bench.json"
    threads = torch.get_num_threads()
    rows = ["throughput", "sample", "loader"]
    options = ["--tiny", "--no-compile", "--steps", "2", "--repeats", "1", "--device", "cpu"]
    assert bench.main([*rows, *options, "--peer", str(peer), "--out", str(out)]) == 0
    torch.set_num_threads(threads)
    result, printed = json.loads(out.read_text()), capsys.readouterr().out
    training, first, full, small, large = result["rows"]
    loss = {name: side["loss"] for name, side in training["results"].items()}
    assert len(loss) == 3 and {v["steps"] for v in loss.values()} == {4}  # both repeats
    assert all(v["median"] > 0 for r in result["rows"] for v in r["results"].values())
    assert set(small["results"]) == {"ours", "peer"} and "x 1,024" in large["work"]
    assert "context full" in full["work"] and "first" in first["work"]
    assert result["machine"]["matmul_tflops"]["bfloat16"] > 0
    assert printed.count("our best to the peer's best") == 5


def test_without_a_peer_only_our_side_runs(capsys):
    threads = torch.get_num_threads()
    assert bench.main(["sample", "--tiny", "--repeats", "1", "--device", "cpu"]) == 0
    torch.set_num_threads(threads)
    assert "peer" not in capsys.readouterr().out


def test_one_flop_formula_for_both_sides():
    shape = dict(n_layer=2, n_head=2, n_embd=32, vocab_size=128, block_size=16)
    ours = GPT(GPTConfig(**shape, **bench_rows.AS_GPT2))
    assert bench_peer.flops_per_token(ours, shape) == ours.flops_per_token()


def test_watch_stops_at_the_line_that_is_enough_and_reports_failures():
    script = "import time\nfor i in range(9): print('step', i)\ntime.sleep(60)"
    python = [sys.executable, "-c"]
    seen = bench_rows.watch([*python, script], REPO, r"step (\d)", lambda m: m[1] == "3")
    assert [m[1] for _, m in seen] == ["0", "1", "2", "3"] and 0 < seen[-1][0] < 30
    with pytest.raises(RuntimeError, match="no such thing"):
        bench_rows.watch([*python, "raise SystemExit('no such thing')"], REPO, "x", bool)


def test_the_peer_is_copied_with_our_tokens(peer, tmp_path):
    data, folder = tmp_path / "bin", tmp_path / "copy"
    data.mkdir()
    (peer / "config").mkdir()
    (peer / "configurator.py").write_text("")
    (data / "meta.json").write_text('{"vocab_size": 65}')
    for split in ("train", "val"):
        (data / f"{split}.bin").write_bytes(b"1234")
    bench_peer.copy(peer, data, folder)
    assert (folder / "train.py").read_text() == TRAIN
    assert (folder / "data/shakespeare_char/val.bin").read_bytes() == b"1234"


@pytest.mark.parametrize("args, says", [
    (["speed"], "unknown row: speed"), (["--repeats", "0"], "at least 1"),
    (["--peer", "/nowhere"], "no train.py there")])
def test_wrong_arguments_end_in_one_message(args, says, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(args)
    assert stopped.value.code == 2 and says in capsys.readouterr().err
