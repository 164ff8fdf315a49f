"""Mark the lines of the program that run, in every process: with this folder on PYTHONPATH, Python
imports this file at start because of its name.

When a file in the table is imported, an assignment is inserted before each statement, which sets a
byte of a memory-mapped file to 1. Files on disk and line numbers do not change; marks are kept
after SIGKILL.
"""

import ast
import builtins
import importlib.machinery
import json
import mmap
import os

VARIABLE = "MARKED_LINES"  # names a JSON file: {"marks": file, "firsts": {file: index of line 0}}


class Marks(ast.NodeTransformer):
    def __init__(self, first):
        self.first = first

    def mark(self, statement):
        at = ast.Subscript(ast.Name("__marks__", ast.Load()),
                           ast.Constant(self.first + statement.lineno), ast.Store())
        return ast.copy_location(ast.Assign([at], ast.Constant(1)), statement)

    def generic_visit(self, node):
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if isinstance(body, list):
                setattr(node, field, [x for s in body for x in self.marked(s)])
        return node

    def marked(self, s):
        first = isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)  # a docstring
        future = isinstance(s, ast.ImportFrom) and s.module == "__future__"
        return [s] if first or future else [self.mark(s), s]


def install(table):
    """Mark the lines of files that are imported from now on. table: the path of the JSON file of
    table_of_lines(). Return the memory map of the marks."""
    with open(table) as f:
        known = json.load(f)
    fd = os.open(known["marks"], os.O_RDWR)
    builtins.__marks__ = mmap.mmap(fd, 0)
    os.close(fd)
    real = importlib.machinery.SourceFileLoader.source_to_code

    def source_to_code(self, data, path, *, _optimize=-1):
        first = known["firsts"].get(os.path.realpath(os.fsdecode(path)))
        if first is None:
            return real(self, data, path, _optimize=_optimize)
        tree = ast.fix_missing_locations(Marks(first).visit(ast.parse(data)))
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)
    importlib.machinery.SourceFileLoader.source_to_code = source_to_code
    return builtins.__marks__


if VARIABLE in os.environ:
    install(os.environ[VARIABLE])
