"""Start processes for the tests by forking one that has imported torch: 0.1 s instead of 3 s.

`python(*ARGS)` runs `python ARGS` to its end, `in_ranks_of(2, *ARGS)` runs it on two ranks, and
`Fork` runs a function in a process that can be waited for or killed. The only difference from a
real process is that modules are already imported: tests of imports or of torchrun start real
processes.
"""

import atexit
import gc
import multiprocessing
import os
import pathlib
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from multiprocessing import connection, forkserver
from unittest import mock

TESTS = pathlib.Path(__file__).resolve().parent
REPO = TESTS.parent
OURS = ("train", "model", "data", "run_train", "faulty")
FORKER = multiprocessing.get_context("forkserver")
FORKER.set_forkserver_preload(["pytest", "numpy", "yaml", "tiktoken", "torch._dynamo",
                               "torch._inductor", "torch.distributed.fsdp", "run_train",
                               "train.train", "train.tools.plot", "model.sample", "faulty",
                               "numpy.ma",
                               "torch.utils.serialization", "asked_once"])


def ready():
    """Start the fork server (the process that the others are forked from), if it is not running.
    Return the multiprocessing context."""
    path = os.pathsep.join([str(REPO), str(TESTS),  # that it finds ours, whatever folder we are in
                            *filter(None, [os.environ.get("PYTHONPATH")])])
    with mock.patch.dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    return FORKER


@atexit.register
def _kill_programs():
    """Kill the processes that failed tests have left running, at the exit of pytest, which would
    wait for them."""
    for process in multiprocessing.active_children():
        process.kill()


def lighten():
    """Make runs in this process cheaper. Loaders read 4,096 tokens at a time instead of 2**18,
    which would be 16,384 batches of a test. os.fsync does nothing: it takes a tenth of a small run,
    and no test simulates a power cut."""
    if loader := sys.modules.get("train.dataloader"):
        loader.CHUNK_TOKENS = 1 << 12
    os.fsync = lambda fd: None


# Starting a process asks all others whether they have ended; two threads that hear it of the same
# one at once would read its exit code twice, the second time as 255.
ASKING = threading.Lock()


class Fork:
    """Runs function(*args) in a forked process in the folder `cwd`, with the files `stdin`,
    `stdout` and `stderr` (default: that of stdout). env: additional environment variables."""

    def __init__(self, function, args=(), cwd=REPO, env=None, stdin=os.devnull, stdout=os.devnull,
                 stderr=None):
        environment = {k: str(v) for k, v in (os.environ | (env or {})).items()}
        files = tuple(map(str, (stdin, stdout, stderr or stdout)))
        self.process = ready().Process(target=_become,
                                       args=(function, args, str(cwd), environment, files))
        with ASKING:
            self.process.start()

    def wait(self, timeout):
        """Wait up to `timeout` seconds for the end of the process. Return the exit code, -9 after
        SIGKILL; None if it is still running."""
        connection.wait([self.process.sentinel], timeout)
        with ASKING:
            return self.process.exitcode

    def kill(self):
        self.process.kill()
        self.process.join()


def _become(function, args, cwd, env, files):
    gc.freeze()  # what is imported is no garbage
    lighten()
    os.environ.clear()
    os.environ.update(env)
    if "CXX" in env and (config := sys.modules.get("torch._inductor.config")):
        config.cpp.cxx = None, env["CXX"]  # which it has read when it was imported
    os.chdir(cwd)
    for fd, name in enumerate(files):
        opened = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND if fd else os.O_RDONLY)
        os.dup2(opened, fd)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = (open(fd, mode, buffering, closefd=False)
                                         for fd, (mode, buffering) in enumerate(
                                             [("r", -1), ("w", -1), ("w", 1)]))
    function(*args)


def run_python(args):
    """Run `python ARGS` in this process, a fork. args: ["-m", MODULE, ...], ["-c", CODE, ...] or
    [FILE, ...]."""
    (how, *rest) = args if args[0] in ("-m", "-c") else ("", *args)
    script = pathlib.Path(rest[0]).resolve()
    here = os.getcwd() if how else str(script.parent)
    given = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.path[:] = [here, *given, *(p for p in sys.path if p not in (str(REPO), str(TESTS), ""))]
    if pathlib.Path(here) not in (REPO, TESTS):  # a copy of the repository has its own
        for name in [n for n in sys.modules if n.partition(".")[0] in OURS]:
            del sys.modules[name]
    sys.argv[:] = ["-c" if how == "-c" else str(rest[0]), *rest[1:]]
    if how == "-m":
        warnings.filterwarnings("ignore", module="runpy")  # that it is imported already
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(str(script), run_name="__main__")


def python(*args, cwd=REPO, env=None, input="", merged=False, timeout=120):
    """Run `python ARGS` in a forked process until it ends. Return a subprocess.CompletedProcess
    with the output as text; merged: stderr goes to stdout. Raises subprocess.TimeoutExpired."""
    args = [str(a) for a in args]
    with tempfile.TemporaryDirectory() as folder:
        stdin, stdout, stderr = (pathlib.Path(folder, n) for n in ("in", "out", "err"))
        stdin.write_text(input), stderr.touch()
        fork = Fork(run_python, (args,), cwd, env, stdin, stdout, stdout if merged else stderr)
        code = fork.wait(timeout)
        if code is None:
            fork.kill()
            raise subprocess.TimeoutExpired(args, timeout, stdout.read_text(), stderr.read_text())
        return subprocess.CompletedProcess(args, code, stdout.read_text(errors="replace"),
                                           stderr.read_text(errors="replace"))


# -----------------------------------------------------------------------------
# ranks

def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def rank_environments(world_size):
    """Return a list with the environment variables {name: value} that torchrun sets for each of
    world_size ranks on one machine."""
    port = free_port()
    return [dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size,
                 MASTER_ADDR="127.0.0.1", MASTER_PORT=port, OMP_NUM_THREADS=1)
            for rank in range(world_size)]


def in_ranks_of(world_size, *args, env=None, timeout=120):
    """Run `python ARGS` on each of world_size ranks, in forked processes. Return (the first exit
    code that is not 0, or 0; the output of all ranks). Raises AssertionError after `timeout`
    seconds."""
    args = [str(a) for a in args]
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        forks = [Fork(run_python, (args,), env=its | (env or {}), stdout=output.name)
                 for its in rank_environments(world_size)]
        end = time.monotonic() + timeout
        codes = [fork.wait(max(0, end - time.monotonic())) for fork in forks]
        for fork in forks:
            fork.kill()
        text = output.read()
    assert None not in codes, f"still running after {timeout} s:\n{text}"
    return next((code for code in codes if code), 0), text
