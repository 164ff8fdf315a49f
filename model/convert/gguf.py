"""Write a model, with tokenizer and chat template, as one GGUF file for llama.cpp.

Uses the package gguf. Options that llama.cpp would compute differently are refused by name;
llama.cpp/src/models defines how each architecture is read.
"""

import re

from data.hub import model_name
from data.tokenizer_hf import GPT2_PATTERN, split_at, tokenizer_json
from model.convert.families import FAMILIES, find_family, list_layers, mismatches, refuse
from model.convert.tensors import NAMES, complete_weights, rename
from model.core.ops import rope_frequencies
from train.base.errors import CheckpointError, require
from train.base.files import atomic_write

# {family: llama.cpp's architecture}.
ARCHITECTURES = dict(llama="llama", mistral="llama", qwen2="qwen2", qwen3="qwen3", gpt2="gpt2")
# Keys of config.json that llama.cpp does not read, and the value that it computes with.
FIXED = dict(gpt2=dict(activation_function="gelu_new"))
ALTERNATIVE = "export a folder instead, for llama.cpp's convert_hf_to_gguf.py"
DTYPES = dict(float32="F32", float16="F16", bfloat16="BF16")
# llama.cpp's names of the patterns that split text before byte pairs are merged. With Llama 3's, a
# piece that is a token is not split; dbrx's, otherwise the same, always merges pairs.
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
PUNCTUATION = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {GPT2_PATTERN: "gpt-2", CONTRACTIONS + r"\p{N}" + PUNCTUATION: "qwen2",
            CONTRACTIONS + r"\p{N}{1,3}" + PUNCTUATION: "llama-bpe"}


def export_gguf(source, to, precision):
    """Write a Source, with tokenizer and chat template if any, to the GGUF file `to`.

    precision: "float32", "float16" or "bfloat16", for matrices; other tensors are float32.
    Returns a description. Raises CheckpointError for models, options and tokenizers that llama.cpp
    does not have, SetupError without the package gguf.
    """
    gguf = require("gguf", f"--to {to}")
    kind = find_family(source.shape, source.path)
    if kind not in ARCHITECTURES:
        raise CheckpointError(f"{source.path}: a {kind} cannot be written; {ALTERNATIVE}")
    arch = ARCHITECTURES[kind]
    wrong = mismatches(source.shape, FAMILIES[kind], FIXED.get(kind, {}))
    if len(source.shape.rope_factors) not in ((0, 4) if arch == "llama" else (0,)):
        wrong.append(f"rope_scaling: {source.shape.rope_scaling} (there: none)")
    refuse(wrong, f"llama.cpp's {arch}", source.path)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], source.shape.n_layer)
    tensors = gguf_tensors(source.weights, source.shape, kind, arch, names)
    with atomic_write(to) as file:  # the writer needs a path
        writer = gguf.GGUFWriter(None, arch)
        write_shape(writer, source, arch)
        if source.tokenizer is None:
            writer.add_tokenizer_model("none")
        else:
            write_tokenizer(writer, source)
        for name, t in tensors.items():
            is_exact = t.dim() < 2 or name.startswith("position_embd")
            dtype = gguf.GGMLQuantizationType["F32" if is_exact else DTYPES[precision]]
            writer.add_tensor(name, gguf.quants.quantize(t.float().numpy(), dtype), raw_dtype=dtype)
        writer.write_header_to_file(file.name)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return f"{len(tensors)} tensors of {arch}"


# -----------------------------------------------------------------------------
# weights

def gguf_tensors(weights, c, kind, arch, names):
    """Return {name in llama.cpp: tensor}, in the layout of llama.cpp.

    weights: {name in this program: tensor}. c: the GPTConfig. kind: the model_type, a key of
    FAMILIES. arch: the architecture in llama.cpp. names: the package gguf's TensorNameMap.
    Raises CheckpointError for tensors that transformers does not have.
    """
    out = {}
    for name, t in complete_weights(weights, c, kind).items():
        if arch == "llama" and re.search(r"\.attn\.[qk]\.", name):  # it rotates neighbours
            t = t.unflatten(0, (-1, 2, c.head_dim // 2)).transpose(1, 2).flatten(0, 2)
        out[names.get_name(rename(name, NAMES[kind]), (".weight", ".bias"))] = t.contiguous()
    if len(c.rope_factors) == 4:  # Llama 3
        out["rope_freqs.weight"] = (rope_frequencies(c.head_dim, c.rope_theta)
                                    / rope_frequencies(c.head_dim, c.rope_theta, c.rope_factors))
    return out


def write_shape(writer, source, arch):
    """Write name, sizes and positions of a Source to `writer`, a GGUFWriter.

    arch: the architecture in llama.cpp, a part of the keys. The context length is at most that of a
    window, because llama.cpp does not compute windows.
    """
    c = source.shape
    # No windows in llama.cpp: only texts that fit into one are computed the same.
    windows = [c.window for letter in list_layers(c) if letter in "Ww"]
    values = dict(name=model_name(source.path), vocab_size=c.vocab_size,
                  context_length=min([c.full_context, *windows]), embedding_length=c.n_embd,
                  block_count=c.n_layer, feed_forward_length=c.n_hidden, head_count=c.n_head,
                  head_count_kv=c.n_kv_head, key_length=c.head_dim, value_length=c.head_dim)
    if arch == "gpt2":
        values["layer_norm_eps"] = c.norm_eps
    else:
        values |= dict(layer_norm_rms_eps=c.norm_eps, rope_dimension_count=c.head_dim,
                       rope_freq_base=c.rope_theta)
    for name, value in values.items():
        getattr(writer, f"add_{name}")(value)


# -----------------------------------------------------------------------------
# tokenizer and chat

def write_tokenizer(writer, source):
    """Write the tokenizer and chat template; CheckpointError for one that llama.cpp lacks."""
    from gguf import TokenType
    tokenizer = source.tokenizer
    template = source.template
    content = tokenizer_json(tokenizer)
    pattern = pattern_name(content)
    if pattern is None or tokenizer.eot_token is None:
        raise CheckpointError(f"{source.path}: its tokenizer cannot be written: expected byte "
                              f"pairs with an end of text and a known pattern; {ALTERNATIVE}")
    model = content["model"]
    added = content["added_tokens"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    entries = {i: (text, TokenType.NORMAL) for text, i in model["vocab"].items()}
    for token in added:
        kind = TokenType.CONTROL if token.get("special") else TokenType.USER_DEFINED
        entries[token["id"]] = (token["content"], kind)
    rows = range(source.shape.vocab_size)
    tokens, kinds = zip(*(entries.get(i, (f"[PAD{i}]", TokenType.UNUSED)) for i in rows))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pattern)
    # The list must not be empty; this merge makes no token, so it changes nothing.
    writer.add_token_merges(merges or [f"{tokens[0]} {tokens[0]}"])
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_eos_token_id(tokenizer.eot_token)
    if source.shape.pad_id is not None:
        writer.add_pad_token_id(source.shape.pad_id)
    starts = {t["content"]: t["id"] for t in added}
    writer.add_bos_token_id(starts.get(template and template.special_tokens.get("bos_token"),
                                       source.bos_id))
    writer.add_add_bos_token(bool(tokenizer.start or template and template.implicit_start))
    if template:
        writer.add_chat_template(template.jinja)
        if ends := [i for i in template.ends if i != tokenizer.eot_token]:
            writer.add_eot_token_id(ends[-1])


def pattern_name(content):
    """Return llama.cpp's name for how a tokenizer.json splits text, e.g. "llama-bpe", or `None`."""
    model = content["model"]
    splitter = content.get("pre_tokenizer") or {}
    *splits, last = splitter.get("pretokenizers", [splitter])
    if model["type"] != "BPE" or last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    normalizer = content.get("normalizer") or {}
    changes = {part.get("type") for part in normalizer.get("normalizers", [normalizer])}
    if changes - {None, "NFC"}:  # e.g. Lowercase; llama.cpp changes no text, NFC only a few
        return None
    if splits == [dict(type="Digits", individual_digits=True)]:
        return "smollm"
    uses_regex = last.get("use_regex", True)  # GPT-2's
    if not splits:  # without merges a byte is a token
        return "gpt-2" if uses_regex or not model["merges"] else None
    pattern = splits[0].get("pattern", {}).get("Regex")
    if splits != [split_at(pattern)] or uses_regex:
        return None
    name = PATTERNS.get(pattern)
    return "dbrx" if name == "llama-bpe" and not model.get("ignore_merges") else name
