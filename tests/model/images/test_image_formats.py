"""Every format and pixel mode becomes upright RGB; other files are refused."""

import functools
import io
import re
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from model.errors import ImageError, InvalidImage, UnsupportedImageFormat
from model.images.decode import decode
from model.images.formats import SUPPORTED_FORMATS, format_of
from model.images.preprocess import min_decoded_size, preprocess, resized_size
from tests.model.images.pictures import (
    FORMATS,
    config,
    difference,
    encode,
    insert_after_soi,
    jpeg_segment,
    noise,
    png_chunk,
    scene,
    seen,
)


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
def test_every_mode_converts_like_pillow(name, mode):
    image = scene()
    if mode == "RGBA":
        image.putalpha(noise(*image.size, channels=1))
    image = image.quantize(64) if mode == "P" else image.convert(mode)
    data = encode(image, name, **({"lossless": True, "exact": True} if name == "WEBP" else {}))

    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))

    assert np.array_equal(seen(data, image), expected)


def test_alpha_is_dropped():
    image = scene()
    opaque = np.asarray(image)
    image.putalpha(0)

    assert np.array_equal(seen(encode(image, "PNG"), image), opaque)


@pytest.mark.parametrize("adobe", [True, False])
def test_cmyk_jpegs_are_inverted_like_pillow(adobe):
    photo = scene()
    image = photo.convert("CMYK")
    data = encode(image, "JPEG", quality=100)
    if not adobe:
        start = data.index(b"\xff\xeeAdobe"[:2])
        data = (
            data[:start] + data[start + 2 + struct.unpack(">H", data[start + 2 : start + 4])[0] :]
        )

    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))

    assert np.array_equal(seen(data, image), expected)
    assert difference(expected, np.asarray(photo)) <= 4


def renumbered(jpeg: bytes) -> bytes:
    """Number the components R, G and B 1, 2 and 3, which hide their meaning from a decoder."""
    return jpeg.replace(b"R\x11\0G\x11\0B\x11\0", b"\1\x11\0\2\x11\0\3\x11\0").replace(
        b"R\0G\0B\0", b"\1\0\2\0\3\0"
    )


@pytest.mark.parametrize(("mode", "transform"), [("RGB", 0), ("CMYK", 2)], ids=["RGB", "YCCK"])
def test_adobe_marker_gives_the_jpeg_colours(mode, transform):
    image = scene().convert(mode)
    data = renumbered(
        encode(image, "JPEG", quality=100, **({"keep_rgb": True} if mode == "RGB" else {}))
    )
    marker = data.index(b"\xff\xee\0\x0eAdobe")
    data = data[: marker + 15] + bytes([transform]) + data[marker + 16 :]
    without = data[:marker] + data[marker + 16 :]

    pixels = seen(data, image)

    expected, other = (
        np.asarray(Image.open(io.BytesIO(each)).convert("RGB")) for each in (data, without)
    )
    assert np.array_equal(pixels, expected)
    assert difference(expected, other) > 100
    if mode == "RGB":
        assert difference(pixels, np.asarray(image)) <= 3


@pytest.mark.parametrize("name", ["PNG", "TIFF"])
@pytest.mark.parametrize("order", ["<", ">"])
def test_16_bits_are_scaled_to_8(name, order):
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
        ("F", [0.0, 0.01, 0.0, 0.02], [0, 3, 0, 5]),
        ("I", [0, 10, 127, 255], [0, 10, 127, 255]),
        ("I", [0, 256, 32768, 65535], [0, 1, 128, 255]),
        ("I", [0, 2**29, 2**30, 2**31 - 1], [0, 64, 128, 255]),
        ("I", [1, 1, 1, 1], [1, 1, 1, 1]),
    ],
)
def test_unstated_range_is_the_likeliest(mode, values, expected):
    array = np.array([values], dtype=np.float32 if mode == "F" else np.int32)
    image = Image.fromarray(array)

    with warnings.catch_warnings(action="error"):
        pixels = seen(encode(image, "TIFF"), image)

    assert difference(pixels[0, :, 0], np.array(expected)) <= 1


@pytest.mark.parametrize(
    "values",
    [
        np.array([0, 1.02], np.float32),
        np.array([0, 1, 5], np.float32),
        np.array([0, 8191], np.float32),
        np.array([0, 7e5], np.float32),
        np.array([-0.1, 1], np.float32),
        np.array([-3e38, 3e38], np.float32),
        np.array([0, 4095], np.int32),
        np.array([-1, 255], np.int32),
    ],
)
def test_unclear_range_of_pixels_is_refused(values):
    data = encode(Image.fromarray(values[np.newaxis]), "TIFF")
    with pytest.raises(InvalidImage, match="is expected: scale them, or convert the picture to 8"):
        preprocess(data, config())


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_pixel_is_refused(place, value):
    numbers = np.array([[0.0, 0.25, 0.5, 1.0]], np.float32)
    numbers[0, place] = value

    with pytest.raises(InvalidImage, match="pixels are not finite"):
        preprocess(encode(Image.fromarray(numbers), "TIFF"), config())


def test_an_icc_profile_changes_nothing():
    image = scene()
    from PIL import ImageCms

    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()

    for name in ("PNG", "JPEG", "TIFF"):
        assert np.array_equal(
            seen(encode(image, name, icc_profile=profile), image), seen(encode(image, name), image)
        )


@pytest.mark.parametrize("name", ["GIF", "WEBP", "TIFF", "PNG", "AVIF"])
def test_only_the_first_picture_is_used(name):
    frames = [Image.new("RGB", (40, 30), colour) for colour in ("lime", "red", "blue")]
    data = encode(frames[0], name, save_all=True, append_images=frames[1:])

    pixels = seen(data, frames[0])

    assert getattr(Image.open(io.BytesIO(data)), "n_frames", 1) == 3
    assert difference(pixels, np.asarray(frames[0])) <= 3


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


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("JPEG", b"\n", b"\r\n"),
        ("PNG", b"\n", b"\r\n"),
        ("PNG", b"\r\n", b"\n"),
        ("PNG", b"\r", b"\n"),
    ],
)
def test_transfer_as_text_is_recognised(name: str, before: bytes, after: bytes) -> None:
    damaged = encode(scene(), name).replace(before, after)
    with pytest.raises(UnsupportedImageFormat, match=f"a {name} whose line ends were changed"):
        format_of(damaged)


@pytest.mark.parametrize("name", ["PPM", "ICO", "TGA", "JPEG2000", "PCX", "SGI", "DDS", "EPS"])
def test_other_formats_of_pillow_are_refused(name):
    image = Image.new("RGB", (32, 32), "red")

    with pytest.raises(UnsupportedImageFormat):
        preprocess(encode(image, name), config())


@pytest.mark.parametrize("name", FORMATS)
def test_every_truncation_is_refused(name):
    data = encode(noise(64, 48), name)
    # A file's last bytes may be only an end marker.
    for length in {4, 16, 40, len(data) // 4, len(data) // 2, len(data) * 3 // 4, len(data) - 40}:
        with pytest.raises((InvalidImage, UnsupportedImageFormat)) as error:
            preprocess(data[:length], config())
        assert length < 16 or error.type is InvalidImage, length


@pytest.mark.skipif("HEIF" not in SUPPORTED_FORMATS, reason="pillow-heif is not installed")
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_heic_pictures_come_out_upright(orientation):
    import pillow_heif

    pillow_heif.register_heif_opener()
    data = encode(scene(), "HEIF", orientation, quality=95)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")

    assert difference(seen(data, upright), np.asarray(upright)) <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_pictures_come_out_upright(name, orientation):
    data = encode(scene(), name, orientation)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")

    assert difference(seen(data, upright), np.asarray(upright)) <= 1
    # not by chance: every other turn of the picture looks different
    stored = scene()
    turned = ImageOps.exif_transpose(Image.open(io.BytesIO(encode(stored, "PNG", orientation))))
    assert difference(seen(data, upright), np.asarray(turned.convert("RGB"))) <= 40


def test_mpo_is_its_first_picture_upright():
    first = scene()
    second = Image.new("RGB", (96, 64), "red")
    exif = Image.Exif()
    exif[274] = 6
    data = encode(first, "MPO", save_all=True, append_images=[second], exif=exif)

    pixels = preprocess(data, config((96, 64), resize="squash"), scaled_decode=False)

    assert Image.open(io.BytesIO(data)).format == "MPO"
    upright = np.asarray(first.transpose(Image.Transpose.ROTATE_270))
    assert difference(pixels, upright) <= 40


def test_exif_after_png_pixels_is_read():
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
        b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\0\0\0\0\x06\0\0\0",  # no value
        b"\0" * 300,
    ],
)
def test_broken_exif_is_ignored(exif):
    image = scene()
    plain = encode(image, "JPEG")

    assert np.array_equal(
        seen(insert_after_soi(plain, jpeg_segment(0xE1, exif)), image), seen(plain, image)
    )


@functools.cache
def damageable(kind: str) -> bytes:
    """A JPEG that is decoded at 1/8 for a model of 16 pixels."""
    image = noise(400, 300).resize((100, 75)).resize((400, 300))  # some detail, a few kilobytes
    if kind in ("grey", "cmyk"):
        return encode(image.convert("L" if kind == "grey" else "CMYK"), "JPEG")
    restarts = {"restart_marker_rows": 2} if "restarts" in kind else {}
    return encode(image, "JPEG", progressive="progressive" in kind, **restarts)


def verdict(data: bytes | bytearray, *, scaled_decode: bool) -> str:
    try:
        preprocess(data, config((16, 16)), scaled_decode=scaled_decode)
    except ImageError as error:
        return type(error).__name__
    return "ok"


class TestScaledDecode:
    def decoded(self, data: bytes, min_size: tuple[int, int]) -> Image.Image:
        return decode(data, max_pixels=10**7, min_size=lambda width, height: min_size).image

    @pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}])
    @pytest.mark.parametrize(
        ("min_size", "size"),
        [
            ((100, 75), (100, 75)),
            ((101, 75), (200, 150)),
            ((100, 76), (200, 150)),
            ((200, 150), (200, 150)),
            ((201, 150), (400, 300)),
            ((400, 300), (400, 300)),
            ((401, 300), (800, 600)),
            ((1, 1), (100, 75)),
        ],
    )
    def test_largest_sufficient_scale_is_used(self, min_size, size, options):
        data = encode(scene(800, 600), "JPEG", **options)

        assert self.decoded(data, min_size).size == size

    @pytest.mark.parametrize("orientation", [1, 3, 6, 7])
    @pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
    @pytest.mark.parametrize("size", [(803, 605), (1600, 333)])
    def test_content_stays_in_position(self, size, mode, orientation):
        data = encode(scene(*size).convert(mode), "JPEG", orientation, quality=95)
        wanted = config((32, 32), (36, 36))

        scaled = preprocess(data, wanted)
        full = preprocess(data, wanted, scaled_decode=False)

        assert difference(scaled, full) <= 6

    @pytest.mark.parametrize("interpolation", ["nearest", "box"])
    def test_filters_with_hard_edges_decode_all(self, interpolation):
        data = encode(scene(803, 605), "JPEG", quality=95)
        wanted = config((32, 32), (36, 36), interpolation=interpolation)

        assert np.array_equal(
            preprocess(data, wanted), preprocess(data, wanted, scaled_decode=False)
        )

    @settings(max_examples=150, deadline=None)
    @given(
        st.integers(1, 900),
        st.integers(1, 900),
        st.integers(1, 40),
        st.integers(1, 40),
        st.integers(0, 8),
        st.sampled_from(("squash", "shortest_edge")),
        st.sampled_from((1, 6)),
        st.booleans(),
    )
    @example(512, 512, 32, 32, 0, "squash", 1, False)
    @example(511, 512, 32, 32, 0, "squash", 1, False)
    @example(1, 900, 1, 1, 0, "shortest_edge", 6, True)
    def test_scaling_leaves_twice_the_target(
        self, width, height, rows, columns, more, resize, orientation, progressive
    ):
        wanted = config((rows, columns), (rows + more, columns + more), resize=resize)
        data = encode(
            Image.new("L", (width, height), 99), "JPEG", orientation, progressive=progressive
        )
        picture = decode(data, max_pixels=10**6, min_size=min_decoded_size(wanted))

        upright = (height, width) if orientation == 6 else (width, height)
        enough = [2 * side for side in resized_size(*upright, wanted)][
            :: -1 if orientation == 6 else 1
        ]
        assert picture.image.size == (-(-width // picture.scale), -(-height // picture.scale))
        if picture.scale > 1:
            assert picture.image.width >= enough[0] and picture.image.height >= enough[1]
        if picture.scale < 8:
            assert width < 2 * picture.scale * enough[0] or height < 2 * picture.scale * enough[1]

    @settings(max_examples=150, deadline=None)
    @given(
        st.data(),
        st.sampled_from(
            ("baseline", "progressive", "grey", "cmyk", "restarts", "progressive restarts")
        ),
    )
    def test_damage_is_refused_at_any_scale(self, draw, kind):
        data = bytearray(damageable(kind))
        for place in draw.draw(
            st.lists(st.integers(2, len(data) - 1), max_size=4), label="bytes set"
        ):
            data[place] = draw.draw(
                st.sampled_from((0, 0xFF, 0xD9, 0xDA)) | st.integers(0, 255), label="to"
            )
        del data[draw.draw(st.integers(2, len(data)), label="cut") :]

        assert verdict(data, scaled_decode=True) == verdict(data, scaled_decode=False)

    @pytest.mark.parametrize(
        "kind", ["baseline", "progressive", "grey", "cmyk", "restarts", "progressive restarts"]
    )
    def test_a_truncated_file_is_refused(self, kind):
        data = damageable(kind)

        assert verdict(data, scaled_decode=True) == "ok"
        for length in (len(data) // 2, len(data) - 40):
            assert verdict(data[:length], scaled_decode=True) == "InvalidImage"

    @pytest.mark.parametrize("kind", ["baseline", "grey", "cmyk", "restarts"])
    @pytest.mark.parametrize("scaled_decode", [True, False])
    def test_bytes_missing_before_the_end_are_told(self, kind, scaled_decode):
        data = bytes(damageable(kind))
        middle = len(data) // 2

        cut = data[:middle] + b"\xff\xd9"
        for damaged in (cut, cut + data, data[:middle] + data[middle + 4096 :]):
            with pytest.raises(InvalidImage, match="bytes are missing"):
                preprocess(damaged, config((16, 16)), scaled_decode=scaled_decode)

    @pytest.mark.parametrize("kind", ["baseline", "grey", "cmyk"])
    @pytest.mark.parametrize("scaled_decode", [True, False])
    def test_a_loss_in_the_last_row_is_told(self, kind, scaled_decode):
        data = bytes(damageable(kind))

        with pytest.raises(InvalidImage, match="bytes are missing"):
            preprocess(data[:-300] + data[-2:], config((16, 16)), scaled_decode=scaled_decode)

    def test_a_loss_in_a_large_photo_is_told(self):
        image = noise(104, 102).convert("L").resize((5200, 5100))  # more than a thread decodes
        data = encode(image, "JPEG")

        assert preprocess(data, config((16, 16))).shape == (16, 16, 3)
        with pytest.raises(InvalidImage, match="bytes are missing"):
            preprocess(data[:-1000] + data[-2:], config((16, 16)))

    @pytest.mark.parametrize("scaled_decode", [True, False])
    def test_the_pixel_limit_bounds_stored_size(self, scaled_decode):
        data = damageable("baseline")

        preprocess(data, config((16, 16)), max_pixels=400 * 300, scaled_decode=scaled_decode)
        with pytest.raises(ImageError, match="400 x 300"):
            preprocess(
                data, config((16, 16)), max_pixels=400 * 300 - 1, scaled_decode=scaled_decode
            )

    @pytest.mark.shared
    def test_scaled_photos_are_like_full_ones(self, shared):
        files = sorted((shared / "data" / "imagenet-samples").glob("*.JPEG"))[::7]
        wanted = config((32, 32))

        for file in files:
            data = file.read_bytes()
            levels = np.abs(
                preprocess(data, wanted).astype(int) - preprocess(data, wanted, scaled_decode=False)
            )
            assert levels.mean() < 1.5 and levels.max() <= 20, (
                file.name,
                levels.mean(),
                levels.max(),
            )


@pytest.fixture(scope="module")
def torture(shared: Path) -> Path:
    path = shared / "data" / "torture"
    if not path.is_dir():
        pytest.skip(f"no torture files: {path} does not exist")
    return path


def likeness(left: np.ndarray, right: np.ndarray) -> float:
    """Return the correlation of two pictures that were compressed separately."""
    return float(np.corrcoef(left.ravel().astype(float), right.ravel().astype(float))[0, 1])


@pytest.mark.shared
def test_rotated_avif_files_come_out_upright(torture):
    pictures = [
        preprocess((torture / "avif" / f"rot{number}mir0.avif").read_bytes(), config((64, 64)))
        for number in range(4)
    ]

    for number, picture in enumerate(pictures):
        assert likeness(picture, pictures[0]) > 0.9, number


@pytest.mark.parametrize(
    "name",
    [
        "grayscale_24x16_sampling2x2",
        "grayscale_long",
        "jpg-cmyk-1",
        "jpg-cmyk-2",
        "jpg-size-33x33",
        "jpg-size-8x8",
    ],
)
@pytest.mark.shared
def test_jpegs_match_their_references(torture, name):
    reference = torture / "jpeg-reftest" / f"{name}.png"
    wanted = config((16, 16), resize="squash")

    got, expected = (
        preprocess(path.read_bytes(), wanted) for path in (reference.with_suffix(".jpg"), reference)
    )

    assert np.abs(got.astype(int) - expected).mean() < 4


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"\0\0\0\x0cJXL \r\n\x87\n", "a JPEG XL picture: convert it"),
        (b"\xff\x0a" + bytes(20), "a JPEG XL picture: convert it"),
        (b"\0\0\0\x0cjP  \r\n\x87\n", "a JPEG 2000 picture: convert it"),
        (b"8BPS\0\1" + bytes(20), "a Photoshop document"),
        (b"\0\0\1\0\1\0\x10\x10" + bytes(20), "but an icon: convert it"),
        (b"\0\0\2\0" + bytes(8) + b"\x40\0\x30\0\x18\0" + bytes(20), "a TGA picture: convert it"),
        (b"\0\1\1\0\0\0\1\x18" + bytes(8) + b"\x08" + bytes(20), "a TGA picture: convert it"),
        (b"P6\n8 8\n255\n" + bytes(192), "a Netpbm picture"),
        (bytes(128) + b"DICM", "a DICOM picture"),
        (b"\x93NUMPY\1\0", "a NumPy array: encode it as PNG"),
        (b"\xef\xbb\xbf\xff\xd8\xff\xe0", "one after a byte order mark (EF BB BF): send"),
        (b"\r\n\x89PNG\r\n\x1a\n", "one after stray bytes, as a line break: send the file"),
        (b"\x1aE\xdf\xa3" + bytes(20), "a video: send a frame"),
        (b"RIFF\x20\0\0\0AVI LIST", "a video: send a frame"),
        (b"\0\0\0\x18ftypisom" + bytes(20), "send a frame of a video"),
        (b"PK\3\4" + bytes(20), "an archive or a compressed file: send the pictures in it"),
        (b"\x1f\x8b\x08" + bytes(20), "an archive or a compressed file"),
        (b"II\x1a\0\0\0HEAPCCDR" + bytes(20), "raw photos"),
    ],
)
def test_other_kinds_of_files_are_named(data: bytes, kind: str) -> None:
    with pytest.raises(UnsupportedImageFormat, match=re.escape(kind)):
        format_of(data)
