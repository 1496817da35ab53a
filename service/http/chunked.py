"""The chunks of a body (RFC 9112, section 7.1).

    5 CR LF hello CR LF     a size in hexadecimal digits, and as many bytes of content
    0 CR LF                 the last chunk
    Expires: now CR LF      trailers, if any
    CR LF

Extensions of a size, and trailers, are checked and dropped. A proxy that reads a line in another
way would see other requests. So a line must end with CR LF, and no trailer may state a length.
"""

import re
from typing import Final

from service.errors import MalformedRequest

# Chunks that are parsed before the event loop serves other connections.
_CHUNKS_AT_ONCE: Final = 512

# Framing of a chunk of 16 to 255 bytes: two digits, and two line ends.
_SMALL_CHUNK_FRAMING_BYTES: Final = 6

# Longest line of a chunk's size, extensions included, or of a trailer. Each read parses it anew.
_MAX_LINE_BYTES: Final = 1000

_TEXT: Final = rb"[\t\x20-\x7e\x80-\xff]*"
_SIZE: Final = rb"([0-9A-Fa-f]{1,15})(?:;%b)?" % _TEXT
_SIZE_LINE: Final = re.compile(_SIZE + rb"\r\n")
_BEGIN_OF_SIZE_LINE: Final = re.compile(rb"(?:%b\r?)?" % _SIZE)
_TRAILER: Final = re.compile(rb"(?:([!#$%%&'*+\-.^_`|~0-9A-Za-z]+):%b)?\r\n" % _TEXT)

_FRAMING_FIELDS: Final = (b"content-length", b"transfer-encoding")


class ChunkedBody:
    """Parses a chunked body, piece by piece.

    Attributes:
        framing_bytes: number of parsed bytes that are not content.
        is_complete: whether the body has ended.
        is_paused: whether `take` left chunks for the event loop's next iteration.
    """

    def __init__(self) -> None:
        self.framing_bytes = 0
        self.is_complete = False
        self.is_paused = False
        self._content_bytes = 0
        self._left = 0  # bytes of the current chunk that are to arrive, with its line end
        self._has_trailers = False

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        """Return the content in received bytes, and the bytes to pass again with further ones.

        Raises:
            MalformedRequest: the bytes are not chunks, or mostly framing.
        """
        parts: list[bytes] = []
        at = 0
        self.is_paused = True
        for _ in range(_CHUNKS_AT_ONCE):
            begin = at
            at = self._take_trailer(data, at) if self._has_trailers else self._take(data, at, parts)
            if at == begin or self.is_complete:
                self.is_paused = False
                break
        content = b"".join(parts)
        self._content_bytes += len(content)
        most_chunks = 64 + self._content_bytes // 32
        if self.framing_bytes > _SMALL_CHUNK_FRAMING_BYTES * most_chunks:
            raise MalformedRequest(
                "more than 32 chunks per KiB of the body: send larger chunks, or a Content-Length"
            )
        return content, data[at:]

    def _take(self, data: bytes, at: int, parts: list[bytes]) -> int:
        """Take a chunk, or a part of one, at a position, and return its end."""
        if not self._left:
            line = _SIZE_LINE.match(data, at, at + _MAX_LINE_BYTES)
            if line is None:
                _require_begin(data[at : at + _MAX_LINE_BYTES + 1])
                return at
            size = int(line[1], 16)
            self.framing_bytes += line.end() - at + 2  # with the end of the line after the content
            at = line.end()
            end = at + size
            if not size:
                self._has_trailers = True
                return at
            if data[end : end + 2] == b"\r\n":
                parts.append(data[at:end])
                return end + 2
            self._left = size + 2
        content = data[at : at + self._left - 2]
        parts.append(content)
        at += len(content)
        self._left -= len(content)
        line_end = data[at : at + 2]
        if self._left > 2 or line_end == b"\r":
            return at
        if line_end and line_end != b"\r\n":
            raise MalformedRequest("a chunk is longer than its size, or does not end with CR LF")
        self._left -= len(line_end)
        return at + len(line_end)

    def _take_trailer(self, data: bytes, at: int) -> int:
        """Drop a trailer, or take the empty line that ends the body, and return its end."""
        line = _TRAILER.match(data, at, at + _MAX_LINE_BYTES)
        if line is not None:
            if (line[1] or b"").lower() in _FRAMING_FIELDS:
                raise MalformedRequest(f"{line[1].decode()} as a trailer: send it as a header")
            self.framing_bytes += line.end() - at
            self.is_complete = line[0] == b"\r\n"
            return line.end()
        if b"\n" in data[at:] or len(data) - at > _MAX_LINE_BYTES:
            raise MalformedRequest(
                f"a trailer is not NAME: VALUE, or has more than {_MAX_LINE_BYTES} bytes"
            )
        return at


def _require_begin(line: bytes) -> None:
    """Raise `MalformedRequest` unless bytes may begin the line of a chunk's size."""
    if len(line) > _MAX_LINE_BYTES or not _BEGIN_OF_SIZE_LINE.fullmatch(line):
        raise MalformedRequest(
            f"the size of a chunk is not hexadecimal, or has more than {_MAX_LINE_BYTES} bytes"
        )
