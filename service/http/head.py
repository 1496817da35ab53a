"""What RFC 9112 and RFC 9110 ask of a request's head beyond what the parser refuses."""

from __future__ import annotations

import re
from collections.abc import Iterable

from service.errors import ExpectationFailed, HttpVersionNotSupported, MalformedRequest, UnsupportedTransferCoding

# A name, an IPv4 or bracketed IPv6 address, and a port; a target without a host has an empty one.
_HOST = re.compile(rb"(?:[\w.~!$&'()*+,;=%-]*|\[[0-9A-Fa-f:.]+\])(?::\d*)?", re.ASCII)

DISCARDED_BYTES = 1 << 20
"""Length of a body that is worth reading to its end after a refusal: a new connection costs both sides more."""


def check_head(version: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Check the protocol's version and the headers, names in lower case, that say how to read a request.

    Raises:
        HttpVersionNotSupported: it is neither HTTP/1.1 nor HTTP/1.0.
        MalformedRequest: not one valid Host, or a body framed as no sender may.
        UnsupportedTransferCoding: a body that is more than chunked.
        ExpectationFailed: an expectation other than 100-continue.
    """
    if version not in ("1.1", "1.0"):
        raise HttpVersionNotSupported(f"HTTP/{version}: this server speaks HTTP/1.1")
    old = version == "1.0"
    hosts, codings, expectation = [], [], b"100-continue"
    for name, value in headers:
        if name == b"host":
            hosts.append(value.strip())
        elif name == b"transfer-encoding":
            codings += [coding.strip().lower() for coding in value.split(b",")]
        elif name == b"expect" and not old:
            expectation = value.strip().lower()
    if len(hosts) > 1 or (not hosts and not old):
        raise MalformedRequest(f"{len(hosts)} Host headers: expected one")
    if hosts and _HOST.fullmatch(hosts[0]) is None:
        raise MalformedRequest("the Host header names no host")
    if codings and old:
        raise MalformedRequest("Transfer-Encoding needs HTTP/1.1")
    if codings and (codings.count(b"chunked") > 1 or codings[-1] != b"chunked"):
        raise MalformedRequest("Transfer-Encoding: chunked comes last, and once")
    if len(codings) > 1:
        raise UnsupportedTransferCoding("Transfer-Encoding: only chunked is understood")
    if expectation != b"100-continue":
        raise ExpectationFailed("Expect: only 100-continue can be met")


def may_discard(version: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether the connection can go on after a refusal, with the rest of the body read and thrown away.

    Its end must be known and near, and its sender must be certain to send it. A sender that asked first
    (`Expect: 100-continue`) may send it or not once it is refused.
    """
    length = b"0"
    for name, value in headers:
        if name == b"content-length":
            length = value
        elif name in (b"transfer-encoding", b"expect") or (name == b"connection" and value.lower() != b"keep-alive"):
            return False
    return version == "1.1" and int(length) <= DISCARDED_BYTES
