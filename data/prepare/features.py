"""Prepare feature arrays for --model autoencoder.

    python -m data.prepare.features video.npy audio.npy --target fmri.npy

Each .npy file is a modality, an array (rows, dims); all arrays have the same rows in the same
order, e.g. the frames of a film. The target is a signal recorded at the same rows. NaN is a missing
value. The result is a folder with train_video.npy, val_video.npy, ..., train_target.npy,
val_target.npy in float32, train_runs.npy and val_runs.npy with the run of each row, and meta.json
with the dimensions of each array and the mean and standard deviation of each dimension over the
training rows.

Rows of several subjects follow one another; --subjects gives the subject of each row, written to
train_subjects.npy and val_subjects.npy.

If the mean of a dimension is much larger than the standard deviation, float32 would lose precision:
this mean is subtracted in float64 and stored as "shift" in meta.json.

Neighbouring rows are nearly equal, so a random split would put near copies of training rows into
the validation split. Whole runs (films, sessions, stretches of time) are held out instead, of each
subject in the same way.
"""

import functools
import os
import re
from dataclasses import dataclass

import numpy as np

from data.meta import Meta, write_meta
from data.prepare.folders import FolderOptions, new_folder, report
from data.prepare.sources import source_name
from data.rows import runs_in_val, save_arrays
from data.token_files import open_npy
from train.base.cli import command
from train.base.errors import DataError, UserError, echo
from train.base.fields import key

CHUNK_ROWS = 4096
MAX_MEAN_STDS = 4096  # a mean of more standard deviations is subtracted


def open_array(path):
    """Return the memory-mapped array (rows, dims) of a .npy file; (rows,) becomes (rows, 1).

    Raises DataError for a file that cannot be read, other shapes, no elements, and dtypes other
    than integers and floats of up to 64 bits.
    """
    array = open_npy(path)
    array = array[:, None] if array.ndim == 1 else array
    if (array.ndim != 2 or array.dtype.kind not in "fiu" or array.dtype.itemsize > 8
            or not array.size):
        raise DataError(f"{path}: {array.dtype} of shape {array.shape}; expected numbers of up to "
                        "64 bits, (rows, dims), one row per frame; pool or flatten others first")
    return array


def prepare_features(arrays, target, out, val_fraction, runs, force=False, sources=(),
                     subjects=None):
    """Write arrays for --model autoencoder to the folder `out`; return the Meta.extra written.

    arrays: {name of a modality: (rows, dims)}. target: (rows, dims), or None.
    val_fraction: share of the runs for validation; 0: no validation rows.
    runs: (rows,) the number of each row's run, which is never divided between the splits. The files
    have other numbers: successive rows of a run have the same, counted from 0 over all rows.
    force: replace data of other sources. sources: names of the files, for meta.json.
    subjects: (rows,) integers from 0 (default: one subject). Every run must be of one subject.
    Raises DataError for different row counts and infinite values; see rows_in_val and new_folder.
    """
    dims = {name: array.shape[1] for name, array in arrays.items()}
    meta = dict(target=None, modalities=dims, mean={}, std={})
    if target is not None:
        arrays = arrays | dict(target=target)
        meta["target"] = target.shape[1]
    numbers = dict(runs=runs)
    if subjects is not None:
        numbers["subjects"] = subjects
        meta["subjects"] = np.unique(subjects).tolist()
    lengths = {name: array.shape[0] for name, array in (arrays | numbers).items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"arrays of different lengths: {lengths}; expected one row per frame")
    in_val = rows_in_val(runs, numbers.get("subjects", np.zeros(len(runs), int)), val_fraction)
    rows = dict(train=np.flatnonzero(~in_val), val=np.flatnonzero(in_val))
    meta["rows"] = {split: len(chosen) for split, chosen in rows.items()}
    numbers["runs"] = np.cumsum(np.append(0, np.diff(runs) != 0))  # ascending, from 0
    with new_folder(out, "autoencoder", list(sources), force) as folder:
        for name, array in arrays.items():
            mean, std = statistics(name, array, rows["train"])
            shift = np.where((std > 0) & (np.abs(mean) > MAX_MEAN_STDS * std), mean, 0.0)
            meta["mean"][name] = (mean - shift).tolist()
            meta["std"][name] = std.tolist()
            if shift.any():
                meta.setdefault("shift", {})[name] = shift.tolist()
            for split, chosen in rows.items():
                write_array(os.path.join(folder, f"{split}_{name}.npy"), name, array, chosen, shift)
        for split, chosen in rows.items():
            save_arrays(folder, split, **{name: array[chosen].astype(np.uint32)
                                          for name, array in numbers.items()})
        write_meta(folder, Meta("autoencoder", sources=list(sources), extra=meta))
    return meta


def rows_in_val(runs, subjects, fraction):
    """Return bool (rows,), True for validation rows: about `fraction` of each subject's runs.

    runs, subjects: (rows,) the numbers of each row's run and subject. At least one run per subject
    is chosen, but not all, by runs_in_val(); none if `fraction` is 0. Raises DataError for subjects
    other than integers from 0 to 2**31 - 1, NaN in runs, a run of several subjects and, unless
    `fraction` is 0, a subject with only one run.
    """
    if subjects.dtype.kind not in "iu" or subjects.min() < 0 or subjects.max() >= 1 << 31:
        raise DataError(f"subjects: {subjects.dtype} from {subjects.min()} to {subjects.max()}; "
                        "expected integers from 0 to 2147483647")
    if np.isnan(runs).any():  # would be a run of its own in each row
        raise DataError("runs: NaN in some rows; give each row the number of its run")
    labels = np.unique(np.stack([runs, subjects]), axis=1)[0]  # of each run and subject of it
    if len(shared := labels[1:][np.diff(labels) == 0]):
        raise DataError(f"run {shared[0]} has rows of several subjects; give --runs with a "
                        "different number for each run of each subject")
    in_val = np.zeros(len(runs), bool)
    for subject in np.unique(subjects) if fraction else ():
        own = subjects == subject
        whose = "" if own.all() else f" of subject {subject}"
        in_val[own] = runs_in_val(runs[own], fraction, whose)
    return in_val


def read_chunks(name, array, chosen):
    """Yield the rows array[chosen] in blocks of up to CHUNK_ROWS (4096), in the array's dtype.

    chosen: (n,) indices. name: for messages. Raises DataError for values infinite in float32; NaN
    is allowed.
    """
    for start in range(0, len(chosen), CHUNK_ROWS):
        rows = chosen[start:start + CHUNK_ROWS]
        values = array[rows]
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isinf(values.astype(np.float32)).any():
                raise DataError(f"{name}: a value in rows {rows[0]:,} to {rows[-1]:,} is infinite; "
                                "expected numbers up to 3.4e38, or NaN for a missing value")
        yield values


def statistics(name, array, chosen):
    """Return (mean, std), float64 (dims,), of array[chosen] without NaN; 0 for only NaN.

    name: for messages. Raises DataError if all dimensions have only NaN.
    """
    chunks = functools.partial(read_chunks, name, array, chosen)
    # Relative to a value of the dimension, so that a constant one has a deviation of exactly 0.
    largest = functools.reduce(np.fmax, map(np.fmax.reduce, chunks()))
    if np.isnan(largest).all():
        raise DataError(f"{name}: no number in the training rows, only NaN (missing values); leave "
                        "the file out")
    first = np.nan_to_num(largest.astype(np.float64))
    n = sum((x == x).sum(0) for x in chunks()).clip(1)
    mean = first + sum(np.nansum(x - first, 0) for x in chunks()) / n
    # Another pass: the squares of a large mean would hide the variance.
    squares = sum(np.nansum(np.square(x - mean), 0) for x in chunks())
    return mean, np.sqrt(squares / n)


def write_array(path, name, array, chosen, shift):
    """Write array[chosen] minus `shift` (dims,) as float32 to the .npy file `path`."""
    header = dict(descr="<f4", fortran_order=False, shape=(len(chosen), array.shape[1]))
    with open(path, "wb") as f:  # no memory map: a full disk would kill this process (SIGBUS)
        np.lib.format.write_array_header_1_0(f, header)
        for values in read_chunks(name, array, chosen):
            f.write((values - shift).astype("<f4", order="C"))


# -----------------------------------------------------------------------------
# synthetic data

def synthetic(n_runs=30, run_length=200, noise=0.25, seed=0):
    """Return ({modality: array (rows, dims)}, target (rows, 60), runs (rows,)) of example data.

    rows = n_runs * run_length. Eight hidden signals of variance 1 change slowly in time. Each
    modality (video, audio, text) is a nonlinear mixture of some signals, the target a linear
    mixture of all plus noise of standard deviation `noise`: no single modality is sufficient. The
    highest possible correlation with the target is 1 / sqrt(1 + noise ** 2).
    """
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((n_runs, run_length, 8))
    for t in range(1, run_length):  # autocorrelation 0.9, variance 1, runs independent
        z[:, t] = 0.9 * z[:, t - 1] + np.sqrt(1 - 0.9 ** 2) * z[:, t]
    z = z.reshape(-1, 8)
    arrays = {}
    for name, dims, signals in (("video", 96, slice(0, 5)), ("audio", 48, slice(3, 7)),
                                ("text", 64, slice(5, 8))):
        part = z[:, signals]
        hidden = np.tanh(part @ rng.standard_normal((part.shape[1], 32)) / 2)
        x = hidden @ rng.standard_normal((32, dims)) / np.sqrt(32)
        x += 0.1 * rng.standard_normal(x.shape)
        arrays[name] = (x * rng.uniform(0.5, 5, dims) + rng.uniform(-10, 10, dims)).astype("f4")
    mixture = rng.standard_normal((8, 60))
    target = z @ (mixture / np.linalg.norm(mixture, axis=0))  # variance 1
    target = 100 + target + noise * rng.standard_normal(target.shape)
    return arrays, target.astype("f4"), np.repeat(np.arange(n_runs), run_length)


# -----------------------------------------------------------------------------
# command

@dataclass
class FeatureOptions(FolderOptions):
    """Prepare feature arrays for --model autoencoder."""
    arrays: list[str] = key([], "one modality each, named by the file: an array (rows, dims)",
                            positional=True, metavar="FILE.npy")
    target: str = key("", "signal to predict: an array (rows, dims)", metavar="FILE.npy")
    val_fraction: float = key(0.1, "share of the runs for validation; 0: no split", ge=0, lt=1)
    runs: str = key("", "array (rows,): the number of each row's run, e.g. of a film (default: "
                    "about 20 equal runs)", metavar="FILE.npy")
    subjects: str = key("", "array (rows,): the number of each row's subject (default: there is "
                        "only one)", metavar="FILE.npy")
    synthetic: bool = key(False, "instead of files: generate data with a known structure")


def open_arrays(args):
    """Open the files that a FeatureOptions names; return (arrays, target, runs, subjects).

    arrays: {name of a modality: (rows, dims)}. target: an array or None. subjects: (rows,) or
    None. runs: (rows,); default: about 20 equal runs, begun anew where the subject changes; with
    many subjects about two of each.
    Raises DataError for files that open_array does not accept, and names of modalities that are
    equal, reserved (target, runs, subjects), or not a letter followed by letters, digits and _.
    """
    arrays = {source_name(path): open_array(path) for path in args.arrays}
    names = r"(?!(target|runs|subjects)$)[A-Za-z]\w*"
    if len(arrays) < len(args.arrays) or not all(re.fullmatch(names, name) for name in arrays):
        raise DataError(f"{', '.join(args.arrays)}: expected files with different names of "
                        "letters, digits and _, except target, runs and subjects; rename them")
    target = open_array(args.target) if args.target else None
    subjects = open_array(args.subjects).ravel() if args.subjects else None
    n = len(next(iter(arrays.values())))
    if args.runs:
        return arrays, target, open_array(args.runs).ravel(), subjects
    row = np.arange(n)
    if subjects is not None and len(subjects) == n:
        is_first = np.diff(subjects, prepend=subjects[0]) != 0  # except in row 0
        n = min(n, 10 * n // (is_first.sum() + 1))  # at least two runs of an average subject
        row -= np.maximum.accumulate(row * is_first)  # of the subject: the same stretches of each
    return arrays, target, np.cumsum(row % max(1, n // 20) == 0), subjects


def run(args):
    """Run the command: write the folder of prepared arrays and print a summary."""
    more = args.target or args.runs or args.subjects
    if bool(args.arrays) == args.synthetic or args.synthetic and more:
        raise UserError("give one or more FILE.npy, or --synthetic without --target, --runs and "
                        "--subjects")
    arrays, target, runs, subjects = (*synthetic(), None) if args.synthetic else open_arrays(args)
    sources = [path for path in (*args.arrays, args.target) if path] or ["--synthetic"]
    out = args.out or os.path.join("data", "bin", source_name(sources[0]).strip("-"))
    meta = prepare_features(arrays, target, out, args.val_fraction, runs, args.force,
                            sources, subjects)
    echo(f"Prepared {out}: {meta['modalities']}, target: {meta['target']}; split by whole runs")
    options = "" if meta["target"] else " --early_stopping_metric val_loss"
    if not meta["rows"]["val"]:  # the configuration's own values need evaluations
        options = " --eval_interval 0 --early_stopping_patience 0 --lr_schedule cosine"
    report(out, {split: dict(rows=n) for split, n in meta["rows"].items()}, "configs/autoencoder",
           options)


main = command(FeatureOptions, run)
