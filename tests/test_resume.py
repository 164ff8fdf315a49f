"""A run that is stopped and started again ends as if nothing had happened, bit for bit.

Matrix cases 42 to 50 (51 and 52, what may not change, are in test_checkpoint_read.py). "Exact":
every tensor and counter of the last and the best checkpoint, and every line of metrics.jsonl.
"""

import functools
import json
import shutil

import numpy as np
import pytest
import torch
from conftest import run
from runs import SMALL, assert_same, assert_same_file, go, metrics, run_program, tensors

from train import train as training
from train.base.errors import CheckpointError, SetupError, Stopped
from train.checkpoint import load_checkpoint, save_checkpoint
from train.lr_scheduler import SpikeDetector

PLAIN = dict(dropout=0.1)
# Everything whose state must survive: Muon, accumulation, a plateau schedule that has dropped, an
# early stop that is counting (it ends the run at iter 18), spikes that are skipped.
EVERYTHING = dict(dropout=0.1, gradient_accumulation_steps=4, optimizer="muon", eval_interval=3,
                  lr_schedule="plateau", plateau_patience=0, learning_rate=0.3, muon_lr=0.3,
                  early_stopping_patience=5, early_stopping_min_delta=9.0, save_interval=4,
                  keep_last=2, on_spike="skip", spike_sigma=0.01)
KINDS = {"plain": PLAIN, "everything": EVERYTHING}


@pytest.fixture(autouse=True)
def short_spike_window(monkeypatch):
    """Spikes are judged after 3 losses instead of 64."""
    monkeypatch.setattr(SpikeDetector.__init__, "__defaults__", (6.0, 6))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data_dir):
    """{kind: folder} of the undisturbed runs."""
    old, SpikeDetector.__init__.__defaults__ = SpikeDetector.__init__.__defaults__, (6.0, 6)
    folder = tmp_path_factory.mktemp("whole")
    for kind, changes in KINDS.items():
        go(data_dir, folder / kind, **changes)
    SpikeDetector.__init__.__defaults__ = old
    return folder


def numbered(out):
    return sorted(p.name for p in out.glob("ckpt_0*"))


@pytest.mark.matrix(42)
def test_the_run_to_repeat_has_it_all(whole):
    """(the undisturbed run that cases 42 to 50 are compared with really drops its learning rate,
    skips spikes and stops early)"""
    state = load_checkpoint(whole / "everything" / "ckpt.pt")
    log = (whole / "everything" / "train.log").read_text()
    assert state["iter_num"] == 18 and "early stopping" in state["progress"]["finished"]
    assert state["plateau"]["scale"] < 1 and "is a spike" in log and len(state["spikes"]) == 6
    assert 0 < log.count("is a spike") < 15
    assert numbered(whole / "everything") == ["ckpt_0000016.pt", "ckpt_0000018.pt"]


STOPS = [((k,), "everything") for k in (1, 6, 9, 14)] + [((k,), "plain") for k in (0, 4, 5, 19)]


@pytest.mark.matrix(42, 43, 44, 49, 50)
@pytest.mark.parametrize("steps, kind", [(range(18), "everything"), *STOPS])
def test_stopped_at_any_step_the_end_is_exact(tmp_path, data_dir, whole, steps, kind):
    """SIGTERM in step k = 0 ... 17, in turn before its first and after its last micro-batch, then
    the same command, all in one life and some of them alone; dropout, accumulation 4, Muon,
    plateau, early stopping, keep_last, skipped spikes -> the step is dropped or done, and all is
    exact, learning rates and best too"""
    for k in steps:
        late = k % 2
        fault = f"{'before_opt' if late else 'before_step'}@{k}=sigterm"
        assert isinstance(go(data_dir, tmp_path, fault, **KINDS[kind]), Stopped)
        assert load_checkpoint(tmp_path / "ckpt.pt")["iter_num"] == k + late
    go(data_dir, tmp_path, **KINDS[kind])
    assert_same(whole / kind, tmp_path)
    assert set(numbered(whole / kind)) <= {*numbered(tmp_path), "ckpt_0000016.pt"}


@pytest.mark.matrix(42)
@pytest.mark.parametrize("k", [0, 1, 4, 5, 8, 11, 14, 17])
def test_after_a_crash_no_step_counts_twice(tmp_path, data_dir, whole, k):
    """an exception just before the update of step k, nothing saved -> exact from the last periodic
    checkpoint, no step twice in the metrics"""
    with pytest.raises(RuntimeError, match="fault at before_opt"):
        go(data_dir, tmp_path, f"before_opt@{k}=raise", **EVERYTHING)
    go(data_dir, tmp_path, **EVERYTHING)
    assert_same(whole / "everything", tmp_path)


@pytest.mark.matrix(42, 63)
@pytest.mark.parametrize("k", [0, 3, 9, 15])
def test_stopped_in_an_evaluation_it_is_done_again(tmp_path, data_dir, whole, k):
    """SIGTERM while evaluating before step k -> the evaluation is done again, all is exact"""
    assert isinstance(go(data_dir, tmp_path, f"eval@{k}=sigterm", **EVERYTHING), Stopped)
    assert load_checkpoint(tmp_path / "ckpt.pt")["iter_num"] == k
    go(data_dir, tmp_path, **EVERYTHING)
    assert_same(whole / "everything", tmp_path)


@pytest.mark.matrix(45, 76)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_float16_scale_is_exact_after_any_stop(tmp_path, data_dir, monkeypatch, optimizer):
    """float16 with a loss scale that grows until it overflows, every other step or so, stopped at
    each step in one life -> skipped steps are counted, scale and weights exact, weights finite"""
    monkeypatch.setattr(torch.amp, "GradScaler", functools.partial(
        torch.amp.GradScaler, init_scale=2.0 ** 19, growth_interval=1))
    half = dict(dtype="float16", dropout=0.1, optimizer=optimizer, max_iters=9, eval_interval=0,
                save_interval=2, muon_weight_decay=0.1)
    go(data_dir, tmp_path / "whole", **half)
    state = load_checkpoint(tmp_path / "whole" / "ckpt.pt")
    assert 2 <= state["progress"]["overflows"] < 8 and state["scaler"]["scale"] != 2.0 ** 19
    for k in range(8):
        go(data_dir, tmp_path / "parts", f"before_step@{k}=sigterm", **half)
    go(data_dir, tmp_path / "parts", **half)
    assert_same(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.matrix(46)
def test_another_evaluation_interval_is_the_same_training(tmp_path, data_dir, whole):
    """other eval_interval, eval_iters and log_interval on resume -> the same training, bitwise"""
    go(data_dir, tmp_path, "before_step@7=sigterm", **PLAIN)
    go(data_dir, tmp_path, **PLAIN, eval_interval=3, eval_iters=1, sample_tokens=4)
    a, b = (load_checkpoint(p / "ckpt.pt") for p in (whole / "plain", tmp_path))
    assert all(torch.equal(a["model"][n], b["model"][n]) for n in a["model"])
    a, b = ([m for m in metrics(p) if "loss" in m] for p in (whole / "plain", tmp_path))
    assert a == b


@pytest.mark.matrix(47)
@pytest.mark.parametrize("kind", KINDS)
def test_stopped_four_times_the_end_is_exact(tmp_path, data_dir, whole, kind):
    """stopped at steps 2, 3 and 11 and crashed at 15 in one life -> exact"""
    for fault in ("before_step@2=sigterm", "before_step@3=sigterm", "before_step@11=sigterm"):
        assert isinstance(go(data_dir, tmp_path, fault, **KINDS[kind]), Stopped)
    with pytest.raises(RuntimeError):
        go(data_dir, tmp_path, "mid_backward@15=raise", **KINDS[kind])
    go(data_dir, tmp_path, **KINDS[kind])
    assert_same(whole / kind, tmp_path)


@pytest.mark.matrix(48)
def test_a_finished_run_says_so_and_exits(tmp_path, data_dir):
    """started again after the end -> says so, exit 0, nothing changed on disk"""
    out = tmp_path / "out"
    go(data_dir, out)
    before = {n: (out / n).read_bytes() for n in ("ckpt.pt", "metrics.jsonl")}
    code, text = run_program(data_dir, out)
    assert code == 0 and "This run is finished at iter 20: max_iters 20 reached" in text
    assert all((out / n).read_bytes() == data for n, data in before.items())


@pytest.mark.matrix(48)
def test_a_larger_max_iters_continues_a_finished_run(tmp_path, data_dir, whole):
    """a finished run of 10 steps started again with max_iters 20, lr_decay_iters as before -> the
    learning rate and all the rest as in a run of 20 from the start"""
    go(data_dir, tmp_path, **PLAIN, max_iters=10)
    go(data_dir, tmp_path, **PLAIN)
    assert_same(whole / "plain", tmp_path)


@pytest.mark.matrix(48)
def test_a_longer_run_follows_its_own_schedule(tmp_path, data_dir):
    """max_iters raised where lr_decay_iters follows it -> from there on the schedule of the longer
    run, as the log shows"""
    go(data_dir, tmp_path / "a", lr_decay_iters=None, max_iters=8)
    go(data_dir, tmp_path / "a", lr_decay_iters=None, max_iters=16)
    go(data_dir, tmp_path / "b", lr_decay_iters=None, max_iters=16)
    a, b = ([m["lr"] for m in metrics(tmp_path / n) if "loss" in m] for n in "ab")
    assert a[8:] == b[8:] and a[4:8] != b[4:8] and len(a) == 16


@pytest.mark.matrix(48)
def test_an_early_stopped_run_stays_stopped(tmp_path, data_dir):
    """a run that early stopping ended, started again -> finished, exit without a step"""
    go(data_dir, tmp_path, **EVERYTHING)
    again = go(data_dir, tmp_path, **EVERYTHING)
    assert again["iter_num"] == 18 and again["finished"].startswith("early stopping")


@pytest.mark.matrix(50)
def test_the_best_one_survives_a_resume(tmp_path, data_dir, whole):
    """stopped in, then after, an evaluation that is the best so far -> ckpt_best.pt is of it"""
    go(data_dir, tmp_path, "eval@10=sigterm", **PLAIN)
    go(data_dir, tmp_path, "before_step@10=sigterm", **PLAIN)
    best = load_checkpoint(tmp_path / "ckpt_best.pt")
    assert best["iter_num"] == 10 and best["best_val_loss"] == best["progress"]["val_loss"]
    go(data_dir, tmp_path, **PLAIN)
    assert_same_file(whole / "plain" / "ckpt_best.pt", tmp_path / "ckpt_best.pt")


NAMES = ("ckpt.pt", "ckpt_prev.pt", "ckpt_best.pt", "metrics.jsonl")


def test_a_refused_branch_changes_no_file(tmp_path, data_dir):
    """--resume FILE with a metric that the model does not have -> refused, and the folder is as
    before, so that the run can go on from its last step"""
    go(data_dir, tmp_path, **PLAIN, keep_last=9)
    before = {n: (tmp_path / n).read_bytes() for n in NAMES}
    with pytest.raises(SetupError, match="have no 'val_accuracy'"):
        go(data_dir, tmp_path, **PLAIN, keep_last=9, resume=str(tmp_path / "ckpt_0000010.pt"),
           early_stopping_metric="val_accuracy", allow_change=["early_stopping_metric"])
    assert {n: (tmp_path / n).read_bytes() for n in NAMES} == before
    assert not (tmp_path / "old_1").exists()


def test_a_branch_that_is_finished_is_the_latest(tmp_path, data_dir):
    """a run of 10 steps that was extended to 20; --resume its last checkpoint of 10 with max_iters
    10 -> finished, and it is ckpt.pt, from which the next start continues"""
    go(data_dir, tmp_path, **PLAIN, keep_last=9, max_iters=10)
    go(data_dir, tmp_path, **PLAIN, keep_last=9, max_iters=20)
    result = go(data_dir, tmp_path, **PLAIN, keep_last=9, max_iters=10,
                resume=str(tmp_path / "ckpt_0000010.pt"))
    assert result["finished"] == "max_iters 10 reached"
    assert load_checkpoint(tmp_path / "ckpt.pt")["iter_num"] == 10
    assert max(m["iter"] for m in metrics(tmp_path)) == 10


def test_a_branch_without_evaluations_keeps_the_other_run_in_the_folder(tmp_path, data_dir):
    """two runs without evaluations; --resume FILE of the longer one in the folder of the other,
    whose metrics.jsonl is deleted -> all checkpoints of the other are in old_1"""
    keys = PLAIN | dict(eval_interval=0, save_interval=2, keep_last=2)
    go(data_dir, tmp_path / "a", **keys, max_iters=8)
    go(data_dir, tmp_path / "b", **keys, max_iters=4, seed=5)
    (tmp_path / "b/metrics.jsonl").unlink()
    other = {path.name: path.read_bytes() for path in (tmp_path / "b").glob("ckpt*")}
    go(data_dir, tmp_path / "b", **keys, max_iters=12, resume=str(tmp_path / "a/ckpt_0000008.pt"))
    old = (tmp_path / "b/old_1").glob("ckpt*")
    assert {path.name: path.read_bytes() for path in old} == other


def test_a_branch_from_step_0_is_the_latest_and_its_start_may_be_the_best(tmp_path, data_dir):
    """a run with init_from; --resume its checkpoint of step 0, killed before the next save -> the
    next start continues at step 0; in another folder the best checkpoint is that of the run"""
    go(data_dir, tmp_path / "base", **PLAIN)
    keys = PLAIN | dict(keep_last=9, learning_rate=100.0, init_from=str(tmp_path / "base/ckpt.pt"))
    go(data_dir, tmp_path / "a", **keys)
    first = str(tmp_path / "a/ckpt_0000000.pt")
    go(data_dir, tmp_path / "b", **keys, resume=first)
    best = [load_checkpoint(tmp_path / name / "ckpt_best.pt")["iter_num"] for name in "ab"]
    assert best == [0, 0]
    code, text = run_program(data_dir, tmp_path / "a", env={"FAULT": "save_open@5=kill9"},
                             **keys, resume=first)
    assert code == -9, text
    code, text = run_program(data_dir, tmp_path / "a", **keys)
    assert code == 0 and "a/ckpt.pt at iter 0" in text, text


def test_metrics_after_a_torn_line(tmp_path, data_dir, whole):
    """metrics.jsonl ends in half a line, as after a power cut -> dropped, every step once"""
    go(data_dir, tmp_path, "before_step@7=sigterm", **PLAIN)
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write(json.dumps({"iter": 8, "loss": 1.0})[:11])
    go(data_dir, tmp_path, **PLAIN)
    assert_same(whole / "plain", tmp_path)


def test_a_checkpoint_says_what_made_it(tmp_path, data_dir):
    go(data_dir, tmp_path, max_iters=1, seed=5)
    state = load_checkpoint(tmp_path / "ckpt.pt")
    assert (state["torch"], state["world_size"]) == (torch.__version__, 1)
    assert state["rng"] == {"seed": 5}


def test_four_ranks_resume_bit_for_bit(data_dir, tmp_path):
    """A sum of more than two numbers depends on their order, which DDP's buckets decide."""
    keys = SMALL | dict(data_dir=data_dir, n_layer=2, max_iters=6, save_interval=3, keep_last=9)
    for folder, resume in (("a", "auto"), ("b", tmp_path / "a/ckpt_0000003.pt")):
        code, output = run(*[f"--{k}={v}" for k, v in keys.items()], f"--resume={resume}",
                           f"--out_dir={tmp_path / folder}", ranks=4)
        assert code == 0, output
    (a, _), (b, _) = (tensors(tmp_path / folder / "ckpt.pt") for folder in "ab")
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def test_a_loss_on_other_samples_is_not_compared(tmp_path, data_dir, capsys):
    """eval_iters x batch_size are the samples of an evaluation; all there are is the most"""
    keys = PLAIN | dict(eval_interval=5, eval_iters=2, batch_size=4, gradient_accumulation_steps=2)
    go(data_dir, tmp_path, **keys, max_iters=5)
    state = load_checkpoint(tmp_path / "ckpt.pt")
    state["progress"]["best_metric"] = state["progress"]["best_val_loss"] = 0.0
    save_checkpoint(str(tmp_path / "ckpt.pt"), state)
    half = dict(batch_size=2, gradient_accumulation_steps=4)  # the same global batch
    equal = go(data_dir, tmp_path, **keys | half | dict(eval_iters=4), max_iters=10)
    assert equal["best_val_loss"] == 0 and "Changed:" not in capsys.readouterr().out
    result = go(data_dir, tmp_path, **keys | half, max_iters=15)
    assert "Changed: validation samples; the next evaluation is" in capsys.readouterr().out
    assert result["best_val_loss"] == min(r["val_loss"] for r in result["history"][-2:]) > 0


def test_a_part_without_evaluations_keeps_the_best(tmp_path, data_dir, monkeypatch, capsys):
    """eval_interval 0 has no validation data: ckpt_best.pt is not replaced by a worse one later"""
    losses = iter([9.0, 1.0, 2.0, 3.0, 4.0])
    monkeypatch.setattr(training, "evaluate_validation", lambda *_: {"val_loss": next(losses)})
    for changes in (dict(max_iters=8), dict(max_iters=12, eval_interval=0), dict(max_iters=16)):
        result = go(data_dir, tmp_path, **PLAIN | dict(eval_interval=4) | changes)
        assert result["best_val_loss"] == 1
    assert load_checkpoint(tmp_path / "ckpt_best.pt")["iter_num"] == 4
    assert "Changed:" not in capsys.readouterr().out


def test_a_task_of_other_rows_starts_the_comparison_again(tmp_path, data_dir, monkeypatch):
    """0.9 of one example is not compared with 0.7 of all; a loss does not depend on the rows"""
    values = {0: 0.1, 5: 0.9, 10: 0.5, 15: 0.7}
    monkeypatch.setattr(training, "evaluate_validation", lambda run, n: {
        "val_loss": 1 - values[run.progress.iter_num], "val_cap": values[run.progress.iter_num]})
    (tmp_path / "cap.jsonl").write_text('{"context": "a", "continuation": "b"}\n' * 4)
    keys = PLAIN | dict(eval_interval=5, eval_tasks=[str(tmp_path / "cap.jsonl")],
                        tokenizer="byte", vocab_size=257)
    for metric, best in (("val_cap", 15), ("val_loss", 5)):
        keys |= dict(early_stopping_metric=metric)
        keys |= dict(early_stopping_mode="max" if metric == "val_cap" else "min")
        go(data_dir, tmp_path / metric, **keys, max_iters=5, eval_task_rows=1)
        go(data_dir, tmp_path / metric, **keys, max_iters=15, eval_task_rows=0)
        assert load_checkpoint(tmp_path / metric / "ckpt_best.pt")["iter_num"] == best


def test_another_validation_split_starts_the_comparison_again(tmp_path, data_dir, capsys):
    """a worse loss on new validation data after a resume -> the best so far on these data"""
    data = tmp_path / "data"
    shutil.copytree(data_dir, data)
    keys = PLAIN | dict(eval_interval=5, early_stopping_patience=1, lr_schedule="plateau",
                        plateau_patience=0)
    first = go(data, tmp_path / "out", **keys, max_iters=10)
    same = go(data, tmp_path / "out", **keys, max_iters=15)
    assert same["best_val_loss"] <= first["best_val_loss"]
    assert "Changed:" not in capsys.readouterr().out

    size = (data / "val.bin").stat().st_size
    np.random.default_rng(0).integers(0, 256, size // 2, np.uint16).tofile(data / "val.bin")
    result = go(data, tmp_path / "out", **keys, max_iters=20)
    assert "Changed: validation data; the next evaluation is" in capsys.readouterr().out
    assert result["finished"] == "max_iters 20 reached"  # not early stopping
    losses = {record["iter"]: record["val_loss"] for record in result["history"][-2:]}
    assert list(losses) == [15, 20]  # 15 again, on the new data
    best = min(losses, key=losses.get)
    assert result["best_val_loss"] == losses[best] > first["best_val_loss"] + 0.1
    state = load_checkpoint(tmp_path / "out" / "ckpt_best.pt")
    assert state["iter_num"] == best and state["progress"]["best_metric"] == losses[best]
    assert state["plateau"]["waiting"]["best"] == losses[best]
    branch = go(data_dir, tmp_path / "branch", **keys, max_iters=25,  # on the first data again
                resume=str(tmp_path / "out" / "ckpt.pt"))
    assert branch["best_val_loss"] == min(r["val_loss"] for r in branch["history"][-2:])
    assert load_checkpoint(tmp_path / "branch" / "ckpt_best.pt")["best_val_loss"] < losses[best]


def test_a_key_that_the_version_of_the_checkpoint_lacks_has_its_default(tmp_path, data_dir):
    """a checkpoint of an earlier version, resumed with a newer key -> refused by name"""
    go(data_dir, tmp_path, **PLAIN, max_iters=2)
    state = load_checkpoint(tmp_path / "ckpt.pt")
    del state["config"]["embed_scale"], state["config"]["adam_eps"]
    save_checkpoint(str(tmp_path / "ckpt.pt"), state)
    with pytest.raises(CheckpointError, match="embed_scale: checkpoint has 1.0, now 3.0"):
        go(data_dir, tmp_path, **PLAIN, max_iters=4, embed_scale=3.0)
    assert go(data_dir, tmp_path, **PLAIN, max_iters=4)["iter_num"] == 4
