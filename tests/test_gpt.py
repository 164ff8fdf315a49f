"""model/gpt.py and model/core/ops.py: counts, first loss, every option, caching, causality,
and that each fast path computes what its plain form does."""

import functools
import itertools
import math
import os
import random
import shutil
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_distributed import in_ranks

import model.core.ops
from data.tokenizer import load_tokenizer
from model.core.kv_cache import KVCache
from model.core.ops import (
    LinearCrossEntropy,
    SampledCrossEntropy,
    apply_dropout,
    apply_rope,
    attend,
    attend_in_blocks,
    fused_linear,
    limit_to_window,
    rope_table,
    save_matrix_products,
    token_logprobs,
)
from model.gpt import GPT, GPTConfig, Norm, build_model, sample
from train.base.keys import GPTKeys
from train.device import compile_model

GPT2 = dict(block_size=1024, vocab_size=50257, n_layer=12, n_head=12, n_embd=768, norm="layer",
            pos="learned", mlp="gelu", bias=True, tie_weights=True)
LLAMA = dict(block_size=16, vocab_size=61, n_layer=2, n_head=4, n_embd=32, n_hidden=48)

OPTIONS = dict(
    norm=("rms", "layer"), pos=("rope", "learned"), mlp=("swiglu", "gelu", "relu2"),
    n_kv_head=(4, 2, 1), bias=(False, True), tie_weights=(True, False), qk_norm=(False, True),
    prev_embedding=(False, True), ngram_rows=(0, 50), key_offset=(False, True),
    dropout=(0.0, 0.1))


def pairwise(options):
    """A few combinations in which every two values of different options meet."""
    def pairs(combination):
        return set(itertools.combinations(combination.items(), 2))

    left = {((a, x), (b, y)) for a, b in itertools.combinations(options, 2)
            for x in options[a] for y in options[b]}
    rng, chosen = random.Random(0), []
    while left:
        candidates = [{k: rng.choice(v) for k, v in options.items()} for _ in range(50)]
        chosen.append(max(candidates, key=lambda c: len(pairs(c) & left)))
        left -= pairs(chosen[-1])
    return chosen


COMBINATIONS = pairwise(OPTIONS)


def short(combination):
    return "-".join(str(v) for v in combination.values())


def tiny(**changes):
    torch.manual_seed(0)
    return GPT(GPTConfig(**LLAMA | changes))


def tokens(*shape, vocab=61, seed=0):
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))


def randomise(model, std=0.3):
    """Weights large enough that every part matters, zero-initialised ones too."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.empty(p.shape).normal_(0.0, std, generator=generator)
            p.copy_(1 + noise if "ln_" in name and name.endswith("weight") else noise)
    return model


def gradients(model, idx, targets, seed=0):
    """Loss and gradients of one batch; the seed fixes the dropout."""
    model.zero_grad()
    torch.manual_seed(seed)
    loss, _ = model(idx, targets)
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def train(model, steps, autocast=None, lr=1e-2, vocab=61):
    """The losses of `steps` AdamW steps on batches of a simple language: most tokens follow from
    the one before."""
    generator = torch.Generator().manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
    losses = []
    for _ in range(steps):
        idx = torch.randint(0, vocab, (4, 17), generator=generator)
        for t in range(1, 17):
            keep = torch.rand(4, generator=generator) < 0.2
            idx[:, t] = torch.where(keep, idx[:, t], (3 * idx[:, t - 1] + 1) % vocab)
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            loss, _ = model(idx[:, :-1].contiguous(), idx[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def close(a, b, tolerance):
    assert a.shape == b.shape
    assert ((a.float() - b.float()).norm() <= tolerance * b.float().norm().clamp(min=1e-6))


# --- shape and start

def sizes(config):
    with torch.device("meta"):
        model = GPT(config)
    matrices = [p.numel() for p in model.parameters() if p.dim() >= 2]
    rest = [p.numel() for p in model.parameters() if p.dim() < 2]
    return len(matrices), sum(matrices), len(rest), sum(rest)


def test_production_parameters():
    assert sizes(GPTConfig(vocab_size=32_000)) == (113, 50_036_736, 33, 12_672)


def test_gpt2_parameters_are_the_published_ones_and_padding():
    _, matrices, _, rest = sizes(GPTConfig(**GPT2))
    assert matrices + rest == 124_439_808 + (50_304 - 50_257) * 768


@pytest.mark.parametrize("shape", [
    {}, dict(tie_weights=False), dict(vocab_size=32_000), dict(n_embd=768, n_head=12),
    GPT2 | dict(n_layer=2), dict(n_embd=768, n_head=12, tie_weights=False),
    dict(n_embd=2048, n_layer=1), dict(prev_embedding=True)], ids=str)
def test_first_loss_is_that_of_a_uniform_guess(shape):
    model = tiny(**shape)
    vocab = model.config.vocab_size
    idx = tokens(16, 17, vocab=vocab)
    with torch.no_grad():
        loss, sums = model(idx[:, :-1], idx[:, 1:])
    assert abs(loss.item() - math.log(vocab)) < 0.1 and sums == dict(count=256)


def test_initial_weights_are_a_function_of_seed_and_name():
    a, b, c = (GPT(GPTConfig(**LLAMA), seed=seed) for seed in (7, 7, 8))
    with torch.device("meta"):
        empty = GPT(GPTConfig(**LLAMA))
    drawn = {n: empty.initial(n, p.shape, 7) for n, p in reversed(list(empty.named_parameters()))}
    seen = []
    for (name, p), q, r in zip(a.named_parameters(), b.parameters(), c.parameters()):
        assert torch.equal(p, q) and torch.equal(p, drawn[name]), name
        assert p.dim() < 2 or not torch.equal(p, r), name
        assert p.dim() < 2 or not any(p.shape == o.shape and torch.equal(p, o) for o in seen), name
        seen.append(p)
    assert abs(a.h[0].mlp.up.weight.std().item() - 0.02) < 0.002
    assert abs(a.h[0].mlp.down.weight.std().item() - 0.02 / math.sqrt(4)) < 0.002


def test_flops_per_unit_by_hand():
    # 1 layer, C 8, 2 heads of 4, 1 key/value head, hidden 16, vocabulary 128, T 4, tied, rope.
    model = GPT(GPTConfig(block_size=4, vocab_size=128, n_layer=1, n_head=2, n_kv_head=1, n_embd=8,
                          n_hidden=16))
    weights = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16 + 3 * 8 + 128 * 8
    assert model.flops_per_unit() == 6 * weights + 12 * 1 * 8 * 4
    # Tables that are only looked up do not count.
    other = GPT(GPTConfig(block_size=4, vocab_size=128, n_layer=1, n_head=2, n_kv_head=1, n_embd=8,
                          n_hidden=16, tie_weights=False, pos="learned"))
    assert other.flops_per_unit() == model.flops_per_unit()
    # Frozen weights have no gradients of their own; where all are, there is no backward pass.
    other.requires_grad_(False).h[0].mlp.requires_grad_(True)
    other.wte.requires_grad_(True)  # looked up
    assert other.flops_per_unit() == 4 * weights + 2 * 3 * 8 * 16 + 12 * 1 * 8 * 4
    # A sampled loss computes 3 rows of the output layer, also of a frozen one.
    other.loss = SampledCrossEntropy(torch.arange(128), 128, 3, seed=1)
    assert other.flops_per_unit() == (
        4 * (weights - 125 * 8) + 2 * 3 * 8 * 16 + 12 * 1 * 8 * 4)
    other.loss = LinearCrossEntropy()
    assert other.requires_grad_(False).flops_per_unit() == 2 * weights + 4 * 1 * 8 * 4


def run_config(**changes):
    """A run's configuration as far as a model file looks at it."""
    shape = GPTKeys(**LLAMA | dict(vocab_size=None))
    keys = vars(shape) | dict(
        context=shape.context, seed=5, gradient_checkpointing="false", head_samples=0,
        sample_prompts=[], sample_tokens=4)
    return types.SimpleNamespace(**keys | changes)


def data_of(vocab_size, tokenizer=None):
    spec = tokenizer.spec() if tokenizer else None
    return types.SimpleNamespace(spec=dict(vocab_size=vocab_size, tokenizer=spec))


def test_build_model_takes_shape_and_seed_from_the_run_and_the_vocabulary_from_the_data():
    model = build_model(run_config(gradient_checkpointing="true"), data_of(100))
    assert model.config == GPTConfig(**LLAMA | dict(vocab_size=100))
    assert all(block.gradient_checkpointing == "true" for block in model.h)
    assert torch.equal(model.wte.weight, GPT(model.config, seed=5).wte.weight)
    with pytest.raises(ValueError, match="vocab_size is missing"):
        GPTConfig()


# --- evaluation

def text_and_model(**changes):
    byte = load_tokenizer("byte")
    return byte, build_model(run_config(), data_of(300, byte))


def test_numbers_of_an_evaluation_by_hand():
    byte, gpt = text_and_model()
    idx = torch.tensor([byte.encode("the quick brown ") for _ in range(2)])
    targets = torch.roll(idx, -1, 1)
    targets[0, :5], targets[1, 3] = -1, byte.eot_token  # end of text: a target without bytes
    assert gpt(idx, targets)[1] == dict(count=27) and gpt.numbers(dict(loss=1.0, count=1.0)) == {}
    with torch.no_grad():
        loss, sums = gpt.eval()(idx, targets)
        logits = gpt(idx)
    assert {k: int(v) for k, v in sums.items()} == dict(count=27, bytes=26)
    wanted = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    total = {k: v.double() for k, v in (sums | dict(loss=loss * 27)).items()}
    numbers = gpt.numbers(total)
    assert abs(numbers["ppl"] - math.exp(wanted)) < 1e-3 * numbers["ppl"]
    assert abs(numbers["bpb"] - float(wanted) * 27 / 26 / math.log(2)) < 1e-4


def test_numbers_that_are_unknown_are_none():
    gpt = build_model(run_config(), data_of(61)).eval()  # no tokenizer: no bytes
    loss, sums = gpt(tokens(2, 16), tokens(2, 16, seed=1))
    numbers = gpt.numbers(sums | dict(loss=32 * loss.item()))
    assert numbers["bpb"] is None and abs(numbers["ppl"] - math.exp(loss.item())) < 1e-3
    loss, sums = gpt(tokens(2, 16), torch.full((2, 16), -1))
    assert loss.item() == 0.0
    assert gpt.numbers(sums | dict(loss=0.0)) == dict(ppl=None, bpb=None)


def test_tables_are_real_in_an_empty_model_and_not_saved():
    byte = load_tokenizer("byte")
    with torch.device("meta"):
        empty = build_model(run_config(), data_of(300, byte))
    gpt = build_model(run_config(), data_of(300, byte))
    assert all(p.is_meta for p in empty.parameters())
    for name, table in gpt.named_buffers():
        assert torch.equal(dict(empty.named_buffers())[name], table), name
    assert {n for n, _ in gpt.named_buffers()} == {"ropes", "token_bytes"}
    assert gpt.state_dict().keys() == dict(gpt.named_parameters()).keys()


def test_samples_of_an_evaluation():
    byte, gpt = text_and_model()
    config = run_config(sample_prompts=["the ", "", "\udcff"], sample_tokens=40)
    with torch.no_grad():
        texts = sample(gpt.eval(), data_of(300, byte), config)  # 43 ids have no text: never drawn
        assert texts == sample(gpt, data_of(300, byte), config)
        assert len(texts) == 3 and texts[0].startswith("the ") and len(texts[0]) > 4
        assert sample(gpt, data_of(300), config) == []


# --- every option

@pytest.mark.parametrize("options", COMBINATIONS, ids=short)
def test_options_train(options):
    model = tiny(**options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    idx, targets = tokens(4, 16), tokens(4, 16, seed=1)
    losses = []
    for _ in range(12):
        loss, _ = model(idx, targets)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert losses[-1] < losses[0] - 0.2
    for name, p in model.named_parameters():
        assert p.grad is not None, name


@pytest.mark.parametrize("options", COMBINATIONS, ids=short)
def test_cached_logits_are_those_of_the_full_forward(options):
    model = randomise(tiny(**options)).eval()
    idx = tokens(2, 16)
    with torch.no_grad():
        full = model(idx)
        for cuts in ([1] * 16, [5, 1, 7, 3], [16]):
            cache = KVCache(model.config, 2, idx.device, torch.float32)
            parts = [model(part, cache=cache) for part in idx.split(cuts, dim=1)]
            assert torch.allclose(torch.cat(parts, 1), full, atol=2e-4), cuts
        assert torch.allclose(model(idx, last_only=True), full[:, -1:], atol=1e-5)


@pytest.mark.parametrize("options", COMBINATIONS, ids=short)
def test_logits_do_not_see_the_future(options):
    model = randomise(tiny(**options)).eval()
    idx = tokens(1, 16)
    changed = idx.clone()
    changed[0, 9] = (idx[0, 9] + 1) % 61
    with torch.no_grad():
        before, after = model(idx)[0], model(changed)[0]
    assert torch.equal(before[:9], after[:9])
    assert (before[9:] != after[9:]).any(-1).all()


def test_dropout_acts_in_training_only():
    model, plain = randomise(tiny(dropout=0.3)), randomise(tiny(dropout=0.0))
    idx, targets = tokens(2, 16), tokens(2, 16, seed=1)
    first, second = model(idx, targets)[0], model(idx, targets)[0]
    assert first.item() != second.item()
    torch.manual_seed(0)
    third = model(idx, targets)[0]
    torch.manual_seed(0)
    assert model(idx, targets)[0].item() == third.item()
    assert torch.equal(model.eval()(idx), plain.eval()(idx))


@pytest.mark.parametrize("p", [2 ** -16, 0.1, 0.5, 0.999])
def test_dropout_in_bfloat16_on_a_cpu(p):
    """Of 16 bits a draw, as numpy reads them: below p they drop; a size that four do not divide."""
    x = torch.ones(3, 7, 9973, dtype=torch.bfloat16, requires_grad=True)
    torch.manual_seed(0)
    y = apply_dropout(x, p)
    y.sum().backward()
    torch.manual_seed(0)
    draws = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-2 ** 63, None)
    draws = draws.numpy().view(np.int16)[:x.numel()].astype(np.int64) + 2 ** 15
    kept = torch.from_numpy(draws >= p * 2 ** 16 - 0.5).view(x.shape)
    assert abs(kept.double().mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / x.numel()) + 2 ** -17
    wanted = torch.where(kept, torch.tensor(1 / (1 - p)).bfloat16(), 0)
    assert torch.equal(y, wanted) and torch.equal(x.grad, wanted)
    assert apply_dropout(x, p, training=False) is x


@pytest.mark.ci
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_dropout_draws_anew_and_by_the_seed():
    x, compiled = torch.ones(1000, dtype=torch.bfloat16), torch.compile(apply_dropout)
    torch.manual_seed(0)
    first, second = compiled(x, 0.5), compiled(x, 0.5)
    torch.manual_seed(0)
    assert torch.equal(apply_dropout(x, 0.5), first)
    assert torch.equal(apply_dropout(x, 0.5), second) and not torch.equal(first, second)


def test_where_dropout_stands(monkeypatch):
    """On the embeddings, the probabilities of attention, and what attention and MLP give back."""
    dropped, real = [], F.dropout

    def noted(x, p=0.5, training=True, inplace=False):
        dropped.append((tuple(x.shape), p, training))
        return real(x, p, training, inplace)
    monkeypatch.setattr(F, "dropout", noted)
    monkeypatch.setattr("model.core.ops.attend", lambda q, k, v, p, *_: dropped.append(p) or q)
    model, stream = tiny(dropout=0.25), (2, 5, 32)
    for training, inside in ((True, 0.25), (False, 0.0)):
        model.train(training)(tokens(2, 5))
        outside = (stream, 0.25, training)
        assert dropped == [outside, *[inside, outside, outside] * 2]
        dropped.clear()


def reference(model, idx):
    """Logits by the textbook, a token and a head at a time, in float64."""
    c, w = model.config, {n: p.detach().double() for n, p in model.named_parameters()}

    def norm(x, name):
        if name is None or c.norm == "rms":
            x = x / ((x ** 2).mean(-1, keepdim=True) + c.norm_eps).sqrt()
            return x if name is None else x * w[f"{name}.weight"]
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, False, keepdim=True) + c.norm_eps).sqrt()
        return x * w[f"{name}.weight"] + w.get(f"{name}.bias", 0)

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    def turn(x, t):  # pairs half a head apart, as complex numbers
        half = c.head_dim // 2
        angle = t * c.rope_theta ** (-torch.arange(half).double() / half)
        z = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones(half).double(), angle)
        return torch.cat((z.real, z.imag))

    def head(x, name, i, t):
        x = linear(x, name)[i * c.head_dim:(i + 1) * c.head_dim]
        if name[-1] != "v":
            x = norm(x, None) if c.qk_norm else x
            x = turn(x, t) if c.pos == "rope" else x
        return x
    x = w["wte.weight"][idx]
    if c.pos == "learned":
        x = x + w["wpe.weight"][:len(idx)]
    if c.prev_embedding:
        x[1:] += w["wte_prev.weight"][idx[:-1]]
    for t in range(len(idx) if c.ngram_rows else 0):
        rows = rows_by_hand(idx.tolist(), t, c.ngram_rows)
        x[t] += w["wte_ngram.weight"][rows].sum(0)
    acts = dict(gelu=lambda u: F.gelu(u, approximate="tanh"), relu2=lambda u: u.clamp(min=0) ** 2,
                gelu_exact=lambda u: u * (1 + torch.erf(u / 2 ** 0.5)) / 2)
    for n in (f"h.{i}" for i in range(c.n_layer)):
        y, out = norm(x, f"{n}.ln_1"), []
        for t in range(len(idx)):
            heads = []
            for i in range(c.n_head):
                g, q = i * c.n_kv_head // c.n_head, head(y[t], f"{n}.attn.q", i, t)
                k, v = ([head(y[s], f"{n}.attn.{p}", g, s) for s in range(t + 1)] for p in "kv")
                if c.key_offset:  # the second and fourth quarter of the key before
                    before = [torch.zeros_like(k[0]), *k]
                    k = [torch.cat([(a, b)[i % 2] for i, (a, b) in enumerate(zip(
                        a.chunk(4), b.chunk(4)))]) for a, b in zip(k, before)]
                p = torch.softmax(torch.stack(k) @ q / c.head_dim ** 0.5, 0)
                heads.append(p @ torch.stack(v))
            out.append(torch.cat(heads))
        x = x + linear(torch.stack(out), f"{n}.attn.o")
        y = norm(x, f"{n}.ln_2")
        u = linear(y, f"{n}.mlp.up")
        u = F.silu(linear(y, f"{n}.mlp.gate")) * u if c.mlp == "swiglu" else acts[c.mlp](u)
        x = x + linear(u, f"{n}.mlp.down")
    head_weight = w["wte.weight" if c.tie_weights else "lm_head.weight"]
    return (norm(x, "ln_f") @ head_weight.T)[:, :c.vocab_size]


@pytest.mark.parametrize("shape", [
    dict(norm_eps=0.3, rope_theta=7.0), dict(n_kv_head=2, qk_norm=True, norm_eps=0.1),
    dict(norm="layer", norm_eps=0.2, pos="learned", bias=True, mlp="gelu", tie_weights=False),
    dict(norm="layer", mlp="gelu_exact", n_kv_head=1, bias=True, vocab_size=128),
    dict(mlp="relu2", prev_embedding=True, bias=True, n_head=2), dict(ngram_rows=50),
    dict(key_offset=True, n_kv_head=2), dict(key_offset=True, pos="learned")], ids=str)
def test_logits_are_those_of_the_textbook(shape):
    model = randomise(tiny(n_hidden=40, **shape)).eval()
    idx = tokens(1, 6)
    wide = idx.repeat(11, 1)  # more than 64 tokens at once: another way to the same projections
    with torch.no_grad():
        ours, many = model(idx)[0], model(wide)
    expected = reference(model, idx[0])
    torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(many[10].double(), expected, rtol=1e-4, atol=1e-4)
    assert ours.shape == (6, model.config.vocab_size)


def test_sizes_that_are_left_out():
    config = GPTConfig(vocab_size=128, n_head=4, n_embd=32)
    assert (config.n_kv_head, config.n_hidden, config.head_dim) == (4, 128, 8)
    assert [GPTConfig(vocab_size=n).padded_vocab_size for n in (1, 127, 128, 129)] == [
        128, 128, 128, 256]
    assert GPTConfig(vocab_size=9, n_head=4, n_kv_head=2, n_hidden=7).n_hidden == 7


def test_initial_values_by_name():
    model = tiny(n_layer=8, n_embd=384, n_head=4, bias=True, norm="layer", pos="learned",
                 prev_embedding=True, tie_weights=False, vocab_size=512)
    expected = {"attn.o": 0.02 / 4, "mlp.down": 0.02 / 4, "lm_head": 0.3 / 384 ** 0.5}
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert not p.any(), name
        elif "ln_" in name:
            assert (p == 1).all(), name
        else:
            std = next((s for part, s in expected.items() if part in name), 0.02)
            assert p.std().item() == pytest.approx(std, rel=0.1), name
            assert abs(p.mean().item()) < std / 5, name
    tied = tiny(n_embd=384, vocab_size=512)
    assert tied.wte.weight.std().item() == pytest.approx(0.3 / 384 ** 0.5, rel=0.1)
    assert tiny(n_embd=64).wte.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert tied.initial("fork.weight", (3,), 1) is None
    assert tied.initial("h.0.attn.x.weight", (3,), 1) is None


# --- attention

def explicit(q, k, v):
    """softmax(q k' / sqrt(D)) v, one head and one query at a time."""
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    y = torch.zeros_like(q)
    for b, h, t in itertools.product(range(B), range(H), range(T)):
        g, seen = h // (H // G), S - T + t + 1
        p = (k[b, g, :seen] @ q[b, h, t] / math.sqrt(D)).softmax(0)
        y[b, h, t] = p @ v[b, g, :seen]
    return y


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_query_with_a_kernel_and_without(monkeypatch, dtype, rows, kernel):
    """Without one, as on a GPU and in a graph; also where a row has fewer keys."""
    torch.manual_seed(0)
    q, k = torch.randn(rows, 4, 1, 8).to(dtype), torch.randn(rows, 2, 7, 8).to(dtype)
    mask = torch.ones(rows, 1, 1, 7, dtype=torch.bool)
    mask[-1, ..., 5:] = False
    with monkeypatch.context() as patch:
        patch.setattr("model.core.ops.has_amx", lambda: True)
        if not kernel:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            patch.delattr(F, "scaled_dot_product_attention")
        y = attend(q, k, k, mask=mask)
        for shared in mask[-1:], mask[-1:, 0]:  # one mask for all rows
            close(attend(q, k, k, mask=shared), explicit(q, k[:, :, :5], k[:, :, :5]), 1e-2)
    close(y[:-1], explicit(q[:-1], k[:-1], k[:-1]), 1e-2)
    close(y[-1:], explicit(q[-1:], k[-1:, :, :5], k[-1:, :, :5]), 1e-2)


def test_one_query_in_bfloat16_takes_the_kernel_where_there_are_tiles(monkeypatch):
    q, k, calls = torch.randn(1, 4, 1, 8).bfloat16(), torch.randn(1, 2, 7, 8).bfloat16(), []
    kernel = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention",
                        lambda *args: calls.append(1) or kernel(*args))
    for tiles, wanted in ((False, []), (True, [1])):
        monkeypatch.setattr("model.core.ops.has_amx", lambda tiles=tiles: tiles)
        close(attend(q, k, k), explicit(q, k, k), 1e-2)
        assert calls == wanted
    assert attend(q.float(), k.float(), k.float()).dtype == torch.float32 and calls == [1, 1]


@pytest.mark.parametrize("T, S, H, G", [(7, 7, 2, 2), (1, 7, 2, 2), (3, 7, 4, 2), (7, 7, 6, 1)])
def test_attention_against_its_definition(T, S, H, G):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, H, T, 8), torch.randn(2, G, S, 8), torch.randn(2, G, S, 8)
    close(attend(q, k, v), explicit(q, k, v), 1e-5)


@pytest.mark.parametrize("T", [2, 100, 128, 129, 300])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_attention_in_blocks_is_pytorchs(T, dtype, tolerance):
    torch.manual_seed(0)
    inputs = [torch.randn(2, T, 3, 16).transpose(1, 2).to(dtype).requires_grad_() for _ in range(3)]
    dy = torch.randn(2, 3, T, 16, dtype=dtype)
    ours = attend_in_blocks(*inputs, 0.0)
    theirs = F.scaled_dot_product_attention(*inputs, is_causal=True)
    close(ours, theirs, tolerance)
    for a, b in zip(torch.autograd.grad(ours, inputs, dy), torch.autograd.grad(theirs, inputs, dy)):
        close(a, b, tolerance)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_a_mask_of_one_row_lets_every_query_see_later_keys(dtype, tolerance):
    """Also keys in later blocks; in a layer with a window, none."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 300, 16) for n in (4, 2, 2))
    seen = torch.ones(2, 1, 1, 300, dtype=torch.bool)
    seen[1, ..., 150:] = False
    scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) / 4
    index = torch.arange(300)
    band = (index <= index[:, None]) & (index[:, None] - index < 40)
    for allowed in (seen, seen & band):
        expected = scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)
        context = (k.to(dtype), v.to(dtype), seen)
        if allowed is not seen:
            context = limit_to_window(40, *context, 300)
        y = attend(q.to(dtype), *context[:2], mask=context[2])
        close(y[0], expected[0], tolerance)
        close(y[1, :, :150], expected[1, :, :150], tolerance)  # others may see no key


def test_a_window_hides_later_keys_however_many_keys_there_are():
    """So that a row does not depend on the width of its batch."""
    k = torch.zeros(1, 1, 6, 8)
    _, _, mask = limit_to_window(6, k, k, torch.ones(1, 1, 1, 6, dtype=torch.bool), 6)
    assert torch.equal(mask[0, 0], torch.ones(6, 6).tril().bool())


def test_a_window_without_order_hides_what_is_far_under_any_mask():
    k = torch.zeros(1, 1, 10, 8)
    _, _, mask = limit_to_window(16, k, k, torch.ones(1, 1, 10, 10, dtype=torch.bool), 10, False)
    index = torch.arange(10)
    assert torch.equal(mask[0, 0], (index[:, None] - index).abs() <= 8)


@pytest.mark.parametrize("T, H, G, D", [(2, 4, 2, 16), (128, 4, 1, 16), (129, 6, 3, 16),
                                        (300, 2, 1, 32)])
def test_shared_keys_have_the_gradients_of_copied_ones(T, H, G, D):
    """In bfloat16, against PyTorch's in float64."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, T, n, D).transpose(1, 2).bfloat16().requires_grad_()
              for n in (H, G, G)]
    dy = torch.randn(2, H, T, D).bfloat16()
    y = attend(*inputs)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    theirs = F.scaled_dot_product_attention(exact[0], *(t.repeat_interleave(H // G, dim=1)
                                                        for t in exact[1:]), is_causal=True)
    ours = [y, *torch.autograd.grad(y, inputs, dy)]
    theirs = [theirs, *torch.autograd.grad(theirs, exact, dy.double())]
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() < 0.01 * b.norm()


def test_attention_in_blocks_drops_out():
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 200, 8), torch.randn(2, 3, 200, 8)
    v = torch.ones(2, 3, 200, 8)
    y = attend_in_blocks(q, k, v, 0.5)
    assert y.std() > 0.1 and abs(y.mean() - 1) < 0.05  # kept ones are scaled up


def test_rope_is_a_rotation_by_position_of_pairs_half_a_head_apart():
    x, theta = torch.randn(1, 6, 2, 8), 500.0
    y = apply_rope(x, rope_table(torch.arange(3.0, 9.0)[:, None], 8, theta))
    for t, h, i in itertools.product(range(6), range(2), range(4)):
        pair = complex(x[0, t, h, i], x[0, t, h, i + 4])
        angle = (3 + t) * theta ** (-2 * i / 8)
        turned = pair * complex(math.cos(angle), math.sin(angle))
        assert abs(complex(y[0, t, h, i], y[0, t, h, i + 4]) - turned) < 1e-5


def test_grouped_queries_are_attention_with_repeated_heads():
    grouped = randomise(tiny(n_kv_head=2))
    full = tiny(n_kv_head=4)
    state = grouped.state_dict()
    for name in list(state):
        if ".k." in name or ".v." in name:
            heads = state[name].view(2, 8, -1)
            state[name] = heads.repeat_interleave(2, dim=0).reshape(32, -1)
    full.load_state_dict(state)
    close(full(tokens(2, 16)), grouped(tokens(2, 16)), 1e-5)


# --- cross-entropy

def plain_cross_entropy(h, weight, targets, vocab_size):
    z = h.float() @ weight.float().t()
    return F.cross_entropy(z[:, :vocab_size], targets, ignore_index=-1)


def linear_cross_entropy(h, weight, targets, vocab_size):
    """The mean of the losses, as in GPT.score()."""
    losses = LinearCrossEntropy()(h, weight, targets, vocab_size)
    assert losses.shape == targets.shape and (losses[targets == -1] == 0).all()
    return losses.sum() / (targets != -1).sum().clamp(min=1)


def problem(N=50, C=16, V=128, vocab=100, scale=1.0, dtype=torch.float32):
    torch.manual_seed(0)
    h, w = torch.randn(N, C, dtype=dtype), (scale * torch.randn(V, C)).to(dtype)
    targets = torch.randint(0, vocab, (N,))
    targets[::7] = -1
    return h.requires_grad_(), w.requires_grad_(), targets, vocab


@pytest.mark.parametrize("rows", [1, 16, 50, 64])
def test_chunked_cross_entropy_is_exact(rows, monkeypatch):
    monkeypatch.setattr(model.core.ops, "chunk_rows", lambda *_: rows)
    h, w, targets, vocab = problem()
    ours = linear_cross_entropy(h, w, targets, vocab)
    theirs = plain_cross_entropy(h, w, targets, vocab)
    assert abs(ours - theirs) < 1e-5
    for a, b in zip(torch.autograd.grad(3 * ours, (h, w)), torch.autograd.grad(3 * theirs, (h, w))):
        close(a, b, 1e-5)
    with torch.no_grad():  # evaluation's path
        assert abs(linear_cross_entropy(h, w, targets, vocab) - theirs) < 1e-5


@pytest.mark.parametrize("form", ["chunked", "whole", "sampled"])
def test_each_token_has_its_loss_and_weight(form, monkeypatch):
    """A weighted sum of the losses: values and gradients."""
    monkeypatch.setattr(model.core.ops, "chunk_rows", lambda *_: 16)
    h, w, targets, vocab = problem(vocab=128)
    loss = dict(chunked=LinearCrossEntropy(), whole=model.core.ops.whole_cross_entropy,
                sampled=SampledCrossEntropy(torch.arange(128), 128, 128, seed=1))[form]
    losses = loss(h, w, targets, vocab)
    logprobs = (h @ w.t()).log_softmax(-1)
    expected = -logprobs.gather(1, targets.clamp(min=0)[:, None])[:, 0] * (targets != -1)
    close(losses, expected, 1e-5)
    weights = torch.linspace(-1, 2, len(losses))
    for a, b in zip(*(torch.autograd.grad((y * weights).sum(), (h, w))
                      for y in (losses, expected))):
        close(a, b, 1e-5)


@pytest.mark.parametrize("n_counted", [0, 1, 2])
def test_a_loss_of_few_tokens_is_their_mean(n_counted):
    h, w, targets, vocab = problem()
    targets[:] = -1
    targets[5:5 + n_counted] = torch.arange(n_counted)
    ours = linear_cross_entropy(h, w, targets, vocab)
    logits = (h @ w.t())[:, :vocab].log_softmax(-1)
    theirs = -sum(logits[5 + i, i] for i in range(n_counted)) / max(1, n_counted) + 0 * h.sum()
    assert abs(ours - theirs) < 1e-5
    close(torch.autograd.grad(ours, h)[0], torch.autograd.grad(theirs, h)[0], 1e-5)


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_token_logprobs_are_those_of_a_whole_softmax(rows, monkeypatch):
    """Values and gradients, a chunk at a time; 0 where a target does not count."""
    monkeypatch.setattr(model.core.ops, "chunk_rows", lambda *_: rows)
    h, w, targets, vocab = problem()
    head = types.SimpleNamespace(logits=lambda x: (x @ w.t())[:, :vocab],
                                 config=types.SimpleNamespace(padded_vocab_size=128))
    found = token_logprobs(head, h, targets)
    whole = (h @ w.t())[:, :vocab].log_softmax(-1)
    wanted = whole.gather(1, targets.clamp(min=0)[:, None])[:, 0] * (targets != -1)
    assert (targets == -1).any() and found.dtype == torch.float32
    close(found, wanted, 1e-5)
    weights = torch.linspace(-1, 2, len(found))
    for a, b in zip(*(torch.autograd.grad((y * weights).sum(), (h, w)) for y in (found, wanted))):
        close(a, b, 1e-5)


def test_cross_entropy_of_huge_logits_is_finite_and_right():
    h, w, targets, vocab = problem(scale=300.0)  # losses far past where exp(-loss) is 0 in float32
    ours = linear_cross_entropy(h, w, targets, vocab)
    theirs = plain_cross_entropy(h, w, targets, vocab)
    assert ours > 500 and abs(ours - theirs) < 1e-5 * theirs
    assert all(g.isfinite().all() for g in torch.autograd.grad(ours, (h, w)))


def test_targets_of_minus_one_do_not_count():
    h, w, targets, vocab = problem()
    loss = linear_cross_entropy(h, w, targets, vocab)
    dh, _ = torch.autograd.grad(loss, (h, w))
    keep = targets != -1
    assert abs(loss - linear_cross_entropy(h[keep], w, targets[keep], vocab)) < 1e-5
    assert (dh[~keep] == 0).all() and (dh[keep] != 0).any(1).all()
    none = linear_cross_entropy(h, w, torch.full_like(targets, -1), vocab)
    assert none == 0 and all((g == 0).all() for g in torch.autograd.grad(none, (h, w)))


def test_padded_ids_get_no_probability_and_no_gradient():
    h, w, targets, vocab = problem()
    loss = linear_cross_entropy(h, w, targets, vocab)
    dh, dw = torch.autograd.grad(loss, (h, w))
    assert (dw[vocab:] == 0).all() and (dw[:vocab] != 0).any(1).all()
    louder = w.detach().clone()
    louder[vocab:] *= 100
    again = linear_cross_entropy(h, louder, targets, vocab)
    assert again == loss and torch.equal(torch.autograd.grad(again, h)[0], dh)


@pytest.mark.parametrize("tie_weights", [True, False])
def test_padding_of_the_model_is_neither_sampled_nor_trained(tie_weights):
    gpt = randomise(tiny(tie_weights=tie_weights))
    assert (gpt.lm_head or gpt.wte).weight.size(0) == 128
    assert gpt(tokens(2, 16)).shape == (2, 16, 61)
    _, grads = gradients(gpt, tokens(2, 16), tokens(2, 16, seed=1))
    head = grads["wte.weight" if tie_weights else "lm_head.weight"]
    assert (head[61:] == 0).all() and (head[:61] != 0).any(1).all()


def test_model_loss_is_the_cross_entropy_of_its_logits():
    gpt = randomise(tiny())
    idx, targets = tokens(2, 16), tokens(2, 16, seed=1)
    targets[:, ::3] = -1
    logits = gpt(idx)
    theirs = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    assert abs(gpt(idx, targets)[0] - theirs) < 1e-5


def test_cross_entropy_in_low_precision():
    for dtype, tolerance in ((torch.bfloat16, 1e-2), (torch.float16, 2e-3)):
        h, w, targets, vocab = problem(N=500, dtype=dtype)
        scale = 65536.0  # GradScaler's first: past float16's largest number
        ours = linear_cross_entropy(h, w, targets, vocab)
        theirs = plain_cross_entropy(h, w, targets, vocab)
        assert ours.dtype == torch.float32 and abs(ours - theirs) < tolerance * theirs
        wanted = torch.autograd.grad(scale * theirs, (h, w))
        for a, b in zip(torch.autograd.grad(scale * ours, (h, w)), wanted):
            assert a.dtype == dtype
            close(a, b, tolerance)


def test_cross_entropy_under_autocast_is_in_its_precision():
    h, w, targets = torch.randn(9, 8), torch.randn(20, 8), torch.arange(9)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(h, w, targets, 20)
    assert loss == linear_cross_entropy(h.bfloat16(), w, targets, 20)
    assert loss != linear_cross_entropy(h, w, targets, 20)


# --- fast paths change no result

@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_rms_norm_is_pytorchs(weighted, dtype, tolerance):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 32, generator=draw).to(dtype).requires_grad_()
    norm = Norm(32, "rms", False, 1e-5, weight=weighted)
    if weighted:
        torch.nn.init.normal_(norm.weight, generator=draw)
    inputs = [x, *norm.parameters()]
    ours, theirs = norm(x), F.rms_norm(x.float(), (32,), norm.weight, 1e-5).to(dtype)
    close(ours, theirs, tolerance)
    g = torch.randn(3, 5, 32, generator=draw).to(dtype)
    for a, b in zip(torch.autograd.grad(ours, inputs, g), torch.autograd.grad(theirs, inputs, g)):
        assert a.dtype == b.dtype
        close(a, b, tolerance)


@pytest.mark.parametrize("bias", [True, False])
def test_fused_layers_compute_what_three_layers_do(bias, monkeypatch):
    attn = randomise(tiny(n_kv_head=2, bias=bias)).h[0].attn
    layers, linear, products = (attn.q, attn.k, attn.v), F.linear, []
    x = torch.randn(8, 16, 32, generator=torch.Generator().manual_seed(0))  # 128 tokens
    monkeypatch.setattr(F, "linear", lambda *args: products.append(args) or linear(*args))
    fused = fused_linear(x, *layers)
    assert len(products) == 1
    close(fused, torch.cat([fused_linear(row[None], *layers) for row in x]), 1e-6)
    assert len(products) == 1 + 8 * 3


def test_layers_that_are_more_than_their_weights_are_not_fused():
    """A layer that replaces a linear one, as adapters do, computes itself."""
    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)
    attn = randomise(tiny()).h[0].attn
    x = torch.randn(8, 16, 32, generator=torch.Generator().manual_seed(0))
    wanted = torch.cat([2 * F.linear(x, attn.q.weight), F.linear(x, attn.k.weight)], -1)
    attn.q.__class__ = Doubled
    close(fused_linear(x, attn.q, attn.k, attn.v)[..., :64], wanted, 1e-5)


def rows_by_hand(ids, t, n_rows):
    """The rows of the 3-gram and the 4-gram that end with token t, by Python's integers."""
    rows = []
    for n in (2, 3):
        before = sum(i + 1 << 20 * k for k, i in enumerate(ids[max(0, t - n):t][::-1]))
        key = (before * 0x1E3779B97F4A7C15 + ids[t]) * 0x3C6EF372FE94F82B
        key = (key + 2 ** 63) % 2 ** 64 - 2 ** 63  # wraps around
        rows.append((key >> 32) % n_rows)
    return rows


def test_ngrams_have_rows_of_their_own():
    """Up to collisions: as many of 40,000 n-grams share a row as of random numbers. The row depends
    on every token of the n-gram and on no other."""
    idx = tokens(4, 10_000, vocab=65_536)
    history = model.core.ops.histories(idx)
    for n, rows in zip((3, 4), model.core.ops.ngram_rows(idx, history, 1 << 16).unbind(-1)):
        wanted = 65_536 * (1 - math.exp(-40_000 / 65_536))
        assert len(rows.unique()) == pytest.approx(wanted, rel=0.02)
        for i in range(5):
            other = idx.clone()
            other[:, 100 - i] += 1 - 2 * (other[:, 100 - i] > 9)
            moved = model.core.ops.ngram_rows(other, model.core.ops.histories(other), 1 << 16)
            assert torch.equal(moved[:, 100, n - 3], rows[:, 100]) == (i >= n)


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 7])
def test_a_history_continues_anywhere(cut):
    """Packed by hand, in one piece and in two, also for the largest id."""
    idx = tokens(2, 9, vocab=(1 << 20) - 1)
    idx[0, 4] = (1 << 20) - 2
    wanted = [[sum(i + 1 << 20 * k for k, i in enumerate(row[max(0, t - 3):t][::-1]))
               for t in range(10)] for row in idx.tolist()]
    first = torch.zeros(2, 1, dtype=torch.int64)
    for part in idx.split([cut, 9 - cut], dim=1):
        for t in range(part.size(1)):
            first = model.core.ops.extend_history(first, part[:, t:t + 1])
    start = torch.tensor([row[cut:cut + 1] for row in wanted])
    assert model.core.ops.histories(idx).tolist() == [row[:9] for row in wanted]
    assert model.core.ops.histories(idx[:, cut:], start).tolist() == [row[cut:9] for row in wanted]
    assert first[:, 0].tolist() == [row[9] for row in wanted]


def test_prev_embedding_is_that_of_the_token_before():
    gpt = tiny(prev_embedding=True)
    seen = []
    gpt.h[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    idx = tokens(2, 16)
    gpt(idx)
    wanted = gpt.wte(idx)
    wanted[:, 1:] += gpt.wte_prev(idx[:, :-1])
    assert torch.equal(seen[0], wanted)


@pytest.mark.parametrize("how", ["true", "selective"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_checkpointing_changes_no_gradient(how, dropout):
    gpt = randomise(tiny(dropout=dropout))
    idx, targets = tokens(2, 16), tokens(2, 16, seed=1)
    loss, wanted = gradients(gpt, idx, targets)
    for block in gpt.h:
        block.gradient_checkpointing = how
    again, grads = gradients(gpt, idx, targets)
    assert again == loss
    for name in wanted:
        close(grads[name], wanted[name], 1e-6)


def test_checkpointing_recomputes():
    gpt, calls = tiny(), []
    gpt.h[0].attn.register_forward_hook(lambda *_: calls.append(1))
    for how, times in (("false", 1), ("true", 2), ("selective", 2)):
        gpt.h[0].gradient_checkpointing = how
        calls.clear()
        gradients(gpt, tokens(2, 16), tokens(2, 16, seed=1))
        assert len(calls) == times, how


def test_bfloat16_follows_float32():
    plain, low = train(tiny(), 30, lr=3e-3), train(tiny(), 30, torch.bfloat16, lr=3e-3)
    assert plain[-1] < plain[0] - 0.3
    assert max(abs(a - b) for a, b in zip(plain, low)) < 0.02


def test_bfloat16_keeps_the_stream_and_the_weights_right():
    gpt = tiny()
    seen = []
    gpt.h[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = gpt(tokens(2, 16), tokens(2, 16, seed=1))
    loss.backward()
    assert seen == [torch.bfloat16] and loss.dtype == torch.float32
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in gpt.parameters())


# --- compiled

def compile_with(model, backend):
    """As a run on a CPU compiles it, with a backend of our own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "compile", functools.partialmethod(
            torch.nn.Module.compile, backend=backend))
        compile_model(model, torch.device("cpu"))


class Graphs(list):
    """A torch.compile backend that keeps the graphs it is given and runs them as they are."""

    def __call__(self, graph, inputs):
        self.append(graph)
        return graph.forward

    def sizes(self):
        """Symbolic sizes among the inputs of all graphs."""
        values = [n.meta.get("example_value") for g in self for n in g.graph.nodes
                  if n.op == "placeholder"]
        return [v for v in values if isinstance(v, torch.SymInt)]


@pytest.fixture
def graphs():
    torch._dynamo.reset()
    yield Graphs()
    torch._dynamo.reset()


@pytest.mark.ci
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_follows_eager():
    eager, compiled = tiny(n_layer=3), tiny(n_layer=3)
    torch._dynamo.utils.counters.clear()
    compile_model(compiled, torch.device("cpu"))
    a, b = train(eager, 5, torch.bfloat16), train(compiled, 5, torch.bfloat16)
    assert max(abs(x - y) for x, y in zip(a, b)) < 0.01
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("how", ["false", "true", "selective"])
def test_blocks_share_one_compiled_graph(graphs, how):
    """Also with gradient checkpointing, which is then inside that graph."""
    gpt, plain = tiny(n_layer=3), tiny(n_layer=3)
    for block in gpt.h:
        block.gradient_checkpointing = how
    compile_with(gpt, graphs)
    idx, targets = tokens(2, 16), tokens(2, 16, seed=1)
    loss, grads = gradients(gpt, idx, targets)
    wanted, wanted_grads = gradients(plain, idx, targets)
    assert len(graphs) == 1 and abs(loss - wanted) < 1e-6
    for name in grads:
        close(grads[name], wanted_grads[name], 1e-5)


@pytest.mark.ci
def test_a_smaller_validation_batch_leaves_the_training_graph_static(graphs):
    gpt = tiny()
    compile_with(gpt, graphs)
    for batch in (4, 3, 8):  # full and partial batches of the validation before the first step
        with torch.no_grad():
            gpt.eval()(tokens(batch, 16), tokens(batch, 16))
    before = len(graphs)
    gradients(gpt.train(), tokens(4, 16), tokens(4, 16))
    assert len(graphs) > before and not graphs.sizes()
    torch._dynamo.reset()
    other, dynamic = tiny(), Graphs()
    other.compile(backend=dynamic)  # that the check can fail
    for batch in (4, 3):
        gradients(other, tokens(batch, 16), tokens(batch, 16))
    assert dynamic.sizes()


@pytest.mark.ci
@pytest.mark.parametrize("shape", [{}, dict(norm="layer", pos="learned", mlp="gelu", bias=True),
                                   dict(qk_norm=True, mlp="relu2", prev_embedding=True)], ids=str)
@pytest.mark.parametrize("how", [
    "false", pytest.param("true", marks=pytest.mark.slow), "selective"])
def test_the_whole_model_is_one_graph(graphs, shape, how):
    """As on a GPU, where compile() takes the model as one."""
    gpt = tiny(**shape)
    for block in gpt.h:
        block.gradient_checkpointing = how
    torch.nn.Module.compile(gpt, fullgraph=True, dynamic=False, backend=graphs)
    loss, _ = gpt(tokens(2, 16), tokens(2, 16, seed=1))
    loss.backward()
    assert len(graphs) == 1 and all(p.grad is not None for p in gpt.parameters())


def test_sampling_does_not_compile_for_each_length(graphs):
    byte, gpt = text_and_model()
    compile_with(gpt, graphs)
    gradients(gpt, tokens(4, 16), tokens(4, 16))
    before, config = len(graphs), run_config(sample_prompts=["a"], sample_tokens=20)
    with torch.no_grad():
        texts = sample(gpt.eval(), data_of(300, byte), config)
    assert len(graphs) == before and len(texts[0]) > 1
    gradients(gpt.train(), tokens(4, 16), tokens(4, 16))  # training goes on in the compiled code
    assert len(graphs) == before


# --- sharded

def sharded_rank(folder):
    """One of two ranks: the compiled, sharded model computes the loss, the gradient and the text of
    the whole one."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", world_size=2,
                            rank=int(os.environ["RANK"]))
    idx, targets, (byte, plain) = tokens(2, 16), tokens(2, 16, seed=1), text_and_model()
    wanted, wanted_grads = gradients(plain, idx, targets)
    config, data = run_config(sample_prompts=["the "], sample_tokens=20), data_of(300, byte)
    texts = sample(plain.eval(), data, config)
    for how in ("false", "true", "selective"):
        torch._dynamo.reset()
        gpt, graphs = build_model(run_config(gradient_checkpointing=how), data), Graphs()
        for module in (*gpt.h, gpt):
            fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
        compile_with(gpt, graphs)
        loss, grads = gradients(gpt, idx, targets)
        assert abs(loss - wanted) < 1e-6
        for name, grad in grads.items():
            close(grad.full_tensor(), wanted_grads[name], 1e-5)
        assert len(graphs) == 1, f"{how}: the blocks, which share a graph, ran eager"
        names = {node.target for node in graphs[0].graph.nodes if node.op == "call_function"}
        assert how != "false" or torch._C._nn.scaled_dot_product_attention in names
        with torch.no_grad():
            assert sample(gpt.eval(), data, config) == texts and len(graphs) == 1
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.ci
def test_sharded_blocks_are_compiled(tmp_path):
    """FSDP's hooks stand around every block; also with gradient checkpointing."""
    in_ranks(2, sharded_rank, str(tmp_path))


# --- on a GPU, without one

def test_grouped_queries_are_not_copied_where_the_kernel_takes_them(monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode
    calls = []

    def record(q, k, v, mask, dropout, is_causal, enable_gqa):
        calls.append((k.size(1), enable_gqa))
        return q
    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    with FakeTensorMode():
        for dtype in (torch.bfloat16, torch.float16):
            q = torch.empty(1, 6, 8, 64, device="cuda", dtype=dtype)
            kv = torch.empty(1, 2, 8, 64, device="cuda", dtype=dtype)
            attend(q, kv, kv)
    assert calls == [(2, True), (6, False)]


def test_selective_checkpointing_keeps_the_attention_of_every_gpu():
    aten = torch.ops.aten
    context, _ = save_matrix_products()
    for op in (aten.mm, aten._scaled_dot_product_flash_attention,
               aten._scaled_dot_product_cudnn_attention,
               aten._scaled_dot_product_efficient_attention):
        policy = context.policy_fn(None, op.default)
        assert policy == torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize("loss", [LinearCrossEntropy(), SampledCrossEntropy(
    torch.arange(61), 61, 9, seed=0)])
def test_the_ignore_index_of_other_programs_is_an_error(loss):
    """-100, PyTorch's default, is not -1 -> not the token 0"""
    gpt = GPT(GPTConfig(**LLAMA))
    gpt.loss = loss
    targets = torch.tensor([[3, -1, 5]])
    assert gpt(targets.abs(), targets)[0].isfinite()
    targets[0, 1] = -100
    with pytest.raises((RuntimeError, IndexError), match="out of (bounds|range)"):
        gpt(targets.clamp(min=0), targets)
