"""--model autoencoder and data/prepare/features.py: the data, the losses, the numbers, the run."""

import json
import math
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from browser import soon
from conftest import full_disk, run
from processes import REPO, python
from runs import (
    SMALL,
    WAYS,
    Program,
    assert_keys_change_only,
    assert_same,
    assert_two_ranks_equal_one,
    configure,
    go,
    metrics,
    on_two_ranks,
    run_program,
    slow,
    tensors,
)

from data.meta import read_meta
from data.prepare import features
from data.rows import runs_in_val
from model.autoencoder import MultimodalAutoencoder, open_data
from model.autoencoder.__main__ import evaluate_rows, main
from model.autoencoder.data import (
    add_delays,
    fit_linear_path,
    open_features,
    read_features_meta,
)
from model.autoencoder.losses import (
    combined_loss,
    correlation_sums,
    correlations,
    matching_loss,
    reconstruction_losses,
    row_correlation,
)
from model.core.load import saved_config
from model.core.ridge import fit_ridge
from model.sample import load_model
from train.base.errors import UserError
from train.config import load_argv, load_config
from train.distributed import Ranks
from train.evaluate import pack, unpack

# 400 rows to train on, 8 a step: an epoch is 50 steps.
SYSTEM = dict(model="autoencoder", d_hidden=16, d_latent=8, batch_size=4,
              gradient_accumulation_steps=2, eval_iters=100, log_interval=50)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Prepared data of known structure: 440 rows in 11 runs, one of which is held out."""
    out = str(tmp_path_factory.mktemp("features") / "data")
    arrays, target, runs = features.synthetic(n_runs=11, run_length=40)
    features.prepare_features(arrays, target, out, 0.1, runs)
    return out


@pytest.fixture(scope="module")
def trained(tmp_path_factory, folder):
    out = tmp_path_factory.mktemp("autoencoder")
    return out, go(folder, out, **SYSTEM | dict(max_iters=100, eval_epochs=1))


def command(*args):
    """(exit code, output) of python -m data.prepare.features ARGS."""
    done = python("-m", "data.prepare.features", *args)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


# -----------------------------------------------------------------------------
# data

def test_arrays_to_a_folder(tmp_path):
    """Types, split and statistics, of arrays as a person has them: float16, integers, a column."""
    rng = np.random.default_rng(0)
    video = (rng.normal(size=(100, 5)) + 1000).astype("f8")
    audio, bold = rng.integers(0, 9, (100, 3)), rng.normal(size=100).astype("f2")
    runs = np.arange(100) // 10
    for name, array in dict(film=video, sound=audio, bold=bold, runs=runs).items():
        np.save(tmp_path / f"{name}.npy", array)
    code, text = command(tmp_path / "film.npy", tmp_path / "sound.npy", "--target",
                         tmp_path / "bold.npy", "--runs", tmp_path / "runs.npy",
                         "--val_fraction", 0.2, "--out", tmp_path / "out")
    assert code == 0 and "[train] 80 rows\n[val] 20 rows" in text
    meta = read_features_meta(tmp_path / "out")
    assert meta["modalities"] == {"film": 5, "sound": 3} and meta["target"] == 1
    film, sound, target = open_features(str(tmp_path / "out"), "train")
    held = open_features(str(tmp_path / "out"), "val")[0]
    assert film.dtype == np.float32 and isinstance(film, np.memmap) and sound.shape == (80, 3)
    rows = [int(np.flatnonzero((video.astype("f4") == row).all(1))[0]) for row in held]
    starts = rows[::10]  # whole runs, and no row of one in the training data
    assert rows == [s + i for s in starts for i in range(10)] and all(s % 10 == 0 for s in starts)
    assert not set(map(bytes, film)) & set(map(bytes, held))
    keep = np.setdiff1d(np.arange(100), rows)
    assert np.allclose(meta["mean"]["film"], video[keep].mean(0), rtol=1e-12)
    assert np.allclose(meta["std"]["film"], video[keep].std(0), rtol=1e-9)
    assert np.allclose(meta["std"]["target"], bold[keep].astype("f8").std(), rtol=1e-9)


def test_a_signal_on_a_large_offset_is_kept(tmp_path):
    """Seconds since 1970 as float64: what is learned is what the signal alone would teach, also of
    a folder that took off another mean."""
    rng = np.random.default_rng(1)
    x, offset = rng.normal(size=(200, 3)), np.array([1.7e9, 0.0, -3e7])
    runs = np.arange(200) // 10
    for name, array in dict(plain=x, far=x + offset, other=x + offset * 1.001).items():
        features.prepare_features({"a": array}, np.ones((200, 2)), str(tmp_path / name), 0.2, runs)
    plain, far = (open_features(str(tmp_path / n), "val")[0] for n in ("plain", "far"))
    assert np.abs(far - plain - (far - plain).mean(0)).max() < 1e-5
    out = go(tmp_path / "far", tmp_path / "out", **SYSTEM | dict(max_iters=1))
    model, _ = load_model(tmp_path / "out" / "ckpt.pt")
    moved = open_features(str(tmp_path / "other"), "val", model.spec)
    arrays = open_features(str(tmp_path / "far"), "val", model.spec)
    raw = open_features(str(tmp_path / "other"), "val")
    assert moved[0] - raw[0] == pytest.approx(np.tile(offset * 0.001, (len(raw[0]), 1)), abs=1e-4)
    assert np.array_equal(moved[1], raw[1])
    assert evaluate_rows(model, arrays)[0]["loss"] == pytest.approx(
        out["history"][-1]["val_loss"], rel=1e-5)
    assert 0.5 < out["history"][0]["val_recon_a"] < 4


def test_predictions_have_the_units_of_the_array_that_was_prepared(tmp_path):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(200, 3)), rng.normal(size=(200, 2)) + np.array([1.7e9, 5.0])
    features.prepare_features({"a": x}, y, str(tmp_path / "f"), 0.2, np.arange(200) // 10)
    go(tmp_path / "f", tmp_path / "out", **SYSTEM | dict(max_iters=1))
    model, _ = load_model(tmp_path / "out" / "ckpt.pt")
    arrays = open_features(str(tmp_path / "f"), "val", model.spec)
    said = evaluate_rows(model, arrays, rows=7)[2]
    assert said["prediction"].shape == (len(arrays[0]), 2) and said["latent"].shape[1] == 8
    assert (np.abs(said["prediction"] - y.mean(0)) < 10).all()


def test_features_of_other_arrays_are_replaced_with_force_only(tmp_path, capsys):
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", np.random.default_rng(0).normal(size=(40, 2)))
    out = ["--out", str(tmp_path / "out")]
    for argv, code in ((["a"], 0), (["a"], 0), (["b"], 2), (["b", "--force"], 0)):
        argv[0] = str(tmp_path / f"{argv[0]}.npy")
        assert features.main(argv + out) == code
    assert "replace its data with --force" in capsys.readouterr().err
    assert read_meta(tmp_path / "out").sources == [str(tmp_path / "b.npy")]


def test_features_are_not_written_by_a_memory_map(tmp_path, monkeypatch):
    """On a full disk the system would kill the process (SIGBUS)."""
    x = np.random.default_rng(0).normal(size=(5000, 3)).astype("f4")
    with monkeypatch.context() as patch:
        patch.delattr(np, "memmap")
        features.write_array(tmp_path / "x.npy", "x", x[::-1, ::-1], np.arange(5000), np.ones(3))
    assert np.array_equal(np.load(tmp_path / "x.npy"), x[::-1, ::-1] - 1)
    with pytest.raises(OSError, match="No space left"):
        features.write_array("/dev/full", "x", x, np.arange(5000), np.ones(3))


def test_labels_of_runs(tmp_path):
    """Runs of any length, given as labels, stay whole."""
    labels = np.repeat([7, 3, 9, 4], [10, 40, 30, 20])
    val = runs_in_val(labels, 0.25)
    assert {tuple(np.unique(val[labels == label])) for label in (7, 3, 9, 4)} == {(True,), (False,)}
    assert len(np.unique(labels[val])) == 1


@pytest.mark.parametrize("option", ["target", "runs"])
def test_synthetic_data_have_their_own_target_and_runs(capsys, option):
    assert features.main(["--synthetic", f"--{option}", "x.npy"]) == 2
    assert "without --target, --runs and --subjects" in capsys.readouterr().err


def test_synthetic_needs_every_modality():
    """The target is linear in hidden signals, of which each modality knows a part."""
    arrays, target, runs = features.synthetic()
    ceiling = 1 / np.sqrt(1 + 0.25 ** 2)
    assert len(target) == len(runs) == 6000
    def score(x):
        x = np.c_[x - x.mean(0), np.ones(len(x))]
        out = x @ np.linalg.lstsq(x[:5000], target[:5000], rcond=None)[0]
        return np.mean([np.corrcoef(a, b)[0, 1] for a, b in zip(out[5000:].T, target[5000:].T)])
    together = score(np.concatenate(list(arrays.values()), axis=1))
    assert together < ceiling and all(score(x) < together - 0.1 for x in arrays.values())
    assert together > 0.9 * ceiling  # no signal is missing in all modalities


@pytest.mark.parametrize("case, words", [
    ("lengths", "different lengths: {'a': 30, 'target': 29"), ("two runs", "'runs': 60"),
    ("huge", "a: a value in rows 0 to"), ("val", "is infinite; expected numbers"),
    ("cube", "of up to 64 bits, (rows, dims)"), ("missing", "b.npy: no such file\n"),
    ("long", "float128 of shape"), ("name", "expected files with different names"), ("one run",
    "nothing can be held out"), ("no run", "runs: NaN"), ("no number", "a: no number in the train"),
    ("no target", "target: no number in the training rows, only NaN"),
    ("other", "not prepared from these sources")])
def test_bad_arrays(tmp_path, capsys, case, words):
    array = np.zeros((30, 2), "g" if case == "long" else "d")
    target = np.zeros((29 if case == "lengths" else 30, 2))
    array[7, 1] = dict(huge=-1e300).get(case, 0)
    array[16, 0] = np.inf if case == "val" else 0  # of a held-out run
    array[:] = np.nan if case == "no number" else array
    target[:] = np.nan if case == "no target" else 0
    for name in ("a", "1"):
        np.save(tmp_path / f"{name}.npy", array[None] if case == "cube" else array)
    np.save(tmp_path / "t.npy", target)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.txt").write_text("all of it")
    runs = np.zeros((30, 2 if case == "two runs" else 1))
    runs[:9] = np.nan if case == "no run" else 0
    np.save(tmp_path / "runs.npy", runs)
    more = ["--runs", tmp_path / "runs.npy"] if " run" in case else []
    source = tmp_path / f"{dict(missing='b', name='1').get(case, 'a')}.npy"
    out = tmp_path / ("full" if case == "other" else "out")
    code = features.main([str(a) for a in (source, "--target", tmp_path / "t.npy", *more, "--out",
                                           out)])
    assert code == 2 and words in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and (tmp_path / "full/thesis.txt").exists()


# -----------------------------------------------------------------------------
# losses and numbers

@pytest.mark.parametrize("names, changes", [
    (["val_loss"], dict(recon_weight=2.0, match_weight=3.0, modality_weights=dict(video=2.0))),
    (["val_loss", "val_match"], dict(matching="correlation"))])
def test_keys_of_the_loss_change_these_numbers_only(tmp_path, folder, names, changes):
    assert_keys_change_only(names, folder, tmp_path, SYSTEM, **changes)


def test_row_correlation():
    a, b = torch.randn(6, 50), torch.randn(6, 50)
    b[2], a[3] = a[2] * 3 + 7, 5.0  # the same but for a line; constant
    a.requires_grad_()
    r = row_correlation(a, b)
    for i in (0, 1, 2, 4, 5):
        assert r[i].item() == pytest.approx(np.corrcoef(a[i].detach(), b[i])[0, 1], abs=0.01)
    assert r[3].item() == 0
    r.sum().backward()
    assert a.grad.isfinite().all()


def test_correlation_over_all_rows_however_they_are_split():
    """From sums over batches of any size: what numpy says of all rows at once."""
    rng = np.random.default_rng(0)
    y = rng.normal(size=(1000, 7))
    p = 0.5 * y + rng.normal(size=y.shape) + 0.3
    p[:, 5], y[:, 6] = 1.0, 2.0  # constant: no correlation
    wanted = [np.corrcoef(p[:, i], y[:, i])[0, 1] for i in range(5)]
    for size in (1000, 64, 7):
        total = 0
        for s in range(0, 1000, size):
            part = correlation_sums(torch.tensor(p[s:s + size]), torch.tensor(y[s:s + size]))
            total = total + pack(torch.zeros(()), part, len(p[s:s + size]))
        r = correlations(unpack(total, part)[0])
        assert r[:5].tolist() == pytest.approx(wanted, abs=1e-12) and r[5:].isnan().all()


def test_the_shipped_configuration_is_for_any_modalities(tmp_path, monkeypatch):
    """As the last line of data.features says; its weights are 1, which all have. The folder has
    the name of the first one."""
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "eyes.npy", np.random.default_rng(0).normal(size=(40, 3)))
    assert features.main([str(tmp_path / "eyes.npy")]) == 0
    config = load_config(REPO / "train/configs/autoencoder.yaml",
                         dict(data_dir=str(tmp_path / "data/bin/eyes")))
    assert open_data(config, Ranks()).spec["modalities"] == {"eyes": 3}


def test_loss_is_the_weighted_sum_of_its_parts(folder):
    weights = dict(recon_weight=0.5, match_weight=3.0, modality_weights={"audio": 4.0, "text": 0})
    config = configure(folder, "unused", **SYSTEM | weights | dict(matching="correlation"))
    data = open_data(config, Ranks())
    model = MultimodalAutoencoder(config, data.spec)
    batch = data.train.get_batch("cpu", 0)
    loss, sums = model(*batch)
    part = {k: v.detach().double() for k, v in sums.items()} | dict(count=len(batch[0]))
    part = model.numbers(part)
    wanted = 0.5 * (part["recon_video"] + 4 * part["recon_audio"]) + 3 * part["match"]
    assert loss.item() == pytest.approx(wanted, rel=1e-5)
    x = model.standardise(data.train.tensors(data.train.rows(np.arange(400)), torch.device("cpu")))
    for name in ("video", "target"):  # by the statistics of the training rows
        assert x[name].mean(0).abs().max() < 1e-3 and (x[name].std(0) - 1).abs().max() < 1e-2


def test_the_pieces_of_the_loss_by_numpy():
    rng = np.random.default_rng(3)
    a, b, out, y = (torch.tensor(rng.normal(size=(4, 6)), dtype=torch.float32) for _ in range(4))
    errors = reconstruction_losses(dict(v=a, w=b), dict(v=b, w=a + 1))
    wanted = {"v": ((a - b).numpy() ** 2).mean(1), "w": ((b - a - 1).numpy() ** 2).mean(1)}
    for name in wanted:
        assert errors[name].numpy() == pytest.approx(wanted[name], rel=1e-5)
    near = matching_loss(out, y, "correlation").numpy()
    assert near == pytest.approx([1 - np.corrcoef(p, q)[0, 1] for p, q in zip(out, y)], abs=3e-3)
    match = matching_loss(out, y)
    assert match.numpy() == pytest.approx(((out - y).numpy() ** 2).mean(1), rel=1e-5)
    whole = combined_loss(errors, match, 2.0, 0.5, dict(w=3.0))
    assert whole.numpy() == pytest.approx(2 * wanted["v"] + 6 * wanted["w"] + 0.5 * match.numpy())
    assert torch.equal(combined_loss(dict(v=errors["v"])), errors["v"])


def normal_cdf(x):
    return np.vectorize(lambda v: (1 + math.erf(v / 2 ** 0.5)) / 2)(x)


@pytest.mark.parametrize("matching", ["mse", "correlation"])
def test_the_loss_of_a_row_by_hand(matching):
    spec = dict(modalities={"a": 3, "b": 2}, target=4, mean=dict(a=[1.0, 0, 0], b=[0.0, 2],
                                                                target=[0.0, 0, 0, 1]),
                std=dict(a=[2.0, 1, 0], b=[1.0, 1], target=[1.0, 2, 0.5, 1]))
    config = load_config(None, dict(model="autoencoder", d_hidden=5, d_latent=3, dropout=0.5,
                                    recon_weight=0.3, match_weight=0.7, matching=matching,
                                    modality_weights={"b": 2.0}))
    model = MultimodalAutoencoder(config, spec)
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=(6, n)).astype("f4") for n in (3, 2, 4)]
    batch = [torch.from_numpy(r) for r in rows]
    assert model(*batch)[0].item() != model(*batch)[0].item()  # dropout
    loss, sums = model.eval()(*batch)
    w = {n: p.detach().double().numpy() for n, p in model.named_parameters()}

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def gelu(x):
        return x * normal_cdf(x)
    x = {n: (r - spec["mean"][n]) / [s or 1 for s in spec["std"][n]]  # a constant: left as it is
         for n, r in zip(("a", "b", "target"), rows)}
    z = linear(np.concatenate([gelu(linear(x[n], f"encoder.{n}")) for n in "ab"], 1), "bottleneck")
    error = {n: ((linear(gelu(linear(z, f"expand.{n}")), f"decoder.{n}") - x[n]) ** 2).mean(1)
             for n in "ab"}
    out, y = linear(z, "head"), x["target"]
    match = ((out - y) ** 2).mean(1)
    if matching == "correlation":
        cov, p, q = ([np.cov(a, b, bias=True)[i] for a, b in zip(out, y)]
                     for i in ((0, 1), (0, 0), (1, 1)))
        match = 1 - np.array(cov) / np.sqrt((np.array(p) + 1e-3) * (np.array(q) + 1e-3))
    expected = 0.3 * (error["a"] + 2 * error["b"]) + 0.7 * match
    assert loss.item() == pytest.approx(expected.mean(), rel=1e-4)
    assert [sums[n].item() for n in ("recon_a", "recon_b", "match")] == pytest.approx(
        [error["a"].sum(), error["b"].sum(), match.sum()], rel=1e-4)
    numbers, r, _ = evaluate_rows(model, rows, rows=4)  # a batch of 4 and one of 2
    assert numbers["loss"] == pytest.approx(expected.mean(), rel=1e-4) and numbers["rows"] == 6
    wanted = [np.corrcoef(out[:, i], y[:, i])[0, 1] for i in range(4)]
    assert r.tolist() == pytest.approx(wanted, rel=1e-3)
    assert numbers["correlation"] == pytest.approx(np.mean(wanted), rel=1e-3)
    for name, p in model.named_parameters():
        assert p.any() == (name.endswith("weight")), name
    big = MultimodalAutoencoder(load_config(None, dict(model="autoencoder", d_hidden=400)), spec)
    assert big.bottleneck.weight.std().item() == pytest.approx(800 ** -0.5, rel=0.1)


# -----------------------------------------------------------------------------
# the run

def test_the_run(trained):
    """A line an epoch; every part in the log; checkpoints hold the history."""
    out, result = trained
    assert [e["iter"] for e in result["history"]] == [0, 50, 100]
    last = result["history"][-1]
    assert {"train_loss", "val_loss", "val_match", "val_correlation", "val_recon_video",
            "val_recon_audio", "val_recon_text"} <= last.keys()
    assert last["val_loss"] < 0.6 * result["history"][0]["val_loss"]
    assert torch.load(out / "ckpt.pt")["progress"]["history"] == result["history"]
    assert {"match", "recon_video", "correlation"} <= metrics(out)[-2].keys()


@pytest.mark.matrix(134)
def test_kill_and_resume_bit_for_bit(tmp_path, folder, trained):
    """kill -9 while an autoencoder learns features -> the end is exact"""
    options = SYSTEM | dict(max_iters=100, eval_epochs=1)
    killed = Program(folder, tmp_path, env={"FAULT": "before_opt@77=sleep"}, **options)
    killed.wait_for("iter 50:")
    soon((tmp_path / "ckpt.pt").exists)  # saved in the background
    killed.kill()
    code, text = run_program(folder, tmp_path, **options)
    assert code == 0 and "at iter 50" in text, text
    assert_same(trained[0], tmp_path)


@pytest.fixture(scope="module")
def one_rank(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("one")
    go(folder, out, **SYSTEM | dict(max_iters=12, matching="correlation"))
    return out


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_are_one(tmp_path, folder, one_rank, way):
    options = SMALL | SYSTEM | dict(data_dir=folder, max_iters=12, matching="correlation")
    code, text = run(*(f"--{k}={v}" for k, v in options.items()), "--out_dir", tmp_path / "two",
                     "--distributed", way, ranks=2)
    assert code == 0, text
    one, two = (tensors(out / "ckpt.pt")[0] for out in (one_rank, tmp_path / "two"))
    assert one.keys() == two.keys()
    for name in one:
        assert torch.allclose(one[name].float(), two[name].float(), atol=1e-5), name
    assert metrics(one_rank)[-1]["val_correlation"] == pytest.approx(
        metrics(tmp_path / "two")[-1]["val_correlation"], abs=1e-5)


@pytest.mark.parametrize("mode, steps", [("max", 75), ("min", 50)])
def test_early_stopping_on_correlation(tmp_path, folder, mode, steps):
    """It rises at every evaluation: wanted to, the run goes on; wanted to fall, it stops."""
    watched = dict(early_stopping_metric="val_correlation", early_stopping_mode=mode,
                   early_stopping_patience=1, max_iters=75, eval_epochs=0.5)
    result = go(folder, tmp_path, **SYSTEM | watched)
    assert result["iter_num"] == steps
    assert ("no better val_correlation" in result["finished"]) == (mode == "min")


def test_rows_are_called_rows(trained, capsys, folder, tmp_path):
    """In the numbers of a run, which a picture's axis is named after, and in its first lines."""
    steps = [r for r in metrics(trained[0]) if "lr" in r]
    assert steps and all(r["unit"] == "row" for r in steps)
    go(folder, tmp_path, **SYSTEM | dict(max_iters=0))
    said = capsys.readouterr().out
    assert "epochs of 400 samples" in said and "per parameter" not in said


def test_no_target(tmp_path, capsys):
    """An autoencoder alone: no match, no correlation. The command that is printed trains it."""
    np.save(tmp_path / "a.npy", np.random.default_rng(0).normal(size=(40, 3)))
    arguments = ["--out", str(tmp_path / "data"), "--val_fraction", "0.2"]
    assert features.main([str(tmp_path / "a.npy"), *arguments]) == 0
    assert "--early_stopping_metric val_loss" in capsys.readouterr().out
    last = go(tmp_path / "data", tmp_path / "out", **SYSTEM, linear_path=True)["history"][-1]
    assert "val_recon_a" in last and "val_match" not in last and "val_correlation" not in last
    assert main(["--ckpt", str(tmp_path / "out/ckpt.pt"), "--baseline"]) == 2
    assert "no target, which ridge regression" in capsys.readouterr().err


def test_the_numbers_of_a_checkpoint(tmp_path, trained, folder, capsys):
    """The command gives what the evaluation during training gave, and r of each target."""
    path, npz = tmp_path / "numbers.json", tmp_path / "out.npz"
    assert main(["--ckpt", str(trained[0] / "ckpt.pt"), "--to", str(path),
                 "--arrays", str(npz)]) == 0
    numbers, last = json.loads(path.read_text()), trained[1]["history"][-1]
    assert numbers["rows"] == 40 and "correlation " in capsys.readouterr().out
    for name in ("loss", "correlation", "match", "recon_audio"):
        assert numbers[name] == pytest.approx(last[f"val_{name}"], abs=1e-5)
    model, _ = load_model(trained[0] / "ckpt.pt")
    arrays = open_features(folder, "val")
    with torch.no_grad():
        z = model.encode(model.standardise([torch.tensor(np.array(a)) for a in arrays]))
        out = model.head(z)
    mean, std = (np.array(model.spec[k]["target"]) for k in ("mean", "std"))
    with np.load(npz) as made:
        np.testing.assert_allclose(made["latent"], z, atol=1e-5)
        np.testing.assert_allclose(made["prediction"], out * std + mean, atol=1e-4)
    wanted = [np.corrcoef(out[:, i], arrays[-1][:, i])[0, 1] for i in range(60)]
    assert numbers["targets"] == pytest.approx(wanted, abs=1e-4)
    assert evaluate_rows(model, arrays, rows=7)[0]["correlation"] == pytest.approx(
        numbers["correlation"], abs=1e-6)
    # Numbers of arrays that the folder does not have are unknown, not perfect.
    unknown = evaluate_rows(model, [np.full_like(a, np.nan) if i in (0, len(arrays) - 1) else a
                                    for i, a in enumerate(arrays)])[0]
    assert unknown["match"] is unknown[f"recon_{model.names[0]}"] is None
    assert unknown[f"recon_{model.names[1]}"] > 0


# -----------------------------------------------------------------------------
# ridge regression, delays, missing values

def ridge_data(rows, dims):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, dims)) + 2
    return x, x @ rng.normal(size=(dims, 4)) + rng.normal(size=(rows, 4)) * [1, 5, 20, 90]


@pytest.mark.parametrize("rows, dims", [(60, 20), (40, 70), (30, 30)])
def test_ridge_is_scikit_learns(rows, dims):
    """With a row per run: RidgeCV, which leaves one row out."""
    linear_model = pytest.importorskip("sklearn.linear_model")
    x, y = ridge_data(rows, dims)
    alphas = np.logspace(-2, 3, 8)
    other = linear_model.RidgeCV(alphas, alpha_per_target=True).fit(x, y)
    weight, bias, alpha, error = fit_ridge(x, y, np.arange(rows), alphas)
    assert len(set(alpha)) > 1 and alpha == pytest.approx(other.alpha_)
    assert weight == pytest.approx(other.coef_.T, abs=1e-6)
    assert bias == pytest.approx(other.intercept_, abs=1e-6)
    assert error == pytest.approx(-other.best_score_)


@pytest.mark.parametrize("dims", [20, 70])
def test_ridge_is_himalayas(dims):
    """With runs of equal length, which are left out as a whole."""
    ridge = pytest.importorskip("himalaya.ridge")
    from himalaya.scoring import l2_neg_loss
    x, y = ridge_data(60, dims)
    alphas, runs = np.logspace(-2, 3, 8), np.arange(60) // 6
    folds = [(np.flatnonzero(runs != r), np.flatnonzero(runs == r)) for r in range(10)]
    other = ridge.RidgeCV(alphas, fit_intercept=True, cv=folds, solver_params=dict(
        score_func=l2_neg_loss, warn=False)).fit(x, y)
    weight, bias, alpha, _ = fit_ridge(x, y, runs, alphas)
    assert alpha == pytest.approx(other.best_alphas_)
    assert weight == pytest.approx(other.coef_, abs=1e-4)
    assert bias == pytest.approx(other.intercept_, abs=1e-4)


def test_ridge_of_constant_columns_predicts_the_mean(recwarn):
    y = np.arange(20.0)[:, None]
    weight, bias = fit_ridge(np.ones((20, 3)), y, np.arange(20))[:2]
    assert not weight.any() and bias == 9.5 and not recwarn.list


def test_the_error_on_runs_that_ridge_leaves_out():
    """By a fit without each run, of different lengths; a single run is divided into ten."""
    x, y = ridge_data(60, 20)
    for runs, parts in ((np.r_[[0] * 25, [1] * 5, [2] * 30], None),
                        (np.zeros(60), np.arange(60) // 6)):
        parts = runs if parts is None else parts
        total = 0
        for r in np.unique(parts):
            a, b = x[parts != r], y[parts != r]
            w = np.linalg.solve((a - a.mean(0)).T @ (a - a.mean(0)) + 3 * np.eye(20),
                                (a - a.mean(0)).T @ b)
            total = total + np.square(
                (x[parts == r] - a.mean(0)) @ w + b.mean(0) - y[parts == r]).sum(0)
        assert fit_ridge(x, y, runs, [3.0])[3] == pytest.approx(total / 60)


def test_delays_end_at_the_start_of_a_run():
    array = np.float32([[n, n + 10] for n in range(5)])
    windows = add_delays(array, np.array([0, 0, 0, 1, 1]), 2)
    nan = np.nan
    assert windows.dtype == np.float32 and windows.shape == (5, 3, 2)
    np.testing.assert_array_equal(windows[..., 0], [
        [0, nan, nan], [1, 0, nan], [2, 1, 0], [3, nan, nan], [4, 3, nan]])
    np.testing.assert_array_equal(windows[..., 1], windows[..., 0] + 10)
    longer = add_delays(array, np.zeros(5), 7)  # than the array
    assert np.isnan(longer[:, 5:]).all() and longer[4, :5, 0].tolist() == [4, 3, 2, 1, 0]


RIDGE = SYSTEM | dict(linear_path=True, dropout=0.2, modality_dropout=0.2, delays=2,
                      early_stopping_metric="val_match")


@pytest.fixture(scope="module")
def holes(tmp_path_factory):
    """Prepared data whose target is 3 x the row before of one modality; some values are missing,
    and the run of no row has a constant length."""
    rng = np.random.default_rng(0)
    runs = np.repeat(np.arange(12), [40, 30] * 6)
    a, b = rng.normal(size=(420, 4)) + 7, rng.normal(size=(420, 3))
    target = np.where(np.diff(runs, prepend=-1)[:, None] != 0, 7, np.roll(a, 1, 0))[:, :2] * 3
    a[rng.random(420) < 0.1] = np.nan
    b[5, 1], b[:, 2] = np.nan, 4
    target[100], target[200, 1] = np.nan, np.nan
    out = tmp_path_factory.mktemp("holes")
    for name, array in dict(a=a, b=b, target=target, runs=runs).items():
        np.save(out / f"{name}.npy", array)
    features.prepare_features(dict(a=a, b=b), target, str(out / "data"), 0.2, runs)
    # Subjects 2 and 5 in turn; each has a target of its own.
    subjects = np.where(runs % 2, 5, 2)
    np.save(out / "subjects.npy", subjects)
    features.prepare_features(dict(a=a, b=b), np.where(subjects[:, None] == 5, -target, target),
                              str(out / "subjects"), 0.2, runs, subjects=subjects)
    return out


@pytest.fixture(scope="module")
def linear(holes, tmp_path_factory):
    out = tmp_path_factory.mktemp("linear")
    return out, go(holes / "data", out, **RIDGE | dict(max_iters=40, eval_interval=10))


@pytest.fixture(scope="module")
def of_subjects(holes, tmp_path_factory):
    out = tmp_path_factory.mktemp("of_subjects")
    return out, go(holes / "subjects", out, **RIDGE | dict(max_iters=40, eval_interval=10))


def test_statistics_and_losses_leave_missing_values_out(holes):
    arrays = [np.load(holes / f"{n}.npy") for n in ("a", "b", "target", "runs")]
    keep = ~runs_in_val(arrays.pop(), 0.2)
    meta = read_features_meta(holes / "data")
    for name, array in zip("ab", arrays):
        assert meta["mean"][name] == pytest.approx(np.nanmean(array[keep], 0))
        assert meta["std"][name] == pytest.approx(np.nanstd(array[keep], 0))
    assert meta["std"]["b"][2] == 0
    y, out = torch.tensor(arrays[2][95:105]), torch.randn(10, 2, dtype=torch.float64)
    missing = y.isnan().any(1)
    out.requires_grad_()
    for kind in ("mse", "correlation"):
        loss = matching_loss(out, y, kind)
        gradient, = torch.autograd.grad(loss.sum(), out)
        assert loss.isfinite().all() and gradient.isfinite().all()
        if kind == "mse":
            assert not gradient[y.isnan()].any()
    recorded = ~missing
    sums = correlation_sums(out.detach(), y, None, "x_")
    assert correlations(sums, "x_")[0] == pytest.approx(
        np.corrcoef(out.detach()[recorded, 0], y[recorded, 0])[0, 1])


def test_the_first_step_is_ridge_and_the_best_is_not_worse(holes, linear):
    """By scikit-learn, on the rows without a missing target, with delays made by hand."""
    out, result = linear
    first = result["history"][0]
    best = torch.load(out / "ckpt_best.pt")["progress"]["history"][-1]
    assert best["val_match"] <= first["val_match"]
    assert first["val_correlation"] == pytest.approx(first["val_ridge"], abs=1e-6)
    assert first["val_correlation"] > 0.9  # only the row before tells
    meta = read_features_meta(holes / "data")
    x = {s: [] for s in ("train", "val")}
    for s, parts in x.items():
        a, b, y = (np.load(holes / "data" / f"{s}_{n}.npy") for n in ("a", "b", "target"))
        runs = np.load(holes / "data" / f"{s}_runs.npy")
        z = np.nan_to_num((np.c_[a, b] - np.r_[meta["mean"]["a"], meta["mean"]["b"]])
                          / [v or 1 for n in "ab" for v in meta["std"][n]])
        for d in range(3):
            row = np.arange(len(z)) - d
            parts.append(np.where((row >= 0) & (runs == runs[row]), 1, 0)[:, None] * z[row])
        x[s] = np.hstack(parts), (y - meta["mean"]["target"]) / meta["std"]["target"], runs
    weight, bias = fit_linear_path(str(holes / "data"), meta, 2)
    fit, keep = x["train"], ~np.isnan(x["train"][1]).any(1)
    w, c, _, _ = fit_ridge(fit[0][keep], fit[1][keep], fit[2][keep])
    assert weight.shape == (2, 21) and weight.T.numpy() == pytest.approx(w, abs=1e-5)
    np.testing.assert_allclose(bias, c, atol=1e-5)
    p, y = x["val"][0] @ w + c, x["val"][1]
    wanted = np.mean([np.corrcoef(p[:, i], y[:, i])[0, 1] for i in range(2)])
    assert first["val_ridge"] == pytest.approx(wanted, abs=1e-5)
    state = torch.load(out / "ckpt.pt")
    assert torch.equal(state["model"]["linear.weight"], weight)
    assert "linear.weight" not in state["optimizer"]["state"]


def test_ridge_without_delays_where_they_do_not_help(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 8))
    y = x[:, :2] + 3 * rng.normal(size=(60, 2))
    features.prepare_features(dict(a=x), y, str(tmp_path), 0.2, np.arange(60) // 6)
    weight = fit_linear_path(str(tmp_path), read_features_meta(tmp_path), 9)[0]
    assert not weight[:, 8:].any(1).all() and weight[:, :8].any()


def test_initial_weights_have_the_linear_path_of_the_data(tmp_path, folder):
    """of this run, not of the data that the weights were trained on"""
    arrays, target, runs = features.synthetic(n_runs=11, run_length=40)
    features.prepare_features(arrays, target[:, ::-1].copy(), str(tmp_path / "new"), 0.1, runs)
    keys = SYSTEM | dict(linear_path=True, max_iters=1)
    old = go(folder, tmp_path / "old", **keys)
    init = dict(init_from=str(tmp_path / "old/ckpt.pt"))
    first, again = (go(tmp_path / "new", tmp_path / name, **keys | changes)["history"][0]
                    for name, changes in (("a", {}), ("b", init)))
    assert again["val_ridge"] == first["val_ridge"]
    with pytest.raises(UserError, match="mean: checkpoint has"):  # nothing would adapt the weights
        go(tmp_path / "new", tmp_path / "c", **keys | init, eval_only=True)
    same = go(folder, tmp_path / "d", **keys | init, eval_only=True)["history"][0]
    assert same["val_loss"] == old["val_loss"]


@pytest.mark.ci
@pytest.mark.matrix(134)
@pytest.mark.parametrize("data, undisturbed", [slow("data", "linear"),
                                               ("subjects", "of_subjects")], ids=str)
def test_kill_and_resume_with_a_linear_path(tmp_path, holes, request, data, undisturbed):
    """kill -9 while an autoencoder learns what ridge regression leaves, with a head per subject ->
    the end is exact"""
    options = RIDGE | dict(max_iters=40, eval_interval=10, save_interval=7)
    code, text = run_program(holes / data, tmp_path, env={"FAULT": "before_opt@33=kill9"},
                             **options)
    assert code == -9, text
    assert run_program(holes / data, tmp_path, **options)[0] == 0
    assert_same(request.getfixturevalue(undisturbed)[0], tmp_path)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("data", ["data", "subjects"])
def test_two_ranks_with_a_linear_path(tmp_path, holes, way, data):
    settings = SMALL | RIDGE | dict(data_dir=str(holes / data), max_iters=6, eval_interval=3,
                                    lr_decay_iters=6, dropout=0.0, modality_dropout=0.0)
    assert_two_ranks_equal_one(tmp_path, settings, way, val_loss=1e-5, val_correlation=1e-5,
                               val_ridge=1e-5)


def test_a_linear_path_in_bfloat16_is_about_the_same_sharded(tmp_path, holes):
    settings = RIDGE | dict(max_iters=6, eval_interval=3, dtype="bfloat16", dropout=0.0,
                            modality_dropout=0.0)
    one = go(holes / "data", tmp_path / "one", **settings)["history"]
    two = on_two_ranks(tmp_path / "two", SMALL | settings | dict(data_dir=str(holes / "data"),
                                                                 distributed="fsdp"))
    for a, b in zip(one, two, strict=True):
        for name in ("val_loss", "val_correlation", "val_ridge"):
            assert b[name] == pytest.approx(a[name], rel=0.02), name


def test_rows_without_a_target_a_split_or_a_modality(holes, linear, tmp_path, capsys):
    """The predictions of rows that are prepared alone, without target and split, are those of the
    same rows in the prepared data; then without a modality."""
    runs = np.load(holes / "runs.npy")
    val = runs_in_val(runs, 0.2)
    for name in ("a", "b", "runs"):
        np.save(tmp_path / f"{name}.npy", np.load(holes / f"{name}.npy")[val])
    a, b = str(tmp_path / "a.npy"), str(tmp_path / "b.npy")
    for sources, name in (([a, b], "ab"), ([b], "b")):
        assert features.main([*sources, "--val_fraction", "0", "--runs", str(
            tmp_path / "runs.npy"), "--out", str(tmp_path / name)]) == 0
    out = {}
    for name, more in dict(all=[], ab=["--data_dir", str(tmp_path / "ab"), "--split", "train"],
                           b=["--data_dir", str(tmp_path / "b"), "--split", "train"]).items():
        npz = tmp_path / f"{name}.npz"
        assert main(["--ckpt", str(linear[0] / "ckpt.pt"), "--arrays", str(npz), *more]) == 0
        with np.load(npz) as arrays:
            out[name] = arrays["prediction"]
    np.testing.assert_allclose(out["ab"], out["all"], atol=1e-5)
    assert out["b"].shape == out["all"].shape and np.isfinite(out["b"]).all()
    assert np.abs(out["b"] - out["all"]).max() > 1
    assert "correlation    None" in capsys.readouterr().out


def test_the_baseline_of_a_checkpoint(tmp_path, trained, linear, capsys):
    """For a model with a linear path, the number of its evaluations; also for one without."""
    for out, history in ((linear[0], linear[1]["history"]), (trained[0], None)):
        path = tmp_path / "n.json"
        assert main(["--ckpt", str(out / "ckpt.pt"), "--baseline", "--to", str(path)]) == 0
        numbers = json.loads(path.read_text())
        assert numbers["ridge"] == pytest.approx(np.mean(numbers["ridge_targets"]), abs=1e-6)
        assert 0.8 < numbers["ridge"] < 1 and "ridge  " in capsys.readouterr().out
        if history:
            assert numbers["ridge"] == pytest.approx(history[-1]["val_ridge"], abs=1e-6)


def test_a_modality_is_hidden_from_the_whole_window(holes):
    config = configure(holes / "data", "unused", **RIDGE | dict(modality_dropout=0.5, dropout=0))
    data = open_data(config, Ranks())
    model = MultimodalAutoencoder(config, data.spec, data.linear_path)
    seen = []
    model.encoder["a"].register_forward_hook(lambda m, args, out: seen.append(args[0]))
    x = model.standardise(data.train.tensors(data.train.rows(np.arange(200)), torch.device("cpu")))
    model.encode(x)
    windows = x["a"].nan_to_num().flatten(1)
    hidden = ~seen[0].any(1)
    assert 0.3 < hidden.float().mean() < 0.7
    assert torch.equal(seen[0][~hidden], 2 * windows[~hidden])


def test_the_configuration_of_an_earlier_version_is_read():
    assert saved_config(dict(model="autoencoder", time_layers=0, delays=3)).delays == 3


# -----------------------------------------------------------------------------
# subjects

def test_a_head_per_subject(holes):
    """Outputs and gradients are those of a Linear per subject; the first prediction is the ridge
    regression that is fitted to the rows of this subject alone."""
    config = configure(holes / "subjects", "unused", **RIDGE | dict(dropout=0, modality_dropout=0))
    data = open_data(config, Ranks())
    model = MultimodalAutoencoder(config, data.spec, data.linear_path)
    assert data.spec["subjects"] == [2, 5] and model.head.weight.shape == (4, 8)
    torch.nn.init.normal_(model.head.weight)
    *arrays, subjects = data.train.rows(np.arange(60))
    batch = [torch.from_numpy(a) for a in (*arrays, subjects)]
    loss, sums = model(*batch)
    loss.backward()
    x = model.standardise(batch)
    z = torch.nn.functional.gelu(model.encode(x).detach())
    windows = torch.cat([x[n].nan_to_num() for n in "ab"], -1).flatten(1)
    own = [torch.nn.Linear(8, 2) for _ in range(2)]
    total = 0
    for s, head in enumerate(own):
        part = slice(2 * s, 2 * s + 2)
        head.load_state_dict(dict(weight=model.head.weight[part], bias=model.head.bias[part]))
        rows = torch.from_numpy(subjects[:, s] == 1)
        assert 10 < rows.sum() < 50
        fixed = windows[rows] @ model.linear.weight[part].T + model.linear.bias[part]
        out = head(z[rows]) + fixed
        torch.testing.assert_close(model.predict(x, model.encode(x))[rows], out)
        torch.testing.assert_close(model.predict_linear(x)[rows], fixed)
        total = total + matching_loss(out, x["target"][rows]).sum()
        y = x["target"][rows]
        keep = ~y.isnan().any(1)
        assert correlations(sums)[s].tolist() == pytest.approx(
            [np.corrcoef(out.detach()[keep, i], y[keep, i])[0, 1] for i in (0, 1)], abs=1e-3)
    (total / 60).backward()
    for name in ("weight", "bias"):
        torch.testing.assert_close(getattr(model.head, name).grad,
                                   torch.cat([getattr(head, name).grad for head in own]))
    assert sums["match"].item() == pytest.approx(total.item(), rel=1e-5)


def test_ridge_per_subject(holes, of_subjects):
    """The rows of a subject, prepared alone with the statistics of all, have the same fit."""
    path = str(holes / "subjects")
    weight, bias = fit_linear_path(path, spec := read_features_meta(path), 2)
    alone = str(holes / "alone")
    for s, subject in enumerate(spec["subjects"]):
        shutil.copytree(path, alone, dirs_exist_ok=True)
        for file in sorted(Path(path).glob("train_*.npy")):
            rows = np.load(Path(path, "train_subjects.npy")) == subject
            np.save(Path(alone, file.name), np.load(file)[rows])
        w, b = fit_linear_path(alone, {k: v for k, v in spec.items() if k != "subjects"}, 2)
        assert torch.equal(weight[2 * s:2 * s + 2], w) and torch.equal(bias[2 * s:2 * s + 2], b)
    assert not torch.allclose(weight[:2], weight[2:], atol=0.1)
    first = of_subjects[1]["history"][0]
    assert first["val_correlation"] == pytest.approx(first["val_ridge"], abs=1e-6)
    assert first["val_ridge"] > 0.9  # one ridge regression for both: 0


def test_a_dimension_that_a_subject_lacks_leaves_the_fits_of_the_others(holes):
    """A dead electrode: the target's last dimension is missing in all rows of subject 5."""
    path = str(holes / "subjects")
    weight, bias = fit_linear_path(path, spec := read_features_meta(path), 2)
    dead = str(holes / "dead")
    shutil.copytree(path, dead)
    target = np.load(Path(dead, "train_target.npy"))
    no_target = np.isnan(target).any(1)  # row 200 lacks one dimension: it is left out of both
    target[np.load(Path(dead, "train_subjects.npy")) == 5, 1] = np.nan
    target[no_target] = np.nan
    np.save(Path(dead, "train_target.npy"), target)
    w, b = fit_linear_path(dead, spec, 2)
    assert torch.equal(w[:3], weight[:3]) and torch.equal(b[:3], bias[:3])
    assert not w[3].any() and b[3] == 0


def test_the_command_with_subjects(tmp_path, holes, of_subjects, capsys):
    """Numbers of each subject; rows of one subject alone have the same predictions."""
    path, npz = tmp_path / "n.json", tmp_path / "all.npz"
    ckpt = ["--ckpt", str(of_subjects[0] / "ckpt.pt")]
    assert main([*ckpt, "--baseline", "--to", str(path), "--arrays", str(npz)]) == 0
    numbers, last = json.loads(path.read_text()), of_subjects[1]["history"][-1]
    assert numbers["correlation"] == pytest.approx(last["val_correlation"], abs=1e-6)
    assert numbers["ridge"] == pytest.approx(last["val_ridge"], abs=1e-6)
    assert len(numbers["targets"]) == 4
    assert numbers["subject 5"] == pytest.approx(np.mean(numbers["targets"][2:]))
    assert "subject 5      0." in capsys.readouterr().out
    rows = np.load(holes / "subjects/val_subjects.npy") == 5
    alone, out = tmp_path / "alone", tmp_path / "alone.npz"
    val = runs_in_val(runs := np.load(holes / "runs.npy"), 0)
    for s in (2, 5):  # the middle run of each
        val |= runs == np.unique(runs[np.load(holes / "subjects.npy") == s])[3]
    val &= np.load(holes / "subjects.npy") == 5
    features.prepare_features({n: np.load(holes / f"{n}.npy")[val] for n in "ab"},
                              np.load(holes / "target.npy")[val], str(alone), 0, runs[val],
                              subjects=np.full(val.sum(), 5))
    more = ["--data_dir", str(alone), "--split", "train", "--arrays", str(out), "--to", str(path)]
    assert main([*ckpt, *more]) == 0
    assert json.loads(path.read_text())["subject 2"] is None
    with np.load(npz) as a, np.load(out) as b:
        np.testing.assert_allclose(a["prediction"][rows], b["prediction"], atol=1e-5)
    for subjects, words in ((np.full(val.sum(), 7), "train has rows that are not of the subjects "
                             "of the model, [2, 5]"), (None, "train has rows that are not of")):
        features.prepare_features({n: np.load(holes / f"{n}.npy")[val] for n in "ab"}, None,
                                  str(alone), 0, runs[val], True, subjects=subjects)
        assert main([*ckpt, *more]) == 2 and words in capsys.readouterr().err


def test_every_subject_is_in_both_splits(tmp_path):
    """As a person types it; without --runs, runs end where the subject changes."""
    subjects = np.repeat([9, 4, 6], [130, 250, 30])
    np.save(tmp_path / "a.npy", np.random.default_rng(0).normal(size=(410, 3)))
    np.save(tmp_path / "s.npy", subjects.astype("u1"))
    code, text = command(tmp_path / "a.npy", "--subjects", tmp_path / "s.npy", "--out",
                         tmp_path / "out", "--val_fraction", "0.2")
    assert code == 0, text
    assert read_features_meta(tmp_path / "out")["subjects"] == [4, 6, 9]
    counts = {s: dict(zip(*np.unique(np.load(tmp_path / f"out/{s}_subjects.npy"),
                                     return_counts=True))) for s in ("train", "val")}
    assert counts["train"].keys() == counts["val"].keys() == {4, 6, 9}
    assert counts["val"][4] in (40, 60) and counts["val"][6] in (10, 20)
    for split in ("train", "val"):
        pairs = np.stack([np.load(tmp_path / f"out/{split}_{n}.npy") for n in ("runs", "subjects")])
        assert len(np.unique(pairs, axis=1)[0]) == len(np.unique(pairs[0]))


def test_many_subjects_are_in_both_splits(tmp_path):
    """A twentieth of all rows would be more than a subject has."""
    np.save(tmp_path / "a.npy", np.random.default_rng(0).normal(size=(1000, 3)))
    np.save(tmp_path / "s.npy", np.repeat(np.arange(25), 40))
    code, text = command(tmp_path / "a.npy", "--subjects", tmp_path / "s.npy", "--out",
                         tmp_path / "out")
    assert code == 0, text
    for split in ("train", "val"):
        assert len(np.unique(np.load(tmp_path / f"out/{split}_subjects.npy"))) == 25


def test_the_same_rows_of_each_subject_are_held_out(tmp_path):
    """Of a film that three subjects saw; without --runs."""
    np.save(tmp_path / "a.npy", np.tile(np.arange(100.0), 3))
    np.save(tmp_path / "s.npy", np.repeat([0, 1, 2], 100))
    code, text = command(tmp_path / "a.npy", "--subjects", tmp_path / "s.npy", "--out",
                         tmp_path / "out")
    assert code == 0, text
    train, val = (np.load(tmp_path / f"out/{s}_a.npy")[:, 0] for s in ("train", "val"))
    assert len(train) + len(val) == 300 and not {*train} & {*val}


@pytest.mark.parametrize("case, words", [
    ("length", "'subjects': 39"), ("shared", "run 3 has rows of several subjects; give --runs"),
    ("float", "subjects: float64 from 0.5 to 0.5; expected integers"),
    ("negative", "subjects: int64 from -1 to 1; expected integers"),
    ("one run", "all rows of subject 1 are one run: nothing can be held out"),
    ("synthetic", "--synthetic without --target, --runs and --subjects")])
def test_bad_subjects(tmp_path, case, words):
    runs = np.arange(40) // 5
    subjects = (runs > 3).astype(int)
    subjects = dict(length=subjects[1:], shared=np.arange(40) // 18, float=np.full(40, 0.5),
                    negative=subjects * 2 - 1).get(case, (runs > 6).astype(int))
    for name, array in dict(a=np.eye(40), runs=runs, s=subjects).items():
        np.save(tmp_path / f"{name}.npy", array)
    files = ["--synthetic"] if case == "synthetic" else [
        tmp_path / "a.npy", *(["--runs", tmp_path / "runs.npy"] if case != "float" else [])]
    code, text = command(*files, "--subjects", tmp_path / "s.npy", "--out", tmp_path / "out")
    assert code == 2 and words in text and not (tmp_path / "out").exists()


def test_weights_of_other_subjects_are_refused(tmp_path, holes, of_subjects):
    shutil.copytree(holes / "subjects", tmp_path / "data")
    meta = json.loads((tmp_path / "data/meta.json").read_text())
    for split in ("train", "val"):
        numbers = np.load(tmp_path / f"data/{split}_subjects.npy")
        np.save(tmp_path / f"data/{split}_subjects.npy", np.where(numbers == 5, 6, 2))
    (tmp_path / "data/meta.json").write_text(json.dumps(meta | dict(subjects=[2, 6])))
    code, text = run_program(tmp_path / "data", tmp_path / "out", **RIDGE | dict(
        init_from=str(of_subjects[0] / "ckpt.pt")))
    assert code == 2 and "subjects" in text and "Traceback" not in text


@pytest.mark.parametrize("option, name", [("--to", "n.json"), ("--arrays", "a.npz")])
def test_a_full_disk_keeps_the_file_of_before(tmp_path, trained, capsys, option, name):
    file = tmp_path / name
    file.write_text("before")
    with full_disk(1000):
        assert main(["--ckpt", str(trained[0] / "ckpt.pt"), option, str(file)]) == 2
    error = capsys.readouterr().err
    assert str(file) in error and "File too large" in error
    assert [file.read_text(), *tmp_path.iterdir()] == ["before", file]


@pytest.mark.parametrize("name, reason", [("none/n.json", "No such file"), ("", "Is a directory")])
def test_a_file_that_cannot_be_written_is_named(tmp_path, trained, capsys, name, reason):
    """Not its temporary name."""
    assert main(["--ckpt", str(trained[0] / "ckpt.pt"), "--to", str(tmp_path / name)]) == 2
    assert f"{tmp_path / name}: {reason}" in capsys.readouterr().err


@pytest.mark.parametrize("case, words", [
    ("old", "train_runs.npy: no such file"), ("no rows", "0 training rows have all targets")])
def test_what_a_linear_path_needs(tmp_path, case, words):
    y = np.ones((40, 2))
    for i in range(40 if case == "no rows" else 0):
        y[i, i % 2] = np.nan  # no dimension lacks all values
    folder = tmp_path / "data"
    features.prepare_features(dict(a=np.eye(40)), y, str(folder), 0.2, np.arange(40) // 5)
    if case == "old":
        (folder / "train_runs.npy").unlink()
    code, text = run_program(folder, tmp_path / "out", **SYSTEM | dict(linear_path=True))
    assert code == 2 and words in text and "Traceback" not in text


@pytest.mark.parametrize("changes, words", [
    (dict(data_dir="nowhere"), "nowhere: no such folder; prepare it with"),
    (dict(modality_weights={"smell": 2.0}), "modality_weights: smell"),
    (dict(modality_weights={"video": -1.0}), "modality_weights: expected numbers of at least 0"),
    (dict(modality_weights={"video": {"weight": 2}}), "modality_weights: expected numbers"),
    (dict(matching="cosine"), "must be one of mse, correlation")], ids=str)
def test_bad_configuration(tmp_path, folder, changes, words):
    options = SYSTEM | dict(data_dir=folder) | changes
    code, text = run_program(options.pop("data_dir"), tmp_path / "out", **options)
    assert code == 2 and words in text and "Traceback" not in text


def test_one_dimension_has_no_correlation(tmp_path):
    a = np.random.default_rng(0).normal(size=(60, 3))
    for dims in (1, 2):
        folder = tmp_path / str(dims)
        features.prepare_features(dict(a=a), a[:, :dims], str(folder), 0.2, np.arange(60) // 5)
        options = SYSTEM | dict(matching="correlation", max_iters=1)
        code, text = run_program(folder, tmp_path / f"out{dims}", **options)
        assert code == (2 if dims == 1 else 0), text
        assert ("matching: correlation is over the dimensions of the target" in text) == (dims == 1)


def test_validation_rows_are_needed_by_evaluations_only(tmp_path, capsys):
    folder = tmp_path / "data"
    features.prepare_features(dict(a=np.eye(40)), None, str(folder), 0.2, np.arange(40) // 5)
    np.save(folder / "val_a.npy", np.zeros((0, 40), np.float32))
    go(folder, tmp_path / "out", **SYSTEM | dict(max_iters=1, eval_interval=0))
    args = ["--ckpt", str(tmp_path / "out/ckpt.pt")]
    assert main(args) == 2 and "val has no rows; choose another --split" in capsys.readouterr().err
    assert main([*args, "--split", "train"]) == 0
    config = configure(folder, "unused", **SYSTEM)
    with pytest.raises(ValueError, match="val has no rows; .* --val_fraction above 0"):
        open_data(config, Ranks())


def test_the_printed_command_without_validation_rows(tmp_path, capsys):
    np.save(tmp_path / "a.npy", np.eye(40))
    assert features.main([str(tmp_path / "a.npy"), "--out", str(tmp_path / "data"),
                          "--val_fraction", "0"]) == 0
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    data = open_data(load_argv(command[command.index("run_train.py") + 1:]), Ranks())
    assert data.val is None


def test_names_of_attributes_of_modules_are_refused(tmp_path):
    features.prepare_features(dict(training=np.eye(40)), None, str(tmp_path), 0.2,
                              np.arange(40) // 5)
    with pytest.raises(ValueError, match="training: not possible as names"):
        open_data(configure(tmp_path, "unused", **SYSTEM), Ranks())


def test_other_data_are_refused(tmp_path, trained, capsys):
    features.prepare_features({"a": np.zeros((40, 3))}, None, str(tmp_path / "d"), 0.2,
                              np.arange(40) // 5)
    assert main(["--ckpt", str(trained[0] / "ckpt.pt"), "--data_dir", str(tmp_path / "d")]) == 2
    assert "the checkpoint was trained on" in capsys.readouterr().err


def test_prepared_features_are_not_replaced_without_force(folder):
    arrays, target, runs = features.synthetic(n_runs=11, run_length=40)
    with pytest.raises(UserError, match="force"):
        features.prepare_features(arrays, target, folder, 0.1, runs, sources=["b.npy"])
