"""Hugging Face's tokenizer.json: reading it, and writing tokenizers as such a file.

Both formats describe the same byte pair encoding. tiktoken joins the pair with the lowest rank of
the joined bytes; tokenizer.json lists the pairs in the order of joining.
"""

import functools
import json
import math
import os

from data.tokenizer_types import (
    EOT,
    GPT2_PATTERN,
    MAX_VOCAB,
    CharTokenizer,
    JsonTokenizer,
    byte_table,
    rank_tokenizer,
    tokenizer_from_spec,
)
from train.base.errors import DataError

ANY_CHARACTER = r"[\s\S]"
ANY_TEXT = r"[\s\S]+"
# Flags of an added token. If all are false, it matches exactly this text.
ADDED_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
MAX_MERGE_WORK = 1 << 22  # sum of squared token lengths, or 200 per token if that is more


@functools.cache
def byte_characters():
    """Return {byte: character} of byte-level vocabularies."""
    return {b: c for c, b in byte_table().items()}


def token_text(token):
    """Return the text by which a byte-level vocabulary names the bytes of a token."""
    return "".join(byte_characters()[b] for b in token)


def text_bytes(text):
    """Return the bytes that a text of a byte-level vocabulary names. KeyError for other texts."""
    return bytes(byte_table()[c] for c in text)


def list_merges(ranks):
    """Return [(left, right)] in the order of the ranks: the last pair that is joined to form each
    token. Raises DataError for tokens so long that this would take too long."""
    if sum(len(token) ** 2 for token in ranks) > max(MAX_MERGE_WORK, 200 * len(ranks)):
        raise DataError(f"tokens of up to {max(map(len, ranks)):,} bytes: no vocabulary of a text")
    pairs = (last_pair(token, ranks) for token in sorted(ranks, key=ranks.get) if len(token) > 1)
    return [pair for pair in pairs if pair]


def last_pair(token, ranks):
    """Return the (left, right) that tiktoken joins last to form `token` from bytes, or `None` if it
    cannot (then the token is used only for a whole piece of text)."""
    parts = [token[i:i + 1] for i in range(len(token))]
    while len(parts) > 2:
        rank, i = min((ranks.get(a + b, math.inf), i)
                      for i, (a, b) in enumerate(zip(parts, parts[1:])))
        if rank == math.inf:
            return None
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return tuple(parts)


# -----------------------------------------------------------------------------
# writing

def tokenizer_json(tokenizer):
    """Return the content of tokenizer.json, a dict, for a tokenizer."""
    if tokenizer.kind == "json":
        return json.loads(tokenizer.text)
    content = dict(version="1.0", added_tokens=[])
    if tokenizer.kind == "char":
        vocab = {c: i for i, c in enumerate(tokenizer.chars)}
        return content | dict(model=dict(type="WordLevel", unk_token="", vocab=vocab),
                              pre_tokenizer=split_at(ANY_CHARACTER), decoder=dict(type="Fuse"))
    if tokenizer.nfc:
        content["normalizer"] = {"type": "NFC"}
    content["added_tokens"] = [
        dict(id=i, content=text, **dict.fromkeys(ADDED_TOKEN_FLAGS, False), special=special)
        for text, (i, special) in tokenizer.added.items()]
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True)
    # The pattern of use_regex is GPT-2's without possessive quantifiers, which the package
    # tokenizers reads differently.
    pre_tokenizer = byte_level | dict(use_regex=tokenizer.pattern == GPT2_PATTERN)
    if tokenizer.pattern not in (GPT2_PATTERN, ANY_CHARACTER):  # read from a tokenizer.json
        pre_tokenizer = dict(type="Sequence",
                             pretokenizers=[split_at(tokenizer.pattern), pre_tokenizer])
    ranks = tokenizer.ranks
    model = dict(
        type="BPE", ignore_merges=True,  # a text that is a token as a whole needs no merges
        vocab={token_text(token): rank for token, rank in ranks.items()},
        merges=[f"{token_text(a)} {token_text(b)}" for a, b in list_merges(ranks)])
    return content | dict(pre_tokenizer=pre_tokenizer, model=model,
                          decoder=byte_level | dict(use_regex=True))


def split_at(pattern):
    return dict(type="Split", pattern=dict(Regex=pattern), behavior="Isolated", invert=False)


# -----------------------------------------------------------------------------
# reading

def read_json(path):
    """Return the object in a JSON file, a dict. Raises DataError."""
    try:
        with open(path, encoding="utf-8") as f:
            content = json.load(f)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected a JSON object, got a {type(content).__name__}")
    return content


def read_optional_json(folder, name):
    """Return the object in a JSON file of a folder, or {} if the file is missing."""
    path = os.path.join(folder, name)
    return read_json(path) if os.path.exists(path) else {}


def read_hf_tokenizer(folder):
    """Return the tokenizer of a Hugging Face folder: by tiktoken if it is a byte-level BPE, or was
    written by `tokenizer_json`; otherwise by the package tokenizers. Raises DataError."""
    path = os.path.join(folder, "tokenizer.json")
    content = read_json(path)
    reason = ""
    errors = (LookupError, TypeError, AttributeError, ValueError)
    try:
        rows = read_optional_json(folder, "config.json").get("vocab_size")
        tokens = {t["content"]: t for t in content.get("added_tokens") or ()}
        eot_token = end_of_text(folder, tokens)
        try:
            return read_byte_level(content, tokens, eot_token, rows or MAX_VOCAB)
        except errors as error:
            reason = f"not a byte-level BPE ({type(error).__name__}: {error}); "
        return JsonTokenizer(json.dumps(content), eot_token, rows or 0)
    except errors as error:
        raise DataError(f"{path}: {reason}{error}") from None


def read_byte_level(content, tokens, eot_token, rows):
    """Return the tokenizer of a tokenizer.json that tiktoken can represent. Any error says that it
    cannot. tokens: {text: added token}. rows: of the model, which may be fewer than the tokens."""
    model, pre_tokenizer = content["model"], content["pre_tokenizer"]
    normalizer = content.get("normalizer")
    if model.get("type") == "WordLevel" and pre_tokenizer == split_at(ANY_CHARACTER):
        return CharTokenizer("".join(sorted(model["vocab"], key=model["vocab"].get)))
    if (model.get("type", "BPE") != "BPE" or model.get("byte_fallback")
            or normalizer not in (None, {"type": "NFC"})
            or any(t.get(flag) for t in tokens.values() for flag in ADDED_TOKEN_FLAGS[:3])):
        raise DataError("another model, normalizer or kind of added token")
    ranks = {text_bytes(t): i for t, i in model["vocab"].items() if t not in tokens}
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
    if [tuple(map(text_bytes, pair)) for pair in pairs] != list_merges(ranks):
        raise DataError("the ids are not in the order of the merges")
    added = {text: [t["id"], bool(t.get("special"))] for text, t in tokens.items()
             if t["id"] < rows}
    if eot_token not in [i for i, _ in added.values()]:
        added[EOT] = [eot_token, True]
    byte = tokenizer_from_spec({"kind": "byte"})
    if (ranks, added, normalizer) == (byte.ranks, byte.added, None):
        return byte
    return rank_tokenizer(ranks, pattern_of(pre_tokenizer), eot_token, added, bool(normalizer))


def pattern_of(pre_tokenizer):
    """Return the regular expression by which a byte-level pre_tokenizer splits text, or `None`."""
    *splits, last = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if last["type"] != "ByteLevel" or last.get("add_prefix_space"):
        return None
    own_pattern = last.get("use_regex", True)
    if not splits:
        return GPT2_PATTERN if own_pattern else ANY_TEXT
    pattern = splits[0].get("pattern", {}).get("Regex")
    return pattern if splits == [split_at(pattern)] and not own_pattern else None


def end_of_text(folder, tokens):
    """Return the id of the end of text of a Hugging Face folder, or `None`. tokens: {text: added
    token}."""
    text = special_tokens(folder).get("eos_token")
    if text in tokens:
        return tokens[text]["id"]
    end = read_optional_json(folder, "config.json").get("eos_token_id")
    return end[0] if isinstance(end, list) else end


def special_tokens(folder):
    """Return {"bos_token": "<s>", ...} of a tokenizer_config.json."""
    config = read_optional_json(folder, "tokenizer_config.json")
    tokens = {name: value.get("content") if isinstance(value, dict) else value
              for name, value in config.items() if name.endswith("_token")}
    return {name: text for name, text in tokens.items() if isinstance(text, str)}


def read_template_spec(folder, tokenizer):
    """Return the spec of a JinjaTemplate, see data/chat_template.py, of a Hugging Face folder, or
    `None` if it has no chat template."""
    text = read_optional_json(folder, "tokenizer_config.json").get("chat_template")
    path = os.path.join(folder, "chat_template.jinja")
    if os.path.exists(path):
        with open(path, encoding="utf-8", errors="replace") as f:
            text = f.read()
    elif isinstance(text, list):  # several templates
        text = {t["name"]: t["template"] for t in text}.get("default")
    if not isinstance(text, str) or tokenizer is None or tokenizer.eot_token is None:
        return None
    ends = [read_optional_json(folder, name).get("eos_token_id")
            for name in ("generation_config.json", "config.json")]
    ends = next((end for end in ends if end is not None), [])
    ends = [i for i in (ends if isinstance(ends, list) else [ends]) if type(i) is int]
    return {"jinja": text, "ends": sorted({*ends, tokenizer.eot_token})} | special_tokens(folder)
