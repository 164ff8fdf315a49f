"""Labelled texts to rows of tokens: what --model classifier trains on.

    python -m data.prepare.labels reviews.csv more.jsonl --out data/bin/reviews --tokenizer out/ckpt.pt
    python -m data.prepare.labels --example --out data/bin/labels

A row has a text, a label for it, and the evidence: a part of the text, as its words or as offsets
in characters. Either may be missing from the data. The output is train, val and test arrays, a row
a text (SPLIT_tokens.npy (N, T) and so on, see ARRAYS), and meta.json. Rows are split by a hash of
their text, or of --group: what belongs together stays on one side.
"""

import argparse
import contextlib
import functools
import hashlib
import importlib.util
import io
import itertools
import json
import os
import random
import re
import sys
import tokenize
import unicodedata
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.meta import Meta, write_meta
from data.prepare.folders import new_folder, overwrite_problems
from data.records import STDLIB_SKIP, parse_records, raise_problems, walk
from data.rows import id_dtype, pad_rows, split_by_group
from data.tokenizer import clean, write_tokenizer
from data.tokenizer_hf import open_chat_format
from train.base.cli import run_command
from train.base.errors import DataError, UsageError, echo

SPLITS = ("train", "val", "test")
# tokens (N, T) unsigned, padded with 0; lengths (N,) in tokens; labels (N,), numbers of classes;
# spans (N, 2), first and last token of the evidence, -1 where there is none (or it was cut off).
ARRAYS = ("tokens", "lengths", "labels", "spans")
FILES = rf"({'|'.join(SPLITS)})_({'|'.join(ARRAYS)})\.npy"  # names of the arrays

EXAMPLE_WORDS = ("def", "for", "if", "import", "in", "return")
EXAMPLE_CHARS, EXAMPLE_ROWS, EXAMPLE_ROWS_OF_FILE = 128, 1200, 6


class Row(NamedTuple):
    text: str
    label: str | None
    start: int | None   # the evidence is text[start:end]
    end: int | None
    group: str          # rows of one group come into one split
    doubt: str = ""     # about the place of the evidence
    id: object = None   # the record's own

    @property
    def evidence(self):
        return None if self.start is None else self.text[self.start:self.end]


class Fields(NamedTuple):
    """What the columns of a CSV file, or the fields of JSON records, are called."""
    text: str = "text"
    label: str = "label"
    evidence: str = "evidence"
    start: str = "start"
    end: str = "end"
    group: str | None = None


FIELDS = Fields()
# Doubts about where evidence given by its words stands.
SEVERAL = "evidence that stands in several places of the text: the first is taken"
INSIDE = "evidence that stands only inside longer words"
FEW = 3  # training rows of a class below which it is said


# --- reading

def parse_row(record, fields):
    """The Row of a record; ValueError says what is wrong with it."""
    if not isinstance(record, dict):
        raise ValueError(f"expected an object, got a {type(record).__name__}")
    if fields.text not in record:
        raise ValueError(f"no field {fields.text!r}; its fields are "
                         f"{', '.join(map(str, record))}: choose one with --text")
    text, label = record[fields.text], record.get(fields.label)
    if not isinstance(text, str) or not text:
        raise ValueError(f"field {fields.text!r}: expected a text, got {text!r}")
    text = clean(text)
    if isinstance(label, (dict, list)):
        raise ValueError(f"field {fields.label!r}: expected a label, got {label!r}")
    if fields.group and record.get(fields.group) in (None, ""):
        raise ValueError(f"no field {fields.group!r} (--group)")
    start, end, doubt = find_evidence(text, record, fields)
    label = None if label is None else label_name(clean(str(label))) or None
    group = str(record[fields.group]) if fields.group else text
    return Row(text, label, start, end, group, doubt, record.get("id"))


def label_name(text):
    """A label as one name, however a file has it: without blanks around it, whole numbers without
    .0, true and false as in JSON."""
    text = text.strip()
    if re.fullmatch(r"-?\d+\.0+", text):
        return text[:text.index(".")]
    return text.lower() if text in ("True", "False", "TRUE", "FALSE") else text


def find_evidence(text, record, fields):
    """(start, end, doubt) of the evidence in characters, (None, None, "") where a record names
    none. Words are looked for as whole words first."""
    words, offsets = record.get(fields.evidence), [record.get(fields.start), record.get(fields.end)]
    if all(n not in (None, "") for n in offsets):
        try:
            start, end = map(int, offsets)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"start and end {offsets}: expected whole numbers") from None
        if not 0 <= start < end <= len(text):
            raise ValueError(f"evidence {start} to {end} is not inside the text of {len(text)} "
                             "characters; end is one past the last")
        return start, end, ""
    if words in (None, ""):
        return None, None, ""
    places = find_words(words := clean(words), text) if isinstance(words, str) else []
    whole = [i for i in places if not (  # two characters of one word at an edge
        re.fullmatch(r"\w\w", text[max(0, i - 1):i] + words[0])
        or re.fullmatch(r"\w\w", words[-1] + text[i + len(words):i + len(words) + 1]))]
    if not places:
        raise ValueError(f"the evidence {str(words)[:60]!r} does not occur in the text")
    places = whole or places
    doubt = SEVERAL if len(places) > 1 else "" if whole else INSIDE
    return places[0], places[0] + len(words), doubt


def find_words(words, text):
    """Where `words` stand in `text`, one over the other too, but for long ones: to compare these at
    every place could take for ever."""
    places, step = [], 1 if len(words) < 200 else len(words)
    while (i := text.find(words, places[-1] + step if places else 0)) >= 0:
        places.append(i)
    return places


def read_rows(sources, fields=FIELDS, skip_bad=False):
    """The Rows of all sources. Raises DataError with all rows that are wrong."""
    rows = list(parse_records(sources, lambda record: parse_row(record, fields), skip_bad=skip_bad))
    if not rows:
        raise DataError(f"{', '.join(sources)}: no rows")
    for doubt, n in Counter(row.doubt for row in rows if row.doubt).items():
        echo(f"{n:,} of {len(rows):,} rows have {doubt}; --start and --end say where it is")
    return rows


# --- rows to arrays

def span_of(row, ids, sizes):
    """(first, last) token of a row's evidence. sizes (V,): bytes of text of each token id."""
    ends = sizes[ids].cumsum()  # where each token ends, in bytes
    ends += len(row.text.encode()) - ends[-1]  # some put a blank before a text
    start, end = (len(row.text[:n].encode()) for n in (row.start, row.end))
    return int(np.searchsorted(ends, start, "right")), int(np.searchsorted(ends, end, "left"))


def in_nfc(row):
    """A Row with its text as the tokenizer changes it first, and its evidence where it is then."""
    nfc = functools.partial(unicodedata.normalize, "NFC")
    start, end = (n if n is None else len(nfc(row.text[:n])) for n in (row.start, row.end))
    return row._replace(text=nfc(row.text), start=start, end=end)


def to_arrays(rows, tokenizer, classes, max_tokens):
    """{name: array} as in ARRAYS. Texts are cut to max_tokens; evidence that this cuts is none."""
    if getattr(tokenizer, "nfc", False):
        rows = [in_nfc(row) for row in rows]
    tokens = [tokenizer.encode_array(row.text) for row in rows]
    width = min(max_tokens, max(map(len, tokens), default=0))
    number, sizes = {name: i for i, name in enumerate(classes)}, tokenizer.token_bytes()
    out = dict(tokens=pad_rows([ids[:width] for ids in tokens], width, 0, id_dtype(tokenizer.n_vocab)),
               lengths=np.array([min(width, len(ids)) for ids in tokens], np.int64),
               labels=np.array([number.get(row.label, 0) for row in rows], np.int64),
               spans=np.full((len(rows), 2), -1, np.int64))
    for i, (row, ids) in enumerate(zip(rows, tokens)):
        if row.start is not None:
            first, last = span_of(row, ids, sizes)
            out["spans"][i] = (first, last) if last < width else (-1, -1)
    return out


def names_alike(names):
    """Lists of names that differ in case or blanks alone, or are true and 1, or false and 0."""
    groups = {}
    for name in sorted(names):
        common = " ".join(name.casefold().split())
        groups.setdefault(dict(true="1", false="0").get(common, common), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def find_classes(rows):
    """Names of the classes, sorted (as numbers where all are); [] for data without labels. Raises
    DataError where only some rows have one."""
    names = {row.label for row in rows}
    if names == {None}:
        return []
    if None in names:
        n = sum(row.label is None for row in rows)
        raise DataError(f"{n} of {len(rows)} rows have no label; give each one, or leave them out")
    if len(names) == 1:
        raise DataError(f"all {len(rows)} rows have the label {names.pop()!r}; a classifier needs "
                         "two classes or more")
    for alike in names_alike(names):
        echo(f"Labels that look alike are different classes: {', '.join(map(repr, alike))}")
    numeric = all(name.removeprefix("-").isdecimal() for name in names)
    return sorted(names, key=int if numeric else str)


def find_task(rows, classes):
    """class, span or joint: what the rows can teach."""
    spans = any(row.start is not None for row in rows)
    if not spans and not classes:
        raise DataError("no row has a label or evidence; name their fields with --label, "
                         "--evidence, or --start and --end")
    return "joint" if spans and classes else "span" if spans else "class"


def check_settings(args):
    """DataError for settings that cannot work."""
    val, test = args.val_fraction, args.test_fraction
    problems = overwrite_problems(args.out, "classifier", args.files, args.force)
    if not (val > 0 and test >= 0 and val + test < 1):
        problems.append((f"val_fraction {val}, test_fraction {test}",
                         "expected shares of the rows, val's above 0, that leave some to train on"))
    if args.max_tokens < 1:
        problems.append((f"max_tokens {args.max_tokens}", "expected 1 or more"))
    raise_problems(problems)


def prepare(args):
    """What the command line asks for: the arrays of the rows of args.files in the folder args.out.
    Raises DataError with all problems in one message."""
    if bool(args.files) == args.example:
        raise UsageError("give one or more FILEs, or --example")
    if args.example:
        args.files, args.group = [f"{os.path.normpath(args.out)}.jsonl"], "file"
        make_example(args.files[0])
    check_settings(args)
    fields = Fields(*(getattr(args, name) for name in Fields._fields))
    tokenizer, rows = open_chat_format(args.tokenizer)[0], read_rows(args.files, fields, args.skip_bad)
    classes, splits = find_classes(rows), {name: [] for name in SPLITS}
    task = find_task(rows, classes)
    for row in rows:
        splits[split_by_group(row.group, args.val_fraction, args.test_fraction)].append(row)
    raise_problems([
        (name, f"none of {len(rows)} rows fell into it; more rows, or a larger fraction")
        for name in SPLITS if not splits[name] and (args.test_fraction or name != "test")])
    longest = max(len(tokenizer.encode_array(row.text)) for row in rows)
    counts = [sum(row.label == c for row in splits["train"]) for c in classes]
    extra = dict(task=task, classes=classes, class_counts=counts,
                 max_tokens=min(longest, args.max_tokens))
    lost = sum(row.start is not None for row in rows)
    with new_folder(args.out, FILES) as folder:
        meta = Meta("classifier", **write_tokenizer(folder, tokenizer), sources=args.files,
                    extra=extra)
        for split in SPLITS:
            arrays = to_arrays(splits[split], tokenizer, classes, args.max_tokens)
            lost -= int((arrays["spans"][:, 0] >= 0).sum())
            for name, array in arrays.items():
                np.save(os.path.join(folder, f"{split}_{name}.npy"), array)
        write_meta(folder, meta)
    sizes = {name: len(part) for name, part in splits.items()}
    report_prepared(extra, sizes, longest, lost, args.out)


def report_prepared(meta, sizes, longest, lost, out):
    echo(f"Prepared {out}: task {meta['task']}, rows of up to {meta['max_tokens']} tokens: "
        + ", ".join(f"{name} {n:,}" for name, n in sizes.items()))
    if meta["classes"]:
        echo("Training rows by class: " + ", ".join(
            f"{name} {n:,}" for name, n in zip(meta["classes"], meta["class_counts"])))
        if few := [c for c, n in zip(meta["classes"], meta["class_counts"]) if n < FEW]:
            echo(f"Fewer than {FEW} rows to learn from: {', '.join(few)}")
    if longest > meta["max_tokens"]:
        echo(f"Texts of up to {longest:,} tokens were cut to --max_tokens {meta['max_tokens']}; "
            f"{lost:,} rows lost their evidence and teach no span")
    echo(f"Next: python run_train.py --config train/configs/classifier.yaml --data_dir {out}")


# --- the example: one word is missing from this code; which, and where?

def missing_words(source):
    """Yields (word, text, start, end): some lines of the Python `source` without one of
    EXAMPLE_WORDS, and where in them the name stands that came after it, the evidence."""
    lines = source.splitlines(keepends=True)
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    for token, after in itertools.pairwise(tokens):
        row, column = token.start
        if (token.string not in EXAMPLE_WORDS or after.type != tokenize.NAME
                or after.start != (row, token.end[1] + 1)):
            continue
        before, line, rest = "".join(lines[max(0, row - 3):row - 1]), lines[row - 1], lines[row:]
        text = before + line[:column] + line[after.start[1]:] + "".join(rest[:1])
        if len(text) <= EXAMPLE_CHARS:
            start = len(before) + column
            yield token.string, text, start, start + len(after.string)


def make_example(path):
    """Writes JSONL of missing_words in the sources of torch and numpy on this machine: text, label,
    start, end, file; EXAMPLE_ROWS of each word. No text comes twice, or a copy could be in another
    split."""
    files, rows = [], {word: {} for word in EXAMPLE_WORDS}
    for package in ("numpy", "torch"):
        folder = Path(importlib.util.find_spec(package).submodule_search_locations[0])
        files += [(f"{package}/{Path(file).relative_to(folder).as_posix()}", file)
                  for file in walk(folder, "", STDLIB_SKIP) if file.endswith(".py")]
    for name, file in sorted(files, key=lambda f: hashlib.sha256(f[0].encode()).digest()):
        with contextlib.suppress(SyntaxError, UnicodeDecodeError, tokenize.TokenError):
            found = list(missing_words(Path(file).read_text(encoding="utf-8")))
            for word, text, start, end in random.Random(name).sample(found, len(found)):
                if sum(row["file"] == name for row in rows[word].values()) < EXAMPLE_ROWS_OF_FILE \
                        and len(rows[word]) < EXAMPLE_ROWS:
                    rows[word].setdefault(text, dict(text=text, label=word, start=start, end=end,
                                                     file=name))
        if min(map(len, rows.values())) == EXAMPLE_ROWS:
            break
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w", encoding="utf-8") as f:
        f.writelines(json.dumps(row) + "\n" for part in rows.values() for row in part.values())
    echo(f"Wrote {path}: {sum(map(len, rows.values())):,} pieces of numpy and torch")


# --- the command line

def add_field_options(parser):
    """--text, --label, --evidence, --start, --end: what the columns are called."""
    meanings = dict(text="the text", label="its label", evidence="the part of the text that shows "
                    "it, in its words", start="or its first character",
                    end="and the one after its last")
    for name, meaning in meanings.items():
        parser.add_argument(f"--{name}", default=name, metavar="NAME",
                            help=f"column or field with {meaning} (default: {name})")


def main(argv=None):
    """The command line; the exit code: 2 for a problem."""
    parser = argparse.ArgumentParser("python -m data.prepare.labels", allow_abbrev=False,
                                     description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("files", nargs="*", metavar="FILE", help="files: .jsonl, .json, .csv, .tsv or "
        ".parquet, any of them as .gz; or Hugging Face datasets: OWNER/NAME, or hf:NAME, "
        "hf:NAME:CONFIG, hf:NAME:CONFIG:SPLIT, or a folder")
    add("--out", required=True, metavar="FOLDER", help="where to write, data/bin/NAME, say")
    add("--tokenizer", default="byte", metavar="NAME", help="byte, gpt2, a rank file, a prepared "
        "folder, or a checkpoint (.pt): the one that training starts from (default: byte)")
    add_field_options(parser)
    add("--group", metavar="NAME", help="column of what must not be torn apart: a document, a "
        "patient; its rows come into one split (default: each text for itself)")
    for split in ("val", "test"):
        add(f"--{split}_fraction", type=float, default=0.1, metavar="F",
            help=f"share of the rows for {split} (default: 0.1)")
    add("--max_tokens", type=int, default=512, metavar="N",
        help="longer texts are cut (default: 512)")
    add("--example", action="store_true", help="instead of FILEs: which word is missing from "
        "this code, and where? Sources of numpy and torch on this machine")
    add("--skip_bad", action="store_true", help="leave out rows that cannot be read")
    add("--force", action="store_true", help="replace what a folder holds from other sources")
    return run_command(parser, prepare, argv)


if __name__ == "__main__":
    sys.exit(main())
