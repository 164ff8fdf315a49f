"""torch.compile: whether to use it, for which modules, and the fallback if it fails."""

import contextlib
import math

import torch
import torch.nn as nn

from train.distributed import blocks
from train.robust import is_compile_error

MIN_RUN_SECONDS = 600  # ten times the duration of compiling
CPU_FLOPS = 2e11  # per second, a modest estimate
GPU_FLOPS = 1e14
ON_OFF = {True: "on (the first step takes a while)", False: "off"}


def should_compile(config, flops_per_step, ranks):
    """Return whether to compile. `compile: auto` compiles if the run is estimated to take at least
    ten times as long as compiling."""
    if config.compile != "auto":
        return config.compile == "true"
    if config.max_minutes:
        return 60 * config.max_minutes > MIN_RUN_SECONDS
    flops_per_second = {"cpu": CPU_FLOPS, "cuda": GPU_FLOPS * ranks.world_size}.get(
        ranks.device.type, math.inf)
    return flops_per_step * config.max_iters / flops_per_second > MIN_RUN_SECONDS


def compile_model(model, device):
    """Apply torch.compile in place: no wrapper, and the names in state_dict do not change.

    Compiled per block on a CPU, where all blocks share the code of the first, which is much faster
    than compiling the entire model; and with FSDP, where hooks around the blocks would break the
    graph before each block and leave the blocks uncompiled.
    """
    import torch._functorch.config as aot
    # In the forward pass, where Compiler can fall back to eager mode; by default it is lazy.
    aot.force_non_lazy_backward_lowering = True
    if device.type == "cpu":  # dropout with PyTorch's generator; the compiler's is slower
        torch._inductor.config.fallback_random = True
    parts = [model]
    sharded = any(hasattr(p, "full_tensor") for p in model.parameters())
    if device.type == "cpu" or sharded:
        parts = blocks(model) or parts
        if device.type != "cpu" and isinstance(getattr(model, "loss", None), nn.Module):
            parts.append(model.loss)  # on a CPU the loss is computed in chunks, without gain
    for part in parts:
        # Static shapes: with several ranks validation batches are larger than training batches,
        # which would make the sizes symbolic.
        part.compile(dynamic=False)


class Compiler:
    """Calls a model's compiled code. If compiling fails, the run continues in eager mode, with one
    warning.

    batch_size: samples per evaluation batch. A smaller last batch is computed in eager mode, since
    compiling for this size would be slower.
    """

    def __init__(self, model, enabled, device, warn, batch_size=0):
        self.model = model
        self.enabled = enabled
        self.device = device
        self.warn = warn
        self.batch_size = batch_size
        if enabled:
            compile_model(model, device)

    def call(self, module, *batch):
        """Return module(*batch). module: the model or the DDP wrapper."""
        partial = not module.training and len(batch[0]) < self.batch_size
        try:
            with self.eager() if self.enabled and partial else contextlib.nullcontext():
                return module(*batch)
        except Exception as error:
            if not self.enabled or not is_compile_error(error):
                raise
            reason = str(error).strip().split("\n")[0][:200]
            self.warn(f"torch.compile failed; continuing without it (--no-compile): {reason}")
            self.enabled = False
            for part in self.model.modules():
                part._compiled_call_impl = None
            return module(*batch)

    def paused(self, when=True):
        """Context of eager mode on a CPU, if `when`: for code that runs too rarely to compile."""
        if self.enabled and self.device.type == "cpu" and when:
            return self.eager()
        return contextlib.nullcontext()

    def eager(self):
        return torch.compiler.set_stance("force_eager")
