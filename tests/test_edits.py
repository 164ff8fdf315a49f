"""The example edits of tests/edits: each applies, has the size that the README states, and passes
python -m train.tools.check."""

import re
import subprocess

import pytest
from conftest import REPO
from test_check import check, prepare_text, repository  # noqa: F401  a fixture

from train.tools.check import CHECKS

EDITS = {"lion": ("--optimizer", "lion"), "window": ("--local_window", "16"), "second_head": (),
         "spans": (), "diffusion": ()}
REFUSED = {"window": "export: refused", "second_head": "GPT (model/gpt.py)",
           "diffusion": "masked diffusion does not write token by token"}


def git(*args, cwd):
    return subprocess.check_output(["git", *args], cwd=cwd, text=True)


def test_every_edit_is_tested_and_in_the_readme():
    names = {path.stem for path in (REPO / "tests" / "edits").glob("*.patch")}
    assert names == EDITS.keys()
    table = re.findall(r"\((\w+)\.patch\).*\| (\d+) \((\d)\) \| (\d+) \((\d)\) \|",
                       (REPO / "tests/edits/README.md").read_text())
    assert {row[0] for row in table} == names
    for name, lines, files, lines_there, files_there in table:
        stat = git("apply", "--numstat", f"tests/edits/{name}.patch", cwd=REPO).splitlines()
        assert sum(int(row.split()[0]) for row in stat) == int(lines) and len(stat) == int(files)
        assert int(lines) <= 1.5 * int(lines_there) and int(files) <= int(files_there) + 1


# The other checks need more runs; all with -m slow.
QUICK = ("resume", "fsdp", "gradients", "loss", "decoding", "flops", "export")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepare_text(tmp_path_factory.mktemp("edits"))


@pytest.mark.ci
@pytest.mark.parametrize("only", [QUICK, pytest.param((), marks=pytest.mark.slow)],
                         ids=["quick", "all"])
@pytest.mark.parametrize("name", EDITS)
def test_an_edit_passes_the_check(name, only, folder, repository):  # noqa: F811
    patch = REPO / "tests" / "edits" / f"{name}.patch"
    git("init", "-q", cwd=repository)
    git("apply", str(patch), cwd=repository)
    try:
        some = [a for check_name in only for a in ("--only", check_name)]
        code, statuses, output = check(folder, "gpt", *EDITS[name], *some, cwd=repository)
        assert code == 0 and statuses.keys() == set(only or CHECKS), output
        assert REFUSED.get(name, "") in output
    finally:
        git("apply", "-R", str(patch), cwd=repository)
