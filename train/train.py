"""The training loop, in the order of execution: train, the loop, one step, validation, saving.

The loop does not know what it trains. A model type is a file model/NAME.py, which builds the model
and opens its data; train/system.py lists everything that the loop may ask for. A loader returns the
batch of a step, which is a pure function of the step's number. The model returns a loss and sums
over the batch: `loss, sums = model(*batch)`. The state of a run is in train/setup.py.
"""

import contextlib
import copy
import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from train import checkpoint, device, distributed, logger, robust
from train.base.errors import BadNumbers, SetupError, Stopped
from train.config import TrainConfig
from train.evaluate import add_sums, all_reduce, batch_sums, evaluate, to_host, to_numbers
from train.lr_scheduler import get_lr
from train.optimizer import clip_gradients
from train.setup import open_run, validate_config
from train.system import hook

MIN_COUNT = 1e-9  # below any count of items, also where a model weighs them; but not 0


def train(config: TrainConfig, model: torch.nn.Module | None = None,
          on_evaluation: Callable[[int, dict], object] | None = None,
          started: float | None = None) -> dict[str, Any]:
    """Resume or start the run that `config` describes, train it to its end, and return its last
    numbers and history.

    model: an nn.Module to train instead of the one that the model file builds.
    on_evaluation(iter_num, numbers): called after each evaluation; an exception ends the run.
    started: time.monotonic() at the start of the program, for max_minutes (default: now).
    Raises UserError: Stopped after a signal, BadNumbers if loss or gradients are not finite;
    ConfigError, DataError, CheckpointError or SetupError for input that cannot be used.
    """
    started = started or time.monotonic()
    config = validate_config(config)
    # Under torchrun this process is one of several ranks, and all of them run these lines.
    with distributed.process_group(config) as ranks:
        if config.max_minutes:
            # The learning rate falls towards the last step, so the number of steps comes first.
            from train.options.minutes import fit_max_iters
            config = fit_max_iters(
                config, ranks, started, train_step, validate, save,
                lambda config: open_run(config, ranks, copy.deepcopy(model)))
        with open_run(config, ranks, model, on_evaluation) as run:
            check_metric_name(run)
            if run.config.eval_only:
                validate(run)
            elif run.limits_reached():
                report_finished(run)
            else:
                with run.signals:  # from here on there is something to save
                    training_loop(run)
            p = run.progress
            return dict(iter_num=p.iter_num, val_loss=p.val_loss, best_val_loss=p.best_val_loss,
                        finished=p.finished, history=p.history, test=run.test_numbers)


def training_loop(run):
    """Evaluate, save and train until the run ends; then test and report."""
    c = run.config
    p = run.progress
    p.finished = ""  # a larger max_iters continues a finished run
    run.announce_duration()
    run.clock.start(p.iter_num)
    if p.iter_num and c.resume_file:
        save(run)  # resumed from another FILE: this branch is now the latest of the folder
    # At the top of the loop the state is exactly that of iter_num steps. A run stops, evaluates
    # and saves only here, and in this order: a stop must not wait for an evaluation, and
    # ckpt_best.pt is written right after the evaluation that found it.
    while not p.finished:
        stop_signal, save_requested = run.signals.agree(run.ranks)
        if stop_signal:
            stop(run, stop_signal)
        last = p.iter_num >= c.max_iters
        if evaluation_is_due(run, last) and validate(run) is None:
            continue  # a signal arrived during the evaluation
        if last:
            p.finished = f"max_iters {c.max_iters} reached"
        if p.finished:  # also by early stopping, in validate()
            break
        if save_requested or run.best_due or run.save_is_due():
            save(run)
        train_step(run)
    finish(run)


def train_step(run, lr=None):
    """Do one optimizer step on the global batch; all ranks call it together.

    lr: the learning rate (default: the schedule's). Returns the mean loss of the step. If a signal
    arrives before the last micro-batch, nothing is applied and None is returned; the step is done
    again after the resume.
    """
    c = run.config
    p = run.progress
    it = p.iter_num
    n = run.n_micro
    run.watchdog.arm(factor=10 if run.clock.unsteady(it) else 1)
    # The random numbers of a step (dropout) depend on (seed, step, rank) and on no earlier draw. A
    # resumed run draws the same ones, without a saved generator state.
    distributed.seed_step(c.seed, it, run.ranks)
    # The learning rate is a function of the step, times the plateau's scale, which is saved. Each
    # parameter group scales its own peak rate.
    if lr is None:
        lr = get_lr(it, c) * run.plateau.scale
    for group in run.optimizer.param_groups:
        group["lr"] = group["initial_lr"] * (lr / c.learning_rate)

    # This rank's share of the global batch, in n micro-batches whose gradients add up. The gradient
    # of the step must be that of the mean over all counted items i of all micro-batches and ranks:
    #     sum_i grad(loss_i) / count = sum over micro-batches (weight * grad(loss) / n) * factor
    # weight = items in the micro-batch / full_count is known at once; factor = n * world_size *
    # full_count / count only after the last one. Both are exactly 1 if no item is masked.
    sums = {}
    first = (it + p.data_shift) * n  # index of the first one among all of this rank's
    # Autocast is entered once per step, so that the weights are cast once. On a CPU the first step
    # of a run is not compiled: its numbers appear without waiting for the compiler.
    with run.compiler.paused(when=it == 0), run.autocast():
        for micro in range(n):
            if micro and run.signals.stop_agreed(run.ranks):  # a step may take minutes on a CPU
                run.optimizer.zero_grad(set_to_none=True)
                return None
            run.log.activity = f"iter {it}, micro-batch {micro + 1} of {n}"
            batch = run.batches.get(first + micro)  # tuple of tensors (B, ...)
            # DDP averages the gradients over the ranks in the last micro-batch only; FSDP in each.
            accumulate_only = run.model is not run.raw_model and micro < n - 1
            with run.model.no_sync() if accumulate_only else contextlib.nullcontext():
                loss, own_sums = run.compiler.call(run.model, *batch)  # mean, sums over its items
                weight = own_sums["count"] / run.full_count if "count" in own_sums else 1.0
                # Autocast is for the forward pass: in the backward pass it would cast the
                # operations of our own autograd functions.
                with torch.autocast(loss.device.type, enabled=False):
                    run.scaler.scale(loss * weight / n).backward()
            add_sums(sums, batch_sums(loss, own_sums, run.full_count))
            run.batches.prefetch(first + micro + 1)  # while the device still computes

    sums = all_reduce(sums, run.ranks)
    factor = n * run.full_count * run.ranks.world_size / sums["count"].clamp(min=MIN_COUNT)
    run.scaler.unscale_(run.optimizer)
    norm = clip_gradients(run.optimizer, c.grad_clip, factor.float())  # the norm before clipping
    # The only transfer to the host, which waits for the device here. All ranks now have the same
    # numbers, so all of them decide the same.
    sums, norm = to_host(sums, norm)

    loss = mean_loss(p, sums)
    action = review_step(run, lr, loss, norm)
    if action == "rewind":
        run.rewind()
        return loss
    log_step(run, lr, loss, norm, sums)
    if action == "update":
        run.scaler.step(run.optimizer)
        if run.average:
            run.average.update(it)
    run.scaler.update()
    run.optimizer.zero_grad(set_to_none=True)  # frees them: the next step writes instead of adding
    p.iter_num += 1
    hook(run.raw_model, "after_step")(it, sums)  # also if the update was skipped
    return loss


# -----------------------------------------------------------------------------
# after the gradients: check the numbers, log them

def mean_loss(progress, sums):
    """Return the step's mean loss over the counted items. Without any, the mean of the steps
    before, in which the spike detector sees no jump."""
    count = float(sums["count"])
    if count:
        return float(sums["loss"]) / count
    if progress.loss_count:
        return progress.loss_sum / progress.loss_count
    return progress.val_loss or 0.0


def review_step(run, lr, loss, norm):
    """Return what to do with the gradients: "update", "skip" or "rewind", the same on every rank.

    Raises BadNumbers, before the update, if loss or gradient norm are not finite.
    """
    c = run.config
    p = run.progress
    it = p.iter_num
    action, is_spike = robust.decide_action(loss, norm, p, run.spikes, c.on_spike, run.scaler.is_enabled())
    if action == "stop":
        run.folder.wait()  # the message names the last good checkpoint
        raise BadNumbers(robust.describe_non_finite(it, loss, norm, lr, run.locate_batches(),
                                                  run.folder.file("ckpt.pt")))
    if is_spike:
        run.log.warn(f"iter {it}: loss {loss:.4f} is a spike (norm {norm:.2f}, "
                     f"{run.locate_batches()}); {robust.describe_spike_action(action, c.on_spike)}")
    return action


def log_step(run, lr, loss, norm, sums):
    """Count the step's loss and, every log_interval steps, log the step."""
    c = run.config
    p = run.progress
    it = p.iter_num
    if p.overflows_in_a_row:  # float16: the gradients overflowed, the loss scale will be lowered
        return
    p.loss_sum += loss
    p.loss_count += 1
    if it % c.log_interval and it + 1 != c.max_iters:
        return
    # Times are means over the steps since the last line, without evaluations and saves.
    seconds = run.clock.lap(it, run.batches.seconds, run.log.warn)
    run.batches.seconds = 0.0
    eta = (c.max_iters - it - 1) * seconds
    run.clock.announce_end(it, eta, run.log.info)
    run.log.step(dict(
        iter=it, max_iters=c.max_iters, tokens=(it + 1) * run.units_per_step,
        unit=run.data.train.unit, lr=lr, grad_norm=norm, time_ms=seconds * 1000,
        tokens_per_sec=run.units_per_step / seconds, eta_s=eta,
        mfu=device.mfu(run.flops_per_step / seconds, run.ranks, run.dtype),
        memory_mib=device.peak_memory(run.ranks.device), **to_numbers(run.raw_model, sums)))


# -----------------------------------------------------------------------------
# evaluation, and how the run reacts to it

def evaluation_is_due(run, last):
    """Return whether to evaluate before the next step. last: there is none."""
    c = run.config
    it = run.progress.iter_num
    if not c.eval_interval or run.data.val is None or run.progress.evaluated == it:
        return False
    if it == 0 and not last:
        return c.eval_on_start
    return last or it % c.eval_interval == 0


def validate(run):
    """Evaluate on fixed batches, log the numbers and react to them.

    Returns {val_NAME: number}, or None if a signal stopped the evaluation.
    """
    c = run.config
    p = run.progress
    run.watchdog.arm(factor=10)  # this takes longer than a step
    with run.clock.away(), run.log.busy("evaluating"):
        numbers = evaluate_validation(run, c.eval_iters)
        if numbers is None:
            return None
        # Set before anything reacts: what is saved from here on contains this evaluation.
        p.evaluated = p.iter_num
        p.val_loss = numbers["val_loss"]
        record = dict(iter=p.iter_num, tokens=p.iter_num * run.units_per_step,
                      train_loss=p.loss_sum / p.loss_count if p.loss_count else None, **numbers)
        if c.max_epochs is not None:
            record |= dict(epoch=p.iter_num * c.samples_per_step / run.data.train.samples,
                           lr=get_lr(p.iter_num, c) * run.plateau.scale)
        run.log.evaluation(record, steps=p.loss_count)
        p.history.append(record)
        p.loss_sum = 0.0
        p.loss_count = 0
        update_best_and_schedules(run, numbers)
        run.on_evaluation(p.iter_num, numbers)
        if p.iter_num and c.sample_tokens:
            write_samples(run)
        run.log.plot()
    return numbers


def evaluate_validation(run, n_batches):
    """Return {val_NAME: number} on n_batches batches of the validation data, with the numbers of
    task files and of averaged weights; None if a signal stopped it."""
    numbers = functools.partial(evaluate_loader, run, run.data.val, n_batches)
    for extend in run.extensions():
        numbers = functools.partial(extend, numbers)
    return numbers()


def evaluate_loader(run, loader, n_batches):
    """Return {val_NAME: number} on n_batches fixed batches of `loader`; None if a signal came."""
    forward = functools.partial(run.compiler.call, run.raw_model)
    with run.eval_mode():
        return evaluate(run.raw_model, forward, loader, n_batches, run.ranks, run.autocast,
                        functools.partial(stop_requested, run))


def stop_requested(run, done, total):
    """Return whether a signal asks this rank to stop; called before each batch of an evaluation."""
    run.log.activity = f"evaluating, batch {done} of {total}"
    run.watchdog.arm(factor=10)  # the limit is per batch
    return bool(run.signals.stop)


def update_best_and_schedules(run, numbers):
    """Update the best checkpoint, the plateau schedule and early stopping."""
    c = run.config
    p = run.progress
    metric = numbers[c.early_stopping_metric]  # None: no item counted for it
    p.best_val_loss = min(p.best_val_loss, numbers["val_loss"])
    if metric is not None and (p.iter_num or run.first_eval_counts):
        # `sign` makes lower better for every metric; between equal metrics the lower loss wins.
        rank = (run.stopping.sign * metric, numbers["val_loss"])
        if rank < (p.best_metric, p.loss_of_best):
            p.best_metric, p.loss_of_best = rank
            run.best_due = True
    if c.lr_schedule == "plateau" and run.plateau.update(numbers["val_loss"]):
        run.log.info(f"val_loss has not improved for {c.plateau_patience + 1} evaluations: "
                     f"learning rate x {run.plateau.scale:g}")
    if metric is not None and c.early_stopping_patience and run.stopping.update(metric):
        p.finished = (f"early stopping: no better {c.early_stopping_metric} in "
                      f"{c.early_stopping_patience} evaluations")


def check_metric_name(run):
    """Refuse an early_stopping_metric that evaluations do not have. Raises SetupError."""
    c = run.config
    metric = c.early_stopping_metric
    if metric == "val_loss" or run.data.val is None or not c.eval_interval:
        return
    names = list(evaluate_validation(run, 1))  # one batch is enough to learn the names
    if metric not in names:
        raise SetupError(f"early_stopping_metric: evaluations of this model have no "
                                     f"{metric!r}; choose one of {', '.join(names)}")


def write_samples(run):
    """Write what the model generates so far, from the same prompts and seed every time. A sharded
    model computes on all ranks, others on rank 0. An error in sampling never ends a run."""
    c = run.config
    it = run.progress.iter_num
    sample = run.model_type.sample
    if sample is None or not (run.ranks.is_main or run.sharded):
        return
    run.log.activity = "sampling"
    try:
        with run.eval_mode(), torch.no_grad(), run.autocast():
            texts = sample(run.raw_model, run.data, c)
    except Exception as error:
        run.log.warn(f"no samples: {type(error).__name__}: {error}")
        return
    for text in texts:
        run.log.samples(it, text, whole=it >= c.max_iters)


# -----------------------------------------------------------------------------
# checkpoints

def save(run, last=False):
    """Save a checkpoint in the background; all ranks call. The `last` one must succeed."""
    run.watchdog.arm(factor=10)  # saving takes longer than a step
    with run.clock.away(), run.log.busy("saving the checkpoint"):
        run.folder.wait()  # until the memory of the previous save is free
        checkpoint.check_finite(run.raw_model, run.optimizer, run.progress.iter_num,
                            run.folder.file("ckpt.pt"), run.ranks)
        # All ranks gather the shards; rank 0 writes, and an error there is raised on every rank.
        state = checkpoint.make_checkpoint(run.config, run.data, run.raw_model, run.optimizer,
                                       run.parts(), run.ranks, run.folder.can_pin_memory)
        distributed.broadcast_from_rank0(
            lambda: run.folder.save(state, run.best_due, run.is_numbered(), run.log, last,
                                    private=run.sharded), run.ranks)
    run.saved_at = run.progress.iter_num
    run.best_due = False


# -----------------------------------------------------------------------------
# the beginning and the end of a run

def report_finished(run):
    """Log that the run is finished; evaluate the test data if that is missing."""
    p = run.progress
    run.log.info(f"This run is finished at iter {p.iter_num}: {p.finished}. A larger "
                 f"{' and '.join(run.limits_reached())} continues it; with `--resume never` it starts afresh.")
    run.test_numbers = run.log.read_tested()
    if run.data.test is not None and not run.test_numbers:  # stopped before the test
        test(run)


def finish(run):
    """Save, evaluate the test data, and log what to do next."""
    p = run.progress
    save(run, last=True)
    run.log.plot()
    test(run)
    stop_signal, _ = run.signals.agree(run.ranks)
    if stop_signal:  # during the test; everything is saved
        raise Stopped(stop_signal)
    # Some float16 steps always overflow at first, until the loss scale fits.
    skipped = f"; {p.overflows} float16 steps skipped" if p.overflows else ""
    run.log.info(f"Training complete! {p.finished}; {run.clock.total_away:.1f} s spent in "
                 f"evaluations and checkpoints{skipped}")
    run.log.info(logger.suggest_next_steps(run.config, run.model_type.USE))


def test(run):
    """Evaluate the test data, which influenced no decision, once: with the best weights. They stay
    in the model; the last weights are saved already."""
    p = run.progress
    loader = run.data.test
    if loader is None:
        return
    weights = checkpoint.load_best(run.raw_model, run.folder, run.ranks)
    numbers = evaluate_loader(run, loader, loader.samples + 1) or {}  # {}: a signal came
    run.test_numbers = {f"test_{name.removeprefix('val_')}": v for name, v in numbers.items()}
    if numbers:
        run.log.info(f"On test data, with {weights}:")
        run.log.evaluation(dict(iter=p.iter_num, tokens=p.iter_num * run.units_per_step,
                                **run.test_numbers))


def stop(run, signum):
    """Save, log how to resume, and raise Stopped."""
    save(run, last=True)
    run.log.info(f"Stopped at iter {run.progress.iter_num}, saved. To resume:")
    run.log.info(logger.resume_command(run.config, run.ranks))
    raise Stopped(signum)
