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
from model.images.preprocess import ModelInput, model_input, upright_photo
from model.images.region import Region
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
            images = sorted(p for p in path.rglob("*") if p.suffix.lower() in _SUFFIXES and p.is_file())
            if not images:
                raise InputError("path", f"{path}: no pictures in this folder")
            files += images
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
    return read_input(file, config, settings).pixels


def read_input(file: Path, config: PreprocessConfig, settings: Settings) -> ModelInput:
    """Decode a file as `read_pixels`, and say which part of the photo the pixels show; raises as it does."""
    return model_input(
        file.read_bytes(), config, max_pixels=settings.max_image_pixels, scaled_decode=settings.scaled_decode
    )


def read_photo(file: Path, region: Region, size: int | None, settings: Settings) -> tuple[NDArray[np.uint8], Region]:
    """Decode the whole upright photo in a file, and say where in it `region` lies.

    Args:
        region: in pixels of the photo as it is stored.
        size: longer side of the result in pixels, at most; None: as `model.images.preprocess.upright_photo`.

    Raises:
        ImageError: the file cannot be decoded.
        OSError: the file cannot be read.
    """
    return upright_photo(
        file.read_bytes(), region, size, max_pixels=settings.max_image_pixels, scaled_decode=settings.scaled_decode
    )
