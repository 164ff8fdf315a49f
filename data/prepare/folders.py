"""The output of data.prepare commands: a folder, marked incomplete until the end, and a summary."""

import os
import re
import shutil
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from data.meta import Meta, read_meta, write_meta
from train.base.errors import DataError, echo, quote_path
from train.base.fields import key
from train.base.files import lock_folder, reporting_full_disk, sync_folder
from train.base.keys import TrainConfig
from train.logger import WARN_EPOCHS

REPOSITORY = Path(__file__).parents[2]
LOCK = ".lock"   # the file of lock_folder
INSIDE = ".tmp"  # the temporary folder inside a mount point
# Files of an earlier preparation, which are removed if they are not replaced.
PREPARED = (r"(train|val|test)(\.bin|_\w+\.npy|_rows\.jsonl)|tokenizer\.(json|tiktoken)"
            r"|meta\.json\..+")


@dataclass
class FolderOptions:
    """Options of all data.prepare commands: the folder to write, and whether to replace data."""
    out: str = key("", "folder to write (default: data/bin/ and the name of the first source)",
                   metavar="FOLDER", path=True)
    force: bool = key(False, "replace data of other sources in that folder")


def absolute(sources):
    """Return `sources` with existing paths made absolute; other names, e.g. hf:NAME, unchanged."""
    return [os.path.abspath(name) if os.path.exists(name) else name for name in sources]


def is_stream(source):
    """Return whether `source` is standard input or another open file, whose content varies."""
    return source.startswith(("/dev/stdin", "/dev/fd/"))


def check_replaceable(out, model, sources, force):
    """Raise DataError unless the data in the folder `out` may be replaced.

    It may be if `out` is missing or empty, `force` is True, or meta.json, also of an interrupted
    preparation, has the same `model` (value of --model) and the same sources in the same order,
    without streams, see is_stream(). A source in `out` with the name of a prepared file, e.g.
    train_rows.jsonl, is always an error, as is a file `out`.
    """
    for path in map(os.path.realpath, sources):
        if re.fullmatch(f"{re.escape(os.path.join(os.path.realpath(out), ''))}({PREPARED})", path):
            raise DataError(f"{path}: it would be replaced; name another folder with --out")
    if os.path.isfile(out):
        raise DataError(f"{out}: is a file; name a folder with --out")
    if not os.path.lexists(out) or set(os.listdir(out)) <= {INSIDE} or force:
        return
    meta = Meta()
    with suppress(DataError):
        meta = read_meta(out, allow_incomplete=True)
    if (meta.model, meta.sources) != (model, absolute(sources)) or any(map(is_stream, sources)):
        raise DataError(f"{out}: contains files that were not prepared from these sources; name "
                        "another folder with --out, or replace its data with --force")


@contextmanager
def new_folder(out, model, sources, force=False):
    """Yield a temporary folder; at the end of the block, move the files in it to the folder `out`.

    One of the files must be meta.json. `out` does not change before the end of the block, nor after
    an exception in it. Files of an earlier preparation are removed from `out`, all others remain.
    The temporary folder is next to `out`, or inside if `out` is a mount point. Raises the errors of
    check_replaceable(), and UserError if `out` is being prepared already or the disk is full.
    """
    check_replaceable(out, model, sources, force)
    out = os.path.realpath(out)  # a link to a folder is preserved
    parent, name = os.path.split(out)
    folder = os.path.join(parent, f".{name}.tmp")
    if os.path.ismount(out):  # e.g. a Docker volume: no file can be renamed into it
        folder = os.path.join(out, INSIDE)
    os.makedirs(folder, exist_ok=True)
    lock = lock_folder(folder)
    try:
        for leftover in set(os.listdir(folder)) - {LOCK}:  # of a killed process
            os.unlink(os.path.join(folder, leftover))
        with reporting_full_disk(out):
            yield folder
            move_files(folder, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()


def move_files(folder, out):
    """Move the files in `folder` to `out`, durably; remove those of an earlier preparation.

    meta.json, which must exist, is moved last; the sources in it are made absolute. Until then, a
    meta.json in `out` states that the folder is incomplete.
    """
    meta = read_meta(folder)
    meta.sources = absolute(meta.sources or ())  # a relative path can name different files
    write_meta(folder, meta)
    files = sorted(set(os.listdir(folder)) - {LOCK}, key=lambda name: name == "meta.json")
    for name in files:
        with open(os.path.join(folder, name), "rb") as f:
            os.fsync(f.fileno())  # before a rename: a power failure must not lose the content
    os.makedirs(out, exist_ok=True)
    write_meta(out, replace(meta, incomplete=True))
    for name in os.listdir(out):
        if name not in files and re.fullmatch(PREPARED, name):
            os.unlink(os.path.join(out, name))
    for name in files:
        os.replace(os.path.join(folder, name), os.path.join(out, name))
    sync_folder(out)


def read_settings(path):
    """Return a YAML file's settings {key: text}; defaults: those of the file that `base` names."""
    settings = yaml.load(path.read_text("utf-8"), yaml.BaseLoader)
    base = settings.pop("base", None)
    return (read_settings(path.parent / base) if base else {}) | settings


def fit_to_data(splits, path):
    """Return the options of run_train.py, a text, with which the configuration suits the data.

    path: its YAML file, a Path. splits: {split: {name: number}}, with "rows", "pairs" or
    "questions", the samples in an epoch, or, without these, "tokens".
    Options: " --max_epochs 20" (WARN_EPOCHS) if training takes more epochs and max_epochs is not
    set, and " --block_size N" if a split has fewer than block_size + 1 such tokens.
    """
    numbers = splits["train"]
    settings = read_settings(path)
    names = ("max_iters", "batch_size", "gradient_accumulation_steps", "block_size")
    c = TrainConfig(**{name: int(settings[name]) for name in names if name in settings})
    samples = [numbers[name] for name in ("rows", "pairs", "questions") if name in numbers]
    n = samples[0] if samples else numbers["tokens"] / c.block_size
    too_long = "max_epochs" not in settings and c.max_iters * c.samples_per_step > WARN_EPOCHS * n
    options = f" --max_epochs {WARN_EPOCHS}" if too_long else ""
    tokens = 0 if samples else min(numbers["tokens"] for numbers in splits.values())
    return options + (f" --block_size {tokens - 1}" if 1 < tokens <= c.block_size else "")


def start_option(source):
    """Return " --init_from SOURCE" for a checkpoint, hf:NAME or Hugging Face folder; else ""."""
    config = os.path.expanduser(os.path.join(source, "config.json"))
    is_model = source.startswith("hf:") or source.endswith(".pt") or os.path.exists(config)
    return f" --init_from {quote_path(source)}" if is_model else ""


def report(out, splits, config, options=""):
    """Print `splits`, {split: {name: number}}, and the command that trains on the folder `out`.

    splits: as for fit_to_data(). options: text to append to the command.
    config: the configuration, a path in train/ without .yaml, e.g. "configs/chat".
    """
    for split, numbers in splits.items():
        texts = [f"{round(n, 3):,} {name.replace('_', ' ')}" for name, n in numbers.items()
                 if name != "sha256" and (n or name != "documents")]  # 0: the end of one document
        echo(f"[{split}] {', '.join(texts)}")
    options += fit_to_data(splits, REPOSITORY / "train" / f"{config}.yaml")
    run_folder = os.path.join("out", os.path.basename(os.path.abspath(out)))
    echo(f"Next: python run_train.py --config train/{config}.yaml --data_dir {quote_path(out)}"
         f"{options} --out_dir {quote_path(run_folder)}")
