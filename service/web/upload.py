"""Read the files in a request's body, bounded at every step.

Nothing is written to disk, and nothing is kept of parts that are no file. A body that is too large
is refused when the limit is passed, not when its end is reached.
"""

import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final, NamedTuple
from urllib.parse import unquote

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.datastructures import Headers
from starlette.types import Receive

from model.errors import UnsupportedImageFormat, by_likeness
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

_MAX_FIELDS: Final = (
    64  # a body of nothing but tiny parts would cost the event loop a minute of parsing
)
_MAX_FIELD_BYTES: Final = 1 << 18  # a thousand labels of 256 characters
_MAX_HEADER_PARAMETERS: Final = 64  # the time of the parser is quadratic in their number
_PIECE: Final = 1 << 18
_MAX_ESCAPE: Final = 6
_BREATH: Final = 1e-4  # seconds in which another thread takes the interpreter
_MAX_BOUNDARY: Final = 256  # bytes, as the parser has it
BYTES_A_VALUE: Final = (
    32  # of JSON, which are read in the time of a value; of escapes in half as many
)

_STRIPPED: Final = (
    b"\xff\xd8\xff",
    b"\x89PNG\x1a",
)  # the beginnings of a JPEG, and of a PNG without its line breaks
# Around the text of the picture in a JSON document.
_BEFORE, _AFTER = (
    re.compile(each.replace(b" ", rb"\s{0,99}")) for each in (rb' \{ "image" : "', rb'" \} ')
)
_DATA_URI: Final = re.compile(r"\s*data:[^,]{0,200};base64,", re.IGNORECASE)

# The first bytes of pictures that this service decodes, JSON cannot begin with.
_MAGIC_OF_ANY: Final = re.compile(
    rb"\xff\xd8\xff|\x89PNG|GIF8|RIFF.{4}WEBP|II[*+]\0|MM\0[*+]|BM|.{4}ftyp", re.DOTALL
)

# Texts that may be a picture in base64, also in its alphabet for URLs, perhaps percent-encoded or
# as a data URI.
_TEXT: Final = re.compile(rb"[\s!-~]+")
_MARKUP: Final = re.compile(
    rb"(\xef\xbb\xbf)?\s*<[!?a-zA-Z]"
)  # HTML, XML and SVG, also with other letters than ASCII
_BASE64: Final = re.compile(r"[A-Za-z0-9+/_-]{16,}={0,2}")
_LOOKED_AT: Final = 256

WHOLE_BODY: Final = " (VIT_MAX_REQUEST_BYTES)"

UploadedFile = bytearray | UploadTooLarge
"""The bytes of one file, or the error that they are too many."""

FormFields = Mapping[str, list[str]]
"""The values of a form's fields that are not files, by name."""


class Upload(NamedTuple):
    """What a body holds."""

    files: list[UploadedFile]
    fields: FormFields = MappingProxyType({})


class Bound(NamedTuple):
    """Bytes of a body at most, and the setting that says so, as a message to the caller names it."""

    limit: int
    setting: str = ""


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """Limits on the upload of one request.

    Attributes:
        file_bytes: in one file.
        body_bytes: in the whole body.
        files: how many.
        fields: names of the form fields with files.
        parameters: names of the form fields that are parameters of the route.
        setting: the setting that says how many files; empty where a route takes one.
    """

    file_bytes: int
    body_bytes: int
    files: int
    fields: Collection[str] = (FIELD,)
    parameters: Collection[str] = ()
    setting: str = ""


async def read_files(
    headers: Headers,
    receive: Receive,
    limits: UploadLimits,
    on_further_file: Callable[[], None],
    in_turn: Callable[[Callable[[], bytearray], int], Awaitable[bytearray]],
) -> Upload:
    """Return the files in a body: the raw picture, one in JSON, or at least one part named `file`
    of a multipart form.

    Other fields of a form are parameters of the route.

    `on_further_file` is called before the second and each later file is read, and may refuse it.
    `in_turn` works on a document of so many values, and may refuse to.

    Raises:
        UploadTooLarge: the body, or the only file of a request, is too large.
        MissingImage: the body is empty, or no part is named `file`.
        UnsupportedMediaType: the body is other JSON, is declared as another kind of multipart, or
            as compressed; or it is what `curl -d` leaves of a picture.
        MalformedRequest: the multipart form or the base64 is broken, or a field is unknown.
        TooManyImages: there are more files than `limits.files`.
        ClientDisconnected: the caller went away.
    """
    kind, options = _options(headers.get("content-type", "").encode("latin-1"))
    is_form, is_json = kind == b"multipart/form-data", kind.endswith((b"/json", b"+json"))
    # Base64 has a third more bytes than its picture; escapes add to them.
    most = limits.body_bytes if is_form else (2 if is_json else 1) * limits.file_bytes
    bound = min(Bound(most, " (VIT_MAX_UPLOAD_BYTES)"), Bound(limits.body_bytes, WHOLE_BODY))
    declared = _declared_length(headers, bound)
    refusal = _refusal(headers, kind, options)
    if refusal is not None and declared:
        raise refusal
    raw, form = bytearray(), _Form(limits, on_further_file)
    feed = _form_parser(options[b"boundary"], form) if is_form and refusal is None else raw.extend
    await _feed(feed, receive, bound, refusal, at_once=declared > 0)
    if is_form:
        return form.finish()
    if is_json and not _MAGIC_OF_ANY.match(raw):
        return Upload(
            [
                await in_turn(
                    partial(_json_picture, raw, limits.file_bytes), len(raw) // BYTES_A_VALUE
                )
            ]
        )
    if kind == b"application/x-www-form-urlencoded" and _is_stripped(raw):
        raise UnsupportedMediaType(
            f"curl -d has taken bytes out of the picture, so send it by {RIGHT_CALL}"
        )
    return Upload([raw])


async def _feed(
    feed: Callable[[bytes], object],
    receive: Receive,
    bound: Bound,
    refusal: ServiceError | None,
    *,
    at_once: bool,
) -> None:
    """Feed a body to a reader; raises `MissingImage` for an empty body, `refusal`, and what the
    reader raises.

    A refusal waits for the end of the body unless it is to be raised `at_once`: a body's size is
    checked before its form, and without a Content-Length only reading on shows it.
    """

    def take(chunk: bytes) -> None:
        nonlocal refusal
        try:
            if refusal is None:
                feed(chunk)
        except FormParserError as error:
            refusal = MalformedRequest(f"multipart: {error}")
        except (MalformedRequest, UnsupportedMediaType) as error:
            refusal = error
        if refusal is not None and at_once:
            raise refusal

    if not await _read(take, receive, bound):
        raise MissingImage(f"the body is empty: send a picture: {RIGHT_CALL}")
    if refusal is not None:
        raise refusal


async def read_whole(headers: Headers, receive: Receive, bound: Bound) -> bytearray:
    """Read a body of any form; raises as `read_files`."""
    _declared_length(headers, bound)
    if refusal := _compressed(headers, "body"):
        raise refusal
    body = bytearray()
    await _read(body.extend, receive, bound)
    return body


def _declared_length(headers: Headers, bound: Bound) -> int:
    """Return the Content-Length, 0 without the header; raises `UploadTooLarge`."""
    declared = int(headers.get("content-length", "0"))  # the server has checked that it is a number
    if declared > bound.limit:
        raise UploadTooLarge(f"{declared} bytes: at most {bound.limit} are allowed{bound.setting}")
    return declared


def _compressed(headers: Headers, content: str) -> UnsupportedMediaType | None:
    """Return the error of a body that is declared as compressed, else None."""
    encoding = headers.get("content-encoding", "identity").lower()
    if encoding == "identity":
        return None
    return UnsupportedMediaType(f"Content-Encoding {encoding[:50]!r}: send the {content} as it is")


def _refusal(headers: Headers, kind: bytes, options: dict[bytes, bytes]) -> ServiceError | None:
    """Return the error of a body of this Content-Type, as far as it is known before the body."""
    if compressed := _compressed(headers, "picture"):
        return compressed
    if kind == b"multipart/form-data":
        is_given = 0 < len(options.get(b"boundary", b"")) <= _MAX_BOUNDARY
        return (
            None
            if is_given
            else MalformedRequest("multipart/form-data without a boundary, or with a very long one")
        )
    # Any other type says nothing: curl declares a form for `--data-binary`, so the picture's
    # content decides.
    if kind.startswith(b"multipart/"):
        name = kind.decode("latin-1")[:100]
        return UnsupportedMediaType(f"Content-Type {name!r}: send the picture itself: {RIGHT_CALL}")
    return None


def _options(header: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    """Return a header's value and its parameters; raises `MalformedRequest` if it has very many."""
    if header.count(b";") > _MAX_HEADER_PARAMETERS:
        raise MalformedRequest(f"a header with more than {_MAX_HEADER_PARAMETERS} parameters")
    return parse_options_header(header)


def _is_stripped(picture: bytearray) -> bool:
    """Return whether a body is a JPEG or PNG from which `curl -d` took every line break and NUL.

    Whole pictures hold NULs: the length of a JPEG's scan header is two bytes, of which the first is
    zero (ITU-T T.81, B.2.3), and so is that of a PNG's first chunk.
    """
    return picture.startswith(_STRIPPED) and not any(
        byte in picture for byte in (b"\0", b"\n", b"\r")
    )


async def _read(take: Callable[[bytes], object], receive: Receive, bound: Bound) -> int:
    """Give each part of a body to `take`, and return how long it is; the event loop registers
    generators, at a cost.
    """
    total = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected("the caller went away")
        chunk: bytes = message.get("body", b"")
        total += len(chunk)
        if total > bound.limit:
            raise UploadTooLarge(f"more than {bound.limit} bytes{bound.setting}")
        take(chunk)
        if not message.get("more_body", False):
            return total


def _json_picture(document: bytearray, most: int) -> bytearray:
    """Return the picture in a JSON document, of at most so many bytes."""
    try:
        text = "".join(_json_text(document))
    except (msgspec.DecodeError, UnicodeDecodeError):
        own = '{"image": "BASE64"}, and nothing beside it: parameters go in the address'
        raise UnsupportedMediaType(
            f"JSON is {own}; or send the picture itself: {RIGHT_CALL}"
        ) from None
    prefix = _DATA_URI.match(text)
    text = unquote(text) if prefix and "%" in text[-_LOOKED_AT:] else text
    text = text[prefix.end() if prefix else 0 :]
    if len(text) // 4 * 3 - 2 > most:
        raise UploadTooLarge(f"more than {most} bytes in one file (VIT_MAX_UPLOAD_BYTES)")
    try:
        return from_base64(standard_base64(text))
    except ValueError:
        raise MalformedRequest(
            "image: not base64; no URL is fetched: send the picture's bytes"
        ) from None


def _json_text(document: bytearray) -> Iterator[str]:
    """Yield the text of the picture, without the line breaks of MIME's base64, in pieces.

    To read one holds the interpreter, for 10 ns an escape: others have it between.
    """
    before, end = _BEFORE.match(document), document.rfind(b'"')
    if before is None or before.end() > end or _AFTER.fullmatch(document, end) is None:
        raise msgspec.DecodeError
    start = before.end()
    while start < end:
        stop = min(start + _PIECE, end)
        if stop < end:  # no escape is cut
            escape = document.rfind(b"\\", stop - _MAX_ESCAPE + 1, stop)
            stop = escape if escape > 0 else stop
        yield (
            msgspec.json.decode(b'"' + document[start:stop] + b'"', type=str)
            .replace("\r", "")
            .replace("\n", "")
        )
        start = stop
        if start < end:
            time.sleep(_BREATH)


def standard_base64(text: str) -> str:
    """Return base64 in the standard alphabet and padded: some senders use that of URLs, or leave
    the padding out.
    """
    if "-" in text or "_" in text:
        text = text.replace("-", "+").replace("_", "/")
    return text if len(text) % 4 == 0 else text.rstrip("=") + "=" * (-len(text.rstrip("=")) % 4)


def is_text(data: bytearray) -> bool:
    """Return whether a file is ASCII or markup as far as its first bytes tell: no picture begins
    so.
    """
    if not data or _MAGIC_OF_ANY.match(data):
        return False
    return _TEXT.fullmatch(data, 0, _LOOKED_AT) is not None or _MARKUP.match(data) is not None


def picture_of_text(data: bytearray, most: int) -> bytearray:
    """Return the picture that a text holds in base64, or a data URI does.

    Raises:
        UnsupportedImageFormat: the text is something else; the message says what was probably
        meant.
        UploadTooLarge: the picture has more than `most` bytes.
    """
    text = data.decode("ascii", "replace").strip()
    plain = unquote(text) if "%" in text[:_LOOKED_AT] else text
    prefix = _DATA_URI.match(plain)
    encoded = re.sub(r"\s+", "", plain[prefix.end() if prefix else 0 :])
    if _BASE64.fullmatch(encoded):
        if len(encoded) // 4 * 3 - 2 > most:
            raise UploadTooLarge(f"more than {most} bytes in one file (VIT_MAX_UPLOAD_BYTES)")
        with contextlib.suppress(ValueError):
            picture = from_base64(standard_base64(encoded))
            if prefix or _MAGIC_OF_ANY.match(picture):
                return picture
    raise UnsupportedImageFormat(_meant(text))


def _meant(text: str) -> str:
    """Return what to do instead of sending a text that is not a picture."""
    start = text[:100].lower()
    if _MARKUP.match(text.lstrip("\ufffd")[:100].encode("ascii", "replace")):
        return f"the body is HTML or XML, not a picture: send the picture's bytes: {RIGHT_CALL}"
    if start.startswith(("http://", "https://", "s3://", "gs://", "file://")):
        return (
            f"the body is an address, and none is fetched: send the picture's bytes: {RIGHT_CALL}"
        )
    if re.fullmatch(r"[^\n]{1,255}\.(jpe?g|png|webp|gif|bmp|tiff?|avif|heic|heif)", start):
        return f"{text[:50]!r} is a file's name, not its content: curl needs an @: -F {FIELD}=@{text[:50]}"
    if start.startswith(("{", "[")):
        return f'the body is JSON: send Content-Type: application/json with {{"image": "BASE64"}}, or {RIGHT_CALL}'
    return f'the body is text, not a picture: send its bytes: {RIGHT_CALL}, or JSON {{"image": "BASE64"}}'


def from_base64(text: str) -> bytearray:
    """Return the bytes of a text in base64; raises `ValueError`."""
    data = bytearray()
    for start in range(0, len(text), _PIECE):
        if len(data) % 3:
            raise ValueError("padding before the end")
        data += msgspec.convert(text[start : start + _PIECE], bytes)
        if start + _PIECE < len(text):
            time.sleep(_BREATH)
    return data


def _form_parser(boundary: bytes, form: "_Form") -> Callable[[bytes], object]:
    """Return what feeds a form; the form does not hold its parser: a circle would keep the files in
    memory.
    """
    parser = MultipartParser(
        boundary,
        {
            "on_part_begin": form.on_part_begin,
            "on_header_field": lambda data, start, end: form.header.extend(data[start:end]),
            "on_header_value": lambda data, start, end: form.value.extend(data[start:end]),
            "on_header_end": form.on_header_end,
            "on_headers_finished": form.on_headers_finished,
            "on_part_data": form.on_part_data,
            "on_part_end": form.on_part_end,
            "on_end": form.on_end,
        },
    )
    return parser.write


class _Form:
    """A multipart form (RFC 7578), whose files are collected as they arrive.

    Attributes:
        header, value: of a part, as far as they have arrived.
    """

    def __init__(self, limits: UploadLimits, on_further_file: Callable[[], None]) -> None:
        self.header = bytearray()
        self.value = bytearray()
        self._limits = limits
        self._on_further_file = on_further_file
        self._files: list[UploadedFile] = []
        self._fields: dict[str, list[str]] = {}
        self._parameter: str | None = None
        self._field_bytes = 0
        self._current: bytearray | None = None
        self._field: bytes | None = None
        self._ended = False

    def finish(self) -> Upload:
        """Return the files and the other fields; raises `MalformedRequest` or `MissingImage`."""
        if not self._ended:
            raise MalformedRequest("multipart: the body ends before its last boundary")
        if not self._files:
            raise MissingImage(f"no part is named {FIELD!r}: {RIGHT_CALL}")
        return Upload(self._files, self._fields)

    def on_part_begin(self) -> None:
        """Begin a part, whose name is not known yet."""
        self._field = None
        self._current = None
        self._parameter = None

    def on_header_end(self) -> None:
        """Keep the name of the part's field."""
        if self.header.lower() == b"content-disposition":
            self._field = _options(bytes(self.value))[1].get(b"name")
        self.header.clear()
        self.value.clear()

    def on_headers_finished(self) -> None:
        """Begin a file, if the part is one; raises `TooManyImages`, and what `on_further_file`
        raises.
        """
        name = "" if self._field is None else self._field.decode("utf-8", "replace")
        if name not in self._limits.fields:
            self._begin_parameter(name)
            return
        if len(self._files) >= self._limits.files:
            raise TooManyImages(self._too_many())
        if self._files:
            self._on_further_file()
        self._current = bytearray()
        self._files.append(self._current)

    def _begin_parameter(self, name: str) -> None:
        """Begin a field that is a parameter of the route; raises `MalformedRequest` if it has no
        such parameter.
        """
        known = self._limits.parameters
        if name not in known:
            files = " or ".join(map(repr, self._limits.fields))
            raise MalformedRequest(
                f"unknown form field {name[:50]!r}; the picture is the field {files}"
                + (f"; parameters: {', '.join(by_likeness(name, known))}" if known else "")
            )
        if sum(map(len, self._fields.values())) >= _MAX_FIELDS:
            raise MalformedRequest(f"multipart: more than {_MAX_FIELDS} fields beside the files")
        self._parameter = name
        self._fields.setdefault(name, []).append("")
        self._text = bytearray()

    def _too_many(self) -> str:
        """Return what is said of a file too many."""
        if self._limits.files == 1 and not self._limits.setting:
            return (
                "two files, and this route takes one; the routes that end with /batch take several"
            )
        return f"more than {self._limits.files} files in one request ({self._limits.setting})"

    def on_part_end(self) -> None:
        """Keep the value of a field; raises `MalformedRequest` if it is not text."""
        if self._parameter is None:
            return
        try:
            self._fields[self._parameter][-1] = self._text.decode()
        except UnicodeDecodeError:
            raise MalformedRequest(f"{self._parameter}: expected text in UTF-8") from None

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        """Add to the file or field.

        Raises:
            UploadTooLarge: the only file is too large.
            MalformedRequest: the fields are too long.
        """
        if self._parameter is not None:
            self._field_bytes += end - start
            if self._field_bytes > _MAX_FIELD_BYTES:
                raise MalformedRequest(
                    f"multipart: more than {_MAX_FIELD_BYTES} bytes in fields beside the files"
                )
            self._text += data[start:end]
            return
        if self._current is None:
            return
        self._current += data[start:end]
        if len(self._current) > self._limits.file_bytes:
            error = UploadTooLarge(
                f"more than {self._limits.file_bytes} bytes in one file (VIT_MAX_UPLOAD_BYTES)"
            )
            if self._limits.files == 1:
                raise error
            self._files[-1], self._current = (
                error,
                None,
            )  # the other files of the request may be fine

    def on_end(self) -> None:
        """Note that the last boundary has come."""
        self._ended = True
