"""A path prefix, stripped by a proxy or not: links contain it, routes accept both forms."""

from typing import Any

import pytest

from service.errors import SettingsError
from service.server import TrustedProxies
from tests.service.fakes import on_a_loop, png
from tests.service.web.apps import App, app
from tests.service.web.http_communicator import HttpCommunicator


async def linked(service: App, before: str, **headers: str) -> list[str]:
    """Return the links of answers to requests with paths that begin with `before`."""
    body = {"headers": {"content-type": "image/png", **headers}, "body": png(7)}
    classified = await service.request("POST", f"{before}/classify", query="attention=true", **body)
    mapped = await service.request("POST", f"{before}/attention", **body)
    described = await service.get(f"{before}/openapi.json", **headers)
    servers = [server["url"] for server in described.json.get("servers", [])]
    urls = [classified.json["attention"]["url"], mapped.headers["content-location"]]
    return [url.split("/attention?id=")[0] for url in urls] + servers


@on_a_loop
@pytest.mark.parametrize("before", ["/vit/a", ""])
async def test_links_always_have_the_prefix(before: str) -> None:
    service = app(root_path="vit/a/", device="cpu")
    assert await linked(service, before) == ["/vit/a"] * 3
    assert (await service.get(f"{before}/")).status == 200
    assert (await service.get(f"{before}/docs")).status == 200


@on_a_loop
async def test_links_begin_at_the_root_by_default() -> None:
    assert await linked(app(), "") == ["", ""]
    assert (await app().get("/vit/classify")).status == 404


@on_a_loop
async def test_the_bare_prefix_leads_to_the_page() -> None:
    service = app(root_path="/vit", api_keys="web:KEY")
    answer = await service.get("/vit", "a=b")
    assert (answer.status, answer.headers["location"]) == (308, "/vit/?a=b")
    assert (await service.get("/vitserve")).status == 401
    assert (await service.get("/vit/labels")).status == 401
    assert (await service.request("POST", "/vit")).status == 404


@on_a_loop
async def test_a_prefix_hides_no_route(caplog: pytest.LogCaptureFixture) -> None:
    service = app(root_path="/models", admin_key="ADMIN")
    assert "VIT_ROOT_PATH=/models begins like a route" in caplog.text
    assert (await service.get("/models")).json[0]["default"]
    service = app(root_path="/vit", api_keys="web:KEY", admin_key="ADMIN")
    answer = await service.request(
        "DELETE", "/vit/models/a", headers={"authorization": "Bearer KEY"}
    )
    assert (answer.status, answer.code) == (403, "forbidden")


async def behind(service: App, path: str, prefix: str, peer: str = "10.0.0.1") -> HttpCommunicator:
    """Return the answer to a request of a proxy that sends its prefix."""
    layer: Any = TrustedProxies(service.asgi, "10.0.0.1")  # type: ignore[arg-type]  # uvicorn's own types
    communicator = HttpCommunicator(layer, "GET", path, headers={"x-forwarded-prefix": prefix})
    communicator.scope["client"] = (peer, 1)
    return await communicator.run()


@on_a_loop
@pytest.mark.parametrize(
    ("path", "prefix", "peer", "servers"),
    [
        ("/openapi.json", "/vit", "10.0.0.1", [{"url": "/vit"}]),
        ("/vit/openapi.json", "/vit/", "10.0.0.1", [{"url": "/vit"}]),
        ("/vit/openapi.json", "/outer, /vit", "10.0.0.1", [{"url": "/outer/vit"}]),
        ("/openapi.json", "/vit", "10.0.0.2", [{"url": "/own"}]),
    ],
)
async def test_a_trusted_proxy_says_its_prefix(
    path: str, prefix: str, peer: str, servers: list[dict[str, str]]
) -> None:
    service = app(root_path="/vit" if "outer" in prefix else "/own")
    answer = await behind(service, path, prefix, peer)
    assert answer.json["servers"] == servers


@on_a_loop
async def test_what_is_not_a_prefix_is_refused() -> None:
    for prefix in ("/a//evil.example", "/a/../b", "https://a.example/b", "/a b", "/a," * 400):
        answer = await behind(app(), "/healthz", prefix)
        assert (answer.status, answer.code) == (400, "malformed_request"), prefix
    for value in ("https://a.example/b", "/a/../b", "/a?b", "/a//b"):
        with pytest.raises(SettingsError, match=r"VIT_ROOT_PATH=.*expected a path of letters"):
            app(root_path=value)
