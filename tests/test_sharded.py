"""Sharded checkpoints and hybrid sharding: equal runs, injuries, faults, other readers.

`python -m pytest tests/test_sharded.py -m slow -s` are the long campaigns: 10,000 injuries, the
same to PyTorch's own storages, and kill -9 of each rank at each point of a save.
"""

import collections
import contextlib
import errno
import hashlib
import json
import os
import random
import re
import shutil
import types

import numpy as np
import pytest
import torch
from conftest import REPO
from faulty import faults
from processes import python
from runs import assert_same_file, go
from test_distributed import assert_losses_agree, in_ranks, options, train_run, weights_and_logits
from test_soak import Warnings

from train import checkpoint, setup
from train.base import sharded_file
from train.base.errors import CheckpointError, ConfigError, UserError
from train.base.run_folder import RunFolder
from train.base.tensors import named_tensors
from train.checkpoint import load_checkpoint
from train.config import load_config
from train.distributed import Ranks
from train.setup import Progress

# 12 sequences per step on 1 to 4 ranks.
# The usual eps of Adam makes updates of rounding errors where gradients are almost zero.
FEW = dict(max_iters=6, eval_interval=3, ema=0.9, n_layer=1, adam_eps=1e-5)
HSDP = dict(distributed="hsdp", shard_size=2)


# -----------------------------------------------------------------------------
# equal runs

def train_in_float32(options):
    """weights_and_logits, with Muon in float32: in bfloat16, a last digit of a gradient may be a
    third digit of the update."""
    from train import optimizer
    optimizer.working_dtype = lambda device: torch.float32
    return weights_and_logits(options)


@pytest.mark.ci
@pytest.mark.parametrize("more", [{}, dict(optimizer="muon", muon_weight_decay=0.1)])
def test_hybrid_sharding_on_four_ranks_equals_ddp(data_dir, tmp_path, more):
    ddp, hsdp = (in_ranks(4, train_in_float32, options(
        data_dir, tmp_path / name, **FEW | how | more), timeout=200)
        for name, how in (("ddp", {}), ("hsdp", HSDP)))
    assert_losses_agree(tmp_path / "hsdp", tmp_path / "ddp", steps=6, tolerance=1e-6)
    for weights, _, held in hsdp:
        assert held < 0.51 * ddp[0][2]
        for name, weight in weights.items():
            assert (weight == hsdp[0][0][name]).all(), name  # the same bits in each replica
            np.testing.assert_allclose(weight, ddp[0][0][name], rtol=0, atol=1e-6, err_msg=name)
    one, other = (dict(named_tensors(load_checkpoint(tmp_path / name / "ckpt.pt")))
                  for name in ("ddp", "hsdp"))
    assert one.keys() == other.keys() and any(name.endswith(".ema") for name in one)
    for name in one:
        torch.testing.assert_close(other[name], one[name], rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def whole_run(data_dir, tmp_path_factory):
    """A run on one rank, whose checkpoints are files."""
    out = tmp_path_factory.mktemp("whole")
    in_ranks(1, train_run, options(data_dir, out, max_iters=8, eval_interval=4))
    return out


@pytest.mark.parametrize("formats", [
    pytest.param(["auto"] * 4, marks=pytest.mark.slow), ["file", "sharded", "sharded", "file"]])
def test_a_run_goes_on_in_any_way_on_any_number_of_ranks(data_dir, tmp_path, whole_run, formats):
    steps = dict(max_iters=8, eval_interval=4)
    ways = [(4, HSDP), (2, dict(distributed="fsdp")), (4, dict(distributed="ddp")), (1, {})]
    for (n, how), form, stop in zip(ways, formats, (2, 4, 6, None), strict=True):
        in_ranks(n, train_run, options(data_dir, tmp_path, checkpoint_format=form, **steps, **how),
                 stop)
        assert sharded_file.is_sharded(tmp_path / "ckpt.pt") == (
            form == "sharded" or form == "auto" and how.get("distributed", "ddp") != "ddp")
    assert_losses_agree(tmp_path, whole_run, steps=8)
    named = {sharded_file.folder_named_in(path) for path in tmp_path.glob("ckpt*.pt")}
    assert {f"shards/{p.name}" for p in tmp_path.glob("shards/*")} == named - {None}


def test_the_mesh_is_printed_and_a_size_that_does_not_divide_is_refused(data_dir, tmp_path,
                                                                        monkeypatch):
    in_ranks(4, train_run, options(data_dir, tmp_path, max_iters=0, **HSDP),
             env=dict(LOCAL_WORLD_SIZE=2))
    assert "Mesh: 2 nodes x 2 processes: replicate 2 x shard 2\n" in (
        tmp_path / "train.log").read_text()
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"\(3\) does not divide 4 ranks; valid: 1, 2, 4"):
        load_config(None, dict(distributed="hsdp", shard_size=3))
    both = dict(distributed_strategy="fsdp", fsdp_sharding_strategy="HYBRID_SHARD")
    assert load_config(None, both).distributed == "hsdp"
    with pytest.raises(ConfigError, match="save_precision needs whole weights"):
        load_config(None, dict(checkpoint_format="sharded", save_precision="bfloat16"))


def rows(options):
    """(first row, rows) of each shard on this rank, and what torch's function says."""
    from test_distributed import with_run
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    from train.distributed import local, locate_shard

    def compute(run):
        mine, wanted = [], []
        for p in run.raw_model.parameters():
            mine.append((locate_shard(p, run.ranks)[0], tuple(local(p).shape)))
            shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh,
                                                                  p.placements)
            wanted.append((offset[0], tuple(shape)))
        return mine, wanted
    return with_run(options, compute)


def test_first_rows_are_those_of_torch(data_dir, tmp_path):
    for n, how in ((3, dict(distributed="fsdp")), (4, HSDP)):
        for mine, wanted in in_ranks(n, rows, options(data_dir, tmp_path / f"{n}", vocab_size=250,
                                                      n_layer=1, **how)):
            assert mine == wanted


# -----------------------------------------------------------------------------
# the format

PLAIN = {"a": (1, (2.5, None)), "b": float("inf"), 3: {"$x": b"\x00\xff"}, "n": [{(1, 2): "é"}],
         "c": -float("inf"), "d": True, "e": {}, "f": [], "g": 10**30, "h": "\ud800"}


def test_plain_state_survives_json():
    text = json.dumps(sharded_file.encode(PLAIN), allow_nan=False)
    assert sharded_file.decode(json.loads(text), None) == PLAIN
    nan = sharded_file.decode(json.loads(json.dumps(sharded_file.encode([float("nan")]))), None)
    assert nan[0] != nan[0]


def make_state(step, seed):
    """A checkpoint of 5 tensors, with as few as 1 row, and of a 0-dim one."""
    torch.manual_seed(seed)
    model = {"wte.weight": torch.randn(13, 4), "h.0.w": torch.randn(8, 8).bfloat16(),
             "ln.weight": torch.randn(3), "mask": torch.tensor([[True, False]])}
    return {"model": model, "optimizer": {"state": {"h.0.w": dict(
        exp_avg=torch.randn(8, 8), step=torch.tensor(float(step)))}, "param_groups": []},
        "iter_num": step, "format_version": 1, "config": {}, "model_args": {}, "plain": PLAIN}


def save(out, world_size, state, folder=None):
    """Save a checkpoint as so many ranks do, in `folder`, a RunFolder (default: a new one)."""
    folder, log = folder or RunFolder(str(out)), Warnings()
    name = sharded_file.new_folder(state["iter_num"])
    written = []
    for rank in range(world_size):
        parts = {}
        for key, t in named_tensors(state):
            size = -(-t.size(0) // world_size) if t.dim() else 1
            if t.dim() and rank * size < t.size(0):
                parts[key] = [[rank * size] + [0] * (t.dim() - 1), t[rank * size:][:size]]
            elif not t.dim() and not rank:
                parts[key] = [[], t]
        written.append(folder.write_shards(name, rank, parts))
    links = folder.prepare(state["iter_num"], False, False, log)
    folder.write(lambda path: folder.save_manifest(
        path, name, checkpoint.without_values(state), written, links), log)
    assert not log
    return out / name


def assert_equal(state, wanted):
    found, wanted_tensors = dict(named_tensors(state)), dict(named_tensors(wanted))
    assert found.keys() == wanted_tensors.keys()
    assert all(torch.equal(t, found[n]) for n, t in wanted_tensors.items())
    assert state["plain"] == wanted["plain"] and state["iter_num"] == wanted["iter_num"]


@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_what_is_saved_is_read_whole_and_in_rows(tmp_path, world_size):
    state = make_state(7, 1)
    folder = save(tmp_path, world_size, state)
    for path in (tmp_path / "ckpt.pt", folder, folder / "manifest.json"):
        assert_equal(load_checkpoint(path), state)
    shards = sharded_file.open_shards(tmp_path / "ckpt.pt")
    for name, t in named_tensors(state):
        for first in range(t.size(0) if t.dim() else 0):
            for n in range(t.size(0) - first + 1):
                part = shards.read(name, first, (n, *t.shape[1:]))
                assert torch.equal(part, t[first:first + n])
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    assert_equal(load_checkpoint(moved), state)
    shutil.copy(tmp_path / "ckpt.pt", moved / "alone.pt")
    with pytest.raises(CheckpointError, match="the files are not in .*; copy this folder too"):
        load_checkpoint(moved / "alone.pt")


def test_a_manifest_cannot_claim_more_than_its_files_have(tmp_path):
    save(tmp_path, 2, make_state(1, 1))
    shards = sharded_file.open_shards(tmp_path / "ckpt.pt")
    for change in (dict(shape=[10**9, 4]), dict(shape=[6, 5]), dict(offsets=[1, 0]),
                   dict(start=10**6), dict(offsets=[7, 0]), dict(start=-4)):
        chunk = shards.tensors["model.wte.weight"]["chunks"][0]
        before = dict(chunk)
        chunk.update(change)
        with pytest.raises(ValueError, match="model.wte.weight: .* row"):
            shards.check()
        chunk.update(before)
    shards.tensors["model.wte.weight"]["chunks"].pop()
    with pytest.raises(ValueError, match="model.wte.weight: no file has row 7"):
        shards.check()


def rewrite(manifest, old, new):
    """Replace what is `old`, a pattern, with a correct digest."""
    data = manifest.read_bytes()[:-len(sharded_file.TAIL % bytes(64))]
    text, number = re.subn(old, new, data)
    manifest.write_bytes(text + sharded_file.TAIL % hashlib.sha256(text).hexdigest().encode())
    assert number == 1


@pytest.mark.parametrize("old, new, words", [
    (rb'("version": )\d+', rb"\g<1>99", "manifest 99 is newer than this program's"),
    (rb'("files": {)', rb'\1"/etc/passwd": {"size": 5}, ', "/etc/passwd is .* not a shard")])
def test_a_manifest_that_this_program_did_not_write_is_refused(tmp_path, old, new, words):
    save(tmp_path, 2, make_state(1, 1))
    rewrite(tmp_path / "ckpt.pt", old, new)
    with pytest.raises(ValueError, match=words):
        sharded_file.open_shards(tmp_path / "ckpt.pt")


def test_a_manifest_cannot_lead_out_of_its_run(tmp_path):
    for name in ("a", "b"):
        folder = save(tmp_path / name, 2, make_state(1, 1))
    rewrite(tmp_path / "a/ckpt.pt", b'(, "version")', b', "folder": "%s"\\1' % str(folder).encode())
    shards = sharded_file.open_shards(tmp_path / "a/ckpt.pt")
    assert shards.folder.startswith(str(tmp_path / "a"))


def test_a_folder_with_a_name_that_is_not_utf8_is_kept(tmp_path):
    path = os.fsencode(tmp_path) + b"/shards/a_\xff"
    os.makedirs(path)
    RunFolder(str(tmp_path)).open()
    assert os.path.isdir(path)


def test_moved_checkpoints_take_their_shards_along(tmp_path):
    states = [make_state(step, step) for step in (1, 2)]
    for state in states:
        save(tmp_path, 2, state)
    folder = RunFolder(str(tmp_path))
    folder.archive_later_checkpoints(tmp_path / "ckpt_prev.pt", vars(Progress(iter_num=1)),
                                     lambda text: None)
    assert not (tmp_path / "ckpt.pt").exists()
    folder.open()  # removes what no checkpoint in the folder names
    assert len(list(tmp_path.glob("shards/*"))) == 1
    assert_equal(load_checkpoint(tmp_path / "old_1/ckpt.pt"), states[1])
    assert_equal(load_checkpoint(tmp_path / "ckpt_prev.pt"), states[0])
    (tmp_path / "shards/notes_of_mine").mkdir()
    shutil.copytree(tmp_path / "old_1/shards", tmp_path / "copied/shards")
    (tmp_path / "copied/shards/0000002_abcdef").mkdir()  # of a save that did not end: removed
    run = RunFolder(str(tmp_path / "copied"))
    run.open()
    copied, = tmp_path.glob("copied/shards/*")
    save(tmp_path / "copied", 2, make_state(3, 3), run)
    # A checkpoint without its ckpt.pt is one, too.
    assert_equal(load_checkpoint(copied), states[1])
    shutil.rmtree(copied.parent)
    save(tmp_path, 3, make_state(3, 3))
    save(tmp_path, 3, make_state(4, 4))
    names = sorted(p.name[:7] for p in tmp_path.glob("shards/*"))
    assert names == ["0000003", "0000004", "notes_o"]


def test_never_resumed_a_checkpoint_may_lack_its_shards(tmp_path, data_dir):
    changes = dict(checkpoint_format="sharded", max_iters=5)
    go(data_dir, tmp_path, **changes)
    shutil.rmtree(tmp_path / "shards")
    assert go(data_dir, tmp_path, resume="never", **changes)["iter_num"] == 5
    assert sharded_file.is_sharded(tmp_path / "old_1/ckpt.pt")
    assert load_checkpoint(tmp_path / "ckpt.pt")["iter_num"] == 5


# -----------------------------------------------------------------------------
# injuries

def injure(random, folder, others, ending="safetensors"):
    """Do a random injury to a checkpoint's files; (its kind, names one of which a message must
    have). others: folders of other steps and other numbers of ranks. Files are replaced, not
    changed: they are hard links."""
    files = sorted(folder.rglob(f"*.{ending}"))
    file = random.choice(files)
    kind = random.choice(["missing", "of another step", "of other ranks", "swapped", "flipped bit",
                          "cut short", "renamed", "manifest"])
    data = file.read_bytes()

    def replace(path, content):
        path.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    if kind == "missing":
        file.unlink()
    elif kind in ("of another step", "of other ranks"):
        ours = len({f.name for f in files})
        other = random.choice([o for o in others if (len({f.name for f in o.rglob(f"*.{ending}")})
                                                     == ours) == (kind == "of another step")])
        source = random.choice(sorted(other.rglob(f"*.{ending}")))
        file = folder / source.relative_to(other)  # instead of ours, or one more
        replace(file, source.read_bytes())
    elif kind == "swapped":
        other = random.choice([f for f in files if f != file])
        theirs = other.read_bytes()
        replace(other, data)
        replace(file, theirs)
        return kind, [file, other]
    elif kind == "flipped bit":
        position = random.randrange(len(data))
        flipped = bytearray(data)
        flipped[position] ^= 1 << random.randrange(8)
        replace(file, bytes(flipped))
    elif kind == "cut short":
        replace(file, data[:random.randrange(len(data))])
    elif kind == "renamed":
        target = file.with_name(re.sub("-0|__", "-1", file.name, count=1))
        file.rename(target)
        return kind, [file, target]
    elif ending != "safetensors" or not (others[0] / "manifest.json").exists():  # torch's, if any
        manifest = folder / ".metadata"
        if manifest.exists():
            replace(manifest, (random.choice(others) / ".metadata").read_bytes())
        return kind, [manifest]
    else:  # of another step, with this one's files
        manifest = random.choice(others) / "manifest.json"
        theirs = manifest.read_bytes()
        replace(folder.parent.parent / "ckpt.pt", theirs.replace(
            re.search(rb"shards/\w+", theirs)[0], f"shards/{folder.name}".encode()))
        return kind, ["ckpt.pt"]
    return kind, [file]


def saved_runs(root, save_run):
    """{world size: folder of a run with checkpoints of steps 1 and 2} by save_run(out, W)."""
    for n in range(1, 9):
        save_run(root / f"{n}", n)
    return {n: root / f"{n}" for n in range(1, 9)}


def campaign(root, runs, seed, count):
    """Injure `count` checkpoints; a counter of the kinds. Every one must be named, and the previous
    checkpoint taken, read by 1 to 8 ranks."""
    chance, kinds = random.Random(seed), collections.Counter()
    before = {n: load_checkpoint(run / "ckpt_prev.pt") for n, run in runs.items()}
    for number in range(count):
        n = chance.randint(1, 8)
        out = root / f"injured_{number}"
        shutil.copytree(runs[n], out, copy_function=os.link)
        folder = out / sharded_file.folder_named_in(out / "ckpt.pt")
        others = [run / sharded_file.folder_named_in(run / name) for other, run in runs.items()
                  for name in ("ckpt.pt", "ckpt_prev.pt")[other == n:]]
        kind, names = injure(chance, folder, others)
        config = load_config(None, dict(out_dir=str(out), device="cpu"))
        log = []
        with contextlib.closing(RunFolder(str(out))) as run:
            start = checkpoint.find_start(run, config, Ranks(), log.append)
        text = "\n".join(log)
        case = f"injury {number} of seed {seed}: {kind}, {n} ranks: {names}\n{text}"
        assert start.path == str(out / "ckpt_prev.pt"), case
        assert any(str(name) in text for name in names), case
        ranks = chance.randint(1, 8)
        for name, t in named_tensors(before[n]):
            size = -(-t.size(0) // ranks) if t.dim() else 0
            parts = [start.shards.read(name, i, (min(size, t.size(0) - i), *t.shape[1:]))
                     for i in range(0, t.size(0), size)] if size else [start.shards.read(name)]
            assert torch.equal(torch.cat(parts) if size else parts[0], t), case
        if count > 1000:  # slow on some file systems
            shutil.rmtree(out)
        kinds[kind] += 1
    return kinds


@pytest.mark.matrix(127)
def test_every_injury_is_named_and_the_previous_checkpoint_is_taken(tmp_path):
    """a shard missing, of another step or of other ranks, two swapped, a flipped bit, cut short,
    renamed, a manifest of another step -> named by file, the previous checkpoint is taken"""
    def save_run(out, n):
        for step in (1, 2):
            save(out, n, make_state(step, 10 * n + step))
    campaign(tmp_path, saved_runs(tmp_path / "runs", save_run), seed=1, count=300)


# -----------------------------------------------------------------------------
# faults during a save

def assert_goes_on(data_dir, out, whole_run):
    """The newest complete checkpoint is readable, and the run goes on to the same end."""
    start = load_checkpoint(out / "ckpt.pt")["iter_num"]
    in_ranks(2, train_run, options(data_dir, out, distributed="fsdp", max_iters=8, eval_interval=4))
    assert_losses_agree(out, whole_run, steps=8)
    assert load_checkpoint(out / "ckpt.pt")["iter_num"] == 8
    return start


def killed_at(data_dir, out, whole_run, n, fault, **how):
    """A run on n ranks is killed during its second save, of step 4 or 6, and goes on."""
    settings = options(data_dir, out, max_iters=8, eval_interval=4, save_interval=2, **how)
    codes = in_ranks(n, train_with_faults, settings, env=dict(FAULT=fault), exits=True)
    assert -9 in codes, codes
    assert assert_goes_on(data_dir, out, whole_run) in (2, 4)


def train_with_faults(options):
    """Train, with the faults of FAULT; exit code 1 after an error, 2 if it is one for the user."""
    with faults():
        try:
            train_run(options)
        except Exception as error:
            print(error, flush=True)
            os._exit(2 if isinstance(error, UserError) else 1)


@pytest.mark.matrix(128)
@pytest.mark.parametrize("fault", ["save_mid@4:1=kill9", pytest.param(
    "manifest@4:0=kill9", marks=pytest.mark.slow)])
def test_a_kill_of_a_rank_during_a_save_loses_nothing(data_dir, tmp_path, whole_run, fault):
    """kill -9 of a rank during a sharded save -> the last complete checkpoint is used"""
    killed_at(data_dir, tmp_path, whole_run, 2, fault, distributed="fsdp")


def test_a_rank_that_does_not_reach_the_others_raises_at_the_next_save(monkeypatch):
    """before a collective of the training thread; and all ranks of the machine share the pauses"""
    def fail(*args):
        raise RuntimeError("Connection closed by peer")
    started = []
    folder = types.SimpleNamespace(
        lost=[], prepare=lambda *args: [], write_shards=lambda *args: ({}, {}),
        wait=lambda: None, write=lambda *args: None,
        start=lambda write, *args, n_writers: started.append((write, n_writers)))
    config = types.SimpleNamespace(saves_shards=lambda world_size: True)
    state = dict(iter_num=1, model={"w": torch.ones(3)})
    checkpoint.save(folder, state, config, Ranks(ranks_per_node=3), False, False, None)
    (write, n_writers), = started
    monkeypatch.setattr(checkpoint, "gather_objects", fail)
    write({})
    assert n_writers == 3
    monkeypatch.setattr(setup.distributed, "max_over_ranks", lambda *args: pytest.fail("waits"))
    with pytest.raises(RuntimeError, match="rank 0 does not reach the others: Connection closed"):
        setup.Run.forget_unsaved_best(types.SimpleNamespace(folder=folder, ranks=None))


@pytest.mark.slow
@pytest.mark.matrix(128)
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("where", ["save_mid", "save_before_fsync", "save_before_replace",
                                   "save_after_replace"])
@pytest.mark.parametrize("step", [4, 6])
def test_a_kill_of_any_rank_at_any_moment_loses_nothing(data_dir, tmp_path, whole_run, where, rank,
                                                        step):
    """kill -9 of each of 4 ranks at each point of a sharded save (with hybrid sharding only the
    first replica writes) -> the last complete checkpoint is used"""
    how = HSDP if rank < 2 and step == 6 else dict(distributed="fsdp")
    settings = options(data_dir, tmp_path, max_iters=8, eval_interval=4, save_interval=2, **how)
    codes = in_ranks(4, train_with_faults, settings, exits=True,
                     env=dict(FAULT=f"{where}@{step}:{rank}=kill9"))
    assert -9 in codes, codes
    assert assert_goes_on(data_dir, tmp_path, whole_run) in (step - 2, step)


@pytest.mark.ci
@pytest.mark.matrix(129)
@pytest.mark.parametrize("error, words", [("enospc", "No space left"), pytest.param(
    "eacces", "denied", marks=pytest.mark.slow)])
@pytest.mark.parametrize("last", [False, True])
def test_a_rank_that_cannot_write_is_named_and_nothing_is_lost(data_dir, tmp_path, whole_run, error,
                                                               words, last):
    """a full disk or an unwritable folder on one rank -> a warning with the rank, the previous
    checkpoint is kept; at the last save an error on all ranks"""
    settings = options(data_dir, tmp_path, max_iters=8, eval_interval=4, distributed="fsdp")
    codes = in_ranks(2, train_with_faults, settings, exits=True, output=str(tmp_path / "output"),
                     env=dict(FAULT=f"save_mid@{8 if last else 4}:1={error}"))
    assert codes == [2, 2] if last else [0, 0]
    text = (tmp_path / "train.log").read_text()
    if last:
        output = (tmp_path / "output").read_text()
        assert output.count("the last checkpoint could not be saved: ") == 2 and words in output
        assert load_checkpoint(tmp_path / "ckpt.pt")["iter_num"] == 4
        assert_goes_on(data_dir, tmp_path, whole_run)
    else:
        assert re.search(f"0000004_.* could not be written by rank 1: .*{words}.*; "
                         "training continues", text)
        assert "previous checkpoint" not in text  # it was the first
        assert load_checkpoint(tmp_path / "ckpt.pt")["iter_num"] == 8
    assert len(list(tmp_path.glob("shards/*"))) == len(list(tmp_path.glob("ckpt*.pt"))) - (
        tmp_path.joinpath("ckpt_best.pt").exists())


# -----------------------------------------------------------------------------
# other readers

@pytest.fixture(scope="module")
def on_four_ranks(data_dir, tmp_path_factory):
    """The folder of a checkpoint that four ranks saved."""
    out = tmp_path_factory.mktemp("four")
    in_ranks(4, train_run, options(data_dir, out, max_iters=2, eval_interval=2,
                                   distributed="fsdp"))
    return out


def test_torch_reads_and_consolidates_the_weights(on_four_ranks, tmp_path):
    pytest.importorskip("safetensors")
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file
    from torch.distributed.checkpoint._consolidate_hf_safetensors import (
        consolidate_safetensors_files,
    )
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    folder = str(on_four_ranks / sharded_file.folder_named_in(on_four_ranks / "ckpt.pt"))
    wanted = load_checkpoint(on_four_ranks / "ckpt.pt")["model"]
    found = {name: torch.empty_like(t) for name, t in wanted.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(folder), no_dist=True)
    consolidate_safetensors_files(folder, str(tmp_path), dict.fromkeys(wanted, 1))
    whole = load_file(tmp_path / "model-00001-of-00001.safetensors")
    assert whole.keys() == wanted.keys()
    for name, t in wanted.items():
        assert torch.equal(found[name], t) and torch.equal(whole[name], t), name


def test_the_lines_of_the_readme_open_a_shard(on_four_ranks, capsys):
    page = (REPO / "train/README.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
                if "struct" in block)
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 12 and set(re.findall(r"^import (.*)$", code, re.M)) <= {
        "array", "glob", "json", "struct"}
    folder = str(on_four_ranks / sharded_file.folder_named_in(on_four_ranks / "ckpt.pt"))
    exec(code.replace("out/shards/0001000_ab12cd", folder), {})
    name, mean = capsys.readouterr().out.split()
    whole = load_checkpoint(on_four_ranks / "ckpt.pt")["model"][name]
    assert float(mean) == pytest.approx(float(whole[:whole.size(0) // 4].double().mean()), rel=1e-6)


def test_convert_makes_one_file_of_shards(on_four_ranks, tmp_path):
    for ckpt in (on_four_ranks / "ckpt.pt",
                 on_four_ranks / sharded_file.folder_named_in(on_four_ranks / "ckpt.pt")):
        to = tmp_path / f"{ckpt.stem}_whole.pt"
        done = python("-m", "model.convert", "--ckpt", ckpt, "--to", to)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"Wrote {to}: the same checkpoint in one file\n"
        assert not sharded_file.is_sharded(to)
        assert_same_file(to, on_four_ranks / "ckpt.pt")
    from model.convert import convert
    from model.sample import load_model
    load_model(ckpt)
    with pytest.raises(CheckpointError, match="FILE.safetensors"):  # not ignored
        convert(str(ckpt), str(tmp_path / "b.pt"), save_precision="bfloat16")


# -----------------------------------------------------------------------------
# long campaigns

@pytest.mark.slow
@pytest.mark.matrix(127)
def test_ten_thousand_injuries(tmp_path, data_dir):
    """the same, 10,000 times, on checkpoints that 1 to 8 gloo ranks saved -> none is silent"""
    def save_run(out, n):
        how = dict(distributed="hsdp", shard_size=n // 2) if n in (4, 8) else dict(
            distributed="fsdp", checkpoint_format="sharded")
        in_ranks(n, train_run, options(
            data_dir, out, batch_size=n, gradient_accumulation_steps=1, n_layer=1, n_embd=16,
            n_hidden=32, block_size=8, max_iters=2, save_interval=1, eval_interval=0, **how))
        for path in (*out.glob("*.yaml"), *out.glob("*.json*"), out / "train.log", out / ".lock"):
            path.unlink(missing_ok=True)
    count = int(os.environ.get("INJURIES", 10_000))
    runs = saved_runs(tmp_path / "runs", save_run)
    print("\n", campaign(tmp_path, runs, seed=2, count=count), "no injury was silent")
    for n in range(1, 9):  # read by real ranks, the injured file by one that is not rank 0
        out = tmp_path / f"read_{n}"
        shutil.copytree(runs[5], out)
        folder = out / sharded_file.folder_named_in(out / "ckpt.pt")
        file = sorted(folder.rglob("*.safetensors"))[n]
        file.write_bytes(bytes(1) + file.read_bytes()[1:])
        how = (dict(distributed="ddp"), dict(distributed="fsdp"),
               dict(distributed="hsdp", shard_size=max(1, n // 2)))[n % 3 if n % 2 == 0 else n % 2]
        in_ranks(n, train_run, options(
            data_dir, out, batch_size=840, gradient_accumulation_steps=1, n_layer=1, n_embd=16,
            n_hidden=32, block_size=8, max_iters=1, eval_interval=0,
            allow_change="batch_size,gradient_accumulation_steps", **how))
        assert f"{file} is damaged" in (out / "train.log").read_text()
        assert "falling back to" in (out / "train.log").read_text()


def save_by_torch(options, folders, storage):
    """Save weights by one of torch's storages after steps 1 and 2, into `folders`."""
    import torch.distributed.checkpoint as dcp
    from test_distributed import with_run

    from train.train import train_step

    def compute(run):
        for folder in folders:
            train_step(run)
            writer = (dcp.HuggingFaceStorageWriter(folder, save_distributed=True) if storage == "hf"
                      else dcp.FileSystemWriter(folder))
            dcp.save(dict(run.raw_model.state_dict()), storage_writer=writer)
    with_run(options, compute)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("storage", ["hf", "files"])
def test_the_same_injuries_to_the_storages_of_torch(tmp_path, data_dir, storage):
    """How many injuries torch's two storages name, refuse without a name, or read in silence."""
    pytest.importorskip("safetensors")
    import torch.distributed.checkpoint as dcp
    ending = "safetensors" if storage == "hf" else "distcp"
    runs = {}
    for n in range(1, 9):
        runs[n] = [tmp_path / f"{n}/{step}" for step in (1, 2)]
        in_ranks(n, save_by_torch, options(
            data_dir, tmp_path / f"run{n}", batch_size=n, gradient_accumulation_steps=1, n_layer=1,
            n_embd=16, n_hidden=32, block_size=8, max_iters=2, eval_interval=0,
            distributed="fsdp"), [str(f) for f in runs[n]], storage)

    def load(folder, like):
        found = {name: torch.full_like(t, 7) for name, t in like.items()}
        reader = (dcp.HuggingFaceStorageReader(folder) if storage == "hf"
                  else dcp.FileSystemReader(folder))
        dcp.load(found, storage_reader=reader, no_dist=True)
        return found
    with torch.device("meta"):
        from model.gpt import GPT, GPTConfig
        like = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, n_hidden=32, block_size=8,
                             vocab_size=256)).state_dict()
    like = {name: torch.empty_like(t, device="cpu") for name, t in like.items()}
    wanted = {n: load(str(runs[n][1]), like) for n in runs}
    chance, table = random.Random(3), collections.defaultdict(collections.Counter)
    for number in range(int(os.environ.get("INJURIES", 10_000)) // 10):
        n = chance.randint(2, 8)
        folder = tmp_path / f"torch_{number}/shards/x"
        shutil.copytree(runs[n][1], folder, copy_function=os.link)
        others = [runs[m][step] for m in runs for step in (0, 1) if m != n or step == 0]
        kind, names = injure(chance, folder, others, ending)
        try:
            found = load(str(folder), like)
            right = all(torch.equal(t, found[name]) for name, t in wanted[n].items())
            outcome = "silent, right values" if right else "silent, WRONG VALUES"
        except BaseException as error:
            named = any(getattr(name, "name", name) in str(error) for name in names)
            outcome = "named" if named else "an error without the file"
        table[kind][outcome] += 1
    print(f"\n{storage}")
    for kind, outcomes in sorted(table.items()):
        print(f"  {kind}: {dict(outcomes)}")


def measure_saves(options, n_saves):
    """(peak memory of this rank in a save, in MiB; seconds of each step; seconds of each save(),
    until all ranks have a snapshot). A save is before each step 4, 8, ..."""
    import pathlib
    import time

    from test_distributed import with_run

    from train.train import save, train_step

    def compute(run):
        steps, stalls = [], []
        for i in range(4 * n_saves + 2):
            if i and i % 4 == 0:
                pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
                start = time.perf_counter()
                save(run)
                torch.distributed.barrier()
                stalls.append(time.perf_counter() - start)
            start = time.perf_counter()
            train_step(run)
            steps.append(time.perf_counter() - start)
        run.folder.wait()
        peak = re.search(r"VmHWM:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())
        return int(peak[1]) / 1024, steps, stalls
    return with_run(options, compute)


@pytest.mark.slow
def test_memory_and_steps_during_a_save(tmp_path, data_dir):
    """MODEL_MB: size of the weights, of 4 ranks together."""
    width = 64 * round((int(os.environ.get("MODEL_MB", 100)) * 1e6 / 4 / 12 / 8) ** 0.5 / 64)
    ranks = in_ranks(4, measure_saves, options(
        data_dir, tmp_path, n_layer=8, n_embd=width, n_hidden=4 * width, n_head=8, mlp="gelu",
        block_size=64, max_iters=100, eval_interval=0, save_interval=0, distributed="fsdp"),
        8, timeout=540)
    peaks = [rank[0] for rank in ranks]
    _, steps, stalls = ranks[0]
    ratios = [2 * steps[i] / (steps[i - 1] + steps[i + 1]) for i in range(4, len(steps) - 1, 4)]
    print(f"\n{[round(peak) for peak in peaks]} MiB; save() took {[round(s, 2) for s in stalls]} s"
          f"; steps beside a save to their neighbours: {[round(r, 2) for r in ratios]}")
    assert peaks[0] < 1.2 * max(peaks[1:])
    assert sorted(ratios)[len(ratios) // 2] < 1.1


def test_shards_that_cannot_be_read_now_are_not_replaced(tmp_path, data_dir, monkeypatch):
    """too many open files while digests are verified -> refused, and the checkpoint stays"""
    keys = dict(checkpoint_format="sharded", save_interval=2)
    go(data_dir, tmp_path, max_iters=4, **keys)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("ckpt*")}

    def fail(shards, names):  # once
        monkeypatch.undo()
        raise OSError(errno.EMFILE, "Too many open files")
    monkeypatch.setattr(sharded_file.Shards, "verify", fail)
    with pytest.raises(CheckpointError, match="Too many open files"):
        go(data_dir, tmp_path, max_iters=8, **keys)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("ckpt*")} == before
