"""GET /, /docs and /openapi.json as served.

tests/e2e/page tests the page in a browser.
"""

import gzip
import re
from pathlib import Path
from typing import Any

import pytest

import service.web
from service.web.routes import pages
from tests.service.fakes import on_a_loop
from tests.service.web.apps import App, app

FOLDER = Path(service.web.__file__).parent / "page"
FILES = [path for path in FOLDER.rglob("*") if path.is_file()]


def size(*suffixes: str) -> int:
    return sum(path.stat().st_size for path in FILES if path.suffix in suffixes)


def test_the_page_is_small() -> None:
    assert (
        10_000 < size(".html", ".css", ".js") < 119_000
    )  # 36 kB compressed: maps, a table, two models, teaching
    assert size(".jpg") < 60_000


def test_page_loads_only_from_its_host() -> None:
    for path in FILES:
        if path.suffix in {".html", ".css", ".js"}:
            text = path.read_text()
            assert not re.search(
                r"https?://|\bstyle=|\son[a-z]+=|@import|innerHTML|\beval\(", text
            ), path.name
            assert not re.search(r'(src|href)="/', text), path.name


def test_page_waits_for_the_whole_document() -> None:
    """Without this, late parts would move earlier parts on a slow machine or line."""
    text = (FOLDER / "index.html").read_text()
    [last] = re.findall(r'<link rel="expect" href="#([a-z-]+)" blocking="render">', text)
    assert last == re.findall(r'\bid="([^"]+)"', text)[-1]


def test_imported_modules_are_preloaded() -> None:
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
async def test_unchanged_module_is_304(service: App) -> None:
    first = await service.get("/page/api.js")
    assert (first.headers["content-type"], first.headers["cache-control"]) == (
        "text/javascript; charset=utf-8",
        "no-cache",
    )
    again = await service.get("/page/api.js", **{"If-None-Match": first.headers["etag"]})
    assert (again.status, again.content) == (304, b"")


@on_a_loop
async def test_every_file_of_the_page_is_public() -> None:
    service = app(api_keys="one")
    for path in sorted(pages.PUBLIC):
        assert (await service.get(path)).status == 200
    assert (await service.get("/model")).status == 401


@on_a_loop
async def test_every_route_is_documented(service: App) -> None:
    document = (await service.get("/openapi.json")).json
    assert set(document["paths"]) >= {
        "/classify",
        "/classify/batch",
        "/embed",
        "/embed/batch",
        "/attention",
        "/model",
        "/models",
        "/models/{name}",
        "/labels",
        "/healthz",
        "/readyz",
        "/metrics",
    }
    for path, method in (("/classify", "post"), ("/embed", "post"), ("/attention", "post")):
        kinds = document["paths"][path][method]["requestBody"]["content"]
        assert set(kinds) == {"multipart/form-data", "application/octet-stream", "application/json"}


@on_a_loop
async def test_parameters_of_maps_are_documented() -> None:
    paths = (await app().get("/openapi.json")).json["paths"]["/attention"]
    drawing = {"overlay", "view", "alpha", "colormap", "size", "smooth", "caption"}
    names = {"model", "method", "class", "layer", "labels", "head", "format"} | drawing
    assert {parameter["name"] for parameter in paths["post"]["parameters"]} == names
    assert {parameter["name"] for parameter in paths["get"]["parameters"]} == names | {"id"}
    assert [p["name"] for p in paths["get"]["parameters"] if p["required"]] == ["id"]


def operations(document: dict[str, Any]) -> dict[str, Any]:
    """Return the operations by id."""
    return {
        found["operationId"]: found
        for path in document["paths"].values()
        for found in path.values()
    }


@on_a_loop
async def test_operation_ids_are_readable() -> None:
    assert set(operations((await app().get("/openapi.json")).json)) >= {
        "classify",
        "classify_batch",
        "delete_model",
        "embed",
        "embed_batch",
        "attention",
        "attention_of_kept_picture",
        "model",
        "models",
        "put_model",
        "labels",
        "healthz",
        "readyz",
        "metrics",
    }


@on_a_loop
@pytest.mark.parametrize(
    ("settings", "security", "closed"),
    [
        ({}, [{}, {"api_key": []}], set()),
        ({"api_keys": "one"}, [{"api_key": []}], set()),
        ({"api_keys": "one", "metrics_public": False}, [{"api_key": []}], {"metrics"}),
    ],
)
async def test_operations_with_keys_are_documented(
    settings: dict[str, Any], security: list[dict[str, list[str]]], closed: set[str]
) -> None:
    document = (await app(**settings).get("/openapi.json")).json
    scheme = document["components"]["securitySchemes"]["api_key"]
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
    assert "VIT_API_KEYS" in scheme["description"]
    for name, operation in operations(document).items():
        if name in {"healthz", "readyz", "metrics", "ping"} - closed:
            assert "security" not in operation
            assert "401" not in operation["responses"]
        else:
            assert operation["security"] == security
            assert "401" in operation["responses"]


@on_a_loop
async def test_page_needs_no_key() -> None:
    service = app(api_keys="one")
    page = await service.get("/docs")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
    assert "unsafe" not in policy
    assert page.headers["cache-control"] == "no-cache"
    text = page.content.decode()
    assert "//" not in text.replace("<!doctype", "")
    assert not re.search(r"<script(?! src=)|<style| style=| on[a-z]+=", text)

    files = re.findall(r'(?:src|href)="(docs/[^"]+)"', text)
    assert files == ["docs/swagger-ui.css", "docs/swagger-ui-bundle.js", "docs/docs.js"]
    for name in files:
        file = await service.get(f"/{name}")
        assert (file.status, file.headers["cache-control"]) == (200, "no-cache")
        wanted = "text/css" if name.endswith(".css") else "text/javascript"
        assert file.headers["content-type"] == f"{wanted}; charset=utf-8"
        assert file.headers["x-content-type-options"] == "nosniff"
        assert len(file.content) > 100


@on_a_loop
@pytest.mark.parametrize("path", ["/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css"])
async def test_large_files_are_compressed(path: str) -> None:
    """An uncompressed bundle counts against the limit of slow readers, which disconnects them."""
    service = app()
    file = await service.get(path, **{"accept-encoding": "br, gzip;q=0.5"})
    assert (file.status, file.headers["content-encoding"]) == (200, "gzip")
    for takes in ("identity", "gzip; q=0.0, br"):
        plain = await service.get(path, **{"accept-encoding": takes})
        assert "content-encoding" not in plain.headers
        assert (plain.headers["vary"], plain.content) == (
            "Accept-Encoding",
            gzip.decompress(file.content),
        )
    again = await service.get(
        path, **{"accept-encoding": "gzip", "if-none-match": file.headers["etag"]}
    )
    assert (again.status, again.content, again.headers["etag"]) == (304, b"", file.headers["etag"])
