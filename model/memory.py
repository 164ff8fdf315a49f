"""A trained GPT with additional memory layers, which learn other text or conversations.

    python run_train.py --config train/configs/memory.yaml
    python -m model.convert --ckpt out/memory/ckpt.pt --to merged.pt

Each block of a frozen backbone gets n_chapters chapters of trainable keys and values. A router, as
in model/moe.py, chooses chapters_per_token chapters per token, to which the token's state attends;
the result is multiplied by a gate and added to the state. Gates start at zero and values do not, so
that step 0 equals the backbone and everything gets a gradient from step 1 on.

lora_rank adds adapters to the backbone (model/core/adapters.py), and train_base trains all of it.
lr_groups sets learning rates: {memory: {learning_rate: 0.01}, lora_*: {learning_rate: 0.001}}, with
`learning_rate` for the rest. The checkpoint has the trained weights and a digest of the backbone's;
model.convert merges both. Without a backbone, a GPT with memory is trained from scratch.

Shapes: B, T, C, H, D as in model/gpt.py; n chapters of S key-value pairs, k chapters per token.
"""

import functools
from dataclasses import dataclass, fields

import torch
import torch.nn as nn

from model import gpt, lora
from model.chat import ChatGPT
from model.core.adapters import PartialStateDict, WithAdapters, add_adapters, is_adapter
from model.core.init import normal
from model.gpt import GPTConfig, Norm
from model.moe import GroupedLinear, GroupOrder, RoutedBlock, RoutedGPT, Router, RouterKeys
from train.base.errors import CheckpointError, ConfigError
from train.base.fields import key

USE = lora.USE
MUST_MATCH_TO_INIT = ("backbone",)  # a memory belongs to one backbone


@dataclass
class Keys(RouterKeys):
    backbone: str = key("", "checkpoint of the GPT that gets a memory; \"\": a new GPT", free=True,
                        path=True, reads=True)
    train_base: bool = key(False, "train the backbone, too (its rate: lr_groups); a new one always "
                           "is trained")
    lora_rank: int = key(0, "rank of adapters on the backbone's attention and MLP; 0: none", ge=0)
    n_chapters: int = key(16, "chapters per block", ge=1)
    chapters_per_token: int = key(2, "chapters per token", ge=1)
    chapter_size: int = key(32, "key-value pairs per chapter", ge=1)

    def problems(self):
        problems = []
        if self.lora_rank and not self.backbone:
            problems.append("lora_rank: adapters need a trained backbone, e.g. --backbone "
                            "out/quick/ckpt.pt")
        if self.chapters_per_token > self.n_chapters:
            problems.append(f"chapters_per_token ({self.chapters_per_token}) must not exceed "
                            f"n_chapters ({self.n_chapters})")
        return problems


@dataclass
class MemoryConfig(GPTConfig, Keys):
    """Configuration of the backbone and the memory."""


# -----------------------------------------------------------------------------
# the model

class Chapters(nn.Module):
    """Cross-attention of each token to the key-value pairs of k chapters.

    The products are grouped by chapter and head: group chapter * H + head has S pairs.
    """

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        n_groups = c.n_chapters * c.n_head
        if c.n_embd % c.n_head:  # possible with the key head_dim
            raise ConfigError([f"a memory needs n_embd ({c.n_embd}) to be a multiple of n_head "
                               f"({c.n_head})"])
        head_dim = c.n_embd // c.n_head
        self.ln = Norm(c.n_embd, c.norm, c.bias, c.norm_eps)
        self.router = Router(c.n_embd, c.n_chapters, c.chapters_per_token)
        self.q = nn.Linear(c.n_embd, c.n_embd, bias=False)
        self.keys = GroupedLinear(n_groups, head_dim, c.chapter_size)  # weight (n H, S, D)
        self.values = GroupedLinear(n_groups, c.chapter_size, head_dim)  # weight (n H, D, S)
        self.o = nn.Linear(c.n_embd, c.n_embd, bias=False)
        self.gate = nn.Parameter(torch.empty(c.n_embd))

    def forward(self, x):
        """x (B, T, C) -> y (B, T, C) and the router's (logits (B, T, n), chosen (B, T, k))."""
        c, (B, T, C) = self.config, x.size()
        H, D, S, k = c.n_head, C // c.n_head, c.chapter_size, c.chapters_per_token
        x = self.ln(x)
        logits, _, chosen = self.router(x)
        heads = torch.arange(H, device=x.device)
        groups = GroupOrder((chosen.unsqueeze(-1) * H + heads).flatten(), c.n_chapters * H)
        q = (self.q(x) * D ** -0.5).view(B, T, 1, H, D).expand(-1, -1, k, -1, -1)
        scores = groups.unsort(self.keys(groups.sort(q.flatten(0, 3)), groups.ends))
        # Scores of chapters and keys are added; one softmax over all pairs.
        chapter_scores = logits.log_softmax(-1).gather(-1, chosen).view(B, T, k, 1, 1)
        scores = scores.view(B, T, k, H, S).float() + chapter_scores
        p = (scores - scores.logsumexp((2, 4), keepdim=True)).exp().to(q.dtype)  # (B, T, k, H, S)
        y = groups.unsort(self.values(groups.sort(p.flatten(0, 3)), groups.ends))
        y = self.o(y.view(B, T, k, H, D).sum(2).view(B, T, C))
        return y * self.gate.tanh().to(y.dtype), (logits, chosen)


class MemoryBlock(RoutedBlock):

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.memory = Chapters(config)

    def compute(self, x, *context):
        x = super().compute(x, *context)
        y, routed = self.memory(x)
        return x + y.type_as(x), routed


def is_memory(name):
    """Return whether a parameter is one of the memory or an adapter, not of the backbone."""
    return "memory" in name.split(".") or is_adapter(name)


class MemoryGPT(PartialStateDict, WithAdapters, ChatGPT, RoutedGPT):
    """A GPT with memory, for tokens or conversations. weights: {name: tensor} of the backbone;
    without, all weights are in the model's checkpoint."""
    block_class = MemoryBlock

    def __init__(self, config, seed, token_bytes, weights=None):
        super().__init__(config, seed, token_bytes)
        if weights is not None:
            own = {n: p for n, p in self.named_parameters() if is_memory(n)}
            self.load_backbone(weights | own)
        add_adapters(self, config.lora_rank, seed)
        for name, p in self.named_parameters():
            p.requires_grad_(is_memory(name) or config.train_base)

    def is_saved(self, name):
        return is_memory(name) or self.config.train_base

    def compute_loss(self, idx, targets, chat=None):
        out = super().compute_loss(idx, targets, chat)
        if chat is None:
            return out
        n_items = (targets[:, 1:] == 1).sum(1)  # (B,): targets per row
        return self.add_router_losses(*out, n_items)

    def flops_per_unit(self):
        n = super().flops_per_unit()
        if not self.config.train_base and not self.config.lora_rank:
            # No gradient reaches the inputs of the first block: its memory comes last.
            block = self.h[0]
            weights = sum(p.numel() for m in (block.attn, block.mlp) for p in m.parameters())
            n -= 2 * weights + 8 * self.config.n_embd * self.train_tokens
        return n

    def initial(self, name, shape, seed):
        """Return the initial value of a parameter. Scores and values have a size of about 1; gates
        are 0."""
        if is_adapter(name) or not is_memory(name):
            return super().initial(name, shape, seed)
        _, layer, part = name.rsplit(".", 2)
        if part == "gate":
            return torch.zeros(shape)
        if len(shape) == 1:
            return torch.full(shape, float(part == "weight"))
        std = dict(router=0.02, keys=1.0, values=1.0).get(layer, self.config.n_embd ** -0.5)
        return normal(name, shape, std, seed)


# -----------------------------------------------------------------------------
# model interface, see train/system.py

sample = lora.sample
inherit_shape = gpt.inherit_shape


def open_data(config, ranks):
    return (lora.open_data if config.backbone else lora.open_text)(config, ranks)


def build_model(config, data):
    """Return the backbone with a memory. Without a backbone in data.spec, all weights are trained
    and in the checkpoint. Raises CheckpointError."""
    weights = None
    if "backbone" in data.spec:
        config, weights = lora.load_backbone(config, data)
    else:
        config = config.replace(train_base=True)
    model_class = functools.partial(MemoryGPT, weights=weights)
    return lora.base_type(data).build_model(config, data, model_class, MemoryConfig)


def export_without_memory(state, path, backbone=None, ema=False):
    """Return ({name: tensor}, GPTConfig) without the memory, if its gates are zero; no GPT computes
    the same otherwise: CheckpointError."""
    weights, shape = lora.as_gpt(state, path, backbone, ema)
    if any(t.any() for name, t in weights.items() if name.endswith("memory.gate")):
        raise CheckpointError(f"{path}: its memory cannot be folded into the weights of a GPT, and "
                              "no other program has such layers; --to FILE.pt merges memory and "
                              "backbone for model.sample and model.serve")
    return ({name: t for name, t in weights.items() if not is_memory(name)},
            GPTConfig(**{f.name: getattr(shape, f.name) for f in fields(GPTConfig)}))


as_gpt = export_without_memory
