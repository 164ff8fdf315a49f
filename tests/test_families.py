"""Models of other families: their logits in and out, with `transformers` as the oracle, and the
systems on top of them."""

import json
import os

import pytest
import torch
from conftest import TINY, run
from runs import metrics
from test_convert import assert_close, export, ids, logits_of, shake

from model import families
from model.chat import ChatGPT
from model.generate import empty_cache, generate
from model.sample import load_model
from train.checkpoint import CheckpointError, load_checkpoint
from train.config import UserError, load_config
from train.keys import TrainConfig, adopt_shape
from train.train import train

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
SIZE = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=300, max_position_embeddings=64,
            pad_token_id=None, bos_token_id=0, eos_token_id=[1, 2], unsloth_fixed=True)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)
MODELS = {  # class of the configuration, and what makes it differ from a Llama 2 and its defaults
    "llama3": ("LlamaConfig", dict(rope_scaling=LLAMA3, tie_word_embeddings=True)),
    "llama-heads": ("LlamaConfig", dict(head_dim=24)),
    "qwen2": ("Qwen2Config", dict(tie_word_embeddings=True)),
    "qwen2-windows": ("Qwen2Config", dict(use_sliding_window=True, sliding_window=5,
                                          max_window_layers=2)),
    "qwen3": ("Qwen3Config", dict(head_dim=16, tie_word_embeddings=True)),
    "qwen3-trained-norms": ("Qwen3Config", dict(head_dim=8)),
    "mistral": ("MistralConfig", dict(sliding_window=None, head_dim=12)),
    "mistral-window": ("MistralConfig", dict(sliding_window=5)),
    "gemma3": ("Gemma3TextConfig", dict(
        num_hidden_layers=7, head_dim=16, sliding_window=5, query_pre_attn_scalar=24,
        rope_scaling=dict(rope_type="linear", factor=4.0))),
    "olmo2": ("Olmo2Config", {}),
    "smollm3": ("SmolLM3Config", {})}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A function: the folder of one of MODELS, and the model of `transformers` in it."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    parent, made = tmp_path_factory.mktemp("families"), {}

    def folder(name):
        if name not in made:
            kind, changes = MODELS[name]
            config = getattr(transformers, kind)(**SIZE | changes)
            torch.manual_seed(5)
            model = shake(transformers.AutoModelForCausalLM.from_config(config))
            model.save_pretrained(parent / name)
            made[name] = str(parent / name), model
        return made[name]
    folder.load = transformers.AutoModelForCausalLM.from_pretrained
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_its_logits_come_in_and_go_out(folders, tmp_path, name):
    path, theirs = folders(name)
    model, idx = load_model(path)[0], ids(T=40)
    assert model.config.family
    wanted = logits_of(theirs, idx)
    assert_close(logits_of(model, idx), wanted)
    assert_close(logits_of(folders.load(export(path, tmp_path / "out")), idx), wanted)
    for file in ("config.json", "generation_config.json"):  # where its answers end
        assert json.loads((tmp_path / "out" / file).read_text())["eos_token_id"] == [1, 2]


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_texts_are_written_token_by_token(folders, name):
    """A prompt in two pieces, then tokens, of rows that become unequally long: the logits are those
    of the whole text."""
    model, idx = load_model(folders(name)[0])[0], ids(T=20)
    wanted, cache = logits_of(model, idx), empty_cache(model, 3)
    pieces = [model(idx[:, :7], cache=cache), model(idx[:, 7:12], cache=cache)]
    pieces += [model(idx[:, i:i + 1], cache=cache) for i in range(12, 15)]
    assert_close(torch.cat(pieces, 1), wanted[:, :15])
    cache[2:3].clear()
    model(idx[2:3, :9], cache=cache[2:3])  # this text is shorter than the others now
    for i in range(5):
        step = torch.stack((idx[0, 15 + i], idx[1, 15 + i], idx[2, 9 + i]))[:, None]
        there = torch.stack((wanted[0, 15 + i], wanted[1, 15 + i], wanted[2, 9 + i]))[:, None]
        assert_close(model(step, cache=cache), there)


def test_greedy_text_is_that_of_transformers_past_the_window(folders):
    for name in ("gemma3", "mistral-window", "qwen3"):
        path, theirs = folders(name)
        idx = ids(rows=1, T=4)
        wanted = theirs.generate(idx, max_new_tokens=30, do_sample=False, eos_token_id=None,
                                 pad_token_id=0)
        assert torch.equal(generate(load_model(path)[0], idx, 30, temperature=0), wanted), name


def test_a_full_context_begins_again(folders):
    model = load_model(folders("qwen2")[0])[0]
    assert generate(model, ids(rows=1, T=60), 20, temperature=0).shape == (1, 80)


@pytest.mark.parametrize("name", ["gemma3", "qwen2-windows", "olmo2"])
@torch.no_grad()
def test_chats_in_one_row_are_as_alone(folders, name):
    """Windows and masks of chats together: the mean over a row of two is that of each alone."""
    plain = load_model(folders(name)[0])[0]
    model = ChatGPT(plain.config)
    model.load_state_dict(plain.state_dict())
    tokens, lengths, losses = ids(rows=1, T=31), (14, 16), []
    mask, chat = torch.zeros_like(tokens), torch.zeros_like(tokens)
    mask[0, 5:14] = mask[0, 20:30] = 1
    chat[0, 14:] = 1
    for start, n in zip((0, 14), lengths):
        alone = slice(start, start + n)
        losses.append(model.eval()(tokens[:, alone], mask[:, alone], chat[:, alone]))
    together, sums = model(tokens, mask, chat)
    total = sum(float(loss * s["count"]) for loss, s in losses)
    assert float(sums["count"]) == 19 == sum(float(s["count"]) for _, s in losses)
    assert float(together) * 19 == pytest.approx(total, rel=1e-5)


def rest(**changes):
    shape = {"n_layer", "n_head", "n_embd", "n_hidden", "block_size"}
    return {k: v for k, v in TINY.items() if k not in shape} | dict(
        tokenizer="byte", block_size=32) | changes


def test_lora_is_trained_and_leaves_as_that_family(folders, data_dir, tmp_path):
    """Adapters on a Gemma and on a Qwen, merged: `transformers` computes our logits."""
    for name in ("gemma3", "qwen3"):
        out = tmp_path / name
        last = train(load_config(None, rest(
            model="lora", backbone=folders(name)[0], data_dir=str(data_dir), out_dir=str(out),
            lora_rank=4, eval_interval=10, max_iters=20)))
        assert last["history"][-1]["val_loss"] < last["history"][0]["val_loss"] - 0.02
        merged = folders.load(export(out / "ckpt.pt", out / "hf"))
        idx = ids(vocab_size=256)
        assert_close(logits_of(merged, idx), logits_of(load_model(out / "ckpt.pt")[0], idx))
        assert not torch.equal(logits_of(merged, idx), logits_of(folders(name)[1], idx))


def test_a_context_that_is_typed_is_kept_though_it_is_the_default(folders):
    """Theirs is often too long to train with."""
    found = vars(load_model(folders("qwen2")[0])[0].config) | dict(block_size=4096)
    for typed, taken in ((["block_size=512"], False), ([], True)):
        config = load_config(None, ["init_from=x", *typed])
        assert ("block_size" in adopt_shape(config, found)[0]) is taken
    for config in (load_config(None, ["n_layer=16"]), TrainConfig(n_layer=3)):
        taken, wrong = adopt_shape(config, found)
        assert "n_layer" not in taken and wrong[0].startswith("n_layer: it has 4, the config")


def test_all_of_it_is_trained_on_two_ranks_as_on_one(folders, data_dir, tmp_path):
    """FSDP fills each shard with the family's weights; the checkpoint keeps the family."""
    path = folders("gemma3")[0]
    keys = [f"--{k}={v}" for k, v in rest(init_from=path, max_iters=6, eval_interval=3).items()]
    one, two = tmp_path / "one", tmp_path / "two"
    for out, ranks, more in ((one, 1, ()), (two, 2, ("--distributed=fsdp",))):
        code, text = run(*keys, f"--data_dir={data_dir}", f"--out_dir={out}", *more, ranks=ranks)
        assert code == 0, text
    losses = [[m["loss"] for m in metrics(out) if "loss" in m] for out in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and len(losses[0]) == 6
    family = json.loads(load_checkpoint(two / "ckpt.pt")["model_args"]["family"])
    assert family["model_type"] == "gemma3_text" and family["eos_token_id"] == [1, 2]


@pytest.mark.parametrize("name, change, named", [
    ("llama3", dict(rope_scaling=dict(rope_type="yarn", factor=4.0)), "yarn"),
    ("llama3", dict(mlp_bias=True), "mlp_bias: True"),
    ("qwen2", dict(hidden_act="gelu"), "hidden_act: 'gelu'"),
    ("qwen2", dict(layer_types=["chunked_attention"] * 4), "chunked_attention"),
    ("qwen3", dict(attention_bias=True), "attention_bias: True"),
    ("mistral", dict(temperature_tuning=4), "temperature_tuning: 4"),
    ("gemma3", dict(final_logit_softcapping=30.0), "final_logit_softcapping: 30.0"),
    ("gemma3", dict(use_bidirectional_attention=True), "use_bidirectional_attention: True"),
    ("olmo2", dict(head_dim=7), "head_dim: 7"),
    ("smollm3", dict(no_rope_layers=[1, 0]), "no_rope_layers"),
    ("smollm3", dict(model_type="gemma4"), "model_type 'gemma4'")])
def test_what_is_not_known_is_refused_by_name(folders, tmp_path, name, change, named):
    with open(os.path.join(folders(name)[0], "config.json")) as f:
        theirs = json.load(f)
    if "rope_scaling" in change:
        theirs.pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(json.dumps(theirs | change))
    os.symlink(os.path.join(folders(name)[0], "model.safetensors"), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=named):
        load_model(tmp_path)


def test_long_waves_are_stretched_and_short_ones_are_not():
    """Llama 3's frequencies, wave by wave."""
    rope = (10000.0, 8.0, 1.0, 4.0, 32)
    plain, found = 10000.0 ** -(torch.arange(0, 24, 2) / 24), families.frequencies(rope, 24, "cpu")
    for before, after in zip(plain.tolist(), found.tolist()):
        wave = 2 * torch.pi / before
        if wave < 32 / 4:
            wanted = before
        elif wave > 32 / 1:
            wanted = before / 8
        else:
            smooth = (32 / wave - 1) / (4 - 1)
            wanted = (1 - smooth) * before / 8 + smooth * before
        assert after == pytest.approx(wanted, rel=1e-6)


def test_norms_of_16_bits_keep_them_all(folders, tmp_path):
    """Gemma's are kept less 1: with it they have more bits than the file's type."""
    folders.load(folders("gemma3")[0], dtype=torch.bfloat16).save_pretrained(tmp_path)
    theirs = folders.load(tmp_path, dtype=torch.float32)
    ours = load_model(tmp_path, dtype=torch.float32)[0]
    assert_close(logits_of(ours, ids()), logits_of(theirs, ids()))


@pytest.mark.parametrize("family, named", [
    ("{}", "model_type None"), ("[]", "model_type None"), ("qwen", "JSONDecodeError"),
    (json.dumps(SIZE | dict(model_type="qwen2")), "has 4 layers, n_layer is 2")])
def test_a_family_that_was_typed_wrongly_is_refused(tmp_path, data_dir, family, named):
    config = load_config(None, TINY | dict(family=family, data_dir=str(data_dir),
                                           out_dir=str(tmp_path / "out")))
    with pytest.raises(UserError, match=named):
        train(config)
