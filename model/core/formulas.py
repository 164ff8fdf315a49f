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
    """Return the content of formulas.json, a dict: "files", paths of the files with code that
    computes logits; "not_logits", names of definitions (functions, classes) in them that do not
    affect logits; "digests" {"DEFINITION (FILE)": digest} of all other definitions, at the time
    when logits were last compared with other programs."""
    return json.loads(RECORD.read_text())


@functools.cache
def digests(kind=None):
    """Return {"DEFINITION (FILE)": digest} of the source code on disk that computes the logits of
    the model type `kind`, e.g. "moe"; `None`: of all files in formulas.json. DEFINITION is the name
    of a function or class, or "statements" for the code outside of them."""
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
    """Convert `node`, an ast node or a list of nodes, to nested lists, from which digests are
    computed. Docstrings and the definitions in "not_logits" of formulas.json are left out. Empty
    fields are left out, too, unlike in ast.dump, because their number differs between versions of
    Python."""
    if isinstance(node, list):
        ignored = read_record()["not_logits"]
        return [simplify(part) for part in node if getattr(part, "name", None) not in ignored
                and not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))]
    if not isinstance(node, ast.AST):
        return node
    return [type(node).__name__, *((name, simplify(part)) for name, part in ast.iter_fields(node)
                                   if part not in (None, []))]


def edited(kind=None):
    """Return {"DEFINITION (FILE)": present digest} of the definitions that were edited, i.e. whose
    digest in formulas.json is different or missing. kind: a model type, of which only the code for
    the logits is considered; `None`: all code. The result is {} in an unedited repository."""
    recorded = read_record()["digests"]
    return {name: value for name, value in digests(kind).items() if recorded.get(name) != value}


def find_edits(state, kind):
    """Return a list of the names "DEFINITION (FILE)" of definitions that were edited, i.e. differ
    from formulas.json, in this program or in the program that wrote `state`, and are not the same
    in both. state: the dict of a checkpoint or of meta.json, in which "formulas" has the digests of
    the definitions that were edited there; without this key the result is []. kind: the model type
    of `state`, of which only the code for the logits is considered."""
    theirs = state.get("formulas")
    if not isinstance(theirs, dict):
        return []
    return [str(name) for name, value in (edited(kind) | theirs).items()
            if name not in theirs or digests().get(name) != value]


warn_once = functools.cache(warn_stderr)  # several parts of a run read the same file


def warn_of_differences(state, path, kind):
    """Print a warning to stderr if find_edits(state, kind) is not empty: the logits may differ from
    those in training. Only rank 0 prints, and each message only once. path: the file with `state`,
    for the message."""
    if (names := find_edits(state, kind)) and not env_rank():
        warn_once(f"{path}: written with other formulas than this program's, and the logits may "
                  f"differ: {', '.join(names)}")


def check_formulas(state, path, kind):
    """Raise CheckpointError if a checkpoint must not be exported: if the code for the logits of the
    model type `kind` was edited in this program since formulas.json was written, or differs from
    the program that wrote the checkpoint. state: the dict of the checkpoint, read from the file
    `path`."""
    if names := [*edited(kind)] or find_edits(state, kind):
        raise CheckpointError(
            f"{path}: edited since exports were compared with other programs: {', '.join(names)}; "
            "if the logits are the same: python -m model.core.formulas, in the edited program")


@dataclass
class RecordOptions:
    """Record that the edited code computes the same logits as before."""


def record(options):
    """Write the digests of the source code on disk to formulas.json, and print the names of the
    definitions that had been edited. options: a RecordOptions, without content."""
    names = ", ".join(edited()) or "nothing was edited"
    RECORD.write_text(json.dumps(read_record() | dict(digests=digests()), indent=1) + "\n")
    print(f"Recorded: {names}")


main = command(RecordOptions, record)
