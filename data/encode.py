"""Pieces of text to train.bin and val.bin, in two passes, both parallel and in order.

The first checks the text and counts characters, so that every problem and the place of the split
are known before anything is written; the second writes tokens. Neither holds more than some pieces.
"""

import contextlib
import functools
import hashlib
import os
from typing import NamedTuple

import numpy as np

from data.parallel import Progress, batches, in_order
from data.text import PIECE, Piece, is_jsonl, read_texts
from data.tokenizer import load_dataset_tokenizer

VAL_DOCUMENTS = 10   # with fewer in the validation part, whole documents are too coarse a choice
SHOWN = 20           # problems in one message


class Job(NamedTuple):
    """A piece of text and where it stands in the whole input."""
    piece: Piece
    document: int   # index of its first document
    char: int       # index of its first character
    chars: int      # how many the first pass found

    @property
    def size(self):
        return self.piece.size


class Plan(NamedTuple):
    """What every job of the second pass must know."""
    folder: str             # the output so far: it holds the tokenizer
    field: str
    fraction: float
    cut: int | None         # first character of the validation part; None: documents are drawn
    dtype: str              # of the token files: uint16 or uint32, little-endian
    newline: bool           # documents that do not end in a newline get one


def survey_batch(pieces, field, want_chars):
    """([(piece, characters of each text (n,), lines, problems)], set of characters if wanted)."""
    found, chars = [], set()
    for piece in pieces:
        texts, lines, problems = read_texts(piece, field)
        sizes = np.array([len(text) for text in texts], np.int64)
        found.append((piece, sizes, lines, problems[:SHOWN]))
        if want_chars:
            chars.update(*texts)
    return found, chars


def survey(pieces, field, want_chars, num_proc):
    """([(piece, characters of each text)], characters seen, files skipped, problems)."""
    kept, chars, skipped, problems, path, line = [], set(), set(), [], None, 1
    progress = Progress("reading", sum(piece.size for piece in pieces))
    work = functools.partial(survey_batch, field=field, want_chars=want_chars)
    results = in_order(work, batches(pieces, PIECE), num_proc)
    with contextlib.closing(results):
        for found, seen in results:
            chars |= seen
            for piece, sizes, lines, wrong in found:
                path, line = piece.path, line if path == piece.path else 1
                if wrong and piece.folder and not is_jsonl(path):
                    skipped.add(path)
                else:
                    problems += [f"{path}: {what}" if at is None else f"{path}:{line + at}: {what}"
                                 for at, what in wrong]
                line += lines
                kept.append((piece, sizes))
                progress.add(piece.size)
            if len(problems) >= SHOWN:
                break  # one wrong field name would otherwise make a problem of every line
    progress.finish()
    return [k for k in kept if k[0].path not in skipped], chars, len(skipped), problems


def in_val(first, count, fraction):
    """bool (count,): whether documents first.. are for validation, by a hash (splitmix64) of their
    index, so that it depends on nothing else."""
    z = np.arange(first + 1, first + 1 + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(11)) * 2.0 ** -53 < fraction


def place(kept, fraction):
    """(jobs, cut): documents are drawn for validation (cut None) if that gives VAL_DOCUMENTS or
    more and half to twice the text asked for; else it is the last `fraction` of all characters."""
    jobs, document, char, val_documents, val_chars = [], 0, 0, 0, 0
    for piece, sizes in kept:
        chars = int(sizes.sum())
        jobs.append(Job(piece, document, char, chars))
        drawn = in_val(document, len(sizes), fraction)
        val_chars += int(sizes[drawn].sum())
        char += chars
        if piece.closes:
            document += len(sizes)
            val_documents += int(drawn.sum())
    if val_documents >= VAL_DOCUMENTS and fraction / 2 <= val_chars / char <= fraction * 2:
        return jobs, None
    return jobs, min(max(int(char * (1 - fraction)), 2), char - 2)


@functools.lru_cache(1)
def folder_tokenizer(folder):
    """The tokenizer of the output folder, read once by each worker."""
    return load_dataset_tokenizer(folder)


def placed_texts(job, plan):
    """Yields (split, text, begins, ends): whether a document of that split begins or ends here."""
    piece = job.piece
    texts, _, problems = read_texts(piece, plan.field)
    if problems or sum(map(len, texts)) != job.chars:
        raise ValueError("it changed while it was being read; run the command again")
    if plan.cut is None:
        for text, drawn in zip(texts, in_val(job.document, len(texts), plan.fraction), strict=True):
            yield "val" if drawn else "train", text, piece.opens, piece.closes
        return
    char = job.char
    for text in texts:
        at = min(max(plan.cut - char, 0), len(text))
        if at:
            yield "train", text[:at], piece.opens, piece.closes and at == len(text)
        if at < len(text):
            begins = piece.opens and at == 0 or char + at == plan.cut
            yield "val", text[at:], begins, piece.closes
        char += len(text)


def encode_batch(jobs, plan):
    """{split: (tokens as bytes, documents, bytes of text)} and the size of the jobs' pieces."""
    tokenizer, dtype = folder_tokenizer(plan.folder), np.dtype(plan.dtype).newbyteorder("<")
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
        except (ValueError, OSError) as e:
            raise ValueError(f"{job.piece.path}: {e}") from None
    tokens = {s: np.concatenate([*ids[s], np.empty(0, dtype)]).astype(dtype) for s in ids}
    return {s: (tokens[s].tobytes(), *counts[s]) for s in ids}, sum(job.size for job in jobs)


def write_splits(jobs, plan, num_proc):
    """Writes train.bin and val.bin into the plan's folder; their numbers for meta.json."""
    splits = {s: {"tokens": 0, "documents": 0, "bytes": 0} for s in ("train", "val")}
    hashes = {s: hashlib.sha256() for s in splits}
    progress = Progress("tokenizing", sum(job.size for job in jobs))
    work = functools.partial(encode_batch, plan=plan)
    results = in_order(work, batches(jobs, PIECE), num_proc)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(results))
        files = {s: stack.enter_context(open(os.path.join(plan.folder, f"{s}.bin"), "wb"))
                 for s in splits}
        for parts, size in results:
            for split, (content, documents, text_bytes) in parts.items():
                files[split].write(content)
                hashes[split].update(content)
                splits[split]["tokens"] += len(content) // np.dtype(plan.dtype).itemsize
                splits[split]["documents"] += documents
                splits[split]["bytes"] += text_bytes
            progress.add(size)
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())  # a rename must not outlive its content in a power cut
    progress.finish()
    return {s: {**numbers, "sha256": hashes[s].hexdigest()} for s, numbers in splits.items()}
