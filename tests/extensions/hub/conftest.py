"""Fixtures: a hub, and a function that reads a checkpoint from it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from model.checkpoint import load_checkpoint
from model.errors import CheckpointError
from tests.extensions.hub.local_hub import MAIN, OLD, Hub, Load, running
from tests.model.checkpoint.folders import native_folder


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    commits = {
        commit: native_folder(tmp_path / commit, (first, "b", "c"))
        for commit, first in ((MAIN, "new"), (OLD, "old"))
    }
    with running(Hub({"owner/name": commits})) as hub:
        yield hub


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Read an id like a process that has started with these settings."""
    constants = pytest.importorskip(
        "huggingface_hub.constants", reason="the extra 'hub' is not installed"
    )

    def load(
        source: str,
        hub: Hub | None,
        *,
        offline: bool = False,
        token: str = "",
        no_proxy: str = "*",
    ) -> dict[str, Any]:
        endpoint = hub.endpoint if hub else "http://127.0.0.1:9"
        settings = {
            "ENDPOINT": endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_TOKEN_PATH": str(tmp_path / "no-token"),
            "HF_HUB_OFFLINE": offline,
        }
        for name, value in settings.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("NO_PROXY", no_proxy)
        monkeypatch.setenv("HF_TOKEN", token)
        try:
            checkpoint = load_checkpoint(source)
        except CheckpointError as error:
            assert "\n" not in str(error)
            return {"error": str(error)}
        checkpoint.build()
        return {
            "label": checkpoint.labels[0],
            "revision": checkpoint.revision,
            "notes": checkpoint.notes,
        }

    return load
