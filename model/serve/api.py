"""OpenAI's API: parsing of requests and JSON of responses."""

import json
import time
import uuid
from dataclasses import dataclass, fields

from data.chat_template import parse_messages
from model.core.generate import SamplingOptions, encode_prompt
from model.serve.engine import APIError, Job
from train.base.fields import key, parse_value

# Options that change the answer but are not implemented, and the accepted neutral value.
UNSUPPORTED_OPTIONS = dict(n=1, best_of=1, echo=False, suffix="", logit_bias={}, tools=[],
                           repetition_penalty=1, presence_penalty=0, frequency_penalty=0,
                           logprobs=False, top_logprobs=0, functions=[],
                           response_format={"type": "text"})


def check_stop(strings):
    if len(strings) > 16 or not all(0 < len(s) <= 256 for s in strings):
        raise ValueError


@dataclass
class RequestOptions(SamplingOptions):
    """Options of a request, besides the prompt."""
    temperature: float = key(1.0, "0: always the most likely token", ge=0, le=2)
    max_tokens: int | None = key(None, "maximum number of new tokens", ge=1)
    stop: list[str] = key([], "up to 16 strings of 1 to 256 characters", text=True,
                          check=check_stop)
    stream: bool = key(False, "send each piece of text when it is computed")


# -----------------------------------------------------------------------------
# requests

def parse_request(data, chat, model_name, engine, template):
    """Return (Job, whether a stream ends with the usage) of a request's JSON. Raises APIError."""
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
    return (create_job(body, chat, engine, template),
            isinstance(usage, dict) and bool(usage.get("include_usage")))


def create_job(body, chat, engine, template):
    """Return the Job of a request. Raises APIError."""
    options = parse_options(body)
    if chat:
        ids = encode_messages(body.get("messages"), engine.tokenizer, template)
    else:
        ids = parse_prompt(body.get("prompt", ""), engine.tokenizer)
    size = engine.config.block_size
    if len(ids) > size:
        raise APIError(400, f"the prompt has {len(ids)} tokens; the context of this model has "
                       f"{size}", "prompt", "context_length_exceeded")
    limit = engine.max_tokens
    if not engine.config.rolls:  # texts must stop when the context is full, see KVCache
        limit = min(limit, size - len(ids) + 1)
    if options.max_tokens is None:
        options.max_tokens = limit if chat else min(limit, 16)
    if options.max_tokens > limit:
        raise APIError(400, f"max_tokens: must be at most {limit}, got {options.max_tokens}",
                       "max_tokens")
    return Job(ids, options)


def parse_options(body):
    """Return the RequestOptions in a request. Raises APIError."""
    for name, neutral in UNSUPPORTED_OPTIONS.items():
        value = body.get(name)  # 0 is not False: logprobs 0 asks for each token's
        if value not in (None, neutral) or isinstance(neutral, bool) and type(value) is int:
            raise APIError(400, f"{name}: {value!r:.80} is not supported; remove it, or serve the "
                           "exported folder with vLLM", name)
    given = dict(body)
    if body.get("max_completion_tokens") is not None:
        given["max_tokens"] = body["max_completion_tokens"]
    if isinstance(body.get("stop"), str):
        given["stop"] = [body["stop"]]
    options = RequestOptions()
    for f in fields(options):
        if given.get(f.name) is not None:
            try:
                setattr(options, f.name, parse_value(f, given[f.name]))
            except ValueError as error:
                raise APIError(400, f"{f.name}: {error}", f.name) from None
    return options


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

class Answer:
    """The JSON objects of the response to a job, complete or in chunks."""

    def __init__(self, job, chat, model_name):
        self.job = job
        self.chat = chat
        self.role = dict(role="assistant")  # in the first chunk only
        self.header = dict(id=("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex,
                           object="chat.completion" if chat else "text_completion",
                           created=int(time.time()), model=model_name)

    def complete(self, text, finish_reason):
        """Return the whole response."""
        choice = self.choice("message", text, finish_reason)
        return self.header | dict(choices=[choice], usage=self.usage())

    def chunk(self, *choices, **more):
        """Return a chunk of a stream."""
        kind = self.header["object"] + ".chunk" * self.chat
        return self.header | dict(object=kind, choices=choices) | more

    def choice(self, key, text, finish_reason):
        """Return the text of an event of the job (see Job) as a choice. key: of a chat's message:
        "message" or, in a stream, "delta"."""
        content = {key: self.role | dict(content=text)} if self.chat else dict(text=text)
        self.role = {}
        return content | dict(index=0, logprobs=None, finish_reason=finish_reason)

    def usage(self):
        prompt = len(self.job.ids)
        completion = self.job.n_generated
        return dict(prompt_tokens=prompt, completion_tokens=completion,
                    total_tokens=prompt + completion)
