"""Faulty routes, metrics, stores and contexts of extensions are refused or contained."""

import logging
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from model.errors import ExtensionError
from service.extension import Extension, Routes, check, extensions_by_scheme
from service.observe.metrics import Metrics
from service.settings import load_settings
from service.web.routes.endpoint import Endpoint, Router
from service.web.routes.openapi import openapi_document
from service.web.routes.pages import extension_folders
from tests.service.fakes import on_a_loop
from tests.service.web.apps import App, app, inside, service_in


def routes(path: str, method: str = "get") -> Callable[[Any], Routes]:
    router = Router("x")

    @getattr(router, method)(path)  # type: ignore[untyped-decorator]
    async def answer(request: Request) -> Response:
        return Response(path)

    return lambda _: Routes(router.routes)


def add_requests_metric(running: Any) -> Routes:
    running.state.service.metrics.counter("vit_requests_total", "another")
    return Routes([])


def fail(*_: Any) -> Any:
    raise KeyError("boom")


def listen(running: Any) -> Routes:
    running.state.on_models_changed.append(fail)
    return Routes([])


@asynccontextmanager
async def fail_at_the_start(_: Any) -> AsyncIterator[None]:
    raise KeyError("boom")
    yield


@asynccontextmanager
async def fail_at_the_end(_: Any) -> AsyncIterator[None]:
    yield
    raise KeyError("boom")


def failing_middleware(inner: Any, _: Any) -> Any:
    async def layer(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/healthz":
            raise KeyError("boom")
        await inner(scope, receive, send)

    return layer


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["/healthz"], "'a': the route GET /healthz also belongs to vitserve"),
        (["/x/{a}", "/x/{b}"], "'b': the route GET /x/{b} also belongs to the extension 'a'"),
    ],
    ids=["a core route", "two extensions"],
)
def test_taken_route_is_refused(install, paths, message):
    install(
        *(
            Extension(name=owner, routes=routes(path))
            for owner, path in zip("ab", paths, strict=False)
        )
    )

    with pytest.raises(ExtensionError, match=message):
        app()


def test_route_inside_a_core_route_is_refused(install):
    install(Extension(name="a", routes=routes("/models/special", "put")))

    message = r"'a': the route PUT /models/special also belongs to vitserve \(/models/{name}\)"
    with pytest.raises(ExtensionError, match=message):
        app()


@pytest.mark.parametrize(
    "rule",
    [
        {"public": frozenset({"/classify"})},
        {"probes": frozenset({"/classify"})},
        {"admin": ".*"},
        {"accepts_admin": "/x"},
        {"problem_answers": {"": fail}},
    ],
    ids=["public", "probes", "admin", "a text", "errors"],
)
def test_rule_for_core_paths_is_refused(install, rule):
    install(Extension(name="a", routes=lambda _: Routes([], **rule)))

    with pytest.raises(ExtensionError, match="'a': its rules for paths apply to /"):
        app()


@pytest.mark.parametrize("store", [fail, lambda *_: None], ids=["fails", "wrong type"])
def test_failing_store_is_named(install, store):
    install(Extension(name="a", stores={"s3": store}))

    with pytest.raises(ExtensionError, match="'a': `stores` failed: "):
        app(recent_url="s3://bucket")


class Port(BaseModel):
    port: int = 1


class Color(BaseModel):
    color: str = ""


def answer_of(kind: type[BaseModel]) -> Any:
    async def answer(request: Request) -> BaseModel:
        return kind()

    return answer


def test_answers_of_equal_function_names_differ():
    operations = [
        Endpoint("GET", path, answer_of(kind), answer=kind).operation
        for path, kind in {"/a": Color, "/b": Port}.items()
    ]

    paths = openapi_document(operations, version="", public=(), keys_required=False)["paths"]

    schemas = [
        paths[path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
        for path in ("/a", "/b")
    ]
    assert schemas == ["#/components/schemas/Color", "#/components/schemas/Port"]


@on_a_loop
async def test_failing_listener_is_logged(install, caplog):
    install(Extension(name="a", routes=listen))
    running = app()

    with caplog.at_level(logging.ERROR):
        async with inside(running).lifespan(inside(running)):
            service_in(running).models.on_change()

    assert "a function of `on_models_changed` failed" in caplog.text


@pytest.mark.parametrize("page", ["", "nowhere"])
def test_page_without_its_files_is_refused(install, tmp_path, page):
    install(Extension(name="a", page=tmp_path / page))

    with pytest.raises(ExtensionError, match=r"'a': .*/main.js of its `page` is missing"):
        extension_folders()


def test_taken_store_scheme_is_refused(install):
    install(*(Extension(name=name, stores={"s3": fail}) for name in "ab"))

    with pytest.raises(ExtensionError, match="'b': the scheme of VIT_RECENT_URL s3 also belongs"):
        extensions_by_scheme()


@pytest.mark.parametrize("processes", ["one", "several"])
def test_taken_metric_name_is_refused(install, processes, tmp_path):
    install(Extension(name="a", routes=add_requests_metric))
    metrics = Metrics(tmp_path if processes == "several" else None)

    with pytest.raises(ExtensionError, match=r"'a': `routes` failed: .*vit_requests"):
        App(load_settings(), metrics=metrics)


@pytest.mark.parametrize(
    "field", ["check", "routes", "around"], ids=["settings", "routes", "middleware"]
)
def test_failing_function_is_named(install, field):
    functions: Any = {field: fail}
    install(Extension(name="a", **functions))

    line = rf"'a': `{field}` failed: KeyError: 'boom' \(.*{Path(__file__).name}:\d+\)"
    with pytest.raises(ExtensionError, match=line):
        check(load_settings())
        app()


def test_middleware_must_be_an_application(install):
    install(Extension(name="a", around=lambda *_: None))  # type: ignore[arg-type]

    with pytest.raises(ExtensionError, match=r"'a': `around` failed: .*None is not an ASGI"):
        app()


@on_a_loop
async def test_failing_middleware_gets_500(install):
    install(Extension(name="a", around=failing_middleware))
    running = app()

    failed = await running.get("/healthz")

    assert (failed.status, failed.json["code"]) == (500, "internal_error")
    assert (await running.get("/readyz")).status == 200


def faulty_route(answer: Callable[[], object]) -> Callable[[Any], Routes]:
    router = Router("x")

    @router.get("/x")
    async def x(request: Request) -> Any:
        return answer()

    return lambda _: Routes(router.routes)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (fail, "KeyError: 'boom'"),
        (sys.exit, "test_faulty_extensions.faulty_route.<locals>.x called sys.exit"),
        (dict, "test_faulty_extensions.faulty_route.<locals>.x returned a dict"),
    ],
    ids=["error", "exit", "wrong type"],
)
@on_a_loop
async def test_faulty_route_gets_500(install, caplog, answer, message):
    install(Extension(name="a", routes=faulty_route(answer)))
    running = app()

    failed = await running.get("/x")

    assert (failed.status, failed.json["code"]) == (500, "internal_error")
    assert message in caplog.text
    assert (await running.get("/readyz")).status == 200


@on_a_loop
async def test_failing_start_beside_is_named(install):
    install(Extension(name="a", beside=fail_at_the_start))
    running = inside(app())

    with pytest.raises(ExtensionError, match="'a': `beside` failed: KeyError: 'boom'"):
        async with running.lifespan(running):
            pass


@on_a_loop
async def test_failing_start_ends_other_contexts(install):
    ended = []

    @asynccontextmanager
    async def note_its_end(_: Any) -> AsyncIterator[None]:
        yield
        ended.append("a")

    install(Extension(name="a", beside=note_its_end), Extension(name="b", beside=fail_at_the_start))
    running = inside(app())

    with pytest.raises(ExtensionError, match="'b': `beside` failed"):
        async with running.lifespan(running):
            pass

    assert ended == ["a"]


@on_a_loop
async def test_failing_end_beside_is_logged(install, caplog):
    install(Extension(name="a", beside=fail_at_the_end))
    running = app()

    with caplog.at_level(logging.ERROR):
        async with inside(running).lifespan(inside(running)):
            pass

    assert "the extension 'a': the end of `beside` failed" in caplog.text
