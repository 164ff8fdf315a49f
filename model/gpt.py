"""The GPT: configuration, blocks, forward pass, initial weights. One file, to be read from the top.

A decoder-only transformer with the choices of GPT-2 (LayerNorm, learned positions, GELU, biases)
and of Llama (RMSNorm, rotary positions, SwiGLU, no biases) as options, and the variations of newer
models, each a field of GPTConfig. References:
1) nanoGPT: github.com/karpathy/nanoGPT/blob/master/model.py
2) Llama: github.com/huggingface/transformers, models/llama/modeling_llama.py

Shapes: B batch, T time (tokens), C channels (n_embd), H heads, G heads of keys and values
(n_kv_head), D head size (head_dim), V rows of the embedding.
"""

import functools
import math
import re
from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from data.tokenizer import tokenizer_from_spec
from model.core import ops
from model.core.generate import sample  # noqa: F401  a hook of the model interface
from model.core.init import fill, normal
from model.core.weights import as_gpt, inherit_shape  # noqa: F401  hooks of the model interface
from train.base.errors import SetupError
from train.base.keys import GPTKeys
from train.system import ModelHooks

USE = "python -m model.sample --ckpt {out}/ckpt.pt"  # printed at the end of a run


@dataclass
class GPTConfig(GPTKeys):
    """The architecture of a GPT. The fields are those of GPTKeys (train/base/keys.py).

    n_kv_head, n_hidden and head_dim that are `None` become n_head, 4 * n_embd and n_embd // n_head.
    Raises ValueError if vocab_size is missing or fields contradict each other.
    """

    def __post_init__(self):
        if self.vocab_size is None:
            raise ValueError("GPTConfig: vocab_size is missing; give the number of token ids")
        self.check_shape()
        self.n_kv_head = self.n_kv_head or self.n_head
        self.n_hidden = self.n_hidden or 4 * self.n_embd
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        # Whether the embedding of a token depends on the tokens before it.
        self.uses_history = self.prev_embedding or self.ngram_rows > 0

    @property
    def padded_vocab_size(self):
        """Rows of the embedding (V): vocab_size rounded up to a multiple of 128, for efficiency."""
        return (self.vocab_size + 127) // 128 * 128

    def layer_type(self, layer):
        """Return the attention type of block `layer`, a letter of the repeated layer_types.

        F: full attention, W: the last `window` tokens; f, w: the same without rotary positions.
        """
        return self.layer_types[layer % len(self.layer_types)]

    def rope_tables(self, positions):
        """Return the cosines and sines of the rotary angles at float `positions` (...).

        Shape (n, 2, ..., D / 2), float32: index 0 of dimension 1 has cosines, index 1 sines. n is
        1, or 2 with window_rope_theta: index 1 is then for layers of type W (rope_index).
        """
        tables = [ops.rope_table(positions, self.head_dim, self.rope_theta, self.rope_factors)]
        if self.window_rope_theta:
            tables.append(ops.rope_table(positions, self.head_dim, self.window_rope_theta))
        return torch.stack(tables)

    def rope_index(self, layer):
        """Return the index in rope_tables() for block `layer`; -1 without rotary positions."""
        if self.pos != "rope" or self.layer_type(layer).islower():
            return -1
        return int(self.layer_type(layer) == "W" and self.window_rope_theta is not None)


class Embedding(nn.Embedding):
    """nn.Embedding that skips the random initialisation on the meta device.

    It imports torch._dynamo: over a second whenever a checkpoint is loaded.
    """

    def reset_parameters(self):
        if not self.weight.is_meta:
            super().reset_parameters()


class Norm(nn.Module):
    """RMSNorm (kind "rms", arXiv:1910.07467) or LayerNorm ("layer") over the last dimension.

    bias: for LayerNorm only. weight: False for RMSNorm without a weight. Computed in float32,
    because in bfloat16 the mean of squares is too imprecise; the result has the dtype of the input.
    """

    def __init__(self, dim, kind, bias, eps, weight=True):
        super().__init__()
        self.rms = kind == "rms"
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim)) if weight else None
        self.bias = nn.Parameter(torch.zeros(dim)) if bias and not self.rms else None

    def forward(self, x):
        weight = None if self.weight is None else self.weight.float()  # FSDP gathers bfloat16
        if self.rms and x.device.type == "cpu" and not torch.compiler.is_compiling():
            norm = ops.RMSNorm.apply if torch.is_grad_enabled() else ops.rms_norm_no_grad
            y = norm(x.float(), self.eps)
            return (y if weight is None else y * weight).type_as(x)
        if self.rms:
            return F.rms_norm(x.float(), x.shape[-1:], weight, self.eps).type_as(x)
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), weight.shape, weight, bias, self.eps).type_as(x)


class NormAllHeads(Norm):
    """RMSNorm of queries or keys (B, T, H, D) over all heads together, as in OLMo 2."""

    def forward(self, x):
        return super().forward(x.flatten(2)).view_as(x)


def qk_norm(c, n_head):
    """Return the norm of queries or keys (B, T, n_head, D); nn.Identity without c.qk_norm.

    c: a GPTConfig. qk_norm_type: "plain" per head without weights, "head" per head with weights,
    "all" over all heads together with weights.
    """
    if not c.qk_norm:
        return nn.Identity()
    if c.qk_norm_type == "all":
        return NormAllHeads(n_head * c.head_dim, "rms", False, c.norm_eps)
    return Norm(c.head_dim, "rms", False, c.norm_eps, weight=c.qk_norm_type == "head")


# norm_position: the places of a block that have a norm
NORM_PLACES = {"pre": ["pre"], "post": ["post"], "both": ["pre", "post"], "stream": ["pre"]}


def stream_norm(c, position):
    """Return the norm before ("pre") or after ("post") attention or MLP, or nn.Identity for none.

    c: a GPTConfig; norm_position selects. With "stream" (BERT), the output of "pre" replaces the
    residual stream.
    """
    if position not in NORM_PLACES[c.norm_position]:
        return nn.Identity()
    return Norm(c.n_embd, c.norm, c.bias, c.norm_eps)


class Attention(nn.Module):
    """Self-attention with grouped queries (arXiv:2305.13245), (B, T, C) -> (B, T, C).

    Causal unless forward() gets a mask, which causal: false requires. `config` selects rotary
    positions, sliding window, norms and dropout. layer: the index of the block.
    """

    def __init__(self, config, layer):
        super().__init__()
        c = self.config = config
        self.layer = layer  # the number by which a cache stores keys and values
        self.window = c.window if c.layer_type(layer) in "Ww" else None
        self.rope_index = c.rope_index(layer)
        q_dim, kv_dim = c.n_head * c.head_dim, c.n_kv_head * c.head_dim
        # query, key, value projections of all heads
        self.q = nn.Linear(c.n_embd, q_dim, bias=c.bias or c.qkv_bias)
        self.k = nn.Linear(c.n_embd, kv_dim, bias=c.bias or c.qkv_bias)
        self.v = nn.Linear(c.n_embd, kv_dim, bias=c.bias or c.qkv_bias)
        # output projection
        self.o = nn.Linear(q_dim, c.n_embd, bias=c.bias)
        # norms of queries and keys bound the scores, so that a high learning rate is stable
        self.q_norm = qk_norm(c, c.n_head)
        separate = c.qk_norm and c.qk_norm_type in ("head", "all")  # norms with weights
        self.k_norm = qk_norm(c, c.n_kv_head) if separate else None
        self.out_norm = stream_norm(c, "post")

    def forward(self, x, ropes=(), cache=None, mask=None):
        """Return the output (B, T, C) for x (B, T, C).

        ropes: the tables of GPTConfig.rope_tables() at the T positions; () without rotary ones.
        cache: a KVCache with the earlier tokens, updated in place; call its start() before.
        mask: (B or 1, 1, T or 1, T) bool instead of the causal mask, true where a query sees a key.
            ValueError with a cache.
        """
        c = self.config
        # Queries and keys stay side by side: norm and rotation are the same for both.
        qkv = ops.fused_linear(x, self.q, self.k, self.v).unflatten(-1, (-1, c.head_dim))
        qk, v = qkv.split((c.n_head + c.n_kv_head, c.n_kv_head), dim=2)  # (B, T, H + G or G, D)
        if self.k_norm is None:
            qk = self.q_norm(qk)
        else:  # norms with weights differ
            q, k = qk.split((c.n_head, c.n_kv_head), dim=2)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=2)
        if self.rope_index >= 0:  # a score then depends on the distance of two tokens only
            qk = ops.apply_rope(qk, ropes[self.rope_index])
        q, k = qk.split((c.n_head, c.n_kv_head), dim=2)  # (B, T, H, D), (B, T, G, D)
        if c.key_offset:  # a query then finds what followed an earlier token like its own
            before = cache.swap_last_key(self.layer, k[:, -1:]) if cache is not None else None
            k = ops.offset_keys(k, mask, before)
        q = q * c.score_scale if c.score_scale != 1 else q
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H or G, T, D)
        if cache is not None:  # decoding: keys and values of all S tokens until now, (B, G, S, D)
            if mask is not None:
                raise ValueError("a mask and a cache: expected one; the cache has a mask itself")
            k, v, mask = cache.update(self.layer, k, v)
        if self.window:
            k, v, mask = ops.limit_to_window(self.window, k, v, mask, q.size(2), c.causal)
        y = ops.attend(q, k, v, c.dropout * self.training, mask, c.causal)  # (B, H, T, D)
        y = self.out_norm(self.o(y.transpose(1, 2).flatten(2)))  # heads side by side, (B, T, C)
        return ops.apply_dropout(y, c.dropout, self.training)


class MLP(nn.Module):
    """The feed-forward layer, (B, T, C) -> (B, T, C), with dropout and output norm.

    config.mlp: swiglu, geglu (gated, arXiv:2002.05202), gelu or relu2 (arXiv:2109.08668). geglu and
    gelu use the tanh approximation, as GPT-2; geglu_exact and gelu_exact do not, as nanoGPT.
    """

    gelu_tanh = functools.partial(F.gelu, approximate="tanh")
    activations = dict(swiglu=F.silu, geglu=gelu_tanh, geglu_exact=F.gelu, gelu=gelu_tanh,
                       gelu_exact=F.gelu, relu2=lambda x: F.relu(x).square())

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        # The gated forms have three matrices instead of two: n_hidden must be 2/3 of that of the
        # others for the same number of weights.
        self.gate = None
        if "glu" in c.mlp:
            self.gate = nn.Linear(c.n_embd, c.n_hidden, bias=c.bias)
        self.up = nn.Linear(c.n_embd, c.n_hidden, bias=c.bias)
        self.down = nn.Linear(c.n_hidden, c.n_embd, bias=c.bias)
        self.out_norm = stream_norm(c, "post")

    def forward(self, x):
        activate = self.activations[self.config.mlp]
        # (B, T, n_hidden)
        x = activate(self.up(x)) if self.gate is None else activate(self.gate(x)) * self.up(x)
        return self.out_norm(ops.apply_dropout(self.down(x), self.config.dropout, self.training))


# gradient_checkpointing: arguments of torch.utils.checkpoint
CHECKPOINTING = {"true": {}, "selective": dict(context_fn=ops.save_matrix_products)}


class Block(nn.Module):
    """A transformer block: attention and MLP, each added to the residual stream x (B, T, C).

    forward(x, *context) -> x; context: ropes, cache and mask of Attention.forward(). mlp: class of
    the feed-forward layer. compute(x, *context, **of_mlp) is the block without gradient
    checkpointing; of_mlp: keyword arguments of the feed-forward layer's forward().
    """
    is_block = True  # compiled and sharded by itself, see train/system.py
    compiles_decoding = True  # one graph computes a single token in every block (model/sample)

    def __init__(self, config, layer, mlp=MLP):
        super().__init__()
        self.ln_1 = stream_norm(config, "pre")
        self.attn = Attention(config, layer)
        self.ln_2 = stream_norm(config, "pre")
        self.mlp = mlp(config)
        # BERT: each norm replaces the stream; the norm of the embedding is the first block's ln_1.
        self.norms_stream = config.norm_position == "stream"
        self.norms_input = self.norms_stream or config.embed_norm and layer == 0
        self.gradient_checkpointing = "false"

    def forward(self, x, *context):
        if self.gradient_checkpointing == "false" or not self.training:
            return self.compute(x, *context)
        # Inside the block, not around it: FSDP's hooks around a block interrupt a compiled graph.
        return checkpoint(self.compute, x, *context, use_reentrant=False,
                          **CHECKPOINTING[self.gradient_checkpointing])

    def compute(self, x, *context, **of_mlp):
        y = self.ln_1(x)
        x = (y if self.norms_input else x) + self.attn(y, *context)
        y = self.ln_2(x)
        return (y if self.norms_stream else x) + self.mlp(y, **of_mlp)


class GPT(nn.Module):
    """A GPT: forward(idx, targets) -> (mean loss, sums); forward(idx) -> logits (B, T, vocab_size).

    idx, targets: int64 (B, T); a target of -1 does not count. sums: {name: tensor}, sums over the
    targets, for the log. trunk() computes the states after the final norm, logits() the logits.
    seed: of the initial weights. token_bytes (n_vocab,), an int64 numpy array: the byte count of
    each token, for bits per byte. is_backbone: only trunk() is used, as is required for an encoder
    (causal: false).
    """
    block_class = Block  # other model types have other blocks

    def __init__(self, config: GPTConfig, seed: int = 1337, token_bytes=None, is_backbone=False):
        super().__init__()
        c = self.config = config
        self.is_backbone = is_backbone
        if not c.causal and not is_backbone:
            raise SetupError("causal: false: an encoder, such as BERT, is no language model; use "
                             "it as the backbone (init_from) of classifiers")
        # The names are nanoGPT's: token and position embedding, blocks h, final norm, output layer.
        self.wte = Embedding(c.padded_vocab_size, c.n_embd)
        self.wpe = Embedding(c.block_size, c.n_embd) if c.pos == "learned" else None
        self.wte_prev = Embedding(c.padded_vocab_size, c.n_embd) if c.prev_embedding else None
        self.wte_ngram = Embedding(c.ngram_rows, c.n_embd) if c.ngram_rows else None
        self.h = nn.ModuleList(self.block_class(c, i) for i in range(c.n_layer))
        self.ln_f = Norm(c.n_embd, c.norm, c.bias, c.norm_eps)
        self.lm_head = None  # weight tying: the token embedding is also the output layer
        if not c.tie_weights:
            self.lm_head = nn.Linear(c.n_embd, c.padded_vocab_size, bias=False)
        # Rows past vocab_size are padding: no probability, no gradient.
        self.loss = ops.LinearCrossEntropy()
        self.add_buffers(token_bytes)
        self.train_tokens = c.block_size  # per window in training, at most the context
        self.filled = fill(self, seed)  # by initial(); build_model fills what subclasses add

    def add_buffers(self, token_bytes):
        """Register the buffers `ropes` and `token_bytes`, which are not saved.

        ropes: rope_tables() of the positions 0 to block_size - 1, or `None`. token_bytes: (V,)
        int64, 0 where unknown. They have values also under torch.device("meta"), since nothing
        initialises them later.
        """
        c = self.config
        ropes = None
        with torch.device("cpu"):
            if c.pos == "rope":  # once, not per layer and pass
                positions = torch.arange(c.block_size, dtype=torch.float32)[:, None]
                ropes = c.rope_tables(positions)  # (1 or 2, 2, block_size, 1, D / 2)
            sizes = torch.zeros(c.padded_vocab_size, dtype=torch.int64)  # (V,)
            if token_bytes is not None:
                sizes[:len(token_bytes)] = torch.from_numpy(token_bytes)
        self.register_buffer("ropes", ropes, persistent=False)
        self.register_buffer("token_bytes", sizes, persistent=False)

    def forward(self, idx, targets=None, *others, cache=None, last_only=False):
        """Return (mean loss, sums), or without `targets` the logits (B, T, vocab_size).

        idx: (B, T) token ids. others: more tensors of a batch, for subclasses. cache: a KVCache
        with the earlier tokens, updated in place. last_only: logits (B, 1, vocab_size) of the last
        token.
        """
        if targets is not None:
            return self.compute_loss(idx, targets, *others)
        x = self.trunk(idx, cache)  # (B, T, C)
        if cache is not None:
            cache.check_used()
        return self.logits(x[:, -1:] if last_only else x)

    def compute_loss(self, idx, targets):
        """Return (mean loss, {name: sum}) for idx, targets (B, T). Subclasses override it."""
        return self.score(self.trunk(idx), targets)

    def score(self, x, targets):
        """Return (mean loss, {name: sum}) of targets (B, T) for the states x (B, T, C) of trunk().

        Sums: "count", the targets that count (not -1); in eval mode "bytes" of their text, 0 if
        unknown.
        """
        # (B, T), 0 where the target does not count
        losses = self.loss(x, (self.lm_head or self.wte).weight, targets, self.config.vocab_size)
        counted = targets != ops.IGNORE  # (B, T)
        n = counted.sum()
        loss = (losses * (1 / n.clamp(min=1))).sum()
        sums = dict(count=n)
        if not self.training:
            sums["bytes"] = (self.token_bytes[targets.clamp(min=0)] * counted).sum()
        return loss, sums

    def trunk(self, idx, cache=None, mask=None, positions=None, history=None):
        """Return the states (B, T, C) after the final norm for token ids idx (B, T).

        cache: a KVCache with the earlier tokens, updated in place. Without one: mask, of
        Attention.forward() (default: causal); positions (B, T) (default: from 0); history (B, T),
        the tokens before each token, as from ops.histories() (default: those in idx).
        """
        c = self.config
        T = idx.size(1)
        if T > c.block_size:
            raise ValueError(f"{T} tokens; the model's context (block_size) is {c.block_size}")
        if cache is not None:
            positions, history = cache.start(idx)  # (1 or B, T), (B, T)
        x = self.wte(idx)  # (B, T, C), embeddings of tokens, positions and tokens before
        x = x * c.embed_scale if c.embed_scale != 1 else x
        if self.wpe is not None:
            x = x + (self.wpe.weight[:T] if positions is None else self.wpe(positions))
        if history is None and c.uses_history:
            history = ops.histories(idx)
        if self.wte_prev is not None:
            previous = (history & ops.ID_MASK) - 1  # -1: idx is the first token of a text
            x = x + self.wte_prev(previous.clamp(min=0)) * (previous >= 0)[..., None]
        if self.wte_ngram is not None:  # (B, T, 2, C)
            x = x + self.wte_ngram(ops.ngram_rows(idx, history, c.ngram_rows)).sum(2)
        device = x.device.type
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16:
            x = x.bfloat16()  # half the memory traffic of a float32 stream
        x = ops.apply_dropout(x, c.dropout, self.training)
        ropes = ()
        if c.pos == "rope":  # (2, T, 1, D / 2) or (2, B, T, 1, D / 2) each
            ropes = (self.ropes[:, :, :T] if positions is None else
                     self.ropes[:, :, positions]).to(x).unbind()
        for block in self.h:
            x = block(x, ropes, cache, mask)
        return self.ln_f(x)

    def logits(self, x):
        """Return the logits (..., vocab_size), float32, for the states x (..., C) of trunk()."""
        z = F.linear(x, self.wte.weight) if self.lm_head is None else self.lm_head(x)  # (..., V)
        return ops.finish_logits(z.float())[..., :self.config.vocab_size]

    def numbers(self, sums):
        """Return {name: number or `None`} for the log: each 0-dim sum divided by sums["count"].

        sums: those of compute_loss() over all batches, and the total "loss". "loss" and "count" are
        left out; "bytes" gives "ppl" (perplexity) and "bpb" (bits per byte), `None` if unknown.
        """
        numbers = ModelHooks.numbers(self, sums) if len(sums) > 2 else {}  # besides loss and count
        if taken := {"ppl", "bpb"} & numbers.keys():
            raise SetupError(f"forward(*batch): rename the sum {taken.pop()}, the name is reserved")
        if "bytes" in sums:  # compares models across tokenizers, unlike nats per token
            loss, count, size = (float(sums[name]) for name in ("loss", "count", "bytes"))
            del numbers["bytes"]
            numbers["ppl"] = math.exp(min(loss / count, 700.0)) if count else None
            numbers["bpb"] = loss / math.log(2) / size if size else None
        return numbers

    def initial(self, name, shape, seed):
        """Return the initial value of the parameter `name`, a pure function of (seed, name).

        A sharded model is initialised by it, one tensor at a time. `None` for other parameters than
        a plain GPT's: these keep the value of their module's __init__, which FSDP does not support.
        """
        c = self.config
        # GPT-2's scheme: N(0, 0.02); the 2 n_layer projections into the stream are smaller, so that
        # the sum has the variance of one.
        into_stream = 0.02 / math.sqrt(2 * c.n_layer)
        stds = {"wte": 0.02, "wpe": 0.02, "wte_prev": 0.02, "lm_head": 0.02, "attn.q": 0.02,
                "attn.k": 0.02, "attn.v": 0.02, "attn.o": into_stream, "mlp.gate": 0.02,
                "mlp.up": 0.02, "mlp.down": into_stream, "wte_ngram": 0}
        # The first loss is ln(vocab_size): the states are normalised, so logits have the standard
        # deviation std sqrt(C), and 0.3 is close to uniform probabilities (GPT-2 has 0.02).
        stds["wte" if c.tie_weights else "lm_head"] = min(0.02, 0.3 / math.sqrt(c.n_embd))
        part = re.sub(r"^h\.\d+\.|\.(weight|bias)$", "", name)
        is_norm = re.fullmatch(r"ln_[12f]|(attn|mlp)\.(q_norm|k_norm|out_norm)", part)
        if part not in stds and not is_norm:
            return None
        if name.endswith("bias"):
            return torch.zeros(shape)
        return torch.ones(shape) if is_norm else normal(name, shape, stds[part], seed)

    def adopt(self, weights):
        """Return weights to start from, with learned positions cut to block_size rows."""
        if self.wpe is not None and "wpe.weight" in weights:
            weights = weights | {"wpe.weight": weights["wpe.weight"][:self.config.block_size]}
        return weights

    def flops_per_unit(self):
        """Return the training FLOPs per token, as counted by PaLM (arXiv:2204.02311, appendix B).

        6 per weight in a matrix product, and 12 H D per layer and visible token: all of the sample
        or window, without the causal mask. A third each is the forward pass, the gradients of
        inputs and those of weights; frozen weights have no last third, and a frozen model only the
        first.
        """
        c = self.config
        # Embeddings are lookups, except for a tied one, which is the output layer too.
        lookups = {id(m.weight) for m in self.modules() if isinstance(m, nn.Embedding)}
        head = (self.lm_head or self.wte).weight
        weights = [p for p in self.parameters()
                   if id(p) not in lookups or p is head and not self.is_backbone]
        # A sampled loss (head_samples) computes the logits of few rows of the output layer.
        skipped = head.numel() - len(getattr(self.loss, "ids", head)) * c.n_embd
        n = sum(p.numel() for p in weights) - skipped
        trained = sum(p.numel() for p in weights if p.requires_grad) - skipped * head.requires_grad
        T = self.train_tokens
        visible = sum(min(block.attn.window or T, T) for block in self.h)
        attention = 4 * c.n_head * c.head_dim * visible
        return 4 * n + 2 * trained + 3 * attention if trained else 2 * n + attention


# -----------------------------------------------------------------------------
# the model interface, see train/system.py

def build_model(config, data, kind=GPT, shape=GPTConfig):
    """Return the model of a run with initial weights: kind(shape(...), seed, token_bytes).

    config: a TrainConfig with all fields of `shape`. The model's block_size is config.context, at
    least the run's windows, config.block_size. data: has the attribute spec, with vocab_size and,
    for text, the tokenizer; with head_samples also train, the loader. kind: GPT, a subclass, or a
    function with the same arguments. shape: GPTConfig or a subclass.
    """
    args = {f.name: getattr(config, f.name) for f in fields(shape)}
    token_bytes = None
    if data.spec.get("tokenizer"):
        token_bytes = tokenizer_from_spec(data.spec["tokenizer"]).token_bytes()
    args |= dict(vocab_size=data.spec["vocab_size"], block_size=config.context)
    model = kind(shape(**args), config.seed, token_bytes)
    fill(model, config.seed, model.filled)  # what the __init__ of `kind` has added
    model.train_tokens = config.block_size
    if config.head_samples and config.model == "gpt":
        use_sampled_loss(model, config.head_samples, data.train, config.seed)
    for block in model.h:
        block.gradient_checkpointing = config.gradient_checkpointing
    return model


def use_sampled_loss(model, n_samples, loader, seed):
    """Replace the loss of a GPT by a SampledCrossEntropy with `n_samples` ids, in place.

    The frequencies of ids are those of the loader's first 2^20 tokens, about. SetupError unless
    n_samples is smaller than the vocabulary.
    """
    if n_samples >= model.config.vocab_size:
        raise SetupError(f"head_samples ({n_samples:,}): expected fewer than the "
                         f"{model.config.vocab_size:,} ids of the vocabulary; 0 computes all")
    first = np.arange(min(loader.samples, -(-(1 << 20) // loader.units_per_sample)))
    with torch.device("cpu"):
        _, targets = loader.tensors(loader.read(first), torch.device("cpu"))
        model.loss = ops.SampledCrossEntropy(targets, model.config.vocab_size, n_samples, seed)
