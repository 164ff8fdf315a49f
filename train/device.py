"""The device of a process: selection, precision, peak FLOPs and MFU, torch.compile."""

import contextlib
import functools
import math
import os
import re
import sys
import time

import torch
import torch.nn as nn

from train.base.errors import SetupError, echo

MIN_RUN_SECONDS = 600  # ten times the duration of compiling
CPU_FLOPS = 2e11  # per second, a modest estimate
GPU_FLOPS = 1e14
eager_mode = functools.partial(torch.compiler.set_stance, "force_eager")
ON_OFF = {True: "on (the first step takes a while)", False: "off"}  # compile, for the log

# -----------------------------------------------------------------------------
# device and dtype

def get_device(name: str = "auto", local_rank: int = 0, local_world_size: int = 1, *,
               prefer_cuda: bool = True, device_id: int | None = None,
               report: bool = False) -> torch.device:
    """Return the torch.device for `name`; a CUDA device becomes torch's current device.

    name: cpu, mps, cuda, cuda:N (only with one rank per machine), or auto: cuda if available and
    `prefer_cuda`, then mps if there is one rank, then cpu.
    local_rank, local_world_size: index of this rank, and rank count, on the machine.
    device_id: index of the CUDA device, unless `name` has one (default: local_rank).
    report: print the device's properties.
    On CUDA under Linux, sets PYTORCH_ALLOC_CONF, unless it or PYTORCH_CUDA_ALLOC_CONF is set.
    SetupError if `name` is invalid, the device is missing, or there are fewer GPUs than ranks.
    """
    has_mps = torch.backends.mps.is_available()
    if name == "auto":
        name = ("cuda" if prefer_cuda and torch.cuda.is_available() else
                "mps" if has_mps and local_world_size == 1 else "cpu")
    if not re.fullmatch(r"cpu|mps|cuda" + (r"(:\d+)?" if local_world_size == 1 else ""), name):
        raise SetupError(f"device: {name!r} for {local_world_size} ranks: expected auto, cpu, mps, "
                         "cuda (see CUDA_VISIBLE_DEVICES), or cuda:N for one rank")
    kind, _, index = name.partition(":")
    index = int(index or (local_rank if device_id is None else device_id))
    needed = max(local_world_size, index + 1) if kind == "cuda" else 1
    available = dict(cpu=1, mps=int(has_mps), cuda=torch.cuda.device_count())[kind]
    if needed > available:
        raise SetupError(f"device: {kind}: {needed} GPUs are needed on this machine, torch "
                         f"{torch.__version__} sees {available}; see nvidia-smi, the torch build, "
                         "--nproc_per_node and CUDA_VISIBLE_DEVICES, or use --device cpu")
    device = torch.device(kind)
    if kind == "cuda":
        # Before the first allocation: expandable segments reduce fragmentation.
        if sys.platform == "linux" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
            os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        torch.cuda.set_device(index)
        device = torch.device(kind, index)
    if report:
        echo(f"Device: {describe_device(device)}")
    return device


def device_facts(device):
    """Return {name: value} about a torch.device, for the log, training_args.json and trackers."""
    facts = dict(device=str(device), bf16=has_native_bfloat16(device))
    if device.type != "cuda":
        return facts | dict(threads=torch.get_num_threads())
    p = torch.cuda.get_device_properties(device)
    return facts | dict(tf32=p.major >= 8, gpu=p.name, memory=f"{p.total_memory / 2**30:.0f} GiB",
                        capability=f"{p.major}.{p.minor}", cuda=torch.version.cuda)


def describe_device(device):
    """Return device_facts(device) as one line of text, for the log."""
    facts = device_facts(device)
    return ", ".join([facts.pop("device"), *(f"{name} {value}" for name, value in facts.items())])


def has_native_bfloat16(device):
    """Return whether a torch.device multiplies bfloat16 matrices in hardware.

    CUDA: from capability 8.0 on (older GPUs emulate it slowly). CPU: with AMX, AVX512-BF16 or ARM's
    BF16. Other devices, e.g. MPS: always true.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    if device.type == "cpu":
        probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported", "_is_arm_bf16_supported")
        return any(getattr(torch.cpu, p, bool)() for p in probes)
    return True


def choose_dtype(name, device):
    """Return (torch.dtype for the autocast of matrix products, description with the reason).

    name: "bfloat16", "float16", "float32", or "auto": bfloat16 if the device supports it natively,
    otherwise float16 on CUDA and float32 on other devices.
    """
    native = has_native_bfloat16(device)
    if name == "auto":
        name = "bfloat16" if native else "float16" if device.type == "cuda" else "float32"
        reason = f"{'' if native else 'no '}native bfloat16 on this device"
    elif name == "bfloat16" and not native or name == "float16" and device.type == "cpu":
        reason = "configured; emulated and slow on this device"
    else:
        reason = "configured"
    return getattr(torch, name), f"{name} ({reason})"


def timed(f, device):
    """Return the seconds until a torch.device (CUDA or a CPU) has finished the work of f()."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda device: None
    wait(device)
    start = time.perf_counter()
    f()
    wait(device)
    return time.perf_counter() - start


# -----------------------------------------------------------------------------
# FLOPs and MFU

# Dense peak TFLOP/s of 16-bit floats by the data sheets. TF32 has half of it on all GPUs with TF32.
PEAK_TFLOPS = {
    "GB300": 2500, "B300": 2250, "GB200": 2500, "B200": 2250, "GH200": 989, "H200 NVL": 835,
    "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H800": 989, "A100": 312,
    "A800": 312, "A40": 150, "A30": 165, "A10G": 70, "A10": 125, "L40S": 362, "L40": 181, "L4": 121,
    "T4": 65, "V100": 125, "P100": 21, "RTX 5090": 209, "RTX 4090": 165, "RTX 4080": 97,
    "RTX 3090": 71, "RTX 6000 Ada": 364}


def peak_flops(name):
    """Return the dense 16-bit peak FLOP/s of the GPU `name`, or 0 if it is unknown.

    name: as in torch.cuda.get_device_name(), compared by words: an RTX A4000 is not an A40.
    Variants, e.g. RTX 4090 Laptop, need an entry in PEAK_TFLOPS. Parts of a GPU (MIG) are unknown.
    """
    matches = [key for key in PEAK_TFLOPS
               if re.search(rf"\b{key}\b(?! (Laptop|Ti|SUPER|D|PCIe)\b|.* MIG )", name)]
    return PEAK_TFLOPS[max(matches, key=len)] * 1e12 if matches else 0


def total_peak_flops(ranks, dtype):
    """Return the peak FLOP/s of all ranks' GPUs for products of `dtype` matrices, or 0.

    0: unknown, not CUDA, or float32 without TF32. All ranks are assumed to have the same GPU. The
    result is the denominator of the MFU (PaLM, arXiv:2204.02311, appendix B).
    """
    if ranks.device.type != "cuda":
        return 0
    peak = ranks.world_size * peak_flops(torch.cuda.get_device_name(ranks.device))
    if dtype != torch.float32:
        return peak
    has_tf32 = torch.backends.cuda.matmul.allow_tf32 and has_native_bfloat16(ranks.device)
    return peak / 2 if has_tf32 else 0


# -----------------------------------------------------------------------------
# torch.compile: whether to use it, for which modules, and the fallback if it fails

def should_compile(config, flops_per_step, ranks):
    """Return whether to use torch.compile; "auto": if the run is estimated to be long enough.

    That is, longer than MIN_RUN_SECONDS. flops_per_step: of all ranks; 0: unknown. "auto" is then
    false, as on devices other than CUDA and CPU.
    """
    if config.compile != "auto":
        return config.compile == "true"
    flops_per_second = {"cpu": CPU_FLOPS, "cuda": GPU_FLOPS * ranks.world_size}.get(
        ranks.device.type, math.inf)
    return flops_per_step * config.max_iters / flops_per_second > MIN_RUN_SECONDS


def compile_model(model, device):
    """Apply torch.compile to a model's forward pass, in place; return the compiled modules.

    The names in state_dict() do not change. device: the torch.device on which the model is.
    On a CPU and with FSDP each block is compiled, if there are blocks: on a CPU all share the code
    of the first; with FSDP, hooks around the blocks otherwise leave them uncompiled. Global options
    of torch's compiler are changed, too.
    """
    import torch._functorch.config as aot
    # In the forward pass, where Compiler can fall back to eager mode; by default it is lazy.
    aot.force_non_lazy_backward_lowering = True
    if device.type == "cpu":  # dropout with PyTorch's generator; the compiler's is slower
        torch._inductor.config.fallback_random = True
    parts = [model]
    if device.type == "cpu" or any(hasattr(p, "full_tensor") for p in model.parameters()):  # FSDP
        parts = blocks(model) or parts
        if device.type != "cpu" and isinstance(getattr(model, "loss", None), nn.Module):
            parts.append(model.loss)  # on a CPU the loss is computed in chunks, without gain
    # Dynamo compiles a function for 8 shapes. A process may have runs of more shapes.
    torch._dynamo.config.recompile_limit += 8
    torch._dynamo.config.accumulated_recompile_limit += 8
    for part in parts:
        # Static shapes: with several ranks validation batches are larger than training batches,
        # which would make the sizes symbolic.
        part.compile(dynamic=False)
    return parts


class Compiler:
    """Compile a model, if enabled; call() runs it, in eager mode once compiling has failed.

    enabled: compile `model`, in place; also an attribute, which becomes False if compiling fails.
    warn(text): called once, if compiling fails. device: the torch.device of the model.
    batch_size: samples per evaluation batch; a smaller last batch is computed in eager mode, since
    compiling for this size is slower.
    """

    def __init__(self, model, enabled, device, warn, batch_size=0):
        self.model = model
        self.enabled = enabled
        self.device = device
        self.warn = warn
        self.batch_size = batch_size
        self.parts = compile_model(model, device) if enabled else []

    def reset(self):
        """Undo compile_model(): later calls of the model run in eager mode."""
        for part in self.parts:
            part._compiled_call_impl = None

    def call(self, module, *batch):
        """Return module(*batch), compiled if possible; module: the model, or DDP around it."""
        partial = not module.training and len(batch[0]) < self.batch_size
        try:
            with eager_mode() if self.enabled and partial else contextlib.nullcontext():
                return module(*batch)
        except Exception as error:
            if not self.enabled or not is_compile_error(error):
                raise
            reason = str(error).strip().split("\n")[0][:200]
            self.warn(f"torch.compile failed; continuing without it (--no-compile): {reason}")
            self.enabled = False
            self.parts = [*self.model.modules()]  # also what the caller has compiled
            self.reset()
            return module(*batch)

    def paused(self):
        """Return a context in which compiled code on a CPU runs in eager mode, for rare calls."""
        on_cpu = self.enabled and self.device.type == "cpu"
        return eager_mode() if on_cpu else contextlib.nullcontext()


def blocks(model):
    """Return the list of a model's blocks: the modules with the attribute is_block = True."""
    return [m for m in model.modules() if getattr(m, "is_block", False)]


def is_compile_error(error):
    """Return whether an exception's class is defined in torch._dynamo or torch._inductor."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
