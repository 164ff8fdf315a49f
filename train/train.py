"""The training loop, in the order of execution: train, the loop, one step, validation, saving.

The loop works for any model type, a file model/NAME.py that builds the model and opens the data;
train/system.py is the interface. A loader returns micro-batch number i of this rank, a pure
function of (seed, i). The model returns a loss and sums over the batch: `loss, sums =
model(*batch)`. The state of a run is in train/setup.py. Call these functions on all ranks.
"""

import contextlib
import functools
import math
import os
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":
    raise SystemExit("train/train.py is not a command; run: python run_train.py")

import torch
import torch.distributed as dist

from train import checkpoint, distributed, logger
from train.base.errors import BadNumbers, SetupError, quote_path
from train.config import TrainConfig
from train.dataloader import Data, seed_step
from train.evaluate import check_result, evaluate, pack, to_numbers, unpack
from train.lr_scheduler import get_lr
from train.robust import decide_action
from train.setup import open_run, validate_config
from train.system import hook


def train(config: TrainConfig, model: torch.nn.Module | None = None,
          on_evaluation: Callable[[int, dict], object] | None = None,
          data: Data | None = None) -> dict[str, Any]:
    """Resume or start a run, train it until it is finished, and return the results.

    model: an nn.Module to train in place, instead of the one that the model file builds. It ends
        with the last weights or, with test data, the best ones (see test()).
    on_evaluation(iter_num, numbers): called on every rank after each evaluation of validation data,
        with {val_NAME: number}; an exception stops the run.
    data: to train on instead of config.data_dir; the splits are loaders or map-style torch Datasets
        (DatasetLoader in train/dataloader.py).
    Returns a dict: iter_num; val_loss and best_val_loss (`None` and inf without an evaluation);
    finished (the reason, "" if unfinished); history (a list, a dict of numbers per evaluation);
    test ({test_NAME: number}, {} if not evaluated). Raises UserError: Stopped after a signal,
    BadNumbers for a non-finite loss, gradient or weight, CollectiveExit if the last save fails, and
    others for invalid input.
    """
    config = validate_config(config)
    # Under torchrun this process is one of several ranks. All ranks run the same program; what only
    # one of them may do (reading checkpoints, writing files) is inside the parts of the run.
    with distributed.process_group(config) as ranks:
        with open_run(config, ranks, model, on_evaluation, data) as run:
            check_metric_names(run)
            # A run either only evaluates, or is already finished, or trains.
            if run.config.eval_only:  # writes only train.log
                validate(run)
            else:
                run.take_folder()  # all checks that need no training step are done
                if run.config.resume_file:
                    # Resumed from a given FILE: make this branch the latest one.
                    save(run, last=bool(run.limits_reached()))  # test() reads ckpt_best.pt
                if run.limits_reached():
                    report_finished(run)
                else:
                    with run.signals:  # from here on, SIGTERM and Ctrl-C save a checkpoint
                        training_loop(run)
            p = run.progress
            return dict(iter_num=p.iter_num, val_loss=p.val_loss, best_val_loss=p.best_val_loss,
                        finished=p.finished, history=p.history, test=run.test_numbers)


def training_loop(run):
    """Train an opened Run until it is finished, then call finish(); Stopped after a signal."""
    c = run.config
    p = run.progress
    p.finished = ""  # a larger max_iters continues a finished run
    # At the top of the loop the state is exactly that of iter_num steps. Only here does a run
    # stop, evaluate and save, in this order: a stop must not wait for an evaluation, and
    # ckpt_best.pt is written right after the evaluation that selected it.
    while not p.finished:
        # Signals arrive at different ranks at different times; all ranks act on the same answer.
        stop_signal, save_requested = run.signals.agree(run.ranks)
        if stop_signal:
            # The state is complete here, and a resumed run repeats nothing.
            save(run, last=True)
            run.stop(stop_signal)
        # The evaluation comes before the step of the same number: "step 0" is the untrained model.
        last = p.iter_num >= c.max_iters
        if run.evaluation_is_due(last) and validate(run) is None:
            continue  # a signal arrived during the evaluation
        if last:
            p.finished = f"max_iters {c.max_iters} reached"
        if p.finished:  # validate() sets it for early stopping
            break
        # A checkpoint is due at intervals, after a new best evaluation, and on SIGUSR1.
        if save_requested or run.best_due or run.save_is_due():
            save(run)
        # The first two steps compile.
        run.watchdog.restart(slow=p.iter_num <= run.log.first_iter + 1)
        train_step(run)
        if p.iter_num == run.log.first_iter + 1:  # find now what a resume would lose
            run.check_first_step()
    finish(run)


def train_step(run, lr=None):
    """Do one optimizer step on the global batch, log it and return the mean loss over all ranks.

    lr: the learning rate; `None`: by the schedule. Returns `None`, without a step, if a signal
    requests a stop between two micro-batches. A float16 overflow, or a loss spike with on_spike
    "skip", skips the update; other non-finite numbers raise BadNumbers.
    """
    c = run.config
    p = run.progress
    it = p.iter_num
    n = run.n_micro
    world_size = run.ranks.world_size
    lr = get_lr(it, c) * run.plateau.scale if lr is None else float(lr)
    # Each parameter group has a peak rate, `initial_lr` (Muon, lr_groups), scaled in proportion.
    for group in run.optimizer.param_groups:
        group["lr"] = group["initial_lr"] * (lr / c.learning_rate)
    seed_step(c.seed, it, run.ranks)  # for dropout
    run.before_step(it)  # a method of some models

    # The gradient of the step is that of the mean loss over all items that count (tokens that are
    # not masked) in this rank's n micro-batches and those of all other ranks:
    #     sum_i grad(loss_i) / count  =  sum over micro-batches (weight * grad(loss) / n) * factor
    #     loss    mean over the items of the micro-batch
    #     weight  items / full_count of the micro-batch, known immediately
    #     factor  n * world_size * full_count / count, known at the end, applied with the clipping
    # If no item is masked, weight and factor are exactly 1.
    run.optimizer.zero_grad(set_to_none=True)  # an interrupted step may have left gradients
    totals = 0.0
    sums = None
    # Autocast is entered once per step, so that it casts the weights once. On a CPU step 0 is not
    # compiled, so that the first log line appears soon; paused() has no effect on other devices.
    with run.compiler.paused() if it == 0 else contextlib.nullcontext(), run.autocast():
        for micro in range(n):
            # A step may last minutes: do not wait for its end if a resumed run can repeat it.
            stop = run.signals.stop if run.can_repeat_step else 0
            if micro and run.clock.max_over_ranks(stop):  # measures the wait for other ranks
                return None
            batch = run.batches.get(it * n + micro)  # tuple of tensors (B, ...)
            # DDP averages the gradients over the ranks, here only in the last micro-batch of the
            # step. FSDP reduces them in every micro-batch.
            accumulate_only = run.is_ddp and micro < n - 1
            with run.model.no_sync() if accumulate_only else contextlib.nullcontext():
                loss, sums = check_result(run.forward(*batch), sums)  # mean over items, sums
                items = sums.get("count", len(batch[0]) * run.data.train.units_per_sample)
                # Autocast is for the forward pass. In the backward pass it would change the
                # precision inside custom autograd functions. The scaler is for float16.
                with torch.autocast(loss.device.type, enabled=False):
                    run.scaler.scale(loss * (items / run.full_count) / n).backward()
            totals = totals + pack(loss, sums, items)  # (number of sums,)

    if world_size > 1:
        dist.all_reduce(totals)  # the gradients are already averaged
    # totals[0] is the count. If it is 0, the gradients are zero, also times any finite factor.
    factor = n * run.full_count * world_size / totals[0].clamp(min=1e-9)
    run.scaler.unscale_(run.optimizer)
    norm = clip_gradients(run.optimizer, c.grad_clip, factor.float())  # the norm before clipping
    # The only wait for the device. From here on all ranks have the same numbers and decide alike.
    sums, (norm,) = unpack(torch.cat([totals, norm.to(totals.dtype).view(1)]), sums)
    loss = float(sums["loss"] / sums["count"]) if sums["count"] else p.recent_loss()
    is_normal = math.isfinite(loss + norm) and not run.spikes.update(loss)
    if is_normal:
        p.spikes_in_a_row = 0
        p.overflows_in_a_row = 0
    # A spike or a float16 overflow may skip the update.
    update = is_normal or react_to_anomaly(run, lr, loss, norm)
    log_step(run, lr, loss, norm, sums)
    if update:
        run.scaler.step(run.optimizer)
    if run.after_step:  # a method of some models; also called if the update was skipped
        run.after_step(it, sums)
    if update and run.average:  # last: after_step() may change weights, e.g. normalise them
        run.average.update(it)
    run.scaler.update()
    run.optimizer.zero_grad(set_to_none=True)  # None: the next backward() assigns
    p.iter_num += 1  # also after a skipped update: data and schedule follow the step number
    return loss


# -----------------------------------------------------------------------------
# parts of a step

@torch.no_grad()
def clip_gradients(optimizer, max_norm, factor=1.0):
    """Multiply the gradients by `factor`, clip their norm, and return the norm before clipping.

    max_norm: of all gradients together; 0 does not clip.
    """
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    if hasattr(norm, "full_tensor"):  # FSDP: one collective, and local operations
        norm = norm.full_tensor()
        grads = [distributed.local(g) for g in grads]
    norm = norm * factor  # that of the scaled gradients, which do not exist yet
    if max_norm:  # 1e-6 as in torch.nn.utils.clip_grad_norm_
        factor = factor * torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    torch._foreach_mul_(grads, torch.as_tensor(factor, device=norm.device))
    return norm


def react_to_anomaly(run, lr, loss, norm):
    """Warn of a loss spike or raise BadNumbers; return whether to update the weights.

    Call it only for a spike or non-finite numbers: it updates the counters in run.progress. A
    float16 overflow silently skips the update; too many in a row raise BadNumbers.
    """
    p = run.progress
    action = decide_action(loss, norm, p, run.spikes, run.config.on_spike, run.scaler.is_enabled())
    # Bad data is a common cause: the message states where the first two micro-batches of this rank
    # come from.
    steps = range(p.iter_num * run.n_micro, (p.iter_num + 1) * run.n_micro)[:2]
    source = "; ".join(map(hook(run.data.train, "locate"), steps))
    if action == "stop":
        run.folder.wait()  # the message names the last good checkpoint
        path = run.folder.file("ckpt.pt")
        raise BadNumbers(
            f"iter {p.iter_num}: not finite: loss {loss}, gradient norm {norm}, lr {lr:.3g}; "
            f"stopped before the update. The batch: {source}.\nLast good checkpoint: "
            f"{path if os.path.exists(path) else 'none yet'}. Try a lower --learning_rate, a "
            "longer --warmup_iters, --grad_clip 1.0 or --dtype float32.")
    if not p.overflows_in_a_row:  # some float16 steps always overflow
        run.log.warn(f"iter {p.iter_num}: loss {loss:.4f} is a spike (norm {norm:.2f}, {source}); "
                     + ("skipping this update" if action == "skip" else "continuing"))
    return action == "update"


def log_step(run, lr, loss, norm, sums):
    """Add a step's loss to the next evaluation's train_loss, and log it if due; skip overflows."""
    c = run.config
    p = run.progress
    it = p.iter_num
    if p.overflows_in_a_row:  # the step has no meaningful norm, and is not counted
        return
    if sums["count"]:  # for the mean in the next evaluation line, without fully masked steps
        p.loss_sum += loss
        p.loss_count += 1
    if it % c.log_interval and it + 1 != c.max_iters:
        return
    # Times are means over the steps since the last line, without evaluations and saves.
    seconds = run.clock.lap(it, run.batches, run.log.warn)
    run.log.step(dict(
        iter=it, max_iters=c.max_iters, tokens=(it + 1) * run.units_per_step, **run.clock.numbers,
        unit=run.data.train.unit, lr=lr, grad_norm=norm, time_ms=seconds * 1000,
        tokens_per_sec=run.units_per_step / seconds,
        eta_s=run.clock.time_left(it, c.max_iters - it - 1, seconds),
        mfu=run.flops_per_step / seconds / run.peak_flops if run.peak_flops else None,
        memory_mib=logger.peak_memory(run.ranks.device), **to_numbers(run.raw_model, sums)))


# -----------------------------------------------------------------------------
# evaluation, and how the run reacts to it

def validate(run):
    """Evaluate the validation data, log the numbers, and update best metric and schedules.

    Also calls run.on_evaluation, and writes samples.txt and loss.svg. Returns {val_NAME: number};
    `None` if a signal interrupts the evaluation, which is not recorded.
    """
    c = run.config
    p = run.progress
    # The time of an evaluation does not count as training, and the step's time limit is extended.
    run.watchdog.restart(slow=True)
    with run.clock.away():
        numbers = evaluate_validation(run, c.eval_iters)
        if numbers is None:
            return None
        # Set first, so that a checkpoint that is saved from here on contains this evaluation.
        p.evaluated = p.iter_num
        p.val_loss = numbers["val_loss"]
        # The training loss is the mean over the steps since the last evaluation.
        record = dict(iter=p.iter_num, tokens=p.iter_num * run.units_per_step,
                      train_loss=p.loss_sum / p.loss_count if p.loss_count else None, **numbers)
        if c.max_epochs is not None:  # a run in epochs may log no steps in between
            lr = get_lr(max(0, p.iter_num - 1), c) * run.plateau.scale  # of the last step
            record |= dict(epoch=run.count_epochs(), lr=lr)
        # Console, train.log, metrics.jsonl and trackers; the history is returned by train().
        run.log.evaluation(record)
        p.history.append(record)
        p.loss_sum = 0.0
        p.loss_count = 0
        run.forget_unsaved_best()
        update_best_and_schedules(run, numbers)
        run.on_evaluation(p.iter_num, numbers)  # e.g. a search, which may stop the run
        run.raw_model.train()  # on_evaluation may have called eval()
        # Errors in sampling and drawing are warnings only.
        if p.iter_num and c.sample_tokens:  # an untrained model has nothing to show
            run.write_samples()
        run.log.plot()
    return numbers


def evaluate_validation(run, n_batches):
    """Return {val_NAME: number}, also of tasks and averaged weights; `None` after a signal."""
    def evaluate_weights():
        numbers = evaluate_loader(run, run.data.val, n_batches)
        if numbers is None or not run.tasks:
            return numbers
        # Tasks add their numbers to those of the validation data.
        with run.eval_mode():
            return run.tasks.evaluate(numbers, n_batches, run.ranks, run.autocast,
                                      functools.partial(must_stop_evaluation, run))
    return run.average.evaluate(evaluate_weights) if run.average else evaluate_weights()


def evaluate_loader(run, loader, n_batches):
    """Return {val_NAME: number} over `n_batches` batches of `loader`; `None` after a signal."""
    forward = functools.partial(run.compiler.call, run.raw_model)
    # Eval mode switches dropout off and, on a CPU, the compiled code.
    with run.eval_mode():
        return evaluate(run.raw_model, forward, loader, n_batches, run.ranks, run.autocast,
                        functools.partial(must_stop_evaluation, run))


def must_stop_evaluation(run, done, total):
    """Show the progress, restart the step_timeout, and return whether this rank shall stop."""
    run.log.activity(f"evaluating, batch {done} of {total}")
    run.watchdog.restart(slow=True)  # the limit is per batch
    return bool(run.signals.stop)


def update_best_and_schedules(run, numbers):
    """Update the best metric, the plateau schedule and early stopping after an evaluation.

    Sets run.best_due for a new best, and run.progress.finished for an early stop.
    """
    c = run.config
    p = run.progress
    p.best_val_loss = min(p.best_val_loss, numbers["val_loss"])
    # The metric that selects ckpt_best.pt and stops the run early; by default val_loss. The value
    # of untrained weights does not count.
    metric = run.note_best(numbers) if p.iter_num or p.first_eval_counts else None
    # The plateau schedule always follows the loss.
    if c.lr_schedule == "plateau" and run.plateau.update(numbers["val_loss"]):
        run.log.info(f"val_loss has not improved for {c.plateau_patience + 1} evaluations: "
                     f"learning rate x {run.plateau.scale:g}")
    if metric is not None and c.early_stopping_patience and run.stopping.check(metric):
        p.finished = (f"early stopping: no better {c.early_stopping_metric} in "
                      f"{c.early_stopping_patience} evaluations")


def check_metric_names(run):
    """Raise SetupError if early_stopping_metric is missing or two metrics have the same name."""
    c = run.config
    # val_loss exists in every evaluation. Two names can only be equal with task files, averaged
    # weights or a mixture.
    if not (run.data.val and c.eval_interval) or c.early_stopping_metric == "val_loss" and not (
            run.tasks or run.average or hook(run.data.val, "source_of")(0, c.eval_iters)):
        return
    with run.clock.away():
        try:
            numbers = evaluate_validation(run, 1)
        except SetupError:  # no item of this batch counts
            numbers = evaluate_validation(run, c.eval_iters)
    if isinstance(numbers.get(c.early_stopping_metric, []), list):  # missing, or not one number
        raise SetupError("early_stopping_metric: evaluations of this model have no "
                         f"{c.early_stopping_metric!r}; choose one of {', '.join(numbers)}")


# -----------------------------------------------------------------------------
# checkpoints

def save(run, last=False):
    """Save ckpt.pt in the background, and if due also as ckpt_best.pt and ckpt_NNNNNNN.pt.

    A failure is a warning. With `last`, the files are durable on return, and a failure raises
    CollectiveExit. Raises BadNumbers, without saving, for non-finite weights or optimizer state.
    """
    if not run.is_taken:
        raise SetupError("save() without run.take_folder(): call it before the first step")
    run.watchdog.restart(slow=True)
    with run.clock.away():
        # Only one save runs at a time: its snapshot needs as much memory as the state.
        run.forget_unsaved_best()
        # Non-finite weights must never replace a good checkpoint.
        checkpoint.check_finite(run.raw_model, run.optimizer, run.progress.iter_num,
                                run.folder.file("ckpt.pt"), run.ranks)
        # Under DDP every rank has all weights, and saves those of rank 0.
        checkpoint.warn_of_drift(run.raw_model, run.progress.iter_num, run.ranks, run.log.warn)
        # What a checkpoint contains: {name: part.state_dict()} of every part (train/checkpoint.py).
        state = checkpoint.make_checkpoint(run.config, run.data, run.raw_model, run.optimizer,
                                           run.parts(), run.ranks)
        # Rank 0, or every rank its shards, writes in a thread, from a snapshot that training cannot
        # change; an error before that is raised on every rank.
        checkpoint.save(run.folder, state, run.config, run.ranks, run.best_due, run.is_numbered(),
                        run.log, last)
    run.saved_at = run.progress.iter_num
    run.best_due = False


# -----------------------------------------------------------------------------
# the beginning and the end of a run

def report_finished(run):
    """Log that a resumed run is finished and how to continue it; evaluate the test data if due."""
    run.log.info(f"This run is finished at iter {run.progress.iter_num}: {run.progress.finished}. "
                 f"A larger {' and '.join(run.limits_reached())} continues it; with `--resume "
                 "never` it starts afresh.")
    # A run that was stopped before the test evaluates the test data now.
    run.test_numbers = distributed.broadcast_from_rank0(run.log.read_tested, run.ranks)
    test(run)


def finish(run):
    """Complete a run: save, draw loss.svg, evaluate the test data, log how to use the model."""
    # The last save is not in the background: an error is raised.
    save(run, last=True)
    # loss.svg again, with the last steps.
    run.log.plot()
    test(run)
    if stop_signal := run.signals.agree(run.ranks)[0]:  # during the test; everything is saved
        run.stop(stop_signal)
    # In float16, the first steps overflow until the loss scale is low enough.
    skipped = f"; {run.progress.overflows} float16 steps skipped" if run.progress.overflows else ""
    run.log.info(f"Training complete! {run.progress.finished}; {run.clock.total_away:.1f} s spent "
                 f"in evaluations and checkpoints{skipped}")
    if use := run.data.use or run.model_type.USE:  # the command that uses the result
        best = "ckpt_best.pt" if os.path.exists(run.folder.file("ckpt_best.pt")) else "ckpt.pt"
        ema = " --ema" if run.average and run.config.early_stopping_metric.endswith("_ema") else ""
        if "model.sample" in use and not run.data.spec.get("tokenizer"):
            use += " --tokenizer NAME"
        run.log.info("Next: " + use.format(out=quote_path(run.config.out_dir), best=best, ema=ema,
                                           data=quote_path(run.config.data_dir)))


def test(run):
    """Evaluate the test data, if any, with the best weights, and set run.test_numbers.

    These are in ckpt_best.pt (for an _ema metric, the averages there) or, without it, the current
    ones. They stay in the model: save before. Existing test_numbers are kept; {} after a signal.
    """
    p = run.progress
    if run.data.test is None:
        return
    # The last weights are saved, and may be replaced. Every rank loads the best ones and evaluates
    # a part of the batches.
    weights = checkpoint.load_best(run.raw_model, run.folder, run.config, run.ranks)
    if run.test_numbers:
        return
    # More batches than there can be: all of the data. {} after a signal.
    numbers = evaluate_loader(run, run.data.test, run.data.test.samples + 1) or {}
    run.test_numbers = {f"test_{name.removeprefix('val_')}": v for name, v in numbers.items()}
    if numbers:
        run.log.info(f"On test data, with {weights}:")
        run.log.evaluation(dict(iter=p.iter_num, tokens=p.iter_num * run.units_per_step,
                                data=run.log.test_data, **run.test_numbers))
