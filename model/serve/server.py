"""HTTP server on Starlette and uvicorn: OpenAI's API, a page, health and metrics.

One thread serves all connections; the engine computes in a second thread (model/serve/engine.py).
"""

import asyncio
import collections
import contextlib
import hmac
import ipaddress
import json
import re
import sys
import time
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route

from model.serve.api import Answer, create_jobs, parse_request
from model.serve.engine import APIError
from model.serve.metrics import Metrics

CHAT_PATH = "/v1/chat/completions"
MAX_HEAD_BYTES = 1 << 15    # request line and headers
MAX_BODY_BYTES = 1 << 20
MAX_IDLE_CONNECTIONS = 512  # connections without a complete request; the oldest are closed
RECEIVE_SECONDS = 30        # for a request's head to arrive, and for the body
SEND_SECONDS = 30           # to read a response, in addition to the engine's timeout
SHUTDOWN_SECONDS = 10       # the same at shutdown
POLL_SECONDS = 0.1
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; frame-ancestors 'none'")
ADDRESS = r"[\d.]+|\[[\da-f:.]+\]"  # IPv4, IPv6
ERROR_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"},
                 504: {"x-should-retry": "false"}}


class Server:
    """An ASGI application that serves the texts of an engine on a listening socket.

    host: the name that clients use for this server. key: the required bearer token, if any.
    origins: other web pages that may send requests from a browser ("*": any).
    """

    def __init__(self, listening, engine, name, template=None, host="localhost", key=None,
                 origins=()):
        self.listening, self.engine, self.name, self.template = listening, engine, name, template
        self.port, self.key, self.origins = listening.getsockname()[1], key, origins
        self.is_local = ipaddress.ip_address(listening.getsockname()[0]).is_loopback
        self.local_hosts = re.compile(rf"(localhost|{re.escape(host.lower())}|{ADDRESS})(:\d+)?")
        self.created, self.metrics = int(time.time()), Metrics()
        self.report_time = 0.0
        self.connection_times = {}  # {connection: (active request if any, since when)}
        routes = [Route("/", self.get_page), Route("/health", self.get_health),
                  Route("/metrics", self.get_metrics), Route("/v1/models", self.get_models),
                  Route("/v1/completions", self.post_completion, methods=["POST"]),
                  Route(CHAT_PATH, self.post_completion, methods=["POST"])]
        self.paths = [route.path for route in routes]
        self.app = Starlette(routes=routes, exception_handlers=dict.fromkeys(
            (APIError, HTTPException, ClientDisconnect, Exception), self.handle_error))
        if origins:
            self.app.add_middleware(CORSMiddleware, allow_origins=origins, allow_headers=["*"],
                                    allow_methods=["GET", "POST"])
        self.http = uvicorn.Server(uvicorn.Config(
            self, ws="none", lifespan="off", interface="asgi3", proxy_headers=False,
            log_config=None, log_level="warning", access_log=False, server_header=False,
            headers=[("X-Content-Type-Options", "nosniff")], backlog=128,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS))
        self.http.capture_signals = contextlib.nullcontext  # signals: model/serve/__init__.py

    def serve(self, stopped=()):
        """Answer requests until `stopped` is not empty; then finish active requests."""
        asyncio.run(self.run(stopped))

    async def run(self, stopped):
        asyncio.get_running_loop().set_exception_handler(self.report)
        self.mailbox = Mailbox()
        running = asyncio.create_task(self.http.serve(sockets=[self.listening]))
        while not (stopped or running.done()):
            self.close_slow_connections()
            await asyncio.sleep(POLL_SECONDS)
        await asyncio.to_thread(self.engine.close)
        self.http.should_exit = True
        await running

    def report(self, loop, context):
        """Print what asyncio reports, once per second at most: without free file descriptors it
        retries to accept connections every second, and reports each one."""
        if time.monotonic() > self.report_time + 1:
            self.report_time = time.monotonic()
            print(f"{context['message']}: {context.get('exception')}", file=sys.stderr)

    def close_slow_connections(self):
        """Close connections that take too long to send a request or to read the response, and the
        oldest of too many connections without a complete request."""
        now, times = time.monotonic(), {}
        for c in self.http.server_state.connections:
            request = c.cycle if c.cycle and not c.cycle.response_complete else None
            old_request, since = self.connection_times.get(c, (None, now))
            times[c] = request, since if request is old_request else now
        self.connection_times = times
        idle = sorted((since, id(c), c) for c, (request, since) in times.items() if not request)
        slow = [c for _, _, c in idle[:-MAX_IDLE_CONNECTIONS]]
        for c, (request, since) in times.items():
            limit = RECEIVE_SECONDS + (self.engine.timeout + SEND_SECONDS if request else 0)
            if now > since + limit:
                slow.append(c)
        for c in slow:
            c.transport.abort()

    async def __call__(self, scope, receive, send):
        """Check the sender of a request, answer it, and log it."""
        started, status, path = time.monotonic(), "disconnected", scope["path"]

        async def send_and_note(message):
            nonlocal status
            status = message.get("status", status)
            await send(message)
        try:
            self.check_sender(Headers(scope=scope), scope["method"], path)
            await self.app(scope, receive, send_and_note)
        except APIError as error:
            await error_response(error)(scope, receive, send_and_note)
        finally:
            self.metrics.requests[path if path in self.paths else "other", status] += 1
            print(f"{time.strftime('%H:%M:%S')} {scope['client'][0]} {scope['method']} "
                  f"{path!a:.80} {status} {time.monotonic() - started:.2f} s", file=sys.stderr)

    def check_sender(self, headers, method, path):
        """Raise APIError for requests from web pages of other sites, also if that domain resolves
        to this server (DNS rebinding), and for requests without the key."""
        host, origin = headers.get("host", "localhost").lower(), headers.get("origin")
        if self.is_local and not self.local_hosts.fullmatch(host):
            raise APIError(403, f"Host {host!r:.80} is not this server; use localhost, its "
                           "address, or start it with --host")
        if origin is not None and origin.lower().partition("://")[2] != host and not (
                {origin, "*"} & {*self.origins}):
            raise APIError(403, f"Origin {origin!r:.80} is not this server, {host!r:.80}")
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if self.key and path not in ("/", "/health") and method != "OPTIONS" and not (
                scheme.lower() == "bearer"
                and hmac.compare_digest(token.strip().encode("latin-1"), self.key.encode())):
            raise APIError(401, "expected Authorization: Bearer and the API key",
                           code="invalid_api_key")

    async def handle_error(self, request, error):
        """Return the response for an exception. uvicorn logs unexpected tracebacks."""
        if isinstance(error, ClientDisconnect):
            return None
        if isinstance(error, HTTPException):
            hint = f"; available: {', '.join(self.paths)}" if error.status_code == 404 else ""
            error = APIError(error.status_code,
                             f"{request.method} {request.url.path!r:.80}: {error.detail}{hint}")
        if not isinstance(error, APIError):
            error = APIError(500, "internal error; see the server's log")
        return error_response(error)

    # routes

    async def get_page(self, request):
        html = Path(__file__).with_name("serve.html").read_bytes()
        return Response(html, media_type="text/html",
                        headers={"Content-Security-Policy": CONTENT_SECURITY_POLICY})

    async def get_health(self, request):
        return json_response(dict(status="ok") | self.load())

    async def get_metrics(self, request):
        return Response(self.metrics.to_text(self.load()),
                        headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def get_models(self, request):
        engine = self.engine
        model = dict(id=self.name, object="model", created=self.created, owned_by="ironGPT",
                     max_model_len=engine.config.block_size, max_tokens=engine.max_tokens,
                     chat=self.template is not None)
        return json_response(dict(object="list", data=[model]))

    async def post_completion(self, request):
        # A browser sends other content types to other sites without asking for permission.
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise APIError(415, "expected Content-Type: application/json")
        try:
            data = await asyncio.wait_for(read_body(request), RECEIVE_SECONDS)
        except asyncio.TimeoutError:
            raise APIError(408, "the request did not arrive within "
                           f"{RECEIVE_SECONDS} seconds") from None
        chat = request.url.path == CHAT_PATH
        # In a worker thread: parsing and encoding a long prompt must not block other connections.
        jobs, stream, include_usage = await asyncio.to_thread(self.create_jobs, data, chat)
        answer = Answer(jobs, self.engine.tokenizer, chat, self.name)
        return CompletionResponse(self, answer, stream, include_usage)

    def create_jobs(self, data, chat):
        """Return (jobs, whether to stream, whether to include the usage) of a request's body."""
        body, stream, include_usage = parse_request(data, self.name)
        return create_jobs(body, chat, self.engine, self.template), stream, include_usage

    def load(self):
        engine = self.engine
        return dict(writing=len(engine.rows), waiting=len(engine.waiting), slots=engine.slots)


class CompletionResponse:
    """ASGI response with the texts of jobs, complete or as server-sent events. The jobs are
    cancelled when the client disconnects."""

    def __init__(self, server, answer, stream, include_usage):
        self.server, self.answer = server, answer
        self.stream, self.include_usage = stream, include_usage

    async def __call__(self, scope, receive, send):
        started, jobs = time.monotonic(), self.answer.jobs
        events = EventQueue(self.server.mailbox)
        for job in jobs:
            job.events = events
        self.server.engine.submit(*jobs)
        write = asyncio.create_task(self.write(events, scope, receive, send))
        disconnect = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await asyncio.wait((write, disconnect), return_when=asyncio.FIRST_COMPLETED)
            if write.done():
                write.result()  # raises APIError
        finally:
            for job in jobs:
                job.ended = True
            write.cancel()
            disconnect.cancel()
            await asyncio.wait((write, disconnect))
            self.server.metrics.add_completion(self.answer.usage(), time.monotonic() - started)

    async def write(self, events, scope, receive, send):
        """Send the response. An error before the first token is an HTTP error; a later one is the
        last event of the stream."""
        answer, started = self.answer, False
        try:
            async for event in events.read(len(answer.jobs)):
                if not self.stream:
                    answer.add(*event)
                    continue
                chunks = answer.chunks(*event)
                if not started:
                    started = True
                    await send(dict(type="http.response.start", status=200, headers=[
                        (b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]))
                    chunks = answer.first_chunks() + chunks
                for chunk in chunks:
                    await send_event(send, chunk | (dict(usage=None) if self.include_usage else {}))
        except APIError as error:
            if not started:
                raise
            await send_event(send, error.body(), more=False)
        else:
            if not self.stream:
                return await json_response(answer.complete())(scope, receive, send)
            if self.include_usage:
                await send_event(send, answer.usage_chunk())
            await send_event(send, "[DONE]", more=False)


class Mailbox:
    """Delivers events from the engine's thread to queues of the event loop, with one wake-up of the
    loop for all events of a step: a wake-up per event would take longer than the event."""

    def __init__(self):
        self.loop, self.events = asyncio.get_running_loop(), collections.deque()
        self.scheduled = False

    def put(self, queue, event):
        self.events.append((queue, event))
        if not self.scheduled:
            self.scheduled = True
            self.loop.call_soon_threadsafe(self.deliver)

    def deliver(self):
        self.scheduled = False  # first: an event from now on schedules the next delivery
        while self.events:
            queue, event = self.events.popleft()
            queue.put_nowait(event)


class EventQueue:
    """A queue of events (see Job) from the engine's thread to the event loop."""

    def __init__(self, mailbox):
        self.mailbox, self.queue = mailbox, asyncio.Queue()

    def put(self, event):
        self.mailbox.put(self.queue, event)

    async def read(self, n):
        """Yield the events of n jobs until all have ended, merged per job if several are in the
        queue. Raises the APIError of a failed job."""
        while n:
            events, merged = [await self.queue.get()], {}
            while not self.queue.empty():
                events.append(self.queue.get_nowait())
            for index, text, logprobs, reason in events:
                old_text, old_logprobs, _ = merged.get(index, ("", [], None))
                merged[index] = old_text + text, old_logprobs + logprobs, reason
            for index, (text, logprobs, reason) in merged.items():
                if isinstance(reason, APIError):
                    raise reason
                n -= reason is not None
                yield index, text, logprobs, reason


async def read_body(request):
    """Return the body of a request; APIError 413 if it is too large."""
    body = bytearray()
    if int(request.headers.get("content-length", 0)) <= MAX_BODY_BYTES:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                break
        else:
            return bytes(body)
    raise APIError(413, f"the request body exceeds {MAX_BODY_BYTES} bytes")


async def wait_for_disconnect(receive):
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_event(send, content, more=True):
    text = content if isinstance(content, str) else json.dumps(content)
    await send(dict(type="http.response.body", body=f"data: {text}\n\n".encode(), more_body=more))


def json_response(content, status=200, headers=None):
    return Response(json.dumps(content), status, headers, media_type="application/json")


def error_response(error):
    return json_response(error.body(), error.status, ERROR_HEADERS.get(error.status))
