"""A model as one GGUF file, for llama.cpp, Ollama and LM Studio: weights, tokenizer, chat template.

By the package gguf. What llama.cpp would compute otherwise is refused by name; how it reads each
architecture stands in its src/models.
"""

import json
import os
import re

import torch

from data.tokenizer_hf import (
    ANY_CHARACTER,
    ANY_TEXT,
    GPT2_PATTERN,
    pattern_of,
    tokenizer_json,
)
from model.convert.foreign import rename
from train.base.errors import CheckpointError
from train.base.files import atomic_write

ARCHITECTURES = {"gpt2": "gpt2", "llama": "llama", "mistral": "llama", "mixtral": "llama",
                 "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "olmo2": "olmo2",
                 "gemma3_text": "gemma3", "smollm3": "smollm3"}
PAIRS = ("llama", "smollm3")  # rotate neighbours, where we rotate halves of a head
NAMES = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "lm_head": "output",
         "h.{}.ln_1": "blk.{}.attn_norm", "h.{}.ln_2": "blk.{}.ffn_norm",
         "h.{}.attn.o": "blk.{}.attn_output", "h.{}.attn.out_norm": "blk.{}.post_attention_norm",
         "h.{}.mlp.out_norm": "blk.{}.post_ffw_norm", "h.{}.mlp.router": "blk.{}.ffn_gate_inp",
         **{f"h.{{}}.attn.{n}": f"blk.{{}}.attn_{n}" for n in ("q", "k", "v", "qkv", "q_norm",
                                                               "k_norm")},
         **{f"h.{{}}.mlp.{n}": f"blk.{{}}.ffn_{n}" for n in ("gate", "up", "down")}}
# What llama.cpp calls the ways in which text is split before pairs of bytes are joined. Llama 3's
# takes a piece that is a token as a whole; dbrx's, the same else, joins pairs even so.
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {GPT2_PATTERN: "gpt-2", CONTRACTIONS + r"\p{N}" + REST: "qwen2",
          CONTRACTIONS + r"\p{N}{1,3}" + REST: "llama-bpe"}
NORMAL, UNKNOWN, CONTROL, OWN, UNUSED, BYTE = range(1, 7)  # kinds of tokens


def export_gguf(source, weights, to, config, precision):
    """Write the Source with these `weights`, of a family with that config.json, to the file `to`;
    what it is, in words. precision: of weights with two dimensions, float32, float16, bfloat16 or
    q8_0. CheckpointError, DataError."""
    try:
        import gguf
    except ImportError:
        raise CheckpointError(f"--to {to}: needs gguf: pip install gguf") from None
    arch = ARCHITECTURES[config["model_type"]]
    tensors, tokenizer = tensors_of(source.shape, weights, arch), source.tokenizer
    with atomic_write(to) as file:  # the writer opens names, and wants the last
        writer = gguf.GGUFWriter(None, arch)
        describe(writer, source, arch, config)
        if tokenizer is None:
            writer.add_tokenizer_model("none")
        else:
            write_tokenizer(writer, source)
        for name, t in tensors.items():
            kind = kind_of(gguf, name, t, precision)
            writer.add_tensor(name, gguf.quants.quantize(t.float().numpy(), kind), raw_dtype=kind)
        writer.write_header_to_file(file.name)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    print(modelfile(source, to))
    return f"{len(tensors)} tensors of {arch}" + ("" if tokenizer else ", without a tokenizer")


def kind_of(gguf, name, t, precision):
    """How a tensor is kept."""
    kinds = gguf.GGMLQuantizationType
    small = t.dim() < 2 or re.search("position_embd|ffn_gate_inp", name)
    if small or precision == "q8_0" and t.size(-1) % 32:
        return kinds.F32
    return dict(float32=kinds.F32, float16=kinds.F16, bfloat16=kinds.BF16,
                q8_0=kinds.Q8_0)[precision]


# -----------------------------------------------------------------------------
# weights

def tensors_of(c, weights, arch):
    """{llama.cpp's name: tensor} of `weights` by our names, a GPT-2's q, k, v below each other."""
    if arch in PAIRS:
        weights = {n: t if not re.search(r"\.attn\.[qk]\.", n) else t.unflatten(
            0, (-1, 2, c.head_dim // 2)).transpose(1, 2).flatten(0, 2) for n, t in weights.items()}
    if arch == "gpt2":
        weights |= {n.removesuffix("weight") + "bias": torch.zeros(len(t)) for n, t in
                    weights.items() if n.startswith(("h.", "ln_f")) and not c.bias}
    if arch == "olmo2" and c.tie_weights:  # which it has apart
        weights |= {"lm_head.weight": weights["wte.weight"]}
    out = {}
    for name, t in weights.items():
        new = rename(name, NAMES)
        out[new.replace(".weight", "_exps.weight") if t.dim() == 3 else new] = t.contiguous()
    for i in range(c.n_layer if c.qk_norm else 0):  # ours have none
        out |= {f"blk.{i}.attn_{part}_norm.weight": torch.ones(c.head_dim) for part in "qk"}
    if c.other and c.other.ropes[0][2] is not None:  # Llama 3
        from model.convert.families import frequencies
        rope = c.other.ropes[0]
        out["rope_freqs.weight"] = (frequencies((rope[0], 1.0, None, None, None), c.head_dim, "cpu")
                                    / frequencies(rope, c.head_dim, "cpu"))
    return out


def describe(writer, source, arch, config):
    """The shape, as llama.cpp reads it. CheckpointError for what it would compute otherwise."""
    c = source.shape
    check(source, arch)
    experts = hasattr(c, "n_experts")
    length = config.get("max_position_embeddings", config.get("n_positions"))
    windows = [w for w, _ in c.other.kinds if w] if c.other else []
    if arch == "gemma3":
        writer.add_sliding_window(windows[0])
    writer.add_context_length(min([length, *windows]) if arch != "gemma3" else length)
    hidden = c.expert_hidden if experts and arch == "llama" else c.n_hidden
    for name, value in (("name", os.path.basename(os.path.abspath(source.path))),
                        ("vocab_size", c.vocab_size), ("embedding_length", c.n_embd),
                        ("block_count", c.n_layer), ("feed_forward_length", hidden),
                        ("head_count", c.n_head), ("head_count_kv", c.n_kv_head)):
        getattr(writer, f"add_{name}")(value)
    if arch == "gpt2":
        return writer.add_layer_norm_eps(c.norm_eps)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    for name in ("key_length", "value_length", "rope_dimension_count"):
        getattr(writer, f"add_{name}")(c.head_dim)
    theta, factor, low, *_ = full_rope(c)
    writer.add_rope_freq_base(theta)
    if factor != 1 and low is None:
        writer.add_string(f"{arch}.rope.scaling.type", "linear")
        writer.add_rope_scaling_factor(factor)
    if experts:
        writer.add_expert_count(c.n_experts)
        writer.add_expert_used_count(c.experts_per_token)
        writer.add_expert_feed_forward_length(c.expert_hidden)
    return None


def full_rope(c):
    """The rope of the layers without a window."""
    if not c.other:
        return c.rope_theta, 1.0, None, None, None
    return next((rope for window, rope in c.other.kinds if rope and not window), c.other.ropes[0])


def check(source, arch):
    """CheckpointError where llama.cpp's `arch` knows only other values."""
    c, wrong = source.shape, {}
    f = c.other
    if arch == "gpt2" and c.mlp != "gelu":
        wrong["mlp"] = c.mlp
    if arch == "qwen3moe" and not c.norm_topk_prob:
        wrong["norm_topk_prob"] = False
    if f:
        each = [f.kinds[i] for i in f.layers]
        if full_rope(c)[2] is not None and arch != "llama":
            wrong["rope_type"] = "llama3"
        if arch == "olmo2" and f.head_dim * c.n_head != c.n_embd:
            wrong["head_dim"] = f.head_dim
        if arch == "smollm3" and any(bool(r) != bool((i + 1) % 4) for i, (_, r) in enumerate(each)):
            wrong["no_rope_layers"] = [int(bool(rope)) for _, rope in each]
        if arch == "gemma3":
            if any(bool(w) != bool((i + 1) % 6) for i, (w, _) in enumerate(each)):
                wrong["layer_types"] = "not a full one in six"
            if any(w and rope != (10000.0, 1.0, None, None, None) for w, rope in each):
                wrong["rope_local_base_freq"] = each[0][1][:2]
            there = c.n_embd // c.n_head if c.n_layer == 62 else c.head_dim
            if abs(f.score_scale - (c.head_dim / there) ** 0.5) > 1e-6:
                wrong["query_pre_attn_scalar"] = c.head_dim / f.score_scale ** 2
    if wrong:
        raise CheckpointError(f"{source.path}: llama.cpp's {arch} knows no "
                              + ", ".join(f"{k}: {v}" for k, v in wrong.items()))


# -----------------------------------------------------------------------------
# tokenizer and chat

def write_tokenizer(writer, source):
    """Tokens, their kinds, how they are joined, special ones, chat template. CheckpointError."""
    tokenizer, template, rows = source.tokenizer, source.template, source.shape.vocab_size
    if tokenizer.eot_token is None:
        raise CheckpointError(f"{source.path}: a {tokenizer.kind} tokenizer has no end of text, "
                              "which llama.cpp needs")
    content = tokenizer_json(tokenizer)
    model, added = content["model"], content["added_tokens"]
    if model["type"] != "BPE":
        raise CheckpointError(f"{source.path}: its tokenizer is of type {model['type']}, expected "
                              "BPE")
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    tokens, kinds = [f"[PAD{i}]" for i in range(rows)], [UNUSED] * rows
    for text, i in model["vocab"].items():
        tokens[i], kinds[i] = text, BYTE if re.fullmatch("<0x[0-9A-F]{2}>", text) else NORMAL
    for token in added:
        if token["id"] < rows:
            tokens[token["id"]] = token["content"]
            kinds[token["id"]] = CONTROL if token.get("special") else OWN
    if unknown := model.get("unk_token"):
        kinds[model["vocab"][unknown]] = UNKNOWN
        writer.add_unk_token_id(model["vocab"][unknown])
    if model.get("byte_fallback"):  # as SentencePiece's: what was joined first counts most
        order = {pair.replace(" ", ""): -float(n) for n, pair in reversed([*enumerate(merges)])}
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([order.get(token, 0.0) for token in tokens])
        before = json.dumps([content.get("normalizer"), content.get("pre_tokenizer")])
        writer.add_add_space_prefix(bool(re.search(r'"Prepend"|"(first|always)"', before)))
        writer.add_remove_extra_whitespaces(False)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(split_name(content, model, source.path))
        # None at all it does not take; this one leads to no token, and so changes nothing.
        writer.add_token_merges(merges or [f"{tokens[0]} {tokens[0]}"])
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    ends = [tokenizer.eot_token]
    ends += [i for i in (template.ends if template else ()) if i != tokenizer.eot_token]
    writer.add_eos_token_id(ends[0])
    if len(ends) > 1:
        writer.add_uint32("tokenizer.ggml.eot_token_id", ends[-1])
    starts = {t["content"]: t["id"] for t in added}.get(
        template and template.special_tokens.get("bos_token"))
    writer.add_bos_token_id(ends[0] if starts is None else starts)
    writer.add_add_bos_token(bool(template and template.implicit_start))
    if template:
        writer.add_chat_template(template.to_jinja())


def split_name(content, model, path):
    """llama.cpp's name for how a tokenizer.json splits text. CheckpointError where it has none."""
    before = content["pre_tokenizer"]
    parts = before.get("pretokenizers", [before])
    if [p["type"] for p in parts] == ["Digits", "ByteLevel"] and parts[0]["individual_digits"]:
        return "smollm"
    pattern = pattern_of(before, path)
    if pattern in (ANY_CHARACTER, ANY_TEXT) and not model["merges"]:
        return "gpt-2"  # a byte is a token
    name = SPLITS.get(pattern)
    if name is None:
        raise CheckpointError(f"{path}: llama.cpp has no name for how its tokenizer splits text, "
                              f"by {pattern:.200}")
    return "dbrx" if name == "llama-bpe" and not model.get("ignore_merges") else name


def modelfile(source, to):
    """What Ollama needs beside the file, in its own words."""
    lines, template = [f"FROM ./{os.path.basename(to)}"], source.template
    if template:
        lines.append(f'TEMPLATE """{template.to_ollama()}"""')
        lines += [f"PARAMETER stop {json.dumps(text)}" for text in dict.fromkeys(
            source.tokenizer.decode([i]) for i in template.end_ids(source.tokenizer))]
    return "\n".join(["Modelfile, for `ollama create NAME -f Modelfile`:", *lines, ""])

