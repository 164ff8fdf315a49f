"""nanoGPT as train/bench.py runs it: unmodified, from the user's checkout of it."""

import ast
import importlib.util
import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import torch

# Its README's command for a CPU.
CPU_RECIPE = ("config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 "
              "--log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 "
              "--n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0").split()


def model_file(peer):
    """The peer's model.py, unmodified, under a name of its own."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(peer) / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(o):
    """A nanoGPT of the compared shape (and its optimizer as its train.py makes it)."""
    nanogpt = model_file(o.peer)
    torch.manual_seed(1337)
    model = nanogpt.GPT(nanogpt.GPTConfig(**o.shape, dropout=0.0, bias=False)).to(o.device)
    return model, model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), o.device.type)


def flops_per_token(model, shape):
    """model.flops_per_token()'s formula for the peer, whose position table multiplies nothing."""
    n = sum(p.numel() for p in model.parameters()) - shape["block_size"] * shape["n_embd"]
    return 6 * n + 12 * shape["n_layer"] * shape["n_embd"] * shape["block_size"]


def copy(peer, data_dir, folder):
    """The peer's files, unmodified, beside our token files of the same characters."""
    shutil.copytree(Path(peer) / "config", folder / "config")
    for name in ("train.py", "model.py", "configurator.py"):
        shutil.copy(Path(peer) / name, folder)
    data = folder / "data" / "shakespeare_char"
    data.mkdir(parents=True)
    for split in ("train", "val"):
        shutil.copy(data_dir / f"{split}.bin", data)
    vocab_size = json.loads((data_dir / "meta.json").read_text())["vocab_size"]
    (data / "meta.pkl").write_bytes(pickle.dumps(dict(vocab_size=vocab_size)))


def get_batch(peer, folder, batch_size, block_size):
    """The peer's get_batch, out of its train.py, which cannot be imported."""
    source = (Path(peer) / "train.py").read_text()
    tree = next(n for n in ast.parse(source).body if getattr(n, "name", "") == "get_batch")
    space = dict(np=np, os=os, torch=torch, data_dir=folder, batch_size=batch_size, device="cpu",
                 block_size=block_size, device_type="cpu")
    exec(ast.get_source_segment(source, tree), space)
    return lambda: space["get_batch"]("train")
