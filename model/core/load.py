"""A checkpoint as a model: the one that its training built, whatever the system, or one that
model/convert/foreign.py reads; or as the frozen backbone of another model."""

import os
import types
from dataclasses import fields

import torch

from data.chat_template import ChatTemplate
from data.tokenizer import Tokenizer
from train.base.checkpoint_file import load_checkpoint
from train.base.errors import CheckpointError
from train.config import check_shape, check_size, load_config
from train.distributed import convert_ddp_state
from train.system import load_model_type

# Of the option --backbone of a command.
BACKBONE = "where the frozen model that the checkpoint stands on is now (default: as in training)"
EMA = "the weights' running averages, of a run with the key ema"  # of the option --ema
# Options that older checkpoints may name, with the only value that can still be computed.
REMOVED = dict(softcap=0.0, value_embeddings=False, x0_residual=False)


def read_weights(path):
    """The checkpoint at `path`, or what model/convert/foreign.py makes of weights that another
    program wrote: a file of tensors or a Hugging Face folder. Raises CheckpointError."""
    foreign = os.path.isdir(path) or str(path).startswith("hf:") or str(path).endswith(
        ".safetensors")
    state = None if foreign else load_checkpoint(path)
    if state is not None and "format_version" in state:
        return state
    from model.convert.foreign import read_model
    return read_model(path, state)


def averaged(state, path):
    """The checkpoint `state` with the running averages of its weights in their place (the key
    ema). Raises CheckpointError."""
    entries = (state.get("optimizer") or {}).get("state") or {}
    averages = {name: entry["ema"] for name, entry in entries.items() if "ema" in entry}
    if not averages:
        raise CheckpointError(f"{path}: no averaged weights in it; --ema is for the checkpoints of "
                              "a run with ema, such as ema: 0.999")
    return state | {"model": state["model"] | averages}


def load_model(ckpt_path: str | os.PathLike, device: str | torch.device = "cpu",
               dtype: torch.dtype | None = None, backbone: str | None = None, ema: bool = False,
               expect: str | None = None) -> tuple[torch.nn.Module, Tokenizer | None]:
    """Return (model in eval mode, tokenizer or None) of a checkpoint, or of a file or folder that
    model/convert/foreign.py reads.

    dtype: precision of the weights (default: the file's). backbone: the present path of the frozen
    model that the checkpoint needs. ema: load the running averages of the weights. expect: the
    model type that the caller needs. Raises CheckpointError.
    """
    state = read_weights(ckpt_path)
    kind = (state.get("config") or {}).get("model", "gpt")
    if expect not in (None, kind):
        raise CheckpointError(f"{ckpt_path}: a checkpoint of --model {kind}; expected one of "
                              f"--model {expect}")
    return model_of(averaged(state, ckpt_path) if ema else state, ckpt_path, device, dtype,
                    backbone)


def model_of(state, path, device="cpu", dtype=None, backbone=None):
    """load_model's result from the checkpoint `state`, which was read from `path`."""
    from data.tokenizer import tokenizer_from_spec
    if backbone:
        state = state | {"config": (state.get("config") or {}) | dict(backbone=backbone)}
    spec = state.get("spec") or {}
    spec = spec.get("tokenizer") or state.get("tokenizer")
    try:
        with torch.device("meta"):
            model = empty_model(state)
        model.load_state_dict(convert_ddp_state(state.get("model", {})), assign=True)
        template = (state.get("spec") or {}).get("template")
        model.template = ChatTemplate.from_spec(template) if template else None
        tokenizer = tokenizer_from_spec(spec) if spec else None
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (TypeError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{path}: its config or spec describes no model: "
                              f"{type(error).__name__}: {error}") from error
    for p in model.parameters():  # tables keep their precision
        p.data = p.data.to(device, dtype)
    return model.to(device).eval(), tokenizer


def empty_model(state):
    """The model that a checkpoint's dict describes, without its weights. ValueError where it
    describes none."""
    name, weights = (state.get("config") or {}).get("model", "gpt"), state.get("model", {})
    if name == "gpt":
        return load_model_type("gpt").module.GPT(read_model_args(state.get("model_args") or {}, weights))
    if not state.get("spec"):
        raise ValueError(f"no spec of its data in it, from which a model of {name} is built")
    build, spec = load_model_type(str(name)).build_model, state["spec"]
    config = saved_config(state["config"])
    check_size(config.replace(vocab_size=spec.get("vocab_size", config.vocab_size)), weights)
    return build(config, types.SimpleNamespace(spec=spec))


def saved_config(values):
    """The configuration in a checkpoint: none of it was typed by a person."""
    config = load_config(None, values)
    config.explicit = ()
    return config


def read_model_args(args, weights):
    """The GPTConfig that a checkpoint's model_args describe. ValueError where they are not a GPT's,
    not one of these `weights`, or use an option that is gone."""
    gone = [f"{k}: {args[k]}" for k, value in REMOVED.items() if args.get(k, value) != value]
    if gone:
        raise ValueError(f"this model uses {', '.join(gone)}, which this version cannot compute; "
                         "use the version that trained it")
    if not {"n_layer", "vocab_size"} <= args.keys():
        raise ValueError("no model_args of a GPT (n_layer, vocab_size, ...) in it")
    config_class = load_model_type("gpt").module.GPTConfig
    shape = config_class(**{f.name: args[f.name] for f in fields(config_class) if f.name in args})
    check_shape(shape, weights)
    return shape
