"""A complete model type of a user, for tests/test_own_system.py: three tensors per sample, masked
items, two metrics, a confusion matrix, a buffer that steps change, additional keys. Samples are
sequences of 4 items."""

import os
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from train.base.fields import key
from train.dataloader import Data, RowLoader

CLASSES, ITEMS, FEATURES = 3, 4, 6


@dataclass
class Keys:
    width: int = key(8, "width of the hidden layer", ge=1)
    corrupt: float = key(0.0, "share of the labels that are wrong in validation", ge=0, le=1,
                         free=True)

    def problems(self):
        return ["width: 13 brings bad luck"] if self.width == 13 else []


def open_data(config, ranks):
    """Return the Data of config.data_dir, with rows of memory-mapped files: x (N, 4, 6) float32,
    labels (N, 4) uint8, mask (N, 4) bool."""
    def load(split):
        arrays = [np.load(os.path.join(config.data_dir, f"{split}_{name}.npy"), mmap_mode="r")
                  for name in ("x", "y", "mask")]
        return RowLoader(arrays, config, ranks)
    return Data(load("train"), load("val"), dict(classes=CLASSES, features=FEATURES))


def build_model(config, data):
    return Toy(config, data.spec)


class Toy(nn.Module):
    def __init__(self, config, spec):
        super().__init__()
        self.seed = config.seed
        self.h = nn.ModuleList([nn.Linear(spec["features"], config.width)])
        self.still = nn.Linear(config.width, config.width, bias=False)
        self.head = nn.Linear(config.width, spec["classes"])
        self.register_buffer("seen", torch.zeros(spec["classes"], dtype=torch.float64))
        self.still.weight.requires_grad_(False)  # frozen by the model itself
        for name, tensor in self.state_dict().items():
            if not tensor.is_meta:
                tensor.copy_(self.initial(name, tensor.shape, config.seed))

    def initial(self, name, shape, seed):
        if name == "seen":
            return torch.zeros(shape, dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed + len(name))
        return torch.empty(shape).normal_(0.0, 0.3, generator=generator)

    def forward(self, x, labels, mask):
        """Return (mean loss, sums) for x (B, 4, 6), labels (B, 4) and mask (B, 4), true for items
        that count."""
        hidden = torch.tanh(self.still(torch.tanh(self.h[0](x))))  # (B, 4, width)
        logits = self.head(hidden).float()  # (B, 4, 3)
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        items, guess = mask.flatten().double(), logits.argmax(-1).flatten()
        count = items.sum()
        pairs = F.one_hot(labels.flatten() * CLASSES + guess, CLASSES**2) * items[:, None]
        sums = dict(count=count, confusion=pairs.sum(0).view(CLASSES, CLASSES),  # [label, guess]
                    sure=(logits.softmax(-1).amax(-1).flatten() * items).sum())
        return (losses * items).sum() / count.clamp(min=1), sums

    def numbers(self, sums):
        table = sums["confusion"]
        f1 = 2 * table.diagonal() / (table.sum(0) + table.sum(1)).clamp(min=1)
        return dict(f1=float(f1.mean()), sure=float(sums["sure"] / sums["count"]))

    def after_step(self, it, sums):
        self.seen += sums["confusion"].sum(1).to(self.seen)

    def adopt(self, weights):
        return {name.replace("old_", ""): t for name, t in weights.items()}


def sample(model, data, config):
    """Return a list of one text, with the loss of a random sample. The random generator is a
    separate one: training must not be affected."""
    x = torch.randn(1, ITEMS, FEATURES, generator=torch.Generator().manual_seed(config.seed))
    zeros = torch.zeros(1, ITEMS, dtype=torch.int64)
    loss, _ = model(x, zeros, torch.ones(1, ITEMS, dtype=torch.bool))
    return [f"a sample of loss {float(loss):.3f}"]
