"""train/config.py through the command line and as a library. Matrix cases 91-105 and 77."""

import importlib
import importlib.abc
import os
import pickle
import re
import runpy
import subprocess
import sys
import time
from dataclasses import asdict

import pytest
from conftest import REPO

import run_train
from train import config
from train.base.errors import ConfigError
from train.base.fields import parse_value
from train.config import (
    FIELDS,
    TrainConfig,
    describe_aliases,
    find_differences,
    format_config,
    format_help,
    input_files,
    load_config,
    to_yaml,
)
from train.setup import validate_config
from train.system import load_model_type


def write(tmp_path, text, name="c.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def problems(path=None, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.problems


def command(*args):
    return subprocess.run([sys.executable, "run_train.py", *args], cwd=REPO, text=True,
                          capture_output=True)


def test_forms_of_an_override():
    c = load_config(None, ["--max_iters", "7", "--batch-size=3", "n_layer=5", "--bias",
                           "--no-tie_weights", "--no_qk_norm", "model.n_head=2",
                           "--learning_rate=1e-4", "--min_lr", "0"])
    assert (c.max_iters, c.batch_size, c.n_layer, c.n_head) == (7, 3, 5, 2)
    assert (c.bias, c.tie_weights, c.qk_norm) == (True, False, False)
    assert (c.learning_rate, c.min_lr) == (1e-4, 0.0)


def test_errors_are_sent_between_ranks():
    error = pickle.loads(pickle.dumps(ConfigError(["one", "two"])))
    assert error.problems == ["one", "two"] and str(error) == str(ConfigError(["one", "two"]))


def test_lists_mappings_and_nothing():
    c = load_config(None, ["--tracker", "tensorboard", "--sample_prompts", "[one, two]",
                           "--lr_groups", "{wte: 0.5, h.0: {weight_decay: 0}}",
                           "--max_epochs", "null"])
    assert c.tracker == ["tensorboard"] and c.sample_prompts == ["one", "two"]
    assert c.max_epochs is None
    assert c.lr_groups == {"wte": 0.5, "h.0": {"weight_decay": 0.0}}
    assert load_config(None, ["--tracker", "[wandb, mlflow]"]).tracker == ["wandb", "mlflow"]


def test_base_files_and_precedence(tmp_path):
    write(tmp_path, "max_iters: 1\nn_layer: 2\nbatch_size: 8\n", "base.yaml")
    path = write(tmp_path, "base: base.yaml\nmax_iters: 2\n")
    c = load_config(path, ["--n_layer=3"])
    assert (c.max_iters, c.n_layer, c.batch_size) == (2, 3, 8)
    write(tmp_path, "base: c.yaml\n", "base.yaml")
    assert "circle" in problems(path)[0]


def test_a_text_that_begins_with_a_bracket_is_given_in_quotes():
    message, = problems(overrides=["--sample_prompts", "[INST] a, b [/INST]"])
    assert "sample_prompts: expected a list such as [\"[a] text\", b], got '[INST] a" in message
    c = load_config(None, ["--sample_prompts", "[\"[INST] a, b [/INST]\", c]"])
    assert c.sample_prompts == ["[INST] a, b [/INST]", "c"]


@pytest.mark.parametrize("name", ["no", "é\x85b", "a\u2028 b\u2029", "\x85\u2028 c\n\r\n'd\": "])
def test_written_configuration_reads_back_the_same(tmp_path, name):
    """Also what is a line break to YAML, but not to others."""
    c = load_config(None, ["--learning_rate=1e-4", "--tracker=wandb", "--run_name", name,
                           "--min_lr=0", f"--sample_prompts={name}"])
    assert load_config(write(tmp_path, to_yaml(c))) == c


@pytest.mark.matrix(91)
def test_an_unknown_key_is_offered_the_nearest(tmp_path):
    path = write(tmp_path, "n_layr: 2\n")
    assert "c.yaml:1: unknown key 'n_layr' (did you mean 'n_layer'?)" in problems(path)[0]
    path = write(tmp_path, "epoch: 2\n")  # of the names that others have
    assert "unknown key 'epoch' (did you mean 'epochs'?)" in problems(path)[0]


def test_defaults_of_earlier_versions_are_ignored_and_other_values_refused(tmp_path):
    """In the config.yaml of their runs: keys that were removed, and a default that was null."""
    path = write(tmp_path, "dpo_loss: sigmoid\nlength_normalized: false\nquantize_base: no\n"
                           "grpo_beta: 0.0\nclass_weights: null\neval_task_rows: null\n")
    assert load_config(path) == load_config(None)
    path = write(tmp_path, "dpo_loss: ipo\nquantize_base: int8\ngrpo_beta: 0.1\n")
    assert [p.split("'")[1] for p in problems(path)] == ["dpo_loss", "quantize_base", "grpo_beta"]


@pytest.mark.matrix(92)
def test_exponent_without_a_dot_is_a_number(tmp_path):
    assert load_config(write(tmp_path, "learning_rate: 1e-4\n")).learning_rate == 1e-4


@pytest.mark.matrix(93)
@pytest.mark.parametrize("line, expected", [
    ("n_layer: twelve", "an integer"), ("n_layer: true", "an integer"),
    ("n_layer: 1.5", "an integer"), ("learning_rate: fast", "a finite number"),
    ("bias: 3", "true or false"), ("optimizer: [adamw]", "text"), ("lr_groups: 3", "a mapping"),
    ("optimizer: adam", "must be one of adamw, muon"), ("n_layer:", "an integer")])
def test_wrong_types_are_refused(tmp_path, line, expected):
    [problem] = problems(write(tmp_path, line + "\n"))
    assert expected in problem and "c.yaml:1" in problem


@pytest.mark.matrix(94)
def test_a_duplicate_key_is_refused(tmp_path):
    assert "set twice" in problems(write(tmp_path, "n_layer: 2\nn_layer: 3\n"))[0]


def test_a_duplicate_key_comes_with_advice_that_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = os.path.basename(write(tmp_path, "n_layer: 2\nn_layer: 3\n", "config.yaml"))
    assert problems(file)[0].endswith("config.yaml:1); keep one")
    for name in ("tracker", "sample_prompts", "lr_groups"):
        assert problems(None, [f"{name}=a"] * 2)[0].endswith(
            "; keep one, as [VALUE, VALUE] or {NAME: VALUE, NAME: VALUE}")
    c = load_config(None, ["tracker=[wandb, mlflow]", "lr_groups={wte: 2, wpe: 3}"])
    assert c.tracker == ["wandb", "mlflow"] and c.lr_groups == {"wte": 2, "wpe": 3}


@pytest.mark.matrix(95)
def test_an_empty_file_is_refused(tmp_path):
    assert "empty" in problems(write(tmp_path, ""))[0]


@pytest.mark.matrix(96)
def test_a_list_at_top_level_is_refused(tmp_path):
    assert "sequence at top level" in problems(write(tmp_path, "- n_layer\n"))[0]


@pytest.mark.matrix(97)
def test_a_tab_is_refused_with_its_line(tmp_path):
    [problem] = problems(write(tmp_path, "n_layer: 2\n\tn_head: 2\n"))
    assert "c.yaml:2" in problem and "tabs" in problem


@pytest.mark.matrix(98)
def test_a_python_tag_is_refused_and_not_run(tmp_path):
    path = write(tmp_path, f"out_dir: !!python/object/apply:os.mkdir [{tmp_path}/ran]\n")
    assert "expected text" in problems(path)[0] and not (tmp_path / "ran").exists()


@pytest.mark.matrix(99)
def test_a_missing_file_is_named():
    assert "No such file" in problems("nowhere.yaml")[0]


@pytest.mark.matrix(100)
def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "c.yaml").write_bytes(b"out_dir: \xff\xfe\n")
    assert "not UTF-8" in problems(str(tmp_path / "c.yaml"))[0]


@pytest.mark.matrix(101)
def test_heads_must_divide_the_width():
    assert "multiple of n_head" in problems(None, ["--n_head=5"])[0]
    assert "n_kv_head (4) must divide" in problems(None, ["--n_kv_head=4"])[0]


@pytest.mark.matrix(102)
def test_a_world_size_that_does_not_divide_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    [problem] = problems(None, ["--batch_size=4", "--gradient_accumulation_steps=2"])
    assert "valid numbers of ranks: 1, 2, 4, 8" in problem


@pytest.mark.matrix(77, 104)
@pytest.mark.parametrize("text", ["--n_layer=0", "--n_layer=-1", "--n_embd=99999999", "--dropout=1",
                                  "--batch_size=0", "--learning_rate=0", "--learning_rate=-1",
                                  "--learning_rate=.inf", "--learning_rate=nan", "--seed=-1"])
def test_values_out_of_range_are_refused(text):
    assert len(problems(None, [text])) == 1


@pytest.mark.matrix(105)
@pytest.mark.alone
def test_all_problems_at_once_exit_2_fast_without_traceback():
    started = time.time()
    done = command("--foo=1", "--n_layr=3", "--n_layer=x", "--n_head", "5", "--bias=maybe",
                   "--seed")
    assert done.returncode == 2 and time.time() - started < 2
    assert "6 problems" in done.stderr and "Traceback" not in done.stderr
    for part in ("foo", "n_layr", "n_layer", "n_head", "bias", "seed"):
        assert part in done.stderr


@pytest.mark.alone
def test_help_shows_every_key_fast():
    started = time.time()
    done = command("--help")
    assert done.returncode == 0 and time.time() - started < 1.5
    assert all(f"--{name} " in done.stdout for name in FIELDS)
    assert max(map(len, format_help().splitlines())) <= 100
    assert re.search(r"^  --seed int +seed of the data order, the initial", done.stdout, re.M)


@pytest.mark.parametrize("name", [
    "checkpoint_format", "compile", "distributed", "dtype", "early_stopping_mode", "gpu",
    "gradient_checkpointing", "lr_schedule", "mlp", "norm", "norm_position", "on_spike",
    "optimizer", "pos", "qk_norm_type", "save_precision", "tracker"])
def test_a_key_with_choices_takes_no_other(name):
    with pytest.raises(ConfigError, match=f"{name}: .*must be one of"):
        load_config(None, {name: "something", "dry_run": True, "world_size": 1})


@pytest.mark.parametrize("model, key", [("memory", "n_chapters"), ("classifier", "span_weight")])
def test_help_of_a_system_shows_its_keys(model, key, capsys):
    for words in (["--model", model], ["--config", f"train/configs/{model}.yaml"]):
        assert run_train.main([*words, "--help"]) == 0
        assert f"  --{key} " in capsys.readouterr().out


def test_the_names_of_other_trainers_are_read_only_if_one_is_used(monkeypatch, capsys):
    monkeypatch.setattr(config, "ALIASES", config.Aliases())
    assert run_train.main(["--help"]) == 0
    validate_config(load_config("train/config_test.yaml", ["--max_iters=3"]))
    assert not vars(config.ALIASES)
    assert load_config(overrides=["--lr=1e-3"]).learning_rate == 1e-3
    assert vars(config.ALIASES)["names"]["lr"] == "learning_rate"


def test_print_config_names_origins(tmp_path):
    write(tmp_path, "weight_decay: 0.2\n", "under.yaml")
    path = write(tmp_path, "base: under.yaml\nn_head: 2\n")
    done = command("--config", path, "--n_layer=3", "--n_embd=64", "--print_config")
    lines = {line.split(":")[0]: line for line in done.stdout.splitlines()}
    assert "command line" in lines["n_layer"] and "c.yaml:2" in lines["n_head"]
    assert "under.yaml:1" in lines["weight_decay"] and "default" in lines["seed"]


@pytest.mark.parametrize("name", ["ops", "core", "serve", "gtp", "../evil", "", "os"])
def test_what_is_no_model_type_is_refused_without_importing_it(monkeypatch, name):
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"imported {name}"))
    (problem,) = problems(overrides=dict(model=name))
    assert f"there is no model type model/{name}.py; expected one of autoencoder, chat" in problem


def test_a_model_file_without_build_model_is_refused(monkeypatch):
    monkeypatch.setattr(importlib, "import_module", lambda name: sys)
    with pytest.raises(ConfigError) as refused:
        load_model_type("chat")
    (problem,) = refused.value.problems
    assert problem.startswith("model: model/chat.py has no build_model(config, data); expected")


def test_a_model_file_that_was_edited_and_reloaded_has_its_new_keys(tmp_path, monkeypatch):
    """in a notebook: importlib.reload(model.edited)"""
    import model
    path = tmp_path / "edited.py"
    monkeypatch.setattr(model, "__path__", [*model.__path__, str(tmp_path)])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for width in (64, 8):
        path.write_text(f"class Keys:\n    width: int = {width}\n\ndef build_model(c, data): ...\n")
        module = importlib.import_module("model.edited")
        importlib.reload(module)
        assert load_config(None, dict(model="edited")).width == width
    del sys.modules["model.edited"]


@pytest.mark.parametrize("name, options", [
    ("sample", ["--max-new-tokens=1"]), ("serve", ["--max-tokens=1", "--port=0"]),
    ("convert", ["--save-precision=float32", "--to=x.pt"]),
    ("classifier.__main__", ["--batch-size=1", "--data=x", "--out=y"]),
    ("sae.__main__", ["--data-dir=x"]), ("autoencoder.__main__", ["--data-dir=x"]),
    ("eval.lm_eval", ["--batch-size=1", "--tasks=hellaswag"])])
def test_every_command_takes_both(name, options, capsys, monkeypatch):
    if name == "eval.lm_eval":
        pytest.importorskip("lm_eval")
    monkeypatch.setattr(sys, "argv", [name, "--ckpt=nowhere.pt", *options])
    assert importlib.import_module(f"model.{name}").main() == 2
    assert "nowhere.pt: no such file" in capsys.readouterr().err


def test_every_shipped_config_is_valid():
    for path in sorted((REPO / "train").glob("config*.yaml")):
        load_config(str(path))


def test_every_key_documents_itself():
    for name, f in FIELDS.items():
        assert len(f.metadata["help"]) > 5, name
        default = getattr(TrainConfig(), name)
        if default is not None and default != {}:
            assert parse_value(FIELDS[name], default) == default


def test_differences_ignores_free_keys_and_equal_global_batches():
    old = load_config(None).__dict__
    free = load_config(None, ["--max_iters=9", "--log_interval=3"])
    assert find_differences(old, free.__dict__) == []
    halved = load_config(None, ["--batch_size=8", "--gradient_accumulation_steps=8"])
    assert find_differences(old, halved.__dict__) == []
    other = load_config(None, ["--batch_size=8"])
    assert find_differences(old, other.__dict__) == [("batch_size", 16, 8)]


def test_ctrl_c_while_importing_is_quiet(monkeypatch, capsys):
    class Interrupted(importlib.abc.MetaPathFinder):
        def find_spec(self, name, *_):
            if name == "train.train":
                raise KeyboardInterrupt
    monkeypatch.delitem(sys.modules, "train.train", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    monkeypatch.setattr(sys, "argv", ["run_train.py", "--data_dir=data/bin/stdlib"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(REPO / "run_train.py"), run_name="__main__")
    assert ended.value.code == 130 and capsys.readouterr() == ("", "")


@pytest.mark.parametrize("option, path", [
    ("--data_dir", "nope"), ("--data_dir", "nope:0.5,data/bin/stdlib:0.5"), ("--resume", "nope"),
    ("--init_from", "nope.pt")])
def test_a_missing_file_is_refused_in_one_line(tmp_path, capsys, option, path):
    out = tmp_path / "out"
    assert run_train.main([option, path, f"--out_dir={out}"]) == 2
    message = capsys.readouterr().err
    start = "init_from: nope" if option == "--init_from" else "nope"
    assert message.startswith(start) and message.count("\n") == 1
    assert "no such file" in message and not out.exists()
    out.mkdir()  # by the user, who keeps it
    assert run_train.main([option, path, f"--out_dir={out}"]) == 2
    assert capsys.readouterr().err == message and out.exists()
    if option != "--resume":
        assert run_train.main([option, path, f"--out_dir={out}", "--dry_run"]) == 2
        assert capsys.readouterr().err == message


@pytest.mark.parametrize("name", sorted(p.name for p in (REPO / "train/configs").glob("*.yaml")
                                        if p.name != "hpo_example.yaml"))
def test_the_shipped_configurations_name_files_that_the_readme_makes(name, tmp_path):
    """Values such as `scratch` and `exact` are no files."""
    config = load_config(REPO / "train/configs" / name, dict(out_dir=str(tmp_path / "out")))
    assert all(path.startswith("out/") for path in input_files(config).values())


def test_the_order_of_lr_groups_is_kept_and_fixed(tmp_path):
    """The last match wins: another order is another run."""
    groups = {"wte": 10.0, "*.weight": 0.5}
    config = load_config(None, dict(lr_groups=groups))
    (tmp_path / "c.yaml").write_text(format_config(config))
    assert list(load_config(tmp_path / "c.yaml").lr_groups.items()) == list(groups.items())
    other = load_config(None, dict(lr_groups=dict(reversed(groups.items()))))
    assert [name for name, *_ in find_differences(asdict(config), asdict(other))] == ["lr_groups"]
    assert not find_differences(asdict(config), asdict(config))


def test_no_name_is_no_folder():
    with pytest.raises(ConfigError, match="out_dir: expected a folder, got ''"):
        load_config(None, dict(out_dir=""))


def test_a_path_with_as_is_no_other_name_of_a_key(tmp_path):
    (tmp_path / "a as b.yaml").write_text("batch_size: 4\nlr: 0.001\n")
    loaded = load_config(str(tmp_path / "a as b.yaml"))
    assert describe_aliases(loaded) == ["Note: lr read as learning_rate 0.001"]
