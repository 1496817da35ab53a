"""What each format hands to its decoder, byte for byte."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from PIL import Image, TiffTags

from model.errors import InvalidImage, UnsupportedImageFormat
from model.images.colour import converter
from model.images.exif import read_directory
from model.images.formats import unpack
from model.images.formats.base import EncodedImage
from model.images.formats.jpeg import Jpeg
from model.images.preprocess import preprocess
from model.images.resize import _margin
from tests.model.images.pictures import config, encode, insert_after_soi, noise, scene, seen


def box(kind: bytes, body: bytes = b"") -> bytes:
    return struct.pack(">L", 8 + len(body)) + kind + body


FILE_TYPE = box(b"ftyp", b"avif\0\0\0\0avif")
XMP = b"application/rdf+xml\0"


def item(version: int, kind: bytes, identifier: bytes) -> bytes:
    """An item information entry: version, flags, identifier, protection, type."""
    return box(b"infe", bytes([version, 0, 0, 0]) + identifier + b"\0\0" + kind + b"\0")


LONG = b"\0\0\0\1free" + struct.pack(">Q", 16)
"""A box whose size has 64 bits."""


@pytest.mark.parametrize("more", [box(b"free"), LONG, LONG + LONG, LONG + box(b"free"), b"\0\0\0\0free", b""])
def test_boxes_that_fill_an_avif_file_change_nothing(more):
    image = scene()
    plain = encode(image, "AVIF")

    assert np.array_equal(seen(plain + more, image), seen(plain, image))


@pytest.mark.parametrize(
    "more", [b"\0\0\0\x09free", b"\0\0\0\7free", b"\0\0\0\1free" + struct.pack(">Q", 17), b"\0\0\0\0fre", b"\0"]
)
def test_boxes_that_do_not_fill_an_avif_file_are_refused(more):
    with pytest.raises(InvalidImage, match="boxes are corrupt"):
        unpack(encode(scene(), "AVIF") + more)


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([item(2, b"Exif", b"\0\1")], [item(2, b"skip", b"\0\1")]),
        ([item(3, b"Exif", b"\0\0\0\1")], [item(3, b"skip", b"\0\0\0\1")]),
        ([item(2, b"Exif", b"\0\1")] * 2, [item(2, b"skip", b"\0\1")] * 2),
        ([item(2, b"Exif", b"\0\1"), XMP], [item(2, b"skip", b"\0\1"), b"application/ignored\0"]),
        ([XMP], [XMP]),
        ([item(1, b"Exif", b"\0\1")], [item(1, b"Exif", b"\0\1")]),
        ([item(2, b"Exif", b"\0\0\0\1")], [item(2, b"Exif", b"\0\0\0\1")]),
        ([item(3, b"Exif", b"\0\1")], [item(3, b"Exif", b"\0\1")]),
        ([b"Exif"], [b"Exif"]),
    ],
)
def test_exif_items_of_an_avif_file_are_hidden_and_xmp_with_them(items, expected):
    data, wanted = (FILE_TYPE + box(b"meta", b"".join(each)) for each in (items, expected))

    assert unpack(data).data == wanted


@pytest.mark.parametrize("marker", range(0xC0, 0xD0))
def test_the_frames_marker_says_how_a_jpeg_is_decoded(marker):
    data = bytearray(encode(noise(64, 48), "JPEG"))
    data[data.index(b"\xff\xc0") + 1] = marker

    if marker in {*range(0xC9, 0xD0)} - {0xCC}:
        with pytest.raises(UnsupportedImageFormat, match="arithmetic"):
            unpack(data)
        return
    picture = unpack(data)

    assert isinstance(picture, Jpeg)
    assert picture.scalable == (marker in {0xC0, 0xC1, 0xC2})
    assert (picture.first_scan is not None) == (marker == 0xC2)


def tiff(*fields: tuple[int, int, int, bytes], more: bytes = b"") -> bytes:
    """A TIFF file of a directory alone: tag, field type, count and the 4 bytes of its value or offset."""
    entries = b"".join(struct.pack("<HHL4s", *field) for field in fields)
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(fields)) + entries + b"\0" * 4 + more


def test_the_decoder_of_a_tiff_sees_no_field_that_is_none_of_the_picture():
    data = tiff(*((tag, 3, 1, b"\1\0\0\0") for tag in (*range(200, 800), 33432, 34665, 34675, 37500)))

    directory = read_directory(unpack(data).data)

    assert directory is not None
    shown = {TiffTags.lookup(field.tag).name for field in directory.fields}
    assert {"ImageWidth", "ImageLength", "Compression", "StripOffsets", "TileOffsets", "ColorMap"} < shown
    assert not shown & {"unknown", "ImageDescription", "Software", "Artist", "Copyright", "SubIFD", "XMP", "ExifIFD"}


@pytest.mark.parametrize(("field_type", "code"), [(3, "H"), (4, "L")])
@pytest.mark.parametrize("tag", [256, 257, 259, 266, 277, 278, 284, 322, 323])
def test_a_tiff_field_of_one_value_keeps_the_first_of_several(tag, field_type, code):
    size = struct.calcsize(f"<{code}")
    values, place = struct.pack(f"<3{code}", 7, 8, 9), struct.pack("<L", 38)
    data = tiff((tag, field_type, 3, place), (258, field_type, 3, place), more=values)

    directory = read_directory(unpack(data).data)

    assert directory is not None
    kept = {field.tag: (field.value_count, directory.inline(field)) for field in directory.fields}
    assert kept[tag][0] == 1
    assert kept[tag][1][:size] == values[:size]
    assert kept[258] == (3, place)  # each sample has its own width


def test_a_first_value_that_is_longer_than_an_entry_stays_where_it_is():
    place = struct.pack("<L", 26)

    directory = read_directory(unpack(tiff((278, 5, 2, place), more=bytes(16))).data)

    assert directory is not None
    assert [(field.value_count, directory.inline(field)) for field in directory.fields] == [(1, place)]


@pytest.mark.parametrize(("field_type", "code"), [(3, "H"), (4, "L")])
@pytest.mark.parametrize("tag", [279, 325])
def test_strips_and_tiles_may_together_have_as_many_bytes_as_the_file(tag, field_type, code):
    def with_blocks(*sizes: int) -> bytes:
        return tiff((tag, field_type, 3, struct.pack("<L", 26)), more=struct.pack(f"<3{code}", *sizes))

    size = len(with_blocks(0, 0, 0))
    assert len(unpack(with_blocks(1, size - 3, 2)).data) == size
    with pytest.raises(InvalidImage, match="claim more data than the file has"):
        unpack(with_blocks(1, size - 3, 3))


def test_the_sizes_of_strips_that_stand_partly_outside_of_the_file_are_left_out():
    data = tiff((258, 3, 1, b"\x08\0\0\0"), (279, 4, 3, struct.pack("<L", 38)), more=bytes(10))

    directory = read_directory(unpack(data).data)

    assert directory is not None
    assert [field.tag for field in directory.fields] == [258]


def test_fields_of_a_tiff_that_share_their_values_may_not_claim_more_than_the_file_has():
    place, values = struct.pack("<L", 38), bytes(80)

    unpack(tiff((258, 3, 40, place), (320, 3, 19, place), more=values))  # 118 bytes claim as many
    with pytest.raises(InvalidImage, match="directory claims more data"):
        unpack(tiff((258, 3, 40, place), (320, 3, 20, place), more=values))


@pytest.mark.parametrize("values", [65_536, 65_537])
def test_the_number_of_values_of_a_tiff_field_is_bounded(values):
    data = tiff((320, 3, values, struct.pack("<L", 26)), more=bytes(2 * values))

    if values == 65_536:
        unpack(data)
    else:
        with pytest.raises(InvalidImage, match="more than 65536"):
            unpack(data)


LOSSY, LOSSLESS = (encode(Image.new("RGB", (300, 257)), "WEBP", lossless=lossless) for lossless in (False, True))
EXTENDED = encode(Image.new("RGB", (300, 257)), "WEBP", exif=b"Exif\0\0MM\0*")


@pytest.mark.parametrize(("data", "needed"), [(LOSSY, 30), (LOSSLESS, 25), (EXTENDED, 30)])
def test_the_header_of_a_webp_is_read_from_the_bytes_that_it_has(data, needed):
    assert unpack(data[:needed]).size == (300, 257)
    with pytest.raises(InvalidImage, match="header is cut off"):
        unpack(data[: needed - 1])


@pytest.mark.parametrize(
    "data",
    [
        LOSSY[:12] + b"ALPH" + LOSSY[16:],
        LOSSY[:23] + b"\x9d\x01\x2b" + LOSSY[26:],
        LOSSLESS[:12] + b"VP8 " + LOSSLESS[16:],
        LOSSLESS[:20] + b"\x2e" + LOSSLESS[21:],
        EXTENDED[:12] + b"VP8Y" + EXTENDED[16:],
    ],
    ids=["other chunk", "no start code", "no lossy header", "no signature", "unknown chunk"],
)
def test_a_webp_without_a_valid_header_is_refused(data):
    with pytest.raises(InvalidImage, match="corrupt"):
        unpack(data)


def test_what_else_pillow_says_of_an_avif_is_not_hidden(monkeypatch):
    def refuse(*_):
        raise SyntaxError("not what it seems")

    picture = unpack(encode(scene(), "AVIF"))
    monkeypatch.setattr(EncodedImage, "open", refuse)

    with pytest.raises(SyntaxError, match="not what it seems"):
        picture.open()


@pytest.mark.parametrize("marker", [0x01, 0xD0, 0xD7, 0xD8, 0xD9, 0xC8, 0xF0, 0xFD])
def test_markers_without_a_length_stay_where_they_are(marker):
    plain = encode(noise(64, 48), "JPEG")

    assert unpack(insert_after_soi(plain, bytes([0xFF, marker]))).data == insert_after_soi(plain, bytes([0xFF, marker]))


def test_a_sequential_jpeg_counts_as_one_of_several_scans_where_its_first_scan_lacks_a_component():
    whole = encode(noise(64, 48), "JPEG", subsampling=0)
    at = whole.index(b"\xff\xc0") + 5
    whole = whole[:at] + struct.pack(">HH", 5000, 5000) + whole[at + 4 :]  # of 75 million coefficients
    scan = whole.index(b"\xff\xda\0\x0c\3")
    parts = whole[: scan + 4] + b"\1" + whole[scan + 5 :]

    assert unpack(whole).bounded
    assert not unpack(parts).bounded


def test_the_sender_is_told_the_decoders_reason_in_one_line():
    with pytest.raises(InvalidImage, match=r"^the JPEG picture does not decode: image file is truncated[^\n]*$"):
        preprocess(encode(noise(64, 48), "JPEG")[:800], config())


def test_the_range_of_a_row_of_more_than_a_million_numbers_is_measured():
    row = Image.new("I", (1_000_001, 1), 70_000)

    convert = converter(row, "L")

    assert convert is not None
    assert convert(row.crop((0, 0, 1, 1))).getpixel((0, 0)) == 0


@pytest.mark.parametrize(
    ("resample", "source", "target", "expected"),
    [
        (Image.Resampling.BICUBIC, 100.0, 10, 21),
        (Image.Resampling.BICUBIC, 10.0, 100, 3),
        (Image.Resampling.LANCZOS, 95.0, 10, 30),
        (Image.Resampling.BOX, 30.0, 10, 3),
    ],
)
def test_a_filter_looks_at_its_radius_beyond_a_part(resample, source, target, expected):
    assert _margin(source, target, resample) == expected


def test_the_canvas_of_a_gif_holds_all_its_frames_behind_palettes_of_their_own():
    header = b"GIF89a" + struct.pack("<HHBBB", 4, 3, 0, 0, 0)
    first = b"," + struct.pack("<HHHHB", 1, 2, 5, 6, 0x81) + bytes(12) + b"\2\1\0\0"
    second = b"," + struct.pack("<HHHHB", 10, 20, 30, 40, 0) + b"\2\0"

    for frames, canvas, size in ((first, (6, 8), (6, 8)), (first + second, (6, 8), (40, 60))):
        picture = unpack(header + frames + b";")
        assert struct.unpack_from("<HH", picture.data, 6) == canvas  # what is decoded is the first frame
        assert picture.size == size


@pytest.mark.parametrize("control", [b"!\xf9\0", b"!\xf9\1\xff\0", b"!\xf9\4\xff\0\0\0\0"])
def test_a_graphic_control_of_a_gif_may_be_shorter_than_it_should(control):
    frame = b"," + struct.pack("<HHHHB", 0, 0, 4, 3, 0) + b"\2\0;"
    header = b"GIF89a" + struct.pack("<HHBBB", 4, 3, 0, 0, 0)

    kept = unpack(header + control + frame).data

    assert kept == header + control.replace(b"\xff", b"\xe3") + frame  # without how the frame is disposed of


@pytest.mark.parametrize(("kind", "count", "inline"), [(4, 1, True), (3, 2, True), (1, 4, True), (1, 5, False)])
def test_a_value_of_four_bytes_stands_in_its_entry(kind, count, inline):
    entry = struct.pack("<HHLL", 256, kind, count, 0x08070605)
    directory = read_directory(b"II*\0" + struct.pack("<LH", 8, 1) + entry + bytes(4) + b"value")

    assert directory is not None
    field = directory.fields[0]
    assert directory.value_offset(field) == (None if inline else 0x08070605)
    assert directory.value(field, b"value") == (b"\5\6\7\x08" if inline else b"")


def test_a_bitmap_with_a_short_header_has_no_field_that_says_run_lengths():
    pixels = np.zeros((800, 1000, 3), np.uint8)
    pixels[-1, 1, 1] = 1  # rows stand from below, and pixels begin 26 bytes into the file
    data = struct.pack("<2sIII", b"BM", 26 + pixels.nbytes, 0, 26) + struct.pack("<IHHHH", 12, 1000, 800, 1, 24)
    data += pixels[::-1].tobytes()
    assert data[30:34] == b"\1\0\0\0"

    with unpack(data).open() as picture:
        assert np.array_equal(np.asarray(picture)[:, :, ::-1], pixels)
