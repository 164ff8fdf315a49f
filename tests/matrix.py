"""Write tests/MATRIX.md, a table of injected faults with expected and actual results, from the
tests.

    python -m tests.matrix                 runs the tests first (minutes)
    python -m tests.matrix RESULTS.xml...  from pytest --junitxml=RESULTS.xml, of one run or several

A test with the mark @pytest.mark.matrix(7, 9) is a row of the table, for the cases 7 and 9. The
docstring of the test is "fault -> expected outcome".
"""

import ast
import collections
import pathlib
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree

TESTS = pathlib.Path(__file__).resolve().parent
CASES = range(1, 136)
HEAD = """# Fault matrix

Injected faults, the expected outcome, and the result; written by `python -m tests.matrix` from the
marks, docstrings and results of the tests. To run one case: `python -m pytest -k case_025`. Long
campaigns: `python -m pytest -m slow -s`.

"""


def cases_of(function):
    """Return the list of case numbers in the decorator @pytest.mark.matrix(7, 9) of `function`, an
    ast.FunctionDef; [] without it."""
    found = []
    for call in function.decorator_list:
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.matrix":
            found += map(ast.literal_eval, call.args)
    return found


def tests_of(path):
    """Yield (name, case numbers, docstring in one line, whether marked slow) of each test with the
    mark `matrix` in the test file `path`."""
    tree = ast.parse(path.read_text())
    all_slow = any("mark.slow" in ast.unparse(node) for node in tree.body
                   if isinstance(node, ast.Assign))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and cases_of(node):
            slow = all_slow or any("mark.slow" in ast.unparse(d) for d in node.decorator_list)
            doc = " ".join((ast.get_docstring(node) or "").split())
            yield node.name, cases_of(node), doc, slow


def results_of(paths):
    """Return {(file, test): Counter of "passed", "failed", "skipped"} from the files `paths`,
    written by pytest --junitxml."""
    out = collections.defaultdict(collections.Counter)
    for path in paths:
        for case in ElementTree.parse(path).iter("testcase"):
            kinds = {"failure": "failed", "error": "failed", "skipped": "skipped"}
            kind = next((kinds[child.tag] for child in case if child.tag in kinds), "passed")
            name = re.sub(r"\[.*", "", case.get("name"), flags=re.DOTALL)
            out[case.get("classname").rpartition(".")[2], name][kind] += 1
    return out


def ranges(numbers):
    """Return a list of numbers as a text: [1, 2, 3, 7] -> '1-3, 7'."""
    out = []
    for n in sorted(set(numbers)):
        if out and out[-1][1] == n - 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in out)


def table(results):
    """Return the text of MATRIX.md. results: the result of results_of()."""
    rows, covered, total = [], set(), collections.Counter()
    for path in sorted(TESTS.glob("test_*.py")):
        for name, cases, doc, slow in tests_of(path):
            count = results.get((path.stem, name), {})
            done, _, expected = doc.partition(" -> ")
            done = done or name.removeprefix("test_").replace("_", " ")
            text = ", ".join(f"{n} {kind}" for kind, n in sorted(count.items()))
            rows.append((cases, done, expected, text or ("long campaign" if slow else "not run")))
            covered |= set(cases)
            total.update(count)
    lines = ["| case | fault | expected outcome | result |", "|---|---|---|---|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in (ranges(c), d, e, r)) + " |"
              for c, d, e, r in sorted(rows)]
    missing = ranges(set(CASES) - covered)
    summary = (f"{len(covered)} of {len(CASES)} cases: " + ", ".join(
        f"{n} tests {kind}" for kind, n in sorted(total.items()))
        + (f". Without a test: {missing}." if missing else "."))
    return HEAD + summary + "\n\n" + "\n".join(lines) + "\n"


def main(paths):
    """Write MATRIX.md. paths: junitxml files; without any, run the tests first. Return the exit
    code of the tests, or 0."""
    code = 0
    with tempfile.TemporaryDirectory() as folder:
        if not paths:
            paths = [f"{folder}/results.xml"]
            code = subprocess.run([sys.executable, "-m", "pytest", "-m", "not slow",
                                   f"--junitxml={paths[0]}"], cwd=TESTS.parent).returncode
        results = results_of(paths)
    (TESTS / "MATRIX.md").write_text(table(results))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
