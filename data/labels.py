"""Labelled texts: the records that data.prepare.labels reads and the arrays that it writes.

A record has a text, a label, and the evidence: the part of the text that supports the label, as
words or as offsets in characters. Label or evidence may be missing.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from data.meta import read_meta_for
from data.records import check_columns, parse_records
from data.rows import id_dtype, open_rows, pad_rows
from data.tokenizer_types import clean
from train.base.errors import DataError, echo
from train.base.fields import key

SPLITS = ("train", "val", "test")
FEW_ROWS = 30
# tokens (N, T) ids, padded with 0; lengths (N,) in tokens; labels (N,) class indices; spans (N, 2)
# first and last token of the evidence, -1 without evidence or if it was cut off.
ARRAYS = ("tokens", "lengths", "labels", "spans")


class LabelledText(NamedTuple):
    """A text with an optional label and optional evidence: the part of the text that supports the
    label."""
    text: str
    label: str | None
    start: int | None   # the evidence is text[start:end]
    end: int | None
    group: str          # texts of the same group are in the same split
    id: object = None   # field `id` of the record

    @property
    def evidence(self):
        return None if self.start is None else self.text[self.start:self.end]


@dataclass
class Fields:
    """Names of the fields of a record with a labelled text, as options of a command. The class
    itself has the default names."""
    text: str = key("text", "field or column with the text", metavar="NAME")
    label: str = key("label", "field with the label", metavar="NAME")
    evidence: str = key("evidence", "field with the words that support the label", metavar="NAME")
    start: str = key("start", "instead: field with the position of these words", metavar="NAME")
    end: str = key("end", "and field with the position after the last of them", metavar="NAME")
    group = None  # field with the group of a text; `None`: each text is a group


# -----------------------------------------------------------------------------
# records

def parse_labelled_text(record, fields):
    """Return a LabelledText of a record, a dict. fields: Fields, the names of its fields. Raises
    ValueError for a missing or invalid text, label, group or evidence."""
    check_columns(record, [fields.text], "--text")
    text, label = record[fields.text], record.get(fields.label)
    if not isinstance(text, str) or not text:
        raise ValueError(f"field {fields.text!r}: expected a text, got {text!r}")
    if isinstance(label, (dict, list)):
        raise ValueError(f"field {fields.label!r}: expected a label, got {label!r}")
    if fields.group and record.get(fields.group) in (None, ""):
        raise ValueError(f"no field {fields.group!r} (--group)")
    text = clean(text)
    start, end = locate_evidence(text, record, fields)
    label = None if label is None else normalize_label(clean(str(label))) or None
    group = str(record[fields.group]) if fields.group else text
    return LabelledText(text, label, start, end, group, record.get("id"))


def normalize_label(text):
    """Return the name of a class, equal for all file formats, from the text of a label: without
    surrounding spaces, integers without .0, true and false as in JSON."""
    text = text.strip()
    if re.fullmatch(r"-?\d+\.0+", text):
        return text[:text.index(".")]
    return text.lower() if text in ("True", "False", "TRUE", "FALSE") else text


def locate_evidence(text, record, fields):
    """Return (start, end) of the evidence of `record`, a dict, as character offsets in `text`, or
    (`None`, `None`) without evidence. fields: Fields. Offsets in the record take precedence over
    words; words are searched in the text, preferably as whole words, and the first match is used.
    Raises ValueError for invalid offsets, and for words that do not occur."""
    words, offsets = record.get(fields.evidence), [record.get(fields.start), record.get(fields.end)]
    known = [n not in (None, "") for n in offsets]
    if all(known) or any(known) and words in (None, ""):
        try:
            start, end = map(int, offsets)
            if [start, end] != [*map(float, offsets)]:
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"start and end {offsets}: expected integers") from None
        if not 0 <= start < end <= len(text):
            raise ValueError(f"evidence {start} to {end} is not inside the text of {len(text)} "
                             "characters; end is one past the last")
        return start, end
    if words in (None, ""):
        return None, None
    words = re.escape(clean(str(words)))
    # \B\w matches inside a word.
    match = re.search(rf"(?!\B\w){words}(?!\B\w)", text) or re.search(words, text)
    if not match:
        raise ValueError(f"the evidence {record[fields.evidence]!r:.60} does not occur in the text")
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

def to_arrays(rows, tokenizer, classes, max_tokens):
    """Return {"tokens": (N, T), padded with 0, "lengths": (N,) in tokens, "labels": (N,), "spans":
    (N, 2)} of `rows`, N LabelledTexts. Texts are cut to max_tokens, including the tokens that the
    tokenizer puts before and after a text. labels: indices in the list `classes`, 0 for other
    labels. spans: indices of the first and last token of the evidence, -1 if it is missing or cut.
    """
    index = {name: i for i, name in enumerate(classes)}
    token_bytes = tokenizer.token_bytes()
    n_before = len(tokenizer.start)
    limit = max(0, max_tokens - n_before - len(tokenizer.end))
    tokens = []
    spans = np.full((len(rows), 2), -1, np.int64)
    for i, row in enumerate(rows):
        ids = tokenizer.encode_array(row.text)
        parts = tokenizer.start, ids[:limit], tokenizer.end
        tokens.append(np.concatenate([np.array(part, ids.dtype) for part in parts]))
        if row.start is not None:
            first, last = to_token_span(row, ids, token_bytes, tokenizer)
            if first <= last < limit:  # a space alone may have no token
                spans[i] = n_before + first, n_before + last
    lengths = np.array([*map(len, tokens)], np.int64)
    return dict(tokens=pad_rows(tokens, lengths.max(initial=0), 0, id_dtype(tokenizer.n_vocab)),
                lengths=lengths, spans=spans,
                labels=np.array([index.get(row.label, 0) for row in rows], np.int64))


def to_token_span(row, ids, token_bytes, tokenizer):
    """Return the indices (first, last) of the tokens of the evidence of `row`, a LabelledText that
    has evidence. ids: (n,) of the text. token_bytes: (V,) number of bytes per id."""
    if tokenizer.kind == "json":
        starts, ends = tokenizer.offsets(row.text).T  # (n,) each, in characters
        return int(np.searchsorted(ends, row.start, "right")), int(
            np.searchsorted(starts, row.end, "left")) - 1
    ends = token_bytes[ids].cumsum()  # end of each token, in bytes
    start, end = (len(tokenizer.normalize(row.text[:n]).encode()) for n in (row.start, row.end))
    return int(np.searchsorted(ends, start, "right")), int(np.searchsorted(ends, end, "left"))


def read_labels_meta(folder):
    """Return the Meta of a folder that data.prepare.labels wrote; the dict `extra` in it has task,
    classes, class_counts and max_tokens. Raises DataError for any other folder."""
    return read_meta_for("classifier", folder, "not a folder of labelled rows; prepare one: python "
                         "-m data.prepare.labels FILE... --out FOLDER, or --example for an example",
                         task=str, classes=[str], class_counts=[int], max_tokens=int)


def open_labels(folder, split, spec):
    """Return the memory-mapped [tokens (N, T), lengths (N,), labels (N,), spans (N, 2)] of a split.
    spec: a model's {"vocab_size": int, "classes": list, ...}, the limits of ids and labels. Raises
    DataError for values outside of these, and for missing files."""
    tokens = (None,), 0, spec["vocab_size"]
    width = open_rows(folder, split, tokens=tokens)[0].shape[1]
    return open_rows(folder, split, tokens=tokens, lengths=((), 0, width + 1),
                     labels=((), 0, max(1, len(spec["classes"]))), spans=((2,), -1, width))
