"""Benchmark against a checkout of nanoGPT:
python -m tests.bench [ROW...] [--peer PATH_TO_NANOGPT] [--out FILE.json]

Rows: throughput, time_to_loss, sample (all three by default); tests/gpu/programme.py has more for a
machine with a GPU. The peer runs unmodified. Repeats of the sides alternate (A B A B), so that a
busy machine slows all of them. The first repeat is warm-up, the others give the median. Each number
is compared with the limit of this machine.
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
    """The passes of a micro-batch, as in train_step."""
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        loss, _ = forward(*batch)
    loss.backward()


def alternate(sides, repeats):
    """Call the functions {name: f() -> number} in turn, 1 + repeats times, the first being warm-up.
    {name: dict(median, least, most)}; a side that returns None is left out."""
    values = {name: [] for name in sides}
    for _ in range(1 + repeats):
        for name, f in sides.items():
            values[name].append(f())
            torch.cuda.empty_cache()  # what one side keeps, another may need
    rest = {name: v[1:] for name, v in values.items() if None not in v}
    return {name: dict(median=statistics.median(v), least=min(v), most=max(v))
            for name, v in rest.items()}


def machine(device, tiny):
    """What the numbers were measured on, and its bounds: TFLOP/s of a matrix product (of random
    numbers: zeros would be faster) in each precision, GB/s of reading memory."""
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
    """The peer's model of the compared shape, from its own model.py, and its optimizer."""
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
    """A line of the table for each side; its `bound` is what the machine allows, in this unit."""
    for r in results.values():
        r["of_bound"] = r["median"] / r.pop("bound") if "bound" in r else None
    return dict(work=work, unit=unit, results=results)


# -----------------------------------------------------------------------------
# throughput: training tokens a second

def training(o, pair, dtype, compiled):
    """f() -> tokens/s of a few optimizer steps on random tokens, the same for every side."""
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
    """Training of the peer in a process of its own, without what our runs set for theirs (how
    malloc keeps memory)."""
    sides = {}  # in that process

    def __init__(self, o):
        context = multiprocessing.get_context("spawn")
        self.o, self.pool = o, concurrent.futures.ProcessPoolExecutor(1, mp_context=context)

    def training(self, name, *args):
        """(f() -> tokens/s, FLOPs of a token)."""
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
    """Each side in the precision that it chooses by itself: nanoGPT's train.py autocasts on CUDA
    only; `peer, bfloat16` on a CPU is it with autocast added by hand."""
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
    """One formula for both sides: 6 for each weight that multiplies, and attention's products."""
    if hasattr(model, "flops_per_unit"):
        return model.flops_per_unit()
    n = sum(p.numel() for p in model.parameters()) - shape["block_size"] * shape["n_embd"]
    return 6 * n + 12 * shape["n_layer"] * shape["n_embd"] * shape["block_size"]


# -----------------------------------------------------------------------------
# time to loss: from process start to a validation loss

def seconds_to(target, command, cwd):
    """(seconds until a printed val loss is at or below `target`, or None; the step, the loss)."""
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
    """Both recipes have a fixed number of steps; the clock stops at the first evaluation printed
    that is at or below the target. Ours evaluates at its start and its end only. Each device has
    its recipes."""
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
    """The peer's files, unmodified, beside our token files of the same characters."""
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
    """Tokens a second of one stream with the context full. The bound: reading the weights once for
    each token."""
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
    """The results of a row as Markdown lines, one a side, and the ratio of the best ones."""
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
    """The options `o` with what depends on the device."""
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
