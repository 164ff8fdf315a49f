"""data/hub.py against a hub on this machine: by huggingface_hub, or one line without it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fake_hub import FakeHub
from processes import REPO

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


def test_a_module_that_writes_a_file_when_imported_is_no_mirror(hub, tmp_path, monkeypatch):
    """As trio does, which is imported with the hub's functions where it is installed."""
    (tmp_path / "trio.py").write_text("import tempfile\ntempfile.TemporaryFile().close()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert local_folder("hf:some/one", weights=False)


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
    with pytest.raises(DataError, match=f"deleted {name}: expected the .* files of a model"):
        local_folder("hf:some/one")
    hub.wrong = {}
    folder = local_folder("hf:some/one")
    assert open(os.path.join(folder, "config.json")).read() == CONFIG
    assert open(os.path.join(folder, "chat_template.jinja")).read() == "{{ messages }}"
    assert open(os.path.join(folder, "model.safetensors"), "rb").read() == WEIGHTS


def test_wrong_answers_of_several_files_are_removed_at_once(hub):
    """A page that says in each file which one was asked for."""
    (hub.repos["some/one"] / "tokenizer_config.json").write_text("{}")
    hub.wrong = {name: f"<html>{name}</html>".encode()
                 for name in ("config.json", "tokenizer_config.json")}
    with pytest.raises(DataError, match="deleted config.json, tokenizer_config.json: expected"):
        local_folder("hf:some/one", weights=False)
    hub.wrong = {}
    local_folder("hf:some/one", weights=False)


@pytest.mark.ci
@pytest.mark.parametrize("place", ["{root}/mine", "../../../mine", "{root}/new/mine", "{root}",
                                   "../..", "../../models--other--one/mine"])
@pytest.mark.parametrize("part", ["etag", "commit"])
def test_a_mirror_changes_no_file_outside_of_its_part_of_the_cache(hub, tmp_path, part, place):
    """huggingface_hub makes paths of the ETag and the commit; such a file may exist or not."""
    setattr(hub, part, place.format(root=tmp_path))
    other = tmp_path / "cache/models--other--one"
    for path in (tmp_path, other, other / "mine"):
        path.mkdir(parents=True, exist_ok=True)
        (path / "mine.json").write_text("{}")
        (path / "config.json").write_text("<html>")

    def outside():
        return {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")
                if "models--some--one" not in path.parts and "cache" != path.name != ".locks"}
    before = outside()
    with pytest.raises(DataError, match="^hf:some/one: could not be downloaded") as error:
        local_folder("hf:some/one", weights=False)
    assert outside() == before and "\n" not in str(error.value)


def send_config(hub, monkeypatch, sizes):
    """Have `hub` send another config.json, in parts of these sizes, ten per second if they are
    single bytes. Return two events: the answer has begun; the client left before its end."""
    answer, begun, left = hub.answer, threading.Event(), threading.Event()
    (hub.repos["some/one"] / "config.json").write_text('{"a": 1}')  # other content: another blob

    def send_parts(request, send=True):
        if not request.path.endswith("/config.json") or not send:
            return answer(request, send)
        request.send_response(200)
        request.end_headers()
        begun.set()
        try:
            for n in sizes:
                request.wfile.write(b"{" * n)
                time.sleep(0 if n > 1 else 0.1)
        except OSError:
            left.set()
    monkeypatch.setattr(hub, "answer", send_parts)
    return begun, left


@pytest.mark.parametrize("sizes, message", [
    ([1 << 20] * 100, r"OSError: \[Errno 27\] File too large"),  # 100 MiB, of which a part is read
    ([1] * 100, "took more than 2 seconds")])
def test_a_mirror_that_sends_without_end_is_one_line(hub, monkeypatch, sizes, message):
    """Fast, or a byte now and then; no such file is used."""
    send_config(hub, monkeypatch, sizes)
    monkeypatch.setattr(data_hub, "MAX_JSON_BYTES", 20 << 20)
    monkeypatch.setattr(data_hub, "MAX_JSON_SECONDS", 2 if sizes[0] == 1 else 60)
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)  # as git does in its hooks
    with pytest.raises(DataError, match=f"^hf:some/one: could not be .*{message}") as error:
        local_folder("hf:some/one")
    signal.signal(signal.SIGALRM, before)
    assert "\n" not in str(error.value)
    kept = [name for _, _, names in os.walk(os.environ["HF_HUB_CACHE"]) for name in names]
    assert "config.json" not in kept


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, the download ends by its limit")
def test_a_download_ends_with_its_command(hub, monkeypatch):
    begun, left = send_config(hub, monkeypatch, [1] * 300)
    command = "from data.hub import local_folder; local_folder('hf:some/one')"
    with subprocess.Popen([sys.executable, "-c", command], start_new_session=True,
                          cwd=Path(data_hub.__file__).parents[1]) as process:
        assert begun.wait(60)
        process.kill()
    assert left.wait(10)


def test_a_list_of_files_without_end_is_one_line(hub, monkeypatch):
    def endless(request, path):
        request.send_response(200)
        request.end_headers()
        with contextlib.suppress(OSError):  # the client left
            for _ in range(200):
                request.wfile.write(b" " * (4 << 20))
    monkeypatch.setattr(hub, "describe", endless)
    monkeypatch.setattr(data_hub, "MAX_JSON_BYTES", 20 << 20)
    with pytest.raises(DataError, match=r"could not be downloaded \(MemoryError"):
        local_folder("hf:some/one")


def test_the_memory_of_a_download_of_weights_is_limited(tmp_path):
    """A list of files without end has no length that could be refused."""
    (tmp_path / "huggingface_hub").mkdir()
    (tmp_path / "huggingface_hub" / "constants.py").write_text("HF_HUB_CACHE = 'cache'")
    (tmp_path / "huggingface_hub" / "__init__.py").write_text(
        "def get_token(): pass\n"
        "def snapshot_download(**arguments):\n    return str(len(bytearray(10 << 30)))\n")
    request = json.dumps(["snapshot_download", data_hub.MAX_FILE_BYTES, 60, dict(repo_id="a/b")])
    done = subprocess.run([sys.executable, "-m", "data.hub", request], capture_output=True,
                          cwd=Path(data_hub.__file__).parents[1], text=True,
                          env=os.environ | dict(PYTHONPATH=str(tmp_path)))
    assert (done.returncode, done.stdout[:11]) == (1, "MemoryError"), done.stdout


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
    ("hf:../x", None, "expected hf:OWNER/NAME"), ("hf:a/b/c", None, "expected hf:OWNER/NAME"),
    ("hf:some/none", None, "hf:some/none: could not be downloaded"),
    ("hf:some/one", "http://a.example", "expected the https:// address"),
    ("hf:some/bare", None, "has no config.json")])
def test_what_cannot_be_downloaded_is_one_line(hub, tmp_path, monkeypatch, name, endpoint, message):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "tokenizer.json").write_text('{"model": {}}')
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


def test_a_path_is_no_name(tmp_path):
    assert local_folder(str(tmp_path)) == str(tmp_path)
    assert local_folder("~/x") == os.path.expanduser("~/x")


def test_a_lower_limit_of_the_user_stays(hub, tmp_path):
    """The program may not raise it: the download would end with an error."""
    program = """
import resource
from data.hub import run_download
import huggingface_hub
def show(repo_id):
    print(resource.getrlimit(resource.RLIMIT_FSIZE), resource.getrlimit(resource.RLIMIT_DATA))
    return __file__
huggingface_hub.show = show
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
run_download("show", 1 << 22, 60, dict(repo_id="some/one"))
"""
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run([sys.executable, tmp_path / "program.py"], capture_output=True, text=True,
                          env=os.environ | dict(PYTHONPATH=str(REPO)))
    assert f"{(1 << 20,) * 2} {(1 << 26,) * 2}" in done.stdout, done
