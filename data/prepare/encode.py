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
from data.tokenizer_hf import GPT2_PATTERN
from data.tokenizer_types import RankTokenizer, split_long_spaces
from train.base.errors import echo, require

PIECE_BYTES = 1 << 20   # of text per task
LOOKAHEAD_BYTES = 4096  # in which a cut is chosen
MIN_VAL_DOCUMENTS = 10  # with fewer, the validation split is the end of the text
PROGRESS_SECONDS = 10
THREADS = min(16, os.cpu_count() or 1)


# -----------------------------------------------------------------------------
# the split

def choose_split(documents, fraction):
    """Return (bool (n,) of the documents for validation, cut): the text from byte `cut` on is for
    validation as well.

    Documents are chosen by `documents_in_val`, if that gives MIN_VAL_DOCUMENTS and 0.5 to 2 times
    the text requested. Otherwise only the end of the text is chosen: it begins between two
    documents if that gives as much, else inside a text. A record is cut only if there is no second
    one.
    """
    size = documents.size
    ends = np.array(documents.ends)
    in_val = documents_in_val(0, len(ends), fraction)
    val_size = int(np.diff(ends, prepend=0)[in_val].sum())
    if in_val.sum() >= MIN_VAL_DOCUMENTS and fraction / 2 <= val_size / size <= fraction * 2:
        return in_val, size
    cut = min(max(int(size * (1 - fraction)), 2), size - 2)
    if len(ends) > 1:
        border = int(ends[np.abs(ends[:-1] - cut).argmin()])
        if documents.has_records or fraction / 2 <= 1 - border / size <= fraction * 2:
            cut = border
    with open(documents.path, "rb") as f:
        cut = seek_character(f, cut)
    return np.zeros_like(in_val), cut


def seek_character(f, position):
    """Move the open file `f` to the first byte of the character at `position`, and return its
    position."""
    while f.seek(position) and f.read(1)[0] & 0xC0 == 0x80:
        position -= 1
    return f.seek(position)


def find_cut(f, position):
    """Return a position near `position` at which the text in `f` can be cut without changing a
    token: before a blank that follows a visible character, because no token of GPT-2 extends over
    it; between any two characters if no blank exists."""
    position = seek_character(f, position)
    text = f.read(LOOKAHEAD_BYTES).decode("utf-8", "ignore")
    spot = re.search(r"\S(?=[ \n])", text)
    return position + len(text[:spot.end()].encode()) if spot else position


class Piece(NamedTuple):
    """Bytes start..end of the text: a document, or a part of a long one."""
    split: str
    start: int
    end: int
    closes: bool  # the document is complete here


def cut_pieces(documents, in_val, cut):
    """Yield the Pieces of all documents, split by the result of `choose_split`."""
    start = 0
    with open(documents.path, "rb") as f:
        for end, val in zip(documents.ends, in_val, strict=True):
            while start < end:
                stop = end
                if end - start > PIECE_BYTES + LOOKAHEAD_BYTES:
                    stop = find_cut(f, start + PIECE_BYTES)
                if start < cut < stop:
                    stop = cut
                split = "val" if val or start >= cut else "train"
                yield Piece(split, start, stop, stop == end)
                start = stop


def batches(pieces):
    """Yield lists of pieces that begin in the same PIECE_BYTES of the text: a task each."""
    groups = itertools.groupby(pieces, key=lambda piece: piece.start // PIECE_BYTES)
    return (list(group) for _, group in groups)


def read_piece(f, piece):
    """Return the text of a Piece from the open file `f`."""
    f.seek(piece.start)
    return f.read(piece.end - piece.start).decode("utf-8")


# -----------------------------------------------------------------------------
# tokens

def sample_texts(documents, max_bytes):
    """Yield texts that are spread evenly over the documents, about `max_bytes`."""
    pieces = batches(cut_pieces(documents, np.zeros(len(documents.ends)), documents.size))
    with open(documents.path, "rb") as f:
        for batch in itertools.islice(pieces, 0, None, -(-documents.size // max_bytes)):
            yield from (read_piece(f, piece) for piece in batch)


def train_bpe(texts, vocab_size):
    """Return a RankTokenizer of `vocab_size` tokens, including the end of text, or fewer if the
    texts contain no more. Text is split as by GPT-2, so that the rank file is sufficient."""
    trainer = require("rustbpe", "tokenizer bpe").Tokenizer()
    parts = (part for text in texts for part in split_long_spaces(text))
    trainer.train_from_iterator(parts, vocab_size - 1, buffer_size=16, pattern=GPT2_PATTERN)
    ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
    return RankTokenizer("ranks", ranks, GPT2_PATTERN, len(ranks))


def encode_pieces(pieces, documents, tokenizer):
    """Return (ids, bytes of text) of pieces. A document ends with the end of text, or with a
    newline if the vocabulary has no end of text."""
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
            ids.append(tokenizer.encode_array(text))
            if piece.closes and has_end:
                ids.append(np.array([tokenizer.eot_token], dtype))
    return np.concatenate(ids).astype(dtype), n_bytes


def map_in_order(function, tasks):
    """Yield function(task) in the order of the tasks, of which threads run a few at a time."""
    with ThreadPoolExecutor(THREADS) as pool:
        while some := list(itertools.islice(tasks, 4 * THREADS)):
            yield from pool.map(function, some)


def write_splits(folder, documents, tokenizer, in_val, cut):
    """Write train.bin and val.bin, split by the result of `choose_split`, to `folder`. Returns the
    `splits` of meta.json."""
    work = functools.partial(encode_pieces, documents=documents, tokenizer=tokenizer)
    done = 0
    shown = time.monotonic()
    starts = np.array([0, *documents.ends[:-1]])
    n_val = int((in_val | (starts >= cut)).sum())  # documents that begin in it
    splits = {}
    for split, n_documents in (("train", len(starts) - n_val), ("val", n_val)):
        pieces = (piece for piece in cut_pieces(documents, in_val, cut) if piece.split == split)
        digest = hashlib.sha256()
        n_tokens = 0
        n_bytes = 0
        with open(os.path.join(folder, f"{split}.bin"), "wb") as out:
            for ids, size in map_in_order(work, batches(pieces)):
                out.write(ids)
                digest.update(ids)
                n_tokens += len(ids)
                n_bytes += size
                done += size
                if time.monotonic() - shown > PROGRESS_SECONDS:
                    shown = time.monotonic()
                    echo(f"tokenizing: {done / documents.size:.0%}", sys.stderr)
        splits[split] = dict(tokens=n_tokens, documents=n_documents, bytes=n_bytes,
                             sha256=digest.hexdigest())
    return splits
