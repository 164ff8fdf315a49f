"""The layout: which file may import which, and which files can be deleted.

Files are sorted into layers by their folder, so that a new file needs no entry here.
"""

import ast
import functools
import os
import re
import shutil
import subprocess
import sys

import processes
import pytest
from conftest import REPO

from data import prepare

FILES = {".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__"): path
         for pattern in ("run_train.py", "train/**/*.py", "model/**/*.py", "data/**/*.py")
         for path in sorted(REPO.glob(pattern))}

# A file imports from its own layer and from earlier ones.
LAYERS = [("base", r"train|model|train\.base\..*"), ("data", r"data(\.(?!prepare)\w+)?"),
          ("train", r"train\.(options\.)?\w+"), ("model core", r"model\.core\..*"),
          ("model types", r"model\.(?!(core|sample|serve|convert|eval)\b).*"),
          ("commands", r"train\.tools\..*|model\..*|data\.prepare.*"), ("entry", "run_train")]
EXCEPTIONS = {
    "the built-in data is prepared on first use": {("train.dataloader", "data.prepare")},
    "a run starts from weights that another model type can read": {
        (importer, f"model.core.{part}") for importer in ("train.checkpoint", "train.setup")
        for part in ("load", "weights")},
    "weights of other programs are converted": {
        (importer, imported) for importer in ("model.core.load", "model.core.weights")
        for imported in ("model.convert", "model.convert.foreign", "model.convert.families")},
    "tasks are evaluated during a run": {("train.setup", "model.eval.tasks"),
                                         ("train.train", "model.eval.tasks")}}

# Optional parts, each deleted as a whole: a file, or a folder with everything in it.
OPTIONAL = re.compile(r"(train\.(?:options|tools)\.\w+|data\.prepare|"
                      r"model\.(?!core\b|gpt\b)\w+).*")
PARTS = sorted({OPTIONAL.fullmatch(name)[1] for name in FILES if OPTIONAL.fullmatch(name)})


@functools.cache
def syntax_tree(name):
    return ast.parse(FILES[name].read_text())


def own_file(name):
    """The file of ours that a dotted name belongs to, or None."""
    while name and name not in FILES:
        name = name.rpartition(".")[0]
    return name or None


@functools.cache
def imports(name, top_level=False):
    """Names of our own files that a file imports; also inside functions and through importlib,
    unless top_level."""
    found = set()
    tree = syntax_tree(name)
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif module := imported_by_call(node):
            found.add(module)
    return {own_file(n) for n in found} - {None, name}


def imported_by_call(node):
    """The text of the argument of import_module(...) or __import__(...), "" for other nodes."""
    if isinstance(node, ast.Call) and re.fullmatch(r"(importlib\.)?import_module|__import__",
                                                   ast.unparse(node.func)):
        argument = node.args[0]
        return str(argument.value) if isinstance(argument, ast.Constant) else ast.unparse(argument)
    return ""


def layer(name):
    return next(i for i, (_, pattern) in enumerate(LAYERS) if re.fullmatch(pattern, name))


def part(name):
    """The optional part that a file belongs to, or None."""
    match = OPTIONAL.fullmatch(name)
    return match and match[1]


# -----------------------------------------------------------------------------
# imports

def test_imports_point_one_way():
    edges = {(name, imported) for name in FILES for imported in imports(name)}
    assert len(FILES) > 60 and len(edges) > 300
    allowed = set().union(*EXCEPTIONS.values())
    upward = {edge for edge in edges if layer(edge[1]) > layer(edge[0])}
    assert sorted(upward - allowed) == []
    for reason, pairs in EXCEPTIONS.items():
        assert pairs & upward, f"no longer needed: {reason}"
    at_top = {(name, imported) for name, imported in allowed if name in FILES
              and imported in imports(name, top_level=True)}
    assert not at_top, "an exception is imported where it is used"


def test_no_files_import_each_other_in_a_cycle():
    """But for the exceptions above, which point upwards."""
    exceptions = set().union(*EXCEPTIONS.values())
    graph = {name: {n for n in imports(name) if (name, n) not in exceptions} for name in FILES}
    assert cycles(graph) == []
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c"]


def cycles(graph):
    """Nodes that can reach themselves."""
    def reachable(start):
        seen, open_nodes = set(), [start]
        while open_nodes:
            new = graph[open_nodes.pop()] - seen
            seen |= new
            open_nodes += new
        return seen
    return [node for node in graph if node in reachable(node)]


def test_every_file_is_used():
    """By another file, or as a command or a model type."""
    imported = {n for name in FILES for n in imports(name)}
    unused = {name for name in FILES if name not in imported and layer(name) != 4
              and not re.search('__name__ == "__main__"|\\nmain = command', FILES[name].read_text())
              and FILES[name].name not in ("__main__.py", "__init__.py")}
    assert unused == set()


def test_modules_chosen_at_run_time_are_model_types_and_packages():
    """Other files import by a name that the rules above can see."""
    dynamic = {name for name in FILES for node in ast.walk(syntax_tree(name))
               if isinstance(node, ast.Call) and imported_by_call(node)
               and not isinstance(node.args[0], ast.Constant)}
    assert dynamic <= {"train.system", "train.config", "train.base.errors"}


def test_files_in_model_are_model_types():
    names = {name for name in FILES if re.fullmatch(r"model\.\w+", name)
             and FILES[name].parent.name == "model"}
    assert {"model.gpt", "model.chat"} <= names
    for name in names:
        bound = {getattr(node, "name", "") for node in syntax_tree(name).body}
        bound |= {alias.asname or alias.name for node in syntax_tree(name).body
                  if isinstance(node, ast.ImportFrom) for alias in node.names}
        assert "build_model" in bound, name


def test_the_run_is_a_parameter_of_the_loop_only():
    """Functions of other files get the parts that they need."""
    found = [f"{name}:{node.lineno}" for name in FILES for node in ast.walk(syntax_tree(name))
             if isinstance(node, (ast.FunctionDef, ast.Lambda)) and name.startswith("train.")
             and not name.startswith("train.tools.") and name != "train.train"
             and {"run", "trainer"} & {a.arg for a in ast.walk(node.args)
                                       if isinstance(a, ast.arg)}]
    assert [f for f in found if "loss_svg" not in f] == []  # runs that are drawn


def test_the_loop_does_not_know_language_models():
    for name in ("train.train", "train.setup", "train.evaluate"):
        if name in FILES:
            assert not re.search(r"wte|token_bytes|val_bpb|val_ppl|block_size|vocab",
                                 FILES[name].read_text()), name


def test_what_every_run_executes_names_no_model_type():
    """But gpt; chat and memory are words."""
    types = {p.removeprefix("model.") for p in PARTS if p.startswith("model.")} - {
        "sample", "serve", "convert", "eval", "chat", "memory"}
    assert {"lora", "sae", "classifier"} <= types
    words = re.compile(rf"\b({'|'.join(types)})\b")
    for name in FILES:
        if layer(name) in (0, 2, 3) or name in ("run_train", "model.gpt"):
            code = ast.unparse(without_docstrings(ast.parse(FILES[name].read_text())))
            assert not words.search(code), (name, words.findall(code))


def without_docstrings(tree):
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [n for n in body if not (isinstance(n, ast.Expr) and isinstance(
                n.value, ast.Constant))] or [ast.Pass()]
    return tree


# -----------------------------------------------------------------------------
# style

def test_command_lines_are_parsed_in_one_place():
    """So that dashes and underscores are the same in every command."""
    parsers = {name for name in FILES if re.search(r"\b(argparse|optparse|getopt|click)\b",
                                                   FILES[name].read_text())}
    assert parsers == {"train.base.cli", "train.config"}  # of commands, and of run_train.py
    commands = [name for name in FILES if "main = command(" in FILES[name].read_text()]
    assert len(commands) > 17
    for name in commands:
        for node in ast.walk(syntax_tree(name)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "key":
                names = [k.value.value for k in node.keywords if k.arg in ("option", "aliases")]
                assert not any("-" in text for text in names), (name, names)


def test_no_test_hook_is_in_the_program():
    for path in FILES.values():
        assert not re.search(r"\bFAULT\b|PYTEST|\bpytest\b", path.read_text()), path


@pytest.mark.ci
def test_nothing_is_done_at_import():
    """Importing what every run executes writes no file, prints nothing and starts no thread."""
    code = ("import sys, threading; sys.path.insert(0, '.'); import train.train, model.gpt, "
            "train.robust, run_train; assert threading.active_count() == 1")
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


# -----------------------------------------------------------------------------
# deletion

def dependents(deleted):
    """`deleted` parts and those that are built on them: whose files import them at the top."""
    deleted = set(deleted)
    while more := {part(name) for name in FILES if part(name)
                   and {part(n) for n in imports(name, top_level=True)} & deleted} - deleted:
        deleted |= more
    return deleted


def copy_repository(folder):
    copy = folder / "repo"
    shutil.copytree(REPO, copy, ignore=shutil.ignore_patterns(
        ".git", "out", "bin", "tests", "__pycache__"))
    return copy


def delete(copy, parts):
    """Delete these parts from a copy of the repository. The configurations of deleted parts are
    deleted as well: train/configs is one of the parts."""
    for name in parts:
        path = copy / name.replace(".", "/")
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.with_suffix(".py").unlink()


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    text = folder / "a.txt"
    text.write_text("".join(f"question {i} and its answer\n" for i in range(300)))
    prepare.prepare([str(text)], folder / "d")
    return folder / "d"


def quick_run(data_folder, out, iters=2):
    return ["--config=train/config_test.yaml", f"--data_dir={data_folder}", f"--out_dir={out}",
            "--block_size=16", "--n_layer=1", "--eval_iters=1", "--sample_tokens=2",
            "--num_threads=1", *([f"--max_iters={iters}"] if iters else [])]


# The process is a fork of one that has imported what is deleted: none of that may be used.
OURS_ONLY = """
import sys
names = [n for n in sys.modules if n.split(".")[0] in ("train", "model", "data")]
ours = [sys.modules[n].__file__ for n in names]
assert len(ours) > 15 and all(f.startswith({copy!r}) for f in ours if f), ours
"""


def python_in(copy, code):
    return processes.python("-c", code + OURS_ONLY.format(copy=str(copy)), cwd=copy,
                            env={"PYTHONPATH": ""})


@pytest.mark.ci
@pytest.mark.parametrize("command", [
    ["run_train.py", "--print_config"], ["-m", "model.sample", "--help"],
    ["-m", "data.prepare", "--help"], ["-m", "train.tools.plot", "--help"]])
def test_modules_of_the_same_name_elsewhere_are_not_imported(command, tmp_path):
    """As of a checkout of nanoGPT, whose train.py is a script, on PYTHONPATH."""
    for name in ("train", "model", "data"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    done = subprocess.run([sys.executable, *command], cwd=REPO, text=True, capture_output=True,
                          env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0 and done.stderr == "", done.stderr


@pytest.mark.parametrize("command", [["train/train.py"], ["-m", "train.train"]])
def test_the_file_of_the_loop_names_the_command(command):
    done = subprocess.run([sys.executable, *command], cwd=REPO, text=True, capture_output=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "train/train.py is not a command; run: python run_train.py\n"


def test_there_are_optional_parts():
    assert {"train.options.ema", "train.tools.hpo", "model.chat", "model.sae", "model.serve",
            "data.prepare"} <= set(PARTS) and "model.core" not in PARTS and len(PARTS) > 25


def test_files_of_every_run_import_no_optional_part_at_the_top():
    assert [(name, n) for name in FILES if not part(name)
            for n in imports(name, top_level=True) if part(n)] == []


@pytest.mark.ci
@pytest.mark.parametrize("name", [*PARTS, "train.configs"])
def test_without_an_optional_part_a_run_is_the_same(name, tmp_path, data_folder):
    """Deleted for real, together with what is built on it, before a quick training."""
    copy = copy_repository(tmp_path)
    delete(copy, dependents({name}))
    done = python_in(copy, f"""
import run_train
assert run_train.main({quick_run(data_folder, "o")}) == 0
""")
    assert done.returncode == 0, done.stderr
    assert "Training complete!" in done.stdout and (copy / "o" / "ckpt.pt").exists()


# For each optional part that a file of every run imports: a command that needs it, or why no
# command does.
NEEDED_BY = {
    "train.options.ema": ["--ema=0.9"],
    "train.options.trackers": ["--tracker=wandb"], "train.options.loss_svg": "only a picture",
    "train.options.mirror": ["--mirror=copies"],
    "train.options.mixture": ["--data_dir=d:1,d2:2"],
    "train.options.ranks": "several ranks",
    "train.tools.dry_run": ["--dry_run"], "train.tools.profiler": ["--profile=2"],
    "model.eval": ["--eval_tasks=d/tasks.jsonl"], "model.convert": ["--init_from=hf"],
    "data.prepare": ["--data_dir=data/bin/stdlib"]}


def test_without_all_optional_parts(tmp_path, data_folder):
    """Train, resume, and refuse in one line whatever needs a deleted part."""
    needed = {part(n) for name in FILES if not part(name) for n in imports(name) if part(n)}
    assert needed == set(NEEDED_BY)
    copy = copy_repository(tmp_path)
    for name in ("d", "d2"):
        shutil.copytree(data_folder, copy / name)
    (copy / "d" / "tasks.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (copy / "hf").mkdir()
    (copy / "hf" / "config.json").write_text('{"model_type": "llama"}')
    (copy / "hf" / "model.safetensors").write_bytes(b"")
    (copy / "model" / "own.py").write_text("from model.gpt import *\n")
    delete(copy, [*PARTS, "train.configs"])
    types = [p.removeprefix("model.") for p in PARTS if re.fullmatch(r"model\.(?!eval|conv)\w+", p)]
    refused = [[f"--model={name}"] for name in types if name not in ("sample", "serve")]
    refused += [words for words in NEEDED_BY.values() if isinstance(words, list)]
    done = python_in(copy, f"""
import os, sys
import run_train
assert run_train.main({quick_run("d", "o")}) == 0
assert run_train.main({quick_run("d", "o", 4)}) == 0
assert run_train.main({quick_run("d", "own")} + ["--model=own"]) == 0
os.unlink("model/own.py")
del sys.modules["model.own"]
from train.config import config_class
for words in {refused}:
    print(words, file=sys.stderr)
    assert run_train.main({quick_run("d", "p", None)} + words) == 2, words
from model.core.load import load_model
from train.base.errors import UserError
print(["a checkpoint"], file=sys.stderr)
try:
    load_model("own/ckpt.pt")
except UserError as error:
    print(error, file=sys.stderr)
""")
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.count("Training complete!") == 3 and "Resuming from" in done.stdout
    assert not list((copy / "o").glob("*.svg"))
    messages = re.findall(r"^\[.*\]\n((?:(?!\[).*\n)*)", done.stderr, re.MULTILINE)
    assert len(messages) == len(refused) + 1
    assert "there is no model type model/own.py" in messages[-1]
    for message in messages:
        lines = message.splitlines()
        lines = lines[1:] if lines[0].endswith("configuration: 1 problem") else lines
        assert len(lines) == 1 and re.search(r"missing|there is no|needs", lines[0]), message


# -----------------------------------------------------------------------------
# a model type of one's own

def test_the_readmes_model_type_trains_as_pasted(tmp_path):
    """The file in README.md, and the command in its first line."""
    copy = copy_repository(tmp_path)
    code = re.search(r"```python\n(.*?)```", (REPO / "README.md").read_text(), re.DOTALL)[1]
    (copy / "model" / "sine.py").write_text(code)
    command = re.search(r"python (run_train\.py [^\n\"]+)", code)[1].split()
    done = processes.python(copy / command[0], *command[1:], "--num_threads=1", "--out_dir=o",
                            "--eval_interval=100", cwd=copy)  # of the test configuration: 5
    assert done.returncode == 0, done.stderr
    loss, error = re.findall(r"val loss ([\d.]+), abs error ([\d.]+)", done.stdout)[-1]
    assert float(loss) < 0.1 and float(error) < 0.3
