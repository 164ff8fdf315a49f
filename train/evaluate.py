"""Validation numbers: fixed windows, weighted by tokens, the same value at any world size; and what
follows from them. validate() and below take the Trainer of train/train.py as `run`."""

import contextlib
import math
import time

import torch

from train import fault
from train.distributed import SetupError, max_over_ranks, sum_over_ranks


@torch.no_grad()
def evaluate(forward, loader, batches, ranks, autocast, token_bytes=None,
             should_stop=lambda: False):
    """{val_loss, val_ppl, val_bpb} over `batches` fixed batches of `loader` (fewer if it has
    fewer), with loss = forward(x, y)[0] of a model in eval mode.

    Rank r takes batches r, r + world_size, ...; the sums of all batches meet in one float64 table
    and are added in order, so the numbers do not depend on who computed what. bits per byte needs
    `token_bytes` (vocab_size,), the bytes each id stands for, else it is None. Returns None when
    `should_stop()`, which all ranks ask together, says so.
    """
    n = loader.n_fixed(batches)
    table = torch.zeros(n, 3, dtype=torch.float64)  # summed loss, targets, bytes of each batch
    for first in range(0, n, ranks.world_size):
        if should_stop():
            return None
        index = first + ranks.rank
        # Every rank runs every round, for a sharded model's collectives; a surplus is not counted.
        x, y = loader.fixed_batch(min(index, n - 1), batches, ranks.device)
        with autocast():
            loss, _ = forward(x, y)
        if index < n:
            count = int((y >= 0).sum())
            size = int(token_bytes[y.cpu()].sum()) if token_bytes is not None else 0
            table[index] = torch.tensor([loss.item() * count, count, size], dtype=torch.float64)
    total, count, size = sum_over_ranks(table, ranks).sum(0).tolist()
    loss = total / count
    return dict(val_loss=loss, val_ppl=math.exp(min(loss, 700.0)),
                val_bpb=total / math.log(2) / size if size else None)


def validate(run):
    """Evaluate on fixed windows and act on the numbers. False if asked to stop meanwhile."""
    run.watchdog.arm(factor=10)  # this takes longer than a step
    run.settle()
    p, c, started = run.progress, run.config, time.perf_counter()
    fault.point("eval", p.iter_num)
    run.raw.eval()
    with eager_on_cpu(run):
        numbers = evaluate(run.raw, run.data.val, c.eval_iters, run.ranks, run.autocast,
                           run.data.token_bytes, lambda: asked_to_stop(run))
    run.raw.train()
    if numbers is None:
        return False
    p.evaluated, p.val_loss = p.iter_num, numbers["val_loss"]
    train_loss = p.loss_sum / p.loss_count if p.loss_count else None
    p.loss_sum, p.loss_count = 0.0, 0
    run.log.evaluation(dict(iter=p.iter_num, tokens=p.iter_num * c.tokens_per_step,
                             train_loss=train_loss, **numbers))
    react(run, numbers)
    run.on_evaluation(p.iter_num, numbers)
    show_samples(run)
    run.log.plot()
    run.overhead += time.perf_counter() - started
    return True


def asked_to_stop(run):
    return bool(max_over_ranks(run.signals.stop, run.ranks))


def eager_on_cpu(run):
    """Context: past compiled code on a CPU, where compiling again, for evaluation, costs more than
    it saves."""
    if run.ranks.device.type == "cpu" and run.compiled:
        return torch.compiler.set_stance("force_eager")
    return contextlib.nullcontext()


def react(run, numbers):
    """What follows from an evaluation: best checkpoint, learning rate, early stopping."""
    p, c, val_loss = run.progress, run.config, numbers["val_loss"]
    if val_loss < p.best_val_loss:
        p.best_val_loss, run.best_due = val_loss, p.iter_num > 0
    if c.lr_schedule == "plateau" and run.plateau.update(val_loss):
        run.log.info(f"val_loss has not improved for {c.plateau_patience} evaluations: "
                      f"learning rate x {run.plateau.scale:g}")
    watched = numbers.get(c.early_stopping_metric)
    if c.early_stopping_patience and watched is None:
        known = ", ".join(name for name, value in numbers.items() if value is not None)
        raise SetupError(f"early_stopping_metric: this evaluation does not yield "
                                     f"{c.early_stopping_metric!r}; choose one of {known}")
    if c.early_stopping_patience and run.stopping.update(watched):
        p.finished = (f"early stopping: no better {c.early_stopping_metric} in "
                      f"{c.early_stopping_patience} evaluations")


def show_samples(run):
    """Text the model writes so far, from the same prompts and the same seed every time."""
    c, sample_text = run.config, getattr(run.model_file, "sample_text", None)
    if sample_text and c.sample_tokens and run.data.tokenizer and run.ranks.main and (
            not run.sharded):
        run.raw.eval()
        for text in sample_text(run.raw, run.data.tokenizer, c.sample_prompts,
                                c.sample_tokens, c.seed, run.autocast):
            run.log.samples(run.progress.iter_num, text, whole=run.progress.iter_num >= c.max_iters)
        run.raw.train()
