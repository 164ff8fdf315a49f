"""Memory: step 0 is the backbone, everything learns, and a checkpoint holds the memory alone."""

import contextlib
import json
import random
import shutil
import types

import numpy as np
import pytest
import torch
from conftest import TINY, run
from processes import python
from runs import (
    SMALL,
    WAYS,
    Program,
    assert_a_kill_changes_nothing,
    assert_same,
    assert_two_ranks_equal_one,
    go,
    run_program,
    tensors,
)

import data.prepare as data_prepare
from data.prepare import chat as data_chat
from model import convert, memory, sample
from model.core.adapters import is_adapter
from model.core.load import load_model
from model.core.weights import check_must_match, read_backbone
from model.memory import __main__ as command
from train.base.errors import ConfigError
from train.checkpoint import load_checkpoint
from train.config import load_config
from train.dataloader import open_token_data
from train.distributed import Ranks
from train.evaluate import evaluate

BYTES = dict(tokenizer="byte", vocab_size=None)
OWN = BYTES | dict(model="memory", n_chapters=4, chapters_per_token=2, chapter_size=8)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory, data_dir):
    """A trained GPT with tied weights."""
    out = tmp_path_factory.mktemp("backbone")
    go(data_dir, out, **BYTES, n_head=2, qk_norm=True)
    return out / "ckpt.pt"


@pytest.mark.parametrize("model, name, there, here", [
    ("memory", "backbone", dict(spec=dict(backbone="a")), dict(backbone="b")),
    ("memory", "chapters_per_token", dict(config=dict(chapters_per_token=4)), {}),
    ("sae", "backbone", dict(spec=dict(backbone="a")), dict(backbone="b")),
    ("sae", "layer", dict(spec=dict(backbone="a"), config=dict(layer=0)), dict(backbone="a"))])
def test_what_was_learned_for_something_else_is_not_adopted(model, name, there, here):
    def check(**changes):
        config = load_config(None, SMALL | dict(model=model, backbone="x.pt", **changes))
        check_must_match(there, config, here, "ckpt.pt")
    with pytest.raises(ValueError, match=f"(?s){name}: checkpoint has .*--allow_change {name}"):
        check()
    check(allow_change=[name])
    check_must_match({}, load_config(None, SMALL | dict(model=model, backbone="x.pt")), here, "")


def tiny(backbone, **changes):
    return load_config(None, SMALL | OWN | dict(backbone=str(backbone)) | changes)


def built(backbone, **changes):
    spec = dict(vocab_size=257, backbone=read_backbone(str(backbone))["digest"])
    return memory.build_model(tiny(backbone, **changes), types.SimpleNamespace(spec=spec))


def batch(rows=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(256, (rows, 8), generator=generator) for _ in range(2))


# -----------------------------------------------------------------------------
# the model

def test_step_0_is_the_backbone_to_the_bit(backbone):
    base, _ = load_model(str(backbone))
    model, (x, y) = built(backbone).eval(), batch()
    assert torch.equal(model(x), base(x))
    assert torch.equal(model(x, y)[0], base(x, y)[0])


def test_adapters_on_a_trained_backbone_keep_its_weights(backbone):
    base, _ = load_model(str(backbone))
    model, (x, _) = built(backbone, train_base=True, lora_rank=2).eval(), batch()
    assert torch.allclose(model(x), base(x), atol=1e-5)


@pytest.mark.parametrize("rank", [0, 2])
def test_everything_learns_but_the_backbone(backbone, rank):
    model, (x, y) = built(backbone, lora_rank=rank), batch()
    own = {n: p for n, p in model.named_parameters() if memory.is_memory(n)}
    assert {n for n, p in model.named_parameters() if p.requires_grad} == own.keys()
    optimizer = torch.optim.AdamW(own.values(), lr=0.01)
    assert any(is_adapter(n) for n in own) == bool(rank)
    for step in range(2):  # at first the gates alone, and the routers by their own losses
        optimizer.zero_grad()
        model(x, y)[0].backward()
        moved = {n for n, p in own.items() if p.grad is not None and p.grad.any()}
        assert {n for n in own if n.endswith(("gate.weight", "router.weight"))} <= moved
        assert step or not {n for n in moved if "values" in n}
        optimizer.step()
    assert moved == own.keys()


def test_reading_equals_attention_written_out(backbone):
    model = open_gates(built(backbone))
    chapters, c = model.h[0].memory, model.config
    x = torch.randn(2, 8, c.n_embd)
    y, (logits, _) = chapters(x)
    H, D, S, n = c.n_head, c.head_dim, c.chapter_size, c.n_chapters
    keys = chapters.keys.weight.view(n, H, S, D)
    values = chapters.values.weight.view(n, H, D, S).mT
    for b, t in ((0, 0), (1, 5)):
        h = chapters.ln(x)[b, t]
        p = (chapters.router.weight @ h).softmax(-1)
        q = torch.nn.functional.rms_norm((chapters.q.weight @ h).view(H, D), (D,))
        read = []
        for i in range(H):
            chosen = p.topk(2).indices.tolist()
            scores = torch.cat([keys[j, i] @ q[i] / D ** 0.5 + p[j].log() for j in chosen])
            read.append(scores.softmax(0) @ torch.cat([values[j, i] for j in chosen]))
        gate = (chapters.gate.weight @ h + chapters.gate.bias).tanh()
        assert torch.allclose(y[b, t], chapters.o.weight @ torch.cat(read) * gate, atol=1e-5)
        assert torch.allclose(logits[b, t].softmax(-1), p, atol=1e-6)


def open_gates(model):
    for block in model.h:
        torch.nn.init.normal_(block.memory.gate.weight)
    return model


def test_split_into_micro_batches_changes_no_gradient(backbone):
    model, (x, y) = open_gates(built(backbone, load_balance_coef=1.0)), batch()
    found = []
    for parts in (1, 4):
        model.zero_grad()
        for a, b in zip(x.chunk(parts), y.chunk(parts)):
            (model(a, b)[0] / parts).backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad})
    for name, grad in found[0].items():
        assert torch.allclose(found[1][name], grad, rtol=1e-4, atol=1e-6), name


# -----------------------------------------------------------------------------
# runs

def memory_run(data_dir, out_dir, ranks=0, **changes):
    """train/configs/memory.yaml, made tiny; the shape is the backbone's."""
    settings = {k: v for k, v in TINY.items() if k not in ("n_layer", "n_head", "n_embd",
                                                           "n_hidden")}
    settings |= dict(data_dir=data_dir, out_dir=out_dir, tokenizer="byte", block_size=8,
                     old_data_dir="") | changes
    code, text = run("--config", "train/configs/memory.yaml",
                     *(f"--{k}={v}" for k, v in settings.items()), ranks=ranks)
    assert code == 0, text
    return text


def test_commands_of_the_readme(tmp_path, data_dir, backbone):
    text = memory_run(data_dir, tmp_path, backbone=backbone, max_iters=4)
    assert "Frozen: " in text and "load balance" in text
    state = load_checkpoint(str(tmp_path / "ckpt.pt"))
    assert all(".memory." in name for name in state["model"])
    assert state["spec"]["backbone"] and state["config"]["backbone"] == str(backbone)
    done = python("-m", "model.sample", "--ckpt", tmp_path / "ckpt.pt", "--seed", "1",
                  "--max_new_tokens", "12", "--prompt", "line", "--dtype", "bfloat16")
    assert done.returncode == 0 and done.stdout.startswith("line"), done.stderr


@pytest.mark.matrix(132)
def test_killed_and_resumed_is_the_same_bit_for_bit(tmp_path, data_dir, backbone):
    """kill -9 while a memory learns a text -> the end is exact"""
    a, b = tmp_path / "a", tmp_path / "b"
    settings = OWN | dict(backbone=str(backbone), save_interval=5, max_iters=40,
                          lr_decay_iters=40, lr_groups=dict(gate=dict(learning_rate=0.05)))
    assert run_program(data_dir, a, **settings)[0] == 0
    program = Program(data_dir, b, **settings)
    program.wait_for(f"iter {random.randint(12, 25)}:")
    program.kill()
    code, text = run_program(data_dir, b, **settings)
    assert code == 0 and "Resuming from" in text
    assert_same(a, b)


@pytest.mark.parametrize("way, train_base", [("ddp", True), ("fsdp", False)])
def test_two_ranks_equal_one(tmp_path, data_dir, backbone, way, train_base):
    """FSDP with a frozen backbone and adapters on it: real weights among those to be filled."""
    settings = dict(backbone=backbone, max_iters=6, learning_rate=1e-3, n_chapters=4,
                    train_base=train_base, lora_rank=0 if train_base else 2)
    memory_run(data_dir, tmp_path / "one", **settings)
    memory_run(data_dir, tmp_path / "two", ranks=2, distributed=way, **settings)
    one, two = (tensors(tmp_path / n / "ckpt.pt")[0] for n in ("one", "two"))
    assert one.keys() == two.keys() and ("model.wte.weight" in one) == train_base
    for name, tensor in one.items():
        assert torch.allclose(two[name], tensor, rtol=1e-4, atol=1e-5), name


def test_three_rates_and_early_stopping(tmp_path, data_dir, backbone):
    settings = OWN | dict(backbone=str(backbone), train_base=True, lora_rank=2, max_iters=30,
                          eval_interval=2, early_stopping_patience=2,
                          early_stopping_metric="val_use_max", early_stopping_mode="max",
                          early_stopping_min_delta=10,
                          lr_groups={"h": dict(learning_rate=1e-4), "wte": 0,
                                     "lora_*": dict(learning_rate=1e-3),
                                     "memory": dict(learning_rate=1e-2)})
    result = go(data_dir, tmp_path, **settings)
    assert "no better val_use_max" in result["finished"]
    groups = load_checkpoint(str(tmp_path / "ckpt.pt"))["optimizer"]["param_groups"]
    rates = {name: group["initial_lr"] for group in groups for name in group["params"]}
    assert rates["h.0.memory.gate.weight"] == 1e-2 and rates["h.0.attn.q.base"] == 1e-4
    assert rates["h.0.mlp.up.lora_B"] == 1e-3
    assert rates["ln_f.weight"] == TINY["learning_rate"] and "wte.weight" not in rates


def chats(base, folder):
    """Prepared chats that a small model learns to answer."""
    rows = [json.dumps(dict(prompt=f"say {i}", response="moo")) for i in range(200)]
    (folder / "chats.jsonl").write_text("\n".join(rows))
    assert data_chat.main([str(folder / "chats.jsonl"), "--out", str(folder / "chats"),
                           "--tokenizer", str(base), "--block_size", "60"]) == 0
    return folder / "chats"


def test_chats_are_learned_and_merged_it_talks(tmp_path, data_dir, backbone, capsys):
    """Also where the backbone is elsewhere by now, and where adapters learned as well."""
    go(data_dir, tmp_path / "base", **BYTES, block_size=60, max_iters=40)
    base, out, merged = (tmp_path / n for n in ("base/ckpt.pt", "out", "merged.pt"))
    folder = chats(base, tmp_path)
    losses = [record["val_loss"] for record in go(
        folder, out, **OWN, backbone=str(base), block_size=60, lora_rank=4, max_iters=20,
        eval_interval=20, learning_rate=3e-2)["history"]]
    assert losses[-1] < losses[0] - 0.1
    base = base.rename(tmp_path / "moved.pt")
    there = ["--ckpt", str(out / "ckpt.pt"), "--to", str(merged)]
    assert convert.main(there) == 2
    said = capsys.readouterr().err
    assert "no such file; if it has moved, --backbone FILE" in said and "no model" not in said
    merging = python("-m", "model.convert", *there, "--backbone", base)  # as a person types it
    assert merging.returncode == 0, merging.stderr
    assert f"model.sample --ckpt {merged} --chat" in merging.stdout
    said = []
    for how in (["--ckpt", str(merged)],
                ["--ckpt", str(out / "ckpt.pt"), "--backbone", str(base)]):
        assert sample.main([*how, "--chat", "--prompt", "say 77", "--max_new_tokens", "9"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != "\n"
    assert command.main([*how, "--baseline"]) == 0  # the backbone is no chat model, and moved
    table = capsys.readouterr().out
    assert f"{losses[0]:.4f}" in table and f"{losses[-1]:.4f}" in table and "LoRA, rank" in table
    whole, beside = load_model(merged)[0], load_model(out / "ckpt.pt", backbone=str(base))[0]
    ids = torch.arange(40)[None]
    torch.testing.assert_close(whole(ids), beside(ids))
    assert sample.main(["--ckpt", str(merged), "--prompt", "say", "--max_new_tokens", "4"]) == 0


def test_losses_of_chats_by_hand(tmp_path, backbone):
    """The answers' cross-entropy, and what the routers add to it by the answers of each row: the
    same gradient whatever the split into micro-batches."""
    model = open_gates(built(backbone, load_balance_coef=1.0))
    tokens, mask = torch.randint(256, (4, 9)), torch.zeros(4, 9, dtype=torch.long)
    for row, n in enumerate((5, 1, 3, 0)):
        mask[row, 3:3 + n] = 1
    number = torch.zeros(4, 9, dtype=torch.long)
    found = []
    for parts in (1, 4):
        model.zero_grad()
        for batch in zip(*(t.chunk(parts) for t in (tokens, mask, number))):
            loss, sums = model(*batch)
            (loss * sums["count"] / 9).backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=1e-6)
    loss, sums = model(tokens, mask, number)
    logits = model(tokens[:, :-1])
    answers = mask[:, 1:] == 1
    own = torch.nn.functional.cross_entropy(logits[answers], tokens[:, 1:][answers])
    assert model.numbers({n: v.double() for n, v in sums.items()})["lm_loss"] == pytest.approx(
        own.item(), rel=1e-4)
    model.eval()
    loss, sums = model(tokens, mask, number)
    assert loss.item() == pytest.approx(own.item(), rel=1e-4) and int(sums["answers"]) == 3
    assert {"exact", "load_balance", "use_max"} <= model.numbers(
        {n: v.double() for n, v in sums.items()} | dict(loss=9 * loss.detach())).keys()


# -----------------------------------------------------------------------------
# bad input

def test_a_backbone_that_is_gone_or_another_is_named(tmp_path, data_dir, backbone):
    mine = tmp_path / "base.pt"
    shutil.copy(backbone, mine)
    settings = OWN | dict(backbone=str(mine), max_iters=4, eval_interval=2)
    go(data_dir, tmp_path / "o", **settings)
    go(data_dir, tmp_path / "other", **BYTES, seed=2, n_head=2)
    shutil.copy(tmp_path / "other" / "ckpt.pt", mine)
    code, text = run_program(data_dir, tmp_path / "o", **settings | dict(max_iters=8))
    assert code == 2 and "backbone: checkpoint has" in text and "Traceback" not in text
    with pytest.raises(ValueError, match="are not those of the training run"):
        load_model(str(tmp_path / "o" / "ckpt.pt"))
    mine.unlink()
    with pytest.raises(ValueError, match="backbone: .*base.pt: no such file"):
        load_model(str(tmp_path / "o" / "ckpt.pt"))


def test_bad_input_is_named(tmp_path, data_dir, backbone):
    code, text = run_program(data_dir, tmp_path, model="memory", chapters_per_token=99)
    assert code == 2 and "Traceback" not in text
    assert "(99) must not exceed n_chapters (16)" in text
    with pytest.raises(ConfigError, match="chapter_size: must be at least 1"):
        tiny(backbone, chapter_size=0)
    code, text = run_program(data_dir, tmp_path, **OWN, backbone=str(tmp_path / "nothing.pt"))
    assert code == 2 and "nothing.pt: no such file" in text
    code, text = run_program(data_dir, tmp_path, **OWN | dict(vocab_size=300),
                             backbone=str(backbone))
    assert code == 2 and "its vocabulary has 257 ids" in text


def test_without_a_backbone_all_is_trained_and_exported_where_that_is_exact(tmp_path, data_dir):
    """A GPT with memory from scratch, as a person types it; resumed, sampled, merged, exported."""
    settings = OWN | dict(n_head=2, max_iters=6, eval_interval=3, learning_rate=0.01)
    result = go(data_dir, tmp_path / "a", **settings)
    assert result["history"][-1]["val_loss"] < result["history"][0]["val_loss"]
    go(data_dir, tmp_path / "b", **settings | dict(max_iters=3))
    go(data_dir, tmp_path / "b", **settings)
    assert_same(tmp_path / "a", tmp_path / "b")
    ckpt, merged = str(tmp_path / "a" / "ckpt.pt"), str(tmp_path / "merged.pt")
    model, _ = load_model(ckpt)
    assert model.state_dict().keys() == load_checkpoint(ckpt)["model"].keys()
    start = built_from_scratch(**settings).state_dict()
    assert all((model.state_dict()[n] != t).any() for n, t in start.items())
    to_folder = python("-m", "model.convert", "--ckpt", ckpt, "--to", tmp_path / "hf")
    assert to_folder.returncode == 2 and "cannot be exported" in to_folder.stderr
    to_file = python("-m", "model.convert", "--ckpt", ckpt, "--to", merged)
    assert to_file.returncode == 0 and "a memory model" in to_file.stdout
    x, _ = batch()
    assert torch.equal(load_model(merged)[0](x), model(x))
    for path in (ckpt, merged):
        assert sample.main(["--ckpt", path, "--prompt", "say", "--max_new_tokens", "4"]) == 0
    code, text = run_program(data_dir, tmp_path / "c", **settings, lora_rank=2)
    assert code == 2 and "lora_rank: it needs a trained backbone" in text
    code, text = run_program(data_dir, tmp_path / "c", **settings, lora_lr=1e-3)
    assert code == 2 and "adapters exist if lora_rank is set" in text


def built_from_scratch(**settings):
    config = load_config(None, SMALL | settings)
    return memory.build_model(config, types.SimpleNamespace(spec=dict(vocab_size=257)))


# -----------------------------------------------------------------------------
# the document, old text, distillation

@pytest.fixture(scope="module")
def old_dir(tmp_path_factory):
    """Other text than that of data_dir."""
    folder = tmp_path_factory.mktemp("old")
    (folder / "old.txt").write_text("".join(f"{i} bottles on the wall\n" for i in range(400)))
    assert data_prepare.main([str(folder / "old.txt"), "--out", str(folder / "old"),
                              "--tokenizer", "byte"]) == 0
    return folder / "old"


def opened(data_dir, backbone, **changes):
    config = tiny(backbone, data_dir=str(data_dir), block_size=8, **changes)
    data = memory.open_data(config, Ranks())
    return memory.build_model(config, data), data


def test_the_memory_starts_from_the_keys_and_values_of_the_document(data_dir, backbone):
    """Computed once more from the residual stream, block by block; chapters of 12 tokens are the
    last ones of two windows of 8 each."""
    model, data = opened(data_dir, backbone, chapter_size=12)
    base, _ = load_model(str(backbone))
    windows = [data.train.positions(np.array([i]))[0] for i in range(8)]
    idx = torch.tensor(data.train.stream.read(np.array(windows), 8).astype(int))  # (8, T)
    x = base.wte(idx)
    rope = base.config.rope_tables(torch.arange(8.0)[:, None])[0]
    for block, mine in zip(base.h, model.h):
        attn, h, c = block.attn, block.ln_1(x), base.config
        k, v = (layer(h).view(8, 8, c.n_head, c.head_dim) for layer in (attn.k, attn.v))
        k = torch.nn.functional.rms_norm(k, (c.head_dim,), eps=c.norm_eps)
        for chapter in range(4):
            for head in range(c.n_head):
                a, b = (t[2 * chapter:2 * chapter + 2, :, head].flatten(0, 1)[-12:] for t in (k, v))
                group = chapter * c.n_head + head
                torch.testing.assert_close(mine.memory.keys.weight[group], a)
                torch.testing.assert_close(mine.memory.values.weight[group].mT, b)
        assert torch.equal(mine.memory.q.weight, attn.q.weight)
        assert torch.equal(mine.memory.o.weight, attn.o.weight)
        x = block(x, (rope,))


def divergence(p_logits, q_logits):
    """KL(p, q) at each position, from logits."""
    p, q = p_logits.softmax(-1), q_logits.softmax(-1)
    return (p * (p / q).log()).sum(-1)


@pytest.mark.parametrize("train_base", [False, True])
def test_loss_of_old_text_by_hand(data_dir, old_dir, backbone, train_base):
    model, data = opened(data_dir, backbone, old_data_dir=str(old_dir), old_weight=0.7,
                         load_balance_coef=0.0, z_loss_coef=0.0, train_base=train_base)
    assert data.train.n_tokens == 20_000  # in the log
    open_gates(model)
    if train_base:
        with torch.no_grad():
            model.h[0].attn.q.weight.mul_(2)  # the target stays
    base, _ = load_model(str(backbone))
    x, y, old_x, old_y = batch = data.train.get_batch("cpu", 3)
    loss, sums = model(*batch)
    wanted = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    old = divergence(base(old_x), model(old_x)).mean()
    torch.testing.assert_close(loss, wanted + 0.7 * old)
    found = model.numbers({name: v.double() for name, v in sums.items()} | dict(loss=loss))
    assert found["old_kl"] == pytest.approx(old.item(), rel=1e-4)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    (wanted + 0.7 * old).backward()
    by_hand = {name: p.grad for name, p in trained.items()}
    model.zero_grad()
    loss.backward()
    grads = {name: p.grad for name, p in trained.items() if p.grad is not None}
    for name, grad in grads.items():
        torch.testing.assert_close(grad, by_hand[name], rtol=1e-3, atol=1e-6)
    model.zero_grad()
    for rows in (slice(0, 1), slice(1, None)):  # as micro-batches
        part = [t[rows] for t in batch]
        (model(*part)[0] * len(part[0]) / len(x)).backward()
    for name, p in model.named_parameters():
        assert (p.grad is None) == (name not in grads)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, grads[name], rtol=1e-3, atol=1e-6)


def test_the_loss_on_old_text_is_reported(tmp_path, data_dir, old_dir, backbone):
    """Equal to that of the checkpoint on the prepared folder; the new text's is unchanged by it."""
    settings = OWN | dict(backbone=str(backbone), max_iters=6, eval_interval=3, learning_rate=0.03)
    text = go(data_dir, tmp_path / "a", **settings, old_data_dir=str(old_dir))["history"]
    start = go(data_dir, tmp_path / "b", **settings)["history"][0]
    assert text[0]["val_loss"] == start["val_loss"] and "val_old_loss" not in start
    config = load_config(None, SMALL | settings | dict(data_dir=str(old_dir)))
    loader = open_token_data(config, Ranks()).val
    model, _ = load_model(tmp_path / "a" / "ckpt.pt")
    n = config.eval_iters
    losses = [model(*loader.fixed_batch(i, n))[0] * len(loader.fixed_batch(i, n)[0])
              for i in range(loader.n_fixed(n))]
    rows = sum(len(loader.fixed_batch(i, n)[0]) for i in range(loader.n_fixed(n)))
    assert text[-1]["val_old_loss"] == pytest.approx(sum(losses).item() / rows, rel=1e-5)


@pytest.mark.matrix(132)
def test_with_old_text_a_kill_changes_nothing(tmp_path, data_dir, old_dir, backbone):
    """kill -9 while a memory learns a text and keeps an old one -> the end is exact"""
    assert_a_kill_changes_nothing(data_dir, tmp_path, **OWN, backbone=str(backbone),
                                  old_data_dir=str(old_dir), max_iters=14, save_interval=4)


@pytest.mark.parametrize("way", WAYS)
def test_with_old_text_two_ranks_equal_one(tmp_path, data_dir, old_dir, backbone, way):
    settings = SMALL | OWN | dict(data_dir=str(data_dir), backbone=str(backbone), max_iters=6,
                                  old_data_dir=str(old_dir), n_chapters=8)
    assert_two_ranks_equal_one(tmp_path, settings, way, val_loss=1e-4, val_old_loss=1e-4)


def test_chats_with_old_text_are_merged(tmp_path, data_dir, old_dir, backbone, capsys):
    go(data_dir, tmp_path / "base", **BYTES, block_size=60, max_iters=4)
    base = str(tmp_path / "base/ckpt.pt")
    history = go(chats(base, tmp_path), tmp_path / "out", **OWN, backbone=base, block_size=60,
                 max_iters=4, eval_interval=2, old_data_dir=str(old_dir))["history"]
    assert history[-1]["val_old_loss"] > 0 and "val_exact" in history[-1]
    ckpt, merged = str(tmp_path / "out/ckpt.pt"), str(tmp_path / "merged.pt")
    assert convert.main(["--ckpt", ckpt, "--to", merged]) == 0
    ids = torch.arange(20)[None]
    torch.testing.assert_close(load_model(merged)[0](ids), load_model(ckpt)[0](ids))
    assert command.main(["--ckpt", ckpt, "--baseline"]) == 0  # chats and text are no mixture
    assert "\nLoRA, rank" in capsys.readouterr().out


def test_bad_old_text_is_named(tmp_path, data_dir, old_dir, backbone):
    go(data_dir, tmp_path / "wide", **BYTES, block_size=60, max_iters=0)
    wide = str(tmp_path / "wide/ckpt.pt")
    for changes, message in [
            (dict(old_data_dir=str(tmp_path / "none")), "none"),
            (dict(old_data_dir=str(chats(wide, tmp_path)),
                  block_size=60), "has conversations"),
            (dict(old_data_dir=str(old_dir), folder=f"{data_dir}:0.5,{old_dir}:0.5"),
             "does not support mixtures")]:
        folder = changes.pop("folder", data_dir)
        code, text = run_program(folder, tmp_path / "o", **OWN | dict(backbone=str(backbone))
                                 | changes)
        assert code == 2 and message in text and "Traceback" not in text, text


# -----------------------------------------------------------------------------
# beside baselines

def test_baselines_are_printed_beside_the_memory(tmp_path, data_dir, old_dir, backbone, capsys):
    settings = OWN | dict(backbone=str(backbone), max_iters=4, eval_interval=4, learning_rate=0.01)
    history = go(data_dir, tmp_path / "a", **settings, old_data_dir=str(old_dir))["history"]
    assert command.main(["--ckpt", str(tmp_path / "a/ckpt.pt"), "--baseline"]) == 0
    table = {line[:30].strip(): line[30:].split() for line in capsys.readouterr().out.splitlines()
             if line.startswith(("backbone", "memory", "LoRA"))}
    losses = {name: [*map(float, cells[-2:])] for name, cells in table.items()}
    assert losses["memory"] == pytest.approx([history[-1]["val_loss"],
                                              history[-1]["val_old_loss"]], abs=1e-4)
    assert losses["backbone"] == pytest.approx([history[0]["val_loss"],
                                                history[0]["val_old_loss"]], abs=1e-4)
    assert len(losses) == 4
    go(data_dir, tmp_path / "scratch", **settings | dict(backbone="", n_head=2))
    assert command.main(["--ckpt", str(tmp_path / "scratch/ckpt.pt")]) == 2
    assert "without a backbone" in capsys.readouterr().err
    assert command.main(["--ckpt", str(backbone)]) == 2
    assert "a checkpoint of --model gpt; expected one of --model memory" in capsys.readouterr().err


def test_comparison_of_a_run_without_evaluations(tmp_path, data_dir, old_dir, backbone, capsys):
    """on the validation data, also of a mixture"""
    go(data_dir, tmp_path / "a", **OWN | dict(backbone=str(backbone), max_iters=1, eval_interval=0),
       old_data_dir=str(old_dir))
    go(f"{data_dir}:9,{old_dir}:1", tmp_path / "mixture", **OWN | dict(max_iters=1),
       backbone=str(backbone))
    for name in ("a", "mixture"):
        capsys.readouterr()
        assert command.main(["--ckpt", str(tmp_path / name / "ckpt.pt")]) == 0
        assert "backbone" in capsys.readouterr().out


def test_with_little_old_text_both_losses_are_of_as_many_batches(data_dir, old_dir, backbone):
    """Spread over all of each text."""
    model, data = opened(data_dir, backbone, old_data_dir=str(old_dir))
    new, old = data.val.new, data.val.old
    old.val_samples = 2 * old.val_batch_size
    found = evaluate(model.eval(), model, data.val, 3, Ranks(), contextlib.nullcontext)
    assert new.n_fixed(3) == 3 and data.val.n_fixed(3) == old.n_fixed(3) == 2
    for name, loader in (("val_loss", new), ("val_old_loss", old)):
        alone = evaluate(model, model, loader, 2, Ranks(), contextlib.nullcontext)
        assert found[name] == pytest.approx(alone["val_loss"], rel=1e-6)
