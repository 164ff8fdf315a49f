"""Reactions of a run: to signals, a time limit per step, loss spikes; and error reports."""

import contextlib
import faulthandler
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback

import torch

from train.base.cli import env_rank, interrupt_code, report_error, under_torchrun
from train.base.errors import CollectiveExit, UserError, missing_part, printable, warn_stderr
from train.base.files import exclusive_lock, open_no_follow
from train.device import is_compile_error
from train.distributed import max_over_ranks

SLOW_STEP_FACTOR = 10  # of step_timeout, for what takes longer than a step
MAX_OVERFLOWS_IN_A_ROW = 20  # float16: more are not due to the loss scale
MAX_SPIKES_IN_A_ROW = 32


@contextlib.contextmanager
def on_signals(names, handler):
    """Context manager in which the signals `names`, e.g. ["SIGTERM"], call handler(number, frame).

    Restores the previous handlers on exit. Signals that are ignored on entry (nohup) stay ignored;
    names that the system lacks are skipped. Without effect outside the main thread.
    """
    with contextlib.ExitStack() as stack:
        for name in names:
            with contextlib.suppress(ValueError, AttributeError):  # not the main thread; Windows
                number = getattr(signal, name)
                if signal.getsignal(number) != signal.SIG_IGN:
                    old = signal.signal(number, handler)  # None: not a Python function
                    stack.callback(signal.signal, number, old or signal.SIG_DFL)
        yield


def interrupt(signum, frame):
    """Raise KeyboardInterrupt(signum), for interrupt_code(): a handler for on_signals()."""
    raise KeyboardInterrupt(signum)


class Signals:
    """Context manager that turns signals into requests to save a checkpoint and stop, or to save.

    stop: the number of the signal SIGTERM, SIGINT or SIGHUP, or 0. save: 1 after SIGUSR1, else 0.
    The training loop reads them between micro-batches; a partial step is discarded (completed if
    the model has persistent buffers). A second request to stop exits the process at once (in a
    notebook, it raises KeyboardInterrupt). Under torchrun it is ignored, because one request causes
    two signals there (Slurm signals torchrun and all ranks, torchrun signals the ranks), and
    torchrun kills slow ranks.
    """

    def __init__(self):
        self.stop = 0
        self.save = 0
        self.pid = os.getpid()
        self.handlers = on_signals(("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"), self.handle)

    def __enter__(self):
        self.handlers.__enter__()
        return self

    def __exit__(self, *error):
        # Crash of this rank: print the traceback first, since torchrun sends SIGTERM as soon as any
        # rank exits. A UserError occurs on all ranks, and rank 0 prints it.
        crashed = isinstance(error[1], Exception) and not isinstance(error[1], UserError)
        if crashed and under_torchrun():
            with contextlib.suppress(ValueError):  # not the main thread
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:
            self.handlers.__exit__(*error)

    def handle(self, signum, frame):
        if os.getpid() != self.pid:  # a forked process is not the run
            signal.signal(signum, signal.SIG_DFL)
            return os.kill(os.getpid(), signum)
        if signum == getattr(signal, "SIGUSR1", None):
            self.save = 1
            return
        if self.stop:
            if hasattr(sys, "ps1"):  # a notebook or a prompt, which must survive
                raise KeyboardInterrupt
            if not under_torchrun():
                os._exit(128 + signum)
            return
        self.stop = signum  # before os.write(), during which a second signal may arrive
        if env_rank() == 0:
            hint = "" if under_torchrun() else "; a second signal quits at once, without saving"
            with contextlib.suppress(OSError):
                os.write(2, f"\nstopping after this micro-batch{hint}\n".encode())

    def agree(self, ranks):
        """Return (stop, save), requested by any rank, and clear `save`; all ranks must call."""
        save, self.save = self.save, 0
        stop, save = max_over_ranks([self.stop, save], ranks)
        return stop, bool(save)


class Watchdog:
    """Thread that ends the process if no restart() follows within `seconds` after the last one.

    seconds: 0: no limit. Suspended time (SIGSTOP) does not count. The clock starts with the first
    restart(). Prints the stacks of all threads with `rank`, appends them to stacks.txt in `folder`,
    and exits with code 1. C code that holds the GIL blocks this thread, too. close() stops it.
    """

    def __init__(self, seconds, folder, rank):
        self.seconds = seconds
        self.folder = folder
        self.rank = rank
        self.clock = 0.0  # seconds in which the process was running
        self.deadline = math.inf  # of self.clock; None: closed
        if seconds:
            threading.Thread(target=self.watch, daemon=True).start()

    def restart(self, slow=False):
        """Restart the timer; slow: the limit is SLOW_STEP_FACTOR times as long this time."""
        self.deadline = self.clock + self.seconds * (SLOW_STEP_FACTOR if slow else 1)

    def close(self):
        self.deadline = None

    def watch(self):
        before = time.monotonic()
        while (deadline := self.deadline) and self.clock < deadline:
            time.sleep(0.1)
            now = time.monotonic()
            self.clock += min(now - before, 0.2)  # more: the process was stopped
            before = now
        if deadline:
            self.dump_stacks()
            time.sleep(1)  # an exit would end collectives of other ranks
            os._exit(1)

    def dump_stacks(self):
        title = (f"{time.strftime('%Y-%m-%d %H:%M:%S')} [rank {self.rank}] pid {os.getpid()} on "
                 f"{socket.gethostname()}: step_timeout: {self.seconds:g} s are over\n")
        with exclusive_lock(self.folder):  # one rank after the other
            with contextlib.suppress(AttributeError, RuntimeError, ValueError, OSError):
                sys.stderr.write(title)  # which may be closed, or no file (in a notebook)
                faulthandler.dump_traceback(sys.stderr)
            with (contextlib.suppress(OSError),
                  open_no_follow(os.path.join(self.folder, "stacks.txt"), "ab") as f):
                f.write(title.encode())
                faulthandler.dump_traceback(f)


# -----------------------------------------------------------------------------
# loss spikes and non-finite values

def decide_action(loss, norm, progress, spikes, on_spike, scaled):
    """Return "update", "skip" or "stop" for a step with a loss spike or non-finite numbers.

    Call it only for these steps, because it updates the counters in `progress` (a Progress).
    A spike: "skip" if on_spike is "skip", otherwise "update"; after more than MAX_SPIKES_IN_A_ROW,
    the losses in `spikes` (a SpikeDetector) are removed, and the action is "update".
    Non-finite numbers: "stop". Exception: if the loss is scaled for float16 (`scaled`) and finite,
    and only `norm` is not: "skip", up to MAX_OVERFLOWS_IN_A_ROW times in a row.
    """
    if not (math.isfinite(loss) and math.isfinite(norm)):
        progress.overflows += 1
        progress.overflows_in_a_row += 1
        expected = progress.overflows_in_a_row <= MAX_OVERFLOWS_IN_A_ROW
        return "skip" if scaled and math.isfinite(loss) and expected else "stop"
    progress.overflows_in_a_row = 0
    progress.spikes_in_a_row += 1
    if progress.spikes_in_a_row > MAX_SPIKES_IN_A_ROW:  # permanently higher, e.g. on other data
        spikes.losses.clear()
        return "update"
    return "skip" if on_spike == "skip" else "update"


# -----------------------------------------------------------------------------
# errors

def run_reporting_errors(config, job, prints=False):
    """Call job(config), print an error, and return the exit code (under torchrun, exit with it).

    0: success; 1: a crash, non-finite numbers, or the last save failed; 2: invalid input, or a file
    without permission; 128 + n: stopped by signal n. prints: whether the job prints a result; an
    OSError without a filename, e.g. of stdout, is then raised.
    """
    try:
        job(config)
        return exit_process(0)
    except CollectiveExit as error:  # raised by all ranks, printed by rank 0
        if not env_rank() and error.exit_code < 128:
            warn_stderr(error)
        return exit_process(error.exit_code)
    except KeyboardInterrupt as stop:  # before the first step: there is no state to save
        return exit_process(interrupt_code(stop))
    except BaseException as error:
        if prints and isinstance(error, OSError) and error.filename is None:
            raise
        if isinstance(error, UserError | PermissionError) or missing_part(error):
            return exit_process(report_error(error))
        report_crash(error, config)
        return exit_process(1)  # without waiting for other ranks, which may not respond


def report_crash(error, config):
    """Print an exception's traceback and the advice of suggest_fix(), if any, on stderr.

    If memory (of the GPU or CPU) was insufficient, print only the advice, which quotes the error.
    """
    text = suggest_fix(error, config)
    if not text.startswith("Out of memory"):
        text = "".join(traceback.format_exception(error)) + text
    prefix = f"[rank {env_rank()}] " if under_torchrun() else ""
    text = "".join(f"{prefix}{line}\n" for line in text.splitlines())
    sys.stderr.write(printable(text))  # one write, so that the texts of ranks are not interleaved
    sys.stderr.flush()


def suggest_fix(error, config):
    """Return possible remedies for an error of memory, NCCL, connections or compiling, or ""."""
    text = str(error).lower()
    # Also errors of NCCL, cuBLAS and pinned memory, which are not OutOfMemoryError.
    full = any(part in text for part in ("allocate memory", "out of memory", "alloc_failed"))
    if full or isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        world_size = int(os.environ.get("WORLD_SIZE") or 1)
        samples, b = config.samples_per_step, config.micro_batch(world_size)  # batch_size or less
        half = next(n for n in range((b + 1) // 2, 0, -1) if samples // world_size % n == 0)
        pair = (f"--batch_size {half} --gradient_accumulation_steps {samples // half} (the same "
                "global batch), then " if b > 1 else "")
        return (f"Out of memory. Try {pair}--gradient_checkpointing true, then smaller "
                "samples or a smaller model. `--dry_run` shows the memory by purpose. The error: "
                f"{error!r:.300}")
    if "nccl" in text:
        return ("NCCL failed. NCCL_DEBUG=INFO shows why; check that every rank sees its GPU "
                "(CUDA_VISIBLE_DEVICES, nvidia-smi) and that all nodes reach the rendezvous.")
    if "connection closed by peer" in text or "connection reset" in text or "timed out" in text:
        return ("Another rank died or hung: look for the first error above. torchrun "
                "--max-restarts=3 restarts from the last checkpoint by itself. If it was only slow "
                "(e.g. a save, or a copy from the mirror): a longer --dist_timeout.")
    return "Compiling failed: --no-compile trains without it." if is_compile_error(error) else ""


def exit_process(code):
    """Flush stdout and return `code`; under torchrun, exit the process with it immediately.

    Other ranks may not respond, and PyTorch's threads can hang or abort a normal exit
    (pytorch#190489).
    """
    with contextlib.suppress(ValueError, AttributeError):  # closed, or None, by a user's function
        sys.stdout.flush()
    if under_torchrun():
        os._exit(code)
    return code
