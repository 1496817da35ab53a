"""Number of cores that this process may use, without torch."""

import math
import os
from pathlib import Path
from typing import Final

_SYSTEM: Final = Path("/sys")
_OWN_GROUPS: Final = Path("/proc/self/cgroup")


def usable_cores(system: Path = _SYSTEM, own_groups: Path = _OWN_GROUPS) -> int:
    """Return how many threads may work at the same time.

    That is `OMP_NUM_THREADS`, as for torch, or else `allowed_cores`.

    Args:
        system, own_groups: see `allowed_cores`.
    """
    chosen = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if chosen.isdecimal() and int(chosen):
        return int(chosen)
    return allowed_cores(system, own_groups)


def allowed_cores(system: Path = _SYSTEM, own_groups: Path = _OWN_GROUPS) -> int:
    """Return how many cores the process's affinity and its control groups' quotas allow.

    Args:
        system: mount point of sysfs.
        own_groups: file that names the control groups of this process; see cgroups(7).
    """
    quotas = [_quota(folder) for folder in _group_folders(system / "fs/cgroup", own_groups)]
    allowed = [max(1, math.ceil(cores)) for cores in quotas if cores is not None]
    return min([len(_affinity()), *allowed])


def _group_folders(mount: Path, own_groups: Path) -> set[Path]:
    """Return the folders of the process's control groups and their parents (cgroup v1 and v2).

    In a container, the root of the mount is often its own group, but the path is the host's. Then
    the folders of the path are missing, and the root has the quota.
    """
    try:
        lines = own_groups.read_text().splitlines()
    except OSError:
        lines = []
    folders = {mount, mount / "cpu", mount / "cpu,cpuacct"}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounts = [mount / controllers, mount / "cpu"] if controllers else [mount, mount / "unified"]
        group = Path(path.lstrip("/"))
        if ".." not in group.parts:  # a group outside the namespace, which is not mounted
            for root in mounts:
                folders.update(root / parent for parent in (group, *group.parents))
    return folders


def _quota(folder: Path) -> float | None:
    """Return the number of cores that a control group may use; None without a quota."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        cores = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no folder, or a quota of "max"
        return None
    return cores if cores > 0 else None  # cgroup v1 writes -1 for no quota


def compute_threads(system: Path = _SYSTEM) -> int:
    """Return how many threads compute one batch: at most one for each physical core.

    Two logical cores of one physical core share their multipliers.
    """
    physical = {_siblings(core, system) for core in _affinity()}
    return min(len(physical), usable_cores(system))


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _siblings(core: int, system: Path) -> str:
    """Return the kernel's list of the logical cores of this core's physical core."""
    try:
        return (system / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(core)
