"""What watches over a run: signals that ask it to stop, a limit on the time of a step, numbers that
go wrong; and what a person is told when something breaks."""

import collections
import contextlib
import faulthandler
import math
import os
import signal
import sys
import time
import traceback

import torch

from train.base.cli import interrupt_code
from train.base.errors import CollectiveExit, UserError, printable, warn_stderr
from train.distributed import max_over_ranks

MAX_OVERFLOWS_IN_A_ROW = 20  # float16: then it is not the loss scale that is wrong
MAX_REWINDS = 3
MAX_SPIKES_IN_A_ROW = 32


@contextlib.contextmanager
def on_signals(names, handler):
    """Meanwhile signals of these names call handler(number, frame), but for those that the process
    was started to ignore (nohup)."""
    old = {}
    for name in names:
        with contextlib.suppress(ValueError, AttributeError):  # not the main thread; Windows
            number = getattr(signal, name)
            if signal.getsignal(number) != signal.SIG_IGN:
                old[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in old.items():  # None: one that Python did not install
            signal.signal(number, before or signal.SIG_DFL)


class Signals:
    """SIGTERM, SIGINT and SIGHUP ask for a stop with a checkpoint, SIGUSR1 for a checkpoint only.

    The handler sets a flag and nothing else: the loop reads it between steps, when the state is
    whole. A second request to stop leaves at once, but not under torchrun: there one request
    arrives twice (Slurm signals torchrun and its ranks, torchrun its ranks), and torchrun kills a
    rank that takes too long.
    """

    STOP = ("SIGTERM", "SIGINT", "SIGHUP")

    def __init__(self):
        self.stop = self.save = 0
        self.handled = None

    def __enter__(self):
        self.handled = on_signals((*self.STOP, "SIGUSR1"), self._handle)
        self.handled.__enter__()
        return self

    def __exit__(self, *error):
        # A UserError is that of all ranks, and one of them tells it.
        broken = isinstance(error[1], Exception) and not isinstance(error[1], UserError)
        if broken and "WORLD_SIZE" in os.environ:
            # torchrun sends SIGTERM to a rank as soon as another has gone: this one first says
            # what broke.
            with contextlib.suppress(ValueError):  # not the main thread
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:
            self.handled.__exit__(*error)

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
                os.write(2, b"\nstopping, with a checkpoint" + again + b"\n")
        self.stop = self.stop or signum

    def stop_agreed(self, ranks):
        """Whether any rank was asked to stop; all must call."""
        return bool(self.stop if ranks.world_size == 1 else max_over_ranks(self.stop, ranks))

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

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.timeout:
            faulthandler.cancel_dump_traceback_later()


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


def decide_action(loss, norm, progress, spikes, on_spike, scaled):
    """(what to do about a step: "update", "skip", "rewind" or "stop", whether its loss is a spike).

    Numbers that are not finite stop the run, or are a spike too where on_spike says rewind. With a
    loss scale (`scaled`, float16) gradients overflow now and then: the step is skipped, and the
    scale falls. Keeps count in `progress`.
    """
    p = progress
    may_rewind = on_spike == "rewind" and p.rewinds < MAX_REWINDS
    if not (math.isfinite(loss) and math.isfinite(norm)):
        p.overflows, p.overflows_in_a_row = p.overflows + 1, p.overflows_in_a_row + 1
        if scaled and math.isfinite(loss) and p.overflows_in_a_row <= MAX_OVERFLOWS_IN_A_ROW:
            return "skip", False
        return ("rewind", True) if may_rewind else ("stop", False)
    p.overflows_in_a_row = 0
    if not spikes.update(loss):
        p.spikes_in_a_row = 0
        return "update", False
    p.spikes_in_a_row += 1
    if p.spikes_in_a_row > MAX_SPIKES_IN_A_ROW:  # the loss has risen for good: other data, say
        spikes.losses.clear()
        return "update", False
    if on_spike == "rewind":
        return ("rewind" if may_rewind else "update"), True
    return ("skip" if on_spike == "skip" else "update"), True


def spike_answer(action, on_spike):
    """What is done about a spike, in words."""
    if on_spike == "rewind" and action == "update":
        return f"all {MAX_REWINDS} rewinds of this run are used up: going on"
    return dict(update="going on", skip="its update is skipped",
                rewind="going back to the last checkpoint")[action]


# -----------------------------------------------------------------------------
# when something goes wrong

def not_finite(it, loss, norm, lr, where, good):
    """What to say of a step whose numbers are not finite. good: path of the last checkpoint."""
    good = good if os.path.exists(good) else "none yet"
    return (f"iter {it}: not finite: loss {loss}, gradient norm {norm}, lr {lr:.3g}; stopped "
            f"before the update. The batch: {where}.\n"
            f"Last good checkpoint: {good}. Try a lower "
            "--learning_rate, a longer --warmup_iters, --grad_clip 1.0, --dtype float32 or "
            "--on_spike rewind.")


def is_out_of_memory(error):
    text = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in text


def advice(error, config):
    """One short paragraph on what to change, or ''."""
    text = str(error).lower()
    if is_out_of_memory(error):
        b, g = config.batch_size, config.gradient_accumulation_steps
        pair = (f"--batch_size {b // 2} --gradient_accumulation_steps {g * 2} (the same global "
                "batch)" if b % 2 == 0 else "a smaller --batch_size")
        return (f"Out of memory. Try {pair}, then --gradient_checkpointing, then smaller samples "
                "or a smaller model. `--dry_run` shows where the memory goes.")
    if "nccl" in text:
        return ("NCCL failed. NCCL_DEBUG=INFO shows why; check that every rank sees its GPU "
                "(CUDA_VISIBLE_DEVICES, nvidia-smi) and that all nodes reach the rendezvous.")
    if "connection closed by peer" in text or "connection reset" in text or "timed out" in text:
        return ("Another rank died or hung: look for the first error above. torchrun "
                "--max-restarts=3 restarts from the last checkpoint by itself.")
    return "Compiling failed: --no-compile trains without it." if is_compile_error(error) else ""


def is_compile_error(error):
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def run_reporting_errors(config, job):
    """job(config) with errors told to a person: the exit code. 2: bad input, 1: it broke, 128 + n:
    stopped by signal n."""
    rank = os.environ.get("RANK", "")
    rank = int(rank) if rank.isdigit() else 0  # what else it may be, the process group refuses
    try:
        job(config)
        return exit_process(0)
    except CollectiveExit as error:  # all ranks raise it: one speaks
        if not rank and error.exit_code < 128:
            warn_stderr(error)
        return exit_process(error.exit_code)
    except UserError as error:
        if rank:
            time.sleep(3)  # rank 0 most likely says the same, and torchrun then ends this process
        warn_stderr(f"[rank {rank}] {error}" if rank else error)
        return exit_process(error.exit_code)
    except KeyboardInterrupt as stop:  # before there was anything to save
        return exit_process(interrupt_code(stop))
    except BaseException as error:
        return report_crash(error, config, rank)


def report_crash(error, config, rank):
    """Print what broke and what to do, and leave without waiting for peers that may be gone."""
    text, hint = "".join(traceback.format_exception(error)), advice(error, config)
    if "WORLD_SIZE" in os.environ:
        text = "".join(f"[rank {rank}] {line}\n" for line in f"{text}{hint}".splitlines())
    elif hint:
        text += f"{hint}\n"
    sys.stderr.write(printable(text))  # at once, or the texts of several ranks would mix
    sys.stderr.flush()
    return exit_process(1)


def exit_process(code):
    """The exit code; under torchrun exit with it here: peers may be gone, and PyTorch's threads can
    hang or abort a process that ends the usual way (pytorch#190489)."""
    sys.stdout.flush()
    if "WORLD_SIZE" in os.environ:
        os._exit(code)
    return code
