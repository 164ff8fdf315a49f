"""What ranks find out about each other: before the first step, and while they train."""

import json
import os
import re
import time
import types
from datetime import timedelta

import pytest
import torch
from test_distributed import in_ranks, options

from train.base import environment
from train.base.errors import SetupError, UserError
from train.base.files import lock_folder
from train.config import TrainConfig
from train.distributed import Ranks, create_store, process_group
from train.options import ranks as comparison


def compared(folder):
    """[(what differs, the lines, the error)] as rank 1 differs from rank 0 in one thing each."""
    rank = int(os.environ["RANK"])
    found = []
    with process_group(TrainConfig(device="cpu")) as ranks:
        for case in ("", "key", "path", "version", "code", "node", "hsdp"):
            config, lines, error = TrainConfig(device="cpu"), [], ""
            patch = pytest.MonkeyPatch()
            if rank and case == "key":
                config.max_iters, config.lr_groups = 7, {"wte": 0.5}
            elif rank and case == "path":
                config.data_dir = config.out_dir = "/elsewhere"
            elif rank and case == "version":
                patch.setattr(torch, "__version__", "0.0.1")
            elif case == "code":  # the same name, one byte more
                os.makedirs(f"{folder}/{rank}/model")
                with open(f"{folder}/{rank}/model/new.py", "w") as f:
                    f.write("x = 1" + " " * rank)
                patch.setattr(environment, "__file__", f"{folder}/{rank}/train/base/a.py")
            elif case == "node":
                patch.setenv("GROUP_RANK", str(rank))
            elif case == "hsdp":  # nodes with different numbers of ranks
                config.distributed = "hsdp"
                patch.setenv("LOCAL_WORLD_SIZE", str(rank + 1))
            try:
                comparison.check_ranks(config, ranks, lines.append)
            except SetupError as refused:
                error = str(refused)
            patch.undo()
            found.append((case, lines, error))
    return found


def measured(sizes):
    """The lines about the network, with this number of ranks on the node of each rank."""
    lines = []
    os.environ["LOCAL_WORLD_SIZE"] = str(sizes[int(os.environ["RANK"])])
    with process_group(TrainConfig(device="cpu")) as ranks:
        comparison.log_network(TrainConfig(device="cpu"), torch.nn.Linear(2, 2), ranks,
                               lines.append)
    return lines


def test_a_network_without_equal_nodes_is_not_measured():
    assert in_ranks(3, measured, (2, 2, 1)) == [[], [], []]  # a rank that measures waits for ever
    assert [len(lines) for lines in in_ranks(2, measured, (1, 1))] == [1, 1]
    comparison.log_network(TrainConfig(), None, Ranks(), pytest.fail)


def test_ranks_that_do_not_start_are_named(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    agent = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_PORT", str(agent.port))
    with pytest.raises(SetupError, match=r"within 0:00:00.3.* did not start: \{1, 2\}"):
        create_store(0, 3, timedelta(seconds=0.3))


def test_what_differs_between_ranks_is_named(tmp_path):
    first, second = in_ranks(2, compared, str(tmp_path))
    assert first == second  # both raise
    found = {case: (lines, error) for case, lines, error in first}
    lines, error = found[""]
    assert not error and lines[0] == "Ranks: nodes 1, processes 2" and len(lines) == 2
    for part in ("ranks 0-1: ", "address 127.0.0.1", "device cpu", f"torch {torch.__version__}"):
        assert part in lines[1]
    error = found["key"][1]
    assert "max_iters: 5000 on rank 0; 7 on rank 1" in error
    assert "lr_groups: {} on rank 0; {'wte': 0.5} on rank 1" in error and error.count("\n") == 2
    assert not found["path"][1] and len(found["path"][0]) == 2
    lines, error = found["version"]
    assert not error and f"warning: different torch: {torch.__version__} on rank 0; 0.0.1 on " in (
        "\n".join(lines))
    assert "code: " in found["code"][1] and "on rank 0; " in found["code"][1]
    assert "(set --shard_size): 1 on rank 0; 2 on rank 1" in found["hsdp"][1]
    lines, error = found["node"]
    assert not error and lines[0] == "Ranks: nodes 2, processes 2" and len(lines) == 3


@pytest.mark.parametrize("name, value, warned", [
    ("SLURM_JOB_NUM_NODES", "2", True), ("SLURM_NTASKS", "8", True), ("SLURM_NTASKS", "1", False),
    ("SKYPILOT_NUM_NODES", "4", True), ("PET_NNODES", "1:4", False), ("PMI_SIZE", "2", True)])
def test_as_many_equal_runs_as_nodes_are_not_unnoticed(monkeypatch, name, value, warned):
    lines = []
    monkeypatch.setenv(name, value)
    comparison.check_ranks(TrainConfig(), Ranks(), lines.append)
    assert len(lines) == warned
    for line in lines:
        assert f"{name} is {value}" in line and "torchrun --nnodes" in line


def test_a_folder_that_another_machine_uses(tmp_path, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    with lock_folder(tmp_path):
        monkeypatch.setattr("socket.gethostname", lambda: "node8")
        with pytest.raises(UserError, match="on node7; .*several machines: torchrun --nnodes"):
            lock_folder(tmp_path)


def late_rank(options, late):
    """Train while one rank works 60 ms more per step."""
    from train import train as training
    comparison.SLOW_STEPS = 8
    seed_step = training.seed_step

    def slow(seed, it, ranks):
        time.sleep(0.06 * (ranks.rank == late))
        seed_step(seed, it, ranks)
    training.seed_step = slow
    training.train(TrainConfig(**options))


@pytest.mark.ci
@pytest.mark.parametrize("method", ["ddp", "fsdp"])
def test_a_slow_rank_is_named(data_dir, tmp_path, method):
    changes = dict(n_layer=1, batch_size=2, gradient_accumulation_steps=2, max_iters=16,
                   log_interval=4, eval_interval=0, distributed=method)
    in_ranks(2, late_rank, options(data_dir, tmp_path, **changes), 1)
    with open(tmp_path / "metrics.jsonl") as f:
        records = [json.loads(line) for line in f]
    assert "work_ms" not in records[0]  # nothing is measured yet
    for record in records[1:]:  # the first step is not compared
        assert record["slowest_rank"] == 1 and record["slowest_ms"] > record["work_ms"] + 20
        assert record["time_ms"] > 60  # of all, since they wait for each other
    log = (tmp_path / "train.log").read_text()
    assert log.count("rank 1 is slow since iter ") == 1 and "rank 0 is slow" not in log


def slow_forward(options):
    """Train while rank 1 works 10 ms more per micro-batch."""
    from model.gpt import GPT
    from train import train as training
    forward = GPT.forward

    def slow(self, *batch):
        time.sleep(0.01 * int(os.environ["RANK"]))
        return forward(self, *batch)
    GPT.forward = slow
    training.train(TrainConfig(**options))


def test_the_wait_between_micro_batches_is_no_work(data_dir, tmp_path):
    in_ranks(2, slow_forward, options(data_dir, tmp_path, n_layer=1, batch_size=1, max_iters=4,
                                      gradient_accumulation_steps=32, log_interval=4,
                                      eval_interval=0))
    with open(tmp_path / "metrics.jsonl") as f:
        last = [json.loads(line) for line in f][-1]
    # 16 micro-batches: rank 0 waits for 15 of them before its own last one.
    assert last["slowest_rank"] == 1 and last["slowest_ms"] > last["work_ms"] + 130


@pytest.mark.parametrize("interval", [10, 51, 250])
def test_a_rank_that_becomes_slow_is_named_once_at_any_interval(monkeypatch, interval):
    work, said = [1.0, 2.5], []  # milliseconds: short steps vary by more than a fifth
    monkeypatch.setattr(comparison, "gather_objects", lambda value, ranks: work)
    layer = torch.nn.Linear(2, 2)
    clock = comparison.RankClock(layer, torch.optim.SGD(layer.parameters()), Ranks(0, 2))
    clock.start(0)
    for it in range(2000):
        work[1] = 100.0 if it >= 500 else 2.5
        if it % interval == 0:
            clock.lap(it, types.SimpleNamespace(seconds=0.0), said.append)
    since, = (int(re.match(r"rank 1 is slow since iter (\d+)", text)[1]) for text in said)
    assert abs(since - 500) <= interval
