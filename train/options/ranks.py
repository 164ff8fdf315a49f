"""The ranks of a run: equal code and settings, bytes sent per step, network speed, slow ranks."""

import hashlib
import math
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist

from train.base.environment import code_digest, environment
from train.base.errors import SetupError
from train.device import blocks, choose_dtype, timed
from train.distributed import gather_objects, is_sharded, max_over_ranks
from train.logger import Clock
from train.optimizer import batches_by_shape, gathered_numel, muon_parameters, working_dtype

# Variables of launchers: the nodes, and the processes, that they have started.
STARTED = {"nodes": ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SKYPILOT_NUM_NODES",
                     "DSTACK_NODES_NUM", "PET_NNODES"),
           "processes": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE",
                         "PMI_SIZE")}
ADVICE = ("each of the others trains a run of its own, or nothing. For one run use a file in "
          "train/launch, or start on every node `torchrun --nnodes=NODES --nproc_per_node=GPUS "
          "--rdzv_backend=c10d --rdzv_endpoint=FIRST_NODE:29500 run_train.py ...`")
DDP_BUCKETS_BYTES = [2**20, 25 * 2**20]  # PyTorch's: the first bucket, and all others
SLOW_FACTOR = 1.2  # of the median time; a rank above it is slow
SLOW_MS = 2        # and at least by this, since short steps vary
SLOW_STEPS = 50    # in a row, before the rank is named


# -----------------------------------------------------------------------------
# before the first step

def check_ranks(config, ranks, log):
    """Log the nodes and processes of a run with log(text), and check that all ranks agree.

    Warns if versions or devices differ, or if a launcher has started more nodes or processes than
    the run. Raises SetupError on all ranks if code or configuration differ. All ranks must call.
    """
    rows = gather_objects(describe_rank(config, ranks) if ranks.world_size > 1 else {}, ranks)
    nodes = len({(row.get("host"), row.get("node")) for row in rows})
    for what, number in (("nodes", nodes), ("processes", ranks.world_size)):
        for name in STARTED[what]:
            if os.environ.get(name, "").isdigit() and int(os.environ[name]) > number:
                log(f"warning: {name} is {os.environ[name]}, and the {what} of this run are "
                    f"{number}: {ADVICE}")
                break
    if ranks.world_size == 1:
        return
    log(f"Ranks: nodes {nodes}, processes {ranks.world_size}")
    keys = [row.pop("keys") for row in rows]
    for row, members in group_ranks(rows):
        log(f"  {members}: " + ", ".join(f"{name} {value}" for name, value in row.items()))
    for text in differences(rows, ("device", "torch", "NCCL", "commit")):
        log(f"warning: different {text}")
    if errors := differences(rows, ["code"]) + differences(keys, keys[0]):
        raise SetupError("the ranks would train different runs; start the same code with the same "
                         "arguments on every node:\n  " + "\n  ".join(errors))


def describe_rank(config, ranks):
    """Return a dict that describes this rank for check_ranks(); unknown values are `None`.

    node: GROUP_RANK. address: the IP address towards MASTER_ADDR. code, configuration: hashes.
    keys: {name: value} of keys that all ranks must have in common: not paths, which may be local.
    """
    on_gpu = ranks.device.type == "cuda"
    keys = {f.name: getattr(config, f.name) for f in fields(config) if not f.metadata.get("path")}
    keys["ranks per copy of the model (set --shard_size)"] = config.replica_size(ranks.world_size)
    address = None
    with (suppress(OSError, KeyError), socket.socket(type=socket.SOCK_DGRAM) as s):
        s.connect((os.environ["MASTER_ADDR"], 1))  # sends nothing, and needs no host name
        address = s.getsockname()[0]
    return dict(
        host=socket.gethostname(), node=os.environ.get("GROUP_RANK"), address=address,
        device=torch.cuda.get_device_name(ranks.device) if on_gpu else str(ranks.device),
        torch=torch.__version__,
        NCCL=torch.cuda.nccl.version() if on_gpu and dist.is_nccl_available() else None,
        commit=environment()["git_commit"], code=code_digest(),
        configuration=hashlib.sha256(repr(keys).encode()).hexdigest()[:8], keys=keys)


def differences(rows, names):
    """Return texts like "torch: 2.8 on rank 0; 2.9 on rank 1" for `names` that differ in `rows`."""
    columns = {name: group_ranks([row.get(name) for row in rows]) for name in names}
    return [f"{name}: " + "; ".join(f"{value} on {members}" for value, members in groups)
            for name, groups in columns.items() if len(groups) > 1]


def group_ranks(values):
    """Return the distinct values with their ranks: [("2.8", "rank 0"), ("2.9", "ranks 1-3")]."""
    groups = {}
    for rank, value in enumerate(values):
        groups.setdefault(repr(value), (value, []))[1].append(rank)
    return [(value, f"ranks {m[0]}-{m[-1]}" if len(m) > 1 and m[-1] - m[0] == len(m) - 1
             else f"rank {', '.join(map(str, m))}") for value, m in groups.values()]


# -----------------------------------------------------------------------------
# the collectives of a step

@dataclass
class Collective:
    """The calls of one collective, e.g. "all_reduce", in a training step.

    ranks: in the process group of rank 0; other groups have the same size and make the same calls.
    nbytes: of all calls together: of the reduced tensor (all_reduce), of the full, not sharded
    tensor (all_gather, reduce_scatter), or of one rank's part (all_to_all).
    """
    kind: str
    ranks: range
    count: int
    nbytes: int


def step_collectives(model, config, world_size, dtype, muon_dtype=torch.bfloat16):
    """Return the Collectives of one optimizer step with all micro-batches; nothing is sent.

    model: on any device, not wrapped or sharded. dtype: of matrix products; muon_dtype: in Muon.
    """
    n = config.accumulation(world_size)
    shard_size = config.replica_size(world_size)
    world = range(world_size)
    shard = range(shard_size)
    found = [Collective("all_reduce", world, n, 8 * (n + 1)),  # requests to stop or save
             Collective("all_reduce", world, 1, 16),  # sums of the loss
             *muon_collectives(model, config, world_size, muon_dtype)]
    if shard_size == 1:
        trained = [p for p in model.parameters() if p.requires_grad][::-1]
        buckets, _ = dist._compute_bucket_assignment_by_size(
            trained, DDP_BUCKETS_BYTES, [False] * len(trained))
        size = sum(4 * p.numel() for p in trained)
        return [*found, Collective("all_reduce", world, len(buckets), size)]
    found.append(Collective("all_reduce", world, 1, 4))  # norm of the gradients
    seen = set()
    for unit in [*blocks(model), model]:  # as distributed.shard(): the root has the rest
        params = [p for p in unit.parameters() if p not in seen]
        seen.update(params)
        trained = padded_numel([p for p in params if p.requires_grad], shard_size)
        gathers = n * (1 if unit is model else 2)  # blocks again in the backward pass
        size = padded_numel(params, shard_size) * (2 if dtype == torch.bfloat16 else 4)
        found.append(Collective("all_gather", shard, gathers, gathers * size))
        if trained:
            found.append(Collective("reduce_scatter", shard, n, n * 4 * trained))
        if trained and shard_size < world_size:
            copies = range(0, world_size, shard_size)
            found.append(Collective("all_reduce", copies, n, n * 4 * trained // shard_size))
    return found


def muon_collectives(model, config, world_size, dtype):
    """Return the Collectives of Muon in a step, ignoring lr_groups; [] for other optimizers."""
    if config.optimizer != "muon":
        return []
    found = []
    shard_size = config.replica_size(world_size)
    names = muon_parameters(model)
    matrices = [p for name, p in model.named_parameters() if name in names and p.requires_grad]
    for batch in batches_by_shape(matrices, sharded=shard_size > 1):
        rows, columns = batch[0].shape[-2:]
        n = sum(p.numel() for p in batch) // (rows * columns)
        if shard_size > 1 and batch[0].dim() == 3:  # each rank has whole matrices
            continue
        if shard_size == 1:
            part = gathered_numel(n, rows * columns, world_size)
            found.append(Collective("all_gather", range(world_size), 1,
                                    world_size * part * dtype.itemsize))
        else:  # there and back; padded to equal numbers of matrices and of rows per rank
            size = -(-n // shard_size) * -(-rows // shard_size) * shard_size * columns
            found.append(Collective("all_to_all", range(shard_size), 2, 2 * size * dtype.itemsize))
    return found


def padded_numel(params, shard_size):
    """Return the element count of `params`, dimension 0 padded to multiples of shard_size."""
    return sum(-(-(*p.shape, 1)[0] // shard_size) * shard_size * math.prod(p.shape[1:])
               for p in params)  # a scalar is one row


def bytes_sent(collectives, per_node):
    """Return the bytes per step that a rank sends within a node, and a node to all other nodes.

    per_node: ranks per node, numbered node by node. Assumes ring algorithms, except for all_to_all.
    """
    within = between = 0.0
    for c in collectives:
        n = len(c.ranks)
        spanned = len({rank // per_node for rank in c.ranks})
        if c.kind == "all_to_all":  # each rank sends 1/n to each
            within += c.nbytes * (n / spanned - 1) / n
            between += c.nbytes * (1 - 1 / spanned) * per_node
            continue
        size = c.nbytes * (2 if c.kind == "all_reduce" else 1)
        within += size * (n - 1) / n if spanned < n else 0
        rings = per_node * spanned / n  # of equal groups, side by side
        between += rings * size * (spanned - 1) / spanned
    return within, between


# -----------------------------------------------------------------------------
# the network

def log_network(config, model, ranks, log):
    """Log the speed of an all-reduce within and between nodes, and the time to send a step's bytes.

    model: not wrapped or sharded. log(text): not called for a single rank, or if nodes have
    different numbers of ranks. All ranks must call.
    """
    world_size = ranks.world_size
    per_node, *others = set(gather_objects(ranks.ranks_per_node, ranks))
    if world_size == 1 or others:
        return
    numbers = torch.arange(world_size).view(-1, per_node)
    dtype, _ = choose_dtype(config.dtype, ranks.device)
    sent = bytes_sent(step_collectives(model, config, world_size, dtype,
                                       working_dtype(ranks.device)), per_node)
    for place, groups, size, senders in (("within a node", numbers, sent[0], 1),
                                         ("between nodes", numbers.T, sent[1], per_node)):
        if groups.size(1) > 1:
            speed = senders * all_reduce_speed(groups.tolist(), ranks.device)
            log(f"All-reduce {place}: {speed / 1e9:.3g} GB/s; a step sends {size / 1e6:,.1f} MB, "
                f"{1000 * size / speed:.3g} ms")


def all_reduce_speed(groups, device):
    """Return the bytes per second that each rank sends while all groups run an all-reduce.

    groups: lists of ranks, of equal length; each rank is in exactly one. All ranks must call.
    """
    group = dist.new_subgroups_by_enumeration(groups)[0] if len(groups) > 1 else None
    x = torch.zeros(2**24 if device.type == "cuda" else 2**16, device=device)
    dist.all_reduce(x, group=group)  # the first one connects
    seconds = timed(lambda: [dist.all_reduce(x, group=group) for _ in range(3)], device)
    if group is not None:
        dist.destroy_process_group(group)
    return 3 * x.nbytes * 2 * (1 - 1 / len(groups[0])) / seconds


# -----------------------------------------------------------------------------
# slow ranks

class RankClock(Clock):
    """A Clock that also measures how long each rank works per step, to find slow ranks.

    It adds hooks to `model` and `optimizer`. A rank's work in a step ends with the last gradient;
    the time in max_over_ranks() is left out. With FSDP, ranks wait for each other in every block:
    only the time until the forward pass, e.g. for data, is measured.
    """

    def __init__(self, model, optimizer, ranks):
        super().__init__()
        self.ranks = ranks
        self.spans = []     # [(begin, end), (begin, end) of waits in between ...] for each step
        self.waits = []     # those of this step
        self.begin = None   # end of the previous step, when all ranks have the same numbers
        self.end = None
        self.slow_rank = None  # slow in every lap since the step slow_since (infinite: was named)
        self.slow_since = math.inf
        optimizer.register_step_pre_hook(self.end_step)
        first = next(p for p in model.parameters() if p.requires_grad)  # has the last gradient
        self.sharded = is_sharded(first)
        if self.sharded:
            model.register_forward_pre_hook(self.end_work, prepend=True)
        else:
            first.register_post_accumulate_grad_hook(self.end_work)

    def now(self):
        if self.ranks.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end_work(self, *_):
        if not (self.sharded and self.end):  # the first forward pass, or the last gradient
            self.end = self.now()

    def max_over_ranks(self, value):
        """Return the maximum of an int over all ranks; all must call, between two micro-batches."""
        begin = self.now()
        value = max_over_ranks(value, self.ranks)
        if not self.sharded:  # otherwise the measured time is over
            self.waits.append((begin, self.now()))
        return value

    def end_step(self, *_):
        if self.begin and self.end:
            self.spans.append([(self.begin, self.end), *self.waits])
        self.waits = []
        self.begin = self.now()
        self.end = None

    def lap(self, it, batches, warn):
        """Return the mean seconds per step as Clock.lap() does, and set self.numbers.

        numbers, for the log line, equal on all ranks: work_ms, milliseconds of work in a typical
        (median) step of the median rank; slowest_rank; slowest_ms, of the slowest rank; {} if
        nothing was measured yet. warn(text): called as by Clock.lap(), or if one rank has been slow
        for many steps. All ranks must call, at the end of step `it`.
        """
        start = self.it
        per_step = super().lap(it, batches, warn)
        on_gpu = self.ranks.device.type == "cuda"
        ms = [[a.elapsed_time(b) if on_gpu else 1000 * (b - a) for a, b in spans]
              for spans in self.spans]
        ms = [total - sum(waits) for total, *waits in ms] or [0.0]
        self.spans = []
        # A median, since one step may include an evaluation.
        all_work = gather_objects(sorted(ms)[len(ms) // 2], self.ranks)
        median = sorted(all_work)[(len(all_work) - 1) // 2]
        slowest = max(all_work)
        rank = all_work.index(slowest)
        # Without numbers until a whole step is measured, at the start.
        self.numbers = dict(work_ms=median, slowest_ms=slowest,
                            slowest_rank=rank) if slowest else {}
        slow_rank = rank if slowest >= SLOW_FACTOR * median + SLOW_MS else None
        if slow_rank != self.slow_rank:
            self.slow_rank = slow_rank
            self.slow_since = start
        if slow_rank is not None and it + 1 - self.slow_since >= SLOW_STEPS:
            warn(f"rank {rank} is slow since iter {self.slow_since}, and all others wait for it: "
                 f"it works {slowest:.1f} ms per step, the median rank {median:.1f} ms")
            self.slow_since = math.inf
        return per_step
