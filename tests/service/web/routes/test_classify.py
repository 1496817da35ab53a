"""POST /classify and /classify/batch, digits of numbers, and sets of labels in all protocols."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from model.errors import InputError
from model.images.preprocess import ModelInput, Region
from model.outputs import AttentionMap, MapRequest, Outputs
from model.parameters import methods_of
from service.class_fields import MAX_SET, class_fields
from service.errors import DeadlineExceeded, EngineUnavailable, InferenceFailed, QueueFull
from service.settings import load_settings
from service.web.image_stores import MemoryImageStore
from service.web.routes.shared_answers import map_fields, region_document
from tests.service.fakes import CLASSES, SIZE, expected_indices, model_info, on_a_loop, png
from tests.service.web.apps import App, app, form, service_in
from tests.service.web.named_models import several
from vitserve.documents import Classification


@on_a_loop
@pytest.mark.parametrize(
    "query", ["", "top_k=3&embedding=true", "attention=true", "attention=relevance"]
)
async def test_an_answer_has_the_documented_fields(query: str) -> None:
    document = (await app().classify(query=query)).json
    described = Classification.model_validate(document)
    assert described.model_dump(mode="json", exclude_none=True, by_alias=True) == document


@on_a_loop
async def test_top_k_defaults_to_five_or_fewer(service: App) -> None:
    config = model_info().config.model_copy(update={"num_classes": 3})
    service.engine.info = model_info(config=config)
    assert len((await service.classify()).json["predictions"]) == 3
    assert (await service.classify(query="top_k=4")).code == "invalid_parameter"


class FailingStore(MemoryImageStore):
    async def put(self, picture: ModelInput, image_id: str) -> bool:
        raise KeyError("dictionary is empty")


@on_a_loop
async def test_a_failing_store_costs_the_id_alone() -> None:
    running = App(load_settings({}), image_store=FailingStore(ttl=60, max_bytes=1 << 20))
    answer = await running.classify()
    assert answer.status == 200
    assert "id" not in answer.json


@on_a_loop
async def test_an_answer_may_have_an_attention_map(service: App) -> None:
    attention = (await service.classify(png(1), query="attention=true")).json["attention"]
    assert set(attention) == {
        "url",
        "grid",
        "method",
        "layer",
        "head",
        "values",
        "kept_mass",
        "region",
    }
    assert (attention["grid"], attention["layer"], attention["head"]) == ([2, 2], 2, "mean")
    path, query = attention["url"].split("?")
    again = (await service.get(path, f"{query}&format=json")).json
    assert (again["method"], again["layer"], again["head"]) == ("cls", 2, "mean")
    assert attention["kept_mass"] == 0.9
    assert attention["values"] == [[0.1, 0.2], [0.3, 0.4]]
    assert attention["region"] == {"x": 0, "y": 0, "width": SIZE, "height": SIZE}


@on_a_loop
async def test_an_answer_may_have_a_relevance_map(service: App) -> None:
    document = (await service.classify(png(1), query="attention=relevance")).json
    attention = document["attention"]
    best = document["predictions"][0]
    facts = {"score", "evidence", "abstained"}
    assert (
        set(attention)
        == {"url", "grid", "method", "class", "label", "values", "kept_mass", "region"} | facts
    )
    assert (attention["score"], attention["evidence"], attention["abstained"]) == (0.5, 0.25, False)
    assert (attention["method"], attention["class"], attention["label"]) == (
        "relevance",
        best["index"],
        best["label"],
    )
    path, query = attention["url"].split("?")
    again = (await service.get(path, f"{query}&format=json")).json
    assert (again["method"], again["class"]) == ("relevance", best["index"])


@on_a_loop
async def test_a_missing_method_names_the_others(
    service: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = model_info().config.model_copy(update={"norm_order": "post"})
    monkeypatch.setattr(service.engine, "info", replace(model_info(), config=config))
    refused = await service.classify(png(1), query="attention=relevance")
    assert (refused.status, refused.code) == (422, "invalid_parameter")
    assert f"expected one of {', '.join(methods_of(config))}" in refused.json["detail"]
    assert (await service.classify(png(1), query="attention=true")).status == 200


@on_a_loop
async def test_an_answer_may_have_an_embedding() -> None:
    document = (await app().classify(png(8), query="embedding=true&attention=true")).json
    assert document["embedding"] == [0, 0, 2, 0, 1, 2, 3, 4]
    assert [p["index"] for p in document["predictions"]] == expected_indices(8, 5)
    assert "attention" in document


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
async def test_engine_errors_keep_their_codes(
    service: App, error: Exception, status: int, code: str
) -> None:
    service.engine.error = error
    response = await service.classify()
    assert (response.status, response.code) == (status, code)
    assert ("retry-after" in response.headers) == (status == 503)
    assert service.metric("vit_rejected_total", reason=code) == 1
    assert service.metric("vit_requests_total", endpoint="/classify", code=str(status)) == 1
    assert service_in(service).limiter.in_use == 0


@on_a_loop
async def test_a_batch_is_answered_in_its_order() -> None:
    response = await app().request(
        "POST", "/classify/batch", **form(*(png(red) for red in range(20)))
    )
    assert response.status == 200
    results = response.json["results"]
    assert [r["predictions"][0]["index"] for r in results] == [red % CLASSES for red in range(20)]
    assert len({r["id"] for r in results}) == 20


@on_a_loop
async def test_bad_files_of_a_batch_fail_alone() -> None:
    service = app(max_upload_bytes=5_000, max_image_pixels=5_000)
    files = [png(1), b"", b"text", png(2)[:50], png(3, (100, 100)), png(4) + bytes(5_000), png(5)]
    response = await service.request("POST", "/classify/batch", **form(*files))
    assert response.status == 200
    results = response.json["results"]
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
    assert results[1]["error"]["detail"] == "the picture is empty"
    for result in results[1:6]:
        assert set(result) == {"error"}
        assert set(result["error"]) == {"type", "title", "status", "detail", "code", "request_id"}
        assert result["error"]["request_id"] == response.headers["x-request-id"]
    assert results[6]["predictions"][0]["index"] == 5
    assert service.metric("vit_images_total") == 2
    assert service.metric("vit_rejected_total", reason="invalid_image") == 2


@on_a_loop
async def test_a_batch_takes_all_slots_or_none() -> None:
    service = app(queue_size=3)
    assert (await service.request("POST", "/classify/batch", **form(*[png(1)] * 3))).status == 200
    response = await service.request("POST", "/classify/batch", **form(*[png(1)] * 4))
    assert (response.status, response.code) == (503, "queue_full")
    assert service_in(service).limiter.in_use == 0
    assert len(service.engine.timeouts) == 3


LABELS = ("cat", "dog", "eel")


def test_scores_are_the_shortest_decimals() -> None:
    outputs = Outputs(np.array([0.83, 1 / 3], np.float32), np.array([2, 0]))
    predictions = class_fields(outputs, LABELS)["predictions"]
    assert [tuple(each.values()) for each in predictions] == [
        ("eel", 2, 0.83),
        ("cat", 0, 0.3333333),
    ]


def test_a_region_is_rounded_to_thousandths() -> None:
    assert region_document(Region(1 / 3, 2 / 3, 100.12345, 7)).model_dump() == {
        "x": 0.333,
        "y": 0.667,
        "width": 100.123,
        "height": 7,
    }


def test_a_map_is_rounded_to_seven_decimals() -> None:
    values = np.array([[1 / 3, 0.25]], np.float32)
    assert map_fields(AttentionMap(MapRequest.attention_row(2, "max"), values, 2 / 3), LABELS) == {
        "method": "cls",
        "class": None,
        "label": None,
        "grid": (1, 2),
        "layer": 2,
        "head": "max",
        "score": None,
        "evidence": None,
        "values": [[0.3333333, 0.25]],
        "kept_mass": 0.6666667,
        "abstained": None,
    }
    fields = map_fields(
        AttentionMap(MapRequest("relevance", 1), values, 1.0, 0.1 + 0.2, 1 / 3), LABELS
    )
    assert [fields[name] for name in ("label", "score", "evidence")] == ["dog", 0.3, 0.3333333]


def with_coverage() -> App:
    """Return the application of a model whose sets have as many labels as a picture's red value."""
    service = app()
    service.engine.info = model_info(coverage=0.95, calibrated_on=50)
    return service


FIELDS = ("set", "set_size", "abstained")
ABSTAINED = {"set": [], "set_size": 0, "abstained": True}
OF_THREE = {"set": ["label 3", "label 4", "label 5"], "set_size": 3}
THREE = {**OF_THREE, "abstained": False}


def fields(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: answer[name] for name in FIELDS if name in answer}


@on_a_loop
@pytest.mark.parametrize(("red", "expected"), [(3, THREE), (0, ABSTAINED)])
async def test_label_sets_ignore_top_k(red: int, expected: dict[str, Any]) -> None:
    service = with_coverage()
    answer = (await service.classify(png(red), "top_k=1")).json
    assert fields(answer) == expected
    assert len(answer["predictions"]) == 1
    assert service.metric("vit_abstained_total") == (red == 0)


@on_a_loop
async def test_classes_below_thresholds_are_absent() -> None:
    service = app()
    service.engine.info = model_info(has_thresholds=True)
    service.engine.thresholds = np.zeros(10, np.float32)
    service.engine.thresholds[[3, 4]] = 0.6, 0.25  # the picture's scores are 0.5, 0.25, 0.125
    answer = (await service.classify(png(3), "top_k=3")).json
    assert [each["label"] for each in answer["predictions"]] == ["label 4", "label 5"]
    assert len((await service.classify(png(3), "top_k=3&min_score=0.2")).json["predictions"]) == 1
    service.engine.thresholds[:] = 0.6
    abstained = [(await service.classify(png(3))).json]
    abstained += (await service.request("POST", "/classify/batch", **form(png(3)))).json["results"]
    assert [(each["predictions"], each["abstained_by"]) for each in abstained] == [
        ([], "min_score")
    ] * 2
    assert service.metric("vit_abstained_total") == 2


def test_a_large_label_set_is_only_a_number() -> None:
    labels = [f"{number}" for number in range(MAX_SET + 1)]
    outputs = Outputs(np.ones(1, np.float32), np.zeros(1, np.int64), label_set=np.arange(MAX_SET))
    fields = class_fields(outputs, labels)
    assert (fields["set_size"], fields["set"]) == (MAX_SET, labels[:MAX_SET])
    fields = class_fields(outputs._replace(label_set=np.arange(MAX_SET + 1)), labels)
    assert (fields["set_size"], "set" in fields) == (MAX_SET + 1, False)
    timings = {"decode": 1, "queue": 1, "inference": 1, "total": 1}
    answer = {"model": "m", "predictions": [], "timings_ms": timings, "batch_size": 1}
    read = Classification.model_validate(answer | ABSTAINED)
    assert (read.set, read.set_size, read.abstained) == ([], 0, True)
    assert Classification.model_validate(answer).abstained is False


@on_a_loop
@pytest.mark.parametrize("unloaded", [False, True])
async def test_loading_takes_at_most_half_the_time(unloaded: bool) -> None:
    served, models = several(request_timeout=60)
    served.asgi._clock = lambda: time.monotonic() - 31  # seconds since the request began
    models.engines["few"].state = "loading"
    if unloaded:
        models.give_back("few")
    models.engines["few"].gate.clear()
    found = (await served.classify(query="model=few,cats")).json["models"]
    assert (found["few"]["error"]["code"], "predictions" in found["cats"]) == (
        "model_loading",
        True,
    )


@on_a_loop
@pytest.mark.parametrize("path", ["/classify", "/embed", "/attention"])
@pytest.mark.parametrize(
    ("kind", "body", "status", "detail"),
    [
        ("application/json", png(7), 200, ""),
        ("application/problem+json", png(7), 200, ""),
        (
            "application/json",
            b"no picture",
            415,
            "parameters go into the URL; or send the picture itself: curl",
        ),
        ("application/json", b'{"image": "AAAA", "top_k": 1}', 415, "parameters go into the URL"),
        (
            "text/html",
            "<!doctype html><title>größe</title>".encode(),
            415,
            "this is HTML or XML",
        ),
        ("image/jpeg", b"<html><body>404 Not Found</body></html>", 415, "this is HTML or XML"),
        ("image/jpeg", "/9j/4AAQSkZJRg==".encode("utf-16"), 415, "this is text in UTF-16"),
        ("image/jpeg", "/9j/4AAQSkZJRg==".encode("utf-16-be"), 415, "this is text in UTF-16"),
    ],
)
async def test_a_file_is_told_by_its_content(
    path: str, kind: str, body: bytes, status: int, detail: str, service: App
) -> None:
    answer = await service.request("POST", path, headers={"content-type": kind}, body=body)
    assert answer.status == status, answer.content
    assert detail in answer.content.decode("latin-1")
