"""Ids equal to those of the package `tokenizers` on text of all kinds, for every way of splitting
text that data/tokenizer_hf.py takes in."""

import functools
import json
import pathlib
import random
import sysconfig
import time
import unicodedata

import pytest

from data.labels import LabelledText, to_arrays
from data.tokenizer import open_tokenizer, tokenizer_from_spec
from data.tokenizer_hf import tokenizer_json
from data.tokenizer_types import JsonTokenizer, RankTokenizer

tokenizers = pytest.importorskip("tokenizers")
PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+"
           r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
KINDS = dict(gpt2=RankTokenizer, llama3=RankTokenizer, qwen=RankTokenizer, smollm=JsonTokenizer,
             gemma=JsonTokenizer, llama2=JsonTokenizer)

# Ranges of code points, each a manner of writing.
SCRIPTS = dict(
    ascii=(32, 126), latin=(0xA0, 0x24F), combining=(0x300, 0x36F), greek=(0x370, 0x3FF),
    cyrillic=(0x400, 0x4FF), hebrew=(0x590, 0x5F4), arabic=(0x600, 0x6FF), hindi=(0x900, 0x97F),
    thai=(0xE00, 0xE5B), jamo=(0x1100, 0x11FF), symbols=(0x2000, 0x2BFF), kana=(0x3000, 0x30FF),
    cjk=(0x4E00, 0x9FFF), hangul=(0xAC00, 0xD7A3), private=(0xE000, 0xE0FF),
    forms=(0xF900, 0xFFFD), letters=(0x1D400, 0x1D7FF), emoji=(0x1F300, 0x1FAFF),
    cjk2=(0x20000, 0x2A6DF), tags=(0xE0000, 0xE007F), last=(0x10FF00, 0x10FFFF))
WORDS = [
    "don't", "I'LL", "we'Ve", "ſ'ſ", "O'Neill", "'s", "x'd", "foo_bar(", "==", "!=", "->", "0x1F",
    "1e-9", "12345678901", "3.14159", "１２３", "²³", "Ⅳ", "½", "١٢٣", "e\u0301", "Å", "ﬁ", "İ",
    "ǅ", "\U0001f469\u200d\U0001f467", "\U0001f1e8\U0001f1ed", "\U0001f44d\U0001f3fd", "❤\ufe0f",
    "你好，世界", "こんにちは", "안녕", "ไทย", "हिन्दी", "\u200b", "\u200d", "\ufeff",
    "\u00ad", "\ufffd", "<end>", "<|endoftext|>", "▁", "<0x0A>", "Ġ", "https://a.b/c?d=e&f=g",
    "a" * 70, "-" * 80]
BLANKS = ["", " ", " ", " ", "  ", "\t", "    ", "\u3000", "\u00a0", "\x85", "\u2028", "\r", "\v",
          "\f", " \t "]


def lines(n, seed=0):
    """n lines: three of four from Python's own sources, the others drawn."""
    rng, found = random.Random(seed), []
    files = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    while len(found) < n * 3 // 4:
        source = rng.choice(files).read_text(encoding="utf-8").splitlines()
        at = rng.randrange(len(source))
        found += source[at:at + 20]
    del found[n * 3 // 4:]
    return found + [drawn(rng) for _ in range(n - len(found))]


def drawn(rng):
    """Words, numbers, blanks and runs of characters of a script, one beside the other."""
    def part():
        kind = rng.random()
        if kind < 0.3:
            return rng.choice(WORDS)
        if kind < 0.4:
            return str(rng.randrange(10 ** rng.randint(1, 12)))
        if kind < 0.45:
            return "".join(chr(rng.randrange(32)) for _ in range(rng.randint(1, 3)))
        first, last = rng.choice(list(SCRIPTS.values()))
        return "".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 8)))
    return "".join(part() + rng.choice(BLANKS) * rng.choice((1, 1, 1, 2, 9))
                   for _ in range(rng.randint(1, 12)))


def trained(kind, texts, vocab_size):
    """A tokenizer of the package, of a published family's kind."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    levels = pre_tokenizers.ByteLevel
    how = dict(vocab_size=vocab_size, show_progress=False)
    trainer = trainers.BpeTrainer(**how, initial_alphabet=levels.alphabet())
    if kind in ("gemma", "llama2"):
        out = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True))
        special = ["<end>", *(f"<0x{b:02X}>" for b in range(256))]
        trainer = trainers.BpeTrainer(**how, special_tokens=special)
        out.normalizer = normalizers.Replace(" ", "▁")
        out.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        if kind == "llama2":
            out.normalizer, out.pre_tokenizer = None, pre_tokenizers.Metaspace(
                prepend_scheme="first", split=False)
        out.decoder = decoders.Sequence([
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        out = Tokenizer(models.BPE(ignore_merges=kind == "llama3"))
        out.normalizer = normalizers.NFC() if kind == "qwen" else None
        own = kind in ("gpt2", "smollm")
        first = (pre_tokenizers.Digits(individual_digits=True) if own else pre_tokenizers.Split(
            Regex(PATTERN % ("" if kind == "qwen" else "{1,3}")), "isolated"))
        parts = [first, levels(add_prefix_space=False, use_regex=own)]
        out.pre_tokenizer = parts[1] if kind == "gpt2" else pre_tokenizers.Sequence(parts)
        out.decoder = decoders.ByteLevel()
    out.train_from_iterator(texts, trainer)
    if kind not in ("gemma", "llama2"):
        out.add_special_tokens(["<end>"])
    content = json.loads(out.to_str())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] == "<end>"]
    return Tokenizer.from_str(json.dumps(content))


def opened(theirs, folder):
    folder.mkdir(exist_ok=True)
    theirs.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    return open_tokenizer(str(folder))


def differences(kind, folder, n, vocab_size):
    """Yields the texts, of n lines alone and of a few together, whose ids differ: of the tokenizer,
    of the tokenizer out of its description, and written as tokenizer.json again."""
    texts, rng = lines(n), random.Random(1)
    theirs = trained(kind, texts[::3], vocab_size)
    ours = opened(theirs, folder)
    assert type(ours) is KINDS[kind]
    texts += ["\n".join(texts[at:at + 9]) for at in range(0, n, 9)]
    texts += ["".join(rng.choices(texts[:n], k=3)) for _ in range(n // 10)]
    again = tokenizer_from_spec(ours.spec())
    back = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(ours)))
    wanted = ids_of(theirs, texts)
    for found in ([*map(ours.encode, texts)], [*map(again.encode, texts)], ids_of(back, texts)):
        yield [text for text, a, b in zip(texts, found, wanted, strict=True) if a != b]


def ids_of(theirs, texts):
    theirs.encode_special_tokens = True  # that is: as text
    return [found.ids for found in theirs.encode_batch(texts, add_special_tokens=False)]


@pytest.mark.parametrize("kind", KINDS)
def test_some_hundred_lines(kind, tmp_path):
    for wrong in differences(kind, tmp_path, 300, 600):
        assert not wrong, (len(wrong), wrong[:5])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_lines(kind, tmp_path):
    for wrong in differences(kind, tmp_path, 10_000, 8_000):
        assert not wrong, (len(wrong), wrong[:5])
    theirs, ours = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")), open_tokenizer(
        str(tmp_path))
    texts = lines(10_000, 3)
    for what, some in (("lines", texts), ("documents", ["\n".join(texts[at:at + 500])
                                                       for at in range(0, 10_000, 500)])):
        a, b = (min(seconds(encode, some) for _ in range(3)) for encode in (
            lambda texts: [*map(ours.encode, texts)], functools.partial(ids_of, theirs)))
        print(f"{kind}, {what}: {a:.2f} CPU seconds, theirs {b:.2f}, {b / a:.2f} x their speed")


def seconds(encode, texts):
    began = time.process_time()
    encode(texts)
    return time.process_time() - began


def test_evidence_stays_where_it_is_in_a_text_that_is_changed_first(tmp_path):
    ours = opened(trained("qwen", lines(50), 600), tmp_path)
    text = "cafe\u0301 " * 9 + "the fox"
    row = LabelledText(text, "a", text.index("fox"), len(text), "")
    first, last = to_arrays([row], ours, ["a"], 999)["spans"][0]
    ids = ours.encode(text)
    assert ours.decode(ids) == unicodedata.normalize("NFC", text) != text
    assert ours.decode(ids[first:last + 1]).strip() == "fox"
