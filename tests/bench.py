"""Benchmark against nanoGPT, the peer:
python -m tests.bench [ROW...] [--peer PATH_TO_NANOGPT] [--out FILE.json]

Rows: throughput, time_to_loss, sample (all three by default); tests/gpu/programme.py has more for a
machine with a GPU. The peer, a checkout of nanoGPT, is not modified. Runs of the sides alternate
(ours, the peer's, ours, ...), so that a busy machine slows all of them. The first repeat of each is
warm-up, the others give the median. Each number is compared with the limit of this machine.
"""

import argparse
import concurrent.futures
import functools
import importlib.util
import json
import multiprocessing
import os
import pickle
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from model.core.generate import generate
from model.core.packed import replace_linear_layers
from model.gpt import GPT, GPTConfig
from train.base.cli import underscores
from train.base.memory import keep_freed_memory
from train.config import REPOSITORY, load_config
from train.device import choose_dtype, compile_model
from train.distributed import get_device
from train.optimizer import configure_optimizers
from train.tools.dry_run import timed
from train.train import clip_gradients

REPO = Path(REPOSITORY)
ROWS = ("throughput", "time_to_loss", "sample")
# The shape that is compared: the production model on a CPU, GPT-2 124M on a GPU.
SHAPES = {"cpu": dict(n_layer=16, n_head=6, n_embd=384, vocab_size=32000, block_size=512),
          "cuda": dict(n_layer=12, n_head=12, n_embd=768, vocab_size=50304, block_size=1024)}
BATCH = {"cpu": 4, "cuda": 32}
TINY = dict(n_layer=1, n_head=2, n_embd=32, vocab_size=320, block_size=32)
AS_GPT2 = dict(norm="layer", pos="learned", mlp="gelu_exact")  # the peer's architecture
# Shakespeare's characters: the commands of the peer's README, the validation losses that it states,
# and our configurations for these losses.
PEER_RECIPES = {
    "cpu": "config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 "
           "--log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 "
           "--n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0",
    "cuda": "config/train_shakespeare_char.py"}
TARGETS = {"cpu": 1.8857, "cuda": 1.4697}
RECIPES = {"cpu": "train/configs/shakespeare.yaml", "cuda": "train/configs/shakespeare_long.yaml"}


# -----------------------------------------------------------------------------
# measuring

def forward_backward(forward, batch, device, dtype):
    """Compute the loss and the gradients of a micro-batch, as train_step does. forward(*batch)
    returns (loss, sums); dtype: of autocast, not used for float32."""
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        loss, _ = forward(*batch)
    loss.backward()


def alternate(sides, repeats):
    """Call the functions `sides` {name: f() -> number} in turn, 1 + repeats times, the first time
    as warm-up. Return {name: dict(median, least, most)} of the numbers; a side that returned None
    is left out."""
    values = {name: [] for name in sides}
    for _ in range(1 + repeats):
        for name, f in sides.items():
            values[name].append(f())
            torch.cuda.empty_cache()  # what one side keeps, another may need
    rest = {name: v[1:] for name, v in values.items() if None not in v}
    return {name: dict(median=statistics.median(v), least=min(v), most=max(v))
            for name, v in rest.items()}


def machine(device, tiny):
    """Return a dict that describes this machine (CPU, GPU, cores, ...) and its measured limits:
    matmul_tflops, TFLOP/s of a matrix product in each precision (of random numbers: zeros would be
    faster), and read_gb_s, GB/s of reading memory. tiny: small sizes, for tests."""
    n, cells = (128, 1 << 20) if tiny else (8192, 1 << 28) if device.type == "cuda" else (
        2048, 1 << 26)
    peaks = {}
    for dtype in (torch.bfloat16, torch.float32):
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        best = min([timed(lambda a=a, b=b: a @ b, device) for _ in range(7)][2:])
        peaks[short(dtype)] = round(2 * n ** 3 / best / 1e12, 3)
    big = torch.zeros(cells, device=device)
    bandwidth = big.nbytes / min([timed(big.sum, device) for _ in range(7)][2:]) / 1e9
    cpu = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        cpu = re.search(r"model name\s*:\s*(.*)|$", Path("/proc/cpuinfo").read_text())[1] or cpu
    return dict(cpu=cpu, cores=os.cpu_count(), threads=torch.get_num_threads(),
                gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
                load=os.getloadavg()[0], simd=torch.backends.cpu.get_cpu_capability(),
                torch=torch.__version__, matmul_tflops=peaks, read_gb_s=round(bandwidth, 1))


def peer_model(o):
    """Return (model, optimizer) of the peer: a GPT of the shape o.shape, from the model.py of the
    checkout o.peer. o: the command's options."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(o.peer) / "model.py")
    nanogpt = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(nanogpt)
    torch.manual_seed(1337)
    model = nanogpt.GPT(nanogpt.GPTConfig(**o.shape, dropout=0.0, bias=False)).to(o.device)
    return model, model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), o.device.type)


def our_model(o, **changes):
    model = GPT(GPTConfig(**o.shape | changes)).to(o.device)
    return model, configure_optimizers(model, 0.1, 6e-4, (0.9, 0.95), log=lambda text: None)


def row(work, unit, results):
    """Return the result of a benchmark, a dict. results: {side: numbers}; "bound" of a side, the
    limit of this machine in `unit`, is replaced by "of_bound", the share of the limit that the
    median reaches."""
    for r in results.values():
        r["of_bound"] = r["median"] / r.pop("bound") if "bound" in r else None
    return dict(work=work, unit=unit, results=results)


# -----------------------------------------------------------------------------
# throughput: training tokens a second

def training(o, pair, dtype, compiled):
    """Return a function that trains for o.steps optimizer steps on random tokens, the same for
    every side, and returns tokens/s. pair: (model, optimizer); dtype: of autocast; compiled:
    compile the model."""
    (model, optimizer), T = pair, o.shape["block_size"]
    tokens = torch.Generator().manual_seed(0)
    batches = [torch.randint(o.shape["vocab_size"], (o.batch, T + 1), generator=tokens)
               .to(o.device) for _ in range(o.steps)]
    batches = [(b[:, :-1].contiguous(), b[:, 1:].contiguous()) for b in batches]
    if compiled:
        compile_model(model, o.device)

    def forward(x, y):  # nanoGPT returns (logits, loss), ours (loss, sums)
        loss, = (t for t in model(x, y) if isinstance(t, torch.Tensor) and t.dim() == 0)
        return loss, {}

    def steps():
        for batch in batches:
            forward_backward(forward, batch, o.device, dtype)
            clip_gradients(optimizer, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def repeat():
        model.train()
        return o.steps * o.batch * T / timed(steps, o.device)
    return repeat


class Apart:
    """Runs the training of the peer in a separate process, because ours changes settings of the
    process (how malloc keeps memory)."""
    sides = {}  # in that process

    def __init__(self, o):
        context = multiprocessing.get_context("spawn")
        self.o, self.pool = o, concurrent.futures.ProcessPoolExecutor(1, mp_context=context)

    def training(self, name, *args):
        """Build the peer's side `name` in that process. Return (a function that returns tokens/s of
        a repeat, FLOPs per token). args: dtype, compiled, as for the function training()."""
        flops = self.pool.submit(Apart.build, self.o, name, *args).result()
        return lambda: self.pool.submit(Apart.repeat, name).result(), flops

    @staticmethod
    def build(o, name, dtype, compiled):
        torch.set_num_threads(o.machine["threads"])
        pair = peer_model(o)
        Apart.sides[name] = training(o, pair, dtype, compiled)
        return flops_per_token(pair[0], o.shape)

    @staticmethod
    def repeat(name):
        return Apart.sides[name]()


def throughput(o):
    """Return the row of training throughput. Each side uses its default precision: nanoGPT's
    train.py uses autocast on CUDA only; "peer, bfloat16" on a CPU is nanoGPT with autocast
    added."""
    low = choose_dtype("auto", o.device)[0]
    by_itself = torch.float32 if o.device.type == "cpu" else low
    apart, sides, flops = Apart(o), {}, {}
    eager = o.device.type == "cpu" or not o.compile  # beside compiled sides a GPU has no room
    for compiled in [False] * eager + [True] * o.compile:
        how = "compiled" if compiled else "eager"
        for name, changes in (("ours", {}), ("ours as GPT-2", AS_GPT2)):
            pair, name = our_model(o, **changes), f"{name}, {short(low)}, {how}"
            sides[name] = training(o, pair, low, compiled)
            flops[name] = flops_per_token(pair[0], o.shape)
        for dtype in dict.fromkeys((by_itself, low)) if o.peer else ():
            name = f"peer, {short(dtype)}, {how}"
            sides[name], flops[name] = apart.training(name, dtype, compiled)
    results = alternate(sides, o.repeats)
    apart.pool.shutdown()
    peak = max(o.machine["matmul_tflops"].values()) * 1e12
    for name, r in results.items():
        r["bound"] = peak / flops[name]
    s = o.shape
    return row(f"training, {s['n_layer']} x {s['n_embd']}, vocabulary {s['vocab_size']:,}, T "
               f"{s['block_size']}, batch {o.batch}", "tokens/s", results)


def short(dtype):
    return str(dtype).removeprefix("torch.")


def flops_per_token(model, shape):
    """Return the training FLOPs per token of a GPT of either side: 6 per weight of a matrix
    product, plus those of attention. shape: n_layer, n_embd, block_size."""
    if hasattr(model, "flops_per_unit"):
        return model.flops_per_unit()
    n = sum(p.numel() for p in model.parameters()) - shape["block_size"] * shape["n_embd"]
    return 6 * n + 12 * shape["n_layer"] * shape["n_embd"] * shape["block_size"]


# -----------------------------------------------------------------------------
# time to loss: from process start to a validation loss

def seconds_to(target, command, cwd):
    """Run `command` in the folder `cwd` until it prints a validation loss of at most `target`.
    Return (seconds from its start, or None if it ended before; the step and the loss that were
    printed last). Raises RuntimeError if it fails."""
    started, lines, found = time.perf_counter(), [], (None, 0, float("inf"))
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(command, cwd=cwd, env=environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        for line in process.stdout:
            lines.append(line)
            if match := re.search(r"step (\d+): .*val loss ([\d.]+)", line):
                passed, loss = time.perf_counter() - started, float(match[2])
                found = passed if loss <= target else None, int(match[1]), loss
                if found[0]:
                    process.kill()
                    return found
    if process.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{''.join(lines[-20:])}")
    return found


def time_to_loss(o):
    """Return the row of the seconds from the start of the process to a validation loss. The recipes
    of both sides, which depend on the device, have a fixed number of steps; the time ends with the
    first printed evaluation at or below the target. Ours evaluates only at the start and the
    end."""
    kind = o.device.type
    config, target = load_config(RECIPES[kind], o.overrides), o.target or TARGETS[kind]
    data_dir, ended = REPO / config.data_dir, {}
    if not (data_dir / "meta.json").exists():
        sys.exit(f"{data_dir}: no data; make it with python -m data.prepare --dataset shakespeare "
                 "--tokenizer char")
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        commands = {"ours": ([sys.executable, "run_train.py", "--config",
                              RECIPES[kind], f"--device={kind}", "--resume", "never",
                              "--out_dir", str(folder / "out"), *o.overrides], REPO)}
        if o.peer:
            copy_peer(o.peer, data_dir, folder)
            commands["peer"] = [sys.executable, "train.py", *PEER_RECIPES[kind].split()], folder

        def run(name):
            seconds, step, loss = seconds_to(target, *commands[name])
            ended[name] = f"{step} steps, val loss {loss:.4f}"
            return seconds
        results = alternate({n: lambda n=n: run(n) for n in commands}, o.repeats)
    out = row(f"Shakespeare's characters, start to validation loss {target}", "s", results)
    for name, text in ended.items():
        results.get(name, {})["note"] = text
        if name not in results:
            out["missed"] = f"{name}: {text}"
    return out


def copy_peer(peer, data_dir, folder):
    """Copy the files of nanoGPT that it needs for training from the checkout `peer` to `folder`,
    unmodified, and our token files of data_dir as the dataset shakespeare_char."""
    shutil.copytree(Path(peer) / "config", folder / "config")
    for name in ("train.py", "model.py", "configurator.py"):
        shutil.copy(Path(peer) / name, folder)
    data = folder / "data" / "shakespeare_char"
    data.mkdir(parents=True)
    for split in ("train", "val"):
        shutil.copy(data_dir / f"{split}.bin", data)
    vocab_size = json.loads((data_dir / "meta.json").read_text())["vocab_size"]
    (data / "meta.pkl").write_bytes(pickle.dumps(dict(vocab_size=vocab_size)))


# -----------------------------------------------------------------------------
# sampling

def sample(o):
    """Return the row of sampling: tokens/s of one text when the context is full. The limit of the
    machine is that of reading the weights once per token."""
    dtype, T = choose_dtype("auto", o.device)[0], o.shape["block_size"]
    idx = torch.randint(o.shape["vocab_size"], (1, T), device=o.device)
    sides, bounds = {}, {}

    def add(name, bytes_read, f, n):
        sides[name] = lambda: n / timed(lambda: f(idx, n, top_k=200), o.device)
        bounds[name] = o.machine["read_gb_s"] * 1e9 / bytes_read
    n = sum(p.numel() for p in our_model(o)[0].parameters())
    low = short(dtype)
    kinds = [(low, replace_linear_layers, dtype.itemsize)]
    if o.compile:
        from model.sample.compiled import compile_decoder
        kinds.append((f"{low}, compiled", compile_decoder, dtype.itemsize))
    for kind, prepare, size in kinds:
        model = prepare(our_model(o)[0].to(dtype).eval())
        add(f"ours, {kind}", n * size, functools.partial(generate, model), T // 2)
    if o.peer:
        peer = peer_model(o)[0].eval()
        add("peer, float32", 4 * sum(p.numel() for p in peer.parameters()), peer.generate, 4)
    results = alternate(sides, o.repeats)
    for name, r in results.items():
        r["bound"] = bounds[name]
    return row(f"sampling, one stream, context of {T} full", "tokens/s", results)


# -----------------------------------------------------------------------------
# the table, the command line

def markdown(r):
    """Return the result `r` of row() as Markdown: one line per side, and the ratio of our best
    result to the peer's best."""
    lines = []
    for name, v in r["results"].items():
        bound = f"{v['of_bound']:.0%} of the bound" if v["of_bound"] else v.get("note", "")
        lines.append(f"| {r['work']} | {name} | {v['median']:,.4g} {r['unit']} "
                     f"({v['least']:,.4g} to {v['most']:,.4g}) | {bound} |")
    best = {who: [v["median"] for k, v in r["results"].items() if k.startswith(who)]
            for who in ("ours", "peer")}
    if best["ours"] and best["peer"]:
        x = (min(best["peer"]) / min(best["ours"]) if r["unit"] == "s"
             else max(best["ours"]) / max(best["peer"]))
        lines.append(f"| | **our best to the peer's best** | **{x:.2f} x** | |")
    if "missed" in r:
        lines.append(f"| | missed | {r['missed']} | |")
    return "\n".join(lines)


def parse_args(argv):
    p = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("rows", nargs="*", metavar="ROW", help=f"{', '.join(ROWS)} (default: all)")
    p.add_argument("--peer", help="a checkout of nanoGPT; without it only our side runs")
    p.add_argument("--repeats", type=int, default=3, help="besides the warm-up (default: 3)")
    p.add_argument("--steps", type=int, help="optimizer steps in a repeat (default: 4; 20 on CUDA)")
    p.add_argument("--batch", type=int, help="sequences in a step (default: 4; 32 on CUDA)")
    p.add_argument("--target", type=float,
                   help="validation loss (default: 1.8857; 1.4697 on CUDA)")
    p.add_argument("--device", default="auto", help="auto, cpu or cuda")
    p.add_argument("--no_compile", dest="compile", action="store_false", help="eager only")
    p.add_argument("--set", dest="overrides", nargs="*", default=[], metavar="key=value",
                   help="changes to our configuration in time_to_loss")
    p.add_argument("--tiny", action="store_true", help="seconds: does the command itself work?")
    p.add_argument("--out", help="write all numbers to this JSON file")
    o = p.parse_args(underscores(sys.argv[1:] if argv is None else argv))
    o.rows = o.rows or list(ROWS)
    if unknown := set(o.rows) - set(ROWS):
        p.error(f"unknown row: {', '.join(unknown)}; known: {', '.join(ROWS)}")
    if min(o.repeats, o.steps or 1, o.batch or 1) < 1:
        p.error("--repeats, --steps and --batch must be at least 1")
    if o.peer and not (Path(o.peer) / "train.py").exists():
        p.error(f"--peer {o.peer}: no train.py there; expected a checkout of nanoGPT")
    return o


def settle(o):
    """Set the options in `o` (the result of parse_args()) that depend on the device: device, shape,
    batch, steps. Return `o`."""
    o.device = get_device(o.device)
    o.shape = TINY if o.tiny else SHAPES[o.device.type]
    o.batch = o.batch or BATCH[o.device.type]
    o.steps = o.steps or (20 if o.device.type == "cuda" else 4)
    if o.device.type == "cpu":
        keep_freed_memory()  # as a run does
    return o


def main(argv=None):
    o = settle(parse_args(argv))
    o.machine = machine(o.device, o.tiny)
    print(f"Machine: {json.dumps(o.machine)}\n\n| work | side | median (least to most) | |\n"
          "|---|---|---|---|", flush=True)
    rows = []
    for name in o.rows:
        rows.append({"throughput": throughput, "time_to_loss": time_to_loss,
                     "sample": sample}[name](o))
        print(markdown(rows[-1]), flush=True)
        if o.out:
            Path(o.out).write_text(json.dumps(dict(machine=o.machine, rows=rows), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
