"""model/serve/ through real clients: the openai package, plain sockets, and a browser."""

import base64
import contextlib
import functools
import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import REPO
from processes import Fork

from data.chat import TEMPLATE, encode_chat, to_messages
from data.tokenizer import CharTokenizer, load_tokenizer
from model.generate import generate
from model.gpt import GPT, GPTConfig
from model.serve import MAX_BODY, Server, main
from model.serve import engine as engine_file
from model.serve.engine import Engine, Text
from train.checkpoint import save_checkpoint

openai = pytest.importorskip("openai")
BYTES, LETTERS = load_tokenizer("byte"), CharTokenizer("abcdefghijklmnopqrstuvwxyz .,")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def small(tokenizer=BYTES, **changes):
    """Weights so large that what comes next depends on all that stands before."""
    shape = dict(n_layer=2, n_head=2, n_embd=32, n_hidden=64, block_size=64, tie_weights=False,
                 vocab_size=tokenizer.n_vocab) | changes
    model = GPT(GPTConfig(**shape)).eval()
    for p in model.parameters():
        if p.dim() == 2:
            p.data *= 8
    return model.requires_grad_(False)


@contextlib.contextmanager
def serving(model, tokenizer=BYTES, template=None, **limits):
    """A Server that answers; ends with nothing left behind."""
    threads = threading.active_count()
    server, stopped = Server("127.0.0.1", 0), []
    engine = Engine(model, tokenizer, **limits)
    thread = threading.Thread(target=server.serve, args=(engine, "tiny", template, stopped),
                              daemon=True)
    thread.start()
    try:
        yield server
        soon(lambda: not (engine.rows or engine.waiting or engine.reading or server.answering))
    finally:
        stopped.append(signal.SIGTERM)
        thread.join(20)
    assert not thread.is_alive() and not engine.thread.is_alive()
    soon(lambda: threading.active_count() <= threads)


@pytest.fixture(scope="module")
def model():
    return small()


@pytest.fixture(scope="module")
def server(model):
    with serving(model, slots=8, template=TEMPLATE) as server:
        yield server


@functools.cache
def client(server):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="none",
                         max_retries=0, timeout=60)


def complete(server, **request):
    return client(server).completions.create(**dict(model="tiny", prompt="once") | request)


def expected(model, prompt, n, tokenizer=BYTES, **how):
    """(text, ids) that model.sample writes."""
    ids = prompt if isinstance(prompt, list) else tokenizer.encode(prompt)
    out = generate(model, torch.tensor([ids]), n, stop_token=tokenizer.eot_token,
                   n_vocab=tokenizer.n_vocab, **how)[0, len(ids):].tolist()
    text = out[:-1] if out[-1] == tokenizer.eot_token else out
    return tokenizer.decode(text), out


def soon(condition, timeout=10):
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def send(server, method="POST", path="/v1/completions", body=b"", **headers):
    """(status, headers, body) of a raw request; a dict body is sent as JSON."""
    data = json.dumps(body).encode() if isinstance(body, (dict, list)) else body
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    headers = {"Content-Type": "application/json"} | {k.replace("_", "-"): v
                                                      for k, v in headers.items()}
    connection.request(method, path, data, headers)
    reply = connection.getresponse()
    with contextlib.closing(connection):
        return reply.status, reply.headers, reply.read()


# -----------------------------------------------------------------------------
# what is written

HOW = [dict(temperature=0), dict(temperature=0.8, seed=3), dict(temperature=1, seed=-1, top_p=0.7),
       dict(temperature=1.5, seed=2**40, top_k=5)]


def request_of(how):
    rest = {k: v for k, v in how.items() if k != "top_k"}
    return rest | (dict(extra_body=dict(top_k=how["top_k"])) if "top_k" in how else {})


def test_fifty_at_once_get_what_each_would_get_alone(server, model, monkeypatch):
    """Other prompts, lengths and settings; in streams and whole; over the end of the context."""
    shapes, forward, submit = [], model.forward, Engine.submit
    came = threading.Semaphore(0)  # nothing is computed before all fifty have come

    def counted(engine, job):
        submit(engine, job)
        came.release()

    def noted(idx, **kw):
        if not shapes:
            assert all(came.acquire(timeout=30) for _ in range(50))
        shapes.append(idx.shape)
        return forward(idx, **kw)
    monkeypatch.setattr(Engine, "submit", counted)
    monkeypatch.setattr(model, "forward", noted)
    monkeypatch.setattr(engine_file, "PIECE", 7)
    jobs = [dict(prompt=f"Text number {i}. " * (i % 4 + 1), max_tokens=3 + i * 7 % 60)
            | HOW[i % len(HOW)] for i in range(50)]

    def ask(job):
        how = {k: v for k, v in job.items() if k not in ("prompt", "max_tokens")}
        made = complete(server, prompt=job["prompt"], max_tokens=job["max_tokens"],
                        stream=job["max_tokens"] % 2 == 0, **request_of(how))
        if job["max_tokens"] % 2 == 0:
            return "".join(chunk.choices[0].text for chunk in made)
        assert made.usage.prompt_tokens == len(job["prompt"])
        return made.choices[0].text
    with ThreadPoolExecutor(50) as pool:
        texts = list(pool.map(ask, jobs))
    monkeypatch.undo()
    for job, text in zip(jobs, texts):
        assert text == expected(model, job.pop("prompt"), job.pop("max_tokens"), **job)[0]
    rows = [B for B, T in shapes if T == 1]
    # They were computed together. Prompts are read one at a time, while others end: the order in
    # which they came decides whether all eight places are ever taken at once.
    assert 6 <= max(rows) <= 8 and len(rows) < sum(rows) / 4
    long = [i for i, (B, T) in enumerate(shapes) if T == 7]
    assert any((b - a) > 1 for a, b in zip(long, long[1:]))  # texts went on between the pieces


@pytest.mark.parametrize("changes", [dict(pos="learned", norm="layer", mlp="gelu", bias=True),
                                     dict(prev_embedding=True, n_kv_head=1, tie_weights=False)])
def test_other_shapes_of_model(changes):
    model = small(**changes)
    with serving(model, slots=2) as server, ThreadPoolExecutor(4) as pool:
        prompts = ["a" * n for n in (1, 5, 20, 40)]
        texts = list(pool.map(lambda p: complete(server, prompt=p, max_tokens=25, temperature=0),
                              prompts))
        for prompt, made in zip(prompts, texts):
            assert made.choices[0].text == expected(model, prompt, 25, temperature=0)[0]
        learned = changes.get("pos") == "learned"  # the context is a limit only then
        if learned:
            with pytest.raises(openai.BadRequestError, match="max_tokens: expected .* 1 to 25"):
                complete(server, prompt="a" * 40, max_tokens=26)


def test_end_of_text_ends_it(server, model):
    seed = next(s for s in range(99) if expected(model, "x", 60, seed=s)[1][-1] == 256)
    made = complete(server, prompt="x", max_tokens=60, seed=seed)
    text, ids = expected(model, "x", 60, seed=seed)
    assert (made.choices[0].text, made.choices[0].finish_reason) == (text, "stop")
    assert made.usage.completion_tokens == len(ids)
    assert made.usage.total_tokens == len(ids) + 1


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_text_and_are_not_in_it(stream):
    model = small(LETTERS)
    text, _ = expected(model, "once", 40, LETTERS, seed=5)
    stop = [text[20:24], "never"]
    cut = text[:text.index(stop[0])]
    with serving(model, LETTERS) as server:
        made = complete(server, max_tokens=40, seed=5, stop=stop, stream=stream)
        parts = [c.choices[0] for c in made] if stream else [made.choices[0]]
        assert "".join(p.text for p in parts) == cut and parts[-1].finish_reason == "stop"
        made = complete(server, max_tokens=22, seed=5, stop=text[20:24])  # half a stop is text
        assert made.choices[0].text == text[:22] and made.choices[0].finish_reason == "length"
        with pytest.raises(openai.BadRequestError, match="characters 'X'"):
            complete(server, prompt="X")


def test_text_holds_back_half_characters_and_possible_stops():
    whole, text = "né 😀 wörld END", Text(("END", "ENTER"))
    parts = [text.add(bytes([b])) for b in whole.encode()]
    assert "".join(parts) == whole[:-3] and text.stopped
    assert "\ufffd" not in "".join(parts) and [p for p in parts if p][-1] == " "
    text = Text(("END",))
    assert [text.add(b"\xf0"), text.add(b"E"), text.add(b"N"), text.add(b"\xc3", last=True)] == [
        "", "\ufffd", "", "EN\ufffd"]


def test_prompts_of_ids_and_defaults(server, model):
    ids = [256, 3, 99]
    for prompt in (ids, [ids]):
        made = complete(server, prompt=prompt, temperature=0)
        assert made.choices[0].text == expected(model, ids, 16, temperature=0)[0]
    assert made.usage.completion_tokens == 16  # OpenAI's default
    assert complete(server, prompt="", max_tokens=1).usage.prompt_tokens == 1
    assert complete(server, temperature=1e-30, extra_body=dict(top_p=1e-60)).choices
    listed = client(server).models.list().data
    assert [m.id for m in listed] == ["tiny"]


def test_chat(server, model):
    messages = [dict(role="developer", content="Be kind."), dict(role="user", content=" Hi "),
                dict(role="assistant", content="Hello"),
                dict(role="user", content=[dict(type="text", text="Who?")])]
    turns = to_messages({"messages": [messages[0] | {"role": "system"}, *messages[1:]]})
    ids = encode_chat([*turns, ("assistant", "")], BYTES)[0].tolist()[:-1]
    text, out = expected(model, ids[-64:], 20, temperature=0)
    chats = client(server).chat.completions
    with pytest.raises(openai.BadRequestError, match="context of this model has 64"):
        chats.create(model="tiny", messages=messages)
    messages, turns = messages[3:], turns[3:]
    ids = encode_chat([*turns, ("assistant", "")], BYTES)[0].tolist()[:-1]
    text, out = expected(model, ids, 20, temperature=0)
    request = dict(model="tiny", messages=messages, temperature=0, max_completion_tokens=20)
    made = chats.create(**request)
    assert (made.choices[0].message.role, made.choices[0].message.content) == ("assistant", text)
    assert (made.object, made.usage.prompt_tokens) == ("chat.completion", len(ids))
    parts = list(chats.create(**request, stream=True, stream_options=dict(include_usage=True)))
    first = parts[0].choices[0].delta
    assert (first.role, first.content) == ("assistant", "")
    assert "".join(p.choices[0].delta.content or "" for p in parts[:-1]) == text
    assert [p.choices[0].finish_reason for p in parts[-3:-1]] == [
        None, made.choices[0].finish_reason]
    assert parts[-1].choices == [] and parts[-1].usage.completion_tokens == len(out)
    assert len({p.id for p in parts}) == 1 and parts[0].object == "chat.completion.chunk"


def test_chat_asks_for_a_model_that_learned_chats():
    with serving(small()) as server, pytest.raises(openai.NotFoundError, match="learned no chats"):
        client(server).chat.completions.create(model="tiny", messages=[])


def test_the_stream_byte_by_byte(server):
    status, headers, body = send(server, body=dict(prompt="a", stream=True, max_tokens=5))
    assert (status, headers["Content-Type"], headers["Transfer-Encoding"]) == (
        200, "text/event-stream", "chunked")
    *events, end, rest = body.decode().split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert {c["object"] for c in chunks} == {"text_completion"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert all("usage" not in c for c in chunks)


# -----------------------------------------------------------------------------
# what is refused

def ask(**body):
    return dict(body=body)


@pytest.mark.parametrize("request_, status, message", [
    (dict(body=b"{"), 400, "not JSON"),
    (dict(body=b"[" * 100_000), 400, "not JSON"),
    (dict(body=[]), 400, "JSON object"),
    (dict(body=b"{}", Content_Type="text/plain"), 415, "application/json"),
    (dict(body=b"{}", Content_Length="x"), 411, "Content-Length"),
    (dict(body=b"{}", Content_Length="9" * 5000), 413, "the most is"),
    (dict(path="/v2"), 404, "/v1/completions"),
    (dict(method="GET"), 405, "is for POST"),
    (dict(method="BREW"), 501, "Unsupported method"),
    (ask(model="gpt-5"), 404, "there is 'tiny'"),
    (ask(prompt=5), 400, "prompt: expected"),
    (ask(prompt=["a", "b"]), 400, "request for each prompt"),
    (ask(prompt=[1, 257]), 400, "ids from 0 to 256"),
    (ask(prompt="a" * 65), 400, "65 tokens; the context of this model has 64"),
    (ask(max_tokens=0), 400, "max_tokens: expected an integer from 1 to 1024, got 0"),
    (ask(max_tokens=1025), 400, "max_tokens"),
    (ask(max_completion_tokens=True), 400, "max_completion_tokens: expected"),
    (ask(max_tokens=1.5), 400, "max_tokens"),
    (dict(body=b'{"temperature": NaN}'), 400, "temperature: expected a number from 0 to 2"),
    (ask(temperature="hot"), 400, "temperature"), (ask(temperature=-1), 400, "temperature"),
    (ask(top_p=1.1), 400, "top_p"), (ask(top_k=0), 400, "top_k"), (ask(seed=2**63), 400, "seed"),
    (ask(stop=""), 400, "stop: expected"), (ask(stop=["a"] * 17), 400, "stop"),
    (ask(stop={"a": 1}), 400, "stop"),
    (ask(n=2), 400, "send as many requests"), (ask(logprobs=0), 400, "logprobs: 0"),
    (ask(logprobs=True), 400, "logprobs"), (ask(presence_penalty=0.5), 400, "presence_penalty"),
    (ask(stream="yes"), 400, "stream: true or false"),
    (dict(path="/v1/chat/completions", body={}), 400, "messages: expected a list"),
    (dict(path="/v1/chat/completions", body=dict(messages=[dict(role="cat", content="")])), 400,
     "role 'cat'"),
    (dict(path="/v1/chat/completions", body=dict(messages=[dict(role="user", content=[
        dict(type="image_url")])])), 400, "parts of text only"),
    (dict(path="/v1/chat/completions", body=dict(messages=[dict(role="assistant", content="a")])),
     400, "not the assistant's"),
])
def test_a_bad_request_gets_a_clear_answer(server, request_, status, message):
    got, headers, body = send(server, **request_)
    error = json.loads(body)["error"]
    assert got == status and message in error["message"]
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert set(error) == {"message", "type", "param", "code"}


def test_oversized_and_garbage(server):
    status, _, body = send(server, body=b" " * (5 * MAX_BODY))  # sent to its end
    assert status == 413 and str(MAX_BODY) in json.loads(body)["error"]["message"]
    for garbage in (b"\0\1\2\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"GET /" + b"a" * 70_000, b"\r\n"):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as s:
            s.sendall(garbage)
            s.shutdown(socket.SHUT_WR)
            reply = b"".join(iter(lambda: s.recv(65536), b""))
        assert b'"invalid_request_error"' in reply or not reply or b" 505 " in reply
    assert complete(server, max_tokens=2).choices  # and it goes on


def test_who_leaves_gives_the_place_back():
    """In a stream, while waiting for a whole text, and in the queue."""
    model = small(LETTERS)
    with serving(model, LETTERS, slots=1, max_tokens=10**6, timeout=600) as server:
        engine = server.engine
        stream = complete(server, max_tokens=10**6, stream=True)
        next(iter(stream))
        body = json.dumps(dict(prompt="a", max_tokens=10**6)).encode()
        waiting = http.client.HTTPConnection("127.0.0.1", server.server_port)
        waiting.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        soon(lambda: len(engine.waiting) == 1)
        waiting.close()
        soon(lambda: not engine.waiting)
        stream.close()
        soon(lambda: not engine.rows)
        waiting.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        soon(lambda: engine.rows)
        assert json.loads(send(server, "GET", "/health")[2])["writing"] == 1
        waiting.close()
        soon(lambda: not engine.rows)
        assert complete(server, max_tokens=3).usage.completion_tokens == 3


def test_limits_of_queue_and_time():
    model = small(LETTERS)
    limits = dict(slots=1, max_queue=1, max_tokens=10**6, timeout=1.5)
    with serving(model, LETTERS, **limits) as server, ThreadPoolExecutor(2) as pool:
        long = pool.submit(complete, server, max_tokens=10**6)
        soon(lambda: server.engine.rows)
        stream = pool.submit(lambda: list(complete(server, max_tokens=10**6, stream=True)))
        soon(lambda: server.engine.waiting)
        with pytest.raises(openai.InternalServerError, match="waiting already") as refused:
            complete(server)
        assert refused.value.status_code == 503
        with pytest.raises(openai.InternalServerError, match="1.5 seconds") as late:
            long.result()
        assert late.value.status_code == 504
        with pytest.raises(openai.APIError, match="1.5 seconds"):
            stream.result()


def test_a_failure_costs_its_texts_only(model, monkeypatch, capfd):
    with serving(model) as server:
        stream = complete(server, max_tokens=900, stream=True)
        next(iter(stream))
        with monkeypatch.context() as patch:
            patch.setattr(model, "forward", lambda *_, **kw: 1 / 0)
            with pytest.raises(openai.APIError, match="computing this text failed"):
                list(stream)
        assert complete(server, max_tokens=2).choices
    assert "ZeroDivisionError" in capfd.readouterr().err


# -----------------------------------------------------------------------------
# together

def test_logits_of_nan_end_their_text_and_no_other(model, monkeypatch):
    """A GPU that is asked to draw from them computes nothing ever after."""
    write = Engine.write

    def spoiled(engine, jobs, logits):
        logits[[job.max_tokens == 9 for job in jobs]] = torch.nan
        write(engine, jobs, logits)
    with serving(model, slots=2) as server, ThreadPoolExecutor() as pool:
        wanted = complete(server, seed=1, max_tokens=30).choices[0].text
        monkeypatch.setattr(Engine, "write", spoiled)
        other = pool.submit(complete, server, seed=1, max_tokens=30)
        with pytest.raises(openai.InternalServerError, match="logits are not finite"):
            complete(server, seed=1, max_tokens=9)
        assert other.result().choices[0].text == wanted


def test_streams_together_are_faster_than_one_by_one():
    """A model that is large enough: reading its weights is most of what a token costs. Four times
    is usual here, and six with train/config.yaml's model; the bound is for a busy machine."""
    model = small(LETTERS, n_layer=4, n_embd=384, n_head=6, n_hidden=1536, block_size=128)

    def tokens_per_second(server, streams, n=40):
        started = time.perf_counter()
        with ThreadPoolExecutor(streams) as pool:
            list(pool.map(lambda _: list(complete(server, max_tokens=n, stream=True)),
                          range(streams)))
        return streams * n / (time.perf_counter() - started)
    with serving(model, LETTERS, slots=16) as server:
        tokens_per_second(server, 1, 2)
        ratios = [tokens_per_second(server, 16) / tokens_per_second(server, 1) for _ in range(2)]
    print("16 streams to one:", ratios)
    assert max(ratios) > 2.5


# -----------------------------------------------------------------------------
# the command

@pytest.fixture(scope="module")
def checkpoint(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("serve") / "my" / "ckpt.pt"
    path.parent.mkdir()
    save_checkpoint(str(path), dict(model=model.state_dict(), model_args=vars(model.config),
                                    tokenizer=BYTES.spec(), config={}))
    return path


def first_of(port, n):
    """A stream of n tokens that has begun."""
    api = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    stream = iter(api.completions.create(model="my", prompt="a", max_tokens=n, stream=True,
                                         temperature=0, timeout=60))
    next(stream)
    return stream


def test_a_signal_lets_texts_finish(checkpoint):
    command = [sys.executable, "-m", "model.serve", "--ckpt", str(checkpoint), "--port", "0",
               "--dtype", "float32", "--slots", "1"]
    with subprocess.Popen(command, cwd=REPO, text=True, stdout=subprocess.PIPE,
                          env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        try:
            line = process.stdout.readline()
            port = int(re.match(r"Model 'my' at http://127.0.0.1:(\d+) ", line)[1])
            stream = first_of(port, 1000)
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(first_of, port, 1)
                health = f"http://127.0.0.1:{port}/health"
                soon(lambda: json.load(urllib.request.urlopen(health))["waiting"])
                process.send_signal(signal.SIGTERM)
                with pytest.raises(openai.InternalServerError, match="shutting down"):
                    waiting.result()
            assert list(stream)[-1].choices[0].finish_reason in ("length", "stop")
            assert process.wait(20) == 0
        finally:
            process.kill()


def test_a_second_signal_ends_it_at_once(checkpoint):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = Fork(main, ([
        f"--ckpt={checkpoint}", f"--port={port}", "--max-tokens=1000000", "--device=cpu",
        "--dtype=float32"],)).process  # in bfloat16 its greedy text meets the end of text
    try:
        soon(lambda: not socket.socket().connect_ex(("127.0.0.1", port)), 60)
        stream = first_of(port, 10**6)
        os.kill(process.pid, signal.SIGINT)
        next(stream)
        time.sleep(0.5)
        assert process.is_alive()
        os.kill(process.pid, signal.SIGINT)
        process.join(20)
        assert process.exitcode == 130
        with pytest.raises(openai.APIConnectionError):  # cut, and not taken for the end
            list(stream)
    finally:
        process.kill()
        process.join()


def test_errors_of_the_command_line(checkpoint, tmp_path, capsys):
    def error(*args):
        assert main(["--ckpt", str(checkpoint), "--port", "0", *args]) == 2
        return capsys.readouterr().err
    assert error("--slots=0", "--timeout=0").splitlines() == [
        "model.serve: --slots: expected 1 to 1024, got 0",
        "--timeout: expected 0.1 to 86400, got 0.0"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "cannot listen there" in error("--port", str(taken.getsockname()[1]))
    assert "no/ckpt.pt" in error("--ckpt", "no/ckpt.pt")


# -----------------------------------------------------------------------------
# the page

class Browser:
    """Headless Chromium, driven through its debugging pipe (chromedevtools.github.io)."""

    def __init__(self, folder):
        commands, self.commands = os.pipe()
        self.replies, replies = os.pipe()
        arguments = [CHROMIUM, "--headless=new", "--remote-debugging-pipe", "--no-sandbox",
                     "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                     f"--user-data-dir={folder}", "about:blank"]
        # It reads commands from 3 and writes to 4.
        shell = f'exec 3<&{commands} 4>&{replies} {commands}<&- {replies}>&-; exec "$@"'
        self.process = subprocess.Popen(
            ["bash", "-c", shell, "chromium", *arguments], pass_fds=(commands, replies),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(commands), os.close(replies)
        self.reader, self.number = os.fdopen(self.replies, "rb"), 0
        self.session, self.problems = None, []
        page = next(t for t in self("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self("Target.attachToTarget", targetId=page["targetId"], flatten=True)[
            "sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")

    def __call__(self, method, **params):
        self.number += 1
        message = dict(id=self.number, method=method, params=params)
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            reply = json.loads(self.read())
            if reply.get("id") == self.number:
                assert "error" not in reply, reply
                return reply["result"]
            if reply.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.problems.append(reply["params"])

    def read(self):
        out = bytearray()
        while (byte := self.reader.read(1)) != b"\0":
            assert byte, "the browser has ended"
            out += byte
        return out

    def js(self, expression):
        return self("Runtime.evaluate", expression=expression)["result"].get("value")

    def click(self, selector):
        x, y = json.loads(self.js(f"(r => JSON.stringify([r.x + r.width / 2, r.y + r.height / 2]))"
                                  f"(document.querySelector('{selector}').getBoundingClientRect())"))
        for kind in ("mousePressed", "mouseReleased"):
            self("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def look(self, width, height, dark, path=None):
        """The page on a screen of that size; (width of its content, a picture)."""
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, mobile=width < 600,
             deviceScaleFactor=2 if width < 600 else 1)
        self("Emulation.setEmulatedMedia", features=[
            dict(name="prefers-color-scheme", value="dark" if dark else "light")])
        picture = base64.b64decode(self("Page.captureScreenshot", format="png")["data"])
        if path:
            path.write_bytes(picture)
        return self.js("document.documentElement.scrollWidth"), picture

    def close(self):
        self.process.kill()
        self.process.wait()
        self.reader.close()
        os.close(self.commands)


@pytest.fixture
def browser(tmp_path):
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_the_page(browser, template, tmp_path):
    """A prompt typed, an answer that comes, a stop, an error; on a phone and a desk, day and
    night. PICTURES names a folder for what it looks like."""
    model = small(LETTERS, block_size=256)
    pictures = os.environ.get("PICTURES")
    tokenizer = LETTERS if template is None else BYTES
    if template:
        model = small(block_size=256)
    with serving(model, tokenizer, template, max_tokens=100_000) as server:
        browser("Page.navigate", url=f"http://127.0.0.1:{server.server_port}/")
        soon(lambda: browser.js("document.title") == "tiny")
        browser.click("#temperature")
        browser.js("document.getElementById('temperature').select()")
        browser("Input.insertText", text="0")
        browser.click("#prompt")
        browser("Input.insertText", text="once upon a time")
        browser.click("#send")
        soon(lambda: "tokens/s" in browser.js("document.getElementById('state').textContent"))
        shown = browser.js("document.getElementById('out').textContent")
        if template is None:
            assert shown == "once upon a time" + expected(model, "once upon a time", 200, LETTERS,
                                                          temperature=0)[0]
        for size in ((360, 640), (1280, 800)):
            for dark in (False, True):
                name = f"{'chat' if template else 'text'}-{size[0]}-{'dark' if dark else 'light'}"
                path = pathlib.Path(pictures, f"{name}.png") if pictures else None
                width, picture = browser.look(*size, dark, path)
                assert width <= size[0] and len(picture) > 5000  # nothing sticks out
        browser.js("document.getElementById('tokens').value = 90000")
        browser.click("#send")
        soon(lambda: len(browser.js("document.getElementById('out').textContent")) > 300)
        assert server.engine.rows
        browser.click("#send")
        soon(lambda: browser.js("document.getElementById('state').textContent") == "stopped")
        soon(lambda: not server.engine.rows)
        assert browser.problems == []
        browser.js("document.getElementById('prompt').value = 'x'.repeat(9999)")
        browser.click("#send")
        soon(lambda: "the context of this model" in browser.js(
            "document.getElementById('state').textContent"))
        assert browser.js("document.getElementById('state').className") == "wrong"
