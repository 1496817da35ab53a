"""The one table from errors to HTTP, and RFC 9457 problem documents made from it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from model import errors as model_errors
from service import errors

MEDIA_TYPE = "application/problem+json"


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as the wire knows it."""

    status: int
    code: str
    detail: str
    retry_after: int | None = None

    def document(self, request_id: str) -> dict[str, Any]:
        """The JSON object of RFC 9457, with our `code` and `request_id`."""
        return {
            "type": "about:blank",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
            "request_id": request_id,
        }

    def headers(self) -> dict[str, str]:
        """Headers that belong to the status."""
        if self.retry_after is not None:
            return {"Retry-After": str(self.retry_after)}
        if self.status == HTTPStatus.UNAUTHORIZED:
            return {"WWW-Authenticate": "Bearer"}
        return {}


TABLE: dict[type[Exception], tuple[int, str]] = {
    errors.MalformedRequest: (400, "malformed_request"),
    errors.Unauthorized: (401, "unauthorized"),
    errors.NotFound: (404, "not_found"),
    errors.MethodNotAllowed: (405, "method_not_allowed"),
    errors.RequestTimeout: (408, "request_timeout"),
    errors.UploadTooLarge: (413, "upload_too_large"),
    model_errors.ImageTooLarge: (413, "image_too_large"),
    errors.TooManyImages: (413, "too_many_images"),
    errors.UnsupportedMediaType: (415, "unsupported_media_type"),
    model_errors.UnsupportedImageFormat: (415, "unsupported_media_type"),
    model_errors.InvalidImage: (422, "invalid_image"),
    errors.MissingImage: (422, "invalid_image"),
    errors.InvalidParameter: (422, "invalid_parameter"),
    model_errors.InputError: (422, "invalid_parameter"),
    errors.InferenceFailed: (500, "inference_failed"),
    errors.QueueFull: (503, "queue_full"),
    errors.EngineUnavailable: (503, "engine_unavailable"),
    errors.Draining: (503, "draining"),
    errors.DeadlineExceeded: (504, "deadline_exceeded"),
}

CLIENT_DISCONNECTED = 499
"""Status counted (never sent) for a caller that went away; nginx's number for it."""


def problem_of(error: Exception) -> Problem:
    """An error's place in the table; what is not in it is a defect of ours, and says nothing of itself."""
    for kind in type(error).__mro__:
        if kind in TABLE:
            status, code = TABLE[kind]
            retry_after = error.retry_after if isinstance(error, errors.Unavailable) else None
            return Problem(status, code, str(error), retry_after)
    return Problem(500, "internal_error", "the service failed on this request")


def body(problem: Problem, request_id: str) -> bytes:
    """The problem document, encoded."""
    return json.dumps(problem.document(request_id), ensure_ascii=False).encode()
