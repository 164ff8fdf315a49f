"""Chat templates that models came with, as `transformers` renders them: Jinja.

A template is {"jinja": its text, "ends": [ids that end an answer], "bos_token": "<s>", ...}. It was
written by a stranger: it runs in Jinja's sandbox, for so many lines of Python, into so much text.
What a person wrote never becomes a special token: the texts of such in it are marked before they go
into the template, and encoded as text.
"""

import contextlib
import datetime
import functools
import json
import re
import sys

import numpy as np

from train.base.errors import DataError

OPEN, CLOSE = "\U000f0000", "\U000f0001"  # around a marked text; private, nobody's characters
GONE = str.maketrans("", "", OPEN + CLOSE)
MARKED = re.compile(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}|[{OPEN}{CLOSE}]")
MOST_LINES, MOST_TEXT = 1 << 21, 1 << 24  # of Python, a second or so; characters


def check(template):
    """DataError unless `template` can be used."""
    ends, words = template.get("ends"), {k: v for k, v in template.items() if k != "ends"}
    if not (isinstance(ends, list) and all(type(i) is int and i >= 0 for i in ends) and ends
            and all(isinstance(word, str) for word in words.values())):
        raise DataError(f"its chat template is {str(template)[:80]!r}: expected texts, and ids "
                        "that end an answer")
    compiled(template["jinja"])


@functools.lru_cache
def compiled(text):
    """The Jinja template of that text, with all that `transformers` gives one. DataError."""
    try:
        import jinja2.ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise DataError("this model's chat template needs jinja2: pip install jinja2") from None

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(["*", "**", "%"])  # they make a huge value of a few letters

        def call_binop(self, context, operator, left, right):
            if operator == "**" or not all(isinstance(x, (int, float)) for x in (left, right)):
                raise jinja2.TemplateError(f"{operator} is not for these values")
            return super().call_binop(context, operator, left, right)

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)
    made = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    made.filters["tojson"] = tojson
    made.globals |= dict(raise_exception=raise_exception,
                         strftime_now=lambda how: datetime.datetime.now().strftime(how))
    # {% generation %}, of `transformers` alone, stands around answers and writes nothing.
    text = re.sub(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})",
                  lambda m: m[1] + ("endif" if m[2] else "if true") + m[3], text)
    with told():
        return made.from_string(text)


@contextlib.contextmanager
def told():
    """Context in which whatever goes wrong in a template is a DataError."""
    try:
        yield
    except Exception as error:  # what it does, it does: any of Python's
        what = str(error) if type(error).__module__.startswith("jinja2") else repr(error)
        raise DataError(f"its chat template fails: {what[:200]}") from None


@contextlib.contextmanager
def at_most(lines):
    """Context in which this thread runs so many lines of Python."""
    def count(frame, event, argument):
        nonlocal lines
        lines -= 1
        if lines < 0:
            raise TimeoutError("it does not come to an end")
        return count
    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)


def any_of(texts):
    """A pattern of any of `texts`."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def render(template, messages, prompt, special=()):
    """The text of `messages`, [(role, text)], up to where an answer begins if `prompt`. In theirs
    the texts `special` are marked. DataError."""
    names = any_of(special)
    turns = [dict(role=role, content=names.sub(lambda m: OPEN + m[0] + CLOSE, text.translate(GONE)))
             for role, text in messages]
    words = {k: v for k, v in template.items() if k.endswith("_token")}
    parts, size, jinja = [], 0, compiled(template["jinja"])
    with told(), at_most(MOST_LINES):
        for part in jinja.generate(messages=turns, add_generation_prompt=prompt, tools=None,
                                   documents=None, **words):
            parts.append(part)
            size += len(part)
            if size > MOST_TEXT:
                raise ValueError(f"it writes more than {MOST_TEXT:,} characters")
    return "".join(parts)


def encode(text, tokenizer):
    """Ids of what `render` made: special tokens are those of the template. DataError."""
    first, *parts = MARKED.split(text)  # text, what was marked (None: half a mark), text, ...
    ids = tokenizer.encode_special(first)
    for n, part in enumerate(parts):
        encoded = tokenizer.encode_special if n % 2 else tokenizer.encode
        # Behind a newline: before the first word of a text some set a blank.
        line, behind = encoded("\n"), encoded(f"\n{part or ''}")
        ids += behind[len(line):] if behind[:len(line)] == line else encoded(part)
    if max(ids, default=0) >= tokenizer.n_vocab:
        raise DataError(f"its chat template uses token {max(ids)}, the model knows "
                        f"{tokenizer.n_vocab}")
    return ids


def prompt_ids(template, messages, tokenizer):
    """Ids of a conversation up to where the next answer begins. DataError."""
    return encode(render(template, messages, True, tokenizer.special), tokenizer)


def sequences(template, messages, tokenizer):
    """[(ids (n,), mask (n,))] of a chat, mask 1 where a token is learned: an answer is what the
    text with it has beyond the prompt before it, up to its end token. One, or more where the
    template writes earlier turns otherwise once others follow (Qwen 3 leaves their thoughts out):
    each is what the model sees as it answers. DataError where answers cannot be told."""
    out, ids, mask = [], [], []
    for i, (role, text) in enumerate(messages):
        if role != "assistant":
            continue
        prompt = render(template, messages[:i], True, tokenizer.special)
        whole = render(template, messages[:i + 1], False, tokenizer.special)
        if not whole.startswith(prompt):
            raise DataError("its chat template cannot be learned: the text of a chat does not "
                            "begin with that of the prompt before its last answer")
        if plain(text) not in plain(whole[len(prompt):]):  # a thought left out, capitals, ...
            raise DataError("its chat template cannot be learned: it does not write an answer as "
                            f"it is ({text[:40]!r})")
        asked, both = encode(prompt, tokenizer), encode(whole, tokenizer)
        if both[:len(asked)] != asked:  # a token over the seam
            both = asked + encode(whole[len(prompt):], tokenizer)
        said = both[len(asked):]
        n = next((n for n, token in enumerate(said, 1) if token in template["ends"]), 0)
        behind = plain(tokenizer.decode(said[n:]))
        if not n or plain(text) and plain(text) in behind:
            raise DataError("its chat template cannot be learned: no end token follows an answer; "
                            f"expected one of {template['ends']}")
        if asked[:len(ids)] != ids:
            out.append((ids, mask))
            mask = []
        mask = mask + [0] * (len(asked) - len(mask)) + [1] * n + [0] * (len(said) - n)
        ids = both
    out += [(ids, mask)] if ids else []
    return [(np.array(a, np.uint32), np.array(b, np.uint8)) for a, b in out]


def plain(text):
    """`text` without what templates change: blanks, and marks."""
    return "".join(text.translate(GONE).split())


def with_ends(template, tokenizer):
    """`template` with the token that it sets after an answer among those that end one: what a
    model's files name may be the end of a document alone. DataError."""
    turns = [("user", "?"), ("assistant", "\u00a7")]
    text, prompt = render(template, turns, False), render(template, turns[:1], True)
    before, _, behind = text.removeprefix(prompt).partition("\u00a7")
    after, ids = any_of(tokenizer.special).search(behind), []
    if after and (after[0] not in before or not text.startswith(prompt)):  # else it ends thoughts
        ids = tokenizer.encode_special(after[0])
    return template | {"ends": sorted({*template["ends"], *ids})}
