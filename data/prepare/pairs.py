"""Prepare pairs of answers for --model dpo, with log probabilities of a reference model.

    python -m data.prepare.pairs FILE... --reference out/chat/ckpt.pt --out data/bin/pairs

Formats of records (TRL, UltraFeedback, Anthropic's hh-rlhf):

    prompt, chosen, rejected    the prompt and both answers, each a text or a list of messages
    chosen, rejected            conversations that differ in the last answer: lists of messages, or
                                texts of "\\n\\nHuman: ...\\n\\nAssistant: ..."

Writes, for train and val, SPLIT_tokens.npy and SPLIT_mask.npy (each row: the chosen conversation,
then the rejected one; the mask is 1 for the tokens of the last answer), and SPLIT_logps.npy (both
answers' log probabilities according to the model --reference). meta.json identifies the weights of
that model by a digest.
"""

import os
import re
import sys
from dataclasses import dataclass

import numpy as np

from data.chat_template import parse_messages
from data.meta import Meta, write_meta
from data.prepare import chat
from data.prepare.folders import new_folder
from data.rows import id_dtype, pad_rows
from data.tokenizer import write_tokenizer
from train.base.cli import run_command
from train.base.errors import DataError
from train.base.fields import key

FILES = r"(train|val)_(tokens|mask|logps)\.npy"  # names of the arrays
PAIRS_PER_BATCH = 8  # of the reference model
LENGTH_MULTIPLE = 16  # of rows: whole tiles of a matrix product


# -----------------------------------------------------------------------------
# records

def to_pair(record):
    """Return [messages with the chosen answer, messages with the rejected answer] of a record.
    Raises ValueError."""
    if not isinstance(record, dict) or not {"chosen", "rejected"} <= record.keys():
        raise ValueError("expected an object with the fields chosen and rejected")
    sides = [join_messages(record.get("prompt"), record[name]) for name in ("chosen", "rejected")]
    (*context, chosen), (*other_context, rejected) = sides
    if context != other_context or {chosen[0], rejected[0]} != {"assistant"}:
        raise ValueError("chosen and rejected: expected the same messages but for the last one, an "
                         "answer of the assistant")
    if chosen[1].strip() == rejected[1].strip():
        raise ValueError("chosen and rejected: the same answer twice")
    return sides


def join_messages(prompt, answer):
    """Return [(role, text), ...] of a prompt, which may be `None`, and an answer: a text, a list of
    messages or a whole conversation. Raises ValueError."""
    if isinstance(answer, str) and not prompt:
        before, *parts = re.split(r"\n\n(Human|Assistant):", f"\n\n{answer.lstrip()}")
        if before.strip() or not parts:
            raise ValueError("no prompt, and no text of Human: ... and Assistant: ..., each after "
                             f"an empty line, but {answer[:60]!r}")
        roles = dict(Human="user", Assistant="assistant")
        return [(roles[name], text.strip()) for name, text in zip(parts[::2], parts[1::2])]
    if isinstance(answer, str):
        answer = [dict(role="assistant", content=answer)]
    if not answer or not isinstance(answer, list):
        raise ValueError(f"expected an answer or messages, got {str(answer)[:60]!r}")
    messages = parse_messages(answer, "messages")
    if not prompt or messages[0][0] != "assistant":  # without a prompt, or beginning with it
        return messages
    if isinstance(prompt, str):
        prompt = [dict(role="user", content=prompt)]
    return parse_messages(prompt, "messages") + messages


def example_pairs(source):
    """Yield (where, record): the example of data.prepare.chat with a wrong answer, in which one
    letter has the other case."""
    for i, (where, record) in enumerate(chat.example_records(source)):
        answer = record["response"]
        letters = [j for j, letter in enumerate(answer) if letter.isalpha()]
        j = letters[i * 7 % len(letters)]
        yield where, dict(prompt=record["prompt"], chosen=answer,
                          rejected=answer[:j] + answer[j].swapcase() + answer[j + 1:])


def encode_pairs(args, tokenizer, template, width):
    """Yield [(ids, mask), (ids, mask)] of the chosen and the rejected side of each pair."""
    def encode(sides):
        pair = [mask_last_answer(*template.sequences(side, tokenizer)[-1]) for side in sides]
        if max(len(ids) for ids, _ in pair) > width:
            raise chat.SkipSample(f"longer than {width:,} tokens")
        return pair
    return chat.encode_samples(args, "pair", to_pair, encode, example_pairs)


def mask_last_answer(ids, mask):
    """Return the ids and a mask of the last answer only."""
    last = np.flatnonzero(mask).max(initial=0)
    mask[:np.flatnonzero(mask[:last] == 0).max(initial=-1) + 1] = 0
    return ids, mask


# -----------------------------------------------------------------------------
# command

@dataclass
class PairOptions(chat.RecordOptions):
    __doc__ = __doc__  # the description in --help: the formats of records
    reference: str = key("", "chat model that training starts from and is compared with",
                         required=True, metavar="CKPT")


def prepare_pairs(args):
    """Write the folder of prepared pairs and print a summary."""
    import torch

    from model.core.load import model_of
    from model.core.weights import read_backbone
    from train.device import choose_dtype
    from train.distributed import get_device
    device = get_device()
    state = read_backbone(args.reference, "reference")
    model, tokenizer = model_of(state, args.reference, device)
    if getattr(model, "template", None) is None or tokenizer is None:
        raise DataError(f"--reference {args.reference}: pairs need the checkpoint of a chat model, "
                        "with which their answers are compared")
    chat.check_output(args, tokenizer, "dpo", "-pairs")
    template = model.template.with_end_ids(tokenizer)
    block_size = min(args.block_size or model.config.block_size, model.config.block_size)
    splits = chat.collect_splits(args, "pair", encode_pairs(args, tokenizer, template,
                                                            block_size + 1))
    longest = max(len(ids) for pairs in splits.values() for pair in pairs for ids, _ in pair)
    block_size = min(block_size, -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE)
    dtype, reason = choose_dtype("auto", device)
    print(f"Computing log probabilities of {sum(map(len, splits.values())):,} pairs with "
          f"{args.reference}, on {device} in {reason}")
    with (new_folder(args.out, FILES) as folder, torch.no_grad(),
          torch.autocast(device.type, dtype, enabled=dtype != torch.float32)):
        counts = {split: write_pairs(folder, split, model, tokenizer, block_size + 1, pairs)
                  for split, pairs in splits.items()}
        write_meta(folder, Meta(
            "dpo", **write_tokenizer(folder, tokenizer), block_size=block_size,
            template=template.spec, splits=counts, sources=args.sources,
            extra=dict(reference=state["digest"])))
    for split, n in counts.items():
        print(f"[{split}] {n['pairs']:,} pairs in rows of 2 x {block_size + 1} tokens; the "
              f"reference prefers {n['preferred']:.1%} of the chosen answers")
    print(f"Next: python run_train.py --config train/configs/dpo.yaml --data_dir {args.out} "
          f"--init_from {args.reference}")


def write_pairs(folder, split, model, tokenizer, width, pairs):
    """Write the arrays of a split and return its entry of meta.json."""
    from model.dpo import answer_logps
    def stack(part, fill, dtype):
        rows = [side[part] for pair in pairs for side in pair]
        return pad_rows(rows, width, fill, dtype).reshape(-1, 2, width)
    tokens = stack(0, tokenizer.eot_token, id_dtype(tokenizer.n_vocab))  # (N, 2, width)
    mask = stack(1, 0, np.uint8)  # (N, 2, width)
    logps = np.concatenate([  # (N, 2)
        answer_logps(model, *(array[i:i + PAIRS_PER_BATCH].astype(np.int64)
                              for array in (tokens, mask)))
        for i in range(0, len(pairs), PAIRS_PER_BATCH)])
    for name, array in dict(tokens=tokens, mask=mask, logps=logps).items():
        np.save(os.path.join(folder, f"{split}_{name}.npy"), array.reshape(len(pairs), -1))
    return dict(pairs=len(pairs), preferred=float((logps[:, 0] > logps[:, 1]).mean()))


def main(argv=None):
    return run_command(PairOptions, prepare_pairs, argv)


if __name__ == "__main__":
    sys.exit(main())
