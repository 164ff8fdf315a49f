"""DPO (arXiv:2305.18290): preference optimization on pairs of a chosen and a rejected answer.

    python -m data.prepare.pairs example --reference out/chat/ckpt.pt --out data/bin/pairs
    python run_train.py --config train/configs/dpo.yaml
    python -m model.sample --ckpt out/dpo/ckpt.pt --chat

The reference model is the one from which training starts. It is not loaded, because the data
contain the log probability of each answer under it. With lora_rank, only adapters are trained. The
result is a chat model for sampling, serving and export.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from data.rows import open_rows
from model import chat
from model.chat import USE, as_gpt, inherit_shape, sample  # noqa: F401  model interface
from model.core.adapters import WithAdapters, add_adapters
from model.core.formulas import warn_of_differences
from model.core.ops import IGNORE
from model.core.weights import digest
from train.base.errors import CheckpointError, DataError, quote_path
from train.base.fields import key
from train.dataloader import Data, RowLoader
from train.device import choose_dtype


@dataclass
class Keys(chat.FromChatKeys):
    dpo_beta: float = key(0.1, "strength of the constraint to stay close to the reference", gt=0)
    dpo_nll: float = key(0.0, "weight of the chosen answer's cross-entropy (arXiv:2407.21783)",
                         ge=0)


class PreferenceGPT(WithAdapters, chat.ChatGPT):
    """A chat model that is trained by DPO: forward(tokens, mask, logps) for B pairs of answers.

    tokens (B, 2, T + 1): ids of a prompt with the chosen answer, then with the rejected one.
    mask: of the same shape, 1 for tokens of the answer.
    logps (B, 2): the log probabilities of both answers under the reference model.
    The caller must set keys, a TrainConfig, and reference_digest, the reference weights' digest().
    Logged: "chosen" and "rejected", the mean implicit rewards dpo_beta * (log probability - logps);
    "margin", the mean of chosen - rejected; "accuracy", the share of pairs with a positive margin;
    in evaluations "exact", the share of chosen answers that greedy sampling generates.
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
        """Return `weights` by this model's names; CheckpointError if not those of the reference."""
        if digest(weights) != self.reference_digest:
            raise CheckpointError("init_from: not the weights with which the pairs were prepared; "
                                  "run data.prepare.pairs with --reference CKPT.pt again")
        return super().adopt(weights)

    def flops_per_unit(self):
        return super().flops_per_unit() * 2  # a pair is two rows


def score_answers(model, idx, mask):
    """Return (states, targets, log probabilities) of B pairs of answers, with gradients.

    idx (B, 2, T + 1): token ids. mask: of the same shape, 1 for tokens of an answer.
    Returns the states (2 B, T, C) after the final norm; the next tokens (2 B, T), -1 outside
    answers; the log probability (2 B,) of each answer. Rows 2 i and 2 i + 1 belong to pair i.
    """
    idx = idx.flatten(0, 1)  # (2 B, T + 1)
    mask = mask.flatten(0, 1)
    targets = torch.where(mask[:, 1:] == 1, idx[:, 1:], IGNORE)  # (2 B, T)
    x = model.trunk(idx[:, :-1])  # (2 B, T, C)
    head = (model.lm_head or model.wte).weight
    losses = model.loss(x, head, targets, model.config.vocab_size)  # (2 B, T)
    return x, targets, -losses.sum(1)


def sum_answer_logps(model, tokens, mask):
    """Return the log probabilities (B, 2), a float32 numpy array, of the answers in B pairs.

    tokens, mask: as idx and mask of score_answers(), in numpy. The caller must disable gradients.
    """
    arrays = (torch.from_numpy(part).to(model.wte.weight.device) for part in (tokens, mask))
    return score_answers(model, *arrays)[2].view(-1, 2).cpu().numpy()


# -----------------------------------------------------------------------------
# model interface, see train/system.py

def open_data(config, ranks):
    """Return the Data of data.prepare.pairs, with batches (tokens, mask, logps), see PreferenceGPT.

    Raises DataError if the folder cannot be used, or if logps were computed in a different dtype.
    """
    meta, tokenizer, spec = chat.read_rows_meta(config, "dpo", "pairs", "reference")
    width = meta.block_size + 1
    warn_of_differences(meta.extra, config.data_dir, "dpo")
    dtype = str(choose_dtype(config.dtype, ranks.device)[0]).removeprefix("torch.")
    prepared = meta.extra.get("reference_dtype", dtype)  # unknown in folders of earlier versions
    if dtype != prepared:
        raise DataError(
            f"dtype: {dtype}, but the log probabilities in {config.data_dir} are in {prepared}: "
            f"train with --dtype {prepared}, or prepare them again: python -m data.prepare.pairs "
            f"FILE... --reference {quote_path(config.init_from)} --out "
            f"{quote_path(config.data_dir)} --dtype {dtype}")

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
