"""The chunks of a body, and how small they may be."""

import pytest

from service.errors import MalformedRequest
from service.http.chunked import ChunkedBody


def test_32_chunks_per_kib_are_allowed() -> None:
    chunk = b"20\r\n" + bytes(32) + b"\r\n"
    chunks = ChunkedBody()
    content, rest = chunks.take(400 * chunk + b"0\r\n\r\n")
    assert (content, rest, chunks.is_complete) == (bytes(400 * 32), b"", True)


@pytest.mark.parametrize("start", [b"1;", b"0\r\nX:"], ids=["size", "trailer"])
def test_a_long_line_is_refused_however_cut(start: bytes) -> None:
    line = start + 1000 * b"x" + b"\r\n"
    for cut in (len(line), 990):
        body = ChunkedBody()
        with pytest.raises(MalformedRequest, match="1000 bytes"):
            _, rest = body.take(line[:cut])
            body.take(rest + line[cut:])
