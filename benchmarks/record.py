"""Records of measurements, with machine, versions and command.

Saved after every measurement.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import REPOSITORY

RESULTS = REPOSITORY / "benchmarks" / "results"
_VERSIONS = (
    *("vitserve", "torch", "triton", "openvino", "timm", "transformers", "torchvision"),
    *("numpy", "pillow", "fastapi", "uvicorn", "uvloop"),
)


def command_line(
    name: str, about: str | None, *, rounds: int, seconds: float
) -> argparse.ArgumentParser:
    """Return the options that the programs have in common, with their defaults."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=about)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--seconds", type=float, default=seconds, help="of each measurement")
    parser.add_argument("--record", type=Path, default=RESULTS / f"{name}.json")
    return parser


class Record:
    """A JSON file that grows; one that exists is continued, so that a run that was cut short goes
    on.

    Args:
        path: path of the file.
        dtype: dtype of the network, set or chosen by the servers.
        about: further facts for readers (checkpoints, pictures).
    """

    def __init__(self, path: Path, *, dtype: str, about: Mapping[str, Any]) -> None:
        self.path = path
        self.data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        command = shlex.join(["python", *sys.orig_argv[1:]])
        self.data |= {"device": device(), "versions": versions(), "dtype": dtype, **about}
        # A record that is continued may hold measurements of several states of the code.
        self.data.setdefault("commits", {})[command] = self.data["versions"].get(
            "commit", "unknown"
        )
        self.data.setdefault("started", _now())

    def section(self, *names: str) -> dict[str, Any]:
        """A dictionary inside of the record, made if absent."""
        found = self.data
        for name in names:
            found = found.setdefault(name, {})
        return found

    def note(self, value: Any, *path: str) -> None:
        """Put a value into a section, its name last in the path; save the record at once, and print
        it.
        """
        *sections, name = path
        if isinstance(value, float):
            value = round(value, 3)
        self.section(*sections)[name] = value
        self.save()
        print(f"{', '.join(path)}: {value}", flush=True)

    def save(self) -> None:
        """Write the whole record; a reader sees the old one or the new one."""
        self.data["finished"] = _now()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.data, indent=1) + "\n")
        partial.replace(self.path)


def device() -> dict[str, Any]:
    """The CPU, its cores, memory and load, and the system."""
    info = Path("/proc/cpuinfo").read_text()
    names = [
        line.partition(":")[2].strip()
        for line in info.splitlines()
        if line.startswith("model name")
    ]
    flags = next((line for line in info.splitlines() if line.startswith("flags")), "")
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "features": [
            name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags.split()
        ],
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "load_before": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """Python, our packages and the commit."""
    found = {"python": platform.python_version()}
    for name in _VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        # Records are written here as well, and documents do not run.
        code = ("model", "service", "benchmarks/*.py", "benchmarks/peers")
        dirty = "-dirty" if git("status", "--porcelain", "--", *code) else ""
        found["commit"] = git("describe", "--always") + dirty
    return found


def git(*arguments: str) -> str:
    """What git answers in the repository; raises `OSError` or `subprocess.CalledProcessError`."""
    done = subprocess.run(
        ["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; floats with as many digits as tell something."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return (
            f"{value:.0f}"
            if abs(value) >= 100
            else f"{value:.1f}"
            if abs(value) >= 10
            else f"{value:.2f}"
        )
    return str(value)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
