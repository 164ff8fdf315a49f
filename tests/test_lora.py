"""LoRA: adapters on a frozen backbone, alone in their checkpoint, merged into a plain model."""

import json
import os

import pytest
import torch
from conftest import TINY
from processes import python
from runs import WAYS, Program, assert_same, assert_two_ranks_equal_one

from data.prepare import chat as data_chat
from model import chat
from model.convert import main
from model.core.adapters import LoRALinear, initial_adapter, merge
from model.core.weights import digest
from model.dpo import PreferenceGPT
from model.gpt import GPTConfig
from model.lora import build_model, open_data
from model.sample import load_model
from train.checkpoint import load_checkpoint, save_checkpoint
from train.config import load_config
from train.distributed import Ranks
from train.tools.dry_run import state_memory
from train.train import train

SHAPE = dict(n_layer=2, n_head=2, n_embd=64, n_hidden=128, block_size=32, bias=True)
RUN = {k: v for k, v in TINY.items() if k not in ("n_layer", "n_head", "n_embd", "n_hidden",
                                                   "block_size")}


@pytest.fixture(scope="module")
def base(data_dir, tmp_path_factory):
    """A trained checkpoint to stand on."""
    out = tmp_path_factory.mktemp("base")
    train(load_config(None, RUN | SHAPE | dict(data_dir=str(data_dir), out_dir=str(out), seed=1,
                                               tokenizer="byte", max_iters=40)))
    return out / "ckpt.pt"


def settings(data_dir, base, out, **changes):
    return RUN | dict(model="lora", backbone=str(base), data_dir=str(data_dir), out_dir=str(out),
                      tokenizer="byte", lora_rank=2, lora_alpha=4.0, max_iters=6,
                      eval_interval=3) | changes


def go(*args, **changes):
    return train(load_config(None, settings(*args, **changes)))


def test_starts_as_the_base_and_trains_the_adapters_only(data_dir, base, tmp_path):
    whole = RUN | SHAPE | dict(data_dir=str(data_dir), out_dir=str(tmp_path / "base"), max_iters=0,
                               tokenizer="byte", init_from=str(base))
    start = train(load_config(None, whole))["history"][0]
    last = go(data_dir, base, tmp_path / "out", max_iters=20, eval_interval=20)
    assert last["history"][0]["val_loss"] == start["val_loss"]
    assert last["history"][0]["val_bpb"] == start["val_bpb"]
    assert last["history"][-1]["val_loss"] < start["val_loss"] - 0.01

    state, frozen = load_checkpoint(tmp_path / "out" / "ckpt.pt"), load_checkpoint(base)["model"]
    assert all(name.endswith((".lora_A", ".lora_B")) for name in state["model"])
    assert state["optimizer"]["state"].keys() == state["model"].keys()
    size = sum(t.numel() for t in state["model"].values())
    assert 0 < size < 0.05 * sum(t.numel() for t in frozen.values())
    model, _ = load_model(tmp_path / "out" / "ckpt.pt")
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            assert torch.equal(module.base, frozen[f"{name}.weight"])
            assert module.lora_B.abs().max() > 0


def test_the_context_of_a_run_is_kept(data_dir, base, tmp_path):
    """windows of 512 tokens, the default of block_size, on a backbone of 32 -> loaded for sampling,
    the model has the context that was trained"""
    go(data_dir, base, tmp_path, block_size=512, batch_size=1, gradient_accumulation_steps=1,
       max_iters=1, eval_interval=1)
    model, _ = load_model(tmp_path / "ckpt.pt")
    assert model.config.block_size == 512
    assert model(torch.zeros(1, 512, dtype=torch.int64)).shape[1] == 512


def test_adapters_begin_as_those_of_peft():
    """A is uniform to 1 / sqrt(in), which is kaiming_uniform of a = sqrt 5, and B zero."""
    a = initial_adapter("h.0.attn.q.lora_A", (64, 400), 1)
    reference = torch.empty(64, 400)
    torch.nn.init.kaiming_uniform_(reference, a=5 ** 0.5)
    assert a.abs().max() == pytest.approx(0.05, rel=0.01) and a.abs().max() <= 0.05
    assert a.std().item() == pytest.approx(reference.std().item(), rel=0.03)
    assert not initial_adapter("h.0.attn.q.lora_B", (400, 64), 1).any()


def test_the_weight_under_an_adapter_has_an_initial_value():
    """FSDP asks for all tensors, before the weights of init_from are loaded (dpo, grpo)"""
    model = PreferenceGPT(GPTConfig(**SHAPE, vocab_size=50))
    assert torch.equal(model.initial("h.0.attn.q.base", (64, 64), 1),
                       model.initial("h.0.attn.q.weight", (64, 64), 1))


def test_merged_is_the_same_model(data_dir, base, tmp_path, capsys):
    go(data_dir, base, tmp_path / "out")
    assert main(["--ckpt", str(tmp_path / "out/ckpt.pt"), "--to", str(tmp_path / "m.pt")]) == 0
    assert "m.pt: a gpt model" in capsys.readouterr().out
    plain, tokenizer = load_model(tmp_path / "m.pt")
    adapted, _ = load_model(tmp_path / "out" / "ckpt.pt")
    bare, _ = load_model(base)
    idx = torch.randint(0, 256, (3, 30))
    assert type(plain).__name__ == "GPT" and tokenizer.kind == "byte"
    torch.testing.assert_close(plain(idx), adapted(idx), rtol=0, atol=1e-5)
    assert not torch.allclose(plain(idx), bare(idx), atol=1e-3)
    assert main(["--ckpt", str(tmp_path / "out/ckpt.pt"), "--to", str(tmp_path / "half.pt"),
                 "--save_precision", "bfloat16"]) == 0
    half = load_checkpoint(tmp_path / "half.pt")["model"]
    for name, t in load_checkpoint(tmp_path / "m.pt")["model"].items():
        assert half[name].dtype == torch.bfloat16 and torch.equal(half[name], t.bfloat16())
    text = python("-m", "model.sample", "--ckpt", tmp_path / "half.pt", "--max_new_tokens", "5",
                  "--seed", "1")
    assert text.returncode == 0, text.stderr
    again = RUN | SHAPE | dict(data_dir=str(data_dir), out_dir=str(tmp_path / "more"), max_iters=1,
                               tokenizer="byte", init_from=str(tmp_path / "m.pt"))
    train(load_config(None, again))  # and it is one that training starts from


@pytest.mark.parametrize("whole", [False, True])
def test_gradients_are_those_of_the_sum(whole):
    """Of W + scale B A by autograd; the layer makes no gradient of it. whole: the base trains."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(12, 20).double()
    layer = LoRALinear(linear, 3, 2.0).double().requires_grad_(whole)
    for p in (layer.lora_A, layer.lora_B):
        torch.nn.init.normal_(p.requires_grad_())
    x, up = (torch.randn(2, 5, n, dtype=torch.float64) for n in (12, 20))
    inputs = [x.requires_grad_(), *(p for p in layer.parameters() if p.requires_grad)]
    got = torch.autograd.grad(layer(x), inputs, up)
    y = torch.nn.functional.linear(x, layer.base + 2 * layer.lora_B @ layer.lora_A, layer.bias)
    for a, b in zip(got, torch.autograd.grad(y, inputs, up), strict=True):
        torch.testing.assert_close(a, b)


def test_the_dry_run_counts_weights_as_they_are_kept(data_dir, base, tmp_path):
    """A base in bfloat16; of adapters also their copies. On the meta device, as there, and with
    Muon, which is for other matrices."""
    state = load_checkpoint(base)
    state["model"] = {name: t.bfloat16() for name, t in state["model"].items()}
    save_checkpoint(tmp_path / "half.pt", state)
    config = load_config(None, settings(data_dir, tmp_path / "half.pt", tmp_path, dtype="bfloat16",
                                        optimizer="muon"))
    data = open_data(config, Ranks())
    with torch.device("meta"):
        parts = state_memory(config, build_model(config, data), 1)
    under = 2 * (4 * 64 * 64 + 3 * 64 * 128)  # two layers: attention, SwiGLU
    rest = sum(t.numel() for t in state["model"].values()) - under
    own = 2 * 2 * (4 * (64 + 64) + 3 * (64 + 128))  # of rank 2
    assert parts["weights"] == 2 * under + 2 * rest + 4 * own
    assert parts["gradients"] == 4 * own


@pytest.mark.parametrize("checkpointing", ["true", "selective"])
def test_checkpointed_blocks_give_the_same_adapters(data_dir, base, tmp_path, checkpointing):
    """Nothing that selective checkpointing keeps is written over."""
    found = [go(data_dir, base, tmp_path / name, gradient_checkpointing=name, max_iters=2,
                eval_interval=0) and load_checkpoint(tmp_path / name / "ckpt.pt")["model"]
             for name in ("false", checkpointing)]
    for name, t in found[0].items():
        torch.testing.assert_close(t, found[1][name], rtol=1e-6, atol=1e-9)


def test_adapters_are_not_rounded_off_by_bfloat16_weights():
    """What they add, a thousandth of the weights, would be gone in a sum of that precision."""
    layer = LoRALinear(torch.nn.Linear(2, 3, bias=False), 1, 2.0).requires_grad_(False)
    layer.base = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16), requires_grad=False)
    layer.lora_A.copy_(torch.tensor([[0.5, 0.25]]))
    layer.lora_B.copy_(torch.tensor([[0.001], [0.002], [-0.004]]))
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.tensor([[1.0, -1.0]]))
    torch.testing.assert_close(y.float(), 0.5 * layer.lora_B.T, rtol=1e-2, atol=0)


def test_a_bias_in_bfloat16_is_added():
    """Of a published model with biases, computed in float32."""
    linear = torch.nn.Linear(4, 3).bfloat16()
    layer = LoRALinear(linear, 1, 2.0).requires_grad_(False)
    torch.nn.init.zeros_(layer.lora_A), torch.nn.init.zeros_(layer.lora_B)
    x = torch.randn(2, 4)
    torch.testing.assert_close(layer(x), x @ linear.weight.float().T + linear.bias.float())


def test_adapters_are_the_difference(data_dir, base, tmp_path):
    """Names, A, B, r and alpha give the merged weights."""
    go(data_dir, base, tmp_path / "out", lora_targets=["q", "h.1.mlp.up"])
    model, _ = load_model(tmp_path / "out" / "ckpt.pt")
    found = {name: (m.lora_A.detach(), m.lora_B.detach())
             for name, m in model.named_modules() if isinstance(m, LoRALinear)}
    merged, frozen = merge(model), load_checkpoint(base)["model"]
    assert list(found) == ["h.0.attn.q", "h.1.attn.q", "h.1.mlp.up"]
    assert merged.keys() == frozen.keys()
    for name, t in merged.items():
        layer = name.removesuffix(".weight")
        if layer in found:
            a, b = found[layer]
            assert a.shape[0] == b.shape[1] == 2
            torch.testing.assert_close(t, frozen[name] + model.get_submodule(layer).scale * b @ a)
        else:
            assert torch.equal(t, frozen[name])


def test_on_chats(base, tmp_path):
    """The same adapters on rows of chats, stopped by val_exact; merged, a model that talks."""
    source = tmp_path / "chats.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"say {i}", "response": "moo"}) + "\n"
                              for i in range(200)))
    assert data_chat.main([str(source), "--out", str(tmp_path / "chats"), "--tokenizer", str(base),
                           "--block_size", "60"]) == 0
    last = go(tmp_path / "chats", base, tmp_path / "out", max_iters=400, eval_interval=20,
              block_size=60, lora_rank=8, learning_rate=1.5e-2, early_stopping_metric="val_exact",
              early_stopping_mode="max", early_stopping_patience=2)
    assert last["history"][-1]["val_exact"] == 1 and "no better val_exact" in last["finished"]
    assert main(["--ckpt", str(tmp_path / "out/ckpt.pt"), "--to", str(tmp_path / "m.pt")]) == 0
    for path in (tmp_path / "m.pt", tmp_path / "out" / "ckpt.pt"):
        model, tokenizer = load_model(path)
        asked = model.template.prompt_ids([("user", "say 77")], tokenizer)
        said = chat.generate_answer(model, tokenizer, asked, 9)
        assert tokenizer.decode(said) == "moo"
    assert load_checkpoint(tmp_path / "m.pt")["config"]["model"] == "chat"


def test_own_rates(data_dir, base, tmp_path):
    go(data_dir, base, tmp_path / "out", lr_groups={"lora_B": 16.0, "h.0": 0.0})
    groups = load_checkpoint(tmp_path / "out" / "ckpt.pt")["optimizer"]["param_groups"]
    rates = {name: group["initial_lr"] for group in groups for name in group["params"]}
    assert rates["h.1.attn.q.lora_B"] == pytest.approx(16 * rates["h.1.attn.q.lora_A"])
    assert not any(name.startswith("h.0") for name in rates)


def test_killed_and_resumed(data_dir, base, tmp_path):
    changes = settings(data_dir, base, tmp_path / "a", max_iters=12, save_interval=3, dropout=0.1,
                       eval_interval=4, vocab_size=None, lr_decay_iters=None)
    changes |= SHAPE  # in the place of Program's own
    train(load_config(None, changes))
    changes |= dict(out_dir=str(tmp_path / "b"))
    killed = Program(**changes, env=dict(FAULT="before_step@8=kill9"))
    assert killed.wait()[0] == -9
    train(load_config(None, changes))
    assert_same(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("how", WAYS)
def test_two_ranks_equal_one(data_dir, base, tmp_path, how):
    changes = settings(data_dir, base, "")
    assert_two_ranks_equal_one(tmp_path, changes, how, val_loss=1e-5)


def test_another_backbone_is_refused(data_dir, base, tmp_path, capsys):
    go(data_dir, base, tmp_path / "out", max_iters=2)
    state = torch.load(base, weights_only=True)
    assert digest(state["model"]) == load_checkpoint(tmp_path / "out/ckpt.pt")["spec"]["backbone"]
    state["model"]["ln_f.weight"][0] += 1
    other = {k: state[k] for k in ("model", "model_args", "config", "tokenizer", "spec")}
    torch.save(other, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="backbone: checkpoint has"):
        go(data_dir, tmp_path / "other.pt", tmp_path / "out", max_iters=4)
    merged = ["--ckpt", str(tmp_path / "out/ckpt.pt"), "--to", str(tmp_path / "m.pt")]
    assert main([*merged, "--backbone", str(tmp_path / "other.pt")]) == 2
    assert "are not those of the training run" in capsys.readouterr().err
    assert main([*merged, "--backbone", str(tmp_path / "gone.pt")]) == 2
    assert "gone.pt: no such file" in capsys.readouterr().err
    os.link(base, tmp_path / "moved.pt")
    assert main([*merged, "--backbone", str(tmp_path / "moved.pt")]) == 0
    os.link(base, tmp_path / "same.pt")
    assert main([*merged[:3], str(tmp_path / "same.pt"), "--backbone", str(tmp_path / "same.pt")
                 ]) == 2  # without it the adapters would be lost
    assert "exists already" in capsys.readouterr().err


def test_adapters_of_another_backbone_or_scale_are_not_adopted(data_dir, base, tmp_path):
    go(data_dir, base, tmp_path / "one", max_iters=1)
    state = torch.load(base, weights_only=True)
    state["model"]["ln_f.weight"][0] += 1
    other = {k: state[k] for k in ("model", "model_args", "config", "tokenizer", "spec")}
    torch.save(other, tmp_path / "other.pt")
    start = dict(init_from=str(tmp_path / "one" / "ckpt.pt"), max_iters=0)
    for backbone, alpha, name in ((tmp_path / "other.pt", 4.0, "backbone"),
                                  (base, 32.0, "lora_alpha")):
        with pytest.raises(ValueError, match=f"(?s){name}: checkpoint has .*--allow_change {name}"):
            go(data_dir, backbone, tmp_path / name, lora_alpha=alpha, **start)
        go(data_dir, backbone, tmp_path / name, lora_alpha=alpha, allow_change=[name], **start)
    go(data_dir, base, tmp_path / "same", **start)
    # A shorter context than the backbone's is inherited, and no key that the user has set.
    go(data_dir, base, tmp_path / "short", max_iters=0, block_size=8)
    start["init_from"] = str(tmp_path / "short" / "ckpt.pt")
    go(data_dir, base, tmp_path / "after", **start)


def test_samples_of_a_run_on_text_continue_the_prompts(data_dir, base, tmp_path):
    go(data_dir, base, tmp_path, max_iters=3, sample_tokens=4, sample_prompts=["line 1"])
    assert (tmp_path / "samples.txt").read_text().startswith("=== iter 3 ===\nline 1")


def test_a_checkpoint_without_all_of_its_adapters_is_refused(data_dir, base, tmp_path):
    go(data_dir, base, tmp_path, max_iters=0)
    state = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    name, _ = state["model"].popitem()
    save_checkpoint(str(tmp_path / "part.pt"), state)
    with pytest.raises(ValueError, match=f"missing or unexpected tensors: {name}"):
        load_model(tmp_path / "part.pt")


@pytest.mark.parametrize("changes, message", [
    (dict(backbone="nosuch.pt"), "nosuch.pt: no such file"),
    (dict(lora_targets=["wq"]), "no linear layer matches 'wq'; .* attn.q"),
    (dict(n_embd=48, n_head=2), "n_embd: it has 64, the configuration says 48"),
    (dict(lora_rank=0), "lora_rank: must be at least 1"),
])
def test_bad_settings(data_dir, base, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        go(data_dir, base, tmp_path / "out", **changes)


def test_a_backbone_that_knows_fewer_ids_than_the_data_is_refused(data_dir, base, tmp_path):
    state = torch.load(base, weights_only=True)
    small = {k: state[k] for k in ("model", "config", "tokenizer", "spec")}
    small["model"]["wte.weight"] = small["model"]["wte.weight"][:100]
    torch.save(small | dict(model_args=state["model_args"] | dict(vocab_size=100)),
               tmp_path / "small.pt")
    message = r"small.pt: its vocabulary has 100 ids, the data in .* have 25\d"
    with pytest.raises(ValueError, match=message):
        go(data_dir, tmp_path / "small.pt", tmp_path / "out")


def test_adapters_are_no_backbone(data_dir, base, tmp_path, monkeypatch):
    """Merged by the command of the message, they are one."""
    last = go(data_dir, base, tmp_path / "out", max_iters=1)
    message = "a checkpoint of --model lora; expected a gpt or chat"
    with pytest.raises(ValueError, match=message) as refused:
        go(data_dir, tmp_path / "out" / "ckpt.pt", tmp_path / "two")
    monkeypatch.chdir(tmp_path)
    command = str(refused.value).split("python -m model.convert ")[1]
    assert main(command.split()) == 0
    again = go(data_dir, "gpt.safetensors", tmp_path / "two", max_iters=0)
    assert again["history"][0]["val_loss"] == pytest.approx(last["history"][-1]["val_loss"])
    weights = torch.load(base, weights_only=True)["model"]
    torch.save(dict(model=weights, model_args={}), tmp_path / "bare.pt")  # of another program
    message = "a checkpoint of --model gpt; expected a gpt or chat model with its model_args"
    with pytest.raises(ValueError, match=message):
        go(data_dir, tmp_path / "bare.pt", tmp_path / "three")
