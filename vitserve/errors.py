"""The errors of a client: a type for each kind of status, with subtypes for important codes.

ClientError
  Unreachable          nothing answered: no listener, a broken connection, or a timeout
  ForeignAnswer        another server than vitserve answered
  ProblemError         the service refused the request with a problem document
    InvalidRequest       other 4xx, such as 400 and 422: this request would be refused again
      ImageRefused         the picture cannot be used; others can
      InvalidParameter     this model or service does not accept an option
    Unauthorized         401: the key is missing or wrong
    Forbidden            403: the key may not do this
    NotFound             404: the path or the id is unknown
      UnknownModel         the name of the model is unknown
    Conflict             409: the state of a model or head does not allow the request
    DeadlineExceeded     408, 504: the service missed its deadline
    ServiceFailed        500: the service failed on this request
      InferenceFailed      the model failed on this picture
    Unavailable          429, 503: temporarily refused, also after the client's retries
      ModelFailed          the model could not be loaded: a retry does not help
"""

from collections.abc import Mapping
from typing import Any

import httpx
from pydantic import ValidationError

from vitserve.documents import ProblemDocument

_TEMPORARY_STATUSES = (429, 503)

_MODEL_FAILED = "model_failed"
"""The code of a problem that lasts, despite its temporary status."""

_MAX_DIGITS = 9
"""Digits that are read of Retry-After."""


class ClientError(Exception):
    """The service did not answer the request.

    Attributes:
        temporary: whether the same request may succeed later.
        retry_after: seconds to wait until then, if the service named them.
    """

    temporary = False
    retry_after: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Subclasses have other arguments than Exception's, which pickle and copy would pass.
        return _restored, (type(self), self.args), self.__dict__


def _restored(kind: type[ClientError], args: tuple[Any, ...]) -> ClientError:
    return kind.__new__(kind, *args)


_TLS_REMEDIES = {
    "WRONG_VERSION_NUMBER": "; the server may not speak https: use http://",
    "CERTIFICATE_VERIFY_FAILED": "; SSL_CERT_FILE can name the certificate of its authority",
}
"""Remedies by a part of OpenSSL's message."""


class Unreachable(ClientError, httpx.TransportError):
    """The service at `address` did not answer; the error of httpx is the `__cause__`.

    A timeout is not temporary, because the server may still be working on the request.

    Attributes:
        never_connected: whether the connection failed, to the service or to its proxy.
        has_remedy: whether the message has a remedy, for a proxy of the environment or for TLS.
    """

    def __init__(self, error: httpx.TransportError, address: httpx.URL, through: str = "") -> None:
        named = str(address.copy_with(userinfo=b"")).rstrip("/")
        for part, remedy in _TLS_REMEDIES.items():
            if part in str(error):
                through += remedy
        super().__init__(f"{named}: {str(error) or type(error).__name__}{through}")
        self.__cause__ = error
        self.has_remedy = bool(through)
        self.temporary = isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError)
        self.never_connected = isinstance(error, httpx.ConnectError)


class ForeignAnswer(ClientError):
    """Another server than vitserve answered, for example a proxy."""

    def __init__(self, message: str, status: int, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        self.temporary = status in _TEMPORARY_STATUSES


class ProblemError(ClientError):
    """The service refused the request with `problem`; `code` and `status` are attributes too."""

    def __init__(self, problem: ProblemDocument, retry_after: int | None) -> None:
        super().__init__(f"{problem.status} {problem.code}: {problem.detail}")
        self.problem = problem
        self.status = problem.status
        self.code = problem.code
        self.retry_after = retry_after
        self.temporary = self.status in _TEMPORARY_STATUSES and self.code != _MODEL_FAILED


class InvalidRequest(ProblemError):
    """The request is wrong, and would be refused again."""


class ImageRefused(InvalidRequest):
    """The picture is too large, of a kind that is not allowed, or does not decode."""


class InvalidParameter(InvalidRequest):
    """This model or service does not accept an option."""


class Unauthorized(ProblemError):
    """The key is missing or wrong."""


class Forbidden(ProblemError):
    """The key may not do this, or the service does not offer it."""


class NotFound(ProblemError):
    """The path is unknown, or the id is unknown or has expired."""


class UnknownModel(NotFound):
    """The name of the model is unknown."""


class Conflict(ProblemError):
    """The state of a model or of a head does not allow the request."""


class DeadlineExceeded(ProblemError):
    """The body did not arrive, or the picture was not computed, within the service's time."""


class ServiceFailed(ProblemError):
    """The service failed on this request."""


class InferenceFailed(ServiceFailed):
    """The model failed on this picture."""


class Unavailable(ProblemError):
    """The service cannot take the request now: it is full, starting or ending."""


class ModelFailed(Unavailable):
    """The model could not be loaded; a retry does not help. `GET /models` has the reason."""


_BY_STATUS: Mapping[int, type[ProblemError]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    408: DeadlineExceeded,
    409: Conflict,
    429: Unavailable,
    503: Unavailable,
    504: DeadlineExceeded,
}

# Each type is a subclass of its status's type.
_BY_CODE: Mapping[str, type[ProblemError]] = {
    "unknown_model": UnknownModel,
    "upload_too_large": ImageRefused,
    "image_too_large": ImageRefused,
    "unsupported_media_type": ImageRefused,
    "image_too_costly": ImageRefused,
    "invalid_image": ImageRefused,
    "invalid_parameter": InvalidParameter,
    "inference_failed": InferenceFailed,
    _MODEL_FAILED: ModelFailed,
}


def _kind_of(problem: ProblemDocument) -> type[ProblemError]:
    """Return the error type for a problem's code, else for its status."""
    if problem.code in _BY_CODE:
        return _BY_CODE[problem.code]
    if problem.status in _BY_STATUS:
        return _BY_STATUS[problem.status]
    return InvalidRequest if problem.status < 500 else ServiceFailed


def error_of(response: httpx.Response) -> ClientError:
    """Return the error for an unsuccessful response."""
    text = response.headers.get("retry-after", "")
    retry_after = int(text[:_MAX_DIGITS]) if text.isdecimal() else None
    try:
        problem = ProblemDocument.model_validate_json(response.content)
    except ValidationError:
        message = f"{response.status_code} from {response.url}, which is not an answer of vitserve"
        if response.has_redirect_location:
            message += f"; it leads to {response.headers['location']}"
        return ForeignAnswer(message, response.status_code, retry_after)
    return _kind_of(problem)(problem, retry_after)
