"""Abstention and label sets in answers of the protocol, over HTTP and gRPC."""

import json

import numpy as np
import pytest

from model.extensions.taught.known_examples import KnownExamples
from model.heads import Head
from service.extensions.inference_protocol.grpc.descriptors import POOL, message_class
from service.models.served_heads import ServedHead
from tests.extensions.inference_protocol.grpc.caller import Output, arrays, calling, image
from tests.service.fakes import model_info, on_a_loop, png
from tests.service.web.apps import app, service_in
from tests.service.web.fake_engine import FakeEngine


@on_a_loop
async def test_the_protocol_tells_the_set_size() -> None:
    service = app()
    service.engine.info = model_info(coverage=0.95, calibrated_on=50)
    inputs = [
        {
            "name": "pixels",
            "shape": [2, 8, 8, 3],
            "datatype": "UINT8",
            "data": [3, 0, 0] * 64 + [0] * 192,
        }
    ]
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
    assert by_name["abstained"] == {
        "name": "abstained",
        "datatype": "BOOL",
        "shape": [2, 1],
        "data": [False, True],
    }
    request = image(png(3), png(0))
    request.outputs.append(Output(name="set_size"))
    async with calling(FakeEngine(model_info(coverage=0.95))) as caller:
        np.testing.assert_array_equal(arrays(await caller.infer(request))["set_size"], [[3], [0]])


@on_a_loop
async def test_the_configuration_has_abstentions() -> None:
    async with calling(FakeEngine(model_info(coverage=0.95))) as caller:
        answer = message_class("ModelConfigResponse").FromString(await caller.call("ModelConfig"))

    [abstained] = [output for output in answer.config.output if output.name == "abstained"]
    types = POOL.FindEnumTypeByName("inference.DataType").values_by_number
    assert types[abstained.data_type].name == "TYPE_BOOL"


@on_a_loop
@pytest.mark.parametrize(("limit", "is_far"), [(-1.0, True), (10.0, False)])
async def test_the_protocol_says_a_head_abstains(limit: float, is_far: bool) -> None:
    known = KnownExamples(np.ones((2, 8), np.float32), np.zeros(2, np.int32), limit)
    head = Head(("a", "b"), independent=False, weight=np.eye(2, 8, dtype=np.float32), known=known)
    async with calling(FakeEngine(model_info())) as caller:
        service_in(caller.service).models.heads = {"pets": ServedHead("pets", head, "", "")}
        request = image(png(3))
        request.model_name = "pets"
        found = arrays(await caller.infer(request))
        assert found["abstained"].tolist() == [[is_far]]
        assert set(found["label"].ravel()) == {"a", "b"}
    service = app()
    service_in(service).models.heads = {"pets": ServedHead("pets", head, "", "")}
    inputs = [
        {"name": "pixels", "shape": [1, 8, 8, 3], "datatype": "UINT8", "data": [3, 0, 0] * 64}
    ]
    answer = await service.request(
        "POST", "/v2/models/pets/infer", body=json.dumps({"inputs": inputs}).encode()
    )
    assert {each["name"]: each["data"] for each in answer.json["outputs"]}["abstained"] == [is_far]


@on_a_loop
async def test_class_below_threshold_abstains() -> None:
    engine = FakeEngine(model_info(has_thresholds=True))
    engine.thresholds = np.full(10, 0.6, np.float32)  # the best score of the picture is 0.5
    async with calling(engine) as caller:
        found = arrays(await caller.infer(image(png(3))))
    assert (found["abstained"].tolist(), found["score"][0, 0]) == ([[True]], 0.5)
