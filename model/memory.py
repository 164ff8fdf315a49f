"""Memory for a trained GPT, to learn other text or chats:

    python run_train.py --config train/configs/memory.yaml
    python -m model.memory --ckpt out/memory/ckpt.pt --to merged.pt

Every block of a checkpoint gets n_chapters chapters of learned keys and values. A router, that of
model/moe.py, chooses chapters_per_token of them for each token, whose state then reads them by
cross-attention; a gate adds what was read to the state. Gates start at zero and values do not: step
0 computes what the checkpoint does, and all of it learns (with the values at zero as well, neither
ever would). The backbone stays as it is; lora_rank gives it adapters (model/lora.py), train_base
trains all of it. Each of the three has a rate of its own by lr_groups, such as
{memory: {learning_rate: 0.01}, lora_*: {learning_rate: 0.001}}, the rest being learning_rate's. The
checkpoint holds what is trained, and a digest of its backbone; merged with it, it stands alone.

Shapes: B, T, C, H, D as in model/gpt.py; n chapters of S pairs, k of them for a token.
"""

import sys
from dataclasses import asdict, dataclass

import torch
import torch.nn as nn

from model import chat, gpt, lora, moe
from model.chat import ChatGPT
from model.core.init import normal
from model.core.load import model_of, read_weights
from model.gpt import GPTConfig, Norm
from model.moe import GroupedLinear, Groups, RoutedBlock, RoutedGPT, Router, RouterKeys
from train.base.errors import CheckpointError, ConfigError
from train.base.fields import key

open_data, sample, inherit_shape = lora.open_data, lora.sample, gpt.inherit_shape
USE = "python -m model.memory --ckpt {out}/ckpt.pt --to {out}/merged.pt"
MUST_MATCH_TO_INIT = ("backbone",)  # a memory stands beside one model


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
        if c.n_embd % c.n_head:  # of a family, whose heads have a size of their own
            raise ConfigError([f"a memory needs n_embd ({c.n_embd}) to be a multiple of n_head "
                               f"({c.n_head})"])
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


class MemoryGPT(ChatGPT, RoutedGPT):
    """A GPT with memory beside a backbone of `weights` {name: tensor}; without them all of it is in
    its checkpoint. state_dict() leaves them out where they are frozen: they stand in a checkpoint
    of their own. The data are token files, or rows of chats."""
    block_class = MemoryBlock

    def __init__(self, config, seed, token_bytes, weights=None):
        super().__init__(config, seed, token_bytes)
        if weights is not None:
            own = {n: p for n, p in self.named_parameters() if is_own(n)}
            # Real also where the model is on the meta device: nobody else fills what is frozen.
            nn.Module.load_state_dict(self, weights | own, assign=True)
        if config.lora_rank:
            lora.add_adapters(self, ["attn", "mlp"], config.lora_rank, 2.0, seed)
        for name, p in self.named_parameters():
            p.requires_grad_(is_own(name) or config.train_base)

    def forward(self, idx, targets=None, chat=None, cache=None, last_only=False):
        out = super().forward(idx, targets, chat, cache, last_only)
        if chat is None:
            return out
        routed = [block.__dict__.pop("routed") for block in self.h]
        return self.with_routers(*out, routed, (targets[:, 1:] == 1).sum(1))  # answers' tokens

    def numbers(self, sums):
        return RoutedGPT.numbers(self, sums) | super().numbers(sums)

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


# -----------------------------------------------------------------------------
# what train/train.py asks of a model file

def build_model(config, data):
    """The backbone, which must be the one that data.spec names, with a memory. Where it names none
    all is in the checkpoint: it was merged. Raises CheckpointError."""
    c, weights = lora.backbone_of(config, data) if "backbone" in data.spec else (config, None)
    build = (chat if "template" in data.spec else gpt).build_model
    try:
        return moe.build_routed(c, data, lambda *args: MemoryGPT(*args, weights), MemoryConfig,
                                build)
    except RuntimeError as error:  # of load_state_dict
        raise CheckpointError(f"backbone: {config.backbone}: {error}") from error


# -----------------------------------------------------------------------------
# the merged checkpoint

def export(ckpt, to, backbone=None):
    """Write the memory in `ckpt` and its backbone as one checkpoint, adapters added to it."""
    state = read_weights(ckpt)
    if (state.get("config") or {}).get("model") != "memory":
        raise CheckpointError(f"{ckpt}: no memory in it: expected a checkpoint of --model memory")
    model, _ = model_of(state, ckpt, backbone=backbone)
    shape = asdict(model.config) | dict(lora_rank=0, train_base=True)
    lora.save_merged(to, state, model, shape)
    print(f"Wrote {to}: the memory and its backbone\nNext: python -m model.sample --ckpt {to}"
          + (" --chat" if model.template else ""))


def main(argv=None):
    """Runs the command; its exit code."""
    return lora.merge_command("memory", "Merge a memory and the model that it was trained beside.",
                              export, argv)


if __name__ == "__main__":
    sys.exit(main())
