"""From a body's bytes to its files, however the network cuts them, and how much of a body is read."""

import base64
import json
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from starlette.datastructures import Headers

from model.errors import UnsupportedImageFormat
from service.errors import (
    ClientDisconnected,
    MalformedRequest,
    MissingImage,
    ServiceError,
    TooManyImages,
    UnsupportedMediaType,
    UploadTooLarge,
)
from service.web import upload
from service.web.upload import Bound, UploadLimits, is_text, picture_of_text, read_whole
from tests.model.images.pictures import encode
from tests.service.fakes import png
from tests.service.web.uploads import (
    BOUNDARY,
    MULTIPART,
    WITH_PARAMETERS,
    Channel,
    cut,
    finish,
    form,
    part,
    read,
    upload_of,
)

# Contents made of what is likely to be taken for a boundary.
CONTENTS = st.lists(
    st.sampled_from(
        [
            b"\r",
            b"\n",
            b"\r\n",
            b"-",
            b"--",
            b"xYz",
            b"--xYz",
            b"\r\n--xY",
            b"\r\n--",
            b"\x00\xff",
            b"pix",
        ]
    ),
    max_size=12,
).map(b"".join)
CUTS = st.lists(st.integers(0, 5_000), max_size=30)


def is_content(content: bytes) -> bool:
    """Whether no line of it begins with the boundary (RFC 2046, 5.1.1)."""
    return f"\r\n--{BOUNDARY}".encode() not in b"\r\n" + content


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["file", "file", "top_k", "labels"]), CONTENTS.filter(is_content)
        ),
        max_size=6,
    ),
    CUTS,
)
def test_the_files_arrive_whole_and_in_order_however_the_body_is_cut(
    parts: list[tuple[str, bytes]], cuts: list[int]
) -> None:
    body = form(*(part(content, name) for name, content in parts))
    files = [content for name, content in parts if name == "file"]
    further: list[None] = []
    chunks = cut(body, cuts)
    try:
        found = read(chunks, limits=WITH_PARAMETERS, on_further=lambda: further.append(None))
    except (MissingImage, MalformedRequest):
        assert not files or any(name != "file" for name, _ in parts), "a parameter that is not text"
        return
    assert found == files
    assert len(further) == len(files) - 1


def outcome(
    chunks: Sequence[bytes], content_type: str = MULTIPART
) -> list[object] | type[ServiceError]:
    try:
        return read(chunks, content_type)
    except ServiceError as error:
        assert "\n" not in str(error)
        return type(error)


@given(st.binary(max_size=300), CUTS, st.binary(max_size=40))
@example(b"--\r\n\r\n", [], b"multipart/form-data; boundary=")
@example(b"x", [], b'multipart/form-data; boundary="\xff\xb5"')
def test_junk_is_refused_and_never_a_defect(body: bytes, cuts: list[int], junk_type: bytes) -> None:
    outcome(cut(body, cuts))
    outcome(cut(body, cuts), junk_type.decode("latin-1"))
    outcome(cut(body, cuts), "multipart/form-data; boundary=" + junk_type.decode("latin-1"))


@given(st.data())
def test_a_body_that_ends_before_its_last_boundary_is_malformed(data: st.DataObject) -> None:
    body = form(part(b"one"), part(b"two"))
    end = data.draw(st.integers(1, len(body) - len("--\r\n")))
    with pytest.raises(MalformedRequest):
        read(body[:end])


@given(st.binary(max_size=500).map(b".".__add__), CUTS)  # the beginning of no picture
def test_a_raw_body_is_the_picture(body: bytes, cuts: list[int]) -> None:
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
def test_an_empty_body_holds_no_image_whatever_its_type(
    content_type: str | None, headers: dict[str, Any]
) -> None:
    with pytest.raises(MissingImage, match=r"^the body is empty: send a picture: curl -F"):
        read(b"", content_type, **headers)


def test_other_multiparts_are_refused_with_the_right_call() -> None:
    with pytest.raises(UnsupportedMediaType, match="multipart/mixed") as raised:
        read(b"x", "multipart/mixed")
    assert "curl -F file=@photo.jpg URL" in str(raised.value)
    assert "\n" not in str(raised.value)


JSON_WRITERS = {
    "json": lambda text: json.dumps({"image": text}).encode(),
    "no spaces": lambda text: json.dumps({"image": text}, separators=(",", ":")).encode(),
    "indented": lambda text: json.dumps({"image": text}, indent=4).encode() + b"\r\n",
    "PHP": lambda text: json.dumps({"image": text}).replace("/", "\\/").encode(),
    ".NET": lambda text: json.dumps({"image": text}).replace("+", "\\u002B").encode(),
    "Gson": lambda text: json.dumps({"image": text}).replace("=", "\\u003d").encode(),
    "MIME": lambda text: json.dumps({"image": "\n".join(re.findall(".{1,76}", text))}).encode(),
    "data: URI": lambda text: json.dumps({"image": f"data:image/jpeg;base64,{text}"}).encode(),
}


@pytest.mark.parametrize("writer", JSON_WRITERS)
@given(picture=st.binary(min_size=1, max_size=3000), cuts=CUTS)
def test_a_picture_in_json_is_its_bytes_however_it_is_written_and_cut(
    writer: str, picture: bytes, cuts: list[int]
) -> None:
    body = JSON_WRITERS[writer](base64.b64encode(picture).decode())
    assert read(cut(body, cuts), "Application/JSON; charset=utf-8") == [picture]


@pytest.mark.parametrize("writer", JSON_WRITERS)
def test_others_have_the_interpreter_between_pieces_of_a_picture_in_json(
    writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "_PIECE", 64)
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    picture = bytes(range(256)) * 4
    assert read(JSON_WRITERS[writer](base64.b64encode(picture).decode()), "application/json") == [
        picture
    ]
    assert len(pauses) > 40


OTHER_JSON = [
    b"{}",
    b"[1, 2]",
    b'"image"',
    b'{"instances": [{"b64": "AAAA"}]}',
    b'{"image": "AAAA", "top_k": 3}',
    b'{"image": "AAAA"',
    b'{"image": "AAAA"}}',
    b'{"image": 3}',
    b'{"image": "}',
]


@pytest.mark.parametrize("body", OTHER_JSON)
@given(cuts=CUTS)
def test_any_other_json_is_refused_with_the_right_call(body: bytes, cuts: list[int]) -> None:
    with pytest.raises(UnsupportedMediaType) as raised:
        read(cut(body, cuts), "application/json")
    assert '{"image": "BASE64"}' in str(raised.value)
    assert "curl -F file=@photo.jpg URL" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "text", ["A", "AA=A", "AAA=AAAA", "AA A", "data:image/png,AAAA", "https://x/y.jpg"]
)
def test_what_is_not_base64_is_malformed(text: str) -> None:
    with pytest.raises(MalformedRequest, match="no URL is fetched"):
        read(b'{"image": "%b"}' % text.encode(), "application/json")


@given(st.binary(max_size=300), CUTS)
def test_junk_in_json_has_the_same_outcome_however_it_is_cut(junk: bytes, cuts: list[int]) -> None:
    for body in (junk, b'{"image": "' + junk, b'{"image": "AAAA' + junk + b'"}'):
        whole = outcome([body], "application/json")
        assert outcome(cut(body, cuts), "application/json") == whole


def _pictures() -> list[bytes]:
    sizes = (("PNG", 1), ("JPEG", 1), ("JPEG", 300))
    return [encode(Image.effect_noise((size, size), 20), name, quality=10) for name, size in sizes]


@pytest.mark.parametrize("picture", _pictures(), ids=["PNG", "tiny JPEG", "JPEG"])
def test_what_curl_leaves_of_a_picture_is_refused_with_the_right_call(picture: bytes) -> None:
    """`curl -d @FILE` takes line breaks and NULs away (man curl, --data), and declares a form."""
    stripped = picture.translate(None, b"\r\n\0")
    form_type = "application/x-www-form-urlencoded"
    with pytest.raises(
        UnsupportedMediaType, match=r"^curl -d .* curl --data-binary @photo\.jpg URL$"
    ):
        read([stripped[:40], stripped[40:]], form_type)
    assert read(picture, form_type) == [picture]
    assert read(stripped, "image/jpeg") == [
        stripped
    ]  # whatever was sent, this was not by `curl -d`


def test_an_encoded_body_is_refused() -> None:
    with pytest.raises(UnsupportedMediaType, match="gzip"):
        read(b"x", "image/png", content_encoding="gzip")
    assert read(b"x", "image/png", content_encoding="identity") == [b"x"]


@pytest.mark.parametrize(
    "content_type",
    [
        "multipart/form-data",
        "multipart/form-data; boundary=",
        'multipart/form-data; boundary=""',
        f"{MULTIPART}{'z' * 300}",
    ],
)
def test_a_form_without_a_usable_boundary_is_malformed(content_type: str) -> None:
    with pytest.raises(MalformedRequest):
        read(form(part(b"x")), content_type)


@pytest.mark.parametrize(
    "broken",
    [
        b"no boundary at all",
        form(part(b"x"), boundary="other"),
        f"--{BOUNDARY}\r\nContent-Disposition form-data\r\n\r\nx\r\n--{BOUNDARY}--\r\n".encode(),
        f"--{BOUNDARY}\r\n: no name\r\n\r\nx\r\n--{BOUNDARY}--\r\n".encode(),
        f"--{BOUNDARY}\n\nx\n--{BOUNDARY}--\n".encode(),
        form(part(b"x", extra="X-Long: " + "a" * 100_000 + "\r\n")),
        form(part(b"x", extra="".join(f"X-{i}: a\r\n" for i in range(1_000)))),
    ],
    ids=[
        "no boundary",
        "another boundary",
        "no colon",
        "no header name",
        "bare newlines",
        "endless header",
        "many headers",
    ],
)
def test_broken_multipart_is_malformed(broken: bytes) -> None:
    with pytest.raises(MalformedRequest):
        read(broken, limits=UploadLimits(file_bytes=1_000_000, body_bytes=1_000_000, files=8))


@given(
    st.lists(st.tuples(st.sampled_from(["top_k", "labels"]), st.text(max_size=20)), max_size=6),
    CUTS,
)
def test_other_fields_are_parameters(fields: list[tuple[str, str]], cuts: list[int]) -> None:
    texts = [(name, text) for name, text in fields if is_content(text.encode())]
    body = form(*(part(text.encode(), name) for name, text in texts), part(b"x"))
    upload = upload_of(cut(body, cuts), limits=WITH_PARAMETERS)
    assert upload.files == [bytearray(b"x")]
    expected: dict[str, list[str]] = {}
    for name, text in texts:
        expected.setdefault(name, []).append(text)
    assert upload.fields == expected


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([part(b"x", "image")], r"unknown form field 'image'; the picture is the field 'file'"),
        (
            [part(b"x"), part(b"3", "topk")],
            r"unknown form field 'topk'.*; parameters: top_k, labels",
        ),
        ([part(b"x"), part(b"\xff", "labels")], "labels: expected text in UTF-8"),
        ([part(b"x"), *[part(b"", "labels")] * 65], "more than 64 fields"),
        (
            [part(b"x"), part(b"l" * (1 << 18), "labels"), part(b"m", "labels")],
            "more than 262144 bytes",
        ),
    ],
)
def test_a_field_without_an_effect_is_refused(parts: list[bytes], message: str) -> None:
    with pytest.raises(MalformedRequest, match=message):
        read(form(*parts), limits=WITH_PARAMETERS)


def test_a_form_without_a_file_says_which_field_it_wants() -> None:
    with pytest.raises(MissingImage, match=r"^no part is named 'file': curl -F file="):
        read(form(part(b"3", "top_k")), limits=WITH_PARAMETERS)


@pytest.mark.parametrize(
    "write",
    [base64.b64encode, base64.urlsafe_b64encode, lambda data: base64.b64encode(data).rstrip(b"=")],
    ids=["standard", "for URLs", "unpadded"],
)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda text: text,
        lambda text: b"data:image/png;base64," + text,
        lambda text: b"DATA:Image/PNG;charset=utf-8;BASE64," + text,
        lambda text: quote(b"data:image/png;base64," + text).encode(),
        lambda text: (
            b"\r\n".join(text[start : start + 76] for start in range(0, len(text), 76)) + b"\n"
        ),
    ],
    ids=["bare", "data URI", "capitals", "percent-encoded", "lines"],
)
def test_a_picture_may_be_text(
    write: Callable[[bytes], bytes], wrap: Callable[[bytes], bytes]
) -> None:
    picture = png(7)
    text = bytearray(wrap(write(picture)))
    assert is_text(text)
    assert not is_text(bytearray(picture))
    assert picture_of_text(text, 10_000) == picture
    with pytest.raises(UploadTooLarge):
        picture_of_text(text, len(picture) - 5)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("dog.jpg", "curl needs an @: -F file=@dog.jpg"),
        ("https://example.org/dog.jpg", "an address, and none is fetched"),
        ("<!DOCTYPE html><html></html>", "HTML or XML"),
        ("\ufeff\n<!-- größe --><html></html>", "HTML or XML"),
        ("<head><title>Größe</title></head>", "HTML or XML"),
        ('{"image": "AAAA"}', "Content-Type: application/json"),
        ("aGVsbG8gd29ybGQsIHRoaXMgaXMgbm8gcGljdHVyZQ==", "text, not a picture"),
        ("hello", "text, not a picture"),
    ],
)
def test_other_text_is_refused_with_the_remedy(text: str, remedy: str) -> None:
    assert is_text(bytearray(text.encode()))
    with pytest.raises(UnsupportedImageFormat) as raised:
        picture_of_text(bytearray(text.encode()), 10_000)
    assert remedy in str(raised.value)


@pytest.mark.parametrize(
    "head",
    [
        'content-disposition: form-data; name="file"',
        "Content-Disposition: form-data; name=file",
        'Content-Disposition: form-data; filename="; name=other"; name="file"',
        'X-Other: 1\r\nContent-Disposition: form-data; name="file"',
        "Content-Disposition: form-data; filename*=UTF-8''%e2%82%ac.png; name=\"file\"",
    ],
)
def test_the_field_is_found_however_the_client_writes_it(head: str) -> None:
    body = form(f"{head}\r\nContent-Type: text/lies\r\n\r\n".encode() + b"x")
    assert read(body) == [b"x"]


def test_parameters_of_a_header_are_few_as_parsing_them_takes_quadratic_time() -> None:
    many = "a/b" + ";" * 4000
    for kind in (many, f"multipart/form-data; boundary={BOUNDARY}" + ";" * 4000):
        with pytest.raises(MalformedRequest, match="more than 64 parameters"):
            read(b"x", kind)
    with pytest.raises(MalformedRequest, match="more than 64 parameters"):
        read(form(part(b"x", "note" + ";" * 4000)))
    assert read(form(part(b"x", extra="X-Other: " + ";" * 100 + "\r\n"))) == [b"x"]


def test_a_declared_length_beyond_the_limit_is_refused_before_a_byte_is_read() -> None:
    for kind in ("image/png", MULTIPART, "application/json", "multipart/form-data"):
        channel = Channel([b"x"])
        with pytest.raises(
            UploadTooLarge, match=r"100001 bytes.*\(VIT_MAX_(UPLOAD|REQUEST)_BYTES\)"
        ):
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


@pytest.mark.parametrize(
    "content_type", ["image/png", MULTIPART, "application/json", "multipart/form-data", None]
)
def test_a_body_of_unknown_length_is_refused_when_the_limit_is_passed_and_its_size_goes_before_its_form(
    content_type: str | None,
) -> None:
    channel = Channel([b"junk" * 250] * 1000)
    with pytest.raises(UploadTooLarge):
        read(
            channel, content_type, limits=UploadLimits(file_bytes=5_000, body_bytes=5_000, files=1)
        )
    assert channel.received == 6


@pytest.mark.parametrize(("size", "fits"), [(1000, True), (1001, False)])
def test_the_limit_of_a_file_is_exact(size: int, fits: bool) -> None:
    limits = UploadLimits(file_bytes=1000, body_bytes=100_000, files=1)
    picture = b"x" * size
    for body, kind in ((form(part(picture)), MULTIPART), (picture, "image/png")):
        with nullcontext() if fits else pytest.raises(UploadTooLarge):
            assert read(body, kind, limits=limits) == [picture]


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
    whole: bytearray = finish(read_whole(Headers(given), Channel(chunks), Bound(limit)))
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


@pytest.mark.parametrize("size", [60_000, 200_000])
def test_a_picture_in_json_is_bounded_as_any_other(size: int) -> None:
    limits = UploadLimits(file_bytes=100_000, body_bytes=1_000_000, files=1)
    body = b'{"image": "%b"}' % base64.b64encode(bytes(size))
    with nullcontext() if size < limits.file_bytes else pytest.raises(UploadTooLarge):
        assert read(body, "application/json", limits=limits) == [bytearray(size)]
