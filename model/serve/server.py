"""The server: what there is to ask for, and what was asked.

One thread has all connections (model/serve/site.py); the engine's computes (model/serve/engine.py).
"""

import asyncio
import bisect
import collections
import itertools
import json
import sys
import time
from pathlib import Path

from model.serve.api import Answer, jobs_of
from model.serve.connection import Refused
from model.serve.site import Site

CHAT = "/v1/chat/completions"
SECONDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300)  # bounds of the latency's histogram


class Events:
    """From the engine's thread into the server's."""

    def __init__(self):
        self.loop, self.queue = asyncio.get_running_loop(), asyncio.Queue()

    def put(self, event):
        self.loop.call_soon_threadsafe(self.queue.put_nowait, event)


class Server(Site):
    """Answers on a listening socket with what an engine writes. host: a name that requests may have
    in their Host; key: what they must have as their bearer token."""

    def __init__(self, listening, engine, name, template=None, host="localhost", key=None):
        super().__init__(listening, host, key, engine.timeout)
        self.engine, self.name, self.template = engine, name, template
        self.created = int(time.time())
        self.requests = collections.Counter()
        self.tokens = collections.Counter(prompt_tokens_total=0, completion_tokens_total=0)
        self.latency, self.seconds = [0] * (len(SECONDS) + 1), 0.0
        self.html = Path(__file__).with_name("serve.html").read_bytes()
        self.routes = {"/": ("GET", self.page), "/health": ("GET", self.health),
                       "/metrics": ("GET", self.metrics), "/v1/models": ("GET", self.models),
                       "/v1/completions": ("POST", self.complete), CHAT: ("POST", self.complete)}

    def close(self):
        self.engine.close()

    def note(self, c, peer, seconds):
        self.requests[c.path if c.path in self.routes else "other", c.status] += 1
        print(f"{time.strftime('%H:%M:%S')} {peer} {c.method} {c.path!a:.80} {c.status} "
              f"{seconds:.2f} s", file=sys.stderr)

    # what is asked for

    async def page(self, c):
        await self.reply_page(c, self.html)

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
