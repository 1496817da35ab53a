"""JSON documents of requests."""

import msgspec
import pytest

from service.errors import MalformedRequest
from service.web.json_bodies import decoded


class Document(msgspec.Struct, forbid_unknown_fields=True):
    name: str = ""


@pytest.mark.parametrize(
    ("body", "name"), [(b"", ""), (b'{"name": "a"}', "a"), (b'\xef\xbb\xbf{"name": "a"}', "a")]
)
def test_document_is_decoded(body: bytes, name: str) -> None:
    assert decoded(bytearray(body), Document).name == name


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"name": "a", "name": "b"}', "'name' is given twice: send one"),
        (b'{"nam": "a"}', "unknown field 'nam'; available: name"),
        (b'{"name": "a"', "invalid body"),
        (b'{"name": NaN}', "invalid body"),
    ],
)
def test_wrong_document_names_the_mistake(body: bytes, message: str) -> None:
    with pytest.raises(MalformedRequest, match=message):
        decoded(bytearray(body), Document)
