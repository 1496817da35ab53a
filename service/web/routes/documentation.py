"""OpenAPI fragments that several routes share."""

from __future__ import annotations

from typing import Any

from service.schemas import FIELD, ProblemDocument
from service.web.problems import MEDIA_TYPE

_BINARY = {"type": "string", "format": "binary"}

ONE_PICTURE: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {"schema": {"type": "object", "required": [FIELD], "properties": {FIELD: _BINARY}}},
            "image/*": {"schema": _BINARY},
            "application/octet-stream": {"schema": _BINARY},
        },
    }
}

SEVERAL_PICTURES: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": [FIELD],
                    "properties": {FIELD: {"type": "array", "items": _BINARY}},
                }
            }
        },
    }
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error answers of a route."""
    content = {MEDIA_TYPE: {"schema": ProblemDocument.model_json_schema()}}
    return {status: {"description": "Problem details (RFC 9457)", "content": content} for status in statuses}
