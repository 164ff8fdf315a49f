"""Sources of text, and the documents in them.

The text of all documents is copied to one file, so that all problems, the characters and the split
are known before a token is written, and several processes can encode pieces of it.
"""

import hashlib
import io
import os
import sys
import sysconfig
import time
from array import array

from data.records import (
    MANY,
    READ_ERRORS,
    STDLIB_SKIP,
    check_columns,
    is_hub_name,
    is_jsonl,
    is_saved,
    open_bytes,
    raise_problems,
    records,
    walk,
)
from data.tokenizer_types import clean

READ_BYTES = 1 << 20
STDLIB = "dataset:stdlib"  # a source that is no path: the library of this Python


class Progress:
    """Progress of a pass on stderr: one updating line on a terminal, otherwise a line every ten
    seconds."""

    def __init__(self, task, total=0):
        self.task = task
        self.total = total  # bytes; 0: unknown
        self.done = 0
        self.tty = sys.stderr.isatty()
        self.start = self.shown = time.monotonic()

    def add(self, size):
        """Count `size` more bytes, and print if the last line is old enough."""
        self.done += size
        now = time.monotonic()
        if now - self.shown < (0.2 if self.tty else 10):
            return
        self.shown = now
        rate = self.done / (now - self.start)
        text = f"{self.task}: {self.done / 1e6:,.0f} MB, {rate / 1e6:,.1f} MB/s"
        if self.total:
            text += (f", {100 * self.done / self.total:.0f}%, "
                     f"{(self.total - self.done) / rate:.0f} s to go")
        print(f"\r{text}\x1b[K" if self.tty else text, end="" if self.tty else "\n",
              file=sys.stderr, flush=True)

    def finish(self):
        """Erase the updating line."""
        if self.tty and self.shown > self.start:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


# -----------------------------------------------------------------------------
# finding files

def find_files(source, skipped_folder):
    """Return ([paths], problem or "") of one source."""
    if source == STDLIB:
        paths = walk(sysconfig.get_paths()["stdlib"], skipped_folder, STDLIB_SKIP)
        return [path for path in paths if path.endswith(".py")], ""
    if source == "-" or is_hub_name(source) or os.path.isfile(source) or is_saved(source):
        return [source], ""
    if os.path.isdir(source):
        return walk(source, skipped_folder, {"__pycache__"}), ""
    return [], "neither a file nor a folder" if os.path.exists(source) else "no such file or folder"


def source_name(source):
    """Return the default name of data prepared from a source: without folders and extensions."""
    if source == "-":
        return "stdin"
    if source.startswith("hf:"):
        source = source[3:].split(":")[0]
    name = os.path.basename(os.path.abspath(source))
    return os.path.splitext(name.removesuffix(".gz"))[0] if os.path.isfile(source) else name


# -----------------------------------------------------------------------------
# reading documents

def has_records(path):
    """Return whether a file has records; otherwise it is text."""
    if path == "-":
        return sys.stdin.buffer.peek(READ_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{"
    return os.path.isdir(path) or is_hub_name(path) or path.lower().removesuffix(".gz").endswith(
        (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet"))


def read_text(path, separator, in_folder):
    """Yield (path, text): blocks of one document, or documents between lines equal to `separator`
    ("": blank lines). Raises ValueError for a file that is no text."""
    with open_bytes(path) as stream:
        if in_folder and b"\0" in stream.peek(READ_BYTES):
            raise ValueError("a binary file")
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        lines = []
        try:
            if separator is None:
                while block := text.read(READ_BYTES):
                    yield path, block
            for line in text:
                if line.strip() != separator:
                    lines.append(line)
                else:
                    yield path, "".join(lines).strip("\r\n")
                    lines = []
        except UnicodeDecodeError:
            raise ValueError("not UTF-8 text; give text, or convert it (iconv -f ENCODING -t utf-8)"
                             ) from None
        yield path, "".join(lines).strip("\r\n")


def record_text(record, fields):
    """Return the text of a record: the fields, joined by newlines. Raises ValueError."""
    if isinstance(record, ValueError):
        raise record
    if not isinstance(record, dict):
        raise ValueError(f"expected an object with field {fields[0]!r}, got a "
                         f"{type(record).__name__}")
    check_columns(record, fields)
    for field in fields:
        if not isinstance(record[field], (str, type(None))):  # null is no text
            raise ValueError(f"field {field!r} is a {type(record[field]).__name__}, expected text")
    return clean("\n".join(record[field] for field in fields if record[field]))


class Documents:
    """Documents, one after the other in a file of UTF-8."""

    def __init__(self, path):
        self.path = path
        self.file = open(path, "wb")
        self.ends = array("q")     # of each document, in bytes
        self.records = array("b")  # whether it is a record, which is never divided
        self.chars = set()         # of the text, if the tokenizer is made of them
        self.hashes = set()        # of the text of each file
        self.progress = Progress("reading")

    @property
    def size(self):
        return self.ends[-1] if self.ends else 0

    def add_file(self, path, o, in_folder, allow_copy):
        """Add the documents of a file. Returns (problems, whether it is a copy): [(location,
        problem)], and whether an earlier file has the same text. Nothing is added in either case.
        """
        n_before, size_before, chars_before = len(self.ends), self.size, self.chars.copy()
        digest = hashlib.blake2b()
        problems = self.add_documents(path, o, in_folder, digest)
        is_copy = digest.digest() in self.hashes and self.size > size_before and not allow_copy
        if problems or is_copy:
            del self.ends[n_before:]
            del self.records[n_before:]
            self.file.seek(self.size)
            self.file.truncate()
            self.chars = chars_before
        self.hashes.add(digest.digest())
        return problems, is_copy

    def add_documents(self, path, o, in_folder, digest):
        """Add the documents of a file, update `digest`, and return the problems."""
        if len(self.ends) == o.num_samples:
            return []
        is_record = has_records(path)
        parts = records(path, o.field) if is_record else read_text(path, o.separator, in_folder)
        size, problems = self.size, []
        try:
            for where, part in parts:
                try:
                    text = record_text(part, o.field) if is_record else part
                except ValueError as error:
                    problems.append((where, str(error)))
                    if len(problems) == MANY:
                        break
                    continue
                content = text.encode("utf-8")
                self.file.write(content)
                digest.update(content)
                size += len(content)
                self.progress.add(len(content))
                if o.tokenizer == "char":
                    self.chars.update(text)
                if is_record or o.separator is not None:
                    self.end_document(size, is_record)
                    if len(self.ends) == o.num_samples:
                        break
            self.end_document(size, is_record)
        except READ_ERRORS as error:
            problems.append((path, getattr(error, "strerror", None) or str(error)))
        return problems

    def end_document(self, size, is_record):
        if size > self.size:  # an empty document does not count
            self.ends.append(size)
            self.records.append(is_record)


def read_sources(o, path, problems):
    """Copy the text of o.sources to the file `path`. Returns (Documents, names of copies, names of
    files in folders that are no text). Raises DataError with these and all earlier problems."""
    documents = Documents(path)
    copies, skipped = [], []
    for source in o.sources:
        if len(documents.ends) == o.num_samples or len(problems) >= MANY:
            break
        paths, problem = find_files(source, os.path.abspath(o.out))
        before = documents.size, len(problems), len(copies)
        problems += [(source, problem)] if problem else []
        for file in paths:
            file_problems, is_copy = documents.add_file(file, o, file != source, source == STDLIB)
            if is_copy:
                copies.append(file)
            elif file == source or is_jsonl(file) or file.endswith(".parquet"):
                problems += file_problems
            elif file_problems:
                skipped.append(file)
        if before == (documents.size, len(problems), len(copies)):
            examples = f"; skipped: {', '.join(skipped[-3:])}" if skipped else ""
            problems.append((source, f"no text{examples}"))
    documents.file.close()
    documents.progress.finish()
    raise_problems(problems)
    return documents, copies, skipped
