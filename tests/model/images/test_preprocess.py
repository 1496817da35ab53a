"""From bytes to the model's input: pixels equal to the original libraries', and their region."""

import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from model.config import PreprocessConfig
from model.images import resample
from model.images.decode import converter
from model.images.preprocess import (
    Region,
    min_decoded_size,
    model_input,
    preprocess,
    resized_size,
    upright_photo,
)
from model.images.resample import Axis, resample_part
from tests.model.images.pictures import FORMATS, as_is, config, difference, encode, noise, scene
from tests.timm_reference import timm

FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "hamming": Image.Resampling.HAMMING,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


def straightforward(data: bytes, wanted: PreprocessConfig) -> np.ndarray:
    """Return the picture in the order of the libraries: turn, convert, resize the whole, crop."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    rows, columns = wanted.resize_size
    if wanted.resize == "squash":
        width = columns
        height = rows
    elif rows == columns:  # torchvision.transforms.functional._compute_resized_output_size
        short, long = sorted(image.size)
        width, height = (rows, int(rows * long / short))[
            :: 1 if image.width <= image.height else -1
        ]
    else:  # timm.data.transforms.ResizeKeepRatio.get_params with longest=0
        ratio = min(image.height / rows, image.width / columns)
        width = round(image.width / ratio)
        height = round(image.height / ratio)
    image = image.resize((width, height), FILTERS[wanted.interpolation])
    rows, columns = wanted.size
    left = round((width - columns) / 2.0)
    top = round((height - rows) / 2.0)
    return np.asarray(image.crop((left, top, left + columns, top + rows)))


def assert_same(left: np.ndarray, right: np.ndarray) -> None:
    """Check equality up to rounding: one level, or two if both passes of the resize rounded."""
    levels = np.abs(left.astype(int) - right.astype(int))
    assert levels.max() <= 2
    assert (levels > 1).mean() <= 0.002


sides = st.integers(1, 300)
models = st.integers(1, 64)


@settings(max_examples=200, deadline=None)
@given(
    sides,
    sides,
    models,
    models,
    st.integers(0, 20),
    st.sampled_from(("squash", "shortest_edge")),
    st.sampled_from(("bilinear", "bicubic", "lanczos", "hamming")),
    st.integers(1, 8),
)
@example(500, 375, 56, 56, 6, "shortest_edge", "bicubic", 1)
@example(128, 128, 56, 56, 6, "shortest_edge", "bicubic", 4)
@example(1, 300, 32, 32, 0, "shortest_edge", "bicubic", 6)
@example(300, 1, 32, 48, 8, "shortest_edge", "lanczos", 8)
@example(413, 580, 56, 56, 6, "shortest_edge", "bicubic", 1)
@example(580, 413, 56, 56, 6, "shortest_edge", "lanczos", 6)
@example(2, 162, 1, 40, 11, "shortest_edge", "lanczos", 1)
@example(162, 2, 40, 36, 3, "shortest_edge", "lanczos", 6)
def test_pixels_equal_the_plain_way(
    width, height, rows, columns, more, resize, interpolation, orientation
):
    wanted = config(
        (rows, columns), (rows + more, columns + more), resize=resize, interpolation=interpolation
    )
    data = encode(noise(width, height), "PNG", orientation, compress_level=0)

    assert_same(preprocess(data, wanted), straightforward(data, wanted))


@settings(max_examples=100, deadline=None)
@given(sides, sides, models, st.integers(0, 20), st.sampled_from(("nearest", "box")))
def test_sharp_filters_pick_the_same_pixels(width, height, side, more, interpolation):
    wanted = config((side, side), (side + more, side + more), interpolation=interpolation)
    # Beyond this, the resized part has corners that Pillow rounds.
    assume(max(resized_size(width, height, wanted)) <= 4096)
    data = encode(noise(width, height), "PNG", compress_level=0)

    assert difference(preprocess(data, wanted), straightforward(data, wanted)) <= 1


@pytest.mark.parametrize(
    "size", [(60_000, 1), (1, 60_000), (40_000, 3), (3, 40_000), (200_000, 1), (1, 200_000)]
)
def test_sliver_is_cropped_to_its_middle(size):
    row = noise(max(size), 1)
    image = row if size[0] > size[1] else row.transpose(Image.Transpose.TRANSPOSE)
    image = image.resize(size, Image.Resampling.NEAREST)

    pixels = preprocess(encode(image, "PNG"), config((16, 16)))

    # 16 output pixels show the source pixels around the middle, as many as the picture is thick.
    middle = max(size) // 2
    reach = min(size) + 3
    seen = np.asarray(row)[0, middle - reach : middle + reach].astype(int)
    assert pixels.min() >= max(0, seen.min() - 64) and pixels.max() <= min(255, seen.max() + 64)
    along = pixels if size[0] > size[1] else pixels.transpose(1, 0, 2)
    if min(size) == 1:
        assert np.ptp(along.astype(int), axis=0).max() == 0  # one pixel thick: constant across


@pytest.mark.parametrize("size", [(20, 200_000), (200_000, 20)])
def test_a_squashed_sliver_equals_pillow(size):
    image = noise(*size)

    pixels = preprocess(encode(image, "PNG", compress_level=1), config((224, 224), resize="squash"))

    assert difference(pixels, np.asarray(image.resize((224, 224), Image.Resampling.BICUBIC))) <= 2


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mode", ["P", "CMYK", "I;16", "RGBA"])
def test_strips_convert_like_the_whole(mode, orientation, monkeypatch):
    monkeypatch.setattr("model.images.resample.STRIP_PIXELS", 500)
    colours = noise(150, 110)
    image = (
        Image.fromarray(np.asarray(noise(150, 110, 1)).astype(np.uint16) << 8)
        if mode == "I;16"
        else None
    )
    image = image or (colours.quantize(64) if mode == "P" else colours.convert(mode))
    data = encode(image, "TIFF", orientation)
    whole = np.asarray(image) >> 8 if mode == "I;16" else None
    rgb = (
        Image.fromarray(whole.astype(np.uint8)).convert("RGB")
        if whole is not None
        else image.convert("RGB")
    )
    wanted = config((24, 40), (30, 50))

    assert (
        difference(
            preprocess(data, wanted), straightforward(encode(rgb, "PNG", orientation), wanted)
        )
        <= 1
    )


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("crop_mode", ["center", "squash"])
@pytest.mark.parametrize(
    ("size", "crop_pct"), [((3, 32, 32), 1.0), ((3, 224, 224), 0.9), ((3, 48, 64), 0.875)]
)
def test_pixels_equal_timms_transform(size, crop_pct, crop_mode, interpolation):
    transform = timm().data.create_transform(
        input_size=size,
        crop_pct=crop_pct,
        crop_mode=crop_mode,
        interpolation=interpolation,
        normalize=False,
    )
    rows, columns = size[1:]
    wanted = config(
        (rows, columns),
        (int(rows / crop_pct), int(columns / crop_pct)),
        resize="squash" if crop_mode == "squash" else "shortest_edge",
        interpolation=interpolation,
    )
    for width, height in [(250, 187), (167, 250), (64, 64), (97, 31), (20, 300)]:
        image = noise(width, height)

        expected = transform(image).permute(1, 2, 0).numpy()

        assert difference(preprocess(encode(image, "PNG"), wanted), expected) <= 1


@pytest.mark.parametrize(("width", "height"), [(500, 375), (333, 500), (64, 64), (20, 300)])
def test_pixels_equal_transformers_processor(width, height):
    module = pytest.importorskip(
        "transformers.models.vit.image_processing_pil_vit",
        reason="no transformers with PIL image processors",
    )
    processor = module.ViTImageProcessorPil(do_rescale=False, do_normalize=False)
    image = noise(width, height)

    expected = np.asarray(processor(image)["pixel_values"][0]).transpose(1, 2, 0)

    wanted = config((224, 224), resize="squash", interpolation="bilinear")
    assert difference(preprocess(encode(image, "PNG"), wanted), expected) <= 1


@pytest.mark.shared
@pytest.mark.parametrize("folder", ["imagenet-samples", "photos"])
def test_real_photos_equal_the_plain_way(shared, folder):
    wanted = config((224, 224), (248, 248))
    files = sorted(
        path
        for path in (shared / "data" / folder).iterdir()
        if path.suffix.lower() in (".jpg", ".jpeg")
    )
    for file in sorted(files, key=lambda path: path.stat().st_size)[:10:4]:
        data = file.read_bytes()

        pixels = preprocess(data, wanted, scaled_decode=False)

        assert difference(pixels, straightforward(data, wanted)) <= 1, file.name


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_result_is_a_contiguous_array(channels, mode):
    wanted = config((30, 20), channels=channels)

    pixels = preprocess(encode(scene().convert(mode), "PNG"), wanted)

    assert pixels.shape == (30, 20, channels)
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous and pixels.flags.writeable


def test_a_greyscale_model_sees_luma():
    image = scene()

    pixels = preprocess(encode(image, "PNG"), as_is(image, channels=1))

    assert np.array_equal(pixels[:, :, 0], np.asarray(image.convert("L")))


def test_a_model_of_two_channels_is_refused():
    with pytest.raises(ValueError, match="2 channels"):
        preprocess(encode(scene(), "PNG"), config(channels=2))


def test_threads_do_not_disturb_one_another():
    wanted = config((48, 48), (56, 56))
    files = [
        encode(noise(90 + n, 70, seed=n), ("PNG", "JPEG", "WEBP", "TIFF", "GIF")[n % 5])
        for n in range(20)
    ]
    alone = [preprocess(data, wanted) for data in files]

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda data: preprocess(data, wanted), files * 5))

    assert all(np.array_equal(pixels, alone[n % 20]) for n, pixels in enumerate(together))


@pytest.mark.parametrize("name", FORMATS)
def test_upload_may_change_after_decoding(name):
    data = bytearray(encode(scene(), name))
    wanted = config()
    pixels = preprocess(data, wanted)

    data.clear()  # fails while an object refers to it

    assert pixels.any()


@pytest.mark.parametrize(
    ("how", "resize_size", "source", "expected"),
    [
        ("squash", (20, 30), (77, 55), (30, 20)),
        ("shortest_edge", (32, 32), (64, 48), (42, 32)),
        ("shortest_edge", (32, 32), (48, 64), (32, 42)),
        ("shortest_edge", (32, 32), (50, 50), (32, 32)),
        ("shortest_edge", (20, 30), (60, 60), (30, 30)),
        ("shortest_edge", (20, 30), (90, 30), (60, 20)),
    ],
)
def test_resized_size_follows_the_config(how, resize_size, source, expected):
    chosen = config((16, 16), resize_size, resize=how)
    width, height = source
    assert resized_size(width, height, chosen) == expected
    min_size = min_decoded_size(chosen)
    assert min_size is not None
    assert min_size(width, height) == (2 * expected[0], 2 * expected[1])


@pytest.mark.parametrize(
    ("size", "wanted", "region"),
    [
        # shortest_edge: 40 x 20 becomes 64 x 32, and the middle 32 are cut: 16 / 1.6 = 10 from the
        # left
        ((40, 20), config((32, 32)), (10, 0, 20, 20)),
        ((20, 40), config((32, 32)), (0, 10, 20, 20)),
        ((32, 32), config((32, 32)), (0, 0, 32, 32)),
        # 100 x 50 becomes 80 x 40; the middle 32 begin at 24 and 4: times 1.25
        ((100, 50), config((32, 32), (40, 40)), (30, 5, 40, 40)),
        # 60 x 20 covers 32 x 48 as 96 x 32: columns 24...72 of 96, times 60 / 96
        ((60, 20), config((32, 48)), (15, 0, 30, 20)),
        # squash: the whole picture; with a crop, 32 of 40 on each side
        ((100, 50), config((32, 32), resize="squash"), (0, 0, 100, 50)),
        ((100, 50), config((32, 32), (40, 40), resize="squash"), (10, 5, 80, 40)),
    ],
)
def test_region_is_the_part_after_the_crop(size, wanted, region):
    picture = model_input(encode(Image.new("RGB", size), "PNG"), wanted)

    assert picture.region == pytest.approx(Region(*region))


def test_a_crop_uses_the_configured_rounding():
    # 35 x 32: the margin of 3 is 1.5 on each side, rounded to the even 2 or down to 1
    data = encode(Image.new("RGB", (35, 32)), "PNG")
    even, down = (
        config((32, 32)).model_copy(update={"crop_rounding": name})
        for name in ("half_even", "down")
    )

    assert (model_input(data, even).region.x, model_input(data, down).region.x) == (2, 1)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_region_is_in_upright_pixels(orientation):
    data = encode(scene(60, 20), "PNG", orientation)

    region = model_input(data, config((16, 16))).region

    assert region == ((20, 0, 20, 20) if orientation < 5 else (0, 20, 20, 20))


def test_scaled_decodes_keep_the_region():
    data = encode(scene(1001, 667), "JPEG")
    scaled, full = (
        model_input(data, config((32, 32)), scaled_decode=scaled).region for scaled in (True, False)
    )

    assert scaled == full
    assert full == pytest.approx((8 * 1001 / 48, 0, 32 * 1001 / 48, 667))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("resize", ["shortest_edge", "squash"])
def test_photo_region_shows_the_model_input(orientation, resize):
    data = encode(scene(120, 60), "PNG", orientation)
    seen = model_input(data, config((30, 30), resize=resize))

    photo, region = upright_photo(data, seen.region)
    left = region.x
    top = region.y
    right = region.x + region.width
    bottom = region.y + region.height
    part = Image.fromarray(photo).resize(
        (30, 30), Image.Resampling.BICUBIC, (left, top, right, bottom)
    )

    assert difference(np.asarray(part), seen.pixels) <= 2


@pytest.mark.parametrize(
    ("size", "longer", "expected"),
    [
        ((300, 200), 150, (150, 100)),
        ((300, 200), 3000, (300, 200)),
        ((300, 200), None, (300, 200)),
        ((2048, 4), None, (1024, 2)),
        ((500, 1), 50, (50, 1)),
        ((300, 200), 1, (1, 1)),
    ],
)
def test_photo_is_never_enlarged(size, longer, expected):
    photo, region = upright_photo(
        encode(Image.new("RGB", size), "PNG"), Region(0, 0, *size), longer
    )

    assert photo.shape == (*expected[::-1], 3)
    assert region == pytest.approx((0, 0, *expected))


def test_jpeg_is_decoded_as_large_as_drawn():
    data = encode(scene(1600, 800), "JPEG", quality=95)

    scaled, full = (
        upright_photo(data, Region(0, 0, 1600, 800), 300, scaled_decode=scaled)
        for scaled in (True, False)
    )

    assert scaled[0].shape == full[0].shape == (150, 300, 3)
    assert scaled[1] == full[1]
    assert 0 < difference(scaled[0], full[0]) <= 6


KERNELS = ("bilinear", "bicubic")

# A compiled kernel must be in use if it can be, because `resample` falls back to Pillow silently.
compiled = pytest.mark.skipif(
    resample.load_kernel() is None, reason="no C compiler at installation, or no AVX2"
)


def part_of(resized: int, data: st.DataObject) -> tuple[int, int]:
    first = data.draw(st.integers(0, resized - 1))
    return first, data.draw(st.integers(1, resized - first))


@compiled
@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(1, 300),
    st.integers(1, 90),
    st.integers(1, 90),
    st.sampled_from(KERNELS),
    st.sampled_from(["RGB", "L"]),
    st.integers(0, 3),
    st.data(),
)
def test_part_equals_pillows_whole_picture(width, height, columns, rows, name, mode, mirrors, data):
    filter_ = Image.Resampling[name.upper()]
    stored = noise(width, height, 3 if mode == "RGB" else 1)
    upright = stored
    for flip, turn in ((1, Image.Transpose.FLIP_LEFT_RIGHT), (2, Image.Transpose.FLIP_TOP_BOTTOM)):
        upright = upright.transpose(turn) if mirrors & flip else upright
    low, top = (data.draw(st.floats(0, side / 2, width=32)) for side in stored.size)
    box = (
        low,
        top,
        *(data.draw(st.floats(side / 2 + 0.25, side, width=32)) for side in stored.size),
    )
    left, wide = part_of(columns, data)
    upper, high = part_of(rows, data)

    whole = np.asarray(upright.resize((columns, rows), filter_, box))
    pixels = resample_part(
        stored,
        Axis(box[0], box[2], columns, left, wide, bool(mirrors & 1)),
        Axis(box[1], box[3], rows, upper, high, bool(mirrors & 2)),
        filter_,
        rows_first=resample.passes_rows_first(stored.size, (columns, rows)),
    )

    assert pixels is not None
    assert np.array_equal(pixels, np.atleast_3d(whole)[upper : upper + high, left : left + wide])


@compiled
@pytest.mark.parametrize("size", [(341, 256), (42, 32), (500, 200), (900, 700)])
@pytest.mark.parametrize("rows_first", [True, False])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L", "I;16"])
def test_strips_make_pillows_picture(size, rows_first, mode, monkeypatch):
    picture = noise(500, 375, 1)
    if mode == "I;16":
        picture = Image.fromarray(np.asarray(picture).astype(np.uint16) << 8)
    elif mode != "L":
        picture = noise(500, 375).quantize(64) if mode == "P" else noise(500, 375).convert(mode)
    convert = converter(picture, "RGB")
    # Order matters only with passes along both axes.
    middle = (500, size[1]) if rows_first else (size[0], 375)
    bicubic = Image.Resampling.BICUBIC
    whole = (convert(picture) if convert else picture).resize(middle, bicubic).resize(size, bicubic)
    columns = Axis(0, 500, size[0], 0, size[0])
    rows = Axis(0, 375, size[1], 0, size[1])

    for strip in (4_000_000, 5_000, 1):
        monkeypatch.setattr(resample, "STRIP_PIXELS", strip)
        pixels = resample_part(
            picture, columns, rows, bicubic, rows_first=rows_first, convert=convert
        )
        assert pixels is not None and pixels.tobytes() == whole.tobytes()


@compiled
def test_picture_in_pieces_is_read_in_strips():
    picture = Image.new("RGB", (3000, 2000))
    picture.paste(noise(700, 2000), (1900, 0))
    with pytest.raises(ValueError, match=r"contiguous|multiple"):
        picture.__arrow_c_array__()

    for rows_first in (True, False):
        pixels = resample_part(
            picture,
            Axis(0, 3000, 60, 20, 30),
            Axis(0, 2000, 40, 1, 39),
            Image.Resampling.BILINEAR,
            rows_first=rows_first,
        )
        middle = picture.resize((3000, 40) if rows_first else (60, 2000), Image.Resampling.BILINEAR)
        whole = np.asarray(middle.resize((60, 40), Image.Resampling.BILINEAR))
        assert pixels is not None and np.array_equal(pixels, whole[1:40, 20:50])


@pytest.mark.parametrize(
    ("axis", "filter_"),
    [
        (Axis(0, 96, 9, 0, 9), Image.Resampling.NEAREST),
        (Axis(0, 96, 90_000, 0, 90_000), Image.Resampling.BICUBIC),
    ],
)
def test_pillow_resizes_other_filters(axis, filter_):
    assert resample_part(scene(), axis, Axis(0, 64, 9, 0, 9), filter_, rows_first=False) is None


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_pillow_gives_nearly_the_same_pixels(orientation, mode, monkeypatch):
    data = encode(noise(150, 110).convert(mode), "TIFF", orientation)
    wanted = config((24, 40), (30, 50))
    pixels = preprocess(data, wanted)
    monkeypatch.setattr("model.images.preprocess.resample_part", lambda *_, **__: None)

    levels = np.abs(preprocess(data, wanted).astype(int) - pixels)

    assert levels.max() <= 1
