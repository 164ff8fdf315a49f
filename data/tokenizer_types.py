"""Tokenizers: RankTokenizer (tiktoken), CharTokenizer and JsonTokenizer (the package tokenizers).

`tokenizer.spec()` returns a dict of builtin types, which is saved in checkpoints:
`tokenizer_from_spec` creates the same tokenizer from it, without files or a network.
"""

import base64
import contextlib
import functools
import hashlib
import json
import re
import sys
import unicodedata
from collections.abc import Iterable

import numpy as np
import tiktoken

from train.base.errors import DataError, SetupError, require

EOT = "<|endoftext|>"
GPT2_PATTERN = (r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++"""
                r"""|\s++$|\s+(?!\S)|\s""")
R50K_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"  # GPT-2's ranks
# tiktoken overflows the stack on a million white-space characters.
MAX_SPACE_RUN = 500_000
LONG_SPACE_RUN = re.compile(rf"\s{{{MAX_SPACE_RUN}}}")
HIDDEN = "\U0010fffd"  # private use: no text has it
MAX_VOCAB = 1 << 22  # a damaged spec must not request terabytes


def clean(text):
    """Return `text` with lone surrogates, which UTF-8 does not allow, replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def split_long_spaces(text):
    """Yield the parts of `text`, divided after each run of MAX_SPACE_RUN white-space characters."""
    while len(text) > MAX_SPACE_RUN and (run := LONG_SPACE_RUN.search(text)):
        yield text[:run.end()]
        text = text[run.end():]
    yield text


def encode_within(text, encode):
    """Return the ids of `text` as a continuation, without the space that encode(text) may add."""
    for before in "\n", "a":  # a newline can be one token with the start of the text
        start, whole = encode(before), encode(before + text)
        if list(whole[:len(start)]) == list(start):
            return whole[len(start):]
    return encode(text)


@contextlib.contextmanager
def data_errors(message):
    """Context manager that converts exceptions to DataError with the text "MESSAGE: EXCEPTION".

    Panics of Rust libraries, which are not subclasses of Exception, are converted, too;
    KeyboardInterrupt, SystemExit and SetupError, for a missing package, are not.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, SetupError):
        raise
    except BaseException as error:
        raise DataError(f"{message}: {error}") from None


class Tokenizer:
    """Base class of the tokenizers: encode(text) -> list of ids, decode(ids) -> text.

    Attributes: kind (byte, gpt2, ranks, char or json), n_vocab (number of ids), eot_token (id of
    the end of text, or `None`), special ({text: id} of the special tokens), start and end (ids that
    belong before a prompt, e.g. Llama's <s>, and after a text, e.g. BERT's [SEP]; encode() does not
    add them).
    Subclasses implement encode_array, bytes_of and spec.
    """
    special = {}
    start = []
    end = []
    nfc = False  # whether text is converted to that Unicode normal form first

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`; special tokens in it are encoded as ordinary text.

        Raises DataError for text that the vocabulary cannot represent.
        """
        return self.encode_array(text).tolist()

    def normalize(self, text):
        """Return `text` after clean() and, if `nfc` is True, in Unicode's normal form NFC."""
        return unicodedata.normalize("NFC", clean(text)) if self.nfc else clean(text)

    def encode_special(self, text: str) -> list[int]:
        """Return the token ids of `text`, in which e.g. <|endoftext|> is a special token."""
        return self.encode_array(text, special=True).tolist()

    def begin(self, ids):
        """Return a prompt's ids, preceded by `start` unless they already begin with it."""
        return ids if ids[:len(self.start)] == self.start else self.start + ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, U+FFFD for invalid UTF-8; DataError for unknown ids."""
        ids = [int(i) for i in ids]
        if outside := [i for i in ids if not 0 <= i < self.n_vocab]:
            raise DataError(f"token id {outside[0]} is outside the vocabulary of this {self.kind} "
                            f"tokenizer, 0..{self.n_vocab - 1}")
        return self.decode_known(ids)

    def encode_array(self, text, special=False):
        """Return the token ids of `text` as an array (n,) of integers.

        special: whether special tokens in it become single ids, and are not encoded as ordinary
        text. Raises DataError for text that the vocabulary cannot represent.
        """

    def decode_known(self, ids):
        """Return the text of ids in the vocabulary, which are not checked; called by `decode`."""
        return b"".join(map(self.bytes_of, ids)).decode("utf-8", "replace")

    def bytes_of(self, i):
        """Return the bytes of the token id `i`, maybe incomplete UTF-8; 0 <= i < n_vocab."""

    def token_bytes(self):
        """Return the number of text bytes of each id, (n_vocab,) int64; 0 for special tokens."""
        special = set(self.special.values())
        sizes = (0 if i in special else len(self.bytes_of(i)) for i in range(self.n_vocab))
        return np.fromiter(sizes, np.int64)

    def spec(self):
        """Return a dict of builtin types from which tokenizer_from_spec creates this tokenizer."""


class RankTokenizer(Tokenizer):
    """Byte pair encoding by tiktoken.

    Attributes: kind ("byte": one token per byte; "gpt2": the tokenizer of GPT-2; "ranks": any
    other), ranks {token bytes: id}, pattern (a regular expression), added {text: [id, whether it is
    special]}, enc (the tiktoken.Encoding).
    """

    def __init__(self, kind, ranks, pattern, eot_token, added=None, nfc=False):
        """Create a tokenizer from `ranks`, {token bytes: rank}; the rank is the id.

        pattern: the regular expression that splits text before pairs are merged. eot_token: the id
        of the end of text, one of those in `added`, {text: [id, whether it is special]} of
        additional tokens (default: only <|endoftext|>). nfc: convert text to Unicode's normal form
        NFC first. Raises ValueError for invalid ids or patterns.
        """
        self.kind = kind
        self.ranks = ranks
        self.pattern = pattern
        self.eot_token = eot_token
        self.added = {EOT: [eot_token, True]} if added is None else added
        self.nfc = nfc
        added_ids = [i for i, _ in self.added.values()]
        ids = [*ranks.values(), *added_ids]
        are_valid = all(type(i) is int and 0 <= i < MAX_VOCAB for i in ids)
        if not are_valid or len(set(ids)) < len(ids) or eot_token not in added_ids:
            raise DataError(f"its added tokens {str(self.added)[:200]}: expected own ids below "
                            f"{MAX_VOCAB:,}, and that of end-of-text ({eot_token}) among them")
        self.special = {text: i for text, (i, special) in self.added.items() if special}
        self.not_special = self.added.keys() - self.special  # also recognised in ordinary text
        self.enc = tiktoken.Encoding(kind, pat_str=pattern, mergeable_ranks=ranks,
                                     special_tokens=dict(zip(self.added, added_ids)))
        self.n_vocab = self.enc.n_vocab
        self.encode_array("")  # raises for a pattern that the library does not support

    def encode_array(self, text, special=False):
        text = self.normalize(text)
        if self.kind == "byte" and not special:
            # Equal to tiktoken's result, without a loop over a million matches.
            return np.frombuffer(text.encode("utf-8"), np.uint8)
        allowed = "all" if special else self.not_special
        with data_errors(f"the pattern {self.pattern!r:.80} cannot split text"):
            return np.concatenate([
                self.enc.encode_to_numpy(part, allowed_special=allowed, disallowed_special=())
                for part in split_long_spaces(text)])

    def bytes_of(self, i):
        """Return the bytes of id `i`, also if special; 0xFF (not UTF-8) if it has no token."""
        try:
            return self.enc.decode_single_token_bytes(i)
        except KeyError:
            return b"\xff"

    def spec(self):
        if self.kind == "byte":
            return {"kind": "byte"}
        spec = {"kind": self.kind, "pattern": self.pattern, "eot_token": self.eot_token,
                "ranks": format_ranks(self.ranks)}
        if self.added.keys() != {EOT}:
            spec["added"] = self.added
        return spec | ({"nfc": True} if self.nfc else {})


class CharTokenizer(Tokenizer):
    """A tokenizer with one id per character: id i is chars[i].

    Like nanoGPT's, it has no end of text. chars: distinct characters, not empty; otherwise
    DataError. encode() raises DataError for a text with other characters.
    """
    kind = "char"
    eot_token = None

    def __init__(self, chars):
        if not isinstance(chars, str) or not chars or len(set(chars)) != len(chars):
            raise DataError(f"a char tokenizer needs distinct characters; got {chars!r:.80}")
        self.chars = chars
        self.n_vocab = len(chars)
        self.ids = np.full(sys.maxunicode + 1, -1, np.int32)  # of all code points; -1: none
        self.ids[[ord(c) for c in chars]] = range(self.n_vocab)

    def encode_array(self, text, special=False):
        ids = self.ids[np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")]
        if ids.min(initial=0) < 0:
            unknown = "".join(sorted(set(text) - set(self.chars)))
            raise DataError(f"characters {unknown[:40]!r} are not among the {self.n_vocab} of "
                            "this char tokenizer; leave them out, or use the byte tokenizer")
        return ids

    def bytes_of(self, i):
        return self.chars[i].encode("utf-8", "replace")

    def spec(self):
        return {"kind": "char", "chars": self.chars}


class JsonTokenizer(Tokenizer):
    """Tokenizer of a published model, a tokenizer.json; SetupError without package tokenizers."""
    kind = "json"

    def __init__(self, text, eot_token, n_vocab=0):
        """Create a tokenizer from `text`, the content of a tokenizer.json.

        eot_token: the id of the end of text, or `None`. n_vocab: the model's number of ids; 0 if
        unknown. Special tokens with ids from n_vocab on (if 0: all), except eot_token, do not count
        for the attribute n_vocab, the highest id + 1. Raises DataError for an invalid text or
        eot_token.
        """
        tokenizers = require("tokenizers", "this tokenizer.json")
        with data_errors("tokenizer.json: not one that tokenizers reads"):
            self.enc = tokenizers.Tokenizer.from_str(text)
            content = json.loads(text)
            self.plain_enc = tokenizers.Tokenizer.from_str(json.dumps(hide_special(content)))
        for enc in (self.enc, self.plain_enc):
            enc.no_truncation()
            enc.no_padding()
            if "merges" in content["model"]:  # else BPE leaves out characters without a token
                enc.model.unk_token = enc.model.unk_token or HIDDEN
                enc.model.dropout = None  # a text always has the same ids
        self.plain_enc.encode_special_tokens = True  # special tokens in a text are ordinary text
        self.text = text
        self.eot_token = eot_token
        self.is_byte_level = is_byte_level(content)
        # Marks of a token inside a word (BERT: ##) and of one that ends a word (GPT-1: </w>).
        self.inner = content["model"].get("continuing_subword_prefix")
        self.final = content["model"].get("end_of_word_suffix")
        added = self.enc.get_added_tokens_decoder().items()
        self.special = {token.content: i for i, token in added
                        if token.special and not is_byte(token.content, content)}
        # Texts as they are, also in a byte-level vocabulary, where \u00f6 can stand for a byte. One
        # that is also in the vocabulary is made of bytes: from ordinary text, its merges give it.
        self.literal = {token.content for _, token in added} - self.enc.get_vocab(False).keys()
        # Special tokens other than the end of text may exceed the model's rows (Gemma 3 has one).
        ids = {*self.enc.get_vocab(with_added_tokens=True).values()}
        outside = {i for i in self.special.values() if i >= n_vocab and i != eot_token}
        self.n_vocab = 1 + max(ids - outside, default=-1)
        self.saved_n_vocab = {"n_vocab": self.n_vocab} if n_vocab else {}
        self.start, self.end = ([i for i in part if i < self.n_vocab]
                                for part in find_frame(content))
        if eot_token not in {None, *ids} or not 0 < self.n_vocab <= MAX_VOCAB:
            raise DataError(f"tokenizer.json: the end of text is {eot_token!r}, expected one of "
                            f"its ids, up to {MAX_VOCAB:,}")

    def encode_array(self, text, special=False):
        enc = self.enc if special else self.plain_enc
        text = clean(text)
        # E.g. it lacks some bytes.
        with data_errors(f"this tokenizer has no ids for characters of the text {text[:40]!r}"):
            encoding, = enc.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, np.uint32)

    def offsets(self, text):
        """Return each token's (start, end) in characters of `text`, an array (n, 2) int64."""
        offsets = self.plain_enc.encode(clean(text), add_special_tokens=False).offsets
        return np.array(offsets, np.int64).reshape(-1, 2)

    def decode_known(self, ids):
        # Decode after a space: Llama 2's tokenizer drops the first space of a text, and these ids
        # are often the middle of a text.
        space = None if self.is_byte_level else self.enc.token_to_id("\u2581")
        prefix = [] if space is None else [space]
        prefix_text = self.enc.decode(prefix)
        return self.enc.decode([*prefix, *ids], skip_special_tokens=False)[len(prefix_text):]

    def bytes_of(self, i):
        """Return the text of id `i` as bytes; empty for special tokens and ids without a token."""
        token = self.enc.id_to_token(i)
        table = byte_table()
        if token is None or token in self.special:
            return b""
        # The marks are not text: they say where a word begins or ends.
        space = "\u0120" if self.is_byte_level else " "
        if self.inner:
            is_inner = token.startswith(self.inner)
            token = token.removeprefix(self.inner) if is_inner else space + token
        if self.final and token.endswith(self.final):
            token = token.removesuffix(self.final) + space
        if self.is_byte_level and token not in self.literal and all(c in table for c in token):
            return bytes(table[c] for c in token)
        if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", token):
            return bytes([int(byte[1], 16)])
        return token.replace("\u2581", " ").encode("utf-8", "replace")

    def spec(self):
        return {"kind": "json", "json": self.text, "eot_token": self.eot_token} | self.saved_n_vocab


def is_byte_level(content):
    """Return whether a tokenizer.json's tokens are bytes, as GPT-2's, and not characters."""
    return "ByteLevel" in json.dumps(content.get("decoder"))


def is_byte(token, content):
    """Return whether a token's text is a byte, and therefore not special even if listed as such."""
    if is_byte_level(content):
        return token in byte_table()
    return content["model"].get("byte_fallback") and re.fullmatch("<0x[0-9A-F]{2}>", token)


def hide_special(content):
    """Return a tokenizer.json's dict with HIDDEN before each special token; ids stay the same."""
    tokens, model = content.get("added_tokens") or [], content["model"]
    special = {token["content"] for token in tokens
               if token["special"] and not is_byte(token["content"], content)}

    def hide(text):
        return HIDDEN + text if text in special else text

    def merged(pair):  # [left, right] or "left right"
        return pair.replace(" ", "") if isinstance(pair, str) else "".join(pair)
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        vocab = {hide(text): i for text, i in vocab.items()}
    else:  # Unigram's
        vocab = [[hide(text), score] for text, score in vocab]
    model = model | {"vocab": vocab, "unk_token": hide(model.get("unk_token"))}
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if merged(pair) not in special]
    tokens = [token | {"content": hide(token["content"])} for token in tokens]
    return content | {"model": model, "added_tokens": tokens}


def find_frame(content):
    """Return (before, after), the ids that a tokenizer.json's post-processor adds around a text."""
    before, after = [], []
    processor = content.get("post_processor") or {}
    for part in processor.get("processors", [processor]):
        if "cls" in part:  # BertProcessing, RobertaProcessing
            before.append(part["cls"][1])
            after.append(part["sep"][1])
        ids = before
        for piece in part.get("single", []):
            if "SpecialToken" in piece:
                ids += part["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
            else:
                ids = after
    return before, after


@functools.cache
def byte_table():
    """Return {character: byte} with 256 entries, the inverse of GPT-2's bytes_to_unicode."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


# -----------------------------------------------------------------------------
# specs

def parse_ranks(text, where):
    """Return {token bytes: rank} of a rank file's text, lines `base64 rank` with all single bytes.

    where: the path, for error messages. Raises DataError for any other text, and for negative or
    equal ranks.
    """
    ranks = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            if line.strip():
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise DataError(f"{where}:{number}: expected `base64 rank`, got {line!r:.60}") from None
    single_bytes = {bytes([i]) for i in range(256)}
    if (not single_bytes <= ranks.keys() or len(set(ranks.values())) < len(ranks)
            or min(ranks.values()) < 0):
        raise DataError(f"{where}: expected distinct ranks, and all 256 single bytes as tokens")
    return ranks


def format_ranks(ranks):
    """Return a rank file's text for {token bytes: rank}: lines `base64 rank`, sorted by rank."""
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n"
                   for token, rank in sorted(ranks.items(), key=lambda item: item[1]))


def rank_tokenizer(ranks):
    """Return a RankTokenizer with GPT-2's pattern for `ranks`, {token bytes: rank}.

    The end of text follows the highest rank. The kind is "gpt2" for GPT-2's ranks, else "ranks".
    """
    digest = hashlib.sha256(format_ranks(ranks).encode()).hexdigest()
    kind = "gpt2" if digest == R50K_SHA256 else "ranks"
    return RankTokenizer(kind, ranks, GPT2_PATTERN, max(ranks.values()) + 1)


def tokenizer_from_spec(spec):
    """Return the Tokenizer that a dict of `Tokenizer.spec` describes; DataError if invalid."""
    kind = spec.get("kind") if isinstance(spec, dict) else None
    with data_errors(f"tokenizer of kind {kind!r}: broken description"):
        if kind == "byte":
            return RankTokenizer("byte", {bytes([i]): i for i in range(256)}, r"[\s\S]", 256)
        if kind == "char":
            return CharTokenizer(spec["chars"])
        if kind in ("gpt2", "ranks"):
            ranks = parse_ranks(spec["ranks"], "tokenizer ranks")
            return RankTokenizer(kind, ranks, spec["pattern"], int(spec["eot_token"]),
                                 spec.get("added"), bool(spec.get("nfc")))
        if kind == "json":
            return JsonTokenizer(spec["json"], spec["eot_token"], spec.get("n_vocab", 0))
    raise DataError(f"tokenizer kind {kind!r} is unknown; expected byte, char, gpt2, ranks or json")
