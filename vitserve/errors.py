"""The errors of a client: a type for each kind of status, and below it one for each code that
programs tell apart.

ClientError
  Unreachable          no answer came: nobody listens, the connection broke, or the time was up
  ForeignAnswer        something answered that is not vitserve
  ProblemError         the service refused the request with a problem document
    InvalidRequest       400, 405, 413, 415, 421, 422: this request would be refused again
      ImageRefused         the picture cannot be used; others can
      InvalidParameter     an option is not one that this model or service has
    Unauthorized         401: the key is missing or wrong
    Forbidden            403: the key may not do this
    NotFound             404: the path or the id is unknown
      UnknownModel         the service has no model of this name
    Conflict             409: the state of a model or of a head does not allow it
    DeadlineExceeded     408, 504: the service did not get to it in time
    ServiceFailed        500: the service failed on this request
      InferenceFailed      the model gave no answer for this picture
    Unavailable          429, 503: the service cannot take it now; the client has tried again already
      ModelFailed          the model could not be loaded: another try is in vain
"""

from collections.abc import Mapping

import httpx
from pydantic import ValidationError

from vitserve.documents import ProblemDocument

# Statuses that say: later.
_TEMPORARY = (429, 503)

# Of these, the code of a problem that lasts.
_MODEL_FAILED = "model_failed"

# Of the seconds in Retry-After; more are no time that anybody waits.
_MAX_DIGITS = 9


class ClientError(Exception):
    """The service could not be asked, or the answer is not one of vitserve.

    Attributes:
        temporary: whether the same request may succeed later.
        retry_after: the seconds to wait until then, if the answer named any.
    """

    temporary = False
    retry_after: int | None = None


class Unreachable(ClientError, httpx.TransportError):
    """No answer came from `address`; the error of httpx is its `__cause__`.

    A request whose time was up is not temporary: the server may be at work on it still.

    Attributes:
        never_connected: whether no connection was made, to the service or to a proxy before it.
        has_proxy: whether the environment puts a proxy before the service; the message names it
        then.
    """

    def __init__(self, error: httpx.TransportError, address: httpx.URL, through: str = "") -> None:
        named = str(address.copy_with(userinfo=b"")).rstrip("/")
        super().__init__(f"{named}: {str(error) or type(error).__name__}{through}")
        self.__cause__ = error
        self.has_proxy = bool(through)
        self.temporary = isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError)
        self.never_connected = isinstance(error, httpx.ConnectError)


class ForeignAnswer(ClientError):
    """Something answered that is not vitserve, a proxy for example."""

    def __init__(self, message: str, status: int, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after
        self.temporary = status in _TEMPORARY


class ProblemError(ClientError):
    """The service refused the request with `problem`; its `code` and `status` are attributes, too."""

    def __init__(self, problem: ProblemDocument, retry_after: int | None) -> None:
        super().__init__(f"{problem.status} {problem.code}: {problem.detail}")
        self.problem, self.status, self.code = problem, problem.status, problem.code
        self.retry_after = retry_after
        self.temporary = problem.status in _TEMPORARY and problem.code != _MODEL_FAILED


class InvalidRequest(ProblemError):
    """The request is wrong, and would be refused again."""


class ImageRefused(InvalidRequest):
    """The picture is too large, of a kind that is not allowed, or does not decode."""


class InvalidParameter(InvalidRequest):
    """An option is not one that this model or service has."""


class Unauthorized(ProblemError):
    """The key is missing or wrong."""


class Forbidden(ProblemError):
    """The key may not do this, or the service does not offer it."""


class NotFound(ProblemError):
    """The path is unknown, or the id is unknown or has expired."""


class UnknownModel(NotFound):
    """The service has no model of this name."""


class Conflict(ProblemError):
    """The state of a model or of a head does not allow the request."""


class DeadlineExceeded(ProblemError):
    """The body did not arrive, or the picture was not computed, within the service's time."""


class ServiceFailed(ProblemError):
    """The service failed on this request."""


class InferenceFailed(ServiceFailed):
    """The model gave no answer for this picture."""


class Unavailable(ProblemError):
    """The service cannot take the request now: it is full, starting or ending."""


class ModelFailed(Unavailable):
    """The model could not be loaded; `GET /models` has the reason. Another try is in vain until
    somebody mends it.
    """


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

# Each is a subclass of its status's type.
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
    """Return the type of a problem: by its code, else by its status."""
    if problem.code in _BY_CODE:
        return _BY_CODE[problem.code]
    if problem.status in _BY_STATUS:
        return _BY_STATUS[problem.status]
    return InvalidRequest if problem.status < 500 else ServiceFailed


def error_of(response: httpx.Response) -> ClientError:
    """Return the error that a response without success stands for."""
    text = response.headers.get("retry-after", "")
    retry_after = int(text[:_MAX_DIGITS]) if text.isdecimal() else None
    try:
        problem = ProblemDocument.model_validate_json(response.content)
    except ValidationError:
        message = f"{response.status_code} from {response.url}, which is no answer of vitserve"
        return ForeignAnswer(message, response.status_code, retry_after)
    return _kind_of(problem)(problem, retry_after)
