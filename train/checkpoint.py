"""Checkpoints of a run: content, selection at the start, checks and restoring.

A checkpoint is the same for one device, DDP, FSDP2 and HSDP: it contains whole tensors, with the
names of the model without wrappers. A checkpoint in one file is read and written by rank 0 only;
the other ranks receive the state with its tensors on the meta device (shape and dtype without
values), and later the values, one tensor at a time. Of a sharded checkpoint, every rank writes the
shards that it holds and reads the rows that it needs.

The formats are in train/base/checkpoint_file.py and train/base/sharded_file.py, saving in
train/base/run_folder.py.
"""

import math
import os
from dataclasses import asdict, dataclass, field, fields, is_dataclass

import torch
import torch.distributed as dist

from train import distributed
from train.base import checkpoint_file as file_format
from train.base.checkpoint_file import load_checkpoint as load_checkpoint  # public names
from train.base.checkpoint_file import open_checkpoint
from train.base.checkpoint_file import save_checkpoint as save_checkpoint
from train.base.errors import BadNumbers, CheckpointError, SetupError, quote_path
from train.base.fields import fields_by_name
from train.base.run_folder import find_newest_checkpoint, restarted_job
from train.base.sharded_file import MANIFEST, Shards, new_folder
from train.base.tensors import SAFETENSORS_DTYPES, find_non_finite, map_tensors, named_tensors, walk
from train.config import FIELDS, find_differences, keys_of_moved_files
from train.distributed import Ranks, broadcast_from_rank0, gather_objects, is_sharded, local
from train.optimizer import assign_numbers, create_state, find_numbers, parts_outside_state

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
# Keys that a checkpoint needs to be resumed, besides the weights.
REQUIRED_KEYS = ("optimizer", "iter_num", "config", "progress", "scaler", "plateau",
                 "early_stopping", "spikes", "data")

# Where a user's code makes the entry of a checkpoint, for messages.
PLAIN_SOURCES = dict(spec="Data.spec", data="fingerprint() of the training data",
                     val_data="fingerprint() of the validation data",
                     model_args="the model's attribute config", progress="numbers() of the model")


# -----------------------------------------------------------------------------
# where a run starts

@dataclass
class Start:
    """The point from which a run starts, as find_start() returns it.

    kind: "scratch", "resume" (continue the run of a checkpoint) or "init_from" (a new run that
    starts with the weights of a checkpoint).
    path: of the checkpoint, or config.init_from for "init_from"; "" for scratch.
    state: content of the checkpoint; `None` for scratch, and after the run has loaded it. On ranks
    other than 0, and for a sharded checkpoint, the tensors are on the meta device (no values).
    shards: a Shards, from which each rank reads the values of a sharded checkpoint; otherwise
    `None`.
    shape: {key: value} of the architecture, e.g. n_layer, used in place of configuration values.
    """
    kind: str = "scratch"
    path: str = ""
    state: dict | None = None
    shards: Shards | None = None
    shape: dict = field(default_factory=dict)

    def __getstate__(self):  # sent to the ranks other than 0
        return self.__dict__ | {"state": without_values(self.state)}


def weights_module():
    """Return model.core.weights, imported late: train/ can be imported without model/."""
    from model.core import weights
    return weights


def find_start(folder, config, ranks, log):
    """Create and lock `folder` (a RunFolder), and return the Start of the run.

    The Start is the checkpoint that config.resume selects (find_checkpoint), otherwise the weights
    of config.init_from, otherwise from scratch. If a sharded checkpoint in out_dir is damaged, an
    older one is used. With config.mirror, first set folder.mirror, on rank 0, and copy a newer
    checkpoint from the mirror to out_dir.
    log(text): called with messages on rank 0.
    All ranks must call. Raises on all ranks: CheckpointError if a checkpoint cannot be used, or if
    config.eval_only is set and there are no weights; UserError if the folder is locked.
    """
    damaged = {}  # sharded checkpoints, see find_newest_checkpoint()

    def find():
        start = find_checkpoint(config, log, damaged)
        state = start.state or {}
        # Also without a checkpoint: the source files are read now, and may be edited before a save.
        weights_module().formulas.warn_of_differences(state, start.path, config.model)
        old = state.get("config") or {}
        if old:  # maybe of an earlier version
            state["config"] = weights_module().load.upgrade_config(old, fields_by_name(config))
        first = old.get("init_from")  # a resumed run has the shape that it had at its start
        if start.kind == "scratch" and config.init_from != "scratch":
            first = config.init_from
            start = Start("init_from", first, weights_module().read_named(first, "init_from"))
        if start.kind == "scratch" and config.eval_only:
            raise CheckpointError(f"--eval_only: no ckpt.pt in {config.out_dir}, and no "
                                  "--init_from: nothing to evaluate")
        if "scratch" not in (config.init_from, first):
            start.shape = weights_module().take_shape(config, start.state, start.path)
        if start.kind == "init_from":
            for name, value in start.shape.items():
                if (given := getattr(config, name)) != fields_by_name(config)[name].default:
                    log(f"{name}: {value} from {start.path} (overrides {given})")
        return start

    def open_folder():
        folder.open()
        if config.mirror:
            from train.options.mirror import Mirror
            folder.mirror = Mirror(config, folder.path)
            folder.mirror.fetch(log)
    broadcast_from_rank0(open_folder, ranks)
    while True:
        start = broadcast_from_rank0(find, ranks)
        if not (problem := find_damage(start, ranks)):
            return start
        damaged[start.path] = problem


def find_damage(start, ranks):
    """Return a message if shards of `start` are damaged, otherwise ""; all ranks must call.

    Raises CheckpointError if shards cannot be read for a reason outside of the files.
    """
    problem = False, ""  # whether the reason is outside, and the message
    try:
        if start.shards:  # at the world size of the save: this rank's own files
            start.shards.verify(sorted(start.shards.files)[ranks.rank::ranks.world_size])
    except (ValueError, OSError) as error:
        problem = file_format.is_temporary(error), f"{start.path}: {error}"
    is_temporary, message = max(gather_objects(problem, ranks))
    if is_temporary:
        raise CheckpointError(message)
    return message


def find_checkpoint(config, log, damaged):
    """Return the Start of the checkpoint to resume (shape not set), of kind "scratch" without one.

    config.resume is
        auto    the newest checkpoint in out_dir, if any
        must    the same; CheckpointError without one
        never   no checkpoint; RunFolder.take() moves files of an earlier run to a subfolder
        a path  this checkpoint: a file, a folder with ckpt.pt or a folder of shards
    After a restart by torchrun, the newest checkpoint in out_dir takes precedence in all four
    cases.
    damaged: {path: problem} of checkpoints that must not be used.
    log(text): called with messages. Call it on rank 0 only. Raises CheckpointError.
    """
    folder = config.out_dir
    if config.resume in ("auto", "must") or restarted_job(folder)[1]:
        state, path, shards = find_newest_checkpoint(folder, log, damaged)
        if state is not None:
            return Start("resume", path, state, shards)
        if config.resume == "must":
            raise CheckpointError(f"--resume must: there is no ckpt.pt in {folder}")
    elif config.resume == "never" and (inside := keys_of_moved_files(config)):
        raise CheckpointError(f"{', '.join(inside)}: in out_dir, and --resume never moves the "
                              "files of out_dir; choose another --out_dir")
    if not config.resume_file:
        return Start()
    inside = os.path.join(config.resume, "ckpt.pt")
    path = inside if os.path.isfile(inside) else config.resume
    if not any(map(os.path.isfile, (path, os.path.join(path, MANIFEST)))):
        raise CheckpointError(f"{path}: no such file or folder with ckpt.pt; --resume takes "
                              "auto, must, never or a checkpoint")
    if path in damaged:
        raise CheckpointError(damaged[path])
    return Start("resume", path, *open_checkpoint(path))


def load_best(model, folder, config, ranks):
    """Load the weights of ckpt_best.pt, if any, into `model`, in place; return a text for the log.

    If config.early_stopping_metric is a number of the averaged weights (--ema), load these instead.
    The text is the path, "the running averages (--ema) in PATH" or, without the file, "the last
    weights". All ranks must call. Raises CheckpointError.
    """
    path = folder.file("ckpt_best.pt")

    def read():
        return Start("resume", path, *open_checkpoint(path)) if os.path.exists(path) else Start()
    best = broadcast_from_rank0(read, ranks)
    if best.kind == "scratch":
        return "the last weights"
    if problem := find_damage(best, ranks):
        raise CheckpointError(problem)
    own = model.state_dict()
    fill(own, best.state["model"], ranks, best.shards, "model.")
    shown = os.path.join(config.out_dir, "ckpt_best.pt")
    if not (config.ema and config.early_stopping_metric.endswith("_ema")):
        return shown
    averages = {name: {"ema": entry["ema"]}
                for name, entry in best.state["optimizer"]["state"].items() if "ema" in entry}
    fill({name: {"ema": own[name]} for name in averages}, averages, ranks, best.shards,
         "optimizer.state.")
    return f"the running averages (--ema) in {shown}"


def load_weights(model, start, config, spec, ranks, log):
    """Copy the weights of another run into `model`; return whether they cover all tensors.

    start: of kind "init_from"; on rank 0, start.state is replaced by its weights {name: tensor}.
    config, spec: TrainConfig and Data.spec of the new run.
    log(text): called with messages on rank 0.
    Tensors that the checkpoint lacks keep their values. All ranks must call. Raises CheckpointError
    on all ranks if no tensor fits by name, if a shape differs or, e.g., the tokenizer.
    """
    def read():
        weights_module().check_must_match(start.state, config, spec, start.path)
        start.state = weights_module().adopt_weights(model, start.state, start.path, log)
        return start
    weights = broadcast_from_rank0(read, ranks).state
    own = model.state_dict()
    fill(own, weights, ranks)
    return len(weights) == len(own)


# -----------------------------------------------------------------------------
# whether a checkpoint fits the run

def check_fits(start, config, data, model, ranks):
    """Raise CheckpointError, on all ranks, if the run of `start` cannot be resumed.

    The checkpoint must have REQUIRED_KEYS, `model` tensors with equal names, shapes and dtypes, and
    config.allow_change all names in find_changes(), or "all". All ranks must call.
    """
    expected = model.state_dict()  # of a sharded model, on all ranks

    def check():
        state = start.state
        missing = [name for name in REQUIRED_KEYS if name not in state
                   or name == "optimizer" and not state[name]]  # {}: deleted by the user
        remedy = f"to use its weights: --init_from {quote_path(start.path)} and another --out_dir"
        if missing:
            raise CheckpointError(f"{start.path} has weights but not the rest of a run (no "
                                  f"{', '.join(missing)}); {remedy}")
        if state["progress"].get("data_shift"):  # written by an earlier version
            raise CheckpointError(f"{start.path}: after a loss spike the run skipped batches "
                                  f"(on_spike: rewind), which is no longer supported; {remedy}")
        file_format.check_unchanged(
            find_changes(state, config, data), start.path, config.allow_change, ", start from "
            "scratch with --resume never (files are renamed), or choose another --out_dir",
            fits=not file_format.describe_mismatches(state["model"], expected))
        file_format.check_match(state["model"], expected, start.path)
    broadcast_from_rank0(check, ranks)


def find_changes(state, config, data):
    """Return {name: (old value, new value)} of changes since a checkpoint that affect the results.

    state: content of the checkpoint. The names are configuration keys, "data" (the fingerprint of
    the training data) and keys of Data.spec (`None` where a spec does not have the key).
    """
    # Keys that did not exist in the version of the checkpoint had the effect of their defaults.
    changes = {name: values for name, *values in find_differences(
        asdict(type(config)()) | state["config"], asdict(config), fields_by_name(config))}
    # Checkpoints of early versions have no spec.
    old = dict(state.get("spec") or data.spec, data=state["data"])
    new = dict(data.spec, data=data.train.fingerprint())
    for name in sorted(old.keys() | new.keys(), key=str):
        if not nearly_equal(old.get(name), new.get(name)):
            changes.setdefault(name, (old.get(name), new.get(name)))
    return changes


def find_evaluation_changes(state, config, data, task_metrics=()):
    """Return the names of changes since a checkpoint after which best metrics are not comparable.

    state: content of the checkpoint; task_metrics: names of the metrics of config.eval_tasks.
    The names are early_stopping_metric, early_stopping_mode, "validation data", "validation
    samples" (per evaluation) and, if early_stopping_metric is in task_metrics, eval_task_rows.
    Unknown values do not differ, e.g. the validation data of a run without evaluations.
    """
    names = ["early_stopping_metric", "early_stopping_mode"]
    if config.early_stopping_metric in task_metrics:
        names.append("eval_task_rows")
    loaders = [data.val] if data.val else []
    if hasattr(data.val, "shares"):  # eval_iters is the number of batches per source of a mixture
        loaders = data.val.loaders.values()

    def settings(keys, fingerprint):
        samples = keys["eval_iters"] * keys["batch_size"]
        return {name: keys.get(name) for name in names} | {
            "validation data": fingerprint,
            "validation samples": sum(min(samples, x.samples) for x in loaders) or None}
    old = settings(state["config"], state.get("val_data"))
    new = settings(asdict(config), data.fingerprints()["val"])
    return [n for n in new if None not in (old[n], new[n]) and old[n] != new[n]]


def nearly_equal(a, b):
    """Return whether two values of Data.spec are equal; floats, also in lists, up to 5% or 0.01."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(nearly_equal, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=0.05, abs_tol=0.01)
    return a == b


# -----------------------------------------------------------------------------
# from a run to a checkpoint

def make_checkpoint(config, data, model, optimizer, parts, ranks):
    """Return the content of a checkpoint: weights, optimizer state and make_plain_part().

    Tensors are not copied: they share memory with `model` and `optimizer`. Exception: of a sharded
    model, unless config.saves_shards(), they are full CPU copies on rank 0, `None` on other ranks.
    All ranks must call. Raises CheckpointError as make_plain_part() does.
    """
    tensors = {"model": dict(model.state_dict()), "optimizer": optimizer_state(optimizer)}
    if any(map(is_sharded, model.parameters())) and not config.saves_shards(ranks.world_size):
        tensors = map_tensors(copy_to_rank0, tensors)
    return tensors | make_plain_part(config, data, model, parts, ranks)


def make_plain_part(config, data, model, parts, ranks):
    """Return a checkpoint's content, a dict, without weights and optimizer state.

    parts: {name: object with state_dict()}, among them "progress", a Progress.
    The dict has nanoGPT's keys (model_args, iter_num, best_val_loss, config), the parts, and facts
    that a resume compares. Raises CheckpointError if it has other than plain Python types.
    """
    progress = parts["progress"]
    shape = getattr(model, "config", None)
    own_keys = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in FIELDS}
    state = {
        "model_args": asdict(shape) if is_dataclass(shape) else own_keys,
        "iter_num": progress.iter_num,
        "best_val_loss": progress.best_val_loss,
        "config": asdict(config),
        "format_version": file_format.FORMAT_VERSION,
        # Every random number is a function of (seed, step, rank): the seed is the entire state.
        "rng": {"seed": config.seed},
        "data": data.train.fingerprint(),
        "val_data": data.fingerprints()["val"],
        "spec": data.spec,
        "formulas": weights_module().formulas.edited(config.model),
        "tokenizer": data.spec.get("tokenizer"),
        "world_size": ranks.world_size,
        "torch": str(torch.__version__),
        **{name: part.state_dict() for name, part in parts.items()}}
    for name, value in state.items():
        check_plain(value, PLAIN_SOURCES.get(name, name))
    return state


def named_params(optimizer):
    """Return {name: parameter} of an optimizer from build_optimizer(), by the groups' "names"."""
    return {name: p for group in optimizer.param_groups
            for name, p in zip(group["names"], group["params"], strict=True)}


def optimizer_state(optimizer):
    """Return the optimizer's state_dict() with parameter names in place of numbers.

    It is {"state": {name: {key: value}}, "param_groups": [{option: value, "params": [name, ...]}],
    "numbers": find_numbers()}. Tensors are not copied. A parameter that has had no gradient yet has
    the state {}.
    """
    groups = [{k: list(v) if isinstance(v, tuple) else v for k, v in group.items() if k != "names"}
              | {"params": list(group["names"])} for group in optimizer.param_groups]
    return {"state": {name: dict(optimizer.state.get(p, {}))
                      for name, p in named_params(optimizer).items()},
            "param_groups": groups, "numbers": find_numbers(optimizer)}


def copy_to_rank0(tensor):
    """Return the full tensor as a CPU copy on rank 0, `None` elsewhere; all ranks must call."""
    whole = distributed.full(tensor)
    return whole.to("cpu", copy=True) if dist.get_rank() == 0 else None


def save(folder, state, config, ranks, is_best, is_numbered, log, last=False):
    """Save `state`, from make_checkpoint(), in `folder` (a RunFolder); all ranks must call.

    The name is ckpt.pt, if `is_best` also ckpt_best.pt, if `is_numbered` also ckpt_NNNNNNN.pt.
    last: write the files before returning; a failure then raises CollectiveExit. Otherwise a thread
    writes a copy of `state` (this call writes it if memory does not suffice for a copy), and a
    failure is only a warning in `log` (a Logger).
    """
    if not config.saves_shards(ranks.world_size):
        is_copy = config.shards_model(ranks.world_size)
        broadcast_from_rank0(
            lambda: folder.save(state, is_best, is_numbered, log, last, is_copy), ranks)
        return
    links, name = broadcast_from_rank0(
        lambda: (folder.prepare(state["iter_num"], is_best, is_numbered, log),
                 new_folder(state["iter_num"])), ranks)
    plain = without_values(state)

    def write(parts):  # on every rank, in the background or, if `last`, before save() returns
        result = folder.write_shards(name, ranks.rank, parts)
        try:
            written = gather_objects(result, ranks, ranks.saving)
        except Exception as error:  # a rank was killed
            folder.lost = written = [f"rank {ranks.rank} does not reach the others: {error}"]

        def save_manifest(path):
            folder.save_manifest(path, name, plain, written, links)
        if last:
            broadcast_from_rank0(lambda: folder.write(save_manifest, log, last), ranks)
        elif ranks.is_main:
            folder.write(save_manifest, log)
    folder.start(write, own_parts(state, ranks), log, last, n_writers=ranks.ranks_per_node)


def own_parts(state, ranks):
    """Return the part of `state` that this rank writes as shards, {dotted name: [offsets, tensor]}.

    It has the local shards of DTensors (with HSDP only in the first replica) and, on rank 0, other
    tensors; empty ones are left out. offsets: position in the full tensor, an int per dimension.
    """
    parts = {}
    for name, tensor in named_tensors(state):
        row, is_first = distributed.locate_shard(tensor, ranks)
        if is_first and local(tensor).numel():
            parts[name] = [[row, *[0] * tensor.dim()][:tensor.dim()], local(tensor)]
    return parts


def check_finite(model, optimizer, iter_num, path, ranks):
    """Raise BadNumbers if weights or optimizer state are not finite; all ranks must call.

    path: of the previous checkpoint, which the message names if it exists.
    """
    state = map_tensors(local, {"model": dict(model.state_dict()),
                                "optimizer": optimizer_state(optimizer)})
    if name := next(filter(None, gather_objects(find_non_finite(state), ranks)), None):
        kept = f" over {path}, the last good checkpoint" if os.path.exists(path) else ""
        raise BadNumbers(f"iter {iter_num}: {name} is not finite; not saved{kept}")


def find_drift(tensors, ranks):
    """Return the names in `tensors` of unsharded ones that differ between ranks; all must call."""
    if ranks.world_size == 1:
        return []
    sums = {name: add_bits(t) for name, t in tensors.items() if not is_sharded(t)}
    every_rank = [set(sums.items()) for sums in gather_objects(sums, ranks)]
    return sorted({name for name, _ in set.union(*every_rank) - set.intersection(*every_rank)})


def add_bits(tensor):
    """Return a checksum of a tensor, comparable at equal shape, dtype and storage offset."""
    flat = tensor.detach().reshape(-1)
    # As int64 if possible: torch copies smaller integers before it adds them.
    is_aligned = not (flat.nbytes % 8 or flat.storage_offset() * flat.element_size() % 8)
    kind = torch.int64 if is_aligned else INTEGERS[flat.element_size()]
    return int(flat.view(kind).sum(dtype=torch.int64))


def warn_of_drift(model, iter_num, ranks, warn):
    """Warn if trained weights or persistent buffers differ between ranks; all ranks must call."""
    saved = model.state_dict(keep_vars=True).items()
    if names := find_drift({name: t for name, t in saved if t.requires_grad
                            or not isinstance(t, torch.nn.Parameter)}, ranks):
        warn(f"iter {iter_num}: {len(names)} weights differ between ranks, e.g. {names[0]}: the "
             "checkpoint has those of rank 0. What changes weights, buffers, or gradients after "
             "their average, must be equal on all ranks; batches and torch's random numbers differ "
             "between ranks")


def make_savable(model):
    """Raise SetupError if `model` cannot be saved; make buffers contiguous, in place, for a resume.

    It cannot if a trained parameter is not in state_dict(), a tensor there has an unsupported
    dtype, a buffer there is not finite, or a module has an optimizer as an attribute.
    """
    state = model.state_dict()
    unsaved = [name for name, p in model.named_parameters()
               if p.requires_grad and name not in state]
    unsaved += [f"{type(module).__name__}.{name}" for module in model.modules()
                for name, value in vars(module).items()
                if isinstance(value, torch.optim.Optimizer)]
    if unsaved:
        raise SetupError(f"{', '.join(unsaved[:4])} would be in no checkpoint: parameters must be "
                         "in state_dict() (those of adapters: is_saved, is_adapter), and are "
                         "trained by the optimizer of the run, in train/optimizer.py")
    if name := find_non_finite({n: b for n, b in model.named_buffers() if n in state}):
        raise SetupError(f"{name} is not finite, and would be in every checkpoint: if it is a "
                         "constant, register_buffer(..., persistent=False)")
    for name, tensor in state.items():
        if tensor.dtype not in SAFETENSORS_DTYPES.values():
            raise SetupError(f"{name} is {str(tensor.dtype).removeprefix('torch.')}, which a "
                             "checkpoint cannot have: store it with a different dtype, or, if it "
                             "is a constant, register_buffer(..., persistent=False)")
    for buffer in model.buffers():
        buffer.data = buffer.contiguous()


def check_plain(value, name):
    """Raise CheckpointError unless all parts of `value` are plain Python types, not subclasses."""
    plain = int, float, bool, str, bytes, type(None), dict, list, tuple
    for path, part in walk(value):
        for x in (*path[-1:], part):
            if type(x) not in plain:
                raise CheckpointError(
                    f"{name}{''.join(f'[{k!r}]' for k in path)} is a {type(x).__name__}; it is in "
                    "ckpt.pt: expected plain Python types (int, float, str, list, dict, ...)")


# -----------------------------------------------------------------------------
# from a checkpoint to a run

def restore(start, config, model, optimizer, parts, ranks, warn):
    """Load a checkpoint into `model`, `optimizer` and `parts`, in place; all ranks must call.

    start: of kind "resume"; start.state becomes `None`.
    parts: {name: object with load_state_dict()}.
    Raises CheckpointError if something does not fit; with config.allow_change, optimizer state that
    is missing or has other keys is newly initialised, and warn(text) is called.
    """
    state = start.state
    create_state(optimizer)
    entries = select_optimizer_state(optimizer, state["optimizer"]["state"], config, warn)
    restore_optimizer(optimizer, entries, ranks, start.path, start.shards)
    assign_numbers(optimizer, state["optimizer"].get("numbers", {}))
    fill(model.state_dict(), state["model"], ranks, start.shards, "model.")
    for name, part in parts.items():
        try:
            if state[name] or name != "scaler":  # {} for a run without float16
                part.load_state_dict(state[name])
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CheckpointError(f"{start.path}: its {name} has an unknown format: "
                                  f"{type(error).__name__}: {error}") from error
    start.state = None  # frees the memory


def select_optimizer_state(optimizer, entries, config, warn):
    """Return the entries of a checkpoint's optimizer state that can be loaded into `optimizer`.

    entries: {parameter name: {key: value}}; if {}, nothing is selected or missing.
    An entry is selected if it has the same keys (e.g. "exp_avg") as the parameter's state in
    `optimizer`, which must exist (see create_state). The key "ema" (moving average) is not
    compared, and is returned only if config.ema is set. Shapes are not compared. Entries that are
    {} (no gradient yet) are left out.
    An entry that is missing, has different keys or is of no parameter in `optimizer` raises
    CheckpointError. If config.allow_change is not empty, warn(text) is called once instead, for all
    entries of the first two kinds; the third kind is ignored.
    """
    params = named_params(optimizer)
    usable = {}
    unusable = []
    for name in sorted(entries.keys() | params.keys()) if entries else ():
        entry = entries.get(name)
        if entry == {}:  # had no gradient yet
            continue
        own = optimizer.state.get(params.get(name), {})
        if name in params and isinstance(entry, dict) and entry.keys() - {"ema"} == own.keys():
            usable[name] = entry if config.ema else {k: v for k, v in entry.items() if k != "ema"}
        elif name in params or not config.allow_change:  # other parameters are frozen now
            unusable.append(name)
    if not unusable:
        return usable
    names = ", ".join(unusable[:5]) + (", ..." if len(unusable) > 5 else "")
    if not config.allow_change:
        raise CheckpointError(f"the checkpoint in {config.out_dir} lacks the optimizer state of "
                              f"{names}; --allow_change optimizer initialises it newly")
    warn(f"optimizer state of {len(unusable)} tensors is newly initialised: {names}")
    return usable


def restore_optimizer(optimizer, state, ranks, path, shards=None):
    """Copy `state`, {parameter name: {key: value}}, into the state of `optimizer`, in place.

    The optimizer's state must exist (see create_state), except "ema", which is created. State of
    parameters that are not in `state` is removed: the next step creates it.
    ranks, shards: as for fill(); path: of the checkpoint, for messages.
    All ranks must call. Raises CheckpointError if names, shapes or dtypes differ.
    """
    own = {}
    for name, p in named_params(optimizer).items():
        entry = optimizer.state.pop(p, {})
        if state.get(name):
            own[name] = optimizer.state[p] = entry
            if "ema" in state[name]:
                entry["ema"] = torch.zeros_like(p, dtype=state[name]["ema"].dtype)
    file_format.check_match(dict(named_tensors({"optimizer": state})),
                            dict(named_tensors({"optimizer": own})), path)
    fill(own, state, ranks, shards, "optimizer.state.")
    for name, entry in own.items():  # values that are not tensors
        entry.update({k: v for k, v in state[name].items() if not any(named_tensors(v))})


def fill(own, state, ranks, shards=None, prefix=""):
    """Copy each tensor in the nested `state` into the one of the same name in `own`, in place.

    Tensors in `own` may be DTensors, and `own` may have more tensors. Without `shards`, rank 0
    sends the values in `state` to all ranks, one tensor at a time. With `shards` (a Shards), each
    rank reads the rows that it needs from the files, where the name of a tensor is `prefix` + name.
    Where `state` is not read (other ranks, or with `shards`), it may be on the meta device. All
    ranks must call.
    """
    targets = dict(named_tensors(own))
    for name, tensor in named_tensors(state):
        if shards:
            target = local(targets[name])
            row, _ = distributed.locate_shard(targets[name], ranks)
            with torch.no_grad():
                target.copy_(shards.read(prefix + name, row, target.shape))
            continue
        if ranks.world_size > 1:
            tensor = (tensor.contiguous() if ranks.is_main
                      else torch.empty_like(tensor, device="cpu"))
            # As bytes: the control group uses gloo, which does not support every dtype.
            dist.broadcast(tensor.view(-1).view(torch.uint8), src=0, group=ranks.control)
        distributed.assign(targets[name], tensor)


def without_values(state):
    """Return a copy of a nested state with all tensors on the meta device: shape and dtype only."""
    return map_tensors(lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), state)


def check_state(optimizer, ranks):
    """Raise CheckpointError unless a checkpoint can hold the entire state of `optimizer`.

    The optimizer must have done a step. State that is not sharded must be equal on all ranks.
    Weights and state are restored after the test, gradients are removed. All ranks must call.
    """
    kind = f"optimizer {type(optimizer).__name__}"
    before = parts_outside_state(optimizer)
    numbers = find_numbers(optimizer)
    # Optimizers inside of this one, whose state a checkpoint would not have.
    parts = [(k, part) for k, value in vars(optimizer).items()
             for part in (value if isinstance(value, (list, tuple)) else [value])
             if isinstance(part, torch.optim.Optimizer)]
    state = map_tensors(torch.clone, optimizer_state(optimizer)["state"])
    weights = [(p, p.detach().clone()) for p in named_params(optimizer).values()]
    create_state(optimizer)
    for p, weight in weights:  # a step without gradients may compute 0 / 0
        p.detach().copy_(weight)
    restore_optimizer(optimizer, state, Ranks(), kind)
    assign_numbers(optimizer, numbers)
    outside = parts_outside_state(optimizer)
    changed = [k for k, text in outside.items() if before.get(k) != text]
    changed += [f"state of {k}" for k, part in parts
                if part.state and part.state is not optimizer.state]
    restored = dict(named_tensors(optimizer_state(optimizer)["state"]))
    changed += [f"state {name}" for name, tensor in named_tensors(state)
                if not torch.equal(local(restored[name]), local(tensor))]
    drift = find_drift(dict(named_tensors(state)), ranks)
    if changed:
        raise CheckpointError(f"{kind}: {', '.join(changed[:3])} could not be resumed from a "
                              "checkpoint, which holds optimizer.state and numbers in parameter "
                              "groups: keep it there")
    if drift:
        raise CheckpointError(f"{kind}: state {', '.join(drift[:3])} differs between ranks, and a "
                              "checkpoint holds that of rank 0: make it sharded like the "
                              "parameter, e.g. torch.zeros_like(p), or equal on all ranks")
