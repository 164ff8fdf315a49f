"""What the loop remembers between steps, besides weights and optimizer: plain numbers."""

import math
from dataclasses import dataclass

import torch


@dataclass
class Progress:
    """Saved in every checkpoint, restored on resume."""
    iter_num: int = 0                  # optimizer steps done
    evaluated: int = -1                # iter_num of the last evaluation
    best_val_loss: float = math.inf
    val_loss: float | None = None      # of the last evaluation
    loss_sum: float = 0.0              # of the steps since the last evaluation
    loss_count: int = 0
    data_shift: int = 0                # steps of data passed over after rewinds
    rewinds: int = 0
    overflows: int = 0                 # fp16 steps skipped, in all
    overflows_in_a_row: int = 0
    finished: str = ""                 # why the run is over, when it is


@dataclass
class StepNumbers:
    """Loss and gradient norm of step `it`, on their way from the device to the host."""
    it: int
    lr: float
    values: torch.Tensor               # (2,): loss, gradient norm
    ready: object = None               # CUDA event: the copy to the host is done

    def read(self):
        if self.ready is not None:
            self.ready.synchronize()
        return self.values.tolist()
