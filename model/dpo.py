"""DPO (arXiv:2305.18290): preference optimization on pairs of a chosen and a rejected answer.

    python -m data.prepare.pairs example --reference out/chat/ckpt.pt --out data/bin/pairs
    python run_train.py --config train/configs/dpo.yaml
    python -m model.sample --ckpt out/dpo/ckpt.pt --chat

The reference is the model that training starts from. The data contain its log probabilities of all
answers, so that it is not loaded. With lora_rank, only adapters are trained. The result is a chat
model for sampling, serving and export.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from data.rows import open_rows
from model import chat, gpt
from model.core.adapters import WithAdapters, add_adapters
from model.core.formulas import warn_of_differences
from model.core.ops import IGNORE
from model.core.weights import digest
from train.base.errors import CheckpointError, DataError
from train.base.fields import key
from train.dataloader import Data, RowLoader
from train.device import choose_dtype

USE = chat.USE


@dataclass
class Keys(chat.FromChatKeys):
    dpo_beta: float = key(0.1, "strength of the constraint to stay close to the reference", gt=0)
    dpo_nll: float = key(0.0, "weight of the chosen answer's cross-entropy (arXiv:2407.21783)",
                         ge=0)


class PreferenceGPT(WithAdapters, chat.ChatGPT):
    """A chat model that is also trained on B pairs of answers: forward(tokens, mask, logps).

    tokens, mask (B, 2, T + 1): the chosen answer first; mask is 1 for tokens of the answer. logps
    (B, 2): the reference's log probabilities of the answers.

    The logged numbers are "chosen", "rejected": mean implicit rewards, dpo_beta * (log probability
    - the reference's); "margin", the mean difference of both; "accuracy", the share of pairs with a
    positive one; in evaluations "exact", the share of chosen answers that greedy sampling
    generates.
    """

    def compute_loss(self, idx, mask, logps):
        x, targets, own = score_answers(self, idx, mask)  # (2 B, T, C), (2 B, T), (2 B,)
        own = own.view(-1, 2)  # (B, 2)
        # Implicit rewards, (B,) each
        chosen, rejected = (self.keys.dpo_beta * (own - logps)).unbind(1)
        margin = chosen - rejected
        length = (targets[::2] != IGNORE).sum(1)  # (B,): of the chosen answers
        losses = -F.logsigmoid(margin) - self.keys.dpo_nll * (own[:, 0] / length)  # (B,)
        sums = dict(accuracy=(margin > 0).sum(), chosen=chosen.detach().sum(),
                    rejected=rejected.detach().sum(), margin=margin.detach().sum())
        if not self.training:
            sums["exact"] = self.count_exact(x[::2], targets[::2])["exact"]
        return losses.mean(), sums

    def adopt(self, weights):
        """Return the initial `weights` {name: tensor} (of init_from) by the parameter names of this
        model, which differ in layers with adapters. Raises CheckpointError if they are not the
        weights of the reference with which the pairs were prepared."""
        if digest(weights) != self.reference_digest:
            raise CheckpointError("init_from: not the weights with which the pairs were prepared; "
                                  "run data.prepare.pairs with --reference CKPT.pt again")
        return super().adopt(weights)

    def flops_per_unit(self):
        return super().flops_per_unit() * 2  # a pair is two rows


def score_answers(model, idx, mask):
    """Return (x, targets, logps) of B pairs of answers: normalised states x (2 B, T, C) of `model`,
    a GPT; the next tokens (2 B, T), -1 outside of answers; the log probability of each answer, (2
    B,). idx, mask (B, 2, T + 1): token ids, and 1 for tokens of an answer."""
    idx = idx.flatten(0, 1)  # (2 B, T + 1)
    mask = mask.flatten(0, 1)
    targets = torch.where(mask[:, 1:] == 1, idx[:, 1:], IGNORE)  # (2 B, T)
    x = model.trunk(idx[:, :-1])  # (2 B, T, C)
    head = (model.lm_head or model.wte).weight
    # The mean loss of each row: model.loss computes gradients in the forward pass, chunk by chunk.
    losses = [model.loss(x[i:i + 1], head, targets[i:i + 1], model.config.vocab_size)
              for i in range(len(x))]
    return x, targets, -torch.stack(losses) * (targets != IGNORE).sum(1)


def sum_answer_logps(model, tokens, mask):
    """Return the log probabilities (B, 2), a float32 numpy array, of both answers of B pairs under
    `model`, a GPT. tokens, mask (B, 2, T + 1): int64 numpy arrays of ids, and of 1 for tokens of an
    answer. The caller must switch off gradients (torch.no_grad)."""
    arrays = (torch.from_numpy(part).to(model.wte.weight.device) for part in (tokens, mask))
    return score_answers(model, *arrays)[2].view(-1, 2).cpu().numpy()


# -----------------------------------------------------------------------------
# model interface, see train/system.py

sample = chat.sample
inherit_shape = gpt.inherit_shape
as_gpt = gpt.as_gpt


def open_data(config, ranks):
    """Return the Data of config.data_dir, a folder that data.prepare.pairs wrote. A batch is
    (tokens, mask, logps), the arguments of PreferenceGPT. Raises DataError, also if the pairs were
    prepared in a dtype other than that of the run."""
    meta, tokenizer, spec = chat.read_rows_meta(config, "dpo", "pairs", reference=str)
    width = meta.block_size + 1
    warn_of_differences(meta.extra, config.data_dir, "dpo")
    dtype = str(choose_dtype(config.dtype, ranks.device)[0]).removeprefix("torch.")
    prepared = meta.extra.get("reference_dtype", dtype)  # unknown in folders of earlier versions
    if dtype != prepared:
        raise DataError(
            f"dtype: {dtype}, but the log probabilities in {config.data_dir} are in {prepared}: "
            f"train with --dtype {prepared}, or prepare them again: python -m data.prepare.pairs "
            f"FILE... --reference {config.init_from} --out {config.data_dir} --dtype {dtype}")

    def load(split):
        tokens, mask, logps = open_rows(
            config.data_dir, split, tokens=((2 * width,), 0, tokenizer.n_vocab),
            mask=((2 * width,), 0, 2), logps=((2,), None, None))
        return RowLoader([tokens.reshape(-1, 2, width), mask.reshape(-1, 2, width), logps], config,
                         ranks)
    return Data(load("train"), load("val") if config.eval_interval else None,
                spec | dict(reference=meta.extra["reference"]))


def build_model(config, data):
    model = chat.build_model(config, data, PreferenceGPT)
    model.keys = config
    model.reference_digest = data.spec["reference"]
    return add_adapters(model, config.lora_rank, config.seed)
