"""Processor time and memory of a process with all of its descendants, from /proc."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class ProcessTree:
    """A process and its descendants, whichever of its threads started them.

    Args:
        pid: of the process at the root.
    """

    def __init__(self, pid: int) -> None:
        self._root = pid
        self._used: dict[tuple[int, str], int] = {}

    def pids(self) -> list[int]:
        """Return the processes that live now, the root first."""
        found = [self._root]
        for pid in found:
            # A process or a thread may end while it is looked at.
            with suppress(OSError):
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    with suppress(OSError):
                        found += map(int, (thread / "children").read_text().split())
        return found

    def processor_seconds(self) -> float:
        """Return the processor time used so far, also by descendants that have ended.

        Of those that nobody waited for, it is what they had used when they were last looked at, here or by `growth`.
        """
        waited_for = 0
        for pid in self.pids():
            with suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                user, system, childrens_user, childrens_system = map(int, fields[11:15])
                self._used[pid, fields[19]] = user + system  # by when it started, as numbers are used again
                waited_for += user + system + childrens_user + childrens_system
        return max(waited_for, sum(self._used.values())) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        """Return the memory of all together; a page that several map counts once (PSS)."""
        # Who may not read the shares of a process that hides may read what is its own.
        each = (_kibibytes(pid, "smaps_rollup", "Pss") or _kibibytes(pid, "status", "RssAnon") for pid in self.pids())
        return sum(each) << 10

    @contextmanager
    def growth(self, interval: float = 0.02) -> Iterator[Growth]:
        """Watch the memory; its greatest growth stands in what is given once the block has ended.

        It is that of the sum, as sampled, or that of one process, which the kernel notes itself, if more.

        Args:
            interval: seconds between two samples.
        """
        result, before, stop = Growth(), self.resident_bytes(), threading.Event()
        resident = {}
        for pid in self.pids():
            with suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak is what is resident now
            resident[pid] = _kibibytes(pid, "status", "VmRSS")

        def sample() -> None:
            while not stop.wait(interval):
                result.bytes = max(result.bytes, self.resident_bytes() - before)
                self.processor_seconds()

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield result
        finally:
            stop.set()
            thread.join()
            peaks = [_kibibytes(pid, "status", "VmHWM") - was for pid, was in resident.items()]
            result.bytes = max(result.bytes, *(peak << 10 for peak in peaks))


class Growth:
    """The bytes by which a memory grew at most."""

    bytes: int = 0


def _kibibytes(pid: int, file: str, name: str) -> int:
    """Return one line of a file of a process; 0 where it has ended."""
    with suppress(OSError):
        found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{pid}/{file}").read_text(), re.MULTILINE)
        return int(found[1]) if found else 0
    return 0
