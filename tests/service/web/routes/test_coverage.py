"""Sets of labels at every door, of a model with a coverage; without one nothing is said of them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from model.heads import Head, Known
from service.models.models import AddedHead
from tests.service.fakes import model_info, on_a_loop, png
from tests.service.web.apps import App, app, form, service_in
from tests.service.web.fake_engine import FakeEngine
from tests.service.web.grpc.caller import Output, arrays, calling, image
from vitserve.documents import MAX_SET, Classification, set_fields


def with_coverage() -> App:
    """The application of a model with a coverage; a picture's set has as many labels as its red value."""
    service = app()
    service.engine.info = model_info(coverage=0.95, calibrated_on=50)
    return service


FIELDS = ("set", "set_size", "abstained")
ABSTAINED = {"set": [], "set_size": 0, "abstained": True}
THREE = {"set": ["label 3", "label 4", "label 5"], "set_size": 3}


def fields(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: answer[name] for name in FIELDS if name in answer}


@on_a_loop
@pytest.mark.parametrize("path", ["/classify", "/invocations"])
@pytest.mark.parametrize(("red", "expected"), [(3, THREE), (0, ABSTAINED)])
async def test_an_answer_has_its_set_or_abstains_whatever_top_k(path: str, red: int, expected: dict[str, Any]) -> None:
    service = with_coverage()
    answer = (await service.classify(png(red), "top_k=1", path)).json
    assert fields(answer) == expected
    assert len(answer["predictions"]) == 1
    assert service.metric("vit_abstained_total") == (red == 0)


@on_a_loop
async def test_predictions_are_those_in_the_set() -> None:
    service = with_coverage()
    assert list((await service.classify(png(3), path="/predictions/fake")).json) == THREE["set"]
    assert (await service.classify(png(0), path="/predictions/fake")).json == {}
    assert service.metric("vit_abstained_total") == 1


@on_a_loop
async def test_the_inference_protocol_has_the_size_of_the_set_over_http_and_grpc() -> None:
    service = with_coverage()
    inputs = [{"name": "pixels", "shape": [2, 8, 8, 3], "datatype": "UINT8", "data": [3, 0, 0] * 64 + [0] * 192}]
    body = json.dumps({"inputs": inputs, "outputs": [{"name": "set_size"}]}).encode()
    headers = {"content-type": "application/json"}
    answer = await service.request("POST", "/v2/models/fake/infer", headers=headers, body=body)
    [output] = answer.json["outputs"]
    assert output == {"name": "set_size", "datatype": "INT64", "shape": [2, 1], "data": [3, 0]}
    names = [each["name"] for each in (await service.get("/v2/models/fake")).json["outputs"]]
    assert "set_size" in names
    assert service.metric("vit_abstained_total") == 1
    body = json.dumps({"inputs": inputs}).encode()
    answer = await service.request("POST", "/v2/models/fake/infer", headers=headers, body=body)
    by_name = {each["name"]: each for each in answer.json["outputs"]}
    assert list(by_name) == ["label", "index", "score", "abstained"]
    assert by_name["abstained"] == {"name": "abstained", "datatype": "BOOL", "shape": [2, 1], "data": [False, True]}
    request = image(png(3), png(0))
    request.outputs.append(Output(name="set_size"))
    async with calling(FakeEngine(model_info(coverage=0.95))) as caller:
        np.testing.assert_array_equal(arrays(await caller.infer(request))["set_size"], [[3], [0]])


@on_a_loop
@pytest.mark.parametrize(("limit", "is_far"), [(-1.0, True), (10.0, False)])
async def test_the_inference_protocol_says_that_a_taught_head_abstains_over_http_and_grpc(
    limit: float, is_far: bool
) -> None:
    known = Known(np.ones((2, 8), np.float16), limit)
    head = Head(("a", "b"), independent=False, weight=np.eye(2, 8, dtype=np.float32), known=known)
    async with calling(FakeEngine(model_info())) as caller:
        service_in(caller.service).models.added = {"pets": AddedHead("pets", head, "", "")}
        request = image(png(3))
        request.model_name = "pets"
        found = arrays(await caller.infer(request))
        assert found["abstained"].tolist() == [[is_far]]
        assert set(found["label"].ravel()) == {"a", "b"}
    service = app()
    service_in(service).models.added = {"pets": AddedHead("pets", head, "", "")}
    inputs = [{"name": "pixels", "shape": [1, 8, 8, 3], "datatype": "UINT8", "data": [3, 0, 0] * 64}]
    answer = await service.request("POST", "/v2/models/pets/infer", body=json.dumps({"inputs": inputs}).encode())
    assert {each["name"]: each["data"] for each in answer.json["outputs"]}["abstained"] == [is_far]


@on_a_loop
async def test_classes_below_their_thresholds_are_left_out_at_every_door() -> None:
    service = app()
    service.engine.info = model_info(has_thresholds=True)
    service.engine.least = np.zeros(10, np.float32)
    service.engine.least[[3, 4]] = 0.6, 0.25  # scores of the picture are 0.5, 0.25, 0.125
    answer = (await service.classify(png(3), "top_k=3")).json
    assert [each["label"] for each in answer["predictions"]] == ["label 4", "label 5"]
    assert len((await service.classify(png(3), "top_k=3&min_score=0.2")).json["predictions"]) == 1
    assert next(iter((await service.classify(png(3), path="/predictions/fake")).json)) == "label 4"
    service.engine.least[:] = 0.6
    abstained = [(await service.classify(png(3))).json]
    abstained += (await service.request("POST", "/classify/batch", **form(png(3)))).json["results"]
    assert [(each["predictions"], each["abstained_by"]) for each in abstained] == [([], "min_score")] * 2
    assert (await service.classify(png(3), path="/predictions/fake")).json == {}
    assert service.metric("vit_abstained_total") == 3
    async with calling(service.engine) as caller:
        found = arrays(await caller.infer(image(png(3))))
    assert (found["abstained"].tolist(), found["score"][0, 0]) == ([[True]], 0.5)


def test_a_set_of_many_labels_is_a_number_alone_and_the_client_reads_it() -> None:
    labels = [f"{number}" for number in range(MAX_SET + 1)]
    assert set_fields(labels, range(MAX_SET)) == {"set_size": MAX_SET, "set": labels[:MAX_SET]}
    assert set_fields(labels, range(MAX_SET + 1)) == {"set_size": MAX_SET + 1}
    timings = {"decode": 1, "queue": 1, "inference": 1, "total": 1}
    answer = {"model": "m", "predictions": [], "timings_ms": timings, "batch_size": 1}
    read = Classification.model_validate(answer | ABSTAINED)
    assert (read.set, read.set_size, read.abstained) == ([], 0, True)
    assert Classification.model_validate(answer).abstained is None
