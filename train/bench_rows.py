"""The rows of train/bench.py: each a function of its options that returns lines of the table."""

import collections
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from model.gpt import GPT, GPTConfig
from model.sample import generate
from train import bench_peer, resume
from train.config import load_config
from train.dataloader import DataLoader
from train.distributed import choose_dtype, process_group
from train.optimizer import configure_optimizers

REPO = Path(__file__).resolve().parent.parent
AS_GPT2 = dict(norm="layer", pos="learned", mlp="gelu")  # the peer's architecture


# -----------------------------------------------------------------------------
# measuring

def alternate(sides, repeats):
    """Call the functions {name: f() -> number} in turn, 1 + repeats times, the first being warm-up.
    {name: dict(median, least, most, warm_up, values)}; a side that returns None is left out."""
    values = {name: [] for name in sides}
    for _ in range(1 + repeats):
        for name, f in sides.items():
            values[name].append(f())
    return {name: summary(v) for name, v in values.items() if None not in v}


def summary(values):
    rest = values[1:] or values
    return dict(median=statistics.median(rest), least=min(rest), most=max(rest), warm_up=values[0],
                values=rest)


def timed(f, device=None):
    """Seconds that f() takes, until the device is done."""
    started = time.perf_counter()
    f()
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def row(work, unit, results):
    """One line of the table: the first of our sides, the first of the peer's, all of them below."""
    return dict(work=work, unit=unit, results=results)


def our_model(o, **changes):
    model = GPT(GPTConfig(**o.shape | changes)).to(o.device)
    return model, configure_optimizers(model, 0.1, 6e-4, (0.9, 0.95), log=lambda text: None)


# -----------------------------------------------------------------------------
# throughput: training tokens a second

def training(o, model, optimizer, dtype, compiled, loss_at):
    """f() -> tokens/s of a few optimizer steps on random tokens, the same for every side."""
    tokens = torch.Generator().manual_seed(0)
    call = torch.compile(model) if compiled else model
    losses = []

    def step():
        shape = (o.batch, o.shape["block_size"] + 1)
        row = torch.randint(o.shape["vocab_size"], shape, generator=tokens).to(o.device)
        with torch.autocast(o.device.type, dtype, enabled=dtype != torch.float32):
            out = call(row[:, :-1].contiguous(), row[:, 1:].contiguous())
        loss = next(t for t in out if isinstance(t, torch.Tensor) and t.dim() == 0)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())

    def repeat():
        model.train()
        seconds = timed(lambda: [step() for _ in range(o.steps)], o.device)
        loss_at.update(first=float(losses[0]), last=float(losses[-1]), steps=len(losses))
        return o.steps * o.batch * o.shape["block_size"] / seconds
    return repeat


def throughput(o):
    low = choose_dtype("auto", o.device)[0]
    # nanoGPT's train.py autocasts on CUDA only: on a CPU it knows float32.
    theirs = torch.float32 if o.device.type == "cpu" else low
    sides, notes = {}, {}

    def add(name, pair, dtype, compiled):
        model, optimizer = pair
        n = sum(p.numel() for p in model.parameters())
        flops = (bench_peer.flops_per_token(model, o.shape) if name.startswith("peer")
                 else model.flops_per_token())
        notes[name] = dict(parameters=n, flops_per_token=flops, loss={})
        sides[name] = training(o, model, optimizer, dtype, compiled, notes[name]["loss"])
    short = str(low).removeprefix("torch.")
    for compiled in (False, True) if o.compile else (False,):
        how = "compiled" if compiled else "eager"
        add(f"ours, {short}, {how}", our_model(o), low, compiled)
        add(f"ours as GPT-2, {short}, {how}", our_model(o, **AS_GPT2), low, compiled)
        if o.peer:
            kind = str(theirs).removeprefix("torch.")
            add(f"peer, {kind}, {how}", bench_peer.build(o), theirs, compiled)
    results = alternate(sides, o.repeats)
    peak = max(o.machine["matmul_tflops"].values()) * 1e12
    for name, r in results.items():
        r.update(notes[name], of_matmul=r["median"] * notes[name]["flops_per_token"] / peak)
    s = o.shape
    return [row(f"training, {s['n_layer']} x {s['n_embd']}, vocabulary {s['vocab_size']:,}, T "
                f"{s['block_size']}, batch {o.batch}", "tokens/s", results)]


# -----------------------------------------------------------------------------
# time to loss: from process start to a validation loss

def watch(command, cwd, pattern, enough):
    """Run a process and read its output: [(seconds, match)] of the lines that match, until one is
    enough(match) or it ends. Raises RuntimeError with the end of its output where it fails."""
    started, seen, lines = time.perf_counter(), [], []
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(command, cwd=cwd, env=environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        for line in process.stdout:
            lines.append(line)
            if match := re.search(pattern, line):
                seen.append((time.perf_counter() - started, match))
                if enough(match):
                    process.kill()
                    return seen
    if process.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{''.join(lines[-20:])}")
    return seen


def time_to_loss(o):
    """Both recipes have a fixed number of steps; the clock stops at the first evaluation printed
    that is at or below the target. Ours evaluates at its start and its end only."""
    config = load_config(REPO / "train" / "config_shakespeare.yaml", o.overrides)
    data_dir, folder, tokens = REPO / config.data_dir, Path(tempfile.mkdtemp()), {}
    if not (data_dir / "meta.json").exists():
        sys.exit(f"{data_dir}: no data; make it with python -m data.prepare --dataset shakespeare "
                 "--tokenizer char")

    def run(name, command, cwd, tokens_per_step):
        def repeat():
            seen = watch(command, cwd, r"step (\d+): .*val loss ([\d.]+)",
                         lambda m: float(m[2]) <= o.target)
            seconds, match = seen[-1]
            tokens[name] = dict(tokens=int(match[1]) * tokens_per_step, val_loss=float(match[2]))
            return seconds if float(match[2]) <= o.target else None
        return repeat
    ours = [sys.executable, "run_train.py", "--config", "train/config_shakespeare.yaml", "--resume",
            "never", "--out_dir", str(folder / "out"), *o.overrides]
    sides = {"ours": run("ours", ours, REPO, config.tokens_per_step)}
    if o.peer:
        bench_peer.copy(o.peer, data_dir, folder)
        theirs = [sys.executable, "train.py", *bench_peer.CPU_RECIPE]
        sides["peer"] = run("peer", theirs, folder, 12 * 64)
    results = alternate(sides, o.repeats)
    for name in results:
        results[name].update(tokens[name])
    shutil.rmtree(folder)
    out = row(f"Shakespeare's characters, start to validation loss {o.target}", "s", results)
    out["missed"] = {name: t for name, t in tokens.items() if name not in results}
    return [out]


# -----------------------------------------------------------------------------
# sampling, loading, starting, guarding

def sample(o):
    """Tokens a second of one stream: from one token on, and with the context full."""
    dtype, T = choose_dtype("auto", o.device)[0], o.shape["block_size"]
    ours = our_model(o)[0].to(dtype).eval()
    theirs = bench_peer.build(o)[0].eval() if o.peer else None
    rows = []
    for name, start, n, n_peer in (("first tokens", 1, T // 2, T // 2),
                                   ("context full", T, T // 2, 4)):
        idx = torch.randint(o.shape["vocab_size"], (1, start), device=o.device)

        def speed(f, n, idx=idx):
            return lambda: n / timed(lambda: f(idx, n), o.device)
        sides = {f"ours, {str(dtype).removeprefix('torch.')}": speed(
            lambda idx, n: generate(ours, idx, n, top_k=200), n)}
        if theirs is not None:
            sides["peer, float32"] = speed(
                lambda idx, n: theirs.generate(idx, n, top_k=200), n_peer)
        rows.append(row(f"sampling, one stream, {name} ({start} to {start + n} tokens)", "tokens/s",
                        alternate(sides, o.repeats)))
    return rows


def loader(o):
    """Tokens a second of batches on the CPU, from a file of random tokens, on one thread."""
    rows, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        n = 1 << (16 if o.tiny else 24)
        ids = np.random.default_rng(0).integers(0, 50_000, n, dtype=np.uint16)
        ids.tofile(f"{folder}/train.bin")
        for B, T in ((12, 64), (64, 1024)):
            calls = max(4, (1 << (14 if o.tiny else 22)) // (B * T))

            def speed(get, calls=calls, size=B * T):
                return lambda: calls * size / timed(lambda: [get() for _ in range(calls)])
            sides = {"ours": speed(DataLoader(folder, B, T).get_batch)}
            if o.peer:
                sides["peer"] = speed(bench_peer.get_batch(o.peer, folder, B, T))
            rows.append(row(f"batches of {B} x {T:,}, one core", "tokens/s",
                            alternate(sides, o.repeats)))
    torch.set_num_threads(threads)
    return rows


def startup(o):
    """Seconds of fresh processes: help, and until the quick run has made its first step."""
    quick = ["run_train.py", "--config", "train/config_quick.yaml", "--compile=false",
             "--max_iters=2", "--log_interval=1", "--eval_interval=0", "--resume=never",
             *o.overrides]

    def first_step():
        with tempfile.TemporaryDirectory() as folder:
            # "iter 1" is printed after the step of iter 0
            seen = watch([sys.executable, *quick, f"--out_dir={folder}/o"], REPO, "iter 1:",
                         lambda match: False)
        return seen[0][0]

    def process(*args):
        return lambda: timed(lambda: subprocess.run([sys.executable, *args], cwd=REPO, check=True,
                                                    stdout=subprocess.DEVNULL))
    return [row(work, "s", alternate({"ours": f}, o.repeats)) for work, f in (
        ("run_train.py --help", process("run_train.py", "--help")),
        ("import torch alone", process("-c", "import torch")),
        ("process start to the first optimizer step, quick config", first_step))]


def guards(o):
    """What guarding costs a step of the production model: the time of a whole run that is not spent
    computing, and the time that a save in the background takes from the steps beside it."""
    shape = [f"{k}={v}" for k, v in o.shape.items()]
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(REPO / "train" / "config.yaml", [
            *shape, f"batch_size={o.batch}", "gradient_accumulation_steps=1", "max_iters=12",
            "save_interval=6", "eval_interval=0", "step_timeout=600", "dtype=auto", "compile=false",
            "resume=never", f"out_dir={folder}/o", *o.overrides])
        runs = [guarded(config) for _ in range(1 + o.repeats)]
    results = {name: summary([1000 * run[i] for run in runs]) for i, name in enumerate((
        "ours, computing", "checks, watchdog, lock, log", "a save in the background / 100"))}
    step, *others = (r["median"] for r in results.values())
    for r, part in zip(list(results.values())[1:], others):
        r["of_step"] = part / step
    return [row("a step of the production model, guarded", "ms", results)]


def guarded(config):
    """Seconds of a run with everything on, for one step: computing, guarding, and a hundredth of
    what one save costs (its pause, and what its thread takes from the steps after it)."""
    from train.train import Trainer
    steps, half, work = config.max_iters, config.save_interval, collections.defaultdict(float)
    with process_group(config) as ranks, Trainer(config, ranks) as t:
        def clocked(f, key=lambda: t.progress.iter_num):
            def g(*args, **kwargs):
                at, started = key(), time.perf_counter()
                out = f(*args, **kwargs)
                work[at] += time.perf_counter() - started
                return out
            return g
        t.start()
        for owner, name in ((t, "forward_backward"), (t, "clip_gradients"), (t.scaler, "step"),
                            (t.optimizer, "zero_grad")):
            setattr(owner, name, clocked(getattr(owner, name)))
        t.finish, last = (clocked(f, lambda: "end") for f in (t.finish, resume.save_or_fail))
        with mock.patch.object(resume, "save_or_fail", last):
            total = timed(t.fit)
        step = statistics.median(work[i] for i in range(1, half))
        slowed = sum(work[i] for i in range(half, steps)) - (steps - half) * step
        return step, (total - sum(work.values()) - t.pause) / steps, (t.pause + slowed) / 100
