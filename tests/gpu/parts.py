"""Commands that the items of programme.py run in separate processes: python -m tests.gpu.parts NAME
ARGS

They run run_train.py with checks or faults, or measure and print JSON.
"""

import dataclasses
import json
import os
import signal
import sys

import torch

from tests import bench

# -----------------------------------------------------------------------------
# run_train.py, changed from outside; argv is its own

def watch_for_waits(argv):
    """Run run_train.py with `argv`. Between the reads of the device in steps 5 and 9, every other
    synchronisation with the GPU is an error
    (https://docs.pytorch.org/docs/stable/generated/torch.cuda.set_sync_debug_mode.html)."""
    from run_train import main
    from train import train
    read, reads = train.unpack, []

    def mode(name):
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode(name)

    def watched(*args):
        mode("default")
        reads.append(read(*args))
        mode("error" if 5 < len(reads) < 10 else "default")
        return reads[-1]
    train.unpack = watched
    code = main(argv)
    print(f"waits: {len(reads)} reads")
    return code


def at_step(n, act):
    """Patch training so that act(optimizer) is called in step n (from 0), before gradients are
    clipped."""
    from train import train
    clip, calls = train.clip_gradients, []

    def clip_gradients(optimizer, *args):
        calls.append(optimizer)
        if len(calls) == n + 1:
            act(optimizer)
        return clip(optimizer, *args)
    train.clip_gradients = clip_gradients


def spoil_step_12(argv):
    """Run run_train.py with `argv`; in step 12, one gradient is set to NaN."""
    from run_train import main
    at_step(12, lambda optimizer: optimizer.param_groups[0]["params"][0].grad.fill_(torch.nan))
    return main(argv)


def die_in_step_15(argv):
    from run_train import main
    at_step(15, lambda optimizer: os.kill(os.getpid(), signal.SIGKILL))
    return main(argv)


def wrapped(argv):
    """Run run_train.py with `argv` under torchrun. A single rank, too, is wrapped in DDP or FSDP,
    as several ranks are."""
    from run_train import main
    from train import distributed, setup
    wrap = distributed.wrap_ddp
    distributed.wrap_ddp = lambda model, ranks: wrap(model, dataclasses.replace(ranks,
                                                                                world_size=2))
    setup.Run.sharded = property(lambda self: self.config.distributed == "fsdp",
                                     lambda self, value: None)
    return main(argv)


# -----------------------------------------------------------------------------
# measurements; argv is that of tests.bench

def profile(argv):
    """Print [[kernel or operation, its share of the time]] of three training steps as JSON, the 12
    longest first."""
    o = bench.settle(bench.parse_args(["throughput", "--steps=3", *argv]))
    dtype, _ = bench.choose_dtype("auto", o.device)
    steps = bench.training(o, bench.our_model(o), dtype, o.compile)
    steps()
    with torch.profiler.profile() as profiler:
        steps()
    cuda = o.device.type == "cuda"  # there the kernels, not also the operations they belong to
    time = "self_device_time_total" if cuda else "self_cpu_time_total"
    times = {e.key: getattr(e, time) for e in profiler.key_averages()
             if e.device_type.name == ("CUDA" if cuda else "CPU") and not e.is_user_annotation}
    longest = sorted(times, key=times.get, reverse=True)[:12]
    print(json.dumps([[name, times[name] / sum(times.values())] for name in longest]))
    return 0


def growing(argv):
    """Print [[length, tokens/s, tokens/s again]] as JSON: the speed of generating one text up to
    each length, from the length before, twice."""
    o = bench.settle(bench.parse_args(["sample", *argv]))
    dtype, _ = bench.choose_dtype("auto", o.device)
    model = bench.replace_linear_layers(bench.our_model(o)[0].to(dtype).eval())
    T, start = o.shape["block_size"], 1
    found, idx = [], torch.zeros(1, 1, dtype=torch.int64, device=o.device)
    bench.generate(model, idx, 3, top_k=200)  # what a device does once is not the point
    for end in (T // 4, T // 2, T):
        idx, n = torch.zeros(1, start, dtype=torch.int64, device=o.device), end - start
        seconds = [bench.timed(lambda idx=idx, n=n: bench.generate(model, idx, n, top_k=200),
                               o.device) for _ in range(2)]
        found.append([end, *(n / s for s in seconds)])
        start = end
    print(json.dumps(found))
    return 0


PARTS = dict(watch_for_waits=watch_for_waits, spoil_step_12=spoil_step_12, wrapped=wrapped,
             die_in_step_15=die_in_step_15, profile=profile, growing=growing)

if __name__ == "__main__":
    sys.exit(PARTS[sys.argv[1]](sys.argv[2:]))
