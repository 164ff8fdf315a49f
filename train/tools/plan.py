"""Plan a run on other GPUs (run_train.py --dry_run --world_size 64 --nodes 8 --gpu h100).

All numbers are computed, for DDP, FSDP and HSDP (shards within a node, copies between nodes). The
activations are of a forward pass on fake tensors, in eager mode; compiled code stores fewer.
"""

import copy
import math
from dataclasses import dataclass

import torch

from train.base.cli import format_table
from train.base.errors import SetupError
from train.device import PEAK_TFLOPS, blocks
from train.optimizer import muon_parameters
from train.options.ranks import bytes_sent, padded_numel, step_collectives


@dataclass
class Gpu:
    """A type of GPU: memory in GiB, and bandwidths per GPU in one direction in GB/s.

    name: a key of PEAK_TFLOPS. link: within the node. network: to other nodes. host: to the host.
    """
    name: str
    memory: float
    link: float
    network: float
    host: float


# NVIDIA's data sheets of the GPUs and of DGX A100, H100, H200 and B200 (NVLink 3 to 5, a network
# port of 200 or 400 Gb/s per GPU, PCIe 4 or 5); AWS's page of g5.48xlarge (100 Gb/s for 8 GPUs).
GPUS = {"a100": Gpu("A100", 79, 300, 25, 32), "h100": Gpu("H100", 79, 450, 50, 64),
        "h200": Gpu("H200", 139, 450, 50, 64), "b200": Gpu("B200", 178, 900, 50, 64),
        "a10g": Gpu("A10G", 22, 32, 1.6, 32)}
# Assumed, typical values:
MFU = 0.4              # of computing alone
BANDWIDTH_SHARE = 0.8  # of the data sheet
HOP_SECONDS = 1e-5     # for each of the log2(ranks) hops of a collective
MEMORY_SHARE = 0.92    # the rest is for CUDA, NCCL and fragmentation
MIN_EFFICIENCY = 0.8
MAX_WORLD_SIZE = 4096
HEADER = ("", "GiB per GPU", "collectives", "GB within", "GB between", "ms per step", "efficiency",
          "save GB", "stall ms", "sensible GPUs")


def log_table(log, config, data, model, flops):
    """Log a table of estimated memory and time on config.world_size GPUs, a row per method.

    Methods: DDP, FSDP and, for several nodes, HSDP. model: on the meta device. flops: per step,
    over all ranks. Raises SetupError if the memory depends on the values in the data.
    """
    gpu = GPUS[config.gpu]
    dtype = torch.bfloat16 if config.dtype == "auto" else getattr(torch, config.dtype)
    batch = data.train.get_batch(torch.device("cpu"), 0)
    activations = activation_bytes(copy.deepcopy(model), batch, dtype)
    nodes, per_node = config.nodes, config.world_size // config.nodes

    def compute_costs(method, world_size):
        size = min(per_node, world_size)
        c = config.replace(distributed=method, shard_size=config.shard_size or size)
        return costs(c, model, gpu, dtype, flops, activations, world_size, size)
    sizes = [w for w in range(1, MAX_WORLD_SIZE + 1) if config.samples_per_step % w == 0
             and (per_node % w == 0 or w % per_node == 0)]
    rows = [HEADER]
    for method in ("ddp", "fsdp", "hsdp") if nodes > 1 else ("ddp", "fsdp"):
        c = compute_costs(method, config.world_size)
        sensible = [w for w in sizes if compute_costs(method, w)["sensible"]]
        rows.append((method, f"{c['memory'] / 2**30:.1f}", f"{c['collectives']}",
                     f"{c['within'] / 1e9:.3g}", f"{c['between'] / 1e9:.3g}",
                     f"{c['seconds'] * 1e3:.1f}", f"{c['efficiency']:.0%}",
                     f"{c['save'] / 1e9:.3g}", f"{c['stall'] * 1e3:.0f}",
                     f"{sensible[0]} to {sensible[-1]}" if sensible else "none"))
    log(f"Plan for {nodes} x {per_node} {gpu.name}, computed with {MFU:.0%} MFU and "
        f"{BANDWIDTH_SHARE:.0%} of {gpu.link:g} GB/s per GPU within a node, {gpu.network:g} "
        f"between nodes, sending during computing:\n{format_table(rows)}\n"
        "GB within: sent by a GPU per step; between: by a node. Sensible: fits into "
        f"{gpu.memory:g} GiB, efficiency {MIN_EFFICIENCY:.0%} or more at this batch.")


def costs(config, model, gpu, dtype, flops, activations, world_size, per_node):
    """Return the estimated costs of a run, {name: number}.

        memory       bytes per rank
        collectives  number of calls per step
        within       bytes per step that a rank sends within the node
        between      bytes per step that a node sends to other nodes
        seconds      per step
        efficiency   share of this time in which the GPU computes
        save         bytes of a checkpoint
        stall        seconds that training waits per save
        sensible     bool: fits into memory, and efficiency is at least MIN_EFFICIENCY
    model: not sharded. dtype: of matrix products. flops: per step, over all ranks. activations:
    bytes per sample. per_node: ranks per node.
    """
    shards = config.replica_size(world_size)
    collectives = step_collectives(model, config, world_size, dtype)
    within, between = bytes_sent(collectives, per_node)
    peak = PEAK_TFLOPS[gpu.name] * 1e12 / (2 if dtype == torch.float32 else 1)
    computing = flops / (world_size * peak * MFU)
    count = sum(c.count for c in collectives)
    sending = (max(within / gpu.link, between / (gpu.network * per_node)) / (1e9 * BANDWIDTH_SHARE)
               + count * math.log2(world_size) * HOP_SECONDS)
    # DDP sends during the last backward pass, two thirds of the time of a micro-batch.
    hidden = computing * (1 if shards > 1 else 2 / 3 / config.accumulation(world_size))
    seconds = computing + max(0.0, sending - hidden)
    state = state_memory(config, model, world_size)
    memory = (sum(state.values()) + activations * config.micro_batch(world_size)
              + copied_weights(model, shards, dtype))
    shard_bytes = state["weights"] + state["optimizer"]
    efficiency = computing / seconds if seconds else 1.0
    fits = memory < MEMORY_SHARE * gpu.memory * 2**30
    return dict(memory=memory, collectives=count, within=within, between=between, seconds=seconds,
                efficiency=efficiency, save=shard_bytes * shards,
                stall=shard_bytes / (gpu.host * 1e9 * BANDWIDTH_SHARE),
                sensible=fits and efficiency >= MIN_EFFICIENCY)


def state_memory(config, model, world_size):
    """Return bytes per rank between steps: {"weights", "gradients", "optimizer" (with ema)}."""
    shards = config.replica_size(world_size)
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    trained = sum(sizes.values())
    state = 2 * trained  # AdamW's moments; Muon has a momentum instead
    if config.optimizer == "muon":
        state -= sum(sizes.get(name, 0) for name in muon_parameters(model))
    state += trained if config.ema else 0
    grad_copies = 2 if shards == 1 < world_size else 1  # the second one is in DDP's buckets
    return {"weights": sum(p.nbytes for p in model.parameters()) / shards,
            "gradients": 4 * trained * grad_copies / shards,
            "optimizer": 4 * state / shards}


def copied_weights(model, shards, dtype):
    """Return the bytes per rank of copies of weights and gradients in a step; shards: 1 for DDP."""
    everything = padded_numel(model.parameters(), 1)
    if shards == 1:
        return 0 if dtype == torch.float32 else everything * dtype.itemsize
    sizes = [padded_numel(b.parameters(), 1) for b in blocks(model)] or [0]
    root = everything - sum(sizes)
    size = 2 if dtype == torch.bfloat16 else 4  # as in distributed.shard()
    return (root + 2 * max(sizes)) * size + (root + max(sizes)) * 4


def activation_bytes(model, batch, dtype):
    """Return the bytes per sample that the forward pass stores for the backward pass (eager mode).

    model: on the meta device; pass a copy: fake tensors replace the weights. batch: the model's
    arguments. dtype: of autocast. Raises SetupError if the memory depends on the data.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    kept = {}

    def keep(t):
        kept[t.untyped_storage()._cdata] = t.untyped_storage()
        return t
    try:
        with (FakeTensorMode(allow_non_fake_inputs=True) as mode,
              torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
              torch.autocast("cpu", dtype, enabled=dtype != torch.float32)):
            model._apply(lambda t: torch.empty_like(
                t, device="cpu", dtype=dtype if t.is_floating_point() else t.dtype))
            loss, _ = model(*(mode.from_tensor(t) for t in batch))
    except Exception as error:
        raise SetupError("world_size: no plan for this type of model, whose memory depends on the "
                         f"data ({type(error).__name__}: {str(error):.200})") from error
    for p in model.parameters():
        kept.pop(p.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in kept.values()) / len(batch[0])
