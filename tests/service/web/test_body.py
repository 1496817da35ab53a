"""Bodies of requests: the bytes that are read, and the files in them."""

from contextlib import nullcontext
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from starlette.datastructures import Headers

from service.errors import (
    ClientDisconnected,
    MalformedRequest,
    MissingImage,
    UnsupportedMediaType,
    UploadTooLarge,
)
from service.web.body import read_files, read_whole
from service.web.upload import UploadLimits
from tests.model.images.pictures import encode
from tests.service.web.uploads import (
    CUTS,
    MULTIPART,
    ROOMY,
    Channel,
    Receiver,
    cut,
    finish,
    form,
    outcome,
    part,
    read,
    receiver_of,
)


@given(st.binary(max_size=300), CUTS, st.binary(max_size=40))
@example(b"--\r\n\r\n", [], b"multipart/form-data; boundary=")
@example(b"x", [], b'multipart/form-data; boundary="\xff\xb5"')
def test_junk_is_refused_with_an_error(body: bytes, cuts: list[int], junk_type: bytes) -> None:
    outcome(cut(body, cuts))
    outcome(cut(body, cuts), junk_type.decode("latin-1"))
    outcome(cut(body, cuts), "multipart/form-data; boundary=" + junk_type.decode("latin-1"))


@given(st.binary(max_size=500).map(b".".__add__), CUTS)  # not the beginning of a picture
def test_raw_body_is_the_picture(body: bytes, cuts: list[int]) -> None:
    kinds = (
        "image/jpeg",
        "IMAGE/PNG; q=1",
        "application/octet-stream",
        "application/x-www-form-urlencoded",
        "im",
        None,
    )
    for kind in kinds:
        assert read(cut(body, cuts), kind) == [body]


@pytest.mark.parametrize(
    "content_type", [None, "", "image/png", "text/plain", MULTIPART, "multipart/form-data", "junk"]
)
@pytest.mark.parametrize("headers", [{}, {"content_length": "0"}])
def test_empty_body_lacks_the_picture(content_type: str | None, headers: dict[str, Any]) -> None:
    with pytest.raises(MissingImage, match=r"^the body is empty: send a picture: curl -F"):
        read(b"", content_type, **headers)


def test_other_multipart_names_the_remedy() -> None:
    with pytest.raises(UnsupportedMediaType, match="multipart/mixed") as raised:
        read(b"x", "multipart/mixed")
    assert "curl -F file=@photo.jpg URL" in str(raised.value)
    assert "\n" not in str(raised.value)


def _pictures() -> list[bytes]:
    sizes = (("PNG", 1), ("JPEG", 1), ("JPEG", 300))
    return [encode(Image.effect_noise((size, size), 20), name, quality=10) for name, size in sizes]


@pytest.mark.parametrize("picture", _pictures(), ids=["PNG", "tiny JPEG", "JPEG"])
def test_picture_stripped_by_curl_is_refused(picture: bytes) -> None:
    """Remove line breaks and NULs like `curl -d @FILE` (man curl, --data), and declare a form."""
    stripped = picture.translate(None, b"\r\n\0")
    form_type = "application/x-www-form-urlencoded"
    with pytest.raises(
        UnsupportedMediaType, match=r"^curl -d .* curl --data-binary @photo\.jpg URL$"
    ):
        read([stripped[:40], stripped[40:]], form_type)
    assert read(picture, form_type) == [picture]
    assert read(stripped, "image/jpeg") == [stripped]  # certainly not sent by `curl -d`


def test_compressed_body_is_refused() -> None:
    for encoding in ("gzip", "identity, gzip"):
        with pytest.raises(UnsupportedMediaType, match="gzip"):
            read(b"x", "image/png", content_encoding=encoding)
    for encoding in ("identity", "", "identity, IDENTITY"):
        assert read(b"x", "image/png", content_encoding=encoding) == [b"x"]


def test_second_content_encoding_counts() -> None:
    headers = Headers(raw=[(b"content-encoding", b"identity"), (b"content-encoding", b"gzip")])
    with pytest.raises(UnsupportedMediaType, match="gzip"):
        finish(read_files(cast(Any, Receiver(headers, Channel([b"x"]))), ROOMY))


@pytest.mark.parametrize("body", [b"--other\r\n", b"preamble\r\n--xYz\r\n", b"--xYz\n"])
def test_broken_form_names_the_remedy(body: bytes) -> None:
    with pytest.raises(MalformedRequest, match="let the HTTP library write the form"):
        read(body)


@pytest.mark.parametrize("body", [b"--other\r\n", b"preamble\r\n--xYz\r\n"])
def test_preamble_of_a_form_is_named(body: bytes) -> None:
    with pytest.raises(MalformedRequest, match="leave a preamble out"):
        read(body)


def test_part_without_name_is_refused() -> None:
    body = form(b"Content-Type: image/png\r\n\r\nx")
    with pytest.raises(MalformedRequest, match="a part lacks its name"):
        read(body)


def test_declared_excess_is_refused_unread() -> None:
    for kind in ("image/png", MULTIPART, "application/json", "multipart/form-data"):
        channel = Channel([b"x"])
        with pytest.raises(
            UploadTooLarge, match=r"100001 bytes.*\(VIT_MAX_(UPLOAD|REQUEST)_BYTES\)"
        ):
            read(channel, kind, content_length="100001")
        assert channel.received == 0


def test_a_declared_length_refuses_a_form() -> None:
    channel = Channel([b"x" * 50] * 100)
    with pytest.raises(UnsupportedMediaType):
        read(channel, "multipart/mixed", content_length="5000")
    assert channel.received == 0
    channel = Channel([b"x" * 50] * 100)
    with pytest.raises(MalformedRequest):
        read(channel, MULTIPART, content_length="5000")
    assert channel.received == 1


@pytest.mark.parametrize(
    "content_type", ["image/png", MULTIPART, "application/json", "multipart/form-data", None]
)
def test_size_is_checked_before_the_form(
    content_type: str | None,
) -> None:
    channel = Channel([b"junk" * 250] * 1000)
    with pytest.raises(UploadTooLarge):
        read(
            channel, content_type, limits=UploadLimits(file_bytes=5_000, body_bytes=5_000, files=1)
        )
    assert channel.received == 6


@pytest.mark.parametrize(("size", "fits"), [(1000, True), (1001, False)])
def test_limit_of_a_file_is_exact(size: int, fits: bool) -> None:
    limits = UploadLimits(file_bytes=1000, body_bytes=100_000, files=1)
    picture = b"x" * size
    for body, kind in ((form(part(picture)), MULTIPART), (picture, "image/png")):
        with nullcontext() if fits else pytest.raises(UploadTooLarge):
            assert read(body, kind, limits=limits) == [picture]


def read_all(chunks: list[bytes], limit: int, **headers: str) -> bytearray:
    whole: bytearray = finish(read_whole(receiver_of(chunks, None, **headers), limit))
    return whole


def test_read_whole_keeps_its_limit() -> None:
    assert read_all([b"abc", b"", b"de"], 5) == b"abcde"
    assert read_all([b"abc"], 3, content_length="3", content_encoding="identity") == b"abc"
    for chunks, headers in (([b"abc", b"def"], {}), ([], {"content_length": "6"})):
        with pytest.raises(UploadTooLarge, match=r"5 (bytes|are)"):
            read_all(chunks, 5, **headers)
    with pytest.raises(UnsupportedMediaType, match="'gzip'"):
        read_all([], 5, content_encoding="GZIP")


@pytest.mark.parametrize("content_type", ["image/png", MULTIPART, "application/json"])
def test_disconnect_ends_the_reading(content_type: str) -> None:
    with pytest.raises(ClientDisconnected):
        read(Channel([form(part(b"x"))[:20]], disconnect=True), content_type)
