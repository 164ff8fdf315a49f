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
from data.records import parse_records, raise_problems
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
    sources: list[str] = key([], "files (.jsonl, .json, .csv, .tsv, .parquet, any of them as .gz); "
                             "Hugging Face datasets (OWNER/NAME, hf:NAME, hf:NAME:CONFIG, "
                             "hf:NAME:CONFIG:SPLIT, or a folder); or example, example-more: "
                             "questions about the names in Python's standard library",
                             positional=True, required=True, metavar="SOURCE", text=True)
    out: str | None = key(None, "folder to write (default: data/bin/ and the name of the source)",
                          metavar="FOLDER")
    block_size: int | None = key(None, "tokens per row (default: the checkpoint's, else 512)", ge=1)
    num_samples: int | None = key(None, "use only the first N records", ge=1)
    val_fraction: float = key(0.1, "share for validation, chosen by a hash of the prompt", gt=0,
                              lt=1)
    split: str = key("train", "split of a dataset")
    subset: str | None = key(None, "subset of a dataset that has several")
    skip_bad: bool = key(False, "leave out invalid records")
    force: bool = key(False, "replace data of other sources in the folder")


class SkipSample(Exception):
    """Raised for a sample to leave out; the text completes "Left out 3 chats ..."."""


def check_options(args, tokenizer, model):
    """Raise DataError if the tokenizer has no end of text or the folder must not be replaced."""
    if tokenizer.eot_token is None:
        raise DataError(f"--tokenizer {args.tokenizer}: a {tokenizer.kind} tokenizer has no "
                        "end-of-text token to end an answer with; pretrain with byte, gpt2 or a "
                        "rank file")
    raise_problems(overwrite_problems(args.out, model, args.sources, args.force))


def encode_samples(args, noun, parse, encode, example=None):
    """Yield encode(parse(record)) for the records of all sources, and print how many samples were
    left out: those for which `encode` raises SkipSample and, with --skip_bad, DataError. example:
    the records of the sources `example` and `example-more`."""
    sources = [(example or example_records)(source) if source in EXAMPLES else source
               for source in args.sources]
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


def check_splits(args, noun, counts):
    """Raise DataError if a split has no samples. counts: {split: number of samples}."""
    if empty := [split for split, n in counts.items() if not n]:
        raise DataError(f"{', '.join(args.sources)}: no {noun} for {' and '.join(empty)}; more "
                        f"{noun}s, a larger --block_size or another --val_fraction")


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


# -----------------------------------------------------------------------------
# records

def to_messages(record, fields=()):
    """Return the conversation [(role, text), ...] of a record, in `fields` or in the fields of a
    known format. Raises ValueError."""
    if not isinstance(record, dict):
        raise ValueError(f"expected an object, got a {type(record).__name__}")
    if missing := [name for name in fields if name not in record]:
        raise ValueError(f"no field {missing[0]!r}; its fields are {', '.join(record)}")
    present = {name for name in record if record[name] is not None}
    lists = ("messages", "conversations") if not fields else fields if len(fields) == 1 else ()
    for name in lists:
        if name in present:
            return parse_messages(record[name], name)
    *questions, answer = fields or question_and_answer(present)
    if isinstance(record[answer], list):  # the question is a list of messages as well
        names = (*questions, answer)
        return [message for name in names for message in parse_messages(record[name], name)]
    question = [parse_content(record[name]).strip() for name in questions if record[name]]
    system = [("system", parse_content(record["system"]))] if record.get("system") else []
    return [*system, ("user", "\n\n".join(question)), ("assistant", parse_content(record[answer]))]


def question_and_answer(present):
    """Return the names of the question's fields and, last, of the answer's, among the fields that
    are `present`. Raises ValueError."""
    for questions, answers in ((("prompt",), ("response", "completion")),
                               (("instruction", "input"), ("output", "response"))):
        answers = [name for name in answers if name in present]
        if questions[0] in present and answers:
            return *(name for name in questions if name in present), answers[0]
    raise ValueError("neither messages, conversations, prompt and response or completion, nor "
                     f"instruction and output among its fields ({', '.join(sorted(present))}); "
                     "name them: --field QUESTION --field ANSWER")


# -----------------------------------------------------------------------------
# command

@dataclass
class ChatOptions(RecordOptions):
    """Prepare conversations for chat fine-tuning."""
    tokenizer: str = key("byte", "tokenizer of the model to start from: byte, gpt2, a rank file, a "
                         "prepared folder, or the model's ckpt.pt", metavar="NAME")
    field: list[str] = key([], "once: the field with the messages; several times: the fields of "
                           "the question and, last, of the answer", metavar="NAME", text=True)
    show: int = key(0, "print the first N conversations", ge=0)


class ChatEncoder:
    """Encodes conversations to sequences of at most `width` tokens; prints the first n_show."""

    def __init__(self, tokenizer, template, width, n_show):
        self.tokenizer = tokenizer
        self.template = template
        self.width = width
        self.n_show = n_show
        self.n_cut = 0  # conversations of which only the beginning fits

    def __call__(self, messages):
        """Return [(ids, mask), ...] of a conversation. Raises SkipSample."""
        whole = self.template.sequences(messages, self.tokenizer)
        fitting = [part for part in (cut(*chat, self.width) for chat in whole) if len(part[0])]
        for part in fitting if self.n_show > 0 else []:
            print_chat(*part, self.tokenizer)
        self.n_show -= 1
        answers = [text.strip() for role, text in messages if role == "assistant"]
        if not answers or "" in answers:
            raise SkipSample("without an answer")
        if not fitting:
            raise SkipSample(f"longer than {self.width:,} tokens")
        self.n_cut += sum(m.sum() for _, m in fitting) < sum(m.sum() for _, m in whole)
        return fitting


def cut(ids, mask, width):
    """Return the ids and the mask of the first whole exchanges that fit into `width` tokens; they
    may be empty."""
    ends = np.flatnonzero(np.diff(mask.astype(np.int8), append=0) < 0) + 1
    n = int(ends[ends <= width].max(initial=0))
    return ids[:n], mask[:n]


def print_chat(ids, mask, tokenizer):
    """Print a conversation; the tokens to learn are green on a terminal, else in brackets."""
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    left, right = ("\033[32m", "\033[0m") if colour else ("[", "]")
    edges = np.flatnonzero(np.diff(mask, prepend=0, append=0))
    parts = np.split(ids, edges[:-1] if len(edges) else [])
    texts = [printable(tokenizer.decode(part)) for part in parts]
    print("-" * 72)
    print("".join(f"{left}{t}{right}" if i % 2 else t for i, t in enumerate(texts)))


def prepare_chats(args):
    """Prepare the conversations of the options and print a summary."""
    args.out = args.out or os.path.join("data", "bin", Path(args.sources[0]).stem)
    tokenizer, block_size, template = open_chat_format(args.tokenizer)
    check_options(args, tokenizer, "chat")
    template = (template or BuiltinTemplate()).with_end_ids(tokenizer)
    block_size = args.block_size or block_size or 512
    width = block_size + 1
    encoder = ChatEncoder(tokenizer, template, width, args.show)
    chats = encode_samples(args, "chat", lambda record: to_messages(record, args.field), encoder)
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
    if encoder.n_cut:
        print(f"Cut {encoder.n_cut:,} chats to the exchanges that fit into {width:,} tokens")
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
