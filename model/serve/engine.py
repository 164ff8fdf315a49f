"""Inference engine with continuous batching (Orca, osdi22-yu).

One thread computes a token of every active request per step, because reading the weights is most of
the time of a step, independent of the number of requests. Requests start and finish at any step.
Each has a separate random generator, so that a seed gives the same text as in model.sample,
independent of the other requests.
"""

import collections
import itertools
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch

from model.core.detokenizer import Detokenizer
from model.core.generate import NON_FINITE_LOGITS, create_generators, sample_tokens
from model.core.kv_cache import create_cache

PREFILL_TOKENS = 128  # between two decoding steps; the last prompt may be longer


class APIError(Exception):
    """An error response: HTTP status, and the message and code of OpenAI's error object."""

    def __init__(self, status, message, code=None):
        super().__init__(message)
        self.status = status
        self.code = code

    def body(self):
        """Return the response's JSON object {"error": {"message", "type", "param", "code"}}."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return dict(error=dict(message=str(self), type=kind, param=None, code=self.code))


@dataclass(eq=False)
class Job:
    """One text to generate: the ids of the prompt, the options, and the state of generation.

    n_left_out: number of messages left out of the prompt, for the response.
    on_event((text, finish_reason)): called for each new piece of text, by the engine's thread.
    finish_reason is None except for the last event: "stop", "length" or an exception.
    ended: whether generation has ended; set it to True to cancel the job, which then has no event
    except from a running step.
    n_generated: new tokens, with the end token. token: id of the last one; -1 before the first.
    """
    ids: list
    options: object  # model.serve.api.RequestOptions
    n_left_out: int = 0
    on_event: Callable[[tuple], object] = print
    ended: bool = False
    n_generated: int = 0
    token: int = -1

    def emit(self, text, finish_reason=None):
        """Call on_event((text, finish_reason)); a finish_reason ends the job."""
        self.ended = self.ended or finish_reason is not None
        self.on_event((text, finish_reason))


class Engine:
    """Engine that generates texts for up to `slots` Jobs in one batch; up to max_queue more wait.

    submit() adds jobs, close() stops the engine. The constructor starts the thread that computes.
    max_tokens: limit of new tokens per job, applied by model/serve/api.py, not by the engine.
    timeout: seconds after submit() until an unfinished job ends with an error.
    end_tokens: ids that end a text, in addition to the end of text.
    Attribute rows: the active jobs; rows[i] uses row i of the key-value cache. When a job has
    ended, the last row is moved to the row that became free.
    """

    def __init__(self, model, tokenizer, slots=16, max_queue=256, max_tokens=1024, timeout=300.0,
                 end_tokens=()):
        self.model = model
        self.tokenizer = tokenizer
        self.config = model.config
        self.end_tokens = {tokenizer.eot_token, *end_tokens}
        self.slots = slots
        self.max_queue = max_queue
        self.max_tokens = max_tokens
        self.timeout = timeout
        self.device = model.wte.weight.device
        self.cache = create_cache(model, slots)
        self.rows = []
        self.waiting = collections.deque()
        self.closing = False
        self.changed = threading.Condition()  # guards closing and waiting
        self.thread = threading.Thread(target=self.run, name="compute", daemon=True)
        self.thread.start()

    # called by other threads

    def submit(self, jobs):
        """Add the Jobs of one request to the queue and return at once.

        Raises APIError (503) if the queue has no room for all of them, (400) if it never has.
        """
        if len(jobs) > self.max_queue:
            raise APIError(400, f"at most {self.max_queue} texts per request, got {len(jobs)}")
        for job in jobs:
            job.detokenizer = Detokenizer(self.tokenizer, job.options.stop)
            [job.generator] = create_generators(job.options.seed, self.device)
            job.deadline = time.monotonic() + self.timeout
        with self.changed:
            if len(self.waiting) + len(jobs) > self.max_queue:
                raise APIError(503, f"the queue is full: {self.max_queue} requests are waiting")
            self.waiting.extend(jobs)
            self.changed.notify()

    def close(self):
        """Stop the engine after the current step, and wait for the end of the thread."""
        with self.changed:
            self.closing = True
            self.changed.notify()
        self.thread.join()

    # called by the engine's thread

    @torch.inference_mode()
    def run(self):
        """Call step() until close() is called; the thread's target.

        If step() raises an exception, the active jobs end with an APIError (500) event.
        """
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.rows or self.waiting or self.closing)
            if self.closing:
                break
            try:
                self.step()
            except Exception:  # lose these jobs, not the server
                traceback.print_exc()
                for job in self.rows:
                    job.emit("", APIError(500, "generation failed; see the server's log"))
                self.rows = []

    def step(self):
        """Remove ended jobs, start waiting ones, and generate the next token of all active jobs."""
        self.remove_ended()
        self.prefill()
        self.remove_ended()  # jobs of a single token
        if self.rows:
            tokens = torch.tensor([[job.token] for job in self.rows], device=self.device)  # (B, 1)
            logits = self.model(tokens, cache=self.cache[:len(self.rows)], last_only=True)[:, -1]
            self.write(self.rows, logits)

    def remove_ended(self):
        """Remove ended jobs from cache and queue; those past the timeout get APIError (504)."""
        now = time.monotonic()
        with self.changed:
            for job in (*self.rows, *self.waiting):
                if not job.ended and now > job.deadline:
                    job.emit("", APIError(504, f"timed out after {self.timeout:g} seconds"))
            self.waiting = collections.deque(job for job in self.waiting if not job.ended)
        for i in reversed(range(len(self.rows))):
            if self.rows[i].ended:
                last = self.rows.pop()
                if i < len(self.rows):
                    self.cache.copy_rows(len(self.rows), i)
                    self.rows[i] = last

    def prefill(self):
        """Run the model on waiting prompts, each in a free row, and sample their first tokens.

        Stops once these prompts have PREFILL_TOKENS (128) or more tokens.
        """
        n_tokens = 0
        while n_tokens < PREFILL_TOKENS and len(self.rows) < self.slots and self.waiting:
            with self.changed:
                job = self.waiting.popleft()
            row = self.cache[len(self.rows):len(self.rows) + 1]
            row.clear()
            self.rows.append(job)
            logits = self.model(torch.tensor([job.ids], device=self.device), cache=row,
                                last_only=True)[:, -1]  # (1, V)
            n_tokens += len(job.ids)
            self.write([job], logits)

    def write(self, jobs, logits):
        """Sample the next token of each job from `logits` (B, V), and pass it to add_token()."""
        groups = {}
        for i, job in enumerate(jobs):
            o = job.options
            groups.setdefault((o.temperature, o.top_k, o.top_p, o.min_p), []).append(i)
        tokens = []
        for (temperature, top_k, top_p, min_p), rows in groups.items():
            generators = [jobs[i].generator for i in rows]
            tokens.append(sample_tokens(logits[rows, :self.tokenizer.n_vocab], temperature, top_k,
                                        top_p, generators, min_p))
        order = itertools.chain(*groups.values())
        for i, token in zip(order, torch.cat(tokens).tolist()):  # one synchronisation
            self.add_token(jobs[i], token)

    def add_token(self, job, token):
        """Append the id `token` to the text of a Job, and emit the new text or the end.

        -1 means that the logits were not finite: the job ends with an APIError (500) event.
        """
        if token < 0:
            return job.emit("", APIError(500, NON_FINITE_LOGITS))
        job.token = token
        job.n_generated += 1
        at_end = token in self.end_tokens
        last = at_end or job.n_generated == job.options.max_tokens
        text = job.detokenizer.add(None if at_end else token, last)
        stopped = at_end or job.detokenizer.stopped
        finish_reason = "stop" if stopped else "length" if last else None
        if text or finish_reason:
            job.emit(text, finish_reason)
