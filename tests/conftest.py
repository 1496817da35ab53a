"""Fixtures that every test folder may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before torch loads: threads that spin between operators stall the server processes that tests start beside them.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real checkpoints and pictures: VIT_SHARED, or `../shared` beside the repository."""
    folder = Path(os.environ.get("VIT_SHARED", REPOSITORY.parent / "shared")).resolve()
    if not folder.is_dir():
        pytest.skip(f"no shared data: {folder} does not exist (set VIT_SHARED)")
    return folder
