"""The tool that asks whether the tests notice: its faults, its choice of tests, a campaign."""

import ast
import json
import shutil
import subprocess
import sys

import pytest
from conftest import REPO

from tests.mutants import __main__ as mutants
from tests.mutants import covered, mutate


def results(statement):
    source = f"def f(a, b, i):\n    {statement}\n".encode()
    found = [m for m in mutate.mutations(source) if mutate.works(m, source)]
    return {ast.unparse(ast.parse(m.apply(source))).split("\n    ")[1] for m in found}


@pytest.mark.parametrize("statement,expected", [
    ("return a + b", {"return None", "return a - b", "return a"}),
    ("return a < 3", {"return None", "return a <= 3", "return a >= 3", "return a < 4",
                      "return a < 2", "return a < 0"}),
    ("return not a and b", {"return None", "return not a or b", "return b", "return not a",
                            "return a and b"}),
    ("a.eps = f(b, eps=1e-06)", {"pass", "a.eps = f(eps=1e-06)", "a.eps = f(b)",
                                 "a.eps = f(b, eps=2e-06)", "a.eps = f(b, eps=0.0)"}),
    ("del a[i:2]", {"pass", "del a[:2]", "del a[i:]", "del a[i:3]", "del a[i:1]", "del a[i:0]"}),
    ("a += True", {"pass", "a -= True", "a += False"}),
    ("return a['key']", {"return None", "return a['key_']"}),
    ("raise ValueError(f'{a + 1} of two words')", {"pass"}),
    ("print('hello', a + 1)", set()),
    ("a: int | None", set()),
])
def test_a_statement_becomes_these_and_no_others(statement, expected):
    assert results(statement) == expected


def test_conditions_with_and_decorators():
    source = b"@cached\ndef f(a):\n    with frozen():\n        if a:\n            return\n"
    new = [m.apply(source).decode() for m in mutate.mutations(source)]
    assert source.decode().replace("@cached", "") in new
    assert source.decode().replace("with frozen()", "if True") in new
    assert source.decode().replace("if a", "if (not a)") in new
    assert len(new) == 4 and not mutate.works(mutate.Mutation(3, 0, 0, ""), source)


def test_a_draw_is_spread_by_lines_and_depends_on_the_seed_only():
    assert mutants.shares({"a": 10, "b": 20, "c": 1}, 10) == {"a": 3, "b": 7, "c": 0}
    path = "train/lr_scheduler.py"
    files = {path: (REPO / path).read_bytes(), "data/none.py": b""}
    one, two, other = (mutants.draw(files, 12, seed) for seed in (1, 1, 2))
    assert [m.key for m in one] == [m.key for m in two] != [m.key for m in other]
    assert len({m.mutation.line for m in one}) == 12
    assert len(mutate.code_lines(b'"""Doc."""\n\n# why\nx = 1\n')) == 1


TOY = {
    "run_train.py": "",
    "data/none.py": "import math\n",
    "tests/conftest.py": "import os, sys\n"  # bytecode is kept, as by ours
                         "os.environ.pop('PYTHONDONTWRITEBYTECODE', None)\n"
                         "sys.dont_write_bytecode = False\n",
    "model/inside/area.py": '''
LIMIT = 3


def area(w, h):
    """Of a rectangle."""
    return w * h


def is_large(n):
    if n < 0:
        raise ValueError("below nothing")
    return n > LIMIT


def forever(n):
    while n > 0:
        n -= 1
    return n


def unseen():
    return 1
''',
    "tests/test_area.py": '''
import subprocess
import sys

import pytest

from data import none  # noqa: F401
from model.inside import area


@pytest.fixture(scope="module")
def large():
    return area.is_large(9)


def test_area():
    assert area.area(3, 2) == 6


def test_large(large):
    assert large


def test_still_large(large):
    assert large


def test_ends_in_a_process():
    code = """if True:
        import time
        from model.inside.area import forever

        class Slow(int):  # so that a loop without an end costs no CPU
            def __gt__(self, other):
                time.sleep(0.01)
                return int(self) > other
        print(forever(Slow(2)))"""
    assert subprocess.check_output([sys.executable, "-c", code]) == b"0\\n"


def test_flawed():
    assert area.unseen() == 2
''',
}


@pytest.mark.slow
def test_a_campaign_over_a_toy(tmp_path):
    repo = tmp_path / "repo"
    for path, text in TOY.items():
        (repo / path).parent.mkdir(parents=True, exist_ok=True)
        (repo / path).write_text(text)
    shutil.copytree(REPO / "tests" / "mutants", repo / "tests" / "mutants")
    (repo / "tests" / "mutants" / "equivalent.txt").write_text(
        "model/inside/area.py :: return n > LIMIT ==> return (n >= LIMIT) :: only here\n")

    def command(*args):
        done = subprocess.run([sys.executable, "-m", "tests.mutants", "--map", tmp_path / "map",
                               "--patience", "4", *args], cwd=repo, text=True,
                              capture_output=True, timeout=600)
        return done.returncode, done.stdout + done.stderr
    code, output = command("--count", "9", "--out", str(tmp_path / "results"))
    assert code == 1, output
    by = {r["key"][1]: r["by"] for r in map(json.loads, (
        tmp_path / "results").read_text().splitlines())}
    tests = "tests/test_area.py::test_"
    assert by == {"if n < 0:": None, 'raise ValueError("below nothing")': None,
                  "return w * h": f"{tests}area", "while n > 0:": f"{tests}ends_in_a_process",
                  "return n": f"{tests}ends_in_a_process", "return 1": None,
                  "n -= 1": f"no end: {tests}ends_in_a_process"}, output
    assert "| all | 8 | 4 | 3 | 1 |" in output and f"without a mutant: {tests}flawed" in output
    code, again = command("--count", "9", "--keep-map", "--out", str(tmp_path / "results"))
    assert code == 1 and "7/7" not in again and again.strip() in output  # all was tried already
    known = covered.Map(tmp_path / "map", repo)
    assert known.tests_of("model/inside/area.py", 7) == {f"{tests}area"}
    assert known.tests_of("model/inside/area.py", 2) == known.tests_of(
        "model/inside/area.py", 13) == {f"{tests}large", f"{tests}still_large"}
    assert known.tests_of("model/inside/area.py", 18) == {f"{tests}ends_in_a_process"}
    (repo / "model/inside/area.py").rename(repo / "model/elsewhere.py")
    assert covered.Map(tmp_path / "map", repo).tests_of("model/elsewhere.py", 7) == {
        f"{tests}area"}
    (repo / "model/elsewhere.py").rename(repo / "model/inside/area.py")
    with open(repo / "tests" / "test_area.py", "a") as f:  # the test that was missing
        f.write("\n\ndef test_below():\n    with pytest.raises(ValueError):\n"
                "        area.is_large(-1)\n    assert not area.is_large(0)\n")
    code, output = command("--again", str(tmp_path / "results"))
    assert code == 1 and "| all | 3 | 2 | 1 | 0 |" in output, output
