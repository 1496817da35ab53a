"""One browser, and one server with the bundled model, for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from tests.e2e.page.browser import Browser, chromium, tab
from tests.e2e.page.steps import Open
from tests.e2e.serving import Serve, Served


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def server(browser: Browser, serve_module: Serve) -> Served:
    """Serves the bundled model."""
    return serve_module(checkpoint="bundled", backend="torch", max_upload_bytes="200kB")


@pytest.fixture(scope="module")
def open_page(browser: Browser, server: Served) -> Open:
    return partial(tab, browser, f"{server.url}/")


@pytest.fixture(scope="module")
def explains(server: Served) -> None:
    if "relevance" not in server.get("/model").json()["attention_methods"]:
        pytest.skip("the service offers no method that explains a class")
