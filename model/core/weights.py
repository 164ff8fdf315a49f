"""Weights from another checkpoint: initial weights (init_from), a frozen backbone or teacher.

This file determines the shape keys (configuration keys of the architecture, e.g. n_layer) that a
run inherits from the checkpoint, checks tokenizer and data, and matches the names of tensors.
model/core/load.py reads the files.
"""

import hashlib
from dataclasses import fields

import torch

from data.tokenizer import is_same_tokenizer, saved_formats
from model.core import formulas, load  # noqa: F401  for train/checkpoint.py
from model.core.adapters import is_adapter, merge
from model.core.shape import check_size, check_value
from train.base.checkpoint_file import bullets, check_match, check_unchanged
from train.base.errors import CheckpointError, UserError, quote_path
from train.base.fields import fields_by_name
from train.base.keys import GPTKeys
from train.config import find_conflicts
from train.distributed import broadcast_from_rank0, convert_ddp_state
from train.system import hook, load_model_type

# -----------------------------------------------------------------------------
# the shape that comes with the weights

# Not part of the weights: dropout is a training setting, and the data define the vocabulary.
NOT_SHAPE = {"dropout", "vocab_size"}


def inherit_shape(config, model_args):
    """Return ({shape key: value} to take over from a checkpoint, [message per contradiction]).

    model_args: dict "model_args" of a GPT's checkpoint; {} for a bare state dict: nothing is taken.
    The checkpoint's values replace defaults and values of a configuration file; a different value
    from the command line or Python (is_explicit()) is a contradiction. Exceptions: dropout is not
    taken over; vocab_size only if it is not set; a block_size that is set, also in a file, is used
    (with learned positions only if it is smaller than in the checkpoint), and max_positions is then
    the context of the checkpoint if that is longer.
    """
    taken = {}
    wrong = []
    is_learned = model_args.get("pos") == "learned"
    own = [f for f in fields(config) if f.metadata.get("shape") and f.name in model_args]
    for f in [*fields(GPTKeys), *own] if model_args else ():
        theirs = model_args.get(f.name, f.default)
        ours = getattr(config, f.name)
        explicit = config.is_explicit(f.name)
        if theirs == ours or f.name in NOT_SHAPE:
            continue
        is_set = explicit or ours != f.default
        if f.name == "block_size" and is_set and not (is_learned and ours > theirs):
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
    """Return {shape key: value} that a run takes over from a checkpoint, after checks.

    state: the checkpoint's dict, read from `path`. inherit: a function as inherit_shape(), by
    default that of the run's model type; {} is returned if it has none. Raises CheckpointError
    with all contradictions, or if a model of this type cannot have the values.
    """
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
        shape = config.inherit(taken)
        if problems := sorted({*find_conflicts(shape)} - {*find_conflicts(config)}):
            raise ValueError("; ".join(problems))
        if taken and "model" in state:
            check_size(shape, state["model"])
    except ValueError as error:
        raise CheckpointError(f"{path}: its model_args describe no model: {error}") from None
    return taken


def as_gpt(state, path, backbone=None):
    """Return ({name: tensor}, GPTConfig) of a checkpoint for exports, with adapters merged.

    A function of the model interface (train/system.py), for model types that can be exported.
    state: the checkpoint's dict, read from `path`. backbone: path of the frozen model that it needs
    (default: as in training). Raises CheckpointError if the model cannot be built.
    """
    model, _ = load.model_of(state, path, backbone=backbone)
    return merge(model), model.config


def with_shape(config, model_args, path):
    """Return `config` with a backbone's shape keys; CheckpointError if explicit keys differ.

    model_args: of the backbone's checkpoint at `path`. vocab_size stays: the data define it.
    """
    shape = take_shape(config, dict(model_args=model_args), path, inherit_shape)
    return config.inherit(shape | dict(vocab_size=config.vocab_size))


def read_named(path, key, advice=""):
    """Return load.read_weights(path); errors become a CheckpointError with `key` and `advice`."""
    try:
        return load.read_weights(path)
    except UserError as error:
        raise CheckpointError(f"{key}: {error}{advice}") from error


# -----------------------------------------------------------------------------
# weights to start from: do they have the meaning that this run gives them?

def check_must_match(state, config, spec, path):
    """Raise CheckpointError if a checkpoint's weights have a different meaning in this run.

    Equal in both must be the tokenizer and the names in the model type's MUST_MATCH_TO_INIT (keys,
    or entries of spec, e.g. "classes"), except names in config.allow_change. With config.eval_only,
    also the statistics of the training data that the model uses (ModelType.STATISTICS), because no
    training adapts the weights. state: the checkpoint's dict. spec: Data.spec of the run.
    """
    old_spec = state.get("spec") or {}
    old = (state.get("config") or {}) | old_spec
    new = vars(config) | {name: spec.get(name) for name in old_spec}
    kind = load_model_type(config.model)
    names = [*kind.MUST_MATCH_TO_INIT]
    if config.eval_only:
        names += [name for name, key in kind.STATISTICS.items() if getattr(config, key, True)]
    pairs = {name: (old.get(name), new.get(name)) for name in names}
    pairs["tokenizer"] = (state.get("tokenizer"), spec.get("tokenizer"))
    check_same(pairs, path, config.allow_change)


def check_same(pairs, path, allowed):
    """Raise CheckpointError if two values in `pairs` {name: (of the weights, of the run)} differ.

    Not a difference: `None` (unknown), [x] in the weights and x in the run, equivalent tokenizers
    (name "tokenizer"), and lists of different lengths, whose tensors are newly initialised.
    allowed: the value of --allow_change, names that may differ; "all": every name.
    """
    # Lists of other lengths, e.g. classes, have tensors of other shapes: newly initialised.
    changes = {name: (old, new) for name, (old, new) in pairs.items()
               if None not in (old, new) and old not in (new, [new])
               and not (isinstance(new, list) and len(old) != len(new))
               and not (name == "tokenizer" and is_same_tokenizer(old, new))}
    remedy = f", or prepare the data with --tokenizer {quote_path(path)}"
    check_unchanged(changes, path, allowed, remedy if "tokenizer" in changes else "")


def check_tokenizer(tokenizer, path, spec, config):
    """Raise CheckpointError if a model's tokenizer differs from the tokenizer of the data.

    tokenizer: Tokenizer.spec() of the model at `path`. spec: Data.spec of the run. No error if one
    of them is `None` (unknown), or if config.allow_change contains "tokenizer" or "all".
    """
    check_same(dict(tokenizer=(tokenizer, spec.get("tokenizer"))), path, config.allow_change)


def adopt_weights(model, state, path, log):
    """Return {name in `model`: tensor} of a checkpoint, with which training starts; on rank 0 only.

    state: the checkpoint's dict, read from `path`. `model` is not changed; the method
    adopt(weights) of the model, if any, translates names.
    log(text): called with the tensor count and the names that are missing or not used.
    Raises CheckpointError if no name matches, if a shape differs, or if the checkpoint has adapters
    that the model lacks.
    """
    own = model.state_dict()
    weights = hook(model, "adopt")(convert_ddp_state(state["model"]))
    if any(is_adapter(n) and n not in own for n in weights):
        raise CheckpointError(f"{path}: adapters that this model does not have: set model, "
                              "lora_rank and lora_targets as in its run, or merge them: python -m "
                              f"model.convert --ckpt {quote_path(path)} --to merged.pt")
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
    """Read the checkpoint whose weights become a part of another model; return the dict.

    "model" {name: tensor} is without prefixes of DDP and torch.compile; "digest" is added, see
    digest(). key: the configuration key with this path, for messages. Raises CheckpointError if the
    file cannot be used.
    """
    with torch.device("cpu"):
        state = read_named(path, key, f"; if it has moved, --{key} FILE")
    weights = convert_ddp_state(state["model"])
    return state | dict(model=weights, digest=digest(weights))


def describe_backbone(path, key, ranks):
    """Return {"digest", "kind" (model type), "shape" (model_args), "tokenizer"} of a checkpoint.

    "tokenizer" is Tokenizer.spec() or `None`. Rank 0 reads the file; all ranks must call.
    key: as for read_backbone(), with the same CheckpointError, on all ranks.
    """
    def describe():
        state = read_backbone(path, key)
        return dict(digest=state["digest"], kind=load.saved_model_type(state),
                    shape=state.get("model_args") or {},
                    tokenizer=saved_formats(state)["tokenizer"])
    return broadcast_from_rank0(describe, ranks)


def load_frozen(path, key="backbone", device="cpu"):
    """Return (frozen model in eval mode, tokenizer or `None`, read_backbone()) for a checkpoint."""
    with torch.device("cpu"):
        state = read_backbone(path, key)
        model, tokenizer = load.model_of(state, path, device)
    return model.requires_grad_(False), tokenizer, state


class HoldsFrozen:
    """Mixin for an nn.Module that uses other, frozen models, e.g. a teacher.

    frozen: a tuple of these models (default: empty), so that they are no submodules: not trained,
    and not part of the state dict. to(), cuda() etc. move them with the module.
    """
    frozen = ()

    def _apply(self, fn, recurse=True):
        for model in self.frozen:
            model._apply(fn)
        return super()._apply(fn, recurse)


def digest(weights):
    """Return the SHA-256, hexadecimal, of {name: CPU tensor}; their order does not matter."""
    sha = hashlib.sha256()
    for name in sorted(weights):
        t = weights[name].contiguous()
        sha.update(f"{name} {tuple(t.shape)} {t.dtype}".encode())
        sha.update(t.view(-1).view(torch.uint8).numpy())
    return sha.hexdigest()
