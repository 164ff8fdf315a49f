"""Read weights of other programs: nanoGPT, .safetensors files and Hugging Face folders.

model/convert/families.py has the model families. read_model is used by run_train.py --init_from,
model.sample --ckpt and model.convert --ckpt. Files are parsed here, without `transformers`.
Unsupported options are refused by name.
"""

import json
import os
import sys
from dataclasses import asdict

import torch

from data.hub import local_folder
from data.tokenizer_hf import read_hf_tokenizer, read_json, read_template_spec
from model.convert.families import FAMILIES, read_config, upgrade_fields  # noqa: F401
from model.convert.tensors import read_weights
from model.core.shape import check_shape
from train.base.checkpoint_file import DESCRIPTION, check_content, check_match, load_checkpoint
from train.base.errors import CheckpointError, echo, require
from train.base.sharded_file import is_sharded
from train.base.tensors import find_non_finite
from train.distributed import convert_ddp_state
from train.system import load_model_type

FROM_BIN = "save_pretrained() of transformers makes model.safetensors of pytorch_model.bin"


def read_model(path, state=None):
    """Return a model of this or another program as a dict with the keys of a checkpoint.

    path: a checkpoint of this program or nanoGPT, a .safetensors file that this program wrote, a
    Hugging Face folder, or hf:OWNER/NAME. state: the checkpoint's content, if it was already read.
    The keys are "model" {name in this program: tensor}, "model_args", "config", "spec", "tokenizer"
    and possibly more; for a bare state dict, "model" only. Raises ValueError if this fails.
    """
    path = local_folder(str(path))
    if os.path.isdir(path) and not is_sharded(path):
        return read_folder(path)
    if path.endswith(".safetensors"):
        return read_safetensors_model(path)
    state = load_checkpoint(path) if state is None else state
    weights = convert_ddp_state(state["model"])
    if not any(name.endswith("h.0.attn.c_attn.weight") for name in weights):
        return state  # not of nanoGPT
    ours = read_weights(weights, "nanogpt", path)
    if "lm_head.weight" in ours and torch.equal(ours["lm_head.weight"], ours["wte.weight"]):
        del ours["lm_head.weight"]  # nanoGPT stores both copies of a tied weight
    args = (state.get("model_args") or {}) | dict(model_type="nanogpt")
    _, args = read_config(args, path)
    return make_state(path, ours, FAMILIES["nanogpt"].config_class(**args))


def make_state(path, weights, shape, tokenizer=None, template=None):
    """Return a dict with the keys of a checkpoint, see read_model().

    weights: {name in this program: tensor}. template: the spec of a ChatTemplate or `None`.
    Raises CheckpointError if `weights` do not fit `shape`, ValueError if `shape` is invalid.
    """
    check_complete(path, weights, shape)
    spec = dict(vocab_size=shape.vocab_size, tokenizer=tokenizer and tokenizer.spec())
    spec |= dict(template=template) if template else {}
    config = asdict(shape) | dict(model="moe" if hasattr(shape, "n_experts") else "gpt")
    return {"model": weights, "model_args": asdict(shape), "tokenizer": spec["tokenizer"],
            "config": config, "spec": spec, "formulas": {}}  # those that exports were compared with


def check_complete(path, weights, shape):
    """Raise CheckpointError unless weights fit a model of `shape`."""
    model_class = (load_model_type("moe").module.MoE if hasattr(shape, "n_experts")
                   else load_model_type("gpt").module.GPT)
    try:
        check_shape(shape, weights)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    with torch.device("meta"):
        wanted = model_class(shape, is_backbone=True).state_dict()
    check_match(weights, wanted, path, dtypes=False)


# -----------------------------------------------------------------------------
# .safetensors files

def read_safetensors_model(path):
    """Return the model in a .safetensors file of this program, with the keys of a checkpoint.

    "model_args" is {} for a file of another program. Raises CheckpointError for a file that cannot
    be read, SetupError without the package safetensors.
    """
    weights, description = read_safetensors(path)
    args = description.setdefault("model_args", {})
    spec = dict(vocab_size=args.get("vocab_size"), tokenizer=description.get("tokenizer"))
    spec |= description.pop("spec", {})
    config = dict(args, model="moe" if "n_experts" in args else "gpt")
    return {"model": weights, "config": config, "spec": spec} | description


def read_safetensors(path):
    """Return ({name: tensor}, description) of a .safetensors file; the tensors are memory-mapped.

    description: those of model_args, config, spec, tokenizer and formulas in the header that are
    not null. Raises CheckpointError for an unreadable file and for NaN or infinity in a tensor,
    SetupError without the package safetensors.
    """
    safetensors = require("safetensors", str(path))
    try:
        with safetensors.safe_open(path, "pt") as f:
            metadata = f.metadata() or {}
            tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
        description = {k: json.loads(metadata[k]) for k in DESCRIPTION if k in metadata}
        check_content({"model": tensors} | description)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; {FROM_BIN}") from None
    except (safetensors.SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a safetensors file that can be read: {error}") from None
    if bad := find_non_finite(tensors):
        raise CheckpointError(f"{path}: {bad} contains non-finite values")
    return tensors, {k: v for k, v in description.items() if v is not None}


# -----------------------------------------------------------------------------
# Hugging Face folders

def read_folder(folder):
    """Return the model in a Hugging Face folder as a dict with the keys of a checkpoint.

    If tokenizer.json is invalid or not supported, prints a message and continues without it. Raises
    CheckpointError for an incomplete folder or an unsupported model, DataError for other invalid
    JSON files.
    """
    path = os.path.join(folder, "config.json")
    if not os.path.exists(path):
        raise CheckpointError(f"{folder}: no config.json in it: expected a checkpoint file, such "
                              f"as {folder}/ckpt.pt, or a Hugging Face folder")
    kind, args = read_config(read_json(path), path)
    weights = read_weights(read_shards(folder), kind, folder)
    if args["tie_weights"]:
        head = weights.pop("lm_head.weight", None)
        if head is not None and not torch.equal(head, weights.get("wte.weight", head)):
            raise CheckpointError(f"{path}: tie_word_embeddings: true, but lm_head.weight differs "
                                  "from the embedding; set it to false to use lm_head.weight")
    tokenizer = template = None
    if os.path.exists(os.path.join(folder, "tokenizer.json")):
        try:
            tokenizer = read_hf_tokenizer(folder)
        except ValueError as error:
            echo(f"{error}; continuing without a tokenizer", sys.stderr)
        template = read_template_spec(folder, tokenizer)
    return make_state(folder, weights, FAMILIES[kind].config_class(**args), tokenizer, template)


def read_shards(folder):
    """Return the weights {name in transformers: tensor} in a Hugging Face folder, memory-mapped."""
    index = os.path.join(folder, "model.safetensors.index.json")
    if not os.path.exists(index):
        return read_safetensors(os.path.join(folder, "model.safetensors"))[0]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: expected a weight_map of names and files in this folder")
    tensors = {}
    for shard in sorted({os.path.basename(str(name)) for name in weight_map.values()}):
        tensors |= read_safetensors(os.path.join(folder, shard))[0]  # never outside the folder
    return tensors
