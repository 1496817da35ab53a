"""JSON documents of requests."""

import json
from typing import Any

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
    "value",
    [{":": ":"}, {"a": ": b", "c": [{"a": ':"', "b\\": "\\"}, '":']}, ' "a":', {"": {"": 1}}],
)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" , ", " : ")])
def test_colons_in_texts_are_no_names(value: object, separators: tuple[str, str]) -> None:
    body = bytearray(json.dumps({"value": value}, separators=separators).encode())
    assert decoded(body, dict[str, Any]) == {"value": value}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"name": "a", "name": "b"}', "'name' is given twice: send one"),
        (b'{"name": "a", "name" : "%b"}' % (b"b" * 20_000), "a name twice: send one"),
        (b'{"nam": "a"}', "unknown field 'nam'; available: name"),
        (b'{"name": "a"', "invalid body"),
        (b'{"name": NaN}', "invalid body"),
    ],
)
def test_wrong_document_names_the_mistake(body: bytes, message: str) -> None:
    with pytest.raises(MalformedRequest, match=message):
        decoded(bytearray(body), Document)
