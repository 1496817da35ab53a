"""Pictures as base64, in JSON or as text."""

import base64
import json
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.errors import UnsupportedImageFormat
from service.errors import (
    MalformedRequest,
    UnsupportedMediaType,
    UploadTooLarge,
)
from service.web import base64_pictures
from service.web.base64_pictures import is_text, picture_of_text
from service.web.upload import RIGHT_CALLS, UploadLimits
from tests.service.fakes import png
from tests.service.web.uploads import (
    CUTS,
    cut,
    outcome,
    read,
)

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
def test_json_picture_survives_any_writer(writer: str, picture: bytes, cuts: list[int]) -> None:
    body = JSON_WRITERS[writer](base64.b64encode(picture).decode())
    assert read(cut(body, cuts), "Application/JSON; charset=utf-8") == [picture]


@pytest.mark.parametrize("writer", JSON_WRITERS)
def test_reading_json_pauses_between_pieces(writer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base64_pictures, "PIECE_BYTES", 64)
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
def test_other_json_names_the_right_call(body: bytes, cuts: list[int]) -> None:
    with pytest.raises(UnsupportedMediaType) as raised:
        read(cut(body, cuts), "application/json")
    assert '{"image": "BASE64"}' in str(raised.value)
    assert "curl -F file=@photo.jpg URL" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "text", ["A", "AA=A", "AAA=AAAA", "AA A", "data:image/png,AAAA", "https://x/y.jpg"]
)
def test_json_without_base64_is_malformed(text: str) -> None:
    with pytest.raises(MalformedRequest, match="does not fetch URLs"):
        read(b'{"image": "%b"}' % text.encode(), "application/json")


@given(st.binary(max_size=300), CUTS)
def test_cuts_change_no_json_outcome(junk: bytes, cuts: list[int]) -> None:
    for body in (junk, b'{"image": "' + junk, b'{"image": "AAAA' + junk + b'"}'):
        whole = outcome([body], "application/json")
        assert outcome(cut(body, cuts), "application/json") == whole


@pytest.mark.parametrize(
    "write",
    [base64.b64encode, base64.urlsafe_b64encode, lambda data: base64.b64encode(data).rstrip(b"=")],
    ids=["standard", "for URLs", "unpadded"],
)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda text: text,
        lambda text: b"\xef\xbb\xbf" + text,
        lambda text: b"data:image/png;base64," + text,
        lambda text: b"DATA:Image/PNG;charset=utf-8;BASE64," + text,
        lambda text: quote(b"data:image/png;base64," + text).encode(),
        lambda text: (
            b"\r\n".join(text[start : start + 76] for start in range(0, len(text), 76)) + b"\n"
        ),
    ],
    ids=["bare", "marked", "data URI", "capitals", "percent-encoded", "lines"],
)
def test_text_may_hold_a_picture(
    write: Callable[[bytes], bytes], wrap: Callable[[bytes], bytes]
) -> None:
    picture = png(7)
    text = bytearray(wrap(write(picture)))
    assert is_text(text)
    assert picture_of_text(text, 10_000, RIGHT_CALLS) == picture
    with pytest.raises(UploadTooLarge):
        picture_of_text(text, len(picture) - 5, RIGHT_CALLS)


def test_escapes_survive_any_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    picture = png(7)
    uri = quote(f"data:image/png;base64,{base64.b64encode(picture).decode()}", safe="").encode()
    for piece_bytes in range(8, 100, 4):
        monkeypatch.setattr(base64_pictures, "PIECE_BYTES", piece_bytes)
        assert picture_of_text(bytearray(uri[:30].lower() + uri[30:]), 10_000, "") == picture


def test_a_flood_of_percents_is_refused_fast() -> None:
    started = time.process_time()
    with pytest.raises(UnsupportedImageFormat):
        picture_of_text(bytearray(b"data:image/png;base64," + b"%" * (4 << 20)), 20 << 20, "")
    assert time.process_time() - started < 3


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("dog.jpg", "curl needs an @"),
        ("https://example.org/dog.jpg", "the service does not fetch URLs"),
        ("<!DOCTYPE html><html></html>", "HTML or XML"),
        ("\ufeff\n<!-- größe --><html></html>", "HTML or XML"),
        ("<head><title>Größe</title></head>", "HTML or XML"),
        ('{"image": "AAAA"}', "this is JSON, not a picture"),
        ("aGVsbG8gd29ybGQsIHRoaXMgaXMgbm8gcGljdHVyZQ==", "text, not a picture"),
        ("hello", "text, not a picture"),
        ("top_k=1&image=aGVsbG8", "URL-encoded form, not a picture"),
        ("%PDF-1.7\n%\u00b5\n1 0 obj", "send a page as PNG or JPEG"),
        ("--x\r\nContent-Type: image/jpeg\r\n\r\n\u00b5", "declare it as multipart/form-data"),
        (b"\xff\xd8\xff\xe0\0\x10JFIF".decode("latin-1"), "binary mode"),
        (b"\xff\xd8\xff\xe0\0\x10JFIF".decode("utf-8", "replace"), "binary mode"),
        (b"\x89PNG\r\n\x1a\n".decode("utf-8", "replace"), "binary mode"),
    ],
)
def test_other_text_names_the_remedy(text: str, remedy: str) -> None:
    assert is_text(bytearray(text.encode()))
    with pytest.raises(UnsupportedImageFormat) as raised:
        picture_of_text(bytearray(text.encode()), 10_000, "send it as we say")
    assert remedy in str(raised.value)
    assert str(raised.value).endswith(": send it as we say")


@pytest.mark.parametrize(
    ("write", "remedy"),
    [
        (lambda data: str(base64.b64encode(data)), "base64.b64encode(data).decode()"),
        (str, "base64.b64encode(data).decode()"),
        (bytes.hex, "hexadecimal: send base64"),
        (lambda data: f"0x{data.hex().upper()}", "hexadecimal: send base64"),
    ],
    ids=["text of base64", "text of bytes", "hexadecimal", "0x"],
)
def test_other_spellings_name_the_remedy(write: Callable[[bytes], str], remedy: str) -> None:
    text = write(PLUSES)
    document = json.dumps({"image": text}).encode()
    with pytest.raises(MalformedRequest, match=re.escape(remedy)):
        read(document, "application/json")
    with pytest.raises(MalformedRequest, match=re.escape(remedy)):
        picture_of_text(bytearray(text.encode()), 10_000, RIGHT_CALLS)


PLUSES = b"\xff\xd8\xff" + b"\xfb\xe0\0" * 40
"""The beginning of a JPEG whose base64 is full of `+`."""


@pytest.mark.parametrize("start", ["", " \r\n", "data:image/jpeg;base64,"])
def test_spaces_in_place_of_plus_are_named(start: str) -> None:
    text = start + base64.b64encode(PLUSES).decode().replace("+", " ")
    with pytest.raises(MalformedRequest, match="its '\\+' was decoded as in a form; percent-enco"):
        picture_of_text(bytearray(text.encode()), 10_000, RIGHT_CALLS)
    with pytest.raises(MalformedRequest, match="image: base64 with spaces: its '\\+' was decoded"):
        read(json.dumps({"image": text}).encode(), "application/json")


@pytest.mark.parametrize("blanks", [" %s ", "\n%s\r\n", "\t%s"])
def test_json_may_have_blanks_around_base64(blanks: str) -> None:
    text = blanks % base64.b64encode(PLUSES).decode()
    assert read(json.dumps({"image": text}).encode(), "application/json") == [PLUSES]


def test_byte_order_mark_of_json_is_skipped() -> None:
    picture = png(7)
    document = json.dumps({"image": base64.b64encode(picture).decode()})
    assert read(document.encode("utf-8-sig"), "application/json") == [picture]
    with pytest.raises(UnsupportedMediaType, match="UTF-16: send it as UTF-8"):
        read(document.encode("utf-16"), "application/json")


@pytest.mark.parametrize("size", [60_000, 200_000])
def test_json_picture_has_the_same_limit(size: int) -> None:
    limits = UploadLimits(file_bytes=100_000, body_bytes=1_000_000, files=1)
    body = b'{"image": "%b"}' % base64.b64encode(bytes(size))
    with nullcontext() if size < limits.file_bytes else pytest.raises(UploadTooLarge):
        assert read(body, "application/json", limits=limits) == [bytearray(size)]
