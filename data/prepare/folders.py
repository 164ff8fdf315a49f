"""Replacing folders of prepared data, without ever leaving a folder that looks complete."""

import json
import os
import re
import shutil
from contextlib import contextmanager

from data.meta import read_meta
from data.tokenizer import TOKENIZER_FILES
from train.base.errors import DataError
from train.base.files import lock_folder, sync_folder, write_text

LOCK = ".lock"  # the file of lock_folder


def overwrite_problems(out, model, sources, force):
    """Return [(out, problem)] if preparing `sources` for --model `model` must not write to the
    folder `out`, or []."""
    advice = "name another folder with --out, or replace it with --force"
    if os.path.exists(out) and not os.path.isdir(out):
        return [(out, "is a file; --out names a folder")]
    if force or not os.path.isdir(out) or not os.listdir(out):
        return []
    try:
        meta = read_meta(out, allow_incomplete=True)
    except DataError:
        meta = None
    if meta is None or not isinstance(meta.sources, list) or meta.model != model:
        return [(out, f"holds files that this command did not write; {advice}")]
    if meta.sources != sources or "-" in sources:
        earlier = ", ".join(map(str, meta.sources))[:200]
        return [(out, f"was prepared from {earlier}; {advice}")]
    return []


@contextmanager
def new_folder(out, pattern):
    """Context manager: a temporary folder beside `out`; at the end, its files are moved to `out`.

    Until then, and after an exception, `out` does not change. Files in `out` that match the regular
    expression `pattern` and are not in the new folder are removed; all other files are kept. Raises
    UserError if another process prepares the same folder.
    """
    out = os.path.realpath(out)  # a link to a folder is preserved
    parent, name = os.path.split(out)
    folder = os.path.join(parent, f".{name}.tmp")
    os.makedirs(folder, exist_ok=True)
    lock = lock_folder(folder)
    try:
        for leftover in os.listdir(folder):  # of a killed process
            if leftover != LOCK:
                os.unlink(os.path.join(folder, leftover))
        yield folder
        move_files(folder, out, pattern)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()


def move_files(folder, out, pattern):
    """Move the files of `folder` to `out`. The last one is meta.json; until then, meta.json in
    `out` states that the folder is incomplete, so that no mixture of files is ever read."""
    files = sorted(set(os.listdir(folder)) - {LOCK}, key=lambda name: name == "meta.json")
    for name in files:
        with open(os.path.join(folder, name), "rb") as f:
            os.fsync(f.fileno())  # before a rename: a power failure must not lose the content
    os.makedirs(out, exist_ok=True)
    with open(os.path.join(folder, "meta.json"), encoding="utf-8") as f:
        content = json.load(f)
    write_text(os.path.join(out, "meta.json"), json.dumps(content | {"incomplete": True}))
    companions = "|".join(map(re.escape, TOKENIZER_FILES.values()))
    for name in os.listdir(out):
        if name not in files and re.fullmatch(f"{pattern}|{companions}|meta\\.json.*", name):
            os.unlink(os.path.join(out, name))
    for name in files:
        os.replace(os.path.join(folder, name), os.path.join(out, name))
    sync_folder(out)
