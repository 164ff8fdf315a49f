"""Tokenizers as Hugging Face's tokenizer.json, and back, without a library of theirs.

Both sides do the same byte pair encoding, told in two ways: tiktoken joins the pair whose joined
bytes have the lowest rank, tokenizer.json lists the pairs in the order in which they are joined.
"""

import base64
import functools
import hashlib
import json
import math
import os

from data.chat_template import ChatTemplate
from data.tokenizer import (
    EOT,
    GPT2_PATTERN,
    MAX_VOCAB,
    R50K_SHA256,
    CharTokenizer,
    JsonTokenizer,
    RankTokenizer,
    byte_table,
    load_tokenizer,
    parse_ranks,
    tokenizer_from_spec,
)
from train.base.errors import DataError

ANY_CHARACTER, ANY_TEXT = r"[\s\S]", r"[\s\S]+"
PLAIN = ("single_word", "lstrip", "rstrip", "normalized")  # of an added token that is just itself


@functools.cache
def byte_characters():
    """{byte: character} of vocabularies."""
    return {b: c for c, b in byte_table().items()}


def as_text(token):
    return "".join(byte_characters()[b] for b in token)


def as_bytes(text):
    """The bytes that `text` of a vocabulary stands for. KeyError for other characters."""
    return bytes(byte_table()[c] for c in text)


def list_merges(ranks):
    """[(left, right)] in the order of the ranks: the pair that becomes each token. Within the edges
    of a token nothing depends on what is around it, so one pair for each is enough. DataError where
    tokens are so long that it would take for ever."""
    if sum(len(token) ** 2 for token in ranks) > max(1 << 22, 200 * len(ranks)):
        raise DataError(f"tokens of up to {max(map(len, ranks)):,} bytes: no vocabulary of a text")
    pairs = (last_pair(token, ranks) for token in sorted(ranks, key=ranks.get) if len(token) > 1)
    return [pair for pair in pairs if pair]


def last_pair(token, ranks):
    """(left, right) of the last step from the bytes of `token` to it; None where tiktoken never
    gets there (and finds the token only where it is a whole piece of text)."""
    parts = [token[i:i + 1] for i in range(len(token))]
    while len(parts) > 2:
        rank, i = min((ranks.get(a + b, math.inf), i)
                      for i, (a, b) in enumerate(zip(parts, parts[1:])))
        if rank == math.inf:
            return None
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return tuple(parts)


# -----------------------------------------------------------------------------
# out

def tokenizer_json(tokenizer):
    """The content of tokenizer.json, a dict, for one of data/tokenizer.py."""
    if tokenizer.kind == "json":
        return json.loads(tokenizer.text)
    out = dict(version="1.0", truncation=None, padding=None, normalizer=None, post_processor=None)
    if getattr(tokenizer, "nfc", False):
        out["normalizer"] = {"type": "NFC"}
    out["added_tokens"] = [
        dict(id=i, content=text, **dict.fromkeys(PLAIN, False), special=special)
        for text, (i, special) in getattr(tokenizer, "added", {}).items()]
    if tokenizer.kind == "char":
        model = dict(type="WordLevel", unk_token="", vocab={
            c: i for i, c in enumerate(tokenizer.chars)})
        return out | dict(model=model, pre_tokenizer=split(ANY_CHARACTER),
                          decoder=dict(type="Fuse"))
    levels = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True)
    pattern = tokenizer.enc._pat_str
    # Its own pattern is GPT-2's without the possessive forms, which its engine reads otherwise.
    before = levels | dict(use_regex=pattern == GPT2_PATTERN)
    if pattern not in (GPT2_PATTERN, ANY_CHARACTER):  # it came from such a file
        before = dict(type="Sequence", pretokenizers=[split(pattern), before])
    ranks = tokenizer.enc._mergeable_ranks
    return out | dict(
        pre_tokenizer=before, decoder=levels | dict(use_regex=True),
        model=dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None,
                   end_of_word_suffix=None, fuse_unk=False, byte_fallback=False,
                   ignore_merges=True,  # a piece that is a token as a whole needs none
                   vocab={as_text(token): rank for token, rank in ranks.items()},
                   merges=[f"{as_text(a)} {as_text(b)}" for a, b in list_merges(ranks)]))


def split(pattern):
    return dict(type="Split", pattern=dict(Regex=pattern), behavior="Isolated", invert=False)


# -----------------------------------------------------------------------------
# in

def read_json(path):
    """The object in a JSON file. DataError where there is none."""
    try:
        with open(path, encoding="utf-8") as f:
            content = json.load(f)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected a JSON object, got a {type(content).__name__}")
    return content


def folder_of(name, weights=True):
    """The path `name`; of hf:OWNER/NAME that of its files, which are downloaded (`weights`: with
    these) where they are not there."""
    if not name.startswith("hf:"):
        return os.path.expanduser(name)
    try:
        from data.prepare.hub import model_folder
    except ImportError:
        raise DataError(f"{name}: models are downloaded by data/prepare/, which is missing: give "
                        "the path of its folder") from None
    return model_folder(name[3:], weights)


def find_tokenizer(name):
    """load_tokenizer(name), or the tokenizer of the Hugging Face folder `name`."""
    folder = folder_of(name, weights=False)
    if os.path.exists(os.path.join(folder, "tokenizer.json")):
        return read_tokenizer(folder)
    return load_tokenizer(name)


def read_tokenizer(folder):
    """The tokenizer in a Hugging Face folder: byte-level BPE, or one of ours that went there, by
    tiktoken; any other by the package `tokenizers`, if it is installed. DataError says why one
    cannot be used. Special tokens in a text are ordinary text here (but in a chat's template)."""
    path = os.path.join(folder, "tokenizer.json")
    content = read_json(path)
    try:
        return read_byte_level(content, folder, path)
    except DataError as error:
        why = error
    try:
        added = {t["content"]: t["id"] for t in content.get("added_tokens") or []}
        rows = config_of(folder, "config.json").get("vocab_size")
        return JsonTokenizer(json.dumps(content), end_of_text(folder, added), rows or 0)
    except (DataError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{why}; {error}") from None


def read_byte_level(content, folder, path):
    """The tokenizer of a tokenizer.json that tiktoken can do. DataError says why it cannot."""
    try:
        model, before = content["model"], content["pre_tokenizer"]
        tokens = content.get("added_tokens") or []
        added = {t["content"]: t["id"] for t in tokens}
        if model.get("type") == "WordLevel" and before == split(ANY_CHARACTER):
            return CharTokenizer("".join(sorted(model["vocab"], key=model["vocab"].get)))
        if model.get("type", "BPE") != "BPE" or model.get("byte_fallback"):
            raise DataError(f"{path}: not a byte-level BPE")
        if (content.get("normalizer") or {"type": "NFC"}) != {"type": "NFC"}:
            raise DataError(f"{path}: it changes the text first ({content['normalizer']})")
        pattern = pattern_of(before, path)
        if wide := [t["content"] for t in tokens if any(t.get(flag) for flag in PLAIN[:3])]:
            raise DataError(f"{path}: {wide[0]!r} takes blanks beside it, or stands alone")
        ranks = {as_bytes(t): i for t, i in model["vocab"].items() if t not in added}
        check_merges(ranks, model["merges"], path)
        # A file may have more tokens than its model has rows.
        rows = config_of(folder, "config.json").get("vocab_size") or MAX_VOCAB
        beside = {t["content"]: [t["id"], bool(t.get("special"))] for t in tokens if t["id"] < rows}
        return rank_tokenizer(ranks, pattern, end_of_text(folder, added), beside, path,
                              nfc=bool(content.get("normalizer")))
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: not a byte-level BPE as tokenizers writes it: "
                        f"{type(error).__name__} {error}") from None


def rank_tokenizer(ranks, pattern, end, added, path, nfc):
    if end is None:
        raise DataError(f"{path}: no end of text: tokenizer_config.json and config.json name none")
    if isinstance(end, bool) or not isinstance(end, int):
        raise DataError(f"{path}: the end of text is {end!r}, expected a number")
    if end not in [i for i, _ in added.values()]:
        added = added | {EOT: [end, True]}
    if len(ranks) == 256 == end and added.keys() == {EOT} and not nfc and all(
            token == bytes([i]) for token, i in ranks.items()):
        return tokenizer_from_spec({"kind": "byte"})
    ranks = dict(sorted(ranks.items(), key=lambda item: item[1]))
    text = "".join(f"{base64.b64encode(t).decode()} {rank}\n" for t, rank in ranks.items())
    known = hashlib.sha256(text.encode()).hexdigest() == R50K_SHA256 and pattern == GPT2_PATTERN
    return RankTokenizer("gpt2" if known else "ranks", parse_ranks(text, path), pattern, end, added,
                         nfc)


def pattern_of(before, path):
    """The pattern by which a pre_tokenizer splits text."""
    parts = before["pretokenizers"] if before["type"] == "Sequence" else [before]
    last = parts[-1]
    if last["type"] == "ByteLevel" and not last.get("add_prefix_space"):
        if len(parts) == 1:
            return GPT2_PATTERN if last.get("use_regex", True) else ANY_TEXT
        first = parts[0]
        if (len(parts) == 2 and first["type"] == "Split" and first["behavior"] == "Isolated"
                and not first.get("invert") and not last.get("use_regex", True)):
            return first["pattern"]["Regex"]
    raise DataError(f"{path}: splits text in a way that is not known here: {str(before)[:200]}")


def check_merges(ranks, merges, path):
    """DataError unless the pairs, in their order, are those that tiktoken makes of the ids."""
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in merges)
    if [tuple(map(as_bytes, pair)) for pair in pairs] != list_merges(ranks):
        raise DataError(f"{path}: its ids are not in the order of its merges, so tiktoken would "
                        "split text otherwise")


def end_of_text(folder, added):
    """Id of the end of text, None where no file says."""
    token = special_tokens(folder).get("eos_token")
    if token in added:
        return added[token]
    end = config_of(folder, "config.json").get("eos_token_id")
    return end[0] if isinstance(end, list) else end


def config_of(folder, name):
    """The object in a JSON file of a folder, {} where there is none."""
    path = os.path.join(folder, name)
    return read_json(path) if os.path.exists(path) else {}


def special_tokens(folder):
    """{"bos_token": "<s>", ...} of a tokenizer_config.json."""
    found = {k: v.get("content") if isinstance(v, dict) else v for k, v in config_of(
        folder, "tokenizer_config.json").items() if k.endswith("_token")}
    return {k: v for k, v in found.items() if isinstance(v, str)}


def read_chat_template(folder, tokenizer):
    """Return the ChatTemplate of a Hugging Face folder, None if it has none."""
    about = config_of(folder, "tokenizer_config.json")
    path, text = os.path.join(folder, "chat_template.jinja"), about.get("chat_template")
    if os.path.exists(path):
        with open(path, encoding="utf-8", errors="replace") as f:
            text = f.read()
    elif isinstance(text, list):
        text = next((t["template"] for t in text if t["name"] == "default"), None)
    if not isinstance(text, str) or tokenizer is None or tokenizer.eot_token is None:
        return None
    ends = [config_of(folder, name).get("eos_token_id") for name in (
        "generation_config.json", "config.json")]
    ends = next((end for end in ends if end is not None), [])
    ends = [i for i in (ends if isinstance(ends, list) else [ends]) if type(i) is int]
    return ChatTemplate.from_spec({
        "jinja": text, "ends": sorted({*ends, tokenizer.eot_token})} | special_tokens(folder))


def open_chat_format(name):
    """Return (tokenizer, block_size or None, ChatTemplate or None) of a checkpoint, a data folder
    or a Hugging Face folder; of the name or file of a tokenizer, the tokenizer alone."""
    if not name.endswith(".pt"):
        tokenizer = find_tokenizer(name)
        return tokenizer, None, read_chat_template(folder_of(name, weights=False), tokenizer)
    from train.base.checkpoint_file import load_checkpoint  # imports torch
    state = load_checkpoint(name)
    known = state.get("spec") or {}
    spec = known.get("tokenizer") or state.get("tokenizer")
    if not spec:
        raise DataError(f"{name}: this checkpoint names no tokenizer; name it: byte, gpt2, a rank "
                        "file or a prepared folder")
    return (tokenizer_from_spec(spec), state.get("model_args", {}).get("block_size"),
            ChatTemplate.from_spec(known["template"]) if known.get("template") else None)
