"""Decoding and resizing on the device: JPEGs in, rows of a batch of uint8 images out.

The picture is what `model.images.preprocess` makes on the CPU, up to what two decoders and two resamplers differ in: it
is resized by the same filter to the same size, turned upright and cropped at the same pixel. Three things differ. The
decoder's arithmetic is its own; nothing is decoded at a smaller scale; and torch rounds once where Pillow rounds after
each of two passes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol

import torch.nn.functional as F
from torch import Tensor

from model.config import PreprocessConfig
from model.errors import DeviceError
from model.images.preprocess import resized_size
from model.images.region import first_pixel
from model.images.resize import passes_rows_first
from model.prediction import EncodedPicture
from model.runtime.backend import first_line

logger = logging.getLogger(__name__)

_FILTERS: Final = ("bilinear", "bicubic")
"""What torch resizes by with antialiasing, as Pillow does."""

_PIXELS_AT_ONCE: Final = 64_000_000
"""Of pictures that are decoded together, 3 bytes each; while one is resized, it takes 12 more a pixel."""

_AXES: Final = {1: (), 2: (1,), 3: (0, 1), 4: (0,), 5: (), 6: (1,), 7: (0, 1), 8: (0,)}
"""Axes of [rows, columns] along which a picture of each Exif orientation is mirrored; from 5 on, once they are
swapped."""

_FAILURES: Final = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, BufferError, MemoryError)
"""What a library of compiled code raises where it fails; the CPU then decodes its pictures."""


class PictureDecoder(Protocol):
    """A device's decoder of JPEGs; several threads may ask it at once.

    Attributes:
        name: the library, with its version.
    """

    name: str

    def decode(self, files: Sequence[bytes]) -> Sequence[Tensor | None]:
        """Return each picture as it is stored, uint8 [H, W, 3] on the device, or None if it does not decode.

        A tensor is complete when the current stream has come that far, and its memory may be used again on that stream
        only, once nobody holds it.

        Raises:
            RuntimeError, ValueError, MemoryError: none of them decodes.
        """


class DevicePreprocess:
    """Makes a model's input of JPEGs, on the device.

    Raises:
        DeviceError: the checkpoint's preprocessing is not one that a device does.
    """

    def __init__(self, decoder: PictureDecoder, config: PreprocessConfig) -> None:
        if config.interpolation not in _FILTERS:
            wanted = " and ".join(_FILTERS)
            raise DeviceError(f"decode 'device': it resizes {wanted}, and this checkpoint wants {config.interpolation}")
        if len(config.mean) != 3:
            raise DeviceError("decode 'device': it makes pictures of three channels, and this checkpoint takes one")
        self.decoder = decoder
        self._config = config

    def fill(self, pictures: Mapping[int, EncodedPicture], out: Tensor) -> set[int]:
        """Write pictures into their rows of uint8 [B, H, W, C] on the device; return which rows could not be made."""
        failed: set[int] = set()
        for rows in _groups(pictures):
            for row, decoded in zip(rows, self._decode([pictures[row].data for row in rows]), strict=True):
                if decoded is None or not self._resize(decoded, pictures[row], out[row]):
                    failed.add(row)
        return failed

    def _decode(self, files: Sequence[bytes]) -> Iterator[Tensor | None]:
        """Yield each picture and let go of it, so that its memory is free once it is resized."""
        try:
            found = list(self.decoder.decode(files))
            if len(found) != len(files):
                raise RuntimeError(f"{len(found)} pictures of {len(files)} files")
        except _FAILURES as error:  # if it is the device's, computing fails, too
            logger.warning("%d pictures were not decoded by the device: %s", len(files), first_line(error))
            found = [None] * len(files)
        found.reverse()
        while found:
            yield found.pop()

    def _resize(self, decoded: Tensor, picture: EncodedPicture, out: Tensor) -> bool:
        if decoded.shape != (*picture.size[::-1], 3):
            logger.warning("a picture of %d x %d was decoded to %s", *picture.size, tuple(decoded.shape))
            return False
        try:
            self.resize(decoded, picture.orientation, out)
        except RuntimeError as error:  # out of memory, or a scale that the kernel does not take
            logger.warning("a picture was not resized by the device: %s", first_line(error))
            return False
        return True

    def resize(self, decoded: Tensor, orientation: int, out: Tensor) -> None:
        """Write a picture, uint8 [rows, columns, 3] as it is stored, into uint8 [H, W, 3] of the model's size.

        Raises:
            RuntimeError: as torch raises it.
        """
        config, swapped = self._config, orientation >= 5
        rows, columns = decoded.shape[:2]
        width, height = resized_size(*((rows, columns) if swapped else (columns, rows)), config)
        sizes = (width, height) if swapped else (height, width)
        upright = (rows, columns) if swapped else (columns, rows)
        small = decoded.permute(2, 0, 1).unsqueeze(0).float()
        for axis in (2, 3) if passes_rows_first(upright, (width, height)) != swapped else (3, 2):
            size = [*small.shape[2:]]
            size[axis - 2] = sizes[axis - 2]
            small = F.interpolate(small, size=size, mode=config.interpolation, antialias=True)
            small = small.add_(0.5).floor_().clamp_(0, 255)  # a half goes up, as in Pillow
        small = small[0].permute(1, 2, 0)
        if swapped:
            small = small.transpose(0, 1)
        small = small.flip(_AXES[orientation])
        top, left = (
            first_pixel(made, wanted, config.crop_rounding)
            for made, wanted in zip((height, width), config.size, strict=True)
        )
        seen = small[max(0, top) : max(0, top) + config.size[0], max(0, left) : max(0, left) + config.size[1]]
        if seen.shape != out.shape:  # a border
            for channel, mean in enumerate(config.mean):
                out[..., channel].fill_(round(255 * mean))
            out = out[max(0, -top) :, max(0, -left) :][: seen.shape[0], : seen.shape[1]]
        out.copy_(seen)


def _groups(pictures: Mapping[int, EncodedPicture]) -> Iterator[list[int]]:
    """Yield the pictures' rows in groups that are decoded together."""
    group: list[int] = []
    size = 0
    for row, picture in pictures.items():
        pixels = math.prod(picture.size)
        if group and size + pixels > _PIXELS_AT_ONCE:
            yield group
            group, size = [], 0
        group.append(row)
        size += pixels
    if group:
        yield group
