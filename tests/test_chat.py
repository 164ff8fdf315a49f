"""Chat fine-tuning: conversations of every format to packed rows, chats that do not see each other,
and a model that learns to answer questions it has not met."""

import itertools
import json
import random
import sys
import types
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import SHARED, TINY, run
from processes import python
from runs import WAYS, Program, assert_same, assert_two_ranks_equal_one

import model.chat
from data.chat_template import BUILTIN_JINJA, ChatTemplate, encode_marked, parse_content
from data.prepare import chat as data_chat
from data.prepare import prepare as prepare_text
from data.prepare import samples
from data.tokenizer import load_tokenizer
from data.tokenizer_types import JsonTokenizer
from model.chat import ChatGPT, generate_answer, packed_layout
from model.gpt import GPT, GPTConfig
from model.sample import load_model
from train.base.errors import DataError, UserError
from train.config import load_config
from train.train import train

BYTES = load_tokenizer("byte")
# A model of 140,000 parameters that learns the task of these tests in 60 steps.
TASK = TINY | dict(n_embd=64, n_hidden=128, block_size=80, prev_embedding=True, optimizer="muon",
                   qk_norm=True, tie_weights=False, mlp="relu2", min_lr=0, warmup_iters=5,
                   log_interval=50, gradient_accumulation_steps=2, learning_rate=3e-3)
MIDDLE = 18  # steps of them, after which it is right now and then
QUESTION, ANSWER = "Say  moo\n", " moo "
RENDERED = "### User:\nSay  moo\n\n### Assistant:\nmoo<|endoftext|>"
FORMATS = {
    "messages": {"messages": [{"role": "user", "content": QUESTION},
                              {"role": "assistant", "content": ANSWER}]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION}]},
                           {"role": "assistant", "content": ANSWER}]},
    "sharegpt": {"conversations": [{"from": "human", "value": QUESTION},
                                   {"from": "gpt", "value": ANSWER}]},
    "response": {"prompt": QUESTION, "response": ANSWER},
    "completion": {"prompt": QUESTION, "completion": ANSWER},
    "both sides lists": {"prompt": [{"role": "user", "content": QUESTION}],
                         "completion": [{"role": "assistant", "content": ANSWER}]},
    "alpaca": {"instruction": QUESTION, "input": "", "output": ANSWER},
    "alpaca without input": {"instruction": QUESTION, "response": ANSWER},
    "dolly": {"instruction": "Say", "context": "moo", "response": ANSWER},
}


def words(n, seed=0, length=4):
    """n different words of the letters a to h."""
    draw, out = random.Random(seed), {}
    while len(out) < n:
        out["".join(draw.choices("abcdefgh", k=length))] = None
    return list(out)


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def rows_of(folder, split="train"):
    return [np.load(folder / f"{split}_{name}.npy") for name in ("tokens", "mask", "chat")]


def chats_of(folder, splits=("train", "val")):
    """[(text, learned text)] of every chat in the rows of a folder."""
    out = []
    for split in splits:
        for tokens, mask, number in zip(*rows_of(folder, split)):
            for n in range(number.max() + 1):
                ids, learned = tokens[number == n], mask[number == n]
                if learned.any():
                    out.append((BYTES.decode(ids), BYTES.decode(ids[learned == 1])))
    return out


@pytest.fixture(scope="module")
def capitals(tmp_path_factory):
    """(chats of a task: words to capitals, a model pretrained on text of such words)."""
    folder = tmp_path_factory.mktemp("capitals")
    text = "".join(f"{w}\n{w.upper()}\n" for w in words(1500, seed=1))
    (folder / "words.txt").write_text(text)
    prepare_text([str(folder / "words.txt")], str(folder / "text"))
    train(load_config(None, TASK | dict(data_dir=str(folder / "text"), max_iters=60,
                                        out_dir=str(folder / "base"), eval_interval=0)))
    source = write_jsonl(folder / "chats.jsonl", [{"prompt": w, "response": w.upper()}
                                                  for w in words(1500)])
    assert data_chat.main([source, "--out", str(folder / "chats"), "--tokenizer",
                           str(folder / "base" / "ckpt.pt")]) == 0
    return folder


def settings(capitals, out, **changes):
    """A short chat run of the module's task."""
    return TASK | dict(model="chat", data_dir=str(capitals / "chats"), out_dir=str(out),
                       init_from=str(capitals / "base" / "ckpt.pt"), eval_interval=4,
                       max_iters=8) | changes


# -----------------------------------------------------------------------------
# data

@pytest.mark.parametrize("name", FORMATS)
def test_formats(tmp_path, name, capsys):
    source = write_jsonl(tmp_path / "a.jsonl", [FORMATS[name]] + [
        {"prompt": f"{i}", "response": "x"} for i in range(30)])
    assert data_chat.main([source, "--out", str(tmp_path / "out"), "--block-size", "64",
                           "--show", "1"]) == 0
    rendered = RENDERED.replace("Say  moo", "Say\n\nmoo") if name == "dolly" else RENDERED
    assert (rendered, "moo<|endoftext|>") in chats_of(tmp_path / "out")
    assert rendered.replace("moo<", "[moo<") + "]" in capsys.readouterr().out


@pytest.mark.parametrize("fields, expected", [
    (["talk"], RENDERED),
    (["task", "reply"], RENDERED),
    (["task", "extra", "reply"], RENDERED.replace("moo\n\n", "moo\n\nloudly\n\n", 1)),
])
def test_named_fields(tmp_path, fields, expected):
    record = {"talk": FORMATS["messages"]["messages"], "task": QUESTION, "extra": "loudly ",
              "reply": ANSWER}
    source = write_jsonl(tmp_path / "a.jsonl", [
        record | {"task": f"{QUESTION}{i}" if i else QUESTION} for i in range(40)])
    argv = [source, "--out", str(tmp_path / "out")] + [f"--field={name}" for name in fields]
    if fields == ["talk"]:  # forty times the same question are all on one side
        assert data_chat.main(argv) == 2
        messages = data_chat.to_messages(record, fields)
        (ids, _), = ChatTemplate().sequences(messages, BYTES)
        assert BYTES.decode(ids) == expected
    else:
        assert data_chat.main(argv) == 0
        assert expected in dict(chats_of(tmp_path / "out"))


def test_json_array_turns_and_system(tmp_path):
    turns = [("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "c"),
             ("assistant", "d"), ("user", "left out")]
    record = {"messages": [{"role": role, "content": text} for role, text in turns]}
    (tmp_path / "a.json").write_text(json.dumps([record] + [
        {"prompt": str(i), "response": "x"} for i in range(30)]))
    assert data_chat.main([str(tmp_path / "a.json"), "--out", str(tmp_path / "out")]) == 0
    assert ("### System:\nBe brief.\n\n### User:\na\n\n### Assistant:\nb<|endoftext|>"
            "### User:\nc\n\n### Assistant:\nd<|endoftext|>",
            "b<|endoftext|>d<|endoftext|>") in chats_of(tmp_path / "out")


def test_typed_end_token_stays_text():
    (ids, mask), = ChatTemplate().sequences([("user", "say <|endoftext|>"),
                                              ("assistant", "<|endoftext|>")], BYTES)
    assert (ids == BYTES.eot_token).sum() == 1 and ids[-1] == BYTES.eot_token
    assert mask.sum() == len("<|endoftext|>") + 1


@pytest.mark.skipif(not (SHARED / "tiktoken_cache").exists(), reason="no copy of GPT-2's ranks")
def test_whole_and_parts_tokenise_alike(monkeypatch):
    """Stripped contents, as --field and the formats give them, never join with the template."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED / "tiktoken_cache"))
    gpt2, draw = load_tokenizer("gpt2"), random.Random(1)
    for _ in range(300):
        messages = [(role, parse_content("".join(draw.choices("ab 's1\n\t.:#é", k=12)), "content"))
                    for role in ("user", "assistant") * 2]
        (ids, mask), = ChatTemplate().sequences(messages, gpt2)
        texts = [f"### User:\n{messages[i][1].strip()}\n\n### Assistant:\n" for i in (0, 2)]
        whole = [i for text, (_, said) in zip(texts, messages[1::2])
                 for i in [*gpt2.encode(text + said.strip()), gpt2.eot_token]]
        assert ids.tolist() == whole
        end = int(mask.argmax())  # what a model is asked is what it learned from
        assert ids[:end].tolist() == gpt2.encode(texts[0])


def test_an_answer_gets_no_space_that_its_text_does_not_have():
    """The prompt ends with a space, which is one token with the start of the answer."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"\u2581": 0, "a": 1, ":": 2, "</s>": 3, "\u2581a": 4, "x": 5, "\n": 6}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[("\u2581", "a")]))
    made.normalizer = tokenizers.normalizers.Sequence([
        tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")])
    made.add_special_tokens(["</s>"])
    jinja = ("{% for m in messages %}{{ m.content + (eos_token if m.role == 'assistant' else ': ') "
             "}}{% endfor %}")
    template = ChatTemplate({"jinja": jinja, "ends": [3], "eos_token": "</s>"})
    (ids, mask), = template.sequences([("user", "a"), ("assistant", "aa")],
                                      JsonTokenizer(made.to_str(), 3))
    assert ids.tolist() == [4, 2, 0, 1, 1, 3] and mask.tolist() == [0, 0, 0, 1, 1, 1]


def test_rows_hold_whole_chats_once(tmp_path, capsys):
    draw = random.Random(2)
    records = [{"prompt": f"{i}", "response": "y" * draw.randint(1, 90)} for i in range(300)]
    source = write_jsonl(tmp_path / "a.jsonl", records)
    assert data_chat.main([source, "--out", str(tmp_path / "out"), "--block_size", "99"]) == 0
    found = chats_of(tmp_path / "out")
    kept = [r for r in records if len(r["prompt"] + r["response"]) + 28 <= 100]
    assert sorted(learned for _, learned in found) == sorted(
        r["response"] + "<|endoftext|>" for r in kept)
    assert 0 < len(kept) < 300
    assert f"{300 - len(kept)} chats left out: longer" in capsys.readouterr().out
    tokens, mask, number = rows_of(tmp_path / "out")
    assert tokens.shape == mask.shape == number.shape and tokens.shape[1] == 100
    assert tokens.dtype == np.uint16 and mask.dtype == np.uint8 and (np.diff(number) >= 0).all()


def test_long_chats_are_cut_between_exchanges():
    messages = [(role, text) for i in range(4) for role, text in (("user", f"q{i}"),
                                                                  ("assistant", f"a{i}"))]
    (ids, mask), = ChatTemplate().sequences(messages, BYTES)
    start, _ = data_chat.cut(ids, mask, len(ids) // 2 + 3)
    assert BYTES.decode(start).endswith("a1<|endoftext|>")
    assert len(data_chat.cut(ids, mask, 10)[0]) == 0


def test_what_follows_the_first_prompt_that_is_too_long_takes_no_time(monkeypatch):
    """Each exchange is rendered with all before it."""
    real, lengths = ChatTemplate.encode_answer, []
    monkeypatch.setattr(ChatTemplate, "encode_answer", lambda self, messages, *more: (
        lengths.append(len(messages)), real(self, messages, *more))[1])
    writer = data_chat.ChatWriter(data_chat.ChatOptions(["x"], block_size=120))
    writer.notes = Counter()
    record = dict(messages=[dict(role=role, content="q") for _ in range(50)
                            for role in ("user", "assistant")])
    (ids, _), = writer.encode(record)
    assert lengths == [2, 4, 6, 8, 10] and 90 < len(ids) <= 121
    assert list(writer.notes) == ["cut to the exchanges that fit into 121 tokens"]


@pytest.mark.parametrize("fraction", ["1e-9", "0.3"])
def test_some_chat_is_for_validation(tmp_path, fraction):
    """All chats of one question where the draw takes none."""
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": str(i % 20), "response": str(i)}
                                                for i in range(40)])
    assert data_chat.main([source, "--out", str(tmp_path / "out"), "--val_fraction", fraction]) == 0
    train_, val = (chats_of(tmp_path / "out", [split]) for split in ("train", "val"))
    assert len(train_) + len(val) == 40 and (fraction == "0.3" or len(val) == 2)
    assert not {text.split("\n")[1] for text, _ in train_} & {t.split("\n")[1] for t, _ in val}


def test_num_samples_and_no_question_on_both_sides(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": str(i % 70), "response": str(i)}
                                                for i in range(300)])
    assert data_chat.main([source, "--out", str(tmp_path / "out"), "--num_samples", "200"]) == 0
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert sum(part["chats"] for part in meta["splits"].values()) == 200
    asked = [{text.split("\n")[1] for text, _ in chats_of(tmp_path / "out", [split])}
             for split in ("train", "val")]
    assert not asked[0] & asked[1] and len(asked[1]) > 1


def test_the_template_of_a_prepared_folder_is_kept(tmp_path):
    """So that folders which are prepared with the tokenizer of one of them can be mixed."""
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"{i}?", "response": "b"}
                                                for i in range(40)])
    assert data_chat.main([source, "--out", str(tmp_path / "one")]) == 0
    meta = json.loads((tmp_path / "one/meta.json").read_text())
    meta["template"] = {"jinja": "Q:" + BUILTIN_JINJA, "ends": [256], "eos_token": "<|endoftext|>"}
    (tmp_path / "one/meta.json").write_text(json.dumps(meta))
    assert data_chat.main([source, "--out", str(tmp_path / "two"), "--tokenizer",
                           str(tmp_path / "one")]) == 0
    assert json.loads((tmp_path / "two/meta.json").read_text())["template"] == meta["template"]


def test_dataset_folder(tmp_path):
    datasets = pytest.importorskip("datasets")
    records = [{"prompt": str(i), "response": str(i)} for i in range(60)]
    datasets.Dataset.from_list(records).save_to_disk(tmp_path / "saved")
    (tmp_path / "files").mkdir()
    write_jsonl(tmp_path / "files" / "train.jsonl", records)
    found = []
    for name in ("saved", "files"):
        assert data_chat.main([str(tmp_path / name), "--out", str(tmp_path / f"{name}.out")]) == 0
        found.append(sorted(chats_of(tmp_path / f"{name}.out")))
    assert found[0] == found[1] and len(found[0]) == 60


def test_datasets_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert data_chat.main(["hf:owner/name", "--out", str(tmp_path / "out")]) == 2
    assert "pip install datasets" in capsys.readouterr().err


@pytest.mark.parametrize("lines, argv, message", [
    ('{"a": 1}\n', [], "a.jsonl:1: its fields (a) are none of"),
    ('{"prompt": "a", "response": 3}\n', [], "a.jsonl:1: response: expected text, got 3"),
    ('{"prompt": "a", "response": null}\n', [], "its fields (prompt, response: null) are none of"),
    ('{"prompt": " ", "response": "x"}\n', [], "a.jsonl:1: no question in prompt"),
    ('{"q": null, "a": "x"}\n', ["--field", "q", "--field", "a"], "no question in q"),
    ('{"messages": [{"role": "tool", "content": ""}]}', [], "role 'tool': expected one of"),
    ('{"messages": [{"role": "assistant", "content": "a", "weight": 0}]}', [], "weight 0: answers"),
    *((json.dumps(dict(messages=[{"role": "assistant", "content": "a", name: [{}]}])), [],
       f"{name}: not supported") for name in ("tool_calls", "reasoning_content", "thinking")),
    ('{"instruction": "Square", "input": 0, "output": "0"}\n', [], "input: expected text, got 0"),
    ('{"system": 0, "prompt": "a", "response": "b"}\n', [], "system: expected text, got 0"),
    ('\n{"prompt"', [], "a.jsonl:2: not valid JSON"),
    ('[1]\n', [], "expected an object, got [1]"), ("null\n", [], "expected an object, got null"),
    ('{"prompt": "a", "response": "b"}\n', ["--field", "x"], "no field 'x'; its fields are"),
    ('{"prompt": "a", "response": "b"}\n', [], "no chat for"),
    ('{"prompt": "a", "response": " "}\n' * 9, [], "no chat for train and val"),
    ("", ["--val_fraction", "1"], "--val_fraction: must be below 1"),
    ("", ["--block_size", "100000000000"], "--block_size: must be at most 16777216"),
    ("", ["--num_samples", "0"], "--num_samples: must be at least 1"),
    ("", ["--tokenizer", "nosuch"], "nosuch"),
    ("", ["--tokenizer", "nosuch.pt"], "nosuch.pt: no such file"),
])
def test_bad_input(tmp_path, capsys, lines, argv, message):
    (tmp_path / "a.jsonl").write_text(lines)
    assert data_chat.main([str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out"), *argv]) == 2
    assert message in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]  # nothing is left behind


def test_output_folder_of_others_is_kept(tmp_path, capsys):
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": str(i), "response": "moo"}
                                                for i in range(40)])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years")
    assert data_chat.main([source, "--out", str(tmp_path / "out")]) == 2
    assert "not prepared from these sources" in capsys.readouterr().err
    assert data_chat.main([source, "--out", str(tmp_path / "out"), "--force"]) == 0
    assert (tmp_path / "out" / "thesis.txt").read_text() == "years"
    assert data_chat.main([source, "--out", str(tmp_path / "new")]) == 0
    assert data_chat.main([source, "--out", str(tmp_path / "new")]) == 0  # the same again


def test_skip_bad(tmp_path, capsys):
    source = write_jsonl(tmp_path / "a.jsonl", [
        {"prompt": str(i), "response": "moo"} if i % 2 else 7 for i in range(60)])
    assert data_chat.main([source, "--out", str(tmp_path / "out"), "--skip_bad"]) == 0
    assert "Left out 30 bad records" in capsys.readouterr().out
    assert len(chats_of(tmp_path / "out")) == 30


# -----------------------------------------------------------------------------
# model

def small(**changes):
    shape = dict(n_layer=2, n_head=2, n_embd=32, n_hidden=64, block_size=40, vocab_size=257)
    return ChatGPT(GPTConfig(**shape | changes), seed=3)


def test_the_example_asks_one_question_about_each_name(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("read_line = save_all(open_file, max_size, x, open_file)")
    monkeypatch.setattr(samples.sysconfig, "get_paths", lambda: dict(stdlib=str(tmp_path)))
    chats = {source: [(r["prompt"], r["response"]) for _, r in samples.example_records(source)]
             for source in ("example", "example-more")}
    assert chats == {
        "example": [
            ("max_size in CamelCase?", "MaxSize"), ("open_file in capitals?", "OPEN_FILE"),
            ("ReadLine in snake_case?", "read_line"), ("save_all in CamelCase?", "SaveAll")],
        "example-more": [("max_size as a title?", "Max Size"), ("open_file with hyphens?",
                         "open-file"), ("read_line as a title?", "Read Line"),
                         ("save_all with hyphens?", "save-all")]}


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt])
def test_a_conversation_ends_quietly(monkeypatch, end):
    lines = iter(["Who?", " Why? "])

    def typed(prompt):
        for line in lines:
            return line
        raise end
    monkeypatch.setattr("builtins.input", typed)
    assert list(model.chat.read_questions()) == ["Who?", "Why?"]


def test_without_chats_it_is_a_gpt():
    model, gpt = small(), GPT(small().config, seed=3)
    tokens = torch.arange(24).view(2, 12)
    assert torch.equal(model(tokens), gpt(tokens)) and model(tokens).shape == (2, 12, 257)
    assert model(tokens, tokens)[0] == gpt(tokens, tokens)[0]
    model.row_tokens = 7
    assert model.flops_per_unit() == 7 * gpt.flops_per_unit()  # its unit is a row


@pytest.mark.parametrize("options", [dict(pos="rope"), dict(pos="learned"),
                                     dict(prev_embedding=True, ngram_rows=99),
                                     dict(key_offset=True)], ids=str)
def test_packed_equals_alone(options):
    """A row of three chats has the losses and the gradients of the three alone."""
    torch.manual_seed(0)
    model, sizes = small(**options), (15, 20, 6)
    for p in model.parameters():
        p.data.normal_(0, 0.1)  # an embedding of the token before that counts
    tokens, mask = torch.randint(0, 256, (1, 41)), torch.randint(0, 2, (1, 41))
    number = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))[None]
    mask[0, [0, 15, 35]] = 0  # a question comes first

    loss, sums = model(tokens, mask, number)
    loss.backward()
    packed = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    total = 0
    for part in zip(*(t.split(sizes, dim=1) for t in (tokens, mask, number))):
        alone, own = model(*part)
        total = total + alone * own["count"]
    (total / sums["count"]).backward()
    torch.testing.assert_close(loss, total / sums["count"], rtol=1e-5, atol=0)
    for a, p in zip(packed, model.parameters()):
        torch.testing.assert_close(a, p.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("checkpointing", ["false", "true"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_chat_sees_another(dtype, checkpointing):
    """No state depends on another chat's tokens, in every way that attention is computed."""
    model = small()
    for block in model.h:
        block.gradient_checkpointing = checkpointing
    tokens, number = torch.randint(0, 256, (2, 40)), torch.arange(40)[None].repeat(2, 1) // 13
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        x = model.trunk(tokens, **packed_layout(tokens, number))
        other = torch.where(number == 1, (tokens + 1) % 256, tokens)
        y = model.trunk(other, **packed_layout(other, number))
    assert torch.equal(x[number != 1], y[number != 1])
    assert not torch.equal(x[number == 1], y[number == 1])


def test_tokens_and_answers_are_counted_one_by_one():
    """Answers at both ends of a row, one after the other in two rows, of one token, and none."""
    model = small().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.2, generator=torch.Generator().manual_seed(p.numel()))
    tokens, chat = torch.randint(0, 256, (4, 12)), torch.zeros(4, 12, dtype=torch.int64)
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1],
                         [0] * 12, [1] + [0] * 6 + [1] * 3 + [0] * 2])
    for row, place in ((0, 1), (0, 2), (0, 5), (1, 1), (1, 4), (3, 7), (3, 8), (3, 9)):
        with torch.no_grad():  # what the model would say there, so that some answers are right
            tokens[row, place] = model(tokens[row:row + 1, :place])[0, -1].argmax()
    with torch.no_grad():
        loss, sums = model(tokens, mask, chat)
        best = model(tokens[:, :-1]).argmax(-1)
        logits = model(tokens[:, :-1]).double().log_softmax(-1)
    count = right = answers = exact = 0
    nats = 0.0
    for row in range(4):  # the target of place t is token t + 1
        for learned, places in itertools.groupby(range(11), lambda t, r=row: int(mask[r, t + 1])):
            if learned:
                said = [(t, int(tokens[row, t + 1])) for t in places]
                fits = [int(best[row, t]) == token for t, token in said]
                nats -= sum(float(logits[row, t, token]) for t, token in said)
                count, right = count + len(fits), right + sum(fits)
                answers, exact = answers + 1, exact + all(fits)
    assert {n: int(v) for n, v in sums.items()} == dict(count=count, accuracy=right, bytes=0,
                                                        answers=answers, exact=exact)
    assert (count, answers) == (15, 7) and 2 <= exact < answers
    assert float(loss) == pytest.approx(nats / count, rel=1e-5)
    numbers = model.numbers({n: v.double() for n, v in sums.items()} | dict(loss=nats))
    assert numbers.pop("bpb") is None  # without a tokenizer
    assert numbers == pytest.approx(dict(ppl=np.exp(nats / count), accuracy=right / count,
                                         exact=exact / answers))
    nothing = {name: torch.zeros(()) for name in (*sums, "loss")}
    assert model.numbers(nothing) == dict(ppl=None, bpb=None, accuracy=None, exact=None)
    assert set(model.train()(tokens, mask, chat)[1]) == {"count"}


@pytest.fixture(scope="module")
def learned(capitals, tmp_path_factory):
    """The folder of a run, as typed, that learns the task."""
    out = tmp_path_factory.mktemp("learned")
    args = [f"--{k}={v}" for k, v in settings(capitals, out, max_iters=60, eval_interval=MIDDLE,
                                              keep_last=4, sample_tokens=12).items()]
    code, output = run("--config", "train/configs/chat.yaml", *args)
    assert code == 0, output
    return out


def exact(out):
    """{step: val_exact} of the evaluations of a run."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {line["iter"]: line["val_exact"] for line in lines if "val_exact" in line}


@pytest.mark.ci
def test_exact_is_what_sampling_writes(capitals, learned):
    """val_exact, from one pass over the right answers, is the share that sampling gets right."""
    model, tokenizer = load_model(learned / f"ckpt_{MIDDLE:07}.pt")
    from model.chat import open_data
    from train.distributed import Ranks
    config = load_config(None, settings(capitals, learned))
    val, batches = open_data(config, Ranks()).val, config.eval_iters
    right = n = 0
    for index in range(val.n_fixed(batches)):
        for tokens, mask, number in zip(*val.fixed_batch(index, batches)):
            for k in range(int(number.max()) + 1):
                ids, said = tokens[number == k], mask[number == k]
                if said.any():
                    start = int(said.argmax())
                    made = generate_answer(model, tokenizer, ids[:start].tolist(), 20)
                    right, n = right + (made == ids[start:-1].tolist()), n + 1
    assert exact(learned)[MIDDLE] == pytest.approx(right / n) and right > 0


def test_learns_held_out_questions(learned):
    """The whole way, as typed: above 90% of unseen questions answered exactly, and a talk."""
    assert exact(learned)[60] > 0.9
    assert "### Assistant:\n" in (learned / "samples.txt").read_text()

    unseen = [w for w in words(60, seed=5) if w not in set(words(1500))][:3]
    talk = python("-m", "model.sample", "--chat", "--ckpt", learned / "ckpt.pt",
                  "--max_new_tokens", "20", "--device", "cpu", input=f"{unseen[0]}\n")
    assert talk.returncode == 0 and talk.stdout == f"{unseen[0].upper()}\n", talk


def test_a_system_message_comes_first_and_stays(monkeypatch):
    from model import chat
    model, asked = small(block_size=105), []
    model.template = ChatTemplate()
    monkeypatch.setattr(chat, "generate_answer",
                        lambda m, t, ids, *rest, **how: asked.append(ids) or [65])
    chat.talk(model, BYTES, ["a", "b", "c"], 5, system=" Be kind. ")
    one = [("system", "Be kind."), ("user", "a"), ("assistant", "A"), ("user", "b")]
    (ids, _), = ChatTemplate().sequences([*one, ("assistant", "")], BYTES)
    assert asked[1] == ids[:-1].tolist()  # as in training, up to where the answer begins
    assert BYTES.decode(asked[2]).startswith("### System:\nBe kind.\n\n### User:\nb")


@pytest.mark.parametrize("block_size, known", [(80, 1), (160, 2), (400, 3)])
def test_a_conversation_is_remembered_whatever_an_answer_may_take(block_size, known, monkeypatch,
                                                                  capsys):
    """The third question comes with as many of the exchanges as half of the context holds, where
    --max_new_tokens asks for more than all of it."""
    from model import chat
    model, asked = small(block_size=block_size), []
    model.template = ChatTemplate()
    monkeypatch.setattr(chat, "generate_answer",
                        lambda m, t, ids, *rest, **how: asked.append(ids) or [65])
    chat.talk(model, BYTES, ["a", "b", "c"], 256)
    assert BYTES.decode(asked[2]).count("### User") == known
    said = f"the first {6 - 2 * known} messages are left out"
    assert (said in capsys.readouterr().err) == (known < 3)
    with pytest.raises(UserError, match="the question has .* tokens, but the context of this model"
                                        f" has {block_size}; shorten it"):
        chat.talk(model, BYTES, ["a" * block_size], 5)


def test_a_prompt_is_cut_between_messages_by_the_longest_end_that_fits():
    """Beside a search through all of them, for a conversation that starts with system messages."""
    template = ChatTemplate()
    turns = [("system", "Be kind."), ("system", "B"), ("user", "a"), ("assistant", "A" * 9),
             ("user", "b"), ("user", "c" * 7), ("assistant", "C"), ("user", "d")]
    for room in range(20, 200):
        ends = [turns[:2] + turns[i:] for i in (2, 4, 5, 7)]
        fitting = [end for end in ends if len(template.prompt_ids(end, BYTES)) <= room] or ends[-1:]
        ids, n = template.fit_prompt(turns, BYTES, room)
        assert ids == template.prompt_ids(fitting[0], BYTES) and n == 8 - len(fitting[0])


def test_a_prompt_without_a_sample_costs_no_other():
    gpt = ChatGPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=257, block_size=64,
                            tie_weights=False)).eval()
    gpt.wte.weight.data[ord("z")] = torch.nan
    gpt.template = ChatTemplate()
    spec = dict(template=gpt.template.spec, tokenizer={"kind": "byte"})
    bad, good = model.chat.sample(gpt, types.SimpleNamespace(spec=spec), types.SimpleNamespace(
        sample_prompts=["z", "a"], sample_tokens=4))
    assert "z" in bad and "[no sample: the model's logits are not finite" in bad
    assert "Assistant:" in good and "no sample" not in good


def test_sample_chat_is_greedy_by_default(capitals, monkeypatch, capsys):
    from model import chat, sample
    calls = []
    monkeypatch.setattr(chat, "talk", lambda *args, **how: calls.append(how))
    monkeypatch.setattr(sample, "replace_linear_layers", lambda model: model)
    monkeypatch.setattr(sample, "load_text_model",
                        lambda options: (types.SimpleNamespace(template={}), 0, "cpu"))
    assert sample.main(["--chat", "--prompt", "moo"]) == 0
    assert calls[0]["temperature"] == 0
    assert sample.main(["--chat", "--num_samples", "3"]) == 2
    assert "--num_samples" in capsys.readouterr().err


def test_question_is_encoded_as_in_training(capitals, tmp_path):
    (ids, mask), = ChatTemplate().sequences([("user", "moo"), ("assistant", "boo")], BYTES)
    asked = ChatTemplate().prompt_ids([("user", " moo\n")], BYTES)
    assert asked == ids[:int(mask.argmax())].tolist()


# -----------------------------------------------------------------------------
# the loop

def test_killed_and_resumed(capitals, tmp_path):
    """kill -9 in the middle, the same command again: every bit as without."""
    changes = settings(capitals, tmp_path / "a", max_iters=12, save_interval=3, dropout=0.1,
                       lr_decay_iters=None, vocab_size=None)
    train(load_config(None, changes))
    changes |= dict(out_dir=str(tmp_path / "b"))
    killed = Program(**changes, env=dict(FAULT="before_step@8=kill9"))
    assert killed.wait()[0] == -9
    train(load_config(None, changes))
    assert_same(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("how", WAYS)
def test_two_ranks_equal_one(capitals, tmp_path, how):
    assert_two_ranks_equal_one(tmp_path, settings(capitals, "", optimizer="adamw"), how,
                               val_loss=1e-5, val_exact=0)


def test_early_stopping_on_exact(capitals, tmp_path):
    last = train(load_config(None, settings(
        capitals, tmp_path / "out", max_iters=50, eval_interval=2, early_stopping_patience=2,
        early_stopping_metric="val_exact", early_stopping_mode="max",
        learning_rate=1e-6, muon_lr=1e-6)))
    assert "no better val_exact" in last["finished"] and last["iter_num"] < 50


@pytest.mark.parametrize("changes, message", [
    (dict(block_size=40, init_from="scratch"), "prepare the data with --block_size 40"),
    (dict(data_dir="nosuch"), "prepare some: python -m data.prepare.chat FILE... --out nosuch"),
])
def test_bad_settings(capitals, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train(load_config(None, settings(capitals, tmp_path / "out") | changes))


def test_another_tokenizer_is_refused(capitals, tmp_path):
    (tmp_path / "t.txt").write_text("abc " * 400)
    prepare_text([str(tmp_path / "t.txt")], str(tmp_path / "t"), "char")
    base = TASK | dict(data_dir=str(tmp_path / "t"), out_dir=str(tmp_path / "base"), max_iters=1)
    train(load_config(None, base))
    assert data_chat.main([write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "response": "b"}]),
                           "--tokenizer", str(tmp_path / "base" / "ckpt.pt"),
                           "--out", str(tmp_path / "out")]) == 2  # no end of text in it
    changes = settings(capitals, tmp_path / "chat", init_from=str(tmp_path / "base" / "ckpt.pt"))
    with pytest.raises(ValueError, match="tokenizer: checkpoint has"):
        train(load_config(None, changes))


def test_talk_needs_a_chat_model(capitals, capsys):
    from model.sample import main
    assert main(["--chat", "--ckpt", str(capitals / "base" / "ckpt.pt")]) == 2
    assert "not a chat model" in capsys.readouterr().err


def test_a_template_with_a_token_beyond_the_rows_of_the_model_is_refused():
    tokenizer = load_tokenizer("byte")
    tokenizer.n_vocab = 98
    assert encode_marked("a", tokenizer) == [97]
    with pytest.raises(DataError, match="its template uses token 98, the model knows 98"):
        encode_marked("b", tokenizer)
