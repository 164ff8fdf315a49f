"""data/records.py: every format, for every command, and what cannot be read named by its place."""

import csv
import gzip
import json
import os
import re

import pytest

from data import prepare
from data.labels import read_labelled_texts
from data.prepare import chat, labels, prompts
from data.records import parse_records, records, walk
from train.base.errors import DataError, SetupError, UserError

ROWS = [dict(prompt=f"what is {i}?", response=f"it is {i}", text=f"the text, {i}\n\"quoted\"",
             label="ab"[i % 2]) for i in range(120)]


def write(folder, name, rows):
    """`rows` as a file of the format that its name says; its path."""
    plain = folder / name.removesuffix(".gz")
    if ".parquet" in name:
        pa = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pa.Table.from_pylist(rows), plain)
    elif ".csv" in name or ".tsv" in name:
        with open(plain, "w", newline="", encoding="utf-8") as f:
            writer = csv.DictWriter(f, list(rows[0]), delimiter="\t" if ".tsv" in name else ",")
            writer.writeheader()
            writer.writerows(rows)
    elif name.startswith("list"):
        plain.write_text(json.dumps(rows, indent=1))
    else:
        plain.write_text("\ufeff" + "".join(json.dumps(row) + "\n\n" for row in rows))
    if name.endswith(".gz"):
        (folder / name).write_bytes(gzip.compress(plain.read_bytes()))
    return str(folder / name)


def prepared(folder):
    """The content of a prepared folder but for the name of its source."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "meta.json"} | {
        "meta": {k: v for k, v in json.loads((folder / "meta.json").read_text()).items()
                 if k != "sources"}}


@pytest.mark.parametrize("name", [
    "a.jsonl", "a.ndjson.gz", "a.json", "a.json.gz", "list.json", "list.JSON.gz", "a.csv",
    "a.csv.gz", "a.tsv", "a.tsv.gz", "a.parquet", "saved", "hub"])
def test_all_three_commands_read_every_format_alike(tmp_path, monkeypatch, name):
    (tmp_path / "one").mkdir()
    sources = [write(tmp_path / "one", "one.jsonl", ROWS)]
    if name in ("saved", "hub"):
        datasets = pytest.importorskip("datasets")
        found = datasets.Dataset.from_list(ROWS)
        found.save_to_disk(tmp_path / "saved")
        asked = []
        monkeypatch.setattr(datasets, "load_dataset", lambda *args, **more: (
            asked.append((*args, more["split"])), found)[1])
        names = ["hf:o/n:c:s", "hf:o/n", "hf:n"]
        sources += [str(tmp_path / "saved")] if name == "saved" else names
    else:
        sources += [write(tmp_path, name, ROWS)]
    for module in (prepare, chat, labels):
        for i, source in enumerate(sources):
            out = tmp_path / f"{module.__name__}{i}"
            assert module.main([source, "--out", str(out)]) == 0
            assert prepared(out) == prepared(tmp_path / f"{module.__name__}0")
    if name == "hub":
        assert asked == [("o/n", "c", "s"), ("o/n", None, "train"), ("n", None, "train")] * 3


def test_all_files_of_records_in_a_folder_are_read(tmp_path):
    """By the names of these files, the package datasets would read only one as training data."""
    for i, name in enumerate(("train.jsonl", "more.jsonl", "sub/c.csv.gz", "x.json.bak")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path, name, ROWS[i * 10:i * 10 + 10])
    (tmp_path / "sub/c.csv").unlink()
    found = [row["text"] for row in parse_records([str(tmp_path)], dict)]
    assert sorted(found) == sorted(row["text"] for row in ROWS[:30])
    with pytest.raises(DataError, match="more.jsonl:3: not valid JSON"):
        write(tmp_path, "more.jsonl", ROWS[:1])
        with open(tmp_path / "more.jsonl", "a") as f:
            f.write("{")
        list(parse_records([str(tmp_path)], dict))


def test_prepared_data_in_a_source_are_left_out(tmp_path):
    """Of this command, at a second run, and of others: a tokenizer of ranks would be text."""
    (tmp_path / "src").mkdir()
    write(tmp_path / "src", "a.jsonl", ROWS)
    for folder in (tmp_path / "out", tmp_path / "src", tmp_path / "src"):
        for module in (prepare, chat, labels, prompts):
            out = folder / module.__name__
            assert module.main([str(tmp_path / "src"), "--out", str(out),
                                "--tokenizer", "byte"]) == 0
            assert prepared(out) == prepared(tmp_path / "out" / module.__name__)
    (tmp_path / "src/own").mkdir()
    (tmp_path / "src/own/meta.json").write_text('{"text": "of another program"}')
    assert len(list(parse_records([str(tmp_path / "src")], dict))) == 121


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "a/b").mkdir(parents=True)
    write(tmp_path, "a/c.jsonl", ROWS)
    scandir = os.scandir

    def deny(path):
        if str(path).endswith("/b"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)
    monkeypatch.setattr(os, "scandir", deny)
    for read in (lambda source: list(parse_records([source], dict)),
                 lambda source: prepare.prepare([source], str(tmp_path / "out"))):
        with pytest.raises(DataError, match="a/b: cannot be read: Permission denied"):
            read(str(tmp_path / "a"))


DEEP = "[" * 200_000


@pytest.mark.parametrize("module", [prepare, chat, labels])
@pytest.mark.parametrize("name, content, message", [
    ("a.jsonl", '{"a": 1}\n' + DEEP, "a.jsonl:2: not valid JSON: TOO DEEP"),
    ("a.json", DEEP, "not valid JSON: TOO DEEP"),
    ("a.json", '[{"text": 1', "not valid JSON: Expecting ',' delimiter"),
    ("a.jsonl", b'{"text": "x"}\n\xff\n', "a.jsonl:2: not valid JSON: 'utf-8' codec"),
    ("a.jsonl", "1" * 5000, "a.jsonl:1: not valid JSON: Exceeds the limit"),
    ("a.csv", b"text,label\n\xff,1\n", "a.csv:2: not UTF-8"),
    ("a.csv", "text,label\nx,a\ny,b,c\n", "a.csv:3: not the 2 values of the header; quote"),
    ("a.tsv", "text\tlabel\nx\ta\tb\n", "a.tsv:2: not the 2 values of the header; quote"),
    ("a.csv", "text,label\nx\ny,a\n", "a.csv:2: not the 2 values of the header; quote texts"),
    ("a.jsonl.gz", b"plain", "gzip"), ("a.parquet", b"PAR1", "arquet"),
    ("a.jsonl.gz", gzip.compress(bytes(9000), mtime=0)[:30], "end-of-stream")])
def test_what_cannot_be_read_is_one_line_that_says_where(tmp_path, capsys, module, name, content,
                                                          message):
    if ".parquet" in name:
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert module.main([str(tmp_path / name), "--out", str(tmp_path / "out")]) == 2
    # Python 3.11, 3.14
    err = re.sub("maximum recursion|Stack overflow", "TOO DEEP", capsys.readouterr().err)
    assert message in err and f"{tmp_path}/{name}" in err and len(err) < 1000, err
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_source_that_is_not_there(tmp_path, capsys):
    for module in (prepare, chat, labels):
        assert module.main([str(tmp_path / "none.csv"), "--out", str(tmp_path / "out")]) == 2
        assert "none.csv: no such file or " in capsys.readouterr().err.lower()
    with pytest.raises(DataError, match="o/n: no such file or folder; a .* hub is hf:OWNER/NAME"):
        list(parse_records(["o/n"], dict))


def test_bad_records_are_counted_and_said(tmp_path, capsys):
    """In chats and labels, --skip_bad or not, --num_samples or not."""
    rows = [json.dumps(row) for row in ROWS]
    rows[3:3] = ["{", '{"prompt": [], "response": 3, "text": 5}', "7"]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(rows))
    for module in (chat, labels):
        out = str(tmp_path / module.__name__)
        assert module.main([str(path), "--out", out]) == 2
        err = capsys.readouterr().err
        assert all(f"a.jsonl:{n}: " in err for n in (4, 5, 6)) and "--skip_bad leaves" in err
        assert module.main([str(path), "--out", out, "--skip_bad"]) == 0
        assert f"Left out 3 bad records, the first: {path}:4: not" in capsys.readouterr().out
    out = str(tmp_path / "few")
    assert chat.main([str(path), "--out", out, "--num_samples", "60"]) == 2
    assert "3 problems" in capsys.readouterr().err
    assert chat.main([str(path), "--out", out, "--num_samples", "60", "--skip_bad"]) == 0
    assert "Left out 3 bad records" in capsys.readouterr().out
    meta = json.loads((tmp_path / "few" / "meta.json").read_text())
    assert sum(part["chats"] for part in meta["splits"].values()) == 60


@pytest.mark.parametrize("bad", [range(2), range(5, 120), [119]])
def test_records_that_need_too_much_are_bad_records(tmp_path, capsys, bad):
    """E.g. a message that needs more memory than a template gets."""
    def parse(record):
        if ROWS.index(record) in bad:
            raise UserError("too long")
        return record
    path = write(tmp_path, "a.jsonl", ROWS)  # every second line is blank
    first = f"{path}:{2 * bad[0] + 1}"
    with pytest.raises(DataError, match=f"{first}: too long(.|\n)*\n--skip_bad"):
        list(parse_records([path], parse, skip_bad=False))
    assert len(list(parse_records([path], parse, skip_bad=True))) == 120 - len(bad)
    said = capsys.readouterr().out
    assert said == f"Left out {len(bad)} bad records, the first: {first}: too long\n"


def test_a_missing_package_is_no_bad_record(tmp_path):
    """--skip_bad left out every record, e.g. of chats without jinja2."""
    def parse(record):
        raise SetupError("pip install jinja2")
    with pytest.raises(SetupError, match="jinja2"):
        list(parse_records([write(tmp_path, "a.jsonl", ROWS)], parse, skip_bad=True))


def test_a_date_that_python_does_not_have_is_one_line(tmp_path, capsys):
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"text": ["a"], "day": pa.array([2**31 - 1], pa.int32()).cast(pa.date32())})
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="a.parquet"):
        list(parse_records([str(tmp_path / "a.parquet")], dict))


def test_all_values_of_a_format(tmp_path):
    """Lines, one object and lists of anything; tables only of the columns that are wanted."""
    (tmp_path / "one.json").write_text('{"a":\n 1}')
    assert list(records(str(tmp_path / "one.json"))) == [(f"{tmp_path}/one.json: record 0",
                                                          {"a": 1})]
    path = write(tmp_path, "a.parquet", ROWS * 20)  # 2,400, read a thousand at a time
    found = list(records(path, ["label"]))
    assert found[119] == (f"{path}: record 119", {"label": "b"})
    assert [place for place, _ in found] == [f"{path}: record {i}" for i in range(2400)]
    with pytest.raises(ValueError, match="no field 'x'; its fields are 'prompt', "):
        list(records(path, ["x"]))


def test_reading_for_problems_ends(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text("{\n" * 5000)
    with pytest.raises(DataError, match="^20 problems(.*\n){20}"):
        list(parse_records([str(tmp_path / "a.jsonl")], dict))
    assert list(parse_records([str(tmp_path / "a.jsonl")], dict, skip_bad=True)) == []
    assert capsys.readouterr().out.startswith("Left out 5,000 bad records")


@pytest.mark.parametrize("record", [
    dict(messages=[dict(role=["user"], content="x")]), dict(messages=[dict(role={}, content="x")]),
    dict(messages=[dict(role="user", content=[dict(text=5)])]), dict(messages="x"),
    dict(prompt=5, response="x"), dict(prompt="x", response=[5])])
def test_chats_of_other_types_are_bad_records(record):
    with pytest.raises(ValueError):
        chat.to_messages(record)


def test_lines_in_a_json_file_are_read_one_by_one(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("".join(json.dumps(dict(text=f"line {i}")) + "\n" for i in range(200)))
    assert [r["text"] for _, r in records(str(path))] == [f"line {i}" for i in range(200)]


@pytest.mark.parametrize("name, content, lines", [
    ("a.csv", 'text\none\n"two\nthree\nfour\n', "3 to 5"),
    ("a.tsv", 'text\tlabel\n"Great movie\tpos\nbad\tneg\n', "2 to 3")])
def test_a_quote_that_is_not_closed_swallows_no_rows(tmp_path, name, content, lines):
    (tmp_path / name).write_text(content)
    *_, (_, last) = records(str(tmp_path / name))
    assert isinstance(last, ValueError) and f"lines {lines} do not end with it" in str(last)


def test_a_byte_that_is_not_utf8_costs_one_row_of_a_table(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.csv").write_bytes(b"text,n\n\xc3\xa9,1\nb\xff,2\nc,3\n")
    found = list(records(str(tmp_path / "in/a.csv")))
    assert [row["text"] for _, row in found[::2]] == ["é", "c"]
    assert found[1][0].endswith("a.csv:3") and "not UTF-8" in str(found[1][1])
    with pytest.raises(DataError, match="a.csv:3: not UTF-8"):
        prepare.prepare([str(tmp_path / "in")], str(tmp_path / "out"))


def test_a_column_that_occurs_twice_loses_no_text(tmp_path):
    (tmp_path / "a.csv").write_text("text,label,text\nfirst,x,second\n")
    with pytest.raises(ValueError, match="two columns 'text'"):
        list(records(str(tmp_path / "a.csv")))
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table([["first"], ["x"], ["second"]], names=["text", "label", "text"]),
                   tmp_path / "a.parquet")
    for columns in (None, ["text"]):
        with pytest.raises(ValueError, match="two columns 'text'"):
            list(records(str(tmp_path / "a.parquet"), columns))
    assert list(records(str(tmp_path / "a.parquet"), ["label"]))[0][1] == {"label": "x"}


@pytest.mark.parametrize("text", ["text,label\na,b\n".encode("utf-16"), b"te\xe9xt,b\na,b\n"])
def test_a_header_that_is_not_utf8_is_named(tmp_path, text):
    (tmp_path / "a.csv").write_bytes(text)
    with pytest.raises(ValueError, match="not UTF-8 text; convert the file"):
        list(records(str(tmp_path / "a.csv"), ["text"]))


def test_a_folder_without_records_and_links_out_of_it_are_named(tmp_path, capsys):
    (tmp_path / "out.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.jsonl").symlink_to(tmp_path / "out.jsonl")
    with pytest.raises(DataError, match="no file in this folder has records"):
        list(parse_records([str(tmp_path / "folder")], dict))
    assert "Skipped: 1 links in " in capsys.readouterr().out


@pytest.mark.parametrize("name", ["a.jsonl", "list.json", "a.parquet"])
def test_nan_is_a_missing_value(tmp_path, name):
    """Not a class "nan" or the reference answer "nan"."""
    path = write(tmp_path, name, [dict(text="a", label=float("nan")), dict(text="b", label=1.0)])
    assert [row["label"] for row in parse_records([path], dict)] == [None, 1.0]
    with pytest.raises(DataError, match="expected a label in each row"):
        labels.find_classes(read_labelled_texts([path]))


@pytest.mark.parametrize("form", ["torch", "numpy", "arrow"])
def test_the_format_of_a_saved_data_set_changes_nothing(tmp_path, monkeypatch, form):
    """Not a class "tensor(0)"; set_format() can also hide columns."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # read when it is imported
    data = pytest.importorskip("datasets").Dataset.from_list([dict(text="a", n=[0]), ROWS[0]])
    data.with_format(form, columns=["n"]).save_to_disk(tmp_path / "saved")
    assert [row for _, row in records(str(tmp_path / "saved"))] == list(data)


def test_quoted_line_breaks_and_quotes_are_read(tmp_path):
    (tmp_path / "a.csv").write_text('text\n"one\n ""two"", three"\nfour\n')
    assert [row["text"] for _, row in records(str(tmp_path / "a.csv"))] == [
        'one\n "two", three', "four"]


def test_blank_lines_may_precede_the_records(tmp_path):
    (tmp_path / "a.json").write_text('\n \n{"text": "a"}\n{"text": "b"}\n')
    found = list(records(str(tmp_path / "a.json")))
    assert [row["text"] for _, row in found] == ["a", "b"]
    assert [where.rpartition(":")[2] for where, _ in found] == ["3", "4"]
    (tmp_path / "a.csv").write_text("\n\ntext\na\n")
    assert list(records(str(tmp_path / "a.csv"))) == [(f"{tmp_path}/a.csv:4", {"text": "a"})]
    (tmp_path / "a.csv").write_text("\n\n")
    with pytest.raises(ValueError, match="no field 'text'"):
        list(records(str(tmp_path / "a.csv"), ["text"]))


def test_a_saved_data_set_without_a_split_train_names_its_splits(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # read when it is imported
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict(dev=datasets.Dataset.from_list(ROWS)).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match="no split train; name a split's folder: dev"):
        list(records(str(tmp_path / "saved")))
    assert len(list(records(str(tmp_path / "saved/dev")))) == len(ROWS)


@pytest.mark.parametrize("name", ["messages", "conversations"])
def test_a_system_field_is_the_first_message(name):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    record = {name: turns, "system": "Be brief."}
    assert chat.to_messages(record)[0] == ("system", "Be brief.")
    record = {name: [{"role": "system", "content": "own"}, *turns], "system": "Be brief."}
    assert [text for _, text in chat.to_messages(record)] == ["own", "a", "b"]


def test_a_folder_without_permission_is_named(tmp_path, monkeypatch):
    (tmp_path / "locked").mkdir(mode=0)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    user = os.geteuid()
    os.seteuid(user or 65534)  # root may read everything
    try:
        with pytest.raises(DataError, match="locked: cannot be read: Permission denied; make it"):
            walk(".")
    finally:
        os.seteuid(user)
