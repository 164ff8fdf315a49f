"""Configuration at its edges: values of every type, words of the command line, lengths in epochs,
limits met exactly, and what must hold between keys."""

import importlib
import os
from dataclasses import dataclass, fields

import pytest
import torch
from conftest import REPO

from model.core.load import REMOVED_KEYS, upgrade_config
from model.gpt import GPT, GPTConfig
from train.base.errors import ConfigError
from train.base.fields import base_type, fields_by_name, key, parse_value
from train.base.keys import FIELDS
from train.config import (
    ALIASES,
    TrainConfig,
    config_class,
    describe_aliases,
    find_conflicts,
    find_differences,
    load_config,
    parse_options,
    read_with_bases,
    resolve,
    to_yaml,
)
from train.lr_scheduler import ReduceOnPlateau, get_lr


@pytest.mark.parametrize("name, raw, value", [
    ("bias", "Yes", True), ("bias", "on", True), ("bias", "TRUE", True), ("bias", "no", False),
    ("bias", "off", False), ("bias", False, False), ("cudnn_benchmark", "null", None),
    ("max_iters", " 7 ", 7), ("max_iters", 0, 0), ("seed", "0", 0), ("n_kv_head", "~", None),
    ("n_kv_head", None, None), ("min_lr", "", None), ("min_lr", "0", 0.0),
    ("learning_rate", "1e-3", 0.001), ("learning_rate", 100, 100.0), ("dropout", 0, 0.0),
    ("dropout", "0.999", 0.999), ("beta1", "0", 0.0), ("wsd_decay", "1", 1.0),
    ("n_layer", "10000", 10_000), ("vocab_size", 2**31, 2**31), ("vocab_size", "2", 2),
    ("run_name", "null", None), ("run_name", "Two Words", "Two Words"),
    ("run_name", 3, "3"), ("lr_schedule", "none", "none"), ("compile", True, "true"),
    ("compile", False, "false"), ("tracker", "wandb, mlflow", ["wandb", "mlflow"]),
    ("tracker", "[wandb,mlflow]", ["wandb", "mlflow"]), ("tracker", [], []),
    ("tracker", ("mlflow",), ["mlflow"]), ("allow_change", "a,,b ", ["a", "b"]),
    ("sample_prompts", "one, two", ["one, two"]), ("sample_prompts", ["a", 3], ["a", "3"]),
    ("lr_groups", "{wte: 0}", {"wte": 0.0}), ("lr_groups", {"h": {"lr_mult": "2"}},
                                              {"h": {"lr_mult": 2.0}}),
    ("data_dir", "~/x", os.path.expanduser("~/x")), ("run_name", "~x", "~x")])
def test_values_are_read_as_their_type(name, raw, value):
    read = parse_value(FIELDS[name], raw)
    assert read == value and type(read) is type(value)


def test_types_may_be_texts():
    """As in a model file with `from __future__ import annotations`."""
    @dataclass
    class Keys:
        ids: "list[int]" = key([], "numbers")
        size: "int | None" = key(None, "a number")
    found = fields_by_name(Keys)
    assert parse_value(found["ids"], "1,2") == [1, 2] and parse_value(found["size"], "null") is None


def test_a_model_file_may_use_the_names_of_removed_keys():
    """Also with the value null, which no earlier version had; else its runs cannot be resumed."""
    @dataclass
    class Keys:
        target: str | None = key("x", "what")
        l1: float | None = key(0.1, "a factor")
    values = dict(target=None, l1=None, eval_task_rows=None, seed=3)
    assert upgrade_config(values, fields_by_name(Keys)) == dict(target=None, l1=None, seed=3)


@pytest.mark.parametrize("name, raw, words", [
    ("bias", "maybe", "expected true or false, got 'maybe'"), ("bias", "", "got an empty value"),
    ("max_iters", "1.0", "an integer"), ("max_iters", 2.0, "an integer"),
    ("max_iters", True, "an integer"), ("max_iters", None, "an integer, got an empty value"),
    ("max_iters", "-1", "must be at least 0, got -1"), ("learning_rate", True, "a finite number"),
    ("learning_rate", "nan", "a finite number"), ("learning_rate", "-inf", "a finite number"),
    ("run_name", True, "expected text, got true or no value"),
    ("eval_tasks", True, "expected a list"),
    ("learning_rate", 0, "must be above 0, got 0.0"),
    ("learning_rate", "100.1", "must be at most 100"), ("dropout", "1", "must be below 1, got 1.0"),
    ("max_epochs", "1e308", "at most 1000000000"), ("warmup_epochs", "1e308", "at most 1000000000"),
    ("eval_epochs", "1e-320", "at least 1e-09"), ("save_epochs", "1e-320", "at least 1e-09"),
    ("step_timeout", "1e10", "at most 1000000"), ("dist_timeout", "1e10", "at most 1000000"),
    ("n_layer", "10001", "at most 10000"), ("vocab_size", 1, "at least 2"),
    ("optimizer", "admw", "one of adamw, muon; got 'admw' (did you mean 'adamw'?)"),
    ("optimizer", "x", "one of adamw, muon; got 'x'"), ("optimizer", ["adamw"], "expected text"),
    ("optimizer", "null", "expected text, got an empty value"),
    ("tracker", "wandb,other", "got 'other'"), ("tracker", {"a": 1}, "expected a list"),
    ("lr_groups", "3", "expected a mapping"), ("lr_groups", "{a: {b: c}}", "expected a mapping"),
    ("lr_groups", "{a: true}", "expected a mapping")])
def test_other_values_are_refused_with_what_was_expected(name, raw, words):
    with pytest.raises(ValueError) as refused:
        parse_value(FIELDS[name], raw)
    assert words in str(refused.value)


COUNTS_FROM_0 = {"seed", "max_iters", "eval_interval", "save_interval", "keep_last",
                 "sample_tokens", "eval_task_rows", "warmup_iters", "plateau_patience",
                 "early_stopping_patience", "profile", "bos_id", "pad_id", "head_samples",
                 "ngram_rows"}
COUNTS_FROM_1 = {"world_size", "nodes", "shard_size", "batch_size", "gradient_accumulation_steps",
                 "eval_iters", "log_interval", "lr_decay_iters", "step_iters", "num_threads",
                 "block_size", "n_layer", "n_head", "n_kv_head", "n_embd", "n_hidden", "head_dim",
                 "window", "max_positions"}
FROM_0 = {"min_lr", "warmup_epochs", "early_stopping_min_delta", "weight_decay", "grad_clip",
          "muon_weight_decay", "step_timeout"}
SHARES = {"warmup_ratio", "beta1", "beta2", "muon_momentum", "dropout", "ema"}
ABOVE_0 = {"max_epochs", "eval_epochs", "save_epochs", "adam_eps", "muon_lr",
           "dist_timeout", "spike_sigma", "norm_eps", "rope_theta", "learning_rate", "wsd_decay",
           "lr_factor", "embed_scale", "score_scale", "window_rope_theta"}


@pytest.mark.parametrize("names, good, bad", [
    (COUNTS_FROM_0, [0], [-1]), (COUNTS_FROM_1, [1], [0]), (FROM_0, [0, 7], [-1e-9]),
    (SHARES, [0, 0.99], [-1e-9, 1]), (ABOVE_0, [1e-9, 0.99], [0]), ({"wsd_decay"}, [1], [1.01]),
    ({"lr_factor"}, [], [1]), ({"vocab_size"}, [2], [1])], ids=lambda _: "")
def test_the_range_of_every_number(names, good, bad):
    for name in names:
        assert [parse_value(FIELDS[name], value) for value in good] == good
        for value in bad:
            with pytest.raises(ValueError, match="must be"):
                parse_value(FIELDS[name], value)


@pytest.mark.parametrize("system", sorted(
    p.stem for p in (REPO / "model").glob("*.py") if "class Keys" in p.read_text()))
def test_no_number_of_a_system_may_be_negative(system):
    numbers = [f.name for f in fields(importlib.import_module(f"model.{system}").Keys)
               if base_type(f.type) in (int, float)]
    for name in numbers:
        with pytest.raises(ConfigError, match=f"{name}: must be"):
            load_config(None, [f"model={system}", f"{name}=-1"])


def test_every_number_has_a_range_here():
    assert {n for n, f in FIELDS.items() if base_type(f.type) in (int, float)} == {
        "vocab_size", *COUNTS_FROM_0, *COUNTS_FROM_1, *FROM_0, *SHARES, *ABOVE_0}


@pytest.mark.parametrize("argv, options", [
    (["--max_iters", "7", "x=1=2", "-seed=3"], [("max_iters", "7"), ("x", "1=2"), ("seed", "3")]),
    (["--bias", "--n-layer=2", "--flag"], [("bias", True), ("n_layer", "2"), ("flag", True)]),
    (["--bias", "n_layer=2"], [("bias", True), ("n_layer", "2")]),
    (["--no-bias", "--no_flag"], [("bias", False), ("flag", False)]),
    (["--min_lr", "-1", "--min_lr", "-.5"], [("min_lr", "-1"), ("min_lr", "-.5")]),
    (["--run_name", "-x"], [("run_name", True), ("x", True)]),
    (["--run_name", "a b=c"], [("run_name", "a b=c")]), (["--run_name="], [("run_name", "")]),
    (["training.epochs=2", "--model.n-head", "3", "learning_rate.lr=1"],
     [("epochs", "2"), ("n_head", "3"), ("lr", "1")]),
    (["other.n_layer=2"], [("other.n_layer", "2")])])
def test_words_of_the_command_line(argv, options):
    problems, before = [], list(argv)
    assert parse_options(argv, problems) == [(*option, "command line") for option in options]
    assert problems == [] and argv == before


def test_words_that_are_not_understood():
    problems = []
    [option] = parse_options(["word", "--n_layer=2"], problems)
    [problem] = problems
    assert option[:2] == ("n_layer", "2") and "'word': expected --key value" in problem
    with pytest.raises(ConfigError, match="did you mean --config train/config_gpt2.yaml?"):
        load_config(None, ["train/config_gpt2.yaml"])
    with pytest.raises(ConfigError, match="unknown key 'other.n_layer'"):
        load_config(None, ["other.n_layer=2"])


def test_flags_of_the_command_line():
    c = load_config(None, ["--bias", "--no_tie_weights", "--compile", "--no-compile", "--run_name=",
                           "--tracker", "wandb,mlflow"])
    assert (c.bias, c.tie_weights, c.compile, c.run_name) == (True, False, "false", None)
    assert c.tracker == ["wandb", "mlflow"]
    for flag in ("--max_iters", "--run_name", "--no_max_iters", "--tracker", "--lr_groups"):
        with pytest.raises(ConfigError, match="expected"):
            load_config(None, [flag])


def test_where_the_configuration_file_is_named(tmp_path):
    (tmp_path / "a.yaml").write_text("seed: 3\n")
    for argv in (["--config", f"{tmp_path}/a.yaml"], [f"--config={tmp_path}/a.yaml", "--bias"]):
        assert load_config("train/config.yaml", argv).seed == 3
    assert load_config(None, ["train.config=x.yaml", f"--config={tmp_path}/a.yaml"]).seed == 3


# --- files

def test_a_file_its_base_and_groups(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "base.yaml").write_text("seed: 1\nmax_iters: 1\nn_layer: 1\n")
    (tmp_path / "deep" / "c.yaml").write_text(
        "base: ../base.yaml\nmodel:\n  n_head: 2\n  n_layer: 4\ntraining: {epochs: 3}\nlr: 1e-3\n")
    problems = []
    values = resolve(read_with_bases(str(tmp_path / "deep" / "c.yaml"), problems), FIELDS,
                     problems)
    assert {n: v for n, (v, _) in values.items()} == dict(
        seed="1", max_iters="1", n_layer="4", n_head="2", max_epochs="3", learning_rate="1e-3")
    assert values["n_layer"][1].endswith("c.yaml:4") and values["seed"][1].endswith("base.yaml:1")
    assert problems == []
    (tmp_path / "twice.yaml").write_text("n_layer: 1\nmodel:\n  n_layer: 2\nlr: 1\nlr: 2\n")
    resolve(read_with_bases(str(tmp_path / "twice.yaml"), problems), FIELDS, problems)
    assert [p.split(": ", 1)[1] for p in problems] == [
        f"n_layer is set twice (first at {tmp_path}/twice.yaml:1); keep one",
        f"learning_rate is set twice (first at {tmp_path}/twice.yaml:4 as lr); keep one"]
    (tmp_path / "bases.yaml").write_text("base: base.yaml\nbase: deep/c.yaml\n")
    problems.clear()
    values = resolve(read_with_bases(str(tmp_path / "bases.yaml"), problems), FIELDS, problems)
    assert problems == [] and values["n_layer"][0] == "4"


@pytest.mark.parametrize("name", ["config", "best_config"])
def test_an_option_without_its_file(name):
    with pytest.raises(ConfigError) as refused:
        load_config(overrides=["--n_layer", "1", f"--{name}"])
    assert str(refused.value).splitlines()[1:] == [f"  - command line: --{name}: expected a file"]
    with pytest.raises(ConfigError, match="cannot be read"):  # of a shell variable that is not set
        load_config(overrides=["--n_layer", "1", f"--{name}="])


THEIRS = dict(fp16=("true", "dtype", "float16"), bf16=("True", "dtype", "bfloat16"),
              mixed_precision=("no", "dtype", "float32"), eval_steps=("7", "eval_interval", 7),
              save_steps=("7", "save_interval", 7), logging_steps=("7", "log_interval", 7),
              per_device_train_batch_size=("7", "batch_size", 7), d_model=("96", "n_embd", 96),
              save_total_limit=("7", "keep_last", 7), num_layers=("7", "n_layer", 7),
              checkpoint_dir=("x", "out_dir", "x"), max_grad_norm=("0.5", "grad_clip", 0.5),
              lr_scheduler_type=("constant_with_warmup", "lr_schedule", "constant"),
              use_wandb=("true", "tracker", ["wandb"]),
              patience=("7", "early_stopping_patience", 7))


@pytest.mark.parametrize("name", THEIRS)
def test_names_of_other_trainers(tmp_path, name):
    """In a file, in its groups and on the command line, and it is said."""
    text, key, value = THEIRS[name]
    (tmp_path / "c.yaml").write_text(f"training:\n  {name}: {text}\n")
    for path, options in ((tmp_path / "c.yaml", ()), (None, [f"--{name}", text]),
                          (None, [f"training.{name}={text}"]), (None, {name: text})):
        config = load_config(path, options)
        assert getattr(config, key) == value and config.origins[key].endswith(f" as {name}")


@pytest.mark.parametrize("name", ["per_device_train_batch_size", "batch_size_per_gpu"])
def test_a_batch_per_gpu_is_told_to_be_shared(name):
    note, = describe_aliases(load_config(None, {name: 8}))
    assert note.startswith(f"Note: {name} read as batch_size 8 (a step on N GPUs has no more ")


def test_names_of_other_trainers_that_say_nothing_win_or_clash(tmp_path):
    (tmp_path / "base.yaml").write_text("learning_rate: 1\nfp16: false\nbf16: true\n")
    (tmp_path / "c.yaml").write_text("base: base.yaml\nlr: 2\nuse_wandb: false\n")
    (tmp_path / "twice.yaml").write_text("lr: 1\nlearning_rate: 2\nepochs: 1\nnum_epochs: 2\n")
    c = load_config(tmp_path / "c.yaml")
    assert (c.learning_rate, c.dtype, c.tracker) == (2.0, "bfloat16", [])
    assert load_config(tmp_path / "c.yaml", ["--learning_rate=3", "--lr=4"]).learning_rate == 4
    assert load_config(tmp_path / "c.yaml", ["--lr=4", "--learning_rate=3"]).learning_rate == 3
    assert load_config(None, ["--fp16"]).dtype == "float16"
    assert load_config(None, ["--lr=4", "--d_model=48"]).n_embd == 48
    with pytest.raises(ConfigError) as refused:
        load_config(tmp_path / "twice.yaml")
    assert "max_epochs is set twice" in str(refused.value)
    with pytest.raises(ConfigError, match="command line as lr: learning_rate: expected"):
        load_config(None, ["--lr"])


def test_a_models_own_key_is_its_own(monkeypatch):
    """A key of a model file may have the name that others give to one of ours."""
    monkeypatch.setattr("train.config.config_class", lambda model: dataclass(type(
        "Own", (TrainConfig,), dict(__annotations__=dict(d_model=int), d_model=3))))
    for options in (["--d_model=5"], dict(d_model=5)):
        c = load_config(None, options)
        assert (c.d_model, c.n_embd) == (5, TrainConfig().n_embd)


def test_keys_that_stand_elsewhere_say_where():
    """No key is offered that only looks alike."""
    for name, words in (("num_gpus", "torchrun --nproc_per_node=N"), ("dataset_name", "data_dir"),
                        ("wandb_project", "WANDB_PROJECT"), ("qwerty", "--help")):
        with pytest.raises(ConfigError) as refused:
            load_config(None, [f"--{name}=8"])
        assert words in str(refused.value) and "did you mean" not in str(refused.value)


def test_the_names_of_others_are_not_ours():
    """Each stands for keys that there are, and none hides one of another model."""
    models = ("autoencoder", "classifier", "dpo", "grpo", "lora", "memory", "moe", "sae")
    keys = {m: {f.name for f in fields(config_class(m))} for m in models}
    names = set(FIELDS).union(*keys.values())
    targets = {key for target in ALIASES.names.values()
               for key in ([target] if isinstance(target, str) else target)}
    assert targets - names == {"ignored"}
    assert names.isdisjoint(ALIASES.names) and names & set(ALIASES.hints) == {"distributed"}
    assert {k for k, v in ALIASES.names.items() if v == "ignored"} <= set(ALIASES.hints)
    others = set(ALIASES.names) | set(ALIASES.hints) | REMOVED_KEYS | {"fast"}
    assert set(ALIASES.words) <= names | others
    assert set(ALIASES.switches) <= set(ALIASES.names) | set(ALIASES.words)
    assert targets - set(FIELDS) - {"ignored"} | {"task"} == set(ALIASES.models)
    for own, types in ALIASES.models.items():
        assert {m for m in models if own in keys[m]} == set(types.replace(" or ", ", ").split(", "))


def test_a_runs_arguments_without_those_of_its_start(tmp_path):
    (tmp_path / "a.json").write_text(
        '{"arguments": {"seed": 3, "resume": "must", "eval_only": true}, "pid": 9}')
    c = load_config(tmp_path / "a.json")
    assert (c.seed, c.resume, c.eval_only) == (3, "auto", False)


def test_what_a_search_found_stands_between_file_and_command_line(tmp_path):
    (tmp_path / "c.yaml").write_text("seed: 1\nn_layer: 1\nmax_iters: 1\n")
    (tmp_path / "best.yaml").write_text("seed: 2\nn_layer: 2\nout_dir: theirs\ndata_dir: x\n")
    c = load_config(tmp_path / "c.yaml", [f"best_config={tmp_path}/best.yaml", "--seed=3"])
    assert (c.seed, c.n_layer, c.max_iters) == (3, 2, 1)
    assert (c.out_dir, c.data_dir) == ("out", "data/bin/stdlib")  # its own are not taken over


def test_yaml_of_every_kind_of_value_reads_back(tmp_path):
    c = load_config(None, dict(run_name="a: b # c", tracker=["wandb"], sample_prompts=["x, y", ""],
                               lr_groups={"wte": 0.5, "h.*": {"weight_decay": 0.0}}, min_lr=1e-7,
                               n_kv_head=2, bias=True, data_dir="y", tokenizer="1e3"))
    (tmp_path / "c.yaml").write_text(to_yaml(c))
    assert load_config(tmp_path / "c.yaml") == c


# --- between keys

@pytest.mark.parametrize("changes, words", [
    (dict(n_head=5), "n_embd (384) must be a multiple of n_head (5)"),
    (dict(n_embd=6, n_head=2), "n_embd / n_head or head_dim (3) must be even"),
    (dict(n_embd=6, n_head=2, pos="learned"), None), (dict(n_embd=8, n_head=2), None),
    (dict(n_kv_head=4), "n_kv_head (4) must divide n_head (6)"), (dict(n_kv_head=3), None),
    (dict(prev_embedding=True, vocab_size=1 << 20), "vocab_size (1048576) must be below 2**20"),
    (dict(ngram_rows=9, vocab_size=1 << 20), "below 2**20"), (dict(vocab_size=1 << 20), None),
    (dict(prev_embedding=True, ngram_rows=9, vocab_size=(1 << 20) - 1), None),
    (dict(min_lr=7e-4), "min_lr (0.0007) must not exceed learning_rate (0.0006)"),
    (dict(min_lr=6e-4), None), (dict(lr_schedule="plateau", eval_interval=0), "lr_schedule: plat"),
    (dict(lr_schedule="plateau", eval_interval=0, eval_epochs=1.0), None),
    (dict(eval_interval=0), None), (dict(eval_only=True, eval_interval=0), "eval_only: True needs"),
    (dict(early_stopping_patience=1, eval_interval=0), "early_stopping_patience: 1 needs")])
def test_what_must_hold_between_keys(changes, words):
    found = find_conflicts(TrainConfig(**changes))
    assert found == [] if words is None else len(found) == 1 and words in found[0]


@pytest.mark.parametrize("world, valid", [("1", None), ("4", None), ("12", None), ("", None),
                                          ("x", None), ("5", "1, 2, 3, 4, 6, 12\n")])
def test_ranks_that_share_a_batch(monkeypatch, world, valid):
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "x")  # is refused later
    assert TrainConfig(distributed="hsdp").replica_size(4) == 4
    c = TrainConfig(batch_size=4, gradient_accumulation_steps=3)
    found = [text + "\n" for text in find_conflicts(c)]
    assert not found if valid is None else found[0].endswith(f"valid numbers of ranks: {valid}")
    if valid:
        many = TrainConfig(batch_size=64, gradient_accumulation_steps=81)
        monkeypatch.setenv("WORLD_SIZE", "7")
        assert find_conflicts(many)[0].endswith(", 432, 576, 648, 864")  # up to 1,024


def test_a_problem_of_a_value_hides_what_follows_from_it():
    with pytest.raises(ConfigError) as refused:
        load_config(None, ["--n_head=0", "--min_lr=1", "--n_kv_head=4"])
    assert [p.split(":")[0] for p in refused.value.problems] == [
        "command line", "min_lr (1.0) must not exceed learning_rate (0.0006)"]


@pytest.mark.parametrize("changes, different", [
    ({}, []), (dict(min_lr=6.1e-5), ["min_lr"]),
    (dict(n_hidden=1535), ["n_hidden"]), (dict(n_kv_head=3), ["n_kv_head"]),
    (dict(seed=1, max_iters=9, device="cpu", resume="must"), ["seed"]),
    (dict(batch_size=32, gradient_accumulation_steps=2), []),
    (dict(batch_size=32), ["batch_size"]), (dict(gradient_accumulation_steps=5),
                                            ["gradient_accumulation_steps"]),
    (dict(batch_size=3, gradient_accumulation_steps=3),
     ["batch_size", "gradient_accumulation_steps"])])
def test_what_makes_another_run(changes, different):
    old, new = vars(TrainConfig()), vars(TrainConfig()) | changes
    found = find_differences(old, new)
    assert [n for n, _, _ in found] == different
    assert all((a, b) == (old[n], new[n]) for n, a, b in found)
    del new["seed"]  # a key that one side does not have
    assert [n for n, _, _ in find_differences(old, new)] == [n for n in different if n != "seed"]


def test_the_free_keys_are_these():
    """Written out: what may change when a run is resumed, and what belongs to one start."""
    free = {n for n, f in FIELDS.items() if f.metadata.get("free")}
    assert free == set("""
        checkpoint_format compile cudnn_benchmark data_dir deterministic device dist_timeout
        distributed dtype early_stopping_min_delta early_stopping_patience eval_epochs
        eval_interval eval_iters eval_on_start eval_task_rows eval_tasks gradient_checkpointing
        init_from keep_last log_interval max_epochs max_iters mirror num_threads on_spike out_dir
        run_name sample_prompts sample_tokens save_epochs save_interval save_precision shard_size
        spike_sigma step_timeout tokenizer tracker""".split())
    starts = {n for n, f in FIELDS.items() if f.metadata.get("start")}
    assert starts == {"resume", "allow_change", "eval_only", "profile", "dry_run", "print_config",
                      "world_size", "nodes", "gpu"}


# --- keys without effect

@pytest.mark.parametrize("name", [n for n, f in FIELDS.items()
                                  if "lr_schedule=" in f.metadata.get("needs", "")])
def test_a_key_of_a_schedule_has_an_effect_where_it_is_needed_and_only_there(name):
    """Beside the rates of all steps (of a plateau, which follows evaluations: its factor)."""
    def rates(**changes):
        c = TrainConfig(max_iters=40, warmup_iters=2, **changes)
        plateau = ReduceOnPlateau(c.lr_factor, c.plateau_patience, (c.min_lr or 0) / 6e-4)
        out = []
        for it in range(40):
            if schedule == "plateau":
                plateau.update(1.0)
            out.append(get_lr(it, c) * plateau.scale)
        return out
    value = dict(min_lr=3e-4, lr_decay_iters=20, wsd_decay=0.1, step_iters=4, lr_factor=0.1,
                 plateau_patience=1)[name]
    for schedule in FIELDS["lr_schedule"].metadata["choices"]:
        c = TrainConfig(lr_schedule=schedule, **{name: value})
        is_unused = rates(lr_schedule=schedule) == rates(lr_schedule=schedule, **{name: value})
        assert (name in c.unused_keys()) == is_unused, schedule


@pytest.mark.parametrize("model, keys, unused", [
    ("sae", dict(backbone=None, layer=3, buffer_size=9), {"layer", "buffer_size"}),
    ("distill", dict(teacher="a", on_policy=True, distill_weight=0.9), {"distill_weight"}),
    ("distill", dict(teacher="a", distill_weight=0.9), set())])
def test_keys_that_data_or_another_loss_switch_off_have_no_effect(model, keys, unused):
    assert load_config(None, dict(model=model, **keys)).unused_keys().keys() == unused


def test_what_a_key_needs_is_a_key_and_one_of_its_values():
    for model in ("gpt", "sae", "moe"):
        known = fields_by_name(config_class(model))
        for f in known.values():
            name, _, values = f.metadata.get("needs", "model").partition("=")
            choices = {"layer_types": "FWfw", "model": ["gpt"]}.get(
                name, known[name].metadata.get("choices", ()))
            assert {*values.split("|")} <= {"", *choices}, f.name


def test_keys_without_effect_are_those_that_the_user_set(tmp_path):
    given = ["--plateau_patience=6", "--muon_lr=0.1", "--optimizer=muon", "--eval_task_rows", "3"]
    assert load_config(None, given).unused_keys() == dict(
        plateau_patience="lr_schedule=plateau", eval_task_rows="eval_tasks")
    (tmp_path / "c.yaml").write_text(to_yaml(load_config(None, ["wsd_decay=0.9"])))  # every key
    assert load_config(tmp_path / "c.yaml").unused_keys() == dict(wsd_decay="lr_schedule=wsd")
    assert load_config(None, ["model=sae", "l0=1"]).unused_keys() == dict(l0="sae=jumprelu")
    for path in (REPO / "train" / "configs").glob("[!h]*.yaml"):
        assert not load_config(path).unused_keys(), path


@pytest.mark.parametrize("other, given, unused", [
    (dict(window=5, window_rope_theta=9000.0), dict(layer_types=layers), unused)
    for layers, unused in (("F", {"window", "window_rope_theta"}), ("W", set()), ("FW", set()),
                           ("Ff", {"window", "window_rope_theta"}), ("Fw", {"window_rope_theta"}))
] + [(dict(rope_theta=50.0, rope_scaling="2"), dict(pos="rope"), set()),
     (dict(rope_theta=50.0, rope_scaling="2"), dict(pos="learned"), {"rope_theta", "rope_scaling"}),
     (dict(qk_norm_type="all"), dict(qk_norm=True), set()),
     (dict(qk_norm_type="all"), {}, {"qk_norm_type"})])
def test_keys_of_attention_without_effect_are_those_that_change_no_logits(other, given, unused):
    """Of a model of two layers with other values of these keys."""
    given = dict(window=4, window_rope_theta=70.0) | given if "window" in other else given
    assert load_config(None, given | other).unused_keys().keys() == unused

    def logits(**changes):
        torch.manual_seed(1)
        shape = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=64)
        model = GPT(GPTConfig(**shape | given | changes))
        for p in model.parameters():  # norms begin as ones, of which all kinds are the same
            p.data += torch.randn(p.shape) * 0.2
        return model.logits(model.trunk(torch.arange(16)[None]))
    assert {k for k in other if torch.equal(logits(), logits(**{k: other[k]}))} == unused


# --- lengths

@pytest.mark.parametrize("batch, steps, world, micro, accumulation", [
    (16, 4, 1, 16, 4), (16, 4, 8, 8, 1), (16, 4, 64, 1, 1), (6, 5, 2, 5, 3), (6, 5, 3, 5, 2),
    (5, 7, 7, 5, 1), (4, 9, 1, 4, 9), (7, 4, 2, 7, 2), (7, 4, 4, 7, 1), (8, 3, 6, 4, 1)])
def test_a_batch_is_shared_in_micro_batches(batch, steps, world, micro, accumulation):
    c = TrainConfig(batch_size=batch, gradient_accumulation_steps=steps)
    assert (c.micro_batch(world), c.accumulation(world)) == (micro, accumulation)
    assert micro * accumulation * world == c.samples_per_step


@pytest.mark.parametrize("epochs, steps", [(1.0, 157), (0.5, 79), (2.0, 313), (1e-9, 1),
                                           (6.4 / 10, 100), (156.25 / 100, 245), (0.00639, 1)])
def test_epochs_are_rounded_up_to_whole_steps(epochs, steps):
    """64 samples a step, 10,000 an epoch: 156.25 steps."""
    c = TrainConfig(max_epochs=epochs, eval_epochs=epochs, warmup_epochs=epochs).in_steps(10_000)
    assert (c.max_iters, c.eval_interval, c.warmup_iters) == (steps, steps, steps)
    assert TrainConfig(warmup_epochs=0.0).in_steps(10_000).warmup_iters == 0
    assert TrainConfig(max_iters=7).in_steps(3) == TrainConfig(max_iters=7)


@pytest.mark.parametrize("key, value", [("warmup_iters", 7), ("warmup_epochs", 0.5)])
def test_a_typed_warmup_replaces_the_ratio_of_a_file(tmp_path, key, value):
    (tmp_path / "a.yaml").write_text("warmup_ratio: 0.1\n")
    c = load_config(tmp_path / "a.yaml", [f"--{key}={value}"])
    assert (getattr(c, key), c.warmup_ratio) == (value, None)
    assert load_config(tmp_path / "a.yaml").warmup_ratio == 0.1


def test_of_two_fractions_of_warmup_the_later_is_used_and_both_at_once_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("warmup_epochs: 2\n")
    c = load_config(tmp_path / "a.yaml", ["--warmup_ratio=0.1"])
    assert (c.warmup_ratio, c.warmup_epochs) == (0.1, None)
    with pytest.raises(ConfigError, match="warmup_ratio does not go with warmup_epochs"):
        load_config(None, ["--warmup_ratio=0.1", "--warmup_epochs=2"])


def test_a_run_in_epochs_evaluates_after_each():
    def interval(**keys):
        c = load_config(None, keys).in_steps(4096)
        return c.eval_interval
    shape = dict(batch_size=16, gradient_accumulation_steps=1)  # 256 steps per epoch
    assert interval(max_epochs=3, **shape) == 256
    assert interval(max_epochs=3, eval_interval=7, **shape) == 7
    assert interval(max_epochs=3, eval_epochs=0.5, **shape) == 128
    assert interval(max_iters=3, **shape) == TrainConfig().eval_interval != 256


def test_the_words_of_resume_are_no_file():
    assert [TrainConfig(resume=r).resume_file for r in ("auto", "must", "never", "x.pt")] == [
        None, None, None, "x.pt"]


def test_steps_replace_the_epochs_of_an_earlier_file(tmp_path):
    (tmp_path / "a.yaml").write_text("max_epochs: 100\neval_epochs: 1\nmax_iters: 7\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\nmax_iters: 20\n")

    def lengths(file, *args):
        c = load_config(tmp_path / file, args)
        return c.max_epochs, c.max_iters, c.eval_epochs
    assert lengths("a.yaml") == (100, 7, 1)  # in one file, epochs count
    assert lengths("a.yaml", "--max_iters=6") == (None, 6, 1)
    assert lengths("b.yaml") == (None, 20, 1)
    assert lengths("b.yaml", "--max_epochs=3", "--eval_interval=5") == (3, 20, None)
    assert lengths("a.yaml", "--max_iters=6", "--max_epochs=3")[0] == 3  # both are typed
