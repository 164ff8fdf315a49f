"""Loading a checkpoint for text generation, with the options of `sample` and `serve`."""

import sys

from data.tokenizer import load_tokenizer
from model.core.load import BACKBONE, EMA, load_model
from model.core.quantize import Int8Linear
from model.sample.fused import pack_model, quantize_model
from train.device import choose_dtype
from train.distributed import get_device


def add_load_options(parser):
    """Add the command-line options that load_text_model and load_for_decoding read."""
    add = parser.add_argument
    add("--ckpt", default="out/ckpt.pt", help="checkpoint (default: %(default)s)")
    add("--backbone", help=BACKBONE)
    add("--ema", action="store_true", help=EMA)
    add("--tokenizer", help="tokenizer to use if the checkpoint has none: byte, gpt2, a rank file "
        "or a prepared folder")
    add("--device", default="auto", help="auto, cpu, cuda, mps")
    add("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    add("--quantize", choices=["int8"], help="int8 weights with one scale per row: half of "
        "bfloat16's memory")


def load_text_model(args):
    """Return (model, tokenizer, device) of a checkpoint that generates text. Raises ValueError or
    UserError."""
    device = get_device(args.device)
    model, tokenizer = load_model(args.ckpt, device, choose_dtype(args.dtype, device)[0],
                                  args.backbone, args.ema)
    if not hasattr(sys.modules[type(model).__module__], "sample"):
        raise ValueError(f"{args.ckpt}: {type(model).__module__} does not generate text")
    if tokenizer is None and args.tokenizer is None:
        raise ValueError(f"{args.ckpt}: has no tokenizer, which text generation needs; specify "
                         "one: --tokenizer byte, gpt2, a rank file or a prepared folder")
    tokenizer = tokenizer or load_tokenizer(args.tokenizer)
    if tokenizer.n_vocab > model.config.vocab_size:
        raise ValueError(f"--tokenizer {args.tokenizer}: has {tokenizer.n_vocab} ids, but the "
                         f"model's vocabulary has {model.config.vocab_size}; specify the tokenizer "
                         "of the training data")
    return model, tokenizer, device


def load_for_decoding(args):
    """Return load_text_model(args) with layers for decoding: int8 with --quantize, else packed."""
    model, tokenizer, device = load_text_model(args)
    model = quantize_model(model) if args.quantize else pack_model(model)
    if any(isinstance(m, Int8Linear) and not m.has_kernel for m in model.modules()):
        print(f"--quantize int8: no int8 kernel for {device.type} or for a layer width that is not "
              "a multiple of 16; weights are dequantized in every product, which is slow",
              file=sys.stderr)
    return model, tokenizer, device
