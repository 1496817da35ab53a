"""The errors of a request, as types. They know no HTTP: `service.web.problems` maps them.

    ServiceError
      SettingsError           start-up only
      MalformedRequest        broken multipart or framing
      Unauthorized
      NotFound                unknown path, or an id unknown or expired
      MethodNotAllowed
      RequestTimeout          the body did not arrive in time
      UploadTooLarge          too many bytes, in one file or in the body
      TooManyImages
      UnsupportedMediaType    a body of a kind that holds no image
      InvalidParameter        a query parameter out of range
      MissingImage            an empty body, or no part named `file`
      InferenceFailed         this image failed, its neighbours did not
      Unavailable             try again later
        QueueFull
        EngineUnavailable
        Draining
      DeadlineExceeded        the time was up before the image was launched

Errors of the picture itself come from `model.errors`.
"""

from __future__ import annotations

from collections.abc import Iterable


class ServiceError(Exception):
    """Root of the service's own errors. The message is for the caller."""


class SettingsError(ServiceError):
    """A setting with a value that is not allowed."""


class MalformedRequest(ServiceError):
    """The request breaks the form that its headers promise."""


class Unauthorized(ServiceError):
    """The API key is missing or wrong."""


class NotFound(ServiceError):
    """Nothing is there."""


class MethodNotAllowed(ServiceError):
    """The path exists, the method on it does not.

    Attributes:
        allowed: the methods that the path has.
    """

    def __init__(self, message: str, allowed: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.allowed = tuple(allowed)


class RequestTimeout(ServiceError):
    """The body did not arrive within the request's time."""


class UploadTooLarge(ServiceError):
    """More bytes than allowed."""


class TooManyImages(ServiceError):
    """More files than allowed in one request."""


class UnsupportedMediaType(ServiceError):
    """A body of a kind that holds no image."""


class InvalidParameter(ServiceError):
    """A query parameter that is out of range or does not apply."""


class MissingImage(ServiceError):
    """A well-formed request without a picture in it."""


class InferenceFailed(ServiceError):
    """The model gave no answer for this image."""


class Unavailable(ServiceError):
    """The service cannot take the request now.

    Attributes:
        retry_after: seconds after which another try may do better.
    """

    retry_after = 1


class QueueFull(Unavailable):
    """Every place in the service is taken."""


class EngineUnavailable(Unavailable):
    """No engine is ready: it is loading, or it failed."""

    retry_after = 5


class Draining(Unavailable):
    """The process is about to end and takes no new work."""

    retry_after = 5


class DeadlineExceeded(ServiceError):
    """The request's time was up before its image was launched."""


class ClientDisconnected(ServiceError):
    """The caller went away; nobody is left to answer."""
