"""The house: who may know whom, and what can be taken away."""

import ast
import functools
import pathlib
import re
import shutil
import subprocess
import sys

import processes
import pytest
from conftest import REPO

from data import prepare

FILES = {".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__"): path
         for folder in ("run_train.py", "train/*.py", "model/**/*.py", "data/**/*.py")
         for path in sorted(REPO.glob(folder))}
# What the main job needs, story and armour; everything else in train/, model/, data/ is an extra.
CORE = {"train": {"train", "checkpoint", "config", "keys", "dataloader", "distributed", "evaluate",
                  "files", "guard", "logger", "lr_scheduler", "optimizer", "resume", "speed"},
        "model": {"gpt", "ops", "generate", "decode", "load"}, "data": {"token_files", "tokenizer"}}
# Where a core file opens an extra, when a key (or a file of another program) asks for it.
DOORS = {("run_train", "train.tools.dry_run"), ("run_train", "train.tools.profiler"),
         ("train.dataloader", "data.prepare"), ("train.logger", "train.options.loss_svg"),
         ("train.logger", "train.options.trackers"),
         ("train.optimizer", "train.muon"), ("train.train", "train.options.trackers"),
         ("train.train", "train.options.minutes"), ("train.train", "train.options.mixture"),
         ("train.train", "train.options.ema"), ("train.train", "model.eval.tasks"),
         ("model.core.load", "model.convert")}
# What belongs together and is deleted together, beside what lies in a folder of its own.
TOGETHER = {"data.prepare.chat": "model.chat", "data.chat_template": "model.chat", "data.prepare.pairs": "model.dpo",
            "data.prepare.prompts": "model.grpo", "data.prepare.labels": "model.classifier",
            "model.sae.activations": "model.sae", "data.prepare.features": "model.autoencoder"}
SHARED = {"data.records", "data.prepare.folders", "data.tokenizer_hf"}  # of several extras, and kept
# What stands on another extra and goes with it; (lazily) only a part of it does.
NEEDS = {"model.eval.lm_eval": {"model.eval.tasks"},
         "model.lora": {"model.chat"}, "model.dpo": {"model.lora", "model.chat"},
         "model.grpo": {"model.lora", "model.chat"},
         "model.memory": {"model.lora", "model.moe", "model.chat"},
         "train.tools.hpo": {"train.tools.plot"}, "train.tools.lr_finder": {"train.tools.plot"},
         "train.options.trackers": {"train.tools.plot"}, "train.tools.repeat": {"train.tools.plot"},
         "train.tools.scaling": {"train.tools.repeat", "train.tools.plot"},
         "train.tools.watch": {"train.tools.plot", "model.serve"}}
LAZILY = {"model.convert": {"model.lora", "model.moe", "model.convert.families", "model.chat"},
          "data.tokenizer_hf": {"data.prepare"},
          "model.sample": {"model.chat"}, "model.serve": {"model.chat"},
          "model.eval.tasks": {"model.chat"}}


def is_core(name):
    folder, _, stem = name.partition(".")
    return name == "run_train" or stem in CORE[folder]


def unit(name):
    """What is deleted with the file `name`: itself, its folder, or its system."""
    return TOGETHER.get(name, ".".join(name.split(".")[:2]))


UNITS = sorted({unit(n) for n in FILES if not is_core(n) and n not in SHARED} - {"data"})


@functools.cache
def nodes(path):
    """All nodes of a file's syntax tree, the tree itself first."""
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imports(path, lazy):
    """Names of our own files that a file imports: at its top, or (lazy) anywhere in it."""
    found = []
    for node in nodes(path) if lazy else nodes(path)[0].body:
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
    return [n for n in found if n in FILES]


def circles(graph):
    """Lists of files that import each other in a circle."""
    found, done = [], set()

    def visit(name, path):
        if name in path:
            found.append(path[path.index(name):])
        elif name not in done:
            for other in sorted(graph[name]):
                visit(other, [*path, name])
            done.add(name)
    for name in graph:
        visit(name, [])
    return found


@pytest.mark.parametrize("lazy", [False, True])
def test_no_two_files_know_each_other_in_a_circle(lazy):
    graph = {name: {other for other in imports(path, lazy)
                    if other != name}
             for name, path in FILES.items()}
    assert len(graph) > 15 and sum(map(len, graph.values())) > 30
    assert circles(graph) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == [["a", "b", "c"]]  # it finds them


def test_nobody_takes_the_trainer():
    """A function takes the parts it needs."""
    seen = []
    for name, path in FILES.items():
        for node in nodes(path):
            if isinstance(node, (ast.FunctionDef, ast.Lambda)):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if name != "train.train" and {"run", "trainer"} & {a.arg for a in arguments}:
                    seen.append(f"{name}:{node.lineno}")
    assert seen == []


def test_the_loop_does_not_know_language_models():
    for name in ("train", "evaluate"):
        text = (REPO / "train" / f"{name}.py").read_text()
        assert not re.search(r"wte|token_bytes|val_bpb|val_ppl|block_size|vocab", text)


def test_every_command_takes_dashes_and_underscores():
    """Whatever is parsed has been through `underscores`, in run_command or by itself, and options
    are declared with these."""
    parsers, odd = 0, []
    for name, path in FILES.items():
        text = path.read_text()
        if "ArgumentParser(" not in text and name != "train.config":
            continue
        parsers += len(re.findall(r" run_command\(", text)) - (name == "train.config")
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                call = ast.unparse(node)
                if node.func.attr in ("parse_args", "parse_known_args"):
                    parsers += 1
                    odd += [(name, call)] * ("underscores(" not in call)
                if node.func.attr == "add_argument":
                    odd += [(name, call)] * bool(re.match(r".*?\('--\w+-", call))
    assert parsers >= 17 and odd == []


def test_no_test_hook_is_in_the_program():
    for path in FILES.values():
        assert not re.search(r"\bFAULT\b|PYTEST|\bpytest\b", path.read_text()), path


def test_nothing_is_done_at_import():
    """Importing the core opens no file of ours for writing, prints nothing and starts no thread."""
    code = ("import sys, threading; sys.path.insert(0, '.'); import train.train, model.gpt, "
            "train.robust, run_train; assert threading.active_count() == 1")
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def stands_on(name, lazy):
    """The extras that a file imports, but for its own."""
    return {unit(n) for n in imports(FILES[name], lazy)
            if not is_core(n) and n not in SHARED} - {unit(name)}


@pytest.mark.parametrize("extra", UNITS)
def test_every_extra_can_be_deleted_alone(extra):
    """Nothing else imports it, but for what says so."""
    others = [n for n in FILES if unit(n) != extra and not is_core(n)]
    assert {unit(n) for n in others if extra in stands_on(n, lazy=False)} == {
        other for other, needed in NEEDS.items() if extra in needed}
    assert {unit(n) for n in others if extra in stands_on(n, lazy=True)} == {
        other for other, needed in [*NEEDS.items(), *LAZILY.items()] if extra in needed}


def test_no_core_file_names_an_extra():
    """But for the doors that a key opens; and no system's name stands in its code."""
    core = [n for n in FILES if is_core(n)]
    assert [n for n in core if stands_on(n, lazy=False)] == []
    assert {(n, extra) for n in core for extra in stands_on(n, lazy=True)} == DOORS
    systems = {u.removeprefix("model.") for u in UNITS if u.startswith("model.")
               and any("def build_model" in FILES[n].read_text() for n in FILES if unit(n) == u)}
    assert len(systems) == 11
    words = re.compile(rf"\b({'|'.join(systems - {'chat', 'memory'})})\b")  # these are words, too
    for name in core:
        code = ast.unparse(without_docstrings(ast.parse(FILES[name].read_text())))
        assert not words.search(code), (name, words.findall(code))


def without_docstrings(tree):
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [n for n in body if not (isinstance(n, ast.Expr) and isinstance(
                n.value, ast.Constant))] or [ast.Pass()]
    return tree


def test_all_extras_can_be_deleted_at_once(tmp_path):
    """In a copy without any extra: prepare, train, resume, sample."""
    copy = tmp_path / "repo"
    shutil.copytree(REPO, copy, ignore=shutil.ignore_patterns(".git", "out", "bin", "tests"))
    needed = {"data", "model.sample"} | {unit(n) for n in reached("data.prepare")
                                         if n.startswith("data.")}
    deleted = []
    for name, path in FILES.items():
        if not is_core(name) and unit(name) not in needed:
            (copy / path.relative_to(REPO)).unlink()
            deleted.append(name)
    assert {"model.serve.engine", "train.tools.plot", "train.tools.hpo"} <= set(deleted)
    (copy / "my.txt").write_text("one two three four five six seven\n" * 500)

    def python(*args):
        done = processes.python(*args, cwd=copy, env={"PYTHONPATH": ""})
        assert done.returncode == 0, (args, done.stderr)
        return done.stdout
    python("-m", "data.prepare", "my.txt", "--out", "d", "--tokenizer", "byte")
    command = ["--config", "train/config_test.yaml", "--data_dir=d", "--out_dir=o",
               "--block_size=16", "--n_layer=1"]
    text = python("-c", f"""
import run_train, sys
from model import sample
assert run_train.main({[*command, "--max_iters=4"]}) == 0
assert run_train.main({[*command, "--max_iters=6"]}) == 0
assert sample.main("--ckpt o/ckpt.pt --prompt one --seed 1 --max_new_tokens 8".split()) == 0
# The process is a fork of one that has imported what is deleted here: none of that is used.
ours = [m.__file__ for n, m in sys.modules.items() if n.split(".")[0] in ("train", "model", "data")]
assert len(ours) > 15 and all(f.startswith({str(copy)!r}) for f in ours if f), ours
""")
    assert text.count("Training complete!") == 2 and "Resuming from" in text
    assert "iter 5: loss" in text and "sample: " in text and "\none" in text
    assert not any(pathlib.Path(copy / "o").glob("*.svg"))


def test_without_data_prepare_the_rest_works(tmp_path):
    """Chats, labels and features are prepared, prepared data train and are sampled; the built-in
    dataset says what is missing."""
    copy = tmp_path / "repo"
    shutil.copytree(REPO, copy, ignore=shutil.ignore_patterns(".git", "out", "bin", "tests"))
    text = "".join(f"question {i} and its answer\n" for i in range(300))
    prepare.prepare([write(tmp_path / "a.txt", text)], tmp_path / "d", log=lambda line: None)
    shutil.rmtree(copy / "data" / "prepare")
    rows = write(tmp_path / "rows.csv", "prompt,response,text,label\n" + "".join(
        f"p{i},r{i},t{i},{'ab'[i % 2]}\n" for i in range(100)))
    command = [f"--data_dir={tmp_path}/d", f"--out_dir={tmp_path}/o", "--block_size=16",
               "--config=train/config_test.yaml", "--n_layer=1", "--max_iters=2"]
    done = processes.python("-c", f"""
import run_train
from data.prepare import chat, features, labels
from model import sample
assert chat.main([{rows!r}, "--out", "c"]) == 0
assert labels.main([{rows!r}, "--out", "l"]) == 0
assert features.main(["--synthetic", "--out", "f"]) == 0
assert run_train.main({command}) == 0
assert sample.main(["--ckpt={tmp_path}/o/ckpt.pt", "--prompt=one", "--max_new_tokens=8"]) == 0
assert run_train.main({[*command, "--data_dir=data/bin/stdlib", "--out_dir=p"]}) == 2
""", cwd=copy)
    assert done.returncode == 0, done.stderr
    assert "Training complete!" in done.stdout
    assert done.stderr.splitlines()[-1].startswith(
        "data/bin/stdlib: the built-in dataset is made by data/prepare/, which is missing"), \
        done.stderr


def write(path, text):
    path.write_text(text)
    return str(path)


def test_the_readmes_system_trains_as_pasted(tmp_path):
    """"To fork it": the file, and the command in its first line."""
    copy = tmp_path / "repo"
    shutil.copytree(REPO, copy, ignore=shutil.ignore_patterns(".git", "out", "bin", "tests"))
    code = re.search(r"```python\n(.*?)```", (REPO / "README.md").read_text(), re.DOTALL)[1]
    (copy / "model" / "sine.py").write_text(code)
    command = re.search(r"python (run_train\.py [^\n\"]+)", code)[1].split()
    done = processes.python(copy / command[0], *command[1:], "--num_threads=1", "--out_dir=o",
                            "--eval_interval=100", cwd=copy)  # of the test configuration: 5
    assert done.returncode == 0, done.stderr
    last = re.findall(r"val loss ([\d.]+), abs error ([\d.]+)", done.stdout)[-1]
    assert float(last[0]) < 0.1 and float(last[1]) < 0.3


def reached(name, seen=None):
    """Files that `name` imports, however far down."""
    seen = set() if seen is None else seen
    if name not in seen:
        seen.add(name)
        for other in imports(FILES[name], lazy=True):
            reached(other, seen)
    return seen
