"""--model sae: rings of activations, what the autoencoder learns, the run, sae-lens, features."""

import hashlib
import json
import re
import shutil

import numpy as np
import pytest
import torch
from conftest import full_disk, run
from processes import python
from runs import (
    SMALL,
    assert_a_kill_changes_nothing,
    assert_keys_change_only,
    assert_same,
    configure,
    go,
    metrics,
    on_two_ranks,
    run_program,
    slow,
    tensors,
)

from data.prepare import prepare
from model.convert import convert
from model.core.weights import digest
from model.gpt import GPT, GPTConfig
from model.sae import ActivationBuffer, SparseAutoencoder, build_model, open_data
from model.sae.__main__ import main
from model.sae.activations import ActivationLoader, Backbone, open_activations
from model.sample import load_model
from train.base.errors import CheckpointError
from train.checkpoint import load_checkpoint, save_checkpoint
from train.config import load_config
from train.distributed import Ranks

# 4 windows of 8 tokens a step, 28 activations; a ring holds 3 windows, less than the run has steps.
SAE = dict(model="sae", layer=0, d_sae=48, k=4, auxk=8, dead_after=3, buffer_size=84)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory, data_dir):
    """A GPT of two blocks, trained a little."""
    out = tmp_path_factory.mktemp("backbone")
    go(data_dir, out, max_iters=60, n_layer=2, lr_decay_iters=60)
    return out / "ckpt.pt"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, data_dir, backbone):
    """(folder, result) of a whole run of 20 steps."""
    out = tmp_path_factory.mktemp("sae")
    return out, go(data_dir, out, backbone=str(backbone), **SAE)


def command_line(data_dir, out, backbone, **changes):
    options = SMALL | SAE | dict(data_dir=data_dir, out_dir=out, backbone=backbone) | changes
    return [f"--{k}={v}" for k, v in options.items()]


def opened(data_dir, backbone, world_size=1, rank=0, **changes):
    options = SAE | dict(backbone=str(backbone)) | changes
    return open_data(configure(data_dir, "unused", **options), Ranks(rank=rank)).train \
        if world_size == 1 else loader_of_rank(data_dir, backbone, world_size, rank, options)


def loader_of_rank(data_dir, backbone, world_size, rank, options):
    """The loader that a rank of several has, without a process group."""
    from train.dataloader import DataLoader
    config, ranks = configure(data_dir, "unused", **options), Ranks(rank, world_size)
    tokens = DataLoader(data_dir, config.micro_batch(world_size), config.block_size, "train",
                        config.seed, rank, world_size, 256)
    gpt = Backbone(str(backbone), 0, torch.device("cpu"), "float32")
    return ActivationLoader(tokens, gpt, config, ranks)


# -----------------------------------------------------------------------------
# the rings

def test_a_ring_keeps_the_newest_and_samples_by_age():
    ring, rows = ActivationBuffer(5, 2), torch.arange(16.0).view(8, 2)
    ring.add(rows[:3])
    assert len(ring) == 3 and sorted(ring.sample(3, seed=1)[:, 0].tolist()) == [0, 2, 4]
    ring.add(rows[3:])  # over the end: the oldest three are gone
    assert len(ring) == 5 and sorted(ring.sample(5, seed=1)[:, 0].tolist()) == [6, 8, 10, 12, 14]
    again = ActivationBuffer(5, 2)
    again.add(rows)  # more than it holds, at once: the rows stand at other places
    assert torch.equal(again.sample(4, seed=7), ring.sample(4, seed=7))
    assert not torch.equal(again.sample(5, seed=7), ring.sample(5, seed=8))
    assert len(ring.sample(12, seed=0)) == 12  # more than there are: some twice


def test_a_batch_is_a_function_of_its_step(data_dir, backbone):
    """In order, or asked for at once: the rings are filled again with what they would hold."""
    in_order, at_once = opened(data_dir, backbone), opened(data_dir, backbone)
    batches = [in_order.get_batch("cpu", step)[0].clone() for step in range(15)]  # 2 to a step
    for step in (14, 12, 3, 9):  # also back to the call before, as after a rewind
        assert torch.equal(at_once.get_batch("cpu", step)[0], batches[step])
    assert torch.equal(at_once.get_batch()[0], batches[0])
    assert batches[0].shape == (2, 7, 16)  # the first token of a window is left out
    window = in_order.backbone.activations(in_order.tokens.get_batch("cpu", 0)[0])
    assert torch.allclose(batches[0].sort(1).values, window.sort(1).values)  # nothing else yet
    older = [in_order.backbone.activations(in_order.tokens.get_batch("cpu", s)[0])
             for s in (10, 12, 14)]
    held = torch.cat(older, dim=1)  # (2, 21, 16): what the rings of calls 0, 2, 4, ... hold at 14
    nearest = torch.cdist(batches[14], held).amin(2)
    assert nearest.max() < 1e-5 and torch.cdist(batches[14], older[2]).amin(2).max() > 0.1


def test_ranks_share_the_batch_of_one(data_dir, backbone):
    alone = opened(data_dir, backbone)
    two = [opened(data_dir, backbone, 2, rank) for rank in (0, 1)]
    for it in range(5):
        whole = torch.cat([alone.get_batch("cpu", 2 * it + micro)[0] for micro in (0, 1)])
        parts = torch.cat([loader.get_batch("cpu", it)[0] for loader in two])
        assert torch.allclose(whole, parts, atol=1e-5)


# -----------------------------------------------------------------------------
# what is learned

def sparse_rows(n, seed=0):
    """n activations (n, 16): sums of 2 of 24 directions."""
    g = torch.Generator().manual_seed(seed)
    directions = torch.randn(24, 16, generator=torch.Generator().manual_seed(99))
    weights = torch.zeros(n, 24)
    chosen = torch.rand(n, 24, generator=g).topk(2).indices
    return weights.scatter(1, chosen, torch.rand(n, 2, generator=g) + 1) @ directions


def fit(steps=200, kill=0, **keys):
    """The numbers of an autoencoder of sparse_rows(), the first `kill` features of which are
    silenced at the start; killed: how many of these are dead at the end."""
    torch.set_num_threads(1)  # more would only wait for each other
    x = sparse_rows(4000)
    scale = x.var(0).mean() ** -0.5
    config = load_config(None, dict(model="sae", d_sae=48, dead_after=20) | keys)
    data = type("Data", (), {"spec": dict(d_in=16, mean=x.mean(0).tolist(), scale=float(scale))})
    model = build_model(config, data)
    with torch.no_grad():
        model.sae.b_enc[:kill] = -5.0
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for it in range(steps):
        loss, sums = model(x[it * 200 % 4000:][:200][None])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.after_step(it, sums | dict(count=200))
    with torch.no_grad():
        sums = model.eval().sae(sparse_rows(2000, seed=1))[1]
    numbers = model.numbers({k: v.double() for k, v in sums.items()} | dict(count=2000))
    return numbers | dict(killed=int((model.sae.silent >= 20)[:kill].sum()))


def test_finds_sparse_directions():
    numbers = fit(auxk=8, sae="topk", k=3)
    assert numbers["explained_variance"] > 0.8 and numbers["l0"] < 8


@pytest.mark.ci
def test_dead_features_are_counted_and_revived():
    """8 living features cannot write sums of 24 directions; the dead ones come to help."""
    left, revived = (fit(steps=800, auxk=auxk, k=3, kill=40) for auxk in (0, 16))
    assert left["dead"] >= left["killed"] == 40
    assert revived["killed"] <= 20
    assert revived["explained_variance"] > left["explained_variance"] + 0.05


def test_explained_variance_is_that_of_all_rows(trained, data_dir, backbone):
    """Sums over batches give what the definition gives over everything at once."""
    model, _ = load_model(trained[0] / "ckpt.pt")
    val = open_data(model.keys, Ranks()).val
    total, seen = {}, []
    for i in range(3):
        idx, targets = val.fixed_batch(i, 3)
        with torch.no_grad():
            loss, sums = model(idx, targets)
        total = {k: total.get(k, 0) + v.double() for k, v in sums.items()}
        seen.append(model.backbone().activations(idx).flatten(0, 1))
    x = torch.cat(seen)
    with torch.no_grad():
        out = model.sae(x)[2]
    share = (x - out).square().sum() / (x - x.mean(0)).square().sum()
    numbers = model.numbers(total)
    assert numbers["explained_variance"] == pytest.approx(1 - float(share), abs=1e-5)
    assert numbers["l0"] == pytest.approx(float((model.sae.encode(x) > 0).sum(1).float().mean()))


def test_spliced_losses(trained, data_dir):
    """What is put in the stream's place is what the rest of the backbone sees."""
    model, _ = load_model(trained[0] / "ckpt.pt")
    idx, targets = open_data(model.keys, Ranks()).val.fixed_batch(0, 1)
    backbone = model.backbone()
    plain = float(backbone.gpt(idx, targets)[0])
    assert float(backbone.loss(idx, targets, lambda x: x)) == pytest.approx(plain)
    backbone.gpt.compute_loss = None  # types with losses of their own are scored as GPTs too
    assert float(backbone.loss(idx, targets, lambda x: x)) == pytest.approx(plain)
    assert float(backbone.loss(idx, targets, torch.zeros_like)) > plain + 0.01
    assert not backbone.gpt.h[0]._forward_hooks
    with torch.no_grad():
        sums = model(idx, targets)[1]
    loss = torch.nn.functional.cross_entropy(backbone.gpt(idx)[:, 1:].flatten(0, 1),
                                             targets[:, 1:].flatten())
    assert float(sums["lm_loss"] / sums["count"]) == pytest.approx(float(loss), abs=1e-5)


# -----------------------------------------------------------------------------
# the run

def test_the_run(trained, backbone):
    out, result = trained
    first, last = (e for e in (result["history"][0], result["history"][-1]))
    assert last["val_explained_variance"] > first["val_explained_variance"] + 0.1
    assert last["val_l0"] <= 4 and last["val_lm_loss"] == first["val_lm_loss"]
    assert last["val_spliced_loss"] < first["val_spliced_loss"]
    assert {"explained_variance", "l0", "dead", "auxk"} <= metrics(out)[-2].keys()
    names = torch.load(out / "ckpt.pt")["model"].keys()
    assert {n.split(".")[0] for n in names} == {"sae"}  # nothing of the backbone


def test_the_weight_of_the_penalty_changes_the_loss_only(tmp_path, data_dir, backbone):
    assert_keys_change_only(["val_loss"], data_dir, tmp_path,
                            SAE | dict(backbone=str(backbone), sae="jumprelu"), l0=0.5)


@pytest.mark.matrix(135)
def test_kill_and_resume_bit_for_bit(tmp_path, data_dir, backbone, trained):
    """kill -9 while a sparse autoencoder learns activations -> the end is exact"""
    out, options = tmp_path / "out", SAE | dict(backbone=str(backbone))
    code, text = run_program(data_dir, out, env={"FAULT": "before_opt@12=kill9"}, **options)
    assert code == -9, text
    code, text = run_program(data_dir, out, **options)
    # The save of step 10 is in the background: on a busy machine it may not have been over.
    assert code == 0 and re.search("at iter (5|10)", text), text
    assert_same(trained[0], out)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_two_ranks_are_one(tmp_path, data_dir, backbone, trained, way):
    code, text = run(*command_line(data_dir, tmp_path / "out", backbone, distributed=way), ranks=2)
    assert code == 0, text
    one, two = (tensors(folder / "ckpt.pt")[0] for folder in (trained[0], tmp_path / "out"))
    assert one.keys() == two.keys()
    for name in one:
        assert torch.allclose(one[name].float(), two[name].float(), atol=1e-5), name


@pytest.mark.parametrize("mode, steps", [("max", 20), ("min", 10)])
def test_early_stopping_on_its_own_metric(tmp_path, data_dir, backbone, mode, steps):
    """It rises at every evaluation: wanted to, the run goes on; wanted to fall, it stops."""
    watched = dict(early_stopping_metric="val_explained_variance", early_stopping_mode=mode,
                   early_stopping_patience=1)
    result = go(data_dir, tmp_path, backbone=str(backbone), **SAE, **watched)
    assert result["iter_num"] == steps
    assert ("no better val_explained_variance" in result["finished"]) == (mode == "min")


# -----------------------------------------------------------------------------
# out of a checkpoint

def read_safetensors(path):
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8:8 + size]), data[8 + size:]
    return {name: np.frombuffer(body[slice(*e["data_offsets"])], "<f4").reshape(e["shape"])
            for name, e in header.items() if name != "__metadata__"}


def test_sae_lens_folder(tmp_path, trained):
    """Computed as sae-lens does from the folder (its TopKSAE), the same comes out."""
    assert main(["--ckpt", str(trained[0] / "ckpt.pt"), "--to", str(tmp_path)]) == 0
    cfg = json.loads((tmp_path / "cfg.json").read_text())
    assert (cfg["architecture"], cfg["k"], cfg["d_in"], cfg["d_sae"]) == ("topk", 4, 16, 48)
    assert cfg["metadata"]["hook_name"] == "blocks.0.hook_resid_post"
    w = read_safetensors(tmp_path / "sae_weights.safetensors")
    model, _ = load_model(trained[0] / "ckpt.pt")
    x = np.random.default_rng(0).normal(size=(9, 16)).astype("f4") / float(model.sae.scale)
    x += w["b_dec"]
    pre = (x - w["b_dec"]) @ w["W_enc"] + w["b_enc"]
    kept = np.where(pre >= np.sort(pre)[:, -4:-3], np.maximum(pre, 0), 0)
    with torch.no_grad():
        ours = model.sae(torch.from_numpy(x))[2].numpy()
    assert np.allclose(kept @ w["W_dec"] + w["b_dec"], ours, atol=1e-4)


def test_jumprelu_has_its_name_in_sae_lens(tmp_path, data_dir, backbone, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    go(data_dir, tmp_path, backbone=str(backbone), **SAE | dict(sae="jumprelu", max_iters=2))
    assert main(["--ckpt=~/ckpt.pt", "--to=~/lens"]) == 0
    assert json.loads((tmp_path / "lens/cfg.json").read_text())["architecture"] == "jumprelu"


def test_top_contexts(trained, data_dir):
    """The command prints places where a feature is as active as it says."""
    page = python("-m", "model.sae", "--ckpt", trained[0] / "ckpt.pt", "--features", "2",
                  "--contexts", "3", "--batches", "4")
    assert page.returncode == 0, page.stderr
    lines = page.stdout.splitlines()
    assert len(lines) == 8 and lines[0].startswith("feature ")
    feature, (value, *text) = int(lines[0].split()[1].strip(":")), lines[1].split()
    ids = [int(t.strip("[]")) for t in text]
    last = next(i for i, t in enumerate(text) if t.startswith("["))
    model, _ = load_model(trained[0] / "ckpt.pt")
    with torch.no_grad():
        z = model.sae.encode(model.backbone().activations(torch.tensor([ids])))
    assert float(z[0, last - 1, feature]) == pytest.approx(float(value), abs=0.01)


# -----------------------------------------------------------------------------
# what is refused

@pytest.mark.parametrize("changes, words", [
    (dict(backbone="nowhere.pt"), "backbone: nowhere.pt: no such file"),
    (dict(layer=2), "expected a GPT with more than 2 blocks"),
    (dict(sae="jump"), "must be one of topk, batchtopk, jumprelu")], ids=str)
def test_bad_input(tmp_path, data_dir, backbone, changes, words):
    options = SAE | dict(backbone=str(backbone)) | changes
    code, text = run_program(data_dir, tmp_path / "out", **options)
    assert code == 2 and words in text and "Traceback" not in text
    assert "backbone: backbone:" not in text


def test_what_knows_its_backbone_by_the_file_goes_on(tmp_path, data_dir, backbone, trained):
    """Older checkpoints hold the sha256 of the backbone's file, not of its weights."""
    state, before = torch.load(trained[0] / "ckpt.pt"), hashlib.sha256(backbone.read_bytes())
    weights = digest(load_checkpoint(str(backbone))["model"])
    for entry in (state["spec"], state["data"]):
        assert entry["backbone"] == weights
        entry["backbone"] = before.hexdigest()
    save_checkpoint(str(tmp_path / "ckpt.pt"), state)
    load_model(str(tmp_path / "ckpt.pt"))[0].backbone()
    result = go(data_dir, tmp_path, backbone=str(backbone), **SAE, max_iters=21, lr_decay_iters=20,
                allow_change=["data", "backbone"])
    assert result["iter_num"] == 21
    assert load_checkpoint(str(tmp_path / "ckpt.pt"))["spec"]["backbone"] == weights


def test_another_backbone_is_refused(tmp_path, data_dir, backbone, trained, capsys):
    other = tmp_path / "other"
    go(data_dir, other, max_iters=2, n_layer=2)
    options = SAE | dict(backbone=str(other / "ckpt.pt"), max_iters=21)
    code, text = run_program(data_dir, trained[0], **options)
    assert code == 2 and "backbone" in text and "data: checkpoint has" in text
    state = torch.load(trained[0] / "ckpt.pt")
    state["config"]["backbone"] = str(other / "ckpt.pt")
    save_checkpoint(str(tmp_path / "moved.pt"), state)
    assert main(["--ckpt", str(tmp_path / "moved.pt")]) == 2
    assert "are not those of the training run" in capsys.readouterr().err
    assert main(["--ckpt", str(backbone)]) == 2
    assert "expected one of --model sae" in capsys.readouterr().err


def test_a_backbone_that_was_trained_again_is_read_again(tmp_path, data_dir, backbone):
    """cells of a notebook, executed twice: other weights in the same file -> they are analysed"""
    def digest_of(path):
        config = configure(data_dir, "unused", backbone=str(path), **SAE)
        return open_data(config, Ranks()).spec["backbone"]
    path, folder, new = tmp_path / "backbone.pt", tmp_path / "hf", tmp_path / "new"
    shutil.copy(backbone, path)
    convert(str(path), str(folder))
    before = digest_of(path)
    state = load_checkpoint(path)
    state["model"]["wte.weight"][0] += 1
    save_checkpoint(path, state)
    assert digest_of(path) != before
    before = digest_of(folder)
    convert(str(path), str(new))
    shutil.copy(new / "model.safetensors", folder)  # the time of the folder stays
    assert digest_of(folder) != before


def test_the_file_alone_rebuilds_it(trained):
    model, _ = load_model(trained[0] / "ckpt.pt")
    assert isinstance(model.sae, SparseAutoencoder) and model.sae.silent.dtype == torch.int64


# -----------------------------------------------------------------------------
# the arithmetic, a second way

def by_hand(sae, x):
    """Loss, sums and reconstruction of SparseAutoencoder, a token at a time, in float64."""
    c, w = sae.keys, {n: t.detach().double().numpy() for n, t in sae.state_dict().items()}
    W = w["W_dec"] / np.linalg.norm(w["W_dec"], axis=1, keepdims=True)
    dead = w["silent"] >= c.dead_after
    parts, outs, fired = {"mse": 0.0, "auxk": 0.0}, [], 0
    rows = (x.double().numpy() - w["mean"]) * w["scale"]
    for row in rows:
        pre = (row - w["b_dec"]) @ w["W_enc"] + w["b_enc"]
        z = np.maximum(pre, 0)
        z[np.argsort(pre)[:-c.k]] = 0
        out = z @ W + w["b_dec"]
        parts["mse"] += ((row - out) ** 2).mean()
        if c.auxk and dead.any():
            helpers = [f for f in np.argsort(-pre) if dead[f]][:c.auxk]
            missed = row - out - sum(pre[f] * W[f] for f in helpers)
            share = (missed ** 2).sum() / ((row - out) ** 2).sum()
            parts["auxk"] += share * min(1.0, dead.sum() / c.auxk)
        outs.append(out / w["scale"] + w["mean"])
        fired = fired + (z > 0)
    loss = parts["mse"] + c.auxk_weight * parts["auxk"]
    return loss / len(rows), parts, np.stack(outs), fired, rows


@pytest.mark.parametrize("keys, n_dead", [
    (dict(k=3, auxk=4), 6), (dict(k=3, auxk=4), 2), (dict(k=1, auxk=0), 5), (dict(k=9, auxk=2), 3),
    (dict(k=9, auxk=2), 0)], ids=str)
def test_the_loss_is_that_of_a_loop_over_tokens(keys, n_dead):
    config = load_config(None, dict(model="sae", d_sae=10, dead_after=7, auxk_weight=0.7) | keys)
    spec = dict(d_in=6, mean=[0.5, -1.0, 0.0, 2.0, 0.1, 0.2], scale=0.4)
    sae = build_model(config, type("Data", (), {"spec": spec})).sae
    draw = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for p in sae.parameters():
            p.copy_(torch.randn(p.shape, generator=draw))
        sae.silent[:n_dead] = 7
        sae.silent[n_dead:] = 6
    x = torch.randn(9, 6, generator=draw)
    loss, sums, out = sae(x)
    expected, parts, outs, fired, rows = by_hand(sae, x)
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    kept = {"mse", "auxk"} if config.auxk else {"mse"}
    assert set(sums) == kept | {"x", "xx", "fired"}
    for name in kept:
        assert float(sums[name]) == pytest.approx(parts[name], rel=1e-4), name
    np.testing.assert_allclose(out.detach(), outs, atol=1e-4)
    assert sums["fired"].tolist() == fired.tolist() == (sae.encode(x) > 0).sum(0).tolist()
    np.testing.assert_allclose(sums["x"], rows.sum(0), atol=1e-4)
    assert float(sums["xx"]) == pytest.approx((rows ** 2).sum(), rel=1e-5)
    sae.may_have_dead = False  # as after_step sets it without dead features
    assert "auxk" not in sums or float(sae(x)[1]["auxk"]) == 0


def test_activations_hundreds_of_times_as_long_are_left_out():
    """One of nine counts as the mean and stays as it is, to the bit; nothing else changes. The
    factors are those of the others."""
    config = load_config(None, dict(model="sae", d_sae=10, k=3, auxk=0))
    spec = dict(d_in=6, mean=[0.5, -1.0, 0.0, 2.0, 0.1, 0.2], scale=0.4)
    sae = build_model(config, type("Data", (), {"spec": spec})).sae
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(4))
    for size, left_out in ((3.9, False), (4.1, True)):
        x[4] = sae.mean + size / 0.4 * torch.tensor([1.0, -1, 1, 1, -1, 1])
        as_mean = x.index_copy(0, torch.tensor([4]), sae.mean[None])
        given = as_mean if left_out else x
        loss, sums, out = sae(x)
        assert torch.equal(out[4], x[4]) == left_out
        assert torch.equal(torch.cat((out[:4], out[5:])), torch.cat((sae(given)[2][:4],
                                                                     sae(given)[2][5:])))
        assert loss == sae(given)[0] and float(sums["xx"]) == float(sae(given)[1]["xx"])
        assert torch.equal(sae.encode(x), sae.encode(given))

    rows = torch.randn(1, 64, 5, generator=torch.Generator().manual_seed(1)) + 1
    rows[0, 7] *= 1000
    backbone = Backbone.__new__(Backbone)
    backbone.gpt = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, n_hidden=8, block_size=4,
                                 vocab_size=9))
    backbone.activations = lambda idx: rows
    stream = type("Stream", (), dict(read=lambda self, at, n: np.zeros((len(at), n))))
    mean, scale = backbone.statistics(type("Tokens", (), dict(n_tokens=9, block_size=4,
                                                              stream=stream()))())
    others = np.delete(rows[0].double().numpy(), 7, axis=0)
    np.testing.assert_allclose(mean, others.mean(0))
    assert scale == pytest.approx(others.var(0).mean() ** -0.5)


def test_silent_steps_are_counted_until_a_feature_fires():
    config = load_config(None, dict(model="sae", d_sae=3, k=1, auxk=0, dead_after=2))
    spec = dict(d_in=2, mean=[0.0, 0.0], scale=1.0)
    model = build_model(config, type("Data", (), {"spec": spec}))
    seen = []
    for fired in ([0, 5, 0], [0, 0, 1], [1, 0, 0], [0, 2, 2]):
        model.after_step(0, dict(fired=torch.tensor(fired)))
        seen.append((model.sae.silent.tolist(), model.sae.may_have_dead))
    assert seen == [([1, 0, 1], False), ([2, 1, 0], True), ([0, 2, 1], True), ([1, 0, 0], False)]
    model.sae.silent[:] = torch.tensor([1, 2, 3])
    sums = dict(count=4.0, fired=torch.tensor([8, 0, 1]), mse=torch.tensor(3.0), xx=torch.tensor(
        9.0), x=torch.tensor([2.0, 4.0]), auxk=torch.tensor(1.0))
    training = model.numbers(sums)
    assert training == dict(explained_variance=1 - 6 / 4, l0=9 / 4, auxk=0.25, dead=2.0)
    evaluation = model.eval().numbers(sums | dict(lm_loss=torch.tensor(8.0),
                                                  spliced_loss=torch.tensor(10.0),
                                                  zeroed_loss=torch.tensor(16.0)))
    assert evaluation == training | dict(dead=1.0, lm_loss=2.0, spliced_loss=2.5,
                                         loss_recovered=0.75)
    same = model.numbers(sums | dict(lm_loss=torch.tensor(8.0), spliced_loss=torch.tensor(8.0),
                                     zeroed_loss=torch.tensor(8.0), xx=torch.tensor(5.0)))
    assert same["loss_recovered"] is None and same["explained_variance"] is None


def test_the_start_of_an_autoencoder():
    config = load_config(None, dict(model="sae", d_sae=30, k=2, auxk=0))
    spec = dict(d_in=5, mean=[1.0, 2.0, 3.0, 4.0, 5.0], scale=0.5)
    sae = build_model(config, type("Data", (), {"spec": spec})).sae
    assert torch.equal(sae.W_enc.T, sae.W_dec) and sae.mean.tolist() == spec["mean"]
    torch.testing.assert_close(sae.W_dec.norm(dim=1), torch.ones(30))
    assert float(sae.scale) == 0.5 and not sae.silent.any() and not sae.b_enc.any()
    assert not sae.b_dec.any() and not sae.W_dec.isnan().any()


def test_top_contexts_are_those_of_all_windows(trained, data_dir):
    from model.sae.__main__ import find_top_contexts
    from model.sae.activations import N_SKIPPED
    from train.dataloader import DataLoader
    model, _ = load_model(trained[0] / "ckpt.pt")
    tokens = DataLoader(data_dir, 16, 8, "val", vocab_size=256)
    rate, value, window, position, rows = find_top_contexts(model, tokens, 3, 4)
    idx = torch.cat([tokens.fixed_batch(i, 3)[0] for i in range(3)])
    assert torch.equal(rows, idx) and value.shape == window.shape == position.shape == (48, 4)
    with torch.no_grad():
        z = model.sae.encode(model.backbone().activations(idx))  # (48 windows, 7, F)
    torch.testing.assert_close(rate, (z > 0).float().mean((0, 1)))
    strongest = z.amax(1).T.sort(descending=True).values[:, :4]
    torch.testing.assert_close(value, strongest)
    for f in range(48):
        assert len(set(window[f].tolist())) == 4  # each window once
        for v, w, p in zip(value[f], window[f], position[f]):
            assert z[w, p - N_SKIPPED, f] == pytest.approx(float(v), abs=1e-5)
    assert find_top_contexts(model, tokens, 1, 99)[1].shape == (48, 16)  # no more than there are


def test_a_place_and_what_stands_around_it():
    from data.tokenizer import load_tokenizer
    from model.sae.__main__ import format_context
    row = torch.arange(100, 200)
    assert format_context(row, 50, None) == (" ".join(map(str, range(110, 150))) + " [150] "
                                       + " ".join(map(str, range(151, 163))))
    assert format_context(row, 1, None, 3, 1) == "100 [101] 102"
    assert format_context(row, 99, None, 1) == (
        "198 [199] ")
    byte = load_tokenizer("byte")
    text = torch.tensor(byte.encode("one\ntwo three"))
    assert format_context(text, 4, byte, 2, 3) == "e\\n[t]wo "


@pytest.mark.parametrize("path, name", [
    ("runs/deep/ckpt.pt", "deep"), ("hf:owner/deep", "owner/deep"), (None, "")])
def test_what_sae_lens_gets_of_an_autoencoder(tmp_path, path, name):
    from model.sae.__main__ import export_sae_lens
    config = load_config(None, dict(model="sae", d_sae=10, k=10, auxk=0, layer=3,
                                    backbone=path))
    spec = dict(d_in=4, mean=[1.0, 2.0, 3.0, 4.0], scale=0.5, block_size=32)
    model = build_model(config, type("Data", (), {"spec": spec}))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(generator=torch.Generator().manual_seed(p.numel()))
    export_sae_lens(model, tmp_path / "new" / "lens")
    w = read_safetensors(tmp_path / "new" / "lens" / "sae_weights.safetensors")
    x = torch.randn(6, 4)
    z = np.maximum((x.numpy() - w["b_dec"]) @ w["W_enc"] + w["b_enc"], 0)
    with torch.no_grad():
        np.testing.assert_allclose(z @ w["W_dec"] + w["b_dec"], model.sae(x)[2], atol=1e-4)
    cfg = json.loads((tmp_path / "new" / "lens" / "cfg.json").read_text())
    assert cfg == dict(
        architecture="topk", d_in=4, d_sae=10, dtype="float32", device="cpu", k=10,
        apply_b_dec_to_input=True, normalize_activations="none", reshape_activations="none",
        rescale_acts_by_decoder_norm=False,
        metadata=dict(model_name=name, hook_name="blocks.3.hook_resid_post", prepend_bos=False,
                      context_size=32, sae_lens_version="6.0.0"))


# -----------------------------------------------------------------------------
# batchtopk, jumprelu, Matryoshka

KINDS = [dict(sae="topk"), dict(sae="batchtopk"), dict(sae="batchtopk", prefixes=[2, 5]),
         dict(sae="jumprelu")]


def untrained(**keys):
    """A model of 6 channels and 10 features with random tensors."""
    config = load_config(None, dict(model="sae", d_sae=10, k=3, auxk=4, dead_after=7, layer=0) |
                         keys)
    spec = dict(d_in=6, mean=[0.5, -1.0, 0.0, 2.0, 0.1, 0.2], block_size=8, scale=0.4)
    model = build_model(config, type("Data", (), {"spec": spec}))
    draw = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=draw))
        if hasattr(model.sae, "threshold"):
            model.sae.threshold.fill_(0.8)
        model.sae.silent[:6] = 7
    return model, torch.randn(3, 4, 6, generator=draw)


def dense_loss(sae, rows, group, training=True):
    """The loss of activations (N, C) and the reconstruction, with a full matrix for every product,
    in float64. Differentiable; of jumprelu without the estimate."""
    c, w = sae.keys, {n: t.double() for n, t in [*sae.named_parameters(), *sae.named_buffers()]}
    x = (rows.double() - w["mean"]) * w["scale"]
    W = w["W_dec"] / w["W_dec"].norm(dim=1, keepdim=True)
    pre = (x - w["b_dec"]) @ w["W_enc"] + w["b_enc"]
    if c.sae == "topk":
        least = pre.sort(1, descending=True).values[:, c.k - 1:c.k]
    elif c.sae == "batchtopk" and training:
        sizes = [part.flatten().sort(descending=True).values for part in pre.split(group)]
        least = torch.stack([s[group * c.k - 1] for s in sizes]).repeat_interleave(group)[:, None]
        least = least.clamp(min=0)
    else:
        least = w.get("threshold", torch.tensor(0.0))
    z = torch.where(pre >= least, pre, 0.0).clamp(min=0)
    loss = 0
    for n in [*c.prefixes * training, 10]:
        out = z[:, :n] @ W[:n] + w["b_dec"]
        loss = loss + (x - out).square().mean(1)
    loss = loss + c.l0 * (z > 0).sum(1) * (c.sae == "jumprelu")
    order = pre[:, :6].argsort(1, descending=True)[:, :4]  # of the six dead features
    helpers = torch.zeros_like(pre).scatter(1, order, pre[:, :6].gather(1, order))
    error = (x - out).detach()
    loss = loss + c.auxk_weight * (error - helpers @ W).square().sum(1) / error.square().sum(1)
    return loss.mean(), out / w["scale"] + w["mean"], z, least


@pytest.mark.parametrize("keys", KINDS, ids=str)
def test_loss_and_gradients_are_those_of_full_matrices(keys):
    model, x = untrained(**keys)
    loss, sums = model(x)
    assert float(loss) == pytest.approx(float(dense_loss(model.sae, x.flatten(0, 1), 4)[0]),
                                        rel=1e-5)
    expected, _, z, least = dense_loss(model.sae, x.flatten(0, 1), 4)
    assert sums["fired"].tolist() == (z > 0).sum(0).tolist()
    if model.keys.sae == "batchtopk":
        assert float(sums["threshold"]) == pytest.approx(float(least.sum()), rel=1e-5)
        assert (z > 0).sum() <= 36 and least.unique().numel() == 3  # a group is a sample
    names = [n for n, _ in model.named_parameters() if n != "sae.threshold"]
    parameters = [dict(model.named_parameters())[n] for n in names]
    for name, a, b in zip(names, torch.autograd.grad(loss, parameters),
                          torch.autograd.grad(expected, parameters)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("keys", KINDS, ids=str)
def test_evaluation_keeps_what_is_above_the_threshold(keys):
    model, x = untrained(**keys)
    rows = x.flatten(0, 1)
    sae = model.eval().sae
    loss, sums, out = sae(rows)
    expected, outs, z, _ = dense_loss(sae, rows, 4, training=False)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    torch.testing.assert_close(out, outs.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sae.encode(x).flatten(0, 1), z.float(), rtol=1e-4, atol=1e-5)
    alone = torch.cat([sae(row[None])[2] for row in rows])  # a token does not depend on others
    torch.testing.assert_close(alone, out)


@pytest.mark.ci
def test_gradients_of_thresholds_are_those_of_sae_lens():
    """Its Step and JumpReLU are the autograd functions of arXiv:2407.14435."""
    lens = pytest.importorskip("sae_lens.saes.jumprelu_sae")
    from model.sae import BANDWIDTH
    model, x = untrained(sae="jumprelu", auxk=0, l0=0.3)
    sae = model.sae
    ours = torch.autograd.grad(model(x)[0], [sae.threshold, sae.b_enc])
    rows = sae.normalise(x.flatten(0, 1))[0]
    pre = (rows - sae.b_dec) @ sae.W_enc + sae.b_enc
    z = lens.JumpReLU.apply(pre, sae.threshold, BANDWIDTH, False)
    l0 = lens.Step.apply(pre, sae.threshold, BANDWIDTH, False).sum(1)
    loss = ((rows - z @ sae.decoder() - sae.b_dec).square().mean(1) + 0.3 * l0).mean()
    for a, b in zip(ours, torch.autograd.grad(loss, [sae.threshold, sae.b_enc])):
        torch.testing.assert_close(a, b)
    assert ours[0].abs().sum() > 0


@pytest.mark.ci
def test_batch_threshold_is_that_of_sae_lens():
    lens = pytest.importorskip("sae_lens.saes.batchtopk_sae")
    pre = torch.randn(20, 50, generator=torch.Generator().manual_seed(1))
    model, _ = untrained(sae="batchtopk")
    for floor in (0.1, 9.0):  # 9: no feature is above half of it
        model.sae.threshold.fill_(floor)
        least = model.sae.batch_threshold(pre, 5)
        for rows, values in zip(pre.split(5), least.split(5)):
            kept = lens.BatchTopK(3)(rows)
            assert torch.equal(kept, torch.where(rows >= values, rows, 0.0))


def test_threshold_follows_the_batches():
    model, x = untrained(sae="batchtopk")
    for it in range(200):
        model.after_step(it, model(x)[1] | dict(count=12))
    least = dense_loss(model.sae, x.flatten(0, 1), 4)[3]
    assert float(model.sae.threshold) == pytest.approx(float(least.mean()), rel=1e-3)


@pytest.mark.parametrize("keys", [dict(sae="batchtopk", prefixes=[12, 24], k=3),
                                  dict(sae="jumprelu", l0=0.02)], ids=str)
def test_new_activations_find_sparse_directions(keys):
    numbers = fit(auxk=8, steps=300, **keys)
    assert numbers["explained_variance"] > 0.9 and numbers["l0"] < 4


@pytest.mark.parametrize("keys", KINDS, ids=str)
def test_sae_lens_computes_the_same(tmp_path, keys):
    """The folder, loaded by sae-lens: features and reconstruction."""
    from model.sae.__main__ import export_sae_lens
    lens = pytest.importorskip("sae_lens")
    model, x = untrained(**keys)
    x = x.flatten(0, 1)
    export_sae_lens(model.eval(), tmp_path)
    other = lens.SAE.load_from_disk(tmp_path)
    with torch.no_grad():
        features = other.encode(x)
        torch.testing.assert_close(features, model.sae.encode(x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(other.decode(features), model.sae(x)[2], rtol=1e-5, atol=1e-5)
    kind = model.keys.sae.replace("batchtopk", "jumprelu")
    assert other.cfg.architecture() == kind and (features > 0).any()
    found = other.cfg.metadata
    assert (found.hook_name, found.prepend_bos) == ("blocks.0.hook_resid_post", False)


def test_batchtopk_uses_no_operation_that_raises_on_a_gpu_with_deterministic(monkeypatch):
    model, x = untrained(sae="batchtopk", prefixes=[4])
    monkeypatch.setattr(torch.Tensor, "kthvalue", None)
    monkeypatch.setattr(torch, "kthvalue", None)
    bincount = torch.bincount  # deterministic without weights
    monkeypatch.setattr(torch, "bincount", lambda x, *, minlength: bincount(x, minlength=minlength))
    model(x)[0].backward()
    assert model.sae.b_enc.grad.any()


RUNS = [dict(sae="batchtopk", prefixes=[6, 20]), dict(sae="jumprelu")]


@pytest.mark.matrix(135)
@pytest.mark.parametrize("keys", [RUNS[0], slow(RUNS[1])], ids=str)
def test_new_activations_resume_bit_for_bit(tmp_path, data_dir, backbone, keys):
    """kill -9 in the other kinds -> the end is exact"""
    assert_a_kill_changes_nothing(data_dir, tmp_path, **SAE | dict(backbone=str(backbone)) | keys)


@pytest.mark.ci
@pytest.mark.parametrize("keys, way", [
    slow(RUNS[0], "ddp"), (RUNS[0], "fsdp"), (RUNS[1], "ddp"), slow(RUNS[1], "fsdp")], ids=str)
def test_new_activations_are_the_same_on_two_ranks(tmp_path, data_dir, backbone, keys, way):
    options = {k: ",".join(map(str, v)) if isinstance(v, list) else v for k, v in keys.items()}
    go(data_dir, tmp_path / "one", backbone=str(backbone), **SAE | keys)
    code, text = run(*command_line(data_dir, tmp_path / "two", backbone, distributed=way,
                                   **options), ranks=2)
    assert code == 0, text
    one, two = (tensors(tmp_path / folder / "ckpt.pt")[0] for folder in ("one", "two"))
    assert one.keys() == two.keys()
    for name in one:
        assert torch.allclose(one[name].float(), two[name].float(), atol=1e-5), name


def test_batchtopk_in_bfloat16_is_about_the_same_sharded(tmp_path, data_dir, backbone):
    """The sharded weights are rounded, those of one rank are not."""
    options = dict(backbone=str(backbone), dtype="bfloat16") | SAE | RUNS[0]
    one = go(data_dir, tmp_path / "one", **options)["history"]
    two = on_two_ranks(tmp_path / "two", SMALL | options | dict(data_dir=str(data_dir),
                                                                distributed="fsdp"))
    for a, b in zip(one, two, strict=True):
        assert b["val_loss"] == pytest.approx(a["val_loss"], rel=0.1)


@pytest.fixture(scope="module")
def activations(tmp_path_factory):
    """A folder with activations: windows of 50 rows of sparse_rows()."""
    folder = tmp_path_factory.mktemp("activations")
    rows = sparse_rows(4000).view(80, 50, 16).numpy()
    np.save(folder / "train_activations.npy", rows[:70])
    np.save(folder / "val_activations.npy", rows[70:])
    return folder


def test_activations_of_a_folder(tmp_path, activations, capsys):
    options = SAE | dict(backbone=None, sae="batchtopk", auxk=0, learning_rate=0.03)
    result = go(activations, tmp_path / "out", **options, max_iters=60, lr_decay_iters=60)
    first, last = result["history"][0], result["history"][-1]
    assert last["val_explained_variance"] > first["val_explained_variance"] + 0.1
    assert 2 < last["val_l0"] < 8 and last["val_explained_variance"] > 0.5
    ckpt = str(tmp_path / "out/ckpt.pt")
    model, _ = load_model(ckpt)
    rows = np.load(activations / "train_activations.npy").reshape(-1, 16)
    np.testing.assert_allclose(model.sae.mean, rows[:3200].mean(0), atol=0.2)
    assert main(["--ckpt", ckpt, "--to", str(tmp_path / "lens")]) == 0
    for more, message in (([], "it was trained on activations"),
                          (["--backbone", ckpt], "this model has no frozen part")):
        assert main(["--ckpt", ckpt, *more]) == 2
        assert message in capsys.readouterr().err


def test_validation_activations_have_the_channels_of_the_training_data(tmp_path, activations):
    from train.base.errors import DataError
    shutil.copytree(activations, tmp_path / "data")
    np.save(tmp_path / "data/val_activations.npy", np.zeros((10, 50, 17), np.float32))
    with pytest.raises(DataError, match="val_activations.npy: .* expected n x n x 16"):
        go(tmp_path / "data", tmp_path / "out", **SAE | dict(backbone=None))


def test_activations_that_are_not_finite_are_named(tmp_path, activations):
    from train.base.errors import DataError
    rows = np.load(activations / "train_activations.npy")
    rows[69, 3] = np.nan
    np.save(tmp_path / "train_activations.npy", rows)
    with pytest.raises(DataError, match="train_activations.npy has NaN or infinite values"):
        go(tmp_path, tmp_path / "out", **SAE | dict(backbone=None, eval_interval=0))


def test_each_of_a_few_windows_has_the_same_weight_in_the_scale(tmp_path):
    rows = np.random.default_rng(0).standard_normal((3, 50, 4)).astype(np.float32)
    rows[2] += 3
    np.save(tmp_path / "train_activations.npy", rows)
    config = load_config(None, SMALL | SAE | dict(
        backbone=None, data_dir=str(tmp_path), eval_interval=0))
    spec = open_activations(config, Ranks()).spec
    np.testing.assert_allclose(spec["mean"], rows.reshape(-1, 4).mean(0), atol=1e-6)
    variance = rows.reshape(-1, 4).var(0).mean()
    assert spec["scale"] == pytest.approx(variance ** -0.5, rel=1e-5)


def test_activations_without_evaluations_need_no_validation_data(tmp_path, activations, capsys):
    """The command that is printed at the end works."""
    (tmp_path / "data").mkdir()
    shutil.copy(activations / "train_activations.npy", tmp_path / "data")
    options = SAE | dict(backbone=None, eval_interval=0, max_iters=1)
    go(tmp_path / "data", tmp_path / "out", **options)
    command, = re.findall("Next: python -m model.sae (.*)", capsys.readouterr().out)
    assert main(command.split()) == 0 and (tmp_path / "out/sae_lens/cfg.json").exists()


def test_a_checkpoint_of_an_earlier_version_goes_on(tmp_path, data_dir, backbone, trained):
    """It has a list of layers, and keys that were removed."""
    state = torch.load(trained[0] / "ckpt.pt")
    assert state["config"]["layer"] == 0
    for values in (state["config"], state["model_args"]):
        values |= dict(layer=[0], target="input", l1=0.02)
    save_checkpoint(str(tmp_path / "ckpt.pt"), state)
    assert load_model(str(tmp_path / "ckpt.pt"))[0].keys.layer == 0
    options = SAE | dict(backbone=str(backbone), max_iters=21)
    old = go(data_dir, tmp_path / "new", **options, init_from=str(tmp_path / "ckpt.pt"))
    assert old["iter_num"] == 21
    with pytest.raises(ValueError, match="layer: checkpoint has .0., now 1"):
        go(data_dir, tmp_path / "other", **options | dict(layer=1),
           init_from=str(tmp_path / "ckpt.pt"))
    assert go(data_dir, tmp_path, **options)["iter_num"] == 21
    with pytest.raises(ValueError, match="layer: checkpoint has 0, now 1"):
        save_checkpoint(str(tmp_path / "ckpt.pt"), state)
        go(data_dir, tmp_path, **options | dict(layer=1))


@pytest.mark.parametrize("values", [dict(layer=[0, 1]), dict(target="mlp")])
def test_kinds_of_an_earlier_version_are_refused(tmp_path, data_dir, backbone, trained, values):
    state = torch.load(trained[0] / "ckpt.pt")
    state["config"] |= values
    save_checkpoint(str(tmp_path / "ckpt.pt"), state)
    name, value = *values, *values.values()
    message = re.escape(f"uses {name}: {value}, which this")
    with pytest.raises(CheckpointError, match=message):
        load_model(str(tmp_path / "ckpt.pt"))
    with pytest.raises(CheckpointError, match=message):  # also to resume
        go(data_dir, tmp_path, **SAE | dict(backbone=str(backbone), max_iters=21))


# -----------------------------------------------------------------------------
# the baseline

def test_random_directions(trained, data_dir, capsys):
    """Of each activation the k closest random directions, by least squares in numpy."""
    from model.sae.__main__ import random_directions
    model, _ = load_model(trained[0] / "ckpt.pt")
    baseline = random_directions(model, 3)
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(2))
    W = baseline.sae.W_dec.detach().numpy()
    assert not np.allclose(W, model.sae.W_dec.detach())
    z = baseline.sae.features(x)[1].detach().numpy()
    for row, weights in zip(x.numpy(), z):
        chosen = np.argsort(-abs(W @ row))[:3]
        assert set(np.flatnonzero(weights)) == set(chosen)
        expected = np.linalg.lstsq(W[chosen].T, row, rcond=None)[0]
        np.testing.assert_allclose(weights[chosen], expected, atol=1e-4)
    assert main(["--ckpt", str(trained[0] / "ckpt.pt"), "--baseline", "--batches", "2"]) == 0
    names, ours, random = capsys.readouterr().out.splitlines()
    assert names.split() == ["explained_variance", "l0", "spliced_loss", "loss_recovered"]
    assert ours.startswith("trained") and random.startswith("random directions")
    assert float(random.split()[3]) == pytest.approx(float(ours.split()[2]), abs=0.5)  # L0


def test_tokens_of_another_tokenizer_are_refused(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("abc def ghi\n" * 400)
    for name in ("byte", "char"):
        prepare([str(tmp_path / "a.txt")], str(tmp_path / name), name)
    go(tmp_path / "byte", tmp_path / "gpt", max_iters=1, vocab_size=None)
    ckpt = str(tmp_path / "gpt" / "ckpt.pt")
    go(tmp_path / "byte", tmp_path / "sae", **SAE | dict(backbone=ckpt, vocab_size=None))
    command = ["--ckpt", str(tmp_path / "sae" / "ckpt.pt"), "--batches", "1", "--data_dir"]
    assert main([*command, str(tmp_path / "byte")]) == 0
    for more in ([], ["--baseline"]):
        assert main([*command, str(tmp_path / "char"), *more]) == 2
        assert "its tokenizer is not that of the training data" in capsys.readouterr().err


def test_files_that_the_command_cannot_write_or_read(trained, tmp_path, capsys):
    command = ["--ckpt", str(trained[0] / "ckpt.pt")]
    with full_disk(100):
        assert main([*command, "--to", str(tmp_path / "lens")]) == 2
        assert (f"{tmp_path}/lens/sae_weights.safetensors: File too large"
                in capsys.readouterr().err)
    assert main([*command, "--backbone", "gone.pt"]) == 2
    assert "gone.pt: no such file" in capsys.readouterr().err


@pytest.mark.parametrize("changes, words", [
    (dict(prefixes=[8, 4]), "expected ascending numbers below d_sae"),
    (dict(prefixes=[48]), "expected ascending numbers below d_sae"),
    (dict(sae="batchtopk", k=49), "k: 49 exceeds d_sae"),
    (dict(backbone=None), "train_activations.npy")], ids=str)
def test_bad_input_of_new_keys(tmp_path, data_dir, backbone, changes, words):
    from train.base.errors import UserError
    with pytest.raises(UserError, match=re.escape(words)):
        go(data_dir, tmp_path / "out", **SAE | dict(backbone=str(backbone)) | changes)


def test_dead_features_of_an_evaluation_are_those_that_never_fired():
    """also with activations from files; in training those that were silent for long"""
    model, x = untrained(sae="topk", k=1)
    model.sae.silent.fill_(7)
    _, sums = model(x)
    sums["count"] = torch.tensor(x.size(0) * x.size(1))
    never = int((sums["fired"] == 0).sum())
    assert model.train().numbers(sums)["dead"] == int((model.sae.silent >= 7).sum())
    model.sae.silent.zero_()
    assert model.train().numbers(sums)["dead"] == 0
    assert model.eval().numbers(sums)["dead"] == never > 0
