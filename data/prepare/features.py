"""Feature arrays to training data: python -m data.prepare.features video.npy audio.npy --target fmri.npy

Each .npy file is a modality, (rows, dims); all have the same rows in the same order: the frames of
a film, say. The target is a signal recorded at those rows. What comes out is a folder:
    train_video.npy, val_video.npy, ..., train_target.npy, val_target.npy    # float32
    meta.json           # per array: dims, mean and std of each dimension over the training rows
A dimension whose mean is far larger than its deviation would lose its signal in float32: there the
mean is taken off, in float64, and kept as "shift".

Neighbouring frames are nearly equal, so rows drawn at random would put copies of the training rows
into the validation rows. Whole runs (films, sessions, stretches of time) are held out instead.
"""

import argparse
import os
import re
import sys

import numpy as np

from data.meta import Meta, has_type, read_meta_for, write_meta
from data.prepare.folders import new_folder, overwrite_problems
from data.records import raise_problems
from data.rows import runs_in_val
from data.token_files import open_npy
from train.base.cli import run_command
from train.base.errors import DataError, UsageError, echo

CHUNK_ROWS = 4096
FILES = r"(train|val)_\w+\.npy"  # names of the arrays
OFFSET = 4096  # deviations: a mean that is larger is taken off before values become float32
PREPARE = "make it with `python -m data.prepare.features`"


# -----------------------------------------------------------------------------
# reading a prepared folder

def read_features_meta(folder):
    """meta.json of a prepared folder: {"modalities": {name: dims}, "target": dims or None, "mean",
    "std": {name: [per dimension]}, "rows": {split: n}, ...}. Raises DataError."""
    numbers = {str: [int | float]}
    meta = {"target": None} | read_meta_for(
        "autoencoder", folder, PREPARE, modalities={str: int}, target=int | None, rows={str: int},
        mean=numbers, std=numbers).extra
    if not has_type(meta.get("shift", {}), numbers):
        raise DataError(f"{folder}: shift is no dictionary of lists of numbers; {PREPARE}")
    dims = meta["modalities"] | ({"target": meta["target"]} if meta["target"] else {})
    if any({n: len(v) for n, v in meta[part].items()} != dims for part in ("mean", "std")):
        raise DataError(f"{folder}: mean and std have not the dimensions of the arrays; {PREPARE}")
    return meta


def array_names(meta):
    """Names of the arrays of a row, in order: the modalities, then the target if there is one."""
    return [*meta["modalities"], *(["target"] if meta["target"] else [])]


def open_features(folder, split):
    """[(rows, dims) float32, memory-mapped], in the order of array_names(). Raises DataError."""
    meta, arrays = read_features_meta(folder), []
    dims = meta["modalities"] | {"target": meta["target"]}
    for name in array_names(meta):
        path = os.path.join(folder, f"{split}_{name}.npy")
        arrays.append(open_array(path))
        expected = (meta["rows"][split], dims[name])
        if arrays[-1].shape != expected or arrays[-1].dtype != np.float32:
            raise DataError(f"{path}: {arrays[-1].dtype} of shape {arrays[-1].shape}; meta.json "
                            f"promises float32 of {expected}: replaced? prepare the data again")
    return arrays


def open_array(path):
    """A .npy file of numbers, memory-mapped: (rows, dims); a single column may be (rows,)."""
    array = open_npy(path)
    array = array[:, None] if array.ndim == 1 else array
    if array.ndim != 2 or array.dtype.kind not in "fiu" or not array.size:
        raise DataError(f"{path}: {array.dtype} of shape {array.shape}; expected numbers of shape "
                        "(rows, dims), one row a frame; pool or flatten the rest first")
    return array


# -----------------------------------------------------------------------------
# preparing one

def prepare_features(arrays, target, out, val_fraction=0.1, runs=None, force=False, sources=(),
                     log=echo, **more):
    """Write the folder `out`. arrays: {name: (rows, dims)}; target: (rows, dims) or None; runs: a
    label for each row. sources: where they come from; features from elsewhere are replaced with
    `force` only. more: goes into meta.json. Returns what meta.json holds."""
    arrays = arrays | ({} if target is None else {"target": target})
    lengths = {name: len(a) for name, a in {**arrays, "runs": runs}.items()}
    if len(set(lengths.values())) > 1:
        raise DataError("arrays of different lengths: " + ", ".join(
            f"{name} has {n:,} rows" for name, n in lengths.items()) + "; expected one row a frame")
    val = runs_in_val(runs, val_fraction)
    rows = dict(train=np.flatnonzero(~val), val=np.flatnonzero(val))
    dims = {name: a.shape[1] for name, a in arrays.items()}
    meta = dict(modalities={n: d for n, d in dims.items() if n != "target"},
                target=dims.get("target"), rows={s: len(r) for s, r in rows.items()}, mean={},
                std={}, **more)
    raise_problems(overwrite_problems(out, "autoencoder", list(sources), force))
    shifts = {}
    with new_folder(out, FILES) as folder:
        for name, array in arrays.items():
            mean, std = statistics(name, array, rows["train"])
            shift = np.where((std > 0) & (np.abs(mean) > OFFSET * std), mean, 0.0)
            if shift.any():
                shifts[name] = shift.tolist()
            if constant := int((std == 0).sum()):
                log(f"{name}: {constant:,} of {len(std):,} dimensions are constant in the training "
                    "rows" + ": they have no correlation" * (name == "target"))
            meta["mean"][name], meta["std"][name] = (mean - shift).tolist(), std.tolist()
            for split, chosen in rows.items():
                write_array(os.path.join(folder, f"{split}_{name}.npy"), name, array, chosen, shift)
        meta |= dict(shift=shifts) if shifts else {}
        write_meta(folder, Meta("autoencoder", sources=list(sources), extra=meta))
    return meta


def chunks(array, chosen):
    """The rows `chosen` of an array and their numbers, a piece at a time: it may be larger than
    memory."""
    for start in range(0, len(chosen), CHUNK_ROWS):
        rows = chosen[start:start + CHUNK_ROWS]
        yield array[rows], rows


def check_finite(name, values, rows):
    """DataError where a value of these rows is not finite, as a float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        wrong = np.argwhere(~np.isfinite(values.astype(np.float32)))
    if len(wrong):
        i, column = wrong[0]
        raise DataError(f"{name}: row {rows[i]:,}, column {column}: {values[i, column]}: expected "
                        "finite numbers up to 3.4e38; fill or drop such rows first")


def statistics(name, array, chosen):
    """(mean, standard deviation) of each dimension, (D,), in float64 and in one pass: shifted by
    the first row, or the squares of a large mean would drown the variance. DataError for NaN, inf.
    """
    check_finite(name, array[chosen[:1]], chosen)
    shift = np.asarray(array[chosen[0]], np.float64)
    total, squares = np.zeros_like(shift), np.zeros_like(shift)
    for part, rows in chunks(array, chosen):
        check_finite(name, part, rows)
        x = part.astype(np.float64) - shift
        total, squares = total + x.sum(0), squares + np.square(x).sum(0)
    mean = total / len(chosen)
    variance = np.maximum(squares / len(chosen) - np.square(mean), 0.0)
    return mean + shift, np.sqrt(variance)


def write_array(path, name, array, chosen, shift):
    """The rows `chosen` of an array, less shift (D,), as a .npy file of float32."""
    shape, done = (len(chosen), array.shape[1]), 0
    target = np.lib.format.open_memmap(path, "w+", np.float32, shape)
    for part, rows in chunks(array, chosen):
        check_finite(name, part, rows)
        target[done:done + len(part)] = part - shift if shift.any() else part
        done += len(part)
    target.flush()


# -----------------------------------------------------------------------------
# data with a known structure

def synthetic(n_runs=30, run_length=200, noise=0.25, seed=0):
    """({modality: array}, target, runs, ceiling): 8 hidden signals that change slowly in time. Each
    modality sees some of them, bent and mixed; the target mixes all and adds noise, so that no
    single modality is enough and `ceiling` is the highest correlation that can be reached."""
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((n_runs, run_length, 8))
    for t in range(1, run_length):  # autocorrelation 0.9, variance 1, runs independent
        z[:, t] = 0.9 * z[:, t - 1] + np.sqrt(1 - 0.9 ** 2) * z[:, t]
    z = z.reshape(-1, 8)
    arrays = {}
    for name, dims, seen in (("video", 96, slice(0, 5)), ("audio", 48, slice(3, 7)),
                             ("text", 64, slice(5, 8))):
        part = z[:, seen]
        hidden = np.tanh(part @ rng.standard_normal((part.shape[1], 32)) / 2)
        x = hidden @ rng.standard_normal((32, dims)) / np.sqrt(32)
        x += 0.1 * rng.standard_normal(x.shape)
        arrays[name] = (x * rng.uniform(0.5, 5, dims) + rng.uniform(-10, 10, dims)).astype("f4")
    mix = rng.standard_normal((8, 60))
    target = z @ (mix / np.linalg.norm(mix, axis=0))  # variance 1
    target = 100 + target + noise * rng.standard_normal(target.shape)
    runs = np.repeat(np.arange(n_runs), run_length)
    return arrays, target.astype("f4"), runs, float(1 / np.sqrt(1 + noise ** 2))


# -----------------------------------------------------------------------------
# the command line

def read_sources(args):
    """({name: array}, target or None, runs) of the command line's files."""
    names = args.names.split(",") if args.names else [
        os.path.basename(path).removesuffix(".npy") for path in args.arrays]
    good = [n for n in names if re.fullmatch(r"[A-Za-z]\w*", n) and n != "target"]
    if len(set(good)) != len(args.arrays) or len(names) != len(args.arrays):
        raise DataError(f"names: {', '.join(names)}: expected {len(args.arrays)} different ones of "
                        "letters, digits and _, none of them `target`; give them with --names")
    arrays = {name: open_array(path) for name, path in zip(names, args.arrays)}
    target = open_array(args.target) if args.target else None
    n = len(next(iter(arrays.values())))
    runs = np.arange(n) // (args.run_length or max(1, n // 20))
    return arrays, target, open_array(args.runs)[:, 0] if args.runs else runs


def prepare(args):
    """What the command line asks for."""
    if bool(args.arrays) == args.synthetic:
        raise UsageError("give one or more FILE.npy, or --synthetic")
    if not 0 < args.val_fraction < 1 or args.run_length is not None and args.run_length < 1:
        raise UsageError("--val_fraction must be between 0 and 1, --run_length at least 1")
    more = {}
    if args.synthetic:
        arrays, target, runs, more["ceiling"] = synthetic()
    else:
        arrays, target, runs = read_sources(args)
    name = "synthetic" if args.synthetic else next(iter(arrays))
    out = args.out or os.path.join("data", "bin", name)
    files = [*args.arrays, *([args.target] if args.target else [])]
    meta = prepare_features(arrays, target, out, args.val_fraction, runs, args.force,
                            files or ["--synthetic"], **more)
    dims = ", ".join(f"{name} {d}" for name, d in meta["modalities"].items())
    echo(f"{out}: {dims}; target {meta['target'] or 'none'}; {meta['rows']['train']:,} rows to "
        f"train on, {meta['rows']['val']:,} held out, in whole runs\nNext: python run_train.py "
        f"--config train/configs/autoencoder.yaml --data_dir {out}")


def main(argv=None):
    """Runs the command; its exit code, 2 for a problem."""
    p = argparse.ArgumentParser("python -m data.prepare.features", allow_abbrev=False,
                                description="Turn feature arrays into training data.")
    p.add_argument("arrays", nargs="*", metavar="FILE.npy", help="a modality each: (rows, dims)")
    p.add_argument("--target", metavar="FILE.npy", help="the signal to be matched: (rows, dims)")
    p.add_argument("--names", help="names of the modalities, a,b,c (default: those of the files)")
    p.add_argument("--out", metavar="FOLDER", help="where to write (default: data/bin/NAME, of the "
                   "first modality)")
    p.add_argument("--val_fraction", type=float, default=0.1, help="share of the runs held out "
                   "(default: %(default)s)")
    p.add_argument("--runs", metavar="FILE.npy", help="(rows,): a number for each row that says "
                   "which run (film, session) it belongs to")
    p.add_argument("--run_length", type=int, help="without --runs: rows of a run (default: a "
                   "twentieth of all)")
    p.add_argument("--synthetic", action="store_true", help="make data with a known structure "
                   "instead (default --out: data/bin/synthetic)")
    p.add_argument("--force", action="store_true", help="replace features of other arrays in --out")
    return run_command(p, prepare, argv)


if __name__ == "__main__":
    sys.exit(main())
