"""The routes, in this process: what each answers, and how a request leaves no trace behind."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from PIL import Image

from model.errors import InputError
from service.errors import DeadlineExceeded, EngineUnavailable, InferenceFailed, QueueFull
from service.web import pipeline
from tests.service.fakes import CLASSES, PATIENCE, SIZE, expected_indices, model_info, on_a_loop, png
from tests.service.web.apps import App, app, pipeline_of

BOUNDARY = "b0undary"


def form(*files: bytes) -> dict[str, Any]:
    """Headers and body of a multipart request with `file` parts."""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'.encode()
    body = b"".join(head + data + b"\r\n" for data in files) + f"--{BOUNDARY}--\r\n".encode()
    return {"headers": {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}, "body": body}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


# POST /classify


@on_a_loop
async def test_a_picture_gets_its_labels_in_both_forms() -> None:
    service = app()
    raw = await service.classify(png(7))
    multipart = await service.request("POST", "/classify", **form(png(7)))
    for exchange in (raw, multipart):
        assert exchange.status == 200
        assert exchange.headers["content-type"] == "application/json"
        document = exchange.json
        assert set(document) == {"id", "model", "predictions", "timings_ms", "batch_size"}
        assert document["model"] == "fake"
        assert [p["index"] for p in document["predictions"]] == expected_indices(7, 5)
        assert document["predictions"][0] == {"label": "label 7", "index": 7, "score": 0.5}
        assert set(document["timings_ms"]) == {"decode", "queue", "inference", "total"}
        assert document["batch_size"] == 1


@on_a_loop
@pytest.mark.parametrize("top_k", range(1, CLASSES + 1))
async def test_top_k_is_what_was_asked_for(top_k: int) -> None:
    document = (await app().classify(png(3), query=f"top_k={top_k}")).json
    assert [p["index"] for p in document["predictions"]] == expected_indices(3, top_k)


@on_a_loop
async def test_top_k_is_by_default_the_smaller_of_five_and_the_classes() -> None:
    service = app()
    config = model_info().config.model_copy(update={"num_classes": 3})
    service.engine.info = model_info(config=config)
    assert len((await service.classify()).json["predictions"]) == 3
    assert (await service.classify(query="top_k=4")).code == "invalid_parameter"


@on_a_loop
@pytest.mark.parametrize(
    "query", ["top_k=0", "top_k=-1", "top_k=11", "top_k=", "top_k=two", "top_k=1.5", "attention=x"]
)
async def test_a_bad_query_names_its_parameter(query: str) -> None:
    exchange = await app().classify(query=query)
    assert (exchange.status, exchange.code) == (422, "invalid_parameter")
    assert exchange.json["detail"].startswith(query.partition("=")[0])


@on_a_loop
async def test_attention_comes_with_the_answer_when_asked() -> None:
    attention = (await app().classify(png(1), query="attention=true")).json["attention"]
    assert set(attention) == {"url", "grid", "layer", "head", "values", "kept_mass"}
    assert (attention["grid"], attention["layer"], attention["head"]) == ([2, 2], 2, "mean")
    assert attention["kept_mass"] == 0.9
    assert attention["values"] == [[0.1, 0.2], [0.3, 0.4]]


@on_a_loop
async def test_without_a_memory_for_pictures_there_is_no_id() -> None:
    document = (await app(recent_ttl=0).classify(png(1), query="attention=true")).json
    assert "id" not in document
    assert "url" not in document["attention"]


@on_a_loop
@pytest.mark.parametrize("path", ["/classify", "/classify/batch", "/attention"])
async def test_the_time_left_for_the_engine_counts_from_the_requests_head(path: str) -> None:
    service = app(request_timeout=PATIENCE)
    exchange = service.exchange("POST", path, headers={"content-type": "image/png"}, body=None)
    running = exchange.start()
    await until(lambda: exchange.received == 1)
    await asyncio.sleep(0.05)  # a slow body
    exchange.feed(png(1), more=False)
    await running
    [timeout] = service.engine.timeouts
    assert 0 < timeout <= PATIENCE - 0.05


@on_a_loop
async def test_a_body_that_does_not_arrive_in_time_is_408_and_frees_its_place() -> None:
    service = app(request_timeout=0.05, queue_size=1)
    exchange = service.exchange("POST", "/classify", headers={"content-type": "image/png"}, body=None)
    exchange.feed(png(1)[:10])
    running = exchange.start()
    await until(lambda: exchange.answered)
    assert (exchange.status, exchange.code) == (408, "request_timeout")
    assert exchange.headers["connection"] == "close"
    assert pipeline_of(service).places.taken == 0
    exchange.disconnect()
    await running


@on_a_loop
async def test_time_that_is_up_before_decoding_begins_costs_no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    service = app(request_timeout=0.05)
    busy = threading.Event()
    pool = pipeline_of(service).pool
    blocker = pool.submit(busy.wait, PATIENCE)
    decoded = []
    monkeypatch.setattr(pipeline, "preprocess", lambda *a, **k: decoded.append(a))
    exchange = service.exchange("POST", "/classify", headers={"content-type": "image/png"}, body=png(1))
    running = exchange.start()
    await until(lambda: pool._work_queue.qsize() == 1)
    await asyncio.sleep(0.06)
    busy.set()
    await running
    blocker.result()
    assert (exchange.status, exchange.code) == (504, "deadline_exceeded")
    assert decoded == []


@on_a_loop
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (DeadlineExceeded("too late"), 504, "deadline_exceeded"),
        (InferenceFailed("no score"), 500, "inference_failed"),
        (EngineUnavailable("it broke"), 503, "engine_unavailable"),
        (QueueFull("full"), 503, "queue_full"),
        (InputError("layer", "layer: none"), 422, "invalid_parameter"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_the_engines_errors_are_answered_as_the_table_says(error: Exception, status: int, code: str) -> None:
    service = app()
    service.engine.error = error
    exchange = await service.classify()
    assert (exchange.status, exchange.code) == (status, code)
    assert ("retry-after" in exchange.headers) == (status == 503)
    assert service.metric("vit_rejected_total", reason=code) == 1
    assert service.metric("vit_requests_total", endpoint="/classify", code=str(status)) == 1
    assert pipeline_of(service).places.taken == 0


@on_a_loop
@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 422, "invalid_image"),
        (b"no picture", 415, "unsupported_media_type"),
        (b"%PDF-1.7 and so on", 415, "unsupported_media_type"),
        (png(1)[:50], 422, "invalid_image"),
        (png(1, (101, 100)), 413, "image_too_large"),
        (png(1) + bytes(20_000), 413, "upload_too_large"),
    ],
    ids=["empty", "text", "pdf", "truncated", "too many pixels", "too many bytes"],
)
async def test_a_bad_picture_is_answered_by_its_fault_and_never_reaches_the_engine(
    body: bytes, status: int, code: str
) -> None:
    service = app(max_image_pixels=10_000, max_upload_bytes=20_000)
    for exchange in (await service.classify(body), await service.request("POST", "/classify", **form(body))):
        assert (exchange.status, exchange.code) == (status, code)
    assert service.engine.timeouts == []


@on_a_loop
async def test_a_second_file_is_too_many_for_classify() -> None:
    exchange = await app().request("POST", "/classify", **form(png(1), png(2)))
    assert (exchange.status, exchange.code) == (413, "too_many_images")


# POST /classify/batch


@on_a_loop
async def test_a_batch_is_answered_in_its_order() -> None:
    exchange = await app().request("POST", "/classify/batch", **form(*(png(red) for red in range(20))))
    assert exchange.status == 200
    results = exchange.json["results"]
    assert [r["predictions"][0]["index"] for r in results] == [red % CLASSES for red in range(20)]
    assert len({r["id"] for r in results}) == 20


@on_a_loop
async def test_bad_files_of_a_batch_fail_alone() -> None:
    service = app(max_upload_bytes=5_000, max_image_pixels=5_000)
    files = [png(1), b"", b"text", png(2)[:50], png(3, (100, 100)), png(4) + bytes(5_000), png(5)]
    exchange = await service.request("POST", "/classify/batch", **form(*files))
    assert exchange.status == 200
    results = exchange.json["results"]
    codes = [result.get("error", {}).get("code") for result in results]
    assert codes == [
        None,
        "invalid_image",
        "unsupported_media_type",
        "invalid_image",
        "image_too_large",
        "upload_too_large",
        None,
    ]
    for result in results[1:6]:
        assert set(result) == {"error"}
        assert set(result["error"]) == {"type", "title", "status", "detail", "code", "request_id"}
        assert result["error"]["request_id"] == exchange.headers["x-request-id"]
    assert results[6]["predictions"][0]["index"] == 5
    assert service.metric("vit_images_total") == 2
    assert service.metric("vit_rejected_total", reason="invalid_image") == 2


@on_a_loop
async def test_a_batch_is_200_even_if_every_item_failed() -> None:
    service = app()
    service.engine.error = InferenceFailed("no score")
    exchange = await service.request("POST", "/classify/batch", **form(png(1), png(2)))
    assert exchange.status == 200
    assert [r["error"]["status"] for r in exchange.json["results"]] == [500, 500]


@on_a_loop
async def test_a_batch_takes_its_places_for_all_or_none() -> None:
    service = app(queue_size=3)
    assert (await service.request("POST", "/classify/batch", **form(*[png(1)] * 3))).status == 200
    exchange = await service.request("POST", "/classify/batch", **form(*[png(1)] * 4))
    assert (exchange.status, exchange.code) == (503, "queue_full")
    assert pipeline_of(service).places.taken == 0
    assert len(service.engine.timeouts) == 3


@on_a_loop
async def test_a_batch_of_more_files_than_allowed_is_refused_as_a_whole() -> None:
    service = app(max_images_per_request=2)
    exchange = await service.request("POST", "/classify/batch", **form(*[png(1)] * 3))
    assert (exchange.status, exchange.code) == (413, "too_many_images")
    assert service.engine.timeouts == []


@on_a_loop
async def test_a_batch_may_be_one_raw_picture() -> None:
    exchange = await app().classify(png(4), path="/classify/batch")
    assert [r["predictions"][0]["index"] for r in exchange.json["results"]] == [4]


# /attention


async def kept(service: App, red: int = 100) -> str:
    image_id: str = (await service.classify(png(red))).json["id"]
    return image_id


@on_a_loop
async def test_a_kept_picture_gets_its_map_in_every_format() -> None:
    service = app()
    image_id = await kept(service)
    drawn = await service.get("/attention", f"id={image_id}")
    assert drawn.headers["content-type"] == "image/png"
    picture = Image.open(io.BytesIO(drawn.content))
    assert (picture.format, picture.mode, picture.width, picture.height) == ("PNG", "RGB", 384, 384)

    document = (await service.get("/attention", f"id={image_id}&format=json")).json
    assert set(document) == {"id", "method", "layer", "head", "grid", "values", "kept_mass"}
    assert (document["id"], document["method"], document["layer"], document["head"]) == (image_id, "cls", 2, "mean")
    assert (document["grid"], document["values"]) == ([2, 2], [[0.1, 0.2], [0.3, 0.4]])

    saved = await service.get("/attention", f"id={image_id}&format=npy")
    array = np.load(io.BytesIO(saved.content), allow_pickle=False)
    assert (array.dtype, array.shape) == (np.float32, (2, 2))
    assert np.allclose(array, [[0.1, 0.2], [0.3, 0.4]])

    for exchange in (drawn, saved):
        assert exchange.headers["content-location"] == f"/attention?id={image_id}"


@on_a_loop
async def test_a_posted_picture_gets_its_map_and_is_kept() -> None:
    service = app()
    exchange = await service.request("POST", "/attention", query="format=json", **form(png(9)))
    assert exchange.status == 200
    image_id = exchange.json["id"]
    again = await service.get("/attention", f"id={image_id}&format=json")
    assert again.json == exchange.json
    assert service.metric("vit_images_total") == 1


@on_a_loop
@pytest.mark.parametrize(("layer", "answered"), [("0", 0), ("2", 2), ("-1", 2), ("-3", 0)])
async def test_layers_count_from_zero_and_from_the_end(layer: str, answered: int) -> None:
    service = app()
    exchange = await service.get("/attention", f"id={await kept(service)}&format=json&layer={layer}")
    assert exchange.json["layer"] == answered


@on_a_loop
@pytest.mark.parametrize(("head", "answered"), [("mean", "mean"), ("max", "max"), ("0", 0), ("1", 1)])
async def test_heads_are_combined_or_picked(head: str, answered: Any) -> None:
    service = app()
    exchange = await service.get("/attention", f"id={await kept(service)}&format=json&head={head}")
    assert exchange.json["head"] == answered


@on_a_loop
@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("method=rollout", "cls"),
        ("method=relevance", "cls"),
        ("method=", "cls"),
        ("layer=3", "layer"),
        ("layer=-4", "layer"),
        ("layer=last", "layer"),
        ("head=2", "head"),
        ("head=-1", "head"),
        ("head=%C2%B2", "head"),
        ("head=median", "head"),
        ("class=3", "class does not apply"),
        ("format=gif", "format"),
        ("format=json&overlay=false", "overlay does not apply"),
        ("format=json&alpha=0.5", "alpha does not apply"),
        ("format=npy&colormap=magma", "colormap does not apply"),
        ("format=npy&size=100", "size does not apply"),
        ("colormap=pink-elephants", "inferno"),
        ("alpha=1.1", "alpha"),
        ("alpha=-0.1", "alpha"),
        ("alpha=nan", "alpha"),
        ("overlay=false&alpha=0.5", "alpha does not apply"),
        ("size=0", "size"),
        ("size=2049", "size"),
        ("overlay=perhaps", "overlay"),
    ],
)
async def test_a_parameter_that_is_wrong_or_does_not_apply_is_named(query: str, says: str) -> None:
    service = app()
    by_id = await service.get("/attention", f"id={await kept(service)}&{query}")
    posted = await service.request("POST", "/attention", query=query, **form(png(1)))
    for exchange in (by_id, posted):
        assert (exchange.status, exchange.code) == (422, "invalid_parameter")
        assert says in exchange.json["detail"]


@on_a_loop
@pytest.mark.parametrize(
    ("query", "size"), [("size=100", (100, 100)), ("size=1", (1, 1)), ("size=2048", (2048, 2048)), ("", (384, 384))]
)
async def test_a_heat_map_has_the_asked_for_size(query: str, size: tuple[int, int]) -> None:
    service = app()
    exchange = await service.get("/attention", f"id={await kept(service)}&{query}")
    assert Image.open(io.BytesIO(exchange.content)).size == size


@on_a_loop
async def test_overlay_and_alpha_and_colormap_change_the_drawing() -> None:
    service = app()
    image_id = await kept(service)
    queries = ["", "overlay=false", "alpha=0", "alpha=0.3", "colormap=viridis"]
    drawings = [(await service.get("/attention", f"id={image_id}&{query}")).content for query in queries]
    assert len(set(drawings)) == len(queries)
    untouched = np.asarray(Image.open(io.BytesIO(drawings[2])))
    assert (untouched == (100, 0, 0)).all()  # alpha=0 shows what the model saw and nothing else


@on_a_loop
async def test_an_unknown_id_is_404_and_a_missing_one_422() -> None:
    service = app()
    unknown = await service.get("/attention", "id=nobody")
    assert (unknown.status, unknown.code) == (404, "not_found")
    missing = await service.get("/attention")
    assert (missing.status, missing.code) == (422, "invalid_parameter")
    assert missing.json["detail"].startswith("id")


@on_a_loop
async def test_a_map_takes_a_place_and_keeps_the_deadline_like_any_image() -> None:
    service = app(queue_size=1)
    image_id = await kept(service)
    with pipeline_of(service).places.reserve():
        full = await service.get("/attention", f"id={image_id}")
    assert (full.status, full.code) == (503, "queue_full")
    service.engine.error = DeadlineExceeded("late")
    late = await service.get("/attention", f"id={image_id}")
    assert (late.status, late.code) == (504, "deadline_exceeded")
    assert pipeline_of(service).places.taken == 0


# Operations


@on_a_loop
async def test_the_model_tells_what_is_served() -> None:
    document = (await app().get("/model")).json
    assert document["name"] == "fake"
    assert document["source"] == "nowhere"
    assert document["revision"] is None
    assert document["architecture"] == "fake_vit"
    assert document["parameters"] == 123
    assert document["input_size"] == [SIZE, SIZE]
    assert (document["patch_size"], document["grid"], document["classes"]) == (4, [2, 2], CLASSES)
    assert (document["device"], document["dtype"], document["compiled"]) == ("cpu", "float32", "off")
    assert (document["max_batch"], document["batch_sizes"]) == (4, None)
    assert document["preprocessing"]["mean"] == [0.5, 0.5, 0.5]
    assert document["attention_source"] == "cls"


@on_a_loop
async def test_labels_are_told_in_index_order() -> None:
    assert (await app().get("/labels")).json == {"model": "fake", "labels": [f"label {i}" for i in range(CLASSES)]}


@on_a_loop
async def test_pages_and_documentation_are_there() -> None:
    service = app()
    for path in ("/", "/docs"):
        exchange = await service.get(path)
        assert (exchange.status, exchange.headers["content-type"]) == (200, "text/html; charset=utf-8")
    document = (await service.get("/openapi.json")).json
    assert set(document["paths"]) == {
        "/classify",
        "/classify/batch",
        "/attention",
        "/model",
        "/labels",
        "/healthz",
        "/readyz",
        "/metrics",
    }
    for path, method in (("/classify", "post"), ("/attention", "post")):
        kinds = document["paths"][path][method]["requestBody"]["content"]
        assert set(kinds) == {"multipart/form-data", "image/*", "application/octet-stream"}


@on_a_loop
@pytest.mark.parametrize(("state", "reason"), [("loading", "the model is loading"), ("failed", "the device failed")])
async def test_without_an_engine_only_readiness_suffers_and_work_is_503(state: str, reason: str) -> None:
    service = app()
    service.engine.state, service.engine.reason = state, reason
    assert (await service.get("/healthz")).status == 200
    assert (await service.get("/metrics")).status == 200
    assert (await service.get("/")).status == 200
    for exchange in (await service.get("/readyz"), await service.classify(), await service.get("/model")):
        assert (exchange.status, exchange.code) == (503, "engine_unavailable")
        assert exchange.json["detail"] == reason
        assert int(exchange.headers["retry-after"]) > 0
    assert service.metric("vit_engine_up", device="cpu") == 0


@on_a_loop
async def test_while_draining_new_work_is_refused_and_every_answer_closes_its_connection() -> None:
    service = app()
    image_id = await kept(service)
    assert (await service.get("/readyz")).status == 200
    service.lifecycle.draining = True
    for exchange in (
        await service.classify(),
        await service.request("POST", "/classify/batch", **form(png(1))),
        await service.get("/attention", f"id={image_id}"),
        await service.get("/readyz"),
    ):
        assert (exchange.status, exchange.code) == (503, "draining")
        assert exchange.headers["connection"] == "close"
        assert "retry-after" in exchange.headers
    for path in ("/healthz", "/metrics", "/model"):
        exchange = await service.get(path)
        assert (exchange.status, exchange.headers["connection"]) == (200, "close")


@on_a_loop
async def test_what_was_accepted_before_draining_is_answered() -> None:
    service = app()
    service.engine.gate.clear()
    running = asyncio.create_task(service.classify())
    await until(lambda: service.engine.waiting == 1)
    service.lifecycle.draining = True
    service.engine.gate.set()
    assert (await running).status == 200


@on_a_loop
@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/classify", "POST"),
        ("PUT", "/classify/batch", "POST"),
        ("PUT", "/attention", "GET, POST"),
        ("POST", "/healthz", "GET, HEAD"),
        ("DELETE", "/metrics", "GET"),
    ],
)
async def test_405_names_every_method_that_the_path_has(method: str, path: str, allow: str) -> None:
    exchange = await app().request(method, path)
    assert (exchange.status, exchange.code) == (405, "method_not_allowed")
    assert exchange.headers["allow"] == allow


@on_a_loop
@pytest.mark.parametrize("path", ["/nope", "/classify/", "//classify", "/model/x", "/v2"])
async def test_an_unknown_path_is_404(path: str) -> None:
    exchange = await app().get(path)
    assert (exchange.status, exchange.code) == (404, "not_found")
    assert path in exchange.json["detail"]


# Callers that go away


@on_a_loop
async def test_a_caller_that_goes_away_while_sending_frees_its_place() -> None:
    service = app(queue_size=1)
    exchange = service.exchange("POST", "/classify", headers={"content-type": "image/png"}, body=None)
    exchange.feed(png(1)[:10])
    running = exchange.start()
    await until(lambda: exchange.received == 2)
    assert pipeline_of(service).places.taken == 1
    exchange.disconnect()
    await running
    assert not exchange.answered
    assert pipeline_of(service).places.taken == 0
    assert service.metric("vit_cancelled_total") == 1
    assert service.metric("vit_inflight_requests") == 0
    assert (await service.classify()).status == 200


@on_a_loop
async def test_a_caller_that_goes_away_while_waiting_takes_its_image_out_of_the_queue() -> None:
    service = app(queue_size=1)
    service.engine.gate.clear()
    exchange = service.exchange("POST", "/classify", headers={"content-type": "image/png"}, body=png(1))
    running = exchange.start()
    await until(lambda: service.engine.waiting == 1)
    assert service.metric("vit_inflight_requests") == 1
    exchange.disconnect()
    await running
    assert not exchange.answered
    assert service.engine.cancelled == 1
    assert pipeline_of(service).places.taken == 0
    assert service.metric("vit_cancelled_total") == 1
    assert service.metric("vit_inflight_requests") == 0


@on_a_loop
async def test_a_caller_of_a_batch_that_goes_away_takes_all_its_images_out() -> None:
    service = app(queue_size=5)
    service.engine.gate.clear()
    exchange = service.exchange("POST", "/classify/batch", **form(*(png(red) for red in range(5))))
    running = exchange.start()
    await until(lambda: service.engine.waiting == 5)
    exchange.disconnect()
    await running
    assert service.engine.cancelled == 5
    assert pipeline_of(service).places.taken == 0


@on_a_loop
async def test_a_place_is_free_only_when_its_decode_thread_has_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding, go_on = threading.Event(), threading.Event()

    def slow(*_: Any, **__: Any) -> np.ndarray[Any, Any]:
        decoding.set()
        assert go_on.wait(PATIENCE)
        return np.zeros((SIZE, SIZE, 3), np.uint8)

    monkeypatch.setattr(pipeline, "preprocess", slow)
    service = app(queue_size=2)
    exchange = service.exchange("POST", "/classify", headers={"content-type": "image/png"}, body=png(1))
    running = exchange.start()
    assert await asyncio.to_thread(decoding.wait, PATIENCE)
    exchange.disconnect()
    await until(exchange.inbox.empty)
    done, _ = await asyncio.wait((running,), timeout=0.05)
    assert not done
    assert pipeline_of(service).places.taken == 1
    go_on.set()
    await running
    assert pipeline_of(service).places.taken == 0
    assert service.engine.timeouts == []


@on_a_loop
async def test_a_picture_whose_caller_is_gone_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    service = app()
    busy = threading.Event()
    pool = pipeline_of(service).pool
    pool.submit(busy.wait, PATIENCE)
    decoded: list[Any] = []
    monkeypatch.setattr(pipeline, "preprocess", lambda *a, **k: decoded.append(a))
    exchange = service.exchange("POST", "/classify", headers={"content-type": "image/png"}, body=png(1))
    running = exchange.start()
    await until(lambda: pool._work_queue.qsize() == 1)
    exchange.disconnect()
    await until(exchange.inbox.empty)
    await asyncio.sleep(0)
    busy.set()
    await running
    assert decoded == []


# Measures


@on_a_loop
async def test_requests_are_counted_by_endpoint_and_status() -> None:
    service = app()
    await service.classify()
    await service.classify(b"text")
    await service.get("/nope")
    await service.get("/nope/again")
    await service.get("/readyz")
    for endpoint, code, count in (
        ("/classify", "200", 1),
        ("/classify", "415", 1),
        ("other", "404", 2),
        ("/readyz", "200", 1),
    ):
        assert service.metric("vit_requests_total", endpoint=endpoint, code=code) == count
    assert service.metric("vit_request_duration_seconds_count", endpoint="/classify") == 2
    for stage in ("read", "decode", "queue", "inference"):
        assert service.metric("vit_stage_duration_seconds_count", stage=stage) >= 1
    assert service.metric("vit_images_total") == 1
    assert service.metric("vit_top1_score_count") == 1
    assert service.metric("vit_recent_images") == 1
    assert service.metric("vit_recent_bytes") >= SIZE * SIZE * 3


@on_a_loop
async def test_probes_are_neither_load_nor_refusals() -> None:
    service = app()
    service.engine.state = "loading"
    text = (await service.get("/metrics")).content.decode()
    assert "vit_inflight_requests 0.0" in text
    await service.get("/readyz")
    assert service.metric("vit_rejected_total", reason="engine_unavailable") == 0


@on_a_loop
async def test_a_defect_of_ours_is_a_problem_document_that_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    service = app()
    service.engine.error = KeyError("secret")
    exchange = await service.classify()
    assert (exchange.status, exchange.code) == (500, "internal_error")
    assert b"secret" not in exchange.content
    assert "secret" in caplog.text
    assert exchange.headers["x-request-id"] in caplog.text
    assert service.metric("vit_requests_total", endpoint="/classify", code="500") == 1
    assert pipeline_of(service).places.taken == 0


@on_a_loop
async def test_the_engine_is_started_and_closed_with_the_application() -> None:
    service = app()
    started, stop = asyncio.Event(), asyncio.Event()

    async def receive() -> dict[str, Any]:
        if not started.is_set():
            return {"type": "lifespan.startup"}
        await stop.wait()
        return {"type": "lifespan.shutdown"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "lifespan.startup.complete":
            started.set()

    lifespan: Coroutine[Any, Any, None] = service.asgi(
        {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send
    )
    task = asyncio.create_task(lifespan)
    await started.wait()
    assert (
        service.metric(
            "vit_model_info",
            model="fake",
            architecture="fake_vit",
            device="cpu",
            dtype="float32",
            version=json.loads((await service.get("/openapi.json")).content)["info"]["version"],
        )
        == 1
    )
    stop.set()
    await task
    assert service.engine.state == "closed"
