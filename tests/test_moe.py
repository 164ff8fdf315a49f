"""Experts: the definitions, the products, and the same result on one rank and on several."""

import json
import math
import random
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, run, tiny_args
from processes import python
from runs import Program, assert_same, run_program, slow, tensors

from model import gpt
from model.moe import (
    GroupedLinear,
    build_model,
    compute_router_auxiliary_loss,
    has_grouped_mm,
    router_losses,
)
from train.base.errors import ConfigError
from train.checkpoint import load_checkpoint
from train.config import load_config

OWN = dict(model="moe", n_experts=4, experts_per_token=2)
BALANCED = dict(router_score="sigmoid", balance_rate=0.01, shared_experts=1)
SPEC = types.SimpleNamespace(spec=dict(vocab_size=256))


def tiny(**changes):
    return load_config(None, TINY | OWN | changes)


def batch(rows=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(256, (rows, 16), generator=generator) for _ in range(2))


# -----------------------------------------------------------------------------
# the losses of routers

def test_router_losses_are_those_of_the_definition():
    logits, k = torch.randn(50, 6, generator=torch.Generator().manual_seed(1)) * 2, 2
    f, p = [0.0] * 6, [0.0] * 6
    for row in logits.tolist():
        total = sum(math.exp(v) for v in row)
        for i in sorted(range(6), key=row.__getitem__)[-k:]:
            f[i] += 1 / (50 * k)
        for i in range(6):
            p[i] += math.exp(row[i]) / total / 50
    z = sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits.tolist()) / 50
    losses = router_losses(logits, k)
    assert float(losses["load_balance"]) == pytest.approx(6 * sum(a * b for a, b in zip(f, p)))
    assert float(losses["auxiliary"]) == pytest.approx(sum((a - 1 / 6) ** 2 for a in f))
    assert float(losses["z_loss"]) == pytest.approx(z)
    assert router_losses(logits.view(5, 10, 6), k) == losses  # whatever the shape of the tokens


def test_auxiliary_lowers_what_is_used_too_much():
    """Its gradient is that of 2 sum_i (f_i - 1/C) P_i; a layer may lack parts."""
    logits = torch.randn(40, 5, generator=torch.Generator().manual_seed(2), requires_grad=True)
    logits.data[:, 3] += 1.0
    loss = compute_router_auxiliary_loss([{"auxiliary": router_losses(logits, 2)["auxiliary"]}], 7,
                                         0.5, 7)
    chosen = logits.detach().topk(2).indices.flatten()
    f = torch.bincount(chosen, minlength=5) / 80
    by_hand = (2 * (f - 0.2) * logits.softmax(-1).mean(0)).sum() / 2
    ours, theirs = (torch.autograd.grad(x, logits)[0] for x in (loss, by_hand))
    torch.testing.assert_close(ours, theirs)
    assert float(loss) == pytest.approx(0.5 * float((f - 0.2).square().sum()))
    assert float((logits - 9 * ours).softmax(-1).mean(0)[3]) < float(logits.softmax(-1).mean(0)[3])


def test_uniform_use_has_a_load_balance_of_one():
    losses = router_losses(torch.eye(8).repeat(3, 1), 1)
    assert float(losses["load_balance"]) == pytest.approx(1.0)
    assert float(losses["auxiliary"]) == pytest.approx(0.0, abs=1e-12)


def test_layers_add_up_with_their_coefficients():
    layers = [dict(load_balance=torch.tensor(2.0), auxiliary=torch.tensor(3.0),
                   z_loss=torch.tensor(5.0)), dict(load_balance=1.0, auxiliary=1.0, z_loss=1.0)]
    assert float(compute_router_auxiliary_loss(layers)) == pytest.approx(0.01 * 3 + 0.001 * 6)
    c = load_config(None, dict(model="moe"))  # which has the same defaults
    assert (c.load_balance_coef, c.auxiliary_coef, c.z_loss_coef) == (0.01, 0.0, 0.001)
    assert float(compute_router_auxiliary_loss(layers, 1.0, 10.0, 100.0)) == pytest.approx(
        3 + 40 + 600)


# -----------------------------------------------------------------------------
# the layer

@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("more", [dict(), BALANCED])
def test_the_layer_equals_a_loop_over_tokens(normalise, more):
    model = build_model(tiny(norm_topk_prob=normalise, **more), SPEC)
    experts, x = model.h[0].mlp, torch.randn(2, 16, 32)
    bias = torch.tensor([0.0, 0.2, 0.0, -0.2]) * bool(more)  # enough to change choices
    if more:
        experts.router.load_bias += bias
    y = experts(x, routed := [])
    (logits, chosen), = routed
    assert torch.allclose(logits, x @ experts.router.weight.t(), atol=1e-6)
    assert (chosen == 1).any(-1).all() == bool(more)
    def swiglu(gate, up, down, x):
        return down @ (F.silu(gate @ x) * (up @ x))
    for b, t in ((0, 0), (1, 7), (1, 15)):
        p = logits[b, t].sigmoid() if more else logits[b, t].softmax(-1)
        best = (p + bias).argsort(descending=True)[:2].tolist()
        total = sum(p[e] for e in best) if normalise else 1.0
        wanted = sum(p[e] / total * swiglu(*(getattr(experts, n).weight[e]
                                             for n in ("gate", "up", "down")), x[b, t])
                     for e in best)
        if more:
            wanted += swiglu(*(getattr(experts.shared, n).weight
                               for n in ("gate", "up", "down")), x[b, t])
        assert torch.allclose(y[b, t], wanted, atol=1e-6)


@pytest.mark.parametrize("n_in, n_out, dtype", [
    (8, 16, torch.float32), (8, 16, torch.bfloat16), (7, 16, torch.float32), (8, 3, torch.float64)])
def test_one_call_for_all_groups_equals_one_group_at_a_time(n_in, n_out, dtype):
    """PyTorch's grouped_mm, or a loop for sizes and types that it does not have."""
    linear, ends = GroupedLinear(4, n_in, n_out), torch.tensor([5, 5, 9, 12], dtype=torch.int32)
    torch.nn.init.normal_(linear.to(dtype).weight)
    assert has_grouped_mm(linear.weight, linear.weight) == (n_in == 8 and n_out == 16)
    x, grads = torch.randn(12, n_in, dtype=dtype), []
    for product in (linear, lambda x, ends: torch.cat([
            x[start:end] @ w.t() for start, end, w in zip((0, *ends), ends, linear.weight)])):
        linear.weight.grad = None
        y = product(x, ends)
        (y * torch.arange(y.numel()).view(y.shape)).sum().backward()
        grads.append((y.detach(), linear.weight.grad))
    tolerance = 0.02 if dtype == torch.bfloat16 else 1e-5
    for one, other in zip(*grads):
        assert torch.allclose(one, other, rtol=tolerance, atol=tolerance)
    assert not grads[0][1][1].any()  # the group without rows: a gradient, and it is zero
    compiled = torch.compile(linear, backend="eager")(x, ends)
    assert torch.allclose(compiled, grads[0][0], rtol=tolerance, atol=tolerance)


def test_the_bias_moves_against_the_load():
    """By numpy; its mean stays 0; a frozen router's load becomes even."""
    model = build_model(tiny(**BALANCED, n_experts=6), SPEC)
    load = torch.tensor([[7.0, 1, 4, 4, 4, 4], [5.0, 5, 5, 0, 0, 0]], dtype=torch.float64)
    model.after_step(0, dict(routed=load))
    for block, row in zip(model.h, load.numpy()):
        step = 0.01 * np.sign(row.mean() - row)
        np.testing.assert_allclose(block.mlp.router.load_bias, step - step.mean(), atol=1e-8)
    router = model.h[0].mlp.router
    torch.manual_seed(0)
    router.weight.data.normal_(0, 0.2)
    x = torch.randn(4, 64, 32) + 1.0
    loads = []
    for _ in range(100):
        loads.append(torch.bincount(router(x)[2].flatten(), minlength=6).double())
        router.move_bias(loads[-1], 0.01)
    spread = [float(load.max() / load.mean()) for load in (loads[0], loads[-1])]
    assert spread[0] > 1.5 and spread[1] < 1.15


def test_balance_is_part_of_a_checkpoint_but_of_no_gradient(tmp_path, data_dir):
    settings = OWN | BALANCED
    code, text = run_program(data_dir, tmp_path, **settings, max_iters=5)
    assert code == 0, text
    biases = [t for name, t in tensors(tmp_path / "ckpt.pt")[0].items()
              if name.startswith("model.") and name.endswith("router.load_bias")]
    assert len(biases) == 1 and all(0.005 < float(t.abs().max()) < 0.06 for t in biases)
    plain = build_model(tiny(), SPEC)  # no key: the model of before
    assert not any("load_bias" in name or "shared" in name for name in plain.state_dict())
    model = build_model(tiny(**BALANCED, expert_hidden=8), SPEC)
    assert model.h[0].mlp.shared.up.weight.shape == (8, 32)
    assert not torch.equal(model.h[0].mlp.shared.up.weight, model.h[0].mlp.up.weight[0])


def test_a_run_that_starts_from_weights_has_its_own_balance_rate(tmp_path, data_dir):
    """From its file or the command line; but with a rate above 0, or without the bias, as those."""
    code, text = run_program(data_dir, tmp_path / "one", **OWN | BALANCED, max_iters=1)
    assert code == 0, text
    settings = dict(init_from=str(tmp_path / "one/ckpt.pt"), max_iters=0, model="moe")
    for i, (file, args, rate) in enumerate([
            (dict(balance_rate=0.02), [], 0.02), ({}, ["--balance_rate=0.02"], 0.02),
            ({}, [], 0.01), ({}, ["--balance_rate=0"], None)]):
        out = tmp_path / str(i)
        code, text = run_program(data_dir, out, *args, **settings, **file)
        if rate:
            assert code == 0, text
            state = load_checkpoint(out / "ckpt.pt")
            assert state["config"]["balance_rate"] == state["model_args"]["balance_rate"] == rate
        else:
            assert code == 2 and "balance_rate: it has 0.01, the configuration says 0.0" in text


@pytest.mark.parametrize("changes", [
    dict(model="gpt", init_from="{}"), dict(model="lora", backbone="{}")])
def test_other_model_types_train_no_experts(tmp_path, data_dir, changes):
    path = tmp_path / "ckpt.pt"
    model = build_model(tiny(), SPEC)
    torch.save(dict(model=model.state_dict(), model_args=vars(model.config), config=OWN), path)
    changes = {key: value.format(path) for key, value in changes.items()}
    code, text = run_program(data_dir, tmp_path / "out", **changes)
    assert code == 2 and f"{path}: a mixture of experts, which --model" in text


def test_split_into_micro_batches_changes_no_gradient():
    model, (x, y) = build_model(tiny(load_balance_coef=1.0, z_loss_coef=0.1), SPEC), batch()
    found = []
    for parts in (1, 2, 4):
        model.zero_grad()
        for a, b in zip(x.chunk(parts), y.chunk(parts)):
            (model(a, b)[0] / parts).backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters()})
    for other in found[1:]:
        for name, grad in found[0].items():
            assert torch.allclose(other[name], grad, rtol=1e-4, atol=1e-7), name
    assert found[0]["h.0.mlp.router.weight"].norm() > 1e-4


def test_training_loss_has_the_routers_part_and_evaluation_has_not():
    model, (x, y) = build_model(tiny(), SPEC), batch()
    loss, sums = model(x, y)
    logits = []
    for block in model.h:
        block.mlp.router.register_forward_hook(lambda m, args, out: logits.append(out[0]))
    plain, evaluated = model.eval()(x, y)
    parts = [[router_losses(row, 2) for row in layer] for layer in logits]  # (L, B)
    extra = sum(compute_router_auxiliary_loss([layer[b] for layer in parts]) for b in range(4)) / 4
    assert loss.item() == pytest.approx((plain + extra).item(), rel=1e-6)
    numbers = model.numbers({n: v.double() for n, v in sums.items()} | dict(count=x.numel()))
    assert numbers["lm_loss"] == pytest.approx(plain.item(), rel=1e-6)
    balance = [row["load_balance"] for layer in parts for row in layer]
    assert numbers["load_balance"] == pytest.approx(sum(balance).item() / 8, rel=1e-5)
    assert "lm_loss" not in evaluated and evaluated["routed"].shape == (2, 4)
    assert float(evaluated["routed"].sum()) == pytest.approx(2 * x.numel())


def test_active_parameters_are_those_of_the_dense_model():
    moe = build_model(tiny(n_experts=8), SPEC)
    dense = gpt.build_model(load_config(None, TINY), SPEC)
    routers = 2 * 8 * 32
    assert moe.flops_per_unit() == dense.flops_per_unit() + 6 * routers


# -----------------------------------------------------------------------------
# runs

def test_commands_of_the_readme(tmp_path, data_dir):
    out = tmp_path / "out"
    args = tiny_args(data_dir=data_dir, out_dir=out, max_iters=4, tokenizer="byte")
    code, text = run("--config", "train/configs/moe.yaml", *args)
    assert code == 0, text
    assert "load balance" in text and "use max" in text and "lm loss" in text
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    evaluation = [line for line in lines if "val_loss" in line][-1]
    assert math.exp(evaluation["val_loss"]) == pytest.approx(evaluation["val_ppl"])
    assert [len(layer) for layer in evaluation["val_use"]] == [11, 11]
    assert sum(evaluation["val_use"][0]) == pytest.approx(11, abs=0.01)
    sample = python("-m", "model.sample", "--ckpt", out / "ckpt.pt", "--prompt", "line 1",
                    "--max_new_tokens", "20", "--seed", "1")
    assert sample.returncode == 0 and sample.stdout.startswith("line 1"), sample.stderr


@pytest.mark.matrix(131)
def test_killed_and_resumed_is_the_same_bit_for_bit(tmp_path, data_dir):
    """kill -9 while experts are balanced by their loads -> the end is exact"""
    a, b = tmp_path / "a", tmp_path / "b"
    settings = OWN | BALANCED | dict(save_interval=5, eval_interval=5, max_iters=40,
                                     lr_decay_iters=40)
    assert run_program(data_dir, a, **settings)[0] == 0
    program = Program(data_dir, b, **settings)
    program.wait_for(f"iter {random.randint(12, 25)}:")
    program.kill()
    code, text = run_program(data_dir, b, **settings)
    assert code == 0 and "Resuming from" in text
    assert_same(a, b)


@pytest.mark.parametrize("way, optimizer", [
    ("ddp", "adamw"), slow("fsdp", "adamw"), slow("ddp", "muon"), ("fsdp", "muon")])
def test_two_ranks_equal_one(tmp_path, data_dir, way, optimizer):
    """More experts than tokens reach: on both ranks some have no rows."""
    settings = dict(OWN, n_experts=16, block_size=4, batch_size=2, n_layer=1, optimizer=optimizer,
                    gradient_accumulation_steps=2, learning_rate=1e-3, load_balance_coef=0.5,
                    data_dir=data_dir, vocab_size=256, **BALANCED)
    # Muon computes in bfloat16: small differences grow.
    settings["max_iters"] = 6 if optimizer == "adamw" else 1
    code, text = run(*tiny_args(**settings, out_dir=tmp_path / "one"))
    assert code == 0, text
    code, text = run(*tiny_args(**settings, out_dir=tmp_path / "two", distributed=way), ranks=2)
    assert code == 0, text
    one, two = (tensors(tmp_path / n / "ckpt.pt")[0] for n in ("one", "two"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.allclose(two[name], tensor, rtol=1e-4, atol=1e-5), name
    state = load_checkpoint(tmp_path / "two" / "ckpt.pt")["optimizer"]["state"]
    muon = {name for name, entry in state.items() if "momentum_buffer" in entry}
    assert [n.removeprefix("h.0.mlp.") for n in sorted(muon) if "mlp" in n] == [
        "down.weight", "gate.weight", "shared.down.weight", "shared.gate.weight",
        "shared.up.weight", "up.weight"] * (optimizer == "muon")  # not the router
    idle = json.loads((tmp_path / "one" / "metrics.jsonl").read_text().splitlines()[1])
    assert idle["use_min"] == 0.0


def test_early_stopping_watches_the_balance(tmp_path, data_dir):
    code, text = run_program(data_dir, tmp_path / "o", **OWN, eval_interval=2, max_iters=40,
                             early_stopping_metric="val_use_min", early_stopping_mode="max",
                             early_stopping_min_delta=10, early_stopping_patience=2)
    assert code == 0 and "no better val_use_min in 2 evaluations" in text


def test_bad_input_is_named(tmp_path, data_dir):
    code, text = run(*tiny_args(model="moe", experts_per_token=9, mlp="gelu", bias=True,
                                data_dir=data_dir, out_dir=tmp_path))
    assert code == 2 and "Traceback" not in text
    for words in ("experts_per_token (9) must not exceed n_experts (8)",
                  "mlp: must be swiglu with experts", "bias: must be False with experts"):
        assert words in text
    with pytest.raises(ConfigError, match="norm_position: must be pre with experts, got post"):
        tiny(norm_position="post")
    with pytest.raises(ConfigError, match="z_loss_coef: must be at least 0"):
        tiny(z_loss_coef=-1)


def test_sampling_with_a_cache_equals_the_whole(tmp_path):
    from model.core.kv_cache import KVCache
    model, (x, _) = build_model(tiny(), SPEC).eval(), batch(2)
    cache = KVCache(model.config, 2, x.device, torch.float32)
    with torch.no_grad():
        whole = model(x)
        parts = [model(part, cache=cache) for part in x.split((5, 1, 10), dim=1)]
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-5)


@pytest.mark.parametrize("way", ["true", "selective"])
def test_recomputed_blocks_give_the_same_gradient(way):
    plain, other = (build_model(tiny(gradient_checkpointing=w), SPEC) for w in ("false", way))
    for model in (plain, other):
        model(*batch())[0].backward()
    for (name, p), q in zip(plain.named_parameters(), other.parameters()):
        assert torch.equal(p.grad, q.grad), name


# -----------------------------------------------------------------------------
# the numbers, a second way

def test_numbers_of_sums_by_hand():
    """Two layers, four experts, 20 tokens of which each layer routed 2 x 20."""
    model = build_model(tiny(), SPEC)
    routed = torch.tensor([[20.0, 10, 10, 0], [10.0, 10, 10, 10]]) / 2  # as of compute_load()
    sums = dict(routed=routed, count=torch.tensor(20.0), lm_loss=torch.tensor(60.0),
                load_balance=torch.tensor(25.0), auxiliary=torch.tensor(2.0),
                z_loss=torch.tensor(50.0))
    numbers = model.numbers(sums)
    assert numbers.pop("use") == [[2.0, 1.0, 1.0, 0.0], [1.0] * 4]
    assert numbers == pytest.approx(dict(lm_loss=3.0, load_balance=1.25, auxiliary=0.1, z_loss=2.5,
                                         use_min=0.0, use_max=2.0))
    empty = model.numbers({name: 0 * value for name, value in sums.items()})
    assert empty["use_max"] == empty["load_balance"] == 0.0


def test_sums_of_a_batch_are_counted_by_sequence():
    """What evaluation adds up is what the definition gives for each sequence by itself."""
    model, (x, y) = build_model(tiny(n_experts=5, experts_per_token=3), SPEC).eval(), batch(3)
    logits = []
    for block in model.h:
        block.mlp.router.register_forward_hook(lambda m, args, out: logits.append(out[0]))
    sums = model(x, y)[1]
    for name in ("load_balance", "auxiliary", "z_loss"):
        parts = [float(router_losses(row, 3)[name]) for layer in logits for row in layer]
        assert float(sums[name]) == pytest.approx(sum(parts) / 2 * 16, rel=1e-5), name
    for layer, used in zip(logits, sums["routed"]):
        times = [sum(int(e in row.topk(3).indices) for row in layer.flatten(0, 1))
                 for e in range(5)]
        assert used.tolist() == pytest.approx([t / 3 for t in times])


def test_every_coefficient_weighs_its_part_of_the_loss():
    x, y = batch()
    parts = dict(load_balance_coef=0.0, auxiliary_coef=0.0, z_loss_coef=0.0)
    plain, sums = build_model(tiny(**parts), SPEC)(x, y)
    for name in parts:
        loss, _ = build_model(tiny(**parts | {name: 0.5}), SPEC)(x, y)
        part = sums[name.removesuffix("_coef")] * 2 / x.numel()  # both layers
        assert float(loss - plain) == pytest.approx(0.5 * float(part), rel=1e-3), name


def test_shape_start_and_work_of_experts():
    model = build_model(tiny(n_experts=6, experts_per_token=3, n_hidden=64, n_embd=128), SPEC)
    experts = model.h[0].mlp
    assert experts.up.weight.shape == (6, 64 // 3, 128) == experts.gate.weight.shape
    assert build_model(tiny(expert_hidden=7), SPEC).h[0].mlp.down.weight.shape == (4, 32, 7)
    few = build_model(tiny(n_experts=4, experts_per_token=4, n_hidden=3), SPEC)
    assert few.config.expert_hidden == 1
    for p, std in ((experts.router.weight, 0.02), (experts.gate.weight, 0.02),
                   (experts.down.weight, 0.02 / 4 ** 0.5)):
        assert p.std().item() == pytest.approx(std, rel=0.1)
    stacked = 2 * 3 * 6 * 21 * 128
    idle = 6 * (stacked - stacked * 3 // 6)
    assert model.flops_per_unit() == gpt.GPT.flops_per_unit(model) - idle
    x = torch.randn(1, 5, 128)
    dropping = build_model(tiny(dropout=0.5, n_embd=128), SPEC).h[0].mlp
    assert not torch.equal(dropping(x, []), dropping(x, []))
    assert torch.equal(dropping.eval()(x, []), dropping(x, []))


def test_a_frozen_model_counts_a_third_of_the_flops():
    """2 per weight forward; 4 more backward"""
    model = build_model(tiny(n_experts=16), SPEC)
    trained = model.flops_per_unit()
    experts = sum(p.numel() for name, p in model.named_parameters()
                  if name.endswith(("mlp.gate.weight", "mlp.up.weight", "mlp.down.weight")))
    for block in model.h:
        block.mlp.requires_grad_(False)
        block.mlp.router.requires_grad_(True)
    used = experts * 2 // 16  # two experts of a token; their inputs have gradients
    assert model.flops_per_unit() == trained - 2 * used
    assert 0 < model.requires_grad_(False).flops_per_unit() == trained / 3
