"""auto_batch: halve the micro-batch until it fits, at the same global batch, on all ranks."""

from train.distributed import max_over_ranks
from train.report import is_out_of_memory


def fit_micro_batch(run):
    """Try a forward and backward pass before training starts, and halve run.micro_batch while any
    rank runs out of memory. Nothing is exchanged between ranks inside a try, so none hangs."""
    while True:
        failed = 0
        try:
            batch = run.data.train.get_batch(run.ranks.device, 0)
            with run.autocast():
                loss, _ = run.raw.forward(*batch)
            loss.backward()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failed = 1
        batch = loss = None
        run.raw.zero_grad(set_to_none=True)
        if not max_over_ranks(failed, run.ranks):
            return
        if run.micro_batch == 1:
            raise RuntimeError("can't allocate memory even for a micro-batch of 1: use a smaller "
                               "model or block_size, or --gradient_checkpointing true")
        before = run.micro_batch
        run.open_data(before // 2)
        run.log.warn(f"out of memory: micro-batch {before} -> {run.micro_batch}, accumulation "
                     f"{run.accumulation}, the same global batch")
