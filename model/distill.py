"""Distillation (arXiv:1503.02531): train a small GPT on the output distribution of a larger one.

    python run_train.py --config train/configs/distill.yaml --teacher out/quick/ckpt.pt
    python -m model.sample --ckpt out/distill/ckpt.pt

The training loss is (1 - distill_weight) times the cross-entropy on the text plus distill_weight
times T^2 times the KL divergence from the teacher's distribution at the softmax temperature T =
distill_temperature. Evaluations report the cross-entropy, and the divergence at temperature 1 as
val_kl, so that runs with different keys can be compared. The teacher is frozen, in the precision of
the file, not sharded, and in no checkpoint. The result is a GPT.

Shapes: B, T, C, V as in model/gpt.py.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from model import gpt
from model.core import weights
from model.core.ops import IGNORE, chunk_rows
from model.gpt import GPT
from train.base.errors import CheckpointError
from train.base.fields import key
from train.dataloader import open_token_data

USE = gpt.USE


@dataclass
class Keys:
    teacher: str = key("", "checkpoint of the teacher, a GPT", free=True, path=True, reads="apart")
    distill_weight: float = key(0.5, "weight of the teacher in the loss, 0 to 1", ge=0, le=1)
    distill_temperature: float = key(1.0, "softmax temperature of both models in training", gt=0)

    def problems(self):
        return [] if self.teacher else ["teacher: missing; e.g. out/quick/ckpt.pt"]


class Student(weights.HoldsFrozen, GPT):
    """A GPT that is trained on a teacher, `frozen[0]`. Without one, it has no loss.

    Its numbers include "kl", the divergence in nats per token: in training at distill_temperature.
    """

    def compute_loss(self, idx, targets):
        x = self.trunk(idx)  # (B, T, C)
        loss, sums = self.score(x, targets)
        with torch.no_grad():
            y = self.frozen[0].trunk(idx)  # (B, T, C of the teacher)
        # One chunk of logits at a time, recomputed in the backward pass: 2 V numbers per token.
        n = chunk_rows(self.config.padded_vocab_size, x.device.type)
        chunks = zip(*(t.split(n) for t in (x.flatten(0, 1), y.flatten(0, 1), targets.flatten())))
        T = self.keys.distill_temperature if self.training else 1.0
        kl = sum(checkpoint(self.divergence, *chunk, T, use_reentrant=False) for chunk in chunks)
        sums["kl"] = kl.detach()
        if self.training:  # the gradient of the divergence is proportional to 1 / T^2
            weight = self.keys.distill_weight
            loss = (1 - weight) * loss + weight * T**2 * (kl / sums["count"].clamp(min=1))
        return loss, sums

    def divergence(self, x, y, targets, temperature):
        """Return the sum () float32 over the targets of KL(teacher, student) in nats, from states
        x (N, C) and y (N, C of the teacher); targets (N,)."""
        V = self.config.vocab_size
        z = self.logits(x) / temperature  # (N, V)
        with torch.no_grad():
            p = F.log_softmax(self.frozen[0].logits(y)[:, :V] / temperature, -1)  # (N, V)
        kl = F.kl_div(F.log_softmax(z, -1), p, reduction="none", log_target=True).sum(-1)  # (N,)
        return (kl * (targets != IGNORE)).sum()

    def flops_per_unit(self):
        """Return the FLOPs per token, including the teacher's forward pass."""
        # The divergence computes the output layer once more.
        divergence = 6 * (self.lm_head or self.wte).weight.numel() if self.frozen else 0
        return (super().flops_per_unit() + divergence
                + sum(m.flops_per_unit() for m in self.frozen))


# -----------------------------------------------------------------------------
# model interface, see train/system.py

sample = gpt.sample
inherit_shape = gpt.inherit_shape


def open_data(config, ranks):
    data = open_token_data(config, ranks)
    teacher = weights.describe_backbone(config.teacher, "teacher", ranks)
    weights.check_tokenizer(teacher["tokenizer"], config.teacher, data.spec, config)
    data.spec["teacher"] = teacher["digest"]  # a resumed run must use the same teacher
    return data


def build_model(config, data):
    student = gpt.build_model(config, data, Student)
    if not hasattr(data, "train"):  # a checkpoint that is loaded for sampling
        return student
    student.keys = config
    teacher, _, _ = weights.load_frozen(config.teacher, "teacher")
    n_ids = data.spec["vocab_size"]
    if (not isinstance(teacher, GPT) or teacher.config.vocab_size < n_ids
            or teacher.config.block_size < config.block_size):
        raise CheckpointError(f"teacher: {config.teacher}: expected a GPT with at least the "
                              f"{n_ids} ids of the data and the student's block_size, "
                              f"{config.block_size}")
    student.frozen = (teacher,)
    return student
