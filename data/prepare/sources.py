"""Sources of text, and the documents in them.

The text of all documents is copied to one file, so that all problems and the split are known before
a token is written, and several threads can encode pieces of it.
"""

import io
import os
import sysconfig
from array import array
from pathlib import Path

from data import records
from data.prepare.folders import is_stream
from data.tokenizer_types import clean
from train.base.errors import DataError
from train.base.files import FULL_DISK

READ_BYTES = 1 << 20
STDLIB = "dataset:stdlib"  # a source that is no path: the library of this Python
MIN_BYTES = 4  # of text: two for each split


# -----------------------------------------------------------------------------
# finding files

def find_files(source):
    """Return the paths to read for a source: the files in a folder, or [source].

    A folder saved by the package datasets is one path. For another folder: as records.walk(),
    without __pycache__, and with the same errors. For dataset:stdlib: the .py files of Python's
    library, without STDLIB_SKIP, e.g. tests.
    """
    if source == STDLIB:
        paths = records.walk(sysconfig.get_paths()["stdlib"], records.STDLIB_SKIP)
        return [path for path in paths if path.endswith(".py")]
    if os.path.isdir(source) and not records.is_saved(source):
        return records.walk(source, {"__pycache__"})
    return [source]


def source_name(source):
    """Return the last part of a path or hf:NAME, without extension, to name the output folder."""
    path = source.split(":")[1] if source.startswith("hf:") else os.path.abspath(source)
    return Path(path.removesuffix(".gz")).stem


# -----------------------------------------------------------------------------
# reading documents

def read_text(path):
    """Yield (text, whether a document ends here) of a text file, one document in several texts.

    Raises ValueError if the file is binary or not UTF-8.
    """
    with records.open_bytes(path) as stream:
        if b"\0" in stream.peek(READ_BYTES):
            raise ValueError("a binary file or UTF-16, expected UTF-8 text")
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        try:
            while block := text.read(READ_BYTES):
                yield block, False
        except UnicodeDecodeError:
            raise ValueError("not UTF-8 text; give text, or convert it (iconv -f ENCODING -t utf-8)"
                             ) from None
        yield "", True


def record_text(record, fields):
    """Return the texts of `fields`, except None, joined by newlines; ValueError for other types."""
    records.check_columns(record, fields)
    for field in fields:
        if not isinstance(record[field], (str, type(None))):  # null is no text
            raise ValueError(f"field {field!r} is a {type(record[field]).__name__}, expected text")
    return clean("\n".join(record[field] for field in fields if record[field]))


class Documents:
    """The documents of all sources, concatenated in a new UTF-8 file, `path`.

    Call add_file() for each file of a source, then file.close(). Attributes: path; file; ends, the
    byte position after each document; size, in bytes; has_records, whether some documents are
    records; is_damaged, whether the last file could not be read to the end, e.g. a damaged .gz.
    """

    def __init__(self, path):
        self.path = path
        self.ends = array("q")
        self.has_records = False
        self.is_damaged = False
        self.file = open(path, "wb")

    @property
    def size(self):
        return self.ends[-1] if self.ends else 0

    def add_file(self, path, o):
        """Append the documents of `path`; return [], or problems [(location, text), ...].

        If there are problems, none of its documents is appended. path: a file, or a data set of
        dataset_rows(). o: PrepareOptions. Stops at o.num_samples documents in all.
        """
        size = self.size
        ends = array("q", [size])
        problems = []
        self.is_damaged = False
        self.file.seek(size)  # over the documents of a file with problems
        is_record = (os.path.isdir(path) or records.is_hub_name(path)
                     or records.has_record_extension(path))
        texts = read_text(path)
        if is_record:
            names = o.field or ["text"]
            stream = records.records(path, names)
            texts = ((text, True) for text in records.parse_each(
                stream, lambda record: record_text(record, names), problems))
        try:
            for text, is_end in texts:
                content = text.encode()
                self.file.write(content)
                size += len(content)
                if is_end and size > ends[-1]:  # an empty document does not count
                    ends.append(size)
                    if len(self.ends) + len(ends) - 1 == o.num_samples:
                        break
        except records.READ_ERRORS as error:
            if getattr(error, "errno", None) in FULL_DISK:  # that of self.file
                raise
            problem = getattr(error, "strerror", None) or str(error)
            if isinstance(error, FileNotFoundError):
                problem = records.NOT_FOUND
            problems.append((path, problem))
            self.is_damaged = not isinstance(error, ValueError)  # otherwise it is no text
        if not problems:
            self.ends += ends[1:]
            self.has_records |= is_record
        return problems


def is_data(path, problems, documents):
    """Return whether the `problems` of the file just read are errors, not a reason to skip it."""
    name = path.lower().removesuffix(".gz")
    if documents.is_damaged or name.endswith((".jsonl", ".ndjson", ".parquet")):
        return True
    # Reading may have stopped before the first good row of a table that has the column.
    has_bad_rows = name.endswith((".csv", ".tsv")) and any(where != path for where, _ in problems)
    has_good_records = documents.file.tell() > documents.size
    return has_bad_rows or records.has_record_extension(path) and has_good_records


def read_sources(o, path):
    """Copy the text of o.sources to the new file `path`; return (Documents, skipped files).

    o: PrepareOptions. Skips files already read, e.g. through a link, and files in folders that are
    no text. Raises DataError with the problems, for almost no text, and for o.field without records
    or with standard input, which is text.
    """
    documents = Documents(path)
    skipped = []
    problems = []
    real_paths = set()
    for source in o.sources:
        for file in find_files(source):
            if len(documents.ends) == o.num_samples or len(problems) >= records.MAX_PROBLEMS:
                break
            if os.path.realpath(file) in real_paths:
                skipped.append(file)
                continue
            real_paths.add(os.path.realpath(file))
            file_problems = documents.add_file(file, o)
            if file == source or is_data(file, file_problems, documents):
                problems += file_problems
            elif file_problems:
                skipped.append(file)
    documents.file.close()  # the end may have text of a file with problems
    records.raise_problems(problems)
    # JSON lines from a stream would be text.
    if o.field and ((streams := [*filter(is_stream, o.sources)]) or not documents.has_records):
        raise DataError(f"{', '.join(streams or o.sources)}: no records; --field is for these only "
                        f"(files named {', '.join('*' + e for e in records.RECORD_EXTENSIONS)})")
    if documents.size < MIN_BYTES:
        raise DataError(f"{', '.join(o.sources)}: {documents.size} bytes of text; too little to "
                        f"split; skipped files: {', '.join(skipped[:3]) or 'none'}")
    return documents, skipped
