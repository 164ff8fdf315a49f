"""Questions to rows of tokens for model/grpo.py, which writes answers to them and is rewarded:

    python -m data.prepare.prompts FILE... --tokenizer out/chat/ckpt.pt --out data/bin/prompts

Records are those of data/prepare/chat.py, whose last answer is held back for the reward to compare with, or
have none (TRL's): `prompt`, a text or a list of messages, and whatever fields the reward asks for.
A text in the field `answer` beside it is the one that is held back.

Writes, for train and val, SPLIT_tokens.npy, a row for each prompt with end tokens behind it,
SPLIT_length.npy, its own tokens in the row, and SPLIT_rows.jsonl: for each row the question, the
answer that was held back (or null) and the record, which is what the reward sees. A question that
data/prepare/chat.py keeps for validation is one here as well.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np

from data.chat_template import BuiltinTemplate, parse_content, parse_messages
from data.meta import Meta, write_meta
from data.prepare.chat import (
    add_options,
    check_settings,
    example_records,
    say_left_out,
    taken,
    to_messages,
)
from data.prepare.folders import new_folder
from data.records import parse_records
from data.rows import id_dtype, pad_rows, split_by_prompt
from data.tokenizer import write_tokenizer
from data.tokenizer_hf import open_chat_format
from train.base.cli import run_command
from train.base.errors import DataError

FILES = r"(train|val)_((tokens|length)\.npy|rows\.jsonl)"  # names of the files


def to_question(record, fields=()):
    """(messages up to the answer, the answer that is held back or None, the record), by `fields` or
    by what it has; ValueError."""
    name, answer = fields[0] if len(fields) == 1 else "prompt", None
    if isinstance(record, dict) and name in record and (len(fields) == 1 or not fields and not (
            record.keys() & {"response", "completion", "messages", "conversations"})):
        prompt, answer = record[name], record.get("answer")
        messages = (parse_messages(prompt, name) if isinstance(prompt, list)
                    else [("user", parse_content(prompt))])
    else:
        messages = to_messages(record, fields)
    if messages and messages[-1][0] == "assistant":
        *messages, (_, answer) = messages
    if not messages or messages[-1][0] != "user" or not messages[-1][1].strip():
        raise ValueError("no question before the answer: expected a message of the user")
    return messages, answer.strip() if isinstance(answer, str) else None, record


def encoded(args, tokenizer):
    """Yields [(ids, mask), line of SPLIT_rows.jsonl] of every question that fits: its prompt and a
    token for the answer, which the mask marks."""
    sources = [example_records(source) if source in ("example", "example-more") else source
               for source in args.sources]
    questions = parse_records(sources, lambda record: to_question(record, args.field),
                              args.num_samples, args.skip_bad, split=args.split, subset=args.subset)
    long = 0
    for (messages, answer, record), ids in taken(
            questions, lambda question: args.template.prompt_ids(question[0], tokenizer), args,
            "question"):
        if len(ids) > args.block_size:
            long += 1
            continue
        mask = np.arange(len(ids) + 1) == len(ids)
        yield [(np.array([*ids, tokenizer.eot_token], np.uint32), mask),
               dict(question=messages[-1][1].strip(), answer=answer, row=record)]
    say_left_out((long, f"questions longer than {args.block_size:,} tokens"))


def prepare_prompts(args):
    """What the command does. Raises UserError."""
    args.out = args.out or os.path.join("data", "bin", f"{Path(args.sources[0]).stem}-prompts")
    tokenizer, block_size, template = open_chat_format(args.tokenizer)
    check_settings(args, tokenizer, "grpo")
    args.template = (template or BuiltinTemplate()).with_end_ids(tokenizer)
    args.block_size = args.block_size or (block_size or 512) - 1  # of a prompt: an answer follows
    splits = dict(train=[], val=[])  # of (ids, line)
    for split, ((ids, _), line) in split_by_prompt(encoded(args, tokenizer), args.val_fraction):
        splits[split].append((ids[:-1], line))
    if empty := [split for split, rows in splits.items() if not rows]:
        raise DataError(f"{', '.join(args.sources)}: no question for {' and '.join(empty)}; more "
                        "of them, a larger --block_size or another --val_fraction")
    width = max(len(ids) for rows in splits.values() for ids, _ in rows)
    with new_folder(args.out, FILES) as folder:
        for split, rows in splits.items():
            write_split(os.path.join(folder, split), rows, width, tokenizer)
        write_meta(folder, Meta(
            "grpo", **write_tokenizer(folder, tokenizer), block_size=width,
            template=args.template.spec, sources=args.sources,
            splits={split: dict(questions=len(rows)) for split, rows in splits.items()}))
    for split, rows in splits.items():
        held = sum(line["answer"] is not None for _, line in rows)
        print(f"[{split}] {len(rows):,} questions of up to {width} tokens, {held:,} with an answer "
              "held back")
    print(f"Next: python run_train.py --config train/configs/grpo.yaml --data_dir {args.out} "
          "--init_from CKPT.pt")


def write_split(start, rows, width, tokenizer):
    """Write the files of a split, whose names begin with `start`."""
    np.save(f"{start}_tokens.npy", pad_rows([ids for ids, _ in rows], width, tokenizer.eot_token,
                                            id_dtype(tokenizer.n_vocab)))
    np.save(f"{start}_length.npy", np.array([len(ids) for ids, _ in rows], "<u4"))
    with open(f"{start}_rows.jsonl", "w", encoding="utf-8") as f:
        # What is no JSON (a date of a table, say) stands there as its text.
        f.writelines(json.dumps(line, default=str) + "\n" for _, line in rows)


def read_lines(path, n):
    """(the `n` lines of a SPLIT_rows.jsonl, how many have an answer that was held back).
    Raises DataError."""
    try:
        with open(path, encoding="utf-8") as f:
            lines = f.read().splitlines()
        held = sum(json.loads(line)["answer"] is not None for line in lines)
        if len(lines) != n:
            raise ValueError(f"{len(lines)} lines for {n} prompts")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: {type(error).__name__}: {error}; damaged, or of other prompts: "
                        "prepare them again") from None
    return lines, held


def main(argv=None):
    """Runs the command; its exit code."""
    parser = argparse.ArgumentParser("python -m data.prepare.prompts", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_options(add)
    add("--tokenizer", required=True, metavar="CKPT", help="the chat model that training starts "
        "from, whose tokenizer and template are taken")
    add("--field", action="append", default=[], metavar="NAME", help="once: the field with the "
        "prompt; several times: those of the question and, last, of the answer")
    return run_command(parser, prepare_prompts, argv)


if __name__ == "__main__":
    sys.exit(main())
