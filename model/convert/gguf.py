"""Write a model as one GGUF file, for llama.cpp, Ollama and LM Studio: weights, tokenizer, chat
template.

Uses the package gguf. Options that llama.cpp would compute differently are refused by name;
llama.cpp/src/models defines how each architecture is read.
"""

import json
import os
import re

import torch

from data.tokenizer_hf import ANY_CHARACTER, ANY_TEXT, GPT2_PATTERN, pattern_of, tokenizer_json
from model.convert.families import FAMILIES
from model.convert.tensors import rename, strip_padding, write_gpt2
from model.core.ops import rope_frequencies
from train.base.errors import CheckpointError, require
from train.base.files import atomic_write

ARCHITECTURES = {"gpt2": "gpt2", "llama": "llama", "mistral": "llama", "mixtral": "llama",
                 "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "olmo2": "olmo2",
                 "gemma3_text": "gemma3", "smollm3": "smollm3"}
INTERLEAVED = ("llama", "smollm3")  # architectures that rotate neighbours; we rotate halves
NAMES = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "lm_head": "output",
         "h.{}.ln_1": "blk.{}.attn_norm", "h.{}.ln_2": "blk.{}.ffn_norm",
         "h.{}.attn.o": "blk.{}.attn_output", "h.{}.attn.out_norm": "blk.{}.post_attention_norm",
         "h.{}.mlp.out_norm": "blk.{}.post_ffw_norm", "h.{}.mlp.router": "blk.{}.ffn_gate_inp",
         **{f"h.{{}}.attn.{n}": f"blk.{{}}.attn_{n}" for n in ("q", "k", "v", "qkv", "q_norm",
                                                               "k_norm")},
         **{f"h.{{}}.mlp.{n}": f"blk.{{}}.ffn_{n}" for n in ("gate", "up", "down")}}
# llama.cpp's names of the patterns that split text before byte pairs are merged. With Llama 3's, a
# piece that is a token is not split; dbrx's, otherwise the same, always merges pairs.
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
PUNCTUATION = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {GPT2_PATTERN: "gpt-2", CONTRACTIONS + r"\p{N}" + PUNCTUATION: "qwen2",
            CONTRACTIONS + r"\p{N}{1,3}" + PUNCTUATION: "llama-bpe"}
# Types of tokens.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def export_gguf(source, kind, to, precision):
    """Write the Source, with the model_type `kind`, to the file `to`; return a description.

    precision: of matrices, float32, float16, bfloat16 or q8_0. CheckpointError, DataError.
    """
    gguf = require("gguf", f"--to {to}")
    arch = ARCHITECTURES[kind]
    tensors = gguf_tensors(source.weights, source.shape, arch)
    with atomic_write(to) as file:  # the writer needs a path
        writer = gguf.GGUFWriter(None, arch)
        write_shape(writer, source, arch, FAMILIES[kind].experts)
        if source.tokenizer is None:
            writer.add_tokenizer_model("none")
        else:
            write_tokenizer(writer, source)
        for name, t in tensors.items():
            dtype = tensor_dtype(gguf, name, t, precision)
            writer.add_tensor(name, gguf.quants.quantize(t.float().numpy(), dtype), raw_dtype=dtype)
        writer.write_header_to_file(file.name)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    print(modelfile(source, to))
    return f"{len(tensors)} tensors of {arch}" + ("" if source.tokenizer else
                                                  ", without a tokenizer")


def tensor_dtype(gguf, name, t, precision):
    """Return the GGML type of a tensor: vectors, routers and odd widths stay in float32."""
    types = gguf.GGMLQuantizationType
    small = t.dim() < 2 or re.search("position_embd|ffn_gate_inp", name)
    if small or precision == "q8_0" and t.size(-1) % 32:
        return types.F32
    return dict(float32=types.F32, float16=types.F16, bfloat16=types.BF16,
                q8_0=types.Q8_0)[precision]


# -----------------------------------------------------------------------------
# weights

def gguf_tensors(weights, c, arch):
    """Return {llama.cpp's name: tensor} of {our name: tensor}."""
    weights = strip_padding(weights, c)
    if arch in INTERLEAVED:
        weights = {n: interleave(t, c.head_dim) if re.search(r"\.attn\.[qk]\.", n) else t
                   for n, t in weights.items()}
    if arch == "gpt2":
        weights = write_gpt2(weights, c)
    if arch == "olmo2" and c.tie_weights:  # llama.cpp has no tied OLMo 2
        weights |= {"lm_head.weight": weights["wte.weight"]}
    out = {}
    for name, t in weights.items():
        new = rename(name, NAMES)
        out[new.replace(".weight", "_exps.weight") if t.dim() == 3 else new] = t.contiguous()
    if c.qk_norm and c.qk_norm_type == "plain":  # ours has no weights
        out |= {f"blk.{i}.attn_{part}_norm.weight": torch.ones(c.head_dim)
                for i in range(c.n_layer) for part in "qk"}
    if len(c.rope_factors) == 4:  # Llama 3
        out["rope_freqs.weight"] = (rope_frequencies(c.head_dim, c.rope_theta)
                                    / rope_frequencies(c.head_dim, c.rope_theta, c.rope_factors))
    return out


def interleave(t, head_dim):
    """Return the rows of a query or key projection with the halves of each head interleaved."""
    return t.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def write_shape(writer, source, arch, experts):
    """Write the shape, as llama.cpp reads it. CheckpointError for unsupported options."""
    c = source.shape
    check(source, arch)
    length = c.max_positions or c.block_size
    if c.window and arch == "gemma3":
        writer.add_sliding_window(c.window)
    elif c.window:  # no windows in llama.cpp: only texts that fit into one are computed the same
        length = min(length, c.window)
    writer.add_context_length(length)
    for name, value in (("name", os.path.basename(os.path.abspath(source.path))),
                        ("vocab_size", c.vocab_size), ("embedding_length", c.n_embd),
                        ("block_count", c.n_layer),
                        ("feed_forward_length",
                         c.expert_hidden if experts and arch == "llama" else c.n_hidden),
                        ("head_count", c.n_head), ("head_count_kv", c.n_kv_head)):
        getattr(writer, f"add_{name}")(value)
    if arch == "gpt2":
        writer.add_layer_norm_eps(c.norm_eps)
        return
    writer.add_layer_norm_rms_eps(c.norm_eps)
    for name in ("key_length", "value_length", "rope_dimension_count"):
        getattr(writer, f"add_{name}")(c.head_dim)
    writer.add_rope_freq_base(c.rope_theta)
    if len(c.rope_factors) == 1:
        writer.add_string(f"{arch}.rope.scaling.type", "linear")
        writer.add_rope_scaling_factor(c.rope_factors[0])
    if experts:
        writer.add_expert_count(c.n_experts)
        writer.add_expert_used_count(c.experts_per_token)
        writer.add_expert_feed_forward_length(c.expert_hidden)


def check(source, arch):
    """CheckpointError if llama.cpp's `arch` has other fixed values than the model."""
    c, wrong = source.shape, {}
    letters = [c.layer_type(i) for i in range(c.n_layer)]
    if arch == "gpt2" and c.mlp != "gelu":
        wrong["mlp"] = c.mlp
    if arch == "qwen3moe" and not c.norm_topk_prob:
        wrong["norm_topk_prob"] = False
    if len(c.rope_factors) == 4 and arch != "llama":
        wrong["rope_type"] = "llama3"
    if arch == "olmo2" and c.head_dim * c.n_head != c.n_embd:
        wrong["head_dim"] = c.head_dim
    if arch == "smollm3" and any(x.isupper() != bool((i + 1) % 4) for i, x in enumerate(letters)):
        wrong["no_rope_layers"] = [int(x.isupper()) for x in letters]
    if arch == "gemma3":
        if any((x == "W") != bool((i + 1) % 6) for i, x in enumerate(letters)):
            wrong["layer_types"] = "not a full one in six"
        if "W" in letters and c.window_rope_theta != 10000.0:
            wrong["rope_local_base_freq"] = c.window_rope_theta
        head_dim = c.n_embd // c.n_head if c.n_layer == 62 else c.head_dim
        if abs(c.score_scale - (c.head_dim / head_dim) ** 0.5) > 1e-6:
            wrong["query_pre_attn_scalar"] = c.head_dim / c.score_scale ** 2
    if wrong:
        raise CheckpointError(f"{source.path}: not supported by llama.cpp's {arch}: "
                              + ", ".join(f"{k}: {v}" for k, v in wrong.items()))


# -----------------------------------------------------------------------------
# tokenizer and chat

def write_tokenizer(writer, source):
    """Write tokens, token types, merges, special tokens and the chat template. CheckpointError."""
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
            kinds[token["id"]] = CONTROL if token.get("special") else USER_DEFINED
    if unknown := model.get("unk_token"):
        kinds[model["vocab"][unknown]] = UNKNOWN
        writer.add_unk_token_id(model["vocab"][unknown])
    if model.get("byte_fallback"):  # as SentencePiece's: earlier merges have higher scores
        order = {pair.replace(" ", ""): -float(n) for n, pair in reversed([*enumerate(merges)])}
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([order.get(token, 0.0) for token in tokens])
        steps = json.dumps([content.get("normalizer"), content.get("pre_tokenizer")])
        writer.add_add_space_prefix(bool(re.search(r'"Prepend"|"(first|always)"', steps)))
        writer.add_remove_extra_whitespaces(False)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pattern_name(content, model, source.path))
        # The list must not be empty; this merge makes no token, so it changes nothing.
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


def pattern_name(content, model, path):
    """Return llama.cpp's name of how a tokenizer.json splits text. CheckpointError without one."""
    splitter = content["pre_tokenizer"]
    parts = splitter.get("pretokenizers", [splitter])
    if [p["type"] for p in parts] == ["Digits", "ByteLevel"] and parts[0]["individual_digits"]:
        return "smollm"
    pattern = pattern_of(splitter)
    if pattern in (ANY_CHARACTER, ANY_TEXT) and not model["merges"]:
        return "gpt-2"  # a byte is a token
    name = PATTERNS.get(pattern)
    if name is None:
        raise CheckpointError(f"{path}: llama.cpp has no name for how its tokenizer splits text, "
                              f"by {pattern or splitter!s:.200}")
    return "dbrx" if name == "llama-bpe" and not model.get("ignore_merges") else name


def modelfile(source, to):
    """Return the Modelfile that Ollama needs in addition to the file."""
    lines, template = [f"FROM ./{os.path.basename(to)}"], source.template
    if template:
        lines.append(f'TEMPLATE """{template.to_ollama()}"""')
        lines += [f"PARAMETER stop {json.dumps(text)}" for text in dict.fromkeys(
            source.tokenizer.decode([i]) for i in template.end_ids(source.tokenizer))]
    return "\n".join(["Modelfile, for `ollama create NAME -f Modelfile`:", *lines, ""])

