"""Prepare prompts for --model grpo, which samples and rewards answers.

    python -m data.prepare.prompts FILE... --tokenizer out/chat/ckpt.pt --out data/bin/prompts

Reads the records of data.prepare.chat, in which the last answer is the reference answer, and TRL's:
`prompt`, a text or a list of messages, an optional reference answer `answer`, and any fields that
the reward uses.

Writes, for train and val, SPLIT_tokens.npy (one row per prompt, filled up with end tokens),
SPLIT_length.npy (tokens of the prompt) and SPLIT_rows.jsonl (per row the question, the reference
answer or null, and the record, which the reward receives). The validation split has the same
questions as the validation split of data.prepare.chat.
"""

import json
import os
from dataclasses import dataclass

import numpy as np

from data.prepare.chat import to_messages
from data.prepare.samples import SampleOptions, SampleWriter
from data.rows import save_arrays
from train.base.cli import command
from train.base.fields import key


@dataclass
class PromptOptions(SampleOptions):
    __doc__ = __doc__  # the description in --help: the formats of records
    tokenizer: str = key("", "chat model that training starts from; its tokenizer and template are "
                         "used", required=True, metavar="CKPT")
    field: list[str] = key([], "once: the field with the prompt; several times: the fields of the "
                           "question and, last, of the answer", text=True)


def to_question(record, fields=()):
    """Return (messages up to the last question, reference answer) of a record, a dict.

    messages: [(role, text), ...]. The reference answer is that to the last question or, without
    one, the field `answer`; a number or a date becomes a text ("5" for 5.0), a list, a dict and
    bytes None.
    fields: the prompt's field, or the question's and, last, the answer's (default: as to_messages).
    Raises ValueError for a record without these fields or a question.
    """
    messages = to_messages(record, fields, prompt_only=True)
    answer = record.get("answer")
    if messages and messages[-1][0] == "assistant":
        *messages, (_, answer) = messages
    if not messages or messages[-1][0] != "user" or not messages[-1][1].strip():
        raise ValueError("no question before the answer: expected a message of the user")
    if isinstance(answer, float) and answer.is_integer():  # pandas, if other answers are missing
        answer = int(answer)
    answer = None if isinstance(answer, (list, dict, bytes, type(None))) else str(answer).strip()
    return messages, answer


class PromptWriter(SampleWriter):
    """The command data.prepare.prompts; args is a PromptOptions, and run() does all the work."""
    noun = "question"
    model = "grpo"
    suffix = "-prompts"

    def encode(self, record):
        """Return [(ids, mask), prompt, line] of a record.

        (ids, mask): arrays (n,) with which split_by_prompt() splits as in data.prepare.chat: the
        conversation before the second answer (the reference answer counts), or before the only one,
        and one token in place of this answer; the mask is 1 only at the first token of each answer.
        prompt: the token ids to write. line: the dict to write to SPLIT_rows.jsonl.
        Returns None, and counts the reason in self.notes, for a prompt of more than args.block_size
        tokens (default: self.block_size - 1). Raises ValueError for an invalid record.
        """
        messages, answer = to_question(record, self.args.field)
        max_tokens = self.args.block_size or self.block_size - 1  # the answer needs a token
        ids = self.template.prompt_ids(messages, self.tokenizer)
        if len(ids) > max_tokens:
            self.notes[f"left out: longer than {max_tokens:,} tokens"] += 1
            return None
        answers = [i for i, (role, _) in enumerate(messages) if role == "assistant"]
        prompts = [self.template.prompt_ids(messages[:n], self.tokenizer) for n in answers[:2]]
        first, second = (prompts + [ids, ids])[:2]
        start = first + second[len(first):]
        mask = np.isin(np.arange(len(start) + 1), [len(first), len(start)])
        line = dict(question=messages[-1][1].strip(), answer=answer, row=record)
        return [(np.array([*start, self.tokenizer.eot_token], np.uint32), mask), ids, line]

    def write(self, folder, splits):
        """Write all prompts, in rows as long as the longest one, which sets self.block_size."""
        self.block_size = max(len(ids) for rows in splits.values() for _, ids, _ in rows)
        return super().write(folder, splits)

    def write_split(self, folder, split, rows):
        ids = [ids for _, ids, _ in rows]
        save_arrays(folder, split, length=np.array([*map(len, ids)], np.uint32),
                    tokens=self.pad_tokens(ids, self.block_size))
        with open(os.path.join(folder, f"{split}_rows.jsonl"), "w", encoding="utf-8") as f:
            # Values that JSON cannot represent, e.g. dates of a table, become text.
            f.writelines(json.dumps(line, default=str) + "\n" for *_, line in rows)
        return dict(questions=len(rows))


main = command(PromptOptions, lambda args: PromptWriter(args).run())
