"""Prepare pairs of answers for --model dpo, with log probabilities of a reference model.

    python -m data.prepare.pairs FILE... --reference out/chat/ckpt.pt --out data/bin/pairs

Formats of records (TRL, UltraFeedback):

    prompt, chosen, rejected    the prompt and both answers, each a text or a list of messages
    chosen, rejected            conversations that differ in the last answer

Writes, for train and val, SPLIT_tokens.npy and SPLIT_mask.npy (each row: the chosen conversation,
then the rejected one; the mask is 1 for the tokens of the last answer), and SPLIT_logps.npy (both
answers' log probabilities according to the model --reference). meta.json has a digest of the
weights of this model, and the precision (--dtype). Training must start from these weights and use
this precision; the margin of every pair is then 0 at the start.
"""

from dataclasses import dataclass

import numpy as np

from data.chat_template import parse_content, parse_messages
from data.prepare.samples import SampleOptions, SampleWriter
from data.rows import pad_rows, save_arrays
from train.base.cli import command
from train.base.errors import DataError, quote_path
from train.base.fields import key

PAIRS_PER_BATCH = 8  # of the reference model
LENGTH_MULTIPLE = 16  # of rows: whole tiles of a matrix product


@dataclass
class PairOptions(SampleOptions):
    __doc__ = __doc__  # the description in --help: the formats of records
    reference: str = key("", "chat model that training starts from and is compared with",
                         required=True, metavar="CKPT")
    dtype: str = key("float32", "precision of the log probabilities: the key dtype of training",
                     choices=["float32", "bfloat16", "float16"])


def to_pair(record):
    """Return the two conversations of a record: with the chosen and with the rejected answer.

    record: {"chosen", "rejected"}, optionally "prompt" (see join_messages) and "system", a text
    that comes first unless there is a system message. Raises ValueError for missing or invalid
    fields, different messages before the answers, and equal answers.
    """
    if not {"chosen", "rejected"} <= record.keys():
        raise ValueError("expected the fields chosen and rejected")
    prompt = record.get("prompt")
    sides = [join_messages(prompt, record[name], name) for name in ("chosen", "rejected")]
    if record.get("system") and sides[0][0][0] != "system":  # as in data.prepare.chat
        sides = [[("system", parse_content(record["system"], "system")), *side] for side in sides]
    (role, answer), (other_role, other_answer) = (side[-1] for side in sides)
    if sides[0][:-1] != sides[1][:-1] or {role, other_role} != {"assistant"}:
        raise ValueError("chosen and rejected: expected the same messages but for the last answer")
    if answer.strip() == other_answer.strip():
        raise ValueError("chosen and rejected: the same answer twice")
    return sides


def join_messages(prompt, answer, name):
    """Return the conversation [(role, text), ...] of a prompt and an answer.

    prompt: a text, messages (dicts, as for parse_messages), or None. answer: a text (only with a
    prompt); messages from the assistant on, which are appended to the prompt, if any; or the full
    conversation, which is returned. name: the answer's field, for messages. Raises ValueError for
    other values, and if the full conversation lacks a message of the prompt.
    """
    if prompt == "":
        raise ValueError("prompt: expected a text, got ''")
    if isinstance(answer, str) and prompt:
        answer = [dict(role="assistant", content=answer)]
    if isinstance(prompt, str):
        prompt = [dict(role="user", content=prompt)]
    messages = parse_messages(answer, name)
    if not messages:
        raise ValueError(f"{name}: no message")
    before = parse_messages(prompt or [], "prompt")
    if messages[0][0] == "assistant":
        return before + messages
    said = [(role, text.strip()) for role, text in messages]
    if lost := [role for role, text in before if (role, text.strip()) not in said]:
        raise ValueError(f"{name}: the prompt's {lost[0]} message is missing in this conversation")
    return messages


def mask_last_answer(ids, mask):
    """Set `mask` (n,) to 0, in place, except for the 1s of the last answer; return (ids, mask)."""
    last = np.flatnonzero(mask).max(initial=0)
    mask[:np.flatnonzero(mask[:last] == 0).max(initial=-1) + 1] = 0
    return ids, mask


class PairWriter(SampleWriter):
    """The command data.prepare.pairs; args is a PairOptions, and run() does all the work.

    The constructor seeds the generators and loads args.reference; DataError if no chat model.
    """
    noun = "pair"
    model = "dpo"
    suffix = "-pairs"

    def __init__(self, args):
        from model.core.formulas import edited
        from model.core.load import model_of
        from model.core.weights import read_backbone
        from train.distributed import get_device, set_seed
        self.args = args
        self.device = get_device()
        set_seed(0)  # the precision of float32 on a GPU as in training: TF32
        state = read_backbone(args.reference, "reference")
        self.reference, self.tokenizer = model_of(state, args.reference, self.device)
        self.template = getattr(self.reference, "template", None)
        if self.template is None or self.tokenizer is None:
            raise DataError(f"--reference {args.reference}: pairs need the checkpoint of a chat "
                            "model, with which their answers are compared")
        context = self.reference.config.block_size
        self.block_size = min(args.block_size or context, context)
        self.extra = dict(reference=state["digest"], reference_dtype=args.dtype,
                          formulas=edited("dpo"))
        self.options = f" --init_from {quote_path(args.reference)} --dtype {args.dtype}"

    def encode(self, record):
        """Return [(ids, mask), (ids, mask)], all (n,), of the chosen and rejected conversation.

        The mask is 1 for the last answer. Returns None, and counts the reason in self.notes, if a
        conversation has more than block_size + 1 tokens. Raises ValueError for an invalid record.
        """
        pair = [mask_last_answer(*self.template.sequences(side, self.tokenizer)[-1])
                for side in to_pair(record)]
        width = self.block_size + 1
        if max(len(ids) for ids, _ in pair) > width:
            self.notes[f"left out: longer than {width:,} tokens"] += 1
            return None
        return pair

    def write(self, folder, splits):
        """Write all pairs with log probabilities; first reduce self.block_size to the longest."""
        import torch

        from train.device import choose_dtype
        longest = max(len(ids) for pairs in splits.values() for pair in pairs for ids, _ in pair)
        self.block_size = min(self.block_size, -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE)
        dtype, reason = choose_dtype(self.args.dtype, self.device)
        print(f"Computing log probabilities with {self.args.reference} on {self.device}, {reason}")
        with (torch.no_grad(),
              torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)):
            return super().write(folder, splits)

    def write_split(self, folder, split, pairs):
        from model.dpo import sum_answer_logps
        width = self.block_size + 1
        ids, masks = zip(*(side for pair in pairs for side in pair))
        tokens = self.pad_tokens(ids, width).reshape(-1, 2, width)  # (N, 2, T)
        mask = pad_rows(masks, width, 0, np.uint8).reshape(-1, 2, width)
        batches = (slice(i, i + PAIRS_PER_BATCH) for i in range(0, len(pairs), PAIRS_PER_BATCH))
        logps = np.concatenate([sum_answer_logps(self.reference, tokens[rows].astype(np.int64),
                                                 mask[rows].astype(np.int64))
                                for rows in batches])  # (N, 2)
        save_arrays(folder, split, tokens=tokens.reshape(len(pairs), -1),
                    mask=mask.reshape(len(pairs), -1), logps=logps)
        return dict(pairs=len(pairs), preferred=float((logps[:, 0] > logps[:, 1]).mean()))


main = command(PairOptions, lambda args: PairWriter(args).run())
