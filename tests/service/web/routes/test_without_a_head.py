"""A model without a classification head: embeddings and maps of its attention, and a clear refusal of all else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from service.settings import load_settings
from tests.service.fakes import SIZE, model_info, on_a_loop, png
from tests.service.web.apps import App
from tests.service.web.fake_engine import FakeEngine

REFUSAL = "the model has no classification head: it gives embeddings (POST /embed, vitserve embed) and attention maps"


def headless() -> App:
    info = model_info()
    info = model_info(labels=(), config=info.config.model_copy(update={"num_classes": 0}))
    return App(load_settings(), engine=FakeEngine(info))


def v2(outputs: list[str], **parameters: Any) -> dict[str, Any]:
    tensor = {"name": "pixels", "datatype": "UINT8", "shape": [1, SIZE, SIZE, 3], "data": [9] * (3 * SIZE * SIZE)}
    body = {"inputs": [tensor], "outputs": [{"name": name} for name in outputs], "parameters": parameters}
    return {"headers": {"content-type": "application/json"}, "body": json.dumps(body).encode()}


@on_a_loop
@pytest.mark.parametrize(
    ("path", "query"),
    [("/classify", ""), ("/classify", "embedding=true"), ("/invocations", ""), ("/predictions/fake", "")],
)
async def test_classes_are_refused_with_what_the_model_has_instead(path: str, query: str) -> None:
    service = headless()
    response = await service.classify(png(9), query, path)
    assert (response.status, response.json["code"]) == (422, "invalid_parameter")
    assert response.json["detail"].startswith(REFUSAL)
    assert service.metric("vit_images_total") == 0


@on_a_loop
async def test_embeddings_and_maps_of_the_attention_are_given() -> None:
    service = headless()
    assert len((await service.classify(png(9), "", "/embed")).json["embedding"]) == 8
    response = await service.classify(png(9), "format=json", "/attention")
    assert (response.status, response.json["method"]) == (200, "cls")
    assert "class" not in response.json
    assert (await service.classify(png(9), "method=rollout&format=npy", "/attention")).status == 200
    assert (await service.classify(png(9), "", "/attention")).headers["content-type"] == "image/png"
    for query, detail in (
        ("method=relevance", REFUSAL),
        ("method=gae&class=0", REFUSAL),
        ("class=0", REFUSAL),
    ):
        refused = await service.classify(png(9), query, "/attention")
        assert (refused.status, refused.json["code"]) == (422, "invalid_parameter")
        assert refused.json["detail"].startswith(detail)
    assert service.metric("vit_top1_score_count") == 0


@on_a_loop
async def test_what_describes_the_model_says_so() -> None:
    service = headless()
    described = (await service.get("/model")).json
    assert (described["classes"], described["attention_methods"]) == (0, ["cls", "rollout"])
    assert (await service.get("/labels")).json["labels"] == []
    outputs = (await service.get("/v2/models/fake")).json["outputs"]
    assert [output["name"] for output in outputs] == ["attention", "embedding"]
    assert (await service.get("/v2/models/fake/config")).status == 200


@on_a_loop
async def test_the_open_inference_protocol_gives_the_embedding_by_default() -> None:
    service, path = headless(), "/v2/models/fake/infer"
    for outputs in ([], ["embedding", "attention"]):
        answer = (await service.request("POST", path, **v2(outputs))).json["outputs"]
        assert [output["name"] for output in answer] == (outputs or ["embedding"])
    for names in (["label"], ["embedding", "logits"]):
        response = await service.request("POST", path, **v2(names))
        assert (response.status, response.json["error"][: len(REFUSAL)]) == (422, REFUSAL)
    refused = await service.request("POST", path, **v2(["attention"], attention="relevance"))
    assert refused.json["error"] == "attention 'relevance': expected one of cls"
    refused = await service.request("POST", path, **v2(["embedding"], top_k=1))
    assert refused.json["error"] == "top_k 1: there are no classes and no labels"
    assert service.metric("vit_top1_score_count") == 0
