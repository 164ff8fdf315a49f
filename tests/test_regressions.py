"""Regressions: what careful users met, each fixed once; wrong or lost results, then friction."""

import contextlib
import decimal
import io
import json
import os
import pickle
import re
import shutil
import sys
import tarfile
from dataclasses import fields

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import REPO, tiny_args
from processes import python
from runs import SMALL, assert_same_file, configure, go, metrics, opened

import data.prepare.chat
import run_train
from model import sample
from model.core.load import load_model
from model.gpt import GPT, GPTConfig
from train import checkpoint, distributed, logger, setup
from train import device as devices
from train import train as train_module
from train.base.errors import CheckpointError, ConfigError, SetupError
from train.base.keys import GPTKeys
from train.checkpoint import load_checkpoint, save_checkpoint
from train.config import TrainConfig, load_config
from train.dataloader import DataLoader, open_token_data, send
from train.distributed import Ranks
from train.lr_scheduler import get_lr
from train.train import train


def command(*args, **changes):
    """python run_train.py ARGS in this process: (exit code, stdout, stderr)."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_train.main([*(f"--{k}={v}" for k, v in (SMALL | changes).items()),
                               *map(str, args)])
    return code, out.getvalue(), err.getvalue()


def refused(*args, **changes):
    """What a command says that must end with exit code 2 and without a traceback."""
    code, _, err = command(*args, **changes)
    assert code == 2 and "Traceback" not in err, err
    return err


@pytest.fixture(scope="module")
def text_dir(tmp_path_factory, data_dir):
    """The shared data as `data.prepare` leaves it: with a byte tokenizer."""
    folder = tmp_path_factory.mktemp("text")
    for split in ("train", "val"):
        tokens = np.fromfile(data_dir / f"{split}.bin", "<u2")
        tokens.tofile(folder / f"{split}.bin")
    (folder / "meta.json").write_text(json.dumps(dict(
        vocab_size=257, dtype="uint16", tokenizer=dict(kind="byte"))))
    return folder


# -----------------------------------------------------------------------------
# wrong, lost, or a crash

def test_a_vocabulary_padded_above_the_tokenizers(tmp_path, text_dir, capsys):
    """Ids past the tokenizer are never sampled, in a run or after it."""
    go(text_dir, tmp_path, vocab_size=300, sample_tokens=200, max_iters=5, warmup_iters=0)
    assert "no samples" not in capsys.readouterr().out
    assert (tmp_path / "samples.txt").read_text().count("=== iter") == 1
    from model import sample
    torch.manual_seed(0)
    assert sample.main(["--ckpt", str(tmp_path / "ckpt.pt"), "--prompt", "a", "--seed", "1",
                        "--max_new_tokens", "300", "--temperature", "5"]) == 0


def test_a_sample_never_ends_a_run(tmp_path, text_dir, monkeypatch, capsys):
    def fail(*_):
        raise ValueError("nothing to say")
    monkeypatch.setattr("model.gpt.sample", fail)
    assert go(text_dir, tmp_path, vocab_size=257, sample_tokens=8)["iter_num"] == 20
    assert "no samples: ValueError: nothing to say" in capsys.readouterr().out


def restarted(monkeypatch, times):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 7")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(times))


def test_resume_must_refuses_also_when_restarted(tmp_path, data_dir, monkeypatch):
    for times in (0, 1, 2):
        restarted(monkeypatch, times)
        with pytest.raises(CheckpointError, match="--resume must: there is no ckpt.pt"):
            go(data_dir, tmp_path, resume="must")
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_restart_before_the_first_save_of_a_branch_begins_the_branch_again(
        tmp_path, data_dir, monkeypatch):
    """--resume FILE moves later checkpoints, but not the numbered ones, of which the newest is not
    the branch"""
    go(data_dir, tmp_path, max_iters=8, save_interval=4, keep_last=4)
    branch = dict(resume=str(tmp_path / "ckpt_0000004.pt"), max_iters=9, keep_last=4)
    restarted(monkeypatch, 0)
    with pytest.raises(RuntimeError, match="fault at before_step"):
        go(data_dir, tmp_path, "save_open=enospc,before_step@4=raise", **branch)
    restarted(monkeypatch, 1)
    go(data_dir, tmp_path, **branch)
    assert "at iter 4" in (tmp_path / "train.log").read_text().rpartition("Resuming from")[2]


def test_what_may_change_when_a_run_goes_on(tmp_path, data_dir):
    """How ranks share a model, where and how it is computed."""
    go(data_dir, tmp_path, max_iters=3)
    for n, change in enumerate((dict(distributed="fsdp"), dict(compile="auto"), dict(dtype="auto"),
                                dict(deterministic=True)), 4):
        assert go(data_dir, tmp_path, max_iters=n, **change)["iter_num"] == n


def test_what_was_typed_stays_so_in_a_changed_configuration():
    config = load_config(None, ["n_layer=12"])
    assert config.is_explicit("n_layer") and not config.is_explicit("n_head")
    changed = config.replace(seed=7, n_head=4)
    assert changed.is_explicit("n_layer") and changed.is_explicit("n_head")
    assert not changed.is_explicit("n_embd")


def test_repeating_a_config_yaml_moves_nothing_aside_and_switches_no_check_off(tmp_path, data_dir):
    go(data_dir, tmp_path, max_iters=2)
    go(data_dir, tmp_path, max_iters=2, resume="never", allow_change=["all"])
    for name in ("config.yaml", "training_args.json"):
        again = load_config(str(tmp_path / name))
        assert (again.resume, again.allow_change, again.eval_only) == ("auto", [], False)
    assert train(load_config(str(tmp_path / "config.yaml")))["iter_num"] == 2
    assert sorted(p.name for p in tmp_path.glob("old_*")) == ["old_1"]


def test_a_finished_run_keeps_the_keys_that_it_was_trained_with(tmp_path, data_dir):
    """Started again with a smaller max_iters, it does nothing: config.yaml must repeat the run."""
    go(data_dir, tmp_path, max_iters=3)
    go(data_dir, tmp_path, max_iters=2)
    for name in ("config.yaml", "training_args.json"):
        assert load_config(str(tmp_path / name)).max_iters == 3, name
    go(data_dir, tmp_path, max_iters=4)
    assert load_config(str(tmp_path / "config.yaml")).max_iters == 4
    for keys in (dict(max_iters=4), dict(max_iters=3)):  # a branch has its own, also a second one
        go(data_dir, tmp_path / "branch", resume=str(tmp_path / "ckpt.pt"), **keys)
        assert load_config(str(tmp_path / "branch/config.yaml")).max_iters == keys["max_iters"]
    (tmp_path / "config.yaml").unlink()  # e.g. of a run that was copied from its mirror
    go(data_dir, tmp_path, max_iters=4)
    assert load_config(str(tmp_path / "config.yaml")).max_iters == 4


@pytest.mark.parametrize("key, theirs, ours", [
    ("n_head", 4, 1), ("norm", "layer", "rms"), ("rope_theta", 500.0, 100.0),
    ("mlp", "relu2", "gelu")])
def test_init_from_knows_the_architecture(tmp_path, data_dir, key, theirs, ours):
    """Left out, a key is taken from the weights; one that contradicts them is refused by name."""
    go(data_dir, tmp_path / "a", max_iters=2, **{key: theirs})
    shape = {f.name for f in fields(GPTKeys)}
    base = {k: v for k, v in SMALL.items() if k not in shape} | dict(vocab_size=256)
    path = str(tmp_path / "a" / "ckpt.pt")
    places = dict(data_dir=str(data_dir), init_from=path, max_iters=0)
    if ours != getattr(TrainConfig(), key):
        with pytest.raises(CheckpointError, match=f"{key}: it has .*{theirs}.*says .*{ours}"):
            train(load_config(None, base | places | {key: ours, "out_dir": str(tmp_path / "b")}))
    train(load_config(None, base | places | dict(out_dir=str(tmp_path / "c"))))
    args, wanted = (load_checkpoint(tmp_path / n / "ckpt.pt")["model_args"] for n in "ca")
    assert args == wanted and args[key] == theirs


def test_init_from_weights_of_another_tokenizer_is_refused(tmp_path, data_dir, text_dir):
    go(text_dir, tmp_path / "a", max_iters=1, vocab_size=257)
    other = tmp_path / "chars"
    other.mkdir()
    for split in ("train", "val"):
        (other / f"{split}.bin").write_bytes((data_dir / f"{split}.bin").read_bytes())
    chars = "".join(map(chr, range(32, 32 + 256)))
    (other / "meta.json").write_text(json.dumps(dict(
        vocab_size=257, tokenizer=dict(kind="char", chars=chars))))
    start = dict(init_from=str(tmp_path / "a" / "ckpt.pt"), vocab_size=257, max_iters=1)
    with pytest.raises(CheckpointError, match="(?s)tokenizer: checkpoint has .*byte.*, now .*char.*"
                       "or prepare the data with --tokenizer "):
        go(other, tmp_path / "b", **start)
    go(other, tmp_path / "b", **start, allow_change=["tokenizer"])


def test_any_kept_checkpoint_can_be_resumed_and_is_offered(tmp_path, data_dir):
    go(data_dir, tmp_path, max_iters=10)
    best = tmp_path / "ckpt_best.pt"
    for name in ("ckpt.pt", "ckpt_prev.pt"):
        (tmp_path / name).unlink()  # or its other name, ckpt_best.pt, would be damaged too
        (tmp_path / name).write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=f"--resume {re.escape(str(best))}"):
        go(data_dir, tmp_path)
    go(data_dir, tmp_path, resume=str(best), max_iters=20)
    go(data_dir, tmp_path / "whole")
    assert_same_file(tmp_path / "whole" / "ckpt.pt", tmp_path / "ckpt.pt")
    assert [m["iter"] for m in metrics(tmp_path) if "loss" in m] == list(range(20))


def test_lists_split_at_commas():
    assert load_config(None, ["--tracker=wandb,mlflow"]).tracker == ["wandb", "mlflow"]
    assert load_config(None, ["--allow_change", "data,optimizer"]).allow_change == [
        "data", "optimizer"]


@pytest.mark.parametrize("content", ["[]", "{", '{"tokenizer": {"kind": "odd"}}'])
def test_a_damaged_meta_json_is_one_message(tmp_path, text_dir, content):
    for split in ("train", "val"):
        (tmp_path / f"{split}.bin").write_bytes((text_dir / f"{split}.bin").read_bytes())
    (tmp_path / "meta.json").write_text(content)
    assert "meta" in refused(data_dir=tmp_path, out_dir=tmp_path / "o")


@pytest.mark.parametrize("args, words", [
    (["--lr_groups={'*': 0}"], "all parameters are frozen"),
    (["--model=../evil"], "there is no model type model/../evil.py"),
    (["--model", "os"], "there is no model type model/os.py"),
    (["--n_embd=65"], "multiple of n_head"),
    (["--n_head=0"], "n_head: must be at least 1"),
    (["--trainingg.seed=1"], "unknown key 'trainingg.seed'"),
    (["--lr_schedule=nothing"], "must be one of cosine")])
def test_wrong_values_are_one_message(tmp_path, data_dir, args, words):
    err = refused(*args, data_dir=data_dir, out_dir=tmp_path / "o")
    assert words in err and (words == "all parameters are frozen" or "1 problem\n" in err)


def test_a_configuration_made_in_python_is_checked(tmp_path):
    with pytest.raises(ConfigError, match="multiple of n_head"):
        train(TrainConfig(n_embd=65, n_head=2, out_dir=str(tmp_path)))
    with pytest.raises(ConfigError, match="learning_rate: must be above 0"):
        train(TrainConfig(learning_rate=-1.0, out_dir=str(tmp_path)))


def test_the_printed_command_knows_nodes_and_spaces(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run_train.py", "--out_dir", "my runs/a b", "--resume=never"])
    told = logger.resume_command(load_config(None, ["--resume=never"]), Ranks(world_size=2))
    assert "torchrun --nnodes=2 --rdzv" in told and "--nproc_per_node=1 run_train.py" in told
    assert "--out_dir 'my runs/a b'" in told and told.endswith("--resume auto")
    told = logger.resume_command(load_config(None), Ranks(world_size=4, ranks_per_node=4))
    assert "torchrun --standalone --nproc_per_node=4 run_train.py" in told


def test_what_a_rank_has_printed_is_written_before_it_leaves():
    done = python("-c", "from train import robust; print('said'); robust.exit_process(3)",
                  env=dict(WORLD_SIZE=1))
    assert (done.returncode, done.stdout) == (3, "said\n")


def test_a_pattern_of_lr_groups_matches_whole_names():
    from train.optimizer import matches
    assert matches("h.1.attn.q.weight", "h.1") and not matches("h.10.attn.q.weight", "h.1")
    assert matches("h.10.mlp.up.weight", "h.*.mlp") and not matches("h.1.mlp2.up.weight", "mlp")
    assert matches("h.0.attn.lora_a", "lora_*") and matches("wte.weight", "*")


def test_plateau_stops_at_min_lr(tmp_path, data_dir):
    """min_lr a third of the peak: halved once, and then down to it."""
    go(data_dir, tmp_path, lr_schedule="plateau", plateau_patience=0, learning_rate=1e-9,
       min_lr=1e-9 / 3, warmup_iters=0, eval_interval=1, eval_iters=1, max_iters=6, grad_clip=1e-9,
       early_stopping_metric="val_loss", weight_decay=0.0, adam_eps=1.0)
    rates = {m["lr"] for m in metrics(tmp_path) if "loss" in m}
    assert min(rates) >= 1e-9 / 3 * 0.999 and max(rates) == 1e-9


@pytest.mark.parametrize("given, told", [
    (dict(max_epochs=0.004, max_iters=5), "Length: 3 steps"),
    (dict(warmup_epochs=0.001), "warm-up 1 steps"),
    (dict(warmup_ratio=0.5, warmup_iters=3), "warm-up 3 steps"),
    (dict(warmup_iters=30), "the warm-up of 30 steps is longer than the run of 6"),
    (dict(warmup_iters=4, lr_decay_iters=3), "the warm-up of 4 steps is not below lr_decay_iters"),
    (dict(warmup_iters=30, max_iters=0), "Learning rate")])
def test_lengths_are_shown_at_the_start(tmp_path, data_dir, capsys, given, told):
    go(data_dir, tmp_path, **dict(max_iters=6) | given)
    assert re.search(told, capsys.readouterr().out)


@pytest.mark.parametrize("given", [dict(warmup_iters=2), dict(warmup_iters=9, max_iters=9,
                                                              lr_schedule="constant")])
def test_a_warm_up_that_reaches_the_peak_is_no_warning(tmp_path, data_dir, capsys, given):
    """Also where the rate after it is below the peak by rounding only."""
    go(data_dir, tmp_path, **dict(max_iters=4, lr_decay_iters=4, learning_rate=6e-4) | given)
    assert "never reaches" not in capsys.readouterr().out


def test_a_resume_of_no_file_names_the_values(tmp_path, data_dir):
    err = refused("--resume", "Auto", data_dir=data_dir, out_dir=tmp_path / "out")
    assert err.startswith("Auto: no such file or folder with ckpt.pt; --resume takes auto, must")


def test_training_args_have_the_length_in_steps(tmp_path, data_dir):
    go(data_dir, tmp_path, max_epochs=0.004, max_iters=5)
    arguments = json.loads((tmp_path / "training_args.json").read_text())["arguments"]
    assert arguments["max_iters"] == 3


def test_eval_only_of_nothing_is_refused(tmp_path, data_dir):
    err = refused("--eval_only", data_dir=data_dir, out_dir=tmp_path / "outt")
    assert "outt" in err
    assert not (tmp_path / "outt" / "metrics.jsonl").exists()


# -----------------------------------------------------------------------------
# rows of the requirements

def test_get_lr_takes_what_load_config_gives():
    c = load_config(None, ["--max_iters=100", "--warmup_ratio=0.1", "--learning_rate=1"])
    assert get_lr(0, c) == pytest.approx(1 / 11) and get_lr(10, c) == 1
    assert get_lr(100, c) == pytest.approx(0.1)


def test_batches_cross_to_a_gpu_from_pinned_memory(monkeypatch):
    done = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: done.append("pinned") or t)
    monkeypatch.setattr(torch.Tensor, "to", lambda t, device, non_blocking=False: done.append(
        (str(device), non_blocking)) or t)
    send(np.arange(4), torch.device("cuda", 0))
    assert done == ["pinned", ("cuda:0", True)]


@pytest.mark.parametrize("wrap", [lambda w: {"model_state_dict": w}, lambda w: {"state_dict": w},
                                  lambda w: w])
def test_weights_of_other_trainers_load(tmp_path, data_dir, wrap):
    go(data_dir, tmp_path / "a", max_iters=1)
    weights = load_checkpoint(tmp_path / "a" / "ckpt.pt")["model"]
    torch.save(wrap(weights), tmp_path / "theirs.pt")
    go(data_dir, tmp_path / "b", init_from=str(tmp_path / "theirs.pt"), max_iters=0)
    loaded = load_checkpoint(tmp_path / "b" / "ckpt.pt")["model"]
    assert all(torch.equal(t, loaded[n]) for n, t in weights.items())


def test_flags():
    c = load_config(None, ["--compile", "--gradient_checkpointing"])
    assert (c.compile, c.gradient_checkpointing) == ("true", "true")
    c = load_config(None, ["--no-compile", "--gradient_checkpointing", "selective"])
    assert (c.compile, c.gradient_checkpointing) == ("false", "selective")


def test_training_args_json_repeats_a_run(tmp_path, data_dir):
    go(data_dir, tmp_path / "a", max_iters=4, lr_groups={"mlp": 0.5})
    code, _, err = command_of_file(tmp_path / "a" / "training_args.json", "--out_dir",
                                   tmp_path / "b")
    assert code == 0, err
    assert_same_file(tmp_path / "a" / "ckpt.pt", tmp_path / "b" / "ckpt.pt")


def command_of_file(path, *args):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_train.main(["--config", str(path), *map(str, args)])
    return code, out.getvalue(), err.getvalue()


def test_a_model_of_ones_own_and_the_result_of_training(tmp_path, data_dir):
    """train(config, model, on_evaluation), as a library: the model given is the one trained; the
    numbers of every evaluation are heard, returned and in the checkpoint."""
    from model.gpt import GPTConfig
    config = configure(data_dir, tmp_path, max_iters=10)
    shape = {k: SMALL[k] for k in ("n_layer", "n_head", "n_embd", "n_hidden", "block_size")}
    model, heard = GPT(GPTConfig(vocab_size=256, **shape), seed=9), []
    before = model.wte.weight.detach().clone()
    result = train(config, model, lambda it, numbers: heard.append((it, numbers["val_loss"])))
    assert not torch.equal(before, model.wte.weight)
    assert torch.equal(load_checkpoint(tmp_path / "ckpt.pt")["model"]["wte.weight"],
                       model.wte.weight)
    assert [it for it, _ in heard] == [0, 5, 10]
    assert [(m["iter"], m["val_loss"]) for m in result["history"]] == heard
    saved = load_checkpoint(tmp_path / "ckpt.pt")["progress"]["history"]
    assert saved == result["history"]
    assert "model.sample" not in (tmp_path / "train.log").read_text()  # which knows only our own


def test_an_interval_of_training_and_an_evaluation_by_themselves(tmp_path, data_dir):
    with opened(configure(data_dir, tmp_path)) as run:
        before = train_module.evaluate_loader(run, run.data.val, 2)["val_loss"]
        for _ in range(8):
            train_module.train_step(run)
        assert run.progress.iter_num == 8
        assert train_module.evaluate_loader(run, run.data.val, 2)["val_loss"] < before - 0.3
        assert run.raw_model.training


def test_seeds_and_cudnn(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    distributed.set_seed(41, cudnn_benchmark=True)
    assert os.environ["PYTHONHASHSEED"] == "41" and torch.backends.cudnn.benchmark
    distributed.set_seed(1)


def stub_gpu(monkeypatch, major, name="NVIDIA Stub"):
    class Properties:
        total_memory, minor = 24 * 2**30, 0
    Properties.major, Properties.name = major, name
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


@pytest.mark.parametrize("major, dtype, words", [
    (7, torch.float16, "bf16 False, tf32 False"), (9, torch.bfloat16, "bf16 True, tf32 True")])
def test_the_device_says_what_it_can(monkeypatch, major, dtype, words):
    stub_gpu(monkeypatch, major)
    device = distributed.get_device("auto")
    assert device == torch.device("cuda", 0)
    told = devices.describe_device(device)
    assert told == (f"cuda:0, {words}, gpu NVIDIA Stub, memory 24 GiB, capability {major}.0, "
                    "cuda 13.0")
    assert devices.choose_dtype("auto", device)[0] == dtype
    assert devices.device_facts(device)["gpu"] == "NVIDIA Stub"
    for deterministic in (True, False):
        distributed.set_seed(1, deterministic)
        assert torch.backends.cuda.matmul.allow_tf32 is not deterministic
        assert torch.backends.cudnn.allow_tf32 is not deterministic


def test_other_names_for_keys_and_groups(tmp_path):
    (tmp_path / "c.yaml").write_text("training:\n  epochs: 3\n  lr: 1e-3\nmodel: gpt\n"
                                     "optimizer: muon\nlearning_rate:\n  warmup_iters: 7\n")
    c = load_config(str(tmp_path / "c.yaml"))
    assert (c.max_epochs, c.learning_rate, c.warmup_iters, c.optimizer) == (3, 1e-3, 7, "muon")
    assert load_config(None, ["training.epochs=20"]).max_epochs == 20
    (tmp_path / "best.yaml").write_text("n_layer: 5\nn_embd: 60\n")
    c = load_config(str(tmp_path / "c.yaml"), [f"best_config={tmp_path}/best.yaml", "--n_embd=120"])
    assert (c.n_layer, c.n_embd, c.warmup_iters) == (5, 120, 7)


@pytest.mark.parametrize("precision, kind", [("bfloat16", "BF16"), ("float32", "F32")])
def test_save_precision(tmp_path, data_dir, precision, kind):
    go(data_dir, tmp_path, max_iters=2, save_precision=precision)
    blob = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(blob[:8], "little")
    header, weights = json.loads(blob[8:8 + length]), load_checkpoint(tmp_path / "ckpt.pt")["model"]
    assert header.keys() - {"__metadata__"} == weights.keys()
    for name, tensor in weights.items():
        begin, end = header[name]["data_offsets"]
        assert header[name]["dtype"] == kind and header[name]["shape"] == list(tensor.shape)
        wanted = tensor.to(getattr(torch, precision)).view(torch.uint8).numpy().tobytes()
        assert blob[8 + length + begin:8 + length + end] == wanted
    for more in (dict(max_iters=3, save_precision=precision), dict(max_iters=4)):
        before = (tmp_path / "train.log").read_text()
        go(data_dir, tmp_path, **more)
        added = (tmp_path / "train.log").read_text().removeprefix(before)
        assert ("model.safetensors stays as it is" in added) == (more["max_iters"] == 4)


@pytest.mark.parametrize("own", [dict(), dict(model="moe", n_experts=3), dict(model="chat")])
def test_model_safetensors_is_a_model(tmp_path, data_dir, own, capsys):
    """It is sampled, and started from, by its file alone: shape, tokenizer and system are in it."""
    where = data_dir
    if own.get("model") == "chat":
        (tmp_path / "a.jsonl").write_text("".join(
            json.dumps(dict(prompt=f"{i}?", response="x")) + "\n" for i in range(40)))
        where = tmp_path / "chat"
        assert data.prepare.chat.main([str(tmp_path / "a.jsonl"), "--out", str(where),
                                       "--block_size", "64", "--tokenizer", "byte"]) == 0
    settings = dict(tokenizer="byte", vocab_size=None, block_size=64) | own
    go(where, tmp_path / "a", max_iters=2, save_precision="float32", **settings)
    path = tmp_path / "a" / "model.safetensors"
    (model, tokenizer), (same, _) = map(load_model, (path, tmp_path / "a" / "ckpt.pt"))
    assert tokenizer.spec() == dict(kind="byte") and type(model) is type(same)
    ids = torch.arange(8)[None]
    assert torch.equal(model(ids), same(ids))
    templates = [getattr(m, "template", None) for m in (model, same)]
    assert templates[0] is templates[1] is None or vars(templates[0]) == vars(templates[1])
    assert sample.main(["--ckpt", str(path), "--prompt", "line", "--max_new_tokens", "4"]) == 0
    assert "\nline" in capsys.readouterr().out  # a sample of four bytes may have a line end
    shape = {f.name for f in fields(GPTConfig)} | {"n_experts"}
    start = {k: v for k, v in (SMALL | settings).items() if k not in shape}
    train(load_config(None, start | dict(data_dir=str(where), out_dir=str(tmp_path / "b"),
                                         init_from=str(path), max_iters=0)))
    weights = load_checkpoint(tmp_path / "b" / "ckpt.pt")["model"]
    for name, tensor in load_checkpoint(tmp_path / "a" / "ckpt.pt")["model"].items():
        assert torch.equal(weights[name], tensor), name


@pytest.mark.parametrize("keep_last, kept", [(0, [4, 8, 11, 15]), (2, [11, 15])])
def test_checkpoints_by_epochs(tmp_path, data_dir, keep_last, kept):
    """248 windows of 8 tokens, 70 a step: 3.54 steps an epoch. What is saved at other steps is not
    kept."""
    data = tmp_path / "data"
    shutil.copytree(data_dir, data)
    os.truncate(data / "train.bin", 2 * 2000)
    go(data, tmp_path, batch_size=35, gradient_accumulation_steps=2, max_iters=16,
       save_epochs=1, keep_last=keep_last, eval_interval=3, save_interval=2)
    assert sorted(tmp_path.glob("ckpt_0*")) == [tmp_path / f"ckpt_{i:07}.pt" for i in kept]
    for i in kept:
        assert load_checkpoint(tmp_path / f"ckpt_{i:07}.pt")["iter_num"] == i


def test_weights_that_a_run_starts_from_are_no_epoch(tmp_path, data_dir):
    """Its first evaluation makes them the best ones, which are saved, but no numbered one."""
    go(data_dir, tmp_path / "a", max_iters=1)
    go(data_dir, tmp_path / "b", max_iters=1, init_from=str(tmp_path / "a/ckpt.pt"), save_epochs=1,
       eval_interval=1, learning_rate=10.0)
    assert load_checkpoint(tmp_path / "b/ckpt_best.pt")["iter_num"] == 0
    assert not list((tmp_path / "b").glob("ckpt_0*"))


def test_evaluations_by_epochs(tmp_path, data_dir):
    """624 windows of 32 tokens, 4 a step: 156 steps an epoch, 15.6 a tenth."""
    go(data_dir, tmp_path, block_size=32, eval_epochs=0.1, max_iters=33)
    assert [m["iter"] for m in metrics(tmp_path) if "val_loss" in m] == [0, 16, 32, 33]


@pytest.mark.parametrize("saves", [None, 7])
def test_lines_by_epochs_are_whole_epochs(tmp_path, data_dir, saves, capsys):
    """38 windows of 512 tokens, 4 a step: 9.5 steps an epoch, so that epoch n ends in step
    ceil(9.5 n). Checkpoints follow evaluations, unless save_interval is set."""
    go(data_dir, tmp_path, block_size=512, batch_size=2, max_epochs=2.5, eval_epochs=1,
       keep_last=99, save_interval=saves)
    ends = [0, 10, 19, 24]
    evaluations = [m for m in metrics(tmp_path) if "val_loss" in m]
    assert [m["iter"] for m in evaluations] == ends
    assert [m["epoch"] for m in evaluations] == [0, 1, 2, 2.5]
    text = capsys.readouterr().out
    assert "step 10: epoch 1, train loss" in text and "step 24: epoch 2.5, train loss" in text
    kept = {int(path.stem[5:]) for path in tmp_path.glob("ckpt_0*")}
    assert kept == {*ends[1:]} | ({7, 14, 21} if saves else set())


@pytest.mark.parametrize("schedule, end", [
    ("cosine", ", to 0.001"), ("linear", ", to 0.001"), ("wsd", ", to 0.001"), ("constant", ""),
    ("none", ""), ("plateau", ""), ("step", ", to 0.0025")])
def test_start_up_lines_name_the_rate_and_the_samples(tmp_path, data_dir, capsys, schedule, end):
    go(data_dir, tmp_path / "short", max_iters=2, warmup_iters=9, lr_schedule=schedule)
    assert f"Learning rate: 0.01, {schedule}, warm-up 9 steps, to 0.00" in capsys.readouterr().out
    go(data_dir, tmp_path, max_iters=5, lr_decay_iters=5, lr_schedule=schedule)
    text = capsys.readouterr().out
    assert f"Learning rate: 0.01, {schedule}, warm-up 2 steps{end}\n" in text
    assert "epochs of 2,498 samples" in text
    last = metrics(tmp_path)[-2]
    assert schedule != "step" or last["iter"] == 4 and last["lr"] == 0.0025


def test_a_run_without_checkpoints_says_so(tmp_path, data_dir, capsys):
    for changes, is_warned in ((dict(), True), (dict(save_interval=2), False)):
        go(data_dir, tmp_path, max_iters=3, eval_interval=0, resume="never", **changes)
        said = "no checkpoint before the end of the run" in capsys.readouterr().out
        assert said == is_warned


# -----------------------------------------------------------------------------
# friction

def test_allow_change_names_keys(tmp_path, data_dir):
    go(data_dir, tmp_path, max_iters=2)
    changes = dict(max_iters=3, beta2=0.9, grad_clip=2.0)
    with pytest.raises(CheckpointError) as caught:
        go(data_dir, tmp_path, **changes, allow_change=["beta2"])
    assert "grad_clip: checkpoint has" in str(caught.value) and "beta2" not in str(caught.value)
    assert "--allow_change grad_clip" in str(caught.value)
    assert go(data_dir, tmp_path, **changes, allow_change=["beta2", "grad_clip"])["iter_num"] == 3


def test_allow_change_refuses_an_unknown_name(tmp_path, data_dir):
    for steps in (1, 2):  # a new run, and a resume
        message = refused(data_dir=data_dir, out_dir=tmp_path, max_iters=steps,
                          allow_change="xyz,grad_clp,data,beta2,vocab_size")
        assert ("unknown name xyz, grad_clp; expected keys of `run_train.py --model gpt --help`, "
                "all, data\n") in message
        go(data_dir, tmp_path, max_iters=steps, allow_change=["data"])


def test_init_from_is_not_called_scratch(tmp_path, data_dir, capsys):
    go(data_dir, tmp_path / "a", max_iters=1)
    capsys.readouterr()
    go(data_dir, tmp_path / "b", init_from=str(tmp_path / "a" / "ckpt.pt"), max_iters=1)
    text = capsys.readouterr().out
    assert "Starting from the weights of" in text and "from scratch" not in text


def test_raw_token_files_can_be_given_a_tokenizer(tmp_path, data_dir):
    go(data_dir, tmp_path / "a", max_iters=5, sample_tokens=8, tokenizer="byte", vocab_size=257)
    assert "=== iter 5 ===" in (tmp_path / "a" / "samples.txt").read_text()
    assert load_checkpoint(tmp_path / "a" / "ckpt.pt")["tokenizer"]["kind"] == "byte"
    assert metrics(tmp_path / "a")[-1]["val_bpb"] > 0


def test_no_samples_before_the_first_step(tmp_path, text_dir):
    go(text_dir, tmp_path, vocab_size=257, sample_tokens=8, max_iters=10)
    told = re.findall(r"=== iter (\d+) ===", (tmp_path / "samples.txt").read_text())
    assert told == ["5", "10"]


def test_the_program_runs_from_any_folder_and_knows_home(tmp_path, data_dir):
    home = tmp_path / "home"
    home.mkdir()
    args = tiny_args(max_iters=1, eval_interval=0, vocab_size=256)
    done = python(REPO / "run_train.py", "--config", "train/config_test.yaml", *args,
                  f"--data_dir={data_dir}", "--out_dir=~/o", cwd=tmp_path, env={"HOME": home})
    assert done.returncode == 0, done.stderr
    assert (home / "o" / "ckpt.pt").exists() and not (tmp_path / "out").exists()


def test_a_model_without_values_draws_none(monkeypatch):
    """On the meta device PyTorch imports torch._dynamo for it: 1.3 s of each start of a sample."""
    monkeypatch.setattr(torch.nn.init, "normal_", None)
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=256, n_layer=1, n_head=2, n_embd=32, pos="learned",
                              prev_embedding=True))
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("kind", ["object", "pickle", "tar"])
def test_a_foreign_checkpoint_gives_no_unsafe_advice(tmp_path, kind):
    """as torch itself does"""
    path, state = tmp_path / "x.pt", {"model": {"w": torch.ones(1)}, "odd": decimal.Decimal(1)}
    if kind == "object":
        torch.save(state, path)
    elif kind == "pickle":
        path.write_bytes(pickle.dumps({"model": {"w": 1.5}}, protocol=4))
    else:  # of PyTorch 0.1
        with tarfile.open(path, "w") as tar:
            for name in ("storages", "tensors", "pickle"):
                tar.addfile(tarfile.TarInfo(name))
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(str(path))
    said = str(caught.value).lower().replace("_", " ")
    assert "weights only" not in said and "trust" not in said and "\n" not in said


def test_a_flipped_bit_in_a_foreign_checkpoint_is_found(tmp_path):
    """torch.load itself takes it"""
    values, path = torch.arange(50.0), tmp_path / "x.pt"
    torch.save({"model": {"w": values}}, path)
    content = bytearray(path.read_bytes())
    content[content.find(values.numpy().tobytes()) + 5] ^= 1
    path.write_bytes(content)
    assert not torch.equal(torch.load(path, weights_only=True)["model"]["w"], values)
    with pytest.raises(CheckpointError, match="damaged at .*/data/0"):
        load_checkpoint(str(path))


def test_out_and_data_are_in_the_repository_and_their_content_is_not():
    for folder in ("out", "data/bin"):
        lines = (REPO / folder / ".gitignore").read_text().splitlines()
        assert [line for line in lines if not line.startswith("#")] == ["*", "!.gitignore"]


# -----------------------------------------------------------------------------
# two faults that no test noticed

def test_gradients_are_clipped_at_grad_clip(tmp_path, data_dir):
    """After a step whose norm is above it, all gradients together have the norm grad_clip."""
    seen, config = [], configure(data_dir, tmp_path, grad_clip=0.25)
    with opened(config) as run:
        step = run.scaler.step
        run.scaler.step = lambda optimizer: (seen.append(torch.linalg.vector_norm(torch.stack([
            p.grad.norm() for p in run.raw_model.parameters()]))), step(optimizer))
        train_module.train_step(run)
    [told] = [m["grad_norm"] for m in metrics(tmp_path) if "grad_norm" in m]
    assert told > 0.5 and float(seen[0]) == pytest.approx(0.25, rel=1e-4)


def test_validation_weighs_tokens_not_batches(tmp_path, data_dir):
    """val.bin has 499 windows of 8: 83 batches of 6 and one of 1, whose loss must not count for
    six. By hand, over all windows at once."""
    go(data_dir, tmp_path, batch_size=6, gradient_accumulation_steps=1, eval_iters=1000,
       max_iters=7, eval_interval=7)
    from model.sample import load_model
    model, _ = load_model(str(tmp_path / "ckpt.pt"))
    loader = DataLoader(data_dir, 1000, 8, "val")
    x, y = loader.fixed_batch(0, 1)
    assert len(x) == 499
    with torch.no_grad():
        losses = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none").view(-1, 8)
    told = metrics(tmp_path)[-1]["val_loss"]
    by_batch = torch.stack([part.mean() for part in losses.split(6)]).mean()
    assert abs(float(by_batch - losses.mean())) > 1e-4  # the test could tell
    assert told == pytest.approx(float(losses.mean()), rel=1e-6)


def test_the_mean_of_masked_batches_is_over_items(tmp_path, data_dir):
    """Batches of unequal size and of equal size give one number, however they are cut."""
    numbers = []
    for batch, n in ((6, 84), (50, 10), (499, 1)):
        out = tmp_path / str(batch)
        go(data_dir, out, eval_iters=n, batch_size=batch, gradient_accumulation_steps=1,
           max_iters=0)
        numbers.append(metrics(out)[-1])
    for name in ("val_loss", "val_ppl"):
        assert [m[name] for m in numbers] == pytest.approx([numbers[0][name]] * 3, rel=1e-6)


# -----------------------------------------------------------------------------
# what a review of the rebuilt core found

def test_going_on_from_a_file_makes_its_branch_the_latest(data_dir, tmp_path):
    """Not the abandoned one: a restart and keep_last go by what was written last."""
    out = tmp_path / "out"
    go(data_dir, out, save_interval=4, keep_last=9, max_iters=12)
    go(data_dir, out, "before_opt@6=sigterm", save_interval=0, keep_last=2, max_iters=12,
       resume=str(out / "ckpt_0000004.pt"))
    assert load_checkpoint(out / "ckpt.pt")["iter_num"] == 7
    assert sorted(p.name for p in out.glob("ckpt_0*.pt")) == ["ckpt_0000005.pt", "ckpt_0000007.pt"]


def test_a_model_may_give_numbers_of_numpy(data_dir, tmp_path, monkeypatch):
    """They are in the history that the checkpoint holds, which takes plain types only."""
    numbers = GPT.numbers
    monkeypatch.setattr(GPT, "numbers", lambda self, sums: numbers(self, sums) | dict(
        extra=np.float64(1.5)))
    go(data_dir, tmp_path / "out", max_iters=5)
    assert load_checkpoint(tmp_path / "out" / "ckpt.pt")["progress"]["history"][-1][
        "val_extra"] == 1.5


def test_eval_only_leaves_the_metrics_as_they_are(data_dir, tmp_path):
    out = tmp_path / "out"
    go(data_dir, out, save_interval=5, keep_last=3, max_iters=10)
    before = (out / "metrics.jsonl").read_text()
    go(data_dir, out, max_iters=10, eval_only=True, resume=str(out / "ckpt_0000005.pt"))
    assert (out / "metrics.jsonl").read_text() == before


def test_a_kill_between_the_names_of_a_checkpoint_keeps_the_best(tmp_path, monkeypatch):
    """ckpt_best.pt is there before ckpt.pt says that it was saved."""
    state = dict(model={"w": torch.ones(2)}, optimizer={}, iter_num=1)
    path, best = str(tmp_path / "ckpt.pt"), str(tmp_path / "ckpt_best.pt")

    def killed(source, target):
        if target == path:
            raise KeyboardInterrupt  # as good as a kill: nothing is cleaned up after it
        os.rename(source, target)
    monkeypatch.setattr(checkpoint.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(path, state, [best])
    assert load_checkpoint(best)["iter_num"] == 1 and not os.path.exists(path)


def test_files_of_a_user_stay(data_dir, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.tmp.md").write_text("mine")
    (out / "model.gguf.tmp.123").write_text("of model.convert")
    (out / "ckpt.pt.tmp.123").write_text("left by a killed run")
    go(data_dir, out, max_iters=2)
    assert (out / "notes.tmp.md").exists() and (out / "model.gguf.tmp.123").exists()
    assert not (out / "ckpt.pt.tmp.123").exists()


def test_a_refusal_keeps_the_old_run_in_its_place(data_dir, tmp_path):
    out = tmp_path / "out"
    go(data_dir, out, max_iters=4)
    with pytest.raises(ConfigError, match="does not go with resume: never"):
        go(data_dir, out, resume="never", eval_only=True)
    assert (out / "ckpt.pt").exists()


# -----------------------------------------------------------------------------
# what a day of hard use found

def test_going_on_from_a_file_keeps_the_better_branch(data_dir, tmp_path, capsys):
    """Its checkpoints and its numbers are moved aside, not written over."""
    out = tmp_path / "out"
    go(data_dir, out, save_interval=4, keep_last=9, max_iters=12)
    names = ["ckpt.pt", "ckpt_prev.pt", "ckpt_best.pt", *sorted(
        path.name for path in out.glob("ckpt_0*.pt") if path.name > "ckpt_0000004.pt")]
    later = {n: (out / n).read_bytes() for n in names}
    assert "ckpt_0000012.pt" in names
    lines = (out / "metrics.jsonl").read_text()
    go(data_dir, out, max_iters=6, lr_decay_iters=20, resume=str(out / "ckpt_0000004.pt"))
    assert (f"Moved {', '.join(names)}, which this run would replace, to {out}/old_1"
            in capsys.readouterr().out)
    assert (out / "ckpt_0000004.pt").exists()
    assert {n: (out / "old_1" / n).read_bytes() for n in later} == later
    assert (out / "old_1" / "metrics.jsonl").read_text() == lines
    go(data_dir, out, max_iters=6, resume=str(out / "ckpt.pt"))  # nothing is later than that
    assert not (out / "old_2").exists()


def with_test_data(config, ranks, data=None):
    data = open_token_data(config, ranks)
    data.test = data.val
    data.test.samples = 3
    return data


def test_test_numbers_are_kept_and_made_where_they_are_missing(data_dir, tmp_path, monkeypatch,
                                                               capsys):
    """By a finished run that is started again, also one that was killed before it tested."""
    monkeypatch.setattr(setup, "open_data", with_test_data)
    out = tmp_path / "out"
    first = go(data_dir, out, max_iters=5)
    lines = (out / "metrics.jsonl").read_text()
    assert '"test_loss"' in lines.splitlines()[-1]
    assert go(data_dir, out, max_iters=5)["test"] == first["test"]
    assert (out / "metrics.jsonl").read_text() == lines
    (out / "metrics.jsonl").write_text("".join(lines.splitlines(keepends=True)[:-1]))
    assert "On test data" not in capsys.readouterr().out.split("This run is finished")[1]
    assert go(data_dir, out, max_iters=5)["test"] == first["test"]
    assert (out / "metrics.jsonl").read_text() == lines
    assert "On test data" in capsys.readouterr().out


def test_the_best_checkpoint_of_a_fine_tuning_may_be_its_start(data_dir, tmp_path):
    """A learning rate that ruins a trained model: ckpt_best.pt holds what it started from."""
    go(data_dir, tmp_path / "a", max_iters=20)
    go(data_dir, tmp_path / "b", max_iters=4, eval_interval=2, learning_rate=5.0, warmup_iters=0,
       init_from=str(tmp_path / "a" / "ckpt.pt"))
    start, best = (load_checkpoint(p) for p in (tmp_path / "a" / "ckpt.pt",
                                                tmp_path / "b" / "ckpt_best.pt"))
    assert best["iter_num"] == 0
    assert all(torch.equal(start["model"][n], best["model"][n]) for n in start["model"])


def test_of_equal_best_numbers_the_lower_loss_counts(data_dir, tmp_path, monkeypatch):
    """A share of right answers that stays 0 for long: the first checkpoint is the worst of them."""
    numbers = GPT.numbers
    monkeypatch.setattr(GPT, "numbers", lambda self, sums: numbers(self, sums) | (
        dict(exact=0.0) if "bytes" in sums else {}))
    go(data_dir, tmp_path, max_iters=15, early_stopping_metric="val_exact",
       early_stopping_mode="max")
    best = load_checkpoint(tmp_path / "ckpt_best.pt")
    losses = {line["iter"]: line["val_loss"] for line in metrics(tmp_path) if "val_loss" in line}
    assert best["iter_num"] == min(losses, key=losses.get) == 15


def test_what_continues_a_finished_run_is_what_ended_it(data_dir, tmp_path, capsys):
    for keys, word in ((dict(early_stopping_patience=9), "--max_iters"),
                       (dict(early_stopping_patience=1, early_stopping_min_delta=9.0),
                        "--early_stopping_patience")):
        for _ in range(2):
            go(data_dir, tmp_path / word, max_iters=10 if word == "--max_iters" else 30, **keys)
        assert f"A larger {word} continues it" in capsys.readouterr().out
    for _ in range(2):
        go(data_dir, tmp_path / "epochs", max_epochs=0.01)
    assert "A larger --max_epochs continues it" in capsys.readouterr().out


def test_the_start_stays_the_best_of_a_run_that_was_stopped_before_it(data_dir, tmp_path):
    """Trained weights may be at their best before the first step, also where the run was stopped
    during that evaluation: ckpt_best.pt is the same with and without the stop."""
    start = dict(init_from=str(tmp_path / "base/ckpt.pt"), learning_rate=0.5, max_iters=6,
                 warmup_iters=0, lr_schedule="constant", eval_interval=3)
    go(data_dir, tmp_path / "base", max_iters=20)
    go(data_dir, tmp_path / "whole", **start)
    with opened(configure(data_dir, tmp_path / "stopped", **start)) as run:
        train_module.save(run, last=True)  # as after a signal in the first evaluation
    go(data_dir, tmp_path / "stopped", **start)
    best = [load_checkpoint(tmp_path / name / "ckpt_best.pt")["iter_num"]
            for name in ("whole", "stopped")]
    assert best == [0, 0]


def test_a_job_without_a_name_is_known_by_its_parent(tmp_path, data_dir, monkeypatch):
    """torchrun calls every job "none" that has no --rdzv-id: another one's folder is no restart."""
    go(data_dir, tmp_path, max_iters=3)
    (tmp_path / ".job").write_text("none")
    restarted(monkeypatch, 1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert go(data_dir, tmp_path, resume="never", max_iters=2)["iter_num"] == 2
    assert (tmp_path / "old_1").exists()
    assert (tmp_path / ".job").read_text().split("\n")[0] == f"none {os.getppid()}"


def test_resume_never_killed_during_start_up_spares_the_old_run(tmp_path, data_dir, monkeypatch):
    """The first attempt of the job dies before it has looked into the folder."""
    go(data_dir, tmp_path, max_iters=3)
    old = (tmp_path / "ckpt.pt").read_bytes()
    restarted(monkeypatch, 1)
    assert go(data_dir, tmp_path, resume="never", max_iters=2)["iter_num"] == 2
    assert (tmp_path / "old_1" / "ckpt.pt").read_bytes() == old
    restarted(monkeypatch, 2)  # and from here on the job is its own past
    assert go(data_dir, tmp_path, resume="never", max_iters=4)["iter_num"] == 4
    assert not (tmp_path / "old_2").exists()


@pytest.mark.parametrize("wrong", [
    dict(data_dir="tests/model"), dict(early_stopping_metric="val_x"), dict(lr_groups='{"*": 0}')])
def test_a_refused_run_changes_no_file_of_a_finished_one(tmp_path, data_dir, wrong):
    """out_dir is also as it was after --resume auto."""
    go(data_dir, tmp_path, max_iters=1)

    def contents():
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    before = contents()
    for resume in ("never", "auto"):
        refused(**dict(data_dir=data_dir, out_dir=tmp_path, resume=resume, allow_change="all")
                | wrong)
        assert contents() == before


def test_a_restart_after_a_refused_attempt_spares_the_old_run(tmp_path, data_dir, monkeypatch):
    """The job before had the same --rdzv_id, and the first attempt of this one was refused."""
    restarted(monkeypatch, 0)
    go(data_dir, tmp_path, max_iters=3)
    with pytest.raises(SetupError):
        go(data_dir, tmp_path, resume="never", early_stopping_metric="val_x")
    restarted(monkeypatch, 1)
    assert go(data_dir, tmp_path, resume="never", max_iters=2)["iter_num"] == 2
    assert (tmp_path / "old_1" / "ckpt.pt").exists()


def test_a_restart_reads_the_file_that_no_attempt_has_read(tmp_path, data_dir, monkeypatch):
    go(data_dir, tmp_path / "a", max_iters=3)
    restarted(monkeypatch, 1)
    out = tmp_path / "b"
    assert go(data_dir, out, resume=str(tmp_path / "a/ckpt.pt"), max_iters=5)["iter_num"] == 5
    assert "Resuming from" in (out / "train.log").read_text()


def test_an_evaluation_does_not_replace_the_metrics_of_a_run(tmp_path, data_dir):
    go(data_dir, tmp_path, max_iters=3)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="does not go with resume: never"):
        go(data_dir, tmp_path, eval_only=True, resume="never",
           init_from=str(tmp_path / "ckpt.pt"))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_pipe_is_no_checkpoint(tmp_path):
    os.mkfifo(tmp_path / "ckpt.pt")
    with pytest.raises(CheckpointError, match="empty"):
        load_checkpoint(tmp_path / "ckpt.pt")


@pytest.mark.parametrize("optimizer, more, message", [
    (lambda state: {}, {}, "not the rest of a run .no optimizer"),
    (lambda state: state | {"state": dict.fromkeys(state["state"], 1)}, {},
     "lacks the optimizer state of ")])
def test_a_strange_optimizer_state_is_one_message(tmp_path, data_dir, optimizer, more, message):
    go(data_dir, tmp_path, max_iters=3)
    state = load_checkpoint(tmp_path / "ckpt.pt")
    state.pop("format_version")
    torch.save(state | more | {"optimizer": optimizer(state["optimizer"])}, tmp_path / "ckpt.pt")
    os.unlink(tmp_path / "ckpt_prev.pt") if (tmp_path / "ckpt_prev.pt").exists() else None
    with pytest.raises(CheckpointError, match=message):
        go(data_dir, tmp_path, max_iters=6)


def test_a_damaged_checkpoint_is_archived_before_an_earlier_one_is_continued(tmp_path, data_dir):
    go(data_dir, tmp_path, max_iters=6, save_interval=2, keep_last=9)
    (tmp_path / "ckpt.pt").write_bytes(b"damaged")
    go(data_dir, tmp_path, max_iters=6, resume=str(tmp_path / "ckpt_0000002.pt"))
    assert (tmp_path / "old_1" / "ckpt.pt").read_bytes() == b"damaged"
    assert load_checkpoint(tmp_path / "ckpt_prev.pt")["iter_num"] >= 2


def test_a_list_given_twice_is_refused():
    with pytest.raises(ConfigError, match="tracker is set twice"):
        load_config(None, ["--tracker", "mlflow", "--tracker", "tensorboard"])
