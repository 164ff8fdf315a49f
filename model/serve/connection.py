"""HTTP/1.1 as far as it is needed: one request on a connection, its answer, and the end."""

import asyncio
import contextlib
import http.client
import io
import json
import re

MAX_HEAD = 1 << 15  # bytes of a request's first line and headers
MAX_BODY = 1 << 20  # bytes of its JSON
POLL = 0.25         # seconds between two looks
GO_ON = b"HTTP/1.1 100 Continue\r\n\r\n"


class Refused(Exception):
    """An error as OpenAI's clients know it: an HTTP status, and who is to blame by its hundred."""

    def __init__(self, status, message, param=None, code=None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self):
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return dict(error=dict(message=self.message, type=kind, param=self.param, code=self.code))


class Connection:
    """What a client asks, and the way back to it. EOFError or OSError where the client has left."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer
        self.method = self.path = "-"
        self.version, self.status, self.streaming, self.body = "1.1", None, False, b""
        writer.transport.set_write_buffer_limits(0)  # so drain() waits until the system has all

    # what comes in

    async def read_head(self):
        """The first line and the headers. Refused names what is wrong with them."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise Refused(431, f"more than {MAX_HEAD} bytes of headers") from None
        first, _, rest = head.partition(b"\r\n")
        words = re.fullmatch(rb"([A-Z]+) (/[!-~]*) HTTP/(1\.[01])", first)
        if not words:
            raise Refused(400, "expected a first line of METHOD /PATH HTTP/1.1")
        self.method, target, self.version = (word.decode() for word in words.groups())
        self.path = target.partition("?")[0]
        try:
            self.headers = http.client.parse_headers(io.BytesIO(rest))
        except http.client.HTTPException as error:
            raise Refused(400, f"headers: {error}") from None
        names = [name.lower() for name in self.headers]
        twice = {"host", "content-length"} & {name for name in names if names.count(name) > 1}
        if twice or self.headers.defects or self.version == "1.1" and "host" not in names:
            raise Refused(400, "expected headers of NAME: VALUE, Host and Content-Length once")

    async def read_json(self):
        """The bytes of the body, for whoever makes a job of them."""
        length = self.headers.get("Content-Length")
        # Another kind could come from any page that the browser of this machine has open.
        if self.headers.get_content_type() != "application/json":
            raise Refused(415, "expected Content-Type: application/json")
        if length is None:
            raise Refused(411, "expected a Content-Length, in bytes")
        if not length.isascii() or not length.isdigit():
            raise Refused(400, f"Content-Length: expected a number of bytes, got {length!r:.80}")
        if len(length) > 12 or int(length) > MAX_BODY:
            raise Refused(413, f"a request of {length:.20} bytes; the most is {MAX_BODY}")
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.writer.write(GO_ON)
        self.body = await self.reader.readexactly(int(length))

    async def drop_rest(self):
        """Until the client ends its side."""
        while await self.reader.read(1 << 16):
            pass

    async def watch(self, task):
        """Cancel `task` when the client has left. One that has only ended its own side waits for
        its answer: which of the two it is shows when something is sent there."""
        with contextlib.suppress(OSError):
            await self.drop_rest()
            pause = POLL
            while not self.writer.is_closing():
                if self.version == "1.1" and self.status is None:
                    self.writer.write(GO_ON)  # says nothing, and may come at any time
                await asyncio.sleep(pause)
                pause *= 2
        task.cancel()

    # what goes out

    async def write(self, data):
        self.writer.write(data)
        await self.writer.drain()

    def head(self, status, kind, **headers):
        self.status = status
        headers = {"Content-Type": kind, "Connection": "close",
                   "X-Content-Type-Options": "nosniff"} | headers
        lines = [f"HTTP/1.1 {status} {http.client.responses[status]}",
                 *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode()

    async def reply(self, status, content, kind="application/json", **headers):
        """All at once. content: bytes, or what becomes JSON."""
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        head = self.head(status, kind, **{"Content-Length": len(data)} | headers)
        await self.write(head + data * (self.method != "HEAD"))

    async def start_stream(self):
        self.streaming = True
        chunks = {"Transfer-Encoding": "chunked"} if self.version == "1.1" else {}
        await self.write(self.head(200, "text/event-stream", **{"Cache-Control": "no-cache"},
                                   **chunks))

    async def event(self, value):
        text = value if isinstance(value, str) else json.dumps(value)
        await self.chunk(f"data: {text}\n\n".encode())  # an event ends with an empty line

    async def chunk(self, data):
        """A piece of a stream; an empty one ends it: so its end can be told from a cut."""
        await self.write(b"%x\r\n%s\r\n" % (len(data), data) if self.version == "1.1" else data)

    async def refuse(self, error):
        """The error as a reply, or as the last event of a stream."""
        if self.streaming:
            await self.event(error.body())
            return await self.chunk(b"")
        headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": 1},
                   504: {"x-should-retry": "false"}}
        await self.reply(error.status, error.body(), **headers.get(error.status, {}))

    async def finish(self):
        """A client that is still sending would not see its answer if the connection closed at once:
        what it sends is read for a second."""
        self.writer.write_eof()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.drop_rest(), 1)
