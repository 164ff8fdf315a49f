"""The split of documents into training and validation, and their encoding by several processes.

Memory use is a few pieces of text per process.
"""

import contextlib
import functools
import hashlib
import itertools
import multiprocessing
import os
import re
import signal
import threading
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import numpy as np

from data.prepare.sources import Progress
from data.rows import documents_in_val, id_dtype
from data.tokenizer import load_dataset_tokenizer
from data.tokenizer_hf import GPT2_PATTERN
from data.tokenizer_types import RankTokenizer, split_long_spaces
from train.base.errors import DataError, require

PIECE_BYTES = 1 << 20   # of text per task
LOOKAHEAD_BYTES = 4096  # in which a cut is chosen
MIN_VAL_DOCUMENTS = 10  # with fewer, the validation split is the end of the text
TEXT = "text"           # the file of all documents, in the folder of the tokenizer


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
    in_record = documents.records[int(np.searchsorted(ends, cut, "right"))]
    if len(ends) > 1:
        border = int(ends[np.abs(ends[:-1] - cut).argmin()])
        if in_record or fraction / 2 <= 1 - border / size <= fraction * 2:
            cut = border
    with open(documents.path, "rb") as f:
        while f.seek(cut) and f.read(1)[0] & 0xC0 == 0x80:  # within a character
            cut -= 1
    return np.zeros_like(in_val), cut


def text_cut(ahead):
    """Return the offset in the bytes `ahead` at which text can be cut without changing a token:
    before a blank that follows a visible character, because no token of GPT-2 extends over it; at
    the first character if no blank exists."""
    lead = next((i for i, byte in enumerate(ahead[:4]) if byte & 0xC0 != 0x80), 0)
    text = ahead[lead:].decode("utf-8", "surrogateescape")
    spot = re.search(r"\S(?=[ \n])", text)
    return lead + len(text[:spot.end() if spot else 0].encode("utf-8", "surrogateescape"))


class Piece(NamedTuple):
    """Bytes start..end of the text: a document, or a part of a long one."""
    split: str
    start: int
    end: int
    opens: bool    # the document begins here
    closes: bool   # the document is complete here


def cut_pieces(documents, in_val, cut):
    """Yield the Pieces of all documents, split by the result of `choose_split`."""
    start = 0
    with open(documents.path, "rb") as f:
        for end, val in zip(documents.ends, in_val, strict=True):
            opens = True
            while start < end:
                stop = end
                if end - start > PIECE_BYTES + LOOKAHEAD_BYTES:
                    f.seek(start + PIECE_BYTES)
                    stop = f.tell() + text_cut(f.read(LOOKAHEAD_BYTES))
                if start < cut < stop:
                    stop = cut
                yield Piece("val" if val or start >= cut else "train", start, stop, opens,
                            stop == end)
                start, opens = stop, False


def read_piece(f, piece):
    """Return the text of a Piece from the open file `f`."""
    f.seek(piece.start)
    return f.read(piece.end - piece.start).decode("utf-8")


# -----------------------------------------------------------------------------
# processes

def exit_with_parent():
    """End a worker process when the parent is killed."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def map_in_order(function, tasks, num_proc):
    """Yield function(task) in the order of the tasks, a few of which are submitted in advance."""
    if num_proc == 1:
        yield from map(function, tasks)
        return
    pool = ProcessPoolExecutor(num_proc, multiprocessing.get_context("spawn"), exit_with_parent)
    try:
        waiting = deque()
        for task in tasks:
            # Processes that are started here ignore Ctrl-C, which this process handles.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            waiting.append(pool.submit(function, task))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            if len(waiting) > 4 * num_proc:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise DataError("a worker process ended early (out of memory?); try --num_proc 1") from None
    finally:
        pool.shutdown(cancel_futures=True)


def batches(pieces):
    """Yield lists of pieces of PIECE_BYTES or more in all: small pieces share a task."""
    batch, total = [], 0
    for piece in pieces:
        batch.append(piece)
        total += piece.end - piece.start
        if total >= PIECE_BYTES:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


# -----------------------------------------------------------------------------
# tokens

def sample_texts(documents, max_bytes):
    """Yield texts that are spread evenly over the documents, about `max_bytes`."""
    pieces = batches(cut_pieces(documents, np.zeros(len(documents.ends)), documents.size))
    progress = Progress("learning tokens", min(documents.size, max_bytes))
    with open(documents.path, "rb") as f:
        for batch in itertools.islice(pieces, 0, None, -(-documents.size // max_bytes)):
            for piece in batch:
                yield read_piece(f, piece)
                progress.add(piece.end - piece.start)
    progress.finish()


def train_bpe(texts, vocab_size):
    """Return a RankTokenizer of `vocab_size` tokens, including the end of text, or fewer if the
    texts contain no more. Text is split as by GPT-2, so that the rank file is sufficient."""
    trainer = require("rustbpe", "tokenizer bpe").Tokenizer()
    parts = (part for text in texts for part in split_long_spaces(text))
    trainer.train_from_iterator(parts, vocab_size - 1, buffer_size=16, pattern=GPT2_PATTERN)
    ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
    return RankTokenizer("ranks", ranks, GPT2_PATTERN, len(ranks))


# Each worker process reads the tokenizer once.
folder_tokenizer = functools.lru_cache(1)(load_dataset_tokenizer)


def encode_pieces(pieces, folder, newline):
    """Return {split: (tokens, documents, bytes of text)}."""
    tokenizer = folder_tokenizer(folder)
    dtype = id_dtype(tokenizer.n_vocab)
    end = [] if tokenizer.eot_token is None else [np.array([tokenizer.eot_token], dtype)]
    ids = {"train": [np.empty(0, dtype)], "val": [np.empty(0, dtype)]}
    n_documents, n_bytes = dict.fromkeys(ids, 0), dict.fromkeys(ids, 0)
    with open(os.path.join(folder, TEXT), "rb") as f:
        for piece in pieces:
            text = read_piece(f, piece)
            n_bytes[piece.split] += piece.end - piece.start
            if piece.closes and newline and not text.endswith("\n"):
                text += "\n"
                n_bytes[piece.split] += 1
            ids[piece.split] += [tokenizer.encode_array(text), *(end if piece.closes else [])]
            n_documents[piece.split] += piece.opens
    return {split: (np.concatenate(ids[split]).astype(dtype), n_documents[split], n_bytes[split])
            for split in ids}


def write_splits(pieces, folder, size, newline, num_proc):
    """Write train.bin and val.bin of the pieces, `size` bytes in all, to the folder of tokenizer
    and text. Returns the `splits` of meta.json. newline: end each document with a newline."""
    splits = {s: {"tokens": 0, "documents": 0, "bytes": 0} for s in ("train", "val")}
    hashes = {s: hashlib.sha256() for s in splits}
    folder_tokenizer.cache_clear()  # of an earlier folder with the same name
    progress = Progress("tokenizing", size)
    work = functools.partial(encode_pieces, folder=folder, newline=newline)
    with contextlib.ExitStack() as stack:
        results = stack.enter_context(
            contextlib.closing(map_in_order(work, batches(pieces), num_proc)))
        files = {s: stack.enter_context(open(os.path.join(folder, f"{s}.bin"), "wb"))
                 for s in splits}
        for parts in results:
            for split, (ids, documents, text_bytes) in parts.items():
                files[split].write(ids)
                hashes[split].update(ids)
                splits[split]["tokens"] += len(ids)
                splits[split]["documents"] += documents
                splits[split]["bytes"] += text_bytes
                progress.add(text_bytes)
    progress.finish()
    return {s: {**numbers, "sha256": hashes[s].hexdigest()} for s, numbers in splits.items()}
