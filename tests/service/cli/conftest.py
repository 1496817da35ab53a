"""Commands start soon: no graph is compiled."""

import pytest


@pytest.fixture(autouse=True)
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIT_COMPILE", "off")
