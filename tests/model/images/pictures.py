"""Small pictures and configurations for the image tests."""

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

from model.config import PreprocessConfig
from model.images.preprocess import preprocess

ORIENTATION = 274
FORMATS = ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"]


def config(
    size: tuple[int, int] = (32, 32),
    resize_size: tuple[int, int] | None = None,
    *,
    resize: str = "shortest_edge",
    interpolation: str = "bicubic",
    channels: int = 3,
    mean: tuple[float, ...] | None = None,
) -> PreprocessConfig:
    return PreprocessConfig.model_validate(
        {
            "size": size,
            "resize": resize,
            "resize_size": resize_size or size,
            "interpolation": interpolation,
            "mean": mean or (0.5,) * channels,
            "std": (0.5,) * channels,
        }
    )


def as_is(image: Image.Image, channels: int = 3) -> PreprocessConfig:
    """Return a config that keeps the size and shape of `image`."""
    return config((image.height, image.width), resize="squash", channels=channels)


def noise(width: int, height: int, channels: int = 3, seed: int = 0) -> Image.Image:
    """Return a picture whose pixels all differ, the hardest picture to resample alike."""
    shape = (height, width) if channels == 1 else (height, width, channels)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def scene(width: int = 96, height: int = 64) -> Image.Image:
    """Return a smooth picture whose corners differ.

    It survives lossy formats and shows every wrong turn.
    """
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    pixels = np.stack([255 * x, 255 * y, 255 * (1 - x) * (1 - y)], axis=-1)
    return Image.fromarray(pixels.astype(np.uint8))


def encode(image: Image.Image, name: str, orientation: int | None = None, **options: Any) -> bytes:
    if orientation is not None:
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        options["exif"] = exif
    if name == "PNG":
        options.setdefault("compress_level", 1)  # the usual level takes four times as long
    file = io.BytesIO()
    image.save(file, name, **options)
    return file.getvalue()


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def black_png(width: int, height: int, *, bits: int = 8, colour_type: int = 0) -> bytes:
    """Return a black PNG of any size, without its pixels in memory."""
    samples = {0: 1, 2: 3, 4: 2, 6: 4}[colour_type]
    row = b"\0" * (1 + (width * bits * samples + 7) // 8)
    packer = zlib.compressobj(1)
    packed = [packer.compress(row) for _ in range(height)]
    header = struct.pack(">IIBBBBB", width, height, bits, colour_type, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", header)
        + png_chunk(b"IDAT", b"".join(packed) + packer.flush())
        + png_chunk(b"IEND", b"")
    )


def insert_after_soi(jpeg: bytes, *segments: bytes) -> bytes:
    return jpeg[:2] + b"".join(segments) + jpeg[2:]


def jpeg_segment(marker: int, body: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def insert_after_ihdr(png: bytes, *chunks: bytes) -> bytes:
    return png[:33] + b"".join(chunks) + png[33:]


def difference(left: np.ndarray, right: np.ndarray) -> int:
    """Return the largest difference, in levels of 0...255."""
    assert left.shape == right.shape
    return int(np.abs(left.astype(int) - right.astype(int)).max())


def seen(data: bytes, image: Image.Image, channels: int = 3) -> np.ndarray:
    """Return the decoded pixels at the size of `image`."""
    return preprocess(data, as_is(image, channels), scaled_decode=False)
