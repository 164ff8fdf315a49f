"""GRPO (arXiv:2402.03300): reinforcement learning of a chat model from rewards for answers.

    python -m data.prepare.prompts example --tokenizer out/chat/ckpt.pt --out data/bin/prompts
    python run_train.py --config train/configs/grpo.yaml
    python -m model.sample --ckpt out/grpo/ckpt.pt --chat

A step samples group_size answers per prompt, at temperature 1, and uses each for one update. The
probability ratio of GRPO is therefore 1, and clipping is omitted, as is the KL divergence from the
initial model (arXiv:2503.14476 omits it, too). The defaults are DAPO's loss in TRL: the sum over
all answer tokens of the global batch, divided by their number. The value of the loss is near 0 for
any rewards; rewards are logged as `reward`. The evaluation loss is the negative mean reward.
Sampling is a function of the seed and of the number of the sample, so that a resumed run, and any
number of ranks, generates the same answers.

The key `reward` selects exact match or a Python file of the user, which is executed. It is read
from the command line or YAML only, never from a checkpoint or data, and only training imports it.

Shapes: B prompts, K answers per prompt, N = B K; n rows of T tokens with a prompt and answers.
"""

import contextlib
import hashlib
import itertools
import json
import os
import runpy
import traceback
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from data.chat_template import ChatTemplate
from data.rows import open_rows
from data.tokenizer_types import data_errors
from model import chat
from model.chat import USE, as_gpt, inherit_shape, sample  # noqa: F401  model interface
from model.core.adapters import WithAdapters, add_adapters
from model.core.generate import generate
from model.core.init import stable_hash
from model.core.ops import IGNORE, extend_history, token_logprobs
from train.base.errors import DataError, UserError
from train.base.fields import key
from train.base.tensors import digest
from train.dataloader import Data, RowLoader
from train.distributed import all_gather_vectors

MAX_REWARD = 1e15  # the squared norm of gradients must be finite in float32
WIDTH_MULTIPLE = 32  # of rows, in tokens: few different shapes
PADDING = (0, 0, 0, IGNORE, -1, 0.0)  # a padded position of a row, see pack_answers
MIN_DEVIATION = 1e-4  # added to the standard deviation of rewards, as in TRL


@dataclass
class Keys(chat.FromChatKeys):
    reward: str = key("exact", "exact: 1 for the reference answer, else 0; or a Python file with "
                      "reward(prompt, answer, row), executed", free=True, path=True, reads="apart")
    group_size: int = key(8, "answers per prompt, which are compared with each other", ge=2)
    answer_tokens: int = key(64, "maximum number of tokens per answer", ge=1)
    grpo_norm: str = key("tokens", "divide the loss by all tokens, per answer, or by answer_tokens",
                         choices=["tokens", "answer", "constant"])
    grpo_scale: str = key("group", "rewards whose standard deviation divides the advantages",
                          choices=["group", "batch", "none"])
    mask_truncated: bool = key(False, "learn nothing from answers without an end token")

    def problems(self):
        problems = super().problems()
        if self.grpo_scale == "batch" and self.gradient_accumulation_steps > 1:
            problems.append("grpo_scale: batch needs gradient_accumulation_steps 1, because the "
                            "deviation is that of all rewards of the step")
        return problems


# -----------------------------------------------------------------------------
# the models

class AnsweringGPT(chat.ChatGPT):
    """Base class of a chat model that is trained on answers that it generates.

    Called with (prompts, lengths, row_numbers, sample_numbers), it returns (loss, sums); subclasses
    implement this as compute_loss(), with sample_numbers=None in evaluations.
    prompts (B, P): token ids, right-padded. lengths (B,): true lengths.
    row_numbers (B,): indices of the prompts in reward_function.lines.
    sample_numbers (B,): the samples' numbers, counted over all epochs, for the answers' seeds.
    Answers are sampled in training, greedy in evaluations. numbers() divides the sums by the number
    of prompts: sums["prompts"] or, without it, sums["count"] (default: B). The caller must set
    keys, a TrainConfig, and reward_function, a RewardFunction.
    """

    def first_prompts(self, prompts, lengths, *rest):
        return [ids[:n].tolist() for ids, n in zip(prompts, lengths)]

    def numbers(self, sums):
        n_prompts = sums.get("prompts", sums["count"])  # sums["count"] are tokens
        sums = {name: value for name, value in sums.items() if name != "prompts"}
        return super().numbers(sums | dict(count=n_prompts))

    def sample_answers(self, prompts, lengths, sample_numbers, samples_per_row=1):
        """Sample samples_per_row answers per prompt at temperature 1, for a training step.

        sample_numbers (B,) int64. For other arguments and the result, see generate_answers().
        A prompt has one seed for all answers, a function of config.seed and the sample number, so
        that answers do not depend on the batch. Dropout is off; training mode is set afterwards.
        """
        seeds = [stable_hash(self.keys.seed, f"answers {g}") for g in sample_numbers.tolist()]
        self.eval()
        answers = self.generate_answers(prompts, lengths, samples_per_row, seeds)
        self.train()
        # PyTorch 2.10's autocast would reuse the weights that it converted here, which have no
        # gradients (pytorch#158232).
        torch.clear_autocast_cache()
        return answers

    def generate_answers(self, prompts, lengths, samples_per_row=1, seeds=None):
        """Return B * samples_per_row answers, lists of token ids, consecutive for each prompt.

        prompts (B, P): token ids, right-padded. lengths (B,): true lengths.
        seeds: B ints, to sample at temperature 1; `None`: greedy.
        An answer has 1 to keys.answer_tokens ids; the last may be an end token. Requires eval mode.
        """
        prompts = prompts[:, :int(lengths.max())]
        ends = self.reward_function.ends
        # The ranks of a sharded model must run the same number of forward passes.
        out = generate(self, prompts, self.keys.answer_tokens, temperature=1.0 if seeds else 0.0,
                       seed=seeds, stop_token=None if hasattr(self, "reshard") else ends,
                       n_vocab=self.reward_function.tokenizer.n_vocab, lengths=lengths,
                       samples_per_row=samples_per_row)
        return [cut_at_end(ids, ends) for ids in out[:, prompts.size(1):].tolist()]

    def pack(self, prompts, lengths, answers, weights):
        """Return [tokens (n, T, 5), weights (n, T)] of collate_rows() on the device of `prompts`.

        prompts, lengths: as for generate_answers(). answers: B * K lists of token ids, likewise.
        weights (B, K): one per answer, see pack_answers(); if all are 0, n is 1: a row of padding.
        """
        rows = []
        K = weights.size(1)
        # Windows count places in a row, in which other answers would move the prompt away.
        limit = min(block.attn.window or self.keys.block_size for block in self.h)
        for i, (prompt, n) in enumerate(zip(prompts.tolist(), lengths.tolist())):
            rows += pack_answers(prompt[:n], answers[K * i:K * i + K], weights[i].tolist(),
                                 limit)
        return [t.to(prompts.device) for t in collate_rows(rows, self.keys.block_size)]

    def flops_per_unit(self):
        """Return the FLOPs of training per prompt with one answer, including generation."""
        return super().flops_per_unit() * 4 / 3


class PolicyGPT(WithAdapters, AnsweringGPT):
    """A chat model that is trained by GRPO on rewards for answers, called as AnsweringGPT.

    The caller must also set ranks, the Ranks of the run.
    Logged: the mean "reward" and "length" (in tokens) of answers; in training also "truncated", the
    share of answers without an end token, and means over groups, the answers to one prompt:
    "spread", the standard deviation of rewards; "best", the highest; "flat", whether all are equal.
    """

    def compute_loss(self, prompts, lengths, row_numbers, sample_numbers=None):
        if not self.training:
            return self.evaluate_answers(prompts, lengths, row_numbers)
        batch, sums = self.sample_batch(prompts, lengths, row_numbers, sample_numbers)
        return self.policy_loss(*batch), sums

    def policy_loss(self, tokens, weights, count):
        """Return -sum(weights * ratio) / max(count, 1), whose gradient is the policy gradient.

        tokens (n, T, 5), weights (n, T): the result of pack(), with advantages as weights.
        count: 0-dim. ratio (n, T) is 1, with the gradient of the targets' log probabilities.
        """
        logps = answer_logps(self, tokens)  # (n, T)
        ratio = (logps - logps.detach()).exp()  # of the probabilities after and before: 1
        return -(weights * ratio).sum() / count.clamp(min=1)

    @torch.compiler.disable
    @torch.no_grad()
    def sample_batch(self, prompts, lengths, row_numbers, sample_numbers):
        """Sample group_size answers per prompt; return (arguments of policy_loss(), sums).

        sums {name: 0-dim tensor}: over the prompts, for the log; "count" is the divisor of the
        loss. With grpo_scale "batch", all ranks must call. Raises UserError for errors of the
        reward function.
        """
        c = self.keys
        K = c.group_size
        answers = self.sample_answers(prompts, lengths, sample_numbers, K)
        rewards = [*map(self.reward_function, row_numbers.repeat_interleave(K).tolist(), answers)]
        rewards = torch.tensor(rewards, dtype=torch.float64).view(-1, K)  # (B, K)
        mean = rewards.mean(1, keepdim=True)
        spread = rewards.std(1, keepdim=True)
        flat = rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)  # (B, 1)
        n_tokens = torch.tensor([*map(len, answers)]).view(-1, K)  # (B, K)
        truncated = torch.tensor([answer[-1] not in self.reward_function.ends
                                  for answer in answers]).view(-1, K)
        learned = ~(truncated & c.mask_truncated)  # (B, K)
        advantages = rewards - mean  # (B, K)
        if c.grpo_scale == "group":
            advantages /= spread + MIN_DEVIATION
        elif c.grpo_scale == "batch":
            advantages /= all_gather_vectors(rewards.flatten(), self.ranks).std() + MIN_DEVIATION
        weights = torch.where(learned & ~flat, advantages, 0.0)
        if c.dry_run:  # the largest step, also if untrained weights receive equal rewards
            weights = torch.ones_like(weights)
        if c.grpo_norm == "answer":
            weights /= n_tokens
        n = len(answers)
        counts = dict(tokens=(n_tokens * learned).sum(), answer=n, constant=n * c.answer_tokens)
        sums = dict(count=counts[c.grpo_norm], prompts=len(prompts), reward=mean, spread=spread,
                    best=rewards.amax(1), flat=flat, length=n_tokens / K, truncated=truncated / K)
        sums = {name: torch.as_tensor(t).sum().to(prompts.device) for name, t in sums.items()}
        return [*self.pack(prompts, lengths, answers, weights), sums["count"]], sums

    @torch.compiler.disable
    def evaluate_answers(self, prompts, lengths, row_numbers):
        """Return the negative mean reward of greedy answers, and the sums of reward and length."""
        answers = self.generate_answers(prompts, lengths)
        reward = torch.tensor(float(sum(map(self.reward_function, row_numbers.tolist(), answers))))
        length = torch.tensor(float(sum(map(len, answers))))
        return -reward / len(prompts), dict(reward=reward, length=length)

    def flops_per_unit(self):
        """Return the training FLOPs per prompt, for group_size answers of the maximum length."""
        answers = (self.keys.group_size - 1) * self.keys.answer_tokens / self.row_tokens
        return super().flops_per_unit() * (1 + answers)


def cut_at_end(ids, ends):
    """Return the list `ids` up to and including the first token in `ends`."""
    for i, token in enumerate(ids, 1):
        if token in ends:
            return ids[:i]
    return ids


# -----------------------------------------------------------------------------
# rows with a prompt and several answers

def pack_answers(prompt, answers, weights, max_tokens):
    """Pack a prompt and answers to it into rows of at most max_tokens tokens.

    prompt: token ids. answers: lists of token ids. weights: one float per answer.
    Each row has the prompt and as many answers as fit; an answer that is too long gets a longer
    row. Answers with weight 0 are left out; equal answers are stored once, with the total weight.
    Returns a list of rows, [] if all weights are 0. A row is a list of (token, position, history,
    target, part, weight).
    position: from 0, as if the row had this answer only.
    history: the encoded tokens before, see histories() of model/core/ops.py.
    target: the next token; -1 in part 0, where the weight is 0.
    part: 0 for the prompt, at the start of the row; 1, 2, ... for answers, which attend only to the
    prompt and to themselves, and begin with the prompt's last token, which predicts the next.
    """
    totals = {}  # {answer: sum of the weights}
    for answer, weight in zip(map(tuple, answers), weights):
        if weight:
            totals[answer] = totals.get(answer, 0.0) + weight
    n = len(prompt) - 1
    rows = []
    for part, (answer, total) in enumerate(totals.items(), 1):
        ids = [*prompt, *answer]
        # (token, position, history, target) of each id but the last
        history = itertools.accumulate(ids, extend_history, initial=0)
        steps = list(zip(ids, range(len(ids)), history, ids[1:]))
        if not rows or len(rows[-1]) + len(answer) > max_tokens:
            rows.append([(*step[:3], IGNORE, 0, 0.0) for step in steps[:n]])
        rows[-1] += [(*step, part, total) for step in steps[n:]]
    return rows


def collate_rows(rows, max_tokens):
    """Return rows of pack_answers() as tensors (tokens (n, T, 5) int64, weights (n, T) float32).

    The last dimension of tokens is (token, position, history, target, part). Rows are padded to the
    same T, a multiple of WIDTH_MULTIPLE, or max_tokens if smaller; no row may be longer than
    max_tokens. Without rows, the result is one row of padding, which does not change the loss.
    """
    rows = rows or [[]]
    longest = max(1, *map(len, rows))
    width = min(-(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE, max_tokens)
    rows = [row + [PADDING] * (width - len(row)) for row in rows]
    return (torch.tensor([[step[:5] for step in row] for row in rows]),
            torch.tensor([[step[5] for step in row] for row in rows]))


def answer_states(model, tokens):
    """Return the states (n, T, C) after the final norm for tokens (n, T, 5) of collate_rows()."""
    idx, positions, history, _, part = tokens.unbind(-1)  # (n, T) each
    visible = (part[:, :, None] == part[:, None]) | (part == 0)[:, None]  # (n, T, T)
    return model.trunk(idx, mask=visible.tril()[:, None], positions=positions, history=history)


def answer_logps(model, tokens):
    """Return the float32 log probabilities (n, T) of targets in collate_rows() tokens; 0 at -1."""
    x = answer_states(model, tokens)
    targets = tokens[..., 3]
    return token_logprobs(model, x.flatten(0, 1), targets.flatten()).view_as(targets)


# -----------------------------------------------------------------------------
# rewards

class RewardFunction:
    """Callable (number, ids) -> reward, a finite float, for an answer to a prompt.

    number: index of the prompt in `lines`.
    ids: the answer, token ids, which `tokenizer` decodes to a text without the end tokens `ends`.
    function(question, text, row) -> number: reward() in the user's file at `path`; `None`: the
    reward is 1.0 if the text, stripped, equals the reference answer, else 0.0.
    The caller must set lines, for each prompt a JSON text with question, answer (the reference) and
    row (the record), see data.prepare.prompts. Raises UserError for errors in `function`, and for
    results that are not finite or exceed MAX_REWARD in absolute value.
    """

    def __init__(self, tokenizer, ends, function=None, path=""):
        self.tokenizer = tokenizer
        self.ends = ends
        self.function = function
        self.path = path
        self.lines = []

    def __call__(self, number, ids):
        # Parsed at each call: the function may change the row.
        record = json.loads(self.lines[number])
        question = record["question"]
        text = self.tokenizer.decode([i for i in ids if i not in self.ends])
        if not self.function:
            return float(text.strip() == record["answer"])
        with user_code(self.path, f"; the prompt: {question!r:.80}, the answer: {text!r:.80}"):
            value = float(self.function(question, text, record["row"]))
            if not abs(value) <= MAX_REWARD:
                raise ValueError(f"reward() returned {value}, expected a finite number up to "
                                 f"{MAX_REWARD:g}")
        return value


@contextlib.contextmanager
def user_code(path, context=""):
    """Return a context manager for calls of code in the user's file at `path`.

    An Exception or SystemExit is raised as a UserError with the line number in the file and with
    `context` at the end. Afterwards, the working directory is restored.
    """
    folder = os.getcwd()
    try:
        yield
    except (Exception, SystemExit) as error:
        lines = [f":{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)
                 if frame.filename == path]
        raise UserError(f"reward: {path}{lines[-1] if lines else ''}: {type(error).__name__}: "
                        f"{error}{context}") from None
    finally:
        os.chdir(folder)


def load_reward(path):
    """Return the function `reward` of the Python file `path`, executed; UserError for any error."""
    with user_code(path):
        names = runpy.run_path(path)
    if "reward" not in names:
        raise UserError(f"reward: {path}: expected a function reward(prompt, answer, row) in it")
    return names["reward"]


# -----------------------------------------------------------------------------
# model interface, see train/system.py

class PromptLoader(RowLoader):
    """RowLoader of AnsweringGPT's arguments; validation batches have no sample_numbers."""
    rows_digest = ""  # sha256 of the rows' records

    def read(self, g):
        return [*super().read(g), g]

    def identity(self):
        return super().identity() | dict(rows=self.rows_digest)


def open_prompts(config, ranks, needs_answers):
    """Return the Data of data.prepare.prompts, with PromptLoaders and a reward_function.

    reward_function, an additional attribute, is a RewardFunction for exact match. Raises DataError
    if the folder cannot be used, if the longest prompt and answer_tokens exceed block_size, or if
    needs_answers and a reference answer is missing. Disables cuDNN's attention in this process.
    """
    c = config
    meta, tokenizer, spec = chat.read_rows_meta(c, "grpo", "prompts")
    width = meta.block_size
    # On Hopper PyTorch prefers cuDNN's attention, which makes a new plan for each shape, and
    # prompts and packed answers have many.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if width + c.answer_tokens > c.block_size:
        raise DataError(f"answer_tokens: prompts of up to {width} tokens and answers of up to "
                        f"{c.answer_tokens} exceed the model's context, {c.block_size}; reduce it, "
                        "or prepare the prompts with a smaller --block_size")
    rewards = RewardFunction(tokenizer, ChatTemplate(meta.template).end_ids(tokenizer))

    def load(split):
        path = os.path.join(c.data_dir, f"{split}_rows.jsonl")
        tokens, length = open_rows(c.data_dir, split, tokens=((width,), 0, tokenizer.n_vocab),
                                   length=((), 1, width + 1))
        with data_errors(f"{path}: prepare the prompts again"):
            lines = Path(path).read_text("utf-8").splitlines()
            answers = [json.loads(line)["answer"] for line in lines]
        if needs_answers and None in answers:
            raise DataError(f"some rows of {path} have no reference answer, with which answers are "
                            "compared; only a reward in a Python file (grpo) needs none")
        numbers = len(rewards.lines) + np.arange(len(lines))
        rewards.lines += lines
        loader = PromptLoader((tokens, length, numbers), c, ranks)
        loader.rows_digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        return loader
    data = Data(load("train"), load("val") if c.eval_interval else None,
                spec | dict(row_tokens=width + c.answer_tokens), use=USE)
    data.reward_function = rewards
    return data


def open_data(config, ranks):
    """Return the Data of open_prompts() with `ranks` and the reward function of config.reward."""
    data = open_prompts(config, ranks, needs_answers=config.reward == "exact")
    data.ranks = ranks
    data.spec["reward"] = "exact"
    if config.reward != "exact":  # last: the file may change the current folder
        rewards = data.reward_function
        rewards.path = os.path.abspath(config.reward)
        rewards.function = load_reward(rewards.path)
        data.spec["reward"] = digest(rewards.path)
    return data


def build_model(config, data):
    model = chat.build_model(config, data, PolicyGPT)
    model.keys = config
    if hasattr(data, "train"):  # not for a checkpoint that is loaded for sampling
        model.reward_function = data.reward_function
        model.ranks = data.ranks
    return add_adapters(model, config.lora_rank, config.seed)


