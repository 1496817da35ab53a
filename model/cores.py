"""How many cores this process may use, without torch."""

import math
import os
from pathlib import Path
from typing import Final

_SYSTEM: Final = Path("/sys")


def usable_cores(system: Path = _SYSTEM) -> int:
    """Return how many threads may work at the same time.

    They are as many as `OMP_NUM_THREADS` says, as for torch; else as the process's affinity and the quota of its
    control group allow (cgroup v2, as a container sees it).
    """
    chosen = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if chosen.isdecimal() and int(chosen):
        return int(chosen)
    cores = len(_affinity())
    try:
        quota, period = (system / "fs/cgroup/cpu.max").read_text().split()
        return min(cores, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # another version of cgroups, or a quota of "max"
        return cores


def compute_threads(system: Path = _SYSTEM) -> int:
    """Return how many threads compute one batch: at most one for each physical core.

    Two logical cores of one physical core share the units that multiply.
    """
    physical = {_siblings(core, system) for core in _affinity()}
    return min(len(physical), usable_cores(system))


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _siblings(core: int, system: Path) -> str:
    """Return the logical cores that share a physical core with this one, as the kernel lists them."""
    try:
        return (system / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(core)
