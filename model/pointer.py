"""A GPT that points back: what followed the same tokens earlier in its context may follow again.

    python run_train.py --config train/config_pointer.yaml
    python -m model.sample --ckpt out/pointer/ckpt.pt --prompt "def forward"

A pointer sentinel mixture (arXiv:1609.07843) whose keys are not learned but exact: every earlier
token that stands behind the same last tokens as the next one will, up to pointer_length of them, is
a candidate. One softmax over these and the GPT itself says how much each is believed:

    p(v) = (exp(gate) p_gpt(v) + sum over candidates of v of exp(score)) / (the sum of all exp)

where a candidate's score grows with each token that is the same, and the gate is a linear function
of the state. So copying works from the first steps on, for words that were never learned. What the
model gives as logits are the logarithms of these probabilities, which sum to one.

Shapes: B, T, C, V as in model/gpt.py; S tokens of the text, of which the last T are asked about.
"""

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from model import gpt
from model.generate import KVCache
from model.gpt import GPT, Block, GPTConfig, fill
from model.ops import IGNORE, chunk_rows
from train.config import gpt_conflicts, key

sample, adopt_shape, USE = gpt.sample, gpt.adopt_shape, gpt.USE


@dataclass
class Keys:
    pointer_length: int = key(4, "tokens before a candidate that are compared", ge=1, shape=True)

    def problems(self):
        out = [text for _, text in gpt_conflicts(self)]
        if self.family:
            out.append("family: such a model has no pointer; start from a GPT without a family")
        return out


@dataclass
class PointerConfig(GPTConfig, Keys):
    """The shape of a GPT with a pointer."""


class TextCache(KVCache):
    """A KVCache that knows the tokens of its texts, too: tokens (B, block_size), the latest last,
    -1 where there are none."""

    def __init__(self, config, rows, device, dtype, size=None):
        super().__init__(config, rows, device, dtype, size)
        self.tokens = torch.full((rows, config.block_size), -1, device=device)

    def __getitem__(self, rows):
        view = super().__getitem__(rows)
        view.tokens = self.tokens[rows]
        return view

    def repeat(self, n):
        new = super().repeat(n)
        new.tokens = self.tokens.repeat_interleave(n, 0)
        return new

    def clear(self):
        super().clear()
        self.tokens.fill_(-1)

    def move(self, source, target):
        super().move(source, target)
        self.tokens[target] = self.tokens[source]

    def forget(self, n, last):
        super().forget(n, last)
        size = self.tokens.size(1)
        n = torch.as_tensor(n, device=self.tokens.device).view(-1, 1)  # (1 or B, 1)
        before = (torch.arange(size, device=self.tokens.device) - n).expand_as(self.tokens)
        kept = self.tokens.gather(1, before.clamp(min=0))
        self.tokens.copy_(kept.masked_fill(before < 0, -1))

    def finish(self, idx):
        super().finish(idx)
        self.tokens.copy_(torch.cat((self.tokens, idx), 1)[:, -self.tokens.size(1):])


class Pointer(nn.Module):
    """How much each candidate is believed, and how much the GPT."""

    def __init__(self, config):
        super().__init__()
        self.more = nn.Parameter(torch.empty(config.pointer_length))
        self.gate, self.bias = (nn.Parameter(torch.empty(n)) for n in (config.n_embd, 1))
        fill(self, 0)

    def initial(self, name, shape, seed):
        """A candidate scores -1 for one token that is the same and 1 more for each further one."""
        value = torch.full(shape, 0.0 if name == "gate" else 1.0)
        if name == "more":
            value[0] = -1.0
        return value

    def forward(self, x, text):
        """Logarithms of shares that sum to one: of the GPT (B, T) and of each token of the text
        (B, T, S), for the states x (B, T, C) of the last T tokens of text (B, S)."""
        S, T, n = text.size(1), x.size(1), len(self.more)
        padded = F.pad(text, (n, 0), value=-1)  # text[p] is padded[n + p]
        place = torch.arange(S, device=text.device)
        same = place <= place[S - T:, None]  # (T, S): a candidate has been read
        scores = []
        for k in range(n):  # is the k-th token back the same as the one so far from the candidate?
            here, there = padded[:, n - k:], padded[:, n - k - 1:-1 - k]
            same = same & (here[:, S - T:S, None] == there[:, None, :S])  # (B, T, S)
            scores.append(torch.where(same, self.more[k].float(), 0.0 if k else -math.inf))
        gate = x.float() @ self.gate.float() + self.bias.float()  # (B, T)
        shares = torch.cat((gate[..., None], sum(scores)), -1).log_softmax(-1)
        return shares[..., 0], shares[..., 1:]


class PointerBlock(Block):
    """A Block; by its own name --compile, which knows plain GPTs alone, refuses it."""


class PointerGPT(GPT):
    block_class, cache_class = PointerBlock, TextCache

    def __init__(self, config, seed=1337, token_bytes=None):
        super().__init__(config, seed, token_bytes)
        self.pointer = Pointer(config)

    def initial(self, name, shape, seed):
        if name.startswith("pointer."):
            return self.pointer.initial(name.removeprefix("pointer."), shape, seed)
        return super().initial(name, shape, seed)

    def forward(self, idx, targets=None, cache=None, last_only=False):
        x = self.trunk(idx, cache)
        text = idx if cache is None else cache.tokens  # (B, S), with idx at its end
        if targets is None:
            return self.mixed(x[:, -1:] if last_only else x, text)
        share, copied = self.pointer(x, text)
        found = copied.masked_fill(text[:, None] != targets[..., None], -math.inf)  # (B, T, S)
        own = share + self.log_probs(x, targets)
        each = torch.cat((own[..., None], found), -1).logsumexp(-1)  # (B, T)
        counted = targets != IGNORE
        loss = -(each * counted).sum() / counted.sum().clamp(min=1)
        return loss, {} if self.training else self.sums(targets)

    def log_probs(self, x, targets):
        """The GPT's own log probabilities (B, T) of the targets, 0 where none."""
        # A chunk of logits at a time, made again in the backward pass.
        head = self.head_weight()
        n = chunk_rows(head.size(0), x.device.type)
        chunks = zip(x.flatten(0, 1).split(n), targets.flatten().split(n))
        return torch.cat([checkpoint(self.chunk, *chunk, head, use_reentrant=False)
                          for chunk in chunks]).view_as(targets)

    def chunk(self, x, targets, head):
        z = F.linear(x, head).float()[:, :self.config.vocab_size]  # (N, V)
        return -F.cross_entropy(z, targets, ignore_index=IGNORE, reduction="none")

    def mixed(self, x, text):
        """Log probabilities (B, T, vocab_size) for the states x (B, T, C)."""
        own = self.logits(x).log_softmax(-1)
        share, copied = self.pointer(x, text)
        ids = text.clamp(min=0)[:, None].expand_as(copied)
        copies = torch.zeros_like(own).scatter_add(-1, ids, copied.exp())
        return torch.logaddexp(own + share[..., None], copies.log())


def build_model(config, data):
    """The model of a run, see model/gpt.py."""
    return gpt.build_model(config, data, lambda c, seed, token_bytes: PointerGPT(
        PointerConfig(**asdict(c), pointer_length=config.pointer_length), seed, token_bytes))
