"""HTTP server on Starlette and uvicorn: OpenAI's API, a page, and health.

One thread serves all connections; the engine computes in a second thread (model/serve/engine.py).
"""

import asyncio
import contextlib
import hmac
import ipaddress
import json
import logging
import os
import re
import signal
import time
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, JSONResponse, StreamingResponse
from starlette.routing import Mount, Route

from model.serve.api import Answer, parse_request
from model.serve.engine import APIError

CHAT_PATH = "/v1/chat/completions"
MAX_HEAD_BYTES = 1 << 15  # request line and headers
MAX_BODY_BYTES = 1 << 20
RECEIVE_SECONDS = 30  # for a request to arrive
FINISH_SECONDS = 30   # for clients to read their responses
MAX_CONNECTIONS = 512  # with more, a request must arrive within IDLE_SECONDS
IDLE_SECONDS = 1
PORT = re.compile(r"(?<!:):\d*$")  # at the end of a host, but not the end of an IPv6 address
ERROR_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}


class Server(uvicorn.Server):
    """HTTP server with OpenAI's API; run([listening]) serves until SIGINT or SIGTERM.

    At the end, the engine is closed. name: of the model, for clients. template: the model's
    ChatTemplate, or None: no chats.
    hosts: names accepted in the Host header ("*": any) if the address of the socket `listening` is
    a loopback address, in addition to localhost and this; otherwise all names are accepted.
    key: the required bearer token, or None. origins: other web pages that may send requests from a
    browser ("*": any). root_path: a path prefix under which all pages are also available.
    """

    def __init__(self, listening, engine, name, template=None, hosts=(), key=None, origins=(),
                 root_path=None):
        self.engine = engine
        self.name = name
        self.template = template
        self.key = key
        self.created = int(time.time())
        self.times = {}  # {(connection, its last request, whether it is being answered): since}
        routes = [Route("/", self.get_page), Route("/health", self.get_health),
                  Route("/v1/models", self.get_models),
                  Route("/v1/models/{name:path}", self.get_models),
                  Route("/v1/completions", self.post_completion, methods=["POST"]),
                  Route(CHAT_PATH, self.post_completion, methods=["POST"])]
        if root_path:
            routes.append(Mount("/" + root_path.strip("/"), routes=routes.copy()))
        # Other web pages cannot read responses, or send JSON without permission (CORS). Here, the
        # names are those of this machine: another one is a page's, made to resolve to this server.
        address = listening.getsockname()[0]
        is_local = ipaddress.ip_address(address).is_loopback
        names = ("localhost", "127.0.0.1", "[::1]", address, *hosts) if is_local else ["*"]
        self.hosts = {PORT.sub("", name.lower()) for name in names}
        self.app = Starlette(
            routes=routes, exception_handlers=dict.fromkeys(
                (APIError, HTTPException, ClientDisconnect, Exception), self.handle_error),
            middleware=[Middleware(CORSMiddleware, allow_headers=["*"],
                                   allow_methods=["GET", "POST"],  # an origin has no path
                                   allow_origins=[origin.rstrip("/") for origin in origins])])
        super().__init__(uvicorn.Config(
            self.answer, interface="asgi3", http="h11", ws="none", lifespan="off",
            headers=[("X-Content-Type-Options", "nosniff"), ("X-Frame-Options", "DENY")],
            proxy_headers=False, server_header=False, h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            timeout_keep_alive=RECEIVE_SECONDS, timeout_graceful_shutdown=FINISH_SECONDS,
            backlog=128))  # without free files, asyncio logs as many errors per second
        for name in "uvicorn.error", "asyncio":  # they warn of the mistakes of clients
            logging.getLogger(name).setLevel("ERROR")

    # uvicorn.Server

    async def on_tick(self, counter):
        """Abort connections that send or read too slowly; return whether the server must stop."""
        now = time.monotonic()
        times = {}
        connections = self.server_state.connections
        receive_seconds = RECEIVE_SECONDS if len(connections) <= MAX_CONNECTIONS else IDLE_SECONDS
        for c in connections:
            is_busy = c.cycle and not (c.cycle.more_body or c.cycle.response_complete)
            state = c, c.cycle, is_busy
            times[state] = self.times.get(state, now)
            limit = self.engine.timeout + FINISH_SECONDS if is_busy else receive_seconds
            if now > times[state] + limit:
                c.transport.abort()
        self.times = times
        return await super().on_tick(counter)

    def handle_exit(self, sig, frame):
        """Begin to shut down: finish active requests; at a second SIGINT or SIGTERM exit at once.

        Overrides uvicorn's signal handler. Other requests get the status 503.
        """
        if self.should_exit and sig in (signal.SIGINT, signal.SIGTERM):  # SIGHUP may come twice
            os._exit(128 + sig)
        self.should_exit = True
        with contextlib.suppress(OSError):  # the terminal is closed
            os.write(2, b"\nfinishing active requests; a second signal quits at once\n")

    async def shutdown(self, sockets=None):
        await asyncio.to_thread(self.engine.close)
        await super().shutdown(sockets)

    # routes

    async def answer(self, scope, receive, send):
        """Answer a request (ASGI); status 400 if the name in the Host header is not accepted."""
        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
        name = PORT.sub("", host.lower())
        app = self.app
        if not self.hosts & {name, "*"}:
            error = APIError(400, f"this server is not known as {name!r:.80}; start it with "
                             "--allow_host and this name")
            app = JSONResponse(error.body(), error.status)
        await app(scope, receive, send)

    async def handle_error(self, request, error):
        """Return the JSON response for an exception, or None if the client has disconnected.

        The status is that of an APIError or HTTPException, e.g. 404, otherwise 500.
        """
        if isinstance(error, ClientDisconnect):
            return None
        headers = getattr(error, "headers", None)  # Allow, of error 405
        if isinstance(error, HTTPException):
            error = APIError(error.status_code, f"{request.url.path!r:.80}: {error.detail}")
        if not isinstance(error, APIError):
            error = APIError(500, "internal error; see the server's log")
        return JSONResponse(error.body(), error.status, headers or ERROR_HEADERS.get(error.status))

    def check_key(self, request):
        """Raise APIError (401) unless the request has the server's key, if any, as bearer token."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if self.key and not (scheme.lower() == "bearer" and hmac.compare_digest(
                token.strip().encode("latin-1"), self.key.encode())):
            raise APIError(401, "expected Authorization: Bearer and the API key",
                           code="invalid_api_key")

    async def get_page(self, request):
        return FileResponse(Path(__file__).with_name("serve.html"))

    async def get_health(self, request):
        engine = self.engine
        return JSONResponse(dict(status="ok", writing=len(engine.rows), slots=engine.slots,
                                 waiting=len(engine.waiting)))

    async def get_models(self, request):
        self.check_key(request)
        model = dict(id=self.name, object="model", created=self.created, owned_by="ironGPT",
                     chat=bool(self.template), max_tokens=self.engine.max_tokens)
        name = request.path_params.get("name", "")
        if name not in ("", self.name):
            raise APIError(404, f"model {name!r:.80} not found; available: {self.name!r}", "model",
                           "model_not_found")
        return JSONResponse(model if name else dict(object="list", data=[model]))

    async def post_completion(self, request):
        """Return a JSON response or a stream of server-sent events for a completion request."""
        self.check_key(request)
        # A browser sends other content types to other sites without asking for permission.
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise APIError(415, "expected Content-Type: application/json")
        chat = request.url.path.endswith(CHAT_PATH)
        # In a worker thread: parsing and encoding a long prompt must not block other connections.
        options, jobs, include_usage = await asyncio.to_thread(
            parse_request, await read_body(request), chat, self.engine, self.template)
        answer = Answer(jobs, options.n, chat, self.name)
        loop, queue = asyncio.get_running_loop(), asyncio.Queue()
        for i, job in enumerate(jobs):  # events (text, finish_reason) come from the engine's thread
            job.on_event = lambda event, i=i: loop.call_soon_threadsafe(
                queue.put_nowait, (i, *event))
        self.engine.submit(jobs)
        events = read_events(queue, jobs)
        watch = asyncio.create_task(cancel_on_disconnect(request, jobs))
        try:
            # An error before the first token, or before a whole response, is an HTTP error.
            pieces = [await anext(events)] if options.stream else [e async for e in events]
        finally:
            watch.cancel()
        if not options.stream:
            return JSONResponse(answer.complete(pieces))
        return StreamingResponse(write_stream(answer, pieces[0], events, include_usage),
                                 headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
                                 media_type="text/event-stream")


async def read_body(request):
    """Return the body of a request; raise APIError (413) if too large, or ClientDisconnect."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise APIError(413, f"the request has more than {MAX_BODY_BYTES} bytes")
    return bytes(body)


async def read_events(queue, jobs):
    """Yield the events (index of the job, text, finish_reason) in `queue` until all jobs finish.

    A finish_reason that is an exception is raised. At the end, also if the caller stops early, all
    jobs are cancelled.
    """
    n_active = len(jobs)
    try:
        while n_active:
            i, text, finish_reason = await queue.get()
            if isinstance(finish_reason, Exception):
                raise finish_reason
            n_active -= finish_reason is not None
            yield i, text, finish_reason
    finally:
        for job in jobs:
            job.ended = True


async def cancel_on_disconnect(request, jobs):
    """Wait until the client disconnects; then end jobs[0] with an exception for read_events()."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    jobs[0].emit("", ClientDisconnect())


async def write_stream(answer, first, events, include_usage):
    """Yield the server-sent events of a streamed response, as texts, and "[DONE]".

    first, events: the first event, and an async iterator of the others. answer: the Answer that
    formats them. include_usage: send the token counts before "[DONE]". An APIError of `events` is
    sent as the last event, without "[DONE]".
    """
    def send(content):
        return f"data: {json.dumps(content)}\n\n"
    try:
        yield send(answer.chunk(first))
        async for event in events:
            yield send(answer.chunk(event))
        if include_usage:
            yield send(answer.chunk(usage=answer.usage()))
        yield "data: [DONE]\n\n"
    except APIError as error:
        yield send(error.body())
    except ClientDisconnect:  # noticed just before the response began
        pass
