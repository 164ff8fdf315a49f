"""Hugging Face's tokenizer.json: reading it, and writing tokenizers as such a file.

Both formats describe the same byte pair encoding. tiktoken joins the pair with the lowest rank of
the joined bytes; tokenizer.json lists the pairs in the order of joining.
"""

import functools
import hashlib
import json
import math
import os

from data.tokenizer_types import (
    EOT,
    MAX_VOCAB,
    CharTokenizer,
    JsonTokenizer,
    RankTokenizer,
    byte_table,
    format_ranks,
    parse_ranks,
    tokenizer_from_spec,
)
from train.base.errors import DataError

GPT2_PATTERN = (r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++"""
                r"""|\s++$|\s+(?!\S)|\s""")
R50K_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
ANY_CHARACTER, ANY_TEXT = r"[\s\S]", r"[\s\S]+"
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
    content = dict(version="1.0", truncation=None, padding=None, normalizer=None,
                   post_processor=None, added_tokens=[])
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
        type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None,
        end_of_word_suffix=None, fuse_unk=False, byte_fallback=False,
        ignore_merges=True,  # a piece of text that is a token as a whole needs no merges
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
    try:
        return read_byte_level(content, folder, path)
    except DataError as error:
        reason = error
    try:
        added = {t["content"]: t["id"] for t in content.get("added_tokens") or []}
        rows = read_optional_json(folder, "config.json").get("vocab_size")
        return JsonTokenizer(json.dumps(content), end_of_text(folder, added), rows or 0)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{reason}; {error}") from None


def read_byte_level(content, folder, path):
    """Return the tokenizer of a tokenizer.json that tiktoken can represent. Raises DataError with
    the reason if it cannot."""
    try:
        model, pre_tokenizer = content["model"], content["pre_tokenizer"]
        tokens = content.get("added_tokens") or []
        added = {t["content"]: t["id"] for t in tokens}
        if model.get("type") == "WordLevel" and pre_tokenizer == split_at(ANY_CHARACTER):
            return CharTokenizer("".join(sorted(model["vocab"], key=model["vocab"].get)))
        if model.get("type", "BPE") != "BPE" or model.get("byte_fallback"):
            raise DataError(f"{path}: not a byte-level BPE")
        if (content.get("normalizer") or {"type": "NFC"}) != {"type": "NFC"}:
            raise DataError(f"{path}: it changes the text first ({content['normalizer']})")
        pattern = pattern_of(pre_tokenizer, path)
        for token in tokens:
            if any(token.get(flag) for flag in ADDED_TOKEN_FLAGS[:3]):
                raise DataError(f"{path}: {token['content']!r} includes blanks beside it, or "
                                "matches only whole words")
        ranks = {text_bytes(t): i for t, i in model["vocab"].items() if t not in added}
        check_merges(ranks, model["merges"], path)
        # A file may have more tokens than the model has rows.
        rows = read_optional_json(folder, "config.json").get("vocab_size") or MAX_VOCAB
        added_specs = {t["content"]: [t["id"], bool(t.get("special"))] for t in tokens
                       if t["id"] < rows}
        return rank_tokenizer(ranks, pattern, end_of_text(folder, added), added_specs, path,
                              nfc=bool(content.get("normalizer")))
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: not a byte-level BPE as tokenizers writes it: "
                        f"{type(error).__name__} {error}") from None


def rank_tokenizer(ranks, pattern, eot_token, added, path, nfc):
    """Return the RankTokenizer of the parts of a tokenizer.json; byte and gpt2 are recognised."""
    if type(eot_token) is not int:
        raise DataError(f"{path}: the end of text is {eot_token!r}, expected an id in "
                        "tokenizer_config.json or config.json")
    if eot_token not in [i for i, _ in added.values()]:
        added = added | {EOT: [eot_token, True]}
    if len(ranks) == 256 == eot_token and added.keys() == {EOT} and not nfc and all(
            token == bytes([i]) for token, i in ranks.items()):
        return tokenizer_from_spec({"kind": "byte"})
    text = format_ranks(dict(sorted(ranks.items(), key=lambda item: item[1])))
    is_gpt2 = hashlib.sha256(text.encode()).hexdigest() == R50K_SHA256 and pattern == GPT2_PATTERN
    return RankTokenizer("gpt2" if is_gpt2 else "ranks", parse_ranks(text, path), pattern,
                         eot_token, added, nfc)


def pattern_of(pre_tokenizer, path):
    """Return the regular expression by which a pre_tokenizer splits text. Raises DataError."""
    parts = (pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence"
             else [pre_tokenizer])
    last = parts[-1]
    if last["type"] == "ByteLevel" and not last.get("add_prefix_space"):
        if len(parts) == 1:
            return GPT2_PATTERN if last.get("use_regex", True) else ANY_TEXT
        first = parts[0]
        if (len(parts) == 2 and first["type"] == "Split" and first["behavior"] == "Isolated"
                and not first.get("invert") and not last.get("use_regex", True)):
            return first["pattern"]["Regex"]
    raise DataError(f"{path}: splits text in a way that is not supported: "
                    f"{str(pre_tokenizer)[:200]}")


def check_merges(ranks, merges, path):
    """Raise DataError unless the merges and the order are as tiktoken derives from the ids."""
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in merges)
    if [tuple(map(text_bytes, pair)) for pair in pairs] != list_merges(ranks):
        raise DataError(f"{path}: its ids are not in the order of its merges, so tiktoken would "
                        "split text differently")


def end_of_text(folder, added):
    """Return the id of the end of text of a Hugging Face folder, or `None`."""
    token = special_tokens(folder).get("eos_token")
    if token in added:
        return added[token]
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
    elif isinstance(text, list):
        text = next((t["template"] for t in text if t["name"] == "default"), None)
    if not isinstance(text, str) or tokenizer is None or tokenizer.eot_token is None:
        return None
    ends = [read_optional_json(folder, name).get("eos_token_id")
            for name in ("generation_config.json", "config.json")]
    ends = next((end for end in ends if end is not None), [])
    ends = [i for i in (ends if isinstance(ends, list) else [ends]) if type(i) is int]
    return {"jinja": text, "ends": sorted({*ends, tokenizer.eot_token})} | special_tokens(folder)
