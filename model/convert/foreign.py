"""Read weights that other programs wrote: nanoGPT's ckpt.pt, state dicts, .safetensors files, and
Hugging Face folders of the families in model/convert/families.py.

read_model is behind run_train.py --init_from, model.sample --ckpt and model.convert --ckpt. Files
are parsed here, without `transformers`. Unsupported options are refused by name.
"""

import json
import os
import re
import struct
import sys
from dataclasses import asdict

import torch

from data.hub import local_folder
from data.tokenizer_hf import read_hf_tokenizer, read_json, read_template_spec
from model.convert.families import FAMILIES, has_experts, read_config, upgrade_fields  # noqa: F401
from model.convert.tensors import read_bare_weights, read_weights
from model.core.shape import check_shape
from train.base.checkpoint_file import (
    DESCRIPTION,
    SAFETENSORS_DTYPES,
    check_match,
    find_non_finite,
    load_checkpoint,
)
from train.base.errors import CheckpointError, echo
from train.distributed import convert_ddp_state
from train.system import load_model_type


def read_model(path, state=None):
    """Return a dict with the keys of a checkpoint: "model" {our name: tensor}, "model_args",
    "config", "spec", "tokenizer".

    path: a checkpoint of ours or nanoGPT's, a state dict with these names or Hugging Face's, a
    .safetensors file, a Hugging Face folder, or hf:OWNER/NAME. state: the content of the file, if
    it was read before. A bare state dict has only "model". Raises CheckpointError.
    """
    path = local_folder(str(path))
    if os.path.isdir(path):
        return read_folder(path)
    if str(path).endswith(".safetensors"):
        state = read_safetensors_model(path)
    state = load_checkpoint(path) if state is None else state
    weights = convert_ddp_state(state["model"])
    if not has_foreign_names(weights):
        return state
    ours, args = read_bare_weights(weights, path), state.get("model_args")
    if "lm_head.weight" in ours and torch.equal(ours["lm_head.weight"], ours["wte.weight"]):
        del ours["lm_head.weight"]  # nanoGPT stores both copies of a tied weight
    if not isinstance(args, dict) or not {"n_layer", "n_head", "vocab_size"} <= args.keys():
        return {"model": ours}
    names = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "dropout")
    config_class = load_model_type("gpt").module.GPTConfig
    shape = config_class(**{k: args[k] for k in names if k in args}, bias=args.get("bias", True),
                         norm="layer", pos="learned", mlp="gelu_exact",
                         tie_weights="lm_head.weight" not in ours)
    return make_state(path, ours, shape)


def has_foreign_names(weights):
    """Return whether nanoGPT, or Hugging Face's GPT-2 or Llama uses these names."""
    return any(re.search(r"(^|\.)(h\.0\.attn\.c_attn|embed_tokens)\.weight$", n) for n in weights)


def make_state(path, weights, shape, tokenizer=None, template=None):
    """Return the checkpoint of a model, a dict. CheckpointError if weights and shape do not fit."""
    check_complete(path, weights, shape)
    spec = dict(vocab_size=shape.vocab_size, tokenizer=tokenizer and tokenizer.spec())
    spec |= dict(template=template) if template else {}
    config = asdict(shape) | dict(model="moe" if has_experts(shape) else "gpt")
    return {"model": weights, "model_args": asdict(shape), "tokenizer": spec["tokenizer"],
            "config": config, "spec": spec}


def check_complete(path, weights, shape):
    """CheckpointError unless `weights` fit a model of this shape."""
    model_type = load_model_type("moe" if has_experts(shape) else "gpt").module
    model_class = model_type.MoE if has_experts(shape) else model_type.GPT
    try:
        check_shape(shape, weights)
        with torch.device("meta"):
            wanted = model_class(shape).state_dict()
    except (RuntimeError, TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{path}: its configuration describes no model: {error}") from None
    check_match(weights, wanted, path, dtypes=False)


# -----------------------------------------------------------------------------
# .safetensors files

def read_safetensors_model(path):
    """Return read_model of a .safetensors file."""
    weights, description = read_safetensors(path)
    args = description.setdefault("model_args", {})
    spec = dict(vocab_size=args.get("vocab_size"), tokenizer=description.get("tokenizer"))
    spec |= description.pop("spec", {})
    config = dict(args, model="moe" if "n_experts" in args else "gpt")
    return {"model": weights, "config": config, "spec": spec} | description


def read_safetensors(path):
    """Return ({name: tensor}, the DESCRIPTION of a checkpoint in it) of a .safetensors file."""
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as f:
            length, = struct.unpack("<Q", f.read(8))
            if length > size - 8:
                raise ValueError("cut off in its header")
            header = json.loads(f.read(length))
        metadata = header.pop("__metadata__", {})
        description = {k: json.loads(metadata[k]) for k in DESCRIPTION if k in metadata}
        if wrong := [k for k, v in description.items() if not isinstance(v, (dict, type(None)))]:
            raise ValueError(f"its {', '.join(wrong)}: no object")
        tensors = map_tensors(path, header, 8 + length, size)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error,
            RuntimeError, MemoryError) as error:
        raise CheckpointError(f"{path}: not a safetensors file that can be read: "
                              f"{type(error).__name__}: {error}") from None
    if bad := find_non_finite(tensors):
        raise CheckpointError(f"{path}: {bad} holds non-finite values")
    return tensors, {k: v for k, v in description.items() if v is not None}


def map_tensors(path, header, start, size):
    """Return {name: tensor} of a file of `size` bytes, in which tensors begin at byte `start`.
    The file is memory-mapped: weights are read on use, without a copy in memory."""
    content = torch.from_file(str(path), size=size, dtype=torch.uint8)
    tensors, last = {}, start
    for name, entry in sorted(header.items(), key=lambda e: e[1]["data_offsets"]):
        begin, end = (start + offset for offset in entry["data_offsets"])
        empty = torch.empty(entry["shape"], dtype=SAFETENSORS_DTYPES[entry["dtype"]],
                            device="meta")
        if not last <= begin <= end <= size or end - begin != empty.nbytes:
            raise ValueError(f"{name} lies outside the file, overlaps another tensor, or has "
                             "another size")
        last, data = end, content[begin:end]
        data = data.clone() if begin % empty.itemsize else data  # torch cannot view unaligned data
        tensors[name] = data.view(empty.dtype).view(entry["shape"])
    return tensors


# -----------------------------------------------------------------------------
# Hugging Face folders

def read_folder(folder):
    """Return read_model of a folder with config.json, model.safetensors and, if it can be used
    here, tokenizer.json."""
    if not os.path.exists(os.path.join(folder, "config.json")):
        hint = f"; did you mean {folder}/ckpt.pt?" if os.path.exists(f"{folder}/ckpt.pt") else ""
        raise CheckpointError(f"{folder}: no config.json in it: expected a checkpoint file, or a "
                              f"Hugging Face folder{hint}")
    path = os.path.join(folder, "config.json")
    kind, args = read_config(read_json(path), path)
    weights = read_weights(read_shards(folder), kind, folder)
    if args["tie_weights"]:
        weights.pop("lm_head.weight", None)
    if "h.0.attn.q_norm.weight" in weights and args["qk_norm_type"] == "plain":
        args["qk_norm_type"] = "head"
    tokenizer = template = None
    if os.path.exists(os.path.join(folder, "tokenizer.json")):
        try:
            tokenizer = read_hf_tokenizer(folder)
            template = read_template_spec(folder, tokenizer)
        except ValueError as error:
            echo(f"{error}; continuing without a tokenizer", sys.stderr)
    end = tokenizer and tokenizer.eot_token
    if (args["bos_id"], args["eos_ids"]) == (end, str(end)):  # the defaults of an export
        args |= dict(bos_id=None, eos_ids=None)
    experts = FAMILIES[kind].experts
    model_type = load_model_type("moe" if experts else "gpt").module
    config_class = model_type.MoEConfig if experts else model_type.GPTConfig
    return make_state(folder, weights, config_class(**args), tokenizer, template)


def read_shards(folder):
    """Return {name: tensor} of model.safetensors in `folder`, or of the shards in the index."""
    index = os.path.join(folder, "model.safetensors.index.json")
    if not os.path.exists(index):
        return read_safetensors(os.path.join(folder, "model.safetensors"))[0]
    weight_map, tensors = read_json(index).get("weight_map"), {}
    if not isinstance(weight_map, dict) or not all(
            isinstance(s, str) for s in weight_map.values()):
        raise CheckpointError(f"{index}: no weight_map of names and files in it")
    for shard in sorted(set(weight_map.values())):
        if os.path.basename(shard) != shard:  # never a file outside the folder
            raise CheckpointError(f"{index}: {shard!r} is no file name")
        tensors |= read_safetensors(os.path.join(folder, shard))[0]
    if (missing := sorted(weight_map.keys() - tensors.keys())) or not tensors:
        raise CheckpointError(f"{index}: its shards lack {', '.join(missing[:6]) or 'everything'}")
    return tensors
