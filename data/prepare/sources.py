"""What a person names, as files of plain text (a document each) or JSON Lines (a document a line).

These two are read where they lie. Compressed files, JSON lists, tables and standard input are
unpacked into a folder first: then they too can be read in pieces, twice, by several processes.
"""

import csv
import glob
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
from urllib.parse import urlsplit
from urllib.request import url2pathname

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
from train.base.errors import DataError

BLOCK = 1 << 20
MIRROR = r"https://|file://|http://(localhost|127\.)"  # what comes else can be anybody's
SHAKESPEARE_URL = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/"
                   "tinyshakespeare/input.txt")
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
STDLIB = "dataset:stdlib"  # a source that is not a path: this Python's own library


class File(NamedTuple):
    """Plain text or JSON Lines."""
    name: str       # what messages call it
    path: str       # what is read: the file itself, or what it was unpacked to
    folder: str     # the source it was found in; "" if the user named the file itself
    records: bool   # JSON Lines


class BadRecords(Exception):
    """[(where, what is wrong)] of records of one file."""


class Progress:
    """How far a pass is, on stderr: one updating line on a terminal, else a line in ten seconds."""

    def __init__(self, what, total=0, done=0, scale=1e6, unit="MB"):
        self.what, self.total, self.scale, self.unit = what, total, scale, unit
        self.done = self.before = done
        self.tty = sys.stderr.isatty()
        self.start = time.monotonic()
        self.shown = self.start - (0 if self.tty else 5)  # the first after five seconds

    def add(self, size):
        """`size` more are done, of `total`; 0: nobody knows how many there are."""
        self.done += size
        now = time.monotonic()
        if now - self.shown < (0.2 if self.tty else 10):
            return
        self.shown, n = now, self.done / self.scale
        rate = (self.done - self.before) / (now - self.start)
        text = f"{self.what}: {n:,.0f} {self.unit}, {rate / self.scale:,.1f} {self.unit}/s"
        if self.total:
            text = (f"{self.what}: {100 * self.done / self.total:3.0f}% of "
                    f"{self.total / self.scale:,.0f} {self.unit}, {rate / self.scale:,.1f} "
                    f"{self.unit}/s, {(self.total - self.done) / rate:.0f} s to go")
        print(f"\r{text}\x1b[K" if self.tty else text, end="" if self.tty else "\n",
              file=sys.stderr, flush=True)

    def finish(self):
        if self.tty and self.shown > self.start:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


# --- finding

def find_source(source, leave_out):
    """([paths], what is wrong or "") of one source; `leave_out` is a folder to pass by."""
    if source == STDLIB:
        library = sysconfig.get_paths()["stdlib"]
        paths = [p for p in walk(library, leave_out, STDLIB_SKIP) if p.endswith(".py")]
        return paths, "" if paths else f"{library} has no sources of this Python's library"
    if source == "-" or is_hub_name(source) or os.path.isfile(source) or is_saved(source):
        return [source], ""
    if os.path.isdir(source):
        paths = walk(source, leave_out, {"__pycache__"})
        return paths, "" if paths else "a folder without text files (links out are not followed)"
    return [], "neither a file nor a folder" if os.path.exists(source) else "no such file or folder"


def drop_copies(files):
    """(files, names of the others): without those that hold, byte for byte, what an earlier one
    holds: one would be trained on, the other validated on. The standard library stays whole."""
    sizes = Counter(os.path.getsize(f.path) for f in files if os.path.isfile(f.path))
    seen, kept, copies, progress = set(), [], [], Progress("looking for copies")
    for file in files:
        key = file.path
        if os.path.isfile(key) and sizes[os.path.getsize(key)] > 1 and file.folder != STDLIB:
            key = file_hash(file.path, progress)
        (copies if key in seen else kept).append(file)
        seen.add(key)
    progress.finish()
    return kept, [file.name for file in copies]


def find_files(sources, leave_out, folder, fields, limit, separator):
    """(Files, names of copies left out, names of files passed over, problems) of all sources, in
    order. `folder` takes what must be unpacked; `fields`, `limit`, `separator`: see unpack."""
    found, files, passed, problems = [], [], [], []
    for source in sources:
        paths, wrong = find_source(source, leave_out)
        inside = "" if paths == [source] else source
        found += [File(path, path, inside, is_jsonl(path)) for path in paths]
        problems += [(source, wrong)] if wrong else []
    found, copies = drop_copies(found)
    for number, file in enumerate(found):
        try:
            files.append(unpack(file, os.path.join(folder, f"source{number}"), fields, limit,
                                separator))
        except BadRecords as e:
            problems += e.args[0]
        except ImportError as e:
            problems.append((file.name, f"reading it needs {e.name}: pip install {e.name}"))
        except (ValueError, EOFError, RecursionError, zlib.error, csv.Error) as e:
            if file.folder and not file.name.lower().endswith(".parquet"):
                passed.append(file.name)
            else:
                problems.append((file.name, str(e)))
        except OSError as e:
            problems.append((file.name, e.strerror or str(e)))
    return files, copies, passed, problems


def source_name(source):
    """The name that data made of a source get: without folders and endings."""
    if source == "-":
        return "stdin"
    if source.startswith("hf:"):
        source = source[3:].split(":")[0]
    name = os.path.basename(os.path.abspath(source))
    return os.path.splitext(name.removesuffix(".gz"))[0] if os.path.isfile(source) else name


# --- downloading

def open_url(url, start=0):
    """(blocks of bytes, where they start, whole size or None, mark, sha256 or None) of an https or
    file address, from `start` on if the server can. The mark is another when the content is."""
    if url.startswith("file://"):
        stream = open(url2pathname(urlsplit(url).path), "rb")
        stat = os.fstat(stream.fileno())
        stream.seek(start)
        blocks = iter(lambda: stream.read(BLOCK), b"")
        return blocks, start, stat.st_size, str(stat.st_mtime_ns), None
    import requests  # tiktoken's own dependency; slow to import, so only here
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    reply = requests.get(url, headers=headers, timeout=20, stream=True)
    if reply.status_code == 404:
        raise FileNotFoundError("404: no such file there")
    reply.raise_for_status()
    start = start if reply.status_code == 206 else 0
    # Hugging Face names the sha256 of a large file as it redirects
    known = "".join(r.headers.get("X-Linked-ETag", "") for r in reply.history).strip('"')
    length = reply.headers.get("Content-Length", "")
    size = start + int(length) if length.isascii() and length.isdigit() else None
    mark = known or reply.headers.get("ETag") or reply.headers.get("Last-Modified") or ""
    return reply.iter_content(1 << 16), start, size, mark, known if len(known) == 64 else None


def fetch(url, path):
    """(file, sha256 or None): brings `url` to a file beside `path`, going on with what an earlier
    try of the same content left there."""
    blocks, start, size, mark, known = open_url(url)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    part = f"{path}.part-{hashlib.sha256(f'{size} {mark}'.encode()).hexdigest()[:8]}"
    done = os.path.getsize(part) if size and os.path.exists(part) else 0
    if 0 < done < size:
        blocks, start, *_ = open_url(url, done)
    elif done:
        blocks, start = (), done
    progress = Progress(f"downloading {os.path.basename(path)}", size or 0, start)
    with open(part, "ab") as f:
        f.truncate(start)
        for block in blocks:
            f.write(block)
            progress.add(len(block))
    progress.finish()
    if size and os.path.getsize(part) < size:
        raise OSError("the connection was cut")
    return part, known


def download(url, path, sha256=None):
    """Brings `url` to `path`, whole or not at all, checked by `sha256` or by the one that Hugging
    Face names. One that was cut short goes on where it stopped, as long as every try brings more.
    Returns the sha256; OSError says what failed, and a part stays for the next run."""
    before = 0
    while True:
        try:
            part, known = fetch(url, path)
            break
        except OSError as e:  # those of requests are, too
            left = sum(os.path.getsize(p) for p in glob.glob(f"{glob.escape(path)}.part-*"))
            if left <= before:
                kind = FileNotFoundError if isinstance(e, FileNotFoundError) else OSError
                raise kind(f"{url}: {str(e)[:200] or type(e).__name__}") from None
            before = left
            time.sleep(1)
    found, expected = file_hash(part), sha256 or known
    if not expected or found == expected:
        os.replace(part, path)
    for left in glob.glob(f"{glob.escape(path)}.part-*"):  # of another content
        os.remove(left)
    if expected and found != expected:
        raise OSError(f"{url}: what came has sha256 {found}, expected {expected}")
    return found


def file_hash(path, progress=None):
    """The sha256 of a file, in hexadecimal."""
    progress = progress or Progress(f"checking {os.path.basename(path)}", os.path.getsize(path))
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(BLOCK):
            digest.update(block)
            progress.add(len(block))
    progress.finish()
    return digest.hexdigest()


def shakespeare(given):
    """Path of the tiny-shakespeare text: `given`, or data/bin/shakespeare.txt, downloaded once."""
    path = given or os.path.join("data", "bin", "shakespeare.txt")
    if given and not os.path.isfile(path):
        raise DataError(f"{path}: no such file; --input names a copy of {SHAKESPEARE_URL}")
    if os.path.isfile(path):
        if (found := file_hash(path)) != SHAKESPEARE_SHA256:
            raise DataError(f"{path}: not the tiny-shakespeare text: its sha256 is {found}, "
                            f"expected {SHAKESPEARE_SHA256}; give text of your own as a SOURCE")
        return path
    try:
        download(SHAKESPEARE_URL, path, SHAKESPEARE_SHA256)
    except OSError as e:
        raise DataError(f"dataset shakespeare: could not be downloaded ({e}). Without a network: "
                        f"on another machine\n    curl -o input.txt {SHAKESPEARE_URL}\n"
                        "    and then --dataset shakespeare --input input.txt") from None
    return path


class Corpus(NamedTuple):
    """Files under one address."""
    url: str
    names: list         # of token files, the first is for validation
    tokens: bool        # shards of GPT-2's tokens in llm.c's format; else text or records
    separator: str | None = None


HUB = "https://huggingface.co/datasets/"
CORPORA = {
    "fineweb10B": Corpus(f"{HUB}kjj0/fineweb10B-gpt2/resolve/main/", [
        "fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, 104))], True),
    "fineweb_edu": Corpus(f"{HUB}kjj0/finewebedu10B-gpt2/resolve/main/", [
        "finewebedu_val_000000.bin", *(f"finewebedu_train_{i:06d}.bin" for i in range(1, 100))],
        True),
    "openwebtext": Corpus(f"{HUB}Skylion007/openwebtext/resolve/main/plain_text/", [
        f"train-{i:05d}-of-00080.parquet" for i in range(80)], False),
    "tinystories": Corpus(f"{HUB}roneneldan/TinyStories/resolve/main/", [
        "TinyStoriesV2-GPT4-train.txt"], False, "<|endoftext|>"),
}


def download_corpus(name, folder, mirror=None, shards=None):
    """Paths of a corpus's files (its first `shards` training files) in `folder`. Those that are
    there are compared with the sha256 in SHA256SUMS, the others downloaded; DataError."""
    corpus, sums = CORPORA[name], os.path.join(folder, "SHA256SUMS")
    known, paths = {}, []
    if os.path.isfile(sums):
        with open(sums, encoding="utf-8") as f:
            known = dict(reversed(line.split()) for line in f if len(line.split()) == 2)
    for file in corpus.names[:shards and shards + corpus.tokens]:
        path = os.path.join(folder, file)
        paths.append(path)
        if os.path.isfile(path) and file_hash(path) == known.get(file):
            continue
        try:
            digest = download(f"{(mirror or corpus.url).rstrip('/')}/{file}", path)
        except OSError as e:
            raise DataError(f"dataset {name}: could not be downloaded ({e}). The same command goes "
                            "on where this one stopped; --mirror names a copy, https:// or file://"
                            ) from None
        with open(sums, "a", encoding="utf-8") as f:  # the last line of a name counts
            f.write(f"{digest}  {file}\n")
    return paths


# --- unpacking

def unpack(file, target, fields, limit, separator):
    """The File itself where it can be read in pieces, else that of what it was unpacked to in
    `target`: at most `limit` records, and of a record that has all `fields` only these. A text is
    one document, or several parted by lines that hold only the `separator`, "": blank lines."""
    name = file.name.lower().removesuffix(".gz")
    if (is_hub_name(file.name) or os.path.isdir(file.path)
            or name.endswith((".parquet", ".csv", ".tsv"))):
        return write_records(records(file.path, fields), file, target, fields, limit)
    packed = name == "-" or name != file.name.lower()
    if not packed and not name.endswith(".json") and (is_jsonl(name) or separator is None):
        return file
    with open_bytes(file.path) as stream:
        first = stream.peek(BLOCK).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
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
            while block := stream.read(BLOCK):
                out.write(block)
                progress.add(len(block))
            progress.finish()
    return file._replace(path=target, records=lines)


def write_records(found, file, target, fields, limit):
    """Writes records, as (where, dictionary), as JSON Lines to `target`; its File. BadRecords with
    all that cannot be read."""
    progress, bad = Progress(f"unpacking {file.name}", scale=1, unit="records"), []
    with open(target, "w", encoding="utf-8") as out:
        for where, record in itertools.islice(found, limit):
            if isinstance(record, ValueError):
                bad.append((where, str(record)))
                if len(bad) == MANY:
                    break
                continue
            if not isinstance(record, dict):
                raise ValueError("expected a list of records (objects with named fields)")
            kept = {name: record[name] for name in fields if name in record}
            json.dump(kept if len(kept) == len(fields) else record, out, default=str)
            out.write("\n")
            progress.add(1)
    progress.finish()
    if bad:
        raise BadRecords(bad)
    return file._replace(path=target, records=True)


def split_documents(stream, separator):
    """Yields the documents of a text, without the newlines around them."""
    lines = []
    for line in io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""):
        if line.strip() != separator:
            lines.append(line)
        else:
            yield "".join(lines).strip("\r\n")
            lines = []
    yield "".join(lines).strip("\r\n")
