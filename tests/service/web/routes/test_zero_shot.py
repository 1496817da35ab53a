"""Labels and texts of a request, to /classify, /embed and /attention."""

import asyncio
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlencode

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from model.checkpoint import load_checkpoint
from model.outputs import EmbeddingRequest, MapRequest, RequestedOutputs
from model.runtime.predictor import Predictor
from service.engine.loading import load_predictor
from service.errors import QueueFull
from service.settings import load_settings
from tests.model.checkpoint import whole_models
from tests.model.images.pictures import encode
from tests.needs import needs, needs_methods
from tests.service.fakes import (
    expected_embedding,
    on_a_loop,
    png,
    running,
    text_feature,
    until,
)
from tests.service.web.apps import App, app, form, service_in
from tests.service.web.http_communicator import HttpCommunicator
from tests.service.web.zero_shot import (
    CSV,
    LABELS,
    require_scores,
    service,
)

NOUNS = (
    "cat",
    "dog's tail",
    "red car",
    "café",
    "lait",
    "bad photo",
    "thing",
    "12",
    "34",
    "au",
    "this",
    "car",
    "a",
    "!?",
)


async def classify(served: App, red: int = 9, **query: object) -> HttpCommunicator:
    return await served.classify(png(red), urlencode(query))


@on_a_loop
@pytest.mark.parametrize("labels", [CSV, json.dumps(LABELS)], ids=["csv", "json"])
async def test_labels_of_a_request_replace_classes(labels: str) -> None:
    served = service()
    document = (await classify(served, labels=labels)).json
    require_scores(document["predictions"], 9)
    assert "embedding" not in document
    assert len((await classify(served, labels=labels, top_k=1)).json["predictions"]) == 1
    with_more = (await classify(served, labels=labels, embedding=True, attention=True)).json
    np.testing.assert_allclose(with_more["embedding"], expected_embedding(9, EmbeddingRequest()))
    assert with_more["attention"]["method"] == "cls"
    # Requests without labels use the classes of the start.
    assert (await classify(served)).json["predictions"][0]["label"].startswith("label ")


@pytest.fixture(scope="module", params=["clip", "siglip"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("whole")
    getattr(whole_models, request.param)(folder)
    return folder


@pytest.mark.parametrize(
    "remote",
    [
        pytest.param(False, id="one process"),
        pytest.param(True, id="several", marks=needs("cluster")),
    ],
)
@pytest.mark.parametrize("count", [1, 2, 14])
def test_requested_labels_have_equal_maps(count: int, remote: bool, folder: Path) -> None:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_batch": 2}
    settings = load_settings({"checkpoint": str(folder), "compile": "off", **options})
    options["compile_mode"] = "off"
    labels = json.dumps(NOUNS[:count])
    pictures = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), np.uint8)
    requested = RequestedOutputs(1, MapRequest("relevance"))
    from_the_start = Predictor(load_checkpoint(str(folder), labels=labels), **options)
    expected = from_the_start.predict(pictures, requested)
    named = sorted({0, count - 1})
    of_named = [
        from_the_start.predict(pictures[:1], RequestedOutputs(1, MapRequest("relevance", each)))
        for each in named
    ]

    @on_a_loop
    async def compare() -> None:
        async with running(load=lambda: cast(Any, load_predictor(settings)), remote=remote) as rig:
            served = App(settings, cast(Any, rig.engine))
            files = [encode(Image.fromarray(picture), "PNG") for picture in pictures]
            query = urlencode({"labels": labels, "attention": "relevance", "top_k": 1})
            answer = await served.request("POST", "/classify/batch", query=query, **form(*files))
            for outputs, found in zip(expected, answer.json["results"], strict=True):
                assert outputs.map is not None
                assert outputs.map.values.std() > 1e-3, "the reference says nothing"
                np.testing.assert_allclose(
                    found["attention"]["values"], outputs.map.values, atol=1e-5
                )
                for name in ("score", "evidence", "kept_mass"):
                    assert found["attention"][name] == pytest.approx(
                        getattr(outputs.map, name), abs=1e-5
                    )
                best = found["predictions"][0]
                assert best["index"] == found["attention"]["class"] == outputs.indices[0]
                assert (
                    best["label"]
                    == found["attention"]["label"]
                    == json.loads(labels)[outputs.indices[0]]
                )
                assert "url" not in found["attention"], (
                    "by its id alone the picture has no map of this label"
                )
            query = urlencode(
                {"labels": labels, "class": ",".join(map(str, named)), "format": "json"}
            )
            kept = answer.json["results"][0]["id"]
            documents = (await served.get("/attention", f"id={kept}&{query}")).json
            sent = (await served.request("POST", "/attention", query=query, body=files[0])).json
            for found in (documents, sent):
                for document, [outputs] in zip(
                    [found] if count == 1 else found, of_named, strict=True
                ):
                    assert outputs.map is not None
                    np.testing.assert_allclose(document["values"], outputs.map.values, atol=1e-5)
                    for name in ("score", "evidence"):
                        assert document[name] == pytest.approx(getattr(outputs.map, name), abs=1e-5)
                    assert document["label"] == json.loads(labels)[document["class"]]

    compare()


@on_a_loop
@pytest.mark.parametrize(
    ("query", "detail"),
    [
        ({"labels": ""}, "labels: there are 0, expected 1 to 500"),
        ({"labels": "a" * 257}, "expected 1 to 256 characters"),
        ({"labels": ",".join("a" * 501)}, "labels: there are 501, expected 1 to 500"),
        ({"labels": "a,b", "top_k": 3}, "top_k 3: there are 2 labels"),
    ],
)
async def test_labels_without_meaning_are_refused(query: dict[str, Any], detail: str) -> None:
    response = await classify(service(), **query)
    assert response.status == 422
    assert response.json["code"] == "invalid_parameter"
    assert detail in response.json["detail"]


@on_a_loop
async def test_a_plain_classifier_refuses_labels() -> None:
    for path, query in (("/classify", "labels=cat"), ("/embed", "text=cat")):
        response = await app().request("POST", path, query=query, body=png(1))
        assert (response.status, response.json["code"]) == (422, "invalid_parameter")
        assert "no text tower" in response.json["detail"]


@on_a_loop
async def test_a_text_past_its_deadline_is_504() -> None:
    served = service(request_timeout=0.01)

    async def never(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    served.engine.embed_texts = never  # type: ignore[method-assign, assignment]
    response = await served.request("POST", "/embed", query="text=cat")
    assert (response.status, response.json["code"]) == (504, "deadline_exceeded")


@on_a_loop
async def test_refused_texts_save_the_forward_pass() -> None:
    served = service()

    async def full(*_: object, **__: object) -> None:
        raise QueueFull("too many texts wait")

    served.engine.embed_texts = full  # type: ignore[method-assign, assignment]
    response = await classify(served, labels="cat,dog")
    assert (response.status, response.json["code"], served.engine.timeouts) == (
        503,
        "queue_full",
        [],
    )


@on_a_loop
async def test_known_texts_wait_for_no_new_ones() -> None:
    served = service()
    gate = asyncio.Event()

    async def embed(texts: Sequence[str], **_: object) -> NDArray[np.float32]:
        if "new" in texts[0]:
            await gate.wait()
        return np.stack([text_feature(text) for text in texts])

    served.engine.embed_texts = embed  # type: ignore[method-assign]
    await classify(served, labels=CSV)
    several = ("/classify/batch", "labels=new", form(*map(png, range(6))))  # they are computed once
    requests = [several, *(("/embed", f"text=new{number}", {"body": b""}) for number in range(3))]
    new = [
        served.communicator("POST", path, query=query, **sent).start()
        for path, query, sent in requests
    ]
    await until(
        lambda: service_in(served).lanes.texts.waiting == 2
    )  # two texts of one caller are computed
    assert (
        (await classify(served, labels=CSV)).status,
        service_in(served).lanes.texts.waiting,
    ) == (200, 2)
    gate.set()
    assert [each.status for each in await asyncio.gather(*new)] == [200] * 4


@on_a_loop
async def test_a_disconnect_drops_waiting_texts() -> None:
    served = service(request_timeout=1000)
    begun = asyncio.Event()
    ended = asyncio.Event()

    async def never(*_: object, **__: object) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    served.engine.embed_texts = never  # type: ignore[method-assign, assignment]
    caller = served.communicator("POST", "/embed", query="text=cat", body=b"")
    running = caller.start()
    await begun.wait()
    caller.disconnect()
    await ended.wait()
    await running


@on_a_loop
async def test_texts_are_embedded_in_every_format() -> None:
    served = service()
    query = urlencode([("text", "a cab, red"), ("text", "egg"), ("text", "egg")])
    expected = np.stack([text_feature(text) for text in ("a cab, red", "egg", "egg")])
    document = (await served.request("POST", "/embed", query=query)).json
    assert (document["model"], document["texts"]) == ("fake", ["a cab, red", "egg", "egg"])
    np.testing.assert_array_equal(document["embeddings"], expected)
    response = await served.request("POST", "/embed", query=f"{query}&format=npy&normalize=true")
    expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(np.load(io.BytesIO(response.content)), expected, rtol=1e-6)
    text = (await served.request("POST", "/embed", query="text=egg&format=base64")).json[
        "embeddings"
    ]
    assert [type(each) for each in text] == [str]
    assert served.metric("vit_inflight_requests") == 0


@on_a_loop
@pytest.mark.parametrize(
    ("query", "detail"),
    [
        ({"class": "fox"}, "class 'fox' is unknown"),
        pytest.param(
            {"method": "gae"}, "labels does not apply to method 'gae'", marks=needs_methods
        ),
        ({"layer": 0}, "labels does not apply to method 'cls'"),
    ],
)
async def test_a_map_that_no_label_has_is_refused(query: dict[str, Any], detail: str) -> None:
    response = await service().get("/attention", urlencode({"id": "x", "labels": CSV, **query}))
    assert (response.status, response.json["code"]) == (422, "invalid_parameter")
    assert detail in response.json["detail"]
