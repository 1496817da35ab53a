"""The functions that begin background tasks and threads."""

import ast
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BEGINS = {
    "create_task",
    "ensure_future",
    "Thread",
    "Timer",
    "start_new_thread",
    "ThreadPoolExecutor",
    "run_in_executor",
}


class Beginnings(ast.NodeVisitor):
    """The functions of a file that start a task or a thread, except in a `TaskGroup`."""

    def __init__(self) -> None:
        self.scope: list[str] = []
        self.renamed: dict[str, str] = {}
        self.found: set[str] = set()

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.renamed |= {alias.asname or alias.name: alias.name for alias in node.names}

    def visit_ClassDef(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.scope.append(node.name)
        self.generic_visit(node)
        self.scope.pop()

    visit_FunctionDef = visit_ClassDef  # noqa: N815
    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func
        name = ""
        if isinstance(called, ast.Attribute) and ast.unparse(called.value) != "group":
            name = called.attr
        elif isinstance(called, ast.Name):
            name = self.renamed.get(called.id, called.id)
        if name in BEGINS:
            self.found.add(".".join(self.scope))
        self.generic_visit(node)


def beginnings_below(folder: str) -> set[str]:
    """Return the functions of a folder that begin a task or a thread, as `FILE:FUNCTION`."""
    found: set[str] = set()
    for path in (REPOSITORY / folder).rglob("*.py"):
        beginnings = Beginnings()
        beginnings.visit(ast.parse(path.read_text()))
        file = path.relative_to(REPOSITORY).as_posix()
        found |= {f"{file}:{function}" for function in beginnings.found}
    return found
