"""Generate text with a checkpoint: python -m model.sample --ckpt out/ckpt.pt --prompt "Once upon"

The checkpoint contains the tokenizer; no other file is needed.
"""

import sys
import time
from dataclasses import dataclass

import torch

from model.core.detokenizer import TextStreamer
from model.core.generate import SamplingOptions, encode_prompt, generate
from model.core.load import load_model  # noqa: F401  public name
from model.sample.load import LoadOptions, load_for_decoding, load_text_model
from train.base.cli import run_command
from train.base.errors import UserError, echo
from train.base.fields import key
from train.device import is_compile_error

SEPARATOR = "-" * 72  # between several texts


@dataclass
class SampleOptions(SamplingOptions, LoadOptions):
    """Generate text with a checkpoint, which contains the tokenizer."""
    prompt: str = key("", "text to continue (default: a new document)")
    temperature: float | None = key(None, "0: always the most likely token (default: 0.8; with "
                                    "--chat 0)", ge=0)
    num_samples: int = key(1, "number of texts, generated in one batch", ge=1)
    chat: bool = key(False, "talk with a chat model")
    system: str | None = key(None, "--chat: system message, before the first question")
    compile: bool = key(False, "compile the decoding of one text: some ten seconds, then about "
                        "twice the speed on a CPU")

    def __post_init__(self):
        if self.temperature is None:
            self.temperature = 0.0 if self.chat else 0.8


def load_compiled(options):
    """Return load_for_decoding(options) with a compiled model, or without if compiling fails."""
    from model.sample.compiled import compile_decoder
    model, tokenizer, device = load_text_model(options)
    print("--compile: compiling takes some ten seconds; the result is cached", file=sys.stderr)
    try:
        return compile_decoder(model, quantized=bool(options.quantize)), tokenizer, device
    except Exception as error:
        if not is_compile_error(error):
            raise
        reason = str(error).strip().split("\n")[0][:200]
        print(f"--compile: torch.compile failed; continuing without it: {reason}", file=sys.stderr)
        return load_for_decoding(options)


def sample(options):
    """Generate and print texts."""
    many = options.num_samples > 1
    if options.chat and (options.compile or options.quantize or many):
        raise UserError("--chat: remove --compile, --quantize and --num_samples")
    if options.compile and many:
        raise UserError("--compile: one text; remove it or --num_samples")
    if options.chat:
        from model.chat import chat
        return chat(options)
    model, tokenizer, device = (load_compiled if options.compile else load_for_decoding)(options)
    started = time.perf_counter()
    prompt = encode_prompt(tokenizer, options.prompt)
    n = options.num_samples
    idx = torch.tensor([prompt] * n, device=device)  # (n, T)
    stop = tokenizer.eot_token
    on_token = None
    if n == 1:
        print(options.prompt, end="", flush=True)
        on_token = TextStreamer(tokenizer, [stop])
    out = generate(model, idx, options.max_new_tokens, **options.sampling(), stop_token=stop,
                   on_token=on_token, n_vocab=tokenizer.n_vocab)
    for ids in out[:, len(prompt):].tolist() if n > 1 else []:
        text = tokenizer.decode(ids[:ids.index(stop)] if stop in ids else ids)
        echo(f"{options.prompt}{text}\n{SEPARATOR}")
    n_tokens = n * (out.size(1) - len(prompt))
    rate = n_tokens / (time.perf_counter() - started)
    print(f"\n[{n_tokens} tokens, {rate:.1f} tokens/s]", file=sys.stderr)


def main(argv=None):
    """Run the command; return the exit code."""
    return run_command(SampleOptions, sample, argv)
