"""Prepare labelled texts for --model classifier.

    python -m data.prepare.labels reviews.csv --out data/bin/reviews --tokenizer out/ckpt.pt
    python -m data.prepare.labels --example --out data/bin/labels

A record has a text, a label, and evidence: a part of the text, as words or as offsets in
characters, or a list of several parts. Label or evidence may be missing. Writes train, val and test
arrays with one row per text (SPLIT_tokens.npy etc., see data/labels.py) and meta.json. The split is
chosen by a hash of the text, or of the field --group, so that records of the same group are in the
same split.
"""

import contextlib
import hashlib
import importlib.util
import io
import itertools
import os
import random
import tokenize
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from data.labels import SPLITS, Fields, read_labelled_texts, to_arrays, warn_if_few
from data.meta import Meta, write_meta
from data.prepare.folders import FolderOptions, new_folder, report, start_option
from data.prepare.sources import source_name
from data.records import SOURCES, STDLIB_SKIP, walk
from data.rows import save_arrays, split_by_group
from data.tokenizer import open_tokenizer, write_tokenizer
from train.base.cli import command
from train.base.errors import DataError, UserError, echo
from train.base.fields import key

EXAMPLE_WORDS = ("def", "for", "if", "import", "in", "return")
EXAMPLE_CHARS = 128
EXAMPLE_ROWS_PER_WORD = 1200
EXAMPLE_ROWS_PER_FILE = 6


@dataclass
class LabelOptions(FolderOptions, Fields):
    """Prepare labelled texts for --model classifier."""
    files: list[str] = key([], SOURCES, positional=True, metavar="FILE")
    group: str | None = key(None, "field, e.g. with the patient: equal values are in the "
                            "same split (default: each text is a group)", metavar="NAME")
    tokenizer: str = key("byte", "tokenizer of the model to start from: byte, gpt2, a rank file, a "
                         "prepared folder, a checkpoint or a Hugging Face model", metavar="NAME")
    val_fraction: float = key(0.1, "share of texts for validation, and for testing", gt=0, lt=0.5)
    max_tokens: int = key(512, "cut longer texts", ge=1)
    example: bool = key(False, "instead of files: which word is missing from a piece of Python, "
                               "and where? Made of the sources of numpy and torch")
    skip_bad: bool = key(False, "leave out invalid records")


def prepare_labels(args):
    """Run the command: write the folder of labelled texts and print a summary."""
    if bool(args.files) == args.example:
        raise UserError("give one or more FILEs, or --example")
    tokenizer = open_tokenizer(args.tokenizer)
    out = args.out or os.path.join("data", "bin", source_name([*args.files, "example"][0]))
    sources = args.files
    if args.example:
        sources = [example_records()]
        args.group = "file"
        args.files = ["--example"]
    with new_folder(out, "classifier", args.files, args.force) as folder:
        rows = read_labelled_texts(sources, args, args.skip_bad)
        classes = find_classes(rows)
        n_with_spans = sum(bool(row.spans) for row in rows)
        if not n_with_spans and not classes:
            raise DataError("no row has a label or evidence; name their fields with --label, "
                            "--evidence, or --start and --end")
        task = "class"
        if n_with_spans:
            task = "joint" if classes else "span"
        splits = split_rows(rows, args.val_fraction)
        width = 0
        n_lost = n_with_spans
        for split, part in splits.items():
            arrays = to_arrays(part, tokenizer, classes, args.max_tokens)
            save_arrays(folder, split, **arrays)
            width = max(width, int(arrays["lengths"].max()))
            n_lost -= (arrays["spans"][:, 0] >= 0).sum()
        counts = [sum(row.label == name for row in splits["train"]) for name in classes]
        write_meta(folder, Meta(
            "classifier", **write_tokenizer(folder, tokenizer), sources=args.files,
            extra=dict(task=task, classes=classes, max_tokens=width, class_counts=counts,
                       frame=[len(tokenizer.start), len(tokenizer.end)])))
    echo(f"Prepared {out}: task {task}, rows of up to {width} tokens, training rows per class: "
         f"{dict(zip(classes, counts))}")
    if n_lost:
        echo(f"{n_lost:,} rows lost their evidence, which has no token or is beyond --max_tokens "
             f"{args.max_tokens}")
    n_rows = {split: len(part) for split, part in splits.items()}
    warn_if_few(n_rows)
    report(out, {split: dict(rows=n) for split, n in n_rows.items()}, "configs/classifier",
           start_option(args.tokenizer))


def split_rows(rows, fraction):
    """Return {split: rows}, about `fraction` in val and in test, chosen by a hash of row.group.

    rows: LabelledTexts. Raises DataError if a split is empty.
    """
    splits = {name: [] for name in SPLITS}
    for row in rows:
        splits[split_by_group(row.group, fraction)].append(row)
    if empty := [name for name in SPLITS if not splits[name]]:
        raise DataError(f"{', '.join(empty)}: none of {len(rows)} rows; give more, or a larger "
                        "--val_fraction")
    return splits


def find_classes(rows):
    """Return the different labels of LabelledTexts, strings, sorted; [] if no row has one.

    They are sorted by value if all are integers. Raises DataError if only some rows have a label,
    or all have the same.
    """
    names = {row.label for row in rows}
    if names == {None}:
        return []
    if bare := [row.text for row in rows if row.label is None]:
        raise DataError(f"{len(bare):,} of {len(rows):,} rows have no label, the first is "
                        f"{bare[0]!r:.60}; expected a label in each row or in none; take out such "
                        "rows, or give them labels")
    if len(names) == 1:
        raise DataError(f"all labels are {rows[0].label!r:.60}; expected two classes or more")
    numeric = all(name.removeprefix("-").isdecimal() for name in names)
    return sorted(names, key=lambda name: (int(name) if numeric else 0, name))  # 01 before 1


# -----------------------------------------------------------------------------
# the example: which word is missing from this piece of code, and where?

def missing_words(source):
    """Yield (word, text, start, end) for each example of a missing word in Python code.

    text: a few lines of `source` without one occurrence of `word`, an entry of EXAMPLE_WORDS.
    text[start:end]: evidence, the name after the word. Raises SyntaxError or tokenize.TokenError.
    """
    lines = [*io.StringIO(source)]  # as tokenize counts them: a form feed ends no line
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


def example_records():
    """Yield (location, record) of missing words in the sources of numpy and torch.

    record: {"text", "label" (the missing word), "start", "end" (evidence), "file" (the location)}.
    All texts are different. A label has at most EXAMPLE_ROWS_PER_WORD (1200) records.
    """
    files = {}
    for package in ("numpy", "torch"):
        folder = Path(importlib.util.find_spec(package).submodule_search_locations[0])
        files |= {f"{package}/{Path(file).relative_to(folder).as_posix()}": file
                  for file in walk(folder, STDLIB_SKIP) if file.endswith(".py")}
    texts = set()
    counts = Counter()
    for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
        with contextlib.suppress(SyntaxError, UnicodeDecodeError, tokenize.TokenError):
            rows = list(missing_words(Path(files[name]).read_text(encoding="utf-8")))
            for word, text, start, end in random.Random(name).sample(rows, len(rows)):
                if (text not in texts and counts[name, word] < EXAMPLE_ROWS_PER_FILE
                        and counts[word] < EXAMPLE_ROWS_PER_WORD):
                    counts.update([word, (name, word)])
                    texts.add(text)
                    yield name, dict(text=text, label=word, start=start, end=end, file=name)
        if len(texts) == EXAMPLE_ROWS_PER_WORD * len(EXAMPLE_WORDS):
            break


main = command(LabelOptions, prepare_labels)
