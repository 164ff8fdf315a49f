"""Rewards: prompts of every form, answers that depend on seed and sample alone, GRPO's loss and
gradients against its formula, rewards of a person's own, ranks, resume."""

import collections
import decimal
import io
import itertools
import json
import os
import re
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, run
from runs import Program, assert_same, metrics, on_two_ranks, tensors

import run_train
from data.prepare import chat as data_chat
from data.prepare import prompts as data_prompts
from data.prepare.prompts import to_question
from data.tokenizer import load_tokenizer
from model.core.generate import generate
from model.core.init import stable_hash
from model.core.load import load_model, saved_config
from model.gpt import GPT, GPTConfig
from model.grpo import (
    PolicyGPT,
    RewardFunction,
    answer_logps,
    collate_rows,
    load_reward,
    pack_answers,
)
from train.base.console import Console
from train.base.errors import UserError
from train.checkpoint import load_checkpoint
from train.config import load_config
from train.lr_scheduler import SpikeDetector
from train.robust import run_reporting_errors
from train.train import train

BYTES = load_tokenizer("byte")
SHAPE = dict(TINY, block_size=64, qk_norm=True)
SHARE = "def reward(prompt, answer, row):\n    return sum(c < '@' for c in answer) / 5\n"
MOO = [{"role": "user", "content": "Say moo"}, {"role": "assistant", "content": "moo"}]


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder with a chat model "chat/ckpt.pt", 40 "prompts" of unequal lengths for it, and
    "share.py", a reward for each digit and the like)"""
    folder = tmp_path_factory.mktemp("grpo")
    chats = write_jsonl(folder / "chats.jsonl", [{"prompt": f"{10 ** (i % 4)}{i}?", "response":
                                                  "x" * (1 + i % 3)} for i in range(40)])
    assert data_chat.main([chats, "--out", str(folder / "chats"), "--block_size", "64"]) == 0
    train(load_config(None, SHAPE | dict(model="chat", data_dir=str(folder / "chats"), max_iters=1,
                                         out_dir=str(folder / "chat"))))
    assert data_prompts.main([chats, "--out", str(folder / "prompts"), "--tokenizer",
                              str(folder / "chat/ckpt.pt")]) == 0
    (folder / "share.py").write_text(SHARE)
    return folder


def settings(made, out, **changes):
    return SHAPE | dict(model="grpo", data_dir=str(made / "prompts"), out_dir=str(out), max_iters=6,
                        init_from=str(made / "chat/ckpt.pt"), eval_interval=3, eval_iters=100,
                        group_size=3, answer_tokens=5, gradient_accumulation_steps=1,
                        reward=str(made / "share.py")) | changes


# -----------------------------------------------------------------------------
# data

@pytest.mark.parametrize("record, fields, answer", [
    ({"prompt": "Say moo", "response": "moo"}, (), "moo"),
    ({"messages": MOO}, (), "moo"),
    ({"prompt": MOO[:1], "completion": MOO[1:]}, (), "moo"),
    ({"prompt": "Say moo"}, (), None),
    ({"prompt": MOO[:1], "answer": " moo", "level": 3}, (), "moo"),
    ({"prompt": MOO[:1], "answer": 42}, (), "42"),
    ({"prompt": MOO[:1], "answer": 42.0}, (), "42"),
    ({"prompt": MOO[:1], "answer": 4.25}, (), "4.25"),
    ({"prompt": MOO[:1], "answer": decimal.Decimal("4.50")}, (), "4.50"),  # of a parquet file
    ({"prompt": MOO[:1], "answer": ["moo"]}, (), None),
    ({"prompt": MOO[:1], "answer": None}, (), None),
    ({"q": "Say moo", "a": "moo"}, ("q", "a"), "moo"),
    ({"q": "Say moo", "tests": [1]}, ("q",), None),
    ({"q": MOO}, ("q",), "moo"),
])
def test_forms_of_a_question(record, fields, answer):
    assert to_question(record, fields) == ([("user", "Say moo")], answer)


@pytest.mark.parametrize("record, message", [
    ({"prompt": ""}, "no question"), ({"prompt": 7}, "expected a list of messages"),
    ({"messages": [MOO[1]]}, "no question"),
    ({"q": "a"}, "none of the known formats")])
def test_what_is_no_question_is_refused(record, message):
    with pytest.raises(ValueError, match=message):
        to_question(record)


def test_rows_are_what_the_chat_model_is_asked(made):
    """And those that data/prepare/chat.py keeps for validation are kept here."""
    asked = {}
    for split in ("train", "val"):
        tokens, length = (np.load(made / f"prompts/{split}_{n}.npy") for n in ("tokens", "length"))
        lines = (made / f"prompts/{split}_rows.jsonl").read_text().splitlines()
        for row, n, line in zip(tokens, length, map(json.loads, lines), strict=True):
            assert BYTES.decode(row[:n]) == f"### User:\n{line['question']}\n\n### Assistant:\n"
            assert set(row[n:]) <= {BYTES.eot_token}
            assert line["row"] == dict(prompt=line["question"], response=line["answer"])
        asked[split] = {json.loads(line)["question"] for line in lines}
        chats = BYTES.decode(np.load(made / f"chats/{split}_tokens.npy").flatten())
        assert {part.split("\n")[0] for part in chats.split("### User:\n")[1:]} == asked[split]
    assert len(asked["train"]) > 20 and asked["val"]


def test_prompts_and_chats_of_a_source_have_different_folders(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = write_jsonl(tmp_path / "a.jsonl", [dict(prompt=f"{i}?", response="x")
                                                for i in range(40)])
    assert data_chat.main([source]) == 0
    assert data_prompts.main([source, "--tokenizer", str(made / "chat/ckpt.pt")]) == 0
    assert sorted(os.listdir("data/bin")) == ["a", "a-prompts"]


def test_a_greeting_leaves_the_questions_in_the_splits_of_the_chats(made, tmp_path):
    greeting = dict(role="assistant", content="Hi!")
    source = write_jsonl(tmp_path / "a.jsonl", [dict(messages=[
        greeting, dict(role="user", content=f"{i}?"), MOO[1]]) for i in range(40)])
    found = []
    for module in (data_chat, data_prompts):
        out = tmp_path / module.__name__
        assert module.main([source, "--out", str(out), "--tokenizer", str(made / "chat/ckpt.pt"),
                            "--val_fraction", "0.3"]) == 0
        text = BYTES.decode(np.load(out / "val_tokens.npy").flatten())
        found.append(sorted(re.findall(r"(\d+)\?", text)))
    assert found[0] == found[1] and 4 < len(found[0]) < 25


def test_questions_that_are_too_long_are_left_out(made, tmp_path, capsys):
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"{i}" * n} for i in range(1, 10)
                                                for n in (1, 9)])
    argv = [source, "--out", str(tmp_path / "out"), "--tokenizer", str(made / "chat/ckpt.pt"),
            "--val_fraction", "0.4", "--block_size", str(len("### User:\n1\n\n### Assistant:\n"))]
    assert data_prompts.main(argv) == 0
    assert "9 questions left out: longer than 28 tokens" in capsys.readouterr().out
    assert data_prompts.main([*argv[:-1], "5", "--force"]) == 2
    assert "no question for train and val" in capsys.readouterr().err
    # By default one position of the model is left for the answer.
    n = load_model(made / "chat/ckpt.pt")[0].config.block_size - 27  # letters of the longest
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"{i}" * k} for i in range(1, 10)
                                       for k in (n - 1, n)])
    assert data_prompts.main([*argv[:-2], "--force"]) == 0
    assert f"9 questions left out: longer than {n + 26} tokens" in capsys.readouterr().out


# -----------------------------------------------------------------------------
# answers

@pytest.mark.parametrize("shape", [dict(), dict(pos="learned", prev_embedding=True),
                                   dict(key_offset=True, n_kv_head=1, ngram_rows=99)])
def test_rows_of_unequal_lengths_are_written_as_each_alone(shape):
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=60, block_size=40, **shape))
    for p in model.parameters():
        p.data.mul_(4)  # so that what comes first matters
    if model.wte_ngram:
        torch.nn.init.normal_(model.wte_ngram.weight)
    lengths = torch.tensor([7, 1, 12, 7, 2])
    idx = torch.randint(60, (5, 12))
    many, stops = dict(seed=[3, 1, 4, 1, 5]), dict(stop_token=list(range(0, 60, 5)))
    for how in (dict(temperature=0.0), many, many | stops):
        found = generate(model, idx, 9, lengths=lengths, **how)[:, 12:]
        for i, n in enumerate(lengths.tolist()):
            one = how | ({"seed": how["seed"][i]} if "seed" in how else {})
            alone = generate(model, idx[i:i + 1, :n], 9, **one)[0, n:].tolist()
            assert alone == found[i, :len(alone)].tolist()
            assert set(found[i, len(alone):].tolist()) <= {alone[-1]}  # it has come to its end
    twice = generate(model, idx[[0, 0]], 9, seed=[3])[:, 12:]
    assert twice[0].tolist() != twice[1].tolist()  # one generator for both
    for how in (many, many | stops):
        found = generate(model, idx, 9, lengths=lengths, samples_per_row=4, **how)
        again = generate(model, idx.repeat_interleave(4, 0), 9, **how,
                         lengths=lengths.repeat_interleave(4))
        assert found.equal(again) and len({tuple(row) for row in found.tolist()}) > 10


def worth(prompt, answer, row):
    return sum(map(ord, answer)) % 5


def rewarded(**more):
    """A PolicyGPT that answers anything."""
    torch.manual_seed(0)
    shape = GPTConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=257, block_size=64, **more)
    model = PolicyGPT(shape)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    model.reward_function = RewardFunction(BYTES, [BYTES.eot_token], worth)
    model.reward_function.lines = [json.dumps(dict(question=f"{i}", answer="x", row={}))
                                   for i in range(9)]
    model.keys = SimpleNamespace(dry_run=False, group_size=4, answer_tokens=6, seed=1,
                                 grpo_norm="tokens", grpo_scale="group", mask_truncated=False,
                                 block_size=model.config.block_size)
    model.ranks = SimpleNamespace(world_size=1)
    return model


def test_answers_depend_on_the_seed_and_the_sample_alone():
    """Not on the rows beside them; nor does dropout touch them."""
    model = rewarded()
    prompts, lengths = torch.randint(257, (3, 20)), torch.tensor([4, 20, 9])
    whole = model.generate_answers(prompts, lengths, 4, [7, 8, 9])
    assert whole[4:8] == model.generate_answers(prompts[1:2], lengths[1:2], 4, [8])
    assert len({tuple(said) for said in whole}) > 8  # of a group, too
    assert model.generate_answers(prompts, lengths, 4, [7, 8, 10])[8:] != whole[8:]
    assert all(1 <= len(said) <= 6 for said in whole)
    batch, sums = model.sample_batch(prompts, lengths, torch.tensor([2, 0, 5]),
                                     torch.tensor([70, 80, 90]))
    assert model.training and all(m.training for m in model.modules())
    seeds = [stable_hash(1, f"answers {g}") for g in (70, 80, 90)]
    written = model.eval().generate_answers(prompts, lengths, 4, seeds)
    said = [[token for *_, token, p in row if p == part] for row in batch[0].tolist()
            for part in {p for *_, p in row} - {0, -1}]
    assert sorted(said) == sorted(written)  # no two are equal here
    assert float(sums["length"]) == pytest.approx(sum(map(len, written)) / 4)
    model.train()
    again, _ = model.sample_batch(prompts, lengths, torch.tensor([2, 0, 5]),
                                  torch.tensor([70, 80, 90]))
    assert again[0].equal(batch[0])


def test_an_answer_ends_with_its_end_token():
    model = rewarded()
    model.reward_function.ends = list(range(100))  # most answers come to an end
    found = model.generate_answers(torch.randint(257, (6, 5)), torch.full((6,), 5), 4,
                                   list(range(6)))
    for said in found:
        assert all(i >= 100 for i in said[:-1]) and (said[-1] < 100 or len(said) == 6)
    assert {1, 2, 6} <= {len(said) for said in found}


# -----------------------------------------------------------------------------
# the loss

def test_advantages_within_the_group():
    """By numpy; 0 where all answers are worth the same: they are left out."""
    model = rewarded()
    worth = iter([0.0, 1.0, 1.0, 3.0, 0.1, 0.1, 0.1, 0.1])
    model.reward_function.function = lambda *_: next(worth)
    batch, sums = model.sample_batch(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([3, 3]),
                              torch.tensor([0, 1]), torch.tensor([0, 1]))
    r = np.array([0.0, 1.0, 1.0, 3.0])
    spread = np.sqrt(((r - r.mean()) ** 2).sum() / 3)
    advantages = [batch[1][batch[0][..., 4] == part].unique().item() for part in range(5)]
    np.testing.assert_allclose(advantages, [0, *(r - r.mean()) / (spread + 1e-4)], rtol=1e-5)
    assert batch[0][..., 4].max() == 4  # none of the second group
    assert batch[2] == sums["count"] == 4 * sums["length"]  # which counts
    assert {k: float(v) for k, v in sums.items() if k not in ("length", "count", "truncated")
            } == pytest.approx(dict(reward=1.25 + 0.1, spread=spread, best=3.1, flat=1, prompts=2))
    found = model.numbers(sums | dict(loss=torch.tensor(0.0)))
    assert found["flat"] == 0.5 and found["reward"] == pytest.approx(0.675)
    assert found["length"] == pytest.approx(float(batch[2]) / 8) and "prompts" not in found
    model.reward_function.function = lambda *_: 1.0
    batch, _ = model.sample_batch(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([3, 3]),
                                  torch.tensor([0, 1]), torch.tensor([0, 1]))
    assert not batch[1].any() and batch[2] > 8


@pytest.mark.parametrize("rewards, is_flat", [([1e13 / 3], True), ([1e-7, 3e-7], False)])
def test_a_group_is_flat_if_its_rewards_are_equal(rewards, is_flat):
    """Whatever their size: the mean of large ones is rounded, small ones may differ."""
    model = rewarded()
    model.keys.group_size, worth = 7, itertools.cycle(rewards)
    model.reward_function.function = lambda *_: next(worth)
    batch, sums = model.sample_batch(torch.zeros(1, 3, dtype=torch.int64), torch.tensor([3]),
                                     torch.tensor([0]), torch.tensor([0]))
    assert sums["flat"] == is_flat and bool(batch[1].any()) != is_flat


@pytest.mark.parametrize("shape", [dict(pos="learned"), dict(prev_embedding=True),
                                   dict(key_offset=True, ngram_rows=99)])
def test_answers_in_one_row_are_what_each_is_alone(shape):
    """Of unequal lengths, some of them equal, more than one row holds, to a prompt of one token
    too; equal ones are learned once."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=60, block_size=32, **shape))
    for p in model.parameters():
        p.data.mul_(4)  # so that what comes first matters
    if model.wte_ngram:
        torch.nn.init.normal_(model.wte_ngram.weight)
    answers = [[5, 6, 7], [8], [5, 6, 7], list(range(20, 30)), [6, 5, 5, 9], list(range(30, 42))]
    for prompt in ([1, 2, 3, 4, 5], [9]):
        rows = pack_answers(prompt, answers, [1.0, 2.0, 4.0, 8.0, 16.0, 32.0], 32)
        assert max(map(len, rows)) <= 32 and len(rows) == (2 if len(prompt) > 1 else 1)
        tokens, advantages = collate_rows(rows, 32)
        logps, found = answer_logps(model, tokens), {}
        for part in range(1, 6):
            here = tokens[..., 4] == part
            said = tokens[here][:, 3]
            alone = F.log_softmax(model(torch.tensor([prompt + said.tolist()])), -1)
            wanted = alone[0, len(prompt) - 1:-1].gather(1, said[:, None])[:, 0]
            torch.testing.assert_close(logps[here], wanted)
            found[tuple(said.tolist())] = advantages[here].unique().item()
        assert found == pytest.approx({(5, 6, 7): 5, (8,): 2, tuple(answers[3]): 8,
                                       (6, 5, 5, 9): 16, tuple(answers[5]): 32})
        assert not logps[tokens[..., 3] < 0].any()
    assert len(collate_rows([], 32)[0]) == 1


def sampled(model):
    """What a step of three prompts learns from: the arguments of forward(), and of each answer the
    prompt, its ids and its reward, as lists."""
    prompts, lengths = torch.randint(257, (3, 20)), torch.tensor([4, 20, 9])
    numbers = torch.tensor([0, 1, 2])
    model.reward_function.ends = list(range(100, 160))  # some answers come to an end
    seeds = [stable_hash(1, f"answers {i}") for i in range(3)]
    answers = model.eval().generate_answers(prompts, lengths, 4, seeds)
    asked = [p[:n] for p, n in zip(prompts.tolist(), lengths.tolist()) for _ in range(4)]
    rewards = [model.reward_function(0, said) for said in answers]
    model.train()
    return (prompts, lengths, numbers, numbers), asked, answers, rewards


def logps_alone(model, prompt, answer):
    """The log probability of each token of an answer, from whole logits."""
    logits = model(torch.tensor([prompt + answer]))[0, len(prompt) - 1:-1]
    return F.log_softmax(logits, -1).gather(1, torch.tensor(answer)[:, None])[:, 0]


def formula(model, asked, answers, rewards, norm, scale, masked, clip=0.2):
    """The loss that TRL 1.16 documents (GRPOConfig: loss_type dapo, grpo or dr_grpo; scale_rewards;
    mask_truncated_completions), an answer at a time; the weights that wrote them are the present
    ones. The lengths are those of answers of at most six tokens."""
    r = np.array(rewards).reshape(-1, 4)
    deviation = dict(none=1.0, batch=r.std(ddof=1) + 1e-4,
                     group=r.std(1, ddof=1, keepdims=True) + 1e-4)[scale]
    advantages = ((r - r.mean(1, keepdims=True)) / deviation).flatten().tolist()
    ends = model.reward_function.ends
    total, n_tokens = 0.0, 0
    for prompt, answer, a in zip(asked, answers, advantages, strict=True):
        if masked and answer[-1] not in ends:
            continue
        logps = logps_alone(model, prompt, answer)
        ratio = (logps - logps.detach()).exp()
        gain = torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)
        total = total - (gain.mean() if norm == "answer" else gain.sum())
        n_tokens += len(answer)
    return total / dict(tokens=n_tokens, answer=len(answers), constant=6 * len(answers))[norm]


def assert_same_loss(model, batch, expected):
    """The value, and the gradients of all parameters."""
    parameters = list(model.parameters())
    wanted = torch.autograd.grad(expected, parameters)
    loss, _ = model(*batch)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    for (name, _), e, g in zip(model.named_parameters(), wanted,
                               torch.autograd.grad(loss, parameters), strict=True):
        torch.testing.assert_close(g, e, rtol=1e-3, atol=1e-6, msg=name)


CHOICES = [("tokens", "group", False), ("tokens", "batch", True), ("tokens", "none", False),
           ("answer", "group", True), ("answer", "none", False), ("constant", "none", True),
           ("constant", "batch", False)]


@pytest.mark.parametrize("norm, scale, masked", CHOICES)
def test_loss_and_gradients_are_those_of_trls_formula(norm, scale, masked):
    model = rewarded()
    model.keys.grpo_norm, model.keys.grpo_scale, model.keys.mask_truncated = norm, scale, masked
    batch, asked, answers, rewards = sampled(model)
    assert len({len(said) for said in answers}) > 2
    n_truncated = sum(said[-1] not in model.reward_function.ends for said in answers)
    assert 0 < n_truncated < 12
    assert_same_loss(model, batch, formula(model, asked, answers, rewards, norm, scale, masked))
    assert float(model(*batch)[1]["truncated"]) == pytest.approx(n_truncated / 4)


def test_flops_are_those_of_a_prompt_with_all_answers():
    """Six per weight and token in training, and two in generation, without attention."""
    model = PolicyGPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=50, block_size=64))
    model.keys = SimpleNamespace(group_size=5, answer_tokens=7)
    model.row_tokens = 20  # 13 of a prompt, 7 of an answer
    per_token = GPT.flops_per_unit(model)
    assert model.flops_per_unit() == pytest.approx(per_token * (13 + 5 * 7) * (6 + 2) / 6)


@pytest.mark.parametrize("window", [4, 12])
def test_a_window_sees_the_prompt_from_each_answer(window):
    """Of answers in one row, later ones are further from the prompt's place."""
    model = rewarded(layer_types="FW", window=window)
    batch, asked, answers, rewards = sampled(model)
    assert_same_loss(model, batch, formula(model, asked, answers, rewards, "tokens", "group",
                                           False))


@pytest.mark.slow
@pytest.mark.parametrize("norm, scale, masked", CHOICES)
def test_loss_and_gradients_are_those_of_trl(norm, scale, masked):
    """By the code of TRL itself."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    model = rewarded()
    model.keys.grpo_norm, model.keys.grpo_scale, model.keys.mask_truncated = norm, scale, masked
    batch, asked, answers, rewards = sampled(model)
    def logps(*_, **__):
        rows = [F.pad(logps_alone(model, p, a), (0, 6 - len(a))) for p, a in zip(asked, answers)]
        return torch.stack(rows), torch.zeros(12, 6), None
    same = SimpleNamespace(gather=lambda x: x, reduce=lambda x, **_: x, num_processes=1)
    mask = torch.tensor([[float(i < len(a) and not (
        masked and a[-1] not in model.reward_function.ends)) for i in range(6)] for a in answers])
    r = torch.tensor(rewards).view(3, 4)
    deviation = dict(none=1.0, group=r.std(1, keepdim=True) + 1e-4, batch=r.std() + 1e-4)[scale]
    inputs = dict(prompt_ids=torch.zeros(12, 1), prompt_mask=mask[:, :1], completion_mask=mask,
                  completion_ids=torch.zeros(12, 6), num_items_in_batch=mask.sum(),
                  advantages=((r - r.mean(1, keepdim=True)) / deviation).flatten())
    fake = SimpleNamespace(
        _get_per_token_logps_and_entropies=logps, aux_loss_enabled=False, top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, importance_sampling_level="token", beta=0.0,
        epsilon_low=0.2, epsilon_high=0.2, args=SimpleNamespace(delta=None,
                                                                steps_per_generation=1),
        use_vllm=False, _entropy_bonus_enabled=False, accelerator=same, model=model,
        current_gradient_accumulation_steps=1, max_completion_length=6,
        _metrics=dict(train=collections.defaultdict(list)),
        loss_type=dict(tokens="dapo", answer="grpo", constant="dr_grpo")[norm])
    assert_same_loss(model, batch, trainer._compute_loss(fake, model, inputs))


def test_an_evaluation_is_of_the_most_likely_answers():
    model = rewarded().eval()
    prompts, lengths, numbers = torch.randint(257, (3, 9)), torch.tensor([4, 9, 1]), torch.arange(3)
    texts, ends = [], [BYTES.eot_token]
    for row, n in zip(prompts, lengths.tolist()):
        out = generate(model, row[None, :n], 6, temperature=0, stop_token=ends)[0, n:].tolist()
        texts.append(BYTES.decode([i for i in out if i not in ends]))
    loss, sums = model(prompts, lengths, numbers, numbers)
    rewards = [worth("", text, {}) for text in texts]
    assert float(loss) == pytest.approx(-np.mean(rewards))
    found = model.numbers(sums | dict(loss=loss * 3, count=torch.tensor(3.0)))
    assert found["reward"] == pytest.approx(np.mean(rewards))
    model.reward_function.lines[0] = json.dumps(dict(question="", answer=texts[0].strip(), row={}))
    model.reward_function.function = None
    loss, _ = model(prompts, lengths, numbers, numbers)
    assert float(loss) == pytest.approx(-1 / 3)


def test_bfloat16_leaves_no_weight_without_a_gradient():
    """Autocast keeps the weights that it has cast; those of writing have no gradients."""
    model, rows = rewarded(), torch.arange(2)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = model(torch.randint(257, (2, 9)), torch.tensor([4, 9]), rows, rows)
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_without_prompts_it_is_a_gpt():
    model = PolicyGPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=50, block_size=8))
    assert model.eval()(torch.zeros(1, 4, dtype=torch.int64)).shape == (1, 4, 50)
    assert model.numbers(dict(loss=1.0, count=1.0)) == {}


# -----------------------------------------------------------------------------
# rewards of a person's own

@pytest.mark.parametrize("source, message", [
    ("x = 1", r"reward.py: expected a function reward\(prompt, answer, row\) in it"),
    ("def reward(prompt, answer:", r"SyntaxError: .*\(reward.py, line 1\)"),
    ("import nothing_of_that_name", r"reward.py:1: ModuleNotFoundError"),
    ("def reward(p, a, r):\n    return r['x']", r"reward.py:2: KeyError: 'x'; the prompt: 'Say'"),
    ("import sys\nsys.exit('no key')", "reward.py:2: SystemExit: no key"),
    ("def reward(p, a): pass", "TypeError: reward.. takes 2"),
    ("def reward(p, a, r): pass", "TypeError: float.. argument must be .*'NoneType'"),
    ("def reward(p, a, r): return float('nan')", "returned nan"),
    ("def reward(p, a, r): return 1e39", r"returned 1e\+39, expected .* up to 1e\+15; the prompt"),
    ("def reward(p, a, r): return 10**400", "OverflowError: int too large"),
])
def test_a_reward_that_cannot_be_had_is_told_in_one_message(tmp_path, source, message):
    (tmp_path / "reward.py").write_text(source)
    path = str(tmp_path / "reward.py")
    with pytest.raises(UserError, match=message) as told:
        function = RewardFunction(BYTES, [256], load_reward(path), path)
        function.lines = [json.dumps(dict(question="Say", answer=None, row={}))]
        function(0, BYTES.encode("moo"))
    assert "Traceback" not in str(told.value)


def test_a_reward_sees_its_row_as_it_was_written():
    reward = RewardFunction(BYTES, [256], lambda prompt, answer, row: row.pop("n") + len(answer))
    reward.lines = [json.dumps(dict(question="q", answer=None, row=dict(n=1)))]
    ids = [*BYTES.encode("moo"), 256]
    assert [reward(0, ids), reward(0, ids[:2])] == [4, 3]


def test_no_checkpoint_names_a_reward(made, tmp_path):
    """Its file runs where a person named it, and there alone: not to write, not to export, and a
    run goes on with the one that is asked for now, which must be the same."""
    from model.convert import main as convert
    from model.sample import main as talk
    trap, told = tmp_path / "trap.py", tmp_path / "told"
    trap.write_text(f"open({str(told)!r}, 'a').write('x')\n" + SHARE)
    train(load_config(None, settings(made, tmp_path / "out", reward=str(trap), max_iters=1)))
    ckpt = str(tmp_path / "out/ckpt.pt")
    assert load_checkpoint(ckpt)["config"]["reward"] == str(trap)
    assert told.read_text() == "x"
    load_model(ckpt)
    assert talk(["--chat", "--ckpt", ckpt, "--prompt", "7?", "--max_new_tokens", "2"]) == 0
    assert convert(["--ckpt", ckpt, "--to", str(tmp_path / "hf")]) == 0
    assert told.read_text() == "x"
    with pytest.raises(ValueError, match=r"reward: checkpoint has .*\n.*allow_change reward"):
        train(load_config(None, settings(made, tmp_path / "out", max_iters=2)))
    with pytest.raises(ValueError, match="reward: checkpoint has"):
        train(load_config(None, settings(made, tmp_path / "out", reward="exact", max_iters=2)))
    (tmp_path / "moved.py").write_text(trap.read_text())  # the same one, elsewhere
    trap.unlink()
    train(load_config(None, settings(made, tmp_path / "out", max_iters=2,
                                     reward=str(tmp_path / "moved.py"))))
    assert told.read_text() == "xx"


# -----------------------------------------------------------------------------
# the loop

def test_it_learns_from_rewards(made, tmp_path):
    """It says what pays, also in the samples."""
    last = train(load_config(None, settings(made, tmp_path / "out", max_iters=24, eval_interval=12,
                                            sample_tokens=4, group_size=8)))
    assert last["history"][-1]["val_reward"] == -last["val_loss"] > 0.9
    first, *_, step = [line for line in metrics(tmp_path / "out") if "spread" in line]
    assert first["reward"] < 0.5
    assert step["best"] >= step["reward"] > first["reward"] + 0.2
    assert 0 <= step["flat"] <= 1
    assert 0 <= step["truncated"] <= 1
    assert 0 < step["length"] <= 5
    samples = (tmp_path / "out/samples.txt").read_text()
    answers = [text.split("### Assistant:\n")[1].split("\n")[0]
               for text in samples.split("=== iter 24 ===")[1:]]
    assert len(answers) == 3 and all(c < "@" for answer in answers for c in answer)


@pytest.mark.parametrize("norm, n", [("tokens", 97), ("answer", 60)])
def test_steps_with_a_rare_reward_are_no_spikes(made, tmp_path, monkeypatch, capsys, norm, n):
    """One answer in n has one; the loss of most steps is 0, without a deviation. With the norm
    `answer` the loss of the others is the error of rounding."""
    monkeypatch.setattr(SpikeDetector.__init__, "__defaults__", (6.0, 8))
    (tmp_path / "rare.py").write_text("import zlib\ndef reward(prompt, answer, row):\n"
                                      f"    return zlib.crc32(answer.encode()) % {n} == 0\n")
    train(load_config(None, settings(made, tmp_path / "out", reward=str(tmp_path / "rare.py"),
                                     grpo_norm=norm, max_iters=60, eval_interval=0)))
    flat = [line["flat"] for line in metrics(tmp_path / "out") if "flat" in line]
    assert flat.count(1) > 20 and len(flat) - flat.count(1) > 2
    assert "spike" not in capsys.readouterr().out


def test_the_answer_that_is_held_back(made, tmp_path):
    """Adapters alone, with the reward `exact`."""
    train(load_config(None, settings(made, tmp_path / "out", reward="exact", lora_rank=2)))
    state, before = (load_checkpoint(p) for p in (tmp_path / "out/ckpt.pt", made / "chat/ckpt.pt"))
    assert all(".lora_" in name for name in state["optimizer"]["state"])
    assert all(torch.equal(t, before["model"][n.removesuffix("base") + "weight"
                                              if n.endswith(".base") else n])
               for n, t in state["model"].items() if ".lora_" not in n)


@pytest.mark.parametrize("changes, message", [
    (dict(init_from="scratch"), "init_from: missing"),
    (dict(reward="share"), "share: FileNotFoundError"),
    (dict(reward="nowhere.py"), "nowhere.py: FileNotFoundError"),
    (dict(data_dir="{chats}"), "data.prepare.prompts FILE... --tokenizer CKPT --out "),
    (dict(answer_tokens=60), "exceed the model's context, 64"),
    (dict(group_size=1), "group_size: must be at least 2"),
    (dict(grpo_scale="batch", gradient_accumulation_steps=2), "gradient_accumulation_steps 1"),
    (dict(data_dir="{unheld}", reward="exact"), "some rows of .* have no reference answer"),
    (dict(data_dir="{cut}"), "train_rows.jsonl: prepare the prompts again: Expecting"),
    (dict(data_dir="{missing}"), "train_rows.jsonl: prepare the prompts again: .* No such file"),
    (dict(data_dir="{prompts}:0.5,{copy}:0.5"), "does not support mixtures; name one folder"),
])
def test_what_does_not_belong_together_is_refused(made, tmp_path, changes, message, capsys):
    if "{unheld}" in changes.values():
        source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"{i}"} for i in range(9)])
        data_prompts.main([source, "--out", str(tmp_path / "unheld"), "--tokenizer",
                           str(made / "chat/ckpt.pt"), "--val_fraction", "0.3"])
    for name in ("copy", "cut", "missing"):
        shutil.copytree(made / "prompts", tmp_path / name)
    (tmp_path / "cut/train_rows.jsonl").write_text('{"question": "a", ')
    (tmp_path / "missing/train_rows.jsonl").unlink()
    places = dict(chats=made / "chats", prompts=made / "prompts", **{
        name: tmp_path / name for name in ("unheld", "copy", "cut", "missing")})
    changes = {k: v.format(**places) if isinstance(v, str) else v for k, v in changes.items()}
    with pytest.raises(ValueError, match=message):
        try:
            train(load_config(None, settings(made, tmp_path / "out") | changes))
        except UserError as error:
            raise ValueError(error) from None


def test_a_reward_that_fails_ends_the_program_with_2(made, tmp_path):
    (tmp_path / "reward.py").write_text("def reward(prompt, answer, row):\n    return 1 / 0\n")
    (tmp_path / "run.yaml").write_text(json.dumps(settings(
        made, tmp_path / "out", reward=str(tmp_path / "reward.py"))))
    code, output = run("--config", str(tmp_path / "run.yaml"))
    assert code == 2 and "Traceback" not in output
    assert f"{tmp_path}/reward.py:2: ZeroDivisionError" in output


def test_a_reward_that_changes_the_folder_moves_no_file(made, tmp_path, monkeypatch,
                                                               capsys):
    """When it is imported and at each answer; out_dir and data_dir are relative."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data").symlink_to(made)
    (tmp_path / "reward.py").write_text(
        "import os\nos.chdir('elsewhere')\n"
        "def reward(prompt, answer, row):\n    os.chdir('elsewhere')\n"
        "    return len(answer) % 3\n")
    (tmp_path / "run.yaml").write_text(json.dumps(settings(
        made, "out", reward="reward.py", data_dir="data/prompts", max_iters=2)))
    monkeypatch.chdir(tmp_path)
    assert run_train.main(["--config", "run.yaml"]) == 0
    output = capsys.readouterr().out
    assert "Saving checkpoint to out/ckpt.pt" in output and not os.listdir(tmp_path / "elsewhere")
    assert {"ckpt.pt", "train.log", "metrics.jsonl", "config.yaml", "loss.svg"} <= {
        *os.listdir(tmp_path / "out")}
    assert "out_dir: out\n" in (tmp_path / "out" / "config.yaml").read_text()


def test_a_reward_that_changes_the_folder_moves_no_profile(made, tmp_path, monkeypatch):
    (tmp_path / "away").mkdir()
    (tmp_path / "away.py").write_text(
        "import os\ndef reward(prompt, answer, row):\n"
        f"    os.chdir({str(tmp_path / 'away')!r})\n    return len(answer)\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(json.dumps(settings(made, "out", reward="away.py",
                                                           profile=1)))
    assert run_train.main(["--config", "run.yaml"]) == 0
    assert os.path.exists("out/profile.json.gz") and not os.listdir("away")


def test_a_reward_that_closes_the_output_ends_the_program_well(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert run_reporting_errors(None, lambda config: sys.stdout.close()) == 0
    Console(sys.stdout).show("a line")  # of a log that is opened afterwards


# Kills its own process with the 100th answer, once.
DEADLY = """
import os, pathlib, signal
calls, mark = 0, pathlib.Path(__file__).with_suffix(".killed")

def reward(prompt, answer, row):
    global calls
    calls += 1
    if calls == 100 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return sum(c < '@' for c in answer) / 5
"""


@pytest.mark.matrix(125)
def test_killed_while_it_writes_answers(made, tmp_path):
    """Killed (-9) while a model is rewarded for the answers that it writes -> the run that goes on
    writes the same ones, and ends bit for bit as the one that was not."""
    (tmp_path / "deadly.py").write_text(DEADLY)
    (tmp_path / "deadly.killed").touch()
    changes = settings(made, tmp_path / "a", max_iters=12, save_interval=3, eval_interval=6,
                       dropout=0.1, reward=str(tmp_path / "deadly.py"),
                       lr_decay_iters=None, vocab_size=None)
    train(load_config(None, changes))
    (tmp_path / "deadly.killed").unlink()
    changes |= dict(out_dir=str(tmp_path / "b"))
    assert Program(**changes).wait()[0] == -9
    assert 0 < load_checkpoint(tmp_path / "b/ckpt.pt")["iter_num"] < 12
    train(load_config(None, changes))
    assert_same(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("how, rank", [
    ("ddp", 0), pytest.param("fsdp", 2, marks=pytest.mark.slow)])
def test_two_ranks_equal_one(made, tmp_path, how, rank):
    changes = dict(lora_rank=rank, grpo_scale="group" if rank else "batch")
    one = train(load_config(None, settings(made, tmp_path / "one", **changes)))
    two = on_two_ranks(tmp_path / "two", settings(made, "", distributed=how, **changes))
    for a, b in zip(one["history"], two, strict=True):
        for name in ("val_reward", "val_length"):
            assert a[name] == pytest.approx(b[name], rel=1e-6), name
    lines = [[line for line in metrics(tmp_path / n) if "spread" in line] for n in ("one", "two")]
    for a, b in zip(*lines, strict=True):
        for name in ("reward", "spread", "best", "flat", "length"):
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-6), name
    a, b = (tensors(tmp_path / n / "ckpt.pt")[0] for n in ("one", "two"))
    for name in a:
        if name.startswith("model."):
            torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=1e-5)


def test_the_same_conversations_are_held_out_as_for_chats(made, tmp_path):
    """with several exchanges too: the hash is that of the prompt before the first answer"""
    def turns(i):
        for k in range(2):
            yield {"role": "user", "content": f"{i}?" if k == 0 else "x"}
            yield {"role": "assistant", "content": "a"}
    chats = write_jsonl(tmp_path / "c.jsonl", [{"messages": list(turns(i))} for i in range(60)])
    ckpt = ["--tokenizer", str(made / "chat/ckpt.pt"), "--val_fraction", "0.3"]
    assert data_prompts.main([chats, "--out", str(tmp_path / "p"), *ckpt]) == 0
    assert data_chat.main([chats, "--out", str(tmp_path / "c"), *ckpt]) == 0
    rows = [json.loads(line) for line in (tmp_path / "p/val_rows.jsonl").open()]
    tokenizer = load_tokenizer(ckpt[1])
    held_out = tokenizer.decode(np.load(tmp_path / "c/val_tokens.npy").flatten().tolist())
    asked = {row["row"]["messages"][0]["content"] for row in rows}
    assert len(asked) > 5 and asked == set(re.findall(r"\d+\?", held_out))


def test_a_checkpoint_of_an_earlier_version_is_read():
    # It had the key grpo_beta, which only matters in training.
    values = dict(model="grpo", init_from="out/chat/ckpt.pt", group_size=4)
    assert saved_config(values | dict(grpo_beta=0.0)).group_size == 4
