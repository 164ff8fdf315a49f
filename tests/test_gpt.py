"""model/gpt.py and model/cross_entropy.py: counts, first loss, every option, caching, causality,
and that each fast path computes what its plain form does."""

import itertools
import math
import random
import shutil
import types

import pytest
import torch
import torch.nn.functional as F

import model.cross_entropy
from model.cross_entropy import linear_cross_entropy
from model.gpt import (
    GPT,
    GPTConfig,
    KVCache,
    apply_rope,
    attend,
    attend_in_blocks,
    build_model,
    rope_tables,
)
from model.rms_norm import rms_norm

GPT2 = dict(block_size=1024, vocab_size=50257, n_layer=12, n_head=12, n_embd=768, norm="layer",
            pos="learned", mlp="gelu", bias=True, tie_weights=True)
LLAMA = dict(block_size=16, vocab_size=61, n_layer=2, n_head=4, n_embd=32, n_hidden=48)

OPTIONS = dict(
    norm=("rms", "layer"), pos=("rope", "learned"), mlp=("swiglu", "gelu", "relu2"),
    n_kv_head=(4, 2, 1), bias=(False, True), tie_weights=(True, False), qk_norm=(False, True),
    softcap=(0.0, 15.0), zero_init=(False, True), value_embeddings=(False, True),
    x0_residual=(False, True), prev_embedding=(False, True), dropout=(0.0, 0.1))


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
    assert sizes(GPTConfig()) == (113, 50_036_736, 33, 12_672)


def test_gpt2_parameters_are_the_published_ones_and_padding():
    _, matrices, _, rest = sizes(GPTConfig(**GPT2))
    assert matrices + rest == 124_439_808 + (50_304 - 50_257) * 768


@pytest.mark.parametrize("shape", [
    {}, dict(tie_weights=False), dict(vocab_size=32_000), dict(n_embd=768, n_head=12),
    GPT2 | dict(n_layer=2), dict(n_embd=768, n_head=12, tie_weights=False, softcap=15.0),
    dict(n_embd=2048, n_layer=1), dict(zero_init=True, tie_weights=False),
    dict(value_embeddings=True, x0_residual=True, prev_embedding=True)], ids=str)
def test_first_loss_is_that_of_a_uniform_guess(shape):
    model = tiny(**shape)
    vocab = model.config.vocab_size
    idx = tokens(64, 17, vocab=vocab)
    with torch.no_grad():
        loss, metrics = model(idx[:, :-1], idx[:, 1:])
    assert abs(loss.item() - math.log(vocab)) < 0.1 and metrics == {}


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


def test_flops_per_token_by_hand():
    # 1 layer, C 8, 2 heads of 4, 1 key/value head, hidden 16, vocabulary 128, T 4, tied, rope.
    model = GPT(GPTConfig(block_size=4, vocab_size=128, n_layer=1, n_head=2, n_kv_head=1, n_embd=8,
                          n_hidden=16))
    weights = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16 + 3 * 8 + 128 * 8
    assert model.flops_per_token() == 6 * weights + 12 * 1 * 8 * 4
    # Tables that are only looked up do not count.
    other = GPT(GPTConfig(block_size=4, vocab_size=128, n_layer=1, n_head=2, n_kv_head=1, n_embd=8,
                          n_hidden=16, tie_weights=False, pos="learned"))
    assert other.flops_per_token() == model.flops_per_token()


def test_build_model_takes_the_shape_and_the_seed_from_the_run():
    run = types.SimpleNamespace(**vars(GPTConfig(**LLAMA)), seed=5, gradient_checkpointing="true")
    model = build_model(run, 100)
    assert model.config == GPTConfig(**LLAMA | dict(vocab_size=100))
    assert model.gradient_checkpointing == "true"
    assert torch.equal(model.wte.weight, GPT(model.config, seed=5).wte.weight)


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
            cache = KVCache(model.config, 2, 16, idx.device, torch.float32)
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


def test_attention_in_blocks_drops_out():
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 200, 8), torch.randn(2, 3, 200, 8)
    v = torch.ones(2, 3, 200, 8)
    y = attend_in_blocks(q, k, v, 0.5)
    assert y.std() > 0.1 and abs(y.mean() - 1) < 0.05  # kept ones are scaled up


def test_rope_is_a_rotation_by_position_of_pairs_half_a_head_apart():
    x, theta = torch.randn(1, 6, 2, 8), 500.0
    cos, sin = rope_tables(3, 6, 8, theta, "cpu")
    y = apply_rope(x, cos, sin)
    for t, h, i in itertools.product(range(6), range(2), range(4)):
        pair = complex(x[0, t, h, i], x[0, t, h, i + 4])
        angle = (3 + t) * theta ** (-2 * i / 8)
        turned = pair * complex(math.cos(angle), math.sin(angle))
        assert abs(complex(y[0, t, h, i], y[0, t, h, i + 4]) - turned) < 1e-5


def test_value_embedding_is_added_whole_at_first():
    gpt = tiny(value_embeddings=True, n_kv_head=2)
    assert [block.attn.ve is not None for block in gpt.h] == [False, True]  # every second, the last
    attn, idx = gpt.h[1].attn, tokens(2, 16)
    with torch.no_grad():
        attn.v.weight.zero_()
        attn.ve.weight.fill_(3.0)  # all values 3, of which attention takes the mean
        attn.o.weight.copy_(torch.eye(32))
        y = attn(torch.randn(2, 16, 32), rope_tables(0, 16, 8, 1e4, "cpu"), idx)
    assert torch.allclose(y, torch.full_like(y, 3.0))


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

def plain_cross_entropy(h, weight, targets, vocab_size, softcap=0.0):
    z = h.float() @ weight.float().t()
    z = softcap * torch.tanh(z / softcap) if softcap else z
    return F.cross_entropy(z[:, :vocab_size], targets, ignore_index=-1)


def problem(N=50, C=16, V=128, vocab=100, scale=1.0, dtype=torch.float32):
    torch.manual_seed(0)
    h, w = torch.randn(N, C, dtype=dtype), (scale * torch.randn(V, C)).to(dtype)
    targets = torch.randint(0, vocab, (N,))
    targets[::7] = -1
    return h.requires_grad_(), w.requires_grad_(), targets, vocab


@pytest.mark.parametrize("rows", [1, 16, 50, 64])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_chunked_cross_entropy_is_exact(rows, softcap, monkeypatch):
    monkeypatch.setattr(model.cross_entropy, "chunk_rows", lambda *_: rows)
    h, w, targets, vocab = problem()
    ours = linear_cross_entropy(h, w, targets, vocab, softcap)
    theirs = plain_cross_entropy(h, w, targets, vocab, softcap)
    assert abs(ours - theirs) < 1e-5
    for a, b in zip(torch.autograd.grad(3 * ours, (h, w)), torch.autograd.grad(3 * theirs, (h, w))):
        close(a, b, 1e-5)
    with torch.no_grad():  # evaluation's path
        assert abs(linear_cross_entropy(h, w, targets, vocab, softcap) - theirs) < 1e-5


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
    assert abs(loss - linear_cross_entropy(h[keep], w, targets[keep], vocab)) < 1e-6
    assert (dh[~keep] == 0).all() and (dh[keep] != 0).any(1).all()
    none = linear_cross_entropy(h, w, torch.full_like(targets, -1), vocab)
    assert none == 0 and all((g == 0).all() for g in torch.autograd.grad(none, (h, w)))


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_padded_ids_get_no_probability_and_no_gradient(softcap):
    h, w, targets, vocab = problem()
    loss = linear_cross_entropy(h, w, targets, vocab, softcap)
    dh, dw = torch.autograd.grad(loss, (h, w))
    assert (dw[vocab:] == 0).all() and (dw[:vocab] != 0).any(1).all()
    louder = w.detach().clone()
    louder[vocab:] *= 100
    again = linear_cross_entropy(h, louder, targets, vocab, softcap)
    assert again == loss and torch.equal(torch.autograd.grad(again, h)[0], dh)


@pytest.mark.parametrize("tie_weights", [True, False])
def test_padding_of_the_model_is_neither_sampled_nor_trained(tie_weights):
    gpt = randomise(tiny(tie_weights=tie_weights))
    assert gpt.head_weight().size(0) == 128
    assert gpt(tokens(2, 16)).shape == (2, 16, 61)
    _, grads = gradients(gpt, tokens(2, 16), tokens(2, 16, seed=1))
    head = grads["wte.weight" if tie_weights else "lm_head.weight"]
    assert (head[61:] == 0).all() and (head[:61] != 0).any(1).all()


def test_model_loss_is_the_cross_entropy_of_its_logits():
    gpt = randomise(tiny(softcap=15.0))
    idx, targets = tokens(2, 16), tokens(2, 16, seed=1)
    targets[:, ::3] = -1
    logits = gpt(idx)
    theirs = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    assert logits.abs().max() <= 15 and abs(gpt(idx, targets)[0] - theirs) < 1e-5


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


# --- fast paths change no result

@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_rms_norm_is_pytorchs(weighted, dtype, tolerance):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 32, generator=draw).to(dtype).requires_grad_()
    weight = torch.randn(32, generator=draw).requires_grad_() if weighted else None
    inputs = [x, weight] if weighted else [x]
    ours, theirs = rms_norm(x, weight, 1e-5), F.rms_norm(x.float(), (32,), weight, 1e-5).to(dtype)
    close(ours, theirs, tolerance)
    g = torch.randn(3, 5, 32, generator=draw).to(dtype)
    for a, b in zip(torch.autograd.grad(ours, inputs, g), torch.autograd.grad(theirs, inputs, g)):
        assert a.dtype == b.dtype
        close(a, b, tolerance)


@pytest.mark.parametrize("bias", [True, False])
def test_joined_weights_project_as_three_layers_do(bias):
    attn = randomise(tiny(n_kv_head=2, bias=bias)).h[0].attn
    x = torch.randn(8, 16, 32, generator=torch.Generator().manual_seed(0))  # 128 tokens: joined
    for joined, alone in zip(attn.project(x), zip(*[attn.project(row[None]) for row in x])):
        close(joined, torch.cat(alone), 1e-6)


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
    gpt = randomise(tiny(dropout=dropout, value_embeddings=True, x0_residual=True))
    idx, targets = tokens(2, 16), tokens(2, 16, seed=1)
    loss, wanted = gradients(gpt, idx, targets)
    gpt.gradient_checkpointing = how
    again, grads = gradients(gpt, idx, targets)
    assert again == loss
    for name in wanted:
        close(grads[name], wanted[name], 1e-6)


def test_checkpointing_recomputes():
    gpt, calls = tiny(), []
    gpt.h[0].attn.register_forward_hook(lambda *_: calls.append(1))
    for how, times in (("false", 1), ("true", 2), ("selective", 2)):
        gpt.gradient_checkpointing = how
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


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_follows_eager():
    """Also: the blocks share their compiled code, evaluation and a cache still work."""
    eager, compiled = tiny(n_layer=3), tiny(n_layer=3)
    torch._dynamo.utils.counters.clear()
    compiled.compile()
    a, b = train(eager, 5, torch.bfloat16), train(compiled, 5, torch.bfloat16)
    assert max(abs(x - y) for x, y in zip(a, b)) < 0.01
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    idx = tokens(1, 16)
    with torch.no_grad():
        cache = KVCache(compiled.config, 1, 16, idx.device, torch.float32)
        cached = torch.cat([compiled.eval()(t, cache=cache) for t in idx.split(3, dim=1)], 1)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch.allclose(cached, compiled.forward(idx), atol=1e-4)
