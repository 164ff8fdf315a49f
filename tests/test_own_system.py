"""A system of one's own: the loop trains what it does not know (model/toy.py), whose items are
masked, so that micro-batches and ranks hold unequal numbers of them. Every number must be the same
at any world size and any split into micro-batches.
"""

import contextlib
import importlib.util
import pathlib
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import REPO
from faulty import faults
from processes import python
from runs import assert_same, metrics, tensors
from test_distributed import in_ranks

from train import config as config_file
from train import train as training
from train.base.errors import CheckpointError, ConfigError, SetupError, Stopped
from train.checkpoint import load_checkpoint
from train.config import format_help, load_config
from train.dataloader import RowLoader
from train.distributed import Ranks
from train.train import train

TESTS = pathlib.Path(__file__).parent
RUN = dict(model="toy", batch_size=12, gradient_accumulation_steps=1, max_iters=8, eval_interval=4,
           eval_iters=40, eval_on_start=True, lr_decay_iters=8, warmup_iters=0, log_interval=1,
           learning_rate=0.05, device="cpu", dtype="float32", compile="false", num_threads=1,
           seed=3, grad_clip=0.1)


def register():
    """Make tests/model/toy.py the file model/toy.py of the program in this process."""
    config_file.REPOSITORY = str(TESTS)
    if "model.toy" not in sys.modules:
        spec = importlib.util.spec_from_file_location("model.toy", TESTS / "model" / "toy.py")
        sys.modules["model.toy"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["model.toy"]


@pytest.fixture(scope="module", autouse=True)
def toy():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config_file, "REPOSITORY", config_file.REPOSITORY)  # undone at the end
        yield register()


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A folder of learnable rows. The mask leaves many samples without any item."""
    folder, draw = tmp_path_factory.mktemp("rows"), np.random.default_rng(0)
    for split, n in (("train", 120), ("val", 50)):
        x = draw.normal(size=(n, 4, 6)).astype("float32")
        mask = (draw.random((n, 4)) < 0.6) & (draw.random((n, 1)) < 0.7)
        np.save(folder / f"{split}_x.npy", x)
        np.save(folder / f"{split}_y.npy", x[:, :, :3].argmax(-1).astype("u1"))
        np.save(folder / f"{split}_mask.npy", mask)
    return folder


def options(rows, out, **changes):
    return RUN | dict(data_dir=str(rows), out_dir=str(out)) | changes


def go(rows, out, fault="", **changes):
    with faults(fault) if fault else contextlib.nullcontext():
        try:
            return train(load_config(None, options(rows, out, **changes)))
        except Stopped as stopped:
            return stopped


def in_rank(settings):
    """What a rank does: the run of `settings`."""
    register()
    train(load_config(None, settings))


def numbers(out, *names):
    """[(iter, number, ...)] of the lines of metrics.jsonl that have these."""
    return [[m["iter"], *(m[n] for n in names)] for m in metrics(out) if names[0] in m]


def assert_equal_runs(a, b, exact_start=False):
    """Two runs told the same: loss, own numbers, gradient norm, validation."""
    for names in (("loss", "f1", "sure", "grad_norm"), ("val_loss", "val_f1", "val_sure")):
        one, other = np.array(numbers(a, *names)), np.array(numbers(b, *names))
        np.testing.assert_allclose(one, other, rtol=1e-5)
        if exact_start and names[0] == "val_loss":
            np.testing.assert_array_equal(one[0], other[0])
    one, other = (tensors(p / "ckpt.pt")[0] for p in (a, b))
    assert torch.equal(one["model.seen"], other["model.seen"])
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.fixture(scope="module")
def whole(rows, tmp_path_factory):
    """The run that all others must equal: one rank, one micro-batch a step."""
    out = tmp_path_factory.mktemp("whole")
    go(rows, out)
    return out


def test_it_learns_and_tells_its_own_numbers(whole):
    lines = numbers(whole, "val_loss", "val_f1", "val_sure")
    assert [line[0] for line in lines] == [0, 4, 8]
    assert lines[-1][1] < lines[0][1] and lines[-1][2] > lines[0][2]
    assert "f1 0." in (whole / "train.log").read_text()


@pytest.mark.parametrize("batch, n", [(6, 2), (4, 3), (1, 12)])
def test_any_split_into_micro_batches_is_the_same_run(rows, tmp_path, whole, batch, n):
    """The gradient is that of sum(count * loss) / sum(count) whatever falls into a micro-batch, and
    validation weighs items, not batches (40 batches of any of these sizes are all 50 rows)."""
    go(rows, tmp_path, batch_size=batch, gradient_accumulation_steps=n, eval_iters=50)
    assert_equal_runs(whole, tmp_path)


@pytest.mark.parametrize("ranks, kind", [(2, "ddp"), (4, "ddp"), (2, "fsdp")])
def test_any_world_size_is_the_same_run(rows, tmp_path, whole, ranks, kind):
    in_ranks(ranks, in_rank, options(rows, tmp_path, distributed=kind))
    assert_equal_runs(whole, tmp_path, exact_start=True)
    assert (tmp_path / "samples.txt").read_text() == (whole / "samples.txt").read_text()


def with_a_spare_layer(settings):
    """What a rank does: the run of `settings` of a toy with a layer that its loss does not need;
    the message of the error, if there is one."""
    toy = register()

    class Spare(toy.Toy):
        def __init__(self, *args):
            super().__init__(*args)
            self.spare = torch.nn.Linear(2, 2)
            self.calls = 0

        def before_step(self, it):  # after DDP has numbered the parameters
            self.still.requires_grad_()

        def forward(self, *batch):
            loss, sums = super().forward(*batch)
            self.calls += settings["gradient_accumulation_steps"] > 1
            if self.calls % 2:  # the first of two micro-batches
                loss = loss + self.spare(torch.ones(2)).sum()
            return loss, sums
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy, "build_model", lambda config, data: Spare(config, data.spec))
        try:
            train(load_config(None, settings))
        except SetupError as error:
            return str(error)


def test_a_layer_that_the_loss_does_not_need_is_named(rows, tmp_path):
    """On one rank it is trained without; on two before the first update, and on a resume too, where
    DDP would fail in the second step with a message that names nothing."""
    settings = options(rows, tmp_path / "two")
    for message in in_ranks(2, with_a_spare_layer, settings):
        assert message.startswith("no gradient for spare.weight, spare.bias: with several ranks")
        assert "--lr_groups '{spare.weight: 0}'" in message
    assert load_checkpoint(str(tmp_path / "two" / "ckpt.pt"))["iter_num"] == 0
    first = options(rows, tmp_path / "first", gradient_accumulation_steps=4, batch_size=3,
                    eval_interval=0)
    for message in in_ranks(2, with_a_spare_layer, first):
        assert message.startswith("no gradient for spare.weight, spare.bias: with several ranks")
    assert with_a_spare_layer(options(rows, tmp_path / "one", max_iters=2)) is None
    resumed = in_ranks(4, with_a_spare_layer, options(rows, tmp_path / "one"))
    assert [m.startswith("no gradient for spare.weight") for m in resumed] == [True] * 4
    frozen = options(rows, tmp_path / "frozen", max_iters=2, lr_groups={"spare": 0})
    assert in_ranks(2, with_a_spare_layer, frozen) == [None, None]


def test_after_every_step_the_model_hears_the_sums_of_the_whole_batch(rows, whole):
    """its buffer has counted the labels of all items of all 8 steps: by hand, from the rows"""
    labels, mask = (np.load(rows / f"train_{name}.npy") for name in ("y", "mask"))
    loader = RowLoader([labels, mask], load_config(None, options(rows, "o")), Ranks())
    items = [y[m.bool()] for y, m in (loader.get_batch("cpu", step) for step in range(8))]
    seen = tensors(whole / "ckpt.pt")[0]["model.seen"]
    assert seen.tolist() == torch.cat(items).bincount(minlength=3).tolist() and seen.sum() > 100


def test_other_rows_are_refused(rows, tmp_path):
    """one label of the first row changed under a run -> refused by the fingerprint"""
    shutil.copytree(rows, tmp_path / "rows")
    go(tmp_path / "rows", tmp_path / "out", max_iters=2)
    labels = np.load(tmp_path / "rows" / "train_y.npy")
    labels[0, 0] = (labels[0, 0] + 1) % 3
    np.save(tmp_path / "rows" / "train_y.npy", labels)
    with pytest.raises(CheckpointError, match="data: checkpoint has"):
        go(tmp_path / "rows", tmp_path / "out")


def test_the_gradient_is_that_of_the_whole_batch(rows, tmp_path, toy):
    """By hand: the first step's gradient norm, and its update with the norm clipped to 0.1."""
    go(rows, tmp_path, max_iters=0, eval_interval=0)
    go(rows, tmp_path / "b", max_iters=1, eval_interval=0, batch_size=1,
       gradient_accumulation_steps=12, beta1=0.0, beta2=0.0, weight_decay=0.0, adam_eps=1.0)
    config = load_config(None, options(rows, tmp_path))
    data = toy.open_data(config, Ranks())
    model = toy.build_model(config, data)
    model(*data.train.get_batch("cpu", 0))[0].backward()
    norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters()
                                                 if p.grad is not None]))
    [[_, told]] = numbers(tmp_path / "b", "grad_norm")
    assert told == pytest.approx(float(norm), rel=1e-5) and norm > 0.3
    after = tensors(tmp_path / "b" / "ckpt.pt")[0]
    for name, p in model.named_parameters():
        if p.grad is not None:  # AdamW without memory: w - lr * g / (|g| + 1), g clipped
            g = p.grad * 0.1 / norm
            torch.testing.assert_close(after[f"model.{name}"], p - 0.05 * g / (g.abs() + 1.0),
                                       rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("k", [0, 3, 5])
def test_stopped_and_resumed_is_exact(rows, tmp_path, whole, k):
    """with its buffer, whose sums of all steps are in the checkpoint"""
    assert isinstance(go(rows, tmp_path, f"before_step@{k}=sigterm"), Stopped)
    go(rows, tmp_path)
    assert_same(whole, tmp_path)


def test_sharded_stopped_and_resumed_on_one_rank(rows, tmp_path, whole):
    in_ranks(2, in_rank, options(rows, tmp_path, distributed="fsdp", max_iters=5))
    go(rows, tmp_path)
    losses = np.array(numbers(tmp_path, "loss")), np.array(numbers(whole, "loss"))
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_what_the_model_froze_stays_frozen(rows, tmp_path, whole, toy):
    go(rows, tmp_path, max_iters=0, eval_interval=0)
    before, after = tensors(tmp_path / "ckpt.pt")[0], tensors(whole / "ckpt.pt")[0]
    assert torch.equal(before["model.still.weight"], after["model.still.weight"])
    assert not torch.equal(before["model.head.weight"], after["model.head.weight"])
    assert not any(n.startswith("optimizer.still") for n in after)


def test_early_stopping_and_best_follow_its_own_metric(rows, tmp_path, monkeypatch, toy):
    """val_f1 rises for two evaluations and falls from then on, while the loss goes on falling"""
    falling = iter([0.1, 0.5, 0.6, 0.4, 0.3, 0.2])
    real = toy.Toy.numbers
    monkeypatch.setattr(toy.Toy, "numbers", lambda model, sums: real(model, sums) | (
        {} if model.training else {"score": next(falling)}))
    monkeypatch.setattr(training, "check_metric_names", lambda run: None)  # it would take a number
    end = go(rows, tmp_path, max_iters=40, eval_interval=2, early_stopping_metric="val_score",
             early_stopping_mode="max", early_stopping_patience=2)
    assert end["iter_num"] == 8 and end["finished"].startswith("early stopping: no better val_s")
    best, last = (torch.load(tmp_path / n, weights_only=True) for n in ("ckpt_best.pt", "ckpt.pt"))
    assert best["iter_num"] == 4 and last["best_val_loss"] < best["best_val_loss"]
    assert [round(m["val_score"], 1) for m in end["history"]] == [0.1, 0.5, 0.6, 0.4, 0.3]


def test_an_unknown_metric_is_refused_before_any_step(rows, tmp_path):
    with pytest.raises(SetupError, match="'val_ppl'; choose one of val_loss, val_f1, val_sure"):
        go(rows, tmp_path, early_stopping_metric="val_ppl", early_stopping_patience=2)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_list_is_no_metric_for_early_stopping(rows, tmp_path, monkeypatch, toy):
    real = toy.Toy.numbers
    monkeypatch.setattr(toy.Toy, "numbers", lambda model, sums: real(model, sums) | dict(
        per_class=sums["confusion"].diagonal()))
    with pytest.raises(SetupError, match="'val_per_class'; choose one of val_loss, val_f1, val_su"):
        go(rows, tmp_path, early_stopping_metric="val_per_class")


def test_nothing_to_evaluate_on_is_said(rows, tmp_path, monkeypatch, toy):
    go(rows, tmp_path, max_iters=1)
    real = toy.open_data
    monkeypatch.setattr(toy, "open_data", lambda config, ranks: replace(
        real(config, ranks), val=None))
    for key, value in (("eval_only", True), ("early_stopping_patience", 2),
                       ("lr_schedule", "plateau")):
        with pytest.raises(SetupError, match=f"^{key}: {value} needs evaluations, and the data has "
                                             "no validation split"):
            go(rows, tmp_path, max_iters=1, **{key: value})


def test_a_name_that_log_lines_have_already_is_refused(rows, tmp_path, monkeypatch, toy):
    monkeypatch.setattr(toy.Toy, "numbers", lambda model, sums: {"lr": 1.0})
    with pytest.raises(SetupError, match="Toy.numbers: lr: these names are reserved"):
        go(rows, tmp_path)


@pytest.mark.parametrize(("value", "named"), [
    (np.float32(1.0), r"\['mean'\] is a float32"),
    ({np.int64(7): 1.0}, r"\['mean'\]\[(np\.int64\()?7\)?\] is a int64")])  # a key
def test_spec_must_be_plain(rows, tmp_path, monkeypatch, toy, value, named):
    real = toy.open_data

    def open_data(config, ranks):
        data = real(config, ranks)
        data.spec["mean"] = value
        return data
    monkeypatch.setattr(toy, "open_data", open_data)
    with pytest.raises(CheckpointError, match=f"Data.spec{named}"):
        go(rows, tmp_path)


def test_own_keys_are_keys_like_any_other(rows, tmp_path, toy):
    c = load_config(None, ["--model", "toy", "--width=16", "--corrupt", "0.5"])
    assert (c.width, c.corrupt) == (16, 0.5)
    with pytest.raises(ConfigError, match="width: must be at least 1"):
        load_config(None, ["--model=toy", "--width=0"])
    with pytest.raises(ConfigError, match="width: 13 brings bad luck"):
        load_config(None, ["--model=toy", "--width=13"])
    with pytest.raises(ConfigError, match="unknown key 'width'"):
        load_config(None, ["--width=16"])
    page = format_help(type(c))
    assert "Of this model:" in page and "--width int" in page
    go(rows, tmp_path, max_iters=2)
    assert "width: 8" in (tmp_path / "config.yaml").read_text()
    with pytest.raises(ValueError, match="width: checkpoint has 8, now 9"):
        go(rows, tmp_path, width=9)
    go(rows, tmp_path, corrupt=0.1, max_iters=3)  # a free one


def test_a_key_of_every_run_is_refused(monkeypatch, toy):
    clash = type("Keys", (), {"__annotations__": {"seed": int}, "seed": 1})
    monkeypatch.setattr(toy, "Keys", clash)
    with pytest.raises(ConfigError, match="Keys has seed, already keys of every run"):
        load_config(None, ["--model=toy"])


def test_the_checkpoint_alone_rebuilds_the_model(whole, rows):
    from model.sample import load_model
    model, tokenizer = load_model(str(whole / "ckpt.pt"))
    assert tokenizer is None and type(model).__name__ == "Toy"
    saved = torch.load(whole / "ckpt.pt", weights_only=True)
    assert saved["spec"] == {"classes": 3, "features": 6} and saved["model_args"]["width"] == 8
    assert all(torch.equal(t, saved["model"][n]) for n, t in model.state_dict().items())


def test_init_from_adopts_what_fits_and_names_what_stays_fresh(rows, tmp_path, whole, capsys):
    weights = torch.load(whole / "ckpt.pt", weights_only=True)["model"]
    theirs = {f"old_{n}": t for n, t in weights.items() if n.startswith("h.")} | {
        "rest": torch.ones(2)}
    torch.save({"model": theirs}, tmp_path / "theirs.pt")
    go(rows, tmp_path / "out", init_from=str(tmp_path / "theirs.pt"), max_iters=0)
    text = capsys.readouterr().out
    assert ": 2 tensors" in text and "1 tensors of it are not used: rest" in text
    assert "4 tensors are newly initialised: " in text and "head.weight" in text
    loaded = torch.load(tmp_path / "out" / "ckpt.pt", weights_only=True)["model"]
    assert torch.equal(loaded["h.0.weight"], weights["h.0.weight"])


def test_a_batch_without_items_changes_nothing(rows, tmp_path, toy):
    """micro-batches of one sample, many of which have no item: the run stays finite"""
    end = go(rows, tmp_path, batch_size=1, gradient_accumulation_steps=1, max_iters=12)
    assert end["iter_num"] == 12 and np.isfinite(end["val_loss"])
    assert [m["loss"] for m in metrics(tmp_path) if "loss" in m].count(None) > 3  # of no items
    assert all(t.isfinite().all() for t in tensors(tmp_path / "ckpt.pt")[0].values())


def test_samples_do_not_disturb_the_run(rows, tmp_path, whole):
    go(rows, tmp_path, sample_tokens=0)
    assert not (tmp_path / "samples.txt").exists()
    assert_same(whole, tmp_path)


def test_samples_may_be_a_generator(rows, tmp_path, monkeypatch, toy, capsys):
    """It runs in eval mode without gradients, and an error in it is a warning."""
    def sample(model, data, config):
        yield f"{model.training} {torch.is_grad_enabled()}"
        if config.seed == 4:
            raise ValueError("nothing to say")
    monkeypatch.setattr(toy, "sample", sample)
    go(rows, tmp_path, max_iters=4)
    assert (tmp_path / "samples.txt").read_text() == "=== iter 4 ===\nFalse False\n\n"
    go(rows, tmp_path / "error", max_iters=4, seed=4)
    assert "no samples: ValueError: nothing to say" in capsys.readouterr().out


def test_as_a_person_adds_it(rows, tmp_path):
    """the file put into model/ of a copy, trained by the command line"""
    copy = tmp_path / "repo"
    shutil.copytree(REPO, copy, ignore=shutil.ignore_patterns(".git", "out", "bin", "tests"))
    shutil.copy(TESTS / "model" / "toy.py", copy / "model")

    settings = options(rows, "o", max_iters=4)
    done = python("run_train.py", *(f"--{k}={v}" for k, v in settings.items()), cwd=copy)
    assert done.returncode == 0 and "Training complete!" in done.stdout, done.stderr
    assert "[train] Data loaded. Length: 120 rows" in done.stdout
    assert "a sample of loss" in done.stdout and "row/s" in done.stdout
