"""A file that does not decode is refused with what its sender can do."""

import importlib
from typing import Any

import pytest

from model.errors import InvalidImage
from model.images.formats import SUPPORTED_FORMATS
from model.images.preprocess import preprocess
from tests.model.images.pictures import FORMATS, config, encode, noise


@pytest.fixture(autouse=True)
def heif_encoder() -> None:
    if "HEIF" in SUPPORTED_FORMATS:
        importlib.import_module("pillow_heif").register_heif_opener()


@pytest.mark.parametrize("share", [0.9, 0.5, 0.1])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in FORMATS),
        ("JPEG", {"progressive": True}),
        ("WEBP", {"lossless": True}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("TIFF", {"compression": "jpeg"}),
        *(("HEIF", {}) for name in SUPPORTED_FORMATS if name == "HEIF"),
    ],
)
def test_a_part_of_a_file_is_called_truncated(
    name: str, options: dict[str, Any], share: float
) -> None:
    data = encode(noise(200, 150), name, **options)
    with pytest.raises(InvalidImage, match=r"is truncated( or corrupt)?: send the whole file"):
        preprocess(data[: int(len(data) * share)], config())


def test_a_whole_webp_is_not_called_truncated() -> None:
    data = bytearray(encode(noise(200, 150), "WEBP"))
    data[23:26] = b"ABC"  # the start code of VP8
    with pytest.raises(InvalidImage, match="it is corrupt, or takes more memory"):
        preprocess(bytes(data), config())
