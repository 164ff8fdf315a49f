"""The server: who may ask, what there is to ask for, and what was asked.

One thread has all connections, as coroutines, so that a thousand slow clients cost it nothing; the
engine's computes (model/serve/engine.py).
"""

import asyncio
import bisect
import collections
import hmac
import ipaddress
import itertools
import json
import sys
import time
import traceback
from pathlib import Path
from urllib.parse import urlsplit

from model.serve.api import Answer, jobs_of
from model.serve.connection import MAX_HEAD, POLL, Connection
from model.serve.engine import Refused

RECEIVE = 30       # seconds for a whole request to come
TAKE = 30          # seconds that a client has, beyond the engine's, to take its answer
PATIENCE = 10      # the same when the server ends
MAX_SENDING = 512  # clients whose requests are still coming; one more, and the oldest is cut
CHAT = "/v1/chat/completions"
METHODS = ("GET", "POST", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS")
SECONDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300)  # bounds of the latency's histogram
POLICY = ("default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
          "connect-src 'self'; img-src data:; base-uri 'none'; frame-ancestors 'none'")


class Events:
    """From the engine's thread into the server's."""

    def __init__(self):
        self.loop, self.queue = asyncio.get_running_loop(), asyncio.Queue()

    def put(self, event):
        self.loop.call_soon_threadsafe(self.queue.put_nowait, event)


class Server:
    """Answers on a listening socket with what an engine writes. host: a name that requests may have
    in their Host; key: what they must have as their bearer token."""

    def __init__(self, listening, engine, name, template=None, host="localhost", key=None):
        self.listening, self.engine, self.name, self.template = listening, engine, name, template
        self.hosts, self.key = ("localhost", host.lower()), key
        self.port, self.created = listening.getsockname()[1], int(time.time())
        self.local = is_local(listening)
        self.sending, self.answering = {}, set()  # connections; sending: in order
        self.requests = collections.Counter()
        self.tokens = collections.Counter(prompt_tokens_total=0, completion_tokens_total=0)
        self.latency, self.seconds, self.told = [0] * (len(SECONDS) + 1), 0.0, 0
        self.html = Path(__file__).with_name("serve.html").read_bytes()
        self.routes = {"/": ("GET", self.page), "/health": ("GET", self.health),
                       "/metrics": ("GET", self.metrics), "/v1/models": ("GET", self.models),
                       "/v1/completions": ("POST", self.complete), CHAT: ("POST", self.complete)}

    def serve(self, stopped=()):
        """Answers requests until `stopped` is true, and finishes what has begun."""
        asyncio.run(self.run(stopped))

    async def run(self, stopped):
        asyncio.get_running_loop().set_exception_handler(self.tell)
        server = await asyncio.start_server(self.client, sock=self.listening, limit=MAX_HEAD,
                                            backlog=128)
        while not stopped:
            await asyncio.sleep(POLL)
        server.close()
        await asyncio.to_thread(self.engine.close)
        end = time.monotonic() + PATIENCE
        while self.answering and time.monotonic() < end:
            await asyncio.sleep(0.01)

    def tell(self, loop, context):
        """What asyncio reports, as a line at most each second: at the limit of open files it stops
        accepting for one."""
        if time.monotonic() > self.told + 1:
            self.told = time.monotonic()
            print(f"{context['message']}: {context.get('exception')}", file=sys.stderr)

    async def client(self, reader, writer):
        """One request, its answer, and the end of the connection: none is left idle."""
        began, c = time.monotonic(), Connection(reader, writer)
        peer = (writer.get_extra_info("peername") or "-")[0]
        self.sending[c] = None
        if len(self.sending) > MAX_SENDING:
            oldest = next(iter(self.sending))
            del self.sending[oldest]
            oldest.writer.transport.abort()
        try:
            await asyncio.wait_for(self.answer(c), RECEIVE + self.engine.timeout + TAKE)
        except (OSError, EOFError, asyncio.TimeoutError, asyncio.CancelledError):
            c.status = c.status or "left"
        finally:
            writer.transport.abort()  # all is sent, or will never be
            self.sending.pop(c, None)
            self.requests[c.path if c.path in self.routes else "other", c.status] += 1
            print(f"{time.strftime('%H:%M:%S')} {peer} {c.method} {c.path!a:.80} {c.status} "
                  f"{time.monotonic() - began:.2f} s", file=sys.stderr)
            self.answering.discard(c)

    async def answer(self, c):
        try:
            try:
                answer = await asyncio.wait_for(self.receive(c), RECEIVE)
            except asyncio.TimeoutError:
                raise Refused(408, f"the request did not come within {RECEIVE} seconds") from None
            finally:
                self.sending.pop(c, None)
                self.answering.add(c)
            await answer(c)
        except Refused as error:
            await c.refuse(error)
        except (OSError, EOFError, asyncio.CancelledError):
            raise
        except BaseException:  # a tokenizer's library may panic, which is no Exception
            traceback.print_exc()
            await c.refuse(Refused(500, "an error of the server; its log says more"))
        await c.finish()

    async def receive(self, c):
        """Reads the request. What answers it; Refused as soon as it cannot be."""
        await c.read_head()
        self.check_sender(c)
        if c.method not in METHODS:
            raise Refused(501, f"Unsupported method {c.method:.80}")
        if c.path not in self.routes:
            raise Refused(404, f"no {c.path!r:.80} here; there are {', '.join(self.routes)}")
        method, answer = self.routes[c.path]
        if method != c.method:
            raise Refused(405, f"{c.path} is for {method}")
        if method == "POST":
            await c.read_json()
        return answer

    def check_sender(self, c):
        """Refused for pages of others that the browser of this machine has open, be it under a name
        that they let point here (DNS rebinding), and for who does not have the key."""
        host, origin = c.headers.get("Host", "localhost").lower(), c.headers.get("Origin")
        if self.local and not is_address(name := name_of(host)) and name not in self.hosts:
            raise Refused(403, f"Host {host!r:.80} is not this server; use localhost, its address, "
                          "or start it with --host")
        if origin is not None and origin.lower().partition("://")[2] != host:
            raise Refused(403, f"Origin {origin!r:.80} is not this server, {host!r:.80}")
        scheme, _, token = c.headers.get("Authorization", "").partition(" ")
        if self.key and c.path not in ("/", "/health") and not (
                scheme.lower() == "bearer"
                and hmac.compare_digest(token.strip().encode("latin-1"), self.key.encode())):
            raise Refused(401, "expected Authorization: Bearer and the API key",
                          code="invalid_api_key")

    # what is asked for

    async def page(self, c):
        await c.reply(200, self.html, "text/html; charset=utf-8",
                      **{"Content-Security-Policy": POLICY})

    async def health(self, c):
        await c.reply(200, dict(status="ok") | self.load())

    def load(self):
        engine = self.engine
        return dict(writing=len(engine.rows), waiting=len(engine.waiting), slots=engine.slots)

    async def metrics(self, c):
        """https://prometheus.io/docs/instrumenting/exposition_formats"""
        lines = ["# TYPE irongpt_requests_total counter"]
        lines += [f'irongpt_requests_total{{path="{path}",status="{status}"}} {n}'
                  for (path, status), n in sorted(self.requests.items(), key=str)]
        for kind, values in (("counter", self.tokens), ("gauge", self.load())):
            for name, value in values.items():
                lines += [f"# TYPE irongpt_{name} {kind}", f"irongpt_{name} {value}"]
        name, counts = "irongpt_text_seconds", list(itertools.accumulate(self.latency))
        lines += [f"# TYPE {name} histogram"]
        lines += [f'{name}_bucket{{le="{bound}"}} {n}'
                  for bound, n in zip((*SECONDS, "+Inf"), counts)]
        lines += [f"{name}_sum {self.seconds:.6f}", f"{name}_count {counts[-1]}", ""]
        await c.reply(200, "\n".join(lines).encode(), "text/plain; version=0.0.4; charset=utf-8")

    async def models(self, c):
        engine = self.engine
        card = dict(id=self.name, object="model", created=self.created, owned_by="ironGPT",
                    max_model_len=engine.config.block_size, max_tokens=engine.max_tokens,
                    chat=self.template is not None)
        await c.reply(200, dict(object="list", data=[card]))

    async def complete(self, c):
        began = time.monotonic()
        jobs, stream, with_usage = await asyncio.to_thread(self.take_jobs, c)
        events, answer = Events(), Answer(jobs, self.engine.tokenizer, c.path == CHAT, self.name)
        for job in jobs:
            job.events = events
        self.engine.submit(*jobs)
        watcher = asyncio.create_task(c.watch(asyncio.current_task()))
        try:
            if stream:
                await self.stream(c, answer, events, with_usage)
            else:
                async for piece in pieces(events, len(jobs)):
                    answer.add(*piece)
                await c.reply(200, answer.whole())
        finally:
            for job in jobs:
                job.ended = True
            watcher.cancel()
            await asyncio.wait([watcher])
            usage = answer.usage()
            self.tokens.update({f"{name}_total": usage[name] for name in (
                "prompt_tokens", "completion_tokens")})
            self.seconds += (took := time.monotonic() - began)
            self.latency[bisect.bisect_left(SECONDS, took)] += 1

    def take_jobs(self, c):
        """(Jobs, stream, with_usage) of the request's JSON, which is let go."""
        data, c.body = c.body, b""
        try:
            body = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the request is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise Refused(400, "expected a JSON object")
        if body.get("model") not in (None, self.name):
            raise Refused(404, f"model {body['model']!r:.80} is not here; there is {self.name!r}",
                          "model", "model_not_found")
        stream, options = body.get("stream") or False, body.get("stream_options") or {}
        if not isinstance(options, dict) or not isinstance(stream, bool):
            raise Refused(400, "expected stream: true or false, stream_options: an object")
        jobs = jobs_of(body, c.path == CHAT, self.engine, self.template)
        return jobs, stream, bool(options.get("include_usage"))

    async def stream(self, c, answer, events, with_usage):
        rest = dict(usage=None) if with_usage else {}
        async for index, text, told, reason in pieces(events, len(answer.jobs)):
            if not c.streaming:  # until here an error is a status of its own
                await c.start_stream()
                for i in range(len(answer.jobs) if answer.chat else 0):
                    await c.event(answer.part(i, dict(role="assistant", content="")) | rest)
            if text or told:
                content = dict(content=text) if answer.chat else text
                await c.event(answer.part(index, content, told) | rest)
            if reason:
                await c.event(answer.part(index, {} if answer.chat else "", (), reason) | rest)
        if with_usage:
            await c.event(answer.part(0, "") | dict(choices=[], usage=answer.usage()))
        await c.event("[DONE]")
        await c.chunk(b"")


async def pieces(events, n):
    """Yields (index, text, told, reason) of n jobs as they come; reason is None but for the last
    one of each. Refused where one fails."""
    queue = events.queue
    while n:
        come, found = [await queue.get()], {}
        while not queue.empty():  # what has come in the meantime goes with it
            come.append(queue.get_nowait())
        for index, text, told, reason in come:
            before = found.get(index, ("", []))
            found[index] = before[0] + text, before[1] + told, reason
        for index, (text, told, reason) in found.items():
            if isinstance(reason, Refused):
                raise reason
            n -= reason is not None
            yield index, text, told, reason


def name_of(host):
    """The name or address in a Host header, without the port; None where there is none."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def is_address(name):
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def is_local(listening):
    """Whether only this machine reaches a listening socket."""
    return ipaddress.ip_address(listening.getsockname()[0]).is_loopback
