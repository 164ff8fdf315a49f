"""A trained GPT with additional memory layers, which learn other text or conversations.

    python run_train.py --config train/configs/memory.yaml
    python -m model.memory --ckpt out/memory/ckpt.pt --baseline      # compared with LoRA
    python -m model.convert --ckpt out/memory/ckpt.pt --to merged.pt

Each block of a frozen backbone gets a memory of n_chapters chapters; a chapter is a group of
trainable keys and values. A router, as in model/moe.py, selects chapters_per_token chapters for
each token, and the token attends to them. The result is multiplied by a gate, a function of the
state, and added to the state before the block. Gates start at zero, so that the model at step 0
equals the backbone.

As in Cartridges (arXiv:2506.06266), the memory is initialised from the training data: the keys and
values of a chapter are those that the attention of the block computes for chapter_size consecutive
tokens. Queries, output projection and norms are initialised as copies of the attention's. Keys have
no rotary positions.

old_data_dir is a folder with text that the backbone knows and should not forget (the old text):
old_weight times the KL divergence from the backbone's distribution on this text is added to the
training loss, and evaluations report val_old_loss.

lora_rank adds adapters to the backbone (model/core/adapters.py), and train_base trains all of it.
lr_groups sets learning rates: {memory: {learning_rate: 0.01}, lora_*: {learning_rate: 0.001}}, with
`learning_rate` for the rest. The checkpoint has the trained weights and a digest of the backbone's
weights; model.convert merges both. Without a backbone, a GPT with memory is trained from scratch.

Shapes: B, T, C, H, D as in model/gpt.py; n chapters of S key-value pairs, k chapters per token.
"""

import functools
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn

from model import chat, gpt, lora
from model.chat import ChatGPT
from model.core.adapters import PartialStateDict, WithAdapters, add_adapters, is_adapter
from model.core.init import normal
from model.core.ops import IGNORE
from model.distill import HasTeachers
from model.gpt import GPTConfig, qk_norm, stream_norm
from model.lora import USE, inherit_shape, sample  # noqa: F401  model interface
from model.moe import GroupedLinear, GroupOrder, RoutedBlock, RoutedGPT, Router, RouterKeys
from train.base.errors import DataError
from train.base.fields import key

# A memory belongs to one backbone; another number of chapters per token changes all outputs.
MUST_MATCH_TO_INIT = ("backbone", "chapters_per_token")


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
    old_data_dir: str = key("", "folder with text on which the model is to stay close to the "
                            "backbone, and is evaluated", free=True, path=True)
    old_weight: float = key(1.0, "weight of the divergence from the backbone on the old text", ge=0,
                            needs="old_data_dir")

    def problems(self):
        problems = [f"{name}: it needs a trained backbone, e.g. --backbone out/quick/ckpt.pt"
                    for name in ("old_data_dir", "lora_rank")
                    if getattr(self, name) and not self.backbone]
        if self.chapters_per_token > self.n_chapters:
            problems.append(f"chapters_per_token ({self.chapters_per_token}) must not exceed "
                            f"n_chapters ({self.n_chapters})")
        return problems


@dataclass
class MemoryConfig(GPTConfig, Keys):
    """Architecture of a GPT with memory: the fields of GPTConfig and of Keys."""


# -----------------------------------------------------------------------------
# the model

class Chapters(nn.Module):
    """Memory layer: each token attends to the key-value pairs of k of n chapters.

    A router selects the chapters for each token. A chapter has S pairs, which are parameters; the
    matrix products are grouped by chapter and head: group chapter * H + head has S pairs.
    """

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        n_groups = c.n_chapters * c.n_head
        width = c.n_head * c.head_dim
        self.ln = stream_norm(c, "pre")
        self.router = Router(c.n_embd, c.n_chapters, c.chapters_per_token)
        self.q = nn.Linear(c.n_embd, width, bias=c.bias or c.qkv_bias)
        self.q_norm = qk_norm(c, c.n_head)
        self.keys = GroupedLinear(n_groups, c.head_dim, c.chapter_size)  # weight (n H, S, D)
        self.values = GroupedLinear(n_groups, c.chapter_size, c.head_dim)  # weight (n H, D, S)
        self.o = nn.Linear(width, c.n_embd, bias=c.bias)
        self.gate = nn.Linear(c.n_embd, c.n_embd)

    def forward(self, x):
        """Return (y (B, T, C) to be added to x, (logits (B, T, n), chosen chapters (B, T, k)))."""
        c, (B, T, _) = self.config, x.size()
        H, D, S, k = c.n_head, c.head_dim, c.chapter_size, c.chapters_per_token
        x = self.ln(x)
        logits, _, chosen = self.router(x)
        heads = torch.arange(H, device=x.device)
        groups = GroupOrder((chosen.unsqueeze(-1) * H + heads).flatten(), c.n_chapters * H)
        q = self.q_norm(self.q(x).view(B, T, H, D)) * (c.score_scale * D ** -0.5)
        copies = q.unsqueeze(2).expand(-1, -1, k, -1, -1)  # (B, T, k, H, D)
        scores = groups.unsort(self.keys(groups.sort(copies.flatten(0, 3)), groups.ends))
        # Scores of chapters and keys are added; one softmax over all pairs.
        chapter_scores = logits.log_softmax(-1).gather(-1, chosen).view(B, T, k, 1, 1)
        scores = scores.view(B, T, k, H, S).float() + chapter_scores
        p = (scores - scores.logsumexp((2, 4), keepdim=True)).exp().to(q.dtype)  # (B, T, k, H, S)
        y = groups.unsort(self.values(groups.sort(p.flatten(0, 3)), groups.ends))
        y = y.view(B, T, k, H, D).sum(2)  # (B, T, H, D)
        return self.o(y.flatten(2)) * self.gate(x).tanh(), (logits, chosen)


class MemoryBlock(RoutedBlock):
    """A Block that first adds the output of a memory layer, Chapters, to the residual stream."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.memory = Chapters(config)

    def compute(self, x, *context):
        y, routed = self.memory(x)
        return super().compute(x + y.type_as(x), *context), routed


def is_memory(name):
    """Return whether a parameter belongs to the memory or to an adapter, not to the backbone."""
    return "memory" in name.split(".") or is_adapter(name)


class MemoryGPT(HasTeachers, PartialStateDict, WithAdapters, ChatGPT, RoutedGPT):
    """A GPT with memory, for text or conversations.

    weights: {name: tensor} of the backbone, used without copies; `None`: no backbone.
    initial_values: {name: tensor} of parameters of the memory, see read_document().
    The backbone's parameters are frozen and not in the state dict, unless config.train_base is
    true. The attribute `frozen` is a tuple with the result of freeze(), if the model is compared
    with it on the old text; otherwise ().
    """
    block_class = MemoryBlock

    def __init__(self, config, seed, token_bytes, weights=None, initial_values=()):
        self.initial_values = dict(initial_values)
        super().__init__(config, seed, token_bytes)
        if weights is not None:
            own = {n: p for n, p in self.named_parameters() if is_memory(n)}
            self.load_backbone(weights | own)
        add_adapters(self, config.lora_rank, seed)
        for name, p in self.named_parameters():
            p.requires_grad_(is_memory(name) or config.train_base)

    def is_saved(self, name):
        return is_memory(name) or self.config.train_base

    def compute_loss(self, idx, targets, *others):
        """Return (mean loss, sums) of text or conversations, and of any old text.

        idx, targets: see ChatGPT.compute_loss(). others: any `chat`, then any old ids, targets (B,
        T).
        """
        n_chat = len(others) % 2  # the old text are two tensors
        chat, old = others[:n_chat], others[n_chat:]
        loss, sums = super().compute_loss(idx, targets, *chat)
        n_items = (targets != IGNORE).sum(1)  # (B,): targets per row
        if chat:
            n_items = (targets[:, 1:] == 1).sum(1)
            loss, sums = self.add_router_losses(loss, sums, n_items)
        return self.add_old_text(loss, sums, n_items, *old) if old else (loss, sums)

    def add_old_text(self, loss, sums, n_items, idx, targets):
        """Add the old text idx, targets (B, T), to a batch's result, and return (loss, sums).

        n_items (B,): target count of each row of the new text, used as the weight of the same row
        of the old text, so that the split into micro-batches does not matter.
        In training, old_weight times the KL divergence from the backbone is added to the loss, and
        "old_kl" to the sums. In eval mode, the sums get "old_loss", the cross-entropy summed over
        the old targets, and "old_count", their number.
        """
        x = self.trunk(idx)  # (B, T, C)
        for block in self.h:
            del block.routed  # no router losses
        if not self.training:
            old_loss, old = self.score(x, targets)
            return loss, sums | dict(old_loss=old_loss * old["count"], old_count=old["count"])
        with torch.no_grad():
            states = [backbone.trunk(idx) for backbone in self.frozen]
        weights = n_items / (n_items.sum().clamp(min=1) * idx.size(1))  # (B,)
        kl = self.compare(x, states, targets, weights[:, None].expand_as(targets))[0]
        return (loss + self.config.old_weight * kl,
                sums | dict(old_kl=kl.detach() * sums["count"]))

    def numbers(self, sums):
        """Return ChatGPT's and RoutedGPT's numbers, and old_kl or, in evaluations, old_loss."""
        numbers = super().numbers({n: value for n, value in sums.items() if n != "old_count"})
        if "old_count" in sums:
            numbers["old_loss"] = float(sums["old_loss"] / sums["old_count"])
        return numbers

    def flops_per_unit(self):
        """Return training FLOPs per text token or row of conversations, including old text."""
        own = super().flops_per_unit()
        if not self.config.old_data_dir:
            return own
        head = 2 * (self.lm_head or self.wte).weight.numel()
        return 2 * own + sum(m.flops_per_unit() + head for m in self.frozen) * self.row_tokens

    def initial(self, name, shape, seed):
        """Return the initial value of the parameter `name`: initial_values[name], if it exists.

        Otherwise, for the backbone and adapters that of the base class; for the memory 0 for gates
        and biases, 1 for norms, and random values with which attention scores and values are about
        1.
        """
        if name in self.initial_values:
            return self.initial_values[name]
        if is_adapter(name) or not is_memory(name):
            return super().initial(name, shape, seed)
        _, layer, part = name.rsplit(".", 2)
        if layer == "gate" or part == "bias":
            return torch.zeros(shape)
        if len(shape) == 1:
            return torch.ones(shape)
        std = dict(router=0.02, keys=1.0, values=1.0).get(layer, self.config.n_embd ** -0.5)
        return normal(name, shape, std, seed)


# -----------------------------------------------------------------------------
# data

class PairedLoader:
    """Loader of two data sets: a batch is the tuple of `new`, then that of `old` for the same step.

    Samples per epoch are as many as in `new`, validation batches as many as both have.
    """

    def __init__(self, new, old):
        self.new, self.old = new, old
        for name in ("samples", "unit", "units_per_sample", "calls_per_chunk", "locate",
                     "n_tokens"):
            if hasattr(new, name):
                setattr(self, name, getattr(new, name))

    def get_batch(self, device="cpu", step=None):
        return self.new.get_batch(device, step) + self.old.get_batch(device, step)

    def n_fixed(self, count):
        return min(self.new.n_fixed(count), self.old.n_fixed(count))

    def fixed_batch(self, index, count, device="cpu"):
        n = self.n_fixed(count)  # both are spread over all of their text
        return self.new.fixed_batch(index, n, device) + self.old.fixed_batch(index, n, device)

    def fingerprint(self):
        return dict(self.new.fingerprint(), old=self.old.fingerprint())


def first_batch(loader, n):
    """Return the first n training samples (paired: of `new`), a tuple of CPU tensors (n, ...)."""
    loader = getattr(loader, "new", loader)
    return loader.tensors(loader.read(np.arange(n)), torch.device("cpu"))


@torch.no_grad()
def read_document(backbone, loader, config):
    """Return initial values {name: tensor} of a memory, computed from the training data.

    backbone: a GPT on the CPU. loader: of the training data.
    All parameters of the memory except routers and gates: keys (not rotated) and values of the
    backbone's attention for windows spread over the text, chapter_size tokens per chapter; and the
    tensors, not copied, of the attention's layers q, q_norm, o, and of the norm before it.
    """
    n, S, H = config.n_chapters, config.chapter_size, backbone.config.n_head
    T = min(first_batch(loader, 1)[0].size(1), backbone.config.block_size)
    idx = first_batch(loader, n * -(-S // T))[0][:, :T]  # at least S tokens per chapter
    inputs = []
    hooks = [block.attn.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
             for block in backbone.h]
    backbone.trunk(idx)
    for hook in hooks:
        hook.remove()
    values = {}
    for i, (block, x) in enumerate(zip(backbone.h, inputs)):
        attn = block.attn
        k, v = (layer(x).unflatten(-1, (-1, attn.config.head_dim)) for layer in (attn.k, attn.v))
        pairs = torch.stack(((attn.k_norm or attn.q_norm)(k), v))  # (2, windows, T, G, D)
        pairs = pairs.repeat_interleave(H // pairs.size(3), 3)  # (2, windows, T, H, D)
        chapters = pairs.unflatten(1, (n, -1)).flatten(2, 3)[:, :, -S:]  # (2, n, S, H, D)
        keys, vals = chapters.transpose(2, 3).flatten(1, 2)  # (n H, S, D) each
        own = {"keys.weight": keys, "values.weight": vals.mT}
        for part, layer in dict(ln=block.ln_1, q=attn.q, q_norm=attn.q_norm, o=attn.o).items():
            own |= {f"{part}.{name}": t for name, t in layer.state_dict().items()}
        values |= {f"h.{i}.memory.{name}": t for name, t in own.items()}
    return values


# -----------------------------------------------------------------------------
# model interface, see train/system.py

def open_data(config, ranks):
    data = (lora.open_data if config.backbone else lora.open_text)(config, ranks)
    if config.old_data_dir:
        old = lora.open_data(config.replace(data_dir=config.old_data_dir), ranks)
        if "template" in old.spec:
            raise DataError(f"old_data_dir: {config.old_data_dir} has conversations; expected text")
        data.train = PairedLoader(data.train, old.train)
        data.val = data.val and PairedLoader(data.val, old.val)
    return data


def build_model(config, data):
    """Return a MemoryGPT: config.backbone with a memory, initialised from data.train if it exists.

    If data.spec has no "backbone", all weights are new, trained, and part of the checkpoint. Raises
    CheckpointError if the backbone cannot be used.
    """
    weights, values, frozen = None, {}, None
    if "backbone" not in data.spec:
        config = config.replace(train_base=True)
    else:
        config, weights = lora.load_backbone(config, data)
        if hasattr(data, "train"):  # in training, not for a checkpoint
            with torch.device("cpu"):
                frozen = freeze(weights, config, data)
                values = read_document(frozen, data.train, config)
    model_class = functools.partial(MemoryGPT, weights=weights, initial_values=values)
    model = chat.build_model(config, data, model_class, MemoryConfig)
    if frozen and config.old_data_dir:
        model.frozen = (frozen,)
    return model


def freeze(weights, config, data, base=gpt):
    """Return the backbone as a GPT without memory, in eval mode and without gradients.

    weights {name: tensor}: copied only if config.train_base is true, as training then changes them.
    base: the module whose build_model() is used, model.gpt or model.chat.
    """
    with torch.device("meta"):
        backbone = base.build_model(config, data)
    weights = {name: t.clone() for name, t in weights.items()} if config.train_base else weights
    backbone.load_state_dict(weights, assign=True)
    return backbone.requires_grad_(False).eval()
