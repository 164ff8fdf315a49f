"""Sources of text: files of plain text (one document each) or JSON Lines (one document per line).

These two are read in place. Compressed files, JSON lists, tables and standard input are unpacked
first, so that several processes can read pieces of a file, in two passes.
"""

import csv
import hashlib
import io
import itertools
import json
import os
import sys
import sysconfig
import time
import zlib
from collections import Counter
from typing import NamedTuple

from data.records import (
    MANY,
    STDLIB_SKIP,
    is_hub_name,
    is_jsonl,
    is_saved,
    open_bytes,
    records,
    walk,
)
from train.base.errors import SetupError

READ_BYTES = 1 << 20
STDLIB = "dataset:stdlib"  # a source that is no path: the library of this Python
BOM_AND_SPACE = b"\xef\xbb\xbf \t\r\n"


class File(NamedTuple):
    """A file of plain text or JSON Lines."""
    name: str       # for messages
    path: str       # of the text: this file, or the unpacked one
    folder: str     # the source in which it was found; "" if the file is a source
    records: bool   # JSON Lines


class BadRecords(Exception):
    """[(location, problem)] of the records of one file."""


class Progress:
    """Progress of a pass on stderr: one updating line on a terminal, otherwise a line every ten
    seconds."""

    def __init__(self, task, total=0, scale=1e6, unit="MB"):
        self.task = task
        self.total = total  # 0: unknown
        self.scale = scale
        self.unit = unit
        self.done = 0
        self.tty = sys.stderr.isatty()
        self.start = time.monotonic()
        self.shown = self.start - (0 if self.tty else 5)  # the first line after five seconds

    def add(self, size):
        """Count `size` more, and print if the last line is old enough."""
        self.done += size
        now = time.monotonic()
        if now - self.shown < (0.2 if self.tty else 10):
            return
        self.shown = now
        rate = self.done / (now - self.start)
        speed = f"{rate / self.scale:,.1f} {self.unit}/s"
        text = f"{self.task}: {self.done / self.scale:,.0f} {self.unit}, {speed}"
        if self.total:
            text = (f"{self.task}: {100 * self.done / self.total:3.0f}% of "
                    f"{self.total / self.scale:,.0f} {self.unit}, {speed}, "
                    f"{(self.total - self.done) / rate:.0f} s to go")
        print(f"\r{text}\x1b[K" if self.tty else text, end="" if self.tty else "\n",
              file=sys.stderr, flush=True)

    def finish(self):
        """Erase the updating line."""
        if self.tty and self.shown > self.start:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


# -----------------------------------------------------------------------------
# finding files

def find_source(source, skipped_folder):
    """Return ([paths], problem or "") of one source."""
    if source == STDLIB:
        library = sysconfig.get_paths()["stdlib"]
        paths = [p for p in walk(library, skipped_folder, STDLIB_SKIP) if p.endswith(".py")]
        return paths, "" if paths else f"{library} has no sources of this Python's library"
    if source == "-" or is_hub_name(source) or os.path.isfile(source) or is_saved(source):
        return [source], ""
    if os.path.isdir(source):
        paths = walk(source, skipped_folder, {"__pycache__"})
        return paths, "" if paths else "a folder without text files (links out are not followed)"
    return [], "neither a file nor a folder" if os.path.exists(source) else "no such file or folder"


def drop_copies(files):
    """Return (files, names of copies): without files that are byte for byte equal to an earlier
    one, which could be in the other split. The standard library is complete."""
    sizes = Counter(os.path.getsize(f.path) for f in files if os.path.isfile(f.path))
    seen, originals, copies = set(), [], []
    progress = Progress("looking for copies")
    for file in files:
        key = file.path
        if os.path.isfile(key) and sizes[os.path.getsize(key)] > 1 and file.folder != STDLIB:
            key = file_hash(file.path, progress)
        (copies if key in seen else originals).append(file)
        seen.add(key)
    progress.finish()
    return originals, [file.name for file in copies]


def file_hash(path, progress=None):
    """Return the sha256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(READ_BYTES):
            digest.update(block)
            if progress:
                progress.add(len(block))
    return digest.hexdigest()


def find_files(sources, skipped_folder, folder, fields, limit, separator):
    """Return (Files, names of copies, names of skipped files, problems) of all sources, in order.
    Files are unpacked to `folder`; fields, limit, separator: see `unpack`."""
    candidates, files, skipped, problems = [], [], [], []
    for source in sources:
        paths, problem = find_source(source, skipped_folder)
        inside = "" if paths == [source] else source
        candidates += [File(path, path, inside, is_jsonl(path)) for path in paths]
        problems += [(source, problem)] if problem else []
    candidates, copies = drop_copies(candidates)
    for number, file in enumerate(candidates):
        target = os.path.join(folder, f"source{number}")
        try:
            files.append(unpack(file, target, fields, limit, separator))
        except BadRecords as error:
            problems += error.args[0]
        except SetupError as error:
            problems.append((file.name, str(error)))
        except (ValueError, EOFError, RecursionError, zlib.error, csv.Error) as error:
            if file.folder and not file.name.lower().endswith(".parquet"):
                skipped.append(file.name)
            else:
                problems.append((file.name, str(error)))
        except OSError as error:
            problems.append((file.name, error.strerror or str(error)))
    return files, copies, skipped, problems


def source_name(source):
    """Return the default name of data prepared from a source: without folders and extensions."""
    if source == "-":
        return "stdin"
    if source.startswith("hf:"):
        source = source[3:].split(":")[0]
    name = os.path.basename(os.path.abspath(source))
    return os.path.splitext(name.removesuffix(".gz"))[0] if os.path.isfile(source) else name


# -----------------------------------------------------------------------------
# unpacking

def unpack(file, target, fields, limit, separator):
    """Return `file` if it can be read in pieces, or the File of the content, unpacked to `target`.

    At most `limit` records are unpacked, and of a record that has all `fields` only these. A text
    is one document, or several between lines equal to `separator` ("": blank lines).
    """
    name = file.name.lower().removesuffix(".gz")
    if (is_hub_name(file.name) or os.path.isdir(file.path)
            or name.endswith((".parquet", ".csv", ".tsv"))):
        return write_records(records(file.path, fields), file, target, fields, limit)
    packed = name == "-" or name != file.name.lower()
    if not packed and not name.endswith(".json") and (is_jsonl(name) or separator is None):
        return file
    with open_bytes(file.path) as stream:
        first = stream.peek(READ_BYTES).lstrip(BOM_AND_SPACE)[:1]
        if name.endswith(".json") and first != b"{":
            return write_records(records(file.path), file, target, fields, limit)
        lines = is_jsonl(name) or first == b"{" and name.endswith(("-", ".json"))
        if lines and not packed:
            return file._replace(records=True)
        if separator is not None and not lines:
            texts = (("", {fields[0]: text}) for text in split_documents(stream, separator))
            return write_records(texts, file, target, fields, limit)
        with open(target, "wb") as out:
            progress = Progress(f"unpacking {file.name}")
            while block := stream.read(READ_BYTES):
                out.write(block)
                progress.add(len(block))
            progress.finish()
    return file._replace(path=target, records=lines)


def write_records(rows, file, target, fields, limit):
    """Write records, an iterable of (location, dict or ValueError), to `target` as JSON Lines and
    return the File. Raises BadRecords."""
    progress = Progress(f"unpacking {file.name}", scale=1, unit="records")
    bad = []
    with open(target, "w", encoding="utf-8") as out:
        for where, record in itertools.islice(rows, limit):
            if isinstance(record, ValueError):
                bad.append((where, str(record)))
                if len(bad) == MANY:
                    break
                continue
            if not isinstance(record, dict):
                raise ValueError("expected a list of records (objects with named fields)")
            chosen = {name: record[name] for name in fields if name in record}
            json.dump(chosen if len(chosen) == len(fields) else record, out, default=str)
            out.write("\n")
            progress.add(1)
    progress.finish()
    if bad:
        raise BadRecords(bad)
    return file._replace(path=target, records=True)


def split_documents(stream, separator):
    """Yield the documents of a text, without newlines at the start and end."""
    lines = []
    for line in io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""):
        if line.strip() != separator:
            lines.append(line)
        else:
            yield "".join(lines).strip("\r\n")
            lines = []
    yield "".join(lines).strip("\r\n")
