"""Distillation (arXiv:1503.02531): a small GPT learns what a trained one expects.

    python run_train.py --config train/configs/distill.yaml --teacher out/quick/ckpt.pt
    python -m model.sample --ckpt out/distill/ckpt.pt

In training the loss is (1 - distill_weight) of the text's own and distill_weight of the Kullback-
Leibler divergence from the teacher's probabilities; evaluations have the text's own, as for every
GPT, and the divergence as val_kl. The teacher, of the same tokenizer, stays as it is, in the
precision of its file, whole on every rank, and in no checkpoint: what was trained is a GPT.

Shapes: B, T, C, V as in model/gpt.py.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from model import gpt
from model.core.load import model_of
from model.core.ops import IGNORE, chunk_rows
from model.core.weights import check_tokenizer, read_backbone
from model.gpt import GPT
from train.base.errors import CheckpointError
from train.base.fields import key
from train.dataloader import open_token_data
from train.distributed import broadcast_from_rank0

sample, inherit_shape, USE = gpt.sample, gpt.inherit_shape, gpt.USE


@dataclass
class Keys:
    teacher: str = key("", "checkpoint of the GPT to learn from", free=True, path=True,
                       reads="apart")
    distill_weight: float = key(0.5, "share of the teacher in the loss, 0 to 1", ge=0, le=1)
    distill_temperature: float = key(1.0, "both sides' logits are divided by this: above 1, what "
                                     "is unlikely counts for more", gt=0)

    def problems(self):
        return [] if self.teacher else ["teacher: missing; name the checkpoint of a GPT with the "
                                        "same tokenizer, such as out/quick/ckpt.pt"]


class Student(GPT):
    """A GPT; `teacher`, a tuple of another one, so that it is no part of this one. Where that is
    empty, to write text, this is a plain GPT."""
    teacher, weight, temperature = (), 0.5, 1.0

    def forward(self, idx, targets=None, cache=None, last_only=False):
        if targets is None or not self.teacher:
            return super().forward(idx, targets, cache, last_only)
        x, head, V = self.trunk(idx), self.head_weight(), self.config.vocab_size
        loss = self.loss(x, head, targets, V)
        with torch.no_grad():
            y = self.teacher[0].trunk(idx)  # (B, T, C of the teacher)
        # A chunk of logits at a time, made again in the backward pass: they are twice V a token.
        n = chunk_rows(head.size(0), x.device.type)
        chunks = zip(*(t.split(n) for t in (x.flatten(0, 1), y.flatten(0, 1), targets.flatten())))
        kl = sum(checkpoint(self.divergence, *chunk, head, use_reentrant=False)
                 for chunk in chunks)
        count = (targets != IGNORE).sum()
        if self.training:
            kl_mean = kl / count.clamp(min=1)
            loss = (1 - self.weight) * loss + self.weight * self.temperature**2 * kl_mean
            return loss, dict(count=count, kl=kl.detach())
        return loss, self.sums(targets) | dict(kl=kl)

    def divergence(self, x, y, targets, head):
        """Sum over the targets (N,) that count of KL(teacher, student), in nats, of states x (N, C)
        and the teacher's y. () float32. Its gradient falls with the temperature's square."""
        V = self.config.vocab_size
        z = F.linear(x, head).float()[:, :V] / self.temperature  # (N, V)
        with torch.no_grad():
            p = F.log_softmax(self.teacher[0].logits(y)[:, :V] / self.temperature, -1)
        each = F.kl_div(F.log_softmax(z, -1), p, reduction="none", log_target=True).sum(-1)  # (N,)
        return (each * (targets != IGNORE)).sum()

    def numbers(self, sums):
        """GPT's, and {"kl"}: nats a token."""
        out = super().numbers(sums)
        if "kl" in sums:
            out["kl"] = float(sums["kl"] / sums["count"]) if sums["count"] else None
        return out

    def _apply(self, fn, recurse=True):
        for model in self.teacher:  # goes where the model goes
            model._apply(fn)
        return super()._apply(fn, recurse)

    def flops_per_unit(self):
        """The teacher is frozen: a forward pass alone."""
        return super().flops_per_unit() + sum(m.flops_per_unit() for m in self.teacher)


# -----------------------------------------------------------------------------
# what train/train.py asks of a model file

def open_data(config, ranks):
    data = open_token_data(config, ranks)

    def describe():
        state = read_backbone(config.teacher, "teacher")
        return state["digest"], (state.get("spec") or state).get("tokenizer")
    digest, tokenizer = broadcast_from_rank0(describe, ranks)
    check_tokenizer(tokenizer, data.spec.get("tokenizer"), config.teacher, config.allow_change)
    data.spec["teacher"] = digest  # a run goes on with the same one
    return data


def build_model(config, data):
    student = gpt.build_model(config, data, Student)
    if hasattr(data, "train"):  # not where only the student is wanted
        student.teacher = (read_teacher(config, data.spec["vocab_size"]),)
        student.weight, student.temperature = config.distill_weight, config.distill_temperature
    return student


def read_teacher(config, vocab_size):
    """The frozen GPT of config.teacher, on the CPU. Raises CheckpointError."""
    with torch.device("cpu"):
        teacher, _ = model_of(read_backbone(config.teacher, "teacher"), config.teacher)
    if not isinstance(teacher, GPT) or teacher.config.vocab_size < vocab_size:
        raise CheckpointError(f"teacher: {config.teacher}: expected a GPT that knows the "
                              f"{vocab_size} ids of the data")
    if teacher.config.block_size < config.block_size:
        raise CheckpointError(f"teacher: {config.teacher} sees {teacher.config.block_size} tokens; "
                              f"expected at least the block_size, {config.block_size}")
    return teacher.requires_grad_(False)
