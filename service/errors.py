"""The errors of a request, as types. They know no HTTP: `service.web.problems` maps them.

Errors of the picture itself come from `model.errors`.
"""

from collections.abc import Iterable


class ServiceError(Exception):
    """Base of the service's own errors. The message is for the caller."""


class SettingsError(ServiceError):
    """A setting has a value that is not allowed; raised at start-up only."""


class MalformedRequest(ServiceError):
    """The request breaks its framing or its multipart form."""


class Unauthorized(ServiceError):
    """The API key is missing or wrong."""


class Forbidden(ServiceError):
    """The request is not allowed here, with whatever key."""


class UnknownHost(ServiceError):
    """The request names a host that is not this service's."""


class NotFound(ServiceError):
    """The path is unknown, or an id is unknown or expired."""


class UnknownModel(NotFound):
    """There is no model of this name."""


class MethodNotAllowed(ServiceError):
    """The path exists, the method on it does not; `allowed` are those that it has."""

    def __init__(self, message: str, allowed: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.allowed = tuple(allowed)


class RequestTimeout(ServiceError):
    """The body did not arrive within the request's time."""


class SwapUnderWay(ServiceError):
    """A checkpoint is being loaded already."""


class DefaultModel(ServiceError):
    """The default model is neither deleted nor unloaded: who names no model asks it."""


class HeadFull(ServiceError):
    """There are as many heads as may be, or this one has as many labels or examples as it may."""


class HeadWithoutBackbone(ServiceError):
    """The backbone that a head was taught on is not served, or is not that of the examples."""


class HeadWithoutExamples(ServiceError):
    """A head has too few examples to be fitted."""


class NameTaken(ServiceError):
    """Two models, or a model and a head, cannot have the same name."""


class CheckpointRefused(ServiceError):
    """The checkpoint that was to take over cannot be served; the old one goes on."""


class UploadTooLarge(ServiceError):
    """A file or the whole body has more bytes than allowed."""


class TooManyImages(ServiceError):
    """The request has more files than allowed."""


class TooManyRequests(ServiceError):
    """The API key has as many requests in flight as it may."""

    retry_after = 1


class UnsupportedMediaType(ServiceError):
    """The body is of a kind that holds no image."""


class InvalidParameter(ServiceError):
    """A query parameter is out of range or does not apply."""


class MissingImage(ServiceError):
    """The body is empty, or no part of it is named `file`."""


class InferenceFailed(ServiceError):
    """The model gave no answer for this image; others of its batch may have one."""


class Unavailable(ServiceError):
    """The service cannot take the request now; after `retry_after` seconds another try may do
    better, if not None.
    """

    retry_after: int | None = 1


class QueueFull(Unavailable):
    """Every place in the service is taken."""


class ReceivingFull(Unavailable):
    """There is no memory for more of this body beside all others, or no connection is free."""


class EngineUnavailable(Unavailable):
    """No engine is ready: it is loading, or it failed."""

    retry_after: int | None = 5


class ModelFailed(EngineUnavailable):
    """The model could not be loaded, and is not tried again until somebody changes it: another try
    is in vain.
    """

    retry_after = None


class ModelLoading(Unavailable):
    """The model is being loaded; as many requests wait for it as may, or this one has waited for
    all of its time.
    """

    retry_after = 2


class ModelsFull(Unavailable):
    """There is no memory for the model beside those that are in use, or were loaded a short time
    ago.
    """

    def __init__(self, message: str = "", retry_after: int = 5) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class HeadsUnavailable(Unavailable):
    """What is taught cannot be read or written: a full disk, a folder that is gone or locked."""

    retry_after = 5


class Draining(Unavailable):
    """The process is about to end and takes no new work."""

    retry_after = 5


class DeadlineExceeded(ServiceError):
    """The request's time was up before its image was launched."""


class ClientDisconnected(ServiceError):
    """The caller went away; nobody is left to answer."""
