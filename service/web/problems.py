"""The table that maps errors to HTTP, and their problem documents (RFC 9457)."""

from dataclasses import dataclass
from http import HTTPStatus

from starlette.responses import Response

from model import errors as model_errors
from service import errors
from service.observe.logs import shortened
from vitserve.documents import ProblemDocument

MEDIA_TYPE = "application/problem+json"

_MAX_DETAIL = 500
"""Longest detail in characters; a detail may quote the request."""

INTERNAL_ERROR = "internal_error"
"""Code of an error outside the table: a defect of the service."""


@dataclass(frozen=True, slots=True)
class Problem:
    """The answer to an error, with the headers of its status."""

    status: int
    code: str
    detail: str
    headers: dict[str, str]

    def document(self, request_id: str) -> ProblemDocument:
        """Return the document of RFC 9457, with the additions `code` and `request_id`."""
        return ProblemDocument(
            type="about:blank",
            title=HTTPStatus(self.status).phrase,
            status=self.status,
            detail=self.detail,
            code=self.code,
            request_id=request_id,
        )

    def answer(self, request_id: str) -> Response:
        """Return the answer with the problem document."""
        content = self.document(request_id).model_dump_json()
        return Response(content, self.status, self.headers, MEDIA_TYPE)


TABLE: dict[type[Exception], tuple[int, str]] = {  # extensions' errors have their `problem`
    errors.MalformedRequest: (400, "malformed_request"),
    errors.Unauthorized: (401, "unauthorized"),
    errors.Forbidden: (403, "forbidden"),
    errors.NotFound: (404, "not_found"),
    errors.UnknownModel: (404, "unknown_model"),
    errors.MethodNotAllowed: (405, "method_not_allowed"),
    errors.NotAcceptable: (406, "not_acceptable"),
    errors.RequestTimeout: (408, "request_timeout"),
    errors.SwapUnderWay: (409, "swap_under_way"),
    errors.DefaultModel: (409, "default_model"),
    errors.NameTaken: (409, "name_taken"),
    errors.PreconditionFailed: (412, "precondition_failed"),
    errors.ExpectationFailed: (417, "expectation_failed"),
    errors.UnknownHost: (421, "unknown_host"),
    errors.UploadTooLarge: (413, "upload_too_large"),
    model_errors.ImageTooLarge: (413, "image_too_large"),
    errors.TooManyImages: (413, "too_many_images"),
    errors.UnsupportedMediaType: (415, "unsupported_media_type"),
    model_errors.UnsupportedImageFormat: (415, "unsupported_media_type"),
    model_errors.InvalidImage: (422, "invalid_image"),
    model_errors.ImageTooCostly: (422, "image_too_costly"),
    errors.MissingImage: (422, "invalid_image"),
    errors.InvalidParameter: (422, "invalid_parameter"),
    model_errors.InputError: (422, "invalid_parameter"),
    errors.CheckpointRefused: (422, "checkpoint_refused"),
    errors.TooManyRequests: (429, "too_many_requests"),
    errors.InferenceFailed: (500, "inference_failed"),
    errors.QueueFull: (503, "queue_full"),
    errors.ReceivingFull: (503, "receiving_full"),
    errors.EngineUnavailable: (503, "engine_unavailable"),
    errors.ModelLoading: (503, "model_loading"),
    errors.ModelsFull: (503, "models_full"),
    errors.ModelFailed: (503, "model_failed"),
    errors.Draining: (503, "draining"),
    errors.DeadlineExceeded: (504, "deadline_exceeded"),
}


CLIENT_DISCONNECTED = 499
"""Status that is counted, but not sent, for a disconnect; the same number as in nginx."""


def problem_of(error: Exception) -> Problem:
    """Return the problem of an error, and drop the error's traceback and context.

    An error outside the table is a defect of the service, so its message is not sent.
    """
    for kind in type(error).__mro__:
        known = getattr(kind, "problem", None) or TABLE.get(kind)
        if known is not None:
            # The traceback's frames hold the picture, and tasks in them hold the error: a cycle
            # that would keep the picture until the next garbage collection.
            error.__traceback__ = None
            error.__context__ = None
            status, code = known
            detail = model_errors.printable(shortened(str(error), _MAX_DETAIL))
            return Problem(status, code, detail, _headers(error))
    return Problem(500, INTERNAL_ERROR, "the service failed on this request", {})


def codes() -> set[str]:
    """Return the code of every problem, with those of the extensions that are imported."""
    codes = {INTERNAL_ERROR, *(code for _, code in TABLE.values())}
    kinds = [errors.ServiceError]
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if kind.problem is not None:
            codes.add(kind.problem[1])
    return codes


def _headers(error: Exception) -> dict[str, str]:
    match error:
        case errors.Unavailable(retry_after=None):
            return {}
        case errors.Unavailable() | errors.TooManyRequests():
            return {"Retry-After": str(error.retry_after)}
        case errors.Unauthorized():
            return {"WWW-Authenticate": "Bearer"}
        case errors.MethodNotAllowed():
            return {"Allow": ", ".join(error.allowed)}
    return {}
