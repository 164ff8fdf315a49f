"""Compare a memory with the backbone and LoRA by the losses on new and old text.

    python -m model.memory --ckpt out/memory/ckpt.pt --baseline
"""

import contextlib
import os
from dataclasses import dataclass

from model import chat, lora
from model.core.adapters import find_layers
from model.core.load import BACKBONE, load_model, saved_config
from model.memory import freeze
from train.base.checkpoint_file import load_checkpoint
from train.base.cli import command, format_table
from train.base.errors import CheckpointError, echo
from train.base.fields import fields_by_name, key
from train.base.keys import TrainConfig
from train.distributed import Ranks
from train.evaluate import evaluate
from train.setup import open_data
from train.train import train


@dataclass
class EvaluationOptions:
    """Evaluate a memory on the new and the old text of its run, and compare it with baselines."""
    ckpt: str = key("out/memory/ckpt.pt", "checkpoint", path=True)
    backbone: str | None = key(None, BACKBONE, path=True)
    baseline: bool = key(False, "also train LoRA with as many parameters for as many steps; with "
                         "old text (no conversations) also on both, in equal parts")
    lora_learning_rate: float = key(3e-3, "rate of LoRA, whose optimizer is AdamW", gt=0)


def print_comparison(args):
    """Print a table of validation losses on new and old text (data_dir, old_data_dir).

    The rows: the backbone, the memory and, with args.baseline, LoRA, see train_lora(). Raises
    CheckpointError if the model has no backbone, DataError without validation data.
    """
    model, _ = load_model(args.ckpt, backbone=args.backbone, expect="memory")
    values = load_checkpoint(args.ckpt)["config"]
    if not values.get("backbone"):
        raise CheckpointError(f"{args.ckpt}: trained without a backbone: nothing to compare with")
    values = values | dict(backbone=args.backbone or values["backbone"])
    config = saved_config(values | dict(eval_interval=1))  # 0 would leave out the validation data
    data = open_data(config, Ranks())
    loaders = [data.val.new, data.val.old] if config.old_data_dir else [data.val]
    table = [["", "trained", "new text", "old text"][:2 + len(loaders)]]

    def add_row(name, model, n_trained=0):
        losses = [evaluate(model, model, loader, config.eval_iters, Ranks(),
                           contextlib.nullcontext)["val_loss"] for loader in loaders]
        table.append([name, f"{n_trained:,}", *(f"{loss:.4f}" for loss in losses)])
    shape, weights = lora.load_backbone(config, data)
    backbone = freeze(weights, shape, data, chat)
    n_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    add_row("backbone", backbone)
    add_row("memory", model, n_trained)
    runs = train_lora(args, values, backbone, n_trained) if args.baseline else ()
    for name, path, size in runs:
        add_row(name, load_model(path)[0], size)
    echo(format_table(table))


def train_lora(args, values, backbone, n_trained):
    """Train LoRA with about n_trained parameters; yield (name, checkpoint path, parameter count).

    values: the dict "config" of the memory's checkpoint. backbone: a GPT. The first run, lora_0 in
    out_dir, is on the new data; the second one, lora_1, on new and old text in equal parts, except
    without old text or for conversations.
    """
    layers = map(backbone.get_submodule, find_layers(backbone, ["attn", "mlp"]))
    size = sum(sum(layer.weight.shape) for layer in layers)  # of rank 1
    rank = max(1, round(n_trained / size))
    new, old, n = (values[name] for name in ("data_dir", "old_data_dir", "batch_size"))
    runs = {f"LoRA, rank {rank}": {}}
    if old and not getattr(backbone, "template", None):  # no mixture of conversations and text
        runs[f"LoRA, rank {rank}, new and old text"] = dict(data_dir=f"{new}:0.5,{old}:0.5",
                                                            batch_size=2 * n)
    for i, (name, changes) in enumerate(runs.items()):
        folder = os.path.join(values["out_dir"], f"lora_{i}")
        own = {name: values[name] for name in fields_by_name(TrainConfig) if name in values}
        own |= dict(model="lora", backbone=values["backbone"], lora_rank=rank,
                    lora_alpha=2.0 * rank, optimizer="adamw", resume="never", out_dir=folder,
                    learning_rate=args.lora_learning_rate, min_lr=0.0, lr_groups={},
                    init_from="scratch", max_epochs=None, eval_epochs=None, warmup_epochs=None,
                    save_epochs=None, mirror=None, tracker=[], early_stopping_metric="val_loss",
                    early_stopping_mode="min")
        train(saved_config(own | changes))
        yield name, os.path.join(folder, "ckpt.pt"), rank * size


main = command(EvaluationOptions, print_comparison)
