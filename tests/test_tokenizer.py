"""data/tokenizer.py: ids, round trips, descriptions, and what is refused."""

import base64
import hashlib
import json
import pickle
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import run

from data.tokenizer import (
    R50K_SHA256,
    R50K_URL,
    find_vocabulary,
    gpt2_ranks,
    load_dataset_tokenizer,
    load_tokenizer,
    tokenizer_from_spec,
    write_tokenizer,
)
from data.tokenizer_hf import BYTE_CHARACTERS, end_of_text, tokenizer_json
from data.tokenizer_types import (
    EOT,
    CharTokenizer,
    JsonTokenizer,
    RankTokenizer,
)
from train.base.errors import DataError, SetupError

CACHE = Path(__file__).resolve().parents[2] / "shared" / "data" / "tiktoken_cache"
CACHE_NAME = hashlib.sha1(R50K_URL.encode()).hexdigest()
TEXT = "Grüße, 世界! <|endoftext|> it's\r\n\t 12345  🙂 x\n\n  end"


def rank_text(extra=(b"th", b"the", b" the")):
    tokens = [bytes([i]) for i in range(256)] + list(extra)
    return "".join(f"{base64.b64encode(t).decode()} {i}\n" for i, t in enumerate(tokens))


@pytest.fixture
def gpt2(monkeypatch):
    if not (CACHE / CACHE_NAME).is_file():
        pytest.skip("no cached rank file of GPT-2")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(CACHE))
    return load_tokenizer("gpt2")


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No rank file, and a proxy that refuses: the same on machines with a network and without."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    return tmp_path / "cache"


@pytest.fixture(params=["byte", "char", "ranks", "gpt2"])
def tokenizer(request, tmp_path):
    if request.param == "gpt2":
        return request.getfixturevalue("gpt2")
    if request.param == "char":
        return CharTokenizer("".join(sorted(set(TEXT))))
    if request.param == "ranks":
        (tmp_path / "my.tiktoken").write_text(rank_text())
        return load_tokenizer(str(tmp_path / "my.tiktoken"))
    return load_tokenizer("byte")


def test_round_trip_and_exact_bytes(tokenizer):
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode(np.array(ids)) == TEXT
    assert all(type(i) is int for i in ids) and max(ids) < tokenizer.n_vocab
    assert tokenizer.eot_token not in ids  # written in the text, it is ordinary text
    assert tokenizer.encode("") == []
    assert np.array_equal(tokenizer.encode_array(TEXT), ids)
    sizes = tokenizer.token_bytes()
    assert sizes.dtype == np.int64 and sizes.shape == (tokenizer.n_vocab,)
    assert sizes[ids].sum() == len(TEXT.encode())
    assert tokenizer.eot_token is None or sizes[tokenizer.eot_token] == 0


def test_spec_rebuilds_it_without_files(tokenizer, offline):
    spec = json.loads(json.dumps(tokenizer.spec()))  # builtin types only
    again = tokenizer_from_spec(spec)
    assert again.encode(TEXT) == tokenizer.encode(TEXT)
    assert (again.n_vocab, again.eot_token) == (tokenizer.n_vocab, tokenizer.eot_token)
    assert again.spec() == spec


@pytest.mark.parametrize("bad", [-1, 10**6, 10**30])
def test_id_out_of_range(tokenizer, bad):
    with pytest.raises(DataError, match=rf"token id {bad} is outside.*0\.\."):
        tokenizer.decode([0, bad])


def test_a_gap_among_the_ids_is_a_byte_that_is_no_text():
    """Qwen's and Llama 3's have special tokens there, which a model may write in any run."""
    tokenizer = RankTokenizer("ranks", {bytes([i]): i for i in range(256)}, r"[\s\S]", 260)
    text = tokenizer.decode([*"é".encode(), 258, 65, 260])
    assert text == "é\ufffdA<|endoftext|>"
    assert [tokenizer.bytes_of(i) for i in (65, 258, 260)] == [b"A", b"\xff", EOT.encode()]


def test_a_published_tokenizer_that_an_earlier_version_kept_as_ranks():
    """With added tokens, of which some are special, and a normal form."""
    spec = dict(kind="ranks", pattern=r"\w+|\W", eot_token=259, ranks=rank_text(), nfc=True,
                added={"<end>": [259, True], "<think>": [260, False]})
    tokenizer = tokenizer_from_spec(spec)
    assert tokenizer.spec() == spec and (tokenizer.n_vocab, tokenizer.eot_token) == (261, 259)
    assert tokenizer.encode("the<end><think>") == [257, *b"<end>", 260]
    assert tokenizer.encode_special("the<end><think>") == [257, 259, 260]
    assert tokenizer.encode("e\u0301") == [*"\u00e9".encode()]
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(tokenizer)))
    assert theirs.encode("the<end><think>").ids == [257, 259, 260]


def test_marks_of_words_are_not_counted_as_text(tmp_path):
    """Of GPT-1 (</w>, where CLIP's are bytes too) and BERT (##): bits per byte and the text that is
    printed during generation are those of the words with blanks between them."""
    tokenizers = pytest.importorskip("tokenizers")
    text = "the cat and the caf\u00e9 of the catalogue"
    for kind in ("gpt1", "clip", "bert"):
        if kind == "bert":
            theirs = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="<unk>"))
            make, how = tokenizers.trainers.WordPieceTrainer, {}
        else:
            how = dict(end_of_word_suffix="</w>")
            theirs = tokenizers.Tokenizer(tokenizers.models.BPE(**how))
            make = tokenizers.trainers.BpeTrainer
        pre = [tokenizers.pre_tokenizers.WhitespaceSplit()]
        if kind == "clip":
            pre.append(tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False))
            theirs.decoder = tokenizers.decoders.ByteLevel()
        theirs.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(pre)
        theirs.train_from_iterator([text], make(vocab_size=30, special_tokens=["<unk>"], **how))
        ours = JsonTokenizer(theirs.to_str(), None)
        ids = ours.encode(text)
        assert len(ids) > text.count(" ") + 1
        assert b"".join(map(ours.bytes_of, ids)).decode().strip() == text
        assert ours.token_bytes()[ids].sum() == len(text.encode()) + 1  # a blank per word


def test_no_character_is_left_out_of_a_text():
    """The package tokenizers leaves out bytes that a vocabulary lacks, e.g. one that was trained
    without the initial alphabet."""
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE())
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.decoder = tokenizers.decoders.ByteLevel()
    theirs.train_from_iterator(["the cat and the hat"], tokenizers.trainers.BpeTrainer(
        vocab_size=30, special_tokens=["<|end|>"], show_progress=False))
    ours = JsonTokenizer(theirs.to_str(), 0)
    assert ours.decode(ours.encode("the hat")) == "the hat"
    assert ours.encode_special("hat<|end|>")[-1] == 0
    for text in ("the cat: 5", "the caf\u00e9", "the<|end|>", "the\nhat"):
        with pytest.raises(DataError, match="has no ids for characters of the text"):
            ours.encode(text)


@pytest.mark.parametrize("model, known, unknown", [
    (dict(vocab={"a": 0, "b": 1, "</s>": 2}, byte_fallback=True), "ab", "a\u00e9b"),  # no bytes
    (dict(vocab={"a": 0, "#b": 1, "</s>": 2}, continuing_subword_prefix="#"), "ab", "aa"),
    (dict(vocab={"a": 0, "b": 1, "</s>": 2}), "ab", "</s>"),
    (dict(vocab={"a": 0, "b": 1, "</s>": 2, "xy": 3}), "ab", "xy")])  # no merge makes it
def test_no_model_leaves_out_a_character_without_a_token(model, known, unknown):
    pytest.importorskip("tokenizers")
    end = dict(id=2, content="</s>", special=True, single_word=False, lstrip=False, rstrip=False,
               normalized=False)
    tokenizer = JsonTokenizer(json.dumps(dict(
        added_tokens=[end], model=dict(type="BPE", merges=[]) | model)), 2)
    assert tokenizer.encode(known) == [0, 1]
    with pytest.raises(DataError, match=f"no ids for characters of the text '{unknown}'"):
        tokenizer.encode(unknown)


def test_a_missing_package_is_no_broken_tokenizer(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(SetupError, match="^this tokenizer.json needs the package tokenizers: pip"):
        tokenizer_from_spec(dict(kind="json", json="{}", eot_token=None))


def test_byte_is_tiktoken_and_the_bytes_themselves():
    tok = load_tokenizer("byte")
    assert tok.encode(TEXT) == list(TEXT.encode()) == tok.enc.encode_ordinary(TEXT)
    assert (tok.n_vocab, tok.eot_token) == (257, 256)
    assert tok.decode([0xC3, 0x28, 256]) == "\ufffd(<|endoftext|>"  # broken UTF-8 is replaced
    assert tok.decode(tok.encode("a\ud800b")) == "a\ufffdb"          # so are lone surrogates


def test_char_order_and_unknown():
    tok = CharTokenizer("b\na🙂")  # ids are places in the text given, sorted or not
    assert tok.encode("ab\n🙂") == [2, 0, 1, 3] and tok.eot_token is None
    assert tok.token_bytes().tolist() == [1, 1, 1, 4]
    with pytest.raises(DataError, match="'xz'.*not among the 4"):
        tok.encode("azxz")
    for chars in ("", "aba"):
        with pytest.raises(DataError, match="distinct"):
            CharTokenizer(chars)


def test_rank_file_golden(tmp_path):
    path = tmp_path / "my.tiktoken"
    path.write_text(rank_text())
    tok = load_tokenizer(str(path))
    assert tok.encode("the the th") == [257, 258, 32, 256]
    assert (tok.kind, tok.n_vocab, tok.eot_token) == ("ranks", 260, 259)
    path.write_text(rank_text() + f"{base64.b64encode(b'qu').decode()} 300\n")
    tok = load_tokenizer(str(path))
    assert (tok.encode("qu"), tok.eot_token) == ([300], 301)
    assert tok.decode([280]) == "\ufffd"  # a gap in the ranks
    with pytest.raises(DataError, match="302"):
        tok.decode([302])


@pytest.mark.parametrize("text, message", [
    (rank_text() + "dGhl\n", r"my\.tiktoken:260: expected `base64 rank`"),
    (rank_text() + "d$hl 260\n", r"my\.tiktoken:260"),
    ("dGhl 0\n", "expected distinct ranks, and all 256 single bytes"),
    ("", "expected distinct ranks"),
    (rank_text() + "dGhlbg== 258\n", "expected distinct ranks"),
    ("not a rank file at all", r":1: expected"),
])
def test_bad_rank_file(tmp_path, text, message):
    (tmp_path / "my.tiktoken").write_text(text)
    with pytest.raises(DataError, match=message):
        load_tokenizer(str(tmp_path / "my.tiktoken"))


def test_gpt2_golden(gpt2):
    assert gpt2.encode("Hello world<|endoftext|>") == [15496, 995, 27, 91, 437, 1659, 5239, 91, 29]
    assert (gpt2.n_vocab, gpt2.eot_token) == (50257, 50256)
    assert gpt2.decode([50256]) == "<|endoftext|>"
    assert hashlib.sha256(gpt2.spec()["ranks"].encode()).hexdigest() == R50K_SHA256
    assert load_tokenizer(str(CACHE / CACHE_NAME)).kind == "gpt2"  # the same file by its path


def test_gpt2_survives_a_million_blanks(gpt2):
    text = "a" + "\n" * 1_000_000 + "x" + " " * 1_000_000 + "y"  # tiktoken itself panics here
    assert gpt2.decode(gpt2.encode(text)) == text


def test_gpt2_offline_says_what_to_do(offline):
    with pytest.raises(DataError) as e:
        load_tokenizer("gpt2")
    for part in ("r50k_base.tiktoken", "--tokenizer byte", "curl -O"):
        assert part in str(e.value)


def test_gpt2_damaged_cache_is_not_used(offline):
    offline.mkdir()
    (offline / CACHE_NAME).write_bytes(b"damaged")
    with pytest.raises(DataError, match="could not be downloaded"):
        load_tokenizer("gpt2")


def test_download_checks_the_content(monkeypatch, tmp_path):
    class Serve(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/good" else 404)
            self.end_headers()
            self.wfile.write(b"eA== 0")

        def log_message(self, *args):
            pass

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = HTTPServer(("127.0.0.1", 0), Serve)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url, digest = f"http://127.0.0.1:{server.server_port}", hashlib.sha256(b"eA== 0").hexdigest()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    try:
        for path, expected, message in (("good", "0" * 64, "Hash mismatch"),
                                        ("bad", digest, "404")):
            monkeypatch.setattr("data.tokenizer.R50K_URL", f"{url}/{path}")
            monkeypatch.setattr("data.tokenizer.R50K_SHA256", expected)
            with pytest.raises(DataError, match=message):
                gpt2_ranks()
        assert not (tmp_path / "cache").exists()
        monkeypatch.setattr("data.tokenizer.R50K_URL", f"{url}/good")
        assert gpt2_ranks() == {b"x": 0}
    finally:
        server.shutdown()
        server.server_close()
    assert gpt2_ranks() == {b"x": 0}  # from the cache now
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize("name, message", [
    ("gtp2", "No such file.*expected byte, char, gpt2"),
    ("nope.tiktoken", "expected byte"), ("", "expected byte"), ("char", "folder prepared"),
    ("bpe", "folder prepared")])
def test_unknown_name(name, message):
    with pytest.raises(DataError, match=message):
        load_tokenizer(name)


def test_a_checkpoint_without_a_tokenizer_is_named(tmp_path):
    torch.save(dict(model=dict(w=torch.ones(1))), tmp_path / "ckpt.pt")
    with pytest.raises(DataError, match="ckpt.pt: no tokenizer; name it: byte"):
        load_tokenizer(str(tmp_path / "ckpt.pt"))


@pytest.mark.parametrize("spec", [None, {}, {"kind": "bpe"}, {"kind": "char"}, {"kind": "gpt2"},
                                  {"kind": "char", "chars": 3}, ["byte"]])
def test_bad_spec(spec):
    with pytest.raises(DataError, match="tokenizer|char"):
        tokenizer_from_spec(spec)


def test_nanogpt_folder(tmp_path):
    assert load_dataset_tokenizer(tmp_path) is None
    stoi = {"\n": 0, "b": 1, "a": 2}
    meta = {"vocab_size": 3, "itos": {i: c for c, i in stoi.items()}, "stoi": stoi}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta))
    tok = load_dataset_tokenizer(tmp_path)
    assert tok.encode("ab\n") == [2, 1, 0] and tok.decode([1, 2]) == "ba"
    assert load_tokenizer("char", str(tmp_path)).n_vocab == 3
    (tmp_path / "train_0.bin").touch()
    assert load_dataset_tokenizer(str(tmp_path / "train_*.bin")).n_vocab == 3  # files of the folder
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 3}))
    assert load_dataset_tokenizer(tmp_path) is None


def test_size_of_a_vocabulary_that_no_tokenizer_says(tmp_path):
    """Bare files of tokens are GPT-2's, as those of nanoGPT and llm.c; meta.json, and more so who
    asks, may say otherwise."""
    np.zeros(8, "<u2").tofile(tmp_path / "train.bin")
    assert find_vocabulary(str(tmp_path)) == (50257, None)
    (tmp_path / "meta.json").write_text('{"vocab_size": 256}')
    assert find_vocabulary(str(tmp_path)) == (256, None)
    assert find_vocabulary(str(tmp_path), size=300) == (300, None)


def test_the_tokenizer_of_files_in_several_folders(tmp_path):
    """As of a pattern with wildcards in the folder. With two of them, ids would have two meanings.
    """
    for name, chars in (("a1", "xyz"), ("a2", "xyz"), ("b1", "zyx")):
        (tmp_path / name).mkdir()
        np.uint16([0, 1, 2]).tofile(tmp_path / name / "train.bin")
        meta = dict(dtype="uint16", **write_tokenizer(tmp_path / name, CharTokenizer(chars)))
        (tmp_path / name / "meta.json").write_text(json.dumps(meta))
    size, tokenizer = find_vocabulary(f"{tmp_path}/a*/{{split}}.bin")
    assert (size, tokenizer.chars) == (3, "xyz")
    with pytest.raises(DataError, match="the tokenizers of .*a1, .*b1 differ; prepare all"):
        find_vocabulary(f"{tmp_path}/*1/{{split}}.bin")


def test_a_tokenizer_other_than_that_of_the_data_is_refused(tmp_path):
    folder = str(tmp_path)
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"itos": {0: "a", 1: "b"}, "vocab_size": 2}))
    size, tokenizer = find_vocabulary(folder, folder)
    assert (size, tokenizer.chars) == (2, "ab")
    with pytest.raises(DataError, match=f"tokenizer: byte is not the tokenizer of {folder}; leave"):
        find_vocabulary(folder, "byte")


def test_gpt2_is_not_downloaded_for_data_that_have_it(tmp_path, gpt2, offline):
    meta = dict(dtype="uint16", **write_tokenizer(tmp_path, gpt2))
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    assert find_vocabulary(str(tmp_path), "gpt2")[0] == 50257


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (Path(self.path),))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_runs_no_code(tmp_path, protocol):
    target = tmp_path / "ran"
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"itos": Evil(target)}, protocol))
    with pytest.raises(DataError, match=r"meta\.pkl.*could run code"):
        load_dataset_tokenizer(tmp_path)
    assert not target.exists()


@pytest.mark.parametrize("content", [
    b"", b"junk", pickle.dumps([1]), pickle.dumps({"itos": {0: 5}}),
    pickle.dumps({"itos": {1: "a"}})])
def test_broken_pickle(tmp_path, content):
    (tmp_path / "meta.pkl").write_bytes(content)
    with pytest.raises(DataError, match="meta.pkl: |its meta file describes no tokenizer"):
        load_dataset_tokenizer(tmp_path)


def described(pattern=".", eot=256, kind="ranks", ranks=None):
    return json.dumps({"tokenizer": {"kind": kind, "pattern": pattern, "eot_token": eot,
                                     "ranks": rank_text(()) if ranks is None else ranks}})


@pytest.mark.parametrize("content", [
    "", "[]", "{", "null", "[" * 100_000, "\ud800", '{"tokenizer": 3}',
    '{"tokenizer": {"kind": "x"}}',
    '{"tokenizer": {"kind": "gpt2", "ranks_file": "none"}}', '{"tokenizer": {"kind": ["byte"]}}',
    '{"tokenizer": {"kind": "char", "chars": 5}}', '{"tokenizer": {"kind": "char", "chars": [1]}}',
    '{"tokenizer": {"ranks_file": 7}}', '{"vocab_size": 0}', '{"vocab_size": true}',
    '{"vocab_size": 1e3}', '{"dtype": []}', described("("), described(5), described(eot=10**12),
    described(eot=255), described(eot="x"), described(eot=None), described(ranks=5),
    described(ranks=rank_text(()) + f"YWI= {10**12}\n", eot=10**12 + 1)])
def test_broken_meta_json(tmp_path, content):
    (tmp_path / "meta.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(DataError, match="meta.json: |its meta file describes no tokenizer") as e:
        load_dataset_tokenizer(tmp_path)
    assert "\n" not in str(e.value) and e.value.exit_code == 2
    with pytest.raises(DataError):
        load_tokenizer(str(tmp_path))


def test_a_run_on_broken_meta_json_ends_with_a_message(tmp_path):
    np.arange(9000, dtype="<u2").tofile(tmp_path / "train.bin")
    (tmp_path / "meta.json").write_text('{"tokenizer": {"kind": "x"}}')
    code, output = run("--config", "train/config_test.yaml", "--data_dir", tmp_path, "--out_dir",
                       tmp_path / "out", "--eval_interval", 0)
    assert code == 2 and "Traceback" not in output and "prepare" in output


def test_meta_json_reads_only_its_own_folder(tmp_path):
    (tmp_path / "outside.tiktoken").write_text(rank_text())
    inside = tmp_path / "inside"
    inside.mkdir()
    spec = {"kind": "ranks", "pattern": ".", "eot_token": 259, "ranks_file": "../outside.tiktoken"}
    (inside / "meta.json").write_text(json.dumps({"tokenizer": spec}))
    with pytest.raises(DataError, match="describes no tokenizer"):
        load_dataset_tokenizer(inside)
    (inside / "outside.tiktoken").write_text(rank_text())
    assert load_dataset_tokenizer(inside).n_vocab == 260


def test_imports_stay_light():
    code = "import sys, data.prepare; print({'torch', 'requests'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("tokenizer_config, config, end", [
    (dict(eos_token="</s>"), dict(eos_token_id=[7, 9]), 2),
    (dict(eos_token=dict(content="</s>")), {}, 2), (dict(eos_token="<none>"), {}, None),
    ({}, dict(eos_token_id=[7, 9]), 7), ({}, dict(eos_token_id=7), 7), ({}, {}, None)])
def test_the_end_of_text_of_a_published_tokenizer(tmp_path, tokenizer_config, config, end):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (tmp_path / "config.json").write_text(json.dumps(config))
    content = dict(added_tokens=[dict(id=1, content="<s>"), dict(id=2, content="</s>")])
    assert end_of_text(str(tmp_path), content) == end


@pytest.mark.parametrize("tokenizer_config, config", [
    ({"eos_token": "<end>", "bos_token": {"content": "<s>"}}, {"vocab_size": 9}),
    ({"bos_token": "<s>"}, {"vocab_size": 9, "eos_token_id": 3})])
def test_a_token_that_a_config_names_is_special(tmp_path, tokenizer_config, config):
    """Also if tokenizer.json has it as one of the user's: `transformers` then takes it for special,
    too. Otherwise an answer would end at that text in it."""
    pytest.importorskip("tokenizers")
    vocab = {c: i for i, c in enumerate("<>sendtol", 5)}
    added = [dict(id=i, content=text, special=False, single_word=False, lstrip=False, rstrip=False,
                  normalized=True) for i, text in ((2, "<s>"), (3, "<end>"), (4, "<tool>"))]
    vocab |= {token["content"]: token["id"] for token in added}
    content = dict(added_tokens=added, model=dict(type="BPE", vocab=vocab, merges=[]))
    for name, value in (("tokenizer", content), ("tokenizer_config", tokenizer_config),
                        ("config", config)):
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.special == {"<s>": 2, "<end>": 3} and tokenizer.eot_token == 3
    assert tokenizer.encode("<end><s><tool>") == [vocab[c] for c in "<end><s>"] + [4]
    assert tokenizer.encode_special("<end><s><tool>") == [3, 2, 4]
    assert tokenizer.token_bytes()[3] == 0


def test_a_text_always_has_the_same_ids():
    """BPE with dropout, for training of the tokenizer's own model"""
    pytest.importorskip("tokenizers")
    model = dict(type="BPE", vocab=dict(a=0, b=1, ab=2), merges=["a b"], dropout=0.9)
    tokenizer = JsonTokenizer(json.dumps(dict(added_tokens=[], model=model)), None)
    assert tokenizer.encode("ab" * 50) == [2] * 50 and len(tokenizer.offsets("ab" * 50)) == 50


@pytest.mark.parametrize("is_special", [False, True])  # a trainer accepts them as special only
def test_bytes_for_characters_that_the_vocabulary_lacks(is_special):
    pytest.importorskip("tokenizers")
    tokens = ["<unk>", "a", *(f"<0x{b:02X}>" for b in range(256))]
    vocab = {token: i for i, token in enumerate(tokens)}
    added = [dict(id=i, content=token, special=True, single_word=False, lstrip=False, rstrip=False,
                  normalized=False) for token, i in vocab.items() if token != "a" and is_special]
    model = dict(type="BPE", vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True)
    content = dict(added_tokens=added, model=model, decoder=dict(type="ByteFallback"))
    tokenizer = JsonTokenizer(json.dumps(content), None)
    ids = [1, 2 + 0xC3, 2 + 0xA9]
    assert tokenizer.encode("a\u00e9") == ids and tokenizer.decode(ids) == "a\u00e9"
    assert b"".join(map(tokenizer.bytes_of, ids)) == "a\u00e9".encode()
    assert tokenizer.encode("<0x41>") == [2 + b for b in b"<0x41>"]  # text stays text


def test_the_bytes_of_an_added_token_with_letters_that_stand_for_bytes():
    """bits per byte, of a byte-level vocabulary: \u00f6 in a token would be the byte 0xF6"""
    pytest.importorskip("tokenizers")
    vocab = {token: i for i, token in enumerate(BYTE_CHARACTERS.values())}
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    added = dict(id=256, content="gr\u00f6\u00dfe", special=False, single_word=False,
                 lstrip=False, rstrip=False, normalized=False)
    tokenizer = JsonTokenizer(json.dumps(dict(
        added_tokens=[added], pre_tokenizer=level, decoder=level,
        model=dict(type="BPE", vocab=vocab, merges=[]))), None)
    text = "\u00f6 gr\u00f6\u00dfe"
    ids = tokenizer.encode(text)
    assert ids[-1] == 256 and b"".join(map(tokenizer.bytes_of, ids)) == text.encode()
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())


def test_the_bytes_of_an_added_token_that_the_vocabulary_has_too():
    """From " a" the merges give it, so it is a space and an a, as the package decodes it."""
    pytest.importorskip("tokenizers")
    vocab = {token: i for i, token in enumerate([*BYTE_CHARACTERS.values(), "\u0120a"])}
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    added = dict(id=256, content="\u0120a", special=False, single_word=False, lstrip=False,
                 rstrip=False, normalized=False)
    tokenizer = JsonTokenizer(json.dumps(dict(
        added_tokens=[added], pre_tokenizer=level, decoder=level,
        model=dict(type="BPE", vocab=vocab, merges=["\u0120 a"]))), None)
    ids = tokenizer.encode("x a")
    assert ids[-1] == 256 and tokenizer.bytes_of(256) == b" a"
    assert tokenizer.enc.decode(ids) == tokenizer.decode(ids) == "x a"
    assert tokenizer.token_bytes()[ids].sum() == 3


@pytest.mark.parametrize("unknown", [{}, {"unk_token": "</s>"}])
def test_a_byte_that_is_the_token_of_padding_stays_in_a_text(unknown):
    pytest.importorskip("tokenizers")
    tokens = [*BYTE_CHARACTERS.values(), "</s>", "!!"]
    vocab = {token: i for i, token in enumerate(tokens)}
    added = [dict(id=vocab[text], content=text, special=True, single_word=False, lstrip=False,
                  rstrip=False, normalized=False) for text in ("!", "</s>")]
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    tokenizer = JsonTokenizer(json.dumps(dict(
        added_tokens=added, pre_tokenizer=level, decoder=level,
        model=dict(type="BPE", vocab=vocab, merges=["! !"]) | unknown)), 256)
    ids = tokenizer.encode("a! !!")
    assert ids == [vocab[text] for text in ("a", "!", "\u0120", "!!")]
    assert b"".join(map(tokenizer.bytes_of, ids)).decode() == tokenizer.decode(ids) == "a! !!"


@pytest.mark.parametrize("model", [
    dict(type="Unigram", unk_id=0, vocab=[["<unk>", 0], ["</s>", 0], ["a", -1], ["b", -2]]),
    dict(type="WordLevel", unk_token="<unk>", vocab={"<unk>": 0, "</s>": 1, "a": 2, "b": 3}),
    dict(type="BPE", unk_token="<unk>", ignore_merges=True, vocab={
        "<unk>": 0, "</s>": 1, "a": 2, "b": 3, "</": 4, "s>": 5, "<": 6, "/": 7, "s": 8, ">": 9},
        merges=["< /", "s >", "</ s>"])])
def test_no_model_finds_a_special_token_in_a_text(model):
    """The vocabulary of the model has it, not only the list of added tokens."""
    pytest.importorskip("tokenizers")
    added = [dict(id=i, content=text, single_word=False, lstrip=False, rstrip=False,
                  normalized=False, special=i != len(model["vocab"]))
             for i, text in ((0, "<unk>"), (1, "</s>"), (len(model["vocab"]), "<tool>"))]
    tokenizer = JsonTokenizer(json.dumps(dict(
        version="1.0", added_tokens=added, model=model, pre_tokenizer=dict(
            type="WhitespaceSplit"))), 1)
    ids = tokenizer.encode("a </s> b")
    assert [ids[0], ids[-1]] == [2, 3] and 1 not in ids
    assert len(tokenizer.offsets("a </s> b")) == len(ids)
    assert tokenizer.encode_special("a </s> b") == [2, 1, 3]
    assert tokenizer.encode("a <tool>") == [2, len(model["vocab"])]
    assert tokenizer.decode([2, 1]) == "a </s>"
