"""How much of a body is read: bounds on files and bodies, and callers that go away."""

from __future__ import annotations

import asyncio
import base64

import pytest
from starlette.datastructures import Headers

from service.errors import (
    ClientDisconnected,
    MalformedRequest,
    TooManyImages,
    UnsupportedMediaType,
    UploadTooLarge,
)
from service.web.upload import UploadLimits, read_files, read_whole
from tests.service.web.uploads import MULTIPART, Channel, cut, finish, form, part, read


def test_a_declared_length_beyond_the_limit_is_refused_before_a_byte_is_read() -> None:
    for kind in ("image/png", MULTIPART, "application/json", "multipart/form-data"):
        channel = Channel([b"x"])
        with pytest.raises(UploadTooLarge, match="100001 bytes"):
            read(channel, kind, content_length="100001")
        assert channel.received == 0


def test_a_declared_length_within_the_limit_lets_form_errors_through_at_once() -> None:
    channel = Channel([b"x" * 50] * 100)
    with pytest.raises(UnsupportedMediaType):
        read(channel, "multipart/mixed", content_length="5000")
    assert channel.received == 0
    channel = Channel([b"x" * 50] * 100)
    with pytest.raises(MalformedRequest):
        read(channel, MULTIPART, content_length="5000")
    assert channel.received == 1


@pytest.mark.parametrize("content_type", ["image/png", MULTIPART, "application/json", "multipart/form-data", None])
def test_a_body_of_unknown_length_is_refused_when_the_limit_is_passed_and_its_size_goes_before_its_form(
    content_type: str | None,
) -> None:
    channel = Channel([b"junk" * 250] * 1000)
    with pytest.raises(UploadTooLarge):
        read(channel, content_type, limits=UploadLimits(file_bytes=5_000, body_bytes=5_000, files=1))
    assert channel.received == 6


@pytest.mark.parametrize(("size", "fits"), [(1000, True), (1001, False)])
def test_the_limit_of_a_file_is_exact(size: int, fits: bool) -> None:
    limits = UploadLimits(file_bytes=1000, body_bytes=100_000, files=1)
    picture = b"x" * size
    for body, kind in ((form(part(picture)), MULTIPART), (picture, "image/png")):
        if fits:
            assert read(body, kind, limits) == [picture]
        else:
            with pytest.raises(UploadTooLarge):
                read(body, kind, limits)


def test_one_file_too_large_does_not_fail_its_neighbours() -> None:
    limits = UploadLimits(file_bytes=10, body_bytes=100_000, files=3)
    body = form(part(b"a"), part(b"b" * 11), part(b"c" * 10))
    for chunks in ([body], cut(body, range(len(body)))):
        first, second, third = read(chunks, limits=limits)
        assert (first, third) == (b"a", b"c" * 10)
        assert isinstance(second, UploadTooLarge)


def test_a_single_file_too_large_is_refused_at_the_byte_that_is_too_many() -> None:
    limits = UploadLimits(file_bytes=10, body_bytes=100_000, files=1)
    body = form(part(b"x" * 1000))
    first_byte = body.index(b"x" * 1000)
    channel = Channel(cut(body, range(len(body))))
    with pytest.raises(UploadTooLarge, match="10 bytes in one file"):
        read(channel, limits=limits)
    read_by_the_parser = sum(len(chunk) for chunk in channel.chunks[: channel.received])
    assert read_by_the_parser == first_byte + 11


def test_one_file_too_many_is_refused_while_it_arrives() -> None:
    limits = UploadLimits(file_bytes=10, body_bytes=100_000, files=2)
    assert len(read(form(*[part(b"x")] * 2), limits=limits)) == 2
    channel = Channel([*cut(form(*[part(b"x")] * 3)[:-10], []), b"never read", b"never read"])
    with pytest.raises(TooManyImages, match="2 file"):
        read(channel, limits=limits)
    assert channel.received == 1


def read_all(chunks: list[bytes], limit: int, **headers: str) -> bytearray:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    whole: bytearray = finish(read_whole(Headers(given), Channel(chunks), limit))
    return whole


def test_a_body_of_another_form_is_read_whole_within_its_limit() -> None:
    assert read_all([b"abc", b"", b"de"], 5) == b"abcde"
    assert read_all([b"abc"], 3, content_length="3", content_encoding="identity") == b"abc"
    for chunks, headers in (([b"abc", b"def"], {}), ([], {"content_length": "6"})):
        with pytest.raises(UploadTooLarge, match=r"5 (bytes|are)"):
            read_all(chunks, 5, **headers)
    with pytest.raises(UnsupportedMediaType, match="'gzip'"):
        read_all([], 5, content_encoding="GZIP")


@pytest.mark.parametrize("content_type", ["image/png", MULTIPART, "application/json"])
def test_a_caller_that_goes_away_ends_the_reading(content_type: str) -> None:
    with pytest.raises(ClientDisconnected):
        read(Channel([form(part(b"x"))[:20]], disconnect=True), content_type)


@pytest.mark.parametrize("size", [30_000, 60_000, 200_000])
def test_a_picture_in_json_is_bounded_as_any_other_and_a_thread_reads_a_large_one(size: int) -> None:
    limits = UploadLimits(file_bytes=100_000, body_bytes=1_000_000, files=1)
    body = b'{"image": "%b"}' % base64.b64encode(bytes(size))
    reading = read_files(Headers({"content-type": "application/json"}), Channel([body]), limits, lambda: None)
    if size < limits.file_bytes:
        assert asyncio.run(reading) == [bytearray(size)]
    else:
        with pytest.raises(UploadTooLarge):
            asyncio.run(reading)
