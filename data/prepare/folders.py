"""Folders of prepared data, which are whole or not there: what they may replace, how they are built
beside their place and put into it, and what their files must hold.
"""

import filecmp
import glob
import json
import os
import re
import reprlib
import shutil
import socket
import time
from contextlib import contextmanager, suppress

from data.token_files import CHECKED_WHOLE, made_for, prepared_meta, who_reads
from data.tokenizer import BESIDE, load_dataset_tokenizer
from train.base.errors import DataError
from train.base.files import exclusive_lock, next_free_path, sync_folder, write_text

# -----------------------------------------------------------------------------
# what they must hold

def check_types(folder, meta, make="prepare the data again", /, **kinds):
    """DataError unless `meta`, which read_meta found in `folder`, has these names with values of
    these kinds: a type, [type] for a list of it, {str: type} for a mapping to it, {"a"} for that
    word. make: how such a folder is made."""
    for name, kind in kinds.items():
        if not is_of(meta.get(name), kind):
            found = f"{name} is {reprlib.repr(meta[name])}" if name in meta else f"no {name}"
            raise DataError(f"{folder}: {found} in a meta.json there{who_reads(folder)}; {make}")


def is_of(value, kind):
    if isinstance(kind, list):
        return isinstance(value, list) and all(is_of(v, kind[0]) for v in value)
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(is_of(v, kind[str]) for v in value.values())
    if isinstance(kind, set):
        return isinstance(value, str) and value in kind
    return isinstance(value, kind)


def check_array(path, array, shape, limit, least=0):
    """DataError unless the array of a .npy file has whole numbers from `least` to below `limit`, in
    this shape (None: of any length). Others would end the process on a GPU without a word of where.
    Of a large array some rows are looked at."""
    some = array[::1 + array.nbytes // CHECKED_WHOLE] if array.ndim else array
    if (array.dtype.kind not in "iu" or len(array.shape) != len(shape)
            or any(want not in (None, n) for n, want in zip(array.shape, shape))
            or some.size and not (least <= int(some.min()) and int(some.max()) < limit)):
        wanted = " x ".join("n" if n is None else str(n) for n in shape)
        raise DataError(f"{path}: {array.dtype} of shape {array.shape}; expected {wanted} whole "
                        f"numbers from {least} to {limit - 1}; prepare the data again")


def known_tokenizer(data_dir):
    """load_dataset_tokenizer(data_dir); DataError where it names none."""
    tokenizer = load_dataset_tokenizer(data_dir)
    if tokenizer is None:
        raise DataError(f"{data_dir}: its meta.json names no tokenizer; prepare it again")
    return tokenizer


# -----------------------------------------------------------------------------
# writing one

def replacing_problems(out, model, sources, force):
    """What forbids to prepare `sources` for --model `model` into the folder `out`: [(out, what)],
    [] for nothing."""
    meta, escape = prepared_meta(out), "name another folder with --out, or replace it with --force"
    if os.path.exists(out) and not os.path.isdir(out):
        return [(out, "is a file; --out names a folder")]
    if force or not os.path.isdir(out) or not os.listdir(out):
        return []
    if meta is None or (made_for(out) or "gpt") != model:
        return [(out, f"holds files that this command did not write; {escape}")]
    if meta["sources"] != sources or "-" in sources:
        was = ", ".join(map(str, meta["sources"]))[:200]
        return [(out, f"was prepared from {was}; {escape}")]
    return []


def write_meta(folder, meta):
    """meta.json of a folder of prepared data."""
    write_text(os.path.join(folder, "meta.json"), json.dumps(meta, indent=1) + "\n")


def write_tokenizer(folder, tokenizer):
    """Writes what rebuilds the tokenizer; its entry in meta.json, which only refers to files."""
    spec = tokenizer.spec()
    for part, name in BESIDE.items():
        if part in spec:
            with open(os.path.join(folder, name), "w", encoding="utf-8", newline="\n") as f:
                f.write(spec.pop(part))
            spec[f"{part}_file"] = name
    write_meta(folder, {"tokenizer": spec})
    return spec


@contextmanager
def new_folder(out, ours):
    """A temporary folder to fill, which at the end takes the place of the folder `out`.

    Until then, and where it fails, `out` is as it was. Files in it whose names the regular
    expression `ours` matches are replaced; others, of somebody else, stay. Several processes may do
    this at once: the last one's files stay. What a killed process left is put right by the next."""
    out = os.path.realpath(out)  # a link to a folder stays a link
    parent = os.path.dirname(out)
    hidden = os.path.join(parent, f".{os.path.basename(out)}")
    os.makedirs(parent, exist_ok=True)
    me = f"{socket.gethostname()}-{os.getpid()}"
    folder = f"{hidden}.tmp-{me}"
    with exclusive_lock(parent):
        for left in glob.glob(f"{glob.escape(hidden)}.???-*"):
            with suppress(FileNotFoundError):  # another process finishes it
                if is_abandoned(left):
                    clear_abandoned(left, out, ours)
        os.mkdir(folder)
    try:
        yield folder
        for name in os.listdir(folder):
            with open(os.path.join(folder, name), "rb") as f:
                os.fsync(f.fileno())  # a rename must not outlive its content in a power cut
        with exclusive_lock(parent):
            if not holds_the_same(folder, out, ours):  # of a process that did the same just now
                replace_folder(folder, out, f"{hidden}.old-{me}", ours)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def replace_folder(folder, out, aside, ours):
    """Rename `out`, if it holds anything, to `aside` (_1, _2, ...), and `folder` to `out`."""
    parent = os.path.dirname(out)
    try:
        os.rename(folder, out)  # also where `out` is an empty folder
    except OSError:
        if not os.path.isdir(out):
            raise
        old = next_free_path(parent, os.path.basename(aside), "")
        os.rename(out, old)
        try:
            os.rename(folder, out)
        except BaseException:
            os.rename(old, out)
            raise
        clear_abandoned(old, out, ours)
    sync_folder(parent)


def holds_the_same(folder, out, ours):
    """Whether `out` has, byte for byte, the files of `folder`, and no others of ours."""
    names = set(os.listdir(folder))
    return os.path.isdir(out) and names == {n for n in os.listdir(out) if re.fullmatch(
        ours, n)} == set(filecmp.cmpfiles(folder, out, names, shallow=False)[0])


def is_abandoned(folder):
    """Whether nobody works in a temporary folder any more: its process on this machine is gone, or
    (of another machine) nothing was written in it for an hour."""
    name = re.fullmatch(r".*\.(?:tmp|old)-(.*)-(\d+)(?:_\d+)?", folder)
    if name and name[1] == socket.gethostname() and os.name == "posix":
        try:
            os.kill(int(name[2]), 0)  # sends nothing
        except OSError as error:
            return isinstance(error, ProcessLookupError)
        return int(name[2]) == os.getpid()  # of an earlier process of this number
    paths = [folder, *glob.glob(os.path.join(glob.escape(folder), "*"))]
    return time.time() - max(map(os.path.getmtime, paths)) > 3600


def clear_abandoned(left, out, ours):
    """Remove a half-made folder; of an old one that was moved aside, keep what is not ours in
    `out`, or all of it where the new one never came."""
    if ".old-" in os.path.basename(left):
        if not os.path.lexists(out):
            return os.rename(left, out)
        for name in os.listdir(left):
            target = os.path.join(out, name)
            if not re.fullmatch(ours, name) and not os.path.lexists(target):
                os.rename(os.path.join(left, name), target)
        if not all(re.fullmatch(ours, name) for name in os.listdir(left)):
            return
    shutil.rmtree(left, ignore_errors=True)
