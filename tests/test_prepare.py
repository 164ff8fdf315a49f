"""data/prepare.py and what it is made of: exact outputs, splits, errors, kills, memory."""

import base64
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data import encode, parallel, text
from data import prepare as prepare_module
from data.prepare import ensure_dataset, main, prepare
from data.tokenizer import load_dataset_tokenizer, load_tokenizer

REPO = Path(__file__).resolve().parents[1]
SHARED = REPO.parent / "shared" / "data"
EOT = 256
linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")


def tokens(folder, split):
    meta = json.loads((Path(folder) / "meta.json").read_text())
    return np.fromfile(Path(folder) / f"{split}.bin", np.dtype(meta["dtype"]).newbyteorder("<"))


def quiet(sources, out, **options):
    return prepare([str(s) for s in sources], str(out), log=lambda line: None, **options)


def start(*args, cwd=REPO, **env):
    """The command as a person starts it, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "data.prepare", *map(str, args)], cwd=cwd, text=True,
        env=os.environ | {"PYTHONPATH": str(REPO)} | env, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True)


def run(*args, **kwargs):
    """(exit code, stdout, stderr) of the command."""
    process = start(*args, **kwargs)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


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
        b"%c\0" % b for b in "Grüße\n".encode()) + b"\0\x01" + b"1\0"
    assert tokens(out, "val").tolist() == [*b"234", EOT]  # the last 30% of 10 characters
    meta = json.loads((out / "meta.json").read_text())
    assert meta == {
        "format_version": 1, "dtype": "uint16", "vocab_size": 257, "tokenizer": {"kind": "byte"},
        "eot_token": 256, "sources": [str(tmp_path / "a.txt"), str(tmp_path / "b.md")],
        "val": {"fraction": 0.3, "by": "tail"},
        "splits": {
            "train": {"tokens": 10, "documents": 2, "bytes": 9,
                      "sha256": hashlib.sha256((out / "train.bin").read_bytes()).hexdigest()},
            "val": {"tokens": 4, "documents": 1, "bytes": 3,
                    "sha256": hashlib.sha256((out / "val.bin").read_bytes()).hexdigest()}}}
    assert f"python run_train.py --data_dir {out}" in stdout and "bytes per token" in stdout
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
    drawn = encode.in_val(0, 300, 0.1)
    assert found["val"] == [t for t, d in zip(texts, drawn, strict=True) if d]
    assert found["train"] == [t for t, d in zip(texts, drawn, strict=True) if not d]
    # frozen: the same documents must be held out for ever
    assert np.flatnonzero(encode.in_val(0, 60, 0.1)).tolist() == [
        2, 32, 33, 41, 42, 43, 53]
    assert encode.in_val(17, 1, 0.1) == encode.in_val(0, 18, 0.1)[-1:]
    assert abs(encode.in_val(0, 100_000, 0.05).mean() - 0.05) < 0.003


def test_uneven_documents_fall_back_to_the_end(tmp_path):
    texts = ["x" * 5] * 300
    texts[int(np.flatnonzero(encode.in_val(0, 300, 0.1))[0])] = "y" * 100_000  # would be all of val
    meta = quiet([jsonl(tmp_path / "d.jsonl", texts)], tmp_path / "o")
    assert meta["val"]["by"] == "tail"
    total = 299 * 5 + 100_000
    assert meta["splits"]["val"]["bytes"] == total - int(total * 0.9)


@pytest.mark.parametrize("size", [4, 5, 9, 10, 11, 100])
@pytest.mark.parametrize("fraction", [None, 0.001, 0.5])
def test_no_split_is_ever_empty(tmp_path, size, fraction):
    (tmp_path / "a.txt").write_text("x" * size)
    meta = quiet([tmp_path / "a.txt"], tmp_path / "o", val_fraction=fraction)
    train, val = (meta["splits"][s]["bytes"] for s in ("train", "val"))
    assert train >= 2 and val >= 2 and train + val == size


def test_shakespeare_is_nanogpts(shakespeare, tmp_path):
    code, stdout, _ = run("--dataset", "shakespeare", "--input", shakespeare, "--tokenizer", "char",
                          cwd=tmp_path)
    out = tmp_path / "data" / "bin" / "shakespeare"
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
    assert tok.decode(tokens(tmp_path / "o", "train")) == "abc\nde"  # 5 of 9 characters
    assert tok.decode(tokens(tmp_path / "o", "val")) == "\nfgh\n"
    quiet([tmp_path / "a.txt", tmp_path / "c.txt"], tmp_path / "o2", tokenizer=str(tmp_path / "o"))
    assert load_dataset_tokenizer(tmp_path / "o2").chars == "\nabcdefgh"  # a shared tokenizer
    (tmp_path / "d.txt").write_text("abcz")
    with pytest.raises(ValueError, match=r"d\.txt: characters 'z' are not among"):
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
    both = np.concatenate([tokens(tmp_path / "o", s) for s in ("train", "val")])
    assert tok.decode(both[:-1]) == "zz " * 100 and both[-1] == meta["eot_token"]


# --- pieces

def mixed_text(lines):
    return "".join(f"line {i}: naïve 世界 'll\t{'=' * (i % 50)}  \n\n   {i * 7919}.\n"
                   for i in range(lines)) + "\n" * 3


def test_pieces_change_no_token(gpt2, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(mixed_text(2000), newline="")
    whole = quiet([tmp_path / "a.txt"], tmp_path / "o", tokenizer="gpt2")
    monkeypatch.setattr(text, "PIECE", 1000)
    assert len(text.cut_file(str(tmp_path / "a.txt"), "")) > 50
    assert quiet([tmp_path / "a.txt"], tmp_path / "p", tokenizer="gpt2") == whole


@pytest.mark.parametrize("content", ["世界" * 20_000, "🙂" * 9_999, "a" * 30_000, "\n" * 30_000])
def test_text_without_places_to_cut(tmp_path, monkeypatch, content):
    (tmp_path / "a.txt").write_text(content, newline="")
    monkeypatch.setattr(text, "PIECE", 1001)
    pieces = text.cut_file(str(tmp_path / "a.txt"), "")
    assert len(pieces) > 5
    parts = [text.read_texts(piece, "text")[0][0] for piece in pieces]  # each is whole characters
    assert "".join(parts) == content
    assert [p.opens for p in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [p.closes for p in pieces] == [False] * (len(pieces) - 1) + [True]


def test_cut_at_every_place(tmp_path, monkeypatch):
    """The split may fall anywhere among the pieces; documents are counted once on each side."""
    (tmp_path / "a.txt").write_text("ab cd ef gh " * 900)
    monkeypatch.setattr(text, "PIECE", 500)
    edges = {p.end for p in text.cut_file(str(tmp_path / "a.txt"), "")}
    for cut in sorted(edges)[:3] + [777]:
        meta = quiet([tmp_path / "a.txt"], tmp_path / f"o{cut}", val_fraction=None)
        jobs, _ = encode.place([(p, np.array([p.size])) for p in
                                text.cut_file(str(tmp_path / "a.txt"), "")], 0.1)
        plan = encode.Plan(str(tmp_path / f"o{cut}"), "text", 0.1, cut, "uint16", False)
        parts = [encode.encode_batch([job], plan)[0] for job in jobs]
        assert sum(len(p["train"][0]) for p in parts) == 2 * cut
        assert [sum(p[s][1] for p in parts) for s in ("train", "val")] == [1, 1]
        assert meta["splits"]["train"]["documents"] == 1


def test_any_number_of_processes_gives_the_same(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "big.txt").write_text(mixed_text(30_000))
    for i in range(300):
        (tmp_path / "src" / f"{i}.py").write_text(f"print({i})\n" * 300)
    jsonl(tmp_path / "src" / "d.jsonl", [f"{i} é" * (i % 90) for i in range(6_000)])
    metas = [quiet([tmp_path / "src"], tmp_path / f"o{n}", tokenizer="char", num_proc=n)
             for n in (1, 2, 3)]
    assert metas[0] == metas[1] == metas[2]
    assert len(text.cut_file(str(tmp_path / "src" / "big.txt"), "")) > 1


@linux
def test_memory_does_not_grow_with_the_input(tmp_path):
    block = mixed_text(20_000).encode()
    with open(tmp_path / "big.txt", "wb") as f:
        while f.tell() < 128e6:
            f.write(block)
    code = ("import sys; from data.prepare import main; code = main(sys.argv[1:]);"
            "print(open('/proc/self/status').read()); sys.exit(code)")
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "big.txt"), "--out", str(tmp_path / "o"),
         "--num_proc", "1"], cwd=REPO, capture_output=True, text=True, check=True)
    peak = int(done.stdout.split("VmHWM:")[1].split()[0]) / 1024
    assert peak < 120, f"peak of {peak:.0f} MB for a 128 MB input"
    assert (tmp_path / "o" / "train.bin").stat().st_size > 200e6


# --- folders and formats

def test_folder_rules(tmp_path):
    src = tmp_path / "src"
    for name, content in {
            "b.txt": b"B text\n", "a/z.py": b"Z = 1\n", "a/a.rs": b"fn main() {}\n",
            "bom.txt": b"\xef\xbb\xbfBOM\n", "empty.txt": b"", ".git/config": b"hidden\n",
            ".hidden": b"hidden\n", "__pycache__/x.py": b"cache\n", "image.png": b"\x89PNG\0\0",
            "latin.txt": "naïve".encode("latin-1"), "out/old.txt": b"output\n"}.items():
        (src / name).parent.mkdir(parents=True, exist_ok=True)
        (src / name).write_bytes(content)
    os.mkfifo(src / "pipe")  # would hang a reader
    lines = []
    prepare([str(src)], str(src / "out"), force=True, log=lines.append)
    both = b"".join(bytes(x % 256 for x in tokens(src / "out", s)) for s in ("train", "val"))
    assert both == b"B text\n\0BOM\n\0fn main() {}\n\0Z = 1\n\0"  # 256 % 256: end of each document
    assert "Passed over 2 files" in "\n".join(lines)


def test_big_file_in_a_folder_that_turns_out_not_to_be_text(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.dat").write_bytes(b"text " * 500_000 + b"\xff" + b" text" * 100)
    (tmp_path / "src" / "b.txt").write_text("hello world")
    meta = quiet([tmp_path / "src"], tmp_path / "o")
    assert sum(s["bytes"] for s in meta["splits"].values()) == 11


def test_field(tmp_path):
    source = jsonl(tmp_path / "d.JSONL", ["one", "", "two three"], field="body")
    meta = quiet([source], tmp_path / "o", field="body")
    assert sum(s["bytes"] for s in meta["splits"].values()) == 12  # an empty document is none
    both = np.concatenate([tokens(tmp_path / "o", s) for s in ("train", "val")])
    assert (both == EOT).sum() == 2


# --- what is refused

def test_all_problems_in_one_message(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"abc\xe9def")
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "x").write_bytes(b"\xff\xfe")
    (tmp_path / "d.jsonl").write_text(
        '{"text": "ok"}\n\n{"text": 3}\n{"body": "x"}\n[1]\n{"text"\n')
    code, stdout, stderr = run(
        *(tmp_path / name for name in ("nope.txt", "empty.txt", "latin.txt", "folder", "binary",
                                       "d.jsonl")), "--out", tmp_path / "o",
        "--tokenizer", "gtp2", "--val_fraction", "0.9", "--num_proc", "0")
    assert code == 2 and stdout == "" and "Traceback" not in stderr
    lines = stderr.replace(str(tmp_path) + os.sep, "").splitlines()
    assert lines[0] == "data.prepare: 12 problems"
    for expected in (
            "nope.txt: no such file or folder", "empty.txt: empty",
            "latin.txt: not UTF-8 text: byte 3 is 0xe9", "folder: a folder without text files",
            "binary: a folder without text files", "d.jsonl:3: field 'text' is a int",
            "d.jsonl:4: no field 'text'; its fields are 'body'", "d.jsonl:5: expected an object",
            "d.jsonl:6: not valid JSON", "val_fraction: 0.9", "num_proc: 0", "did you mean gpt2"):
        assert sum(expected in line for line in lines) == 1, expected
    assert not (tmp_path / "o").exists()


def test_line_numbers_across_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "PIECE", 1000)
    lines = [json.dumps({"text": "x" * (i % 100)}) for i in range(1000)]
    lines[-3] = "{"
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    assert len(text.cut_file(str(tmp_path / "d.jsonl"), "")) > 10
    with pytest.raises(ValueError, match=r"^[^\n]*d\.jsonl:998: not valid JSON[^\n]*$"):
        quiet([tmp_path / "d.jsonl"], tmp_path / "o")


def test_a_wrong_field_everywhere_is_told_shortly(tmp_path):
    jsonl(tmp_path / "d.jsonl", ["x"] * 5000, field="body")
    with pytest.raises(ValueError) as e:
        quiet([tmp_path / "d.jsonl"], tmp_path / "o")
    assert str(e.value).count("\n") < 25 and "--field" in str(e.value)


@pytest.mark.parametrize("content, message", [("", "empty"), ("abc", "3 characters")])
def test_too_little_text(tmp_path, capsys, content, message):
    (tmp_path / "a.txt").write_text(content)
    assert main([str(tmp_path / "a.txt"), "--out", str(tmp_path / "o")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "o").exists()


@pytest.mark.parametrize("args", [[], ["a.txt", "--dataset", "stdlib"], ["a.txt", "--input", "x"],
                                  ["--dataset", "pile"], ["a.txt", "--tok", "byte"]])
def test_wrong_command_lines(args, capsys):
    with pytest.raises(SystemExit) as e:
        main(args)
    assert e.value.code == 2 and "usage" in capsys.readouterr().err


def test_shakespeare_input_is_checked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("not shakespeare")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    for args, message in ((["--input", "x.txt"], "sha256"), (["--input", "y.txt"], "no such file"),
                          ([], "--input input.txt")):
        assert main(["--dataset", "shakespeare", *args]) == 2
        assert message in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["x.txt"]


def test_gpt2_offline_on_the_command_line(tmp_path):
    (tmp_path / "a.txt").write_text("hello world")
    code, _, stderr = run(tmp_path / "a.txt", "--tokenizer", "gpt2", "--out", tmp_path / "o",
                          TIKTOKEN_CACHE_DIR=str(tmp_path / "cache"),
                          HTTPS_PROXY="http://127.0.0.1:9", https_proxy="http://127.0.0.1:9")
    assert code == 2 and "Traceback" not in stderr
    assert "curl -O https://" in stderr and "--tokenizer byte" in stderr


def test_other_peoples_folders_are_left_alone(tmp_path, capsys):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"some text of {name}\n" * 10)
    out, a, b = str(tmp_path / "o"), str(tmp_path / "a.txt"), str(tmp_path / "b.txt")
    assert main([a, "--out", out]) == 0
    (tmp_path / "o" / "notes").write_text("mine")
    before = tokens(out, "train").tolist()
    assert main([b, "--out", out]) == 2
    assert f"was prepared from {a}" in capsys.readouterr().err
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
    assert "--out names a folder" in err and "did not write" in err and "Traceback" not in err
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "b.txt", "c", "o"]


def test_a_file_that_changes_meanwhile(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("hello world " * 50)
    real = encode.place

    def grow(*args):
        (tmp_path / "a.txt").write_text("hällo world " * 50)
        return real(*args)

    monkeypatch.setattr(prepare_module, "place", grow)
    with pytest.raises(ValueError, match=r"a\.txt: it changed"):
        quiet([tmp_path / "a.txt"], tmp_path / "o")
    assert os.listdir(tmp_path) == ["a.txt"]


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
    """Waits until the second pass has begun to write, and returns the pids of the workers."""
    for _ in range(1200):
        if any(p.stat().st_size for p in Path(folder).glob(".o.tmp-*/train.bin")):
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            return [int(pid) for pid in children.read_text().split()]
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise AssertionError("no token was written")


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@linux
@pytest.mark.parametrize("name, code", [("SIGINT", 130), ("SIGTERM", 143), ("SIGKILL", -9)])
def test_stopped_midway(big, tmp_path, name, code):
    process = start(big, "--out", tmp_path / "o", "--num_proc", 2)
    workers = writing(process, tmp_path)
    assert workers
    if name == "SIGINT":  # a terminal sends it to the workers, too
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(getattr(signal, name))
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    assert not (tmp_path / "o").exists()
    deadline = time.time() + 20
    while any(map(alive, workers)) and time.time() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, workers))
    left = os.listdir(tmp_path)
    if name == "SIGKILL":  # what it left is hidden, and goes when it is an hour old
        assert len(left) == 1 and left[0].startswith(".o.tmp-")
        for path in [*(tmp_path / left[0]).iterdir(), tmp_path / left[0]]:
            os.utime(path, (time.time() - 4000,) * 2)
        (tmp_path / "a.txt").write_text("hello world")
        quiet([tmp_path / "a.txt"], tmp_path / "o")
        assert sorted(os.listdir(tmp_path)) == ["a.txt", "o"]
    else:
        assert left == [] and "Traceback" not in stderr


def test_a_dead_worker_is_reported():
    with pytest.raises(ValueError, match="a worker process ended early"):
        list(parallel.in_order(os._exit, [1, 1, 1], 2))


def test_results_come_in_order():
    assert list(parallel.in_order(abs, range(-50, 0), 2)) == list(range(50, 0, -1))


def test_progress(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return self.tty

    for tty, ends in ((True, "\r\x1b[K"), (False, "to go\n")):
        screen = Terminal()
        screen.tty = tty
        monkeypatch.setattr(sys, "stderr", screen)
        progress = parallel.Progress("reading", 100)
        progress.add(1)
        assert screen.getvalue() == ""  # not at once
        progress.shown -= 60
        progress.add(49)
        assert "reading:  50% of" in screen.getvalue()
        progress.finish()
        assert screen.getvalue().endswith(ends)
        assert ("\r" in screen.getvalue()) == tty


# --- built-in datasets

def test_stdlib_on_first_use(tmp_path):
    data_dir, lines = str(tmp_path / "bin" / "stdlib"), []
    start_time = time.monotonic()
    assert ensure_dataset(data_dir, log=lines.append)
    assert time.monotonic() - start_time < 20
    assert len(lines) == 1 and "standard library" in lines[0] and " s" in lines[0]
    meta = json.loads(Path(data_dir, "meta.json").read_text())
    assert meta["splits"]["train"]["tokens"] > 2e6 and meta["splits"]["val"]["tokens"] > 2e5
    assert meta["val"]["by"] == "document" and meta["tokenizer"] == {"kind": "byte"}
    both = [bytes(tokens(data_dir, s).astype(np.uint8)) for s in ("train", "val")]
    assert b"def namedtuple(" in both[0] + both[1] and b"from test import support" not in both[0]
    assert not ensure_dataset(data_dir, log=lines.append) and len(lines) == 1  # there already


def test_stdlib_by_two_processes_at_once(tmp_path):
    code = ("from data.prepare import ensure_dataset; import sys;"
            "ensure_dataset(sys.argv[1]); print(open(sys.argv[1] + '/meta.json').read())")
    command = [sys.executable, "-c", code, str(tmp_path / "bin" / "stdlib")]
    both = [subprocess.Popen(command, cwd=REPO, text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE) for _ in range(2)]
    results = [p.communicate(timeout=60) for p in both]
    assert [p.returncode for p in both] == [0, 0], results
    assert os.listdir(tmp_path / "bin") == ["stdlib"]
    assert len({out[out.index("{"):] for out, _ in results}) == 1


def test_ensure_leaves_the_rest_alone(tmp_path):
    assert not ensure_dataset(str(tmp_path / "mine"))
    (tmp_path / "stdlib").mkdir()
    (tmp_path / "stdlib" / "train.bin").write_bytes(b"\0\0")
    assert not ensure_dataset(str(tmp_path / "stdlib"))
    assert os.listdir(tmp_path) == ["stdlib"] and os.listdir(tmp_path / "stdlib") == ["train.bin"]


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as e:
        main(["--help"])
    out = capsys.readouterr().out
    assert e.value.code == 0
    for name in ("out", "tokenizer", "val_fraction", "field", "dataset", "input", "num_proc",
                 "force"):
        assert f"--{name}" in out
    assert "bpe" not in out
