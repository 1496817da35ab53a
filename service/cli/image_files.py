"""Image files as the subcommands take them, and what a model of this process gives for each.

A file's answer is a value, or a text that says why there is none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from tqdm import tqdm

from model.config import PreprocessConfig
from model.errors import ImageError, InputError
from model.images.preprocess import ModelInput, model_input
from model.outputs import Outputs, RequestedOutputs
from service.engine.messages import ModelInfo
from service.settings import Settings

if TYPE_CHECKING:
    from model.runtime.predictor import Predictor

_Answer = TypeVar("_Answer")

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


def read_input(data: bytes, config: PreprocessConfig, settings: Settings) -> ModelInput:
    """Decode a file's bytes into a picture of the model's input size, within the limits of the settings.

    Raises:
        ImageError: it cannot be decoded.
    """
    return model_input(data, config, max_pixels=settings.max_image_pixels, scaled_decode=settings.scaled_decode)


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
            return read_input(file.read_bytes(), info.preprocess, settings)
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
                if not all(each.finite for each in own):
                    yield file, "the model gives no finite score for this picture"
                    continue
                try:
                    result: _Answer | str = answer(file, picture, own)
                except (ImageError, OSError) as error:
                    result = str(error)
                yield file, result


def report_failure(file: Path, reason: str) -> None:
    """Print a line on stderr, above the progress bar: this file has no answer."""
    tqdm.write(f"vitserve: {file}: {reason}", file=sys.stderr)


def handle_answers(
    answers: Iterable[tuple[Path, _Answer | str]],
    count: int,
    handle: Callable[[Path, _Answer], object],
    name: str,
    *,
    failure: Callable[[Path, str], object] = report_failure,
) -> int:
    """Call `handle` with each file and its answer, and show progress; return 1 if any file has none.

    Args:
        count: of all files.
        name: what an answer is called in the line that says how many files have none.
        failure: called with each file without an answer, and why it has none.
    """
    failed = 0
    for file, answer in tqdm(answers, total=count, unit="image", disable=count < 2 or None):
        if isinstance(answer, str):
            failed += 1
            failure(file, answer)
        else:
            handle(file, answer)
    if failed:
        print(f"vitserve: {failed} of {count} files have no {name}", file=sys.stderr)  # noqa: T201
    return int(failed > 0)


def require_empty(folder: Path) -> None:
    """Raise `InputError` where something else than an empty folder is there."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError("output", f"{folder}: exists and is not an empty folder")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an `OSError` that writing this file raises into an `InputError` of one line."""
    try:
        yield
    except OSError as error:
        raise InputError("output", f"{path}: cannot be written: {error.strerror or error}") from None
