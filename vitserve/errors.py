"""The errors of a client. Each kind of refusal that a program treats differently has a type of its own.

ClientError
  Unreachable          no answer came: nobody listens, the connection broke, or the time was up
  ForeignAnswer        something answered that is not vitserve
  ProblemError         the service refused the request with a problem document
    Unauthorized         the key is missing or wrong
    NotFound             the id or the path is unknown
    ImageRefused         the picture cannot be used; others can
    InvalidParameter     an option is not one that this model or service has
    InferenceFailed      the model gave no answer for this picture
    DeadlineExceeded     the service did not get to it in time
    ModelFailed          the model could not be loaded: another try is in vain
    Unavailable          the service cannot take it now; the client has tried again already
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
        has_proxy: whether the environment puts a proxy before the service; the message names it then.
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


class Unauthorized(ProblemError):
    """The key is missing or wrong."""


class NotFound(ProblemError):
    """The path is unknown, or the id is unknown or has expired."""


class ImageRefused(ProblemError):
    """The picture is too large, of a kind that is not allowed, or does not decode."""


class InvalidParameter(ProblemError):
    """An option is not one that this model or service has."""


class InferenceFailed(ProblemError):
    """The model gave no answer for this picture."""


class DeadlineExceeded(ProblemError):
    """The body did not arrive, or the picture was not computed, within the service's time."""


class ModelFailed(ProblemError):
    """The model could not be loaded; `GET /models` has the reason. Another try is in vain until somebody mends it."""


class Unavailable(ProblemError):
    """The service cannot take the request now: it is full, starting or ending."""


_BY_CODE: Mapping[str, type[ProblemError]] = {
    "unauthorized": Unauthorized,
    "not_found": NotFound,
    "upload_too_large": ImageRefused,
    "image_too_large": ImageRefused,
    "unsupported_media_type": ImageRefused,
    "image_too_costly": ImageRefused,
    "invalid_image": ImageRefused,
    "invalid_parameter": InvalidParameter,
    _MODEL_FAILED: ModelFailed,
    "inference_failed": InferenceFailed,
    "request_timeout": DeadlineExceeded,
    "deadline_exceeded": DeadlineExceeded,
}


def error_of(response: httpx.Response) -> ClientError:
    """Return the error that a response without success stands for."""
    text = response.headers.get("retry-after", "")
    retry_after = int(text[:_MAX_DIGITS]) if text.isdecimal() else None
    try:
        problem = ProblemDocument.model_validate_json(response.content)
    except ValidationError:
        message = f"{response.status_code} from {response.url}, which is no answer of vitserve"
        return ForeignAnswer(message, response.status_code, retry_after)
    kind = _BY_CODE.get(problem.code, Unavailable if problem.status in _TEMPORARY else ProblemError)
    return kind(problem, retry_after)
