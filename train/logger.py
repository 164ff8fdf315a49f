"""Console, train.log, metrics.jsonl, samples.txt, loss.svg and trackers of a run; time per step.

Logging failures never stop training: a closed pipe or a full disk costs that output only.
"""

import json
import os
import re
import shlex
import shutil
import sys
import time
from contextlib import contextmanager, suppress

from train.base.console import RESET, YELLOW, Console, LineFile, compact, duration
from train.base.environment import environment
from train.base.errors import printable
from train.base.files import atomic_write, write_text
from train.lr_scheduler import get_lr, milestones

MAX_SAMPLE_CHARS = 160  # of a sample on the console during a run
SLOW_INPUT_SHARE = 0.3  # of the time; a larger share is a warning
WARN_EPOCHS = 20  # more are a warning, unless the length is given in epochs

NOT_STORED = {"max_iters", "eta_s"}  # in metrics.jsonl


class Logger:
    """The log of a run: the console, and train.log, metrics.jsonl and samples.txt in `out_dir`.

    main: whether this is rank 0; the other ranks print and write nothing.
    trackers: some of "tensorboard", "wandb", "mlflow".
    config: the run's configuration as a dict; with eval_only, only train.log is written.
    system_info: facts about the machine, for training_args.json and the trackers.
    A context manager. Output failures are not raised.
    """

    def __init__(self, out_dir, main=True, trackers=(), config=None, system_info=None):
        self.out_dir = out_dir
        self.is_main = main
        self.config = config or {}
        self.run_name = self.config.get("run_name") or os.path.normpath(
            self.config.get("out_dir", out_dir))
        self.system_info = system_info or {}
        self.tracker_names = trackers
        self.trackers = None    # opened by start()
        # Lines for train.log that write_held() writes; lost if the run ends before. `None`: written
        # at once.
        self.held = None
        self.first_iter = 0     # where this part of the run starts
        self.test_data = None   # a text that identifies the test data, set by the caller
        self.evaluated = False  # whether the evaluation at first_iter is in metrics.jsonl already
        self.console = Console(sys.stdout)
        self.log_file = LineFile(f"{self.out_dir}/train.log")
        self.metrics = LineFile(f"{self.out_dir}/metrics.jsonl")
        self.sample_file = LineFile(f"{self.out_dir}/samples.txt")

    @property
    def writes_files(self):
        """Whether files other than train.log are written; not while lines are held (self.held)."""
        return self.is_main and self.held is None and not self.config.get("eval_only")

    # -------------------------------------------------------------------------
    # messages

    def info(self, message, color=""):
        text = printable(message)
        self.write(text, f"{color}{text}{RESET}" if color and self.console.color else text)

    def warn(self, message):
        self.info(f"warning: {message}", YELLOW)

    def activity(self, text):
        """Show the current activity, e.g. "evaluating", on a terminal; it is not logged."""
        if self.is_main and self.console.live:
            self.console.show(live=text)

    def write(self, text, line, live=None):
        """Append `text` to train.log, with the time, and print `line`.

        Both must be results of printable(). line: `None` prints nothing. live: the new status line
        of a terminal; `None` keeps it.
        """
        if self.is_main:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S ")
            add = self.log_file.write if self.held is None else self.held.append
            add(stamp + text.replace("\n", f"\n{stamp}"))
            self.console.show(line, live)

    def write_held(self):
        """Write the lines in self.held to train.log; write later lines at once."""
        for line in self.held or ():
            self.log_file.write(line)
        self.held = None

    def samples(self, iter, text, whole=False):
        """Append a generated text to samples.txt, and log its beginning in one line.

        iter: the step. whole: log all of it, with its line breaks.
        """
        if self.writes_files:
            self.sample_file.write(f"=== iter {iter} ===\n{text}\n")
        line = " ".join(text.split())
        if len(line) > MAX_SAMPLE_CHARS:
            line = f"{line[:MAX_SAMPLE_CHARS]}..."
        self.info(f"--- sample\n{text}\n---" if whole else f"sample: {line}")

    # -------------------------------------------------------------------------
    # numbers

    def step(self, record):
        """Log a training step: {name: number or `None`} with "iter", "max_iters" and "unit"."""
        self.store({k: v for k, v in record.items() if k not in NOT_STORED and v != "tok"})
        line = format_line(f"iter {record['iter']}", record)
        live = self.console.live
        self.write(line, None if live else line, progress_line(record) if live else None)

    def evaluation(self, record):
        """Log an evaluation: {name: number, or `None` if unknown}, with "iter" and "tokens".

        Validation has "train_loss" and val_NAME; a test has test_NAME and "data", self.test_data.
        """
        self.store(record)
        line = printable(format_line(f"step {record['iter']}", record))
        self.write(line, line, live="")  # end of activity()

    def store(self, record):
        """Append a record {name: number}, with "iter", to metrics.jsonl and the trackers."""
        if self.writes_files:
            self.metrics.write(to_json({"iter": record["iter"], **record}))
            if self.trackers:
                self.trackers.call("record", record)

    def start(self, iter, evaluated=False):
        """Open the log for a run that starts at step `iter`, and drop numbers of repeated steps.

        evaluated: whether the evaluation before step `iter` is complete, and stays in
        metrics.jsonl. Step k is logged when it is complete, so lines below `iter` stay. If nothing
        is complete, metrics.jsonl is renamed to metrics.jsonl.old. Also opens the trackers, and
        calls write_held().
        """
        self.write_held()
        self.first_iter = iter
        self.evaluated = evaluated
        path = self.metrics.path
        if self.is_main and os.path.lexists(path):
            try:
                if iter or evaluated:
                    drop_lines_from(path, iter, evaluated)
                else:
                    os.replace(path, f"{path}.old")
            except OSError as error:
                self.warn(f"{path} not rewritten, steps may appear twice: {error}")
        if self.is_main and self.tracker_names:
            from train.options.trackers import Trackers
            self.trackers = Trackers(self.tracker_names, self)

    def read_tested(self):
        """Return {test_NAME: number} from the last line of metrics.jsonl, if of the same test data.

        {} if there are none, or the file cannot be read.
        """
        with (suppress(OSError, ValueError, AttributeError, RecursionError),
              open(self.metrics.path, encoding="utf-8") as f):
            *_, last = f
            last = json.loads(last)
            if last.get("data") in (None, self.test_data):  # None: written by an earlier version
                return {k: float(v) if isinstance(v, str) else v for k, v in last.items()
                        if k.startswith("test_")}  # "nan" and "inf" are strings there
        return {}

    # -------------------------------------------------------------------------
    # other files

    def plot(self):
        """Draw loss.svg from metrics.jsonl; a failure is a warning."""
        if self.writes_files:
            try:
                from train.options.loss_svg import MAX_LINES, loss_svg, read_metrics
                svg = loss_svg([(self.run_name, read_metrics(self.metrics.path, limit=MAX_LINES))])
                write_text(os.path.join(self.out_dir, "loss.svg"), svg)
            except ImportError:  # train/options/loss_svg.py is deleted
                pass
            except Exception as error:
                self.warn(f"loss.svg could not be drawn: {error}")

    def describe_run(self, yaml_text):
        """Write config.yaml and training_args.json, from which the run can be repeated.

        yaml_text: the content of config.yaml. Call on rank 0. A failure is a warning.
        """
        record = dict(arguments=self.config, argv=sys.argv, command=shlex.join(sys.orig_argv),
                      **environment(), pid=os.getpid(), time=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                      **self.system_info)
        try:
            write_text(os.path.join(self.out_dir, "config.yaml"), yaml_text)
            write_text(os.path.join(self.out_dir, "training_args.json"), to_json(record, 2) + "\n")
        except OSError as error:  # e.g. a full disk; a later save may succeed
            self.warn(f"config.yaml and training_args.json were not written: {error}")

    def close(self, status="finished"):
        """Close the files and end the trackers. status: finished, failed or stopped."""
        if self.is_main:
            self.console.show(live="")
            if self.trackers:
                self.trackers.call("close", status)
            for file in (self.log_file, self.metrics, self.sample_file):
                file.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        by_signal = getattr(error, "exit_code", 0) > 128
        self.close("stopped" if by_signal else "failed" if kind else "finished")


def to_json(value, indent=None):
    """Return strict JSON: tensors as lists, NaN and infinities as strings, other types by str()."""
    text = json.dumps(value, default=lambda x: x.tolist() if hasattr(x, "tolist") else str(x))
    plain = json.loads(text, parse_constant=lambda name: str(float(name)))
    return json.dumps(plain, indent=indent, ensure_ascii=False)  # YAML misreads escaped emoji


def drop_lines_from(path, iter, evaluated=False):
    """Remove incomplete lines, and those from step `iter` on, from a metrics.jsonl, atomically.

    Test numbers at `iter` stay; with `evaluated`, validation numbers at `iter` too. Raises OSError,
    also if the file does not exist.
    """
    with open(path, "rb") as source, atomic_write(path) as target:
        for line in source:  # not json.loads, which is slow for millions of lines
            whole = re.fullmatch(rb'\{\s*"iter":\s*(\d{1,18})\b.*\}\s*\n', line)
            stays = b'"test_loss"' in line or evaluated and b'"val_loss"' in line
            if whole and int(whole[1]) < iter + stays:
                target.write(line)


# -----------------------------------------------------------------------------
# lines

FORMATS = dict(epoch="epoch {:.3g}", loss="loss {:.4f}", train_loss="train loss {:.4f}",
               val_loss="val loss {:.4f}", val_ppl="ppl {:.2f}", val_bpb="bpb {:.3f}",
               time_ms="time {:.1f}ms", work_ms="work {:.1f}ms", slowest_ms="slowest {:.1f}ms",
               slowest_rank="rank {:.0f}", lr="lr {}", grad_norm="norm {:.2f}",
               tokens_per_sec="{} {unit}/s", mfu="mfu {:.1%}", eta_s="eta {}")  # in this order
CONVERSIONS = dict(lr=lambda lr: f"{lr:.6f}" if lr >= 1e-5 or lr == 0 else f"{lr:.2e}",
                   tokens_per_sec=compact, eta_s=duration)
PROGRESS_NAMES = ("loss", "tokens_per_sec", "mfu", "eta_s", "unit")
# Names with a fixed meaning in log lines: a model may not use one for a custom number.
LINE_NAMES = FORMATS.keys() | {"iter", "tokens", "unit", "count", "max_iters", "memory_mib"}


def format_line(start, record):
    """Return a log line, e.g. "iter 120: loss 3.2104, time 48.7ms", from {name: value}.

    start: e.g. "iter 120". The names in FORMATS come first, then other floats, of the model;
    `None`, lists and other values are left out.
    """
    own = {name: "{label} {:.4f}" for name, value in record.items()
           if isinstance(value, float) and name not in LINE_NAMES}
    texts = []
    for name, template in (FORMATS | own).items():
        if record.get(name) is not None:
            value = CONVERSIONS.get(name, float)(record[name])
            label = name.removeprefix("val_").replace("_", " ")
            texts.append(template.format(value, label=label, unit=record.get("unit", "tok")))
    return f"{start}: {', '.join(texts)}"


def progress_line(record):
    """Return the status line of a step, e.g. " 42%|####      | 2100/5000: loss 3.2104".

    record: as for Logger.step(). It is cut to the width of the terminal.
    """
    steps = record["iter"] + 1
    total = max(steps, record["max_iters"])
    bar = f"{steps / total:4.0%}|{'#' * (10 * steps // total):10}| {steps}/{total}"
    width = shutil.get_terminal_size().columns - 1
    return format_line(bar, {k: v for k, v in record.items() if k in PROGRESS_NAMES})[:width]


# -----------------------------------------------------------------------------
# memory, time per step, duration of the run

def peak_memory(device):
    """Return the peak memory in MiB: allocated on CUDA, else resident (Windows: `None`)."""
    if device.type == "cuda":
        import torch
        return round(torch.cuda.max_memory_allocated(device) / 2**20)
    with suppress(ImportError):  # Windows
        import resource
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak >> (20 if sys.platform == "darwin" else 10)  # macOS: bytes, Linux: KiB


class Clock:
    """Stopwatch for training steps, which excludes the time in away(), e.g. of evaluations."""
    numbers = {}  # more numbers for the log line, which a subclass defines

    def __init__(self):
        self.total_away = 0.0  # seconds in evaluations and saves, of the entire run
        self.first = None      # (it, total_away) of the first call of time_left()
        self.start(0)

    def start(self, it):
        """Start measuring before step `it`."""
        self.it = it
        self.started_at = time.perf_counter()
        self.seconds_away = 0.0

    @contextmanager
    def away(self):
        """Context manager for time that does not count as training, e.g. a save."""
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self.seconds_away += seconds
            self.total_away += seconds

    def max_over_ranks(self, value):
        """Return `value`, an int; with several ranks (RankClock) the maximum over all."""
        return value

    def lap(self, it, batches, warn):
        """Return the mean seconds per step since the last lap, at the end of step `it`.

        Calls warn(text) if the wait for `batches`, a Prefetcher, was over a second and over
        SLOW_INPUT_SHARE of the time; sets batches.seconds to 0.
        """
        seconds = time.perf_counter() - self.started_at
        if batches.seconds > max(1.0, SLOW_INPUT_SHARE * seconds):  # below a second: noise
            warn(f"{batches.seconds / seconds:.0%} of the time is spent reading batches: move "
                 "data_dir to a local disk, or use larger samples")
        batches.seconds = 0.0
        per_step = (seconds - self.seconds_away) / max(1, it + 1 - self.it)
        self.start(it + 1)
        return per_step

    def time_left(self, it, n_steps, per_step):
        """Return the estimated seconds of `n_steps` more steps, plus evaluations and saves."""
        first, before = self.first = self.first or (it, self.total_away)
        return n_steps * (per_step + (self.total_away - before) / max(1, it - first))


# -----------------------------------------------------------------------------
# messages at the start and the end

def log_plan(log, config, ranks, data, model, device, precision, flops):
    """Log the plan of a run: data, device, model, batch, length and log_settings().

    log(line): prints a line. device, precision: texts. flops: per step over all ranks, 0 if
    unknown.
    """
    c = config
    train = data.train
    unit = "tokens" if train.unit == "tok" else f"{train.unit}s"
    if hasattr(train, "n_tokens"):
        log(f"Loading data from {c.data_dir}...")
    for split, loader in (("train", train), ("val", data.val)):
        if loader is not None:
            length = (f"{loader.n_tokens:,} tokens" if hasattr(loader, "n_tokens")
                      else f"{loader.samples:,} {loader.unit}s")
            log(f"[{split}] Data loaded. Length: {length}")
    method = f", {c.distributed}" if ranks.world_size > 1 else ""
    log(f"Device: {device}; world size {ranks.world_size}{method}")
    if ranks.world_size > 1:
        from train.distributed import describe_mesh
        log(f"Mesh: {describe_mesh(c, ranks)}")
    log(f"Precision: {precision}")
    n_params = sum(p.numel() for p in model.parameters())
    log(f"Model {c.model}: {n_params:,} parameters")
    units = c.samples_per_step * train.units_per_sample
    of_units = f" of {train.units_per_sample:,} {unit}" if train.units_per_sample > 1 else ""
    log(f"Batch: {c.micro_batch(ranks.world_size)} x {c.accumulation(ranks.world_size)} "
        f"accumulation x {ranks.world_size} ranks = {c.samples_per_step:,} samples{of_units}: "
        f"{units:,} {unit} per step")
    total = c.max_iters * units
    samples = c.max_iters * c.samples_per_step
    epochs = samples / train.samples
    ratio = f", {total / n_params:.3g} tokens per parameter" if train.unit == "tok" else ""
    work = f", {flops * c.max_iters:.2g} FLOPs" if flops else ""
    log(f"Length: {c.max_iters:,} steps, {compact(total)} {unit}, {epochs:.2f} epochs of "
        f"{train.samples:,} samples{ratio}{work}")
    if epochs > WARN_EPOCHS and not c.max_epochs:
        log(f"warning: every sample is used {epochs:,.0f} times; a few epochs are usual "
            "(--max_epochs 3)")
    for line in getattr(train, "passes", lambda n: ())(samples):
        log(line)
    log_settings(log, c)


def log_settings(log, config):
    """Log the learning rate, the metric of the best checkpoint, and warnings about settings."""
    c = config
    warmup, end, _ = milestones(c)
    is_short = warmup > c.max_iters
    final = get_lr(max(c.max_iters - (is_short or c.lr_schedule == "step"), 0), c)
    if not c.eval_only:  # for train.tools.watch this line is the start of training
        last = f", to {final:g}" if final != c.learning_rate else ""
        log(f"Learning rate: {c.learning_rate:g}, {c.lr_schedule}, warm-up {warmup} steps{last}")
    metric = c.early_stopping_metric
    if c.early_stopping_mode == "max" and metric.endswith("loss"):
        log(f"warning: ckpt_best.pt has the highest {metric} (--early_stopping_mode min)")
    elif metric != "val_loss":
        log(f"Best checkpoint: {dict(min='lowest', max='highest')[c.early_stopping_mode]} {metric}")
    if not (c.evaluates or c.save_interval or c.save_epochs or c.profile):
        log("warning: no checkpoint before the end of the run (--save_interval N)")
    is_cut = c.lr_decay_iters and warmup >= end and get_lr(warmup, c) < c.learning_rate
    if c.max_iters and (is_short or is_cut):
        limit = f"longer than the run of {c.max_iters}" if is_short else "not below lr_decay_iters"
        log(f"warning: the warm-up of {warmup} steps is {limit}: the rate never reaches its peak")
    if unused := c.unused_keys():
        log("Keys without effect: " + ", ".join(f"{k} (needs {v})" for k, v in unused.items()))


def resume_command(config, ranks):
    """Return the indented shell command that resumes this run, with torchrun for several ranks.

    With several nodes, it must be started on each node. In a notebook: a text about train().
    """
    if hasattr(sys, "ps1"):  # a notebook or a prompt
        return "  the same call, with resume='auto'"
    launcher = ["python"]
    if ranks.world_size > 1:
        n_nodes = ranks.world_size // ranks.ranks_per_node
        address = os.environ.get("MASTER_ADDR", "HOST")  # of the node with rank 0
        where = ["--standalone"] if n_nodes == 1 else [
            f"--nnodes={n_nodes}", "--rdzv_backend=c10d", f"--rdzv_endpoint={address}:29500"]
        launcher = ["torchrun", *where, f"--nproc_per_node={ranks.ranks_per_node}"]
    args = ["--resume", "auto"] if config.resume != "auto" else []  # the last value counts
    return "  " + shlex.join([*launcher, *sys.argv, *args])
