"""Convert a model to the formats of other programs.

    python -m model.convert --ckpt out/ckpt.pt --to out/hf               a Hugging Face folder
    python -m model.convert --ckpt out/ckpt.pt --to nanogpt/ckpt.pt      nanoGPT's format
    python -m model.convert --ckpt out/fsdp/ckpt.pt --to ckpt.pt         shards: in one file
    python -m model.convert --ckpt out/ckpt.pt --to model.safetensors    this program's names
    python -m model.convert --ckpt out/ckpt.pt --to model.gguf           for llama.cpp
    python -m model.convert --ckpt out/lora/ckpt.pt --to merged.pt       adapters or memory: merged

--ckpt is a checkpoint, or anything that model/convert/foreign.py reads. `transformers` is not
needed. Options that the other program does not have are refused by name: an export computes the
same logits as the model.
"""

import json
import os
import re
import shutil
import sys
from dataclasses import asdict, dataclass

from data.chat_template import ChatTemplate
from data.tokenizer_hf import tokenizer_json
from model.convert.families import FAMILIES, find_family, write_config, write_fields
from model.convert.foreign import check_complete, read_model
from model.convert.gguf import export_gguf, pattern_name
from model.convert.tensors import convert_weights, write_weights
from model.core.adapters import is_adapter, merge
from model.core.formulas import check_formulas
from model.core.load import BACKBONE, EMA, model_of, open_text_format, saved_model_type, use_ema
from train.base.checkpoint_file import FORMAT_VERSION, load_checkpoint, save_checkpoint
from train.base.cli import command
from train.base.errors import CheckpointError, echo, quote_path
from train.base.fields import key
from train.base.files import reporting_full_disk, write_text
from train.base.sharded_file import is_sharded
from train.base.tensors import write_safetensors
from train.config import FIELDS
from train.system import load_model_type


@dataclass
class Source:
    """A model to export.

    path: the checkpoint's. weights: {name in this program: tensor}. shape: GPTConfig or MoEConfig.
    formulas: {"DEFINITION (FILE)": digest} of the code for the logits that had been edited when the
    checkpoint was written; `None`: unknown (model/core/formulas.py). tokenizer: a Tokenizer.
    """
    path: str
    weights: dict
    shape: object
    formulas: dict | None
    tokenizer: object = None
    template: ChatTemplate | None = None

    @property
    def bos_id(self):
        """bos_token_id of exports: shape.bos_id, else tokenizer.start[0], end of text or `None`."""
        if self.shape.bos_id is not None or self.tokenizer is None:
            return self.shape.bos_id
        return [*self.tokenizer.start, self.tokenizer.eot_token][0]


def read_source(state, path, backbone, for_others):
    """Return the Source of the checkpoint `state`, read from `path`, with adapters merged.

    backbone: path of the frozen model that adapters need; `None`: as in training.
    for_others: another program will compute the logits, so the code for them must not have been
    edited, here or in the program that wrote the checkpoint.
    Raises CheckpointError for a model that cannot be exported.
    """
    kind = saved_model_type(state)
    model_type = load_model_type(kind)
    if model_type.as_gpt is None:
        raise CheckpointError(f"{path}: a model of type {kind} cannot be exported: it is not a GPT")
    if for_others:
        check_formulas(state, path, kind)
    weights, shape = model_type.as_gpt(state, path, backbone)
    check_complete(path, weights, shape)
    return Source(path, weights, shape, state.get("formulas"), *open_text_format(state))


# -----------------------------------------------------------------------------
# formats

def write_json(folder, name, content):
    write_text(os.path.join(folder, name), json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def export_folder(source, to, precision):
    """Write a Source to a Hugging Face folder, for transformers, vLLM and llama.cpp's converter.

    precision: the weights' dtype, e.g. "bfloat16". Returns a description, e.g. "a
    LlamaForCausalLM". Raises CheckpointError for options that no class in FAMILIES has, and values
    too large for `precision`.
    """
    shape, tokenizer, template = source.shape, source.tokenizer, source.template
    kind = find_family(shape, source.path)
    end = tokenizer and tokenizer.eot_token
    config = write_config(shape, kind, precision, end, source.bos_id)
    os.makedirs(to, exist_ok=True)
    weights = convert_weights(write_weights(source.weights, shape, kind), precision)
    write_safetensors(os.path.join(to, "model.safetensors"), weights)
    if tokenizer:
        keys = dict(tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False,
                    model_max_length=shape.full_context)
        if end is not None:
            keys["eos_token"] = tokenizer.decode([end])
        if tokenizer.start:
            keys["bos_token"] = tokenizer.decode(tokenizer.start[:1])
        if template:
            keys |= template.special_tokens | dict(chat_template=template.jinja)
        content = tokenizer_json(tokenizer)
        if kind == "qwen2" and (pattern_name(content) != "qwen2"
                                or content.get("normalizer") != {"type": "NFC"}):
            echo("warning: AutoTokenizer of transformers 5 takes this tokenizer for Qwen's, as of "
                 f"any Qwen2; use PreTrainedTokenizerFast.from_pretrained({to!r})", sys.stderr)
        write_json(to, "tokenizer.json", content)
        write_json(to, "tokenizer_config.json", keys)
    if template and template.ends:
        config["eos_token_id"] = template.ends
    write_json(to, "generation_config.json",
               {k: v for k, v in config.items() if re.fullmatch("(bos|eos|pad)_token_id", k)})
    write_json(to, "config.json", config)  # last: it marks the folder as complete
    return f"a {FAMILIES[kind].architecture}"


def export_weights(source, to, precision):
    """Write a Source to a .safetensors file, by our names, with the configuration in the header."""
    description = dict(model_args=asdict(source.shape), formulas=source.formulas,
                       tokenizer=source.tokenizer and source.tokenizer.spec(),
                       spec=dict(template=source.template.spec) if source.template else {})
    write_safetensors(to, convert_weights(source.weights, precision),
                      {name: json.dumps(value) for name, value in description.items()})
    return f"{len(source.weights)} tensors by our names"


def export_nanogpt(source, to, precision):
    """Write a Source as a checkpoint for nanoGPT's sample.py, without tokenizer and template.

    precision is ignored: weights keep the dtype. Raises CheckpointError for options that nanoGPT
    lacks, or if the file cannot be written.
    """
    kind = find_family(source.shape, source.path, ["nanogpt"])
    weights = write_weights(source.weights, source.shape, kind)
    weights["lm_head.weight"] = weights["transformer.wte.weight"]  # it stores both
    args = write_fields(source.shape, FAMILIES[kind])
    save_checkpoint(to, dict(model=weights, model_args=args, iter_num=0, best_val_loss=1e9))
    return "a checkpoint of nanoGPT"


def export_merged(state, path, to, precision, backbone):
    """Write a model and the frozen backbone as one checkpoint, with adapters merged.

    state: the checkpoint, read from `path`. backbone: path of the backbone; `None`: as in training.
    precision: dtype of all weights. Memory layers (model/memory) are kept as layers.
    Returns a description and the command to use the file. Raises CheckpointError, e.g. for values
    too large for the dtype.
    """
    model, _ = model_of(state, path, backbone=backbone)
    shape = asdict(model.config)
    is_chat = "template" in state["spec"]
    kind = "chat" if is_chat else "gpt"
    if saved_model_type(state) == "memory":
        kind = "memory"
        shape |= dict(lora_rank=0, backbone="", old_data_dir="")
    config = {k: v for k, v in state["config"].items() if k in FIELDS} | shape | dict(model=kind)
    spec = {k: v for k, v in state["spec"].items() if k != "backbone"}
    unchanged = {k: state.get(k) for k in ("iter_num", "best_val_loss", "tokenizer", "formulas")}
    weights = convert_weights(merge(model), precision)
    save_checkpoint(to, unchanged | dict(format_version=FORMAT_VERSION, model=weights, spec=spec,
                                         model_args=shape, config=config))
    next_command = f"python -m model.sample --ckpt {quote_path(to)}{' --chat' * is_chat}"
    return f"a {kind} model\nNext: {next_command}"


# -----------------------------------------------------------------------------
# the command

FORMATS = {".pt": export_nanogpt, ".safetensors": export_weights, ".gguf": export_gguf}


def convert(ckpt, to, save_precision="float32", backbone=None, ema=False):
    """Write a model in the format that the name `to` implies, and print a description.

    to: FILE.safetensors, FILE.gguf, FILE.pt or else a Hugging Face folder; it must not exist, or be
    an empty folder for the last. FILE.pt is the unchanged checkpoint in one file if `ckpt` is
    sharded and `ema` False; or else, with adapters or memory layers, the result of export_merged();
    or else nanoGPT's.
    ckpt: a path that read_model() accepts. backbone: path of the frozen model; `None`: as trained.
    save_precision: the weights' dtype, ignored in nanoGPT's format; for shards as FILE.pt, which
    keeps theirs, "float32" only.
    ema: write the running averages of the weights. Raises UserError or ValueError.
    """
    ending = os.path.splitext(to)[1]
    # A folder may be named after a version (Qwen2.5), but not like a file (model.onnx).
    if not to or ending[1:2].isalpha() and ending not in FORMATS:
        raise CheckpointError(f"--to {to!r}: expected FILE.pt, FILE.safetensors, FILE.gguf or a "
                              "folder (FOLDER/ if it is named like a file)")
    path = os.path.abspath(to)
    is_empty_folder = ending not in FORMATS and os.path.isdir(to) and not os.listdir(to)
    if os.path.lexists(path) and not is_empty_folder:
        raise CheckpointError(f"--to {to}: exists already; give another name")
    folder, name = os.path.split(path)
    is_of_run = re.fullmatch(r"ckpt(_best|_prev|_\d+)?\.pt", name)
    if is_of_run and os.path.exists(f"{folder}/metrics.jsonl"):
        raise CheckpointError(f"--to {to}: has the name of a checkpoint of the run in {folder}; "
                              "give another name")
    os.makedirs(folder, exist_ok=True)
    if ending == ".pt" and is_sharded(ckpt) and not ema:
        if save_precision != "float32":
            raise CheckpointError(f"--save_precision: {to} will be the unchanged checkpoint, which "
                                  "a run can resume; for weights only, give FILE.safetensors")
        save_checkpoint(to, load_checkpoint(ckpt))
        echo(f"Wrote {to}: the same checkpoint in one file")
        return
    state = use_ema(read_model(ckpt), ckpt) if ema else read_model(ckpt)
    needs_merging = saved_model_type(state) == "memory" or any(map(is_adapter, state["model"]))
    with reporting_full_disk(to):
        if ending == ".pt" and needs_merging:  # nanoGPT's format has neither
            description = export_merged(state, ckpt, to, save_precision, backbone)
        else:
            source = read_source(state, ckpt, backbone, for_others=ending != ".safetensors")
            export = FORMATS.get(ending, export_folder)
            try:
                description = export(source, to, save_precision)
            except BaseException:
                shutil.rmtree(to, ignore_errors=True)  # the next try may use this name
                raise
    echo(f"Wrote {to}: {description}")


@dataclass
class ConvertOptions:
    """Convert from and to nanoGPT and Hugging Face, and to llama.cpp; merge adapters or memory."""
    to: str = key("", "FILE.pt: nanoGPT's format (of shards: one file; of adapters or a memory: "
                  "merged); FILE.safetensors: the weights; FILE.gguf: for llama.cpp; otherwise a "
                  "folder for transformers and vLLM", required=True, path=True)
    ckpt: str = key("out/ckpt.pt", "checkpoint (a file, or a folder of shards), .safetensors file, "
                    "Hugging Face folder or hf:OWNER/NAME", path=True)
    backbone: str | None = key(None, BACKBONE, path=True)
    ema: bool = key(False, EMA)
    save_precision: str = key("float32", "of the weights, except in nanoGPT's format",
                              choices=["float32", "bfloat16", "float16"])


main = command(ConvertOptions, lambda options: convert(**vars(options)))
