"""Fixtures: one browser for all tests of the page, and one server per model."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.page.browser import Browser, Page, Tab, chromium, tab
from tests.e2e.page.steps import Open
from tests.e2e.serving import Served


@contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[Served]:
    """Start a server on the CPU."""
    # A long deadline, so that a busy machine refuses no map: the thread of maps has low priority.
    settings |= {"device": "cpu", "compile": "off", "max_batch": 4, "request_timeout": 60}
    served = Served(folder / "server.log", warm=True, **settings)
    try:
        yield served
    finally:
        served.kill()


# Not for the whole session: Playwright's event loop counts as running in this thread, so that other
# tests could not start theirs.


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="package")
def server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve the bundled model."""
    with serving(
        tmp_path_factory.mktemp("page"), checkpoint="bundled", max_upload_bytes="200kB"
    ) as served:
        yield served


@pytest.fixture(scope="package")
def locked_server(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory, shared: Path
) -> Iterator[Served]:
    """Serve DeiT-tiny behind keys."""
    options: dict[str, Any] = {"api_keys": "secret,other", "metrics_public": False}
    folder = tmp_path_factory.mktemp("page")
    checkpoint = shared / "weights/deit_tiny_imagenet"
    with serving(folder, checkpoint=checkpoint, **options) as served:
        yield served


@pytest.fixture(scope="package")
def open_page(browser: Browser, server: Served) -> Open:
    return partial(tab, browser, f"{server.url}/")


@pytest.fixture
def found(open_page: Open) -> Iterator[Tab]:
    with open_page() as found:
        yield found


@pytest.fixture
def page(found: Tab) -> Page:
    return found.page
