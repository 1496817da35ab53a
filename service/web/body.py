"""Read the body of a request into memory, within limits that hold at every step.

A body that is too large is refused as soon as it exceeds the limit, not at its end.
"""

import itertools
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from python_multipart.exceptions import FormParserError
from starlette.datastructures import Headers
from starlette.types import Message, Receive

from model.images.formats import is_picture
from service.errors import (
    ClientDisconnected,
    MalformedRequest,
    MissingImage,
    RequestTimeout,
    ServiceError,
    UnsupportedMediaType,
    UploadTooLarge,
)
from service.web.base64_pictures import BYTES_A_VALUE, picture_of_json
from service.web.lanes import Deadline
from service.web.limits import CountedBytes
from service.web.multipart import Form, form_parser
from service.web.service import Service
from service.web.upload import RIGHT_CALL, Upload, UploadLimits, parse_header
from vitserve.documents import FIELD

if TYPE_CHECKING:
    from service.web.admit import Cancellation, Sender

T = TypeVar("T")

WHOLE_BODY: Final = " (VIT_MAX_REQUEST_BYTES)"
_ONE_FILE: Final = " (VIT_MAX_UPLOAD_BYTES)"

_FORM: Final = "multipart/form-data"
_MAX_BOUNDARY_BYTES: Final = 256  # the parser's own limit

# Number of values from which a thread reads or writes a document, because it would hold the event
# loop for 5 to 10 ms.
LARGE: Final = 2000

_FORM_REMEDY: Final = "let the HTTP library write the form and its Content-Type"

_STRIPPED: Final = (b"\xff\xd8\xff", b"\x89PNG\x1a")
"""How a JPEG, and a PNG without line breaks, begin."""


class RequestBody:
    """The body of a request, whose bytes and time are bounded."""

    def __init__(
        self,
        service: Service,
        sender: "Sender",
        deadline: Deadline,
        cancellation: "Cancellation",
    ) -> None:
        self._service = service
        self._sender = sender
        self._deadline = deadline
        self._cancellation = cancellation
        self._counted = CountedBytes()

    async def read_files(
        self,
        parameters: Collection[str] = (),
        *,
        several: bool = False,
        fields: Collection[str] = (FIELD,),
    ) -> Upload:
        """Return the pictures in the body, and the other fields of a form, without taking a slot.

        Args:
            parameters: names of the form fields that are parameters of the route.
            several: whether more than one picture is allowed.
            fields: names of the form fields with pictures.

        Raises:
            QueueFull: the limiter has fewer free slots than the body has pictures.
            ReceivingFull: the memory for bodies is full.
            What the function `read_files` raises. The context of the request raises
            `RequestTimeout` if the body did not arrive in time.
        """
        settings = self._service.settings
        limiter = self._service.limiter
        limits = UploadLimits(
            settings.max_upload_bytes,
            settings.max_request_bytes,
            settings.max_images_per_request if several else 1,
            fields,
            parameters,
            "VIT_MAX_IMAGES_PER_REQUEST" if several else "",
        )
        numbers = itertools.count(2)

        def check_room() -> None:
            limiter.check(next(numbers), self._sender.caller)

        with self._arriving():
            return await read_files(
                self._sender.headers, self._receive, limits, check_room, self.in_documents_lane
            )

    async def read_whole(self, limit: int | None = None) -> bytearray:
        """Return a body that is not a picture; raises as `read_files`.

        Args:
            limit: number of bytes that the body may have; default: VIT_MAX_REQUEST_BYTES.
        """
        bound = Bound(self._service.settings.max_request_bytes, WHOLE_BODY)
        if limit is not None:
            bound = Bound(limit)
        with self._arriving():
            return await read_whole(self._sender.headers, self._receive, bound)

    async def in_documents_lane(self, work: Callable[[], T], size: int) -> T:
        """Return the result of `work`, from a thread if the work handles many values."""
        if size < LARGE:
            return work()
        lane = self._service.lanes.documents
        with lane.work(work, self._sender.caller, size, self._deadline) as job:
            return await job

    def give_back(self) -> None:
        """Stop counting the bytes of this body."""
        self._service.byte_budget.give_back(self._counted)

    @contextmanager
    def _arriving(self) -> Iterator[None]:
        service = self._service
        cancellation = self._cancellation
        started = service.clock()
        timeout_error = cancellation.timeout_error
        cancellation.timeout_error = RequestTimeout(
            f"the body did not arrive within {service.settings.request_timeout:g} s"
        )
        cancellation.end_in(self._deadline.remaining())
        with service.byte_budget.arriving(self._counted, self._give_way):
            yield
        cancellation.timeout_error = timeout_error
        service.metrics.observe_stage("read", service.clock() - started)

    async def _receive(self) -> Message:
        message = await self._sender.receive()
        self._service.byte_budget.add(self._counted, len(message.get("body", b"")))
        return message

    def _give_way(self) -> None:
        self._cancellation.timeout_error = RequestTimeout(
            "the body came too slowly while others waited for its room"
        )
        self._cancellation.end_in(0.0)


class Bound(NamedTuple):
    """The most bytes of a body, and the setting that says so, in a message's form."""

    limit: int
    setting: str = ""


async def read_files(
    headers: Headers,
    receive: Receive,
    limits: UploadLimits,
    on_further_file: Callable[[], None],
    in_turn: Callable[[Callable[[], bytearray], int], Awaitable[bytearray]],
) -> Upload:
    """Return the files in a body: a raw picture, one in JSON, or the parts of a multipart form.

    Args:
        headers: the request headers.
        receive: the ASGI channel of the request.
        limits: limits on the files and fields.
        on_further_file: called before the second and each later file is read; may refuse it.
        in_turn: runs work on a document of the given number of values; may refuse it.

    Raises:
        UploadTooLarge: the body, or the only file of a request, is too large.
        MissingImage: the body is empty, or a form lacks the field of the picture.
        UnsupportedMediaType: the body is other JSON, another kind of multipart, or compressed; or
            `curl -d` removed bytes of the picture.
        MalformedRequest: the multipart form or the base64 is broken, or a field is unknown.
        TooManyImages: there are more files than `limits.files`.
        ClientDisconnected: the caller went away.
    """
    content_type = headers.get("content-type", "")
    kind = content_type.partition(";")[0].strip().lower()
    is_form = kind == _FORM
    is_json = kind.endswith(("/json", "+json"))
    boundary = b""
    if is_form:
        _, options = parse_header(content_type.encode("latin-1"))
        boundary = options.get(b"boundary", b"")
    bound = _bound(limits, is_form=is_form, is_json=is_json)
    declared_bytes = _declared_bytes(headers, bound)
    refusal = _refusal(headers, kind, boundary)
    if refusal is not None and declared_bytes:
        raise refusal
    feed_body = partial(_feed, receive, bound, refusal, at_once=declared_bytes > 0)
    if is_form and refusal is None:
        form = Form(limits, on_further_file)
        await feed_body(form_parser(boundary, form))
        return form.finish()
    raw = bytearray()
    await feed_body(raw.extend)
    if is_json and not is_picture(raw):
        work = partial(picture_of_json, raw, limits.file_bytes)
        return Upload([await in_turn(work, len(raw) // BYTES_A_VALUE)])
    if kind == "application/x-www-form-urlencoded" and _is_stripped(raw):
        raise UnsupportedMediaType(f"curl -d removed bytes of the picture: send it by {RIGHT_CALL}")
    return Upload([raw])


async def read_whole(headers: Headers, receive: Receive, bound: Bound) -> bytearray:
    """Read a body of any content type; raises as `read_files`."""
    _declared_bytes(headers, bound)
    if refusal := _compressed(headers, "body"):
        raise refusal
    body = bytearray()
    await _read(body.extend, receive, bound)
    return body


def _bound(limits: UploadLimits, *, is_form: bool, is_json: bool) -> Bound:
    whole = Bound(limits.body_bytes, WHOLE_BODY)
    if is_form:
        return whole
    # Base64 has a third more bytes than its picture, and escapes may add more.
    file_bytes = 2 * limits.file_bytes if is_json else limits.file_bytes
    return Bound(file_bytes, _ONE_FILE) if file_bytes < whole.limit else whole


def _declared_bytes(headers: Headers, bound: Bound) -> int:
    """Return the Content-Length, 0 without the header; raises `UploadTooLarge`."""
    declared_bytes = int(headers.get("content-length", "0"))  # the server has checked the digits
    if declared_bytes > bound.limit:
        raise UploadTooLarge(
            f"{declared_bytes} bytes: at most {bound.limit} are allowed{bound.setting}"
        )
    return declared_bytes


def _refusal(headers: Headers, kind: str, boundary: bytes) -> ServiceError | None:
    """Return the error of a body that its request headers already show, else None."""
    if compressed := _compressed(headers, "picture"):
        return compressed
    if kind == _FORM:
        if 0 < len(boundary) <= _MAX_BOUNDARY_BYTES:
            return None
        return MalformedRequest(
            f"multipart/form-data without a boundary, or with a very long one: {_FORM_REMEDY}"
        )
    if kind.startswith("multipart/"):
        return UnsupportedMediaType(
            f"Content-Type {kind[:100]!r}: send the picture itself: {RIGHT_CALL}"
        )
    # The content decides about all other types: curl declares a form for `--data-binary`.
    return None


def _compressed(headers: Headers, content: str) -> UnsupportedMediaType | None:
    """Return the error of a body that is declared as compressed, else None."""
    encoding = ",".join(headers.getlist("content-encoding")).lower()
    if all(coding.strip() in ("", "identity") for coding in encoding.split(",")):
        return None
    return UnsupportedMediaType(
        f"Content-Encoding {encoding[:50]!r}: send the {content} uncompressed"
    )


async def _feed(
    receive: Receive,
    bound: Bound,
    refusal: ServiceError | None,
    feed: Callable[[bytes], object],
    *,
    at_once: bool,
) -> None:
    """Feed a body to a reader; raises `MissingImage`, `refusal`, and the reader's errors.

    Unless `at_once`, a refusal waits for the end of the body: an error about the size goes first,
    and without Content-Length only the end shows the size.
    """

    def take(chunk: bytes) -> None:
        nonlocal refusal
        try:
            if refusal is None:
                feed(chunk)
        except FormParserError as error:
            refusal = MalformedRequest(f"multipart: {error}: {_FORM_REMEDY}")
        except (MalformedRequest, UnsupportedMediaType) as error:
            refusal = error
        if refusal is not None and at_once:
            raise refusal

    if not await _read(take, receive, bound):
        raise MissingImage(f"the body is empty: send a picture: {RIGHT_CALL}")
    if refusal is not None:
        raise refusal


async def _read(take: Callable[[bytes], object], receive: Receive, bound: Bound) -> int:
    """Pass each chunk of a body to `take`, and return the number of bytes.

    An asynchronous generator would cost more: the event loop registers each one.
    """
    total_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected("the caller went away")
        chunk: bytes = message.get("body", b"")
        total_bytes += len(chunk)
        if total_bytes > bound.limit:
            raise UploadTooLarge(f"more than {bound.limit} bytes{bound.setting}")
        take(chunk)
        if not message.get("more_body", False):
            return total_bytes


def _is_stripped(picture: bytearray) -> bool:
    """Return whether `curl -d` removed every line break and NUL from a JPEG or PNG.

    Every whole picture has NULs. A JPEG's scan header has a length of two bytes, and the first is
    zero (ITU-T T.81, B.2.3). The length of a PNG's first chunk begins with zeros too.
    """
    if not picture.startswith(_STRIPPED):
        return False
    return not any(byte in picture for byte in (b"\0", b"\n", b"\r"))
