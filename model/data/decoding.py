"""Decoding of picture files to arrays, once and in parallel, by the same code that decodes uploads."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from stat import S_ISREG
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from model.config import PreprocessConfig
from model.data.image_folder import PictureFiles
from model.data.labelled_images import Images, PixelStorage
from model.errors import DatasetError, ImageError
from model.images.preprocess import preprocess

_LISTED_FILES: Final = 20
"""Number of bad files that a message names; the rest is counted."""


class Decoder:
    """Decodes files and collects their errors.

    Attributes:
        bad: (path, reason) of every file that is no picture.
        digests: of the bytes of each file that was decoded.
    """

    def __init__(self, *, progress: bool = True) -> None:
        self.progress = progress
        self.bad: list[tuple[Path, str]] = []
        self.digests: dict[Path, bytes] = {}

    def decode(self, files: PictureFiles, config: PreprocessConfig, storage: PixelStorage) -> Images:
        """Decode files as a model with this preprocessing sees them; a bad file leaves its place undefined.

        Raises:
            DatasetError: no room on the disk.
        """
        pixels = storage.allocate((len(files), len(config.mean), *config.size))

        def keep(index: int, picture: NDArray[np.uint8]) -> None:
            pixels[index] = picture.transpose(2, 0, 1)

        self._run(files.paths, config, keep, "read")
        return Images(pixels, files.labels)

    def check(self, files: PictureFiles, config: PreprocessConfig) -> None:
        """Decode files, and keep nothing but their errors."""
        self._run(files.paths, config, lambda index, picture: None, "check")

    def refuse_bad(self, root: Path) -> None:
        """Raise DatasetError if there was any bad file so far; it names them and what is wrong with each."""
        if not self.bad:
            return
        self.bad.sort()
        named = [f"  {path}: {reason}" for path, reason in self.bad[:_LISTED_FILES]]
        more = [f"  and {len(self.bad) - _LISTED_FILES} more"] if len(self.bad) > _LISTED_FILES else []
        count = f"{len(self.bad)} file{'s' * (len(self.bad) > 1)}"
        raise DatasetError("\n".join([f"{root}: {count} in class folders cannot be read as pictures:", *named, *more]))

    def _run(
        self, paths: Iterable[Path], config: PreprocessConfig, keep: Callable[[int, NDArray[np.uint8]], None], name: str
    ) -> None:
        def work(index: int, path: Path) -> None:
            try:
                data = _read(path)
                keep(index, preprocess(data, config))
            except (ImageError, OSError) as error:
                self.bad.append((path, (error.strerror if isinstance(error, OSError) else None) or str(error)))
            else:
                self.digests[path] = hashlib.blake2b(data, digest_size=16).digest()

        pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
        try:
            futures = [pool.submit(work, index, path) for index, path in enumerate(paths)]
            off = None if self.progress else True
            for future in tqdm(as_completed(futures), total=len(futures), desc=name, unit="img", disable=off):
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)  # an interruption does not wait for a million files


def _read(path: Path) -> bytes:
    # A pipe or a device would block, or never end.
    if not S_ISREG(path.stat().st_mode):
        raise OSError(0, "not a regular file")
    return path.read_bytes()
