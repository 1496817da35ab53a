"""The parts of the OpenAPI document that describe routes of extensions."""

from tests.service.fakes import on_a_loop
from tests.service.web.apps import App


@on_a_loop
async def test_routes_of_extensions_are_documented(service: App) -> None:
    paths = (await service.get("/openapi.json")).json["paths"]
    added = {path for path in paths if path.startswith("/heads")}
    assert added == {
        "/heads",
        "/heads/{name}",
        "/heads/{name}/examples",
        "/heads/{name}/examples/{number}",
        "/heads/{name}/export",
    }
    assert {"/ping", "/invocations", "/predictions/{name}"} <= paths.keys()
    # The Open Inference Protocol has a document of its own.
    assert not [path for path in paths if path.startswith("/v2")]


@on_a_loop
async def test_parameters_of_paths_have_types(service: App) -> None:
    paths = (await service.get("/openapi.json")).json["paths"]
    parameters = paths["/heads/{name}/examples/{number}"]["put"]["parameters"]
    assert [(each["name"], each["in"], each["schema"]["type"]) for each in parameters] == [
        ("label", "query", "string"),
        ("name", "path", "string"),
        ("number", "path", "integer"),
    ]


@on_a_loop
async def test_operation_ids_are_readable(service: App) -> None:
    paths = (await service.get("/openapi.json")).json["paths"]
    names = {operation["operationId"] for path in paths.values() for operation in path.values()}
    assert names >= {
        "add_examples",
        "delete_example",
        "delete_head",
        "describe_example",
        "describe_head",
        "export_head",
        "invocations",
        "list_examples",
        "list_heads",
        "ping",
        "predictions",
        "predictions_by_put",
        "relabel_example",
    }
