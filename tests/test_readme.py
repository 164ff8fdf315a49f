"""The documents: every command in them is one that the program takes, every cell runs as pasted,
every file and key that they name is there. (Those that run the commands stand with their systems.)
"""

import argparse
import importlib
import importlib.util
import re
import shlex

import pytest
from conftest import REPO

import run_train
from train import system
from train.config import config_class, load_config

PAGES = ("README.md", "train/README.md", "model/README.md", "model/convert/README.md",
         "model/serve/README.md", "data/README.md")
TEXTS = {page: (REPO / page).read_text() for page in PAGES}


def blocks_of(text, language=""):
    """The fenced blocks of a page that are in `language`."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for name, block in found if name == language]


def prose_of(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def commands_in(text):
    """Every `python ...` and `torchrun ...` of a page, in blocks and in lines, as words."""
    lines = [line for block in blocks_of(text) for line in block.replace("\\\n", " ").split("\n")]
    lines += re.findall(r"`((?:python|torchrun) [^`\n]+)`", prose_of(text))
    for line in lines:
        for part in line.split("&&"):
            if command := re.search(r"\b(python|torchrun) .*", part.partition(" # ")[0]):
                yield shlex.split(command[0])


COMMANDS = sorted({shlex.join(words) for text in TEXTS.values() for words in commands_in(text)})


class Parsed(BaseException):
    """Ends a command when it has read its arguments."""


def parse(monkeypatch, module, words):
    """(parser, what it left over) of `python -m MODULE WORDS`. SystemExit where it refuses them."""
    original = argparse.ArgumentParser.parse_known_args

    def parse_known_args(self, args=None, namespace=None):
        self.allow_abbrev, self.found = False, vars(self).get("found")
        found = original(self, args, namespace)
        raise Parsed(self, found[1])

    def parse_args(self, args=None, namespace=None):
        self.allow_abbrev = False
        _, rest = original(self, args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {rest}")
        raise Parsed(self, [])
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    with pytest.raises(Parsed) as parsed:
        main_of(module)(words)
    monkeypatch.undo()
    return parsed.value.args


def check_run(words, capsys, monkeypatch):
    """run_train.py takes the arguments; files of runs and of other programs need not be there."""
    words = [re.sub(r"^(best_config=)?out/.*\.yaml$", r"\1train/config.yaml", w) for w in words]
    code = run_train.main([*words, "--print_config"])
    said = capsys.readouterr()
    assert code == 0, said.err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_one_that_the_program_takes(command, monkeypatch, capsys):
    first, *words = shlex.split(command)
    if first == "torchrun":
        from torch.distributed.run import get_args_parser
        args = get_args_parser().parse_args(words)
        assert args.training_script == "run_train.py"
        return check_run(args.training_script_args, capsys, monkeypatch)
    if words[0] == "run_train.py":
        return check_run(words[1:], capsys, monkeypatch)
    assert words[0] == "-m"
    assert importlib.util.find_spec(words[1]), f"no module {words[1]}"
    for word in words[2:]:
        assert not re.match(r"(train|model|data|tests)/(?!bin/)", word) or (REPO / word).exists()
    if words[1] not in ("pytest", "tests.matrix"):
        _, rest = parse(monkeypatch, words[1], words[2:])
        assert not rest or load_config(None, rest)  # lr_finder and hpo: run_train.py's
    return None


def test_the_commands_are_found():
    assert len(COMMANDS) > 60
    assert list(commands_in("a `python -m x --y` b\n```\npip q && python z.py \\\n  --a  # b\n```")
                ) == [["python", "z.py", "--a"], ["python", "-m", "x", "--y"]]


@pytest.mark.parametrize("module, words", [
    ("model.sample", ["--promt", "x"]), ("train.tools.plot", []),
    ("data.prepare", ["--tok", "byte"])])
def test_a_wrong_command_is_noticed(module, words, monkeypatch):
    with pytest.raises(SystemExit):
        parse(monkeypatch, module, words)


SYSTEMS = ("gpt", "chat", "lora", "dpo", "grpo", "distill", "classifier", "moe", "memory", "sae",
           "autoencoder")


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_run_ends_with_a_command_that_uses_it(system, monkeypatch):
    use = importlib.import_module(f"model.{system}").USE
    _, _, module, *words = shlex.split(use.format(
        out="'my runs/a'", best="ckpt_best.pt", data="'my data/a'", ema=" --ema"))
    assert words[0] == "--ckpt" and words[1].startswith("my runs/a/ckpt") and not parse(
        monkeypatch, module, words)[1]


def test_every_key_is_known_and_takes_its_value():
    """What stands as `key: value`."""
    known = {name: system for system in reversed(SYSTEMS)
             for name in config_class(system).__dataclass_fields__}
    seen = 0
    for page, text in TEXTS.items():
        for inside in re.findall(r"`([a-z_0-9]+: [^`\n]+)`", text):
            for name, value in re.findall(r"(\w+): (\{.*?\}|[^,]+)", inside):
                assert name in known, f"{page}: {inside}"
                if value != "N" and known[name] == "gpt":
                    assert load_config(None, [f"--{name}={value}"])
                seen += 1
    assert seen > 25


def test_every_option_belongs_to_a_command(monkeypatch):
    """What stands as `--name`, alone or with its value."""
    known = {"--help", "--config", "--print_config", "--dry_run", "--key", "--flag", "--no-flag"}
    known |= {f"--{name}" for system in SYSTEMS
              for name in config_class(system).__dataclass_fields__}
    known |= {"--nnodes", "--nproc_per_node", "--node_rank", "--master_addr",
              "--max-restarts"}  # torchrun's
    modules = {words[2] for c in COMMANDS if (words := shlex.split(c))[1] == "-m"}
    for module in modules - {"pytest", "tests.matrix"}:
        with monkeypatch.context() as patch:
            known |= options_of(module, patch)
    for page, text in TEXTS.items():
        for name in re.findall(r"`(--[\w-]+)", prose_of(text)):
            assert name in known or name.replace("--no-", "--") in known, f"{page}: {name}"


def main_of(module):
    """The main() of `python -m MODULE`."""
    found = importlib.import_module(module)
    return getattr(found, "main", None) or importlib.import_module(f"{module}.__main__").main


def options_of(module, monkeypatch):
    """Every option of a command."""
    def stop(self, *args):
        raise Parsed(self)
    for name in ("parse_args", "parse_known_args"):
        monkeypatch.setattr(argparse.ArgumentParser, name, stop)
    with pytest.raises(Parsed) as parsed:
        main_of(module)(["--help"])
    return set(parsed.value.args[0]._option_string_actions)


def paths_in(text):
    """Files and folders of ours that a text names, `train/{a,b}.py` as two."""
    for path in re.findall(r"`((?:train|model|data|tests)/[^`\s]*)`", text):
        start, _, rest = path.partition("{")
        names, _, end = rest.partition("}")
        yield from (start + name + end for name in names.split(","))


def test_every_file_that_is_named_is_there():
    named = [(page, path) for page, text in TEXTS.items() for path in paths_in(text)
             if not re.search("NAME|sine|data/bin", path)]
    assert len(named) > 40
    assert [(page, path) for page, path in named if not (REPO / path).exists()] == []
    for text in TEXTS.values():
        for target in re.findall(r"\]\(#([\w-]+)\)", text):
            titles = re.findall(r"^#+ (.*)", text, re.MULTILINE)
            assert target in {re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles}


def test_the_layout_names_every_folder_and_every_file_of_a_run():
    text = TEXTS["README.md"]
    layout = text[text.index("## Layout"):text.index("## Speed")]
    folders = {path.parent.relative_to(REPO).as_posix() for top in ("train", "model", "data")
               for path in (REPO / top).rglob("*.py")}
    assert len(folders) > 12
    assert [f for f in folders - {"model"} if f"`{f}/`" not in layout] == []
    files = [path.name for path in (REPO / "train").glob("[a-z]*.py")]
    assert len(files) > 12 and [name for name in files if name not in layout] == []


def test_the_model_interface_is_the_one_that_is_declared():
    """The tables of model/README.md name every hook of train/system.py, and nothing else."""
    text = TEXTS["model/README.md"]
    text = text[text.index("## The model interface"):text.index("## Chat and LoRA")]
    file_hooks, module_hooks = text.split("| of the module | |")
    for table, declared in ((file_hooks, system.ModelType), (module_hooks, system.ModelHooks)):
        names = set(re.findall(r"^\| `(\w+)", table, re.MULTILINE)) - {"forward"}
        assert names == {n for n in vars(declared) if not n.startswith("_")} - {"module"}


def test_the_reward_of_the_page_accepts_the_records_of_the_example():
    """As in the commands above it: data.prepare.prompts example, --reward my_reward.py."""
    from data.prepare.samples import example_records
    names = {}
    (cell,) = blocks_of(TEXTS["model/README.md"], "python")
    exec(cell, names)
    _, record = next(example_records("example"))
    assert names["reward"](record["prompt"], record["chosen"], record) > 0.9


def test_pages_are_narrow_and_the_first_one_short():
    lines = TEXTS["README.md"].split("\n")
    assert len(lines) <= 225 and lines.index("## First run") <= 40
    for page, text in TEXTS.items():
        assert [line for line in text.split("\n") if len(line) > 120 and line[0] != "|"] == [], page


def test_cells_run_as_pasted(tmp_path, monkeypatch, capsys):
    """"From Python", one after the other as in a notebook."""
    from data.prepare import prepare
    (tmp_path / "my.txt").write_text("def line(number): return number\n" * 1000)
    prepare([str(tmp_path / "my.txt")], str(tmp_path / "d"))
    monkeypatch.chdir(REPO)
    names = {}
    cells = [cell for cell in blocks_of(TEXTS["train/README.md"], "python")
             if "out/shards" not in cell]  # test_sharded.py has a run with shards
    for cell in cells:
        for old, new in (("data/bin/stdlib", f"{tmp_path}/d"), ('"out/', f'"{tmp_path}/'),
                         ("max_iters=20", "max_iters=4")):
            cell = cell.replace(old, new)
        exec(cell, names)
    assert len(cells) == 6 and names["numbers"]["val_loss"] > 0
    assert [r["iter"] for r in names["result"]["history"]] == [0, 4]
    said = capsys.readouterr().out
    for words in ("evaluated 4", "Model gpt: 66,049", "torch.Size([32, 64])", "def "):
        assert words in said, words
