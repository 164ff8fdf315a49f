"""Training runs for the tests: small ones in this process, and the program run_train.py in forked
processes that can be killed (0.1 s instead of 3 s each), with comparisons of their results."""

import contextlib
import functools
import importlib.util
import json
import os
import pathlib
import signal
import sys
import time

import pytest
import torch
from conftest import TINY, run
from faulty import faults
from processes import TESTS, Fork

from train import config as config_file
from train.base.checkpoint_file import load_checkpoint
from train.base.errors import Stopped
from train.config import load_config
from train.distributed import process_group
from train.setup import open_run, validate_config
from train.train import train

# One layer, 20 steps of 4 sequences of 8 tokens: a run of a quarter of a second. lr_decay_iters is
# fixed, so that runs of other lengths have the same learning rates.
SMALL = TINY | dict(n_layer=1, n_embd=16, n_hidden=32, block_size=8, batch_size=2, max_iters=20,
                    lr_decay_iters=20, vocab_size=256)
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
# Of two ranks. The tests of train.tools.check train each model type with FSDP, too.
WAYS = ["ddp", slow("fsdp")]


def configure(data_dir, out_dir, **changes):
    return load_config(None, SMALL | dict(data_dir=str(data_dir), out_dir=str(out_dir)) | changes)


@contextlib.contextmanager
def opened(config):
    """Context manager that opens the run of `config`, a TrainConfig, without training: yields the
    Run, ready for its next step."""
    config = validate_config(config)
    with process_group(config) as ranks, open_run(config, ranks) as run:
        if not config.eval_only:
            run.take_folder()
        yield run


def go(data_dir, out_dir, fault="", **changes):
    """Train in this process, with `fault` in the syntax of faulty.py, if any; changes: keys that
    differ from SMALL. Return the result of train(), or the exception Stopped if the run was
    stopped."""
    with faults(fault) if fault else contextlib.nullcontext():
        try:
            return train(configure(data_dir, out_dir, **changes))
        except Stopped as stopped:
            return stopped


def on_two_ranks(out_dir, changes):
    """Train on two ranks into the folder out_dir. changes: the configuration, a dict. Return the
    evaluations, a list of dicts: the lines of metrics.jsonl with "val_loss"."""
    file = f"{out_dir}.yaml"
    with open(file, "w") as f:
        json.dump(changes | dict(out_dir=str(out_dir)), f)
    code, output = run("--config", file, ranks=2)
    assert code == 0, output
    return [line for line in metrics(out_dir) if "val_loss" in line]


def tensors(path):
    """Return (tensors, rest), the parts of a checkpoint that are equal if two runs are: {name:
    tensor} of weights and optimizer state, equal bit for bit, and {name: value} of counters and
    other state. path: of the checkpoint."""
    c = load_checkpoint(path)
    out = {f"model.{n}": t for n, t in c["model"].items()}
    for name, entry in c["optimizer"]["state"].items():
        out |= {f"optimizer.{name}.{k}": t for k, t in entry.items()}
    return out, {k: c[k] for k in ("iter_num", "best_val_loss", "progress", "plateau",
                                   "early_stopping", "spikes", "scaler")}


def metrics(out_dir):
    """Return the lines of metrics.jsonl in out_dir, a list of dicts, without the numbers that
    depend on the clock or the machine."""
    lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    timed = ("time_ms", "tokens_per_sec", "memory_mib", "mfu")
    return [{k: v for k, v in line.items() if k not in timed} for line in lines]


def temporary_files(out):
    return [p.name for p in out.iterdir() if ".tmp" in p.name]


def assert_same_file(a, b):
    (tensors_a, rest_a), (tensors_b, rest_b) = tensors(a), tensors(b)
    assert tensors_a.keys() == tensors_b.keys()
    different = [n for n in tensors_a if not torch.equal(tensors_a[n], tensors_b[n])]
    assert not different
    assert rest_a == rest_b


def assert_same(a, b, best=True):
    """Assert that the runs in the folders `a` and `b` have ended with the same checkpoint (tensors
    and counters), the same lines in metrics.jsonl and, with `best`, the same ckpt_best.pt, if
    any."""
    assert_same_file(a / "ckpt.pt", b / "ckpt.pt")
    if best and (a / "ckpt_best.pt").exists():
        assert_same_file(a / "ckpt_best.pt", b / "ckpt_best.pt")
    assert metrics(a) == metrics(b)


def assert_a_kill_changes_nothing(data_dir, tmp_path, **changes):
    """Assert that a run that is killed (SIGKILL) before step 10 and started again (folder b) ends
    as an uninterrupted run (folder a). changes: keys, with which it must save checkpoints and have
    more than 10 steps."""
    go(data_dir, tmp_path / "a", **changes)
    killed = Program(data_dir, tmp_path / "b", env=dict(FAULT="before_step@10=kill9"), **changes)
    assert killed.wait()[0] == -9
    go(data_dir, tmp_path / "b", **changes)
    assert_same(tmp_path / "a", tmp_path / "b")


def assert_two_ranks_equal_one(tmp_path, settings, how, **tolerances):
    """Assert that a run on two ranks has the same evaluations and weights as a run on one rank.
    how: "ddp" or "fsdp"; settings: the configuration; tolerances: {name of a number: relative
    tolerance}."""
    one = train(load_config(None, settings | dict(out_dir=str(tmp_path / "one"))))["history"]
    two = on_two_ranks(tmp_path / "two", settings | dict(distributed=how))
    for a, b in zip(one, two, strict=True):
        for name, tolerance in tolerances.items():
            assert b[name] == pytest.approx(a[name], rel=tolerance, abs=0), name
    a, b = (tensors(tmp_path / n / "ckpt.pt")[0] for n in ("one", "two"))
    assert a.keys() == b.keys()
    for name in a:
        # Biases of keys have no effect on the softmax: AdamW amplifies rounding errors.
        if name.startswith("model.") and not name.endswith("attn.k.bias"):
            torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=3e-5)


def assert_keys_change_only(names, data_dir, tmp_path, settings, **changes):
    """Assert that the keys `changes` change only the numbers `names` in an evaluation of the
    initial weights. settings: the configuration without them."""
    a, b = (go(data_dir, tmp_path / f"keys_{len(more)}", **settings | dict(max_iters=0) | more)
            ["history"][0] for more in ({}, changes))
    assert {name for name in a if a[name] != b[name]} == set(names)


# -----------------------------------------------------------------------------
# the program in a process of its own

def _run_program(args, prepare):
    sys.argv = ["run_train.py", *args]
    prepare()
    import run_train
    with faults() if "FAULT" in os.environ else contextlib.nullcontext():
        sys.exit(run_train.main(args))


def nothing():
    pass


class Program:
    """Runs `python run_train.py ARGS` in a forked process, with the configuration SMALL and
    `changes`. prepare() is called in that process first; output: the file of the output."""

    def __init__(self, data_dir, out_dir, *args, output=None, env=None, prepare=nothing, **changes):
        self.output = str(output or f"{out_dir}.output")
        pathlib.Path(self.output).write_text("")
        settings = SMALL | dict(data_dir=str(data_dir), out_dir=str(out_dir)) | changes
        with open(self.output + ".yaml", "w") as f:
            f.writelines(f"{k}: {json.dumps(v)}\n" for k, v in settings.items())
        args = ["--config", self.output + ".yaml", *args]
        self.process = Fork(_run_program, (args, prepare), env=env, stdout=self.output).process

    def send(self, signum):
        with contextlib.suppress(ProcessLookupError):  # it ended this very moment
            os.kill(self.process.pid, signum)

    def kill(self):
        self.send(signal.SIGKILL)
        self.process.join()

    def text(self):
        with contextlib.suppress(FileNotFoundError), open(self.output, errors="replace") as f:
            return f.read()
        return ""

    def wait_for(self, what, timeout=30):
        """Wait until the output contains the text `what`. Raises AssertionError after `timeout`
        seconds, or if the process has ended without it."""
        end = time.monotonic() + timeout
        while what not in self.text():
            assert self.process.is_alive() and time.monotonic() < end, self.text()
            time.sleep(0.005)

    def wait(self, timeout=60):
        """Wait for the end of the process. Return (exit code, output); the code is -9 after
        SIGKILL. Raises AssertionError after `timeout` seconds."""
        self.process.join(timeout)
        if self.process.is_alive():
            self.kill()
            raise AssertionError(f"still running after {timeout} s:\n{self.text()}")
        return self.process.exitcode, self.text()


def run_program(*args, timeout=60, **kwargs):
    return Program(*args, **kwargs).wait(timeout)


# -----------------------------------------------------------------------------
# runs that a command starts (train.tools.child_runs), of model/planted.py

def register():
    """Make tests/model/planted.py known as the module model.planted in this process, so that runs
    can use --model planted."""
    config_file.REPOSITORY = str(TESTS)
    if "model.planted" not in sys.modules:
        spec = importlib.util.spec_from_file_location("model.planted", TESTS / "model/planted.py")
        sys.modules["model.planted"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def _run_planted(args):
    register()
    import run_train
    sys.exit(run_train.main(args))


class Child:
    """A forked run with the methods of subprocess.Popen that train.tools.child_runs uses."""

    def __init__(self, args, env, log):
        self.fork = Fork(_run_planted, (args,), env=env, stdout=log)

    def poll(self):
        return self.fork.wait(0)

    def wait(self):
        return self.fork.wait(60)

    def terminate(self):
        self.fork.process.terminate()


def planted_children(monkeypatch):
    """Patch train.tools.child_runs so that it forks its runs (Child), which know --model planted.
    Return a list to which the arguments of each run are appended when it starts."""
    from train.tools import child_runs
    monkeypatch.setattr(config_file, "REPOSITORY", config_file.REPOSITORY)  # undone at the end
    register()
    started = []

    def start_process(args, env, log):
        started.append(args)
        return Child(args, env, log)
    monkeypatch.setattr(child_runs, "start_process", start_process)
    monkeypatch.setattr(child_runs, "POLL_SECONDS", 0.01)
    return started
