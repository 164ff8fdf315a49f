"""Inference engine with continuous batching (Orca, osdi22-yu).

One thread computes a token of every active request per step, because reading the weights is most of
the time of a step, independent of the number of requests. Requests start and finish at any step.
Each has a separate generator, so that a seed gives the text of model.sample, independent of the
other requests.
"""

import collections
import itertools
import queue
import threading
import time
import traceback
from dataclasses import dataclass, field

import torch

from model.core.detokenizer import Detokenizer
from model.core.generate import NON_FINITE_LOGITS, create_generators, sample_tokens
from model.core.kv_cache import create_cache

PREFILL_TOKENS = 128  # prompt tokens computed between two decoding steps
MIN_LOGPROB = -9999   # JSON has no infinity; OpenAI's limit


class APIError(Exception):
    """An error response: the HTTP status, and the fields of OpenAI's error object."""

    def __init__(self, status, message, param=None, code=None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self):
        """Return the JSON object of the response."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return dict(error=dict(message=self.message, type=kind, param=self.param, code=self.code))


@dataclass(eq=False)
class Job:
    """One text to generate: options and state.

    The engine puts (index, text, logprobs, finish_reason) into `events` for each piece of text.
    finish_reason is set for the last piece only: "stop", "length" or an APIError. logprobs: the
    results of top_logprobs() for the tokens since the previous event, if n_logprobs is set.
    """
    ids: list
    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0   # as defined by OpenAI
    frequency_penalty: float = 0.0
    n_logprobs: int | None = None   # alternatives to report per token
    seed: int | None = None
    stop_strings: tuple = ()
    index: int = 0       # number of the choice within the request
    events: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    ended: bool = False  # set by the engine at the end, or by the client to cancel
    n_prefilled: int = 0
    n_generated: int = 0
    token: int = -1      # the last one
    counts: torch.Tensor | None = None  # (1, V): occurrences in the text, for the penalties
    logprobs: list = field(default_factory=list)

    def penalize(self, logits):
        """Return logits (1, V) minus the penalties of the generated tokens."""
        if not (self.presence_penalty or self.frequency_penalty):
            return logits
        if self.counts is None:
            self.counts = torch.zeros_like(logits, dtype=torch.float32)
        return (logits - self.frequency_penalty * self.counts
                - self.presence_penalty * (self.counts > 0))

    def emit(self, text, finish_reason=None):
        """Send an event; with a finish_reason, the last one."""
        self.ended = self.ended or finish_reason is not None
        self.events.put((self.index, text, self.logprobs, finish_reason))
        self.logprobs = []


class Engine:
    """Generates the texts of up to `slots` jobs in one batch; up to max_queue more jobs wait.

    rows[i] is the job in row i of the cache. One additional row is for prompts, PREFILL_TOKENS at a
    time so that the other jobs continue; a complete prompt is copied to the end of the batch. The
    last row replaces a row that is done.
    """

    def __init__(self, model, tokenizer, slots=16, max_queue=256, max_tokens=1024, timeout=300.0,
                 end_tokens=()):
        self.model, self.tokenizer, self.config = model, tokenizer, model.config
        self.end_tokens = {tokenizer.eot_token, *end_tokens}
        self.slots, self.max_queue, self.max_tokens = slots, max_queue, max_tokens
        self.timeout, self.device = timeout, model.wte.weight.device
        self.cache = create_cache(model, slots + 1)
        self.prompt_cache = self.cache[slots:]
        self.rows, self.reading, self.waiting = [], None, collections.deque()
        self.closing, self.changed = False, threading.Condition()  # guards closing and waiting
        self.thread = threading.Thread(target=self.run, name="compute", daemon=True)
        self.thread.start()

    # called by other threads

    def submit(self, *jobs):
        """Put all jobs into the queue. Raises APIError if the queue has no space for all."""
        for job in jobs:
            job.detokenizer = Detokenizer(self.tokenizer, job.stop_strings)
            job.generator, = create_generators(job.seed, self.device)
            job.deadline = time.monotonic() + self.timeout
        with self.changed:
            if self.closing:
                raise APIError(503, "the server is shutting down")
            if len(self.waiting) + len(jobs) > self.max_queue:
                raise APIError(503, f"the queue is full: {len(self.waiting)} of {self.max_queue} "
                               "requests are waiting; try again later")
            self.waiting.extend(jobs)
            self.changed.notify()

    def close(self):
        """Finish active jobs, reject waiting jobs, and stop the thread."""
        with self.changed:
            self.closing = True
            while self.waiting:
                self.waiting.popleft().emit("", APIError(503, "the server is shutting down"))
            self.changed.notify()
        self.thread.join()

    # called by the engine's thread

    @torch.inference_mode()
    def run(self):
        while self.wait_for_work():
            try:
                self.step()
            except Exception:  # lose these jobs, not the server
                traceback.print_exc()
                failed = [*self.rows, self.reading] if self.reading else self.rows
                self.rows, self.reading = [], None
                for job in failed:
                    job.emit("", APIError(500, "generation failed; see the server's log"))

    def wait_for_work(self):
        """Wait for jobs. Return False if the engine is closed and all jobs are done."""
        with self.changed:
            self.changed.wait_for(lambda: self.rows or self.reading or self.waiting or self.closing)
            return bool(self.rows or self.reading or self.waiting)

    def step(self):
        """Prefill up to PREFILL_TOKENS, then generate one token of every active job."""
        self.remove_ended()
        self.prefill()
        self.remove_ended()  # jobs of a single token
        if self.rows:
            tokens = torch.tensor([[job.token] for job in self.rows], device=self.device)  # (B, 1)
            logits = self.model(tokens, cache=self.cache[:len(self.rows)], last_only=True)[:, -1]
            self.write(self.rows, logits)

    def remove_ended(self):
        """Free the cache rows and queue positions of jobs that are done or out of time."""
        now = time.monotonic()
        with self.changed:
            jobs = [*self.rows, *self.waiting, *([self.reading] if self.reading else [])]
            for job in jobs:
                if not job.ended and now > job.deadline:
                    job.emit("", APIError(504, f"timed out after {self.timeout:g} seconds"))
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

    def prefill(self):
        """Compute the next tokens of prompts; a complete prompt gets a first sampled token."""
        budget = PREFILL_TOKENS
        while budget:
            with self.changed:
                if self.reading is None and self.waiting and len(self.rows) < self.slots:
                    self.reading = self.waiting.popleft()
                    self.prompt_cache.clear()
            job = self.reading
            if job is None:
                break
            ids = job.ids[job.n_prefilled:job.n_prefilled + budget]
            logits = self.model(torch.tensor([ids], device=self.device), cache=self.prompt_cache,
                                last_only=True)[:, -1]  # (1, V)
            job.n_prefilled += len(ids)
            budget -= len(ids)
            if job.n_prefilled == len(job.ids):
                self.cache.copy_row(self.slots, len(self.rows))
                self.rows.append(job)
                self.reading = None
                self.write([job], logits)

    def write(self, jobs, logits):
        """Sample the next token of each job from logits (B, V) and emit the text. Jobs with the
        same sampling options are sampled together."""
        groups = {}
        for job, row in zip(jobs, logits[:, :self.tokenizer.n_vocab].split(1)):
            options = job.temperature, job.top_k, job.top_p, job.min_p
            groups.setdefault(options, []).append((job, row))
        tokens = []
        for (temperature, top_k, top_p, min_p), group in groups.items():
            penalized = torch.cat([job.penalize(row) for job, row in group])
            generators = [job.generator for job, _ in group]
            tokens.append(sample_tokens(penalized, temperature, top_k, top_p, generators, min_p))
        pairs = itertools.chain(*groups.values())
        for (job, row), token in zip(pairs, torch.cat(tokens).tolist()):  # one synchronisation
            self.add_token(job, token, row)

    def add_token(self, job, token, logits):
        """Append a token, sampled from logits (1, V), here without penalties, to a job, and emit
        the new text. token -1: the logits are not finite."""
        if token < 0:
            return job.emit("", APIError(500, NON_FINITE_LOGITS))
        job.token = token
        job.n_generated += 1
        if job.counts is not None:
            job.counts[0, token] += 1
        if job.n_logprobs is not None:
            job.logprobs.append(top_logprobs(logits[0], token, job.n_logprobs))
        at_end = token in self.end_tokens
        last = at_end or job.n_generated == job.max_tokens
        text = job.detokenizer.add(None if at_end else token, last)
        stopped = at_end or job.detokenizer.stopped
        if text or last or stopped:
            job.emit(text, "stop" if stopped else "length" if last else None)


def top_logprobs(logits, token, n):
    """Return [(id, log probability)] of `token`, followed by the n most likely tokens, from
    logits (V,)."""
    logprobs = logits.float().log_softmax(-1).clamp(min=MIN_LOGPROB)
    values, ids = logprobs.topk(min(n, len(logprobs)))
    return list(zip((token, *ids.tolist()), (logprobs[token].item(), *values.tolist())))
