"""The pictures that are sent: JPEGs of about 500 x 375 and 124 kB, the same for every server."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.checkpoints import CACHE, shared_folder

COUNT = 16
_SIZE = (500, 375)
_BYTES = 124_000


def ensure() -> tuple[list[Path], str]:
    """Files of the picture set, made if absent, and where they come from.

    Photographs from the shared folder where they are at hand (of 500 x 375 +- 20 %, re-encoded to about 124 kB so
    that everyone's load is alike), else synthetic ones from a seed.
    """
    folder = CACHE / "pictures"
    source = folder / "SOURCE"
    if not source.exists():
        folder.mkdir(parents=True, exist_ok=True)
        photographs = _photographs(shared_folder() / "data" / "imagenet-samples")
        pictures = photographs or [_synthetic(seed) for seed in range(COUNT)]
        for index, picture in enumerate(pictures):
            (folder / f"{index:02}.jpg").write_bytes(jpeg_of_size(picture, _BYTES))
        source.write_text(
            f"{len(pictures)} {'ImageNet photographs' if photographs else 'synthetic pictures, seeds 0 on'}"
        )
    return sorted(folder.glob("*.jpg")), source.read_text()


def jpeg_of_size(picture: Image.Image, wanted: int) -> bytes:
    """A baseline 4:2:0 JPEG at the quality that comes closest to `wanted` bytes."""
    found = []
    for quality in range(98, 40, -2):
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", quality=quality, subsampling="4:2:0")
        found.append(buffer.getvalue())
    return min(found, key=lambda data: abs(len(data) - wanted))


def _photographs(folder: Path) -> list[Image.Image]:
    found: list[Image.Image] = []
    for path in sorted(folder.glob("*.JPEG")):
        with Image.open(path) as picture:
            if sorted(picture.size) == sorted(_SIZE) and picture.mode == "RGB":
                found.append(picture.copy())
    return found[:COUNT]


def _synthetic(seed: int) -> Image.Image:
    """Noise with the spectrum of photographs (amplitude falling as 1/frequency), in colours that go together."""
    random = np.random.default_rng(seed)
    width, height = _SIZE
    rows, columns = np.meshgrid(np.fft.fftfreq(height), np.fft.rfftfreq(width), indexing="ij")
    falling = 1 / np.maximum(np.hypot(rows, columns), 1 / width)
    planes = [
        np.fft.irfft2(falling * np.fft.rfft2(random.standard_normal((height, width))), s=(height, width))
        for _ in range(3)
    ]
    mixed = np.tensordot(np.stack(planes, -1), [[1.0, 1.0, 1.0], [0.4, 0.0, -0.4], [0.1, -0.2, 0.1]], axes=1)
    pixels = random.uniform(90, 160, 3) + 55 * (mixed - mixed.mean()) / mixed.std()
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
