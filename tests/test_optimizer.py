"""train/optimizer.py: which tensors decay, fused AdamW, and Muon."""

import copy

import pytest
import torch
import torch.nn as nn
from conftest import TINY

from model.gpt import GPT, GPTConfig
from train.base.checkpoint_file import load_checkpoint
from train.checkpoint import check_state, optimizer_state, restore_optimizer
from train.config import load_config
from train.distributed import Ranks
from train.optimizer import (
    AdamW,
    Muon,
    configure_optimizers,
    create_state,
    group_parameters,
    orthogonalize,
)
from train.train import train

MUON = dict(lr=0.02, momentum=0.9, weight_decay=0.1)


class Alone:
    world_size, main = 1, True


def gpt(**changes):
    torch.manual_seed(0)
    shape = dict(n_layer=2, n_head=2, n_embd=32, block_size=8, vocab_size=50)
    return GPT(GPTConfig(**shape | changes))


def configure(model, muon=None, lr_groups=None, log=lambda text: None):
    return configure_optimizers(model, 0.1, 1e-3, (0.9, 0.95), 1e-8, muon, lr_groups, log)


def set_gradients(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def weights(model):
    return {n: p.detach().clone() for n, p in model.named_parameters()}


# --- groups

def test_production_model_prints_the_counts_of_the_contract():
    lines = []
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=32000, n_hidden=1536))
    configure(model, log=lines.append)
    assert lines == ["Optimizer configured: 113 tensors decayed (50,036,736 params), "
                     "33 tensors not decayed (12,672 params)"]


def test_matrices_decay_and_the_rest_does_not():
    model = gpt(norm="layer", bias=True, pos="learned")
    decay = {n: g["weight_decay"] for g in configure(model).param_groups for n in g["names"]}
    assert decay == {n: 0.1 if p.dim() >= 2 else 0.0 for n, p in model.named_parameters()}


def test_adamw_is_fused_on_the_cpu_and_equals_plain_adamw():
    model = gpt()
    plain = copy.deepcopy(model)
    fused = configure(model)
    assert type(fused) is AdamW and all(g["fused"] for g in fused.param_groups)
    reference = torch.optim.AdamW(
        [dict(params=[p for p in plain.parameters() if p.dim() >= 2], weight_decay=0.1),
         dict(params=[p for p in plain.parameters() if p.dim() < 2], weight_decay=0.0)],
        lr=1e-3, betas=(0.9, 0.95), eps=1e-8, fused=False, foreach=False)
    for seed in range(3):
        for m, optimizer in ((model, fused), (plain, reference)):
            set_gradients(m, seed)
            optimizer.step()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=name)


def test_lr_groups_scale_set_and_freeze():
    model = gpt()
    lr_groups = {"wte": 3.0, "mlp": {"learning_rate": 0.5}, "ln_*": 0}
    groups = {n: g for g in configure(model, lr_groups=lr_groups).param_groups
              for n in g["names"]}
    assert groups["wte.weight"]["lr"] == pytest.approx(3e-3)
    assert groups["h.0.mlp.up.weight"]["initial_lr"] == 0.5
    assert groups["h.0.attn.q.weight"]["lr"] == 1e-3
    assert not any("ln_" in n for n in groups) and not model.h[0].ln_1.weight.requires_grad


@pytest.mark.parametrize("lr_groups", [
    {"nothing": 1.0}, {"wte": -1.0}, {"wte": {"rate": 1.0}},
    {"wte": {"learning_rate": 1.0, "lr_mult": 0.5}}])
def test_a_wrong_lr_group_is_refused_by_name(lr_groups):
    with pytest.raises(ValueError, match=f"lr_groups.*{next(iter(lr_groups))}"):
        configure(gpt(), lr_groups=lr_groups)


@pytest.mark.parametrize("name, options", [
    ("SGD", dict(momentum=0.9, nesterov=True)), ("RMSprop", dict(eps=1e-3, alpha=0.5)),
    ("NAdam", dict(betas=[0.5, 0.6], eps=1e-3, decoupled_weight_decay=False))])
def test_an_optimizer_of_torch_has_the_options_of_its_constructor(
        name, options, data_dir, tmp_path, monkeypatch):
    """The groups have decay and rates only: no betas, eps and fused of AdamW."""
    def build(model, c, log):
        groups = group_parameters(model, c.weight_decay, c.learning_rate, None, {"wte": 2.0}, log)
        return getattr(torch.optim, name)(groups, c.learning_rate, **options)
    monkeypatch.setattr("train.setup.build_optimizer", build)
    train(load_config(None, TINY | dict(data_dir=str(data_dir), out_dir=str(tmp_path),
                                        max_iters=2, eval_interval=0, weight_decay=0.2)))
    groups = load_checkpoint(str(tmp_path / "ckpt.pt"))["optimizer"]["param_groups"]
    assert {(g["initial_lr"], g["weight_decay"]) for g in groups} == {
        (0.01, 0.2), (0.01, 0.0), (0.02, 0.2)}
    default = getattr(torch.optim, name)([nn.Parameter(torch.zeros(1))]).param_groups[0] | options
    del default["params"], default["lr"], default["weight_decay"]
    for group in groups:
        assert {key: group[key] for key in default} == default


# --- Muon

@pytest.mark.parametrize("shape", [(32, 32), (128, 32), (32, 128)])
def test_the_update_is_orthogonal(shape):
    """All singular values of an update are near 1, from a matrix whose own span a factor of 100."""
    u, _, vt = torch.linalg.svd(torch.randn(2, *shape), full_matrices=False)
    g = u @ torch.diag(torch.logspace(0, -2, 32)) @ vt
    s = torch.linalg.svdvals(orthogonalize(g).float())
    assert 0.5 < s.min() and s.max() < 1.3
    away = orthogonalize(g).float() - u @ vt  # and it is the nearest one: same singular vectors
    assert torch.linalg.matrix_norm(away, 2).max() < 0.5


def test_a_batch_of_shapes_equals_one_by_one():
    """Wide, tall and square matrices in one group, stepped together or each on its own."""
    shapes = [(16, 16), (16, 48), (48, 16), (48, 16), (16, 16)]
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(s, generator=generator) for s in shapes]
    gradients = [torch.randn(s, generator=generator) for s in shapes]

    def step(indices):
        params = [nn.Parameter(start[i].clone()) for i in indices]
        optimizer = Muon([dict(MUON, params=params, muon=True)], lr=1e-3)
        for _ in range(2):
            for i, p in zip(indices, params, strict=True):
                p.grad = gradients[i].clone()
            optimizer.step()
        return [p.detach() for p in params]
    together = step(range(len(shapes)))
    stacked = nn.Parameter(torch.stack(start[2:4]))  # two matrices in one parameter
    optimizer = Muon([dict(MUON, params=[stacked], muon=True)], lr=1e-3)
    for _ in range(2):
        stacked.grad = torch.stack(gradients[2:4])
        optimizer.step()
    torch.testing.assert_close(stacked.detach(), torch.stack(together[2:4]), atol=2e-3, rtol=0)
    for i, p in enumerate(together):
        torch.testing.assert_close(p, step([i])[0], atol=2e-3, rtol=0)  # bfloat16 inside
        assert (p - start[i]).abs().max() > 0.01


def test_the_first_step_by_hand():
    w, g = torch.randn(64, 16), torch.randn(64, 16)
    p = nn.Parameter(w.clone())
    p.grad = g.clone()
    Muon([dict(MUON, params=[p], muon=True)], lr=1e-3).step()
    update = orthogonalize((0.1 * g + 0.9 * (0.1 * 0.1 * g))[None])[0].float()  # any scale of g
    expected = w * (1 - 0.02 * 0.1) - 0.02 * 2.0 * update  # sqrt(64 / 16) = 2
    torch.testing.assert_close(p.detach(), expected, atol=1e-3, rtol=0)


def test_muon_takes_the_block_matrices_and_adamw_equals_torch_on_the_rest():
    model, lines = gpt(tie_weights=False), []
    plain = copy.deepcopy(model)
    optimizer = configure(model, MUON, log=lines.append)
    muon = {n for g in optimizer.param_groups if g["muon"] for n in g["names"]}
    assert muon == {f"h.{i}.{part}.weight" for i in range(2) for part in (
        "attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")}
    assert any(line.startswith("Muon: 14 tensors") for line in lines)
    assert sum(line.startswith("Peak learning rates: ") for line in lines) == 1
    reference = configure(plain)
    for seed in range(3):
        for m, o in ((model, optimizer), (plain, reference)):
            set_gradients(m, seed)
            o.step()
    for name, p in model.named_parameters():
        same = torch.equal(p, plain.get_parameter(name))
        assert same != (name in muon), name


class Relative(torch.optim.SGD):
    """Divides by the learning rate: NaN at a rate of 0."""

    @torch.no_grad()
    def step(self):
        super().step()
        for group in self.param_groups:
            rate = torch.tensor(group["lr"])
            for p in group["params"]:
                p.mul_(rate / rate)


def test_the_check_of_an_optimizer_restores_the_parameters():
    model = gpt()
    names, params = zip(*model.named_parameters())
    optimizer = Relative([dict(params=params, names=names)], 0.1, momentum=0.9)
    set_gradients(model)
    optimizer.step()
    before = {name: p.clone() for name, p in model.named_parameters()}
    state = copy.deepcopy(optimizer_state(optimizer)["state"])
    check_state(optimizer, Ranks())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    restored = optimizer_state(optimizer)["state"]
    assert all(torch.equal(state[name]["momentum_buffer"], restored[name]["momentum_buffer"])
               for name in before)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_state_by_name_goes_on_in_another_optimizer():
    first = gpt()
    optimizer = configure(first, MUON)
    set_gradients(first)
    optimizer.step()
    second = copy.deepcopy(first)
    state = copy.deepcopy(optimizer_state(optimizer)["state"])
    assert set(state) == {n for n, _ in first.named_parameters()}
    assert set(state["h.0.attn.q.weight"]) == {"momentum_buffer"}
    other = configure(second, MUON)
    create_state(other)
    restore_optimizer(other, state, Alone, "a file")
    for m, o in ((first, optimizer), (second, other)):
        set_gradients(m, 1)
        o.step()
    assert all(torch.equal(p, second.get_parameter(n)) for n, p in first.named_parameters())
