"""Edits that a fork makes: each is made in one place, and everything else follows or is refused."""

import ast
import copy
import functools
import importlib
import math
import shutil
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import REPO, TINY
from runs import metrics, opened, tensors
from test_distributed import in_ranks

from model import convert, gpt, moe
from model.core import formulas, ops
from model.core.init import fill, normal
from model.core.kv_cache import create_cache
from model.core.load import load_model
from model.core.ops import fused_linear
from model.core.packed import replace_linear_layers
from model.memory import MemoryConfig, MemoryGPT
from model.sample.compiled import compile_decoder
from train import distributed
from train.base.adamw import AdamW
from train.base.checkpoint_file import save_checkpoint
from train.base.errors import CheckpointError, SetupError, UserError
from train.config import load_config
from train.dataloader import DataLoader, open_token_data
from train.setup import open_run
from train.train import train, train_step

SHAPE = dict(n_layer=2, n_head=2, n_embd=32, n_hidden=64, block_size=16, vocab_size=61)


def options(data_dir, out, **changes):
    return TINY | dict(data_dir=str(data_dir), out_dir=str(out), num_threads=1) | changes


# -----------------------------------------------------------------------------
# the loss: count, logits

def masked_batch():
    generator = torch.Generator().manual_seed(3)
    idx, targets = torch.randint(0, 61, (2, 14, 16), generator=generator)
    for row in range(14):  # 1 to 14 targets per row
        targets[row, row + 1:] = -1
    return idx, targets


@pytest.mark.parametrize("size", [1, 7, 14])
def test_masked_targets_give_the_same_step_in_any_split(size):
    """The loss and the gradient of 14 samples, by the rule of the loop, against plain PyTorch."""
    model = gpt.GPT(gpt.GPTConfig(**SHAPE))
    idx, targets = masked_batch()
    total = count = 0.0
    for x, y in zip(idx.split(size), targets.split(size)):
        loss, sums = model(x, y)
        (loss * sums["count"]).backward()
        total, count = total + float(loss * sums["count"]), count + int(sums["count"])
    plain = gpt.GPT(gpt.GPTConfig(**SHAPE))
    whole = F.cross_entropy(plain(idx).flatten(0, 1), targets.flatten(), ignore_index=-1)
    whole.backward()
    assert count == 105 and total / count == pytest.approx(whole.item(), abs=1e-6)
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad / count, q.grad, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_edit_of_the_logits_reaches_the_loss_sampling_and_log_probabilities(dtype, monkeypatch):
    """A softcap in finish_logits: loss and gradient against autograd on whole logits."""
    monkeypatch.setattr(ops, "finish_logits", lambda z: 0.5 * torch.tanh(z / 0.5))
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(50, 24, generator=generator).to(dtype).requires_grad_()
    w = torch.randn(64, 24, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(-1, 61, (50,), generator=generator)
    capped = (0.5 * torch.tanh((h @ w.t()).float() / 0.5))[:, :61]
    wanted = F.cross_entropy(capped, targets, ignore_index=-1)
    loss = ops.LinearCrossEntropy()(h, w, targets, 61).sum() / (targets != -1).sum()
    tolerance = 1e-6 if dtype == torch.float32 else 2e-3
    assert abs(float(loss - wanted)) < tolerance
    for a, b in zip(torch.autograd.grad(loss, (h, w)), torch.autograd.grad(wanted, (h, w))):
        assert float((a - b).abs().max()) <= 5 * tolerance
    model = gpt.GPT(gpt.GPTConfig(**SHAPE))
    idx, targets = masked_batch()
    with torch.no_grad():
        logits = model(idx)
        assert float(logits.abs().max()) < 0.5
        x = model.trunk(idx).flatten(0, 1)
        logprobs = ops.token_logprobs(model, x, targets.flatten())
    wanted = -F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1,
                              reduction="none")
    torch.testing.assert_close(logprobs, wanted)
    assert float(model(idx, targets)[0]) == pytest.approx(
        -float(wanted.sum()) / int((targets >= 0).sum()), abs=1e-5)


def test_an_edit_of_the_logits_in_place_is_refused(monkeypatch):
    """The loss would be right and the gradient that of the unedited function."""
    monkeypatch.setattr(ops, "finish_logits", lambda z: z.div_(30).tanh_().mul_(30))
    with torch.inference_mode(), pytest.raises(UserError, match="finish_logits .* in place"):
        gpt.GPT(gpt.GPTConfig(**SHAPE))


def test_targets_may_be_a_keyword():
    model = gpt.GPT(gpt.GPTConfig(**SHAPE))
    idx, targets = masked_batch()
    assert torch.equal(model(idx, targets=targets)[0], model(idx, targets)[0])


# -----------------------------------------------------------------------------
# subclasses of GPT

class TwoHeadGPT(gpt.GPT):
    """A GPT with a second head, added after the parts of GPT, and a sum of its own."""

    def __init__(self, config, seed=1337, token_bytes=None):
        super().__init__(config, seed, token_bytes)
        self.second = torch.nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.steps_seen = None

    def compute_loss(self, idx, targets):
        loss, sums = super().compute_loss(idx, targets)
        x = self.trunk(idx)[:, :-1]
        second = self.loss(x, self.second.weight, targets[:, 1:], self.config.vocab_size)
        second = second.sum() / (targets[:, 1:] != ops.IGNORE).sum().clamp(min=1)
        sums["second_loss"] = second.detach() * sums["count"]
        return loss + 0.3 * second, sums

    def initial(self, name, shape, seed):
        if name == "second.weight":
            return normal(name, shape, 0.02, seed)
        return super().initial(name, shape, seed)

    def before_step(self, it):
        self.steps_seen = it


def start_of_two_heads(options):
    """Initial values and the loss of the first step, on this rank."""
    config = load_config(None, options)
    gpt.GPT, plain = TwoHeadGPT, gpt.GPT
    build = gpt.build_model
    gpt.build_model = lambda config, data: build(config, data, TwoHeadGPT)
    try:
        with distributed.process_group(config) as ranks, open_run(config, ranks) as run:
            values = {n: distributed.full(p).detach().numpy().copy()
                      for n, p in run.raw_model.named_parameters()}
            return values, train_step(run), run.raw_model.steps_seen
    finally:
        gpt.GPT, gpt.build_model = plain, build


class WithCritic(gpt.GPT):
    """A GPT with a network that has an optimizer of its own."""

    def __init__(self, *args):
        super().__init__(*args)
        self.critic = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.critic.parameters(), 0.1)


class Unsaved(gpt.GPT):
    """A GPT whose state dict lacks a trained parameter."""

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        return {name: t for name, t in state.items() if name != "h.1.mlp.down.weight"}


class OtherPerplexity(gpt.GPT):
    """A GPT with a sum that has the name of a number of evaluations."""

    def compute_loss(self, idx, targets):
        loss, sums = super().compute_loss(idx, targets)
        return loss, sums | dict(ppl=loss.detach())


@pytest.mark.parametrize("kind, message", [
    (OtherPerplexity, "rename the sum ppl, the name is reserved"),
    (WithCritic, "WithCritic.optimizer would be in no checkpoint"),
    (Unsaved, "h.1.mlp.down.weight would be in no checkpoint")])
def test_what_no_checkpoint_would_hold_is_named(kind, message, data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(gpt, "build_model", functools.partial(gpt.build_model, kind=kind))
    with pytest.raises(SetupError, match=message):
        train(load_config(None, options(data_dir, tmp_path, max_iters=2)))


def test_a_shared_tensor_has_the_values_of_the_last_name():
    """Not of one that depends on Python's salted hashes."""
    model = torch.nn.Module()
    shared = torch.nn.Parameter(torch.zeros(2))
    for i in range(9):
        model.register_parameter(f"p{i}", shared)
    model.initial = lambda name, shape, seed: torch.full(shape, float(name[1:]))
    fill(model, 0)
    assert shared.tolist() == [8.0, 8.0]


def test_ddp_and_fsdp_start_from_the_same_subclass(data_dir, tmp_path):
    alone, = in_ranks(1, start_of_two_heads, options(data_dir, tmp_path / "1"))
    ddp, fsdp = (in_ranks(2, start_of_two_heads, options(data_dir, tmp_path / kind,
                                                         distributed=kind))[0]
                 for kind in ("ddp", "fsdp"))
    assert 0.015 < alone[0]["second.weight"].std() < 0.025
    assert alone[2] == ddp[2] == fsdp[2] == 0  # before_step was called
    for other in (ddp, fsdp):
        assert other[0].keys() == alone[0].keys() and abs(other[1] - alone[1]) < 1e-6
        for name, value in other[0].items():
            assert np.array_equal(value, alone[0][name]), name


def test_before_step_of_a_subclass_does_not_replace_that_of_the_loss(
        data_dir, tmp_path, monkeypatch):
    build = gpt.build_model
    monkeypatch.setattr(gpt, "build_model", lambda c, data: build(c, data, TwoHeadGPT))
    with opened(load_config(None, options(data_dir, tmp_path, head_samples=32))) as run:
        drawn = []
        for _ in range(2):
            train_step(run)
            drawn.append(run.raw_model.loss.ids.clone())
        assert run.raw_model.steps_seen == 1 and not torch.equal(*drawn)


@pytest.mark.parametrize("model", ["moe", "memory"])
def test_an_edit_of_the_block_reaches_every_model_type(model, monkeypatch):
    """Half of the output of each block."""
    model = moe.MoE(moe.MoEConfig(**SHAPE)) if model == "moe" else MemoryGPT(
        MemoryConfig(**SHAPE), 1, None)
    idx, _ = masked_batch()
    plain = model(idx)
    compute = gpt.Block.compute
    monkeypatch.setattr(gpt.Block, "compute",
                        lambda self, x, *a, **of_mlp: (x + compute(self, x, *a, **of_mlp)) / 2)
    assert not torch.allclose(model(idx), plain, atol=1e-3)


def test_a_parameter_that_the_loss_does_not_use_is_named_once(data_dir, tmp_path, monkeypatch):
    class Scaled(gpt.GPT):
        def __init__(self, *args):
            super().__init__(*args)
            self.scale = torch.nn.Parameter(torch.ones(1))

        def logits(self, x):  # the training loss does not pass here
            return super().logits(x) * self.scale
    build = gpt.build_model
    monkeypatch.setattr(gpt, "build_model", lambda c, data: build(c, data, Scaled))
    train(load_config(None, options(data_dir, tmp_path, max_iters=3)))
    assert (tmp_path / "train.log").read_text().count(
        "no gradient in the first step for 1 tensors, e.g. scale: ") == 1


def test_a_block_that_ignores_the_cache_generates_nothing(monkeypatch):
    """Each token would be computed as if it were the first, e.g. in a layer of linear attention."""
    forward = gpt.Attention.forward
    n_ignoring = 0
    monkeypatch.setattr(gpt.Attention, "forward", lambda self, x, ropes=(), cache=None, mask=None:
                        forward(self, x, ropes, None if self.layer < n_ignoring else cache, mask))
    model = gpt.GPT(gpt.GPTConfig(**SHAPE)).eval()
    cache = create_cache(model, 1)
    with torch.no_grad():
        model(torch.zeros(1, 3, dtype=torch.int64), cache=cache)
        for n_ignoring in (1, 2):
            for rows in (cache, cache[:1]):  # the server uses views
                with pytest.raises(ValueError, match=f"{2 - n_ignoring} of 2 blocks use the key-"):
                    model(torch.zeros(1, 1, dtype=torch.int64), cache=rows)


class OwnTrunk(gpt.GPT):
    """A GPT with states of its own, e.g. of patches of bytes, without a cache."""

    def trunk(self, idx, cache=None, mask=None, positions=None, history=None):
        return super().trunk(idx)


def test_a_trunk_that_ignores_the_cache_generates_nothing():
    model = OwnTrunk(gpt.GPTConfig(**SHAPE)).eval()
    with pytest.raises(ValueError, match="0 of 2 blocks use the key-value cache"):
        model(torch.zeros(1, 1, dtype=torch.int64), cache=create_cache(model, 1))


class Shared(gpt.GPT):
    """A GPT whose blocks each run twice, as in ALBERT."""

    def __init__(self, config):
        super().__init__(config)
        blocks = list(self.h)
        self.h.__class__ = type("Twice", (torch.nn.ModuleList,), dict(
            __iter__=lambda self: iter([*blocks, *blocks])))


@pytest.mark.parametrize("key_offset", [False, True])
@torch.no_grad()
def test_a_block_that_runs_twice_needs_two_places_of_the_cache(key_offset):
    """The keys of the second run would replace those of the first."""
    model = Shared(gpt.GPTConfig(**SHAPE, key_offset=key_offset)).eval()
    idx, _ = masked_batch()
    cache = create_cache(model, 2)
    for rows in (cache, cache[:1]):
        with pytest.raises(ValueError, match="block 0 runs twice in a pass"):
            model(idx[:len(rows.lengths), :3], cache=rows)
    with pytest.raises(ValueError, match="block 0 runs twice in a pass"):
        compile_decoder(model)

    # as the message says
    model.config.n_layer = 4
    n_runs = iter(range(1000))
    for block in list(model.h)[:2]:
        block.attn.register_forward_pre_hook(
            lambda attn, _: setattr(attn, "layer", next(n_runs) % 4))
    cache = create_cache(model, 2)
    logits = [model(part, cache=cache) for part in idx[:2].split([3] + [1] * 5 + [8], dim=1)]
    torch.testing.assert_close(torch.cat(logits, dim=1), model(idx[:2]), atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="--compile: expected a plain GPT"):
        compile_decoder(model)


PROJECTIONS = {  # edits of the projections in Attention.forward
    "another input of v": lambda x, q, k, v: torch.cat((q(x), k(x), v(x.roll(1, -1))), -1),
    "q and k together": lambda x, q, k, v: torch.cat((fused_linear(x, q, k), v(-x)), -1),
    "another order": lambda x, q, k, v: fused_linear(x, k, q, v),
    "another size": lambda x, q, k, v: torch.cat((q(x), k(x), v(x[..., :8])), -1),
    "another bias": fused_linear}


@pytest.mark.parametrize("edit", PROJECTIONS)
@torch.no_grad()
def test_projections_with_different_inputs_are_decoded(edit, monkeypatch):
    """For decoding they are one layer."""
    model = gpt.GPT(gpt.GPTConfig(**SHAPE)).eval()
    for attn in [block.attn for block in model.h]:
        if edit == "another size":
            attn.v = torch.nn.Linear(8, 32, bias=False)
        if edit == "another bias":
            attn.v.bias = torch.nn.Parameter(torch.randn(32))
    monkeypatch.setattr(ops, "fused_linear", PROJECTIONS[edit])
    idx, _ = masked_batch()
    expected = model(idx)
    torch.testing.assert_close(torch.cat([model(row) for row in idx.split(1)]), expected)
    packed = replace_linear_layers(copy.deepcopy(model))
    torch.testing.assert_close(packed(idx), expected)
    with torch.compiler.set_stance("force_eager"):
        decoder = compile_decoder(model)
        cache = create_cache(decoder, 1)
        logits = [decoder(part, cache=cache, last_only=False)
                  for part in idx[:1].split([3] + [1] * 13, dim=1)]
    torch.testing.assert_close(torch.cat(logits, dim=1), expected[:1], atol=1e-5, rtol=1e-4)


def test_only_blocks_with_attention_are_compiled_for_decoding():
    class Recurrence(gpt.Block):
        def __init__(self, config, layer):
            super().__init__(config, layer)
            self.attn = torch.nn.GRU(config.n_embd, config.n_embd, batch_first=True)

    class Recurrent(gpt.GPT):
        block_class = Recurrence
    with pytest.raises(ValueError, match="--compile: expected a plain GPT"):
        compile_decoder(Recurrent(gpt.GPTConfig(**SHAPE)))


def test_every_scalar_sum_of_a_subclass_is_logged(data_dir, tmp_path, monkeypatch):
    build = gpt.build_model
    monkeypatch.setattr(gpt, "build_model", lambda c, data: build(c, data, TwoHeadGPT))
    train(load_config(None, options(data_dir, tmp_path, max_iters=2, eval_interval=2)))
    lines = metrics(tmp_path)
    assert all(abs(line["second_loss"] - math.log(257)) < 0.2 for line in lines if "lr" in line)
    assert any("val_second_loss" in line for line in lines)


def share_mlp(model):
    model.h[1].mlp = model.h[0].mlp


def share_embedding(model):
    model.h[0].attn.q.weight = model.wte_prev.weight


def repeat_block(model):
    model.h[1] = model.h[0]


def add_tables(model):
    for block in model.h:
        block.register_buffer("table", torch.ones(4), persistent=False)


def refusals_of_fsdp(options):
    """The message for each edit of a model, "opened" if FSDP shards it."""
    config, build, texts = load_config(None, options), gpt.build_model, []
    with distributed.process_group(config) as ranks:
        for edit in (add_tables, share_mlp, share_embedding, repeat_block):
            def build_model(*args, edit=edit):
                model = build(*args)
                edit(model)
                return model
            gpt.build_model = build_model
            try:
                with open_run(config, ranks):
                    texts.append("opened")
            except SetupError as error:
                texts.append(str(error))
    return texts


def test_fsdp_refuses_a_table_without_values_and_parameters_of_two_blocks(data_dir, tmp_path):
    for table, mlp, wte, block in in_ranks(2, refusals_of_fsdp, options(
            data_dir, tmp_path, distributed="fsdp", prev_embedding=True)):
        assert "h.0.table, h.1.table have no values" in table and "--distributed ddp" in table
        assert "other parts of the model: h.0.mlp.gate.weight and h.1.mlp.gate.weight; " in mlp
        assert "model: wte_prev.weight and h.0.attn.q.weight; use --distributed ddp" in wte
        assert block == "opened"


# -----------------------------------------------------------------------------
# masks, loaders, FLOPs

def test_a_mask_replaces_the_causal_rule():
    """Bidirectional attention: the first state depends on the last token, and equals attention by
    hand over all positions."""
    model = gpt.GPT(gpt.GPTConfig(**SHAPE))
    idx, _ = masked_batch()
    other = idx.clone()
    other[:, -1] = (other[:, -1] + 1) % 61
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool)
    with torch.no_grad():
        assert torch.equal(model.trunk(idx)[:, 0], model.trunk(other)[:, 0])
        assert not torch.equal(model.trunk(idx, mask=mask)[:, 0],
                               model.trunk(other, mask=mask)[:, 0])
        causal = mask.tril()
        torch.testing.assert_close(model.trunk(idx, mask=causal), model.trunk(idx))


class ReversedLoader(DataLoader):
    def get_batch(self, device="cpu", step=None):
        x, y = super().get_batch(device, step)
        return y.flip(1), x.flip(1)


def test_open_token_data_takes_a_loader_class(data_dir, tmp_path):
    with opened(load_config(None, options(data_dir, tmp_path))) as run:
        plain = run.data.train.get_batch("cpu", 3)
        data = open_token_data(run.config, run.ranks, loader=ReversedLoader)
        assert torch.equal(data.train.get_batch("cpu", 3)[0], plain[1].flip(1))
        assert isinstance(data.val, ReversedLoader)


def flops_of(**changes):
    config = load_config(None, {k: v for k, v in (SHAPE | changes).items()})
    return gpt.build_model(config, types.SimpleNamespace(spec=dict(vocab_size=61)))


def test_flops_count_tables_as_lookups_and_windows_as_windows():
    plain, window = flops_of(), flops_of(layer_types="FW", window=4)
    with_table = flops_of(prev_embedding=True)
    assert with_table.flops_per_unit() == plain.flops_per_unit()
    # one of two layers sees 4 of 16 tokens: 12 FLOPs per visible token and channel
    assert plain.flops_per_unit() - window.flops_per_unit() == 12 * 32 * (16 - 4)

    class WithTables(gpt.GPT):
        def __init__(self, *args):
            super().__init__(*args)
            self.value_table = gpt.Embedding(61, 32)
    assert WithTables(plain.config).flops_per_unit() == plain.flops_per_unit()


# -----------------------------------------------------------------------------
# optimizers

class Lion(torch.optim.Optimizer):
    """arXiv:2302.06675; groups without betas of AdamW's form."""

    def __init__(self, groups, lr, beta1=0.9, beta2=0.99):
        super().__init__(groups, dict(lr=lr, beta1=beta1, beta2=beta2))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                update = m.lerp(p.grad, 1 - group["beta1"]).sign_()
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                m.lerp_(p.grad, 1 - group["beta2"])


class Factored(torch.optim.Optimizer):
    """Row and column means of squared gradients, as Adafactor has them, and a number of steps."""

    def __init__(self, groups, lr):
        super().__init__(groups, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state, square = self.state[p], p.grad.square() + 1e-12
                state["n"] = state.get("n", 0) + 1
                for dim, name in enumerate(("row", "column")[:p.dim()]):
                    mean = square if p.dim() == 1 else distributed.full(square.mean(1 - dim))
                    state.setdefault(name, torch.zeros_like(mean)).lerp_(mean, 0.1)
                scale = distributed.full(p.grad).square().mean().sqrt().clamp(min=1e-8)
                p.sub_(p.grad / scale, alpha=0.1 * group["lr"] / state["n"] ** 0.5)


class Hidden(Lion):
    """Lion whose momentum is outside of the state."""

    def __init__(self, groups, lr):
        super().__init__(groups, lr)
        self.moments = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for name, p in zip(group["names"], group["params"]):
                m = self.moments.setdefault(name, torch.zeros_like(p))
                p.sub_(m.lerp_(p.grad, 0.1).sign(), alpha=group["lr"])


class LocalLion(Lion):
    """Lion whose momentum is that of the rank's shard, a plain tensor."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                grad = distributed.local(p.grad)
                m = self.state[p].setdefault("momentum", torch.zeros_like(grad))
                distributed.local(p).sub_(m.lerp_(grad, 0.1).sign(), alpha=group["lr"])


class Owned(Lion):
    """Lion in which each rank updates parameters of its own, and more on rank 0."""

    def step(self, closure=None):
        rank = torch.distributed.get_rank()
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, p in enumerate(params):
            p.grad = p.grad if (i % 3 == 0) == bool(rank) else None
        super().step()
        for p, grad in zip(params, grads):
            p.grad = grad


class Grouped(Lion):
    """Lion with numbers in the parameter groups, which also change at a rate of 0, or do not."""

    def __init__(self, groups, lr):
        super().__init__(groups, lr)
        for group in self.param_groups:
            group["d"] = self.defaults["d"] = 0.0

    def step(self, closure=None):
        for group in self.param_groups:
            group["t"] = group.get("t", 0) + 1
            group["d"] += group["lr"]
            group["beta1"] = 0.9 / group["t"] - group["d"]
        super().step()


class TensorGrouped(Lion):
    """Lion with a tensor in the parameter groups."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["t"] = group.get("t", torch.zeros(1)) + 1
        super().step()


class Both(torch.optim.Optimizer):
    """Two optimizers, whose state is not in that of this one."""

    def __init__(self, groups):
        super().__init__(groups, dict(lr=1e-3))
        self.parts = [Lion(self.param_groups, 1e-3), torch.optim.SGD(self.param_groups, 0.0)]

    def step(self, closure=None):
        for part in self.parts:
            part.step()


OPTIMIZERS = dict(both=Both,
                  lion=lambda groups: Lion(groups, 1e-3),
                  local=lambda groups: LocalLion(groups, 1e-3),
                  owned=lambda groups: Owned(groups, 1e-3),
                  grouped=lambda groups: Grouped(groups, 1e-3),
                  tensors=lambda groups: TensorGrouped(groups, 1e-3),
                  prodigy=lambda groups: importlib.import_module("prodigyopt").Prodigy(groups),
                  sgd=lambda groups: torch.optim.SGD(groups, 1e-2, momentum=0.9),
                  plain=lambda groups: torch.optim.SGD(groups, 1e-2),
                  factored=lambda groups: Factored(groups, 1e-2),
                  hidden=lambda groups: Hidden(groups, 1e-3))


def train_with(kind, options):
    """Train with an optimizer that a fork has put into train/optimizer.py."""
    from train import optimizer as own

    own.AdamW = lambda groups, **_: OPTIMIZERS[kind](groups)
    return train(load_config(None, options))["val_loss"]


def run_with(kind, ranks, options):
    return in_ranks(ranks, functools.partial(train_with, kind), options)[0]


class Stepped(AdamW):
    """AdamW with a number of its own outside of the state."""

    @torch.no_grad()
    def step(self):
        self.n_steps = getattr(self, "n_steps", 0) + 1
        super().step()


def test_a_subclass_of_adamw_is_checked_too(data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("train.optimizer.AdamW", Stepped)
    with pytest.raises(CheckpointError, match="optimizer Stepped: attribute n_steps"):
        train(load_config(None, options(data_dir, tmp_path, max_iters=2)))


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["factored", "grouped", "prodigy", *(
    pytest.param(kind, marks=pytest.mark.slow) for kind in ("lion", "sgd", "plain"))])
def test_any_optimizer_resumes_on_other_ranks(kind, data_dir, tmp_path):
    """Half of the run on one process, two ranks with DDP and with FSDP, the rest on another."""
    if kind == "prodigy":
        pytest.importorskip("prodigyopt")
    settings = dict(max_iters=6, eval_interval=6, lr_decay_iters=6, warmup_iters=0, batch_size=4,
                    gradient_accumulation_steps=1, ema=0.5)
    whole = run_with(kind, 1, options(data_dir, tmp_path / "whole", **settings))
    plan = dict(same=((1, "ddp"), (1, "ddp")), ddp=((1, "ddp"), (2, "ddp")),
                fsdp=((2, "ddp"), (2, "fsdp")), back=((2, "fsdp"), (1, "ddp")))
    for name, starts in plan.items():
        for steps, (ranks, how) in zip((3, 6), starts):
            loss = run_with(kind, ranks, options(data_dir, tmp_path / name, distributed=how,
                                                 **settings | dict(max_iters=steps)))
        assert loss == pytest.approx(whole, abs=0 if name == "same" else 1e-5), name
    (expected, _), (found, _) = (tensors(tmp_path / n / "ckpt.pt") for n in ("whole", "same"))
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(found[name])), name


@pytest.mark.parametrize("kind, message", [
    ("hidden", "optimizer Hidden: attribute moments"),
    ("tensors", "optimizer TensorGrouped: t of parameter group 0"),
    ("both", "optimizer Both: .*state of parts")])
def test_an_optimizer_with_state_outside_its_state_is_refused(data_dir, tmp_path, monkeypatch,
                                                              kind, message):
    monkeypatch.setattr("train.optimizer.AdamW", None)  # undone at the end
    with pytest.raises(CheckpointError, match=message):
        train_with(kind, options(data_dir, tmp_path, max_iters=2))


def refusal_of_state(kind, options):
    try:
        return train_with(kind, options)
    except CheckpointError as error:
        return str(error)


def test_state_of_a_rank_that_a_checkpoint_would_lose_is_refused(data_dir, tmp_path):
    """A checkpoint has plain tensors of rank 0 only; under DDP they are equal on all ranks."""
    for kind, how, message in (("local", "fsdp", ".momentum"), ("owned", "ddp", ".exp_avg"),
                               ("local", "ddp", None)):
        for result in in_ranks(2, functools.partial(refusal_of_state, kind), options(
                data_dir, tmp_path / kind / how, distributed=how, max_iters=2)):
            assert isinstance(result, float) if message is None else (
                message in result and "differs between ranks" in result)


def train_with_noise(options, sigma):
    """Train with noise that is added to the averaged gradients."""
    from train import train as loop
    clip = loop.clip_gradients

    def clip_with_noise(optimizer, *args):
        norm = clip(optimizer, *args)
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.grad.add_(torch.randn_like(p.grad), alpha=sigma)
        return norm
    loop.clip_gradients = clip_with_noise
    train(load_config(None, options))


@pytest.mark.parametrize("sigma", [0.0, 0.01])
def test_weights_that_differ_between_ranks_are_named(data_dir, tmp_path, sigma):
    """Random numbers are seeded per rank."""
    in_ranks(2, functools.partial(train_with_noise, sigma=sigma), options(
        data_dir, tmp_path, distributed="ddp", max_iters=2, eval_interval=2))
    warning = "weights differ between ranks, e.g. h.0"
    assert (warning in (tmp_path / "train.log").read_text()) == bool(sigma)


class WithStatistics(gpt.GPT):
    """A GPT with a running mean, which each rank computes from its own batches."""

    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("running", torch.zeros(1))

    def compute_loss(self, idx, targets):
        self.running.lerp_(idx.float().mean(), 0.1)
        return super().compute_loss(idx, targets)


def train_with_statistics(options):
    build = gpt.build_model
    gpt.build_model = lambda config, data: build(config, data, WithStatistics)
    try:
        train(load_config(None, options))
    finally:
        gpt.build_model = build


def test_buffers_that_differ_between_ranks_are_named(data_dir, tmp_path):
    in_ranks(2, train_with_statistics, options(
        data_dir, tmp_path, distributed="ddp", max_iters=2, eval_interval=2))
    assert ("1 weights differ between ranks, e.g. running"
            in (tmp_path / "train.log").read_text())


# -----------------------------------------------------------------------------
# exports

@pytest.mark.parametrize("name", ["h.0.attn.mix", "h.1.attn.q.scale", "second.weight"])
@pytest.mark.parametrize("to", ["hf", "model.gguf", "nano.pt"])
def test_an_export_refuses_a_tensor_that_it_does_not_know(name, to, data_dir, tmp_path, capsys):
    shape = {} if to != "nano.pt" else dict(
        norm="layer", pos="learned", mlp="gelu_exact", bias=False, n_hidden=128, tie_weights=True)
    train(load_config(None, options(data_dir, tmp_path, max_iters=1, n_embd=32, **shape)))
    state = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    if to == "hf":  # the unedited model is exported
        assert convert.main(["--ckpt", str(tmp_path / "ckpt.pt"), "--to", str(tmp_path / "a")]) == 0
    state["model"][name] = torch.ones(3)
    save_checkpoint(tmp_path / "edited.pt", state)
    assert convert.main(["--ckpt", str(tmp_path / "edited.pt"), "--to", str(tmp_path / to)]) == 2
    assert name in capsys.readouterr().err


# -----------------------------------------------------------------------------
# formulas

GELU = ("model/gpt.py", "swiglu=F.silu", "swiglu=F.gelu")  # GeGLU by one word in MLP


@pytest.fixture
def edit(tmp_path_factory, monkeypatch):
    """edit(file, old, new): change the files that the program has read its formulas from, without
    arguments back to the original ones."""
    copy = tmp_path_factory.mktemp("fork")
    monkeypatch.setattr(formulas, "REPOSITORY", copy)

    def replace(name=None, old="", new=""):
        for cached in (formulas.digests, formulas.read_record, formulas.warn_once):
            cached.cache_clear()
        for file in (*formulas.FILES, "model/moe.py", "model/lora.py"):
            source = (REPO / file).read_text()
            assert file != name or source.count(old) == 1
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            (copy / file).write_text(source.replace(old, new) if file == name else source)
    replace()
    yield replace
    monkeypatch.undo()
    formulas.digests.cache_clear()
    formulas.read_record.cache_clear()


def test_the_recorded_digests_are_those_of_the_code():
    assert not formulas.edited(), "if the logits are unchanged, run: python -m model.core.formulas"
    names = {f"{part.__qualname__} ({part.__module__.replace('.', '/')}.py)" for part in (
        gpt.GPT, gpt.GPTConfig, gpt.Embedding, gpt.qk_norm, gpt.stream_norm, gpt.NormAllHeads,
        ops.attend, ops.attend_one, ops.fused_linear, ops.apply_rope, moe.Experts, moe.Router)}
    assert names <= formulas.read_record()["digests"].keys()


EDITS = [  # a name in the message, or "" for an edit that does not change the logits
    ("gpt", "MLP", *GELU),
    ("gpt", "GPT", "model/gpt.py", "x = x * c.embed_scale", "x = x / c.embed_scale"),
    ("gpt", "statements", "model/gpt.py", "USE = ", "F.silu = F.gelu\nUSE = "),
    ("gpt", "attend", "model/core/ops.py", "tril(S - T)", "tril(S - T + 1)"),
    ("gpt", "", "model/gpt.py", "# The gated forms", "# the gated forms"),
    ("gpt", "", "model/gpt.py", '"""A transformer block:', '"""A block of a transformer:'),
    ("gpt", "", "model/gpt.py", "x = x * c.embed_scale", "x = (x *\n c.embed_scale)"),
    ("gpt", "", "model/gpt.py", "into_stream = 0.02", "into_stream = 0.01"),
    ("gpt", "", "model/core/ops.py", "# last, in float32", "# in float32"),
    ("gpt", "", "model/core/ops.py", "losses[chunk] = largest", "losses[chunk] = 2 * largest"),
    ("gpt", "", "model/core/ops.py", "return F.cross_entropy(z.", "return 2 * F.cross_entropy(z."),
    ("gpt", "", "model/moe.py", "F.silu(self.gate", "F.gelu(self.gate"),
    ("moe", "Experts", "model/moe.py", "F.silu(self.gate", "F.gelu(self.gate"),
    ("moe", "", "model/moe.py", "softmax(-1).mean(-2)", "softmax(-1).mean(-1)"),
    ("moe", "MLP", *GELU),
    ("lora", "LoRA", "model/lora.py", "alpha / r, targets", "alpha / r ** 0.5, targets"),
    ("gpt", "", "model/lora.py", "alpha / r, targets", "alpha / r ** 0.5, targets"),
    ("chat", "LoRALinear", "model/core/adapters.py", "x = x.to(torch", "x = 2 * x.to(torch")]


@pytest.mark.parametrize(("kind", "name", "file", "old", "new"), EDITS)
def test_an_edit_of_a_formula_is_named(kind, name, file, old, new, edit):
    edit(file, old, new)
    assert [*formulas.edited(kind)] == ([f"{name} ({file})"] if name else [])


def test_a_merged_model_has_the_formulas_of_its_adapters(edit):
    """The file of the adapters is not of the type of the merged model: equal code is no edit."""
    edit("model/lora.py", "alpha / r, targets", "alpha / r ** 0.5, targets")
    state = dict(formulas=formulas.edited("lora"))
    assert state["formulas"] and formulas.find_edits(state, "chat") == []
    edit()
    assert formulas.find_edits(state, "chat") == ["LoRA (model/lora.py)"]


def test_digests_do_not_depend_on_fields_of_other_versions_of_python():
    """type_params is a field since 3.12, and empty without generics."""
    plain, later = (ast.parse("def f(x):\n    'text'\n    return x[1:]  # a") for _ in range(2))
    later.body[0].type_params, later.body[0]._fields = [], (*later.body[0]._fields, "type_params")
    assert formulas.simplify(plain) == formulas.simplify(later)
    assert formulas.simplify(plain) != formulas.simplify(ast.parse("def f(x): return x[:1]"))


def test_an_edited_formula_is_recorded_and_named(edit, data_dir, tmp_path, capsys, monkeypatch):
    """Exports are refused, in the edited program and of its checkpoint; a resume and the weights
    for another run continue with a line; an imported model with a line."""
    def export(name, to="hf"):
        code = convert.main(["--ckpt", str(tmp_path / name / "ckpt.pt"), "--to",
                             str(tmp_path / to)])
        return code, capsys.readouterr().err

    def run(name, steps=1, **changes):
        train(load_config(None, options(data_dir, tmp_path / name, max_iters=steps, **changes)))
        return capsys.readouterr().err
    line = "formulas than this program's, and the logits may differ: MLP (model/gpt.py)\n"
    assert line not in run("plain") and export("plain")[0] == 0
    edit(*GELU)
    assert line not in run("edited")
    state = torch.load(tmp_path / "edited" / "ckpt.pt", weights_only=True)
    assert state["formulas"] == formulas.edited("gpt") != {}
    for name in ("edited", "plain"):
        code, error = export(name, "of_edited_code")
        assert code == 2 and "MLP (model/gpt.py)" in error and "model.core.formulas" in error
    load_model(tmp_path / "edited" / "ckpt.pt")
    assert not capsys.readouterr().err
    load_model(tmp_path / "hf")  # a published model
    assert capsys.readouterr().err == f"{tmp_path}/hf: written with other {line}"
    assert export("edited", "own.safetensors")[0] == 0

    edit()
    assert run("edited", 2).count(line) == 1  # resumed
    edit(*GELU)
    run("second")
    edit()
    start = tmp_path / "second" / "ckpt.pt"
    assert run("other", init_from=str(start)).count(line) == 1
    edit()  # a process of its own: each prints the line once
    assert run("student", model="distill", teacher=str(start)).count(line) == 1
    code, error = export("second", "of_edited_code")
    assert code == 2 and "programs: MLP (model/gpt.py)" in error
    load_model(tmp_path / "own.safetensors")
    assert line in capsys.readouterr().err
    state.pop("formulas")  # an earlier version
    save_checkpoint(tmp_path / "old.pt", state)
    load_model(tmp_path / "old.pt")
    assert not capsys.readouterr().err

    monkeypatch.setattr(formulas, "RECORD", Path(shutil.copy(formulas.RECORD, tmp_path)))
    edit(*GELU)
    formulas.record(None)  # as if the logits were the same
    edit(*GELU)
    assert formulas.edited("gpt") == {} and export("second", "of_recorded_code")[0] == 0
