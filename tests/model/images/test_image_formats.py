"""Every format and pixel mode comes out as RGB, upright, first picture only, within the limits."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import time
import tracemalloc
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from model.errors import ImageTooLarge, InvalidImage, UnsupportedImageFormat
from model.images import decode as image_decode
from model.images.decode import SUPPORTED_FORMATS, decode
from model.images.preprocess import preprocess
from tests.model.images.pictures import (
    as_is,
    black_png,
    config,
    difference,
    encode,
    insert_after_ihdr,
    insert_after_soi,
    jpeg_segment,
    noise,
    png_chunk,
    scene,
)

FORMATS = ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"]
XMP = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


def seen(data: bytes, image: Image.Image, channels: int = 3) -> np.ndarray:
    return preprocess(data, as_is(image, channels), scaled_decode=False)


# --- modes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(("PNG", mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")),
        *(("TIFF", mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB")),
        *(("BMP", mode) for mode in ("1", "L", "P", "RGB", "RGBA")),
        *(("GIF", mode) for mode in ("L", "P")),
        *(("WEBP", mode) for mode in ("RGB", "RGBA")),
    ],
)
def test_every_mode_becomes_the_rgb_that_pillow_converts_to(name, mode):
    image = scene()
    if mode == "RGBA":
        image.putalpha(noise(*image.size, channels=1))
    image = image.quantize(64) if mode == "P" else image.convert(mode)
    data = encode(image, name, **({"lossless": True, "exact": True} if name == "WEBP" else {}))

    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))

    assert np.array_equal(seen(data, image), expected)


@pytest.mark.parametrize("transparency", [3, bytes(range(64)), bytes([255] * 20 + [0])])
def test_a_transparent_palette_keeps_its_colours(transparency):
    image = scene().quantize(64)

    pixels = seen(encode(image, "PNG", transparency=transparency), image)

    assert np.array_equal(pixels, np.asarray(image.convert("RGB")))


def test_alpha_is_dropped_and_not_blended():
    image = scene()
    opaque = np.asarray(image)
    image.putalpha(0)

    assert np.array_equal(seen(encode(image, "PNG"), image), opaque)


@pytest.mark.parametrize("adobe", [True, False])
def test_cmyk_jpegs_are_inverted_as_pillow_does(adobe):
    image = scene().convert("CMYK")
    data = encode(image, "JPEG", quality=100)
    if not adobe:
        start = data.index(b"\xff\xeeAdobe"[:2])
        data = data[:start] + data[start + 2 + struct.unpack(">H", data[start + 2 : start + 4])[0] :]

    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))

    assert np.array_equal(seen(data, image), expected)


@pytest.mark.parametrize("name", ["PNG", "TIFF"])
@pytest.mark.parametrize("order", ["<", ">"])
def test_16_bits_are_scaled_and_not_clipped(name, order):
    values = np.linspace(0, 65535, 64 * 64).astype(order + "u2").reshape(64, 64)
    image = Image.fromarray(values.astype("<u2"))
    if order == ">":
        image = Image.frombytes("I;16B", (64, 64), values.tobytes())

    pixels = seen(encode(image, name), image)

    assert np.abs(pixels[:, :, 0] - values / 257.0).max() <= 1
    assert np.ptp(pixels, axis=2).max() == 0


@pytest.mark.parametrize(
    ("mode", "values", "expected"),
    [
        ("F", [0.0, 0.25, 0.5, 1.0], [0, 64, 128, 255]),
        ("F", [0.0, 10.0, 127.0, 255.0], [0, 10, 127, 255]),
        ("F", [0.0, 256.0, 32768.0, 65535.0], [0, 1, 128, 255]),
        ("F", [-1.0, 0.0, 1.0, 3.0], [0, 64, 128, 255]),
        ("F", [np.nan, 0.0, np.inf, 1.0], [0, 0, 0, 255]),
        ("F", [np.nan, np.nan, np.inf, -np.inf], [0, 0, 0, 0]),
        ("F", [7e5, 7e5, 7e5, 7e5], [0, 0, 0, 0]),
        ("F", [-3e38, 0.0, 0.0, 3e38], [0, 128, 128, 255]),
        ("I", [0, 10, 127, 255], [0, 10, 127, 255]),
        ("I", [0, 256, 32768, 65535], [0, 1, 128, 255]),
        ("I", [-(2**31), 0, 0, 2**31 - 1], [0, 128, 128, 255]),
        ("I", [1, 1, 1, 1], [1, 1, 1, 1]),
    ],
)
def test_numbers_without_a_stated_range_are_scaled_from_the_likeliest(mode, values, expected):
    array = np.array([values], dtype=np.float32 if mode == "F" else np.int32)
    image = Image.fromarray(array)

    pixels = seen(encode(image, "TIFF"), image)

    assert difference(pixels[0, :, 0], np.array(expected)) <= 1


def test_an_icc_profile_changes_nothing():
    image = scene()
    from PIL import ImageCms

    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()

    for name in ("PNG", "JPEG", "TIFF"):
        assert np.array_equal(seen(encode(image, name, icc_profile=profile), image), seen(encode(image, name), image))


# --- orientation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_pictures_come_out_upright(name, orientation):
    data = encode(scene(), name, orientation)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")

    assert difference(seen(data, upright), np.asarray(upright)) <= 1
    # and not by chance: the same picture turned any other way looks different
    stored = scene()
    turned = ImageOps.exif_transpose(Image.open(io.BytesIO(encode(stored, "PNG", orientation))))
    assert difference(seen(data, upright), np.asarray(turned.convert("RGB"))) <= 40


def test_mpo_is_its_first_picture_upright():
    first, second = scene(), Image.new("RGB", (96, 64), "red")
    exif = Image.Exif()
    exif[274] = 6
    data = encode(first, "MPO", save_all=True, append_images=[second], exif=exif)

    pixels = preprocess(data, config((96, 64), resize="squash"), scaled_decode=False)

    assert Image.open(io.BytesIO(data)).format == "MPO"
    upright = np.asarray(first.transpose(Image.Transpose.ROTATE_270))
    assert difference(pixels, upright) <= 40


def test_xmp_turns_a_picture_without_exif():
    image = scene()
    packet = b"http://ns.adobe.com/xap/1.0/\0" + XMP
    in_jpeg = insert_after_soi(encode(image, "JPEG"), jpeg_segment(0xE1, packet))
    in_png = insert_after_ihdr(encode(image, "PNG"), png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP))
    in_webp = encode(image, "WEBP", xmp=XMP)
    in_tiff = encode(image, "TIFF", tiffinfo={700: XMP})

    for data in (in_jpeg, in_png, in_webp, in_tiff):
        assert decode(data, max_pixels=10**6).orientation == 6


def test_exif_comes_before_xmp():
    data = insert_after_soi(
        encode(scene(), "JPEG", orientation=3), jpeg_segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + XMP)
    )

    assert decode(data, max_pixels=10**6).orientation == 3


@pytest.mark.parametrize("packed", [True, False])
def test_exif_in_a_png_text_of_imagemagick_turns_the_picture(packed):
    exif = Image.Exif()
    exif[274] = 8
    body = exif.tobytes()
    text = b"\nexif\n%8d\n" % len(body) + body.hex().encode() + b"\n"
    name = b"Raw profile type exif\0"
    chunk = png_chunk(b"zTXt", name + b"\0" + zlib.compress(text)) if packed else png_chunk(b"tEXt", name + text)

    assert decode(insert_after_ihdr(encode(scene(), "PNG"), chunk), max_pixels=10**6).orientation == 8


def test_exif_after_the_pixels_of_a_png_counts():
    exif = Image.Exif()
    exif[274] = 5
    data = encode(scene(), "PNG")
    end = data.index(b"IEND") - 4
    data = data[:end] + png_chunk(b"eXIf", exif.tobytes()[6:]) + data[end:]

    assert decode(data, max_pixels=10**6).orientation == 5


@pytest.mark.parametrize(
    "exif",
    [
        b"",
        b"Exif\0\0",
        b"Exif\0\0II*\0",
        b"Exif\0\0II*\0\xff\xff\xff\xff",
        b"Exif\0\0MM\0*\0\0\0\x08\xff\xff",
        b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x09\0\0\0",  # orientation 9
        b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x02\0\x01\0\0\0\x06\0\0\0",  # orientation as text
        b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\0\0\0\0\x06\0\0\0",  # no value at all
        b"\0" * 300,
    ],
)
def test_broken_exif_is_ignored(exif):
    image = scene()
    plain = encode(image, "JPEG")

    assert np.array_equal(seen(insert_after_soi(plain, jpeg_segment(0xE1, exif)), image), seen(plain, image))


# --- the first picture of several -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["GIF", "WEBP", "TIFF", "PNG", "AVIF"])
def test_of_several_pictures_the_first_counts(name):
    frames = [Image.new("RGB", (40, 30), colour) for colour in ("lime", "red", "blue")]
    data = encode(frames[0], name, save_all=True, append_images=frames[1:])

    pixels = seen(data, frames[0])

    assert getattr(Image.open(io.BytesIO(data)), "n_frames", 1) == 3
    assert difference(pixels, np.asarray(frames[0])) <= 3


def test_a_later_tiff_page_may_be_anything():
    data = bytearray(encode(scene(), "TIFF", save_all=True, append_images=[scene()]))
    with Image.open(io.BytesIO(bytes(data))) as image:
        image.seek(1)
        second = image.tag_v2.offset
    data[second:] = b"\xff" * (len(data) - second)

    assert difference(seen(bytes(data), scene()), np.asarray(scene())) == 0


# --- what is not a picture ------------------------------------------------------------------------


def test_no_bytes_are_an_invalid_image():
    with pytest.raises(InvalidImage, match="empty"):
        preprocess(b"", config())


@pytest.mark.parametrize(
    "data",
    [
        b"hello, this is text",
        b"%PDF-1.7",
        b"%!PS-Adobe-3.0 EPSF-3.0",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"\0\0\0\x20ftypisom\0\0\2\0isomiso2mp41",
        b"RIFF\x24\0\0\0WAVEfmt ",
        b"P6 1 1 255 \0\0\0",
        b"\x76\x2f\x31\x01",
        b"8BPS\0\1",
        b"\0",
    ],
)
def test_other_magic_is_unsupported(data):
    with pytest.raises(UnsupportedImageFormat):
        preprocess(data, config())


@pytest.mark.parametrize("name", ["PPM", "ICO", "TGA", "JPEG2000", "PCX", "SGI", "DDS", "EPS"])
def test_formats_that_pillow_could_read_are_unsupported(name):
    image = Image.new("RGB", (32, 32), "red")

    with pytest.raises(UnsupportedImageFormat):
        preprocess(encode(image, name), config())


@pytest.mark.parametrize("name", FORMATS)
def test_every_truncation_is_an_invalid_image(name):
    data = encode(noise(64, 48), name)
    # A file's last bytes may say only that it ends.
    for length in {4, 16, 40, len(data) // 4, len(data) // 2, len(data) * 3 // 4, len(data) - 40}:
        with pytest.raises((InvalidImage, UnsupportedImageFormat)) as error:
            preprocess(data[:length], config())
        assert length < 16 or error.type is InvalidImage, length


def test_heic_without_the_extra_is_unsupported_and_says_how_to_get_it(monkeypatch):
    monkeypatch.delitem(image_decode._READERS, "HEIF", raising=False)
    with pytest.raises(UnsupportedImageFormat, match=r"vitserve\[heic\]"):
        preprocess(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + b"\0" * 40, config())


@pytest.mark.skipif("HEIF" not in SUPPORTED_FORMATS, reason="pillow-heif is not installed")
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_heic_with_the_extra_is_decoded_upright(orientation):
    import pillow_heif

    pillow_heif.register_heif_opener()
    data = encode(scene(), "HEIF", orientation, quality=95)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")

    assert difference(seen(data, upright), np.asarray(upright)) <= 1


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_the_pixel_limit_is_exact(name):
    data = encode(Image.new("RGB", (64, 50)), name)

    allowed = 64 * 50 * (3 if name in ("WEBP", "AVIF") else 1)  # their decoders hold several copies
    assert preprocess(data, config(), max_pixels=allowed).shape == (32, 32, 3)
    with pytest.raises(ImageTooLarge, match=r"64 x 50"):
        preprocess(data, config(), max_pixels=64 * 50 - 1)


def bomb(name: str) -> bytes:
    """A small file that claims 60,000 x 60,000 pixels, or the most that its format can."""
    data = bytearray(encode(noise(64, 48), name))
    if name == "JPEG":
        start = data.index(b"\xff\xc0") + 5
        data[start : start + 4] = struct.pack(">HH", 60_000, 60_000)
    elif name == "PNG":
        header = struct.pack(">II", 60_000, 60_000) + data[24:29]
        data[8:33] = png_chunk(b"IHDR", header)
    elif name == "GIF":
        data[6:10] = struct.pack("<HH", 60_000, 60_000)
    elif name == "BMP":
        data[18:26] = struct.pack("<ii", 60_000, 60_000)
    elif name == "WEBP":
        data[26:30] = struct.pack("<HH", 16_383, 16_383)
    elif name == "TIFF":
        for tag in (256, 257):
            at = data.index(struct.pack("<HHL", tag, 4, 1)) + 8
            data[at : at + 4] = struct.pack("<L", 60_000)
    elif name == "AVIF":
        at = data.index(b"ispe") + 8
        data[at : at + 8] = struct.pack(">II", 16_000, 16_000)  # libavif refuses more by itself
    return bytes(data)


@pytest.mark.parametrize("name", FORMATS)
def test_a_claimed_size_is_refused_before_anything_is_allocated(name):
    data = bomb(name)
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(ImageTooLarge):
            preprocess(data, config())
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize("place", ["canvas", "first frame", "second frame"])
def test_a_gif_is_as_large_as_all_its_frames_need(place):
    data = bytearray(encode(noise(40, 30), "GIF", save_all=True, append_images=[noise(40, 30, seed=1)]))
    if place == "canvas":
        data[6:10] = struct.pack("<HH", 60_000, 60_000)
    else:
        frames = [at for at in range(len(data)) if data[at : at + 9] == b",\0\0\0\0" + struct.pack("<HH", 40, 30)]
        at = frames[0 if place == "first frame" else 1]
        data[at + 1 : at + 5] = b"\xff\xff\xff\xff"

    with pytest.raises(ImageTooLarge):
        preprocess(bytes(data), config())


def test_a_side_of_millions_of_pixels_is_refused():
    with pytest.raises(ImageTooLarge, match="side"):
        preprocess(black_png(2_000_000, 1), config())


def test_an_operator_may_allow_more_than_pillow_would():
    data = black_png(13_500, 13_500, bits=1)  # Pillow refuses above 178,956,970

    assert preprocess(data, config(), max_pixels=200_000_000).max() == 0


def test_formats_that_need_more_memory_a_pixel_have_a_lower_limit():
    data = encode(Image.new("RGB", (1000, 1000)), "WEBP")

    with pytest.raises(ImageTooLarge, match="MB"):
        preprocess(data, config(), max_pixels=1_100_000)


PEAK = """
import re, sys
from pathlib import Path
from model.config import PreprocessConfig
from model.images.preprocess import preprocess
data = sys.stdin.buffer.read()
config = PreprocessConfig(size=(32, 32), resize="shortest_edge", resize_size=(32, 32), interpolation="bicubic",
                          mean=(0.5,) * 3, std=(0.5,) * 3)
preprocess(data, config)
# Not getrusage: its peak begins with that of the process that started this one.
print(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.parametrize("colour_type", [2, 6], ids=["RGB", "RGBA"])
def test_the_largest_picture_takes_less_than_500_megabytes(colour_type):
    data = black_png(8000, 8000, colour_type=colour_type)

    done = subprocess.run([sys.executable, "-c", PEAK], input=data, capture_output=True, check=True)

    assert int(done.stdout) / 1e3 < 500


# --- metadata that is an attack -------------------------------------------------------------------


def overlapping_directory(entries: int, size: int) -> bytes:
    """An Exif block whose fields all claim the same bytes: `entries` x `size` if a reader copies each."""
    fields = b"".join(struct.pack("<HHLL", 40_000 + tag, 7, size, 8) for tag in range(entries))
    return b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", entries) + fields + b"\0" * 4


@pytest.mark.parametrize("place", ["JPEG", "PNG", "WEBP", "AVIF"])
def test_overlapping_exif_takes_no_memory(place):
    image = noise(64, 48)
    exif = overlapping_directory(5000, 60_000)
    with warnings.catch_warnings(action="ignore"):  # Pillow's AVIF writer looks into it
        data = encode(image, place, exif=exif)

    tracemalloc.start()
    try:
        preprocess(data, config())
    except InvalidImage:
        assert place == "AVIF"  # Pillow would read it while it opens the file
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()

    assert peak < 10_000_000


@pytest.mark.parametrize(
    "data",
    [
        insert_after_soi(encode(noise(8, 8), "JPEG"), jpeg_segment(0xFE, b"") * 1_000_000),
        insert_after_soi(encode(noise(8, 8), "JPEG"), jpeg_segment(0xE1, b"Exif\0\0") * 1_000_000),
        insert_after_soi(encode(noise(8, 8), "JPEG"), jpeg_segment(0xDB, b"") * 1_000_000),
        insert_after_ihdr(encode(noise(8, 8), "PNG"), png_chunk(b"teXt", b"") * 500_000),
        insert_after_ihdr(encode(noise(8, 8), "PNG"), png_chunk(b"IDAT", b"") * 500_000),
    ],
    ids=["comments", "exif", "tables", "texts", "pixels"],
)
def test_files_of_very_many_parts_are_refused_soon(data):
    start = time.process_time()

    with pytest.raises(InvalidImage, match="parts"):
        preprocess(data, config())

    assert time.process_time() - start < 0.5


@pytest.mark.parametrize("filler", [b"\xff" * 5_000_000, b"\xff\0" * 2_500_000], ids=["fill bytes", "rubbish"])
def test_what_stands_between_the_segments_of_a_jpeg_is_skipped_soon(filler):
    image = noise(64, 48)
    plain = encode(image, "JPEG")
    start = time.process_time()

    pixels = seen(insert_after_soi(plain, filler), image)

    assert time.process_time() - start < 0.5
    assert np.array_equal(pixels, seen(plain, image))


def test_gif_comments_without_end_are_skipped_soon():
    data = encode(noise(8, 8), "GIF")
    header = 13 + (3 << (data[10] & 7) + 1 if data[10] & 128 else 0)
    data = data[:header] + b"!\xfe" + b"\1x" * 1_000_000 + b"\0" + data[header:]
    start = time.process_time()

    with pytest.raises(InvalidImage):
        preprocess(data, config())

    assert time.process_time() - start < 0.5


def test_compressed_text_of_a_png_is_never_unpacked():
    image = noise(64, 48)
    text = png_chunk(b"zTXt", b"a\0\0" + zlib.compress(b"x" * 50_000_000, 9))
    profile = png_chunk(b"iCCP", b"a\0\0" + zlib.compress(b"x" * 50_000_000, 9))
    hidden = png_chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(b"0" * 50_000_000, 9))
    data = insert_after_ihdr(encode(image, "PNG"), text, profile, hidden)
    tracemalloc.start()
    try:
        assert np.array_equal(seen(data, image), np.asarray(image))
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def tiff(*fields: tuple[int, int, int, int], size: int = 4096) -> bytes:
    entries = b"".join(struct.pack("<HHLL", *field) for field in sorted(fields))
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(fields)) + entries + b"\0" * size


GREY = [
    (256, 3, 1, 32),
    (257, 3, 1, 32),
    (258, 3, 1, 8),
    (259, 3, 1, 1),
    (262, 3, 1, 1),
    (273, 4, 1, 8),
    (279, 4, 1, 1024),
]


def test_a_small_tiff_by_hand_decodes():
    assert preprocess(tiff(*GREY), config()).shape == (32, 32, 3)


@pytest.mark.parametrize("orientation", [1, 6])
def test_bigtiff_is_read_like_tiff(orientation):
    wanted = config()
    small, big = (encode(scene(), "TIFF", orientation, big_tiff=big) for big in (False, True))

    assert big[2] == 43
    assert np.array_equal(preprocess(big, wanted), preprocess(small, wanted))


@pytest.mark.parametrize(
    "fields",
    [
        [*GREY[:5], (273, 4, 500_000, 8), GREY[6]],
        [*GREY[:2], (258, 3, 1_500_000, 8), *GREY[3:]],
        [*GREY, (320, 3, 800_000, 8)],
    ],
    ids=["strips", "bits", "colours"],
)
def test_tiff_fields_of_very_many_values_are_refused(fields):
    with pytest.raises(InvalidImage):
        preprocess(tiff(*fields, size=4_000_000), config())


def test_a_tiff_tile_larger_than_the_picture_is_bounded():
    fields = [
        *GREY[:3],
        (259, 3, 1, 8),
        GREY[4],
        (322, 4, 1, 40_000),
        (323, 4, 1, 40_000),
        (324, 4, 1, 8),
        (325, 4, 1, 9),
    ]

    with pytest.raises(ImageTooLarge):
        preprocess(tiff(*fields), config())


def test_a_progressive_jpeg_of_very_many_scans_is_refused():
    data = encode(noise(64, 48), "JPEG", progressive=True)
    scan = data[data.rindex(b"\xff\xda") : -2]

    with pytest.raises(InvalidImage, match="scans"):
        preprocess(data[:-2] + scan * 2_000 + data[-2:], config())


def test_a_large_run_length_bmp_is_refused():
    data = bytearray(encode(Image.new("P", (64, 64)), "BMP") + b"\0" * 3_000_000)
    data[30] = 1

    with pytest.raises(InvalidImage, match="run-length"):
        preprocess(bytes(data), config())
