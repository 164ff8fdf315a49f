"""OpenAI's words: what a request asks for, and the JSON of its answer."""

import codecs
import time
import uuid

from data.chat_template import check_messages, parse_message
from model.core.detokenizer import token_bytes
from model.core.generate import encode_prompt
from model.serve.engine import Job, Refused

MAX_STOPS, MAX_STOP = 16, 256  # stop strings, and characters in one
MAX_LIKELY = 20  # of the likeliest tokens, told beside each one

# What would change the answer and is not computed here: the values that mean "not asked for".
UNSUPPORTED = dict(
    best_of=(1,), echo=(False,), suffix=("",), logit_bias=({},), repetition_penalty=(1, 1.0),
    tools=([],), functions=([],), response_format=({"type": "text"},))


def jobs_of(body, chat, engine, template):
    """The Jobs of a request's JSON, one for each of its n choices, with seeds that follow one
    another. Refused names what is wrong with it."""
    for name, allowed in UNSUPPORTED.items():
        value = body.get(name)
        if value is not None and not any(value == a and type(value) is type(a) for a in allowed):
            raise Refused(400, f"{name}: {value!r:.80} is not supported here; leave it out, or "
                          "serve the exported folder with vLLM", name)
    ids = (chat_ids(body.get("messages"), engine.tokenizer, template) if chat else
           prompt_ids(body.get("prompt", ""), engine.tokenizer))
    temperature = number(body, "temperature", 1.0, 0, 2)
    top_p = number(body, "top_p", 1.0, 0, 1)
    n = number(body, "n", 1, 1, min(engine.slots, engine.max_queue), int)
    seed = number(body, "seed", None, -2**63, 2**63 - n, int)
    how = dict(
        ids=ids, max_tokens=token_limit(body, len(ids), engine, None if chat else 16),
        temperature=temperature if temperature >= 1e-3 else 0,  # below it, logits / t overflows
        top_k=number(body, "top_k", None, 1, 2**31, int), top_p=max(top_p, 1e-6),
        min_p=number(body, "min_p", None, 0, 1), stops=stops_of(body.get("stop")),
        presence=number(body, "presence_penalty", 0.0, -2, 2),
        frequency=number(body, "frequency_penalty", 0.0, -2, 2), logprobs=logprobs_of(body, chat))
    return [Job(**how, index=i, seed=None if seed is None else seed + i) for i in range(n)]


def logprobs_of(body, chat):
    """How many of the likeliest tokens to tell beside each one; None: no log probabilities."""
    asked, most = body.get("logprobs"), number(body, "top_logprobs", 0, 0, MAX_LIKELY, int)
    if chat and asked is not None and not isinstance(asked, bool):
        raise Refused(400, f"logprobs: expected true or false, got {asked!r:.80}", "logprobs")
    if most and not (chat and asked):
        raise Refused(400, "top_logprobs: it is for chats, with logprobs: true", "top_logprobs")
    if chat or asked is False:
        return most if asked else None
    return number(body, "logprobs", None, 0, MAX_LIKELY, int)


def number(body, name, default, low, high, kind=(int, float)):
    """body[name], a number from low to high, or the default where there is none."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        what = "an integer" if kind is int else "a number"
        raise Refused(400, f"{name}: expected {what} from {low} to {high}, got {value!r:.80}", name)
    return value


def token_limit(body, n, engine, default):
    """How many tokens may follow a prompt of n tokens, which must fit in the context."""
    size = engine.config.block_size
    if n > size:
        raise Refused(400, f"the prompt has {n} tokens; the context of this model has {size}",
                      "prompt", "context_length_exceeded")
    # Where a full context does not roll on (see KVCache), a text ends there.
    room = engine.max_tokens
    if not engine.config.rolls:
        room = min(room, size - n + 1)
    name = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    return number(body, name, min(room, default or room), 1, room, int)


def stops_of(stop):
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    good = isinstance(stops, list) and len(stops) <= MAX_STOPS and all(
        isinstance(s, str) and 0 < len(s) <= MAX_STOP for s in stops)
    if not good:
        raise Refused(400, f"stop: expected a string, or a list of up to {MAX_STOPS}, of 1 to "
                      f"{MAX_STOP} characters each", "stop")
    return tuple(stops)


def prompt_ids(prompt, tokenizer):
    """Ids of a prompt: a text, a list of one, or a list of ids."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and all(type(i) is int and 0 <= i < tokenizer.n_vocab
                                                   for i in prompt):
        return prompt
    if not isinstance(prompt, str):
        raise Refused(400, "prompt: expected one text, or a list of token ids from 0 to "
                      f"{tokenizer.n_vocab - 1}; send a request for each prompt: they are computed "
                      "together", "prompt")
    try:
        return encode_prompt(tokenizer, prompt)
    except ValueError as error:  # characters that this tokenizer does not know
        raise Refused(400, f"prompt: {error}", "prompt") from None


def chat_ids(messages, tokenizer, template):
    """Ids of a conversation, as the model learned it, up to where the answer begins."""
    if template is None:
        raise Refused(404, "this model learned no chats; use /v1/completions", code="no_template")
    try:
        check_messages(messages, "messages")
        turns = [parse_message(as_openai(m)) for m in messages]
        if not turns or turns[-1][0] == "assistant":
            raise ValueError("expected a last message that is not the assistant's")
        return template.prompt_ids(turns, tokenizer)
    except ValueError as error:
        raise Refused(400, f"messages: {error}", "messages") from None


def as_openai(message):
    """A message with OpenAI's newer name of the system's role; ValueError for what is not text."""
    parts = message.get("content")
    for part in parts if isinstance(parts, list) else []:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise ValueError(f"expected parts of text only, got {part!r:.80}")
    return message | dict(role="system") if message.get("role") == "developer" else message


class Answer:
    """The JSON of an answer to jobs, whole or in parts, as a completion's or as a chat's."""

    def __init__(self, jobs, tokenizer, chat, model):
        self.jobs, self.tokenizer, self.chat = jobs, tokenizer, chat
        self.texts = [("", [], None) for _ in jobs]  # so far: text, told, reason
        self.lengths = [0 for _ in jobs]  # characters of the tokens told so far, and what decodes
        self.decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in jobs]
        self.name = "chat.completion" if chat else "text_completion"
        self.head = dict(id=("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex,
                         created=int(time.time()), model=model)

    def usage(self):
        read, written = len(self.jobs[0].ids), sum(job.written for job in self.jobs)
        return dict(prompt_tokens=read, completion_tokens=written, total_tokens=read + written)

    def add(self, index, text, told, reason):
        """A piece of what whole() gives."""
        before = self.texts[index]
        self.texts[index] = before[0] + text, before[1] + told, reason

    def whole(self):
        contents = [dict(message=dict(role="assistant", content=text, refusal=None))
                    if self.chat else dict(text=text) for text, *_ in self.texts]
        choices = [content | self.about(i, told, reason)
                   for i, (content, (_, told, reason)) in enumerate(zip(contents, self.texts))]
        return self.head | dict(object=self.name, choices=choices, usage=self.usage())

    def part(self, index, content, told=(), reason=None):
        """content: a text, or a chat's delta."""
        choice = {"delta" if self.chat else "text": content} | self.about(index, told, reason)
        return self.head | dict(object=self.name + ".chunk" * self.chat, choices=[choice])

    def about(self, index, told, reason):
        """What a choice says beside its text. told: see Job."""
        logprobs = self.logprobs(index, told) if told else None
        return dict(index=index, logprobs=logprobs, finish_reason=reason)

    def logprobs(self, index, told):
        told = [[dict(self.word(token), logprob=p) for token, p in pairs] for pairs in told]
        if self.chat:
            return dict(refusal=None, content=[first | dict(top_logprobs=most)
                                               for first, *most in told])
        offsets = [self.lengths[index]]  # into the text of this choice
        for word, *_ in told:
            offsets.append(offsets[-1] + len(self.decoders[index].decode(bytes(word["bytes"]))))
        self.lengths[index] = offsets.pop()
        return dict(tokens=[words[0]["token"] for words in told], text_offset=offsets,
                    token_logprobs=[words[0]["logprob"] for words in told],
                    top_logprobs=[{w["token"]: w["logprob"] for w in words} for words in told])

    def word(self, token):
        """A token as text (of bytes that are none, their names) and as bytes."""
        data = token_bytes(self.tokenizer, token)
        try:
            text = data.decode() or self.tokenizer.enc.id_to_token(token)  # special ones have none
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{b:02x}" for b in data)
        return dict(token=text, bytes=list(data))
