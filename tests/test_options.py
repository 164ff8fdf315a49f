"""The options of a run, through the command line: schedules, stopping, parameter groups,
reproducibility, the dry run, advice when it goes wrong, eval_only and init_from."""

import contextlib
import hashlib
import io
import json
import random
import re
from dataclasses import fields

import numpy as np
import pytest
import torch
import yaml
from conftest import TINY, tiny_args
from faulty import faults
from runs import assert_same_file, metrics

import run_train
from model.gpt import GPT, GPTConfig
from train import robust
from train.base.errors import SetupError
from train.checkpoint import load_checkpoint
from train.config import FIELDS, START_KEYS, TrainConfig, load_config
from train.device import describe_device
from train.distributed import get_device, set_seed
from train.lr_scheduler import EarlyStopping, get_lr
from train.train import train

SMALL = dict(vocab_size=256, n_layer=1, n_embd=16, n_hidden=32, max_iters=8, eval_interval=2,
             eval_iters=1)


def command(*args, **changes):
    """python run_train.py ARGS in this process: (exit code, stdout, stderr)."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_train.main([*tiny_args(**SMALL | changes), *map(str, args)])
    return code, out.getvalue(), err.getvalue()


@pytest.fixture
def go(tmp_path, data_dir):
    """go(name, ...) trains in tmp_path/name by a command that must succeed; its output."""
    def run(name, *args, **changes):
        places = dict(data_dir=data_dir, out_dir=tmp_path / name)
        code, out, err = command(*args, **places | changes)
        assert code == 0, err
        return out
    return run


@pytest.fixture(scope="session")
def hopeless(tmp_path_factory, data_dir):
    """Data whose validation part has every second byte replaced by one that training never sees:
    its loss rises as the other falls."""
    folder = tmp_path_factory.mktemp("hopeless")
    (folder / "train.bin").write_bytes((data_dir / "train.bin").read_bytes())
    tokens = np.fromfile(data_dir / "val.bin", "<u2")
    tokens[1::2] = 200
    tokens.tofile(folder / "val.bin")
    return folder


def rates(folder):
    return [m["lr"] for m in metrics(folder) if "loss" in m]


def checkpoint(folder):
    return torch.load(folder / "ckpt.pt", weights_only=True)


# -----------------------------------------------------------------------------
# schedules

@pytest.mark.parametrize("it, expected", [
    (0, 6e-4 / 201), (99, 6e-4 * 100 / 201), (199, 6e-4 * 200 / 201), (200, 6e-4),
    (1400, 6e-5 + (2 + 2**0.5) / 4 * 5.4e-4), (2600, 3.3e-4), (4999, 6e-5), (5000, 6e-5),
    (9999, 6e-5)])
def test_cosine_of_the_production_config(it, expected):
    c = load_config("train/config.yaml")
    assert get_lr(it, c) == pytest.approx(expected, rel=1e-4)


SCHEDULES = dict(  # warm-up 2, 8 steps, from 0.01 to 0.001
    cosine=[.01, .00939711, .00775, .0055, .00325, .00160289],
    linear=[.01, .0085, .007, .0055, .004, .0025], constant=[.01] * 6, plateau=[.01] * 6,
    none=[.01] * 6,
    wsd=[.01, .01, .01, .00775, .0055, .00325], step=[.01, .01, .005, .005, .0025, .0025])


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_run_follows_its_schedule(name, go, tmp_path):
    assert set(SCHEDULES) == set(FIELDS["lr_schedule"].metadata["choices"])
    go("o", lr_schedule=name, min_lr=0.001, step_iters=2, plateau_patience=9)
    expected = [.01 / 3, .02 / 3, *SCHEDULES[name]]
    assert rates(tmp_path / "o") == pytest.approx(expected, rel=1e-5)
    used = checkpoint(tmp_path / "o")["optimizer"]["param_groups"][0]["lr"]
    assert used == pytest.approx(expected[-1], rel=1e-5)


def test_the_end_of_every_schedule():
    for name, end in dict(cosine=.1, linear=.1, wsd=.1, step=.1, constant=1, plateau=1,
                          none=1).items():
        c = TrainConfig(learning_rate=1.0, min_lr=.1, lr_schedule=name, step_iters=4,
                        max_iters=20, warmup_iters=4)
        assert get_lr(20, c) == end or name == "step"
        assert get_lr(10**6, c) == end and get_lr(4, c) == 1
    c = TrainConfig(lr_schedule="step", max_iters=30, warmup_iters=0, learning_rate=1.0)
    assert [get_lr(it, c) for it in (9, 10, 20, 29)] == [1, .5, .25, .25]  # thirds by default


def test_lengths_in_epochs_and_ratios(go, tmp_path):
    """128 of 20,000 tokens a step: 156 steps an epoch."""
    out = go("o", max_epochs=0.045, warmup_ratio=0.5, lr_schedule="constant")
    assert "0.04 epochs" in out or "0.05 epochs" in out
    assert rates(tmp_path / "o") == pytest.approx([.002, .004, .006, .008, .01, .01, .01, .01][:8])
    go("p", warmup_epochs=3 / 156, lr_schedule="constant")
    assert rates(tmp_path / "p")[:4] == pytest.approx([.0025, .005, .0075, .01])


PLATEAU = dict(lr_schedule="plateau", plateau_patience=1, warmup_iters=0)


def test_plateau_halves_the_rate_and_resumes_exactly(go, tmp_path, hopeless):
    out = go("a", data_dir=hopeless, max_iters=12, **PLATEAU)
    assert out.count("val_loss has not improved for 2 evaluations: learning rate x") == 3
    assert rates(tmp_path / "a") == [.01] * 4 + [.005] * 4 + [.0025] * 4
    for max_iters in (6, 12):  # stops with one bad evaluation counted
        go("b", data_dir=hopeless, max_iters=max_iters, **PLATEAU)
    assert rates(tmp_path / "b") == rates(tmp_path / "a")
    assert_same_file(tmp_path / "a/ckpt.pt", tmp_path / "b/ckpt.pt")


def test_another_schedule_does_not_keep_the_scale_of_plateau(go, tmp_path, hopeless):
    go("o", data_dir=hopeless, max_iters=6, **PLATEAU)
    assert rates(tmp_path / "o")[-1] == .005
    go("o", data_dir=hopeless, **PLATEAU | dict(lr_schedule="constant", allow_change="lr_schedule"))
    assert rates(tmp_path / "o")[-2:] == [.01] * 2


# -----------------------------------------------------------------------------
# early stopping

@pytest.mark.parametrize("bad, changes, stops_at", [
    (True, dict(early_stopping_patience=2), 6),
    (True, dict(early_stopping_patience=3, early_stopping_metric="val_ppl"), None),
    (True, dict(early_stopping_patience=1, early_stopping_mode="max"), None),
    (False, dict(early_stopping_patience=2, early_stopping_min_delta=100.0), 6),
    (False, dict(early_stopping_patience=2), None), (True, {}, None)])
def test_early_stopping(go, tmp_path, data_dir, hopeless, bad, changes, stops_at):
    out = go("o", data_dir=hopeless if bad else data_dir, **changes)
    assert checkpoint(tmp_path / "o")["iter_num"] == (stops_at or 8)
    assert ("early stopping: no better" in out) == (stops_at is not None)
    assert ("warning: ckpt_best.pt has the highest val_loss" in out) == (
        "early_stopping_mode" in changes)
    assert ("Best checkpoint: lowest val_ppl" in out) == ("early_stopping_metric" in changes)


def test_early_stopping_resumes_exactly(go, tmp_path, hopeless):
    same = dict(data_dir=hopeless, early_stopping_patience=4, lr_schedule="constant")
    go("a", max_iters=20, **same)
    assert checkpoint(tmp_path / "a")["iter_num"] == 10
    for max_iters in (4, 20):
        out = go("b", max_iters=max_iters, **same)
    assert_same_file(tmp_path / "a/ckpt.pt", tmp_path / "b/ckpt.pt")
    again = go("b", max_iters=20, **same)
    assert "is finished at iter 10: early stopping" in again and "iter 10: loss" not in again
    out = go("b", max_iters=20, **same | dict(early_stopping_patience=5))
    assert "early stopping: no better val_loss in 5 evaluations" in out
    assert checkpoint(tmp_path / "b")["iter_num"] == 12


def test_a_better_value_forgets_the_bad_ones_before_it():
    stopping = EarlyStopping(2)
    assert [stopping.check(v) for v in (3, 4, 2, 3, 1, 2, 2)] == [False] * 6 + [True]
    highest = EarlyStopping(2, mode="max")
    assert [highest.check(v) for v in (3, 2, 4, 4, 4)] == [False] * 4 + [True]


def test_early_stopping_on_an_unknown_number_is_refused(tmp_path, data_dir):
    code, _, err = command(data_dir=data_dir, out_dir=tmp_path, early_stopping_patience=2,
                           early_stopping_metric="val_acc")
    assert code == 2 and "'val_acc'; choose one of val_loss, val_ppl" in err


# -----------------------------------------------------------------------------
# parameter groups

def test_lr_groups(go, tmp_path):
    groups = "{wte: 0, attn: 0.5, mlp: {learning_rate: 1e-3, weight_decay: 0.7}}"
    go("start", max_iters=0)
    out = go("o", f"--lr_groups={groups}", max_iters=1, warmup_iters=0)
    assert "Frozen: 1 tensors (4,096 params)" in out
    before, after = checkpoint(tmp_path / "start")["model"], checkpoint(tmp_path / "o")
    assert torch.equal(before["wte.weight"], after["model"]["wte.weight"])
    seen = {n: g for g in after["optimizer"]["param_groups"] for n in g["params"]}
    assert "wte.weight" not in seen
    for name, group in seen.items():
        rate = .005 if "attn" in name else .001 if "mlp" in name else .01
        decay = .7 if "mlp" in name else .1 if before[name].dim() > 1 else 0.
        assert (group["initial_lr"], group["weight_decay"]) == (rate, decay), name
        # The first step of AdamW moves a weight by about its rate.
        moved = (after["model"][name] - before[name] * (1 - rate * decay)).abs().max().item()
        assert moved == pytest.approx(rate, rel=0.02), name
    assert len({(g["initial_lr"], g["weight_decay"]) for g in seen.values()}) >= 3


@pytest.mark.parametrize("groups, words", [
    ("{lora: 2}", "no trained parameter matches 'lora'"), ("{wte: -1}", "at least 0"),
    ("{wte: {rate: 1}}", "learning_rate or lr_mult, and weight_decay"),
    ("{wte: big}", "expected a mapping such as")])
def test_wrong_lr_groups_are_refused(tmp_path, data_dir, groups, words):
    code, _, err = command(f"--lr_groups={groups}", data_dir=data_dir, out_dir=tmp_path)
    assert code == 2 and "lr_groups" in err and words in err and "Traceback" not in err


# -----------------------------------------------------------------------------
# reproducibility

def test_set_seed_and_get_device(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    draws = []
    for _ in range(2):
        set_seed(5, deterministic=True)
        draws.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert draws[0] == draws[1] and torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    set_seed(5, cudnn_benchmark=False)
    assert not torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
    assert get_device("cpu") == torch.device("cpu")
    assert get_device().type in ("cpu", "cuda", "mps")
    with pytest.raises(SetupError, match="'tpu' for 1 ranks: expected auto, cpu"):
        get_device("tpu")


def test_get_device_takes_what_is_asked_for_and_reports_it(monkeypatch, capsys):
    """device_id is the GPU of a process without ranks; report says the start-up line of a run."""
    assert get_device("cpu", report=True) == torch.device("cpu")
    assert capsys.readouterr().out == f"Device: {describe_device(torch.device('cpu'))}\n"
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert get_device() == torch.device("cuda", 0) and get_device(local_rank=1).index == 1
    assert get_device(device_id=3) == get_device("cuda", device_id=3) == torch.device("cuda", 3)
    assert get_device(prefer_cuda=False) == torch.device("cpu")
    assert get_device("cuda", prefer_cuda=False).type == "cuda" and chosen == [0, 1, 3, 3, 0]
    with pytest.raises(SetupError, match="5 GPUs are needed"):
        get_device(device_id=4)
    assert capsys.readouterr().out == ""


def test_deterministic_gives_the_same_bits_twice(go, tmp_path):
    for name in "ab":
        go(name, "--deterministic", dropout=0.2, dtype="bfloat16")
    assert torch.are_deterministic_algorithms_enabled()
    assert_same_file(tmp_path / "a/ckpt.pt", tmp_path / "b/ckpt.pt")
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")
    set_seed(1)


def test_the_files_of_a_run_repeat_it(go, tmp_path):
    groups = "--lr_groups={mlp: {lr_mult: 0.5}}"
    go("a", groups, dropout=0.1, sample_prompts="[one, 'two: 2']")
    with contextlib.redirect_stdout(io.StringIO()):
        code = run_train.main(["--config", str(tmp_path / "a/config.yaml"), "--out_dir",
                               str(tmp_path / "b")])
        record = json.loads((tmp_path / "a/training_args.json").read_text())
        train(load_config(None, record["arguments"] | dict(out_dir=str(tmp_path / "c"))))
    assert code == 0
    for name in "bc":
        assert_same_file(tmp_path / "a/ckpt.pt", tmp_path / name / "ckpt.pt")
        assert metrics(tmp_path / "a") == metrics(tmp_path / name)
    assert {"git_commit", "git_dirty", "host", "command", "versions"} <= record.keys()
    assert torch.__version__.startswith(record["versions"]["torch"])  # without +cu132
    assert (record["device"], record["world_size"]) == ("cpu", 1)


def test_print_config_reads_back_the_same(tmp_path):
    args = ["--n_layer=3", "--lr_groups={wte: 0.5, h: {weight_decay: 0}}", "--run_name=a: b # c",
            "--sample_prompts=['x', 'y, z']", "--min_lr=1e-5", "--tracker=[wandb]", "--bias"]
    code, out, _ = command("--print_config", *args)
    assert code == 0 and re.search(r"^n_layer: 3 +# command line$", out, re.M)
    assert re.search(r"^data_dir: data/bin/stdlib +# train/config.yaml:\d+$", out, re.M)
    (tmp_path / "c.yaml").write_text(out)
    expected = load_config("train/config.yaml", [*tiny_args(**SMALL), *args])
    assert load_config(tmp_path / "c.yaml") == expected


# -----------------------------------------------------------------------------
# before the run

def test_dry_run_estimates_and_writes_nothing(tmp_path, data_dir, monkeypatch):
    before = {p.name: p.stat().st_mtime_ns for p in data_dir.iterdir()}
    code, out, _ = command("--dry_run", data_dir=data_dir, out_dir=tmp_path / "o")
    assert code == 0 and not list(tmp_path.iterdir())
    assert {p.name: p.stat().st_mtime_ns for p in data_dir.iterdir()} == before
    assert re.search(r"Model gpt: [\d,]+ parameters", out) and ": 128 tokens per step" in out
    assert "Mesh" not in out  # of one process
    assert re.search(r"Memory, MiB: program [\d,]+, weights \d+, gradients \d+, optimizer \d+, "
                     r"activations and data [\d,]+; total [\d,]+ of [\d,]+", out)
    assert re.search(r"Fits. [\d,]+ ms per step, [\d,]+ tok/s", out)
    for steps in ("8", "5,000", "50,000", "500,000"):
        assert re.search(rf"^ +{steps} steps: +\S+ tok, [\day:s, ]+$", out, re.M)
    monkeypatch.setattr("train.tools.dry_run.memory_available", lambda: 1000)
    code, _, err = command("--dry-run", data_dir=data_dir, out_dir=tmp_path / "o")
    assert code == 1 and err.startswith("Does not fit: lower batch_size")


@pytest.mark.parametrize("key", ["init_from", "backbone"])
def test_what_is_shown_before_a_run_has_the_shape_of_its_weights(go, tmp_path, data_dir, key):
    """A model of one layer, not the default's 16; and a file that is missing is refused."""
    go("a", tokenizer="byte", vocab_size=257, max_iters=0)
    shape = {f.name for f in fields(GPTConfig)}
    settings = {k: v for k, v in (TINY | SMALL).items() if k not in shape} | dict(
        data_dir=data_dir, out_dir=tmp_path / "b", tokenizer="byte", model="gpt")
    settings |= dict(model="lora") if key == "backbone" else {}

    def shown(how, path):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run_train.main([*(f"--{k}={v}" for k, v in settings.items()), how,
                                   f"--{key}={path}"])
        return code, out.getvalue() + err.getvalue()
    path = tmp_path / "a/ckpt.pt"
    code, text = shown("--print_config", path)
    assert code == 0 and f"# The shape of {str(path)!r} replaces the defaults" in text, text
    code, text = shown("--dry_run", path)
    count = GPT(GPTConfig(**load_checkpoint(path)["model_args"])).state_dict().values()
    assert code == 0 and ", weights 0, " in text, text  # of 16 layers of 384: 144 MiB
    assert key == "backbone" or f": {sum(t.numel() for t in count):,} parameters" in text, text
    code, text = shown("--dry_run", tmp_path / "none.pt")
    assert code == 2 and "none.pt: no such file" in text and "Traceback" not in text
    assert not (tmp_path / "b").exists()


def test_dry_run_of_a_model_larger_than_any_memory(tmp_path, data_dir):
    huge = dict(n_layer=50, n_embd=131072, n_hidden=524288)  # 0.2 PiB, never built
    code, _, err = command("--dry_run", data_dir=data_dir, out_dir=tmp_path / "o", **huge)
    assert code == 1 and err.startswith("Does not fit: lower batch_size")


# -----------------------------------------------------------------------------
# when it goes wrong

@pytest.fixture
def small_memory(monkeypatch):
    """A device that holds micro-batches of two sequences."""
    forward = GPT.forward

    def limited(model, idx, *args, **kwargs):
        if idx.shape[0] > 2:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return forward(model, idx, *args, **kwargs)
    monkeypatch.setattr(GPT, "forward", limited)


def test_out_of_memory_names_the_pair_that_keeps_the_global_batch(tmp_path, data_dir, small_memory):
    code, _, err = command(data_dir=data_dir, out_dir=tmp_path)
    assert code == 1 and "Tried to allocate 2.00 GiB" in err
    last = err.strip().split("\n")[-1]
    for word in ("--batch_size 2 --gradient_accumulation_steps 4", "--gradient_checkpointing",
                 "--dry_run"):
        assert word in last
    _, _, err = command(data_dir=data_dir, out_dir=tmp_path, batch_size=3)
    assert "--batch_size 2 --gradient_accumulation_steps 3 (the same global batch)" in err


def test_bad_numbers_say_where_and_what_to_change(tmp_path, data_dir):
    with faults("bad_loss@3=nan"):
        code, _, err = command(data_dir=data_dir, out_dir=tmp_path)
    assert code == 1 and err.startswith("iter 3: not finite: loss nan")
    assert "--learning_rate" in err and "--grad_clip" in err and "Traceback" not in err
    assert checkpoint(tmp_path)["iter_num"] == 2 and str(tmp_path / "ckpt.pt") in err


@pytest.mark.parametrize("args, words", [
    (dict(dtype="float8"), "dtype: must be one of auto, bfloat16, float16, float32"),
    (dict(device="tpu"), "expected auto, cpu, mps, cuda"),
    (dict(model="gtp"), "there is no model type model/gtp.py"),
    pytest.param(dict(device="cuda"), "use --device cpu", marks=pytest.mark.skipif(
        torch.cuda.is_available(), reason="there is a GPU"))])
def test_what_is_missing_ends_with_one_message(tmp_path, data_dir, args, words):
    code, _, err = command(data_dir=data_dir, out_dir=tmp_path / "o", **args)
    assert code == 2 and words in err and "Traceback" not in err and not (tmp_path / "o").exists()


def test_advice_for_nccl_and_lost_ranks():
    for error, words in (("NCCL error in: x.cpp", "NCCL_DEBUG=INFO"),
                         ("NCCL error in: x.cpp: Cuda failure 2 'out of memory'", "Out of memory."),
                         ("CUDA error: out of memory", "Out of memory."),
                         ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling", "Out of memory."),
                         ("Connection reset by peer", "--max-restarts")):
        assert words in robust.suggest_fix(RuntimeError(error), TrainConfig())
    assert robust.suggest_fix(ValueError("x"), TrainConfig()) == ""


@pytest.mark.parametrize("batch, accumulation, ranks, advice", [
    (16, 4, "", "--batch_size 8 --gradient_accumulation_steps 8 (the same global batch), then"),
    (16, 4, "8", "--batch_size 4 --gradient_accumulation_steps 16 "),  # 8 was the micro-batch
    (3, 4, "", "--batch_size 2 --gradient_accumulation_steps 6 "),
    (1, 4, "", "--gradient_checkpointing true, then ")])
def test_advice_for_memory_makes_the_micro_batch_smaller(monkeypatch, batch, accumulation, ranks,
                                                         advice):
    monkeypatch.setenv("WORLD_SIZE", ranks)
    c = TrainConfig(batch_size=batch, gradient_accumulation_steps=accumulation)
    assert robust.suggest_fix(MemoryError(), c).startswith(f"Out of memory. Try {advice}")


# -----------------------------------------------------------------------------
# evaluation only, other weights

def test_eval_only_tells_the_numbers_and_changes_nothing(go, tmp_path):
    go("o")

    def files():
        return {p.name: hashlib.sha256(p.read_bytes()).hexdigest()
                for p in (tmp_path / "o").iterdir() if p.name not in (".lock", "train.log")}
    before, val_loss = files(), metrics(tmp_path / "o")[-1]["val_loss"]
    out = go("o", "--eval_only")
    assert f"val loss {val_loss:.4f}" in out and "iter 8:" not in out
    assert files() == before
    log = (tmp_path / "o/train.log").read_text()
    assert log.count("Loading data from") == 2 and log.count("step 8: val loss") == 1
    out = go("o", "--eval_only", eval_iters=4)
    assert "step 8: val loss" in out and f"val loss {val_loss:.4f}" not in out
    code, _, err = command("--eval_only", out_dir=tmp_path / "o", eval_interval=0)
    assert code == 2 and "eval_only" in err


def test_init_from_starts_from_other_weights(go, tmp_path, data_dir):
    go("a")
    last = metrics(tmp_path / "a")[-1]["val_loss"]
    out = go("b", "--init_from", tmp_path / "a/ckpt.pt", learning_rate=1e-3)
    assert "Starting from the weights of" in out
    first = metrics(tmp_path / "b")[0]
    assert first["iter"] == 0 and first["val_loss"] == last
    assert checkpoint(tmp_path / "b")["iter_num"] == 8
    for name, words in (("none.pt", "none.pt"), ("a/ckpt.pt", "n_embd: it has 16")):
        code, _, err = command("--init_from", tmp_path / name, data_dir=data_dir, n_embd=32,
                               out_dir=tmp_path / "c")
        assert code == 2 and words in err and "Traceback" not in err


def test_config_files_of_runs_are_plain_yaml(go, tmp_path):
    go("a", "--lr_groups={wte: 0.5}")
    values = yaml.safe_load((tmp_path / "a/config.yaml").read_text())
    assert values.keys() == FIELDS.keys() - START_KEYS and values["lr_groups"] == {"wte": 0.5}


def test_keys_without_effect_are_one_line_at_the_start(go):
    out = go("o", wsd_decay=0.9, early_stopping_min_delta=0.1, max_iters=1)
    assert out.count("Keys without effect: wsd_decay (needs lr_schedule=wsd), "
                     "early_stopping_min_delta (needs early_stopping_patience)\n") == 1
    assert "without effect" not in go("p", max_iters=1)


# -----------------------------------------------------------------------------
# epochs

def test_a_default_length_of_many_epochs_is_refused_before_a_file_is_written(tmp_path, data_dir):
    """8 of 1,248 samples per step: 31,200 steps are 200 epochs."""
    code, out, err = command(data_dir=data_dir, out_dir=tmp_path / "o", max_iters=31_201)
    assert code == 2 and "are 200 epochs of the 1,248 samples" in err and "--max_epochs 3" in err
    assert not (tmp_path / "o" / "train.log").exists()
    code, out, err = command("--dry_run", data_dir=data_dir, max_iters=31_201)
    assert code == 2 and "--max_epochs 3" in err
    code, out, err = command("--dry_run", data_dir=data_dir, max_iters=31_200)
    assert code == 0 and "warning: every sample is used 200 times" in out
    code, out, err = command("--dry_run", data_dir=data_dir, max_epochs=300)
    assert code == 0 and "300.00 epochs" in out and "warning: every" not in out
