"""The Python examples of the five documents: each runs as it is printed there (imports, paths and
data replaced), or what it names is absent and README's "Deliberately different" has the call to use
instead. References: document number and line."""

import argparse
import math
import random

import pytest
import torch

from model.sae import ActivationBuffer
from train.config import load_config
from train.lr_scheduler import EarlyStopping, get_lr

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
