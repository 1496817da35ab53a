"""GET /docs and /openapi.json."""

from __future__ import annotations

from tests.service.fakes import on_a_loop
from tests.service.web.apps import app


@on_a_loop
async def test_pages_and_documentation_are_there() -> None:
    service = app()
    for path in ("/", "/docs"):
        response = await service.get(path)
        assert (response.status, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
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
async def test_classify_is_documented_as_it_is_validated_and_answered() -> None:
    document = (await app().get("/openapi.json")).json
    operation = document["paths"]["/classify"]["post"]
    top_k, attention = operation["parameters"]
    assert (top_k["name"], top_k["in"], top_k["required"]) == ("top_k", "query", False)
    assert top_k["schema"]["anyOf"] == [{"type": "integer", "minimum": 1}, {"type": "null"}]
    assert (attention["name"], attention["schema"]["type"], attention["schema"]["default"]) == (
        "attention",
        "boolean",
        False,
    )
    assert operation["description"].startswith("Classify one picture")
    assert operation["tags"] == ["classify"]
    assert operation["requestBody"]["required"] is True
    answers = operation["responses"]
    assert set(answers) == {"200", "400", "401", "408", "413", "415", "422", "500", "503", "504"}
    assert answers["200"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Classification"}
    assert set(answers["422"]["content"]) == {"application/problem+json"}
    properties = document["components"]["schemas"]["Classification"]["properties"]
    assert properties["predictions"]["items"] == {"$ref": "#/components/schemas/Prediction"}


@on_a_loop
async def test_attention_is_documented_with_all_its_parameters() -> None:
    paths = (await app().get("/openapi.json")).json["paths"]["/attention"]
    names = {"method", "layer", "head", "class", "format", "overlay", "alpha", "colormap", "size"}
    assert {parameter["name"] for parameter in paths["post"]["parameters"]} == names
    assert {parameter["name"] for parameter in paths["get"]["parameters"]} == names | {"id"}
    assert [p["name"] for p in paths["get"]["parameters"] if p["required"]] == ["id"]
