"""The Python examples of the five documents: each runs as it is printed there (imports, paths and
data replaced), or what it names is absent on purpose: ABSENT has the call to use instead.
References: document number and line."""

import argparse
import importlib
import math
import random

import numpy as np
import pytest
import torch
from conftest import TINY
from processes import in_ranks_of, python
from runs import assert_same, tensors

from model import memory
from model.autoencoder.losses import combined_loss, matching_loss, reconstruction_losses
from model.gpt import GPT, GPTConfig
from model.moe import compute_router_auxiliary_loss
from model.sae import ActivationBuffer
from train.base.errors import DataError
from train.config import load_config
from train.dataloader import Data, DataLoader, DatasetLoader, RowLoader
from train.distributed import Ranks, convert_ddp_state, get_device, set_seed
from train.lr_scheduler import EarlyStopping, get_lr
from train.optimizer import configure_optimizers
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
    args.lr_schedule = "constant"
    assert get_lr(4999, args) == 6e-4
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


# -----------------------------------------------------------------------------
# the other examples

def test_seed_device_and_names_of_ddp():  # 001, lines 49 and 142; 000, line 169
    try:
        set_seed(seed=42, deterministic=True, cudnn_benchmark=False)
        first = (torch.rand(1), random.random(), np.random.rand())
        set_seed(seed=42, deterministic=True, cudnn_benchmark=False)
        assert first == (torch.rand(1), random.random(), np.random.rand())
    finally:
        set_seed(seed=42, deterministic=False, cudnn_benchmark=True)
    device = get_device(prefer_cuda=True, device_id=0)
    assert device.type == ("cuda" if torch.cuda.is_available() else device.type)
    assert convert_ddp_state({"module.a": 1}) == {"a": 1}


def test_the_loop_of_the_document(data_dir):  # 002, lines 35, 76, 146 and 294
    train_loader = DataLoader(data_dir, 4, 8, split="train")
    X, Y = train_loader.get_batch(device="cpu")
    assert X.shape == Y.shape == (4, 8) and torch.equal(X[:, 1:], Y[:, :-1])
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, n_hidden=32, block_size=8,
                          vocab_size=256), seed=1)
    optimizer = configure_optimizers(model, weight_decay=0.1, learning_rate=0.01, betas=(0.9, 0.95))
    for group in optimizer.param_groups:
        assert all((p.dim() >= 2) == (group["weight_decay"] == 0.1) for p in group["params"])
    logits = model(X)  # the document: logits, _ = model(X); the second value would have no meaning
    first = torch.nn.functional.cross_entropy(logits.view(-1, 256), Y.view(-1))
    assert torch.allclose(model(X, Y)[0], first)
    for _ in range(5):
        for _ in range(2):
            loss = torch.nn.functional.cross_entropy(model(X).view(-1, 256), Y.view(-1)) / 2
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert model(X, Y)[0] < first


def test_a_checkpoint_is_read_as_in_the_document(tmp_path, data_dir):  # 002, line 372
    config = load_config(None, TINY | dict(data_dir=str(data_dir), out_dir=str(tmp_path),
                                           vocab_size=256, max_iters=2))
    train(config)
    checkpoint = torch.load(tmp_path / "ckpt.pt")
    assert checkpoint.keys() >= {"model", "optimizer", "model_args", "iter_num", "best_val_loss"}
    model = GPT(GPTConfig(**checkpoint["model_args"]))
    model.load_state_dict(checkpoint["model"])
    assert checkpoint["iter_num"] == 2
    # The optimizer's state is by names, not by numbers of parameters: --resume reads it.
    assert checkpoint["optimizer"]["state"].keys() <= checkpoint["model"].keys()


def test_router_losses():  # 003, line 154
    total = compute_router_auxiliary_loss(
        router_losses=[{"load_balance": 0.01, "z_loss": 0.001},
                       {"load_balance": 0.02, "z_loss": 0.002}],
        load_balance_coef=0.01, auxiliary_coef=0.0, z_loss_coef=0.001)
    assert total == pytest.approx(0.01 * 0.03 + 0.001 * 0.003)


def test_a_model_built_first_modified_and_trained(tmp_path, data_dir):  # 003, line 192
    config = load_config(None, TINY | dict(
        model="memory", data_dir=str(data_dir), out_dir=str(tmp_path), vocab_size=256, n_chapters=2,
        chapters_per_token=1, chapter_size=4, max_iters=2, eval_interval=2))
    data = memory.open_data(config, Ranks())
    model = memory.build_model(config, data)
    with torch.no_grad():
        model.h[0].memory.gate.bias.fill_(0.5)
    before = model.h[0].memory.keys.weight.clone()
    assert train(config, model=model, data=data)["iter_num"] == 2
    assert not torch.equal(model.h[0].memory.keys.weight, before)


def test_losses_of_the_autoencoder():  # 004, lines 117 to 165
    names = ("video", "audio", "text")
    outs, targets = ({name: torch.randn(6, 4) for name in names} for _ in range(2))
    predicted, target = torch.randn(2, 6, 5)
    parts = reconstruction_losses(outs, targets)
    mse = {name: torch.nn.functional.mse_loss(outs[name], targets[name]) for name in names}
    assert all(torch.allclose(parts[name].mean(), mse[name]) for name in names)
    match = matching_loss(predicted, target, matching="mse")
    assert torch.allclose(match.mean(), torch.nn.functional.mse_loss(predicted, target))
    correlation = [np.corrcoef(a, b)[0, 1] for a, b in zip(predicted.numpy(), target.numpy())]
    assert 1 - matching_loss(predicted, target, "correlation").numpy() == pytest.approx(
        correlation, abs=5e-3)
    loss = combined_loss(parts, match, recon_weight=1.0, match_weight=0.5,
                         modality_weights=dict(video=2.0))
    expected = 2 * mse["video"] + mse["audio"] + mse["text"] + 0.5 * match.mean()
    assert torch.allclose(loss.mean(), expected)


ABSENT = [  # (document, name, the call to use instead)
    (0, "train.train.train_epoch", "train.train.training_loop"),
    (0, "train.train.fit", "train.train.train"),
    (1, "train.dataloader.get_optimal_dataloader_kwargs", "train.dataloader.Prefetcher"),
    (3, "train.train.Trainer", "train.train.train"),
    (3, "model.memory.MemoryAdapter", "model.memory.build_model"),
    (3, "train.dataloader.create_dataloader", "data.prepare.chat.main"),
    (3, "train.dataloader.TextDataset", "data.prepare.main"),
    (4, "model.autoencoder.create_autoencoder", "model.autoencoder.build_model"),
    (4, "model.autoencoder.SherlockDataset", "data.prepare.features.main"),
    (4, "train.config.TrainingConfig", "train.config.load_config"),
    (4, "model.autoencoder.ReconstructionLoss", "model.autoencoder.losses.reconstruction_losses"),
    (4, "model.autoencoder.FMRIMatchingLoss", "model.autoencoder.losses.matching_loss"),
    (4, "model.autoencoder.CombinedAutoEncoderLoss", "model.autoencoder.losses.combined_loss"),
    (4, "train.distributed.setup_distributed", "train.distributed.process_group"),
    (4, "train.distributed.cleanup_distributed", "train.distributed.process_group")]


@pytest.mark.parametrize("document, name, instead", ABSENT)
def test_names_that_are_absent_on_purpose(document, name, instead):
    def exists(path):
        module, _, attribute = path.rpartition(".")
        return hasattr(importlib.import_module(module), attribute)
    assert not exists(name) and exists(instead)
