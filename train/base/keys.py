"""Every configuration key of a run: name, type, default, meaning and limits.

To add a key, add a line: YAML files, the command line, --help and --print_config are generated from
these dataclasses. train/config.py reads and checks the values. A model type declares more keys in
a dataclass `Keys`.
"""

import functools
import math
import os
import re
from dataclasses import dataclass, fields, replace

from train.base.errors import ConfigError
from train.base.fields import fields_by_name, key, parse_mixture

# Metadata of a key besides the limits in train/base/fields.py:
#   free=True     the key may change when a run is resumed
#   start=True    the key belongs to one start, not to the run: it is not saved
#   shape=True    the key is part of a model's shape and is inherited with the weights (init_from)
#   reads=True    the key names a file that the run reads, which --resume never must not move;
#                 reads="apart": a model of any shape
#   needs="NAME=A|B"  the key has no effect unless NAME is A or B, or has the letter A or B;
#                 needs="NAME": unless NAME is set


free_key = functools.partial(key, free=True)
MAX_CONTEXT = 4096  # of weights with a longer one: a cache allocates all of it


def parse_rope_scaling(text):
    """Return a rope_scaling value as floats: (factor,) or (factor, low, high, original length).

    text: "8" or, of Llama 3, "8,1,4,8192". ValueError otherwise; all must be positive and finite.
    """
    numbers = tuple(float(number) for number in text.split(","))
    if len(numbers) not in (1, 4) or not all(0 < x < math.inf for x in numbers):
        raise ValueError
    return numbers


@dataclass
class RunKeys:
    model: str = key("gpt", "model type, a file in model/")
    data_dir: str = free_key("data/bin/stdlib", "folder, file or glob, or a mixture of different "
                             "folders, weights above 0: a:7,b:3", path=True, check=parse_mixture)
    out_dir: str = free_key("out", "output folder; one run per folder", path=True)
    seed: int = key(1337, "seed of the data order, the initial weights and dropout", ge=0)
    resume: str = key("auto", "auto: continue the run in out_dir, if any; never: rename its files "
                      "and start anew; must: only continue; or a checkpoint", start=True, path=True)
    init_from: str = free_key("scratch", "scratch, or weights to start from: a checkpoint, a "
                              "Hugging Face folder, hf:OWNER/NAME", path=True, reads=True)
    allow_change: list[str] = key([], "resume with changes of these keys, data or all", start=True)
    eval_only: bool = key(False, "evaluate once, print the numbers and exit", start=True)
    profile: int = key(0, "profile this many steps, print a breakdown, exit", ge=0, start=True)
    dry_run: bool = key(False, "estimate memory, tokens and time; write nothing", start=True)
    world_size: int | None = key(None, "dry_run: number of GPUs", ge=1, start=True, needs="dry_run")
    nodes: int = key(1, "dry_run: nodes of the plan", ge=1, start=True, needs="dry_run")
    gpu: str = key("h100", "dry_run: GPU of the plan", start=True, needs="dry_run",
                   choices=["a100", "h100", "h200", "b200", "a10g"])
    print_config: bool = key(False, "print every key, its value and its origin", start=True)
    tokenizer: str | None = free_key(None, "for data without one: byte, gpt2 or a file", path=True)
    tracker: list[str] = free_key([], "also log to", choices=["tensorboard", "wandb", "mlflow"])
    mirror: str | None = free_key(None, "folder or s3:// or gs:// URL for copies of checkpoints, "
                                  "from which out_dir continues if it is behind", path=True)
    run_name: str | None = free_key(None, "name in trackers (default: out_dir)", needs="tracker")


@dataclass
class BatchKeys:
    batch_size: int = key(16, "samples per micro-batch: the most that one device holds", ge=1)
    gradient_accumulation_steps: int = key(4, "micro-batches per step, over all ranks", ge=1)


EPOCHS = dict(ge=1e-9, le=1e9)  # limits


@dataclass
class LengthKeys:
    max_iters: int = free_key(5000, "optimizer steps", ge=0)
    max_epochs: float | None = free_key(None, "epochs (replaces max_iters)", **EPOCHS)
    eval_interval: int = free_key(250, "steps between evaluations; 0: never", ge=0)
    eval_epochs: float | None = free_key(None, "epochs between evaluations; 1 with "
                                         "max_epochs if eval_interval is not set either", **EPOCHS)
    eval_iters: int = free_key(50, "validation batches of batch_size samples", ge=1)
    eval_tasks: list[str] = free_key([], "task files NAME.jsonl to evaluate, logged as val_NAME")
    eval_task_rows: int = free_key(200, "first examples per task; 0: all", ge=0, needs="eval_tasks")
    eval_on_start: bool = free_key(True, "also evaluate before the first step")
    log_interval: int = free_key(10, "steps between log lines", ge=1)
    save_interval: int | None = free_key(None, "steps between saves (default: eval_interval)", ge=0)
    checkpoint_format: str = free_key("auto", "sharded: each rank writes its shards; auto: sharded "
                                      "with fsdp and hsdp", choices=["auto", "file", "sharded"])
    keep_last: int = free_key(0, "numbered checkpoints to keep, besides latest and best", ge=0)
    save_epochs: float | None = free_key(None, "epochs between numbered checkpoints", **EPOCHS)
    save_precision: str | None = free_key(None, "also save model.safetensors in this precision",
                                          choices=["float32", "bfloat16", "float16"])
    sample_tokens: int = free_key(128, "tokens to generate at each evaluation; 0: none", ge=0)
    sample_prompts: list[str] = free_key([], "prompts of samples (default: end of text)", text=True)


@dataclass
class LearningRateKeys:
    learning_rate: float = key(6e-4, "peak learning rate", gt=0, le=100)
    min_lr: float | None = key(None, "final learning rate (default: peak / 10; plateau: 0)", ge=0,
                               needs="lr_schedule=cosine|linear|wsd|step|plateau")
    lr_schedule: str = key("cosine", "schedule after the warm-up; none is constant", choices=[
        "cosine", "linear", "constant", "wsd", "step", "plateau", "none"])
    warmup_iters: int = key(200, "steps of linear warm-up", ge=0)
    warmup_ratio: float | None = key(None, "warm-up fraction (replaces warmup_iters)", ge=0, lt=1)
    warmup_epochs: float | None = key(None, "warm-up epochs (replaces warmup_iters)", ge=0, le=1e9)
    lr_decay_iters: int | None = key(None, "step that reaches min_lr (default: max_iters)", ge=1,
                                     needs="lr_schedule=cosine|linear|wsd")
    wsd_decay: float = key(0.5, "wsd: fraction that decays", gt=0, le=1, needs="lr_schedule=wsd")
    step_iters: int | None = key(None, "step: steps between drops (default: max_iters / 3)", ge=1,
                                 needs="lr_schedule=step")
    lr_factor: float = key(0.5, "step and plateau: factor of each drop", gt=0, lt=1,
                           needs="lr_schedule=step|plateau")
    plateau_patience: int = key(5, "plateau: evaluations without improvement before a drop", ge=0,
                                needs="lr_schedule=plateau")
    early_stopping_patience: int = free_key(0, "evaluations without improvement; 0: never", ge=0)
    early_stopping_min_delta: float = free_key(0.0, "smallest change that is an improvement", ge=0,
                                               needs="early_stopping_patience")
    early_stopping_metric: str = key("val_loss", "metric of early stopping and ckpt_best.pt")
    early_stopping_mode: str = key("min", "which metric is better", choices=["min", "max"])


@dataclass
class OptimizerKeys:
    optimizer: str = key("adamw", "muon: for matrices of blocks", choices=["adamw", "muon"])
    weight_decay: float = key(0.1, "decoupled decay of tensors with 2 or more dimensions", ge=0)
    beta1: float = key(0.9, "AdamW: decay of the first moment", ge=0, lt=1)
    beta2: float = key(0.95, "AdamW: decay of the second moment", ge=0, lt=1)
    adam_eps: float = key(1e-8, "AdamW: term added to the denominator", gt=0)
    grad_clip: float = key(1.0, "maximum global norm of the gradients; 0: no clipping", ge=0)
    muon_lr: float = key(0.02, "muon: peak rate of the matrices", gt=0, needs="optimizer=muon")
    muon_momentum: float = key(0.95, "muon: Nesterov momentum", ge=0, lt=1, needs="optimizer=muon")
    muon_weight_decay: float = key(0.0, "muon: decay of the matrices", ge=0, needs="optimizer=muon")
    head_samples: int = key(0, "estimate the training loss from the targets and this many other "
                            "ids, for a large vocabulary; 0: exact", ge=0, needs="model=gpt")
    ema: float = key(0.0, "decay of a moving average of the weights; 0: none", ge=0, lt=1)
    lr_groups: dict = key({}, "{name: factor (0 freezes), or {learning_rate, weight_decay}}")


@dataclass
class SystemKeys:
    device: str = free_key("auto", "auto (cuda, then mps, then cpu), cpu, cuda, cuda:1, mps")
    dtype: str = free_key("auto", "auto: bfloat16 if native, else float16 on cuda, else float32",
                          choices=["auto", "bfloat16", "float16", "float32"])
    compile: str = free_key("auto", "auto: for long runs", choices=["auto", "true", "false"])
    deterministic: bool = free_key(False, "bitwise reproducible runs, also on cuda; slower")
    cudnn_benchmark: bool | None = free_key(None, "autotune cuDNN (default: not deterministic)")
    distributed: str = free_key("ddp", "fsdp: shard the model (FSDP2); hsdp: shard it in each node",
                                choices=["ddp", "fsdp", "hsdp"])
    shard_size: int | None = free_key(None, "hsdp: ranks that share one copy of the model "
                                      "(default: those of a node)", ge=1, needs="distributed=hsdp")
    gradient_checkpointing: str = free_key("false", "recompute blocks in the backward pass, saves "
                                           "memory", choices=["false", "true", "selective"])
    num_threads: int | None = free_key(None, "CPU threads (default: OMP_NUM_THREADS, cores)", ge=1,
                                       le=1024)  # of many more, torch crashes
    dist_timeout: float = free_key(600.0, "timeout of a collective, in seconds", gt=0, le=1e6)
    step_timeout: float = free_key(0.0, "seconds per step, else exit; ten times as long for the "
                                   "first two, saves, evaluations; 0: no limit", ge=0, le=1e6)
    on_spike: str = free_key("warn", "after a loss spike", choices=["warn", "skip"])
    spike_sigma: float = free_key(6.0, "standard deviations above the mean that are a spike", gt=0)


@dataclass
class GPTKeys:
    """Configuration keys of a GPT's architecture, also the fields of GPTConfig in model/gpt.py.

    The defaults are the model of train/config.yaml. check_shape() raises if values contradict.
    """
    block_size: int = key(512, "context length, in tokens", ge=1)
    vocab_size: int | None = key(None, "vocabulary size (default: from the data)", ge=2, le=2**31)
    n_layer: int = key(16, "transformer blocks", ge=1, le=10_000)
    n_head: int = key(6, "attention heads", ge=1)
    n_kv_head: int | None = key(None, "key/value heads of grouped queries (default: n_head)", ge=1)
    n_embd: int = key(384, "width of the residual stream", ge=1, le=1_000_000)
    n_hidden: int | None = key(None, "hidden width of the MLP (default: 4 x n_embd)", ge=1)
    dropout: float = key(0.0, "dropout probability", ge=0, lt=1)
    bias: bool = key(False, "biases in linear layers and layer norms")
    norm: str = key("rms", "normalisation", choices=["rms", "layer"])
    norm_eps: float = key(1e-5, "epsilon of the normalisation", gt=0)
    pos: str = key("rope", "rotary (half-split) or learned positions", choices=["rope", "learned"])
    rope_theta: float = key(10000.0, "base of the rotary frequencies", gt=0, needs="pos=rope")
    mlp: str = key("swiglu", "feed-forward layer; gelu is GPT-2's, gelu_exact nanoGPT's",
                   choices=["swiglu", "geglu", "geglu_exact", "gelu", "gelu_exact", "relu2"])
    tie_weights: bool = key(True, "share the token embedding with the output layer")
    ngram_rows: int = key(0, "add embeddings of the last 3 and the last 4 tokens, rows of a table "
                          "with this many, chosen by hashes; 0: none", ge=0)
    qk_norm: bool = key(False, "RMS-normalise queries and keys")
    prev_embedding: bool = key(False, "add an embedding of the previous token (bigram features)")
    key_offset: bool = key(False, "half of each key is that of the previous token (induction)")
    # Options of imported models (Llama 3, Qwen, Mistral, Gemma 3, ...), inherited with the weights.
    head_dim: int | None = key(None, "width of an attention head (default: n_embd / n_head)", ge=1)
    qkv_bias: bool = key(False, "biases in queries, keys and values, also with bias: false")
    qk_norm_type: str = key("plain", "weights of qk_norm", needs="qk_norm",
                            choices=["plain", "head", "all"])
    norm_position: str = key("pre", "position of the norms; stream: BERT's, which normalise the "
                             "residual stream", choices=["pre", "post", "both", "stream"])
    embed_norm: bool = key(False, "the first norm normalises the embedding itself (ModernBERT)")
    causal: bool = key(True, "a token sees only earlier ones; false: an encoder, for classifiers")
    embed_scale: float = key(1.0, "factor of the token embedding", gt=0)
    score_scale: float = key(1.0, "factor of attention scores, on top of 1 / sqrt(head_dim)", gt=0)
    window: int | None = key(None, "tokens that a layer W sees; training is not faster", ge=1,
                             needs="layer_types=W|w")
    layer_types: str = key("F", "attention of each layer, repeated up to n_layer: F full, W the "
                           "last `window` tokens; f and w: the same without rotary positions")
    rope_scaling: str | None = key(None, "FACTOR of the context, or Llama 3's FACTOR,LOW,HIGH,"
                                   "ORIGINAL_LENGTH", check=parse_rope_scaling, needs="pos=rope")
    window_rope_theta: float | None = key(None, "rope_theta of layers W; unscaled", gt=0,
                                          needs="layer_types=W")
    max_positions: int | None = key(None, "context of the weights, if longer than block_size", ge=1)
    bos_id: int | None = key(None, "id that begins texts, for exports (default: tokenizer's)", ge=0)
    pad_id: int | None = key(None, "id that fills up texts, for exports (default: none)", ge=0)
    eos_ids: str | None = key(None, "end-of-text ids, e.g. 1,2, for exports (default: tokenizer's)",
                              check=lambda text: [int(i) for i in text.split(",")])

    @property
    def context(self):
        """The model's context in tokens: max(block_size, min(max_positions, MAX_CONTEXT))."""
        return max(self.block_size, min(self.max_positions or 0, MAX_CONTEXT))

    @property
    def full_context(self):
        """Context for exports: max(block_size, max_positions); block_size if pos is learned."""
        return max(self.block_size, 0 if self.pos == "learned" else self.max_positions or 0)

    @property
    def rope_factors(self):
        """The key rope_scaling as parse_rope_scaling() returns it; () if it is not set."""
        return parse_rope_scaling(self.rope_scaling) if self.rope_scaling else ()

    def shape_problems(self):
        """Return messages about invalid or contradictory architecture keys."""
        head_dim = self.head_dim or self.n_embd // self.n_head
        rules = {
            f"n_embd ({self.n_embd}) must be a multiple of n_head ({self.n_head}); e.g. n_head "
            f"{math.gcd(self.n_embd, 2 ** self.n_head.bit_length() // 2)}":
                self.head_dim or self.n_embd % self.n_head == 0,
            f"n_embd / n_head or head_dim ({head_dim}) must be even for pos: rope":
                self.pos != "rope" or head_dim % 2 == 0 or self.n_embd % self.n_head > 0,
            f"n_embd / n_head or head_dim ({head_dim}) must be a multiple of 4 for key_offset":
                not self.key_offset or head_dim % 4 == 0 or self.n_embd % self.n_head > 0,
            f"layer_types: {self.layer_types!r}: expected a letter per layer, F, W, f or w":
                re.fullmatch("[FWfw]+", self.layer_types),
            "window: missing; layer_types W and w need it":
                self.window or not set("Ww") & set(self.layer_types),
            "embed_norm: needs norm_position pre or both":
                not self.embed_norm or self.norm_position in ("pre", "both"),
            f"n_kv_head ({self.n_kv_head}) must divide n_head ({self.n_head})":
                self.n_head % (self.n_kv_head or 1) == 0,
            # ops.ID_BITS: larger ids would get the row of another token
            f"prev_embedding, ngram_rows: vocab_size ({self.vocab_size}) must be below 2**20":
                not (self.prev_embedding or self.ngram_rows) or (self.vocab_size or 0) < 1 << 20}
        return [text for text, holds in rules.items() if not holds]

    def check_shape(self):
        """Raise ConfigError with all messages of shape_problems(), if any."""
        if problems := self.shape_problems():
            raise ConfigError(problems)


GROUPS = {"Run": RunKeys, "Batch": BatchKeys, "Length": LengthKeys,
          "Learning rate": LearningRateKeys, "Optimizer": OptimizerKeys, "System": SystemKeys,
          "Model": GPTKeys}
# Headings that group keys in YAML files, here and in other trainers.
GROUP_NAMES = {g.lower().replace(" ", "_") for g in GROUPS} | {
    "training", "train", "trainer", "data", "dataset", "dataloader", "scheduler", "amp",
    "early_stopping", "loss", "logging", "evaluation"}


@dataclass
class TrainConfig(GPTKeys, SystemKeys, OptimizerKeys, LearningRateKeys, LengthKeys, BatchKeys,
                  RunKeys):
    """All configuration keys of a run, as attributes; load_config() returns a checked TrainConfig.

    TrainConfig(max_iters=10) creates one without checks. Use replace() to change a value.
    """
    # {key: where it is set}, by load_config. In a slot, because vars(config) must be the keys.
    __slots__ = ("origins",)

    def is_explicit(self, name):
        """Return whether the user set a key on the command line or in Python, not only in a file.

        If load_config() did not make this TrainConfig: whether the value is not the default.
        """
        if hasattr(self, "origins"):
            return self.origins.get(name, "").partition(" as ")[0] in ("command line", "overrides")
        return getattr(self, name) != getattr(type(self)(), name)

    def replace(self, **changes):
        """Return a copy with unchecked `changes`; for is_explicit(), the user has set them."""
        out = self.inherit(changes)
        if hasattr(self, "origins"):
            out.origins = self.origins | dict.fromkeys(changes, "overrides")
        return out

    def inherit(self, values):
        """Return a copy with unchecked `values`; is_explicit() of a loaded config is unchanged."""
        out = replace(self, **values)
        if hasattr(self, "origins"):
            out.origins = self.origins
        return out

    def probe(self, **changes):
        """Return a copy to measure steps: no evaluations, trackers or mirror, and resume "auto"."""
        return self.replace(resume="auto", tracker=[], mirror=None, eval_only=False, eval_tasks=[],
                            eval_interval=0, eval_epochs=None, early_stopping_metric="val_loss",
                            **changes)

    def unused_keys(self):
        """Return {key: condition} of the keys without effect whose value is not the default.

        condition: when a key has an effect. "NAME": if the key NAME is set (not `None`, 0, False
        or empty). "NAME=A|B": if NAME is A or B, or contains the letter A or B.
        """
        defaults = type(self)()
        return {f.name: f.metadata["needs"] for f in fields(self)
                if not self.has_effect(f) and getattr(self, f.name) != getattr(defaults, f.name)}

    def has_effect(self, f):
        """Return a true value if the key of the field `f` has an effect, as for unused_keys()."""
        name, _, values = f.metadata.get("needs", "").partition("=")
        value = getattr(self, name, True)
        return {str(value), *str(value)} & {*values.split("|")} if values else value

    @property
    def evaluates(self):
        """Whether the run has evaluations: eval_interval or eval_epochs is set and not 0."""
        return bool(self.eval_interval or self.eval_epochs)

    @property
    def samples_per_step(self):
        """Number of samples per optimizer step, over all ranks."""
        return self.batch_size * self.gradient_accumulation_steps

    def micro_batch(self, world_size=1):
        """Return the largest micro-batch, at most batch_size, that divides a rank's samples."""
        share = self.samples_per_step // world_size
        return next(b for b in range(min(self.batch_size, share), 0, -1) if share % b == 0)

    def accumulation(self, world_size=1):
        """Return the number of micro-batches per optimizer step of a rank."""
        return self.samples_per_step // (world_size * self.micro_batch(world_size))

    def in_steps(self, samples):
        """Return a copy with max_iters, eval_interval, warmup_iters from max_epochs etc., if set.

        samples: number of samples per epoch, over all ranks. Steps are rounded up.
        """
        steps_per_epoch = samples / self.samples_per_step
        lengths = dict(max_iters=self.max_epochs, eval_interval=self.eval_epochs,
                       warmup_iters=self.warmup_epochs)
        return self.inherit({name: math.ceil(epochs * steps_per_epoch - 1e-9)
                             for name, epochs in lengths.items() if epochs is not None})

    def replica_size(self, world_size):
        """Return the number of ranks that together hold one copy of the model.

        1 for ddp, all for fsdp; for hsdp shard_size (default: ranks of a node), at most all.
        """
        if self.distributed == "hsdp":
            local = os.environ.get("LOCAL_WORLD_SIZE", "")  # read_environment() refuses other texts
            return min(self.shard_size or int(local if local.isdigit() else world_size), world_size)
        return world_size if self.distributed == "fsdp" else 1

    def shards_model(self, world_size):
        """Return whether each rank holds only a part of the model (replica_size() is above 1)."""
        return self.replica_size(world_size) > 1

    def saves_shards(self, world_size):
        """Return whether checkpoints are sharded, by the key checkpoint_format.

        "auto": if the model is sharded, and neither save_precision nor mirror is set.
        """
        if self.checkpoint_format == "auto":
            return self.shards_model(world_size) and not (self.save_precision or self.mirror)
        return self.checkpoint_format == "sharded"

    @property
    def resume_file(self):
        """Path of the checkpoint that `resume` names; `None` if `resume` is auto, must or never."""
        return None if self.resume in ("auto", "must", "never") else self.resume


FIELDS = fields_by_name(TrainConfig)
START_KEYS = {name for name, f in FIELDS.items() if f.metadata.get("start")}
