"""Memory for a trained GPT: python run_train.py --config train/config_memory.yaml

Every block of a checkpoint gets n_chapters chapters of learned keys and values. A router, that of
model/moe.py, chooses chapters_per_token of them for each token, whose state then reads them by
cross-attention; a gate adds what was read to the state. Gates start at zero and values do not: step
0 computes what the checkpoint does, and all of it learns (with the values at zero as well, neither
ever would). The backbone stays as it is; lora_rank gives it adapters (model/lora.py), train_base
trains all of it. Each of the three has a rate of its own by lr_groups, such as
{memory: {learning_rate: 0.01}, lora_*: {learning_rate: 0.001}}, the rest being learning_rate's. The
checkpoint holds what is trained, and a digest of its backbone.

Shapes: B, T, C, H, D as in model/gpt.py; n chapters of S pairs, k of them for a token.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn

from model import gpt, lora, moe
from model.chat import is_chat
from model.gpt import GPTConfig, Norm, normal
from model.load import with_shape
from model.moe import GroupedLinear, Groups, RoutedBlock, RoutedGPT, Router, RouterKeys
from train.checkpoint import CheckpointError
from train.config import ConfigError, key

sample, adopt_shape = gpt.sample, gpt.adopt_shape
SAME_TO_ADOPT = ("backbone",)  # a memory stands beside one model


@dataclass
class Keys(RouterKeys):
    backbone: str = key("", "checkpoint of the GPT that gets a memory", free=True, path=True,
                        reads=True)
    train_base: bool = key(False, "train the backbone as well (its rate: lr_groups)")
    lora_rank: int = key(0, "rank of adapters on the backbone's attention and MLP; 0: none", ge=0)
    n_chapters: int = key(16, "chapters in a block", ge=1)
    chapters_per_token: int = key(2, "chapters that a token reads", ge=1)
    chapter_size: int = key(32, "pairs of a key and a value in a chapter", ge=1)

    def problems(self):
        out = []
        if not self.backbone:
            out.append("backbone: missing; name the checkpoint of a GPT, such as out/quick/ckpt.pt")
        if self.chapters_per_token > self.n_chapters:
            out.append(f"chapters_per_token ({self.chapters_per_token}) must not exceed n_chapters "
                       f"({self.n_chapters})")
        return out


@dataclass
class MemoryConfig(GPTConfig, Keys):
    """The shape of a GPT with memory: the backbone's own, and the memory's."""


# -----------------------------------------------------------------------------
# the model

class Chapters(nn.Module):
    """Cross-attention of each token over the pairs of its k chapters. A head meets S pairs of one
    chapter at a time, as group chapter * H + head of a grouped product."""

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        groups = c.n_chapters * c.n_head
        self.ln = Norm(c.n_embd, c.norm, c.bias, c.norm_eps)
        self.router = Router(c.n_embd, c.n_chapters, c.chapters_per_token)
        self.q = nn.Linear(c.n_embd, c.n_embd, bias=False)
        self.keys = GroupedLinear(groups, c.n_embd // c.n_head, c.chapter_size)  # (n H, S, D)
        self.values = GroupedLinear(groups, c.chapter_size, c.n_embd // c.n_head)  # (n H, D, S)
        self.o = nn.Linear(c.n_embd, c.n_embd, bias=False)
        self.gate = nn.Parameter(torch.empty(c.n_embd))  # zero: `initial` below

    def forward(self, x):
        """x (B, T, C) -> what is read, the same shape, the router's logits (B, T, n) and choice
        (B, T, k)."""
        c, (B, T, C) = self.config, x.size()
        H, D, S, k = c.n_head, C // c.n_head, c.chapter_size, c.chapters_per_token
        x = self.ln(x)
        logits, _, chosen = self.router(x)
        heads = torch.arange(H, device=x.device)
        groups = Groups((chosen.unsqueeze(-1) * H + heads).flatten(), c.n_chapters * H)
        q = (self.q(x) * D ** -0.5).view(B, T, 1, H, D).expand(-1, -1, k, -1, -1)
        scores = groups.unsort(self.keys(groups.sort(q.flatten(0, 3)), groups.ends))
        # A chapter's score joins that of its keys; one softmax over all pairs of the k chapters.
        chapter = logits.log_softmax(-1).gather(-1, chosen).view(B, T, k, 1, 1)
        scores = scores.view(B, T, k, H, S).float() + chapter
        p = (scores - scores.logsumexp((2, 4), keepdim=True)).exp().to(q.dtype)
        y = groups.unsort(self.values(groups.sort(p.flatten(0, 3)), groups.ends))
        y = self.o(y.view(B, T, k, H, D).sum(2).view(B, T, C))
        return y * self.gate.tanh().to(y.dtype), (logits, chosen)


class MemoryBlock(RoutedBlock):

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.memory = Chapters(config)

    def compute(self, x, rope, cache=None):
        x = super().compute(x, rope, cache)
        y, routed = self.memory(x)
        return x + y.type_as(x), routed


def is_own(name):
    """Whether a parameter is not the backbone's."""
    return "memory" in name.split(".") or lora.is_adapter(name)


class MemoryGPT(RoutedGPT):
    """A GPT with memory beside a backbone of `weights` {name: tensor}. state_dict() leaves them out
    where they are frozen: they stand in a checkpoint of their own."""
    block_class = MemoryBlock

    def __init__(self, config, seed, token_bytes, weights):
        super().__init__(config, seed, token_bytes)
        own = {n: p for n, p in self.named_parameters() if is_own(n)}
        # Real also where the model is on the meta device: nobody else fills what is frozen.
        nn.Module.load_state_dict(self, weights | own, assign=True)
        if config.lora_rank:
            lora.add_adapters(self, ["attn", "mlp"], config.lora_rank, 2.0, seed)
        for name, p in self.named_parameters():
            p.requires_grad_(is_own(name) or config.train_base)

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        return {n: t for n, t in state.items() if is_own(n) or self.config.train_base}

    def load_state_dict(self, state, strict=True, assign=False):
        """With `assign` the backbone takes on the precision of `state`."""
        dtype = next((t.dtype for t in state.values()), torch.float32)
        base = {n: p.to(dtype) for n, p in self.named_parameters()
                if n not in state and not is_own(n)}
        return super().load_state_dict(base | dict(state), strict, assign)

    def initial(self, name, shape, seed):
        """Scores, and what is read, of about size 1; only the gates are zero."""
        if lora.is_adapter(name):
            return lora.initial_adapter(name, shape, seed)
        if not is_own(name):
            return super().initial(name, shape, seed)
        part = name.rsplit(".", 2)
        if part[-1] == "gate":
            return torch.zeros(shape)
        if len(shape) == 1:
            return torch.full(shape, float(part[-1] == "weight"))
        std = dict(router=0.02, keys=1.0, values=1.0).get(part[-2], self.config.n_embd ** -0.5)
        return normal(name, shape, std, seed)

    def flops_per_unit(self):
        """The frozen weights of the blocks need no gradient of their own."""
        frozen = sum(p.numel() for p in self.h.parameters() if not p.requires_grad)
        return super().flops_per_unit() - 2 * frozen


# -----------------------------------------------------------------------------
# what train/train.py asks of a model file

def open_data(config, ranks):
    """Token files; the spec has the digest of the backbone, see model/lora.py."""
    if is_chat(config.data_dir):
        raise ConfigError([f"data_dir: {config.data_dir} holds chats; a memory reads token files"])
    return lora.open_data(config, ranks)


def build_model(config, data):
    """The backbone, which must be the one that data.spec names, with a memory. Raises
    CheckpointError."""
    path = config.backbone
    try:
        state = lora.read_backbone(path)
    except CheckpointError as error:
        raise CheckpointError(f"backbone: {error}") from error
    if state["digest"] != data.spec["backbone"]:
        raise CheckpointError(f"backbone: {path} has other weights than the ones this memory was "
                              f"made for (sha256 {data.spec['backbone'][:16]}...); put them there "
                              "again")
    c = with_shape(config, state["model_args"], path)
    weights = {name: t.float() for name, t in state["model"].items()}
    try:
        return moe.build_routed(c, data, lambda *args: MemoryGPT(*args, weights), MemoryConfig)
    except RuntimeError as error:  # of load_state_dict
        raise CheckpointError(f"backbone: {path}: {error}") from error
