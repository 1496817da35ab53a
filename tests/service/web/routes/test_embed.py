"""POST /embed and POST /embed/batch, also with a model without a classification head."""

import base64
import io
from typing import Any

import numpy as np
import pytest

from model.methods import is_class_specific, methods
from model.outputs import EmbeddingRequest
from tests.needs import needs
from tests.service.fakes import SIZE, expected_embedding, model_info, on_a_loop, png
from tests.service.web.apps import App, app, form
from tests.service.web.headless import REFUSAL, headless
from tests.service.web.http_communicator import HttpCommunicator

HEAD = EmbeddingRequest()


async def embed(service: App, query: str = "", red: int = 9) -> HttpCommunicator:
    return await service.classify(png(red), query, "/embed")


async def embed_batch(service: App, *files: bytes, query: str = "") -> HttpCommunicator:
    return await service.request("POST", "/embed/batch", query=query, **form(*files))


def array(response: HttpCommunicator) -> np.ndarray:
    assert response.status == 200
    assert response.headers["content-type"] == "application/x-npy"
    found: np.ndarray = np.load(io.BytesIO(response.content), allow_pickle=False)
    assert found.dtype == np.dtype("<f4")
    return found


@on_a_loop
async def test_an_embedding_is_json_by_default(service: App) -> None:
    for response in (await embed(service), await service.request("POST", "/embed", **form(png(9)))):
        assert response.headers["content-type"] == "application/json"
        document = response.json
        assert set(document) == {"id", "model", "pool", "embedding"}
        assert (document["model"], document["pool"]) == ("fake", "head")
        np.testing.assert_array_equal(document["embedding"], expected_embedding(9, HEAD))
        assert (await service.get("/attention", f"id={document['id']}&format=json")).status == 200


@on_a_loop
@pytest.mark.parametrize(
    ("query", "requested"),
    [
        ("pool=cls", EmbeddingRequest("cls")),
        ("pool=mean&normalize=true", EmbeddingRequest("mean", True)),
        ("normalize=1", EmbeddingRequest("head", True)),
        ("pool=transfer", EmbeddingRequest("transfer")),
    ],
)
async def test_every_format_has_what_was_asked_for(query: str, requested: EmbeddingRequest) -> None:
    service = app()
    expected = expected_embedding(9, requested)
    document = (await embed(service, query)).json
    assert document["pool"] == requested.pool
    np.testing.assert_array_equal(document["embedding"], expected)
    np.testing.assert_array_equal(array(await embed(service, f"{query}&format=npy")), expected)
    text = (await embed(service, f"{query}&format=base64")).json["embedding"]
    np.testing.assert_array_equal(
        np.frombuffer(base64.b64decode(text, validate=True), "<f4"), expected
    )


@on_a_loop
async def test_each_picture_of_a_batch_is_answered(service: App) -> None:
    results = (await embed_batch(service, png(1), b"no picture", png(3))).json["results"]
    assert results[1]["error"]["code"] == "unsupported_media_type"
    for place, red in ((0, 1), (2, 3)):
        np.testing.assert_array_equal(results[place]["embedding"], expected_embedding(red, HEAD))
    assert service.metric("vit_images_total") == 2
    assert service.metric("vit_rejected_total", reason="unsupported_media_type") == 1


@on_a_loop
async def test_an_array_has_a_row_for_each_picture(service: App) -> None:
    expected = np.stack([expected_embedding(red, HEAD) for red in (1, 2, 3)])
    np.testing.assert_array_equal(
        array(await embed_batch(service, png(1), png(2), png(3), query="format=npy")), expected
    )
    refused = await embed_batch(service, png(1), b"no picture", png(3), query="format=npy")
    assert (refused.status, refused.code) == (415, "unsupported_media_type")
    assert refused.json["detail"].startswith("picture 1: this is text")
    large = await embed_batch(
        app(max_upload_bytes=len(png(1))), png(1), png(1) + b"0", query="format=npy"
    )
    assert (large.status, large.json["detail"][:11]) == (413, "picture 1: ")


@on_a_loop
@pytest.mark.parametrize("path", ["/embed", "/embed/batch"])
@pytest.mark.parametrize("query", ["pool=max", "normalize=2", "format=png", "top_k=1"])
async def test_a_bad_query_names_its_parameter(path: str, query: str) -> None:
    response = await app().classify(png(1), query, path)
    assert (response.status, response.code) == (422, "invalid_parameter")
    assert query.partition("=")[0] in response.json["detail"]


@on_a_loop
async def test_a_missing_cls_token_is_refused(service: App) -> None:
    changes: dict[str, Any] = {"class_token": False, "pool": "mean"}
    service.engine.info = model_info(config=model_info().config.model_copy(update=changes))
    response = await embed(service, "pool=cls")
    assert (response.status, response.code) == (422, "invalid_parameter")
    assert (
        response.json["detail"] == "pool 'cls': the model has no CLS token; expected head or mean"
    )
    assert (await embed(service, "pool=mean")).status == 200


@on_a_loop
async def test_embeddings_do_not_count_as_classes(service: App) -> None:
    await embed(service)
    assert service.metric("vit_images_total") == 1
    assert service.metric("vit_top1_score_count") == 0
    await service.classify(png(1, (SIZE, SIZE)))
    assert service.metric("vit_top1_score_count") == 1


@on_a_loop
@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("/classify", ""),
        ("/classify", "embedding=true"),
        pytest.param("/invocations", "", marks=needs("compatibility")),
        pytest.param("/predictions/fake", "", marks=needs("compatibility")),
    ],
)
async def test_a_refusal_names_available_outputs(path: str, query: str) -> None:
    service = headless()
    response = await service.classify(png(9), query, path)
    assert (response.status, response.json["code"]) == (422, "invalid_parameter")
    assert response.json["detail"].startswith(REFUSAL)
    assert service.metric("vit_images_total") == 0


@on_a_loop
async def test_a_headless_model_embeds_pictures() -> None:
    service = headless()
    assert len((await service.classify(png(9), "", "/embed")).json["embedding"]) == 8
    response = await service.classify(png(9), "format=json", "/attention")
    assert (response.status, response.json["method"]) == (200, "cls")
    assert "class" not in response.json
    assert (await service.classify(png(9), "method=cls&format=npy", "/attention")).status == 200
    assert (await service.classify(png(9), "", "/attention")).headers["content-type"] == "image/png"
    for query, detail in (
        ("method=relevance", REFUSAL),
        ("method=relevance&class=0", REFUSAL),
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
    offered = [name for name in methods() if not is_class_specific(name)]
    assert (described["classes"], described["attention_methods"]) == (0, offered)
    assert (await service.get("/labels")).json["labels"] == []
