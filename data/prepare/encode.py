"""The split of documents into training and validation, and their encoding by several threads.

The tokenizers release Python's lock while they encode. Memory use is a few pieces of text per
thread.
"""

import functools
import hashlib
import itertools
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from data.rows import documents_in_val, id_dtype
from data.tokenizer_types import GPT2_PATTERN, RankTokenizer, encode_within, split_long_spaces
from train.base.errors import echo, require

PIECE_BYTES = 1 << 20   # of text per task
LOOKAHEAD_BYTES = 4096  # in which a cut is chosen
MIN_VAL_DOCUMENTS = 10  # with fewer, the validation split is the end of the text
PROGRESS_SECONDS = 10
THREADS = min(16, os.cpu_count() or 1)


# -----------------------------------------------------------------------------
# the split

def choose_split(documents, fraction):
    """Choose about `fraction` of the bytes of a Documents for validation; return (in_val, cut).

    in_val: a bool array (documents,), True for documents that begin in the validation split.
    cut: the byte from which all text is in the validation split, perhaps inside a document;
    documents.size if in_val alone decides; 0 if the text is too short to be divided.
    Chosen are the documents of documents_in_val() if they are at least MIN_VAL_DOCUMENTS (10) and
    have 0.5 to 2 times the requested size, otherwise the end of the text. The end begins between
    two documents if there are records (documents.has_records), or if it then has 0.5 to 2 times the
    requested size; otherwise, or if there is only one document, inside one. With records, an end of
    more than half of the text and of more than 2 times the requested size is replaced by the
    document whose size is nearest to the requested one.
    """
    size = documents.size
    ends = np.array(documents.ends)
    in_val = documents_in_val(len(ends), fraction)
    sizes = np.diff(ends, prepend=0)
    val_size = int(sizes[in_val].sum())
    if in_val.sum() >= MIN_VAL_DOCUMENTS and fraction / 2 <= val_size / size <= fraction * 2:
        return in_val, size
    cut = min(max(int(size * (1 - fraction)), 2), size - 2)
    if len(ends) > 1:
        border = int(ends[np.abs(ends[:-1] - cut).argmin()])
        if documents.has_records and 1 - border / size > max(0.5, fraction * 2):
            return np.arange(len(ends)) == np.abs(sizes - fraction * size).argmin(), size
        if documents.has_records or fraction / 2 <= 1 - border / size <= fraction * 2:
            cut = border
    with open(documents.path, "rb") as f:
        cut = seek_character(f, cut)
    return np.append(0, ends[:-1]) >= cut, cut


def seek_character(f, position):
    """Seek the binary file `f` to the start of the UTF-8 character at `position`; return it."""
    while f.seek(position) and f.read(1)[0] & 0xC0 == 0x80:
        position -= 1
    return f.seek(position)


def find_cut(f, position):
    """Return a position in the binary file `f` at which the text can be cut between tokens.

    It is the first after byte `position` that is after a visible character and before a space or
    newline. Without one in LOOKAHEAD_BYTES (4096): the start of the character at `position`.
    """
    position = seek_character(f, position)
    text = f.read(LOOKAHEAD_BYTES).decode("utf-8", "ignore")
    spot = re.search(r"\S(?=[ \n])", text)
    return position + len(text[:spot.end()].encode()) if spot else position


class Piece(NamedTuple):
    """The bytes start to end (exclusive) of Documents.path: a document, or a part of a long one.

    split: "train" or "val". continues: whether the document begins before `start`.
    """
    split: str
    start: int
    end: int
    closes: bool  # the document is complete here
    continues: bool


def cut_pieces(documents, in_val, cut):
    """Yield the text of a Documents as Pieces of about 1 MiB (PIECE_BYTES) or less, in order.

    in_val, cut: the result of choose_split(). A piece is "val" if in_val of the document is True or
    if it begins at byte `cut` or later; a document that extends over `cut` is divided there.
    """
    start = 0
    with open(documents.path, "rb") as f:
        for end, val in zip(documents.ends, in_val, strict=True):
            first = start
            while start < end:
                stop = end
                if end - start > PIECE_BYTES + LOOKAHEAD_BYTES:
                    stop = find_cut(f, start + PIECE_BYTES)
                if start < cut < stop:
                    stop = cut
                split = "val" if val or start >= cut else "train"
                yield Piece(split, start, stop, stop == end, start > first)
                start = stop


def batches(pieces):
    """Return an iterator of lists of successive Pieces that begin in the same MiB (PIECE_BYTES)."""
    groups = itertools.groupby(pieces, key=lambda piece: piece.start // PIECE_BYTES)
    return (list(group) for _, group in groups)


def read_piece(f, piece):
    """Return the text of a Piece from `f`, the file Documents.path, open in binary mode."""
    f.seek(piece.start)
    return f.read(piece.end - piece.start).decode("utf-8")


# -----------------------------------------------------------------------------
# tokens

def sample_texts(documents, max_bytes):
    """Yield documents, or parts of them, evenly spread, in all about max_bytes of text or less."""
    pieces = batches(cut_pieces(documents, np.zeros(len(documents.ends)), documents.size))
    with open(documents.path, "rb") as f:
        for batch in itertools.islice(pieces, 0, None, -(-documents.size // max_bytes)):
            yield from (read_piece(f, piece) for piece in batch)


def train_bpe(texts, vocab_size):
    """Return a RankTokenizer trained on `texts`: up to vocab_size tokens, with the end of text."""
    trainer = require("rustbpe", "tokenizer bpe").Tokenizer()
    parts = (part for text in texts for part in split_long_spaces(text))
    trainer.train_from_iterator(parts, vocab_size - 1, buffer_size=16, pattern=GPT2_PATTERN)
    ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
    return RankTokenizer("ranks", ranks, GPT2_PATTERN, len(ranks))


def encode_pieces(pieces, documents, tokenizer):
    """Encode one or more Pieces of a Documents; return (ids, number of bytes of text).

    ids: (n,) of id_dtype(tokenizer.n_vocab). After a document follows the id of the end of text or,
    if the tokenizer has none and there are several documents, a newline (unless the document ends
    with one), which counts as text.
    """
    dtype = id_dtype(tokenizer.n_vocab)
    has_end = tokenizer.eot_token is not None
    ids = []
    n_bytes = 0
    with open(documents.path, "rb") as f:
        for piece in pieces:
            text = read_piece(f, piece)
            if piece.closes and not has_end and len(documents.ends) > 1:
                text = text.removesuffix("\n") + "\n"
            n_bytes += len(text.encode())
            is_rest = piece.continues and tokenizer.kind == "json"
            ids.append(encode_within(text, tokenizer.encode_array) if is_rest
                       else tokenizer.encode_array(text))
            if piece.closes and has_end:
                ids.append(np.array([tokenizer.eot_token], dtype))
    return np.concatenate(ids).astype(dtype), n_bytes


def map_in_order(function, tasks):
    """Yield function(task) for each task of an iterator (no list), in order, using threads."""
    with ThreadPoolExecutor(THREADS) as pool:
        while some := list(itertools.islice(tasks, 4 * THREADS)):
            yield from pool.map(function, some)


def write_splits(folder, documents, tokenizer, in_val, cut):
    """Encode a Documents and write train.bin and val.bin to `folder`; return {split: numbers}.

    in_val, cut: the result of choose_split(). numbers: {"tokens", "documents" (that begin in the
    split), "bytes" (of text), "sha256" (hexadecimal digest of the file)}.
    """
    work = functools.partial(encode_pieces, documents=documents, tokenizer=tokenizer)
    shown = time.monotonic()
    n_val = int(in_val.sum())  # documents that begin in it
    splits = {}
    for split, n_documents in (("train", len(in_val) - n_val), ("val", n_val)):
        pieces = (piece for piece in cut_pieces(documents, in_val, cut) if piece.split == split)
        digest = hashlib.sha256()
        numbers = splits[split] = dict(tokens=0, documents=n_documents, bytes=0)
        with open(os.path.join(folder, f"{split}.bin"), "wb") as out:
            for ids, size in map_in_order(work, batches(pieces)):
                out.write(ids)
                digest.update(ids)
                numbers["tokens"] += len(ids)
                numbers["bytes"] += size
                if time.monotonic() - shown > PROGRESS_SECONDS:
                    shown = time.monotonic()
                    done = sum(n["bytes"] for n in splits.values()) / documents.size
                    echo(f"tokenizing: {done:.0%}", sys.stderr)
        numbers["sha256"] = digest.hexdigest()
    return splits
