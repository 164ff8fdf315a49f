"""Process group, collectives, DDP, FSDP2 and hybrid sharding (HSDP), seeds.

`python run_train.py` is rank 0 of 1; under torchrun the same code runs as one of several ranks.
"""

import contextlib
import inspect
import os
import pickle
import random
import re
import signal
import socket
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from train.base.errors import CollectiveExit, SetupError
from train.base.memory import call_libc, keep_freed_memory
from train.device import blocks, get_device


@dataclass
class Ranks:
    """This process among the ranks of a run, as process_group() yields it.

    control: gloo group for collectives of CPU data, also with NCCL; `None` without a process group.
    saving: gloo group for threads that write sharded checkpoints; `None` if they are not sharded.
    """
    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")
    control: object = None
    saving: object = None
    ranks_per_node: int = 1

    @property
    def is_main(self):
        return self.rank == 0


# -----------------------------------------------------------------------------
# seeds

def set_seed(seed: int, deterministic: bool = False, cudnn_benchmark: bool | None = None) -> None:
    """Seed Python, numpy and torch (CPU and all GPUs), and set the options of deterministic runs.

    deterministic: forbid TF32, which is otherwise on, and algorithms with results that depend on
    timing (https://pytorch.org/docs/stable/notes/randomness.html).
    cudnn_benchmark: whether cuDNN autotunes; `None`: yes, unless `deterministic`.
    """
    os.environ["PYTHONHASHSEED"] = str(seed % 2**32)  # for child processes
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first CUDA call
        torch.utils.deterministic.fill_uninitialized_memory = False  # slow, and not needed
    if torch.are_deterministic_algorithms_enabled() != deterministic:
        torch.use_deterministic_algorithms(deterministic)  # imports the compiler: 1 s
    torch.backends.cudnn.deterministic = deterministic
    benchmark = not deterministic if cudnn_benchmark is None else cudnn_benchmark
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cuda.matmul.allow_tf32 = not deterministic
    torch.backends.cudnn.allow_tf32 = not deterministic


# -----------------------------------------------------------------------------
# the process group

PR_SET_PDEATHSIG = 1  # in Linux's prctl.h
SIOCGIFADDR = 0x8915  # in Linux's sockios.h
ENVIRONMENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextlib.contextmanager
def process_group(config):
    """Yield the Ranks of this process, under torchrun in a new process group.

    The group uses NCCL on CUDA, gloo otherwise; without torchrun there is one rank and no group. On
    exit without an error or with CollectiveExit, wait for all ranks and close the group; after
    other errors do neither. Also set the CPU thread count if num_threads is set. Raises SetupError.
    """
    if config.num_threads:  # torch's default: OMP_NUM_THREADS, or one per physical core
        torch.set_num_threads(config.num_threads)
    env = read_environment()
    rank, local_rank, world_size, local_world_size = env or (0, 0, 1, 1)
    device = get_device(config.device, local_rank, local_world_size)
    # Not with a sharded model: the memory of all gathered blocks would be kept.
    if device.type == "cpu" and not config.shards_model(world_size):
        keep_freed_memory()
    if env is None:
        yield Ranks(device=device)
        return
    backend = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Linux kills this process when torchrun dies: after kill -9 of torchrun the ranks would
        # continue as orphans.
        call_libc("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
    if world_size > local_world_size:
        choose_interface(os.environ["MASTER_ADDR"])
    timeout = timedelta(seconds=config.dist_timeout)
    store = create_store(rank, world_size, timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout,
                            device_id=device if backend == "nccl" else None)
    control = (dist.group.WORLD if backend == "gloo" else
               dist.new_group(backend="gloo", timeout=timeout))
    saving = None
    if config.saves_shards(world_size):  # a long timeout: only a broken connection is an error
        saving = dist.new_group(backend="gloo", timeout=max(timeout, timedelta(days=1)))
    try:
        yield Ranks(rank, world_size, device, control, saving, local_world_size)
    except CollectiveExit:
        close_process_group(control)
        raise
    else:  # after any other error some ranks may not respond: do not wait
        close_process_group(control)


def read_environment():
    """Return torchrun's [RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE]; `None` without torchrun.

    Raises SetupError if the variables, also MASTER_ADDR and MASTER_PORT, are incomplete or wrong.
    """
    env = {name: os.environ.get(name, "") for name in ENVIRONMENT}
    numbers = [env[name] for name in ENVIRONMENT[:3]]
    if not any(numbers):
        return None
    env["LOCAL_WORLD_SIZE"] = os.environ.get("LOCAL_WORLD_SIZE") or env["WORLD_SIZE"]
    numbers.append(env["LOCAL_WORLD_SIZE"])
    numbers = [int(text) for text in numbers if text.isdigit()]
    if not all(env.values()) or len(numbers) < 4 or numbers[0] >= numbers[2]:
        text = ", ".join(f"{name}={value}" for name, value in env.items())
        raise SetupError(f"environment: expected all, with RANK below WORLD_SIZE: {text}; unset "
                         "them, or start ranks with `torchrun --nproc_per_node=N run_train.py ...`")
    return numbers


def choose_interface(address):
    """Set GLOO_SOCKET_IFNAME, unless it is set, to the network interface that reaches `address`.

    By default gloo uses the address of the host's name, often a loopback address or unknown.
    """
    with contextlib.suppress(OSError, ImportError), socket.socket(type=socket.SOCK_DGRAM) as s:
        import fcntl  # POSIX only
        s.connect((address, 1))  # sends nothing
        own = socket.inet_aton(s.getsockname()[0])
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                reply = fcntl.ioctl(s, SIOCGIFADDR, name.encode().ljust(256, b"\0"))
                if reply[20:24] == own:
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def create_store(rank, world_size, timeout):
    """Return the ranks' store for init_process_group, with a prefix that is unique to this start.

    timeout: a timedelta. All ranks must call. Raises SetupError on rank 0 if a rank is late.
    torchrun keeps one store over restarts, in which an early rank finds the addresses of dead ranks
    and fails (pytorch#135712, #167288). Therefore rank 0 chooses a prefix, and sends it to each
    rank that writes a new random mark to the store.
    """
    store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
    mark = uuid.uuid4().hex
    deadline = time.monotonic() + timeout.total_seconds()
    if rank:
        store.set(f"mark of {rank}", mark)
        prefix = store.get(f"prefix for {mark}").decode()  # waits for the key
        store.set(f"{prefix} received by {rank}", "")
        return dist.PrefixStore(prefix, store)
    missing = set(range(1, world_size))
    while missing:
        for other in sorted(missing):
            if store.check([f"{mark} received by {other}"]):
                missing.discard(other)
            elif store.check([f"mark of {other}"]):
                store.set(f"prefix for {store.get(f'mark of {other}').decode()}", mark)
        if time.monotonic() > deadline:
            raise SetupError(f"dist_timeout: within {timeout} these ranks did not start: {missing}")
        time.sleep(0.01)
    return dist.PrefixStore(mark, store)


_CLOSED = []  # process groups, see close_process_group


def close_process_group(control):
    """Wait for all ranks in the gloo group `control`, then destroy the process group."""
    dist.barrier(group=control)
    # A reference is kept: otherwise DDP's C++ part would be the last owner and hold the GIL while
    # it stops gloo's threads, which may wait for the GIL: 1 run in 15 hung (pytorch#56297,#179291).
    _CLOSED.append(dist.group.WORLD)
    dist.destroy_process_group()


# -----------------------------------------------------------------------------
# collectives on the host

def all_gather_vectors(vector, ranks):
    """Return the CPU vectors (n,) of all ranks, stacked to (world_size, n); all ranks must call."""
    if ranks.world_size == 1:
        return vector[None]
    rows = vector.new_empty(ranks.world_size, len(vector))
    dist.all_gather(list(rows), vector, group=ranks.control)
    return rows


def max_over_ranks(values, ranks):
    """Return the maximum over ranks of an int, or of each item of a list; all ranks must call."""
    tensor = torch.tensor(values)
    if ranks.world_size > 1:
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=ranks.control)
    return tensor.tolist()


def gather_objects(value, ranks, group=None):
    """Return the picklable values of all ranks, in rank order, on every rank; all ranks must call.

    group: of all ranks (default: ranks.control); ranks.saving in a background thread.
    """
    values = [value] * ranks.world_size
    if ranks.world_size > 1:
        dist.all_gather_object(values, value, group=group or ranks.control)
    return values


def broadcast_from_rank0(make, ranks):
    """Call make() on rank 0; return the result, or raise the exception, on every rank.

    Other ranks get a pickled copy. An exception that cannot be pickled becomes a RuntimeError. All
    ranks must call.
    """
    outcome = [None, None]  # result, exception
    if ranks.is_main:
        try:
            outcome[0] = make()
        except Exception as error:
            outcome[1] = error
    if ranks.world_size > 1:
        try:
            pickle.loads(pickle.dumps(outcome[1]))
        except Exception:
            outcome[1] = RuntimeError(f"rank 0: {type(outcome[1]).__name__}: {outcome[1]}")
        dist.broadcast_object_list(outcome, src=0, group=ranks.control)
    result, error = outcome
    if error is not None:
        raise error
    return result


# -----------------------------------------------------------------------------
# DDP, FSDP2 and HSDP

def wrap_ddp(model, ranks):
    """Return `model` or, with several ranks, DDP of it, whose forward() sends no buffers."""
    if ranks.world_size == 1:
        return model
    names = inspect.signature(DistributedDataParallel).parameters
    new = "forward_sync_buffers"  # from PyTorch 2.13 on
    option = new if new in names else "broadcast_buffers"
    return DistributedDataParallel(model, gradient_as_bucket_view=True, **{option: False})


def build_mesh(ranks, replica_size):
    """Return a DeviceMesh with the dimension "shard" or, with replicas, "replicate" and "shard".

    replica_size: ranks that together hold one copy of the model, a divisor of the world size; they
    have consecutive numbers, since torchrun numbers the ranks node by node. All ranks must call.
    """
    from torch.distributed.device_mesh import init_device_mesh
    W = ranks.world_size
    shape = (W,) if replica_size == W else (W // replica_size, replica_size)
    names = ("replicate", "shard")[-len(shape):]
    return init_device_mesh(ranks.device.type, shape, mesh_dim_names=names)


def describe_mesh(config, ranks):
    """Return the layout of a run's ranks, e.g. "2 nodes x 8 GPUs: replicate 2 x shard 8"."""
    size = config.replica_size(ranks.world_size)
    sizes = [("replicate", ranks.world_size // size), ("shard", size)]
    n = ranks.ranks_per_node
    nodes = "1 node" if n == ranks.world_size else f"{ranks.world_size // n} nodes"
    return (f"{nodes} x {n} {'GPUs' if ranks.device.type == 'cuda' else 'processes'}: "
            + " x ".join(f"{name} {count}" for name, count in sizes if count > 1))


def shard(model, ranks, dtype, seed, initial, replica_size=None):
    """Shard a model with FSDP2, move it to ranks.device, initialise it there, and return it.

    model: on the meta device, or with values, of which those of rank 0 are used, as by DDP.
    dtype: of the computation, if bfloat16; otherwise the dtype of the parameters is used.
    initial(name, shape, seed): called for each tensor without values, one at a time.
    replica_size: ranks that together hold one copy of the model (default: all).
    Each block is gathered just before it computes, all other parameters (embedding, head) together:
    https://pytorch.org/docs/stable/distributed.fsdp.fully_shard.html. All ranks must call. Raises
    SetupError as check_shardable() and fill_initial() do.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    check_shardable(model)
    for tensor in (t.detach() for t in model.state_dict().values() if not t.is_meta):
        value = tensor.contiguous()  # as bytes, because gloo does not support every dtype
        dist.broadcast(value.view(-1).view(torch.uint8), src=0, group=ranks.control)
        tensor.copy_(value)
    mesh = build_mesh(ranks, replica_size or ranks.world_size)
    param_dtype = dtype if dtype == torch.bfloat16 else None
    policy = MixedPrecisionPolicy(param_dtype, torch.float32, cast_forward_inputs=False)
    for module in [*blocks(model), model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    empty = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    # Not to_empty(), which would discard tables that already have values (e.g. of RoPE).
    model._apply(lambda t: (torch.empty_like(t, device=ranks.device) if t.is_meta
                            else t.to(ranks.device)))
    fill_initial(model, empty, initial, seed)
    return model


def check_shardable(model):
    """Raise SetupError if FSDP cannot shard `model`, which may be on the meta device.

    The reasons are 0-dim parameters, parameters that a block shares with other parts of the model,
    and non-persistent buffers without values.
    """
    tensors = model.state_dict()
    if scalars := [name for name, p in model.named_parameters() if p.dim() == 0]:
        raise SetupError(f"FSDP cannot shard the scalars {', '.join(scalars)}: give them the shape "
                         "(1,), or use --distributed ddp")
    if tables := [name for name, b in model.named_buffers() if b.is_meta and name not in tensors]:
        raise SetupError(f"under FSDP, the buffers {', '.join(tables)} have no values: create them "
                         'with device="cpu", or use --distributed ddp')
    # A tied head is possible, since neither it nor the embedding is in a block, and so are repeated
    # blocks.
    units = {f"{name}.": m for name, m in model.named_modules(remove_duplicate=False)
             if getattr(m, "is_block", False)}
    names = {}  # of each parameter, by the block
    for name, p in model.named_parameters(remove_duplicate=False):
        unit = next((m for prefix, m in units.items() if name.startswith(prefix)), model)
        names.setdefault(p, {}).setdefault(unit, name)
    if shared := [" and ".join(by_unit.values()) for by_unit in names.values() if len(by_unit) > 1]:
        raise SetupError("FSDP cannot shard parameters that a block shares with other parts of the "
                         f"model: {'; '.join(shared[:4])}; use --distributed ddp")


def fill_initial(model, names, initial, seed):
    """Set the tensors `names` to initial(name, shape, seed); SetupError if a result is `None`."""
    tensors = model.state_dict()
    unknown = set()
    for name in names:
        value = initial(name, tensors[name].shape, seed)
        if value is not None:
            assign(tensors[name], value)
            continue
        usual = ("normal(name, shape, 0.02, seed)" if tensors[name].dim() > 1 else
                 f"torch.full(shape, {'0.0' if name.endswith('bias') else '...'})")
        unknown.add(f"    {re.sub(r'[.][0-9]+[.]', '.*.', name)}: return {usual}")
    if unknown:
        raise SetupError("under FSDP, initial(name, shape, seed) of the model returns the initial "
                         "values, in place of those of __init__, for a GPT also on one process; "
                         "add a line for each of these, with the value of __init__, e.g.\n"
                         + "\n".join(sorted(unknown)) + "\nor use --distributed ddp")


def is_sharded(tensor):
    """Return whether a tensor is a DTensor (without importing DTensor, which takes 0.5 s)."""
    return hasattr(tensor, "full_tensor")


def local(tensor):
    """Return this rank's shard of a tensor, or the tensor if it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def locate_shard(tensor, ranks):
    """Return (first row of this rank's shard, whether this is the first rank that holds it)."""
    if not is_sharded(tensor):
        return 0, ranks.is_main
    row = 0
    is_first = True
    mesh = tensor.device_mesh
    for n, i, placement in zip(mesh.shape, mesh.get_coordinate(), tensor.placements, strict=True):
        if placement.is_shard():  # in equal parts; the last ones may be smaller or empty
            row = min(i * -(-tensor.size(0) // n), tensor.size(0))
        else:
            is_first = i == 0
    return row, is_first


def full(tensor):
    """Return a tensor with all shards gathered; for a DTensor all ranks must call."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def assign(target, source):
    """Copy `source`, a full tensor equal on every rank, into `target`, which may be sharded."""
    with torch.no_grad():
        if is_sharded(target):
            from torch.distributed.tensor import distribute_tensor
            # `source` is the same on every rank: each rank slices it without communication.
            source = distribute_tensor(source.to(target.device), target.device_mesh,
                                       target.placements, src_data_rank=None)
        target.copy_(source)


def convert_ddp_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a state dict without the name prefixes of torch.compile and DDP.

    `_orig_mod.` is removed everywhere, the prefix `module.` only if all names have it.
    """
    plain = {re.sub(r"(?<![^.])_orig_mod\.", "", name): t for name, t in state.items()}
    wrapped = all(name.startswith("module.") for name in plain)
    return {name.removeprefix("module.") if wrapped else name: t for name, t in plain.items()}
