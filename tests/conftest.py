"""Fixtures, hooks and functions that the tests share: small data, small configurations, and
functions that start run_train.py as a user does."""

import contextlib
import fcntl
import gc
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # also of every program
# AVX2 and AVX-512 are believed of the processor: to try them takes the compiler ten seconds.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Hundreds of processes read the same files: where their bytecode is not kept, each compiles them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

from processes import REPO, TESTS, in_ranks_of, lighten, python  # noqa: E402

SHARED = REPO.parent / "shared" / "data"

# A model that trains in milliseconds; float32 and one thread so that runs are equal bit for bit.
TINY = dict(n_layer=2, n_head=2, n_embd=32, n_hidden=64, block_size=16, batch_size=4,
            gradient_accumulation_steps=2, max_iters=10, warmup_iters=2, eval_interval=5,
            eval_on_start=True, eval_iters=3, log_interval=1, sample_tokens=0, device="cpu",
            dtype="float32", compile="false", num_threads=1, learning_rate=1e-2)

# What started pytest may have it ignore these (nohup, a shell's &), and every program with it.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


# -----------------------------------------------------------------------------
# the whole suite, on several cores

# These take longest: begun first, so that no worker is left with one of them at the end.
FIRST = ("test_check.py", "test_sae.py", "test_hpo.py", "test_distributed.py",
         "test_classifier.py", "test_families.py", "test_serve.py", "test_autoencoder.py",
         "test_hub.py", "test_edits.py", "test_multinode.py", "test_resume.py", "test_proofs.py",
         "test_gpt.py", "test_layout.py", "test_checkpoint_read.py", "test_scaling.py",
         "test_memory.py", "test_sharded.py", "test_regressions.py", "test_repeat.py",
         "test_signals.py", "test_lm_eval.py", "test_checkpoint_write.py", "test_environment.py",
         "test_grpo.py", "test_crash_points.py", "test_distill.py", "test_gpu_paths.py",
         "test_plan.py", "test_chat.py", "test_lora.py", "test_ema.py", "test_dry_run.py")
# Values of -m for the whole suite: the default (pyproject.toml), what .ci/run adds, and both.
QUICK, CI, BOTH = "not slow and not ci", "ci and not slow", "not slow"


def is_part(config):
    """Return whether the command line selects a part of the tests, by files or -k."""
    return config.args != config.getini("testpaths") or bool(config.option.keyword)


def pytest_configure(config):
    """Do not leave out the tests marked ci if a part of the tests is selected."""
    is_worker = hasattr(config, "workerinput")  # of pytest-xdist; it has the options of the first
    if not is_worker and is_part(config) and config.option.markexpr == QUICK:
        config.option.markexpr = BOTH


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Return the number of test processes for `-n auto`. For the whole suite: three for every two
    cores, up to 8, because a third of its time is waiting for processes. If a part of the tests is
    selected: 0, so that output, debuggers and -x work as usual."""
    if (is_part(config) or config.option.markexpr not in (QUICK, CI, BOTH)
            or config.option.capture == "no"):
        return 0
    cores = (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity")
             else os.cpu_count())
    return min(8, cores * 3 // 2)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:  # -k case_025 finds the tests of a case of tests/MATRIX.md
        for mark in item.iter_markers("matrix"):
            item.extra_keyword_matches.update(f"case_{n:03}" for n in mark.args)
    place = {name: i for i, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path.name, len(FIRST)))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Let one worker collect the tests before the others: the others then read the bytecode that it
    has written."""
    gc.disable()
    with open(TESTS / "matrix.py") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another is first
            fcntl.flock(file, fcntl.LOCK_SH)
        return (yield)


def pytest_collection_finish():
    """Make Python's garbage collection faster, which was a third of the suite's time: exclude all
    objects that exist after collection and imports, and run it less often. Also call lighten()."""
    gc.enable()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    lighten()


@contextlib.contextmanager
def locked(path, how):
    with open(path) as file:
        fcntl.flock(file, how)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Under pytest-xdist, run a test marked `alone`, which measures time, while no other test
    runs."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    alone, door, room = item.get_closest_marker("alone"), TESTS / "runs.py", TESTS / "processes.py"
    with contextlib.ExitStack() as stack:
        with locked(door, fcntl.LOCK_EX):  # held by who waits for the room alone: none goes before
            stack.enter_context(locked(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        return (yield)


def tiny_args(**changes):
    """Return the configuration TINY, with `changes`, as a list of command-line arguments."""
    return [f"--{k}={v}" for k, v in (TINY | changes).items()]


def program(env):
    """Return the path of run_train.py or, if `env` has the variable FAULT, of faulty.py, which runs
    it with that fault."""
    return str(REPO / ("tests/faulty.py" if env and "FAULT" in env else "run_train.py"))


def start(*args, ranks=0, env=None, torchrun=(), **popen):
    """Start run_train.py in a new process as a user does, under torchrun if `ranks` is not 0.
    Return the Popen. env: additional environment variables; torchrun: additional arguments of
    torchrun; popen: of Popen."""
    command = [sys.executable]
    if ranks:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
                    *torchrun]
    return subprocess.Popen([*command, program(env), *map(str, args)], cwd=REPO, text=True,
                            env=os.environ | (env or {}), stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, **popen)


def finish(process, timeout=120):
    """Wait for a process that start() returned. Return (exit code, output). Raises
    subprocess.TimeoutExpired after `timeout` seconds; the process is killed."""
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, output


def run(*args, ranks=0, env=None, timeout=120):
    """Run run_train.py with `args` until it ends, on `ranks` ranks (0: without ranks), in forked
    processes. Return (exit code, output). Raises an error after `timeout` seconds."""
    if ranks:
        return in_ranks_of(ranks, program(env), *args, env=env, timeout=timeout)
    done = python(program(env), *args, env=env, timeout=timeout, merged=True)
    return done.returncode, done.stdout


@contextlib.contextmanager
def full_disk(n_bytes):
    """Context manager that simulates a full disk: this process cannot write files of more than
    n_bytes."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture(autouse=True)
def seed_torch():
    """Tests that draw random numbers draw the same in each order of the tests."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture
def browser(tmp_path):
    from browser import CHROMIUM, Browser
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """Fixture: a prepared data folder with bytes of repetitive text: 20,000 training tokens, 4,000
    validation tokens."""
    folder = tmp_path_factory.mktemp("data")
    line = b"line %d: the quick brown fox jumps over the lazy dog\n"
    text = b"".join(line % i for i in range(500))
    tokens = np.frombuffer(text, np.uint8).astype("<u2")
    tokens[:20_000].tofile(folder / "train.bin")
    tokens[20_000:24_000].tofile(folder / "val.bin")
    # Without it models would have rows for 50,304 ids: most of the time of the suite's runs.
    (folder / "meta.json").write_text('{"vocab_size": 256}')
    return folder
