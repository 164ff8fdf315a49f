"""The GPT: configuration, blocks, forward pass, initial weights. One file, top to bottom.

A decoder-only transformer with the choices of GPT-2 (LayerNorm, learned positions, GELU, biases)
and of Llama (RMSNorm, rotary positions, SwiGLU, no biases) as options, and a few newer ones, each a
field of GPTConfig. Shapes: B batch, T time (tokens), C channels (n_embd), H heads, G heads of keys
and values (n_kv_head), D head size, V rows of the embedding.
"""

import importlib
import math
import re
from dataclasses import dataclass, fields

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from model.core.generate import sample_texts
from model.core.ops import (
    IGNORE,
    apply_dropout,
    apply_rope,
    attend,
    linear_cross_entropy,
    rms_norm,
    rope_tables,
)
from model.core.weights import inherit_shape  # noqa: F401  a hook of the model interface
from train.keys import GPTKeys

USE = "python -m model.sample --ckpt {out}/ckpt.pt --prompt ..."  # said at the end of a run


@dataclass
class GPTConfig(GPTKeys):
    """The shape of a GPT: train/keys.py has the fields, their defaults and their meanings."""

    def __post_init__(self):
        if self.vocab_size is None:
            raise ValueError("GPTConfig: vocab_size is missing; give the number of token ids")
        self.n_kv_head = self.n_kv_head or self.n_head
        self.n_hidden = self.n_hidden or 4 * self.n_embd
        self.other = None  # what the blocks of another family have
        if self.family:
            # By its name, as systems are loaded: that file builds on this one.
            self.other = importlib.import_module("model.convert.families").read(self.family)

    @property
    def head_dim(self):
        return self.other.head_dim if self.other else self.n_embd // self.n_head

    @property
    def rolls(self):
        """Whether sampling can go on when the context is full, see KVCache."""
        return self.pos == "rope" and not self.other

    def rope_tables(self, positions):
        """cos, sin (..., D / 2) of positions (...)."""
        if self.other:
            return self.other.tables(positions)
        return rope_tables(positions, self.head_dim, self.rope_theta)

    @property
    def padded_vocab_size(self):
        """Rows of the embedding in memory (V): a multiple of 128, which matrix units want."""
        return (self.vocab_size + 127) // 128 * 128


class Embedding(nn.Embedding):
    """On the meta device, where a weight has no values, none are drawn: PyTorch would import
    torch._dynamo for that, which takes more than a second whenever a checkpoint is loaded."""

    def reset_parameters(self):
        if not self.weight.is_meta:
            super().reset_parameters()


class Norm(nn.Module):
    """RMSNorm (arXiv:1910.07467) or LayerNorm over the last dimension, computed in float32."""

    def __init__(self, dim, kind, bias, eps):
        super().__init__()
        self.rms, self.eps = kind == "rms", eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias and not self.rms else None

    def forward(self, x):
        if self.rms:
            return rms_norm(x, self.weight, self.eps)
        # In float32 whatever x is: the squares of bfloat16 numbers lose what the norm is made of.
        weight = self.weight.float()  # FSDP hands out bfloat16 weights
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), weight.shape, weight, bias, self.eps).type_as(x)


class Attention(nn.Module):
    """Causal self-attention with grouped queries (arXiv:2305.13245)."""

    def __init__(self, config, layer):
        super().__init__()
        c = self.config = config
        self.layer = layer  # its number, by which a cache keeps keys and values apart
        kv_dim = c.n_kv_head * c.head_dim
        self.q = nn.Linear(c.n_embd, c.n_embd, bias=c.bias)
        self.k = nn.Linear(c.n_embd, kv_dim, bias=c.bias)
        self.v = nn.Linear(c.n_embd, kv_dim, bias=c.bias)
        self.o = nn.Linear(c.n_embd, c.n_embd, bias=c.bias)

    def forward(self, x, rope, cache=None):
        c, (B, T, C) = self.config, x.size()
        # Queries and keys stay side by side as long as the same is done to both.
        qk, v = self.project(x)  # (B, T, H + G, D), (B, T, G, D)
        if c.qk_norm:  # bounds the scores, so that a high learning rate cannot blow them up
            qk = rms_norm(qk, eps=c.norm_eps)
        if rope is not None:
            qk = apply_rope(qk, *rope)
        q, k = qk.split((c.n_head, c.n_kv_head), dim=2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H or G, T, D)
        mask = None
        if cache is not None:  # sampling: the keys and values of all tokens so far, (B, G, S, D)
            k, v, mask = cache.update(self.layer, k, v)
        y = attend(q, k, v, c.dropout if self.training else 0.0, mask)  # (B, H, T, D)
        y = self.o(y.transpose(1, 2).reshape(B, T, C))
        return apply_dropout(y, c.dropout, self.training)

    def project(self, x):
        """Queries and keys side by side (B, T, H + G, D), values (B, T, G, D). One product beats
        three, but for a few tokens (sampling) joining the weights would cost more."""
        c, (B, T, _) = self.config, x.size()
        layers = (self.q, self.k, self.v)
        if worth_joining(x, layers):
            y = joined_product(x, layers)
        else:
            y = torch.cat([m(x) for m in layers], dim=-1)
        return y.view(B, T, -1, c.head_dim).split((c.n_head + c.n_kv_head, c.n_kv_head), dim=2)


def is_plain(layer):
    """Whether a layer is its weight and bias alone, which can be joined to another's."""
    return type(layer).forward is nn.Linear.forward


def worth_joining(x, layers):
    """Whether one product beats one for each of `layers` on x (..., C)."""
    return x.numel() > 64 * x.size(-1) and all(map(is_plain, layers))


def joined_product(x, layers):
    """What plain layers make of the same x (..., C), side by side."""
    bias = None if layers[0].bias is None else torch.cat([m.bias for m in layers])
    return F.linear(x, torch.cat([m.weight for m in layers]), bias)


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202), GELU (gelu: GPT-2's tanh form; gelu_exact: nanoGPT's), or squared
    ReLU (arXiv:2109.08668)."""

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        # SwiGLU has three matrices for two: 2/3 of another's n_hidden make as many weights.
        if c.mlp == "swiglu":
            self.gate = nn.Linear(c.n_embd, c.n_hidden, bias=c.bias)
        self.up = nn.Linear(c.n_embd, c.n_hidden, bias=c.bias)
        self.down = nn.Linear(c.n_hidden, c.n_embd, bias=c.bias)

    def gated(self, x):
        layers = (self.gate, self.up)
        # One product for two on a GPU: an eighth of a step's launches (train/LOG.md).
        if x.is_cuda and worth_joining(x, layers):
            gate, up = joined_product(x, layers).chunk(2, dim=-1)
        else:
            gate, up = self.gate(x), self.up(x)
        return F.silu(gate) * up

    def forward(self, x):
        if self.config.mlp == "swiglu":
            x = self.gated(x)
        elif self.config.mlp == "relu2":
            x = F.relu(self.up(x)).square()
        else:
            x = F.gelu(self.up(x), approximate="tanh" if self.config.mlp == "gelu" else "none")
        return apply_dropout(self.down(x), self.config.dropout, self.training)


class Block(nn.Module):
    """Attention and MLP, each normalised on its way in and added to the stream x (B, T, C)."""

    def __init__(self, config, layer, mlp=MLP):
        super().__init__()
        norm = (config.n_embd, config.norm, config.bias, config.norm_eps)
        self.ln_1, self.attn = Norm(*norm), Attention(config, layer)
        self.ln_2, self.mlp = Norm(*norm), mlp(config)
        self.gradient_checkpointing = "false"

    def forward(self, x, rope, cache=None):
        if self.gradient_checkpointing == "false" or not self.training:
            return self.compute(x, rope, cache)
        # In here, not around the block: so it is compiled with the block also where FSDP's hooks,
        # which stand around the block, keep the compiler from seeing more.
        policy = (dict(context_fn=save_products) if self.gradient_checkpointing == "selective"
                  else {})
        return checkpoint(self.compute, x, rope, cache, use_reentrant=False, **policy)

    def compute(self, x, rope, cache=None):
        # x (B, T, C) stays the sum of all that was added: gradients reach every layer unchanged.
        x = x + self.attn(self.ln_1(x), rope, cache)
        return x + self.mlp(self.ln_2(x))


def save_products():
    """Selective checkpointing: keep the results of matrix products, recompute the cheap rest."""
    # A product costs C times what an element-wise operation on the same numbers does.
    aten = torch.ops.aten
    keep = [aten.mm, aten.addmm, aten._scaled_dot_product_flash_attention,
            aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_efficient_attention,
            aten._scaled_dot_product_flash_attention_for_cpu, aten._grouped_mm]
    return create_selective_checkpoint_contexts([op.default for op in keep])


class LanguageModelLoss(nn.Module):
    """linear_cross_entropy as a module, so that it can be compiled by itself, as a block can."""

    def forward(self, x, weight, targets, vocab_size):
        return linear_cross_entropy(x.flatten(0, 1), weight, targets.flatten(), vocab_size)


class GPT(nn.Module):
    """forward(idx, targets) -> (loss, sums); forward(idx) -> logits (B, T, vocab_size).

    token_bytes (n_vocab,), a numpy array: the bytes of text each id stands for, for bits per byte.
    """
    block_class = Block  # models built on this one have blocks of their own

    def __init__(self, config: GPTConfig, seed: int = 1337, token_bytes=None):
        super().__init__()
        c = self.config = config
        # The names are nanoGPT's: token and position embedding, blocks h, final norm, output layer.
        self.wte = Embedding(c.padded_vocab_size, c.n_embd)
        self.wpe = Embedding(c.block_size, c.n_embd) if c.pos == "learned" else None
        self.wte_prev = Embedding(c.padded_vocab_size, c.n_embd) if c.prev_embedding else None
        self.h = nn.ModuleList(self.block_class(c, i) for i in range(c.n_layer))
        self.ln_f = Norm(c.n_embd, c.norm, c.bias, c.norm_eps)
        self.lm_head = None  # tied: the embedding is also the output layer
        if not c.tie_weights:
            self.lm_head = nn.Linear(c.n_embd, c.padded_vocab_size, bias=False)
        # The rows past vocab_size are padding: they get no probability and no gradient.
        self.loss = LanguageModelLoss()
        self.add_tables(token_bytes)
        if c.other:
            c.other.rebuild(self)
        fill(self, seed)  # see initial(); what it does not know stays as its module made it

    def add_tables(self, token_bytes):
        """Constants that move with the model but are not saved. Under torch.device("meta") they are
        real all the same: they are not filled afterwards, as the weights are."""
        c, cos, sin, size = self.config, None, None, None
        if c.pos == "rope":  # once, not in every layer and pass: (block_size, D / 2)
            positions = torch.arange(c.block_size, dtype=torch.float32, device="cpu")
            with torch.device("cpu"):
                cos, sin = c.rope_tables(positions)
        if token_bytes is not None:  # (V,)
            size = torch.zeros(c.padded_vocab_size, dtype=torch.int64, device="cpu")
            size[:len(token_bytes)] = torch.from_numpy(token_bytes)
        for name, table in (("rope_cos", cos), ("rope_sin", sin), ("token_bytes", size)):
            self.register_buffer(name, table, persistent=False)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None, cache=None,
                last_only: bool = False):
        """idx (B, T) int64, targets (B, T) int64 with -1 where none. With a cache, idx are the
        tokens that follow what it holds; last_only: of the last one alone, (B, 1, vocab_size)."""
        # The logits (B, T, V) are the largest tensor by far. With targets they are never whole in
        # memory: model/core/ops.py makes loss and gradient of them a chunk at a time.
        x = self.trunk(idx, cache)  # (B, T, C)
        if targets is None:
            return self.logits(x[:, -1:] if last_only else x)
        loss = self.loss(x, self.head_weight(), targets, self.config.vocab_size)
        return loss, {} if self.training else self.sums(targets)

    def trunk(self, idx, cache=None):
        """Normalised states (B, T, C) of the last layer."""
        c, T = self.config, idx.size(1)
        if T > c.block_size:
            raise ValueError(f"{T} tokens; the context of this model is {c.block_size} "
                             "(block_size)")
        positions = None if cache is None else cache.start(T)  # of idx: (1 or B, T)
        x = self.wte(idx)  # (B, T, C), the residual stream: every block reads it and adds to it
        if self.wpe is not None:
            x = x + (self.wpe.weight[:T] if cache is None else
                     self.wpe(positions.long().to(idx.device)))
        if self.wte_prev is not None:  # the first token of a text has none before it: -1
            prev = (F.pad(idx[:, :-1], (1, 0), value=-1) if cache is None else
                    cache.previous(idx))  # (B, T)
            x = x + self.wte_prev(prev.clamp(min=0)) * (prev >= 0)[..., None]
        kind = x.device.type
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16:
            x = x.bfloat16()  # half the memory traffic of a float32 stream
        x = apply_dropout(x, c.dropout, self.training)
        # Positions: learned ones were added to x above; rotary ones turn queries and keys, so that
        # a score depends on the distance of two tokens only.
        rope = None
        if c.pos == "rope":
            rope = ((self.rope_cos[:T], self.rope_sin[:T]) if cache is None else
                    c.rope_tables(positions))
            rope = [t.to(x)[..., None, :] for t in rope]  # (T, 1, D/2), here once for all blocks
        for block in self.h:
            x = block(x, rope, cache)
        if cache is not None:
            cache.finish(idx)
        return self.ln_f(x)

    def head_weight(self):
        return self.wte.weight if self.lm_head is None else self.lm_head.weight

    def logits(self, x):
        """Logits (..., vocab_size) of normalised states x (..., C): padded ids are left out."""
        z = F.linear(x, self.wte.weight) if self.lm_head is None else self.lm_head(x)  # (..., V)
        return z.float()[..., :self.config.vocab_size]

    def sums(self, targets):
        """What evaluation adds up beside the loss: targets that count, and bytes of their text (0
        where no tokenizer says)."""
        counted, size = targets != IGNORE, targets.new_zeros(())  # (B, T), ()
        if self.token_bytes is not None:
            size = (self.token_bytes[targets.clamp(min=0)] * counted).sum()
        return dict(count=counted.sum(), bytes=size)

    def numbers(self, sums):
        """{"ppl", "bpb"} of an evaluation from its sums, in which the loop has put "loss" (nats);
        {} of training steps. None stands for unknown."""
        if "bytes" not in sums:
            return {}
        loss, count, size = (float(sums[name]) for name in ("loss", "count", "bytes"))
        # Nats a token depend on the tokenizer; bits a byte of text compare models across them.
        return dict(ppl=math.exp(min(loss / count, 700.0)) if count else None,
                    bpb=loss / math.log(2) / size if size else None)

    def initial(self, name, shape, seed):
        """The initial value of a parameter: a pure function of (seed, name), so that a sharded
        model can be filled one tensor at a time. GPT-2's scheme: N(0, 0.02), the projections back
        into the stream shrunk by sqrt(2 n_layer); the output layer small enough that the first loss
        is ln(vocab_size). None for a parameter that is not in PARTS: it keeps what its own module
        made. With FSDP no module makes any; there each needs a line here."""
        c, part = self.config, PARTS.fullmatch(name)
        if part is None:
            return None
        if name.endswith("bias"):
            return torch.zeros(shape)
        if len(shape) == 1:  # of a norm
            return torch.ones(shape)
        std = 0.02
        # 2 n_layer projections add up in the stream: its variance stays that of one.
        if part["inner"] in ("attn.o", "mlp.down"):
            std = 0.02 / math.sqrt(2 * c.n_layer)
        # x is normalised, so logits have the deviation std sqrt(C): 0.3 is close to uniform.
        if part["outer"] == ("wte" if c.tie_weights else "lm_head"):
            std = min(0.02, 0.3 / math.sqrt(c.n_embd))
        return normal(name, shape, std, seed)

    def adopt(self, weights):
        """Weights to start from, as they are; of more learned positions than ours the first."""
        if self.wpe is not None and "wpe.weight" in weights:
            weights = weights | {"wpe.weight": weights["wpe.weight"][:self.config.block_size]}
        return weights

    def flops_per_unit(self):
        """Training FLOPs a token, PaLM's count (arXiv:2204.02311, appendix B): 6 for each weight
        that multiplies, and 12 n_layer n_embd block_size for attention (as if it saw all). A third
        of these are the forward pass alone, and a third the gradients of weights, which frozen ones
        have not."""
        c = self.config
        # Embeddings are looked up, not multiplied, but for one that is the output layer as well.
        lookups = [self.wpe, self.wte_prev] + ([] if self.lm_head is None else [self.wte])
        lookups = {id(m.weight) for m in lookups if m is not None}
        weights = [p for p in self.parameters() if id(p) not in lookups]
        n = sum(p.numel() for p in weights)
        trained = sum(p.numel() for p in weights if p.requires_grad)
        attention = 4 * c.n_layer * c.n_head * c.head_dim * c.block_size
        return 4 * n + 2 * trained + 3 * attention if trained else 2 * n + attention


# Names of a GPT's own parameters: of the model, and inside its blocks.
PARTS = re.compile(r"(?:(?P<outer>wte|wpe|wte_prev|ln_f|lm_head)|h\.\d+\."
                   r"(?P<inner>ln_[12]|attn\.(?:[qkvo]|[qk]_norm)|mlp\.(?:gate|up|down)|"
                   r"(?:attn|mlp)\.out_norm))\.(?:weight|bias)")


def fill(model, seed):
    """Give the parameters and saved buffers of `model` the values of model.initial(name, shape,
    seed), but for those of which it says None, and those on the meta device."""
    for name, tensor in model.state_dict().items():
        value = None if tensor.is_meta else model.initial(name, tensor.shape, seed)
        if value is not None:
            tensor.copy_(value)


def normal(name, shape, std, seed):
    """N(0, std) for the parameter `name`: a pure function of all four."""
    generator = torch.Generator().manual_seed(stable_hash(seed, name))
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def stable_hash(seed, name):
    """63 bits of (seed, name), the same on every machine (Python's hash() is salted)."""
    h = 0xCBF29CE484222325 ^ seed
    for byte in name.encode():
        h = ((h ^ byte) * 0x100000001B3) % 2**64  # FNV-1a
    return h >> 1


# -----------------------------------------------------------------------------
# what train/train.py asks of a model file

def build_model(config, data, kind=GPT, shape=GPTConfig):
    """The model of a run. config has the fields of `shape`, seed and gradient_checkpointing;
    data.spec says the vocab_size and, where the text is known, the tokenizer. kind: GPT, or what
    is made from the same arguments."""
    args = {f.name: getattr(config, f.name) for f in fields(shape)}
    token_bytes = None
    if data.spec.get("tokenizer"):
        from data.tokenizer import tokenizer_from_spec
        token_bytes = tokenizer_from_spec(data.spec["tokenizer"]).token_bytes()
    args["vocab_size"] = data.spec["vocab_size"]
    model = kind(shape(**args), config.seed, token_bytes)
    for block in model.h:
        block.gradient_checkpointing = config.gradient_checkpointing
    return model


def sample(model, data, config):
    """Texts of an evaluation, see model/core/generate.py."""
    return sample_texts(model, data.spec, config)
