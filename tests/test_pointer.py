"""A GPT that points back: its probabilities by hand, the same one token at a time as all at once,
ranks, resume."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY
from runs import assert_a_kill_changes_nothing, assert_two_ranks_equal_one, go

from data import prepare
from model.generate import empty_cache, generate
from model.pointer import PointerConfig, PointerGPT
from model.sample.compiled import compile_decoder
from model.sample.lookup import look_up
from train.config import load_config


def small(seed=0, **changes):
    """A model of few tokens, so that texts repeat, with random weights."""
    model = PointerGPT(PointerConfig(**dict(
        n_layer=2, n_head=2, n_embd=16, n_hidden=32, vocab_size=5, block_size=16,
        prev_embedding=True, pointer_length=3) | changes)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn(p.shape, generator=generator)
    return model


def tokens(*shape, seed=0):
    return torch.randint(5, shape, generator=torch.Generator().manual_seed(seed))


def by_hand(model, text):
    """p(v) after each token of a text, from the definition: [[float] * 5]."""
    x = model.trunk(torch.tensor([text]))[0]
    p = (x @ model.lm_head.weight.T if model.lm_head else x @ model.wte.weight.T)[:, :5].softmax(-1)
    gate, more = (x @ model.pointer.gate + model.pointer.bias).tolist(), model.pointer.more.tolist()
    out = []
    for i in range(len(text)):
        mass = [math.exp(gate[i]) * float(p[i, v]) for v in range(5)]
        for j in range(1, i + 1):  # a candidate, and how many tokens before it are the last ones
            ends = [text[max(0, end - len(more)):end] for end in (j, i + 1)]
            same = sum(1 for _ in itertools.takewhile(
                lambda ab: ab[0] == ab[1], zip(reversed(ends[0]), reversed(ends[1]))))
            if same:
                mass[text[j]] += math.exp(sum(more[:same]))
        out.append([m / sum(mass) for m in mass])
    return torch.tensor(out)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, dict(pointer_length=1), dict(tie_weights=False)], ids=str)
def test_probabilities_are_those_of_the_definition(options):
    model, idx = small(**options), tokens(3, 16)
    found = model(idx).exp()
    for row, p in zip(idx.tolist(), found):
        torch.testing.assert_close(p, by_hand(model, row))
    torch.testing.assert_close(found.sum(-1), torch.ones(3, 16))
    plain = model.logits(model.trunk(idx)).softmax(-1)
    assert (found - plain).abs().max() > 0.1  # it points


def test_the_loss_and_its_gradient_are_those_of_the_logits():
    model, idx, targets = small(), tokens(3, 16), tokens(3, 16, seed=1)
    targets[0, :7] = targets[2] = -1
    loss, sums = model(idx, targets)
    with torch.no_grad():
        p = model(idx).exp()
    counts = targets >= 0
    wanted = -p.gather(-1, targets.clamp(min=0)[..., None])[counts].log().mean()
    torch.testing.assert_close(loss.detach(), wanted)
    assert sums["count"] == counts.sum() == 25
    # Once more in plain probabilities, of which autograd makes the gradient.
    x = model.trunk(idx)
    share, copied = (s.exp() for s in model.pointer(x, idx))
    p = model.logits(x).softmax(-1) * share[..., None]
    p = p + (copied[..., None] * F.one_hot(idx, 5)[:, None]).sum(2)  # (B, T, S, V) over S
    wanted = -p.gather(-1, targets.clamp(min=0)[..., None])[counts].log().mean()
    parameters = list(model.parameters())
    for a, b in zip(*(torch.autograd.grad(v, parameters) for v in (loss, wanted)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        assert a.any()
    assert model(idx, torch.full_like(idx, -1))[0] == 0


@torch.no_grad()
def test_cached_logits_are_those_of_the_full_forward():
    model, idx = small(), tokens(2, 16)
    full = model(idx)
    for cuts in ([1] * 16, [5, 1, 7, 3], [16]):
        cache = empty_cache(model, 2)
        parts = [model(part, cache=cache) for part in idx.split(cuts, dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model(idx, last_only=True), full[:, -1:])
    changed = idx.clone()
    changed[:, 9] = (idx[:, 9] + 1) % 5
    assert torch.equal(model(changed)[:, :9], full[:, :9])


@torch.no_grad()
def test_a_cache_knows_its_texts_whatever_happens_to_them():
    """Rolled, taken back, moved, cleared: its tokens are the last ones of each text."""
    model, idx = small(), tokens(3, 40)
    cache = empty_cache(model, 3)
    for part in idx.split([10] + [1] * 30, dim=1):
        model(part, cache=cache)
    assert torch.equal(cache.tokens, idx[:, -16:])
    cache.clear()
    model(idx[:, :9], cache=cache)
    cache.forget(torch.tensor([0, 2, 5]), idx[range(3), [8, 6, 3]][:, None])
    wanted = [[-1] * (16 - n) + row[:n] for row, n in zip(idx.tolist(), (9, 7, 4))]
    assert cache.tokens.tolist() == wanted
    cache.move(2, 0)
    model(idx[1:2, 7:8], cache=cache[1:2])
    assert cache.tokens[0].tolist() == wanted[2]
    assert cache.tokens[1].tolist() == [*wanted[1][1:], int(idx[1, 7])]


@pytest.mark.parametrize("lengths", [[3, 9, 1], [9, 9, 9]])
def test_texts_written_together_are_those_written_alone(lengths):
    model, idx = small(seed=3), tokens(3, 9, seed=2)
    both = generate(model, idx, 30, temperature=0, lengths=torch.tensor(lengths), each=2)
    assert torch.equal(both[::2], both[1::2])
    for row, n, new in zip(idx, lengths, both[::2, 9:]):
        assert torch.equal(generate(model, row[None, :n], 30, temperature=0)[0, n:], new)
        assert torch.equal(look_up(model, row[None, :n], 12)[0][0, n:], new[:12])


def test_it_copies_what_it_has_not_learned(tmp_path):
    """Words seen once, each twice: half of a text can only be known by pointing."""
    generator, words = torch.Generator().manual_seed(0), []
    for _ in range(800):
        word = "".join(chr(97 + int(i)) for i in torch.randint(26, (6,), generator=generator))
        words += [word, word]
    (tmp_path / "words.txt").write_text(" ".join(words))
    prepare.prepare([str(tmp_path / "words.txt")], tmp_path / "d", log=lambda line: None)
    loss = {kind: go(tmp_path / "d", tmp_path / kind, model=kind, block_size=32, max_iters=40,
                     vocab_size=None)["history"][-1]["val_loss"] for kind in ("gpt", "pointer")}
    assert loss["pointer"] < loss["gpt"] - 0.3


def test_what_it_is_not_is_refused():
    with pytest.raises(ValueError, match="expected the blocks of a plain GPT, found PointerBlock"):
        compile_decoder(small())
    with pytest.raises(ValueError, match="pointer_length"):
        load_config(None, TINY | dict(model="pointer", pointer_length=0))
    with pytest.raises(ValueError, match="n_embd"):
        load_config(None, TINY | dict(model="pointer", n_embd=33))


def test_killed_and_resumed(data_dir, tmp_path):
    assert_a_kill_changes_nothing(data_dir, tmp_path, model="pointer", max_iters=14,
                                  save_interval=3, dropout=0.1, lr_decay_iters=20)


def test_two_ranks_equal_one(data_dir, tmp_path):
    settings = TINY | dict(model="pointer", data_dir=str(data_dir), max_iters=6, eval_interval=3)
    assert_two_ranks_equal_one(tmp_path, settings, "fsdp", val_loss=1e-5)
