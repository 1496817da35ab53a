"""Limits of a foreign web page: it cannot use a foreign host name, and cannot change anything."""

import time
from typing import Any

import pytest

from service.server import TrustedProxies
from service.web.origins import is_served_host
from tests.service.fakes import on_a_loop, png
from tests.service.web.apps import app, inside
from tests.service.web.http_communicator import HttpCommunicator

NAMED = [
    "localhost",
    "LOCALHOST:8000",
    "a.localhost",
    "127.0.0.1:8000",
    "[::1]:8000",
    "192.168.1.7",
    "localhost.",
]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "notlocalhost",
    "127.0.0.1.evil.example",
    "a@localhost",
    "[::1",
]


@on_a_loop
@pytest.mark.parametrize(("hosts", "status"), [(NAMED, 200), (FOREIGN, 421)])
async def test_loopback_serves_only_local_names(hosts: list[str], status: int) -> None:
    for host in hosts:
        answer = await app().get("/healthz", host=host)
        assert (host, answer.status) == (host, status)
    if status == 421:
        assert answer.code == "unknown_host"
        assert "VIT_ALLOWED_HOSTS" in answer.json["detail"]


@on_a_loop
@pytest.mark.parametrize(
    ("settings", "host", "status"),
    [
        ({"host": "0.0.0.0"}, "vitserve", 200),
        ({"host": "127.0.0.5"}, "vitserve", 421),
        ({"allowed_hosts": "vit.example.org"}, "VIT.example.org:443", 200),
        ({"allowed_hosts": "vit.example.org"}, "localhost", 421),
        ({"allowed_hosts": "vit.example.org", "host": "0.0.0.0"}, "10.0.0.7:8000", 200),
        ({"allowed_hosts": "*.example.org"}, "a.b.example.org", 200),
        ({"allowed_hosts": "*.example.org"}, "example.org", 421),
        ({"allowed_hosts": "*"}, "evil.example", 200),
    ],
)
async def test_the_allowed_hosts_are_served(
    settings: dict[str, Any], host: str, status: int
) -> None:
    assert (await app(**settings).get("/healthz", host=host)).status == status


def test_a_host_of_many_labels_costs_little() -> None:
    started = time.process_time()
    for _ in range(10):
        assert not is_served_host("a." * 30_000 + "com", {"localhost", "*.localhost"})
    assert time.process_time() - started < 1


ALLOWED: dict[str, Any] = {"cors_origins": "https://a.example,https://*.b.example"}
PAGES = [
    ({}, 200),
    ({"sec-fetch-site": "same-origin", "origin": "https://rewritten.example"}, 200),
    ({"sec-fetch-site": "none"}, 200),
    ({"origin": "http://localhost:8000"}, 200),
    ({"origin": "https://a.example", "sec-fetch-site": "cross-site"}, 200),
    ({"origin": "https://x.b.example", "sec-fetch-site": "cross-site"}, 200),
    ({"origin": "https://evil.example"}, 403),
    ({"origin": "null"}, 403),
    ({"origin": "http://localhost:3000"}, 403),
    ({"origin": "http://localhost:3000", "sec-fetch-site": "same-site"}, 403),
    ({"sec-fetch-site": "cross-site"}, 403),
    ({"origin": "https://evil.example", "x-forwarded-host": "evil.example"}, 403),
]


@on_a_loop
@pytest.mark.parametrize(("headers", "status"), PAGES)
async def test_a_foreign_page_changes_nothing(headers: dict[str, str], status: int) -> None:
    sent = {"host": "localhost:8000", "content-type": "text/plain", **headers}
    answer = await app(**ALLOWED).request("POST", "/classify", headers=sent, body=png(1))
    assert answer.status == status
    if status == 403:
        assert answer.code == "forbidden"
        assert "VIT_CORS_ORIGINS" in answer.json["detail"]


@on_a_loop
async def test_refused_preflight_names_the_setting() -> None:
    headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
    for running in (app(), app(api_keys="web:KEY")):
        answer = await running.request("OPTIONS", "/classify", headers=headers)
        assert (answer.status, answer.code) == (403, "forbidden")
        assert "VIT_CORS_ORIGINS" in answer.json["detail"]


@on_a_loop
async def test_every_changing_route_refuses_a_page() -> None:
    running = app()
    for route in inside(running).routes:
        for method in sorted(route.methods - {"GET", "HEAD", "OPTIONS"}):
            answer = await running.request(
                method, route.path, headers={"sec-fetch-site": "cross-site"}
            )
            assert (route.path, answer.status) == (route.path, 403)


@on_a_loop
async def test_a_proxy_may_leave_out_the_port() -> None:
    for origin, status in (("https://localhost:8443", 200), ("https://evil.example", 403)):
        headers = {"host": "localhost", "origin": origin, "content-type": "image/png"}
        answer = await app().request("POST", "/classify", headers=headers, body=png(1))
        assert answer.status == status


@on_a_loop
@pytest.mark.parametrize(("proxy", "status"), [("unix:", 200), ("10.0.0.1", 403)])
async def test_unix_socket_accepts_any_host(proxy: str, status: int) -> None:
    headers = {
        "host": "upstream",
        "origin": "https://vit.example.org",
        "x-forwarded-host": "vit.example.org",
    }
    behind: Any = TrustedProxies(app().asgi, proxy)  # type: ignore[arg-type]  # uvicorn's own types
    caller = HttpCommunicator(
        behind, "POST", "/classify", headers=headers | {"content-type": "image/png"}, body=png(1)
    )
    caller.scope |= {"server": ("/run/vitserve/http", None), "client": None}
    assert (await caller.run()).status == status


@on_a_loop
@pytest.mark.parametrize(("proxy", "status"), [("127.0.0.1", 200), ("10.0.0.1", 403)])
async def test_a_trusted_proxy_may_change_the_host(proxy: str, status: int) -> None:
    headers = {
        "host": "localhost",
        "origin": "https://vit.example.org",
        "x-forwarded-host": "vit.example.org",
    }
    behind: Any = TrustedProxies(app().asgi, proxy)  # type: ignore[arg-type]  # uvicorn's own types
    caller = HttpCommunicator(
        behind, "POST", "/classify", headers=headers | {"content-type": "image/png"}, body=png(1)
    )
    assert (await caller.run()).status == status
