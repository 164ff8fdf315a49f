"""Estimate the time of a training step of GPT-2 124M on a GPU: python -m tests.gpu.forecast
[H100|A100]

An estimate without a GPU, not a measurement: kernel launches, bytes and FLOPs are counted in the
code that the compiler generates for the GPU (proofs.py), and divided by the share of the published
peaks that such GPUs reach. tests/gpu/programme.py measures on a GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.gpu import fake_cuda

HERE = Path(__file__).resolve().parent
TOKENS, MICRO_BATCHES, PARAMETERS = 32 * 1024, 15, 124_475_904  # of config_gpt2.yaml
# Peaks of the data sheets: FLOP/s in bfloat16, bytes/s of memory; and the shares of them that large
# matrix products, attention of heads of 64 (its causal half counted) and fused kernels reach.
GPUS = {"H100": (989e12, 3.35e12, dict(products=0.59, attention=0.27, memory=0.9)),
        "A100": (312e12, 2.04e12, dict(products=0.75, attention=0.35, memory=0.9))}
LAUNCH = 2e-6  # seconds between two kernels
LOST = 0.12    # of the time: tails of kernels, clocks below those of the data sheet
UPDATE = 40    # bytes a parameter: AdamW reads and writes three tensors and a gradient, clipping it


def of_layers(n, one, two):
    """Return {name: number} of a step of a model of n layers, extrapolated from those of 1 and of 2
    layers, `one` and `two`."""
    return {k: v + (n - 1) * (two[k] - v) for k, v in one.items()}


def forecast(found, gpu):
    """Return {part: seconds} of a micro-batch, including its share of the optimizer step. found:
    {name: number}, the answer of proofs.step(); gpu: a name in GPUS."""
    flops, memory, reached = GPUS[gpu]
    parts = {
        "matrix products": (found["flops"] - found["attention"]) / (flops * reached["products"]),
        "attention": found["attention"] / 2 / (flops * reached["attention"]),
        "fused kernels": found["fused"] / (memory * reached["memory"]),
        "launches": (found["triton"] + found["library"]) * LAUNCH,
        "update": PARAMETERS * UPDATE / (memory * reached["memory"]) / MICRO_BATCHES}
    return parts | {"lost": sum(parts.values()) * LOST / (1 - LOST)}


def ask(gpu, *questions):
    """Run proofs.py for `questions` about the GPU `gpu`. Return the list of answers. Exits with the
    first error, if any."""
    with tempfile.TemporaryDirectory() as folder:
        fake_cuda.build(folder)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", HERE / "proofs.py", folder, gpu, *questions],
            check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder})
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    if errors := [error for _, _, error in answers if error]:
        sys.exit(errors[0])
    return [answer for _, answer, _ in answers]


def main(argv=None):
    p = argparse.ArgumentParser("python -m tests.gpu.forecast", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("gpu", nargs="?", choices=GPUS, default="H100", help="default: H100")
    gpu = p.parse_args(argv).gpu
    if why := fake_cuda.missing():
        sys.exit(f"forecast: {why}")
    found = of_layers(12, *ask(gpu, "step gpt2 1", "step gpt2 2"))
    parts = forecast(found, gpu)
    total = sum(parts.values())
    print(f"A forecast, not measured: GPT-2 124M, {TOKENS:,} tokens a micro-batch, one {gpu}:\n"
          f"{TOKENS / total:,.0f} tokens/s, {found['flops'] / total / GPUS[gpu][0]:.0%} of peak\n"
          f"{found['triton'] + found['library']} launches, {found['bytes'] / 1e9:.1f} GB moved "
          f"({found['fused'] / 1e9:.1f} in fused kernels), {found['flops'] / 1e12:.1f} TFLOP")
    for part, seconds in parts.items():
        print(f"{1e3 * seconds:8.1f} ms  {part}")


if __name__ == "__main__":
    main()
