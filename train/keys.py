"""Every configuration key of a run: name, type, default, meaning and limits, declared once.

To add a key, add a line here. The YAML reader, the command line, `--help`, `--print_config` and the
README table all come from these dataclasses; train/config.py reads and checks them.
"""

from dataclasses import dataclass, field, fields


def key(default, help, **limits):
    """A configuration key. Limits: choices, gt, ge, lt, le, and free=True for keys that may change
    when a run is resumed without changing what it computes."""
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default),
                     metadata=dict(help=help, **limits))
    return field(default=default, metadata=dict(help=help, **limits))


@dataclass
class RunKeys:
    data_dir: str = key("data/bin/stdlib", "folder (or file, or glob) with the token files")
    out_dir: str = key("out", "where the run writes; one run per folder", free=True)
    seed: int = key(1337, "seed of the data order, the initial weights and dropout", ge=0)
    resume: str = key("auto", "auto: continue what is in out_dir; never: move it aside and start "
                      "afresh; must: refuse to start without it", choices=["auto", "never", "must"],
                      free=True)
    init_from: str = key(
        "scratch", "scratch, or a checkpoint whose weights to start from", free=True)
    allow_change: bool = key(False, "resume although keys or data changed", free=True)
    eval_only: bool = key(False, "evaluate once, print the numbers and stop", free=True)
    tracker: list[str] = key(
        [], "also log to tensorboard, wandb or mlflow (a list is fine)",
        free=True, choices=["tensorboard", "wandb", "mlflow"])
    run_name: str | None = key(None, "name shown by the trackers (default: out_dir)", free=True)


@dataclass
class BatchKeys:
    batch_size: int = key(16, "sequences in a micro-batch: the most one device holds at once", ge=1)
    block_size: int = key(512, "tokens in a sequence (context length)", ge=1)
    gradient_accumulation_steps: int = key(4, "micro-batches in an optimizer step, over all ranks: "
                                           "one step sees batch_size x this many sequences", ge=1)
    auto_batch: bool = key(
        False, "after an out-of-memory, halve the micro-batch at the same global batch", free=True)


@dataclass
class LengthKeys:
    max_iters: int = key(5000, "optimizer steps", ge=0, free=True)
    max_epochs: float | None = key(
        None, "passes over the data; replaces max_iters", gt=0, free=True)
    eval_interval: int = key(250, "steps between evaluations; 0: never", ge=0, free=True)
    eval_iters: int = key(50, "validation batches of batch_size sequences", ge=1, free=True)
    log_interval: int = key(10, "steps between log lines", ge=1, free=True)
    save_interval: int | None = key(None, "steps between checkpoints (default: eval_interval); 0: "
                                    "only at the end", ge=0, free=True)
    keep_last: int = key(
        0, "numbered checkpoints to keep besides the latest and best", ge=0, free=True)
    sample_tokens: int = key(
        128, "tokens of sample text at each evaluation; 0: none", ge=0, free=True)
    sample_prompts: list[str] = key(
        [], "prompts of the samples (default: the end of text)", free=True)


@dataclass
class LearningRateKeys:
    learning_rate: float = key(6e-4, "peak learning rate", gt=0, le=100)
    min_lr: float | None = key(
        None, "learning rate at the end (default: a tenth of the peak)", ge=0)
    lr_schedule: str = key("cosine", "shape after the warm-up", choices=[
        "cosine", "linear", "constant", "wsd", "step", "plateau"])
    warmup_iters: int = key(200, "steps of linear warm-up", ge=0)
    warmup_ratio: float | None = key(
        None, "warm-up as a fraction of max_iters; replaces warmup_iters", ge=0, lt=1)
    warmup_epochs: float | None = key(
        None, "warm-up in passes over the data; replaces warmup_iters", ge=0)
    lr_decay_iters: int | None = key(
        None, "step at which min_lr is reached (default: max_iters)", ge=1)
    wsd_decay: float = key(0.5, "wsd: fraction of the run that decays", gt=0, le=1)
    step_iters: int | None = key(
        None, "step: steps between drops (default: a third of the run)", ge=1)
    lr_factor: float = key(0.5, "step and plateau: factor of a drop", gt=0, lt=1)
    plateau_patience: int = key(
        5, "plateau: evaluations without a better val_loss before a drop", ge=0)
    early_stopping_patience: int = key(
        0, "stop after this many evaluations without improvement; 0: never", ge=0, free=True)
    early_stopping_min_delta: float = key(0.0, "the least change that counts as improvement", ge=0,
                                          free=True)
    early_stopping_metric: str = key("val_loss", "evaluation number that early stopping watches")
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
    muon_lr: float = key(
        0.02, "muon: learning rate of the block matrices (follows the schedule)", gt=0)
    muon_momentum: float = key(0.95, "muon: Nesterov momentum", ge=0, lt=1)
    muon_weight_decay: float = key(0.0, "muon: decoupled decay of the block matrices", ge=0)
    lr_groups: dict = key(
        {}, "name pattern: learning-rate multiplier (0 freezes), or a mapping with learning_rate, "
            "lr_mult, weight_decay")


@dataclass
class SystemKeys:
    device: str = key("auto", "auto (cuda, then mps, then cpu), cpu, cuda, cuda:1, mps", free=True)
    dtype: str = key(
        "auto", "auto: bfloat16 where the device has it natively, else float16 on cuda, else "
                "float32", choices=["auto", "bfloat16", "float16", "float32"], free=True)
    compile: str = key("auto", "torch.compile; auto: when the run is long enough to repay it",
                       choices=["auto", "true", "false"], free=True)
    deterministic: bool = key(False, "the same bits every run, also on cuda; slower", free=True)
    distributed: str = key("ddp", "under torchrun: ddp, or fsdp (FSDP2) to shard the model",
                           choices=["ddp", "fsdp"], free=True)
    gradient_checkpointing: str = key(
        "false", "recompute the blocks in the backward pass: less memory, a third more compute; "
                 "selective: all but the matrix products",
        choices=["false", "true", "selective"], free=True)
    num_threads: int | None = key(
        None, "CPU threads (default: OMP_NUM_THREADS or the physical cores)", ge=1, free=True)
    dist_timeout: float = key(600.0, "seconds a collective may take", gt=0, free=True)
    step_timeout: float = key(
        0.0, "seconds a step may take before the job ends with its stacks; 0: no limit",
        ge=0, free=True)
    on_spike: str = key(
        "warn", "loss spike: warn, skip the update, or rewind to the last checkpoint and go on "
                "past the bad batches", choices=["warn", "skip", "rewind"])
    spike_sigma: float = key(6.0, "standard deviations above the mean that make a spike", gt=0)


@dataclass
class ModelKeys:
    model: str = key("gpt", "file in model/ that builds the model")
    n_layer: int = key(16, "transformer blocks", ge=1, le=10_000)
    n_head: int = key(6, "attention heads", ge=1)
    n_kv_head: int | None = key(
        None, "key/value heads, for grouped-query attention (default: n_head)", ge=1)
    n_embd: int = key(384, "width of the residual stream", ge=1, le=1_000_000)
    n_hidden: int | None = key(None, "width inside the MLP (default: 4 x n_embd)", ge=1)
    vocab_size: int | None = key(None, "vocabulary (default: what the data says)", ge=2, le=2**31)
    dropout: float = key(0.0, "dropout probability", ge=0, lt=1)
    bias: bool = key(False, "biases in linear layers and layer norms")
    norm: str = key("rms", "normalisation", choices=["rms", "layer"])
    norm_eps: float = key(1e-5, "epsilon of the normalisation", gt=0)
    pos: str = key("rope", "positions: rotary (half-split) or learned", choices=["rope", "learned"])
    rope_theta: float = key(10000.0, "base of the rotary frequencies", gt=0)
    mlp: str = key("swiglu", "feed-forward layer", choices=["swiglu", "gelu", "relu2"])
    tie_weights: bool = key(True, "the output layer shares the token embedding")
    qk_norm: bool = key(False, "RMS-normalise queries and keys")
    softcap: float = key(0.0, "cap the logits smoothly at this value; 0: no cap", ge=0)
    zero_init: bool = key(False, "initialise the output projections of the blocks to zero")
    value_embeddings: bool = key(False, "add a gated token embedding to the values of every second "
                                 "layer")
    x0_residual: bool = key(
        False, "learned per-layer scalars on the residual stream and a shortcut from the embedding")
    prev_embedding: bool = key(
        False, "add an embedding of the token before: pairs of tokens are seen at once")


@dataclass
class TrainConfig(ModelKeys, SystemKeys, OptimizerKeys, LearningRateKeys, LengthKeys, BatchKeys,
                  RunKeys):
    """Every key of a run, flat: load_config(), or directly TrainConfig(max_iters=10)."""

    @property
    def sequences_per_step(self):
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def tokens_per_step(self):
        return self.sequences_per_step * self.block_size


GROUPS = {"Run": RunKeys, "Batch": BatchKeys, "Length": LengthKeys,
          "Learning rate": LearningRateKeys, "Optimizer": OptimizerKeys, "System": SystemKeys,
          "Model": ModelKeys}
FIELDS = {f.name: f for f in fields(TrainConfig)}
