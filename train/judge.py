"""The numbers of a step: log them, notice a spike, stop before one that is not finite does harm.

The functions take the Trainer of train/train.py as `run`.
"""

import math
import os
import time

from train import report, resume
from train.guard import BadNumbers
from train.logger import duration

SLOW_INPUT = 0.3  # share of the time that is worth a warning
MAX_OVERFLOWS_IN_A_ROW = 20  # fp16: then it is not the scale that is wrong


def judge(run, numbers):
    """Look at the numbers of a step and log them: "update", "skip" or "rewind". The same on
    every rank, since loss and norm are."""
    p, c, (loss, norm) = run.progress, run.config, numbers.read()
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return not_finite(run, numbers.it, loss, norm, numbers.lr)
    p.overflows_in_a_row, verdict = 0, "update"
    if run.spikes.update(loss):
        run.log.warn(f"iter {numbers.it}: loss {loss:.4f} is a spike (norm {norm:.2f}, "
                      f"windows at {windows(run, numbers.it)}); on_spike: {c.on_spike}")
        if c.on_spike == "rewind" and p.rewinds < resume.MAX_REWINDS:
            return "rewind"
        verdict = "skip" if c.on_spike == "skip" else "update"
    p.loss_sum, p.loss_count = p.loss_sum + loss, p.loss_count + 1
    if numbers.it % c.log_interval == 0 or numbers.it + 1 == c.max_iters:
        log_step(run, numbers.it, loss, norm, numbers.lr)
    return verdict


def not_finite(run, it, loss, norm, lr):
    """fp16: the scaler lowers its scale and skips the step. Else stop before the update."""
    p = run.progress
    if run.scaler.is_enabled() and math.isfinite(loss):
        p.overflows, p.overflows_in_a_row = p.overflows + 1, p.overflows_in_a_row + 1
        if p.overflows_in_a_row <= MAX_OVERFLOWS_IN_A_ROW:
            return "update"  # GradScaler.step() skips it by itself
    run.saver.wait()
    good = os.path.join(run.config.out_dir, "ckpt.pt")
    raise BadNumbers(
        f"iter {it}: not finite: loss {loss}, gradient norm {norm}, lr {lr:.3g}; stopped "
        f"before the update. Windows of the batch start at {windows(run, it)}.\n"
        f"Last good checkpoint: {good if os.path.exists(good) else 'none yet'}. Try a lower "
        "--learning_rate, a longer --warmup_iters, --grad_clip 1.0, --dtype float32 or "
        "--on_spike rewind.")


def windows(run, it):
    """Where this rank's sequences of step `it` start in the token stream, for messages."""
    n = run.accumulation
    calls = range((it + run.progress.data_shift) * n, (it + run.progress.data_shift + 1) * n)
    starts = [str(s) for i in calls for s in run.data.train.windows(i)]
    return ", ".join(starts[:8]) + ", ..." * (len(starts) > 8)


def log_step(run, it, loss, norm, lr):
    c, now = run.config, time.perf_counter()
    seconds = (now - run.clock - run.overhead) / max(1, it + 1 - run.logged)
    if run.loading > SLOW_INPUT * (now - run.clock) and it > 0:
        share = run.loading / (now - run.clock)
        run.log.warn(f"{share:.0%} of the time goes into reading batches: "
                     "put data_dir on a local disk, or use a larger block_size")
    run.clock, run.logged, run.overhead, run.loading = now, it + 1, 0.0, 0.0
    speed = c.tokens_per_step / seconds
    left = (c.max_iters - it - 1) * seconds
    if not run.told_end and it > run.first:  # the first step may have compiled
        run.told_end = True
        end = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + left))
        run.log.info(f"Expected to finish in {duration(left)}, at about {end}")
    run.log.step(dict(
        iter=it, max_iters=c.max_iters, tokens=(it + 1) * c.tokens_per_step, loss=loss, lr=lr,
        grad_norm=norm, time_ms=seconds * 1000, tokens_per_sec=speed,
        mfu=report.mfu(run.raw, speed, run.ranks, run.dtype),
        eta_s=left,
        memory_mib=report.peak_memory(run.ranks.device)))
