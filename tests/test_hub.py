"""data/hub.py against a hub on this machine: by huggingface_hub, or one line without it."""

import contextlib
import os
import sys
import time

import pytest
from fake_hub import FakeHub

from data import hub as data_hub
from data.hub import download, local_folder
from train.base.errors import DataError, UserError


def weights(n_bytes):
    """A .safetensors file with a tensor of n_bytes."""
    header = b'{"a": {"dtype": "U8", "shape": [%d], "data_offsets": [0, %d]}}' % (n_bytes, n_bytes)
    return len(header).to_bytes(8, "little") + header + bytes(range(250)) * (n_bytes // 250)


WEIGHTS, CONFIG = weights(3000), '{"model_type": "llama"}'


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with one model and an empty cache."""
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    folder = tmp_path / "model"
    (folder / "onnx").mkdir(parents=True)
    for name, text in (("config.json", CONFIG), ("tokenizer.json", '{"model": {}}'),
                       ("README.md", ""), ("consolidated.safetensors", ""),
                       ("onnx/model.safetensors", "")):
        (folder / name).write_text(text)
    (folder / "model.safetensors").write_bytes(weights(24_000_000))
    server = FakeHub(**{"some/one": folder})
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    yield server
    server.close()


@pytest.mark.ci
def test_only_the_files_of_a_model_come_and_once(hub):
    small = local_folder("hf:some/one", weights=False)
    assert sorted(os.listdir(small)) == ["config.json", "tokenizer.json"]
    folder = local_folder("hf:some/one")
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors", "tokenizer.json"]
    weights = hub.repos["some/one"] / "model.safetensors"
    with open(os.path.join(folder, "model.safetensors"), "rb") as f:
        assert f.read() == weights.read_bytes()
    before = len(hub.log)
    assert local_folder("hf:some/one") == folder and len(hub.log) == before


@pytest.mark.ci
def test_a_cut_download_is_resumed(hub):
    hub.cuts = 1
    try:
        local_folder("hf:some/one")
    except DataError as error:  # versions that do not resume by themselves
        assert "The same command downloads the missing files" in str(error)
    folder = local_folder("hf:some/one")
    size = os.path.getsize(hub.repos["some/one"] / "model.safetensors")
    assert os.path.getsize(os.path.join(folder, "model.safetensors")) == size
    starts = [first for name, first in hub.log if name == "model.safetensors"]
    assert len(starts) == 2 and starts[0] == 0 < starts[1] <= 12_000_000


@pytest.mark.ci
@pytest.mark.parametrize("name, content", [
    ("config.json", b"<html>Sign in</html>"), ("tokenizer.json", b'{"error": "Not logged in"}'),
    ("config.json", b'{"model_type": "llama", "hidden'), ("chat_template.jinja", b"\xff{{ a }}"),
    ("model.safetensors", WEIGHTS[:-100]),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("config.json", b" " * 2000), ("config.json", b"[{}]"), ("config.json", b"{}"),
        ("config.json", b'{"error": "Not logged in"}'), ("config.json", CONFIG.encode("utf-16")),
        ("config.json", b"\xef\xbb\xbf" + CONFIG.encode()),
        ("chat_template.jinja", b"<html>Sign in</html>"),
        ("model.safetensors", b"<html>Sign in</html>")))])
def test_a_wrong_answer_is_not_kept(hub, name, content):
    """With status 200 and all headers of the hub."""
    (hub.repos["some/one"] / "model.safetensors").write_bytes(WEIGHTS)
    (hub.repos["some/one"] / "chat_template.jinja").write_text("{{ messages }}")
    hub.wrong = {name: content}
    with pytest.raises(DataError, match=f"deleted {name}: expected a file of a model"):
        local_folder("hf:some/one")
    hub.wrong = {}
    folder = local_folder("hf:some/one")
    assert open(os.path.join(folder, "config.json")).read() == CONFIG
    assert open(os.path.join(folder, "chat_template.jinja")).read() == "{{ messages }}"
    assert open(os.path.join(folder, "model.safetensors"), "rb").read() == WEIGHTS


def send_config(hub, monkeypatch, sizes):
    """Have `hub` send another config.json, in parts of these sizes, ten per second if they are
    single bytes."""
    answer = hub.answer
    (hub.repos["some/one"] / "config.json").write_text('{"a": 1}')  # other content: another blob

    def send_parts(request, send=True):
        if not request.path.endswith("/config.json") or not send:
            return answer(request, send)
        request.send_response(200)
        request.end_headers()
        with contextlib.suppress(OSError):  # the client left
            for n in sizes:
                request.wfile.write(b"{" * n)
                time.sleep(0 if n > 1 else 0.1)
    monkeypatch.setattr(hub, "answer", send_parts)


@pytest.mark.parametrize("sizes, message", [
    ([1 << 20] * 100, r"OSError: \[Errno 27\] File too large"),  # 100 MiB, of which a part is read
    ([1] * 100, "took more than 2 seconds")])
def test_a_mirror_that_sends_without_end_is_one_line(hub, monkeypatch, sizes, message):
    """Fast, or a byte now and then; no such file is used."""
    send_config(hub, monkeypatch, sizes)
    monkeypatch.setattr(data_hub, "MAX_JSON_BYTES", 20 << 20)
    monkeypatch.setattr(data_hub, "MAX_JSON_SECONDS", 2 if sizes[0] == 1 else 60)
    with pytest.raises(DataError, match=f"^hf:some/one: could not be .*{message}") as error:
        local_folder("hf:some/one")
    assert "\n" not in str(error.value)
    kept = [name for _, _, names in os.walk(os.environ["HF_HUB_CACHE"]) for name in names]
    assert "config.json" not in kept


def test_a_page_for_everything_is_one_line(hub, monkeypatch):
    """What a sign-in page answers to each address."""
    def page(request, send=True):
        request.send_response(200)
        request.send_header("Content-Length", "6")
        request.end_headers()
        if send:
            request.wfile.write(b"<html>")
    monkeypatch.setattr(hub, "answer", page)
    with pytest.raises(DataError, match="hf:some/one: could not be downloaded") as error:
        local_folder("hf:some/one")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("endpoint", ["http://localhost.evil.example", "http://127.evil.example",
                                      "http://localhost@evil.example", "http://127.0.0.1.example"])
def test_a_name_that_begins_like_this_machine_is_not_trusted(hub, monkeypatch, endpoint):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(DataError, match="expected the https:// address of a mirror"):
        local_folder("hf:some/one")


@pytest.mark.ci
def test_the_cache_needs_no_network(hub, monkeypatch):
    folder = local_folder("hf:some/one")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert local_folder("hf:some/one") == folder
    with pytest.raises(DataError, match="hf:some/two: could not be downloaded") as error:
        local_folder("hf:some/two")
    assert "\n" not in str(error.value) and "Without a network, copy the files" in str(error.value)


@pytest.mark.parametrize("name, endpoint, message", [
    ("hf:../x", None, "could not be downloaded .HFValidationError: "),
    ("hf:a/b/c", None, "could not be downloaded .HFValidationError: "),
    ("hf:some/none", None, "hf:some/none: could not be downloaded"),
    ("hf:some/bare", None, "hf:some/bare: the repository has no files of a model"),
    ("hf:some/one", "http://a.example", "expected the https:// address")])
def test_what_cannot_be_downloaded_is_one_line(hub, tmp_path, monkeypatch, name, endpoint, message):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "README.md").write_text("no model")
    hub.repos["some/bare"] = tmp_path / "bare"
    if endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(DataError, match=message) as error:
        local_folder(name)
    assert "\n" not in str(error.value)


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match="^hf:a/b needs the package huggingface_hub: pip install "
                       "huggingface_hub$"):
        local_folder("hf:a/b")
    with pytest.raises(UserError, match="^dataset x needs the package huggingface_hub"):
        download("dataset x", "hf_hub_download", repo_id="a/b", filename="c")


def test_a_damaged_file_in_a_cache_without_links_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(data_hub, "download", lambda *args, **kwargs: str(tmp_path))
    with pytest.raises(DataError, match="deleted config.json"):
        local_folder("hf:a/b")
    assert not os.listdir(tmp_path)


def test_the_package_for_weights_is_named_with_the_model(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS)
    monkeypatch.setattr(data_hub, "download", lambda *args, **kwargs: str(tmp_path))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(UserError, match="^hf:a/b needs the package safetensors"):
        local_folder("hf:a/b")


def test_a_path_is_no_name(tmp_path):
    assert local_folder(str(tmp_path)) == str(tmp_path)
    assert local_folder("~/x") == os.path.expanduser("~/x")
