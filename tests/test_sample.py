"""model/sample/: from ckpt.pt alone to text, as a library and through the command line."""

import base64
import re
import types

import pytest
import torch
from conftest import REPO, TINY
from processes import python

from data.tokenizer import load_tokenizer, tokenizer_from_spec
from model.core.detokenizer import TextStreamer
from model.core.generate import generate, sample_indices, sample_tokens
from model.core.kv_cache import KVCache, create_cache
from model.core.packed import replace_linear_layers
from model.gpt import GPT, GPTConfig
from model.gpt import sample as sample_texts
from model.moe import RoutedBlock
from model.sample import load_model, main
from model.sample.compiled import compile_decoder
from train.checkpoint import load_checkpoint, save_checkpoint
from train.config import load_config
from train.train import train

TEXT = "the quick brown fox jumps over the lazy dog.\n" * 300


@pytest.fixture(scope="module")
def model():
    return small()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    (folder / "text.txt").write_text(TEXT)
    done = python("-m", "data.prepare", folder / "text.txt", "--out", folder / "d")
    assert done.returncode == 0, done.stderr
    train(load_config(None, TINY | dict(data_dir=str(folder / "d"), out_dir=str(folder / "o"),
                                        max_iters=60, eval_interval=60, block_size=32)))
    return folder / "o" / "ckpt.pt"


def sample(*args, start=("-m", "model.sample"), cwd=REPO, **environment):
    return python(*start, *args, cwd=cwd, env=environment)


def random_tokens(*shape, seed=1, vocab=100):
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))


def small(**changes):
    model = GPT(GPTConfig(**dict(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=100)
                          | changes)).eval()
    if model.wte_ngram:  # zeros
        torch.nn.init.normal_(model.wte_ngram.weight, generator=torch.Generator().manual_seed(0))
    return model


def greedy_without_cache(model, idx, n):
    for _ in range(n):
        idx = torch.cat((idx, model(idx)[:, -1].argmax(-1, keepdim=True)), dim=1)
    return idx


def test_cached_sampling_equals_the_full_forward(model):
    idx = torch.randint(0, 100, (3, 5), generator=torch.Generator().manual_seed(1))
    cached = generate(model, idx, 11, temperature=0)
    assert torch.equal(cached, greedy_without_cache(model, idx, 11))


@pytest.mark.parametrize("limit", [dict(top_k=1), dict(top_p=1e-9), dict(top_p=0.0),
                                   dict(min_p=1.0), dict(min_p=1.5)])
def test_every_limit_of_the_candidates_is_used(model, limit):
    """So narrow that only the most probable token is left, at any temperature."""
    idx = torch.randint(0, 100, (3, 5), generator=torch.Generator().manual_seed(1))
    assert torch.equal(generate(model, idx, 8, temperature=9.0, seed=3, **limit),
                       greedy_without_cache(model, idx, 8))


def test_a_prompt_with_several_continuations_is_computed_once(model):
    idx = torch.randint(0, 100, (2, 9), generator=torch.Generator().manual_seed(1))
    shapes = []
    hook = model.wte.register_forward_pre_hook(lambda part, args: shapes.append(args[0].shape))
    out = generate(model, idx, 3, seed=7, samples_per_row=4)
    hook.remove()
    assert shapes == [(2, 8), (8, 1), (8, 1), (8, 1)]
    assert torch.equal(out, generate(model, idx.repeat_interleave(4, 0), 3, seed=7))


def test_line_ends_of_two_characters_are_printed_as_they_are(capsys):
    tokenizer = tokenizer_from_spec(dict(kind="char", chars="\r\na"))
    stream = TextStreamer(tokenizer, ())
    for token in tokenizer.encode("a\r\n\ra\r"):
        stream(torch.tensor([token]))
    assert capsys.readouterr().out == "a\r\n\\ra"


def test_the_cache_has_the_dtype_that_the_model_computes_in(model):
    with torch.autocast("cpu", torch.bfloat16):
        assert create_cache(model, 1).kv.dtype == torch.bfloat16
    assert create_cache(model, 1).kv.dtype == torch.float32
    assert create_cache(small().bfloat16(), 1).kv.dtype == torch.bfloat16


def test_prompt_and_text_longer_than_the_context(model):
    idx = torch.randint(0, 100, (1, 40), generator=torch.Generator().manual_seed(1))
    out = generate(model, idx, 50, temperature=0)
    assert out.shape == (1, 90) and torch.equal(out[:, :40], idx)
    assert torch.equal(out[:, 40], model(idx[:, -16:])[:, -1].argmax(-1))


def test_same_seed_same_text_other_seed_other_text(model):
    idx = torch.zeros(2, 1, dtype=torch.long)
    a, b, c = (generate(model, idx, 12, seed=s) for s in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert not torch.equal(a[0], a[1])  # rows draw for themselves


def test_top_k_and_top_p_cut_the_tail():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(500, 1)
    generator = torch.Generator().manual_seed(0)
    assert set(sample_tokens(logits, 1.0, 2, None, [generator]).tolist()) == {0, 1}
    assert set(sample_tokens(logits, 1.0, None, 0.7, [generator]).tolist()) == {0, 1}
    assert set(sample_tokens(logits, 1.0, None, 0.01, [generator]).tolist()) == {0}
    assert set(sample_tokens(logits, 1.0, None, 1.0, [generator]).tolist()) == {0, 1, 2, 3}
    assert set(sample_tokens(logits, 0, None, None, [generator]).tolist()) == {0}
    for min_p, kept in ((0.0, {0, 1, 2, 3}), (0.29, {0, 1, 2}), (0.31, {0, 1}), (1.0, {0})):
        assert set(sample_tokens(logits, 1.0, None, None, [generator], min_p).tolist()) == kept
        two = sample_tokens(logits, 1.0, 2, None, [generator], min_p)
        assert set(two.tolist()) == kept & {0, 1}


def test_tokens_are_drawn_as_often_as_they_are_likely():
    p = torch.tensor([[0.5, 0.0, 0.3, 0.2, 0.0], [0.0, 0.1, 0.0, 0.0, 0.9]])
    generators = [torch.Generator().manual_seed(0)]
    drawn = sample_indices(p.repeat(20_000, 1), generators).view(-1, 2)
    for row, column in zip(p, drawn.T):
        share = column.bincount(minlength=5) / len(column)
        assert (share - row).abs().max() < 0.012  # 3.4 standard deviations
        assert (share[row == 0] == 0).all()


@pytest.mark.parametrize("total", [1.0, 0.9999999, 1.7, 3e-30])
@pytest.mark.parametrize("uniform, wanted", [(0.0, 1), (1 - 2.0 ** -53, 2)])
def test_at_its_ends_too_a_draw_is_a_weight_above_zero(monkeypatch, total, uniform, wanted):
    """The least and the largest number that torch.rand can give, beside weights of zero."""
    monkeypatch.setattr(torch, "rand", lambda n, _, dtype, **kwargs: torch.full(
        (n, 1), uniform, dtype=dtype))
    p = torch.tensor([[0.0, total / 3, total * 2 / 3, 0.0, 0.0]])
    assert int(sample_indices(p, [None])) == wanted


def test_a_temperature_near_zero_is_the_most_likely_token():
    logits = 100 * torch.randn(50, 9, generator=torch.Generator().manual_seed(0))
    # Divided by the first one, the logits are infinite; the last one is 0 in float32.
    for temperature in 1e-37, 1e-40, 1e-50:
        for top_k in None, 3:
            picked = sample_tokens(logits, temperature, top_k, None, [torch.Generator()])
            assert torch.equal(picked, logits.argmax(-1))


@pytest.mark.parametrize("how", [(0, None, None), (1.0, None, None), (1.0, 3, None), (1.0, 3, 0.9),
                                 (1.0, None, 0.9)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nothing_is_drawn_from_logits_that_are_not_finite(bad, how):
    """Nor is anything raised while they are drawn: a GPU would have to be waited for."""
    logits = torch.zeros(3, 9)
    logits[1, 4] = bad
    first, second, third = sample_tokens(logits, *how, [torch.Generator()]).tolist()
    assert second == -1 and 0 <= first < 9 and 0 <= third < 9


@pytest.mark.parametrize("how", [dict(), dict(temperature=0), dict(stop_token=5),
                                 dict(on_token=lambda tokens: int(tokens[0]) < 0 and 1 / 0)])
def test_a_model_of_nan_is_an_error_where_the_tokens_are_read(how):
    model = small()
    with torch.no_grad():
        model.ln_f.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="logits are not finite"):
        generate(model, torch.zeros(2, 1, dtype=torch.long), 5, **how)


def test_drawing_as_a_gpu_does_is_as_likely(monkeypatch):
    """Exponential clocks: run here in the place of the CPU's uniform numbers."""
    p = torch.tensor([[0.5, 0.0, 0.3, 0.2, 0.0]]).repeat(20_000, 1)

    class OnGPU(torch.Tensor):
        device = types.SimpleNamespace(type="cuda")
    drawn = sample_indices(p.as_subclass(OnGPU), [torch.Generator().manual_seed(0)])
    drawn = drawn.as_subclass(torch.Tensor)
    share = drawn[:, 0].bincount(minlength=5) / len(p)
    assert (share - p[0]).abs().max() < 0.012 and (share[p[0] == 0] == 0).all()


def test_rows_with_generators_of_their_own_draw_as_each_alone():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    together, alone = ([torch.Generator().manual_seed(i) for i in range(3)] for _ in range(2))
    for how in (1.0, None, None), (0.8, 10, None), (0.8, 10, 0.9), (1.3, None, 0.5):
        for _ in range(5):
            one = [sample_tokens(row, *how, [g]) for row, g in zip(logits.split(1), alone)]
            assert torch.equal(sample_tokens(logits, *how, together), torch.cat(one))


def test_padded_ids_are_never_sampled(model):
    out = generate(model, torch.zeros(64, 1, dtype=torch.long), 15, temperature=50.0, seed=1)
    assert out.max() < 100


def test_stops_at_the_end_of_text(model):
    idx = torch.zeros(1, 1, dtype=torch.long)
    first = int(generate(model, idx, 1, temperature=0)[0, 1])
    assert generate(model, idx, 15, temperature=0, stop_token=first).shape == (1, 2)


# --- a full context

@pytest.mark.parametrize("shape", [{}, dict(pos="learned"), dict(window=4, layer_types="WF")],
                         ids=str)
@torch.no_grad()
def test_of_a_full_context_the_last_half_is_computed_again(shape):
    """The tokens of a loop without a cache."""
    model, prompt = small(**shape), random_tokens(1, 40)
    for p in model.parameters():
        p.mul_(3)  # so that attention is far from uniform
    text, n_seen = prompt, 16
    for _ in range(50):
        new = model(text[:, -n_seen:], last_only=True)[:, -1:].argmax(-1)
        text, n_seen = torch.cat((text, new), dim=1), n_seen + 1 if n_seen < 16 else 8
    assert torch.equal(generate(model, prompt, 50, temperature=0), text)


@torch.no_grad()
def test_what_does_not_fit_in_the_context_is_refused():
    model = small()
    cache = KVCache(model.config, 1, "cpu", torch.float32)
    model(random_tokens(1, 16), cache=cache)
    with pytest.raises(ValueError, match="17 tokens exceed the context of this model, 16"):
        model(random_tokens(1, 1), cache=cache)
    cache.clear()
    with pytest.raises(ValueError, match="17 tokens"):
        model(random_tokens(1, 17), cache=cache)


# --- rows that come and go

@pytest.mark.parametrize("options", [{}, dict(prev_embedding=True, n_kv_head=1, ngram_rows=99),
                                     dict(key_offset=True, window=5, layer_types="FW"),
                                     dict(pos="learned", norm="layer", mlp="gelu", bias=True)],
                         ids=str)
@torch.no_grad()
def test_rows_join_and_leave_at_any_step(options):
    """Texts of unequal length, decoded together, are those decoded alone."""
    model = small(**options)
    wanted = [(random_tokens(1, n, seed=n), new) for n, new in ((3, 5), (7, 10), (1, 4), (5, 12),
                                                                (2, 6))]
    cache, waiting = KVCache(model.config, 3, "cpu", torch.float32), list(range(len(wanted)))
    rows, texts = [], {}
    while rows or waiting:
        if waiting and len(rows) < 3:  # one joins at every step
            n = len(rows)
            cache[n:n + 1].clear()
            text = waiting.pop(0)
            logits = model(wanted[text][0], cache=cache[n:n + 1], last_only=True)
            rows.append((text, [int(logits.argmax())]))
        last = torch.tensor([[ids[-1]] for _, ids in rows])
        logits = model(last, cache=cache[:len(rows)])
        for (_, ids), token in zip(rows, logits.argmax(-1)):
            ids.append(int(token))
        for r in reversed(range(len(rows))):
            text, ids = rows[r]
            if len(ids) >= wanted[text][1]:
                texts[text] = ids[:wanted[text][1]]
                cache.copy_rows(len(rows) - 1, r)
                rows[r] = rows[-1]
                rows.pop()
    for text, (prompt, new) in enumerate(wanted):
        alone = generate(model, prompt, new, temperature=0)[0, prompt.size(1):]
        assert texts[text] == alone.tolist(), text


@torch.no_grad()
def test_rows_of_unequal_length_take_one_token_at_a_time(model):
    cache = KVCache(model.config, 2, "cpu", torch.float32)
    model(random_tokens(1, 3), cache=cache[:1])
    with pytest.raises(ValueError, match="different lengths"):
        model(random_tokens(2, 2), cache=cache)


# --- packed

SHAPES = [{}, dict(mlp="gelu", bias=True, norm="layer", tie_weights=False, pos="learned"),
          dict(n_kv_head=1, qk_norm=True, mlp="relu2")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.no_grad()
def test_packed_products_are_the_plain_ones(shape, dtype):
    plain, packed = small(**shape).to(dtype), replace_linear_layers(small(**shape).to(dtype))
    idx = random_tokens(2, 16)
    assert torch.allclose(packed(idx), plain(idx), atol=1e-2 if dtype == torch.bfloat16 else 1e-5)
    if dtype == torch.float32:
        out = [generate(m, idx[:, :3], 10, temperature=0) for m in (plain, packed)]
        assert torch.equal(*out)


def test_a_mask_of_an_edited_trunk_is_not_dropped_in_decoding():
    model = small(pos="learned")
    x, mask = torch.randn(1, 4, 32), torch.ones(1, 1, 4, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="a mask and a cache: expected one"):
        model.h[0].attn(x, (), create_cache(model, 1), mask)



# --- compiled

@pytest.mark.ci
@pytest.mark.parametrize("shape", [
    dict(n_kv_head=1, qk_norm=True, mlp="relu2", key_offset=True, prev_embedding=True,
         ngram_rows=99),
    dict(mlp="gelu", bias=True, norm="layer", tie_weights=False, pos="learned")], ids=str)
@torch.no_grad()
def test_compiled_tokens_are_the_plain_ones(shape):
    """That compiling fails would raise."""
    plain, decoder = small(**shape), compile_decoder(small(**shape))
    idx = random_tokens(1, 16)
    caches = [create_cache(m, 1) for m in (plain, decoder)]
    with torch.compiler.set_stance("fail_on_recompile"):
        for piece in idx.split([5] + [1] * (idx.size(1) - 5), dim=1):
            a, b = (m(piece, cache=c, last_only=True) for m, c in zip((plain, decoder), caches))
            assert torch.allclose(a, b, atol=1e-5)
        generate(decoder, idx[:, :3], 4, temperature=0)  # a text shorter than the context
    for rows in 1, 2:
        texts = [generate(m, idx[:, :3].repeat(rows, 1), 50, temperature=0)
                 for m in (plain, decoder)]
        assert torch.equal(*texts)


def test_only_plain_blocks_can_be_compiled():
    model = small()
    model.h[1].__class__ = RoutedBlock
    with pytest.raises(ValueError, match="--compile: expected a plain GPT"):
        compile_decoder(model)


@pytest.mark.slow
def test_compiled_command_line(checkpoint):
    command = ["--ckpt", checkpoint, "--prompt", "the quick", "--max_new_tokens", 60,
               "--temperature", 0, "--compile"]
    done, plain = sample(*command), sample(*command[:-1])
    assert done.returncode == 0 and done.stdout == plain.stdout, done.stderr
    assert "failed" not in done.stderr


# --- checkpoints and the command line

def test_checkpoint_alone_is_enough(checkpoint):
    model, tokenizer = load_model(checkpoint, "cpu")
    assert tokenizer.decode(tokenizer.encode("fox")) == "fox" and not model.training
    assert load_tokenizer("byte").n_vocab == tokenizer.n_vocab


def test_command_line_streams_the_prompt_and_a_continuation(checkpoint):
    done = sample("--ckpt", checkpoint, "--prompt", "the quick", "--max_new_tokens", 60,
                  "--temperature", 0)
    assert done.returncode == 0 and done.stdout.startswith("the quick b"), done.stderr


@pytest.mark.parametrize("text", ["None", "null", "~", "NONE "])
def test_a_prompt_may_be_a_word_for_nothing(checkpoint, monkeypatch, capsys, text):
    """As it is in Python. A system message too."""
    args = ["--ckpt", str(checkpoint), "--prompt", text, "--max_new_tokens=9", "--top_k=1"]
    assert main(args) == 0
    model, tokenizer = load_model(checkpoint, "cpu")
    idx = torch.tensor([[*text.encode()]])
    ids = generate(model, idx, 9, temperature=0, stop_token=256)[0].tolist()
    assert capsys.readouterr().out == tokenizer.decode([i for i in ids if i != 256])
    heard, loaded = [], (types.SimpleNamespace(template=""), tokenizer, "cpu")
    monkeypatch.setattr("model.sample.load_text_model", lambda options: loaded)
    monkeypatch.setattr("model.sample.replace_linear_layers", lambda model: model)
    monkeypatch.setattr("model.chat.talk", lambda *args, **sampling: heard.append(args[2:]))
    assert main([*args, "--chat", f"--system={text}"]) == 0
    assert heard == [([text], 9, text)]


def test_weights_are_not_read_in_another_precision(capsys):
    assert main(["--ckpt", "x.pt", "--dtype", "float16"]) == 2
    assert "dtype: must be one of auto, float32, bfloat16" in capsys.readouterr().err


def test_the_rate_is_of_all_tokens_and_the_time_that_they_took(checkpoint, monkeypatch, capsys):
    times = iter([100.0, 104.0])
    monkeypatch.setattr("model.sample.time.perf_counter", lambda: next(times))
    assert main(["--ckpt", str(checkpoint), "--prompt", "the", "--max_new_tokens", "9",
                 "--top_k", "1"]) == 0
    n, rate = re.search(r"\[(\d+) tokens, ([\d.]+) tokens/s\]", capsys.readouterr().err).groups()
    assert float(rate) == pytest.approx(int(n) / 4, abs=0.06)


def test_the_padding_of_finished_texts_is_not_counted(checkpoint, monkeypatch, capsys):
    end = load_tokenizer("byte").eot_token
    new = torch.tensor([[*b"h", end, end, end], [*b"hijk"], [*b"hij", end]])
    monkeypatch.setattr("model.sample.generate", lambda model, idx, *args, **more: torch.cat(
        (idx.expand(3, -1), new), 1))
    assert main(["--ckpt", str(checkpoint), "--prompt", "a", "--num_samples", "3"]) == 0
    assert "[10 tokens, " in capsys.readouterr().err  # with the end of each text


def test_a_prompt_longer_than_the_context_is_told(checkpoint, capsys):
    """Its start has no effect."""
    for n, told in ((32, False), (33, True)):
        assert main(["--ckpt", str(checkpoint), f"--prompt={'a' * n}", "--temperature=0",
                              "--max_new_tokens=1"]) == 0
        said = capsys.readouterr().err
        assert ("[the prompt has 33 tokens, the context 32: the model reads" in said) is told


def test_several_samples_at_once(checkpoint):
    done = sample("--ckpt", checkpoint, "--prompt", "the", "--num_samples", 3, "--top-k", 5,
                  "--seed", 3, "--max-new-tokens", 20)
    assert done.returncode == 0 and done.stdout.count("-" * 72) == 3


def altered(checkpoint, tmp_path, **changes):
    """A copy of the checkpoint with other entries."""
    state = load_checkpoint(checkpoint)
    for name, value in changes.items():
        state[name] = {**state[name], **value} if isinstance(value, dict) else value
    path = str(tmp_path / "ckpt.pt")
    save_checkpoint(path, state)
    return path


def test_ids_past_the_tokenizer_are_never_written(checkpoint, tmp_path, capsys):
    """vocab_size 300 above the 257 ids of the bytes."""
    state = load_checkpoint(checkpoint)
    model = GPT(GPTConfig(**{**state["model_args"], "vocab_size": 300}))
    path = altered(checkpoint, tmp_path, model=model.state_dict(), model_args=dict(vocab_size=300))
    assert main(["--ckpt", path, "--temperature", "9", "--max_new_tokens", "300", "--seed", "1"]
                ) == 0, capsys.readouterr().err


def test_a_prompt_outside_the_vocabulary_does_not_end_a_run(model):
    tokenizer = types.SimpleNamespace(kind="char", chars="abc")
    config = types.SimpleNamespace(sample_prompts=["a", "x"], sample_tokens=3, seed=1)
    spec = dict(tokenizer=vars(tokenizer), vocab_size=100)
    texts = sample_texts(model, types.SimpleNamespace(spec=spec), config)
    assert set(texts[0]) <= set("abc") and len(texts[0]) == 4
    assert texts[1].startswith("x [no sample: characters 'x'")


def test_checkpoint_without_a_tokenizer(checkpoint, tmp_path, capsys):
    path = altered(checkpoint, tmp_path, tokenizer=None, spec=None)
    assert main(["--ckpt", path]) == 2
    assert "--tokenizer byte" in capsys.readouterr().err
    assert main(["--ckpt", path, "--tokenizer", "byte", "--prompt", "the quick",
                 "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("the quick b")
    (tmp_path / "ranks").write_text("".join(f"{i} {i}" for i in range(3)))
    assert main(["--ckpt", path, "--tokenizer", str(tmp_path / "ranks")]) == 2
    tokens = [bytes([i]) for i in range(256)] + [b"the", b"quick"]
    (tmp_path / "ranks").write_text("".join(
        f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(tokens)))
    capsys.readouterr()
    assert main(["--ckpt", path, "--tokenizer", str(tmp_path / "ranks")]) == 2
    assert "has 259 ids, the model 257" in capsys.readouterr().err


def test_older_checkpoints_load_unless_they_use_what_is_gone(checkpoint, tmp_path, capsys):
    old = dict(softcap=0.0, value_embeddings=False, x0_residual=False)
    path = altered(checkpoint, tmp_path, model_args=old, spec=None)
    assert main(["--ckpt", path, "--max_new_tokens", "3"]) == 0
    path = altered(checkpoint, tmp_path, model_args=old | dict(softcap=15.0))
    assert main(["--ckpt", path]) == 2
    assert "softcap: 15.0" in capsys.readouterr().err
    path = altered(checkpoint, tmp_path, model_args=None)
    assert main(["--ckpt", path]) == 2
    assert "in it; of a Hugging Face model, name the folder" in capsys.readouterr().err
    path = altered(checkpoint, tmp_path, model_args=dict(n_embd=64))
    assert main(["--ckpt", path]) == 2
    assert "size mismatch" in capsys.readouterr().err


def test_a_model_that_writes_no_text(checkpoint, tmp_path, monkeypatch, capsys):
    path = altered(checkpoint, tmp_path, config=dict(model="classifier"), spec=None)
    assert main(["--ckpt", path]) == 2
    assert "it describes no model" in capsys.readouterr().err
    assert main(["--ckpt", altered(checkpoint, tmp_path, config=dict(model="serve"))]) == 2
    assert "or a new file with build_model(config, data)" in capsys.readouterr().err
    other = torch.nn.Linear(2, 2)  # of a file without sample()
    monkeypatch.setattr("model.sample.load_model", lambda *_: (other, load_tokenizer("byte")))
    assert main([]) == 2
    assert "does not generate text" in capsys.readouterr().err


@pytest.mark.parametrize("args, message", [
    (["--temperature", "nan"], "a finite number, got 'nan'"),
    (["--seed", str(2**64)], f"--seed: must be below {2**63}"),
    (["--temperature", "inf"], "got 'inf'"), (["--seed", "-1"], "--seed: must be at least 0"),
    (["--system", "Be kind."], "--system: a system message goes with --chat"),
    (["--chat", "--compile"], "use only one of them"),
    (["--compile", "--num_samples", "2"], "use only one of them"),
    (["--ckpt", "nowhere.pt"], "no such file"), (["--temperature", "-1"], "at least 0"),
    (["--top_p", "0"], "must be above 0"),
    (["--top_p", "0.9", "--ckpt", "nowhere.pt"], "no such file"),
    (["--num_samples", "0"], "at least 1")])
def test_bad_input_is_one_message_and_exit_2(capsys, args, message):
    assert main(args) == 2
    assert message in capsys.readouterr().err
