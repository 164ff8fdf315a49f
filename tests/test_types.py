"""What a type checker sees: the names that scripts import say what they take and give, and nothing
newer than Python 3.10 is used."""

import ast
import os
import re
import subprocess
import sys

import pytest
from conftest import REPO

OLDEST = (3, 10)
FOLDERS = ("run_train.py", "train", "model", "data")

# A script as a person writes it. The checker must refuse exactly the lines with `ignore`, each for
# the reason given: with a hint missing, the line would pass, and the `ignore` be in vain.
SCRIPT = '''
import numpy as np
from model.sae.activations import ActivationBuffer
from data.tokenizer import load_tokenizer
from model.classifier import classification_metrics
from model.gpt import GPT, GPTConfig
from model.moe import compute_router_auxiliary_loss, router_losses
from model.sample import generate, load_model
from train.checkpoint import load_checkpoint, save_checkpoint
from train.config import load_config
from train.dataloader import Data, DataLoader, RowLoader
from train.distributed import convert_ddp_state, get_device, set_seed
from train.lr_scheduler import EarlyStopping, get_lr
from train.optimizer import Muon, configure_optimizers
from train.train import train

config = load_config("config.yaml", ["--seed=1"])
load_config(None, {"seed": 1}).batch_size = "4"                      # type: ignore[assignment]
load_config(3)                                                       # type: ignore[arg-type]

x, y = DataLoader("data/bin/my", 4, 8, split="train", rank=0).get_batch("cpu", step=3)
DataLoader("data/bin/my", "4", 8)                                    # type: ignore[arg-type]
rows = RowLoader([np.zeros(3)], config, None)
RowLoader(3, config, None)                                           # type: ignore[arg-type]
Data(rows, None, spec={"n": 3})
Data(rows, spec=3)                                                   # type: ignore[arg-type]

model = GPT(GPTConfig(n_layer=1), seed=3)
GPT(GPTConfig(n_layer="1"))                                          # type: ignore[arg-type]
GPT({"n_layer": 1})                                                  # type: ignore[arg-type]
optimizer = configure_optimizers(model, 0.1, 1e-3, (0.9, 0.95), muon={"lr": 0.02})
configure_optimizers(model, 0.1, 1e-3, 0.9)                          # type: ignore[arg-type]
Muon([{"params": []}], momentum=0.9, lr=0.1)
Muon(3)                                                              # type: ignore[arg-type]
rate: float = get_lr(3, config)
get_lr("3", config)                                                  # type: ignore[arg-type]
stop: bool = EarlyStopping(patience=3, mode="max").check(0.3)
EarlyStopping(mode=3)                                                # type: ignore[arg-type]
late: str = EarlyStopping().check(0.3)                              # type: ignore[assignment]

state = convert_ddp_state(load_checkpoint("ckpt.pt")["model"])
load_checkpoint(3)                                                   # type: ignore[arg-type]
convert_ddp_state([])                                                # type: ignore[arg-type]
save_checkpoint("ckpt.pt", {"model": state}, links=["best.pt"])
save_checkpoint("ckpt.pt", state="all")                              # type: ignore[arg-type]
set_seed(1, deterministic=True)
set_seed("1")                                                        # type: ignore[arg-type]
get_device("cuda", local_rank=1)
get_device(0)                                                        # type: ignore[arg-type]
last: float = train(config, model, on_evaluation=lambda it, numbers: print(it, numbers))["val_loss"]
train("config.yaml")                                                 # type: ignore[arg-type]
train(config, data=Data(rows))
train(config, data=rows)                                             # type: ignore[arg-type]

model, tokenizer = load_model("ckpt.pt", "cpu")
load_model(3)                                                        # type: ignore[arg-type]
out = generate(model, x, 20, temperature=0.8, top_k=50, on_token=print)
losses = router_losses(x, 2)
router_losses(x, "2")                                                # type: ignore[arg-type]
compute_router_auxiliary_loss([losses], load_balance_coef=0.01)
compute_router_auxiliary_loss(losses)                                # type: ignore[arg-type]
f1: float = classification_metrics(np.zeros(3), np.zeros((3, 2)))["f1_macro"]
buffer = ActivationBuffer(100, 8, "cpu")
buffer.add(x)
buffer.sample(4, seed=1)
ActivationBuffer("100", 8)                                           # type: ignore[arg-type]
buffer.sample("4", seed=1)                                           # type: ignore[arg-type]
ids: list[int] = load_tokenizer("byte").encode("text")
text: str = load_tokenizer("gpt2", None).decode(ids)
load_tokenizer(3)                                                    # type: ignore[arg-type]
load_tokenizer("byte").encode(3)                                     # type: ignore[arg-type]
'''


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """Lines of what mypy says of SCRIPT and of the program, taken for a program of OLDEST."""
    pytest.importorskip("mypy")
    folder = tmp_path_factory.mktemp("types")
    (folder / "script.py").write_text(SCRIPT)
    version = ".".join(map(str, OLDEST))
    done = subprocess.run([sys.executable, "-m", "mypy", "--no-incremental",
                           f"--cache-dir={os.devnull}", f"--python-version={version}", *FOLDERS,
                           folder / "script.py"], cwd=REPO, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout.splitlines()


def test_names_that_scripts_import_say_what_they_take_and_give(checked):
    assert [line for line in checked if "/script.py:" in line] == []


def test_nothing_newer_than_the_oldest_python_is_used(checked):
    """Neither syntax, nor modules, nor what is in them (mypy knows which version has what)."""
    newer = r"^ *(import|from) (tomllib|annotationlib|compression|string\.templatelib)\b"
    for path in [p for p in REPO.rglob("*.py") if not p.is_relative_to(REPO / "data" / "bin")]:
        text = path.read_text()
        ast.parse(text, str(path), feature_version=OLDEST)
        assert not re.search(newer, text, re.MULTILINE), path
    assert [line for line in checked if re.search('error: Module.* has no attribute', line)] == []


@pytest.mark.parametrize("file", ["run_train.py", "train/config.py"])
def test_an_older_python_is_refused_in_one_line(file):
    code = ("import runpy, sys; sys.version_info = (3, 9, 18); sys.version = '3.9.18'; "
            f"runpy.run_path({file!r}, run_name='__main__')")
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert done.returncode and done.stderr == "Python 3.10 or newer is needed, this is 3.9.18\n"
