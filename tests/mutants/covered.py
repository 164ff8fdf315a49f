"""The map of which tests run which lines, determined by running every test once with marked lines,
and stored in a file outside of the repository. Tests whose text has changed are run again."""

import ast
import difflib
import hashlib
import json
import re
import tempfile
import time
from collections import Counter
from functools import cached_property
from pathlib import Path

import pytest

FOLDERS = "train", "model", "data"


def program_files(repo):
    """Return the list of paths, relative to `repo`, of all Python files of the program (without
    tests)."""
    files = [p for folder in FOLDERS for p in (repo / folder).rglob("*.py")
             if p.is_relative_to(repo / "data" / "bin") is False]
    return [str(p.relative_to(repo)) for p in [*sorted(files), repo / "run_train.py"]]


class Recorder:
    """Pytest plugin that writes, per test, a JSON line [id, seconds, {path: lines that it runs}] to
    `output`. The lines of a fixture that tests share are added to each of these tests."""

    def __init__(self, marks, firsts, output):
        self.marks, self.output = marks, output
        self.files = sorted((first, path) for path, first in firsts.items())
        self.shared, self.seconds = {}, 0.0

    def take(self):
        """Return the lines marked since the last call, the bytes of the marks as one int, and clear
        the marks."""
        out = int.from_bytes(self.marks[:], "little")
        self.marks[:] = bytes(len(self.marks))
        return out

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef, request):
        if fixturedef.scope == "function":
            return (yield)
        before, began = self.take(), time.perf_counter()
        try:
            return (yield)
        finally:
            own, name = self.take(), fixturedef.argname
            self.shared[name] = self.shared.get(name, 0) | own
            self.seconds += time.perf_counter() - began
            self.marks[:] = (before | own).to_bytes(len(self.marks), "little")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        self.take()
        began, fixtures = time.perf_counter(), self.seconds
        try:
            return (yield)
        finally:
            seconds = time.perf_counter() - began - (self.seconds - fixtures)
            hits = self.take()
            for name in item.fixturenames:
                hits |= self.shared.get(name, 0)
            self.output.write(json.dumps([item.nodeid, seconds, self.lines(hits)]) + "\n")
            self.output.flush()

    def pytest_sessionfinish(self):
        self.output.write(json.dumps(self.seconds) + "\n")
        self.output.flush()

    def lines(self, hits):
        marked, out = hits.to_bytes(len(self.marks), "little"), {}
        for (first, path), (last, _) in zip(self.files, [*self.files[1:], (len(marked), "")]):
            if lines := [m.start() for m in re.finditer(b"\1", marked[first:last])]:
                out[path] = lines
        return out


def table_of_lines(repo, folder):
    """Write the table that hook/sitecustomize.py reads, and a file of zeros for the marks. Return
    (path of the table, {path: index in the marks of its line 0})."""
    firsts, n = {}, 0
    for path in program_files(repo):
        firsts[path] = n
        n += len((repo / path).read_bytes().splitlines()) + 2
    marks, table = folder / "marks", folder / "table.json"
    marks.write_bytes(bytes(n))
    table.write_text(json.dumps(dict(marks=str(marks), firsts={
        str((repo / p).resolve()): first for p, first in firsts.items()})))
    return table, firsts


def test_functions(path):
    """Return {name: digest of the source} of the test functions in the file `path`."""
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16]
            for name, text in texts_of_tests(path)}


def texts_of_tests(path):
    text = path.read_text()
    return [(node.name, ast.get_source_segment(text, node)) for node in ast.parse(text).body
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def words_of(text):
    return set(re.findall("[a-z]{3,}", text.lower()))


def function_of(test):
    """Return ("test_file.py", "test_function") of the id of a test."""
    file, _, name = test.partition("::")
    return Path(file).name, name.split("[")[0]


class Map:
    """Which lines each test runs, stored in the JSON file `path`.

    tests: {id: [seconds, index in snapshots, {path: [line]}]}; snapshots: [{path: digest}] and
    sources {digest: text}: the versions of the program to which line numbers refer; functions:
    {test file: test_functions()}; fixtures: {test file: seconds of shared fixtures}.
    """
    KEPT = "tests", "snapshots", "sources", "functions", "fixtures"

    def __init__(self, path, repo):
        self.path, self.repo = Path(path), repo
        known = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.tests, self.snapshots = known.get("tests", {}), known.get("snapshots", [])
        self.sources, self.functions = known.get("sources", {}), known.get("functions", {})
        self.fixtures = known.get("fixtures", {})

    def stale(self):
        """Return [(test file, [names of its tests that are new or have changed])], and forget tests
        that no longer exist."""
        now = {p.name: test_functions(p) for p in self.test_files()}
        for test in list(self.tests):
            file, name = function_of(test)
            if name not in now.get(file, ()):
                del self.tests[test]
        out = []
        for file, functions in now.items():
            known = self.functions.get(file, {})
            if names := [n for n, digest in functions.items() if known.get(n) != digest]:
                out.append((file, names))
        return out

    def test_files(self):
        return sorted((self.repo / "tests").glob("test_*.py"), key=lambda p: -p.stat().st_size)

    def add(self, file, names, output):
        """Add the lines of the tests `names` of a test file from `output`, the text that Recorder
        wrote, and save the map."""
        *tests, fixtures = map(json.loads, output.splitlines())
        snapshot = {}
        for path in program_files(self.repo):
            text = (self.repo / path).read_text()
            snapshot[path] = hashlib.sha256(text.encode()).hexdigest()
            self.sources[snapshot[path]] = text
        if snapshot not in self.snapshots:
            self.snapshots.append(snapshot)
        for test in [t for t in self.tests if function_of(t) in {(file, n) for n in names}]:
            del self.tests[test]
        for test, seconds, lines in tests:
            self.tests[test] = [seconds, self.snapshots.index(snapshot), lines]
        now = test_functions(self.repo / "tests" / file)
        self.functions.setdefault(file, {}).update((n, now[n]) for n in names)
        self.fixtures[file] = max(fixtures, self.fixtures.get(file, 0.0))
        self.save()

    def save(self):
        with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as f:
            json.dump({name: getattr(self, name) for name in self.KEPT}, f)
        Path(f.name).replace(self.path)

    def learn(self, took):
        """Reduce the stored seconds of tests to those in `took` {id: seconds}, measured without
        marks, where these are less."""
        for test, seconds in took.items():
            if test in self.tests:
                self.tests[test][0] = min(self.tests[test][0], seconds)

    def seconds(self, test):
        return self.tests[test][0] if test in self.tests else 1.0

    def footprint(self, test):
        """Return the number of lines that a test runs: with fewer, it is more specific to each."""
        return sum(map(len, self.tests[test][2].values()))

    def likeness(self, test, text):
        """Return how many words a test has in common with `text`, each weighted by 1 / the number
        of tests with it."""
        words, tests_with = self.words
        return sum(1 / tests_with[w] for w in words_of(text) & words.get(function_of(test), set()))

    @cached_property
    def words(self):
        """({(test file, function): set of words in its source}, {word: number of test functions
        with it})."""
        words = {(p.name, name): words_of(text) for p in self.test_files()
                 for name, text in texts_of_tests(p)}
        return words, Counter(w for its in words.values() for w in its)

    def limit(self, test):
        """Return the seconds after which a test counts as hanging: 5 times the usual ones."""
        return 5 * (self.seconds(test) + self.fixtures.get(function_of(test)[0], 0.0))

    @cached_property
    def hits(self):
        """{(path, line number in the present file): {ids of the tests that run it}}."""
        out, moves = {}, {}
        for test, (_, snapshot, lines) in self.tests.items():
            for path, numbers in lines.items():
                key = path, self.snapshots[snapshot][path]
                if key not in moves:
                    moves[key] = self.moved_lines(*key)
                for n in numbers:
                    for place in moves[key].get(n, ()):
                        out.setdefault(place, set()).add(test)
        return out

    def moved_lines(self, path, then):
        """Return {line then: [(path, line today)]} of the file `path`, whose digest was `then`. A
        changed line is mapped to the lines in its place; a changed or removed one also to equal
        lines of functions of the same name, in any file."""
        old, new = self.sources[then].splitlines(), []
        if (self.repo / path).exists():
            new = (self.repo / path).read_text().splitlines()
        functions, out = functions_of_lines(self.sources[then]), {}
        for op, a, b, c, d in difflib.SequenceMatcher(None, old, new, False).get_opcodes():
            for i in range(a, b):
                here = [(path, n) for n in range(c + 1, d + 1)]
                out[i + 1] = [(path, c + i - a + 1)] if op == "equal" else [
                    *here, *self.homes.get((functions.get(i + 1), old[i].strip()), ())]
        return out

    @cached_property
    def homes(self):
        """{(name of a function, text of a line in it): [(path, line)]} of the present program."""
        out = {}
        for path in program_files(self.repo):
            text = (self.repo / path).read_text()
            lines = text.splitlines()
            for n, name in functions_of_lines(text).items():
                out.setdefault((name, lines[n - 1].strip()), []).append((path, n))
        return out

    # --- the tests of a line

    @cached_property
    def trees(self):
        return {p: ast.parse((self.repo / p).read_text()) for p in program_files(self.repo)}

    def tests_of(self, path, line):
        """Return the ids of the tests that run a line. For a line outside of functions, which runs
        at import, the tests that run a statement with the name that it defines, or contain this
        name."""
        inner, function, names = None, None, set()
        for node in ast.walk(self.trees[path]):
            if isinstance(node, ast.stmt) and first_line(node) <= line <= node.end_lineno:
                if isinstance(node, ast.FunctionDef):
                    function = node
                if inner is None or node.lineno >= inner.lineno:
                    inner = node
        if function is not None and line >= function.body[0].lineno:
            return self.hits.get((path, inner.lineno), set())
        if function is not None:  # its defaults and decorators
            return self.hits.get((path, function.body[has_doc(function)].lineno), set())
        if isinstance(inner, ast.ClassDef):
            names = {inner.name}
        else:
            names = {n.id for n in ast.walk(inner) if isinstance(n, ast.Name)
                     and isinstance(n.ctx, ast.Store)}
        return self.tests_naming(names) or self.hits.get((path, inner.lineno), set())

    def tests_naming(self, names, depth=2):
        out = set()
        for name in names:
            out |= self.mentions.get(name, set())
            if depth:
                more = self.constants.get(name, set()) - names
                out |= self.tests_naming(more, depth - 1) if more else set()
        return out

    @cached_property
    def mentions(self):
        """{name: ids of the tests that run a statement of the program with this name, or contain
        it}."""
        out = {}
        for path, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef):
                    for s in ast.walk(node):
                        if isinstance(s, ast.stmt) and s is not node:
                            tests = self.hits.get((path, s.lineno), set())
                            for name in names_in(s):
                                out.setdefault(name, set()).update(tests)
        for file in self.test_files():
            ids = {}
            for test in self.tests:
                if function_of(test)[0] == file.name:
                    ids.setdefault(function_of(test)[1], []).append(test)
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.FunctionDef) and node.name in ids:
                    for name in {x for s in ast.walk(node) for x in names_in(s)}:
                        out.setdefault(name, set()).update(ids[node.name])
        return out

    @cached_property
    def constants(self):
        """{name: names, defined outside of functions, whose definitions use it}."""
        out = {}
        for tree in self.trees.values():
            for s in tree.body:
                made = {s.name} if isinstance(s, ast.ClassDef) else {
                    n.id for n in ast.walk(s) if isinstance(n, ast.Name)
                    and isinstance(n.ctx, ast.Store)}
                if not isinstance(s, (ast.FunctionDef, ast.Import, ast.ImportFrom)):
                    for n in ast.walk(s):
                        if isinstance(n, ast.Name):
                            out.setdefault(n.id, set()).update(made)
        return out


def functions_of_lines(text):
    """Return {line: name of the innermost function that contains it} of the source `text`."""
    return {n: node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)
            for n in range(first_line(node), node.end_lineno + 1)}


def first_line(node):
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def has_doc(function):
    return len(function.body) > 1 and ast.get_docstring(function) is not None


def names_in(node):
    """Yield the variables, attributes, keywords and strings that are names, in a statement without
    the statements nested in it."""
    todo = [node]
    while todo:
        for n in ast.iter_child_nodes(todo.pop()):
            if isinstance(n, ast.stmt):
                continue
            todo.append(n)
            if isinstance(n, ast.Name):
                yield n.id
            elif isinstance(n, ast.Attribute):
                yield n.attr
            elif isinstance(n, ast.keyword) and n.arg:
                yield n.arg
            elif isinstance(n, ast.Constant) and str(n.value).isidentifier():
                yield str(n.value)
