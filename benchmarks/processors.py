"""Processor time of threads and of the machine, from /proc."""

from contextlib import suppress
from pathlib import Path


def thread_seconds(process: int) -> dict[int, float]:
    """Return the processor seconds of each thread of a process; nothing if it has ended."""
    seconds: dict[int, float] = {}
    with suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            seconds[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return seconds


def processor_ticks() -> dict[str, int]:
    """Return the machine's processor times since its start, in ticks: see proc_stat(5)."""
    ticks = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    return dict(zip(names, ticks, strict=False))


def shares(before: dict[str, int], after: dict[str, int]) -> dict[str, float]:
    """Return the share of each kind of time between two readings of `processor_ticks`."""
    ticks = {name: after[name] - before[name] for name in after}
    return {name: round(count / max(sum(ticks.values()), 1), 3) for name, count in ticks.items()}
