"""Texts for many at once: a job joins at any step, reads its prompt, writes its text, and leaves.

Continuous batching (Orca, osdi22-yu): one thread computes a token of every text in each step, for
reading the weights is most of what a step costs, however many texts there are. Every text draws
from a generator of its own, so that a seed gives the same text whatever else is being written: that
of model.sample.
"""

import collections
import queue
import threading
import time
import traceback
from dataclasses import dataclass, field

import torch

from model.core.detokenizer import Detokenizer
from model.core.generate import NON_FINITE_LOGITS, sample_tokens
from model.core.kv_cache import create_cache
from model.serve.connection import Refused

PIECE = 128  # tokens of prompts read between two steps of the texts being written


@dataclass(eq=False)
class Job:
    """A text to write: what was asked for, and how far it is. events: (index, text, told, None) for
    every piece of it, then a last one with "stop", "length" or a Refused in the place of None.
    told: what `likeliest` says of each token since the piece before, if logprobs asks for it."""
    ids: list
    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence: float = 0.0   # penalties, as OpenAI has them
    frequency: float = 0.0
    logprobs: int | None = None  # how many of the likeliest tokens to tell beside each; None: none
    seed: int | None = None
    stops: tuple = ()
    index: int = 0       # among the choices of a request
    events: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    ended: bool = False  # to be set where nobody wants the rest
    read: int = 0        # tokens of the prompt that are in the cache
    written: int = 0
    token: int = -1      # the newest
    counts: torch.Tensor | None = None  # (1, V): how often each was written, where it is penalized
    told: list = field(default_factory=list)

    def start(self, tokenizer, device, deadline):
        """Before it waits for its turn; deadline: on the clock of time.monotonic."""
        self.text, self.deadline = Detokenizer(tokenizer, self.stops), deadline
        self.generator = torch.Generator(device=device)
        if self.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(self.seed)

    def penalized(self, logits):
        """logits (1, V) less what the tokens written so far cost."""
        if not (self.presence or self.frequency):
            return logits
        if self.counts is None:
            self.counts = torch.zeros_like(logits, dtype=torch.float32)
        return logits - self.frequency * self.counts - self.presence * (self.counts > 0)

    def add(self, token, logits):
        """A token that was drawn from logits (1, V), here without penalties."""
        self.token, self.written = token, self.written + 1
        if self.counts is not None:
            self.counts[0, token] += 1
        if self.logprobs is not None:
            self.told.append(likeliest(logits[0], token, self.logprobs))

    def tell(self, text, reason=None):
        self.events.put((self.index, text, self.told, reason))
        self.told = []

    def end(self, text, reason):
        self.ended = True
        self.tell(text, reason)


class Engine:
    """Writes the texts of up to `slots` jobs at once; max_queue more may wait.

    rows[i] is the job whose keys and values are in row i of the cache. One more row, the desk, is
    where a prompt is read, PIECE tokens at a time so that the others go on meanwhile; then it joins
    them. A row that leaves is replaced by the last one.
    """

    def __init__(self, model, tokenizer, slots=16, max_queue=256, max_tokens=1024, timeout=300.0,
                 ends=()):
        self.ends = {tokenizer.eot_token, *ends}  # of a text
        self.model, self.tokenizer, self.config = model, tokenizer, model.config
        self.slots, self.max_queue, self.max_tokens = slots, max_queue, max_tokens
        self.timeout, self.device = timeout, model.wte.weight.device
        self.cache = create_cache(model, slots + 1)
        self.desk = self.cache[slots:]
        self.rows, self.reading, self.waiting = [], None, collections.deque()
        self.closing, self.changed = False, threading.Condition()  # guards it, and waiting
        self.thread = threading.Thread(target=self.run, name="compute", daemon=True)
        self.thread.start()

    # what other threads call

    def submit(self, *jobs):
        """Put jobs into the queue. Refused where there is no room for all."""
        for job in jobs:
            job.start(self.tokenizer, self.device, time.monotonic() + self.timeout)
        with self.changed:
            if self.closing:
                raise Refused(503, "the server is shutting down")
            if len(self.waiting) + len(jobs) > self.max_queue:
                raise Refused(503, f"{len(self.waiting)} of {self.max_queue} texts are waiting "
                              "already; try later")
            self.waiting.extend(jobs)
            self.changed.notify()

    def close(self):
        """Finish the texts that have begun, refuse those that wait, and end the thread."""
        with self.changed:
            self.closing = True
            while self.waiting:
                self.waiting.popleft().end("", Refused(503, "the server is shutting down"))
            self.changed.notify()
        self.thread.join()

    # what its own thread does

    @torch.inference_mode()
    def run(self):
        while self.has_work():
            try:
                self.step()
            except Exception:  # these texts are lost, the server is not
                traceback.print_exc()
                lost = [*self.rows, self.reading] if self.reading else self.rows
                self.rows, self.reading = [], None
                for job in lost:
                    job.end("", Refused(500, "computing this text failed; the server's log says "
                                        "why"))

    def has_work(self):
        """Waits for it. False: closed, and all is written."""
        with self.changed:
            self.changed.wait_for(lambda: self.rows or self.reading or self.waiting or self.closing)
            return bool(self.rows or self.reading or self.waiting)

    def step(self):
        """Read pieces of prompts, and write a token of every text."""
        self.drop_ended()
        self.read_prompts()
        self.drop_ended()  # one token was all that they should have
        if self.rows:
            tokens = torch.tensor([[job.token] for job in self.rows], device=self.device)  # (B, 1)
            logits = self.model(tokens, cache=self.cache[:len(self.rows)], last_only=True)[:, -1]
            self.write(self.rows, logits)

    def drop_ended(self):
        """Give back the rows, the desk and the places in the queue of jobs that are over."""
        now = time.monotonic()
        with self.changed:
            jobs = [*self.rows, *self.waiting, *([self.reading] if self.reading else [])]
            for job in jobs:
                if not job.ended and now > job.deadline:
                    job.end("", Refused(504, f"not done after {self.timeout:g} seconds"))
            if any(job.ended for job in self.waiting):
                self.waiting = collections.deque(job for job in self.waiting if not job.ended)
        if self.reading and self.reading.ended:
            self.reading = None
        for i in reversed(range(len(self.rows))):
            if self.rows[i].ended:
                last = self.rows.pop()
                if i < len(self.rows):
                    self.cache.copy_row(len(self.rows), i)
                    self.rows[i] = last

    def read_prompts(self):
        room = PIECE
        while room and (job := self.next_prompt()):
            piece = job.ids[job.read:job.read + room]
            logits = self.model(torch.tensor([piece], device=self.device), cache=self.desk,
                                last_only=True)[:, -1]  # (1, V)
            job.read, room = job.read + len(piece), room - len(piece)
            if job.read == len(job.ids):
                self.cache.copy_row(self.slots, len(self.rows))
                self.rows.append(job)
                self.reading = None
                self.write([job], logits)

    def next_prompt(self):
        """The job on the desk, else the one that waits longest, if there is a slot for it."""
        with self.changed:
            if self.reading is None and self.waiting and len(self.rows) < self.slots:
                self.reading = self.waiting.popleft()
                self.desk.clear()
        return self.reading

    def write(self, jobs, logits):
        """The next token of each job, from logits (len(jobs), V). Those that are drawn in the same
        way are drawn at once."""
        ways = {}
        for job, row in zip(jobs, logits[:, :self.tokenizer.n_vocab].split(1)):
            way = job.temperature, job.top_k, job.top_p, job.min_p
            ways.setdefault(way, []).append((job, row))
        tokens = torch.cat([sample_tokens(torch.cat([job.penalized(row) for job, row in of]), *way,
                                 [job.generator for job, _ in of], min_p)
                            for (*way, min_p), of in ways.items()])
        rows = [pair for of in ways.values() for pair in of]
        for (job, row), token in zip(rows, tokens.tolist()):
            if token < 0:
                job.end("", Refused(500, NON_FINITE_LOGITS))
                continue
            job.add(token, row)
            at_end = token in self.ends
            last = at_end or job.written == job.max_tokens
            text = job.text.add(None if at_end else token, last)
            if last or job.text.stopped:
                job.end(text, "stop" if at_end or job.text.stopped else "length")
            elif text:
                job.tell(text)


def likeliest(logits, token, n):
    """[(id, log probability)] of `token`, then of the n likeliest, from logits (V,); as JSON has no
    infinity, at least -9999, as OpenAI's."""
    logprobs = logits.float().log_softmax(-1).clamp(min=-9999)
    most, ids = logprobs.topk(min(n, len(logprobs)))
    return list(zip((token, *ids.tolist()), (logprobs[token].item(), *most.tolist())))
