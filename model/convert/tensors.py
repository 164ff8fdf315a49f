"""Convert names and layouts of tensors from `transformers` or nanoGPT to ours, and back.

One table, NAMES, is used in both directions. Shapes differ in few places: GPT-2 concatenates q, k,
v and transposes matrices, experts are separate tensors, our vocabulary is padded to a multiple of
128, and Gemma stores norms minus 1.
"""

import re

import torch
import torch.nn.functional as F

from train.base.errors import CheckpointError
from train.base.tensors import find_non_finite


def in_layers(prefix, parts):
    """Return {h.{}.OURS: PREFIX.{}.THEIRS} for `parts`, {OURS: THEIRS}: modules in a layer."""
    return {f"h.{{}}.{ours}": f"{prefix}.{{}}.{theirs}" for ours, theirs in parts.items()}


# Modules in a layer. {} is the number of an expert.
ATTENTION = {f"attn.{n}": f"self_attn.{n}_proj" for n in "qkvo"}
NORMS = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm"}
QK_NORM = {f"attn.{n}_norm": f"self_attn.{n}_norm" for n in "qk"}
OUT_NORM = {"attn.out_norm": "post_attention_layernorm",
            "mlp.out_norm": "post_feedforward_layernorm"}
MLP = {f"mlp.{n}": f"mlp.{n}_proj" for n in ("gate", "up", "down")}
EXPERTS = {"mlp.router": "mlp.gate", "mlp.gate.{}": "mlp.experts.{}.gate_proj",
           "mlp.up.{}": "mlp.experts.{}.up_proj", "mlp.down.{}": "mlp.experts.{}.down_proj"}
MIXTRAL_EXPERTS = {
    "mlp.router": "block_sparse_moe.gate", "mlp.gate.{}": "block_sparse_moe.experts.{}.w1",
    "mlp.up.{}": "block_sparse_moe.experts.{}.w3", "mlp.down.{}": "block_sparse_moe.experts.{}.w2"}


def like_llama(*parts):
    """Return the table in NAMES of a Llama-like model; parts: dicts {OURS: THEIRS} of a layer."""
    table = {"wte": "model.embed_tokens", "ln_f": "model.norm", "lm_head": "lm_head"}
    for part in (ATTENTION, *parts):
        table |= in_layers("model.layers", part)
    return table


LLAMA = like_llama(NORMS, MLP)
GPT2 = {"wte": "transformer.wte", "wpe": "transformer.wpe", "ln_f": "transformer.ln_f",
        "lm_head": "lm_head", **in_layers("transformer.h", {
            "ln_1": "ln_1", "ln_2": "ln_2", "attn.qkv": "attn.c_attn", "attn.o": "attn.c_proj",
            "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"})}
BERT = {"wte": "model.embeddings.word_embeddings", "wpe": "model.embeddings.position_embeddings",
        "token_type": "model.embeddings.token_type_embeddings",
        "h.0.ln_1": "model.embeddings.LayerNorm", **in_layers("model.encoder.layer", {
            "attn.q": "attention.self.query", "attn.k": "attention.self.key",
            "attn.v": "attention.self.value", "attn.o": "attention.output.dense",
            "ln_2": "attention.output.LayerNorm", "mlp.up": "intermediate.dense",
            "mlp.down": "output.dense", "out": "output.LayerNorm"})}
MODERNBERT = {"wte": "model.embeddings.tok_embeddings", "h.0.ln_1": "model.embeddings.norm",
              "ln_f": "model.final_norm", **in_layers("model.layers", {
                  "ln_1": "attn_norm", "ln_2": "mlp_norm", "attn.qkv": "attn.Wqkv",
                  "attn.o": "attn.Wo", "mlp.glu": "mlp.Wi", "mlp.down": "mlp.Wo"})}
# {model_type: {our module: module in transformers}}; {} is the number of a layer, a second {} the
# expert's.
NAMES = {"llama": LLAMA, "qwen2": LLAMA, "mistral": LLAMA, "smollm3": LLAMA,
         "qwen3": like_llama(NORMS, MLP, QK_NORM), "olmo2": like_llama(MLP, QK_NORM, OUT_NORM),
         "gemma3_text": like_llama(NORMS, MLP, QK_NORM, OUT_NORM,
                                   {"ln_2": "pre_feedforward_layernorm"}),
         "mixtral": like_llama(NORMS, MIXTRAL_EXPERTS),
         "qwen3_moe": like_llama(NORMS, EXPERTS, QK_NORM), "gpt2": GPT2, "nanogpt": GPT2,
         "bert": BERT, "roberta": BERT, "xlm-roberta": BERT, "modernbert": MODERNBERT}
# Buffers in old files, and the vision part of a multimodal model.
UNUSED = re.compile(r".*\.(attn\.(masked_)?bias|inv_freq)$|"
                    r"(model\.)?(vision_tower|multi_modal_projector)\.")
PREFIX = re.compile(r"^((model\.)?language_model|bert|roberta)\.")
# Encoders also have output layers, for which a classifier has others.
ENCODER_HEADS = re.compile(r"(cls|lm_head|head|decoder|classifier|qa_outputs|(\w+\.)?pooler)\.|"
                           r".*\.position_ids$")
CONCATENATED = {"attn.qkv": ("attn.q", "attn.k", "attn.v"), "mlp.glu": ("mlp.gate", "mlp.up")}
ROBERTA_POSITIONS = 2  # rows of the position embedding before that of the first token
EMBEDDINGS = ("wte.weight", "lm_head.weight")


def rename(name, table, known_only=True):
    """Return a tensor's name, MODULE.weight or MODULE.bias, with MODULE replaced by table[MODULE].

    {} in the table is a number, e.g. of a layer, which is kept. For an unknown MODULE, raises
    CheckpointError if known_only, otherwise returns `name`.
    """
    module, _, kind = name.rpartition(".")
    numbers = re.findall(r"(?<=\.)\d+(?=\.|$)", module)
    new = table.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "{}", module))
    if known_only and not (new and kind in ("weight", "bias")):
        raise CheckpointError(f"{name}: unknown to other programs, so there is no export")
    return f"{new.format(*numbers)}.{kind}" if new else name


# -----------------------------------------------------------------------------
# writing

def complete_weights(weights, shape, kind):
    """Return a new dict of weights, completed for an export, without padding of the vocabulary.

    Norms of queries and keys without weights get weights of ones. For "gpt2" and "nanogpt", q, k
    and v are concatenated as attn.qkv; for "gpt2", missing biases are zeros.
    """
    out = {n: t[:shape.vocab_size] if n in EMBEDDINGS else t for n, t in weights.items()}
    if shape.qk_norm and shape.qk_norm_type == "plain":  # ours have no weights
        out |= {f"h.{i}.attn.{part}_norm.weight": torch.ones(shape.head_dim)
                for i in range(shape.n_layer) for part in "qk"}
    if NAMES[kind] is GPT2:
        for name in [n for n in out if ".attn.q." in n]:
            parts = [out.pop(name.replace(".q.", f".{part}.")) for part in "qkv"]
            out[name.replace(".q.", ".qkv.")] = torch.cat(parts)
    if kind == "gpt2" and not shape.bias:
        out |= {n.removesuffix("weight") + "bias": torch.zeros(len(t)) for n, t in out.items()
                if n.startswith(("h.", "ln_f"))}
    return out


def convert_weights(weights, precision):
    """Return weights in the dtype named `precision`; CheckpointError for values too large."""
    weights = {n: t.to(getattr(torch, precision)) for n, t in weights.items()}
    if bad := find_non_finite(weights):
        raise CheckpointError(f"{bad} is too large for {precision}: --save_precision bfloat16")
    return weights


def write_weights(weights, shape, kind):
    """Return {name in transformers or nanoGPT: tensor} for an export, in the layout used there.

    kind: a key of NAMES, e.g. "llama". The layout has e.g. q, k, v concatenated, experts separate.
    Raises CheckpointError for a tensor that does not exist in that program.
    """
    out = {}
    for name, t in complete_weights(weights, shape, kind).items():
        if kind == "gpt2" and name.startswith("h.") and t.dim() == 2:
            t = t.t()  # (in, out)
        if kind == "gemma3_text" and t.dim() == 1:
            t = t.float() - 1
        if t.dim() == 3:  # the experts of a layer, (E, out, in)
            module = name.removesuffix(".weight")
            out |= {rename(f"{module}.{i}.weight", NAMES[kind]): expert
                    for i, expert in enumerate(t)}
        else:
            out[rename(name, NAMES[kind])] = t
    return out


# -----------------------------------------------------------------------------
# reading

def read_weights(tensors, kind, path):
    """Return {name in this program: tensor} for the weights of another program.

    tensors: {name in transformers or nanoGPT: tensor}. kind: a key of NAMES. path: for messages.
    q, k, v become separate, and the vocabulary is padded with zeros to a multiple of 128 rows.
    Buffers, the output layers of encoders and the vision part of Gemma 3 are left out. Unknown
    names are kept, and begin with "lm_head.", "model." or, for GPT-2 and nanoGPT, "transformer.".
    Raises CheckpointError for shapes that cannot be converted and some missing tensors, e.g.
    experts; check_complete finds all.
    """
    names = {theirs: ours for ours, theirs in NAMES[kind].items()}
    root = "transformer." if NAMES[kind] is GPT2 else "model."
    out = {}
    try:
        for name, t in tensors.items():
            if UNUSED.match(name) or "bert" in kind and ENCODER_HEADS.match(name):
                continue
            name = PREFIX.sub("", name)
            name = name.replace(".gamma", ".weight").replace(".beta", ".bias")  # in old files
            if not name.startswith(("lm_head.", root)):
                name = root + name
            name = rename(name, names, known_only=False)
            if kind == "gpt2" and name.startswith("h.") and t.dim() == 2:
                t = t.t()  # of (in, out)
            out[name] = t.contiguous()
        for whole, parts in CONCATENATED.items():
            for name in [n for n in out if f".{whole}." in n]:
                pieces = out.pop(name).chunk(len(parts))
                out |= {name.replace(whole, part): t for part, t in zip(parts, pieces)}
        out = stack_experts(out)
        if NAMES[kind] is BERT:
            out = fold_bert(out, "roberta" in kind)
        for name in EMBEDDINGS:
            if name in out:
                out[name] = F.pad(out[name], (0, 0, 0, -len(out[name]) % 128))
    except (RuntimeError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path}: its tensors do not have the shapes and numbers of their "
                              f"names: {error}") from None
    if kind == "gemma3_text":
        out = {n: t.float() + 1 if t.dim() == 1 else t for n, t in out.items()}
    return out


def fold_bert(weights, is_roberta):
    """Return a new dict with the weights of a BERT, without parts that a GPTConfig lacks.

    The embedding of the first segment is added to the position embedding. The norm after each layer
    ("out") becomes that before the next layer, or the final norm. is_roberta: remove the position
    rows that RoBERTa does not use. Raises KeyError if a tensor is missing.
    """
    out = {n: t for n, t in weights.items() if not n.startswith("token_type") and ".out." not in n}
    first = ROBERTA_POSITIONS if is_roberta else 0
    out["wpe.weight"] = out["wpe.weight"][first:] + weights["token_type.weight"][0]
    for name in weights.keys() - out.keys() - {"token_type.weight"}:
        _, layer, _, part = name.split(".")
        after = int(layer) + 1
        norm = f"h.{after}.ln_1" if f"h.{after}.out.weight" in weights else "ln_f"
        out[f"{norm}.{part}"] = weights[name]
    return out


def stack_experts(weights):
    """Return weights with a layer's experts stacked, (E, out, in); KeyError if one is missing."""
    out = {}
    experts = {}
    for name, t in weights.items():
        if match := re.fullmatch(r"(h\.\d+\.mlp\.\w+)\.(\d+)\.weight", name):
            experts.setdefault(f"{match[1]}.weight", {})[int(match[2])] = t
        else:
            out[name] = t
    return out | {name: torch.stack([stack[i] for i in range(len(stack))])
                  for name, stack in experts.items()}
