"""Encoding of text files in pieces, by several processes, in two passes.

The first pass checks the text and counts characters, so that all problems and the split are known
before anything is written. The second pass writes tokens. Memory use is a few pieces per process.
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
from data.tokenizer import load_dataset_tokenizer
from data.tokenizer_hf import GPT2_PATTERN
from data.tokenizer_types import RankTokenizer, clean, split_long_spaces
from train.base.errors import DataError, require

PIECE_BYTES = 1 << 20   # of text per task
LOOKAHEAD_BYTES = 4096  # in which a cut is chosen
MIN_VAL_DOCUMENTS = 10  # with fewer, the validation split is the end of the text


# -----------------------------------------------------------------------------
# pieces of text

class Piece(NamedTuple):
    """Bytes start..end of a file: whole lines of JSON, or a text document or part of one."""
    file: File
    start: int
    end: int
    opens: bool    # the first document begins here
    closes: bool   # the last document is complete here

    @property
    def size(self):
        return self.end - self.start


def cut_file(file):
    """Return the pieces of a file, of which only the bytes around the cuts are read; `None` for a
    binary file in a folder."""
    size = os.path.getsize(file.path)
    pieces = []
    with open(file.path, "rb") as f:
        head = f.read(8192)
        if file.folder and b"\0" in head:
            return None
        first = start = 3 if head.startswith(codecs.BOM_UTF8) else 0
        while start < size:
            end = size
            if size - start > PIECE_BYTES + LOOKAHEAD_BYTES:
                f.seek(start + PIECE_BYTES)
                end = f.tell()
                end += len(f.readline()) if file.records else text_cut(f.read(LOOKAHEAD_BYTES))
            pieces.append(Piece(file, start, end, file.records or start == first,
                                file.records or end == size))
            start = end
    return pieces


def cut_files(files):
    """Return (pieces, names of binary files in folders, problems) of files."""
    pieces, binary, problems = [], [], []
    progress = Progress("opening", len(files), scale=1, unit="files")
    for file in files:
        progress.add(1)
        try:
            file_pieces = cut_file(file)
        except OSError as error:
            problems.append((file.name, error.strerror))
            continue
        if file_pieces is None:
            binary.append(file.name)
        elif file_pieces:
            pieces += file_pieces
        elif not file.folder:
            problems.append((file.name, "empty"))
    progress.finish()
    return pieces, binary, problems


def text_cut(ahead):
    """Return the offset in the bytes `ahead` at which text can be cut without changing a token:
    before a blank that follows a visible character, because no token of GPT-2 extends over it; at
    the first character if no blank exists."""
    lead = next((i for i, byte in enumerate(ahead[:4]) if byte & 0xC0 != 0x80), 0)
    text = ahead[lead:].decode("utf-8", "surrogateescape")
    spot = re.search(r"\S(?=[ \n])", text)
    return lead + len(text[:spot.end() if spot else 0].encode("utf-8", "surrogateescape"))


def read_texts(piece, fields):
    """Return (texts, lines, problems) of a piece: the documents (or the part of one), the number of
    newlines, and [(line in the piece or "byte N", problem)]."""
    with open(piece.file.path, "rb") as f:
        f.seek(piece.start)
        content = f.read(piece.size)
    if not piece.file.records:
        try:
            return [content.decode("utf-8")], 0, []
        except UnicodeDecodeError as error:
            return [], 0, [(f"byte {piece.start + error.start}", "not UTF-8 text; give text, or "
                            "convert it (iconv -f ENCODING -t utf-8)")]
    texts, problems = [], []
    lines = content.split(b"\n")
    for number, line in enumerate(lines):
        try:
            text = record_text(line, fields) if line.strip() else ""
        except ValueError as error:
            problems.append((number, str(error)))
        else:
            texts += [text] if text else []  # an empty document does not count
    return texts, len(lines) - 1, problems


def record_text(line, fields):
    """Return the text of a line of JSON: the fields, joined by newlines. Raises ValueError."""
    record = parse_line(line)
    if not isinstance(record, dict):
        raise ValueError(f"expected an object with field {fields[0]!r}, got a "
                         f"{type(record).__name__}")
    check_columns(record, fields)
    for field in fields:
        if not isinstance(record[field], (str, type(None))):  # null is no text
            raise ValueError(f"field {field!r} is a {type(record[field]).__name__}, expected text")
    return clean("\n".join(record[field] for field in fields if record[field]))


# -----------------------------------------------------------------------------
# processes

def exit_with_parent():
    """End a worker process when the parent is killed."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


@contextlib.contextmanager
def blocked_sigint():
    """Context manager: processes that are started in it ignore Ctrl-C, which the parent handles."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def map_in_order(function, tasks, num_proc):
    """Yield function(task) in the order of the tasks, a few of which are submitted in advance."""
    if num_proc == 1:
        yield from map(function, tasks)
        return
    pool = ProcessPoolExecutor(num_proc, multiprocessing.get_context("spawn"), exit_with_parent)
    try:
        waiting = deque()
        for task in tasks:
            with blocked_sigint():
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
    """Yield lists of items of PIECE_BYTES or more in all: small pieces share a task."""
    batch, total = [], 0
    for item in items:
        batch.append(item)
        total += item.size
        if total >= PIECE_BYTES:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


# -----------------------------------------------------------------------------
# the first pass

def survey_batch(pieces, fields, want_chars):
    """Return ([(piece, characters of each text (n,), lines, problems)], set of characters)."""
    results, chars = [], set()
    for piece in pieces:
        texts, lines, problems = read_texts(piece, fields)
        sizes = np.array([len(text) for text in texts], np.int64)
        results.append((piece, sizes, lines, problems[:MANY]))
        if want_chars:
            chars.update(*texts)
    return results, chars


def survey(pieces, fields, want_chars, limit, num_proc):
    """Return ([(piece, characters of each text)], characters, names of files that are no text,
    problems) of the pieces that contain the first `limit` documents."""
    sized_pieces, chars, skipped, problems = [], set(), {}, []
    file, first_line, n_documents = None, 1, 0
    progress = Progress("reading", sum(piece.size for piece in pieces))
    work = functools.partial(survey_batch, fields=fields, want_chars=want_chars)
    with contextlib.closing(map_in_order(work, batches(pieces), num_proc)) as results:
        for batch, batch_chars in results:
            chars |= batch_chars
            for piece, sizes, lines, piece_problems in batch:
                name = piece.file.name
                first_line = first_line if file == piece.file else 1
                file = piece.file
                if piece_problems and file.folder and not is_jsonl(name):
                    skipped[file] = name
                if file not in skipped:
                    problems += [(f"{name}:{first_line + at}" if file.records else
                                  f"{name} ({at})", problem) for at, problem in piece_problems]
                    n_documents += len(sizes) * piece.closes
                first_line += lines
                sized_pieces.append((piece, sizes))
                progress.add(piece.size)
            if len(problems) >= MANY or limit and n_documents >= limit:
                break
    progress.finish()
    sized_pieces = [(piece, sizes) for piece, sizes in sized_pieces if piece.file not in skipped]
    return sized_pieces, chars, list(skipped.values()), problems


def sample_texts(sized_pieces, fields, max_bytes):
    """Yield the texts of pieces that are spread evenly over the input, about `max_bytes`."""
    pieces = [piece for piece, _ in sized_pieces]
    chosen = pieces[::-(-sum(piece.size for piece in pieces) // max_bytes)]
    progress = Progress("learning tokens", sum(piece.size for piece in chosen))
    for piece in chosen:
        yield from read_texts(piece, fields)[0]
        progress.add(piece.size)
    progress.finish()
    if time.monotonic() - progress.start > 5:
        print("learning tokens: the text is counted, merging pairs", file=sys.stderr, flush=True)


def train_bpe(texts, vocab_size):
    """Return a RankTokenizer of `vocab_size` tokens, including the end of text, or fewer if the
    texts contain no more. Text is split as by GPT-2, so that the rank file is sufficient."""
    trainer = require("rustbpe", "tokenizer bpe").Tokenizer()
    parts = (part for text in texts for part in split_long_spaces(text))
    trainer.train_from_iterator(parts, vocab_size - 1, buffer_size=16, pattern=GPT2_PATTERN)
    ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
    return RankTokenizer("ranks", ranks, GPT2_PATTERN, len(ranks))


# -----------------------------------------------------------------------------
# the split

class Job(NamedTuple):
    """A piece and the position in the whole input."""
    piece: Piece
    document: int       # index of the first document
    char: int           # index of the first character
    sizes: np.ndarray   # (n,) characters of the documents, or of the part of one

    @property
    def size(self):
        return self.piece.size


def plan_split(sized_pieces, fraction, limit):
    """Return (jobs, cut) of the first `limit` documents. If cut is `None`, documents are chosen for
    validation by `documents_in_val`, if that gives MIN_VAL_DOCUMENTS and 0.5 to 2 times the text
    requested. Otherwise the text from character `cut` on is the validation split."""
    jobs = []
    document = char = val_documents = val_chars = 0
    for piece, sizes in sized_pieces:
        if limit is not None and document >= limit:
            break
        sizes = sizes[:limit and limit - document]
        jobs.append(Job(piece, document, char, sizes))
        in_val = documents_in_val(document, len(sizes), fraction)
        val_chars += int(sizes[in_val].sum())
        char += int(sizes.sum())
        if piece.closes:
            document += len(sizes)
            val_documents += int(in_val.sum())
    if val_documents >= MIN_VAL_DOCUMENTS and fraction / 2 <= val_chars / char <= fraction * 2:
        return jobs, None
    return jobs, tail_cut(jobs, char, fraction)


def tail_cut(jobs, chars, fraction):
    """Return the character at which the last `fraction` begins: between two documents if that gives
    0.5 to 2 times the text requested, otherwise inside a text. A record is cut only if there is no
    second one."""
    cut = min(max(int(chars * (1 - fraction)), 2), chars - 2)
    border, in_record = None, False
    for job in jobs:
        ends = job.char + np.cumsum(job.sizes)
        in_record |= bool(job.piece.file.records and job.char <= cut < ends[-1:].sum())
        ends = ends[ends < chars] if job.piece.closes else ends[:0]
        if len(ends):
            end = int(ends[np.abs(ends - cut).argmin()])
            border = end if border is None or abs(end - cut) < abs(border - cut) else border
    if border and (in_record or fraction / 2 <= 1 - border / chars <= fraction * 2):
        return border
    return cut


# -----------------------------------------------------------------------------
# the second pass

class Plan(NamedTuple):
    """The common settings of the jobs of the second pass."""
    folder: str             # the output, which contains the tokenizer
    fields: list
    fraction: float
    cut: int | None         # first character of the validation split, see plan_split
    dtype: np.dtype         # of the token files: little-endian uint16 or uint32
    newline: bool           # documents that do not end in a newline get one


# Each worker process reads the tokenizer once.
folder_tokenizer = functools.lru_cache(1)(load_dataset_tokenizer)


def split_texts(job, plan):
    """Yield (split, text, begins, complete) of a job: whether a document begins in the text, and
    whether the text completes it."""
    piece = job.piece
    texts, _, problems = read_texts(piece, plan.fields)
    texts = texts[:len(job.sizes)]
    if problems or [len(text) for text in texts] != job.sizes.tolist():
        raise DataError("it changed while it was being read; run the command again")
    if plan.cut is None:
        in_val = documents_in_val(job.document, len(texts), plan.fraction)
        for text, val in zip(texts, in_val, strict=True):
            yield "val" if val else "train", text, piece.opens, piece.closes
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
    """Return ({split: (tokens as bytes, documents, bytes of text)}, bytes of the pieces)."""
    tokenizer = folder_tokenizer(plan.folder)
    end = [] if tokenizer.eot_token is None else [np.array([tokenizer.eot_token], plan.dtype)]
    ids = {"train": [np.empty(0, plan.dtype)], "val": [np.empty(0, plan.dtype)]}
    n_documents, n_bytes = dict.fromkeys(ids, 0), dict.fromkeys(ids, 0)
    for job in jobs:
        try:
            for split, text, begins, ends in split_texts(job, plan):
                if ends and plan.newline and not text.endswith("\n"):
                    text += "\n"
                ids[split] += [tokenizer.encode_array(text), *(end if ends else [])]
                n_documents[split] += begins
                n_bytes[split] += len(text) if text.isascii() else len(text.encode("utf-8"))
        except (DataError, OSError) as error:
            raise DataError(f"{job.piece.file.name}: {error}") from None
    parts = {split: (np.concatenate(ids[split]).astype(plan.dtype).tobytes(), n_documents[split],
                     n_bytes[split]) for split in ids}
    return parts, sum(job.size for job in jobs)


def write_splits(jobs, plan, num_proc):
    """Write train.bin and val.bin to the plan's folder and return the `splits` of meta.json."""
    splits = {s: {"tokens": 0, "documents": 0, "bytes": 0} for s in ("train", "val")}
    hashes = {s: hashlib.sha256() for s in splits}
    progress = Progress("tokenizing", sum(job.size for job in jobs))
    results = map_in_order(functools.partial(encode_batch, plan=plan), batches(jobs), num_proc)
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
