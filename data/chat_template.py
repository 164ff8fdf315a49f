"""Chat templates: the format in which a model reads and writes conversations.

A conversation is a list of messages (role, text) with the roles system, user and assistant. A
template turns it into token ids. The template's `spec`, a dict of builtin types, is saved in
meta.json and in checkpoints, and is of one of two kinds:

    DEFAULT_SPEC                                                     the built-in one
    {"jinja": text, "ends": [token ids], "bos_token": "<s>", ...}    of a published model

The Jinja text of a downloaded model is untrusted and rendered in a child process (data/render.py).
If the text of a message contains the text of a special token, e.g. <|endoftext|>, it is encoded as
ordinary text: marks (private-use characters) are put around it before rendering. A conversation is
refused if the template changes this text, or forms a special token from the texts of messages.
"""

import bisect
import functools
import json
import math
import re
from collections import Counter

import numpy as np

from data.hub import local_folder
from data.meta import read_meta
from data.render import render
from data.tokenizer import open_tokenizer, read_checkpoint_spec, tokenizer_from_spec
from data.tokenizer_hf import read_template_spec
from data.tokenizer_types import encode_within
from train.base.errors import DataError

# In meta.json and checkpoints, the name of BUILTIN_JINJA.
DEFAULT_SPEC = {"system": "### System:\n{}\n\n", "user": "### User:\n{}\n\n",
                "assistant": "### Assistant:\n{}"}
# Texts of messages are stripped. A line in a message that begins with a header is escaped with a
# backslash, so that a message cannot imitate a different role.
BUILTIN_JINJA = r"""
{%- for message in messages -%}
{%- set text = ("\n" + (message["content"] | trim))
    | replace("\n### System:", "\n\\### System:")
    | replace("\n### User:", "\n\\### User:")
    | replace("\n### Assistant:", "\n\\### Assistant:") -%}
{{- "### " + (message["role"] | capitalize) + ":\n" + text[1:] -}}
{{- eos_token if message["role"] == "assistant" else "\n\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "### Assistant:\n" }}{%- endif -%}"""
# Role names of OpenAI, ShareGPT and other formats.
ROLES = {"system": "system", "developer": "system", "user": "user", "human": "user",
         "prompter": "user", "assistant": "assistant", "gpt": "assistant", "model": "assistant"}
SEPARATE = ("tool_calls", "function_call", "reasoning_content", "thinking")  # text of an answer
# Private-use characters: around marked text, and after a text that is to be found.
OPEN_MARK, CLOSE_MARK = "\U000f0000", "\U000f0001"
END_MARK = "\U000f0002"
WITHOUT_MARKS = str.maketrans("", "", OPEN_MARK + CLOSE_MARK)
MARKED = re.compile(f"{OPEN_MARK}([^{OPEN_MARK}{CLOSE_MARK}]*){CLOSE_MARK}"
                    f"|[{OPEN_MARK}{CLOSE_MARK}]")


# -----------------------------------------------------------------------------
# messages

def parse_messages(value, name):
    """Convert a list of messages to [(role, text), ...] with the roles system, user and assistant.

    value: dicts {"role", "content"} or ShareGPT's {"from", "value"}, with role names of any format
    in ROLES, e.g. human and gpt. name: the record's field with the list, for error messages.
    Raises ValueError for any other value, and for a message with "weight": 0, tool calls, or
    reasoning in a separate field.
    """
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise ValueError(f"{name}: expected a list of messages, got {str(value)[:60]!r}")
    turns = []
    for message in value:
        role = message.get("role", message.get("from"))
        if not isinstance(role, str) or role not in ROLES:
            raise ValueError(f"role {role!r}: expected one of {', '.join(ROLES)}")
        if message.get("weight") == 0:  # of OpenAI's format
            raise ValueError("weight 0: answers that are not learned are not supported")
        if separate := [name for name in SEPARATE if message.get(name)]:
            raise ValueError(f"{separate[0]}: not supported; expected all text in the content")
        content = message.get("content", message.get("value"))
        turns.append((ROLES[role], parse_content(content, name)))
    return turns


def parse_content(content, name):
    """Return the text of a string or OpenAI's parts [{"text": string}, ...], else ValueError.

    name: the record's field, for the message.
    """
    texts = [content]
    if isinstance(content, list):
        texts = [part.get("text", part) if isinstance(part, dict) else [part] for part in content]
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"{name}: expected text, got {text!r:.80}")
    return "".join(texts)


# -----------------------------------------------------------------------------
# templates

class ChatTemplate:
    """A chat format that converts messages to the token ids of prompts and training data.

    It renders like `apply_chat_template` of `transformers`.
    spec: DEFAULT_SPEC, or of a published model {"jinja": text, "ends": [ids], not empty,
    "bos_token": text and other special tokens}; otherwise DataError.
    Attributes: spec; jinja, the Jinja text; ends, the ids that end an answer ([] for the built-in
    template: the tokenizer's end of text); special_tokens, {"bos_token": text, ...};
    implicit_start, the text of bos_token if "bos_token" occurs in the Jinja text, otherwise ""
    (llama.cpp adds this token to prompts for an exported .gguf file).
    All methods: messages, [(role, text), ...]; variables, {name: text, number or bool}, are further
    variables of the Jinja template, e.g. enable_thinking.
    """

    def __init__(self, spec=DEFAULT_SPEC):
        if spec != DEFAULT_SPEC and not ("jinja" in spec and spec.get("ends")):
            raise DataError(f"its chat template is unknown: {str(spec)[:200]}")
        self.spec = spec
        self.ends = spec.get("ends", [])
        self.jinja = spec.get("jinja", BUILTIN_JINJA)
        self.special_tokens = {k: v for k, v in spec.items() if k.endswith("_token")}
        self.implicit_start = spec.get("bos_token", "") if "bos_token" in self.jinja else ""

    def render(self, messages, add_prompt, tokenizer=None, variables=None):
        """Return the text of messages in this template.

        add_prompt: whether to append the start of the assistant's next answer, i.e. the header.
        tokenizer: put marks around the texts of the tokenizer's special tokens in messages and
        variables, for encode_marked(). `None`: no marks, and no end of text after an answer of the
        built-in template.
        Raises DataError if the template fails, UserError if it exceeds a limit of time or memory,
        SetupError without jinja2.
        """
        mark = functools.partial(mark_special, tokenizer=tokenizer)
        turns = [dict(role=role, content=mark(text)) for role, text in messages]
        names = {name: mark(value) if isinstance(value, str) else value
                 for name, value in (variables or {}).items()} | self.special_tokens
        if not self.ends:
            names["eos_token"] = tokenizer.decode([tokenizer.eot_token]) if tokenizer else ""
        return render(self.jinja, names | dict(messages=turns, tools=None, documents=None,
                                               add_generation_prompt=add_prompt))

    def render_before(self, messages, answer, tokenizer, variables=None):
        """Return the rendered prompt with the text that the template adds before an answer.

        Such text is e.g. a space, or Qwen 3's empty reasoning. answer: first words of the answer,
        not included. Only the prompt is returned if `answer` is blank, if the template changes
        prompt or answer, or if `answer` begins with the first word of such text.
        tokenizer, errors: as for `render`.
        """
        prompt = self.render(messages, True, tokenizer, variables)
        marked = mark_special(answer, tokenizer).strip()
        if not marked:
            return prompt
        turn = ("assistant", answer.rstrip() + END_MARK)  # the end token may contain the answer
        whole = self.render([*messages, turn], False, tokenizer, variables)
        between, found, _ = whole.removeprefix(prompt).partition(marked + END_MARK)
        if not (found and whole.startswith(prompt)) or answer.split()[0].startswith(
                tuple(between.split()[:1])):
            return prompt
        return prompt + between

    def encode(self, messages, add_prompt, tokenizer, variables=None, answer=""):
        """Render and encode messages; return (text as of `render`, list of token ids).

        The text has marks around special tokens inside messages, which are encoded as ordinary
        text.
        add_prompt, tokenizer (required): as for `render`. answer: first words of the next answer,
        with which the text then ends (requires add_prompt True); "" for none. Errors: as for
        `render` and encode_marked(); also DataError if the template forms a special token from
        texts of messages, e.g. by deleting a word between two halves.
        """
        if answer:
            text = self.render_before(messages, answer, tokenizer, variables)
            text += mark_special(answer.lstrip(), tokenizer)
        else:
            text = self.render(messages, add_prompt, tokenizer, variables)
        ids = encode_marked(text, tokenizer)
        harmless = tuple((role, "x" if content.translate(WITHOUT_MARKS).strip() else "")
                         for role, content in messages)
        words = {name: re.sub(r"\W", "", value) if isinstance(value, str) else value
                 for name, value in (variables or {}).items()}
        count = functools.partial(count_template_special, self, tokenizer, json.dumps(words))
        expected = count(harmless, add_prompt)
        if answer:
            expected = expected | count((*harmless, ("assistant", "x")), False)
        surplus = count_special(ids, tokenizer) - expected
        if surplus:
            raise DataError("its chat template makes the special token "
                            f"{tokenizer.decode([*surplus][:1])} of the text of a message")
        return text, ids

    def prompt_ids(self, messages, tokenizer, variables=None, answer=""):
        """Return a prompt's token ids, see `encode`; DataError if the template writes nothing."""
        if ids := self.encode(messages, True, tokenizer, variables, answer)[1]:
            return ids
        raise DataError("its chat template writes nothing")

    def fit_prompt(self, messages, tokenizer, max_tokens, variables=None):
        """Return (ids, number of messages left out) of the longest prompt that fits max_tokens.

        messages: not empty. If the last one is the assistant's, the prompt ends with it, and the
        model continues it. The oldest messages are left out, and the rest then begins with a user
        message. System messages at the start and the last user message are always included, even if
        the prompt is then longer than max_tokens. Errors: as for `prompt_ids`.
        """
        answer = ""
        if messages[-1][0] == "assistant":
            *messages, (_, answer) = messages
        n_system = next((i for i, (role, _) in enumerate(messages) if role != "system"), 0)
        starts = [n_system, *(i for i, (role, _) in enumerate(messages)
                              if role == "user" and i > n_system)]

        def prompt(start):
            return self.prompt_ids(messages[:n_system] + messages[start:], tokenizer, variables,
                                   answer)
        # Each exchange that is left out makes the prompt shorter.
        start = starts[bisect.bisect_left(starts[:-1], True,
                                          key=lambda start: len(prompt(start)) <= max_tokens)]
        return prompt(start), start - n_system

    def sequences(self, messages, tokenizer, max_tokens=math.inf):
        """Return the training sequences [(ids, mask), ...] of a conversation; [] without an answer.

        ids (n,) uint32; mask (n,) uint8, 1 for the tokens to learn: each assistant answer and the
        end token after it, each in one sequence only. There are several sequences, each from the
        first message on, if the template writes an earlier answer differently when a message
        follows (e.g. without the reasoning).
        Messages after the last answer are left out, as well as messages after the first answer to a
        prompt of more than max_tokens tokens; sequences are not cut to max_tokens.
        Raises DataError for a conversation that the template cannot represent, and as `encode`.
        """
        # An answer is the text that the conversation has beyond the prompt, up to an end token.
        # Templates may shorten earlier answers (Qwen 3 removes the reasoning): then the ids of a
        # prompt do not continue the previous sequence, and a new one begins.
        sequences, ids, mask = [], [], []
        for i, (role, _) in enumerate(messages, 1):
            if role != "assistant":
                continue
            prompt_ids, answer_ids, n_learned = self.encode_answer(messages[:i], tokenizer)
            if prompt_ids[:len(ids)] != ids:
                sequences.append((ids, mask))
                mask = []
            ids = prompt_ids + answer_ids
            mask = (mask + [0] * (len(prompt_ids) - len(mask)) + [1] * n_learned
                    + [0] * (len(answer_ids) - n_learned))
            if len(prompt_ids) > max_tokens:
                break
        if ids:
            sequences.append((ids, mask))
        return [(np.array(i, np.uint32), np.array(m, np.uint8)) for i, m in sequences]

    def encode_answer(self, messages, tokenizer):
        """Return (prompt ids, answer ids, n) of a conversation that ends with the answer to learn.

        The answer ids are all after the prompt; the first n, up to and including the end token, are
        to be learned. Raises DataError unless the rendered text is the prompt, followed by the
        answer and an end token; changes of characters that squeeze() removes are accepted. Other
        errors: as for `encode`.
        """
        prompt, prompt_ids = self.encode(messages[:-1], True, tokenizer)
        whole, ids = self.encode(messages, False, tokenizer)
        answer = squeeze(messages[-1][1])
        refused = "its chat template cannot be learned: "
        if not whole.startswith(prompt):
            raise DataError(refused + "the text of a chat does not begin with that of the prompt "
                            "before its last answer")
        if answer not in squeeze(whole[len(prompt):]):  # changed or left out
            raise DataError(refused + f"it does not write an answer as it is ({answer[:40]!r})")
        answer_ids = ids[len(prompt_ids):]
        if ids[:len(prompt_ids)] != prompt_ids:  # a token spans the boundary
            encode = functools.partial(encode_marked, tokenizer=tokenizer)
            answer_ids = encode_within(whole[len(prompt):], encode)
        ends = self.ends or [tokenizer.eot_token]
        n_learned = next((n for n, i in enumerate(answer_ids, 1) if i in ends), 0)
        rest = squeeze(tokenizer.decode(answer_ids[n_learned:]))
        if not n_learned or answer and answer in rest:
            raise DataError(f"{refused}no end token follows an answer; expected one of {ends}")
        return prompt_ids, answer_ids, n_learned

    def end_ids(self, tokenizer):
        """Return the sorted list of token ids that end an answer.

        They are self.ends and the special token that the template writes after an answer, if any;
        for the built-in template only the end of text, [`None`] if the tokenizer has none.
        """
        # The model's files may name the end of a document only, and not the end token of the
        # template.
        question, answer = ("user", "?"), ("assistant", "\u00a7")
        prompt = self.render([question], True)
        text = self.render([question, answer], False)
        prefix, _, suffix = text.removeprefix(prompt).partition("\u00a7")
        special = match_any(tuple(tokenizer.special)).search(suffix)
        ids = {*self.ends} or {tokenizer.eot_token}
        # A token that also occurs before the answer is the end of the reasoning.
        if special and (special[0] not in prefix or not text.startswith(prompt)):
            ids.add(tokenizer.special[special[0]])
        return sorted(ids)

    def with_end_ids(self, tokenizer):
        """Return a copy with end_ids(tokenizer) as `ends`; return the built-in template as is."""
        return ChatTemplate(self.spec | {"ends": self.end_ids(tokenizer)}) if self.ends else self


def open_chat_format(source):
    """Open a model's tokenizer and chat template; return (Tokenizer, block_size, ChatTemplate).

    source: a checkpoint (.pt), or any other source that open_tokenizer() accepts. block_size is a
    checkpoint's context in tokens, otherwise `None`. The ChatTemplate is `None` if the source has
    no chat template. Errors: as for open_tokenizer(); also DataError for an invalid template.
    """
    if source.endswith(".pt"):
        spec = read_checkpoint_spec(source)
        tokenizer = tokenizer_from_spec(spec["tokenizer"])
    else:
        folder = local_folder(source, weights=False)
        tokenizer = open_tokenizer(folder)
        template = read_meta(folder).template or read_template_spec(folder, tokenizer)
        spec = dict(template=template, block_size=None)
    template = spec["template"]
    return tokenizer, spec["block_size"], ChatTemplate(template) if template else None


# -----------------------------------------------------------------------------
# text and ids

@functools.lru_cache(16)
def match_any(texts):
    """Return a compiled pattern for any text in a tuple, the longest first; () matches nothing."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def mark_special(text, tokenizer):
    """Return `text` with marks only around the special tokens of `tokenizer` (`None`: no marks)."""
    pattern = match_any(tuple(tokenizer.special) if tokenizer else ())
    return pattern.sub(lambda m: OPEN_MARK + m[0] + CLOSE_MARK, text.translate(WITHOUT_MARKS))


def count_special(ids, tokenizer):
    """Return a Counter {id: occurrences} of the tokenizer's special tokens in the list `ids`."""
    special = {*tokenizer.special.values()}
    return Counter(i for i in ids if i in special)


@functools.lru_cache(128)  # a request has up to 1 MB of messages
def count_template_special(template, tokenizer, variables, messages, add_prompt):
    """Return a Counter {id: occurrences} of the special tokens that the template itself writes.

    template: a ChatTemplate. messages: a tuple of (role, text) without special tokens.
    variables: {name: value} as JSON text.
    """
    text = template.render(messages, add_prompt, tokenizer, json.loads(variables))
    return count_special(encode_marked(text, tokenizer), tokenizer)


def squeeze(text):
    """Return `text` without white space, backslashes and marks, which templates may change."""
    return "".join(text.translate(WITHOUT_MARKS).replace("\\", "").split())


def encode_marked(text, tokenizer):
    """Return the token ids of a text from ChatTemplate.render().

    Special tokens that the template writes become single ids; text between OPEN_MARK and
    CLOSE_MARK, i.e. special tokens in messages, is encoded as ordinary text. Raises DataError for
    an id outside the vocabulary, and if marks enclose anything but one special token: the template
    has changed it.
    """
    encode_part = functools.cache(encode_within)  # a text can repeat a special token many times
    first, *parts = MARKED.split(text)  # text, marked text (None: half a mark), ...
    if not {*parts[::2]} <= tokenizer.special.keys():
        raise DataError("its chat template changes a special token in the text of a message")
    ids = tokenizer.encode_special(first)
    for n, part in enumerate(parts):
        ids += encode_part(part, tokenizer.encode_special if n % 2 else tokenizer.encode)
    if max(ids, default=0) >= tokenizer.n_vocab:
        raise DataError(f"its template uses token {max(ids)}, the model knows {tokenizer.n_vocab}")
    return ids
