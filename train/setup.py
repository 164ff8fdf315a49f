"""The state of a run, and how it is opened: folder, data, model, optimizer, monitors.

`with open_run(config, ranks) as run` resumes or starts a run, ready for the next step;
train/train.py trains it. The state that must survive a crash is in the model, the optimizer and
`run.parts()`; everything that remains is rebuilt from the configuration.
"""

import contextlib
import functools
import math
import os
import re
from dataclasses import asdict, dataclass, field, fields, replace

import torch

from train import checkpoint, dataloader, device, distributed, logger, robust
from train.base.adamw import AdamW
from train.base.errors import ConfigError, DataError, SetupError, Stopped, UserError
from train.base.fields import parse_mixture
from train.base.run_folder import RunFolder
from train.config import check_allowed, check_epochs, load_config, needing_evaluations, to_yaml
from train.dataloader import Data, Prefetcher, as_loader, seed_step
from train.device import ON_OFF, Compiler, should_compile
from train.lr_scheduler import EarlyStopping, ReduceOnPlateau, SpikeDetector
from train.optimizer import Muon, build_optimizer
from train.system import bind_before_step, flops_per_step, hook, load_model_type


@dataclass
class Progress:
    """State of the training loop in every checkpoint, besides weights and optimizer."""
    iter_num: int = 0                  # number of completed optimizer steps
    evaluated: int = -1                # iter_num of the last evaluation
    val_loss: float | None = None      # of the last evaluation
    best_val_loss: float = math.inf
    best_metric: float = math.inf      # early_stopping_metric, signed so that lower is better
    loss_of_best: float = math.inf     # val_loss at best_metric; decides between equal metrics
    loss_sum: float = 0.0              # of the steps since the last evaluation
    loss_count: int = 0
    spikes_in_a_row: int = 0
    overflows: int = 0                 # float16 steps without an update, in total
    overflows_in_a_row: int = 0
    finished: str = ""                 # reason why the run is over; "": it is not
    # Whether the evaluation of step 0 may be the best: not with untrained weights.
    first_eval_counts: bool = True
    history: list = field(default_factory=list)  # the numbers of every evaluation

    def state_dict(self):
        return asdict(self)

    def load_state_dict(self, state):
        for name, default in vars(Progress()).items():  # an older checkpoint may lack some
            value = state.get(name, default)  # of the right type, or restore() refuses it
            setattr(self, name, value if default is None else type(default)(value))

    def recent_loss(self):
        """Return a masked step's loss: mean since the last evaluation, else val_loss, else 0."""
        return self.loss_sum / self.loss_count if self.loss_count else self.val_loss or 0.0


class Run:
    """The state of one run: config, ranks, model, optimizer, data, log, progress and monitors.

    open_run() makes a Run and calls open_folder, open_data, open_model, open_optimizer and
    open_monitors in this order; these methods set the attributes. on_evaluation: as for train().
    Only functions in train/train.py have a Run as an argument.
    """

    def __init__(self, config, ranks, on_evaluation=None):
        # TrainConfig. open_folder() adds the shape of inherited weights, open_data() converts
        # lengths in epochs to steps.
        self.config = config
        self.ranks = ranks  # Ranks: rank, world_size, device
        # Functions and constants of model/NAME.py (train/system.py).
        self.model_type = load_model_type(config.model)
        self.on_evaluation = on_evaluation or (lambda iter_num, numbers: None)
        self.progress = Progress()
        self.test_numbers = {}  # on the test data, after the final evaluation
        self.saved_at = 0       # iter_num of the last save
        self.best_due = False   # the next save also writes ckpt_best.pt
        self.is_taken = False   # whether out_dir is prepared for this run
        # best_metric and loss_of_best before the last improvement.
        self.best_before = math.inf, math.inf
        self.folder = RunFolder(config.out_dir, config.keep_last, config.save_precision)
        # Console, train.log, metrics.jsonl, trackers. Until take_folder(), which may still move
        # files of an earlier run, only the console is written.
        self.log = logger.Logger(
            self.folder.path, main=ranks.is_main, trackers=config.tracker, config=asdict(config),
            system_info=dict(world_size=ranks.world_size, **device.device_facts(ranks.device)))
        self.log.held = []

    def open_folder(self, stack):
        """Create out_dir, lock it until `stack` is closed, and set self.start, a Start.

        self.config takes the shape of the weights that init_from names, also when such a run is
        resumed. UserError if out_dir is already locked; CheckpointError if a checkpoint cannot be
        used.
        """
        c = self.config
        stack.callback(self.folder.close)
        # Creates and locks the folder.
        self.start = checkpoint.find_start(self.folder, c, self.ranks, self.log.info)
        self.config = c.inherit(self.start.shape)

    def open_data(self, data=None):
        """Set self.data: `data` (a Data) or, if `None`, the data in data_dir.

        Lengths in epochs in self.config become steps. Also set n_micro (micro-batches per step of
        this rank), full_count (tokens or rows per micro-batch of this rank, including masked ones)
        and units_per_step (tokens or rows per step, over all ranks). Raises UserError.
        """
        self.data = open_data(self.config, self.ranks, data)
        dataloader.check_loader(self.data.train, self.config, self.ranks)
        check_allowed(self.config, self.data.spec, self.start.state or {})
        settings = needing_evaluations(self.config)
        if self.data.val is None and self.config.evaluates and settings:
            raise SetupError(f"{settings[0]} needs evaluations, and the data has no validation "
                             "split")
        if self.start.kind != "resume":
            check_epochs(self.config, self.data.train.samples)
        # Now, before a thread reads the data too.
        self.log.test_data = str(self.data.fingerprints()["test"])
        c = self.config = self.config.in_steps(self.data.train.samples)
        world_size = self.ranks.world_size
        self.n_micro = c.accumulation(world_size)
        self.full_count = c.micro_batch(world_size) * self.data.train.units_per_sample
        self.units_per_step = c.samples_per_step * self.data.train.units_per_sample

    def open_model(self, stack, model=None):
        """Set self.raw_model: `model` (an nn.Module) or, if `None`, a new model of the model type.

        If the run is resumed, check that the checkpoint fits. Log the plan and, if
        should_compile(), compile the model in place. When `stack` is closed, saves are completed,
        the log is closed, and compiling and freezing undone. Raises UserError.
        """
        c = self.config
        ranks = self.ranks
        self.dtype, reason = device.choose_dtype(c.dtype, ranks.device)
        # With FSDP and HSDP every rank holds a part of each tensor.
        self.sharded = c.shards_model(ranks.world_size)
        # autocast() is the context of every forward pass. FSDP loses the gradients of weights that
        # were cast in an earlier micro-batch.
        self.autocast = functools.partial(
            torch.autocast, ranks.device.type, self.dtype, enabled=self.dtype != torch.float32,
            cache_enabled=not self.sharded)
        # The bare model is evaluated, sampled and saved; `model`, the same under DDP, is trained.
        # A compiled model would be saved with other names; the run compiles it.
        self.raw_model = self.build_model(getattr(model, "_orig_mod", model))
        dataloader.check_item_names(self.raw_model, self.data.train)
        self.raw_model.train()  # load_model() and from_pretrained() return models in eval mode
        # The caller may train the model again, with other lr_groups, which freeze parameters.
        trainable = [p for p in self.raw_model.parameters() if p.requires_grad]
        stack.callback(lambda: [p.requires_grad_() for p in trainable])
        # An interrupted step is repeated after the resume, except where the forward pass may change
        # buffers (BatchNorm): a stop then waits for the end of the step.
        buffers = dict(self.raw_model.named_buffers()).keys()
        self.can_repeat_step = buffers.isdisjoint(self.raw_model.state_dict())
        checkpoint.make_savable(self.raw_model)
        self.model = self.raw_model
        # Over all ranks; 0: unknown.
        self.flops_per_step = flops_per_step(self.raw_model, c, self.data.train)
        self.peak_flops = device.total_peak_flops(ranks, self.dtype) if self.flops_per_step else 0
        if self.start.kind == "resume":
            checkpoint.check_fits(self.start, c, self.data, self.raw_model, ranks)
        self.tasks = None  # evaluates task files
        if c.eval_tasks:
            from model.eval.tasks import Tasks
            self.tasks = Tasks(c, self.data, self.raw_model, ranks)
        compiled = should_compile(c, self.flops_per_step, ranks)
        self.log_plan(f"{reason}; compile {ON_OFF[compiled]}")
        stack.enter_context(self.log)
        stack.push(self.finish_saves)  # the save under way may still log a warning
        if self.tasks:
            self.log.info(self.tasks.summary)
        # Calls the model, compiled if should_compile() says so.
        self.compiler = Compiler(self.raw_model, compiled, ranks.device, self.log.warn,
                                 c.batch_size)
        stack.callback(self.compiler.reset)  # the caller may go on with the model

    def build_model(self, model=None):
        """Return the bare model (without DDP) on the device: `model` or, if `None`, a new one.

        A new model that is sharded is built on the meta device, so that no rank holds all weights.
        """
        if model is None:
            with torch.device("meta") if self.sharded else contextlib.nullcontext():
                model = self.model_type.build_model(self.config, self.data)
        if not isinstance(model, torch.nn.Module):
            raise SetupError(f"the model is {model!r:.80}, expected an instance of nn.Module")
        if self.sharded:
            return distributed.shard(model, self.ranks, self.dtype, self.config.seed,
                                     hook(model, "initial"),
                                     self.config.replica_size(self.ranks.world_size))
        return model.to(self.ranks.device)

    def log_plan(self, precision):
        """Log the start-up lines, one with text `precision`; with eval_only, begin train.log."""
        self.log.config = asdict(self.config)
        if self.config.eval_only:  # which writes train.log, without take_folder()
            self.log.write_held()
        logger.log_plan(self.log.info, self.config, self.ranks, self.data, self.raw_model,
                        device.describe_device(self.ranks.device), precision, self.flops_per_step)

    def open_optimizer(self):
        """Load the weights of init_from in a new run; build the optimizer, ema, scaler and DDP.

        DDP wraps the model last: it must know the frozen parameters. Raises UserError.
        """
        c = self.config
        is_trained = c.init_from != "scratch"
        if self.start.kind == "init_from":
            is_trained = checkpoint.load_weights(
                self.raw_model, self.start, c, self.data.spec, self.ranks, self.log.info)
            self.start.state = None  # frees the memory
        # Before the first step, trained weights may be the best, but not with a new head. A resumed
        # run keeps the value of its start.
        self.progress.first_eval_counts = is_trained or not all(
            p.requires_grad for p in self.raw_model.parameters())
        self.optimizer = build_optimizer(self.raw_model, c, self.log.info)
        self.average = None  # running average of the weights
        if c.ema:
            from train.options.ema import Average
            self.average = Average(self.optimizer, c.ema)
        self.scaler = torch.amp.GradScaler(self.ranks.device.type,
                                           enabled=self.dtype == torch.float16)
        if not self.sharded:
            # DDP numbers the parameters that are trained now, also if before_step() freezes some.
            self.ddp_names = [n for n, p in self.raw_model.named_parameters() if p.requires_grad]
            self.model = distributed.wrap_ddp(self.raw_model, self.ranks)
        self.is_ddp = self.model is not self.raw_model
        if self.is_ddp:
            self.optimizer.register_step_pre_hook(self.require_gradients)
        self.forward = self.model
        if self.compiler.enabled:
            self.forward = functools.partial(self.compiler.call, self.model)
        model = self.raw_model
        self.before_step = bind_before_step(model)  # also of submodules
        # False: the model has none.
        self.after_step = hasattr(model, "after_step") and hook(model, "after_step")
        hook(model, "numbers")  # SetupError if it is not a method

    def open_monitors(self, stack):
        """Create early stopping, watchdog, prefetcher etc.; closing `stack` ends the threads."""
        c = self.config
        self.stopping = EarlyStopping(c.early_stopping_patience, c.early_stopping_min_delta,
                                      mode=c.early_stopping_mode)
        self.plateau = ReduceOnPlateau(c.lr_factor, c.plateau_patience,
                                       min_scale=(c.min_lr or 0.0) / c.learning_rate)
        self.spikes = SpikeDetector(c.spike_sigma)
        self.signals = robust.Signals()  # SIGTERM, SIGINT, SIGHUP, SIGUSR1
        # Ends a run that hangs.
        self.watchdog = robust.Watchdog(c.step_timeout, self.folder.path, self.ranks.rank)
        stack.callback(self.watchdog.close)
        self.clock = logger.Clock()  # time per step, without evaluations and saves
        if self.ranks.world_size > 1:
            from train.options.ranks import RankClock, log_network
            log_network(c, self.raw_model, self.ranks, self.log.info)
            self.clock = RankClock(self.raw_model, self.optimizer, self.ranks)
        # Batches on the device, read ahead.
        self.batches = Prefetcher(self.data.train, self.ranks.device)
        stack.callback(self.batches.close)

    def finish_saves(self, kind, error, trace):
        """Wait for the save in progress and, without a crash, the mirror; for ExitStack.push()."""
        self.folder.wait()
        if self.folder.mirror and (kind is None or issubclass(kind, UserError)):
            self.folder.mirror.finish(self.log)

    def parts(self):
        """Return {name: object with state_dict()} of all state except model and optimizer."""
        return dict(progress=self.progress, scaler=self.scaler, plateau=self.plateau,
                    early_stopping=self.stopping, spikes=self.spikes)

    def restore(self, start):
        """Load the checkpoint in `start` into model, optimizer and parts(); all ranks must call.

        Unless the lr_schedule is plateau now, self.plateau.scale becomes 1. If the run still has
        steps to do, without eval_only, any of find_evaluation_changes() resets best metric and
        early stopping; other validation data or samples also reset best_val_loss and the plateau
        schedule's best loss, and the evaluation is repeated. Raises CheckpointError.
        """
        p = self.progress
        c = self.config
        # The state is freed below.
        changed = checkpoint.find_evaluation_changes(start.state, c, self.data,
                                                     getattr(self.tasks, "metrics", ()))
        checkpoint.restore(start, c, self.raw_model, self.optimizer, self.parts(),
                           self.ranks, self.log.warn)
        self.saved_at = p.iter_num
        if c.lr_schedule != "plateau":  # the scale is of another schedule (--allow_change)
            self.plateau.scale = 1.0
        if changed and not c.eval_only and p.iter_num < c.max_iters:
            self.log.info(f"Changed: {', '.join(changed)}; the next evaluation is the best so far")
            p.best_metric = p.loss_of_best = math.inf
            self.stopping.load_state_dict(EarlyStopping().state_dict())
            if any(name.startswith("validation") for name in changed):
                p.evaluated = -1
                p.best_val_loss = math.inf
                self.plateau.waiting.load_state_dict(EarlyStopping().state_dict())
        if self.is_ddp and self.ranks.world_size > 2 and p.iter_num:
            self.order_buckets(p.iter_num)

    def take_folder(self):
        """Prepare the files in out_dir for this run, and begin train.log; all ranks must call.

        Call it after all checks that are possible before the first forward pass in training.
        It writes config.yaml and training_args.json, which a finished run keeps unless --resume
        names a file. With --resume never, files of an earlier run are first moved to a subfolder;
        after --resume FILE, checkpoints of later steps or another run. Without ckpt_best.pt, the
        best metric is reset, to that of the current weights if they are evaluated. Lines in
        metrics.jsonl about steps that will be repeated are removed.
        """
        p = self.progress
        c = self.config

        def prepare_files():
            if c.resume_file:
                self.folder.archive_later_checkpoints(self.start.path, vars(p), self.log.info)
            self.folder.take(c.resume, self.log.info)
            # A finished run keeps the keys that it was trained with.
            is_described = os.path.exists(self.folder.file("config.yaml"))
            if c.resume_file or not (is_described and self.limits_reached()):
                self.log.describe_run(to_yaml(c))
            return os.path.exists(self.folder.file("ckpt_best.pt"))
        has_best = distributed.broadcast_from_rank0(prepare_files, self.ranks)
        if not has_best:
            p.best_metric = p.loss_of_best = math.inf  # of a file that is not in this folder
            # The checkpoint from which the run starts may be the best that is left.
            if p.history and p.evaluated == p.iter_num and (p.iter_num or p.first_eval_counts):
                self.note_best(p.history[-1])
        self.log.start(p.iter_num, p.evaluated == p.iter_num)
        self.clock.start(p.iter_num)  # again: opening a tracker takes seconds
        self.is_taken = True

    def note_best(self, numbers):
        """Compare `numbers` {val_NAME: number} with the best so far, and return the metric's value.

        The order is by early_stopping_metric, then by val_loss. If they are better, best_due is
        set: the next save also writes ckpt_best.pt. Without a value, warn and return `None`.
        """
        p = self.progress
        metric = numbers.get(self.config.early_stopping_metric)
        if metric is None:
            self.log.warn(f"{self.config.early_stopping_metric} has no value: this evaluation "
                          "cannot be the best")
            return None
        # `sign` makes lower values better for every metric. Between equal metrics (an accuracy that
        # is 0 at the start) the lower loss is better.
        rank = (self.stopping.sign * metric, numbers["val_loss"])
        if rank < (p.best_metric, p.loss_of_best):
            self.best_before = p.best_metric, p.loss_of_best
            p.best_metric, p.loss_of_best = rank
            self.best_due = True
        return metric

    def prepare_step(self, it):
        """Seed torch for step `it` and call before_step(it) of the model, as train_step() does."""
        seed_step(self.config.seed, it, self.ranks)
        self.before_step(it)

    def order_buckets(self, it):
        """Compute the gradients of step `it`'s first micro-batch and discard them, after a resume.

        DDP orders buckets by the first backward pass, and sums over more than two ranks depend on
        the order: otherwise the first step differs in the last bit from an uninterrupted run.
        """
        self.prepare_step(it)
        state = {name: tensor.clone() for name, tensor in self.raw_model.named_buffers()}
        with self.autocast():  # also for a loader that computes, as in train_step()
            loss, _ = self.forward(*self.data.train.get_batch(self.ranks.device, it * self.n_micro))
        loss.backward()
        self.require_gradients()
        self.optimizer.zero_grad(set_to_none=True)
        for name, tensor in self.raw_model.named_buffers():  # of BatchNorm
            tensor.copy_(state[name])

    def require_gradients(self, *_):
        """Raise SetupError if a trained parameter has no gradient in DDP; an optimizer hook."""
        try:  # only DDP knows, also of gradients from earlier micro-batches
            self.model._check_reducer_finalized()
        except RuntimeError as error:
            found = re.search(r"not receive grad for rank \d+: ([\d ]+)", str(error))
            names = [self.ddp_names[int(i)] for i in found[1].split()] if found else self.ddp_names
            raise SetupError(
                f"no gradient for {', '.join(names[:4])}: with several ranks (DDP) the loss of the "
                "last micro-batch must depend on each trained parameter. Use it in forward (the "
                "output of a layer skipped at random: times 0), or freeze it: --lr_groups "
                f"'{{{names[0]}: 0}}'") from None

    def check_first_step(self):
        """Warn of parameters that had no gradient in the first step; all ranks must call.

        Raises CheckpointError if an optimizer other than AdamW and Muon cannot be resumed.
        """
        state = self.optimizer.state
        unused = [name for name, p in checkpoint.named_params(self.optimizer).items()
                  if not state.get(p)]
        if unused and any(state.values()):
            self.log.warn(f"no gradient in the first step for {len(unused)} tensors, e.g. "
                          f"{unused[0]}: if this is not intended, use them in forward, or freeze "
                          "them by lr_groups")
        if type(self.optimizer) not in (AdamW, Muon):
            checkpoint.check_state(self.optimizer, self.ranks)

    def evaluation_is_due(self, last):
        """Return whether to evaluate now, before the next step; `last`: no step follows.

        It is due every eval_interval steps (or eval_epochs epochs), before step 0 with
        eval_on_start, and at the end; never twice at a step, without validation data, or with
        eval_interval 0.
        """
        c = self.config
        it = self.progress.iter_num
        if not c.eval_interval or self.data.val is None or self.progress.evaluated == it:
            return False
        return last or (self.completes(c.eval_interval, c.eval_epochs) if it else c.eval_on_start)

    def forget_unsaved_best(self):
        """Wait for the save in progress; restore the previous best if ckpt_best.pt was not written.

        Raises RuntimeError if a rank was lost during the save. All ranks must call.
        """
        self.folder.wait()
        if self.folder.lost:  # a collective may wait for ranks that wait for this one
            raise RuntimeError(self.folder.lost[0])
        if distributed.max_over_ranks(int(self.folder.failed), self.ranks):
            self.folder.failed = False
            self.progress.best_metric, self.progress.loss_of_best = self.best_before

    def save_is_due(self):
        """Return whether a save is due now by save_interval (else eval_interval) or save_epochs."""
        c = self.config
        at_interval = (self.completes(c.eval_interval, c.eval_epochs) if c.save_interval is None
                       else self.completes(c.save_interval))
        at_epoch = c.save_epochs is not None and self.is_numbered()
        return self.progress.iter_num != self.saved_at and (at_interval or at_epoch)

    def is_numbered(self):
        """Return whether to also save ckpt_NNNNNNN.pt, by save_epochs or, if unset, keep_last."""
        c = self.config
        return c.keep_last > 0 if c.save_epochs is None else self.completes(epochs=c.save_epochs)

    def completes(self, steps=0, epochs=None):
        """Return whether the last step completed a multiple of `epochs` or, if unset, `steps`."""
        it = self.progress.iter_num
        if epochs:
            steps = epochs * self.data.train.samples / self.config.samples_per_step
        # Three times a third of an epoch is one epoch.
        periods = [math.floor(i / steps + 1e-9) if steps else 0 for i in (it - 1, it)]
        return it > 0 and periods[1] > periods[0]

    def count_epochs(self):
        """Return the number of epochs so far, a float, at most max_epochs, which must be set.

        If the last step passed a multiple of eval_epochs, return this multiple: 29, not 29.01.
        """
        c = self.config
        epochs = self.progress.iter_num * c.samples_per_step / self.data.train.samples
        if c.eval_epochs and self.completes(epochs=c.eval_epochs):
            epochs = math.floor(epochs / c.eval_epochs + 1e-9) * c.eval_epochs
        return min(epochs, c.max_epochs)

    def limits_reached(self):
        """Return the options, e.g. "--max_iters", that keep the run finished; [] if it is not."""
        length = "--max_epochs" if self.config.max_epochs else "--max_iters"
        reached = {length: self.progress.iter_num >= self.config.max_iters,
                   "--early_stopping_patience": self.stopping.over}
        return [key for key, yes in reached.items() if yes and self.progress.finished]

    def stop(self, signum):
        """Log how to resume the run, and raise Stopped(signum); call it after a save."""
        self.log.info(f"Stopped at iter {self.progress.iter_num}, saved. To resume:\n"
                      + logger.resume_command(self.config, self.ranks))
        raise Stopped(signum)

    @contextlib.contextmanager
    def eval_mode(self):
        """Run a `with` block in eval mode, without compiled code on a CPU; then set train mode."""
        self.raw_model.eval()
        try:
            with self.compiler.paused():
                yield
        finally:
            self.raw_model.train()
            if self.sharded:  # free the gathered weights: the next update would outdate them
                self.raw_model.reshard()

    def write_samples(self):
        """Append texts by the model type's sample() to samples.txt; an error is a warning."""
        c = self.config
        it = self.progress.iter_num
        sample = self.model_type.sample
        if sample is None or not (self.ranks.is_main or self.sharded):
            return
        self.log.activity("sampling")
        try:
            with self.eval_mode(), torch.no_grad(), self.autocast():
                texts = list(map(str, sample(self.raw_model, self.data, c)))  # a generator too
        except Exception as error:
            self.log.warn(f"no samples: {type(error).__name__}: {error}")
            return
        for text in texts:
            self.log.samples(it, text, whole=it >= c.max_iters)


@contextlib.contextmanager
def open_run(config, ranks, model=None, on_evaluation=None, data=None):
    """Yield a Run, ready for the next step: a new run, or one that continues from a checkpoint.

    config: from validate_config() or load_config(). model, on_evaluation, data: as for train().
    On exit the log is closed and the folder unlocked. All ranks must call. Raises UserError.
    """
    distributed.set_seed(config.seed, config.deterministic, config.cudnn_benchmark)
    with contextlib.ExitStack() as stack:
        run = Run(config, ranks, on_evaluation)
        if model is not None:
            run.model_type.USE = ""  # the file's command is for the file's models
        with contextlib.suppress(ModuleNotFoundError):  # train/options/ranks.py is deleted
            from train.options.ranks import check_ranks
            check_ranks(config, ranks, run.log.info)
        run.open_folder(stack)
        run.open_data(data)
        run.open_model(stack, model)
        run.open_optimizer()
        run.open_monitors(stack)
        # Refuse now, and not at the first save, content that a checkpoint cannot have.
        checkpoint.make_plain_part(run.config, run.data, run.raw_model, run.parts(), ranks)
        if run.start.kind == "resume":
            run.restore(run.start)
            run.log.info(f"Resuming from {run.start.path} at iter {run.progress.iter_num}")
        elif run.start.kind == "scratch":
            why = "" if config.resume == "never" else f"No checkpoint in {config.out_dir}: "
            run.log.info(f"{why}starting from scratch")
        # As in an uninterrupted run, in which before_step() precedes the evaluation after a step.
        it = run.progress.iter_num
        if config.eval_only or run.evaluation_is_due(last=it >= run.config.max_iters):
            run.prepare_step(max(0, it - 1))
        run.clock.start(it)
        yield run


def validate_config(config):
    """Return a copy of `config`, checked like a configuration from a file.

    Raises ConfigError, also for dry_run, profile, print_config; SetupError for a missing tracker.
    """
    explicit = [f.name for f in fields(config) if config.is_explicit(f.name)]
    if options := [n for n in ("dry_run", "profile", "print_config") if getattr(config, n)]:
        raise ConfigError([f"{', '.join(options)}: only for the command line of run_train.py"])
    # Without values that nobody has set: max_epochs selects other intervals of evaluations.
    default = type(config)()
    given = getattr(config, "origins", {})
    config = load_config(overrides={name: value for name, value in asdict(config).items()
                                    if name in given or value != getattr(default, name)})
    config.origins = dict.fromkeys(explicit, "overrides")
    if config.tracker:
        from train.options.trackers import check_trackers
        check_trackers(config.tracker)
    return config


def open_data(config, ranks, data=None):
    """Return the Data of a run: `data` or, if `None`, the data in data_dir.

    Torch Datasets in `data` are replaced by loaders; weighted folders in data_dir
    ("a:0.7,b:0.3") become a mixture. Raises DataError.
    """
    model_type = load_model_type(config.model)
    if config.eval_epochs and not config.eval_interval:
        config = config.replace(eval_interval=1)  # 0 would leave out the validation data
    if data is not None:
        if not isinstance(data, Data):
            raise DataError(f"data: expected train.dataloader.Data(train, val), got {type(data)}")
        return replace(data, **{name: as_loader(getattr(data, name), config, ranks)
                                for name in ("train", "val", "test")})
    if weights := parse_mixture(config.data_dir):
        from train.options.mixture import mix
        return mix({folder: model_type.open_data(config.replace(data_dir=folder), ranks)
                    for folder in weights}, weights)
    return model_type.open_data(config, ranks)
