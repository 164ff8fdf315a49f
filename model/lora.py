"""LoRA (arXiv:2106.09685): fine-tune a frozen GPT with small adapters on the linear layers.

    python run_train.py --config train/configs/lora.yaml --backbone out/chat/ckpt.pt
    python -m model.convert --ckpt out/lora/ckpt.pt --to merged.pt

The data are token files, or conversations prepared by data.prepare.chat. The checkpoint has only
the adapters and a digest of the backbone's weights. model/core/adapters.py has the layer.
"""

import functools
from dataclasses import dataclass

import torch

from data.meta import prepared_model
from model import chat
from model.chat import ChatGPT, as_gpt, inherit_shape, sample  # noqa: F401  model interface
from model.core import adapters
from model.core.weights import check_tokenizer, describe_backbone, read_backbone, with_shape
from train.base.errors import CheckpointError, quote_path
from train.base.fields import key
from train.dataloader import open_token_data
from train.device import choose_dtype
from train.distributed import get_device

USE = "python -m model.convert --ckpt {out}/ckpt.pt --to {out}/merged.pt"
MUST_MATCH_TO_INIT = ("backbone", "lora_alpha")  # adapters belong to one backbone and one scale


@dataclass
class Keys:
    backbone: str = key("out/ckpt.pt", "checkpoint of a gpt or chat model, which stays frozen",
                        free=True, path=True, reads=True)
    lora_rank: int = key(8, "rank of the adapters", ge=1)
    lora_alpha: float = key(16.0, "scale of the adapters, divided by lora_rank", gt=0)
    lora_targets: list[str] = key(["attn", "mlp"], "linear layers that get an adapter, e.g. "
                                  "attn.q, mlp, h.3, h.*.attn.[qv] [attn,mlp]")


# -----------------------------------------------------------------------------
# the model

class LoRA(adapters.PartialStateDict, adapters.WithAdapters, ChatGPT):
    """A GPT for text or conversations with a frozen backbone and adapters on linear layers.

    weights: {name: tensor} of the backbone, used without copies. r: rank of the adapters.
    alpha / r: scale of the adapters. targets: as for find_layers() in model/core/adapters.py.
    state_dict() has the adapters only.
    """

    def __init__(self, config, seed, token_bytes, weights, r, alpha, targets):
        with torch.device("meta"):
            super().__init__(config, seed, token_bytes)
        self.load_backbone(weights)
        adapters.add_adapters(self, r, seed, alpha / r, targets)

    def is_saved(self, name):
        return adapters.is_adapter(name)


def load_backbone(config, data, dtype=torch.float32):
    """Return (config with the backbone's architecture, {name: tensor}), read from config.backbone.

    vocab_size stays that of `config`. Tensors of dtype `dtype` keep it, all others become float32.
    Raises CheckpointError if the file cannot be used, if explicit keys of `config` contradict the
    architecture, or if the digest() of the weights is not data.spec["backbone"].
    """
    path = config.backbone
    state = read_backbone(path)
    if state["digest"] != data.spec["backbone"]:
        raise CheckpointError(f"backbone: the weights of {path} are not those of the training run "
                              f"(sha256 {data.spec['backbone'][:16]}...); use --backbone FILE")
    weights = {name: t if t.dtype == dtype else t.float() for name, t in state["model"].items()}
    return with_shape(config, state["model_args"], path), weights


# -----------------------------------------------------------------------------
# model interface, see train/system.py

def open_data(config, ranks):
    path = config.backbone
    backbone = describe_backbone(path, "backbone", ranks)
    kind = backbone["kind"]
    shape = backbone["shape"]
    c = with_shape(config, shape, path)  # above all block_size
    if kind not in ("gpt", "chat", "distill") or "n_layer" not in shape:
        raise CheckpointError(f"{path}: a checkpoint of --model {kind}; expected a gpt or chat "
                              "model with its model_args; of dpo, grpo or lora, convert it: python "
                              f"-m model.convert --ckpt {quote_path(path)} --to gpt.safetensors")
    vocab_size = shape["vocab_size"]
    data = open_text(c, ranks)
    check_tokenizer(backbone["tokenizer"], path, data.spec, c)
    if data.spec["vocab_size"] > vocab_size:
        raise CheckpointError(f"{path}: its vocabulary has {vocab_size} ids, the data in "
                              f"{c.data_dir} have {data.spec['vocab_size']}")
    data.spec |= dict(vocab_size=vocab_size, backbone=backbone["digest"])
    return data


def open_text(config, ranks):
    """Return the Data of config.data_dir, conversations of data.prepare.chat or token files."""
    is_chat = prepared_model(config.data_dir) == "chat"
    return (chat.open_data if is_chat else open_token_data)(config, ranks)


def build_model(config, data):
    """Return a LoRA of config.backbone; ConfigError if a pattern in lora_targets has no match."""
    dtype = torch.float32
    # In training, a bfloat16 backbone is not converted if products are computed in it: half of
    # the memory. Not under FSDP, which needs parameters of one type, and not in float16, in which
    # the residual stream would overflow.
    if hasattr(data, "train") and config.distributed == "ddp":
        if choose_dtype(config.dtype, get_device(config.device))[0] == torch.bfloat16:
            dtype = torch.bfloat16
    c, weights = load_backbone(config, data, dtype)
    model_class = functools.partial(LoRA, weights=weights, r=c.lora_rank, alpha=c.lora_alpha,
                                    targets=c.lora_targets)
    return chat.build_model(c, data, model_class)
