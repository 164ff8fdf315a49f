"""Weights out: to Hugging Face, to nanoGPT, alone.

    python -m model.convert --ckpt out/ckpt.pt --to out/hf               a Hugging Face folder
    python -m model.convert --ckpt out/ckpt.pt --to nanogpt/ckpt.pt      nanoGPT's format
    python -m model.convert --ckpt out/ckpt.pt --to model.safetensors    the weights alone
    python -m model.convert --ckpt out/ckpt.pt --to model.gguf           llama.cpp's, and Ollama's
    python -m model.convert --ckpt out/lora/ckpt.pt --to out/adapter --adapter out/hf   for peft

--ckpt is a checkpoint or what else model/convert/foreign.py reads. The folders are those of
GPT2LMHeadModel, LlamaForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM and MixtralForCausalLM in
`transformers`, which is not needed to write them. What has no home there is refused by name: a
model goes out with the logits that it has, or not at all.
"""

import argparse
import json
import os
import re
from dataclasses import asdict, dataclass, fields

import torch

from data.chat_template import ChatTemplate
from data.tokenizer import tokenizer_from_spec
from data.tokenizer_hf import tokenizer_json
from model.convert.foreign import (
    CLASSES,
    GELUS,
    GPT2,
    check_complete,
    has_experts,
    names_of,
    read_model,
    rename,
)
from model.core.load import BACKBONE, EMA, averaged, model_of, read_model_args
from train.base.checkpoint_file import find_non_finite, save_checkpoint, write_safetensors
from train.base.cli import run_command
from train.base.errors import CheckpointError
from train.distributed import convert_ddp_state

# -----------------------------------------------------------------------------
# what a model needs over there

@dataclass
class Source:
    """A model to write: whole weights by our names, a GPTConfig or MoEConfig, its tokenizer and
    what stands around a turn of a chat, if any."""
    path: str
    weights: dict
    shape: object
    tokenizer: object = None
    template: ChatTemplate | None = None


def read_source(path, backbone=None, ema=False):
    """The Source at `path`; adapters are added to their backbone, which may be elsewhere by now."""
    state = averaged(read_model(path), path) if ema else read_model(path)
    kind, args = (state.get("config") or {}).get("model", "gpt"), state.get("model_args") or {}
    if kind == "lora":
        from model.lora import load_adapters, merge
        model, state = load_adapters(path, backbone, ema)
        weights, shape = merge(model), model.config
    elif kind in ("dpo", "grpo"):
        from model.lora import merge
        model, _ = model_of(state, path)
        weights, shape = merge(model), model.config
    elif kind in ("gpt", "chat"):
        weights = convert_ddp_state(state["model"])
        shape = read_model_args(args, weights)
    elif kind == "moe":
        from model.moe import MoEConfig
        weights = convert_ddp_state(state["model"])
        shape = MoEConfig(**{f.name: args[f.name] for f in fields(MoEConfig) if f.name in args})
    else:
        raise CheckpointError(f"{path}: a model of {kind} has no home elsewhere; gpt, chat, lora, "
                              "dpo, grpo and moe have")
    check_complete(path, weights, shape)
    spec = state.get("spec") or {}
    tokenizer = spec.get("tokenizer") or state.get("tokenizer")
    return Source(path, weights, shape, tokenizer and tokenizer_from_spec(tokenizer),
                  ChatTemplate.from_spec(spec["template"]) if spec.get("template") else None)


def family_of(source):
    """The model_type for a model. CheckpointError naming the options that none of them has."""
    c = source.shape
    if c.other:
        return c.other.model_type
    if c.norm == "layer" or c.pos == "learned":
        check_options(source, "GPT-2", gpt2_options(c))
        return "gpt2"
    check_options(source, "Llama, Qwen3 and Mixtral", dict(
        norm=["rms"], pos=["rope"], mlp=["swiglu"], bias=[False], prev_embedding=[False]))
    if not has_experts(c):
        return "qwen3" if c.qk_norm else "llama"
    if not c.qk_norm:
        check_options(source, "Mixtral (experts without qk_norm)", dict(norm_topk_prob=[True]))
    return "qwen3_moe" if c.qk_norm else "mixtral"


def gpt2_options(c):
    return dict(norm=["layer"], pos=["learned"], mlp=["gelu", "gelu_exact"], qk_norm=[False],
                n_kv_head=[c.n_head], prev_embedding=[False])


def check_options(source, home, allowed):
    wrong = [f"{k}: {getattr(source.shape, k)} (there: {' or '.join(map(str, good))})"
             for k, good in allowed.items() if getattr(source.shape, k) not in good]
    if wrong:
        raise CheckpointError(f"{source.path}: has no home in {home} with {', '.join(wrong)}")


def config_json(source, family, dtype):
    """config.json, in the words of transformers 4 and 5."""
    c, end = source.shape, source.tokenizer and source.tokenizer.eot_token
    out = dict(architectures=[class_of(c, family)], model_type=family, vocab_size=c.vocab_size,
               bos_token_id=end, eos_token_id=end, tie_word_embeddings=c.tie_weights,
               torch_dtype=dtype, dtype=dtype)
    if c.family:  # what it came with
        theirs = json.loads(c.family)
        return theirs | {k: v for k, v in out.items() if v is not None and k not in (
            "bos_token_id", "eos_token_id") or k not in theirs}
    if family == "gpt2":
        act = next(theirs for theirs, ours in GELUS.items() if ours == c.mlp)
        return out | dict(n_positions=c.block_size, n_embd=c.n_embd, n_layer=c.n_layer,
                          n_head=c.n_head, n_inner=c.n_hidden, activation_function=act,
                          layer_norm_epsilon=c.norm_eps, resid_pdrop=c.dropout,
                          embd_pdrop=c.dropout, attn_pdrop=c.dropout)
    out |= dict(hidden_size=c.n_embd, num_hidden_layers=c.n_layer, intermediate_size=c.n_hidden,
                num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head, head_dim=c.head_dim,
                hidden_act="silu", max_position_embeddings=c.block_size, rms_norm_eps=c.norm_eps,
                rope_theta=c.rope_theta, attention_bias=False, mlp_bias=False,
                rope_parameters=dict(rope_type="default", rope_theta=c.rope_theta))
    if family == "mixtral":
        return out | dict(intermediate_size=c.expert_hidden, num_local_experts=c.n_experts,
                          num_experts_per_tok=c.experts_per_token, sliding_window=None)
    if family == "qwen3_moe":
        out |= dict(num_experts=c.n_experts, num_experts_per_tok=c.experts_per_token,
                    moe_intermediate_size=c.expert_hidden, norm_topk_prob=c.norm_topk_prob,
                    decoder_sparse_step=1, mlp_only_layers=[])
    return out


def class_of(shape, family):
    """The name of its class in `transformers`."""
    if not shape.family:
        return CLASSES[family]
    from model.convert.families import CLASSES as families
    return families[shape.other.model_type]


def without_padding(source):
    """{our name: tensor} with the rows of real ids only."""
    return {n: t[:source.shape.vocab_size] if n in ("wte.weight", "lm_head.weight") else t
            for n, t in source.weights.items()}


def join_qkv(weights):
    """q, k, v below each other."""
    out = {}
    for name, t in weights.items():
        if ".attn.q." in name:
            parts = [weights[name.replace(".attn.q.", f".attn.{part}.")] for part in "qkv"]
            out[name.replace(".attn.q.", ".attn.qkv.")] = torch.cat(parts)
        elif not re.search(r"\.attn\.[kv]\.", name):
            out[name] = t
    return out


def unstack_experts(weights):
    """Each expert's matrix by itself."""
    return {n: piece for name, t in weights.items()
            for n, piece in ([(f"{name.removesuffix('weight')}{i}.weight", e)
                              for i, e in enumerate(t)] if t.dim() == 3 else [(name, t)])}


def names_out(source, family):
    """{their name: tensor} for a Hugging Face folder."""
    c, weights = source.shape, without_padding(source)
    if family == "gpt2":
        weights = join_qkv(weights)
        for name in [n for n in weights if n.startswith(("h.", "ln_f"))]:
            if weights[name].dim() == 2:
                weights[name] = weights[name].t()  # (in, out)
            if not c.bias:  # there they are always
                rows = weights[name].size(-1)
                weights[name.removesuffix("weight") + "bias"] = torch.zeros(rows)
    if c.family:
        from model.convert.families import shifted
        weights = shifted(weights, family, -1.0)
    names = names_of(c, family)
    out = {rename(n, names): t for n, t in unstack_experts(weights).items()}
    for i in range(c.n_layer if c.qk_norm else 0):
        for part in "qk":
            out[f"model.layers.{i}.self_attn.{part}_norm.weight"] = torch.ones(c.head_dim)
    return out


# -----------------------------------------------------------------------------
# files

def write_weights(path, weights, precision, about=None):
    dtype = getattr(torch, precision)
    weights = {n: t.to(dtype) for n, t in weights.items()}
    if bad := find_non_finite(weights):
        raise CheckpointError(f"{bad} is too large for {precision}: --save_precision bfloat16")
    write_safetensors(path, weights, about)


def write_json(folder, name, content):
    with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
        json.dump(content, f, indent=2, ensure_ascii=False)
        f.write("\n")


def export_folder(source, to, precision):
    """Write what `transformers`, vLLM and llama.cpp's converter take; what it is, in words."""
    family, tokenizer = family_of(source), source.tokenizer
    os.makedirs(to, exist_ok=True)
    write_weights(os.path.join(to, "model.safetensors"), names_out(source, family), precision)
    config, end = config_json(source, family, precision), tokenizer and tokenizer.eot_token
    if tokenizer:
        about = dict(tokenizer_class="PreTrainedTokenizerFast",
                     model_max_length=source.shape.block_size, clean_up_tokenization_spaces=False)
        about |= {} if end is None else dict(eos_token=tokenizer.decode([end]))
        about |= chat_template_keys(source.template)
        write_json(to, "tokenizer.json", tokenizer_json(tokenizer))
        write_json(to, "tokenizer_config.json", about)
    if source.template and source.template.ends:
        config["eos_token_id"] = source.template.ends
    ends = {k: config[k] for k in ("bos_token_id", "eos_token_id")}
    write_json(to, "generation_config.json", ends)
    write_json(to, "config.json", config)  # last: without it the folder is none
    what = config["architectures"][0]
    return f"a {what}" if tokenizer else f"a {what} without a tokenizer: it has none"


def chat_template_keys(template):
    """Return the keys of tokenizer_config.json for a ChatTemplate or None."""
    return template.special_tokens | dict(chat_template=template.to_jinja()) if template else {}


def export_weights(source, to, precision):
    """Write the weights by our names, and what they are; what it is, in words."""
    about = dict(model_args=asdict(source.shape),
                 tokenizer=source.tokenizer and source.tokenizer.spec(),
                 spec=dict(template=source.template.spec) if source.template else {})
    about = {name: json.dumps(value) for name, value in about.items()}
    write_weights(to, source.weights, precision, about)
    return f"{len(source.weights)} tensors by our names"


def export_nanogpt(source, to):
    """Write a checkpoint that nanoGPT's own sample.py reads; what it is, in words."""
    c = source.shape
    check_options(source, "nanoGPT", gpt2_options(c) | dict(
        mlp=["gelu_exact"], tie_weights=[True], n_hidden=[4 * c.n_embd], norm_eps=[1e-5]))
    weights = {rename(n, GPT2): t for n, t in join_qkv(without_padding(source)).items()}
    weights["lm_head.weight"] = weights["transformer.wte.weight"]  # it stores both
    args = {k: getattr(c, k) for k in ("n_layer", "n_head", "n_embd", "block_size", "bias",
                                       "vocab_size", "dropout")}
    save_checkpoint(to, dict(model=weights, model_args=args, iter_num=0, best_val_loss=1e9,
                             config={}))
    return "a checkpoint of nanoGPT"


def export_adapter(path, to, base, backbone, ema):
    """Write a LoRA's adapters as a folder that peft loads over the exported base; what it is."""
    from model.lora import adapters, load_adapters
    model, _ = load_adapters(path, backbone, ema)
    check_base(base, model)
    family = family_of(Source(path, {}, model.config))
    pairs = adapters(model)
    if family == "gpt2":
        pairs = join_adapters(pairs)
    tensors, ranks = {}, {}
    for name, (a, b) in pairs.items():
        module = rename(f"{name}.weight", names_of(model.config, family)).removesuffix(".weight")
        ranks[module] = len(a)
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
    wider = {module: r for module, r in ranks.items() if r != model.r}
    os.makedirs(to, exist_ok=True)
    write_weights(os.path.join(to, "adapter_model.safetensors"), tensors, "float32")
    write_json(to, "adapter_config.json", dict(
        peft_type="LORA", task_type="CAUSAL_LM", base_model_name_or_path=base, r=model.r,
        lora_alpha=model.alpha, lora_dropout=0.0, target_modules=sorted(ranks), bias="none",
        fan_in_fan_out=family == "gpt2", use_rslora=False, inference_mode=True, rank_pattern=wider,
        alpha_pattern={module: model.alpha * r / model.r for module, r in wider.items()}))
    return f"{len(ranks)} adapters for the base in {base}"


def check_base(folder, model):
    """CheckpointError unless `folder` has the model that the adapters of `model` stand on."""
    there = read_model(folder)["model"] if os.path.isdir(folder) else {}
    for name in ("wte.weight", "ln_f.weight"):  # which have no adapter; in whatever precision
        ours, rows = model.get_parameter(name), model.config.vocab_size
        ours, theirs = ours[:rows], there.get(name, torch.empty(0))[:rows]
        if theirs.shape != ours.shape or not torch.allclose(
                theirs.float(), ours.to(theirs.dtype).float(), atol=1e-6):
            what = f"its {name} is another" if there else "no folder"
            raise CheckpointError(f"--adapter {folder}: {what}; expected the adapters' backbone, "
                                  "as this command writes it to a folder")


def join_adapters(pairs):
    """Adapters of q, k, v as one of qkv: A (m r, in) of the m that are there below each other, B
    (3 C, m r) with theirs on the diagonal."""
    out = {n: pair for n, pair in pairs.items() if not re.search(r"\.attn\.[qkv]$", n)}
    for layer in sorted({n[:-2] for n in pairs if n not in out}):
        there = {part: pairs[f"{layer}.{part}"] for part in "qkv" if f"{layer}.{part}" in pairs}
        (rank, _), rows = next(iter(there.values()))[0].shape, len(next(iter(there.values()))[1])
        joined = torch.zeros(3 * rows, rank * len(there))
        for i, (part, (_, b)) in enumerate(there.items()):
            first = "qkv".index(part) * rows
            joined[first:first + rows, i * rank:(i + 1) * rank] = b
        out[f"{layer}.qkv"] = torch.cat([a for a, _ in there.values()]), joined
    return out


# -----------------------------------------------------------------------------
# the command line

def convert(ckpt, to, save_precision="float32", adapter=None, backbone=None, ema=False,
            quantize=None):
    """Write the model at `ckpt` to `to`, whose name says in which form. UserError."""
    if os.path.isfile(to) != to.endswith((".pt", ".safetensors", ".gguf")) and os.path.exists(to):
        raise CheckpointError(f"--to {to}: expected FILE.pt, .safetensors, .gguf or a folder")
    if quantize and not to.endswith(".gguf"):
        raise CheckpointError("--quantize: goes with --to FILE.gguf")
    os.makedirs(os.path.dirname(os.path.abspath(to)), exist_ok=True)
    source = None if adapter else read_source(ckpt, backbone, ema)
    if adapter:
        what = export_adapter(ckpt, to, adapter, backbone, ema)
    elif to.endswith(".pt"):
        what = export_nanogpt(source, to)
    elif to.endswith(".safetensors"):
        what = export_weights(source, to, save_precision)
    elif to.endswith(".gguf"):
        from model.convert.gguf import export_gguf
        weights, family = without_padding(source), family_of(source)
        weights = join_qkv(weights) if family == "gpt2" else weights
        config = config_json(source, family, save_precision)
        what = export_gguf(source, weights, to, config, quantize or save_precision)
    else:
        what = export_folder(source, to, save_precision)
    print(f"Wrote {to}: {what}")


def main(argv=None):
    """Runs the command; its exit code."""
    parser = argparse.ArgumentParser("python -m model.convert", description="Weights from and to "
                                     "nanoGPT and Hugging Face.")
    parser.add_argument("--ckpt", default="out/ckpt.pt", help="checkpoint, .safetensors file, "
                        "Hugging Face folder or hf:OWNER/NAME (default: %(default)s)")
    parser.add_argument("--to", required=True, help="FILE.pt: nanoGPT's format; FILE.safetensors: "
                        "weights alone; FILE.gguf: for llama.cpp and Ollama; else a folder for "
                        "transformers and vLLM")
    parser.add_argument("--backbone", help=BACKBONE)
    parser.add_argument("--ema", action="store_true", help=EMA)
    parser.add_argument("--save_precision", choices=["float32", "bfloat16", "float16"],
                        default="float32", help="of the weights in a folder, .safetensors or "
                        ".gguf file (default: %(default)s)")
    parser.add_argument("--quantize", choices=["q8_0"], help="weights of a .gguf file in 8 bits")
    parser.add_argument("--adapter", metavar="BASE", help="of a LoRA write the adapters alone, for "
                        "peft, over the model exported to this folder")
    return run_command(parser, lambda args: convert(**vars(args)), argv)
