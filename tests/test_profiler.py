"""--profile: what the time of a step goes into, and that a run is not touched by it."""

import gzip
import json

import pytest
from conftest import run, tiny_args
from test_lr_finder import fingerprint

from train.config import load_config
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
    assert "no checkpoint before the end" not in text
    assert after.pop("profile.json.gz") and after == before
    with gzip.open(out / "profile.json.gz") as f:
        names = [e.get("name") for e in json.load(f)["traceEvents"]]
    assert names.count("Optimizer.step#AdamW.step") == 3
    assert names.count("batches") == (3 if ranks else 6)  # of 2 micro-batches, on one rank or two
    assert "(3 steps)" in text and text.count("A step takes") == 1
    # The table has the 20 longest operations; with two ranks, waiting can displace the batches.
    for operation in ("aten::mm", "Optimizer.step#AdamW.step", "batches")[:2 if ranks else 3]:
        assert operation in text
