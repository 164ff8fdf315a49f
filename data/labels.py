"""Labelled texts: the records that data.prepare.labels reads and the arrays that it writes.

A record has a text, a label, and the evidence: the part of the text that supports the label, as
words or as offsets in characters, or a list of several parts. Label or evidence may be missing.
"""

import os
import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from data.meta import read_meta_for
from data.records import check_columns, parse_records
from data.rows import GROUPS, id_dtype, open_rows, pad_rows
from data.tokenizer_types import clean
from train.base.errors import DataError, echo
from train.base.fields import key

SPLITS = ("train", "val", "test")
FEW_ROWS = 30
# tokens (N, T) ids, padded with 0; lengths (N,) in tokens; labels (N,) class indices; spans (N, 2S)
# first and last token of up to S spans of evidence, in the order of the text, padded with -1: all
# are -1 without evidence or if a part was cut off. Also groups (N,), hashes of the groups, from
# which folds are made.
ARRAYS = ("tokens", "lengths", "labels", "spans")


class LabelledText(NamedTuple):
    """A text with an optional label and optional evidence: `spans`, [(start, end)] in characters,
    of the parts of the text that support the label. Texts of one `group` are in the same split."""
    text: str
    label: str | None
    spans: list         # [(start, end)] of the evidence, text[start:end] each
    group: str          # texts of the same group are in the same split
    id: object = None   # field `id` of the record

    @property
    def evidence(self):
        return [self.text[start:end] for start, end in self.spans]


@dataclass
class Fields:
    """Names of the fields of a record with a labelled text, as options of a command. The class
    itself has the default names."""
    text: str = key("text", "field or column with the text", metavar="NAME")
    label: str = key("label", "field with the label", metavar="NAME")
    evidence: str = key("evidence", "field with the words that support the label, or a list",
                        metavar="NAME")
    start: str = key("start", "instead: field with the position of these words, or a list",
                     metavar="NAME")
    end: str = key("end", "and field with the position after the last of them", metavar="NAME")
    group = None  # field with the group of a text; `None`: each text is a group


# -----------------------------------------------------------------------------
# records

def parse_labelled_text(record, fields):
    """Return a LabelledText of a record, a dict; without a label or evidence, its label is `None`
    or its spans are []. fields: Fields, the names of the record's fields. Raises ValueError for a
    missing text or group, and for an invalid text, label or evidence."""
    check_columns(record, [fields.text], "--text")
    text, label = record[fields.text], record.get(fields.label)
    if not isinstance(text, str) or not text:
        raise ValueError(f"field {fields.text!r}: expected a text, got {text!r}")
    if isinstance(label, (dict, list)):
        raise ValueError(f"field {fields.label!r}: expected a label, got {label!r}")
    if fields.group and record.get(fields.group) in (None, ""):
        raise ValueError(f"no field {fields.group!r} (--group)")
    text = clean(text)
    spans = locate_evidence(text, record, fields)
    label = None if label is None else normalize_label(clean(str(label))) or None
    group = str(record[fields.group]) if fields.group else text
    return LabelledText(text, label, spans, group, record.get("id"))


def normalize_label(text):
    """Return the name of a class, equal for all file formats, from the text of a label: without
    surrounding spaces, integers without .0, true and false as in JSON."""
    text = text.strip()
    if re.fullmatch(r"-?\d+\.0+", text):
        return text[:text.index(".")]
    return text.lower() if text in ("True", "False", "TRUE", "FALSE") else text


def locate_evidence(text, record, fields):
    """Return [(start, end)], text[start:end] each, of the evidence of `record`, a dict; [] without
    evidence. fields: Fields, the names of the record's fields; each has a value or a list. Offsets
    in the record take precedence over words; of words, the first match in `text` is used,
    preferably of whole words. Raises ValueError for invalid offsets, and for missing words."""
    words, starts, ends = (
        value if isinstance(value, list) else [] if value in (None, "") else [value]
        for value in map(record.get, (fields.evidence, fields.start, fields.end)))
    if not (starts and ends) and (words or not starts + ends):
        return [find_words(text, part) for part in words]
    try:
        numbers = [(float(a), float(b)) for a, b in zip(starts, ends, strict=True)]  # also "4.0"
        spans = [(int(start), int(end)) for start, end in numbers]
        if spans != numbers:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"start {starts} and end {ends}: expected integers, as many starts as "
                         "ends") from None
    for start, end in spans:
        if not 0 <= start < end <= len(text):
            raise ValueError(f"evidence {start} to {end} is not inside the text of {len(text)} "
                             "characters; end is one past the last")
    return spans


def find_words(text, part):
    """Return (start, end) of the first occurrence of `part` in `text`, preferably as whole words.
    Raises ValueError if there is none."""
    words = re.escape(clean(str(part)))
    # \B\w matches inside a word.
    match = re.search(rf"(?!\B\w){words}(?!\B\w)", text) or re.search(words, text)
    if not match or not words or part is None:
        raise ValueError(f"the evidence {part!r:.60} does not occur in the text")
    return match.span()


def read_labelled_texts(sources, fields=Fields, skip_bad=False):
    """Return the list of LabelledTexts of `sources`: names of files or data sets, or iterables of
    (location, record). fields: names of the fields. skip_bad: leave out invalid records, with a
    printed line. Otherwise DataError lists them. Raises DataError if there are no rows, or if a
    field name that is not the default occurs in no record."""
    seen = set()

    def parse(record):
        seen.update(record)
        return parse_labelled_text(record, fields)
    rows = list(parse_records(sources, parse, skip_bad=skip_bad))
    if not rows:
        raise DataError(f"{', '.join(map(str, sources))}: no rows")
    for name in ("label", "evidence", "start", "end"):
        if (field := getattr(fields, name)) not in {*seen, getattr(Fields, name)}:
            raise DataError(f"--{name} {field}: no row has this field")
    return rows


def warn_if_few(counts):
    """Print a warning about parts of the data with fewer than FEW_ROWS (30) rows. counts: {name of
    a split or class: number of rows}."""
    if few := [f"{name} has {n}" for name, n in counts.items() if n < FEW_ROWS]:
        echo(f"warning: fewer than {FEW_ROWS} rows ({', '.join(few)}): metrics of so few vary by "
             "10 points and more from one choice of rows to another")


# -----------------------------------------------------------------------------
# arrays

def to_arrays(rows, tokenizer, classes, max_tokens, framed=True):
    """Return {"tokens": (N, T), padded with 0, "lengths": (N,) in tokens, "labels": (N,), "spans":
    (N, 2S)} of `rows`, N LabelledTexts with up to S spans. Texts are cut to max_tokens, including
    the tokens that the tokenizer puts before and after a text, if `framed`. labels: indices in the
    list `classes`, 0 for other labels. spans: indices of the first and last token of each span of
    the evidence, where spans with a token in common are one, padded with -1; all are -1 in a row
    without evidence, or of which a span is cut or has no token. Raises DataError if max_tokens
    leaves no token for a text."""
    index = {name: i for i, name in enumerate(classes)}
    token_bytes = tokenizer.token_bytes()
    before, after = (tokenizer.start, tokenizer.end) if framed else ([], [])
    limit = max_tokens - len(before) - len(after)
    if limit < 1:
        raise DataError(f"--max_tokens {max_tokens}: the tokenizer puts {len(before + after)} "
                        "tokens around a text; give more")
    tokens = []
    spans = []  # first, last, first, last, ... of each row
    for row in rows:
        ids = tokenizer.encode_array(row.text)
        parts = before, ids[:limit], after
        tokens.append(np.concatenate([np.array(part, ids.dtype) for part in parts]))
        found = [to_token_span(row.text, span, ids, token_bytes, tokenizer) for span in row.spans]
        # A space alone may have no token.
        is_whole = all(first <= last < limit for first, last in found)
        spans.append([len(before) + i for i in merge_spans(found)] if is_whole else [])
    lengths = np.array([*map(len, tokens)], np.int64)
    return dict(tokens=pad_rows(tokens, lengths.max(initial=0), 0, id_dtype(tokenizer.n_vocab)),
                lengths=lengths,
                spans=pad_rows(spans, max(2, *map(len, spans), 0), -1, np.int64),
                labels=np.array([index.get(row.label, 0) for row in rows], np.int64))


def merge_spans(spans):
    """Return [first, last, first, last, ...] of `spans` (first, last), an iterable, in increasing
    order; spans that have a position in common are one."""
    merged = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1]:
            merged[-1] = max(last, merged[-1])
        else:
            merged += first, last
    return merged


def to_token_span(text, span, ids, token_bytes, tokenizer):
    """Return the indices (first, last) of the tokens of text[start:end], where span is (start,
    end); last < first if no token has a part of it. ids: (n,) of the text. token_bytes: (V,) number
    of bytes per id."""
    if tokenizer.kind == "json":
        starts, ends = tokenizer.offsets(text).T  # (n,) each, in characters
        return int(np.searchsorted(ends, span[0], "right")), int(
            np.searchsorted(starts, span[1], "left")) - 1
    ends = token_bytes[ids].cumsum()  # end of each token, in bytes
    start, end = (len(tokenizer.normalize(text[:n]).encode()) for n in span)
    return int(np.searchsorted(ends, start, "right")), int(np.searchsorted(ends, end, "left"))


def read_labels_meta(folder):
    """Return the Meta of a folder that data.prepare.labels wrote; the dict `extra` in it has task,
    classes, class_counts and max_tokens. Raises DataError for any other folder."""
    return read_meta_for("classifier", folder, "not a folder of labelled rows; prepare one: python "
                         "-m data.prepare.labels FILE... --out FOLDER, or --example for an example",
                         task=str, classes=[str], class_counts=[int], max_tokens=int)


def open_labels(folder, split, spec):
    """Return [tokens (N, T), lengths (N,), labels (N,), spans (N, 2S)] of a split, memory-mapped
    or, with folds, in memory. spec: a model's {"vocab_size": int, "classes": list, ...}, the limits
    of ids and labels, and with folds "fold": see open_fold. Raises DataError for values outside of
    these, and for missing files."""
    return open_fold(folder, split, spec) if spec.get("fold") else open_split(folder, split, spec)


def open_split(folder, split, spec, **more):
    """Return the memory-mapped arrays of a split as it was prepared, as open_labels. more: limits
    of further arrays, as of open_rows."""
    tokens = (None,), 0, spec["vocab_size"]
    width = open_rows(folder, split, tokens=tokens)[0].shape[1]
    n_spans = open_rows(folder, split, spans=((None,), -1, width))[0].shape[1] // 2
    return open_rows(folder, split, tokens=tokens, lengths=((), 0, width + 1),
                     labels=((), 0, max(1, len(spec["classes"]))),
                     spans=((max(1, n_spans) * 2,), -1, width), **more)


def open_fold(folder, split, spec):
    """Return the arrays of a split for cross-validation, as open_labels. spec["fold"] [k, n]: all
    rows of the folder are in n folds, by the hash of the group. Fold k is "test", the next one
    "val", and the others are "train". Raises DataError for an empty fold."""
    k, n = spec["fold"]
    if not os.path.exists(os.path.join(folder, "train_groups.npy")):
        raise DataError(f"{folder}: folds: no groups of rows in it: an earlier version wrote it; "
                        "prepare the data again")
    parts = [open_split(folder, name, spec, groups=((), 0, GROUPS)) for name in SPLITS]
    for i, value in ((0, 0), (3, -1)):  # tokens, spans
        width = max(part[i].shape[1] for part in parts)
        for part in parts:
            part[i] = pad_rows(part[i], width, value, part[i].dtype)
    *arrays, groups = map(np.concatenate, zip(*parts))
    if not np.bincount(groups % n, minlength=n).all():
        raise DataError(f"{folder}: folds: one of {n} has no rows; the rows are of "
                        f"{len(np.unique(groups))} groups: give fewer folds")
    role = np.minimum((groups - k) % n, 2)  # (N,)
    return [array[role == ("test", "val", "train").index(split)] for array in arrays]
