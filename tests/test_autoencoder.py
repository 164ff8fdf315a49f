"""--model autoencoder and data/prepare/features.py: the data, the losses, the numbers, the run."""

import json
import math

import numpy as np
import pytest
import torch
from conftest import run
from processes import REPO, python
from runs import (
    SMALL,
    assert_keys_change_only,
    assert_same,
    configure,
    go,
    metrics,
    run_program,
    tensors,
)

from data.meta import read_meta
from data.prepare import features
from data.rows import runs_in_val
from model.autoencoder import (
    MultimodalAutoencoder,
    combined_loss,
    correlation_sums,
    correlations,
    evaluate_rows,
    main,
    matching_loss,
    open_data,
    open_features,
    read_features_meta,
    reconstruction_losses,
    row_correlation,
)
from model.sample import load_model
from train.config import load_config
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
    for name, array in dict(film=video, sound=audio, bold=bold).items():
        np.save(tmp_path / f"{name}.npy", array)
    code, text = command(tmp_path / "film.npy", tmp_path / "sound.npy", "--target",
                         tmp_path / "bold.npy", "--run_length", 10,
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


def test_labels_of_runs(tmp_path):
    """Runs of any length, given as labels, stay whole."""
    labels = np.repeat([7, 3, 9, 4], [10, 40, 30, 20])
    val = runs_in_val(labels, 0.25)
    assert {tuple(np.unique(val[labels == label])) for label in (7, 3, 9, 4)} == {(True,), (False,)}
    assert len(np.unique(labels[val])) == 1


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


@pytest.mark.parametrize("case, words", [
    ("lengths", "different lengths: {'a': 30, 'target': 29"),
    ("nan", "a: row 7, column 1: nan"),
    ("huge", "a: row 7, column 1: -1e+300"), ("val", "a: row 16, column 0: inf"),
    ("cube", "expected numbers of shape (rows, dims)"), ("missing", "b.npy: no such file\n"),
    ("name", "expected files with different names"), ("one run", "nothing can be held out"),
    ("other", "not prepared from these sources")])
def test_bad_arrays(tmp_path, capsys, case, words):
    array, target = np.zeros((30, 2)), np.zeros((29 if case == "lengths" else 30, 2))
    array[7, 1] = dict(nan=np.nan, huge=-1e300).get(case, 0)
    array[16, 0] = np.inf if case == "val" else 0  # of a held-out run
    for name in ("a", "1"):
        np.save(tmp_path / f"{name}.npy", array[None] if case == "cube" else array)
    np.save(tmp_path / "t.npy", target)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.txt").write_text("all of it")
    more = {"one run": ["--run_length", 100]}.get(case, [])
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


def test_kill_and_resume_bit_for_bit(tmp_path, folder, trained):
    options = SYSTEM | dict(max_iters=100, eval_epochs=1)
    code, text = run_program(folder, tmp_path, env={"FAULT": "before_opt@77=kill9"}, **options)
    assert code == -9, text
    code, text = run_program(folder, tmp_path, **options)
    assert code == 0 and "at iter 50" in text, text
    assert_same(trained[0], tmp_path)


@pytest.fixture(scope="module")
def one_rank(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("one")
    go(folder, out, **SYSTEM | dict(max_iters=12, matching="correlation"))
    return out


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
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


def test_no_target(tmp_path):
    """An autoencoder alone: no match, no correlation."""
    features.prepare_features({"a": np.random.default_rng(0).normal(size=(40, 3))}, None,
                              str(tmp_path / "data"), 0.2, np.arange(40) // 5)
    last = go(tmp_path / "data", tmp_path / "out", **SYSTEM)["history"][-1]
    assert "val_recon_a" in last and "val_match" not in last and "val_correlation" not in last


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
        z = model.encode(model.standardise(map(torch.tensor, map(np.array, arrays))))
        out = model.head(z)
    mean, std = (np.array(model.spec[k]["target"]) for k in ("mean", "std"))
    with np.load(npz) as made:
        np.testing.assert_allclose(made["latent"], z, atol=1e-5)
        np.testing.assert_allclose(made["prediction"], out * std + mean, atol=1e-4)
    wanted = [np.corrcoef(out[:, i], arrays[-1][:, i])[0, 1] for i in range(60)]
    assert numbers["targets"] == pytest.approx(wanted, abs=1e-4)
    assert evaluate_rows(model, arrays, rows=7)[0]["correlation"] == pytest.approx(
        numbers["correlation"], abs=1e-6)


@pytest.mark.parametrize("changes, words", [
    (dict(data_dir="nowhere"), "nowhere: no modalities in a meta.json there; prepare it with"),
    (dict(modality_weights={"smell": 2.0}), "modality_weights: smell"),
    (dict(matching="cosine"), "must be one of mse, correlation")], ids=str)
def test_bad_configuration(tmp_path, folder, changes, words):
    options = SYSTEM | dict(data_dir=folder) | changes
    code, text = run_program(options.pop("data_dir"), tmp_path / "out", **options)
    assert code == 2 and words in text and "Traceback" not in text


def test_other_data_are_refused(tmp_path, trained, capsys):
    features.prepare_features({"a": np.zeros((40, 3))}, None, str(tmp_path / "d"), 0.2,
                              np.arange(40) // 5)
    assert main(["--ckpt", str(trained[0] / "ckpt.pt"), "--data_dir", str(tmp_path / "d")]) == 2
    assert "the checkpoint was trained on" in capsys.readouterr().err
