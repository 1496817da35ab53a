"""Seeded damage to bytes: what a case is made of depends on its number and the seed alone."""

from __future__ import annotations

import struct
import zlib
from random import Random

_NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFE, 0xFF, 0x100, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
_PNG = b"\x89PNG\r\n\x1a\n"


def case(seed: int, kind: str, number: int) -> Random:
    """Return the source of all that is random in one case."""
    return Random(f"{seed} {kind} {number}")


def damaged(data: bytes, others: list[bytes], random: Random) -> bytes:
    """Return a file with one to six faults, mostly near its start, where what matters stands."""
    found = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 3, 6))):
        if not found:
            break
        place = random.randrange(min(len(found), random.choice((40, 300, len(found)))))
        _FAULTS[random.randrange(len(_FAULTS))](found, place, random)
    if random.random() < 0.05:
        tail = random.choice(others)
        found[random.randrange(len(found) + 1) :] = tail[random.randrange(len(tail) + 1) :]
    if found.startswith(_PNG) and random.random() < 0.7:
        # Else few faults would come past the checksums.
        return _with_checksums(bytes(found))
    return bytes(found)


def _set_byte(data: bytearray, place: int, random: Random) -> None:
    data[place] = random.choice((0, 1, 127, 128, 255, random.randrange(256)))


def _flip_bit(data: bytearray, place: int, random: Random) -> None:
    data[place] ^= 1 << random.randrange(8)


def _set_number(data: bytearray, place: int, random: Random) -> None:
    size = random.choice((2, 4, 8))
    number = random.choice(_NUMBERS) % (1 << 8 * size)
    data[place : place + size] = number.to_bytes(size, random.choice(("big", "little")))


def _insert(data: bytearray, place: int, random: Random) -> None:
    data[place:place] = random.randbytes(random.randrange(1, 16))


def _delete(data: bytearray, place: int, random: Random) -> None:
    del data[place : place + random.choice((1, 2, 4, 16, 200))]


def _repeat(data: bytearray, place: int, random: Random) -> None:
    data[place:place] = data[place : place + random.randrange(1, 60)] * random.choice((1, 3, 50))


def _cut(data: bytearray, place: int, random: Random) -> None:
    del data[place:]


def _move(data: bytearray, place: int, random: Random) -> None:
    start = random.randrange(len(data))
    part = data[start : start + random.randrange(1, 60)]
    data[place : place + len(part)] = part


_FAULTS = (_set_byte, _set_byte, _flip_bit, _flip_bit, _set_number, _set_number, _insert, _delete, _repeat, _cut, _move)


def _with_checksums(data: bytes) -> bytes:
    """A PNG file whose chunks have the checksums of what is in them, as far as there are chunks."""
    found, place = bytearray(data), len(_PNG)
    while place + 12 <= len(found):
        (size,) = struct.unpack_from(">I", found, place)
        end = place + 8 + size
        if end + 4 > len(found):
            break
        struct.pack_into(">I", found, end, zlib.crc32(found[place + 4 : end]))
        place = end + 4
    return bytes(found)
