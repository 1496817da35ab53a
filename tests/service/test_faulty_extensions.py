"""Faulty extensions are refused at the start with their name and the reason, or contained."""

import logging
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from model import extension
from model.errors import ExtensionError
from model.extension import GROUP
from model.extension import extensions as installed
from service.cli.main import commands, main
from service.errors import SettingsError
from service.extension import Command, Extension, Routes, check, extensions_by_scheme
from service.observe.metrics import Metrics
from service.settings import load_settings, settings_class
from service.web.routes.endpoint import Endpoint, Router
from service.web.routes.openapi import openapi_document
from service.web.routes.pages import extension_folders
from tests.conftest import REPOSITORY
from tests.service.fakes import on_a_loop
from tests.service.web.apps import App, app, inside, service_in


class Port(BaseModel):
    port: int = 1


class Hosts(BaseModel):
    hosts: str = ""


class Color(BaseModel):
    color: str = ""


class Sizes(BaseModel):
    sizes: tuple[int, ...] = ()


class Required(BaseModel):
    shape: str


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)

    shape: str = ""


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


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that installs extensions instead of the real ones."""
    caches = (installed, settings_class, commands)

    def clear() -> None:
        for cached in caches:
            cached.cache_clear()

    def install(*added: Extension) -> None:
        for each in added:
            monkeypatch.setitem(globals(), each.name, each)
        points = [EntryPoint(each.name, f"{__name__}:{each.name}", GROUP) for each in added]
        monkeypatch.setattr(extension, "entry_points", lambda *, group: points)
        clear()

    yield install
    monkeypatch.undo()
    clear()


def setting(name: str, settings: str) -> Extension:
    return Extension(name=name, settings=f"{__name__}:{settings}")


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ([setting("a", "Port")], "'a': the setting VIT_PORT also belongs to vitserve"),
        ([setting("a", "Hosts")], "'a': the setting VIT_HOSTS also belongs to vitserve"),
        (
            [setting("a", "Color"), setting("b", "Color")],
            "'b': the setting VIT_COLOR also belongs to the extension 'a'",
        ),
        ([setting("a", "fail")], "'a': .*:fail is not a pydantic model"),
        ([setting("a", "Required")], "'a': the setting VIT_SHAPE has no default"),
        ([setting("a", "Strict")], "'a': 'strict' in the `model_config` of .*:Strict would apply"),
        (
            [Extension(name="a", notes={"prot": "x"})],
            "'a': `notes` names the unknown setting 'prot'",
        ),
    ],
    ids=[
        "a core setting",
        "a core property",
        "two extensions",
        "no model",
        "no default",
        "options of the core",
        "an unknown note",
    ],
)
def test_wrong_settings_are_refused(install, added, message):
    install(*added)

    with pytest.raises(ExtensionError, match=message):
        load_settings()


def test_unreadable_list_is_one_line(install, monkeypatch):
    install(setting("a", "Sizes"))
    monkeypatch.setenv("VIT_SIZES", "1,2")

    with pytest.raises(SettingsError, match=r"^VIT_SIZES='1,2': expected JSON$"):
        load_settings()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["serve"], "'a': the subcommand serve also belongs to vitserve"),
        (["x", "x"], "'b': the subcommand x also belongs to the extension 'a'"),
    ],
    ids=["a core subcommand", "two extensions"],
)
def test_taken_subcommand_is_refused(install, names, message):
    install(
        *(
            Extension(name=owner, commands={name: Command("m", "")})
            for owner, name in zip("ab", names, strict=False)
        )
    )

    with pytest.raises(ExtensionError, match=message):
        commands()


def add_arguments(parser: Any) -> None:
    parser.add_argument("--count", default=1)


def run(arguments: Any) -> int:
    return int(arguments.count) // 0


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("module", "TypeError: 'module' is not a `service.extension.Command`"),
        (Command("nowhere", "100%"), "ModuleNotFoundError: No module named 'nowhere'"),
        (Command("this", ""), "AttributeError: .* 'add_arguments'"),
        (Command(__name__, ""), "ZeroDivisionError"),
    ],
    ids=["wrong type", "no module", "no functions", "failing"],
)
def test_faulty_subcommand_is_named(install, capsys, command, message):
    install(Extension(name="a", commands={"x": command}))

    assert main(["x"]) == 1
    assert re.match(
        f"vitserve: the extension 'a': `commands` failed: {message}", capsys.readouterr().err
    )


def test_summary_of_a_subcommand_is_any_text(install, capsys):
    install(Extension(name="a", commands={"x": Command("nowhere", "100% of it")}))

    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "100% of it" in capsys.readouterr().out


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


BLOCKED = """
import asyncio, contextlib, sys, time
from service.extension import Extension
from service.web import app
from tests.service.web import apps

@contextlib.asynccontextmanager
async def beside(_):
    time.sleep(60)
    yield

async def start(running):
    async with running.lifespan(running):
        pass

app.BESIDE_SECONDS = 0.1
app.extensions = lambda: (Extension(name="a", beside=beside),)
asyncio.run(start(apps.inside(apps.app())))
"""


def test_blocked_event_loop_ends_the_start():
    done = start("-c", BLOCKED)

    assert done.returncode == 1
    assert done.stderr.startswith("the extension 'a': `beside` has not started within")


PREPARED = """
from contextlib import contextmanager
from service.extension import Extension

@contextmanager
def prepared(settings):
    yield {settings}
    print("ended", flush=True)
    raise KeyError("boom")

EXTENSION = Extension(name="a", prepared=prepared, serve=lambda *_: 3)
"""


def serve_with(folder: Path, settings: str) -> subprocess.CompletedProcess[str]:
    """Serve with an extension whose `prepared` yields these settings."""
    (folder / "faulty.py").write_text(PREPARED.format(settings=settings))
    with metadata(folder, f"[{GROUP}]\nfaulty = faulty:EXTENSION\n") as path:
        return start("-m", "service", "serve", "--workers", "2", "--port", "0", PYTHONPATH=path)


def test_end_of_prepared_is_reached(tmp_path):
    done = serve_with(tmp_path, "settings")

    assert done.returncode == 3
    assert "\nended\n" in done.stderr
    assert "the extension 'a': the end of `prepared` failed" in done.stderr


def test_prepared_must_return_settings(tmp_path):
    done = serve_with(tmp_path, "None")

    assert done.returncode == 1
    assert "vitserve: the extension 'a': `prepared` failed: TypeError: None is not" in done.stderr


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("faulty:EXTENSION", "faulty:EXTENSION cannot be loaded: RuntimeError: boom"),
        ("not valid!", "'not valid!' is not of the form module:name"),
    ],
    ids=["failing import", "no entry point"],
)
def test_command_line_refuses_in_one_line(tmp_path, entry, message):
    (tmp_path / "faulty.py").write_text("raise RuntimeError('boom')")
    with metadata(tmp_path, f"[{GROUP}]\nfaulty = {entry}\n") as path:
        done = start("-m", "service", "--help", PYTHONPATH=path)

    assert done.returncode == 1
    assert done.stderr.startswith(f"vitserve: the extension 'faulty' of faulty: {message}")
    assert done.stderr.count("\n") == 1


def test_broken_metadata_is_one_line(tmp_path):
    with metadata(tmp_path, f"[{GROUP}]\nno equals sign\n") as path:
        done = start("-m", "service", "--help", PYTHONPATH=path)

    assert done.returncode == 1
    assert done.stderr.startswith("vitserve: an installed package has an unreadable entry_points")
    assert done.stderr.count("\n") == 1


@contextmanager
def metadata(folder: Path, entry_points: str) -> Iterator[str]:
    """Write a package's metadata; yield the path that finds it."""
    written = folder / "faulty-0.dist-info"
    written.mkdir()
    (written / "METADATA").write_text("Name: faulty\nVersion: 0\n")
    (written / "entry_points.txt").write_text(entry_points)
    yield os.pathsep.join([str(folder), str(REPOSITORY)])


def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
