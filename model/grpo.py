"""Rewards (GRPO, arXiv:2402.03300): the model writes answers, and those that are worth more than
the others to the same question become likelier.

    python -m data.prepare.prompts example --tokenizer out/chat/ckpt.pt --out data/bin/prompts
    python run_train.py --config train/configs/grpo.yaml
    python -m model.chat --ckpt out/grpo/ckpt.pt

A step writes group_size answers to each of its prompts, at temperature 1, and learns from them
once. So the ratio of GRPO is 1 and its clip never acts: there is none. The loss that is shown is
minus the mean reward (and grpo_beta times the divergence from the model that training starts from);
its gradient is GRPO's. What is drawn is a function of the seed and the number of the sample, so a
run that was killed writes the same answers again, and so do other numbers of ranks.

What an answer is worth says `reward`: exact match, or a Python file of yours, the one place where
code that is not in this repository runs. It is read off the command line or YAML alone: no
checkpoint and no data can name it, and nothing but training imports it.

Shapes: B prompts, K answers to each, N = B K; n rows of T tokens, a prompt with answers to it.
"""

import hashlib
import importlib.util
import json
import math
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from data.chat_template import ChatTemplate
from data.rows import open_rows
from model import chat, gpt
from model.core.generate import generate
from model.core.init import stable_hash
from model.core.load import model_of
from model.core.ops import IGNORE, chunk_rows
from model.core.weights import read_backbone
from model.lora import OwnAdapters, adapt, own_adapters_as_gpt
from train.base.errors import DataError, UserError
from train.base.fields import key
from train.dataloader import Data, RowLoader
from train.distributed import broadcast_from_rank0

USE = "python -m model.chat --ckpt {out}/ckpt.pt"  # said at the end of a run
WIDTHS = 32  # rows are a multiple of it long: few shapes to compile for

inherit_shape, as_gpt = gpt.inherit_shape, own_adapters_as_gpt


@dataclass
class Keys:
    reward: str = key("exact", "exact: 1 for the answer that the data hold back, else 0; or a "
                      "Python file, which is run, with reward(prompt, answer, row) -> number",
                      free=True, path=True, reads="apart")
    group_size: int = key(8, "answers to a prompt, which are compared with each other", ge=2)
    answer_tokens: int = key(64, "the most tokens of an answer", ge=1)
    grpo_beta: float = key(0.0, "weight of the KL divergence from the model it starts from", ge=0)
    lora_rank: int = key(0, "rank of adapters on attention and MLP, trained alone; 0: none", ge=0)

    def problems(self):
        out = []
        if self.init_from == "scratch":
            out.append("init_from: missing; name the checkpoint of a chat model, such as "
                       "out/chat/ckpt.pt")
        if self.reward != "exact" and not self.reward.endswith(".py"):
            out.append(f"reward: {self.reward!r}: expected exact, or the name of a Python file "
                       "(.py)")
        return out


class RewardedGPT(OwnAdapters):
    """A chat model that also takes prompts (B, P) with their lengths (B,), the numbers of their
    rows (B,) and of the samples (B,), and learns from answers of its own. Everything else is as in
    ChatGPT. judge: what they are worth. reference: a tuple of the model it starts from, so that it
    is no part of this one; empty: none is asked for."""
    judge, reference = None, ()

    def forward(self, idx, targets=None, number=None, sample=None, cache=None, last_only=False):
        if number is None:
            return super().forward(idx, targets, None, cache, last_only)
        if not self.training:
            return self.examine(idx, targets, number)
        batch, sums = self.write(idx, targets, number, sample)
        loss, kl = self.learn(*batch)
        return loss, sums | (dict(kl=kl / self.group_size) if self.reference else {})

    def learn(self, tokens, weights, rewards):
        """(loss, KL summed over the answers) of rows as lay_out() makes them, from N answers with
        these rewards (N,)."""
        own, (advantage, share) = answer_logps(self, tokens), weights.unbind(-1)  # (n, T) each
        # The value of the first part is 0: what is shown is what is to fall, minus the reward.
        loss = -(advantage * (own - own.detach())).sum() / len(rewards) - rewards.mean()
        kl = torch.zeros_like(rewards[0])
        for model in self.reference:
            more = answer_logps(model, tokens) - own
            kl = ((more.exp() - more - 1) * share).sum()  # never negative, and right in the mean
            loss = loss + self.beta * kl / len(rewards)
        return loss, kl.detach()

    @torch.compiler.disable
    @torch.no_grad()
    def write(self, prompts, lengths, numbers, samples):
        """The batch that learn() takes, and sums over the prompts."""
        K, device, most = self.group_size, prompts.device, self.config.block_size
        seeds = [stable_hash(self.seed, f"answers {g}") for g in samples.tolist()]
        self.eval()  # without dropout
        answers = self.answers(prompts, lengths, K, seeds)
        self.train()
        # With PyTorch 2.10 autocast would go on to use the weights that it cast here, which have no
        # gradients (pytorch#158232).
        torch.clear_autocast_cache()
        rewards, _, _ = zip(*map(self.judge, numbers.repeat_interleave(K).tolist(), answers))
        rewards = torch.tensor(rewards, dtype=torch.float64).view(-1, K)
        mean, spread = rewards.mean(1, keepdim=True), rewards.std(1, keepdim=True)
        flat = spread < 1e-6  # nothing to learn from
        advantages = torch.where(flat, 0.0, (rewards - mean) / spread).tolist()
        rows = [row for i, n in enumerate(lengths.tolist()) if self.reference or not flat[i]
                for row in lay_out(prompts[i, :n].tolist(), answers[K * i:K * i + K],
                                   advantages[i], most)]
        fold = 1 if device.type == "cpu" else len(prompts)  # elsewhere other shapes cost more
        batch = *table(rows, most, fold), rewards.flatten().float()
        sums = dict(reward=mean, spread=spread, best=rewards.amax(1), flat=flat,
                    length=torch.tensor([len(said) / K for said in answers]))
        return [t.to(device) for t in batch], {k: t.sum().to(device) for k, t in sums.items()}

    @torch.compiler.disable
    def examine(self, prompts, lengths, numbers):
        """(loss, sums) of an evaluation: of the most likely answers."""
        answers = self.answers(prompts, lengths)
        rewards, exact, _ = zip(*map(self.judge, numbers.tolist(), answers))
        sums = dict(reward=rewards, length=map(len, answers), exact=[e is True for e in exact],
                    held=[e is not None for e in exact])
        sums = {k: torch.tensor(float(sum(v)), device=prompts.device) for k, v in sums.items()}
        return -sums["reward"] / len(prompts), sums

    def answers(self, prompts, lengths, each=1, seeds=None):
        """[ids of an answer, with its end token if it came to an end], `each` to every prompt;
        seeds: one for each prompt, None for the most likely answers."""
        prompts, ends = prompts[:, :int(lengths.max())], self.judge.ends
        # The ranks of a sharded model compute together: none may be done before the others.
        out = generate(self, prompts, self.answer_tokens, temperature=1.0 if seeds else 0.0,
                       seed=seeds, stop_token=None if hasattr(self, "reshard") else ends,
                       n_vocab=self.judge.tokenizer.n_vocab, lengths=lengths, samples_per_row=each)
        return [said[:next((i for i, token in enumerate(said, 1) if token in ends), len(said))]
                for said in out[:, prompts.size(1):].tolist()]

    def numbers(self, sums):
        """{"reward", "length" of the answers}; in training also "spread" (standard deviation within
        a group), "best" reward of a group, "flat" (share of groups whose answers are all worth the
        same) and "kl", in evaluations "exact" (of the questions with an answer held back)."""
        if "reward" not in sums:
            return super().numbers(sums)
        out = {k: float(v / sums["count"]) for k, v in sums.items()
               if k not in ("loss", "count", "exact", "held")}
        if "held" in sums:
            out["exact"] = float(sums["exact"] / sums["held"]) if sums["held"] else None
        return out

    def _apply(self, fn, recurse=True):
        for model in self.reference:  # goes where the model goes
            model._apply(fn)
        return super()._apply(fn, recurse)

    def flops_per_unit(self):
        """Of answers as long as they may be. Writing is a forward pass more, and so is the
        reference; the prompt is computed once for all of them."""
        more = (self.group_size - 1) * self.answer_tokens / self.row_tokens
        return super().flops_per_unit() * (1 + more) * (4 + len(self.reference)) / 3


def lay_out(prompt, answers, advantages, most):
    """Rows of at most `most` tokens with a prompt and as many answers to it as there is room for,
    so that it is computed once and not once for each; equal answers are one, with the sum of their
    advantages. A row is a list of (token, part: see chat.Branches, what is said after it, advantage
    and share of it): an answer begins with the last token of the prompt, after which it is said."""
    *start, last = prompt
    worth, rows = {}, []
    for said, advantage in zip(map(tuple, answers), advantages):
        worth.setdefault(said, []).append(advantage)
    for part, (said, a) in enumerate(worth.items(), 1):
        if not rows or len(rows[-1]) + len(said) > most:
            rows.append([(token, 0, IGNORE, 0.0, 0.0) for token in start])
        per_token = sum(a) / len(said), len(a) / len(said)
        rows[-1] += [(*pair, *per_token) for pair in zip((last, *said), [part] * len(said), said)]
    return rows


def table(rows, most, fold=1):
    """(tokens (n, T, 3), weights (n, T, 2)) of rows, with nothing to say behind their ends, n being
    a multiple of `fold`, not 0: from rows without tokens nothing is learned."""
    rows = rows + [[]] * max(-len(rows) % fold, fold * (not rows))
    nothing = (0, -1, IGNORE, 0.0, 0.0)
    width = min(-(-max(1, *map(len, rows)) // WIDTHS) * WIDTHS, most)
    # In float32, which has all whole numbers up to 2 ** 24.
    whole = torch.tensor([row + [nothing] * (width - len(row)) for row in rows])
    return whole[..., :3].long(), whole[..., 3:]


def answer_logps(model, tokens):
    """Log probabilities (n, T) float32 of what rows of tokens (n, T, 3) say, 0 for IGNORE."""
    idx, part, said = tokens.unbind(-1)  # (n, T) each
    x = model.trunk(idx, chat.Branches(part))  # (n, T, C)
    head, V = model.head_weight(), model.config.vocab_size
    # A chunk of logits at a time, made again in the backward pass.
    n = chunk_rows(head.size(0), x.device.type)
    parts = zip(x.flatten(0, 1).split(n), said.flatten().split(n))
    return torch.cat([checkpoint(token_logps, *part, head, V, use_reentrant=False)
                      for part in parts]).view_as(idx)


def token_logps(x, targets, head, V):
    return -F.cross_entropy(F.linear(x, head).float()[:, :V], targets, ignore_index=IGNORE,
                            reduction="none")


# -----------------------------------------------------------------------------
# what answers are worth

class Judge:
    """What an answer is worth: judge(number of the row, ids of the answer) -> (reward, whether it
    is the one that was held back or None where none was, its text). lines: those of
    SPLIT_rows.jsonl; function: that of the file at `path`, None for exact match."""

    def __init__(self, tokenizer, ends, function=None, path=""):
        self.tokenizer, self.ends, self.function, self.path = tokenizer, ends, function, path
        self.lines = []

    def __call__(self, number, ids):
        # Read anew each time: what the function does to its row is gone afterwards.
        line = json.loads(self.lines[number])
        text = self.tokenizer.decode([i for i in ids if i not in self.ends])
        exact = None if line["answer"] is None else text.strip() == line["answer"]
        reward = self.ask(line["question"], text, line["row"]) if self.function else bool(exact)
        return reward, exact, text

    def ask(self, question, text, row):
        about = f"; the prompt: {question!r:.80}, the answer: {text!r:.80}"
        try:
            said = self.function(question, text, row)
        except Exception as error:
            raise UserError(where(error, self.path) + about) from None
        try:
            if math.isfinite(value := float(said)):
                return value
        except (TypeError, ValueError):
            pass
        raise UserError(f"reward: {self.path}: reward() returned {said!r:.80}, expected a finite "
                          f"number{about}")


def where(error, path):
    """What went wrong in a person's own file, and in which of its lines."""
    places = [f":{place.lineno}" for place in traceback.extract_tb(error.__traceback__)
              if place.filename == path]
    return f"reward: {''.join([path, *places[-1:]])}: {type(error).__name__}: {error}"


def load_reward(path):
    """(the function reward of a Python file, its sha256). Runs the file. Raises UserError."""
    try:
        digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        spec = importlib.util.spec_from_file_location("reward_of_the_run", path)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(where(error, path)) from None
    if not callable(getattr(module, "reward", None)):
        raise UserError(f"reward: {path}: no function reward(prompt, answer, row) in it")
    return module.reward, digest


# -----------------------------------------------------------------------------
# what train/train.py asks of a model file

def read_lines(path, n):
    """Return (the `n` lines of a SPLIT_rows.jsonl, the number of lines with a reference answer).
    Raises DataError."""
    try:
        with open(path, encoding="utf-8") as f:
            lines = f.read().splitlines()
        n_answers = sum(json.loads(line)["answer"] is not None for line in lines)
        if len(lines) != n:
            raise ValueError(f"{len(lines)} lines for {n} prompts")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: {type(error).__name__}: {error}; damaged, or of other prompts: "
                        "prepare them again") from None
    return lines, n_answers


class Prompts(RowLoader):
    """Rows of prompts, their lengths and their numbers, and the numbers of the samples, which tell
    one answer to a prompt from another. rows: a digest of what the judge knows of them."""

    def __init__(self, arrays, rows, judge, config, ranks):
        super().__init__(arrays, config, ranks)
        self.rows_digest, self.judge = rows, judge

    def get_batch(self, device="cpu", step=0):
        return *super().get_batch(device, step), torch.from_numpy(self.sample_numbers([step]))

    def fixed_batch(self, index, count, device="cpu"):
        rows = super().fixed_batch(index, count, device)
        return *rows, rows[-1]  # nothing is drawn

    def identity(self):
        return super().identity() | dict(rows=self.rows_digest)


def open_data(config, ranks):
    """The Data of the prompts in config.data_dir, see data/prepare/prompts.py. DataError, UserError."""
    c = config
    make = (f"python -m data.prepare.prompts FILE... --out {c.data_dir} --tokenizer CKPT.pt, or `example` "
            "for FILE")
    meta, tokenizer, spec = chat.read_rows(c, "grpo", f"no prompts; make some: {make}")
    width, most = meta.block_size, c.block_size - c.answer_tokens
    if width > most:
        raise DataError(f"answer_tokens: prompts of up to {width} tokens and answers of up to "
                        f"{c.answer_tokens} are longer than the model's context, {c.block_size}; a "
                        f"smaller answer_tokens, or prepare shorter prompts: {make} --block_size "
                        f"{max(1, most)}")
    judge, digest = Judge(tokenizer, ChatTemplate.from_spec(meta.template).end_ids(tokenizer)), "exact"
    if c.reward != "exact":
        judge.path = str(Path(c.reward).absolute())
        judge.function, digest = load_reward(judge.path)

    def load(split):
        path = str(Path(c.data_dir, f"{split}_{{}}")).format
        tokens, length = open_rows(c.data_dir, split, tokens=((width,), 0, tokenizer.n_vocab),
                                   length=((), 1, width + 1))
        lines, held = read_lines(path("rows.jsonl"), len(tokens))
        if not judge.function and held < len(lines):
            raise DataError(f"reward: exact, but {len(lines) - held:,} rows of {path('rows.jsonl')}"
                            " have no answer to compare with; name a Python file (.py) instead")
        first, judge.lines = len(judge.lines), judge.lines + lines
        rows = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        return Prompts((tokens, length, first + np.arange(len(tokens))), rows, judge, c, ranks)
    data = Data(load("train"), load("val") if c.eval_interval else None,
                spec | dict(row_tokens=width + c.answer_tokens, reward=digest))
    if c.grpo_beta:  # a run goes on with the same one
        data.spec["reference"] = broadcast_from_rank0(
            lambda: read_backbone(c.init_from, "init_from")["digest"], ranks)
    return data


def build_model(config, data):
    model = chat.build_model(config, data, RewardedGPT)
    model.group_size, model.answer_tokens = config.group_size, config.answer_tokens
    model.beta, model.seed = config.grpo_beta, config.seed
    if hasattr(data, "train"):  # not where it is only to write
        model.judge = data.train.judge
        if config.grpo_beta:
            with torch.device("cpu"):
                model.reference = (model_of(read_backbone(config.init_from, "init_from"),
                                            config.init_from)[0].requires_grad_(False),)
    return adapt(model, config)


def sample(model, data, config):
    """Texts of an evaluation: answers to config.sample_prompts, or, with what they are worth, to
    three questions of the validation: the most likely one and three that are drawn."""
    if config.sample_prompts:
        return chat.sample(model, data, config)
    prompts, lengths, numbers = (t[:3] for t in data.val.fixed_batch(
        0, 3, model.wte.weight.device)[:3])
    texts, seeds = [], [stable_hash(config.seed, f"sample {i}") for i in range(len(prompts))]
    likely, drawn = model.answers(prompts, lengths), model.answers(prompts, lengths, 3, seeds)
    for i, (ids, length, n) in enumerate(zip(prompts, lengths, numbers.tolist())):
        found = [model.judge(n, said) for said in (likely[i], *drawn[3 * i:3 * i + 3])]
        texts.append(model.judge.tokenizer.decode(ids[:length].tolist()) + "".join(
            f"\n{reward:8.4g}  {text}" for reward, _, text in found))
    return texts
