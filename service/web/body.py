"""Read the body of a request into memory, within limits that hold at every step.

A body that is too large is refused as soon as it exceeds the limit, not at its end.

The fields of a form complete the query:

    check_early(request, query, model)                                   the query of the address
    async with admit(request, model) as admitted:
        picture, query = await read_picture(request, admitted, query)    and of the form
        await use_named_model(request, admitted, query.model)
        requested = query.requested(admitted.model.info)
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeVar

from pydantic import BaseModel
from python_multipart.exceptions import FormParserError
from starlette.datastructures import Headers
from starlette.requests import Request

from model.images.formats import is_picture
from service.engine.messages import ModelInfo
from service.errors import (
    ClientDisconnected,
    MalformedRequest,
    MissingImage,
    RequestTimeout,
    ServiceError,
    UnsupportedMediaType,
    UploadTooLarge,
)
from service.models.version import Lease
from service.web.admit import AdmittedRequest
from service.web.base64_pictures import BYTES_A_VALUE, picture_of_json
from service.web.digests import HEADERS as DIGEST_HEADERS
from service.web.digests import DeclaredDigests
from service.web.multipart import Form, form_parser, parse_header
from service.web.query import merged, parameters_of
from service.web.upload import RIGHT_CALL, Upload, UploadedFile, UploadLimits
from vitserve.documents import FIELD

Q = TypeVar("Q", bound=BaseModel)

WHOLE_BODY: Final = " (VIT_MAX_REQUEST_BYTES)"
_ONE_FILE: Final = " (VIT_MAX_UPLOAD_BYTES)"

_FORM: Final = "multipart/form-data"
_MAX_BOUNDARY_BYTES: Final = 256  # the parser's own limit

_FORM_REMEDY: Final = "let the HTTP library write the form and its Content-Type"

_STRIPPED: Final = (b"\xff\xd8\xff", b"\x89PNG\x1a")
"""How a JPEG, and a PNG without line breaks, begin."""


class Bound(NamedTuple):
    """The largest size of a body, and the setting that limits it, as messages show them."""

    limit: int
    setting: str = ""


class PictureQuery(Protocol):
    """The query of a route for pictures."""

    def requested(self, info: ModelInfo) -> object:
        """Return the outputs requested of a model; raises `InvalidParameter`, `InputError`."""


def check_early(request: Request, query: PictureQuery, model: Lease) -> None:
    """Refuse a wrong query before the body is read; raises as `PictureQuery.requested`.

    An address without parameters is not checked if the body is a form, which may have them.
    """
    kind = request.headers.get("content-type", "").lower()
    if request.scope["query_string"] or not kind.startswith(_FORM):
        query.requested(model.info)


async def read_picture(
    request: Request, admitted: AdmittedRequest, query: Q, *, fields: Collection[str] = (FIELD,)
) -> tuple[bytearray, Q]:
    """Return the only picture in the body, and the completed query; raises as `read_pictures`."""
    upload, query = await _read(request, admitted, query, 1, fields)
    return require_file(upload.files[0]), query


async def read_pictures(request: Request, admitted: AdmittedRequest, query: Q) -> tuple[Upload, Q]:
    """Return the pictures in the body, and the query completed by the other fields of a form.

    Raises:
        MalformedRequest: a field has another value in the address.
        InvalidParameter: a value is wrong.
        What `read_files` raises.
    """
    most = admitted.service.settings.max_images_per_request
    return await _read(request, admitted, query, most, setting="VIT_MAX_IMAGES_PER_REQUEST")


async def _read(
    request: Request,
    admitted: AdmittedRequest,
    query: Q,
    most: int,
    fields: Collection[str] = (FIELD,),
    setting: str = "",
) -> tuple[Upload, Q]:
    settings = admitted.service.settings
    limits = UploadLimits(
        settings.max_upload_bytes,
        settings.max_request_bytes,
        most,
        fields,
        parameters_of(type(query)),
        setting,
    )
    upload = await read_files(admitted, limits)
    if upload.fields:
        query = merged(query, request.scope["query_string"], upload.fields)
    return upload, query


def require_file(file: UploadedFile) -> bytearray:
    """Return the bytes of a file; raises `UploadTooLarge` if it has too many."""
    if isinstance(file, UploadTooLarge):
        raise file
    return file


async def read_files(admitted: AdmittedRequest, limits: UploadLimits) -> Upload:
    """Return the files in a body: a raw picture, one in JSON, or the parts of a multipart form.

    The request does not take a slot yet.

    Raises:
        UploadTooLarge: the body, or the only file of a request, is too large.
        MissingImage: the body is empty, or a form lacks the field of the picture.
        UnsupportedMediaType: the body is other JSON, another kind of multipart, or compressed; or
            `curl -d` removed bytes of the picture.
        MalformedRequest: the multipart form or the base64 is broken, or a field is unknown.
        TooManyImages: there are more files than `limits.files`.
        QueueFull: the service has fewer free slots than the body has pictures.
        ReceivingFull: the memory for bodies is full.
        ClientDisconnected: the caller went away.
        The context of the request raises `RequestTimeout` if the body did not arrive in time.
    """
    headers = admitted.sender.headers
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
    raw = bytearray()
    parse: Callable[[bytes], object] = raw.extend
    form: Form | None = None
    if is_form and refusal is None:
        form = Form(limits, admitted.permit)
        parse = form_parser(boundary, form)
    with _arriving(admitted):
        received_bytes = await _receive(
            admitted, bound, parse, refusal, is_declared=declared_bytes > 0
        )
        if not received_bytes:
            raise MissingImage(f"the body is empty: send a picture: {RIGHT_CALL}")
        if form is not None:
            return form.finish()
        if is_json and not is_picture(raw):
            work = partial(picture_of_json, raw, limits.file_bytes)
            raw = await admitted.convert(work, len(raw) // BYTES_A_VALUE)
    if kind == "application/x-www-form-urlencoded" and _is_stripped(raw):
        raise UnsupportedMediaType(f"curl -d removed bytes of the picture: send it by {RIGHT_CALL}")
    return Upload([raw], [""])


async def read_whole(admitted: AdmittedRequest, limit: int | None = None) -> bytearray:
    """Return a body that is not a picture; raises as `read_files`.

    Args:
        limit: number of bytes that the body may have; default: VIT_MAX_REQUEST_BYTES.
    """
    bound = Bound(admitted.service.settings.max_request_bytes, WHOLE_BODY)
    if limit is not None:
        bound = Bound(limit)
    headers = admitted.sender.headers
    _declared_bytes(headers, bound)
    if refusal := _compressed(headers, "body"):
        raise refusal
    body = bytearray()
    with _arriving(admitted):
        await _receive(admitted, bound, body.extend)
    return body


@contextmanager
def _arriving(admitted: AdmittedRequest) -> Iterator[None]:
    """Limit the time in which a body arrives, and end a slow body that keeps others out."""
    service = admitted.service
    cancellation = admitted.cancellation

    def give_way() -> None:
        cancellation.timeout_error = RequestTimeout(
            "the body came too slowly while others waited for its room"
        )
        cancellation.end_in(0.0)

    started = service.clock()
    timeout_error = cancellation.timeout_error
    cancellation.timeout_error = RequestTimeout(
        f"the body did not arrive within {service.settings.request_timeout:g} s"
    )
    cancellation.end_in(admitted.deadline.remaining())
    with service.byte_budget.arriving(admitted.body, give_way):
        yield
    cancellation.timeout_error = timeout_error
    service.metrics.observe_stage("read", service.clock() - started)


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


async def _receive(
    admitted: AdmittedRequest,
    bound: Bound,
    parse: Callable[[bytes], object],
    refusal: ServiceError | None = None,
    *,
    is_declared: bool = False,
) -> int:
    """Parse the chunks of a body as they arrive, and return the number of bytes.

    If the length is not declared, `refusal` is raised only at the end of the body, because
    `UploadTooLarge` takes precedence.

    Args:
        parse: takes a chunk.
        refusal: an error of the body that is known already.
        is_declared: whether the length of the body was declared.

    Raises:
        ClientDisconnected, UploadTooLarge: the body did not arrive, or is too large.
        MalformedRequest: the body has another digest than its headers declare.
        The error of `parse`, or `refusal` unless the body is empty.
    """
    headers = admitted.sender.headers.raw
    digests: DeclaredDigests | None = None
    if any(name in DIGEST_HEADERS for name, _ in headers):
        digests = DeclaredDigests(headers)
    received_bytes = 0
    more = True
    while more:
        message = await admitted.sender.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected("the caller went away")
        chunk: bytes = message.get("body", b"")
        admitted.service.byte_budget.add(admitted.body, len(chunk))
        received_bytes += len(chunk)
        if received_bytes > bound.limit:
            raise UploadTooLarge(f"more than {bound.limit} bytes{bound.setting}")
        more = message.get("more_body", False)
        if digests is not None:
            digests.add(chunk, is_last=not more)
        if refusal is None:
            refusal = _error_of(parse, chunk)
        if refusal is not None and is_declared:
            raise refusal
    if refusal is not None and received_bytes:
        raise refusal
    return received_bytes


def _error_of(parse: Callable[[bytes], object], chunk: bytes) -> ServiceError | None:
    """Parse a chunk, and return the error of its form, if any."""
    try:
        parse(chunk)
    except FormParserError as error:
        if str(error).startswith("Expected boundary"):
            return MalformedRequest(
                "multipart: the body begins with something else than the boundary of its "
                f"Content-Type: leave a preamble out, and {_FORM_REMEDY}"
            )
        return MalformedRequest(f"multipart: {error}: {_FORM_REMEDY}")
    except (MalformedRequest, UnsupportedMediaType) as error:
        return error
    return None


def _is_stripped(picture: bytearray) -> bool:
    """Return whether `curl -d` removed every line break and NUL from a JPEG or PNG.

    Every whole picture has NULs. A JPEG's scan header has a length of two bytes, and the first is
    zero (ITU-T T.81, B.2.3). The length of a PNG's first chunk begins with zeros too.
    """
    if not picture.startswith(_STRIPPED):
        return False
    return not any(byte in picture for byte in (b"\0", b"\n", b"\r"))
