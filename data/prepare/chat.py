"""Conversations to rows of tokens for chat fine-tuning: python -m data.prepare.chat FILE... --out FOLDER

Reads all that data/records.py reads (JSONL, JSON, CSV, parquet, Hugging Face datasets, ...) where
records are, by their fields,
    messages         [{"role": "user", "content": "..."}, {"role": "assistant", ...}, ...]
    conversations    [{"from": "human", "value": "..."}, {"from": "gpt", ...}, ...]      (ShareGPT)
    prompt, and response or completion
    instruction, perhaps input, and output (or response)                                 (Alpaca)
    what --field names: a list of messages; or the fields of the question and, last, the answer's.

Writes, for train and val, rows of block_size + 1 tokens packed with whole chats: SPLIT_tokens.npy,
SPLIT_mask.npy (1 where a token is learned: the assistant's words and the end token after them) and
SPLIT_chat.npy (the number of the chat in its row, by which attention keeps chats apart); meta.json
comes last.

A model from elsewhere learns by its own chat template (data/chat_template.py). Ours needs no new tokens,
so any model whose tokenizer has an end of text can learn it. Contents are stripped: then the tokens
of a prompt and of its answer, made apart, are those of the whole text. And they are encoded as
ordinary text: an end token that somebody typed stays text.
"""

import argparse
import os
import re
import sys
import sysconfig
from pathlib import Path

import numpy as np

from data.chat_template import BuiltinTemplate, parse_content, parse_messages
from data.meta import Meta, write_meta
from data.prepare.folders import new_folder, overwrite_problems
from data.records import parse_records, raise_problems
from data.rows import ChatPacker, id_dtype, split_by_prompt
from data.tokenizer import write_tokenizer
from data.tokenizer_hf import open_chat_format
from train.base.cli import run_command
from train.base.errors import DataError, printable

FILES = r"(train|val)_(tokens|mask|chat)\.npy"  # names of the arrays
COLOUR, PLAIN = ("\033[32m", "\033[0m"), ("[", "]")


# -----------------------------------------------------------------------------
# records of every format -> [(role, text), ...]

def to_messages(record, fields=()):
    """[(role, text), ...] of a record, by `fields` or by what it has; ValueError."""
    if not isinstance(record, dict):
        raise ValueError(f"expected an object, got a {type(record).__name__}")
    if missing := [name for name in fields if name not in record]:
        raise ValueError(f"no field {missing[0]!r}; its fields are {', '.join(record)}")
    has = {name for name in record if record[name] is not None}
    lists = ("messages", "conversations") if not fields else fields if len(fields) == 1 else ()
    for name in lists:
        if name in has:
            return parse_messages(record[name], name)
    *asked, said = fields or question_and_answer(has)
    if isinstance(record[said], list):  # both sides are lists of messages
        return [turn for name in (*asked, said) for turn in parse_messages(record[name], name)]
    question = [parse_content(record[name]).strip() for name in asked if record[name]]
    system = [("system", parse_content(record["system"]))] if record.get("system") else []
    return [*system, ("user", "\n\n".join(question)), ("assistant", parse_content(record[said]))]


def question_and_answer(has):
    """Names of the fields of the question and, last, of the answer, among those a record `has`."""
    for asked, answers in ((("prompt",), ("response", "completion")),
                           (("instruction", "input"), ("output", "response"))):
        said = [name for name in answers if name in has]
        if asked[0] in has and said:
            return *(name for name in asked if name in has), said[0]
    raise ValueError("neither messages, conversations, prompt and response or completion, nor "
                     f"instruction and output among its fields ({', '.join(sorted(has))}); name "
                     "them: --field QUESTION --field ANSWER")


# -----------------------------------------------------------------------------
# messages -> tokens

def fit(ids, mask, width):
    """As many whole exchanges from the start of a chat as `width` tokens hold: perhaps none."""
    ends = np.flatnonzero(np.diff(mask.astype(np.int8), append=0) < 0) + 1
    n = int(ends[ends <= width].max(initial=0))
    return ids[:n], mask[:n]


# -----------------------------------------------------------------------------
# the example

def example_records(source):
    """(where, record): a question about each of the names in this Python's own library, with one
    right answer."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [*library.glob("*.py"), *(path for path in library.glob("*/*.py")
                                      if not re.search("test|packages", path.parent.name))]
    text = "".join(path.read_text("utf-8", "replace") for path in files)
    names = sorted(set(re.findall(r"\b[a-z]{2,9}(?:_[a-z]{2,9}){1,2}\b", text)))
    for i, name in enumerate(names):
        words = [word.capitalize() for word in name.split("_")]
        tasks = ((f"{name} in CamelCase?", "".join(words)), (f"{name} in capitals?", name.upper()),
                 (f"{''.join(words)} in snake_case?", name))
        if source == "example-more":
            tasks = ((f"{name} as a title?", " ".join(words)),
                     (f"{name} with hyphens?", name.replace("_", "-")))
        question, answer = tasks[i % len(tasks)]
        yield f"{source}: record {i}", {"prompt": question, "response": answer}


# -----------------------------------------------------------------------------
# all of it

def check_settings(args, tokenizer, model="chat"):
    """DataError for settings that cannot work."""
    if tokenizer.eot_token is None:
        raise DataError(f"--tokenizer {args.tokenizer}: a {tokenizer.kind} tokenizer has no end-of-"
                        "text token to end an answer with; pretrain with byte, gpt2 or a rank file")
    if not 0 < args.val_fraction < 1:
        raise DataError(f"--val_fraction: {args.val_fraction}: expected a number between 0 and 1")
    for name in ("num_samples", "block_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise DataError(f"--{name}: {value}: expected 1 or more")
    raise_problems(overwrite_problems(args.out, model, args.sources, args.force))


def chats(args):
    """The messages of every record; DataError with all records that are wrong."""
    sources = [example_records(source) if source in ("example", "example-more") else source
               for source in args.sources]
    return parse_records(sources, lambda record: to_messages(record, args.field), args.num_samples,
                         args.skip_bad, split=args.split, subset=args.subset)


def write_rows(args, tokenizer, folder):
    """Rows of both splits into `folder`; meta.json's content."""
    dtype, width = id_dtype(tokenizer.n_vocab), args.block_size + 1
    packers = {split: ChatPacker(folder, split, width, dtype, tokenizer.eot_token)
               for split in ("train", "val")}
    for split, chat in split_by_prompt(encoded(args, tokenizer, width), args.val_fraction):
        for ids, mask in chat:
            packers[split].add(ids, mask)
    splits = {split: packer.finish() for split, packer in packers.items()}
    if empty := [split for split, part in splits.items() if not part["chats"]]:
        raise DataError(f"{', '.join(args.sources)}: no chat for {' and '.join(empty)}; more "
                        "chats, a larger --block_size or another --val_fraction")
    return Meta("chat", **write_tokenizer(folder, tokenizer), block_size=args.block_size,
                template=args.template.spec, splits=splits, sources=args.sources)


def taken(records, encode, args, what):
    """Yields (record, encode(record)) of those that the template takes. DataError for another (one
    with a system message, say), or with args.skip_bad a line that says how many were left out."""
    bad = 0
    for number, record in enumerate(records, 1):
        try:
            made = encode(record)
        except DataError as error:
            if not args.skip_bad:
                raise DataError(f"{', '.join(args.sources)}: {what} {number:,}: {error}; "
                                f"--skip_bad leaves such {what}s out") from None
            bad += 1
        else:
            yield record, made
    say_left_out((bad, f"{what}s that the model's template does not take"))


def say_left_out(*counts):
    """A line for each (number, what) that is not 0."""
    for n, what in counts:
        if n:
            print(f"Left out {n:,} {what}")


def encoded(args, tokenizer, width):
    """Yields [(ids, mask)] of every chat that has an answer and fits; says what was left out."""
    silent = cut = long = 0
    found = taken(chats(args), lambda messages: args.template.sequences(messages, tokenizer),
                  args, "chat")
    for number, (messages, whole) in enumerate(found):
        said = [text.strip() for role, text in messages if role == "assistant"]
        fitting = [part for part in (fit(*chat, width) for chat in whole) if len(part[0])]
        if number < args.show:
            for part in fitting:
                show(*part, tokenizer)
        if not said or "" in said:
            silent += 1
        elif not fitting:
            long += 1
        else:
            cut += sum(int(mask.sum()) for _, mask in fitting) < sum(int(m.sum()) for _, m in whole)
            yield fitting
    say_left_out((silent, "chats without an answer"), (long, f"chats longer than {width:,} tokens"))
    if cut:
        print(f"Cut {cut:,} chats after the last exchange that fits into {width:,} tokens")


def show(ids, mask, tokenizer):
    """Print a chat as the model gets it, what is learned in colour, or in brackets."""
    left, right = COLOUR if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else PLAIN
    edges = np.flatnonzero(np.diff(mask, prepend=0, append=0))
    parts = np.split(ids, edges[:-1] if len(edges) else [])
    texts = [printable(tokenizer.decode(part)) for part in parts]
    print("-" * 72)
    print("".join(f"{left}{t}{right}" if i % 2 else t for i, t in enumerate(texts)))


def prepare_chats(args):
    args.out = args.out or os.path.join("data", "bin", Path(args.sources[0]).stem)
    tokenizer, block_size, template = open_chat_format(args.tokenizer)
    check_settings(args, tokenizer)
    args.template = (template or BuiltinTemplate()).with_end_ids(tokenizer)
    args.block_size = args.block_size or block_size or 512
    with new_folder(args.out, FILES) as folder:
        meta = write_rows(args, tokenizer, folder)
        write_meta(folder, meta)
    for split, n in meta.splits.items():
        print(f"[{split}] {n['chats']:,} chats, {n['tokens']:,} tokens, {n['learned_tokens']:,} of "
              f"them learned, in {n['rows']:,} rows of {args.block_size + 1}, "
              f"{100 * n['tokens'] / n['rows'] / (args.block_size + 1):.0f}% full")
    print(f"Next: python run_train.py --config train/configs/chat.yaml --data_dir {args.out} "
          "--init_from CKPT.pt")


def add_options(add):
    """Those of this command and of data/prepare/pairs.py."""
    add("sources", nargs="+", metavar="SOURCE", help="files: .jsonl, .json, .csv, .tsv "
        "or .parquet, any of them as .gz; Hugging Face datasets (package datasets): OWNER/NAME, or "
        "hf:NAME, hf:NAME:CONFIG, hf:NAME:CONFIG:SPLIT, or a folder; or `example`, `example-more`: "
        "questions about the names in this Python's own library")
    add("--out", metavar="FOLDER", help="where to write (default: data/bin/ and the source's name)")
    add("--block_size", type=int, metavar="N", help="tokens the model sees at once (default: the "
        "checkpoint's, else 512)")
    add("--num_samples", type=int, metavar="N", help="only the first N records")
    add("--val_fraction", type=float, default=0.1, metavar="F", help="share for validation, drawn "
        "by a hash of the question (default: %(default)s)")
    add("--split", default="train", help="of a dataset (default: %(default)s)")
    add("--subset", help="of a dataset that has several")
    add("--skip_bad", action="store_true", help="leave out records that cannot be read")
    add("--force", action="store_true", help="replace what this command wrote to --out")


def main(argv=None):
    """Runs the command; its exit code."""
    parser = argparse.ArgumentParser("python -m data.prepare.chat", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_options(add)
    add("--tokenizer", default="byte", metavar="NAME", help="that of the model to start from: "
        "byte, gpt2, a rank file, a prepared folder, or simply its ckpt.pt (default: %(default)s)")
    add("--field", action="append", default=[], metavar="NAME", help="once: the field with the "
        "messages; several times: those of the question and, last, of the answer")
    add("--show", type=int, default=0, metavar="N", help="print the first N chats")
    return run_command(parser, prepare_chats, argv)


if __name__ == "__main__":
    sys.exit(main())
