"""The memory that --dry_run prints, beside the peak resident memory of real runs."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from conftest import tiny_args
from processes import in_ranks_of, python

import run_train
from train.config import TrainConfig
from train.distributed import Ranks
from train.setup import open_data
from train.system import load_model_type
from train.tools import dry_run

SHAPE = ["--n_layer", "2", "--n_head", "4", "--n_embd", "256", "--n_hidden", "1024"]
CASES = {
    "gpt": ("config_test.yaml", "--batch_size=12", "--block_size=256", *SHAPE),
    "chat": ("configs/chat.yaml", "--init_from=scratch", "--batch_size=12", "--block_size=512",
             "--optimizer=adamw", *SHAPE),
    "classifier": ("configs/classifier.yaml", "--batch_size=32", "--early_stopping_patience=0",
                   "--early_stopping_metric=val_loss", "--early_stopping_mode=min",
                   "--lr_schedule=constant", *SHAPE),
    "moe": ("configs/moe.yaml", "--batch_size=128", *SHAPE),
    "grpo": ("configs/grpo.yaml", "--batch_size=16", "--group_size=8", "--answer_tokens=24",
             "--reward={0}/reward.py", "--init_from={0}/talker/ckpt.pt",
             "--early_stopping_metric=val_loss", "--early_stopping_mode=min")}
STOPPING = ("--early_stopping_patience=0", "--early_stopping_metric=val_loss",
            "--early_stopping_mode=min", "--lr_schedule=constant")
# What is read before the model is built needs most of the memory.
READ_FIRST = {
    "distill": ("configs/distill.yaml", "--teacher={0}/large/ckpt.pt", "--batch_size=8",
                "--block_size=128", *SHAPE),
    "sae": ("configs/sae.yaml", "--backbone={0}/large/ckpt.pt", "--d_sae=4096", "--batch_size=8",
            *STOPPING),
    "autoencoder": ("configs/autoencoder.yaml", *STOPPING)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data for each of CASES."""
    folder = tmp_path_factory.mktemp("dry_run")
    (folder / "text.txt").write_text("Once upon a time there was a file.\n" * 5000)
    rows = [dict(text=f"{i} " + f"a {color} thing, " * 8, label=color, evidence=color)
            for i in range(600) for color in ("red", "blue")]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for command in (f"data.prepare {folder}/text.txt --tokenizer byte --out {folder}/gpt",
                    f"data.prepare.chat example --tokenizer {folder}/gpt --out {folder}/chat",
                    f"data.prepare.prompts example --tokenizer {folder}/gpt --out {folder}/grpo "
                    "--num_samples 500",
                    f"data.prepare.labels {folder}/rows.jsonl --tokenizer byte --out "
                    f"{folder}/classifier"):
        assert python("-m", *command.split()).returncode == 0, command
    (folder / "reward.py").write_text("def reward(prompt, answer, row):\n    return len(answer)\n")
    run(folder, "chat", CASES["chat"], "--n_embd=128", "--n_hidden=512", "--batch_size=1",
        "--max_iters=1", "--max_epochs=none", "--eval_interval=0", "--eval_epochs=none",
        "--warmup_epochs=none", "--out_dir", folder / "talker")
    return folder


def run(folder, name, case, *args):
    config, *keys = case
    data = folder / dict(moe="gpt", distill="gpt", sae="gpt").get(name, name)
    keys = [key.format(folder) for key in keys]
    done = python("run_train.py", "--config", f"train/{config}", "--data_dir", data,
                  "--device=cpu", "--compile=false", "--sample_tokens=0", *keys, *args, merged=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


def measure_run(folder, name, case):
    run(folder, name, case, "--max_iters=3", "--max_epochs=none", "--eval_interval=0",
        "--eval_epochs=none", "--warmup_epochs=none", "--log_interval=1", "--resume=never",
        "--out_dir", folder / "out")
    records = map(json.loads, (folder / "out" / "metrics.jsonl").read_text().splitlines())
    return max(r.get("memory_mib", 0) for r in records)


@pytest.mark.ci
@pytest.mark.parametrize("name", [name if name == "classifier" else
                                  pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_the_estimate_is_what_a_run_needs(name, folder):
    compare(folder, name, CASES[name])


def compare(folder, name, case):
    printed = run(folder, name, case, "--dry_run")
    total = int(re.search(r"Memory, MiB: .* total ([\d,]+) of", printed)[1].replace(",", ""))
    assert total == pytest.approx(measure_run(folder, name, case), rel=0.15)


def test_averages_are_not_in_the_measured_step(data_dir, monkeypatch):
    """They are added to the estimate: what the step needs besides does not depend on them."""
    monkeypatch.setattr(dry_run, "peak_memory", lambda device: 1000)
    config = TrainConfig(data_dir=str(data_dir), vocab_size=257, n_layer=1, n_head=1, n_embd=16,
                         block_size=16, batch_size=1)
    data = open_data(config, Ranks())
    rest = [dry_run.measure_step(config.replace(ema=ema), data, Ranks(), torch.float32, False,
                                 2**40)[1] for ema in (0.0, 0.9)]
    P = sum(p.numel() for p in load_model_type("gpt").build_model(config, data).parameters())
    assert rest == [1000 * 2**20 - 16 * P] * 2  # weights, gradients, two moments


def test_a_delay_of_the_first_measurement_makes_no_time_negative(data_dir, monkeypatch):
    times = iter([0.05, 0.0001, 0.0002])  # one sample, several, the update
    monkeypatch.setattr(dry_run, "timed", lambda work, device: [work(), next(times)][1])
    config = TrainConfig(data_dir=str(data_dir), vocab_size=257, n_layer=1, n_head=1, n_embd=16,
                         block_size=16, batch_size=400)
    seconds, _ = dry_run.measure_step(config, open_data(config, Ranks()), Ranks(), torch.float32,
                                      False, 2**28)
    assert seconds > 0


def test_the_mesh_of_a_sharded_run_is_printed(data_dir):
    code, text = in_ranks_of(2, "run_train.py", "--config=train/config_test.yaml", "--dry_run",
                             "--vocab_size=256", f"--data_dir={data_dir}", "--distributed=fsdp")
    assert code == 0 and "Mesh: 1 node x 2 processes: shard 2\n" in text


def test_a_folder_whose_name_is_not_utf8_is_printed(data_dir, tmp_path, capsys):
    folder = shutil.copytree(data_dir, tmp_path / "d\udcff")
    changes = dict(data_dir=folder, vocab_size=256, run_name="r\udcff", out_dir="x\udcff")
    assert run_train.main(tiny_args(**changes, dry_run=True)) == 0
    assert "d\\udcff" in capsys.readouterr().out


def test_the_shape_of_the_weights_to_start_from_is_estimated(data_dir, tmp_path, capsys):
    assert run_train.main(tiny_args(data_dir=data_dir, out_dir=tmp_path, max_iters=1)) == 0
    size = re.search(r"Model gpt: [\d,]+ parameters", capsys.readouterr().out)[0]
    assert run_train.main(["--config=train/config_test.yaml", f"--init_from={tmp_path}/ckpt.pt",
                           f"--data_dir={data_dir}", "--dry_run"]) == 0
    assert size in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", READ_FIRST)
def test_what_is_read_before_the_model_is_part_of_the_estimate(name, folder):
    if name == "autoencoder":
        arrays = np.random.default_rng(0).standard_normal((3000, 1700), np.float32)
        for file, columns in dict(x=slice(1500), y=slice(1500, None)).items():
            np.save(folder / f"{file}.npy", arrays[:, columns])
        made = python("-m", "data.prepare.features", folder / "x.npy", "--target",
                      folder / "y.npy", "--out", folder / name)
        assert made.returncode == 0, made.stderr
    else:
        run(folder, "gpt", ("config_test.yaml", "--block_size=256", "--n_layer=6", "--n_head=8",
                            "--n_embd=768", "--n_hidden=3072"), "--max_iters=1", "--batch_size=1",
            "--eval_interval=0", "--resume=never", "--out_dir", folder / "large")
    compare(folder, name, READ_FIRST[name])
