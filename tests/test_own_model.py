"""A model and data of one's own, given to train(): modes, buffers, the best evaluation, masks."""

import contextlib
import itertools
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from faulty import faults
from runs import assert_same, go, metrics
from torch import nn
from torch.utils.data import TensorDataset

from train import robust
from train.base.errors import CheckpointError, ConfigError, DataError, SetupError, Stopped
from train.checkpoint import load_checkpoint, save_checkpoint
from train.config import TrainConfig, load_config
from train.dataloader import Data, Loader, RowLoader
from train.distributed import Ranks, process_group
from train.logger import resume_command
from train.setup import open_run, validate_config
from train.train import save, train, train_step, validate

SETTINGS = dict(batch_size=4, gradient_accumulation_steps=3, max_iters=12, eval_interval=4,
                eval_iters=100, save_interval=2, warmup_iters=0, lr_decay_iters=12, log_interval=1,
                learning_rate=0.05, device="cpu", dtype="float32", compile="false", num_threads=1)


NEW_NAMES = (f"a{n}" for n in itertools.count())


class Regression(nn.Module):
    """Rows whose target is below -50 are masked."""

    def __init__(self, *layers):
        super().__init__()
        self.net = nn.Sequential(*layers or [nn.Linear(3, 1)])
        torch.manual_seed(0)
        for layer in self.net:
            getattr(layer, "reset_parameters", lambda: None)()

    def forward(self, x, y):
        counted = y > -50
        errors = (self.net(x)[:, 0] - y).square() * counted
        error = self.net(x)[:, 0].sub(y).abs() * counted
        return errors.sum() / counted.sum().clamp(min=1), dict(
            count=counted.sum(), abs_error=error.sum())

    def numbers(self, sums):
        return dict(abs_error=float(sums["abs_error"] / sums["count"]), never=None)


def rows(n, seed=1, masked=()):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator)
    y = x[:, 0] + torch.randn(n, generator=generator)
    y[list(masked)] = -99
    return TensorDataset(x, y)


def fit(out, model=None, fault="", data=None, **changes):
    """Train into the folder `out`; the result of train(), or the exception of a signal."""
    config = load_config(None, SETTINGS | dict(out_dir=str(out)) | changes)
    with faults(fault) if fault else contextlib.nullcontext():
        try:
            return train(config, model=Regression() if model is None else model,
                         data=data or Data(rows(120), rows(30, seed=2)))
        except Stopped as stopped:
            return stopped


def test_a_model_in_eval_mode_is_trained_with_dropout(tmp_path):
    """from_pretrained() and load_model() return models in eval mode -> in step 0 and after a resume
    dropout is on, as in a run that was not interrupted"""
    def model():
        return Regression(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 1)).eval()
    fit(tmp_path / "whole", model(), eval_on_start=False)
    fit(tmp_path / "train_mode", model().train(), eval_on_start=False)
    fit(tmp_path / "parts", model(), "before_step@5=sigterm", eval_on_start=False)
    fit(tmp_path / "parts", model(), eval_on_start=False)
    assert_same(tmp_path / "train_mode", tmp_path / "whole")
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_an_evaluation_after_a_resume_has_the_state_of_the_step_before(tmp_path):
    """before_step sets a schedule and draws a random number -> an evaluation with which a resumed
    run starts, and one of --eval_only, have the values of an uninterrupted run"""
    class Scheduled(Regression):
        factor = 1.0

        def before_step(self, it):
            self.factor = 1 + it + torch.rand(())

        def forward(self, x, y):
            loss, sums = super().forward(x, y)
            return loss * self.factor, sums
    whole = fit(tmp_path / "whole", Scheduled(), eval_on_start=True)
    assert isinstance(fit(tmp_path / "parts", Scheduled(), "eval@0=sigterm", eval_on_start=True),
                      Stopped)
    assert isinstance(fit(tmp_path / "parts", Scheduled(), "eval@8=sigterm", eval_on_start=True),
                      Stopped)
    assert fit(tmp_path / "parts", Scheduled())["history"] == whole["history"]
    assert_same(tmp_path / "whole", tmp_path / "parts")
    again = fit(tmp_path / "whole", Scheduled(), eval_only=True)
    assert again["val_loss"] == whole["val_loss"]


def test_before_step_is_not_repeated_after_a_resume_without_an_evaluation(tmp_path):
    class Pruned(Regression):
        def before_step(self, it):
            if it == 4:
                self.net[0].weight.data[:, :2] = 0
    fit(tmp_path / "whole", Pruned())
    assert isinstance(fit(tmp_path / "parts", Pruned(), "before_step@5=sigterm"), Stopped)
    fit(tmp_path / "parts", Pruned())
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_a_run_in_parts_saves_only_into_a_folder_that_it_has_taken(tmp_path):
    fit(tmp_path)
    earlier, drawing = metrics(tmp_path), (tmp_path / "loss.svg").read_text()
    config = validate_config(load_config(None, SETTINGS | dict(
        out_dir=str(tmp_path), resume="never")))
    data = Data(rows(120), rows(30, seed=2))
    with process_group(config) as ranks, open_run(config, ranks, Regression(), data=data) as run:
        train_step(run)
        validate(run)
        with pytest.raises(SetupError, match="call it before the first step"):
            save(run)
        assert metrics(tmp_path) == earlier and (tmp_path / "loss.svg").read_text() == drawing
        assert not (tmp_path / "old_1").exists() and load_checkpoint(tmp_path / "ckpt.pt")
        run.take_folder()
        validate(run)
        save(run, last=True)
    assert (tmp_path / "old_1" / "ckpt.pt").exists() and len(metrics(tmp_path)) == 1
    assert load_checkpoint(tmp_path / "ckpt.pt")["iter_num"] == 1


def test_a_stop_within_a_step_leaves_running_statistics_exact(tmp_path, monkeypatch):
    """SIGTERM in the second of three micro-batches, with BatchNorm -> every batch counts once in
    the running statistics"""
    class Noticing(Regression):
        calls = 0

        def forward(self, x, y):
            type(self).calls += self.training
            if self.calls == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().forward(x, y)

    def model():
        Noticing.calls = 0
        return Noticing(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    stop_at = -1
    fit(tmp_path / "whole", model())
    stop_at = 14  # in step 4
    assert isinstance(fit(tmp_path / "parts", model()), Stopped)
    stop_at = -1
    fit(tmp_path / "parts", model())
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_a_first_batch_that_is_masked_is_no_reason_to_refuse(tmp_path):
    """the rows of the batch that stands for all are masked -> the names of numbers are learned
    from more batches"""
    data = Data(rows(120), rows(30, seed=2, masked=(0, 7, 15, 22)))
    result = fit(tmp_path, data=data, early_stopping_metric="val_abs_error", eval_iters=2)
    assert math.isfinite(result["val_loss"]) and (tmp_path / "ckpt_best.pt").exists()


def test_a_metric_without_a_value_is_named(tmp_path):
    """early_stopping_metric: a number that is always None -> a warning per evaluation"""
    fit(tmp_path, early_stopping_metric="val_never", early_stopping_patience=1)
    log = (tmp_path / "train.log").read_text()
    assert log.count("val_never has no value: this evaluation cannot be the best") == 3
    assert not (tmp_path / "ckpt_best.pt").exists()


def test_data_of_another_type_are_refused(tmp_path):
    with pytest.raises(DataError, match="expected train.dataloader.Data.*got <class 'list'>"):
        fit(tmp_path, data=[rows(120)])


def test_test_data_without_validation_are_evaluated_once(tmp_path):
    data = Data(rows(120), test=rows(30, seed=2))
    results = [fit(tmp_path, data=data)["test"] for _ in range(3)]
    assert results[0] == results[1] == results[2] and results[0]["test_loss"] > 0
    assert (tmp_path / "train.log").read_text().count("On test data") == 1
    other = fit(tmp_path, data=replace(data, test=data.train))["test"]
    assert other != results[0] and fit(tmp_path, data=data)["test"] == results[0]


OVERFITTING = dict(max_iters=40, lr_decay_iters=40, eval_interval=10, save_interval=10, keep_last=9,
                   learning_rate=0.02)


def wide():
    return Regression(nn.Linear(3, 256), nn.Tanh(), nn.Linear(256, 1))


def small_data():
    return Data(rows(16), rows(60, seed=2))


def test_the_model_has_the_weights_of_the_test_numbers_also_after_a_finished_run(tmp_path):
    """train() again after the end of a run that overfits -> the model has the weights of
    ckpt_best.pt, whose test numbers are returned, as at the first time"""
    data = Data(rows(16), rows(60, seed=2), test=rows(30, seed=3))
    for _ in range(2):
        model = wide()
        result = fit(tmp_path, model, data=data, **OVERFITTING)
        assert result["best_val_loss"] < result["val_loss"]
        loss = model(*data.test[:])[0].item()
        assert loss == pytest.approx(result["test"]["test_loss"])


def test_a_branch_knows_that_its_first_checkpoint_is_the_best(tmp_path):
    """--resume FILE, whose evaluation is better than all later ones, into a new folder -> it is
    ckpt_best.pt there, as in the run that was not interrupted"""
    whole = fit(tmp_path / "whole", wide(), data=small_data(), **OVERFITTING)
    best = load_checkpoint(tmp_path / "whole" / "ckpt_best.pt")["iter_num"]
    losses = {h["iter"]: h["val_loss"] for h in whole["history"]}
    assert 0 < best < 40 and losses[best] == min(losses.values())  # it overfits
    source = tmp_path / "whole" / f"ckpt_{best:07d}.pt"
    fit(tmp_path / "branch", wide(), data=small_data(), **OVERFITTING, resume=str(source))
    state = load_checkpoint(tmp_path / "branch" / "ckpt_best.pt")
    assert state["iter_num"] == best and state["progress"]["best_metric"] == losses[best]
    assert metrics(tmp_path / "branch") == [m for m in metrics(tmp_path / "whole")
                                            if m["iter"] >= best][1:]


@pytest.mark.parametrize("stop", ["", "eval@0=sigterm"])
def test_an_untrained_head_is_not_the_best_after_a_stop(tmp_path, data_dir, stop):
    """init_from weights that lack a layer, stopped in the first evaluation -> after the resume its
    result does not count, as without the stop"""
    go(data_dir, tmp_path / "source", max_iters=2)
    state = load_checkpoint(tmp_path / "source" / "ckpt.pt")
    del state["model"]["ln_f.weight"]
    save_checkpoint(tmp_path / "part.pt", state)
    changes = dict(init_from=str(tmp_path / "part.pt"), max_iters=4, eval_interval=2,
                   learning_rate=10.0, muon_lr=10.0, warmup_iters=0, early_stopping_patience=1)
    go(data_dir, tmp_path / "out", stop, **changes)
    result = go(data_dir, tmp_path / "out", **changes)
    assert result["finished"] == "max_iters 4 reached"
    assert load_checkpoint(tmp_path / "out" / "ckpt_best.pt")["iter_num"] > 0


# -----------------------------------------------------------------------------
# what a checkpoint cannot have is refused before the first step

@dataclass
class Shape:
    path: object


class WithConfig(Regression):
    def __init__(self):
        super().__init__()
        self.config = Shape(Path("a"))


class WithMask(Regression):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))


@pytest.mark.parametrize("batch, text", [
    ((), "batch is a tuple"), ((torch.tensor(1.0), torch.ones(4, 3)), "a single number")])
def test_a_batch_without_rows_is_refused(tmp_path, batch, text):
    class Rowless(Uneven):
        def get_batch(self, device, step):
            return batch
    with pytest.raises(SetupError, match=text):
        fit(tmp_path, Regression(), data=Data(Rowless()))


def test_frozen_parameters_are_trainable_in_the_next_run(tmp_path):
    """train() -> with lr_groups that freeze, then without, on the same model"""
    model = Regression(nn.Linear(3, 2), nn.Linear(2, 1))
    first = model.net[0].weight.clone()
    fit(tmp_path / "a", model, lr_groups={"net.0": 0})
    assert torch.equal(model.net[0].weight, first)
    fit(tmp_path / "b", model)
    assert not torch.equal(model.net[0].weight, first)


@pytest.mark.parametrize("changes, ranks, text", [
    (dict(batch_size=2), Ranks(), r"batch_size 2 \(here 4\)"),
    ({}, Ranks(rank=1, world_size=2), "rank 1.*world_size 2")])
def test_a_loader_of_another_run_is_refused(tmp_path, changes, ranks, text):
    """The run would train on other batches than it reports."""
    config = load_config(None, SETTINGS | changes)
    loader = RowLoader((np.zeros((24, 3), np.float32), np.zeros(24, np.float32)), config, ranks)
    with pytest.raises(SetupError, match=text):
        fit(tmp_path, Regression(), data=Data(loader), eval_interval=0)


def test_a_loader_without_a_batch_size_is_not_checked(tmp_path):
    """a subclass of Loader with its own __init__() and batches"""
    class Whole(Loader):
        samples, unit, units_per_sample = 4, "row", 1
        __init__ = object.__init__
        fingerprint = dict

        def get_batch(self, device="cpu", step=None):
            return torch.ones(4, 3), torch.ones(4)
    fit(tmp_path, Regression(), data=Data(Whole()), eval_interval=0)


@pytest.mark.parametrize("model", [Regression, lambda x, y: None, "gpt"])
def test_what_is_no_module_is_refused(tmp_path, model):
    """e.g. the class in place of an instance"""
    with pytest.raises(SetupError, match="expected an instance of nn.Module"):
        fit(tmp_path, model)


@pytest.mark.parametrize("model, error, text", [
    (WithConfig, CheckpointError, r"config\['path'\] is a PosixPath"),
    (WithMask, SetupError, r"mask is not finite.*persistent=False")])
def test_what_no_checkpoint_can_have_is_refused_before_the_first_step(tmp_path, model, error, text):
    with pytest.raises(error, match=text):
        fit(tmp_path, model())
    path = tmp_path / "metrics.jsonl"
    assert not path.exists() or not path.read_text()


def test_lists_of_tensors_among_the_numbers_are_saved_as_lists(tmp_path, monkeypatch):
    monkeypatch.setattr(Regression, "numbers", lambda model, sums: dict(
        parts=[torch.tensor(1.5), (np.float64(2.5), torch.ones(2))]))
    fit(tmp_path)
    state = load_checkpoint(tmp_path / "ckpt.pt")
    assert state["progress"]["history"][-1]["val_parts"] == [1.5, [2.5, [1.0, 1.0]]]


# -----------------------------------------------------------------------------
# gradients and losses

class Uneven:
    """Loader of ten rows in batches of 4, 4 and 2 rows."""
    samples, unit, units_per_sample = 10, "row", 1

    def get_batch(self, device, step):
        return rows(10)[step % 3 * 4:step % 3 * 4 + 4]

    def fingerprint(self):
        return {}


def test_a_smaller_batch_counts_with_its_items(tmp_path):
    """the last of three micro-batches has half of the rows, and the model does not count them ->
    loss, norm and numbers of the step are those of all rows at once"""
    class Uncounted(Regression):
        def forward(self, x, y):
            loss, sums = super().forward(x, y)
            return loss, {"abs_error": sums["abs_error"]}
    fit(tmp_path, Uncounted(), data=Data(Uneven()), max_iters=1)
    model = Uncounted()
    loss, sums = model(*rows(10)[:])
    loss.backward()
    line, = metrics(tmp_path)
    expected = dict(loss=loss, abs_error=sums["abs_error"] / 10,
                    grad_norm=torch.nn.utils.get_total_norm(p.grad for p in model.parameters()))
    for name, value in expected.items():
        assert line[name] == pytest.approx(float(value), rel=1e-5), name


def test_gradients_from_before_the_run_do_not_count(tmp_path):
    """A sanity check of the model before train(), or a run that ended within a step."""
    fit(tmp_path / "a")
    model = Regression()
    model(*rows(4).tensors)[0].backward()
    fit(tmp_path / "b", model)
    assert_same(tmp_path / "a", tmp_path / "b")


class Plain(Regression):
    """The mean of a micro-batch in which all rows are masked is NaN."""

    def forward(self, x, y):
        counted = y > -50
        return (self.net(x)[:, 0] - y)[counted].square().mean(), dict(count=counted.sum())

    def numbers(self, sums):
        return {}


def test_a_loss_per_row_in_evaluations_is_named(tmp_path):
    """The elements would be read as the loss and other sums."""
    class PerRow(Regression):
        def forward(self, x, y):
            loss = (self.net(x)[:, 0] - y).square()
            return (loss.mean() if self.training else loss), {}
    with pytest.raises(SetupError, match=r"loss has the shape \(4,\)"):
        fit(tmp_path, PerRow(), early_stopping_metric="val_loss")


def test_a_mean_over_nothing_is_no_number(tmp_path):
    """Of five validation batches one is masked -> the loss is the mean over the other rows. Of the
    training batches too."""
    data = Data(rows(24, masked=range(0, 24, 2)), rows(20, seed=2, masked=range(4, 8)))
    model = Plain()
    result = fit(tmp_path, model, data=data, batch_size=4, gradient_accumulation_steps=1)
    x, y = data.val.tensors
    expected = (model.net(x)[:, 0] - y)[y > -50].square().mean()
    assert result["val_loss"] == pytest.approx(float(expected), rel=1e-6)
    losses = [record["loss"] for record in metrics(tmp_path) if "loss" in record]
    assert all(loss is None or math.isfinite(loss) for loss in losses)  # None: nothing counted
    assert len(losses) == 12


@pytest.mark.parametrize("result, text", [
    (lambda loss: loss, "returned a Tensor; expected"),
    (lambda loss: (loss, {}, {}), "returned a tuple; expected"),
    (lambda loss: (loss, {"count": 4}), "count is no tensor; expected"),
    (lambda loss: (loss.expand(4), {}), r"loss has the shape \(4,\); expected a single number"),
    (lambda loss: (loss, {"count": torch.ones(4)}), r"count has the shape \(4,\); expected a"),
    (lambda loss: (loss, {"loss": loss}), "rename the sum loss, the name is reserved"),
    (lambda loss: (loss, {next(NEW_NAMES): loss}), "sums a1, and before a0")])
def test_another_result_of_forward_is_named(tmp_path, monkeypatch, result, text):
    monkeypatch.setattr(Regression, "forward",
                        lambda model, x, y: result((model.net(x)[:, 0] - y).square().mean()))
    with pytest.raises(SetupError, match=text):
        fit(tmp_path, eval_interval=0)


class Unbatched:
    """A loader with batches that are no tuples."""
    unit, units_per_sample, samples = "row", 1, 120

    def get_batch(self, device, step):
        return torch.zeros(4, 3)

    def fixed_batch(self, index, count, device):
        return self.get_batch(device, index)

    def n_fixed(self, count):
        return 1

    def fingerprint(self):
        return {}


@pytest.mark.parametrize("eval_on_start", [False, True])
def test_a_batch_that_is_no_tuple_is_named(tmp_path, eval_on_start):
    with pytest.raises(SetupError, match="a loader's batch is a Tensor, expected a tuple"):
        fit(tmp_path, data=Data(Unbatched(), Unbatched()), eval_on_start=eval_on_start)


@pytest.mark.parametrize("split, name", [
    ("train", "samples"), ("train", "fingerprint"), ("val", "n_fixed"), ("test", "unit")])
def test_a_loader_that_lacks_an_attribute_is_named(split, name):
    class Lacking(Unbatched):
        def __getattribute__(self, key):
            if key == name:
                raise AttributeError(key)
            return super().__getattribute__(key)
    with pytest.raises(DataError, match=f"Data.{split}: the loader has no {name}; "):
        replace(Data(rows(120), rows(30)), **{split: Lacking()})


def test_an_attribute_with_the_name_of_a_method_is_named(tmp_path):
    model = Regression()
    model.flops_per_unit = 3.0
    with pytest.raises(SetupError, match="Regression.flops_per_unit: a run calls"):
        fit(tmp_path, model)


def test_a_callback_may_leave_the_model_in_eval_mode(tmp_path):
    model = Regression(nn.Linear(3, 1), nn.Dropout(0.5))
    modes = []
    model.net[1].register_forward_hook(lambda part, *_: modes.append(part.training))
    config = load_config(None, SETTINGS | dict(out_dir=str(tmp_path), eval_interval=4))
    train(config, model=model, data=Data(rows(120), rows(4)),
          on_evaluation=lambda *_: model.eval())
    assert modes.count(True) == 12 * 3 * 2  # forward() calls the layers twice


def test_a_compiled_model_is_saved_with_its_own_names(tmp_path):
    fit(tmp_path, torch.compile(Regression()))
    assert set(load_checkpoint(tmp_path / "ckpt.pt")["model"]) == {"net.0.weight", "net.0.bias"}


# -----------------------------------------------------------------------------
# Datasets

class Named(torch.utils.data.Dataset):
    """Items with names; every second one has them in the other order."""

    def __init__(self, first, second):
        self.names = first, second
        self.x, self.y = rows(24).tensors

    def __len__(self):
        return 24

    def __getitem__(self, i):
        item = dict(zip(self.names, (self.x[i], self.y[i])))
        return item if i % 2 == 0 else dict(reversed(item.items()))


def test_names_of_an_item_keep_their_order(tmp_path):
    result = fit(tmp_path, data=Data(Named("a", "b"), Named("a", "b")))
    plain = fit(tmp_path / "plain", data=Data(rows(24), rows(24)))
    assert result["val_loss"] == plain["val_loss"]


def test_names_of_parameters_in_another_order_are_refused(tmp_path):
    with pytest.raises(SetupError, match="items have y, x in this order, and forward has x, y"):
        fit(tmp_path, data=Data(Named("y", "x")), eval_interval=0)


class Single(torch.utils.data.Dataset):
    """Reading is not possible in two threads at once, e.g. from one file."""
    lock = threading.Lock()

    def __len__(self):
        return 24

    def __getitem__(self, i):
        assert self.lock.acquire(blocking=False), "two threads read at once"
        time.sleep(0.0005)
        self.lock.release()
        return torch.ones(3), torch.tensor(float(i))


def test_one_thread_reads_a_dataset_at_a_time(tmp_path):
    fit(tmp_path, data=Data(Single(), Single()), eval_interval=1)


# -----------------------------------------------------------------------------
# the process of the caller

def wait_forever():
    time.sleep(60)


def test_a_forked_process_is_not_the_run(tmp_path):
    """It ends at SIGTERM, and does not keep the lock of the run's folder."""
    children = []

    def start(*_):
        children.append(multiprocessing.get_context("fork").Process(target=wait_forever))
        children[-1].start()
    for length in (4, 5):
        config = load_config(None, SETTINGS | dict(out_dir=str(tmp_path), max_iters=length))
        train(config, model=Regression(), data=Data(rows(120), rows(30)), on_evaluation=start)
    for child in children:
        child.terminate()
        child.join(10)
    assert len(children) > 1 and {child.exitcode for child in children} == {-signal.SIGTERM}


def test_a_second_interrupt_leaves_a_notebook_alive(monkeypatch, capfd):
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    signals = robust.Signals()
    signals.handle(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        signals.handle(signal.SIGINT, None)
    assert "resume='auto'" in resume_command(load_config(None, {}), Ranks())


class Tee:
    def write(self, text):
        sys.__stdout__.write(text)

    def flush(self):
        pass


def test_a_stream_with_two_methods_is_enough(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys, "stdout", Tee())
    fit(tmp_path)
    assert "Training complete" in capfd.readouterr().out


def test_options_of_the_command_line_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="dry_run: only for the command line"):
        fit(tmp_path, dry_run=True)


def test_a_length_in_epochs_evaluates_after_each(tmp_path):
    """Also if the configuration was not made by load_config()."""
    given = {k: v for k, v in SETTINGS.items() if k not in ("max_iters", "eval_interval",
                                                            "save_interval", "lr_decay_iters")}
    config = TrainConfig(**given, out_dir=str(tmp_path), max_epochs=3.0)
    result = train(config, model=Regression(), data=Data(rows(48), rows(30)))
    assert [record["iter"] for record in result["history"]] == [0, 4, 8, 12]
