"""Records (dictionaries of named fields) of every format, for data.prepare, data.chat, data.labels.

    .jsonl .ndjson          a record a line; so is a file of any other ending
    .json                   a list of records, one record, or one a line
    .csv .tsv               tables whose first line names the columns
    .parquet                needs pyarrow
    any of these as .gz; - for JSON from standard input
    a folder                saved by Hugging Face's datasets, or whatever that package can load
    hf:NAME, hf:NAME:CONFIG, hf:NAME:CONFIG:SPLIT, or OWNER/NAME    of its hub, streamed

A record comes with the place where it stands, FILE:LINE where there are lines, so that a message
can name it.
"""

import csv
import gzip
import io
import json
import os
import re
import sys
import zlib

from train.base.errors import DataError, echo

JSON_BYTES = 1 << 30  # a larger list of records would need too much memory
MANY = 1000           # problems after which reading for more is a waste of time
SHOWN = 20            # lines of problems in one message
BOM = b"\xef\xbb\xbf"
# Folders of Python's library, or of a package, that are not its own code and prose: tests, tables
# of characters, installed packages.
STDLIB_SKIP = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages",
               "dist-packages", "__pycache__"}
SOURCES = ("files (.jsonl, .json, .csv, .tsv, .parquet, also as .gz); Hugging Face datasets "
           "(OWNER/NAME, hf:NAME, hf:NAME:CONFIG, hf:NAME:CONFIG:SPLIT, or a folder)")
ENDINGS = r"\.(jsonl|ndjson|json|csv|tsv|parquet|txt|md|gz|pt)"


# --- problems

def raise_problems(problems, hint=""):
    """DataError with all of (where, what is wrong), a line for those alike, if there are any."""
    alike = {}
    for where, what in problems:
        alike.setdefault(what, []).append(where)
    lines = [", ".join(places[:3]) + f" and {len(places) - 3:,} more" * (len(places) > 3)
             + f": {what}" * bool(what) for what, places in alike.items()]
    if len(problems) >= MANY:
        lines.append("there may be more: reading stopped here")
    if len(lines) > 1:
        lines = [f"{len(lines)} problems", *lines[:SHOWN], *["... and more"][:len(lines) > SHOWN]]
    if lines:
        raise DataError("\n  - ".join(lines) + hint)


# --- what a source is

def is_jsonl(path):
    return path.lower().removesuffix(".gz").endswith((".jsonl", ".ndjson"))


def is_saved(folder):
    """Whether Hugging Face's datasets saved this folder."""
    found = {name for name in ("state.json", "dataset_info.json", "dataset_dict.json")
             if os.path.isfile(os.path.join(folder, name))}
    return "dataset_dict.json" in found or len(found) == 2


def is_hub_name(source):
    """Whether a source is a dataset of the hub: hf:..., or OWNER/NAME where there is no file."""
    owned = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source) and not os.path.exists(source)
    return source.startswith("hf:") or bool(owned) and not re.search(ENDINGS + "$", source.lower())


def open_bytes(path):
    """A file, plain or compressed, or standard input, as a stream of bytes."""
    if path == "-":
        return sys.stdin.buffer
    return gzip.open(path) if path.lower().endswith(".gz") else open(path, "rb")


def walk(folder, leave_out, names_out):
    """Paths of the regular files under `folder`, in an order that is the same on every machine.
    Hidden files and folders are left out, and links to what lies elsewhere."""
    found, inside = [], os.path.join(os.path.realpath(folder), "")
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in names_out
                            and os.path.abspath(os.path.join(here, name)) != leave_out)
        paths = [os.path.join(here, name) for name in sorted(names) if name[0] != "."]
        found += [path for path in paths if os.path.isfile(path) and (
            not os.path.islink(path) or os.path.realpath(path).startswith(inside))]
    return found


# --- each format. (where, record), or (where, ValueError) in place of one that cannot be read

def parse_line(line):
    """The value of a line of JSON, bytes. ValueError says what is wrong with it."""
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None
    except ValueError as error:
        raise ValueError(f"not valid JSON: {getattr(error, 'msg', error)}") from None
    except RecursionError:
        raise ValueError("not valid JSON: nested too deeply") from None


def json_lines(stream, name):
    for number, line in enumerate(stream, 1):
        line = line.removeprefix(BOM) if number == 1 else line
        if line.strip():
            try:
                yield f"{name}:{number}", parse_line(line)
            except ValueError as error:
                yield f"{name}:{number}", error


def json_values(stream, name):
    """Of a JSON file: a list of records, one record, or one a line."""
    content = stream.read(JSON_BYTES).removeprefix(BOM)
    if len(content) >= JSON_BYTES - len(BOM):
        raise ValueError("expected a list of records of less than 1 GB, or one record a line; "
                         "`jq -c '.[]' FILE > FILE.jsonl` makes lines of a list")
    try:
        found = json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("not valid JSON: nested too deeply") from None
    except ValueError as error:
        if getattr(error, "msg", "") == "Extra data" and content.lstrip()[:1] == b"{":
            yield from json_lines(io.BytesIO(content), name)
            return
        raise ValueError(f"not valid JSON: {error}") from None
    for i, record in enumerate(found if isinstance(found, list) else [found]):
        yield f"{name}: record {i}", record


def check_columns(names, columns):
    """ValueError where a table has no column of the name of a wanted one."""
    for column in columns or ():
        if column not in (names or ()):
            known = ", ".join(map(repr, names or ())) or "none"
            raise ValueError(f"no field {column!r}; its fields are {known}: choose with --field")


def csv_rows(path, columns):
    csv.field_size_limit(1 << 30)  # a document may well be longer than 128 kB
    tabs = path.lower().removesuffix(".gz").endswith(".tsv")
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="") as text:
        rows = csv.DictReader(text, delimiter="\t" if tabs else ",")
        check_columns(rows.fieldnames, columns)
        for row in rows:
            if more := row.pop(None, ()):  # or the values would stand in the wrong columns
                row = ValueError(f"{len(rows.fieldnames) + len(more)} values for "
                                 f"{len(rows.fieldnames)} columns; quote what holds a "
                                 f"{'tab' if tabs else 'comma'}")
            yield f"{path}:{rows.line_num}", row


def parquet_rows(path, columns):
    """Of a parquet file, some thousand rows in memory at a time."""
    import pyarrow.parquet
    source, count = path, 0
    if path.lower().endswith(".gz"):  # it is read from its end
        with gzip.open(path) as stream:
            source = io.BytesIO(stream.read())
    with pyarrow.parquet.ParquetFile(source) as file:
        check_columns(file.schema_arrow.names, columns)
        for batch in file.iter_batches(1000, columns=columns):
            for i, row in enumerate(batch.to_pylist()):
                yield f"{path}: record {count + i}", row
            count += len(batch)


def dataset_rows(source, split, subset):
    """Of a dataset of the package `datasets`: of its hub, streamed, or a folder."""
    import datasets
    try:
        if is_saved(source):
            found = datasets.load_from_disk(source)
            found = found[split] if isinstance(found, dict) else found
        else:
            name, config, part = source, "", ""
            if source.startswith("hf:"):
                name, config, part = (source[3:].split(":") + ["", ""])[:3]
            found = datasets.load_dataset(name, config or subset, split=part or split,
                                          streaming=True)
        for number, record in enumerate(found):
            yield f"{source}: record {number}", record
    except Exception as error:  # of the network, the hub, or the many formats behind it
        raise ValueError(f"datasets: {type(error).__name__}: {str(error)[:300]}") from None


def records(source, columns=None, split="train", subset=None):
    """Yields (where, record) of a source, with a ValueError in place of a record that cannot be
    read. columns: the only ones to read of a table, which must have them. split, subset: of a
    dataset, where its name does not say. Raises what reading raises, ValueErrors for one."""
    name = source.lower().removesuffix(".gz")
    if os.path.isdir(source) or is_hub_name(source):
        yield from dataset_rows(source, split, subset)
    elif name.endswith(".parquet"):
        yield from parquet_rows(source, columns)
    elif name.endswith((".csv", ".tsv")):
        yield from csv_rows(source, columns)
    else:
        with open_bytes(source) as stream:
            yield from (json_values if name.endswith((".json", "-")) else json_lines)(stream,
                                                                                      source)


# --- all of them

def source_records(source, split, subset):
    """records() with DataErrors that name the source."""
    try:
        yield from records(source, None, split, subset)
    except FileNotFoundError:
        raise DataError(f"{source}: no such file or folder, and no name of a dataset (OWNER/NAME, "
                        "or hf:NAME)") from None
    except ImportError as error:
        missing = "" if os.path.exists(source) else "no such file; "
        raise DataError(f"{source}: {missing}reading it needs {error.name}: pip install "
                        f"{error.name}") from None
    except (ValueError, EOFError, RecursionError, zlib.error, csv.Error, OSError) as error:
        raise DataError(f"{source}: cannot be read: {error}") from None


def parse_records(sources, parse, limit=None, skip_bad=False, log=echo, split="train",
                  subset=None):
    """Yields parse(record) of the records of all sources, of the first `limit` good ones. At the
    end: DataError with all that are bad, for which `parse` raises ValueError; or, with skip_bad,
    says how many there were. sources: names, or lists of (where, record)."""
    bad, taken = [], 0
    for source in sources:
        found = source_records(source, split, subset) if isinstance(source, str) else source
        for where, record in found:
            try:
                if isinstance(record, ValueError):
                    raise record
                result = parse(record)
            except (ValueError, RecursionError) as error:
                bad.append((where, str(error)))
                if len(bad) >= MANY and not skip_bad:
                    raise_problems(bad, "\n--skip_bad leaves such records out")
                continue
            yield result
            taken += 1
            if taken == limit:
                break
        if taken == limit:
            break
    if bad and skip_bad:
        log(f"Left out {len(bad):,} bad records, the first: {': '.join(bad[0])}")
    elif bad:
        raise_problems(bad, "\n--skip_bad leaves such records out")
