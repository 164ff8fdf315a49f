"""Every configuration key of a run, once: name, type, default, meaning and limits.

To add a key, add a line: YAML files, the command line, --help and --print_config all come from
these dataclasses (train/config.py reads and checks them). A model file adds keys of its own in a
dataclass `Keys`.
"""

import math
import os
import re
from dataclasses import dataclass, fields, replace

from train.base.fields import key
from train.lr_scheduler import milestones


@dataclass
class RunKeys:
    model: str = key("gpt", "file in model/ that says what is trained")
    data_dir: str = key("data/bin/stdlib", "folder (or file, or glob) with the data; of several "
                        "with their shares a mixture, {a: 0.7, b: 0.3} or a:0.7,b:0.3",
                        free=True, path=True, mixture=True)
    out_dir: str = key("out", "where the run writes; one run per folder", free=True, path=True)
    seed: int = key(1337, "seed of the data order, the initial weights and dropout", ge=0)
    resume: str = key("auto", "auto: continue what is in out_dir; never: move it aside and start "
                      "afresh; must: refuse to start without it; or a checkpoint FILE to continue",
                      start=True, path=True)
    init_from: str = key("scratch", "scratch, or the weights to start from: a checkpoint, or a "
                         "folder of Hugging Face's, hf:OWNER/NAME downloaded",
                         free=True, path=True, reads=True)
    allow_change: list[str] = key([], "resume although these keys changed (`data`: the data's "
                                  "content; `all`: anything)", start=True)
    eval_only: bool = key(False, "evaluate once, print the numbers and stop", start=True)
    profile: int = key(0, "show where the time of so many steps goes, and stop (train/tools/profiler.py)",
                       ge=0, start=True)
    tokenizer: str | None = key(None, "tokenizer of a data_dir that names none: byte, gpt2, a rank "
                                "file or a prepared folder", free=True, path=True)
    tracker: list[str] = key([], "also log to tensorboard, wandb or mlflow (a list is fine)",
                             free=True, choices=["tensorboard", "wandb", "mlflow"])
    run_name: str | None = key(None, "name shown by the trackers (default: out_dir)", free=True)


@dataclass
class BatchKeys:
    batch_size: int = key(16, "samples in a micro-batch: the most one device holds at once", ge=1)
    gradient_accumulation_steps: int = key(4, "micro-batches in an optimizer step, over all ranks: "
                                           "one step sees batch_size x this many samples", ge=1)


@dataclass
class LengthKeys:
    max_iters: int = key(5000, "optimizer steps", ge=0, free=True)
    max_epochs: float | None = key(None, "passes over the data; replaces max_iters", gt=0,
                                   free=True)
    max_minutes: float | None = key(None, "minutes that the run may take, all in all: some steps "
                                    "are timed first, which sets max_iters", gt=0, free=True)
    eval_interval: int = key(250, "steps between evaluations; 0: never", ge=0, free=True)
    eval_epochs: float | None = key(None, "passes over the data between evaluations; replaces "
                                    "eval_interval", gt=0, free=True)
    eval_iters: int = key(50, "validation batches of batch_size samples", ge=1, free=True)
    eval_tasks: list[str] = key([], "files of questions of your own, answered at each evaluation: "
                                "val_NAME of NAME.jsonl (model/eval/tasks.py)", free=True)
    eval_task_rows: int | None = key(None, "the first rows of each task; 0: all (default: as many "
                                     "as cost no more than the loss)", ge=0, free=True)
    eval_on_start: bool = key(True, "evaluate also before the first step", free=True)
    log_interval: int = key(10, "steps between log lines", ge=1, free=True)
    save_interval: int | None = key(None, "steps between checkpoints (default: eval_interval); 0: "
                                    "only at the end", ge=0, free=True)
    keep_last: int = key(0, "numbered checkpoints to keep besides the latest and best", ge=0,
                         free=True)
    save_epochs: float | None = key(None, "keep a numbered checkpoint every so many passes over "
                                    "the data and no others, all of them (or the keep_last latest)",
                                    gt=0, free=True)
    save_precision: str | None = key(None, "with each checkpoint also model.safetensors, weights "
                                     "and their description, in this precision", free=True,
                                     choices=["float32", "bfloat16", "float16"])
    sample_tokens: int = key(128, "tokens of a sample at each evaluation; 0: none", ge=0, free=True)
    sample_prompts: list[str] = key([], "prompts of the samples (default: end of text)", free=True,
                                    text=True)


@dataclass
class LearningRateKeys:
    learning_rate: float = key(6e-4, "peak learning rate", gt=0, le=100)
    min_lr: float | None = key(None, "final learning rate (default: peak / 10; plateau: 0)", ge=0)
    lr_schedule: str = key("cosine", "shape after the warm-up; none is constant", choices=[
        "cosine", "linear", "constant", "wsd", "step", "plateau", "none"])
    warmup_iters: int = key(200, "steps of linear warm-up", ge=0)
    warmup_ratio: float | None = key(None, "warm-up as a part of the run; replaces warmup_iters",
                                     ge=0, lt=1)
    warmup_epochs: float | None = key(None, "warm-up in passes over data; replaces warmup_iters",
                                      ge=0)
    lr_decay_iters: int | None = key(None, "step at which min_lr is reached (default: max_iters)",
                                     ge=1)
    wsd_decay: float = key(0.5, "wsd: fraction of the run that decays", gt=0, le=1)
    step_iters: int | None = key(None, "step: steps between drops (default: a third of the run)",
                                 ge=1)
    lr_factor: float = key(0.5, "step and plateau: factor of a drop", gt=0, lt=1)
    plateau_patience: int = key(5, "plateau: evaluations in a row without a better val_loss that "
                                "are tolerated; the next one drops the rate", ge=0)
    early_stopping_patience: int = key(0, "stop after this many evaluations without improvement; "
                                       "0: never", ge=0, free=True)
    early_stopping_min_delta: float = key(0.0, "the least change that counts as improvement", ge=0,
                                          free=True)
    early_stopping_metric: str = key("val_loss", "what early stopping and ckpt_best.pt follow")
    early_stopping_mode: str = key("min", "whether that number should fall or rise",
                                   choices=["min", "max"])


@dataclass
class OptimizerKeys:
    optimizer: str = key("adamw", "adamw, or muon for the matrices of the blocks and adamw for the "
                         "rest", choices=["adamw", "muon"])
    weight_decay: float = key(0.1, "decoupled decay of tensors with 2 or more dimensions", ge=0)
    beta1: float = key(0.9, "adamw: decay of the first moment", ge=0, lt=1)
    beta2: float = key(0.95, "adamw: decay of the second moment", ge=0, lt=1)
    adam_eps: float = key(1e-8, "adamw: added to the denominator", gt=0)
    grad_clip: float = key(1.0, "clip the global gradient norm to this; 0: no clipping", ge=0)
    muon_lr: float = key(0.02, "muon: peak learning rate of the matrices", gt=0)
    muon_momentum: float = key(0.95, "muon: Nesterov momentum", ge=0, lt=1)
    muon_weight_decay: float = key(0.0, "muon: decoupled decay of the matrices", ge=0)
    ema: float = key(0.0, "decay of a running average of the weights, evaluated beside them as "
                          "val_loss_ema; 0: none", ge=0, lt=1)
    lr_groups: dict = key({}, "name pattern: learning-rate multiplier (0 freezes), or a mapping "
                          "with learning_rate, lr_mult, weight_decay")


@dataclass
class SystemKeys:
    device: str = key("auto", "auto (cuda, then mps, then cpu), cpu, cuda, cuda:1, mps", free=True)
    dtype: str = key("auto", "auto: bfloat16 where the device has it natively, else float16 on "
                     "cuda, else float32", choices=["auto", "bfloat16", "float16", "float32"],
                     free=True)
    compile: str = key("auto", "torch.compile; auto: when the run is long enough to repay it",
                       choices=["auto", "true", "false"], free=True)
    deterministic: bool = key(False, "the same bits every run, also on cuda; slower", free=True)
    cudnn_benchmark: bool | None = key(None, "let cuDNN time its algorithms (default: unless "
                                       "deterministic)", free=True)
    distributed: str = key("ddp", "under torchrun: ddp, or fsdp (FSDP2) to shard the model",
                           choices=["ddp", "fsdp"], free=True)
    gradient_checkpointing: str = key(
        "false", "recompute the blocks in the backward pass: less memory, a third more compute; "
        "selective: all but the matrix products", choices=["false", "true", "selective"], free=True)
    num_threads: int | None = key(None, "CPU threads (default: OMP_NUM_THREADS or the physical "
                                  "cores)", ge=1, free=True)
    dist_timeout: float = key(600.0, "seconds a collective may take", gt=0, free=True)
    step_timeout: float = key(0.0, "seconds a step may take before the job ends with its stacks; "
                              "0: no limit", ge=0, free=True)
    on_spike: str = key("warn", "loss spike: warn, skip the update, or rewind to the last "
                        "checkpoint and go on past the bad batches (also where numbers are not "
                        "finite)", choices=["warn", "skip", "rewind"], free=True)
    spike_sigma: float = key(6.0, "standard deviations above the mean that make a spike", gt=0,
                             free=True)


@dataclass
class GPTKeys:
    """The shape of a GPT; the defaults are the production model. model/gpt.py's GPTConfig has the
    same fields."""
    block_size: int = key(512, "tokens in a sequence (context length)", ge=1)
    vocab_size: int | None = key(None, "vocabulary (default: what the data says)", ge=2, le=2**31)
    n_layer: int = key(16, "transformer blocks", ge=1, le=10_000)
    n_head: int = key(6, "attention heads", ge=1)
    n_kv_head: int | None = key(None, "key/value heads of grouped queries (default: n_head)", ge=1)
    n_embd: int = key(384, "width of the residual stream", ge=1, le=1_000_000)
    n_hidden: int | None = key(None, "width inside the MLP (default: 4 x n_embd)", ge=1)
    dropout: float = key(0.0, "dropout probability", ge=0, lt=1)
    bias: bool = key(False, "biases in linear layers and layer norms")
    norm: str = key("rms", "normalisation", choices=["rms", "layer"])
    norm_eps: float = key(1e-5, "epsilon of the normalisation", gt=0)
    pos: str = key("rope", "positions: rotary (half-split) or learned", choices=["rope", "learned"])
    rope_theta: float = key(10000.0, "base of the rotary frequencies", gt=0)
    mlp: str = key("swiglu", "feed-forward layer; gelu is GPT-2's, gelu_exact nanoGPT's",
                   choices=["swiglu", "gelu", "gelu_exact", "relu2"])
    tie_weights: bool = key(True, "the output layer shares the token embedding")
    qk_norm: bool = key(False, "RMS-normalise queries and keys")
    prev_embedding: bool = key(False, "add an embedding of the token before: it sees pairs at once")
    family: str | None = key(None, "what the blocks of other models have, such as Qwen's, as JSON: "
                             "comes with their weights (model/convert/families.py)")


def task_names(paths):
    """{name in the log: path} of eval_tasks: data/my-capitals.jsonl is my_capitals."""
    return {re.sub(r"\W+", "_", os.path.basename(path).partition(".")[0]): path for path in paths}


GROUPS = {"Run": RunKeys, "Batch": BatchKeys, "Length": LengthKeys,
          "Learning rate": LearningRateKeys, "Optimizer": OptimizerKeys, "System": SystemKeys,
          "Model": GPTKeys}
EPOCHS = {"max_epochs": "max_iters", "eval_epochs": "eval_interval",
          "warmup_epochs": "warmup_iters"}  # a length in epochs and the key that it replaces
GROUP_NAMES = {g.lower().replace(" ", "_") for g in GROUPS} | {
    "training", "train", "trainer", "data", "scheduler", "early_stopping", "loss", "logging",
    "evaluation"}


@dataclass
class TrainConfig(GPTKeys, SystemKeys, OptimizerKeys, LearningRateKeys, LengthKeys, BatchKeys,
                  RunKeys):
    """Every key of a run, flat: load_config(), or directly TrainConfig(max_iters=10)."""
    # Names of the keys that no file said but a person. A slot: vars(config) are the keys.
    __slots__ = ("explicit",)

    def is_explicit(self, name):
        """Whether a person asked for the value of a key; where nobody noted that (a TrainConfig()
        made by hand), of all that are not at their default."""
        if hasattr(self, "explicit"):
            return name in self.explicit
        return getattr(self, name) != getattr(type(self)(), name)

    def replace(self, **changes):
        """This configuration with changes."""
        out = replace(self, **changes)
        if hasattr(self, "explicit"):
            out.explicit = self.explicit
        return out

    @property
    def samples_per_step(self):
        """Samples in one optimizer step, over all ranks."""
        return self.batch_size * self.gradient_accumulation_steps

    def micro_batch(self, world_size=1):
        """Samples in a rank's micro-batch: the most, up to batch_size, that divide its share."""
        share = self.samples_per_step // world_size
        return next(b for b in range(min(self.batch_size, share), 0, -1) if share % b == 0)

    def accumulation(self, world_size=1):
        """Micro-batches that a rank computes in one step."""
        return self.samples_per_step // (world_size * self.micro_batch(world_size))

    def in_steps(self, samples):
        """This configuration with epochs turned into steps. samples: in one epoch."""
        per_epoch, changes = samples / self.samples_per_step, {}
        for epochs, steps in EPOCHS.items():
            if (value := getattr(self, epochs)) is not None:
                least = 0 if steps == "warmup_iters" else 1
                changes[steps] = max(least, math.ceil(value * per_epoch - 1e-9))
        return self.replace(**changes)

    def notes(self):
        """What a person should know of this configuration before it runs: a list of sentences."""
        out = [f"{a} {getattr(self, a):g} is {b} {getattr(self, b)}: {a} replaces {b}"
               for a, b in EPOCHS.items() if getattr(self, a) is not None]
        warmup, _, _ = milestones(self)
        if self.warmup_ratio is not None:
            out.append(f"warmup_ratio {self.warmup_ratio:g} is {warmup} steps: it replaces "
                       "warmup_iters and warmup_epochs")
        if warmup > self.max_iters > 0:
            out.append(f"the warm-up of {warmup} steps is longer than the run of "
                       f"{self.max_iters}: the learning rate never reaches its peak")
        if self.min_lr == self.learning_rate and self.lr_schedule not in ("constant", "none"):
            out.append(f"min_lr is the peak learning rate ({self.min_lr:g}): the schedule is flat")
        return out

    @property
    def save_every(self):
        return self.eval_interval if self.save_interval is None else self.save_interval

    @property
    def resume_file(self):
        """The checkpoint that `resume` names, or None where it is one of the words."""
        return None if self.resume in ("auto", "must", "never") else self.resume


FIELDS = {f.name: f for f in fields(TrainConfig)}
START_KEYS = {name for name, f in FIELDS.items() if f.metadata.get("start")}
