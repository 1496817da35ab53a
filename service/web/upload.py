"""Read the files in a request's body, bounded at every step.

Nothing is written to disk, and nothing is kept of parts that are no file. A body that is too large is refused when the
limit is passed, not when its end is reached.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.datastructures import Headers
from starlette.types import Receive

from service.errors import (
    ClientDisconnected,
    MalformedRequest,
    MissingImage,
    ServiceError,
    TooManyImages,
    UnsupportedMediaType,
    UploadTooLarge,
)
from vitserve.documents import FIELD

RIGHT_CALL = f"curl -F {FIELD}=@photo.jpg URL, or curl --data-binary @photo.jpg URL"
"""How a picture is sent, for those who sent something else."""

# A body of nothing but tiny parts would cost the event loop a minute of parsing.
_MAX_OTHER_PARTS = 1000
_MAX_HEADER_PARAMETERS = 64

# The beginnings of a JPEG, and of a PNG without its line breaks.
_STRIPPED = (b"\xff\xd8\xff", b"\x89PNG\x1a")

_RIGHT_JSON = 'JSON is {"image": "BASE64"}, and nothing beside it'
_JSON_HEAD = re.compile(rb'\s{0,99}\{\s{0,99}"image"\s{0,99}:\s{0,99}"(?:data:[^,"]{0,200};base64,)?')
_JSON_TAIL = re.compile(rb"\s*\}\s*")
_MAX_JSON_FRAME = 1024

# What some encoders write for a plus, a slash and an equals sign, and the line breaks of MIME's base64.
_ESCAPE = re.compile(rb"\\(?:/|[nr]|u002[bBfF]|u003[dD]|u000[aAdD])")
_UNESCAPED = {
    b"/": b"/",
    b"n": b"",
    b"r": b"",
    b"u002b": b"+",
    b"u002f": b"/",
    b"u003d": b"=",
    b"u000a": b"",
    b"u000d": b"",
}
_LONGEST_ESCAPE = 6

UploadedFile = bytearray | UploadTooLarge
"""The bytes of one file, or the error that they are too many."""


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """Limits on the upload of one request: bytes in one file, bytes in the whole body, files, and their fields."""

    file_bytes: int
    body_bytes: int
    files: int
    fields: Collection[str] = (FIELD,)


async def read_files(
    headers: Headers, receive: Receive, limits: UploadLimits, on_further_file: Callable[[], None]
) -> list[UploadedFile]:
    """Return the files in a body: the raw picture, one in JSON, or at least one part named `file` of a multipart form.

    `on_further_file` is called before the second and each later file is read, and may refuse it.

    Raises:
        UploadTooLarge: the body, or the only file of a request, is too large.
        MissingImage: the body is empty, or no part is named `file`.
        UnsupportedMediaType: the body is other JSON, is declared as another kind of multipart, or as compressed; or it
            is what `curl -d` leaves of a picture.
        MalformedRequest: the multipart form or the base64 is broken.
        TooManyImages: there are more files than `limits.files`.
        ClientDisconnected: the caller went away.
    """
    kind, options = _options(headers.get("content-type", "").encode("latin-1"))
    multipart = kind == b"multipart/form-data"
    json = kind.endswith((b"/json", b"+json"))
    limit = limits.body_bytes if multipart or json else min(limits.file_bytes, limits.body_bytes)
    declared = _declared_length(headers, limit)
    refusal = _refusal(headers, kind, options.get(b"boundary"))
    if refusal is not None and declared:
        raise refusal
    form: _FormBody | _JsonBody | None = _JsonBody(limits) if json else None
    if multipart and refusal is None:
        form = _FormBody(options[b"boundary"], limits, on_further_file)
    raw = bytearray()
    try:
        await _feed(raw.extend if form is None else form.feed, _bounded(receive, limit), refusal, at_once=declared > 0)
        if kind == b"application/x-www-form-urlencoded" and _is_stripped(raw):
            raise UnsupportedMediaType(f"curl -d has taken bytes out of the picture, so send it by {RIGHT_CALL}")
        return [raw] if form is None else form.finish()
    except BaseException:
        # The error, and with it what its traceback holds, lives on while the rest of the body is discarded.
        raw.clear()
        if form is not None:
            form.clear()
        raise
    finally:
        if form is not None:
            form.close()


async def _feed(
    feed: Callable[[bytes], None], chunks: AsyncIterator[bytes], refusal: ServiceError | None, *, at_once: bool
) -> None:
    """Feed a body to a reader; raises `MissingImage` for an empty body, `refusal`, and what the reader raises.

    A refusal waits for the end of the body unless it is to be raised `at_once`: a body's size is checked before its
    form, and without a Content-Length only reading on shows it.
    """
    total = 0
    async for chunk in chunks:
        total += len(chunk)
        try:
            if refusal is None:
                feed(chunk)
        except (MalformedRequest, UnsupportedMediaType) as error:
            refusal = error
        if refusal is not None and at_once:
            raise refusal
    if not total:
        raise MissingImage(f"the body is empty: send a picture: {RIGHT_CALL}")
    if refusal is not None:
        raise refusal


async def read_whole(headers: Headers, receive: Receive, limit: int) -> bytearray:
    """Read a body of any form, at most `limit` bytes; raises as `read_files`."""
    _declared_length(headers, limit)
    if refusal := _compressed(headers, "body"):
        raise refusal
    body = bytearray()
    try:
        async for chunk in _bounded(receive, limit):
            body += chunk
        return body
    except BaseException:
        body.clear()  # see `read_files`
        raise


def _declared_length(headers: Headers, limit: int) -> int:
    """Return the Content-Length, 0 without the header; raises `UploadTooLarge` or `MalformedRequest`."""
    try:
        declared = int(headers.get("content-length", "0"))
    except ValueError:
        raise MalformedRequest("Content-Length is not a number") from None
    if declared > limit:
        raise UploadTooLarge(f"{declared} bytes: at most {limit} are allowed")
    return declared


def _compressed(headers: Headers, content: str) -> UnsupportedMediaType | None:
    """Return the error of a body that is declared as compressed, else None."""
    encoding = headers.get("content-encoding", "identity").lower()
    if encoding == "identity":
        return None
    return UnsupportedMediaType(f"Content-Encoding {encoding[:50]!r}: send the {content} as it is")


def _refusal(headers: Headers, kind: bytes, boundary: bytes | None) -> ServiceError | None:
    if compressed := _compressed(headers, "picture"):
        return compressed
    if kind == b"multipart/form-data":
        return None if boundary else MalformedRequest("multipart/form-data without a boundary")
    # Any other type says nothing: curl declares a form for `--data-binary`, so the picture's content decides.
    if kind.startswith(b"multipart/"):
        name = kind.decode("latin-1")[:100]
        return UnsupportedMediaType(f"Content-Type {name!r}: send the picture itself: {RIGHT_CALL}")
    return None


def _options(header: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    """Return a header's value and its parameters; raises `MalformedRequest` if it has very many.

    The time of the parser is quadratic in their number.
    """
    if header.count(b";") > _MAX_HEADER_PARAMETERS:
        raise MalformedRequest(f"a header with more than {_MAX_HEADER_PARAMETERS} parameters")
    return parse_options_header(header)


def _is_stripped(picture: bytearray) -> bool:
    """Return whether a body is a JPEG or PNG from which `curl -d` took every line break and NUL.

    Whole pictures hold NULs: the length of a JPEG's scan header is two bytes, of which the first is zero (ITU-T T.81,
    B.2.3), and so is that of a PNG's first chunk.
    """
    return picture.startswith(_STRIPPED) and not any(byte in picture for byte in (b"\0", b"\n", b"\r"))


async def _bounded(receive: Receive, limit: int) -> AsyncIterator[bytes]:
    total = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected("the caller went away")
        chunk: bytes = message.get("body", b"")
        total += len(chunk)
        if total > limit:
            raise UploadTooLarge(f"more than {limit} bytes")
        yield chunk
        if not message.get("more_body", False):
            return


class _JsonBody:
    """A body `{"image": "<base64 or data: URI>"}`, decoded as it arrives: its text is never held whole."""

    def __init__(self, limits: UploadLimits) -> None:
        self._file = bytearray()
        self._file_bytes = limits.file_bytes
        self._text = bytearray()
        self._feed: Callable[[], None] = self._head

    def feed(self, chunk: bytes) -> None:
        self._text += chunk
        self._feed()

    def finish(self) -> list[UploadedFile]:
        if self._feed != self._tail or not _JSON_TAIL.fullmatch(self._text):
            raise self._other_json()
        return [self._file]

    def clear(self) -> None:
        self._file.clear()
        self._text.clear()

    def close(self) -> None:
        """Let go of the method, which holds this object in a circle."""
        del self._feed

    def _head(self) -> None:
        match = _JSON_HEAD.match(self._text)
        # A data: URI may be cut anywhere before its comma.
        if match is not None and (b'"' in self._text[match.end() :] or len(self._text) > _MAX_JSON_FRAME):
            del self._text[: match.end()]
            self._feed = self._data
            self._data()
        elif len(self._text) > _MAX_JSON_FRAME:
            raise self._other_json()

    def _data(self) -> None:
        end = self._text.find(b'"')
        text, rest = self._text, bytearray()
        if end >= 0:
            text, rest = self._text[:end], self._text[end + 1 :]
            self._feed = self._tail
        elif (escape := text.rfind(b"\\", -_LONGEST_ESCAPE)) >= 0:
            text, rest = text[:escape], text[escape:]
        if b"\\" in text:
            text = bytearray(_ESCAPE.sub(lambda match: _UNESCAPED[match[0][1:].lower()], text))
        whole = len(text) if end >= 0 else len(text) // 4 * 4
        if end < 0 and (padding := text.find(b"=")) >= 0:
            whole = padding // 4 * 4
            if len(text) - whole > _MAX_JSON_FRAME:
                raise MalformedRequest("image: base64 goes on behind its padding")
        try:
            self._file += base64.b64decode(text[:whole], validate=True)
        except binascii.Error:
            raise MalformedRequest("image: not base64; no URL is fetched: send the picture's bytes") from None
        self._text = text[whole:] + rest
        if len(self._file) > self._file_bytes:
            raise UploadTooLarge(f"more than {self._file_bytes} bytes in one file")
        if end >= 0:
            self._tail()

    def _tail(self) -> None:
        if len(self._text) > _MAX_JSON_FRAME:
            raise self._other_json()

    def _other_json(self) -> UnsupportedMediaType:
        return UnsupportedMediaType(f"{_RIGHT_JSON}; or send the picture itself: {RIGHT_CALL}")


class _FormBody:
    """A multipart form (RFC 7578), whose files are collected as they arrive."""

    def __init__(self, boundary: bytes, limits: UploadLimits, on_further_file: Callable[[], None]) -> None:
        self._limits = limits
        self._on_further_file = on_further_file
        self._files: list[UploadedFile] = []
        self._current: bytearray | None = None
        self._header = bytearray()
        self._value = bytearray()
        self._field: bytes | None = None
        self._parts = 0
        self._ended = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part_begin,
                    "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_part_data": self._on_part_data,
                    "on_part_end": self._on_part_end,
                    "on_end": self._on_end,
                },
            )
        except FormParserError as error:
            raise MalformedRequest(f"multipart: {error}") from None

    def feed(self, chunk: bytes) -> None:
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise MalformedRequest(f"multipart: {error}") from None

    def finish(self) -> list[UploadedFile]:
        if not self._ended:
            raise MalformedRequest("multipart: the body ends before its last boundary")
        if not self._files:
            raise MissingImage(f"no part is named {FIELD!r}: {RIGHT_CALL}")
        return self._files

    def close(self) -> None:
        """Let go of the parser: its callbacks hold this object, and with it the files, in a circle."""
        del self._parser

    def clear(self) -> None:
        for file in self._files:
            if isinstance(file, bytearray):
                file.clear()

    def _on_part_begin(self) -> None:
        self._field = None
        self._parts += 1
        if self._parts > self._limits.files + _MAX_OTHER_PARTS:
            raise MalformedRequest(f"multipart: more than {_MAX_OTHER_PARTS} parts that are not named {FIELD!r}")

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._field = _options(bytes(self._value))[1].get(b"name")
        self._header.clear()
        self._value.clear()

    def _on_headers_finished(self) -> None:
        if self._field is None or self._field.decode("latin-1") not in self._limits.fields:
            return
        if len(self._files) >= self._limits.files:
            raise TooManyImages(f"more than {self._limits.files} file(s) in one request")
        if self._files:
            self._on_further_file()
        self._current = bytearray()
        self._files.append(self._current)

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._current is None:
            return
        if len(self._current) + end - start > self._limits.file_bytes:
            error = UploadTooLarge(f"more than {self._limits.file_bytes} bytes in one file")
            if self._limits.files == 1:
                raise error
            # The other files of the request may be fine: drop this one's bytes and read on.
            self._files[-1] = error
            self._current = None
            return
        self._current += data[start:end]

    def _on_part_end(self) -> None:
        self._current = None

    def _on_end(self) -> None:
        self._ended = True
