"""The GPT: configuration, blocks, forward pass, initial weights. One file, top to bottom.

A decoder-only transformer with the choices of GPT-2 (LayerNorm, learned positions, GELU, biases)
and of Llama (RMSNorm, rotary positions, SwiGLU, no biases) as options, and a few newer ones, each a
field of GPTConfig. Shapes: B batch, T time (tokens), C channels (n_embd), H heads, D head size.
"""

import math
from dataclasses import dataclass, fields

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from model.cross_entropy import linear_cross_entropy, soft_cap
from model.rms_norm import rms_norm


@dataclass
class GPTConfig:
    """The shape of a GPT; the defaults are the production model. Meanings: run_train.py --help."""
    block_size: int = 512
    vocab_size: int = 32000
    n_layer: int = 16
    n_head: int = 6
    n_kv_head: int | None = None
    n_embd: int = 384
    n_hidden: int | None = None
    dropout: float = 0.0
    bias: bool = False
    norm: str = "rms"
    norm_eps: float = 1e-5
    pos: str = "rope"
    rope_theta: float = 10000.0
    mlp: str = "swiglu"
    tie_weights: bool = True
    qk_norm: bool = False
    softcap: float = 0.0
    zero_init: bool = False
    value_embeddings: bool = False
    x0_residual: bool = False
    prev_embedding: bool = False

    def __post_init__(self):
        self.n_kv_head = self.n_kv_head or self.n_head
        self.n_hidden = self.n_hidden or 4 * self.n_embd

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    @property
    def padded_vocab_size(self):
        """Rows of the embedding in memory: a multiple of 128, which matrix units want."""
        return (self.vocab_size + 127) // 128 * 128


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
        weight = self.weight.float()  # FSDP hands out bfloat16 weights
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), weight.shape, weight, bias, self.eps).type_as(x)


def rope_tables(start, length, dim, theta, device):
    """cos, sin (length, dim / 2) of rotary positions (arXiv:2104.09864) from `start` on."""
    freq = theta ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    angles = torch.outer(torch.arange(start, start + length, device=device).float(), freq)
    return angles.cos(), angles.sin()


def apply_rope(x, cos, sin):
    """Rotate the two halves of the last dimension of x (B, T, H, D): Hugging Face's layout."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)  # (T, 1, D/2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class KVCache:
    """Keys and values of every layer for up to `length` positions: sampling computes each once."""

    def __init__(self, config, batch_size, length, device, dtype):
        shape = (2, config.n_layer, batch_size, config.n_kv_head, length, config.head_dim)
        self.kv, self.length, self.used = torch.zeros(shape, device=device, dtype=dtype), length, 0
        self.last = None  # (B, 1), the last token

    def update(self, layer, k, v):
        """Append k, v (B, H, T, D) of a layer; all of its keys and values so far."""
        end = self.used + k.size(2)
        self.kv[0, layer, :, :, self.used:end] = k
        self.kv[1, layer, :, :, self.used:end] = v
        return self.kv[0, layer, :, :, :end], self.kv[1, layer, :, :, :end]


VE_GATE_CHANNELS = 12  # channels of the stream that decide how much value embedding a head takes


class Attention(nn.Module):
    """Causal self-attention with grouped queries (arXiv:2305.13245)."""

    def __init__(self, config, layer):
        super().__init__()
        c = self.config = config
        self.layer = layer
        kv_dim = c.n_kv_head * c.head_dim
        self.q = nn.Linear(c.n_embd, c.n_embd, bias=c.bias)
        self.k = nn.Linear(c.n_embd, kv_dim, bias=c.bias)
        self.v = nn.Linear(c.n_embd, kv_dim, bias=c.bias)
        self.o = nn.Linear(c.n_embd, c.n_embd, bias=c.bias)
        self.ve = None
        if c.value_embeddings and layer % 2 == (c.n_layer - 1) % 2:
            self.ve = nn.Embedding(c.padded_vocab_size, kv_dim)
            self.ve_gate = nn.Linear(VE_GATE_CHANNELS, c.n_kv_head, bias=False)

    def forward(self, x, rope, idx, cache=None):
        c, (B, T, C) = self.config, x.size()
        qk, v = self.project(x)  # (B, T, H + G, D), (B, T, G, D)
        if self.ve is not None:
            gate = 2 * torch.sigmoid(self.ve_gate(x[..., :VE_GATE_CHANNELS]))  # (B, T, G)
            v = v + gate[..., None] * self.ve(idx).view_as(v).type_as(v)
        if c.qk_norm:
            qk = rms_norm(qk, eps=c.norm_eps)
        if rope is not None:
            qk = apply_rope(qk, *rope)
        q, k = qk.split((c.n_head, c.n_kv_head), dim=2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D)
        if cache is not None:
            k, v = cache.update(self.layer, k, v)
        y = attend(q, k, v, c.dropout if self.training else 0.0)
        y = self.o(y.transpose(1, 2).reshape(B, T, C))
        return F.dropout(y, c.dropout, self.training)

    def project(self, x):
        """Queries and keys side by side (B, T, H + G, D), values (B, T, G, D). One product beats
        three, but for a few tokens (sampling) joining the weights would cost more."""
        c, (B, T, _) = self.config, x.size()
        layers = (self.q, self.k, self.v)
        if B * T > 64:
            bias = torch.cat([m.bias for m in layers]) if c.bias else None
            y = F.linear(x, torch.cat([m.weight for m in layers]), bias)
        else:
            y = torch.cat([m(x) for m in layers], dim=-1)
        return y.view(B, T, -1, c.head_dim).split((c.n_head + c.n_kv_head, c.n_kv_head), dim=2)


def attend(q, k, v, dropout=0.0):
    """Causal attention of q (B, H, T, D) with k, v (B, G, S, D): query i stands at S - T + i, and
    each of the G heads of keys serves H / G heads of queries in turn. Returns (B, H, T, D)."""
    T, S = q.size(2), k.size(2)
    if k.size(1) != q.size(1):
        k, v = (t.repeat_interleave(q.size(1) // t.size(1), dim=1) for t in (k, v))
    if q.device.type == "cpu":
        if T == 1 and not dropout:  # sampling; PyTorch's kernel is slow for one query
            return (q * q.size(-1) ** -0.5 @ k.transpose(2, 3)).softmax(-1) @ v
        if q.dtype == torch.bfloat16 and T == S <= 1024:
            return attend_in_blocks(q, k, v, dropout)
    mask = None
    if 1 < T < S:
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=1 < T == S)


def attend_in_blocks(q, k, v, dropout, size=128):
    """The same in plain matrix products: a block of queries meets the keys up to its own end.

    On a CPU twice as fast as the kernel of PyTorch 2.13 (both passes: 18 and 37 ms at B 4, H 6,
    T 512, D 64, bfloat16, 2 cores). It keeps the probabilities, hence the limit on T above."""
    shape, T = q.shape, q.size(2)
    q, k, v = (t.flatten(0, 1) for t in (q * q.size(-1) ** -0.5, k, v))  # (B * H, T, D)
    future = torch.full((T, T), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    blocks = []
    for start in range(0, T, size):
        end = min(start + size, T)
        scores = q[:, start:end] @ k[:, :end].transpose(1, 2) + future[start:end, :end]
        p = F.dropout(scores.softmax(-1), dropout)
        blocks.append(p @ v[:, :end])
    return torch.cat(blocks, dim=1).view(shape)


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202), GELU (GPT-2's tanh form) or squared ReLU (arXiv:2109.08668)."""

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        if c.mlp == "swiglu":
            self.gate = nn.Linear(c.n_embd, c.n_hidden, bias=c.bias)
        self.up = nn.Linear(c.n_embd, c.n_hidden, bias=c.bias)
        self.down = nn.Linear(c.n_hidden, c.n_embd, bias=c.bias)

    def forward(self, x):
        if self.config.mlp == "swiglu":
            x = F.silu(self.gate(x)) * self.up(x)
        elif self.config.mlp == "gelu":
            x = F.gelu(self.up(x), approximate="tanh")
        else:
            x = F.relu(self.up(x)).square()
        return F.dropout(self.down(x), self.config.dropout, self.training)


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        norm = (config.n_embd, config.norm, config.bias, config.norm_eps)
        self.ln_1, self.attn = Norm(*norm), Attention(config, layer)
        self.ln_2, self.mlp = Norm(*norm), MLP(config)

    def forward(self, x, rope, idx, cache=None):
        x = x + self.attn(self.ln_1(x), rope, idx, cache)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """forward(idx, targets) -> (loss, metrics); forward(idx) -> logits (B, T, vocab_size)."""

    def __init__(self, config, seed=1337):
        super().__init__()
        c = self.config = config
        self.gradient_checkpointing = "false"
        self.wte = nn.Embedding(c.padded_vocab_size, c.n_embd)
        self.wpe = nn.Embedding(c.block_size, c.n_embd) if c.pos == "learned" else None
        self.wte_prev = nn.Embedding(c.padded_vocab_size, c.n_embd) if c.prev_embedding else None
        self.h = nn.ModuleList(Block(c, i) for i in range(c.n_layer))
        self.ln_f = Norm(c.n_embd, c.norm, c.bias, c.norm_eps)
        self.lm_head = None  # tied: the embedding is also the output layer
        if not c.tie_weights:
            self.lm_head = nn.Linear(c.n_embd, c.padded_vocab_size, bias=False)
        if c.x0_residual:
            self.resid_scale = nn.Parameter(torch.ones(c.n_layer))
            self.x0_scale = nn.Parameter(torch.zeros(c.n_layer))
        for name, p in self.named_parameters():
            if not p.is_meta:
                with torch.no_grad():
                    p.copy_(self.initial(name, p.shape, seed))

    def forward(self, idx, targets=None, cache=None, last_only=False):
        """idx (B, T) int64, targets (B, T) int64 with -1 where none. With a cache, idx are the
        tokens that follow what it holds; last_only gives the logits of the last one, (B, 1, V)."""
        x = self.trunk(idx, cache)  # (B, T, C)
        if targets is None:
            return self.logits(x[:, -1:] if last_only else x)
        loss = linear_cross_entropy(x.flatten(0, 1), self.head_weight(), targets.flatten(),
                                    self.config.vocab_size, self.config.softcap)
        return loss, {}

    def trunk(self, idx, cache=None):
        c, start = self.config, cache.used if cache is not None else 0
        if start + idx.size(1) > c.block_size:
            raise ValueError(f"{start + idx.size(1)} tokens; the context of this model is "
                             f"{c.block_size} (block_size)")
        x = self.wte(idx)
        if self.wpe is not None:
            x = x + self.wpe.weight[start:start + idx.size(1)]
        if self.wte_prev is not None:
            before = cache.last if start else idx[:, :0]  # the first token has none before it
            prev = self.wte_prev(torch.cat((before, idx[:, :-1]), dim=1))
            x = x + F.pad(prev, (0, 0, idx.size(1) - prev.size(1), 0))
        if use_bfloat16(x.device.type):
            x = x.bfloat16()  # the residual stream: half the memory traffic of float32
        x = F.dropout(x, c.dropout, self.training)
        rope = (rope_tables(start, idx.size(1), c.head_dim, c.rope_theta, x.device)
                if c.pos == "rope" else None)
        x0 = x
        for i, block in enumerate(self.h):
            if c.x0_residual:
                x = self.resid_scale[i].type_as(x) * x + self.x0_scale[i].type_as(x) * x0
            x = self._run(block, x, rope, idx, cache)
        if cache is not None:
            cache.used, cache.last = cache.used + idx.size(1), idx[:, -1:]
        return self.ln_f(x)

    def _run(self, block, x, rope, idx, cache):
        if cache is not None:  # past compiled code: every call has another length
            return block.forward(x, rope, idx, cache)
        if self.gradient_checkpointing == "false" or not self.training:
            return block(x, rope, idx, cache)
        selective = self.gradient_checkpointing == "selective"
        policy = dict(context_fn=_save_matmuls) if selective else {}
        return checkpoint(block, x, rope, idx, use_reentrant=False, **policy)

    def compile(self, *args, **kwargs):
        """torch.compile, in place. On a CPU block by block: they share the code of the first, which
        is ready many times sooner than the whole, and the loss in chunks gains nothing from it."""
        if self.wte.weight.device.type != "cpu":
            return super().compile(*args, **kwargs)
        for block in self.h:
            block.compile(*args, **kwargs)

    def head_weight(self):
        return self.wte.weight if self.lm_head is None else self.lm_head.weight

    def logits(self, x):
        """Logits (..., vocab_size) of normalised states x (..., C): padded ids are left out."""
        z = F.linear(x, self.head_weight().to(x.dtype)).float()[..., :self.config.vocab_size]
        return soft_cap(z, self.config.softcap)

    def initial(self, name, shape, seed):
        """The initial value of a parameter: a pure function of (seed, name), so that a sharded
        model can be filled one tensor at a time. GPT-2's scheme: N(0, 0.02), the projections back
        into the stream shrunk by sqrt(2 n_layer); the output layer small enough that the first loss
        is ln(vocab_size)."""
        c, kind = self.config, name.rsplit(".", 2)[-2:]
        if name.endswith("bias") or name == "x0_scale" or "ve_gate" in name:
            return torch.zeros(shape)
        if len(shape) == 1:
            return torch.ones(shape)
        std = 0.02
        if kind[0] in ("o", "down"):
            std = 0.0 if c.zero_init else 0.02 / math.sqrt(2 * c.n_layer)
        if kind[0] == ("wte" if c.tie_weights else "lm_head"):
            std = min(0.02, 0.3 / math.sqrt(c.n_embd))
        if kind[0] == "lm_head" and c.zero_init:
            std = 0.0
        generator = torch.Generator().manual_seed(stable_hash(seed, name))
        return torch.empty(shape).normal_(0.0, std, generator=generator)

    def flops_per_token(self):
        """Training FLOPs a token, PaLM's count (arXiv:2204.02311, appendix B): 6 for each weight
        that multiplies, and 12 n_layer n_embd block_size for attention (as if it saw all)."""
        c = self.config
        lookups = [self.wpe, self.wte_prev] + [b.attn.ve for b in self.h]
        lookups += [self.wte] if self.lm_head is not None else []
        n = sum(p.numel() for p in self.parameters())
        n -= sum(m.weight.numel() for m in lookups if m is not None)
        return 6 * n + 12 * c.n_layer * c.n_embd * c.block_size


def use_bfloat16(device_type):
    return (torch.is_autocast_enabled(device_type)
            and torch.get_autocast_dtype(device_type) == torch.bfloat16)


def stable_hash(seed, name):
    """63 bits of (seed, name), the same on every machine (Python's hash() is salted)."""
    h = 0xCBF29CE484222325 ^ seed
    for byte in name.encode():
        h = ((h ^ byte) * 0x100000001B3) % 2**64  # FNV-1a
    return h >> 1


def _save_matmuls():
    """Selective checkpointing: keep the results of matrix products, recompute the cheap rest."""
    keep = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default,
            torch.ops.aten._scaled_dot_product_flash_attention.default,
            torch.ops.aten._scaled_dot_product_cudnn_attention.default,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]
    return create_selective_checkpoint_contexts(keep)


# -----------------------------------------------------------------------------
# what train/train.py asks of a model file

def build_model(config, vocab_size):
    """The model of a run: `config` is a TrainConfig, whose keys of the same names are taken."""
    args = {f.name: getattr(config, f.name) for f in fields(GPTConfig)}
    model = GPT(GPTConfig(**args | dict(vocab_size=vocab_size)), seed=config.seed)
    model.gradient_checkpointing = config.gradient_checkpointing
    return model


def sample_text(*args):
    """See model/sample.py."""
    from model import sample
    return sample.sample_text(*args)
