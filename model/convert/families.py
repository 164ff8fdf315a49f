"""Convert config.json of `transformers` and nanoGPT's model_args to and from our configurations.

One table, FAMILIES, is used in both directions. A Family describes the models of one model_type of
`transformers`. To export a model, a GPTConfig or MoEConfig is written in the keys of a Family and
read back. If all fields are the same, other programs compute the same logits. Otherwise
CheckpointError names the fields that differ: exported models have the same logits.
"""

import json
import math
import re
from dataclasses import dataclass, field, fields

from model.convert.tensors import ROBERTA_POSITIONS
from model.core.shape import check_value
from train.base.errors import CheckpointError
from train.base.fields import fields_by_name
from train.base.keys import MAX_CONTEXT, GPTKeys
from train.system import load_model_type

# -----------------------------------------------------------------------------
# keys of config.json, {our field: key}

KEYS = dict(n_embd="hidden_size", n_layer="num_hidden_layers", n_hidden="intermediate_size",
            n_head="num_attention_heads", n_kv_head="num_key_value_heads", head_dim="head_dim",
            mlp="hidden_act", max_positions="max_position_embeddings", norm_eps="rms_norm_eps",
            rope_theta="rope_theta", vocab_size="vocab_size", tie_weights="tie_word_embeddings")
GEMMA_KEYS = KEYS | dict(mlp="hidden_activation")
GPT2_KEYS = dict(max_positions="n_positions", n_embd="n_embd", n_layer="n_layer", n_head="n_head",
                 n_hidden="n_inner", mlp="activation_function", norm_eps="layer_norm_epsilon",
                 vocab_size="vocab_size", tie_weights="tie_word_embeddings")
BERT_KEYS = {n: k for n, k in KEYS.items() if n not in (
    "n_kv_head", "head_dim", "rope_theta", "tie_weights")} | {"norm_eps": "layer_norm_eps"}
MODERNBERT_KEYS = BERT_KEYS | dict(mlp="hidden_activation", rope_theta="global_rope_theta",
                                   norm_eps="norm_eps")
MIXTRAL_KEYS = KEYS | dict(expert_hidden="intermediate_size", n_experts="num_local_experts",
                           experts_per_token="num_experts_per_tok")
QWEN3_MOE_KEYS = KEYS | dict(n_experts="num_experts", experts_per_token="num_experts_per_tok",
                             expert_hidden="moe_intermediate_size", norm_topk_prob="norm_topk_prob")
DEFAULTS = dict(rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=False, head_dim=None,
                num_key_value_heads=None, hidden_act="silu")
NANOGPT_KEYS = {name: name for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size",
                                        "bias", "dropout")}
# Keys that are read; or that change the logits, with the only value that can be computed here; or
# that change no logits. Any other key could change them, unless its value is null, false or empty.
USED = {"rope_scaling", "rope_parameters", "rope_local_base_freq", "query_pre_attn_scalar",
        "sliding_window", "use_sliding_window", "sliding_window_pattern", "max_window_layers",
        "layer_types", "no_rope_layers", "no_rope_layer_interval", "num_local_experts",
        "local_attention", "local_rope_theta", "global_attn_every_n_layers", "tie_word_embeddings"}
ONLY = dict(decoder_sparse_step=1, partial_rotary_factor=1, scale_attn_weights=True,
            position_embedding_type="absolute")
HARMLESS = re.compile(
    r"_\w+|architectures|model_type|(torch_)?dtype|transformers\W?\w+|\w+_token_id|use_cache|n_ctx|"
    r"initializer_\w+|\w+_(dropout(_prob)?|pdrop)|pretraining_tp|cache_implementation|unsloth_\w+|"
    r"is_llama_config|router_\w+_coef|summary_\w+|task_specific_params|predict_special_tokens|"
    r"output_(past|attentions|hidden_states|router_logits)|id2label|label2id|"
    r"gradient_checkpointing|max_sequence_length|type_vocab_size|problem_type|finetuning_task|"
    r"(classifier|pooler)_\w+|decoder_bias|sparse_pred\w+|directionality|num_labels|"
    r"reference_compile|layer_norm_eps|repad_logits_with_grad|deterministic_flash_attn")
# {value in the key layer_types: letter}; a lower-case letter: without rotary positions.
LETTERS = {"full_attention": "F", "sliding_attention": "W"}
# Our fields that a checkpoint's model_args have besides `family`.
SIZES = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "n_hidden", "n_kv_head",
         "norm_eps", "tie_weights")
# Our fields that change no logits, or that are compared in a different form.
FREE = {"block_size", "max_positions", "dropout", "bos_id", "eos_ids", "window", "layer_types",
        "rope_theta", "rope_scaling", "pad_id"}


@dataclass(frozen=True)
class Family:
    """The models of one model_type of `transformers`, or nanoGPT's.

    A field is one of a GPTConfig or MoEConfig; a key, of config.json (of model_args for nanoGPT).
    architecture: name of the class in `transformers`, or "nanoGPT". keys: {field: key}.
    values: {field: values that can be exported} of fields in which these models differ from the
    default; if the field has no key, the first value is set when a model is read.
    defaults: {key: value if the key is missing}. constants: {key: value} that are always written.
    layers: the letters of read_layers() that are possible. experts: true for a MoEConfig.
    activations: {value of the key hidden_act or the like: value of the field mlp}.
    """
    architecture: str
    keys: dict = field(default_factory=lambda: KEYS)
    values: dict = field(default_factory=dict)
    defaults: dict = field(default_factory=dict)
    layers: str = "F"
    activations: dict = field(default_factory=lambda: {"silu": "swiglu"})
    constants: dict = field(default_factory=dict)
    experts: bool = False

    @property
    def config_class(self):
        # Loaded by name: model/gpt.py imports the files that import this one.
        return (load_model_type("moe").module.MoEConfig if self.experts
                else load_model_type("gpt").module.GPTConfig)


QK_NORMS = dict(qk_norm=[True], qk_norm_type=["head", "plain"])
WINDOWS = dict(sliding_window=4096, max_window_layers=28)
ALL_WINDOWS = dict(sliding_window=4096, use_sliding_window=True, max_window_layers=0)
BERT = Family("BertModel", BERT_KEYS, activations={"gelu": "gelu_exact", "gelu_new": "gelu"},
              values=dict(norm=["layer"], pos=["learned"], bias=[True], causal=[False],
                          norm_position=["stream"], tie_weights=[True]),
              defaults=dict(hidden_act="gelu", layer_norm_eps=1e-12))
FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", values=dict(qkv_bias=[True]), layers="FW",
                    defaults=WINDOWS),
    "qwen3": Family("Qwen3ForCausalLM", values=QK_NORMS, layers="FW",
                    defaults=WINDOWS | dict(head_dim=128)),
    "mistral": Family("MistralForCausalLM", layers="FW", defaults=ALL_WINDOWS),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", GEMMA_KEYS, layers="FW", activations={"gelu_pytorch_tanh": "geglu"},
        values=dict(qk_norm=[True], qk_norm_type=["head"], norm_position=["both"]),
        defaults=dict(rope_theta=1e6, rope_local_base_freq=10000.0, tie_word_embeddings=True,
                      head_dim=256, query_pre_attn_scalar=256, sliding_window=4096,
                      sliding_window_pattern=6, hidden_activation="gelu_pytorch_tanh",
                      num_attention_heads=8, num_key_value_heads=4, vocab_size=262_208,
                      max_position_embeddings=131_072)),
    "olmo2": Family("Olmo2ForCausalLM", defaults=dict(rms_norm_eps=1e-5), values=dict(
        qk_norm=[True], qk_norm_type=["all"], norm_position=["post"])),
    "smollm3": Family("SmolLM3ForCausalLM", layers="FfWw",
                      defaults=dict(rope_theta=2e6, tie_word_embeddings=True,
                                    no_rope_layer_interval=4)),
    "mixtral": Family("MixtralForCausalLM", MIXTRAL_KEYS, dict(norm_topk_prob=[True]),
                      defaults=ALL_WINDOWS | dict(sliding_window=None, rope_theta=1e6,
                                                   rms_norm_eps=1e-5), layers="FW", experts=True),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", QWEN3_MOE_KEYS, QK_NORMS,
                        defaults=dict(norm_topk_prob=False), experts=True),
    "gpt2": Family("GPT2LMHeadModel", GPT2_KEYS,
                   values=dict(norm=["layer"], pos=["learned"], bias=[True, False]),
                   defaults=dict(n_inner=None, layer_norm_epsilon=1e-5, tie_word_embeddings=True,
                                 activation_function="gelu_new"),
                   activations={"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu",
                                "gelu": "gelu_exact"},
                   constants=dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)),
    "bert": BERT, "roberta": BERT, "xlm-roberta": BERT,
    "modernbert": Family(
        "ModernBertModel", MODERNBERT_KEYS, layers="FW", activations={"gelu": "geglu_exact"},
        values=dict(norm=["layer"], causal=[False], embed_norm=[True], tie_weights=[True]),
        defaults=dict(
            global_rope_theta=160_000.0, local_rope_theta=10000.0, local_attention=128,
            norm_eps=1e-5, hidden_activation="gelu", global_attn_every_n_layers=3)),
    "nanogpt": Family("nanoGPT", NANOGPT_KEYS, defaults=dict(bias=True, dropout=0.0), values=dict(
        norm=["layer"], pos=["learned"], bias=[True, False], mlp=["gelu_exact"]))}


# Encoders, backbones for classifiers, are read but not written.
WRITTEN = [k for k, family in FAMILIES.items() if k != "nanogpt" and "causal" not in family.values]


# -----------------------------------------------------------------------------
# reading a config.json

def read_config(c, path):
    """Return (model_type, {field: value}) for `c`, the content of a config.json.

    model_type: a key of FAMILIES; for "gemma3", which has images too, it is "gemma3_text".
    path: for messages. Raises CheckpointError for missing keys and unsupported or invalid values.
    """
    kind = c.get("model_type") if isinstance(c, dict) else None
    if kind == "gemma3" and isinstance(c.get("text_config"), dict):  # multimodal: the text part
        kind = "gemma3_text"
        c = {k: v for k, v in c.items() if k.endswith("_token_id")} | c["text_config"]
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(f"{path}: model_type {kind!r}: expected {', '.join(FAMILIES)}")
    try:
        if "roberta" in kind:  # the first positions are not used
            c = c | dict(max_position_embeddings=c["max_position_embeddings"] - ROBERTA_POSITIONS)
        return kind, read_fields(c, FAMILIES[kind])
    except KeyError as error:
        raise CheckpointError(f"{path}: has no {error}, which a {kind} needs") from None
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError,
            RecursionError) as error:  # the last ones: values of other types
        raise CheckpointError(f"{path}: {error}") from None


def read_fields(given, family):
    """Return {field: value} of a GPTConfig or MoEConfig for `given`, the dict in a config.json.

    Raises CheckpointError for options that are not supported, KeyError for a missing key,
    TypeError, ValueError and others for values of a wrong type.
    """
    known = USED | ONLY.keys() | set(family.keys.values())
    wrong = [f"{k}: {v!r}" for k, v in sorted(given.items()) if v != ONLY.get(k, v)
             or v and k not in known and not HARMLESS.fullmatch(k)]
    if wrong:
        raise CheckpointError(f"{', '.join(wrong)}: not supported")
    c = DEFAULTS | family.defaults | given
    if "num_local_experts" in c:  # in some files of Qwen
        c.setdefault("num_experts", c["num_local_experts"])
    out = {name: values[0] for name, values in family.values.items()}
    known_fields = fields_by_name(family.config_class)
    for ours, theirs in family.keys.items():
        value = c[theirs]
        if ours == "mlp":
            if value not in family.activations:
                raise CheckpointError(f"{theirs}: {value!r}, expected {[*family.activations]}")
            value = family.activations[value]
        out[ours] = check_value(known_fields[ours], value, theirs)
    if "local_attention" in c:  # ModernBERT: half of these tokens on either side
        c |= dict(rope_theta=c["global_rope_theta"], rope_local_base_freq=c["local_rope_theta"],
                  sliding_window=c["local_attention"])
    if "rope_theta" in family.keys:
        read_attention(c, family, out)
    if "max_positions" in family.keys:
        out["block_size"] = out["max_positions"]
        if out["block_size"] <= MAX_CONTEXT or out.get("pos") == "learned":
            out["max_positions"] = None
        else:  # a context too long for memory is kept for exports only
            out["block_size"] = MAX_CONTEXT
    end, pad = c.get("eos_token_id"), c.get("pad_token_id")
    ends = end if isinstance(end, list) else [end]
    return out | dict(bos_id=c.get("bos_token_id"), pad_id=None if pad == -1 else pad,
                      eos_ids=",".join(str(i) for i in ends if i is not None) or None)


def read_attention(c, family, out):
    """Add layer types, windows, rotary positions and scales to the fields `out`, in place.

    out: {field: value}, with n_embd, n_head and n_layer. c: config.json's dict, with the defaults
    of missing keys. Raises CheckpointError for options that are not supported.
    """
    head_dim = out.get("head_dim") or out["n_embd"] // out["n_head"]
    if head_dim % 2:
        raise CheckpointError(f"head_dim: {head_dim}, expected an even number")
    letters = read_layers(c, out["n_layer"])
    if wrong := set(letters) - set(family.layers):
        raise CheckpointError(f"layer_types: {letters}: not supported ({', '.join(sorted(wrong))})")
    period = next(p for p in range(1, len(letters) + 1) if letters.startswith(letters[p:]))
    out |= dict(layer_types=letters[:period],
                window=c["sliding_window"] if "W" in letters.upper() else None)
    # transformers prefers rope_scaling if both exist.
    given = c.get("rope_scaling") or c.get("rope_parameters") or {}
    full = local = given
    if LETTERS.keys() & given.keys():
        full = given.get("full_attention", {})
        local = given.get("sliding_attention", {})
    elif "rope_local_base_freq" in c:
        local = dict(rope_theta=c["rope_local_base_freq"])
    out["rope_theta"], out["rope_scaling"] = read_rope(full, c["rope_theta"])
    theta, scaling = read_rope(local, c["rope_theta"])
    if "W" in letters and (theta, scaling) != (out["rope_theta"], out["rope_scaling"]):
        if scaling:
            raise CheckpointError(f"rope_type of layers with a window: {local!r}, expected default")
        out["window_rope_theta"] = theta
    if "query_pre_attn_scalar" in c:  # Gemma
        out["embed_scale"] = out["n_embd"] ** 0.5
        out["score_scale"] = math.sqrt(head_dim / c["query_pre_attn_scalar"])


def read_layers(c, n):
    """Return the attention type of each of n layers, as a string of n letters.

    F: full. W: with a window. f, w: the same without rotary positions. c: config.json's dict, with
    the defaults of missing keys. Raises CheckpointError for invalid values.
    """
    types = c.get("layer_types")
    letters = default_layers(c, n) if types is None else [LETTERS.get(t) for t in types]
    interval = c.get("no_rope_layer_interval") or n + 1  # SmolLM 3
    ropes = c.get("no_rope_layers") or [(i + 1) % interval > 0 for i in range(n)]
    if None in letters or not len(letters) == len(ropes) == n:
        raise CheckpointError(f"layer_types: {types!r}, no_rope_layers: {ropes!r}: expected "
                              f"full_attention or sliding_attention, and 0 or 1, for {n} layers")
    if not c.get("sliding_window"):
        letters = ["F"] * n
    return "".join(x if rope else x.lower() for x, rope in zip(letters, ropes))


def default_layers(c, n):
    """Return the letters, F or W, of the n layers of a config.json `c` without layer_types."""
    if every := c.get("sliding_window_pattern"):  # Gemma 3
        return ["W" if (i + 1) % every else "F" for i in range(n)]
    if every := c.get("global_attn_every_n_layers"):  # ModernBERT
        return ["W" if i % every else "F" for i in range(n)]
    first = c.get("max_window_layers", 0) if c.get("use_sliding_window") else n
    return ["F" if i < first else "W" for i in range(n)]


def read_rope(given, theta):
    """Return the fields (rope_theta, rope_scaling) for `given`, rotary parameters in a config.json.

    given: the dict rope_parameters or rope_scaling. theta: rope_theta if `given` does not have it.
    rope_scaling is "FACTOR", Llama 3's four numbers, e.g. "8,1,4,8192", or `None`.
    Raises CheckpointError for a partial_rotary_factor other than 1 and for types other than
    default, linear and llama3; KeyError if a number is missing.
    """
    kind = given.get("rope_type", given.get("type", "default"))
    if (part := given.get("partial_rotary_factor", 1)) != 1:
        raise CheckpointError(f"partial_rotary_factor: {part!r}: not supported")
    if kind not in ("default", "linear", "llama3"):
        raise CheckpointError(f"rope_type: {kind!r}: expected default, linear or llama3")
    keys = dict(default=(), linear=("factor",), llama3=LLAMA3_KEYS)[kind]
    scaling = ",".join(repr(float(given[key])).removesuffix(".0") for key in keys)
    return float(given.get("rope_theta", theta)), scaling or None


LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def upgrade_fields(config_json):
    """Return GPTConfig fields, except SIZES, of "family" in old model_args, a config.json text."""
    _, new = read_config(json.loads(config_json), "family")
    new["max_positions"] = new["max_positions"] or new["block_size"]
    return {k: v for k, v in new.items() if k not in SIZES}


# -----------------------------------------------------------------------------
# writing a config.json

def find_family(shape, path, kinds=None):
    """Return the model_type, a key of FAMILIES, whose models compute the same logits as `shape`.

    kinds: the keys to choose from; default: all that can be exported to `transformers`.
    Raises CheckpointError if no model_type does, with the options that the most similar one lacks.
    """
    is_mixture = hasattr(shape, "n_experts")
    kinds = kinds or [k for k in WRITTEN if FAMILIES[k].experts == is_mixture]
    wrong = {kind: mismatches(shape, FAMILIES[kind]) for kind in kinds}
    kind = min(wrong, key=lambda k: len(wrong[k]))
    refuse(wrong[kind], FAMILIES[kind].architecture, path)
    return kind


def refuse(wrong, name, path):
    """Raise CheckpointError if `wrong`, options of mismatches() that `name` lacks, is not empty."""
    if wrong:
        raise CheckpointError(f"{path}: not supported by {name}: {', '.join(wrong)}; to export, "
                              "train with the values in parentheses")


def mismatches(shape, family, changes=()):
    """Return a text for each option that a Family cannot represent; []: the logits are the same.

    changes: {key: value} to replace after writing, e.g. keys that a program does not read.
    """
    try:
        there = type(shape)(**read_fields(write_fields(shape, family) | dict(changes), family))
    except ValueError as error:  # before the comparison: further options may differ
        return [str(error), "perhaps others"]
    own = [f.name for f in fields(shape) if f.metadata.get("shape")]  # of experts
    names = [f.name for f in fields(GPTKeys)] + [*own, *family.keys, *family.values]
    free = FREE | {"n_hidden"} if family.experts else FREE  # an MLP has no weights there
    wrong = []
    for name in dict.fromkeys(names):
        ours = getattr(shape, name)
        theirs = getattr(there, name)
        is_same = ours in family.values.get(name, [theirs]) or (
            isinstance(ours, float) and isinstance(theirs, float) and math.isclose(ours, theirs))
        if not is_same and name not in free:
            wrong.append(f"{name}: {ours} (there: {theirs})")
    if list_layers(shape) != list_layers(there):
        wrong.append(f"layer_types: {shape.layer_types} (there: {there.layer_types})")
    return wrong


def list_layers(shape):
    """Return the attention type of each layer of a GPTConfig, a letter as for read_layers()."""
    return [shape.layer_type(i) for i in range(shape.n_layer)]


def write_config(shape, kind, dtype, end, bos):
    """Return the content of a config.json, a dict, as transformers 4 and 5 read it.

    kind: the model_type, a key of FAMILIES. dtype: name of the weights' dtype. bos: bos_token_id.
    end: the tokenizer's end of text or `None`, the eos_token_id if `shape` does not have one.
    """
    eos = [int(i) for i in shape.eos_ids.split(",")] if shape.eos_ids else [end]
    return write_fields(shape, FAMILIES[kind]) | dict(
        architectures=[FAMILIES[kind].architecture], model_type=kind, pad_token_id=shape.pad_id,
        bos_token_id=bos, eos_token_id=eos if len(eos) > 1 else eos[0], torch_dtype=dtype,
        dtype=dtype)


def write_fields(shape, family):
    """Return the config.json keys on which the logits depend, {key: value}; see mismatches()."""
    out = family.constants | {theirs: getattr(shape, ours) for ours, theirs in family.keys.items()}
    if "mlp" in family.keys:
        names = {ours: theirs for theirs, ours in reversed(family.activations.items())}
        out[family.keys["mlp"]] = names.get(shape.mlp, next(iter(family.activations)))
    if "max_positions" in family.keys:
        out[family.keys["max_positions"]] = shape.full_context
    return out | attention_keys(shape, family) if "rope_theta" in family.keys else out


def attention_keys(shape, family):
    """Return the config.json keys for rotary scaling, attention windows and Gemma's score scale."""
    out = {}
    factors = shape.rope_factors
    if len(factors) == 1:
        out["rope_scaling"] = dict(factor=factors[0], rope_type="linear")
    elif factors:
        numbers = *factors[:3], int(factors[3])
        out["rope_scaling"] = dict(zip(LLAMA3_KEYS, numbers), rope_type="llama3")
    letters = list_layers(shape)
    names = {letter: name for name, letter in LETTERS.items()}
    types = [names[x.upper()] for x in letters]
    if "sliding_attention" in types:
        out["sliding_window"] = shape.window
        if "use_sliding_window" not in family.defaults:  # Mistral has windows in all layers
            out |= dict(layer_types=types, use_sliding_window=True,
                        max_window_layers=types.index("sliding_attention"))
    if "no_rope_layer_interval" in family.defaults:  # SmolLM 3
        out["no_rope_layers"] = [int(x.isupper()) for x in letters]
    if "query_pre_attn_scalar" in family.defaults:  # Gemma
        scalar = shape.head_dim / shape.score_scale ** 2
        out |= dict(
            layer_types=types, rope_local_base_freq=shape.window_rope_theta or shape.rope_theta,
            query_pre_attn_scalar=round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar)
    return out
