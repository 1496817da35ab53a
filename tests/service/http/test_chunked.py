"""The chunks of a body, and how small they may be."""

from service.http.chunked import ChunkedBody


def test_32_chunks_per_kib_are_allowed() -> None:
    chunk = b"20\r\n" + bytes(32) + b"\r\n"
    chunks = ChunkedBody()
    content, rest = chunks.take(400 * chunk + b"0\r\n\r\n")
    assert (content, rest, chunks.is_complete) == (bytes(400 * 32), b"", True)
