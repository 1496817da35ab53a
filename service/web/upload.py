"""What a request uploads: files and form fields, and their limits."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from service.errors import UploadTooLarge
from vitserve.documents import FIELD

RIGHT_CALL: Final = f"curl -F {FIELD}=@photo.jpg URL, or curl --data-binary @photo.jpg URL"
"""How to send a picture, for messages about other bodies."""

RIGHT_CALLS: Final = f'{RIGHT_CALL}, or JSON {{"image": "BASE64"}} as application/json'
"""The same for routes that read JSON too."""

UploadedFile = bytearray | UploadTooLarge
"""The bytes of one file, or the error that they are too many."""

FormFields = Mapping[str, list[str]]
"""The values of a form's fields that are not files, by name."""


class Upload(NamedTuple):
    """The files of a body, their names (empty if unknown), and the other fields of a form."""

    files: list[UploadedFile]
    file_names: list[str]
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


_UTF8_MARK: Final = b"\xef\xbb\xbf"


def remove_mark(text: bytearray) -> None:
    """Remove the byte order mark of UTF-8."""
    if text.startswith(_UTF8_MARK):
        del text[: len(_UTF8_MARK)]


def file_too_large(limit: int) -> UploadTooLarge:
    """Return the error for a file of more than `limit` bytes."""
    return UploadTooLarge(f"more than {limit} bytes in one file (VIT_MAX_UPLOAD_BYTES)")
