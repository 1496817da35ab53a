"""Library networks over HTTP: without maps, and swapped for a Vision Transformer and back."""

from importlib.metadata import version

import pytest

from service.settings import load_settings
from tests.service.fakes import CLASSES, LIBRARY, model_info, on_a_loop, png
from tests.service.web.apps import App
from tests.service.web.fake_engine import FakeEngine
from tests.timm_reference import timm

NONE = "timm's convnext_atto has no attention maps: they are for Vision Transformers"


def library_app() -> App:
    return App(load_settings(), engine=FakeEngine(model_info(config=LIBRARY)))


@on_a_loop
@pytest.mark.parametrize(
    ("method", "path", "query"),
    [
        ("POST", "/classify", "attention=true"),
        ("POST", "/classify", "attention=relevance"),
        ("POST", "/classify/batch", "attention=relevance"),
        ("POST", "/attention", ""),
        ("POST", "/attention", "method=relevance&format=json"),
        ("GET", "/attention", "id=unknown"),
    ],
)
async def test_library_networks_refuse_maps(method: str, path: str, query: str) -> None:
    response = await library_app().request(
        method, path, query=query, body=png(7) if method == "POST" else b""
    )
    assert (response.status, response.code, response.json["detail"]) == (
        422,
        "invalid_parameter",
        NONE,
    )


@on_a_loop
async def test_all_else_is_answered() -> None:
    service = library_app()
    answer = await service.classify(png(3), query="embedding=true")
    assert answer.json["predictions"][0]["index"] == 3
    assert "attention" not in answer.json
    assert len(answer.json["embedding"]) == LIBRARY.width
    kept = await service.get("/attention", f"id={answer.json['id']}")
    assert (kept.status, kept.json["detail"]) == (422, NONE)
    refused = await service.request("POST", "/embed", query="pool=mean", body=png(3))
    assert (refused.status, refused.code) == (422, "invalid_parameter")
    assert (await service.request("POST", "/embed", body=png(3))).status == 200


@on_a_loop
async def test_the_model_says_whose_code_it_is() -> None:
    timm()
    model = (await library_app().get("/model")).json
    assert (model["runtime"], model["runtime_version"]) == ("timm", version("timm"))
    assert model["attention_methods"] == []
    unknown = ("patch_size", "grid", "layers", "heads", "pool", "attention_source")
    assert {name: model[name] for name in unknown} == dict.fromkeys(unknown)
    assert (model["width"], model["classes"], model["input_size"]) == (
        LIBRARY.width,
        CLASSES,
        list(LIBRARY.image_size),
    )
