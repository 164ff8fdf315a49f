"""The configuration blocks and command lines of the five source documents of requirements.md, as
printed there with other paths and data: each is accepted, or refused with what to use instead."""

import json
import re
import shlex

import pytest
import yaml
from conftest import REPO, TINY

import run_train
from train.base.errors import ConfigError
from train.config import load_config
from train.tools import hpo

DOCUMENTS = REPO.parent / "shared" / "documents"


@pytest.fixture
def page(tmp_path, capsys):
    """page(text, arguments...): (exit code, output) of run_train.py --print_config with a YAML file
    of this text."""
    def show(text, *words):
        (tmp_path / "block.yaml").write_text(text)
        code = run_train.main(["--config", str(tmp_path / "block.yaml"), *words, "--print_config"])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err and "did you mean" not in captured.err
        return code, captured.out + captured.err
    return show


# -----------------------------------------------------------------------------
# blocks of YAML that are accepted: (document, text, keys that it sets, words of the notes)

MEMORY = """
training:
  memory_lr: 2e-4
  lora_lr: 1e-4
  base_model_lr: 1e-5
  training_mode: instruction_finetuning  # or "pretraining"
  max_length: 4096
  distributed_strategy: ddp  # or "fsdp"
  num_gpus: 1
  fsdp_sharding_strategy: FULL_SHARD
  batch_size: 4
  gradient_accumulation_steps: 4
  max_steps: 10000
  warmup_steps: 100
  optimizer: adamw
  weight_decay: 0.01
  max_grad_norm: 1.0
  scheduler: cosine  # or "linear", "constant"
  mixed_precision: bf16        # "no", "fp16", "bf16"
  save_precision: fp32         # Optional: "fp32", "fp16", "bf16"
  gradient_checkpointing: true
  save_steps: 500
  eval_steps: 500
  save_total_limit: 3
  save_best_model: true
  early_stopping: false
  early_stopping_patience: 3
  early_stopping_threshold: 0.0
  logging_steps: 10
  log_to_wandb: false
  output_dir: ./outputs
"""
MEMORY_DATA = """
  dataset_name: OWNER/CHATS
  dataset_subset: null
  dataset_split: train_sft
  text_field: messages
"""
AUTOENCODER = """
learning_rate: 1.0e-4
batch_size: 64
num_epochs: 100
weight_decay: 1.0e-5
reconstruction_weight: 1.0
fmri_weight: 1.0
video_weight: 1.0
audio_weight: 1.0
text_weight: 1.0
scheduler_type: 'cosine'  # 'cosine', 'step', or 'none'
warmup_epochs: 5
min_lr: 1.0e-6
gradient_clip_val: 1.0
use_mixed_precision: true
num_workers: 4
checkpoint_dir: 'checkpoints'
save_every: 5
early_stopping_patience: 10
"""
WORKERS = "ignored: batches are always prefetched"
BLOCKS = [
    (1, "training:\n  deterministic: true\n  cudnn_benchmark: false\n",
     dict(deterministic=True, cudnn_benchmark=False), []),
    (1, "training:\n  deterministic: false\n  cudnn_benchmark: true\n",
     dict(deterministic=False, cudnn_benchmark=True), []),
    (1, 'amp:\n  enabled: true\n  dtype: "float16"  # or "bfloat16"\n', dict(dtype="float16"), []),
    (1, "num_workers: 8\npin_memory: true\npersistent_workers: true\nprefetch_factor: 2\n", {},
     [f"num_workers, pin_memory, persistent_workers, prefetch_factor {WORKERS}"]),
    (1, "num_epochs: 10\nbatch_size: 16\neval_batch_size: 32\nlearning_rate: 2.0e-5\n"
        "weight_decay: 0.01\ngradient_clip: 1.0\ngradient_accumulation_steps: 1\n",
     dict(max_epochs=10, batch_size=16, learning_rate=2e-5, weight_decay=0.01, grad_clip=1.0,
          gradient_accumulation_steps=1), ["eval_batch_size ignored: evaluations use batch_size"]),
    (1, 'optimizer:\n  name: "adamw"\n  betas: [0.9, 0.999]\n  eps: 1.0e-8\n',
     dict(optimizer="adamw", beta1=0.9, beta2=0.999, adam_eps=1e-8),
     ["optimizer.name read as optimizer adamw", "betas read as beta1 0.9",
      "betas read as beta2 0.999"]),
    (1, 'scheduler:\n  type: "cosine"\n  warmup_ratio: 0.06\n',
     dict(lr_schedule="cosine", warmup_ratio=0.06), ["scheduler.type read as lr_schedule cosine"]),
    (1, 'early_stopping:\n  metric: "val_f1_macro"\n  mode: "max"\n  patience: 3\n'
        "  min_delta: 0.0001\n",
     dict(early_stopping_metric="val_f1_macro", early_stopping_mode="max",
          early_stopping_patience=3, early_stopping_min_delta=0.0001),
     ["early_stopping.mode read as early_stopping_mode max"]),
    (1, 'training:\n  seed: 42\n  deterministic: true\n  cudnn_benchmark: false\namp:\n'
        '  enabled: true\n  dtype: "float16"\nnum_workers: 4\n',
     dict(seed=42, deterministic=True, cudnn_benchmark=False, dtype="float16"), [WORKERS]),
    (1, 'training:\n  seed: 42\n  deterministic: false\n  cudnn_benchmark: true\namp:\n'
        '  enabled: true\n  dtype: "bfloat16"\nnum_workers: 8\npersistent_workers: true\n',
     dict(seed=42, deterministic=False, cudnn_benchmark=True, dtype="bfloat16"), [WORKERS]),
    (1, "training:\n  train_batch_size: 8\n  eval_batch_size: 16\n", dict(batch_size=8), []),
    (1, "training:\n  train_batch_size: 8\n  gradient_accumulation_steps: 2\n",
     dict(batch_size=8, gradient_accumulation_steps=2), []),
    (1, "training:\n  gradient_checkpointing: true\n", dict(gradient_checkpointing="true"), []),
    (1, "amp:\n  enabled: true\n", dict(dtype="auto"), ["amp.enabled read as dtype auto"]),
    (1, "amp.enabled: false\n", dict(dtype="float32"), ["amp.enabled read as dtype float32"]),
    (2, "batch_size: 16\nblock_size: 512\ngradient_accumulation_steps: 4\nmax_iters: 5000\n"
        "learning_rate: 6.0e-4\nmin_lr: 6.0e-5\nwarmup_iters: 200\nweight_decay: 0.1\nbeta1: 0.9\n"
        "beta2: 0.95\ngrad_clip: 1.0\ndevice: 'cuda'\ncompile: true\ndtype: 'bfloat16'\n",
     dict(batch_size=16, block_size=512, gradient_accumulation_steps=4, max_iters=5000,
          learning_rate=6e-4, min_lr=6e-5, warmup_iters=200, weight_decay=0.1, beta1=0.9,
          beta2=0.95, grad_clip=1.0, device="cuda", compile="true", dtype="bfloat16"), []),
    (2, "batch_size: 16\nblock_size: 128\nmax_iters: 10\ndevice: 'cpu'\ncompile: false\n",
     dict(batch_size=16, block_size=128, max_iters=10, device="cpu", compile="false"), []),
    (3, "model: memory\nbackbone: x\n" + MEMORY,
     dict(lr_groups={"memory": {"learning_rate": 2e-4}, "lora_*": {"learning_rate": 1e-4}},
          learning_rate=1e-5, block_size=4096, distributed="ddp", batch_size=4, max_iters=10000,
          gradient_accumulation_steps=4, warmup_iters=100, optimizer="adamw", weight_decay=0.01,
          grad_clip=1.0, lr_schedule="cosine", dtype="bfloat16", save_precision="float32",
          gradient_checkpointing="true", save_interval=500, eval_interval=500, keep_last=3,
          early_stopping_patience=0, early_stopping_min_delta=0.0, log_interval=10, tracker=[],
          out_dir="./outputs"),
     ["training_mode ignored: the data decides", "num_gpus ignored: start `torchrun",
      "fsdp_sharding_strategy ignored: `distributed: fsdp` is FULL_SHARD",
      "save_best_model ignored: ckpt_best.pt is always written",
      "base_model_lr read as learning_rate 1e-05 (with train_base: true"]),
    (3, "training.distributed_strategy: fsdp\ntraining.fsdp_sharding_strategy: FULL_SHARD\n",
     dict(distributed="fsdp"), ["distributed_strategy read as distributed fsdp"]),
    (3, "training.fsdp_sharding_strategy: HYBRID_SHARD\n",
     dict(distributed="hsdp"), ["fsdp_sharding_strategy read as distributed hsdp"]),
    (4, "model: autoencoder\n" + AUTOENCODER,
     dict(learning_rate=1e-4, batch_size=64, max_epochs=100, weight_decay=1e-5, recon_weight=1.0,
          match_weight=1.0, modality_weights=dict(video=1.0, audio=1.0, text=1.0),
          lr_schedule="cosine", warmup_epochs=5, min_lr=1e-6, grad_clip=1.0, dtype="auto",
          out_dir="checkpoints", save_epochs=5, early_stopping_patience=10),
     ["save_every read as save_epochs 5", "video_weight, audio_weight, text_weight read as",
      WORKERS])]


@pytest.mark.parametrize("document, text, keys, notes", BLOCKS)
def test_a_block_is_accepted_and_its_translation_printed(page, tmp_path, document, text, keys,
                                                         notes):
    code, output = page(text)
    assert code == 0, output
    for words in notes:
        assert words in output
    values = yaml.safe_load(output)
    config = load_config(tmp_path / "block.yaml")
    for name, value in keys.items():
        assert getattr(config, name) == value and values[name] == value, name
    # Whatever is not a key of ours is named in a note.
    notes = "".join(line for line in output.splitlines() if line.startswith("# Note: "))
    switched_off = ("log_to_wandb", "early_stopping_patience", "enabled")
    for name in re.findall(r"^ *(?:\w+\.)?(\w+):.*\w", text, re.MULTILINE):
        assert name in values or name in notes or name in switched_off, name


# blocks that are refused: (document, text, what is said)
DATA = ["dataset_name'; prepare the data once, with `python -m data.prepare.chat hf:NAME`",
        "and name the folder, data_dir"]
REFUSED = [
    (3, MEMORY + MEMORY_DATA, [*DATA, "'dataset_split'; it is a part of the name",
                               "'text_field'; it is an option", "3 problems"]),
    (3, "training:\n  dataset_name: OWNER/TEXTS\n  dataset_subset: en\n  text_field: text\n"
        "  training_mode: pretraining\n", [*DATA, "hf:NAME` (texts)", "hf:NAME:SUBSET"]),
    (3, "training:\n  dataset_name: OWNER/CHATS\n  dataset_split: train_sft\n"
        "  text_field: messages\n  training_mode: instruction_finetuning\n", DATA),
    (3, "training:\n  dataset_name: OWNER/CODE\n  text_field: [instruction, input, output]\n"
        "  training_mode: instruction_finetuning\n", [*DATA, "several times for several fields"]),
    (3, "fsdp_sharding_strategy: SHARD_GRAD_OP\n", ["HYBRID_SHARD; there are no other strategies"]),
    (3, "num_gpus: 8\n", ["start `torchrun --nproc_per_node=N run_train.py ...` to use N GPUs"]),
    (4, AUTOENCODER, ["3 problems", "as video_weight, audio_weight, text_weight: unknown key "
                      "'modality_weights'; it is a key of --model autoencoder"])]


@pytest.mark.parametrize("document, text, words", REFUSED)
def test_a_block_without_counterpart_is_refused_with_what_to_use(page, document, text, words):
    code, output = page(text)
    assert code == 2
    for part in words:
        assert part in output


# -----------------------------------------------------------------------------
# command lines: (as in the document, our words, keys that they set or words of the refusal)

CLASSIFIER = "run_train.py --config train/configs/classifier.yaml"
BEST = "best_config=BEST.yaml"
TORCHRUN = "torchrun --nproc_per_node=8 scripts/train.py --config FILE.yaml --distributed"
NODE = ("torchrun --nnodes=2 --nproc_per_node=8 --node_rank={} --master_addr=IP --master_port=12355"
        " scripts/train.py --config FILE.yaml --distributed")
CLI = "--embedding_dim 32 --hidden_dim 512 --num_layers 3 --learning_rate 1e-4 --batch_size 1024 " \
      "--use_mixed_precision True --num_workers 16 --dropout 0.3 --num_epochs 20"
COMMANDS = [
    (0, "torchrun --nproc_per_node=4 -m cli --data_path data/x.csv --output_dir ./checkpoints",
     "run_train.py --data_path data/x.csv --output_dir ./checkpoints",
     dict(data_dir="data/x.csv", out_dir="./checkpoints")),
    (0, "python -m cli " + CLI, "run_train.py " + CLI,
     "1 problem\n  - n_embd (32) must be a multiple of n_head (6); e.g. n_head 4"),
    (0, "python -m cli " + CLI, f"run_train.py {CLI} --n_head 4",
     dict(n_embd=32, n_hidden=512, n_layer=3, learning_rate=1e-4, batch_size=1024, dtype="auto",
          dropout=0.3, max_epochs=20)),
    (1, "python scripts/train_criteria.py", CLASSIFIER, dict(model="classifier")),
    (1, "python scripts/train_criteria.py training.epochs=20 training.train_batch_size=32 "
        "training.learning_rate=3e-5", f"{CLASSIFIER} training.epochs=20 "
        "training.train_batch_size=32 training.learning_rate=3e-5",
     dict(max_epochs=20, batch_size=32, learning_rate=3e-5, n_layer=3)),
    (1, "python scripts/train_criteria.py best_config=BEST.yaml", f"{CLASSIFIER} {BEST}",
     dict(model="classifier", learning_rate=0.005, n_layer=3)),
    (1, "python scripts/train_criteria.py model.pretrained_model=roberta-base",
     f"{CLASSIFIER} model.pretrained_model=roberta-base", dict(init_from="roberta-base")),
    *((1, f"python scripts/train_best.py task={theirs} best_config=BEST.yaml",
       f"{CLASSIFIER} task={theirs} {BEST}", dict(task=ours, learning_rate=0.005, max_epochs=100))
      for theirs, ours in (("criteria", "class"), ("evidence", "span"), ("joint", "joint"))),
    (1, "python scripts/run_hpo_stage.py hpo=stage2_fine task=criteria model=roberta_base",
     f"{CLASSIFIER} hpo=stage2_fine task=criteria", "`python -m train.tools.hpo --config FILE"),
    (1, "python scripts/run_hpo_stage.py hpo=stage2_fine task=criteria model=roberta_base",
     "run_train.py model=roberta_base", "Weights to start from are named by init_from"),
    (1, "python scripts/eval_criteria.py checkpoint=best.pt", "run_train.py checkpoint=best.pt",
     "to evaluate a classifier: `python -m model.classifier checkpoint=FILE`"),
    (2, "python run_train.py", "run_train.py", dict(n_layer=16, max_iters=5000)),
    (2, "python run_train.py --config train/config.yaml", "run_train.py --config train/config.yaml",
     dict(n_layer=16)),
    (3, "accelerate launch --num_processes 4 scripts/train.py --config FILE.yaml",
     "run_train.py --config train/config_test.yaml", dict(distributed="ddp")),
    (3, "accelerate launch --num_processes 4 --use_fsdp scripts/train.py --config FILE.yaml",
     "run_train.py --config train/config_test.yaml --use_fsdp", "; use `distributed: fsdp`"),
    *((4, line, "run_train.py --config train/configs/autoencoder.yaml --distributed",
       dict(distributed="ddp", model="autoencoder"))
      for line in (TORCHRUN, NODE.format(0), NODE.format(1),
                   "python scripts/train.py --config FILE.yaml --distributed")),
    (4, "python scripts/train.py --config FILE.yaml",
     "run_train.py --config train/configs/autoencoder.yaml", dict(max_epochs=60))]
# of other programs, and of the documents' own tests and data classes
OTHER_PROGRAMS = ("mlflow ui", "watch ", "nvtop", "cp ", "pip ", "tensorboard ", "tail ", "vim ",
                  "python -m pytest", "python tests/", "python -c")


@pytest.mark.parametrize("document, line, ours, expected", COMMANDS)
def test_a_command_line_is_accepted_or_refused(tmp_path, capsys, document, line, ours, expected):
    (tmp_path / "best.yaml").write_text("base: x.yaml\nlearning_rate: 0.005\nout_dir: x\n")
    words = shlex.split(ours.replace("BEST.yaml", str(tmp_path / "best.yaml")))[1:]
    code = run_train.main([*words, "--print_config"])
    out, err = capsys.readouterr()
    if isinstance(expected, str):
        assert code == 2 and expected in err and "did you mean" not in err
        return
    assert code == 0, err
    values = yaml.safe_load(out)
    assert {name: values[name] for name in expected} == expected
    if "--distributed" in ours:
        assert "distributed read as distributed ddp (`torchrun --nproc_per_node=N" in out


@pytest.mark.skipif(not DOCUMENTS.exists(), reason="needs the documents")
def test_every_block_and_command_line_is_here():
    def pages(language):
        for number, path in enumerate(sorted(DOCUMENTS.glob("*.txt"))):
            blocks = re.findall(rf"^ *```{language}\n(.*?)^ *```", path.read_text(), re.M | re.S)
            yield from ((number, block) for block in blocks)

    def keys_of(text):
        return tuple(re.findall(r"^ *([\w.]+):", text, re.MULTILINE))

    def options_of(line):
        return [re.sub(r"^[^-=\s]*$|=.*", "", word) for word in shlex.split(line, comments=True)]
    tried = [(number, keys_of(text)) for number, text, *_ in BLOCKS + REFUSED]
    for number, block in pages("yaml"):
        for part in block.split("\n\n#") if "# Pretraining on" in block else [block]:
            names = keys_of(part)
            names += () if "training" in names or number != 3 else ("training",)
            assert any(n == number and set(names) <= {*keys, "training"} for n, keys in tried), part
    commands = [(number, options_of(line)) for number, line, *_ in COMMANDS]
    for number, block in pages("bash"):
        block = re.sub(r"-c \"\n.*?\n\"", "-c x", block.replace("\\\n", " "), flags=re.DOTALL)
        lines = [line.partition("# ")[0].strip() for line in block.splitlines()]
        for line in filter(None, lines):
            line = line.removesuffix(" ...").strip()
            if not line.startswith(OTHER_PROGRAMS) and "dataset.path" not in line:
                assert (number, options_of(line)) in commands, line


# -----------------------------------------------------------------------------
# short runs

def test_a_run_with_all_of_the_classification_guide(tmp_path, data_dir, capsys):
    """The blocks of document 1 in one file, with its dotted overrides."""
    blocks = "".join(text for number, text, *_ in BLOCKS[4:8])
    tiny = {k: v for k, v in TINY.items() if k not in blocks}
    (tmp_path / "c.yaml").write_text(blocks + yaml.safe_dump(tiny | dict(
        data_dir=str(data_dir), out_dir=str(tmp_path / "out"))))
    assert run_train.main(["--config", str(tmp_path / "c.yaml"), "training.epochs=0.02",
                           "amp.enabled=false", "early_stopping.metric=val_loss",
                           "early_stopping.mode=min", "num_workers=4"]) == 0
    out = capsys.readouterr().out
    assert "Note: " in out and "amp.enabled read as dtype float32" in out
    assert "training complete" in out.lower()
    arguments = json.loads((tmp_path / "out/training_args.json").read_text())["arguments"]
    assert (arguments["beta2"], arguments["dtype"], arguments["early_stopping_patience"],
            arguments["warmup_ratio"]) == (0.999, "float32", 3, 0.06)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_translation_is_printed_by_the_first_rank(monkeypatch, capsys, rank):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr("train.robust.run_reporting_errors", lambda config, job, prints: 0)
    assert run_train.main(["--config=train/config_test.yaml", "lr=1e-3", "pin_memory=true"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "Note: lr read as learning_rate 0.001",
        "Note: pin_memory ignored: batches are always prefetched, without workers"][:2 * (1 - rank)]


def test_a_base_model_of_the_hub_is_named_by_hf(tmp_path, data_dir, capsys):
    assert run_train.main(["model.pretrained_model=roberta-base", f"--data_dir={data_dir}",
                           "--config=train/config_test.yaml", f"--out_dir={tmp_path}/out"]) == 2
    assert ("roberta-base: no such file; a model of the Hugging Face hub is hf:OWNER/NAME"
            in capsys.readouterr().err)


def test_the_search_takes_its_stage_by_name(tmp_path, capsys):
    pytest.importorskip("optuna")
    assert hpo.main([f"hpo={tmp_path}/stage2_fine.yaml", f"out_dir={tmp_path}/hpo", "task=criteria",
                     "--config", "train/configs/classifier.yaml"]) == 2
    assert "stage2_fine.yaml: cannot be read" in capsys.readouterr().err


# -----------------------------------------------------------------------------
# rules of the translation

def test_the_translation_is_one_short_table():
    assert len((REPO / "train/aliases.yaml").read_text().splitlines()) <= 150


def test_a_switch_and_the_keys_beside_it():
    """Off it wins over what is set beside it; on it does not; a later source wins over both."""
    for words, dtype in ((["amp.enabled=false", "amp.dtype=float16"], "float32"),
                         (["amp.dtype=float16", "amp.enabled=true"], "float16"),
                         (["use_mixed_precision=False"], "float32"), (["amp=yes"], "auto")):
        assert load_config(None, words).dtype == dtype
    for words, patience in ((["early_stopping=true"], 3), (["early_stopping=off", "patience=9"], 0),
                            (["early_stopping=true", "early_stopping.patience=9"], 9)):
        assert load_config(None, words).early_stopping_patience == patience


def test_a_switch_of_a_file_gives_way_to_the_command_line(tmp_path):
    (tmp_path / "c.yaml").write_text("early_stopping: false\npatience: 4\namp: {enabled: false}\n")
    c = load_config(tmp_path / "c.yaml", ["patience=5", "dtype=bfloat16"])
    assert (c.early_stopping_patience, c.dtype) == (5, "bfloat16")


def test_a_name_means_that_of_its_group(page):
    """The same names at the top of the file are those of training and early stopping."""
    code, output = page("scheduler: {name: ReduceLROnPlateau, patience: 7, factor: 0.3}\n"
                        "training: {evaluation: {batch_size: 64, eval_steps: 50}}\n"
                        "batch_size: 8\npatience: 4\n")
    assert code == 0 and "evaluation.batch_size ignored: evaluations use batch_size" in output
    expected = dict(lr_schedule="plateau", plateau_patience=7, lr_factor=0.3, batch_size=8,
                    eval_interval=50, early_stopping_patience=4)
    assert expected.items() <= yaml.safe_load(output).items()


def test_rates_of_groups_are_merged_and_a_pair_has_two_numbers(page):
    _, output = page("lr_groups: {wte: 0.5}\n", "memory_lr=1e-3", "lora_lr=2e-3")
    assert yaml.safe_load(output)["lr_groups"] == {
        "wte": 0.5, "memory": {"learning_rate": 1e-3}, "lora_*": {"learning_rate": 2e-3}}
    for words, message in ((["betas=0.9"], "beta1: expected a finite number, got ['0.9']"),
                           (["lr_groups={wte:1}", "lora_lr=1"], "lr_groups is set twice"),
                           (["optimizer.name=sgd"], "must be one of adamw, muon; got 'sgd'"),
                           (["training=best"], "default: reproducible, optimized: fast"),
                           (["latent_dim=4"], "it is a key of --model autoencoder")):
        code, output = page("seed: 1\n", *words)
        assert code == 2 and message in output


@pytest.mark.parametrize("name", ["compile", "gradient_checkpointing"])
@pytest.mark.parametrize("text, value", [("False", "false"), ("True", "true"), ("yes", "true"),
                                         ("off", "false")])
def test_booleans_as_yaml_and_python_write_them(page, name, text, value):
    assert yaml.safe_load(page(f"{name}: {text}\n")[1])[name] == value
    assert getattr(load_config(None, [f"{name}={text}"]), name) == value


def test_presets_for_reproducible_and_for_fast_runs(page):
    """`deterministic` is a key; `fast` its opposite; the documents' names for both."""
    reproducible = dict(deterministic=True, cudnn_benchmark=False)
    fast = dict(deterministic=False, cudnn_benchmark=True, dtype="auto", compile="auto")
    for words, keys in ((["training=default"], reproducible), (["--fast"], fast),
                        (["training=optimized"], fast), (["fast=true", "dtype=float16"],
                                                         fast | dict(dtype="float16")),
                        (["--no-fast"], dict(deterministic=True, dtype="float32"))):
        values = yaml.safe_load(page("deterministic: true\ndtype: float32\n", *words)[1])
        assert {name: values[name] for name in keys} == keys
    code, output = page("training: optimized\n", "--deterministic")
    assert code == 2 and "deterministic: true does not go with cudnn_benchmark: true" in output


def test_a_name_with_two_meanings_and_one_that_is_not_set():
    assert load_config(None, ["hidden_dim=64"]).n_hidden == 64
    assert load_config(None, ["model=autoencoder", "hidden_dim=64"]).d_hidden == 64
    for length in ([], ["max_epochs=null"], ["epochs=None"]):  # as in config.yaml of a run in steps
        assert load_config(None, [*length, "save_every=5"]).save_interval == 5
        assert load_config(None, [*length, "step_size=5"]).step_iters == 5
    with pytest.raises(ConfigError, match="'step_size'; step_iters counts steps, not epochs"):
        load_config(None, ["num_epochs=9", "step_size=5"])  # of PyTorch's StepLR
    c = load_config(None, ["resume_from=null", "dataset_name=null", "epochs=null", "fp16=None",
                           "scheduler_type=none", "run_name=ignored"])
    assert (c.resume, c.max_epochs, c.lr_schedule, c.run_name) == ("auto", None, "none", "ignored")
    assert "dataset_name" not in c.origins
