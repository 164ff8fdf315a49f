"""config.json of `transformers`, to and from our configuration: one table, used both ways.

A Family is a model_type. Reading gives the fields of a GPTConfig or MoEConfig. Writing finds the
family that computes the same, or raises CheckpointError with the options that it does not have: a
model is converted with the logits that it has, or not at all.
"""

import json
import math
from dataclasses import dataclass, field, fields

from train.base.errors import CheckpointError
from train.keys import GPTKeys

# -----------------------------------------------------------------------------
# keys of config.json, {our field: key}

KEYS = dict(n_embd="hidden_size", n_layer="num_hidden_layers", n_hidden="intermediate_size",
            n_head="num_attention_heads", n_kv_head="num_key_value_heads", head_dim="head_dim",
            mlp="hidden_act", max_positions="max_position_embeddings", norm_eps="rms_norm_eps",
            rope_theta="rope_theta", vocab_size="vocab_size", tie_weights="tie_word_embeddings")
GPT2_KEYS = dict(max_positions="n_positions", n_embd="n_embd", n_layer="n_layer", n_head="n_head",
                 n_hidden="n_inner", mlp="activation_function", norm_eps="layer_norm_epsilon",
                 vocab_size="vocab_size", tie_weights="tie_word_embeddings")
MIXTRAL_KEYS = KEYS | dict(expert_hidden="intermediate_size", n_experts="num_local_experts",
                           experts_per_token="num_experts_per_tok")
QWEN3_MOE_KEYS = KEYS | dict(n_experts="num_experts", experts_per_token="num_experts_per_tok",
                             expert_hidden="moe_intermediate_size", norm_topk_prob="norm_topk_prob")
DEFAULTS = dict(rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=False, head_dim=None,
                num_key_value_heads=None, hidden_act="silu")
INTEGERS = ("n_embd", "n_layer", "n_hidden", "n_head", "n_kv_head", "head_dim", "max_positions",
            "vocab_size", "n_experts", "experts_per_token", "expert_hidden")
# Options that change the logits, with the only value that can be computed here.
ONLY = dict(attention_bias=False, mlp_bias=False, decoder_sparse_step=1, mlp_only_layers=[],
            partial_rotary_factor=1, scale_attn_weights=True, reorder_and_upcast_attn=False,
            scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
# Keys that a strict family may have in addition. Any other key could change the logits, unless the
# value is null, false or empty.
USED = {*ONLY, "model_type", "hidden_activation", "rope_scaling", "rope_parameters",
        "rope_local_base_freq", "query_pre_attn_scalar", "sliding_window", "use_sliding_window",
        "max_window_layers", "layer_types", "sliding_window_pattern", "_sliding_window_pattern",
        "no_rope_layers", "no_rope_layer_interval"}
HARMLESS = {"architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path",
            "bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "initializer_range",
            "attention_dropout", "pretraining_tp", "cache_implementation", "unsloth_fixed",
            "unsloth_version", "_attn_implementation_autoset"}
# Our fields that a checkpoint's model_args have besides `family`.
SIZES = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "n_hidden", "n_kv_head",
         "norm_eps", "tie_weights")
# Our fields that a config.json has in a different form, or that change no logits.
FREE = {"block_size", "dropout", "bos_id", "eos_ids", "window", "layer_types", "rope_scaling"}
MAX_TOKENS = 4096  # default context of models with a longer one: a cache allocates all of it


@dataclass(frozen=True)
class Family:
    """A model_type: the class in `transformers`, the keys of config.json and what is implied.

    values: {our field: [values]} of these models, if not the default. defaults: the
    meaning of keys that are missing. layers: the letters that layer_types may have. constants:
    keys that are always written. strict: refuse unknown keys.
    """
    architecture: str
    keys: dict = field(default_factory=lambda: KEYS)
    values: dict = field(default_factory=dict)
    defaults: dict = field(default_factory=dict)
    layers: str = "F"
    uniform: bool = False  # all layers of one type
    activations: dict = field(default_factory=lambda: {"silu": "swiglu"})
    constants: dict = field(default_factory=dict)
    strict: bool = True
    experts: bool = False


NO_BIAS = dict(attention_bias=False, mlp_bias=False)
QK_NORMS = dict(qk_norm=[True], qk_norm_type=["plain", "head"])
FAMILIES = {
    "llama": Family("LlamaForCausalLM", constants=NO_BIAS, strict=False),
    "qwen2": Family("Qwen2ForCausalLM", values=dict(qkv_bias=[True]), layers="FW",
                    defaults=dict(sliding_window=4096, max_window_layers=28)),
    "qwen3": Family("Qwen3ForCausalLM", values=QK_NORMS, layers="FW",
                    defaults=dict(head_dim=128, sliding_window=4096, max_window_layers=28),
                    constants=NO_BIAS, strict=False),
    "mistral": Family("MistralForCausalLM", layers="FW", uniform=True,
                      defaults=dict(sliding_window=4096)),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", layers="FW", activations={"gelu_pytorch_tanh": "geglu"},
        values=dict(qk_norm=[True], qk_norm_type=["head"], norm_position=["both"]),
        defaults=dict(rope_theta=1e6, rope_local_base_freq=10000.0, tie_word_embeddings=True,
                      head_dim=256, query_pre_attn_scalar=256, sliding_window=4096,
                      sliding_window_pattern=6, hidden_act="gelu_pytorch_tanh")),
    "olmo2": Family("Olmo2ForCausalLM", defaults=dict(rms_norm_eps=1e-5), values=dict(
        qk_norm=[True], qk_norm_type=["all"], norm_position=["post"])),
    "smollm3": Family("SmolLM3ForCausalLM", layers="FfWw", constants=dict(pad_token_id=None),
                      defaults=dict(rope_theta=2e6, tie_word_embeddings=True,
                                    no_rope_layer_interval=4)),
    "mixtral": Family("MixtralForCausalLM", MIXTRAL_KEYS, dict(norm_topk_prob=[True]),
                      constants=NO_BIAS | dict(sliding_window=None), strict=False, experts=True,
                      layers="FW", uniform=True),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", QWEN3_MOE_KEYS, QK_NORMS,
                        defaults=dict(norm_topk_prob=False), strict=False, experts=True,
                        constants=NO_BIAS | dict(decoder_sparse_step=1, mlp_only_layers=[])),
    "gpt2": Family("GPT2LMHeadModel", GPT2_KEYS, strict=False,
                   values=dict(norm=["layer"], pos=["learned"], bias=[True, False]),
                   defaults=dict(n_inner=None, layer_norm_epsilon=1e-5, tie_word_embeddings=True,
                                 activation_function="gelu_new"),
                   activations={"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu",
                                "gelu": "gelu_exact"})}


def has_experts(shape):
    """Return whether `shape` is the MoEConfig of model/moe.py, an optional file."""
    return "n_experts" in {f.name for f in fields(shape)}


# -----------------------------------------------------------------------------
# reading a config.json

def read_config(c, path):
    """Return (model_type, {field: value} of a GPTConfig or MoEConfig) of a config.json, a dict.
    CheckpointError for unsupported options."""
    try:
        return read_fields(c)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError,
            RecursionError) as error:  # values of other types than expected
        raise CheckpointError(f"{path}: {type(error).__name__}: {error}") from None


def read_fields(given):
    kind = given.get("model_type") if isinstance(given, dict) else None
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(f"model_type {kind!r}: expected {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    c = DEFAULTS | family.defaults | given
    if kind == "qwen3_moe" and "num_local_experts" in c:  # the key in some files
        c["num_experts"] = c["num_local_experts"]
    check_integers(c, family)
    out = {ours: c[theirs] for ours, theirs in family.keys.items()}
    out |= {name: values[0] for name, values in family.values.items()}
    activation = c.get("hidden_activation") or out["mlp"]
    if activation not in family.activations:
        raise CheckpointError(f"{family.keys['mlp']}: {activation!r}, expected "
                              f"{' or '.join(family.activations)}")
    out["mlp"] = family.activations[activation]
    if kind == "gpt2":
        is_plain = True
    else:
        read_attention(c, kind, out)
        is_plain = (not out["rope_scaling"]
                    and out["n_head"] * (out["head_dim"] or 0) in (0, out["n_embd"]))
    is_strict = family.strict or not is_plain and not family.experts
    check_known(c, family, is_strict)
    if kind == "mixtral":  # no MLP besides the experts: the default of our width
        out["n_hidden"] *= out["experts_per_token"]
    # A context too long for memory is kept for exports only; block_size can be set.
    out["block_size"] = out["max_positions"]
    if is_strict:
        out["block_size"] = min(out["block_size"], MAX_TOKENS)
    if out["block_size"] == out["max_positions"]:
        out["max_positions"] = None
    end = c.get("eos_token_id")
    end = end if isinstance(end, list) else [] if end is None else [end]
    return kind, out | dict(bos_id=c.get("bos_token_id"), eos_ids=",".join(map(str, end)) or None)


def check_integers(c, family):
    """CheckpointError unless all sizes are integers above 0, or absent."""
    sizes = {key: c.get(key) for name, key in family.keys.items() if name in INTEGERS}
    if wrong := [f"{k}: {v!r}" for k, v in sorted(sizes.items())
                 if v is not None and not (type(v) is int and 0 < v < 2**31)]:
        raise CheckpointError(f"{', '.join(wrong)}: expected integers from 1 to {2**31 - 1:,}")
    if c[family.keys["n_layer"]] > 10_000:
        raise CheckpointError(f"{family.keys['n_layer']}: {c[family.keys['n_layer']]}, expected up "
                              "to 10,000")


def check_known(c, family, is_strict):
    """CheckpointError for options that would change the logits."""
    wrong = [f"{k}: {c[k]!r}" for k, only in ONLY.items() if c.get(k, only) != only]
    if is_strict:
        known = USED | HARMLESS | set(family.keys.values())
        wrong += [f"{k}: {c[k]!r}" for k in sorted(c.keys() - known) if c[k]]
    if wrong:
        raise CheckpointError(f"{', '.join(wrong)}: not supported")


def read_attention(c, kind, out):
    """Add the fields of heads, windows and rotary positions to `out`."""
    head_dim = out["head_dim"] or out["n_embd"] // out["n_head"]
    if head_dim % 2:
        raise CheckpointError(f"head_dim: {head_dim}, expected an even number")
    letters = read_layers(c, kind, out["n_layer"])
    period = next(p for p in range(1, len(letters) + 1)
                  if all(x == letters[i % p] for i, x in enumerate(letters)))
    out |= dict(layer_types=letters[:period], window=c["sliding_window"] if "W" in letters.upper()
                else None)
    given = c.get("rope_parameters") or c.get("rope_scaling") or {}
    full = local = given
    if any(isinstance(v, dict) for v in given.values()):
        full = given.get("full_attention") or {}
        local = given.get("sliding_attention") or {}
    elif "rope_local_base_freq" in c:
        local = dict(rope_theta=c["rope_local_base_freq"])
    out["rope_theta"], out["rope_scaling"] = read_rope(full, c["rope_theta"])
    theta, scaling = read_rope(local, c["rope_theta"])
    if "W" in letters and (theta, scaling) != (out["rope_theta"], out["rope_scaling"]):
        if scaling:
            raise CheckpointError(f"rope_type of layers with a window: {local!r}, expected default")
        out["window_rope_theta"] = theta
    if kind == "gemma3_text":
        out["embed_scale"] = out["n_embd"] ** 0.5
        out["score_scale"] = math.sqrt(head_dim / c["query_pre_attn_scalar"])


def read_layers(c, kind, n):
    """Return the letter of each layer, see the key layer_types."""
    types = c.get("layer_types")
    if types is None and kind == "gemma3_text":
        every = c.get("_sliding_window_pattern", c["sliding_window_pattern"])
        types = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(n)]
    elif types is None:
        has_windows = kind in ("mistral", "mixtral") or c.get("use_sliding_window")
        first = c.get("max_window_layers", 0) if has_windows else n
        types = ["full_attention" if i < first else "sliding_attention" for i in range(n)]
    if (not isinstance(types, list) or len(types) != n
            or set(types) - {"full_attention", "sliding_attention"}):
        raise CheckpointError(f"layer_types: {types!r}: expected full_attention or "
                              f"sliding_attention for each of {n} layers")
    letters = "".join("W" if t == "sliding_attention" and c.get("sliding_window") else "F"
                      for t in types)
    if kind == "smollm3":
        every = c["no_rope_layer_interval"]
        used = c.get("no_rope_layers") or [(i + 1) % every for i in range(n)]
        if len(used) != n:
            raise CheckpointError(f"no_rope_layers: {used!r}: expected one for each of {n} layers")
        letters = "".join(x if has else x.lower() for x, has in zip(letters, used))
    if wrong := set(letters) - set(FAMILIES[kind].layers):
        raise CheckpointError(f"layer_types: {types!r}: not supported for {kind} "
                              f"({', '.join(sorted(wrong))})")
    return letters


def read_rope(given, theta):
    """Return (rope_theta, rope_scaling) of one entry of rope_parameters."""
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ("default", "linear", "llama3") or given.get("partial_rotary_factor", 1) != 1:
        raise CheckpointError(f"rope_type: {kind!r}: expected default, linear or llama3, of whole "
                              "heads")
    keys = dict(default=(), linear=("factor",), llama3=LLAMA3_KEYS)[kind]
    # The order is that of a reader's first complaint.
    values = {key: given[key] for key in (*keys[1:], *keys[:1])}
    scaling = ",".join(f"{float(values[key]):g}" if float(values[key]).is_integer()
                       else repr(float(values[key])) for key in keys)
    return float(given.get("rope_theta", theta)), scaling or None


LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def upgrade_fields(args):
    """Return model_args with the current fields. args: model_args of an older checkpoint, which has
    the text of a config.json in `family`; the result has no `family`."""
    kind, new = read_config(json.loads(args["family"]), "family")
    if "plain" in FAMILIES[kind].values.get("qk_norm_type", ()):
        new["qk_norm_type"] = "head"
    length = new["max_positions"] or new["block_size"]
    new = {k: v for k, v in new.items() if k not in SIZES}
    return {k: v for k, v in args.items() if k != "family"} | new | dict(max_positions=length)


# -----------------------------------------------------------------------------
# writing a config.json

def find_family(shape, path):
    """Return the model_type that computes a GPTConfig or MoEConfig. CheckpointError with the
    options that the closest one does not have."""
    is_gpt2 = shape.norm == "layer" or shape.pos == "learned"
    wrong = {kind: mismatches(shape, family) for kind, family in FAMILIES.items()
             if (kind == "gpt2") == is_gpt2 and family.experts == has_experts(shape)}
    if not wrong:
        raise CheckpointError(f"{path}: no class in transformers has experts with norm: "
                              f"{shape.norm}, pos: {shape.pos}")
    kind = min(wrong, key=lambda k: len(wrong[k]))
    if wrong[kind]:
        raise CheckpointError(f"{path}: not supported by {FAMILIES[kind].architecture}: "
                              f"{', '.join(wrong[kind])}; to export, train with the values in "
                              "parentheses")
    return kind


def mismatches(shape, family):
    """Return [text] of the options of `shape` that a family does not have."""
    allowed = {f.name: [f.default] for f in fields(GPTKeys)
               if f.name not in family.keys and f.name not in FREE} | family.values
    allowed["mlp"] = list(family.activations.values())
    if "n_kv_head" not in family.keys:  # GPT-2
        allowed |= dict(n_kv_head=[shape.n_head], head_dim=[shape.n_embd // shape.n_head],
                        rope_theta=[shape.rope_theta])
    if "geglu" in allowed["mlp"]:  # Gemma
        allowed |= dict(embed_scale=[shape.n_embd ** 0.5], score_scale=[shape.score_scale],
                        window_rope_theta=[shape.window_rope_theta])
    order = [name for name in ("norm", "pos", "mlp", "qk_norm", "n_kv_head", *allowed)
             if name in allowed]
    wrong = [f"{k}: {getattr(shape, k)} (there: {' or '.join(map(str, allowed[k]))})"
             for k in dict.fromkeys(order) if getattr(shape, k) not in allowed[k]]
    letters = {shape.layer_type(i) for i in range(shape.n_layer)}
    if letters - set(family.layers) or family.uniform and len(letters) > 1:
        wrong.append(f"layer_types: {shape.layer_types} (there: {' or '.join(family.layers)})")
    return wrong


def write_config(shape, kind, dtype, end):
    """Return config.json for a family, as transformers 4 and 5 read it. end: the tokenizer's end of
    text, if any."""
    family = FAMILIES[kind]
    eos = [int(i) for i in shape.eos_ids.split(",")] if shape.eos_ids else [end]
    out = dict(architectures=[family.architecture], model_type=kind, vocab_size=shape.vocab_size,
               bos_token_id=end if shape.bos_id is None else shape.bos_id,
               eos_token_id=eos if len(eos) > 1 else eos[0],
               tie_word_embeddings=shape.tie_weights, torch_dtype=dtype, dtype=dtype)
    out |= {theirs: getattr(shape, ours) for ours, theirs in family.keys.items()}
    names = {ours: theirs for theirs, ours in reversed(family.activations.items())}
    out[family.keys["mlp"]] = names[shape.mlp]
    out[family.keys["max_positions"]] = shape.max_positions or shape.block_size
    out |= family.constants
    if kind == "gpt2":
        return out | dict(resid_pdrop=shape.dropout, embd_pdrop=shape.dropout,
                          attn_pdrop=shape.dropout)
    return out | write_attention(shape, kind)


def write_attention(shape, kind):
    """Return the keys of rotary positions and windows."""
    rope = write_rope(shape.rope_theta, shape.rope_factors)
    out = dict(rope_parameters=rope)
    if shape.rope_factors:  # transformers 4
        out["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    letters = [shape.layer_type(i) for i in range(shape.n_layer)]
    types = ["sliding_attention" if x in "Ww" else "full_attention" for x in letters]
    if "sliding_attention" in types:
        out["sliding_window"] = shape.window
        if not FAMILIES[kind].uniform:
            out["layer_types"] = types
    if kind in ("qwen2", "qwen3") and "layer_types" in out:
        out |= dict(use_sliding_window=True, max_window_layers=types.index("sliding_attention"))
    if kind == "smollm3":
        out |= dict(no_rope_layers=[int(x.isupper()) for x in letters],
                    use_sliding_window="layer_types" in out)
    if kind == "gemma3_text":
        local = shape.window_rope_theta or shape.rope_theta
        scalar = shape.head_dim / shape.score_scale ** 2
        out |= dict(
            layer_types=types, hidden_activation="gelu_pytorch_tanh", rope_local_base_freq=local,
            query_pre_attn_scalar=round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar,
            rope_parameters=dict(full_attention=rope, sliding_attention=write_rope(local, ())))
    return out


def write_rope(theta, factors):
    """Return an entry of rope_parameters."""
    kind = {0: "default", 1: "linear", 4: "llama3"}[len(factors)]
    out = dict(rope_type=kind, rope_theta=theta) | dict(zip(LLAMA3_KEYS, factors))
    if kind == "llama3":
        out[LLAMA3_KEYS[3]] = int(factors[3])
    return out
