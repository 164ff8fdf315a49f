"""Loading a checkpoint for text generation, with the options of `sample` and `serve`."""

import sys
from dataclasses import dataclass

from data.tokenizer import open_tokenizer
from model.core.load import BACKBONE, EMA, load_model
from model.core.quantize import Int8Linear, PackedLinear, replace_linear_layers
from model.gpt import GPT
from train.base.fields import key
from train.device import choose_dtype
from train.distributed import get_device


@dataclass
class LoadOptions:
    """Command-line options of load_text_model and load_for_decoding."""
    ckpt: str = key("out/ckpt.pt", "checkpoint, Hugging Face folder or hf:OWNER/NAME")
    backbone: str | None = key(None, BACKBONE, metavar="FILE")
    ema: bool = key(False, EMA)
    tokenizer: str | None = key(None, "tokenizer to use if the checkpoint has none: byte, gpt2, a "
                                "rank file or a prepared folder")
    device: str = key("auto", "auto, cpu, cuda or mps")
    dtype: str = key("auto", "precision of the weights", choices=["auto", "float32", "bfloat16"])
    quantize: str | None = key(None, "int8 weights with one scale per row: half of bfloat16's "
                               "memory", choices=["int8"])


def load_text_model(options):
    """Return (model, tokenizer, device) of a checkpoint that generates text. Raises ValueError or
    UserError."""
    device, ckpt = get_device(options.device), options.ckpt
    model, tokenizer = load_model(ckpt, device, choose_dtype(options.dtype, device)[0],
                                  options.backbone, options.ema)
    if not isinstance(model, GPT):
        raise ValueError(f"{ckpt}: {type(model).__module__} does not generate text")
    if tokenizer is None and options.tokenizer is None:
        raise ValueError(f"{ckpt}: has no tokenizer; specify --tokenizer byte, gpt2, a rank file "
                         "or a prepared folder")
    tokenizer = tokenizer or open_tokenizer(options.tokenizer)
    if tokenizer.n_vocab > model.config.vocab_size:
        raise ValueError(f"--tokenizer {options.tokenizer}: has {tokenizer.n_vocab} ids, but the "
                         f"model's vocabulary has {model.config.vocab_size}; specify the tokenizer "
                         "of the training data")
    return model, tokenizer, device


def load_for_decoding(options):
    """Return load_text_model(options) with linear layers for decoding, which are int8 with
    --quantize and packed without."""
    model, tokenizer, device = load_text_model(options)
    replace_linear_layers(model, Int8Linear if options.quantize else PackedLinear)
    if any(isinstance(m, Int8Linear) and not m.has_kernel for m in model.modules()):
        print(f"--quantize int8: slow, without a kernel for {device.type} or for a layer width "
              "that is not a multiple of 16", file=sys.stderr)
    return model, tokenizer, device
