"""API keys: their names in logs and metrics, and how many requests each may have in flight."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import nullcontext

import pytest

from service.errors import SettingsError, Unauthorized
from service.observe.logs import JsonFormatter
from service.observe.metrics import Metrics
from service.settings import ApiKey, load_settings, parse_keys
from service.web.api_keys import KeyGuard, needs_admin_key
from tests.service.fakes import on_a_loop, png, until
from tests.service.web.apps import App, app


def classify_as(service: App, key: str) -> asyncio.Task[object]:
    headers = {"authorization": f"Bearer {key}", "content-type": "image/png"}
    return asyncio.create_task(service.request("POST", "/classify", headers=headers, body=png(1)))


def test_keys_have_the_names_that_they_are_given_or_those_of_their_places() -> None:
    assert parse_keys(["web:abc", "def", "night-run_2:x:y", "a b:c"]) == [
        ApiKey("web", b"abc", True),
        ApiKey("key2", b"def"),
        ApiKey("night-run_2", b"x:y", True),
        ApiKey("key4", b"a b:c"),
    ]
    assert parse_keys(["web: abc"]) == parse_keys(["web:abc"])  # no header could bring the space


@pytest.mark.parametrize(
    ("method", "path", "asks"),
    [
        ("POST", "/v2/repository/models/vit/load", True),
        ("POST", "/v2/repository/models/vit/unload", True),
        ("POST", "/v2/repository/models//load", False),
        ("POST", "/v2/repository/models/vit/loads", False),
        ("POST", "/v2/repository/index", False),
        ("POST", "/classify", False),
        ("PUT", "/models/vit", True),
        ("DELETE", "/models/a/b", True),
        ("GET", "/models/vit", False),
        ("PUT", "/models/", False),
    ],
)
def test_the_admin_key_is_asked_for_where_models_are_loaded(method: str, path: str, asks: bool) -> None:
    assert needs_admin_key(method, path) is asks


@on_a_loop
@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ({}, "an API key is needed: Authorization: Bearer KEY"),
        ({"authorization": "Bearer"}, "an API key is needed: Authorization: Bearer KEY"),
        ({"authorization": "Basic d2ViOm9uZQ=="}, "an API key is needed: Authorization: Bearer KEY"),
        ({"authorization": "Bearer two"}, "the API key is wrong: it is none of the service's"),
        ({"authorization": "Bearer web:one"}, "the API key is wrong: it is none of the service's"),
    ],
)
async def test_a_missing_key_and_a_wrong_one_are_told_apart(headers: dict[str, str], told: str) -> None:
    refused = await app(api_keys="web:one").get("/model", **headers)
    assert (refused.status, refused.code, refused.json["detail"]) == (401, "unauthorized", told)


def test_every_key_is_compared_whatever_was_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(offered: bytes, secret: bytes) -> bool:
        compared.append(secret)
        return offered == secret

    monkeypatch.setattr("service.web.api_keys.hmac.compare_digest", compare)
    guard = KeyGuard(parse_keys(["one", "two"]), 0, Metrics())
    for offered in ("", "Bearer x", "Bearer one"):
        with nullcontext() if offered == "Bearer one" else pytest.raises(Unauthorized):
            guard.find(offered)
    assert compared == [b"one", b"two"] * 3


@pytest.mark.parametrize("written", ["web:abc,web:def", "abc,abc", "web:abc,abc", "key2:abc,def"])
def test_names_and_keys_that_stand_twice_are_refused_without_a_word_of_the_key(written: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings({"api_keys": written})
    assert str(refused.value).startswith("VIT_API_KEYS=***: expected ")
    assert "abc" not in str(refused.value)


@pytest.mark.parametrize("written", ["web:", "abc,web: ", ",", " "])
def test_a_key_whose_variable_was_not_set_is_no_open_door(written: str) -> None:
    with pytest.raises(SettingsError, match=r"^VIT_API_KEYS=\*\*\*: expected a key"):
        load_settings({"api_keys": written})
    assert load_settings({"api_keys": ""}).api_keys == ()


@on_a_loop
async def test_logs_and_metrics_show_the_name_and_never_the_key(caplog: pytest.LogCaptureFixture) -> None:
    service = app(api_keys="web:topsecret,other")
    with caplog.at_level(logging.INFO):
        await service.get("/model", authorization="Bearer topsecret")
        await service.get("/nope", authorization="Bearer topsecret")
        await service.get("/labels", authorization="Bearer other")
        await service.get("/labels")
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records if hasattr(record, "fields")]
    assert [line.get("key") for line in lines] == ["web", "web", "key2", None]
    assert [record.getMessage().split()[-1] for record in caplog.records if hasattr(record, "fields")][:3] == [
        "web",
        "web",
        "key2",
    ]
    assert "topsecret" not in caplog.text
    assert service.metric("vit_key_requests_total", key="web", code="200") == 1
    assert service.metric("vit_key_requests_total", key="web", code="404") == 1
    assert service.metric("vit_key_requests_total", key="key2", code="200") == 1


@on_a_loop
async def test_a_key_with_as_many_requests_as_it_may_have_is_refused_and_others_are_not() -> None:
    service = app(api_keys="web:one,batch:two", key_max_requests=2)
    service.engine.gate.clear()
    held = [classify_as(service, "one") for _ in range(2)]
    await until(lambda: service.engine.waiting == 2)
    refused = await service.get("/model", authorization="Bearer one")
    assert (refused.status, refused.code) == (429, "too_many_requests")
    assert refused.headers["retry-after"] == "1"
    assert service.metric("vit_rejected_total", reason="too_many_requests") == 1
    assert service.metric("vit_key_inflight_requests", key="web") == 2
    assert (await service.get("/model", authorization="Bearer two")).status == 200
    service.engine.gate.set()
    await asyncio.gather(*held)
    assert (await service.get("/model", authorization="Bearer one")).status == 200
    assert service.metric("vit_key_inflight_requests", key="web") == 0


@on_a_loop
async def test_a_caller_that_leaves_and_one_that_fails_give_their_turn_back() -> None:
    service = app(api_keys="web:one", key_max_requests=1)
    for _ in range(3):
        assert (await service.get("/nope", authorization="Bearer one")).status == 404
        service.engine.gate.clear()
        held = classify_as(service, "one")
        await until(lambda: service.engine.waiting == 1)
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        service.engine.gate.set()
    assert (await service.get("/model", authorization="Bearer one")).status == 200


@on_a_loop
async def test_probes_with_a_key_do_not_count() -> None:
    service = app(api_keys="web:one", key_max_requests=1, metrics_public="false")
    service.engine.gate.clear()
    held = classify_as(service, "one")
    await until(lambda: service.engine.waiting == 1)
    assert (await service.get("/metrics", authorization="Bearer one")).status == 200
    service.engine.gate.set()
    await held
