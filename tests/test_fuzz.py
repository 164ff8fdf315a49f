"""A seeded campaign (pytest -m slow): a thousand mutated files of every kind that is read, each of
which a command takes or refuses in one message, soon and without a traceback. What a first one
found stands in tests/test_hostile.py; requests to the server have one in tests/test_serve.py."""

import base64
import copy
import json
import pickle
import random
import shutil
import struct

import numpy as np
import pytest
import torch
import yaml
from conftest import tiny_args
from processes import Fork
from test_hostile import judge, state

from data import prepare
from data.prepare import chat, features, labels
from model import convert
from train.base.errors import printable
from train.base.tensors import write_safetensors
from train.checkpoint import save_checkpoint
from train.config import load_config, to_yaml
from train.train import train

CASES, AT_ONCE = 1000, 50
BYTES = [b"", b"\0", b"\xff", b"\x1b[2J", b'"', b"[", b"{", b"-1", b"9" * 30, b"null", b"\n", b","]
VALUES = [None, True, -1, 0, 3, 10**9, 10**30, 1.5, 1e308, float("inf"), "", "x", "\x1b[2J",
          "9" * 5000, [], [[]], {}, {"x": 1}, ["x", 2]]
TENSORS = [torch.zeros(3), torch.ones(2, 2).half(), torch.tensor(float("nan")), torch.ones(384, 32),
           torch.zeros(1).expand(999, 999), torch.zeros(0), torch.arange(6)]
TRAIN = tiny_args(max_iters=1, eval_iters=1, eval_interval=1)
RECORDS = dict(prompt="a question", response="an answer", text="some words", label="x",
               evidence="words", messages=[dict(role="user", content="Hi"),
                                           dict(role="assistant", content="Ho")])


# -----------------------------------------------------------------------------
# good files, and the commands that read them

def run_of(system, **more):
    return ["run_train", *TRAIN, *(f"--{k}={v}" for k, v in more.items()), f"--model={system}",
            "--data_dir={}", "--out_dir={}/out"]


READ = {  # kind: (files of it that are mutated, commands that read them; {} is their folder)
    "checkpoint": (["ckpt.pt"], [["model.sample", "--ckpt", "{}/ckpt.pt", "--max_new_tokens", "2"],
                                 ["model.convert", "--ckpt", "{}/ckpt.pt", "--to", "{}/hf"],
                                 ["run_train", *TRAIN, "--init_from={}/ckpt.pt", "--data_dir={}",
                                  "--out_dir={}/out"]]),
    "run": (["out/ckpt.pt", "out/metrics.jsonl", "out/config.yaml"], [run_of("gpt", max_iters=2)]),
    "safetensors": (["a.safetensors"], [["model.sample", "--ckpt", "{}/a.safetensors",
                                         "--tokenizer", "byte", "--max_new_tokens", "2"]]),
    "folder": (["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"],
               [["model.sample", "--ckpt", "{}", "--tokenizer", "byte", "--max_new_tokens", "2"]]),
    "yaml": (["c.yaml"], [["run_train", "--config", "{}/c.yaml", "--print_config"]]),
    "tokens": (["meta.json", "train.bin", "val.bin"], [run_of("gpt", vocab_size=257)]),
    "nanogpt": (["meta.pkl"], [run_of("gpt")]),
    "chats": (["meta.json", "train_tokens.npy", "train_mask.npy", "val_chat.npy"],
              [run_of("chat", block_size=64)]),
    "labels": (["meta.json", "train_tokens.npy", "val_labels.npy", "test_spans.npy"],
               [run_of("classifier")]),
    "features": (["meta.json", "train_a.npy", "val_target.npy"], [run_of("autoencoder")]),
    "records": (["a.jsonl", "a.json", "a.csv"], [
        [f"data.prepare{name}", "{}/FILE", "--out", "{}/out", "--force"]
        for name in ("", ".chat", ".labels")]),
    "array": (["a.npy"], [["data.prepare.features", "{}/a.npy", "--out", "{}/out"]]),
    "ranks": (["tokenizer.tiktoken"], [["data.prepare", "{}/a.txt", "--out", "{}/out",
                                        "--tokenizer", "{}/tokenizer.tiktoken"]]),
    "metrics": (["metrics.jsonl"], [["train.tools.plot", "{}", "--x", x]
                                    for x in ("iter", "time")])}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder of good files for each kind."""
    root = tmp_path_factory.mktemp("good")
    folders = {kind: root / kind for kind in READ}
    for folder in folders.values():
        folder.mkdir()
    (root / "a.txt").write_text("some text of a few words\n" * 300)
    prepare.main([str(root / "a.txt"), "--out", str(folders["tokens"]), "--force"])
    for kind in ("checkpoint", "run", "nanogpt"):
        shutil.copytree(folders["tokens"], folders[kind], dirs_exist_ok=True)
    save_checkpoint(str(folders["checkpoint"] / "ckpt.pt"), state())
    train(load_config(None, [*TRAIN, f"--data_dir={folders['run']}",
                             f"--out_dir={folders['run']}/out"]))
    shutil.copy(folders["run"] / "out/metrics.jsonl", folders["metrics"])
    (folders["yaml"] / "c.yaml").write_text(to_yaml(load_config()))
    write_safetensors(str(folders["safetensors"] / "a.safetensors"), state()["model"],
                      dict(model_args=json.dumps(state()["model_args"])))
    convert.main(["--ckpt", str(folders["checkpoint"] / "ckpt.pt"), "--to", str(folders["folder"])])
    (folders["nanogpt"] / "meta.json").unlink()
    (folders["nanogpt"] / "meta.pkl").write_bytes(pickle.dumps(dict(
        vocab_size=257, itos={i: chr(i) for i in range(257)})))
    lines = [RECORDS | dict(text=f"some words {i}", prompt=f"{i}", label="xy"[i % 2])
             for i in range(60)]
    (root / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shutil.copy(root / "a.jsonl", folders["records"])
    (folders["records"] / "a.json").write_text(json.dumps(lines))
    (folders["records"] / "a.csv").write_text("text,label,prompt,response\n" + "".join(
        f"some words {i},x{i % 2},{i},an answer\n" for i in range(60)))
    chat.main([str(root / "a.jsonl"), "--out", str(folders["chats"]), "--block_size", "64",
               "--field", "prompt", "--field", "response"])
    labels.main([str(root / "a.jsonl"), "--out", str(folders["labels"])])
    np.save(root / "target.npy", np.random.default_rng(0).random((50, 2)))
    np.save(folders["array"] / "a.npy", np.random.default_rng(1).random((50, 3)))
    features.main([str(folders["array"] / "a.npy"), "--target", str(root / "target.npy"),
                   "--out", str(folders["features"])])
    (folders["ranks"] / "tokenizer.tiktoken").write_text(
        "".join(f"{base64.b64encode(token).decode()} {i}\n"
                for i, token in enumerate([*(bytes([i]) for i in range(256)), b"so"])))
    shutil.copy(root / "a.txt", folders["ranks"])
    return folders


# -----------------------------------------------------------------------------
# mutations

def places(nest):
    """(container, key) of everything in a nest of dicts and lists."""
    for key in list(nest) if isinstance(nest, dict) else range(len(nest)):
        yield nest, key
        if isinstance(nest[key], (dict, list)):
            yield from places(nest[key])


def change_nest(rng, nest, values):
    """Replace, delete or double some of what a nest holds."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        if isinstance(nest, (dict, list)) and (found := list(places(nest))):
            container, key = rng.choice(found)
            if rng.random() < 0.2:
                del container[key]
            else:
                container[key] = copy.deepcopy(rng.choice([*values, container]))
    return nest


def change_bytes(rng, data):
    data = bytearray(data)
    if rng.random() < 0.2:
        return data[:rng.randrange(len(data) + 1)]
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(data) + 1)
        data[at:at + rng.choice((0, 1, 1, 5))] = rng.choice([*BYTES, data[at:at + 9],
                                                             rng.randbytes(2)])
    return data


def change(rng, path):
    """Change a file: its content where it has one that we can write again, or else its bytes."""
    kind, content = path.suffix if rng.random() < 0.7 else "", path.read_bytes()
    if kind == ".pt":
        nest = change_nest(rng, torch.load(path, weights_only=True), VALUES + TENSORS)
        try:
            return (save_checkpoint(str(path), nest) if rng.random() < 0.8 else
                    torch.save(nest, path))
        except Exception:  # such as save_checkpoint's, of tensors larger than the disk
            return path.write_bytes(change_bytes(rng, content))
    try:
        if kind == ".json":
            content = json.dumps(change_nest(rng, json.loads(content), VALUES)).encode()
        elif kind == ".yaml":
            content = json.dumps(change_nest(rng, yaml.safe_load(content), VALUES)).encode()
        elif kind == ".jsonl":
            lines = [json.loads(line) for line in content.splitlines()]
            lines = change_nest(rng, lines, VALUES)
            content = "\n".join(map(json.dumps, lines)).encode()
        elif kind == ".pkl":
            content = pickle.dumps(change_nest(rng, pickle.loads(content), VALUES))
        elif kind == ".safetensors":
            size, = struct.unpack("<Q", content[:8])
            header = change_nest(rng, json.loads(content[8:8 + size]), VALUES)
            text = json.dumps(header).encode()
            content = struct.pack("<Q", len(text)) + text + content[8 + size:]
        else:
            content = change_bytes(rng, content)
    except (ValueError, RecursionError):  # changed before
        content = change_bytes(rng, content)
    path.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(CASES // AT_ONCE))
def test_a_thousand_mutated_files(good, tmp_path, seed):
    rng, commands = random.Random(seed), []
    for i in range(AT_ONCE):
        kind = rng.choice(list(READ))
        files, reading = READ[kind]
        folder, name = tmp_path / f"{i}_{kind}", rng.choice(files)
        shutil.copytree(good[kind], folder)
        change(rng, folder / name)
        commands.append([word.replace("{}", str(folder)).replace("FILE", name)
                         for word in rng.choice(reading)])
    fork = Fork(judge, (commands, tmp_path / "results"))
    fork.wait(300)
    fork.kill()
    results = json.loads((tmp_path / "results").read_text())
    assert len(results) == AT_ONCE, f"never ended: {commands[len(results)]}"
    bad = [f"{' '.join(command)}: exit {code}, {seconds:.0f} s, {memory:.0f} MiB\n{said[-1500:]}"
           for command, (code, seconds, memory, said) in zip(commands, results)
           if code not in (0, 2) and "not finite: loss" not in said or "Traceback" in said
           or seconds > 20 or memory > 300 or code == 2 and said != printable(said)]
    assert not bad, "\n\n".join(bad)
