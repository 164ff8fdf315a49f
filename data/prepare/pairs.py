"""Pairs of answers to rows of tokens for model/dpo.py:

    python -m data.prepare.pairs FILE... --reference out/chat/ckpt.pt --out data/bin/pairs

Records are, by their fields (TRL, UltraFeedback, Anthropic's hh-rlhf),
    prompt, chosen, rejected      the prompt a text or a list of messages, the others as well
    chosen, rejected              two conversations that differ in their last answer: lists of
                                  messages, or texts of "\\n\\nHuman: ...\\n\\nAssistant: ..."

Writes, for train and val, SPLIT_tokens.npy and SPLIT_mask.npy, in each row the chosen conversation
and then the rejected one, 1 where a token of the last answer is, and SPLIT_logps.npy: the log
probabilities of both answers by the model of --reference, whose weights meta.json names by a
digest.
"""

import argparse
import os
import re
import sys
from pathlib import Path

import numpy as np

from data.chat_template import parse_messages
from data.meta import Meta, write_meta
from data.prepare.chat import (
    add_options,
    check_settings,
    example_records,
    say_left_out,
    taken,
)
from data.prepare.folders import new_folder
from data.records import parse_records
from data.rows import RowWriter, id_dtype, pad_rows, split_by_prompt
from data.tokenizer import write_tokenizer
from train.base.cli import run_command
from train.base.errors import DataError

FILES = r"(train|val)_(tokens|mask|logps)\.npy"  # names of the arrays
BATCH = 8  # pairs that the reference reads at once


def to_pair(record):
    """(messages with the chosen answer, messages with the rejected one) of a record; ValueError."""
    if not isinstance(record, dict) or not {"chosen", "rejected"} <= record.keys():
        raise ValueError("expected an object with the fields chosen and rejected")
    sides = [messages_of(record.get("prompt"), record[name]) for name in ("chosen", "rejected")]
    (*before, last), (*other, worse) = sides
    if before != other or {last[0], worse[0]} != {"assistant"}:
        raise ValueError("chosen and rejected: expected the same messages but for the last one, an "
                         "answer of the assistant")
    if last[1].strip() == worse[1].strip():
        raise ValueError("chosen and rejected: the same answer twice")
    return sides


def messages_of(prompt, said):
    """[(role, text), ...] of a prompt, if any, and what follows it, or a whole conversation."""
    if isinstance(said, str) and not prompt:
        before, *parts = re.split(r"\n\n(Human|Assistant):", f"\n\n{said.lstrip()}")
        if before.strip() or not parts:
            raise ValueError("no prompt, and no text of Human: ... and Assistant: ..., each after "
                             f"an empty line, but {said[:60]!r}")
        said = [dict(role=dict(Human="user", Assistant="assistant")[who], content=text.strip())
                for who, text in zip(parts[::2], parts[1::2])]
    if isinstance(said, str):
        said = [dict(role="assistant", content=said)]
    if not said or not isinstance(said, list):
        raise ValueError(f"expected an answer or messages, got {str(said)[:60]!r}")
    said = parse_messages(said, "messages")
    if not prompt or said[0][0] != "assistant":  # it repeats the prompt, or there is none
        return said
    if isinstance(prompt, str):
        prompt = [dict(role="user", content=prompt)]
    return parse_messages(prompt, "messages") + said


def example_pairs(source):
    """The records of data/prepare/chat.py's example, with a subtly wrong answer each: one letter has the
    other case."""
    for i, (where, record) in enumerate(example_records(source)):
        answer = record["response"]
        letters = [j for j, letter in enumerate(answer) if letter.isalpha()]
        j = letters[i * 7 % len(letters)]
        yield where, dict(prompt=record["prompt"], chosen=answer,
                          rejected=answer[:j] + answer[j].swapcase() + answer[j + 1:])


def encoded(args, tokenizer, template):
    """Yields [(ids, mask)] of the two sides of every pair that fits."""
    sources = [example_pairs(source) if source in ("example", "example-more") else source
               for source in args.sources]
    records = parse_records(sources, to_pair, args.num_samples, args.skip_bad, split=args.split,
                            subset=args.subset)
    def encode(sides):
        return [last_answer(*template.sequences(side, tokenizer)[-1]) for side in sides]
    long = 0
    for _, pair in taken(records, encode, args, "pair"):
        if max(len(ids) for ids, _ in pair) > args.block_size + 1:
            long += 1
        else:
            yield pair
    say_left_out((long, f"pairs longer than {args.block_size + 1:,} tokens"))


def last_answer(ids, mask):
    """The same, with a mask of the last answer alone."""
    last = np.flatnonzero(mask).max(initial=0)
    mask[:np.flatnonzero(mask[:last] == 0).max(initial=-1) + 1] = 0
    return ids, mask


def prepare_pairs(args):
    """What the command does. Raises UserError."""
    import torch

    from model.core.load import model_of
    from model.core.weights import read_backbone
    from train.device import choose_dtype
    from train.distributed import get_device
    args.out = args.out or os.path.join("data", "bin", f"{Path(args.sources[0]).stem}-pairs")
    state, device = read_backbone(args.reference, "reference"), get_device()
    model, tokenizer = model_of(state, args.reference, device)
    if getattr(model, "template", None) is None or tokenizer is None:
        raise DataError(f"--reference {args.reference}: pairs need the checkpoint of a chat model, "
                        "with which their answers are compared")
    template = model.template.with_end_ids(tokenizer)
    args.tokenizer = args.reference
    check_settings(args, tokenizer, "dpo")
    args.block_size = min(args.block_size or 1 << 30, model.config.block_size)
    pairs = list(split_by_prompt(encoded(args, tokenizer, template), args.val_fraction))
    if {split for split, _ in pairs} != {"train", "val"}:
        raise DataError(f"{', '.join(args.sources)}: too few pairs ({len(pairs)}) for training and "
                        "validation; more pairs, or a larger --block_size")
    longest = max(len(ids) for _, pair in pairs for ids, _ in pair)
    block_size = min(args.block_size, -(-longest // 16) * 16)  # whole tiles of a product
    dtype, why = choose_dtype("auto", device)
    print(f"Log probabilities of {len(pairs):,} pairs by {args.reference}, on {device} in {why}")
    with (new_folder(args.out, FILES) as folder, torch.no_grad(),
          torch.autocast(device.type, dtype, enabled=dtype != torch.float32)):
        splits = {split: write_split(folder, split, model, tokenizer, block_size + 1,
                                     [pair for where, pair in pairs if where == split])
                  for split in ("train", "val")}
        write_meta(folder, Meta(
            "dpo", **write_tokenizer(folder, tokenizer), block_size=block_size,
            template=template.spec, splits=splits, sources=args.sources,
            extra=dict(reference=state["digest"])))
    for split, found in splits.items():
        print(f"[{split}] {found['pairs']:,} pairs in rows of 2 x {block_size + 1} tokens; the "
              f"reference prefers {found['preferred']:.1%} of the chosen answers")
    print(f"Next: python run_train.py --config train/configs/dpo.yaml --data_dir {args.out} "
          f"--init_from {args.reference}")


def write_split(folder, split, model, tokenizer, width, pairs):
    """Write the arrays of a split; its entry in meta.json. pairs: [(ids, mask)] of two sides."""
    from model.dpo import answer_logps
    writer = RowWriter(folder, split, dict(
        tokens=(2 * width, id_dtype(tokenizer.n_vocab)), mask=(2 * width, "u1"), logps=(2, "<f4")))
    preferred = 0
    for first in range(0, len(pairs), BATCH):
        sides = [side for pair in pairs[first:first + BATCH] for side in pair]
        tokens, mask = (pad_rows([side[i] for side in sides], width, fill, np.int64).reshape(
            -1, 2, width) for i, fill in enumerate((tokenizer.eot_token, 0)))
        logps = answer_logps(model, tokens, mask)  # (B, 2), of (B, 2, width) each
        preferred += int((logps[:, 0] > logps[:, 1]).sum())
        for row in zip(tokens, mask, logps):
            writer.append(**dict(zip(("tokens", "mask", "logps"), row)))
    writer.close()
    return dict(pairs=len(pairs), preferred=preferred / len(pairs))


def main(argv=None):
    """Runs the command; its exit code."""
    parser = argparse.ArgumentParser("python -m data.prepare.pairs", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser.add_argument)
    parser.add_argument("--reference", required=True, metavar="CKPT", help="the chat model that "
                        "training starts from, and is compared with")
    return run_command(parser, prepare_pairs, argv)


if __name__ == "__main__":
    sys.exit(main())
