"""The parts of the OpenAPI document that routes have in common."""

from typing import Any, Final

from service.web.problems import MEDIA_TYPE
from vitserve.documents import FIELD, ProblemDocument

NAME: Final = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
"""The parameter `name` of a path."""

BINARY: Final = {"type": "string", "format": "binary"}

_JSON_PICTURE: Final = {
    "type": "object",
    "required": ["image"],
    "properties": {"image": {"type": "string", "format": "byte"}},
}


def _body(file: dict[str, Any], **others: Any) -> dict[str, Any]:
    """Describe a body: a form with the field `file`, or one of some other media types."""
    form = {"schema": {"type": "object", "required": [FIELD], "properties": {FIELD: file}}}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": form, **others}}}


ONE_PICTURE: Final = _body(
    BINARY,
    **{
        "application/octet-stream": {"schema": BINARY},
        "application/json": {"schema": _JSON_PICTURE},
    },
)
SEVERAL_PICTURES: Final = _body({"type": "array", "minItems": 1, "items": BINARY})


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe the error answers of a route, which all have the same schema."""
    content = {MEDIA_TYPE: {"schema": {"$ref": f"#/components/schemas/{ProblemDocument.__name__}"}}}
    return {
        status: {"description": "Problem details (RFC 9457)", "content": content}
        for status in statuses
    }
