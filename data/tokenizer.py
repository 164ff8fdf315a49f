"""Text to token ids and back: bytes, characters, GPT-2, or any rank file in tiktoken's format.

A tokenizer says what it is as a `spec()`, a dict of builtin types that `tokenizer_from_spec` turns
back into it without file or network: checkpoints carry that dict. What is wrong is a DataError.
"""

import base64
import contextlib
import difflib
import functools
import hashlib
import json
import os
import re
import tempfile
import unicodedata
from collections.abc import Iterable

import numpy as np
import tiktoken

from data.meta import read_meta
from data.token_files import find_files
from train.base.errors import DataError

# Large parts of a spec, which are files of their own in a data folder.
TOKENIZER_FILES = {"ranks": "tokenizer.tiktoken", "json": "tokenizer.json"}
NAMES = ("byte", "char", "gpt2", "bpe")
EOT = "<|endoftext|>"
GPT2_VOCABULARY = 50257  # of token files that say nothing else, as nanoGPT's and llm.c's
GPT2_PATTERN = (r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++"""
                r"""|\s++$|\s+(?!\S)|\s""")
# GPT-2's vocabulary in one file; tiktoken's "gpt2" needs two for the same ids.
R50K_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"
R50K_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
SPACE_RUN = 500_000  # tiktoken's regex overflows its stack on a million blanks in a row
LONG_SPACE = re.compile(rf"\s{{{SPACE_RUN}}}")
MAX_VOCAB = 1 << 22  # a damaged description must not ask for terabytes


def clean(text):
    """`text` with lone surrogates (JSON can hold them, UTF-8 cannot) as replacement characters."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def without_long_blanks(text):
    """Yields `text` in parts, cut within runs of blanks that are too long for a regex."""
    while len(text) > SPACE_RUN and (run := LONG_SPACE.search(text)):
        yield text[:run.end()]
        text = text[run.end():]
    yield text


@contextlib.contextmanager
def panics_told(what):
    """Context in which a panic of a library in Rust, which is no Exception, is a DataError."""
    try:
        yield
    except BaseException as error:
        if "Panic" not in type(error).__name__:
            raise
        raise DataError(f"{what}: {error}") from None


class Tokenizer:
    """What both kinds share. Subclasses give kind, n_vocab, eot_token (or None), encode_array,
    decode_known, token_bytes() -> int64 (n_vocab,) bytes of text per id, and spec()."""
    kind: str
    n_vocab: int
    eot_token: int | None

    def encode(self, text: str) -> list[int]:
        """list of ids; special tokens written in the text are ordinary text."""
        return self.encode_array(text).tolist()

    def encode_special(self, text: str) -> list[int]:
        """The same, but special tokens written in the text are such."""
        return self.encode(text)

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; bytes that are not UTF-8 become replacement characters. DataError for an
        id that is not in the vocabulary."""
        ids = [int(i) for i in ids]
        for at, i in enumerate(ids):
            if not 0 <= i < self.n_vocab:
                raise DataError(f"token id {i} (number {at} of {len(ids)}) is outside the "
                                f"vocabulary of this {self.kind} tokenizer, 0..{self.n_vocab - 1}")
        return self.decode_known(ids)


class RankTokenizer(Tokenizer):
    """A `tiktoken.Encoding` (`enc`) and tokens beside its ranks; kind is byte, gpt2 or ranks.
    added: {text: [id, whether it is special]} of these; None: the end of text alone. nfc: text is
    brought into that form of Unicode first."""

    def __init__(self, kind, ranks, pattern, eot_token, added=None, nfc=False):
        self.kind, self.ranks, self.pattern, self.eot_token = kind, ranks, pattern, eot_token
        self.added, self.nfc = {EOT: [eot_token, True]} if added is None else added, nfc
        ids = {text: i for text, (i, _) in self.added.items()}
        if not max(ranks.values()) < eot_token < MAX_VOCAB:
            raise DataError(f"end-of-text is {eot_token}: expected a number above all "
                            f"{len(ranks):,} ranks and below {MAX_VOCAB:,}")
        numbers = {*ids.values()}
        if (numbers & {*ranks.values()} or len(numbers) < len(ids) or eot_token not in numbers
                or not all(type(i) is int and 0 <= i < MAX_VOCAB for i in numbers)):
            raise DataError(f"its added tokens {str(self.added)[:200]}: expected ids of their own, "
                            f"end-of-text ({eot_token}) among them")
        self.special = {text for text, (_, special) in self.added.items() if special}
        self.plain = ids.keys() - self.special  # as ordinary text as any other
        self.enc = tiktoken.Encoding(kind, pat_str=pattern, mergeable_ranks=ranks,
                                     special_tokens=ids)
        self.n_vocab = self.enc.n_vocab
        self.encode_array("")  # a pattern may match nothing, which the library cannot take

    def encode_special(self, text):
        return self.encode_array(text, "all").tolist()

    def encode_array(self, text, allowed=None):
        """Ids of `text` as a numpy array, uint8 (byte) or uint32. allowed: what of `added` is taken
        as such (None: what is not special)."""
        text = unicodedata.normalize("NFC", clean(text)) if self.nfc else clean(text)
        if self.kind == "byte" and allowed is None:
            # What tiktoken gives, without its loop over a million matches.
            return np.frombuffer(text.encode("utf-8"), np.uint8)
        with panics_told(f"the pattern {self.pattern!r:.80} of this {self.kind} tokenizer cannot "
                         "split text"):
            return np.concatenate([self.enc.encode_to_numpy(
                part, allowed_special=allowed or self.plain, disallowed_special=())
                for part in without_long_blanks(text)])

    def decode_known(self, ids):
        try:
            return self.enc.decode(ids, errors="replace")
        except KeyError:
            return b"".join(map(self.bytes_of, ids)).decode("utf-8", "replace")

    def bytes_of(self, i):
        """The bytes of text that an id stands for: one that is no text where a file leaves a gap,
        as for special tokens of others, which a model may write."""
        try:
            return self.enc.decode_single_token_bytes(i)
        except KeyError:
            return b"\xff"

    def token_bytes(self):
        sizes = np.zeros(self.n_vocab, np.int64)  # end-of-text stands for no text
        sizes[list(self.ranks.values())] = [len(token) for token in self.ranks]
        for text in self.plain:
            sizes[self.added[text][0]] = len(text.encode())
        return sizes

    def spec(self):
        if self.kind == "byte":
            return {"kind": "byte"}
        lines = (f"{base64.b64encode(t).decode()} {rank}\n" for t, rank in self.ranks.items())
        more = {} if self.added.keys() == {EOT} else {"added": self.added}
        more |= {"nfc": True} if self.nfc else {}
        return {"kind": self.kind, "pattern": self.pattern, "eot_token": self.eot_token,
                "ranks": "".join(lines)} | more


class CharTokenizer(Tokenizer):
    """One id for each character of `chars`, in that order; no end-of-text, as nanoGPT's."""

    kind, eot_token = "char", None

    def __init__(self, chars):
        if not isinstance(chars, str) or not chars or len(set(chars)) != len(chars):
            raise DataError(f"a char tokenizer needs distinct characters; got {chars!r:.80}")
        self.chars, self.n_vocab = chars, len(chars)
        codes = np.array([ord(c) for c in chars], np.uint32)
        self.order = np.argsort(codes)  # place among the sorted code points -> id
        self.codes = codes[self.order]

    def encode_array(self, text):
        """Ids of `text` as an int64 array; DataError names characters outside the vocabulary."""
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
        at = np.minimum(np.searchsorted(self.codes, codes), self.n_vocab - 1)
        if (self.codes[at] != codes).any():
            unknown = "".join(sorted(set(text) - set(self.chars)))
            raise DataError(f"characters {unknown[:40]!r} are not among the {self.n_vocab} of "
                            "this char tokenizer; leave them out, or use the byte tokenizer")
        return self.order[at]

    def decode_known(self, ids):
        return "".join(self.chars[i] for i in ids)

    def token_bytes(self):
        return np.array([len(c.encode("utf-8", "surrogatepass")) for c in self.chars], np.int64)

    def spec(self):
        return {"kind": "char", "chars": self.chars}


class JsonTokenizer(Tokenizer):
    """A tokenizer.json that tiktoken cannot do, such as Gemma's or SmolLM's, by the package
    `tokenizers`. Special tokens written in a text are ordinary text here, too. Its model knows all
    ids below n_vocab, where that is said."""
    kind = "json"

    def __init__(self, text, eot_token, n_vocab=0):
        try:
            import tokenizers
        except ImportError:
            raise DataError("this tokenizer.json needs the package tokenizers: pip install "
                            "tokenizers") from None
        try:
            with panics_told("it broke"):
                self.enc = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # it has no class of its own
            raise DataError(f"tokenizer.json: not one that tokenizers reads: {error}") from None
        self.enc.no_truncation()
        self.enc.no_padding()
        self.enc.encode_special_tokens = True  # that is: as text
        self.text, self.eot_token = text, eot_token
        decoder = json.dumps(json.loads(text).get("decoder"))
        self.in_bytes = '"ByteLevel"' in decoder  # else in characters, as SentencePiece's
        special = {i: token.content for i, token in self.enc.get_added_tokens_decoder().items()
                   if token.special}
        self.special_ids, self.special = set(special), set(special.values())
        # Of special tokens the end of text alone: Gemma 3 has one more than its models have rows.
        ids = set(self.enc.get_vocab(with_added_tokens=True).values())
        self.least = 1 + max(ids & {eot_token} | ids - self.special_ids, default=-1)
        self.n_vocab = max(self.least, 1 + max((i for i in ids if i < n_vocab), default=-1))
        if not (type(eot_token) is int and 0 <= eot_token < self.n_vocab <= MAX_VOCAB):
            raise DataError(f"tokenizer.json: the end of text is {eot_token!r}, expected an id "
                            f"below {min(self.n_vocab, MAX_VOCAB)}")

    def encode_array(self, text):
        return np.array(self.encode_batch([text])[0], np.uint32)

    def encode_batch(self, texts):
        return self.encoded(self.enc, texts)

    def encode_special(self, text):
        return self.encoded(self.with_special, [text])[0]

    @functools.cached_property
    def with_special(self):
        """`enc` that takes special tokens as such: a setting that threads would share."""
        enc = type(self.enc).from_str(self.text)
        enc.no_truncation()
        enc.no_padding()
        return enc

    def encoded(self, enc, texts):
        texts = [clean(text) for text in texts]
        try:
            with panics_told("it broke"):
                found = enc.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # of a vocabulary without bytes
            raise DataError(f"this tokenizer has no ids for a text: {error}") from None
        return [encoding.ids for encoding in found]

    def decode_known(self, ids):
        # Behind a blank: Llama 2's leaves out the one that its text begins with, here it is in the
        # middle of a text as often as not.
        before = [] if self.in_bytes else [self.enc.token_to_id("\u2581")]
        before = before if before != [None] else []
        lead = self.enc.decode(before)
        return self.enc.decode([*before, *ids], skip_special_tokens=False)[len(lead):]

    def bytes_of(self, i):
        """The bytes of text that an id stands for: none, of special tokens."""
        token, table = self.enc.id_to_token(i), byte_table()
        if i in self.special_ids or token is None:
            return b""
        if self.in_bytes and all(c in table for c in token):
            return bytes(table[c] for c in token)
        if found := re.fullmatch(r"<0x([0-9A-F]{2})>", token):
            return bytes([int(found[1], 16)])
        return token.replace("\u2581", " ").encode("utf-8", "replace")

    def token_bytes(self):
        return np.array([len(self.bytes_of(i)) for i in range(self.n_vocab)], np.int64)

    def spec(self):
        rows = {"n_vocab": self.n_vocab} if self.n_vocab > self.least else {}
        return {"kind": "json", "json": self.text, "eot_token": self.eot_token} | rows


@functools.cache
def byte_table():
    """{printable character: byte it stands for} of byte-level vocabularies: GPT-2's table."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


# --- rank files and descriptions

def gpt2_ranks():
    """Text of GPT-2's rank file: from tiktoken's cache, or downloaded to it."""
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get(
        "DATA_GYM_CACHE_DIR", os.path.join(tempfile.gettempdir(), "data-gym-cache")))
    # tiktoken's rule: the name is the sha1 of the address, and an empty folder name means no cache
    path = os.path.join(folder, hashlib.sha1(R50K_URL.encode()).hexdigest()) if folder else ""
    if os.path.isfile(path):
        with open(path, "rb") as f:
            content = f.read()
        if hashlib.sha256(content).hexdigest() == R50K_SHA256:
            return content.decode("ascii")
    import requests  # tiktoken's own dependency; slow to import, so only here
    try:
        reply = requests.get(R50K_URL, timeout=20)  # tiktoken itself would wait for ever
        reply.raise_for_status()
        if hashlib.sha256(reply.content).hexdigest() != R50K_SHA256:
            raise OSError("what came has another sha256")
    except OSError as e:  # those of requests are, too
        raise DataError(
            f"tokenizer gpt2: its rank file (0.8 MB) is not cached ({path or 'no cache folder'}) "
            f"and could not be downloaded ({str(e)[:80] or type(e).__name__}). Without a network: "
            f"on another machine\n    curl -O {R50K_URL}\n    and then --tokenizer "
            f"r50k_base.tiktoken, or copy it to {path or '$TIKTOKEN_CACHE_DIR'}; or use "
            "--tokenizer byte, which needs no file") from None
    if path:
        with contextlib.suppress(OSError):  # a cache that cannot be written costs a download
            os.makedirs(folder, exist_ok=True)
            with open(f"{path}.tmp-{os.getpid()}", "wb") as f:
                f.write(reply.content)
            os.replace(f.name, path)
    return reply.content.decode("ascii")


def parse_ranks(text, where):
    """{token bytes: rank} of a rank file's text: `base64 rank` lines, all 256 bytes among them."""
    ranks = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            if line.strip():
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise DataError(f"{where}:{number}: expected `base64 rank`, as in tiktoken's files; "
                            f"got {line[:60]!r}") from None
    missing = sum(bytes([i]) not in ranks for i in range(256))
    if missing or len(set(ranks.values())) != len(ranks) or min(ranks.values()) < 0:
        raise DataError(f"{where}: not a usable rank file of {len(ranks)} tokens: {missing} of "
                        "the 256 single bytes are missing, or ranks are negative or repeated")
    return ranks


def rank_tokenizer(text, where):
    """Tokenizer of a rank file's text; split as GPT-2 splits, end-of-text after the last rank."""
    kind = "gpt2" if hashlib.sha256(text.encode()).hexdigest() == R50K_SHA256 else "ranks"
    ranks = parse_ranks(text, where)
    return RankTokenizer(kind, ranks, GPT2_PATTERN, max(ranks.values()) + 1)


def tokenizer_from_spec(spec):
    """The tokenizer that `spec()` described; DataError if the dict describes none."""
    kind = spec.get("kind") if isinstance(spec, dict) else None
    try:
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
    except (KeyError, TypeError, AttributeError, ValueError) as e:  # ValueError: of the pattern
        raise DataError(f"tokenizer of kind {kind!r}: broken description: {e}") from None
    raise DataError(f"tokenizer kind {kind!r} is unknown; expected byte, char, gpt2, ranks or json")


def load_dataset_tokenizer(data_dir):
    """Tokenizer of prepared data (its folder, or token files in it), from meta.json or nanoGPT's
    meta.pkl; None if these name none."""
    folder = data_dir if os.path.isdir(data_dir) else os.path.dirname(data_dir)
    meta = read_meta(folder)
    try:
        if itos := meta.extra.get("itos"):  # nanoGPT's characters
            chars = [itos[i] for i in range(len(itos))]
            if any(len(c) != 1 for c in chars):
                raise ValueError("its itos has other things than characters")
            return CharTokenizer("".join(chars))
        spec = meta.tokenizer
        for part in TOKENIZER_FILES if spec else ():
            if name := spec.get(f"{part}_file"):  # only a name: never a file of another folder
                with open(os.path.join(folder, os.path.basename(name)), "rb") as f:
                    spec = {**spec, part: f.read().decode()}
        return tokenizer_from_spec(spec) if spec else None
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as e:
        raise DataError(f"{folder or '.'}: its meta file describes no tokenizer that can be "
                        f"rebuilt: {e}; prepare it again") from None


def open_folder_tokenizer(folder):
    """Return the tokenizer of a data folder. Raises DataError if meta.json names none."""
    tokenizer = load_dataset_tokenizer(folder)
    if tokenizer is None:
        raise DataError(f"{folder}: its meta.json names no tokenizer; prepare it again")
    return tokenizer


def write_tokenizer(folder, tokenizer):
    """Write the large parts of a tokenizer's spec to files in `folder`. Returns the keys of Meta:
    vocab_size, tokenizer (a spec that refers to these files) and eot_token."""
    spec = tokenizer.spec()
    for part, name in TOKENIZER_FILES.items():
        if part in spec:
            with open(os.path.join(folder, name), "w", encoding="utf-8", newline="\n") as f:
                f.write(spec.pop(part))
            spec[f"{part}_file"] = name
    return dict(vocab_size=tokenizer.n_vocab, tokenizer=spec, eot_token=tokenizer.eot_token)


def find_vocabulary(data_dir, name=None, size=None):
    """(vocabulary size, tokenizer or None) of token files: their own tokenizer, else the one called
    `name`; the size is `size`, else the tokenizer's, else what the files' folder says. DataError
    where `size` is too small for the tokenizer."""
    tokenizer = load_dataset_tokenizer(data_dir)
    if tokenizer is None and name:
        tokenizer = load_tokenizer(name)
    if tokenizer is None:
        folder = os.path.dirname(find_files(data_dir, "train")[0])
        return size or read_meta(folder).vocab_size or GPT2_VOCABULARY, None
    if size and tokenizer.n_vocab > size:
        raise DataError(f"vocab_size: {size} is below the {tokenizer.n_vocab} of the tokenizer of "
                        f"{data_dir}; leave vocab_size out to take the data's or, where weights "
                        "to start from say it, prepare the data with their tokenizer")
    return size or tokenizer.n_vocab, tokenizer


def load_tokenizer(name: str, path: str | os.PathLike | None = None) -> Tokenizer:
    """Tokenizer by name (byte, gpt2), or from a rank file or a prepared folder, given as `path` or
    as `name` itself. char and bpe exist only in a prepared folder: they are made of its text."""
    path = os.path.expanduser(path or ("" if name in NAMES else name))
    if path and os.path.isdir(path):
        tokenizer = load_dataset_tokenizer(path)
        if tokenizer is None or name in NAMES and name != tokenizer.kind:
            kind = name if name in NAMES else "known"
            raise DataError(f"{path}: this folder has no {kind} tokenizer")
        return tokenizer
    if name == "byte":
        return tokenizer_from_spec({"kind": "byte"})
    if name == "gpt2" and not path:
        return rank_tokenizer(gpt2_ranks(), "gpt2")
    if name in ("char", "bpe"):
        raise DataError(f"tokenizer {name}: it is made of a text; give the folder prepared with it")
    if not os.path.isfile(path):
        near = difflib.get_close_matches(name, NAMES, 1, 0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise DataError(f"tokenizer {path!r}: no such name or file; expected byte, char, gpt2, "
                        f"bpe, a rank file in tiktoken's format or a prepared folder{hint}")
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            return rank_tokenizer(f.read(), path)
    except OSError as e:
        raise DataError(f"tokenizer {path}: cannot be read: {e.strerror}") from None
