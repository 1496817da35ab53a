"""What a request uploads: files and form fields, their limits, and how files are told apart."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from python_multipart.multipart import parse_options_header

from service.errors import MalformedRequest, UploadTooLarge
from vitserve.documents import FIELD

RIGHT_CALL: Final = f"curl -F {FIELD}=@photo.jpg URL, or curl --data-binary @photo.jpg URL"
"""How to send a picture, for messages about other bodies."""

_MAX_HEADER_PARAMETERS: Final = 64  # the parser's time is quadratic in their number
_SNIFFED_BYTES: Final = 256

_ASCII: Final = re.compile(rb"[\s!-~]+")

# HTML, XML and SVG, also when they have letters beyond ASCII.
_MARKUP: Final = re.compile(rb"(\xef\xbb\xbf)?\s*<[!?a-zA-Z]")

# The first bytes of the formats that this service decodes; JSON cannot begin with them.
_PICTURE: Final = re.compile(
    rb"\xff\xd8\xff|\x89PNG|GIF8|RIFF.{4}WEBP|II[*+]\0|MM\0[*+]|BM|.{4}ftyp", re.DOTALL
)

UploadedFile = bytearray | UploadTooLarge
"""The bytes of one file, or the error that they are too many."""

FormFields = Mapping[str, list[str]]
"""The values of a form's fields that are not files, by name."""


class Upload(NamedTuple):
    """The files of a body, and the other fields if it is a form."""

    files: list[UploadedFile]
    fields: FormFields = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """Limits on the upload of one request.

    Attributes:
        file_bytes: most bytes in one file.
        body_bytes: most bytes in the whole body.
        files: largest number of files.
        fields: names of the form fields that hold files.
        parameters: names of the form fields that are parameters of the route.
        setting: the setting that limits the number of files; empty if a route takes one file.
    """

    file_bytes: int
    body_bytes: int
    files: int
    fields: Collection[str] = (FIELD,)
    parameters: Collection[str] = ()
    setting: str = ""


def parse_header(header: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    """Return a header's value and parameters; raises `MalformedRequest` for too many of them."""
    if header.count(b";") > _MAX_HEADER_PARAMETERS:
        raise MalformedRequest(f"a header with more than {_MAX_HEADER_PARAMETERS} parameters")
    return parse_options_header(header)


def begins_as_picture(data: bytes | bytearray) -> bool:
    """Return whether a file begins like one of the formats that this service decodes."""
    return _PICTURE.match(data) is not None


def begins_as_markup(data: bytes | bytearray) -> bool:
    """Return whether a file begins like HTML, XML or SVG."""
    return _MARKUP.match(data) is not None


_DOCUMENTS: Final = (b"%PDF-", b"%!PS")
"""Beginnings of PDF and PostScript; bytes that are not ASCII follow early."""


def is_text(data: bytearray) -> bool:
    """Return whether a file begins as text, markup or a document, which no picture does."""
    if not data or begins_as_picture(data):
        return False
    if data.startswith(_DOCUMENTS):
        return True
    return _ASCII.fullmatch(data, 0, _SNIFFED_BYTES) is not None or begins_as_markup(data)


def file_too_large(limit: int) -> UploadTooLarge:
    """Return the error for a file of more than `limit` bytes."""
    return UploadTooLarge(f"more than {limit} bytes in one file (VIT_MAX_UPLOAD_BYTES)")
