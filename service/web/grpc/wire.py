"""Bounds on a message before it is parsed: a few bytes may stand for a large object, and a message has millions.

https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from service.errors import MalformedRequest, UploadTooLarge

_VARINT: Final = 0
_FIXED64: Final = 1
_BYTES: Final = 2
_FIXED32: Final = 5
_FIXED: Final = {_FIXED64: 8, _FIXED32: 4}

_MAX_VARINT_BYTES: Final = 10

_MAX_COST: Final = 1_000_000
"""About the time and memory of the largest JSON that is read: each byte of packed numbers costs 1."""
_FIELD_COST: Final = 100


class Field(NamedTuple):
    """A field of a message: its number and wire type, where it begins, and where its content starts and ends."""

    number: int
    wire_type: int
    begin: int
    start: int
    end: int


def fields(message: memoryview) -> Iterator[Field]:
    """Yield the fields of a message, without those of the messages within; raises `MalformedRequest`."""
    position = 0
    while position < len(message):
        begin = position
        tag, position = _varint(message, position)
        number, wire_type = tag >> 3, tag & 7
        start = position
        if wire_type == _VARINT:
            _, end = _varint(message, position)
        elif wire_type == _BYTES:
            length, start = _varint(message, position)
            end = start + length
        elif wire_type in _FIXED:
            end = start + _FIXED[wire_type]
        else:
            raise MalformedRequest(f"not a message: wire type {wire_type}")
        if end > len(message):
            raise MalformedRequest("not a message: it ends within a field")
        yield Field(number, wire_type, begin, start, end)
        position = end


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    """Return a number of variable length, and where it ends."""
    value = 0
    for shift, byte in enumerate(message[position : position + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, position + shift + 1
    raise MalformedRequest("not a message: it ends within a number")


def split(message: memoryview, number: int, descriptor: Any) -> tuple[bytes, list[memoryview]]:
    """Return a message without the field of bytes of this number, and the contents of that field, not copied.

    Args:
        descriptor: protobuf's, of the message.

    Raises:
        MalformedRequest: it is no message.
        UploadTooLarge: it has very many fields or numbers.
    """
    rest, contents, left = bytearray(), [], _MAX_COST
    for field in fields(message):
        if field.number == number and field.wire_type == _BYTES:
            contents.append(message[field.start : field.end])
            left = _spend(left, _FIELD_COST)
        else:
            rest += message[field.begin : field.end]
            left = _cost(message, field, descriptor, left)
    return bytes(rest), contents


def _cost(message: memoryview, field: Field, descriptor: Any, left: int) -> int:
    """Return what is left after a field and all that is within it; raises `UploadTooLarge` if that is nothing."""
    left = _spend(left, _FIELD_COST)
    known = descriptor.fields_by_number.get(field.number)
    if known is None or field.wire_type != _BYTES:
        return left
    if known.message_type is not None:
        content = message[field.start : field.end]
        for inner in fields(content):
            left = _cost(content, inner, known.message_type, left)
    elif known.type not in (known.TYPE_STRING, known.TYPE_BYTES):  # numbers, packed
        left = _spend(left, field.end - field.start)
    return left


def _spend(left: int, cost: int) -> int:
    if cost > left:
        raise UploadTooLarge("the message has more fields or numbers than are read: send tensors as raw_input_contents")
    return left - cost
