"""The two ways to POST /classify, past the framework and through it, lead to the same."""

from __future__ import annotations

from typing import Any

import pytest

from service.errors import InferenceFailed
from service.web.shortcut import Shortcut
from tests.service.fakes import Exchange, on_a_loop, png
from tests.service.web.apps import App, app

PAIRS = [
    ("", "attention=0"),
    ("top_k=3", "attention=0&top_k=3"),
    ("attention=false", "attention=False"),
    ("attention=true", "attention=1"),
    ("top_k=10&attention=true", "attention=on&top_k=10"),
    ("top_k=11", "attention=no&top_k=11"),
    ("top_k=999999&attention=false", "attention=no&top_k=999999"),
]
"""Queries that mean the same; the framework gets the second."""


def shortcut_of(running: App) -> Shortcut:
    layer: Any = running.asgi
    while not isinstance(layer, Shortcut):
        layer = getattr(layer, "app", None) or layer._app
    return layer


def framework_calls(running: App) -> list[str]:
    """The paths that come to the framework from now on."""
    shortcut, calls = shortcut_of(running), []
    framework = shortcut._app

    async def counted(scope: Any, receive: Any, send: Any) -> None:
        calls.append(scope["path"])
        await framework(scope, receive, send)

    shortcut._app = counted
    return calls


def without_framework(running: App) -> None:
    async def absent(*_: Any) -> None:
        raise AssertionError("this came to the framework")

    shortcut_of(running)._app = absent


def told(exchange: Exchange) -> tuple[Any, ...]:
    """All that a caller sees but what differs from request to request."""
    document = {key: value for key, value in exchange.json.items() if key not in ("id", "timings_ms", "request_id")}
    if "attention" in document:
        document["attention"].pop("url")
    varies = ("x-request-id", "content-length")
    headers = {name: value for name, value in exchange.headers.items() if name not in varies}
    return exchange.status, headers, document


def picture(kind: str) -> dict[str, Any]:
    headers = {"content-type": "text/plain" if kind == "text" else "image/png"}
    bodies = {"empty": b"", "garbage": b"no picture", "cut off": png(7)[:-20], "large": bytes(2000)}
    return {"headers": headers, "body": bodies.get(kind, png(7))}


@on_a_loop
@pytest.mark.parametrize(("plain", "other"), PAIRS)
@pytest.mark.parametrize("kind", ["good", "empty", "garbage", "cut off", "large", "text", "failing", "draining"])
async def test_both_ways_answer_alike_and_are_counted_alike(plain: str, other: str, kind: str) -> None:
    seen = []
    for query, way in ((plain, "past"), (other, "through")):
        service = app(max_upload_bytes=1500)
        if kind == "failing":
            service.engine.error = InferenceFailed("the model failed on this image")
        service.lifecycle.draining = kind == "draining"
        calls = framework_calls(service)
        exchange = await service.request("POST", "/classify", query=query, **picture(kind))
        assert calls == ([] if way == "past" else ["/classify"])
        counts = [
            service.metric("vit_requests_total", endpoint="/classify", code=str(exchange.status)),
            service.metric("vit_images_total"),
            service.metric("vit_rejected_total", reason=exchange.code if exchange.status != 200 else ""),
        ]
        seen.append((*told(exchange), counts))
    assert seen[0] == seen[1]


@on_a_loop
@pytest.mark.parametrize(
    "query",
    ["top_k=5attention=true", "top_k=05x", "top_k=0", "top_k=1234567x", "attention=yep", "attention=true\n", "top_k=+"],
)
async def test_what_is_not_plain_is_for_the_framework_to_judge(query: str) -> None:
    exchange = await app().classify(query=query)
    assert (exchange.status, exchange.code) == (422, "invalid_parameter")


@on_a_loop
async def test_other_requests_go_to_the_framework() -> None:
    service = app()
    assert (await service.get("/classify")).status == 405
    assert (await service.get("/model")).status == 200
    assert (await service.request("POST", "/classify/", **picture("good"))).status == 404


@on_a_loop
async def test_a_defect_of_ours_past_the_framework_is_answered_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    service = app()
    without_framework(service)
    service.engine.error = ZeroDivisionError("oops")
    exchange = await service.classify()
    assert (exchange.status, exchange.code) == (500, "internal_error")
    assert "oops" not in exchange.json["detail"]
    assert "oops" in caplog.text
