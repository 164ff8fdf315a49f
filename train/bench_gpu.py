"""The programme of `python -m train.bench gpu`: what only a GPU can tell, in order of worth.

Each item is a process of its own with a limit, so that one that fails or hangs costs only itself;
its result is written as it comes, a JSON line each, and a table for the README at the end. On a
machine without a GPU the same items run on a tiny model, to show that they run at all.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from train.config import REPOSITORY

TINY = ["--n_layer=2", "--n_head=2", "--n_embd=32", "--n_hidden=64", "--vocab_size=256",
        "--block_size=32", "--batch_size=4", "--gradient_accumulation_steps=2"]
GPT2 = ["--config", "train/config_gpt2.yaml", "--batch_size=32", "--gradient_accumulation_steps=2"]


def programme(o):
    """Run every item until o.minutes are over; the exit code."""
    cuda = torch.cuda.is_available()
    end, results = time.monotonic() + 60 * o.minutes, []
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), cuda and not o.tiny, o.peer)
        for name, item in ITEMS.items():
            left = end - time.monotonic()
            if left < 10:
                results.append(dict(item=name, result="not measured: no time left"))
            else:
                results.append(dict(item=name) | outcome(item, job, left))
            print(json.dumps(results[-1]), flush=True)
            if o.out:
                with open(o.out, "a") as f:
                    f.write(json.dumps(results[-1]) + "\n")
    where = torch.cuda.get_device_name() if cuda else "a CPU, tiny: these are no measurements"
    print(f"\nOn {where}, PyTorch {torch.__version__}:\n\n| item | result |\n|---|---|")
    for r in results:
        print(f"| {r['item']} | {r['result']} |")
    return int(any(r.get("failed") for r in results))


def outcome(item, job, limit):
    """What came of an item: its result, or how it failed."""
    started = time.monotonic()
    try:
        job.limit = limit
        result = dict(result=item(job))
    except Exception as error:
        result = dict(result=f"failed: {str(error).strip()[-300:]}", failed=True)
    return result | dict(seconds=round(time.monotonic() - started, 1))


class Job:
    """What the items share: a folder, the model's size, synthetic data."""

    def __init__(self, folder, large, peer):
        self.folder, self.large, self.peer, self.limit = folder, large, peer, 600
        rng, data = np.random.default_rng(0), folder / "data"
        data.mkdir()
        T, vocabulary = (1024, 50257) if large else (32, 256)
        # 45 windows of validation: the last of the batches is a smaller one.
        for split, n in (("train", 4_000_000 if large else 40_000), ("val", 45 * T + 1)):
            rng.integers(0, vocabulary, n, dtype=np.uint16).tofile(data / f"{split}.bin")

    def command(self, args, env=None):
        """The output of a process; raises with its end where it fails."""
        done = subprocess.run([sys.executable, *args], cwd=REPOSITORY, text=True,
                              env=os.environ | (env or {}), timeout=self.limit,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode:
            raise RuntimeError(f"{' '.join(args)}: exit {done.returncode}: {done.stdout}")
        return done.stdout

    def train(self, name, *args, env=None):
        """Output of a run of 20 steps in its own folder, and the lines of its metrics.jsonl."""
        out = self.folder / name
        size = GPT2 if self.large else TINY
        text = self.command(["run_train.py", *size, f"--data_dir={self.folder / 'data'}",
                             f"--out_dir={out}", "--max_iters=20", "--eval_interval=10",
                             "--eval_iters=4", "--log_interval=1", "--sample_tokens=0",
                             "--warmup_iters=5", *args], env)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return text, [line for line in lines if "loss" in line], out


# -----------------------------------------------------------------------------
# the items

def graphs(job):
    """Does a smaller last validation batch, or anything else, compile again?"""
    text, steps, _ = job.train("graphs", "--compile", env={"TORCH_LOGS": "recompiles,graph_breaks"})
    again = len(re.findall(r"Recompiling function", text))
    breaks = len(re.findall(r"Graph break", text))
    return f"{again} recompilations, {breaks} graph breaks in {len(steps)} steps"


def throughput(job):
    """Tokens/s by micro-batch, ours and the peer's in turn."""
    found = []
    for batch in (12, 32, 48, 60) if job.large else (2,):
        file = job.folder / f"throughput_{batch}.json"
        peer = ["--peer", job.peer] if job.peer else []
        tiny = [] if job.large else ["--tiny", "--no-compile", "--repeats=1"]
        job.command(["-m", "train.bench", "throughput", f"--batch={batch}", f"--out={file}",
                     *peer, *tiny])
        row = json.loads(file.read_text())["rows"][0]["results"]
        found += [f"batch {batch}, {name}: {r['median']:,.0f} tokens/s, {r['of_bound']:.0%} of the "
                  "matmul peak" for name, r in row.items()]
    return "; ".join(found)


def losses(job):
    """The same 20 steps compiled, eager and in float32: how far apart is the last loss?"""
    ways = dict(compiled=["--compile"], eager=["--no-compile"],
                float32=["--no-compile", "--dtype=float32"])
    last = {name: job.train(f"loss_{name}", *args)[1][-1]["loss"] for name, args in ways.items()}
    return ", ".join(f"{name} {loss:.4f}" for name, loss in last.items())


def resumed(job):
    """Deterministic mode: 20 steps, and 9 + 11, are the same bits."""
    args = ["--deterministic", "--no-compile", "--lr_decay_iters=20"]
    job.train("whole", *args)
    job.train("parts", *args, "--max_iters=9")
    job.train("parts", *args)

    def digest(name):
        state = torch.load(job.folder / name / "ckpt.pt", weights_only=True)["model"]
        h = hashlib.sha256()
        for key in sorted(state):
            h.update(state[key].contiguous().view(torch.uint8).numpy().tobytes())
        return h.hexdigest()
    return "the same bits" if digest("whole") == digest("parts") else "DIFFERENT"


def float16(job):
    """float16 with its loss scale, and how long a save holds training up."""
    text, steps, _ = job.train("float16", "--dtype=float16", "--no-compile", "--save_interval=5")
    held = re.search(r"held it up for ([\d.]+) s(; \d+ float16 steps skipped)?", text)
    return f"loss {steps[0]['loss']:.3f} to {steps[-1]['loss']:.3f}; {held[0]}"


def not_finite(job):
    """A NaN in step 12: the run stops before the update, the checkpoint before it is finite."""
    try:
        job.train("nan", "--no-compile", "--save_interval=5", "--optimizer=muon",
                  "--muon_lr=1e30", "--learning_rate=100", "--grad_clip=0")
    except RuntimeError as error:
        if "not finite" not in str(error):
            raise
        state = torch.load(job.folder / "nan" / "ckpt.pt", weights_only=True)["model"] if (
            job.folder / "nan" / "ckpt.pt").exists() else {}
        finite = all(torch.isfinite(t).all() for t in state.values())
        return f"stopped, exit 1; the last checkpoint is {'finite' if finite else 'NOT FINITE'}"
    return "the losses stayed finite: nothing to see"


def sampling(job):
    file = job.folder / "sample.json"
    tiny = [] if job.large else ["--tiny"]
    job.command(["-m", "train.bench", "sample", f"--out={file}", *tiny])
    row = json.loads(file.read_text())["rows"][0]["results"]
    return "; ".join(f"{name}: {r['median']:,.0f} tokens/s, {r['of_bound']:.0%} of the bound of "
                     "reading the weights" for name, r in row.items())


def wrappers(job):
    """DDP and FSDP over all GPUs of this machine (gloo on a CPU, two processes)."""
    n = torch.cuda.device_count() if job.large else 2
    if n < 2:
        return "not measured: one GPU"
    found = []
    for kind in ("ddp", "fsdp"):
        shutil.rmtree(job.folder / kind, ignore_errors=True)
        size = GPT2 if job.large else TINY
        text = job.command(["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}",
                            "run_train.py", *size, f"--data_dir={job.folder / 'data'}",
                            f"--out_dir={job.folder / kind}", "--max_iters=5", "--eval_interval=0",
                            "--log_interval=1", f"--distributed={kind}", "--warmup_iters=2"])
        found.append(f"{kind}: {re.findall(r'iter 4: loss ([0-9.]+)', text)[0]}")
    return f"loss after 5 steps on {n} ranks: {', '.join(found)}"


ITEMS = {"graphs": graphs, "throughput": throughput, "losses": losses, "not finite": not_finite,
         "resumed": resumed, "float16": float16, "sampling": sampling, "wrappers": wrappers}
