"""Preferences: pairs of every form to rows, the reference's log probabilities, DPO's loss and
gradients against its formula, adapters, ranks, resume."""

import json
import re
import shlex
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY
from runs import Program, assert_same, assert_two_ranks_equal_one

from data.chat_template import ChatTemplate
from data.prepare import chat as data_chat
from data.prepare import pairs as data_pairs
from data.prepare.pairs import PairOptions, PairWriter, to_pair
from data.prepare.samples import example_records
from data.tokenizer import load_tokenizer
from model.core.load import load_model
from model.dpo import PreferenceGPT, sum_answer_logps
from model.gpt import GPTConfig
from train import device
from train.base.errors import CheckpointError, DataError
from train.checkpoint import load_checkpoint
from train.config import load_config
from train.distributed import Ranks
from train.setup import open_data
from train.train import train

BYTES = load_tokenizer("byte")
SHAPE = dict(TINY, block_size=64, qk_norm=True)
ASKED = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Say moo"}]
MOO, BOO = ({"role": "assistant", "content": text} for text in ("moo", "boo"))


def conversation(*texts):
    return [dict(role=("user", "assistant")[i % 2], content=text) for i, text in enumerate(texts)]


CONVERSATION = conversation("Say moo", "boo?", "Moo!")


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder with a chat model "chat/ckpt.pt" and 70 "pairs" of unequal lengths for it)"""
    folder = tmp_path_factory.mktemp("dpo")
    chats = write_jsonl(folder / "chats.jsonl", [{"prompt": f"{i} in words?", "response": "x" * i}
                                                 for i in range(1, 12)])
    assert data_chat.main([chats, "--out", str(folder / "chats"), "--block_size", "64"]) == 0
    train(load_config(None, SHAPE | dict(model="chat", data_dir=str(folder / "chats"), max_iters=3,
                                         out_dir=str(folder / "chat"))))
    pairs = write_jsonl(folder / "pairs.jsonl", [
        {"prompt": f"{i}?", "chosen": "x" * (1 + i % 9), "rejected": "y" * (1 + i % 7)}
        for i in range(70)])
    assert data_pairs.main([pairs, "--out", str(folder / "pairs"), "--reference",
                            str(folder / "chat/ckpt.pt")]) == 0
    return folder


def settings(made, out, **changes):
    return SHAPE | dict(model="dpo", data_dir=str(made / "pairs"), out_dir=str(out), max_iters=6,
                        init_from=str(made / "chat/ckpt.pt"), eval_interval=3,
                        eval_iters=100) | changes


def rows(folder, split="train"):
    """tokens, mask (n, 2, T + 1) and logps (n, 2) of a folder."""
    tokens, mask, logps = (np.load(folder / f"{split}_{name}.npy")
                           for name in ("tokens", "mask", "logps"))
    return tokens.reshape(len(tokens), 2, -1), mask.reshape(len(mask), 2, -1), logps


# -----------------------------------------------------------------------------
# data

@pytest.mark.parametrize("record", [
    {"prompt": "Say moo", "chosen": "moo", "rejected": "boo"},
    {"prompt": ASKED[1:], "chosen": [MOO], "rejected": [BOO]},
    {"prompt": "Say moo\n", "chosen": [ASKED[1], MOO], "rejected": [ASKED[1], BOO], "score": 7},
    {"chosen": [ASKED[1], MOO], "rejected": [ASKED[1], BOO]},
], ids=["texts", "messages", "ultrafeedback", "no prompt"])
def test_forms_of_a_pair(record):
    assert to_pair(record) == [[("user", "Say moo"), ("assistant", "moo")],
                               [("user", "Say moo"), ("assistant", "boo")]]


def test_a_field_with_the_system_message_begins_both_sides():
    for said in (dict(prompt="Say moo", chosen="moo", rejected="boo"),
                 dict(chosen=[ASKED[1], MOO], rejected=[ASKED[1], BOO])):
        assert [side[0] for side in to_pair(said | dict(system="Be a cow"))] == [
            ("system", "Be a cow")] * 2
    whole = dict(chosen=[*ASKED, MOO], rejected=[*ASKED, BOO], system="Be a cow")
    assert to_pair(whole) == to_pair(whole | dict(system=None))  # it has one already


def test_long_conversations_differ_in_their_last_answer():
    chosen, rejected = to_pair({
        "chosen": [*CONVERSATION, dict(role="assistant", content="Moo!\n\nYes.")],
        "rejected": [*CONVERSATION, dict(role="assistant", content="no")]})
    assert chosen[:-1] == rejected[:-1] == [("user", "Say moo"), ("assistant", "boo?"),
                                            ("user", "Moo!")]
    assert (chosen[-1], rejected[-1]) == (("assistant", "Moo!\n\nYes."), ("assistant", "no"))
    assert to_pair({"chosen": [*ASKED, MOO], "rejected": [*ASKED, BOO]})[0][0] == (
        "system", "Be kind.")


def test_a_prompt_before_whole_turns_is_kept():
    said = [BOO, {"role": "user", "content": "Moo!"}, MOO]
    chosen, _ = to_pair({"prompt": "Say moo", "chosen": said, "rejected": [*said[:2], BOO]})
    assert [text for _, text in chosen] == ["Say moo", "boo", "Moo!", "moo"]


@pytest.mark.parametrize("record, message", [
    ({"prompt": "a", "response": "b"}, "the fields chosen and rejected"),
    ({"prompt": "a", "chosen": "b", "rejected": " b"}, "the same answer twice"),
    ({"chosen": [ASKED[1], MOO], "rejected": [ASKED[0], MOO]}, "the same messages but for"),
    ({"chosen": [ASKED[1]], "rejected": [ASKED[0]]}, "the same messages but for"),
    ({"prompt": "", "chosen": "C", "rejected": "b"}, "prompt: expected a text, got ''"),
    ({"prompt": "a", "chosen": 7, "rejected": "b"}, "chosen: expected a list of messages, got '7'"),
    ({"chosen": "moo", "rejected": "boo"}, "chosen: expected a list of messages, got 'moo'"),
    ({"chosen": [], "rejected": [MOO]}, "chosen: no message"),
    ({"prompt": ASKED, "chosen": [ASKED[1], MOO], "rejected": [ASKED[1], BOO]},
     "chosen: the prompt's system message is missing"),
    ({"prompt": "Say boo", "chosen": [ASKED[1], MOO], "rejected": [ASKED[1], BOO]},
     "chosen: the prompt's user message is missing in this conversation"),
])
def test_what_is_no_pair_is_refused(record, message):
    with pytest.raises(ValueError, match=message):
        to_pair(record)


def test_rows_hold_both_sides_and_the_reference(made, tmp_path):
    """Of several answers the last is learned; its log probability by numpy from the logits."""
    source = write_jsonl(tmp_path / "a.jsonl", [
        {"chosen": [*CONVERSATION, MOO], "rejected": [*CONVERSATION, BOO]}] + [
        {"prompt": f"{i}", "chosen": "x" * i, "rejected": "y"} for i in range(1, 9)])
    # One of 65 tokens and more is left out.
    assert data_pairs.main([source, "--out", str(tmp_path / "out"), "--reference",
                            str(made / "chat/ckpt.pt"), "--val_fraction", "0.4"]) == 0
    model, _ = load_model(made / "chat/ckpt.pt")
    meta, n = json.loads((tmp_path / "out/meta.json").read_text()), 0
    for split in ("train", "val"):
        tokens, mask, logps = rows(tmp_path / "out", split)
        n += len(tokens)
        assert tokens.shape[2] == meta["block_size"] + 1 and meta["block_size"] % 16 == 0
        for row, learned, expected in zip(tokens.reshape(-1, tokens.shape[2]),
                                          mask.reshape(-1, tokens.shape[2]), logps.flatten()):
            answer = BYTES.decode(row[learned == 1])
            assert answer.removesuffix("<|endoftext|>").strip("x") in ("", "y")
            idx = torch.from_numpy(row.astype(np.int64))[None]
            z = model(idx[:, :-1])[0].detach().double().numpy()  # (T, V)
            z = z - z.max(1, keepdims=True)
            p = z - np.log(np.exp(z).sum(1, keepdims=True))
            own = sum(p[t, row[t + 1]] for t in range(len(row) - 1) if learned[t + 1])
            assert own == pytest.approx(expected, rel=1e-4)
    assert n == 8 and meta["splits"]["train"]["pairs"] + meta["splits"]["val"]["pairs"] == 8


def test_the_last_of_several_answers_is_learned(made, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [
        {"chosen": conversation(f"{i}", "b", "c", "d"),
         "rejected": conversation(f"{i}", "b", "c", "ee")} for i in range(4)])
    state = load_checkpoint(made / "chat/ckpt.pt")
    assert state["model_args"]["block_size"] == 64
    # A template so short that all of it fits.
    jinja = ("{% for m in messages %}{{ m.content }}"
             "{{ ':' if m.role == 'user' else '<|endoftext|>' }}{% endfor %}")
    template = ChatTemplate({"jinja": jinja, "ends": [BYTES.eot_token]})
    (ids, mask), = template.sequences(to_pair(json.loads(open(source).readline()))[1], BYTES)
    assert BYTES.decode(ids[mask == 1]) == "b<|endoftext|>ee<|endoftext|>"
    writer = PairWriter(PairOptions(sources=[source], reference=str(made / "chat/ckpt.pt")))
    writer.template = template
    found = [pair for pairs in writer.read().values() for pair in pairs]
    assert len(found) == 4
    for (chosen, one), (rejected, two) in found:
        assert BYTES.decode(chosen[one == 1]) == "d<|endoftext|>"
        assert BYTES.decode(rejected[two == 1]) == "ee<|endoftext|>"


def test_rows_are_no_longer_than_asked_for(made, tmp_path, capsys):
    """Of 20 tokens: a multiple of 16 above would not be taken by a run of that block_size."""
    source = write_jsonl(tmp_path / "a.jsonl", [
        {"prompt": f"{i}", "chosen": "x" * n, "rejected": "y"} for i in range(8) for n in (2, 99)])
    base = len(ChatTemplate().sequences([("user", "1"), ("assistant", "xx")], BYTES)[0][0])
    assert data_pairs.main([source, "--out", str(tmp_path / "out"), "--block_size", str(base),
                            "--reference", str(made / "chat/ckpt.pt")]) == 0
    meta = json.loads((tmp_path / "out/meta.json").read_text())
    assert meta["block_size"] == base and base % 16
    assert f"8 pairs left out: longer than {base + 1} tokens" in capsys.readouterr().out


def test_pairs_that_the_template_refuses_are_named_or_left_out(made, tmp_path, capsys, monkeypatch):
    source = write_jsonl(tmp_path / "a.jsonl", [
        {"prompt": f"{i}", "chosen": "x", "rejected": "y"} for i in range(9)])
    real = ChatTemplate.sequences

    def refuse(self, messages, tokenizer):
        if messages[0][1] == "4":
            raise DataError("no system messages")
        return real(self, messages, tokenizer)
    monkeypatch.setattr(ChatTemplate, "sequences", refuse)
    argv = [source, "--out", str(tmp_path / "out"), "--reference", str(made / "chat/ckpt.pt")]
    assert data_pairs.main(argv) == 2
    assert "a.jsonl:5: no system messages\n--skip_bad" in capsys.readouterr().err
    assert data_pairs.main([*argv, "--skip_bad"]) == 0
    assert "Left out 1 bad records" in capsys.readouterr().out


def test_the_example_is_wrong_by_one_letter():
    for _, (_, pair) in zip(range(300), example_records("example")):
        right, wrong = pair["chosen"], pair["rejected"]
        assert right.lower() == wrong.lower() and sum(a != b for a, b in zip(right, wrong)) == 1


@pytest.mark.parametrize("argv, message", [
    (["--reference", "byte"], "byte"),
    (["--reference", "{gpt}"], "needs? the checkpoint of a chat model"),
    (["--reference", "{chat}", "--val_fraction", "2"], "--val_fraction: must be below 1"),
])
def test_bad_settings_are_refused(made, tmp_path, capsys, argv, message, data_dir):
    base = dict(gpt=tmp_path / "gpt/ckpt.pt", chat=made / "chat/ckpt.pt")
    if "{gpt}" in argv:
        train(load_config(None, SHAPE | dict(data_dir=str(data_dir), max_iters=0, tokenizer="byte",
                                             out_dir=str(tmp_path / "gpt"))))
    argv = [str(made / "pairs.jsonl"), "--out", str(tmp_path / "out"),
            *(a.format(**base) for a in argv)]
    assert data_pairs.main(argv) == 2
    assert not (tmp_path / "out").exists()
    assert re.search(message, capsys.readouterr().err)


# -----------------------------------------------------------------------------
# the loss

def formula(model, tokens, mask, reference, beta, nll):
    """DPO's loss of each pair as the paper (and TRL) write it, from whole logits."""
    logps, lengths = [], []
    for side in (0, 1):
        logits = model(tokens[:, side, :-1])  # (B, T, V)
        p = F.log_softmax(logits, -1).gather(-1, tokens[:, side, 1:, None])[..., 0]
        counted = mask[:, side, 1:]
        logps.append((p * counted).sum(1))
        lengths.append(counted.sum(1))
    own = torch.stack(logps, 1)
    h = (own[:, 0] - own[:, 1]) - (reference[:, 0] - reference[:, 1])
    return -F.logsigmoid(beta * h) - nll * logps[0] / lengths[0], beta * h


@pytest.mark.parametrize("nll", [0.0, 0.7])
def test_loss_and_gradients_are_the_papers(made, nll):
    torch.manual_seed(0)
    model = PreferenceGPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=257, block_size=64))
    model.keys = SimpleNamespace(dpo_beta=0.3, dpo_nll=nll)
    tokens, mask, reference = (torch.from_numpy(a[:5].astype(np.float32 if a.ndim == 2 else
                                                             np.int64)) for a in
                               rows(made / "pairs"))
    reference = reference + torch.linspace(-3, 3, 10).view(5, 2)
    losses, margins = formula(model, tokens, mask, reference, 0.3, nll)
    expected = torch.autograd.grad(losses.mean(), list(model.parameters()))
    loss, sums = model(tokens, mask, reference)
    torch.testing.assert_close(loss, losses.mean())
    found = torch.autograd.grad(loss, list(model.parameters()))
    for (name, _), e, g in zip(model.named_parameters(), expected, found, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-6, msg=name)
    found = model.numbers(sums | dict(loss=loss * 5, count=5))
    assert found["accuracy"] == (margins > 0).float().mean()
    assert found["margin"] == pytest.approx(margins.mean().item(), rel=1e-4)
    assert found["margin"] == pytest.approx(found["chosen"] - found["rejected"])
    assert "exact" not in found and "exact" in model.eval().numbers(
        model(tokens, mask, reference)[1] | dict(count=5))


@pytest.mark.parametrize("keys, names", [
    (dict(dpo_beta=0.6, dpo_nll=0.0), {"loss", "chosen", "rejected", "margin"}),
    (dict(dpo_beta=0.3, dpo_nll=1.0), {"loss"})])
def test_keys_of_the_loss_change_these_numbers_only(made, keys, names):
    torch.manual_seed(0)
    model = PreferenceGPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, vocab_size=257, block_size=64))
    batch = [torch.from_numpy(a[:5].astype(np.float32 if a.ndim == 2 else np.int64))
             for a in rows(made / "pairs")]
    found = []
    for values in (dict(dpo_beta=0.3, dpo_nll=0.0), keys):
        model.eval().keys = SimpleNamespace(**values)
        loss, sums = model(*batch)
        found.append(model.numbers(sums | dict(count=5)) | dict(loss=float(loss)))
    assert {name for name in found[0] if found[0][name] != found[1][name]} == names


def test_without_pairs_it_is_a_gpt():
    model = PreferenceGPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=50, block_size=8))
    assert model.eval()(torch.zeros(1, 4, dtype=torch.int64)).shape == (1, 4, 50)
    assert model.numbers(dict(loss=1.0, count=1.0)) == {}


def test_pairs_of_other_lengths_can_be_mixed(made, tmp_path):
    """Filled up to the longer row, each answer has the log probability of its folder."""
    pairs = write_jsonl(tmp_path / "long.jsonl", [
        {"prompt": f"{i}?", "chosen": "x" * 20, "rejected": "y" * 9} for i in range(70)])
    reference = str(made / "chat/ckpt.pt")
    assert data_pairs.main([pairs, "--out", str(tmp_path / "long"), "--reference", reference]) == 0
    config = load_config(None, settings(made, tmp_path / "out", batch_size=8, data_dir=(
        f"{made / 'pairs'}:1,{tmp_path / 'long'}:1")))
    data = open_data(config, Ranks())
    tokens, mask, logps = data.train.get_batch()
    widths = [rows(folder)[0].shape[2] for folder in (made / "pairs", tmp_path / "long")]
    assert tokens.shape == mask.shape == (8, 2, widths[1]) and widths[0] < widths[1]
    assert data.spec["row_tokens"] == widths[1] - 1
    with torch.no_grad():
        found = sum_answer_logps(load_model(reference)[0], tokens.numpy(), mask.numpy())
    assert np.allclose(found, logps, atol=1e-4)
    last = train(config)["history"][-1]
    assert last["val_loss"] == pytest.approx((last["val_loss_pairs"] + last["val_loss_long"]) / 2)


# -----------------------------------------------------------------------------
# the loop

def test_it_starts_at_the_reference_and_learns(made, tmp_path):
    """At step 0 the margin is 0 and the loss ln 2, in a last batch that is smaller as well."""
    last = train(load_config(None, settings(made, tmp_path / "out", max_iters=30,
                                            eval_interval=15)))
    first, *_, end = last["history"]
    assert first["val_loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert first["val_margin"] == pytest.approx(0, abs=1e-6)
    assert end["val_accuracy"] > 0.9 and end["val_loss"] < 0.6
    model, tokenizer = load_model(tmp_path / "out/ckpt.pt")
    assert type(model) is PreferenceGPT and model.template and tokenizer.kind == "byte"
    from model.sample import main
    assert main(["--chat", "--ckpt", str(tmp_path / "out/ckpt.pt"), "--prompt", "7?",
                 "--max_new_tokens", "5"]) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_margin_is_zero_at_the_start_in_the_precision_of_the_data(made, tmp_path, capsys,
                                                                      dtype):
    """With the command that data.prepare.pairs prints. In another precision it would not be zero:
    refused, with the commands."""
    out = tmp_path / "pairs"
    assert data_pairs.main([str(made / "pairs.jsonl"), "--out", str(out), "--dtype", dtype,
                            "--reference", str(made / "chat/ckpt.pt")]) == 0
    command = re.search("^Next: python run_train.py (.*)", capsys.readouterr().out, re.M)[1]
    shape = [f"--{k}={v}" for k, v in SHAPE.items() if k not in ("dtype", "vocab_size")]
    config = load_config(None, [*shape, *shlex.split(command), "--max_iters=0",
                                f"--out_dir={tmp_path}/out"])
    first, = train(config)["history"]
    assert first["val_margin"] == first["val_accuracy"] == 0
    other = dict(float32="bfloat16", bfloat16="float32")[dtype]
    with pytest.raises(DataError, match=f"dtype: {other}, but .* are in {dtype}: train with --dtype"
                                        f" {dtype}, or .* --out {out} --dtype {other}"):
        train(config.replace(dtype=other))


@pytest.mark.parametrize("native", [True, False])
def test_the_readmes_recipe_runs_with_and_without_native_bfloat16(made, tmp_path, monkeypatch,
                                                                  native):
    monkeypatch.setattr(device, "has_native_bfloat16", lambda device: native)
    changes = settings(made, tmp_path / "out", max_iters=0)
    del changes["dtype"]
    recipe = load_config("train/configs/dpo.yaml", changes)
    assert train(recipe)["history"][0]["val_margin"] == 0


def test_adapters_alone(made, tmp_path):
    """The weights stay, and what is exported has the adapters in them."""
    from model.convert import main
    changes = settings(made, tmp_path / "out", lora_rank=2)
    first = train(load_config(None, changes))["history"][0]
    assert first["val_margin"] == pytest.approx(0, abs=5e-3)
    before, state = (load_checkpoint(p) for p in (made / "chat/ckpt.pt", tmp_path / "out/ckpt.pt"))
    base = {n.removesuffix("base") + "weight" if n.endswith(".base") else n: t
            for n, t in state["model"].items() if ".lora_" not in n}
    assert base.keys() == before["model"].keys()
    assert all(torch.equal(t, before["model"][n]) for n, t in base.items())
    assert all(".lora_" in name for name in state["optimizer"]["state"])
    idx = torch.arange(40)[None]
    for name in ("hf", "merged.pt"):
        assert main(["--ckpt", str(tmp_path / "out/ckpt.pt"), "--to", str(tmp_path / name)]) == 0
        (ours, _), (theirs, _) = load_model(tmp_path / "out/ckpt.pt"), load_model(tmp_path / name)
        torch.testing.assert_close(ours(idx), theirs(idx))
    assert theirs.template and theirs.state_dict().keys() == before["model"].keys()


@pytest.mark.parametrize("kind", ["chat", "dpo"])
def test_a_model_without_adapters_starts_from_merged_weights_only(made, tmp_path, monkeypatch,
                                                                  kind):
    """The refusal names the command, after which no weight is lost."""
    from model.convert import main
    monkeypatch.chdir(tmp_path)
    train(load_config(None, settings(made, "out", lora_rank=2, learning_rate=0.1)))
    start = settings(made, "next", model=kind, data_dir=str(made / "chats"), max_iters=0)
    def prepare(path):
        if kind == "dpo":
            assert data_pairs.main([str(made / "pairs.jsonl"), "--out", "pairs", "--reference",
                                    path, "--force"]) == 0
            start["data_dir"] = "pairs"
        return load_config(None, start | dict(init_from=path))
    with pytest.raises(CheckpointError, match="adapters .* set model, ") as refused:
        train(prepare("out/ckpt.pt"))
    command = re.search("python -m model.convert (.*)", str(refused.value))[1]
    assert main(shlex.split(command)) == 0
    train(prepare("merged.pt"))
    (ours, _), (theirs, _) = load_model("out/ckpt.pt"), load_model("next/ckpt.pt")
    idx = torch.arange(40)[None]
    torch.testing.assert_close(ours(idx), theirs(idx))


def test_pairs_of_other_formulas_are_named(made, tmp_path, capsys):
    folder = shutil.copytree(made / "pairs", tmp_path / "pairs")
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["formulas"] == {}
    meta["formulas"] = {"MLP (model/gpt.py)": "0"}
    (folder / "meta.json").write_text(json.dumps(meta))
    train(load_config(None, settings(made, tmp_path / "out", max_iters=0, data_dir=str(folder))))
    assert capsys.readouterr().err.count("pairs: written with other formulas") == 1


@pytest.mark.parametrize("changes, message", [
    (dict(init_from="scratch"), "init_from: missing"),
    (dict(init_from="{other}"), "not the weights with which the pairs were prepared"),
    (dict(data_dir="{chats}"), "data.prepare.pairs FILE... --reference CKPT --out "),
    (dict(dpo_nll=-1.0), "dpo_nll"),
    (dict(block_size=16), "prepare the data with --block_size 16"),
])
def test_what_does_not_belong_together_is_refused(made, tmp_path, changes, message):
    if "{other}" in changes.values():
        train(load_config(None, SHAPE | dict(model="chat", data_dir=str(made / "chats"), seed=2,
                                             max_iters=0, out_dir=str(tmp_path / "other"))))
    places = dict(other=tmp_path / "other/ckpt.pt", chats=made / "chats")
    changes = {k: v.format(**places) if isinstance(v, str) else v for k, v in changes.items()}
    with pytest.raises(ValueError, match=message):
        train(load_config(None, settings(made, tmp_path / "out") | changes))


@pytest.mark.matrix(122)
def test_killed_and_resumed(made, tmp_path):
    """kill -9 while a model learns preferences (DPO) -> the end is exact"""
    changes = settings(made, tmp_path / "a", max_iters=12, save_interval=3, dropout=0.1,
                       lr_decay_iters=None, vocab_size=None)
    train(load_config(None, changes))
    changes |= dict(out_dir=str(tmp_path / "b"))
    killed = Program(**changes, env=dict(FAULT="before_step@8=kill9"))
    assert killed.wait()[0] == -9
    train(load_config(None, changes))
    assert_same(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("how, rank", [
    ("ddp", 0), pytest.param("fsdp", 2, marks=pytest.mark.slow)])
def test_two_ranks_equal_one(made, tmp_path, how, rank):
    assert_two_ranks_equal_one(tmp_path, settings(made, "", lora_rank=rank), how, val_loss=1e-5,
                               val_accuracy=0, val_exact=0)
