"""A real Chromium with the page; a test fails if the page reports an error."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from playwright.sync_api import (  # noqa: E402
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    Request,
    Route,
    expect,
    sync_playwright,
)

from tests.launcher import PATIENCE  # noqa: E402

__all__ = ["Browser", "Page", "Route", "Tab", "audit", "chromium", "expect", "tab"]

BROWSER_PATIENCE = 1000 * PATIENCE
"""Milliseconds that the browser waits for a condition."""

expect.set_options(timeout=BROWSER_PATIENCE)

_WATCH = """
if (origin !== "null" && !window.name) {  // a new tab, with the storage of earlier tabs
  localStorage.clear(); window.name = "opened";
}
window.violations = []; window.shifts = [];
document.addEventListener("securitypolicyviolation",
  (event) => violations.push(`${event.violatedDirective} ${event.blockedURI}`));
new PerformanceObserver((list) => {
  for (const entry of list.getEntries())
    shifts.push(entry.sources.map(({ node, previousRect, currentRect }) =>
      [node?.nodeName, node?.id || node?.className, previousRect.y, currentRect.y].join(" ")));
}).observe({ type: "layout-shift", buffered: true });
"""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start Debian's Chromium, or skip the test if it is missing.

    The build without windows needs a third less processor time for the same pages.
    """
    path = (
        shutil.which("chromium-headless-shell")
        or shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if path is None:
        pytest.skip("no Chromium is installed (on Debian: apt-get install chromium-headless-shell)")
    with sync_playwright() as driver:
        # Chromium's sandbox does not run as root. Starting a process takes longer than the page, so
        # tabs of a profile share one.
        yield driver.chromium.launch(
            executable_path=path,
            args=["--no-sandbox", "--disable-dev-shm-usage", "--process-per-site", "--disable-gpu"],
        )


@dataclass
class Tab:
    """A page with empty storage.

    Attributes:
        complaints: messages of the console, failed scripts, and requests to other services.
        refusals_expected: whether the test provokes errors, which the console reports, too.
    """

    page: Page
    origin: str
    complaints: list[str] = field(default_factory=list)
    refusals_expected: bool = False

    def __post_init__(self) -> None:
        self.page.add_init_script(_WATCH)
        self.page.set_default_timeout(BROWSER_PATIENCE)
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._on_request)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self.complaints.append(message.text)

    def _on_request(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if (
            parts.scheme not in {"blob", "data"}
            and f"{parts.scheme}://{parts.netloc}" != self.origin
        ):
            self.complaints.append(f"a request to {request.url}")

    def check(self) -> None:
        """Fail if the page reported an error."""
        self.complaints += self.page.evaluate("window.violations")
        # Only now, because refusals may come before the test expects them.
        refusal = "Failed to load resource"
        unexpected = [
            text
            for text in self.complaints
            if not (self.refusals_expected and text.startswith(refusal))
        ]
        assert unexpected == [], unexpected


_profiles: dict[tuple[Browser, str], BrowserContext] = {}


def _profile(browser: Browser, options: dict[str, Any]) -> BrowserContext:
    """Return the browser's profile with these options."""
    options = {"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce"} | options
    key = browser, repr(options)
    if key not in _profiles:
        _profiles[key] = browser.new_context(**options)
    return _profiles[key]


@contextmanager
def tab(browser: Browser, url: str, *, own_profile: bool = False, **options: Any) -> Iterator[Tab]:
    """Open the page at `url` with empty storage, and fail if it reports an error by the end.

    Args:
        own_profile: whether the test changes the profile, for example its clock. Otherwise, tabs
            with equal options share a profile and its process.
        options: options of the profile.
    """
    parts = urlsplit(url)
    site = f"{parts.scheme}://{parts.netloc}"
    context = browser.new_context() if own_profile else _profile(browser, options)
    if not context.pages and parts.netloc:
        context.new_page().goto(f"{site}/healthz")  # keeps the process of this profile alive
    page = context.new_page()
    try:
        found = Tab(page, site)
        page.goto(url)
        yield found
        found.check()
    finally:
        page.close()
        if own_profile:
            context.close()


def audit(page: Page) -> None:
    """Fail if axe finds a problem in the current page, or bad contrast in its dark colours."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    options: dict[str, Any] = {"resultTypes": ["violations"]}
    page.emulate_media(color_scheme="light")
    require_no_violation(axe.run(page, options=options))
    page.emulate_media(color_scheme="dark")
    require_no_violation(axe.run(page, options=options | {"runOnly": ["color-contrast"]}))


def require_no_violation(report: Any) -> None:
    assert report.violations_count == 0, report.generate_report()
