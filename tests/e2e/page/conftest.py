"""One browser for all tests of the page, and one server for each model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.page.browser import Browser, Page, Tab, chromium, tab
from tests.e2e.page.steps import Open
from tests.e2e.serving import Served

# Not for the whole session: while the browser runs, Playwright's event loop counts as running in this thread, and
# other tests could start none of their own.


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="package")
def server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serves the bundled model."""
    yield from _serving(tmp_path_factory, checkpoint="bundled", max_upload_bytes="200kB")


@pytest.fixture(scope="package")
def locked_server(browser: Browser, tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Iterator[Served]:
    """Serves DeiT-tiny behind keys."""
    checkpoint = shared / "weights/deit_tiny_imagenet"
    yield from _serving(tmp_path_factory, checkpoint=checkpoint, api_keys="secret,other", metrics_public=False)


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


def _serving(folders: pytest.TempPathFactory, **settings: Any) -> Iterator[Served]:
    # A minute for each request, so that a busy machine refuses no map: their thread has little priority.
    settings |= {"device": "cpu", "compile": "off", "max_batch": 4, "request_timeout": 60}
    served = Served(folders.mktemp("page") / "server.log", warm=True, **settings)
    yield served
    served.kill()
