"""What watches over a run: signals that ask it to stop, a limit on the time of a step, a compiler
that may fail, and numbers that go wrong."""

import collections
import contextlib
import faulthandler
import math
import os
import signal
import sys
import time

import torch

from train.distributed import LeaveTogether, max_over_ranks
from train.report import is_compile_error

MAX_OVERFLOWS_IN_A_ROW = 20  # float16: then it is not the loss scale that is wrong
MAX_REWINDS = 3
MAX_SPIKES_IN_A_ROW = 32


class BadNumbers(LeaveTogether):
    """Loss, gradients or weights are not finite; training has stopped before they did harm."""


class SaveFailed(LeaveTogether):
    """The last checkpoint could not be written: what was trained since the one before is lost."""


class Stopped(LeaveTogether):
    """A signal asked the run to end and it has saved; exit_code is 128 + the signal's number."""

    def __init__(self, signum):
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


class Signals:
    """SIGTERM, SIGINT and SIGHUP ask for a stop with a checkpoint, SIGUSR1 for a checkpoint only.

    The handler sets a flag and nothing else: the loop reads it between steps, when the state is
    whole. A second request to stop leaves at once, but not under torchrun: there one request
    arrives twice (Slurm signals torchrun and its ranks, torchrun its ranks), and torchrun kills a
    rank that takes too long. A signal that the process was started to ignore (nohup) stays ignored.
    """

    STOP = ("SIGTERM", "SIGINT", "SIGHUP")

    def __init__(self):
        self.stop = self.save = 0
        self.old = {}

    def __enter__(self):
        for name in (*self.STOP, "SIGUSR1"):
            with contextlib.suppress(ValueError, AttributeError):  # not the main thread; Windows
                number = getattr(signal, name)
                if signal.getsignal(number) != signal.SIG_IGN:
                    self.old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_):
        for number, handler in self.old.items():  # None: one that Python did not install
            signal.signal(number, handler or signal.SIG_DFL)

    def _handle(self, signum, frame):
        if signum == getattr(signal, "SIGUSR1", None):
            self.save = 1
            return
        alone = "WORLD_SIZE" not in os.environ
        if self.stop and alone:
            os._exit(128 + signum)
        if not self.stop and os.environ.get("RANK", "0") == "0":
            again = b"; again: at once" if alone else b""
            with contextlib.suppress(OSError):
                os.write(2, b"\nstopping after this step, with a checkpoint" + again + b"\n")
        self.stop = self.stop or signum

    def agree(self, ranks):
        """(signal to stop for or 0, whether to save), the same on every rank: all must call."""
        save, self.save = self.save, 0
        stop, save = max_over_ranks([self.stop, save], ranks)
        return stop, bool(save)


class Watchdog:
    """Ends the process with the stacks of all its threads when a step takes longer than `timeout`
    seconds: a C thread, so it also fires while Python waits inside a collective."""

    def __init__(self, timeout):
        self.timeout, self.since, self.factor = timeout, -math.inf, 0

    def arm(self, factor=1):
        """Allow what comes next `factor` * timeout seconds. Setting the timer takes 0.2 ms, so it
        allows a tenth more and is left as it is until that tenth is over."""
        if not self.timeout:
            return
        now, allowed = time.monotonic(), self.timeout * factor
        if factor != self.factor or now > self.since + allowed / 10:
            # One rank of a machine after the other, or their stacks would mix.
            turn = int(os.environ.get("LOCAL_RANK") or 0) / 2
            faulthandler.dump_traceback_later(allowed * 1.1 + turn, exit=True, file=sys.stderr)
            self.since, self.factor = now, factor

    def disarm(self):
        if self.timeout:
            faulthandler.cancel_dump_traceback_later()


class Compiler:
    """torch.compile of a model, in place: no wrapper, and state_dict keeps its names. Where it
    fails, the run goes on without, after one warning."""

    def __init__(self, model, enabled, device, warn):
        self.model, self.enabled, self.device, self.warn = model, enabled, device, warn
        if enabled:
            model.compile(dynamic=False)  # or a smaller last validation batch would make it so

    def call(self, module, *batch):
        """module(*batch), module being the model or what wraps it."""
        try:
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
        if self.enabled and self.device.type == "cpu" and when:
            return torch.compiler.set_stance("force_eager")
        return contextlib.nullcontext()


class SpikeDetector:
    """Is a loss more than `sigma` standard deviations above the mean of the last `window` good
    ones? (OLMo 2's criterion, arXiv:2501.00656.) Silent until half of the window is filled."""

    def __init__(self, sigma=6.0, window=128):
        self.sigma, self.losses = sigma, collections.deque(maxlen=window)

    def update(self, loss):
        if len(self.losses) >= self.losses.maxlen // 2:
            mean = sum(self.losses) / len(self.losses)
            deviation = math.sqrt(sum((x - mean) ** 2 for x in self.losses) / len(self.losses))
            if not loss <= mean + self.sigma * max(deviation, 1e-3 * abs(mean)):
                return True
        if math.isfinite(loss):
            self.losses.append(loss)
        return False

    def state_dict(self):
        return list(self.losses)

    def load_state_dict(self, losses):
        self.losses = collections.deque(losses, maxlen=self.losses.maxlen)


def judge(loss, norm, progress, spikes, on_spike, scaled):
    """What a step's numbers say: "fine", "stop" (not finite), "overflow" (of float16 gradients,
    which the loss scale will meet), or of a spike "warn", "skip" or "rewind"; numbers that are not
    finite are a spike too where that is met by rewinding. Keeps count in `progress`. scaled:
    whether there is a loss scale."""
    p = progress
    may_rewind = on_spike == "rewind" and p.rewinds < MAX_REWINDS
    if not (math.isfinite(loss) and math.isfinite(norm)):
        p.overflows, p.overflows_in_a_row = p.overflows + 1, p.overflows_in_a_row + 1
        if scaled and math.isfinite(loss) and p.overflows_in_a_row <= MAX_OVERFLOWS_IN_A_ROW:
            return "overflow"
        return "rewind" if may_rewind else "stop"
    p.overflows_in_a_row = 0
    if not spikes.update(loss):
        p.spikes_in_a_row = 0
        return "fine"
    p.spikes_in_a_row += 1
    if p.spikes_in_a_row > MAX_SPIKES_IN_A_ROW:  # the loss has risen for good: other data, say
        spikes.losses.clear()
        return "fine"
    return "warn" if on_spike == "rewind" and not may_rewind else on_spike
