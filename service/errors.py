"""The errors of a request as types, independent of HTTP: `service.web.problems` maps them.

Errors of the picture itself are in `model.errors`.
"""

from collections.abc import Iterable
from typing import ClassVar


class ServiceError(Exception):
    """Base of the service's errors. The message is for the caller.

    Attributes:
        problem: HTTP status and problem code of an extension's error.
    """

    problem: ClassVar[tuple[int, str] | None] = None


class SettingsError(ServiceError):
    """A setting has a value that is not allowed; raised at start-up only."""


class MalformedRequest(ServiceError):
    """The framing or the multipart form of the request is invalid."""


class Unauthorized(ServiceError):
    """The API key is missing or wrong."""


class Forbidden(ServiceError):
    """The request is not allowed here, with any key."""


class UnknownHost(ServiceError):
    """The request names a host that is not this service's."""


class NotFound(ServiceError):
    """The path is unknown, or an id is unknown or expired."""


class UnknownModel(NotFound):
    """The name of the model is unknown."""


class MethodNotAllowed(ServiceError):
    """The path does not support the method; `allowed` are the methods that it supports."""

    def __init__(self, message: str, allowed: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.allowed = tuple(allowed)


class NotAcceptable(ServiceError):
    """The request accepts no media type of the answer."""


class PreconditionFailed(ServiceError):
    """The request has `If-Match` or a similar header, but resources do not have versions."""


class ExpectationFailed(ServiceError):
    """The request expects something other than `100-continue`."""


class RequestTimeout(ServiceError):
    """The body did not arrive before the request's deadline."""


class SwapUnderWay(ServiceError):
    """Another checkpoint is already being loaded."""


class DefaultModel(ServiceError):
    """The default model cannot be deleted or unloaded, because requests may omit a model's name."""


class NameTaken(ServiceError):
    """Two models, or a model and a head, cannot have the same name."""


class CheckpointRefused(ServiceError):
    """The new checkpoint cannot be served; the old one stays."""


class UploadTooLarge(ServiceError):
    """A file or the whole body has more bytes than allowed."""


class TooManyImages(ServiceError):
    """The request has more files than allowed."""


class TooManyRequests(ServiceError):
    """The API key has reached its limit of requests in flight."""

    retry_after = 1


class UnsupportedMediaType(ServiceError):
    """The body cannot hold an image."""


class InvalidParameter(ServiceError):
    """A query parameter is out of range or does not apply."""


class MissingImage(ServiceError):
    """The body is empty, or lacks a part named `file`."""


class InferenceFailed(ServiceError):
    """The model failed on this image; it may have answered others of the batch."""


class Unavailable(ServiceError):
    """The service cannot take the request now.

    A retry after `retry_after` seconds may succeed; None: a retry does not help.
    """

    retry_after: int | None = 1


class QueueFull(Unavailable):
    """All slots are taken: of the service, a caller, a lane or the batch queue."""


class ReceivingFull(Unavailable):
    """The bodies being received, the unread answers, or the connections have reached a limit."""


class EngineUnavailable(Unavailable):
    """No engine is ready: all are loading, or have failed."""

    retry_after: int | None = 5


class ModelFailed(EngineUnavailable):
    """The model could not be loaded; the service tries again only after a change to it."""

    retry_after = None


class ModelLoading(Unavailable):
    """The model is still loading at the request's deadline, or too many requests wait for it."""

    retry_after = 2


class ModelsFull(Unavailable):
    """The memory is full of models that are in use or were loaded recently."""

    def __init__(self, message: str = "", retry_after: int = 5) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Draining(Unavailable):
    """The process is ending and does not accept new work."""

    retry_after = 5


class DeadlineExceeded(ServiceError):
    """The request's deadline passed before its image was computed."""


class ClientDisconnected(ServiceError):
    """The caller disconnected before the answer."""
