"""The Python examples of the five documents: each runs as it is printed there (imports, paths and
data replaced), or what it names is absent and README's "Deliberately different" has the call to use
instead. References: document number and line."""

import argparse
import math
import random

import numpy as np
import pytest
import torch
from conftest import TINY
from processes import in_ranks_of, python
from runs import assert_same, tensors

from model.sae import ActivationBuffer
from train.base.errors import DataError
from train.config import load_config
from train.dataloader import Data, DatasetLoader, RowLoader
from train.distributed import Ranks
from train.lr_scheduler import EarlyStopping, get_lr
from train.train import train

# -----------------------------------------------------------------------------
# 000: early stopping and the activation buffer


class DocumentStopping:  # 000, line 136
    patience = 7
    min_delta = 0.0
    best_loss = float("inf")
    counter = 0

    def check(self, val_loss):
        if val_loss < self.best_loss - self.min_delta:
            self.best_loss = val_loss
            self.counter = 0
        else:
            self.counter += 1
        return self.counter >= self.patience


def test_early_stopping_decides_as_in_the_document():
    draw = random.Random(0)
    for _ in range(50):
        theirs, patience = DocumentStopping(), draw.randint(1, 4)
        theirs.patience, theirs.min_delta = patience, draw.choice((0.0, 0.1))
        ours = EarlyStopping(patience, theirs.min_delta, float("inf"), 0)
        for _ in range(20):
            value = draw.random()
            assert ours.check(val_loss=value) == theirs.check(value)
            assert (ours.best_loss, ours.counter) == (theirs.best_loss, theirs.counter)
    assert EarlyStopping() == EarlyStopping(patience=7, min_delta=0.0)  # a dataclass
    old = EarlyStopping()
    old.load_state_dict(dict(best=1.5, bad=3))  # as in checkpoints of every version
    assert (old.best_loss, old.counter) == (1.5, 3)


def test_the_buffer_is_a_ring():
    ring = ActivationBuffer(5, 2, device="cpu")
    assert ring.buffer.shape == (5, 2) and ring.position == 0 and not ring.buffer.any()
    rows = torch.arange(16.0).view(8, 2)
    for part in rows[:3], rows[3:]:
        ring.add(part)
    assert ring.position == 3 and ring.buffer[:, 0].tolist() == [10, 12, 14, 6, 8]
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert ActivationBuffer(5, 2).buffer.device.type in (expected, "mps")


# -----------------------------------------------------------------------------
# 002: the schedule

def document_lr(it, learning_rate, min_lr, warmup_steps, max_steps):  # 002, line 110
    if it < warmup_steps:
        return learning_rate * (it + 1) / (warmup_steps + 1)
    decay_ratio = (it - warmup_steps) / (max_steps - warmup_steps)
    coeff = 0.5 * (1.0 + math.cos(math.pi * decay_ratio))
    return min_lr + coeff * (learning_rate - min_lr)


@pytest.mark.parametrize("warmup, length", [("warmup_steps", "max_steps"),
                                            ("warmup_iters", "max_iters")])
def test_get_lr_takes_a_plain_namespace(warmup, length):
    args = argparse.Namespace(learning_rate=6e-4, min_lr=6e-5, data_path="x",
                              **{warmup: 200, length: 5000})
    config = load_config(None, dict(learning_rate=6e-4, min_lr=6e-5, warmup_iters=200,
                                    max_iters=5000))
    for it in (0, 100, 199, 200, 201, 2500, 4999, 5000):
        assert get_lr(it, args) == get_lr(it=it, args=config) == pytest.approx(
            document_lr(it, 6e-4, 6e-5, 200, 5000), rel=1e-12)
    assert get_lr(6000, args) == 6e-5
    delattr(args, length)
    with pytest.raises(KeyError, match="max_iters"):
        get_lr(0, args)


# -----------------------------------------------------------------------------
# 004, line 42 and 003, line 39: Trainer(model, train_dataset, val_dataset, config).train()

OWN = """
import os
import sys

import torch
from torch import nn
from torch.utils.data import Dataset

sys.path.insert(0, os.getcwd())
from train.config import load_config
from train.dataloader import Data
from train.train import train


class Sums(Dataset):
    def __init__(self, first, n):
        self.first, self.n = first, n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        x = torch.randn(3, generator=torch.Generator().manual_seed(self.first + i))
        return {"x": x, "y": float(x.sin().sum())}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x, y):
        error = self.net(x)[:, 0] - y.float()
        return error.square().mean(), {"abs_error": error.abs().sum()}


def kill(it, numbers):
    if it == 20 and "KILL" in os.environ:
        os.kill(os.getpid(), 9)


config = load_config("train/config_test.yaml", dict(
    out_dir=sys.argv[1], max_iters=30, eval_interval=5, batch_size=6, learning_rate=0.01,
    gradient_accumulation_steps=2, device="cpu", dtype="float32", compile="false"))
result = train(config, model=Net(), data=Data(Sums(0, 100), Sums(1000, 37)), on_evaluation=kill)
history = result["history"]
assert result["best_val_loss"] == min(h["val_loss"] for h in history) < history[0]["val_loss"] / 2
assert history[0]["train_loss"] is None and history[-1]["train_loss"] < 2
"""


def test_own_datasets_resume_exactly_and_two_ranks_equal_one(tmp_path):
    script = tmp_path / "own.py"
    script.write_text(OWN)
    for name, env, code in (("a", {}, 0), ("b", dict(KILL="1"), -9), ("b", {}, 0)):
        done = python(script, tmp_path / name, env=env)
        assert done.returncode == code, done.stderr
    assert "Resuming from" in done.stdout and "at iter 15" in done.stdout
    assert_same(tmp_path / "a", tmp_path / "b")
    code, output = in_ranks_of(2, script, tmp_path / "two")
    assert code == 0 and "world size 2" in output, output
    one, two = (tensors(tmp_path / name / "ckpt.pt")[0] for name in ("a", "two"))
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-5, atol=1e-7)


def config_of_rows(**changes):
    return load_config(None, TINY | dict(batch_size=4, gradient_accumulation_steps=1) | changes)


def test_a_dataset_has_the_batches_of_its_arrays():
    x, y = torch.randn(10, 3), torch.arange(10)
    dataset = torch.utils.data.TensorDataset(x, y)
    config, ranks = config_of_rows(), Ranks(1, 2)
    theirs, ours = RowLoader((x.numpy(), y.numpy()), config, ranks), DatasetLoader(
        dataset, config, ranks)
    for step in (0, 1, 5, 3):
        for a, b in zip(theirs.get_batch("cpu", step), ours.get_batch("cpu", step), strict=True):
            assert torch.equal(a, b)
    assert ours.n_fixed(9) == 3 and [len(b) for b in ours.fixed_batch(2, 9)] == [2, 2]
    assert ours.fingerprint()["items"] == 10
    assert ours.fingerprint() != DatasetLoader([*zip(x + 1, y)], config, ranks).fingerprint()
    alone = DatasetLoader([np.ones(2)] * 4, config, Ranks())  # an item is one array
    assert [t.shape for t in alone.get_batch()] == [(4, 2)]


@pytest.mark.parametrize("dataset, message", [
    (torch.utils.data.DataLoader([1]), "DataLoader: .* its dataset"),
    (iter([1]), "list_iterator: expected a map-style Dataset"),
    ([], "above 0"),
    (["a", "b"], "a part is a str"),
    ([None], "cannot be stacked"),
    ([np.ones(i) for i in range(9)], r"items \[.*\]: they cannot be stacked: .* equal size")])
def test_other_data_is_refused_with_what_to_do(tmp_path, dataset, message):
    config = config_of_rows(out_dir=str(tmp_path), max_iters=3, eval_interval=0)
    with pytest.raises(DataError, match=message):
        train(config, model=torch.nn.Linear(2, 2), data=Data(dataset))


class OwnLoader:
    """A loader of one's own: a batch is a function of the step."""
    samples, unit, units_per_sample = 50, "row", 1

    def get_batch(self, device, step):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        return x.to(device), x.sum(1).to(device)

    def n_fixed(self, count):
        return min(count, 2)

    def fixed_batch(self, index, count, device):
        return self.get_batch(device, 1000 + index)

    def fingerprint(self):
        return {"own": 1}


class Regression(torch.nn.Linear):
    def forward(self, x, y):
        return (super().forward(x)[:, 0] - y).square().mean(), {}


def test_own_loaders(tmp_path):
    config = config_of_rows(out_dir=str(tmp_path), max_iters=40, eval_interval=20, warmup_iters=0,
                            learning_rate=0.1, weight_decay=0.0)
    history = train(config, Regression(3, 1), data=Data(OwnLoader(), OwnLoader()))["history"]
    assert history[-1]["val_loss"] < 0.1 * history[0]["val_loss"]
