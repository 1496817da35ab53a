"""Multipart forms (RFC 7578): files and parameters, collected as they arrive."""

from collections.abc import Callable
from typing import Final

from python_multipart.multipart import MultipartParser, parse_options_header

from model.errors import by_likeness
from service.errors import MalformedRequest, MissingImage, TooManyImages
from service.web.limiter import Permit
from service.web.upload import (
    RIGHT_CALL,
    Upload,
    UploadedFile,
    UploadLimits,
    file_too_large,
)
from vitserve.documents import FIELD

_MAX_FIELDS: Final = 64
"""Without a limit, a body of tiny parts would occupy the event loop for a minute."""

_MAX_FIELD_BYTES: Final = 1 << 18  # a thousand labels of 256 characters
_MAX_HEADER_PARAMETERS: Final = 64  # the parser's time is quadratic in their number

_READ_HEADERS: Final = frozenset(
    [b"content-disposition", b"content-transfer-encoding", b"content-type"]
)
_IDENTITIES: Final = (b"", b"7bit", b"8bit", b"binary")
_CHARSETS: Final = (b"utf-8", b"utf8", b"us-ascii", b"ascii")


def parse_header(header: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    """Return a header's value and parameters; raises `MalformedRequest` for too many of them."""
    if header.count(b";") > _MAX_HEADER_PARAMETERS:
        raise MalformedRequest(f"a header with more than {_MAX_HEADER_PARAMETERS} parameters")
    return parse_options_header(header)


def form_parser(boundary: bytes, form: "Form") -> Callable[[bytes], object]:
    """Return a function that parses the chunks of a body into a form.

    The form does not hold its parser: such a cycle would keep the files in memory.
    """
    parser = MultipartParser(
        boundary,
        {
            "on_part_begin": form.on_part_begin,
            "on_header_field": form.headers.on_header_field,
            "on_header_value": form.headers.on_header_value,
            "on_header_end": form.headers.on_header_end,
            "on_headers_finished": form.on_headers_finished,
            "on_part_data": form.on_part_data,
            "on_part_end": form.on_part_end,
            "on_end": form.on_end,
        },
    )
    return parser.write


class PartHeaders:
    """Collects the headers of the current part; the parser calls its `on_` methods.

    Attributes:
        name: name of the field; empty if the part lacks it.
        file_name: name of the file; empty if the part lacks it.
        encoding: unsupported encoding of a parameter; empty if the part does not have one.
        is_unchosen: whether the part is a file input in which no file was chosen, unless bytes
            follow.
    """

    def __init__(self) -> None:
        self._header = bytearray()
        self._value = bytearray()
        self.clear()

    def clear(self) -> None:
        """Forget the previous part."""
        self.name = ""
        self.file_name = ""
        self.encoding = ""
        self.is_unchosen = False

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        """Add to the name of a header."""
        self._header += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        """Add to the value of a header."""
        self._value += data[start:end]

    def on_header_end(self) -> None:
        """Keep the part's name or its encoding; raises `MalformedRequest` for a second name."""
        header = bytes(self._header.lower())
        if header not in _READ_HEADERS:
            self._value.clear()
        value, parameters = parse_header(bytes(self._value))
        if header == b"content-disposition":
            if self.name:
                raise MalformedRequest("multipart: a part has two names: send two parts")
            self.name = parameters.get(b"name", b"").decode("utf-8", "replace")
            self.file_name = parameters.get(b"filename", b"").decode("utf-8", "replace")
            self.is_unchosen = parameters.get(b"filename") == b""
        charset = parameters.get(b"charset", b"utf-8")
        if header == b"content-transfer-encoding" and value.lower() not in _IDENTITIES:
            self.encoding = f"Content-Transfer-Encoding {value.decode('latin-1')!r:.50}"
        elif header == b"content-type" and charset.lower() not in _CHARSETS:
            self.encoding = f"charset {charset.decode('latin-1')!r:.50}"
        self._header.clear()
        self._value.clear()


class Form:
    """Collects the files and the other fields of a form; the parser calls its `on_` methods.

    Args:
        permit: will have a slot for each file.

    Attributes:
        headers: the headers of the current part.
    """

    def __init__(self, limits: UploadLimits, permit: Permit) -> None:
        self._limits = limits
        self._permit = permit
        self._files: list[UploadedFile] = []
        self._file_names: list[str] = []
        self._fields: dict[str, list[str]] = {}
        self._field_bytes = 0
        self._others = 0  # parts besides the files
        self._has_ended = False
        # The current part.
        self.headers = PartHeaders()
        self._file: bytearray | None = None
        self._parameter: str | None = None
        self._text = bytearray()

    def finish(self) -> Upload:
        """Return the files and the other fields; raises `MalformedRequest` or `MissingImage`."""
        if not self._has_ended:
            raise MalformedRequest("multipart: the body ends before its last boundary")
        if not self._files:
            raise MissingImage(f"the form lacks a file in a part named {FIELD!r}: {RIGHT_CALL}")
        return Upload(self._files, self._file_names, self._fields)

    def on_part_begin(self) -> None:
        """Forget the previous part."""
        self.headers.clear()
        self._file = None
        self._parameter = None

    def on_headers_finished(self) -> None:
        """Begin a file or a parameter; raises as `_begin_file` and `_begin_parameter`."""
        name = self.headers.name
        is_file = name in self._limits.fields
        if is_file and not self.headers.is_unchosen:
            self._begin_file()
            return
        self._others += 1
        if self._others > _MAX_FIELDS:
            raise MalformedRequest(f"multipart: more than {_MAX_FIELDS} fields besides the files")
        if not is_file:
            self._begin_parameter(name)

    def _begin_file(self) -> None:
        """Begin a file; raises `TooManyImages`, and `QueueFull` without slots."""
        if len(self._files) >= self._limits.files:
            raise self._too_many_files()
        if self._files:
            self._permit.check(len(self._files) + 1)
        self._file = bytearray()
        self._files.append(self._file)
        self._file_names.append(self.headers.file_name)

    def _too_many_files(self) -> TooManyImages:
        limits = self._limits
        if limits.files == 1 and not limits.setting:
            return TooManyImages(
                "two files, and this route takes one; the routes that end with /batch take several"
            )
        return TooManyImages(f"more than {limits.files} files in one request ({limits.setting})")

    def _begin_parameter(self, name: str) -> None:
        """Begin a parameter; raises `MalformedRequest` if the route does not know it."""
        known = self._limits.parameters
        if not name:
            raise MalformedRequest(
                "multipart: a part lacks its name, as in "
                f'Content-Disposition: form-data; name="{FIELD}"'
            )
        if name not in known:
            files = " or ".join(map(repr, self._limits.fields))
            message = f"unknown form field {name[:50]!r}; the picture is the field {files}"
            if known:
                message += f"; parameters: {', '.join(by_likeness(name, known))}"
            raise MalformedRequest(message)
        if self.headers.encoding:
            raise MalformedRequest(f"{name}: {self.headers.encoding}: send plain text in UTF-8")
        self._parameter = name
        self._fields.setdefault(name, []).append("")
        self._text.clear()

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        """Add to the file or parameter.

        Raises:
            UploadTooLarge: the only file is too large.
            MalformedRequest: the parameters are too long.
        """
        if self._parameter is not None:
            self._field_bytes += end - start
            if self._field_bytes > _MAX_FIELD_BYTES:
                raise MalformedRequest(
                    f"multipart: more than {_MAX_FIELD_BYTES} bytes in fields besides the files"
                )
            self._text += data[start:end]
            return
        if self.headers.is_unchosen:
            self.headers.is_unchosen = False
            self._begin_file()
        if self._file is not None:
            self._file += data[start:end]
            if len(self._file) > self._limits.file_bytes:
                self._fail_file()

    def _fail_file(self) -> None:
        """Replace the current file by its error, which fails a request of one file."""
        error = file_too_large(self._limits.file_bytes)
        if self._limits.files == 1:
            raise error
        self._files[-1] = error
        self._file = None

    def on_part_end(self) -> None:
        """Keep the value of a parameter; raises `MalformedRequest` if it is not text."""
        if self._parameter is None:
            return
        try:
            self._fields[self._parameter][-1] = self._text.decode()
        except UnicodeDecodeError:
            raise MalformedRequest(f"{self._parameter}: expected text in UTF-8") from None

    def on_end(self) -> None:
        """Note that the last boundary has arrived."""
        self._has_ended = True
