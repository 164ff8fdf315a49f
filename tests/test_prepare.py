"""data/prepare/ and what it is made of: exact outputs, splits, errors, kills, memory."""

import base64
import fcntl
import gzip
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from fake_hub import FakeHub
from processes import Fork, python, run_python

import run_train
from data import prepare as prepare_module
from data.meta import read_meta
from data.prepare import corpora, encode, ensure_dataset, main, prepare
from data.prepare import sources as sources_module
from data.prepare.corpora import CORPORA
from data.prepare.folders import REPOSITORY, fit_to_data, new_folder
from data.prepare.sources import Documents
from data.rows import documents_in_val
from data.token_files import find_files
from data.tokenizer import load_dataset_tokenizer, load_tokenizer
from data.tokenizer_types import JsonTokenizer
from train.base.errors import DataError
from train.base.files import exclusive_lock
from train.config import load_argv, load_config
from train.train import train

REPO = Path(__file__).resolve().parents[1]
SHARED = REPO.parent / "shared" / "data"
EOT = 256
linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")


def tokens(folder, split):
    meta = json.loads((Path(folder) / "meta.json").read_text())
    return np.fromfile(Path(folder) / f"{split}.bin", np.dtype(meta["dtype"]).newbyteorder("<"))


def quiet(sources, out, **options):
    return prepare([str(s) for s in sources], str(out), **options)


def start(*args, cwd=REPO, **env):
    """The command as a person starts it, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "data.prepare", *map(str, args)], cwd=cwd, text=True,
        env=os.environ | {"PYTHONPATH": str(REPO)} | env, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True)


def run(*args, cwd=REPO, **env):
    """(exit code, stdout, stderr) of the command, forked."""
    done = python("-m", "data.prepare", *args, cwd=cwd, env={"PYTHONPATH": REPO} | env)
    return done.returncode, done.stdout, done.stderr


def both(folder):
    """All ids of a folder."""
    return np.concatenate([tokens(folder, s) for s in ("train", "val")])


def collect(path, folder):
    """The Documents of a file."""
    documents = Documents(str(folder / "text"))
    assert documents.add_file(str(path), prepare_module.PrepareOptions(field=["text"])) == []
    documents.file.close()
    return documents


def cut(path, folder):
    """The pieces of a text file, all for training."""
    documents = collect(path, folder)
    return list(encode.cut_pieces(documents, [False] * len(documents.ends), documents.size))


def jsonl(path, texts, field="text"):
    path.write_text("".join(json.dumps({field: t}) + "\n" for t in texts))
    return path


@pytest.fixture
def shakespeare():
    path = SHARED / "tinyshakespeare.txt"
    if not path.is_file():
        pytest.skip("no copy of tiny-shakespeare")
    return path


@pytest.fixture
def gpt2(monkeypatch):
    if not any((SHARED / "tiktoken_cache").glob("*")):
        pytest.skip("no cached rank file of GPT-2")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED / "tiktoken_cache"))
    return load_tokenizer("gpt2")


# --- exact outputs

def test_golden_bytes_and_meta(tmp_path):
    (tmp_path / "a.txt").write_bytes("Grüße\n".encode())
    (tmp_path / "b.md").write_bytes(b"1234")
    out = tmp_path / "out"
    code, stdout, stderr = run(tmp_path / "a.txt", tmp_path / "b.md", "--out", out,
                               "--val-fraction=0.3")  # a dash is as good as an underscore
    assert (code, stderr) == (0, "")
    assert (out / "train.bin").read_bytes() == b"".join(
        b"%c\0" % b for b in "Grüße\n".encode()) + b"\0\x01"
    assert tokens(out, "val").tolist() == [*b"1234", EOT]  # 30% of 10 characters begin within it
    meta = json.loads((out / "meta.json").read_text())
    assert meta == {
        "format_version": 1, "model": "gpt", "dtype": "uint16", "vocab_size": 257,
        "tokenizer": {"kind": "byte"}, "eot_token": 256,
        "sources": [str(tmp_path / "a.txt"), str(tmp_path / "b.md")],
        "fields": ["text"], "num_samples": None, "val": {"fraction": 0.3, "by": "tail"},
        "splits": {
            "train": {"tokens": 9, "documents": 1, "bytes": 8,
                      "sha256": hashlib.sha256((out / "train.bin").read_bytes()).hexdigest()},
            "val": {"tokens": 5, "documents": 1, "bytes": 4,
                    "sha256": hashlib.sha256((out / "val.bin").read_bytes()).hexdigest()}}}
    assert (f"python run_train.py --config train/config_quick.yaml --data_dir {out} "
            f"--max_epochs 20 --block_size 4 --out_dir {os.path.join('out', 'out')}") in stdout
    assert sorted(os.listdir(out)) == ["meta.json", "train.bin", "val.bin"]


def test_documents_drawn_for_validation(tmp_path):
    texts = [f"document {i}" for i in range(300)]
    meta = quiet([jsonl(tmp_path / "d.jsonl", texts)], tmp_path / "o")
    assert meta["val"] == {"fraction": 0.1, "by": "document"}
    found = {}
    for split in ("train", "val"):
        ids, documents = tokens(tmp_path / "o", split), []
        for document in np.split(ids, np.flatnonzero(ids == EOT) + 1)[:-1]:
            documents.append(bytes(document[:-1].astype(np.uint8)).decode())
        assert len(documents) == meta["splits"][split]["documents"]
        found[split] = documents
    drawn = documents_in_val(300, 0.1)
    assert found["val"] == [t for t, d in zip(texts, drawn, strict=True) if d]
    assert found["train"] == [t for t, d in zip(texts, drawn, strict=True) if not d]
    # frozen: the same documents must be held out for ever
    assert np.flatnonzero(documents_in_val(60, 0.1)).tolist() == [
        2, 32, 33, 41, 42, 43, 53]
    assert documents_in_val(1000, 0.1)[:300].tolist() == drawn.tolist()
    assert abs(documents_in_val(100_000, 0.05).mean() - 0.05) < 0.003


def test_uneven_documents_fall_back_to_the_end(tmp_path):
    texts = ["x" * 5] * 300
    texts[int(np.flatnonzero(documents_in_val(300, 0.1))[0])] = "y" * 100_000  # all of val
    meta = quiet([jsonl(tmp_path / "d.jsonl", texts)], tmp_path / "o")
    assert meta["val"]["by"] == "tail"
    assert meta["splits"]["val"] | {"sha256": 0} == {  # what follows the long one: none is cut
        "tokens": 297 * 6, "documents": 297, "bytes": 297 * 5, "sha256": 0}


@pytest.mark.parametrize("size", [4, 5, 9, 10, 11, 100])
@pytest.mark.parametrize("fraction", [None, 0.001, 0.5])
def test_no_split_is_ever_empty(tmp_path, size, fraction):
    (tmp_path / "a.txt").write_text("x" * size)
    meta = quiet([tmp_path / "a.txt"], tmp_path / "o", val_fraction=fraction)
    train, val = (meta["splits"][s]["bytes"] for s in ("train", "val"))
    assert train >= 2 and val >= 2 and train + val == size


def test_shakespeare_is_nanogpts(shakespeare, tmp_path):
    code, stdout, _ = run(shakespeare, "--tokenizer", "char", cwd=tmp_path)
    out = tmp_path / "data" / "bin" / "tinyshakespeare"
    assert code == 0 and "1,003,854" in stdout and "111,540" in stdout
    data = shakespeare.read_text()  # what nanoGPT's data/shakespeare_char/prepare.py does
    stoi = {c: i for i, c in enumerate(sorted(set(data)))}
    n = len(data)
    for split, part in (("train", data[:int(n * 0.9)]), ("val", data[int(n * 0.9):])):
        expected = np.array([stoi[c] for c in part], np.uint16)
        assert np.array_equal(tokens(out, split), expected)
    tok = load_dataset_tokenizer(out)
    assert (tok.n_vocab, tok.eot_token, tok.encode("hii there")) == (
        65, None, [46, 47, 47, 1, 58, 46, 43, 56, 43])  # the ids in nanoGPT's own example


def test_shakespeare_with_gpt2_is_nanogpts(shakespeare, gpt2, tmp_path):
    meta = quiet([shakespeare], tmp_path / "o", tokenizer="gpt2")
    assert meta["splits"]["train"]["tokens"] == 301_966
    assert meta["splits"]["val"]["tokens"] == 36_059 + 1  # and the end of the document
    assert (tmp_path / "o" / "tokenizer.tiktoken").stat().st_size == 835_554
    assert (tmp_path / "o" / "meta.json").stat().st_size < 2000
    tok = load_dataset_tokenizer(tmp_path / "o")
    assert tok.decode(tokens(tmp_path / "o", "val")[:-1]) == shakespeare.read_text()[-111_540:]


def test_bytes_are_exact(gpt2, tmp_path):
    """meta.json's bytes are those that the tokens stand for: bits per byte depends on it."""
    words = "naïve 世界 x1 <|endoftext|>\n\n 🙂 the end".split(" ")
    texts = [" ".join(words[j % len(words)] for j in range(i, i + 20)) for i in range(150)]
    source = jsonl(tmp_path / "d.jsonl", texts)
    for name in ("byte", "char", "gpt2"):
        meta = quiet([source], tmp_path / name, tokenizer=name)
        sizes = load_dataset_tokenizer(tmp_path / name).token_bytes()
        for split in ("train", "val"):
            ids = tokens(tmp_path / name, split)
            assert sizes[ids].sum() == meta["splits"][split]["bytes"]
            assert len(ids) == meta["splits"][split]["tokens"]


def test_char_documents_are_parted_by_newlines(tmp_path):
    for name, content in (("a.txt", "abc"), ("b.txt", "de\n"), ("c.txt", "fgh")):
        (tmp_path / name).write_text(content)
    quiet([tmp_path / n for n in ("a.txt", "b.txt", "c.txt")], tmp_path / "o", tokenizer="char",
          val_fraction=0.4)
    tok = load_dataset_tokenizer(tmp_path / "o")
    assert tok.chars == "\nabcdefgh"
    assert tok.decode(tokens(tmp_path / "o", "train")) == "abc\nde\n"  # 6 of 9 characters
    assert tok.decode(tokens(tmp_path / "o", "val")) == "fgh\n"
    quiet([tmp_path / "a.txt", tmp_path / "c.txt"], tmp_path / "o2", tokenizer=str(tmp_path / "o"))
    assert load_dataset_tokenizer(tmp_path / "o2").chars == "\nabcdefgh"  # a shared tokenizer
    (tmp_path / "d.txt").write_text("abcz")
    with pytest.raises(ValueError, match="characters 'z' are not among"):
        quiet([tmp_path / "d.txt"], tmp_path / "o3", tokenizer=str(tmp_path / "o"))
    assert not (tmp_path / "o3").exists()


def test_large_vocabulary_is_uint32(tmp_path):
    singles = [bytes([i]) for i in range(256)]
    ranks = singles + [a + b for a in singles for b in singles]
    (tmp_path / "r.tiktoken").write_text(
        "".join(f"{base64.b64encode(t).decode()} {i}\n" for i, t in enumerate(ranks)))
    (tmp_path / "a.txt").write_text("zz " * 100)
    meta = quiet([tmp_path / "a.txt"], tmp_path / "o", tokenizer=str(tmp_path / "r.tiktoken"))
    assert meta["dtype"] == "uint32" and meta["eot_token"] == 256 + 65536
    tok = load_dataset_tokenizer(tmp_path / "o")
    ids = both(tmp_path / "o")
    assert tok.decode(ids[:-1]) == "zz " * 100 and ids[-1] == meta["eot_token"]


# --- pieces

def mixed_text(lines):
    return "".join(f"line {i}: naïve 世界 'll\t{'=' * (i % 50)}  \n\n   {i * 7919}.\n"
                   for i in range(lines)) + "\n" * 3


def test_pieces_change_no_token(gpt2, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(mixed_text(2000), newline="")
    whole = quiet([tmp_path / "a.txt"], tmp_path / "o", tokenizer="gpt2")
    monkeypatch.setattr(encode, "PIECE_BYTES", 1000)
    assert len(cut(tmp_path / "a.txt", tmp_path)) > 50
    assert quiet([tmp_path / "a.txt"], tmp_path / "p", tokenizer="gpt2") == whole


def test_pieces_get_no_space_of_a_tokenizer_that_puts_one_before_a_text(tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"\u2581": 0, "a": 1, "\n": 2, "</s>": 3, "\n\n": 4}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[("\n", "\n")]))
    made.normalizer = tokenizers.normalizers.Sequence([
        tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")])
    made.add_special_tokens(["</s>"])
    tokenizer = JsonTokenizer(made.to_str(), 3)
    monkeypatch.setattr(encode, "PIECE_BYTES", 100)
    for line in "a aa\n", "aaaa\n\n":
        (tmp_path / "a.txt").write_text(line * 999, newline="")
        documents = collect(tmp_path / "a.txt", tmp_path)
        pieces = list(encode.cut_pieces(documents, [False], documents.size))
        ids, _ = encode.encode_pieces(pieces, documents, tokenizer)
        assert len(pieces) > 5 and ids.tolist() == [*tokenizer.encode(line * 999), 3]


@pytest.mark.parametrize("content", ["世界" * 20_000, "🙂" * 9_999, "a" * 30_000, "\n" * 30_000])
def test_text_without_places_to_cut(tmp_path, monkeypatch, content):
    (tmp_path / "a.txt").write_text(content, newline="")
    monkeypatch.setattr(encode, "PIECE_BYTES", 1001)
    pieces = cut(tmp_path / "a.txt", tmp_path)
    assert len(pieces) > 5
    with open(tmp_path / "text", "rb") as f:
        parts = [encode.read_piece(f, piece) for piece in pieces]
    assert "".join(parts) == content  # each is whole characters
    assert [p.closes for p in pieces] == [False] * (len(pieces) - 1) + [True]


def test_cut_at_every_place(tmp_path, monkeypatch):
    """The split may fall anywhere among the pieces."""
    (tmp_path / "a.txt").write_text("ab cd ef gh " * 900)
    monkeypatch.setattr(encode, "PIECE_BYTES", 500)
    meta = quiet([tmp_path / "a.txt"], tmp_path / "o")
    assert [meta["splits"][s]["documents"] for s in ("train", "val")] == [1, 0]
    documents = collect(tmp_path / "a.txt", tmp_path / "o")
    for place in [p.end for p in cut(tmp_path / "a.txt", tmp_path)][:3] + [777]:
        pieces = list(encode.cut_pieces(documents, [False], place))
        parts = [encode.encode_pieces([piece], documents, load_tokenizer("byte"))
                 for piece in pieces if piece.split == "train"]
        assert sum(len(ids) for ids, _ in parts) == sum(size for _, size in parts) == place


def test_a_cut_between_characters(tmp_path):
    for n in range(10, 16):  # a cut falls within each of the two or three bytes
        (tmp_path / "a.txt").write_text("é世" * n)
        quiet([tmp_path / "a.txt"], tmp_path / "o", tokenizer="char", force=True)
        assert load_dataset_tokenizer(tmp_path / "o").decode(both(tmp_path / "o")) == "é世" * n


@pytest.mark.parametrize("sizes, fraction, documents", [
    ((60, 50), 0.1, (2, 0)),        # two texts: the cut lies within the second
    ((60, 6), 0.1, (1, 1)), ((6, 60), 0.1, (2, 0)), ((60, 60), 0.4, (1, 1)),
    ((30, 30, 4, 4), 0.1, (2, 2)), ((30, 30, 4, 3, 3), 0.1, (3, 2))])
def test_no_document_is_counted_twice(tmp_path, sizes, fraction, documents):
    files = [tmp_path / f"{i}.txt" for i in range(len(sizes))]
    for i, (path, size) in enumerate(zip(files, sizes)):
        path.write_text(chr(97 + i) * size)
    meta = quiet(files, tmp_path / "o", val_fraction=fraction)
    assert tuple(meta["splits"][s]["documents"] for s in ("train", "val")) == documents
    share = meta["splits"]["val"]["bytes"] / sum(sizes)
    assert fraction / 2 <= share <= fraction * 2


def test_no_record_is_cut(tmp_path):
    answers = [f"question {i}? " + "answer " * (2 - i) for i in range(2)]
    meta = quiet([jsonl(tmp_path / "d.jsonl", answers)], tmp_path / "o")
    assert [meta["splits"][s]["documents"] for s in ("train", "val")] == [1, 1]
    assert bytes(tokens(tmp_path / "o", "val")[:-1].astype(np.uint8)).decode() == answers[1]
    assert tokens(tmp_path / "o", "train")[-1] == EOT


def test_a_long_last_record_is_not_held_out(tmp_path):
    """But the one nearest to a tenth of the text; of two alike, the last one."""
    texts = [letter * size for letter, size in zip("abcd", (2000, 3000, 2500, 60_000))]
    assert main([str(jsonl(tmp_path / "d.jsonl", texts)), "--out", str(tmp_path / "o")]) == 0
    assert bytes(tokens(tmp_path / "o", "val")[:-1].astype(np.uint8)).decode() == texts[1]
    assert tokens(tmp_path / "o", "train").tolist() == [
        i for text in texts[:1] + texts[2:] for i in [*text.encode(), EOT]]
    meta = quiet([jsonl(tmp_path / "e.jsonl", ["x" * 2500] * 2)], tmp_path / "p")
    assert meta["val"]["by"] == "tail" and meta["splits"]["val"]["bytes"] == 2500


def test_any_number_of_threads_gives_the_same(tmp_path, monkeypatch):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "big.txt").write_text(mixed_text(30_000))
    for i in range(300):
        (tmp_path / "src" / f"{i}.py").write_text(f"print({i})\n" * 300)
    jsonl(tmp_path / "src" / "d.jsonl", [f"{i} é" * (i % 90) for i in range(6_000)])
    metas = []
    for n in (1, 3):
        monkeypatch.setattr(encode, "THREADS", n)
        metas.append(quiet([tmp_path / "src"], tmp_path / f"o{n}", tokenizer="char"))
    assert metas[0] == metas[1]
    assert len(cut(tmp_path / "src" / "big.txt", tmp_path)) > 1


@linux
def test_memory_does_not_grow_with_the_input(tmp_path):
    block = mixed_text(20_000).encode()
    with open(tmp_path / "big.txt", "wb") as f:
        while f.tell() < 128e6:
            f.write(block)
    code = ("import sys; from data.prepare import main; code = main(sys.argv[1:]);"
            "print(open('/proc/self/status').read()); sys.exit(code)")
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "big.txt"), "--out", str(tmp_path / "o")],
        cwd=REPO, capture_output=True, text=True, check=True)
    peak = int(done.stdout.split("VmHWM:")[1].split()[0]) / 1024
    assert peak < 120, f"peak of {peak:.0f} MB for a 128 MB input"
    assert (tmp_path / "o" / "train.bin").stat().st_size > 200e6


# --- folders and formats

def test_folder_rules(tmp_path, capsys):
    src = tmp_path / "src"
    for name, content in {
            "b.txt": b"B text\n", "a/z.py": b"Z = 1\n", "a/a.rs": b"fn main() {}\n",
            "bom.txt": b"\xef\xbb\xbfBOM\n", "empty.txt": b"", ".git/config": b"hidden\n",
            ".hidden": b"hidden\n", "__pycache__/x.py": b"cache\n", "image.png": b"\x89PNG\0\0",
            "latin.txt": "naïve".encode("latin-1"), "out/old.txt": b"output\n",
            "out/meta.json": b'{"format_version": 1}'}.items():
        (src / name).parent.mkdir(parents=True, exist_ok=True)
        (src / name).write_bytes(content)
    os.mkfifo(src / "pipe")  # would hang a reader
    prepare([str(src)], str(src / "out"), force=True)
    found = bytes(x % 256 for x in both(src / "out"))
    assert found == b"B text\n\0BOM\n\0fn main() {}\n\0Z = 1\n\0"  # 256 % 256: end of a document
    assert f"{src}/image.png, {src}/latin.txt" in capsys.readouterr().out
    with pytest.raises(DataError, match="out: is prepared data"):  # a tokenizer.tiktoken is no text
        quiet([src / "out"], tmp_path / "o")


def test_a_configuration_gets_options_for_little_data():
    """above twenty epochs, and for a split without a window of block_size + 1 tokens"""
    path = REPOSITORY / "train/config_quick.yaml"
    c = load_config(path)
    tokens = c.max_iters * c.samples_per_step * c.block_size // 20
    for n_train, n_val, options in (
            (tokens, c.block_size + 1, ""), (tokens - 1, 999, " --max_epochs 20"),
            (tokens, c.block_size, f" --block_size {c.block_size - 1}")):
        assert fit_to_data(dict(train=dict(tokens=n_train), val=dict(tokens=n_val)),
                           path) == options
    assert fit_to_data(dict(train=dict(rows=tokens), val=dict(rows=1)), path) == ""


def test_little_data_are_trained_by_the_command_that_is_printed(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("a few words " * 50)
    assert main([str(tmp_path / "a.txt"), "--out", str(tmp_path / "bin")]) == 0
    command = capsys.readouterr().out.splitlines()[-1].split()[3:]
    config = load_argv([*command, "--max_epochs=1", f"--out_dir={tmp_path / 'out'}",
                        "--compile=false", "--sample_tokens=0"])
    assert train(config)["finished"]


def test_big_file_in_a_folder_that_turns_out_not_to_be_text(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.dat").write_bytes(b"text " * 500_000 + b"\xff" + b" text" * 100)
    (tmp_path / "src" / "b.txt").write_text("hello world")
    meta = quiet([tmp_path / "src"], tmp_path / "o")
    assert sum(s["bytes"] for s in meta["splits"].values()) == 11


def test_field(tmp_path):
    source = jsonl(tmp_path / "d.JSONL", ["one", "", "two three"], field="body")
    meta = quiet([source], tmp_path / "o", field=["body"])
    assert sum(s["bytes"] for s in meta["splits"].values()) == 12  # an empty document is none
    assert (both(tmp_path / "o") == EOT).sum() == 2


def text_of(folder):
    """What a folder of byte tokens holds, documents parted by a bar."""
    return "".join(chr(i) if i != EOT else "|" for i in both(folder))


RECORDS = [{"text": "one", "n": 1}, {"text": "two, three", "n": 2}, {"text": "four\nfive", "n": 3}]
LINES = "".join(json.dumps(r) + "\n" for r in RECORDS)
TABLE = 'text,n\none,1\n"two, three",2\n"four\nfive",3\n'


@pytest.mark.parametrize("name, content", [
    ("a.jsonl", LINES), ("a.json", LINES), ("a.json", json.dumps(RECORDS, indent=2)),
    ("a.csv", TABLE), ("a.csv", "\ufeff" + TABLE),
    ("a.tsv", 'n\ttext\n1\tone\n2\ttwo, three\n3\t"four\nfive"\n')])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_records_of_every_format(tmp_path, name, content, packed, inside):
    (tmp_path / "src").mkdir()
    path = tmp_path / "src" / (name + ".gz" * packed)
    path.write_bytes(gzip.compress(content.encode()) if packed else content.encode())
    meta = quiet([tmp_path / "src" if inside else path], tmp_path / "o")
    assert text_of(tmp_path / "o") == "one|two, three|four\nfive|"
    assert sum(part["documents"] for part in meta["splits"].values()) == 3
    assert sorted(os.listdir(tmp_path)) == ["o", "src"]
    assert sorted(os.listdir(tmp_path / "o")) == ["meta.json", "train.bin", "val.bin"]


def test_packed_text_is_the_text(tmp_path):
    (tmp_path / "a.txt").write_text(mixed_text(500))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(mixed_text(500).encode()))
    metas = [quiet([tmp_path / name], tmp_path / name[0]) for name in ("a.txt", "b.txt.gz")]
    assert metas[0]["splits"] == metas[1]["splits"]


def test_standard_input_does_not_replace_that_of_an_earlier_command(tmp_path):
    command = ("-m", "data.prepare", "/dev/stdin")
    for content, code in (("one text " * 9, 0), ("another one", 2)):
        done = python(*command, cwd=tmp_path, env={"PYTHONPATH": REPO}, input=content)
        assert done.returncode == code, done.stderr
    assert "--force" in done.stderr
    assert text_of(tmp_path / "data/bin/stdin").replace("|", "") == "one text " * 9
    done = python(*command, "--field=text", "--force", cwd=tmp_path, env={"PYTHONPATH": REPO},
                  input=LINES)
    assert done.returncode == 2 and "no records; --field" in done.stderr
    (tmp_path / "a.jsonl").write_text(LINES)  # the lines of the stream would be text beside it
    done = python(*command, "a.jsonl", "--field=text", "--out=o", cwd=tmp_path,
                  env={"PYTHONPATH": REPO}, input=LINES)
    assert done.returncode == 2 and "/dev/stdin: no records; --field is" in done.stderr
    assert "(files named *.jsonl" in done.stderr and "a.jsonl" not in done.stderr


@pytest.mark.parametrize("name, content, message", [
    ("a.json", '"just a string"', "expected an object"),
    ("a.json", "[1, 2]", "expected an object"), ("a.json", '[{"text": "x"', "delimiter"),
    ("a.json", '{"a":\n {"b": 1}}', "a.json: record 0: no field 'text'"),
    ("a.csv", "body\nx\n", "'body'"), ("a.csv", b"text\n\xff\n", "a.csv:2: not UTF-8"),
    ("a.txt.gz", "plain", "gzipped"),
    ("a.txt.gz", gzip.compress(random.Random(0).randbytes(9000).hex().encode(), mtime=0)[:5000],
     "end-of-stream")])
def test_records_that_cannot_be_read(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    code, _, err = run(tmp_path / name, "--out", tmp_path / "o")
    assert code == 2 and "Traceback" not in err and message in err and name in err
    assert os.listdir(tmp_path) == [name]


def test_other_json_in_a_folder_is_skipped(tmp_path, capsys):
    for name, content in (("package.json", '{\n  "name": "x"\n}'), ("t.csv", "a,b\n1,2\n"),
                          ("list.json", "[1, 2, 3]"), ("code.js", "let x = 1;\n")):
        (tmp_path / name).write_text(content)
    prepare([str(tmp_path)], str(tmp_path / "o"))
    assert text_of(tmp_path / "o") == "let x = 1;\n|"
    found, *_ = capsys.readouterr().out.splitlines()
    assert found.startswith("Skipped 3 files that are no text")
    assert all(name in found for name in ("package.json", "t.csv", "list.json"))


def test_what_folders_hold(tmp_path, monkeypatch):
    """Data that cannot be read is no reason for silence; null is no text; limits hide no folder."""
    for name in ("tables", "packed", "nulls", "never"):
        (tmp_path / name).mkdir()
    (tmp_path / "tables" / "a.csv").write_text("body\nx\n")
    with pytest.raises(DataError, match="tables: 0 bytes of text; .* skipped files: .*a.csv$"):
        quiet([tmp_path / "tables"], tmp_path / "o")
    (tmp_path / "packed" / "a.jsonl.gz").write_bytes(gzip.compress(b'{"body": "x"}\n'))
    with pytest.raises(DataError, match="a.jsonl.gz:1: no field 'text'"):
        quiet([tmp_path / "packed"], tmp_path / "o")
    (tmp_path / "nulls" / "a.jsonl").write_text('{"text": null}\n{"text": "one"}\n'
                                                '{"text": "two"}\n')
    (tmp_path / "never" / "b.txt").write_text("not reached")
    monkeypatch.setattr(encode, "PIECE_BYTES", 10)
    quiet([tmp_path / "nulls", tmp_path / "never"], tmp_path / "o", num_samples=2)
    assert text_of(tmp_path / "o") == "one|two|"


def test_fields_are_joined(tmp_path):
    records = [{"q": f"question {i}", "a": f"answer {i}" * (i > 0)} for i in range(4)]
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    assert main([str(path), "--out", str(tmp_path / "o"), "--field", "q", "--field=a"]) == 0
    assert text_of(tmp_path / "o") == "question 0|" + "".join(
        f"question {i}\nanswer {i}|" for i in (1, 2, 3))
    assert json.loads((tmp_path / "o" / "meta.json").read_text())["fields"] == ["q", "a"]
    with pytest.raises(DataError, match="no field 'b'; its fields are 'q', 'a'"):
        quiet([path], tmp_path / "o2", field=["q", "b"])


@pytest.mark.parametrize("count", [1, 7, 40, 99])
def test_num_samples(tmp_path, monkeypatch, count):
    monkeypatch.setattr(encode, "PIECE_BYTES", 300)
    (tmp_path / "a.txt").write_text("A text of some length. " * 30)
    source = jsonl(tmp_path / "d.jsonl", [f"document {i}" for i in range(50)])
    (tmp_path / "t.csv").write_text("text\n" + "row of a table\n" * 20)
    files = [tmp_path / "a.txt", source, tmp_path / "t.csv"]
    meta = quiet(files, tmp_path / "o", num_samples=count)
    assert sum(part["documents"] for part in meta["splits"].values()) == min(count, 71)
    assert meta["num_samples"] == count
    quiet(files, tmp_path / "all")
    ids = [both(tmp_path / name) for name in ("o", "all")]
    if meta["val"]["by"] == "tail":  # else another drawing
        assert np.array_equal(ids[0], ids[1][:len(ids[0])])


def test_the_same_file_twice_is_taken_once(tmp_path, capsys):
    text = "some text, quite long enough to be split into two parts\n"
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(text if name != "b.txt" else text[::-1])
    os.symlink(tmp_path / "a.txt", tmp_path / "link.txt")
    args = [str(tmp_path / n) for n in ("a.txt", "a.txt", "b.txt", "link.txt")]
    assert main([*args, str(tmp_path / "." / "a.txt"), "--out", str(tmp_path / "o")]) == 0
    assert text_of(tmp_path / "o") == f"{text}|{text[::-1]}|"
    assert "Skipped 3 files" in capsys.readouterr().out


def test_a_snapshot_of_the_hub_is_read_through_its_links(tmp_path):
    """Files of the repository, and of the whole cache; a link to anywhere else is not followed."""
    snapshot = tmp_path / "hub/datasets--o--n/snapshots" / ("0f" * 20)
    targets = [snapshot.parents[1] / "blobs/ab", tmp_path / "hub/blobs/cd", tmp_path / "private"]
    (snapshot / "data").mkdir(parents=True)
    for number, path in enumerate(targets):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text {number}")
        link = snapshot / f"data/{number}.txt"
        link.symlink_to(os.path.relpath(path, link.parent))
    quiet([snapshot], tmp_path / "o")
    assert text_of(tmp_path / "o") == "text 0|text 1|"


def test_home_is_expanded(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("hello world")
    assert run("~/a.txt", "--out", "~/o", HOME=str(tmp_path))[0] == 0
    assert text_of(tmp_path / "o") == "hello world|"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    quiet(["~/a.txt"], "~/python")
    assert text_of(tmp_path / "python") == "hello world|"


@pytest.mark.parametrize("gpu, n, config", [
    (False, 10, "config_quick"), (True, 10, "config_quick"), (True, 10**8, "config"),
    (False, 10**8, "config_quick")])
def test_what_to_do_next(tmp_path, monkeypatch, capsys, gpu, n, config):
    (tmp_path / "nvidia-smi").write_text("")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) if gpu else "")
    if not gpu and os.path.exists("/proc/driver/nvidia/version"):
        pytest.skip("this machine has a GPU")
    prepare_module.report_text("data/my text", dict(train=dict(tokens=n), val=dict(tokens=5000)))
    # the configuration's steps and windows would be refused
    few = "" if n > 10 else " --max_epochs 20 --block_size 9"
    assert capsys.readouterr().out == (
        f"[train] {n:,} tokens\n[val] 5,000 tokens\nNext: python run_train.py --config "
        f"train/{config}.yaml --data_dir 'data/my text'{few} --out_dir 'out/my text'\n")


# --- tokens learned from the text

def test_bpe(tmp_path):
    pytest.importorskip("rustbpe")
    rng = np.random.default_rng(0)
    words = ["".join(chr(97 + c) for c in rng.integers(0, 26, n)) for n in rng.integers(2, 9, 300)]
    text = " ".join(words[i] for i in rng.integers(0, 300, 40_000)) + " naïve 世界 🙂\n" * 50
    (tmp_path / "a.txt").write_text(text + " " * 600_000 + "x")
    args = [str(tmp_path / "a.txt"), "--tokenizer", "bpe", "--vocab-size", "500", "--out"]
    assert main([*args, str(tmp_path / "o")]) == 0
    tok = load_dataset_tokenizer(tmp_path / "o")
    assert (tok.kind, tok.n_vocab, tok.eot_token) == ("ranks", 500, 499)
    meta = json.loads((tmp_path / "o" / "meta.json").read_text())
    assert meta["vocab_size"] == 500 and meta["dtype"] == "uint16"
    ids = both(tmp_path / "o")
    assert tok.decode(ids[:-1]) == text + " " * 600_000 + "x"
    assert len(tok.encode(text)) < len(text) / 1.5
    anything = "".join(map(chr, [*range(300), 0x10FFFF, 0xFFFD])) + "\r\n\x00<|endoftext|>"
    assert tok.decode(tok.encode(anything)) == anything
    assert tok.enc.decode_bytes(list(range(256))) == b"".join(bytes([i]) for i in range(256))
    file = load_tokenizer(str(tmp_path / "o" / "tokenizer.tiktoken"))  # the rank file alone
    assert file.encode(anything + text) == tok.encode(anything + text)
    assert (file.n_vocab, file.eot_token) == (500, 499)
    assert load_tokenizer("bpe", tmp_path / "o").n_vocab == 500
    before = (tmp_path / "o" / "train.bin").read_bytes()
    assert main([*args, str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "train.bin").read_bytes() == before
    meta = quiet([tmp_path / "a.txt"], tmp_path / "p", tokenizer="bpe", vocab_size=30_000)
    assert 500 < meta["vocab_size"] < 30_000  # the text holds no more


@pytest.mark.parametrize("options, message", [
    (["--tokenizer", "bpe"], "vocab_size goes with --tokenizer bpe"),
    (["--vocab_size", "500"], "vocab_size goes with --tokenizer bpe"),
    (["--tokenizer", "bpe", "--vocab_size", "256"], "must be at least 257")])
def test_bpe_options(tmp_path, capsys, options, message):
    (tmp_path / "a.txt").write_text("hello world")
    assert main([str(tmp_path / "a.txt"), "--out", str(tmp_path / "o"), *options]) == 2
    assert message in capsys.readouterr().err and os.listdir(tmp_path) == ["a.txt"]


def test_a_relative_path_is_a_source_only_in_its_folder(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "t.txt").write_text(f"some text of {name}\n" * 9)
    monkeypatch.chdir(tmp_path / "a")
    for path in ("t.txt", "./t.txt", str(tmp_path / "a/t.txt")):
        quiet([path], tmp_path / "o")
    assert read_meta(tmp_path / "o").sources == [str(tmp_path / "a/t.txt")]
    monkeypatch.chdir(tmp_path / "b")
    with pytest.raises(DataError, match="not prepared from these sources"):
        quiet(["t.txt"], tmp_path / "o")


# --- optional sources

@pytest.mark.parametrize("package, source, options", [
    ("rustbpe", "a.txt", ["--tokenizer", "bpe", "--vocab_size", "300"]),
    ("pyarrow", "a.parquet", []), ("datasets", "hf:nobody/nothing", [])])
def test_a_missing_package_is_one_line(tmp_path, monkeypatch, capsys, package, source, options):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "a.parquet"):
        (tmp_path / name).write_text("hello world, " * 9)
    for name in [n for n in sys.modules if n.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert main([source, *options]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"needs the package {package}" in err
    assert f"pip install {package}" in err


def test_parquet(tmp_path, capsys):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({"text": [r["text"] for r in RECORDS], "n": [1, 2, 3], "x": [b"\xff"] * 3})
    (tmp_path / "src").mkdir()
    pq.write_table(table, tmp_path / "src" / "a.parquet")
    for source in ("src", "src/a.parquet"):
        quiet([tmp_path / source], tmp_path / "o", force=True)
        assert text_of(tmp_path / "o") == "one|two, three|four\nfive|"
    meta = quiet([tmp_path / "src"], tmp_path / "o", force=True, num_samples=2)
    assert sum(part["documents"] for part in meta["splits"].values()) == 2
    with pytest.raises(DataError, match="no field 'body'; its fields are 'text', 'n', 'x'"):
        quiet([tmp_path / "src" / "a.parquet"], tmp_path / "o2", field=["body"])
    (tmp_path / "bad.parquet").write_bytes((tmp_path / "src" / "a.parquet").read_bytes()[:200])
    assert main([str(tmp_path / "bad.parquet"), "--out", str(tmp_path / "o3")]) == 2
    assert "bad.parquet: " in capsys.readouterr().err


def test_hugging_face_datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # read when it is imported
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(RECORDS)
    data.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "both")
    (tmp_path / "hub").mkdir()
    jsonl(tmp_path / "hub" / "train.jsonl", [r["text"] for r in RECORDS])
    hub = f"hf:{tmp_path / 'hub'}"
    for number, source in enumerate((tmp_path / "saved", tmp_path / "both", hub,
                                     f"{hub}:default:train")):
        meta = quiet([source], tmp_path / f"o{number}")
        assert text_of(tmp_path / f"o{number}") == "one|two, three|four\nfive|"
        assert meta["sources"] == [str(source)]
    assert sources_module.source_name("hf:someone/some-text:config") == "some-text"
    datasets.DatasetDict({"test": data, "val": data}).save_to_disk(tmp_path / "parts")
    with pytest.raises(DataError, match="no split train; name a split's folder: test, val$"):
        quiet([tmp_path / "parts"], tmp_path / "o8")
    part = f"{tmp_path}/parts/test"
    assert quiet([part], tmp_path / "o8")["sources"] == [part]
    with pytest.raises(DataError, match="^hf:nobody/nothing: datasets: "):
        quiet(["hf:nobody/nothing"], tmp_path / "o9")


# --- downloads

def shards(folder, corpus, count):
    """The first files of a corpus of tokens, as its mirror."""
    folder.mkdir()
    start = CORPORA[corpus][1]
    for i, name in enumerate(("val_000000", "train_000001", "train_000002")[:count]):
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, 5000
        ids = np.random.default_rng(i).integers(0, 50257, 5000).astype("<u2")
        (folder / f"{start}_{name}.bin").write_bytes(header.tobytes() + ids.tobytes())


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub without data sets, and an empty cache."""
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    hub = FakeHub()
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    yield hub
    hub.close()


@pytest.mark.parametrize("corpus", ["fineweb10B",
                                    pytest.param("fineweb_edu", marks=pytest.mark.slow)])
def test_corpora_of_tokens(tmp_path, hub, gpt2, corpus, capsys):
    shards(tmp_path / "repo", corpus, 3)
    hub.repos[f"datasets/{CORPORA[corpus][0]}"] = tmp_path / "repo"
    args = ["--dataset", corpus, "--shards", "2", "--out", str(tmp_path / "o")]
    assert main(args) == 0
    assert "[train] 10,000 tokens, 2 files\n[val] 5,000 tokens" in capsys.readouterr().out
    train, val = (find_files(str(tmp_path / "o"), split) for split in ("train", "val"))
    assert len(train) == 2 and len(val) == 1
    tok = load_dataset_tokenizer(tmp_path / "o")
    assert (tok.kind, tok.n_vocab) == ("gpt2", 50257)
    assert read_meta(tmp_path / "o").sources == [
        f"https://huggingface.co/datasets/{CORPORA[corpus][0]}/resolve/main/"]
    stamp, sent = Path(train[0]).stat().st_mtime_ns, len(hub.log)
    assert main(args) == 0 and Path(train[0]).stat().st_mtime_ns == stamp
    assert len(hub.log) == sent  # nothing to download
    capsys.readouterr()
    os.remove(tmp_path / "repo" / f"{CORPORA[corpus][1]}_train_000002.bin")
    os.remove(train[1])
    assert main(args) == 2  # the file is gone
    assert "could not be downloaded" in capsys.readouterr().err
    with pytest.raises(DataError, match="interrupted"):  # such a folder is not complete
        read_meta(tmp_path / "o")
    assert main([*args, "--field", "x"]) == 2 and "leave out --field" in capsys.readouterr().err


def test_a_corpus_replaces_the_shards_and_rows_of_earlier_preparations(tmp_path, hub, gpt2):
    shards(tmp_path / "repo", "fineweb10B", 3)
    hub.repos[f"datasets/{CORPORA['fineweb10B'][0]}"] = tmp_path / "repo"
    args = ["--dataset", "fineweb10B", "--out", str(tmp_path / "o"), "--shards"]
    assert main([*args, "2"]) == 0
    for name in ("finewebedu_train_000001.bin", "train_tokens.npy", "val.bin"):
        (tmp_path / "o" / name).write_bytes(b"other")
    assert main([*args, "1"]) == 0
    assert [Path(path).name for split in ("train", "val")
            for path in find_files(str(tmp_path / "o"), split)] == [
        "fineweb_train_000001.bin", "fineweb_val_000000.bin"]
    assert not (tmp_path / "o/train_tokens.npy").exists()


def test_a_corpus_is_downloaded_by_one_process_at_a_time(tmp_path, monkeypatch, gpt2, capsys):
    """A second one with fewer shards would remove those of the first, which ended with success."""
    def download(*args, filename, **options):
        with pytest.raises(BlockingIOError):
            fcntl.flock(os.open(tmp_path / "o", os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
        raise DataError("stop")
    monkeypatch.setattr("data.prepare.corpora.download", download)
    assert main(["--dataset", "fineweb10B", "--out", str(tmp_path / "o")]) == 2
    assert "stop" in capsys.readouterr().err


def test_a_corpus_does_not_replace_one_that_was_downloaded_meanwhile(tmp_path, gpt2, capsys):
    """Two commands for one empty folder: the second one waits, and then finds other data."""
    with exclusive_lock(tmp_path):
        command = ["--dataset", "fineweb10B", "--out", str(tmp_path)]
        second = threading.Thread(target=main, args=[command])
        second.start()
        time.sleep(0.2)
        (tmp_path / "finewebedu_train_000001.bin").write_bytes(b"other")
    second.join()
    assert "not prepared from these sources" in capsys.readouterr().err
    assert (tmp_path / "finewebedu_train_000001.bin").exists()


def test_a_table_with_a_bad_row_in_a_folder_is_named(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/x.txt").write_text("some text\n" * 50)
    for rows, line in (("good\n" * 9 + "one,two\n", 11), ("one,two\n" * 30 + "good\n" * 9, 21)):
        (tmp_path / "in/big.csv").write_text("text\n" + rows)
        assert main([str(tmp_path / "in"), "--out", str(tmp_path / "o")]) == 2
        assert f"big.csv:{line}: not the 1 values of the header" in capsys.readouterr().err


@pytest.mark.parametrize("name, content, message", [
    ("big.txt.gz", gzip.compress(random.Random(0).randbytes(9000).hex().encode())[:5000],
     "end-of-stream"),
    ("list.json", json.dumps([dict(text=f"record {i}") for i in range(9)] + [dict(texts="x")]),
     "record 9: no field 'text'")])
def test_a_damaged_file_in_a_folder_is_named(tmp_path, capsys, name, content, message):
    """A part of it can be read: it is not one of the files that are no text."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/x.txt").write_text("some text\n" * 50)
    path = tmp_path / "in" / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main([str(tmp_path / "in"), "--out", str(tmp_path / "o")]) == 2
    said = capsys.readouterr().err
    assert name in said and message in said


def test_a_text_of_one_long_character_is_too_little_to_split(tmp_path, capsys):
    (tmp_path / "x.txt").write_text("\N{GRINNING FACE}", encoding="utf-8")
    assert main([str(tmp_path / "x.txt"), "--out", str(tmp_path / "o")]) == 2
    assert "too little to split" in capsys.readouterr().err


def test_shakespeare_is_downloaded_once_and_checked(tmp_path, hub, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = "To be, or not to be\n" * 500
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "input.txt").write_text(text)
    hub.repos["a/b"] = tmp_path / "repo"
    monkeypatch.setattr(corpora, "SHAKESPEARE_URL", f"{hub.url}/a/b/resolve/main/input.txt")
    assert main(["--dataset", "shakespeare"]) == 2
    assert "Hash mismatch" in capsys.readouterr().err and not Path("data").exists()
    monkeypatch.setattr(corpora, "SHAKESPEARE_SHA256", hashlib.sha256(text.encode()).hexdigest())
    assert main(["--dataset", "shakespeare"]) == 0
    assert Path("data/bin/shakespeare.txt").read_text() == text
    sent = len(hub.log)
    assert main(["--dataset", "shakespeare"]) == 0 and len(hub.log) == sent


# --- what is refused

def test_all_problems_in_one_message(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"abc\xe9def")
    (tmp_path / "wide.txt").write_text("abc", encoding="utf-16")
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "x").write_bytes(b"\xff\xfe")
    (tmp_path / "d.jsonl").write_text(
        '{"text": "ok"}\n\n{"text": 3}\n{"body": "x"}\n[1]\n{"text"\n')
    code, stdout, stderr = run(
        *(tmp_path / name for name in ("nope.txt", "empty.txt", "latin.txt", "wide.txt",
                                       "folder", "binary", "d.jsonl")), "--out", tmp_path / "o")
    assert code == 2 and stdout == "" and "Traceback" not in stderr
    lines = stderr.replace(str(tmp_path) + os.sep, "").splitlines()
    assert lines[0] == "data.prepare: 7 problems"
    for expected in (
            "wide.txt: a binary file or UTF-16, expected UTF-8 text",
            "nope.txt: no such file or folder; a dataset of the Hugging Face hub is hf:OWNER/NAME",
            "latin.txt: not UTF-8 text; give text",
            "d.jsonl:3: field 'text' is a int",
            "d.jsonl:4: no field 'text'; its fields are 'body'", "d.jsonl:5: expected an object",
            "d.jsonl:6: not valid JSON"):
        assert sum(expected in line for line in lines) == 1, expected
    assert not (tmp_path / "o").exists()


def test_line_numbers(tmp_path):
    lines = [json.dumps({"text": "x" * (i % 100)}) for i in range(1000)]
    lines[-3] = "{"
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"^[^\n]*d\.jsonl:998: not valid JSON[^\n]*$"):
        quiet([tmp_path / "d.jsonl"], tmp_path / "o")


def test_reading_stops_after_twenty_problems(tmp_path):
    jsonl(tmp_path / "d.jsonl", ["x"] * 200_000, field="body")
    for sources in ([tmp_path / "d.jsonl"], [tmp_path / f"{i}.txt" for i in range(40)]):
        with pytest.raises(DataError, match="^20 problems") as e:
            quiet(sources, tmp_path / "o")
        lines = str(e.value).splitlines()
        assert len(lines) == 21


@pytest.mark.parametrize("content, message", [("", "0 bytes"), ("abc", "3 bytes")])
def test_too_little_text(tmp_path, capsys, content, message):
    (tmp_path / "a.txt").write_text(content)
    assert main([str(tmp_path / "a.txt"), "--out", str(tmp_path / "o")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "o").exists()


@pytest.mark.parametrize("args, message", [
    ([], "give one or more SOURCEs"), (["a.txt", "--dataset", "stdlib"], "give one or more"),
    (["--dataset", "fineweb10B", "--tokenizer=byte"], "already split: leave out --tokenizer")])
def test_wrong_command_lines(args, message, capsys):
    assert main(args) == 2 and message in capsys.readouterr().err


def test_numbers_out_of_range_are_one_message(capsys):
    assert main(["--dataset", "fineweb10B", "--shards", "0", "--val_fraction", "0.9",
                 "--num_samples", "0"]) == 2
    err = capsys.readouterr().err
    assert all(f"--{name}: " in err for name in ("shards", "val_fraction", "num_samples"))


def test_an_unknown_dataset_is_refused_with_the_known_ones(capsys):
    assert main(["--dataset", "pile"]) == 2
    err = capsys.readouterr().err
    assert "--dataset: " in err and "stdlib" in err and "fineweb10B" in err


def test_shakespeare_without_a_network(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    assert main(["--dataset", "shakespeare"]) == 2
    assert "input.txt to data/bin/shakespeare.txt" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_gpt2_offline_on_the_command_line(tmp_path):
    (tmp_path / "a.txt").write_text("hello world")
    code, _, stderr = run(tmp_path / "a.txt", "--tokenizer", "gpt2", "--out", tmp_path / "o",
                          TIKTOKEN_CACHE_DIR=str(tmp_path / "cache"),
                          HTTPS_PROXY="http://127.0.0.1:9", https_proxy="http://127.0.0.1:9")
    assert code == 2 and "Traceback" not in stderr
    assert "curl -O https://" in stderr and "--tokenizer byte" in stderr


def test_a_source_is_never_replaced(tmp_path):
    """Also with --force, and through a link: it has the name of a file of an earlier preparation.
    """
    source = tmp_path / "a b[" / "train_rows.jsonl"
    source.parent.mkdir()
    source.write_text('{"text": "some text"}\n' * 10)
    (tmp_path / "link").symlink_to(source.parent)
    for out in (source.parent, tmp_path / "link"):
        with pytest.raises(DataError, match="train_rows.jsonl: it would be replaced"):
            quiet([source], out, force=True)
    quiet([source], source.parent / "o")
    assert sorted(os.listdir(source.parent)) == ["o", source.name] and source.stat().st_size == 220


def test_other_peoples_folders_are_left_alone(tmp_path, capsys):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"some text of {name}\n" * 10)
    out, a, b = str(tmp_path / "o"), str(tmp_path / "a.txt"), str(tmp_path / "b.txt")
    assert main([a, "--out", out]) == 0
    (tmp_path / "o" / "notes").write_text("mine")
    before = tokens(out, "train").tolist()
    assert main([b, "--out", out]) == 2
    assert "not prepared from these sources" in capsys.readouterr().err
    assert tokens(out, "train").tolist() == before
    assert main([a, "--out", out, "--tokenizer", "char"]) == 0  # the same sources: no question
    assert main([b, "--out", out, "--force"]) == 0
    assert load_dataset_tokenizer(out).decode(tokens(out, "train")[:18]) == "some text of b.txt"
    assert (tmp_path / "o" / "notes").read_text() == "mine"
    assert main([a, "--out", a]) == 2  # a file
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "x").write_text("x")
    assert main([a, "--out", str(tmp_path / "c")]) == 2
    assert main([a, "--out", str(tmp_path / "c" / "x" / "y")]) == 2  # below a file
    err = capsys.readouterr().err
    assert f"{a}: is a file; name a folder with --out\n" in err
    assert err.count("Not a directory") == 1 and "not prepared from these sources" in err
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "b.txt", "c", "o"]


# --- processes, signals, kills

@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """70 MB of text: seconds of work."""
    path = tmp_path_factory.mktemp("big") / "big.txt"
    block = mixed_text(20_000).encode()
    with open(path, "wb") as f:
        while f.tell() < 70e6:
            f.write(block)
    return path


def writing(process, folder):
    """Waits until the second pass has begun to write."""
    for _ in range(1200):
        if any(p.stat().st_size for p in Path(folder).glob(".o.tmp/train.bin")):
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise AssertionError("no token was written")


@linux
@pytest.mark.parametrize("name, code", [("SIGINT", 130), ("SIGKILL", -9)])
def test_stopped_midway(big, tmp_path, name, code):
    process = start(big, "--out", tmp_path / "o")
    writing(process, tmp_path)
    process.send_signal(getattr(signal, name))
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    assert not (tmp_path / "o").exists()
    left = os.listdir(tmp_path)
    if name == "SIGKILL":  # what it left is hidden, and goes with the next run
        assert left == [".o.tmp"]
        (tmp_path / "a.txt").write_text("hello world")
        quiet([tmp_path / "a.txt"], tmp_path / "o")
        assert sorted(os.listdir(tmp_path)) == ["a.txt", "o"]
    else:
        assert left == [] and "Traceback" not in stderr


def test_one_process_at_a_time_prepares_a_folder(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("hello world")
    with new_folder(str(tmp_path / "o"), "gpt", []) as folder:
        Path(folder, "meta.json").write_text("{}")
        assert main([str(tmp_path / "a.txt"), "--out", str(tmp_path / "o")]) == 2
        assert f".o.tmp is in use by pid {os.getpid()}" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "o"]


@pytest.mark.skipif(os.system("unshare -rm mount -t tmpfs none /mnt 2>&-"), reason="needs mounts")
def test_a_mount_point_is_prepared_twice(tmp_path):
    """As a volume is: first with what a kill left in it, then over what is there."""
    text, volume = tmp_path / "a.txt", tmp_path / "volume"
    text.write_text("abc " * 500)
    volume.mkdir()
    command = f"{sys.executable} -m data.prepare {text} --out {volume}"
    subprocess.run(["unshare", "-rm", "sh", "-ec", f"mount -t tmpfs none {volume}; "
                    f"mkdir {volume}/.tmp; echo > {volume}/.tmp/text; {command}; "
                    f"echo mine > {volume}/mine; {command} --tokenizer char; "
                    f"cp -a {volume} {tmp_path}/copy"], cwd=REPO, check=True)
    quiet([text], tmp_path / "b", tokenizer="char")
    names = {p.name for p in (tmp_path / "copy").iterdir()}
    assert names == {p.name for p in (tmp_path / "b").iterdir()} | {"mine"}
    assert np.array_equal(both(tmp_path / "copy"), both(tmp_path / "b"))


def test_results_come_in_order():
    assert list(encode.map_in_order(abs, iter(range(-50, 0)))) == list(range(50, 0, -1))


# --- built-in datasets

def test_stdlib_on_first_use(tmp_path, capsys):
    data_dir = str(tmp_path / "bin" / "stdlib")
    start_time = time.monotonic()
    ensure_dataset(data_dir)
    assert time.monotonic() - start_time < 20
    first, last = capsys.readouterr().out.splitlines()
    assert "standard library" in first and f"Prepared {data_dir} in " in last
    meta = json.loads(Path(data_dir, "meta.json").read_text())
    assert meta["splits"]["train"]["tokens"] > 2e6 and meta["splits"]["val"]["tokens"] > 2e5
    assert meta["val"]["by"] == "document" and meta["tokenizer"] == {"kind": "byte"}
    content = [bytes(tokens(data_dir, s).astype(np.uint8)) for s in ("train", "val")]
    assert b"def namedtuple(" in content[0] + content[1]
    assert content[0].count(b"from test import support") < 3  # Python 3.14: in one other file
    ensure_dataset(data_dir)
    assert not capsys.readouterr().out  # there already


def test_stdlib_by_two_processes_at_once(tmp_path):
    code = ("from data.prepare import ensure_dataset; import sys;"
            "ensure_dataset(sys.argv[1]); print(open(sys.argv[1] + '/meta.json').read())")
    said = [tmp_path / name for name in "ab"]
    runs = [Fork(run_python, (["-c", code, str(tmp_path / "bin" / "stdlib")],), stdout=path,
                 stderr=path.with_suffix(".err")) for path in said]
    assert [run.wait(60) for run in runs] == [0, 0], [
        path.with_suffix(".err").read_text() for path in said]
    assert os.listdir(tmp_path / "bin") == ["stdlib"]
    outputs = [path.read_text() for path in said]
    assert len({text[text.index("{"):] for text in outputs}) == 1


def test_ensure_names_a_folder_that_cannot_be_created(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="file/stdlib: not prepared: .*Not a directory"):
        ensure_dataset(str(tmp_path / "file" / "stdlib"))


def test_ensure_leaves_existing_data_alone(tmp_path):
    (tmp_path / "stdlib").mkdir()
    (tmp_path / "stdlib" / "train.bin").write_bytes(b"\0\0")
    ensure_dataset(str(tmp_path / "stdlib"))
    assert os.listdir(tmp_path) == ["stdlib"] and os.listdir(tmp_path / "stdlib") == ["train.bin"]


def test_the_first_command_prepares_again_what_a_kill_left(tmp_path, monkeypatch, capsys):
    """The kill is between the renames of train.bin and meta.json."""
    class Killed(BaseException):
        pass

    def replace(source, target):
        if target == str(folder / "meta.json") and (folder / "train.bin").exists():
            raise Killed
        rename(source, target)
    folder = tmp_path / "stdlib"
    (tmp_path / "a.py").write_text("pass\n" * 2000)
    monkeypatch.setattr(prepare_module, "STDLIB", str(tmp_path / "a.py"))
    rename = os.replace
    with monkeypatch.context() as patches:
        patches.setattr(os, "replace", replace)
        with pytest.raises(Killed):
            ensure_dataset(str(folder))
    assert read_meta(folder, allow_incomplete=True).incomplete
    assert run_train.main(["--config=train/config_test.yaml", f"--data_dir={folder}",
                           f"--out_dir={tmp_path}/out", "--max_iters=1"]) == 0
    assert f"Prepared {folder}" in capsys.readouterr().out


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as e:
        main(["--help"])
    out = capsys.readouterr().out
    assert e.value.code == 0
    for name in ("out", "tokenizer", "val_fraction", "field", "num_samples", "dataset",
                 "force", "vocab_size", "shards"):
        assert f"--{name}" in out


@pytest.mark.parametrize("fraction", ["0", "-0.1", "0.51"])
def test_a_fraction_for_validation_has_limits(tmp_path, fraction, capsys):
    (tmp_path / "a.txt").write_text("a b c\n" * 1000)
    assert main([str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"),
                 f"--val_fraction={fraction}"]) == 2
    assert "val_fraction: must be" in capsys.readouterr().err and not (tmp_path / "out").exists()
