"""Bodies of requests, and a channel that sends them chunk by chunk."""

import itertools
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.types import Receive

from service.errors import ServiceError
from service.web.admit import Sender
from service.web.body import read_files
from service.web.lanes import Deadline
from service.web.limiter import ByteBudget, CountedBytes
from service.web.upload import Upload, UploadLimits
from tests.service.fakes import PATIENCE

T = TypeVar("T")

ROOMY = UploadLimits(file_bytes=10_000, body_bytes=100_000, files=8)
WITH_PARAMETERS = replace(ROOMY, body_bytes=1_000_000, parameters=("top_k", "labels"))
BOUNDARY = "xYz"
MULTIPART = f"multipart/form-data; boundary={BOUNDARY}"


def finish(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waits")


class Channel:
    """Return an ASGI receive channel over chunks that are all available."""

    def __init__(self, chunks: Sequence[bytes], *, disconnect: bool = False) -> None:
        self.chunks = list(chunks)
        self.disconnect = disconnect
        self.received = 0

    async def __call__(self) -> dict[str, Any]:
        if self.received == len(self.chunks):
            assert self.disconnect, "read past the end"
            return {"type": "http.disconnect"}
        self.received += 1
        more = self.disconnect or self.received < len(self.chunks)
        return {"type": "http.request", "body": self.chunks[self.received - 1], "more_body": more}


class Receiver:
    """The part of an admitted request by which a body is read.

    Attributes:
        checked: numbers of slots that were checked, one for each further file.
    """

    def __init__(self, headers: Headers, receive: Receive) -> None:
        self.service = SimpleNamespace(
            settings=SimpleNamespace(max_request_bytes=100_000, request_timeout=PATIENCE),
            byte_budget=ByteBudget(1 << 30),
            metrics=SimpleNamespace(observe_stage=lambda *_: None),
            clock=time.monotonic,
        )
        self.sender = Sender("caller", 0.0, receive, headers=headers)
        self.deadline = Deadline(math.inf)
        self.cancellation = SimpleNamespace(timeout_error=None, end_in=lambda _: None)
        self.body = CountedBytes()
        self.permit = self
        self.checked: list[int] = []

    def check(self, count: int) -> None:
        self.checked.append(count)

    async def convert(self, work: Callable[[], T], size: int) -> T:
        return work()


def read(
    chunks: bytes | Sequence[bytes] | Channel, content_type: str | None = MULTIPART, **options: Any
) -> list[Any]:
    """Return the files of a body; see `upload_of`."""
    return list(upload_of(chunks, content_type, **options).files)


def upload_of(
    chunks: bytes | Sequence[bytes] | Channel,
    content_type: str | None = MULTIPART,
    limits: UploadLimits = ROOMY,
    **headers: str,
) -> Upload:
    receiver = receiver_of(chunks, content_type, **headers)
    upload: Upload = finish(read_files(receiver, limits))
    return upload


def receiver_of(
    chunks: bytes | Sequence[bytes] | Channel, content_type: str | None = MULTIPART, **headers: str
) -> Any:
    if isinstance(chunks, bytes):
        chunks = [chunks]
    channel = chunks if isinstance(chunks, Channel) else Channel(chunks)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if content_type is not None:
        sent["content-type"] = content_type
    return Receiver(Headers(sent), channel)


def part(content: bytes, name: str = "file", *, extra: str = "") -> bytes:
    head = f'Content-Disposition: form-data; name="{name}"; filename="a.png"\r\n{extra}\r\n'
    return head.encode() + content


def form(*parts: bytes, boundary: str = BOUNDARY) -> bytes:
    delimiter = f"--{boundary}".encode()
    return b"".join(delimiter + b"\r\n" + p + b"\r\n" for p in parts) + delimiter + b"--\r\n"


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


CUTS = st.lists(st.integers(0, 5_000), max_size=30)


def outcome(
    chunks: Sequence[bytes], content_type: str = MULTIPART
) -> list[object] | type[ServiceError]:
    try:
        return read(chunks, content_type)
    except ServiceError as error:
        assert "\n" not in str(error)
        return type(error)
