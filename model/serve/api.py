"""OpenAI's API: parsing of requests and JSON of responses."""

import json
import time
import uuid
from dataclasses import dataclass, fields

from data.chat_template import parse_messages
from model.core.generate import SamplingOptions, encode_prompt
from model.serve.engine import APIError, Job
from train.base.fields import key, parse_value

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
# Options that change the answer but are not implemented, and the accepted neutral value.
UNSUPPORTED_OPTIONS = dict(best_of=1, echo=False, suffix="", logit_bias={}, repetition_penalty=1,
                           presence_penalty=0, frequency_penalty=0, logprobs=False, top_logprobs=0,
                           tools=[], functions=[], response_format={"type": "text"})


@dataclass
class RequestOptions(SamplingOptions):
    """Options of a request, besides the prompt and `stop`."""
    temperature: float = key(1.0, "0: always the most likely token", ge=0, le=2)
    max_tokens: int | None = key(None, "maximum number of new tokens", ge=1)
    n: int = key(1, "choices, with consecutive seeds", ge=1)
    stream: bool = key(False, "send each piece of text when it is computed")


# -----------------------------------------------------------------------------
# requests

def parse_request(data, chat, model_name, engine, template):
    """Return (jobs, stream, include_usage) of a request's JSON, with one Job per choice (option n).
    Raises APIError."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise APIError(400, f"the request is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise APIError(400, "expected a JSON object")
    if body.get("model") not in (None, model_name):
        raise APIError(404, f"model {body['model']!r:.80} not found; available: {model_name!r}",
                       "model", "model_not_found")
    usage = body.get("stream_options")
    jobs, options = create_jobs(body, chat, engine, template)
    return jobs, options.stream, isinstance(usage, dict) and bool(usage.get("include_usage"))


def create_jobs(body, chat, engine, template):
    """Return (jobs, options) of a request. Raises APIError."""
    for name, neutral in UNSUPPORTED_OPTIONS.items():
        value = body.get(name)  # 0 is not False: logprobs 0 asks for each token's
        if value not in (None, neutral) or isinstance(neutral, bool) and type(value) is int:
            raise APIError(400, f"{name}: {body[name]!r:.80} is not supported; remove it, or serve "
                           "the exported folder with vLLM", name)
    if body.get("max_completion_tokens") is not None:
        body = body | dict(max_tokens=body["max_completion_tokens"])
    options = parse_options(body)
    stop_strings = parse_stop(body.get("stop"))
    if chat:
        ids = encode_messages(body.get("messages"), engine.tokenizer, template)
    else:
        ids = parse_prompt(body.get("prompt", ""), engine.tokenizer)
    size = engine.config.block_size
    if len(ids) > size:
        raise APIError(400, f"the prompt has {len(ids)} tokens; the context of this model has "
                       f"{size}", "prompt", "context_length_exceeded")
    # Some texts must stop when the context is full, see KVCache.
    limit = engine.max_tokens if engine.config.rolls else min(engine.max_tokens,
                                                              size - len(ids) + 1)
    max_tokens = options.max_tokens or (limit if chat else min(limit, 16))
    for name, value, most in (("max_tokens", max_tokens, limit),
                              ("n", options.n, min(engine.slots, engine.max_queue))):
        if value > most:
            raise APIError(400, f"{name}: must be at most {most}, got {value}", name)
    return [Job(ids, options, max_tokens, stop_strings, i) for i in range(options.n)], options


def parse_options(body):
    """Return the RequestOptions in a request. Raises APIError."""
    options = RequestOptions()
    for f in fields(options):
        if body.get(f.name) is not None:
            try:
                setattr(options, f.name, parse_value(f, body[f.name]))
            except ValueError as error:
                raise APIError(400, f"{f.name}: {error}", f.name) from None
    return options


def parse_stop(stop):
    """Return the option `stop`, a string or a list of strings, as a tuple."""
    strings = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(strings, list) or len(strings) > MAX_STOP_STRINGS or not all(
            isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARACTERS for s in strings):
        raise APIError(400, f"stop: expected a string, or up to {MAX_STOP_STRINGS} strings, of "
                       f"1 to {MAX_STOP_CHARACTERS} characters", "stop")
    return tuple(strings)


def parse_prompt(prompt, tokenizer):
    """Return the ids of a prompt: a string, a list of ids, or a list with one prompt."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and all(
            type(i) is int and 0 <= i < tokenizer.n_vocab for i in prompt):
        return prompt
    if not isinstance(prompt, str):
        raise APIError(400, "prompt: expected one string or one list of token ids from 0 to "
                       f"{tokenizer.n_vocab - 1}; send several prompts as parallel requests",
                       "prompt")
    try:
        return encode_prompt(tokenizer, prompt)
    except ValueError as error:  # characters that are not in the vocabulary
        raise APIError(400, f"prompt: {error}", "prompt") from None


def encode_messages(messages, tokenizer, template):
    """Return the ids of a conversation in the model's chat template, up to the next answer."""
    if template is None:
        raise APIError(404, "not a chat model; use /v1/completions", code="no_template")
    try:
        turns = parse_messages(messages, "messages")
        if not turns or turns[-1][0] == "assistant":
            raise ValueError("the last message must not be the assistant's")
        return template.prompt_ids(turns, tokenizer)
    except ValueError as error:
        raise APIError(400, f"messages: {error}", "messages") from None


# -----------------------------------------------------------------------------
# responses

def merge_events(events):
    """Return [(index, text, finish_reason)] with the events of each job (see Job) joined."""
    merged = {}
    for index, text, finish_reason in events:
        merged[index] = index, merged.get(index, (0, ""))[1] + text, finish_reason
    return list(merged.values())


class Answer:
    """The JSON objects of a response to jobs, complete or in chunks."""

    def __init__(self, jobs, chat, model_name):
        self.jobs = jobs
        self.chat = chat
        self.started = set()  # choices of which a chunk was built
        self.header = dict(id=("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex,
                           object="chat.completion" if chat else "text_completion",
                           created=int(time.time()), model=model_name)

    def complete(self, events):
        """Return the whole response."""
        choices = [self.choice("message", *event) for event in sorted(merge_events(events))]
        return self.header | dict(choices=choices, usage=self.usage())

    def chunk(self, *choices, **more):
        """Return a chunk of a stream."""
        kind = self.header["object"] + ".chunk" * self.chat
        return self.header | dict(object=kind, choices=choices) | more

    def choice(self, key, index, text, finish_reason):
        """Return a choice, or the part of it in an event of a job (see Job). key: of a chat's
        message: "message" or, in a stream, "delta"."""
        role = {} if index in self.started else dict(role="assistant")
        self.started.add(index)
        content = {key: role | dict(content=text)} if self.chat else dict(text=text)
        return content | dict(index=index, logprobs=None, finish_reason=finish_reason)

    def usage(self):
        prompt = len(self.jobs[0].ids)
        completion = sum(job.n_generated for job in self.jobs)
        return dict(prompt_tokens=prompt, completion_tokens=completion,
                    total_tokens=prompt + completion)
