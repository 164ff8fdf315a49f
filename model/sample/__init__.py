"""Generate text with a checkpoint: python -m model.sample --ckpt out/ckpt.pt --prompt "Once upon".

The checkpoint contains the tokenizer. Only one with a backbone (frozen model) needs a second file.
"""

import sys
import time
from dataclasses import dataclass

import torch

from data.tokenizer import open_tokenizer
from model.core.detokenizer import TextStreamer
from model.core.generate import SamplingOptions, encode_prompt, find_ends, generate
from model.core.load import BACKBONE, EMA, load_model
from model.core.packed import replace_linear_layers
from model.gpt import GPT
from train.base.cli import command
from train.base.errors import UserError, echo
from train.base.fields import key
from train.device import choose_dtype
from train.distributed import get_device

SEPARATOR = "-" * 72  # between several texts


@dataclass
class LoadOptions:
    """Options of commands that load a trained model, for load_text_model()."""
    ckpt: str = key("out/ckpt.pt", "checkpoint, Hugging Face folder or hf:OWNER/NAME", path=True)
    backbone: str | None = key(None, BACKBONE, path=True)
    ema: bool = key(False, EMA)
    tokenizer: str | None = key(None, "tokenizer to use if the checkpoint has none: byte, gpt2, a "
                                "rank file or a prepared folder")
    device: str = key("auto", "auto, cpu, cuda or mps")
    dtype: str = key("auto", "precision of the weights", choices=["auto", "float32", "bfloat16"])


def load_text_model(options):
    """Load options.ckpt; return (GPT in eval mode, Tokenizer, torch.device) for generation.

    Raises ValueError or UserError if the model cannot be loaded or does not generate text, or if
    the tokenizer is missing or has more ids than the model. Disables cuDNN's attention globally.
    """
    device, ckpt = get_device(options.device), options.ckpt
    # On Hopper PyTorch prefers cuDNN's attention, which makes a new plan for each prompt length.
    torch.backends.cuda.enable_cudnn_sdp(False)
    model, tokenizer = load_model(ckpt, device, choose_dtype(options.dtype, device)[0],
                                  options.backbone, options.ema)
    if not isinstance(model, GPT):
        raise ValueError(f"{ckpt}: {type(model).__module__} does not generate text")
    if tokenizer is None and options.tokenizer is None:
        raise ValueError(f"{ckpt}: has no tokenizer; specify --tokenizer byte, gpt2, a rank file "
                         "or a prepared folder")
    tokenizer = tokenizer or open_tokenizer(options.tokenizer)
    if tokenizer.n_vocab > model.config.vocab_size:
        raise ValueError(f"{ckpt}: the tokenizer has {tokenizer.n_vocab} ids, the model "
                         f"{model.config.vocab_size}; give --tokenizer of the training data")
    return model, tokenizer, device


@dataclass
class SampleOptions(SamplingOptions, LoadOptions):
    """Generate text with a checkpoint, which contains the tokenizer."""
    prompt: str = key("", "text to continue (default: a new document)", text=True)
    temperature: float | None = key(None, "0: the most likely token [0.8; with --chat 0]", ge=0)
    num_samples: int = key(1, "number of texts, generated in one batch", ge=1)
    chat: bool = key(False, "talk with a chat model")
    system: str | None = key(None, "--chat: message before the first question", text=True)
    compile: bool = key(False, "compile the decoding of one text: some ten seconds, then about "
                        "twice the speed on a CPU")

    def __post_init__(self):
        if self.temperature is None:
            self.temperature = 0.0 if self.chat else 0.8


def sample(options):
    """Run the command: print generated texts or, with options.chat, answers to questions.

    With options.chat, options.prompt is the only question; without it, each line of stdin is one.
    """
    n = options.num_samples
    if sum([options.chat, options.compile, n > 1]) > 1:
        raise UserError("--chat, --compile and --num_samples: use only one of them")
    if options.system is not None and not options.chat:
        raise UserError("--system: a system message goes with --chat")
    model, tokenizer, device = load_text_model(options)
    if options.compile:
        from model.sample.compiled import compile_decoder
        print("--compile: compiling takes some ten seconds; the result is cached", file=sys.stderr)
        model = compile_decoder(model)
    else:
        replace_linear_layers(model)  # they decode faster
    if options.chat:
        from model.chat import read_questions, talk
        if model.template is None:
            raise UserError(f"{options.ckpt}: not a chat model; fine-tune it with --config "
                            "train/configs/chat.yaml, see python -m data.prepare.chat --help")
        questions = [options.prompt] if options.prompt else read_questions()
        return talk(model, tokenizer, questions, options.max_new_tokens, options.system,
                    **options.sampling())
    started = time.perf_counter()
    prompt = encode_prompt(tokenizer, options.prompt)
    size = model.config.block_size
    if len(prompt) > size:
        print(f"[the prompt has {len(prompt)} tokens, the context {size}: the model reads only the "
              "end of it]", file=sys.stderr)
    idx = torch.tensor([prompt], device=device)  # (1, T)
    stops = find_ends(model, tokenizer)
    on_token = None
    if n == 1:
        print(options.prompt, end="", flush=True)
        on_token = TextStreamer(tokenizer, stops)
    out = generate(model, idx, options.max_new_tokens, **options.sampling(), on_token=on_token,
                   stop_token=stops or None, n_vocab=tokenizer.n_vocab, samples_per_row=n)
    n_tokens = 0
    for ids in out[:, len(prompt):].tolist():
        end = next((k for k, i in enumerate(ids) if i in stops), len(ids))
        n_tokens += min(end + 1, len(ids))  # with the stop token, without the padding after it
        if n > 1:
            echo(f"{options.prompt}{tokenizer.decode(ids[:end])}\n{SEPARATOR}")
    rate = n_tokens / (time.perf_counter() - started)
    print(f"\n[{n_tokens} tokens, {rate:.1f} tokens/s]", file=sys.stderr)


main = command(SampleOptions, sample)
