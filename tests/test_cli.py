"""train/base/cli.py: a command's options as a dataclass, and how a command ends."""

import importlib
import urllib.error
from dataclasses import dataclass

import pytest

from train.base.cli import make_options, report_error, run_command, underscores
from train.base.errors import SetupError, UserError, require
from train.base.fields import key


@dataclass
class Sampling:
    top_k: int | None = key(None, "sample from the K most probable tokens", ge=1)


@dataclass
class Options(Sampling):
    """Write text."""
    files: list[str] = key([], "100% text", positional=True, metavar="FILE")
    ckpt: str = key("out/ckpt.pt", "checkpoint", path=True, aliases="checkpoint")
    field: list[str] = key([], "fields", text=True)
    depth: list[int] = key([1], "depths", ge=1)
    mode: str = key("fast", "how", choices=["fast", "slow"])
    low: float = key(0.5, "start", option="from", ge=0, lt=1)
    force: bool = key(False, "replace files")
    compile: bool = key(True, "run without torch.compile")


def parsed(*argv):
    """(exit code, the options that the command gets or None)."""
    got = []
    code = run_command(Options, got.append, argv)
    return code, got[0] if got else None


@pytest.mark.parametrize("name", ["chain", "hpo", "plot", "repeat", "scaling"])
def test_a_tilde_is_the_home_folder(name, monkeypatch):
    """--out=~/x, which the shell leaves as it is: the runs are in the folder that is searched for
    their results."""
    monkeypatch.setenv("HOME", "/home/me")
    tool = importlib.import_module(f"train.tools.{name}")
    cls, = [c for c in vars(tool).values() if getattr(c, "__module__", "") == tool.__name__
            and "out" in getattr(c, "__dataclass_fields__", ())]
    assert make_options(cls, dict(out="~/x")).out == "/home/me/x"


def test_defaults_are_those_of_the_dataclass():
    assert parsed() == (0, Options())


@pytest.mark.parametrize("argv, changes", [
    ("a.txt b.txt", dict(files=["a.txt", "b.txt"])), ("a,b.txt=1", dict(files=["a,b.txt=1"])),
    ("--top-k 3 a", dict(top_k=3, files=["a"])), ("--top_k=null", {}),
    ("--checkpoint x", dict(ckpt="x")), ("--field a,b --field c d", dict(
        field=["a,b", "c"], files=["d"])),
    ("--depth=1,2 --depth 3", dict(depth=[1, 2, 3])), ("--mode slow", dict(mode="slow")),
    ("--from 1e-7", dict(low=1e-7)), ("--force a", dict(force=True, files=["a"])),
    ("--no-compile", dict(compile=False)), ("--ckpt=a=b", dict(ckpt="a=b")),
    ("checkpoint=x top_k=4 z=1", dict(ckpt="x", top_k=4, files=["z=1"])),
    ("--force mode=slow", dict(force=True, mode="slow")),
    ("--ckpt=x mode=slow", dict(ckpt="x", mode="slow")),
    ("--field mode=slow mode=slow", dict(field=["mode=slow"], mode="slow"))])
def test_options_become_values_of_their_type(argv, changes):
    code, options = parsed(*argv.split())
    assert code == 0 and options == Options(**changes)
    assert [type(v) for v in vars(options).values()] == [
        type(v) for v in vars(Options(**changes)).values()]


def test_a_path_that_is_not_utf8_is_printed(capsys):
    assert run_command(Options, lambda options: print(options.ckpt), ["--ckpt=x\udcff.pt"]) == 0
    assert capsys.readouterr().out == "x\\udcff.pt\n"


def test_all_invalid_values_are_reported_at_once(capsys):
    assert parsed("--top_k=0", "--depth=1,x", "--mode=fats", "--from=1") == (2, None)
    assert capsys.readouterr().err.splitlines() == [
        "test_cli: --top_k: must be at least 1, got 0",
        "--depth: expected an integer, got 'x'",
        "--mode: must be one of fast, slow; got 'fats' (did you mean 'fast'?)",
        "--from: must be below 1, got 1.0"]


@pytest.mark.parametrize("argv, words", [
    ("--top-kk=3", "unrecognized arguments: --top_kk=3"),
    ("--top_k", "argument --top_k: expected one argument"),
    ("--no_force", "unrecognized arguments: --no_force"), ("--comp", "unrecognized")])
def test_unknown_options_are_refused_with_the_usage(argv, words, capsys):
    with pytest.raises(SystemExit) as ended:
        parsed(*argv.split())
    text = capsys.readouterr().err
    assert ended.value.code == 2 and text.startswith("usage: python -m test_cli") and words in text


@pytest.mark.parametrize("command, missing", [
    ("train.tools.plot", "RUN"), ("train.tools.scaling --depth 3", "--budgets"),
    ("train.tools.hpo", "--space"), ("data.prepare.prompts example", "--tokenizer"),
    ("data.prepare.pairs example", "--reference"), ("model.convert --ckpt a", "--to"),
    ("model.eval.lm_eval --ckpt a", "--tasks")])
def test_an_option_that_a_command_needs_is_named(command, missing, capsys):
    module, *argv = command.split()
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(module).main(argv)
    assert ended.value.code == 2
    assert f"the following arguments are required: {missing}" in capsys.readouterr().err


def test_the_help_lists_every_option(capsys):
    with pytest.raises(SystemExit) as ended:
        parsed("--help")
    text = capsys.readouterr().out.replace("--ckpt, --check", "--ckpt PATH, --check")  # 3.13
    assert ended.value.code == 0 and "\nWrite text.\n" in text
    for words in ("FILE ...", "100% text", "--top_k N", "--ckpt PATH, --checkpoint PATH",
                  "checkpoint [out/ckpt.pt]", "how (fast | slow) [fast]", "--from X", "start [0.5]",
                  "--force ", "--no_compile "):
        assert words in text, words


def test_required_options_and_positional_arguments():
    @dataclass
    class Required:
        """Both are needed."""
        source: str = key("", "where", positional=True, required=True)
        to: str = key("", "target", required=True)
    got = []
    assert run_command(Required, got.append, ["a", "--to=b"]) == 0
    assert got == [Required("a", "b")]
    for argv in (["a"], ["--to=b"], []):
        with pytest.raises(SystemExit):
            run_command(Required, got.append, argv)
    assert len(got) == 1


def test_other_arguments_can_be_those_of_a_run():
    got = []
    code = run_command(Options, lambda *both: got.append(both) or 5,
                       ["--top_k=2", "--max-iters=3", "lr=1"], load=lambda rest: rest)
    assert code == 5 and got == [(Options(top_k=2, files=["lr=1"]), ["--max_iters=3"])]


@pytest.mark.parametrize("error, code, message", [
    (None, 0, ""), (UserError("two\nlines"), 2, "test_cli: two\nlines\n"),
    (ValueError("no"), 2, "test_cli: no\n"), (OSError("disk"), 2, "test_cli: disk\n"),
    (KeyboardInterrupt(), 130, "test_cli: interrupted\n"),
    (KeyboardInterrupt(15), 143, "test_cli: interrupted\n")])
def test_how_a_command_ends(error, code, message, capsys):
    def work(options):
        assert options.top_k == 3
        if error:
            raise error
    assert run_command(Options, work, ["--top-k", "3"]) == code
    assert capsys.readouterr().err == message


def test_a_bug_keeps_its_traceback():
    def work(options):
        raise KeyError("why")
    with pytest.raises(KeyError, match="why"):
        run_command(Options, work, [])


def test_dashes_and_underscores_are_equivalent():
    assert underscores(("--a-b", "-- c-d", "-g-h", "--e-f=g-h", "-1", "--", "--i-j")) == [
        "--a_b", "-- c-d", "-g-h", "--e_f=g-h", "-1", "--", "--i-j"]


def test_a_missing_package_is_one_line():
    assert require("json.decoder", "this") is __import__("json").decoder
    with pytest.raises(SetupError) as missing:
        require("no_such_package.part", "this template", "no-such")
    assert str(missing.value) == ("this template needs the package no_such_package: "
                                  "pip install no-such")


def test_a_file_of_the_project_that_is_missing_is_named(capsys):
    """A package that is missing is a fault of the program, unless it is optional."""
    assert report_error(ModuleNotFoundError("no", name="train.options.ema"), "name: ") == 2
    assert capsys.readouterr().err.startswith("name: train/options/ema is missing from this copy")
    with pytest.raises(ModuleNotFoundError, match="no"):
        report_error(ModuleNotFoundError("no", name="numpy"))


def test_an_error_of_the_system_names_the_file_and_the_reason(tmp_path, capsys):
    """As other programs write it: [Errno 17] has no meaning for a user."""
    (tmp_path / "file").touch()
    with pytest.raises(OSError) as error:
        (tmp_path / "file").mkdir()
    assert report_error(error.value, "name: ") == 2
    assert capsys.readouterr().err == f"name: {tmp_path}/file: File exists\n"
    report_error(urllib.error.HTTPError("http://a/b", 404, "Not Found", {}, None))
    assert capsys.readouterr().err == "HTTP Error 404: Not Found\n"  # with its own text
