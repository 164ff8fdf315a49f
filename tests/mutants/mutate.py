"""Generate mutations: small faults in Python source code, like those of a programmer.

Operators and comparisons swapped; operands, conditions, arguments, slice bounds and decorators
removed; numbers and truth values changed; conditions negated; names in strings misspelt; statements
and `with` removed; None returned. Not changed is what no test should compare: docstrings, messages
(raised, printed, logged, or an f-string), help texts, annotations and imports.
"""

import ast
import copy
from dataclasses import dataclass

SWAPS = {ast.Add: [ast.Sub], ast.Sub: [ast.Add], ast.Mult: [ast.Div], ast.Div: [ast.Mult],
         ast.FloorDiv: [ast.Div], ast.Mod: [ast.Mult], ast.Pow: [ast.Mult],
         ast.LShift: [ast.RShift], ast.RShift: [ast.LShift], ast.BitAnd: [ast.BitOr],
         ast.BitOr: [ast.BitAnd], ast.BitXor: [ast.BitOr], ast.And: [ast.Or], ast.Or: [ast.And],
         ast.Lt: [ast.LtE, ast.GtE], ast.LtE: [ast.Lt, ast.Gt], ast.Gt: [ast.GtE, ast.LtE],
         ast.GtE: [ast.Gt, ast.Lt], ast.Eq: [ast.NotEq], ast.NotEq: [ast.Eq],
         ast.Is: [ast.IsNot], ast.IsNot: [ast.Is], ast.In: [ast.NotIn], ast.NotIn: [ast.In]}
TALK = {"print", "log", "say", "warn", "warning", "info", "debug", "critical", "add_parser"}
TAKE_NAMES = {"get", "pop", "setdefault", "startswith", "endswith", "getattr", "hasattr", "setattr"}
ATOMS = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.Constant, ast.List, ast.Dict)


@dataclass(frozen=True)
class Mutation:
    """A change of source code (bytes): bytes start to end, in the line `line`, are replaced by
    `text`."""
    line: int
    start: int
    end: int
    text: str

    def apply(self, source):
        return source[:self.start] + self.text.encode() + source[self.end:]

    def shown(self, source):
        """Return (the changed lines before, the same after the mutation), each joined to one line
        of text."""
        first = source.rfind(b"\n", 0, self.start) + 1
        last = source.find(b"\n", self.end)
        last = len(source) if last < 0 else last
        new = source[first:self.start] + self.text.encode() + source[self.end:last]
        return tuple(" ".join(part.decode().split()) for part in (source[first:last], new))


def is_text(node):
    """Return whether an ast node is a message, not a name: a string with a space, an f-string, or a
    sum of those."""
    if isinstance(node, ast.BinOp):
        return is_text(node.left) or is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value)


def is_name_text(node):
    return (isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value
            and " " not in node.value)


def called_name(call):
    f = call.func
    return f.attr if isinstance(f, ast.Attribute) else f.id if isinstance(f, ast.Name) else ""


def changed(node, **fields):
    out = copy.copy(node)
    for name, value in fields.items():
        setattr(out, name, value)
    return out


def without(items, i):
    return items[:i] + items[i + 1:]


class Finder(ast.NodeVisitor):
    """Visitor that collects the mutations of `source` (bytes) in the list `found`."""

    def __init__(self, source):
        self.source, self.found, self.bound = source, [], [set()]
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def begin(self, node):
        return self.starts[node.lineno - 1] + node.col_offset

    def end(self, node):
        return self.starts[node.end_lineno - 1] + node.end_col_offset

    def put(self, node, text, start=None, end=None):
        self.found.append(Mutation(node.lineno, self.begin(node) if start is None else start,
                                   self.end(node) if end is None else end, text))

    def swap(self, node, new):
        """Add the mutation that replaces the expression `node` by `new`, both ast nodes."""
        text = ast.unparse(new)
        self.put(node, text if isinstance(new, ATOMS) else f"({text})")

    # --- statements

    def visit_body(self, body):
        for i, node in enumerate(body):
            if i or not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                self.visit(node)

    def visit_Module(self, node):
        self.visit_body(node.body)

    def visit_ClassDef(self, node):
        self.decorators(node)
        self.visit_body(node.body)

    def visit_FunctionDef(self, node):
        self.decorators(node)
        for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self.visit(default)
        a = node.args
        self.bound.append({x.arg for x in [*a.posonlyargs, *a.args, *a.kwonlyargs]})
        self.visit_body(node.body)
        self.bound.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def decorators(self, node):
        for d in node.decorator_list:
            self.put(d, "", start=self.source.rindex(b"@", 0, self.begin(d)))

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Call) and called_name(node.value) in TALK:
            return
        self.put(node, "pass")
        self.visit(node.value)

    def visit_Assign(self, node):
        names = {n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)
                 and isinstance(n.ctx, ast.Store)}
        if not names or names <= self.bound[-1]:  # else a NameError, which anybody notices
            self.put(node, "pass")
        self.bound[-1] |= names
        for target in node.targets:
            self.visit(target)
        self.visit(node.value)

    def visit_AnnAssign(self, node):
        if node.value:
            self.visit(node.value)

    def visit_AugAssign(self, node):
        self.put(node, "pass")
        for op in SWAPS.get(type(node.op), ()):
            self.put(node, ast.unparse(changed(node, op=op())))
        self.visit(node.value)

    def visit_Return(self, node):
        if node.value is None:
            self.put(node, "pass")
        elif not (isinstance(node.value, ast.Constant) and node.value.value in (None, False)):
            self.put(node, "return None")
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node):
        self.put(node, "pass")

    visit_Break = visit_Continue = visit_Raise

    def visit_Delete(self, node):
        self.put(node, "pass")
        self.generic_visit(node)

    def visit_If(self, node):
        if "__name__" in ast.unparse(node.test):
            return
        self.condition(node.test)
        self.visit_body(node.body)
        self.visit_body(node.orelse)

    def visit_While(self, node):
        self.condition(node.test)
        self.visit_body(node.body)

    def visit_With(self, node):
        if not any(item.optional_vars for item in node.items):
            colon = self.source.index(b":", self.end(node.items[-1].context_expr))
            self.put(node, "if True", end=colon)
        for item in node.items:
            self.visit(item.context_expr)
        self.visit_body(node.body)

    def visit_Assert(self, node):
        self.condition(node.test)

    def visit_Import(self, node):
        pass

    visit_ImportFrom = visit_Global = visit_Nonlocal = visit_JoinedStr = visit_Import

    # --- expressions

    def condition(self, test):
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self.visit(test)
            return
        if not isinstance(test, ast.Compare) or len(test.ops) > 1:
            self.swap(test, ast.UnaryOp(ast.Not(), test))
        self.visit(test)

    def visit_UnaryOp(self, node):
        if isinstance(node.op, (ast.Not, ast.USub)):
            self.swap(node, node.operand)
        self.visit(node.operand)

    def visit_BinOp(self, node):
        if is_text(node):
            return
        for op in SWAPS.get(type(node.op), ()):
            self.swap(node, changed(node, op=op()))
        self.swap(node, node.left)
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        self.swap(node, changed(node, op=SWAPS[type(node.op)][0]()))
        for i in range(len(node.values)):
            rest = without(node.values, i)
            self.swap(node, changed(node, values=rest) if len(rest) > 1 else rest[0])
        self.generic_visit(node)

    def visit_Compare(self, node):
        for i, op in enumerate(node.ops):
            for new in SWAPS[type(op)]:
                self.swap(node, changed(node, ops=[*node.ops[:i], new(), *node.ops[i + 1:]]))
        for side in (node.left, *node.comparators):
            for part in getattr(side, "elts", [side]):
                self.misspell(part)
        self.generic_visit(node)

    def visit_IfExp(self, node):
        self.condition(node.test)
        self.swap(node, node.body)
        self.swap(node, node.orelse)
        self.visit(node.body)
        self.visit(node.orelse)

    def visit_comprehension(self, node):
        for test in node.ifs:
            self.condition(test)
        self.visit(node.iter)

    def visit_Call(self, node):
        name = called_name(node)
        if name in TALK:
            return
        for i, arg in enumerate(node.args):
            if not is_text(arg):
                self.swap(node, changed(node, args=without(node.args, i)))
        for i, k in enumerate(node.keywords):
            if not is_text(k.value) and k.arg not in ("help", "metavar"):
                self.swap(node, changed(node, keywords=without(node.keywords, i)))
        if name in TAKE_NAMES:
            for arg in node.args[:2]:
                self.misspell(arg)
        self.generic_visit(node)

    def visit_Subscript(self, node):
        self.misspell(node.slice)
        self.generic_visit(node)

    def visit_Slice(self, node):
        for name in ("lower", "upper"):
            if getattr(node, name) is not None:
                self.put(node, ast.unparse(changed(node, **{name: None})))
        self.generic_visit(node)

    def visit_Dict(self, node):
        for k in filter(None, node.keys):
            self.misspell(k)
        self.generic_visit(node)

    def misspell(self, node):
        if is_name_text(node):
            self.put(node, repr(node.value + "_"))

    def visit_Constant(self, node):
        value = node.value
        if isinstance(value, bool):
            new = [not value]
        elif isinstance(value, int):
            new = {value + 1, value - 1, 0} - {value} if value > 0 else {value + 1}
        elif isinstance(value, float):
            new = [2 * value, 0.0] if value else [1.0]
        else:
            return
        for v in sorted(new):
            self.put(node, repr(v))


def mutations(source):
    """Return the list of all mutations of `source` (bytes), in the order of the source; works()
    tells which of them are valid."""
    finder = Finder(source)
    finder.visit(ast.parse(source))
    return sorted(set(finder.found), key=lambda m: (m.start, m.end, m.text))


def works(mutation, source):
    """Return whether the mutated source (bytes) compiles and has a different syntax tree."""
    mutated = mutation.apply(source)
    try:
        tree = ast.parse(mutated)
        compile(tree, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return ast.dump(tree) != ast.dump(ast.parse(source))


def code_lines(source):
    """Return the set of numbers of the lines of `source` with code: not blank, a comment or a
    docstring."""
    tree, out = ast.parse(source), set()
    docs = {id(n.body[0]) for n in ast.walk(tree)
            if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef)) and n.body
            and ast.get_docstring(n) is not None}
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and id(node) not in docs:
            out.add(node.lineno)
        elif isinstance(node, ast.expr):
            out |= {node.lineno, node.end_lineno}
    for node in ast.walk(tree):
        if id(node) in docs:
            out -= set(range(node.lineno, node.end_lineno + 1))
    return out
