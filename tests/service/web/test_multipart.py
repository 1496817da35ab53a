"""Multipart forms, split by the network at any byte."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import (
    MalformedRequest,
    MissingImage,
    TooManyImages,
    UploadTooLarge,
)
from service.web.body import read_files
from service.web.upload import UploadLimits
from tests.service.web.uploads import (
    BOUNDARY,
    CUTS,
    MULTIPART,
    WITH_PARAMETERS,
    Channel,
    cut,
    finish,
    form,
    part,
    read,
    receiver_of,
    upload_of,
)

# Contents similar to a boundary.
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


def is_content(content: bytes) -> bool:
    """Return whether no line of it begins with the boundary (RFC 2046, 5.1.1)."""
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
def test_files_survive_any_cut_of_the_body(parts: list[tuple[str, bytes]], cuts: list[int]) -> None:
    body = form(*(part(content, name) for name, content in parts))
    files = [content for name, content in parts if name == "file"]
    receiver = receiver_of(cut(body, cuts))
    try:
        upload = finish(read_files(receiver, WITH_PARAMETERS))
    except (MissingImage, MalformedRequest):
        assert not files or any(name != "file" for name, _ in parts), "a parameter that is not text"
        return
    assert upload.files == files
    assert receiver.checked == list(range(2, len(files) + 1))


@given(st.data())
def test_body_without_its_end_is_malformed(data: st.DataObject) -> None:
    body = form(part(b"one"), part(b"two"))
    end = data.draw(st.integers(1, len(body) - len("--\r\n")))
    with pytest.raises(MalformedRequest):
        read(body[:end])


@pytest.mark.parametrize(
    "content_type",
    [
        "multipart/form-data",
        "multipart/form-data; boundary=",
        'multipart/form-data; boundary=""',
        f"{MULTIPART}{'z' * 300}",
    ],
)
def test_form_without_boundary_is_malformed(content_type: str) -> None:
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
def test_field_without_effect_is_refused(parts: list[bytes], message: str) -> None:
    with pytest.raises(MalformedRequest, match=message):
        read(form(*parts), limits=WITH_PARAMETERS)


def test_form_without_file_names_its_field() -> None:
    with pytest.raises(MissingImage, match=r"^the form lacks a file in a part named 'file': curl"):
        read(form(part(b"3", "top_k")), limits=WITH_PARAMETERS)


def test_empty_file_input_is_left_out() -> None:
    unchosen = b'Content-Disposition: form-data; name="file"; filename=""\r\n\r\n'
    assert read(form(part(b"x"), unchosen)) == [b"x"]
    assert read(form(unchosen + b"x")) == [b"x"]
    with pytest.raises(MissingImage, match="lacks a file"):
        read(form(unchosen))
    with pytest.raises(MalformedRequest, match="more than 64 fields"):
        read(form(*[unchosen] * 65))


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
def test_field_name_is_read_in_any_notation(head: str) -> None:
    body = form(f"{head}\r\nContent-Type: text/lies\r\n\r\n".encode() + b"x")
    assert read(body) == [b"x"]


def test_header_parameters_are_limited() -> None:
    many = ";" * 4000
    with pytest.raises(MalformedRequest, match="more than 64 parameters"):
        read(b"x", f"multipart/form-data; boundary={BOUNDARY}{many}")
    assert read(b"x", f"a/b{many}") == [b"x"]  # only forms have parameters
    with pytest.raises(MalformedRequest, match="more than 64 parameters"):
        read(form(part(b"x", "note" + ";" * 4000)))
    assert read(form(part(b"x", extra="X-Other: " + ";" * 100 + "\r\n"))) == [b"x"]


def test_large_file_spares_its_neighbours() -> None:
    limits = UploadLimits(file_bytes=10, body_bytes=100_000, files=3)
    body = form(part(b"a"), part(b"b" * 11), part(b"c" * 10))
    for chunks in ([body], cut(body, range(len(body)))):
        first, second, third = read(chunks, limits=limits)
        assert (first, third) == (b"a", b"c" * 10)
        assert isinstance(second, UploadTooLarge)


def test_the_excess_byte_refuses_a_file() -> None:
    limits = UploadLimits(file_bytes=10, body_bytes=100_000, files=1)
    body = form(part(b"x" * 1000))
    first_byte = body.index(b"x" * 1000)
    channel = Channel(cut(body, range(len(body))))
    with pytest.raises(UploadTooLarge, match="10 bytes in one file"):
        read(channel, limits=limits)
    read_by_the_parser = sum(len(chunk) for chunk in channel.chunks[: channel.received])
    assert read_by_the_parser == first_byte + 11


def test_excess_file_is_refused_on_arrival() -> None:
    limits = UploadLimits(file_bytes=10, body_bytes=100_000, files=2)
    assert len(read(form(*[part(b"x")] * 2), limits=limits)) == 2
    channel = Channel([*cut(form(*[part(b"x")] * 3)[:-10], []), b"never read", b"never read"])
    with pytest.raises(TooManyImages, match="2 file"):
        read(channel, limits=limits)
    assert channel.received == 1


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("Content-Transfer-Encoding: base64\r\n", "Content-Transfer-Encoding 'base64'"),
        ("content-transfer-encoding: Quoted-Printable\r\n", "send plain text in UTF-8"),
        ("Content-Type: text/plain; charset=utf-16\r\n", "charset 'utf-16'"),
        ('Content-Disposition: form-data; name="file"\r\n', "two names"),
    ],
)
def test_a_parameter_is_plain_text_of_one_name(extra: str, message: str) -> None:
    for headers in (extra, f"X-Other: base64\r\n{extra}"):
        body = form(part(b"picture"), part(b"Mw==", "top_k", extra=headers))
        with pytest.raises(MalformedRequest, match=message):
            upload_of(body, limits=WITH_PARAMETERS)


@pytest.mark.parametrize(
    "extra",
    [
        "Content-Transfer-Encoding: 8bit\r\n",
        "Content-Transfer-Encoding: Binary\r\nContent-Type: text/plain; charset=UTF-8\r\n",
        "Content-Type: application/json\r\n",
        "X-Encoding: base64\r\n",
    ],
)
def test_usual_headers_of_a_parameter_pass(extra: str) -> None:
    body = form(part(b"picture"), part(b"3", "top_k", extra=extra))
    assert upload_of(body, limits=WITH_PARAMETERS).fields == {"top_k": ["3"]}
