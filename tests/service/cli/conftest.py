"""Fixtures: commands start fast, without compiled graphs."""

import pytest


@pytest.fixture(autouse=True)
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIT_COMPILE", "off")
