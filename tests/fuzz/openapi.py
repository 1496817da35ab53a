"""schemathesis: requests made from a server's own OpenAPI document, and checks of what it answers
to them.
"""

import subprocess
import sys
from pathlib import Path

CONFIG = Path(__file__).with_name("schemathesis.toml")


def schemathesis(
    url: str, *arguments: str, seed: int, folder: Path, timeout: float, key: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run all checks of schemathesis against a server.

    Args:
        arguments: further ones of `schemathesis run`.
        key: API key that is sent with the requests, where the server asks for one.
        folder: working folder, for what schemathesis keeps.
        timeout: seconds.

    Raises:
        subprocess.TimeoutExpired: it takes longer than `timeout`.
    """
    # Its command has no `python -m`, and a script beside this interpreter need not be there.
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
