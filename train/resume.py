"""A run into a checkpoint and back: what is saved, when a checkpoint fits, exact resume, rewinding.

The functions take the Trainer of train/train.py as `run`. train/checkpoint.py knows the files,
train/state.py the tensors; this file knows which of the run's numbers they must hold.
"""

import os
import time
from dataclasses import asdict, fields

import torch

from train import checkpoint, distributed, state
from train.config import differences
from train.guard import BadNumbers, SaveFailed

MAX_REWINDS = 3


def contents(run):
    """The checkpoint of a run: nanoGPT's keys, and what exact resume needs. All ranks call."""
    p, data = run.progress, run.data
    return {
        "model": state.model_state(run.raw), "optimizer": state.optimizer_state(run.optimizer),
        "model_args": asdict(run.raw.config), "iter_num": p.iter_num, "config": asdict(run.given),
        "best_val_loss": p.best_val_loss, "format_version": checkpoint.FORMAT_VERSION,
        "progress": asdict(p), "scaler": run.scaler.state_dict(),
        "plateau": run.plateau.state_dict(), "early_stopping": run.stopping.state_dict(),
        "spikes": run.spikes.state_dict(),
        # Every random draw is a function of (seed, step, rank): the seed is the whole state.
        "rng": {"seed": run.config.seed}, "data": data.train.fingerprint(),
        "tokenizer": data.tokenizer.spec() if data.tokenizer else None,
        "world_size": run.ranks.world_size, "torch": str(torch.__version__)}


def save(run):
    """Save the run to out_dir/ckpt.pt in the background. A save that fails warns, and training goes
    on with the old file intact."""
    started, p = time.perf_counter(), run.progress

    def warn(error):
        run.log.warn(f"{error}; the checkpoint before it is intact, training goes on")
    whole = finite_contents(run)
    if run.ranks.main:
        try:
            if not os.path.isdir(run.config.out_dir):
                run.log.warn(f"{run.config.out_dir} is gone; making it again")
                run.lock_folder()
            write(run, whole, warn)
        except checkpoint.CheckpointError as error:
            warn(error)
    run.saved_at, run.best_due, spent = p.iter_num, False, time.perf_counter() - started
    run.pause, run.overhead = run.pause + spent, run.overhead + spent


def save_or_fail(run, attempts=3):
    """The last save, tried again after a second: what was trained must not be lost to a full disk.
    No rank goes on before it is done. Raises SaveFailed."""
    whole = finite_contents(run)

    def insist():
        for attempt in range(1, attempts + 1):
            try:
                return write(run, whole)
            except checkpoint.CheckpointError as error:
                if attempt == attempts:
                    raise SaveFailed(
                        f"the last checkpoint could not be saved: {error}\nWhat was trained since "
                        "the one before it is lost; make room and start again to resume") from error
                run.log.warn(f"{error}; trying again")
                time.sleep(1)
    distributed.from_main(insist, run.ranks)


def finite_contents(run):
    """contents(run); raises BadNumbers, on all ranks, rather than give what must not be saved."""
    run.watchdog.arm(factor=10)  # saving takes longer than a step
    run.settle()
    whole = contents(run)

    def check():
        weights = {k: whole[k] for k in ("model", "optimizer")}
        if bad := checkpoint.find_not_finite(weights):
            raise BadNumbers(f"iter {run.progress.iter_num}: {bad} is not finite; not saved over "
                             f"{run.config.out_dir}/ckpt.pt, the last good checkpoint")
    distributed.from_main(check, run.ranks)
    return whole


def write(run, whole, failed=None):
    """Rank 0: write ckpt.pt, with its names as best and numbered checkpoint where they are due."""
    p, c, out = run.progress, run.config, run.config.out_dir
    links = [os.path.join(out, "ckpt_best.pt")] * run.best_due
    links += [os.path.join(out, f"ckpt_{p.iter_num:07d}.pt")] * bool(c.keep_last)
    run.log.info(f"Saving checkpoint to {out}/ckpt.pt")
    run.saver.save(os.path.join(out, "ckpt.pt"), whole, links,
                   lambda: checkpoint.prune(out, c.keep_last), failed)


def find(run):
    """On rank 0: the checkpoint to go on from, verified to fit the run and kept in run.found, as
    Specs; None to start from scratch."""
    c = run.given
    # Restarted by torchrun, the run is its own past: "never" was about what was there before.
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if c.resume == "never" and not restarted:
        inside = os.path.dirname(os.path.abspath(c.init_from)) == os.path.abspath(c.out_dir)
        if c.init_from != "scratch" and inside:
            raise checkpoint.CheckpointError(f"--init_from {c.init_from} is in out_dir, which "
                                             "--resume never moves aside; choose another --out_dir")
        if moved := checkpoint.move_aside(c.out_dir):
            print(f"--resume never: moved what was in {c.out_dir} to {moved}", flush=True)
        return None
    specs = latest(run)
    if specs is None and c.resume == "must" and not restarted:
        raise checkpoint.CheckpointError(f"--resume must: there is no ckpt.pt in {c.out_dir}")
    return specs


def latest(run):
    """On rank 0: the newest good checkpoint in out_dir, as find() gives it; None where none is."""
    c = run.given
    found, path = checkpoint.load_latest(c.out_dir, tell)
    if found is None:
        return None
    check_kind(found, path)
    changed = [f"{k}: checkpoint has {old!r}, now {new!r}"
               for k, old, new in differences(found["config"], asdict(c))]
    if found["data"] != (now := run.data.train.fingerprint()):
        changed.append(f"the data in {c.data_dir}: checkpoint has {found['data']}, now {now}")
    if changed and not c.allow_change:
        raise checkpoint.CheckpointError(
            f"{path} was made with another configuration:\n"
            + "\n".join(f"  - {d}" for d in changed)
            + "\nundo the changes, or go on regardless with --allow_change, or start afresh with "
            "--resume never (what is there is moved aside), or choose another --out_dir")
    checkpoint.check_state(found, run.raw.state_dict(), path)
    run.found = found
    return state.specs(found)


def tell(problem):
    print(f"warning: {problem}", flush=True)  # on rank 0, before there is a log


NEEDED = dict(optimizer=dict, iter_num=int, config=dict, progress=dict, scaler=dict, plateau=dict,
              early_stopping=dict, spikes=list, data=object)
KNOWN = {*NEEDED, "model", "model_args", "best_val_loss", "format_version", "rng", "tokenizer",
         "world_size", "torch"}


def check_kind(found, path):
    """Raise CheckpointError unless a run can go on from `found`; name what it holds besides."""
    missing = [k for k, kind in NEEDED.items() if not isinstance(found.get(k, NEEDED), kind)
               or k not in found]
    if missing or not isinstance(found["optimizer"].get("state"), dict):
        raise checkpoint.CheckpointError(
            f"{path} has weights but not the rest of a run ({', '.join(missing) or 'optimizer'}); "
            f"to start from its weights: --init_from {path} and another --out_dir")
    if strange := [str(k) for k in found if k not in KNOWN]:
        tell(f"{path}: ignoring what this program does not know: {', '.join(strange)}")


def restore(run, specs):
    """Fill the run from the checkpoint that rank 0 holds in run.found."""
    found, run.found = run.found, None
    tensors = (found["model"], found["optimizer"]["state"]) if found else (None, None)
    state.load_model(run.raw, specs["model"], tensors[0], run.ranks)
    state.load_optimizer(run.optimizer, usable(run, specs), tensors[1], run.ranks)
    for f in fields(run.progress):  # in place: the loop holds on to it
        setattr(run.progress, f.name, specs["progress"].get(f.name, f.default))
    for name in ("plateau", "spikes"):
        getattr(run, name).load_state_dict(specs[name])
    run.stopping.load_state_dict(specs["early_stopping"])
    if run.scaler.is_enabled() and specs["scaler"]:
        run.scaler.load_state_dict(specs["scaler"])
    p = run.progress
    run.saved_at, run.best_due = p.iter_num, False
    run.log.rewind(p.iter_num, evaluated=p.evaluated == p.iter_num)


def usable(run, specs):
    """The optimizer state of a checkpoint that is of the kind this optimizer keeps. That is all of
    it, unless --allow_change changed what is optimized and how: the rest starts afresh."""
    kinds = {n: {"momentum_buffer"} if g["muon"] else {"step", "exp_avg", "exp_avg_sq"}
             for g in run.optimizer.param_groups for n in g["names"]}
    entries = specs["optimizer"]["state"]
    kept = {n: e for n, e in entries.items() if set(e) == kinds.get(n)}
    odd = sorted((entries.keys() | kinds.keys() if entries else set()) - kept.keys())
    if odd and not run.given.allow_change:
        raise checkpoint.CheckpointError(
            f"the checkpoint in {run.given.out_dir} lacks the optimizer state of "
            f"{', '.join(odd[:5])}, or has another kind of it; --allow_change starts it afresh")
    if odd:
        run.log.warn(f"optimizer state of {len(odd)} tensors starts afresh: {', '.join(odd[:5])}"
                     + ", ..." * (len(odd) > 5))
    return kept


def rewind(run):
    """After a spike: back to the last checkpoint, and on past the batches that led to it."""
    bad, shift, rewinds = run.progress.iter_num, run.progress.data_shift, run.progress.rewinds
    run.optimizer.zero_grad(set_to_none=True)
    run.saver.wait()
    specs = distributed.from_main(lambda: latest(run), run.ranks)
    if specs is None:
        raise BadNumbers(f"iter {bad}: a loss spike, and no checkpoint to rewind to yet")
    restore(run, specs)
    p = run.progress
    passed = bad + 1 - p.iter_num  # with the batch whose loss it was
    p.data_shift, p.rewinds = shift + passed, rewinds + 1
    run.logged, run.clock, run.overhead = p.iter_num, time.perf_counter(), 0.0
    run.log.warn(f"rewound to iter {p.iter_num}, passing over {passed} batches "
                 f"({p.rewinds} of {MAX_REWINDS} rewinds)")


def load_weights(run, path):
    """Start from the weights of another checkpoint (init_from), whatever their precision."""
    def read():
        run.found = distributed.convert_ddp_state(checkpoint.load_checkpoint(path)["model"])
        checkpoint.check_model(run.found, run.raw.state_dict(), path)
        return state.specs(run.found)
    run.found = None
    specs = distributed.from_main(read, run.ranks)
    state.load_model(run.raw, specs, run.found, run.ranks)
    run.found = None
    dtypes = {str(s.dtype).removeprefix("torch.") for s in specs.values()}
    run.log.info(f"Starting from the weights of {path} ({', '.join(sorted(dtypes))})")
