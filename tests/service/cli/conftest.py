"""Commands start soon: no graph is compiled."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIT_COMPILE", "off")
