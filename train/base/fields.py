"""Typed values: dataclass fields with a description and limits, and parsing of their text.

The configuration keys of a run (keys.py) and the options of commands (cli.py) are fields of
dataclasses, declared with `key`:

    @dataclass
    class SamplingOptions:
        top_k: int = key(0, "sample from the K most probable tokens; 0: all", ge=0)

Values are parsed by the type of the field, never by YAML's rules for plain scalars (in YAML 1.1
`1e-4` is a string, `010` is eight and `1:30` is ninety), so a YAML file and the command line accept
exactly the same text.
"""

import difflib
import math
import operator
import os
import re
from dataclasses import field, fields

import yaml


def key(default, help, **meta):
    """Return a dataclass field for a configuration key or an option of a command.

    default: a list or dict is copied for each instance.
    help: the description.
    meta: limits and other metadata: choices, a list of texts; gt, ge, lt, le, numbers (for a list,
    limits of each item); check(value): raises ValueError for an invalid parsed value; path=True: a
    leading ~ is expanded; text=True: a list whose items may contain commas, or a text that may be
    "null". Other names are read elsewhere, e.g. by make_parser().
    """
    meta = dict(help=help, **meta)
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=meta)
    return field(default=default, metadata=meta)


def fields_by_name(cls):
    """Return {name: dataclasses.Field} of a dataclass, or of an instance of one."""
    return {f.name: f for f in fields(cls)}


def describe(field):
    """Return the --help text of a field: description, choices and default, with each % doubled."""
    default = field.default
    choices = field.metadata.get("choices")
    text = field.metadata.get("help", "") + (f" ({' | '.join(choices)})" if choices else "")
    if isinstance(default, (str, int, float)) and default != "":
        text += f" [{str(default).lower() if isinstance(default, bool) else default}]"
    return text.replace("%", "%%")


# -----------------------------------------------------------------------------
# parsing by type

def parse_value(field, raw):
    """Return `raw` converted to the type of a field made by key(), and checked against the limits.

    raw: a text, a list or dict of texts, or a value of this type. A text for a list may be YAML,
    for a dict it must be: [a, b], {a: 1}. Items of a list are split at commas, unless the field has
    text=True or is positional. The case of a single choice is ignored.
    "", "null", "none", "~": `None` if the type allows it, otherwise invalid, except "" for a str.
    They are texts if they are choices, or for a str with text=True.
    Raises ValueError, with the expected type or limit, for an invalid value.
    """
    kind = base_type(field.type)
    meta = field.metadata
    choices = meta.get("choices", ())
    text = str(raw).strip().lower()
    is_text = kind is str and meta.get("text")
    if text in ("null", "none", "~", "") and text not in choices and not is_text:
        if "None" in str(field.type):
            return None
        if kind is not str or text:
            raise ValueError(f"expected {TYPES[kind][1]}, got an empty value")
    if "true" in choices and text in BOOLS:  # e.g. compile: yes
        text = str(BOOLS[text]).lower()
    value = convert(text if text in choices else raw, *TYPES[kind])
    items = [value]
    if kind is list:
        if not (meta.get("text") or meta.get("positional")):  # a,b: two items
            value = [word.strip() for item in value for word in item.split(",") if word.strip()]
        # Of "list[int]": with `from __future__ import annotations`, the type is a text.
        item_type = base_type(str(field.type).removeprefix("list["))
        items = value = [convert(item, *TYPES[item_type]) for item in value]
    for item in items:
        check_limits(item, meta)
    if "check" in meta:
        convert(value, meta["check"], meta["help"])
    return os.path.expanduser(value) if meta.get("path") else value


def convert(raw, function, expected):
    """Return function(raw); conversion errors become a ValueError with `expected` and `raw`."""
    try:
        return function(raw)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError,
            yaml.YAMLError):
        got = "true or no value" if raw is True else repr(raw)  # True: also of `--key` alone
        raise ValueError(f"expected {expected}, got {got}") from None


def base_type(annotation):
    """Return bool, int, float, list or dict for an annotation (int for `int | None`), else str."""
    for base in (bool, int, float, list, dict):
        if annotation is base or str(annotation).startswith(base.__name__):
            return base
    return str


BOOLS = dict(true=True, yes=True, on=True, false=False, no=False, off=False)


def to_bool(raw):
    return BOOLS[str(raw).lower()]


def to_int(raw):
    if isinstance(raw, bool):
        raise ValueError
    return int(raw) if isinstance(raw, str) else operator.index(raw)  # 4.7 has no index


def to_float(raw):
    if isinstance(raw, bool) or not math.isfinite(float(raw)):
        raise ValueError
    return float(raw)


def to_str(raw):
    if isinstance(raw, bool) or not isinstance(raw, (str, int, float, os.PathLike)):
        raise ValueError
    return str(raw)


def to_list(raw):
    if isinstance(raw, str) and raw.strip().startswith("["):
        raw = yaml.load(raw, yaml.BaseLoader)
    return [str(v) for v in raw] if isinstance(raw, (list, tuple)) else [to_str(raw)]


def to_dict(raw):
    raw = yaml.load(raw, yaml.BaseLoader) if isinstance(raw, str) else raw
    return {str(k): {str(a): to_float(b) for a, b in v.items()} if isinstance(v, dict)
            else to_float(v) for k, v in raw.items()}


TYPES = {bool: (to_bool, "true or false"), int: (to_int, "an integer"), str: (to_str, "text"),
         float: (to_float, "a finite number"), list: (to_list, 'a list such as ["[a] text", b]'),
         dict: (to_dict, "a mapping such as {wte: 0.5}")}
LIMITS = dict(gt="above", ge="at least", lt="below", le="at most")  # names in `operator`


def check_limits(value, meta):
    """Raise ValueError if a single value or item violates a limit or the choices in `meta`."""
    for name, words in LIMITS.items():
        if name in meta and not getattr(operator, name)(value, meta[name]):
            raise ValueError(f"must be {words} {meta[name]}, got {value}")
    choices = meta.get("choices", [value])
    if value not in choices:
        raise ValueError(f"must be one of {', '.join(choices)}; got {value!r}"
                         + nearest(str(value), choices))


def parse_mixture(data_dir):
    """Return {folder: weight} of a mixture "folder:weight,folder:weight", or {} for other text.

    data_dir: value of this key; no mixture without a comma, or if no part has a weight.
    A leading ~ is expanded; weights are as given. Raises ValueError if `data_dir` is empty, a
    weight of a mixture is missing or not a positive number, or a folder is empty or repeated.
    """
    if not data_dir.strip():
        raise ValueError
    parts = [part.rpartition(":") for part in data_dir.split(",")]
    if len(parts) < 2 or not any(re.match(r":\s*[-+.\d]", colon + n) for _, colon, n in parts):
        return {}
    weights = {os.path.expanduser(folder.strip()): to_float(weight) for folder, _, weight in parts}
    if len(weights) < len(parts) or "" in weights or min(weights.values()) <= 0:
        raise ValueError
    return weights


def nearest(word, words):
    """Return " (did you mean 'NAME'?)" for the most similar item of `words`, or "" if none is."""
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.75)
    return f" (did you mean {close[0]!r}?)" if close else ""
