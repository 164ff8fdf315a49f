"""A GPT that answers: fine-tuned on conversations, with the loss on the assistant's words only.

    python -m data.prepare.chat FILE... --out data/bin/chat --tokenizer out/quick/ckpt.pt
    python run_train.py --config train/configs/chat.yaml
    python -m model.chat --ckpt out/chat/ckpt.pt

Several chats share a row of tokens. A mask keeps attention within each, and positions start anew in
each, so the loss of a chat is what it would be alone.
"""

import argparse
import contextlib
import itertools
import math
import os
import sys

import torch

from data.chat_template import ChatTemplate
from data.meta import read_meta, read_meta_for
from data.rows import open_rows
from data.tokenizer import open_folder_tokenizer, tokenizer_from_spec
from model import gpt
from model.core.load import BACKBONE, load_model
from model.core.ops import IGNORE
from model.gpt import GPT
from train.base.cli import run_command
from train.base.errors import DataError
from train.dataloader import Data, RowLoader

USE = "python -m model.chat --ckpt {out}/ckpt.pt"  # said at the end of a run


class Packed:
    """Rows of several chats, for GPT.trunk, which asks it what it asks a cache of keys: where the
    tokens stand and what they see. chat (B, T): the number of each token's chat in its row."""

    def __init__(self, chat):
        T = chat.size(1)
        here = torch.arange(T, device=chat.device)
        self.first = torch.cat((chat[:, :1] - 1, chat[:, :-1]), dim=1) != chat  # of each chat
        self.positions = here - (here * self.first).cummax(1).values  # (B, T), from 0 in each chat
        same = chat[:, :, None] == chat[:, None, :]  # (B, T, T)
        self.mask = (same & (here[:, None] >= here))[:, None]  # (B, 1, T, T)

    def start(self, T):
        return self.positions

    def previous(self, idx):
        return idx.roll(1, dims=1).masked_fill(self.first, -1)

    def update(self, layer, k, v):
        return k, v, self.mask

    def finish(self, idx):
        pass


class Branches(Packed):
    """Rows of a prompt and answers to it, each of which sees the prompt and itself. part (B, T): 0
    for the prompt, which comes first, another number for each answer, -1 behind the last one."""

    def __init__(self, part):
        super().__init__(part)
        self.said, self.length = part > 0, (part == 0).sum(1, keepdim=True)  # (B, T), (B, 1)
        self.positions = self.positions + self.length * self.said
        self.mask = self.mask | ((part == 0)[:, None] & self.said[..., None])[:, None]

    def previous(self, idx):
        before = super().previous(idx)
        last = idx.gather(1, (self.length - 1).clamp(min=0)).masked_fill(self.length == 0, -1)
        return torch.where(self.first & self.said, last, before)


class ChatGPT(GPT):
    """A GPT that also takes rows of chats: forward(tokens, mask, chat), (B, T + 1) each. Everything
    else is as in GPT. template: a ChatTemplate, None for a model that learned no chats."""
    template, row_tokens = None, 1

    def forward(self, idx, targets=None, chat=None, cache=None, last_only=False):
        if chat is None:
            return super().forward(idx, targets, cache, last_only)
        targets = torch.where(targets[:, 1:] == 1, idx[:, 1:], IGNORE)  # (B, T)
        x = self.trunk(idx[:, :-1], Packed(chat[:, :-1]))  # (B, T, C)
        loss = self.loss(x, self.head_weight(), targets, self.config.vocab_size)
        sums = dict(count=(targets != IGNORE).sum())
        return loss, sums if self.training else sums | self.exactness(x, targets)

    def exactness(self, x, targets):
        """Sums of an evaluation: tokens that are the most likely one, answers, and answers all of
        whose tokens are: sampling at temperature 0 writes exactly these. x (B, T, C)."""
        counted = targets != IGNORE  # (B, T)
        best = torch.stack([self.logits(row).argmax(-1) for row in x])  # a row's logits at once
        wrong = counted & (best != targets)
        before = torch.cat((torch.zeros_like(counted[:, :1]), counted[:, :-1]), dim=1)
        opens = (counted & ~before).flatten()  # the first token of each answer
        number = opens.cumsum(0)  # (B T,): of the answer, from 1
        errors = torch.zeros(number.numel() + 1, device=x.device)
        errors.index_add_(0, number, wrong.flatten().float())
        return dict(right=(counted & ~wrong).sum(), answers=opens.sum(),
                    exact=(opens & (errors[number] == 0)).sum())

    def numbers(self, sums):
        """{"ppl", "accuracy" of tokens, "exact" answers} of an evaluation; {} of training steps."""
        if "answers" not in sums:
            return super().numbers(sums)
        loss, count, right, answers, exact = (float(sums[n]) for n in (
            "loss", "count", "right", "answers", "exact"))
        if not answers:
            return dict(ppl=None, accuracy=None, exact=None)
        return dict(ppl=math.exp(min(loss / count, 700.0)), accuracy=right / count,
                    exact=exact / answers)

    def flops_per_unit(self):
        return super().flops_per_unit() * self.row_tokens


# -----------------------------------------------------------------------------
# what train/train.py asks of a model file

inherit_shape, as_gpt = gpt.inherit_shape, gpt.as_gpt


def is_chat(data_dir):
    """Whether a folder holds rows that data/prepare/chat.py wrote."""
    return os.path.isdir(data_dir) and read_meta(data_dir).model == "chat"


def read_rows(config, model, how_to_prepare, **types):
    """Return (Meta, tokenizer, spec of the Data) of the rows of chats in config.data_dir. model,
    how_to_prepare, types: see read_meta_for. Raises DataError."""
    folder = config.data_dir
    meta = read_meta_for(model, folder, how_to_prepare, **types, block_size=int, vocab_size=int,
                         template=dict)
    if meta.block_size > config.block_size:
        raise DataError(f"{folder}: rows for a block_size of {meta.block_size}, but the model's "
                        f"is {config.block_size}; prepare them with --block_size "
                        f"{config.block_size}")
    tokenizer = open_folder_tokenizer(folder)
    size = max(meta.vocab_size, config.vocab_size or 0)  # weights to start from may know more
    return meta, tokenizer, dict(vocab_size=size, tokenizer=tokenizer.spec(),
                                 template=meta.template, row_tokens=meta.block_size)


def open_data(config, ranks):
    """The Data of the rows in config.data_dir. Raises DataError."""
    c = config
    meta, tokenizer, spec = read_rows(
        c, "chat", "no chats; make some: python -m data.prepare.chat FILE... --out "
        f"{c.data_dir} --tokenizer CKPT.pt, or `example` for FILE")
    width = (meta.block_size + 1,)

    def load(split):
        arrays = open_rows(c.data_dir, split, tokens=(width, 0, tokenizer.n_vocab),
                           mask=(width, 0, 2), chat=(width, 0, 1 << 16))
        return RowLoader(arrays, c, ranks)
    return Data(load("train"), load("val") if c.eval_interval else None, spec)


def build_model(config, data, kind=ChatGPT):
    template = ChatTemplate.from_spec(data.spec["template"])
    template.check()
    model = gpt.build_model(config, data, kind)
    model.template, model.row_tokens = template, data.spec["row_tokens"]
    return model


def first_exchange(tokens, mask, *rest):
    """(ids of the prompt, ids of the answer without its end token) of a row's first exchange."""
    start = int(mask.argmax())
    length = int((mask[start:] == 0).long().argmax()) if not mask[start:].all() else (
        len(mask) - start)
    return tokens[:start].tolist(), tokens[start:start + length - 1].tolist()


def sample(model, data, config, exchange=first_exchange):
    """Texts of an evaluation: answers to config.sample_prompts, or to the first questions of three
    validation rows, with the right answer where it is another."""
    tokenizer, rights = tokenizer_from_spec(data.spec["tokenizer"]), itertools.repeat(None)
    asked = [model.template.prompt_ids([("user", text)], tokenizer)
             for text in config.sample_prompts]
    if not asked:
        asked, rights = zip(*(exchange(*row) for row in list(zip(
            *data.val.fixed_batch(0, 3)))[:3]))
    texts = []
    for ids, right in zip(asked, rights):
        said = answer(model, tokenizer, ids, config.sample_tokens)
        expected = "" if right in (None, said) else f"   [expected: {tokenizer.decode(right)}]"
        texts.append(tokenizer.decode(ids + said) + expected)
    return texts


# -----------------------------------------------------------------------------
# talking

def answer(model, tokenizer, ids, max_new_tokens, on_token=None, **how):
    """Ids of the model's answer to `ids`, without the end token. how: generate's temperature (0
    where nothing is said), top_k, top_p and seed."""
    from model.core.generate import generate
    room, ends = model.config.block_size, model.template.end_ids(tokenizer)
    idx = torch.tensor([ids[-room:]], device=model.wte.weight.device)
    out = generate(model, idx, max_new_tokens, **dict(temperature=0) | how, on_token=on_token,
                   stop_token=ends, n_vocab=tokenizer.n_vocab)
    said = out[0, idx.size(1):].tolist()
    return said[:-1] if said[-1:] and said[-1] in ends else said


def latest(turns, first, tokenizer, template, room):
    """(ids, how many turns were left out) of the latest exchanges of a conversation, after the
    turns that come `first`, that are within `room` up to where the next answer begins; at least of
    its last turn, a question."""
    for start in range(0, len(turns), 2):
        ids = template.prompt_ids([*first, *turns[start:]], tokenizer)
        if len(ids) <= room or start + 1 == len(turns):
            return ids, start


def talk(model, tokenizer, questions, max_new_tokens, system=None, **how):
    """Print the answer to each of `questions`, as it comes; each knows those before, as far as the
    context holds them and an answer, and the `system` message. A long answer may fill half of the
    context before it is in the way."""
    from model.core.detokenizer import TextStreamer
    size, turns, told = model.config.block_size, [], False
    room, ends = max(size - max_new_tokens, size // 2), model.template.end_ids(tokenizer)
    first = [("system", system)] if system and system.strip() else []
    for text in questions:
        turns.append(("user", text))
        known, left_out = latest(turns, first, tokenizer, model.template, room)
        if left_out and not told:
            told = True
            print(f"[the context of {size} tokens is full: only the latest exchanges are known "
                  "from here on]", file=sys.stderr)
        said = answer(model, tokenizer, known, max_new_tokens, TextStreamer(tokenizer, ends), **how)
        print(flush=True)
        turns.append(("assistant", tokenizer.decode(said)))


def typed():
    """Lines that a person types, until an empty one or the end."""
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while line := input("> " if sys.stdin.isatty() else "").strip():
            yield line


def chat(ckpt, prompt=None, max_new_tokens=256, temperature=0.0, top_k=None, top_p=None, seed=None,
         device="auto", backbone=None, system=None, min_p=None):
    """Talk with the model of a checkpoint: answer `prompt`, or else what is typed. UserError."""
    from train.distributed import get_device
    model, tokenizer = load_model(ckpt, get_device(device), backbone=backbone)
    if getattr(model, "template", None) is None:
        raise DataError(f"{ckpt}: this model learned no chats; fine-tune it: see python -m "
                        "data.prepare.chat --help, and run_train.py --config train/configs/chat.yaml")
    if prompt is None and sys.stdin.isatty():
        print("An empty line ends the conversation.", file=sys.stderr)
    talk(model, tokenizer, [prompt] if prompt else typed(), max_new_tokens,
         system=system, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, min_p=min_p)


def main(argv=None):
    """Runs the command; its exit code."""
    parser = argparse.ArgumentParser("python -m model.chat", description="Talk with a model that "
                                     "learned chats. Without --prompt, line by line.")
    add = parser.add_argument
    add("--ckpt", default="out/chat/ckpt.pt", help="checkpoint (default: %(default)s)")
    add("--backbone", help=BACKBONE)
    add("--prompt", help="one question; its answer ends the program")
    add("--system", metavar="TEXT", help="a system message, before the first question")
    add("--max_new_tokens", type=int, default=256, help="of an answer (default: %(default)s)")
    add("--temperature", type=float, default=0.0, help="0: always the most likely token (default)")
    add("--top_k", type=int, help="only the k most likely tokens")
    add("--top_p", type=float, help="only the most likely tokens that make up p")
    add("--min_p", type=float, help="only tokens at least so likely as this share of the best")
    add("--seed", type=int, help="the same seed writes the same answers")
    add("--device", default="auto", help="auto, cpu, cuda, mps")
    return run_command(parser, chat_as_asked, argv)


def chat_as_asked(args):
    """What the command line asks for."""
    if not 0 <= args.temperature < math.inf or args.max_new_tokens < 1:
        raise DataError("--temperature: expected 0 or more; --max_new_tokens: 1 or more")
    chat(**vars(args))


if __name__ == "__main__":
    sys.exit(main())
