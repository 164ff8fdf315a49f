"""Preferences (DPO, arXiv:2305.18290): of two answers to a question, the better becomes likelier.

    python -m data.prepare.pairs example --reference out/chat/ckpt.pt --out data/bin/pairs
    python run_train.py --config train/configs/dpo.yaml
    python -m model.chat --ckpt out/dpo/ckpt.pt

How much likelier is measured against the model that training starts from, the reference, whose log
probabilities of all answers stand in the data. lora_rank trains adapters in the place of the
weights. What is trained is a chat model, which sampling, serving and model/convert/ know.
"""

import os
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from data.rows import open_rows
from data.token_files import open_npy
from model import chat, gpt
from model.core.ops import IGNORE
from model.core.weights import digest
from model.lora import OwnAdapters, adapt, own_adapters_as_gpt
from train.base.errors import CheckpointError, DataError
from train.base.fields import key
from train.dataloader import Data, RowLoader

USE = "python -m model.chat --ckpt {out}/ckpt.pt"  # said at the end of a run
ARRAYS = ("tokens", "mask", "logps")

inherit_shape, as_gpt = gpt.inherit_shape, own_adapters_as_gpt


@dataclass
class Keys:
    dpo_beta: float = key(0.1, "how close to the reference: the larger the closer", gt=0)
    dpo_loss: str = key("sigmoid", "sigmoid: DPO's; ipo: a margin of 1 / (2 dpo_beta) and no more "
                        "(arXiv:2310.12036)", choices=("sigmoid", "ipo"))
    dpo_nll: float = key(0.0, "weight of the chosen answer's own loss, which keeps it likely "
                         "(arXiv:2407.21783)", ge=0)
    length_normalized: bool = key(False, "log probabilities a token, not of whole answers")
    lora_rank: int = key(0, "rank of adapters on attention and MLP, trained alone; 0: none", ge=0)

    def problems(self):
        if self.init_from == "scratch":
            return ["init_from: missing; name the checkpoint of a chat model, the one the pairs "
                    "were prepared with, such as out/chat/ckpt.pt"]
        return []


class PreferenceGPT(OwnAdapters):
    """A chat model that also takes pairs: forward(tokens, mask, logps), (B, 2, T + 1) twice and
    (B, 2), the better answer first; mask is 1 where a token is learned, logps the reference's log
    probabilities of the answers. Everything else is as in ChatGPT."""

    def forward(self, idx, targets=None, logps=None, cache=None, last_only=False):
        if logps is None:
            return super().forward(idx, targets, None, cache, last_only)
        mask = targets
        x, targets, own = answers(self, idx, mask)  # (2 B, T, C), (2 B, T), (2 B,)
        gain = own.view(-1, 2) - logps  # (B, 2) over the reference
        length = (targets != IGNORE).sum(1).view(-1, 2)
        if self.normalized:
            gain = gain / length
        chosen, rejected = (self.beta * gain).unbind(1)  # rewards (B,)
        margin = chosen - rejected
        losses = (-F.logsigmoid(margin) if self.kind == "sigmoid" else
                  (margin / self.beta - 1 / (2 * self.beta)).square())
        losses = losses - self.nll * (own.view(-1, 2) / length)[:, 0]
        sums = dict(preferred=(margin > 0).sum(), chosen=chosen.detach().sum(),
                    rejected=rejected.detach().sum())
        if not self.training:
            sums |= self.exactness(x[::2], targets[::2])  # of the chosen answers
        return losses.mean(), sums

    def numbers(self, sums):
        """{"accuracy" of preferences, mean rewards of "chosen" and "rejected" answers, "margin"};
        in evaluations also "exact", the chosen answers that greedy sampling writes."""
        if "preferred" not in sums:
            return super().numbers(sums)
        count, right, chosen, rejected = (float(sums[n]) for n in (
            "count", "preferred", "chosen", "rejected"))
        out = dict(accuracy=right, chosen=chosen, rejected=rejected, margin=chosen - rejected)
        if "exact" in sums:
            out["exact"] = float(sums["exact"])  # a pair has one answer that is chosen
        return {name: value / count if count else None for name, value in out.items()}

    def adopt(self, weights):
        """The weights to start from, which must be those of the reference. CheckpointError."""
        if digest(weights) != self.reference:
            raise CheckpointError("init_from: these weights are not the ones that the pairs were "
                                  "prepared with; prepare them again with this checkpoint: python "
                                  "-m data.prepare.pairs FILE... --reference CKPT.pt")
        return super().adopt(weights)

    def flops_per_unit(self):
        return super().flops_per_unit() * 2  # a pair is two rows


def answers(model, idx, mask):
    """Of rows idx, mask (B, 2, T + 1): normalised states (2 B, T, C), targets (2 B, T), and the log
    probabilities of the answers (2 B,)."""
    idx, mask = idx.flatten(0, 1), mask.flatten(0, 1)
    targets = torch.where(mask[:, 1:] == 1, idx[:, 1:], IGNORE)
    x, head = model.trunk(idx[:, :-1]), model.head_weight()
    # The loss of a row is the mean over its own targets.
    losses = [model.loss(x[i:i + 1], head, targets[i:i + 1], model.config.vocab_size)
              for i in range(len(x))]
    return x, targets, -torch.stack(losses) * (targets != IGNORE).sum(1)


def answer_logps(model, tokens, mask):
    """(B, 2) float32, the log probabilities of the answers in arrays tokens, mask (B, 2, T + 1)."""
    device = model.wte.weight.device
    found = answers(model, torch.from_numpy(tokens).to(device), torch.from_numpy(mask).to(device))
    return found[2].view(-1, 2).float().cpu().numpy()


# -----------------------------------------------------------------------------
# what train/train.py asks of a model file

def open_data(config, ranks):
    """The Data of the pairs in config.data_dir, see data/prepare/pairs.py. Raises DataError."""
    c = config
    meta, tokenizer, spec = chat.read_rows(
        c, "dpo", f"no pairs of answers; make some: python -m data.prepare.pairs FILE... --out {c.data_dir} "
        "--reference CKPT.pt, or `example` for FILE", reference=str)

    def load(split):
        width = meta.block_size + 1
        arrays = open_rows(c.data_dir, split, tokens=((2 * width,), 0, tokenizer.n_vocab),
                           mask=((2 * width,), 0, 2))
        path = os.path.join(c.data_dir, f"{split}_logps.npy")
        logps = open_npy(path)
        if logps.shape[1:] != (2,) or logps.dtype != "<f4" or not np.isfinite(logps).all():
            raise DataError(f"{path}: {logps.dtype} of shape {logps.shape}; expected n x 2 "
                            "finite numbers of float32: damaged; prepare the pairs again")
        tokens, mask = (array.reshape(len(array), 2, width) for array in arrays)
        return RowLoader([tokens, mask, logps], c, ranks)
    return Data(load("train"), load("val") if c.eval_interval else None,
                spec | dict(reference=meta.extra["reference"]))


def build_model(config, data):
    model = chat.build_model(config, data, PreferenceGPT)
    model.beta, model.nll, model.kind = config.dpo_beta, config.dpo_nll, config.dpo_loss
    model.normalized, model.reference = config.length_normalized, data.spec["reference"]
    return adapt(model, config)


def sample(model, data, config):
    return chat.sample(model, data, config, lambda tokens, mask, _: chat.first_exchange(
        tokens[0], mask[0]))
