"""Sources to pieces of text: finds files, cuts them into pieces of about a megabyte, reads a piece.

A document is a file, or a line of a JSONL file. Problems come back as sentences, so that the caller
can report all of them at once.
"""

import codecs
import json
import os
import re
import sysconfig
from typing import NamedTuple

from data.tokenizer import clean

PIECE = 1 << 20  # bytes of text that one task reads: what memory use is made of
STDLIB = "dataset:stdlib"  # a source that is not a path: this Python's own library
# not the library's own code and prose: tests, tables of characters, installed packages
STDLIB_SKIP = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages",
               "dist-packages", "__pycache__"}


class Piece(NamedTuple):
    """Bytes start..end of a file: whole lines of JSONL, or a text document or part of one."""
    path: str
    start: int
    end: int
    folder: str    # the source it was found in; "" if the user named the file itself
    opens: bool    # its first document begins here
    closes: bool   # its last document ends here

    @property
    def size(self):
        return self.end - self.start


def is_jsonl(path):
    return path.lower().endswith((".jsonl", ".ndjson"))


def find_pieces(sources, leave_out):
    """(pieces, skipped, problems) of files and folders, in order. skipped counts binary files found
    in folders; `leave_out` is a folder to pass by."""
    pieces, skipped, problems = [], 0, []
    for source in sources:
        files, problem = find_files(source, leave_out)
        folder = "" if files == [source] else source
        try:
            cut = [cut_file(path, folder) for path in files]
        except OSError as e:
            cut, problem = [], f"{e.filename}: {e.strerror}"
        skipped += sum(c is None for c in cut)
        found = [piece for c in cut for piece in c or ()]
        pieces += found
        if not found and not problem:
            problem = f"{source}: " + ("a folder without text files" if folder else "empty")
        problems += [problem] if problem else []
    return pieces, skipped, problems


def find_files(source, leave_out):
    """(sorted paths, problem or None) of one source. Hidden files and folders are left out."""
    if source == STDLIB:
        library = sysconfig.get_paths()["stdlib"]
        files = [path for path in walk(library, leave_out, STDLIB_SKIP) if path.endswith(".py")]
        return files, None if files else f"{library}: this Python has no sources of its library"
    if os.path.isfile(source):
        return [source], None
    if os.path.isdir(source):
        return walk(source, leave_out, {"__pycache__"}), None
    return [], f"{source}: " + ("neither a file nor a folder" if os.path.exists(source)
                                else "no such file or folder")


def walk(folder, leave_out, names_out):
    """Paths of the regular files under `folder`, in an order that is the same on every machine."""
    found = []
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in names_out
                            and os.path.abspath(os.path.join(here, name)) != leave_out)
        paths = [os.path.join(here, name) for name in sorted(names) if name[0] != "."]
        found += [path for path in paths if os.path.isfile(path)]
    return found


def cut_file(path, folder):
    """Pieces of a file, reading only around the cuts; None for a binary file found in a folder."""
    size, jsonl = os.path.getsize(path), is_jsonl(path)
    pieces = []
    with open(path, "rb") as f:
        head = f.read(8192)
        if folder and b"\0" in head:
            return None
        first = start = 3 if head.startswith(codecs.BOM_UTF8) else 0
        while start < size:
            end = size
            if size - start > PIECE + 4096:
                f.seek(start + PIECE)
                end = start + PIECE + (len(f.readline()) if jsonl else text_cut(f.read(4096)))
            pieces.append(Piece(path, start, end, folder, jsonl or start == first,
                                jsonl or end == size))
            start = end
    return pieces


def text_cut(ahead):
    """Offset in the bytes `ahead` where text can be cut without changing a single token: before a
    blank that follows a visible character, as no token of GPT-2's reaches over that. Where there is
    none (no blanks in 4 kB), at the first character."""
    lead = next((i for i, byte in enumerate(ahead[:4]) if byte & 0xC0 != 0x80), 0)
    text = ahead[lead:].decode("utf-8", "surrogateescape")
    spot = re.search(r"\S(?=[ \n])", text)
    return lead + len(text[:spot.end() if spot else 0].encode("utf-8", "surrogateescape"))


def read_texts(piece, field):
    """(texts, lines, problems): the piece's documents (or its part of one), its newlines, and
    [(line in the piece or None, what is wrong)]."""
    with open(piece.path, "rb") as f:
        f.seek(piece.start)
        content = f.read(piece.end - piece.start)
    if not is_jsonl(piece.path):
        try:
            return [content.decode("utf-8")], 0, []
        except UnicodeDecodeError as e:
            return [], 0, [(None, f"not UTF-8 text: byte {piece.start + e.start} is "
                            f"0x{content[e.start]:02x}; convert it (iconv -f ENCODING -t utf-8)")]
    texts, problems = [], []
    lines = content.split(b"\n")
    for number, line in enumerate(lines):
        try:
            text = json_text(line, field) if line.strip() else ""
            texts += [text] if text else []  # an empty document is none
        except ValueError as e:
            problems.append((number, str(e)))
    return texts, len(lines) - 1, problems


def json_text(line, field):
    """The text in a line of JSONL; ValueError says what is wrong with the line."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as e:
        raise ValueError(f"not UTF-8 text at byte {e.start} of the line") from None
    except (ValueError, RecursionError) as e:
        raise ValueError(f"not valid JSON: {e}") from None
    if not isinstance(record, dict):
        raise ValueError(f"expected an object with field {field!r}, got a {type(record).__name__}")
    if field not in record:
        names = ", ".join(map(repr, record)) or "none"
        raise ValueError(f"no field {field!r}; its fields are {names}: choose one with --field")
    if not isinstance(record[field], str):
        raise ValueError(f"field {field!r} is a {type(record[field]).__name__}, expected a string")
    return clean(record[field])
