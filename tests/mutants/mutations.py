"""Small faults put into a module's source, one at a time: the mutants that its tests should notice.

A mutant is a replacement of bytes at the place of one syntax node, so that its difference from the original is the
line that a reader would have changed. Left alone is what no test can or should judge: annotations, docstrings,
decorators, assertions, and the texts of errors.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

_COMPARISONS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: (r"<", "<="),
    ast.LtE: (r"<=", "<"),
    ast.Gt: (r">", ">="),
    ast.GtE: (r">=", ">"),
    ast.Eq: (r"==", "!="),
    ast.NotEq: (r"!=", "=="),
    ast.Is: (r"is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: (r"in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
_OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: (r"\+", "-"),
    ast.Sub: (r"-", "+"),
    ast.Mult: (r"\*", "/"),
    ast.Div: (r"/", "*"),
    ast.FloorDiv: (r"//", "*"),
    ast.Mod: (r"%", "*"),
    ast.Pow: (r"\*\*", "*"),
    ast.LShift: (r"<<", ">>"),
    ast.RShift: (r">>", "<<"),
    ast.BitAnd: (r"&", "|"),
    ast.BitOr: (r"\|", "&"),
    ast.BitXor: (r"\^", "&"),
    ast.And: (r"and", "or"),
    ast.Or: (r"or", "and"),
}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor"}
_EXACT = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
"""Comparisons whose mutant is their negation already."""


@dataclass(frozen=True)
class Mutant:
    """A module with one change.

    Attributes:
        path: the module's file, relative to the repository.
        function: qualified name of the function or class around the change; `<module>` outside of any.
        line: number of the line that the change begins in, from 1.
        source: the whole changed module.
        before, after: the lines of the change as one, without indentation.
    """

    path: str
    function: str
    line: int
    source: bytes
    before: str
    after: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Return what names this mutant while lines move."""
        return self.path, self.function, self.before, self.after

    @property
    def valid(self) -> bool:
        """Return whether the module compiles."""
        try:
            compile(self.source, self.path, "exec")
        except SyntaxError:
            return False
        return True


def mutants(path: Path, root: Path) -> list[Mutant]:
    """Return every mutant of a module, in the order of its source."""
    source = path.read_bytes()
    found = _Finder(source)
    found.visit(ast.parse(source))
    name = path.relative_to(root).as_posix()
    seen: set[bytes] = set()
    made = []
    for function, start, end, replacement in sorted(found.changes, key=lambda change: change[1:]):
        changed = source[:start] + replacement + source[end:]
        if changed in seen:
            continue
        seen.add(changed)
        before, after = _difference(source, start, end, replacement)
        made.append(Mutant(name, function, source.count(b"\n", 0, start) + 1, changed, before, after))
    return made


def _difference(source: bytes, start: int, end: int, replacement: bytes) -> tuple[str, str]:
    """Return the lines that a change touches, before and after it, each as one line."""
    first = source.rfind(b"\n", 0, start) + 1
    last = source.find(b"\n", end)
    head, tail = source[first:start], source[end : len(source) if last < 0 else last]
    before, after = (b"".join((head, middle, tail)).decode() for middle in (source[start:end], replacement))
    return " ".join(before.split()), " ".join(after.split())


class _Finder(ast.NodeVisitor):
    """Collects changes: (function, first byte, byte after the last, replacement)."""

    def __init__(self, source: bytes) -> None:
        self.changes: list[tuple[str, int, int, bytes]] = []
        self._source = source
        self._line_starts = [0, *(match.end() for match in re.finditer(rb"\n", source))]
        self._names: list[str] = []

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self._line_starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._line_starts[node.end_lineno - 1] + node.end_col_offset

    def _change(self, start: int, end: int, replacement: str) -> None:
        self.changes.append((".".join(self._names) or "<module>", start, end, replacement.encode()))

    def _replace(self, node: ast.expr | ast.stmt, replacement: str) -> None:
        self._change(self._start(node), self._end(node), replacement)

    def _between(self, left: ast.expr, right: ast.expr, operator: ast.AST) -> None:
        """Replace the operator between two operands, of which parentheses are no part."""
        pattern, other = {**_COMPARISONS, **_OPERATORS}[type(operator)]
        start = self._end(left)
        found = re.search(pattern.encode(), self._source[start : self._start(right)])
        assert found is not None
        self._change(start + found.start(), start + found.end(), other)

    def _negate(self, test: ast.expr) -> None:
        single = isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], _EXACT)
        if not single and not isinstance(test, ast.UnaryOp):
            text = self._source[self._start(test) : self._end(test)].decode()
            self._replace(test, f"(not ({text}))")

    def _named(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self._names.append(node.name)
        if not isinstance(node, ast.ClassDef):
            self.visit(node.args)
        for statement in node.body:
            self.visit(statement)
        self._names.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _named  # noqa: N815

    def visit_arg(self, node: ast.arg) -> None:
        """Leave annotations alone."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave assertions alone: they state what cannot be otherwise."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave texts alone."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self._replace(node, "pass")
        if not any(isinstance(target, ast.Name) and target.id.startswith("__") for target in node.targets):
            self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._replace(node, "pass")
        self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self._replace(node, "pass")
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._replace(node, "pass")

    def visit_Delete(self, node: ast.Delete) -> None:
        self._replace(node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self._replace(node, "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._replace(node, "break")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            if not (isinstance(node.value, ast.Constant) and node.value.value is None):
                self._replace(node, "return None")
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":  # what annotations need
            return
        self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._negate(test)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for (left, right), operator in zip(pairwise((node.left, *node.comparators)), node.ops, strict=True):
            self._between(left, right, operator)
        for side in (node.left, *node.comparators):
            self._text(side)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self._between(node.left, node.right, node.op)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in pairwise(node.values):
            self._between(left, right, node.op)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._change(self._start(node), self._start(node) + len("not "), "")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in _CALLS:
            self._change(self._end(node.func) - len(name), self._end(node.func), _CALLS[name])
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        for key in node.keys:
            self._text(key)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self._text(node.slice)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._replace(node, str(not value))
        elif isinstance(value, int):
            self._replace(node, str(value + 1))
        elif isinstance(value, float):
            self._replace(node, repr(value * 2 + 1))
        elif isinstance(value, bytes):
            self._insert(node)

    def _text(self, node: ast.expr | None) -> None:
        """Change a text that is looked up or compared; others are names of settings, or shown to people."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            self._insert(node)

    def _insert(self, node: ast.Constant) -> None:
        quote = re.compile(rb"[a-zA-Z]*(\"\"\"|'''|\"|')").match(self._source, self._start(node))
        if quote is not None:
            self._change(quote.end(), quote.end(), "X")


def iterate(paths: list[Path], root: Path) -> Iterator[Mutant]:
    """Yield the mutants of modules and of all modules in folders, but for what protoc generated: nobody edits it."""
    for path in paths:
        for module in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            if not module.name.endswith("_pb2.py"):
                yield from mutants(module, root)
