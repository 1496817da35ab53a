"""Memory of processes, from /proc."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def processes(pids: Sequence[int]) -> list[dict[str, Any]]:
    """Of each process: MiB resident (RSS) and its share (PSS), and whether it has loaded torch."""
    found = []
    for pid in pids:
        folder = Path("/proc") / str(pid)
        # A process may end while it is looked at.
        with contextlib.suppress(OSError):
            rollup = (folder / "smaps_rollup").read_text()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            found.append(
                {
                    "command": command.split("/")[-1][:60],
                    "rss_mib": mebibytes(rollup, "Rss"),
                    "pss_mib": mebibytes(rollup, "Pss"),
                    "torch": "libtorch" in (folder / "maps").read_text(),
                }
            )
    return found


def anonymous(pid: int) -> float:
    """MiB resident of one process that belong to no file: heaps, stacks, kernels made at run time."""
    return mebibytes((Path("/proc") / str(pid) / "smaps_rollup").read_text(), "Anonymous")


def mebibytes(rollup: str, name: str) -> float:
    """One line of `smaps_rollup`.

    Raises:
        ValueError: there is no such line.
    """
    found = re.search(rf"^{name}:\s+(\d+) kB", rollup, re.MULTILINE)
    if found is None:
        raise ValueError(f"smaps_rollup has no {name}")
    return round(int(found[1]) / 1024, 1)


def whole(pids: Sequence[int]) -> float:
    """MiB resident of all together. Pages that processes share count for each of them: an upper bound.

    The sum of their shares (PSS) would be exact, but is too low while strangers map the same libraries.
    """
    total: float = sum(process["rss_mib"] for process in processes(pids))
    return round(total, 1)
