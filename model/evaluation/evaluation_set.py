"""Labelled pictures to measure a model on, as the files that a user would send.

CIFAR-10's are offered in variants, too: enlarged and compressed, turned by Exif, without colour. A model that is right
about the files of its data set is of little use if it is wrong about the same pictures after a phone and a web page
have had them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from model.data import cifar10
from model.data.datasets import is_cifar10
from model.data.image_folder import find_pictures
from model.errors import DatasetError

ENLARGED_SIDE: Final = 512
"""Longer side of the enlarged pictures in pixels (bicubic)."""
JPEG_QUALITY: Final = 85
"""Quality of the JPEGs."""

_ORIENTATION_TAG: Final = 274
_STORED_AS: Final = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
"""How a camera stores an upright picture, by Exif orientation (6: to be turned clockwise by 90 degrees)."""

Upload = Callable[[NDArray[np.uint8], int], bytes]
"""Takes uint8 [H, W, 3] and the picture's number; returns the bytes of a file."""


def as_png(pixels: NDArray[np.uint8], number: int = 0) -> bytes:
    """Encode a picture as it is; PNG loses nothing."""
    return _encoded(Image.fromarray(np.ascontiguousarray(pixels)), "png")


def as_jpeg(pixels: NDArray[np.uint8], number: int = 0) -> bytes:
    """Enlarge a picture to `ENLARGED_SIDE` and encode it as a JPEG."""
    return _encoded(_enlarged(pixels), "jpeg")


def as_turned_jpeg(pixels: NDArray[np.uint8], number: int) -> bytes:
    """Encode as `as_jpeg`, but with the picture stored turned and its Exif orientation: 3, 6 and 8 in turn."""
    orientation = tuple(_STORED_AS)[number % len(_STORED_AS)]
    exif = Image.Exif()
    exif[_ORIENTATION_TAG] = orientation
    return _encoded(_enlarged(pixels).transpose(_STORED_AS[orientation]), "jpeg", exif=exif.tobytes())


def as_grey_jpeg(pixels: NDArray[np.uint8], number: int = 0) -> bytes:
    """Enlarge a picture to `ENLARGED_SIDE` and encode it as a JPEG of a single channel."""
    return _encoded(_enlarged(pixels).convert("L"), "jpeg")


UPLOADS: Final[Mapping[str, Upload]] = {
    "as stored, PNG": as_png,
    f"{ENLARGED_SIDE} px, JPEG {JPEG_QUALITY}": as_jpeg,
    f"{ENLARGED_SIDE} px, JPEG {JPEG_QUALITY}, turned by Exif": as_turned_jpeg,
    f"{ENLARGED_SIDE} px, JPEG {JPEG_QUALITY}, greyscale": as_grey_jpeg,
}
"""The variants that are measured; the first are the pictures as they are."""


@dataclass(frozen=True)
class EvaluationSet:
    """Labelled pictures as files.

    Attributes:
        source: as the user wrote it, for messages.
        split: `test`, `validation`, or empty where the data are not split.
        names: names of the classes, in index order.
        labels: int64 [N], indices of `names`.
        upload, name: take a picture's number; return its file's bytes, thread-safe, and what a message calls it.
        variants: the same pictures as users send them (see `UPLOADS`), by name; empty where not offered.
    """

    source: str
    split: str
    names: tuple[str, ...]
    labels: NDArray[np.int64]
    upload: Callable[[int], bytes]
    name: Callable[[int], str]
    variants: Mapping[str, Callable[[int], bytes]]

    def __len__(self) -> int:
        return len(self.labels)

    def truth(self, labels: Sequence[str], model: str) -> NDArray[np.int64]:
        """Return the right class of each picture as an index of the model's labels: int64 [N].

        Args:
            labels: the model's, in index order; it may know more classes than there are here.
            model: its name, for messages.

        Raises:
            DatasetError: a class that the model does not know, or knows twice.
        """
        unknown = [name for name in self.names if list(labels).count(name) != 1]
        if unknown:
            raise DatasetError(
                f"{self.source}: classes that are not those of the model {model}, by name: "
                f"{', '.join(unknown[:5])}{', …' if len(unknown) > 5 else ''}"
            )
        return np.array([list(labels).index(name) for name in self.names], dtype=np.int64)[self.labels]


def open_evaluation_set(root: Path) -> EvaluationSet:
    """Open CIFAR-10's test set, or the test set (else the validation set, else all) of a folder of classes.

    Raises:
        DatasetError: neither, or not readable.
    """
    if is_cifar10(root):
        return _cifar10(root)
    folder = find_pictures(root)
    split, files = "", folder.train
    for name, given in (("validation", folder.validation), ("test", folder.test)):
        if given is not None:
            split, files = name, given

    def read(number: int) -> bytes:
        path = files.paths[number]
        try:
            return path.read_bytes()
        except OSError as error:
            raise DatasetError(f"{path}: cannot be read: {error.strerror}") from error

    return EvaluationSet(
        str(root), split, folder.labels, files.labels, read, lambda number: str(files.paths[number]), {}
    )


def _cifar10(root: Path) -> EvaluationSet:
    names, images = cifar10.read_labels(root), cifar10.read_test(root)

    def made_by(make: Upload) -> Callable[[int], bytes]:
        return lambda number: make(images.pixels[number].transpose(1, 2, 0), number)

    variants = {name: made_by(make) for name, make in UPLOADS.items()}
    return EvaluationSet(str(root), "test", names, images.labels, made_by(as_png), "test image {}".format, variants)


def _enlarged(pixels: NDArray[np.uint8]) -> Image.Image:
    picture = Image.fromarray(np.ascontiguousarray(pixels))
    factor = ENLARGED_SIDE / max(picture.size)
    size = (round(picture.width * factor), round(picture.height * factor))
    return picture.resize(size, Image.Resampling.BICUBIC)


def _encoded(picture: Image.Image, kind: str, exif: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, quality=JPEG_QUALITY, exif=exif)
    return buffer.getvalue()
