"""A model behind OpenAI's API and a page: python -m model.serve --ckpt out/ckpt.pt

POST /v1/completions and, where the checkpoint learned chats, /v1/chat/completions, both also as a
stream; GET /v1/models, /health, and / for the page (serve.html).

Every connection has a thread, which reads, checks and writes; one more thread computes the texts of
all requests together (model/serve/engine.py).
"""

import argparse
import contextlib
import json
import os
import queue
import select
import signal
import socket
import threading
import time
import traceback
import uuid
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from model.generate import start_tokens
from model.load import prepare
from model.serve.engine import Engine, Job, Refused
from train.config import run_command

MAX_BODY = 1 << 20      # bytes of a request
MAX_STOPS, MAX_STOP = 16, 256  # stop strings, and characters in one
MAX_CONNECTIONS = 256   # threads; further connections wait in the system's queue
PATIENCE = 10           # seconds that clients have, at the end, to take the last of their text
POLL = 0.25             # seconds between two looks whether a client is still there

# What would change the answer and is not computed here: the values that mean "not asked for".
UNSUPPORTED = dict(
    n=(1,), best_of=(1,), echo=(False,), suffix=("",), logprobs=(False,), top_logprobs=(0,),
    presence_penalty=(0, 0.0), frequency_penalty=(0, 0.0), logit_bias=({},), min_p=(0, 0.0),
    repetition_penalty=(1, 1.0), tools=([],), functions=([],), response_format=({"type": "text"},))


# -----------------------------------------------------------------------------
# what a request asks for

def job_of(body, chat, engine, template):
    """The Job of a request's JSON. Refused names what is wrong with it."""
    for name, allowed in UNSUPPORTED.items():
        value = body.get(name)
        if value is not None and not any(value == a and type(value) is type(a) for a in allowed):
            hint = "; send as many requests: they are computed together" if name == "n" else ""
            raise Refused(400, f"{name}: {value!r:.80} is not supported here; leave it out{hint}",
                          name)
    ids = (chat_ids(body.get("messages"), engine.tokenizer, template) if chat else
           prompt_ids(body.get("prompt", ""), engine.tokenizer))
    temperature = number(body, "temperature", 1.0, 0, 2)
    top_p = number(body, "top_p", 1.0, 0, 1)
    return Job(
        ids, token_limit(body, len(ids), engine, None if chat else 16),
        temperature=temperature if temperature >= 1e-3 else 0,  # below it, logits / t overflows
        top_k=number(body, "top_k", None, 1, 2**31, int), top_p=max(top_p, 1e-6),
        seed=number(body, "seed", None, -2**63, 2**63 - 1, int), stops=stops_of(body.get("stop")))


def number(body, name, default, low, high, kind=(int, float)):
    """body[name], a number from low to high, or the default where there is none."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        what = "an integer" if kind is int else "a number"
        raise Refused(400, f"{name}: expected {what} from {low} to {high}, got {value!r:.80}", name)
    return value


def token_limit(body, n, engine, default):
    """How many tokens may follow a prompt of n tokens, which must fit in the context."""
    size = engine.config.block_size
    if n > size:
        raise Refused(400, f"the prompt has {n} tokens; the context of this model has {size}",
                      "prompt", "context_length_exceeded")
    # Rotary positions roll on when the context is full (see KVCache); learned ones end there.
    room = engine.max_tokens
    if engine.config.pos == "learned":
        room = min(room, size - n + 1)
    name = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    return number(body, name, min(room, default or room), 1, room, int)


def stops_of(stop):
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    good = isinstance(stops, list) and len(stops) <= MAX_STOPS and all(
        isinstance(s, str) and 0 < len(s) <= MAX_STOP for s in stops)
    if not good:
        raise Refused(400, f"stop: expected a string, or a list of up to {MAX_STOPS}, of 1 to "
                      f"{MAX_STOP} characters each", "stop")
    return tuple(stops)


def prompt_ids(prompt, tokenizer):
    """Ids of a prompt: a text, a list of one, or a list of ids."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and all(type(i) is int and 0 <= i < tokenizer.n_vocab
                                                   for i in prompt):
        return prompt
    if not isinstance(prompt, str):
        raise Refused(400, "prompt: expected one text, or a list of token ids from 0 to "
                      f"{tokenizer.n_vocab - 1}; send a request for each prompt: they are computed "
                      "together", "prompt")
    try:
        return start_tokens(tokenizer, prompt)
    except ValueError as error:  # characters that this tokenizer does not know
        raise Refused(400, f"prompt: {error}", "prompt") from None


def chat_ids(messages, tokenizer, template):
    """Ids of a conversation, as data/chat.py writes it, up to where the answer begins."""
    from data.chat import as_list, stretches, turn_of
    if template is None:
        raise Refused(404, "this model learned no chats; use /v1/completions", code="no_template")
    try:
        turns = [turn_of(as_openai(m)) for m in as_list(messages, "messages")]
        if not turns or turns[-1][0] == "assistant":
            raise ValueError("expected a last message that is not the assistant's")
        *past, (question, _) = stretches([*turns, ("assistant", "")], template)
        ids = []
        for asked, said in past:
            ids += tokenizer.encode(asked) + tokenizer.encode(said) + [tokenizer.eot_token]
        return ids + tokenizer.encode(question)
    except ValueError as error:
        raise Refused(400, f"messages: {error}", "messages") from None


def as_openai(message):
    """A message with OpenAI's newer name of the system's role; ValueError for what is not text."""
    parts = message.get("content")
    for part in parts if isinstance(parts, list) else []:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise ValueError(f"expected parts of text only, got {part!r:.80}")
    return message | dict(role="system") if message.get("role") == "developer" else message


# -----------------------------------------------------------------------------
# HTTP

class Server(ThreadingHTTPServer):
    """Bound to its address at once; answers when it has an engine and handle_request is called."""
    request_queue_size = 128
    allow_reuse_address = os.name != "nt"

    def __init__(self, host, port):
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), Handler)
        self.timeout, self.created, self.answering = 0.2, int(time.time()), set()
        self.page = Path(__file__).with_name("serve.html").read_bytes()

    def serve(self, engine, name, template=None, stopped=()):
        """Answers requests until `stopped` is true, and finishes what has begun."""
        self.engine, self.name, self.template = engine, name, template
        while not stopped:
            if threading.active_count() < MAX_CONNECTIONS:
                self.handle_request()
            else:
                time.sleep(0.05)
        self.server_close()
        engine.close()
        end = time.monotonic() + PATIENCE
        while self.answering and time.monotonic() < end:
            time.sleep(0.01)


class Handler(BaseHTTPRequestHandler):
    """One request, its answer, and the end of the connection: none is left idle."""
    protocol_version = "HTTP/1.1"  # chunks: a client can tell the end from a cut
    server_version, sys_version = "ironGPT", ""
    timeout = 30  # seconds that the client may take to send, or to take, the next bytes
    disable_nagle_algorithm = True  # a token at a time

    def route(self):
        path = self.path.partition("?")[0]
        routes = {"/": ("GET", self.page), "/health": ("GET", self.health),
                  "/v1/models": ("GET", self.models), "/v1/completions": ("POST", self.complete),
                  "/v1/chat/completions": ("POST", self.complete)}
        self.close_connection, self.streaming = True, False
        self.server.answering.add(self)
        try:
            if path not in routes:
                raise Refused(404, f"no {path!r:.80} here; there are {', '.join(routes)}")
            method, answer = routes[path]
            if method != self.command:
                raise Refused(405, f"{path} is for {method}")
            answer()
        except Refused as error:
            self.refuse(error)
        except (ConnectionError, TimeoutError):
            pass  # the client has left
        except Exception:
            traceback.print_exc()
            self.refuse(Refused(500, "an error of the server; its log says more"))
        finally:
            self.server.answering.discard(self)

    do_GET = do_POST = do_HEAD = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = route

    # what goes out

    def reply(self, status, content, kind="application/json", **headers):
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": len(content), "Connection": "close",
                   "X-Content-Type-Options": "nosniff"} | headers
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def refuse(self, error):
        """The error as a reply, or as the last event of a stream. A client that is still sending
        would not see it if the connection closed at once: what it sends is read for a second."""
        with contextlib.suppress(OSError):
            if getattr(self, "streaming", False):
                self.event(error.body())
                return self.chunk(b"")
            retry = {503: {"Retry-After": 1}, 504: {"x-should-retry": "false"}}
            self.reply(error.status, json.dumps(error.body()).encode(),
                       **retry.get(error.status, {}))
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(1)
            end = time.monotonic() + 1
            while time.monotonic() < end and self.rfile.read1(1 << 16):
                pass

    def send_error(self, code, message=None, explain=None):  # what http.server itself refuses
        self.close_connection = True
        self.refuse(Refused(int(code), message or HTTPStatus(code).phrase))

    def chunk(self, data):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def event(self, value):
        text = value if isinstance(value, str) else json.dumps(value)
        self.chunk(f"data: {text}\n\n".encode())  # an event ends with an empty line

    # what is asked for

    def page(self):
        policy = ("default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
                  "connect-src 'self'; img-src data:; base-uri 'none'; frame-ancestors 'none'")
        self.reply(200, self.server.page, "text/html; charset=utf-8",
                   **{"Content-Security-Policy": policy})

    def health(self):
        engine = self.server.engine
        self.reply(200, json.dumps(dict(
            status="ok", writing=len(engine.rows), waiting=len(engine.waiting),
            slots=engine.slots)).encode())

    def models(self):
        server, engine = self.server, self.server.engine
        card = dict(id=server.name, object="model", created=server.created, owned_by="ironGPT",
                    max_model_len=engine.config.block_size, max_tokens=engine.max_tokens,
                    chat=server.template is not None)
        self.reply(200, json.dumps(dict(object="list", data=[card])).encode())

    def body(self):
        """The JSON object of the request."""
        length = self.headers.get("Content-Length", "")
        # Another kind could come from any page that the browser of this machine has open.
        if self.headers.get_content_type() != "application/json":
            raise Refused(415, "expected Content-Type: application/json")
        if not length.isascii() or not length.isdigit():
            raise Refused(411, "expected a Content-Length, in bytes")
        if len(length) > 12 or int(length) > MAX_BODY:
            raise Refused(413, f"a request of {length:.20} bytes; the most is {MAX_BODY}")
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the request is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise Refused(400, "expected a JSON object")
        if body.get("model") not in (None, self.server.name):
            raise Refused(404, f"model {body['model']!r:.80} is not here; there is "
                          f"{self.server.name!r}", "model", "model_not_found")
        return body

    def complete(self):
        body, chat = self.body(), "/chat" in self.path
        options = body.get("stream_options") or {}
        if not isinstance(options, dict) or not isinstance(body.get("stream") or False, bool):
            raise Refused(400, "expected stream: true or false, stream_options: an object")
        job = job_of(body, chat, self.server.engine, self.server.template)
        answer = Answer(job, chat, self.server.name)
        self.server.engine.submit(job)
        try:
            if body.get("stream"):
                self.stream(answer, bool(options.get("include_usage")))
            else:
                texts, reasons = zip(*self.pieces(job))
                self.reply(200, json.dumps(answer.whole("".join(texts), reasons[-1])).encode())
        finally:
            job.ended = True

    def stream(self, answer, with_usage):
        rest = dict(usage=None) if with_usage else {}
        for text, reason in self.pieces(answer.job):
            if not self.streaming:  # until here an error is a status of its own
                self.start_stream()
                if answer.chat:
                    self.event(answer.part(dict(role="assistant", content="")) | rest)
            if text:
                self.event(answer.part(dict(content=text) if answer.chat else text) | rest)
            if reason:
                self.event(answer.part({} if answer.chat else "", reason) | rest)
        if with_usage:
            self.event(answer.part("") | dict(choices=[], usage=answer.usage()))
        self.event("[DONE]")
        self.chunk(b"")

    def start_stream(self):
        self.send_response(200)
        for name, value in (("Content-Type", "text/event-stream"), ("Cache-Control", "no-cache"),
                            ("Connection", "close"), ("Transfer-Encoding", "chunked")):
            self.send_header(name, value)
        self.end_headers()
        self.streaming = True

    def pieces(self, job):
        """Yields (text, reason) of a job; reason is None but for the last. Refused where it fails,
        ConnectionAbortedError when the client has left."""
        looked, reason = time.monotonic(), None
        while reason is None:
            texts = []
            with contextlib.suppress(queue.Empty):
                text, reason = job.events.get(timeout=POLL)
                texts.append(text)
                while reason is None:  # what has come in the meantime goes out with it
                    text, reason = job.events.get_nowait()
                    texts.append(text)
            if isinstance(reason, Refused):
                raise reason
            if time.monotonic() - looked > POLL:
                looked = time.monotonic()
                if select.select([self.connection], [], [], 0)[0] and not self.connection.recv(
                        1, socket.MSG_PEEK):
                    raise ConnectionAbortedError
            if texts:
                yield "".join(texts), reason


class Answer:
    """The JSON of a job's answer, whole or in parts, as a completion or as a chat's message."""

    def __init__(self, job, chat, model):
        self.job, self.chat = job, chat
        self.name = "chat.completion" if chat else "text_completion"
        self.head = dict(id=("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex,
                         created=int(time.time()), model=model)

    def usage(self):
        read, written = len(self.job.ids), self.job.written
        return dict(prompt_tokens=read, completion_tokens=written, total_tokens=read + written)

    def whole(self, text, reason):
        message = dict(role="assistant", content=text, refusal=None)
        choice = dict(message=message) if self.chat else dict(text=text)
        choice |= dict(index=0, logprobs=None, finish_reason=reason)
        return self.head | dict(object=self.name, choices=[choice], usage=self.usage())

    def part(self, content, reason=None):
        """content: a text, or a chat's delta."""
        choice = {"delta" if self.chat else "text": content}
        choice |= dict(index=0, logprobs=None, finish_reason=reason)
        return self.head | dict(object=self.name + ".chunk" * self.chat, choices=[choice])


# -----------------------------------------------------------------------------
# the command line

def check_args(a):
    """ValueError with all that is wrong with the arguments."""
    limits = (("slots", 1, 1024), ("queue", 1, 100_000), ("max_tokens", 1, 10**6),
              ("timeout", 0.1, 86_400), ("port", 0, 65_535))
    wrong = [f"--{name}: expected {low} to {high}, got {getattr(a, name)}"
             for name, low, high in limits if not low <= getattr(a, name) <= high]
    if wrong:
        raise ValueError("\n".join(wrong))


def listen(host, port):
    try:
        return Server(host, port)
    except OSError as error:
        raise ValueError(f"--host {host} --port {port}: cannot listen there: {error.strerror}; "
                         "take another --port, or 0 for any free one") from None


def stop_signals():
    """A list that SIGINT, SIGTERM and SIGHUP add their number to. A second one ends the process at
    once, with 128 + its number. Ignored ones (nohup) stay ignored."""
    stopped = []

    def handle(signum, frame):
        if stopped:
            os._exit(128 + signum)
        os.write(2, b"\nfinishing what has begun; again: at once\n")
        stopped.append(signum)
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handle)
    return stopped


def run(server, args):
    """Load the model and answer until a signal comes. Raises ValueError or UserError."""
    model, tokenizer, _ = prepare(args)
    try:
        engine = Engine(model, tokenizer, args.slots, args.queue, args.max_tokens, args.timeout)
    except RuntimeError as error:  # no memory
        raise ValueError(f"--slots {args.slots}: no room for their keys and values: {error}; take "
                         "fewer") from None
    stopped, (host, port) = stop_signals(), server.server_address[:2]
    name = args.name or Path(args.ckpt).resolve().parent.name
    where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    print(f"Model {name!r} at {where} (a page) and {where}/v1 (OpenAI's API). Ctrl-C ends it.",
          flush=True)
    server.serve(engine, name, getattr(model, "template", None), stopped)


def serve(args):
    """Serve as the command line asks, until a signal."""
    check_args(args)
    with listen(args.host, args.port) as server:
        run(server, args)


def main(argv=None):
    """The command line; the exit code."""
    p = argparse.ArgumentParser(prog="python -m model.serve", description=__doc__.split("\n")[0])
    add = p.add_argument
    add("--ckpt", default="out/ckpt.pt", help="checkpoint (default: %(default)s)")
    add("--name", help="of the model, for clients (default: that of the checkpoint's folder)")
    add("--host", default="127.0.0.1", help="address to listen on: this machine only (default: "
        "%(default)s); 0.0.0.0: whoever can reach it, unasked who they are")
    add("--port", type=int, default=8000, help="0: any free one (default: %(default)s)")
    add("--slots", type=int, default=16, help="texts written at once (default: %(default)s)")
    add("--queue", type=int, default=256, help="requests that may wait (default: %(default)s)")
    add("--max_tokens", type=int, default=1024, help="the most that a request may ask for "
        "(default: %(default)s)")
    add("--timeout", type=float, default=300, help="seconds for a request (default: %(default)s)")
    add("--tokenizer", help="where the checkpoint has none: byte, gpt2, a rank file or a folder")
    add("--device", default="auto", help="auto, cpu, cuda, mps")
    add("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    add("--quantize", choices=["int8"], help="weights in 8 bits, a scale for each row")
    return run_command(p, serve, argv)
