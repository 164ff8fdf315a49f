"""OpenAI's API: parsing of requests and JSON of responses."""

import json
import time
import uuid

from data.chat_template import check_messages, parse_message
from model.core.detokenizer import Detokenizer
from model.core.generate import encode_prompt
from model.serve.engine import APIError, Job

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_TOP_LOGPROBS = 20
MIN_TEMPERATURE = 1e-3  # below it, logits / temperature overflows: greedy
MIN_TOP_P = 1e-6

# Options that change the answer but are not implemented, and the accepted neutral values.
UNSUPPORTED_OPTIONS = dict(
    best_of=(1,), echo=(False,), suffix=("",), logit_bias=({},), repetition_penalty=(1, 1.0),
    tools=([],), functions=([],), response_format=({"type": "text"},))


def parse_request(data, model_name):
    """Return (body, stream, include_usage) of a request's JSON. Raises APIError."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise APIError(400, f"the request is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise APIError(400, "expected a JSON object")
    if body.get("model") not in (None, model_name):
        raise APIError(404, f"model {body['model']!r:.80} not found; available: {model_name!r}",
                       "model", "model_not_found")
    stream, options = body.get("stream") or False, body.get("stream_options") or {}
    if not isinstance(options, dict) or not isinstance(stream, bool):
        raise APIError(400, "expected stream: true or false, stream_options: an object")
    return body, stream, bool(options.get("include_usage"))


def create_jobs(body, chat, engine, template):
    """Return a list of Jobs, one per choice (option n), with consecutive seeds. Raises APIError."""
    for name, neutral in UNSUPPORTED_OPTIONS.items():
        value = body.get(name)
        if value is not None and not any(value == n and type(value) is type(n) for n in neutral):
            raise APIError(400, f"{name}: {value!r:.80} is not supported; remove it, or serve the "
                           "exported folder with vLLM", name)
    if chat:
        ids = encode_messages(body.get("messages"), engine.tokenizer, template)
    else:
        ids = parse_prompt(body.get("prompt", ""), engine.tokenizer)
    temperature = get_number(body, "temperature", 1.0, 0, 2)
    n = get_number(body, "n", 1, 1, min(engine.slots, engine.max_queue), int)
    seed = get_number(body, "seed", None, -2**63, 2**63 - n, int)
    options = dict(
        ids=ids, max_tokens=get_max_tokens(body, len(ids), engine, None if chat else 16),
        temperature=temperature if temperature >= MIN_TEMPERATURE else 0,
        top_k=get_number(body, "top_k", None, 1, 2**31, int),
        top_p=max(get_number(body, "top_p", 1.0, 0, 1), MIN_TOP_P),
        min_p=get_number(body, "min_p", None, 0, 1), stop_strings=get_stop_strings(body),
        presence_penalty=get_number(body, "presence_penalty", 0.0, -2, 2),
        frequency_penalty=get_number(body, "frequency_penalty", 0.0, -2, 2),
        n_logprobs=get_n_logprobs(body, chat))
    return [Job(**options, index=i, seed=None if seed is None else seed + i) for i in range(n)]


def get_number(body, name, default, low, high, types=(int, float)):
    """Return body[name], which must be a number in [low, high], or the default if it is absent."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, types) or not low <= value <= high:
        expected = "an integer" if types is int else "a number"
        raise APIError(400, f"{name}: expected {expected} from {low} to {high}, got {value!r:.80}",
                       name)
    return value


def get_max_tokens(body, n, engine, default):
    """Return the limit of new tokens after a prompt of n tokens, which must fit in the context."""
    size = engine.config.block_size
    if n > size:
        raise APIError(400, f"the prompt has {n} tokens; the context of this model has {size}",
                       "prompt", "context_length_exceeded")
    limit = engine.max_tokens
    if not engine.config.rolls:  # the text stops when the context is full (see KVCache)
        limit = min(limit, size - n + 1)
    name = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    return get_number(body, name, min(limit, default or limit), 1, limit, int)


def get_n_logprobs(body, chat):
    """Return the number of alternatives to report per token, if log probabilities are requested."""
    logprobs = body.get("logprobs")
    n = get_number(body, "top_logprobs", 0, 0, MAX_TOP_LOGPROBS, int)
    if chat and logprobs is not None and not isinstance(logprobs, bool):
        raise APIError(400, f"logprobs: expected true or false, got {logprobs!r:.80}", "logprobs")
    if n and not (chat and logprobs):
        raise APIError(400, "top_logprobs: requires a chat with logprobs: true", "top_logprobs")
    if chat or logprobs is False:
        return n if logprobs else None
    return get_number(body, "logprobs", None, 0, MAX_TOP_LOGPROBS, int)


def get_stop_strings(body):
    """Return the option `stop`, a string or a list of strings, as a tuple."""
    stop = body.get("stop")
    strings = [stop] if isinstance(stop, str) else [] if stop is None else stop
    valid = isinstance(strings, list) and len(strings) <= MAX_STOP_STRINGS and all(
        isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARACTERS for s in strings)
    if not valid:
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
        check_messages(messages, "messages")
        turns = [parse_message(normalize_message(m)) for m in messages]
        if not turns or turns[-1][0] == "assistant":
            raise ValueError("the last message must not be the assistant's")
        return template.prompt_ids(turns, tokenizer)
    except ValueError as error:
        raise APIError(400, f"messages: {error}", "messages") from None


def normalize_message(message):
    """Return a message with the role "developer" renamed to "system". ValueError for content other
    than text."""
    content = message.get("content")
    for part in content if isinstance(content, list) else []:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise ValueError(f"only text parts are supported, got {part!r:.80}")
    return message | dict(role="system") if message.get("role") == "developer" else message


class Answer:
    """The JSON objects of a response to jobs, complete or in chunks."""

    def __init__(self, jobs, tokenizer, chat, model_name):
        self.jobs, self.tokenizer, self.chat = jobs, tokenizer, chat
        self.choices = [("", [], None) for _ in jobs]  # text, logprobs and finish_reason
        self.lengths = [0 for _ in jobs]               # characters of the tokens with logprobs
        self.detokenizers = [Detokenizer(tokenizer) for _ in jobs]
        self.object = "chat.completion" if chat else "text_completion"
        self.header = dict(id=("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex,
                           created=int(time.time()), model=model_name)

    def add(self, index, text, logprobs, finish_reason):
        """Append an event of a job (see Job) to the choice."""
        old_text, old_logprobs, _ = self.choices[index]
        self.choices[index] = old_text + text, old_logprobs + logprobs, finish_reason

    def complete(self):
        """Return the whole response."""
        choices = []
        for index, (text, logprobs, reason) in enumerate(self.choices):
            message = dict(role="assistant", content=text, refusal=None)
            content = dict(message=message) if self.chat else dict(text=text)
            choices.append(content | self.choice_fields(index, logprobs, reason))
        return self.header | dict(object=self.object, choices=choices, usage=self.usage())

    def chunk(self, index, content, logprobs=(), finish_reason=None):
        """Return one chunk of a stream. content: a text, or a chat's delta."""
        choice = {"delta" if self.chat else "text": content}
        choice |= self.choice_fields(index, logprobs, finish_reason)
        return self.header | dict(object=self.object + ".chunk" * self.chat, choices=[choice])

    def chunks(self, index, text, logprobs, finish_reason):
        """Return the chunks of an event of a job (see Job)."""
        chunks = []
        if text or logprobs:
            chunks.append(self.chunk(index, dict(content=text) if self.chat else text, logprobs))
        if finish_reason:
            chunks.append(self.chunk(index, {} if self.chat else "", (), finish_reason))
        return chunks

    def first_chunks(self):
        """Return the chunks with the roles of a chat's choices."""
        n = len(self.jobs) if self.chat else 0
        return [self.chunk(i, dict(role="assistant", content="")) for i in range(n)]

    def usage_chunk(self):
        return self.chunk(0, "") | dict(choices=[], usage=self.usage())

    def usage(self):
        prompt, completion = len(self.jobs[0].ids), sum(job.n_generated for job in self.jobs)
        return dict(prompt_tokens=prompt, completion_tokens=completion,
                    total_tokens=prompt + completion)

    def choice_fields(self, index, logprobs, finish_reason):
        """Return the fields of a choice that completions and chats share."""
        return dict(index=index, logprobs=self.format_logprobs(index, logprobs) if logprobs else
                    None, finish_reason=finish_reason)

    def format_logprobs(self, index, logprobs):
        """Return OpenAI's object for a list of top_logprobs() results."""
        tokens = [[self.format_token(token) | dict(logprob=p) for token, p in pairs]
                  for pairs in logprobs]
        if self.chat:
            return dict(refusal=None, content=[sampled | dict(top_logprobs=alternatives)
                                               for sampled, *alternatives in tokens])
        offsets = []  # of the tokens in this choice's text
        for (token, _), *_ in logprobs:
            offsets.append(self.lengths[index])
            self.lengths[index] += len(self.detokenizers[index].add(token))
        return dict(tokens=[pairs[0]["token"] for pairs in tokens], text_offset=offsets,
                    token_logprobs=[pairs[0]["logprob"] for pairs in tokens],
                    top_logprobs=[{t["token"]: t["logprob"] for t in pairs} for pairs in tokens])

    def format_token(self, token):
        """Return a token's text and bytes; bytes that are not UTF-8 are escaped as OpenAI does."""
        data = self.tokenizer.bytes_of(token)
        try:
            text = data.decode() or self.tokenizer.enc.id_to_token(token)  # special: no bytes
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{b:02x}" for b in data)
        return dict(token=text, bytes=list(data))
