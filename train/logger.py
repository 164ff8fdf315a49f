"""What a run tells: console, train.log, metrics.jsonl, samples.txt, loss.svg, optional trackers.

Telling never stops training: a closed pipe or a full disk costs its own output and one warning.
"""

import functools
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

from train.base.cli import env_rank
from train.base.errors import printable, warn_stderr
from train.base.files import atomic_write, open_no_follow, write_text
from train.keys import task_names
from train.lr_scheduler import milestones

SILENCE = 5.0     # seconds after which a run says that it still works
SLOW_INPUT = 0.3   # share of the time that is worth a warning
SLOW_SAMPLE = 2.0  # seconds of one sample that are not spent on four more


class Logger:
    """The voice of a run; on ranks other than 0 (main=False) silent, except for error().

    resume_iter, evaluated: see rewind(). trackers: names for train/options/trackers.py, whose packages are
    there. config: the run's, as a dict. system_info: what trackers are told besides
    environment()."""

    def __init__(self, out_dir, main=True, resume_iter=None, trackers=(), config=None,
                 evaluated=False, system_info=None):
        self.out_dir, self.main, self.closed = os.path.normpath(out_dir), main, threading.Event()
        self.config, self.system_info = config or {}, system_info or {}
        self.names, self.trackers = trackers, []  # opened at the first number: now it is known
        self.first_iter = self.last_eval = None   # where the run goes on
        self.console = _Console(sys.stdout)
        self.log_file, self.metrics, self.sample_file = self.files = [
            _LineFile(f"{self.out_dir}/{n}") for n in ("train.log", "metrics.jsonl", "samples.txt")]
        self.activity = ""  # what the run is at, see busy(): "iter 3, micro-batch 2 of 4"
        if main:
            self.life = threading.Thread(target=self._show_life, daemon=True)
            self.life.start()
        if resume_iter is not None:
            self.rewind(resume_iter, evaluated)

    def info(self, message, yellow=False):
        if self.main:
            self.console.line(printable(message), yellow)
            self._write_log(printable(message))

    def warn(self, message):
        self.info(f"warning: {message}", yellow=True)

    def error(self, message):
        """To stderr, from any rank."""
        if self.main:
            self.console.bar("")
            self._write_log(f"error: {printable(message)}")
        warn_stderr(f"[rank {env_rank()}] {message}")

    def _write_log(self, text):
        stamp = time.strftime("%Y-%m-%d %H:%M:%S ")
        self.log_file.write("".join(f"{stamp}{line}\n" for line in text.split("\n")))

    @contextmanager
    def busy(self, activity):
        """`activity` is what the run is at ("evaluating"), within. A thread shows it when nothing
        else has been said for a while."""
        before, self.activity = self.activity, activity
        try:
            yield
        finally:
            self.activity = before

    def _show_life(self):
        silence = SILENCE
        while not self.closed.wait(0.5):
            quiet = time.monotonic() - self.console.spoke
            silence = SILENCE if quiet < SILENCE else silence
            if self.activity and quiet >= silence:
                if self.console.live:
                    self.console.bar(f"{self.activity}, {quiet:.0f} s", spoken=False)
                    continue
                self.console.line(f"... {self.activity}", spoken=False)
                self._write_log(f"... {self.activity}")
                silence = quiet + min(60.0, quiet)  # after 5, 10, 20, 40, 80, 140, 200 ... seconds

    def samples(self, iter, text, whole=False):
        """Append text that the model wrote to samples.txt; show all of it or how it begins."""
        if self.main:
            self.sample_file.write(f"=== iter {iter} ===\n{text}\n\n")
            line = " ".join(text.split())
            short = line if len(line) <= 160 else f"{line[:160]}..."
            self.info(f"--- sample\n{text}\n---" if whole else f"sample: {short}")

    def step(self, record):
        """A training step: iter, tokens, loss, lr, grad_norm, time_ms, tokens_per_sec, mfu (None
        where unknown) and the model's own numbers. max_iters and eta_s are only shown; so is
        unit, what `tokens` counts, where it is tokens."""
        if self.main:
            left_out = {"max_iters", "eta_s"} | ({"unit"} if record.get("unit") == "tok" else set())
            self._write_metrics({k: v for k, v in record.items() if k not in left_out})
            self._write_log(step_line(record))
            if self.console.live:
                self.console.bar(progress_line(record, self.console.blocks))
            else:
                self.console.line(step_line(record))

    def evaluation(self, record, steps=0):
        """An evaluation before step `iter`: iter, tokens, train_loss (the mean of the `steps` steps
        before), val_loss and whatever else the model's evaluation yields, None where unknown."""
        if self.main:
            # A finished run, evaluated again: no second line. Numbers on test data are other ones.
            if record["iter"] != self.last_eval or "val_loss" not in record:
                self._write_metrics(record)
            self.last_eval = record["iter"]
            self.info(evaluation_line(record, steps))

    def _write_metrics(self, record):
        if self.first_iter is None:  # a fresh start: keep numbers of a lost run, but apart
            self.first_iter = record["iter"]
            with suppress(OSError):
                os.replace(self.metrics.path, self.metrics.path + ".old")
        record = {"iter": record["iter"], **_strict(record)}
        self.metrics.write(json.dumps(record, allow_nan=False, default=str) + "\n")
        if self.names:
            names, self.names = self.names, ()
            from train.options.trackers import open_trackers
            self.trackers = open_trackers(
                names, self.out_dir, self.config, self.config.get("run_name") or self.out_dir,
                environment() | self.system_info, self.first_iter, self.warn,
                evaluated=self.last_eval == self.first_iter, log=self.info)
        for tracker in self.trackers:
            tracker.record(record)

    def rewind(self, iter, evaluated=False):
        """Go on at iteration `iter`: forget the numbers of steps that will be done again.

        Step k is logged as iter k after it ran: steps below `iter` stay. An evaluation comes before
        its step: the one at `iter` stays only if it is not repeated (evaluated)."""
        if self.main:
            self.first_iter, self.last_eval = iter, iter if evaluated else None
            self.metrics.close()
            try:
                drop_lines_from(self.metrics.path, iter, evaluated)
            except OSError as error:
                self.warn(f"{self.metrics.path} not rewritten, steps may appear twice: {error}")
            for tracker in self.trackers:
                tracker.rewind(iter, evaluated)

    def read_tested(self):
        """The numbers on test data that metrics.jsonl ends with, {} where it does not."""
        with (suppress(OSError, ValueError, AttributeError, RecursionError),
              open(self.metrics.path, encoding="utf-8") as f):
            *_, last = f
            return {k: v for k, v in json.loads(last).items() if k.startswith("test_")}
        return {}

    def plot(self):
        """Redraw loss.svg from metrics.jsonl."""
        if self.main:
            try:
                from train.options.loss_svg import loss_svg, read_metrics
                picture = loss_svg([(self.out_dir, read_metrics(self.metrics.path, limit=20_000))],
                                   tasks=task_names(self.config.get("eval_tasks", ())))
                write_text(os.path.join(self.out_dir, "loss.svg"), picture)
            except ImportError:  # train/options/loss_svg.py was deleted: no pictures
                pass
            except Exception as error:  # a picture is not worth a run
                self.warn(f"loss.svg could not be drawn: {error}")

    def describe_run(self, yaml_text, config, machine):
        """config.yaml and training_args.json: the run, to be repeated."""
        record = dict(arguments=config, argv=sys.argv, command=shlex.join(sys.orig_argv),
                      **environment(), pid=os.getpid(), time=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                      **machine)
        try:
            write_text(os.path.join(self.out_dir, "config.yaml"), yaml_text)
            write_text(os.path.join(self.out_dir, "training_args.json"),
                       json.dumps(_strict(record), indent=2, default=str) + "\n")
        except OSError as error:  # a full disk; saving may find room again
            self.warn(f"config.yaml and training_args.json were not written: {error}")

    def close(self, status="finished"):
        """The end: "finished", "failed" or "stopped" (by a signal). A second call does nothing."""
        if self.closed.is_set():
            return
        self.closed.set()
        if self.main:
            self.life.join(timeout=1.0)  # it may be stuck in a full pipe
            self.console.bar("")
            for tracker in self.trackers:
                for name in ("loss.svg", "config.yaml", "training_args.json"):
                    tracker.artifact(os.path.join(self.out_dir, name))
                tracker.close(status)
            for file in self.files:
                file.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        stopped = getattr(error, "exit_code", 0) > 128  # by a signal
        self.close("stopped" if stopped else "failed" if kind else "finished")


class _Console:
    """Standard output: lines, and on a terminal a live one below them; dropped when it breaks."""

    def __init__(self, stream):
        self.live = bool(stream and stream.isatty()) and os.environ.get("TERM") != "dumb"
        self.stream, self.shown, self.spoke = stream, "", time.monotonic()
        self.lock = threading.Lock()
        self.color = self.live and not os.environ.get("NO_COLOR")
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        self.blocks = self.encoding.lower().startswith("utf")

    def line(self, text, yellow=False, spoken=True):
        text = f"\x1b[33m{text}\x1b[0m" if yellow and self.color else text
        with self.lock:
            self.spoke = time.monotonic() if spoken else self.spoke
            self._write(("\r\x1b[K" if self.shown else "") + text + "\n" + self.shown)

    def bar(self, text, spoken=True):
        """Replace the live line; "" clears it."""
        with self.lock:
            self.spoke = time.monotonic() if spoken else self.spoke
            if text or self.shown:
                self.shown = text
                self._write("\r\x1b[K" + text)

    def _write(self, text):
        try:
            if self.stream is not None:
                self.stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
                self.stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):  # nor may a print elsewhere fail
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
            self.stream = None


class _LineFile:
    """A file that grows by lines, each handed to the system at once; warns at the first failure. A
    link in its place gives way to a new file: what it points to may be anybody's."""

    def __init__(self, path):
        self.path, self.file, self.torn, self.warned = path, None, False, False

    def write(self, line):
        data = (b"\n" if self.torn else b"") + line.encode("utf-8", "replace")
        try:
            if self.file is None:
                if os.path.islink(self.path):
                    warn_stderr(f"warning: {self.path} was a link to {os.readlink(self.path)}, which "
                              "stays as it is; a file takes its place")
                    os.unlink(self.path)
                self.file = open_no_follow(self.path, "ab")
            self.torn = self.file.write(data) < len(data)
            if self.torn:
                raise OSError("the disk is full")
        except OSError as error:
            if not self.warned:
                warn_stderr(f"warning: {self.path} cannot be written, training goes on: {error}")
            self.warned = True

    def close(self):
        with suppress(OSError, AttributeError):  # or never opened
            self.file.close()
        self.file = None


# -----------------------------------------------------------------------------
# lines

def compact(n):
    """950.2, 12345, 1250000 -> '950', '12.3k', '1.25M'."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(n) >= size * 0.9995:  # what would round to 1000 is 1 of the next unit
            return f"{n / size:.3g}{unit}"
    return f"{n:.3g}"


def duration(seconds):
    """Seconds as '1:02:05' or '2d 3:00:00'."""
    s = max(0, round(seconds))
    days = f"{s // 86400}d " if s >= 86400 else ""
    return f"{days}{s // 3600 % 24}:{s // 60 % 60:02d}:{s % 60:02d}"


def _parts(r, **forms):
    """The parts of a line whose numbers are known."""
    return [form(r[k]) for k, form in forms.items() if r.get(k) is not None]


def step_line(r):
    """'iter 120: loss 3.2104, time 48.7ms, lr 0.000360, norm 0.83, 672k tok/s, ...'"""
    return f"iter {r['iter']}: " + ", ".join(_parts(
        r, loss="loss {:.4f}".format, time_ms="time {:.1f}ms".format,
        lr=lambda lr: f"lr {lr:.6f}" if lr >= 1e-5 or lr == 0 else f"lr {lr:.2e}",
        grad_norm="norm {:.2f}".format, **own_forms(r, LINE_NAMES), **speed_forms(r)))


def speed_forms(r):
    return dict(tokens_per_sec=lambda n: f"{compact(n)} {r.get('unit', 'tok')}/s",
                mfu="mfu {:.1%}".format, eta_s=lambda s: f"eta {duration(s)}")


# Names that log lines have: a model may not use them for its own numbers.
LINE_NAMES = {"iter", "tokens", "unit", "loss", "lr", "grad_norm", "time_ms", "tokens_per_sec",
              "mfu", "eta_s", "max_iters", "memory_mib", "epoch", "train_loss"}


def own_forms(r, known):
    """Forms of the numbers that a model adds to a line, all but the `known`."""
    return {k: (k.removeprefix("val_").replace("_", " ") + " {:.4f}").format
            for k, v in r.items() if isinstance(v, float) and k not in known}


def evaluation_line(r, steps=0):
    """'step 200: train loss 3.1022, val loss 3.1954, ppl 24.42, bpb 1.104 (train: the mean ...)'"""
    forms = dict(epoch="epoch {:.3g}".format, train_loss="train loss {:.4f}".format,
                 val_loss="val loss {:.4f}".format, val_ppl="ppl {:.2f}".format,
                 val_bpb="bpb {:.3f}".format)
    forms |= own_forms(r, LINE_NAMES | set(forms)) | dict(lr="lr {:.3g}".format)
    note = f" (train: the mean since step {r['iter'] - steps})" if steps else ""
    return f"step {r['iter']}: " + ", ".join(_parts(r, **forms)) + note


def progress_line(r, blocks=True):
    """' 42%|████      | 2100/5000, loss 3.2104, ...': the bar fills what the terminal has left."""
    width, total = shutil.get_terminal_size().columns - 1, r.get("max_iters") or r["iter"] + 1
    share = min(1.0, (r["iter"] + 1) / total)
    parts = [f"| {r['iter'] + 1}/{total}", *_parts(r, loss="loss {:.4f}".format, **speed_forms(r))]
    while len(parts) > 1 and len(", ".join(parts)) + 15 > width:
        parts.pop()
    cells = max(0, min(40, width - 5 - len(", ".join(parts))))
    bar = ("█" if blocks else "#") * int(share * cells)
    return f"{share:4.0%}|{bar.ljust(cells)}{', '.join(parts)}"[:width]


def _strict(value):
    """A value that strict JSON can hold: arrays become lists, NaN and infinities strings."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, dict):
        return {str(k): _strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def drop_lines_from(path, iter, evaluated=False):
    """Rewrite a metrics.jsonl, atomically and line by line, without torn lines, steps from `iter`
    on, and evaluations and tests from `iter` on (after `iter`, if evaluated). No file: nothing to
    do."""
    if os.path.exists(path):
        with open(path, "rb") as source, atomic_write(path) as target:
            for line in source:  # not json.loads: a resume must not wait for millions of lines
                whole = re.fullmatch(rb'\{\s*"iter":\s*(\d{1,18})\b.*\}\s*\n', line)
                stays = evaluated and (b'"val_loss"' in line or b'"test_loss"' in line)
                if whole and int(whole[1]) < iter + stays:
                    target.write(line)


@functools.cache
def environment():
    """Versions, host and git commit, as a dict: as they were when this process first asked, since
    what it has imported does not change with the files."""
    versions = dict(python=platform.python_version())
    for package in ("torch", "numpy", "tiktoken", "pyyaml"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    commit, dirty = git_state()
    return dict(versions=versions, git_commit=commit, git_dirty=dirty, host=socket.gethostname(),
                platform=platform.platform())


def git_state():
    """(commit, whether files differ from it) of this code; (None, None) where unknown."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

    def git(*args):
        return subprocess.check_output(["git", "--no-optional-locks", "-C", root, *args], text=True,
                                       timeout=10, stderr=subprocess.DEVNULL).strip()
    try:
        top, commit = git("rev-parse", "--show-toplevel", "HEAD").splitlines()
        if not os.path.samefile(top, root):
            return None, None  # the repository of something around this code
        return commit, bool(git("status", "--porcelain"))
    except (OSError, subprocess.SubprocessError):
        return None, None


# -----------------------------------------------------------------------------
# the clock, and how long it will take

class Clock:
    """Seconds of training between two log lines; what evaluations and saves take is left out."""

    def __init__(self):
        self.total_away, self.end_announced = 0.0, False
        self.start(0)

    def start(self, it):
        """Training goes on at step `it`."""
        self.began = it
        self.at, self.it, self.seconds_away = time.perf_counter(), it, 0.0

    @contextmanager
    def away(self):
        """Time within does not count as training."""
        left = time.perf_counter()
        try:
            yield
        finally:
            self.seconds_away += time.perf_counter() - left
            self.total_away += time.perf_counter() - left

    def unsteady(self, it):
        """Whether step `it` may take far longer than a step: it compiles, or waits for a save."""
        return it == self.began or self.seconds_away > 0

    def lap(self, it, loading, warn):
        """Seconds a step since the last lap, `it` being the last one done; `loading` of all of them
        were spent on batches."""
        passed = time.perf_counter() - self.at
        if loading > max(1.0, SLOW_INPUT * passed):  # of a second, anything is a large share
            warn(f"{loading / passed:.0%} of the time goes into reading batches: put data_dir on a "
                 "local disk, or use larger samples")
        seconds = (passed - self.seconds_away) / max(1, it + 1 - self.it)
        self.at, self.it, self.seconds_away = time.perf_counter(), it + 1, 0.0
        return seconds

    def announce_end(self, it, left, say):
        """Once: when the run will be over, `left` seconds from now."""
        if not self.end_announced and it > self.began:  # the first step may have compiled
            self.end_announced = True
            end = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + left))
            say(f"Expected to finish in {duration(left)}, at about {end}")


def time_sample(forward_backward, loader, device):
    """Seconds a sample that forward_backward(batch) takes, from a batch of a few; from one alone,
    which warms up as well, where that is slow."""
    batch = loader.get_batch(device, 0)
    for n in (1, min(4, len(batch[0]))):
        started = time.perf_counter()
        forward_backward([t[:n] for t in batch])
        seconds = (time.perf_counter() - started) / n
        if seconds > SLOW_SAMPLE:
            break
    return seconds


def how_long(step, config, done):
    """How long a run takes at `step` seconds a step, and what suits the machine if that is days."""
    steps = config.max_iters - done
    left = step * steps
    text = f"About {step:,.0f} s a step here: {duration(left)} for {steps:,} steps"
    if left > 86400:
        text += (".\nThis machine is slow for this configuration. A small model on the same data, "
                 "about a minute:\n  " + shlex.join([
                     "python", "run_train.py", "--config", "train/config_quick.yaml",
                     "--data_dir", config.data_dir, "--out_dir", "out/quick"]))
    return text


# -----------------------------------------------------------------------------
# what a run says before and after

def start_up(say, config, ranks, data, model, device, precision, flops):
    """Say what will happen before it does. device, precision: in words; flops: of a step."""
    c, train = config, data.train
    unit = "tokens" if train.unit == "tok" else f"{train.unit}s"
    if hasattr(train, "n_tokens"):
        say(f"Loading data from {c.data_dir}...")
    for split, loader in (("train", train), ("val", data.val)):
        if loader is not None:
            length = (f"{loader.n_tokens:,} tokens" if hasattr(loader, "n_tokens")
                      else f"{loader.samples:,} {loader.unit}s")
            say(f"[{split}] Data loaded. Length: {length}")
    ways = f", {c.distributed}" if ranks.world_size > 1 else ""
    say(f"Device: {device}; world size {ranks.world_size}{ways}")
    say(f"Precision: {precision}")
    n = sum(p.numel() for p in model.parameters())
    say(f"Model {c.model}: {n:,} parameters ({parameters_by_part(model)})")
    units = c.samples_per_step * train.units_per_sample
    each = f" of {train.units_per_sample:,}" if train.units_per_sample > 1 else ""
    micro, accumulated = c.micro_batch(ranks.world_size), c.accumulation(ranks.world_size)
    say(f"Batch: {micro} x {accumulated} accumulated x {ranks.world_size} ranks = "
        f"{c.samples_per_step:,} samples{each}: {units:,} {unit} a step")
    total = c.max_iters * units
    flops *= c.max_iters
    say(f"Length: {c.max_iters:,} steps, {compact(total)} {unit}, "
        f"{c.max_iters * c.samples_per_step / train.samples:.2f} epochs of {train.samples:,} "
        "samples" + (f", {total / n:.3g} tokens a parameter" if train.unit == "tok" else "")
        + (f", {flops:.2g} FLOPs" if flops else ""))
    for line in getattr(train, "passes", lambda n: ())(c.max_iters * c.samples_per_step):
        say(line)
    warmup, _, final = milestones(c)
    falls = c.lr_schedule not in ("constant", "none", "plateau")
    say(f"Learning rate: {c.learning_rate:g}, {c.lr_schedule}, warm-up {warmup} steps"
        + (f", to {final:g}" if falls else ""))
    for note in c.notes():
        say(f"Note: {note}")


def parameters_by_part(model):
    """'wte 12,288,000, h 37,748,736, ...': parameters by the first part of their names."""
    parts = {}
    for name, p in model.named_parameters():
        part = name.split(".")[0]
        parts[part] = parts.get(part, 0) + p.numel()
    return ", ".join(f"{k} {v:,}" for k, v in parts.items())


def next_steps(c, use):
    """What to do with a finished run. use: the command that its model file names, or ""."""
    text = f"Next: open {os.path.join(c.out_dir, 'loss.svg')}"
    if use:
        text += f", and use it:\n  {use.format(out=shlex.quote(c.out_dir))}"
    return text + "\nYour own text: python -m data.prepare my.txt" * (c.model == "gpt")


def without_option(argv, name):
    """argv without an option, given as --name=value, or as --name with the token after it."""
    out, rest = [], list(argv)
    while rest:
        option, equals, _ = rest[0].lstrip("-").replace("-", "_").partition("=")
        if option != name:
            out.append(rest.pop(0))
        else:
            del rest[:1 if equals else 2]
    return out


def resume_command(config, ranks):
    """The command line that goes on with this run."""
    args = without_option(sys.argv[1:], "allow_change")
    args += ["--resume", "auto"] if config.resume != "auto" else []  # the last word counts
    if ranks.world_size == 1:
        return "  " + shlex.join(["python", "run_train.py", *args])
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or ranks.world_size)
    nodes = ranks.world_size // here
    several = [f"--nnodes={nodes}", "--rdzv_backend=c10d", "--rdzv_endpoint=HOST:PORT"]
    command = ["torchrun", *(several if nodes > 1 else []), f"--nproc_per_node={here}"]
    on = "  (on each node)" if nodes > 1 else ""
    return "  " + shlex.join([*command, "run_train.py", *args]) + on
