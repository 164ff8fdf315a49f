"""Tensor names of `transformers` and nanoGPT, to and from our names: one table, used both ways.

Shapes differ in few places: GPT-2 concatenates q, k, v and transposes matrices, experts are
separate tensors, our vocabulary is padded to a multiple of 128, and Gemma stores norms minus 1.
"""

import re

import torch
import torch.nn.functional as F

from train.base.errors import CheckpointError

# {our module: module in transformers}; {} is the number of a layer, a second {} the expert's.
ATTENTION = {"wte": "model.embed_tokens", "ln_f": "model.norm", "lm_head": "lm_head",
             "h.{}.ln_1": "model.layers.{}.input_layernorm",
             "h.{}.ln_2": "model.layers.{}.post_attention_layernorm",
             **{f"h.{{}}.attn.{n}": f"model.layers.{{}}.self_attn.{n}_proj" for n in "qkvo"}}
LLAMA = ATTENTION | {f"h.{{}}.mlp.{n}": f"model.layers.{{}}.mlp.{n}_proj"
                     for n in ("gate", "up", "down")}
QK_NORM = {f"h.{{}}.attn.{n}_norm": f"model.layers.{{}}.self_attn.{n}_norm" for n in "qk"}
OUT_NORM = {"h.{}.attn.out_norm": "model.layers.{}.post_attention_layernorm",
            "h.{}.mlp.out_norm": "model.layers.{}.post_feedforward_layernorm"}
GEMMA3 = LLAMA | QK_NORM | OUT_NORM | {"h.{}.ln_2": "model.layers.{}.pre_feedforward_layernorm"}
OLMO2 = {k: v for k, v in (LLAMA | QK_NORM | OUT_NORM).items() if ".ln_" not in k}
QWEN3_MOE = ATTENTION | {"h.{}.mlp.router": "model.layers.{}.mlp.gate",
                         **{f"h.{{}}.mlp.{n}.{{}}": f"model.layers.{{}}.mlp.experts.{{}}.{n}_proj"
                            for n in ("gate", "up", "down")}}
MIXTRAL = ATTENTION | {"h.{}.mlp.router": "model.layers.{}.block_sparse_moe.gate",
                       **{f"h.{{}}.mlp.{ours}.{{}}":
                          f"model.layers.{{}}.block_sparse_moe.experts.{{}}.{theirs}"
                          for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))}}
GPT2 = {"wte": "transformer.wte", "wpe": "transformer.wpe", "ln_f": "transformer.ln_f",
        "lm_head": "lm_head", "h.{}.ln_1": "transformer.h.{}.ln_1",
        "h.{}.ln_2": "transformer.h.{}.ln_2",
        "h.{}.attn.qkv": "transformer.h.{}.attn.c_attn",  # q, k, v concatenated
        "h.{}.attn.o": "transformer.h.{}.attn.c_proj",
        "h.{}.mlp.up": "transformer.h.{}.mlp.c_fc", "h.{}.mlp.down": "transformer.h.{}.mlp.c_proj"}
NAMES = {"llama": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA | QK_NORM, "mistral": LLAMA,
         "gemma3_text": GEMMA3, "olmo2": OLMO2, "smollm3": LLAMA, "mixtral": MIXTRAL,
         "qwen3_moe": QWEN3_MOE | QK_NORM, "gpt2": GPT2}


def rename(name, table, known_only=True):
    """Return the tensor `name` with the module renamed by `table`. If `table` does not have it:
    CheckpointError, or unchanged unless known_only."""
    module, _, kind = name.rpartition(".")
    numbers = re.findall(r"(?<=\.)\d+(?=\.|$)", module)
    new = table.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "{}", module))
    if known_only and not (new and kind in ("weight", "bias")):
        raise CheckpointError(f"{name}: unknown to other programs; the model cannot be "
                              "exported")
    return f"{new.format(*numbers)}.{kind}" if new else name


def write_weights(weights, shape, kind):
    """Return {name in transformers: tensor} of {our name: tensor}."""
    weights = strip_padding(weights, shape)
    if kind == "gpt2":
        weights = {n: t.t() if n.startswith("h.") and t.dim() == 2 else t  # (in, out)
                   for n, t in write_gpt2(weights, shape).items()}
    weights = shift_norms(weights, kind, -1.0)
    if shape.qk_norm and shape.qk_norm_type == "plain":
        weights = weights | {f"h.{i}.attn.{part}_norm.weight": torch.ones(shape.head_dim)
                             for i in range(shape.n_layer) for part in "qk"}
    out = {}
    for name, t in weights.items():
        if t.dim() == 3:  # the experts of a layer, (E, out, in)
            module = name.removesuffix(".weight")
            out |= {rename(f"{module}.{i}.weight", NAMES[kind]): expert
                    for i, expert in enumerate(t)}
        else:
            out[rename(name, NAMES[kind])] = t
    return out


def read_weights(tensors, kind, path):
    """Return {our name: tensor} of {name in transformers: tensor}. Norms of queries and keys that
    are all 1 are left out: qk_norm_type plain computes the same."""
    names = {theirs: ours for ours, theirs in NAMES[kind].items()}
    weights = shift_norms(translate(tensors, names, path), kind, 1.0)
    norms = {n: t for n, t in weights.items() if re.search(r"attn\.[qk]_norm\.weight$", n)}
    if kind in ("qwen3", "qwen3_moe") and all(map(is_one, norms.values())):
        weights = {n: t for n, t in weights.items() if n not in norms}
    return weights


def read_bare_weights(tensors, path):
    """Return read_weights of tensors without a config.json, which have the names of any family."""
    names = {theirs: ours for table in (QWEN3_MOE, LLAMA, MIXTRAL, GPT2)
             for ours, theirs in table.items()}
    out = {}
    for name, t in tensors.items():
        if not re.search(r"self_attn\.[qk]_norm\.weight$", name):
            out[name] = t
        elif not is_one(t):
            raise CheckpointError(f"{path}: {name} is not all ones, and there is no config.json "
                                  "that describes its use")
    return translate(out, names, path)


def translate(tensors, names, path):
    """Return {name in model.gpt: tensor}: renamed, QKV split, experts stacked, vocabulary padded to
    a multiple of 128 rows, buffers dropped. Raises CheckpointError."""
    root = "transformer." if any("c_attn" in n for n in tensors) else "model."
    out = {}
    for name, t in tensors.items():
        if not re.search(r"\.attn\.(masked_)?bias$|\.inv_freq$", name):  # buffers of old files
            name = name if name.startswith(("lm_head.", root)) else root + name
            out[rename(name, names, known_only=False)] = t
    try:
        out = stack_experts(split_qkv(out), path)
        for name in ("wte.weight", "lm_head.weight"):
            if name in out and len(out[name]) % 128:  # our rows are padded to a multiple of it
                out[name] = F.pad(out[name], (0, 0, 0, -len(out[name]) % 128))
    except (RuntimeError, IndexError, TypeError) as error:
        raise CheckpointError(f"{path}: its tensors do not have the shapes of their names: {error}"
                              ) from None
    return out


def is_one(t):
    return bool((t == 1).all())


def shift_norms(weights, kind, by):
    """Return `weights` with Gemma's norms shifted: the files store norms minus 1."""
    if kind != "gemma3_text":
        return weights
    return {n: t.float() + by if t.dim() == 1 else t for n, t in weights.items()}


def strip_padding(weights, shape):
    """Return {our name: tensor} without the padding of the vocabulary."""
    return {n: t[:shape.vocab_size] if n in ("wte.weight", "lm_head.weight") else t
            for n, t in weights.items()}


def write_gpt2(weights, shape, zero_biases=True):
    """Return `weights` with the q, k, v of a layer concatenated, and zeros for missing biases."""
    out = {}
    for name, t in weights.items():
        if ".attn.q." in name:
            parts = [weights[name.replace(".q.", f".{part}.")] for part in "qkv"]
            out[name.replace(".q.", ".qkv.")] = torch.cat(parts)
        elif not re.search(r"\.attn\.[kv]\.", name):
            out[name] = t
    if zero_biases and not shape.bias:
        out |= {n.removesuffix("weight") + "bias": torch.zeros(len(t)) for n, t in out.items()
                if n.startswith(("h.", "ln_f"))}
    return out


def split_qkv(weights):
    """Return `weights` with separate q, k, v. GPT-2's matrices of transformers, (in, out), are
    transposed; nanoGPT's are not."""
    is_transposed = any(n.endswith("attn.qkv.weight") and t.size(0) < t.size(1)
                        for n, t in weights.items())
    out = {}
    for name, t in weights.items():
        if is_transposed and name.startswith("h.") and t.dim() == 2:
            t = t.t().contiguous()
        if ".attn.qkv." in name:
            out |= {name.replace("qkv", part): piece.contiguous()
                    for part, piece in zip("qkv", t.chunk(3))}
        else:
            out[name] = t
    return out


def stack_experts(weights, path):
    """Return `weights` with the experts of a layer as one tensor (E, out, in)."""
    out, experts = {}, {}
    for name, t in weights.items():
        if match := re.fullmatch(r"(h\.\d+\.mlp\.\w+)\.(\d+)\.weight", name):
            experts.setdefault(match[1], {})[int(match[2])] = t
        else:
            out[name] = t
    for name, stack in experts.items():
        if sorted(stack) != list(range(len(stack))):
            raise CheckpointError(f"{path}: experts of {name} are missing")
        out[f"{name}.weight"] = torch.stack([stack[i] for i in range(len(stack))])
    return out
