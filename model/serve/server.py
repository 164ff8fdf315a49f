"""HTTP server on Starlette and uvicorn: OpenAI's API, a page, and health.

One thread serves all connections; the engine computes in a second thread (model/serve/engine.py).
"""

import asyncio
import contextlib
import hmac
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
from starlette.responses import FileResponse, JSONResponse, StreamingResponse
from starlette.routing import Route

from model.serve.api import Answer, parse_request
from model.serve.engine import APIError

CHAT_PATH = "/v1/chat/completions"
FINISH_SECONDS = 30  # for active requests when the server stops
ERROR_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}


class Server(uvicorn.Server):
    """HTTP server with OpenAI's API; run([listening]) serves until SIGINT or SIGTERM.

    Active requests are then finished, for FINISH_SECONDS (30) at most; a second signal exits.
    name: of the model, for clients. template: the model's ChatTemplate, or None: no chats.
    key: the required bearer token. None: no key, and requests must name this machine in the Host
    header: as localhost or `host`. origins: other web pages that may send requests from a browser
    ("*": any).
    """

    def __init__(self, engine, name, template=None, host="127.0.0.1", key=None, origins=()):
        self.engine = engine
        self.name = name
        self.template = template
        self.key = key
        self.created = int(time.time())
        # Other web pages cannot read responses, or send JSON without permission (CORS). A page's
        # own name may have been made to resolve to this server (DNS rebinding), so without a key
        # other names are not accepted.
        hosts = ["*"] if key else ["localhost", "127.0.0.1", "[::1]", host]
        app = Starlette(
            routes=[Route("/", self.get_page), Route("/health", self.get_health),
                    Route("/v1/models", self.get_models),
                    Route("/v1/completions", self.post_completion, methods=["POST"]),
                    Route(CHAT_PATH, self.post_completion, methods=["POST"])],
            exception_handlers={kind: self.handle_error
                                for kind in (APIError, HTTPException, Exception)}
            | {ClientDisconnect: lambda request, error: None},
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts),
                        Middleware(CORSMiddleware, allow_headers=["*"],
                                   allow_methods=["GET", "POST"],  # an origin has no path
                                   allow_origins=[origin.rstrip("/") for origin in origins])])
        super().__init__(uvicorn.Config(
            app, timeout_keep_alive=30, timeout_graceful_shutdown=FINISH_SECONDS,
            server_header=False,
            headers=[("X-Content-Type-Options", "nosniff"), ("X-Frame-Options", "DENY")]))
        logging.getLogger("uvicorn.error").addFilter(is_no_cancellation)

    def handle_exit(self, sig, frame):
        """Begin to shut down; at a second signal exit at once. Overrides uvicorn's handler."""
        if self.should_exit:
            os._exit(128 + sig)
        super().handle_exit(sig, frame)

    async def handle_error(self, request, error):
        """Return the JSON response for an exception, with status 500 if it is of neither class."""
        headers = getattr(error, "headers", None)  # with 405, the methods of the path
        if isinstance(error, HTTPException):
            error = APIError(error.status_code, f"{request.method} {request.url.path}: expected "
                             f"POST /v1/completions or {CHAT_PATH}, or GET /v1/models")
        elif not isinstance(error, APIError):
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
        return JSONResponse(dict(status="ok", slots=self.engine.slots,
                                 writing=len(self.engine.rows), waiting=len(self.engine.waiting)))

    async def get_models(self, request):
        self.check_key(request)
        model = dict(id=self.name, object="model", created=self.created, owned_by="ironGPT",
                     chat=bool(self.template), max_tokens=self.engine.max_tokens)
        return JSONResponse(dict(object="list", data=[model]))

    async def post_completion(self, request):
        """Return a JSON response or a stream of server-sent events for a completion request."""
        self.check_key(request)
        # A browser sends other content types to other sites without asking for permission.
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise APIError(415, "expected Content-Type: application/json")
        chat = request.url.path == CHAT_PATH
        # In a worker thread: parsing and encoding a long prompt must not block other connections.
        options, jobs, include_usage = await asyncio.to_thread(
            parse_request, await request.body(), chat, self.engine, self.template)
        answer = Answer(jobs, options.n, chat, self.name)
        loop, queue = asyncio.get_running_loop(), asyncio.Queue()
        for i, job in enumerate(jobs):  # events (text, finish_reason) come from the engine's thread
            job.on_event = lambda event, i=i: put(loop, queue, (i, *event))
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


def is_no_cancellation(record):
    """Return whether a log record is not the traceback of a request that FINISH_SECONDS cut."""
    return not (record.exc_info and record.exc_info[0] is asyncio.CancelledError)


def put(loop, queue, event):
    """Add an event to an asyncio.Queue, from another thread; do nothing if its loop is closed."""
    with contextlib.suppress(RuntimeError):  # the server has stopped without this request
        loop.call_soon_threadsafe(queue.put_nowait, event)


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
