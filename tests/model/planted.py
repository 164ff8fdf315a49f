"""A model type for tests/test_repeat.py and tests/test_scaling.py, whose loss is not trained:
random, mainly a function of the seed, minus the key `planted`; or with the key `law` given by the
scaling law LAW."""

import os
import random
import signal
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn

from train.base.fields import key
from train.dataloader import Data, RowLoader

LAW = dict(E=1.0, A=2.0, B=20.0, alpha=0.5, beta=0.4)


@dataclass
class Keys:
    planted: float = key(0.0, "what the loss is lower by")
    salt: int = key(0, "another draw of the small part of chance")
    fatal: int = key(0, "the seed whose run is killed, as one that has no memory left")
    law: bool = key(False, "the loss is LAW's, of n_layer x n_embd weights")
    fatal_depth: int = key(0, "the same of an n_layer")


def open_data(config, ranks):
    rows = np.zeros((8, 1), dtype=np.float32)
    return Data(*(RowLoader([rows], config, ranks) for _ in "tv"))


def build_model(config, data):
    return Planted(config)


class Planted(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        large = random.Random(config.seed).gauss(0.0, 1.0)
        small = random.Random(f"{config.seed} {config.salt}").gauss(0.0, 0.2)
        self.chance = 10.0 + large + small - config.planted
        self.fatal = config.seed == config.fatal or config.n_layer == config.fatal_depth
        self.weights = config.n_layer * config.n_embd
        if config.law:
            rows = config.max_iters * config.samples_per_step
            self.chance = (LAW["E"] + LAW["A"] / self.weights ** LAW["alpha"]
                           + LAW["B"] / rows ** LAW["beta"])

    def forward(self, x):
        if self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return (x * self.w).mean() + self.chance, {}

    def flops_per_unit(self):
        return 6 * self.weights
