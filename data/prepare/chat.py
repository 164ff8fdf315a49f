"""Prepare conversations for chat fine-tuning.

    python -m data.prepare.chat FILE... --out FOLDER --tokenizer CKPT.pt

Reads records of all formats of data/records.py (JSONL, JSON, CSV, parquet, Hugging Face datasets).
The conversation is in the fields

    messages         [{"role": "user", "content": "..."}, {"role": "assistant", ...}, ...]
    conversations    [{"from": "human", "value": "..."}, {"from": "gpt", ...}, ...]      (ShareGPT)
    prompt, and response or completion
    instruction, perhaps input or context, and output or response                  (Alpaca, Dolly)

or in the fields given by --field: a list of messages, or the question's fields and, last, the
answer's.

Writes rows of block_size + 1 tokens, packed with whole conversations, for train and val:
SPLIT_tokens.npy, SPLIT_mask.npy (1 for tokens to learn: the assistant's text and the end token that
follows) and SPLIT_chat.npy (the number of the conversation in the row, which limits attention); and
meta.json. The chat template is the model's (data/chat_template.py), or a built-in one without new
tokens.
"""

from dataclasses import dataclass

import numpy as np

from data.chat_template import parse_content, parse_messages
from data.prepare.samples import SampleOptions, SampleWriter
from data.records import check_columns
from data.rows import pack_chats, pad_rows, save_arrays
from train.base.cli import command
from train.base.errors import echo
from train.base.fields import key

# Fields of a conversation: the messages, or the question's and, last, the answer's.
FORMATS = [["messages"], ["conversations"], ["prompt", "response"], ["prompt", "completion"],
           *(["instruction", *more, answer] for more in (["input"], ["context"], [])
             for answer in ("output", "response"))]
EMPTY = (None, "", [], {})  # values without text; 0 is a text that was read as a number


@dataclass
class ChatOptions(SampleOptions):
    __doc__ = __doc__  # the description in --help: the formats of records
    tokenizer: str = key("byte", "tokenizer of the model to start from: byte, gpt2, a rank file, a "
                         "prepared folder, a checkpoint or a Hugging Face model", metavar="NAME")
    field: list[str] = key([], "once: the field with the messages; several times: the fields of "
                           "the question and, last, of the answer", text=True)
    show: int = key(0, "print the first N conversations, the tokens to learn in brackets", ge=0)


def to_messages(record, fields=(), prompt_only=False):
    """Return the conversation [(role, text), ...] of a record, a dict.

    fields: the field with the messages; or the question's fields, joined by a blank line, and last
    the answer's; or fields with lists of messages, which are concatenated. Default: find_format().
    prompt_only: also accept a question without an answer, a field with a text.
    The field `system`, if any, comes first unless the messages begin with a system message.
    Raises ValueError for a record without these fields, if the question's fields are all empty
    (a text for prompt_only and the texts of messages may be), and for invalid values.
    """
    check_columns(record, fields)
    fields = fields or find_format(record, prompt_only)
    *questions, answer = fields
    text = record.get("system")
    system = [] if text in EMPTY else [("system", parse_content(text, "system"))]
    if prompt_only and not questions and isinstance(record[answer], str):
        return [*system, ("user", record[answer])]
    if not questions or isinstance(record[answer], list):  # the question is messages as well
        messages = [message for name in fields for message in parse_messages(record[name], name)]
        has_system = messages and messages[0][0] == "system"
        return messages if has_system else system + messages
    question = [parse_content(record[name], name).strip() for name in questions
                if record[name] not in EMPTY]
    if not any(question):
        raise ValueError(f"no question in {', '.join(questions)}; expected text")
    return [*system, ("user", "\n\n".join(question)),
            ("assistant", parse_content(record[answer], answer))]


def find_format(record, prompt_only):
    """Return the first of FORMATS (or ["prompt"], if prompt_only) without a missing or None field.

    Raises ValueError if there is no such format.
    """
    for names in [*FORMATS, ["prompt"]] if prompt_only else FORMATS:
        if all(record.get(name) is not None for name in names):
            return names
    names = [name if record[name] is not None else f"{name}: null" for name in sorted(record)]
    raise ValueError(f"its fields ({', '.join(names)}) are none of the known formats; give the "
                     "values, or name other fields: --field QUESTION --field ANSWER")


class ChatWriter(SampleWriter):
    """The command data.prepare.chat; args is a ChatOptions, and run() does all the work."""
    noun = "chat"
    model = "chat"
    n_shown = 0

    def encode(self, record):
        """Return the training sequences [(ids (n,), mask (n,)), ...] of a record; mask 1: to learn.

        Sequences are cut after the last exchange that fits into block_size + 1 tokens. Returns
        None, and counts the reason in self.notes, if an answer is missing or empty or no exchange
        fits. Prints those of the first args.show records. Raises ValueError for an invalid record.
        """
        messages = to_messages(record, self.args.field)
        width = self.block_size + 1
        whole = self.template.sequences(messages, self.tokenizer, width)
        fitting = [part for part in (cut(*chat, width) for chat in whole) if len(part[0])]
        if self.n_shown < self.args.show:
            self.n_shown += 1
            for ids, mask in fitting:
                echo("-" * 72 + "\n" + bracket_answers(ids, mask, self.tokenizer))
        answers = [text.strip() for role, text in messages if role == "assistant"]
        if not answers or "" in answers:
            self.notes["left out: without an answer"] += 1
        elif not fitting:
            self.notes[f"left out: longer than {width:,} tokens"] += 1
        else:
            if sum(m.sum() for _, m in fitting) < sum(m.sum() for _, m in whole):
                self.notes[f"cut to the exchanges that fit into {width:,} tokens"] += 1
            return fitting
        return None

    def write_split(self, folder, split, samples):
        """Pack conversations into rows of block_size + 1 tokens and write the arrays of a split."""
        width = self.block_size + 1
        chats = [chat for sample in samples for chat in sample]
        rows = pack_chats(chats, width)
        ids = [np.concatenate([ids for ids, _ in row]) for row in rows]
        masks = [np.concatenate([mask for _, mask in row]) for row in rows]
        numbers = [np.repeat(np.arange(len(row)), [len(ids) for ids, _ in row]) for row in rows]
        save_arrays(folder, split, tokens=self.pad_tokens(ids, width),
                    mask=pad_rows(masks, width, 0, np.uint8),
                    chat=pad_rows(numbers, width, [[len(row)] for row in rows], np.uint16))
        return dict(chats=len(chats), rows=len(rows), tokens=sum(map(len, ids)),
                    learned_tokens=sum(int(mask.sum()) for mask in masks))


def cut(ids, mask, width):
    """Return (ids, mask) up to the last exchange that ends within `width` tokens, perhaps empty."""
    ends = np.flatnonzero(np.diff(mask.astype(np.int8), append=0) < 0) + 1
    n = int(ends[ends <= width].max(initial=0))
    return ids[:n], mask[:n]


def bracket_answers(ids, mask, tokenizer):
    """Return the text of `ids` (n,), with each part for which `mask` (n,) is 1 in brackets."""
    parts = np.split(ids, np.flatnonzero(np.diff(mask, prepend=0)))  # every second one is learned
    texts = map(tokenizer.decode, parts)
    return "".join(f"[{text}]" if i % 2 else text for i, text in enumerate(texts))


main = command(ChatOptions, lambda args: ChatWriter(args).run())
