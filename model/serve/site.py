"""A site on a listening socket: who may ask, and the way from a request to its answer.

One thread has all connections, as coroutines, so that a thousand slow clients cost it nothing.
"""

import asyncio
import hmac
import ipaddress
import sys
import time
import traceback
from urllib.parse import urlsplit

from model.serve.connection import MAX_HEAD, POLL, Connection, Refused

RECEIVE = 30       # seconds for a whole request to come
TAKE = 30          # seconds that a client has, beyond those of the work, to take its answer
PATIENCE = 10      # the same when the server ends
MAX_SENDING = 512  # clients whose requests are still coming; one more, and the oldest is cut
METHODS = ("GET", "POST", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS")
POLICY = ("default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
          "connect-src 'self'; img-src data:; base-uri 'none'; frame-ancestors 'none'")


class Site:
    """Answers what `routes`, {path: (method, coroutine function of a Connection)}, has. host: a
    name that requests may have in their Host; key: what they must have as their bearer token;
    timeout: seconds that an answer may take."""

    def __init__(self, listening, host="localhost", key=None, timeout=0.0):
        self.listening, self.key, self.timeout = listening, key, timeout
        self.hosts, self.port = ("localhost", host.lower()), listening.getsockname()[1]
        self.local, self.told, self.routes = is_local(listening), 0, {}
        self.sending, self.answering = {}, set()  # connections; sending: in order

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
        await asyncio.to_thread(self.close)
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
            await asyncio.wait_for(self.answer(c), RECEIVE + self.timeout + TAKE)
        except (OSError, EOFError, asyncio.TimeoutError, asyncio.CancelledError):
            c.status = c.status or "left"
        finally:
            writer.transport.abort()  # all is sent, or will never be
            self.sending.pop(c, None)
            self.note(c, peer, time.monotonic() - began)
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

    async def reply_page(self, c, html):
        await c.reply(200, html, "text/html; charset=utf-8", **{"Content-Security-Policy": POLICY})

    def close(self):
        """What ends with the site; not in its thread."""

    def note(self, c, peer, seconds):
        """A request is over."""


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
