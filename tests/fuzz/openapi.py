"""schemathesis: requests from a server's OpenAPI document, and checks of the answers."""

import subprocess
import sys
from pathlib import Path

CONFIG = Path(__file__).with_name("schemathesis.toml")


def schemathesis(
    url: str, *arguments: str, seed: int, folder: Path, timeout: float, key: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run all checks of schemathesis against a server.

    Args:
        arguments: further arguments of `schemathesis run`.
        key: API key of the requests, if the server needs a key.
        folder: working folder, for the files of schemathesis.
        timeout: seconds.

    Raises:
        subprocess.TimeoutExpired: the run takes longer than `timeout`.
    """
    # The package lacks a module to run with `python -m`, and its command may not be next to this
    # interpreter.
    program = "import sys; from schemathesis.cli import schemathesis; sys.exit(schemathesis())"
    command = [
        sys.executable,
        "-c",
        program,
        "--config-file",
        str(CONFIG),
        "run",
        f"{url}/openapi.json",
    ]
    options = [
        "--checks=all",
        f"--seed={seed}",
        "--generation-database=none",
        "--no-color",
        *arguments,
    ]
    if key:
        options += ["--header", f"Authorization: Bearer {key}"]
    return subprocess.run(
        [*command, *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
