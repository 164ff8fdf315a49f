"""What the tests share: small data, small configurations, and the program as a person starts it."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # also of every program

from processes import REPO, in_ranks_of, python  # noqa: E402

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


def tiny_args(**changes):
    """TINY with changes, as command-line arguments."""
    return [f"--{k}={v}" for k, v in (TINY | changes).items()]


def program(env):
    """run_train.py, or with FAULT in `env` faulty.py, which puts the fault in."""
    return str(REPO / ("tests/faulty.py" if env and "FAULT" in env else "run_train.py"))


def start(*args, ranks=0, env=None, torchrun=(), **popen):
    """Start run_train.py as a person does, under torchrun where ranks are given; its Popen."""
    command = [sys.executable]
    if ranks:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
                    *torchrun]
    return subprocess.Popen([*command, program(env), *map(str, args)], cwd=REPO, text=True,
                            env=os.environ | (env or {}), stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, **popen)


def finish(process, timeout=120):
    """(exit code, output) of what `start` has started."""
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, output


def run(*args, ranks=0, env=None, timeout=120):
    """Run run_train.py to its end, on so many ranks; (exit code, output)."""
    if ranks:
        return in_ranks_of(ranks, program(env), *args, env=env, timeout=timeout)
    done = python(program(env), *args, env=env, timeout=timeout, merged=True)
    return done.returncode, done.stdout


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """A prepared folder of learnable bytes: 20,000 training tokens, 4,000 validation tokens."""
    folder = tmp_path_factory.mktemp("data")
    line = b"line %d: the quick brown fox jumps over the lazy dog\n"
    text = b"".join(line % i for i in range(500))
    tokens = np.frombuffer(text, np.uint8).astype("<u2")
    tokens[:20_000].tofile(folder / "train.bin")
    tokens[20_000:24_000].tofile(folder / "val.bin")
    return folder
