"""Image files as the subcommands take them, and what a model of this process gives for each.

A file's answer is a value, or a text that says why there is none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from model.config import PreprocessConfig
from model.errors import ImageError, InputError
from model.images.photo import upright_photo
from model.images.preprocess import ModelInput, model_input
from model.images.region import Region
from model.prediction import Outputs, RequestedOutputs
from service.engine.messages import ModelInfo
from service.settings import Settings

if TYPE_CHECKING:
    from model.runtime.predictor import Predictor

_Answer = TypeVar("_Answer")

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


def predict_files(
    files: Sequence[Path],
    requests: Sequence[RequestedOutputs],
    answer: Callable[[Path, ModelInput, list[Outputs]], _Answer],
    predictor: Predictor,
    info: ModelInfo,
    settings: Settings,
    *,
    most: int | None = None,
) -> Iterator[tuple[Path, _Answer | str]]:
    """Yield each file with its answer, or with why it has none.

    Files are decoded on all cores, and computed in the largest batches.

    Args:
        answer: returns the answer of a file, from its picture and the outputs of each request; may raise `ImageError`
            and `OSError`.
        most: files in one batch at most.

    Raises:
        RuntimeError: as torch raises it.
    """

    def read(file: Path) -> ModelInput | str:
        try:
            return read_input(file, info.preprocess, settings)
        except (ImageError, OSError) as error:
            return str(error)

    remaining, size = iter(files), min(most or predictor.max_batch, predictor.max_batch)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        while batch := list(islice(remaining, size)):
            pictures = list(pool.map(read, batch))
            pixels = [picture.pixels for picture in pictures if not isinstance(picture, str)]
            passes = [predictor.predict(np.stack(pixels), request) for request in requests if pixels]
            outputs = map(list, zip(*passes, strict=True))
            for file, picture in zip(batch, pictures, strict=True):
                if isinstance(picture, str):
                    yield file, picture
                    continue
                own = next(outputs)
                if any(each.failure is not None for each in own):
                    yield file, "the model gives no finite score for this picture"
                    continue
                try:
                    result: _Answer | str = answer(file, picture, own)
                except (ImageError, OSError) as error:
                    result = str(error)
                yield file, result


def handle_answers(
    answers: Iterable[tuple[Path, _Answer | str]],
    count: int,
    handle: Callable[[Path, _Answer | str], object],
    name: str,
) -> int:
    """Call `handle` with each file and its answer; return 1 if any has none, after a line that says how many.

    Args:
        count: of all files.
        name: what an answer is called in that line.
    """
    failed = 0
    for file, answer in tqdm(answers, total=count, unit="image", disable=count < 2 or None):
        handle(file, answer)
        failed += isinstance(answer, str)
    if failed:
        print(f"vitserve: {failed} of {count} files have no {name}", file=sys.stderr)  # noqa: T201
    return int(failed > 0)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an `OSError` that writing this file raises into an `InputError` of one line."""
    try:
        yield
    except OSError as error:
        raise InputError("output", f"{path}: cannot be written: {error.strerror or error}") from None


def read_photo(file: Path, region: Region, size: int | None, settings: Settings) -> tuple[NDArray[np.uint8], Region]:
    """Decode the whole upright photo in a file, and say where in it `region` lies.

    Args:
        region: in pixels of the photo as it is stored.
        size: longer side of the result in pixels, at most; None: as `model.images.photo.upright_photo`.

    Raises:
        ImageError: the file cannot be decoded.
        OSError: the file cannot be read.
    """
    return upright_photo(
        file.read_bytes(), region, size, max_pixels=settings.max_image_pixels, scaled_decode=settings.scaled_decode
    )
