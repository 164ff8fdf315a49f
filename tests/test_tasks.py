"""Tasks at evaluations: their numbers by hand (test_lm_eval.py: beside lm-eval's), on ranks, in
runs, resumed, what they cost, and what is refused."""

import functools
import json
import random
import shutil
import types

import pytest
import torch
import torch.nn.functional as F
from quiz import MODEL, Quiz, write_rows
from runs import SMALL, assert_a_kill_changes_nothing, go, metrics, on_two_ranks

import run_train
from data.chat_template import ChatTemplate
from data.tokenizer import load_tokenizer
from data.tokenizer_types import CharTokenizer, JsonTokenizer, RankTokenizer
from model import chat
from model.core.generate import generate
from model.core.load import load_model
from model.eval import tasks
from model.gpt import GPT
from train import train as training
from train.base.errors import SetupError
from train.checkpoint import load_checkpoint
from train.robust import Watchdog


@pytest.fixture(scope="module")
def quiz(data_dir, tmp_path_factory):
    return Quiz(data_dir, tmp_path_factory.mktemp("quiz"))


def test_log_probabilities_are_those_of_single_tokens(quiz):
    """Of rows of unlike length at once, from the logits of each alone."""
    model, tokenizer = load_model(quiz.ckpt)
    rows = [(tokenizer.encode(text), n) for text, n in (("line 5: the quick", 3), ("li", 1),
                                                         ("the lazy dog\n", 9), ("abc", 99))]
    for (ids, n), (score, greedy) in zip(rows, tasks.score_sequences(model, rows)):
        with torch.no_grad():
            p = model(torch.tensor([ids]))[0].double().log_softmax(-1)
        first = max(1, len(ids) - n)
        assert score == pytest.approx(sum(float(p[i - 1, ids[i]]) for i in range(first, len(ids))),
                                      rel=1e-6, abs=1e-6)
        assert greedy == all(int(p[i - 1].argmax()) == ids[i] for i in range(first, len(ids)))


@pytest.mark.parametrize("question", ["Two and two? ", "One\n\n", "x = \n  "])
def test_an_answer_is_scored_whole_after_a_blank_that_its_token_would_include(question):
    """The tokens of GPT-2: " four" is one."""
    ranks = {t: i for i, t in enumerate([*map(bytes, zip(range(256))), b" f", b" fo", b" fou",
                                         b" four", b"\n\n"])}
    tokenizer = RankTokenizer("ranks", ranks, r" ?\w+|\s+(?!\S)|[\s\S]", 261)
    row = tasks.ExampleReader(tokenizer, None, 48).parse(dict(question=question, answer="four"), 0)
    ids, n = row.sequences[0]
    assert tokenizer.decode(ids) == f"{question}four\n" and tokenizer.decode(ids[-n:]) == "four\n"


def spaced_tokenizer():
    """One that puts a space before each text, and joins a space and the letter after it, as Llama
    2's does."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = [chr(i) for i in (10, *range(33, 127))]
    words = ["\u2581", *letters, *("\u2581" + c for c in letters)]
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE(
        {word: i for i, word in enumerate(words)}, [("\u2581", c) for c in letters]))
    theirs.normalizer = tokenizers.normalizers.Sequence([
        tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")])
    theirs.add_special_tokens(["</s>", "<|assistant|>"])
    return JsonTokenizer(theirs.to_str(), len(words), len(words) + 2)


def test_an_answer_after_a_blank_gets_no_second_one():
    tokenizer = spaced_tokenizer()
    row = tasks.ExampleReader(tokenizer, None, 48).parse(dict(question="Two? ", answer="four"), 0)
    ids, n = row.sequences[0]
    assert b"".join(map(tokenizer.bytes_of, ids)) == b" Two? four\n" and n == 5


class Recites:
    """A model that generates `ids`."""
    wte = types.SimpleNamespace(weight=torch.zeros(1))
    config = types.SimpleNamespace(vocab_size=259)

    def __init__(self, ids):
        self.ids = torch.tensor(ids)

    def trunk(self, idx):
        return torch.arange(idx.size(1)).expand(idx.shape)[..., None]

    def logits(self, x):
        return F.one_hot(self.ids[x[..., 0] + 1], 259).float()


@pytest.mark.parametrize(("text", "right"), [
    ("four\n", True), ("four\n\n", True), ("four", True), ("four!\n", False), ("four more", False),
    ("fou", False)])
def test_an_answer_ends_at_a_line_end_in_any_token(text, right):
    """Two line ends, or a line end and what is before it, can be one token."""
    ranks = {bytes([i]): i for i in range(256)} | {b"\n\n": 256, b"!\n": 257}
    tokenizer = RankTokenizer("ranks", ranks, r"\w+|\W+", 258)
    reader = tasks.ExampleReader(tokenizer, None, 48)
    for answer in "four", "four!":
        row = reader.parse(dict(question="Two?\n", answer=answer), 0)
        model = Recites(tokenizer.encode("Two?\n" + text) + [258] * 9)
        scores = tasks.score_sequences(model, row.sequences, tasks.find_ends(tokenizer, 259))
        assert tasks.judge(row, scores)[0] == (right if answer == "four" else text == "four!\n")


def test_an_answer_may_end_the_text(tmp_path):
    """As in documents of a question and its answer. So it is in lm-eval, whose generation ends at a
    line end or the end token."""
    from data.prepare import main
    answers = dict(one="eins", two="zwei", three="drei")
    docs = write_rows(tmp_path / "docs.jsonl",
                      [dict(text=f"{q}\n{a}") for q, a in answers.items()] * 40)
    assert main([docs, "--out", str(tmp_path / "d"), "--tokenizer", "byte"]) == 0
    asked = [dict(question=f"{q}\n", answer=a) for q, a in answers.items()]
    asked.append(dict(asked[0], answer="ein"))
    last = go(tmp_path / "d", tmp_path / "run", **MODEL, max_iters=150, eval_interval=150,
              lr_decay_iters=150, eval_tasks=[write_rows(tmp_path / "say.jsonl", asked)])
    assert last["history"][-1]["val_say"] == 3 / 4
    assert "val_say_norm" not in last["history"][-1]


# -----------------------------------------------------------------------------
# in a run

def test_numbers_by_hand(quiz, tmp_path):
    """All three kinds in one file: the share that is right, of which chance had a quarter and a
    half of two rows."""
    rows = [json.loads(open(path).readline()) for path in quiz.files()]
    rows.append(dict(query="line", choices=["x", "y"], gold="y"))
    path = write_rows(tmp_path / "my-own.jsonl", rows)
    found = quiz.evaluate(tmp_path / "out", eval_tasks=[path, *quiz.files()], eval_task_rows=20)
    model, tokenizer = load_model(quiz.ckpt)
    own = tasks.ExampleReader(tokenizer, None, 48)
    right = 0
    for record in rows:
        row = own.parse(record, 0)
        if "choices" in record:
            p = [score for score, _ in tasks.score_sequences(model, row.sequences)]
            right += p.index(max(p)) == row.answer
        else:
            text = record.get("question") or record["context"]
            ids = torch.tensor([tokenizer.encode(text)])
            said = tokenizer.decode(generate(model, ids, 12, 0)[0, ids.size(1):].tolist())
            right += (said.startswith(record["continuation"]) if "continuation" in record
                      else said.split("\n")[0].lstrip() == record["answer"])
    share, chance = right / 4, (1 / 4 + 1 / 2) / 4
    assert found["val_my_own"] == share
    assert found["val_my_own_centred"] == pytest.approx((share - chance) / (1 - chance))
    acc = found["val_choice"]
    assert found["val_choice_centred"] == pytest.approx((acc - 0.25) / 0.75)
    assert "val_cloze_norm" not in found and "val_written_centred" not in found


@pytest.mark.parametrize("how, kinds, rows, expected", [
    ("ddp", ("choice", "cloze", "written"), 20, 5),
    ("fsdp", ("cloze", "written"), 5, 2)])  # a batch each: other forward passes on either rank
def test_two_ranks_equal_one(quiz, tmp_path, how, kinds, rows, expected):
    one = quiz.evaluate(tmp_path / "one", *kinds, eval_task_rows=rows)
    two = on_two_ranks(tmp_path / "two", SMALL | quiz.how(
        *kinds, data_dir=str(quiz.data_dir), eval_task_rows=rows, distributed=how))[-1]
    names = [name for name in one if name.startswith(("val_choice", "val_cloze", "val_written"))]
    assert len(names) == expected and {n: two[n] for n in names} == {n: one[n] for n in names}


@pytest.mark.ci
def test_a_run_stops_by_a_task_and_keeps_its_best(data_dir, quiz, tmp_path):
    how = MODEL | dict(eval_tasks=quiz.files("cloze"), early_stopping_metric="val_cloze",
                       early_stopping_mode="max", max_iters=40, eval_interval=8, eval_iters=6,
                       ema=0.9)
    history = go(data_dir, tmp_path, **how)["history"]
    best = max(history[1:], key=lambda r: (r["val_cloze"], -r["val_loss"]))
    assert load_checkpoint(tmp_path / "ckpt_best.pt")["iter_num"] == best["iter"]
    assert 0 < best["val_cloze"] and {"val_cloze_ema", "val_loss_ema"} <= best.keys()
    assert [line["val_cloze"] for line in metrics(tmp_path) if "val_loss" in line] == [
        line["val_cloze"] for line in history]
    assert "cloze 0." in (tmp_path / "train.log").read_text()
    last = go(data_dir, tmp_path / "b", **how | dict(early_stopping_patience=1,
                                                    early_stopping_min_delta=1.0))
    assert "no better val_cloze" in last["finished"]


def test_weights_are_the_same_without_tasks(data_dir, quiz, tmp_path):
    how = MODEL | dict(max_iters=6, eval_interval=3, dropout=0.1)
    go(data_dir, tmp_path / "a", **how)
    go(data_dir, tmp_path / "b", **how, eval_tasks=quiz.files())
    a, b = (load_checkpoint(tmp_path / n / "ckpt.pt")["model"] for n in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.matrix(121)
def test_killed_and_resumed_with_tasks(data_dir, quiz, tmp_path):
    """kill -9 in a run with tasks of all kinds at its evaluations, one of which says what is the
    best checkpoint -> every tensor, counter and number of the tasks is exact"""
    how = MODEL | dict(max_iters=24, eval_interval=6, save_interval=3, dropout=0.1,
                       eval_tasks=quiz.files(), early_stopping_metric="val_choice_norm",
                       early_stopping_mode="max", eval_task_rows=10)
    assert_a_kill_changes_nothing(data_dir, tmp_path, **how)


# -----------------------------------------------------------------------------
# what they cost

def read_tokens(monkeypatch):
    """A list of the tokens of every forward pass from here on."""
    seen, trunk = [], GPT.trunk

    def counting(self, idx, *rest, **more):
        seen.append(idx.numel())
        return trunk(self, idx, *rest, **more)
    monkeypatch.setattr(GPT, "trunk", counting)
    return seen


@pytest.mark.parametrize("limit, used", [(0, 200), (7, 7), (500, 200)])
def test_the_first_rows_are_evaluated(quiz, tmp_path, capsys, limit, used):
    quiz.evaluate(tmp_path / "a", "choice", "cloze", eval_task_rows=limit)
    text = f"choice ({used} of 200 rows), cloze ({used} of 200 rows)"
    assert f"Tasks at each evaluation: {text}" in capsys.readouterr().out


def test_names_are_known_from_a_batch_of_each(quiz, tmp_path, monkeypatch):
    seen = read_tokens(monkeypatch)
    with monkeypatch.context() as without:
        without.setattr(training, "check_metric_names", lambda run: None)
        quiz.evaluate(tmp_path / "b", "cloze")
    whole = len(seen)
    seen.clear()
    quiz.evaluate(tmp_path / "c", "cloze", early_stopping_metric="val_cloze")
    assert len(seen) == whole + 2


def test_the_time_limit_is_per_batch(quiz, tmp_path, monkeypatch):
    limits = []
    monkeypatch.setattr(Watchdog, "restart", lambda self, slow=False: limits.append(slow))
    monkeypatch.setattr(tasks, "batch_by_width", lambda examples, size: [[e] for e in examples])
    monkeypatch.setattr(training, "check_metric_names", lambda run: None)
    quiz.evaluate(tmp_path, "cloze", eval_task_rows=30, eval_iters=4, step_timeout=60)
    assert sum(limits) >= 4 + 30


def test_batches_hold_no_more_than_asked():
    rng = random.Random(3)
    rows = [tasks.Example(0, [([1] * rng.randrange(2, 30), 1)] * rng.choice([1, 4]), [1], 0)
            for _ in range(100)]
    found = tasks.batch_by_width(rows, 600)
    assert sorted(map(id, sum(found, []))) == sorted(map(id, rows))
    assert all(sum(len(r.sequences) for r in some) * max(r.width for r in some) <= 600
               for some in found)
    assert len(found) < 1.3 * sum(r.width * len(r.sequences) for r in rows) / 600 + 1


# -----------------------------------------------------------------------------
# chats

def test_a_chat_model_is_asked_as_it_learned(data_dir, tmp_path):
    """In its template; what it writes is what model.sample --chat says, up to its end token."""
    rows = [dict(prompt=f"{a}?", response=a.upper()) for a in ("one", "two", "three", "four")] * 9
    from data.prepare.chat import main
    path = write_rows(tmp_path / "chats.jsonl", rows)
    assert main([path, "--out", str(tmp_path / "c"), "--tokenizer", "byte", "--block_size=48"]) == 0
    asked = [dict(question=r["prompt"], answer=r["response"] + "x" * (i == 1))
             for i, r in enumerate(rows[:4])]
    asked_choices = [dict(question=r["prompt"], choices=[r["response"], "SEVEN"], answer=0)
                     for r in rows[:4]]
    how = MODEL | dict(model="chat", data_dir=str(tmp_path / "c"), max_iters=60,
                       vocab_size=None, lr_decay_iters=60, eval_interval=60, eval_task_rows=0,
                       eval_tasks=[write_rows(tmp_path / "say.jsonl", asked),
                                   write_rows(tmp_path / "pick.jsonl", asked_choices)])
    del how["tokenizer"]
    last = go(how.pop("data_dir"), tmp_path / "run", **how)["history"][-1]
    model, tokenizer = load_model(tmp_path / "run/ckpt.pt")
    right = [tokenizer.decode(chat.generate_answer(model, tokenizer, model.template.prompt_ids(
        [("user", row["question"])], tokenizer), 12)) == row["answer"]
        for row in asked]
    assert last["val_say"] == sum(right) / 4 and right[1] is False and any(right)
    assert last["val_pick"] == 1.0


@pytest.mark.parametrize("header, before", [
    ("<|assistant|>\n", ""), ("[/INST]", " "), ("<|assistant|>\n", "<think>\n\n</think>\n\n")])
def test_a_choice_has_the_ids_that_a_chat_model_has_learned(header, before):
    """Also if the tokenizer begins a text with a space, as Llama 2's, which follows no header."""
    tokenizer = spaced_tokenizer()
    template = ChatTemplate(dict(ends=[tokenizer.eot_token], jinja=(
        "{% for m in messages %}{{ (" + repr(header + before) + " if m.role == 'assistant' else '')"
        " + m.content + '</s>' }}{% endfor %}{{ " + repr(header) + " if add_generation_prompt }}")))
    row = tasks.ExampleReader(tokenizer, template, 99).parse(
        dict(question="Where?", choices=["Rome", "Paris"], answer="Paris"), 0)
    for text, (ids, n) in zip(("Rome", "Paris"), row.sequences):
        learned, _ = template.sequences([("user", "Where?"), ("assistant", text)], tokenizer)[0]
        assert ids == learned[:-1].tolist() and n == len(text)


# -----------------------------------------------------------------------------
# what is refused

BAD = [({"text": "a"}, "expected question and answer"), ([1], "expected an object"),
       (dict(question="a", choices=["b"], answer=0), "choices: expected two or more"),
       (dict(question="a", choices=["b", ""], answer=0), "without an empty text"),
       (dict(question="a", choices=["b", "c"], answer=2), "answer: '2' is not one of"),
       (dict(question="a", choices=["b", "c"], answer=True), "answer: 'True' is not one of"),
       (dict(question="a", choices=["b", "c"], answer="d"), "answer: 'd' is not one of"),
       (dict(question="a", choices=["b", "c", "b"], answer=2), "choices: 'b', the answer, is"),
       (dict(question="a", choices=["x", "x"], answer="x"), "choices: 'x', the answer, is"),
       (dict(question="a", answer=" \n"), "without an empty text"),
       (dict(question=1, choices=["b", "c"], answer=0), "question: expected a text"),
       (dict(question="a", answer=["b"]), "answer: expected a text"),
       (dict(context="a", continuation=""), "without an empty text")]


def test_bad_rows_are_a_line_each_before_any_work(data_dir, tmp_path, capsys):
    path = tmp_path / "bad.jsonl"
    good = json.dumps(dict(question="a", answer="b"))
    path.write_text("\n".join([good, *(json.dumps(row) for row, _ in BAD), "{no json"]))
    args = [f"--{k}={v}" for k, v in MODEL.items()]
    code = run_train.main(["--config", "train/config_test.yaml", *args, "--n_head=2",
                           f"--data_dir={data_dir}", f"--out_dir={tmp_path}/out",
                           f"--eval_tasks={path}"])
    told = capsys.readouterr().err
    assert code == 2 and f"{len(BAD) + 1} problems" in told
    for number, (_, what) in enumerate(BAD, 2):
        assert any(f"{path}:{number}" in line and what in line for line in told.split("\n")), what
    assert f"{path}:{len(BAD) + 2}: not valid JSON" in told
    assert not (tmp_path / "out" / "train.log").exists()


@pytest.mark.parametrize("rows, name, changes, message", [
    ([], "a", {}, "^eval_tasks: .*a.jsonl: no rows in it"),
    ([dict(question="a", answer="b")], "loss", {}, "eval_tasks: loss: another number has"),
    ([dict(question="a", answer="b")], "ppl", {}, "already have val_ppl"),
    ([dict(question="a", answer="b")], "a", dict(tokenizer=None), "expected a language model"),
    ([dict(question="a", answer="b")], "a", dict(eval_interval=0), "eval_tasks: .* needs eval"),
    (None, "a", {}, "^eval_tasks: .*a.jsonl: no such file"),
])
def test_what_cannot_be_evaluated_is_refused(data_dir, tmp_path, rows, name, changes, message):
    path = tmp_path / f"{name}.jsonl"
    if rows is not None:
        write_rows(path, rows)
    with pytest.raises(ValueError, match=message):
        go(data_dir, tmp_path / "out", **MODEL | dict(eval_tasks=[str(path)]) | changes)


@pytest.mark.parametrize("names, changes, message", [
    (["pick", "pick_norm"], {}, "eval_tasks: pick_norm: another number has the same name"),
    (["pick_centred", "pick"], {}, "eval_tasks: pick_centred: another number has the same name"),
    (["pick", "sub/pick"], {}, "eval_tasks: pick, pick_centred, pick_norm: another number"),
    (["count"], {}, "eval_tasks: count: another number has the same name; rename the file"),
    (["cont", "cont_ema"], dict(ema=0.9), "ema: evaluations of this run already have val_cont_ema"),
    (["loss_ema"], dict(ema=0.9), "ema: evaluations of this run already have val_loss_ema"),
    (["loss_web"], dict(data_dir="{0}/web:1,{0}/code:1"), "eval_tasks: .* have val_loss_web; ren"),
    ([], dict(data_dir="{0}/web:1,{0}/web_ema:1", ema=0.9), "ema: .* already have val_loss_web_e"),
    ([], dict(data_dir="{0}/web:1,{0}/ema:1", ema=0.9), "ema: evaluations .* have val_loss_ema"),
    (["cont", "loss_norm"], dict(data_dir="{0}/web:1,{0}/ema:1"), "")])
def test_numbers_with_the_same_name_are_refused_before_the_first_step(
        data_dir, tmp_path, names, changes, message):
    rows = dict(pick=[dict(question="a", choices=["b", "c"], answer=0)])
    (tmp_path / "sub").mkdir()
    paths = [tmp_path / f"{name}.jsonl" for name in names]
    for path in paths:
        write_rows(path, rows.get(path.stem, [dict(question="a", answer="b")]))
    for name in ("web", "code", "ema", "web_ema"):
        shutil.copytree(data_dir, tmp_path / name)
    settings = MODEL | dict(data_dir=str(data_dir), eval_tasks=[*map(str, paths)], max_iters=4,
                            eval_on_start=False) | changes
    folders = settings.pop("data_dir").format(tmp_path)
    if not message:
        assert go(folders, tmp_path / "out", **settings)["finished"]
        return
    with pytest.raises(SetupError, match=message):
        go(folders, tmp_path / "out", **settings)
    assert not (tmp_path / "out" / "ckpt.pt").exists()
    log = tmp_path / "out" / "train.log"
    assert not log.exists() or "iter 0:" not in log.read_text()


def test_the_example_is_whole():
    """Every row can be read."""
    reader = tasks.ExampleReader(load_tokenizer("byte"), None, 128)
    rows = reader.read("train/configs/python_example.jsonl", 0)
    assert len(rows) > 40
    right = functools.reduce(lambda counts, row: counts | {row.answer: counts[row.answer] + 1},
                             rows, dict.fromkeys(range(4), 0))
    assert max(right.values()) - min(right.values()) < 4  # no place is the likely one


def test_choices_that_are_equal_as_tokens_are_refused():
    reader = tasks.ExampleReader(load_tokenizer("byte"), None, 128)
    with pytest.raises(ValueError, match="the answer, is there twice"):
        reader.parse(dict(question="q", choices=["a", "b", "a"], answer=0), 0)
    assert reader.parse(dict(question="q", choices=["a", "b", "b"], answer=0), 0).answer == 0


def test_an_answer_without_a_question_begins_after_the_end_of_text():
    bytes_of, letters = load_tokenizer("byte"), CharTokenizer(" a\n")
    row = dict(question="", answer="a")
    assert tasks.ExampleReader(bytes_of, None, 128).parse(row, 0).sequences == [
        ([bytes_of.eot_token, *b" a\n"], 3), ([bytes_of.eot_token, *b" a", tasks.END], 3)]
    with pytest.raises(ValueError, match="the text before it, has no token"):
        tasks.ExampleReader(letters, None, 128).parse(row, 0)
