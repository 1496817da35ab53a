"""Large JPEGs are decoded at 1/2, 1/4 or 1/8: the same picture, and the same verdict on a damaged file."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from model.errors import ImageError
from model.images.decode import decode
from model.images.preprocess import preprocess
from tests.model.images.pictures import config, difference, encode, noise, scene


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
    def test_the_largest_scale_that_leaves_enough_is_taken(self, min_size, size, options):
        data = encode(scene(800, 600), "JPEG", **options)

        assert self.decoded(data, min_size).size == size

    @pytest.mark.parametrize("orientation", [1, 3, 6, 7])
    @pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
    @pytest.mark.parametrize("size", [(803, 605), (1600, 333)])
    def test_the_picture_stays_the_same_and_in_place(self, size, mode, orientation):
        data = encode(scene(*size).convert(mode), "JPEG", orientation, quality=95)
        wanted = config((32, 32), (36, 36))

        scaled, full = preprocess(data, wanted), preprocess(data, wanted, scaled_decode=False)

        assert difference(scaled, full) <= 6

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
