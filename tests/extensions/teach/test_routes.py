"""The routes of taught heads: each takes a slot, has a deadline, and ends at a disconnect."""

import base64
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from model.extensions.taught.taught_heads import Features
from service.extensions.teach import examples as examples_module
from service.extensions.teach.heads import features_of
from service.web.lanes import Deadline
from service.web.routes.endpoint import Endpoint
from tests.service.fakes import PATIENCE, on_a_loop, png, until
from tests.service.web.apps import App, app, form, inside, service_in
from tests.service.web.http_communicator import HttpCommunicator

QUERIES = {
    ("PUT", "/heads/{name}/examples/{number:int}"): "label=cat",
    ("POST", "/heads/{name}/examples"): "label=cat",
}


def routes_of_heads() -> list[tuple[str, str]]:
    """Return method and path of every route of taught heads."""
    routes: list[Endpoint] = inside(app()).routes
    own = [route for route in routes if route.path.startswith("/heads")]
    return [(method, route.path) for route in own for method in route.methods - {"HEAD"}]


def asking(service: App, method: str, path: str) -> HttpCommunicator:
    body = png(1) if method == "POST" else b""
    filled = path.replace("{name}", "pets").replace("{number:int}", "1")
    return service.communicator(method, filled, query=QUERIES.get((method, path), ""), body=body)


async def teach(service: App, count: int, label: str = "cat") -> None:
    for red in range(count):
        body = png(red + 1 if label == "cat" else 200 - red)
        answer = await service.request(
            "POST", "/heads/pets/examples", query=f"label={label}", body=body
        )
        assert answer.status == 201


@contextmanager
def busy_lane(service: App) -> Iterator[None]:
    """Occupy the two threads of the lane of examples."""
    lane = inside(service).state.examples_lane
    gate = threading.Event()
    deadline = Deadline(service_in(service).clock() + PATIENCE)
    jobs = [
        lane.work(lambda: gate.wait(PATIENCE), "other", 1, deadline) for _ in range(4)
    ]  # one job per thread starts
    try:
        yield
    finally:
        gate.set()
        for job in jobs:
            job.__exit__()


@pytest.mark.parametrize(("method", "path"), routes_of_heads())
@on_a_loop
async def test_every_route_of_heads_takes_a_slot(tmp_path: Path, method: str, path: str) -> None:
    service = app(teach=str(tmp_path), queue_size=1)
    await teach(service, 1)
    with service_in(service).limiter.permit():
        answer = await asking(service, method, path).run()
    assert (answer.status, answer.code) == (503, "queue_full")


@pytest.mark.parametrize(("method", "path"), routes_of_heads())
@on_a_loop
async def test_a_disconnect_counts_as_cancelled(tmp_path: Path, method: str, path: str) -> None:
    service = app(teach=str(tmp_path))
    await teach(service, 1)
    lane = inside(service).state.examples_lane
    with busy_lane(service):
        asked = asking(service, method, path)
        if method == "POST":
            asked.inbox.get_nowait()
        running = asked.start()
        await until(lambda: bool(lane.waiting))
        if method == "POST":
            running.cancel()
        asked.disconnect()
        await until(running.done)
        assert lane.waiting == 0
    assert not asked.answered
    assert service.metric("vit_requests_total", code="499") == 1
    assert service_in(service).limiter.in_use == 0


@on_a_loop
async def test_a_busy_lane_of_examples_ends_in_504(tmp_path: Path) -> None:
    service = app(teach=str(tmp_path), request_timeout=0.2)
    with busy_lane(service):
        answer = await service.get("/heads")
    assert (answer.status, answer.code) == (504, "deadline_exceeded")


@on_a_loop
async def test_heads_are_listed_before_models_load(tmp_path: Path) -> None:
    service = app(teach=str(tmp_path))
    await teach(service, 1)
    service.engine.state = "loading"
    assert (await service.get("/heads")).json["heads"] == ["pets"]
    refused = await service.request("POST", "/heads/pets/examples", query="label=cat", body=png(3))
    assert (refused.status, refused.code) == (503, "engine_unavailable")


@on_a_loop
async def test_a_key_gets_only_its_share_of_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examples_module, "MAX_HEADS", 4)
    service = app(teach=str(tmp_path), api_keys="alice:KEY1,bob:KEY2", admin_key="ADMIN")

    async def begin(key: str, head: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        path = f"/heads/{head}/examples"
        return (
            await service.request("POST", path, query="label=cat", body=png(1), headers=headers)
        ).status

    assert [await begin("KEY1", f"a{number}") for number in range(3)] == [201, 201, 409]
    assert [await begin("KEY2", f"b{number}") for number in range(2)] == [201, 409]
    assert [await begin("ADMIN", f"c{number}") for number in range(2)] == [201, 409]


@on_a_loop
async def test_examples_are_listed_in_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examples_module, "PAGE", 2)
    service = app(teach=str(tmp_path))
    await teach(service, 3)
    await teach(service, 2, "dog")
    pages = [
        (await service.get("/heads/pets/examples", f"after={after}")).json
        for after in (0, 2, 4, 10**30)
    ]
    assert [[each["number"] for each in page["examples"]] for page in pages] == [
        [1, 2],
        [3, 4],
        [5],
        [],
    ]
    assert (await service.get("/heads/pets/examples", "after=-1")).code == "invalid_parameter"


@pytest.mark.parametrize(("method", "path"), routes_of_heads())
@on_a_loop
async def test_unknown_parameters_are_refused(tmp_path: Path, method: str, path: str) -> None:
    service = app(teach=str(tmp_path))
    await teach(service, 1)
    asked = asking(service, method, path)
    asked.scope["query_string"] += b"&labell=cat"
    answer = await asked.run()
    assert (answer.status, answer.code) == (422, "invalid_parameter")
    assert "unknown parameter 'labell'" in answer.json["detail"]


@pytest.mark.parametrize("label", ["", "%20%09", "a%07b", "%E2%80%8B", "a%E2%80%8B", "a" * 257])
@pytest.mark.parametrize("method", ["POST", "PUT"])
@on_a_loop
async def test_unprintable_labels_are_refused(tmp_path: Path, method: str, label: str) -> None:
    service = app(teach=str(tmp_path))
    await teach(service, 1)
    path = "/heads/pets/examples" + ("/1" if method == "PUT" else "")
    answer = await service.request(method, path, query=f"label={label}", body=png(2))
    assert (answer.status, answer.code) == (422, "invalid_parameter")
    assert "1 to 256 characters that print" in answer.json["detail"]


@pytest.mark.parametrize(
    ("query", "remedy"),
    [
        ("", "label: missing: send ?label=cat"),
        ("label=dog", "POST to the head's examples adds one"),
    ],
)
@on_a_loop
async def test_relabelling_takes_no_body(tmp_path: Path, query: str, remedy: str) -> None:
    service = app(teach=str(tmp_path))
    await teach(service, 1)
    answer = await service.request("PUT", "/heads/pets/examples/1", query=query, body=png(2))
    assert (answer.status, answer.code) == (422, "invalid_parameter")
    assert remedy in answer.json["detail"]
    assert (await service.get("/heads/pets/examples/1")).json["label"] == "cat"


@pytest.mark.parametrize("is_kept", [True, False])
@on_a_loop
async def test_thumbnails_are_kept_if_allowed(tmp_path: Path, is_kept: bool) -> None:
    service = app(teach=str(tmp_path), teach_thumbnails=is_kept)
    path = "/heads/pets/examples"
    named = await service.request(
        "POST", path, query="label=cat&file_name=my%20cat.png", body=png(1)
    )
    assert (await service.get("/heads")).json.get("thumbnails", False) is is_kept
    if not is_kept:
        assert (named.status, named.code) == (422, "invalid_parameter")
        await teach(service, 1)
        assert {"file_name", "thumbnail"}.isdisjoint((await service.get(f"{path}/1")).json)
        return
    assert named.status == 201
    example = (await service.get(f"{path}/1")).json
    assert (example["number"], example["label"], example["file_name"]) == (1, "cat", "my cat.png")
    content = base64.b64decode(example["thumbnail"].removeprefix("data:image/jpeg;base64,"))
    assert Image.open(io.BytesIO(content)).size == (8, 8)
    assert "thumbnail" not in (await service.get(path)).json["examples"][0]
    assert (await service.request("DELETE", f"{path}/1")).status == 200
    assert (await service.get(f"{path}/1")).code == "not_found"
    two = await service.request(
        "POST", path, query="label=cat&file_name=a.png", **form(png(2), png(3))
    )
    assert two.json["detail"] == "file_name: needs exactly one picture, got 2"


@pytest.mark.parametrize(
    ("query", "names", "kept"),
    [
        ("label=cat", ["my c\u00e0t.png"], ["my c\u00e0t.png"]),
        ("label=cat", ["photos/a.png", " b.png"], ["photos/a.png", "b.png"]),
        ("label=cat&file_name=other.png", ["a.png"], ["other.png"]),
        ("label=cat&file_name=", ["a.png"], [None]),
    ],
)
@on_a_loop
async def test_examples_keep_their_parts_file_names(
    tmp_path: Path, query: str, names: list[str], kept: list[str | None]
) -> None:
    service = app(teach=str(tmp_path), teach_thumbnails=True)
    pictures = [png(number) for number in range(1, len(names) + 1)]
    path = "/heads/pets/examples"
    await service.request("POST", path, query=query, **form(*pictures, file_names=names))
    listed = (await service.get(path)).json["examples"]
    assert [example.get("file_name") for example in listed] == kept


@pytest.mark.parametrize(("is_kept", "status"), [(True, 422), (False, 201)])
@on_a_loop
async def test_a_file_name_that_is_kept_prints(tmp_path: Path, is_kept: bool, status: int) -> None:
    service = app(teach=str(tmp_path), teach_thumbnails=is_kept)
    sent = form(png(1), file_names=["a\x07.png"])
    answer = await service.request("POST", "/heads/pets/examples", query="label=cat", **sent)
    assert answer.status == status
    if is_kept:
        assert "characters that print" in answer.json["detail"]


@on_a_loop
async def test_private_fields_need_the_heads_key(tmp_path: Path) -> None:
    service = app(
        teach=str(tmp_path),
        teach_thumbnails=True,
        api_keys="alice:KEY1,bob:KEY2",
        admin_key="ADMIN",
    )
    path = "/heads/pets/examples"
    query = "label=cat&file_name=my%20cat.png"
    alice = {"authorization": "Bearer KEY1"}
    await service.request("POST", path, query=query, body=png(1), headers=alice)

    async def private_fields(key: str) -> tuple[set[str], set[str]]:
        headers = {"authorization": f"Bearer {key}"}
        listed = (await service.request("GET", path, headers=headers)).json["examples"][0]
        example = (await service.request("GET", f"{path}/1", headers=headers)).json
        public = {"number", "label", "time"}
        return set(listed) - public, set(example) - public

    everything = ({"who", "file_name"}, {"who", "file_name", "thumbnail"})
    assert await private_fields("KEY1") == everything
    assert await private_fields("ADMIN") == everything
    assert await private_fields("KEY2") == (set(), set())


@on_a_loop
async def test_a_head_goes_on_with_its_features(tmp_path: Path) -> None:
    service = app(teach=str(tmp_path))
    examples = inside(service).state.taught.examples
    assert examples is not None
    assert service.engine.info is not None
    older = features_of(service.engine.info, Features())
    examples.add("old", "cat", np.ones((1, 8), np.float32), "", (older, "fake"))
    asked: list[str] = []
    infer = service.engine.infer

    async def noting(request: Any, **options: Any) -> Any:
        asked.append(request.requested.embedding.pool)
        return await infer(request, **options)

    service.engine.infer = noting  # type: ignore[method-assign]
    for name in ("old", "new"):
        answer = await service.request(
            "POST", f"/heads/{name}/examples", query="label=dog", **form(png(7))
        )
        assert answer.status == 201
    assert asked == ["head", "transfer"]
    rows = examples.heads()
    assert (
        Features.named(rows["old"].backbone).pool,
        Features.named(rows["new"].backbone).pool,
    ) == (
        "head",
        "transfer",
    )


@on_a_loop
async def test_first_request_of_a_start_knows_heads(tmp_path: Path) -> None:
    await teach(app(teach=str(tmp_path)), 1)
    restarted = inside(app(teach=str(tmp_path)))
    async with restarted.lifespan(restarted):
        assert "pets" in restarted.state.service.models.names()


@on_a_loop
async def test_head_tells_that_a_model_hides_it(tmp_path: Path) -> None:
    service = app(teach=str(tmp_path))
    await teach(service, 2)
    models = service_in(service).models
    models.served["pets"] = models.served[""]  # as from a folder of models that is read again

    answer = await service.get("/heads/pets")

    assert answer.json["reason"] == "a model has this name, and answers instead"
