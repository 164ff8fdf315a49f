"""What only a GPU can tell, in order of worth: python -m tests.gpu.programme [--peer PATH]

Each item runs in processes of its own and within minutes of its own, so that one that fails or
hangs costs only itself, and of itself only what is not done yet; its result is written as it comes,
a JSON line each, and a table for the README at the end. On a machine without a GPU the same items
run on a tiny model, to show that they run at all. What a person would not type is in parts.py.
"""

import argparse
import functools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from train.config import REPOSITORY

LEAST = 10.0  # seconds left, or an item is not begun
TINY = ["--n_layer=2", "--n_head=2", "--n_embd=32", "--n_hidden=64", "--vocab_size=256",
        "--block_size=32", "--batch_size=4", "--gradient_accumulation_steps=2"]
GPT2 = ["--config", "train/config_gpt2.yaml", "--batch_size=32", "--gradient_accumulation_steps=2"]


def programme(o):
    """Run every item until o.minutes are over; the exit code."""
    end, results = time.monotonic() + 60 * o.minutes, []
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), torch.cuda.is_available() and not o.tiny, o.peer)
        for name in o.items:
            item, minutes = ITEMS[name]
            job.end = min(end, time.monotonic() + 60 * minutes)
            if end - time.monotonic() < LEAST:
                results.append(dict(item=name, result="not measured: no time left"))
            else:
                results.append(dict(item=name) | outcome(item, job, end))
            print(json.dumps(results[-1]), flush=True)
            if o.out:
                with open(o.out, "a") as f:
                    f.write(json.dumps(results[-1]) + "\n")
    where = (torch.cuda.get_device_name() if job.large else
             "a tiny model: these are no measurements")
    print(f"\nOn {where}, PyTorch {torch.__version__}:\n\n| item | result |\n|---|---|")
    for r in results:
        print(f"| {r['item']} | {r['result']} |")
    return int(any(r.get("failed") for r in results))


def outcome(item, job, end):
    """What came of an item: its result, a text or one after the other, and how it failed, if so,
    before all is over at `end`."""
    started, found, failed = time.monotonic(), [], {}
    try:
        result = item(job)
        for text in [result] if isinstance(result, str) else result:
            found.append(text)
    except subprocess.TimeoutExpired:
        failed = dict(failed=True) if job.end < end else {}
        found.append("failed: timed out" if failed else "not measured: no time left")
    except Exception as error:
        failed = dict(failed=True)
        found.append(f"failed: {' '.join(str(error).split())[-300:]}")
    return dict(result="; ".join(found), seconds=round(time.monotonic() - started, 1)) | failed


class Job:
    """What the items share: a folder, the model's size, synthetic data, the time they may take."""

    def __init__(self, folder, large, peer):
        self.folder, self.large, self.peer, self.end = folder, large, peer, time.monotonic() + 600
        self.compile = "--compile" if large else "--no-compile"  # where it is not the point
        rng, data = np.random.default_rng(0), folder / "data"
        data.mkdir()
        T, vocabulary = (1024, 50257) if large else (32, 256)
        # Something to learn: few ids are frequent, and each stands twice. 45 windows of validation:
        # the last of the batches is a smaller one.
        for split, n in (("train", 20_000_000 if large else 40_000), ("val", 45 * T + 1)):
            ids = np.minimum(rng.zipf(1.3, n // 2 + 1), vocabulary - 1).astype(np.uint16)
            np.repeat(ids, 2)[:n].tofile(data / f"{split}.bin")

    def command(self, args, env=None, code=0):
        """The output of a process and its children; raises where it ends in another exit code, or
        does not end in time."""
        with subprocess.Popen([sys.executable, *map(str, args)], cwd=REPOSITORY, text=True,
                              env=os.environ | (env or {}), start_new_session=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            try:
                text, _ = process.communicate(timeout=max(1.0, self.end - time.monotonic()))
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        if process.returncode != code:
            raise RuntimeError(f"exit {process.returncode}, expected {code}: {text}")
        return text

    def train(self, name, *args, program=("run_train.py",), **options):
        """(output, lines of metrics.jsonl about steps, folder) of a run of 20 steps."""
        out = self.folder / name
        text = self.command([*program, *(GPT2 if self.large else TINY),
                             f"--data_dir={self.folder / 'data'}", f"--out_dir={out}",
                             "--max_iters=20", "--eval_interval=10", "--eval_iters=4",
                             "--log_interval=1", "--sample_tokens=0", "--warmup_iters=5",
                             *args], **options)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return text, [line for line in lines if "loss" in line], out

    def bench(self, row, *args, env=None):
        """{side: numbers} of a row of tests.bench."""
        file = self.folder / "row.json"
        tiny = [] if self.large else ["--tiny", "--repeats=1", "--no-compile"]
        self.command(["-m", "tests.bench", row, f"--out={file}", *args, *tiny], env)
        return json.loads(file.read_text())["rows"][0]["results"]

    def part(self, name):
        """What a part that measures prints, as JSON."""
        tiny = [] if self.large else ["--tiny", "--no-compile"]
        lines = self.command([*part(name), *tiny]).splitlines()
        found = [line for line in lines if line.startswith("[[")]
        if not found:
            raise RuntimeError(f"{name} printed no result: {lines[-3:]}")
        return json.loads(found[-1])


def part(name):
    """The command of one of parts.py."""
    return ["-m", "tests.gpu.parts", name]


# -----------------------------------------------------------------------------
# the items

def graphs(job):
    """Does a smaller last validation batch, or anything else, make sizes symbolic?"""
    text, steps, _ = job.train("graphs", "--compile",
                               env={"TORCH_LOGS": "recompiles,graph_breaks,dynamic"})
    found = {what: len(re.findall(pattern, text)) for what, pattern in (
        ("symbolic sizes", "create_symbol"), ("recompilations", "Recompiling function"),
        ("graph breaks", "Graph break"))}
    return ", ".join(f"{n} {what}" for what, n in found.items()) + f" in {len(steps)} steps"


def waits(job):
    """In steps 6 to 9 a wait for the device, but for the one read a step, is an error."""
    text, steps, _ = job.train("waits", job.compile, program=part("watch_for_waits"))
    reads = int(re.search(r"^waits: (\d+) reads", text, re.MULTILINE)[1])
    if reads != len(steps):
        raise RuntimeError(f"{reads} reads in {len(steps)} steps: the window is another one")
    return f"{reads} reads in as many steps, no other wait in steps 6 to 9"


def throughput(job, batch=32):
    """Tokens/s, ours and the peer's in turn."""
    row = job.bench("throughput", f"--batch={batch if job.large else 2}", "--repeats=2",
                    *(["--peer", job.peer] if job.peer else []))
    return "; ".join(f"{name}: {r['median']:,.0f} tokens/s, {r['of_bound']:.0%} of the matmul peak"
                     for name, r in row.items())


def settings(job):
    """Our compiled tokens/s with other kernels: flash attention for cuDNN's, Inductor's search."""
    for name, env in (("as it is", {}), ("no cuDNN", {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}),
                      ("coordinate descent", {"TORCHINDUCTOR_COORDINATE_DESCENT_TUNING": "1"})):
        row = job.bench("throughput", f"--batch={32 if job.large else 2}", "--repeats=1", env=env)
        yield f"{name}: {max(r['median'] for r in row.values()):,.0f} tokens/s"


def steps(job):
    """What run_train.py says of its own speed, on one GPU and on all: config_gpt2.yaml as it is."""
    own = ["--gradient_accumulation_steps=15"] if job.large else []
    for n in sorted({1, torch.cuda.device_count() if job.large else 2}):
        _, lines, _ = job.train(f"steps{n}", "--max_iters=60", "--eval_interval=0", job.compile,
                                *own, program=torchrun(n, "run_train.py"))
        rates, last = [s["tokens_per_sec"] for s in lines[10:]], lines[-1]
        used = f", {last['mfu']:.0%} MFU" if last["mfu"] else ""
        yield (f"on {n}: {statistics.median(rates):,.0f} tokens/s{used}, "
               f"{last['memory_mib']:,} MiB")


def torchrun(n, *program):
    """The program on so many ranks."""
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}", *program]


def profiled(job):
    """Where the time of three compiled steps goes."""
    return ", ".join(f"{name[:60]} {share:.1%}" for name, share in job.part("profile"))


def losses(job):
    """The same steps compiled, eager and in float32: how far apart are the losses?"""
    n, first = 60 if job.large else 20, None
    for name, args in (("float32", ["--no-compile", "--dtype=float32"]),
                       ("compiled", ["--compile"]), ("eager", ["--no-compile"])):
        x = [s["loss"] for s in job.train(f"loss_{name}", f"--max_iters={n}", *args)[1]]
        first = first or x
        yield (f"{name} {x[-1]:.4f} after {n} steps, at most "
               f"{max(abs(a - b) for a, b in zip(x, first)):.4f} from float32")


def not_finite(job):
    """A NaN in step 12: the run stops before the update, the checkpoint of step 10 is finite."""
    from train.checkpoint import load_checkpoint
    for optimizer in ("adamw", "muon"):
        text, _, out = job.train(f"nan_{optimizer}", "--no-compile", f"--optimizer={optimizer}",
                                 program=part("spoil_step_12"), code=1)
        step = load_checkpoint(str(out / "ckpt.pt"))["iter_num"]  # which checks that it is finite
        if "iter 12: not finite" not in text or step != 10:
            raise RuntimeError(f"{optimizer}: checkpoint of {step}: {text}")
    return "AdamW and Muon: exit 1, the checkpoint of step 10 is finite"


def resumed(job, how="--no-compile"):
    """Deterministic: killed in step 15, and resumed with nothing compiled that could be found."""
    args, states = ["--deterministic", "--save_interval=5", how], []
    cold = tempfile.mkdtemp(dir=job.folder)
    for name, program, code, env in (
            ("whole", ["run_train.py"], 0, {}),
            ("parts", part("die_in_step_15"), -signal.SIGKILL, {}),
            ("parts", ["run_train.py"], 0,
             {"TORCHINDUCTOR_CACHE_DIR": cold, "TRITON_CACHE_DIR": cold})):
        _, _, out = job.train(name + how, *args, program=program, code=code, env=env)
        states.append(torch.load(out / "ckpt.pt", weights_only=True)["model"])
    whole, _, parts = states
    if not all(torch.equal(whole[n], parts[n]) for n in whole):
        raise RuntimeError("the resumed run has other bits")
    return "the same bits"


def float16(job):
    """float16 with its loss scale, and how long four saves hold training up."""
    text, steps, _ = job.train("float16", "--dtype=float16", "--no-compile", "--save_interval=5",
                               "--eval_interval=0")
    held = re.search(r"[\d.]+ s spent in evaluations and checkpoints(; \d+ float16 steps skipped)?",
                     text)[0]
    return f"loss {steps[0]['loss']:.3f} to {steps[-1]['loss']:.3f}; four saves took {held}"


def sampling(job):
    """One stream with its context full."""
    return "; ".join(f"{name}: {r['median']:,.0f} tokens/s, {r['of_bound']:.0%} of the bound of "
                     "reading the weights" for name, r in job.bench("sample").items())


def growing(job):
    """One stream while its context grows, where each length is met for the first time (a kernel
    that plans anew for every length is slow then) and once more."""
    return "tokens/s at first and again: " + ", ".join(
        f"to {n} {first:,.0f} and {again:,.0f}" for n, first, again in job.part("growing"))


def wrappers(job):
    """DDP and FSDP2 around one rank, compiled and checkpointed, and over all GPUs (gloo and two
    processes on a CPU): the losses of the run without them?"""
    args = ["--max_iters=5", "--eval_interval=0", "--gradient_checkpointing=true",
            job.compile]
    yield f"after 5 steps: alone {job.train('alone', *args)[1][-1]['loss']:.4f}"
    for n in sorted({1, torch.cuda.device_count() if job.large else 2}):
        for kind in ("ddp", "fsdp"):
            _, steps, _ = job.train(f"{kind}{n}", f"--distributed={kind}", *args,
                                    program=torchrun(n, *part("wrapped")))
            yield f"{kind} on {n} {steps[-1]['loss']:.4f}"


ITEMS = {  # name: (what, the minutes it may take)
    "graphs": (graphs, 3), "waits": (waits, 2), "60 steps of config_gpt2": (steps, 6),
    "throughput, batch 32": (throughput, 5),
    "where time goes": (profiled, 2), "settings": (settings, 5),
    **{f"throughput, batch {n}": (functools.partial(throughput, batch=n), 4) for n in (48, 60, 12)},
    "losses": (losses, 5), "not finite": (not_finite, 3), "resumed": (resumed, 3),
    "float16": (float16, 2), "sampling": (sampling, 3), "sampling, growing": (growing, 2),
    "wrappers": (wrappers, 5),
    "resumed, compiled": (functools.partial(resumed, how="--compile"), 5)}


def main(argv=None):
    """Run the command line; the exit code."""
    p = argparse.ArgumentParser("python -m tests.gpu.programme", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--peer", help="a checkout of nanoGPT; without it only our side runs")
    p.add_argument("--minutes", type=float, default=25, help="when to stop (default: 25)")
    p.add_argument("--items", nargs="+", choices=ITEMS, default=list(ITEMS), metavar="ITEM",
                   help=f"only these (default: all): {', '.join(ITEMS)}")
    p.add_argument("--tiny", action="store_true", help="seconds: do the items themselves work?")
    p.add_argument("--out", help="write the results to this file as well, JSON lines")
    return programme(p.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
