"""Starts other programs: children see no secrets, and import no module from writable folders.

A child runs in `/`, with `-P` if it is Python, and with the environment variables of an allow-list.
The processes of a service with several workers are not such children: they are forks of the
service, and keep its environment.
"""

import asyncio
import fnmatch
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

# Variables that a program and the libraries of this service may need.
COMMON: Final = (
    *("HOME", "LANG", "LC_*", "PATH", "TMPDIR", "TZ", "XDG_*"),
    *("GLIBC_TUNABLES", "LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_*"),
    *("PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "PYTHONHOME", "PYTHONUTF8", "PYTHONWARNINGS"),
    *("BLIS_*", "GOMP_*", "KMP_*", "MKL_*", "OMP_*", "OPENBLAS_*"),
)

# The folder of the packages `service` and `model`.
_PACKAGES: Final = Path(__file__).resolve().parents[1]


def environment(allowed: Collection[str] = COMMON, **more: str) -> dict[str, str]:
    """Return the environment of a child.

    Args:
        allowed: patterns of inherited variables.
        more: additional variables.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in allowed)
    }
    return inherited | more


def start(
    *command: str,
    allowed: Collection[str] = COMMON,
    more: dict[str, str] | None = None,
    **options: Any,
) -> subprocess.Popen[Any]:
    """Start a program with options of `subprocess.Popen`; raises `OSError`."""
    return subprocess.Popen(command, cwd="/", env=environment(allowed, **(more or {})), **options)


def start_python(
    module: str,
    *arguments: str,
    allowed: Collection[str] = COMMON,
    more: dict[str, str] | None = None,
    **options: Any,
) -> subprocess.Popen[Any]:
    """Start a Python module like `start`, with the import path of this process."""
    return start(*_python(module, *arguments), allowed=allowed, more=_importing(more), **options)


async def start_python_async(
    module: str, *arguments: str, more: dict[str, str] | None = None, **options: Any
) -> asyncio.subprocess.Process:
    """Start a Python module like `start_python`, from an event loop."""
    variables = environment(COMMON, **_importing(more))
    return await asyncio.create_subprocess_exec(
        *_python(module, *arguments), cwd="/", env=variables, **options
    )


def output_of(*command: str, timeout_seconds: float) -> str:
    """Return the standard output of a program.

    Raises:
        OSError, subprocess.SubprocessError: the program does not start, fails, or takes too long.
    """
    done = subprocess.run(
        command,
        cwd="/",
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=True,
    )
    return done.stdout


def _python(module: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", module, *arguments)


def _importing(more: dict[str, str] | None) -> dict[str, str]:
    """Return variables that give a child the import path of this process.

    The working directory is excluded, unless it contains the packages of this service.
    """
    excluded = {_working_directory()} - {_PACKAGES}
    folders = [entry for entry in sys.path if entry and Path(entry).resolve() not in excluded]
    return {
        "PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in folders),
        **(more or {}),
    }


def _working_directory() -> Path | None:
    """Return the working directory; None if it was deleted."""
    try:
        return Path.cwd().resolve()
    except FileNotFoundError:
        return None
