"""Chat fine-tuning: a GPT learns the assistant's answers in conversations.

    python -m data.prepare.chat FILE... --out data/bin/chat --tokenizer out/quick/ckpt.pt
    python run_train.py --config train/configs/chat.yaml
    python -m model.sample --ckpt out/chat/ckpt.pt --chat

A row of tokens contains several conversations. A mask restricts attention to tokens of the same
conversation, and positions start at 0 in each, so that packing does not change the loss.
"""

import contextlib
import sys
from dataclasses import dataclass

import torch

from data.chat_template import ChatTemplate
from data.meta import read_meta_for
from data.rows import open_rows
from data.tokenizer import open_tokenizer, tokenizer_from_spec
from model import gpt
from model.core.detokenizer import TextStreamer
from model.core.generate import generate
from model.core.ops import ID_BITS, IGNORE, histories
from model.gpt import GPT, GPTConfig, as_gpt, inherit_shape  # noqa: F401  model interface
from train.base.errors import DataError, UserError, quote_path
from train.base.fields import key
from train.dataloader import Data, RowLoader

USE = "python -m model.sample --ckpt {out}/ckpt.pt --chat"


def packed_layout(idx, chat):
    """Return keyword arguments of GPT.trunk() that isolate the conversations in a row.

    idx (B, T): token ids. chat (B, T): for each token, the conversation's number in the row.
    Returns "mask" (B, 1, T, T), true where a query sees a key: the same or an earlier token of the
    conversation; per conversation, "positions" (B, T), from 0, and "history" (B, T), as from
    histories() of model/core/ops.py.
    """
    index = torch.arange(idx.size(1), device=idx.device)
    # (B, T): the first token of each conversation
    is_first = torch.cat((chat[:, :1] - 1, chat[:, :-1]), dim=1) != chat
    positions = index - (index * is_first).cummax(1).values  # (B, T)
    own_bits = (1 << ID_BITS * positions.clamp(max=3)) - 1  # of tokens of the same conversation
    same = chat[:, :, None] == chat[:, None, :]  # (B, T, T)
    return dict(mask=(same & (index[:, None] >= index))[:, None],  # (B, 1, T, T)
                positions=positions, history=histories(idx) & own_bits)


class ChatGPT(GPT):
    """A GPT that is trained on text or on rows of several conversations, see compute_loss().

    Attributes: template, a ChatTemplate, `None` unless the model was trained on conversations;
    row_tokens, the tokens T per row of conversations, 1 for text.
    """
    template = None
    row_tokens = 1

    def compute_loss(self, idx, targets, chat=None):
        """Return (mean loss, sums {name: 0-dim tensor} for the log) of text or conversations.

        Without `chat`, of text: idx, targets (B, T), as for GPT. With it, (B, T + 1) each:
        idx: token ids. targets: a mask, not ids: 1 for tokens to learn (answers), 0 for others.
        chat: a number per token, equal in one conversation and different in the others of the row.
        In eval mode, the sums for conversations include those of count_exact().
        """
        if chat is None:
            return super().compute_loss(idx, targets)
        targets = torch.where(targets[:, 1:] == 1, idx[:, 1:], IGNORE)  # (B, T)
        x = self.trunk(idx[:, :-1], **packed_layout(idx[:, :-1], chat[:, :-1]))  # (B, T, C)
        loss, sums = self.score(x, targets)
        return loss, sums if self.training else sums | self.count_exact(x, targets)

    def count_exact(self, x, targets):
        """Return counts of correct targets and answers in an evaluation, {name: 0-dim tensor}.

        x (B, T, C): states after the final norm. targets (B, T): token ids, -1 outside answers.
        "accuracy": targets with the largest logit. "answers": sequences of consecutive targets.
        "exact": answers in which every target has the largest logit, as in greedy sampling.
        """
        learned = targets != IGNORE  # (B, T)
        best = torch.stack([self.logits(row).argmax(-1) for row in x])  # one row's logits at a time
        wrong = learned & (best != targets)
        previous = torch.cat((torch.zeros_like(learned[:, :1]), learned[:, :-1]), dim=1)
        starts = (learned & ~previous).flatten()  # (B T,): the first token of each answer
        number = starts.cumsum(0)  # (B T,): the number of the answer, from 1
        errors = torch.zeros(number.numel() + 1, device=x.device)
        errors.index_add_(0, number, wrong.flatten().float())
        return dict(accuracy=(learned & ~wrong).sum(), answers=starts.sum(),
                    exact=(starts & (errors[number] == 0)).sum())

    def numbers(self, sums):
        """Return GPT.numbers(); in evaluations also shares: accuracy (tokens), exact (answers)."""
        numbers = super().numbers(sums)
        if numbers.pop("answers", None):  # None without targets, as the others
            numbers["exact"] = float(sums["exact"] / sums["answers"])
        return numbers

    def first_prompts(self, tokens, mask, *rest):
        """Return the ids before the first answer in each row; [] for a row without an answer.

        tokens: (B, T + 1), or (B, 2, T + 1) for pairs of answers, of which the first is used.
        mask: of the same shape, 1 for tokens of answers. rest: the batch's other tensors, unused.
        """
        rows = zip(tokens.flatten(1), mask.flatten(1))
        return [ids[:int(learned.argmax())].tolist() for ids, learned in rows]

    def flops_per_unit(self):
        return super().flops_per_unit() * self.row_tokens


# -----------------------------------------------------------------------------
# model interface, see train/system.py

@dataclass
class FromChatKeys:
    """Configuration keys of model types that continue the training of a chat model (dpo, grpo)."""
    lora_rank: int = key(0, "train only adapters of this rank; 0: all weights", ge=0)

    def problems(self):
        problem = "init_from: missing; set it to a chat model, e.g. out/chat/ckpt.pt"
        return [problem] if self.init_from == "scratch" else []


def read_rows_meta(config, model, command, *keys):
    """Return (Meta, tokenizer, dict for Data.spec) of config.data_dir, rows for a model type.

    model: this type, e.g. "dpo". keys: further keys that meta.json must have.
    command: the command of data.prepare, e.g. "pairs", for error messages.
    The dict has vocab_size (the larger one of data and config), tokenizer, template and row_tokens.
    Raises DataError for other data, and if their block_size is above config.block_size.
    """
    folder = config.data_dir
    option = {"pairs": " --reference CKPT", "prompts": " --tokenizer CKPT"}.get(command, "")
    how = (f"prepare some: python -m data.prepare.{command} FILE...{option} --out "
           f"{quote_path(folder)}")
    meta = read_meta_for(model, folder, how, *keys, "block_size", "vocab_size", "template")
    if meta.block_size > config.block_size:
        raise DataError(f"{folder}: prepared for a block_size of {meta.block_size}, but the "
                        f"model's is {config.block_size}; prepare the data with --block_size "
                        f"{config.block_size}")
    tokenizer = open_tokenizer(folder)
    vocab_size = max(meta.vocab_size, config.vocab_size or 0)  # init_from may have more ids
    return meta, tokenizer, dict(vocab_size=vocab_size, tokenizer=tokenizer.spec(),
                                 template=meta.template, row_tokens=meta.block_size)


def open_data(config, ranks):
    """Return the Data of data.prepare.chat, with batches (tokens, mask, chat), (B, T + 1) each."""
    meta, tokenizer, spec = read_rows_meta(config, "chat", "chat")
    row = (meta.block_size + 1,)

    def load(split):
        arrays = open_rows(config.data_dir, split, tokens=(row, 0, tokenizer.n_vocab),
                           mask=(row, 0, 2), chat=(row, 0, 1 << 16))
        return RowLoader(arrays, config, ranks)
    return Data(load("train"), load("val") if config.eval_interval else None, spec)


def build_model(config, data, kind=ChatGPT, shape=GPTConfig):
    """Return the model of gpt.build_model(), for conversations if data.spec has a template."""
    model = gpt.build_model(config, data, kind, shape)
    if "template" in data.spec:
        model.template = ChatTemplate(data.spec["template"])
        model.template.render([("user", "")], True)  # a template that fails is refused here
        model.row_tokens = model.train_tokens = data.spec["row_tokens"]
    return model


def sample(model, data, config):
    """Return the texts for samples.txt: prompts, each with the model's greedy answer.

    The prompts are the user messages config.sample_prompts, by default the first prompt in each of
    up to three rows of data.val. An answer has at most config.sample_tokens tokens. Without a
    template in data.spec, returns sample() of model/gpt.py. The message of a ValueError, for
    logits that are not finite, is written into the text.
    """
    if "template" not in data.spec:
        return gpt.sample(model, data, config)
    tokenizer = tokenizer_from_spec(data.spec["tokenizer"])
    prompts = [model.template.prompt_ids([("user", text)], tokenizer)
               for text in config.sample_prompts]

    def complete(ids):
        try:
            ids = ids + generate_answer(model, tokenizer, ids, config.sample_tokens)
            return tokenizer.decode(ids)
        except ValueError as error:
            return f"{tokenizer.decode(ids)} [no sample: {error}]"
    return [*map(complete, prompts or model.first_prompts(*data.val.fixed_batch(0, 3))[:3])]


# -----------------------------------------------------------------------------
# conversations

def generate_answer(model, tokenizer, ids, max_new_tokens, on_token=None, **sampling):
    """Return the answer of a ChatGPT to the prompt `ids`: token ids without the end token.

    on_token: called with each new token, a tensor (1,), also the end token; true ends the answer.
    sampling: temperature (default 0: greedy), top_k, top_p, min_p and seed of generate().
    Raises ValueError if the logits are not finite.
    """
    ends = model.template.end_ids(tokenizer)
    idx = torch.tensor([ids], device=model.wte.weight.device)
    out = generate(model, idx, max_new_tokens, **dict(temperature=0) | sampling,
                   on_token=on_token, stop_token=ends, n_vocab=tokenizer.n_vocab)
    answer = out[0, idx.size(1):].tolist()
    return answer[:-1] if answer and answer[-1] in ends else answer


def talk(model, tokenizer, questions, max_new_tokens, system=None, **sampling):
    """Hold a conversation: print the answer of a ChatGPT to each of the questions, token by token.

    max_new_tokens: maximum length of an answer; at most half of the context is reserved for it.
    system: text of the system message; `None` or blank: no such message.
    sampling: as for generate_answer().
    A prompt has the system message, the question and the latest messages that fit; stderr states
    how many are left out. Raises UserError if system message and question exceed the context, and
    ValueError if the logits are not finite.
    """
    size = model.config.block_size
    max_tokens = max(size - max_new_tokens, size // 2)
    ends = model.template.end_ids(tokenizer)
    turns = [("system", system)] if system and system.strip() else []
    for question in questions:
        turns.append(("user", question))
        ids, n_left_out = model.template.fit_prompt(turns, tokenizer, max_tokens)
        if len(ids) > size:
            raise UserError(f"the question has {len(ids)} tokens, but the context of this model "
                            f"has {size}; shorten it")
        if n_left_out:
            print(f"[the context of {size} tokens is full: the first {n_left_out} messages are "
                  "left out]", file=sys.stderr)
        answer = generate_answer(model, tokenizer, ids, max_new_tokens,
                                 TextStreamer(tokenizer, ends), **sampling)
        print(flush=True)
        turns.append(("assistant", tokenizer.decode(answer)))


def read_questions():
    """Yield the lines of stdin, stripped, until an empty line, the end of the input or Ctrl-C."""
    if sys.stdin.isatty():
        print("An empty line ends the conversation.", file=sys.stderr)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while line := input("> " if sys.stdin.isatty() else "").strip():
            yield line
