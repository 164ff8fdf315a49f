"""--profile: what the time of a step goes into, and that a run is not touched by it."""

import gzip
import json

import pytest
import torch
from conftest import run, tiny_args
from test_lr_finder import fingerprint

from train.config import load_config
from train.tools import profiler
from train.train import train


def command(data_dir, out_dir, **changes):
    return tiny_args(data_dir=data_dir, out_dir=out_dir, vocab_size=256, **changes)


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_table_and_a_trace_and_the_run_as_it_was(tmp_path, data_dir, ranks):
    """Between the halves of a run, which do not know of it."""
    out = tmp_path / "a"
    train(load_config(None, command(data_dir, out, max_iters=4)))
    before = fingerprint(out)
    code, text = run("--profile", "3", *command(data_dir, out), ranks=ranks)
    assert code == 0, text
    after = fingerprint(out)
    assert after.pop("profile.json.gz") and after == before
    with gzip.open(out / "profile.json.gz") as f:
        names = [e.get("name") for e in json.load(f)["traceEvents"]]
    assert names.count("Optimizer.step#AdamW.step") == 3
    assert names.count("batches") == (3 if ranks else 6)  # of 2 micro-batches, on one rank or two
    table = text[text.index("A step takes"):]
    assert "(3 steps)" in table and text.count("A step takes") == 1
    for part in ("matrix products", "attention", "loss", "optimizer, clipping", "norms, "):
        assert part in table
    assert ("communication" in table) == bool(ranks)


def test_each_operation_counts_once_and_all_of_them_make_the_whole():
    """By what it takes itself, for the part of whoever called it."""
    class Event:
        device_type, cpu_parent, self_device_time_total = torch.autograd.DeviceType.CPU, None, 0

        def __init__(self, name, own, *children, gpu=0):
            self.name, self.self_cpu_time_total, self.cpu_children = name, own * 1e6, children
            self.self_device_time_total = gpu * 1e6
            for child in children:
                child.cpu_parent = self
    trees = [
        Event("Optimizer.step#Muon.step", 1, Event("aten::bmm", 2, gpu=30), Event("aten::add_", 3)),
        Event("batches", 5, Event("aten::index", 6, Event("cudaStreamSynchronize", 0.5))),
        Event("_ChunkedLinearCrossEntropyBackward", 7, Event("aten::mm", 8), Event("aten::mul", 9)),
        Event("aten::linear", 10, Event("aten::t", 11), Event("aten::addmm", 12, gpu=40)),
        Event("aten::scaled_dot_product_attention", 13, Event("aten::matmul", 14)),
        Event("aten::layer_norm", 15), Event("aten::to", 16, Event("aten::copy_", 17)),
        Event("c10d::allreduce_", 18), Event("SomeBackward0", 19, Event("aten::sum", 20)),
        Event("## Call CompiledFxGraph abc ##", 21, Event("aten::mm", 22))]
    events = []
    for tree in trees:
        waiting = [tree]
        while waiting:
            events.append(waiting.pop())
            waiting += events[-1].cpu_children
    host = profiler.seconds_by_category(events, cuda=False)
    assert host == {
        "optimizer, clipping": 6, "batches": 11.5, "loss": 24, "matrix products": 33 + 22,
        "attention": 27, "norms, elementwise": 15 + 16 + 20 + 21, "copies, casts": 17,
        "communication": 18, profiler.REST: 19}
    assert sum(host.values()) == sum(e.self_cpu_time_total for e in events) / 1e6
    gpu = profiler.seconds_by_category(events, cuda=True)
    assert {k: v for k, v in gpu.items() if v} == {"optimizer, clipping": 30, "matrix products": 40}
    text = profiler.format_profile(events, 2, 80.0, 125.0, cuda=True).split("\n")
    assert text[0] == ("A step takes 80,000.0 ms, under the profiler 125,000.0 ms (2 steps). "
                       "By category:")
    assert [" ".join(line.split()) for line in text[1:]] == [
        "matrix products 20,000.00 ms 16.0%", "optimizer, clipping 15,000.00 ms 12.0%",
        "rest: Python, waiting 90,000.00 ms 72.0%"]
