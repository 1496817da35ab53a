"""A model without a classification head, described and asked by the protocol."""

import json
from typing import Any

from tests.service.fakes import SIZE, on_a_loop
from tests.service.web.headless import REFUSAL, headless


def v2(outputs: list[str], **parameters: Any) -> dict[str, Any]:
    tensor = {
        "name": "pixels",
        "datatype": "UINT8",
        "shape": [1, SIZE, SIZE, 3],
        "data": [9] * (3 * SIZE * SIZE),
    }
    body = {
        "inputs": [tensor],
        "outputs": [{"name": name} for name in outputs],
        "parameters": parameters,
    }
    return {"headers": {"content-type": "application/json"}, "body": json.dumps(body).encode()}


@on_a_loop
async def test_description_has_no_classes() -> None:
    service = headless()
    outputs = (await service.get("/v2/models/fake")).json["outputs"]
    assert [output["name"] for output in outputs] == ["attention", "embedding"]
    assert (await service.get("/v2/models/fake/config")).status == 200


@on_a_loop
async def test_the_protocol_defaults_to_embeddings() -> None:
    service = headless()
    path = "/v2/models/fake/infer"
    for outputs in ([], ["embedding", "attention"]):
        answer = (await service.request("POST", path, **v2(outputs))).json["outputs"]
        assert [output["name"] for output in answer] == (outputs or ["embedding"])
    for names in (["label"], ["embedding", "logits"]):
        response = await service.request("POST", path, **v2(names))
        assert (response.status, response.json["error"][: len(REFUSAL)]) == (422, REFUSAL)
    refused = await service.request("POST", path, **v2(["attention"], attention="relevance"))
    assert refused.json["error"] == "attention 'relevance': expected one of cls"
    refused = await service.request("POST", path, **v2(["embedding"], top_k=1))
    assert (
        refused.json["error"]
        == "top_k: does not apply to these outputs; select the output index or label or score"
    )
    assert service.metric("vit_top1_score_count") == 0
