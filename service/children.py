"""Starts every other program: child processes see no secrets, and import nothing from a folder that
a caller may write.

A child runs in `/`, with `-P` if it is Python, and with the environment variables of an allow-list.
Processes that are forked from the supervisor (`service.extensions.cluster.processes`) are the service itself,
and keep all.
"""

import asyncio
import fnmatch
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

# Variables that a program and the libraries of this service may need to run.
COMMON: Final = (
    *("HOME", "LANG", "LC_*", "PATH", "TMPDIR", "TZ", "XDG_*"),
    *("GLIBC_TUNABLES", "LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_*"),
    *("PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "PYTHONHOME", "PYTHONUTF8", "PYTHONWARNINGS"),
    *("BLIS_*", "GOMP_*", "KMP_*", "MKL_*", "OMP_*", "OPENBLAS_*"),
)

# Variables for a child that reads checkpoints: caches, the network, and the token of the hub.
LOADING: Final = (
    *("CUDA_*", "NVIDIA_*", "PYTORCH_*", "TORCH*", "TRITON_*", "DNNL_*", "ONEDNN_*"),
    *("HF_*", "HUGGINGFACE_*", "HUGGING_FACE_*", "TRANSFORMERS_*", "TIMM_*"),
    *("ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY"),
    *("all_proxy", "https_proxy", "http_proxy", "no_proxy"),
    *("CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_DIR", "SSL_CERT_FILE", "VIT_CACHE_DIR"),
)


# The folder of the packages `service` and `model`.
_PACKAGES: Final = Path(__file__).resolve().parents[1]


def environment(allowed: Collection[str] = COMMON, **more: str) -> dict[str, str]:
    """Return the environment of a child.

    Args:
        allowed: patterns of the variables that it inherits.
        more: variables that are set for it.
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
    """Start a program, with options of `subprocess.Popen`; raises OSError if it cannot be started."""
    return subprocess.Popen(command, cwd="/", env=environment(allowed, **(more or {})), **options)


def start_python(
    module: str,
    *arguments: str,
    allowed: Collection[str] = COMMON,
    more: dict[str, str] | None = None,
    **options: Any,
) -> subprocess.Popen[Any]:
    """Start a module as `start` does, with the packages that this process imports."""
    return start(*_python(module, *arguments), allowed=allowed, more=_importing(more), **options)


async def start_python_async(
    module: str, *arguments: str, more: dict[str, str] | None = None, **options: Any
) -> asyncio.subprocess.Process:
    """Start a module as `start_python` does, from an event loop."""
    variables = environment(COMMON, **_importing(more))
    return await asyncio.create_subprocess_exec(
        *_python(module, *arguments), cwd="/", env=variables, **options
    )


def output_of(*command: str, timeout_seconds: float) -> str:
    """Return what a program writes to its standard output.

    Raises:
        OSError, subprocess.SubprocessError: it cannot be started, fails, or takes too long.
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
    """Return variables with which a child imports from where this process does.

    The working directory is left out, unless the packages of this service lie in it.
    """
    left_out = {_working_directory()} - {_PACKAGES}
    folders = [entry for entry in sys.path if entry and Path(entry).resolve() not in left_out]
    return {
        "PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in folders),
        **(more or {}),
    }


def _working_directory() -> Path | None:
    """Return the working directory; None if it is gone."""
    try:
        return Path.cwd().resolve()
    except FileNotFoundError:
        return None
