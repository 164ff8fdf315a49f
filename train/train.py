"""The training loop. Read Trainer from top to bottom: set up, run, one step, evaluation, the end.

The loop does not know what it trains. It asks a loader for the batches of a step and a model for a
loss, `loss, metrics = model(*batch)`; the file model/NAME.py that the config names builds it.
train/judge.py looks at the numbers of a step, train/evaluate.py validates, train/resume.py saves
and resumes, train/distributed.py knows where it computes.
"""

import contextlib
import importlib.util
import math
import os
import time
from dataclasses import asdict

import torch
import torch.distributed as dist

from train import checkpoint, distributed, fault, report, resume
from train.early_stopping import EarlyStopping
from train.evaluate import validate
from train.guard import Signals, SpikeDetector, Stopped, Watchdog
from train.help import to_yaml
from train.judge import judge
from train.lock import FolderLock
from train.logger import Logger, write_training_args, write_yaml
from train.lr_scheduler import ReduceOnPlateau, get_lr, resolve_lengths
from train.optimizer import configure_optimizers
from train.progress import Progress, StepNumbers
from train.saver import Saver
from train.token_data import open_token_data


def train(config, on_evaluation=None):
    """The whole run that `config` (a TrainConfig) describes. Returns its last numbers.
    Raises guard.Stopped after a signal, guard.BadNumbers when loss or gradients are not finite.
    `on_evaluation(iter_num, numbers)` hears of every evaluation; what it raises ends the run."""
    with distributed.process_group(config) as ranks, Trainer(config, ranks) as trainer:
        trainer.on_evaluation = on_evaluation or trainer.on_evaluation
        trainer.start()
        return trainer.fit()


def estimate(config):
    """--dry_run: say what the run would take, write nothing. True if it fits in memory."""
    with distributed.process_group(config) as ranks, Trainer(config, ranks) as trainer:
        trainer.signals.__exit__()  # there is nothing to save: a signal ends it as any program
        return report.dry_run(trainer)


class Trainer:
    # -------------------------------------------------------------------------
    # setting up

    def __init__(self, config, ranks):
        c = self.given = self.config = config
        self.ranks, self.log, self.progress = ranks, None, Progress()
        self.signals, self.watchdog = Signals(), Watchdog(c.step_timeout)
        self.saver, self.lock = Saver(), None
        self.spikes = SpikeDetector(c.spike_sigma)
        self.plateau = ReduceOnPlateau(c.lr_factor, c.plateau_patience)
        self.stopping = EarlyStopping(c.early_stopping_patience, c.early_stopping_min_delta,
                                      c.early_stopping_mode)
        self.pending = self.batch = None    # numbers of the last step; the micro-batch prepared
        self.pause = self.overhead = 0.0    # seconds: of all saves; not to count in a step's time
        self.told_end = False
        self.loading = 0.0                  # seconds spent on batches since the last log line
        self.saved_at, self.best_due = 0, False
        self.on_evaluation = lambda iter_num, numbers: None
        self.model_file = load_model_file(c.model)
        distributed.set_seed(c.seed, c.deterministic)
        self.found = None                   # rank 0: the checkpoint to go on from
        self.open_data(c.batch_size)

    def __enter__(self):
        self.signals.__enter__()
        return self

    def __exit__(self, kind, error, trace):
        self.watchdog.disarm()
        self.signals.__exit__()
        with contextlib.suppress(Exception):  # the folder is ours until its last save is over
            self.saver.wait()
        if self.log is not None:
            self.log.close("finished" if kind is None else
                           "stopped" if kind is Stopped else "failed")
        if self.lock is not None:
            self.lock.release()

    def open_data(self, most):
        """Loaders for a micro-batch of at most `most` sequences, and the lengths that depend on how
        much data there is."""
        self.micro_batch = micro_batch_size(self.given, self.ranks.world_size, most)
        make = getattr(self.model_file, "open_data", open_token_data)
        self.data, self.batch = make(self.given, self.micro_batch, self.ranks), None
        self.config = resolve_lengths(self.given, self.data.train.tokens_per_epoch)

    @property
    def accumulation(self):
        """Micro-batches a rank computes in one step."""
        return self.config.sequences_per_step // (self.ranks.world_size * self.micro_batch)

    def build_model(self, empty=False):
        """The bare model (self.raw), what the loop calls (self.model), and how it computes. An
        `empty` one takes no memory and can only be asked for its sizes."""
        c, device = self.config, self.ranks.device
        self.dtype, self.dtype_why = distributed.choose_dtype(c.dtype, device)
        self.sharded = c.distributed == "fsdp" and self.ranks.world_size > 1
        with torch.device("meta") if self.sharded or empty else contextlib.nullcontext():
            self.raw = self.model_file.build_model(c, self.data.vocab_size)
        if self.sharded and not empty:  # no rank ever holds all of it: shard it empty, then fill it
            self.model = distributed.shard(self.raw, self.ranks, self.dtype)
            self.model.to_empty(device=device)
            for name, p in self.raw.named_parameters():
                distributed.assign(p, self.raw.initial(name, p.shape, c.seed))
        else:
            self.model = self.raw if empty else self.raw.to(device)
        self.compiled = c.compile == "true" or c.compile == "auto" and report.compile_pays(self)
        if self.compiled and not empty:
            self.raw.compile()  # in place: no wrapper, and state_dict keeps its names
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype == torch.float16)
        # A GPU runs behind the host: there a step's numbers are judged while the next one runs.
        self.lag = (device.type == "cuda" and c.on_spike == "warn" and not self.sharded
                    and not self.scaler.is_enabled())

    def build_optimizer(self, log):
        """The optimizer, then DDP, which must know which parameters it froze."""
        c = self.config
        muon = dict(lr=c.muon_lr, momentum=c.muon_momentum, weight_decay=c.muon_weight_decay)
        self.optimizer = configure_optimizers(
            self.raw, c.weight_decay, c.learning_rate, (c.beta1, c.beta2), c.adam_eps,
            muon if c.optimizer == "muon" else None, c.lr_groups, log)
        if not self.sharded:
            self.model = distributed.wrap_ddp(self.raw, self.ranks)

    def start(self):
        """Everything up to the first step: folder, model, checkpoint, log, optimizer."""
        c = self.given
        if c.tracker:
            from train.trackers import check_trackers
            check_trackers(c.tracker)  # a missing package ends here, before any work
        distributed.from_main(self.lock_folder, self.ranks)
        self.build_model()
        specs = distributed.from_main(lambda: resume.find(self), self.ranks)
        machine = dict(world_size=self.ranks.world_size, device=str(self.ranks.device))
        self.log = Logger(c.out_dir, main=self.ranks.main, trackers=c.tracker, config=asdict(c),
                          system_info=machine)
        if self.ranks.main and not c.eval_only:
            try:
                write_yaml(os.path.join(c.out_dir, "config.yaml"), to_yaml(c))
                write_training_args(c.out_dir, asdict(c), machine)
            except OSError as error:  # a full disk; saving may find room again
                self.log.warn(f"config.yaml and training_args.json were not written: {error}")
        self.data.announce(self.log.info)
        report.start_up(self, self.log.info)
        if specs is None and c.init_from != "scratch":
            resume.load_weights(self, c.init_from)
        self.build_optimizer(self.log.info)
        if specs is not None:
            resume.restore(self, specs)
            self.log.info(f"Resuming from {c.out_dir} at iter {self.progress.iter_num}")
        elif c.resume == "auto":
            self.log.info(f"No checkpoint in {c.out_dir}: starting from scratch")
        if c.auto_batch:
            from train.auto_batch import fit_micro_batch
            fit_micro_batch(self)

    def lock_folder(self):
        """Make out_dir ours alone (rank 0)."""
        out = self.config.out_dir
        if os.path.lexists(out) and not os.path.isdir(out):
            raise checkpoint.CheckpointError(f"out_dir: {out} is a file; expected a folder")
        try:
            os.makedirs(out, exist_ok=True)
            self.lock = FolderLock(out)
            checkpoint.remove_leftovers(out)
        except OSError as error:
            raise checkpoint.CheckpointError(f"out_dir: {out} cannot be used: {error}") from error

    # -------------------------------------------------------------------------
    # the run

    def fit(self):
        """Train until the end, a signal, or a number that is not finite."""
        p, c = self.progress, self.config
        if c.eval_only:
            validate(self)
            return self.summary()
        if self.stopping.over or p.finished and p.iter_num >= c.max_iters:
            more = "--early_stopping_patience" if self.stopping.over else "--max_iters"
            self.log.info(f"This run is finished at iter {p.iter_num}: "
                          f"{p.finished or 'early stopping'}. A larger {more} continues it, "
                          "--resume never starts afresh.")
            return self.summary()
        p.finished, self.clock, self.logged = "", time.perf_counter(), p.iter_num
        self.first = p.iter_num
        while not p.finished:
            stop, save = self.signals.agree(self.ranks)
            if stop:
                self.stop(stop)
            done = p.iter_num >= c.max_iters
            if p.evaluated != p.iter_num and (self.is_due(c.eval_interval) or done):
                if c.eval_interval and not validate(self):
                    continue  # asked to stop meanwhile
            if done:
                p.finished = f"max_iters {c.max_iters} reached"
            elif save or self.save_is_due():
                resume.save(self)
            if not p.finished:
                self.train_step()
        resume.save_or_fail(self)
        self.finish()
        return self.summary()

    def is_due(self, interval):
        return interval > 0 and self.progress.iter_num % interval == 0

    def save_is_due(self):
        unsaved = self.saved_at != self.progress.iter_num
        return self.best_due or self.is_due(self.config.save_interval) and unsaved

    def train_step(self):
        """One optimizer step: micro-batches forward and backward, clip, judge, update."""
        it = self.progress.iter_num
        slow = it == self.first or self.overhead  # may compile, or wait for rank 0's save
        self.watchdog.arm(factor=10 if slow else 1)
        fault.point("before_step", it)
        lr = self.set_lr(it)
        distributed.seed_step(self.config.seed, it, self.ranks.rank)
        loss = self.forward_backward(it)
        norm = self.clip_gradients()
        fault.point("before_opt", it)
        numbers = self.collect(it, lr, loss, norm)
        if self.lag:
            # The device itself skips an update that is not finite; the host hears a step later.
            self.optimizer.found_inf = (~torch.isfinite(norm)).float()
            numbers, self.pending = self.pending, numbers
        verdict = judge(self, numbers) if numbers is not None else "update"
        if verdict == "rewind":
            return resume.rewind(self)
        if verdict == "update":
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.iter_num += 1

    def set_lr(self, it):
        """Set every group's learning rate for step `it`; returns that of the plain group."""
        lr = get_lr(it, self.config) * self.plateau.scale
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (lr / self.config.learning_rate)
        return lr

    def forward_backward(self, it):
        """Gradients of the mean loss over this rank's share of the global batch; that loss."""
        n, total = self.accumulation, 0.0
        first = (it + self.progress.data_shift) * n
        with self.autocast():  # around all micro-batches: eager code then casts each weight once
            for micro in range(n):
                batch = self.get_batch(first + micro)
                with distributed.gradient_sync(self.model, last=micro == n - 1):
                    loss, _ = self.call_model(*batch)
                    fault.point("mid_backward", it)
                    with torch.autocast(self.ranks.device.type, enabled=False):
                        self.scaler.scale(loss / n).backward()
                self.prefetch(first + micro + 1)
                total = total + loss.detach()
        if fault.point("bad_loss", it):
            total, self.raw.wte.weight.grad[0, 0] = total * math.nan, math.nan
        return total / n

    def get_batch(self, index):
        """This rank's micro-batch `index` on its device."""
        if self.batch is None or self.batch[0] != index:
            self.prefetch(index)
        return self.batch[1]

    def prefetch(self, index):
        """Prepare a micro-batch while the device works on the one before."""
        started = time.perf_counter()
        self.batch = (index, self.data.train.get_batch(self.ranks.device, index))
        self.loading += time.perf_counter() - started

    def call_model(self, *batch):
        """model(*batch); where compiling fails, say so once and go on without."""
        try:
            return self.model(*batch)
        except Exception as error:
            if not self.compiled or not report.is_compile_error(error):
                raise
            reason = str(error).strip().split("\n")[0][:200]
            self.log.warn(f"torch.compile failed; going on without it (--compile false): {reason}")
            self.compiled = False
            for module in self.raw.modules():
                module._compiled_call_impl = None
            return self.model(*batch)

    def autocast(self):
        enabled = self.dtype != torch.float32
        return torch.autocast(self.ranks.device.type, self.dtype, enabled=enabled)

    def clip_gradients(self):
        """Clip the global gradient norm to grad_clip; returns it as it was before."""
        self.scaler.unscale_(self.optimizer)
        params = [p for g in self.optimizer.param_groups for p in g["params"] if p.grad is not None]
        if self.config.grad_clip:
            return distributed.full(torch.nn.utils.clip_grad_norm_(params, self.config.grad_clip))
        return distributed.full(torch.nn.utils.get_total_norm([p.grad for p in params]))

    def collect(self, it, lr, loss, norm):
        """Loss, averaged over the ranks, and norm on their way to the host."""
        loss = loss.float().reshape(1)
        if self.ranks.world_size > 1:
            dist.all_reduce(loss)
            loss = loss / self.ranks.world_size
        values = torch.cat([loss, norm.float().reshape(1)])
        if not (self.lag and values.is_cuda):
            return StepNumbers(it, lr, values.cpu())
        values, event = values.to("cpu", non_blocking=True), torch.cuda.Event()
        event.record()
        return StepNumbers(it, lr, values, event)

    def settle(self):
        """Judge the step whose numbers are still on their way, if any."""
        if self.pending is not None:
            numbers, self.pending = self.pending, None
            judge(self, numbers)

    # -------------------------------------------------------------------------
    # the end

    def finish(self):
        self.log.plot()
        p, took = self.progress, f"checkpoints held it up for {self.pause:.1f} s"
        skipped = f"; {p.overflows} fp16 steps skipped" if p.overflows else ""
        self.log.info(f"Training complete! {p.finished}; {took}{skipped}")
        self.log.info(report.next_steps(self))

    def stop(self, signum):
        """Save, say how to go on, and leave."""
        resume.save_or_fail(self)
        self.log.info(f"Stopped at iter {self.progress.iter_num}, saved. To resume:")
        self.log.info(report.resume_command(self))
        raise Stopped(signum)

    def summary(self):
        p = self.progress
        return dict(iter_num=p.iter_num, val_loss=p.val_loss, best_val_loss=p.best_val_loss,
                    finished=p.finished)


def load_model_file(name):
    """The module model/NAME.py."""
    if importlib.util.find_spec(f"model.{name}") is None:
        raise distributed.SetupError(f"model: there is no model/{name}.py; expected gpt, or a file "
                                     "of yours with build_model(config, vocab_size)")
    return importlib.import_module(f"model.{name}")


def micro_batch_size(config, world_size, most=None):
    """The largest micro-batch of at most `most` (batch_size) that divides a rank's share of the
    step."""
    share = config.sequences_per_step // world_size
    return next(b for b in range(min(most or config.batch_size, share), 0, -1) if share % b == 0)
