"""What the model gives for files, in-process, for subcommands that ask the same of each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from model.errors import ImageError
from model.prediction import Outputs, RequestedOutputs
from service.cli.image_files import read_pixels
from service.engine.messages import ModelInfo
from service.settings import Settings

if TYPE_CHECKING:
    from model.runtime.predictor import Predictor


def predict_files(
    files: Sequence[Path], requested: RequestedOutputs, predictor: Predictor, info: ModelInfo, settings: Settings
) -> Iterator[tuple[Path, Outputs | str]]:
    """Yield each file with what was asked of it, or with why it cannot be read or decoded.

    Files are decoded on all cores, and computed in the largest batches.

    Raises:
        RuntimeError: as torch raises it.
    """

    def decode(file: Path) -> NDArray[np.uint8] | str:
        try:
            return read_pixels(file, info.preprocess, settings)
        except (ImageError, OSError) as error:
            return str(error)

    remaining = iter(files)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        while chunk := list(islice(remaining, predictor.max_batch)):
            decoded = list(pool.map(decode, chunk))
            good = [pixels for pixels in decoded if not isinstance(pixels, str)]
            outputs = iter(predictor.predict(np.stack(good), requested) if good else ())
            for file, pixels in zip(chunk, decoded, strict=True):
                yield file, pixels if isinstance(pixels, str) else next(outputs)
