"""Everything that a kept graph depends on besides its settings: files, versions, code, machine."""

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from model.calibration import CALIBRATION_FILE
from model.extension import extensions

# Age of a change in nanoseconds from which on a further change surely shows in the file's time.
_SETTLED: Final = 10_000_000_000

_PACKAGES: Final = ("vitserve", "openvino", "torch", "timm", "transformers", "numpy", "safetensors")


def file_times(path: str | Path) -> tuple[int, int] | None:
    """Return the size and time of change of a file; None for a folder or a recent change."""
    try:
        status = Path(path).stat()
    except (OSError, ValueError):
        return None
    is_settled = time.time_ns() - status.st_mtime_ns > _SETTLED
    if not is_settled or not stat.S_ISREG(status.st_mode):
        return None
    return status.st_size, status.st_mtime_ns


def digest(path: Path) -> str | None:
    """Return a hash of a file's bytes, or of the names in a folder; None if it does not exist.

    A calibration in the folder does not count, because it does not change the weights.
    """
    try:
        if path.is_dir():
            names = [
                os.fsencode(file.name)
                for file in path.iterdir()
                if not file.name.startswith(CALIBRATION_FILE)
            ]
            return hashlib.sha256(b"\0".join(sorted(names))).hexdigest()
        if not path.is_file():  # reading a pipe would block
            return None
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


@functools.cache  # reading them takes 10 ms, for each model otherwise
def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that make or run a graph."""
    by_name = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            by_name[name] = importlib.metadata.version(name)
    return by_name


@functools.cache
def code_digest() -> str:
    """Return a hash of the code of `model` and of extensions: it changes without a version."""
    code = hashlib.sha256()
    for root in (Path(__file__).resolve().parents[2], *_roots_of_extensions()):
        for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            code.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return code.hexdigest()


def _roots_of_extensions() -> list[Path]:
    """Return the packages and modules by which extensions outside this repository read files."""
    names = {
        dotted_name.partition(":")[0].partition(".")[0]
        for extension in extensions()
        for dotted_name in (*extension.sources, *extension.readers, *extension.label_readers)
    }
    roots: list[Path] = []
    for name in sorted(names - {"model", "service"}):
        spec = importlib.util.find_spec(name)
        if spec is not None:
            roots += map(Path, spec.submodule_search_locations or filter(None, [spec.origin]))
    return roots


def machine() -> dict[str, object]:
    """Return the properties of the CPU that the graph's numbers depend on."""
    lines: list[str] = []
    with suppress(OSError):
        first_cpu = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
        lines = [
            line
            for line in first_cpu.splitlines()
            if re.match(r"flags|Features|model|vendor", line)
        ]
    return {"cpu": "\n".join(lines), "isa": os.environ.get("ONEDNN_MAX_CPU_ISA")}
