"""Prepare labelled texts for --model classifier.

    python -m data.prepare.labels reviews.csv --out data/bin/reviews --tokenizer out/ckpt.pt
    python -m data.prepare.labels --example --out data/bin/labels

A record has a text, a label, and evidence: a part of the text, as words or as offsets in
characters. Label or evidence may be missing. Writes train, val and test arrays with one row per
text (SPLIT_tokens.npy etc., see data/labels.py) and meta.json. The split is a hash of the text, or
of the field --group, so that records that belong together are in the same split.
"""

import contextlib
import hashlib
import importlib.util
import io
import itertools
import json
import os
import random
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.labels import ARRAYS, SPLITS, Fields, read_labelled_texts, to_arrays
from data.meta import Meta, write_meta
from data.prepare.folders import new_folder, overwrite_problems
from data.records import SOURCES, STDLIB_SKIP, raise_problems, walk
from data.rows import split_by_group
from data.tokenizer import open_tokenizer, write_tokenizer
from train.base.cli import run_command
from train.base.errors import DataError, UserError, echo
from train.base.fields import key

FILES = rf"({'|'.join(SPLITS)})_({'|'.join(ARRAYS)})\.npy"  # names of the arrays
MIN_CLASS_ROWS = 3  # training rows of a class; fewer cause a warning

EXAMPLE_WORDS = ("def", "for", "if", "import", "in", "return")
EXAMPLE_CHARS = 128
EXAMPLE_ROWS_PER_WORD = 1200
EXAMPLE_ROWS_PER_FILE = 6


@dataclass
class LabelOptions(Fields):
    """Prepare labelled texts for --model classifier."""
    files: list[str] = key([], SOURCES, positional=True, metavar="FILE", text=True)
    group: str | None = key(None, "field that identifies texts that belong together, e.g. a "
                            "document or a patient, and must be in the same split (default: each "
                            "text is a group)", metavar="NAME")
    out: str = key("", "folder to write, e.g. data/bin/NAME", required=True, metavar="FOLDER")
    tokenizer: str = key("byte", "tokenizer of the model to start from: byte, gpt2, a rank file, a "
                         "prepared folder, or a checkpoint (.pt)", metavar="NAME")
    val_fraction: float = key(0.1, "share of the texts for validation", gt=0)
    test_fraction: float = key(0.1, "share of the texts for testing", ge=0)
    max_tokens: int = key(512, "cut longer texts", ge=1)
    example: bool = key(False, "instead of files: which word is missing from a piece of Python, "
                               "and where? Made of the sources of numpy and torch")
    skip_bad: bool = key(False, "leave out invalid records")
    force: bool = key(False, "replace data of other sources in the folder")


def prepare_labels(args):
    """Write the folder of prepared texts and print a summary. Raises UserError."""
    if bool(args.files) == args.example:
        raise UserError("give one or more FILEs, or --example")
    if args.example:
        args.files, args.group = [f"{os.path.normpath(args.out)}.jsonl"], "file"
        write_example(args.files[0])
    problems = overwrite_problems(args.out, "classifier", args.files, args.force)
    if args.val_fraction + args.test_fraction >= 1:
        problems.append((f"val_fraction {args.val_fraction}, test_fraction {args.test_fraction}",
                         "expected a sum below 1, which leaves some texts to train on"))
    raise_problems(problems)
    tokenizer = open_tokenizer(args.tokenizer)
    rows = read_labelled_texts(args.files, args, args.skip_bad)
    classes = find_classes(rows)
    task = find_task(rows, classes)
    splits = {name: [] for name in SPLITS}
    for row in rows:
        splits[split_by_group(row.group, args.val_fraction, args.test_fraction)].append(row)
    raise_problems([
        (name, f"none of {len(rows)} rows is in this split; more rows, or a larger fraction")
        for name in SPLITS if not splits[name] and (args.test_fraction or name != "test")])
    longest = max(len(tokenizer.encode_array(row.text)) for row in rows)
    info = dict(task=task, classes=classes, max_tokens=min(longest, args.max_tokens),
                class_counts=[sum(row.label == c for row in splits["train"]) for c in classes])
    lost = sum(row.start is not None for row in rows)  # rows that lose evidence
    with new_folder(args.out, FILES) as folder:
        for split in SPLITS:
            arrays = to_arrays(splits[split], tokenizer, classes, args.max_tokens)
            lost -= int((arrays["spans"][:, 0] >= 0).sum())
            for name, array in arrays.items():
                np.save(os.path.join(folder, f"{split}_{name}.npy"), array)
        write_meta(folder, Meta("classifier", **write_tokenizer(folder, tokenizer),
                                sources=args.files, extra=info))
    echo(f"Prepared {args.out}: task {task}, rows of up to {info['max_tokens']} tokens: "
         + ", ".join(f"{name} {len(part):,}" for name, part in splits.items()))
    report_classes(classes, info["class_counts"])
    if longest > args.max_tokens:
        echo(f"Cut texts of up to {longest:,} tokens to --max_tokens {args.max_tokens}; {lost:,} "
             "rows lost their evidence")
    echo(f"Next: python run_train.py --config train/configs/classifier.yaml --data_dir {args.out}")


def report_classes(classes, counts):
    """Print the training rows per class."""
    if classes:
        echo("Training rows per class: " + ", ".join(
            f"{name} {n:,}" for name, n in zip(classes, counts)))
    if rare := [name for name, n in zip(classes, counts) if n < MIN_CLASS_ROWS]:
        echo(f"Classes with fewer than {MIN_CLASS_ROWS} training rows: {', '.join(rare)}")


def find_classes(rows):
    """Return the sorted names of the classes (numerically if all are integers), [] for data without
    labels. Raises DataError if only some rows have a label."""
    names = {row.label for row in rows}
    if names == {None}:
        return []
    if None in names:
        n = sum(row.label is None for row in rows)
        raise DataError(f"{n} of {len(rows)} rows have no label; label them, or leave them out")
    if len(names) == 1:
        raise DataError(f"all {len(rows)} rows have the label {names.pop()!r}; a classifier needs "
                        "two classes or more")
    similar = {}  # names that differ in case or spaces, and true and 1, false and 0
    for name in sorted(names):
        normal = " ".join(name.casefold().split())
        similar.setdefault(dict(true="1", false="0").get(normal, normal), []).append(name)
    for group in similar.values():
        if len(group) > 1:
            echo(f"Similar labels are different classes: {', '.join(map(repr, group))}")
    numeric = all(name.removeprefix("-").isdecimal() for name in names)
    return sorted(names, key=int if numeric else str)


def find_task(rows, classes):
    """Return the task that the rows allow: class, span or joint. Raises DataError."""
    spans = any(row.start is not None for row in rows)
    if not spans and not classes:
        raise DataError("no row has a label or evidence; name their fields with --label, "
                        "--evidence, or --start and --end")
    return "joint" if spans and classes else "span" if spans else "class"


# -----------------------------------------------------------------------------
# the example: which word is missing from this piece of code, and where?

def missing_words(source):
    """Yield (word, text, start, end): lines of Python source without one of EXAMPLE_WORDS, and the
    position of the name that followed it, which is the evidence."""
    lines = source.splitlines(keepends=True)
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    for token, following in itertools.pairwise(tokens):
        row, column = token.start
        if (token.string not in EXAMPLE_WORDS or following.type != tokenize.NAME
                or following.start != (row, token.end[1] + 1)):
            continue
        before, line, rest = "".join(lines[max(0, row - 3):row - 1]), lines[row - 1], lines[row:]
        text = before + line[:column] + line[following.start[1]:] + "".join(rest[:1])
        if len(text) <= EXAMPLE_CHARS:
            start = len(before) + column
            yield token.string, text, start, start + len(following.string)


def write_example(path):
    """Write JSONL of missing_words() in the sources of numpy and torch, EXAMPLE_ROWS_PER_WORD of
    each word, with the fields text, label, start, end and file. Every text is unique: a copy could
    be in a different split."""
    files, rows = [], {word: {} for word in EXAMPLE_WORDS}
    for package in ("numpy", "torch"):
        folder = Path(importlib.util.find_spec(package).submodule_search_locations[0])
        files += [(f"{package}/{Path(file).relative_to(folder).as_posix()}", file)
                  for file in walk(folder, "", STDLIB_SKIP) if file.endswith(".py")]
    for name, file in sorted(files, key=lambda f: hashlib.sha256(f[0].encode()).digest()):
        with contextlib.suppress(SyntaxError, UnicodeDecodeError, tokenize.TokenError):
            candidates = list(missing_words(Path(file).read_text(encoding="utf-8")))
            for word, text, start, end in random.Random(name).sample(candidates, len(candidates)):
                of_file = sum(row["file"] == name for row in rows[word].values())
                if of_file < EXAMPLE_ROWS_PER_FILE and len(rows[word]) < EXAMPLE_ROWS_PER_WORD:
                    rows[word].setdefault(text, dict(text=text, label=word, start=start, end=end,
                                                     file=name))
        if min(map(len, rows.values())) == EXAMPLE_ROWS_PER_WORD:
            break
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w", encoding="utf-8") as f:
        f.writelines(json.dumps(row) + "\n" for part in rows.values() for row in part.values())
    echo(f"Wrote {path}: {sum(map(len, rows.values())):,} pieces of code from numpy and torch")


def main(argv=None):
    return run_command(LabelOptions, prepare_labels, argv)


if __name__ == "__main__":
    sys.exit(main())
