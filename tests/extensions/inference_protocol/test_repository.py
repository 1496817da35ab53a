"""Models by name in the protocol, and its repository, which loads and unloads them."""

import json
from pathlib import Path
from typing import Any

import pytest

from service.engine.backbones import Checkpoint
from tests.service.fakes import on_a_loop, png
from tests.service.web.apps import App, app, service_in
from tests.service.web.http_communicator import HttpCommunicator
from tests.service.web.named_models import several

ADMIN = {"authorization": "Bearer admin"}
LOAD = "/v2/repository/models/fake/load"
UNLOAD = "/v2/repository/models/fake/unload"


@on_a_loop
async def test_the_named_model_answers() -> None:
    service, _ = several()
    headers = {"inference-header-content-length": "0"}
    answer = await service.request("POST", "/v2/models/few/infer", headers=headers, body=png(1))
    assert answer.status == 200
    assert b'"few"' in answer.content


@on_a_loop
async def test_readiness_is_of_the_named_model() -> None:
    service, models = several()
    assert (await service.get("/v2/models/few/ready")).status == 200
    assert (await service.get("/v2/models/nope/ready")).status == 404
    models.engines["few"].state = "loading"
    assert (await service.get("/v2/models/few/ready")).status == 503
    assert (await service.get("/readyz")).status == 200
    models.engines["few"].state = "ready"
    models.give_back("few")
    assert "its memory was given back" in str((await service.get("/v2/models/few/ready")).json)


@on_a_loop
async def test_index_lists_all_models() -> None:
    service, models = several()
    models.engines["few"].state = "failed"
    index = (await service.request("POST", "/v2/repository/index")).json
    assert [(each["name"], each["state"]) for each in index] == [
        ("bare", "READY"), ("cats", "READY"), ("few", "UNAVAILABLE")
    ]  # fmt: skip


def swapping(
    folder: Path | None = None, error: Exception | None = None, **settings: Any
) -> tuple[App, list[Any]]:
    """Return an application, and the checkpoints that its engine is told to load."""
    if folder is not None:
        settings["checkpoint_folder"] = str(folder)
    service = app(**({"admin_key": "admin"} | settings))
    loaded = []

    async def put(name: str, checkpoint: Checkpoint) -> bool:
        loaded.append(checkpoint)
        if error is not None:
            raise error
        return False

    service_in(service).models.put = put  # type: ignore[method-assign]
    return service, loaded


async def post(
    service: App, path: str = LOAD, body: Any = None, **headers: str
) -> HttpCommunicator:
    content = (
        body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    )
    return await service.request("POST", path, headers=ADMIN | headers, body=content)


def checkpoint(path: str) -> dict[str, Any]:
    return {"parameters": {"checkpoint": path}}


@on_a_loop
@pytest.mark.parametrize("body", [None, {}, {"parameters": {}}])
async def test_load_without_checkpoint_reloads(body: Any) -> None:
    service, loaded = swapping()
    answer = await post(service, body=body)
    assert (answer.status, loaded) == (200, [None])
    assert answer.json == {"name": "fake", "version": "1", "state": "READY", "reason": ""}


@on_a_loop
async def test_checkpoint_in_the_folder_is_loaded(tmp_path: Path) -> None:
    service, loaded = swapping(tmp_path)
    (tmp_path / "v2").mkdir()
    (tmp_path / "current").symlink_to("v2")
    for path in ("v2", "./x/../v2", str(tmp_path / "v2"), "current"):
        assert (await post(service, body=checkpoint(path))).status == 200
    assert loaded == [str(tmp_path.resolve() / "v2")] * 4


@on_a_loop
@pytest.mark.parametrize(
    "path", ["../elsewhere", "/etc", "out", "out/side", "v2/../../elsewhere", "circle"]
)
async def test_checkpoint_elsewhere_is_refused(path: str, tmp_path: Path) -> None:
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
async def test_naming_checkpoints_needs_a_folder() -> None:
    service, loaded = swapping()
    answer = await post(service, body=checkpoint("v2"))
    assert (answer.status, loaded) == (403, [])
    assert answer.json == {
        "error": "a checkpoint cannot be named: VIT_CHECKPOINT_FOLDER is not set"
    }


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
async def test_loading_is_off_without_admin_key(path: str) -> None:
    service, loaded = swapping(admin_key=None)
    answer = await post(service, path)
    assert (answer.status, loaded) == (403, [])
    assert answer.json == {"error": "loading is off: VIT_ADMIN_KEY is not set"}


@on_a_loop
async def test_admin_key_opens_only_loading() -> None:
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
    service.lifecycle.stopping = True
    service.lifecycle.draining = True
    assert ((await post(service)).status, loaded) == (503, [])


@on_a_loop
@pytest.mark.parametrize(
    ("path", "body", "status", "detail"),
    [
        (
            LOAD,
            {"parameters": {"checkpoint": "v2", "lables": "a"}},
            422,
            "lables: unknown name: did you mean labels?",
        ),
        (
            LOAD,
            {"parameter": {"checkpoint": "v2"}},
            400,
            "unknown field 'parameter'; available: parameters",
        ),
        (UNLOAD, {"parameter": {}}, 400, "unknown field 'parameter'; available: parameters"),
        (
            UNLOAD,
            {"parameters": {"unload": True}},
            422,
            "unknown parameter 'unload'; available: unload_dependents",
        ),
        ("/v2/repository/index", {"redy": True}, 400, "unknown field 'redy'; available: ready"),
    ],
)
async def test_unknown_fields_are_refused(
    path: str, body: dict[str, Any], status: int, detail: str, tmp_path: Path
) -> None:
    service, loaded = swapping(tmp_path)
    answer = await post(service, path, body)
    assert (answer.status, loaded) == (status, [])
    assert detail in answer.content.decode()
