"""Loading: a bad file is refused with its name and what is wrong, and never runs code.

Matrix cases 19 to 41, and 51 and 52. The run under test has two checkpoints, of iter 10 and 5; each
test breaks the newer one, or puts something else in its place.
"""

import errno
import io
import os
import pickle
import random
import re
import shutil

import pytest
import torch
from runs import assert_same, configure, go, metrics, opened, run_program, tensors

from model.core.weights import read_backbone
from model.gpt import GPT, GPTConfig
from train.base import checkpoint_file
from train.base.errors import CheckpointError, ConfigError, SetupError, Stopped
from train.base.fields import parse_value
from train.base.run_folder import find_newest_checkpoint
from train.checkpoint import load_checkpoint, save_checkpoint
from train.config import FIELDS
from train.dataloader import DataLoader
from train.train import train


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory, data_dir):
    """A run that was killed at iter 12, and how it ends if it goes on."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(RuntimeError, match="fault at before_step"):
        go(data_dir, folder / "out", "before_step@12=raise")
    go(data_dir, folder / "whole")
    return folder


@pytest.fixture
def out(tmp_path, stopped_run):
    """A copy of the killed run's folder."""
    shutil.copytree(stopped_run / "out", tmp_path / "out")
    return tmp_path / "out"


def refused(path, match=""):
    with pytest.raises(CheckpointError, match=match) as caught:
        load_checkpoint(path)
    text = str(caught.value)
    assert text.startswith(str(path)) and len(text.splitlines()) == 1, text
    return text


def truncate(path, share):
    os.truncate(path, int(path.stat().st_size * share))


def replace_by_folder(path):
    path.unlink()
    path.mkdir()


def legacy_pickle(path):
    torch.save({"model": {"w": torch.ones(2)}}, path, _use_new_zipfile_serialization=False)
    truncate(path, 0.7)


def torchscript(path):
    torch.jit.script(torch.nn.Linear(2, 2)).save(path)


BROKEN = {
    "19 empty": lambda p: truncate(p, 0), "20 random bytes": lambda p: p.write_bytes(
        random.Random(20).randbytes(5000)),
    "21 text": lambda p: p.write_text("not a checkpoint\n" * 50),
    "22 zeros": lambda p: p.write_bytes(bytes(p.stat().st_size)),
    "23 10 %": lambda p: truncate(p, 0.1), "23 50 %": lambda p: truncate(p, 0.5),
    "23 90 %": lambda p: truncate(p, 0.9), "23 99.9 %": lambda p: truncate(p, 0.999),
    "23 less a byte": lambda p: os.truncate(p, p.stat().st_size - 1),
    "24 folder": replace_by_folder, "29 TorchScript": torchscript, "29 legacy": legacy_pickle}


@pytest.mark.matrix(19, 20, 21, 22, 23, 24, 29)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", BROKEN)
def test_a_bad_file_is_named_and_the_one_before_it_used(out, data_dir, stopped_run, capsys, what):
    """ckpt.pt empty, random bytes, text, zeros, truncated at 10, 50, 90 and 99.9 %, a folder,
    TorchScript or a damaged legacy file -> named with the reason, the checkpoint before it is used,
    and the end is exact; the bad file is kept aside"""
    BROKEN[what](out / "ckpt.pt")
    reason = refused(out / "ckpt.pt")
    assert "damaged or incomplete" in reason or what[-1] != "%"
    go(data_dir, out)
    text = capsys.readouterr().out
    assert f"warning: {out}/ckpt.pt: " in text
    assert f"falling back to {out}/ckpt_prev.pt (iter 5)" in text
    log = (out / "train.log").read_text()  # which was opened later
    assert f" warning: {out}/ckpt.pt: " in log and "falling back to" in log
    assert "Resuming from" in text and "at iter 5" in text
    assert_same(stopped_run / "whole", out)
    assert (out / "ckpt_bad_1.pt").exists()


@pytest.mark.matrix(25)
def test_every_bit_flip_is_detected(out, data_dir, stopped_run):
    """one bit flipped at 300 random places -> 300 detected; the run goes on from the checkpoint
    before it"""
    path, draw = out / "ckpt.pt", random.Random(25)
    good, detected = path.read_bytes(), 0
    for _ in range(300):
        bad, place = bytearray(good), draw.randrange(len(good))
        bad[place] ^= 1 << draw.randrange(8)
        path.write_bytes(bad)
        refused(path, "damaged")
        detected += 1
    assert detected == 300
    go(data_dir, out)
    assert_same(stopped_run / "whole", out)


@pytest.mark.matrix(25)
def test_every_bit_flip_in_the_digest_is_detected(out):
    """one bit flipped in each byte of the digest behind the content -> detected every time"""
    path = out / "ckpt.pt"
    good = path.read_bytes()
    for place in range(len(good) - 79, len(good)):
        bad = bytearray(good)
        bad[place] ^= 4
        path.write_bytes(bad)
        refused(path, "damaged")


@pytest.mark.matrix(26)
def test_when_no_checkpoint_is_good_the_run_is_refused(out, data_dir):
    """both checkpoints corrupt -> exit 2, both named, nothing trained or changed on disk"""
    for name in ("ckpt.pt", "ckpt_prev.pt"):
        truncate(out / name, 0.5)
    before = {p.name: p.stat().st_mtime_ns for p in out.iterdir() if p.name != ".lock"}
    code, text = run_program(data_dir, out)
    assert code == 2 and "no checkpoint can be used" in text and "--resume never" in text
    assert f"{out}/ckpt.pt" in text and f"{out}/ckpt_prev.pt" in text
    assert "iter 0" not in text and "Traceback" not in text
    assert before == {p.name: p.stat().st_mtime_ns for p in out.iterdir() if p.name != ".lock"}


@pytest.mark.matrix(26)
def test_previous_one_is_used_when_the_newest_is_missing(out, data_dir, stopped_run):
    """ckpt.pt deleted -> the run goes on from ckpt_prev.pt, it does not start from scratch"""
    (out / "ckpt.pt").unlink()
    go(data_dir, out)
    assert_same(stopped_run / "whole", out)


@pytest.mark.matrix(26)
def test_two_bad_files_in_a_row_are_both_kept_aside(out, data_dir, stopped_run):
    """a bad ckpt.pt, twice in the life of a run, once a folder -> both kept aside, the end exact"""
    truncate(out / "ckpt.pt", 0.5)
    go(data_dir, out, max_iters=12)
    replace_by_folder(out / "ckpt.pt")
    go(data_dir, out)
    assert (out / "ckpt_bad_1.pt").is_file() and (out / "ckpt_bad_2.pt").is_dir()
    assert_same(stopped_run / "whole", out, best=False)  # an evaluation at 12 was logged besides


class Evil:
    """Unpickled, it calls function(*args)."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def attacks(marker):
    touch = f"touch {marker}"
    return {"os.system": Evil(os.system, touch), "exec": Evil(exec, f"open({str(marker)!r}, 'w')"),
            "torch.hub": Evil(torch.hub.load, "a/b", "c"), "eval": Evil(eval, touch),
            "getattr": Evil(getattr, "os", "system"), "import": Evil(__import__, "subprocess")}


NAMES = {"os.system": r"posix\.system", "exec": "exec", "torch.hub": r"torch\.hub\.load",
         "eval": "eval", "getattr": "getattr", "import": "__import__"}


@pytest.mark.matrix(27, 28, 30)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("attack", NAMES)
def test_code_in_a_checkpoint_is_refused_and_not_run(out, data_dir, tmp_path, monkeypatch, attack,
                                                     forced):
    """a pickle that calls os.system, exec, torch.hub.load ... as the model, inside the optimizer
    state, or as a bare pickle of any protocol, also with TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 ->
    refused, with the name shown where torch reads it, not run"""
    if forced:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    marker, path = tmp_path / "marker", out / "ckpt.pt"
    state = load_checkpoint(out / "ckpt_prev.pt")
    evil = attacks(marker)[attack]
    state["optimizer"]["state"]["wte.weight"]["exp_avg"] = evil
    for content in (evil, {"model": evil}, state):
        for zipped in (True, False):
            torch.save(content, path, _use_new_zipfile_serialization=zipped)
            refused(path, f"refused: .*{NAMES[attack]}")
    for protocol in range(6):
        path.write_bytes(pickle.dumps({"model": evil}, protocol))
        named = protocol in (1, 2, 3)  # of those around torch.save's own torch reads the names
        refused(path, f"refused: .*{NAMES[attack]}" if named else
                "objects other than plain tensors")
    if attack == "os.system":  # a whole run meets it
        torch.save(state, path)
        code, text = run_program(data_dir, out, max_iters=6)
        assert code == 0 and "refused: it would run or build posix.system" in text
    assert not marker.exists()


@pytest.mark.matrix(27)
def test_code_in_a_checkpoint_is_refused_though_its_digest_is_right(tmp_path):
    """the same with a valid digest -> refused all the same: the digest is no permission"""
    path = tmp_path / "ckpt.pt"
    save_checkpoint(str(path), {"model": Evil(os.system, f"touch {tmp_path / 'marker'}")})
    refused(path, "refused: it would run or build posix.system")
    assert not (tmp_path / "marker").exists()


@pytest.mark.matrix(31)
def test_weights_without_the_rest_are_not_resumed(out, data_dir):
    """a checkpoint without optimizer or progress -> refused, --init_from offered, which works"""
    state = load_checkpoint(out / "ckpt.pt")
    for key in ("optimizer", "progress", "data"):
        less = {k: v for k, v in state.items() if k != key}
        save_checkpoint(str(out / "ckpt.pt"), less)
        with pytest.raises(CheckpointError, match=f"not the rest of a run .no {key}.*--init_from"):
            go(data_dir, out)
    go(data_dir, out.parent / "other", init_from=str(out / "ckpt.pt"), max_iters=2)


def test_data_whose_fingerprint_is_none_are_resumed(tmp_path, data_dir, monkeypatch):
    monkeypatch.setattr(DataLoader, "fingerprint", lambda loader: None)
    for steps in (1, 2):
        go(data_dir, tmp_path, max_iters=steps)
        assert load_checkpoint(tmp_path / "ckpt.pt")["iter_num"] == steps


@pytest.mark.matrix(31)
def test_init_from_a_file_that_never_would_move_is_refused(out, data_dir):
    """--init_from a file of the out_dir that --resume never clears -> refused before moving it"""
    with pytest.raises(CheckpointError, match="choose another --out_dir"):
        go(data_dir, out, init_from=str(out / "ckpt.pt"), resume="never")
    assert (out / "ckpt.pt").exists()
    with pytest.raises(CheckpointError, match="--teacher x.pt,.*choose another --out_dir"):
        go(data_dir, out, model="distill", teacher=f"x.pt,{out / 'ckpt.pt'}", resume="never")
    assert (out / "ckpt.pt").exists()


def test_init_from_shards_that_never_would_move_is_refused(tmp_path, data_dir):
    go(data_dir, tmp_path, checkpoint_format="sharded", max_iters=1)
    for folder in (tmp_path, next(tmp_path.glob("shards/*"))):
        with pytest.raises(CheckpointError, match="choose another --out_dir"):
            go(data_dir, tmp_path, init_from=str(folder), resume="never")
        assert (tmp_path / "ckpt.pt").exists() and folder.exists()


@pytest.mark.matrix(32)
def test_unknown_keys_in_a_checkpoint_are_ignored(out, data_dir, stopped_run):
    """unknown keys in a checkpoint -> ignored, the end exact"""
    save_checkpoint(str(out / "ckpt.pt"), load_checkpoint(out / "ckpt.pt") | {"colour": "blue"})
    go(data_dir, out)
    assert_same(stopped_run / "whole", out)


@pytest.mark.matrix(33)
@pytest.mark.parametrize("version, message", [(99, "format 99 is newer than this program's 1"),
                                              ("one", "format one is newer")])
def test_a_newer_format_is_refused(out, version, message):
    """a newer or senseless format version -> refused: update the program"""
    state = load_checkpoint(out / "ckpt.pt") | {"format_version": version}
    save_checkpoint(str(out / "ckpt.pt"), state)
    assert "update the program" in refused(out / "ckpt.pt", message)


@pytest.mark.matrix(34)
def test_a_foreign_format_is_read_as_weights(out, data_dir):
    """a file without version and digest, as nanoGPT writes -> read as weights, not resumed"""
    state = load_checkpoint(out / "ckpt.pt")
    keys = ("model", "optimizer", "model_args", "iter_num", "best_val_loss", "config")
    torch.save({k: state[k] for k in keys}, out / "ckpt.pt")
    assert load_checkpoint(out / "ckpt.pt")["iter_num"] == 10
    with pytest.raises(CheckpointError, match="not the rest of a run .no progress, .*--init_from"):
        go(data_dir, out)


@pytest.mark.matrix(34)
def test_our_file_without_its_digest_is_damaged(out):
    """our own file with its digest cut off -> damaged, not taken for a foreign one"""
    torch.save(load_checkpoint(out / "ckpt.pt"), out / "ckpt.pt")
    refused(out / "ckpt.pt",
            "damaged: the digest is missing .save a modified checkpoint with train")


@pytest.mark.matrix(35)
@pytest.mark.parametrize("key, value, shapes", [
    ("n_layer", 2, ["h.1.attn.q.weight: no tensor, expected shape"]),
    ("n_embd", 32, ["wte.weight: shape (256, 16)"]),
    ("vocab_size", 300,
     ["wte.weight: shape (256, 16) torch.float32, expected shape (384, 16) torch.float32"]),
    ("n_hidden", 16,
     ["h.0.mlp.up.weight: shape (32, 16) torch.float32, expected shape (16, 16) torch.float32"])])
def test_a_model_of_another_size_is_refused(out, data_dir, key, value, shapes):
    """n_layer, n_embd, vocab_size or n_hidden changed -> refused naming the key; with
    --allow_change refused naming every tensor, found and expected shape"""
    with pytest.raises(CheckpointError, match=f"{key}: checkpoint has .*, now {value}") as caught:
        go(data_dir, out, **{key: value})
    assert "allow_change" not in str(caught.value)  # it would not help
    with pytest.raises(CheckpointError, match="does not fit this model") as caught:
        go(data_dir, out, **{key: value}, allow_change=["all"])
    for text in shapes:
        assert text in str(caught.value)
    assert load_checkpoint(out / "ckpt.pt")["iter_num"] == 10


@pytest.mark.matrix(103)
def test_a_block_longer_than_the_models_is_refused(out, data_dir, tmp_path):
    """block_size raised on resume; --init_from a model whose learned positions are fewer; a
    sequence longer than the context -> refused, with found and wanted"""
    with pytest.raises(CheckpointError, match="block_size: checkpoint has 8, now 32"):
        go(data_dir, out, block_size=32)
    go(data_dir, tmp_path / "a", pos="learned")
    with pytest.raises(CheckpointError, match="block_size: it has 8, the configuration says 32"):
        go(data_dir, tmp_path / "b", pos="learned", block_size=32,
           init_from=tmp_path / "a" / "ckpt.pt")
    config = configure(data_dir, tmp_path / "b", pos="learned",
                       init_from=tmp_path / "a" / "ckpt.pt")
    with pytest.raises(CheckpointError, match="n_layer: it has 1, the configuration says 3"):
        train(config.replace(n_layer=3))
    model = GPT(GPTConfig(block_size=16, vocab_size=5, n_layer=1, n_head=1, n_embd=8))
    with pytest.raises(ValueError, match="17 tokens; the model's context"):
        model(torch.zeros(1, 17, dtype=torch.long))


def broken_state(out, change):
    state = load_checkpoint(out / "ckpt.pt")
    change(state)
    save_checkpoint(str(out / "ckpt.pt"), state)


def entry(state, name="wte.weight"):
    return state["optimizer"]["state"][name]


@pytest.mark.matrix(36, 37, 38)
@pytest.mark.parametrize("change, message", [
    (lambda s: entry(s).update(exp_avg=torch.zeros(3)),
     r"optimizer.wte.weight.exp_avg: shape \(3,\) torch.float32, expected shape \(256, 16\)"),
    (lambda s: entry(s).update(exp_avg=[1.0]), "optimizer.wte.weight.exp_avg: no tensor, expected"),
    (lambda s: s["optimizer"]["state"].update(other=entry(s)), "lacks the optimizer state of oth"),
    (lambda s: entry(s).update(exp_avg=entry(s)["exp_avg"].bfloat16()), "bfloat16, expected"),
    (lambda s: s["model"].update({"ln_f.weight": torch.ones(16).bfloat16()}), "bfloat16, expected"),
    (lambda s: s["model"].pop("ln_f.weight"), "ln_f.weight: no tensor, expected shape"),
    (lambda s: s["model"].update(extra=torch.ones(1)), "extra: shape .* expected no tensor"),
    (lambda s: s["optimizer"]["state"].pop("wte.weight"), "lacks the optimizer state of wte"),
    (lambda s: entry(s).pop("exp_avg_sq"), "lacks the optimizer state of wte")])
def test_optimizer_state_that_does_not_fit_is_refused(out, data_dir, change, message):
    """optimizer state of a wrong shape, kind, size or dtype, missing or unknown tensors (torch
    accepts most of it) -> refused, each named with found and wanted"""
    broken_state(out, change)
    with pytest.raises(CheckpointError, match=message):
        go(data_dir, out)


@pytest.mark.matrix(36)
@pytest.mark.parametrize("place", [("model", "ln_f.weight"),
                                   ("optimizer", "state", "wte.weight", "exp_avg")])
def test_a_checkpoint_with_nan_is_refused(out, data_dir, capsys, place):
    """a NaN in a checkpoint's weights or optimizer state, under a valid digest -> refused by name,
    the one before it is used"""
    def poison(state):
        for key in place:
            state = state[key]
        state.view(-1)[0] = torch.nan
    broken_state(out, poison)
    go(data_dir, out)
    assert f"{'.'.join(place)} contains non-finite values" in capsys.readouterr().out


def test_a_backbone_is_known_by_its_weights_whatever_wrote_them(tmp_path):
    weights = {"wte.weight": torch.randn(4, 3), "h.0.ln_1.weight": torch.ones(3)}
    torch.save(dict(model=weights), tmp_path / "a.pt")
    torch.save(dict(model={f"module._orig_mod.{n}": weights[n] for n in reversed(weights)}),
               tmp_path / "b.pt")
    a, b = (read_backbone(str(tmp_path / name)) for name in ("a.pt", "b.pt"))
    assert a["digest"] == b["digest"] and a["model"].keys() == b["model"].keys() == weights.keys()
    weights["h.0.ln_1.weight"][2] = 2
    torch.save(dict(model=weights), tmp_path / "c.pt")
    assert read_backbone(str(tmp_path / "c.pt"))["digest"] != a["digest"]


@pytest.mark.matrix(37)
def test_another_optimizer_starts_what_does_not_fit_afresh(out, data_dir, capsys):
    """optimizer changed from adamw to muon and back with --allow_change -> what does not fit starts
    afresh and is counted; without it refused"""
    go(data_dir, out, optimizer="muon", allow_change=["all"], max_iters=14)
    assert "optimizer state of 7 tensors is newly initialised" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="optimizer: checkpoint has 'muon', now 'adamw'"):
        go(data_dir, out)
    go(data_dir, out, allow_change=["all"])
    assert "optimizer state of 7 tensors is newly initialised" in capsys.readouterr().out


@pytest.mark.matrix(38, 39)
def test_init_from_takes_other_precisions_and_prefixes(tmp_path, data_dir, stopped_run, capsys):
    """--init_from a bfloat16 file whose names have module. and _orig_mod. before them -> loads,
    converted, and says from where"""
    path, state = tmp_path / "theirs.pt", load_checkpoint(stopped_run / "out" / "ckpt.pt")
    theirs = {f"module._orig_mod.{n}": t.bfloat16() for n, t in state["model"].items()}
    torch.save({"model": theirs}, path)
    go(data_dir, tmp_path / "out", init_from=str(path), max_iters=0)
    assert f"Starting from the weights of {path}: 11 tensors" in capsys.readouterr().out
    loaded = load_checkpoint(tmp_path / "out" / "ckpt.pt")["model"]
    assert all(torch.equal(t.bfloat16().float(), loaded[n]) for n, t in state["model"].items())


@pytest.mark.matrix(40)
def test_compile_may_be_switched_across_resumes(tmp_path, data_dir, stopped_run, monkeypatch):
    """compile switched on, then off, across resumes -> loads, names unchanged, losses within 1e-5
    (traced by Dynamo but not lowered to C++, which takes a minute)"""
    whole, real = torch.nn.Module.compile, []

    def compile_eagerly(module, **_):
        real.append(1)
        whole(module, backend="eager")
    monkeypatch.setattr(torch.nn.Module, "compile", compile_eagerly)
    for stop, compiled in ((6, "false"), (13, "true"), (20, "false")):
        go(data_dir, tmp_path, compile=compiled, max_iters=stop)
    assert real == [1]
    a, b = ({m["iter"]: m["loss"] for m in metrics(p) if "loss" in m}
            for p in (stopped_run / "whole", tmp_path))
    assert a.keys() == b.keys() and all(abs(a[i] - b[i]) < 1e-5 * a[i] for i in a)
    assert (tensors(tmp_path / "ckpt.pt")[0].keys()
            == tensors(stopped_run / "whole" / "ckpt.pt")[0].keys())


@pytest.mark.matrix(41)
def test_without_a_checkpoint_must_refuses_and_auto_starts(tmp_path, data_dir, capsys):
    """no checkpoint with resume must, and auto -> must refuses, auto starts from scratch, aloud"""
    with pytest.raises(CheckpointError, match=f"--resume must: there is no ckpt.pt in {tmp_path}"):
        go(data_dir, tmp_path, resume="must")
    go(data_dir, tmp_path, max_iters=1)
    assert f"No checkpoint in {tmp_path}: starting from scratch" in capsys.readouterr().out
    go(data_dir, tmp_path, resume="never", max_iters=1)
    assert "No checkpoint" not in capsys.readouterr().out
    go(data_dir, tmp_path, resume="must", max_iters=2)


def test_a_folder_to_resume_means_its_checkpoint(tmp_path, data_dir, stopped_run):
    go(data_dir, tmp_path / "b", resume=str(stopped_run / "whole"), max_iters=24)
    go(data_dir, tmp_path / "a", resume=str(stopped_run / "whole" / "ckpt.pt"), max_iters=24)
    assert_same(tmp_path / "a", tmp_path / "b")


def test_init_from_is_without_effect_on_a_run_begun_from_scratch(tmp_path, data_dir, stopped_run):
    """a command with init_from for a run that began without -> it continues; the shape of the
    weights, which the run did not inherit, is not compared"""
    go(data_dir, tmp_path, max_iters=1, n_embd=16, n_head=1)
    start = str(stopped_run / "whole" / "ckpt.pt")
    last = go(data_dir, tmp_path, max_iters=2, n_embd=16, n_head=1, init_from=start)
    assert last["iter_num"] == 2


def test_resume_never_moves_aside(out, data_dir, stopped_run, capsys, monkeypatch):
    """resume never -> what was there is moved to old_1, nothing deleted; but a restart by torchrun
    goes on with the run it restarts"""
    before = (out / "ckpt.pt").read_bytes()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    stopped = go(data_dir, out, "before_step@7=sigterm", resume="never")
    assert isinstance(stopped, Stopped) and str(stopped) == "stopped by SIGTERM"
    assert (out / "old_1" / "ckpt.pt").read_bytes() == before
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")  # typed again, with the same --rdzv_id
    assert isinstance(go(data_dir, out, "before_step@7=sigterm", resume="never"), Stopped)
    assert (out / "old_2" / "ckpt.pt").exists()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    go(data_dir, out, resume="never")
    assert "Resuming from" in capsys.readouterr().out
    assert_same(stopped_run / "whole", out)


def test_a_restart_for_a_node_that_joins_goes_on(tmp_path, data_dir, stopped_run, monkeypatch):
    """torchrun --nnodes=1:2 does not count this restart: its folder of logs is the same"""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/tmp/a/attempt_0/0/error.json")
    assert isinstance(go(data_dir, tmp_path, "before_step@7=sigterm", resume="never"), Stopped)
    job = tmp_path / ".job"
    job.write_text(job.read_text().replace(f"\n{os.getpid()}", "\n1"))  # of another process
    go(data_dir, tmp_path, resume="never")
    assert not (tmp_path / "old_1").exists()
    assert_same(stopped_run / "whole", tmp_path)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/tmp/b/attempt_0/0/error.json")  # typed again
    for n in (1, 2):  # and a second run of this process
        go(data_dir, tmp_path, resume="never", max_iters=1)
        assert (tmp_path / f"old_{n}" / "ckpt.pt").exists()


@pytest.mark.parametrize("dtype, advised", [(torch.float32, True), (torch.float64, False)])
def test_a_change_is_not_advised_where_the_tensors_would_not_fit(out, data_dir, dtype, advised):
    state = load_checkpoint(out / "ckpt.pt")
    state["model"] = {name: t.to(dtype) for name, t in state["model"].items()}
    save_checkpoint(out / "ckpt.pt", state)
    with pytest.raises(CheckpointError, match="weight_decay: checkpoint has") as refused:
        go(data_dir, out, weight_decay=0.5)
    assert ("--allow_change weight_decay" in str(refused.value)) == advised


def test_only_the_named_changes_are_allowed(out, data_dir):
    changes = dict(weight_decay=0.5, beta1=0.8)
    with pytest.raises(CheckpointError) as refused:
        go(data_dir, out, allow_change=["weight_decay"], **changes)
    text = str(refused.value)
    assert "beta1: checkpoint has 0.9" in text and "weight_decay: checkpoint" not in text
    go(data_dir, out, allow_change=["weight_decay", "beta1"], **changes)


def test_an_allowed_change_of_a_constant_is_used(tmp_path, data_dir):
    """The constants of the checkpoint's parameter groups would replace those of the keys."""
    how = dict(optimizer="muon", adam_eps=1e-6, muon_momentum=0.8)
    go(data_dir, tmp_path, **how, max_iters=2)
    config = configure(data_dir, tmp_path, **how | dict(adam_eps=1e-7, muon_momentum=0.9),
                       allow_change=["adam_eps", "muon_momentum"])
    with opened(config) as run:
        for group in run.optimizer.param_groups:
            assert (group["eps"], group["momentum"]) == (1e-7, 0.9)


def other_value(key, now):
    """Some other valid value of a configuration key."""
    meta, kind = FIELDS[key].metadata, str(FIELDS[key].type)
    if "choices" in meta:
        return next(c for c in meta["choices"] if c != now)
    if "bool" in kind:
        return not now
    for value in (0.25, 0.5, 1, 2, 3, 4, 24, 32, 64, "{wte: 0.5}", "text"):
        try:
            parsed = parse_value(FIELDS[key], value if isinstance(value, str) else str(value))
        except (ValueError, ConfigError):
            continue
        if parsed != now:
            return parsed


NOT_FREE = [n for n, f in FIELDS.items()
            if not (f.metadata.get("free") or f.metadata.get("start"))]


# Another model needs a file of that name: see test_own_system.py. An encoder is no GPT.
@pytest.mark.matrix(51)
@pytest.mark.parametrize("key", [k for k in NOT_FREE if k not in ("model", "causal")])
def test_a_changed_key_is_refused_unless_allowed(out, data_dir, key):
    """each configuration key that changes what is computed, changed on resume -> refused with old
    and new value, nothing on disk changed"""
    old = getattr(configure(data_dir, out), key)
    new = dict(vocab_size=300, min_lr=1e-4, n_embd=32, head_dim=4, layer_types="f").get(key)
    new = new or other_value(key, old)
    config = configure(data_dir, out, **{key: new})
    before = (out / "ckpt.pt").read_bytes()
    with pytest.raises(CheckpointError) as caught:
        train(config)
    stood = re.escape(repr(old)) if old is not None else r"\S+"  # None is told as what it means
    assert re.search(rf"  - {key}: checkpoint has {stood}, now {re.escape(repr(new))}",
                     str(caught.value))
    assert (out / "ckpt.pt").read_bytes() == before


@pytest.mark.matrix(51)
def test_a_data_folder_that_moved_is_no_other_data(out, data_dir, tmp_path, stopped_run):
    """another data folder, by a relative path, with the same data -> goes on, the end is exact"""
    shutil.copytree(data_dir, tmp_path / "copy")
    go(os.path.relpath(tmp_path / "copy"), out)
    assert_same(stopped_run / "whole", out)


@pytest.mark.matrix(51)
def test_another_split_of_the_global_batch_is_the_same_run(out, data_dir):
    """batch_size halved and accumulation doubled: the same global batch -> goes on"""
    go(data_dir, out, batch_size=1, gradient_accumulation_steps=4)


@pytest.mark.matrix(52)
@pytest.mark.parametrize("change", ["appended", "one token changed"])
def test_changed_data_are_refused(out, data_dir, tmp_path, change):
    """the token file grown, or one token of it changed -> refused by its fingerprint"""
    shutil.copytree(data_dir, tmp_path / "data")
    save = load_checkpoint(out / "ckpt.pt")
    save["config"]["data_dir"] = str(tmp_path / "data")
    save_checkpoint(str(out / "ckpt.pt"), save)
    with open(tmp_path / "data" / "train.bin", "r+b") as f:
        f.seek(0, io.SEEK_END if change == "appended" else io.SEEK_SET)
        f.write(b"\x01\x00")
    with pytest.raises(CheckpointError, match="data: checkpoint has"):
        go(tmp_path / "data", out)


def test_without_ckpt_pt_the_newest_of_the_others_is_used(tmp_path, data_dir):
    """Not the best one, which may be much older."""
    go(data_dir, tmp_path, keep_last=9, max_iters=10, eval_interval=5, learning_rate=1.0,
       early_stopping_metric="val_loss", early_stopping_mode="max")
    (tmp_path / "ckpt_best.pt").unlink()
    os.link(tmp_path / "ckpt_0000005.pt", tmp_path / "ckpt_best.pt")
    for name in ("ckpt.pt", "ckpt_prev.pt"):
        (tmp_path / name).unlink()
    state, path, _ = find_newest_checkpoint(str(tmp_path), print)
    assert state["iter_num"] == 10 and path.endswith("ckpt_0000010.pt")
    folder = tmp_path.rename(tmp_path.with_name("a folder"))
    (folder / "ckpt.pt").write_bytes(b"damaged")  # then it is advice, to be pasted into a shell
    with pytest.raises(CheckpointError, match=f"--resume '{folder}/ckpt_0000010.pt' or --resume"):
        find_newest_checkpoint(str(folder), print)


def test_nothing_is_initialised_of_what_is_frozen_now(tmp_path, data_dir, capsys):
    go(data_dir, tmp_path, max_iters=4, eval_interval=2)
    go(data_dir, tmp_path, max_iters=6, eval_interval=2, lr_groups={"wte.*": 0},
       allow_change=["lr_groups", "max_iters", "lr_decay_iters"])
    assert "newly initialised" not in capsys.readouterr().out


@pytest.mark.matrix(113)
def test_a_checkpoint_is_good_though_memory_runs_out_reading_it(out, monkeypatch):
    """memory runs out while the checkpoint is read -> said so; the good file is not taken for a bad
    one and not moved"""
    def fail(*_, **__):
        raise RuntimeError("unable to mmap 123 bytes: Cannot allocate memory (12)")
    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(CheckpointError, match="allocate memory"):
        find_newest_checkpoint(str(out), print)
    assert (out / "ckpt.pt").exists()


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "too many open files"), MemoryError(),
                                   PermissionError(errno.EACCES, "permission denied")])
def test_a_checkpoint_that_cannot_be_read_now_is_not_replaced(tmp_path, data_dir, monkeypatch,
                                                              error):
    go(data_dir, tmp_path, max_iters=4)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("ckpt*")}
    shutil.copy(tmp_path / "ckpt.pt", tmp_path.parent / "copy.pt")

    def fail(path):
        if os.path.samefile(os.path.dirname(path), tmp_path):
            raise error
        return verify(path)
    verify = checkpoint_file.verify_digest
    monkeypatch.setattr(checkpoint_file, "verify_digest", fail)
    for resume in ("auto", str(tmp_path.parent / "copy.pt")):
        with pytest.raises(CheckpointError):
            go(data_dir, tmp_path, max_iters=8, resume=resume,
               allow_change=["max_iters", "lr_decay_iters"])
    assert {path.name: path.read_bytes() for path in tmp_path.glob("ckpt*")} == before
    assert not list(tmp_path.glob("old_*"))


@pytest.mark.parametrize("content", [[1], torch.ones(2), "x"])
def test_a_file_of_torch_save_without_a_dict_is_no_checkpoint(tmp_path, content):
    torch.save(content, tmp_path / "x.pt")
    refused(tmp_path / "x.pt", "not a checkpoint: expected a dict with the key `model`")


@pytest.mark.parametrize("part, content, error", [
    ("plateau", {"waiting": {}}, "KeyError"), ("spikes", ["x"], "ValueError"),
    ("early_stopping", {"best": "x", "bad": 0}, "ValueError"),
    ("progress", {"loss_sum": None}, "TypeError"), ("progress", {"history": 5}, "TypeError"),
    ("progress", {"loss_sum": 10**400}, "OverflowError")])
def test_a_part_of_a_run_that_is_none_is_refused(out, data_dir, part, content, error):
    """The plateau schedule's memory without its scale; numbers that are none."""
    state = load_checkpoint(out / "ckpt.pt")
    save_checkpoint(str(out / "ckpt.pt"), state | {part: content})
    with pytest.raises(CheckpointError, match=f"its {part} has an unknown format: {error}"):
        go(data_dir, out)


class Bigram(torch.nn.Module):
    """A model with a layer that is not used, and a buffer made by `buffer`."""

    def __init__(self, buffer):
        super().__init__()
        self.logits = torch.nn.Embedding(256, 256)
        self.later = torch.nn.Linear(3, 3)
        self.register_buffer("extra", buffer)

    def forward(self, x, y):
        return torch.nn.functional.cross_entropy(self.logits(x).flatten(0, 1), y.flatten()), {}


@pytest.mark.parametrize("buffer", [torch.zeros(4, dtype=torch.int16), torch.ones(1).expand(50)])
def test_unused_layers_and_unusual_buffers_are_resumed(tmp_path, data_dir, buffer):
    for steps in (4, 8):
        model = Bigram(buffer)
        train(configure(data_dir, tmp_path, max_iters=steps), model=model)
    state = load_checkpoint(tmp_path / "ckpt.pt")
    assert state["iter_num"] == 8 and torch.equal(state["model"]["extra"], buffer)
    assert state["optimizer"]["state"]["later.bias"] == {}


def test_a_buffer_that_no_checkpoint_can_have_is_refused_before_the_first_step(tmp_path, data_dir):
    with pytest.raises(SetupError, match="extra is complex64.*persistent=False"):
        train(configure(data_dir, tmp_path), model=Bigram(torch.ones(2, dtype=torch.complex64)))
    with pytest.raises(SetupError, match="extra is not finite.*persistent=False"):
        train(configure(data_dir, tmp_path), model=Bigram(torch.tensor([-torch.inf])))
