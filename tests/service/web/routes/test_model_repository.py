"""The model repository under /v2: who may swap the checkpoint, for which, and what is answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from service.engine.backbones import What
from tests.service.fakes import on_a_loop
from tests.service.web.apps import App, app, service_in
from tests.service.web.http_communicator import HttpCommunicator

LOAD = "/v2/repository/models/fake/load"
UNLOAD = "/v2/repository/models/fake/unload"
ADMIN = {"authorization": "Bearer admin"}


def swapping(folder: Path | None = None, error: Exception | None = None, **settings: Any) -> tuple[App, list[Any]]:
    """An application, and the checkpoints that its engine is to load."""
    if folder is not None:
        settings["checkpoint_folder"] = str(folder)
    service, loaded = app(**({"admin_key": "admin"} | settings)), []

    async def put(name: str, what: What) -> bool:
        loaded.append(what)
        if error is not None:
            raise error
        return False

    service_in(service).models.put = put  # type: ignore[method-assign]
    return service, loaded


async def post(service: App, path: str = LOAD, body: Any = None, **headers: str) -> HttpCommunicator:
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    return await service.request("POST", path, headers=ADMIN | headers, body=content)


def checkpoint(path: str) -> dict[str, Any]:
    return {"parameters": {"checkpoint": path}}


@on_a_loop
@pytest.mark.parametrize("body", [None, {}, {"parameters": {}}])
async def test_without_a_checkpoint_the_configured_one_is_loaded_again(body: Any) -> None:
    service, loaded = swapping()
    answer = await post(service, body=body)
    assert (answer.status, loaded) == (200, [None])
    assert answer.json == {"name": "fake", "version": "1", "state": "READY", "reason": ""}


@on_a_loop
async def test_a_checkpoint_below_the_folder_is_loaded(tmp_path: Path) -> None:
    service, loaded = swapping(tmp_path)
    (tmp_path / "v2").mkdir()
    (tmp_path / "current").symlink_to("v2")
    for path in ("v2", "./x/../v2", str(tmp_path / "v2"), "current"):
        assert (await post(service, body=checkpoint(path))).status == 200
    assert loaded == [str(tmp_path.resolve() / "v2")] * 4


@on_a_loop
@pytest.mark.parametrize("path", ["../elsewhere", "/etc", "out", "out/side", "v2/../../elsewhere", "circle"])
async def test_a_checkpoint_elsewhere_is_refused_whether_it_exists_or_not(path: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (folder / "out").symlink_to(tmp_path / "elsewhere")
    (folder / "circle").symlink_to("circle")
    service, loaded = swapping(folder)
    answer = await post(service, body=checkpoint(path))
    assert (answer.status, loaded) == (403, [])
    assert "VIT_CHECKPOINT_FOLDER" in answer.json["error"]


@on_a_loop
async def test_without_a_folder_no_checkpoint_may_be_named() -> None:
    service, loaded = swapping()
    answer = await post(service, body=checkpoint("v2"))
    assert (answer.status, loaded) == (403, [])
    assert answer.json == {"error": "no checkpoint may be named: VIT_CHECKPOINT_FOLDER is not set"}


@on_a_loop
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b"\xff", 400),
        (b"[" * 60_000, 400),
        ({"parameters": {"config": "{}"}}, 422),
        ({"parameters": {"dtype": "float32"}}, 422),
        ({"parameters": {"dtype": "float32", "image_size": "48"}}, 422),
        (checkpoint(""), 422),
        (checkpoint("a\0b"), 422),
        (checkpoint("a\nb"), 422),
        (checkpoint("\ud800"), 400),
        (checkpoint("x" * 4001), 422),
        ({"parameters": {"checkpoint": 7}}, 422),
        (b" " * 70_000, 413),
    ],
    ids=str,
)
async def test_what_is_no_load_is_refused(body: Any, status: int, tmp_path: Path) -> None:
    service, loaded = swapping(tmp_path)
    answer = await post(service, body=body)
    assert (answer.status, loaded, list(answer.json)) == (status, [], ["error"])


@on_a_loop
@pytest.mark.parametrize("path", [LOAD, UNLOAD])
async def test_without_an_admin_key_in_the_settings_nobody_may_load(path: str) -> None:
    service, loaded = swapping(admin_key=None)
    answer = await post(service, path)
    assert (answer.status, loaded) == (403, [])
    assert answer.json == {"error": "loading is off: VIT_ADMIN_KEY is not set"}


@on_a_loop
async def test_the_admin_key_opens_loading_and_nothing_else() -> None:
    service, loaded = swapping(api_keys="user")
    assert (await post(service)).status == 200
    assert loaded == [None]
    for path in ("/v2/repository/index", "/classify"):
        assert (await post(service, path)).status == 401
    assert (await post(service, "/v2/repository/index", authorization="Bearer user")).status == 200


@on_a_loop
async def test_the_default_model_is_not_unloaded() -> None:
    service, _ = swapping()
    answer = await post(service, UNLOAD, body={"parameters": {"unload_dependents": False}})
    assert (answer.status, "is the default model" in answer.json["error"]) == (409, True)


@on_a_loop
async def test_a_service_that_stops_loads_nothing() -> None:
    service, loaded = swapping()
    service.lifecycle.draining = True
    assert ((await post(service)).status, loaded) == (503, [])
