"""Hugging Face's tokenizer.json: read it, and write any Tokenizer in this format.

tiktoken's rank files describe the same byte pair encoding: tiktoken merges the adjacent pair whose
merged bytes have the lowest rank; tokenizer.json lists the pairs in this order.
"""

import json
import os
from pathlib import Path

from data.tokenizer_types import GPT2_PATTERN, MAX_VOCAB, JsonTokenizer, byte_table, data_errors
from train.base.errors import DataError

ANY_CHARACTER = r"[\s\S]"
BYTE_CHARACTERS = {b: c for c, b in byte_table().items()}  # of byte-level vocabularies
# Flags of an added token. If all are false, it matches exactly this text.
ADDED_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def token_text(token):
    """Return the text of `token` (bytes) in a byte-level vocabulary, one character per byte."""
    return "".join(BYTE_CHARACTERS[b] for b in token)


# -----------------------------------------------------------------------------
# writing

def tokenizer_json(tokenizer):
    """Return the content of a tokenizer.json, a dict, for a Tokenizer of any kind."""
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
    if tokenizer.pattern not in (GPT2_PATTERN, ANY_CHARACTER):  # of earlier versions
        pre_tokenizer = dict(type="Sequence",
                             pretokenizers=[split_at(tokenizer.pattern), pre_tokenizer])
    ranks = tokenizer.ranks
    model = dict(
        type="BPE", ignore_merges=True,  # a text that is a token as a whole needs no merges
        vocab={token_text(token): rank for token, rank in ranks.items()},
        # The pairs of tokens that join to a token, in rank order.
        merges=[f"{token_text(token[:i])} {token_text(token[i:])}"
                for token in sorted(ranks, key=ranks.get) for i in range(1, len(token))
                if token[:i] in ranks and token[i:] in ranks])
    return content | dict(pre_tokenizer=pre_tokenizer, model=model,
                          decoder=byte_level | dict(use_regex=True))


def split_at(pattern):
    """Return the dict of a pre-tokenizer that isolates the matches of a regular expression."""
    return dict(type="Split", pattern=dict(Regex=pattern), behavior="Isolated", invert=False)


# -----------------------------------------------------------------------------
# reading

def read_json(path):
    """Return the object in a JSON file; raise DataError if it is missing, invalid or no object."""
    with data_errors(f"{path}: cannot be read"):
        content = json.loads(Path(path).read_text("utf-8"))
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected a JSON object, got a {type(content).__name__}")
    return content


def read_optional_json(folder, name):
    """Return the object in the JSON file folder/name, like read_json; {} if the file is missing."""
    path = os.path.join(folder, name)
    return read_json(path) if os.path.exists(path) else {}


def read_hf_tokenizer(folder):
    """Return the JsonTokenizer of the Hugging Face model in `folder`.

    Raises DataError for missing or invalid files, SetupError without the package tokenizers.
    """
    path = os.path.join(folder, "tokenizer.json")
    content = read_json(path)
    with data_errors(path):
        config = read_optional_json(folder, "config.json")
        rows = config.get("vocab_size") or (0 if config else MAX_VOCAB)
        end, named = end_of_text(folder, content), special_tokens(folder).values()
        for token in content.get("added_tokens") or ():  # those are special in transformers, too
            token["special"] |= token["id"] == end or token["content"] in named
        return JsonTokenizer(json.dumps(content), end, rows)


def end_of_text(folder, content):
    """Return the id of a Hugging Face model's end of text, or `None`.

    It is the id of the eos_token in special_tokens(folder) if this is an added token in `content`,
    the dict of the tokenizer.json; otherwise eos_token_id in config.json (the first of a list).
    """
    text = special_tokens(folder).get("eos_token")
    for token in content.get("added_tokens") or ():
        if token["content"] == text:
            return token["id"]
    end = read_optional_json(folder, "config.json").get("eos_token_id")
    return end[0] if isinstance(end, list) else end


def special_tokens(folder):
    """Return {"bos_token": "<s>", ...}, all texts of keys *_token in tokenizer_config.json.

    In older folders, without added_tokens_decoder, special_tokens_map.json is read as well.
    """
    config = read_optional_json(folder, "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # as transformers does
        config = config | read_optional_json(folder, "special_tokens_map.json")
    tokens = {name: value.get("content") if isinstance(value, dict) else value
              for name, value in config.items() if name.endswith("_token")}
    return {name: text for name, text in tokens.items() if isinstance(text, str)}


def read_template_spec(folder, tokenizer):
    """Return the spec, for ChatTemplate, of the chat template of a Hugging Face model.

    Returns `None` if the model has no chat template, or if `tokenizer` is `None` or has no end of
    text. Raises DataError for a file that cannot be read.
    """
    if tokenizer is None or tokenizer.eot_token is None:
        return None
    text = read_optional_json(folder, "tokenizer_config.json").get("chat_template")
    path = os.path.join(folder, "chat_template.jinja")
    with data_errors(f"{folder}: its chat template cannot be read"):
        if os.path.exists(path):
            text = Path(path).read_text("utf-8")
        if isinstance(text, list):  # of earlier versions of transformers
            text = {t["name"]: t["template"] for t in text}.get("default")
    if text is None:
        return None
    ends = read_optional_json(folder, "generation_config.json").get("eos_token_id")
    if ends is None:
        ends = read_optional_json(folder, "config.json").get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    ends = {i for i in ends if i in range(tokenizer.n_vocab)} | {tokenizer.eot_token}
    return {"jinja": text, "ends": sorted(ends)} | special_tokens(folder)
