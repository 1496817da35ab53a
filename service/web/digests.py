"""Digests of a body that its request headers declare (RFC 9530, and the older forms)."""

import base64
import hashlib
import hmac
import re
from collections.abc import Iterable
from typing import Any, Final

from service.errors import MalformedRequest
from service.http.application import Header

_ALGORITHMS: Final = {"sha-256": "sha256", "sha-512": "sha512", "sha": "sha1", "md5": "md5"}
HEADERS: Final = frozenset([b"content-md5", b"digest", b"content-digest", b"repr-digest"])
"""Request headers that declare digests."""

_MAX_DIGESTS: Final = 4  # each costs the event loop as much as receiving the body
_MAX_CHARACTERS: Final = 1000
_DIGEST: Final = re.compile(r"\s*([A-Za-z0-9-]{1,20})\s*=\s*:?([A-Za-z0-9+/]{1,120}={0,2}):?\s*")


class DeclaredDigests:
    """The digests of an arriving body, and the digests that its request headers declare.

    Raises:
        MalformedRequest: a header has another form, or names no known algorithm.
    """

    def __init__(self, headers: Iterable[Header]) -> None:
        self._declared: list[tuple[str, bytes, Any]] = []
        for header, value in headers:
            if header in HEADERS:
                self._declare(header.decode(), value.decode("latin-1"))

    def _declare(self, header: str, value: str) -> None:
        if len(value) > _MAX_CHARACTERS:
            raise MalformedRequest(f"{header}: more than {_MAX_CHARACTERS} characters")
        texts = [f"md5={value.strip()}"] if header == "content-md5" else value.split(",")
        matches = [_DIGEST.fullmatch(text) for text in texts]
        known = [match for match in matches if match and match[1].lower() in _ALGORITHMS]
        if not known:
            raise MalformedRequest(f"{header}: expected base64 of {', '.join(_ALGORITHMS)}")
        if len(self._declared) + len(known) > _MAX_DIGESTS:
            raise MalformedRequest(f"{header}: more than {_MAX_DIGESTS} digests: send one")
        for match in known:
            digest = hashlib.new(_ALGORITHMS[match[1].lower()], usedforsecurity=False)
            self._declared.append((header, _decoded(match[2]), digest))

    def add(self, part: bytes, *, is_last: bool) -> None:
        """Add a part of the body; raises `MalformedRequest` at the end if a digest differs."""
        for header, declared, digest in self._declared:
            digest.update(part)
            if is_last and not hmac.compare_digest(digest.digest(), declared):
                raise MalformedRequest(f"{header}: the body that arrived has another digest")


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text)
    except ValueError:
        return b""  # no digest
