"""GET /: the page and its files as they are served. What the page does is tested in a browser, in tests/e2e/page."""

from __future__ import annotations

import re
from pathlib import Path

import service.web
from service.web.routes import pages
from tests.service.fakes import on_a_loop
from tests.service.web.apps import App, app, settle

FOLDER = Path(service.web.__file__).parent / "page"
FILES = [path for path in FOLDER.rglob("*") if path.is_file()]


def size(*suffixes: str) -> int:
    return sum(path.stat().st_size for path in FILES if path.suffix in suffixes)


def test_the_page_is_small() -> None:
    assert 10_000 < size(".html", ".css", ".js") < 119_000  # 36 kB compressed: maps, a table, two models, teaching
    assert size(".jpg") < 60_000


def test_nothing_comes_from_another_host_and_nothing_is_inline() -> None:
    for path in FILES:
        if path.suffix in {".html", ".css", ".js"}:
            text = path.read_text()
            assert not re.search(r"https?://|\bstyle=|\son[a-z]+=|@import|innerHTML|\beval\(", text), path.name
            assert not re.search(r'(src|href)="/', text), path.name


def test_nothing_is_painted_before_the_whole_document_is_there() -> None:
    """On a slow machine or line its parts would appear one by one, and move those before them."""
    text = (FOLDER / "index.html").read_text()
    [last] = re.findall(r'<link rel="expect" href="#([a-z-]+)" blocking="render">', text)
    assert last == re.findall(r'\bid="([^"]+)"', text)[-1]


def test_every_module_that_is_imported_is_served_and_preloaded() -> None:
    preloaded = re.findall(r'modulepreload" href="(.+?)"', (FOLDER / "index.html").read_text())
    for path in FOLDER.glob("*.js"):
        for name in re.findall(r'from "\./(.+?)"', path.read_text()):
            assert f"/page/{name}" in pages.PUBLIC and f"page/{name}" in preloaded


@on_a_loop
async def test_the_page_has_a_strict_policy(service: App) -> None:
    answer = await service.get("/")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    assert answer.headers["referrer-policy"] == "no-referrer"
    for name in ("page.css", "main.js", "examples/dog.jpg"):
        assert f'"page/{name}"' in answer.content.decode()
        file = await service.get(f"/page/{name}")
        assert (file.status, file.content) == (200, (FOLDER / name).read_bytes())
        assert file.headers["x-content-type-options"] == "nosniff"


@on_a_loop
async def test_the_first_page_of_a_model_prepares_its_maps_once(service: App) -> None:
    await service.get("/page/page.css")
    assert service.engine.timeouts == []
    for _ in range(2):
        assert (await service.get("/")).status == 200
        await settle()
    assert len(service.engine.timeouts) == 1


@on_a_loop
async def test_a_module_is_asked_for_again_and_answered_with_304(service: App) -> None:
    first = await service.get("/page/api.js")
    assert (first.headers["content-type"], first.headers["cache-control"]) == (
        "text/javascript; charset=utf-8",
        "no-cache",
    )
    again = await service.get("/page/api.js", **{"If-None-Match": first.headers["etag"]})
    assert (again.status, again.content) == (304, b"")


@on_a_loop
async def test_the_page_is_open_where_keys_are_needed() -> None:
    service = app(api_keys="one")
    for path in sorted(pages.PUBLIC):
        assert (await service.get(path)).status == 200
    assert (await service.get("/model")).status == 401
