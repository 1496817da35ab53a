"""Processes of a service under test, from /proc."""

from pathlib import Path

from tests.e2e.serving import Served
from tests.launcher import command_line


class Processes:
    """The processes of a service, from /proc."""

    def __init__(self, server: Served) -> None:
        self.supervisor = server.process.process.pid

    @property
    def all(self) -> set[int]:
        children = Path(f"/proc/{self.supervisor}/task/{self.supervisor}/children").read_text()
        return {int(pid) for pid in children.split()}

    @property
    def engine(self) -> int:
        """Return the process with this title."""
        [pid] = [pid for pid in self.all if command_line(pid).startswith(b"vitserve: engine")]
        return pid

    @property
    def workers(self) -> set[int]:
        return self.all - {self.engine}


def maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"  # a zombie
