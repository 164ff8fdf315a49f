"""Prepare prompts for --model grpo, which samples and rewards answers.

    python -m data.prepare.prompts FILE... --tokenizer out/chat/ckpt.pt --out data/bin/prompts

Reads the records of data.prepare.chat, in which the last answer is the reference answer, and TRL's:
`prompt`, a text or a list of messages, an optional reference answer `answer`, and any fields that
the reward uses.

Writes, for train and val, SPLIT_tokens.npy (one row per prompt, filled up with end tokens),
SPLIT_length.npy (tokens of the prompt) and SPLIT_rows.jsonl (per row the question, the reference
answer or null, and the record, which the reward receives). The validation split has the same
questions as that of data.prepare.chat.
"""

import json
import os
import sys
from dataclasses import dataclass

import numpy as np

from data.chat_template import BuiltinTemplate, open_chat_format, parse_content, parse_messages
from data.meta import Meta, write_meta
from data.prepare import chat
from data.prepare.folders import new_folder
from data.rows import id_dtype, pad_rows
from data.tokenizer import write_tokenizer
from train.base.cli import run_command
from train.base.fields import key

FILES = r"(train|val)_((tokens|length)\.npy|rows\.jsonl)"  # names of the files


@dataclass
class PromptOptions(chat.RecordOptions):
    __doc__ = __doc__  # the description in --help: the formats of records
    tokenizer: str = key("", "chat model that training starts from; its tokenizer and template are "
                         "used", required=True, metavar="CKPT")
    field: list[str] = key([], "once: the field with the prompt; several times: the fields of the "
                           "question and, last, of the answer", metavar="NAME", text=True)


def to_question(record, fields=()):
    """Return (the messages up to the answer, the reference answer or `None`, the record), in
    `fields` or in the fields of a known format. Raises ValueError."""
    name, answer = fields[0] if len(fields) == 1 else "prompt", None
    if isinstance(record, dict) and name in record and (len(fields) == 1 or not fields and not (
            record.keys() & {"response", "completion", "messages", "conversations"})):
        prompt, answer = record[name], record.get("answer")
        messages = (parse_messages(prompt, name) if isinstance(prompt, list)
                    else [("user", parse_content(prompt))])
    else:
        messages = chat.to_messages(record, fields)
    if messages and messages[-1][0] == "assistant":
        *messages, (_, answer) = messages
    if not messages or messages[-1][0] != "user" or not messages[-1][1].strip():
        raise ValueError("no question before the answer: expected a message of the user")
    return messages, answer.strip() if isinstance(answer, str) else None, record


def encode_prompts(args, tokenizer, template, max_tokens):
    """Yield [(ids, mask), line of SPLIT_rows.jsonl] of each question. The ids are the prompt and
    one token for the answer, which the mask marks, as split_by_prompt expects."""
    def encode(question):
        messages, answer, record = question
        ids = template.prompt_ids(messages, tokenizer)
        if len(ids) > max_tokens:
            raise chat.SkipSample(f"longer than {max_tokens:,} tokens")
        mask = np.arange(len(ids) + 1) == len(ids)
        line = dict(question=messages[-1][1].strip(), answer=answer, row=record)
        return [(np.array([*ids, tokenizer.eot_token], np.uint32), mask), line]
    return chat.encode_samples(args, "question",
                          lambda record: to_question(record, args.field), encode)


def prepare_prompts(args):
    """Write the folder of prepared prompts and print a summary."""
    tokenizer, block_size, template = open_chat_format(args.tokenizer)
    chat.check_output(args, tokenizer, "grpo", "-prompts")
    template = (template or BuiltinTemplate()).with_end_ids(tokenizer)
    max_tokens = args.block_size or (block_size or 512) - 1  # the answer needs a token
    splits = chat.collect_splits(args, "question",
                                 encode_prompts(args, tokenizer, template, max_tokens))
    splits = {split: [(ids[:-1], line) for (ids, _), line in rows]
              for split, rows in splits.items()}
    width = max(len(ids) for rows in splits.values() for ids, _ in rows)
    with new_folder(args.out, FILES) as folder:
        for split, rows in splits.items():
            write_prompts(os.path.join(folder, split), *zip(*rows), width, tokenizer)
        write_meta(folder, Meta(
            "grpo", **write_tokenizer(folder, tokenizer), block_size=width, template=template.spec,
            splits={split: dict(questions=len(rows)) for split, rows in splits.items()},
            sources=args.sources))
    for split, rows in splits.items():
        n_answers = sum(line["answer"] is not None for _, line in rows)
        print(f"[{split}] {len(rows):,} questions of up to {width} tokens, {n_answers:,} with a "
              "reference answer")
    print(f"Next: python run_train.py --config train/configs/grpo.yaml --data_dir {args.out} "
          "--init_from CKPT.pt")


def write_prompts(start, ids, lines, width, tokenizer):
    """Write the files of a split. start: the beginning of the names of the files."""
    np.save(f"{start}_tokens.npy", pad_rows(ids, width, tokenizer.eot_token,
                                            id_dtype(tokenizer.n_vocab)))
    np.save(f"{start}_length.npy", np.array([len(row) for row in ids], "<u4"))
    with open(f"{start}_rows.jsonl", "w", encoding="utf-8") as f:
        # Values that JSON cannot represent, e.g. dates of a table, become text.
        f.writelines(json.dumps(line, default=str) + "\n" for line in lines)


def main(argv=None):
    return run_command(PromptOptions, prepare_prompts, argv)


if __name__ == "__main__":
    sys.exit(main())
