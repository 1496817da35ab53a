"""What the OpenAPI document says beyond what FastAPI reads from the routes: keys, and the form of refusals."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from service.web.problems import MEDIA_TYPE
from vitserve.documents import FIELD, ProblemDocument

BINARY = {"type": "string", "format": "binary"}
_SCHEME = "api_key"


def _body(file: dict[str, Any], **raw: Any) -> dict[str, Any]:
    """Return the description of a body: a form with the field `file`, or one of the media types `raw`."""
    form = {"schema": {"type": "object", "required": [FIELD], "properties": {FIELD: file}}}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": form, **raw}}}


ONE_PICTURE = _body(BINARY, **{"application/octet-stream": {"schema": BINARY}})
SEVERAL_PICTURES = _body({"type": "array", "minItems": 1, "items": BINARY})


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the description of a route's error answers, which all have the same schema."""
    content = {MEDIA_TYPE: {"schema": {"$ref": f"#/components/schemas/{ProblemDocument.__name__}"}}}
    return {status: {"description": "Problem details (RFC 9457)", "content": content} for status in statuses}


def drop_null_parameters(document: dict[str, Any]) -> None:
    """Remove null from the types of an OpenAPI document's parameters, in place: a query can leave one out only."""
    for operations in document["paths"].values():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                schema = parameter["schema"]
                for kind in schema.pop("anyOf", ()):
                    if kind != {"type": "null"}:
                        schema |= kind


def describe_keys(document: dict[str, Any], public: Collection[str], *, required: bool) -> None:
    """Add to an OpenAPI document which operations take a key, and the 401 that they may answer.

    Args:
        document: changed in place.
        public: paths that are open even when keys are set.
        required: whether keys are set. Otherwise a key is documented as optional.
    """
    document["components"]["securitySchemes"] = {
        _SCHEME: {"type": "http", "scheme": "bearer", "description": "a key of `VIT_API_KEYS`, if the service has any"}
    }
    refusal = {str(status): answer for status, answer in problems(401).items()}
    security: list[dict[str, list[str]]] = [{_SCHEME: []}]
    for path, operations in document["paths"].items():
        if path in public:
            continue
        for operation in operations.values():
            operation["security"] = security if required else [{}, *security]
            operation["responses"] = dict(sorted((operation["responses"] | refusal).items()))
