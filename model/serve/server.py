"""HTTP server on Starlette and uvicorn: OpenAI's API, a page, health and metrics.

One thread serves all connections; the engine computes in a second thread (model/serve/engine.py).
"""

import asyncio
import collections
import functools
import hmac
import ipaddress
import json
import logging
import os
import time
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from model.serve.api import Answer, merge_events, parse_request
from model.serve.engine import APIError

CHAT_PATH = "/v1/chat/completions"
MAX_HEAD_BYTES = 1 << 15    # request line and headers
MAX_BODY_BYTES = 1 << 20
MAX_IDLE_CONNECTIONS = 512  # connections without a complete request; the oldest are closed
RECEIVE_SECONDS = 30        # for a request to arrive
SEND_SECONDS = 30           # to read a response after the last token
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; frame-ancestors 'none'")
ERROR_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}


class Server(uvicorn.Server):
    """Serves the texts of an engine on a listening socket until a signal arrives.

    host: the name that clients use for this server. key: the required bearer token, if any.
    origins: other web pages that may send requests from a browser ("*": any).
    """

    def __init__(self, listening, engine, name, template=None, host="localhost", key=None,
                 origins=()):
        self.listening = listening
        self.engine = engine
        self.name = name
        self.template = template
        self.key = key
        self.counts = collections.Counter()
        self.busy_since = {}  # {(connection, its request if complete): time}
        routes = [Route("/", self.get_page), Route("/health", self.get_health),
                  Route("/metrics", self.get_metrics), Route("/v1/models", self.get_models),
                  Route("/v1/completions", self.post_completion, methods=["POST"]),
                  Route(CHAT_PATH, self.post_completion, methods=["POST"])]
        # Other web pages cannot read responses, or send JSON without permission (CORS). Here, the
        # names are those of this machine: another one is a page's, made to resolve to this server.
        address = listening.getsockname()[0]
        is_local = ipaddress.ip_address(address).is_loopback
        names = ["localhost", "127.0.0.1", "[::1]", address, host] if is_local else ["*"]
        middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=names, www_redirect=False),
                      Middleware(CORSMiddleware, allow_origins=origins, allow_headers=["*"],
                                 allow_methods=["GET", "POST"])]
        app = Starlette(routes=routes, middleware=middleware, exception_handlers=dict.fromkeys(
            (APIError, HTTPException, ClientDisconnect, Exception), self.handle_error))
        super().__init__(uvicorn.Config(
            app, http="h11", ws="none", lifespan="off", proxy_headers=False, server_header=False,
            headers=[("X-Content-Type-Options", "nosniff")], backlog=128,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            timeout_graceful_shutdown=SEND_SECONDS))
        logging.getLogger("uvicorn.error").setLevel("WARNING")

    # uvicorn.Server

    async def startup(self, sockets=None):
        self.mailbox = Mailbox()
        await super().startup([self.listening])

    async def on_tick(self, counter):
        self.close_slow_connections()
        return await super().on_tick(counter)

    def handle_exit(self, sig, frame):
        if self.should_exit:
            os._exit(128 + sig)
        os.write(2, b"\nfinishing active requests; a second signal quits at once\n")
        self.should_exit = True

    async def shutdown(self, sockets=None):
        await asyncio.to_thread(self.engine.close)
        await super().shutdown(sockets)

    def close_slow_connections(self):
        """Close connections that take too long to send a request or to read the response, and the
        oldest of too many connections without a complete request."""
        now = time.monotonic()
        times = {}
        for c in self.server_state.connections:
            is_busy = bool(c.cycle) and not (c.cycle.more_body or c.cycle.response_complete)
            state = c, c.cycle, is_busy  # the cycle: each request starts anew
            times[state] = self.busy_since.get(state, now)
        self.busy_since = times
        slow = [c for c, _, is_busy in sorted(times, key=times.get) if not is_busy]
        slow = slow[:-MAX_IDLE_CONNECTIONS]
        for (c, _, is_busy), since in times.items():
            limit = RECEIVE_SECONDS + (self.engine.timeout + SEND_SECONDS if is_busy else 0)
            if now > since + limit:
                slow.append(c)
        for c in slow:
            c.transport.abort()

    # routes

    async def handle_error(self, request, error):
        """Return the response for an exception. uvicorn logs unexpected tracebacks."""
        if isinstance(error, ClientDisconnect):
            return None
        if isinstance(error, HTTPException):
            error = APIError(error.status_code,
                             f"{request.method} {request.url.path!r:.80}: {error.detail}")
        if not isinstance(error, APIError):
            error = APIError(500, "internal error; see the server's log")
        return JSONResponse(error.body(), error.status, ERROR_HEADERS.get(error.status))

    def check_key(self, request):
        """Raise APIError for requests without the key."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if self.key and not (scheme.lower() == "bearer" and hmac.compare_digest(
                token.strip().encode("latin-1"), self.key.encode())):
            raise APIError(401, "expected Authorization: Bearer and the API key",
                           code="invalid_api_key")

    async def get_page(self, request):
        return FileResponse(Path(__file__).with_name("serve.html"),
                            headers={"Content-Security-Policy": CONTENT_SECURITY_POLICY})

    async def get_health(self, request):
        return JSONResponse(dict(status="ok") | self.load())

    async def get_metrics(self, request):
        """Return all metrics in the text format of Prometheus
        (https://prometheus.io/docs/instrumenting/exposition_formats)."""
        self.check_key(request)
        self.counts["requests_total"] = self.server_state.total_requests
        lines = [f"# TYPE irongpt_{name} {kind}\nirongpt_{name} {value}\n"
                 for kind, values in (("counter", self.counts), ("gauge", self.load()))
                 for name, value in values.items()]
        return PlainTextResponse("".join(lines), media_type="text/plain; version=0.0.4")

    async def get_models(self, request):
        self.check_key(request)
        model = dict(id=self.name, object="model", owned_by="ironGPT", chat=bool(self.template),
                     max_tokens=self.engine.max_tokens)
        return JSONResponse(dict(object="list", data=[model]))

    async def post_completion(self, request):
        self.check_key(request)
        # A browser sends other content types to other sites without asking for permission.
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise APIError(415, "expected Content-Type: application/json")
        chat = request.url.path == CHAT_PATH
        # In a worker thread: parsing and encoding a long prompt must not block other connections.
        jobs, stream, include_usage = await asyncio.to_thread(
            parse_request, await read_body(request), chat, self.name, self.engine, self.template)
        answer = Answer(jobs, chat, self.name)
        queue = asyncio.Queue()
        for job in jobs:
            job.on_event = functools.partial(self.mailbox.put, queue)
        self.engine.submit(*jobs)
        events = self.read_events(queue, answer)
        watch = asyncio.create_task(report_disconnect(request, queue))
        try:
            if not stream:
                return JSONResponse(answer.complete([event async for event in events]))
            first = await anext(events)  # an error before the first token is an HTTP error
        finally:
            watch.cancel()
        return StreamingResponse(write_stream(answer, first, events, include_usage),
                                 headers={"Cache-Control": "no-cache"},
                                 media_type="text/event-stream")

    async def read_events(self, queue, answer):
        """Yield the events of an answer's jobs until all have ended, merged per job if several are
        in the queue. Raises the exception of a failed job. At the end, jobs are cancelled."""
        started = time.monotonic()
        n = len(answer.jobs)
        try:
            while n:
                events = [await queue.get()]
                while not queue.empty():
                    events.append(queue.get_nowait())
                for event in merge_events(events):
                    finish_reason = event[-1]
                    if isinstance(finish_reason, Exception):
                        raise finish_reason
                    n -= finish_reason is not None
                    yield event
        finally:
            for job in answer.jobs:
                job.ended = True
            usage = answer.usage()
            self.counts.update(
                prompt_tokens_total=usage["prompt_tokens"], texts_total=len(answer.jobs),
                completion_tokens_total=usage["completion_tokens"],
                text_seconds_total=time.monotonic() - started)

    def load(self):
        engine = self.engine
        return dict(writing=len(engine.rows), waiting=len(engine.waiting), slots=engine.slots)


class Mailbox:
    """Delivers events from the engine's thread to queues of the event loop, with one wake-up of the
    loop for all events of a step: a wake-up per event would take longer than the event."""

    def __init__(self):
        self.loop = asyncio.get_running_loop()
        self.events = collections.deque()
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


async def read_body(request):
    """Return the body of a request; APIError 413 if it is too large."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise APIError(413, f"the request body exceeds {MAX_BODY_BYTES} bytes")
    return bytes(body)


async def report_disconnect(request, queue):
    """Put an event with the exception ClientDisconnect into the queue when the client leaves."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    queue.put_nowait((-1, "", ClientDisconnect()))


async def write_stream(answer, first, events, include_usage):
    """Yield the server-sent events of an answer. An error is the last one."""
    def send(content):
        return f"data: {json.dumps(content)}\n\n"
    try:
        yield send(answer.chunk(answer.choice("delta", *first)))
        async for event in events:
            yield send(answer.chunk(answer.choice("delta", *event)))
    except APIError as error:
        yield send(error.body())
        return
    if include_usage:
        yield send(answer.chunk(usage=answer.usage()))
    yield "data: [DONE]\n\n"
