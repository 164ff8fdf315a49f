"""Text to token ids and back: bytes, characters, GPT-2, or any rank file in tiktoken's format.

A tokenizer says what it is as a `spec()`, a dict of builtin types that `tokenizer_from_spec` turns
back into it without file or network: checkpoints carry that dict.
"""

import base64
import difflib
import hashlib
import json
import os
import pickle
import re

import numpy as np
import tiktoken

from data.download import R50K_SHA256, gpt2_ranks

NAMES = ("byte", "char", "gpt2")
EOT = "<|endoftext|>"
GPT2_PATTERN = (r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++"""
                r"""|\s++$|\s+(?!\S)|\s""")
SPACE_RUN = 500_000  # tiktoken's regex overflows its stack on a million blanks in a row
LONG_SPACE = re.compile(rf"\s{{{SPACE_RUN}}}")


def clean(text):
    """`text` with lone surrogates (JSON can hold them, UTF-8 cannot) as replacement characters."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Tokenizer:
    """What both kinds share. Subclasses give kind, n_vocab, eot_token (or None), encode_array,
    decode_known, token_bytes() -> int64 (n_vocab,) bytes of text per id, and spec()."""

    def encode(self, text):
        """list of ids; special tokens written in the text are ordinary text."""
        return self.encode_array(text).tolist()

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]

    def decode(self, ids):
        """Text of `ids`; bytes that are not UTF-8 become replacement characters. ValueError for an
        id that is not in the vocabulary."""
        ids = [int(i) for i in ids]
        for at, i in enumerate(ids):
            if not 0 <= i < self.n_vocab:
                raise ValueError(f"token id {i} (number {at} of {len(ids)}) is outside the "
                                 f"vocabulary of this {self.kind} tokenizer, 0..{self.n_vocab - 1}")
        return self.decode_known(ids)


class RankTokenizer(Tokenizer):
    """A `tiktoken.Encoding` (`enc`) and one end-of-text token; kind is byte, gpt2 or ranks."""

    def __init__(self, kind, ranks, pattern, eot_token):
        self.kind, self.ranks, self.pattern, self.eot_token = kind, ranks, pattern, eot_token
        self.enc = tiktoken.Encoding(kind, pat_str=pattern, mergeable_ranks=ranks,
                                     special_tokens={EOT: eot_token})
        self.n_vocab = self.enc.n_vocab

    def encode_array(self, text):
        """Ids of `text` as a numpy array, uint8 (byte) or uint32."""
        text = clean(text)
        if self.kind == "byte":  # what tiktoken gives, without its loop over a million matches
            return np.frombuffer(text.encode("utf-8"), np.uint8)
        parts = []
        while len(text) > SPACE_RUN and (run := LONG_SPACE.search(text)):
            parts.append(text[:run.end()])
            text = text[run.end():]
        return np.concatenate([self.enc.encode_to_numpy(part, disallowed_special=())
                               for part in [*parts, text]])

    def decode_known(self, ids):
        try:
            return self.enc.decode(ids, errors="replace")
        except KeyError as e:  # rank files may leave gaps
            raise ValueError(f"{e.args[0]}: the {self.kind} tokenizer has no such token") from None

    def token_bytes(self):
        sizes = np.zeros(self.n_vocab, np.int64)  # end-of-text stands for no text
        for token, rank in self.ranks.items():
            sizes[rank] = len(token)
        return sizes

    def spec(self):
        if self.kind == "byte":
            return {"kind": "byte"}
        lines = (f"{base64.b64encode(t).decode()} {rank}\n" for t, rank in self.ranks.items())
        return {"kind": self.kind, "pattern": self.pattern, "eot_token": self.eot_token,
                "ranks": "".join(lines)}


class CharTokenizer(Tokenizer):
    """One id for each character of `chars`, in that order; no end-of-text, as nanoGPT's."""

    kind, eot_token = "char", None

    def __init__(self, chars):
        if not chars or len(set(chars)) != len(chars):
            raise ValueError(f"a char tokenizer needs distinct characters; got {chars[:80]!r}")
        self.chars, self.n_vocab = chars, len(chars)
        codes = np.array([ord(c) for c in chars], np.uint32)
        self.order = np.argsort(codes)  # place among the sorted code points -> id
        self.codes = codes[self.order]

    def encode_array(self, text):
        """Ids of `text` as an int64 array; ValueError names characters outside the vocabulary."""
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
        at = np.minimum(np.searchsorted(self.codes, codes), self.n_vocab - 1)
        if (self.codes[at] != codes).any():
            unknown = "".join(sorted(set(text) - set(self.chars)))
            raise ValueError(f"characters {unknown[:40]!r} are not among the {self.n_vocab} of "
                             "this char tokenizer; leave them out, or use the byte tokenizer")
        return self.order[at]

    def decode_known(self, ids):
        return "".join(self.chars[i] for i in ids)

    def token_bytes(self):
        return np.array([len(c.encode("utf-8")) for c in self.chars], np.int64)

    def spec(self):
        return {"kind": "char", "chars": self.chars}


def parse_ranks(text, where):
    """{token bytes: rank} of a rank file's text: `base64 rank` lines, all 256 bytes among them."""
    ranks = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            if line.strip():
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise ValueError(f"{where}:{number}: expected `base64 rank`, as in tiktoken's files; "
                             f"got {line[:60]!r}") from None
    missing = sum(bytes([i]) not in ranks for i in range(256))
    if missing or len(set(ranks.values())) != len(ranks) or min(ranks.values()) < 0:
        raise ValueError(f"{where}: not a usable rank file of {len(ranks)} tokens: {missing} of "
                         "the 256 single bytes are missing, or ranks are negative or repeated")
    return ranks


def rank_tokenizer(text, where):
    """Tokenizer of a rank file's text; split as GPT-2 splits, end-of-text after the last rank."""
    kind = "gpt2" if hashlib.sha256(text.encode()).hexdigest() == R50K_SHA256 else "ranks"
    ranks = parse_ranks(text, where)
    return RankTokenizer(kind, ranks, GPT2_PATTERN, max(ranks.values()) + 1)


def tokenizer_from_spec(spec):
    """The tokenizer that `spec()` described; ValueError if the dict describes none."""
    kind = spec.get("kind") if isinstance(spec, dict) else None
    try:
        if kind == "byte":
            return RankTokenizer("byte", {bytes([i]): i for i in range(256)}, r"[\s\S]", 256)
        if kind == "char":
            return CharTokenizer(spec["chars"])
        if kind in ("gpt2", "ranks"):
            ranks = parse_ranks(spec["ranks"], "tokenizer ranks")
            return RankTokenizer(kind, ranks, spec["pattern"], int(spec["eot_token"]))
    except (KeyError, TypeError) as e:
        raise ValueError(f"tokenizer of kind {kind!r}: broken description: {e!r}") from None
    raise ValueError(f"tokenizer kind {kind!r} is unknown; expected byte, char, gpt2 or ranks")


class PlainUnpickler(pickle.Unpickler):
    """Builds dict, list, str, int and the like; a pickle that names anything else is refused."""

    def find_class(self, module, name):
        raise ValueError(f"it names {module}.{name}, which could run code")


def pickled_tokenizer(path):
    """Tokenizer of nanoGPT's meta.pkl (char level: itos), or None where it has no characters."""
    try:
        with open(path, "rb") as f:
            itos = PlainUnpickler(f).load().get("itos")
        return CharTokenizer("".join(itos[i] for i in range(len(itos)))) if itos else None
    except Exception as e:  # a broken pickle can raise nearly anything
        raise ValueError(f"{path}: not a meta.pkl as nanoGPT writes them: {e}") from None


def load_dataset_tokenizer(data_dir):
    """Tokenizer of prepared data (its folder, or token files in it), from meta.json or nanoGPT's
    meta.pkl; None if these name none."""
    folder = data_dir if os.path.isdir(data_dir) else os.path.dirname(data_dir)
    path = os.path.join(folder, "meta.json")
    if not os.path.isfile(path):
        path = os.path.join(folder, "meta.pkl")
        return pickled_tokenizer(path) if os.path.isfile(path) else None
    try:
        with open(path, encoding="utf-8") as f:
            spec = json.load(f).get("tokenizer")
        if spec and "ranks_file" in spec:  # only its name counts: never a file of another folder
            ranks = os.path.join(folder, os.path.basename(spec["ranks_file"]))
            with open(ranks, encoding="ascii") as f:
                spec = {**spec, "ranks": f.read()}
        return tokenizer_from_spec(spec) if spec else None
    except (ValueError, TypeError, AttributeError, OSError) as e:
        raise ValueError(f"{path}: cannot rebuild its tokenizer: {e}; prepare it again") from None


def load_tokenizer(name, path=None):
    """Tokenizer by name (byte, gpt2), or from a rank file or a prepared folder, given as `path` or
    as `name` itself. char exists only in a prepared folder: its characters are those of a text."""
    path = path or (None if name in NAMES else name)
    if path and os.path.isdir(path):
        tokenizer = load_dataset_tokenizer(path)
        if tokenizer is None or name in NAMES and name != tokenizer.kind:
            kind = name if name in NAMES else "known"
            raise ValueError(f"{path}: this folder has no {kind} tokenizer")
        return tokenizer
    if name == "byte":
        return tokenizer_from_spec({"kind": "byte"})
    if name == "gpt2" and not path:
        return rank_tokenizer(gpt2_ranks(), "gpt2")
    if name == "char":
        raise ValueError("tokenizer char: give the prepared folder whose characters it has")
    if not os.path.isfile(path):
        near = difflib.get_close_matches(name, NAMES, 1, 0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"tokenizer {path!r}: no such name or file; expected byte, char, gpt2, "
                         f"a rank file in tiktoken's format or a prepared folder{hint}")
    with open(path, encoding="utf-8", errors="replace") as f:
        return rank_tokenizer(f.read(), path)
