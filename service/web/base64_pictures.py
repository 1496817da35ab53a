"""Pictures that arrive as base64: in a JSON document, as text, or as a data URI.

Reading base64 holds the interpreter, so long texts are read in pieces with pauses between them.
"""

import contextlib
import re
import time
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from model.errors import UnsupportedImageFormat
from model.images.formats import is_picture
from service.errors import MalformedRequest, UnsupportedMediaType
from service.web.upload import RIGHT_CALL, file_too_large, remove_mark

BYTES_A_VALUE: Final = 32
"""Bytes of base64 that take as long to read as one JSON value; 16 if they are escapes."""

PIECE_BYTES = 1 << 18
_PAUSE_SECONDS: Final = 1e-4  # long enough for another thread to take the interpreter
_MAX_ESCAPE_BYTES: Final = 6
_SAMPLE_CHARACTERS: Final = 256  # characters that tell whether a text is percent-encoded
_ESCAPES: Final = {
    "%2B": "+",
    "%2F": "/",
    "%3D": "=",
    "%3A": ":",
    "%3B": ";",
    "%2C": ",",
    "%0D": "",
    "%0A": "",
}
"""Percent-escapes of base64 and of a data URI."""

_OTHER_PERCENT: Final = re.compile("%(?!2[BFC]|3[DAB]|0[DA])", re.IGNORECASE)

_UTF16: Final = (b"\xff\xfe", b"\xfe\xff", b"{\0", b"\0{")
_DOCUMENT_START: Final = re.compile(rb'\s{0,99}\{\s{0,99}"image"\s{0,99}:\s{0,99}"')
_DOCUMENT_END: Final = re.compile(rb'"\s{0,99}\}\s{0,99}')
_DATA_URI: Final = re.compile(r"\s*data:[^,]{0,200};base64,", re.IGNORECASE)
_BASE64: Final = re.compile(r"[A-Za-z0-9+/_-]{16,}={0,2}")
_PICTURE_NAME: Final = re.compile(
    r"[^\n]{1,255}\.(jpe?g|png|webp|gif|bmp|tiff?|avif|heic|heif)", re.IGNORECASE
)
_NOT_BASE64: Final = "not base64; the service does not fetch URLs: send the picture's bytes"
_SPACES: Final = (
    "base64 with spaces: its '+' was decoded as in a form; percent-encode it, or send base64url"
)
_OTHER_SPELLINGS: Final = (
    (
        re.compile("b['\"]"),
        "Python's text of bytes (b'...'): send base64.b64encode(data).decode()",
    ),
    (
        re.compile(
            r"(0x|\\x)?(ffd8ff|89504e47|47494638|52494646|49492a00|4d4d002a|[0-9a-f]{8}66747970)",
            re.IGNORECASE,
        ),
        "hexadecimal: send base64",
    ),
)
"""Beginnings of texts that hold a picture in another spelling than base64."""
_URL_ENCODED: Final = re.compile(r"[\w.\[\]-]{1,50}=[^=]")
_URL: Final = re.compile(r"(https?|s3|gs|file)://", re.IGNORECASE)


_SNIFFED_BYTES: Final = 256
_ASCII: Final = re.compile(rb"(\xef\xbb\xbf)?[\s!-~]+")
_MISTAKES: Final = (
    (
        # HTML, XML and SVG, also when they have letters beyond ASCII.
        re.compile(rb"(\xef\xbb\xbf)?\s*<[!?a-zA-Z]"),
        "this is HTML or XML, not a picture: send the picture's bytes",
    ),
    (
        re.compile(rb"%PDF-|%!PS"),
        "this is a PDF or PostScript document, not a picture: send a page as PNG or JPEG",
    ),
    (
        re.compile(rb"\s*--[^\r\n]{1,256}\r?\ncontent-", re.IGNORECASE),
        "this is a whole form: if the route takes forms, let the HTTP library declare it as "
        "multipart/form-data with its boundary; else send the picture's bytes",
    ),
    (
        re.compile(rb"\xc3\xbf\xc3\x98|\xc2\x89PNG|(\xef\xbf\xbd){2}|\xef\xbf\xbdPNG"),
        "the picture was read as text, which changes its bytes: open the file in binary mode, "
        "in JavaScript as a Blob or ArrayBuffer",
    ),
    (
        re.compile(rb"(\xff\xfe)?([\s!-~]\0){8}|(\xfe\xff)?(\0[\s!-~]){8}"),
        "this is text in UTF-16, not a picture: send the picture's bytes, or base64 in ASCII",
    ),
)
"""Beginnings of files that are not pictures although bytes beyond ASCII may follow."""


def mistake_in(data: bytes | bytearray) -> str:
    """Return the message about a file that is evidently not a picture; empty for other files."""
    return next((message for pattern, message in _MISTAKES if pattern.match(data)), "")


def is_text(data: bytearray) -> bool:
    """Return whether a file that is not a picture begins as text, markup or a document."""
    return _ASCII.fullmatch(data, 0, _SNIFFED_BYTES) is not None or bool(mistake_in(data))


def picture_of_json(document: bytearray, max_bytes: int) -> bytearray:
    """Return the picture in a document `{"image": "BASE64"}`.

    Raises:
        UnsupportedMediaType: the document has another form.
        UploadTooLarge: the picture has more than `max_bytes` bytes.
        MalformedRequest: the text is not base64.
    """
    remove_mark(document)
    if document.startswith(_UTF16):
        raise UnsupportedMediaType("the JSON is UTF-16: send it as UTF-8")
    try:
        text = "".join(_image_of(document))
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise UnsupportedMediaType(
            'expected the JSON {"image": "BASE64"} and nothing else; parameters go into the URL; '
            f"or send the picture itself: {RIGHT_CALL}"
        ) from None
    text = bare_base64(text)
    _check_size(text, max_bytes)
    try:
        return picture_of_base64(text)
    except ValueError as error:
        raise MalformedRequest(f"image: {error}") from None


def _image_of(document: bytearray) -> Iterator[str]:
    """Yield the text of the image in pieces, without the line breaks of MIME's base64.

    An escape takes 10 ns to read. Other threads take the interpreter between pieces.
    """
    before = _DOCUMENT_START.match(document)
    end = document.rfind(b'"')
    if before is None or before.end() > end or _DOCUMENT_END.fullmatch(document, end) is None:
        raise msgspec.DecodeError
    for piece in _pieces(document, b"\\", before.end(), end):
        text = msgspec.json.decode(b'"' + piece + b'"', type=str)
        yield text.replace("\r", "").replace("\n", "")


def _pieces(text: Any, escape: str | bytes, start: int, end: int) -> Iterator[Any]:
    """Yield pieces of a text that do not cut an escape, with pauses between them."""
    while start < end:
        stop = min(start + PIECE_BYTES, end)
        if stop < end:
            cut = text.rfind(escape, stop - _MAX_ESCAPE_BYTES + 1, stop)
            if cut > 0:
                stop = cut
        yield text[start:stop]
        start = stop
        if start < end:
            time.sleep(_PAUSE_SECONDS)


def picture_of_text(data: bytearray, max_bytes: int, right_call: str) -> bytearray:
    """Return the picture that a text holds as base64 or as a data URI.

    The base64 may have the alphabet for URLs and line breaks, and the URI may be percent-encoded.

    Args:
        right_call: how to send a picture to the route, for messages.

    Raises:
        UnsupportedImageFormat: the text is something else; the message names the likely mistake.
        UploadTooLarge: the picture has more than `max_bytes` bytes.
        MalformedRequest: the picture is in another spelling than base64.
    """
    remove_mark(data)
    text = data.decode("ascii", "replace").strip()
    encoded = _percent_decoded(text) if "%" in text[:_SAMPLE_CHARACTERS] else text
    has_prefix = _DATA_URI.match(encoded) is not None
    encoded = bare_base64(encoded)
    if _BASE64.fullmatch(encoded):
        _check_size(encoded, max_bytes)
        with contextlib.suppress(ValueError):
            picture = from_base64(encoded)
            if has_prefix or is_picture(picture):
                return picture
    if spelling := _other_spelling(encoded):
        raise MalformedRequest(f"this is {spelling}")
    raise UnsupportedImageFormat(f"{mistake_in(data) or _mistake_in_text(text)}: {right_call}")


def _mistake_in_text(text: str) -> str:
    """Return the message about a text that is not a picture."""
    if _URL.match(text):
        return "this is a URL, and the service does not fetch URLs: send the picture's bytes"
    if _PICTURE_NAME.fullmatch(text[:100]):
        name = text[:50]
        return f"{name!r} is a file's name, not its content (curl needs an @): send its bytes"
    if _URL_ENCODED.match(text):
        return "this is a URL-encoded form, not a picture: send its bytes"
    kind = "JSON" if text.startswith(("{", "[")) else "text"
    return f"this is {kind}, not a picture: send its bytes"


def _check_size(encoded: str, max_bytes: int) -> None:
    if len(encoded) // 4 * 3 - 2 > max_bytes:
        raise file_too_large(max_bytes)


def _percent_decoded(text: str) -> str:
    """Return a text without `_ESCAPES`; a text with other escapes is not changed.

    `urllib` would take a minute for 20 MB of escapes.
    """
    pieces: list[str] = []
    for piece in _pieces(text, "%", 0, len(text)):
        if _OTHER_PERCENT.search(piece):
            return text
        decoded = piece
        for escape, character in _ESCAPES.items():
            decoded = decoded.replace(escape, character).replace(escape.lower(), character)
        pieces.append(decoded)
    return "".join(pieces)


def bare_base64(text: str) -> str:
    """Return standard, padded base64 without line breaks and without a data URI's start."""
    prefix = _DATA_URI.match(text)
    if prefix is not None:
        if "%" in text[-_SAMPLE_CHARACTERS:]:
            text = _percent_decoded(text)
        text = text[prefix.end() :]
    text = text.strip()
    for blank in "\r\n\t":
        text = text.replace(blank, "")
    if "-" in text or "_" in text:
        text = text.replace("-", "+").replace("_", "/")
    if len(text) % 4 == 0:
        return text
    bare = text.rstrip("=")
    return bare + "=" * (-len(bare) % 4)


def picture_of_base64(text: str) -> bytearray:
    """Return the file in a base64 text; raises `ValueError` that says what the text is instead."""
    try:
        picture = from_base64(text)
    except ValueError:
        raise ValueError(_other_spelling(text) or _NOT_BASE64) from None
    if not is_picture(picture) and (spelling := _other_spelling(text)):
        raise ValueError(spelling)
    return picture


def _other_spelling(text: str) -> str:
    """Return what a text is that spells a picture in another way than base64, else nothing."""
    if _has_lost_plus(text):
        return _SPACES
    return next((name for pattern, name in _OTHER_SPELLINGS if pattern.match(text)), "")


def _has_lost_plus(text: str) -> bool:
    """Return whether a form turned each `+` of a picture's bare base64 into a space."""
    if " " not in text:
        return False
    try:
        return is_picture(from_base64(text[:_SAMPLE_CHARACTERS].replace(" ", "+")))
    except ValueError:
        return False


def from_base64(text: str) -> bytearray:
    """Return the bytes of a base64 text; raises `ValueError`."""
    data = bytearray()
    for start in range(0, len(text), PIECE_BYTES):
        if len(data) % 3:
            raise ValueError("padding before the end")
        data += msgspec.convert(text[start : start + PIECE_BYTES], bytes)
        if start + PIECE_BYTES < len(text):
            time.sleep(_PAUSE_SECONDS)
    return data
