"""Run docker compose on the compose files of the repository."""

import os
import shutil
import subprocess
from functools import lru_cache

import pytest

from tests.conftest import REPOSITORY


@lru_cache
def has_compose() -> bool:
    docker = shutil.which("docker") or "false"
    return (
        subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode
        == 0
    )


def docker_compose(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run `docker compose` without the user's settings, .env file and other compose files."""
    if not has_compose():
        pytest.skip("docker compose is not installed")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in {"PATH", "HOME", "DOCKER_CONFIG"}
    }
    return subprocess.run(
        ["docker", "compose", "--env-file", os.devnull, *arguments],
        cwd=REPOSITORY,
        env=environment | settings,
        capture_output=True,
        text=True,
        check=False,
    )
