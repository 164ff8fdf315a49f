"""Models that people fine-tune today, as GPTs with other blocks: Llama 3, Qwen 2 and 3, Mistral,
Gemma 3 (text), OLMo 2 and SmolLM 3.

The key `family` of a GPT's configuration is what their config.json says, as JSON; it comes with the
weights (model/convert/foreign.py) and stays with them. What it says that is not known here is
refused by name. Systems and tools take such a model as any GPT; only, a full context does not roll
on. Shapes: as in model/gpt.py.
"""

import functools
import json
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from model.core.ops import apply_dropout, apply_rope, attend
from model.gpt import MLP, Attention, Embedding, GPTConfig, Norm
from train.base.errors import ConfigError

# What config.json leaves out means, for each model_type (the classes of `transformers`).
COMMON = dict(rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=False, hidden_act="silu")
DEFAULTS = {
    "llama": COMMON,
    "qwen2": COMMON | dict(sliding_window=4096, max_window_layers=28),
    "qwen3": COMMON | dict(head_dim=128, sliding_window=4096, max_window_layers=28),
    "mistral": COMMON | dict(sliding_window=4096),
    "gemma3_text": COMMON | dict(
        rope_theta=1e6, rope_local_base_freq=10000.0, tie_word_embeddings=True, head_dim=256,
        query_pre_attn_scalar=256, sliding_window=4096, sliding_window_pattern=6,
        hidden_act="gelu_pytorch_tanh"),
    "olmo2": COMMON | dict(rms_norm_eps=1e-5),
    "smollm3": COMMON | dict(rope_theta=2e6, tie_word_embeddings=True, no_rope_layer_interval=4)}
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
           "mistral": "MistralForCausalLM", "gemma3_text": "Gemma3ForCausalLM",
           "olmo2": "Olmo2ForCausalLM", "smollm3": "SmolLM3ForCausalLM"}
SIZES = {"hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "intermediate_size", "vocab_size", "max_position_embeddings", "head_dim"}
# Keys that change the logits and are computed here; those beside them that do not; any other may
# only be absent, null, false or empty.
USED = SIZES | {"model_type", "rms_norm_eps", "tie_word_embeddings", "hidden_act",
                "hidden_activation", "query_pre_attn_scalar", "rope_theta", "rope_scaling",
                "rope_parameters", "rope_local_base_freq", "sliding_window", "use_sliding_window",
                "max_window_layers", "layer_types", "sliding_window_pattern",
                "_sliding_window_pattern", "no_rope_layers", "no_rope_layer_interval"}
HARMLESS = {"bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "initializer_range",
            "attention_dropout", "pretraining_tp", "cache_implementation", "unsloth_fixed",
            "unsloth_version", "_attn_implementation_autoset"}
LEFT_OUT = {"architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path"}
MOST_TOKENS = 4096  # of an imported model's context: memory for 128 k would be taken at once


@dataclass(frozen=True)
class Family:
    """What their blocks have beside a GPT's. kinds: (window in tokens or None, rope or None) of
    each kind of layer; layers: the kind's number for each layer. rope: (theta, factor, and for
    Llama 3 its low and high frequency factors and original length, else None thrice)."""
    model_type: str
    head_dim: int
    kinds: tuple
    layers: tuple
    embed_scale: float = 1.0
    score_scale: float = 1.0  # of scores, beside 1 / sqrt(head_dim)

    @property
    def ropes(self):
        return list(dict.fromkeys(rope for _, rope in self.kinds if rope))

    def tables(self, positions):
        """cos, sin (..., K D / 2) of positions (...): the K rotations side by side."""
        # As model/core/ops.py's rope_tables, with other frequencies.
        angles = torch.cat([positions[..., None] * frequencies(rope, self.head_dim,
                                                               positions.device)
                            for rope in self.ropes], dim=-1)
        return angles.cos().float(), angles.sin().float()

    def rebuild(self, model):
        """Give a GPT, in place, the blocks of this family."""
        c = model.config
        if len(self.layers) != c.n_layer:
            raise ConfigError([f"family: has {len(self.layers)} layers, n_layer is {c.n_layer}"])
        if self.embed_scale != 1:
            model.wte = ScaledEmbedding(*model.wte.weight.shape, self.embed_scale)
        for i, block in enumerate(model.h):
            block.attn, block.mlp = FamilyAttention(c, i), FamilyMLP(c)
            if self.model_type == "olmo2":  # normalised on its way out only
                block.ln_1 = block.ln_2 = nn.Identity()


# -----------------------------------------------------------------------------
# their config.json

@functools.lru_cache
def read(text):
    """The Family that the JSON `text` describes. Raises ConfigError."""
    try:
        return family_of(json.loads(text))
    except ConfigError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError,
            RecursionError) as error:
        raise ConfigError([f"family: {type(error).__name__}: {error}"]) from None


def family_of(c):
    """The Family of the dict of a config.json."""
    kind = c.get("model_type") if isinstance(c, dict) else None
    if kind not in DEFAULTS:
        raise ConfigError([f"model_type {kind!r}: expected one of {', '.join(DEFAULTS)}"])
    if unknown := sorted(k for k in c.keys() - USED - HARMLESS if c[k]):
        raise ConfigError([", ".join(f"{k}: {c[k]!r}" for k in unknown)
                           + f": not known of {kind}, whose logits would be others"])
    c = DEFAULTS[kind] | c
    if wrong := [f"{k}: {c[k]!r}" for k in sorted(SIZES & c.keys())
                 if c[k] is not None and not (type(c[k]) is int and 0 < c[k] < 2**31)]:
        raise ConfigError([f"{', '.join(wrong)}: expected whole numbers above 0"])
    if c["num_hidden_layers"] > 10_000:  # as n_layer
        raise ConfigError([f"num_hidden_layers: {c['num_hidden_layers']}, expected up to 10,000"])
    act = c.get("hidden_activation") or c["hidden_act"]
    if act != DEFAULTS[kind]["hidden_act"]:
        raise ConfigError([f"hidden_act: {act!r}, expected {DEFAULTS[kind]['hidden_act']}"])
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    if head_dim % 2 or head_dim < 2:
        raise ConfigError([f"head_dim: {head_dim}, expected an even number"])
    gemma = kind == "gemma3_text"
    each = list(zip(windows(c), layer_ropes(c)))  # (window, rope) of each layer
    kinds = tuple(dict.fromkeys(each))
    return Family(kind, head_dim, kinds, tuple(map(kinds.index, each)),
                  c["hidden_size"] ** 0.5 if gemma else 1.0,
                  math.sqrt(head_dim / c["query_pre_attn_scalar"]) if gemma else 1.0)


def layer_types(c):
    """Whether each layer is "full_attention" or "sliding_attention"."""
    n, types = c["num_hidden_layers"], c.get("layer_types")
    if types is None and c["model_type"] == "gemma3_text":
        every = c.get("_sliding_window_pattern", c["sliding_window_pattern"])
        types = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(n)]
    elif types is None:
        slides = c["model_type"] == "mistral" or c.get("use_sliding_window")
        first = c.get("max_window_layers", 0) if slides else n
        types = ["full_attention" if i < first else "sliding_attention" for i in range(n)]
    if len(types) != n or set(types) - {"full_attention", "sliding_attention"}:
        raise ConfigError([f"layer_types: {types!r}: expected full_attention or sliding_attention "
                           f"for each of {n} layers"])
    return types


def windows(c):
    """Tokens that each layer sees, or None: all."""
    return [c.get("sliding_window") if t == "sliding_attention" else None for t in layer_types(c)]


def layer_ropes(c):
    """The rope of each layer, or None: it has no positions."""
    given = c.get("rope_parameters") or c.get("rope_scaling") or {}
    if not any(isinstance(v, dict) for v in given.values()):
        local = dict(rope_theta=c["rope_local_base_freq"]) if "rope_local_base_freq" in c else given
        given = dict(full_attention=given, sliding_attention=local)
    ropes = [rope_of(given.get(t) or {}, c["rope_theta"]) for t in layer_types(c)]
    if c["model_type"] != "smollm3":
        return ropes
    every = c["no_rope_layer_interval"]
    used = c.get("no_rope_layers") or [(i + 1) % every for i in range(len(ropes))]
    if len(used) != len(ropes):
        raise ConfigError([f"no_rope_layers: {used!r}: expected one for each of {len(ropes)} "
                           "layers"])
    return [rope if has else None for rope, has in zip(ropes, used)]


def rope_of(given, theta):
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ("default", "linear", "llama3") or given.get("partial_rotary_factor", 1) != 1:
        raise ConfigError([f"rope_type: {kind!r}: expected default, linear or llama3, of whole "
                           "heads"])
    words = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    rest = [given[word] for word in words] if kind == "llama3" else [None] * 3
    factor = 1.0 if kind == "default" else float(given["factor"])
    return float(given.get("rope_theta", theta)), factor, *rest


def frequencies(rope, dim, device):
    """Radians a token of each pair of a head, (dim / 2,) float32."""
    theta, factor, low, high, original = rope
    freq = theta ** (-torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    if low is None:
        return freq / factor
    # Llama 3: waves shorter than original / high stay, longer than original / low are stretched.
    turns = original * freq / (2 * math.pi)  # in the context that it was trained on first
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return freq * (share + (1 - share) / factor)


def shape_of(theirs):
    """The GPTConfig of a config.json. ValueError or KeyError for what cannot be computed."""
    text = json.dumps({k: v for k, v in theirs.items() if k not in LEFT_OUT}, sort_keys=True)
    family = read(text)
    c = DEFAULTS[family.model_type] | theirs
    return GPTConfig(
        block_size=min(c["max_position_embeddings"], MOST_TOKENS), vocab_size=c["vocab_size"],
        n_layer=c["num_hidden_layers"], n_head=c["num_attention_heads"], n_embd=c["hidden_size"],
        n_hidden=c["intermediate_size"], n_kv_head=c.get("num_key_value_heads"),
        norm_eps=c["rms_norm_eps"], tie_weights=c["tie_word_embeddings"], family=text)


# -----------------------------------------------------------------------------
# their blocks

class ScaledEmbedding(Embedding):

    def __init__(self, rows, dim, scale):
        super().__init__(rows, dim)
        self.scale = scale

    def forward(self, idx):
        return super().forward(idx) * self.scale


class FamilyAttention(Attention):
    """Attention with heads of their own size, biases, trained norms of queries and keys, a window,
    other rotations or none, and a norm on its way out: what the family has of these."""

    def __init__(self, config, layer):
        nn.Module.__init__(self)
        c = self.config = config
        f = self.family = c.other
        self.layer, width = layer, c.n_head * f.head_dim
        self.window, rope = f.kinds[f.layers[layer]]
        self.rotation = f.ropes.index(rope) if rope else None
        kv_dim, bias = c.n_kv_head * f.head_dim, f.model_type == "qwen2"
        self.q = nn.Linear(c.n_embd, width, bias=bias)
        self.k = nn.Linear(c.n_embd, kv_dim, bias=bias)
        self.v = nn.Linear(c.n_embd, kv_dim, bias=bias)
        self.o = nn.Linear(width, c.n_embd, bias=False)
        if f.model_type in ("qwen3", "gemma3_text"):  # of each head
            self.q_norm, self.k_norm = (Norm(f.head_dim, "rms", False, c.norm_eps) for _ in "qk")
        elif f.model_type == "olmo2":  # over all of them
            self.q_norm, self.k_norm = (Norm(n, "rms", False, c.norm_eps) for n in (width, kv_dim))
        self.out_norm = out_norm(c)

    def forward(self, x, rope, cache=None):
        c, T = self.config, x.size(1)
        qk, v = self.project(x)  # (B, T, H + G, D), (B, T, G, D)
        q, k = qk.split((c.n_head, c.n_kv_head), dim=2)
        if self.family.model_type == "olmo2":
            q, k = (norm(y.flatten(2)).view_as(y)
                    for norm, y in ((self.q_norm, q), (self.k_norm, k)))
        elif hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotation is not None:
            half = self.family.head_dim // 2
            cos, sin = (t[..., self.rotation * half:(self.rotation + 1) * half] for t in rope)
            q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        if self.family.score_scale != 1:
            q = q * self.family.score_scale
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H or G, T, D)
        mask = None
        if cache is not None:
            k, v, mask = cache.update(self.layer, k, v)
        k, v, mask = within(self.window, k, v, mask, T)
        y = attend(q, k, v, c.dropout if self.training else 0.0, mask)  # (B, H, T, D)
        y = self.out_norm(self.o(y.transpose(1, 2).flatten(2)))
        return apply_dropout(y, c.dropout, self.training)


def within(window, k, v, mask, T):
    """k, v (B, G, S, D) and the mask, as attend takes it, of T queries that see the last `window`
    keys, their own among them."""
    S = k.size(2)
    if window is None or S <= window:
        return k, v, mask
    here = torch.arange(S, device=k.device)
    if T > 1:
        behind = here[S - T:, None] - here  # (T, S)
        band = (behind >= 0) & (behind < window)
        return k, v, band[None, None] if mask is None else mask & band
    if mask is None:
        return k[:, :, -window:], v[:, :, -window:], None
    return k, v, mask & (here >= mask.sum(-1, keepdim=True) - window)


class FamilyMLP(MLP):
    """SwiGLU, or GeGLU (arXiv:2002.05202), with the norm on its way out that the family has."""

    def __init__(self, config):
        super().__init__(config)
        self.out_norm = out_norm(config)

    def gated(self, x):
        if self.config.other.model_type != "gemma3_text":
            return super().gated(x)
        return F.gelu(self.gate(x), approximate="tanh") * self.up(x)

    def forward(self, x):
        return self.out_norm(super().forward(x))


def out_norm(config):
    has = config.other.model_type in ("gemma3_text", "olmo2")
    return Norm(config.n_embd, "rms", False, config.norm_eps) if has else nn.Identity()


# -----------------------------------------------------------------------------
# their names of our modules, beside those of Llama

HEADS = {f"h.{{}}.attn.{n}_norm": f"model.layers.{{}}.self_attn.{n}_norm" for n in "qk"}
OUT = {"h.{}.attn.out_norm": "model.layers.{}.post_attention_layernorm",
       "h.{}.mlp.out_norm": "model.layers.{}.post_feedforward_layernorm"}
NAMES = {"qwen3": HEADS, "olmo2": HEADS | OUT,
         "gemma3_text": HEADS | OUT | {"h.{}.ln_2": "model.layers.{}.pre_feedforward_layernorm"}}


def shifted(weights, model_type, by):
    """Gemma keeps the weights of its norms less 1: `weights`, by our names, with these moved."""
    if model_type != "gemma3_text":
        return weights
    return {n: t.float() + by if t.dim() == 1 else t for n, t in weights.items()}
