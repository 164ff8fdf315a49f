"""Replacing folders of prepared data, without ever leaving a folder that looks complete."""

import glob
import json
import os
import re
import shutil
import socket
from contextlib import contextmanager

from data.meta import read_meta
from data.tokenizer import TOKENIZER_FILES
from train.base.errors import DataError
from train.base.files import exclusive_lock, sync_folder, write_text


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
    """Context manager: a temporary folder; at the end, the files in it are moved to `out`.

    Until then, and after an exception, `out` does not change. Files in `out` that match the regular
    expression `pattern` and are not in the new folder are removed; all other files are kept. If
    several processes write to the same folder, the files of the last one remain.
    """
    out = os.path.realpath(out)  # a link to a folder is preserved
    parent, name = os.path.split(out)
    os.makedirs(parent, exist_ok=True)
    host = socket.gethostname()
    hidden = os.path.join(parent, f".{name}.tmp-{host}-")
    for leftover in glob.glob(f"{glob.escape(hidden)}*"):
        pid = leftover.rpartition("-")[2]
        if pid.isdecimal() and not is_running(int(pid)):  # of a killed process
            shutil.rmtree(leftover, ignore_errors=True)
    folder = f"{hidden}{os.getpid()}"
    os.mkdir(folder)
    try:
        yield folder
        for file in os.listdir(folder):
            with open(os.path.join(folder, file), "rb") as f:
                os.fsync(f.fileno())  # before a rename: a power failure must not lose the content
        with exclusive_lock(parent):
            move_files(folder, out, pattern)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def is_running(pid):
    """Return whether a process with this number exists, except this one."""
    try:
        os.kill(pid, 0)  # sends nothing
    except ProcessLookupError:
        return False
    except OSError:  # a process of a different user
        return True
    return pid != os.getpid()


def move_files(folder, out, pattern):
    """Move the files of `folder` to `out`. The last one is meta.json; until then, meta.json in
    `out` states that the folder is incomplete, so that no mixture of files is ever read."""
    try:
        os.rename(folder, out)  # succeeds if `out` is missing or empty
        return sync_folder(os.path.dirname(out))
    except OSError:
        if not os.path.isdir(out):
            raise
    files = sorted(os.listdir(folder), key=lambda name: name == "meta.json")
    meta = os.path.join(folder, "meta.json")
    if os.path.exists(meta):
        with open(meta, encoding="utf-8") as f:
            content = json.load(f)
        write_text(os.path.join(out, "meta.json"), json.dumps(content | {"incomplete": True}))
    companions = "|".join(map(re.escape, TOKENIZER_FILES.values()))
    for name in os.listdir(out):
        if name not in files and re.fullmatch(f"{pattern}|{companions}|meta\\.json.*", name):
            os.unlink(os.path.join(out, name))
    for name in files:
        os.replace(os.path.join(folder, name), os.path.join(out, name))
    sync_folder(out)
