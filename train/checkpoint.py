"""Checkpoints of a run: content, selection at the start, checks and restoring.

A checkpoint holds whole tensors with plain names, the same for one device, DDP and FSDP2. Only
rank 0 reads and writes files. The other ranks receive an outline first, which is the state with
tensors on the meta device (shape and dtype without values), and then one tensor at a time.

The file format is in train/base/checkpoint_file.py, saving in train/base/run_folder.py.
"""

import contextlib
import functools
import math
import os
import pathlib
import sys
from dataclasses import asdict, dataclass, field, fields, is_dataclass

import torch
import torch.distributed as dist
import yaml

from train.base import checkpoint_file as file_format
from train.base.checkpoint_file import load_checkpoint, save_checkpoint  # noqa: F401  public names
from train.base.cli import run_command
from train.base.errors import BadNumbers, CheckpointError
from train.base.fields import key
from train.base.files import write_text
from train.base.run_folder import copy_to_host, find_newest_checkpoint, move_aside
from train.config import FIELDS, START_KEYS, find_differences, format_value, input_files
from train.distributed import Ranks, assign, broadcast_from_rank0, full, is_sharded, local
from train.optimizer import create_state

MAX_SHOWN_CHARS = 200

# Keys that a checkpoint needs to be resumed, with the type of each; and all keys that it may have.
REQUIRED_KEYS = dict(optimizer=dict, iter_num=int, config=dict, progress=dict, scaler=dict,
                     plateau=dict, early_stopping=dict, spikes=list, data=object)
KNOWN_KEYS = {*REQUIRED_KEYS, "model", "model_args", "best_val_loss", "format_version", "rng",
              "tokenizer", "spec", "world_size", "torch"}


# -----------------------------------------------------------------------------
# where a run starts

@dataclass
class Start:
    """Where a run starts.

    kind: "scratch", "resume" or "init_from". path, state: the checkpoint, `state` on rank 0 only.
    outline: the state without tensor values, on every rank. shape: {key: value} of the
    configuration that the run inherits from the checkpoint.
    """
    kind: str = "scratch"
    path: str = ""
    state: dict | None = None
    shape: dict = field(default_factory=dict)

    def __post_init__(self):
        self.outline = without_values(self.state)

    def __getstate__(self):  # sent to the ranks other than 0
        return self.__dict__ | {"state": None}


def weights_module():
    """Return model/core/weights.py, which handles weights of a different run.
    Imported here only: train/ does not depend on model/."""
    from model.core import weights
    return weights


def find_start(folder, config, ranks, log):
    """Lock `folder` (a RunFolder) and return the Start of the run. Raises CheckpointError on all
    ranks."""
    def find():
        folder.open()
        if config.resume == "never":
            check_not_moved(config)
            if config.eval_only:
                raise CheckpointError("--eval_only with --resume never: nothing to evaluate")
        state, path = find_checkpoint(config.out_dir, config.resume, log)
        kind = "scratch" if state is None else "resume"
        if state is None and config.init_from != "scratch":
            kind = "init_from"
            path = config.init_from
            state = weights_module().read_weights(path)
        if config.eval_only and kind == "scratch":
            raise CheckpointError(f"--eval_only: there is no ckpt.pt in {config.out_dir}, and no "
                                  "--init_from: nothing to evaluate")
        if kind == "resume" and (state.get("config") or {}).get("family"):  # an earlier version
            state["config"] = weights_module().upgrade_args(state["config"])
        # A resumed run inherits the same values as when it started from the weights.
        shape = (weights_module().take_checkpoint_shape(config, state, path)
                 if config.init_from != "scratch" else {})
        if kind == "resume" and config.max_minutes:
            shape |= measured_length(config, state.get("config") or {})
        if kind == "init_from":
            log_overrides(config, shape, path, log)
        return Start(kind, path, state, shape)
    return broadcast_from_rank0(find, ranks)


def log_overrides(config, shape, path, log):
    """Log the explicit values of `config` that `shape`, inherited from `path`, replaces."""
    defaults = {f.name: f.default for f in fields(config)}
    for name, value in shape.items():
        if (old := getattr(config, name)) != defaults[name]:
            log(f"{name}: {value} from {path} (overrides {old})")


def measured_length(config, old):
    """Return {key: value} of the length that max_minutes gave a run when it started with the
    configuration `old`. Raises CheckpointError if max_minutes has changed."""
    if old.get("max_minutes") != config.max_minutes:
        raise CheckpointError(
            f"max_minutes {config.max_minutes:g}: this run already has a length of "
            f"{old.get('max_iters')} steps; to make it longer, remove max_minutes and set "
            "--max_iters")
    return {name: old.get(name) for name in ("max_iters", "max_epochs", "lr_decay_iters")}


def inherited_shape(config):
    """Return ({key: value} that a new run inherits from the weights that it starts from, file of
    the weights), without starting a run. Raises CheckpointError."""
    for path in input_files(config, (True,)).values():
        weights = weights_module()
        return weights.take_checkpoint_shape(config, weights.read_weights(path), path), path
    return {}, None


def check_not_moved(config):
    """Raise CheckpointError if --resume never would move a file that the run reads."""
    for name, path in input_files(config).items():
        if os.path.dirname(os.path.abspath(path)) == os.path.abspath(config.out_dir):
            raise CheckpointError(f"--{name} {path} is in out_dir, and --resume never moves the "
                                  "files of out_dir; choose another --out_dir")


def find_checkpoint(folder, resume, log):
    """Return (state, path) of the checkpoint selected by `resume` (auto, never, must or a file), on
    rank 0; (`None`, `None`): start from scratch. Raises CheckpointError.

    torchrun restarts a failed job with the same command line. Such a restart always resumes:
    `never`, `must` and a file refer to the state before the job, which .job in the folder names.
    """
    job = os.environ.get("TORCHELASTIC_RUN_ID", "")
    job += f" {os.getppid()}" if job == "none" else ""  # torchrun's default for every job
    mark = pathlib.Path(folder, ".job")
    restarted = False
    with contextlib.suppress(OSError):
        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and (
            mark.read_text() == job)
    state, path = None, None
    if resume in ("auto", "must") or restarted:
        state, path = find_newest_checkpoint(folder, log)
    elif resume != "never":
        state, path = load_checkpoint(resume), resume
    elif moved := move_aside(folder):
        log(f"--resume never: moved the files in {folder} to {moved}")
    if state is None and resume == "must":
        raise CheckpointError(f"--resume must: there is no ckpt.pt in {folder}")
    if job:
        with contextlib.suppress(OSError):  # a read-only folder: eval_only
            write_text(mark, job)
    return state, path


def find_latest(folder, ranks, log):
    """Return the Start at the newest checkpoint in `folder`."""
    def find():
        state, path = find_newest_checkpoint(folder.path, log)
        return Start() if state is None else Start("resume", path, state)
    return broadcast_from_rank0(find, ranks)


def load_best(model, folder, ranks):
    """Load the weights of ckpt_best.pt, if it exists in `folder`, into `model`.
    Return a description of the weights that `model` then has."""
    path = folder.file("ckpt_best.pt")

    def read():
        return Start("resume", path, load_checkpoint(path)) if os.path.exists(path) else Start()
    best = broadcast_from_rank0(read, ranks)
    if best.kind == "scratch":
        return "the last weights"
    fill_model(model, best.outline["model"], best.state and best.state["model"], ranks)
    return path


def load_weights(model, start, config, spec, ranks, log):
    """Initialise `model` with the weights of `start`, a checkpoint of a different run. spec:
    Data.spec. Raises CheckpointError on all ranks."""
    def read():
        weights = weights_module()
        weights.check_tokenizer(start.state.get("tokenizer"), spec.get("tokenizer"), start.path,
                                config.allow_change)
        weights.check_must_match(start.state, config, spec, start.path)
        start.state = weights.adopt_weights(model, start.state, start.path, log)
        return without_values(start.state)
    fill_model(model, broadcast_from_rank0(read, ranks), start.state, ranks)


# -----------------------------------------------------------------------------
# whether a checkpoint fits the run

def check_fits(start, config, data, model, ranks, log):
    """Raise CheckpointError, on all ranks, unless a run of `config` on `data` with `model` can
    resume from the checkpoint of `start`."""
    expected = model.state_dict()  # of a sharded model, on all ranks
    broadcast_from_rank0(
        lambda: check_same_run(start.state, start.path, config, data, expected, log), ranks)


def check_same_run(state, path, config, data, expected, log):
    """Raise CheckpointError unless the checkpoint `state` is complete and was written by a run with
    the same configuration (except --allow_change) and data, and a model with the tensors
    `expected`."""
    missing = [k for k, kind in REQUIRED_KEYS.items()
               if k not in state or not isinstance(state[k], kind)]
    if missing or not isinstance(state["optimizer"].get("state"), dict):
        raise CheckpointError(
            f"{path} has weights but not the rest of a run ({', '.join(missing) or 'optimizer'}); "
            f"to start from its weights: --init_from {path} and another --out_dir")
    if unknown := [str(k) for k in state if k not in KNOWN_KEYS]:
        log(f"{path}: ignoring unknown keys: {', '.join(unknown)}")
    changes = find_changes(state, config, data)
    allowed = config.allow_change
    refused = [] if "all" in allowed else [k for k in changes if k not in allowed]
    if refused:
        # --allow_change does not change shapes.
        allow = "" if file_format.mismatches("", state["model"], expected) else (
            f"continue regardless with --allow_change {','.join(refused)}, ")
        raise CheckpointError(
            f"{path} was trained with a different configuration:\n"
            + file_format.bullets(map(changes.get, refused))
            + f"\nundo the changes, {allow}start from scratch with --resume never (existing files "
            "are renamed, not deleted), or choose another --out_dir")
    check_tensors(state, expected, path)


def find_changes(state, config, data):
    """Return {name: message} of all differences between the run of a checkpoint and this one: keys
    of the configuration, the content of the data, entries of Data.spec."""
    keys = {f.name: f for f in fields(config)}
    changes = {k: f"{k}: checkpoint has {old!r}, now {new!r}"
               for k, old, new in find_differences(state["config"], asdict(config), keys)}
    old = translate(state["data"], data.renamed)
    new = data.train.fingerprint()
    if old != new:
        changes["data"] = f"data: {config.data_dir} has different content: {old}, now {new}"
    # Checkpoints of early versions have no spec.
    old = translate(state.get("spec") or data.spec, data.renamed)
    new = data.spec
    for k in sorted(old.keys() | new.keys()):
        if not nearly_equal(old.get(k), new.get(k)):
            changes.setdefault(k, f"{k}: checkpoint has {str(old.get(k))[:80]}, now "
                                  f"{str(new.get(k))[:80]}")
    return changes


def translate(value, names):
    """Return a nested dict in which strings are replaced by `names` {old: new}."""
    if isinstance(value, dict):
        return {k: translate(v, names) for k, v in value.items()}
    return names.get(value, value) if isinstance(value, str) else value


def nearly_equal(a, b):
    """Return whether values are equal, floats within 5%: statistics of the data differ a little
    between precisions."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(nearly_equal, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=0.05, abs_tol=0.01)
    return a == b


def check_tensors(state, expected, path):
    """Raise CheckpointError unless the weights and the optimizer state of a checkpoint have the
    names, shapes and dtypes of `expected`, the model's {name: tensor}."""
    problems = file_format.mismatches("", state["model"], expected)
    for name, entry in state["optimizer"]["state"].items():
        if not isinstance(entry, dict):
            problems.append(f"optimizer state of {name}: a {type(entry).__name__}")
        elif name not in expected:
            problems.append(f"optimizer state of unknown parameter {name}")
    file_format.raise_mismatches(problems, path)


# -----------------------------------------------------------------------------
# from a run to a checkpoint

def make_checkpoint(config, data, model, optimizer, parts, ranks, can_pin):
    """Return the content of a checkpoint: nanoGPT's keys, the state_dict of every part
    {name: part}, and facts that a resume compares. All ranks must call.

    Tensors share memory with the model. Tensors of a sharded model are copies on rank 0, in pinned
    memory if can_pin(state), and `None` on other ranks.
    """
    take = as_is
    if any(map(is_sharded, model.parameters())):
        pin = ranks.is_main and can_pin([model_state(model), optimizer_state(optimizer)])
        take = functools.partial(copy_to_rank0, pin=pin)
    progress = parts["progress"]
    shape = getattr(model, "config", None)
    own_keys = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in FIELDS}
    return {
        "model": model_state(model, take),
        "optimizer": optimizer_state(optimizer, take),
        "model_args": asdict(shape) if is_dataclass(shape) else own_keys,
        "iter_num": progress.iter_num,
        "best_val_loss": progress.best_val_loss,
        "config": asdict(config),
        "format_version": file_format.FORMAT_VERSION,
        # Every random number is a function of (seed, step, rank): the seed is the entire state.
        "rng": {"seed": config.seed},
        "data": data.train.fingerprint(),
        "spec": data.spec,
        "tokenizer": data.spec.get("tokenizer"),
        "world_size": ranks.world_size,
        "torch": str(torch.__version__),
        **{name: part.state_dict() for name, part in parts.items()}}


def as_is(tensor):
    return tensor


def model_state(model, take=as_is):
    """Return {name: take(tensor)} of the bare model."""
    return {name: take(p.detach()) for name, p in model.state_dict().items()}


def optimizer_state(optimizer, take=as_is):
    """Return the optimizer's state by parameter name: {"state": {name: {key: take(tensor)}},
    "param_groups": [options]}. The options are plain types, with names instead of parameters."""
    state = {}
    groups = []
    for group in optimizer.param_groups:
        for name, p in zip(group["names"], group["params"], strict=True):
            if p in optimizer.state:
                state[name] = {k: take(v) if isinstance(v, torch.Tensor) else v
                               for k, v in optimizer.state[p].items()}
        options = {k: list(v) if isinstance(v, tuple) else v for k, v in group.items()
                   if k not in ("params", "names")}
        groups.append(options | {"params": list(group["names"])})
    return {"state": state, "param_groups": groups}


def copy_to_rank0(tensor, pin):
    """Return a copy of the whole tensor on the CPU of rank 0, `None` on other ranks. A rank holds
    one whole tensor at a time. All ranks must call."""
    whole = full(tensor)
    if dist.get_rank():
        return None
    return copy_to_host(whole, pin) if whole.is_cuda or whole is tensor else whole


def check_finite(model, optimizer, iter_num, path, ranks):
    """Raise BadNumbers on all ranks if weights or optimizer state are non-finite; the
    checkpoint at `path` is then kept. Each rank checks the local shards."""
    state = dict(model=model_state(model, local), optimizer=optimizer_state(optimizer, local))
    names = [file_format.find_non_finite(state)]
    if ranks.world_size > 1:
        own = names[0]
        names = [None] * ranks.world_size
        dist.all_gather_object(names, own, group=ranks.control)
    for name in filter(None, names):
        raise BadNumbers(f"iter {iter_num}: {name} is not finite; not saved over {path}, the last "
                         "good checkpoint")


def check_plain(value, name):
    """Raise CheckpointError unless `value` consists of plain Python types, which ckpt.pt needs."""
    for k, v in file_format.child_items(value):
        check_plain(v, f"{name}[{k!r}]")
    plain = int, float, bool, str, bytes, type(None)
    if not isinstance(value, (dict, list, tuple)) and type(value) not in plain:
        raise CheckpointError(f"{name} is a {type(value).__name__}; it is saved in ckpt.pt: "
                              "expected plain Python types (int, float, str, list, dict, ...)")


# -----------------------------------------------------------------------------
# from a checkpoint to a run

def restore(start, config, model, optimizer, parts, ranks, warn):
    """Load the checkpoint of `start` into model, optimizer and the other parts {name: part}."""
    outline = start.outline
    weights = start.state and start.state["model"]
    moments = start.state and start.state["optimizer"]["state"]
    create_state(optimizer)
    entries = select_optimizer_state(optimizer, outline["optimizer"]["state"], config, warn)
    fill_optimizer(optimizer, entries, moments, ranks, start.path)
    fill_model(model, outline["model"], weights, ranks)
    for name, part in parts.items():
        if outline[name] or name != "scaler":  # {} for a run without float16
            try:
                part.load_state_dict(outline[name])
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise CheckpointError(f"{start.path}: its {name} has an unknown format: "
                                      f"{type(error).__name__}: {error}") from error
    start.state = None  # frees the memory


def select_optimizer_state(optimizer, entries, config, warn):
    """Return the entries of a checkpoint's optimizer state {name: {key: tensor}} that have the keys
    of the state of `optimizer`. After --allow_change the other entries are newly
    initialised, with a warning; without it this raises CheckpointError."""
    keys = {n: set(optimizer.state.get(p, ())) for g in optimizer.param_groups
            for n, p in zip(g["names"], g["params"])}
    usable = {n: e for n, e in entries.items() if set(e) - {"ema"} == keys.get(n)}
    unusable = sorted((entries.keys() | keys.keys() if entries else set()) - usable.keys())
    names = ", ".join(unusable[:5]) + (", ..." if len(unusable) > 5 else "")
    if unusable and not config.allow_change:
        raise CheckpointError(f"the checkpoint in {config.out_dir} lacks the optimizer state of "
                              f"{names}; --allow_change optimizer initialises it newly")
    if unusable:
        warn(f"optimizer state of {len(unusable)} tensors is newly initialised: {names}")
    if not config.ema:
        usable = {n: {k: t for k, t in e.items() if k != "ema"} for n, e in usable.items()}
    return usable


def without_values(state):
    """Return a nested state with all tensors on the meta device: shape and dtype only."""
    return file_format.map_tensors(
        lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), state)


def broadcast_tensor(tensor, outline, ranks):
    """Return rank 0's CPU `tensor` on every rank. outline: shape and dtype, on every rank."""
    if ranks.world_size == 1:
        return tensor
    if ranks.is_main:
        tensor = tensor.contiguous()
    else:
        tensor = torch.empty(outline.shape, dtype=outline.dtype)
    # As bytes: the control group uses gloo, which does not support every dtype.
    dist.broadcast(tensor.view(-1).view(torch.uint8), src=0, group=ranks.control)
    return tensor


def fill_model(model, outline, tensors, ranks):
    """Load rank 0's `tensors` {name: tensor} into the model, one at a time. outline: the same on
    the meta device, on every rank."""
    own = model.state_dict()
    for name, empty in outline.items():
        assign(own[name], broadcast_tensor(tensors and tensors[name], empty, ranks))


def fill_optimizer(optimizer, outline, tensors, ranks, path="checkpoint"):
    """Load rank 0's `tensors` {name: {key: tensor}} into the state of the optimizer, which exists
    (create_state), one at a time. outline: as in fill_model. The state of other parameters is
    removed: the next step creates it. CheckpointError if shapes differ."""
    params = {name: p for group in optimizer.param_groups
              for name, p in zip(group["names"], group["params"], strict=True)}
    for name, entry in outline.items():
        for slot, empty in entry.items():
            is_tensor = isinstance(empty, torch.Tensor)  # else a number, which the outline has
            tensor = broadcast_tensor(tensors and tensors[name][slot], empty,
                                      ranks) if is_tensor else empty
            if name not in params:  # now frozen; the broadcast still needs all ranks
                continue
            state = optimizer.state[params[name]]
            if slot == "ema":
                state[slot] = torch.zeros_like(params[name])
            if is_tensor or isinstance(state.get(slot), torch.Tensor):
                file_format.raise_mismatches(file_format.mismatches(
                    f"optimizer {name} ", {slot: empty}, {slot: state.get(slot)}), path)
                assign(state[slot], tensor)
            else:
                state[slot] = tensor
    for name in params.keys() - outline.keys():
        optimizer.state.pop(params[name], None)


def check_on_first_step(optimizer):
    """Check, after the first step of an optimizer, that a checkpoint would hold its entire state:
    save it to memory, restore and compare it. CheckpointError otherwise."""
    def attributes():
        return {k: repr(v) for k, v in vars(optimizer).items()
                if not k.startswith("_") and k not in ("state", "param_groups", "defaults")}

    def check(*_):
        handle.remove()
        before = attributes()
        state = optimizer_state(optimizer, torch.clone)["state"]
        create_state(optimizer)
        changed = [f"attribute {k}" for k, text in attributes().items() if before.get(k) != text]
        fill_optimizer(optimizer, without_values(state), state, Ranks(), kind)
        restored = optimizer_state(optimizer)["state"]
        changed += [f"state of {name}" for name, entry in state.items()
                    if any(not torch.equal(local(restored[name][k]), local(v))
                           for k, v in entry.items() if isinstance(v, torch.Tensor))]
        if changed:
            raise CheckpointError(f"{kind}: {', '.join(changed[:3])} could not be resumed from a "
                                  "checkpoint, which holds optimizer.state: keep it there")
    kind = f"optimizer {type(optimizer).__name__}"
    handle = optimizer.register_step_post_hook(check)


# -----------------------------------------------------------------------------
# python -m train.checkpoint FILE

@dataclass
class ShowOptions:
    """Print a checkpoint without tensors: the state as comments, then the configuration as YAML
    for run_train.py --config."""
    ckpt: str = key("", "e.g. out/ckpt_0001000.pt", positional=True, metavar="FILE")


def show(options):
    """Print what the checkpoint `options.ckpt` contains, without tensors."""
    state = load_checkpoint(options.ckpt)
    sizes = [t.numel() for _, t in file_format.named_tensors(state["model"])]
    print(f"# {options.ckpt}: {len(sizes)} tensors, {sum(sizes):,} parameters and buffers")
    for name in sorted(state.keys() - {"model", "optimizer", "config"}):
        print(f"# {name}: {format_value(state[name])}"[:MAX_SHOWN_CHARS])
    config = {k: v for k, v in (state.get("config") or {}).items() if k not in START_KEYS}
    print(yaml.safe_dump(config, sort_keys=False), end="")


def main(argv=None):
    return run_command(ShowOptions, show, argv)


if __name__ == "__main__":
    sys.exit(main())
