"""A run into a checkpoint and back: which one to go on from, whether it fits, other weights to
start from, and the state of model and optimizer as whole tensors, the same for one device, DDP and
FSDP2.

Rank 0 alone reads files. The other ranks get what it read without the values of tensors (see
without_values), and then the tensors, one at a time.
"""

import contextlib
import functools
import math
import os
import pathlib
from dataclasses import asdict, dataclass, field, fields, is_dataclass

import torch
import torch.distributed as dist

from model.core.load import read_weights
from model.core.weights import (
    adopt_weights,
    check_must_match,
    check_tokenizer,
    take_checkpoint_shape,
)
from train import checkpoint
from train.base.errors import BadNumbers, CheckpointError
from train.base.files import write_text
from train.checkpoint import bullets, load_checkpoint, mismatches, refuse
from train.config import FIELDS, differences, files_read
from train.distributed import (
    assign,
    broadcast_from_rank0,
    full,
    is_sharded,
    local,
)

# -----------------------------------------------------------------------------
# where to start

@dataclass
class Start:
    """Where a run starts: kind is scratch, resume or init_from. state: the checkpoint, on rank 0
    alone; outline: the same without the tensors' values, on every rank. shape: {key: value} of its
    model to take over."""
    kind: str = "scratch"
    path: str = ""
    state: dict | None = None
    shape: dict = field(default_factory=dict)

    def __post_init__(self):
        self.outline = without_values(self.state)

    def __getstate__(self):
        """What travels to the other ranks."""
        return self.__dict__ | {"state": None}


def find_start(folder, config, ranks, log):
    """The Start of a run in `folder` (a RunFolder), which is taken. Raises CheckpointError."""
    c = config

    def read():
        folder.open()
        if c.resume == "never":  # before anything is moved
            check_not_moved(c)
            if c.eval_only:
                raise CheckpointError("--eval_only with --resume never: nothing to evaluate")
        state, path = find_checkpoint(c.out_dir, c.resume, log)
        kind = "scratch" if state is None else "resume"
        if state is None and c.init_from != "scratch":
            kind, path, state = "init_from", c.init_from, read_weights(c.init_from)
        if c.eval_only and kind == "scratch":
            raise CheckpointError(f"--eval_only: there is no ckpt.pt in {c.out_dir}, and no "
                                  "--init_from: nothing to evaluate")
        # A run that goes on takes the same over again.
        shape = take_checkpoint_shape(c, state, path) if c.init_from != "scratch" else {}
        if kind == "resume" and c.max_minutes:
            shape |= length_to_keep(c, state.get("config") or {})
        known = {f.name: f for f in fields(c)}
        for name in shape if kind == "init_from" else ():
            if (ours := getattr(c, name)) != known[name].default:
                log(f"{name}: {shape[name]}, as {path} has it, in the place of {ours}")
        return Start(kind, path, state, shape)
    return broadcast_from_rank0(read, ranks)


def length_to_keep(config, then):
    """{key: value} of the length that a run was given by its minutes when it began with the
    configuration `then`. Raises CheckpointError."""
    if then.get("max_minutes") != config.max_minutes:
        raise CheckpointError(
            f"max_minutes {config.max_minutes:g}: this run has a length of {then.get('max_iters')} "
            "steps already; to make it longer, leave max_minutes out and give --max_iters")
    return {name: then.get(name) for name in ("max_iters", "max_epochs", "lr_decay_iters")}


def weights_shape(config):
    """({key: value} that a fresh run of `config` takes over from the weights that it starts from
    or stands on, their file), for who only looks at it. Raises CheckpointError."""
    for path in files_read(config, (True,)).values():
        return take_checkpoint_shape(config, read_weights(path), path), path
    return {}, None


def check_not_moved(config):
    """Raise CheckpointError where --resume never would move away a file that the run reads."""
    for name, path in files_read(config).items():
        if os.path.dirname(os.path.abspath(path)) == os.path.abspath(config.out_dir):
            raise CheckpointError(f"--{name} {path} is in out_dir, which --resume never moves "
                                  "aside; choose another --out_dir")


def find_latest(folder, ranks, log):
    """The Start at the newest checkpoint of this run's own `folder`."""
    def read():
        state, path = checkpoint.load_latest(folder.path, log)
        return Start() if state is None else Start("resume", path, state)
    return broadcast_from_rank0(read, ranks)


def load_best(model, folder, ranks):
    """Fill `model` with the weights of ckpt_best.pt of this run's own `folder`, if there are any;
    what the weights of `model` then are, in words."""
    path = folder.file("ckpt_best.pt")

    def read():
        return Start("resume", path, load_checkpoint(path)) if os.path.exists(path) else Start()
    best = broadcast_from_rank0(read, ranks)
    if best.kind == "scratch":
        return "the last weights"
    fill_model(model, best.outline["model"], best.state and best.state["model"], ranks)
    return path


def find_checkpoint(folder, resume, log):
    """On rank 0: (state, path) of the checkpoint that `resume` (auto, never, must or a file) means,
    (None, None) to start from scratch. Raises CheckpointError.

    torchrun repeats the command line when it restarts a job. Then the run is its own past, and
    `never`, `must` or a file were about what was there before: the folder remembers the job."""
    job = os.environ.get("TORCHELASTIC_RUN_ID", "")
    job += f" {os.getppid()}" if job == "none" else ""  # the name of every job without a name
    # The folder may be read-only, or the mark of another job's: then this is no restart.
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

# Keys of a checkpoint without which a run cannot go on, and their types; and all that it may have.
NEEDED = dict(optimizer=dict, iter_num=int, config=dict, progress=dict, scaler=dict, plateau=dict,
              early_stopping=dict, spikes=list, data=object)
KNOWN = {*NEEDED, "model", "model_args", "best_val_loss", "format_version", "rng", "tokenizer",
         "spec", "world_size", "torch"}


def check_fits(start, config, data, model, ranks, log):
    """Raise CheckpointError, on all ranks, unless a run of `config` on `data` with `model` can go
    on from the checkpoint of `start`."""
    wanted = model.state_dict()  # of a sharded model, on all ranks
    broadcast_from_rank0(lambda: check_same_run(start.state, start.path, config, data, wanted, log), ranks)


def check_same_run(state, path, config, data, wanted, log):
    """Raise CheckpointError unless the checkpoint `state` is whole and of the same configuration
    (but for --allow_change), the same data, and a model with the tensors `wanted`."""
    missing = [k for k, kind in NEEDED.items() if k not in state
               or not isinstance(state[k], kind)]
    if missing or not isinstance(state["optimizer"].get("state"), dict):
        raise CheckpointError(
            f"{path} has weights but not the rest of a run ({', '.join(missing) or 'optimizer'}); "
            f"to start from its weights: --init_from {path} and another --out_dir")
    if strange := [str(k) for k in state if k not in KNOWN]:
        log(f"{path}: ignoring what this program does not know: {', '.join(strange)}")
    # All differences are collected, so that one message and one --allow_change name them all.
    changed = {k: f"{k}: checkpoint has {old!r}, now {new!r}"
               for k, old, new in differences(state["config"], asdict(config),
                                              {f.name: f for f in fields(config)})}
    then, now = renamed(state["data"], data.renamed), data.train.fingerprint()
    if then != now:
        changed["data"] = f"data: {config.data_dir} has other content: {then}, now {now}"
    # The oldest checkpoints have no spec.
    old = renamed(state.get("spec") or data.spec, data.renamed)
    for k in sorted(n for n in old.keys() | data.spec.keys()
                    if not nearly_equal(old.get(n), data.spec.get(n))):
        changed.setdefault(k, f"{k}: checkpoint has {str(old.get(k))[:80]}, now "
                           f"{str(data.spec.get(k))[:80]}")
    allowed = config.allow_change
    refused = [] if "all" in allowed else [k for k in changed if k not in allowed]
    if refused:
        possible = "" if mismatches("", state["model"], wanted) else (  # no key changes shapes
            f"go on regardless with --allow_change {','.join(refused)}, or ")
        raise CheckpointError(
            f"{path} was made with another configuration:\n" + bullets(map(changed.get, refused))
            + f"\nundo the changes, or {possible}start afresh with --resume never (what is there "
            "is moved aside), or choose another --out_dir")
    check_tensors(state, wanted, path)


def renamed(value, names):
    """A nest of dicts with its texts as `names` {before: now} says."""
    if isinstance(value, dict):
        return {k: renamed(v, names) for k, v in value.items()}
    return names.get(value, value) if isinstance(value, str) else value


def nearly_equal(a, b):
    """Equal, but for floats: what is measured of the data differs a little between precisions."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(nearly_equal, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=0.05, abs_tol=0.01)
    return a == b


def check_tensors(state, wanted, path):
    """Raise CheckpointError unless `state` fits a model with the tensors `wanted` {name: tensor}:
    names, shapes and dtypes of the weights and of the optimizer's state."""
    problems = mismatches("", state["model"], wanted)
    for name, entry in state["optimizer"]["state"].items():
        if not isinstance(entry, dict):
            problems.append(f"optimizer state of {name}: a {type(entry).__name__}")
            continue
        if name not in wanted:
            problems.append(f"optimizer state of unknown parameter {name}")
            continue
        # Moments have the shape of their parameter; `step` is a number.
        moments = {k: v for k, v in entry.items() if k != "step"}
        problems += mismatches(f"optimizer {name} ", moments, {k: wanted[name] for k in moments})
    refuse(problems, path)


# -----------------------------------------------------------------------------
# starting from other weights

def load_weights(model, start, config, spec, ranks, log):
    """Fill `model` from the weights of another checkpoint, that of `start`. spec: the data's."""
    def read():
        check_tokenizer(start.state.get("tokenizer"), spec.get("tokenizer"), start.path,
                        config.allow_change)
        check_must_match(start.state, config, spec, start.path)
        start.state = adopt_weights(model, start.state, start.path, log)
        return without_values(start.state)
    fill_model(model, broadcast_from_rank0(read, ranks), start.state, ranks)


# -----------------------------------------------------------------------------
# the state of model and optimizer as whole named tensors, and back

def same(tensor):
    return tensor


def model_state(model, take=same):
    """{name: take(tensor)} of the bare model. The tensors are the live ones: copy before training
    goes on."""
    return {name: take(p.detach()) for name, p in model.state_dict().items()}


def optimizer_state(optimizer, take=same):
    """The optimizer's state by parameter name: {"state": {name: {key: take(tensor)}},
    "param_groups"}, live as in model_state."""
    state, groups = {}, []
    for group in optimizer.param_groups:
        for name, p in zip(group["names"], group["params"], strict=True):
            if p in optimizer.state:
                state[name] = {k: take(v) for k, v in optimizer.state[p].items()}
        # The group's options, with names in the place of tensors: plain types only.
        plain = {k: v for k, v in group.items() if k not in ("params", "names")}
        groups.append(plain | {"betas": list(group["betas"]), "params": list(group["names"])})
    return {"state": state, "param_groups": groups}


def copy_on_main(tensor, pin):
    """full(tensor) on the CPU of rank 0, a copy that training cannot change (see copy_to_host), and
    None elsewhere. A rank holds one whole tensor at a time. All ranks must call."""
    whole = full(tensor)
    if dist.get_rank():
        return None
    return checkpoint.copy_to_host(whole, pin) if whole.is_cuda or whole is tensor else whole


def check_finite(model, optimizer, iter_num, path, ranks):
    """Raise BadNumbers on all ranks, rather than let what is not finite be saved over `path`. Each
    rank looks at what it holds."""
    bad = [checkpoint.find_not_finite(dict(model=model_state(model, local),
                                           optimizer=optimizer_state(optimizer, local)))]
    if ranks.world_size > 1:
        mine, bad = bad[0], [None] * ranks.world_size
        dist.all_gather_object(bad, mine, group=ranks.control)
    for name in filter(None, bad):
        raise BadNumbers(f"iter {iter_num}: {name} is not finite; not saved over {path}, the last "
                         "good checkpoint")


def without_values(state):
    """A nest of dicts and lists with tensors of shape and dtype alone (on the meta device)."""
    return checkpoint.map_tensors(
        lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), state)


def broadcast_tensor(tensor, outline, ranks):
    """Rank 0's CPU tensor on every rank. outline: the same on the meta device, which tells the
    others what comes."""
    if ranks.world_size == 1:
        return tensor
    tensor = tensor.contiguous() if ranks.is_main else torch.empty(outline.shape, dtype=outline.dtype)
    # As bytes: gloo, which also ranks on GPUs use for control, does not know every type.
    dist.broadcast(tensor.view(-1).view(torch.uint8), src=0, group=ranks.control)
    return tensor


def fill_model(model, outline, tensors, ranks):
    """Fill the model, one tensor at a time, from rank 0's {name: tensor}. outline: the same on the
    meta device, on every rank."""
    own = model.state_dict()
    for name, empty in outline.items():
        assign(own[name], broadcast_tensor(tensors and tensors[name], empty, ranks))


def fill_optimizer(optimizer, outline, tensors, ranks):
    """Fill the optimizer's state, one tensor at a time, from rank 0's {name: {key: tensor}}.
    outline: as in fill_model."""
    optimizer.state.clear()  # what a run that goes back has made since
    named = {n: (p, g) for g in optimizer.param_groups
             for n, p in zip(g["names"], g["params"], strict=True)}
    for name, entry in outline.items():
        for key, empty in entry.items():
            tensor = broadcast_tensor(tensors and tensors[name][key], empty, ranks)
            if name not in named:  # frozen since: all ranks had to take part all the same
                continue
            p, group = named[name]
            if key == "step":  # a scalar; fused kernels want it on the device
                value = tensor.to(p.device if group.get("fused") else "cpu", copy=True)
            else:
                value = torch.zeros_like(p, dtype=empty.dtype)  # sharded, as the parameter is
                assign(value, tensor)
            optimizer.state[p][key] = value


def usable_optimizer_state(optimizer, entries, where, allowed, warn):
    """Those of a checkpoint's optimizer state, `entries` {name: {key: tensor}}, that are of the
    kind this optimizer keeps. That is all of them, unless --allow_change changed what is optimized
    and how: the rest starts afresh."""
    # What each kind of parameter group keeps for a parameter: Muon one average, AdamW two.
    kinds = {n: {"momentum_buffer"} if g["muon"] else {"step", "exp_avg", "exp_avg_sq"}
             for g in optimizer.param_groups for n in g["names"]}
    kept = {n: e for n, e in entries.items() if set(e) - {"ema"} == kinds.get(n)}
    odd = sorted((entries.keys() | kinds.keys() if entries else set()) - kept.keys())
    names = ", ".join(odd[:5]) + (", ..." if len(odd) > 5 else "")
    if odd and not allowed:
        raise CheckpointError(f"the checkpoint in {where} lacks the optimizer state of {names}, or "
                              "has another kind of it; --allow_change optimizer starts it afresh")
    if odd:
        warn(f"optimizer state of {len(odd)} tensors starts afresh: {names}")
    return kept


def make_checkpoint(config, data, model, optimizer, parts, ranks, may_pin):
    """What a checkpoint holds: nanoGPT's keys, the state_dict of every part {name: part}, and what
    tells whether a run may go on from it. The tensors are the live ones; of a sharded model they
    are copies on rank 0, pinned if may_pin(state), and None elsewhere. All ranks must call."""
    take = same
    if any(map(is_sharded, model.parameters())):
        pin = ranks.is_main and may_pin([model_state(model), optimizer_state(optimizer)])
        take = functools.partial(copy_on_main, pin=pin)
    c, progress, shape = config, parts["progress"], getattr(model, "config", None)
    own = {f.name: getattr(c, f.name) for f in fields(c) if f.name not in FIELDS}
    return {
        "model": model_state(model, take), "optimizer": optimizer_state(optimizer, take),
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
    outline, state = start.outline, start.state
    # Rank 0 has the tensors; the others fill theirs with what it sends, in the outline's order.
    weights, moments = (state["model"], state["optimizer"]["state"]) if state else (None, None)
    fill_model(model, outline["model"], weights, ranks)
    entries = usable_optimizer_state(optimizer, outline["optimizer"]["state"], config.out_dir,
                                     config.allow_change, warn)
    if not config.ema:  # any more
        entries = {n: {k: t for k, t in e.items() if k != "ema"} for n, e in entries.items()}
    fill_optimizer(optimizer, entries, moments, ranks)
    for name, part in parts.items():
        if outline[name] or name != "scaler":  # that of a run without float16 is empty
            try:
                part.load_state_dict(outline[name])
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise CheckpointError(f"{start.path}: its {name} is not as it was written: "
                                      f"{type(error).__name__}: {error}") from error
    start.state = None  # its memory is free for training


def check_plain(value, name):
    """Raise CheckpointError unless `value` is made of plain Python types, as ckpt.pt holds them."""
    for k, v in checkpoint.children(value):
        check_plain(v, f"{name}[{k!r}]")
    plain = int, float, bool, str, bytes, type(None)
    if not isinstance(value, (dict, list, tuple)) and type(value) not in plain:
        raise CheckpointError(f"{name} is a {type(value).__name__}; it goes into ckpt.pt: expected "
                              "plain Python types (int, float, str, list, dict, ...)")
