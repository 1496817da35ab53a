"""A problem document as the bytes of an HTTP answer, for requests that never reach the application."""

from __future__ import annotations

from collections.abc import Iterable

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from service.web.problems import MEDIA_TYPE, Problem, body

Header = tuple[bytes, bytes]


def raw_answer(problem: Problem, request_id: str, headers: Iterable[Header]) -> bytes:
    """Return the answer to a request, with `headers` besides those that the problem has."""
    content = body(problem, request_id)
    lines = [STATUS_LINE[problem.status]]
    for name, value in (
        *headers,
        (b"content-type", MEDIA_TYPE.encode()),
        (b"content-length", str(len(content)).encode()),
        (b"x-request-id", request_id.encode()),
        *((name.lower().encode(), value.encode()) for name, value in problem.headers.items()),
    ):
        lines += [name, b": ", value, b"\r\n"]
    return b"".join([*lines, b"\r\n", content])
