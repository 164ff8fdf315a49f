"""Checks and measurements that need a GPU, the most important first: python -m tests.gpu.programme
[--peer PATH]

Each item runs in separate processes with a time limit, so that an item that fails or hangs does not
prevent the others. The result of each is printed (and with --out written) at once, a line of JSON,
and a Markdown table at the end. On a machine without a GPU the same items run on a tiny model,
which checks that they work. Items run run_train.py, tests.bench and the commands of parts.py.
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
    """Run the items o.items until o.minutes are over; print the results. o: the command's options.
    Return the exit code."""
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
    """Run an item, item(job); return a dict: "result", a text (of a generator, all texts that it
    yielded), "seconds" and, if it failed, "failed". A timeout is no failure if it is that of the
    whole programme, at `end`."""
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
    """The argument of all items: a folder with synthetic data, the size of the model (large:
    GPT-2), the path of nanoGPT, and methods that run processes until the time `end`."""

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
        """Run python with `args`; return the output. Raises RuntimeError if the exit code is not
        `code`, subprocess.TimeoutExpired at self.end, after killing the process and its
        children."""
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
        """Run 20 training steps in the folder `name`. Return (output, the lines of metrics.jsonl
        with a training loss, the folder). args: further options of run_train.py; program: the
        command; options: of command()."""
        out = self.folder / name
        text = self.command([*program, *(GPT2 if self.large else TINY),
                             f"--data_dir={self.folder / 'data'}", f"--out_dir={out}",
                             "--max_iters=20", "--eval_interval=10", "--eval_iters=4",
                             "--log_interval=1", "--sample_tokens=0", "--warmup_iters=5",
                             *args], **options)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return text, [line for line in lines if "loss" in line], out

    def bench(self, row, *args, env=None):
        """Run a row of tests.bench with `args`; return {side: numbers}."""
        file = self.folder / "row.json"
        tiny = [] if self.large else ["--tiny", "--repeats=1", "--no-compile"]
        self.command(["-m", "tests.bench", row, f"--out={file}", *args, *tiny], env)
        return json.loads(file.read_text())["rows"][0]["results"]

    def part(self, name):
        """Run the measurement `name` of parts.py; return the result, a list, that it prints as
        JSON."""
        tiny = [] if self.large else ["--tiny", "--no-compile"]
        lines = self.command([*part(name), *tiny]).splitlines()
        found = [line for line in lines if line.startswith("[[")]
        if not found:
            raise RuntimeError(f"{name} printed no result: {lines[-3:]}")
        return json.loads(found[-1])


def part(name):
    """Return the arguments of python that run the command `name` of parts.py."""
    return ["-m", "tests.gpu.parts", name]


# -----------------------------------------------------------------------------
# the items

def graphs(job):
    """Item: count the symbolic sizes, recompilations and graph breaks of a compiled run, whose last
    validation batch is smaller. Returns a text, as all items do (or yields several)."""
    text, steps, _ = job.train("graphs", "--compile",
                               env={"TORCH_LOGS": "recompiles,graph_breaks,dynamic"})
    found = {what: len(re.findall(pattern, text)) for what, pattern in (
        ("symbolic sizes", "create_symbol"), ("recompilations", "Recompiling function"),
        ("graph breaks", "Graph break"))}
    return ", ".join(f"{n} {what}" for what, n in found.items()) + f" in {len(steps)} steps"


def waits(job):
    """Item: check that steps 6 to 9 synchronise with the GPU only for the one read per step."""
    text, steps, _ = job.train("waits", job.compile, program=part("watch_for_waits"))
    reads = int(re.search(r"^waits: (\d+) reads", text, re.MULTILINE)[1])
    if reads != len(steps):
        raise RuntimeError(f"{reads} reads in {len(steps)} steps: the window is another one")
    return f"{reads} reads in as many steps, no other wait in steps 6 to 9"


def throughput(job, batch=32):
    """Item: training tokens/s of ours and, with a path of nanoGPT, of the peer, in turn."""
    row = job.bench("throughput", f"--batch={batch if job.large else 2}", "--repeats=2",
                    *(["--peer", job.peer] if job.peer else []))
    return "; ".join(f"{name}: {r['median']:,.0f} tokens/s, {r['of_bound']:.0%} of the matmul peak"
                     for name, r in row.items())


def settings(job):
    """Item: compiled training tokens/s with other kernels: without cuDNN's attention, and with
    Inductor's coordinate descent tuning."""
    for name, env in (("as it is", {}), ("no cuDNN", {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}),
                      ("coordinate descent", {"TORCHINDUCTOR_COORDINATE_DESCENT_TUNING": "1"})):
        row = job.bench("throughput", f"--batch={32 if job.large else 2}", "--repeats=1", env=env)
        yield f"{name}: {max(r['median'] for r in row.values()):,.0f} tokens/s"


def steps(job):
    """Item: the tokens/s, MFU and memory that run_train.py reports for config_gpt2.yaml, on one GPU
    and on all."""
    own = ["--gradient_accumulation_steps=15"] if job.large else []
    for n in sorted({1, torch.cuda.device_count() if job.large else 2}):
        _, lines, _ = job.train(f"steps{n}", "--max_iters=60", "--eval_interval=0", job.compile,
                                *own, program=torchrun(n, "run_train.py"))
        rates, last = [s["tokens_per_sec"] for s in lines[10:]], lines[-1]
        used = f", {last['mfu']:.0%} MFU" if last["mfu"] else ""
        yield (f"on {n}: {statistics.median(rates):,.0f} tokens/s{used}, "
               f"{last['memory_mib']:,} MiB")


def torchrun(n, *program):
    """Return the arguments of python that run `program` on n ranks with torchrun."""
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}", *program]


def profiled(job):
    """Item: the kernels with the largest shares of the time of three compiled training steps."""
    return ", ".join(f"{name[:60]} {share:.1%}" for name, share in job.part("profile"))


def losses(job):
    """Item: the losses of the same steps in float32, compiled and eager, and the largest difference
    from float32."""
    n, first = 60 if job.large else 20, None
    for name, args in (("float32", ["--no-compile", "--dtype=float32"]),
                       ("compiled", ["--compile"]), ("eager", ["--no-compile"])):
        x = [s["loss"] for s in job.train(f"loss_{name}", f"--max_iters={n}", *args)[1]]
        first = first or x
        yield (f"{name} {x[-1]:.4f} after {n} steps, at most "
               f"{max(abs(a - b) for a, b in zip(x, first)):.4f} from float32")


def not_finite(job):
    """Item: check that after a NaN gradient in step 12 the run stops before the update, and the
    last checkpoint, of step 10, is finite."""
    from train.checkpoint import load_checkpoint
    for optimizer in ("adamw", "muon"):
        text, _, out = job.train(f"nan_{optimizer}", "--no-compile", f"--optimizer={optimizer}",
                                 program=part("spoil_step_12"), code=1)
        step = load_checkpoint(str(out / "ckpt.pt"))["iter_num"]  # which checks that it is finite
        if "iter 12: not finite" not in text or step != 10:
            raise RuntimeError(f"{optimizer}: checkpoint of {step}: {text}")
    return "AdamW and Muon: exit 1, the checkpoint of step 10 is finite"


def resumed(job, how="--no-compile"):
    """Item: check that a deterministic run that is killed in step 15 and resumed, with empty caches
    of compiled code, ends with the same bits as an uninterrupted run. how: the option for
    compilation."""
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
    """Item: the losses of a float16 run (with loss scaling), and the time that four saves interrupt
    it."""
    text, steps, _ = job.train("float16", "--dtype=float16", "--no-compile", "--save_interval=5",
                               "--eval_interval=0")
    held = re.search(r"[\d.]+ s spent in evaluations and checkpoints(; \d+ float16 steps skipped)?",
                     text)[0]
    return f"loss {steps[0]['loss']:.3f} to {steps[-1]['loss']:.3f}; four saves took {held}"


def sampling(job):
    """Item: tokens/s of generating one text when the context is full."""
    return "; ".join(f"{name}: {r['median']:,.0f} tokens/s, {r['of_bound']:.0%} of the bound of "
                     "reading the weights" for name, r in job.bench("sample").items())


def growing(job):
    """Item: tokens/s of generating one text while the context grows, the first and the second time
    (a kernel that plans again for every length is slow the first time)."""
    return "tokens/s at first and again: " + ", ".join(
        f"to {n} {first:,.0f} and {again:,.0f}" for n, first, again in job.part("growing"))


def wrappers(job):
    """Item: the losses of compiled runs with DDP and FSDP2, on one rank and on all GPUs (on a CPU:
    two processes), to compare with those of a run without them."""
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
    """Run the command line `argv` (default: sys.argv). Return the exit code: 1 if an item
    failed."""
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
