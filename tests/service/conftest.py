"""Fixtures of the service's tests; examples of properties have no time limit on busy machines."""

from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint

import pytest
from hypothesis import settings

from model import extension
from model.extension import GROUP
from model.extension import extensions as installed
from service.cli.main import commands
from service.extension import Extension
from service.settings import settings_class
from tests.service.web.apps import App, app

settings.register_profile("service", deadline=None)
settings.load_profile("service")


@pytest.fixture
def service() -> App:
    """Return the application with default settings."""
    return app()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that installs extensions instead of the real ones."""
    caches = (installed, settings_class, commands)

    def clear() -> None:
        for cached in caches:
            cached.cache_clear()

    def install(*added: Extension) -> None:
        for each in added:
            monkeypatch.setitem(globals(), each.name, each)
        points = [EntryPoint(each.name, f"{__name__}:{each.name}", GROUP) for each in added]
        monkeypatch.setattr(extension, "entry_points", lambda *, group: points)
        clear()

    yield install
    monkeypatch.undo()
    clear()
