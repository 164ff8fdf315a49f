"""The training loop. Read Trainer from top to bottom: set up, run, one step, evaluation, the end.

The loop does not know what it trains. It asks a loader for the batches of a step and a model for a
loss, `loss, metrics = model(*batch)`; the file model/NAME.py that the config names builds it.
Saving and resuming are in train/resume.py; where it computes, in train/distributed.py.
"""

import contextlib
import importlib
import math
import os
import time
from dataclasses import asdict

import torch
import torch.distributed as dist

from train import checkpoint, distributed, fault, report, resume
from train.early_stopping import EarlyStopping
from train.evaluate import evaluate
from train.guard import BadNumbers, Signals, SpikeDetector, Stopped, Watchdog
from train.help import to_yaml
from train.lock import FolderLock
from train.logger import Logger, write_training_args, write_yaml
from train.lr_scheduler import ReduceOnPlateau, get_lr, resolve_lengths
from train.optimizer import configure_optimizers
from train.progress import Progress, StepNumbers
from train.saver import Saver
from train.token_data import open_token_data

MAX_OVERFLOWS_IN_A_ROW = 20  # fp16: then it is not the scale that is wrong


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
        trainer.build_model()
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
        self.saved_at, self.best_due = 0, False
        self.on_evaluation = lambda iter_num, numbers: None
        self.model_file = importlib.import_module(f"model.{c.model}")
        distributed.set_seed(c.seed, c.deterministic)
        self.open_data(c)

    def __enter__(self):
        self.signals.__enter__()
        return self

    def __exit__(self, kind, error, trace):
        self.watchdog.disarm()
        self.signals.__exit__()
        with contextlib.suppress(Exception):  # the folder is ours until its last save is over
            self.saver.wait()
        if self.log is not None:
            self.log.close("finished" if kind is None else "failed")
        if self.lock is not None:
            self.lock.release()

    def open_data(self, config):
        """Loaders for the largest micro-batch that fits `config`, and the lengths that depend on
        how much data there is."""
        self.micro_batch = micro_batch_size(config, self.ranks.world_size)
        make = getattr(self.model_file, "open_data", open_token_data)
        self.data, self.batch = make(self.given, self.micro_batch, self.ranks), None
        self.config = resolve_lengths(self.given, self.data.train.tokens_per_epoch)

    @property
    def accumulation(self):
        """Micro-batches a rank computes in one step."""
        return self.config.sequences_per_step // (self.ranks.world_size * self.micro_batch)

    def build_model(self):
        """The bare model (self.raw), what the loop calls (self.model), and how it computes."""
        c, device = self.config, self.ranks.device
        self.dtype, self.dtype_why = distributed.choose_dtype(c.dtype, device)
        self.sharded = c.distributed == "fsdp" and self.ranks.world_size > 1
        with torch.device("meta") if self.sharded else contextlib.nullcontext():
            self.raw = self.model_file.build_model(c, self.data.vocab_size)
        if self.sharded:  # no rank ever holds the whole model: shard it empty, then fill it
            self.model = distributed.shard(self.raw, self.ranks, self.dtype)
            self.model.to_empty(device=device)
            for name, p in self.raw.named_parameters():
                distributed.assign(p, self.raw.initial(name, p.shape, c.seed))
        else:
            self.raw.to(device)
            self.model = self.raw
        self.compiled = c.compile == "true" or c.compile == "auto" and report.compile_pays(self)
        if self.compiled:
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
        distributed.from_main(self.lock_folder, self.ranks)
        self.build_model()
        specs = distributed.from_main(lambda: resume.find(self), self.ranks)
        self.log = Logger(c.out_dir, main=self.ranks.main, trackers=c.tracker, config=asdict(c))
        if self.ranks.main:
            write_yaml(os.path.join(c.out_dir, "config.yaml"), to_yaml(c))
            write_training_args(c.out_dir, asdict(c), dict(world_size=self.ranks.world_size,
                                                           device=str(self.ranks.device)))
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
        if p.finished.startswith("early") or p.finished and p.iter_num >= c.max_iters:
            self.log.info(f"This run is finished at iter {p.iter_num}: {p.finished}. A larger "
                          "--max_iters continues it, --resume never starts afresh.")
            return self.summary()
        p.finished, self.clock, self.logged = "", time.perf_counter(), p.iter_num
        while not p.finished:
            self.watchdog.arm(factor=10)  # evaluation, saving and compiling take longer than a step
            stop, save = self.signals.agree(self.ranks)
            if stop:
                self.stop(stop)
            done = p.iter_num >= c.max_iters or c.eval_only
            if p.evaluated != p.iter_num and (self.is_due(c.eval_interval) or done):
                if c.eval_interval and not self.validate():
                    continue  # asked to stop meanwhile
            if c.eval_only:
                return self.summary()
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
        if self.logged < it:  # not the first step, which may compile
            self.watchdog.arm()
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
        verdict = self.judge(numbers) if numbers is not None else "update"
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
        self.batch = (index, self.data.train.get_batch(self.ranks.device, index))

    def call_model(self, *batch):
        """model(*batch); where compiling fails, say so once and go on without."""
        try:
            return self.model(*batch)
        except Exception as error:
            if not self.compiled or not report.is_compile_error(error):
                raise
            reason = str(error).strip().split("\n")[0][:200]
            self.log.warn(f"torch.compile failed; going on without it (--compile false): {reason}")
            self.raw._compiled_call_impl, self.compiled = None, False
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

    def judge(self, numbers):
        """Look at the numbers of a step and log them: "update", "skip" or "rewind". The same on
        every rank, since loss and norm are."""
        p, c, (loss, norm) = self.progress, self.config, numbers.read()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return self.not_finite(numbers.it, loss, norm, numbers.lr)
        p.overflows_in_a_row, verdict = 0, "update"
        if self.spikes.update(loss):
            self.log.warn(f"iter {numbers.it}: loss {loss:.4f} is a spike (norm {norm:.2f}, "
                          f"windows at {self.windows(numbers.it)}); on_spike: {c.on_spike}")
            if c.on_spike == "rewind" and p.rewinds < resume.MAX_REWINDS:
                return "rewind"
            verdict = "skip" if c.on_spike == "skip" else "update"
        p.loss_sum, p.loss_count = p.loss_sum + loss, p.loss_count + 1
        if numbers.it % c.log_interval == 0 or numbers.it + 1 == c.max_iters:
            self.log_step(numbers.it, loss, norm, numbers.lr)
        return verdict

    def not_finite(self, it, loss, norm, lr):
        """fp16: the scaler lowers its scale and skips the step. Else stop before the update."""
        p = self.progress
        if self.scaler.is_enabled() and math.isfinite(loss):
            p.overflows, p.overflows_in_a_row = p.overflows + 1, p.overflows_in_a_row + 1
            if p.overflows_in_a_row <= MAX_OVERFLOWS_IN_A_ROW:
                return "update"  # GradScaler.step() skips it by itself
        self.saver.wait()
        good = os.path.join(self.config.out_dir, "ckpt.pt")
        raise BadNumbers(
            f"iter {it}: not finite: loss {loss}, gradient norm {norm}, lr {lr:.3g}; stopped "
            f"before the update. Windows of the batch start at {self.windows(it)}.\n"
            f"Last good checkpoint: {good if os.path.exists(good) else 'none yet'}. Try a lower "
            "--learning_rate, a longer --warmup_iters, --grad_clip 1.0, --dtype float32 or "
            "--on_spike rewind.")

    def windows(self, it):
        """Where this rank's sequences of step `it` start in the token stream, for messages."""
        n = self.accumulation
        calls = range((it + self.progress.data_shift) * n, (it + self.progress.data_shift + 1) * n)
        starts = [str(s) for i in calls for s in self.data.train.windows(i)]
        return ", ".join(starts[:8]) + ", ..." * (len(starts) > 8)

    def log_step(self, it, loss, norm, lr):
        c, now = self.config, time.perf_counter()
        seconds = (now - self.clock - self.overhead) / max(1, it + 1 - self.logged)
        self.clock, self.logged, self.overhead = now, it + 1, 0.0
        speed = c.tokens_per_step / seconds
        self.log.step(dict(
            iter=it, max_iters=c.max_iters, tokens=(it + 1) * c.tokens_per_step, loss=loss, lr=lr,
            grad_norm=norm, time_ms=seconds * 1000, tokens_per_sec=speed,
            mfu=report.mfu(self.raw, speed, self.ranks, self.dtype),
            eta_s=(c.max_iters - it - 1) * seconds,
            memory_mib=report.peak_memory(self.ranks.device)))

    # -------------------------------------------------------------------------
    # evaluation

    def settle(self):
        """Judge the step whose numbers are still on their way, if any."""
        if self.pending is not None:
            numbers, self.pending = self.pending, None
            self.judge(numbers)

    def validate(self):
        """Evaluate on fixed windows and act on the numbers. False if asked to stop meanwhile."""
        self.settle()
        p, c, started = self.progress, self.config, time.perf_counter()
        fault.point("eval", p.iter_num)
        self.raw.eval()
        numbers = evaluate(self.eval_model(), self.data.val, c.eval_iters, self.ranks,
                           self.autocast, self.data.token_bytes, self.asked_to_stop)
        self.raw.train()
        if numbers is None:
            return False
        p.evaluated, p.val_loss = p.iter_num, numbers["val_loss"]
        train_loss = p.loss_sum / p.loss_count if p.loss_count else None
        p.loss_sum, p.loss_count = 0.0, 0
        self.log.evaluation(dict(iter=p.iter_num, tokens=p.iter_num * c.tokens_per_step,
                                 train_loss=train_loss, **numbers))
        self.react(numbers)
        self.on_evaluation(p.iter_num, numbers)
        self.show_samples()
        self.log.plot()
        self.overhead += time.perf_counter() - started
        return True

    def asked_to_stop(self):
        return bool(distributed.max_over_ranks(self.signals.stop, self.ranks))

    def eval_model(self):
        """What evaluation calls: past the compiled code on a CPU, where compiling once more for it
        costs more than it saves; through FSDP's hooks where the model is sharded."""
        past = self.ranks.device.type == "cpu" and not self.sharded
        return self.raw.forward if past else self.raw

    def react(self, numbers):
        """What follows from an evaluation: best checkpoint, learning rate, early stopping."""
        p, c, val_loss = self.progress, self.config, numbers["val_loss"]
        if val_loss < p.best_val_loss:
            p.best_val_loss, self.best_due = val_loss, p.iter_num > 0
        if c.lr_schedule == "plateau" and self.plateau.update(val_loss):
            self.log.info(f"val_loss has not improved for {c.plateau_patience} evaluations: "
                          f"learning rate x {self.plateau.scale:g}")
        watched = numbers.get(c.early_stopping_metric)
        if c.early_stopping_patience and watched is None:
            known = ", ".join(name for name, value in numbers.items() if value is not None)
            raise distributed.SetupError(f"early_stopping_metric: this evaluation does not yield "
                                         f"{c.early_stopping_metric!r}; choose one of {known}")
        if c.early_stopping_patience and self.stopping.update(watched):
            p.finished = (f"early stopping: no better {c.early_stopping_metric} in "
                          f"{c.early_stopping_patience} evaluations")

    def show_samples(self):
        """Text the model writes so far, from the same prompts and the same seed every time."""
        c, sample_text = self.config, getattr(self.model_file, "sample_text", None)
        if sample_text and c.sample_tokens and self.data.tokenizer and self.ranks.main and (
                not self.sharded):
            self.raw.eval()
            for text in sample_text(self.raw, self.data.tokenizer, c.sample_prompts,
                                    c.sample_tokens, c.seed, self.autocast):
                self.log.samples(self.progress.iter_num, text)
            self.raw.train()

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


def micro_batch_size(config, world_size):
    """The largest micro-batch of at most batch_size that divides a rank's share of the step."""
    share = config.sequences_per_step // world_size
    return next(b for b in range(min(config.batch_size, share), 0, -1) if share % b == 0)
