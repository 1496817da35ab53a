"""What surrounds every request: identity, keys, CORS, log lines, and refusals, also of callers that still send."""

from __future__ import annotations

import logging
import re

import pytest

from service.web.middleware import LINES_A_SECOND
from tests.service.fakes import on_a_loop, png
from tests.service.http.listening import listening, post
from tests.service.web.apps import App, app, service_in

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
async def test_an_id_that_is_not_fit_for_headers_and_logs_is_replaced_by_ours(given: str) -> None:
    response = await app().get("/healthz", **{"x-request-id": given})
    assert OURS.fullmatch(response.headers["x-request-id"])


# Keys


@on_a_loop
@pytest.mark.parametrize("path", PRIVATE)
@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic one", "one", "Bearer one two", "Bearer on"]
)
async def test_without_a_key_every_path_but_the_public_ones_is_401(path: str, authorization: str | None) -> None:
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
async def test_metrics_are_open_unless_they_are_told_not_to_be(public: str, status: int) -> None:
    service = app(api_keys="one", metrics_public=public)
    assert (await service.get("/metrics")).status == status
    assert (await service.get("/metrics", authorization="Bearer one")).status == 200


@on_a_loop
async def test_a_key_may_hold_any_character() -> None:
    service = app(api_keys="schlüssel")
    communicator = service.communicator("GET", "/model")
    communicator.scope["headers"].append((b"authorization", "Bearer schlüssel".encode()))
    assert (await communicator.run()).status == 200


# CORS


@on_a_loop
async def test_browsers_of_the_allowed_origins_may_read_answers_and_errors() -> None:
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


# Log lines


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "service.web.middleware"]


@on_a_loop
async def test_probes_are_logged_for_debugging_only(service: App, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for path in ("/healthz", "/readyz", "/metrics", "/v2/health/live", "/v2/health/ready"):
        await service.get(path)
    assert lines(caplog) == []
    caplog.set_level(logging.DEBUG)
    await service.get("/healthz")
    assert len(lines(caplog)) == 1


@on_a_loop
async def test_a_path_cannot_start_a_log_line_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await app().get("/x\n12:00:00 INFO all is well\r\n")
    [line] = lines(caplog)
    assert "\n" not in line.getMessage()
    assert "\r" not in line.getMessage()


@on_a_loop
@pytest.mark.parametrize(
    ("sent", "line", "code"),
    [(post(png(1)), " 503 ", "queue_full"), (b"hello\r\n\r\n", "no request: ", "malformed_request")],
)
async def test_refusals_of_a_flood_are_all_counted_and_few_are_logged(
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


@on_a_loop
async def test_what_is_answered_otherwise_always_has_its_line(caplog: pytest.LogCaptureFixture) -> None:
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
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400, "malformed_request"),
        (b"GET /" + b"a" * (65 << 10), 400, "malformed_request"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "malformed_request"),
    ],
    ids=["TLS", "framing", "long", "no host"],
)
async def test_what_never_becomes_a_request_is_counted_and_logged(
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
