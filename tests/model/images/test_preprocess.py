"""Bytes to the model's picture: the same pixels as the libraries that the checkpoints come from."""

from __future__ import annotations

import functools
import io
import subprocess
import sys
from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from model.config import PreprocessConfig
from model.errors import ImageError
from model.images.container import Container, unpack, without_detail
from model.images.decode import SUPPORTED_FORMATS, decode
from model.images.preprocess import preprocess, resized_size, smallest_decoded
from tests.model.images.pictures import as_is, config, difference, encode, noise, scene
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
    """Everything in the order that the libraries have: turn, convert, resize the whole, crop."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    rows, columns = wanted.resize_size
    if wanted.resize == "squash":
        width, height = columns, rows
    elif rows == columns:  # torchvision.transforms.functional._compute_resized_output_size
        short, long = sorted(image.size)
        width, height = (rows, int(rows * long / short))[:: 1 if image.width <= image.height else -1]
    else:  # timm.data.transforms.ResizeKeepRatio.get_params with longest=0
        ratio = min(image.height / rows, image.width / columns)
        width, height = round(image.width / ratio), round(image.height / ratio)
    image = image.resize((width, height), FILTERS[wanted.interpolation])
    rows, columns = wanted.size
    left, top = round((width - columns) / 2.0), round((height - rows) / 2.0)
    return np.asarray(image.crop((left, top, left + columns, top + rows)))


def assert_same(left: np.ndarray, right: np.ndarray) -> None:
    """Equal but for what rounds either way: one level, or two where both passes of the resize did so."""
    levels = np.abs(left.astype(int) - right.astype(int))
    assert levels.max() <= 2
    assert (levels > 1).mean() <= 0.002


sides = st.integers(1, 300)
models = st.integers(1, 64)


@settings(max_examples=200, deadline=None)
@given(sides, sides, models, models, st.integers(0, 20), st.sampled_from(("squash", "shortest_edge")),
       st.sampled_from(("bilinear", "bicubic", "lanczos", "hamming")), st.integers(1, 8))  # fmt: skip
@example(500, 375, 56, 56, 6, "shortest_edge", "bicubic", 1)
@example(128, 128, 56, 56, 6, "shortest_edge", "bicubic", 4)
@example(1, 300, 32, 32, 0, "shortest_edge", "bicubic", 6)
@example(300, 1, 32, 48, 8, "shortest_edge", "lanczos", 8)
@example(413, 580, 56, 56, 6, "shortest_edge", "bicubic", 1)
@example(580, 413, 56, 56, 6, "shortest_edge", "lanczos", 6)
def test_pixels_equal_turning_converting_resizing_all_and_cropping(
    width, height, rows, columns, more, resize, interpolation, orientation
):
    wanted = config((rows, columns), (rows + more, columns + more), resize=resize, interpolation=interpolation)
    data = encode(noise(width, height), "PNG", orientation, compress_level=0)

    assert_same(preprocess(data, wanted), straightforward(data, wanted))


@settings(max_examples=100, deadline=None)
@given(sides, sides, models, st.integers(0, 20), st.sampled_from(("nearest", "box")))
def test_filters_with_sharp_edges_choose_the_same_pixels(width, height, side, more, interpolation):
    wanted = config((side, side), (side + more, side + more), interpolation=interpolation)
    data = encode(noise(width, height), "PNG", compress_level=0)

    assert difference(preprocess(data, wanted), straightforward(data, wanted)) <= 1


@pytest.mark.parametrize("size", [(60_000, 1), (1, 60_000), (40_000, 3), (3, 40_000), (200_000, 1), (1, 200_000)])
def test_a_sliver_of_a_picture_is_answered_with_its_middle(size):
    row = noise(max(size), 1)
    image = row if size[0] > size[1] else row.transpose(Image.Transpose.TRANSPOSE)
    image = image.resize(size, Image.Resampling.NEAREST)

    pixels = preprocess(encode(image, "PNG"), config((16, 16)))

    # 16 output pixels show as many source pixels as the picture is thick, around the middle.
    middle, reach = max(size) // 2, min(size) + 3
    seen = np.asarray(row)[0, middle - reach : middle + reach].astype(int)
    assert pixels.min() >= max(0, seen.min() - 64) and pixels.max() <= min(255, seen.max() + 64)
    along = pixels if size[0] > size[1] else pixels.transpose(1, 0, 2)
    if min(size) == 1:
        assert np.ptp(along.astype(int), axis=0).max() == 0  # one pixel thick: nothing changes across


@pytest.mark.parametrize("size", [(20, 200_000), (200_000, 20)])
def test_squashing_a_sliver_swaps_the_passes_and_stays_the_same_picture(size):
    image = noise(*size)

    pixels = preprocess(encode(image, "PNG", compress_level=1), config((224, 224), resize="squash"))

    assert difference(pixels, np.asarray(image.resize((224, 224), Image.Resampling.BICUBIC))) <= 2


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mode", ["P", "CMYK", "I;16", "RGBA"])
def test_a_picture_converted_in_many_strips_equals_one_converted_whole(mode, orientation, monkeypatch):
    monkeypatch.setattr("model.images.resize._STRIP_PIXELS", 500)
    colours = noise(150, 110)
    image = Image.fromarray(np.asarray(noise(150, 110, 1)).astype(np.uint16) << 8) if mode == "I;16" else None
    image = image or (colours.quantize(64) if mode == "P" else colours.convert(mode))
    data = encode(image, "TIFF", orientation)
    whole = np.asarray(image) >> 8 if mode == "I;16" else None
    rgb = Image.fromarray(whole.astype(np.uint8)).convert("RGB") if whole is not None else image.convert("RGB")
    wanted = config((24, 40), (30, 50))

    assert difference(preprocess(data, wanted), straightforward(encode(rgb, "PNG", orientation), wanted)) <= 1


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("crop_mode", ["center", "squash"])
@pytest.mark.parametrize(("size", "crop_pct"), [((3, 32, 32), 1.0), ((3, 224, 224), 0.9), ((3, 48, 64), 0.875)])
def test_pixels_equal_timms_transform(size, crop_pct, crop_mode, interpolation):
    transform = timm().data.create_transform(
        input_size=size, crop_pct=crop_pct, crop_mode=crop_mode, interpolation=interpolation, normalize=False
    )
    rows, columns = size[1:]
    wanted = config(
        (rows, columns),
        (int(rows / crop_pct), int(columns / crop_pct)),
        resize="squash" if crop_mode == "squash" else "shortest_edge",
        interpolation=interpolation,
    )
    for width, height in [(500, 375), (333, 500), (64, 64), (97, 31), (20, 300)]:
        image = noise(width, height)

        expected = transform(image).permute(1, 2, 0).numpy()

        assert difference(preprocess(encode(image, "PNG"), wanted), expected) <= 1


@pytest.mark.parametrize(("width", "height"), [(500, 375), (333, 500), (64, 64), (20, 300)])
def test_pixels_equal_the_vit_processor_of_transformers(width, height):
    module = pytest.importorskip(
        "transformers.models.vit.image_processing_pil_vit", reason="no transformers with PIL image processors"
    )
    processor = module.ViTImageProcessorPil(do_rescale=False, do_normalize=False)
    image = noise(width, height)

    expected = np.asarray(processor(image)["pixel_values"][0]).transpose(1, 2, 0)

    wanted = config((224, 224), resize="squash", interpolation="bilinear")
    assert difference(preprocess(encode(image, "PNG"), wanted), expected) <= 1


@pytest.mark.shared
@pytest.mark.parametrize("folder", ["imagenet-samples", "photos"])
def test_real_photos_equal_the_straightforward_way_when_fully_decoded(shared, folder):
    wanted = config((224, 224), (248, 248))
    files = sorted(path for path in (shared / "data" / folder).iterdir() if path.suffix.lower() in (".jpg", ".jpeg"))
    for file in sorted(files, key=lambda path: path.stat().st_size)[:10:4]:
        data = file.read_bytes()

        pixels = preprocess(data, wanted, scaled_decode=False)

        assert difference(pixels, straightforward(data, wanted)) <= 1, file.name


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_the_result_is_a_writable_contiguous_array_of_the_models_size(channels, mode):
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


def test_bytes_bytearray_and_memoryview_are_alike():
    data, wanted = encode(scene(), "JPEG"), config()

    pixels = preprocess(data, wanted)

    assert np.array_equal(pixels, preprocess(bytearray(data), wanted))
    assert np.array_equal(pixels, preprocess(memoryview(data), wanted))


def test_threads_do_not_disturb_one_another():
    wanted = config((48, 48), (56, 56))
    files = [encode(noise(90 + n, 70, seed=n), ("PNG", "JPEG", "WEBP", "TIFF", "GIF")[n % 5]) for n in range(20)]
    alone = [preprocess(data, wanted) for data in files]

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda data: preprocess(data, wanted), files * 5))

    assert all(np.array_equal(pixels, alone[n % 20]) for n, pixels in enumerate(together))


def test_preprocessing_and_heat_maps_load_no_torch():
    code = "import sys, model.images.preprocess, model.images.heatmap; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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
    def decoded(self, data: bytes, smallest: tuple[int, int]) -> Image.Image:
        return decode(data, max_pixels=10**7, smallest=lambda width, height: smallest).image

    @pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}])
    @pytest.mark.parametrize(
        ("smallest", "size"),
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
    def test_the_largest_scale_that_leaves_enough_is_taken(self, smallest, size, options):
        data = encode(scene(800, 600), "JPEG", **options)

        assert self.decoded(data, smallest).size == size

    def test_what_is_enough_is_asked_of_the_upright_picture(self):
        data = encode(scene(800, 600), "JPEG", orientation=6)
        asked = []

        def smallest(width: int, height: int) -> tuple[int, int]:
            asked.append((width, height))
            return 150, 101

        assert decode(data, max_pixels=10**7, smallest=smallest).image.size == (200, 150)
        assert asked == [(600, 800)]

    @pytest.mark.parametrize("orientation", [1, 3, 6, 7])
    @pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
    @pytest.mark.parametrize("size", [(803, 605), (1600, 333)])
    def test_the_picture_stays_the_same_and_in_place(self, size, mode, orientation):
        data = encode(scene(*size).convert(mode), "JPEG", orientation, quality=95)
        wanted = config((32, 32), (36, 36))

        scaled, full = preprocess(data, wanted), preprocess(data, wanted, scaled_decode=False)

        assert difference(scaled, full) <= 6

    @settings(max_examples=150, deadline=None)
    @given(st.integers(1, 900), st.integers(1, 900), st.integers(1, 40), st.integers(1, 40), st.integers(0, 8),
           st.sampled_from(("squash", "shortest_edge", "border")), st.sampled_from((1, 6)), st.booleans())  # fmt: skip
    @example(512, 512, 32, 32, 0, "squash", 1, False)
    @example(511, 512, 32, 32, 0, "squash", 1, False)
    @example(1, 900, 1, 1, 0, "shortest_edge", 6, True)
    def test_twice_the_target_is_left_and_the_next_scale_would_leave_less(
        self, width, height, rows, columns, more, resize, orientation, progressive
    ):
        wanted = config((rows, columns), (rows + more, columns + more), resize=resize)
        data = encode(Image.new("L", (width, height), 99), "JPEG", orientation, progressive=progressive)
        picture = decode(data, max_pixels=10**6, smallest=smallest_decoded(wanted))

        upright = (height, width) if orientation == 6 else (width, height)
        enough = [2 * side for side in resized_size(*upright, wanted)][:: -1 if orientation == 6 else 1]
        assert picture.image.size == (-(-width // picture.scale), -(-height // picture.scale))
        if picture.scale > 1:
            assert picture.image.width >= enough[0] and picture.image.height >= enough[1]
        if picture.scale < 8:
            assert width < 2 * picture.scale * enough[0] or height < 2 * picture.scale * enough[1]

    @settings(max_examples=150, deadline=None)
    @given(st.data(), st.sampled_from(("baseline", "progressive", "grey", "cmyk", "restarts", "progressive restarts")))
    def test_a_damaged_file_has_one_verdict_scaled_or_not(self, draw, kind):
        data = bytearray(damageable(kind))
        for place in draw.draw(st.lists(st.integers(2, len(data) - 1), max_size=4), label="bytes set"):
            data[place] = draw.draw(st.sampled_from((0, 0xFF, 0xD9, 0xDA)) | st.integers(0, 255), label="to")
        del data[draw.draw(st.integers(2, len(data)), label="cut") :]

        assert verdict(data, scaled_decode=True) == verdict(data, scaled_decode=False)

    @pytest.mark.parametrize("kind", ["baseline", "progressive", "grey", "cmyk", "restarts", "progressive restarts"])
    def test_a_file_that_lacks_its_end_is_refused(self, kind):
        data = damageable(kind)

        assert verdict(data, scaled_decode=True) == "ok"
        for length in (len(data) // 2, len(data) - 40):
            assert verdict(data[:length], scaled_decode=True) == "InvalidImage"

    @pytest.mark.parametrize("subsampling", [0, 1, 2])
    def test_what_is_left_out_of_a_progressive_jpeg_at_an_eighth_changes_no_pixel(self, subsampling, monkeypatch):
        data = encode(noise(400, 300), "JPEG", progressive=True, subsampling=subsampling)
        lengths = []

        def left_out(container: Container, scale: int, components: Set[int]) -> bytes | None:
            shorter = without_detail(container, scale, components)
            lengths.append(len(shorter or container.data))
            return shorter

        monkeypatch.setattr("model.images.decode.without_detail", left_out)
        pixels = preprocess(data, config((16, 16)))
        monkeypatch.setattr("model.images.decode.without_detail", lambda *_: None)

        assert lengths[0] < len(data) / 2
        assert np.array_equal(pixels, preprocess(data, config((16, 16))))

    @pytest.mark.parametrize("quality", [50, 75, 95])
    def test_what_is_left_out_at_a_quarter_is_less_than_scaling_changes(self, quality, monkeypatch):
        data = encode(
            noise(100, 75).resize((400, 300), Image.Resampling.BICUBIC), "JPEG", progressive=True, quality=quality
        )
        wanted = config((32, 32))
        pixels = preprocess(data, wanted)
        monkeypatch.setattr("model.images.decode.without_detail", lambda *_: None)
        whole = preprocess(data, wanted)

        assert not np.array_equal(pixels, whole)
        assert np.abs(pixels.astype(int) - whole).mean() < 1

    def test_at_half_the_size_nothing_is_left_out(self):
        data = unpack(damageable("progressive"))

        assert without_detail(data, 2, {1, 2, 3}) is None
        assert without_detail(data, 4, {1}) is not None
        assert without_detail(data, 4, set()) is None
        assert without_detail(unpack(damageable("progressive")[:-2]), 4, {1}) is None
        assert without_detail(unpack(damageable("progressive restarts")), 4, {1}) is None
        assert without_detail(unpack(damageable("baseline")), 4, {1}) is None

    @pytest.mark.parametrize("scaled_decode", [True, False])
    def test_the_last_scan_of_a_progressive_jpeg_is_judged_though_its_data_is_left_out(self, scaled_decode):
        data = damageable("progressive")
        header = data.rindex(b"\xff\xda")
        tables = data.rindex(b"\xff\xc4", 0, header)
        for place, value in [(header + 5, 99), (header + 8, 64), (tables + 5, 255)]:  # component, frequency, code
            broken = bytearray(data)
            broken[place] = value

            assert verdict(broken, scaled_decode=scaled_decode) == "InvalidImage"

    @pytest.mark.parametrize("scaled_decode", [True, False])
    def test_the_pixel_limit_is_on_the_stored_size(self, scaled_decode):
        data = damageable("baseline")

        preprocess(data, config((16, 16)), max_pixels=400 * 300, scaled_decode=scaled_decode)
        with pytest.raises(ImageError, match="400 x 300"):
            preprocess(data, config((16, 16)), max_pixels=400 * 300 - 1, scaled_decode=scaled_decode)

    @pytest.mark.shared
    def test_photographs_stay_close_to_their_full_decodes(self, shared):
        files = sorted((shared / "data" / "imagenet-samples").glob("*.JPEG"))[::7]
        wanted = config((32, 32))

        for file in files:
            data = file.read_bytes()
            levels = np.abs(preprocess(data, wanted).astype(int) - preprocess(data, wanted, scaled_decode=False))
            assert levels.mean() < 1.5 and levels.max() <= 20, (file.name, levels.mean(), levels.max())

    def test_fine_detail_shows_that_it_is_in_use(self):
        data = encode(noise(640, 480), "JPEG", quality=95)
        wanted = config((32, 32))

        assert not np.array_equal(preprocess(data, wanted), preprocess(data, wanted, scaled_decode=False))

    def test_a_picture_less_than_four_times_as_large_is_never_scaled(self):
        data = encode(noise(255, 127), "JPEG", quality=95)
        wanted = config((32, 32))

        assert np.array_equal(preprocess(data, wanted), preprocess(data, wanted, scaled_decode=False))


@settings(max_examples=100)
@given(st.lists(st.sampled_from((b"\xff", b"\xda", b"\0", b"\xff\xda")), max_size=40), st.integers(1, 9))
def test_every_scan_of_a_progressive_jpeg_is_counted(parts, at_once):
    data = encode(scene(), "JPEG", progressive=True)
    data = data[: data.index(b"\xff\xda") + 2] + b"".join(parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("model.images.container._SEARCHED_AT_ONCE", at_once)
        assert unpack(data).scans == data.count(b"\xff\xda")


def test_an_upload_may_be_changed_after_it_was_decoded():
    data = bytearray(encode(scene(), "JPEG"))
    wanted = config()
    pixels = preprocess(data, wanted)

    data.clear()  # fails while something holds it

    assert pixels.any()


def test_the_usual_formats_are_supported_here():
    assert {"JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"} <= set(SUPPORTED_FORMATS)
