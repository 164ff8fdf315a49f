"""The state of model and optimizer as whole named tensors, and back: the same for one device, DDP
and FSDP2, at any number of ranks."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from train.distributed import assign, full, is_sharded


def model_state(model):
    """{name: whole tensor} of the bare model. The tensors of an unsharded model are the live ones:
    copy before training goes on. With FSDP2 all ranks must call, and only rank 0 gets them."""
    return {name: full_on_main(p.detach()) for name, p in model.state_dict().items()}


def optimizer_state(optimizer):
    """The optimizer's state by parameter name: {"state": {name: {key: tensor}}, "param_groups"};
    for whom and for how long as in model_state."""
    state, groups = {}, []
    for group in optimizer.param_groups:
        for name, p in zip(group["names"], group["params"], strict=True):
            if p in optimizer.state:
                state[name] = {k: full_on_main(v) for k, v in optimizer.state[p].items()}
        plain = {k: v for k, v in group.items() if k not in ("params", "names")}
        groups.append(plain | {"betas": list(group["betas"]), "params": list(group["names"])})
    return {"state": state, "param_groups": groups}


def full_on_main(tensor):
    """full(tensor) on the CPU of rank 0 and None elsewhere, where `tensor` is sharded: a rank holds
    one whole tensor at a time. A tensor that is not sharded comes back as it is, on every rank."""
    if not is_sharded(tensor):
        return tensor
    whole = full(tensor)
    return whole.cpu() if dist.get_rank() == 0 else None


@dataclass
class Spec:
    """Stands for a tensor while a state travels to the other ranks."""
    shape: tuple
    dtype: torch.dtype


def specs(state):
    """A nest of dicts and lists with its tensors replaced by Specs."""
    if isinstance(state, torch.Tensor):
        return Spec(tuple(state.shape), state.dtype)
    if isinstance(state, dict):
        return {k: specs(v) for k, v in state.items()}
    return [specs(v) for v in state] if isinstance(state, list) else state


def broadcast_tensor(tensor, like, ranks):
    """Rank 0's CPU tensor on every rank; `like` = (shape, dtype) tells the others what comes."""
    if ranks.world_size == 1:
        return tensor
    tensor = tensor.contiguous() if ranks.main else torch.empty(like[0], dtype=like[1])
    dist.broadcast(tensor, src=0, group=ranks.control)
    return tensor


def load_model(model, wanted, tensors, ranks):
    """Fill the model, one tensor at a time, from rank 0's {name: tensor}."""
    own = model.state_dict()
    for name, spec in wanted.items():
        tensor = broadcast_tensor(tensors and tensors[name], (spec.shape, spec.dtype), ranks)
        assign(own[name], tensor)


def load_optimizer(optimizer, wanted, tensors, ranks):
    """Fill the optimizer's state, one tensor at a time, from rank 0's {name: {key: tensor}}."""
    named = {n: (p, g) for g in optimizer.param_groups
             for n, p in zip(g["names"], g["params"], strict=True)}
    for name, entry in wanted.items():
        for key, spec in entry.items():
            tensor = tensors and tensors[name][key]
            tensor = broadcast_tensor(tensor, (spec.shape, spec.dtype), ranks)
            if name not in named:  # frozen since
                continue
            p, group = named[name]
            if key == "step":  # a scalar; fused kernels want it on the device
                value = tensor.to(p.device if group.get("fused") else "cpu", copy=True)
            else:
                value = torch.zeros_like(p, dtype=spec.dtype)
                assign(value, tensor)
            optimizer.state[p][key] = value
