"""The middleware of every request: ids, keys and their limits, CORS, log lines, refusals."""

import asyncio
import json
import logging
import re
from contextlib import nullcontext

import pytest
from uvicorn import Config
from uvicorn.lifespan.on import LifespanOn

from service.errors import SettingsError, Unauthorized
from service.observe.logs import JsonFormatter
from service.observe.metrics import Metrics
from service.setting_values import ApiKey, parse_keys
from service.settings import load_settings
from service.web.api_keys import KeyGuard
from service.web.middleware import LINES_A_SECOND
from service.web.path_rules import PathRules
from tests.service.fakes import on_a_loop, png, until
from tests.service.http.listening import listening, post
from tests.service.web.apps import App, app, inside, service_in

OURS = re.compile(r"[0-9a-f]{32}")
PRIVATE = ["/model", "/labels", "/classify", "/attention", "/nope", "/docs/oauth2-redirect"]
PUBLIC = ["/", "/docs", "/openapi.json", "/healthz", "/readyz"]


# Request ids


@on_a_loop
@pytest.mark.parametrize("given", ["a", "A.b_c-9", "x" * 128])
async def test_the_callers_request_id_comes_back(service: App, given: str) -> None:
    for path in ("/healthz", "/nope"):
        assert (await service.get(path, **{"x-request-id": given})).headers["x-request-id"] == given


@on_a_loop
@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a/b", "é", 'a"b', "a\tb"])
async def test_invalid_request_id_is_replaced(given: str) -> None:
    response = await app().get("/healthz", **{"x-request-id": given})
    assert OURS.fullmatch(response.headers["x-request-id"])


# Keys


@on_a_loop
@pytest.mark.parametrize("path", PRIVATE)
@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Basic one",
        "one",
        "Bearer one two",
        "Bearer on",
    ],
)
async def test_a_missing_key_is_401(path: str, authorization: str | None) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    service = app(api_keys="one,two")
    response = await service.get(path, **headers)
    assert (response.status, response.code) == (401, "unauthorized")
    assert response.headers["www-authenticate"] == "Bearer"
    assert service.metric("vit_rejected_total", reason="unauthorized") == 1


@on_a_loop
@pytest.mark.parametrize("path", PUBLIC)
async def test_public_paths_need_no_key(path: str) -> None:
    assert (await app(api_keys="one").get(path)).status == 200


@on_a_loop
@pytest.mark.parametrize(("public", "status"), [("true", 200), ("false", 401)])
async def test_setting_decides_who_reads_metrics(public: str, status: int) -> None:
    service = app(api_keys="one", metrics_public=public)
    assert (await service.get("/metrics")).status == status
    assert (await service.get("/metrics", authorization="Bearer one")).status == 200


# CORS


@on_a_loop
async def test_allowed_origins_read_answers() -> None:
    service = app(cors_origins="https://a.example,https://b.example", api_keys="one")
    picture = {"origin": "https://b.example", "content-type": "image/png"}
    service.engine.error = KeyError("a defect")
    key = {"authorization": "Bearer one"}
    for response, status in (
        (await service.get("/healthz", origin="https://b.example"), 200),
        (await service.get("/model", origin="https://b.example"), 401),
        (await service.get("/nope", origin="https://b.example", **key), 404),
        (await service.request("POST", "/classify", headers=picture | key, body=png(1)), 500),
    ):
        assert response.status == status
        assert response.headers["access-control-allow-origin"] == "https://b.example"
        assert "X-Request-ID" in response.headers["access-control-expose-headers"]
    stranger = await service.get("/healthz", origin="https://evil.example")
    assert "access-control-allow-origin" not in stranger.headers


@on_a_loop
async def test_a_preflight_needs_no_key() -> None:
    service = app(cors_origins="https://a.example", api_keys="one")
    asked = {
        "origin": "https://a.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,traceparent,tracestate",
    }
    response = await service.request("OPTIONS", "/classify", headers=asked)
    assert response.status == 200
    assert response.headers["access-control-allow-origin"] == "https://a.example"
    assert "POST" in response.headers["access-control-allow-methods"]
    assert "authorization" in response.headers["access-control-allow-headers"].lower()
    assert OURS.fullmatch(response.headers["x-request-id"])


@on_a_loop
async def test_page_may_call_a_private_network() -> None:
    service = app(cors_origins="https://a.example")
    asked = {
        "origin": "https://a.example",
        "access-control-request-method": "POST",
        "access-control-request-private-network": "true",
    }
    answer = await service.request("OPTIONS", "/classify", headers=asked)
    assert answer.headers["access-control-allow-private-network"] == "true"
    answer = await service.request("OPTIONS", "/classify", headers={**asked, "origin": "https://b"})
    assert answer.status == 400


@on_a_loop
@pytest.mark.parametrize(
    "header", ["x-requested-with", "cache-control", "baggage", "inference-header-content-length"]
)
async def test_a_preflight_may_ask_for_any_header(header: str) -> None:
    service = app(cors_origins="https://a.example", api_keys="one")
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    asked["access-control-request-headers"] = f"{header},sentry-trace"
    answer = await service.request("OPTIONS", "/classify", headers=asked)
    assert (answer.status, answer.headers["access-control-allow-headers"]) == (
        200,
        f"{header},sentry-trace",
    )


@on_a_loop
@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("https://a.example.org", True),
        ("https://b.a.example.org", True),
        ("https://example.org", False),
        ("https://a.example.org.evil.example", False),
        ("https://evil.example/.example.org", False),
        ("http://a.example.org", False),
        ("https://a.example.org:444", False),
    ],
)
async def test_a_pattern_allows_subdomains_alone(origin: str, allowed: bool) -> None:
    answer = await app(cors_origins="https://*.example.org/").get("/healthz", origin=origin)
    assert (answer.headers.get("access-control-allow-origin") == origin) is allowed


# Log lines


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "service.web.middleware"]


@on_a_loop
async def test_only_debug_logs_show_probes(service: App, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for path in ("/healthz", "/readyz", "/metrics"):
        await service.get(path)
    assert lines(caplog) == []
    caplog.set_level(logging.DEBUG)
    await service.get("/healthz")
    assert len(lines(caplog)) == 1


@on_a_loop
async def test_a_path_cannot_begin_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await app().get("/x\n12:00:00 INFO all is well\r\n")
    [line] = lines(caplog)
    assert "\n" not in line.getMessage()
    assert "\r" not in line.getMessage()


@on_a_loop
async def test_a_forwarded_address_is_shortened(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    caller = app().communicator("GET", "/model")
    caller.scope["client"] = ("a" * 60_000, 0)  # as a proxy forwards it
    await caller.run()
    [line] = lines(caplog)
    assert len(vars(line)["fields"]["client"]) == 64


@on_a_loop
@pytest.mark.parametrize(
    ("sent", "line", "code"),
    [
        (post(png(1)), " 503 ", "queue_full"),
        (b"hello\r\n\r\n", "no request: ", "malformed_request"),
    ],
)
async def test_flood_logs_few_refusals(
    sent: bytes, line: str, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    refused = LINES_A_SECOND + 5
    async with listening(queue_size=1) as server:
        with service_in(server.app).limiter.permit():
            for _ in range(refused):
                assert (await server.ask(sent)).code == code
        assert server.app.metric("vit_rejected_total", reason=code) == refused
        assert len([message for message in caplog.messages if line in message]) <= LINES_A_SECOND
        server.app.asgi.log.end_second()
    assert caplog.messages[-1] == f"refused 5 more: 5 {code}"
    assert vars(caplog.records[-1])["fields"] == {"refused": {code: 5}}


@on_a_loop
async def test_the_end_logs_counted_refusals(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    asgi = app().asgi
    lifespan = LifespanOn(Config(asgi, lifespan="on"))
    await lifespan.startup()
    for _ in range(LINES_A_SECOND + 2):
        asgi.log.has_own_line("queue_full")
    await lifespan.shutdown()
    assert "refused 2 more: 2 queue_full" in caplog.messages


@on_a_loop
async def test_other_answers_always_have_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with listening() as server, server.connect() as connection:
        for _ in range(LINES_A_SECOND + 5):
            await connection.send(post(png(1), path="/nowhere"))
            assert (await connection.answer()).status == 404
    assert len([line for line in caplog.messages if " 404 " in line]) == LINES_A_SECOND + 5


@on_a_loop
@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "malformed_request"),  # TLS
        (
            b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
            400,
            "malformed_request",
        ),
        (b"GET /" + b"a" * (65 << 10), 400, "malformed_request"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "malformed_request"),
    ],
    ids=["TLS", "framing", "long", "no host"],
)
async def test_unparsed_bytes_are_counted(
    sent: bytes, status: int, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with listening() as server:
        answer = await server.ask(sent)
        assert (answer.status, answer.code) == (status, code)
        assert server.app.metric("vit_requests_total", endpoint="unparsed", code=str(status)) == 1
        assert server.app.metric("vit_rejected_total", reason=code) == 1
    [line] = [line for line in caplog.messages if line.startswith(f"no request: {status} ")]
    assert line.endswith(answer.headers["x-request-id"])


def classify_as(service: App, key: str) -> asyncio.Task[object]:
    headers = {"authorization": f"Bearer {key}", "content-type": "image/png"}
    return asyncio.create_task(service.request("POST", "/classify", headers=headers, body=png(1)))


def test_keys_without_name_are_numbered() -> None:
    assert parse_keys(["web:abc", "def", "night-run_2:x:y", "a.b/c=="]) == [
        ApiKey("web", b"abc", True),
        ApiKey("key2", b"def"),
        ApiKey("night-run_2", b"x:y", True),
        ApiKey("key4", b"a.b/c=="),
    ]
    assert parse_keys(["web: abc"]) == parse_keys(["web:abc"])  # headers cannot contain the space


@pytest.mark.parametrize(
    ("method", "path", "asks"),
    [
        ("POST", "/classify", False),
        ("PUT", "/models/vit", True),
        ("DELETE", "/models/a/b", True),
        ("GET", "/models/vit", False),
        ("PUT", "/models/", False),
    ],
)
def test_loading_needs_the_admin_key(method: str, path: str, asks: bool) -> None:
    rules: PathRules = inside(app()).state.rules
    assert rules.needs_admin_key(method, path) is asks


@on_a_loop
@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ({}, "an API key is needed: Authorization: Bearer KEY"),
        ({"authorization": "Bearer"}, "an API key is needed: Authorization: Bearer KEY"),
        (
            {"authorization": "Basic d2ViOm9uZQ=="},
            "an API key is needed: Authorization: Bearer KEY",
        ),
        ({"authorization": "Bearer two"}, "unknown API key"),
        ({"authorization": "Bearer web:two"}, "unknown API key"),
        (
            {"authorization": "Bearer web:one"},
            "unknown API key: send it without its name and the colon",
        ),
        (
            {"authorization": "Bearer ADMIN"},
            "this is the admin key, and an API key is needed here",
        ),
    ],
)
async def test_wrong_key_has_its_own_message(headers: dict[str, str], told: str) -> None:
    refused = await app(api_keys="web:one", admin_key="ADMIN").get("/model", **headers)
    assert (refused.status, refused.code, refused.json["detail"]) == (401, "unauthorized", told)


def test_every_key_is_always_compared(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_repeated_keys_are_refused_unquoted(
    written: str,
) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings({"api_keys": written})
    assert str(refused.value).startswith("VIT_API_KEYS=***: expected ")
    assert "abc" not in str(refused.value)


@pytest.mark.parametrize("written", ["web:", "abc,web: ", ",", " ", ""])
def test_empty_key_is_refused(written: str) -> None:
    with pytest.raises(SettingsError, match=r"^VIT_API_KEYS=\*\*\*: expected (a key|a value|keys)"):
        load_settings({"api_keys": written})


@on_a_loop
async def test_logs_show_the_name_of_a_key(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = app(api_keys="web:topsecret,other")
    with caplog.at_level(logging.INFO):
        await service.get("/model", authorization="Bearer topsecret")
        await service.get("/nope", authorization="Bearer topsecret")
        await service.get("/labels", authorization="Bearer other")
        await service.get("/labels")
    lines = [
        json.loads(JsonFormatter().format(record))
        for record in caplog.records
        if hasattr(record, "fields")
    ]
    assert [line.get("key") for line in lines] == ["web", "web", "key2", None]
    assert [
        record.getMessage().split()[-1] for record in caplog.records if hasattr(record, "fields")
    ][:3] == [
        "web",
        "web",
        "key2",
    ]
    assert "topsecret" not in caplog.text
    assert service.metric("vit_key_requests_total", key="web", code="200") == 1
    assert service.metric("vit_key_requests_total", key="web", code="404") == 1
    assert service.metric("vit_key_requests_total", key="key2", code="200") == 1


@on_a_loop
async def test_limit_of_requests_counts_per_key() -> None:
    service = app(api_keys="web:one,batch:two", key_max_requests=2, metrics_public="false")
    service.engine.gate.clear()
    held = [classify_as(service, "one") for _ in range(2)]
    await until(lambda: service.engine.waiting == 2)
    refused = await service.get("/model", authorization="Bearer one")
    assert (refused.status, refused.code) == (429, "too_many_requests")
    assert refused.headers["retry-after"] == "1"
    assert service.metric("vit_rejected_total", reason="too_many_requests") == 1
    assert service.metric("vit_key_inflight_requests", key="web") == 2
    assert (await service.get("/model", authorization="Bearer two")).status == 200
    assert (await service.get("/metrics", authorization="Bearer one")).status == 200, (
        "probes do not count"
    )
    service.engine.gate.set()
    await asyncio.gather(*held)
    assert (await service.get("/model", authorization="Bearer one")).status == 200
    assert service.metric("vit_key_inflight_requests", key="web") == 0


@on_a_loop
async def test_failed_request_releases_its_key() -> None:
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
