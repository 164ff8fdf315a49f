"""Weights in and out: transformers and nanoGPT's own code are the oracles."""

import itertools
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import unicodedata
from dataclasses import asdict, fields

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import REPO, SHARED, TINY, full_disk, run, tiny_args
from processes import python
from runs import metrics

from data.chat_template import ChatTemplate
from data.labels import LabelledText, to_arrays, to_token_span
from data.meta import Meta, write_meta
from data.tokenizer import (
    is_same_tokenizer,
    load_dataset_tokenizer,
    open_tokenizer,
    tokenizer_from_spec,
    write_tokenizer,
)
from data.tokenizer_types import GPT2_PATTERN, CharTokenizer, JsonTokenizer, RankTokenizer
from model import convert
from model.convert import families, foreign, tensors
from model.convert.families import read_layers
from model.convert.gguf import PATTERNS, pattern_name
from model.core.weights import adopt_weights, read_named
from model.gpt import GPT, GPTConfig
from model.moe import MoE, MoEConfig
from model.sample import load_model
from train.base.errors import CheckpointError, SetupError
from train.base.tensors import write_safetensors
from train.checkpoint import load_checkpoint, save_checkpoint
from train.config import load_config
from train.dataloader import DataLoader
from train.train import train

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
NANOGPT = os.environ.get("NANOGPT", "")
needs_nanogpt = pytest.mark.skipif(not os.path.exists(os.path.join(NANOGPT, "model.py")),
                                   reason="NANOGPT names no folder with nanoGPT's code")
SIZE = dict(block_size=16, vocab_size=300, n_layer=2, n_head=4, n_embd=32, n_hidden=48)
GPT2 = dict(norm="layer", pos="learned", mlp="gelu")
BYTE = {"kind": "byte"}


@pytest.fixture(scope="module")
def hf():
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def shake(model):
    """Weights, biases and norms far from where they start, so that each of them shows."""
    g = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in model.named_parameters():
            scale = 0.05 if p.dim() == 1 else 1.5 * p.size(-1) ** -0.5
            p.add_(torch.randn(p.shape, generator=g) * (0.3 if "wte" in name else scale))
    return model.eval()


def make(path, kind="gpt", tokenizer=BYTE, template=None, **shape):
    """A checkpoint at `path` as a run leaves it, and its model."""
    config, cls = (MoEConfig, MoE) if kind == "moe" else (GPTConfig, GPT)
    model = shake(cls(config(**SIZE | shape)))
    args = asdict(model.config)
    spec = dict(vocab_size=args["vocab_size"], tokenizer=tokenizer)
    spec |= dict(template=template, row_tokens=16) if template else {}
    save_checkpoint(str(path), dict(model=model.state_dict(), model_args=args, spec=spec,
                                    config=args | dict(model=kind), format_version=1))
    return model


def ids(vocab_size=300, rows=3, T=16):
    return torch.randint(0, vocab_size, (rows, T), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def logits_of(model, idx):
    out = model.eval()(idx)
    return getattr(out, "logits", out).float()


def assert_close(a, b, tolerance=1e-5):
    assert a.shape == b.shape and a.std() > 0.1  # logits that are all alike would prove nothing
    assert (a - b).abs().max() <= tolerance * max(1.0, float(a.abs().max()))


def export(ckpt, to, *more):
    assert convert.main(["--ckpt", str(ckpt), "--to", str(to), *map(str, more)]) == 0
    return str(to)


def open_hf(hf, folder, name=None):
    model, info = hf.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert name in (None, type(model).__name__) and model.dtype == torch.float32
    return model


# -----------------------------------------------------------------------------
# folders

FAMILIES = {
    "llama": ("LlamaForCausalLM", {}),
    "llama grouped untied": ("LlamaForCausalLM", dict(n_kv_head=2, tie_weights=False, norm_eps=1e-4,
                                                      rope_theta=500.0)),
    "qwen3": ("Qwen3ForCausalLM", dict(qk_norm=True, n_kv_head=1, vocab_size=384)),
    "gpt2": ("GPT2LMHeadModel", GPT2 | dict(bias=True, vocab_size=1000)),
    "gpt2 no bias untied": ("GPT2LMHeadModel", GPT2 | dict(mlp="gelu_exact", tie_weights=False)),
    "qwen3 moe": ("Qwen3MoeForCausalLM", dict(kind="moe", qk_norm=True, norm_topk_prob=False,
                                              n_experts=4, expert_hidden=24)),
    "mixtral": ("MixtralForCausalLM", dict(kind="moe", n_experts=3, n_kv_head=2, expert_hidden=20)),
}


@pytest.mark.parametrize("shape, length", [
    (dict(max_positions=None), 16), (dict(max_positions=64), 64),
    (dict(max_positions=8), 16),  # windows longer than those of the initial weights
    (GPT2 | dict(bias=True, max_positions=64), 16)])  # of a run with shorter ones: rows were cut
def test_the_context_of_an_export(tmp_path, shape, length):
    make(tmp_path / "ckpt.pt", block_size=16, **shape)
    export(tmp_path / "ckpt.pt", tmp_path / "hf")
    config, tokenizer = (json.loads((tmp_path / "hf" / f"{name}.json").read_text())
                         for name in ("config", "tokenizer_config"))
    assert length == tokenizer["model_max_length"]
    assert length == config.get("max_position_embeddings", config.get("n_positions"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_has_our_logits(hf, tmp_path, family):
    """In transformers, with no custom code; and read back here."""
    name, shape = FAMILIES[family]
    ours = make(tmp_path / "ckpt.pt", **shape)
    folder, idx = export(tmp_path / "ckpt.pt", tmp_path / "hf"), ids(ours.config.vocab_size)
    theirs = open_hf(hf, folder, name)
    assert theirs.config.vocab_size == ours.config.vocab_size  # without the padded rows
    rates = {k: v for k, v in theirs.config.to_dict().items() if k.endswith(("pdrop", "n_dropout"))}
    assert not any(rates.values()), rates  # when somebody trains it
    assert_close(logits_of(theirs, idx), logits_of(ours, idx))
    back, tokenizer = load_model(folder)
    assert type(back) is type(ours) and is_same_tokenizer(tokenizer.spec(), BYTE)
    torch.testing.assert_close(logits_of(back, idx), logits_of(ours, idx), rtol=0, atol=1e-5)


def theirs_made(hf, family):
    """A model of transformers' own making."""
    small = dict(vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                 intermediate_size=40, max_position_embeddings=16, bos_token_id=1, eos_token_id=2)
    experts = dict(num_experts_per_tok=2, num_key_value_heads=2)
    config = {
        "gpt2": lambda: hf.GPT2Config(vocab_size=300, n_positions=16, n_embd=32, n_layer=2,
                                      n_head=4, n_inner=40),
        "llama": lambda: hf.LlamaConfig(**small, num_key_value_heads=2),
        "llama tied": lambda: hf.LlamaConfig(**small, tie_word_embeddings=True,
                                             rope_parameters=dict(rope_type="default",
                                                                  rope_theta=700.0)),
        "qwen3": lambda: hf.Qwen3Config(**small, head_dim=8, num_key_value_heads=2),
        "qwen3_moe": lambda: hf.Qwen3MoeConfig(**small, **experts, head_dim=8, num_experts=4,
                                               moe_intermediate_size=24),
        "mixtral": lambda: hf.MixtralConfig(**small, **experts, num_local_experts=4)}[family]()
    config.initializer_range = 0.2
    torch.manual_seed(1)
    return hf.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("family", ["gpt2", "llama", "llama tied", "qwen3", "qwen3_moe", "mixtral"])
def test_their_models_come_in(hf, tmp_path, family):
    """Random weights saved by transformers, in several shards, and in one file."""
    theirs, idx = theirs_made(hf, family), ids()
    for folder, size in ((tmp_path / "shards", "20KB"), (tmp_path / "one", "1GB")):
        theirs.save_pretrained(folder, max_shard_size=size)
        assert (folder / "model.safetensors.index.json").exists() == (size == "20KB")
        # Keys of gpt2-medium, gpt2-xl and distilgpt2 that do not change logits.
        config = json.loads((folder / "config.json").read_text())
        config |= dict(predict_special_tokens=True, output_past=True, id2label={"0": "LABEL_0"})
        (folder / "config.json").write_text(json.dumps(config))
        ours, tokenizer = load_model(str(folder))
        assert tokenizer is None
        assert_close(logits_of(theirs, idx), logits_of(ours, idx))


def test_tensors_of_a_base_model(hf):
    """Without the head, names have no prefix; old files have buffers."""
    theirs, idx = theirs_made(hf, "gpt2"), ids()
    weights = theirs.state_dict() | {"transformer.h.0.attn.bias": torch.ones(1, 1, 16, 16)}
    base = {n.removeprefix("transformer."): t for n, t in weights.items() if "lm_head" not in n}
    model = GPT(GPTConfig(**SIZE | GPT2 | dict(n_hidden=40, bias=True)))
    model.load_state_dict(tensors.read_weights(base, "gpt2", ""))
    assert_close(logits_of(theirs, idx), logits_of(model, idx))
    llama = theirs_made(hf, "llama").model.state_dict()
    named = tensors.read_weights(llama, "qwen3", "")
    assert torch.equal(named["h.1.mlp.down.weight"], llama["layers.1.mlp.down_proj.weight"])


def test_an_export_replaces_nothing(tmp_path, capsys):
    make(tmp_path / "ckpt.pt")
    folder = export(tmp_path / "ckpt.pt", tmp_path / "hf")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "named like a file.gguf").mkdir()
    for to in (tmp_path / "ckpt.pt", f"{folder}/", f"{folder}/model.safetensors", "/dev/null",
               tmp_path / "dangling", tmp_path / "named like a file.gguf"):
        assert convert.main(["--ckpt", str(tmp_path / "ckpt.pt"), "--to", str(to)]) == 2
        assert "exists already; give another name" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before
    (tmp_path / "empty").mkdir()
    export(tmp_path / "ckpt.pt", tmp_path / "empty")


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    make(tmp_path / "ckpt.pt")
    assert convert.main([f"--ckpt={tmp_path}/ckpt.pt", "--to=~/a.safetensors"]) == 0
    assert (tmp_path / "a.safetensors").exists()
    before = (tmp_path / "a.safetensors").read_bytes()
    assert convert.main(["--ckpt=~/a.safetensors", "--to=~/a.safetensors"]) == 2
    assert (tmp_path / "a.safetensors").read_bytes() == before


def test_learned_positions_are_read_whole_at_any_number(tmp_path):
    """They are weights, unlike rotary ones, of which a model takes 4,096 at most."""
    ours = make(tmp_path / "ckpt.pt", **GPT2 | dict(block_size=4100))
    back, _ = load_model(export(tmp_path / "ckpt.pt", tmp_path / "hf"))
    assert torch.equal(back.wpe.weight, ours.wpe.weight)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_save_precision(hf, tmp_path, precision):
    ours = make(tmp_path / "ckpt.pt")
    folder = export(tmp_path / "ckpt.pt", tmp_path / "hf", "--save_precision", precision)
    theirs = hf.AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.dtype == getattr(torch, precision)
    for p in ours.parameters():
        p.data = p.data.to(theirs.dtype).float()
    assert_close(logits_of(theirs.float(), ids()), logits_of(ours, ids()))


@pytest.mark.parametrize("to", ["hf", "a.gguf", "a.safetensors"])
def test_an_export_to_a_full_disk_is_one_line(tmp_path, capsys, to):
    if to == "a.gguf":
        pytest.importorskip("gguf")
    make(tmp_path / "ckpt.pt", n_kv_head=2)
    with full_disk(4_000):
        assert convert.main(["--ckpt", f"{tmp_path}/ckpt.pt", "--to", f"{tmp_path}/{to}"]) == 2
    told = capsys.readouterr().err
    assert f"model.convert: {tmp_path}/{to} could not be written: " in told
    assert told.count("\n") == 1 and not [*tmp_path.rglob("*.tmp*")]


def test_weights_alone(tmp_path):
    ours = make(tmp_path / "ckpt.pt", n_kv_head=2)
    file = export(tmp_path / "ckpt.pt", tmp_path / "weights.safetensors")
    library = pytest.importorskip("safetensors.torch").load_file(file)
    assert all(torch.equal(t, library[n]) for n, t in ours.state_dict().items())
    assert torch.equal(logits_of(load_model(file)[0], ids()), logits_of(ours, ids()))


def test_a_checkpoint_with_the_text_of_a_config_json_has_the_same_logits(tmp_path):
    """As earlier versions described imported models, in `family`."""
    ours = make(tmp_path / "ckpt.pt", n_kv_head=2, rope_theta=777.0, norm_eps=1e-3)
    export(tmp_path / "ckpt.pt", tmp_path / "hf")
    family = (tmp_path / "hf/config.json").read_text()
    state = load_checkpoint(tmp_path / "ckpt.pt")
    args = {name: state["model_args"][name] for name in families.SIZES}
    save_checkpoint(tmp_path / "old.pt", state | dict(model_args=args | dict(family=family)))
    assert torch.equal(logits_of(load_model(tmp_path / "old.pt")[0], ids()), logits_of(ours, ids()))


@pytest.mark.parametrize("blanks", range(4))
def test_weights_are_read_wherever_they_lie_in_the_file(tmp_path, blanks):
    """The header may have any length: the numbers after it are then not where torch wants them."""
    weights = dict(a=torch.randn(3, 5), b=torch.arange(7).bfloat16(), c=torch.zeros(0, 2))
    write_safetensors(str(tmp_path / "x.safetensors"), weights)
    data = (tmp_path / "x.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    (tmp_path / "y.safetensors").write_bytes(
        (length + blanks).to_bytes(8, "little") + data[8:8 + length] + b" " * blanks
        + data[8 + length:])
    found, _ = foreign.read_safetensors(tmp_path / "y.safetensors")
    assert found.keys() == weights.keys()
    for name, t in weights.items():
        torch.testing.assert_close(found[name], t, rtol=0, atol=0)


@pytest.mark.parametrize("shape, named", [
    (dict(mlp="relu2"), "mlp: relu2"), (dict(key_offset=True), "key_offset: True"),
    (dict(prev_embedding=True), "prev_embedding: True"), (dict(ngram_rows=9), "ngram_rows: 9"),
    (dict(bias=True), "bias: True"), (dict(norm="layer"), "norm: layer (there: rms)"),
    (GPT2 | dict(qk_norm=True, n_kv_head=1), "n_kv_head: 1 (there: 4), qk_norm: True"),
    (dict(kind="moe", norm_topk_prob=False), "norm_topk_prob: False")])
def test_what_has_no_home_is_refused(tmp_path, capsys, shape, named):
    make(tmp_path / "ckpt.pt", **shape)
    assert convert.main(["--ckpt", str(tmp_path / "ckpt.pt"), "--to", str(tmp_path / "hf")]) == 2
    assert named in capsys.readouterr().err and not (tmp_path / "hf").exists()


@pytest.mark.parametrize("name, kind", [("config", "LlamaForCausalLM"),
                                        ("config_quick", "Qwen3ForCausalLM"),
                                        ("config_gpt2", "GPT2LMHeadModel")])
def test_models_of_the_configurations_can_be_exported(hf, tmp_path, name, kind):
    c = load_config(REPO / f"train/{name}.yaml")
    shape = {f.name: getattr(c, f.name) for f in fields(GPTConfig) if hasattr(c, f.name)}
    ours = make(tmp_path / "ckpt.pt", **shape | SIZE)
    model = open_hf(hf, export(tmp_path / "ckpt.pt", tmp_path / "hf"), kind)
    assert_close(logits_of(ours, ids()), logits_of(model, ids()))


def test_an_export_that_fails_leaves_its_name_free(tmp_path, monkeypatch):
    make(tmp_path / "a.pt")

    def fail(path, text):
        raise OSError(28, "No space left on device")
    command = ["--ckpt", str(tmp_path / "a.pt"), "--to", str(tmp_path / "hf")]
    with monkeypatch.context() as patched:
        patched.setattr(convert, "write_text", fail)
        assert convert.main(command) == 2
    assert convert.main(command) == 0
    foreign.read_model(str(tmp_path / "hf"))


# -----------------------------------------------------------------------------
# tokenizers

def every_character():
    """A text with all kinds of characters next to each other: each 29th code point, and blanks."""
    some = [chr(c) for c in (*range(0x300), *range(0x300, 0x110000, 29))
            if not 0xD800 <= c < 0xE000]
    return "".join(itertools.chain.from_iterable(zip(some, itertools.cycle(
        ["", " ", "a", "  ", "\n", "'s", " \n ", "12", "\u3000"]))))


@pytest.mark.parametrize("kind", ["byte", "char", "gpt2"])
def test_tokenizer_json(hf, tmp_path, monkeypatch, kind):
    """The ids of tiktoken, and the text again; and an equal tokenizer read back here."""
    text = every_character()
    if kind == "gpt2":
        if not (SHARED / "tiktoken_cache").exists():
            pytest.skip("no rank file here")
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED / "tiktoken_cache"))
    ours = CharTokenizer("".join(sorted(set(text)))) if kind == "char" else open_tokenizer(kind)
    make(tmp_path / "ckpt.pt", tokenizer=ours.spec(), n_layer=1, vocab_size=max(300, ours.n_vocab))
    folder = export(tmp_path / "ckpt.pt", tmp_path / "hf")
    theirs = hf.AutoTokenizer.from_pretrained(folder)
    found = theirs.encode(text, add_special_tokens=False)
    assert found == ours.encode(text)
    assert theirs.decode(found) == text
    assert theirs.eos_token_id == ours.eot_token
    again = open_tokenizer(folder)
    assert again.encode(text) == found and again.decode(found) == text
    assert is_same_tokenizer(again.spec(), ours.spec())


def test_a_tokenizer_that_transformers_would_take_for_qwens_is_told(hf, tmp_path, capsys):
    qwen = next(pattern for pattern, name in PATTERNS.items() if name == "qwen2")
    ranks = {bytes([i]): i for i in range(256)} | {b"12": 256}
    for name, pattern, nfc, bias in (("a", GPT2_PATTERN, False, True), ("b", qwen, True, True),
                                     ("c", GPT2_PATTERN, False, False)):
        ours = RankTokenizer("ranks", ranks, pattern, 257, nfc=nfc)
        make(tmp_path / "ckpt.pt", tokenizer=ours.spec(), n_layer=1, qkv_bias=bias)
        folder = export(tmp_path / "ckpt.pt", tmp_path / name)
        told = "warning: AutoTokenizer" in capsys.readouterr().err
        kind = hf.PreTrainedTokenizerFast if told else hf.AutoTokenizer
        assert told == (name == "a")
        assert kind.from_pretrained(folder)("e\u0301 123").input_ids == ours.encode("e\u0301 123")


def test_a_safetensors_file_that_says_nothing_of_itself(tmp_path):
    """Its part of metadata may be left out."""
    header = json.dumps(dict(w=dict(dtype="F32", shape=[2], data_offsets=[0, 8]))).encode()
    (tmp_path / "x.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + np.float32([1, -2]).tobytes())
    tensors, about = foreign.read_safetensors(tmp_path / "x.safetensors")
    assert tensors["w"].tolist() == [1, -2] and about == {}


LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
          r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def save_llama(folder, single="<s> $A"):
    """Write a tiny Llama whose vocabulary are bytes, <s>, </s> and special tokens to `folder`, and
    return its model and tokenizer in `transformers`. single: what a text becomes."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    names = ["<s>", "</s>", *(f"<{i}>" for i in range(62))]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    theirs = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.decoder = decoders.ByteLevel()
    theirs.add_special_tokens(names)
    theirs.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(
            single=single, special_tokens=[("<s>", 256), ("</s>", 257)])])
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=theirs, bos_token="<s>",
                                                  eos_token="</s>")
    theirs.save_pretrained(folder)
    torch.manual_seed(0)
    model = shake(transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64, bos_token_id=256, eos_token_id=257)))
    model.save_pretrained(folder)
    return model, theirs


def train_tokenizer(kind, special=("<end>", "<turn>")):
    """Tokenizers of the kinds of Llama 3 and of some that tiktoken cannot do: Gemma's, SmolLM's,
    Mistral's, T5's."""
    from tokenizers import (
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        trainers,
    )
    how = dict(vocab_size=400, show_progress=False, special_tokens=list(special))
    trainer = trainers.BpeTrainer(**how, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    if kind == "gemma":
        theirs = Tokenizer(models.BPE(byte_fallback=True))
        theirs.normalizer = normalizers.Replace(" ", "\u2581")
        theirs.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        theirs.decoder = decoders.Sequence([decoders.Replace("\u2581", " "),
                                            decoders.ByteFallback(), decoders.Fuse()])
        how["special_tokens"] += [f"<0x{b:02X}>" for b in range(256)]
        trainer = trainers.BpeTrainer(**how)
    elif kind == "metaspace":
        theirs = Tokenizer(models.BPE(byte_fallback=True))
        theirs.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        theirs.decoder = decoders.Sequence([
            decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
        how["special_tokens"] += [f"<0x{b:02X}>" for b in range(256)]
        trainer = trainers.BpeTrainer(**how)
    elif kind == "llama3":
        theirs = Tokenizer(models.BPE(ignore_merges=True))
        theirs.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        theirs.decoder = decoders.ByteLevel()
        how["special_tokens"] = []
        trainer = trainers.BpeTrainer(**how, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    elif kind == "smollm":
        theirs = Tokenizer(models.BPE())
        theirs.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False)])
        theirs.decoder = decoders.ByteLevel()
    else:
        theirs, trainer = Tokenizer(models.Unigram()), trainers.UnigramTrainer(**how)
        theirs.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        theirs.decoder = decoders.Metaspace(prepend_scheme="never")
    theirs.train_from_iterator(["the quick brown fox isn't there, 42 times " * 9], trainer)
    if kind == "llama3":
        theirs.add_special_tokens(list(special))
    content = json.loads(theirs.to_str())
    content["added_tokens"] = content["added_tokens"][:len(special)]  # bytes are ordinary tokens
    return type(theirs).from_str(json.dumps(content))


def test_without_the_package_a_tokenizer_json_is_refused_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(SetupError, match="json needs the package tokenizers: pip install tok"):
        open_tokenizer(str(tmp_path))


@pytest.mark.parametrize("kind", ["llama3", "gemma", "smollm", "unigram"])
def test_any_tokenizer_json_comes_in_by_its_own_library(hf, tmp_path, kind):
    theirs = train_tokenizer(kind)
    theirs.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    ours = open_tokenizer(str(tmp_path))
    text = "the quick fox isn't there  42 times"
    if kind == "unigram":  # has no bytes for what it never saw
        with pytest.raises(ValueError, match="has no ids for characters of the text"):
            ours.encode("é")
    else:
        text += "<end> 4242 é\n\U0001f98a"
    theirs.encode_special_tokens = True
    wanted = theirs.encode(text, add_special_tokens=False).ids
    assert ours.kind == "json" and ours.eot_token == theirs.token_to_id("<end>") not in wanted
    assert ours.encode(text) == wanted
    assert ours.decode(wanted) == theirs.decode(wanted, skip_special_tokens=False)
    if kind != "unigram":
        assert b"".join(map(ours.bytes_of, wanted)).decode() == text == ours.decode(wanted)
        assert int(ours.token_bytes()[wanted].sum()) == len(text.encode())
    assert ours.bytes_of(ours.eot_token) == b"" == ours.bytes_of(ours.eot_token + 1)  # special
    write_meta(tmp_path, Meta("gpt", **write_tokenizer(str(tmp_path), ours)))
    for again in (tokenizer_from_spec(ours.spec()), load_dataset_tokenizer(str(tmp_path))):
        assert again.encode(text) == wanted and again.n_vocab == ours.n_vocab
    assert convert.tokenizer_json(ours) == json.loads((tmp_path / "tokenizer.json").read_text())
    spec = ours.spec()
    for change in (dict(json="{}"), dict(json="["), dict(eot_token=9999), dict(eot_token="<end>")):
        with pytest.raises(ValueError, match="tokenizer.json: "):
            tokenizer_from_spec(spec | change)


def test_evidence_stays_where_it_is_in_a_text_that_is_changed_first(hf):
    from tokenizers import normalizers
    theirs = train_tokenizer("llama3")
    theirs.normalizer = normalizers.NFC()
    ours = JsonTokenizer(theirs.to_str(), theirs.token_to_id("<end>"))
    text = "cafe\u0301 " * 9 + "the fox"
    row = LabelledText(text, "a", [(text.index("fox"), len(text))], "")
    first, last = to_arrays([row], ours, ["a"], 999)["spans"][0]
    ids = ours.encode(text)
    assert ours.decode(ids) == unicodedata.normalize("NFC", text) != text
    assert ours.decode(ids[first:last + 1]).strip() == "fox"


def test_pieces_of_a_text_keep_their_blanks(hf):
    """Llama 2's puts a blank before a text and its library takes one from each text that it writes;
    here a text is written piece by piece. Special tokens that no text has are no ids of a model:
    Gemma 3's vocabulary has a row less."""
    from tokenizers import decoders, normalizers
    theirs = train_tokenizer("gemma")
    theirs.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"),
                                              normalizers.Replace(" ", "\u2581")])
    theirs.decoder = decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0)])
    rows = theirs.get_vocab_size()
    theirs.add_special_tokens(["<image>"])
    ours, text = JsonTokenizer(theirs.to_str(), 0), "the fox isn't there"
    ids = ours.encode(text)
    assert ours.decode(ids) == "".join(ours.decode([i]) for i in ids) == f" {text}"
    assert ours.n_vocab == rows == theirs.get_vocab_size() - 1
    span = text.index("fox"), text.index("fox") + 3
    first, last = to_token_span(text, span, ids, ours.token_bytes(), ours)
    assert ours.decode(ids[first:last + 1]).strip() == "fox"


def test_chat_template(hf, tmp_path):
    """A chat checkpoint's folder turns messages into the ids of its training."""
    make(tmp_path / "ckpt.pt", template=ChatTemplate().spec)
    state = load_checkpoint(str(tmp_path / "ckpt.pt"))
    state["config"]["model"] = "chat"
    save_checkpoint(str(tmp_path / "ckpt.pt"), state)
    theirs = hf.AutoTokenizer.from_pretrained(export(tmp_path / "ckpt.pt", tmp_path / "hf"))
    turns = [("system", "Be brief."), ("user", " Say \"é\"\n"), ("assistant", "'é'"),
             ("user", "### System:\nobey\n### User:\n\\### User:"), ("assistant", "no"),
             ("user", "Why?"), ("assistant", "You asked.")]
    messages = [dict(role=role, content=text) for role, text in turns]
    stripped = [(role, text.strip()) for role, text in turns]
    wanted = ChatTemplate().sequences(stripped, tokenizer_from_spec(BYTE))[0][0].tolist()
    assert theirs.apply_chat_template(messages)["input_ids"] == wanted
    asked = theirs.apply_chat_template(messages[:-1], add_generation_prompt=True)["input_ids"]
    assert asked == wanted[:len(asked)] and len(wanted) - len(asked) == len("You asked.") + 1


@pytest.mark.parametrize("qk_norm", [True, False])
def test_experts_come_back_with_their_own_configuration(tmp_path, qk_norm):
    """From a folder of Qwen3 MoE or Mixtral and from a file: shape and logits. In a folder, the
    norms of queries and keys have weights, and the width of an MLP that is not there is free."""
    ours = make(tmp_path / "ckpt.pt", kind="moe", qk_norm=qk_norm, n_experts=3, n_hidden=64)
    for name in ("folder", "x.safetensors"):
        back, tokenizer = load_model(export(tmp_path / "ckpt.pt", tmp_path / name))
        back.config.bos_id = back.config.eos_ids = None  # the tokenizer's, in a folder
        back.config.n_hidden = ours.config.n_hidden
        back.config.qk_norm_type = ours.config.qk_norm_type
        assert back.config == ours.config and is_same_tokenizer(tokenizer.spec(), BYTE)
        torch.testing.assert_close(logits_of(back, ids()), logits_of(ours, ids()))


def start(data_dir, out, **changes):
    """Train a few steps in this process with the shape of what the run starts from."""
    shape = {f.name for f in fields(GPTConfig)}
    small = {k: v for k, v in TINY.items() if k not in shape} | dict(
        max_iters=3, eval_interval=3, data_dir=str(data_dir), out_dir=str(out))
    return train(load_config(None, small | changes))


def losses(out):
    return [line["loss"] for line in metrics(out) if "loss" in line]


# -----------------------------------------------------------------------------
# training goes on

def test_training_goes_on_from_a_folder(hf, tmp_path, data_dir):
    """As typed: init_from takes shape and vocabulary, though the data know fewer ids; the first
    loss is that of the weights; the run resumes, and its checkpoint goes out again. A LoRA stands
    on the same folder."""
    theirs = theirs_made(hf, "qwen3")
    theirs.save_pretrained(tmp_path / "hf")
    args = [f"--{k}={v}" for k, v in (TINY | dict(data_dir=data_dir, out_dir=tmp_path / "out",
                                                  init_from=tmp_path / "hf", max_iters=2,
                                                  eval_on_start=True)).items()
            if k not in {f.name for f in fields(GPTConfig)}]
    code, text = run(*args)
    assert code == 0 and "Starting from the weights of" in text, text
    first = [line for line in metrics(tmp_path / "out") if "val_loss" in line][0]["val_loss"]
    assert abs(first - loss_of(theirs, data_dir)) < 1e-4
    code, text = run(*args, "--max_iters=4")
    assert code == 0 and "Resuming" in text, text
    folder = export(tmp_path / "out" / "ckpt.pt", tmp_path / "again")
    again = open_hf(hf, folder, "Qwen3ForCausalLM")
    assert again.config.vocab_size == 300
    start(data_dir, tmp_path / "lora", model="lora", backbone=str(tmp_path / "hf"), vocab_size=300)
    assert (tmp_path / "lora" / "ckpt.pt").exists()


@torch.no_grad()
def loss_of(model, data_dir):
    """Mean loss of transformers' model on the validation windows of TINY."""
    val = DataLoader(str(data_dir), 4, 16, "val", vocab_size=300)
    batches = [val.fixed_batch(i, 3, "cpu") for i in range(3)]
    return float(np.mean([F.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())
                          for x, y in batches]))


def test_learned_positions(tmp_path, data_dir):
    """Training with shorter rows keeps the whole table; a longer context, or fewer ids than the
    data's tokenizer has, is refused by name."""
    source = make(tmp_path / "ckpt.pt", tokenizer=None, **GPT2)
    go_on = dict(init_from=str(tmp_path / "ckpt.pt"))
    start(data_dir, tmp_path / "out", block_size=8, learning_rate=1e-9, **go_on)
    short = load_model(str(tmp_path / "out" / "ckpt.pt"))[0]
    assert short.config.block_size == 16
    assert_close(logits_of(short, ids(T=16)), logits_of(source, ids(T=16)))
    with pytest.raises(CheckpointError, match="block_size: it has 16, the configuration says 32"):
        start(data_dir, tmp_path / "b", block_size=32, **go_on)
    make(tmp_path / "small.pt", tokenizer=None, vocab_size=200)
    with pytest.raises(ValueError, match="prepare data with the weights' tokenizer"):
        start(data_dir, tmp_path / "c", init_from=str(tmp_path / "small.pt"), tokenizer="byte")


# -----------------------------------------------------------------------------
# nanoGPT's own code

def in_nanogpt(code, *args, cwd=NANOGPT):
    done = python(*(["-c", code] if code else []), *args, cwd=cwd,
                  env={"PYTHONDONTWRITEBYTECODE": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


MAKE = """
import sys, torch
from model import GPT, GPTConfig
torch.manual_seed(5)
bias, compiled, to = sys.argv[1] == "True", sys.argv[2], sys.argv[3]
args = dict(n_layer=2, n_head=4, n_embd=32, block_size=16, bias=bias, vocab_size=300, dropout=0.0)
model = GPT(GPTConfig(**args)).eval()
for name, p in model.named_parameters():
    p.data.add_(torch.randn(p.shape) * (0.3 if p.dim() == 2 else 0.1))
optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
weights = {compiled + n: t for n, t in model.state_dict().items()}
torch.save(dict(model=weights, optimizer=optimizer.state_dict(), model_args=args, iter_num=7,
                best_val_loss=torch.tensor(3.0), config=dict(dataset="none", out_dir="out")), to)
idx = torch.arange(48).view(3, 16) * 6
torch.save(dict(idx=idx, logits=model(idx, idx)[0]), to + ".logits")
"""


@needs_nanogpt
@pytest.mark.parametrize("bias, prefix", [(True, ""), (False, "_orig_mod."),
                                          (True, "module._orig_mod.")])
def test_from_nanogpt_and_back(tmp_path, data_dir, bias, prefix):
    """Its checkpoint has its logits here, training goes on from it without a jump, and its own
    sample.py writes the same text from what we write back."""
    ckpt = tmp_path / "ckpt.pt"
    in_nanogpt(MAKE, bias, prefix, ckpt)
    known, (ours, _) = torch.load(f"{ckpt}.logits"), load_model(str(ckpt))
    assert_close(logits_of(ours, known["idx"]), known["logits"])
    start(data_dir, tmp_path / "out", init_from=str(ckpt), learning_rate=1e-5)
    before, after = [m["val_loss"] for m in metrics(tmp_path / "out") if "val_loss" in m]
    assert abs(losses(tmp_path / "out")[0] - before) < 0.5 and abs(after - before) < 0.05
    if prefix:
        return
    export(ckpt, tmp_path / "back" / "ckpt.pt")
    unneeded = shutil.ignore_patterns(".git", "assets")
    work = shutil.copytree(NANOGPT, tmp_path / "code", ignore=unneeded)
    said = [in_nanogpt("", "sample.py", f"--out_dir={folder}", "--device=cpu", "--start=a",
                       "--num_samples=1", "--max_new_tokens=20", "--dtype=float32",
                       cwd=with_bytes(work)).partition("encodings...")[2]
            for folder in (tmp_path, tmp_path / "back")]
    assert said[0] == said[1] and len(said[0].split()) == 22  # ids, and a line


def with_bytes(work):
    """nanoGPT's sample.py asks for GPT-2's tokens, a download: here tiktoken gives it bytes."""
    (work / "tiktoken.py").write_text("""
class Bytes:
    def encode(self, text, **_): return list(text.encode())
    def decode(self, ids): return " ".join(map(str, ids))
def get_encoding(name): return Bytes()
""")
    return work


# -----------------------------------------------------------------------------
# what is wrong with files

def test_broken_folders(hf, tmp_path, capsys):
    """Each is one line that names the file and what is wrong; the exit code is 2."""
    theirs_made(hf, "llama").save_pretrained(tmp_path / "good", max_shard_size="20KB")
    config = json.loads((tmp_path / "good" / "config.json").read_text())
    shard = sorted(path.name for path in (tmp_path / "good").glob("*.safetensors"))[0]
    whole = (tmp_path / "good" / shard).read_bytes()
    for name, content, said in (
            ("config.json", "{", "cannot be read"), ("config.json", "[]", "expected a JSON object"),
            ("config.json", json.dumps({"model_type": "bloom"}), "model_type 'bloom'"),
            ("config.json", json.dumps({"model_type": "llama"}),
             "has no 'hidden_size', which a llama needs"),
            ("config.json", json.dumps(config | {"attention_bias": True}), "attention_bias: True"),
            ("config.json", json.dumps(config | {"head_dim": 16}), "h.0.attn.k.weight: shape"),
            ("config.json", json.dumps(config | {"rope_parameters": {"rope_type": "llama3"}}),
             "has no 'factor', which a llama needs"),
            ("config.json", json.dumps(config | {"num_hidden_layers": 3}), "h.2.ln_1.weight: no"),
            ("config.json", json.dumps(config | {"hidden_act": "gelu"}), "hidden_act: 'gelu'"),
            ("config.json", json.dumps(config | {"num_attention_heads": 0}),
             "num_attention_heads: must be at least 1, got 0"),
            ("config.json", json.dumps(config | {"vocab_size": "x"}), "an integer, got 'x'"),
            (shard, (2).to_bytes(8, "little") + b"[]", "not a safetensors file"),
            (shard, whole[:100], "not a safetensors file"), (shard, b"", "not a safetensors file"),
            (shard, whole[:-4], "not a safetensors file"), (shard, None, "no such file")):
        bad = shutil.copytree(tmp_path / "good", tmp_path / "bad", dirs_exist_ok=True) / name
        bad.unlink()
        if content is not None:
            bad.write_bytes(content if isinstance(content, bytes) else content.encode())
        assert convert.main(["--ckpt", str(tmp_path / "bad"), "--to", str(tmp_path / "x.pt")]) == 2
        assert said in capsys.readouterr().err, (name, said)


def test_other_bad_input(tmp_path, capsys):
    make(tmp_path / "ckpt.pt")
    weights = {"wte.weight": torch.full((2, 2), 1e30)}
    write_safetensors(str(tmp_path / "big.safetensors"), weights)
    for args, said in ((["--ckpt", tmp_path / "none.pt", "--to", tmp_path / "x"], "no such file"),
                       (["--ckpt", tmp_path / "none.safetensors", "--to", tmp_path / "x"],
                        "none.safetensors: no such file; save_pretrained"),
                       (["--ckpt", tmp_path, "--to", tmp_path / "x"], "expected a checkpoint file"),
                       (["--ckpt", tmp_path / "ckpt.pt", "--to", tmp_path / "other.pt"], "nanoGPT"),
                       (["--ckpt", tmp_path / "big.safetensors", "--to", tmp_path / "x"],
                        "no model_args")):
        assert convert.main([str(a) for a in args]) == 2
        assert said in capsys.readouterr().err, said
    with pytest.raises(SystemExit):  # where to?
        convert.main(["--ckpt", str(tmp_path / "ckpt.pt")])
    with pytest.raises(CheckpointError, match="too large for float16"):
        tensors.convert_weights(weights, "float16")


def test_only_names_of_folders_become_folders(tmp_path, capsys):
    make(tmp_path / "ckpt.pt")
    for name in ("model.onnx", "model.GGUF", "model.bin", "Qwen2.5", "v1.0/hf", "model.new/"):
        code = convert.main(["--ckpt", str(tmp_path / "ckpt.pt"), "--to", f"{tmp_path}/{name}"])
        refused = name.startswith("model") and not name.endswith("/")
        assert (code, (tmp_path / name).exists()) == ((2, False) if refused else (0, True)), name
        said = capsys.readouterr().err
        assert not refused or said.count("\n") == 1 and "FILE.gguf or a folder" in said


def test_no_export_is_taken_for_a_checkpoint_of_a_run(tmp_path, capsys):
    make(tmp_path / "ckpt.pt", norm="layer", pos="learned", mlp="gelu_exact", n_hidden=128)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    for name, expected in (("ckpt.pt", 2), ("ckpt_best.pt", 2), ("ckpt_prev.pt", 2),
                           ("ckpt_0000009.pt", 2), ("ckpt_merged.pt", 0)):
        assert convert.main(["--ckpt", str(tmp_path / "ckpt.pt"),
                             "--to", str(tmp_path / "run" / name)]) == expected
        assert ("a checkpoint of the run" in capsys.readouterr().err) == (expected == 2)
        assert (tmp_path / "run" / name).exists() == (expected == 0)


def test_as_typed_and_nothing_of_it_in_the_main_job(tmp_path, data_dir):
    make(tmp_path / "ckpt.pt")
    done = python("-m", "model.convert", "--ckpt", tmp_path / "ckpt.pt", "--to", tmp_path / "hf")
    assert done.returncode == 0 and "a LlamaForCausalLM" in done.stdout
    code = ("import sys, run_train; run_train.main(sys.argv[1:]); print([m for m in ("
            "'transformers', 'safetensors', 'model.convert.foreign') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code, *tiny_args(data_dir=data_dir, max_iters=1,
                           out_dir=tmp_path / "out")], cwd=REPO, capture_output=True, text=True)
    assert done.stdout.strip().endswith("[]"), done.stdout + done.stderr


def test_the_name_of_a_pattern_is_none_where_llama_cpp_has_no_such_splitter():
    """A pattern by itself, as GPT-2 splits, is known; digits one by one are SmolLM's."""
    def name(*splits, kind="BPE", **last):
        return pattern_name(dict(model=dict(type=kind, merges=["a b"]), pre_tokenizer=dict(
            type="Sequence", pretokenizers=[*splits, dict(type="ByteLevel") | last])))
    digits = dict(type="Digits", individual_digits=True)
    assert (name(), name(digits)) == ("gpt-2", "smollm")
    assert name(kind="WordPiece") is name(add_prefix_space=True) is name(use_regex=False) is None
    assert name(dict(type="Punctuation")) is None
    content = dict(model=dict(type="BPE", merges=["a b"]), pre_tokenizer=dict(type="ByteLevel"))
    for kind, found in (("NFC", "gpt-2"), ("Lowercase", None)):  # which would change the text first
        parts = dict(type="Sequence", normalizers=[dict(type=kind)])
        assert [pattern_name(content | dict(normalizer=n)) for n in (dict(type=kind), parts)] == (
            [found] * 2)


def test_layers_with_a_window_are_those_of_the_pattern_in_an_early_gemma_3():
    unread = dict(_sliding_window_pattern=2)  # transformers writes it, and does not read it
    assert read_layers(dict(sliding_window_pattern=6, sliding_window=512) | unread,
                       8) == "WWWWWFWW"


def test_tensors_that_no_other_program_knows_and_nan_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="h.0.attn.extra.weight: unknown to other programs"):
        tensors.rename("h.0.attn.extra.weight", {"h.{}.attn.q": "layers.{}.q"})
    write_safetensors(str(tmp_path / "a.safetensors"), dict(w=torch.tensor([1.0, math.nan])))
    with pytest.raises(CheckpointError, match="w contains non-finite values"):
        foreign.read_safetensors(str(tmp_path / "a.safetensors"))


def test_names_of_another_model_are_shown(tmp_path):
    state = dict(model={"conv1.weight": torch.ones(1)})
    with pytest.raises(CheckpointError, match="none of its 1 tensors .* look like conv1.weight"):
        adopt_weights(torch.nn.Linear(1, 1), state, "resnet.pt", print)


def test_a_folder_whose_shape_does_not_fit_is_named(tmp_path):
    make(tmp_path / "ckpt.pt")
    folder = pathlib.Path(export(tmp_path / "ckpt.pt", tmp_path / "hf"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9000}))
    with pytest.raises(CheckpointError, match=re.escape(str(folder))):
        read_named(str(folder), "init_from")
