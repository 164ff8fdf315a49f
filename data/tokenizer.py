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
import tempfile

import numpy as np
import tiktoken

NAMES = ("byte", "char", "gpt2")
EOT = "<|endoftext|>"
GPT2_PATTERN = (r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++"""
                r"""|\s++$|\s+(?!\S)|\s""")
# r50k_base is GPT-2's vocabulary in one file; tiktoken's own "gpt2" needs two files for the same ids.
R50K_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"
R50K_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
RANKS_FILE = "tokenizer.tiktoken"  # beside meta.json, for tokenizers that are made of ranks
SPACE_RUN = 500_000  # tiktoken's regex overflows its stack on a million blanks in a row


def clean(text):
    """`text` with lone surrogates (JSON can hold them, UTF-8 cannot) as replacement characters."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def check_ids(ids, n_vocab, kind):
    """`ids` as a list of ints; ValueError for one outside 0..n_vocab - 1."""
    ids = [int(i) for i in ids]
    for at, i in enumerate(ids):
        if not 0 <= i < n_vocab:
            raise ValueError(f"token id {i} (number {at} of {len(ids)}) is outside 0..{n_vocab - 1}, "
                             f"the vocabulary of this {kind} tokenizer")
    return ids


class RankTokenizer:
    """A `tiktoken.Encoding` (`enc`) plus one end-of-text token; kind is byte, gpt2 or ranks.

    Special tokens in text are ordinary text: no input can produce the end-of-text id or an error.
    """

    def __init__(self, kind, ranks, pattern, eot_token):
        self.kind, self.ranks, self.pattern, self.eot_token = kind, ranks, pattern, eot_token
        self.enc = tiktoken.Encoding(kind, pat_str=pattern, mergeable_ranks=ranks,
                                     special_tokens={EOT: eot_token})
        self.n_vocab = self.enc.n_vocab

    def encode_array(self, text):
        """Ids of `text` as a numpy array: uint8 (byte) or uint32."""
        text = clean(text)
        if self.kind == "byte":  # what tiktoken would give, 100 times faster
            return np.frombuffer(text.encode("utf-8"), np.uint8)
        parts = []
        while len(text) > SPACE_RUN and (run := re.search(r"\s{%d}" % SPACE_RUN, text)):
            parts.append(text[:run.end()])
            text = text[run.end():]
        arrays = [self.enc.encode_to_numpy(p, disallowed_special=()) for p in [*parts, text]]
        return np.concatenate(arrays)

    def encode(self, text):
        return self.encode_array(text).tolist()

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]

    def decode_bytes(self, ids):
        ids = check_ids(ids, self.n_vocab, self.kind)
        try:
            return self.enc.decode_bytes(ids)
        except KeyError as e:  # rank files may leave gaps
            raise ValueError(f"{e.args[0]}: the {self.kind} tokenizer has no such token") from None

    def decode(self, ids):
        """Text of `ids`; bytes that are not UTF-8 become replacement characters."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def token_bytes(self):
        """int64 (n_vocab,): the bytes of text each id stands for, 0 for end-of-text."""
        sizes = np.zeros(self.n_vocab, np.int64)
        for token, rank in self.ranks.items():
            sizes[rank] = len(token)
        return sizes

    def spec(self):
        if self.kind == "byte":
            return {"kind": "byte"}
        lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in self.ranks.items())
        return {"kind": self.kind, "pattern": self.pattern, "eot_token": self.eot_token,
                "ranks": "".join(lines)}


class CharTokenizer:
    """One id for each character of `chars`, in that order; no end-of-text (nanoGPT's char level)."""

    kind, eot_token = "char", None

    def __init__(self, chars):
        if not chars or len(set(chars)) != len(chars):
            raise ValueError(f"a char tokenizer needs distinct characters; got {chars[:80]!r}")
        self.chars, self.n_vocab = chars, len(chars)
        codes = np.array([ord(c) for c in chars], np.uint32)
        self.order = np.argsort(codes)   # position in sorted order -> id
        self.codes = codes[self.order]   # sorted code points

    def encode_array(self, text):
        """Ids of `text` as an int64 array; ValueError names characters outside the vocabulary."""
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
        at = np.minimum(np.searchsorted(self.codes, codes), self.n_vocab - 1)
        if (self.codes[at] != codes).any():
            unknown = "".join(sorted(set(text) - set(self.chars)))
            raise ValueError(f"{len(unknown)} characters are not among the {self.n_vocab} of this char "
                             f"tokenizer: {unknown[:40]!r}; leave them out, or use --tokenizer byte")
        return self.order[at]

    def encode(self, text):
        return self.encode_array(text).tolist()

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]

    def decode_bytes(self, ids):
        return self.decode(ids).encode("utf-8")

    def decode(self, ids):
        return "".join(self.chars[i] for i in check_ids(ids, self.n_vocab, self.kind))

    def token_bytes(self):
        """int64 (n_vocab,): the UTF-8 bytes of each character."""
        return np.array([len(c.encode("utf-8")) for c in self.chars], np.int64)

    def spec(self):
        return {"kind": "char", "chars": self.chars}


def parse_ranks(text, where):
    """{token bytes: rank} of a rank file's text: one `base64 rank` a line, all 256 bytes among them."""
    ranks = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except ValueError:
                raise ValueError(f"{where}:{number}: expected `base64 rank`, as in tiktoken's files; "
                                 f"got {line[:60]!r}") from None
    missing = sum(bytes([i]) not in ranks for i in range(256))
    if missing or len(set(ranks.values())) != len(ranks) or min(ranks.values()) < 0:
        raise ValueError(f"{where}: not a usable rank file: {len(ranks)} tokens, {missing} of the 256 "
                         "single bytes missing (expected none), ranks must be distinct and >= 0")
    return ranks


def rank_tokenizer(text, where):
    """RankTokenizer of a rank file's text, split as GPT-2 splits, end-of-text after the last rank."""
    ranks = parse_ranks(text, where)
    kind = "gpt2" if hashlib.sha256(text.encode()).hexdigest() == R50K_SHA256 else "ranks"
    return RankTokenizer(kind, ranks, GPT2_PATTERN, max(ranks.values()) + 1)


def tokenizer_from_spec(spec):
    """The tokenizer that `spec()` described; ValueError if the dict is not such a description."""
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
        raise ValueError(f"tokenizer description of kind {kind!r} is incomplete: {e!r}") from None
    raise ValueError(f"tokenizer kind {kind!r} is unknown; expected byte, char, gpt2 or ranks")
