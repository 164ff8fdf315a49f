"""How fast, side by side: python -m train.bench [ROW...] [--peer PATH_TO_NANOGPT] [--out FILE]

Rows: throughput, time_to_loss, sample, loader, startup, guards, or all. The peer runs unmodified
from your checkout of it. Repeats of the sides alternate (A B A B), so that a busy machine slows all
of them; medians count, with the least and the most beside them, and the first repeat is warm-up.
"""

import argparse
import json
import os
import platform
import re
import sys
from pathlib import Path

import torch

from train import bench_rows
from train.bench_rows import timed
from train.distributed import get_device, physical_cores

ROWS = ("throughput", "time_to_loss", "sample", "loader", "startup", "guards")
# The shape that is compared: the production model on a CPU, GPT-2 124M on a GPU.
SHAPES = {"cpu": dict(n_layer=16, n_head=6, n_embd=384, vocab_size=32000, block_size=512),
          "cuda": dict(n_layer=12, n_head=12, n_embd=768, vocab_size=50304, block_size=1024)}
BATCH = {"cpu": 4, "cuda": 12}
TINY = dict(n_layer=1, n_head=2, n_embd=32, vocab_size=320, block_size=32)


def matmul_peak(dtype, device, n):
    """TFLOP/s of an n x n x n product of random numbers: zeros would be faster."""
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    seconds = [timed(lambda: a @ b, device) for _ in range(7)][2:]
    return 2 * n ** 3 / min(seconds) / 1e12


def machine(device, tiny=False):
    """What the numbers were measured on, and its limit: the measured peak of a matrix product."""
    cpu = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        cpu = re.search(r"model name\s*:\s*(.*)|$", Path("/proc/cpuinfo").read_text())[1] or cpu
    n = 128 if tiny else 8192 if device.type == "cuda" else 2048
    peaks = {str(d).removeprefix("torch."): round(matmul_peak(d, device, n), 3)
             for d in (torch.bfloat16, torch.float32)}
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return dict(cpu=cpu, cores=physical_cores(), threads=torch.get_num_threads(), gpu=gpu,
                load=load, simd=torch.backends.cpu.get_cpu_capability(), torch=torch.__version__,
                python=platform.python_version(), matmul_tflops=peaks)


def ratio(r):
    """How many times better our best side is than the peer's best; None without both."""
    ours, peer = ([v["median"] for k, v in r["results"].items() if k.startswith(who)]
                  for who in ("ours", "peer"))
    if not ours or not peer:
        return None
    return min(peer) / min(ours) if r["unit"] == "s" else max(ours) / max(peer)


def number(x):
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def markdown(result):
    """The results as a Markdown table, one line a side."""
    lines = ["| work | side | median | least to most | warm-up | notes |",
             "|---|---|---|---|---|---|"]
    for r in result["rows"]:
        for name, v in r["results"].items():
            notes = ", ".join(describe(v))
            lines.append(f"| {r['work']} | {name} | {number(v['median'])} {r['unit']} | "
                         f"{number(v['least'])} to {number(v['most'])} | {number(v['warm_up'])} | "
                         f"{notes} |")
        lines += [f"| | missed: {who} | | | | {t['val_loss']:.4f} after {t['tokens']:,} tokens |"
                  for who, t in r.get("missed", {}).items()]
        if x := ratio(r):
            lines.append(f"| | **our best to the peer's best** | **{x:.2f} x** | | | |")
    return "\n".join(lines)


def describe(v):
    if "parameters" in v:
        loss = v["loss"]
        yield f"{v['parameters']:,} parameters"
        yield f"{v['flops_per_token']:,} FLOPs a token"
        yield f"{v['of_matmul']:.0%} of the matmul peak"
        yield f"loss {loss['first']:.4f} to {loss['last']:.4f} in {loss['steps']} steps"
    if "of_step" in v:
        yield f"{v['of_step']:.2%} of computing"
    if "tokens" in v:
        yield f"{v['tokens']:,} tokens, val loss {v['val_loss']:.4f}"


def parse_args(argv):
    p = argparse.ArgumentParser(prog="python -m train.bench", description=__doc__.split("\n")[0])
    p.add_argument("rows", nargs="*", metavar="ROW", help=f"{', '.join(ROWS)} or all (the default)")
    p.add_argument("--peer", help="a checkout of nanoGPT; without it only our side runs")
    p.add_argument("--repeats", type=int, default=3, help="besides the warm-up (default: 3)")
    p.add_argument("--steps", type=int, default=4, help="optimizer steps in a repeat (default: 4)")
    p.add_argument("--batch", type=int, help="sequences in a step (default: 4; 12 on CUDA)")
    p.add_argument("--target", type=float, default=1.8857, help="validation loss (default: 1.8857)")
    p.add_argument("--device", default="auto", help="auto, cpu or cuda, for throughput and sample")
    p.add_argument("--no-compile", dest="compile", action="store_false", help="eager only")
    p.add_argument("--set", dest="overrides", nargs="*", default=[], metavar="key=value",
                   help="changes to our configuration in time_to_loss, startup and guards")
    p.add_argument("--tiny", action="store_true", help="seconds: does the command itself work?")
    p.add_argument("--out", help="write all numbers to this JSON file")
    o = p.parse_args(argv)
    o.rows = ROWS if not o.rows or "all" in o.rows else o.rows
    if unknown := set(o.rows) - set(ROWS):
        p.error(f"unknown row: {', '.join(unknown)}; known: {', '.join(ROWS)}, all")
    if min(o.repeats, o.steps, o.batch or 1) < 1:
        p.error("--repeats, --steps and --batch must be at least 1")
    if o.peer and not (Path(o.peer) / "train.py").exists():
        p.error(f"--peer {o.peer}: no train.py there; expected a checkout of nanoGPT")
    return o


def main(argv=None):
    o = parse_args(argv)
    o.device = get_device(o.device)
    o.shape = TINY if o.tiny else SHAPES[o.device.type]
    o.batch = o.batch or BATCH[o.device.type]
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(physical_cores())
    o.machine = machine(o.device, o.tiny)
    print(f"Machine: {json.dumps(o.machine)}", flush=True)
    result = dict(machine=o.machine, repeats=o.repeats, rows=[])
    for name in o.rows:
        rows = getattr(bench_rows, name)(o)
        result["rows"] += rows
        print(markdown(dict(rows=rows)), end="\n\n", flush=True)
        if o.out:
            Path(o.out).write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
