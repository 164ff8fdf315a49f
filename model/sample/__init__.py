"""Text out of a checkpoint: python -m model.sample --ckpt out/ckpt.pt --prompt "Once upon"

The checkpoint holds the tokenizer, so nothing else is needed. Every token is computed once: keys
and values of the past stay in a cache (model/core/generate.py).
"""

import argparse
import math
import sys
import time

import torch

from model.core.detokenizer import TextStreamer
from model.core.generate import encode_prompt, generate
from model.core.load import load_model  # noqa: F401  public name
from model.sample.load import add_load_options, load_for_decoding, load_text_model
from train.base.cli import run_command
from train.base.errors import UserError, echo
from train.robust import is_compile_error

# -----------------------------------------------------------------------------
# the command line

def check_args(a):
    """UserError with all that is wrong with the arguments."""
    wrong = [text for good, text in (
        (0 <= a.temperature < math.inf,
         f"--temperature must be a number of at least 0, got {a.temperature}"),
        (a.top_k is None or a.top_k >= 1, f"--top_k must be at least 1, got {a.top_k}"),
        (a.top_p is None or 0 < a.top_p <= 1, f"--top_p must be in (0, 1], got {a.top_p}"),
        (a.min_p is None or 0 <= a.min_p <= 1, f"--min_p must be in [0, 1], got {a.min_p}"),
        (not a.lookup or a.temperature == 0 and a.num_samples == 1 and not (a.compile or a.chat),
         "--lookup is for one text at --temperature 0, without --compile and --chat"),
        (a.seed is None or 0 <= a.seed < 2**63,
         f"--seed must be at least 0 and below 2^63, got {a.seed}"),
        (a.max_new_tokens >= 0, f"--max_new_tokens must be at least 0, got {a.max_new_tokens}"),
        (a.num_samples >= 1, f"--num_samples must be at least 1, got {a.num_samples}"),
        (not a.chat or not (a.compile or a.quantize),
         "--chat computes with the weights as they are: leave --compile and --quantize out"),
        (not a.chat or a.num_samples == 1,
         "--chat gives one answer to a question: leave --num_samples out"),
        (not a.compile or a.num_samples == 1,
         "--compile is for one text: leave it out, or --num_samples"))
        if not good]
    if wrong:
        raise UserError("\n".join(wrong))


def prepare_compiled(args):
    """load_for_decoding(args), with the tokens of one text computed by a compiled graph where that works."""
    from model.sample.compiled import compile_decoder
    model, tokenizer, device = load_text_model(args)
    print("--compile: compiling, some ten seconds; the next time it is found again",
          file=sys.stderr)
    try:
        return compile_decoder(model, quantized=bool(args.quantize)), tokenizer, device
    except Exception as error:
        if not is_compile_error(error):
            raise
        reason = str(error).strip().split("\n")[0][:200]
        print(f"--compile: torch.compile failed; going on without it: {reason}", file=sys.stderr)
        return load_for_decoding(args)


def sample(args):
    """Write the texts that the command line asks for."""
    if args.temperature is None:
        args.temperature = 0.0 if args.chat or args.lookup else 0.8
    check_args(args)
    if args.chat:
        from model.chat import chat
        return chat(args.ckpt, args.prompt or None, args.max_new_tokens, args.temperature,
                    args.top_k, args.top_p, args.seed, args.device, args.backbone,
                    min_p=args.min_p)
    model, tokenizer, device = (prepare_compiled if args.compile else load_for_decoding)(args)
    start = encode_prompt(tokenizer, args.prompt)
    stop, n = tokenizer.eot_token, args.num_samples
    stream = TextStreamer(tokenizer, [stop]) if n == 1 else None
    started = time.perf_counter()
    print(args.prompt if n == 1 else "", end="", flush=True)
    idx, about = torch.tensor([start] * n, device=device), ""
    if args.lookup:
        from model.sample.lookup import generate_with_lookup
        out, passes = generate_with_lookup(model, idx, args.max_new_tokens, stop, stream, tokenizer.n_vocab)
        about = f", {passes} passes"
    else:
        out = generate(model, idx, args.max_new_tokens, args.temperature, args.top_k, args.top_p,
                       args.seed, stop, stream, tokenizer.n_vocab, args.min_p)
    for row in out[:, len(start):].tolist() if n > 1 else []:
        text = tokenizer.decode(row[:row.index(stop)] if stop in row else row)
        echo(args.prompt + text + "\n" + "-" * 72)
    made, seconds = n * (out.size(1) - len(start)), time.perf_counter() - started
    print(f"\n[{made} tokens{about}, {made / seconds:.1f} tokens/s]", file=sys.stderr)


def main(argv=None):
    """The command line; the exit code."""
    p = argparse.ArgumentParser(prog="python -m model.sample", description=__doc__.split("\n")[0])
    add_load_options(p)
    p.add_argument("--chat", action="store_true", help="talk with a model that learned chats")
    p.add_argument("--prompt", default="", help="text to continue (default: a new document)")
    p.add_argument("--max_new_tokens", type=int, default=256, help="tokens (default: %(default)s)")
    p.add_argument("--temperature", type=float, help="0: always the most likely token "
                   "(default: 0.8, with --chat and --lookup 0)")
    p.add_argument("--top_k", type=int, help="only the k most likely tokens")
    p.add_argument("--top_p", type=float, help="only the most likely tokens that make up p")
    p.add_argument("--min_p", type=float, help="only tokens at least so likely as this share of "
                   "the most likely one")
    p.add_argument("--seed", type=int, help="the same seed writes the same text")
    p.add_argument("--lookup", action="store_true", help="guess what follows from what followed "
                   "before: the same text at --temperature 0 (in bfloat16 but for near ties), in "
                   "fewer passes where it repeats itself")
    p.add_argument("--num_samples", type=int, default=1, help="texts, made at once")
    p.add_argument("--compile", action="store_true", help="compile what a token of one text takes: "
                   "some ten seconds, then about twice the speed on a CPU")
    return run_command(p, sample, argv)
