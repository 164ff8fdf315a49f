"""The training loop. Read it from top to bottom: set up, the loop, one step, evaluation, the end.

The loop does not know what it trains. A file model/NAME.py builds the model and opens its data; a
loader gives the batches of a step, a pure function of its number; the model gives a loss and sums
over the batch, `loss, sums = model(*batch)`. The README's "To fork it" shows all that this takes.
"""

import contextlib
import copy
import functools
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from train import checkpoint, device, distributed, logger, robust
from train.base.errors import BadNumbers, SetupError, Stopped, echo
from train.base.fields import parse_mixture
from train.base.run_folder import RunFolder
from train.config import TrainConfig, load_config, load_model_file, to_yaml
from train.dataloader import open_token_data
from train.evaluate import add_sums, all_reduce, batch_sums, evaluate, to_host, to_numbers
from train.lr_scheduler import EarlyStopping, ReduceOnPlateau, get_lr
from train.optimizer import build_optimizer, clip_gradients
from train.options.compile import ON_OFF, Compiler, should_compile
from train.options.prefetch import Prefetcher

TINY = 1e-9  # below any count (of items, or of their weights where a model weighs them), but not 0


def train(config: TrainConfig, model: torch.nn.Module | None = None,
          on_evaluation: Callable[[int, dict], object] | None = None,
          started: float | None = None) -> dict[str, Any]:
    """The whole run that `config` (a TrainConfig) describes: a dict of last numbers and history.

    model: an nn.Module to train in place of the one that the model file builds.
    on_evaluation(iter_num, numbers) hears of every evaluation; what it raises ends the run.
    started: when max_minutes began, of time.monotonic(); by itself now.
    Raises UserError: Stopped after a signal, BadNumbers when loss or gradients are not
    finite; ConfigError, DataError, CheckpointError, SetupError for what cannot be used.
    """
    with open_trainer(config, model, on_evaluation, started=started) as trainer:
        return trainer.fit()


@contextlib.contextmanager
def open_trainer(config, model=None, on_evaluation=None, kind=None, started=None):
    """A Trainer (or one of another `kind`) that is ready for its first step: what train() does, in
    parts. The end of the `with` gives back the folder, the log and the process group."""
    started = started or time.monotonic()
    typed = {f.name for f in fields(config) if config.is_explicit(f.name)}
    config = load_config(overrides=asdict(config))  # with the checks of one that was read
    config.explicit = typed
    if config.tracker:  # what is missing for them ends here, before any work
        from train.options.trackers import check_trackers
        check_trackers(config.tracker)
    with (distributed.process_group(config) as ranks, contextlib.ExitStack() as at_end):
        if config.max_minutes:
            from train.options.minutes import in_steps
            config = in_steps(config, ranks, started, lambda config, at_end: Trainer(
                config, ranks, at_end, copy.deepcopy(model)))
        yield (kind or Trainer)(config, ranks, at_end, model, on_evaluation)


@dataclass
class Progress:
    """What the loop remembers between steps besides weights and optimizer, in every checkpoint."""
    iter_num: int = 0                  # optimizer steps done
    evaluated: int = -1                # iter_num of the last evaluation
    val_loss: float | None = None      # of the last evaluation
    best_val_loss: float = math.inf
    best_metric: float = math.inf      # of early_stopping_metric; signed, lower is better
    loss_of_best: float = math.inf     # the val_loss then, which decides between equal ones
    loss_sum: float = 0.0              # of the steps since the last evaluation
    loss_count: int = 0
    data_shift: int = 0                # steps of data passed over after rewinds
    rewinds: int = 0
    spikes_in_a_row: int = 0
    overflows: int = 0                 # float16 steps skipped, in all
    overflows_in_a_row: int = 0
    finished: str = ""                 # why the run is over, when it is
    history: list = field(default_factory=list)  # the numbers of every evaluation

    def state_dict(self):
        return asdict(self)

    def load_state_dict(self, state):
        for f in fields(self):  # one of an older version may lack some
            setattr(self, f.name, state.get(f.name, getattr(Progress(), f.name)))


class Trainer:
    """One run, see open_trainer. Its parts know nothing of it: they are handed what they need."""

    # -------------------------------------------------------------------------
    # setting up

    def __init__(self, config, ranks, at_end, model=None, on_evaluation=None):
        # All attributes are made here. What must survive a crash is in `progress` and in the other
        # parts() of a checkpoint; the rest is made again from the configuration.
        self.ranks, self.progress = ranks, Progress()
        self.tested = {}  # the numbers on test data, when there are any
        self.use = getattr(load_model_file(config.model), "USE", "") if model is None else ""
        self.on_evaluation = on_evaluation or (lambda iter_num, numbers: None)
        distributed.set_seed(config.seed, config.deterministic, config.cudnn_benchmark)

        # The folder, ours alone from here on, says where the run starts: afresh, from its own last
        # checkpoint, or from other weights, whose shape the model then takes over.
        self.folder = at_end.enter_context(
            RunFolder(config.out_dir, config.keep_last, config.save_precision))
        start = checkpoint.find_start(self.folder, config, ranks, echo)
        config = config.replace(**start.shape)

        # The data say how long an epoch is: from here on all lengths are in steps.
        self.data = open_data(config, ranks)
        c = self.config = config.in_steps(self.data.train.samples)
        self.n_micro = c.accumulation(ranks.world_size)  # micro-batches of this rank in a step
        self.full_count = c.micro_batch(ranks.world_size) * self.data.train.units_per_sample
        self.units_per_step = c.samples_per_step * self.data.train.units_per_sample

        # The model, bare: what is saved. `wrapped` is what computes a training step.
        self.dtype, why = device.choose_dtype(c.dtype, ranks.device)
        self.autocast = functools.partial(torch.autocast, ranks.device.type, self.dtype,
                                          enabled=self.dtype != torch.float32)
        self.sharded = c.distributed == "fsdp" and ranks.world_size > 1
        self.model = self.wrapped = self.build_model(model)
        self.flops_per_step = device.flops_per_step(self.model, c, self.data.train)
        if start.kind == "resume":
            checkpoint.check_fits(start, c, self.data, self.model, ranks, echo)

        self.tasks = None
        if c.eval_tasks:  # questions that are answered at every evaluation
            from model.eval.tasks import Tasks
            self.tasks = Tasks(c, self.data, self.model, ranks)
        compiled = should_compile(c, self.flops_per_step, ranks)
        # The log, which begins here: nothing is written into a folder that cannot be used.
        self.log = at_end.enter_context(self.open_log(f"{why}; compile {ON_OFF[compiled]}"))
        at_end.callback(self.folder.wait)  # the save under way may still have something to say
        if self.tasks:
            self.log.info(self.tasks.told)

        self.compiler = Compiler(self.model, compiled, ranks.device, self.log.warn,
                                       c.batch_size)
        # Weights to start from come before the optimizer. The optimizer may freeze some parameters,
        # so it comes before DDP, which wants to know which ones learn.
        if start.kind == "init_from":
            checkpoint.load_weights(self.model, start, c, self.data.spec, ranks, self.log.info)
        # A model that starts from trained weights may be at its best before its first step.
        self.trained = c.init_from != "scratch" or not all(
            p.requires_grad for p in self.model.parameters())
        self.optimizer, self.average = build_optimizer(self.model, c, self.log.info), None
        if c.ema:
            from train.options.ema import Average
            self.average = Average(self.optimizer, c.ema)
        self.scaler = torch.amp.GradScaler(ranks.device.type, enabled=self.dtype == torch.float16)
        if not self.sharded:
            self.wrapped = distributed.wrap_ddp(self.model, ranks)

        # What reacts to the numbers, and what watches over the run.
        self.stopping = EarlyStopping(c.early_stopping_patience, c.early_stopping_min_delta,
                                      c.early_stopping_mode)
        self.plateau = ReduceOnPlateau(c.lr_factor, c.plateau_patience,
                                       least=(c.min_lr or 0.0) / c.learning_rate)
        self.spikes, self.signals = robust.SpikeDetector(c.spike_sigma), robust.Signals()
        self.watchdog = at_end.enter_context(robust.Watchdog(c.step_timeout))
        self.clock = logger.Clock()
        self.batches = Prefetcher(self.data.train, ranks.device)
        at_end.callback(self.batches.close)
        self.saved_at, self.best_due = 0, False  # iter_num of the last save; ckpt_best.pt is due
        self.begin(start)

    def begin(self, start):
        """Be where the run starts, and say where that is."""
        c = self.config
        if start.kind == "resume":
            if c.resume_file and not c.eval_only:
                self.folder.archive_later_checkpoints(start.outline["iter_num"], self.log.info)
            self.restore(start)
            self.log.info(f"Resuming from {start.path} at iter {self.progress.iter_num}")
        elif start.kind == "scratch":
            self.log.info(f"No checkpoint in {c.out_dir}: starting from scratch")

    def build_model(self, model=None):
        """The bare model on its device: `model`, or what the model file builds. No rank ever holds
        all of a sharded one: it is built empty, sharded, and then filled."""
        c, ranks = self.config, self.ranks
        if model is None:
            with torch.device("meta") if self.sharded else contextlib.nullcontext():
                model = load_model_file(c.model).build_model(c, self.data)
        if self.sharded:
            return distributed.shard(model, ranks, self.dtype, c.seed)
        return model.to(ranks.device)

    def open_log(self, precision):
        c, ranks = self.config, self.ranks
        machine = dict(world_size=ranks.world_size, **device.device_facts(ranks.device))
        log = logger.Logger(c.out_dir, main=ranks.is_main, trackers=c.tracker, config=asdict(c),
                            system_info=machine)
        if ranks.is_main and not c.eval_only:
            log.describe_run(to_yaml(c), asdict(c), machine)
        logger.start_up(log.info, c, ranks, self.data, self.model,
                        device.describe_device(ranks.device), precision, self.flops_per_step)
        return log

    # -------------------------------------------------------------------------
    # the run

    def fit(self):
        """Train until the end, a signal, or a number that is not finite; the run's result."""
        p, c = self.progress, self.config
        self.check_metric()
        if c.eval_only:
            if self.data.val is None:
                raise SetupError("eval_only: these data have no validation part")
            self.validate()
        elif p.finished and (limits := self.limits()):
            self.log.info(f"This run is finished at iter {p.iter_num}: {p.finished}. A larger "
                          f"{' and '.join(limits)} continues it; with `--resume never` it "
                          "starts afresh.")
            self.tested = self.log.read_tested()
            if self.data.test is not None and not self.tested:
                self.test()  # it was stopped before that
        else:
            with self.signals:  # from here on there is something to save
                self.run()
        return dict(iter_num=p.iter_num, val_loss=p.val_loss, best_val_loss=p.best_val_loss,
                    finished=p.finished, history=p.history, test=self.tested)

    def limits(self):
        """The keys that keep the run from going on."""
        reached = {"--max_iters": self.progress.iter_num >= self.config.max_iters,
                   "--early_stopping_patience": self.stopping.over}
        return [key for key, yes in reached.items() if yes]

    def run(self):
        """The loop: evaluate, save and train, each when it is due."""
        p, c = self.progress, self.config
        p.finished = ""  # where a larger max_iters continues a finished run
        self.say_how_long()
        self.clock.start(p.iter_num)
        if p.iter_num and c.resume_file:
            self.save()  # gone on from a FILE: this branch is the folder's latest from here on
        # At the top of the loop everything is whole: the state is that of iter_num steps, and of
        # nothing else. This is where a run stops, is evaluated and saved, in this order: a stop
        # must not wait for an evaluation, and ckpt_best.pt is written right after the one it is of.
        while not p.finished:
            stop, save = self.signals.agree(self.ranks)
            if stop:
                self.stop(stop)
            done = p.iter_num >= c.max_iters
            if self.evaluation_is_due(done):
                numbers = self.validate()  # may end the run: early stopping
                if numbers is None:
                    continue  # asked to stop meanwhile
            if done:
                p.finished = f"max_iters {c.max_iters} reached"
            if not p.finished:
                if save or self.best_due or self.save_is_due():
                    self.save()
                self.train_step()
        self.finish()

    def finish(self):
        """The last save, the test data, and what to do next."""
        p = self.progress
        self.save(last=True)
        self.log.plot()
        self.test()
        if stop := self.signals.agree(self.ranks)[0]:  # while testing: all is saved
            raise Stopped(stop)
        # Some float16 steps always overflow at first, until the loss scale fits.
        skipped = f"; {p.overflows} float16 steps skipped" if p.overflows else ""
        self.log.info(f"Training complete! {p.finished}; checkpoints and evaluations held it up "
                      f"for {self.clock.total_away:.1f} s{skipped}")
        self.log.info(logger.next_steps(self.config, self.use))

    def evaluation_is_due(self, done):
        p, c = self.progress, self.config
        if not c.eval_interval or self.data.val is None or p.evaluated == p.iter_num:
            return False
        if p.iter_num == 0 and not done:
            return c.eval_on_start
        return done or p.iter_num % c.eval_interval == 0

    def save_is_due(self):
        it, every = self.progress.iter_num, self.config.save_every
        return it != self.saved_at and (every > 0 and it % every == 0
                                        or self.config.save_epochs is not None and self.is_kept())

    def is_kept(self):
        """Whether a checkpoint saved now also stays as a numbered file."""
        it, c = self.progress.iter_num, self.config
        if c.save_epochs is None:
            return c.keep_last > 0
        steps = c.save_epochs * self.data.train.samples / c.samples_per_step
        passed, before = (math.floor(i / steps + 1e-9) for i in (it, it - 1))  # 3 x 1/3 is 1
        return it > 0 and passed > before

    # -------------------------------------------------------------------------
    # one step

    def train_step(self):
        """One optimizer step: learning rate, micro-batches, clip, check, update. None of it where
        the ranks are asked to stop before the last micro-batch: the step is done again on resume.
        """
        c, p, ranks, n = self.config, self.progress, self.ranks, self.n_micro
        it = p.iter_num
        self.watchdog.arm(factor=10 if self.clock.unsteady(it) else 1)
        # Every random draw of a step (dropout) is a function of (seed, step, rank), never of what
        # was drawn before: nothing has to be saved for a resumed run to draw the same.
        distributed.seed_step(c.seed, it, ranks)
        # The learning rate is a function of the step; each group scales its own peak by it. The
        # plateau's scale is the one part that looks at results; it is saved with the run.
        lr = get_lr(it, c) * self.plateau.scale
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (lr / c.learning_rate)

        # This rank's share of the global batch, in n micro-batches whose gradients add up. With
        # items i of all micro-batches and ranks, the step's gradient is that of the mean over them,
        #     sum_i grad(loss_i) / count = sum over micro-batches (weight * grad(loss) / n) * factor
        # where weight = items in the micro-batch / full_count is known at once, and factor =
        # n * ranks * full_count / count only at the end. Both are 1 where no item is masked.
        # Autocast is around all of them, so that the weights are cast once.
        first = (it + p.data_shift) * n  # number of the first one among all of this rank's
        sums = {}  # over the micro-batches
        # The first step of a run on a CPU is not compiled: its numbers need not wait for a minute.
        with self.compiler.paused(when=it == 0), self.autocast():
            for micro in range(n):
                if micro and self.signals.stop_agreed(ranks):  # a step may take minutes
                    return self.optimizer.zero_grad(set_to_none=True)
                self.log.activity = f"iter {it}, micro-batch {micro + 1} of {n}"
                batch = self.batches.get(first + micro)  # a tuple of tensors (B, ...)
                # DDP sends gradients in the last micro-batch of a step only; FSDP in each.
                silent = self.wrapped is not self.model and micro < n - 1
                with self.wrapped.no_sync() if silent else contextlib.nullcontext():
                    add_sums(sums, forward_backward(
                        functools.partial(self.compiler.call, self.wrapped), batch, n,
                        self.full_count, self.scaler))
                self.batches.prefetch(first + micro + 1)  # while the device still computes

        sums = all_reduce(sums, ranks)
        factor = (n * self.full_count * ranks.world_size / sums["count"].clamp(min=TINY)).float()
        self.scaler.unscale_(self.optimizer)
        norm = clip_gradients(self.optimizer, c.grad_clip, factor)  # as it was before clipping
        sums, norm = to_host(sums, norm)  # the only place where the host waits for the device

        # From here on everybody has the same numbers, so everybody does the same.
        action = self.check(it, lr, sums, norm)
        if action == "rewind":
            return self.rewind()
        if action == "update":
            self.scaler.step(self.optimizer)
            if self.average:
                self.average.update(it)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)  # frees them: the next step writes, not adds
        p.iter_num += 1
        if hasattr(self.model, "after_step"):  # also after a step whose update was skipped
            self.model.after_step(it, sums)

    def check(self, it, lr, sums, norm):
        """Look at the numbers of a step and log them; what is to be done: "update", "skip" or
        "rewind". The same on every rank, as the numbers are. Raises BadNumbers before an update
        that would do harm."""
        p, c = self.progress, self.config
        count = float(sums["count"])  # 0: a step of no items, which says nothing of the loss
        # Where nothing counted, the mean before stands in: a spike detector must see no jump.
        before = p.loss_sum / p.loss_count if p.loss_count else (p.val_loss or 0.0)
        loss = float(sums["loss"]) / count if count else before
        action, spike = robust.decide_action(loss, norm, p, self.spikes, c.on_spike,
                                    self.scaler.is_enabled())
        if action == "stop":
            self.folder.wait()
            raise BadNumbers(robust.not_finite(it, loss, norm, lr, self.where(it),
                                                    self.folder.file("ckpt.pt")))
        if spike:
            self.log.warn(f"iter {it}: loss {loss:.4f} is a spike (norm {norm:.2f}, "
                          f"{self.where(it)}); {robust.spike_answer(action, c.on_spike)}")
        if action == "rewind" or p.overflows_in_a_row:  # decide_action() counts: the norm is not finite
            return action
        p.loss_sum, p.loss_count = p.loss_sum + loss, p.loss_count + 1
        if it % c.log_interval == 0 or it + 1 == c.max_iters:
            self.log_step(it, lr, sums, norm)
        return action

    def where(self, it):
        """Where this rank's first two micro-batches of step `it` came from, for messages."""
        first = (it + self.progress.data_shift) * self.n_micro
        locate = getattr(self.data.train, "locate", lambda step: f"batch {step}")
        return "; ".join(locate(step) for step in range(first, first + min(self.n_micro, 2)))

    def log_step(self, it, lr, sums, norm):
        # Times are means over the steps since the last line, without evaluations and saves.
        c, loading = self.config, self.batches.seconds
        self.batches.seconds = 0.0
        seconds = self.clock.lap(it, loading, self.log.warn)
        left = (c.max_iters - it - 1) * seconds
        self.clock.announce_end(it, left, self.log.info)
        self.log.step(dict(
            iter=it, max_iters=c.max_iters, tokens=(it + 1) * self.units_per_step,
            unit=self.data.train.unit, lr=lr, grad_norm=norm, time_ms=seconds * 1000,
            tokens_per_sec=self.units_per_step / seconds, eta_s=left,
            mfu=device.mfu(self.flops_per_step / seconds, self.ranks, self.dtype),
            memory_mib=device.peak_memory(self.ranks.device), **to_numbers(self.model, sums)))

    # -------------------------------------------------------------------------
    # evaluation, and what follows from it

    def validate(self):
        """Evaluate on fixed batches and act on the numbers: {val_NAME: number}, or None if asked to
        stop meanwhile."""
        p, c = self.progress, self.config
        self.watchdog.arm(factor=10)  # this takes longer than a step
        with self.clock.away(), self.log.busy("evaluating"):
            numbers = self.evaluate(self.data.val, c.eval_iters, more=True)
            if numbers is None:
                return None
            # Noted before anything reacts, for what is saved in the course of that.
            p.evaluated, p.val_loss = p.iter_num, numbers["val_loss"]
            record = dict(iter=p.iter_num, tokens=p.iter_num * self.units_per_step,
                          train_loss=p.loss_sum / p.loss_count if p.loss_count else None, **numbers)
            if c.max_epochs is not None:  # a run in epochs prints one line an epoch
                record |= dict(epoch=p.iter_num * c.samples_per_step / self.data.train.samples,
                               lr=get_lr(p.iter_num, c) * self.plateau.scale)
            self.log.evaluation(record, steps=p.loss_count)
            p.history.append(record)
            p.loss_sum, p.loss_count = 0.0, 0
            self.react(numbers)
            self.on_evaluation(p.iter_num, numbers)
            if p.iter_num and c.sample_tokens:
                self.show_samples()
            self.log.plot()
        return numbers

    def evaluate(self, loader, batches, more=False):
        """{val_NAME: number} over `batches` fixed batches, or None if asked to stop meanwhile.
        more: with the tasks', and, if there is one, with {val_NAME_ema: number} of the weights'
        running average."""
        def stop(done, n):
            self.log.activity = f"evaluating, batch {done} of {n}"
            self.watchdog.arm(factor=10)  # a limit on the time of a batch, not of all of them
            return bool(self.signals.stop)

        def numbers():
            with self.eval_mode():
                found = evaluate(self.model, functools.partial(self.compiler.call, self.model),
                                 loader, batches, self.ranks, self.autocast, stop)
                if more and self.tasks and found is not None:
                    found = self.tasks.evaluate(found, batches, self.ranks, self.autocast, stop)
                return found
        return self.average.beside(numbers) if more and self.average else numbers()

    @contextlib.contextmanager
    def eval_mode(self):
        """Without dropout and, on a CPU, without compiling anew for it."""
        self.model.eval()
        try:
            with self.compiler.paused():
                yield
        finally:
            self.model.train()
            distributed.reshard(self.model)

    def react(self, numbers):
        """Best checkpoint, learning rate, early stopping."""
        p, c, watched = self.progress, self.config, numbers[self.config.early_stopping_metric]
        p.best_val_loss = min(p.best_val_loss, numbers["val_loss"])
        # `sign` makes lower better for every metric, and of equal numbers the lower loss is better.
        known = watched is not None  # or this evaluation had no item for it
        if known and (p.iter_num or self.trained):
            now = self.stopping.sign * watched, numbers["val_loss"]
            if now < (p.best_metric, p.loss_of_best):
                p.best_metric, p.loss_of_best = now
                self.best_due = True
        if c.lr_schedule == "plateau" and self.plateau.update(numbers["val_loss"]):
            self.log.info(f"val_loss has not improved for {c.plateau_patience + 1} evaluations: "
                          f"learning rate x {self.plateau.scale:g}")
        if known and c.early_stopping_patience and self.stopping.update(watched):
            p.finished = (f"early stopping: no better {c.early_stopping_metric} in "
                          f"{c.early_stopping_patience} evaluations")

    def check_metric(self):
        """Refuse an early_stopping_metric that evaluations will not have, before any work."""
        name = self.config.early_stopping_metric
        if name == "val_loss" or self.data.val is None or not self.config.eval_interval:
            return
        known = list(self.evaluate(self.data.val, 1, more=True))
        # None in one batch is not None in all: a name is enough.
        if name not in known:
            raise SetupError(f"early_stopping_metric: evaluations of this model do not "
                                         f"yield {name!r}; choose one of {', '.join(known)}")

    def test(self):
        """At the very end: the best weights on data that nothing was chosen by. They stay in the
        model; what was trained last is saved."""
        p, loader = self.progress, self.data.test
        if loader is None:
            return
        weights = checkpoint.load_best(self.model, self.folder, self.ranks)
        numbers = self.evaluate(loader, loader.samples + 1) or {}  # asked to stop: as it is
        self.tested = {f"test_{n.removeprefix('val_')}": v for n, v in numbers.items()}
        if numbers:
            self.log.info(f"On test data, with {weights}:")
            self.log.evaluation(dict(iter=p.iter_num, tokens=p.iter_num * self.units_per_step,
                                     **self.tested))

    def show_samples(self):
        """What the model makes so far, from the same prompts and seed every time: a sharded model
        on all ranks, which must compute together, else on rank 0. A sample never ends a run."""
        sample = getattr(load_model_file(self.config.model), "sample", None)
        it = self.progress.iter_num
        if sample is None or not (self.ranks.is_main or self.sharded):
            return
        self.log.activity = "sampling"
        try:
            with self.eval_mode(), torch.no_grad(), self.autocast():
                texts = sample(self.model, self.data, self.config)
        except Exception as error:
            return self.log.warn(f"no samples: {type(error).__name__}: {error}")
        for text in texts:
            self.log.samples(it, text, whole=it >= self.config.max_iters)

    # -------------------------------------------------------------------------
    # checkpoints: the state_dict of every part, and back (train/checkpoint.py)

    def parts(self):
        """{name in the checkpoint: part} of all that has state besides model and optimizer."""
        return dict(progress=self.progress, scaler=self.scaler, plateau=self.plateau,
                    early_stopping=self.stopping, spikes=self.spikes)

    def save(self, last=False):
        """Save in the background; the last save is waited for, and must succeed. All ranks call."""
        self.watchdog.arm(factor=10)  # saving takes longer than a step
        with self.clock.away(), self.log.busy("saving the checkpoint"):
            self.folder.wait()  # until the memory of the save before is free
            checkpoint.check_finite(self.model, self.optimizer, self.progress.iter_num,
                                self.folder.file("ckpt.pt"), self.ranks)
            # All ranks gather what is sharded; rank 0 writes, and tells the others how it went.
            state = checkpoint.make_checkpoint(self.config, self.data, self.model, self.optimizer,
                                           self.parts(), self.ranks, self.folder.can_pin_memory)
            distributed.broadcast_from_rank0(
                lambda: self.folder.save(state, self.best_due, self.is_kept(), self.log, last,
                                         private=self.sharded), self.ranks)
        self.saved_at, self.best_due = self.progress.iter_num, False

    def restore(self, start):
        """Go on from the checkpoint that `start` has found."""
        p = self.progress
        checkpoint.restore(start, self.config, self.model, self.optimizer, self.parts(), self.ranks,
                       self.log.warn)
        self.saved_at, self.best_due = p.iter_num, False
        if self.config.eval_only:  # the run's own numbers stay as they are
            self.log.first_iter = self.log.last_eval = p.iter_num
        else:
            self.log.rewind(p.iter_num, evaluated=p.evaluated == p.iter_num)

    def rewind(self):
        """After a spike: back to the last checkpoint, and on past the batches that led to it."""
        p = self.progress
        # The checkpoint's own counts are of before the spike: what was learned since is kept here.
        bad, shift, rewinds = p.iter_num, p.data_shift, p.rewinds
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.update()  # or it would take the next step's gradients for unscaled already
        self.folder.wait()
        start = checkpoint.find_latest(self.folder, self.ranks, echo)
        if start.kind == "scratch":
            raise BadNumbers(f"iter {bad}: a loss spike, and no checkpoint to rewind to yet")
        self.restore(start)
        passed = bad + 1 - p.iter_num  # with the batch whose loss it was
        p.data_shift, p.rewinds = shift + passed, rewinds + 1
        self.clock.start(p.iter_num)
        self.log.warn(f"rewound to iter {p.iter_num}, passing over {passed} batches "
                      f"({p.rewinds} of {robust.MAX_REWINDS} rewinds)")

    # -------------------------------------------------------------------------
    # beginning and end

    def say_how_long(self):
        """On a CPU, where a step may take half a minute: how long it all will take, from a few
        samples forward and backward, before the first step is waited for."""
        c, ranks = self.config, self.ranks
        if ranks.device.type != "cpu" or self.flops_per_step < 1e12:
            return
        with self.log.busy("timing a few samples"), self.compiler.paused(), self.autocast():
            seconds = logger.time_sample(
                lambda batch: forward_backward(self.model, batch, 1, self.full_count, self.scaler),
                self.data.train, ranks.device)
        self.model.zero_grad(set_to_none=True)
        self.log.info(logger.how_long(seconds * c.samples_per_step / ranks.world_size, c,
                                      self.progress.iter_num))

    def stop(self, signum):
        """Save, say how to go on, and leave."""
        self.save(last=True)
        self.log.info(f"Stopped at iter {self.progress.iter_num}, saved. To resume:")
        self.log.info(logger.resume_command(self.config, self.ranks))
        raise Stopped(signum)


def forward_backward(forward, batch, n, full_count, scaler):
    """Adds the gradient of a micro-batch, one of `n` in a step; returns its sums {name: tensor}.
    Whoever times a step computes it by this function, too (train/tools/bench.py).

    forward: the model, or what wraps it. full_count: items in a micro-batch where all count.
    """
    loss, sums = forward(*batch)  # the mean over the batch's items
    # See the formula in train_step: 1 where the micro-batch is full.
    weight = sums["count"] / full_count if "count" in sums else 1.0
    # Autocast is for forward passes: in backward it would cast what our own functions compute.
    with torch.autocast(loss.device.type, enabled=False):
        scaler.scale(loss * weight / n).backward()
    return batch_sums(loss, sums, full_count)


def open_data(config, ranks):
    """The Data of a run: what the model file opens, else the token files of data_dir; of several
    folders with weights, a mixture of theirs."""
    opened = getattr(load_model_file(config.model), "open_data", open_token_data)
    if weights := parse_mixture(config.data_dir):
        from train.options.mixture import mix
        data = mix({f: opened(config.replace(data_dir=f), ranks) for f in weights}, weights)
    else:
        data = opened(config, ranks)
    checkpoint.check_plain(data.spec, "Data.spec")
    return data
