"""Detect whether the code that computes logits was edited.

After an edit, checkpoints cannot be exported, because other programs compute the unedited formulas.
For this purpose, formulas.json has a digest of each definition (function or class) of this code,
and a checkpoint has the digests of the edited ones. After an edit that does not change the logits,
this command writes the new digests to formulas.json; `python -m train.tools.check --only export`
then compares the logits with those of another program:

    python -m model.core.formulas
"""

import ast
import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from train.base.cli import command, env_rank
from train.base.errors import CheckpointError, warn_stderr
from train.system import REPOSITORY

RECORD = Path(__file__).with_suffix(".json")
FILES = ("model/gpt.py", "model/core/ops.py", "model/core/adapters.py")  # of every GPT


@functools.cache
def read_record():
    """Return the content of formulas.json, a dict.

    "files": paths of the files with code that computes logits.
    "not_logits": names of functions and classes in them that do not affect logits.
    "digests": {"DEFINITION (FILE)": digest} of all others, as last recorded by record().
    """
    return json.loads(RECORD.read_text())


@functools.cache
def digests(kind=None):
    """Return {"DEFINITION (FILE)": digest} of the code on disk for the logits of a model type.

    kind: e.g. "moe"; `None`: all files in formulas.json. DEFINITION: a function, a class, or
    "statements", the code outside of them.
    """
    code = {}
    for file in read_record()["files"]:
        path = Path(REPOSITORY, file)
        # A model type may have been deleted.
        if path.exists() and (kind is None or file in (*FILES, f"model/{kind}.py")):
            for node in simplify(ast.parse(path.read_text("utf-8")).body):
                name = dict(node[1:]).get("name", "statements")
                code.setdefault(f"{name} ({file})", []).append(node)
    return {name: hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
            for name, parts in code.items()}


def simplify(node):
    """Convert an ast node, or a list of nodes, to the nested lists from which digests are computed.

    Omits docstrings, definitions in "not_logits", and empty fields, which vary by Python version.
    """
    if isinstance(node, list):
        ignored = read_record()["not_logits"]
        return [simplify(part) for part in node if getattr(part, "name", None) not in ignored
                and not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))]
    if not isinstance(node, ast.AST):
        return node
    return [type(node).__name__, *((name, simplify(part)) for name, part in ast.iter_fields(node)
                                   if part not in (None, []))]


def edited(kind=None):
    """Return the part of digests(kind) that differs from formulas.json: the edited definitions."""
    recorded = read_record()["digests"]
    return {name: value for name, value in digests(kind).items() if recorded.get(name) != value}


def find_edits(state, kind):
    """Return names of edited definitions that differ between this program and that of `state`.

    state: dict of a checkpoint or of a data folder's meta.json; "formulas" has the digests of the
    definitions that the writer had edited; without it, returns []. kind: model type of `state`.
    """
    theirs = state.get("formulas")
    if not isinstance(theirs, dict):
        return []
    return [str(name) for name, value in (edited(kind) | theirs).items()
            if name not in theirs or digests().get(name) != value]


warn_once = functools.cache(warn_stderr)  # several parts of a run read the same file


def warn_of_differences(state, path, kind):
    """Warn on stderr, on rank 0 and once per message, if find_edits(state, kind) is not empty."""
    if (names := find_edits(state, kind)) and not env_rank():
        warn_once(f"{path}: written with other formulas than this program's, and the logits may "
                  f"differ: {', '.join(names)}")


def check_formulas(state, path, kind):
    """Raise CheckpointError if a checkpoint must not be exported: the code for logits was edited.

    Edited: it differs from formulas.json, or from the code of the program that wrote `state`.
    """
    if names := [*edited(kind)] or find_edits(state, kind):
        raise CheckpointError(
            f"{path}: edited since exports were compared with other programs: {', '.join(names)}; "
            "if the logits are the same: python -m model.core.formulas, in the edited program")


@dataclass
class RecordOptions:
    """Record that the edited code computes the same logits as before."""


def record(options):
    """Write the digests of the code on disk to formulas.json, and print the edited definitions."""
    names = ", ".join(edited()) or "nothing was edited"
    RECORD.write_text(json.dumps(read_record() | dict(digests=digests()), indent=1) + "\n")
    print(f"Recorded: {names}")


main = command(RecordOptions, record)
