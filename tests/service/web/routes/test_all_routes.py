"""Promises of every route that the application has or will have.

Each route with a body is admitted, bounded, and ends at a disconnect. Each route refuses unknown
parameters, in the address and in a form.
"""

import base64
import json
from pathlib import Path
from typing import Any

from service.web.query import parameters_of
from service.web.routes.endpoint import Endpoint
from tests.needs import TEACH
from tests.service.fakes import on_a_loop, png, until
from tests.service.web.apps import App, app, budget_of, form, inside, service_in, settle
from tests.service.web.http_communicator import HttpCommunicator

ADMIN = {"authorization": "Bearer root"}

NAMES = {"{name:path}": "fake", "{name}": "birds", "{version}": "1", "{number:int}": "1"}
"""Values of the parameters in paths."""

REQUIRED = {
    "/heads/{name}/examples": "label=cat",
    "/heads/{name}/examples/{number:int}": "label=cat",
}
"""Required parameters of routes."""

WITHOUT_BODY = {"/heads/{name}/examples/{number:int}"}
"""Routes of POST and PUT without a body."""

WITHOUT_SLOT = {
    "/models/{name:path}",
    "/v2/repository/index",
    "/v2/repository/models/{name:path}/load",
    "/v2/repository/models/{name:path}/unload",
}
"""Routes that read a small document and compute nothing.

Operators use them while all slots are taken.
"""

LOOSE = {
    "/healthz",
    "/readyz",
    "/ping",
    "/metrics",
    "/v2/health/live",
    "/v2/health/ready",
    "/openapi.json",
}
"""Routes where probes and browsers add parameters, besides the pages and their files."""


def running(folder: Path, **settings: Any) -> App:
    if TEACH:
        settings["teach"] = str(folder)
    return app(
        admin_key="root",
        max_request_bytes=60_000,
        max_upload_bytes=50_000,
        **settings,
    )


def routes_of(service: App) -> list[Endpoint]:
    routes: list[Endpoint] = inside(service).routes
    assert len(routes) > (40 if TEACH else 20)
    return routes


def with_bodies(service: App) -> list[tuple[str, Endpoint]]:
    """Return method and route of each route with a body."""
    found = [
        (method, route)
        for route in routes_of(service)
        for method in sorted(route.methods - {"HEAD"})
        if method in ("POST", "PUT") and not (method == "PUT" and route.path in WITHOUT_BODY)
    ]
    assert len(found) >= (15 if TEACH else 6)
    return found


def computing(service: App) -> list[tuple[str, Endpoint]]:
    return [
        (method, route) for method, route in with_bodies(service) if route.path not in WITHOUT_SLOT
    ]


def path_of(route: Endpoint) -> str:
    path = route.path
    for parameter, value in NAMES.items():
        path = path.replace(parameter, value)
    assert "{" not in path
    return path


def is_loose(route: Endpoint) -> bool:
    path = route.path
    return path in LOOSE or path in ("/", "/docs") or path.startswith(("/page/", "/docs/"))


def sent(
    service: App, method: str, route: Endpoint, body: bytes | None, **headers: str
) -> HttpCommunicator:
    query = REQUIRED.get(route.path, "") if method in ("POST", "PUT") else ""
    return service.communicator(
        method, path_of(route), query=query, headers=ADMIN | headers, body=body
    )


def valid_body(route: Endpoint) -> bytes:
    if not route.path.endswith("/infer"):
        return png(7)
    data = [base64.b64encode(png(7)).decode()]
    return json.dumps(
        {"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": data}]}
    ).encode()


def assert_empty(service: App, route: Endpoint) -> None:
    assert service_in(service).limiter.in_use == 0, route.path
    assert budget_of(service).in_use == 0, route.path


@on_a_loop
async def test_every_body_is_bounded(tmp_path: Path) -> None:
    service = running(tmp_path)
    for method, route in with_bodies(service):
        declared = sent(service, method, route, b"x", **{"content-length": str(1 << 40)})
        endless = sent(service, method, route, None)
        for _ in range(100):
            endless.feed(bytes(1000))
        for request in (declared, endless):
            await request.run()
            assert request.status == 413, (method, route.path, request.content)
        assert_empty(service, route)


@on_a_loop
async def test_every_body_needs_a_free_slot(tmp_path: Path) -> None:
    service = running(tmp_path, queue_size=1)
    with service_in(service).limiter.permit():
        for method, route in computing(service):
            answer = await sent(service, method, route, valid_body(route)).run()
            assert answer.status == 503, (method, route.path, answer.content)
            assert answer.received == 0, "it is refused before its body is read"


@on_a_loop
async def test_a_disconnect_ends_every_upload(tmp_path: Path) -> None:
    service = running(tmp_path)
    for count, (method, route) in enumerate(with_bodies(service), 1):
        request = sent(service, method, route, None)
        request.feed(b"x" * 10)
        task = request.start()
        while request.received < 2:
            await settle()
        request.disconnect()
        await task
        assert not request.answered, (method, route.path, request.sent)
        assert_empty(service, route)
        assert service.metric("vit_cancelled_total") == count


@on_a_loop
async def test_a_disconnect_ends_every_inference(tmp_path: Path) -> None:
    service = running(tmp_path)
    service.engine.gate.clear()
    for count, (method, route) in enumerate(computing(service), 1):
        is_batch = route.path.endswith("/batch")
        options: dict[str, Any] = {"headers": {}, "body": valid_body(route)}
        if is_batch:
            options = form(png(7))
        request = sent(service, method, route, options["body"], **options["headers"])
        task = request.start()
        await until(lambda: service.engine.waiting == 1)
        request.disconnect()
        await task
        assert not request.answered, (method, route.path, request.sent)
        assert service.engine.cancelled == count
        assert_empty(service, route)


@on_a_loop
async def test_unknown_parameters_are_refused(tmp_path: Path) -> None:
    service = running(tmp_path)
    for route in routes_of(service):
        for method in sorted(route.methods - {"HEAD"}):
            path = path_of(route)
            answer = await service.request(method, path, query="zzz=1&_=2", headers=ADMIN)
            assert (answer.status == 200) if is_loose(route) else (answer.status == 422), (
                method,
                path,
                answer.status,
            )
            if not is_loose(route):
                assert "unknown parameter 'zzz'; " in answer.content.decode(), (method, path)


def parameters(route: Endpoint) -> tuple[str, ...]:
    query_model = route.operation.query_model
    return () if query_model is None else parameters_of(query_model)


@on_a_loop
async def test_every_misspelt_parameter_is_named(tmp_path: Path) -> None:
    service = running(tmp_path)
    tried = 0
    for route in routes_of(service):
        for name in parameters(route):
            method = min(route.methods)
            answer = await service.request(
                method, path_of(route), query=f"{name.upper()}s=1", headers=ADMIN
            )
            assert answer.status == 422, (method, route.path, name)
            assert (
                f"unknown parameter '{name.upper()}s'; available: {name}" in answer.json["detail"]
            )
            tried += 1
    assert tried > (60 if TEACH else 40)


@on_a_loop
async def test_every_form_refuses_unknown_fields(tmp_path: Path) -> None:
    service = running(tmp_path)
    tried = 0
    for method, route in computing(service):
        if "multipart/form-data" not in str(route.operation.body):
            continue
        for name in parameters(route):
            options = form(png(7), fields={f"{name}s": "1"})
            answer = await sent(service, method, route, options["body"], **options["headers"]).run()
            assert (answer.status, answer.code) == (400, "malformed_request"), (method, route.path)
            assert f"unknown form field '{name}s'" in answer.json["detail"]
            assert f"parameters: {name}" in answer.json["detail"]
            tried += 1
    assert tried > (40 if TEACH else 25)


@on_a_loop
async def test_options_is_405_on_every_route(tmp_path: Path) -> None:
    service = running(tmp_path)
    for route in routes_of(service):
        answer = await service.request("OPTIONS", path_of(route))
        assert answer.status == 405, route.path
        assert route.methods <= set(answer.headers["allow"].split(", ")), route.path


@on_a_loop
async def test_a_body_of_get_or_delete_is_refused(tmp_path: Path) -> None:
    service = running(tmp_path)
    tried = 0
    for route in routes_of(service):
        for method in sorted(route.methods & {"GET", "DELETE"}):
            length = {"content-length": "3"}
            answer = await sent(service, method, route, b"x=1", **length).run()
            if is_loose(route):
                assert answer.status in (200, 503), (method, route.path)
                continue
            assert answer.status == 400, (method, route.path, answer.content)
            assert b"a body has no effect on GET, HEAD and DELETE" in answer.content
            empty = await sent(service, method, route, b"", **{"content-length": "0"}).run()
            assert empty.status != 400, (method, route.path, empty.content)
            tried += 1
    assert tried > (20 if TEACH else 4)
