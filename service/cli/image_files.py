"""Image files as the subcommands take them: named, below folders, or the example inside the package."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from model.config import PreprocessConfig
from model.errors import InputError
from model.images.preprocess import preprocess
from service.settings import Settings

EXAMPLE_IMAGE: Final = resources.files("service.cli") / "example.jpg"
"""A photo that is installed with the package."""

_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".webp", ".gif", ".bmp", ".dib", ".tif", ".tiff"}
    | {".avif", ".heic", ".heif"}
)


def find_images(paths: Iterable[Path]) -> list[Path]:
    """Return the files as they are named, and the images below each folder, sorted.

    Raises:
        InputError: a path does not exist, or a folder holds no images.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.suffix.lower() in _SUFFIXES and p.is_file())
            if not found:
                raise InputError("path", f"{path}: no pictures in this folder")
            files += found
        elif path.exists():
            files.append(path)
        else:
            raise InputError("path", f"{path}: no such file or folder")
    return files


def read_pixels(file: Path, config: PreprocessConfig, settings: Settings) -> NDArray[np.uint8]:
    """Decode a file into uint8 [H, W, C] of the model's input size, within the limits of the settings.

    Raises:
        ImageError: the file cannot be decoded.
        OSError: the file cannot be read.
    """
    return preprocess(
        file.read_bytes(), config, max_pixels=settings.max_image_pixels, scaled_decode=settings.scaled_decode
    )
