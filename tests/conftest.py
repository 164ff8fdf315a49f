"""What the tests share: small data, small configurations, and the program as a person starts it."""

import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

REPO = pathlib.Path(__file__).resolve().parent.parent
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


def start(*args, ranks=0, env=None, torchrun=(), **popen):
    """Start run_train.py, under torchrun where ranks are given; its Popen. With FAULT in `env` it
    is faulty.py, which puts the fault in."""
    command = [sys.executable]
    if ranks:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
                    *torchrun]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | (env or {})
    program = REPO / ("tests/faulty.py" if env and "FAULT" in env else "run_train.py")
    return subprocess.Popen([*command, str(program), *map(str, args)], cwd=REPO, text=True,
                            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            **popen)


def run(*args, timeout=120, **kwargs):
    """Run run_train.py to its end; (exit code, output)."""
    process = start(*args, **kwargs)
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, output


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
