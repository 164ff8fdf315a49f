"""Prepare conversations for chat fine-tuning.

    python -m data.prepare.chat FILE... --out FOLDER --tokenizer CKPT.pt

Reads records of all formats of data/records.py (JSONL, JSON, CSV, parquet, Hugging Face datasets).
The conversation is in the fields

    messages         [{"role": "user", "content": "..."}, {"role": "assistant", ...}, ...]
    conversations    [{"from": "human", "value": "..."}, {"from": "gpt", ...}, ...]      (ShareGPT)
    prompt, and response or completion
    instruction, perhaps input, and output (or response)                                 (Alpaca)

or in the fields given by --field: a list of messages, or the question's fields and, last, the
answer's.

Writes rows of block_size + 1 tokens, packed with whole conversations, for train and val:
SPLIT_tokens.npy, SPLIT_mask.npy (1 for tokens to learn: the assistant's text and the end token that
follows) and SPLIT_chat.npy (the number of the conversation in the row, which limits attention); and
meta.json. The chat template is the model's (data/chat_template.py), or a built-in one without new
tokens.
"""

import os
import re
import sys
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.chat_template import BuiltinTemplate, open_chat_format, parse_content, parse_messages
from data.meta import Meta, write_meta
from data.prepare.folders import new_folder, overwrite_problems
from data.records import SOURCES, parse_records, raise_problems
from data.rows import ChatPacker, id_dtype, split_by_prompt
from data.tokenizer import write_tokenizer
from train.base.cli import run_command
from train.base.errors import DataError, printable
from train.base.fields import key

FILES = r"(train|val)_(tokens|mask|chat)\.npy"  # names of the arrays
EXAMPLES = ("example", "example-more")


# -----------------------------------------------------------------------------
# shared by the commands chat, pairs and prompts

@dataclass
class RecordOptions:
    """Options that the commands chat, pairs and prompts share."""
    sources: list[str] = key([], f"{SOURCES}; or example, example-more: questions about the names "
                             "in Python's standard library", positional=True, required=True,
                             metavar="SOURCE", text=True)
    out: str | None = key(None, "folder to write (default: data/bin/ and the name of the source)",
                          metavar="FOLDER")
    block_size: int | None = key(None, "tokens per row (default: the checkpoint's, else 512)", ge=1)
    num_samples: int | None = key(None, "use only the first N records", ge=1)
    val_fraction: float = key(0.1, "share for validation, by a hash of the prompt", gt=0, lt=1)
    split: str = key("train", "split of a dataset")
    subset: str | None = key(None, "subset of a dataset that has several")
    skip_bad: bool = key(False, "leave out invalid records")
    force: bool = key(False, "replace data of other sources in the folder")


class SkipSample(Exception):
    """Raised for a sample to leave out; the text completes "Left out 3 chats ..."."""


def check_output(args, tokenizer, model, suffix=""):
    """Set the default of --out. Raise DataError if the folder must not be replaced, or if the
    tokenizer cannot mark the end of an answer."""
    args.out = args.out or os.path.join("data", "bin", Path(args.sources[0]).stem + suffix)
    if tokenizer.eot_token is None:
        raise DataError(f"a {tokenizer.kind} tokenizer has no end-of-text token to end an answer "
                        "with; start from a model with the tokenizer byte, gpt2 or a rank file")
    raise_problems(overwrite_problems(args.out, model, args.sources, args.force))


def example_records(source):
    """Yield (where, record): one question about each name in Python's standard library, with one
    correct answer."""
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


def encode_samples(args, noun, parse, encode, example=example_records):
    """Yield encode(parse(record)) for the records of all sources. A sample is left out if `encode`
    raises SkipSample or, with --skip_bad, DataError; the number of such samples is printed.
    example: returns the records of the sources `example` and `example-more`."""
    sources = [example(source) if source in EXAMPLES else source for source in args.sources]
    samples = parse_records(sources, parse, args.num_samples, args.skip_bad,
                            split=args.split, subset=args.subset)
    left_out = Counter()
    for number, sample in enumerate(samples, 1):
        try:
            encoded = encode(sample)
        except SkipSample as reason:
            left_out[str(reason)] += 1
        except DataError as error:  # e.g. a template without system messages
            if not args.skip_bad:
                raise DataError(f"{', '.join(args.sources)}: {noun} {number:,}: {error}; "
                                f"--skip_bad leaves such {noun}s out") from None
            left_out["that the model's template does not accept"] += 1
        else:
            yield encoded
    for reason, n in left_out.items():
        print(f"Left out {n:,} {noun}s {reason}")


def collect_splits(args, noun, samples):
    """Return {"train": [sample, ...], "val": [...]}. Raises DataError if a split is empty."""
    splits = dict(train=[], val=[])
    for split, sample in split_by_prompt(samples, args.val_fraction):
        splits[split].append(sample)
    check_splits(args, noun, splits)
    return splits


def check_splits(args, noun, splits):
    """Raise DataError if a split is empty. splits: {split: samples or their number}."""
    if empty := [split for split, samples in splits.items() if not samples]:
        raise DataError(f"{', '.join(args.sources)}: no {noun} for {' and '.join(empty)}; more "
                        f"{noun}s, a larger --block_size or a different --val_fraction")


# -----------------------------------------------------------------------------
# records

def to_messages(record, fields=()):
    """Return the conversation [(role, text), ...] of a record. fields: the field with the messages,
    or the question's and, last, the answer's; by default those of a known format. Raises
    ValueError."""
    if not isinstance(record, dict):
        raise ValueError(f"expected an object, got a {type(record).__name__}")
    if missing := [name for name in fields if name not in record]:
        raise ValueError(f"no field {missing[0]!r}; its fields are {', '.join(record)}")
    *questions, answer = fields or conversation_fields(record)
    if not questions:
        return parse_messages(record[answer], answer)
    if isinstance(record[answer], list):  # the question is a list of messages as well
        names = (*questions, answer)
        return [message for name in names for message in parse_messages(record[name], name)]
    question = [parse_content(record[name]).strip() for name in questions if record[name]]
    system = [("system", parse_content(record["system"]))] if record.get("system") else []
    return [*system, ("user", "\n\n".join(question)), ("assistant", parse_content(record[answer]))]


def conversation_fields(record):
    """Return the name of the field with the messages, or the names of the question's fields and,
    last, of the answer's. Raises ValueError for an unknown format."""
    present = {name for name in record if record[name] is not None}
    for name in ("messages", "conversations"):
        if name in present:
            return [name]
    for questions, answers in ((("prompt",), ("response", "completion")),
                               (("instruction", "input"), ("output", "response"))):
        answers = [name for name in answers if name in present]
        if questions[0] in present and answers:
            return [*(name for name in questions if name in present), answers[0]]
    raise ValueError("neither messages, conversations, prompt and response or completion, nor "
                     f"instruction and output among its fields ({', '.join(sorted(present))}); "
                     "name them: --field QUESTION --field ANSWER")


# -----------------------------------------------------------------------------
# command

@dataclass
class ChatOptions(RecordOptions):
    __doc__ = __doc__  # the description in --help: the formats of records
    tokenizer: str = key("byte", "tokenizer of the model to start from: byte, gpt2, a rank file, a "
                         "prepared folder, or the model's ckpt.pt", metavar="NAME")
    field: list[str] = key([], "once: the field with the messages; several times: the fields of "
                           "the question and, last, of the answer", metavar="NAME", text=True)
    show: int = key(0, "print the first N conversations", ge=0)


def encode_chats(args, tokenizer, template, width):
    """Yield [(ids, mask), ...] of each conversation, in sequences of at most `width` tokens."""
    n_shown = n_cut = 0

    def encode(messages):
        nonlocal n_shown, n_cut
        whole = template.sequences(messages, tokenizer)
        fitting = [part for part in (cut(*chat, width) for chat in whole) if len(part[0])]
        if n_shown < args.show:
            n_shown += 1
            for part in fitting:
                print_chat(*part, tokenizer)
        answers = [text.strip() for role, text in messages if role == "assistant"]
        if not answers or "" in answers:
            raise SkipSample("without an answer")
        if not fitting:
            raise SkipSample(f"longer than {width:,} tokens")
        n_cut += sum(m.sum() for _, m in fitting) < sum(m.sum() for _, m in whole)
        return fitting
    yield from encode_samples(args, "chat", lambda r: to_messages(r, args.field), encode)
    if n_cut:
        print(f"Cut {n_cut:,} chats to the exchanges that fit into {width:,} tokens")


def cut(ids, mask, width):
    """Return the ids and the mask of the first whole exchanges that fit into `width` tokens,
    perhaps none."""
    ends = np.flatnonzero(np.diff(mask.astype(np.int8), append=0) < 0) + 1
    n = int(ends[ends <= width].max(initial=0))
    return ids[:n], mask[:n]


def print_chat(ids, mask, tokenizer):
    """Print a conversation; the tokens to learn are green on a terminal, or in brackets."""
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    left, right = ("\033[32m", "\033[0m") if colour else ("[", "]")
    edges = np.flatnonzero(np.diff(mask, prepend=0, append=0))
    parts = np.split(ids, edges[:-1] if len(edges) else [])
    texts = [printable(tokenizer.decode(part)) for part in parts]
    print("-" * 72)
    print("".join(f"{left}{t}{right}" if i % 2 else t for i, t in enumerate(texts)))


def prepare_chats(args):
    """Write the folder of prepared conversations and print a summary."""
    tokenizer, block_size, template = open_chat_format(args.tokenizer)
    check_output(args, tokenizer, "chat")
    template = (template or BuiltinTemplate()).with_end_ids(tokenizer)
    block_size = args.block_size or block_size or 512
    width = block_size + 1
    chats = encode_chats(args, tokenizer, template, width)
    with new_folder(args.out, FILES) as folder:
        packers = {split: ChatPacker(folder, split, width, id_dtype(tokenizer.n_vocab),
                                     tokenizer.eot_token) for split in ("train", "val")}
        for split, chat in split_by_prompt(chats, args.val_fraction):
            for ids, mask in chat:
                packers[split].add(ids, mask)
        splits = {split: packer.finish() for split, packer in packers.items()}
        check_splits(args, "chat", {split: n["chats"] for split, n in splits.items()})
        write_meta(folder, Meta(
            "chat", **write_tokenizer(folder, tokenizer), block_size=block_size,
            template=template.spec, splits=splits, sources=args.sources))
    for split, n in splits.items():
        print(f"[{split}] {n['chats']:,} chats, {n['tokens']:,} tokens, {n['learned_tokens']:,} of "
              f"them learned, in {n['rows']:,} rows of {width}, "
              f"{100 * n['tokens'] / n['rows'] / width:.0f}% full")
    print(f"Next: python run_train.py --config train/configs/chat.yaml --data_dir {args.out} "
          "--init_from CKPT.pt")


def main(argv=None):
    return run_command(ChatOptions, prepare_chats, argv)


if __name__ == "__main__":
    sys.exit(main())
