"""What happens on a GPU, as far as a CPU can show it: compiling in the loop, the peak that MFU
divides by, what a dry run counts and times. (More: the end of test_gpt.py; Muon and the norm over
ranks in test_distributed.py; the programme that needs a real one in test_bench.py.)"""

import contextlib
import json
import os
import re
import types

import pytest
import torch
from conftest import REPO, TINY
from processes import python
from test_gpt import Graphs

from model import grpo
from model.gpt import GPT, GPTConfig
from model.sample import load_text_model
from train import device as compiling
from train import device as devices
from train.base.errors import CollectiveExit, UserError
from train.checkpoint import load_checkpoint
from train.config import TrainConfig, load_config
from train.dataloader import open_token_data, seed_step
from train.device import choose_dtype
from train.distributed import Ranks, get_device
from train.evaluate import pack
from train.tools import dry_run
from train.train import train


@pytest.fixture
def compiled_as_on_a_gpu(monkeypatch):
    """A function that has the loop compile with a backend, in validation and in its first step
    too: a CPU pauses there."""
    torch._dynamo.reset()

    def use(backend):
        compile = torch.nn.Module.compile
        monkeypatch.setattr(compiling.Compiler, "paused",
                            lambda compiler, when=True: contextlib.nullcontext())
        monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: compile(
            module, backend=backend, **options))
    yield use
    torch._dynamo.reset()


def run(data_dir, out_dir, **changes):
    train(load_config(None, TINY | dict(data_dir=str(data_dir), out_dir=str(out_dir),
                                        compile="true", max_iters=2, vocab_size=256) | changes))
    return [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_partial_batch_in_validation_is_not_compiled(data_dir, tmp_path, compiled_as_on_a_gpu):
    """Iter 0 validates first: 62 batches of four windows and one of one."""
    graphs = Graphs()
    compiled_as_on_a_gpu(graphs)
    run(data_dir, tmp_path, eval_iters=1000)
    batches = {n.meta["example_value"].shape[0] for graph in graphs for n in graph.graph.nodes
               if n.op == "placeholder" and n.meta["example_value"].dim() == 3}
    assert 4 in batches and 1 not in batches and not graphs.sizes()


def test_batches_of_two_sizes_are_two_static_graphs(compiled_as_on_a_gpu):
    """As those of training and of validation are on several ranks."""
    graphs, gpt = Graphs(), GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8,
                                          vocab_size=32))
    compiled_as_on_a_gpu(graphs)
    compiling.compile_model(gpt, torch.device("cpu"))
    for size in (2, 4, 3):
        gpt(torch.zeros(size, 8, dtype=torch.int64))
    assert len(graphs) == 3 and not graphs.sizes()


@pytest.mark.ci
def test_each_of_many_runs_in_a_process_is_compiled(data_dir, tmp_path, compiled_as_on_a_gpu):
    """A search has trials of more than 8 shapes -> none is in eager mode because of the others."""
    graphs = Graphs()
    compiled_as_on_a_gpu(graphs)
    counts = []
    for size in range(8, 26, 2):
        run(data_dir, tmp_path / str(size), block_size=size, eval_interval=0)
        counts.append(len(graphs))
    assert len(set(counts)) == len(counts)


def test_a_model_is_not_compiled_after_its_run(data_dir, tmp_path, compiled_as_on_a_gpu):
    """It may be used for other batches, or trained again without compiling."""
    graphs = Graphs()
    compiled_as_on_a_gpu(graphs)
    config = load_config(None, TINY | dict(data_dir=str(data_dir), out_dir=str(tmp_path),
                                           compile="true", max_iters=2, vocab_size=256))
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=config.block_size,
                          vocab_size=256))
    train(config, model=model)
    before = len(graphs)
    model(torch.zeros(3, 5, dtype=torch.long))
    assert before and len(graphs) == before


def test_a_compiler_that_fails_in_validation_does_not_end_the_run(data_dir, tmp_path, capsys,
                                                                  compiled_as_on_a_gpu):
    def broken(graph, inputs):
        raise RuntimeError("no Triton here")
    compiled_as_on_a_gpu(broken)
    lines = run(data_dir, tmp_path)
    text = capsys.readouterr().out
    assert text.count("torch.compile failed; continuing without it (--no-compile)") == 1
    assert [m["iter"] for m in lines if "val_loss" in m] == [0, 2]


def test_a_compiler_that_fails_in_the_backward_pass_does_not_end_the_run(
        data_dir, tmp_path, capsys, compiled_as_on_a_gpu):
    """The weights are those of a run that was never compiled."""
    from torch._dynamo.backends.common import aot_autograd

    def broken(graph, inputs):
        raise RuntimeError("no Triton here")
    compiled_as_on_a_gpu(aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=broken))
    run(data_dir, tmp_path / "broken")
    text = capsys.readouterr().out
    assert text.count("torch.compile failed; continuing without it (--no-compile)") == 1
    run(data_dir, tmp_path / "eager", compile="false")
    broken, eager = (load_checkpoint(tmp_path / name / "ckpt.pt") for name in ("broken", "eager"))
    assert all(torch.equal(broken["model"][n], t) for n, t in eager["model"].items())


def test_memory_of_cuda_grows_in_segments(monkeypatch):
    """What is set already stays."""
    for name, value in (("is_available", True), ("device_count", 1), ("set_device", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    for before in ({}, {"PYTORCH_ALLOC_CONF": "backend:native"}, {"PYTORCH_CUDA_ALLOC_CONF": ""}):
        monkeypatch.setattr(os, "environ", dict(before))
        get_device("cuda")
        assert os.environ == (before or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


def test_rotation_angles_are_looked_up_not_computed():
    """Not in every layer and pass: no angle is in the graphs that are compiled."""
    torch._dynamo.reset()
    gpt, graphs = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=61, block_size=16)), []
    torch.nn.Module.compile(gpt, backend=lambda graph, inputs: graphs.append(graph) or graph)
    idx = torch.zeros(2, 16, dtype=torch.int64)
    gpt(idx, idx)
    torch._dynamo.reset()
    called = {str(n.target) for graph in graphs for n in graph.graph.nodes
              if n.op.startswith("call")}
    assert "cat" in str(called) and not re.search(r"\b(cos|sin|pow|arange)\b", str(called))


def test_the_sums_of_a_micro_batch_do_not_wait_for_the_device():
    """A tensor on "meta" has no number to read: reading the count would raise an error."""
    loss, count = (torch.zeros((), device="meta") for _ in range(2))
    assert pack(loss, {"count": count}, count).shape == (2,)


def test_texts_of_many_lengths_do_not_attend_by_cudnn(monkeypatch):
    """It plans anew for each shape: prompts, and rows of answers, have many."""
    enabled = torch.backends.cuda.cudnn_sdp_enabled
    monkeypatch.setattr(grpo.chat, "read_rows_meta", lambda *args: (
        types.SimpleNamespace(block_size=99), None, {}))
    c = types.SimpleNamespace(answer_tokens=64, block_size=100)
    options = types.SimpleNamespace(device="cpu", ckpt="missing.pt", dtype="auto", backbone=None,
                                    ema=False)
    try:
        for prepare in (lambda: grpo.open_prompts(c, Ranks(), True),
                        lambda: load_text_model(options)):
            torch.backends.cuda.enable_cudnn_sdp(True)
            with pytest.raises(UserError):
                prepare()
            assert not enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


# --- precision and its peak

@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_a_step_seeds_the_device_as_torch_would(monkeypatch, kind):
    """One number for the CPU and the device, which only asks for it here."""
    asked = []
    monkeypatch.setattr(getattr(torch, kind), "manual_seed", asked.append)
    state = torch.get_rng_state()
    try:
        seed_step(1337, 5, Ranks(1, 2, torch.device(kind)))
        assert asked == [torch.initial_seed()] == [((1337 * 1_000_003 + 5) * 65_537 + 1) % 2**63]
        ours = torch.rand(3)
        torch.manual_seed(asked[0])
        assert torch.equal(torch.rand(3), ours)
    finally:
        torch.set_rng_state(state)


def test_precision_is_chosen_by_the_device():
    for path in sorted((REPO / "train").glob("config*.yaml")):
        if "dtype" in path.read_text():
            assert re.search(r"^dtype: (auto|float32)\b", path.read_text(), re.MULTILINE), path
    assert load_config(None).dtype == "auto"


@pytest.mark.parametrize("capability, dtype, reason", [
    ((7, 5), torch.float16, "no native bfloat16"), ((8, 0), torch.bfloat16, "native bfloat16")])
def test_gpus_before_ampere_compute_in_float16(capability, dtype, reason, monkeypatch):
    """E.g. a T4 (7.5); A100: 8.0."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    name = str(dtype).removeprefix("torch.")
    assert choose_dtype("auto", torch.device("cuda")) == (
        dtype, f"{name} ({reason} on this device)")


@pytest.mark.parametrize("probe", ["_is_amx_tile_supported", "_is_avx512_bf16_supported", None])
def test_what_a_cpu_multiplies_natively_is_asked(probe, monkeypatch):
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda name=name: name == probe)
    dtype, why = choose_dtype("auto", torch.device("cpu"))
    assert dtype == (torch.bfloat16 if probe else torch.float32)
    assert ("no native bfloat16 on this device" not in why) == bool(probe)


@pytest.mark.parametrize("name, tflops", [
    ("NVIDIA H200", 989), ("NVIDIA H200 NVL", 835), ("NVIDIA H100 80GB HBM3", 989),
    ("NVIDIA H100 PCIe", 756), ("NVIDIA A100-SXM4-80GB", 312), ("Tesla T4", 65),
    ("NVIDIA GeForce RTX 4090", 165), ("NVIDIA A40", 150)])
def test_the_peak_is_that_of_the_gpu(name, tflops):
    assert devices.peak_flops(name) == tflops * 1e12


@pytest.mark.parametrize("name", ["NVIDIA RTX A4000", "NVIDIA T400 4GB", "NVIDIA A10M", "GB10",
                                  "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H800 PCIe",
                                  "NVIDIA GeForce GTX 1080"])
def test_a_gpu_that_is_not_in_the_table_has_no_peak(name):
    assert devices.peak_flops(name) == 0


def test_mfu_divides_by_the_peak_of_all_ranks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    matmul = types.SimpleNamespace(allow_tf32=True)
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    ranks = Ranks(world_size=2, device=torch.device("cuda", 0))
    assert devices.total_peak_flops(ranks, torch.bfloat16) == 2 * 989e12
    assert devices.total_peak_flops(ranks, torch.float32) == 989e12  # TF32: half
    matmul.allow_tf32 = False
    assert devices.total_peak_flops(ranks, torch.float32) == 0  # not in the table
    assert devices.total_peak_flops(Ranks(), torch.bfloat16) == 0  # a CPU


# --- the dry run

def test_a_dry_run_counts_the_second_copies():
    """DDP's buckets hold the gradients once more; FSDP shards everything."""
    def parts(world_size, distributed="ddp", ema=0.0):
        config = TrainConfig(distributed=distributed, ema=ema)
        return [*dry_run.state_memory(config, torch.nn.Linear(9, 10), world_size).values()]
    assert parts(1) == [400, 400, 800] and parts(1, ema=0.9) == [400, 400, 1200]
    assert parts(2) == [400, 800, 800] and parts(2, "fsdp") == [200, 200, 400]


def test_out_of_memory_is_one_message(monkeypatch, capsys, data_dir):
    """A dry run on a GPU computes a step, which may not fit."""
    def fail(*args):
        raise torch.OutOfMemoryError
    monkeypatch.setattr(dry_run, "measure_step", fail)
    with pytest.raises(CollectiveExit, match="Does not fit: lower batch_size"):
        dry_run.estimate(load_config(None, TINY | dict(data_dir=str(data_dir))))


def test_a_dry_run_times_the_step_with_its_optimizer(monkeypatch, data_dir):
    """On a GPU compiled and static: a micro-batch of the real size, and the update."""
    compiled = []
    seconds_of = dict(update=7.0)
    monkeypatch.setattr(dry_run, "timed", lambda f, device: (
        f(), seconds_of.get(f.__name__, 1.0))[1])
    monkeypatch.setattr(dry_run, "compile_model", lambda *given: compiled.append(given))
    c = load_config(None, TINY | dict(data_dir=str(data_dir)))
    data, cpu = open_token_data(c, Ranks()), Ranks()
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=256, block_size=16))
    ranks = Ranks(device=types.SimpleNamespace(type="cuda"))
    monkeypatch.setattr(data.train, "get_batch", lambda device, step, get=data.train.get_batch: get(
        cpu.device, step))
    monkeypatch.setattr(dry_run, "load_model_type", lambda name: types.SimpleNamespace(
        build_model=lambda config, data: model))
    monkeypatch.setattr(model, "to", lambda device: model)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**30)
    seconds, activations = dry_run.measure_step(c, data, ranks, torch.float32, True, 2**30)
    state = sum(dry_run.state_memory(c, model, 1).values())
    assert activations == 2**30 - state
    assert compiled == [(model, ranks.device)]
    assert seconds == 2 * 1.0 + 7.0  # two micro-batches are accumulated


# --- several GPUs

@pytest.mark.parametrize("ranks", [8, 512])
def test_collectives_of_fsdp_and_muon(ranks):
    """Four blocks and the rest, gathered forward and (but for the last) backward; one norm."""
    done = python("-c", f"import json, proofs; print(json.dumps(proofs.collectives({ranks})))",
                  cwd=REPO / "tests/gpu")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["passes"] == {"_allgather_base_": 9, "_reduce_scatter_base_": 5}
    assert found["clip"] == {"all_reduce": 1}
    assert sum(found["update"].values()) <= 6, found


@pytest.mark.ci
def test_a_graph_under_ddp_ends_where_its_gradients_are_sent():
    """A block has 28 MB of gradients, a bucket 25: each goes while those below still compute.
    Without the cuts it is one graph: nothing else breaks it."""
    done = python("-c", "import json, proofs; ranks = proofs.fake_ranks(0, 8); print(json.dumps("
                  "[proofs.ddp_graphs(ranks, c) for c in (False, True)]))", cwd=REPO / "tests/gpu")
    assert done.returncode == 0, done.stderr
    (whole,), cut = json.loads(done.stdout)
    assert sum(cut) == whole and 4 < len(cut) <= 7 and max(cut) <= whole // 4, cut


@pytest.mark.parametrize("ranks, n, most", [(8, 24, 24), (64, 24, 24), (40, 24, 24.1), (7, 24, 28)])
def test_muon_gathers_what_it_needs(ranks, n, most):
    """On 64 ranks no more than on 8: 24 matrices."""
    done = python("-c", f"import json, proofs; print(json.dumps(proofs.gathered({ranks}, {n})))",
                  cwd=REPO / "tests/gpu")
    assert done.returncode == 0, done.stderr
    (sent,), updates = json.loads(done.stdout)
    assert n <= sent <= most and updates == n
