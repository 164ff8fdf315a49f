"""The plan of --dry_run --world_size, beside the collectives of real steps in a fake group."""

import collections
import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import REPO
from test_distributed import in_ranks

import run_train
from model.gpt import GPT, GPTConfig
from train.config import FIELDS, TrainConfig
from train.device import PEAK_TFLOPS
from train.distributed import Ranks
from train.optimizer import working_dtype
from train.options.ranks import bytes_sent, padded_numel, step_collectives
from train.tools.plan import GPUS, activation_bytes, costs, state_memory

KINDS = {"allreduce_": "all_reduce", "all_reduce": "all_reduce",
         "_allgather_base_": "all_gather", "all_gather_into_tensor": "all_gather",
         "_reduce_scatter_base_": "reduce_scatter"}


def fake_step(options, world_size):
    """Do steps as rank 0 of a fake group; ({kind: number}, {kind: bytes}) of the third one, and the
    Collectives of the plan."""
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from train import setup
    from train.options import ranks as comparison
    from train.train import train_step
    sizes = collections.Counter()

    class Bytes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            space, _, name = function._schema.name.partition("::")
            if space == "c10d":
                tensors = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
                sizes[KINDS[name]] += max(t.nbytes for t in tensors)
            if name == "all_gather_into_tensor":
                sizes[KINDS[name]] += args[0].nbytes * args[1]  # of how many ranks
            return function(*args, **(kwargs or {}))

    def send_bucket(_, bucket):  # the fake group has no results, which DDP's own hook returns
        dist.all_reduce(bucket.buffer())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future
    comparison.check_ranks = lambda *args: None  # a fake group gathers nothing
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    ranks = Ranks(0, world_size, torch.device("cpu"), dist.new_group(backend="fake"))
    with setup.open_run(TrainConfig(**options), ranks) as run:
        if run.is_ddp:
            run.model.register_comm_hook(None, send_bucket)
        for _ in range(2):  # DDP divides its buckets anew after the first step
            train_step(run)
        modes = CommDebugMode()
        # Which module is computed: it loses count in a second micro-batch.
        modes.advanced_module_tracker._fw_set_module_hook = lambda *_: None
        with modes, Bytes():
            run.signals.agree(ranks)
            train_step(run)
        planned = step_collectives(run.raw_model, run.config, world_size, torch.float32,
                                   working_dtype(ranks.device))
    counts = collections.Counter()
    for function, number in modes.get_comm_counts().items():
        counts[KINDS[str(function).rpartition(".")[2].strip("'>)")]] += number
    return counts, sizes, planned


def cases():
    """Muon on many ranks takes longest: only with -m slow, like most of those on 64 ranks."""
    for optimizer in ("adamw", "muon"):
        for method, world_size in (("ddp", 8), ("ddp", 64), ("ddp", 512), ("fsdp", 8), ("fsdp", 64),
                                   ("fsdp", 512), ("hsdp", 64), ("hsdp", 512)):
            slow = (optimizer == "muon" and world_size == 512
                    or world_size == 64 and method != "hsdp")
            yield pytest.param(optimizer, method, world_size, marks=[pytest.mark.slow] * slow)


@pytest.mark.ci
@pytest.mark.parametrize("optimizer, method, world_size", cases())
def test_the_collectives_of_a_step_are_those_of_the_plan(data_dir, tmp_path, optimizer, method,
                                                         world_size):
    """On a CPU, PyTorch has an all-gather in place of Muon's all-to-all."""
    options = dict(data_dir=str(data_dir), out_dir=str(tmp_path), n_layer=4, n_head=4, n_embd=384,
                   n_hidden=1536, block_size=8, batch_size=1, max_iters=3, eval_interval=0,
                   gradient_accumulation_steps=2 * world_size, distributed=method, device="cpu",
                   shard_size=8 if method == "hsdp" else None, dtype="float32", compile="false",
                   max_epochs=100, optimizer=optimizer)
    (counts, sizes, planned), = in_ranks(1, fake_step, options, world_size)
    for kind in set(KINDS.values()):
        parts = [c for c in planned if c.kind == kind]
        if kind == "all_gather":
            parts += [dataclasses.replace(c, nbytes=c.nbytes * len(c.ranks)) for c in planned
                      if c.kind == "all_to_all"]
        assert counts[kind] == sum(c.count for c in parts), kind
        assert sizes[kind] == pytest.approx(sum(c.nbytes for c in parts), rel=0.02, abs=64), kind
    assert method != "ddp" or counts["all_reduce"] == 6  # three buckets
    if optimizer == "muon":  # 16 square matrices, 8 with 1536 rows or columns
        muon = [c for c in planned if c.kind == ("all_gather" if method == "ddp" else "all_to_all")]
        assert [c.count for c in muon] == ([1, 1] if method == "ddp" else [2, 2, 2])


def gpt_124m():
    with torch.device("meta"):
        return GPT(GPTConfig(vocab_size=50304, n_layer=12, n_head=12, n_embd=768, n_hidden=3072,
                             block_size=1024, mlp="gelu"))


def test_the_bytes_of_a_step_in_closed_form():
    model = gpt_124m()
    P = sum(p.numel() for p in model.parameters())
    root = model.wte.weight.numel() + model.ln_f.weight.numel()
    c = TrainConfig(batch_size=64, gradient_accumulation_steps=1)
    for W, nodes in ((8, 1), (64, 8), (64, 4)):
        ddp = step_collectives(model, c, W, torch.bfloat16)
        within, between = bytes_sent(ddp, W // nodes)
        assert within == pytest.approx(2 * (W - 1) / W * 4 * P, rel=1e-5)
        assert between == pytest.approx(2 * (nodes - 1) / nodes * 4 * P, rel=1e-5)
        fsdp = step_collectives(model, c.replace(distributed="fsdp"), W, torch.bfloat16)
        within, between = bytes_sent(fsdp, W // nodes)
        assert within == pytest.approx((W - 1) / W * (8 * P - 2 * root), rel=1e-5)
        S = W // nodes
        changed = c.replace(distributed="hsdp", shard_size=S)
        hsdp = step_collectives(model, changed, W, torch.bfloat16)
        within, between = bytes_sent(hsdp, S)
        assert within == pytest.approx((S - 1) / S * (8 * P - 2 * root), rel=1e-5)
        # Each rank of a node reduces its shard with those of the other nodes.
        assert between == pytest.approx(2 * (nodes - 1) / nodes * 4 * P, rel=1e-5)


def test_the_bytes_of_muon_by_hand():
    """GPT-2: 48 square matrices of attention, 24 of the MLP, each 4 times as large. 16 ranks send
    3 and 2 (1.5) of them to all others; shards are exchanged there and back, in bfloat16."""
    model = gpt_124m()
    c = TrainConfig(batch_size=64, gradient_accumulation_steps=1, optimizer="muon")
    adamw = c.replace(optimizer="adamw")
    n = 768 * 768

    def more(**changes):
        return [np.subtract(*(bytes_sent(step_collectives(model, config.replace(**changes), 16,
                                                          torch.bfloat16), per_node)
                              for config in (c, adamw))) for per_node in (16, 8)]
    one, two = more()
    sent = 2 * n * (3 + 4 * 2) * 16
    assert one == pytest.approx([15 / 16 * sent, 0]) and two == pytest.approx([15 / 16 * sent,
                                                                               sent / 2])
    one, two = more(distributed="fsdp")
    held = 2 * 2 * n * (48 + 4 * 16 * 2) / 16  # 12 and 12 MLP matrices of different shapes: 16 each
    assert one == pytest.approx([15 / 16 * held, 0])
    assert two == pytest.approx([7 / 16 * held, 8 * held / 2])
    P = sum(p.numel() for p in model.parameters())  # a momentum in place of two moments
    assert state_memory(c, model, 16)["optimizer"] == 8 * P - 4 * (48 + 24 * 4) * n


def test_costs_of_ddp_by_hand():
    model = gpt_124m()
    P = sum(p.numel() for p in model.parameters())
    c = TrainConfig(batch_size=16, gradient_accumulation_steps=32)
    W, flops = 64, 512 * 1024 * 6 * P
    found = costs(c, model, GPUS["h100"], torch.bfloat16, flops, 1e8, W, 8)
    computing = flops / (64 * 0.4 * 989e12)
    sending = max(2 * 63 / 64 * 4 * P / 450e9, 2 * 7 / 8 * 4 * P / 400e9) / 0.8
    sending += found["collectives"] * 6e-5
    assert found["seconds"] == pytest.approx(computing + max(0, sending - computing * 2 / 3), 1e-4)
    assert found["efficiency"] == 1 and found["sensible"]  # sent while the GPUs compute
    slow = dataclasses.replace(GPUS["h100"], network=5)  # GB/s
    found = costs(c, model, slow, torch.bfloat16, flops, 1e8, W, 8)
    sending += 2 * 7 / 8 * 4 * P / 0.8 * (1 / 40e9 - 1 / 400e9)
    assert found["seconds"] == pytest.approx(computing / 3 + sending, 1e-4)
    assert found["efficiency"] == pytest.approx(computing / found["seconds"], 1e-4)
    assert not found["sensible"]
    assert found["memory"] == pytest.approx((4 + 8 + 8 + 2) * P + 8 * 1e8, rel=1e-6)
    assert found["save"] == 12 * P and found["stall"] == pytest.approx(12 * P / 64e9 / 0.8)


def test_memory_of_fsdp_by_hand():
    """Shards, and the gathered weights and gradients of the root and of blocks."""
    model = gpt_124m()
    P = sum(p.numel() for p in model.parameters())
    root = model.wte.weight.numel() + model.ln_f.weight.numel()
    block = (P - root) // 12
    c = TrainConfig(batch_size=16, gradient_accumulation_steps=32, distributed="fsdp")
    W, size = 64, 1e8
    memory = (4 + 4 + 8) * P / W + 2 * (root + 2 * block) + 4 * (root + block) + 8 * size

    def plan(dtype=torch.bfloat16, **changes):
        gpu = dataclasses.replace(GPUS["h100"], **changes)
        return costs(c, model, gpu, dtype, 512 * 1024 * 6 * P, size, W, 8)
    assert plan()["memory"] == pytest.approx(memory, rel=1e-6)
    wider = 2 * (root + 2 * block)  # distributed.shard() gathers float32 for float16
    assert plan(torch.float16)["memory"] == pytest.approx(memory + wider, rel=1e-6)
    # Sensible: fits into 92% of the memory.
    assert not plan(memory=memory / 0.92 / 2**30 * 0.999)["sensible"]
    assert plan(memory=memory / 0.92 / 2**30 * 1.001, network=1e6)["sensible"]


def test_activations_are_what_autograd_keeps():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(10, 30), torch.nn.Linear(30, 20)

        def forward(self, x):
            return (self.b(self.a(x).relu()) ** 2).mean(), {}
    with torch.device("meta"):
        model = Two()
    # The input, the result of relu and the argument of the square.
    assert activation_bytes(model, (torch.zeros(5, 10),), torch.float32) == 4 * (10 + 30 + 20)


def test_a_scalar_parameter_is_one_row():
    params = torch.nn.Parameter(torch.tensor(1.0)), torch.nn.Parameter(torch.ones(3, 5))
    assert [padded_numel(params, n) for n in (1, 2)] == [16, 22]


def test_a_plan_is_printed_and_nothing_is_written(data_dir, tmp_path, capsys):
    argv = ["--config", str(REPO / "train/config_test.yaml"), "--dry_run", f"--data_dir={data_dir}",
            f"--out_dir={tmp_path / 'out'}", "--world_size=8", "--nodes=2", "--batch_size=16"]
    assert run_train.main(argv) == 0
    printed = capsys.readouterr().out
    assert "Plan for 2 x 4 H100" in printed
    rows = {line.split()[0]: line.split() for line in printed.splitlines() if line[:1].isalpha()}
    assert {"ddp", "fsdp", "hsdp"} < rows.keys() and rows["ddp"][6].endswith("%")
    assert not (tmp_path / "out").exists()
    assert run_train.main([*argv, "--lr_groups={h: 0}"]) == 0  # gradients of the embedding only
    [frozen] = [line.split() for line in capsys.readouterr().out.splitlines()
                if line.startswith("ddp")]
    assert float(frozen[3]) < float(rows["ddp"][3])
    assert run_train.main([*argv, "--nodes=3"]) == 2
    assert "8 GPUs cannot be divided among 3 nodes" in capsys.readouterr().err
    assert run_train.main([*argv, "--world_size=6", "--gpu=h1000"]) == 2
    printed = capsys.readouterr().err
    assert "not divisible by 6 ranks" in printed and "must be one of a100, h100" in printed


def test_every_gpu_of_the_key_is_in_the_table():
    assert FIELDS["gpu"].metadata["choices"] == list(GPUS)
    assert {gpu.name for gpu in GPUS.values()} < PEAK_TFLOPS.keys()
