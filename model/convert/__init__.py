"""Convert a model to the formats of other programs.

    python -m model.convert --ckpt out/ckpt.pt --to out/hf               a Hugging Face folder
    python -m model.convert --ckpt out/ckpt.pt --to nanogpt/ckpt.pt      nanoGPT's format
    python -m model.convert --ckpt out/ckpt.pt --to model.safetensors    the weights only
    python -m model.convert --ckpt out/ckpt.pt --to model.gguf           for llama.cpp and Ollama
    python -m model.convert --ckpt out/lora/ckpt.pt --to out/adapter --adapter out/hf   for peft

--ckpt is a checkpoint, or anything that model/convert/foreign.py reads. `transformers` is not
needed. Options that the other program does not have are refused by name: an export computes the
same logits as the model.
"""

import json
import os
import re
from dataclasses import asdict, dataclass

import torch

from data.chat_template import ChatTemplate
from data.tokenizer import tokenizer_from_spec
from data.tokenizer_hf import tokenizer_json
from model.convert.families import FAMILIES, find_family, mismatches, write_config
from model.convert.foreign import check_complete, read_model
from model.convert.formulas import check_formulas
from model.convert.tensors import NAMES, rename, strip_padding, write_gpt2, write_weights
from model.core.adapters import adapter_pairs
from model.core.load import BACKBONE, EMA, load_model, saved_model_type, use_ema
from train.base.checkpoint_file import find_non_finite, save_checkpoint, write_safetensors
from train.base.cli import run_command
from train.base.errors import CheckpointError
from train.base.fields import key
from train.system import load_model_type


@dataclass
class Source:
    """A model to export: path of the checkpoint, weights {our name: tensor}, GPTConfig or
    MoEConfig, tokenizer and chat template, if any."""
    path: str
    weights: dict
    shape: object
    tokenizer: object = None
    template: ChatTemplate | None = None


def read_source(path, backbone=None, ema=False):
    """Read the Source at `path`. backbone: the present path of the model that adapters need."""
    state = read_model(path)
    state = use_ema(state, path) if ema else state
    model_type = load_model_type(saved_model_type(state))
    if model_type.as_gpt is None:
        raise CheckpointError(f"{path}: a model of type {saved_model_type(state)} cannot be "
                              "exported: it is not a GPT")
    weights, shape = model_type.as_gpt(state, path, backbone, ema)
    check_complete(path, weights, shape)
    spec = state.get("spec") or {}
    tokenizer = spec.get("tokenizer") or state.get("tokenizer")
    return Source(path, weights, shape, tokenizer and tokenizer_from_spec(tokenizer),
                  ChatTemplate.from_spec(spec["template"]) if spec.get("template") else None)


# -----------------------------------------------------------------------------
# formats

def write_file(path, weights, precision, description=None):
    """Write {name: tensor} to a .safetensors file in `precision`."""
    dtype = getattr(torch, precision)
    weights = {n: t.to(dtype) for n, t in weights.items()}
    if bad := find_non_finite(weights):
        raise CheckpointError(f"{bad} is too large for {precision}: --save_precision bfloat16")
    write_safetensors(path, weights, description)


def write_json(folder, name, content):
    with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
        json.dump(content, f, indent=2, ensure_ascii=False)
        f.write("\n")


def export_folder(source, to, precision):
    """Write a Hugging Face folder, for transformers, vLLM and llama.cpp's converter; return a
    description."""
    shape, tokenizer, template = source.shape, source.tokenizer, source.template
    kind = find_family(shape, source.path)
    end = tokenizer and tokenizer.eot_token
    config = write_config(shape, kind, precision, end)
    os.makedirs(to, exist_ok=True)
    write_file(os.path.join(to, "model.safetensors"), write_weights(source.weights, shape, kind),
               precision)
    if tokenizer:
        keys = dict(tokenizer_class="PreTrainedTokenizerFast", model_max_length=shape.block_size,
                    clean_up_tokenization_spaces=False)
        keys |= {} if end is None else dict(eos_token=tokenizer.decode([end]))
        if template:
            keys |= template.special_tokens | dict(chat_template=template.to_jinja())
        write_json(to, "tokenizer.json", tokenizer_json(tokenizer))
        write_json(to, "tokenizer_config.json", keys)
    if template and template.ends:
        config["eos_token_id"] = template.ends
    write_json(to, "generation_config.json",
               {k: config[k] for k in ("bos_token_id", "eos_token_id")})
    write_json(to, "config.json", config)  # last: it marks the folder as complete
    name = FAMILIES[kind].architecture
    return f"a {name}" if tokenizer else f"a {name} without a tokenizer: it has none"


def export_weights(source, to, precision):
    """Write the weights by our names, and a description, to a .safetensors file; return a
    description."""
    description = dict(model_args=asdict(source.shape),
                       tokenizer=source.tokenizer and source.tokenizer.spec(),
                       spec=dict(template=source.template.spec) if source.template else {})
    write_file(to, source.weights, precision,
               {name: json.dumps(value) for name, value in description.items()})
    return f"{len(source.weights)} tensors by our names"


def export_nanogpt(source, to):
    """Write a checkpoint for nanoGPT's sample.py; return a description."""
    c = source.shape
    wrong = mismatches(c, FAMILIES["gpt2"])
    only = dict(mlp="gelu_exact", tie_weights=True, n_hidden=4 * c.n_embd, norm_eps=1e-5)
    wrong += [f"{k}: {getattr(c, k)} (there: {v})" for k, v in only.items() if getattr(c, k) != v]
    if wrong:
        raise CheckpointError(f"{source.path}: not supported by nanoGPT: {', '.join(wrong)}")
    weights = write_gpt2(strip_padding(source.weights, c), c, zero_biases=False)
    weights = {rename(n, NAMES["gpt2"]): t for n, t in weights.items()}
    weights["lm_head.weight"] = weights["transformer.wte.weight"]  # it stores both
    args = {k: getattr(c, k) for k in ("n_layer", "n_head", "n_embd", "block_size", "bias",
                                       "vocab_size", "dropout")}
    save_checkpoint(to, dict(model=weights, model_args=args, iter_num=0, best_val_loss=1e9,
                             config={}))
    return "a checkpoint of nanoGPT"


# -----------------------------------------------------------------------------
# LoRA adapters for peft

def export_adapter(path, to, base, backbone, ema):
    """Write a LoRA's adapters as a folder for peft over the exported `base`; return a description.
    """
    model, _ = load_model(path, backbone=backbone, ema=ema, expect="lora")
    check_base(base, model)
    kind = find_family(model.config, path)
    pairs = adapter_pairs(model)
    if kind == "gpt2":
        pairs = join_adapters(pairs)
    tensors, ranks = {}, {}
    for name, (a, b) in pairs.items():
        module = rename(f"{name}.weight", NAMES[kind]).removesuffix(".weight")
        ranks[module] = len(a)
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
    wider = {module: r for module, r in ranks.items() if r != model.r}
    os.makedirs(to, exist_ok=True)
    write_file(os.path.join(to, "adapter_model.safetensors"), tensors, "float32")
    write_json(to, "adapter_config.json", dict(
        peft_type="LORA", task_type="CAUSAL_LM", base_model_name_or_path=base, r=model.r,
        lora_alpha=model.alpha, lora_dropout=0.0, target_modules=sorted(ranks), bias="none",
        fan_in_fan_out=kind == "gpt2", use_rslora=False, inference_mode=True, rank_pattern=wider,
        alpha_pattern={module: model.alpha * r / model.r for module, r in wider.items()}))
    return f"{len(ranks)} adapters for the base in {base}"


def check_base(folder, model):
    """CheckpointError unless `folder` has the backbone of the adapters of `model`."""
    base = read_model(folder)["model"] if os.path.isdir(folder) else {}
    for name in ("wte.weight", "ln_f.weight"):  # without adapters; in any precision
        ours, rows = model.get_parameter(name), model.config.vocab_size
        ours, theirs = ours[:rows], base.get(name, torch.empty(0))[:rows]
        if theirs.shape != ours.shape or not torch.allclose(
                theirs.float(), ours.to(theirs.dtype).float(), atol=1e-6):
            problem = f"its {name} differs" if base else "no folder"
            raise CheckpointError(f"--adapter {folder}: {problem}; expected the adapters' "
                                  "backbone, exported to a folder by this command")


def join_adapters(pairs):
    """Return `pairs` {module: (A, B)} with q, k, v as one module qkv: the A of the m that exist
    concatenated, (m r, in), and the B on the diagonal of a (3 C, m r)."""
    out = {n: pair for n, pair in pairs.items() if not re.search(r"\.attn\.[qkv]$", n)}
    for layer in sorted({n[:-2] for n in pairs if n not in out}):
        parts = {part: pairs[f"{layer}.{part}"] for part in "qkv" if f"{layer}.{part}" in pairs}
        a, b = next(iter(parts.values()))
        rank, rows = len(a), len(b)
        joined = torch.zeros(3 * rows, rank * len(parts))
        for i, (part, (_, b)) in enumerate(parts.items()):
            first = "qkv".index(part) * rows
            joined[first:first + rows, i * rank:(i + 1) * rank] = b
        out[f"{layer}.qkv"] = torch.cat([a for a, _ in parts.values()]), joined
    return out


# -----------------------------------------------------------------------------
# the command

def convert(ckpt, to, save_precision="float32", adapter=None, backbone=None, ema=False,
            quantize=None):
    """Write the model at `ckpt` to `to`, in the format that the name implies. Raises UserError."""
    if os.path.isfile(to) != to.endswith((".pt", ".safetensors", ".gguf")) and os.path.exists(to):
        raise CheckpointError(f"--to {to}: expected FILE.pt, .safetensors, .gguf or a folder")
    if quantize and not to.endswith(".gguf"):
        raise CheckpointError("--quantize: goes with --to FILE.gguf")
    os.makedirs(os.path.dirname(os.path.abspath(to)), exist_ok=True)
    if not to.endswith(".safetensors"):
        check_formulas()
    source = None if adapter else read_source(ckpt, backbone, ema)
    if adapter:
        result = export_adapter(ckpt, to, adapter, backbone, ema)
    elif to.endswith(".pt"):
        result = export_nanogpt(source, to)
    elif to.endswith(".safetensors"):
        result = export_weights(source, to, save_precision)
    elif to.endswith(".gguf"):
        from model.convert.gguf import export_gguf
        kind = find_family(source.shape, source.path)
        result = export_gguf(source, kind, to, quantize or save_precision)
    else:
        result = export_folder(source, to, save_precision)
    print(f"Wrote {to}: {result}")


@dataclass
class ConvertOptions:
    """Convert weights from and to nanoGPT, Hugging Face and llama.cpp."""
    to: str = key("", "FILE.pt: nanoGPT's format; FILE.safetensors: the weights only; FILE.gguf: "
                  "for llama.cpp and Ollama; otherwise a folder for transformers and vLLM",
                  required=True)
    ckpt: str = key("out/ckpt.pt", "checkpoint, .safetensors file, Hugging Face folder or "
                    "hf:OWNER/NAME")
    backbone: str | None = key(None, BACKBONE)
    ema: bool = key(False, EMA)
    save_precision: str = key("float32", "of the weights in a folder, .safetensors or .gguf file",
                              choices=["float32", "bfloat16", "float16"])
    quantize: str | None = key(None, "quantize the weights of a .gguf file", choices=["q8_0"])
    adapter: str | None = key(None, "write only the adapters of a LoRA, for peft, over the model "
                              "exported to this folder", metavar="BASE")


def main(argv=None):
    return run_command(ConvertOptions, lambda options: convert(**vars(options)), argv)
