"""The files that start processes."""

import ast
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
# Names of `subprocess` that start nothing; all others do.
HARMLESS = {
    "PIPE",
    "DEVNULL",
    "STDOUT",
    "TimeoutExpired",
    "SubprocessError",
    "CalledProcessError",
    "CompletedProcess",
}
OF_OS = (
    "os.fork",
    "os.system",
    "os.popen",
    "os.exec",
    "os.spawn",
    "os.posix_spawn",
    "os.startfile",
)
OF_LOOPS = (
    "create_subprocess_exec",
    "create_subprocess_shell",
    "subprocess_exec",
    "subprocess_shell",
)


def starts(tree: ast.AST) -> set[str]:
    """Return the qualified names that start a process in a module, however they were imported."""
    imported: dict[str, str] = {}
    used = set()
    of_types = {node.value for node in ast.walk(tree) if isinstance(node, ast.Subscript)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {
                alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names
            }
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
            imported |= names
            used |= set(names.values())
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "__import__")
        ):
            used |= {
                each.value
                for each in node.args
                if isinstance(each, ast.Constant) and isinstance(each.value, str)
            }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node not in of_types:
            owner, _, rest = ast.unparse(node).partition(".")
            used.add(f"{imported.get(owner, owner)}.{rest}")
    return {name for name in used if starts_a_process(name)}


def starts_a_process(name: str) -> bool:
    module, _, rest = name.partition(".")
    if module == "subprocess":
        return rest.split(".")[0] not in HARMLESS | {""}
    if name.startswith(OF_OS) or name.endswith(OF_LOOPS) or module == "pty":
        return True
    return "multiprocessing" in name.split(".") or name.endswith("ProcessPoolExecutor")


def files_that_start_processes(*folders: str) -> set[str]:
    """Return the Python files of some folders that start processes."""
    return {
        path.relative_to(REPOSITORY).as_posix()
        for folder in folders
        for path in (REPOSITORY / folder).rglob("*.py")
        if starts(ast.parse(path.read_text()))
    }
