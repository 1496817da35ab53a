"""Runs of training without their figures."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what takes longer to draw than these runs to train; the tests of `report` and of the command draw."""
    monkeypatch.setattr("model.training.train.write_figures", lambda *_: ())
