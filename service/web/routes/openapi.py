"""The OpenAPI document, and the parts of it that routes have in common."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from inspect import getdoc
from typing import Any, Final

from pydantic import BaseModel, TypeAdapter

from service.web.problems import MEDIA_TYPE
from vitserve.documents import FIELD, ProblemDocument

Json = dict[str, Any]

_SCHEMAS: Final = "#/components/schemas/"
_SECURITY_SCHEME: Final = "api_key"

BINARY: Final = {"type": "string", "format": "binary"}

_JSON_PICTURE: Final = {
    "type": "object",
    "required": ["image"],
    "properties": {"image": {"type": "string", "format": "byte"}},
}


def _body(file: Json, **others: Any) -> Json:
    """Describe a body: a form with the field `file`, or one of some other media types."""
    form = {"schema": {"type": "object", "required": [FIELD], "properties": {FIELD: file}}}
    return {"required": True, "content": {"multipart/form-data": form, **others}}


ONE_PICTURE: Final = _body(
    BINARY,
    **{
        "application/octet-stream": {"schema": BINARY},
        "application/json": {"schema": _JSON_PICTURE},
    },
)
SEVERAL_PICTURES: Final = _body({"type": "array", "minItems": 1, "items": BINARY})


def problems(*statuses: int) -> dict[int, Json]:
    """Describe the error answers of a route, which all have the same schema."""
    content = {MEDIA_TYPE: {"schema": {"$ref": _SCHEMAS + ProblemDocument.__name__}}}
    return {
        status: {"description": "Problem details (RFC 9457)", "content": content}
        for status in statuses
    }


@dataclass(frozen=True)
class Operation:
    """The description of an endpoint.

    Attributes:
        method: HTTP method.
        path: path with the names of its parameters in braces.
        function: function that answers. Its name is the operation's id, which generated clients use
            as the method's name, and its docstring is the description.
        query_model: model of the query, if it has parameters.
        path_types: JSON type of each parameter of the path.
        tag: group of the operation.
        answer: type of the JSON answer; None if `responses` describes all answers.
        status: status of `answer`.
        responses: other answers by status; the key `model` is the type of the JSON.
        body: description of the request's body, if it has one.
    """

    method: str
    path: str
    function: Callable[..., Any]
    query_model: type[BaseModel] | None = None
    path_types: Mapping[str, str] = field(default_factory=dict)
    tag: str = ""
    answer: Any = None
    status: int = 200
    responses: Mapping[int, Json] = field(default_factory=dict)
    body: Json | None = None

    @property
    def request(self) -> str:
        """Return method and path, which are unique; functions of extensions may share names."""
        return f"{self.method} {self.path}"

    @property
    def media_types(self) -> frozenset[str]:
        """Return the media types of the answers without an error."""
        media_types = set[str]()
        if self.answer is not None:
            media_types.add("application/json")
        for status, response in self.responses.items():
            if status < HTTPStatus.BAD_REQUEST:
                media_types.update(response.get("content", ()))
                if "model" in response:
                    media_types.add("application/json")
        return frozenset(media_types)


def openapi_document(
    operations: Sequence[Operation], *, version: str, public: Collection[str], keys_required: bool
) -> Json:
    """Return the OpenAPI document of a service.

    Args:
        version: version of the service.
        public: paths that do not take a key.
        keys_required: whether the other paths need a key; otherwise the key is optional.
    """
    schemas, definitions = _schemas(operations)
    paths: dict[str, Json] = {}
    for operation in operations:
        description = _described(operation, schemas)
        if operation.path not in public:
            _add_key(description, required=keys_required)
        paths.setdefault(operation.path, {})[operation.method.lower()] = description
    scheme = {
        "type": "http",
        "scheme": "bearer",
        "description": "`Authorization: Bearer KEY`, with a key of `VIT_API_KEYS`",
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "vitserve",
            "description": "Image classification with a Vision Transformer.",
            "version": version,
        },
        "paths": paths,
        "components": {"schemas": definitions, "securitySchemes": {_SECURITY_SCHEME: scheme}},
    }


def _schemas(operations: Sequence[Operation]) -> tuple[dict[tuple[str, int], Json], Json]:
    """Return the schemas of all answers by operation and status, and the schemas they refer to."""
    types: list[tuple[tuple[str, int], Any]] = []
    for operation in operations:
        if operation.answer is not None:
            types.append(((operation.request, operation.status), operation.answer))
        for status, response in operation.responses.items():
            if "model" in response:
                types.append(((operation.request, status), response["model"]))
    by_key, shared = TypeAdapter.json_schemas(
        [(key, "serialization", TypeAdapter(kind)) for key, kind in types],
        ref_template=_SCHEMAS + "{model}",
    )
    definitions = shared["$defs"]
    for definition in definitions.values():
        _remove_null_defaults(definition)
    return {key: by_key[key, "serialization"] for key, _ in types}, definitions


def _remove_null_defaults(model: Json) -> None:
    """Remove the default null from the schema of a model: a missing field is not sent as null."""
    for schema in model.get("properties", {}).values():
        if schema.get("default", ...) is None:
            del schema["default"]


def _described(operation: Operation, schemas: Mapping[tuple[str, int], Json]) -> Json:
    name = operation.function.__name__
    title = name.replace("_", " ").title()

    def response(status: int, described: Json) -> Json:
        content = dict(described.get("content", {}))
        schema = schemas.get((operation.request, status))
        if schema is not None:
            if "$ref" not in schema:
                schema = schema | {"title": f"Response {title}"}
            content["application/json"] = {"schema": schema}
        answer: Json = {"description": described.get("description", "Successful Response")}
        return answer | ({"content": content} if content else {})

    responses = dict(operation.responses)
    responses.setdefault(operation.status, {})
    description: Json = {
        "tags": [operation.tag],
        "summary": title,
        "description": getdoc(operation.function) or title,
        "operationId": name,
        "responses": {
            str(status): response(status, responses[status]) for status in sorted(responses)
        },
    }
    parameters = _query_parameters(operation.query_model)
    parameters += [
        {"name": name, "in": "path", "required": True, "schema": {"type": kind}}
        for name, kind in operation.path_types.items()
    ]
    if parameters:
        description["parameters"] = parameters
    if operation.body is not None:
        description["requestBody"] = _with_form_fields(operation.body, parameters)
    return description


def _query_parameters(query_model: type[BaseModel] | None) -> list[Json]:
    """Describe the parameters of a query."""
    if query_model is None:
        return []
    document = query_model.model_json_schema()
    _remove_null_defaults(document)
    parameters: list[Json] = []
    for name, schema in document["properties"].items():
        parameter = {
            "name": name,
            "in": "query",
            "required": name in document.get("required", ()),
            "schema": schema,
        }
        if "description" in schema:
            parameter["description"] = schema["description"]
        parameters.append(parameter)
    return parameters


def _with_form_fields(body: Json, parameters: Sequence[Json]) -> Json:
    """Return a body whose form takes the parameters of the query as fields, too."""
    form = body["content"].get("multipart/form-data")
    if form is None:
        return body
    fields = {
        parameter["name"]: parameter["schema"]
        for parameter in parameters
        if parameter["in"] == "query"
    }
    schema = form["schema"]
    schema = {**schema, "properties": {**schema["properties"], **fields}}
    content = {**body["content"], "multipart/form-data": {"schema": schema}}
    return {**body, "content": content}


def _add_key(description: Json, *, required: bool) -> None:
    """Add the key to the description of an operation, and the answer 401."""
    with_key: Json = {_SECURITY_SCHEME: []}
    description["security"] = [with_key] if required else [{}, with_key]
    refusal = {str(status): answer for status, answer in problems(401).items()}
    description["responses"] = dict(sorted((description["responses"] | refusal).items()))
