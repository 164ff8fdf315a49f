"""A run into a checkpoint and back: what is saved, when a checkpoint fits, exact resume, rewinding.

The functions take the Trainer of train/train.py as `run`. train/checkpoint.py knows the files,
train/state.py the tensors; this file knows which of the run's numbers they must hold.
"""

import os
import time
from dataclasses import asdict, replace

import torch

from train import checkpoint, distributed, state
from train.config import differences
from train.guard import BadNumbers

MAX_REWINDS = 3


def contents(run):
    """The checkpoint of a run: nanoGPT's keys, and what exact resume needs besides. All ranks call."""
    p, data = run.progress, run.data
    return {
        "model": state.model_state(run.raw), "optimizer": state.optimizer_state(run.optimizer),
        "model_args": asdict(run.raw.config), "iter_num": p.iter_num, "config": asdict(run.given),
        "best_val_loss": p.best_val_loss, "format_version": checkpoint.FORMAT_VERSION,
        "progress": asdict(p), "scaler": run.scaler.state_dict(), "plateau": run.plateau.state_dict(),
        "early_stopping": run.stopping.state_dict(), "spikes": run.spikes.state_dict(),
        # Every random draw is a function of (seed, step, rank): the seed is the whole state.
        "rng": {"seed": run.config.seed}, "data": data.train.fingerprint(),
        "tokenizer": data.tokenizer.spec() if data.tokenizer else None,
        "world_size": run.ranks.world_size, "torch": str(torch.__version__)}


def save(run, background=True):
    """Save the run to out_dir/ckpt.pt. A save in the background that fails warns, and training goes on
    with the old file intact; in the foreground it raises CheckpointError."""
    run.settle()
    started, p, c, out = time.perf_counter(), run.progress, run.config, run.config.out_dir
    run.saved_at, best, run.best_due = p.iter_num, run.best_due, False
    whole = contents(run)
    if not run.ranks.main:
        return
    if not all(torch.isfinite(t).all() for t in whole["model"].values()):
        raise BadNumbers(f"iter {p.iter_num}: weights are not finite; they were not saved over "
                         f"{out}/ckpt.pt, the last good checkpoint")
    links = [os.path.join(out, "ckpt_best.pt")] * best
    links += [os.path.join(out, f"ckpt_{p.iter_num:07d}.pt")] * bool(c.keep_last)
    run.log.info(f"Saving checkpoint to {out}/ckpt.pt")
    try:
        run.saver.save(os.path.join(out, "ckpt.pt"), whole, links,
                       lambda: checkpoint.prune(out, c.keep_last), background)
    except checkpoint.CheckpointError as error:
        if not background:
            run.best_due = best
            raise
        run.log.warn(f"{error}; the checkpoint before it is intact, training goes on")
    spent = time.perf_counter() - started
    run.pause, run.overhead = run.pause + spent, run.overhead + spent


def save_or_fail(run, attempts=3):
    """The last save, tried again after a second: what was trained must not be lost to a full disk."""
    for attempt in range(1, attempts + 1):
        try:
            return save(run, background=False)
        except checkpoint.CheckpointError as error:
            if attempt == attempts:
                raise RuntimeError(f"the final checkpoint could not be saved: {error}") from error
            run.log.warn(f"{error}; trying again")
            time.sleep(1)


def find(run):
    """On rank 0: the checkpoint to go on from, verified to fit the run, kept in run.found, as Specs;
    None to start from scratch. Nothing on disk changes unless it fits."""
    c = run.given
    if c.resume == "never":
        if moved := checkpoint.move_aside(c.out_dir):
            print(f"--resume never: moved what was in {c.out_dir} to {moved}", flush=True)
        return None
    found, path = checkpoint.load_latest(c.out_dir, lambda m: print(f"warning: {m}", flush=True))
    if found is None and c.resume == "must":
        raise checkpoint.CheckpointError(f"--resume must: there is no ckpt.pt in {c.out_dir}")
    if found is None:
        return None
    if "progress" not in found:
        raise checkpoint.CheckpointError(
            f"{path} is not a checkpoint of this program; to start from its weights: --init_from {path} "
            "and another --out_dir")
    changed = [f"{k}: checkpoint has {old!r}, now {new!r}"
               for k, old, new in differences(found["config"], asdict(c))]
    if found["data"] != (now := run.data.train.fingerprint()):
        changed.append(f"the data in {c.data_dir}: checkpoint has {found['data']}, now {now}")
    if changed and not c.allow_change:
        raise checkpoint.CheckpointError(
            f"{path} was made with another configuration:\n" + "\n".join(f"  - {d}" for d in changed)
            + "\nundo the changes, or go on regardless with --allow_change, or start afresh with "
            "--resume never (what is there is moved aside), or choose another --out_dir")
    shapes = {n: tuple(p.shape) for n, p in run.raw.state_dict().items()}
    checkpoint.check_state(found, shapes, path)
    run.found, run.found_path = found, path
    return state.specs(found)


def restore(run, specs):
    """Fill the run from the checkpoint that rank 0 holds in run.found."""
    found, run.found = run.found, None
    tensors = (found["model"], found["optimizer"]["state"]) if found else (None, None)
    state.load_model(run.raw, specs["model"], tensors[0], run.ranks)
    state.load_optimizer(run.optimizer, specs["optimizer"]["state"], tensors[1], run.ranks)
    run.progress = replace(run.progress, **specs["progress"])
    for name in ("plateau", "spikes"):
        getattr(run, name).load_state_dict(specs[name])
    run.stopping.load_state_dict(specs["early_stopping"])
    if run.scaler.is_enabled() and specs["scaler"]:
        run.scaler.load_state_dict(specs["scaler"])
    p = run.progress
    run.saved_at = p.iter_num
    run.log.rewind(p.iter_num, evaluated=p.evaluated == p.iter_num)


def rewind(run):
    """After a spike: back to the last checkpoint, and on past the batches that led to it."""
    bad, shift, rewinds = run.progress.iter_num, run.progress.data_shift, run.progress.rewinds
    run.optimizer.zero_grad(set_to_none=True)
    run.saver.wait()
    specs = distributed.from_main(lambda: find(run), run.ranks)
    if specs is None:
        raise BadNumbers(f"iter {bad - 1}: a loss spike, and no checkpoint to rewind to yet")
    restore(run, specs)
    p = run.progress
    p.data_shift, p.rewinds = shift + bad - p.iter_num, rewinds + 1
    run.logged, run.clock, run.overhead = p.iter_num, time.perf_counter(), 0.0
    run.log.warn(f"rewound to iter {p.iter_num}, passing over {bad - p.iter_num} batches "
                 f"({p.rewinds} of {MAX_REWINDS} rewinds)")


def load_weights(run, path):
    """Start from the weights of another checkpoint (init_from)."""
    def read():
        run.found = distributed.convert_ddp_state(checkpoint.load_checkpoint(path)["model"])
        shapes = {n: tuple(p.shape) for n, p in run.raw.state_dict().items()}
        checkpoint.check_model(run.found, shapes, path)
        return state.specs(run.found)
    run.found = None
    specs = distributed.from_main(read, run.ranks)
    state.load_model(run.raw, specs, run.found, run.ranks)
    run.found = None
    run.log.info(f"Starting from the weights of {path}")
