"""Request headers that must not be ignored; unmet demands are refused with the remedy."""

from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from typing import Final, NamedTuple

from service.errors import (
    ExpectationFailed,
    MalformedRequest,
    NotAcceptable,
    PreconditionFailed,
    ServiceError,
)
from service.http.application import Header


class _Demand(NamedTuple):
    """A demand of a request header.

    Attributes:
        is_met: takes the value in lower case and the method; returns whether the service fulfils
            the demand.
        error: type of the refusal.
        remedy: end of the refusal's message.
    """

    is_met: Callable[[str, str], bool]
    error: type[ServiceError]
    remedy: str


_METHOD: Final = _Demand(
    lambda value, method: value == method.lower(),
    MalformedRequest,
    "send it as the method of the request",
)
_WITHOUT_BODY: Final = ("GET", "HEAD", "DELETE")
_DEMANDS: Final = {
    "content-length": _Demand(
        lambda value, method: not value.strip("0") or method not in _WITHOUT_BODY,
        MalformedRequest,
        "a body has no effect on GET, HEAD and DELETE; leave it out, or send it by POST",
    ),
    "content-range": _Demand(
        lambda value, method: False,
        MalformedRequest,
        "parts of a file are not put together; send the whole file without it",
    ),
    "expect": _Demand(
        lambda value, method: value == "100-continue",
        ExpectationFailed,
        "only 100-continue is known",
    ),
    "if-match": _Demand(
        lambda value, method: value == "*" and method != "PUT",
        PreconditionFailed,
        "resources have no versions here, and PUT creates a missing one; leave it out",
    ),
    "if-none-match": _Demand(
        lambda value, method: value != "*" or method in ("GET", "HEAD"),
        PreconditionFailed,
        "this service replaces what exists; look it up first",
    ),
    "trailer": _Demand(
        lambda value, method: "digest" not in value and "md5" not in value,
        MalformedRequest,
        "send the digest as a header before the body",
    ),
    "x-http-method": _METHOD,
    "x-http-method-override": _METHOD,
    "x-method-override": _METHOD,
}
_MAX_ACCEPT_CHARACTERS: Final = 2000  # a longer header would take milliseconds to parse
_CHECKED: Final = frozenset([b"accept", b"content-type", *(name.encode() for name in _DEMANDS)])


def check_headers(headers: Iterable[Header], method: str, media_types: Collection[str]) -> None:
    """Refuse request headers whose demand this service does not fulfil.

    Headers that a server may ignore are ignored, such as `Range` and `Prefer`.

    Args:
        media_types: media types of the route's answers; empty if answers have no body.

    Raises:
        NotAcceptable: `Accept` excludes every media type.
        PreconditionFailed: the request depends on a version of the resource.
        ExpectationFailed: `Expect` is not `100-continue`.
        MalformedRequest: the body is a part of a file; the method takes no body; or headers name
            two media types, or another method.
    """
    accepted: list[str] = []
    content_types: list[str] = []
    for header, value in headers:
        if header not in _CHECKED:
            continue
        if header == b"content-type":
            content_types.append(value.decode("latin-1"))
        elif header == b"accept":
            accepted.append(value.decode("latin-1"))
        else:
            _check_demand(header.decode(), value.decode("latin-1").strip(), method)
    if len(set(content_types)) > 1:
        raise MalformedRequest(f"Content-Type: {' and '.join(content_types):.100}: send one")
    if accepted and media_types:
        require_acceptable(", ".join(accepted), media_types)


def _check_demand(name: str, value: str, method: str) -> None:
    demand = _DEMANDS[name]
    if value and not demand.is_met(value.lower(), method):
        raise demand.error(f"{name}: {value!r:.50}: {demand.remedy}")


def require_acceptable(accept: str, media_types: Collection[str], remedy: str = "") -> None:
    """Raise `NotAcceptable` if an `Accept` header excludes all media types."""
    if len(accept) > _MAX_ACCEPT_CHARACTERS:
        return
    if not any(_accepts(accept, media_type) for media_type in media_types):
        raise NotAcceptable(
            f"Accept: {accept!r:.100} excludes the answer, which is "
            f"{' or '.join(sorted(media_types))}{remedy}"
        )


@lru_cache(maxsize=64)
def _accepts(accept: str, media_type: str) -> bool:
    """Return whether an `Accept` header allows a media type; the closest range decides."""
    qualities: dict[str, float] = {}
    for part in accept.lower().split(","):
        media_range, *parameters = (text.strip() for text in part.split(";"))
        if media_range == "*":  # Java's client writes it
            media_range = "*/*"
        quality = 1.0
        for parameter in parameters:
            name, _, value = parameter.partition("=")
            if name.strip() == "q":
                quality = _quality(value)
        if media_range:
            qualities[media_range] = max(quality, qualities.get(media_range, 0.0))
    main_type = media_type.partition("/")[0]
    for media_range in (media_type, f"{main_type}/*", "*/*"):
        if media_range in qualities:
            return qualities[media_range] > 0
    return not qualities


def _quality(text: str) -> float:
    """Return a quality from 0 to 1; 1, the default, for any other text."""
    try:
        quality = float(text)
    except ValueError:
        return 1.0
    return quality if 0 <= quality <= 1 else 1.0
