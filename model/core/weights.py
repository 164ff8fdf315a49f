"""Weights that a model takes from a different checkpoint: initial weights (init_from), a frozen
backbone, a teacher, a reference.

This file determines the shape that a run inherits from the checkpoint, checks tokenizer and data,
and matches the names of tensors. model/core/load.py reads the files.
"""

import hashlib
from dataclasses import fields

import torch

from data.tokenizer import is_same_tokenizer
from model.core import formulas, load  # noqa: F401  for train/checkpoint.py
from model.core.adapters import is_adapter, merge
from model.core.shape import check_size, check_value
from train.base.checkpoint_file import bullets, check_match, check_unchanged
from train.base.errors import CheckpointError
from train.base.fields import fields_by_name
from train.config import find_conflicts
from train.distributed import broadcast_from_rank0, convert_ddp_state
from train.keys import GPTKeys
from train.system import hook, load_model_type

# -----------------------------------------------------------------------------
# the shape that comes with the weights

# Not part of the weights: dropout is a training setting, and the data define the vocabulary.
NOT_SHAPE = {"dropout", "vocab_size"}


def inherit_shape(config, model_args):
    """Return ({key: value}, [message]): the shape keys that a run with the TrainConfig `config`
    inherits from `model_args`, the dict of a GPT's checkpoint, and the contradictions, as messages.

    The weights override a value of a configuration file; a value from the command line that differs
    is a contradiction. The run keeps its dropout and, if set, its vocab_size and block_size (with
    learned positions, only a smaller block_size than the weights'). From {}, the model_args of a
    bare state dict, no key is inherited; the shapes of the tensors are checked later in any case.
    """
    taken = {}
    wrong = []
    own = [f for f in fields(config) if f.metadata.get("shape") and f.name in model_args]
    for f in [*fields(GPTKeys), *own] if model_args else ():
        theirs = model_args.get(f.name, f.default)
        ours = getattr(config, f.name)
        explicit = config.is_explicit(f.name)
        if theirs == ours or f.name in NOT_SHAPE:
            continue
        if f.name == "block_size" and (explicit or ours != f.default) and (
                model_args.get("pos") != "learned" or ours < theirs):
            # The windows of this run. Shorter ones do not shorten the context of the weights; for
            # longer ones, rotary positions have no weights.
            if ours < theirs:
                taken["max_positions"] = model_args.get("max_positions") or theirs
            continue
        if explicit:
            wrong.append(f"{f.name}: it has {theirs!r}, the configuration says {ours!r}")
        else:
            taken[f.name] = theirs
    if config.vocab_size is None and model_args.get("vocab_size"):  # the data may have fewer
        taken["vocab_size"] = model_args["vocab_size"]
    return taken, wrong


def take_shape(config, state, path, inherit=None):
    """Return {key: value}, the shape keys that the run `config`, a TrainConfig, inherits from the
    checkpoint `state`, a dict read from `path`, after all checks. inherit(config, model_args) ->
    ({key: value}, [contradictions]): the default is inherit_shape of the run's model file; without
    one, the result is {}. Raises CheckpointError with every key that contradicts the model_args, or
    for values that no model can have."""
    inherit = inherit or load_model_type(config.model).inherit_shape
    if inherit is None:
        return {}
    known = fields_by_name(config)
    model_args = load.upgrade_args(state.get("model_args") or {})
    if "n_experts" in model_args and "n_experts" not in known:
        raise CheckpointError(f"{path}: a mixture of experts, which --model {config.model} cannot "
                              "train; expected the weights of a dense model")
    taken, wrong = inherit(config, model_args)
    if wrong:
        raise CheckpointError(f"{path}: shape mismatch:\n{bullets(wrong)}\n"
                              "remove these keys to use the checkpoint's")
    try:
        taken = {name: check_value(known[name], value, name) for name, value in taken.items()}
        shape = config.replace(**taken)
        if problems := sorted({*find_conflicts(shape)} - {*find_conflicts(config)}):
            raise ValueError("; ".join(problems))
        if taken and "model" in state:
            check_size(shape, state["model"])
    except ValueError as error:
        raise CheckpointError(f"{path}: its model_args describe no model: {error}") from None
    return taken


def as_gpt(state, path, backbone=None):
    """Return ({name: tensor}, GPTConfig) of the checkpoint `state` of a GPT, a dict, for exports:
    adapters are merged into the weights. Raises ValueError if it is not a GPT's.

    A hook of the model interface: model types whose weights can be those of a GPT define it. path:
    of the checkpoint; backbone: the present path of the frozen model.
    """
    model, _ = load.model_of(state, path, backbone=backbone)
    return merge(model), model.config


def with_shape(config, model_args, path):
    """Return the TrainConfig `config` with the shape in `model_args`, a dict, of the backbone at
    `path`. vocab_size is not changed: data.spec defines it. Raises CheckpointError if keys from the
    command line contradict the shape."""
    shape = take_shape(config, dict(model_args=model_args), path, inherit_shape)
    return config.replace(**shape | dict(vocab_size=config.vocab_size))


# -----------------------------------------------------------------------------
# weights to start from: do they have the meaning that this run gives them?

def check_must_match(state, config, spec, path):
    """Raise CheckpointError if the weights in the checkpoint `state`, a dict read from `path`, have
    a different meaning in this run: the tokenizer, and the keys in MUST_MATCH_TO_INIT of the model
    file, must have the same values in the checkpoint as in `spec`, the Data.spec of the run, or in
    `config`, its TrainConfig. Names in config.allow_change may differ."""
    old_spec = state.get("spec") or {}
    old = (state.get("config") or {}) | old_spec
    new = vars(config) | {name: spec.get(name) for name in old_spec}
    pairs = {name: (old.get(name), new.get(name))
             for name in load_model_type(config.model).MUST_MATCH_TO_INIT}
    pairs["tokenizer"] = (state.get("tokenizer"), spec.get("tokenizer"))
    check_same(pairs, path, config.allow_change)


def check_same(pairs, path, allowed):
    """Raise CheckpointError if values in `pairs` {name: (of the weights, of this run)} differ. Not
    a difference: `None` (unknown), x and [x], equivalent tokenizers, lists of different lengths,
    and names in `allowed`, the value of --allow_change. path: of the weights, for the message."""
    # Lists of other lengths, e.g. classes, have tensors of other shapes: newly initialised.
    check_unchanged({name: (old, new) for name, (old, new) in pairs.items()
                     if None not in (old, new) and new not in (old, [old])
                     and not (isinstance(old, list) and len(old) != len(new))
                     and not (name == "tokenizer" and is_same_tokenizer(old, new))}, path, allowed)


def check_tokenizer(tokenizer, path, spec, config):
    """Raise CheckpointError if `tokenizer`, the Tokenizer.spec() of the model at `path`, differs
    from that of the data, spec["tokenizer"]. There is no error if one of them is unknown (None), or
    if config.allow_change has "tokenizer"."""
    check_same(dict(tokenizer=(tokenizer, spec.get("tokenizer"))), path, config.allow_change)


def adopt_weights(model, state, path, log):
    """Return {name in `model`: tensor}, the weights of the checkpoint `state`, a dict read from
    `path`, from which the training of `model` starts. The text of log(text) has the number of
    tensors, and the names that are missing or not used. To be called on rank 0 only.

    A model may translate names with a method adopt(weights). Raises CheckpointError if no name
    matches, if a shape differs, or if the weights have adapters that the model lacks: the frozen
    weights under them would be lost, too.
    """
    own = model.state_dict()
    weights = hook(model, "adopt")(convert_ddp_state(state["model"]))
    if any(is_adapter(n) and n not in own for n in weights):
        raise CheckpointError(f"{path}: adapters that this model does not have: set lora_rank and "
                              "lora_targets as in its run, or merge them: python -m model.convert "
                              f"--ckpt {path} --to merged.safetensors")
    matches = {n: t for n, t in weights.items() if n in own}
    if not matches:
        raise CheckpointError(f"{path}: none of its {len(weights)} tensors is one of this model; "
                              f"its names look like {', '.join(list(weights)[:3])}")
    # Names may differ, shapes may not; dtypes are converted as the model is filled.
    check_match(matches, {n: own[n] for n in matches}, path, dtypes=False)
    dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in matches.values()})
    log(f"Starting from the weights of {path}: {len(matches)} tensors ({', '.join(dtypes)})")
    for status, names in (("are newly initialised", [n for n in own if n not in matches]),
                          ("of it are not used", [n for n in weights if n not in own])):
        if names:
            more = ", ..." if len(names) > 6 else ""
            log(f"{len(names)} tensors {status}: {', '.join(names[:6])}{more}")
    return matches


# -----------------------------------------------------------------------------
# a second model, frozen

def read_backbone(path, key="backbone"):
    """Load the checkpoint at `path`, to use the weights as a part of a different model. key: the
    option that gave `path`, for error messages.

    Returns the dict of the checkpoint, with {name: tensor} as "model" and the "digest" of the
    weights (SHA-256). Raises CheckpointError.
    """
    try:
        with torch.device("cpu"):
            state = load.read_weights(path)
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {error}; if it has moved, --{key} FILE") from error
    weights = convert_ddp_state(state["model"])
    return {**state, "model": weights, "digest": digest(weights)}


def describe_backbone(path, key, ranks):
    """Return a description of the checkpoint at `path`, a dict: "digest" of the weights, "kind"
    (model type), "shape" (model_args), "tokenizer" (its spec or None). Rank 0 reads it, all ranks
    must call this. key: the option that gave `path`, for error messages. Raises CheckpointError."""
    def describe():
        state = read_backbone(path, key)
        tokenizer = (state.get("spec") or {}).get("tokenizer") or state.get("tokenizer")
        return dict(digest=state["digest"], kind=load.saved_model_type(state),
                    shape=state.get("model_args") or {}, tokenizer=tokenizer)
    return broadcast_from_rank0(describe, ranks)


def load_frozen(path, key="backbone", device="cpu"):
    """Load the checkpoint at `path` as a model in eval mode whose parameters need no gradients.
    Return (model, tokenizer or None, dict of read_backbone(), with "digest"). key: the option that
    gave `path`, for error messages. Raises CheckpointError."""
    with torch.device("cpu"):
        state = read_backbone(path, key)
        model, tokenizer = load.model_of(state, path, device)
    return model.requires_grad_(False), tokenizer, state


class HoldsFrozen:
    """Mixin for a module that uses other, frozen models, e.g. a teacher.

    `frozen` is a tuple of these models (default: empty). In a tuple they are not submodules: their
    parameters are not trained, and in no checkpoint. They move with the module to a device.
    """
    frozen = ()

    def _apply(self, fn, recurse=True):
        for model in self.frozen:
            model._apply(fn)
        return super()._apply(fn, recurse)


def digest(weights):
    """Return the SHA-256, in hexadecimal, of the names, shapes, dtypes and values of `weights`
    {name: tensor on the CPU}. It identifies a backbone independently of the file format."""
    sha = hashlib.sha256()
    for name in sorted(weights):
        t = weights[name].contiguous()
        sha.update(f"{name} {tuple(t.shape)} {t.dtype}".encode())
        sha.update(t.view(-1).view(torch.uint8).numpy())
    return sha.hexdigest()
