"""Weights that other programs wrote, as a checkpoint of ours holds them: nanoGPT's ckpt.pt, state
dicts, .safetensors files, and Hugging Face folders of GPT-2, Llama, Qwen3, Qwen3-MoE, Mixtral, and
of the families of model/convert/families.py.

read_model is behind run_train.py --init_from, model.sample --ckpt and model.convert --ckpt. Files
are read by the letter, without `transformers`. What our GPT cannot compute is refused by name: a
model comes in with the logits that it had, or not at all.
"""

import json
import os
import re
import struct
import sys
from dataclasses import asdict

import torch
import torch.nn.functional as F

from data.hub import local_folder
from data.tokenizer_hf import read_hf_tokenizer, read_json, read_template_spec
from model.gpt import GPT, GPTConfig
from train.base.checkpoint_file import (
    DESCRIPTION,
    SAFETENSORS_DTYPES,
    find_non_finite,
    load_checkpoint,
    mismatches,
    raise_mismatches,
)
from train.base.errors import CheckpointError, echo
from train.config import check_shape
from train.distributed import convert_ddp_state

# -----------------------------------------------------------------------------
# names: our module -> theirs; {} stands for the numbers of the layer and of the expert

LLAMA = {
    "wte": "model.embed_tokens", "ln_f": "model.norm", "lm_head": "lm_head",
    "h.{}.ln_1": "model.layers.{}.input_layernorm",
    "h.{}.ln_2": "model.layers.{}.post_attention_layernorm",
    "h.{}.attn.q": "model.layers.{}.self_attn.q_proj",
    "h.{}.attn.k": "model.layers.{}.self_attn.k_proj",
    "h.{}.attn.v": "model.layers.{}.self_attn.v_proj",
    "h.{}.attn.o": "model.layers.{}.self_attn.o_proj",
    "h.{}.mlp.gate": "model.layers.{}.mlp.gate_proj",
    "h.{}.mlp.up": "model.layers.{}.mlp.up_proj",
    "h.{}.mlp.down": "model.layers.{}.mlp.down_proj"}
QWEN3_MOE = LLAMA | {
    "h.{}.mlp.router": "model.layers.{}.mlp.gate",
    "h.{}.mlp.gate.{}": "model.layers.{}.mlp.experts.{}.gate_proj",
    "h.{}.mlp.up.{}": "model.layers.{}.mlp.experts.{}.up_proj",
    "h.{}.mlp.down.{}": "model.layers.{}.mlp.experts.{}.down_proj"}
MIXTRAL = LLAMA | {
    "h.{}.mlp.router": "model.layers.{}.block_sparse_moe.gate",
    "h.{}.mlp.gate.{}": "model.layers.{}.block_sparse_moe.experts.{}.w1",
    "h.{}.mlp.up.{}": "model.layers.{}.block_sparse_moe.experts.{}.w3",
    "h.{}.mlp.down.{}": "model.layers.{}.block_sparse_moe.experts.{}.w2"}
GPT2 = {
    "wte": "transformer.wte", "wpe": "transformer.wpe", "ln_f": "transformer.ln_f",
    "lm_head": "lm_head",
    "h.{}.ln_1": "transformer.h.{}.ln_1", "h.{}.ln_2": "transformer.h.{}.ln_2",
    "h.{}.attn.qkv": "transformer.h.{}.attn.c_attn",  # q, k, v below each other
    "h.{}.attn.o": "transformer.h.{}.attn.c_proj",
    "h.{}.mlp.up": "transformer.h.{}.mlp.c_fc", "h.{}.mlp.down": "transformer.h.{}.mlp.c_proj"}
TABLES = {"gpt2": GPT2, "llama": LLAMA, "qwen3": LLAMA, "qwen3_moe": QWEN3_MOE, "mixtral": MIXTRAL}
READING = {theirs: ours for t in (QWEN3_MOE, MIXTRAL, GPT2) for ours, theirs in t.items()}
CLASSES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM",
           "qwen3_moe": "Qwen3MoeForCausalLM", "mixtral": "MixtralForCausalLM"}
BUFFERS = re.compile(r"\.attn\.(masked_)?bias$|\.inv_freq$")  # constants that old files hold


def rename(name, table):
    """The tensor `name` by `table`; as it is where that has no such module."""
    module, _, kind = name.rpartition(".")
    numbers = re.findall(r"(?<=\.)\d+(?=\.|$)", module)
    found = table.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "{}", module))
    return f"{found.format(*numbers)}.{kind}" if found else name


def is_theirs(weights):
    """Whether names are those of nanoGPT or of Hugging Face's GPT-2 or Llama, base model or all."""
    return any(re.search(r"(^|\.)(h\.0\.attn\.c_attn|embed_tokens)\.weight$", n) for n in weights)


def names_of(shape, kind):
    """{our module: theirs} of a model of that shape, which is of the model_type `kind`."""
    if not shape.family:
        return TABLES[kind]
    from model.convert.families import NAMES
    return LLAMA | NAMES.get(kind, {})


def names_in(weights, path, table=None):
    """Our names and shapes for the tensors of `weights`, which have theirs: those of `table`, else
    of any."""
    reading = READING if table is None else {theirs: ours for ours, theirs in table.items()}
    root = "transformer." if any("c_attn" in n for n in weights) else "model."
    out = {}
    for name, t in weights.items():
        if table is None and re.search(r"self_attn\.[qk]_norm\.weight$", name):
            if not is_one(t):
                raise CheckpointError(f"{path}: {name} is not all ones, but our qk_norm has no "
                                      "weights: these would be lost")
        elif not BUFFERS.search(name):
            full = name if name.startswith(("lm_head.", root)) else root + name
            out[rename(full, reading)] = t
    try:
        out = stack_experts(split_qkv(out), path)
        for name in ("wte.weight", "lm_head.weight"):
            if name in out and len(out[name]) % 128:  # rows to a multiple of that, as ours have
                out[name] = F.pad(out[name], (0, 0, 0, -len(out[name]) % 128))
    except (RuntimeError, IndexError, TypeError) as error:
        raise CheckpointError(f"{path}: its tensors have not the shapes of their names: {error}"
                              ) from None
    return out


def is_one(t):
    return bool((t == 1).all())


def split_qkv(weights):
    """q, k, v apart; Hugging Face's GPT-2 keeps matrices as (in, out): turned over."""
    turned = any(n.endswith("attn.qkv.weight") and t.size(0) < t.size(1)
                 for n, t in weights.items())
    out = {}
    for name, t in weights.items():
        if turned and name.startswith("h.") and t.dim() == 2:
            t = t.t().contiguous()
        if ".attn.qkv." in name:
            out |= {name.replace("qkv", part): piece.contiguous()
                    for part, piece in zip("qkv", t.chunk(3))}
        else:
            out[name] = t
    return out


def stack_experts(weights, path):
    """The experts of a layer as one tensor (E, out, in)."""
    out, experts = {}, {}
    for name, t in weights.items():
        if found := re.fullmatch(r"(h\.\d+\.mlp\.\w+)\.(\d+)\.weight", name):
            experts.setdefault(found[1], {})[int(found[2])] = t
        else:
            out[name] = t
    for name, stack in experts.items():
        if sorted(stack) != list(range(len(stack))):
            raise CheckpointError(f"{path}: of the experts of {name} some are missing")
        out[f"{name}.weight"] = torch.stack([stack[i] for i in range(len(stack))])
    return out


# -----------------------------------------------------------------------------
# files

def read_model(path, state=None):
    """{"model": {our name: tensor}, "model_args", "tokenizer", ...}, as a checkpoint has them, of
    our own checkpoints, nanoGPT's, state dicts with these names or Hugging Face's, .safetensors
    files and Hugging Face folders, also as hf:OWNER/NAME. state: what is in the file, where that is
    known already. Raises CheckpointError; a bare state dict has no model_args."""
    path = local_folder(str(path))
    if os.path.isdir(path):
        return read_folder(path)
    if str(path).endswith(".safetensors"):
        weights, about = read_safetensors(path)
        args = about.setdefault("model_args", {})
        kind = "moe" if "n_experts" in args else "gpt"
        spec = dict(vocab_size=args.get("vocab_size"), tokenizer=about.get("tokenizer"))
        spec |= about.pop("spec", {})
        state = {"model": weights, "config": dict(args, model=kind), "spec": spec} | about
    state = load_checkpoint(path) if state is None else state
    weights = convert_ddp_state(state["model"])
    if not is_theirs(weights):
        return state
    ours, args = names_in(weights, path), state.get("model_args")
    tied = "lm_head.weight" in ours and torch.equal(ours["lm_head.weight"], ours["wte.weight"])
    if tied:  # nanoGPT stores both
        del ours["lm_head.weight"]
    if not isinstance(args, dict) or not {"n_layer", "n_head", "vocab_size"} <= args.keys():
        return {"model": ours}
    taken = {k: args[k] for k in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size",
                                  "dropout") if k in args}
    shape = GPTConfig(**taken, bias=args.get("bias", True), norm="layer", pos="learned",
                      mlp="gelu_exact", tie_weights="lm_head.weight" not in ours)
    return described(path, ours, shape, "gpt", None)


def described(path, weights, shape, kind, tokenizer, template=None):
    """What a checkpoint of a model of that shape holds; CheckpointError where they do not fit."""
    spec = tokenizer and tokenizer.spec()
    check_complete(path, weights, shape)
    return {"model": weights, "model_args": asdict(shape), "tokenizer": spec,
            "config": asdict(shape) | dict(model=kind),
            "spec": dict(vocab_size=shape.vocab_size, tokenizer=spec)
            | (dict(template=template) if template else {})}


def has_experts(shape):
    """Whether that is the shape of model/moe.py, which is imported for such models alone."""
    return hasattr(shape, "n_experts")


def check_complete(path, weights, shape):
    kind = GPT
    if has_experts(shape):
        from model.moe import MoE as kind
    try:
        check_shape(shape, weights)
        with torch.device("meta"):
            wanted = kind(shape).state_dict()
    except (RuntimeError, TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{path}: its configuration describes no model: {error}") from None
    raise_mismatches(mismatches("", weights, wanted, dtypes=False), path)


def read_safetensors(path):
    """({name: tensor}, what of a checkpoint's DESCRIPTION is there) of a .safetensors file."""
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as f:
            length, = struct.unpack("<Q", f.read(8))
            if length > size - 8:
                raise ValueError("cut off in its header")
            header, tensors = json.loads(f.read(length)), {}
            about = header.pop("__metadata__", {})
            about = {k: json.loads(about[k]) for k in DESCRIPTION if k in about}
            if strange := [k for k, v in about.items() if not isinstance(v, (dict, type(None)))]:
                raise ValueError(f"its {', '.join(strange)}: no object")
            # Mapped: what is used is read, and weights are never twice in memory.
            content, last = torch.from_file(str(path), size=size, dtype=torch.uint8), 8 + length
            for name, entry in sorted(header.items(), key=lambda e: e[1]["data_offsets"]):
                begin, end = (8 + length + at for at in entry["data_offsets"])
                empty = torch.empty(entry["shape"], dtype=SAFETENSORS_DTYPES[entry["dtype"]], device="meta")
                if not last <= begin <= end <= size or end - begin != empty.nbytes:
                    raise ValueError(f"{name} lies outside the file, over another tensor, or is of "
                                     "another size")
                last = end
                data = content[begin:end]
                data = data.clone() if begin % empty.itemsize else data  # torch cannot view that
                tensors[name] = data.view(empty.dtype).view(entry["shape"])
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error,
            RuntimeError, MemoryError) as error:
        raise CheckpointError(f"{path}: not a safetensors file that can be read: "
                              f"{type(error).__name__}: {error}") from None
    if bad := find_non_finite(tensors):
        raise CheckpointError(f"{path}: {bad} holds values that are not finite")
    return tensors, {k: v for k, v in about.items() if v is not None}


def read_shards(folder):
    """{name: tensor} of model.safetensors in `folder`, or of the shards that its index names."""
    index = os.path.join(folder, "model.safetensors.index.json")
    if not os.path.exists(index):
        return read_safetensors(os.path.join(folder, "model.safetensors"))[0]
    named, tensors = read_json(index).get("weight_map"), {}
    if not isinstance(named, dict) or not all(isinstance(s, str) for s in named.values()):
        raise CheckpointError(f"{index}: no weight_map of names and files in it")
    for shard in sorted(set(named.values())):
        if os.path.basename(shard) != shard:  # never a file of another folder
            raise CheckpointError(f"{index}: {shard!r} is no file name")
        tensors |= read_safetensors(os.path.join(folder, shard))[0]
    if (missing := sorted(named.keys() - tensors.keys())) or not tensors:
        raise CheckpointError(f"{index}: its shards lack {', '.join(missing[:6]) or 'everything'}")
    return tensors


def read_folder(folder):
    """read_model of a Hugging Face folder: config.json, model.safetensors and, where it is one that
    can be used here, tokenizer.json."""
    if not os.path.exists(os.path.join(folder, "config.json")):
        hint = f"; did you mean {folder}/ckpt.pt?" if os.path.exists(f"{folder}/ckpt.pt") else ""
        raise CheckpointError(f"{folder}: no config.json in it: expected a checkpoint file, or a "
                              f"Hugging Face folder{hint}")
    theirs = read_json(os.path.join(folder, "config.json"))
    shape, tensors = shape_in(theirs, folder), read_shards(folder)
    if shape.qk_norm and not has_experts(shape) and any(
            re.search(r"[qk]_norm\.weight$", n) and not is_one(t) for n, t in tensors.items()):
        shape = family_shape(theirs, folder)  # a GPT's own have no weights
    if shape.family:
        from model.convert.families import shifted
        weights = names_in(tensors, folder, names_of(shape, theirs["model_type"]))
        weights = shifted(weights, theirs["model_type"], 1.0)
    else:
        weights = names_in(tensors, folder)
    if shape.tie_weights:
        weights.pop("lm_head.weight", None)
    tokenizer = template = None
    if os.path.exists(os.path.join(folder, "tokenizer.json")):
        try:
            tokenizer = read_hf_tokenizer(folder)
            template = read_template_spec(folder, tokenizer)
        except ValueError as error:
            echo(f"{error}; going on without a tokenizer", sys.stderr)
    kind = "moe" if has_experts(shape) else "gpt"
    return described(folder, weights, shape, kind, tokenizer, template)


# -----------------------------------------------------------------------------
# config.json

# Keys whose other values would change the logits: what they must be. None: absent is as good.
PLAIN = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "layer_types": None,
         "sliding_window": None, "decoder_sparse_step": 1, "mlp_only_layers": []}
PLAIN_GPT2 = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
              "reorder_and_upcast_attn": False, "add_cross_attention": False}
# What values of other types than theirs raise.
UNLIKE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
GELUS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact"}


def shape_in(theirs, folder):
    """The GPTConfig or MoEConfig that a config.json describes. CheckpointError where it has what
    our GPT cannot compute."""
    kind = str(theirs.get("model_type"))
    if kind not in CLASSES:
        return family_shape(theirs, folder)
    values = dict(theirs)
    if not theirs.get("use_sliding_window", kind != "qwen3" and kind != "qwen3_moe"):
        values.pop("sliding_window", None)
    if all(layer == "full_attention" for layer in list_in(theirs, "layer_types", folder)):
        values.pop("layer_types", None)
    plain = PLAIN_GPT2 if kind == "gpt2" else PLAIN
    wrong = [f"{k}: {values[k]!r}" for k, good in plain.items() if values.get(k, good) != good]
    try:
        if kind in ("llama", "qwen3") and not is_plain(theirs):
            return family_shape(theirs, folder)
        shape = (gpt2_shape if kind == "gpt2" else llama_shape)(theirs, kind, wrong)
    except UNLIKE as error:
        raise CheckpointError(f"{folder}/config.json: {type(error).__name__}: {error}") from None
    if wrong:
        raise CheckpointError(f"{folder}/config.json: {', '.join(wrong)}: our GPT knows no such "
                              "thing")
    return shape


def list_in(theirs, name, folder):
    """The list `name` of a config.json, [] where there is none."""
    found = theirs.get(name) or []
    if not isinstance(found, list):
        raise CheckpointError(f"{folder}/config.json: {name} is {found!r:.80}, expected a list")
    return found


def family_shape(theirs, folder):
    """The GPTConfig of one of the families of model/convert/families.py."""
    from model.convert import families
    known = list(dict.fromkeys([*CLASSES, *families.DEFAULTS]))
    if str(theirs.get("model_type")) not in known:
        raise CheckpointError(f"{folder}: model_type {theirs.get('model_type')!r}: expected "
                              f"{', '.join(known)}")
    try:
        return families.shape_of(theirs)
    except UNLIKE as error:
        raise CheckpointError(f"{folder}/config.json: {type(error).__name__}: {error}") from None


def is_plain(c):
    """Whether the heads and rotations of a Llama or Qwen3 are those of a GPT."""
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    return (rope.get("rope_type", rope.get("type", "default")) == "default"
            and (c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"])
            * c["num_attention_heads"] == c["hidden_size"])


def gpt2_shape(c, kind, wrong):
    act = c.get("activation_function", "gelu_new")
    if act not in GELUS:
        wrong.append(f"activation_function: {act!r}")
    return GPTConfig(
        block_size=c["n_positions"], vocab_size=c["vocab_size"], n_layer=c["n_layer"],
        n_head=c["n_head"], n_embd=c["n_embd"], n_hidden=c.get("n_inner"), bias=True, norm="layer",
        norm_eps=c.get("layer_norm_epsilon", 1e-5), pos="learned", mlp=GELUS.get(act, "gelu"),
        tie_weights=c.get("tie_word_embeddings", True))


def llama_shape(c, kind, wrong):
    heads, width = c["num_attention_heads"], c["hidden_size"]
    if (c.get("head_dim") or width // heads) * heads != width:  # of experts
        wrong.append(f"head_dim: {c['head_dim']} (here it is hidden_size / heads)")
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        wrong.append(f"rope_type: {rope.get('rope_type', rope.get('type'))!r}")
    if rope.get("partial_rotary_factor", c.get("partial_rotary_factor", 1)) != 1:
        wrong.append("partial_rotary_factor")
    args = dict(
        block_size=c["max_position_embeddings"], vocab_size=c["vocab_size"], n_embd=width,
        n_layer=c["num_hidden_layers"], n_head=heads, n_hidden=c["intermediate_size"],
        n_kv_head=c.get("num_key_value_heads"), norm_eps=c.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta", c.get("rope_theta", 10000.0))),
        tie_weights=c.get("tie_word_embeddings", False), qk_norm=kind.startswith("qwen3"))
    if kind not in ("qwen3_moe", "mixtral"):
        return GPTConfig(**args)
    from model.moe import MoEConfig
    mixtral = kind == "mixtral"
    if mixtral:  # which has no MLP beside the experts: what ours would be by default
        args["n_hidden"] *= c["num_experts_per_tok"]
    return MoEConfig(
        **args, n_experts=c["num_local_experts"] if "num_local_experts" in c else c["num_experts"],
        experts_per_token=c["num_experts_per_tok"], norm_topk_prob=c.get("norm_topk_prob", mixtral),
        expert_hidden=c["intermediate_size" if mixtral else "moe_intermediate_size"])
