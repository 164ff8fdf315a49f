"""Several ranks are the same run: batches, losses, gradients, checkpoints; DDP and FSDP2 (gloo).

Ranks are forked from a process that has imported torch already, so a run costs about a second.
Matrix cases 53-55, 69, 70, 109 and 112; what needs torchrun itself is in test_multinode.py.
"""

import contextlib
import functools
import json
import os
import signal
import sys
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import REPO, TINY
from faulty import faults
from processes import FORKER, Fork, rank_environments
from runs import slow

from train.base.errors import ConfigError, SetupError
from train.config import load_config
from train.dataloader import DataLoader

# 12 sequences a step, which 1, 2, 3 and 4 ranks share equally; 16 steps.
STEPS, SEQUENCES = 16, 12
RUN = TINY | dict(batch_size=4, gradient_accumulation_steps=3, max_iters=STEPS, eval_interval=STEPS,
                  learning_rate=3e-3, min_lr=3e-4, vocab_size=256)


# -----------------------------------------------------------------------------
# ranks without torchrun

def in_ranks(world_size, function, *args, env=None, output=os.devnull, timeout=90, exits=False):
    """[function(*args) of each rank], or AssertionError with what a rank raised; with `exits` the
    exit code of a rank that ended without a result."""
    ranks = []
    for its in rank_environments(world_size):
        here, there = FORKER.Pipe(duplex=False)
        fork = Fork(one_rank, (there, function, args), env=its | (env or {}), stdout=output)
        there.close()
        ranks.append((fork.process, here))
    try:
        results = [result_of(*rank, timeout) for rank in ranks]
    finally:
        for process, _ in ranks:
            process.join(5)
            process.kill()
    bad = [f"rank {rank} of {world_size}, exit code {code}: {error}"
           for rank, (_, code, error) in enumerate(results) if error or code and not exits]
    assert not bad, "\n".join(bad)
    return [code if exits else result for result, code, _ in results]


def one_rank(pipe, function, args):
    try:
        pipe.send((function(*args), None))
    except BaseException as error:
        pipe.send((None, "".join(traceback.format_exception(error))))
    pipe.close()


def result_of(process, pipe, timeout):
    """(result, exit code, error) of a rank."""
    result, error = None, f"nothing for {timeout} s"
    try:
        if pipe.poll(timeout):
            result, error = pipe.recv()
    except EOFError:
        error = None
    process.join(5)
    return result, process.exitcode, error


# What ranks do. Their arguments and results are plain values and arrays.

def train_run(options, stop_at=None):
    """Train; {index: rows} of the micro-batches this rank had, None as the last item if stopped.
    The last rank sends itself SIGTERM at step `stop_at`."""
    from train.base.errors import Stopped
    from train.train import train
    batches, get_batch, sent = {}, DataLoader.get_batch, []
    world_size, last = int(os.environ["WORLD_SIZE"]), int(os.environ["WORLD_SIZE"]) - 1

    def recorded(self, device="cpu", step=None):
        x, y = get_batch(self, device, step)
        batches[step] = np.concatenate([x.numpy(), y.numpy()], axis=1)
        done = step * len(x) * world_size // SEQUENCES  # steps
        if stop_at is not None and done >= stop_at and int(os.environ["RANK"]) == last and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGTERM))  # a second one would end it at once
        return x, y
    DataLoader.get_batch = recorded
    try:
        train(load_config(None, options))
    except Stopped:
        batches[-1] = None
    return batches


def with_run(options, function):
    """function(run) of a run that is ready for its first step."""
    from runs import opened
    with opened(load_config(None, options)) as run:
        return function(run)


def arrays(named):
    return {name: np.array(t.detach()) for name, t in named if t is not None}


def gradients(options):
    """{name: gradient} after the micro-batches of step 0, its norm, {name: clipped gradient}."""
    def compute(run):
        from train.distributed import full
        from train.train import train_step
        seen = []

        def note(optimizer):
            seen.append(arrays((n, full(p.grad)) for n, p in run.raw_model.named_parameters()))
        run.scaler.unscale_ = run.scaler.step = note
        numbers = judged()
        train_step(run)
        return seen[0], numbers[0][1], seen[1]
    return with_run(options, compute)


def judged():
    """A list that gets (loss, gradient norm) of each step of this process."""
    from train import train
    numbers, log_step = [], train.log_step

    def noted(run, lr, loss, norm, sums):
        numbers.append((loss, norm))
        return log_step(run, lr, loss, norm, sums)
    train.log_step = noted
    return numbers


def weights_and_logits(options):
    """Train to the end; {name: whole weight}, logits of a fixed batch, bytes of weights held."""
    def compute(run):
        import torch

        from train.distributed import full
        from train.train import training_loop
        held = sum(getattr(p, "to_local", lambda p=p: p)().nbytes
                   for p in run.raw_model.parameters())
        with run.signals:
            training_loop(run)
        run.raw_model.eval()
        with torch.no_grad():
            logits = run.model(torch.arange(32).view(2, 16))
        weights = arrays((n, full(p)) for n, p in run.raw_model.named_parameters())
        return weights, logits.numpy(), held
    return with_run(options, compute)


def initial_weights(options):
    def compute(run):
        from train.distributed import full
        return arrays((n, full(p)) for n, p in run.raw_model.named_parameters())
    return with_run(options, compute)


# -----------------------------------------------------------------------------
# the same run at any number of ranks

def options(data_dir, out, **changes):
    return RUN | dict(data_dir=str(data_dir), out_dir=str(out)) | changes


def read_metrics(out, name):
    """{iter: number} of a run; every iter must be there once."""
    with open(os.path.join(out, "metrics.jsonl")) as f:
        records = [r for r in map(json.loads, f) if name in r]
    iters = [r["iter"] for r in records]
    assert iters == sorted(set(iters)), f"steps counted twice or out of order: {iters}"
    return {r["iter"]: r[name] for r in records}


def assert_losses_agree(out, reference, steps=STEPS, tolerance=1e-5):
    losses, wanted = read_metrics(out, "loss"), read_metrics(reference, "loss")
    assert list(losses) == list(range(steps))
    for it, loss in losses.items():
        assert abs(loss - wanted[it]) <= tolerance * wanted[it], (it, loss, wanted[it])


def global_batches(ranks, steps=STEPS):
    """The sorted rows of every step from the micro-batches of all its ranks."""
    first = next(iter(ranks[0].values()))
    per_step = SEQUENCES // (len(ranks) * len(first))
    rows = {}
    for batches in ranks:
        for index, batch in batches.items():
            if index >= 0:
                rows.setdefault(index // per_step, []).extend(map(bytes, batch))
    return {step: sorted(r) for step, r in rows.items() if step < steps}


@pytest.fixture(scope="module")
def runs(data_dir, tmp_path_factory):
    """{world size: (out_dir, batches of each rank)} of whole runs."""
    out = {w: tmp_path_factory.mktemp(f"world{w}") for w in (1, 2, 3, 4)}
    return {w: (out[w], in_ranks(w, train_run, options(data_dir, out[w]))) for w in out}


@pytest.mark.matrix(53)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_global_batches_are_equal_at_any_world_size(runs, world_size):
    wanted, found = global_batches(runs[1][1]), global_batches(runs[world_size][1])
    assert len(wanted) == STEPS and all(len(rows) == SEQUENCES for rows in wanted.values())
    assert found == wanted


@pytest.mark.matrix(53)
def test_loader_gives_equal_batches_to_2_3_4_6_and_12_ranks(data_dir):
    def rows(world_size):
        size = SEQUENCES // world_size
        loaders = [DataLoader(data_dir, size, 16, seed=1, rank=r, world_size=world_size)
                   for r in range(world_size)]
        return [sorted(bytes(row.numpy()) for loader in loaders
                       for row in loader.get_batch(step=step)[0]) for step in range(STEPS)]
    wanted = rows(1)
    assert all(rows(w) == wanted for w in (2, 3, 4, 6, 12))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_losses_agree_at_any_world_size(runs, world_size):
    assert_losses_agree(runs[world_size][0], runs[1][0])


def test_validation_is_the_same_number_at_any_world_size(runs):
    val = {w: read_metrics(out, "val_loss") for w, (out, _) in runs.items()}
    assert all(v[0] == val[1][0] for v in val.values())  # the same weights: the same bits
    assert all(v[STEPS] == pytest.approx(val[1][STEPS], rel=1e-5) for v in val.values())


def test_gradients_with_accumulation_equal_one_process(data_dir, tmp_path):
    # 12 sequences: 1 rank computes 6 micro-batches of 2, 2 ranks 3 each
    small = dict(batch_size=2, gradient_accumulation_steps=6, grad_clip=0.1)
    def at(world_size, **changes):
        out = tmp_path / f"{world_size}{changes}"
        return in_ranks(world_size, gradients, options(data_dir, out, **small, **changes))
    (alone, norm, clipped), = at(1)
    assert norm > 0.1  # so that clipping does something
    for found in (*at(2), *at(2, distributed="fsdp")):
        assert found[1] == pytest.approx(norm, rel=1e-6)
        for name in alone:
            for got, wanted in ((found[0][name], alone[name]), (found[2][name], clipped[name])):
                assert np.linalg.norm(got - wanted) <= 1e-6 * np.linalg.norm(wanted), name


# -----------------------------------------------------------------------------
# FSDP2

def test_fsdp_trains_as_ddp_and_its_checkpoint_loads_anywhere(data_dir, tmp_path):
    steps = dict(max_iters=8, eval_interval=8)
    ddp, fsdp = tmp_path / "ddp", tmp_path / "fsdp"
    _, (_, _, whole) = in_ranks(2, weights_and_logits, options(data_dir, ddp, **steps))
    ranks = in_ranks(2, weights_and_logits, options(data_dir, fsdp, distributed="fsdp", **steps))
    assert_losses_agree(fsdp, ddp, steps=8)
    assert all(held < 0.51 * whole for _, _, held in ranks)

    from model.sample import load_model
    from train.checkpoint import load_checkpoint
    model, _ = load_model(str(fsdp / "ckpt.pt"))
    import torch
    logits = model(torch.arange(32).view(2, 16)).detach().numpy()
    for weights, live, _ in ranks:
        assert all((np.array(p.detach()) == weights[n]).all() for n, p in model.named_parameters())
        np.testing.assert_allclose(logits, live, rtol=0, atol=1e-6)
    one, other = (load_checkpoint(str(out / "ckpt.pt")) for out in (ddp, fsdp))
    assert one["optimizer"]["param_groups"] == other["optimizer"]["param_groups"]
    for name, entry in one["optimizer"]["state"].items():
        for key, tensor in entry.items():
            found = other["optimizer"]["state"][name][key]
            assert found.shape == tensor.shape and torch.allclose(found, tensor, atol=1e-6)


def test_fsdp_starts_from_the_same_weights(data_dir, tmp_path):
    more = dict(norm="layer", bias=True, pos="learned", tie_weights=False, n_layer=3,
                prev_embedding=True, vocab_size=250)  # 3 rows on 2 ranks: shards of 2 and 1
    alone, = in_ranks(1, initial_weights, options(data_dir, tmp_path / "1", **more))
    for found in in_ranks(2, initial_weights,
                          options(data_dir, tmp_path / "2", distributed="fsdp", **more)):
        assert list(found) == list(alone)
        assert all((found[n] == alone[n]).all() for n in alone)


def given_model(options):
    """{name: array} at the start of train(config, model=...) with a model that each rank seeds."""
    import torch

    from train.distributed import full, process_group
    from train.setup import open_run
    config = load_config(None, options)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5)).half()
    for value, tensor in enumerate(model.state_dict().values()):
        tensor.fill_(10 * int(os.environ["RANK"]) + value)
    with process_group(config) as ranks, open_run(config, ranks, model) as run:
        return arrays((n, full(t)) for n, t in run.raw_model.state_dict().items())


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_given_model_starts_from_the_weights_of_rank_0(data_dir, tmp_path, kind):
    for found in in_ranks(2, given_model, options(data_dir, tmp_path, distributed=kind)):
        assert [np.unique(a).tolist() for a in found.values()] == [[v] for v in range(7)]


def edited_model(options):
    """What a model file with parameters of one's own trains from, after three edits: {name: array},
    or what refuses it."""
    import torch

    from model import gpt
    from train import distributed
    from train.setup import open_run
    from train.train import train_step

    class EditedBlock(gpt.Block):
        start = 0.5

        def __init__(self, config, layer):
            super().__init__(config, layer)
            self.shift = torch.nn.Parameter(torch.full((1, config.n_embd), 0.25))
            self.gain = torch.nn.Parameter(torch.tensor(EditedBlock.start))

        def compute(self, x, *context):
            return super().compute(x, *context) + self.shift * self.gain

    def attempt():
        with contextlib.ExitStack() as at_end:
            try:
                run = at_end.enter_context(open_run(config, ranks))
            except SetupError as error:
                return str(error)
            found = arrays((n, distributed.full(p)) for n, p in run.raw_model.named_parameters())
            train_step(run)
            return found

    def initial(model, name, shape, seed):
        if name.endswith((".shift", ".gain")):
            return torch.full(shape, 0.25 if "shift" in name else 0.5)
        return known(model, name, shape, seed)
    config = load_config(None, options)
    gpt.GPT.block_class, known = EditedBlock, gpt.GPT.initial
    with distributed.process_group(config) as ranks:
        first = attempt()
        EditedBlock.start = [0.5]
        second = attempt()
        gpt.GPT.initial = initial
        return first, second, attempt()


def test_a_parameter_of_ones_own_starts_from_its_own_value_or_is_refused(data_dir, tmp_path):
    plain, = in_ranks(1, initial_weights, options(data_dir, tmp_path / "0"))
    (alone, _, _), = in_ranks(1, edited_model, options(data_dir, tmp_path / "1"))
    for scalar, unknown, told in in_ranks(2, edited_model, options(data_dir, tmp_path / "2",
                                                                   distributed="fsdp")):
        assert "cannot shard the scalars h.0.gain, h.1.gain: give them the shape (1,)" in scalar
        assert "\n    h.*.shift: return normal(name, shape, 0.02, seed)\n" in unknown
        assert "\n    h.*.gain: return torch.full(shape, ...)\n" in unknown
        for found in (alone, told):
            assert found.keys() == plain.keys() | {f"h.{i}.{n}" for i in (0, 1)
                                                   for n in ("shift", "gain")}
            for name, values in found.items():
                wanted = dict(shift=0.25, gain=0.5).get(name.rpartition(".")[2], plain.get(name))
                assert (values == wanted).all(), name


def half_precision(options):
    """Losses of three steps and the norms before clipping, and the kinds of the weights, between
    the steps and in the forward pass."""
    def compute(run):
        from train.train import train_step
        numbers = judged()
        used = set()
        run.raw_model.h[0].attn.register_forward_pre_hook(
            lambda attn, args: used.add(str(attn.q.weight.dtype)))
        for _ in range(3):
            train_step(run)
        stored = {str(p.dtype) for p in run.raw_model.parameters()}
        return *zip(*numbers, strict=True), stored, used
    return with_run(options, compute)


@pytest.mark.ci
@pytest.mark.parametrize("dtype, norm", [("bfloat16", "rms"), ("bfloat16", "layer"),
                                         ("float16", "rms")])  # of which FSDP lost gradients
def test_fsdp_in_16_bits_is_near_ddp(data_dir, tmp_path, dtype, norm):
    low = dict(dtype=dtype, norm=norm, bias=norm == "layer", grad_clip=0.1)
    ddp = in_ranks(2, half_precision, options(data_dir, tmp_path / "d", **low))
    fsdp = in_ranks(2, half_precision,
                    options(data_dir, tmp_path / "f", distributed="fsdp", **low))
    for (losses, norms, stored, used), (wanted_losses, wanted_norms, *_) in zip(
            fsdp, ddp, strict=True):
        assert stored == {"torch.float32"}  # the weights that the optimizer updates
        # In bfloat16, the weights that are gathered. autocast converts those of float16.
        assert used == {"torch.bfloat16" if dtype == "bfloat16" else "torch.float32"}
        assert losses == pytest.approx(wanted_losses, rel=2e-3)
        assert norms == pytest.approx(wanted_norms, rel=2e-2)


def overflow(options):
    """float16: an infinite gradient on rank 1 only, in its shard or before the ranks' mean; whether
    the weights have changed, and the scale before and after."""
    def compute(run):
        from train.distributed import local
        from train.train import train_step
        before = [local(p.detach()).clone() for p in run.raw_model.parameters()]
        unscale, scale = run.scaler.unscale_, run.scaler.get_scale()

        def spoil(optimizer):
            if run.ranks.rank == 1:
                local(run.raw_model.wte.weight.grad)[0, 0] = float("inf")
            unscale(optimizer)
        if run.sharded:
            run.scaler.unscale_ = spoil
        elif run.ranks.rank == 1:
            run.raw_model.wte.weight.register_hook(lambda grad: grad * float("inf"))
        train_step(run)
        after = [local(p.detach()) for p in run.raw_model.parameters()]
        same = all((a == b).all().item() for a, b in zip(before, after, strict=True))
        return same, scale, run.scaler.get_scale()
    return with_run(options, compute)


@pytest.mark.parametrize("kind, optimizer", [("fsdp", "adamw"), ("fsdp", "muon"), ("ddp", "muon")])
def test_an_overflow_of_float16_is_skipped_on_all_ranks(data_dir, tmp_path, kind, optimizer):
    low = options(data_dir, tmp_path, dtype="float16", distributed=kind, optimizer=optimizer,
                  muon_weight_decay=0.1)
    for same, scale, later in in_ranks(2, overflow, low):
        assert same and later == scale / 2


def clipping(options):
    """Of the gradients of step 0: their norm in one piece, the norm that clipping finds, and the
    collectives and the operations that it takes."""
    def compute(run):
        import torch
        from torch.distributed.tensor.debug import CommDebugMode
        from torch.utils._python_dispatch import TorchDispatchMode

        from train import train
        from train.distributed import full
        from train.train import train_step
        clip, seen, operations = train.clip_gradients, [], []

        class Note(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                operations.append(function)
                return function(*args, **kwargs or {})

        def noted(optimizer, *rest):
            grads = [full(p.grad) for p in run.raw_model.parameters()]
            seen.append(float(torch.nn.utils.get_total_norm(grads)))
            with CommDebugMode() as made:
                norm = clip(optimizer, *rest)
            with Note():
                clip(optimizer, *rest)
            seen.extend((float(norm), made.get_total_counts(), len(operations)))
            return norm
        train.clip_gradients = noted
        train_step(run)
        return seen
    return with_run(options, compute)


@pytest.mark.parametrize("kind, collectives", [("ddp", 0), ("fsdp", 1)])
def test_the_norm_of_shards_takes_one_exchange(data_dir, tmp_path, kind, collectives):
    """And a few operations, not one for each of 30 gradients."""
    few = options(data_dir, tmp_path, distributed=kind, n_layer=3, vocab_size=250)  # uneven shards
    for wanted, norm, made, operations in in_ranks(2, clipping, few):
        assert norm == pytest.approx(wanted, rel=1e-6)
        assert made == collectives and operations < 20


def save_while_training(options):
    """Save after step 0, train on before anything is written, and then write: rank 0's {name: whole
    tensor} of weights and moments as they were at the save."""
    def compute(run):
        import threading

        from train.base import run_folder
        from train.distributed import full
        from train.train import save, train_step
        is_file = options["checkpoint_format"] == "file"
        name = "write" if is_file else "write_shards"
        written, write = threading.Event(), getattr(run.folder, name)

        def late(*args):
            assert written.wait(60)
            return write(*args)
        setattr(run.folder, name, late)
        if is_file:
            run_folder.snapshot = None  # there is no need for a second copy
        train_step(run)
        named = run.raw_model.named_parameters()
        state = {n: [full(t).clone() for t in (p.detach(), run.optimizer.state[p]["exp_avg"])]
                 for n, p in named}
        save(run)
        train_step(run)
        written.set()
        run.folder.wait()
        return {n: [t.numpy() for t in pair] for n, pair in state.items()}
    return with_run(options, compute)


@pytest.mark.parametrize("how", ["file", "sharded"])
def test_a_save_of_shards_is_one_copy_that_training_cannot_change(data_dir, tmp_path, how):
    from train.checkpoint import load_checkpoint
    wanted, _ = in_ranks(2, save_while_training, options(
        data_dir, tmp_path, distributed="fsdp", checkpoint_format=how))
    state = load_checkpoint(tmp_path / "ckpt.pt")
    for name, pair in wanted.items():
        for mine, found in zip(pair, (state["model"][name],
                                      state["optimizer"]["state"][name]["exp_avg"])):
            np.testing.assert_array_equal(found.numpy(), mine)
    assert {e["step"].item() for e in state["optimizer"]["state"].values()} == {1.0}


def spoil_a_shard(options):
    """What a save says when a number of rank 1's shard is not finite."""
    def compute(run):
        import torch

        from train.base.errors import BadNumbers
        from train.distributed import local
        from train.train import save, train_step
        train_step(run)
        with torch.no_grad():
            if run.ranks.rank == 1:
                local(run.raw_model.ln_f.weight)[0] = torch.inf
        try:
            save(run)
        except BadNumbers as error:
            return str(error)
    return with_run(options, compute)


def test_each_rank_looks_at_its_own_shard_before_a_save(data_dir, tmp_path):
    for said in in_ranks(2, spoil_a_shard, options(data_dir, tmp_path, distributed="fsdp")):
        assert said and said.startswith("iter 1: model.ln_f.weight is not finite; not saved")
    assert not (tmp_path / "ckpt.pt").exists()


# -----------------------------------------------------------------------------
# Muon: the matrices are shared out

def muon_run(options):
    """Train to the end; {name: whole weight}, and how many matrices this rank orthogonalized."""
    from train import optimizer as muon
    orthogonalize, done = muon.orthogonalize, []
    muon.orthogonalize = lambda g: (done.append(len(g)), orthogonalize(g))[1]
    weights, _, _ = weights_and_logits(options)
    return weights, done


def keeps_freed_memory(options):
    from train import distributed
    calls = []
    distributed.keep_freed_memory = lambda: calls.append(True)
    with distributed.process_group(load_config(None, options)):
        return calls


def test_a_sharded_model_returns_the_memory_of_gathered_blocks(data_dir, tmp_path):
    """A rank with a quarter of 300 M parameters had 5.7 GB instead of 2 (train/LOG.md)."""
    for kind, calls in (("ddp", [True]), ("fsdp", []), ("hsdp", [])):
        kept = in_ranks(2, keeps_freed_memory, options(data_dir, tmp_path, distributed=kind))
        assert kept == [calls, calls]


@pytest.fixture(scope="module")
def muon_alone(data_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("muon")
    return out, in_ranks(1, muon_run, options(data_dir, out, **MUON))[0]


# Two layers have 8 matrices of 32 x 32 and 6 of 64 x 32 or its transpose, 4 and 2.
MUON = dict(optimizer="muon", muon_weight_decay=0.1, max_iters=6, eval_interval=6)


@pytest.mark.parametrize("kind, world_size, shares", [
    slow("ddp", 2, [4, 3]), ("ddp", 3, [3, 2]), ("fsdp", 2, [4, 2, 1]), slow("fsdp", 3, [3, 2, 1])])
def test_muon_shares_its_work_and_is_the_same_run(data_dir, tmp_path, muon_alone, kind, world_size,
                                                  shares):
    reference, (wanted, done) = muon_alone
    assert done == [8, 6] * 6
    ranks = in_ranks(world_size, muon_run,
                     options(data_dir, tmp_path, distributed=kind, **MUON))
    assert_losses_agree(tmp_path, reference, steps=6, tolerance=1e-4)
    for weights, done in ranks:
        assert all(n <= share for n, share in zip(done, shares * 6, strict=True))
        for name, weight in weights.items():
            assert (weight == ranks[0][0][name]).all(), name  # the same bits on all ranks
            np.testing.assert_allclose(weight, wanted[name], rtol=0, atol=5e-3, err_msg=name)


def test_muon_goes_on_at_any_world_size(data_dir, tmp_path, muon_alone):
    in_ranks(2, train_run, options(data_dir, tmp_path, **MUON), 2)
    in_ranks(3, train_run, options(data_dir, tmp_path, distributed="fsdp", **MUON), 4)
    in_ranks(1, train_run, options(data_dir, tmp_path, **MUON))
    assert_losses_agree(tmp_path, muon_alone[0], steps=6, tolerance=1e-4)
    from train.checkpoint import load_checkpoint
    one, other = (load_checkpoint(str(out / "ckpt.pt"))["optimizer"] for out in
                  (muon_alone[0], tmp_path))
    assert one["param_groups"] == other["param_groups"]
    assert {n: {k: v.shape for k, v in e.items()} for n, e in one["state"].items()} == {
        n: {k: v.shape for k, v in e.items()} for n, e in other["state"].items()}


def muon_by_hand(kind):
    """Two steps of Muon on a few matrices, fewer of a shape than there are ranks, of which one gets
    no gradient, and on parameters of several matrices, four and two; the matrices after it."""
    import torch
    import torch.nn as nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from train import distributed
    from train.optimizer import Muon
    warnings.simplefilter("error", FutureWarning)  # of a collective that is deprecated
    with distributed.process_group(load_config(None, RUN)) as ranks:
        mesh, generator = (ranks.world_size,), torch.Generator().manual_seed(0)
        mesh = init_device_mesh("cpu", mesh) if kind == "fsdp" else None

        def draw(shape):
            whole = torch.randn(shape, generator=generator)
            return distribute_tensor(whole, mesh, [Shard(0)]) if mesh else whole
        shapes = [(17, 48), (48, 17), (16, 16), (17, 48), (4, 48, 17), (2, 16, 16)]
        params = [nn.Parameter(draw(s)) for s in shapes]
        optimizer = Muon([dict(params=params, lr=0.1, weight_decay=0.1, muon=True)], lr=1e-3)
        for missing in (3, 2):
            for i, p in enumerate(params):
                p.grad = None if i == missing else draw(shapes[i])
            optimizer.step()
        return [distributed.full(p.detach()).numpy() for p in params]


def muon_by_hand_as_on_a_gpu():
    """The same of shards through the all-to-all of GPUs, which DTensor avoids on a CPU."""
    import torch
    from torch.distributed.tensor import placement_types
    calls = []

    def all_to_all(tensor, gather_dim, shard_dim, mesh, mesh_dim):
        calls.append(tensor)
        name = torch.distributed.group.WORLD.group_name
        return torch.ops._dtensor.shard_dim_alltoall(tensor, gather_dim, shard_dim, name)
    placement_types.shard_dim_alltoall = all_to_all
    found = muon_by_hand("fsdp")
    assert len(calls) >= 4  # there and back, in two steps
    return found


def test_muon_shares_few_matrices_and_passes_over_one_without_a_gradient():
    alone, = in_ranks(1, muon_by_hand, "ddp")
    for function in ((muon_by_hand, "ddp"), (muon_by_hand, "fsdp"), (muon_by_hand_as_on_a_gpu,)):
        first, *others = in_ranks(3, *function)
        for i, (found, wanted) in enumerate(zip(first, alone, strict=True)):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=5e-3)
            assert all((other[i] == found).all() for other in others)


# -----------------------------------------------------------------------------
# elastic

@pytest.mark.matrix(54)
def test_stop_on_4_ranks_go_on_with_1_then_2(data_dir, tmp_path, runs):
    parts = [in_ranks(4, train_run, options(data_dir, tmp_path), 5),
             in_ranks(1, train_run, options(data_dir, tmp_path), 11),
             in_ranks(2, train_run, options(data_dir, tmp_path))]
    assert -1 in parts[0][0] and -1 in parts[1][0] and -1 not in parts[2][0]
    batches = {}
    for ranks in parts:  # a step begun before the stop and done after the resume counts once
        batches |= global_batches(ranks)
    assert batches == global_batches(runs[1][1])
    assert_losses_agree(tmp_path, runs[1][0])


def test_ddp_to_fsdp_and_back(data_dir, tmp_path, runs):
    in_ranks(2, train_run, options(data_dir, tmp_path), 4)
    in_ranks(3, train_run, options(data_dir, tmp_path, distributed="fsdp"), 8)
    in_ranks(2, train_run, options(data_dir, tmp_path, distributed="fsdp"), 12)
    in_ranks(1, train_run, options(data_dir, tmp_path))
    assert_losses_agree(tmp_path, runs[1][0])


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_resume_at_the_same_world_size_is_exact_with_dropout(data_dir, tmp_path, kind):
    few = dict(max_iters=6, eval_interval=3, dropout=0.2, distributed=kind, n_layer=1)
    in_ranks(2, train_run, options(data_dir, tmp_path / "whole", **few))
    in_ranks(2, train_run, options(data_dir, tmp_path / "parts", **few), 2)
    in_ranks(2, train_run, options(data_dir, tmp_path / "parts", **few))
    from train.checkpoint import load_checkpoint
    one, other = (load_checkpoint(str(tmp_path / p / "ckpt.pt")) for p in ("whole", "parts"))
    assert all((one["model"][n] == other["model"][n]).all() for n in one["model"])
    for name, entry in one["optimizer"]["state"].items():
        assert all((other["optimizer"]["state"][name][k] == v).all() for k, v in entry.items())


def masks(options):
    """Which numbers dropout has put out in each step of this rank."""
    import torch.nn.functional as F
    seen, dropout = [], F.dropout

    def noted(x, p, training):
        out = dropout(x, p, training)
        seen.append((out == 0).numpy().tobytes())
        return out
    F.dropout = noted
    train_run(options)
    return seen


def test_dropout_differs_from_rank_to_rank(data_dir, tmp_path):
    one, other = in_ranks(2, masks, options(data_dir, tmp_path, max_iters=2, dropout=0.5,
                                            eval_interval=0))
    assert len(one) == len(other) > 2 and not set(one) & set(other)


def seeds(options):
    """What torch's generator is seeded with in two steps, and in the first of another run."""
    import torch

    from train.train import train_step
    seen = []

    def steps(run, n):
        for _ in range(n):
            train_step(run)
            seen.append(torch.initial_seed())
    for n in (2, 1):
        with_run(options, functools.partial(steps, n=n))
    return seen


def test_random_draws_are_a_function_of_seed_step_and_rank(data_dir, tmp_path):
    (a, b, again), (c, d, _) = in_ranks(2, seeds, options(data_dir, tmp_path, seed=2**60))
    assert a == again and len({a, b, c, d}) == 4


# -----------------------------------------------------------------------------
# agreement between ranks

def agreement():
    from train import checkpoint, distributed
    with distributed.process_group(load_config(None, dict(device="cpu", num_threads=1))) as ranks:
        import torch
        largest = distributed.max_over_ranks(ranks.rank * 7, ranks)
        rows = distributed.all_gather_vectors(torch.tensor([1.0, ranks.rank]), ranks).tolist()
        found = distributed.broadcast_from_rank0(lambda: os.getpid(), ranks)
        sent = {"bf16": torch.tensor([1.5, -2.0]).bfloat16(), "flag": torch.tensor([True, False]),
                "scalar": torch.tensor(3.0), "empty": torch.empty(0, 4)}
        got = {k: torch.zeros_like(v) for k, v in sent.items()}
        checkpoint.fill(got, sent if ranks.is_main else checkpoint.without_values(sent), ranks)
        same = all(torch.equal(got[k], v) and got[k].dtype == v.dtype for k, v in sent.items())
        with pytest.raises(ZeroDivisionError):
            distributed.broadcast_from_rank0(lambda: 1 / 0, ranks)

        class NoPickle(Exception):
            """Of a local class, which cannot be pickled."""

        def fail():
            raise NoPickle("it is full")
        with pytest.raises(RuntimeError, match="rank 0: NoPickle: it is full"):
            distributed.broadcast_from_rank0(fail, ranks)
        return largest, rows, found, same


def test_ranks_agree_on_numbers_tensors_and_errors():
    first, second = in_ranks(2, agreement)
    assert first == second and first[:2] == (7, [[1.0, 0.0], [1.0, 1.0]]) and first[3]


# -----------------------------------------------------------------------------
# what goes wrong

def command_line(*args):
    """run_train.py's main() in this rank, to its exit."""
    sys.path.insert(0, str(REPO))
    from run_train import main
    with faults() if "FAULT" in os.environ else contextlib.nullcontext():
        os._exit(main(list(args)))


def command_line_without_memory(*args):
    from model.gpt import GPT
    forward = GPT.forward

    def limited(self, idx, *rest, **kwargs):
        if os.environ["RANK"] == "1" and self.training:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return forward(self, idx, *rest, **kwargs)
    GPT.forward = limited
    return command_line(*args)


def as_arguments(options):
    return [f"--{k}={v}" for k, v in options.items()]


@pytest.mark.matrix(112)
def test_out_of_memory_on_one_rank_ends_all(data_dir, tmp_path):
    said = tmp_path / "said"
    codes = in_ranks(2, command_line_without_memory,
                     *as_arguments(options(data_dir, tmp_path / "out")), output=said, exits=True)
    assert codes == [1, 1]
    text = said.read_text()
    assert "[rank 1] Out of memory. Try --batch_size 2 --gradient_accumulation_steps 6" in text
    assert "Another rank died or hung" in text


@pytest.fixture(scope="module")
def hangs(data_dir, tmp_path_factory):
    """{place: (exit codes, output)} of runs in which a rank sleeps for ever at that place."""
    def hang(place, step, rank, limit):
        out = tmp_path_factory.mktemp(place)
        args = as_arguments(options(data_dir, out, step_timeout=limit, eval_interval=5))
        codes = in_ranks(2, command_line, *args, env=dict(FAULT=f"{place}@{step}:{rank}=sleep"),
                         output=out / "said", exits=True)
        return codes, (out / "said").read_text()
    # Evaluation and saving, and what waits for them, may take ten times as long as a step.
    cases = [("before_step", 7, 1, 3), ("eval", 5, 1, 0.5), ("save_open", 5, 0, 0.5)]
    with ThreadPoolExecutor() as pool:
        return dict(zip([c[0] for c in cases], pool.map(lambda c: hang(*c), cases), strict=True))


@pytest.mark.ci
@pytest.mark.matrix(69, 70)
@pytest.mark.parametrize("place", ["before_step", "eval", "save_open"])
def test_a_rank_that_hangs_ends_with_the_stacks_of_all(hangs, place):
    codes, text = hangs[place]
    assert codes == [1, 1]
    assert "[rank 1]" in text and "in act" in text and "in point" in text  # where it hangs
    waits = "all_reduce", "all_gather", "broadcast", "_engine_run_backward"
    assert any(f"in {name}" in text for name in waits)  # where the other waits


@pytest.mark.matrix(109)
@pytest.mark.parametrize("given, missing", [
    ("RANK", "LOCAL_RANK=, WORLD_SIZE=, MASTER_ADDR=, MASTER_PORT="),
    ("WORLD_SIZE", "RANK=, LOCAL_RANK=, WORLD_SIZE=1, MASTER_ADDR="),
    ("RANK LOCAL_RANK WORLD_SIZE", "MASTER_ADDR=, MASTER_PORT=")])
def test_a_half_set_environment_is_refused(monkeypatch, given, missing):
    from train.distributed import ENVIRONMENT, read_environment
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    assert read_environment() is None
    for name in given.split():
        monkeypatch.setenv(name, "1")
    with pytest.raises(SetupError, match=f"{missing}.*start ranks with `torchrun"):
        read_environment()


@pytest.mark.matrix(109)
@pytest.mark.parametrize("rank", ["two", "4", "-1"])
def test_an_impossible_rank_is_refused(monkeypatch, rank):
    from train.distributed import ENVIRONMENT, read_environment
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "4")
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SetupError, match=f"RANK={rank}"):
        read_environment()


@pytest.mark.matrix(55)
def test_what_ranks_cannot_do_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    message = r"3 x 4 = 12 samples per step.*8 ranks; valid numbers of ranks: 1, 2, 3, 4, 6, 12"
    with pytest.raises(ConfigError, match=message):
        load_config(None, TINY | dict(batch_size=3, gradient_accumulation_steps=4))


def test_one_gpu_for_several_ranks_is_refused(monkeypatch):
    import torch

    from train.distributed import get_device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SetupError, match="cuda:1.* for 2 ranks: expected"):
        get_device("cuda:1", 0, 2)
    with pytest.raises(SetupError, match="8 GPUs are needed on this machine, torch .* sees 2"):
        get_device("cuda", 0, 8)


def test_convert_ddp_state():
    from train.distributed import convert_ddp_state
    given = {"module._orig_mod.h.0.w": 1, "_orig_mod.module.h.module.w": 2, "module.submodule.w": 3}
    assert convert_ddp_state(given) == {"h.0.w": 1, "h.module.w": 2, "submodule.w": 3}
    own = {"head.module.w": 1, "module.w": 2, "h._orig_mod.w": 3}  # attributes of a model
    assert convert_ddp_state(own) == {"head.module.w": 1, "module.w": 2, "h.w": 3}
