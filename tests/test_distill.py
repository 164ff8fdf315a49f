"""Distillation: the loss against one of whole logits, a teacher that stays out of the checkpoint,
ranks, resume."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY
from processes import python
from runs import (
    SMALL,
    WAYS,
    assert_a_kill_changes_nothing,
    assert_keys_change_only,
    assert_two_ranks_equal_one,
    go,
)
from test_grpo import made, rewarded, settings  # noqa: F401  a fixture

from data.prepare import prompts as data_prompts
from model import distill, grpo
from model.convert import main as convert
from model.core.init import stable_hash
from model.core.load import load_model, saved_config
from model.core.weights import load_frozen
from model.distill import Student
from model.dpo import PreferenceGPT
from model.gpt import GPT, GPTConfig
from train.base.errors import CheckpointError, DataError
from train.checkpoint import load_checkpoint, save_checkpoint
from train.config import load_config
from train.train import train


@pytest.fixture(scope="module")
def teacher(data_dir, tmp_path_factory):
    """A trained GPT, wider than its students."""
    out = tmp_path_factory.mktemp("teacher")
    train(load_config(None, TINY | dict(data_dir=str(data_dir), out_dir=str(out), max_iters=30)))
    return str(out / "ckpt.pt")


def changes(teacher, **more):
    return dict(model="distill", teacher=teacher, distill_weight=0.8) | more


@pytest.mark.parametrize("weight, temperature, n_teachers", [
    (0.5, 1.0, 1), (1.0, 2.0, 3), (0.7, 0.5, 2), (0.0, 1.0, 1)])
def test_loss_and_gradients_from_whole_logits(weight, temperature, n_teachers):
    """In training at the temperature, in evaluations at 1."""
    torch.manual_seed(0)
    shape = dict(n_layer=1, n_head=2, vocab_size=50, block_size=12)
    student = Student(GPTConfig(n_embd=16, **shape), seed=1)
    big = [GPT(GPTConfig(n_embd=32, **shape | dict(vocab_size=60)), seed=seed)
           for seed in range(2, 2 + n_teachers)]
    with torch.no_grad():
        for p in (p for model in (student, *big) for p in model.parameters()):
            p.mul_(3)  # so that they differ
    student.frozen = tuple(model.requires_grad_(False) for model in big)
    student.keys = SimpleNamespace(distill_weight=weight, distill_temperature=temperature)
    idx, targets = torch.randint(50, (3, 12)), torch.randint(50, (3, 12))
    targets[0, :7] = targets[2] = -1
    z, *t = (model(idx)[..., :50] for model in (student, *big))
    own = F.cross_entropy(z.flatten(0, 1), targets.flatten(), ignore_index=-1)
    def divergence(T):
        q, p = F.softmax(z / T, -1), sum(F.softmax(x / T, -1) for x in t) / n_teachers
        return (p * (p.log() - q.log())).sum(-1)[targets != -1].mean()
    kl = divergence(temperature)
    expected = (1 - weight) * own + weight * temperature**2 * kl
    loss, sums = student(idx, targets)
    torch.testing.assert_close(loss, expected)
    parameters = list(student.parameters())
    for a, b in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(
            expected, parameters), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)
    assert student.numbers(sums | dict(loss=loss)) == dict(kl=pytest.approx(kl.item()))
    loss, sums = student.eval()(idx, targets)  # an evaluation: the text's own
    torch.testing.assert_close(loss, own)
    found = student.numbers(sums | dict(loss=loss * sums["count"]))
    assert found["kl"] == pytest.approx(divergence(1).item())
    mean = sum(F.softmax(x, -1) for x in t) / n_teachers
    assert found["teacher_loss"] == pytest.approx(F.nll_loss(
        mean.log().flatten(0, 1), targets.flatten(), ignore_index=-1).item())
    assert found["ppl"] == pytest.approx(own.exp().item())
    assert student(idx, torch.full_like(idx, -1))[0] == 0  # nothing counts


def test_keys_of_the_loss_change_no_evaluation(data_dir, tmp_path, teacher):
    assert_keys_change_only([], data_dir, tmp_path, changes(teacher), distill_weight=0.1,
                            distill_temperature=4.0)


def test_it_learns_what_the_teacher_expects_and_keeps_it_out(data_dir, tmp_path, teacher):
    """With the teacher alone, the divergence from it falls; what is saved is a GPT."""
    last = go(data_dir, tmp_path / "out", **changes(teacher, distill_weight=1.0, max_iters=30))
    kl = [r["val_kl"] for r in last["history"]]
    assert kl[-1] < 0.7 * kl[0]
    state = load_checkpoint(tmp_path / "out/ckpt.pt")
    plain = go(data_dir, tmp_path / "plain", max_iters=1)
    assert plain and state["model"].keys() == load_checkpoint(
        tmp_path / "plain/ckpt.pt")["model"].keys()
    (tmp_path / "gone").mkdir()
    moved = dict(state["config"], teacher="nowhere.pt")  # it needs no teacher to be used
    model, _ = load_model(tmp_path / "out/ckpt.pt")
    assert not model.frozen and moved["model"] == "distill"
    again = go(data_dir, tmp_path / "more", init_from=str(tmp_path / "out/ckpt.pt"), max_iters=0)
    assert again["history"][0]["val_loss"] == pytest.approx(last["history"][-1]["val_loss"])


def test_flops_count_a_forward_pass_of_the_teacher(teacher):
    student = Student(GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=256, block_size=8))
    alone, (big, _) = student.flops_per_unit(), load_model(teacher)
    whole = big.flops_per_unit()
    student.frozen = (big.requires_grad_(False),)
    head = student.wte.weight.numel()  # the divergence computes the output layer once more
    assert student.flops_per_unit() == alone + whole / 3 + 6 * head


def test_flops_of_a_teacher_are_per_token_for_any_model_type():
    """DPO's are per pair, GRPO's per prompt with sampled answers."""
    shape = GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=256, block_size=8)
    student, flops = Student(shape), set()
    for model_type in (GPT, PreferenceGPT, grpo.PolicyGPT):
        teacher = model_type(shape).requires_grad_(False)
        teacher.row_tokens, teacher.keys = 8, SimpleNamespace(group_size=4, answer_tokens=4)
        student.frozen = (teacher,)
        flops.add(student.teacher_flops())
    assert len(flops) == 1


def test_flops_of_answers_are_those_of_rows():
    """Of prompt and answer, which the teacher computes as well."""
    student, _ = answering_student()
    student.row_tokens = 26
    (teacher,), student.frozen = student.frozen, ()
    alone = student.flops_per_unit()
    student.frozen = (teacher,)
    assert student.flops_per_unit() == alone + 26 * teacher.flops_per_unit()


@pytest.mark.parametrize("more, message", [
    (dict(teacher=""), "teacher: missing"), (dict(teacher="nowhere.pt"), "nowhere.pt"),
    (dict(block_size=64), "block_size, 64"),
    (dict(distill_weight=2.0), "distill_weight"),
    (dict(resume="never", out_dir="{}"), "in out_dir"),
    (dict(vocab_size=60000), "expected a GPT with at least the 60000 ids"),
])
def test_what_cannot_be_taught_is_refused(data_dir, tmp_path, teacher, more, message):
    if "out_dir" in more:
        more = more | dict(out_dir=str(Path(teacher).parent))
    with pytest.raises(ValueError, match=message):
        train(load_config(None, SMALL | dict(data_dir=str(data_dir), out_dir=str(tmp_path))
                          | changes(teacher) | more))


@pytest.mark.parametrize("of_file, of_run", [("float16", "bfloat16"), ("bfloat16", "float16")])
def test_a_teacher_in_the_other_half_precision(data_dir, tmp_path, teacher, of_file, of_run):
    """Its file may be in float16, as many published ones, and the run in bfloat16."""
    file = str(tmp_path / "half.safetensors")
    convert(["--ckpt", teacher, "--to", file, "--save_precision", of_file])
    losses = []
    for path in (teacher, file):
        keys = changes(path, dtype=of_run, batch_size=16, max_iters=1)
        run = go(data_dir, tmp_path / str(len(losses)), **keys)
        losses.append(run["history"][0]["val_teacher_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


def test_each_of_several_teachers_is_a_path(data_dir, tmp_path, teacher, monkeypatch):
    """without the space after the comma, and with ~, which a shell expands in the first one only"""
    monkeypatch.setenv("HOME", str(Path(teacher).parent))
    go(data_dir, tmp_path, **changes(f"{teacher}, ~/ckpt.pt", max_iters=1))
    assert len(set(load_checkpoint(tmp_path / "ckpt.pt")["spec"]["teacher"].split(","))) == 1
    with pytest.raises(CheckpointError, match="in out_dir, and --resume never moves"):
        go(data_dir, tmp_path, **changes(f"{teacher}, {tmp_path}/ckpt.pt"), resume="never")


def test_the_batch_of_a_teacher_need_not_suit_the_ranks(monkeypatch):
    """a teacher that was trained with 8 samples per step on 2 ranks of HSDP, read by 3 ranks"""
    monkeypatch.setenv("WORLD_SIZE", "3")
    config = saved_config(dict(batch_size=4, gradient_accumulation_steps=2, distributed="hsdp",
                               shard_size=2))
    assert (config.batch_size, config.gradient_accumulation_steps) == (4, 2)
    assert (config.distributed, config.shard_size, config.world_size) == ("hsdp", 2, None)


def test_another_teacher_is_no_resume(data_dir, tmp_path, teacher):
    go(data_dir, tmp_path / "out", **changes(teacher, max_iters=4))
    go(data_dir, tmp_path / "other", max_iters=2, seed=5, block_size=16)
    with pytest.raises(ValueError, match="teacher: checkpoint has"):
        go(data_dir, tmp_path / "out", **changes(str(tmp_path / "other/ckpt.pt"), max_iters=8))


def test_the_result_is_exported_and_gets_adapters(data_dir, tmp_path, teacher):
    go(data_dir, tmp_path / "out", **changes(teacher, max_iters=2))
    ours = assert_exported(tmp_path / "out/ckpt.pt", tmp_path)
    go(data_dir, tmp_path / "lora", model="lora", backbone=str(tmp_path / "out/ckpt.pt"),
       max_iters=0)
    idx = torch.arange(8)[None]  # adapters start at zero
    torch.testing.assert_close(load_model(tmp_path / "lora/ckpt.pt")[0](idx), ours(idx))


def assert_exported(ckpt, folder):
    """Export `ckpt` in both forms, which compute the same; return the model."""
    ours, _ = load_model(ckpt)
    idx = torch.arange(8)[None]
    for name in ("hf", "gpt.safetensors"):
        assert convert(["--ckpt", str(ckpt), "--to", str(folder / name)]) == 0
        theirs, _ = load_model(folder / name)
        torch.testing.assert_close(ours(idx), theirs(idx))
        assert (theirs.template is None) == (ours.template is None)
    return ours


@pytest.mark.matrix(124)
def test_killed_and_resumed(data_dir, tmp_path, teacher):
    """kill -9 while a model learns from a teacher (distillation) -> the end is exact"""
    more = changes(teacher, max_iters=14, save_interval=3, dropout=0.1, lr_decay_iters=20)
    assert_a_kill_changes_nothing(data_dir, tmp_path, **more)


@pytest.mark.parametrize("how", WAYS)
def test_two_ranks_equal_one(data_dir, tmp_path, teacher, how):
    settings = TINY | changes(teacher, data_dir=str(data_dir), max_iters=6, eval_interval=3)
    assert_two_ranks_equal_one(tmp_path, settings, how, val_loss=1e-5, val_kl=1e-4)


# -----------------------------------------------------------------------------
# on-policy: the student answers

def test_a_teacher_is_frozen_and_a_missing_one_is_named(teacher, tmp_path):
    model, tokenizer, state = load_frozen(teacher, "teacher")
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert tokenizer is None and len(state["digest"]) == 64  # data without one
    with pytest.raises(CheckpointError, match="^teacher: .* no such file; .* --teacher FILE"):
        load_frozen(str(tmp_path / "gone.pt"), "teacher")


@pytest.fixture(scope="module")
def answering(made, tmp_path_factory):  # noqa: F811
    """The configuration of a run in which a chat model learns from a better one."""
    out = tmp_path_factory.mktemp("better")
    both = settings(made, out)
    own = [both.pop(name) for name in ("reward", "group_size", "answer_tokens")]
    train(load_config(None, both | dict(model="chat", data_dir=str(made / "chats"), max_iters=60,
                                        learning_rate=1e-2)))
    return both | dict(model="distill", on_policy=True, teacher=str(out / "ckpt.pt"),
                       answer_tokens=own[2])


def answering_student(T=1.0):
    """A student of random weights, a larger teacher, and the arguments of
    forward()."""
    model = rewarded()
    student = distill.AnsweringStudent(model.config)
    student.load_state_dict(model.state_dict())
    student.keys, student.reward_function = model.keys, model.reward_function
    student.keys.distill_temperature = T
    teacher = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=64, vocab_size=300, block_size=64))
    with torch.no_grad():
        for p in teacher.parameters():
            p.mul_(3)
    student.frozen = (teacher.requires_grad_(False),)
    numbers = torch.tensor([0, 1, 2])
    prompts, lengths = torch.randint(257, (3, 20)), torch.tensor([4, 20, 9])
    return student, (prompts, lengths, numbers, numbers)


def logits_alone(model, prompt, answer):
    return model(torch.tensor([prompt + answer]))[0, len(prompt) - 1:-1, :257]


@pytest.mark.parametrize("T", [1.0, 2.0])
def test_loss_and_gradients_of_own_answers_from_whole_logits(T):
    """The mean over all tokens of KL(student, teacher), an answer at a time. In
    evaluations at the temperature 1, of the likeliest answers."""
    student, batch = answering_student(T)
    student.reward_function.ends = list(range(0, 257, 2))  # many short answers
    prompts, lengths, *_ = batch
    seeds = [stable_hash(1, f"answers {i}") for i in range(3)]
    for training in (True, False):
        T = T if training else 1.0
        student.eval()
        answers = student.generate_answers(prompts, lengths, 1, seeds if training else None)
        student.train(training)
        total = 0.0
        for i, answer in enumerate(answers):
            asked = prompts[i, :lengths[i]].tolist()
            q, p = (F.softmax(logits_alone(m, asked, answer) / T, -1)
                    for m in (student, student.frozen[0]))
            total = total + T**2 * (q * (q.log() - p.log())).sum()
        n = sum(map(len, answers))
        loss, sums = student(*batch)
        torch.testing.assert_close(loss, total / n, rtol=1e-4, atol=1e-6)
        assert sums["count"] == n
        assert student.numbers(sums | dict(loss=loss))["length"] == pytest.approx(n / 3)
        parameters = list(student.parameters())
        for a, b in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(
                total / n, parameters), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_loss_of_own_answers_is_that_of_trl():
    """By the code of TRL itself: beta 1 is the reverse divergence."""
    theirs = pytest.importorskip("trl.trainer.distillation_trainer")._chunked_divergence_loss
    student, batch = answering_student(2.0)
    tokens, weights, sums = student.collect_answers(*batch)
    loss, teacher = student(*batch)[0], student.frozen[0]
    x, y = (grpo.answer_states(model, tokens) for model in (student, teacher))
    heads = [(model.lm_head or model.wte).weight[:257] for model in (student, teacher)]
    expected, _, n = theirs(x, y, *heads, weights > 0, beta=1.0, temperature=2.0)
    assert n == sums["count"]
    assert float(loss) == pytest.approx(4 * float(expected), rel=1e-4)


@pytest.mark.ci
def test_it_learns_from_a_teacher_of_its_answers(answering, tmp_path, capsys):
    """The divergence falls; the result is a chat model, which needs no teacher."""
    last = train(load_config(None, answering | dict(out_dir=str(tmp_path / "out"), max_iters=30,
                                                    sample_tokens=4)))
    loss = [r["val_loss"] for r in last["history"]]
    assert loss[-1] < 0.5 * loss[0]
    assert {"val_exact", "val_length"} <= last["history"][0].keys()
    assert "### Assistant:" in (tmp_path / "out/samples.txt").read_text()
    assert capsys.readouterr().out.rstrip().endswith("ckpt.pt --chat")  # the next command
    said = python("-m", "model.sample", "--ckpt", tmp_path / "out/ckpt.pt", "--chat", "--prompt",
                  "7?", "--max_new_tokens", "3")
    assert said.returncode == 0, said.stderr
    assert_exported(tmp_path / "out/ckpt.pt", tmp_path)


def test_a_teacher_with_another_tokenizer_is_refused(answering, tmp_path):
    state = load_checkpoint(answering["teacher"])
    chars = "".join(map(chr, range(256, 256 + state["spec"]["vocab_size"])))
    state["spec"]["tokenizer"] = state["tokenizer"] = dict(kind="char", chars=chars)
    save_checkpoint(tmp_path / "t.pt", state)
    with pytest.raises(CheckpointError, match="t.pt is from a different .*\n.*tokenizer:"):
        train(load_config(None, answering | dict(teacher=str(tmp_path / "t.pt"))))


def test_prompts_without_answers_to_compare_with_are_refused(answering, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(9)))
    assert data_prompts.main([str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "a"),
                              "--tokenizer", answering["teacher"], "--val_fraction", "0.3"]) == 0
    with pytest.raises(DataError, match="^some rows of .* no reference answer, with which answers"):
        train(load_config(None, answering | dict(data_dir=str(tmp_path / "a"))))


@pytest.mark.matrix(124)
def test_killed_and_resumed_it_writes_the_same_answers(answering, tmp_path):
    """kill -9 while a model answers prompts and learns from a teacher -> the answers are the same,
    the end is exact"""
    more = answering | dict(max_iters=14, save_interval=3, dropout=0.1, lr_decay_iters=20)
    more = {name: value for name, value in more.items() if name not in ("data_dir", "out_dir")}
    assert_a_kill_changes_nothing(answering["data_dir"], tmp_path, **more)


@pytest.mark.parametrize("how", WAYS)
def test_two_ranks_that_answer_equal_one(answering, tmp_path, how):
    assert_two_ranks_equal_one(tmp_path, answering, how, val_loss=1e-4, val_exact=0, val_length=0)
