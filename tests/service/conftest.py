"""Settings of the property tests: no time limit an example, for machines that are busy. Waits of applications."""

from __future__ import annotations

import pytest
from hypothesis import settings

from service.web import middleware
from tests.service.web.apps import App, app

settings.register_profile("service", deadline=None)
settings.load_profile("service")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse at once where there is no engine."""
    monkeypatch.setattr(middleware, "HOLD_SECONDS", 0.0)


@pytest.fixture
def service() -> App:
    """The application as it is without settings."""
    return app()
