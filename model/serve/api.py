"""OpenAI's API: parsing of requests and JSON of responses."""

import json
import time
import uuid
from dataclasses import dataclass, fields, replace

from data.chat_template import parse_messages
from model.core.generate import SamplingOptions, encode_prompt
from model.serve.engine import APIError, Job
from train.base.errors import UserError
from train.base.fields import key, parse_value

# Options that change the answer but are not implemented, and values with which they do not.
UNSUPPORTED_OPTIONS = """
    best_of echo logit_bias functions function_call tool_choice presence_penalty frequency_penalty
    repetition_penalty logprobs top_logprobs response_format structured_outputs guided_json
    guided_choice guided_regex guided_grammar reasoning_effort modalities min_tokens
    suffix""".split()
NEUTRAL = dict(best_of=[1], repetition_penalty=[1], modalities=[["text"]], function_call=["none"],
               tool_choice=["auto", "none"], response_format=[{"type": "text"}])


@dataclass
class RequestOptions(SamplingOptions):
    """The supported options of a request: OpenAI's, and top_k and min_p.

    max_tokens is the limit of new tokens; the inherited max_new_tokens is not used. The constructor
    does not check values; parse_options() does.
    """
    temperature: float = key(1.0, "0: always the most likely token", ge=0, le=2)
    top_k: int | None = key(None, "sample from the K most likely tokens; 0, -1: all", ge=-1)
    max_tokens: int | None = key(None, "maximum number of new tokens", ge=1)
    n: int = key(1, "texts per prompt", ge=1, le=128)
    stop: list[str] = key([], "strings that end the text")
    stream: bool = key(False, "send each piece of text when it is computed")


# -----------------------------------------------------------------------------
# requests

def parse_request(data, chat, engine, template):
    """Parse the body of a completion request; return (RequestOptions, Jobs, include_usage).

    data: JSON as bytes or text. chat: True for /v1/chat/completions, whose body has messages
    instead of a prompt. template: the ChatTemplate or None. include_usage: whether a stream must
    end with the token counts. Raises APIError if the request is invalid.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise APIError(400, f"the request is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise APIError(400, "expected a JSON object")
    options = parse_options(body)
    options.max_tokens = min(options.max_tokens or (engine.max_tokens if chat else 16),
                             engine.max_tokens)
    try:
        if chat:
            prompts = [encode_messages(body, engine, template, options.max_tokens)]
        else:
            texts = parse_texts("prompt", "" if body.get("prompt") is None else body["prompt"])
            prompts = [(encode_prompt(engine.tokenizer, text), 0) for text in texts]
    except (ValueError, UserError) as error:  # e.g. characters that are not in the vocabulary
        raise APIError(400, f"{'' if chat else 'prompt: '}{error}") from None
    usage = body.get("stream_options")
    jobs = [job for prompt in prompts for job in create_jobs(*prompt, options, engine)]
    return options, jobs, isinstance(usage, dict) and bool(usage.get("include_usage"))


def create_jobs(ids, n_left_out, options, engine):
    """Return options.n Jobs for a prompt, with the seeds options.seed, seed + 1, ... if set.

    n_left_out: number of messages left out of the prompt, for the response. max_tokens is reduced
    to the rest of the context. Raises APIError if the prompt is longer than the context.
    """
    size = engine.config.block_size
    if len(ids) > size:
        raise APIError(400, f"the prompt has {len(ids)} tokens; the context of this model has "
                       f"{size}", "context_length_exceeded")
    max_tokens = min(options.max_tokens, size - len(ids) + 1)  # the last one needs no place
    seeds = [None if options.seed is None else options.seed + i for i in range(options.n)]
    return [Job(ids, replace(options, max_tokens=max_tokens, seed=seed), n_left_out)
            for seed in seeds]


def parse_options(body):
    """Return the RequestOptions of the JSON object `body`, which is changed.

    "stop" is removed; "max_completion_tokens", if present, replaces "max_tokens". Raises APIError
    for invalid and unsupported options.
    """
    for name in UNSUPPORTED_OPTIONS:
        value = body.get(name)  # "logprobs": 0 asks for those of the text
        is_set = value or name == "logprobs" and type(value) is int
        if is_set and value not in NEUTRAL.get(name, ()):
            raise APIError(400, f"{name}: {value!r:.80} is not supported; remove it, or serve the "
                           "exported folder with vLLM")
    if body.get("max_completion_tokens") is not None:
        body["max_tokens"] = body["max_completion_tokens"]
    stop = parse_texts("stop", body.pop("stop", None) or "")
    options = RequestOptions(stop=[text for text in stop if text])
    for f in fields(options):
        try:
            if body.get(f.name) is not None:
                setattr(options, f.name, parse_value(f, body[f.name]))
        except ValueError as error:
            raise APIError(400, f"{f.name}: {error}") from None
    return options


def parse_texts(name, value):
    """Return the list of texts for the option `name` of a request: one text or a list of them."""
    texts = [value] if isinstance(value, str) else value
    if not (isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts)):
        raise APIError(400, f"{name}: expected a text or a list of texts, got {value!r:.80}")
    return texts


def encode_messages(body, engine, template, max_new_tokens):
    """Return (ids of the prompt, number of messages left out) for a chat request.

    The prompt ends where the assistant's next answer begins, or with the last message if that is
    the assistant's, which the model continues. body["messages"] is changed: null as the assistant's
    text becomes "", and reasoning is removed. body["chat_template_kwargs"]: template variables.
    max_new_tokens: tokens to reserve for the answer, at most half of the context. If the prompt is
    too long for the rest, the oldest messages are left out. Raises APIError, ValueError or
    UserError for invalid messages, and APIError if `template`, a ChatTemplate, is None.
    """
    if template is None:
        raise APIError(404, "not a chat model; use /v1/completions", code="no_template")
    variables = body.get("chat_template_kwargs")
    if not isinstance(variables, dict | None):
        raise APIError(400, f"chat_template_kwargs: expected an object, got {variables!r:.80}")
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("role") == "assistant":
            message["content"] = message.get("content") or ""  # agents send null
            for name in "reasoning_content", "thinking":  # of earlier answers: for no model
                message.pop(name, None)
    turns = parse_messages(messages, "messages")
    if all(role == "assistant" for role, _ in turns):
        raise ValueError("messages: expected at least one that is not the assistant's")
    size = engine.config.block_size
    max_tokens = max(size - max_new_tokens, size // 2)
    return template.fit_prompt(turns, engine.tokenizer, max_tokens, variables)


# -----------------------------------------------------------------------------
# responses

class Answer:
    """Builder of the JSON objects of a response: complete() or, for a stream, chunk().

    jobs: all Jobs of the request, the n jobs of a prompt one after the other. n: jobs per prompt,
    whose tokens "usage" counts once. chat: whether it is a chat completion. An event is (index of
    the job in `jobs`, text, finish_reason), see Job.
    """

    def __init__(self, jobs, n, chat, model_name):
        self.jobs = jobs
        self.n = n  # jobs per prompt
        self.chat = chat
        self.started = set()  # indices of the jobs whose role was sent
        self.header = dict(id=("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex,
                           object="chat.completion" if chat else "text_completion",
                           created=int(time.time()), model=model_name)
        if n_left_out := jobs[0].n_left_out:  # messages for which the context has no room
            self.header["left_out_messages"] = n_left_out

    def complete(self, events):
        """Return the complete response, a dict, for an iterable of all events."""
        texts = [""] * len(self.jobs)
        reasons = [None] * len(self.jobs)  # the last one of each job counts
        for i, text, finish_reason in events:
            texts[i] += text
            reasons[i] = finish_reason
        choices = [self.choice("message", i, *end) for i, end in enumerate(zip(texts, reasons))]
        return self.header | dict(choices=choices, usage=self.usage())

    def chunk(self, *events, **more):
        """Return a chunk of a stream, a dict with `events` as "choices" and the fields `more`."""
        kind = self.header["object"] + ".chunk" * self.chat
        choices = [self.choice("delta", *event) for event in events]
        return self.header | dict(object=kind, choices=choices) | more

    def choice(self, key, index, text, finish_reason):
        """Return an element of "choices" for an event; key: "message" or, in a stream, "delta"."""
        content = dict(text=text)
        if self.chat:  # the role is in the first chunk only
            role = {} if index in self.started else dict(role="assistant")
            content = {key: role | dict(content=text)}
        self.started.add(index)
        return content | dict(index=index, logprobs=None, finish_reason=finish_reason)

    def usage(self):
        """Return the object "usage", a dict: token counts of prompts, generated texts, and both."""
        prompt = sum(len(job.ids) for job in self.jobs[::self.n])
        completion = sum(job.n_generated for job in self.jobs)
        return dict(prompt_tokens=prompt, completion_tokens=completion,
                    total_tokens=prompt + completion)
