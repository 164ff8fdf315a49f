"""Where the run computes: device, dtype, ranks, DDP and FSDP2, reductions, seeds.

`python run_train.py` is rank 0 of 1; under torchrun the same code is one rank of several. Nothing
here knows what is trained.
"""

import contextlib
import inspect
import os
import pickle
import random
import re
import threading
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from train.base.errors import CollectiveExit, SetupError
from train.base.memory import keep_freed_memory
from train.device import get_device, set_num_threads, use_flash_attention_3


@dataclass
class Ranks:
    """Who this process is among the processes of the run."""
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")
    control: object = None  # a gloo group for decisions made on the host, also beside NCCL

    @property
    def is_main(self):
        return self.rank == 0


# -----------------------------------------------------------------------------
# seeds

def set_seed(seed: int, deterministic: bool = False,
             cudnn_benchmark: bool | None = None) -> None:
    """Seed python, numpy and torch (CPU and all GPUs); with `deterministic` also forbid algorithms
    whose result depends on timing (https://pytorch.org/docs/stable/notes/randomness.html)."""
    os.environ["PYTHONHASHSEED"] = str(seed % 2**32)  # for child processes; ours has started
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # torch.manual_seed notes a traceback for each accelerator that is not there: 8 ms
    (torch.manual_seed if torch.accelerator.is_available() else
     torch.default_generator.manual_seed)(seed % 2**63)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first CUDA call
        torch.utils.deterministic.fill_uninitialized_memory = False  # costs time, changes nothing
    if torch.are_deterministic_algorithms_enabled() != deterministic:
        torch.use_deterministic_algorithms(deterministic)  # imports the compiler: a second
    torch.backends.cudnn.deterministic = deterministic
    benchmark = not deterministic if cudnn_benchmark is None else cudnn_benchmark
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cuda.matmul.allow_tf32 = not deterministic
    torch.backends.cudnn.allow_tf32 = not deterministic


def seed_step(seed, it, ranks):
    """What torch draws in step `it` on this rank, on the CPU and the device, is a function of these
    alone. torch.manual_seed would do it, but for each accelerator that is not there it notes a
    traceback, which takes half a millisecond in all."""
    number = ((seed * 1_000_003 + it) * 65_537 + ranks.rank) % 2**63
    torch.default_generator.manual_seed(number)
    if ranks.device.type != "cpu":
        getattr(torch, ranks.device.type).manual_seed(number)


# -----------------------------------------------------------------------------
# the process group

ENVIRONMENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextlib.contextmanager
def process_group(config):
    """The Ranks of this process; under torchrun in a process group (NCCL on CUDA, else gloo)."""
    set_num_threads(config)
    env = read_environment()
    rank, local_rank, world_size, local_world_size = env or (0, 0, 1, 1)
    device = get_device(config.device, local_rank, local_world_size)
    if device.type == "cpu":
        keep_freed_memory()
    use_flash_attention_3(config, device)
    if env is None:
        yield Ranks(device=device)
        return
    backend = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        exit_with_parent()
    timeout = timedelta(seconds=config.dist_timeout)
    store = fresh_store(rank, world_size, timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout,
                            device_id=device if backend == "nccl" else None)
    control = (dist.group.WORLD if backend == "gloo" else
               dist.new_group(backend="gloo", timeout=timeout))
    try:
        yield Ranks(rank, local_rank, world_size, device, control)
    except CollectiveExit:
        leave(control)
        raise
    else:  # after any other error the peers may be gone: do not wait for them
        leave(control)


def read_environment():
    """(RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE) as torchrun sets them; None without it.
    Raises SetupError where they are half set: such ranks would train without each other."""
    env = {k: os.environ.get(k) for k in ENVIRONMENT}
    missing = [k for k, v in env.items() if not v]
    if set(ENVIRONMENT[:3]) <= set(missing):
        return None
    found = ", ".join(f"{k}={v}" for k, v in env.items() if v)
    advice = "start ranks with `torchrun --nproc_per_node=N run_train.py ...`, or unset these"
    if missing:
        raise SetupError(f"environment: {found} set, {', '.join(missing)} not; {advice}")
    try:
        rank, local_rank, world_size = (int(env[k]) for k in ENVIRONMENT[:3])
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE") or world_size)
    except ValueError:
        raise SetupError(f"environment: expected whole numbers, got {found}; {advice}") from None
    if not 0 <= rank < world_size:
        raise SetupError(f"environment: RANK must be below WORLD_SIZE, got {found}; {advice}")
    return rank, local_rank, world_size, local_world_size


def fresh_store(rank, world_size, timeout):
    """The store through which the ranks find each other, with a name of its own for this start.

    torchrun keeps one store over restarts, in which a rank that is early finds the addresses of the
    dead and fails (pytorch#135712, #167288; with PyTorch 2.13 in every second restart or so). So
    rank 0 names the start, and tells the name to each rank that shows a mark no dead one had.
    """
    store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
    mark, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    if rank:
        store.set(f"mark of {rank}", mark)
        name = store.get(f"name for {mark}").decode()  # waits for it
        store.set(f"{name} known to {rank}", "")
        return dist.PrefixStore(name, store)
    missing = set(range(1, world_size))
    while missing:
        for other in sorted(missing):
            if store.check([f"{mark} known to {other}"]):
                missing.discard(other)
            elif store.check([f"mark of {other}"]):
                store.set(f"name for {store.get(f'mark of {other}').decode()}", mark)
        if time.monotonic() > deadline:
            raise SetupError(f"dist_timeout: within {timeout} these ranks did not start: {missing}")
        time.sleep(0.01)
    return dist.PrefixStore(mark, store)


_LEFT = []  # process groups of the past, see leave()


def leave(control):
    """Wait until every rank is done, then take the process group down."""
    dist.barrier(group=control)
    # Kept, or DDP's C++ part would be its last owner and hold the GIL while it ends gloo's threads,
    # which may wait for the GIL to drop a tensor: 1 run in 15 hung here (pytorch#56297, #179291).
    _LEFT.append(dist.group.WORLD)
    dist.destroy_process_group()


def exit_with_parent(interval=2.0):
    """End this process when torchrun dies: after a kill -9 its ranks would go on, orphaned."""
    parent = os.getppid()

    def watch():
        while os.getppid() == parent:
            time.sleep(interval)
        with contextlib.suppress(OSError):  # whoever read our output may be gone as well
            os.write(2, f"[rank {os.environ['RANK']}] torchrun (pid {parent}) is gone: leaving\n"
                     .encode())
        os._exit(1)
    threading.Thread(target=watch, daemon=True).start()


def all_gather_vectors(row, ranks):
    """The 1-D CPU tensors of all ranks as rows, in the order of the ranks. (n,) -> (W, n)."""
    if ranks.world_size == 1:
        return row[None]
    rows = row.new_empty(ranks.world_size, len(row))
    dist.all_gather(list(rows), row, group=ranks.control)
    return rows


def max_over_ranks(values, ranks):
    """The largest of each of a list of integers (or of an integer) over all ranks, on all ranks:
    how ranks agree on a decision."""
    tensor = torch.tensor(values)
    if ranks.world_size > 1:
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=ranks.control)
    return tensor.tolist()


def broadcast_from_rank0(make, ranks):
    """What rank 0 gets from make(), on every rank; what make() raises is raised on every rank."""
    box = [None, None]
    if ranks.is_main:
        try:
            box[0] = make()
        except Exception as error:
            box[1] = error
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:  # it cannot travel: its words can
                box[1] = RuntimeError(f"rank 0: {type(error).__name__}: {error}")
    if ranks.world_size > 1:
        dist.broadcast_object_list(box, src=0, group=ranks.control)
    if box[1] is not None:
        raise box[1]
    return box[0]


# -----------------------------------------------------------------------------
# the model over ranks

def wrap_ddp(model, ranks):
    """The model, under DDP where there are several ranks. Buffers are not sent around: they change
    by what is the same on all ranks, or not at all."""
    if ranks.world_size == 1:
        return model
    ids = [ranks.device.index] if ranks.device.type == "cuda" else None
    names = inspect.signature(DistributedDataParallel).parameters
    sync = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True,
                                   **{sync: False})  # the older name


def blocks(model):
    """The blocks of a model: what its ModuleLists hold."""
    return [block for m in model.modules() if isinstance(m, nn.ModuleList) for block in m]


def shard(model, ranks, dtype, seed, initial):
    """FSDP2 (https://pytorch.org/docs/stable/distributed.fsdp.fully_shard.html) of a model on the
    meta device: every block is gathered just before it computes, the rest (embedding, head) with
    the root. Then it is filled, one tensor at a time, by model.initial(name, shape, seed), so that
    no rank ever holds all of it. Raises SetupError for a parameter that this does not know."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    if scalars := [name for name, p in model.named_parameters() if p.dim() == 0]:
        raise SetupError(f"FSDP cannot share out a parameter of one number: {', '.join(scalars)}; "
                         "make it one of shape (1,), or take --distributed ddp")
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    low = dtype if dtype == torch.bfloat16 else None
    options = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy(low, torch.float32,
                                                             cast_forward_inputs=False))
    for block in blocks(model):
        fully_shard(block, **options)
    fully_shard(model, **options)
    empty = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    # Not to_empty(): tables that are real already (RoPE's, say) keep their numbers.
    model._apply(lambda t: (torch.empty_like(t, device=ranks.device) if t.is_meta
                            else t.to(ranks.device)))
    tensors, unknown = model.state_dict(), []
    for name in empty:
        value = initial(name, tensors[name].shape, seed)
        if value is None:
            unknown.append(name)
        else:
            assign(tensors[name], value)
    if unknown:
        kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in unknown))
        raise SetupError(
            f"with FSDP no module makes values of its own, and {type(model).__name__}.initial(name,"
            f" shape, seed) does not know {', '.join(kinds)}: give it a line for each, such as\n"
            f"    if name.endswith({kinds[0].rpartition('*')[2]!r}): return torch.zeros(shape)\n"
            "or take --distributed ddp")
    return model


def reshard(model):
    """Let go of what FSDP gathered of the root of `model` in a forward pass, and keeps for the
    backward pass. After an evaluation none comes, and weights may change before the next one."""
    if hasattr(model, "reshard"):
        model.reshard()


def is_sharded(tensor):
    """Whether this rank holds a shard of it only (a DTensor, whose import takes half a second)."""
    return hasattr(tensor, "full_tensor")


def local(tensor):
    """What this rank holds of a tensor: its shard, or all of one that is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def full(tensor):
    """The whole of a tensor, gathered from all ranks where it is sharded (then all must call)."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def assign(target, source):
    """Copy the whole tensor `source` into `target`, of which this rank may hold a shard."""
    with torch.no_grad():
        if is_sharded(target):
            from torch.distributed.tensor import distribute_tensor
            # Every rank has the same `source`, so each cuts out its shard without communication.
            source = distribute_tensor(source.to(target.device), target.device_mesh,
                                       target.placements, src_data_rank=None)
        target.copy_(source)


def convert_ddp_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict without the names that DDP (`module`) and torch.compile (`_orig_mod`) add."""
    added = ("module", "_orig_mod")
    return {".".join(part for part in name.split(".") if part not in added): tensor
            for name, tensor in state.items()}
