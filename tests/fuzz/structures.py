"""Pictures whose structure asks for more work than their bytes, dimensions or headers tell, drawn from a seed.

Each maker writes its format itself, as no encoder writes such files: counts of scans, chunks, tiles, boxes, frames and
groups, and sizes that contradict each other. Most draws are files that decode; their cost is what matters.
"""

from __future__ import annotations

import functools
import io
import lzma
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from PIL import Image

Maker = Callable[[Random], bytes]

_MEGA: Final = 1 << 20
_MAX_EDGE: Final = 65_500
"""Of a JPEG (libjpeg)."""


def log_uniform(random: Random, low: float, high: float) -> int:
    """Return a number whose logarithm is uniform: small and large ones are drawn as often."""
    return round(math.exp(random.uniform(math.log(low), math.log(high))))


def dimensions(random: Random, low: float = 1e6, high: float = 6.3e7, most: int = _MAX_EDGE) -> tuple[int, int]:
    """Return width and height of an area within bounds, mostly near a square."""
    area = log_uniform(random, low, high)
    ratio = random.choice((1, 1, 1, 4, 64)) ** random.choice((-1, 1))
    width = min(max(round(math.sqrt(area * ratio)), 1), most)
    return width, min(max(area // width, 1), most)


# JPEG (ITU-T T.81)


def _segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def _jpeg(
    sof: int, size: tuple[int, int], sampling: Sequence[int], scans: Sequence[tuple[bytes, bytes]], restart: int = 0
) -> bytes:
    """Return a JPEG of a frame kind (0xC0...), with factors of the components, and scans of header and data.

    Both Huffman tables have one code, of one bit: a difference of 0, and a run of 16,384 blocks that end at once. A
    coder that meets the end of its data goes on with zeros.
    """
    width, height = size
    frame = struct.pack(">BHHB", 8, height, width, len(sampling))
    frame += b"".join(bytes((number, factors, 0)) for number, factors in enumerate(sampling, 1))
    ac = 0xE0 if sof == 0xC2 else 0
    huffman = b"".join(bytes((kind,)) + b"\1" + bytes(15) + bytes((value,)) for kind, value in ((0, 0), (0x10, ac)))
    parts = [b"\xff\xd8", _segment(0xDB, b"\0" + b"\1" * 64), _segment(0xC4, huffman)]
    parts += [_segment(0xDD, struct.pack(">H", restart))] if restart else []
    parts.append(_segment(sof, frame))
    for header, data in scans:
        parts += [_segment(0xDA, header), data]
    return b"".join(parts) + b"\xff\xd9"


def _scan(components: Sequence[int], start: int = 0, end: int = 63, high: int = 0, low: int = 0) -> bytes:
    named = b"".join(bytes((component, 0)) for component in components)
    return bytes((len(components),)) + named + bytes((start, end, high << 4 | low))


_QE: Final = (0x5A1D, 0x2586, 0x1114, 0x80B, 0x3D8, 0x1DA, 0xE5, 0x6F, 0x36, 0x1A, 0xD, 6, 3, 1)
"""The first states of the arithmetic coder (T.81, table D.3): those of a decision that never changes."""


@functools.lru_cache(64)
def _unchanging(category: int, with_dc: bool) -> bytes:
    """Return arithmetic data of blocks without a zero, each number of which has a magnitude of so many bits.

    The coder learns that every decision is as it always was. Zeros, which it reads past the end of the data, are the
    likelier answer each time: all blocks that follow cost as much, and no bytes.
    """
    states: dict[tuple[str, int], tuple[int, int]] = {}
    code, span, shifts = 0, 0x10000, 0

    def encode(context: tuple[str, int], value: int) -> None:
        nonlocal code, span, shifts
        state, likely = states.get(context, (0, 0))
        qe = _QE[state]
        span -= qe
        if (value == likely) == (span < qe):  # the upper part, which is the less likely value's unless it is larger
            code, span = code + span, qe
        elif value == likely and span >= 0x8000:
            return
        if context[0] != "sign":
            states[context] = (min(state + 1, 13), value)
        while span < 0x8000:
            code, span, shifts = code << 1, span << 1, shifts + 1

    for _ in range(40):
        if with_dc:
            encode(("dc", 0), 0)
        for k in range(1, 64):
            encode(("end", k), 0)
            encode(("not zero", k), 1)
            encode(("sign", 0), 0)
            encode(("magnitude", k), int(category > 0))
            if category:
                encode(("magnitude", k), 1)
                high = 100 * (k > 5)
                for bit in range(category):
                    encode(("more", high + bit), int(bit < category - 1))
                for _ in range(category):
                    encode(("bit", high + category), 0)
    bits = 16 + shifts
    return (code << -bits % 8).to_bytes(-(-bits // 8)).replace(b"\xff", b"\xff\0")


def jpeg_arithmetic(random: Random) -> bytes:
    """Arithmetic coding, sequential or progressive with many scans, whose data soon end."""
    sampling = random.choice(([0x11], [0x11] * 3, [0x11] * 3, [0x22, 0x11, 0x11]))
    size, category = dimensions(random, 1.5e7), random.choice((0, 3, 10))
    everything = range(1, len(sampling) + 1)
    if random.random() < 0.5:
        return _jpeg(0xC9, size, sampling, [(_scan(everything), _unchanging(category, True))])
    scans = [(_scan(everything, 0, 0), b"\0")]
    scans += [(_scan([1], 1, 63), _unchanging(category, False)) for _ in range(log_uniform(random, 1, 12))]
    return _jpeg(0xCA, size, sampling, scans)


def jpeg_scans(random: Random) -> bytes:
    """Hundreds of refinements of a progressive picture: each visits every block, and has some bytes alone."""
    width, height = dimensions(random, 6e5, 2e6)
    blocks = -(-width // 8) * -(-height // 8)
    data = bytes(2 * -(-blocks // 16384) + 1)
    scans = [(_scan([1], 0, 0), bytes(-(-blocks // 8)) if random.random() < 0.5 else b"\0")]
    scans += [(_scan([1], 1, 63, 0, 1), data)]
    scans += [(_scan([1], 1, 63, 1, 0), data)] * log_uniform(random, 400, 990)
    return _jpeg(0xC2, (width, height), [0x11], scans)


def jpeg_any(random: Random) -> bytes:
    """Any kind of frame, sampling, number of components and restart interval; the data are zeros or noise."""
    sof = random.choice((0xC0, 0xC0, 0xC1, 0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF))
    components = random.choice((1, 2, 3, 3, 4))
    sampling = [random.randrange(1, 5) << 4 | random.randrange(1, 5) for _ in range(components)]
    count = log_uniform(random, 10, 4e5)
    data = random.choice((bytes(count), random.randbytes(count).replace(b"\xff", b"\xfe")))
    together = [_scan(range(1, components + 1), 0, 0 if sof in (0xC2, 0xCA) else 63)]
    each = [_scan([number], 0, 0 if sof in (0xC2, 0xCA) else 63) for number in range(1, components + 1)]
    scans = [(scan, data) for scan in random.choice((together, each))]
    return _jpeg(sof, dimensions(random, 1e4), sampling, scans, random.choice((0, 1, 7, 65535)))


# PNG (ISO/IEC 15948)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _png(size: tuple[int, int], more: bytes, *, depth: int = 8, colour: int = 2, laced: int = 0, row: int = 0) -> bytes:
    """Return a PNG of zeros with the same filter in each row, and other chunks before its pixels."""
    width, height = size
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    line = bytes([row]) + bytes(-(-width * channels * depth // 8))
    packer = zlib.compressobj(9)
    # Interlaced, the rows of seven passes are shorter, and together about as long.
    packed = b"".join(packer.compress(line) for _ in range(height + bool(laced) * 64)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, laced)
    palette = _chunk(b"PLTE", bytes(3 << min(depth, 8))) if colour == 3 else b""
    head = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + palette
    return head + more + _chunk(b"IDAT", packed) + _chunk(b"IEND", b"")


def png_profiles(random: Random) -> bytes:
    """Hundreds of packed raw profiles, each of a megabyte of lines."""
    text = b"\nexif\n  1\n" + random.choice((b"\n", b"0\n", b"00\n", b"0" * 72 + b"\n")) * _MEGA
    chunk = _chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(text[:_MEGA], 9))
    return _png((8, 8), chunk * log_uniform(random, 100, 480))


def png_chunks(random: Random) -> bytes:
    """Thousands of chunks of a kind that a reader takes apart, packed or not."""
    packed = zlib.compress(bytes(log_uniform(random, 1e3, 6e7)), 9)
    contents = {
        b"zTXt": b"Comment\0\0" + packed,
        b"iTXt": b"Comment\0\1\0\0\0" + packed,
        b"iCCP": b"profile\0\0" + packed,
        b"tEXt": b"Raw profile type exif\0\nexif\n 1\n" + b"0\n" * 500,
        b"eXIf": b"MM\0*\0\0\0\x08" + struct.pack(">H", 5000) + struct.pack(">HHII", 270, 2, 4, 0) * 5000,
        b"IDAT": b"",
        b"fdAT": b"\0\0\0\0",
        b"sPLT": b"name\0\x08" + bytes(600),
        b"tRNS": bytes(6),
        b"fcTL": struct.pack(">IIIIIHHBB", 0, 8, 8, 0, 0, 1, 1, 0, 0),
        b"prIv": bytes(100),
    }
    kind = random.choice(list(contents))
    chunk = _chunk(kind, contents[kind])
    count = min(log_uniform(random, 1, 50_000), 4 * _MEGA // len(chunk))
    animation = _chunk(b"acTL", struct.pack(">II", 1 << 20, 0)) if kind == b"fcTL" else b""
    return _png((8, 8), animation + chunk * max(count, 1))


def png_rows(random: Random) -> bytes:
    """Many pixels of any depth, filtered by Paeth mostly, interlaced or not."""
    colour = random.choice((0, 2, 3, 4, 6, 6))
    depth = random.choice({0: (1, 8, 16), 3: (1, 8)}.get(colour, (8, 16, 16)))
    laced = int(random.random() < 0.3)
    return _png(dimensions(random), b"", depth=depth, colour=colour, laced=laced, row=random.choice((4, 4, 3, 0)))


# TIFF 6.0, with libtiff's compressions


def _tiff(size: tuple[int, int], block: tuple[int, int], pieces: list[bytes], compression: int, samples: int) -> bytes:
    """Return a TIFF whose tiles (or strips, for a block 0 wide) are these pieces."""
    counts, where, data = [len(piece) for piece in pieces], [], b""
    for piece in pieces:
        where.append(8 + len(data))
        data += piece
    tags: dict[int, tuple[int, list[int]]] = {
        256: (4, [size[0]]),
        257: (4, [size[1]]),
        258: (3, [8] * samples),
        259: (3, [compression]),
        262: (3, [1 if samples == 1 else 2]),
        277: (3, [samples]),
    }
    if block[0]:
        tags |= {322: (4, [block[0]]), 323: (4, [block[1]]), 324: (4, where), 325: (4, counts)}
    else:
        tags |= {273: (4, where), 278: (4, [block[1]]), 279: (4, counts)}
    entries, place = b"", 8 + len(data)
    for tag, (kind, values) in sorted(tags.items()):
        packed = b"".join(struct.pack("<H" if kind == 3 else "<I", value) for value in values)
        if len(packed) > 4:
            data, packed, place = data + packed, struct.pack("<I", place), place + len(packed)
        entries += struct.pack("<HHI", tag, kind, len(values)) + packed.ljust(4, b"\0")
    return b"II*\0" + struct.pack("<I", place) + data + struct.pack("<H", len(tags)) + entries + bytes(4)


@functools.lru_cache(4)
def _packed(compression: int, count: int) -> bytes:
    """Return zeros as LZMA, deflate or PackBits."""
    if compression == 34925:
        return lzma.compress(bytes(count), preset=1)
    return zlib.compress(bytes(count), 9) if compression == 8 else b"\x81\0" * (count // 128)


def tiff_tiles(random: Random) -> bytes:
    """Tiles far larger than the picture, of zeros."""
    compression = random.choice((34925, 34925, 8))
    width, count = 16 * log_uniform(random, 50_000, 100_000), log_uniform(random, 25, 60)
    return _tiff((1, 16 * count), (width, 16), [_packed(compression, 16 * width)] * count, compression, 1)


def tiff_jpeg(random: Random) -> bytes:
    """Tiles or strips of JPEG, of any kind of frame, larger than the picture."""
    width, rows = 16 * log_uniform(random, 1000, 4000), 16 * log_uniform(random, 4, 60)
    count = log_uniform(random, 4, 40)
    sof = random.choice((0xC9, 0xC9, 0xCA, 0xC0, 0xC2))
    header = _scan([1], 0, 0 if sof in (0xC2, 0xCA) else 63)
    data = _unchanging(random.randrange(11), True) if sof == 0xC9 else b"\0"
    piece = _jpeg(sof, (width, rows), [0x11], [(header, data)])
    tiled = random.random() < 0.8
    size = (1 if tiled else width, rows * count)
    return _tiff(size, (width if tiled else 0, rows), [piece] * count, 7, 1)


def tiff_strips(random: Random) -> bytes:
    """One strip or thousands, of more rows than the picture has, or fewer."""
    compression, samples = random.choice((34925, 8, 32773)), random.choice((1, 3))
    width, height = dimensions(random, 1e5, 2e7)
    rows = min(height, log_uniform(random, 1, height + 1)) if random.random() < 0.7 else 4 * height
    strips = -(-height // rows)
    piece = _packed(compression, width * samples * rows)
    return _tiff((width, height), (0, rows), [piece] * min(strips, 8 * _MEGA // len(piece) + 1), compression, samples)


# AVIF (ISO/IEC 23000-22) and AV1


class _Bits:
    """Bits in the order of AV1 (the highest first)."""

    def __init__(self) -> None:
        self._text: list[str] = []

    def put(self, *pairs: tuple[int, int]) -> None:
        """Add pairs of a number and how many bits it has."""
        self._text += [f"{number:0{count}b}" for number, count in pairs if count]

    def bytes(self) -> bytes:
        """Return all bits, filled up with zeros."""
        text = "".join(self._text)
        text += "0" * (-len(text) % 8)
        return int(text or "0", 2).to_bytes(len(text) // 8)


def _log2(block: int, target: int) -> int:
    return max(0, (-(-target // block) - 1).bit_length())


def _obu(kind: int, content: bytes) -> bytes:
    size, rest = b"", len(content)
    while rest > 127:
        size, rest = size + bytes((rest & 127 | 128,)), rest >> 7
    return bytes((kind << 3 | 2,)) + size + bytes((rest,)) + content


def av1(size: tuple[int, int], *, full_colour: bool, tile: bytes) -> bytes:
    """Return an AV1 still picture (AV1 specification, 5.5 and 5.9) all of whose tiles have the same data."""
    width, height = size
    across, down = (width - 1).bit_length(), (height - 1).bit_length()
    head = _Bits()
    head.put((int(full_colour), 3), (1, 1), (1, 1), (31, 5), (across - 1, 4), (down - 1, 4))
    head.put((width - 1, across), (height - 1, down))
    head.put((0, 1), (0, 1), (0, 1), (0, 1), (0, 1), (0, 1))  # superblocks of 64, no filters
    head.put((0, 1), *([] if full_colour else [(0, 1)]), (0, 1), (1, 1), *([] if full_colour else [(0, 2)]), (0, 1))
    head.put((0, 1), (1, 1))
    columns, rows = -(-width // 64), -(-height // 64)
    least_columns, most_columns = _log2(64, columns), _log2(1, min(columns, 64))
    least_rows = max(_log2(64 * 36, rows * columns) - least_columns, 0)
    most_rows = _log2(1, min(rows, 64))
    frame = _Bits()
    frame.put((0, 1), (0, 1), (0, 1))  # codes adapt, so that a block costs a fraction of a bit
    frame.put((1, 1), (0, int(least_columns < most_columns)), (0, int(least_rows < most_rows)))
    if least_columns + least_rows:
        frame.put((0, least_columns + least_rows), (3, 2))
    frame.put((100, 8), (0, 1), (0, 1), (0, 1), (0, 1), (0, 1), (0, 1), (0, 6), (0, 6), (0, 3), (0, 1), (0, 1), (0, 1))
    tiles = [-(-count // -(-count // (1 << log))) for count, log in ((columns, least_columns), (rows, least_rows))]
    count = math.prod(tiles)
    group = b"\0" if count > 1 else b""
    group += (struct.pack("<I", len(tile) - 1) + tile) * (count - 1) + tile
    return _obu(1, head.bytes()) + _obu(6, frame.bytes() + group)


def _box(kind: bytes, *parts: bytes) -> bytes:
    content = b"".join(parts)
    return struct.pack(">I", len(content) + 8) + kind + content


def _avif(picture: bytes, said: tuple[int, int], *, full_colour: bool, items: int = 1) -> bytes:
    """Return an AVIF of an AV1 picture whose `ispe` says some size, in so many items of the same bytes."""
    codec = _box(b"av1C", bytes((0x81, int(full_colour) << 5 | 31, 0 if full_colour else 0x0C, 0)))
    channels = _box(b"pixi", bytes(4), b"\3\x08\x08\x08")
    properties = _box(b"ipco", _box(b"ispe", struct.pack(">III", 0, *said)), codec, channels)
    linked = struct.pack(">II", 0, items) + b"".join(
        struct.pack(">HB", n, 3) + b"\1\x82\3" for n in range(1, items + 1)
    )
    names = [_box(b"infe", struct.pack(">IHH", 2 << 24, n, 0), b"av01\0") for n in range(1, items + 1)]
    start = _box(b"ftyp", b"avif\0\0\0\0avifmif1miaf")

    def meta(offset: int) -> bytes:
        places = [struct.pack(">HHHII", n, 0, 1, offset, len(picture)) for n in range(1, items + 1)]
        return _box(
            b"meta",
            bytes(4),
            _box(b"hdlr", bytes(8), b"pict", bytes(13)),
            _box(b"pitm", bytes(4), b"\0\1"),
            _box(b"iloc", bytes(4), b"\x44\0", struct.pack(">H", items), *places),
            _box(b"iinf", bytes(4), struct.pack(">H", items), *names),
            _box(b"iprp", properties, _box(b"ipma", linked)),
        )

    return start + meta(len(start) + len(meta(0)) + 8) + _box(b"mdat", picture)


def avif_lying(random: Random) -> bytes:
    """An AV1 frame of up to 16,384 x 16,384 pixels behind an `ispe` of few, or of others."""
    full_colour = random.random() < 0.8
    size = dimensions(random, 2e8, 2.6e8, 16_384)
    data = random.choice((bytes(3000), b"\xff" * 8000, random.randbytes(200) + bytes(5000)))
    edge = random.choice((64, 64, 1, 640, 5000))
    return _avif(av1(size, full_colour=full_colour, tile=data), (edge, edge), full_colour=full_colour)


def avif_items(random: Random) -> bytes:
    """A small picture in thousands of items, or a true one of some megapixels."""
    items = log_uniform(random, 1, 60_000)
    size = dimensions(random, 1e4, 2e7, 16_384) if items < 100 else (64, 64)
    return _avif(av1(size, full_colour=False, tile=bytes(3000)), size, full_colour=False, items=items)


# WebP


class _LowBits:
    """Bits in the order of VP8L (the lowest first)."""

    def __init__(self) -> None:
        self._number, self._count = 0, 0
        self._done = bytearray()

    def put(self, number: int, count: int) -> None:
        """Add a number of so many bits."""
        self._number |= number << self._count
        self._count += count
        while self._count >= 8:
            self._done.append(self._number & 255)
            self._number >>= 8
            self._count -= 8

    def bytes(self) -> bytes:
        """Return all bits, filled up with zeros."""
        return bytes(self._done) + bytes((self._number,))


def _riff(*chunks: tuple[bytes, bytes]) -> bytes:
    content = b"".join(kind + struct.pack("<I", len(data)) + data + bytes(len(data) % 2) for kind, data in chunks)
    return b"RIFF" + struct.pack("<I", len(content) + 4) + b"WEBP" + content


def webp_groups(random: Random) -> bytes:
    """Lossless, with up to 65,536 groups of Huffman codes (RFC 9649, 5.2.2), one for each block of 4 x 4 pixels."""
    edge = random.choice((64, 128, 256, 256, 256))
    bits = _LowBits()
    for number, count in ((0x2F, 8), (4 * edge - 1, 14), (4 * edge - 1, 14), (0, 1), (0, 3), (0, 1), (0, 1)):
        bits.put(number, count)  # signature, size, no alpha, version, no transform, no colour cache
    bits.put(1, 1)
    bits.put(0, 3)  # groups stand in a picture of blocks of 4 x 4, which has no colour cache
    bits.put(0, 1)
    for symbols in (280, 256):  # green and red: 256 values of 8 bits each
        bits.put(0, 1)
        lengths = {8: 1} if symbols == 256 else {0: 1, 8: 1}
        order = (17, 18, 0, 1, 2, 3, 4, 5, 16, 6, 7, 8)
        bits.put(len(order) - 4, 4)
        for length in order:
            bits.put(lengths.get(length, 0), 3)
        bits.put(0, 1)  # all lengths follow
        for symbol in range(symbols) if symbols == 280 else ():
            bits.put(int(symbol < 256), 1)
    for _ in range(3):  # blue, alpha and distance: always 0
        bits.put(0b0001, 4)
    reversed_bits = [int(f"{value:08b}"[::-1], 2) for value in range(256)]
    for group in range(edge * edge):
        bits.put(reversed_bits[group & 255], 8)
        bits.put(reversed_bits[group >> 8], 8)
    for _ in range(edge * edge * 5):
        bits.put(0b0001, 4)
    return _riff((b"VP8L", bits.bytes()))


@functools.lru_cache(4)
def _flat_webp(edge: int, lossless: bool) -> tuple[bytes, bytes]:
    """Return kind and content of the chunk of a square of one colour."""
    out = io.BytesIO()
    Image.new("RGB", (edge, edge)).save(out, "WEBP", lossless=lossless, quality=0, method=0)
    data = out.getvalue()
    return data[12:16], data[20:]


def webp_frames(random: Random) -> bytes:
    """An animation whose canvas and frames contradict each other, of up to thousands of frames."""
    kind, content = _flat_webp(random.choice((16, 1000, 4000)), random.random() < 0.5)
    canvas = dimensions(random, 1e4, 2.5e7, 16_384)
    frame_size = random.choice((canvas, (4000, 4000), (16, 16)))

    def three(*numbers: int) -> bytes:
        return b"".join(number.to_bytes(3, "little") for number in numbers)

    inner = kind + struct.pack("<I", len(content)) + content + bytes(len(content) % 2)
    frame = three(0, 0, frame_size[0] - 1, frame_size[1] - 1, 1) + b"\0" + inner
    count = min(log_uniform(random, 1, 5000), 8 * _MEGA // len(frame) + 1)
    header = b"\2\0\0\0" + three(canvas[0] - 1, canvas[1] - 1)
    return _riff((b"VP8X", header), (b"ANIM", bytes(6)), *[(b"ANMF", frame)] * count)


# GIF and BMP


def gif_frames(random: Random) -> bytes:
    """One colour over a large screen, in frames that need not fit it."""
    screen = dimensions(random, 1e5)
    size = random.choice((screen, dimensions(random, 1e5)))
    bits, left, width = _LowBits(), math.prod(size), 3
    while left > 0:
        bits.put(4, width)  # a new table; each code below is the one before it and one pixel more
        width = 3
        bits.put(0, width)
        left, code = left - 1, 6
        while left > 0 and code < 4095:
            bits.put(code, width)
            left, code = left - (code - 4), code + 1
            if code == 1 << width and width < 12:
                width += 1
    bits.put(5, width)
    packed = bits.bytes()
    blocks = b"".join(bytes((len(part),)) + part for part in (packed[n : n + 255] for n in range(0, len(packed), 255)))
    laced = random.choice((0, 0x40))
    frame = b"," + struct.pack("<HHHHB", 0, 0, *size, laced) + b"\2" + blocks + b"\0"
    count = min(log_uniform(random, 1, 300), 4 * _MEGA // len(frame) + 1)
    return b"GIF89a" + struct.pack("<HH", *screen) + b"\x81\0\0" + bytes(12) + frame * count + b";"


def bmp_runs(random: Random) -> bytes:
    """RLE8 or RLE4 of runs of one pixel, of skips, or of ends of lines."""
    width, height = dimensions(random, 1e5)
    kind = random.choice((1, 2))
    unit = random.choice((b"\1\0", b"\xff\0", b"\0\2\1\0", b"\0\0", b"\0\3\1\1\1\0"))
    data = unit * (log_uniform(random, 1e4, 2 * _MEGA) // len(unit)) + b"\0\1"
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8 // kind, kind, len(data), 0, 0, 2, 0)
    head = b"BM" + struct.pack("<IHHI", 62 + len(data), 0, 0, 62)
    return head + header + bytes(8) + data


MAKERS: Final[dict[str, Maker]] = {
    "jpeg arithmetic": jpeg_arithmetic,
    "png profiles": png_profiles,
    "tiff tiles": tiff_tiles,
    "avif lying": avif_lying,
    "webp groups": webp_groups,
    "jpeg scans": jpeg_scans,
    "tiff jpeg": tiff_jpeg,
    "png rows": png_rows,
    "jpeg any": jpeg_any,
    "png chunks": png_chunks,
    "tiff strips": tiff_strips,
    "avif items": avif_items,
    "webp frames": webp_frames,
    "gif frames": gif_frames,
    "bmp runs": bmp_runs,
}
"""By name; those that were once found to cost most come first."""
