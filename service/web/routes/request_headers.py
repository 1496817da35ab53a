"""Request headers that a route must heed: each has its effect, or is refused with the remedy."""

from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import Final

from service.errors import ExpectationFailed, MalformedRequest, NotAcceptable, PreconditionFailed
from service.http.application import Header

_DEMANDS: Final = frozenset(
    [
        "content-range",
        "expect",
        "if-match",
        "if-none-match",
        "x-http-method",
        "x-http-method-override",
        "x-method-override",
    ]
)
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
        MalformedRequest: the body is a part of a file, or a header names another media type or
            method.
    """
    sent: dict[str, list[str]] = {}
    for header, value in headers:
        if header in _CHECKED:
            sent.setdefault(header.decode(), []).append(value.decode("latin-1").strip())
    if "accept" in sent and media_types:
        require_acceptable(", ".join(sent["accept"]), media_types)
    if len(set(sent.get("content-type", ()))) > 1:
        raise MalformedRequest(f"Content-Type: {sent['content-type']!s:.100}: send one")
    for name, values in sent.items():
        if name in _DEMANDS and values[0]:
            _check_demand(name, values[0], method)


def _check_demand(name: str, value: str, method: str) -> None:
    """Refuse a demand that this service does not fulfil; raises as `check_headers`."""
    if name == "expect":
        if value.lower() != "100-continue":
            raise ExpectationFailed(f"Expect: {value!r:.50} is unknown; only 100-continue is met")
    elif name == "content-range":
        raise MalformedRequest(
            "Content-Range: parts of a file are not put together; send the whole file without it"
        )
    elif name == "if-match":
        if value != "*":
            raise PreconditionFailed("If-Match: resources have no versions here; leave it out")
    elif name == "if-none-match":
        if value == "*" and method not in ("GET", "HEAD"):
            raise PreconditionFailed(
                "If-None-Match: *: this service replaces what exists; look it up first"
            )
    elif value.upper() != method:
        raise MalformedRequest(f"{name}: {value!r:.50}: send it as the method of the request")


def require_acceptable(accept: str, media_types: Collection[str], remedy: str = "") -> None:
    """Raise `NotAcceptable` if an `Accept` header excludes all media types."""
    if not any(_accepts(accept, media_type) for media_type in media_types):
        raise NotAcceptable(
            f"Accept: {accept!r:.100} excludes the answer, which is "
            f"{' or '.join(sorted(media_types))}{remedy}"
        )


@lru_cache(maxsize=256)
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
                quality = _number(value)
        if media_range:
            qualities[media_range] = max(quality, qualities.get(media_range, 0.0))
    main_type = media_type.partition("/")[0]
    for media_range in (media_type, f"{main_type}/*", "*/*"):
        if media_range in qualities:
            return qualities[media_range] > 0
    return not qualities


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 1.0
