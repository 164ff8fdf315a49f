"""Files of text to tokens, in pieces and in two passes, both parallel and in order.

The first checks the text and counts characters, so that every problem and the place of the split
are known before anything is written; the second makes tokens. Neither holds more than some pieces
of about a megabyte.
"""

import codecs
import contextlib
import functools
import hashlib
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import numpy as np

from data.prepare.sources import File, Progress
from data.records import MANY, check_columns, is_jsonl, parse_line
from data.rows import documents_in_val
from data.tokenizer import (
    GPT2_PATTERN,
    RankTokenizer,
    clean,
    load_dataset_tokenizer,
    without_long_blanks,
)
from train.base.errors import DataError

PIECE = 1 << 20         # bytes of text that one task reads: what memory use is made of
VAL_DOCUMENTS = 10      # with fewer in the validation part, whole documents are too coarse a choice


# --- pieces of text

class Piece(NamedTuple):
    """Bytes start..end of a file: whole lines of JSON, or a text document or part of one."""
    file: File
    start: int
    end: int
    opens: bool    # its first document begins here
    closes: bool   # its last document ends here

    @property
    def size(self):
        return self.end - self.start


def cut_file(file):
    """Pieces of a file, reading only around the cuts; None for a binary file found in a folder."""
    size, pieces = os.path.getsize(file.path), []
    with open(file.path, "rb") as f:
        head = f.read(8192)
        if file.folder and b"\0" in head:
            return None
        first = start = 3 if head.startswith(codecs.BOM_UTF8) else 0
        while start < size:
            end = size
            if size - start > PIECE + 4096:
                f.seek(start + PIECE)
                end = f.tell() + (len(f.readline()) if file.records else text_cut(f.read(4096)))
            pieces.append(Piece(file, start, end, file.records or start == first,
                                file.records or end == size))
            start = end
    return pieces


def cut_files(files):
    """(pieces, names of the binary files in folders, problems) of files."""
    pieces, binary, problems = [], [], []
    progress = Progress("opening", len(files), scale=1, unit="files")
    for file in files:
        progress.add(1)
        try:
            found = cut_file(file)
        except OSError as e:
            problems.append((file.name, e.strerror))
            continue
        pieces += found or []
        binary += [file.name] if found is None else []
        problems += [(file.name, "empty")] if found == [] and not file.folder else []
    progress.finish()
    return pieces, binary, problems


def text_cut(ahead):
    """Offset in the bytes `ahead` where text can be cut without changing a single token: before a
    blank that follows a visible character, as no token of GPT-2's reaches over that. Where there is
    none (no blanks in 4 kB), at the first character."""
    lead = next((i for i, byte in enumerate(ahead[:4]) if byte & 0xC0 != 0x80), 0)
    text = ahead[lead:].decode("utf-8", "surrogateescape")
    spot = re.search(r"\S(?=[ \n])", text)
    return lead + len(text[:spot.end() if spot else 0].encode("utf-8", "surrogateescape"))


def read_texts(piece, fields):
    """(texts, lines, problems): the piece's documents (or its part of one), its newlines, and
    [(line in the piece or "byte N", what is wrong)]."""
    with open(piece.file.path, "rb") as f:
        f.seek(piece.start)
        content = f.read(piece.size)
    if not piece.file.records:
        try:
            return [content.decode("utf-8")], 0, []
        except UnicodeDecodeError as e:
            return [], 0, [(f"byte {piece.start + e.start}", "not UTF-8 text; give text, or "
                            "convert it (iconv -f ENCODING -t utf-8)")]
    texts, problems = [], []
    lines = content.split(b"\n")
    for number, line in enumerate(lines):
        try:
            text = record_text(line, fields) if line.strip() else ""
            texts += [text] if text else []  # an empty document is none
        except ValueError as e:
            problems.append((number, str(e)))
    return texts, len(lines) - 1, problems


def record_text(line, fields):
    """The text of a line of JSON: its fields, joined by newlines. ValueError says what is wrong."""
    record = parse_line(line)
    if not isinstance(record, dict):
        raise ValueError(f"expected an object with field {fields[0]!r}, got a "
                         f"{type(record).__name__}")
    check_columns(record, fields)
    for field in fields:
        if not isinstance(record[field], (str, type(None))):  # null is no text
            raise ValueError(f"field {field!r} is a {type(record[field]).__name__}, expected text")
    return clean("\n".join(record[field] for field in fields if record[field]))


# --- work in order, on one process or many

def die_with_parent():
    """In a worker: a killed parent leaves no orphans."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


@contextlib.contextmanager
def ctrl_c_held():
    """Processes started in here never see Ctrl-C: it is the parent's to handle."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def in_order(function, tasks, num_proc):
    """Results of function(task) in the order of tasks; only a few tasks are under way at a time."""
    if num_proc == 1:
        yield from map(function, tasks)
        return
    pool = ProcessPoolExecutor(num_proc, multiprocessing.get_context("spawn"), die_with_parent)
    try:
        waiting = deque()
        for task in tasks:
            with ctrl_c_held():
                waiting.append(pool.submit(function, task))
            if len(waiting) > 4 * num_proc:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise DataError("a worker process ended early (out of memory?); try --num_proc 1") from None
    finally:
        pool.shutdown(cancel_futures=True)


def batches(items):
    """Lists of items whose sizes add up to a PIECE or more: small ones share a task."""
    batch, total = [], 0
    for item in items:
        batch.append(item)
        total += item.size
        if total >= PIECE:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


# --- the first pass: what is there, and what is wrong with it

def survey_batch(pieces, fields, want_chars):
    """([(piece, characters of each text (n,), lines, problems)], set of characters if wanted)."""
    found, chars = [], set()
    for piece in pieces:
        texts, lines, problems = read_texts(piece, fields)
        found.append((piece, np.array([len(t) for t in texts], np.int64), lines, problems[:MANY]))
        if want_chars:
            chars.update(*texts)
    return found, chars


def survey(pieces, fields, want_chars, limit, num_proc):
    """([(piece, characters of each text)], characters seen, names of files that are not text,
    problems) of the pieces that hold the first `limit` documents."""
    kept, chars, passed, problems, file, line, count = [], set(), {}, [], None, 1, 0
    progress = Progress("reading", sum(piece.size for piece in pieces))
    work = functools.partial(survey_batch, fields=fields, want_chars=want_chars)
    with contextlib.closing(in_order(work, batches(pieces), num_proc)) as results:
        for found, seen in results:
            chars |= seen
            for piece, sizes, lines, wrong in found:
                name, file, line = piece.file.name, piece.file, line if file == piece.file else 1
                if wrong and file.folder and not is_jsonl(name):
                    passed[file] = name
                problems += [] if file in passed else [
                    (f"{name}:{line + at}" if file.records else f"{name} ({at})", what)
                    for at, what in wrong]
                line += lines
                kept.append((piece, sizes))
                count += len(sizes) * piece.closes * (file not in passed)
                progress.add(piece.size)
            if len(problems) >= MANY or limit and count >= limit:
                break
    progress.finish()
    return [k for k in kept if k[0].file not in passed], chars, list(passed.values()), problems


def sample_texts(kept, fields, most):
    """Yields the texts of pieces spread evenly over the input, about `most` bytes of them."""
    chosen = [piece for piece, _ in kept][::-(-sum(p.size for p, _ in kept) // most)]
    progress = Progress("learning tokens", sum(piece.size for piece in chosen))
    for piece in chosen:
        yield from read_texts(piece, fields)[0]
        progress.add(piece.size)
    progress.finish()
    if time.monotonic() - progress.start > 5:
        print("learning tokens: the text is counted, merging pairs", file=sys.stderr, flush=True)


def train_bpe(texts, vocab_size):
    """A RankTokenizer of `vocab_size` tokens, end-of-text included, or fewer where the texts (an
    iterable of str) hold no more; split as GPT-2 splits, so that its rank file alone is enough."""
    import rustbpe  # optional
    trainer = rustbpe.Tokenizer()
    parts = (part for text in texts for part in without_long_blanks(text))
    trainer.train_from_iterator(parts, vocab_size - 1, buffer_size=16, pattern=GPT2_PATTERN)
    ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
    return RankTokenizer("ranks", ranks, GPT2_PATTERN, len(ranks))


# --- the split

class Job(NamedTuple):
    """A piece of text and where it stands in the whole input."""
    piece: Piece
    document: int   # index of its first document
    char: int       # index of its first character
    sizes: np.ndarray   # (n,) characters of the documents to take, or of its part of one

    @property
    def size(self):
        return self.piece.size


def place(kept, fraction, limit):
    """(jobs, cut) of the first `limit` documents: documents are drawn for validation (cut None) if
    that gives VAL_DOCUMENTS or more and half to twice the text asked for; else it is the text from
    character `cut` on."""
    jobs, document, char, val_documents, val_chars = [], 0, 0, 0, 0
    for piece, sizes in kept:
        if limit is not None and document >= limit:
            break
        sizes = sizes[:limit and limit - document]
        jobs.append(Job(piece, document, char, sizes))
        drawn = documents_in_val(document, len(sizes), fraction)
        val_chars += int(sizes[drawn].sum())
        char += int(sizes.sum())
        if piece.closes:
            document += len(sizes)
            val_documents += int(drawn.sum())
    if val_documents >= VAL_DOCUMENTS and fraction / 2 <= val_chars / char <= fraction * 2:
        return jobs, None
    return jobs, tail_cut(jobs, char, fraction)


def tail_cut(jobs, chars, fraction):
    """The character where the last `fraction` begins. That is between two documents where it gives
    half to twice the text asked for, else inside a text; a record is cut only if it is alone."""
    cut = min(max(int(chars * (1 - fraction)), 2), chars - 2)
    border, in_record = None, False
    for job in jobs:
        ends = job.char + np.cumsum(job.sizes)
        in_record |= bool(job.piece.file.records and job.char <= cut < ends[-1:].sum())
        ends = ends[ends < chars] if job.piece.closes else ends[:0]
        for end in ends[np.abs(ends - cut).argmin():][:1].tolist() if len(ends) else ():
            border = end if border is None or abs(end - cut) < abs(border - cut) else border
    if border and (in_record or fraction / 2 <= 1 - border / chars <= fraction * 2):
        return border
    return cut


# --- the second pass: tokens

class Plan(NamedTuple):
    """What every job of the second pass must know."""
    folder: str             # the output so far: it holds the tokenizer
    fields: list
    fraction: float
    cut: int | None         # first character of the validation part; None: documents are drawn
    dtype: np.dtype         # of the token files: uint16 or uint32, little-endian
    newline: bool           # documents that do not end in a newline get one


@functools.lru_cache(1)
def folder_tokenizer(folder):
    """The tokenizer of the output folder, read once by each worker."""
    return load_dataset_tokenizer(folder)


def placed_texts(job, plan):
    """Yields (split, text, begins, ends): whether a document begins or ends in this text."""
    piece = job.piece
    texts, _, problems = read_texts(piece, plan.fields)
    texts = texts[:len(job.sizes)]
    if problems or [len(text) for text in texts] != job.sizes.tolist():
        raise DataError("it changed while it was being read; run the command again")
    if plan.cut is None:
        for text, drawn in zip(texts, documents_in_val(job.document, len(texts), plan.fraction), strict=True):
            yield "val" if drawn else "train", text, piece.opens, piece.closes
        return
    char = job.char
    for text in texts:
        at = min(max(plan.cut - char, 0), len(text))
        if at:
            yield "train", text[:at], piece.opens, piece.closes and at == len(text)
        if at < len(text):
            yield "val", text[at:], piece.opens and not at, piece.closes
        char += len(text)


def encode_batch(jobs, plan):
    """{split: (tokens as bytes, documents, bytes of text)} and the size of the jobs' pieces."""
    tokenizer, dtype = folder_tokenizer(plan.folder), plan.dtype
    end = [] if tokenizer.eot_token is None else [np.array([tokenizer.eot_token], dtype)]
    ids, counts = {"train": [], "val": []}, {"train": [0, 0], "val": [0, 0]}
    for job in jobs:
        try:
            for split, text, begins, ends in placed_texts(job, plan):
                if ends and plan.newline and not text.endswith("\n"):
                    text += "\n"
                ids[split] += [tokenizer.encode_array(text), *(end if ends else [])]
                counts[split][0] += begins
                counts[split][1] += len(text) if text.isascii() else len(text.encode("utf-8"))
        except (DataError, OSError) as e:
            raise DataError(f"{job.piece.file.name}: {e}") from None
    tokens = {s: np.concatenate([*ids[s], np.empty(0, dtype)]).astype(dtype) for s in ids}
    return {s: (tokens[s].tobytes(), *counts[s]) for s in ids}, sum(job.size for job in jobs)


def write_splits(jobs, plan, num_proc):
    """Writes train.bin and val.bin into the plan's folder; their numbers for meta.json."""
    splits = {s: {"tokens": 0, "documents": 0, "bytes": 0} for s in ("train", "val")}
    hashes = {s: hashlib.sha256() for s in splits}
    progress = Progress("tokenizing", sum(job.size for job in jobs))
    results = in_order(functools.partial(encode_batch, plan=plan), batches(jobs), num_proc)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(results))
        files = {s: stack.enter_context(open(os.path.join(plan.folder, f"{s}.bin"), "wb"))
                 for s in splits}
        for parts, size in results:
            for split, (content, documents, text_bytes) in parts.items():
                files[split].write(content)
                hashes[split].update(content)
                splits[split]["tokens"] += len(content) // plan.dtype.itemsize
                splits[split]["documents"] += documents
                splits[split]["bytes"] += text_bytes
            progress.add(size)
    progress.finish()
    return {s: {**numbers, "sha256": hashes[s].hexdigest()} for s, numbers in splits.items()}
