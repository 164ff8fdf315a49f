"""The commands that the program prints: each is run as printed, on small data, up to where none
follows. Only lengths and sizes are set on top."""

import json
import re
import shlex
import urllib.request

import pytest
import torch
from browser import soon
from conftest import REPO
from processes import Fork, python, run_python
from runs import SMALL, go
from test_readme import TEXTS, commands_in

from data.chat_template import ChatTemplate
from data.meta import Meta, write_meta
from data.prepare.folders import report, start_option
from data.tokenizer import open_tokenizer
from model import chat, dpo, lora
from model.core.weights import adopt_weights
from train.base.errors import UserError
from train.config import load_config
from train.distributed import Ranks

SIZE = dict(n_layer=1, n_head=2, n_embd=16, n_hidden=32, mlp="swiglu", prev_embedding=False)
SHORT = dict(max_epochs=0.05, eval_epochs="null", eval_interval=0, eval_iters=1, batch_size=4,
             gradient_accumulation_steps=1, sample_tokens=0, device="cpu", dtype="float32",
             compile="false", early_stopping_metric="val_loss", early_stopping_mode="min")


def run(folder, *args, **keys):
    """The output of a command in `folder`; run_train.py gets `keys` on top."""
    args = [REPO / word if word == "run_train.py" else word for word in args]
    args += [f"--{name}={value}" for name, value in keys.items()]
    done = python(*args, cwd=folder, merged=True, env=dict(PYTHONPATH=str(REPO)))
    assert done.returncode == 0, (args, done.stdout)
    return done.stdout


def follow(folder, text, **keys):
    """Run the command that `text` suggests, and so on; return all outputs."""
    texts = [text]
    while suggested := re.findall(r"^Next: python (.*)", texts[-1], re.M):
        words = shlex.split(suggested[-1])
        texts.append(run(folder, *words, **keys if words[0] == "run_train.py" else {}))
        keys = SHORT
    return texts


def serve(folder, ckpt):
    """The name of the model that answers a chat at the address that `model.serve` prints."""
    said = folder / "serve.txt"
    fork = Fork(run_python, (["-m", "model.serve", "--ckpt", ckpt, "--port", "0"],), cwd=folder,
                env=dict(PYTHONPATH=REPO), stdout=said)
    try:
        soon(lambda: said.exists() and "Ctrl-C" in said.read_text(), 60)
        url = re.search(r"and (http\S+/v1)", said.read_text())[1]
        body = dict(messages=[dict(role="user", content="say 1")], max_tokens=2)
        request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(request))["model"]
    finally:
        fork.kill()


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A folder with a small text model, a chat model from it, and that one as of elsewhere."""
    folder = tmp_path_factory.mktemp("next")
    (folder / "my text.txt").write_text("Once upon a time there was a number. " * 300)
    (folder / "chats.jsonl").write_text("".join(json.dumps(dict(
        prompt=f"say {i}", response=f"{i}", chosen=f"{i}", rejected="no")) + "\n"
        for i in range(40)))
    texts = follow(folder, run(folder, "-m", "data.prepare", "my text.txt"), **SHORT | SIZE,
                   block_size=64)
    assert "--max_epochs 20 --out_dir 'out/my text'" in texts[0]  # 500 steps would be refused
    assert len(texts) == 3
    ckpt = "out/my text/ckpt.pt"
    chat = run(folder, "-m", "data.prepare.chat", "chats.jsonl", "--tokenizer", ckpt, "--out",
               "data/bin/chat", "--block_size", "96")
    texts = follow(folder, chat, **SHORT)
    assert len(texts) == 3 and "--block_size 96" in chat
    run(folder, "-m", "model.convert", "--ckpt", "out/chat/ckpt.pt", "--to", "out/hf")
    return folder


@pytest.mark.ci
@pytest.mark.parametrize("command", [
    "chat chats.jsonl --tokenizer out/hf --block_size 64 --out data/bin/lora",
    "pairs chats.jsonl --reference out/chat/ckpt.pt --out data/bin/pairs",
    "prompts chats.jsonl --tokenizer out/chat/ckpt.pt --out data/bin/prompts"])
def test_printed_commands_run_up_to_the_answer(chain, command):
    keys = SHORT | (dict(answer_tokens=4, group_size=2) if "prompts" in command else {})
    first, *_ = texts = follow(chain, run(chain, "-m", *f"data.prepare.{command}".split()), **keys)
    if "--tokenizer out/hf" in command:  # the recipe for published models, merged at the end
        assert "--config train/configs/finetune.yaml" in first and "--backbone out/hf" in first
        assert len(texts) == 4 and serve(chain, "out/lora/ckpt.pt") == "lora"
        assert "Qwen3ForCausalLM" in run(chain, "-m", "model.convert", "--ckpt", "out/lora/ckpt.pt",
                                         "--to", "out/tuned")
    else:
        assert "--init_from out/chat/ckpt.pt" in first and len(texts) == 3
    assert "--chat" in texts[-2]


@pytest.mark.parametrize("prepare, keys", [
    ("labels rows.csv", SIZE | dict(block_size=32)),
    ("features --synthetic", dict(d_hidden=8, d_latent=4, linear_path=False))])
def test_printed_commands_of_other_types(tmp_path, prepare, keys):
    keys = keys | dict(early_stopping_patience=0, lr_schedule="constant")  # without evaluations
    (tmp_path / "rows.csv").write_text("text,label\n" + "".join(
        f"number {i},{'odd' if i % 2 else 'even'}\n" for i in range(60)))
    text = run(tmp_path, "-m", *f"data.prepare.{prepare}".split())
    assert len(follow(tmp_path, text, **SHORT | keys)) == 3


def test_the_readmes_model_of_ones_own_text_is_sampled_and_exported(tmp_path):
    (tmp_path / "my.txt").write_text("Once upon a time there was a number. " * 300)
    texts = [run(tmp_path, *words[1:], **SHORT | dict(n_layer=1) if "--config" in words else {})
             for words in commands_in(TEXTS["README.md"])
             if {"my.txt", "out/my", "out/my/ckpt.pt"} & {*words} and not {
                 "out/quick", "data/bin/new", "model.serve", "model.eval.lm_eval"} & {*words}]
    assert len(texts) == 4 and "a Qwen3ForCausalLM" in texts[-1]


def test_resume_commands_are_those_of_the_launcher(monkeypatch):
    """One process, one node, several nodes; a script of one's own."""
    from train.config import load_config
    from train.distributed import Ranks
    from train.logger import resume_command
    config = load_config(None, [])
    monkeypatch.setattr("sys.argv", ["run_train.py", "--seed", "3"])
    assert resume_command(config, Ranks()).split() == ["python", "run_train.py", "--seed", "3"]
    monkeypatch.setenv("MASTER_ADDR", "node0")
    assert shlex.split(resume_command(config, Ranks(world_size=2, ranks_per_node=2))) == [
        "torchrun", "--standalone", "--nproc_per_node=2", "run_train.py", "--seed", "3"]
    assert shlex.split(resume_command(config, Ranks(world_size=8, ranks_per_node=2))) == [
        "torchrun", "--nnodes=4", "--rdzv_backend=c10d", "--rdzv_endpoint=node0:29500",
        "--nproc_per_node=2", "run_train.py", "--seed", "3"]


@pytest.mark.parametrize("name", ["a b", "-a"])
def test_paths_in_printed_commands_are_quoted(data_dir, tmp_path, monkeypatch, capsys, name):
    """Split by a shell, each command has the path of a folder or file as one word, which is no
    option."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    prefix = "./" if name[0] == "-" else ""
    ckpt = f"{name}/ckpt.pt"
    config = load_config(None, SMALL | dict(model="dpo", data_dir=name, init_from=ckpt))
    adapters = {"fc.lora_A": torch.zeros(1)}
    torch.save(dict(model=adapters, config=dict(model="dpo")), ckpt)
    write_meta(name, Meta(model="dpo", tokenizer=open_tokenizer("byte").spec(), block_size=8,
                          vocab_size=256, extra=dict(template=ChatTemplate().spec, reference="",
                                                     reference_dtype="float16")))
    attempts = [
        (lambda: dpo.open_data(config, Ranks()), [ckpt, name]),
        (lambda: chat.read_rows_meta(config, "chat", "chat"), [name]),
        (lambda: adopt_weights(torch.nn.Linear(1, 1), dict(model=adapters), ckpt, print), [ckpt]),
        (lambda: lora.open_data(load_config(None, dict(model="lora", backbone=ckpt)), Ranks()),
         [ckpt]),
        (lambda: go(data_dir, name), [ckpt])]
    for attempt, paths in attempts:
        with pytest.raises(UserError, match=" --[a-z_]+ [./']") as refused:
            attempt()
        words = shlex.split(re.search("(python|--init_from) .*", str(refused.value))[0])
        assert {prefix + path for path in paths} <= {*words}, words
    report(name, dict(train=dict(tokens=10)), "config_quick", start_option(ckpt))
    words = shlex.split(capsys.readouterr().out)
    assert {prefix + name, f"out/{name}", prefix + ckpt} <= {*words}


@pytest.mark.ci
@pytest.mark.parametrize("data", ["a", "b:0.5,a:0.5"])
def test_a_classifier_is_evaluated_as_at_the_end_of_its_run(tmp_path, data):
    """With averaged weights, which were the best; of a mixture, the first folder."""
    for name in "ab":
        (tmp_path / f"{name}.csv").write_text("text,evidence\n" + "".join(
            f"{name} number {i} of all,number {i}\n" for i in range(60)))
        run(tmp_path, "-m", "data.prepare.labels", f"{name}.csv", "--out", name,
            "--tokenizer=byte")
    keys = SHORT | SIZE | dict(
        model="classifier", data_dir=data, out_dir="out", max_epochs=3, eval_interval=4,
        learning_rate=0.01, ema=0.99, early_stopping_metric="val_loss_ema")
    said = follow(tmp_path, "Next: python run_train.py", **keys)[-1]
    report = json.loads((tmp_path / "out/report/metrics.json").read_text())
    assert said.startswith(f"evidence of {report['rows']} rows: ") and report["rows"] < 12
    if data == "a":
        test = json.loads((tmp_path / "out/metrics.jsonl").read_text().splitlines()[-1])
        assert report["token_f1"] == pytest.approx(test["test_token_f1"], abs=1e-6)
        run(tmp_path, "-m", "model.classifier", "--ckpt", "out/ckpt_best.pt", "--out", "raw")
        raw = json.loads((tmp_path / "raw/metrics.json").read_text())
        assert raw["token_f1"] != report["token_f1"]
