"""Distillation (arXiv:1503.02531): train a small GPT on the output distribution of a larger one.

    python run_train.py --config train/configs/distill.yaml --teacher out/quick/ckpt.pt
    python -m model.sample --ckpt out/distill/ckpt.pt

The training loss is (1 - distill_weight) times the cross-entropy on the text plus distill_weight
times T^2 times the KL divergence from the teacher's distribution at the softmax temperature T =
distill_temperature. Evaluations report the cross-entropy, and the divergence at temperature 1 as
val_kl, so that runs with different keys can be compared, and val_teacher_loss, the cross-entropy of
the teacher. The teacher is frozen, in the precision of the file, not sharded, and in no checkpoint.
Several teachers, `--teacher A,B`, are an ensemble: the mean of their distributions. The result is a
GPT.

With on_policy the student, a chat model, answers prompts, and the loss is the KL divergence in the
other direction, from the student's distribution to the teacher's, at each token of its answers
(arXiv:2306.13649); no gradient goes through the sampling. As in model/grpo.py, the random numbers
depend on the seed and the sample's number only.

    python -m data.prepare.prompts example --tokenizer out/chat_short/ckpt.pt --out data/bin/prompts
    python run_train.py --config train/configs/distill_answers.yaml

Shapes: B, T, C, V as in model/gpt.py.
"""

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from model import chat, grpo
from model.chat import sample  # noqa: F401  model interface
from model.core import weights
from model.core.ops import IGNORE, chunk_rows
from model.gpt import GPT, USE, as_gpt, inherit_shape  # noqa: F401  model interface
from train.base.errors import CheckpointError
from train.base.fields import key
from train.config import split_paths
from train.dataloader import open_token_data


@dataclass
class Keys:
    teacher: str = key("", "checkpoint of the teacher, a GPT; A,B: the mean of several",
                       free=True, path=True, reads="apart")
    distill_weight: float = key(0.5, "weight of the teacher in the loss, 0 to 1", ge=0, le=1,
                                needs="on_policy=False")
    distill_temperature: float = key(1.0, "softmax temperature of both models in training", gt=0,
                                     le=100)
    on_policy: bool = key(False, "learn from the teacher at each token of the student's answers")
    answer_tokens: int = key(64, "maximum number of tokens per answer", ge=1, needs="on_policy")

    def problems(self):
        return [] if self.teacher else ["teacher: missing; e.g. out/quick/ckpt.pt"]


class HasTeachers(weights.HoldsFrozen):
    """Mixin for a GPT that is compared with the mean distribution of the GPTs in `frozen`.

    reverse: the divergence is KL(this model, teachers) instead of KL(teachers, this model).
    """
    reverse = False

    def compare(self, x, states, targets, weights, temperature=1.0):
        """Return the KL divergence and the teachers' cross-entropy, sums over tokens, float32 (2,).

        x (B, T, C): states of this model after the final norm.
        states: the same of each model in self.frozen, (B, T, C') with the width C' of that model.
        targets (B, T) int64: -1 does not count in the cross-entropy. weights (B, T): per token.
        Both sums are weighted, in nats, and at the softmax temperature `temperature`.
        """
        # One chunk of logits at a time, recomputed in the backward pass: 2 V numbers per token.
        n = chunk_rows(self.config.padded_vocab_size, x.device.type)
        chunks = zip(*(t.flatten(0, 1).split(n) for t in (x, targets, weights, *states)))
        sums = [checkpoint(self.divergence, temperature, *chunk, use_reentrant=False)
                for chunk in chunks]
        return torch.stack(sums).sum(0)

    def divergence(self, temperature, x, targets, weights, *states):
        """Return compare() for N tokens: x (N, C); targets, weights (N,); states (N, C') each."""
        V = self.config.vocab_size
        q = F.log_softmax(self.logits(x) / temperature, -1)  # (N, V)
        with torch.no_grad():
            logprobs = [F.log_softmax(teacher.logits(y)[:, :V] / temperature, -1)
                        for teacher, y in zip(self.frozen, states)]
            p = functools.reduce(torch.logaddexp, logprobs) - math.log(len(logprobs))  # (N, V)
            teacher_loss = F.nll_loss(p, targets, ignore_index=IGNORE, reduction="none")  # (N,)
        pair = (p, q) if self.reverse else (q, p)  # F.kl_div(q, p) is KL(p, q)
        kl = F.kl_div(*pair, reduction="none", log_target=True).sum(-1)  # (N,)
        return (torch.stack((kl, teacher_loss)) * weights).sum(1)

    def teacher_flops(self):
        """Return the FLOPs per token of all teachers' forward passes."""
        # Of a chat model they are per row, of DPO per pair, of GRPO with sampled answers.
        return sum((super(chat.ChatGPT, m) if isinstance(m, chat.ChatGPT) else m).flops_per_unit()
                   for m in self.frozen)


class Student(HasTeachers, GPT):
    """A GPT that is trained on text and on the mean distribution of the teachers.

    The caller must set keys, a TrainConfig, and frozen, the tuple of teachers, each a GPT; without
    teachers (a loaded checkpoint) it can only generate.
    Logged: "kl", the mean KL(teachers, student) in nats per token, at the softmax temperature
    distill_temperature (1 in evaluations); in evaluations also "teacher_loss", their cross-entropy.
    """

    def compute_loss(self, idx, targets):
        x = self.trunk(idx)  # (B, T, C)
        loss, sums = self.score(x, targets)
        with torch.no_grad():
            states = [teacher.trunk(idx) for teacher in self.frozen]  # (B, T, C of each)
        T = self.keys.distill_temperature if self.training else 1.0
        kl, teacher_loss = self.compare(x, states, targets, targets != IGNORE, T)
        sums["kl"] = kl.detach()
        if not self.training:
            return loss, sums | dict(teacher_loss=teacher_loss.detach())
        # The gradient of the divergence is proportional to 1 / T^2.
        weight = self.keys.distill_weight
        return (1 - weight) * loss + weight * T**2 * (kl / sums["count"].clamp(min=1)), sums

    def flops_per_unit(self):
        """Return the FLOPs of training per token, including the teachers' forward passes."""
        # The divergence computes the output layer once more.
        divergence = 6 * (self.lm_head or self.wte).weight.numel() if self.frozen else 0
        return super().flops_per_unit() + divergence + self.teacher_flops()


class AnsweringStudent(Student, grpo.AnsweringGPT):
    """A chat model that is trained on the teachers' distribution at each token of sampled answers.

    forward() is that of AnsweringGPT. The loss is T^2 KL(student, teachers) in nats per answer
    token, at the softmax temperature T = distill_temperature (1 in evaluations). Answers are
    sampled at temperature 1 in training, greedy in evaluations.
    Logged: "length", the mean length of answers in tokens; "exact", the share of answers that equal
    the reference answer.
    """
    reverse = True

    def compute_loss(self, prompts, lengths, row_numbers, sample_numbers=None):
        tokens, weights, sums = self.collect_answers(prompts, lengths, row_numbers, sample_numbers)
        x = grpo.answer_states(self, tokens)  # (B, T, C)
        with torch.no_grad():
            states = [grpo.answer_states(teacher, tokens) for teacher in self.frozen]
        T = self.keys.distill_temperature if self.training else 1.0
        kl, _ = self.compare(x, states, tokens[..., 3], weights, T)
        return T**2 * kl / sums["count"], sums

    @torch.compiler.disable
    @torch.no_grad()
    def collect_answers(self, prompts, lengths, row_numbers, sample_numbers):
        """Generate an answer per prompt; return (tokens (n, T, 5), weights (n, T), sums).

        For the arguments, see AnsweringGPT. Answers are sampled in training mode, else greedy.
        tokens: see collate_rows() of model/grpo.py. weights: 1 where the target is in an answer.
        sums {name: 0-dim tensor}: "count" and "length", tokens in answers; "prompts"; "exact".
        """
        answers = (self.sample_answers(prompts, lengths, sample_numbers) if self.training
                   else self.generate_answers(prompts, lengths))
        exact = sum(map(self.reward_function, row_numbers.tolist(), answers))
        n_tokens = sum(map(len, answers))
        sums = dict(count=n_tokens, length=n_tokens, prompts=len(prompts), exact=exact)
        return (*self.pack(prompts, lengths, answers, torch.ones(len(prompts), 1)),
                {name: prompts.new_tensor(n) for name, n in sums.items()})

    def flops_per_unit(self):
        """Return the FLOPs of training per prompt, including the teachers' forward passes."""
        return grpo.AnsweringGPT.flops_per_unit(self) + self.row_tokens * self.teacher_flops()


# -----------------------------------------------------------------------------
# model interface, see train/system.py

def open_data(config, ranks):
    data = (grpo.open_prompts(config, ranks, needs_answers=True) if config.on_policy
            else open_token_data(config, ranks))
    digests = []
    for path in split_paths(config.teacher):
        teacher = weights.describe_backbone(path, "teacher", ranks)
        weights.check_tokenizer(teacher["tokenizer"], path, data.spec, config)
        digests.append(teacher["digest"])
    data.spec["teacher"] = ",".join(digests)  # a resumed run must use the same teachers
    return data


def build_model(config, data):
    student = chat.build_model(config, data, AnsweringStudent if config.on_policy else Student)
    if not hasattr(data, "train"):  # a checkpoint that is loaded for sampling
        return student
    student.keys = config
    if config.on_policy:
        student.reward_function = data.reward_function
    student.frozen = tuple(load_teacher(path, config, data.spec["vocab_size"])
                           for path in split_paths(config.teacher))
    return student


def load_teacher(path, config, n_ids):
    """Return the frozen GPT at `path`; CheckpointError unless n_ids and config.block_size fit."""
    teacher, _, _ = weights.load_frozen(path, "teacher")
    if (not isinstance(teacher, GPT) or teacher.config.vocab_size < n_ids
            or teacher.config.block_size < config.block_size):
        raise CheckpointError(f"teacher: {path}: expected a GPT with at least the {n_ids} ids of "
                              f"the data and the student's block_size, {config.block_size}")
    return teacher
