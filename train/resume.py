"""A run into a checkpoint and back: which one to go on from, whether it fits, other weights to
start from, and the state of model and optimizer as whole tensors, the same for one device, DDP and
FSDP2.

Rank 0 alone reads files. The other ranks get what it read without the tensors (see specs), and then
the tensors, one at a time.
"""

import contextlib
import math
import os
import pathlib
from dataclasses import asdict, dataclass, field, fields, is_dataclass

import torch
import torch.distributed as dist

from train import checkpoint
from train.checkpoint import (
    CheckpointError,
    bullets,
    load_checkpoint,
    map_tensors,
    mismatches,
    refuse,
)
from train.config import FIELDS, GPTKeys, differences
from train.distributed import SetupError, assign, convert_ddp_state, from_main, full, is_sharded
from train.files import write_text

# -----------------------------------------------------------------------------
# where to start

@dataclass
class Start:
    """Where a run starts: kind is scratch, resume or init_from. state: the checkpoint, on rank 0
    alone; specs: the same without the tensors' values, on every rank. shape: keys of its model to
    take over."""
    kind: str = "scratch"
    path: str = ""
    state: dict | None = None
    shape: dict = field(default_factory=dict)

    def __post_init__(self):
        self.specs = specs(self.state)

    def __getstate__(self):
        """What travels to the other ranks."""
        return self.__dict__ | {"state": None}


def find_start(folder, config, ranks, log):
    """The Start of a run in `folder` (a RunFolder), which is taken. Raises CheckpointError."""
    c = config

    def read():
        folder.open()
        for name in ("init_from", "backbone") if c.resume == "never" else ():
            path = getattr(c, name, None) or "scratch"
            inside = os.path.dirname(os.path.abspath(path)) == os.path.abspath(c.out_dir)
            if path != "scratch" and inside:
                raise CheckpointError(f"--{name} {path} is in out_dir, which --resume never moves "
                                      "aside; choose another --out_dir")
        if c.eval_only and c.resume == "never":
            raise CheckpointError("--eval_only with --resume never: nothing to evaluate")
        state, path = find_checkpoint(c.out_dir, c.resume, log)
        kind = "scratch" if state is None else "resume"
        if state is None and c.init_from != "scratch":
            kind, path, state = "init_from", c.init_from, read_weights(c.init_from)
        if c.eval_only and kind == "scratch":
            raise CheckpointError(f"--eval_only: there is no ckpt.pt in {c.out_dir}, and no "
                                  "--init_from: nothing to evaluate")
        shape = {}
        if c.init_from != "scratch":
            model_args = state.get("model_args", {})
            shape = adopt_shape(c, model_args, path)
            if c.vocab_size is None and model_args.get("vocab_size"):  # the data may know fewer
                shape["vocab_size"] = model_args["vocab_size"]
        return Start(kind, path, state, shape)
    return from_main(read, ranks)


def read_weights(path):
    """The checkpoint at `path`, or what model/convert/foreign.py makes of weights that another
    program wrote: a file of tensors or a Hugging Face folder. Raises CheckpointError."""
    foreign = os.path.isdir(path) or str(path).endswith(".safetensors")
    state = None if foreign else load_checkpoint(path)
    if state is not None and "format_version" in state:
        return state
    from model.convert.foreign import read_model
    return read_model(path, state)


def find_latest(folder, ranks, log):
    """The Start at the newest checkpoint of this run's own `folder`."""
    def read():
        state, path = checkpoint.load_latest(folder.path, log)
        return Start() if state is None else Start("resume", path, state)
    return from_main(read, ranks)


def load_best(model, folder, ranks):
    """Fill `model` with the weights of ckpt_best.pt of this run's own `folder`, if there are any;
    what the weights of `model` then are, in words."""
    path = folder.file("ckpt_best.pt")

    def read():
        return Start("resume", path, load_checkpoint(path)) if os.path.exists(path) else Start()
    best = from_main(read, ranks)
    if best.kind == "scratch":
        return "the last weights"
    load_model(model, best.specs["model"], best.state and best.state["model"], ranks)
    return path


def find_checkpoint(folder, resume, log):
    """On rank 0: (state, path) of the checkpoint that `resume` (auto, never, must or a file) means,
    (None, None) to start from scratch. Raises CheckpointError.

    torchrun repeats the command line when it restarts a job. Then the run is its own past, and
    `never`, `must` or a file were about what was there before: the folder remembers the job."""
    job = os.environ.get("TORCHELASTIC_RUN_ID", "")
    job += f" {os.getppid()}" if job == "none" else ""  # the name of every job without a name
    mark, restarted = pathlib.Path(folder, ".job"), False
    with contextlib.suppress(OSError):
        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and (
            mark.read_text() == job)
    state, path = None, None
    if resume in ("auto", "must") or restarted:
        state, path = checkpoint.load_latest(folder, log)
    elif resume != "never":
        state, path = load_checkpoint(resume), resume
    elif moved := checkpoint.move_aside(folder):
        log(f"--resume never: moved what was in {folder} to {moved}")
    if state is None and resume == "must":
        raise CheckpointError(f"--resume must: there is no ckpt.pt in {folder}")
    if job:
        with contextlib.suppress(OSError):
            write_text(mark, job)
    return state, path


# -----------------------------------------------------------------------------
# does it fit?

NEEDED = dict(optimizer=dict, iter_num=int, config=dict, progress=dict, scaler=dict, plateau=dict,
              early_stopping=dict, spikes=list, data=object)
KNOWN = {*NEEDED, "model", "model_args", "best_val_loss", "format_version", "rng", "tokenizer",
         "spec", "world_size", "torch"}


def check_fits(start, config, data, model, ranks, log):
    """Raise CheckpointError, on all ranks, unless a run of `config` on `data` with `model` can go
    on from the checkpoint of `start`."""
    wanted = model.state_dict()  # of a sharded model, on all ranks
    from_main(lambda: check_run(start.state, start.path, config, data, wanted, log), ranks)


def check_run(state, path, config, data, wanted, log):
    missing = [k for k, kind in NEEDED.items() if k not in state
               or not isinstance(state[k], kind)]
    if missing or not isinstance(state["optimizer"].get("state"), dict):
        raise CheckpointError(
            f"{path} has weights but not the rest of a run ({', '.join(missing) or 'optimizer'}); "
            f"to start from its weights: --init_from {path} and another --out_dir")
    if strange := [str(k) for k in state if k not in KNOWN]:
        log(f"{path}: ignoring what this program does not know: {', '.join(strange)}")
    changed = {k: f"{k}: checkpoint has {old!r}, now {new!r}"
               for k, old, new in differences(state["config"], asdict(config),
                                              {f.name: f for f in fields(config)})}
    if state["data"] != (now := data.train.fingerprint()):
        changed["data"] = (f"data: {config.data_dir} has other content: checkpoint has "
                           f"{state['data']}, now {now}")
    old = state.get("spec") or data.spec  # a checkpoint of before has none
    for k in sorted(n for n in old.keys() | data.spec.keys()
                    if not alike(old.get(n), data.spec.get(n))):
        changed.setdefault(k, f"{k}: checkpoint has {str(old.get(k))[:80]}, now "
                           f"{str(data.spec.get(k))[:80]}")
    allowed = config.allow_change
    refused = [] if "all" in allowed else [k for k in changed if k not in allowed]
    if refused:
        raise CheckpointError(
            f"{path} was made with another configuration:\n" + bullets(map(changed.get, refused))
            + f"\nundo the changes, or go on regardless with --allow_change {','.join(refused)}, "
            "or start afresh with --resume never (what is there is moved aside), or choose another "
            "--out_dir")
    check_state(state, wanted, path)


def alike(a, b):
    """Equal, but for floats: what is measured of the data differs a little between precisions."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=0.05, abs_tol=0.01)
    return a == b


def check_state(state, wanted, path):
    """Raise CheckpointError unless `state` fits a model with the tensors `wanted` {name: tensor}:
    names, shapes and dtypes of the weights and of the optimizer's state."""
    problems = mismatches("", state["model"], wanted)
    for name, entry in state["optimizer"]["state"].items():
        if name not in wanted:
            problems.append(f"optimizer state of unknown parameter {name}")
            continue
        moments = {k: v for k, v in entry.items() if k != "step"}
        problems += mismatches(f"optimizer {name} ", moments, {k: wanted[name] for k in moments})
    refuse(problems, path)


# -----------------------------------------------------------------------------
# starting from other weights

# Weights say nothing of these: dropout is no part of them, and the data name the vocabulary.
NOT_SHAPE = {"dropout", "vocab_size"}


def adopt_shape(config, model_args, path):
    """{key: value} to take over from the `model_args` of the model whose weights a run starts from:
    keys at their default. Raises CheckpointError naming those that contradict it. A bare state dict
    has no model_args: its tensors' shapes are checked later, as all are."""
    taken, wrong, learned = {}, [], model_args.get("pos") == "learned"
    own = [f for f in fields(config) if f.metadata.get("shape") and f.name in model_args]
    for f in [*fields(GPTKeys), *own] if model_args else ():
        theirs, ours = model_args.get(f.name, f.default), getattr(config, f.name)
        if theirs == ours or f.name in NOT_SHAPE:
            continue
        if ours == f.default or f.name == "n_hidden" and ours == 4 * config.n_embd:
            taken[f.name] = theirs
        elif f.name != "block_size" or ours > theirs and learned:  # positions can only be cut off
            wrong.append(f"{f.name}: it has {theirs!r}, the configuration says {ours!r}")
    if wrong:
        raise CheckpointError(f"{path} is a model of another shape:\n{bullets(wrong)}\n"
                              "leave these keys out to take them from it")
    return taken


def check_tokenizer(theirs, ours, path, allowed):
    """Raise CheckpointError where weights were trained on other tokens than the data's."""
    if theirs and ours and theirs != ours and not {"tokenizer", "all"} & set(allowed):
        raise CheckpointError(
            f"{path} reads the tokens of another tokenizer ({theirs.get('kind')}; the data: "
            f"{ours.get('kind')}); prepare the data with its tokenizer, or go on regardless with "
            "--allow_change tokenizer")


def load_weights(model, start, config, spec, ranks, log):
    """Fill `model` from the weights of another checkpoint, that of `start`. spec: the data's."""
    def read():
        check_tokenizer(start.state.get("tokenizer"), spec.get("tokenizer"), start.path,
                        config.allow_change)
        start.state = adopt_weights(model, start.state, start.path, log)
        return specs(start.state)
    load_model(model, from_main(read, ranks), start.state, ranks)


def adopt_weights(model, state, path, log):
    """Rank 0: {name of the model's own: tensor} from the weights in `state`; says what stays fresh.
    A model may translate names with its adopt(weights). Raises CheckpointError."""
    weights, own = convert_ddp_state(state["model"]), model.state_dict()
    weights = model.adopt(weights) if hasattr(model, "adopt") else weights
    fits = {n: t for n, t in weights.items() if n in own}
    refuse(mismatches("", fits, {n: own[n] for n in fits}, dtypes=False), path)
    fresh, unused = [n for n in own if n not in fits], [n for n in weights if n not in own]
    if not fits:
        raise CheckpointError(f"{path}: none of its {len(weights)} tensors is one of this model; "
                              f"its names look like {', '.join(list(weights)[:3])}")
    dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in fits.values()})
    log(f"Starting from the weights of {path}: {len(fits)} tensors ({', '.join(dtypes)})")
    for names, what in ((fresh, "stay fresh"), (unused, "of it are not used")):
        if names:
            more = ", ..." if len(names) > 6 else ""
            log(f"{len(names)} tensors {what}: {', '.join(names[:6])}{more}")
    return fits


# -----------------------------------------------------------------------------
# the state of model and optimizer as whole named tensors, and back

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


def specs(state):
    """A nest of dicts and lists with tensors of shape and dtype alone (on the meta device)."""
    return map_tensors(lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), state)


def broadcast_tensor(tensor, spec, ranks):
    """Rank 0's CPU tensor on every rank; its spec tells the others what comes."""
    if ranks.world_size == 1:
        return tensor
    tensor = tensor.contiguous() if ranks.main else torch.empty(spec.shape, dtype=spec.dtype)
    dist.broadcast(tensor.view(-1).view(torch.uint8), src=0, group=ranks.control)  # of any type
    return tensor


def load_model(model, wanted, tensors, ranks):
    """Fill the model, one tensor at a time, from rank 0's {name: tensor}."""
    own = model.state_dict()
    for name, spec in wanted.items():
        assign(own[name], broadcast_tensor(tensors and tensors[name], spec, ranks))


def load_optimizer(optimizer, wanted, tensors, ranks):
    """Fill the optimizer's state, one tensor at a time, from rank 0's {name: {key: tensor}}."""
    optimizer.state.clear()  # what a run that goes back has made since
    named = {n: (p, g) for g in optimizer.param_groups
             for n, p in zip(g["names"], g["params"], strict=True)}
    for name, entry in wanted.items():
        for key, spec in entry.items():
            tensor = broadcast_tensor(tensors and tensors[name][key], spec, ranks)
            if name not in named:  # frozen since
                continue
            p, group = named[name]
            if key == "step":  # a scalar; fused kernels want it on the device
                value = tensor.to(p.device if group.get("fused") else "cpu", copy=True)
            else:
                value = torch.zeros_like(p, dtype=spec.dtype)
                assign(value, tensor)
            optimizer.state[p][key] = value


def fitting_entries(optimizer, entries, where, allowed, warn):
    """The `entries` {name: {key: spec}} of a checkpoint's optimizer state that are of the kind this
    optimizer keeps. That is all of them, unless --allow_change changed what is optimized and how:
    the rest starts afresh."""
    kinds = {n: {"momentum_buffer"} if g["muon"] else {"step", "exp_avg", "exp_avg_sq"}
             for g in optimizer.param_groups for n in g["names"]}
    kept = {n: e for n, e in entries.items() if set(e) == kinds.get(n)}
    odd = sorted((entries.keys() | kinds.keys() if entries else set()) - kept.keys())
    names = ", ".join(odd[:5]) + (", ..." if len(odd) > 5 else "")
    if odd and not allowed:
        raise CheckpointError(f"the checkpoint in {where} lacks the optimizer state of {names}, or "
                              "has another kind of it; --allow_change optimizer starts it afresh")
    if odd:
        warn(f"optimizer state of {len(odd)} tensors starts afresh: {names}")
    return kept


def contents(config, data, model, optimizer, parts, ranks):
    """What a checkpoint holds: nanoGPT's keys, the state_dict of every part {name: part}, and what
    tells whether a run may go on from it. All ranks must call."""
    c, progress, shape = config, parts["progress"], getattr(model, "config", None)
    own = {f.name: getattr(c, f.name) for f in fields(c) if f.name not in FIELDS}
    return {
        "model": model_state(model), "optimizer": optimizer_state(optimizer),
        "model_args": asdict(shape) if is_dataclass(shape) else own,
        "iter_num": progress.iter_num, "best_val_loss": progress.best_val_loss,
        "config": asdict(c), "format_version": checkpoint.FORMAT_VERSION,
        # Every random draw is a function of (seed, step, rank): the seed is the whole state.
        "rng": {"seed": c.seed}, "data": data.train.fingerprint(), "spec": data.spec,
        "tokenizer": data.spec.get("tokenizer"), "world_size": ranks.world_size,
        "torch": str(torch.__version__),
        **{name: part.state_dict() for name, part in parts.items()}}


def restore(start, config, model, optimizer, parts, ranks, warn):
    """Fill model, optimizer and the other parts {name: part} from the checkpoint of `start`."""
    wanted, state = start.specs, start.state
    weights, moments = (state["model"], state["optimizer"]["state"]) if state else (None, None)
    load_model(model, wanted["model"], weights, ranks)
    entries = fitting_entries(optimizer, wanted["optimizer"]["state"], config.out_dir,
                              config.allow_change, warn)
    load_optimizer(optimizer, entries, moments, ranks)
    for name, part in parts.items():
        if wanted[name] or name != "scaler":  # that of a run without float16 is empty
            part.load_state_dict(wanted[name])
    start.state = None  # its memory is free for training


def check_plain(value, name):
    """Raise SetupError unless `value` is made of plain Python types, which ckpt.pt can hold."""
    for k, v in checkpoint.children(value):
        check_plain(v, f"{name}[{k!r}]")
    plain = int, float, bool, str, bytes, type(None)
    if not isinstance(value, (dict, list, tuple)) and type(value) not in plain:
        raise SetupError(f"{name} is a {type(value).__name__}; it goes into ckpt.pt: expected "
                         "plain Python types (int, float, str, list, dict, ...)")
