"""torch.compile: whether it pays, which modules, and what happens when it fails."""

import contextlib
import math

import torch
import torch.nn as nn

from train.distributed import blocks
from train.robust import is_compile_error

ON_OFF = {True: "on (the first step takes a while)", False: "off"}


def should_compile(config, flops_per_step, ranks):
    """Whether to compile. auto: where that (about a minute) is repaid, by a run of at least ten
    times its length at a modest speed of the device."""
    if config.compile != "auto":
        return config.compile == "true"
    if config.max_minutes:
        return 60 * config.max_minutes > 600
    speed = {"cpu": 2e11, "cuda": 1e14 * ranks.world_size}.get(ranks.device.type, math.inf)
    return flops_per_step * config.max_iters / speed > 600


def compile_model(model, device):
    """torch.compile, in place: no wrapper, and state_dict keeps its names.

    Block by block on a CPU, where they share the code of the first, which is ready many times
    sooner than the whole; and where FSDP has sharded the weights: its hooks around the blocks would
    end the graph before each, and leave them uncompiled.
    """
    import torch._functorch.config as aot
    # In the forward pass, where a compiler that fails can be left out; by itself it comes later.
    aot.force_non_lazy_backward_lowering = True
    if device.type == "cpu":  # dropout's draws by PyTorch's generator: the compiler's own is slower
        torch._inductor.config.fallback_random = True
    parts, sharded = [model], any(hasattr(p, "full_tensor") for p in model.parameters())
    if device.type == "cpu" or sharded:
        parts = blocks(model) or parts
        if device.type != "cpu" and isinstance(getattr(model, "loss", None), nn.Module):
            parts.append(model.loss)  # the chunks of a CPU gain nothing from it
    for part in parts:
        # Static: on several ranks validation has larger batches, which would make sizes symbolic.
        part.compile(dynamic=False)


class Compiler:
    """The compiled code of a model, while it works: where it fails, the run goes on without, after
    one warning. batch_size: samples in a batch of an evaluation, of which the last may have fewer:
    it computes without compiled code, as compiling for it would take longer."""

    def __init__(self, model, enabled, device, warn, batch_size=0):
        self.model, self.enabled, self.device, self.warn = model, enabled, device, warn
        self.batch_size = batch_size
        if enabled:
            compile_model(model, device)

    def call(self, module, *batch):
        """module(*batch), module being the model or what wraps it."""
        partial = not module.training and len(batch[0]) < self.batch_size
        try:
            with self.eager() if self.enabled and partial else contextlib.nullcontext():
                return module(*batch)
        except Exception as error:
            if not self.enabled or not is_compile_error(error):
                raise
            reason = str(error).strip().split("\n")[0][:200]
            self.warn(f"torch.compile failed; going on without it (--no-compile): {reason}")
            self.enabled = False
            for part in self.model.modules():
                part._compiled_call_impl = None
            return module(*batch)

    def paused(self, when=True):
        """Within, on a CPU: compute without compiled code, where compiling would cost more than it
        saves."""
        return self.eager() if self.enabled and self.device.type == "cpu" and when else (
            contextlib.nullcontext())

    def eager(self):
        return torch.compiler.set_stance("force_eager")
