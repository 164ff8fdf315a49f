"""Load a checkpoint as a model of the type that was trained.

Weights of other programs are read by model/convert/foreign.py. The checks before a model uses
the weights of a different model are in model/core/weights.py.
"""

import os
import types
from dataclasses import fields

import torch

from data.chat_template import ChatTemplate
from data.tokenizer import saved_formats, tokenizer_from_spec
from model.core.formulas import warn_of_differences
from model.core.shape import check_shape, check_size
from train.base.checkpoint_file import load_checkpoint
from train.base.errors import CheckpointError
from train.base.fields import fields_by_name
from train.base.sharded_file import is_sharded
from train.config import config_class, load_config
from train.distributed import convert_ddp_state
from train.system import load_model_type

# Help of options that commands share.
BACKBONE = "present path of the frozen model that the checkpoint needs (default: as in training)"
EMA = "use the running averages of the weights, from a run with the key ema"
# Keys of older versions.
REMOVED_KEYS = {"dpo_loss", "length_normalized", "class_weights", "quantize_base", "max_minutes",
                "grpo_beta", "time_layers", "target", "l1"}
# Options of older versions, which can only be computed if they are off.
REMOVED = ("softcap", "value_embeddings", "x0_residual")


def read_weights(path):
    """Read a checkpoint, or weights of another program, as a dict with "model" {name: tensor}.

    path: as for load_model(). The tensors are on the CPU. Other keys, which a bare state dict
    lacks: "model_args", "config", "spec" etc. Warns on stderr if the code for the logits differs
    from that of the program that wrote the checkpoint. Raises ValueError, usually CheckpointError
    or DataError, if the file is missing or cannot be used, or if a download fails.
    """
    is_foreign = (str(path).startswith("hf:") or str(path).endswith((".safetensors", ".bin"))
                  or os.path.isdir(path) and not is_sharded(path))
    state = None if is_foreign else load_checkpoint(path)
    if state is None or "format_version" not in state:
        from model.convert.foreign import read_model
        state = read_model(path, state)
    warn_of_differences(state, path, saved_model_type(state))
    return state


def use_ema(state, path):
    """Return a copy of `state` with the averaged weights; CheckpointError if the run has no ema."""
    entries = (state.get("optimizer") or {}).get("state") or {}
    averages = {name: entry["ema"] for name, entry in entries.items() if "ema" in entry}
    at_start = state.get("iter_num") == 0 and (state.get("config") or {}).get("ema")
    if not averages and not at_start:
        raise CheckpointError(f"{path}: no averaged weights in it; --ema is for the checkpoints of "
                              "a run with ema, such as ema: 0.999")
    return state | {"model": state["model"] | averages}


def load_model(ckpt_path: str | os.PathLike, device="cpu", dtype=None, backbone=None, ema=False,
               expect=None):
    """Load a model; return (model in eval mode, tokenizer or `None`).

    ckpt_path: a checkpoint, ckpt.pt of nanoGPT, a .safetensors file, a Hugging Face folder, or
    hf:OWNER/NAME. dtype: a torch.dtype for the parameters (default: as in the file).
    backbone: path of the frozen model that e.g. a lora checkpoint needs (default: as in training).
    ema: use the running averages of the weights.
    expect: the model type that the caller needs, e.g. "sae" (default: any).
    Raises ValueError, usually CheckpointError or DataError, if the file is missing, cannot be used,
    or is not of the type `expect`, or if a download fails.
    """
    state = read_weights(ckpt_path)
    kind = saved_model_type(state)
    if expect not in (None, kind):
        raise CheckpointError(f"{ckpt_path}: a checkpoint of --model {kind}; expected one of "
                              f"--model {expect}")
    return model_of(use_ema(state, ckpt_path) if ema else state, ckpt_path, device, dtype, backbone)


def saved_model_type(state):
    """Return the model type (the value of --model) of a checkpoint's dict; "gpt" if unknown."""
    return str((state.get("config") or {}).get("model", "gpt"))


def model_of(state, path, device="cpu", dtype=None, backbone=None):
    """Return (model in eval mode, tokenizer or `None`) from `state`, a checkpoint's dict.

    path: the file of `state`, for messages. dtype, backbone: as for load_model().
    The attribute `template` of the model is a ChatTemplate, or `None` if the checkpoint has none.
    Raises CheckpointError if the checkpoint or the frozen model cannot be used, or if `backbone` is
    given for a model without a frozen part.
    """
    if backbone:
        if not (state.get("config") or {}).get("backbone"):
            raise CheckpointError(f"{path}: --backbone: this model has no frozen part")
        state = state | {"config": (state.get("config") or {}) | dict(backbone=backbone)}
    try:
        with torch.device("meta"):
            model = build_empty_model(state)
        model.load_state_dict(convert_ddp_state(state.get("model", {})), assign=True)
        tokenizer, model.template = open_text_format(state)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError,
            ArithmeticError) as error:
        what = "" if isinstance(error, CheckpointError) else "it describes no model: "
        raise CheckpointError(f"{path}: {what}{error}") from error
    for p in model.parameters():  # not of buffers
        p.data = p.data.to(device, dtype)
    return model.to(device).eval(), tokenizer


def open_text_format(state):
    """Return (tokenizer or `None`, ChatTemplate or `None`), as described in a checkpoint's dict."""
    spec = saved_formats(state)
    return (tokenizer_from_spec(spec["tokenizer"]) if spec["tokenizer"] else None,
            ChatTemplate(spec["template"]) if spec["template"] else None)


def build_empty_model(state):
    """Return the model of a checkpoint's dict on the default device, without the weights in it.

    Loads the frozen model, if the checkpoint needs one. Raises ValueError or another exception that
    model_of() catches, e.g. KeyError, if the checkpoint or the frozen model cannot be used.
    """
    kind, weights = saved_model_type(state), state.get("model", {})
    args = state.get("model_args") or {}
    if kind == "gpt":
        return load_model_type("gpt").module.GPT(read_model_args(args, weights))
    spec = state["spec"]
    config = saved_config(state["config"])
    if "n_layer" in args:  # with the context of the run, which may be longer than the backbone's
        config = config.replace(block_size=args["block_size"])
    check_size(config.replace(vocab_size=spec.get("vocab_size", config.vocab_size)), weights)
    return load_model_type(kind).build_model(config, types.SimpleNamespace(spec=spec))


def saved_config(values):
    """Return the TrainConfig of a saved dict "config"; is_explicit() is false for every key.

    Raises CheckpointError for values of an earlier version that this one cannot compute.
    """
    values = upgrade_config(values, fields_by_name(config_class(values.get("model", "gpt"))))
    # Its batch and shard_size need not suit the ranks of this process.
    config = load_config(None, values | dict(distributed="ddp", world_size=1))
    config = config.replace(world_size=None, distributed=values.get("distributed", "ddp"))
    config.origins = {}
    return config


def upgrade_config(values, known):
    """Return a saved dict "config" with the keys of this version, a copy.

    known: {key: dataclass field} of the model type. Raises CheckpointError for values of an earlier
    version that this one cannot compute.
    """
    removed = REMOVED_KEYS - known.keys()  # a fork may use these names
    layers = values.get("layer", ())
    was_list = isinstance(layers, list) and "layer" in known and known["layer"].type is int
    unsupported = dict(layer=was_list and len(layers) != 1,
                       target="target" in removed and values.get("target", "input") != "input",
                       time_layers="time_layers" in removed and values.get("time_layers"))
    if names := [f"{name}: {values[name]}" for name, is_set in unsupported.items() if is_set]:
        raise CheckpointError(f"this model uses {', '.join(names)}, which this version cannot "
                              "compute; use the version that trained it")
    values = {k: v for k, v in upgrade_args(values).items()  # eval_task_rows null: the default
              if k not in removed and (k, v) != ("eval_task_rows", None)}
    return values | {"layer": layers[0]} if was_list else values


def upgrade_args(args):
    """Return a checkpoint's dict "model_args" or "config" with the keys of this version, a copy."""
    args = dict(args)
    if config_json := args.pop("family", None):
        from model.convert.foreign import upgrade_fields
        args |= upgrade_fields(config_json)
    return args


def read_model_args(args, weights):
    """Return the GPTConfig for a checkpoint's dict "model_args"; unknown keys are ignored.

    Raises ValueError if it describes no GPT, has an invalid value, uses an option that only earlier
    versions had, or is much too large for `weights` {name: tensor}.
    """
    config_class = load_model_type("gpt").module.GPTConfig
    known = {f.name for f in fields(config_class)}  # a fork may use the name of a removed key
    removed = [f"{k}: {args[k]}" for k in REMOVED if k not in known and args.get(k)]
    if removed:
        raise ValueError(f"this model uses {', '.join(removed)}, which this version cannot "
                         "compute; use the version that trained it")
    if not {"n_layer", "vocab_size"} <= args.keys():
        raise ValueError("no model_args of a GPT (n_layer, vocab_size, ...) in it; of a Hugging "
                         "Face model, name the folder")
    args = upgrade_args(args)
    shape = config_class(**{name: args[name] for name in known & args.keys()})
    check_shape(shape, weights)
    return shape
