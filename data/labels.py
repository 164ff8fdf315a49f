"""Labelled texts: the records that data.prepare.labels reads and the arrays that it writes.

A record has a text, a label, and the evidence: the part of the text that supports the label, given
as words or as offsets in characters; a list if there are several parts. Label or evidence may be
missing.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from data.meta import read_meta_for
from data.records import check_columns, parse_records
from data.rows import GROUPS, hash_group, id_dtype, open_rows, pad_rows
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
    """A text with an optional label and optional evidence; spans is [] without evidence."""
    text: str
    label: str | None
    spans: list         # [(start, end)] of the evidence, text[start:end] each
    group: str          # texts of the same group are in the same split
    id: object = None   # field `id` of the record

    @property
    def evidence(self):  # in the order of the text, as predictions are
        return [self.text[start:end] for start, end in sorted(self.spans)]


@dataclass
class Fields:
    """Names of the fields of a record with a labelled text, as options of a command.

    The class attributes are the defaults, so `Fields` can be used in place of an instance.
    """
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
    """Return the LabelledText of a record; the record's field names are in `fields`, a Fields.

    Label and group are converted by normalize_label(). The label is `None` if it is missing or
    blank; the group is the text itself if fields.group is `None`. Raises ValueError for a text that
    is missing, empty or not a string, a label that is a list, dict or bytes, invalid evidence, and
    a missing or empty group.
    """
    check_columns(record, [fields.text], "--text")
    text, label = record[fields.text], record.get(fields.label)
    if not isinstance(text, str) or not text:
        raise ValueError(f"field {fields.text!r}: expected a text, got {text!r}")
    if isinstance(label, (dict, list, bytes)):
        raise ValueError(f"field {fields.label!r}: expected a label, got {label!r}")
    if fields.group and record.get(fields.group) in (None, ""):
        raise ValueError(f"no field {fields.group!r} (--group)")
    text = clean(text)
    spans = locate_evidence(text, record, fields)
    label = None if label is None else normalize_label(clean(str(label))) or None
    group = normalize_label(str(record[fields.group])) if fields.group else text
    return LabelledText(text, label, spans, group, record.get("id"))


def normalize_label(text):
    """Return the class name for a label's text: stripped, 1 for 1.0, booleans in lower case."""
    text = text.strip()
    if re.fullmatch(r"-?\d+\.0+", text):
        return text[:text.index(".")]
    return text.lower() if text in ("True", "False", "TRUE", "FALSE") else text


def locate_evidence(text, record, fields):
    """Return the spans of a record's evidence in `text`, [(start, end), ...]; [] without evidence.

    The fields for words, start and end have a single value or a list. With both start and end,
    words are ignored. Otherwise, each value of words gives one span, see find_words; a lone start
    or end is then ignored, but an error without words. Raises ValueError for offsets other than
    integers 0 <= start < end <= len(text), different numbers of starts and ends, and words that do
    not occur in the text.
    """
    words = as_list(record.get(fields.evidence))
    starts = as_list(record.get(fields.start))
    ends = as_list(record.get(fields.end))
    if words and not (starts and ends):
        return [find_words(text, part) for part in words]
    try:
        numbers = [(float(a), float(b)) for a, b in zip(starts, ends, strict=True)]  # also "4.0"
        spans = [(int(start), int(end)) for start, end in numbers]
        if spans != numbers or not all(0 <= a < b <= len(text) for a, b in spans):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"start {starts} and end {ends}: expected integers inside the text of "
                         f"{len(text)} characters, as many starts as ends; end is one past the "
                         "last") from None
    return spans


def as_list(value):
    """Return `value` if it is a list, [] if it is `None` or an empty text, otherwise [value]."""
    if isinstance(value, list):
        return value
    return [] if value in (None, "") else [value]


def find_words(text, part):
    """Return (start, end) of the first `part` in `text`, preferably full words, else ValueError."""
    words = re.escape(clean(str(part)))
    # \B\w matches inside a word.
    match = re.search(rf"(?!\B\w){words}(?!\B\w)", text) or re.search(words, text)
    if not match or not words or part is None:
        raise ValueError(f"the evidence {part!r:.60} does not occur in the text")
    return match.span()


def read_labelled_texts(sources, fields=Fields, skip_bad=None):
    """Read all records of the sources and return a list of LabelledTexts.

    sources, skip_bad: see parse_records(). Raises DataError for bad records, a source that cannot
    be read, no rows, and a name in `fields` that is not a default and occurs in no record.
    """
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
    """Warn of fewer than FEW_ROWS (30) rows in a split or class; counts: {name: number of rows}."""
    if few := [f"{name} has {n}" for name, n in counts.items() if n < FEW_ROWS]:
        echo(f"warning: fewer than {FEW_ROWS} rows ({', '.join(few)}): metrics of so few vary by "
             "10 points and more from one choice of rows to another")


# -----------------------------------------------------------------------------
# arrays

def to_arrays(rows, tokenizer, classes, max_tokens, framed=True):
    """Convert N LabelledTexts with at most S spans each to a dict of arrays.

        tokens (N, T)     token ids of each text, padded with 0; uint16 or uint32, others int64
        lengths (N,)      number of tokens of each text
        labels (N,)       index of the label in the list `classes`; 0 for a label that is not in it
        spans (N, 2S)     first, last, first, last, ...: tokens of the evidence, padded with -1
        groups (N,)       hash of the group, from which folds are made

    Texts are cut to max_tokens. framed: add the tokens that the tokenizer puts around a text, e.g.
    BERT's [CLS] and [SEP]; these count for lengths, spans and max_tokens. Spans that share a token
    are merged. spans is -1 for a row without evidence, or with a span that is cut off or has no
    token. Raises DataError for a row without tokens, and if max_tokens is too small for any token
    of a text.
    """
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
        if not len(tokens[-1]):
            raise DataError(f"the text {row.text!r:.40} has no tokens; leave it out")
        found = [to_token_span(row.text, span, ids, token_bytes, tokenizer) for span in row.spans]
        # A space alone may have no token.
        is_whole = all(first <= last < limit for first, last in found)
        spans.append([len(before) + i for i in merge_spans(found)] if is_whole else [])
    lengths = np.array([*map(len, tokens)], np.int64)
    return dict(tokens=pad_rows(tokens, lengths.max(initial=0), 0, id_dtype(tokenizer.n_vocab)),
                lengths=lengths,
                spans=pad_rows(spans, max(2, *map(len, spans), 0), -1, np.int64),
                labels=np.array([index.get(row.label, 0) for row in rows], np.int64),
                groups=np.array([hash_group(row.group) for row in rows], np.int64))


def merge_spans(spans):
    """Merge inclusive spans that share a position; return the sorted list [first, last, ...]."""
    merged = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1]:
            merged[-1] = max(last, merged[-1])
        else:
            merged += first, last
    return merged


def to_token_span(text, span, ids, token_bytes, tokenizer):
    """Return the first and the last index of the tokens that have a part of text[start:end].

    span: (start, end) in characters. ids (n,): of `text`. token_bytes (V,): byte count of each id.
    last < first if no token has a part of it.
    """
    if tokenizer.kind == "json":
        starts, ends = tokenizer.offsets(text).T  # (n,) each, in characters
        return int(np.searchsorted(ends, span[0], "right")), int(
            np.searchsorted(starts, span[1], "left")) - 1
    ends = token_bytes[ids].cumsum()  # end of each token, in bytes
    start, end = (len(tokenizer.normalize(text[:n]).encode()) for n in span)
    return int(np.searchsorted(ends, start, "right")), int(np.searchsorted(ends, end, "left"))


def read_labels_meta(folder):
    """Return the Meta of a folder that data.prepare.labels wrote; DataError for any other folder.

    `extra` in it has task (class, span or joint), classes (names), class_counts (training rows per
    class) and max_tokens (tokens of the longest row).
    """
    return read_meta_for("classifier", folder, "not a folder of labelled rows; prepare one: python "
                         "-m data.prepare.labels FILE... --out FOLDER, or --example for an example",
                         "task", "classes", "class_counts", "max_tokens")


def open_labels(folder, split, spec):
    """Return a split's [tokens (N, T), lengths (N,), labels (N,), spans (N, 2S)], see to_arrays.

    spec: a model's dict; ids must be below spec["vocab_size"], labels below the number of
    spec["classes"]. With "fold": [k, n], the split is that of open_fold, in memory; otherwise the
    arrays are memory-mapped. Raises DataError for other ids or labels, and for missing files.
    """
    return open_fold(folder, split, spec) if spec.get("fold") else open_split(folder, split, spec)


def open_split(folder, split, spec, **more):
    """Return a split's memory-mapped arrays as open_labels, then those of `more`, see open_rows."""
    tokens = (None,), 0, spec["vocab_size"]
    width = open_rows(folder, split, tokens=tokens)[0].shape[1]
    return open_rows(folder, split, tokens=tokens, lengths=((), 0, width + 1),
                     labels=((), 0, max(1, len(spec["classes"]))), spans=((None,), -1, width),
                     **more)


def open_fold(folder, split, spec):
    """Return a split's arrays for cross-validation, in memory; see open_labels.

    spec["fold"] is [k, n]: the rows of all splits are divided into n folds by the group's hash
    modulo n. Fold k is "test", fold (k + 1) % n is "val", the others are "train"; DataError for an
    empty fold.
    """
    k, n = spec["fold"]
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
