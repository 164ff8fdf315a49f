"""Run tests of a copy of the repository in forks of a process that has imported the heavy packages,
so that a mutant costs seconds, and kill all processes that they leave running."""

import contextlib
import ctypes
import importlib
import json
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

from tests.mutants.covered import Recorder, table_of_lines
from tests.mutants.hook import sitecustomize

HEAVY = ("numpy", "yaml", "torch", "torch.distributed", "torch._dynamo", "pytest",
         "_pytest.assertion.rewrite", "tiktoken", "sklearn.metrics", "safetensors.torch")
RECORD_LIMIT = 1800  # seconds for one test file
NORMAL_ENDS = 0, 5  # of pytest: all passed; nothing was chosen
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def warm_up(repo):
    """Import those of the heavy packages that a file in the folder `repo` imports."""
    texts = [p.read_text() for p in repo.rglob("*.py")]
    for name in HEAVY:
        if name.startswith("_") or any(f"import {name.split('.')[0]}" in t for t in texts):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def copy_repository(repo, folder):
    """Copy the folder `repo` to folder/repo, without caches and outputs, and link the data folder
    shared/ next to `repo`, if any, into `folder`. Return the path of the copy."""
    out = folder / "repo"
    shutil.copytree(repo, out, ignore=lambda where, names: [
        n for n in names if n in (".git", "__pycache__", ".pytest_cache", ".ruff_cache", ".venv")
        or Path(where).name in ("out", "bin") and n != ".gitignore"])
    if (repo.parent / "shared").exists():
        (folder / "shared").symlink_to((repo.parent / "shared").resolve())
    return out


class Teller:
    """Pytest plugin that runs only the tests in `wanted`, in that order (None: all), and writes a
    JSON line to a pipe when a test starts, fails, or has passed (with the seconds)."""

    def __init__(self, pipe, wanted):
        self.pipe = pipe
        self.wanted = None if wanted is None else {t: i for i, t in enumerate(wanted)}

    def tell(self, *words):
        os.write(self.pipe, (json.dumps(words) + "\n").encode())

    def pytest_collection_modifyitems(self, config, items):
        if self.wanted is not None:
            items[:] = sorted((i for i in items if i.nodeid in self.wanted),
                              key=lambda i: self.wanted[i.nodeid])

    def pytest_runtest_logstart(self, nodeid, location):
        self.tell("start", nodeid)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.tell("failed", report.nodeid)
        elif report.when == "call":
            self.tell("took", report.nodeid, report.duration)

    def pytest_collectreport(self, report):
        if report.failed:
            self.tell("failed", report.nodeid)


def run_pytest(repo, files, plugins, folder, first_failure=True):
    """Run pytest, in a forked child, on `files` of `repo`, of which no module may have been
    imported; write the output to folder/output.txt. Return the exit code. first_failure: stop after
    it."""
    with open(folder / "output.txt", "w") as f:
        os.dup2(f.fileno(), 1)
        os.dup2(f.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(repo)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    elsewhere = [p for p in sys.path if p and not (Path(p) / "run_train.py").exists()]
    sys.path[:] = [str(repo), *elsewhere]
    for name in [n for n in sys.modules if n == "tests" or n.startswith("tests.")]:
        del sys.modules[name]
    import pytest
    return pytest.main([*files, "-q", "--no-header", "--tb=short", "-m", "not slow", "-o",
                        "addopts=", "-p", "no:cacheprovider", f"--basetemp={folder / 'tmp'}",
                        *(["-x"] if first_failure else [])], plugins=plugins)


def environment(**more):
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
                   "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | more
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in os.environ


def forked(work):
    """Run work() in a forked process, whose exit code is the result. Return the pid in the
    parent."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        code = work()
    except BaseException:
        import traceback
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(code or 0))


def adopt_orphans():
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_children():
    """Kill all descendants of this process; orphans are among them after adopt_orphans()."""
    while True:
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def descendants(pid):
    try:
        children = [int(c) for t in os.listdir(f"/proc/{pid}/task")
                    for c in Path(f"/proc/{pid}/task/{t}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [*children, *(d for c in children for d in descendants(c))]


def run_tests(repo, folder, tests, limit, patience, took):
    """Run `tests` (ids) of the repository `repo` until one fails. Return the id of that test, or
    None; "no end: ID" if it was too slow, "end: ID" if pytest crashed. limit(id): seconds that a
    test may take, plus `patience`. The seconds of tests that passed are added to the dict `took`.
    To be called in a process that has called adopt_orphans()."""
    reader, writer = os.pipe()
    files = list(dict.fromkeys(t.split("::")[0] for t in tests))
    pid = forked(lambda: environment() or run_pytest(repo, files, [Teller(writer, tests)], folder))
    os.close(writer)
    failed, current, text, ended, status = None, "", b"", False, 0
    deadline = time.monotonic() + 2 * patience + 5 * len(files)
    while not failed and not ended:
        done, status = os.waitpid(pid, os.WNOHANG)
        ended = done == pid
        while select.select([reader], [], [], 0 if ended else 0.05)[0]:
            if not (more := os.read(reader, 65536)):
                break
            text += more
            *lines, text = text.split(b"\n")
            for what, test, *seconds in map(json.loads, lines):
                if what == "failed":
                    failed = failed or test
                elif what == "took":
                    took[test] = seconds[0]
                else:
                    current, deadline = test, time.monotonic() + patience + limit(test)
        if time.monotonic() > deadline and not failed:
            failed = f"no end: {current or 'collection'}"
    os.close(reader)
    if not ended and not (failed or "").startswith("no end"):
        with contextlib.suppress(ChildProcessError):  # let fixtures clean up
            end = time.monotonic() + 2
            while time.monotonic() < end and os.waitpid(pid, os.WNOHANG)[0] != pid:
                time.sleep(0.02)
    end_children()
    shutil.rmtree(folder / "tmp", ignore_errors=True)
    if ended and not failed and os.waitstatus_to_exitcode(status) not in NORMAL_ENDS:
        failed = f"end: {current or 'collection'}"
    return failed


def record(repo, folder, file, names):
    """Run the tests `names` of a test file with Recorder. Return its output, or None after
    RECORD_LIMIT seconds. repo: a copy of the repository; folder: for temporary files."""
    table, firsts = table_of_lines(repo, folder)
    # Bytecode with marks stays apart: without what they mark, mutants could not import it.
    sys.pycache_prefix = str(folder / "marked")
    environment(MARKED_LINES=str(table), PYTHONPATH=str(Path(sitecustomize.__file__).parent),
                PYTHONPYCACHEPREFIX=sys.pycache_prefix)
    with open(folder / "map.jsonl", "w") as f:
        recorder = Recorder(sitecustomize.install(str(table)), firsts, f)
        pid = forked(lambda: run_pytest(repo, [f"tests/{file}::{n}" for n in names], [recorder],
                                        folder, False))
        end = time.monotonic() + RECORD_LIMIT
        while (ended := os.waitpid(pid, os.WNOHANG)[0] != pid) and time.monotonic() < end:
            time.sleep(0.1)
    end_children()
    return None if ended else (folder / "map.jsonl").read_text()
