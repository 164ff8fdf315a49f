"""Records (dictionaries with named fields) from files of many formats and from data sets.

    .jsonl .ndjson          one record per line; also files with any other extension
    .json                   a list of records, one record, or one per line
    .csv .tsv               tables with column names in the first line
    .parquet                needs pyarrow
    any text format as .gz
    a folder                of such files, or saved by the package datasets
    hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT    of the hub, streamed

Each record has a location, a text for messages, e.g. FILE:LINE.
"""

import csv
import gzip
import io
import itertools
import json
import math
import os
import re
import zlib

from data.meta import is_written
from train.base.errors import DataError, SetupError, UserError, echo, require

MAX_PROBLEMS = 20         # after which reading stops
# Folders of Python's library, or of a package, that are not used as text: tests, character tables,
# installed packages.
STDLIB_SKIP = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages",
               "dist-packages", "__pycache__"}
SOURCES = ("files (.jsonl, .json, .csv, .tsv, .parquet, also as .gz), or folders of these; Hugging "
           "Face datasets (hf:NAME, hf:NAME:CONFIG, hf:NAME:CONFIG:SPLIT, or a folder)")
RECORD_EXTENSIONS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
READ_ERRORS = (ValueError, EOFError, OverflowError, RecursionError, zlib.error, csv.Error, OSError)
NOT_UTF8 = re.compile("[\udc80-\udcff]")  # invalid bytes that were read with surrogateescape
NOT_FOUND = "no such file or folder; a dataset of the Hugging Face hub is hf:OWNER/NAME"
CONVERT = "not UTF-8 text; convert the file (iconv -f ENCODING -t utf-8)"


def raise_problems(problems, hint=""):
    """Raise a DataError that lists (location, problem) pairs, if any, and ends with `hint`."""
    lines = [": ".join(problem) for problem in problems]
    if len(lines) > 1:
        lines.insert(0, f"{len(lines)} problems")
    if lines:
        raise DataError("\n  - ".join(lines) + hint)


# -----------------------------------------------------------------------------
# kinds of sources

def is_saved(folder):
    """Return whether a folder was written by `save_to_disk` of Hugging Face's package datasets."""
    return any(os.path.isfile(os.path.join(folder, name))
               for name in ("dataset_info.json", "dataset_dict.json"))


def is_hub_name(source):
    """Return whether `source` is a data set's name on the hub, hf:..., not a file."""
    return source.startswith("hf:")


def has_record_extension(path):
    """Return whether a path has the extension of a file with records, also before .gz."""
    return path.lower().removesuffix(".gz").endswith(RECORD_EXTENSIONS)


def open_bytes(path):
    """Return the file `path` as an open binary stream; a .gz file is decompressed."""
    return gzip.open(path) if path.lower().endswith(".gz") else open(path, "rb")


def walk(folder, skipped_names=()):
    """Return the paths of the regular files below `folder`, in the same order on every machine.

    Left out: hidden files and folders, folders with one of skipped_names, folders of prepared data,
    links to folders, and links to files outside `folder`, except from a snapshot in the hub's cache
    to blobs there; the number of links to files outside is printed. Raises DataError for a folder
    that cannot be read, and if `folder` itself is prepared data.
    """
    def fail(error):
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}; make it readable")
    if is_written(folder):
        raise DataError(f"{folder}: is prepared data; name the files from which it was made")
    paths = []
    n_outside = 0
    inside = [os.path.join(os.path.realpath(folder), "")]
    # In the cache of the Hugging Face hub, the files of a snapshot are links to blobs.
    if snapshot := re.match("((.*)/.*)/snapshots/[0-9a-f]{40}/", inside[0]):
        inside += [f"{repo}/blobs/" for repo in snapshot.groups()]  # and those of the whole cache
    for here, folders, names in os.walk(folder, onerror=fail):
        folders[:] = sorted(
            name for name in folders if name[0] != "." and name not in skipped_names
            and not is_written(os.path.join(here, name)))
        for name in sorted(names):
            path = os.path.join(here, name)
            if name[0] == "." or not os.path.isfile(path):
                continue
            if os.path.islink(path) and not os.path.realpath(path).startswith(tuple(inside)):
                n_outside += 1
            else:
                paths.append(path)
    if n_outside:
        echo(f"Skipped: {n_outside:,} links in {folder} to files outside it")
    return paths


# -----------------------------------------------------------------------------
# formats: generators of (location, record), with a ValueError for a record that cannot be read

def parse_json(content):
    """Return the value of JSON in UTF-8 bytes, or a ValueError, not raised, if it is invalid."""
    try:
        return json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return ValueError(f"not valid JSON: {error}")


def json_lines(lines, name, columns=None):
    """Yield (location, parse_json(line)) for each nonblank line of bytes; `columns` is not used."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield f"{name}:{number}", parse_json(line)


def json_values(stream, name, columns):
    """Yield (location, value) for each record in a .json file: a list, one record, or one per line.

    There is one per line if the first line is a complete record; later invalid lines are yielded as
    ValueErrors, not raised. Raises ValueError for other invalid content. `columns` is not used.
    """
    lines = [stream.readline()]
    while lines[-1].isspace():
        lines.append(stream.readline())
    if isinstance(parse_json(lines[-1]), dict):  # one record per line, at any size
        yield from json_lines(itertools.chain(lines, stream), name)
        return
    values = parse_json(b"".join(lines) + stream.read())
    if isinstance(values, ValueError):
        raise values
    for i, record in enumerate(values if isinstance(values, list) else [values]):
        yield f"{name}: record {i}", record


def check_columns(names, columns, option="--field"):
    """Raise ValueError, with advice to use `option`, if `names` lacks one of `columns`, if any."""
    for column in columns or ():
        if column not in names:
            known = ", ".join(map(repr, names)) or "none"
            raise ValueError(f"no field {column!r}; its fields are {known}: choose with {option}")


def check_header(names, columns):
    """Raise ValueError unless `names` has each of `columns` once (`None`: without duplicates)."""
    check_columns(names, columns)
    for name in columns or names:
        if name and names.count(name) > 1:
            raise ValueError(f"two columns {name!r}; rename or delete one")


def csv_rows(stream, name, columns):
    """Yield (location, row) for each row in the binary stream of a .csv or .tsv file.

    A row is {column: text} with all columns, or a ValueError, not raised, if it is invalid. The
    extension of `name`, also before .gz, selects the delimiter. Raises ValueError as check_header
    and for a header that is not UTF-8, csv.Error for invalid quotes in the header.
    """
    csv.field_size_limit(1 << 30)  # the default, 128 kB, is too small for documents
    # An invalid byte becomes a surrogate, so that only this row is bad.
    text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
    is_tsv = name.lower().removesuffix(".gz").endswith(".tsv")
    # Not strict, a quote that is not closed would silently swallow the rows after it.
    rows = csv.reader(text, delimiter="\t" if is_tsv else ",", strict=True)
    header = next(filter(None, rows), [])  # [] is a blank line
    if NOT_UTF8.search("".join(header)):
        raise ValueError(CONVERT)
    check_header(header, columns)
    while True:
        first = rows.line_num + 1
        try:
            values = next(filter(None, rows))
            row = dict(zip(header, values))
            # Too many or too few: the values could be in the wrong columns, or parts of a text.
            if len(values) != len(header):
                row = ValueError(f"not the {len(header)} values of the header; quote texts")
            elif NOT_UTF8.search("".join(values)):
                row = ValueError(CONVERT)
        except StopIteration:
            return
        except csv.Error:
            row = ValueError(f"the quotes of a value in lines {first} to {rows.line_num} do "
                             "not end with it; quote whole values, and double the quotes in them")
        yield f"{name}:{rows.line_num}", row


def parquet_rows(stream, name, columns):
    """Yield (location, row as a dict) for the rows of a parquet file, an open binary stream."""
    parquet = require("pyarrow.parquet", "reading it")
    with parquet.ParquetFile(stream) as file:
        check_header(file.schema_arrow.names, columns)
        batches = file.iter_batches(1000, columns=columns)
        for i, row in enumerate(row for batch in batches for row in batch.to_pylist()):
            yield f"{name}: record {i}", row


def dataset_rows(source):
    """Yield (location, row as a dict) for each row of a data set, read by the package datasets.

    source: a saved folder (of several splits: train), or a name on the hub, hf:NAME,
    hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT (default: train), which is streamed. Raises ValueError
    if it cannot be read, SetupError without the package.
    """
    datasets = require("datasets", f"reading {source}")
    try:
        if is_saved(source):
            dataset = datasets.load_from_disk(source)
            if isinstance(dataset, dict) and "train" not in dataset:
                raise ValueError(f"no split train; name a split's folder: {', '.join(dataset)}")
            dataset = dataset["train"] if isinstance(dataset, dict) else dataset
            dataset = dataset.with_format(None)  # that of set_format() is saved: tensors, columns
        else:
            name, config, split = [*source.removeprefix("hf:").split(":"), "", ""][:3]
            dataset = datasets.load_dataset(name, config or None, split=split or "train",
                                            streaming=True)
        for number, record in enumerate(dataset):
            yield f"{source}: record {number}", record
    except Exception as error:  # of the network, the hub, or any format
        raise ValueError(f"datasets: {type(error).__name__}: {str(error)[:300]}") from None


# Files with any other extension have one JSON record per line.
READERS = {".json": json_values, ".csv": csv_rows, ".tsv": csv_rows, ".parquet": parquet_rows}


def records(source, columns=None):
    """Yield (location, record) for each record of a file, a saved data set or one on the hub.

    A file with an unknown extension has one JSON record per line. A record is a dict, or a
    ValueError, not raised, if it cannot be read. columns: names that a table (.csv, .tsv, .parquet)
    must have (`None`: any); of a parquet file, only these are read. Raises one of READ_ERRORS if
    the source cannot be read, SetupError without a required package.
    """
    if os.path.isdir(source) or is_hub_name(source):
        yield from dataset_rows(source)
        return
    extension = os.path.splitext(source.lower().removesuffix(".gz"))[1]
    read = READERS.get(extension, json_lines)
    with open_bytes(source) as stream:
        for where, record in read(stream, source, columns):
            if not isinstance(record, (dict, ValueError)):
                record = ValueError(f"expected an object, got {json.dumps(record)[:40]}")
            yield where, record


# -----------------------------------------------------------------------------
# several sources

def source_records(source):
    """Yield (location, record) like records(), also for a folder; READ_ERRORS become DataErrors."""
    if os.path.isdir(source) and not is_saved(source):
        paths = [path for path in walk(source) if has_record_extension(path)]
        if not paths:
            raise DataError(f"{source}: no file in this folder has records; expected "
                            f"{', '.join(RECORD_EXTENSIONS)}")
        for path in paths:
            yield from source_records(path)
        return
    try:
        yield from records(source)
    except FileNotFoundError:
        raise DataError(f"{source}: {NOT_FOUND}") from None
    except READ_ERRORS as error:
        raise DataError(f"{source}: cannot be read: {error}") from None


def without_nan(record):
    """Return a copy of a record with `None` for each field that is NaN, pandas' missing value."""
    return {name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in record.items()}


def parse_each(stream, parse, problems, max_problems=MAX_PROBLEMS):
    """Yield parse(record) for each good record of `stream`, an iterable of (location, record).

    A field that is NaN is replaced by `None` first. A record that is a ValueError, or for which
    `parse` raises ValueError, RecursionError or UserError (but not SetupError), is bad: (location,
    message) is appended to the list `problems`, and the generator returns when it has max_problems
    entries.
    """
    for where, record in stream:
        try:
            if isinstance(record, ValueError):
                raise record
            yield parse(without_nan(record))
        except SetupError:  # e.g. a missing package
            raise
        except (ValueError, RecursionError, UserError) as error:
            problems.append((where, str(error)))
            if len(problems) >= max_problems:
                break


def parse_records(sources, parse, limit=None, skip_bad=None):
    """Yield parse(record) for the records of all sources, at most `limit` results (`None`: all).

    sources: names, see source_records, or iterables of (location, record). parse: raises ValueError
    for a bad record. Bad records are reported after the last result.
    skip_bad: True prints the number of bad records and the first one. False raises a DataError that
    lists the bad records and names the option --skip_bad; reading stops after MAX_PROBLEMS (20) bad
    records. `None`: as False, for a command without this option.
    Raises DataError for a source that cannot be read.
    """
    bad = []
    streams = (source_records(s) if isinstance(s, str) else s for s in sources)
    results = parse_each(itertools.chain.from_iterable(streams), parse, bad,
                         math.inf if skip_bad else MAX_PROBLEMS)
    yield from itertools.islice(results, limit)
    if bad and skip_bad:
        echo(f"Left out {len(bad):,} bad records, the first: {': '.join(bad[0])}")
    elif bad:
        raise_problems(bad, "" if skip_bad is None else "\n--skip_bad leaves such records out")
